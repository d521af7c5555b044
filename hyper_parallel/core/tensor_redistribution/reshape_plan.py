# SPDX-License-Identifier: Apache-2.0
"""Plans from one layout and shape to another layout on another shape.

Note [Stages]
    Such a plan is a list of plans, each on a shape of its own, with a view of the local tensor between them that moves
    nothing (See Note [Shards through a reshape]). Candidates are: the view first, or last; everything on the common
    refinement of both shapes, where one exchange moves exactly what is missing; a way over a meeting layout
    before the view, or behind it. The fastest wins, as in Note [Cost of a plan].
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from hyper_parallel.core.bounded_cache import BoundedCache, watch_cache
from hyper_parallel.core.errors import LayoutError
from hyper_parallel.core.layout import Layout
from hyper_parallel.core.tensor_redistribution.cost import Topology
from hyper_parallel.core.tensor_redistribution.planner import Plan, plan
from hyper_parallel.core.tensor_redistribution.reshape import Shape, full_shape, meetings, refined, surviving
from hyper_parallel.core.tensor_redistribution.table import show_bytes, show_seconds

Way: TypeAlias = "list[tuple[Layout, Layout, Shape]]"


@dataclass(frozen=True, slots=True)
class ReshapePlan:
    """How to bring a tensor to another layout on another shape. `print` it for a table.

    Attributes:
        src: Layout before.
        dst: Layout after.
        shape: Global shape before.
        new_shape: Global shape after.
        itemsize: Bytes per element.
        stages: Plans, each from and to layouts on its own shape, with a view of the local tensor in front of each and
            behind the last. See Note [Stages].
    """

    src: Layout
    dst: Layout
    shape: Shape
    new_shape: Shape
    itemsize: int
    stages: tuple[Plan, ...]

    @property
    def num_collectives(self) -> int:
        """Number of communicating steps."""
        return sum(stage.num_collectives for stage in self.stages)

    @property
    def seconds(self) -> float:
        """Predicted time."""
        return sum(stage.seconds for stage in self.stages)

    def bytes_received(self, rank: int) -> int:
        """Bytes that `rank` receives in all."""
        return sum(stage.bytes_received(rank) for stage in self.stages)

    def bytes_sent(self, rank: int) -> int:
        """Bytes that `rank` sends in all."""
        return sum(stage.bytes_sent(rank) for stage in self.stages)

    def peak_bytes(self, rank: int | None = None) -> int:
        """Most bytes that `rank` (default: any rank) holds at once."""
        return max((stage.peak_bytes(rank) for stage in self.stages), default=0)

    def __str__(self) -> str:
        """The tables of the stages, and what they come to."""
        head = f"{self.src} on {self.shape} -> {self.dst} on {self.new_shape}"
        if not self.stages:
            return f"{head}\n  a view of the local tensor"
        received = show_bytes(max(self.bytes_received(rank) for rank in self.src.mesh.ranks))
        foot = f"  in all: received {received}, held {show_bytes(self.peak_bytes())}, {show_seconds(self.seconds)}"
        return "\n".join([head, *(f"  {line}" for stage in self.stages for line in str(stage).splitlines()), foot])


def plan_reshape(
    src: Layout,
    dst: Layout,
    shape: Sequence[int],
    new_shape: Sequence[int],
    itemsize: int = 4,
    topology: Topology | None = None,
    max_bytes: int | None = None,
) -> ReshapePlan:
    """Plan a redistribution to another shape: the fastest of a few ways. See Note [Stages].

    Args:
        src: Layout that the tensor has.
        dst: Layout that it shall have, on the same mesh, for the new shape.
        shape: Global shape.
        new_shape: Global shape with as many elements; one size may be -1.
        itemsize: Bytes per element.
        topology: What communication costs. Default: `Topology.of` the mesh.
        max_bytes: Most bytes that a rank may hold at once. Default: any number.

    Returns:
        The plan; `print` it for a table.

    Raises:
        ShapeError: another number of elements.
        LayoutError: different meshes, layouts that do not fit the shapes, or no way keeps to `max_bytes`.

    Communication: none. Memory: a few layouts.

    Example:
        >>> from hyper_parallel.core.device_mesh import DeviceMesh
        >>> mesh = DeviceMesh.grid(dp=2)
        >>> plan_reshape(mesh.layout("dp", None), mesh.layout("dp"), (4, 6), (24,)).num_collectives
        0
    """
    shape = tuple(shape)
    src.check_shape(shape, "plan")
    new_shape = full_shape(new_shape, math.prod(shape))
    dst.check_shape(new_shape, "plan")
    if src.mesh != dst.mesh:
        raise LayoutError(f"plan {src} -> {dst}: the meshes {src.mesh} and {dst.mesh} differ. Use layouts on one mesh.")
    found: list[ReshapePlan] = []
    refusal: LayoutError | None = None
    for way in _ways(src, dst, shape, new_shape):
        try:
            plans = [plan(a, b, on, itemsize, topology, max_bytes) for a, b, on in way if a is not b]
        except LayoutError as error:
            refusal = error
            continue
        found.append(ReshapePlan(src, dst, shape, new_shape, itemsize, tuple(plans)))
        if not plans:
            break
    if not found and refusal is not None:
        raise refusal
    return min(found, key=lambda made: (made.seconds, made.peak_bytes()))


def _ways(src: Layout, dst: Layout, shape: Shape, new_shape: Shape) -> Iterator[Way]:
    """Stages (from, to, on which shape) that lead from one to the other; a view that does it alone comes first."""
    before, after = meetings(src, shape, new_shape), meetings(dst, new_shape, shape)
    middle = refined(shape, new_shape)
    if middle is not None and middle not in (shape, new_shape):
        start, end = surviving(src, shape, middle), surviving(dst, new_shape, middle)
        if start is not None and end is not None:
            yield [(start, end, middle)]
    for meeting, seen in before:
        yield [(src, meeting, shape), (seen, dst, new_shape)]
    for meeting, seen in after:
        yield [(src, seen, shape), (meeting, dst, new_shape)]


def reshape_layouts(src: Layout, shape: Shape, new_shape: Shape, itemsize: int = 4) -> tuple[Layout, Layout]:
    """Where to bring a tensor so that a view of its local parts is a view of the whole, and the layout it then has.

    Args:
        src: Layout that the tensor has.
        shape: Global shape.
        new_shape: Global shape with as many elements.
        itemsize: Bytes per element.

    Returns:
        A layout on `shape`, `src` itself if nothing has to move, else the one that is soonest reached; and that on
        `new_shape` after the view.

    Communication: none. Memory: a few layouts.
    """
    found = meetings(src, shape, new_shape)
    if len(found) == 1:
        return found[0]
    return min(found, key=lambda pair: plan(src, pair[0], shape, itemsize).seconds)


_plans = BoundedCache(512)
watch_cache("reshape plans", _plans.info, _plans)


def cached_reshape_plan(
    src: Layout,
    dst: Layout,
    shape: Shape,
    new_shape: Shape,
    itemsize: int,
    topology: Topology | None = None,
    max_bytes: int | None = None,
) -> ReshapePlan:
    """As `plan_reshape`, from a bounded cache.

    Raises:
        ShapeError, LayoutError: as `plan_reshape`.
    """
    key = (src, dst, shape, new_shape, itemsize, topology, max_bytes)
    found: ReshapePlan | None = _plans.get(key)
    if found is None:
        found = plan_reshape(src, dst, shape, new_shape, itemsize, topology, max_bytes)
        _plans.put(key, found)
    return found
