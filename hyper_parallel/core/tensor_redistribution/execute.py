# SPDX-License-Identifier: Apache-2.0
"""Plans made ready for one rank, and the loop that runs them.

The loop does no communication itself: it is a generator that yields what it wants communicated and is sent
the result. One process answers with its framework's collectives; the virtual platform runs the generators of
all ranks side by side and answers from their midst.

What those who answer owe: the input of a request is not changed, and no answer shares memory with it.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, TypeAlias, assert_never

from hyper_parallel.core.box import Box, box_numel, box_shape, intersect, relative_to, whole_box
from hyper_parallel.core.layout import Layout
from hyper_parallel.core.protocols import Collectives, Tensor, TensorOps
from hyper_parallel.core.tensor_redistribution.planner import Plan
from hyper_parallel.core.tensor_redistribution.steps import Step, StepKind

Ranks: TypeAlias = tuple[int, ...]
Shape: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AllReduceRequest:
    """See `Collectives.all_reduce`."""

    x: Tensor
    op: str
    ranks: Ranks


@dataclass(frozen=True, slots=True)
class ReduceScatterRequest:
    """See `Collectives.reduce_scatter`."""

    parts: Tensor
    op: str
    ranks: Ranks


@dataclass(frozen=True, slots=True)
class AllGatherRequest:
    """See `Collectives.all_gather`."""

    x: Tensor
    ranks: Ranks


@dataclass(frozen=True, slots=True)
class AllToAllRequest:
    """See `Collectives.all_to_all`."""

    sends: tuple[Tensor, ...]
    recv_shapes: tuple[Shape, ...]
    ranks: Ranks


Request: TypeAlias = AllReduceRequest | ReduceScatterRequest | AllGatherRequest | AllToAllRequest
Execution: TypeAlias = Generator[Request, Any, Tensor]


# -- making ready ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReadyStep:
    """A step for one rank: the group known, all boxes computed.

    Attributes:
        kind: What it does.
        ranks: The group, in order.
        op: The reduction.
        factor: The number to multiply by.
        shape: Shape of the new local tensor.
        sends: Per rank of the group, the part of the local tensor it gets. SLICE has one: what is kept.
        receives: Per rank of the group, where its part goes in the new local tensor.
        is_equal: Whether all parts have one shape, so that the collective of equal parts serves. The same
            on all ranks of the group, as is `is_void`.
        is_stacked: Whether the parts, stacked, are the whole tensor in memory order: no packing.
        is_void: Whether nobody in the group has an element to give.
        is_first: Whether this rank keeps the value when a reduction is made pending.
    """

    kind: StepKind
    ranks: Ranks
    op: str
    factor: float
    shape: Shape
    sends: tuple[Box, ...] = ()
    receives: tuple[Box, ...] = ()
    is_equal: bool = False
    is_stacked: bool = False
    is_void: bool = False
    is_first: bool = False

    @property
    def shares_memory(self) -> bool:
        """Whether the result may lie in the memory of the input."""
        match self.kind:
            case StepKind.SLICE:
                return not self.is_void
            case StepKind.MAKE_PARTIAL:
                return not self.is_void and _keeps_value(self)
            case StepKind.SCALE:
                return self.factor == 1
            case _:
                return False


@dataclass(frozen=True, slots=True)
class CompiledPlan:
    """A plan made ready for one rank.

    Attributes:
        plan: The plan.
        rank: The rank.
        steps: Its steps.
        needs_copy: Whether the steps alone would leave the result in the memory of the input.
    """

    plan: Plan
    rank: int
    steps: tuple[ReadyStep, ...]
    needs_copy: bool


class BoxTable:
    """The boxes of one global shape, each computed once; share it to make a plan ready for many ranks."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self._boxes: dict[tuple[Layout, int], Box] = {}

    def box(self, layout: Layout, rank: int) -> Box:
        """As `layout.box(shape, rank)`."""
        found = self._boxes.get((layout, rank))
        if found is None:
            found = self._boxes[layout, rank] = layout.box(self.shape, rank)
        return found


def compile_plan(plan: Plan, rank: int, table: BoxTable | None = None) -> CompiledPlan:
    """Compute everything that running the plan on `rank` needs.

    Args:
        plan: The plan.
        rank: Global rank in its mesh.
        table: Boxes of the plan's shape, to share between ranks.

    Communication: none. Memory: two boxes per rank of the largest group.
    """
    table = BoxTable(plan.shape) if table is None else table
    steps = tuple(_compile(step, rank, table) for step in plan.steps)
    needs_copy = bool(steps) and all(step.shares_memory for step in steps)
    return CompiledPlan(plan, rank, steps, needs_copy)


