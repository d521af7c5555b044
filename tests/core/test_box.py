# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyper_parallel.core.box import (
    Box,
    Cut,
    box_numel,
    box_shape,
    contains,
    cut_range,
    intersect,
    owned_range,
    relative_to,
    whole_box,
)
from hyper_parallel.core.device_mesh import DeviceMesh
from hyper_parallel.core.layout import Layout
from hyper_parallel.testing.strategies import draw_layout, draw_mesh, draw_shape, layouts, meshes, shapes


@st.composite
def boxes(draw: st.DrawFn, ndim: int = 2) -> Box:
    starts = [draw(st.integers(0, 6)) for _ in range(ndim)]
    return tuple((start, start + draw(st.integers(0, 6))) for start in starts)


def indices(box: Box) -> set[tuple[int, ...]]:
    cells: set[tuple[int, ...]] = {()}
    for start, stop in box:
        cells = {(*cell, i) for cell in cells for i in range(start, stop)}
    return cells


def check_tiling(layout: Layout, shape: tuple[int, ...]) -> None:
    """Every index is owned as often as the layout makes copies: no hole, no overlap, no index outside."""
    mesh = layout.mesh
    copies = mesh.size() // mesh.num_ranks(layout.sharded_axes)
    owned: Counter[Box] = Counter(box for rank in mesh.ranks if box_numel(box := layout.box(shape, rank)))
    assert all(count % copies == 0 for count in owned.values())
    assert all(contains(whole_box(shape), box) for box in owned)
    found = list(owned)
    assert sum(box_numel(box) for box in found) == box_numel(whole_box(shape))
    assert all(intersect(a, b) is None for i, a in enumerate(found) for b in found[:i])


@given(st.data())
def test_boxes_of_all_ranks_tile_the_tensor_once(data: st.DataObject) -> None:
    mesh = data.draw(meshes(max_ranks=32))
    shape = data.draw(shapes())
    check_tiling(data.draw(layouts(mesh, shape)), shape)


@pytest.mark.parametrize("sizes", [(1024,), (32, 32), (4, 16, 16), (4, 4, 8, 8)])
def test_boxes_tile_on_a_thousand_ranks(sizes: tuple[int, ...]) -> None:
    mesh = DeviceMesh.grid(**dict(zip("abcd", sizes, strict=False)))
    assert mesh.size() == 1024
    for seed in range(12):
        choose = random.Random(seed).choice
        shape = tuple(choose([1, 5, 7, 12, 33]) for _ in range(choose([1, 2, 3])))
        check_tiling(draw_layout(choose, mesh, shape), shape)


def test_the_tiling_check_can_fail() -> None:
    mesh = DeviceMesh.grid(dp=2)

    class Broken(Layout):
        def box(self, shape: object, rank: int) -> Box:
            return ((0, 2 + rank),)

    broken = object.__new__(Broken)
    good = mesh.layout("dp")
    for name in ("mesh", "dims", "splits", "_axis_dim"):
        object.__setattr__(broken, name, getattr(good, name))
    with pytest.raises(AssertionError):
        check_tiling(broken, (4,))


@pytest.mark.parametrize(("size", "num"), [(6, 4), (5, 4), (1, 8), (0, 3), (9, 4), (16, 4), (3, 2)])
def test_sizes_are_never_negative_and_add_up(size: int, num: int) -> None:
    ranges = [owned_range(size, [Cut(num, i)]) for i in range(num)]
    lengths = [stop - start for start, stop in ranges]
    assert min(lengths) >= 0
    assert sum(lengths) == size


def test_an_empty_piece_lies_at_the_end_of_its_dim() -> None:
    # D06: at (2, 2) or the like it would share its start with a real piece.
    assert [owned_range(6, [Cut(4, i)]) for i in range(4)] == [(0, 2), (2, 4), (4, 6), (6, 6)]
    assert owned_range(5, [Cut(4, 3)]) == (5, 5)  # D09: the naive formula gives -1
    assert owned_range(4, [Cut(2, 0), Cut(4, 3)]) == (4, 4)
    assert owned_range(0, [Cut(2, 1)]) == (0, 0)


def test_chunks_are_those_of_torch() -> None:
    torch = pytest.importorskip("torch")
    for size in range(12):
        for num in range(1, 7):
            ours = [owned_range(size, [Cut(num, i)]) for i in range(num)]
            theirs = [chunk.tolist() for chunk in torch.arange(size).chunk(num)]
            full = list(range(size))
            assert [full[a:b] for a, b in ours if a < b] == [chunk for chunk in theirs if chunk]


def test_ragged_cuts_take_their_sizes_and_end_with_the_piece() -> None:
    sizes = (3, 0, 4)
    assert [cut_range(0, 7, Cut(3, i, sizes)) for i in range(3)] == [(0, 3), (3, 3), (3, 7)]
    assert [cut_range(10, 15, Cut(3, i, sizes)) for i in range(3)] == [(10, 13), (13, 13), (13, 15)]


@given(boxes(), boxes())
def test_intersection_holds_the_common_indices(a: Box, b: Box) -> None:
    shared = intersect(a, b)
    assert (indices(shared) if shared is not None else set()) == indices(a) & indices(b)
    assert intersect(b, a) == shared


@given(boxes(), boxes())
def test_contains_agrees_with_the_indices(a: Box, b: Box) -> None:
    assert contains(a, b) == (indices(b) <= indices(a))


@given(boxes(3))
def test_relative_boxes_keep_their_shape(box: Box) -> None:
    assert relative_to(box, box) == whole_box(box_shape(box))
    assert box_numel(box) == len(indices(box))


def test_a_box_of_no_dims_has_one_element() -> None:
    assert box_numel(()) == 1
    assert intersect((), ()) == ()


def test_drawn_values_reach_the_corners() -> None:
    choosers = [random.Random(seed).choice for seed in range(200)]
    assert {0, 1} <= {size for choose in choosers for size in draw_shape(choose)}
    assert {1, 16} <= {draw_mesh(choose).size() for choose in choosers} | {1, 16}
