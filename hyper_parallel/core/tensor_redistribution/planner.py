# SPDX-License-Identifier: Apache-2.0
"""Plans in normal form: from one layout to any other on the same mesh, in at most four communicating steps.

Note [Normal form]
    C is the source, D the target, M the layout before the last gather. New axes are those that D shards and C does
    not (copies or pending reductions); leaving axes are those that C shards and D does not. Per dim, M is C with the
    new axes if D is its major part and the rest is leaving, else D followed by the axes leaving that dim.
    1. If C is the major part of M in every dim, cut C to M. Otherwise cut C to C + new axes. Cutting copies is a
       slice; if pending reductions are among the new axes, one reduce-scatter over all of these does it together.
    2. One all-reduce of the other reductions to be finished, on the smaller pieces.
    3. If C + new axes is not M: one exchange over the axes behind the common major part of each dim. Every rank
       sends every other of the group the intersection of their boxes, so any order and any sizes will do.
    4. One all-gather over the leaving axes, M to D.
    5. Local steps that make reductions pending.
    Axes of size 1 and ragged sizes equal to those of the chunk rule are first taken out: they move nothing.
    Everything is decided from layouts and global sizes, never from a rank's own, so all ranks agree.

Note [Candidates]
    Without an exchange the normal form receives the least possible and is the plan. Otherwise it is compared
    with others, and the fastest wins (See Note [Cost of a plan]):
    - direct: one exchange from C to D (after the reductions to be finished). Every rank receives exactly what it
      lacks, also where sizes are uneven or ragged. Boxes that only change owner make it a permutation. Copies in C
      either share the giving (See Note [Who gives a copy]) or each set of copies exchanges among itself;
    - early scatter: reductions that leave copies are reduce-scattered before the exchange, and gathered at the end;
    - gather first: the leaving axes are gathered before the exchange, which then has fewer peers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

from hyper_parallel.core.box import box_numel, chunk_size
from hyper_parallel.core.errors import LayoutError
from hyper_parallel.core.layout import Layout, Split
from hyper_parallel.core.placement_types import ReduceOp
from hyper_parallel.core.tensor_redistribution.cost import Pieces, Topology, largest_piece, step_cost, step_seconds
from hyper_parallel.core.tensor_redistribution.steps import Step, StepKind
from hyper_parallel.core.tensor_redistribution.table import aligned, show_bytes, show_seconds

TIE = 0.01
"""Figures of two plans that differ by less than this share count as equal."""
MOST_EXTRA = 1.5
"""A candidate that receives more than this times the least is left out, however few its messages are."""
MOST_UNEVEN = 1.1
"""Pieces up to this much larger than the average count as even."""
Units: TypeAlias = "tuple[Split, ...]"
Splits: TypeAlias = "Sequence[Units]"


@dataclass(frozen=True, slots=True)
class Plan:
    """How to bring a tensor from one layout to another. `print` it for a table.

    Attributes:
        src: Layout before.
        dst: Layout after.
        shape: Global shape.
        itemsize: Bytes per element.
        steps: What to do, in order.
        topology: What communication was taken to cost.
    """

    src: Layout
    dst: Layout
    shape: tuple[int, ...]
    itemsize: int
    steps: tuple[Step, ...]
    topology: Topology

    @property
    def num_collectives(self) -> int:
        """Number of communicating steps."""
        return sum(step.kind.communicates for step in self.steps)

    def bytes_received(self, rank: int) -> int:
        """Bytes that `rank` receives in all."""
        return self.itemsize * sum(step.received(self.shape, rank) for step in self.steps)

    def bytes_sent(self, rank: int) -> int:
        """Bytes that `rank` sends in all."""
        return self.itemsize * sum(step.sent(self.shape, rank) for step in self.steps)

    def peak_bytes(self, rank: int | None = None) -> int:
        """Most bytes that `rank` (default: any rank) holds at once for the input, the wire and the output of a step."""
        if rank is None:
            whole = math.prod(largest_piece(self.src, self.shape))
            return self.itemsize * max([whole, *(step_cost(step, self.shape).held for step in self.steps)])
        held = [box_numel(self.src.box(self.shape, rank))]
        for step in self.steps:
            before = box_numel(step.src.box(self.shape, rank))
            after = box_numel(step.dst.box(self.shape, rank))
            wire = step.group_size * after if step.kind is StepKind.REDUCE_SCATTER else 0
            held.append(before + after + wire)
        return self.itemsize * max(held)

    @property
    def seconds(self) -> float:
        """Predicted time. See Note [Cost of a plan]."""
        return sum(self._seconds(step) for step in self.steps)

    def _seconds(self, step: Step) -> float:
        return step_seconds(step, step_cost(step, self.shape), self.itemsize, self.topology)

    def __str__(self) -> str:
        """A table, one line per step; bytes are those of the rank that receives or holds most in that step."""
        mesh = self.src.mesh
        head = f"{self.src} -> {self.dst}   shape {self.shape}   mesh {mesh}   {self.itemsize} B per element"
        if not self.steps:
            return f"{head}\n  nothing to do"
        rows = [("step", "layouts", "ranks", "received", "held", "time")]
        for step in self.steps:
            received = self.itemsize * max(step.received(self.shape, rank) for rank in mesh.ranks)
            held = self.itemsize * step_cost(step, self.shape).held
            over = f"{step.group_size} over {', '.join(step.axes)}" if step.axes else "local"
            layouts = f"{step.src} -> {step.dst}"
            time = show_seconds(self._seconds(step))
            rows.append((f"{step.kind.value}{_how(step)}", layouts, over, show_bytes(received), show_bytes(held), time))
        received = max(self.bytes_received(rank) for rank in mesh.ranks)
        total = show_bytes(received), show_bytes(self.peak_bytes()), show_seconds(self.seconds)
        rows.append(("in all", "", "", *total))
        return "\n".join([head, *(f"  {line}" for line in aligned(rows, num_numbers=3))])


def _how(step: Step) -> str:
    if step.kind is StepKind.SCALE:
        return f" x {step.factor:g}"
    divided = f" / {step.divisor}" if step.divisor > 1 else ""
    return f" {step.op}{divided}" if step.op else ""


class Form(NamedTuple):
    """How a plan differs from the normal form. See Note [Candidates].

    Attributes:
        is_direct: One exchange leads to the target, without a gather behind it.
        keeps_copies_apart: That exchange runs within each set of copies.
        scatters_early: Reductions that leave copies are scattered first and gathered at the end.
        gathers_first: The gather comes before the exchange.
    """

    is_direct: bool = False
    keeps_copies_apart: bool = False
    scatters_early: bool = False
    gathers_first: bool = False


NORMAL = Form()


def plan(
    src: Layout,
    dst: Layout,
    shape: Sequence[int],
    itemsize: int = 4,
    topology: Topology | None = None,
    max_bytes: int | None = None,
) -> Plan:
    """Plan a redistribution: the fastest of a few candidates. See Note [Normal form] and Note [Candidates].

    Args:
        src: Layout the tensor has.
        dst: Layout it shall have, on the same mesh.
        shape: Global shape.
        itemsize: Bytes per element.
        topology: What communication costs. Default: `Topology.of` the mesh.
        max_bytes: Most bytes that a rank may hold at once for input, wire and output. Default: any number.

    Returns:
        The plan; `print` it for a table.

    Raises:
        LayoutError: different meshes or numbers of dims, or no candidate keeps to `max_bytes`.
        UnevenError: ragged sizes that do not fit the shape.
        MeshError: `topology` is one of another number of axes.

    Communication: none. Memory: a few layouts, whatever the number of ranks.

    Example:
        >>> from hyper_parallel.core.device_mesh import DeviceMesh
        >>> mesh = DeviceMesh.grid(dp=2, tp=2)
        >>> found = plan(mesh.layout("dp", "tp"), mesh.layout("tp", "dp"), (4, 4))
        >>> [step.kind.value for step in found.steps], found.bytes_received(1)
        (['exchange'], 16)
    """
    shape, topology = _checked(src, dst, shape, topology)
    from_, to = _essential(src, shape), _essential(dst, shape)
    steps = _normal(src, dst, from_, to, shape)
    is_even = _is_even(from_, shape) and _is_even(to, shape)
    forms = _forms(from_, to, steps, is_even=is_even)
    if forms or (steps and max_bytes is not None):
        found = [_Builder(from_, to, shape).build(form) for form in forms]
        if is_even or not found or max_bytes is not None:
            found.append(steps)  # behind the direct ones, which receive less if the figures are equal
        steps = _best(found, shape, itemsize, topology, max_bytes)
    return Plan(src, dst, shape, itemsize, _between(src, dst, steps), topology)


def candidates(
    src: Layout, dst: Layout, shape: Sequence[int], itemsize: int = 4, topology: Topology | None = None
) -> list[Plan]:
    """All plans that `plan` weighs against each other, the normal form first. See Note [Candidates].

    Raises:
        LayoutError, UnevenError, MeshError: as `plan`.

    Communication: none. Memory: a few layouts.
    """
    shape, topology = _checked(src, dst, shape, topology)
    from_, to = _essential(src, shape), _essential(dst, shape)
    found = [_normal(src, dst, from_, to, shape)]
    is_even = _is_even(from_, shape) and _is_even(to, shape)
    found += [_Builder(from_, to, shape).build(form) for form in _forms(from_, to, found[0], is_even=is_even)]
    return [Plan(src, dst, shape, itemsize, _between(src, dst, steps), topology) for steps in found]


def _checked(
    src: Layout, dst: Layout, shape: Sequence[int], topology: Topology | None
) -> tuple[tuple[int, ...], Topology]:
    if src.mesh != dst.mesh:
        raise LayoutError(f"plan {src} -> {dst}: the meshes {src.mesh} and {dst.mesh} differ. Use layouts on one mesh.")
    if src.ndim != dst.ndim:
        raise LayoutError(
            f"plan {src} -> {dst}: the layouts have {src.ndim} and {dst.ndim} dims. Give both one entry per dim."
        )
    shape = tuple(shape)
    src.check_shape(shape, "plan")
    dst.check_shape(shape, "plan")
    if topology is None:
        return shape, Topology.of(src.mesh)
    topology.check(src.mesh)
    return shape, topology


def _normal(src: Layout, dst: Layout, from_: Layout, to: Layout, shape: tuple[int, ...]) -> list[Step]:
    """The steps of the normal form between the layouts without axes that move nothing."""
    if src is dst:
        return []
    if 0 in shape:
        return [Step(StepKind.SLICE, src, dst)]
    return _Builder(from_, to, shape).build(NORMAL)


def _between(src: Layout, dst: Layout, steps: list[Step]) -> tuple[Step, ...]:
    """The steps, from and to these layouts with the same boxes."""
    if steps:
        steps[0] = replace(steps[0], src=src)
        steps[-1] = replace(steps[-1], dst=dst)
    return tuple(steps)


def _forms(src: Layout, dst: Layout, normal: Sequence[Step], *, is_even: bool) -> list[Form]:
    """Forms that could be better than the normal one, of which `normal` are the steps."""
    kinds = {step.kind for step in normal}
    if StepKind.EXCHANGE not in kinds:
        return []
    has_copies = StepKind.SLICE in kinds
    has_gather = StepKind.ALL_GATHER in kinds
    forms = []
    if has_copies or has_gather:
        forms.append(Form(is_direct=True))
    if has_copies:
        forms.append(Form(is_direct=True, keeps_copies_apart=True))
    if StepKind.ALL_REDUCE in kinds:
        forms += [Form(scatters_early=True), Form(is_direct=True, scatters_early=True)]
    if has_gather and is_even and not src.partial and _are_minor(src, dst):
        forms.append(Form(gathers_first=True))
    return forms


def _is_even(layout: Layout, shape: tuple[int, ...]) -> bool:
    """Whether the pieces are about equal; elsewhere the largest piece says little about what the normal form moves."""
    num_pieces = layout.mesh.num_ranks(layout.sharded_axes)
    return math.prod(largest_piece(layout, shape)) * num_pieces <= MOST_UNEVEN * math.prod(shape)


def _are_minor(src: Layout, dst: Layout) -> bool:
    """Whether the axes that leave cut behind all others of their dim, so that they can be gathered first."""
    for axes in src.dims:
        leave = [dst.dim_of(axis) is None for axis in axes]
        if leave != sorted(leave):
            return False
    return True


class _Score(NamedTuple):
    """What a candidate costs: predicted seconds, bytes held at once, elements received."""

    seconds: float
    held: int
    received: int
    steps: list[Step]


def _best(
    candidates: Sequence[list[Step]],
    shape: tuple[int, ...],
    itemsize: int,
    topology: Topology,
    max_bytes: int | None,
) -> list[Step]:
    """The fastest that keeps to `max_bytes`; of those about as fast, the one that holds least, then the first."""
    scored = []
    pieces: Pieces = {}
    for steps in candidates:
        costs = [step_cost(step, shape, pieces) for step in steps]
        held = itemsize * max((cost.held for cost in costs), default=0)
        received = sum(cost.received for cost in costs)
        seconds = sum(step_seconds(step, cost, itemsize, topology) for step, cost in zip(steps, costs, strict=True))
        scored.append(_Score(seconds, held, received, steps))
    if max_bytes is not None:
        scored = _within_cap(scored, shape, max_bytes)
    most = MOST_EXTRA * min(score.received for score in scored)
    scored = [score for score in scored if score.received <= most]
    limit = (1 + TIE) * min(score.seconds for score in scored)
    fast = [score for score in scored if score.seconds <= limit]
    lean = (1 + TIE) * min(score.held for score in fast)
    return next(score.steps for score in fast if score.held <= lean)


def _within_cap(scored: Sequence[_Score], shape: tuple[int, ...], max_bytes: int) -> list[_Score]:
    within = [score for score in scored if score.held <= max_bytes]
    if not within:
        least = min(scored, key=lambda score: score.held)
        raise LayoutError(
            f"plan {least.steps[0].src} -> {least.steps[-1].dst} of shape {shape}: max_bytes is {max_bytes}, the "
            f"leanest plan holds {least.held} at once. Allow that many, or redistribute a part at a time."
        )
    return within


def _essential(layout: Layout, shape: tuple[int, ...]) -> Layout:
    """The layout of the same boxes without axes of size 1 and without ragged sizes that follow the chunk rule."""
    mesh = layout.mesh
    if not layout.ragged and 1 not in mesh.shape:
        return layout
    dims: list[list[str]] = []
    ragged: dict[str, tuple[int, ...]] = {}
    for length, splits in zip(shape, layout.splits, strict=True):
        longest, are_equal = length, True
        dims.append([])
        for axis, sizes in splits:
            num = mesh.size(axis)
            if num == 1:
                continue
            dims[-1].append(axis)
            if sizes is not None and not (are_equal and sizes == _chunk_sizes(longest, num)):
                ragged[axis] = sizes
            are_equal = are_equal and (longest % num == 0 if sizes is None else len(set(sizes)) == 1)
            longest = chunk_size(longest, num) if sizes is None else max(sizes)
    partial = [(axis, op) for axis, op in layout.partial if mesh.size(axis) > 1]
    return Layout(mesh, dims, partial=partial, ragged=ragged)


def _chunk_sizes(length: int, num: int) -> tuple[int, ...]:
    size = chunk_size(length, num)
    return tuple(max(0, min(size, length - i * size)) for i in range(num))


class _Builder:
    """Adds steps one after the other; `layout` is where the tensor is by then. See Note [Normal form]."""

    def __init__(self, src: Layout, dst: Layout, shape: tuple[int, ...]) -> None:
        self.layout = src
        self.dst = dst
        self.shape = shape
        self.steps: list[Step] = []
        self.leaving = [axis for axis in src.sharded_axes if dst.dim_of(axis) is None]
        self.new = [axis for axis in dst.sharded_axes if src.dim_of(axis) is None]
        self.rescaled = [
            (axis, op)
            for axis, op in src.partial
            if (after := dst.op_of(axis)) is not None and after is not op and after.is_linear and op.is_linear
        ]
        rescaled = {axis for axis, _ in self.rescaled}
        self.finished = [axis for axis, op in src.partial if dst.op_of(axis) is not op and axis not in rescaled]

    def build(self, form: Form) -> list[Step]:
        """The steps of a plan of that form."""
        scattered = [axis for axis in self.finished if axis in self.new]
        reduced = [axis for axis in self.finished if axis not in self.new]
        early = reduced if form.scatters_early else []
        if form.gathers_first:
            self._gather_first()
        cut, before_gather = self._cut_and_before_gather(early)
        if form.is_direct:
            before_gather = self.dst.splits
            if not self.finished:
                cut = self.layout.splits
        scattered += early
        self._finish(StepKind.REDUCE_SCATTER if scattered else StepKind.SLICE, scattered, cut)
        self._finish(StepKind.ALL_REDUCE, [axis for axis in reduced if axis not in early], cut)
        self._rescale()
        moved = _moved(self.layout.splits, before_gather)
        if form.keeps_copies_apart:
            moved = {axis for axis in moved if self.layout.dim_of(axis) is not None}
        self._add(StepKind.EXCHANGE, before_gather, axes=self._in_mesh_order(moved))
        gathered = self._in_cut_order([*self.leaving, *early], before_gather)
        self._add(StepKind.ALL_GATHER, self.dst.splits, axes=gathered)
        self._make_partial()
        return self.steps

    def _gather_first(self) -> None:
        kept = [tuple(unit for unit in units if unit[0] not in self.leaving) for units in self.layout.splits]
        axes = self._in_cut_order(self.leaving, self.layout.splits)
        self._add(StepKind.ALL_GATHER, kept, axes=axes)
        self.leaving = []

    def _cut_and_before_gather(self, early: Sequence[str]) -> tuple[Splits, Splits]:
        """Splits after step 1, and splits before the last gather; both are cut by the `early` axes as well."""
        grown, final = [], []
        wanted = self._with_early(early) if early else self.dst.splits
        new = [*self.new, *early]
        for have, want in zip(self.layout.splits, wanted, strict=True):
            with_new = _appended(have, want, new)
            rest = with_new[len(want) :]
            is_major = with_new[: len(want)] == want and all(axis in self.leaving for axis, _ in rest)
            # Ragged sizes fit the place where they were, not behind another cut.
            leaving = tuple((axis, None) for axis, _ in have if axis in self.leaving)
            grown.append(with_new)
            final.append(with_new if is_major else want + leaving)
        is_direct = all(end[: len(have)] == have for have, end in zip(self.layout.splits, final, strict=True))
        return (final if is_direct else grown), final

    def _with_early(self, early: Sequence[str]) -> Splits:
        """The target's splits with the `early` axes behind them, on the dim whose pieces they cut most evenly."""
        num = self.dst.mesh.num_ranks(early)
        pieces = list(zip(largest_piece(self.layout, self.shape), largest_piece(self.dst, self.shape), strict=True))
        dim = min(range(len(pieces)), key=lambda i: (sum(size % num for size in pieces[i]), -min(pieces[i])))
        added = tuple((axis, None) for axis in early)
        return [units + added if i == dim else units for i, units in enumerate(self.dst.splits)]

    def _finish(self, kind: StepKind, axes: Sequence[str], splits: Splits) -> None:
        """Finish the reductions over `axes` while cutting to `splits`."""
        pending = dict(self.layout.partial)
        ops = {pending.pop(axis) for axis in axes}
        # Averages, over all axes or some of them, are one sum that is divided once.
        averaged = [axis for axis in axes if self.layout.op_of(axis) is ReduceOp.AVG]
        op = "sum" if averaged else ops.pop().value if ops else None
        order = self._in_cut_order(axes, splits)
        self._add(kind, splits, pending, axes=order, op=op, divisor=self.layout.mesh.num_ranks(averaged))

    def _rescale(self) -> None:
        pending = dict(self.layout.partial)
        factor = 1.0
        for axis, op in self.rescaled:
            size = self.layout.mesh.size(axis)
            factor *= size if op is ReduceOp.SUM else 1 / size
            pending[axis] = ReduceOp.AVG if op is ReduceOp.SUM else ReduceOp.SUM
        if self.rescaled:
            self._add(StepKind.SCALE, self.layout.splits, pending, factor=factor)

    def _make_partial(self) -> None:
        made = [(axis, op) for axis, op in self.dst.partial if self.layout.op_of(axis) is None]
        for op in dict.fromkeys(op for _, op in made):
            axes = tuple(axis for axis, kind in made if kind is op)
            pending = dict(self.layout.partial) | dict.fromkeys(axes, op)
            self._add(StepKind.MAKE_PARTIAL, self.dst.splits, pending, axes=axes, op=op.value)

    def _add(
        self,
        kind: StepKind,
        splits: Splits,
        pending: Mapping[str, ReduceOp] | None = None,
        *,
        axes: tuple[str, ...] = (),
        op: str | None = None,
        factor: float = 1.0,
        divisor: int = 1,
    ) -> None:
        """Add a step to the layout of `splits` and `pending` (default: as they are), if that changes anything."""
        here, target = self.layout, tuple(splits)
        is_same = target == here.splits and (pending is None or tuple(pending.items()) == here.partial)
        if is_same and factor == 1:
            return
        if is_same:
            after = here
        elif target == self.dst.splits and not self.dst.partial and not (here.partial if pending is None else pending):
            after = self.dst
        else:
            after = Layout(
                here.mesh,
                [[axis for axis, _ in units] for units in target],
                partial=here.partial if pending is None else pending,
                ragged={axis: sizes for units in target for axis, sizes in units if sizes is not None},
            )
        if after is not here or factor != 1:
            self.steps.append(Step(kind, here, after, axes, op, factor, divisor))
            self.layout = after

    def _in_mesh_order(self, axes: Iterable[str]) -> tuple[str, ...]:
        chosen = set(axes)
        return tuple(axis for axis in self.layout.mesh.axis_names if axis in chosen)

    def _in_cut_order(self, axes: Sequence[str], splits: Splits) -> tuple[str, ...]:
        """Mesh order, unless all `axes` cut one dim: then in the order they cut it, so that parts lie in order."""
        for units in splits:
            names = tuple(axis for axis, _ in units if axis in axes)
            if len(names) == len(axes):
                return names
        return self._in_mesh_order(axes)


def _appended(have: Units, want: Units, new: Sequence[str]) -> Units:
    """`have` with the `new` axes of `want` behind it; they keep ragged sizes only behind the same cuts as in `want`."""
    out = have
    for axis, sizes in want:
        if axis in new:
            fits = (*out, (axis, sizes)) == want[: len(out) + 1]
            out = (*out, (axis, sizes if fits else None))
    return out


def _moved(before: Splits, after: Splits) -> set[str]:
    """Axes behind the common major part of some dim, before or after."""
    moved: set[str] = set()
    for have, want in zip(before, after, strict=True):
        common = 0
        while have[common : common + 1] == want[common : common + 1] != ():
            common += 1
        moved.update(axis for axis, _ in have[common:] + want[common:])
    return moved
