# SPDX-License-Identifier: Apache-2.0
"""Plans made ready for one rank, and the loop that runs them.

The loop does no communication itself: it is a generator that yields what it wants communicated, in rounds, and is
sent the results. One process answers with its framework's collectives (drive.py); the virtual platform runs
the generators of all ranks side by side and answers from their midst.

What those who answer owe: the input of a request is not changed, and no answer shares memory with it.

Note [Pipeline]
    A large reduce-scatter that an all-reduce follows (gradients of replicas of shards) is cut into chunks: while one
    chunk is all-reduced the next is reduce-scattered, on other links. Chunks are ranges of the first dim of every
    rank's part, by global sizes, so all ranks cut alike.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, assert_never

from hyper_parallel.core.box import Box, box_numel, box_shape, intersect, relative_to, whole_box
from hyper_parallel.core.layout import Layout
from hyper_parallel.core.protocols import Reduction, Summation, Tensor, TensorOps
from hyper_parallel.core.tensor_redistribution.cost import largest_piece
from hyper_parallel.core.tensor_redistribution.planner import Plan
from hyper_parallel.core.tensor_redistribution.steps import Step, StepKind

PIPELINE_BYTES = 4 << 20
"""Parts of at least this many bytes are pipelined. See Note [Pipeline]."""
NUM_CHUNKS = 4
"""Chunks of a pipeline."""
_ROUNDED = ("sum", "prod")
"""Reductions whose result depends on how carefully they are made."""

Ranks: TypeAlias = tuple[int, ...]
Shape: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AllReduceRequest:
    """See `Collectives.all_reduce`."""

    x: Tensor
    reduction: Reduction
    ranks: Ranks


@dataclass(frozen=True, slots=True)
class ReduceScatterRequest:
    """See `Collectives.reduce_scatter`."""

    parts: tuple[Tensor, ...]
    reduction: Reduction
    ranks: Ranks
    is_equal: bool


@dataclass(frozen=True, slots=True)
class AllGatherRequest:
    """See `Collectives.all_gather`."""

    x: Tensor
    outs: tuple[Tensor, ...]
    ranks: Ranks
    is_equal: bool


@dataclass(frozen=True, slots=True)
class AllToAllRequest:
    """See `Collectives.all_to_all`."""

    sends: tuple[Tensor, ...]
    outs: tuple[Tensor, ...]
    ranks: Ranks


Request: TypeAlias = AllReduceRequest | ReduceScatterRequest | AllGatherRequest | AllToAllRequest
Round: TypeAlias = "tuple[Request, ...]"
"""Requests that are under way at the same time."""
Execution: TypeAlias = Generator[Round, Sequence[Any], Tensor]


# -- making ready ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReadyStep:
    """A step for one rank: the group known, all boxes computed.

    Attributes:
        kind: What it does.
        ranks: The group, in order.
        op: The reduction.
        factor: The number to multiply by.
        divisor: The number that a finished sum is divided by.
        shape: Shape of the new local tensor.
        sends: Per rank of the group, the part of the local tensor it gets. SLICE has one: what is kept.
        receives: Per rank of the group, where its part goes in the new local tensor.
        is_equal: Whether all parts have one shape, so that the collective of equal parts serves. The same
            on all ranks of the group, as are `is_void`, `is_halved` and `is_pipelined`.
        is_void: Whether nobody in the group has an element to give.
        is_first: Whether this rank keeps the value when a reduction is made pending.
        is_halved: Whether an all-reduce is always done as a reduce-scatter and an all-gather, so that we do the adding.
        is_pipelined: Whether this reduce-scatter and the all-reduce behind it run as a pipeline.
    """

    kind: StepKind
    ranks: Ranks
    op: str
    factor: float
    divisor: int
    shape: Shape
    sends: tuple[Box, ...] = ()
    receives: tuple[Box, ...] = ()
    is_equal: bool = False
    is_void: bool = False
    is_first: bool = False
    is_halved: bool = False
    is_pipelined: bool = False

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

    def num_rounds(self, local: Tensor, ops: TensorOps, summation: Summation) -> int:
        """How often `execute_steps` yields on this rank."""
        num, steps = 0, iter(self.steps)
        for step in steps:
            if step.is_void or not step.kind.communicates:
                continue
            if _runs_as_pipeline(step, summation):
                next(steps)
                num += NUM_CHUNKS
            num += 1 + _is_halved(step, local, ops, summation)
        return num


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
    steps = [_compile(step, rank, table) for step in plan.steps]
    for i, step in enumerate(plan.steps):
        if step.kind is StepKind.ALL_REDUCE and step.op in _ROUNDED:
            # Values of 16 bits are to be added in fp32.
            is_narrow = plan.itemsize <= 2
            steps[i] = replace(steps[i], is_halved=is_narrow)
            if i and plan.steps[i - 1].kind is StepKind.REDUCE_SCATTER and not is_narrow:
                steps[i - 1] = replace(steps[i - 1], is_pipelined=_is_worth_chunks(step, plan))
    needs_copy = bool(steps) and all(step.shares_memory for step in steps)
    return CompiledPlan(plan, rank, tuple(steps), needs_copy)


def _is_worth_chunks(step: Step, plan: Plan) -> bool:
    part = largest_piece(step.src, plan.shape)
    return bool(part) and part[0] >= NUM_CHUNKS and plan.itemsize * math.prod(part) >= PIPELINE_BYTES


def _compile(step: Step, rank: int, table: BoxTable) -> ReadyStep:
    ranks = step.src.mesh.group_ranks(step.axes, rank)
    before, after = table.box(step.src, rank), table.box(step.dst, rank)
    shape = box_shape(after)
    sends: tuple[Box, ...] = ()
    receives: tuple[Box, ...] = ()
    is_equal = False
    is_void = box_numel(after) == 0
    match step.kind:
        case StepKind.SLICE:
            sends = (_within(after, before),)
        case StepKind.REDUCE_SCATTER:
            sends = tuple(_within(table.box(step.dst, peer), before) for peer in ranks)
            is_equal = _have_one_shape(sends)
            is_void = box_numel(before) == 0
        case StepKind.ALL_GATHER:
            receives = tuple(_within(table.box(step.src, peer), after) for peer in ranks)
            is_equal = _have_one_shape(receives)
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
        step.divisor,
        shape,
        sends,
        receives,
        is_equal=is_equal,
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


def _have_one_shape(boxes: tuple[Box, ...]) -> bool:
    first = box_shape(boxes[0])
    return all(box_shape(box) == first for box in boxes)


# -- running --------------------------------------------------------------------------------------


def execute_steps(
    compiled: CompiledPlan,
    local: Tensor,
    ops: TensorOps,
    summation: Summation = Summation.FAST,
    *,
    keeps_source: bool = True,
) -> Execution:
    """Run a plan on one rank's local tensor, which is not changed.

    Args:
        compiled: The plan, for this rank.
        local: Local tensor under `compiled.plan.src`.
        ops: The framework's local tensor work.
        summation: How carefully sums are made.
        keeps_source: Whether `local` stays as it is until the end. If not, what the last round reads is copied.

    Yields:
        Rounds of requests, to be answered with what waiting for the method of `Collectives` of that name gives.

    Returns:
        Local tensor under `compiled.plan.dst`: `local` itself if the plan has no steps, else one that shares no memory
        with it.
    """
    out, is_source = local, True
    steps = iter(compiled.steps)
    for step in steps:
        if is_source and not keeps_source and step.kind.communicates:
            out = _copied(out, ops)
        is_source = is_source and step.shares_memory
        if _runs_as_pipeline(step, summation):
            out = yield from _pipeline(step, next(steps), out, ops, summation)
        else:
            out = yield from _run_step(step, out, ops, summation)
    return _copied(out, ops) if compiled.needs_copy else out


def _runs_as_pipeline(step: ReadyStep, summation: Summation) -> bool:
    return step.is_pipelined and not step.is_void and summation is Summation.FAST


def _is_halved(step: ReadyStep, like: Tensor, ops: TensorOps, summation: Summation) -> bool:
    if step.kind is not StepKind.ALL_REDUCE or step.op not in _ROUNDED:
        return False
    return step.is_halved or summation is not Summation.FAST or ops.prefers_halves(like, len(step.ranks))


def _copied(x: Tensor, ops: TensorOps) -> Tensor:
    copied = ops.empty(tuple(x.shape), x)
    ops.write(copied, whole_box(x.shape), x)
    return copied


def _run_step(step: ReadyStep, x: Tensor, ops: TensorOps, summation: Summation) -> Execution:
    if step.is_void:
        return ops.empty(step.shape, x)
    match step.kind:
        case StepKind.SLICE:
            return ops.slice(x, step.sends[0])
        case StepKind.REDUCE_SCATTER:
            parts = tuple(ops.slice(x, box) for box in step.sends)
            return (yield from _reduce_scatter(step, parts, summation))
        case StepKind.ALL_REDUCE:
            return (yield from _all_reduce(step, x, ops, summation))
        case StepKind.EXCHANGE:
            out, outs = _outputs(step, x, ops)
            yield (AllToAllRequest(tuple(ops.slice(x, box) for box in step.sends), outs, step.ranks),)
            return out
        case StepKind.ALL_GATHER:
            out, outs = _outputs(step, x, ops)
            yield (AllGatherRequest(x, outs, step.ranks, step.is_equal),)
            return out
        case StepKind.SCALE:
            return x if step.factor == 1 else ops.scale(x, step.factor)
        case StepKind.MAKE_PARTIAL:
            return x if _keeps_value(step) else _neutral(step, x, ops)
    assert_never(step.kind)


def _outputs(step: ReadyStep, like: Tensor, ops: TensorOps) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The new local tensor and, per rank of the group, the part of it that comes from there."""
    out = ops.empty(step.shape, like)
    return out, tuple(ops.slice(out, box) for box in step.receives)


