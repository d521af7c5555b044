# SPDX-License-Identifier: Apache-2.0
"""Redistribution on real ranks: any pair of layouts with gradients, overlap, careful sums, what is kept."""

from __future__ import annotations

import contextlib
import gc
import itertools
import random
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import hyper_parallel
from hyper_parallel import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    Topology,
    cache_info,
    distribute_tensor,
    plan,
    redistribute_many,
    release_unused_groups,
    set_cache_limit,
)
from hyper_parallel.core.errors import CacheError, LayoutError, PartialError
from hyper_parallel.core.layout import live_meshes
from hyper_parallel.core.tensor_redistribution import execute
from hyper_parallel.platform.torch import process_groups
from hyper_parallel.platform.torch.autograd import avg_factor
from hyper_parallel.platform.torch.process_groups import pool
from hyper_parallel.testing import CommCounter, distributed
from hyper_parallel.testing.strategies import draw_layout
from tests.torch.dtensor.support import lay, layouts, mesh_of, noise

# -- values and gradients -----------------------------------------------------------------------------


def check_pair(full: torch.Tensor, src: Any, dst: Any, **options: Any) -> None:
    """Values, and the gradient of a weighted sum of the result, against the plain tensor.

    The gradient of an operand of an average is 1/n of that of the average.
    """
    x = lay(full.clone().requires_grad_(), src)
    y = x.redistribute(layout=dst, **options)
    assert y.layout is dst
    torch.testing.assert_close(y.detach().full_tensor(), full, atol=1e-5, rtol=1e-5)
    weight = noise(*full.shape, seed=3)
    (y * distribute_tensor(weight, src.mesh)).sum().backward()
    torch.testing.assert_close(x.grad.full_tensor() * avg_factor(src), weight, atol=1e-5, rtol=1e-5)


def check_random_pairs(mesh: Any, num: int, first_seed: int) -> None:
    for seed in range(first_seed, first_seed + num):
        random_ = random.Random(seed)
        ndim = random_.choice((1, 2, 3))
        shape = tuple(random_.choice((1, 2, 3, 4, 5, 6, 8)) for _ in range(ndim))
        src, dst = (draw_layout(random_.choice, mesh, shape, ragged=True, partial=False) for _ in range(2))
        free = [axis for axis in mesh.axis_names if src.dim_of(axis) is None and random_.random() < 0.6]
        src = src.with_partial(*free, op=random_.choice(("sum", "avg")))
        free = [axis for axis in mesh.axis_names if dst.dim_of(axis) is None and random_.random() < 0.3]
        dst = dst.with_partial(*free, op=random_.choice(("sum", "avg")))
        check_pair(noise(*shape, seed=seed), src, dst)


@pytest.mark.slow
@distributed(4)
def test_a_sample_of_random_pairs() -> None:
    check_random_pairs(mesh_of(2, 2), 170, 0)


@pytest.mark.slow
@distributed(8)
def test_a_sample_of_random_pairs_on_three_axes() -> None:
    check_random_pairs(mesh_of(2, 2, 2), 80, 1000)


@pytest.mark.slow
@distributed(6)
def test_a_sample_of_random_pairs_on_six_ranks() -> None:
    check_random_pairs(mesh_of(2, 3), 80, 2000)


@distributed(2)
def test_another_dtype_on_the_way() -> None:
    mesh = mesh_of()
    x = lay(noise(4, 6).requires_grad_(), mesh.layout("a", None))
    y = x.redistribute(placements=[Shard(1)], forward_dtype=torch.bfloat16)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.full_tensor(), noise(4, 6).bfloat16())
    z = x.redistribute(placements=[Replicate()], backward_dtype=torch.bfloat16)
    weight = noise(4, 6, seed=9)
    (z * distribute_tensor(weight, mesh)).sum().backward()
    assert x.grad.dtype == torch.float32
    torch.testing.assert_close(x.grad.full_tensor(), weight.bfloat16().float(), atol=1e-6, rtol=0)


