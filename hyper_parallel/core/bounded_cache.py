# SPDX-License-Identifier: Apache-2.0
"""What is kept is bounded and counted: a dict with a limit, and the counts of all caches of the library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class CacheInfo(NamedTuple):
    """Counts of a bounded cache."""

    hits: int
    misses: int
    size: int
    limit: int
    evictions: int


class BoundedCache:
    """At most `limit` entries; the oldest go first. Hot callers read `entries` and count `hits` themselves."""

    __slots__ = ("entries", "evictions", "hits", "limit", "misses")

    def __init__(self, limit: int) -> None:
        self.entries: dict[Any, Any] = {}
        self.limit = limit
        self.hits = self.misses = self.evictions = 0

    def get(self, key: Any) -> Any:
        """The entry of `key`, or None."""
        found = self.entries.get(key)
        if found is not None:
            self.hits += 1
        return found

    def put(self, key: Any, value: Any) -> None:
        """Add an entry after a miss."""
        self.misses += 1
        while len(self.entries) >= self.limit:
            self.entries.pop(next(iter(self.entries)), None)
            self.evictions += 1
        self.entries[key] = value

    def clear(self) -> None:
        """Forget all entries, keep the counts."""
        self.entries.clear()

    def info(self) -> CacheInfo:
        """Counts since the start."""
        return CacheInfo(self.hits, self.misses, len(self.entries), self.limit, self.evictions)


_watched: dict[str, Callable[[], Any]] = {}


def watch_cache(name: str, info: Callable[[], Any]) -> None:
    """Let `cache_info` report a cache."""
    _watched[name] = info


def cache_info() -> dict[str, Any]:
    """Counts of everything the library keeps, by name: compiled plans, resolved ops, process groups.

    Returns:
        Per cache a named tuple; those of platforms that were not used yet are missing.

    Communication: none. Memory: none.

    Example:
        >>> cache_info()["plans"].limit
        1024
    """
    return {name: info() for name, info in sorted(_watched.items())}
