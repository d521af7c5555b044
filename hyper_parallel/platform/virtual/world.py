# SPDX-License-Identifier: Apache-2.0
"""All ranks of a mesh side by side: their plan generators run in lockstep, requests are answered from their midst."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hyper_parallel.core.device_mesh import DeviceMesh
from hyper_parallel.core.errors import CollectiveError, LayoutError
from hyper_parallel.core.layout import Layout
from hyper_parallel.core.placement_types import ReduceOp
from hyper_parallel.core.tensor_redistribution.execute import (
    AllGatherRequest,
    AllReduceRequest,
    AllToAllRequest,
    ReduceScatterRequest,
    Request,
    compile_plan,
    execute_steps,
)
from hyper_parallel.core.tensor_redistribution.planner import plan
from hyper_parallel.platform.virtual.tensor import Array, VirtualOps, reduce_arrays

Locals = dict[int, Array]


class VirtualWorld:
    """The ranks of a mesh in one process.

    Attributes:
        mesh: The mesh.
        collectives: How many collectives of each kind were run, one per group.
        wire_bytes: Bytes that left some rank for another.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.collectives: Counter[str] = Counter()
        self.wire_bytes = 0
        self._ops = VirtualOps()

    def distribute(self, array: Array, layout: Layout, random: np.random.Generator) -> Locals:
        """Local arrays of all ranks; pending reductions get random operands of mixed sign that combine to `array`."""
        layout.check_shape(array.shape, "distribute")
        operands = {rank: array for rank in self.mesh.ranks}
        for axis, op in layout.partial:
            operands = self._operands(operands, axis, op, random)
        out = {}
        for rank in self.mesh.ranks:
            box = layout.box(array.shape, rank)
            out[rank] = operands[rank][tuple(slice(a, b) for a, b in box)].copy()
        return out

    def _operands(
        self, values: Locals, axis: str, op: ReduceOp, random: np.random.Generator
    ) -> Locals:
        out: Locals = {}
        size = self.mesh.size(axis)
        by_value: dict[tuple[int, ...], list[Array]] = {}
        for rank in self.mesh.ranks:
            group = self.mesh.group_ranks((axis,), rank)
            # Ranks that hold the same value must split it alike, or their copies would differ afterwards.
            key = tuple(c for a, c in zip(self.mesh.axis_names, self.mesh.coord(rank), strict=True) if a != axis)
            same = next((k for k in by_value if values[self._rank_of(k, axis)] is values[rank]), None)
            if same is None:
                same = by_value.setdefault(key, None) or key  # type: ignore[arg-type]
                by_value[same] = split_value(values[rank], op, size, random)
            out[rank] = by_value[same][group.index(rank)]
        return out

    def _rank_of(self, key: tuple[int, ...], axis: str) -> int:
        at = self.mesh.axis_names.index(axis)
        return self.mesh.rank_at((*key[:at], 0, *key[at:]))

    def assemble(self, locals_: Mapping[int, Array], layout: Layout, shape: Sequence[int]) -> Array:
        """The global array; copies must agree and pieces must cover it.

        Raises:
            LayoutError: copies differ, a piece has the wrong shape, or an element is owned by nobody.
        """
        value: dict[int, Array] = {rank: np.asarray(x) for rank, x in locals_.items()}
        for axis, op in layout.partial:
            merged = {}
            for rank in self.mesh.ranks:
                group = self.mesh.group_ranks((axis,), rank)
                merged[rank] = reduce_arrays([value[peer] for peer in group], op.value)
            value = merged
        first = next(iter(value.values()))
        out = np.zeros(tuple(shape), first.dtype)
        seen = np.zeros(tuple(shape), np.bool_)
        for rank, piece in value.items():
            box = layout.box(shape, rank)
            at = tuple(slice(a, b) for a, b in box)
            if piece.shape != out[at].shape:
                raise LayoutError(f"rank {rank}: shape {piece.shape}, {layout} gives {out[at].shape}. Check the plan.")
            if seen[at].any() and not np.allclose(out[at][seen[at]], piece[seen[at]], rtol=1e-5, atol=1e-5):
                raise LayoutError(f"rank {rank}: its copy differs under {layout}. Check the plan.")
            out[at] = piece
            seen[at] = True
        if not seen.all():
            raise LayoutError(f"layout {layout}: some elements are owned by no rank. Check the plan.")
        return out

    def redistribute(
        self, locals_: Mapping[int, Array], src: Layout, dst: Layout, shape: Sequence[int]
    ) -> Locals:
        """Run the plan `src -> dst` on all ranks.

        Raises:
            CollectiveError: ranks of a group ask for different things.
        """
        itemsize = next(iter(locals_.values())).itemsize
        made = plan(src, dst, tuple(shape), itemsize)
        runs = {
            rank: execute_steps(compile_plan(made, rank), locals_[rank], self._ops) for rank in self.mesh.ranks
        }
        answers: dict[int, Any] = dict.fromkeys(runs)
        done: Locals = {}
        while runs:
            requests: dict[int, Request] = {}
            for rank in list(runs):
                try:
                    requests[rank] = runs[rank].send(answers[rank])
                except StopIteration as stop:
                    done[rank] = stop.value
                    del runs[rank]
            answers = self._answer(requests)
        return done

    def _answer(self, requests: dict[int, Request]) -> dict[int, Any]:
        answers: dict[int, Any] = {}
        for rank, request in requests.items():
            if rank in answers:
                continue
            members = [requests.get(peer) for peer in request.ranks]
            kinds = {(type(m), getattr(m, "ranks", None), getattr(m, "op", None)) for m in members}
            if len(kinds) != 1:
                raise CollectiveError(
                    f"ranks {request.ranks}: they ask for different collectives {sorted(map(str, kinds))}. "
                    "Check the plan."
                )
            self.collectives[type(request).__name__.removesuffix("Request")] += 1
            answers.update(zip(request.ranks, self._run_group(members), strict=True))
        return answers

    def _run_group(self, members: Sequence[Any]) -> list[Any]:
        n = len(members)
        match members[0]:
            case AllReduceRequest(x, op):
                self.wire_bytes += 2 * (n - 1) * x.nbytes
                out = reduce_arrays([m.x for m in members], op)
                return [out.copy() for _ in members]
            case ReduceScatterRequest(parts, op):
                self.wire_bytes += (n - 1) * parts.nbytes
                return [reduce_arrays([m.parts[i] for m in members], op) for i in range(n)]
            case AllGatherRequest(x):
                self.wire_bytes += n * (n - 1) * x.nbytes
                return [np.stack([m.x for m in members]) for _ in members]
            case AllToAllRequest():
                return [self._receive(members, i) for i in range(n)]
        raise AssertionError(members[0])

    def _receive(self, members: Sequence[AllToAllRequest], position: int) -> list[Array]:
        out = []
        for source, member in enumerate(members):
            piece = member.sends[position]
            wanted = members[position].recv_shapes[source]
            if piece.size != int(np.prod(wanted)):
                raise CollectiveError(
                    f"all_to_all over {member.ranks}: {member.ranks[source]} sends {piece.shape} to "
                    f"{member.ranks[position]}, which expects {wanted}. Check the plan."
                )
            if source != position:
                self.wire_bytes += piece.nbytes
            out.append(piece.copy().reshape(wanted))
        return out


