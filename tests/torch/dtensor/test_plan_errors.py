# SPDX-License-Identifier: Apache-2.0
"""Plans and calls of `shard_module` that would quietly do something else than they say."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from hyper_parallel import (
    DTensor,
    ShardingPlan,
    Style,
    column_parallel,
    distribute_tensor,
    fully_shard,
    row_parallel,
    shard_module,
)
from hyper_parallel.core.errors import LayoutError, ParamStateError
from hyper_parallel.testing import distributed
from tests.torch.dtensor.support import close, error_of, mesh_of, noise, whole

PLAN = ShardingPlan(modules={"0": column_parallel("a"), "2": row_parallel("a")})


def net() -> nn.Sequential:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))
    model.register_buffer("scale", torch.ones(3))
    return model


@distributed(2)
def test_a_second_plan_that_says_otherwise_is_refused() -> None:
    mesh = mesh_of()
    model = shard_module(net(), mesh, PLAN)
    for plan in (ShardingPlan(modules={"0": row_parallel("a")}), ShardingPlan(parameters={"2.bias": ("a",)})):
        text = error_of(lambda plan=plan: shard_module(model, mesh, plan), LayoutError)
        assert "already" in text
        assert "one plan" in text
    assert model[0].weight.layout == mesh.layout("a", None)
    shard_module(model, mesh, PLAN)
    close(whole(model(noise(3, 4))), net()(noise(3, 4)).detach())


@distributed(2)
def test_after_fully_shard_it_is_refused() -> None:
    model = net()
    fully_shard(model[0], mesh=mesh_of())
    layout = model[0].weight.layout
    assert "Call shard_module first" in error_of(lambda: shard_module(model, mesh_of(), PLAN), ParamStateError)
    assert model[0].weight.layout == layout
    assert not isinstance(model[2].weight, DTensor)


@distributed(2)
def test_names_that_nothing_has_are_refused() -> None:
    for plan, part in (
        (ShardingPlan(modules={"0": Style({"wieght": ("a", None)})}), "'0.wieght' matches nothing"),
        (ShardingPlan(inputs={"0": {"inptu": ("a", None)}}), 'inputs of "0": the plan names "inptu"'),
    ):
        model = net()
        text = error_of(lambda model=model, plan=plan: shard_module(model, mesh_of(), plan), LayoutError)
        assert part in text
        assert not any(isinstance(p, DTensor) for p in model.parameters()), "changed before it was checked"
    text = error_of(lambda: shard_module(net(), mesh_of(), "colwise"), TypeError)  # type: ignore[arg-type]
    assert "plan='colwise'" in text
    assert "ShardingPlan" in text


class Pair(NamedTuple):
    x: Any
    y: Any


class Give(nn.Module):
    def __init__(self, kind: Callable[..., Any]) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Any, y: Any = None, **rest: Any) -> Any:
        return self.kind(x=x, y=x + 1)


def only_x(x: Any, y: Any) -> Any:
    return x


def both(x: Any, y: Any) -> Any:
    return (x, y)


@pytest.mark.parametrize(
    ("kind", "outputs", "part"),
    [
        (dict, {"z": ("a", None)}, '"z", which it does not return. Use "x", "y"'),
        (Pair, {"z": ("a", None)}, '"z", which it does not return. Use "x", "y"'),
        (both, {"x": ("a", None)}, "goes by keys, it is a tuple"),
        (only_x, {"x": ("a", None)}, "goes by keys, it is a tensor"),
        (both, [None, None, ("a", None)], "has 3 entries, it returns 2"),
    ],
)
@distributed(2)
def test_outputs_that_are_not_there_are_refused(kind: Any, outputs: Any, part: str) -> None:
    model = shard_module(Give(kind), mesh_of(), ShardingPlan(outputs={"": outputs}))
    x = distribute_tensor(noise(4, 3), mesh_of())
    assert part in error_of(lambda: model(x), LayoutError)


@distributed(2)
def test_by_name_and_by_place_is_the_same() -> None:
    plan = ShardingPlan(inputs={"": {"x": ("a", None), "other": (None, "a")}}, outputs={"": {"y": (None, "a")}})
    model = shard_module(Give(Pair), mesh_of(), plan)
    for out in (model(noise(4, 3)), model(x=noise(4, 3))):
        assert str(out.x.layout) == "[a, -]"
        assert str(out.y.layout) == "[-, a]"
        close(whole(out.y), noise(4, 3) + 1)


@pytest.mark.parametrize("kind", ["plain", "dtensor"])
@pytest.mark.parametrize("with_fsdp", [False, True])
@distributed(4)
def test_assigned_weights_lie_as_the_plan_says(kind: str, with_fsdp: bool) -> None:
    mesh = mesh_of(2, 2)
    plan = ShardingPlan(modules={"0": column_parallel("b"), "2": row_parallel("b")})
    model, other = shard_module(net(), mesh["b"], plan), net()
    if with_fsdp:
        fully_shard(model, mesh=mesh["a"])
    with torch.no_grad():
        for tensor in (*other.parameters(), *other.buffers()):
            tensor.mul_(2)
    layouts = {name: value.layout for name, value in model.state_dict().items()}
    given = copy.deepcopy(other.state_dict())
    if kind == "dtensor":
        given = {
            name: distribute_tensor(value, layouts[name].mesh) if name != "scale" else value
            for name, value in given.items()
        }
    model.load_state_dict(given, assign=True)
    out = model(noise(3, 4))
    close(whole(out), other(noise(3, 4)).detach())
    assert {name: value.layout for name, value in model.state_dict().items()} == layouts
    out.sum().backward()
    other(noise(3, 4)).sum().backward()
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        close(whole(a.grad), b.grad)


@distributed(2)
def test_an_assigned_model_on_meta() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))
    shard_module(model, mesh_of(), PLAN)
    other = net()
    state = {name: value for name, value in other.state_dict().items() if name != "scale"}
    model.load_state_dict(state, assign=True)
    assert str(model[0].weight.layout) == "[a, -]"
    close(whole(model(noise(3, 4))), other(noise(3, 4)).detach())
