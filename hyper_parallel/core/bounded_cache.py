# SPDX-License-Identifier: Apache-2.0
"""What is kept is bounded and counted: a dict with a limit, and the counts of all caches of the library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from hyper_parallel.core.errors import CacheError


class CacheInfo(NamedTuple):
    """Counts of a bounded cache."""

    hits: int
    misses: int
    size: int
    limit: int
    evictions: int


class BoundedCache:
    """At most `limit` entries; those longest unused go first, half of them at once.

    Entries live in two generations. A look-up in the young one is a plain dict access, which hot callers do
    themselves (`entries`, counting `hits`); on a miss there, `revive` finds older ones and makes them young. When
    the young generation is full it becomes the old one, and what was still old goes.
    """

    __slots__ = ("_old", "entries", "evictions", "hits", "limit", "misses")

    def __init__(self, limit: int) -> None:
        self.entries: dict[Any, Any] = {}
        self._old: dict[Any, Any] = {}
        self.limit = limit
        self.hits = self.misses = self.evictions = 0

    def __len__(self) -> int:
        return len(self.entries) + len(self._old)

    def get(self, key: Any) -> Any:
        """The entry of `key`, or None."""
        found = self.entries.get(key)
        if found is None:
            return self.revive(key)
        self.hits += 1
        return found

    def revive(self, key: Any) -> Any:
        """The entry of `key` that was not young, or None."""
        found = self._old.pop(key, None)
        if found is not None:
            self.hits += 1
            self._add(key, found)
        return found

    def put(self, key: Any, value: Any) -> None:
        """Add an entry after a miss."""
        self.misses += 1
        self._add(key, value)

    def _add(self, key: Any, value: Any) -> None:
        if self.limit == 0:
            return
        if len(self.entries) >= (self.limit + 1) // 2:
            self.evictions += len(self._old)
            self.entries, self._old = {}, self.entries
        self.entries[key] = value
        self._shrink()

    def _shrink(self) -> None:
        while len(self) > self.limit:
            generation = self._old or self.entries
            del generation[next(iter(generation))]
            self.evictions += 1

    def set_limit(self, limit: int) -> None:
        """Keep at most `limit` entries from now on."""
        self.limit = limit
        self._shrink()

    def clear(self) -> None:
        """Forget all entries, keep the counts."""
        self.entries.clear()
        self._old.clear()

    def info(self) -> CacheInfo:
        """Counts since the start."""
        return CacheInfo(self.hits, self.misses, len(self), self.limit, self.evictions)


class _Watched(NamedTuple):
    info: Callable[[], Any]
    cache: Any


_watched: dict[str, _Watched] = {}


def watch_cache(name: str, info: Callable[[], Any], cache: Any = None) -> None:
    """Let `cache_info` report a cache, and `set_cache_limit` and `clear_caches` reach it if it is given."""
    _watched[name] = _Watched(info, cache)


def cache_info() -> dict[str, Any]:
    """Counts of everything the library keeps, by name: compiled plans, resolved ops, process groups.

    Returns:
        Per cache a named tuple (hits, misses, size, limit, evictions; process groups: size, created, hits); those
        of platforms that were not used yet are missing.

    Communication: none. Memory: none.

    Example:
        >>> cache_info()["plans"].limit
        1024
    """
    return {name: watched.info() for name, watched in sorted(_watched.items())}


def set_cache_limit(name: str, limit: int) -> None:
    """Keep at most `limit` entries in a cache; 0 keeps none. What is evicted is made again when it is needed.

    Args:
        name: As in `cache_info()`, `"plans"` for instance.
        limit: Number of entries.

    Raises:
        CacheError: no cache with a limit has that name, or the limit is negative.

    Communication: none. Memory: evicted entries are freed.

    Example:
        >>> set_cache_limit("plans", 1024)
    """
    cache = _watched[name].cache if name in _watched else None
    if cache is None:
        known = ", ".join(sorted(name for name, watched in _watched.items() if watched.cache is not None))
        raise CacheError(f"set_cache_limit({name!r}, ...): no cache with a limit has that name. Use one of: {known}.")
    if limit < 0:
        raise CacheError(f"set_cache_limit({name!r}, {limit}): the limit is negative. Give 0 or more.")
    cache.set_limit(limit)


def clear_caches() -> None:
    """Forget all plans and resolved ops, and with them the meshes that nothing else refers to."""
    for watched in _watched.values():
        if watched.cache is not None:
            watched.cache.clear()