def split_value(value: Array, op: ReduceOp, num: int, random: np.random.Generator) -> list[Array]:
    """`num` operands whose reduction by `op` is `value`, as different from each other as the op allows."""
    shape, dtype = value.shape, value.dtype
    match op:
        case ReduceOp.SUM | ReduceOp.AVG:
            total = value * num if op is ReduceOp.AVG else value
            parts = [random.integers(-50, 50, shape).astype(dtype) for _ in range(num - 1)]
            rest = total - sum(parts) if parts else total
            return [*parts, np.asarray(rest, dtype)]
        case ReduceOp.PROD:
            signs = [random.choice([-1, 1], shape).astype(dtype) for _ in range(num - 1)]
            last = value.copy()
            for sign in signs:
                last = last * sign
            return [*signs, np.asarray(last, dtype)]
        case ReduceOp.MAX | ReduceOp.MIN:
            sign = -1 if op is ReduceOp.MAX else 1
            winner = random.integers(0, num, shape)
            gaps = [random.integers(0, 50, shape) for _ in range(num)]
            return [np.asarray(np.where(winner == i, value, value + sign * gaps[i]), dtype) for i in range(num)]
        case ReduceOp.ALL | ReduceOp.ANY:
            odd = random.integers(0, num, shape)
            neutral = op is ReduceOp.ALL
            noise = [random.integers(0, 2, shape).astype(np.bool_) for _ in range(num)]
            out = []
            for i in range(num):
                free = np.where(value == neutral, neutral, noise[i])
                out.append(np.where((odd == i) & (value != neutral), value, free))
            return out
    raise AssertionError(op)
