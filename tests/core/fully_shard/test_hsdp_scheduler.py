# SPDX-License-Identifier: Apache-2.0
"""The order of groups: what forward and backward reach next."""

from __future__ import annotations

from hyper_parallel.core.fully_shard.hsdp_scheduler import ForwardOrder


def forward(order: ForwardOrder[str], steps: str) -> list[str | None]:
    """A forward written as `root( a( ) b( ) )`; returns what `enter` said to prefetch."""
    order.begin()
    inside: list[str] = []
    said = []
    for step in steps.split():
        if step == ")":
            order.leave(inside.pop())
        else:
            inside.append(step.removesuffix("("))
            said.append(order.enter(inside[-1]))
    return said


def backward(order: ForwardOrder[str], start: str) -> list[str]:
    out = [start]
    while (following := order.before(out[-1])) is not None:
        out.append(following)
    return out


def test_forward_follows_the_last_iteration_as_long_as_it_keeps_to_it() -> None:
    order: ForwardOrder[str] = ForwardOrder()
    assert forward(order, "root( a( ) b( ) c( ) )") == [None] * 4
    assert forward(order, "root( a( ) b( ) c( ) )") == ["a", "b", "c", None]
    assert forward(order, "root( b( ) a( ) c( ) )") == ["a", None, None, None]


def test_backward_begins_with_the_outermost_and_its_last_inner_group() -> None:
    order: ForwardOrder[str] = ForwardOrder()
    forward(order, "root( a( ) b( ) c( ) )")
    assert backward(order, "root") == ["root", "c", "b", "a"]


def test_backward_reaches_an_outer_block_before_what_it_holds() -> None:
    order: ForwardOrder[str] = ForwardOrder()
    forward(order, "root( a( a1( ) a2( ) ) b( b1( ) ) )")
    assert backward(order, "root") == ["root", "b", "b1", "a", "a2", "a1"]


def test_a_group_used_twice_is_not_prefetched_for_itself() -> None:
    order: ForwardOrder[str] = ForwardOrder()
    forward(order, "root( a( ) b( ) b( ) )")
    assert order.before("b") == "a"
    assert order.before("never seen") is None
