# SPDX-License-Identifier: Apache-2.0
"""Hypothesis strategies for meshes, shapes and layouts, and the same drawn from a seed.

Each `draw_*` function builds a value from a `choose` function that picks one of some options. Hypothesis supplies one
that shrinks; `random.Random(seed).choice` is one for tests that want many cases fast.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from hypothesis import strategies as st

from hyper_parallel.core.device_mesh import DeviceMesh
from hyper_parallel.core.layout import Layout

T = TypeVar("T")
AXES = ("dp", "tp", "cp", "ep")
NUMBER_OPS = ("sum", "avg", "max", "min", "prod")
BOOL_OPS = ("all", "any")


class Chooser(Protocol):
    """Picks one of some options, the first being the simplest."""

    def __call__(self, options: Sequence[T], /) -> T:
        """One of `options`."""
        ...


class LayoutPair(NamedTuple):
    """Two layouts of one tensor.

    Attributes:
        src: One layout.
        dst: The other, on the same mesh.
        shape: Global shape that both fit.
        is_bool: Whether their pending reductions are those of bool tensors.
    """

    src: Layout
    dst: Layout
    shape: tuple[int, ...]
    is_bool: bool


def draw_mesh(choose: Chooser, max_ranks: int = 16) -> DeviceMesh:
    """A mesh of at most `max_ranks` ranks and four axes, some of size 1; now and then its ranks are out of order."""
    sizes: list[int] = []
    for _ in range(choose(range(1, len(AXES) + 1))):
        sizes.append(choose([n for n in (2, 1, 3, 4, 8) if n * math.prod(sizes) <= max_ranks]))
    num_ranks = math.prod(sizes)
    first, step = choose([(0, 1), (0, 1), (0, 1), (num_ranks - 1, -1), (5, 2)])
    ranks = [first + step * i for i in range(num_ranks)]
    for size in reversed(sizes[1:]):
        ranks = [ranks[i : i + size] for i in range(0, len(ranks), size)]  # type: ignore[misc]
    return DeviceMesh("cpu", ranks, mesh_dim_names=AXES[: len(sizes)])


def draw_shape(choose: Chooser, max_ndim: int = 3, max_size: int = 9) -> tuple[int, ...]:
    """A shape of up to `max_ndim` dims, sizes 0 and 1 among them."""
    sizes = [size for size in (4, 1, *range(2, max_size + 1), max_size, 0) if size <= max_size]
    return tuple(choose(sizes) for _ in range(choose(range(max_ndim + 1))))


def draw_layout(
    choose: Chooser,
    mesh: DeviceMesh,
    shape: Sequence[int],
    *,
    ragged: bool = True,
    partial: bool = True,
    ops: Sequence[str] = NUMBER_OPS,
) -> Layout:
    """A layout of a tensor of `shape`, axes in any order, that passes `check_shape`."""
    dims: list[list[str]] = [[] for _ in shape]
    pending: dict[str, str] = {}
    family = choose([op for op in ops if op != "avg"])
    for axis in choose(list(itertools.permutations(mesh.axis_names))):
        role = choose(["copy", *(["pending"] if partial else []), *range(len(shape)), *range(len(shape))])
        if isinstance(role, int):
            dims[role].append(axis)
        elif role == "pending":
            pending[axis] = choose([op for op in ("sum", "avg") if op in ops]) if family == "sum" else family
    sizes = _draw_ragged(choose, mesh, dims, shape) if ragged else {}
    return Layout(mesh, dims, partial=pending, ragged=sizes)


def _draw_ragged(
    choose: Chooser, mesh: DeviceMesh, dims: Sequence[Sequence[str]], shape: Sequence[int]
) -> dict[str, tuple[int, ...]]:
    """Sizes for some of the axes, which add up to the longest piece they cut."""
    out: dict[str, tuple[int, ...]] = {}
    for axes, longest in zip(dims, shape, strict=True):
        for axis in axes:
            num = mesh.size(axis)
            if choose([False, False, True]):
                ends = sorted(choose(range(longest + 1)) for _ in range(num - 1))
                bounds = zip([0, *ends], [*ends, longest], strict=True)
                out[axis] = tuple(stop - start for start, stop in bounds)
                longest = max(out[axis])
            else:
                longest = -(-longest // num)
    return out


def draw_layout_pair(
    choose: Chooser,
    *,
    max_ranks: int = 16,
    max_ndim: int = 3,
    max_size: int = 9,
    ragged: bool = True,
    partial: bool = True,
    mesh: DeviceMesh | None = None,
) -> LayoutPair:
    """A mesh (unless given), a shape and two layouts of it."""
    mesh = draw_mesh(choose, max_ranks) if mesh is None else mesh
    shape = draw_shape(choose, max_ndim, max_size)
    is_bool = partial and choose([False, False, False, True])
    ops = BOOL_OPS if is_bool else NUMBER_OPS
    src = draw_layout(choose, mesh, shape, ragged=ragged, partial=partial, ops=ops)
    dst = draw_layout(choose, mesh, shape, ragged=ragged, partial=partial, ops=ops)
    return LayoutPair(src, dst, shape, is_bool)


def _chooser(draw: st.DrawFn) -> Any:
    return lambda options: draw(st.sampled_from(list(options)))


@st.composite
def meshes(draw: st.DrawFn, max_ranks: int = 16) -> DeviceMesh:
    """Strategy for meshes. See `draw_mesh`."""
    return draw_mesh(_chooser(draw), max_ranks)


@st.composite
def shapes(draw: st.DrawFn, max_ndim: int = 3, max_size: int = 9) -> tuple[int, ...]:
    """Strategy for global shapes. See `draw_shape`."""
    return draw_shape(_chooser(draw), max_ndim, max_size)


@st.composite
def layouts(
    draw: st.DrawFn,
    mesh: DeviceMesh,
    shape: Sequence[int],
    *,
    ragged: bool = True,
    partial: bool = True,
) -> Layout:
    """Strategy for layouts of a tensor of `shape` on `mesh`. See `draw_layout`."""
    return draw_layout(_chooser(draw), mesh, shape, ragged=ragged, partial=partial)


@st.composite
def layout_pairs(
    draw: st.DrawFn,
    *,
    max_ranks: int = 16,
    max_ndim: int = 3,
    max_size: int = 9,
    ragged: bool = True,
    partial: bool = True,
) -> LayoutPair:
    """Strategy for two layouts of one tensor. See `draw_layout_pair`."""
    return draw_layout_pair(
        _chooser(draw),
        max_ranks=max_ranks,
        max_ndim=max_ndim,
        max_size=max_size,
        ragged=ragged,
        partial=partial,
    )