@distributed(2)
def test_a_cap_on_memory_is_kept_or_refused() -> None:
    mesh = mesh_of()
    x = lay(noise(64, 64), mesh.layout("a", None))
    target = mesh.layout(None, "a")
    need = plan(x.layout, target, (64, 64)).peak_bytes()
    x.redistribute(layout=target, max_bytes=need)
    with pytest.raises(LayoutError, match=f"max_bytes is 100, the leanest plan holds {need} at once. Allow that many"):
        x.redistribute(layout=target, max_bytes=100)
    with pytest.raises(TypeError, match=r"chunked=...\): no such argument. Use one of deterministic"):
        x.redistribute(layout=target, chunked=True)


# -- overlap ------------------------------------------------------------------------------------------


@distributed(2)
def test_async_gives_the_same_and_its_gradient() -> None:
    mesh = mesh_of()
    full, weight = noise(5, 6), noise(5, 6, seed=8)
    for src, dst in itertools.product(layouts(mesh, 2), repeat=2):
        x = lay(full.clone().requires_grad_(), src)
        coming = x.redistribute_async(layout=dst)
        y = coming.wait()
        assert coming.wait() is y
        assert y.layout is dst
        torch.testing.assert_close(y.detach().full_tensor(), full, atol=1e-5, rtol=1e-5)
        (y * distribute_tensor(weight, mesh)).sum().backward()
        torch.testing.assert_close(x.grad.full_tensor(), weight, atol=1e-5, rtol=1e-5)


@distributed(2)
def test_async_sends_what_the_source_held_at_the_call() -> None:
    mesh = mesh_of()
    full = noise(512, 256)
    for src, dst in itertools.product(layouts(mesh, 2), repeat=2):
        x = lay(full, src)
        coming = x.redistribute_async(layout=dst)
        if dst is not src:
            x._local.fill_(float("nan"))
        del x
        gc.collect()
        torch.testing.assert_close(coming.wait().full_tensor(), full, atol=1e-4, rtol=1e-4)


@distributed(2)
def test_a_gradient_goes_to_the_source_as_it_was() -> None:
    mesh = mesh_of()
    leaf = lay(noise(4, 3).requires_grad_(), mesh.layout("a", None))
    x = leaf * 3
    coming = x.redistribute_async()
    x.mul_(0)
    coming.wait().sum().backward()
    torch.testing.assert_close(leaf.grad.full_tensor(), torch.full((4, 3), 3.0))


@distributed(4)
def test_nobody_has_to_wait() -> None:
    mesh = mesh_of(2, 2)
    src, dst = mesh.layout("a", None, partial={"b": "sum"}), mesh.layout(None, "a")
    steps = plan(src, dst, (64, 64)).num_collectives
    x = lay(noise(64, 64), src)
    with CommCounter() as comm:
        for i in range(5):
            coming = x.redistribute_async(layout=dst)
            if (dist.get_rank() + i) % 2:  # some ranks wait, some do not
                coming.wait()
            del coming
    assert comm.total == 5 * steps
    torch.testing.assert_close(x.full_tensor(), noise(64, 64), atol=1e-4, rtol=1e-4)


