# SPDX-License-Identifier: Apache-2.0
"""A dict that cannot grow without limit, and counts what happens to it."""

from __future__ import annotations

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
