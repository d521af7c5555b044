# SPDX-License-Identifier: Apache-2.0
"""Situations in which other libraries moved data wrongly: uneven shards, memory layout, random state, caches."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hyper_parallel import DTensor, Partial, Replicate, Shard, cache_info, distribute_tensor
from hyper_parallel.core.bounded_cache import clear_caches
from hyper_parallel.core.errors import UnevenError
from hyper_parallel.testing import CommCounter, distributed
from tests.torch.dtensor.support import lay, layouts, mesh_of, noise


@distributed(4)
def test_d02_sizes_off_the_chunk_rule_are_refused_on_every_rank() -> None:
    mesh, rank = mesh_of(), dist.get_rank()
    local = noise(2, 2 + rank)
    with pytest.raises(UnevenError, match=r"dim 1 add up to 14, .* gives rank 0 4, but it has 2. Use RaggedShard"):
        DTensor.from_local(local, mesh, [Shard(1)], shape=(2, 14), stride=(14, 1), run_check=True)


@distributed(4)
def test_d03_ranks_agree_on_the_shape_of_uneven_pieces() -> None:
    mesh, rank = mesh_of(), dist.get_rank()
    x = DTensor.from_local(torch.full((3 if rank < 3 else 1, 2), float(rank)), mesh, [Shard(0)])
    assert x.shape == (10, 2)
    assert x.full_tensor()[:, 0].tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3]
    again = DTensor.from_local(x.to_local(), mesh, [Shard(0)])
    torch.testing.assert_close(again.full_tensor(), x.full_tensor())


@distributed(4)
def test_d04_no_padding_is_left() -> None:
    full = noise(5, 10)
    x = distribute_tensor(full, mesh_of(), [Replicate()])
    back = x.redistribute(placements=[Shard(0)]).redistribute(placements=[Replicate()])
    assert torch.equal(back.to_local(), full)
    assert back.to_local().untyped_storage().nbytes() == full.untyped_storage().nbytes()


@distributed(4)
@pytest.mark.parametrize("shape", [(5,), (7, 3), (3, 5), (1, 4)])
def test_d07_all_pairs_on_two_axes_with_uneven_sizes(shape: tuple[int, ...]) -> None:
    mesh, full = mesh_of(2, 2), noise(*shape)
    for src, dst in itertools.product(layouts(mesh, len(shape)), repeat=2):
        torch.testing.assert_close(lay(full, src).redistribute(layout=dst).full_tensor(), full, atol=1e-5, rtol=1e-5)


@distributed(8)
def test_d09_trailing_ranks_own_nothing() -> None:
    mesh = mesh_of()
    for size in (1, 5, 9):
        x = distribute_tensor(noise(size), mesh, [Shard(0)])
        lengths: list[Any] = [None] * 8
        dist.all_gather_object(lengths, len(x.to_local()))
        assert sum(lengths) == size
        assert lengths[-1] == 0
        torch.testing.assert_close(x.full_tensor(), noise(size))


@distributed(4)
def test_d12_d13_two_axes_on_one_dim_keep_the_order_of_rows() -> None:
    """The piece of a rank is chunked by the outer axis, then by the inner: what TP, then FSDP really holds."""
    mesh, rank = mesh_of(2, 2), dist.get_rank()
    for size in range(1, 10):
        full = torch.arange(float(size))
        x = distribute_tensor(full, placements=mesh.layout(("b", "a")))
        outer = full.chunk(2)
        mine = outer[rank % 2] if rank % 2 < len(outer) else full[:0]
        inner = mine.chunk(2)
        mine = inner[rank // 2] if rank // 2 < len(inner) else full[:0]
        assert x.to_local().tolist() == mine.tolist()
        assert x.full_tensor().tolist() == full.tolist()
        for other in layouts(mesh, 1):
            assert x.redistribute(layout=other).full_tensor().tolist() == full.tolist()


@distributed(4)
def test_d14_uneven_pieces_of_pieces_keep_their_size_and_their_flag() -> None:
    mesh = mesh_of(2, 2)
    for frozen, shape in itertools.product((True, False), ((10, 3), (5, 3), (1, 3))):
        full = noise(*shape).requires_grad_(not frozen)
        x = distribute_tensor(full, placements=mesh.layout(("b", "a"), None))
        assert x.shape == shape
        assert x.requires_grad is not frozen
        y = x.redistribute(layout=mesh.layout("b", None))
        assert y.shape == shape
        assert y.requires_grad is not frozen
        torch.testing.assert_close(y.detach().full_tensor(), noise(*shape))


@distributed(3)
def test_d40_gathered_pieces_are_contiguous_and_without_padding() -> None:
    full = noise(4, 31, 10)
    x = distribute_tensor(full, mesh_of(), [Shard(1)])
    whole = x.redistribute(placements=[Replicate()])
    local = whole.to_local()
    assert local.stride() == (310, 10, 1) == whole.stride()
    assert local.untyped_storage().nbytes() == full.numel() * 4
    torch.testing.assert_close(local.view(-1, 10), full.view(-1, 10))
    torch.testing.assert_close(whole.view(-1, 10).full_tensor(), full.view(-1, 10))


@distributed(2)
def test_d41_strides_are_those_of_the_data_for_any_source() -> None:
    mesh, full = mesh_of(), noise(4, 4)
    for before, after in itertools.permutations((0, 1), 2):
        for x in (
            distribute_tensor(full, mesh, [Shard(before)]),
            distribute_tensor(full.t().contiguous(), mesh, [Shard(1 - before)]).t(),
            DTensor.from_local(
                distribute_tensor(full, mesh, [Shard(before)]).to_local().t().contiguous().t(), mesh, [Shard(before)]
            ),
        ):
            y = x.redistribute(placements=[Shard(after)])
            torch.testing.assert_close(y.full_tensor(), full)
            assert y.stride() == (4, 1)
            assert y.to_local().is_contiguous()


@distributed(2)
def test_d42_moving_data_draws_no_random_numbers() -> None:
    mesh = mesh_of()
    state = torch.get_rng_state()
    x = DTensor.from_local(torch.ones(3, 4), mesh, [Partial()])
    y = x.redistribute(placements=[Shard(1)])
    y.full_tensor()
    y.redistribute_async(placements=[Shard(0)]).wait()
    copy.deepcopy(y.detach())
    assert torch.equal(torch.get_rng_state(), state)


def num_objects() -> Counter[type]:
    """Tensors and objects of ours that are alive; other tests may have left things of Python and torch that go now."""
    gc.collect()
    types = [type(x) for x in gc.get_objects()]
    return Counter(t for t in types if str(t.__module__).startswith("hyper_parallel") or issubclass(t, torch.Tensor))


@distributed(2)
def test_d43_d44_a_second_time_nothing_is_planned() -> None:
    clear_caches()  # what other tests left would be evicted meanwhile
    mesh = mesh_of()
    xs = [lay(noise(4, 6, seed=i).requires_grad_(), layout) for i, layout in enumerate(layouts(mesh, 2))]

    def step() -> None:
        for x, target in itertools.product(xs, layouts(mesh, 2)):
            y = x.redistribute(layout=target)
            (torch.cat([y, y]) * 2).sum().backward()

    step()
    misses = {name: info.misses for name, info in cache_info().items() if hasattr(info, "misses")}
    step()
    objects = num_objects()
    for _ in range(10):
        step()
    assert {name: info.misses for name, info in cache_info().items() if hasattr(info, "misses")} == misses
    more = num_objects() - objects
    assert not more, more


@distributed(2)
def test_u09_a_layout_is_never_changed_by_what_is_done_with_it() -> None:
    mesh = mesh_of()
    made = layouts(mesh, 2)
    texts, hashes, bytes_ = [repr(x) for x in made], [hash(x) for x in made], pickle.dumps(made)
    for src, dst in itertools.product(made, repeat=2):
        x = lay(noise(3, 4).requires_grad_(), src)
        y = x.redistribute(layout=dst)
        (y * 2).sum().backward()
        assert x.layout is src
        assert y.layout is dst
    assert [repr(x) for x in made] == texts
    assert [hash(x) for x in made] == hashes
    assert all(a is b for a, b in zip(pickle.loads(bytes_), made, strict=True))


@distributed(2)
def test_nothing_to_move_is_no_collective() -> None:
    mesh = mesh_of()
    x = distribute_tensor(noise(4, 4), mesh, [Replicate()])
    with CommCounter() as comm:
        x.redistribute(placements=[Shard(0)])
        x.redistribute(placements=[Partial()])
        x.redistribute(placements=[Replicate()])
    assert comm.total == 0
