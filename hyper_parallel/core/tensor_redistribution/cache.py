# SPDX-License-Identifier: Apache-2.0
"""The bounded, counted cache of compiled plans."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TypeAlias

from hyper_parallel.core.bounded_cache import CacheInfo, watch_cache
from hyper_parallel.core.layout import Layout
from hyper_parallel.core.tensor_redistribution.cost import Topology
from hyper_parallel.core.tensor_redistribution.execute import CompiledPlan, compile_plan
from hyper_parallel.core.tensor_redistribution.planner import plan

Key: TypeAlias = tuple[Layout, Layout, tuple[int, ...], int, int, Topology | None, int | None]


class PlanCache:
    """At most `limit` compiled plans; the one longest unused goes first. Autograd's threads may share it."""

    def __init__(self, limit: int) -> None:
        self._plans: OrderedDict[Key, CompiledPlan] = OrderedDict()
        self._lock = threading.Lock()
        self._limit = limit
        self._hits = self._misses = self._evictions = 0

    def get(self, key: Key) -> CompiledPlan:
        """The compiled plan of (src, dst, shape, itemsize, rank, topology, max_bytes), made on the first call."""
        with self._lock:
            found = self._plans.get(key)
            if found is not None:
                self._plans.move_to_end(key)
                self._hits += 1
                return found
        src, dst, shape, itemsize, rank, topology, max_bytes = key
        made = compile_plan(plan(src, dst, shape, itemsize, topology, max_bytes), rank)
        with self._lock:
            self._misses += 1
            self._plans[key] = made
            self._shrink()
        return made

    def set_limit(self, limit: int) -> None:
        """Keep at most `limit` plans; 0 keeps none."""
        with self._lock:
            self._limit = limit
            self._shrink()

    def clear(self) -> None:
        """Forget all plans, keep the counts."""
        with self._lock:
            self._plans.clear()

    def info(self) -> CacheInfo:
        """Counts since the start."""
        return CacheInfo(self._hits, self._misses, len(self._plans), self._limit, self._evictions)

    def _shrink(self) -> None:
        while len(self._plans) > self._limit:
            self._plans.popitem(last=False)
            self._evictions += 1


plan_cache = PlanCache(1024)
watch_cache("plans", plan_cache.info, plan_cache)


def compiled_plan(
    src: Layout,
    dst: Layout,
    shape: tuple[int, ...],
    itemsize: int,
    rank: int,
    topology: Topology | None = None,
    max_bytes: int | None = None,
) -> CompiledPlan:
    """The compiled plan of this redistribution on `rank`, from the cache.

    Raises:
        LayoutError: as `plan`.

    Communication: none. Memory: bounded, see `PlanCache.set_limit`.
    """
    return plan_cache.get((src, dst, shape, itemsize, rank, topology, max_bytes))