def _reduction(step: ReadyStep, summation: Summation) -> Reduction:
    return Reduction(step.op, step.divisor, summation)


def _reduce_scatter(step: ReadyStep, parts: tuple[Tensor, ...], summation: Summation) -> Execution:
    answers = yield (ReduceScatterRequest(parts, _reduction(step, summation), step.ranks, step.is_equal),)
    return answers[0]


def _all_reduce(step: ReadyStep, x: Tensor, ops: TensorOps, summation: Summation) -> Execution:
    reduction = _reduction(step, summation)
    if not _is_halved(step, x, ops, summation):
        answers = yield (AllReduceRequest(x, reduction, step.ranks),)
        return answers[0]
    numel = math.prod(x.shape)
    size = -(-numel // len(step.ranks))
    flat = ops.reshape(ops.contiguous(x), (numel,))
    ends = [min(i * size, numel) for i in range(len(step.ranks) + 1)]
    parts = tuple(ops.slice(flat, ((start, stop),)) for start, stop in itertools.pairwise(ends))
    is_equal = size * len(step.ranks) == numel
    answers = yield (ReduceScatterRequest(parts, reduction, step.ranks, is_equal),)
    out = ops.empty((numel,), x)
    outs = tuple(ops.slice(out, ((start, stop),)) for start, stop in itertools.pairwise(ends))
    yield (AllGatherRequest(answers[0], outs, step.ranks, is_equal),)
    return ops.reshape(out, step.shape)


def _pipeline(scatter: ReadyStep, reduce: ReadyStep, x: Tensor, ops: TensorOps, summation: Summation) -> Execution:
    """A reduce-scatter and an all-reduce in chunks. See Note [Pipeline]."""
    parts = [ops.slice(x, box) for box in scatter.sends]
    out = ops.empty(reduce.shape, x)
    waiting: list[Box] = []
    piece: Tensor = None
    for i in range(NUM_CHUNKS + 1):
        round_: list[Request] = []
        if i < NUM_CHUNKS:
            chunks = tuple(ops.slice(part, _chunk(part.shape, i)) for part in parts)
            round_.append(ReduceScatterRequest(chunks, _reduction(scatter, summation), scatter.ranks, False))
        if waiting:
            round_.append(AllReduceRequest(piece, _reduction(reduce, summation), reduce.ranks))
        answers = yield tuple(round_)
        if waiting:
            ops.write(out, waiting.pop(), answers[-1])
        if i < NUM_CHUNKS:
            piece = answers[0]
            waiting.append(_chunk(reduce.shape, i))
    return out


def _chunk(shape: Shape, index: int) -> Box:
    """Chunk `index` of a part: a range of its first dim."""
    length = shape[0] if shape else 1
    start, stop = (length * i // NUM_CHUNKS for i in (index, index + 1))
    return ((start, stop), *whole_box(shape[1:]))


def _keeps_value(step: ReadyStep) -> bool:
    """Whether this rank's operand of a reduction made pending is the value itself; sum and prod count it once."""
    return step.is_first or step.op not in _ROUNDED


def _neutral(step: ReadyStep, x: Tensor, ops: TensorOps) -> Tensor:
    zeros = ops.zeros(step.shape, x)
    return zeros if step.op == "sum" else zeros + 1
