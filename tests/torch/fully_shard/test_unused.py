# SPDX-License-Identifier: Apache-2.0
"""Parameters without a gradient: on all ranks they keep None, on some they count as zero there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hyper_parallel import fully_shard
from hyper_parallel.testing import distributed
from tests.torch.fully_shard.support import assert_same, full_grads, mean_over_ranks, mesh_1d, mesh_2d


class Picky(nn.Module):
    """Uses the layers it is told to; all in one group."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))

    def forward(self, x: torch.Tensor, which: list[int]) -> torch.Tensor:
        for i in which:
            x = torch.tanh(self.layers[i](x))
        return x


def rank_input() -> torch.Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(dist.get_rank()))


def means(model: nn.Module) -> dict[str, torch.Tensor]:
    """Means over ranks, with zeros where only this rank has none; without those that no rank has."""
    out = {}
    for name, p in model.named_parameters():
        has = torch.tensor(float(p.grad is not None))
        (mean,) = mean_over_ranks([torch.zeros_like(p) if p.grad is None else p.grad])
        dist.all_reduce(has)
        if has:
            out[name] = mean
    return out


def check(mesh: Any, which: list[Callable[[int], list[int]]], switch: str | None = None) -> None:
    """Backwards, each through the layers that `which` gives for a rank; with `switch` only the last reduces."""
    plain, model = Picky(), fully_shard(Picky(), mesh=mesh)
    x = rank_input()
    for _ in range(2):
        for number, layers in enumerate(which):
            if switch:
                getattr(model, switch)(number == len(which) - 1)
            for module in (plain, model):
                module(x, layers(dist.get_rank())).square().sum().backward()
        assert_same(full_grads(model), means(plain))
        model.zero_grad()
        plain.zero_grad()


@distributed(2)
def test_unused_on_all_ranks_means_none_as_with_torch_fsdp() -> None:
    from torch.distributed.fsdp import fully_shard as torch_fully_shard

    mesh = dist.device_mesh.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    results = []
    for wrap in (fully_shard, torch_fully_shard):
        model = Picky()
        wrap(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
        model(rank_input(), [0, 2]).sum().backward()
        assert [p.grad is None for p in model.parameters()] == [False, False, True, True, False, False]
        optimizer.step()
        results.append({name: p.detach().full_tensor() for name, p in model.named_parameters()})
        torch.testing.assert_close(results[-1]["layers.1.weight"], Picky().layers[1].weight.detach())
    assert_same(results[0], results[1])


@pytest.mark.parametrize("num", [0, 1])
@distributed(2)
def test_used_on_one_rank_only(num: int) -> None:
    check(mesh_1d(), [lambda rank: [0, 1] if rank == num else [0]])


@distributed(2)
def test_used_by_the_first_of_two_backwards() -> None:
    check(mesh_1d(), [lambda _: [0, 1], lambda _: [0]])


@distributed(2)
def test_used_by_a_backward_that_was_not_reduced() -> None:
    check(mesh_1d(), [lambda _: [0, 1], lambda _: [0]], "set_requires_gradient_sync")
    check(mesh_1d(), [lambda rank: [0, rank], lambda _: [0]], "set_requires_gradient_sync")


@pytest.mark.parametrize("switch", [None, "set_requires_gradient_sync", "set_requires_all_reduce"])
@distributed(4)
def test_used_by_one_replica_only(switch: str | None) -> None:
    check(mesh_2d(2, 2), [lambda rank: [0, 1] if rank == 2 else [0], lambda _: [0]], switch)


@pytest.mark.parametrize("size", [1, 2])
@distributed(2)
def test_hooks_of_an_unused_parameter_are_not_called(size: int) -> None:
    mesh = mesh_1d() if size == 2 else mesh_2d(2, 1)
    model = fully_shard(Picky(), mesh=mesh)
    called = []
    for name, p in model.named_parameters():
        p.register_hook(lambda grad, n=name: called.append(n))
        p.register_post_accumulate_grad_hook(lambda p, n=name: called.append(n))
    model(rank_input(), [1]).sum().backward()
    assert sorted(called) == sorted(["layers.1.weight", "layers.1.bias"] * 2)


@distributed(2)
def test_what_holds_a_gradient_keeps_it() -> None:
    model, plain = fully_shard(Picky(), mesh=mesh_1d()), Picky()
    x = rank_input()
    for which in ([0, 1], [0], [2]):
        for module in (model, plain):
            module(x, which).sum().backward()
    assert_same(full_grads(model), means(plain))
