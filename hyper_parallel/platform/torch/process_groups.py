# SPDX-License-Identifier: Apache-2.0
"""The one pool of process groups: keyed by the tuple of ranks, released on request or with the job.

The pool refers to groups weakly. torch owns them until `destroy_process_group`; a group that lived on would end its
threads while the interpreter shuts down, which aborts the process now and then.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed import distributed_c10d

from hyper_parallel.core.bounded_cache import clear_caches, watch_cache
from hyper_parallel.core.device_mesh import DeviceMesh
from hyper_parallel.core.errors import CollectiveError
from hyper_parallel.core.layout import live_meshes


class GroupInfo(NamedTuple):
    """Counts of the pool."""

    size: int
    created: int
    hits: int


class GroupPool:
    """Process groups by the ranks they join, made on first use and shared by all meshes.

    `new_group` is called with local synchronisation only: just the members take part, so ranks outside
    need not know. A group of all ranks in order is the default group itself.
    """

    def __init__(self) -> None:
        self._groups: dict[tuple[int, ...], Callable[[], Any]] = {}
        self._made: dict[tuple[int, ...], int] = {}
        self._world: Callable[[], Any] = _nothing
        self._lock = threading.Lock()
        self._created = 0
        self._hits = 0

    def group(self, ranks: tuple[int, ...]) -> Any:
        """The process group of exactly `ranks`, in that order.

        Raises:
            CollectiveError: no process group was started.

        Communication: on the first call for these ranks a rendezvous of its members.
        """
        world = self._current_world()
        found = self._groups.get(ranks, _nothing)()
        if found is not None:
            self._hits += 1
            return found
        with self._lock:
            found = self._groups.get(ranks, _nothing)()
            if found is None:
                found = self._make(ranks, world)
                self._groups[ranks] = weakref.ref(found)
        return found

    def _make(self, ranks: tuple[int, ...], world: Any) -> Any:
        if ranks == tuple(range(dist.get_world_size())):
            return world
        self._created += 1
        turn = self._made[ranks] = self._made.get(ranks, 0) + 1
        with _named(f"hyper_parallel/{'_'.join(map(str, ranks))}/{turn}"):
            return dist.new_group(list(ranks), use_local_synchronization=True, sort_ranks=False)

    def _current_world(self) -> Any:
        if not dist.is_initialized():
            raise CollectiveError(
                "collective: no process group is running. Start the script with torchrun, or call "
                "init_device_mesh or torch.distributed.init_process_group first."
            )
        world = dist.group.WORLD
        if world is not self._world():
            # Another job than the groups were made for: they went with it.
            self._groups.clear()
            self._made.clear()
            self._world = weakref.ref(world)
        return world

    def release(self) -> None:
        """Destroy every pooled group but the default one."""
        with self._lock:
            world = dist.group.WORLD if dist.is_initialized() else None
            for ref in self._groups.values():
                group = ref()
                if world is not None and group is not None and group is not world:
                    dist.destroy_process_group(group)
            self._groups.clear()
            self._world = _nothing

    def release_unused(self) -> int:
        """Destroy the groups that no live layout of any member needs; every rank of the job calls it.

        Returns:
            Number of groups destroyed here.

        Communication: one all-gather of the ranks of unused groups, over the whole job.
        """
        world = self._current_world()
        clear_caches()
        gc.collect()
        needed = {frozenset(ranks) for mesh in live_meshes() for ranks in _groups_of(mesh)}
        unused = [ranks for ranks, ref in self._groups.items() if ref() not in (None, world)]
        unused = [ranks for ranks in unused if frozenset(ranks) not in needed]
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, unused)
        agreed = [ranks for ranks in unused if all(ranks in everyone[rank] for rank in ranks)]
        with self._lock:
            for ranks in agreed:
                dist.destroy_process_group(self._groups.pop(ranks)())
        return len(agreed)

    def info(self) -> GroupInfo:
        """Counts: groups held, groups ever created, look-ups that found one."""
        return GroupInfo(len(self._groups), self._created, self._hits)


@contextlib.contextmanager
def _named(name: str) -> Iterator[None]:
    """Give the group made inside a name that its members agree on.

    With local synchronisation torch names a group by its ranks and the number of groups that this process has. Ranks
    that are in different numbers of groups would wait for each other under different names, for ever.
    """
    before = distributed_c10d._hash_ranks_to_str
    distributed_c10d._hash_ranks_to_str = lambda ranks: name
    try:
        yield
    finally:
        distributed_c10d._hash_ranks_to_str = before


def _groups_of(mesh: DeviceMesh) -> Iterator[tuple[int, ...]]:
    """The groups that this rank is in on `mesh`, one for each set of axes."""
    rank = dist.get_rank()
    if mesh.coord_of(rank) is None:
        return
    for num in range(1, mesh.ndim + 1):
        for axes in itertools.combinations(mesh.axis_names, num):
            yield mesh.group_ranks(axes, rank)


def _nothing() -> None:
    return None


pool = GroupPool()
watch_cache("process groups", pool.info)
