# SPDX-License-Identifier: Apache-2.0
"""Which group comes next: the order of the last iteration, followed as long as this one keeps to it."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

Group = TypeVar("Group", bound=Hashable)


class ForwardOrder(Generic[Group]):
    """The sequence of groups in forward, recorded each iteration and used to prefetch in the next.

    When control flow differs from the last iteration, no guess is made: a wrong one would cost an all-gather.
    """

    def __init__(self) -> None:
        self.last: list[Group] = []
        self.current: list[Group] = []
        self.left: list[Group] = []
        self._follows = True

    def begin(self) -> None:
        """A new root forward begins."""
        if self.current:
            self.last = self.current
        self.current, self.left = [], []
        self._follows = True

    def enter(self, group: Group) -> Group | None:
        """Forward reaches `group`; returns the one to prefetch, if the last iteration tells."""
        at = len(self.current)
        self.current.append(group)
        self._follows = self._follows and at < len(self.last) and self.last[at] == group
        if self._follows and at + 1 < len(self.last):
            return self.last[at + 1]
        return None

    def leave(self, group: Group) -> None:
        """Forward is through with `group`."""
        self.left.append(group)

    def before(self, group: Group) -> Group | None:
        """The group that forward left before `group`: backward needs it next. An outer one is left after its inner."""
        for at in range(len(self.left) - 1, 0, -1):
            if self.left[at] == group:
                return next((g for g in reversed(self.left[:at]) if g != group), None)
        return None
