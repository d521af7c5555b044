# SPDX-License-Identifier: Apache-2.0
"""Shards through reshapes; the oracles are flat indices and numpy's own reshape."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

from hyper_parallel.core.box import Box
from hyper_parallel.core.device_mesh import DeviceMesh
from hyper_parallel.core.errors import LayoutError, ShapeError
from hyper_parallel.core.layout import Layout
from hyper_parallel.core.tensor_redistribution import cached_reshape_plan, plan_reshape
from hyper_parallel.core.tensor_redistribution.reshape import full_shape, meetings, refined, surviving
from hyper_parallel.core.tensor_redistribution.reshape_plan import reshape_layouts
from hyper_parallel.platform.virtual import VirtualWorld
from hyper_parallel.testing.strategies import draw_layout

MESHES = (
    DeviceMesh.grid(a=2),
    DeviceMesh.grid(a=2, b=2),
    DeviceMesh.grid(a=2, b=3),
    DeviceMesh.grid(a=3, b=2, c=2),
)
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 30, 36, 48, 60, 0)


def factors(random_: random.Random, numel: int) -> tuple[int, ...]:
    """A shape with `numel` elements, sizes 1 and 0 among them."""
    if numel == 0:
        sizes = [random_.choice((0, 1, 2, 3)) for _ in range(random_.randint(0, 3))]
        sizes.insert(random_.randint(0, len(sizes)), 0)
        return tuple(sizes)
    out: list[int] = []
    while (numel > 1 or random_.random() < 0.2) and len(out) < 5:
        out.append(random_.choice([d for d in range(1, numel + 1) if numel % d == 0]))
        numel //= out[-1]
    return (*out, numel) if numel > 1 else tuple(out)


def random_case(seed: int, *, partial: bool = True) -> tuple[random.Random, Layout, tuple[int, ...], tuple[int, ...]]:
    random_ = random.Random(seed)
    numel = random_.choice(SIZES)
    shape, new_shape = factors(random_, numel), factors(random_, numel)
    mesh = random_.choice(MESHES)
    layout = draw_layout(random_.choice, mesh, shape, ragged=random_.random() < 0.4, partial=partial)
    return random_, layout, shape, new_shape


def flat_indices(box: Box, shape: Sequence[int]) -> list[int]:
    """Flat indices of a box, in row-major order."""
    out = [0]
    for (start, stop), size in zip(box, shape, strict=True):
        out = [index * size + i for index in out for i in range(start, stop)]
    return out


def test_a_view_of_local_parts_is_a_view_of_the_whole() -> None:
    """4,000 random reshapes: wherever a layout is said to survive, every rank holds the same elements in order."""
    count: Counter[str] = Counter()
    for seed in range(4000):
        _, layout, shape, new_shape = random_case(seed)
        found = meetings(layout, shape, new_shape)
        assert found
        count["survive"] += surviving(layout, shape, new_shape) is not None
        for before, after in found:
            before.check_shape(shape)
            after.check_shape(new_shape)
            assert before.partial == after.partial == layout.partial
            for rank in layout.mesh.ranks:
                here = flat_indices(before.box(shape, rank), shape)
                assert here == flat_indices(after.box(new_shape, rank), new_shape), (seed, str(before), str(after))
    assert count["survive"] > 2000


@pytest.mark.slow
@pytest.mark.parametrize("first_seed", [0, 10_000])
def test_random_reshapes_equal_numpys(first_seed: int) -> None:
    """5,000 in all, to any layout; nothing is communicated where a view leads there."""
    views = 0
    for seed in range(first_seed, first_seed + 2500):
        random_, src, shape, new_shape = random_case(seed)
        dst = draw_layout(random_.choice, src.mesh, new_shape, ragged=random_.random() < 0.4)
        after = surviving(src, shape, new_shape)
        if after is not None and random_.random() < 0.3:
            dst = after
        world = VirtualWorld(src.mesh)
        array = np.random.default_rng(seed).integers(-20, 20, shape).astype(np.float64)
        out = world.reshape(world.distribute(array, src), src, dst, shape, new_shape)
        np.testing.assert_array_equal(world.assemble(out, dst, new_shape), array.reshape(new_shape))
        made = plan_reshape(src, dst, shape, new_shape, 8)
        assert all(world.bytes_received[rank] == made.bytes_received(rank) for rank in src.mesh.ranks)
        if after is dst:
            views += 1
            assert made.stages == ()
            assert not world.collectives
    assert views > 300


GRID = DeviceMesh.grid(dp=2, tp=3)
LINE = DeviceMesh.grid(dp=2)


@pytest.mark.parametrize(
    ("layout", "shape", "new_shape", "expected"),
    [
        (LINE.layout("dp", None), (4, 6), (24,), LINE.layout("dp")),
        (LINE.layout("dp"), (24,), (4, 6), LINE.layout("dp", None)),
        (LINE.layout("dp", None, None), (4, 3, 2), (4, 6), LINE.layout("dp", None)),
        (LINE.layout(None, "dp", None), (4, 2, 3), (4, 6), LINE.layout(None, "dp")),
        (LINE.layout(None, "dp"), (4, 6), (2, 2, 6), LINE.layout(None, None, "dp")),
        (GRID.layout(("dp", "tp"), None), (6, 5), (30,), GRID.layout(("dp", "tp"))),
        (GRID.layout(("tp", "dp"), None), (12, 5), (3, 4, 5), GRID.layout("tp", "dp", None)),
        (GRID.layout("dp", "tp"), (2, 6), (12,), GRID.layout(("dp", "tp"))),
        (LINE.layout("dp", None), (1, 2), (1, 2), LINE.layout("dp", None)),  # D20
        (LINE.layout("dp", None), (1, 6), (1, 2, 3), LINE.layout("dp", None, None)),
        (LINE.layout(None, "dp", None), (6, 1, 2), (6, 1, 1, 2), LINE.layout(None, "dp", None, None)),
        (LINE.layout("dp", None), (5, 6), (30,), LINE.layout("dp", ragged={"dp": (18, 12)})),  # D19
        (LINE.layout("dp", None), (1, 6), (6,), LINE.layout("dp", ragged={"dp": (6, 0)})),
        (LINE.layout("dp"), (0,), (3, 0), LINE.layout(None, None)),
        (LINE.layout(None, partial={"dp": "max"}), (6,), (2, 3), LINE.layout(None, None, partial={"dp": "max"})),
        (LINE.layout(), (), (1, 1), LINE.layout(None, None)),
        # Not by a view: a cut behind another dim, rows cut through, an axis that would cut two dims.
        (LINE.layout(None, "dp"), (12, 8), (16, 6), None),  # D16
        (LINE.layout(None, "dp", None), (2, 4, 8), (8, 8), None),  # D19
        (LINE.layout("dp"), (6,), (3, 2), None),
        (DeviceMesh.grid(dp=8).layout("dp"), (8,), (4, 2), None),
        (GRID.layout(("dp", "tp"), None), (7, 2), (14,), None),
        (LINE.layout("dp"), (1,), (), None),
    ],
)
def test_which_layout_a_view_gives(
    layout: Layout, shape: tuple[int, ...], new_shape: tuple[int, ...], expected: Layout | None
) -> None:
    found = surviving(layout, shape, new_shape)
    assert found is expected, str(found)


def test_what_no_view_can_do_moves_instead_of_being_gathered() -> None:
    before, after = reshape_layouts(LINE.layout(None, "dp"), (12, 8), (16, 6))
    assert (str(before), str(after)) == ("[dp, -]", "[dp, -]")
    made = plan_reshape(LINE.layout(None, "dp"), after, (12, 8), (16, 6))
    assert [step.kind.value for stage in made.stages for step in stage.steps] == ["exchange"]
    assert made.bytes_received(0) == 96 * 4 // 4  # half of its half
    # Six pieces of rows do not fit 16 rows evenly (D17).
    mesh = DeviceMesh.grid(dp=6)
    before, after = reshape_layouts(mesh.layout(None, "dp"), (12, 8), (16, 6))
    assert str(after) == "[dp~, -]"
    assert after.ragged == (("dp", (4, 4, 4, 4, 0, 0)),)


def test_rows_that_would_be_strided_move_into_order() -> None:
    # D17: a view would give rank 0 the rows 0, 2, 4, 6 of (8, 8).
    mesh = DeviceMesh.grid(dp=2, tp=3)
    src, shape = mesh.layout(None, "dp", None), (4, 4, 4)
    assert surviving(src, shape, (8, 8)) is None
    world = VirtualWorld(mesh)
    array = np.arange(64.0).reshape(shape)
    dst = mesh.layout("dp", None)
    out = world.reshape(world.distribute(array, src), src, dst, shape, (8, 8))
    np.testing.assert_array_equal(out[0], array.reshape(8, 8)[:4])


def test_a_common_refinement_needs_one_exchange_of_what_is_missing() -> None:
    src, dst = LINE.layout(None, "dp"), LINE.layout("dp", None)
    assert refined((4, 6), (8, 3)) == (4, 2, 3)
    made = plan_reshape(src, dst, (4, 6), (8, 3))
    assert made.num_collectives == 1
    assert made.bytes_received(0) == made.bytes_received(1) == 6 * 4
    assert refined((2, 6), (3, 4)) == (12,)
    assert refined((0, 2), (3, 0)) is None
    assert refined((4, 1, 6), (4, 6)) == (4, 6)


def test_a_plan_prints_its_stages() -> None:
    made = plan_reshape(LINE.layout(None, "dp"), LINE.layout("dp", None), (12, 8), (16, 6))
    text = str(made)
    assert text.startswith("[-, dp] on (12, 8) -> [dp, -] on (16, 6)")
    assert "exchange" in text
    assert text.splitlines()[-1].startswith("  in all: received 96 B, held ")
    view = plan_reshape(LINE.layout("dp", None), LINE.layout("dp"), (4, 6), (-1,))
    assert str(view).endswith("a view of the local tensor")
    assert (view.bytes_received(0), view.bytes_sent(0), view.seconds) == (0, 0, 0)


def test_wrong_shapes_are_refused() -> None:
    for shape, text in (
        ((5, 5), "24 elements"),
        ((-1, -1), "not all known"),
        ((-1, 0), "not all known"),
        ((-2,), "not"),
    ):
        with pytest.raises(ShapeError, match=text):
            full_shape(shape, 24)
    assert full_shape((4, -1), 24) == (4, 6)
    assert full_shape((0, 3), 0) == (0, 3)
    with pytest.raises(ShapeError, match=r"view to \(5,\): the tensor has 24 elements\. Give sizes"):
        plan_reshape(LINE.layout("dp", None), LINE.layout("dp"), (4, 6), (5,))
    with pytest.raises(LayoutError, match=r"the meshes .* differ"):
        plan_reshape(LINE.layout("dp", None), GRID.layout("dp"), (4, 6), (24,))
    with pytest.raises(LayoutError, match="max_bytes is 10"):
        plan_reshape(LINE.layout(None, "dp"), LINE.layout("dp", None), (12, 8), (16, 6), max_bytes=10)


def test_a_plan_is_made_once() -> None:
    args = (LINE.layout("dp", None), LINE.layout("dp"), (4, 6), (24,), 4)
    assert cached_reshape_plan(*args) is cached_reshape_plan(*args)


def test_every_pair_of_factorizations_of_a_small_number() -> None:
    """All shapes of 12 elements in up to three dims, all cuts by two axes: values equal numpy's."""
    mesh = DeviceMesh.grid(a=2, b=2)
    shapes = [s for n in (1, 2, 3) for s in itertools.product((1, 2, 3, 4, 6, 12), repeat=n) if math.prod(s) == 12]
    array = np.arange(12.0)
    world = VirtualWorld(mesh)
    for shape, new_shape in itertools.product(shapes, repeat=2):
        dims = [("a", "b"), *[None] * (len(shape) - 1)]
        for order in itertools.islice(itertools.permutations(dims), 0, None, 2):
            src = mesh.layout(*order)
            _, after = reshape_layouts(src, shape, new_shape)
            out = world.reshape(world.distribute(array.reshape(shape), src), src, after, shape, new_shape)
            np.testing.assert_array_equal(world.assemble(out, after, new_shape), array.reshape(new_shape))
