# SPDX-License-Identifier: Apache-2.0
"""`CommCounter`: how much a piece of code communicates, counted in calls and elements."""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from hyper_parallel.core.protocols import load_platform

_METHODS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "all_gather_object")


class CommCounter:
    """Counts the collectives of this process while its block runs; backward passes inside the block count too.

    A collective made of others (a 16-bit all-reduce) counts once, as itself. On gloo too a reduce-scatter counts as
    one: what is counted is what the library asked for. `fully_shard` moves its flat buffers by calls of its own.

    Attributes:
        counts: Name of the collective -> number of calls.
        numel: Name of the collective -> number of elements handed to it by this rank.
        platform: Name of the platform that is watched.

    Example:
        with CommCounter() as comm:
            loss.backward()
        assert comm.all_reduce == 1
        assert comm.total == 1
    """

    def __init__(self, platform: str = "torch") -> None:
        self.platform = platform
        self.counts: Counter[str] = Counter()
        self.numel: Counter[str] = Counter()
        self._before: dict[str, Any] = {}
        self._inside = threading.local()

    def __enter__(self) -> CommCounter:
        collectives = load_platform(self.platform).collectives
        self._before = dict(vars(collectives))
        for name in _METHODS:
            setattr(collectives, name, self._counting(name, getattr(collectives, name)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        state = vars(load_platform(self.platform).collectives)
        state.clear()
        state.update(self._before)

    @property
    def all_reduce(self) -> int:
        """Number of all-reduces."""
        return self.counts["all_reduce"]

    @property
    def reduce_scatter(self) -> int:
        """Number of reduce-scatters."""
        return self.counts["reduce_scatter"]

    @property
    def all_gather(self) -> int:
        """Number of all-gathers of tensors."""
        return self.counts["all_gather"]

    @property
    def all_to_all(self) -> int:
        """Number of all-to-alls."""
        return self.counts["all_to_all"]

    @property
    def total(self) -> int:
        """Number of all collectives, broadcasts and exchanges of small objects among them."""
        return self.counts.total()

    def __repr__(self) -> str:
        return f"CommCounter({dict(self.counts)})"

    def _counting(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def run(x: Any, *args: Any, **kwargs: Any) -> Any:
            if getattr(self._inside, "value", False):
                return method(x, *args, **kwargs)
            self.counts[name] += 1
            self.numel[name] += _numel(x)
            self._inside.value = True
            try:
                return method(x, *args, **kwargs)
            finally:
                self._inside.value = False

        return run


def _numel(x: Any) -> int:
    if isinstance(x, Sequence):
        return sum(_numel(item) for item in x)
    return int(x.numel()) if hasattr(x, "numel") else 0
