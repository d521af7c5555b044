# SPDX-License-Identifier: Apache-2.0
"""Plans run in this process, on the framework's collectives: one, several together, or behind other work.

Note [In flight]
    A redistribution that is not waited for at once has done all its rounds but the last when it is handed out; the
    last is under way. So a handle that is dropped, on one rank or on all, leaves no rank waiting: there is nothing
    left to issue. Several redistributions go round by round together, in the order given, which is the same on
    all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hyper_parallel.core.protocols import Collectives, Pending, Summation, Tensor, TensorOps
from hyper_parallel.core.tensor_redistribution.execute import (
    AllGatherRequest,
    AllReduceRequest,
    AllToAllRequest,
    CompiledPlan,
    Execution,
    ReduceScatterRequest,
    Request,
    execute_steps,
)


class Run:
    """One redistribution under way.

    Args:
        execution: Its rounds.
        collectives: Who communicates.
    """

    def __init__(self, execution: Execution, collectives: Collectives) -> None:
        self._execution = execution
        self._collectives = collectives
        self._pending: list[Pending] | None = None
        self._result: Tensor = None
        self._step(None)

    @property
    def is_done(self) -> bool:
        """Whether nothing is under way."""
        return self._pending is None

    def advance(self) -> None:
        """End the round under way, and start the next if there is one."""
        if self._pending is not None:
            self._step([pending.wait() for pending in self._pending])

    def finish(self) -> Tensor:
        """End all rounds, and return the new local tensor."""
        while self._pending is not None:
            self.advance()
        return self._result

    def _step(self, answers: Sequence[Any] | None) -> None:
        try:
            round_ = self._execution.send(answers)  # type: ignore[arg-type] # None starts a generator
        except StopIteration as done:
            self._pending, self._result = None, done.value
        else:
            self._pending = [_start(request, self._collectives) for request in round_]


def _start(request: Request, collectives: Collectives) -> Pending:
    match request:
        case AllReduceRequest(x, reduction, ranks):
            return collectives.all_reduce(x, reduction, ranks)
        case ReduceScatterRequest(parts, reduction, ranks, is_equal):
            return collectives.reduce_scatter(parts, reduction, ranks, is_equal=is_equal)
        case AllGatherRequest(x, outs, ranks, is_equal):
            return collectives.all_gather(x, outs, ranks, is_equal=is_equal)
        case AllToAllRequest(sends, outs, ranks):
            return collectives.all_to_all(sends, outs, ranks)


def run(
    compiled: CompiledPlan,
    local: Tensor,
    ops: TensorOps,
    collectives: Collectives,
    summation: Summation = Summation.FAST,
) -> Tensor:
    """Run a plan in this process. See `execute_steps`.

    Communication: that of the plan.
    """
    if not compiled.steps:
        return local
    return Run(execute_steps(compiled, local, ops, summation), collectives).finish()


def start(
    compiled: CompiledPlan,
    local: Tensor,
    ops: TensorOps,
    collectives: Collectives,
    summation: Summation = Summation.FAST,
) -> Run:
    """Run a plan up to its last round, which is left under way; `local` may change or go meanwhile.

    Communication: that of the plan. See Note [In flight].
    """
    running = Run(execute_steps(compiled, local, ops, summation, keeps_source=False), collectives)
    for _ in range(compiled.num_rounds(local, ops, summation) - 1):
        running.advance()
    return running


def run_many(
    many: Sequence[tuple[CompiledPlan, Tensor]],
    ops: TensorOps,
    collectives: Collectives,
    summation: Summation = Summation.FAST,
) -> list[Tensor]:
    """Run several plans together: their first rounds are all under way before one is waited for, and so on.

    Communication: that of the plans. See Note [In flight].
    """
    runs = [Run(execute_steps(compiled, local, ops, summation), collectives) for compiled, local in many]
    while not all(running.is_done for running in runs):
        for running in runs:
            running.advance()
    return [running.finish() for running in runs]
