# SPDX-License-Identifier: Apache-2.0
"""What a plan says of inputs and outputs reaches them however they are passed."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
from torch import nn

from hyper_parallel import DTensor, ShardingPlan, Style, shard_module
from hyper_parallel.testing import distributed
from tests.torch.dtensor.support import close, mesh_of, noise, whole


class Pair(NamedTuple):
    sum: Any
    difference: Any


class Both(nn.Module):
    def __init__(self, kind: str = "list") -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Any, y: Any, flag: bool = True) -> Any:
        out = (x + y, x - y)
        match self.kind:
            case "dict":
                return {"sum": out[0], "difference": out[1]}
            case "namedtuple":
                return Pair(*out)
            case "one":
                return out[0]
        return list(out)


class Outer(nn.Module):
    def __init__(self, both: Both, by_keyword: bool) -> None:
        super().__init__()
        self.both = both
        self.by_keyword = by_keyword
        self.seen: list[Any] = []

    def forward(self, x: Any, y: Any) -> Any:
        return self.both(flag=False, y=y, x=x) if self.by_keyword else self.both(x, y)


def run(style: Style, kind: str, by_keyword: bool) -> tuple[list[Any], list[str]]:
    """Outputs, and the layouts in which the inner forward saw its arguments."""
    model = Outer(Both(kind), by_keyword)
    seen = []
    inner = model.both.forward

    def forward(x: Any, y: Any, flag: bool = True) -> Any:
        seen.extend([str(v.layout) if isinstance(v, DTensor) else "plain" for v in (x, y)])
        return inner(x, y, flag)

    model.both.forward = forward
    shard_module(model, mesh_of(), ShardingPlan(modules={"both": style}))
    out = model(noise(4, 3), noise(4, 3, seed=1))
    values = list(out.values()) if kind == "dict" else [out] if kind == "one" else list(out)
    if kind == "namedtuple":
        assert isinstance(out, Pair)
    expected = [noise(4, 3) + noise(4, 3, seed=1), noise(4, 3) - noise(4, 3, seed=1)]
    for value, right in zip(values, expected, strict=False):
        close(whole(value), right)
    return values, seen


@pytest.mark.parametrize("by_keyword", [False, True])
@distributed(2)
def test_inputs_given_as_a_list(by_keyword: bool) -> None:
    # By keyword the order is that of the call: flag, y, x.
    specs = [None, (None, "a"), ("a", None)] if by_keyword else [("a", None), (None, "a")]
    _, seen = run(Style(inputs=specs), "list", by_keyword)
    assert seen == ["[a, -]", "[-, a]"]


@distributed(2)
def test_inputs_given_by_name() -> None:
    _, seen = run(Style(inputs={"x": ("a", None)}), "list", by_keyword=True)
    assert seen == ["[a, -]", "plain"]


@distributed(2)
def test_one_entry_is_for_the_first_tensor_by_keyword_too() -> None:
    _, seen = run(Style(inputs=("a", None)), "list", by_keyword=True)
    assert seen == ["plain", "[a, -]"]


@pytest.mark.parametrize("kind", ["list", "dict", "namedtuple", "one"])
@distributed(2)
def test_outputs_of_every_kind(kind: str) -> None:
    specs: Any = {"sum": ("a", None)} if kind == "dict" else ("a", None)
    values, _ = run(Style(outputs=specs), kind, by_keyword=False)
    assert str(values[0].layout) == "[a, -]"
