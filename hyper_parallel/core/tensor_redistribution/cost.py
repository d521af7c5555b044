# SPDX-License-Identifier: Apache-2.0
"""Seconds and peak bytes of steps and plans, from global sizes alone.

Note [Cost of a plan]
    A step costs alpha seconds for itself and for each peer, beta seconds per byte on the slowest axis of its group,
    and gamma seconds per byte that is copied on the rank (packing, unpacking, reducing):

        seconds = alpha * (1 + peers) + beta * max(sent, received) + gamma * copied

    All figures are those of the largest piece of a layout, which every rank can compute without a look at
    any other, so all ranks choose the same plan. They are exact where sizes divide, and an upper bound elsewhere,
    but for one: an exchange from copies is taken to spread evenly (See Note [Who gives a copy]).
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from hyper_parallel.core.device_mesh import DeviceMesh
from hyper_parallel.core.errors import MeshError
from hyper_parallel.core.layout import Layout
from hyper_parallel.core.protocols import Platform, Reduction, Tensor, get_platform
from hyper_parallel.core.tensor_redistribution.steps import Step, StepKind

NODE = 8
"""Ranks that are taken to share a machine: the innermost axes, as long as their sizes multiply to no more."""
REPEATS = 7
"""Runs of which a measured time is the median, after one that is not counted."""
LEAST_SECONDS = 1e-15
"""What a measured cost is at least, so that noise never makes one free."""


@dataclass(frozen=True, slots=True)
class Topology:
    """What communication costs on a mesh. See Note [Cost of a plan].

    Attributes:
        alpha: Per mesh axis, seconds per step and per peer.
        beta: Per mesh axis, seconds per byte.
        gamma: Seconds per byte of a local copy.

    Raises:
        MeshError: another number of alphas than of betas, or a cost that is not positive.

    Example:
        >>> mesh = DeviceMesh.grid(dp=16, tp=8)
        >>> Topology.of(mesh).alpha
        (1.5e-05, 5e-06)
    """

    alpha: tuple[float, ...]
    beta: tuple[float, ...]
    gamma: float = 1e-12

    def __post_init__(self) -> None:
        object.__setattr__(self, "alpha", tuple(self.alpha))
        object.__setattr__(self, "beta", tuple(self.beta))
        if len(self.alpha) != len(self.beta):
            raise MeshError(
                f"Topology: {len(self.alpha)} alphas and {len(self.beta)} betas. Give one of each per mesh axis."
            )
        wrong = next((cost for cost in (*self.alpha, *self.beta, self.gamma) if not 0 < cost < math.inf), None)
        if wrong is not None:
            raise MeshError(f"Topology: a cost is {wrong}. Give seconds above 0.")

    @classmethod
    def of(cls, mesh: DeviceMesh) -> Topology:
        """The default: 5 us and 150 GB/s between ranks of one machine (See `NODE`), 15 us and 25 GB/s beyond."""
        alpha, beta = [], []
        inside = 1
        for size in reversed(mesh.shape):
            inside *= size
            alpha.append(5e-6 if inside <= NODE else 15e-6)
            beta.append(1 / 150e9 if inside <= NODE else 1 / 25e9)
        return cls(tuple(reversed(alpha)), tuple(reversed(beta)))

    @classmethod
    def measure(
        cls,
        mesh: DeviceMesh,
        platform: Platform | None = None,
        like: Tensor = None,
        *,
        numel: int = 1 << 20,
        clock: Callable[[], float] = time.perf_counter,
    ) -> Topology:
        """The costs of the running job, from small and large exchanges along each axis and from local copies.

        Args:
            mesh: The mesh; all its ranks call this together.
            platform: The framework that moves the data. Default: that of the process.
            like: A floating point tensor on the device in question, of any shape; not changed. Default: one on the
                device of the mesh. On a device that works asynchronously pass a `clock` that waits for it.
            numel: Elements of the large transfers.
            clock: Seconds, from any origin.

        Returns:
            The same value on every rank: that of the slowest.

        Communication: `2 * (1 + REPEATS)` all-to-alls per axis and one all-reduce, about a second on a slow network.
        Memory: peak extra 3 x `numel` elements, freed on return.
        """
        platform = get_platform() if platform is None else platform
        if like is None:
            like = platform.dtensor_type()._factory("zeros", (1,), (), device_mesh=mesh).to_local()
        ops = platform.ops
        itemsize = _itemsize(like)
        costs: list[float] = []
        for axis in mesh.axis_names:
            ranks = mesh.group_ranks((axis,), platform.rank())
            part = max(2, numel // len(ranks))
            small = _exchange_seconds(platform, ops.zeros((1,), like), ranks, clock)
            large = _exchange_seconds(platform, ops.zeros((part,), like), ranks, clock)
            moved = max(1, len(ranks) - 1) * (part - 1) * itemsize
            costs += [small / len(ranks), (large - small) / moved]
        source, target = ops.zeros((numel,), like), ops.empty((numel,), like)
        costs.append(_median_seconds(lambda: ops.write(target, ((0, numel),), source), clock) / (numel * itemsize))
        alphas_betas, (gamma,) = _slowest(platform, mesh, like, costs)
        return cls(tuple(alphas_betas[::2]), tuple(alphas_betas[1::2]), gamma)

    def check(self, mesh: DeviceMesh) -> None:
        """Refuse a mesh with another number of axes.

        Raises:
            MeshError: the mesh has more or fewer axes than this has costs.
        """
        if len(self.alpha) != mesh.ndim:
            raise MeshError(
                f"Topology of {len(self.alpha)} axes: the mesh {mesh} has {mesh.ndim}. "
                "Give one alpha and beta for each."
            )


# -- steps --------------------------------------------------------------------------------------------


Pieces: TypeAlias = dict[Layout, tuple[int, ...]]
"""The largest piece of each layout, for one shape."""


class StepCost(NamedTuple):
    """What a step costs the rank with the largest pieces. Counts are elements.

    Attributes:
        peers: Other ranks it gets data from or gives data to, whichever are more.
        received: What it receives.
        sent: What it sends.
        copied: What it copies or reduces on the way.
        held: What it holds at once for input, wire and output.
    """

    peers: int
    received: int
    sent: int
    copied: int
    held: int


def largest_piece(layout: Layout, shape: Sequence[int]) -> tuple[int, ...]:
    """Per dim, the size of the largest piece."""
    out = []
    mesh = layout.mesh
    sizes_of = dict(zip(mesh.axis_names, mesh.shape, strict=True))
    for length, splits in zip(shape, layout.splits, strict=True):
        for axis, sizes in splits:
            length = -(-length // sizes_of[axis]) if sizes is None else max(sizes)
        out.append(length)
    return tuple(out)


def step_cost(step: Step, shape: Sequence[int], pieces: Pieces | None = None) -> StepCost:
    """What a step costs for a tensor of global `shape`. See Note [Cost of a plan].

    Args:
        step: The step.
        shape: Global shape.
        pieces: Largest pieces of layouts of this shape as far as they are known; more are added.

    Communication: none. Memory: none.
    """
    pieces = {} if pieces is None else pieces
    before, after = (
        pieces.get(layout) or pieces.setdefault(layout, largest_piece(layout, shape)) for layout in (step.src, step.dst)
    )
    num_before, num_after = math.prod(before), math.prod(after)
    held = num_before + num_after
    others = step.group_size - 1
    match step.kind:
        case StepKind.REDUCE_SCATTER:
            wire = others * num_after
            return StepCost(others, wire, wire, num_before, held + wire + num_after)
        case StepKind.ALL_REDUCE:
            wire = -(-2 * others * num_before // (others + 1))
            return StepCost(2 * others, wire, wire, num_before, held)
        case StepKind.ALL_GATHER:
            return StepCost(others, min(num_after, others * num_before), others * num_before, num_after, held)
        case StepKind.EXCHANGE:
            return _exchange_cost(step, shape, before, after)
        case _:
            return StepCost(0, 0, 0, 0, held)


def _exchange_cost(step: Step, shape: Sequence[int], before: tuple[int, ...], after: tuple[int, ...]) -> StepCost:
    src, dst, group = step.src, step.dst, frozenset(step.axes)
    sizes_of = dict(zip(src.mesh.axis_names, src.mesh.shape, strict=True))
    others = step.group_size - 1
    givers = takers = leaving = 1
    wanted = 1
    for dim, (length, have, want) in enumerate(zip(shape, before, after, strict=True)):
        for axis in src.dims[dim]:
            if axis in group and dst.dim_of(axis) is None:
                leaving *= sizes_of[axis]
        units = [
            (sizes_of[axis] if sizes is None else -(-length // max(sizes)), axis in group)
            for axis, sizes in dst.splits[dim]
            if length
        ]
        wanted *= have if all(inside for _, inside in units) else _wanted(have, length, units)
        givers *= max(1, -(-want // have)) if have else 1
        takers *= max(1, -(-have // want)) if want else 1
    num_copies = src.mesh.num_ranks(step.copy_axes)
    received = math.prod(after)
    sent = received if num_copies > 1 else leaving * wanted
    peers = min(others, max(givers, -(-leaving * takers // num_copies)))
    copied = (0 if givers == 1 else received) + (0 if takers == 1 else sent)
    return StepCost(peers, received, sent, copied, math.prod(before) + received)


def _wanted(width: int, length: int, units: Sequence[tuple[int, bool]]) -> int:
    """Most of `width` neighbouring indices that one group wants, each counted once.

    The indices lie in a range of `length` that the target cuts by `units`: axes of the group, of whose pieces all are
    wanted, and other axes, of whose pieces the group wants one.
    """
    width = min(width, length)
    if not units or not width:
        return width
    (num, is_inside), rest = units[0], units[1:]
    piece = -(-length // num)
    if not is_inside:
        return _wanted(width, piece, rest)
    full, remaining = divmod(width, piece)
    return (full * _wanted(piece, piece, rest) if full else 0) + _wanted(remaining, piece, rest)


def step_seconds(step: Step, cost: StepCost, itemsize: int, topology: Topology) -> float:
    """Predicted seconds of a step. See Note [Cost of a plan]."""
    if not step.kind.communicates:
        return 0.0
    index = step.src.mesh.axis_names.index
    where = [index(axis) for axis in step.axes]
    alpha = max(topology.alpha[i] for i in where)
    beta = max(topology.beta[i] for i in where)
    wire = max(cost.received, cost.sent)
    return alpha * (1 + cost.peers) + itemsize * (beta * wire + topology.gamma * cost.copied)


# -- measuring ----------------------------------------------------------------------------------------


def _exchange_seconds(platform: Platform, part: Tensor, ranks: tuple[int, ...], clock: Callable[[], float]) -> float:
    sends = [part] * len(ranks)
    outs = [platform.ops.empty(tuple(part.shape), part) for _ in ranks]
    return _median_seconds(lambda: platform.collectives.all_to_all(sends, outs, ranks).wait(), clock)


def _median_seconds(work: Callable[[], object], clock: Callable[[], float]) -> float:
    work()
    times = []
    for _ in range(REPEATS):
        began = clock()
        work()
        times.append(clock() - began)
    return statistics.median(times)


def _itemsize(x: Tensor) -> int:
    size = x.itemsize
    return int(size() if callable(size) else size)


def _slowest(
    platform: Platform, mesh: DeviceMesh, like: Tensor, costs: Sequence[float]
) -> tuple[list[float], list[float]]:
    """The largest of each cost over all ranks, in nanoseconds on the way: 16-bit floats hold no picoseconds."""
    ops = platform.ops
    mine = ops.zeros((len(costs),), like)
    for i, cost in enumerate(costs):
        ops.write(mine, ((i, i + 1),), ops.zeros((1,), like) + cost * 1e9)
    agreed = platform.collectives.all_reduce(mine, Reduction("max"), mesh.ranks).wait()
    seconds = [max(float(value) * 1e-9, LEAST_SECONDS) for value in agreed.tolist()]
    return seconds[:-1], seconds[-1:]