@distributed(4)
def test_many_go_together_in_as_many_rounds_as_the_longest_needs() -> None:
    mesh = mesh_of(2, 2)
    full, weight = noise(6, 8), noise(6, 8, seed=4)
    pairs = list(itertools.product(layouts(mesh, 2), repeat=2))[::7]
    xs = [lay(full.clone().requires_grad_(), src) for src, _ in pairs]
    waits: list[int] = []
    started = 0

    def spy(name: str, method: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal started
            started += 1
            pending = method(*args, **kwargs)
            inner = pending.wait

            class Watched:
                def wait(self) -> Any:
                    waits.append(started)
                    return inner()

            return Watched()

        return run

    collectives = hyper_parallel.get_platform().collectives
    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_reduce", "all_gather", "all_to_all"):
            patch.setattr(collectives, name, spy(name, getattr(collectives, name)), raising=False)
        ys = redistribute_many(xs, [dst for _, dst in pairs])
    # Every first round was under way before anybody waited.
    communicating = sum(plan(src, dst, (6, 8)).num_collectives > 0 for src, dst in pairs)
    assert waits[0] >= communicating - sum(src.partial != () for src, _ in pairs)
    for x, y, (_, dst) in zip(xs, ys, pairs, strict=True):
        assert y.layout is dst
        torch.testing.assert_close(y.detach().full_tensor(), full, atol=1e-5, rtol=1e-5)
        (y * distribute_tensor(weight, mesh)).sum().backward()
        torch.testing.assert_close(x.grad.full_tensor(), weight, atol=1e-5, rtol=1e-5)
    assert redistribute_many([], []) == []
    with pytest.raises(LayoutError, match=r"2 tensors, 1 layouts\. Give one layout for each"):
        redistribute_many(xs[:2], [None])


@distributed(4)
def test_a_pipeline_gives_the_sum() -> None:
    mesh = mesh_of(2, 2)
    src, dst = mesh.layout(None, None, partial={"a": "sum", "b": "avg"}), mesh.layout("b", None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(execute, "PIPELINE_BYTES", 32)
        hyper_parallel.core.tensor_redistribution.plan_cache.clear()
        for length in (8, 9, 13):
            with CommCounter() as comm:
                out = lay(noise(length, 3), src).redistribute(layout=dst)
            assert (comm.reduce_scatter, comm.all_reduce) == (execute.NUM_CHUNKS, execute.NUM_CHUNKS)
            torch.testing.assert_close(out.full_tensor(), noise(length, 3), atol=1e-5, rtol=1e-5)
    hyper_parallel.core.tensor_redistribution.plan_cache.clear()


# -- full tensors -------------------------------------------------------------------------------------


@distributed(2)
def test_full_tensor_async_with_gradients() -> None:
    mesh = mesh_of()
    x = lay(noise(5, 3).requires_grad_(), mesh.layout("a", None))
    coming = x.full_tensor_async(grad_placements=[Partial()])
    whole = coming.wait()
    assert type(whole) is torch.Tensor
    torch.testing.assert_close(whole.detach(), noise(5, 3))
    (whole * (dist.get_rank() + 1)).sum().backward()  # different work on every rank
    torch.testing.assert_close(x.grad.full_tensor(), torch.full((5, 3), 3.0))


@distributed(2)
def test_a_cached_full_tensor_is_given_until_something_changes() -> None:
    mesh = mesh_of()
    x = lay(noise(5, 3), mesh.layout("a", None))

    def count(work: Any) -> int:
        with CommCounter() as comm:
            work()
        return comm.total

    assert count(lambda: x.full_tensor(cache=True)) == 1
    assert count(lambda: x.full_tensor(cache=True)) == 0
    assert x.full_tensor(cache=True) is x.full_tensor(cache=True)
    x.mul_(2)
    assert count(lambda: x.full_tensor(cache=True)) == 1
    torch.testing.assert_close(x.full_tensor(cache=True), noise(5, 3) * 2)
    x.full_tensor(cache=True).zero_()  # the user's own tensor was changed
    torch.testing.assert_close(x.full_tensor(cache=True), noise(5, 3) * 2)
    x.data = lay(noise(5, 3, seed=1), mesh.layout(None, "a"))
    torch.testing.assert_close(x.full_tensor(cache=True), noise(5, 3, seed=1))
    x.requires_grad_()
    assert x.full_tensor(cache=True).requires_grad
    with torch.no_grad():
        assert count(lambda: x.full_tensor(cache=True)) == 0
    parameter = torch.nn.Parameter(lay(noise(5, 3), mesh.layout("a", None)))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    with torch.no_grad():
        before = parameter.full_tensor(cache=True)
        parameter.grad = lay(torch.ones(5, 3), mesh.layout("a", None))
        optimizer.step()
        torch.testing.assert_close(parameter.full_tensor(cache=True), before - 1)


# -- careful sums -------------------------------------------------------------------------------------


@distributed(8)
def test_averages_of_half_precision_do_not_overflow() -> None:
    mesh = mesh_of()
    local = torch.full((3, 8), 20000.0, dtype=torch.float16)
    for target in ([Replicate()], [Shard(0)], [Shard(1)]):
        x = DTensor.from_local(local, mesh, [Partial("avg")])
        assert x.redistribute(placements=target).full_tensor().tolist() == [[20000.0] * 8] * 3
    two = mesh_of(2, 4)
    x = DTensor.from_local(local / 4, layout=two.layout(None, None, partial={"a": "sum", "b": "avg"}), shape=(3, 8))
    assert x.full_tensor().tolist() == [[10000.0] * 8] * 3  # the sum of all eight would be 40000, twice what fits


@distributed(4)
def test_sums_of_16_bits_travel_in_16_bits_and_are_added_in_32() -> None:
    mesh = mesh_of()
    mine = [2048.0, 1.0, 1.0, 1.0][dist.get_rank()]
    for dtype, expected in ((torch.float16, 2052.0), (torch.bfloat16, 2048.0)):
        x = DTensor.from_local(torch.full((8,), mine, dtype=dtype), mesh, [Partial()])
        with CommCounter() as comm:
            out = x.full_tensor()
        assert out.tolist() == [expected] * 8  # 2051, rounded once
        assert out.dtype == dtype
        assert comm.counts == {"reduce_scatter": 1, "all_gather": 1}


def error_of(total: torch.Tensor, parts: list[torch.Tensor]) -> float:
    exact = torch.stack([part.double() for part in parts]).sum(0)
    return float((total.double() - exact).abs().max())


@distributed(4)
def test_sums_are_at_least_as_good_as_torchs() -> None:
    """Per dtype, kind of numbers and target: our error against float64 beside that of torch's own all-reduce."""
    mesh, rank = mesh_of(), dist.get_rank()
    for dtype, scale in itertools.product((torch.float16, torch.bfloat16, torch.float32), (1.0, 1e3)):
        parts = [(noise(40, 6, seed=i) * (scale if i % 2 else 1)).to(dtype) for i in range(4)]
        parts[3] = (parts[3] - parts[1]).to(dtype)  # cancellation
        theirs = parts[rank].clone()
        dist.all_reduce(theirs)
        ours = {
            name: DTensor.from_local(parts[rank], mesh, [Partial()])
            .redistribute(placements=[Shard(0)], **options)
            .full_tensor()
            for name, options in (("fast", {}), ("ordered", {"deterministic": True}), ("best", {"compensated": True}))
        }
        limit = error_of(theirs, parts)
        assert error_of(ours["fast"], parts) <= limit
        assert error_of(ours["best"], parts) <= min(limit, error_of(ours["ordered"], parts))
        exact = torch.stack([part.double() for part in parts]).sum(0).to(dtype)
        assert torch.equal(ours["best"], exact)  # rounded once


@distributed(4)
def test_careful_sums_are_the_same_bits_in_every_run_and_on_every_path() -> None:
    mesh, rank = mesh_of(), dist.get_rank()
    parts = [noise(7, 6, seed=i) * 10.0 ** (i % 3) for i in range(4)]
    nearest = torch.stack(parts).double().sum(0).float()
    x = DTensor.from_local(parts[rank], mesh, [Partial()])
    for _ in range(3):
        for target in ([Replicate()], [Shard(0)], [Shard(1)]):
            out = x.redistribute(placements=target, deterministic=True).full_tensor()
            assert torch.equal(out, nearest)
    assert torch.equal(x.full_tensor(deterministic=True), nearest)
    double = DTensor.from_local(
        torch.tensor([[1e16], [1.0], [-1e16], [1.0]][rank], dtype=torch.float64), mesh, [Partial()]
    )
    assert double.full_tensor(compensated=True).tolist() == [2.0]  # one after the other they make 1
    infinite = DTensor.from_local(torch.tensor([float("inf") if rank == 1 else 1.0]).double(), mesh, [Partial()])
    assert infinite.full_tensor(compensated=True).tolist() == [float("inf")]


@distributed(2)
def test_pending_reductions_without_a_meaning_are_refused() -> None:
    mesh = mesh_of()
    cases = [
        (torch.tensor([True]), "sum", "bool. Use all or any"),
        (torch.tensor([True]), "avg", "bool"),
        (torch.tensor([1]), "avg", "int64. Use sum, or cast"),
        (torch.tensor([1.0]), "all", "float32"),
        (torch.tensor([1j]), "max", "complex64"),
    ]
    for local, op, text in cases:
        for make in (
            lambda: DTensor.from_local(local, mesh, [Partial(op)]),  # noqa: B023 (called at once)
            lambda: distribute_tensor(local, mesh).redistribute(placements=[Partial(op)]),  # noqa: B023
        ):
            with pytest.raises(PartialError, match=f"with {op} pending over 'a': that has no meaning for .*{text}"):
                make()
    assert DTensor.from_local(torch.tensor([True]), mesh, [Partial("any")]).full_tensor().tolist() == [True]


# -- what is kept -------------------------------------------------------------------------------------


@pytest.mark.slow
@distributed(2)
def test_ten_thousand_shapes_leave_memory_flat() -> None:
    mesh = mesh_of()
    limits = {name: cache_info()[name].limit for name in ("plans", "resolved ops")}
    for name in limits:
        set_cache_limit(name, 100)
    before = cache_info()["plans"].evictions
    objects = []
    try:
        for i in range(10_000):
            shape = (2 + i % 100, 1 + i // 100)
            x = DTensor.from_local(torch.ones(shape), mesh, [Replicate()]).redistribute(placements=[Shard(0)])
            assert (x * 2).shape == shape
            if i % 2500 == 2499:
                gc.collect()
                assert all(cache_info()[name].size <= 100 for name in limits)
                objects.append(len(gc.get_objects()))
        assert cache_info()["plans"].evictions - before >= 9_800
        assert max(objects) - min(objects) < 300
    finally:
        for name, limit in limits.items():
            set_cache_limit(name, limit)


@distributed(1)
def test_limits_are_kept_and_wrong_ones_refused() -> None:
    with pytest.raises(CacheError, match=r"'plan', ...\): no cache .* Use one of: plans, reshape plans, resolved ops"):
        set_cache_limit("plan", 3)
    with pytest.raises(CacheError, match="process groups"):
        set_cache_limit("process groups", 3)
    with pytest.raises(CacheError, match=r"plans', -1\): the limit is negative. Give 0 or more"):
        set_cache_limit("plans", -1)


@contextlib.contextmanager
def apart_from_other_tests() -> Iterator[None]:
    """Meshes that earlier tests of this worker left alive need no groups here."""
    left = live_meshes()
    with mock.patch.object(process_groups, "live_meshes", side_effect=lambda: live_meshes() - left):
        yield


@distributed(4)
@apart_from_other_tests()
def test_twenty_meshes_leave_no_group_behind() -> None:
    before = len(dist.distributed_c10d._world.pg_map)
    for turn in range(20):
        mesh = hyper_parallel.init_device_mesh("cpu", (2, 2), mesh_dim_names=(f"row{turn}", f"column{turn}"))
        for part in (mesh[f"row{turn}"], mesh[f"column{turn}"], mesh):
            placements = [Shard(0)] * part.ndim
            torch.testing.assert_close(distribute_tensor(noise(8), part, placements).full_tensor(), noise(8))
        kept = distribute_tensor(noise(8), mesh[f"row{turn}"], [Shard(0)])
        del mesh, part
        assert release_unused_groups() == 1  # the group of `kept` stays
        torch.testing.assert_close(kept.full_tensor(), noise(8))
        del kept
        assert release_unused_groups() == 1
    assert pool.info().size == 1  # the default group
    assert len(dist.distributed_c10d._world.pg_map) == before


@distributed(4)
@apart_from_other_tests()
def test_a_group_that_one_member_still_needs_stays() -> None:
    mesh = hyper_parallel.init_device_mesh("cpu", (2, 2), mesh_dim_names=("apart", "needed"))
    x: Any = distribute_tensor(noise(8), mesh["needed"], [Shard(0)])
    x.full_tensor()
    if dist.get_rank() == 0:
        del x
    assert release_unused_groups() == 0  # ranks 0 and 1 share a group, and rank 1 still has its tensor
    if dist.get_rank() != 0:
        del x
    assert release_unused_groups() == 1


@distributed(4)
def test_measured_costs_are_positive_and_alike_on_all_ranks() -> None:
    mesh = mesh_of(2, 2)
    found = Topology.measure(mesh, numel=1 << 14)
    everyone: list[Any] = [None] * 4
    dist.all_gather_object(everyone, found)
    assert everyone == [found] * 4
    assert min(*found.alpha, *found.beta, found.gamma) > 0
    made = plan(mesh.layout("a", "b"), mesh.layout("b", "a"), (64, 64), topology=found)
    assert 0 < made.seconds < 10
    x = lay(noise(8, 8), mesh.layout("a", "b"))
    torch.testing.assert_close(x.redistribute(layout=mesh.layout("b", "a"), topology=found).full_tensor(), noise(8, 8))
