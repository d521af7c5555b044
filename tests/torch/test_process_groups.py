# SPDX-License-Identifier: Apache-2.0
"""The pool of process groups: shared, counted, and gone with the job."""

from __future__ import annotations

import gc
import weakref

import torch
import torch.distributed as dist

from hyper_parallel import cache_info, distribute_tensor, init_device_mesh
from hyper_parallel.platform.torch.process_groups import pool
from hyper_parallel.testing import distributed


@distributed(4)
def test_meshes_share_groups() -> None:
    created = pool.info().created
    for _ in range(20):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        for axis in mesh.axis_names:
            distribute_tensor(torch.arange(4.0), mesh[axis]).full_tensor()
            pool.group(mesh.group_ranks((axis,), mesh.get_rank()))
    info = cache_info()["process groups"]
    assert info.size == 2  # my row and my column
    assert info.created == created + 2


@distributed(4)
def test_the_pool_keeps_no_group_alive() -> None:
    rank = dist.get_rank()
    group = pool.group((0, 1) if rank < 2 else (2, 3))
    assert pool.group((0, 1) if rank < 2 else (2, 3)) is group
    refs = [weakref.ref(group), weakref.ref(pool.group((0, 1, 2, 3)))]
    del group
    dist.barrier()
    dist.destroy_process_group()
    gc.collect()
    assert [ref() for ref in refs] == [None, None]


@distributed(2)
def test_release_destroys_the_groups_but_not_the_default_one() -> None:
    rank = dist.get_rank()
    ref = weakref.ref(pool.group((rank,)))
    pool.release()
    gc.collect()
    assert ref() is None
    assert cache_info()["process groups"].size == 0
    x = torch.ones(1)
    dist.all_reduce(x, group=pool.group((0, 1)))
    assert x.item() == 2


@distributed(4, timeout=30)
def test_ranks_that_are_in_different_numbers_of_groups_still_find_each_other() -> None:
    rank = dist.get_rank()
    for other in range(rank):
        if other == 0:
            pool.group((rank,))
        dist.new_group([rank], use_local_synchronization=True)
    for ranks in ((0, 1), (1, 2), (2, 3), (0, 3), (0, 1)):
        if rank in ranks:
            x = torch.ones(1)
            dist.all_reduce(x, group=pool.group(ranks))
            assert x.item() == 2


@distributed(4, timeout=30)
def test_redistributions_that_involve_some_ranks_only() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    one_row = torch.arange(4.0).reshape(1, 4)
    x = distribute_tensor(one_row, mesh, mesh.layout("a", "b"), src_data_rank=None)
    x = x.redistribute(layout=mesh.layout("a", None))
    rows = torch.arange(16.0).reshape(8, 2)
    y = distribute_tensor(rows, mesh, mesh.layout(("b", "a"), None), src_data_rank=None)
    assert torch.equal(y.full_tensor(), rows)
    assert torch.equal(x.full_tensor(), one_row)


@distributed(2, timeout=30)
def test_a_group_that_was_destroyed_is_made_again() -> None:
    for _ in range(3):
        x = torch.ones(1)
        dist.all_reduce(x, group=pool.group((1, 0)))
        assert x.item() == 2
        dist.barrier()
        dist.destroy_process_group(pool.group((1, 0)))