def _compile(step: Step, rank: int, table: BoxTable) -> ReadyStep:
    ranks = step.src.mesh.group_ranks(step.axes, rank)
    before, after = table.box(step.src, rank), table.box(step.dst, rank)
    shape = box_shape(after)
    sends: tuple[Box, ...] = ()
    receives: tuple[Box, ...] = ()
    is_equal = is_stacked = False
    is_void = box_numel(after) == 0
    match step.kind:
        case StepKind.SLICE:
            sends = (_within(after, before),)
        case StepKind.REDUCE_SCATTER:
            sends = tuple(_within(table.box(step.dst, peer), before) for peer in ranks)
            is_equal, is_stacked = _regularity(sends, box_shape(before))
            is_void = box_numel(before) == 0
        case StepKind.ALL_GATHER:
            receives = tuple(_within(table.box(step.src, peer), after) for peer in ranks)
            is_equal, is_stacked = _regularity(receives, shape)
        case StepKind.EXCHANGE:
            theirs = [table.box(step.src, peer) for peer in ranks]
            nothing = ((0, 0),) * len(shape)
            has_copies = bool(step.copy_axes)
            sends = tuple(
                nothing
                if has_copies and not step.gives(rank, peer)
                else _common(before, table.box(step.dst, peer), before)
                for peer in ranks
            )
            receives = tuple(
                nothing if has_copies and not step.gives(peer, rank) else _common(box, after, after)
                for box, peer in zip(theirs, ranks, strict=True)
            )
            is_void = all(box_numel(box) == 0 for box in theirs)
        case StepKind.ALL_REDUCE | StepKind.SCALE | StepKind.MAKE_PARTIAL:
            pass
        case _:
            assert_never(step.kind)
    return ReadyStep(
        step.kind,
        ranks,
        step.op or "",
        step.factor,
        shape,
        sends,
        receives,
        is_equal=is_equal,
        is_stacked=is_stacked,
        is_void=is_void,
        is_first=rank == ranks[0],
    )


def _within(box: Box, outer: Box) -> Box:
    """`box` as seen from the start of `outer`; an empty one, which lies nowhere, keeps its sizes."""
    if box_numel(box) == 0:
        return tuple((0, stop - start) for start, stop in box)
    return relative_to(box, outer)


def _common(a: Box, b: Box, origin: Box) -> Box:
    """The intersection as seen from the start of `origin`."""
    shared = intersect(a, b)
    return ((0, 0),) * len(origin) if shared is None else relative_to(shared, origin)


def _regularity(boxes: tuple[Box, ...], shape: Shape) -> tuple[bool, bool]:
    """Whether the boxes have one shape, and whether they are consecutive slabs of the outermost dim of size over 1."""
    first = box_shape(boxes[0])
    if any(box_shape(box) != first for box in boxes):
        return False, False
    lead = next((dim for dim, size in enumerate(shape) if size != 1), None)
    if lead is None:
        return True, False
    expected = 0
    for box in boxes:
        start, stop = box[lead]
        rest_is_whole = box_shape(box[lead + 1 :]) == shape[lead + 1 :]
        if start != expected or not rest_is_whole:
            return True, False
        expected = stop
    return True, expected == shape[lead]


# -- running --------------------------------------------------------------------------------------


def execute_steps(compiled: CompiledPlan, local: Tensor, ops: TensorOps) -> Execution:
    """Run a plan on one rank's local tensor, which is not changed.

    Args:
        compiled: The plan, for this rank.
        local: Local tensor under `compiled.plan.src`.
        ops: The framework's local tensor work.

    Yields:
        Requests, to be answered with what the method of `Collectives` of that name returns.

    Returns:
        Local tensor under `compiled.plan.dst`: `local` itself if the plan has no steps, else one that shares no memory
        with it.
    """
    out = local
    for step in compiled.steps:
        out = yield from _run_step(step, out, ops)
    if not compiled.needs_copy:
        return out
    shape = compiled.steps[-1].shape
    copied = ops.empty(shape, out)
    ops.write(copied, whole_box(shape), out)
    return copied


