# SPDX-License-Identifier: Apache-2.0
"""Shards through a change of shape: the layout that a local view gives, and where to go if there is none.

Note [Shards through a reshape]
    A reshape splits into groups: runs of dims of the old and of the new shape with equal products, each independent
    of the others. A piece of a group is one interval of flat indices if every dim in front of the innermost cut one
    is cut down to single indices. Then the cuts of the group, outermost first, are nested cuts of the flat range,
    and can be written as cuts of the new dims wherever their ends fall on whole rows: the first dim takes
    them until its pieces are single indices, then the next. So a view is enough, and nothing moves. Unequal ends become
    ragged sizes: (5, 6) cut by 3 and 2 rows is (30,) cut by 18 and 12.
    A cut dim of size 1 has all its data on one position of the axis. It stays cut if the new shape has a dim of size 1
    at that place; otherwise the axis cuts some new dim into everything and nothing.
    What no view can do goes by a meeting layout on the old shape: the axes of the group on its first dim, in blocks
    that are whole rows before and after; or some of the cuts gathered.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import NamedTuple, TypeAlias

from hyper_parallel.core.box import chunk_size
from hyper_parallel.core.device_mesh import DeviceMesh
from hyper_parallel.core.errors import ShapeError
from hyper_parallel.core.layout import Layout, Split

Shape: TypeAlias = tuple[int, ...]
Splits: TypeAlias = "list[tuple[Split, ...]]"


def full_shape(shape: Sequence[int], numel: int) -> Shape:
    """`shape` with its -1 filled in.

    Raises:
        ShapeError: the sizes do not make `numel` elements, or cannot be filled in.
    """
    given = tuple(shape)
    known = math.prod(size for size in given if size != -1)
    if given.count(-1) > 1 or any(size < -1 for size in given) or (-1 in given and not known):
        raise ShapeError(f"view to {given}: the sizes are not all known. Give at most one -1 beside sizes above 0.")
    out = tuple(numel // known if size == -1 else size for size in given)
    if math.prod(out) != numel:
        raise ShapeError(f"view to {given}: the tensor has {numel} elements. Give sizes that multiply to it.")
    return out


# -- groups -------------------------------------------------------------------------------------------


class Group(NamedTuple):
    """Dims (of size over 1) of the old and the new shape with equal products."""

    ins: tuple[int, ...]
    outs: tuple[int, ...]


def groups_of(shape: Shape, new_shape: Shape) -> Iterator[Group]:
    """The groups of a reshape of a tensor that has elements, in order."""
    ins = [i for i, size in enumerate(shape) if size != 1]
    outs = [j for j, size in enumerate(new_shape) if size != 1]
    a = b = 0
    while a < len(ins):
        first, second = a, b
        left, right = shape[ins[a]], new_shape[outs[b]]
        a, b = a + 1, b + 1
        while left != right:
            if left < right:
                left *= shape[ins[a]]
                a += 1
            else:
                right *= new_shape[outs[b]]
                b += 1
        yield Group(tuple(ins[first:a]), tuple(outs[second:b]))


# -- flat cuts ----------------------------------------------------------------------------------------


class Evenness(Enum):
    """How the pieces made so far compare."""

    EQUAL = "equal"
    EQUAL_OR_EMPTY = "equal or empty"
    UNEQUAL = "unequal"

    def after(self, sizes: Sequence[int]) -> Evenness:
        """The same after a cut into pieces of these sizes."""
        distinct = set(sizes)
        if self is Evenness.UNEQUAL or len(distinct - {0}) > 1:
            return Evenness.UNEQUAL
        return self if len(distinct) == 1 else Evenness.EQUAL_OR_EMPTY


class FlatCut(NamedTuple):
    """A cut of a range of flat indices.

    Attributes:
        axis: Mesh axis.
        num: Number of pieces.
        sizes: Sizes of the pieces of the longest range; shorter ones are cut at the same places. None: equal pieces.
    """

    axis: str
    num: int
    sizes: tuple[int, ...] | None


def chunk_sizes(length: int, num: int) -> tuple[int, ...]:
    """Sizes of the chunks of `length`."""
    size = chunk_size(length, num)
    return tuple(max(0, min(size, length - i * size)) for i in range(num))


def flat_cuts(mesh: DeviceMesh, sizes: Sequence[int], splits: Sequence[Sequence[Split]]) -> list[FlatCut] | None:
    """The cuts of dims as nested cuts of their flat range; None if pieces are not intervals of it.

    Args:
        mesh: The mesh.
        sizes: Sizes of the dims.
        splits: How each is cut.
    """
    unit = math.prod(sizes)
    is_closed = False
    found: list[FlatCut] = []
    evenness = Evenness.EQUAL
    for size, dim_splits in zip(sizes, splits, strict=True):
        unit //= size
        if dim_splits and is_closed:
            return None
        length = size
        for axis, given in dim_splits:
            num = mesh.size(axis)
            if given is None and evenness is Evenness.UNEQUAL:
                return None  # the chunks of a shorter piece are not cut at the same places
            pieces = chunk_sizes(length, num) if given is None else given
            is_equal = evenness is Evenness.EQUAL and len(set(pieces)) == 1
            found.append(FlatCut(axis, num, None if is_equal else tuple(unit * piece for piece in pieces)))
            evenness = evenness.after(pieces)
            length = max(pieces)
        is_closed = is_closed or length > 1 or evenness is Evenness.UNEQUAL
    return found


def place(cuts: Sequence[FlatCut], sizes: Sequence[int]) -> Splits | None:
    """Cuts of dims that make the same pieces as cuts of their flat range; None if ends fall inside of rows."""
    out: list[list[Split]] = [[] for _ in sizes]
    dim, length = 0, sizes[0]
    unit = math.prod(sizes[1:])
    evenness = Evenness.EQUAL
    for axis, num, flat in cuts:
        while length == 1 and dim + 1 < len(sizes) and evenness is not Evenness.UNEQUAL:
            dim += 1
            length = sizes[dim]
            unit //= length
        if flat is None and length % num:
            return None
        if flat is not None and any(size % unit for size in flat):
            return None
        pieces = (length // num,) * num if flat is None else tuple(size // unit for size in flat)
        is_chunked = evenness is not Evenness.UNEQUAL and pieces == chunk_sizes(length, num)
        out[dim].append((axis, None if is_chunked else pieces))
        evenness = evenness.after(pieces)
        length = max(pieces)
    return [tuple(dim_splits) for dim_splits in out]


# -- layouts ------------------------------------------------------------------------------------------


def surviving(layout: Layout, shape: Shape, new_shape: Shape) -> Layout | None:
    """The layout on `new_shape` under which every rank holds the same elements in the same order, so that a view does.

    Args:
        layout: Layout of the tensor of `shape`.
        shape: Global shape.
        new_shape: Global shape with as many elements.

    Returns:
        The layout, pending reductions included; None if no layout is that. See Note [Shards through a reshape].

    Communication: none. Memory: none.
    """
    if shape == new_shape:
        return layout
    if 0 in shape:
        return _of_nothing(layout, shape, new_shape)
    splits: Splits = [()] * len(new_shape)
    for group in groups_of(shape, new_shape):
        carried = _carried(layout, shape, new_shape, group)
        if carried is None:
            return None
        for dim, dim_splits in zip(group.outs, carried, strict=True):
            splits[dim] = dim_splits
    if not _carry_ones(layout, shape, new_shape, splits):
        return None
    return _laid(layout, splits)


def _of_nothing(layout: Layout, shape: Shape, new_shape: Shape) -> Layout:
    """Without elements all layouts are alike: the leading dims that stay keep theirs."""
    common = 0
    while shape[common : common + 1] == new_shape[common : common + 1] != ():
        common += 1
    return _laid(layout, [*layout.splits[:common], *[()] * (len(new_shape) - common)])


def _laid(like: Layout, splits: Sequence[Sequence[Split]]) -> Layout:
    """The layout with these splits and the mesh and the pending reductions of `like`."""
    return Layout(
        like.mesh,
        [[axis for axis, _ in dim_splits] for dim_splits in splits],
        partial=like.partial,
        ragged={axis: sizes for dim_splits in splits for axis, sizes in dim_splits if sizes is not None},
    )


def _carried(layout: Layout, shape: Shape, new_shape: Shape, group: Group) -> Splits | None:
    """How the new dims of a group are cut, or None."""
    splits = [layout.splits[dim] for dim in group.ins]
    if len(group.ins) == len(group.outs) == 1:
        return splits
    cuts = flat_cuts(layout.mesh, [shape[dim] for dim in group.ins], splits)
    return None if cuts is None else place(cuts, [new_shape[dim] for dim in group.outs])


def _carry_ones(layout: Layout, shape: Shape, new_shape: Shape, splits: Splits) -> bool:
    """Add the cuts of dims of size 1 to `splits`; False if there is no dim to take them."""
    free = {j: math.prod(new_shape[:j]) for j, size in enumerate(new_shape) if size == 1}
    for i, size in enumerate(shape):
        if size != 1 or not layout.splits[i]:
            continue
        before = math.prod(shape[:i])
        match_ = next((j for j, elements in free.items() if elements == before), None)
        if match_ is not None:
            del free[match_]
            splits[match_] = layout.splits[i]
            continue
        if not new_shape:
            return False
        splits[0] = (*splits[0], *_all_or_nothing(layout, i, splits[0], new_shape[0]))
    return True


def _all_or_nothing(layout: Layout, dim: int, taken: Sequence[Split], length: int) -> Iterator[Split]:
    """The cuts of a dim of size 1 as cuts, behind others, of one of `length`: a piece gets all of it or nothing."""
    mesh = layout.mesh
    for axis, sizes in taken:
        length = chunk_size(length, mesh.size(axis)) if sizes is None else max(sizes)
    for axis, sizes in layout.splits[dim]:
        pieces = chunk_sizes(1, mesh.size(axis)) if sizes is None else sizes
        yield axis, tuple(length * piece for piece in pieces)


# -- meeting layouts ----------------------------------------------------------------------------------


def meetings(layout: Layout, shape: Shape, new_shape: Shape) -> list[tuple[Layout, Layout]]:
    """Layouts on `shape` to go to before a view, each with the layout on `new_shape` that the view gives.

    The first is `layout` itself if it survives. There is always one: all cuts of the groups in question gathered.

    Communication: none. Memory: a few layouts.
    """
    found = surviving(layout, shape, new_shape)
    if found is not None:
        return [(layout, found)]
    out: dict[Layout, Layout] = {}
    for manner in (_in_blocks, _longest_part, _whole):
        splits = list(layout.splits)
        for group in groups_of(shape, new_shape):
            if _carried(layout, shape, new_shape, group) is None:
                for dim, dim_splits in zip(group.ins, manner(layout, shape, new_shape, group), strict=True):
                    splits[dim] = dim_splits
        if not new_shape:
            splits = [()] * len(shape)
        meeting = _laid(layout, splits)
        after = surviving(meeting, shape, new_shape)
        if after is not None:
            out.setdefault(meeting, after)
    return list(out.items())


def _whole(layout: Layout, shape: Shape, new_shape: Shape, group: Group) -> Splits:
    return [()] * len(group.ins)


def _longest_part(layout: Layout, shape: Shape, new_shape: Shape, group: Group) -> Splits:
    """As many cuts of the group, from the outermost, as survive."""
    splits: Splits = [layout.splits[dim] for dim in group.ins]
    sizes, new_sizes = [shape[dim] for dim in group.ins], [new_shape[dim] for dim in group.outs]
    while any(splits):
        cuts = flat_cuts(layout.mesh, sizes, splits)
        if cuts is not None and place(cuts, new_sizes) is not None:
            break
        last = max(i for i, dim_splits in enumerate(splits) if dim_splits)
        splits[last] = splits[last][:-1]
    return splits


def _in_blocks(layout: Layout, shape: Shape, new_shape: Shape, group: Group) -> Splits:
    """All axes of the group on its first dim, in blocks that are whole rows before and after."""
    axes = [axis for dim in group.ins for axis, _ in layout.splits[dim]]
    numel = math.prod(shape[dim] for dim in group.ins)
    unit = numel // shape[group.ins[0]]
    block = math.lcm(unit, numel // new_shape[group.outs[0]])
    length = numel // block
    if length == 1:
        return _whole(layout, shape, new_shape, group)  # one rank would hold it all
    splits: list[Split] = []
    is_even = True
    for axis in axes:
        pieces = chunk_sizes(length, layout.mesh.size(axis))
        is_even = is_even and len(set(pieces)) == 1
        splits.append((axis, None if is_even else tuple(piece * block // unit for piece in pieces)))
        length = max(pieces)
    return [tuple(splits), *[()] * (len(group.ins) - 1)]


def refined(shape: Shape, new_shape: Shape) -> Shape | None:
    """A shape that both shapes are got from by merging neighbouring dims, as coarse as it may be; None without one.

    Where the dims of a group have no common refinement the group is one dim, which is not a refinement of either, but
    still a shape on which intervals can be exchanged.
    """
    if 0 in shape:
        return None
    out: list[int] = []
    for group in groups_of(shape, new_shape):
        ends = set()
        for sizes in ([shape[dim] for dim in group.ins], [new_shape[dim] for dim in group.outs]):
            rows = 1
            for size in reversed(sizes):
                rows *= size
                ends.add(rows)
        steps = sorted({1, *ends})
        if any(large % small for small, large in itertools.pairwise(steps)):
            steps = [1, steps[-1]]
        out += [large // small for small, large in reversed(list(itertools.pairwise(steps)))]
    return tuple(out)
