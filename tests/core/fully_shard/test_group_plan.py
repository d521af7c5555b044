# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyper_parallel.core.box import chunk_size
from hyper_parallel.core.fully_shard.group_plan import GroupPlan, plan_group

SHAPES = st.lists(
    st.one_of(
        st.tuples(st.integers(0, 40)),
        st.tuples(st.integers(0, 24), st.integers(1, 24)),
        st.tuples(st.integers(1, 8), st.integers(1, 6), st.integers(1, 6)),
    ),
    min_size=1,
    max_size=8,
)
RANKS = st.integers(1, 16)
ITEMSIZES = st.sampled_from([1, 2, 4, 8])


def gpt_block(width: int) -> list[tuple[int, ...]]:
    d = width
    return [(d,), (d,), (3 * d, d), (3 * d,), (d, d), (d,), (d,), (d,), (4 * d, d), (4 * d,), (d, 4 * d), (d,)]


def llama_block(width: int, hidden: int, kv: int) -> list[tuple[int, ...]]:
    d = width
    return [(d,), (d, d), (kv, d), (kv, d), (d, d), (d,), (hidden, d), (hidden, d), (d, hidden)]


def rows_in_part(plan: GroupPlan, index: int, rank: int) -> set[int]:
    """By brute force: which rows of a parameter lie in the part of `rank`; fails if one is cut."""
    param, part = plan.params[index], plan.shard_numel
    found = set()
    for row in range(param.num_rows if param.row_numel else 0):
        start = param.offset + row * param.row_numel
        first, last = start // part, (start + param.row_numel - 1) // part
        assert first == last, f"row {row} of parameter {index} is cut"
        if first == rank:
            found.add(row)
    return found


@given(SHAPES, RANKS, ITEMSIZES)
def test_each_row_is_owned_once_and_never_cut(shapes: list[tuple[int, ...]], num_ranks: int, itemsize: int) -> None:
    plan = plan_group(shapes, num_ranks, itemsize)
    for index, shape in enumerate(shapes):
        if math.prod(shape) == 0:
            continue
        for rank in range(num_ranks):
            start, stop = plan.params[index].rows_of(rank)
            assert set(range(start, stop)) == rows_in_part(plan, index, rank)


@given(SHAPES, RANKS, ITEMSIZES)
def test_parameters_and_holes_tile_the_buffer(shapes: list[tuple[int, ...]], num_ranks: int, itemsize: int) -> None:
    plan = plan_group(shapes, num_ranks, itemsize)
    ranges = [(p.offset, p.offset + p.numel) for p in plan.params if p.numel] + list(plan.holes())
    position = 0
    for start, stop in sorted(ranges):
        assert start == position
        position = stop
    assert position == plan.numel == num_ranks * plan.shard_numel


@given(SHAPES, RANKS, ITEMSIZES)
def test_sizes_add_up_to_the_rows(shapes: list[tuple[int, ...]], num_ranks: int, itemsize: int) -> None:
    plan = plan_group(shapes, num_ranks, itemsize)
    for param, shape in zip(plan.params, shapes, strict=True):
        assert len(param.sizes) == num_ranks
        assert sum(param.sizes) == param.num_rows == shape[0]
        assert param.row_numel == math.prod(shape[1:])


@given(SHAPES, RANKS, ITEMSIZES)
def test_local_pieces_lie_inside_the_part_and_apart(
    shapes: list[tuple[int, ...]], num_ranks: int, itemsize: int
) -> None:
    plan = plan_group(shapes, num_ranks, itemsize)
    for rank in range(num_ranks):
        pieces = []
        for index, param in enumerate(plan.params):
            numel = param.sizes[rank] * param.row_numel
            offset = plan.local_offset(index, rank)
            assert 0 <= offset <= offset + numel <= plan.shard_numel
            if numel:
                start = param.offset + param.rows_of(rank)[0] * param.row_numel
                assert rank * plan.shard_numel + offset == start
                pieces.append((offset, offset + numel))
        pieces.sort()
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(pieces))


@given(SHAPES, RANKS, ITEMSIZES)
def test_planning_twice_gives_the_same(shapes: list[tuple[int, ...]], num_ranks: int, itemsize: int) -> None:
    assert plan_group(shapes, num_ranks, itemsize) == plan_group([list(s) for s in shapes], num_ranks, itemsize)


@given(SHAPES, RANKS, ITEMSIZES)
def test_is_chunked_says_what_torch_chunk_would_do(
    shapes: list[tuple[int, ...]], num_ranks: int, itemsize: int
) -> None:
    for param in plan_group(shapes, num_ranks, itemsize).params:
        size = chunk_size(param.num_rows, num_ranks)
        starts = [min(r * size, param.num_rows) for r in range(num_ranks + 1)]
        expected = tuple(b - a for a, b in itertools.pairwise(starts))
        assert param.is_chunked == (param.sizes == expected)


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64])
@pytest.mark.parametrize(
    "shapes",
    [
        pytest.param(gpt_block(1024), id="gpt-1024"),
        pytest.param(gpt_block(1600), id="gpt-1600"),
        pytest.param(gpt_block(2048), id="gpt-2048"),
        pytest.param(gpt_block(4096), id="gpt-4096"),
        pytest.param(llama_block(2048, 8192, 512), id="llama-1b"),
        pytest.param(llama_block(4096, 14336, 1024), id="llama-8b"),
        pytest.param(llama_block(8192, 28672, 1024), id="llama-70b"),
    ],
)
def test_waste_of_a_transformer_block_is_below_two_percent(shapes: list[tuple[int, ...]], num_ranks: int) -> None:
    plan = plan_group(shapes, num_ranks, 2)
    assert 0 <= plan.waste < 0.02


@pytest.mark.parametrize("shapes", [gpt_block(1024), llama_block(4096, 14336, 1024)])
def test_one_rank_wastes_next_to_nothing(shapes: list[tuple[int, ...]]) -> None:
    plan = plan_group(shapes, 1, 4)
    assert plan.waste < 1e-6
    assert all(param.is_chunked for param in plan.params)


@pytest.mark.parametrize("itemsize", [2, 4])
def test_parameters_of_a_block_are_aligned(itemsize: int) -> None:
    plan = plan_group(gpt_block(1024), 8, itemsize)
    assert [p.offset * itemsize % 16 for p in plan.params] == [0] * len(plan.params)
    assert plan.shard_numel * itemsize % 16 == 0


def test_empty_and_one_row_parameters() -> None:
    plan = plan_group([(0, 4), (1,), (1, 7)], 4, 4)
    assert [sum(p.sizes) for p in plan.params] == [0, 1, 1]
    assert [max(p.sizes) for p in plan.params] == [0, 1, 1]


def test_more_ranks_than_rows_leaves_ranks_empty() -> None:
    plan = plan_group([(3, 5)], 8, 4)
    assert sorted(plan.params[0].sizes, reverse=True)[:4] in ([3, 0, 0, 0], [2, 1, 0, 0], [1, 1, 1, 0])


def test_rows_without_a_common_divisor_still_find_a_place() -> None:
    shapes = [(40, 7), (40, 11), (40, 13), (40, 17), (40, 19), (40, 23)]
    for num_ranks in range(2, 20):
        plan = plan_group(shapes, num_ranks, 4)
        for index in range(len(shapes)):
            assert sum(len(rows_in_part(plan, index, rank)) for rank in range(num_ranks)) == 40


def test_a_thousand_ranks_are_planned() -> None:
    plan = plan_group(llama_block(8192, 28672, 1024), 1024, 2)
    assert sum(plan.params[6].sizes) == 28672
    assert plan.waste < 0.03
