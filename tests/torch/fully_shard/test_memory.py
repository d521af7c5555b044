# SPDX-License-Identifier: Apache-2.0
"""Counts of buffers, copies and collectives: no clocks."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hyper_parallel import fully_shard
from hyper_parallel.platform.torch.process_groups import pool
from hyper_parallel.testing import distributed
from tests.torch.fully_shard.support import groups, live_full_bytes, mesh_1d, mesh_2d


def chain(num: int = 6, width: int = 32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(num)))


def wrapped_chain(num: int = 6, reshard: bool | None = None, mesh: Any = None) -> nn.Sequential:
    model = chain(num)
    mesh = mesh or mesh_1d()
    for block in model:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    return fully_shard(model, mesh=mesh, reshard_after_forward=reshard)


@distributed(2)
def test_p03_full_storages_are_freed_by_wrapping() -> None:
    model = nn.Linear(1024, 1024)
    storages = [weakref.ref(p.untyped_storage()) for p in model.parameters()]
    tensors = [weakref.ref(p) for p in model.parameters()]
    fully_shard(model, mesh=mesh_1d())
    assert [ref() for ref in tensors] == [None, None]
    assert [ref() for ref in storages] == [None, None]
    (unit,) = model._hsdp().units
    held = {p._local.untyped_storage().data_ptr() for p in model.parameters() if p._local.numel()}
    assert held == {unit.shard.untyped_storage().data_ptr()}
    assert unit.shard.numel() < 1024 * 1025 * 0.51
    assert live_full_bytes(model) == [0]


@pytest.mark.parametrize("is_trained", [False, True])
@distributed(2)
def test_p03_a_deleted_model_is_freed(is_trained: bool) -> None:
    model = wrapped_chain()
    if is_trained:
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            model(torch.ones(2, 32)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        del optimizer
    refs = [weakref.ref(m) for m in model.modules()]
    refs += [weakref.ref(unit) for group in groups(model) for unit in group.units]
    del model
    gc.collect()
    assert [ref() for ref in refs] == [None] * len(refs)


def live_during(model: nn.Module, run: Any) -> list[int]:
    """Largest number of gathered groups seen when any block starts or ends, forward and backward."""
    seen: list[int] = []

    def look(*_: Any) -> None:
        seen.append(sum(1 for size in live_full_bytes(model) if size))

    handles = []
    for block in model:
        handles.append(block.register_forward_pre_hook(look))
        handles.append(block.register_forward_hook(look))
        handles.append(block[0].register_full_backward_hook(look))
    run()
    for handle in handles:
        handle.remove()
    return seen


@distributed(2)
def test_p05_at_most_the_current_and_one_prefetched_group_are_gathered() -> None:
    model = wrapped_chain(8, reshard=True)
    x = torch.ones(2, 32, requires_grad=True)
    model(x).sum().backward()
    seen = live_during(model, lambda: model(x).sum().backward())
    assert len(seen) == 24
    assert max(seen) == 2
    with torch.no_grad():
        assert max(live_during(model, lambda: model(x))) == 2
    assert live_full_bytes(model) == [0] * len(groups(model))


@distributed(2)
def test_p05_groups_kept_after_forward_go_with_their_backward() -> None:
    model = wrapped_chain(4, reshard=False)
    x = torch.ones(2, 32, requires_grad=True)
    model(x).sum().backward()
    seen = live_during(model, lambda: model(x).sum().backward())
    assert seen[7] == 4  # the end of the last block's forward
    assert seen[-1] <= 2
    assert live_full_bytes(model) == [0] * len(groups(model))


@distributed(2)
def test_the_full_buffer_of_a_unit_is_one_storage_for_life() -> None:
    model = wrapped_chain(2, reshard=True)
    x = torch.ones(2, 32, requires_grad=True)
    storages = []
    for _ in range(3):
        model(x).sum().backward()
        storages.append([unit._full.untyped_storage()._cdata for g in groups(model) for unit in g.units])
    assert storages[0] == storages[1] == storages[2]


class CopyCounter(TorchDispatchMode):
    """Numbers of elements of copies of at least `least` elements, and names of the ops that made them."""

    COPIES = (
        "aten::copy_",
        "aten::clone",
        "aten::cat",
        "aten::_to_copy",
        "aten::contiguous",
        "aten::split_with_sizes_copy",
    )

    def __init__(self, least: int) -> None:
        super().__init__()
        self.least = least
        self.copies: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.name().split(".")[0]
        if name in self.COPIES and isinstance(out, torch.Tensor) and out.numel() >= self.least:
            self.copies[name] += 1
        return out


def one_linear(width: int = 64) -> tuple[nn.Module, int]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width, bias=False))
    return model, width * width


@distributed(2)
def test_full_size_copies_are_one_per_gradient_and_none_per_parameter() -> None:
    model, numel = one_linear()
    fully_shard(model[0], mesh=mesh_1d(), reshard_after_forward=True)
    fully_shard(model, mesh=mesh_1d())
    x = torch.ones(2, 64)
    for _ in range(2):
        model(x).sum().backward()
        model.zero_grad()
    with CopyCounter(numel) as counter:
        model(x).sum().backward()
    assert counter.copies == {"aten::copy_": 1}


@distributed(1)
def test_one_rank_copies_at_most_the_gradient() -> None:
    model, numel = one_linear()
    fully_shard(model, mesh=mesh_1d(), reshard_after_forward=True)
    x = torch.ones(2, 64)
    with CopyCounter(numel) as counter:
        model(x).sum().backward()
    assert sum(counter.copies.values()) <= 1
    (unit,) = model._hsdp().units
    assert unit.full_nbytes == 0


@distributed(2)
def test_p03_zero_grad_frees_the_gradient_shards() -> None:
    model = wrapped_chain(2)
    model(torch.ones(2, 32)).sum().backward()
    storages = [weakref.ref(p.grad._local.untyped_storage()) for p in model.parameters()]
    model.zero_grad()
    gc.collect()
    assert [ref() for ref in storages] == [None] * len(storages)


@distributed(2)
def test_full_gradients_do_not_pile_up_until_the_end_of_a_group() -> None:
    """While backward reaches the first layer of a group, the gradients of the later ones are gone already."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
    fully_shard(model, mesh=mesh_1d())
    seen: list[int] = []

    class Look(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.grads: list[weakref.ref[Any]] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if func.name().startswith("aten::mm") and tuple(out.shape) == (64, 64):
                seen.append(sum(1 for ref in self.grads if ref() is not None))
                self.grads.append(weakref.ref(out.untyped_storage()))
            return out

    loss = model(torch.ones(2, 64)).sum()
    with Look():
        loss.backward()
    assert len(seen) == 4
    assert max(seen) <= 1


@distributed(2)
def test_p06_collectives_of_clipping_do_not_grow_with_the_number_of_parameters() -> None:
    counts = []
    for num in (2, 8):
        model = wrapped_chain(num)
        model(torch.ones(2, 32)).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        calls = Counter[str]()
        originals = {
            name: getattr(dist, name) for name in ("all_reduce", "all_gather_into_tensor", "all_to_all_single")
        }
        for name, original in originals.items():
            setattr(dist, name, counting(original, name, calls))
        try:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        finally:
            for name, original in originals.items():
                setattr(dist, name, original)
        counts.append(dict(calls))
    assert counts[0] == counts[1] == {"all_reduce": 1}


def counting(original: Any, name: str, calls: Counter[str]) -> Any:
    def run(*args: Any, **kwargs: Any) -> Any:
        calls[name] += 1
        return original(*args, **kwargs)

    return run


@distributed(4)
def test_f25_process_groups_do_not_grow_with_the_number_of_wrapped_modules() -> None:
    sizes = []
    for num in (2, 8):
        model = wrapped_chain(num, mesh=mesh_2d(2, 2))
        for _ in range(2):
            model(torch.ones(2, 32)).sum().backward()
        sizes.append(pool.info().size)
    assert sizes[0] == sizes[1]


@distributed(2)
def test_many_steps_leave_no_objects_behind() -> None:
    model = wrapped_chain(3)
    optimizer = torch.optim.AdamW(model.parameters())

    def run(steps: int) -> tuple[int, int]:
        for _ in range(steps):
            model(torch.ones(2, 32)).sum().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        gc.collect()
        tensors = sum(1 for x in gc.get_objects() if issubclass(type(x), torch.Tensor))
        return tensors, len(gc.get_objects())

    run(5)
    first = run(5)
    second = run(20)
    assert second[0] == first[0]
    assert abs(second[1] - first[1]) < 50
