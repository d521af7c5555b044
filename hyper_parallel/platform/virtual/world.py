# SPDX-License-Identifier: Apache-2.0
"""All ranks of a mesh side by side: their programs run in lockstep, requests are answered from their midst."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, assert_never

import numpy as np

from hyper_parallel.core.box import box_shape
from hyper_parallel.core.device_mesh import DeviceMesh
from hyper_parallel.core.errors import CollectiveError, LayoutError
from hyper_parallel.core.layout import Layout
from hyper_parallel.core.protocols import Reduction
from hyper_parallel.core.tensor_redistribution.execute import (
    AllGatherRequest,
    AllReduceRequest,
    AllToAllRequest,
    BoxTable,
    ReduceScatterRequest,
    Request,
    Round,
    compile_plan,
    execute_steps,
)
from hyper_parallel.core.tensor_redistribution.planner import Plan, plan
from hyper_parallel.core.tensor_redistribution.reshape_plan import plan_reshape
from hyper_parallel.platform.virtual.tensor import (
    Array,
    VirtualOps,
    part_of,
    reduce_arrays,
    split_value,
)

Program: TypeAlias = Generator[Round, Any, Any]


class VirtualWorld:
    """The ranks of a mesh in one process.

    Args:
        mesh: The mesh; any number of ranks.

    Attributes:
        mesh: The mesh.
        ops: Local work on the ranks' arrays.
        collectives: Kind of request -> how many collectives were run, one per group.
        bytes_received: Rank -> bytes that came from others.

    Example:
        >>> mesh = DeviceMesh.grid(dp=2, tp=2)
        >>> world = VirtualWorld(mesh)
        >>> x = np.arange(6.0).reshape(2, 3)
        >>> locals_ = world.distribute(x, mesh.layout("dp", "tp"))
        >>> whole = world.redistribute(locals_, mesh.layout("dp", "tp"), mesh.layout(None, None), x.shape)
        >>> whole[3].tolist()
        [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.ops = VirtualOps()
        self.collectives: Counter[str] = Counter()
        self.bytes_received: Counter[int] = Counter()

    # -- global array <-> local arrays ------------------------------------------------------------

    def distribute(self, array: Array, layout: Layout, random: np.random.Generator | None = None) -> dict[int, Array]:
        """Rank -> its local array of `array` under `layout`, a copy.

        Args:
            array: Global array.
            layout: Its layout. Pending reductions get random operands of mixed sign that give `array`.
            random: Source of the operands. Default: a fixed seed.

        Raises:
            LayoutError: `layout` does not fit the shape.
        """
        layout.check_shape(array.shape, "distribute")
        random = np.random.default_rng(0) if random is None else random
        # All copies of an operand must be one, so operands are made per position on the pending axes.
        operands: dict[tuple[int, ...], Array] = {(): array}
        for axis, op in layout.partial:
            num = self.mesh.size(axis)
            operands = {
                (*position, i): part
                for position, value in operands.items()
                for i, part in enumerate(split_value(value, op, num, random))
            }
        return {
            rank: part_of(operands[self._position(layout, rank)], layout.box(array.shape, rank)).copy()
            for rank in self.mesh.ranks
        }

    def assemble(self, locals_: Mapping[int, Array], layout: Layout, shape: Sequence[int]) -> Array:
        """The global array; pending reductions are done.

        Raises:
            LayoutError: a local array has the wrong shape, copies differ, or an element is owned by nobody.
        """
        dtype = next(iter(locals_.values())).dtype
        sizes = [self.mesh.size(axis) for axis in layout.partial_axes]
        operands = {position: _Canvas(tuple(shape), dtype) for position in itertools.product(*map(range, sizes))}
        for rank in self.mesh.ranks:
            canvas = operands[self._position(layout, rank)]
            canvas.paint(layout, rank, np.asarray(locals_[rank]))
        values = {position: canvas.finished(layout) for position, canvas in operands.items()}
        for (_, op), num in reversed(list(zip(layout.partial, sizes, strict=True))):
            outer = dict.fromkeys(position[:-1] for position in values)
            values = {position: reduce_arrays([values[*position, i] for i in range(num)], op) for position in outer}
        return values[()]

    def _position(self, layout: Layout, rank: int) -> tuple[int, ...]:
        """Coordinates on the axes with a pending reduction."""
        coord = self.mesh.coord(rank)
        return tuple(coord[self.mesh.axis_index(axis)] for axis in layout.partial_axes)

    # -- running ----------------------------------------------------------------------------------

    def redistribute(
        self, locals_: Mapping[int, Array], src: Layout, dst: Layout, shape: Sequence[int]
    ) -> dict[int, Array]:
        """Rank -> its local array under `dst`, from those under `src`, which are not changed.

        Raises:
            LayoutError: as `plan`.
        """
        itemsize = next(iter(locals_.values())).itemsize
        return self.run_plan(plan(src, dst, shape, itemsize), locals_)

    def run_plan(self, made: Plan, locals_: Mapping[int, Array]) -> dict[int, Array]:
        """Run a plan on all ranks."""
        table = BoxTable(made.shape)
        return self.run(
            {rank: execute_steps(compile_plan(made, rank, table), locals_[rank], self.ops) for rank in self.mesh.ranks}
        )

    def reshape(
        self,
        locals_: Mapping[int, Array],
        src: Layout,
        dst: Layout,
        shape: Sequence[int],
        new_shape: Sequence[int],
    ) -> dict[int, Array]:
        """Rank -> its local array under `dst` of the tensor with another shape; inputs are not changed.

        Raises:
            ShapeError, LayoutError: as `plan_reshape`.
        """
        itemsize = next(iter(locals_.values())).itemsize
        made = plan_reshape(src, dst, shape, new_shape, itemsize)
        out = dict(locals_)
        for stage in made.stages:
            seen = {rank: x.reshape(stage.src.local_shape(stage.shape, rank)) for rank, x in out.items()}
            out = self.run_plan(stage, seen)
        return {rank: x.reshape(dst.local_shape(made.new_shape, rank)) for rank, x in out.items()}

    def run(self, programs: Mapping[int, Program]) -> dict[int, Any]:
        """Run one program per rank to its end; they yield rounds of requests and are sent the answers.

        Returns:
            Rank -> what its program returned.

        Raises:
            CollectiveError: ranks of a group ask for different things, or some wait for ranks that do not come.
        """
        results: dict[int, Any] = {}
        waiting: dict[int, Request] = {}
        answers: dict[int, Any] = dict.fromkeys(programs)
        one_by_one = {rank: _one_by_one(program) for rank, program in programs.items()}
        while True:
            for rank, answer in answers.items():
                try:
                    waiting[rank] = one_by_one[rank].send(answer)
                except StopIteration as done:
                    waiting.pop(rank, None)
                    results[rank] = done.value
            if not waiting:
                return results
            answers = self._serve(waiting)

    def _serve(self, waiting: Mapping[int, Request]) -> dict[int, Any]:
        """Answers for all groups whose ranks are all there."""
        answers: dict[int, Any] = {}
        for request in waiting.values():
            ranks = request.ranks
            if ranks[0] in answers:
                continue
            members = [waiting[rank] for rank in ranks if rank in waiting and waiting[rank].ranks == ranks]
            if len(members) == len(ranks):
                answers.update(zip(ranks, self._answer(members), strict=True))
        if not answers:
            lines = ", ".join(
                f"rank {rank} waits in {_name(request)} of ranks {request.ranks}"
                for rank, request in sorted(waiting.items())
            )
            raise CollectiveError(f"virtual ranks: {lines}, and no group is complete. Call it on all of them.")
        return answers

    def _answer(self, members: Sequence[Request]) -> list[Any]:
        """Answers of one group, in its order."""
        first, num = members[0], len(members)
        _check_agreement(members)
        self.collectives[_name(first)] += 1
        match first:
            case AllReduceRequest(x, reduction, ranks):
                self._count(ranks, -(-2 * (num - 1) * x.size // num) * x.itemsize)
                total = _reduced([member.x for member in _all(AllReduceRequest, members)], reduction)
                return [total.copy() for _ in members]
            case ReduceScatterRequest(_, reduction, ranks, _):
                parts = [member.parts for member in _all(ReduceScatterRequest, members)]
                for i, rank in enumerate(ranks):
                    self._count((rank,), (num - 1) * parts[0][i].nbytes)
                return [_reduced([part[i] for part in parts], reduction) for i in range(num)]
            case AllGatherRequest(_, _, ranks, _):
                sends = [(member.x,) * num for member in _all(AllGatherRequest, members)]
                return self._all_to_all(sends, [member.outs for member in _all(AllGatherRequest, members)], ranks)
            case AllToAllRequest(_, _, ranks):
                sends = [member.sends for member in _all(AllToAllRequest, members)]
                return self._all_to_all(sends, [member.outs for member in _all(AllToAllRequest, members)], ranks)
            case never:
                assert_never(never)

    def _all_to_all(
        self, sends: Sequence[Sequence[Array]], outs: Sequence[Sequence[Array]], ranks: tuple[int, ...]
    ) -> list[None]:
        for i, receiver in enumerate(ranks):
            for j, sender in enumerate(ranks):
                piece, out = sends[j][i], outs[i][j]
                if piece.size != out.size:
                    raise CollectiveError(
                        f"AllToAll of ranks {ranks}: rank {sender} sends {piece.shape}, rank {receiver} expects "
                        f"{out.shape}. Give both the same plan."
                    )
                if sender != receiver:
                    self.bytes_received[receiver] += piece.nbytes
                if piece.size:
                    out[...] = piece
        return [None] * len(ranks)

    def _count(self, ranks: Iterable[int], nbytes: int) -> None:
        for rank in ranks:
            self.bytes_received[rank] += nbytes


class _Canvas:
    """A global array that is put together from pieces."""

    def __init__(self, shape: tuple[int, ...], dtype: Any) -> None:
        self.array = np.zeros(shape, dtype)
        self.is_known = np.zeros(shape, np.bool_)

    def paint(self, layout: Layout, rank: int, piece: Array) -> None:
        box = layout.box(self.array.shape, rank)
        if piece.shape != box_shape(box):
            raise LayoutError(
                f"assemble of shape {self.array.shape}: rank {rank} has {piece.shape}, {layout} gives it "
                f"{box_shape(box)}. Pass the layout the arrays have."
            )
        here, known = part_of(self.array, box), part_of(self.is_known, box)
        if not np.allclose(here[known], piece[known], rtol=1e-5, atol=1e-5, equal_nan=True):
            raise LayoutError(
                f"assemble of shape {self.array.shape}: the copy on rank {rank} under {layout} differs from that on "
                "an earlier rank. Find who changed it."
            )
        here[...] = piece
        known[...] = True

    def finished(self, layout: Layout) -> Array:
        if not self.is_known.all():
            raise LayoutError(
                f"assemble of shape {self.array.shape}: no rank owns some elements under {layout}. "
                "Report this with the layout."
            )
        return self.array


def _one_by_one(program: Program) -> Generator[Request, Any, Any]:
    """A program whose rounds are asked for one request after the other."""
    answers: list[Any] | None = None
    while True:
        try:
            round_ = program.send(answers)
        except StopIteration as done:
            return done.value
        answers = []
        for request in round_:
            answers.append((yield request))


def _reduced(parts: Sequence[Array], reduction: Reduction) -> Array:
    return reduce_arrays(parts, reduction.op, reduction.divisor, reduction.summation)


def _name(request: Request) -> str:
    return type(request).__name__.removesuffix("Request")


def _all(kind: Any, members: Sequence[Request]) -> Any:
    assert all(type(member) is kind for member in members)
    return members


def _signature(request: Request) -> tuple[object, ...]:
    """What all ranks of a group must agree on."""
    match request:
        case AllReduceRequest(x, reduction):
            return "AllReduce", reduction, x.shape, str(x.dtype)
        case ReduceScatterRequest(parts, reduction, _, is_equal):
            return "ReduceScatter", reduction, is_equal, [part.shape for part in parts], str(parts[0].dtype)
        case AllGatherRequest(x, outs, _, is_equal):
            return "AllGather", is_equal, [out.shape for out in outs], str(x.dtype)
        case AllToAllRequest(sends):
            return "AllToAll", len(sends), str(sends[0].dtype)
        case never:
            assert_never(never)


def _check_agreement(members: Sequence[Request]) -> None:
    ranks = members[0].ranks
    expected = _signature(members[0])
    for rank, member in zip(ranks, members, strict=True):
        if _signature(member) != expected:
            raise CollectiveError(
                f"collective of ranks {ranks}: rank {ranks[0]} asks for {expected}, rank {rank} for "
                f"{_signature(member)}. Call the same on all of them."
            )
