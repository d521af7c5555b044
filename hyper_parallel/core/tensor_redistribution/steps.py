# SPDX-License-Identifier: Apache-2.0
"""The steps a plan is made of, and what each costs one rank.

Note [Who gives a copy]
    An exchange may start from a layout with copies: its group then holds the source box of a rank once for each
    position on the group's axes that the source does not shard, its *copy axes*. What a rank has already it keeps.
    Every other part it gets from one of the copies, and which one is a rule over coordinates that giver and receiver
    apply alike: the copy whose number, counted over the copy axes, is the receiver's own number plus its
    coordinates on the other axes of the group, modulo the number of copies. Receivers of one box are neighbours
    in some of these coordinates, so their requests spread over the copies.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from hyper_parallel.core.box import box_numel, intersect
from hyper_parallel.core.layout import Layout


class StepKind(Enum):
    """What a step does."""

    SLICE = "slice"
    """Keep a part of the local tensor."""
    REDUCE_SCATTER = "reduce-scatter"
    """Finish pending reductions, each rank keeping a part."""
    ALL_REDUCE = "all-reduce"
    """Finish pending reductions, each rank keeping all."""
    EXCHANGE = "exchange"
    """Send every rank of the group what it lacks."""
    ALL_GATHER = "all-gather"
    """Put the parts of the group together on each of its ranks."""
    SCALE = "scale"
    """Multiply by a number: a pending sum becomes a pending average or back."""
    MAKE_PARTIAL = "make-partial"
    """Turn copies into operands of a pending reduction that gives the same value."""

    @property
    def communicates(self) -> bool:
        """Whether data leave the rank."""
        return self in _COMMUNICATING


_COMMUNICATING = frozenset((StepKind.REDUCE_SCATTER, StepKind.ALL_REDUCE, StepKind.EXCHANGE, StepKind.ALL_GATHER))


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a plan: from one layout to another.

    Attributes:
        kind: What it does.
        src: Layout before.
        dst: Layout after.
        axes: Mesh axes whose ranks form the group, in the group's order; empty for local steps.
        op: The reduction that is finished or made pending; None for steps that only move data.
        factor: The number, for SCALE.
        divisor: What a finished sum is divided by; more than 1 for averages.
    """

    kind: StepKind
    src: Layout
    dst: Layout
    axes: tuple[str, ...] = ()
    op: str | None = None
    factor: float = 1.0
    divisor: int = 1

    @property
    def group_size(self) -> int:
        """Number of ranks in each group."""
        return self.src.mesh.num_ranks(self.axes)

    @property
    def copy_axes(self) -> tuple[str, ...]:
        """Axes of the group over which the source holds copies. See Note [Who gives a copy]."""
        return tuple(axis for axis in self.axes if self.src.dim_of(axis) is None)

    def gives(self, giver: int, receiver: int) -> bool:
        """Whether `receiver`, in the same group of an exchange, gets its part of the box of `giver` from it."""
        copied = self.copy_axes
        if giver == receiver or not copied:
            return True
        mesh = self.src.mesh
        from_, to = mesh.coord(giver), mesh.coord(receiver)
        held = [mesh.axis_index(axis) for axis in self.axes if axis not in copied]
        if all(from_[i] == to[i] for i in held):
            return False
        number = own = 0
        for axis in copied:
            i = mesh.axis_index(axis)
            number = number * mesh.shape[i] + from_[i]
            own = own * mesh.shape[i] + to[i]
        return number == (own + sum(to[i] for i in held)) % mesh.num_ranks(copied)

    def received(self, shape: tuple[int, ...], rank: int) -> int:
        """Elements that `rank` receives of a tensor of global `shape`."""
        if not self.kind.communicates:
            return 0
        others = self.group_size - 1
        after = self.dst.box(shape, rank)
        match self.kind:
            case StepKind.REDUCE_SCATTER:
                return others * box_numel(after)
            case StepKind.ALL_REDUCE:
                return _ring_all_reduce(box_numel(after), others)
            case _:
                kept = intersect(after, self.src.box(shape, rank))
                return box_numel(after) - (0 if kept is None else box_numel(kept))

    def sent(self, shape: tuple[int, ...], rank: int) -> int:
        """Elements that `rank` sends of a tensor of global `shape`."""
        if not self.kind.communicates:
            return 0
        others = self.group_size - 1
        before = self.src.box(shape, rank)
        match self.kind:
            case StepKind.ALL_GATHER:
                return others * box_numel(before)
            case StepKind.ALL_REDUCE:
                return _ring_all_reduce(box_numel(before), others)
            case _:
                peers = self.src.mesh.group_ranks(self.axes, rank)
                is_exchange = self.kind is StepKind.EXCHANGE
                asking = (peer for peer in peers if peer != rank and (not is_exchange or self.gives(rank, peer)))
                parts = (intersect(before, self.dst.box(shape, peer)) for peer in asking)
                return sum(box_numel(part) for part in parts if part is not None)


def _ring_all_reduce(numel: int, others: int) -> int:
    """Elements each way of a reduce-scatter and an all-gather of 1/n each, which no all-reduce beats."""
    return -(-2 * others * numel // (others + 1))
