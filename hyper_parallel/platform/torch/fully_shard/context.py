# SPDX-License-Identifier: Apache-2.0
"""What the groups under one root share: the order of forward, the reduction in flight, the end of backward."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from hyper_parallel.core.fully_shard.hsdp_scheduler import ForwardOrder
from hyper_parallel.platform.torch.fully_shard.gradients import UnitReduction, accumulate

if TYPE_CHECKING:
    from hyper_parallel.platform.torch.fully_shard.group import GroupCall, ParamGroup


class _EndOfBackward:
    """A callback of the autograd engine, which forgets it uncalled if the backward pass is cut off by an exception."""

    def __init__(self, context: RootContext, task: int) -> None:
        self._context: Callable[[], RootContext | None] = weakref.ref(context)
        self._task = task

    def __call__(self) -> None:
        context, self._context = self._context(), _nothing
        if context is not None:
            context.end_backward(self._task)

    def __del__(self) -> None:
        context = self._context()
        if context is not None:
            # A peer that is gone fails what is in flight here; the exception under way is the one to see.
            with contextlib.suppress(RuntimeError):
                context.abandon_backward(self._task)


def _nothing() -> None:
    return None


class RootContext:
    """Shared by all groups under one root; holds them weakly, so that a deleted model is freed at once.

    Attributes:
        order: The order of forward.
        is_last_backward: Whether the end of backward waits for all reductions.
        creates_graph: Whether the backward pass is itself recorded, so that a later one needs the parameters again.
    """

    def __init__(self, root: ParamGroup, groups: list[ParamGroup]) -> None:
        self._root = weakref.ref(root)
        self._groups = [weakref.ref(group) for group in groups]
        self.order: ForwardOrder[ParamGroup] = ForwardOrder()
        self.is_last_backward = True
        self.creates_graph = False
        self._pending: list[tuple[ParamGroup, UnitReduction]] = []
        self._tasks: list[int] = []
        self._put_off: list[tuple[ParamGroup, GroupCall]] = []
        self._prefetched: list[ParamGroup] = []

    @property
    def root(self) -> ParamGroup | None:
        """The outermost group."""
        return self._root()

    def groups(self) -> Iterator[ParamGroup]:
        """All groups that are still alive."""
        return (group for ref in self._groups if (group := ref()) is not None)

    @property
    def in_backward(self) -> bool:
        """Whether a backward pass runs (so a forward now is a recomputation)."""
        return bool(self._tasks) and torch._C._current_graph_task_id() != -1

    # -- forward --------------------------------------------------------------------------------

    def begin_forward(self) -> None:
        """The root's forward begins; clears up after a pass that was cut off by an exception."""
        if self._tasks and torch._C._current_graph_task_id() == -1:
            self.abort()
        self.order.begin()

    def enter(self, group: ParamGroup) -> list[ParamGroup]:
        """Forward reaches `group`; returns the groups to prefetch."""
        following = self.order.enter(group)
        wanted = group.forward_prefetch or ([following] if following is not None else [])
        for other in self._prefetched:
            if other is not group and other not in wanted:
                other.drop_unused()
        self._prefetched = wanted
        return wanted

    def end_forward(self) -> None:
        """The root's forward ends: what was gathered for nothing is freed."""
        for group in self._prefetched:
            group.drop_unused()
        self._prefetched = []

    # -- backward -------------------------------------------------------------------------------

    def note_backward(self, group: ParamGroup) -> int:
        """Backward reaches `group`: see to it that the end of this pass is noticed, and return its number.

        Re-entrant checkpointing runs a backward inside of a backward; only the end of the outermost closes all groups.
        """
        task = torch._C._current_graph_task_id()
        if task not in self._tasks:
            self._tasks.append(task)
            # Only then does the engine record what it does.
            self.creates_graph = torch.is_grad_enabled()
            torch.autograd.Variable._execution_engine.queue_callback(_EndOfBackward(self, task))
        self._finish_put_off(group)
        return task

    def put_off(self, group: ParamGroup, call: GroupCall) -> None:
        """More gradients may come for `call`: finish it when backward reaches a group that is not inside of `group`."""
        if (group, call) not in self._put_off:
            self._put_off.append((group, call))

    def _finish_put_off(self, reached: ParamGroup | None) -> None:
        done = [(g, call) for g, call in self._put_off if reached is None or reached not in g.groups_below()]
        for entry in done:
            self._put_off.remove(entry)
            entry[0].finish_put_off(entry[1])

    def end_backward(self, task: int) -> None:
        """A backward pass is over."""
        self._tasks.remove(task)
        if not self._tasks:
            self._finish_put_off(None)
        if self.is_last_backward:
            if not self._tasks:
                for group in self.groups():
                    group.reduce_carried()
            self.finish_reductions()
        if not self._tasks:
            for group in self.groups():
                group.end_backward()

    def abandon_backward(self, task: int) -> None:
        """A backward pass was cut off by an exception."""
        self._tasks.remove(task)
        if not self._tasks:
            self.abort()

    def reduce(self, group: ParamGroup, reduction: UnitReduction) -> None:
        """A reduction was started; the one before it is finished, so at most two buffers are alive."""
        self.finish_reductions()
        self._pending.append((group, reduction))

    def finish_reductions(self) -> None:
        """Wait for the reductions in flight and put their gradients in place."""
        while self._pending:
            group, reduction = self._pending.pop(0)
            finished = reduction.finish()
            if finished is not None:
                accumulate(reduction.unit, *finished)
            elif reduction.carry is not None:
                group.carried_shards[reduction.unit] = reduction.carry

    def abort(self) -> None:
        """After an exception: wait for what is in flight, drop it, bring all groups back to their sharded state."""
        while self._pending:
            self._pending.pop(0)[1].finish()
        self._tasks.clear()
        self._put_off.clear()
        self._prefetched = []
        for group in self.groups():
            group.abort()

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copied model makes its own context at its first forward."""
        return
