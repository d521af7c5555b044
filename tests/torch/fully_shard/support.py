# SPDX-License-Identifier: Apache-2.0
"""What the fully_shard tests share: the wrapped model, the one-process oracle, and how to look at a group's memory."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hyper_parallel import DTensor, HSDPModule, fully_shard, init_device_mesh
from tests.torch.models import TinyGpt, batch

ROWS = 12
"""Rows of a global batch: 1, 2, 3 and 4 ranks divide it."""


def mesh_1d(size: int | None = None) -> Any:
    return init_device_mesh("cpu", (size or dist.get_world_size(),), mesh_dim_names=("dp",))


def mesh_2d(replicate: int, shard: int) -> Any:
    return init_device_mesh("cpu", (replicate, shard), mesh_dim_names=("replicate", "shard"))


def wrap_gpt(model: TinyGpt, **options: Any) -> TinyGpt:
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def my_rows(x: torch.Tensor, rank: int | None = None, num: int | None = None) -> torch.Tensor:
    """This rank's rows of a global batch."""
    rank = dist.get_rank() if rank is None else rank
    num = num or dist.get_world_size()
    return x.tensor_split(num)[rank]


def full(x: Any) -> torch.Tensor:
    """A copy of a whole tensor, wherever it lies."""
    return (x.detach().full_tensor() if isinstance(x, DTensor) else x.detach()).clone()


def full_grads(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: full(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def full_params(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: full(p) for name, p in model.named_parameters()}


def assert_same(
    actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], rtol: float = 1e-4, atol: float = 1e-5
) -> None:
    """Same names, same values; a failure names the tensor."""
    assert set(actual) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=rtol, atol=atol, msg=lambda text, n=name: f"{n}: {text}")


@dataclass
class Trace:
    """What a training run showed on the way."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    grads: list[dict[str, torch.Tensor]] = field(default_factory=list)
    params: dict[str, torch.Tensor] = field(default_factory=dict)


def train(
    model: nn.Module,
    rows: Callable[[torch.Tensor], torch.Tensor],
    steps: int = 3,
    micro_batches: int = 1,
    before_micro_batch: Callable[[int], None] = lambda _: None,
) -> Trace:
    """AdamW with clipping; each step's batch is cut into micro-batches whose gradients add up."""
    trace = Trace()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        optimizer.zero_grad()
        for micro in range(micro_batches):
            ids, targets = batch(step * micro_batches + micro, ROWS)
            before_micro_batch(micro)
            loss = model(rows(ids), rows(targets))
            loss.backward()
            mean = loss.detach().clone()
            if rows is my_rows:
                dist.all_reduce(mean)
                mean /= dist.get_world_size()
            trace.losses.append(mean.item())
        trace.grads.append(full_grads(model))
        trace.norms.append(float(full(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))))
        optimizer.step()
    trace.params = full_params(model)
    return trace


def oracle(model: nn.Module, **options: Any) -> Trace:
    """The same on the whole batch, in this process alone."""
    return train(copy.deepcopy(model), lambda x: x, **options)


def assert_same_trace(actual: Trace, expected: Trace) -> None:
    torch.testing.assert_close(torch.tensor(actual.losses), torch.tensor(expected.losses), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch.tensor(actual.norms), torch.tensor(expected.norms), rtol=1e-4, atol=1e-5)
    for mine, theirs in zip(actual.grads, expected.grads, strict=True):
        assert_same(mine, theirs)
    assert_same(actual.params, expected.params, rtol=1e-3, atol=1e-4)


def groups(model: nn.Module) -> list[Any]:
    """The parameter groups of a wrapped model, outermost first."""
    found = {id(m._hsdp()): m._hsdp() for m in model.modules() if isinstance(m, HSDPModule)}
    return list(found.values())


def live_full_bytes(model: nn.Module) -> list[int]:
    """Per group the bytes its full buffers hold now."""
    return [sum(unit.full_nbytes for unit in group.units) for group in groups(model)]


def assert_sharded(model: nn.Module) -> None:
    """Modules show DTensors, and no full buffer has memory."""
    assert all(isinstance(p, DTensor) for p in model.parameters())
    assert all(group.state.value == "sharded" for group in groups(model))
    if dist.get_world_size() > 1:
        assert live_full_bytes(model) == [0] * len(groups(model))


def mean_over_ranks(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    out = []
    for tensor in tensors:
        total = tensor.detach().clone()
        dist.all_reduce(total)
        out.append(total / dist.get_world_size())
    return out


def mean_grads(model: nn.Module) -> dict[str, torch.Tensor]:
    """Means over ranks of the gradients of a model that is not sharded, without parameters that have none."""
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return dict(zip(grads, mean_over_ranks(grads.values()), strict=True))
