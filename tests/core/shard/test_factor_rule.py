# SPDX-License-Identifier: Apache-2.0
"""Rule strings: what they mean, and what is said of those that mean nothing."""

from __future__ import annotations

import pytest

from hyper_parallel.core.errors import ShapeError
from hyper_parallel.core.placement_types import ReduceOp
from hyper_parallel.core.shard.factor_rule import LINEAR, Factor, Kind, parse_rule


def test_marks() -> None:
    rule = parse_rule("a b^ c~, c~ d+ e+max -> a b 1")
    assert rule.operands == (("a", "b", "c"), ("c", "d", "e"))
    assert rule.outputs == (("a", "b", "1"),)
    assert rule.factors == {
        "b": Factor(Kind.WHOLE),
        "c": Factor(Kind.INDEX),
        "d": Factor(Kind.CONTRACT, ReduceOp.SUM),
        "e": Factor(Kind.CONTRACT, ReduceOp.MAX),
    }
    assert (rule.terms, rule.pending) == (None, frozenset())


@pytest.mark.parametrize("op", ["sum", "max", "min", "prod", "all", "any"])
def test_reductions(op: str) -> None:
    assert parse_rule(f"a+{op} -> ").factors["a"] == Factor(Kind.CONTRACT, ReduceOp(op))


def test_scalars_and_several_outputs() -> None:
    rule = parse_rule(", a -> a, , 1 a")
    assert rule.operands == ((), ("a",))
    assert rule.outputs == (("a",), (), ("1", "a"))


def test_terms_make_a_rule_linear() -> None:
    rule = parse_rule("i+, o i+, o -> o", terms="01 2")
    assert rule.terms == ((0, 1), (2,))
    assert rule.pending == LINEAR


@pytest.mark.parametrize(
    ("text", "terms", "what", "way_out"),
    [
        ("a b", None, "there is no '->'", "Write 'operands -> outputs'"),
        ("a -> b -> c", None, "more than one '->'", "Write 'operands -> outputs'"),
        ("a$ -> a", None, "cannot read 'a$'", "one of ^ ~ +"),
        ("1a -> 1a", None, "cannot read '1a'", "Use a name"),
        ("a+mean -> ", None, "cannot read 'a+mean'", "one of ^ ~ +"),
        ("(h d) -> h d", None, "cannot read '(h'", "Use a name"),
        ("a a -> a", None, "'a' occurs twice in 'a a'", "a name of its own"),
        ("... ... -> ...", None, "'...' occurs twice", "a name of its own"),
        ("a^, a+ -> ", None, "'a' is marked in two ways", "Give it one mark"),
        ("a -> b", None, "no operand has the output's 'b'", "Use names of the operands"),
        ("a -> ... a", None, "no operand has the output's '...'", "Use names of the operands"),
        ("a+ b -> a b", None, "'a' is summed over, yet in the output", "Take it out"),
        ("a b, b -> a b", "02", "terms '02' do not name each of the 2 operands once", "as in '01 2'"),
        ("a, a -> a", "0", "terms '0' do not name each", "in one term"),
        ("a, a -> a", "0 1 1", "terms '0 1 1' do not name each", "in one term"),
        ("a -> a", "x", "terms 'x' do not name each", "in one term"),
    ],
)
def test_errors_of_a_rule(text: str, terms: str | None, what: str, way_out: str) -> None:
    with pytest.raises(ValueError, match=r"^rule ") as caught:
        parse_rule(text, terms=terms)
    message = str(caught.value)
    assert repr(text) in message
    assert what in message
    assert way_out in message
    assert "\n" not in message


def test_leading_dims_align_right() -> None:
    rule = parse_rule("... m k+, ... k+ n -> ... m n", terms="01").bind([(2, 3, 4, 5), (3, 5, 6)])
    assert rule.operands == ((".2", ".1", "m", "k"), (".1", "k", "n"))
    assert rule.outputs == ((".2", ".1", "m", "n"),)


def test_no_leading_dims() -> None:
    rule = parse_rule("... i+, o i+ -> ... o").bind([(5,), (4, 5)])
    assert rule.operands == (("i",), ("o", "i"))
    assert rule.outputs == (("o",),)


def test_sizes_of_one_are_broadcast_only_against_larger_ones() -> None:
    rule = parse_rule("... , ... -> ...").bind([(1, 4), (3, 1)])
    assert rule.operands == (("1", ".1"), (".2", "1"))
    assert rule.outputs == ((".2", ".1"),)
    assert parse_rule("..., ... -> ...").bind([(1, 4), (1, 4)]).operands == ((".2", ".1"), (".2", ".1"))


def test_trailing_operands_may_be_missing() -> None:
    rule = parse_rule("... i+, o i+, o -> ... o", terms="01 2").bind([(2, 5), (4, 5)])
    assert rule.operands == ((".1", "i"), ("o", "i"))
    assert rule.terms == ((0, 1),)


@pytest.mark.parametrize(
    ("text", "shapes", "what"),
    [
        ("m k -> m", [(2, 3, 4)], "'m k' is written for an operand of 3 dims"),
        ("m k -> m", [(2,)], "'m k' is written for an operand of 1 dims"),
        ("... m k -> ... m", [(2,)], "'... m k' is written for an operand of 1 dims"),
        ("m -> m", [(2,), (2,)], "it has 1 operands, the call 2"),
    ],
)
def test_operands_that_do_not_fit(text: str, shapes: list[tuple[int, ...]], what: str) -> None:
    with pytest.raises(ShapeError) as caught:
        parse_rule(text).bind(shapes)
    assert repr(text) in str(caught.value)
    assert what in str(caught.value)
