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
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from hyper_parallel.core.box import box_numel, chunk_size
from hyper_parallel.core.errors import LayoutError
from hyper_parallel.core.layout import Layout, Split
from hyper_parallel.core.placement_types import ReduceOp
from hyper_parallel.core.tensor_redistribution.steps import Step, StepKind

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
    """

    src: Layout
    dst: Layout
    shape: tuple[int, ...]
    itemsize: int
    steps: tuple[Step, ...]

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

    def peak_bytes(self, rank: int) -> int:
        """Most bytes that `rank` holds at once for the input, the wire and the output of a step."""
        held = [box_numel(self.src.box(self.shape, rank))]
        for step in self.steps:
            before = box_numel(step.src.box(self.shape, rank))
            after = box_numel(step.dst.box(self.shape, rank))
            wire = step.group_size * after if step.kind is StepKind.REDUCE_SCATTER else 0
            held.append(before + after + wire)
        return self.itemsize * max(held)

    def __str__(self) -> str:
        """A table, one line per step; bytes are those of the rank that receives most in that step."""
        rows = [(f"{self.src} -> {self.dst}", f"shape {self.shape}", f"mesh {self.src.mesh}")]
        ranks = self.src.mesh.ranks
        for step in self.steps:
            received = max(step.received(self.shape, rank) for rank in ranks) * self.itemsize
            over = f"over {', '.join(step.axes)}" if step.axes else "local"
            how = _how(step)
            rows.append((f"  {step.kind.value}{how}", f"{step.src} -> {step.dst}", over, f"{received} B"))  # type: ignore[arg-type]
        if not self.steps:
            rows.append(("  nothing to do",))  # type: ignore[arg-type]
        return "\n".join(["   ".join(rows[0]), *_aligned(rows[1:])])


def _how(step: Step) -> str:
    if step.kind is StepKind.SCALE:
        return f" x {step.factor:g}"
    return f" {step.op}" if step.op else ""


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    columns = max(len(row) for row in rows)
    widths = [max(len(row[i]) for row in rows if i < len(row)) for i in range(columns)]
    return ["   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip() for row in rows]


def plan(src: Layout, dst: Layout, shape: Sequence[int], itemsize: int = 4) -> Plan:
    """Plan a redistribution. See Note [Normal form].

    Args:
        src: Layout the tensor has.
        dst: Layout it shall have, on the same mesh.
        shape: Global shape.
        itemsize: Bytes per element.

    Returns:
        The plan; `print` it for a table.

    Raises:
        LayoutError: different meshes or numbers of dims.
        UnevenError: ragged sizes that do not fit the shape.

    Communication: none. Memory: a few layouts, whatever the number of ranks.

    Example:
        >>> from hyper_parallel.core.device_mesh import DeviceMesh
        >>> mesh = DeviceMesh.grid(dp=2, tp=2)
        >>> found = plan(mesh.layout("dp", "tp"), mesh.layout("tp", "dp"), (4, 4))
        >>> [step.kind.value for step in found.steps], found.bytes_received(1)
        (['exchange'], 16)
    """
    if src.mesh != dst.mesh:
        raise LayoutError(f"plan {src} -> {dst}: the meshes {src.mesh} and {dst.mesh} differ. Use layouts on one mesh.")
    if src.ndim != dst.ndim:
        raise LayoutError(
            f"plan {src} -> {dst}: the layouts have {src.ndim} and {dst.ndim} dims. Give both one entry per dim."
        )
    shape = tuple(shape)
    src.check_shape(shape, "plan")
    dst.check_shape(shape, "plan")
    return Plan(src, dst, shape, itemsize, _steps(src, dst, shape))


def _steps(src: Layout, dst: Layout, shape: tuple[int, ...]) -> tuple[Step, ...]:
    if src is dst:
        return ()
    if 0 in shape:
        return (Step(StepKind.SLICE, src, dst),)
    steps = _Builder(_essential(src, shape), _essential(dst, shape)).build()
    if steps:
        steps[0] = replace(steps[0], src=src)
        steps[-1] = replace(steps[-1], dst=dst)
    return tuple(steps)


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

    def __init__(self, src: Layout, dst: Layout) -> None:
        self.layout = src
        self.dst = dst
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
        self.factor = 1.0

    def build(self) -> list[Step]:
        cut, before_gather = self._cut_and_before_gather()
        scattered = [axis for axis in self.finished if axis in self.new]
        reduced = [axis for axis in self.finished if axis not in self.new]
        self._finish(StepKind.REDUCE_SCATTER if scattered else StepKind.SLICE, scattered, cut)
        self._finish(StepKind.ALL_REDUCE, reduced, cut)
        self._rescale()
        moved = _moved(cut, before_gather)
        self._add(StepKind.EXCHANGE, before_gather, axes=self._in_mesh_order(moved))
        gathered = self._in_cut_order(self.leaving, before_gather)
        self._add(StepKind.ALL_GATHER, self.dst.splits, axes=gathered)
        self._make_partial()
        return self.steps

    def _cut_and_before_gather(self) -> tuple[Splits, Splits]:
        """Splits after step 1, and splits before the last gather."""
        grown, final = [], []
        for have, want in zip(self.layout.splits, self.dst.splits, strict=True):
            with_new = _appended(have, want, self.new)
            rest = with_new[len(want) :]
            is_major = with_new[: len(want)] == want and all(axis in self.leaving for axis, _ in rest)
            # Ragged sizes fit the place where they were, not behind another cut.
            leaving = tuple((axis, None) for axis, _ in have if axis in self.leaving)
            grown.append(with_new)
            final.append(with_new if is_major else want + leaving)
        is_direct = all(end[: len(have)] == have for have, end in zip(self.layout.splits, final, strict=True))
        return (final if is_direct else grown), final

    def _finish(self, kind: StepKind, axes: Sequence[str], splits: Splits) -> None:
        """Finish the reductions over `axes` while cutting to `splits`."""
        pending = dict(self.layout.partial)
        ops = {pending.pop(axis) for axis in axes}
        if len(ops) > 1:
            # A sum over some axes and an average over others: one sum, divided once.
            averaged = [axis for axis in axes if self.layout.op_of(axis) is ReduceOp.AVG]
            self.factor /= self.layout.mesh.num_ranks(averaged)
            ops = {ReduceOp.SUM}
        op = ops.pop().value if ops else None
        order = self._in_cut_order(axes, splits)
        self._add(kind, splits, pending, axes=order, op=op)

    def _rescale(self) -> None:
        pending = dict(self.layout.partial)
        for axis, op in self.rescaled:
            size = self.layout.mesh.size(axis)
            self.factor *= size if op is ReduceOp.SUM else 1 / size
            pending[axis] = ReduceOp.AVG if op is ReduceOp.SUM else ReduceOp.SUM
        if self.rescaled or self.factor != 1:
            self._add(StepKind.SCALE, self.layout.splits, pending, factor=self.factor)

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
    ) -> None:
        """Add a step to the layout of `splits` and `pending` (default: as they are), if that changes anything."""
        here = self.layout
        after = Layout(
            here.mesh,
            [[axis for axis, _ in units] for units in splits],
            partial=here.partial if pending is None else pending,
            ragged={axis: sizes for units in splits for axis, sizes in units if sizes is not None},
        )
        if after is not here or factor != 1:
            self.steps.append(Step(kind, here, after, axes, op, factor))
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
