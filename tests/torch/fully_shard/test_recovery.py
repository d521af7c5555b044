# SPDX-License-Identifier: Apache-2.0
"""Exceptions, threads and misuse: back to the sharded state, with nothing left over."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hyper_parallel import fully_shard
from hyper_parallel.core.errors import ParamStateError
from hyper_parallel.testing import distributed
from tests.torch.fully_shard.support import (
    ROWS,
    assert_same,
    assert_sharded,
    full_grads,
    groups,
    live_full_bytes,
    mesh_1d,
    mesh_2d,
    my_rows,
    wrap_gpt,
)
from tests.torch.models import batch, make_gpt


class Planted(Exception):
    pass


class FailInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise Planted("backward")


def fail_once(module: nn.Module, phase: str) -> Any:
    """Let the next call of `module` fail in the given phase."""

    def hook(module: nn.Module, args: Any, out: Any) -> Any:
        handle.remove()
        if phase == "forward":
            raise Planted("forward")
        return FailInBackward.apply(out)

    handle = module.register_forward_hook(hook)
    return handle


def step(model: nn.Module) -> torch.Tensor:
    ids, targets = (my_rows(t) for t in batch(0, ROWS))
    loss = model(ids, targets)
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize("reshard", [None, True, False])
@pytest.mark.parametrize("where", ["first block", "last block", "inside of a block", "after the blocks"])
@pytest.mark.parametrize("phase", ["forward", "backward"])
@distributed(2)
def test_an_exception_leads_back_to_the_sharded_state(phase: str, where: str, reshard: bool | None) -> None:
    model = wrap_gpt(make_gpt(), mesh=mesh_1d(), reshard_after_forward=reshard)
    step(model)
    expected = full_grads(model)
    model.zero_grad()
    places = {
        "first block": model.blocks[0],
        "last block": model.blocks[-1],
        "inside of a block": model.blocks[1].up,
        "after the blocks": model.norm,
    }
    fail_once(places[where], phase)
    with pytest.raises(Planted, match=phase):
        step(model)
    # What is left must not keep the next step from being right, nor anything gathered after it.
    model.zero_grad()
    step(model)
    assert_same(full_grads(model), expected)
    assert_sharded(model)


@pytest.mark.parametrize("phase", ["forward", "backward"])
@distributed(2)
def test_an_exception_leaves_nothing_gathered(phase: str) -> None:
    model = wrap_gpt(make_gpt(), mesh=mesh_1d())
    step(model)
    fail_once(model.blocks[1], phase)
    with pytest.raises(Planted, match=phase):
        step(model)
    assert live_full_bytes(model) == [0] * len(groups(model))
    assert_sharded(model)


@distributed(4)
def test_f03_switches_are_the_callers_after_an_exception_too() -> None:
    model = wrap_gpt(make_gpt(), mesh=mesh_2d(2, 2))
    step(model)
    expected = full_grads(model)
    model.zero_grad()
    model.set_requires_all_reduce(False)
    fail_once(model.blocks[0], "backward")
    with pytest.raises(Planted):
        step(model)
    model.set_requires_all_reduce(True)
    model.zero_grad()
    step(model)
    assert_same(full_grads(model), expected)


@distributed(2)
def test_an_exception_in_evaluation() -> None:
    model = wrap_gpt(make_gpt(), mesh=mesh_1d())
    ids, _ = batch(0, ROWS)
    with torch.no_grad():
        expected = model(my_rows(ids))
        fail_once(model.blocks[0], "forward")
        with pytest.raises(Planted):
            model(my_rows(ids))
        torch.testing.assert_close(model(my_rows(ids)), expected, rtol=0, atol=0)
    assert_sharded(model)


@distributed(1)
def test_f38_two_threads_gather_once() -> None:
    model = fully_shard(nn.Linear(64, 64), mesh=mesh_1d())
    group = model._hsdp()
    calls: list[int] = []
    unit = group.units[0]
    gather = unit.gather
    unit.gather = lambda: (calls.append(threading.get_ident()), gather())  # type: ignore[func-returns-value]
    start = threading.Barrier(8)
    failures: list[BaseException] = []

    def work() -> None:
        try:
            start.wait()
            group.unshard()
            assert group.state.value == "unsharded"
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len(calls) == 1
    group.reshard()


@distributed(2)
def test_f38_a_module_with_three_outputs() -> None:
    class Three(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return tuple(part(x) for part in self.parts)

    torch.manual_seed(0)
    model = fully_shard(Three(), mesh=mesh_1d(), reshard_after_forward=True)
    x = torch.ones(2, 4) * (dist.get_rank() + 1)
    a, b, c = model(x)
    (a.sum() + 2 * b.sum() + 3 * c.sum()).backward()
    for i, part in enumerate(model.parts):
        torch.testing.assert_close(part.weight.grad.full_tensor(), torch.full((4, 4), 3.0 * (i + 1)), msg=f"part {i}")
    assert_sharded(model)


@distributed(2)
def test_a_wait_on_a_handle_after_the_gather_was_used_does_no_harm() -> None:
    model = fully_shard(nn.Linear(4, 4), mesh=mesh_1d(), reshard_after_forward=True)
    handle = model.unshard(async_op=True)
    out = model(torch.ones(2, 4))
    out.sum().backward()
    handle.wait()
    model.reshard()
    assert_sharded(model)


def test_methods_of_a_module_that_is_not_wrapped_say_so() -> None:
    from hyper_parallel import HSDPModule

    class Bare(HSDPModule, nn.Linear):
        pass

    with pytest.raises(ParamStateError, match=r"Bare.*not wrapped.*fully_shard"):
        Bare(2, 2).reshard()


@distributed(2)
def test_forward_on_the_meta_device_names_the_parameter() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4))
    fully_shard(model[0], mesh=mesh_1d())
    fully_shard(model, mesh=mesh_1d())
    with pytest.raises(ValueError, match=r'"0.weight".*meta.*to_empty'):
        model(torch.ones(1, 4))


@distributed(2)
def test_a_forward_that_failed_on_meta_can_be_repaired() -> None:
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    fully_shard(model, mesh=mesh_1d())
    with pytest.raises(ValueError, match="meta"):
        model(torch.ones(1, 4))
    model.to_empty(device="cpu")
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(1)
    torch.testing.assert_close(model(torch.ones(1, 4)), torch.full((1, 4), 5.0))


@distributed(2)
def test_an_optimizer_built_before_wrapping_is_refused_at_the_first_forward() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for layer in model:
        fully_shard(layer, mesh=mesh_1d())
    fully_shard(model, mesh=mesh_1d())
    for _ in range(2):
        with pytest.raises(ParamStateError, match=r'"0.weight".*Build the optimizer after wrapping'):
            model(torch.ones(1, 4))
    del optimizer
    model(torch.ones(1, 4))


@distributed(2)
def test_parameters_kept_for_other_reasons_do_no_harm() -> None:
    model = nn.Linear(4, 4)
    kept = list(model.parameters())
    fully_shard(model, mesh=mesh_1d())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    assert len(kept) == 2