def _run_step(step: ReadyStep, x: Tensor, ops: TensorOps) -> Execution:
    if step.is_void:
        return ops.empty(step.shape, x)
    match step.kind:
        case StepKind.SLICE:
            return ops.slice(x, step.sends[0])
        case StepKind.REDUCE_SCATTER:
            return (yield from _reduce_scatter(step, x, ops))
        case StepKind.ALL_REDUCE:
            return (yield AllReduceRequest(x, step.op, step.ranks))
        case StepKind.EXCHANGE:
            return (yield from _exchange(step, x, ops))
        case StepKind.ALL_GATHER:
            return (yield from _all_gather(step, x, ops))
        case StepKind.SCALE:
            return x if step.factor == 1 else ops.scale(x, step.factor)
        case StepKind.MAKE_PARTIAL:
            return x if _keeps_value(step) else _neutral(step, x, ops)
    assert_never(step.kind)


def _reduce_scatter(step: ReadyStep, x: Tensor, ops: TensorOps) -> Execution:
    num = len(step.ranks)
    if not step.is_equal:
        sends = tuple(ops.slice(x, box) for box in step.sends)
        pieces = yield AllToAllRequest(sends, (step.shape,) * num, step.ranks)
        return ops.reduce(pieces, step.op)
    if step.is_stacked:
        parts = ops.reshape(ops.contiguous(x), (num, *step.shape))
    else:
        parts = ops.empty((num, *step.shape), x)
        for i, box in enumerate(step.sends):
            part = ops.slice(x, box)
            ops.write(ops.reshape(ops.slice(parts, _row(i, step.shape)), step.shape), whole_box(step.shape), part)
    return (yield ReduceScatterRequest(parts, step.op, step.ranks))


def _exchange(step: ReadyStep, x: Tensor, ops: TensorOps) -> Execution:
    sends = tuple(ops.slice(x, box) for box in step.sends)
    shapes = tuple(box_shape(box) for box in step.receives)
    pieces = yield AllToAllRequest(sends, shapes, step.ranks)
    return _place(step, pieces, x, ops)


def _all_gather(step: ReadyStep, x: Tensor, ops: TensorOps) -> Execution:
    shapes = tuple(box_shape(box) for box in step.receives)
    if not step.is_equal:
        pieces = yield AllToAllRequest((x,) * len(step.ranks), shapes, step.ranks)
        return _place(step, pieces, x, ops)
    stacked = yield AllGatherRequest(x, step.ranks)
    if step.is_stacked:
        return ops.reshape(stacked, step.shape)
    pieces = [ops.reshape(ops.slice(stacked, _row(i, shape)), shape) for i, shape in enumerate(shapes)]
    return _place(step, pieces, x, ops)


def _row(index: int, shape: Shape) -> Box:
    """Box of part `index` in a stack of parts of `shape`."""
    return ((index, index + 1), *whole_box(shape))


def _place(step: ReadyStep, pieces: list[Tensor], like: Tensor, ops: TensorOps) -> Tensor:
    """Put received pieces where they belong; a piece that is the whole result is it."""
    arrived = [(box, piece) for box, piece in zip(step.receives, pieces, strict=True) if box_numel(box)]
    if len(arrived) == 1:
        return arrived[0][1]
    out = ops.empty(step.shape, like)
    for box, piece in arrived:
        ops.write(out, box, piece)
    return out


def _keeps_value(step: ReadyStep) -> bool:
    """Whether this rank's operand of a reduction made pending is the value itself; sum and prod count it once."""
    return step.is_first or step.op not in ("sum", "prod")


def _neutral(step: ReadyStep, x: Tensor, ops: TensorOps) -> Tensor:
    zeros = ops.zeros(step.shape, x)
    return zeros if step.op == "sum" else zeros + 1


def run(compiled: CompiledPlan, local: Tensor, ops: TensorOps, collectives: Collectives) -> Tensor:
    """Run a plan in this process. See `execute_steps`.

    Communication: that of the plan.
    """
    execution = execute_steps(compiled, local, ops)
    answer: Any = None
    while True:
        try:
            request = execution.send(answer)
        except StopIteration as done:
            return done.value
        answer = _answer(request, collectives)


def _answer(request: Request, collectives: Collectives) -> Any:
    match request:
        case AllReduceRequest(x, op, ranks):
            return collectives.all_reduce(x, op, ranks)
        case ReduceScatterRequest(parts, op, ranks):
            return collectives.reduce_scatter(parts, op, ranks)
        case AllGatherRequest(x, ranks):
            return collectives.all_gather(x, ranks)
        case AllToAllRequest(sends, shapes, ranks):
            return collectives.all_to_all(sends, shapes, ranks)
    assert_never(request)
