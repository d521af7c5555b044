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
