# SPDX-License-Identifier: Apache-2.0
"""Outputs that are no plain tensors, graphs of graphs, and gradients asked for in other ways than backward()."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hyper_parallel import fully_shard
from hyper_parallel.core.errors import OperandError, ParamStateError
from hyper_parallel.testing import distributed
from tests.torch.fully_shard.support import (
    assert_same,
    assert_sharded,
    full,
    full_grads,
    live_full_bytes,
    mean_grads,
    mesh_1d,
)


@dataclasses.dataclass
class Out:
    logits: torch.Tensor
    extra: Any = None


class Box:
    def __init__(self, value: torch.Tensor) -> None:
        self.value = Out(value)


class Layer(nn.Module):
    """Hands its result on in one of several ways."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)
        self.kind = kind
        self.held: Any = None

    def forward(self, x: torch.Tensor) -> Any:
        y = torch.tanh(self.linear(x))
        match self.kind:
            case "dataclass":
                return Out(y)
            case "object":
                return Box(y)
            case "dict":
                return {"y": [y]}
        self.held = y
        return None if self.kind == "nothing" else y.detach()

    def result(self, out: Any) -> torch.Tensor:
        match self.kind:
            case "dataclass":
                return out.logits
            case "object":
                return out.value.logits
            case "dict":
                return out["y"][0]
        return self.held


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(kind) for _ in range(3))

    def forward(self, x: torch.Tensor) -> Out:
        for layer in self.layers:
            x = layer.result(layer(x))
        return Out(x)


def mine(num: int = 4) -> torch.Tensor:
    return torch.randn(num, 5, generator=torch.Generator().manual_seed(dist.get_rank()))


@pytest.mark.parametrize("reshard", [True, None])
@pytest.mark.parametrize("kind", ["dataclass", "object", "dict", "attribute", "nothing"])
@distributed(2)
def test_results_that_are_handed_on_in_other_ways_than_as_tensors(kind: str, reshard: bool | None) -> None:
    torch.manual_seed(0)
    model, plain = Model(kind), Model(kind)
    plain.load_state_dict(model.state_dict())
    for layer in model.layers:
        fully_shard(layer, mesh=mesh_1d(), reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh_1d(), reshard_after_forward=reshard)
    for module in (model, plain):
        for _ in range(2):
            module(mine()).logits.square().sum().backward()
    assert_same(full_grads(model), mean_grads(plain))
    for layer in model.layers:
        layer.held = None
    assert_sharded(model)


@distributed(2)
def test_what_was_kept_for_a_backward_that_never_came_is_freed_by_the_next_step() -> None:
    torch.manual_seed(0)
    model = Model("attribute")
    for layer in model.layers:
        fully_shard(layer, mesh=mesh_1d())
    fully_shard(model, mesh=mesh_1d())
    for _ in range(3):
        model(mine())
        assert sum(1 for size in live_full_bytes(model) if size) <= 3
    with torch.no_grad():
        model(mine())
    assert live_full_bytes(model) == [0] * 4


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 1))


def wrapped(model: nn.Sequential) -> nn.Sequential:
    for i in (0, 2, 4):
        fully_shard(model[i], mesh=mesh_1d(), reshard_after_forward=True)
    return fully_shard(model, mesh=mesh_1d())


@distributed(2)
def test_a_gradient_penalty() -> None:
    model, plain = wrapped(net()), net()
    for module in (model, plain):
        for _ in range(2):
            x = mine().requires_grad_()
            out = module(x).sum()
            (slope,) = torch.autograd.grad(out, x, create_graph=True)
            (out + slope.square().sum()).backward()
    # The last bias has no part in the slope, its gradient comes from `out` alone.
    assert_same(full_grads(model), mean_grads(plain))
    assert_sharded(model)


@distributed(2)
def test_gradients_with_a_graph_are_refused_rather_than_cut_off() -> None:
    model = wrapped(net())
    loss = model(mine()).square().sum()
    with pytest.raises(ParamStateError, match=r'create_graph=True.*"4.bias"'):
        loss.backward(create_graph=True)
    assert_sharded(model)


@distributed(2)
def test_autograd_grad_of_parameters_names_the_way_out() -> None:
    model = wrapped(net())
    with pytest.raises(OperandError, match=r"fully_shard.*backward\(\)"):
        torch.autograd.grad(model(mine()).sum(), list(model.parameters()))


@distributed(2)
def test_autograd_grad_of_inputs() -> None:
    model, plain = wrapped(net()), net()
    for module in (model, plain):
        x = mine().requires_grad_()
        module.slope = torch.autograd.grad(module(x).sum(), x)[0]
    torch.testing.assert_close(model.slope, plain.slope)
    assert all(p.grad is None for p in model.parameters())
    assert_sharded(model)


@distributed(2)
def test_a_graph_kept_and_used_twice() -> None:
    model, plain = wrapped(net()), net()
    for module in (model, plain):
        loss = module(mine()).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
    assert_same(full_grads(model), mean_grads(plain))


@distributed(2)
def test_what_is_written_into_full_parameters_by_hand_is_kept() -> None:
    model = wrapped(net())
    before = copy.deepcopy({n: full(p) for n, p in model.named_parameters()})
    model[0].unshard()
    with torch.no_grad():
        model[0].weight.mul_(2)
        model[0].weight[3] = 7
    model[0].reshard()
    expected = before | {"0.weight": before["0.weight"] * 2}
    expected["0.weight"][3] = 7
    assert_same({n: full(p) for n, p in model.named_parameters()}, expected, rtol=0, atol=0)
    model[0].unshard()
    assert model[0].weight[3, 0] == 7
    model[0].reshard()
