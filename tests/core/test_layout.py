# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import copy
import gc
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyper_parallel.core.device_mesh import DeviceMesh
from hyper_parallel.core.errors import LayoutError, MeshError, PartialError, UnevenError
from hyper_parallel.core.layout import Layout, as_layout
from hyper_parallel.core.placement_types import (
    Partial,
    Placement,
    RaggedShard,
    ReduceOp,
    Replicate,
    Shard,
)
from hyper_parallel.testing.strategies import layouts, meshes, shapes

MESH = DeviceMesh.grid(dp=2, tp=2)


@st.composite
def some_layouts(draw: st.DrawFn) -> Layout:
    return draw(layouts(draw(meshes()), draw(shapes())))


@given(some_layouts())
def test_layouts_are_values(layout: Layout) -> None:
    assert eval(repr(layout)) is layout
    assert copy.deepcopy(layout) is layout
    assert copy.copy(layout) is layout
    assert pickle.loads(pickle.dumps(layout)) is layout
    rebuilt = Layout(layout.mesh, layout.dims, partial=layout.partial, ragged=layout.ragged)
    assert rebuilt is layout
    assert hash(rebuilt) == hash(layout)
    assert len({rebuilt, layout}) == 1
    assert "\n" not in repr(layout)


def test_equal_meshes_give_one_layout() -> None:
    other = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
    assert other is not MESH
    assert other.layout("dp", None) is MESH.layout("dp", None)


def test_layouts_differ_by_every_part() -> None:
    found = [
        MESH.layout("dp", None),
        MESH.layout(None, "dp"),
        MESH.layout("tp", None),
        MESH.layout(("dp", "tp"), None),
        MESH.layout(("tp", "dp"), None),
        MESH.layout("dp", None, partial={"tp": "sum"}),
        MESH.layout("dp", None, partial={"tp": "avg"}),
        MESH.layout("dp", None, ragged={"dp": (1, 3)}),
        MESH.layout("dp", None, ragged={"dp": (3, 1)}),
        MESH.layout("dp"),
        DeviceMesh.grid("cuda", dp=2, tp=2).layout("dp", None),
    ]
    assert len(set(found)) == len(found)
    assert all(a != b for i, a in enumerate(found) for b in found[:i])


def test_spellings_of_one_layout() -> None:
    a = MESH.layout("dp", ())
    assert a is MESH.layout(("dp",), None)
    assert a is MESH.layout(["dp"], [])
    b = MESH.layout(None, partial={"tp": "sum", "dp": "sum"})
    assert b is MESH.layout(None, partial=[("dp", ReduceOp.SUM), ("tp", ReduceOp.SUM)])


def test_layouts_never_change() -> None:
    layout = MESH.layout("dp", None)
    before = repr(layout)
    for name in ("mesh", "dims", "partial", "ragged", "splits", "is_replicated", "_hash", "other"):
        with pytest.raises(AttributeError, match="never changes"):
            setattr(layout, name, ())
        with pytest.raises(AttributeError, match="never changes"):
            delattr(layout, name)
    assert repr(layout) == before
    for part in (layout.dims, layout.partial, layout.ragged, layout.splits):
        assert isinstance(part, tuple)


def test_interning_keeps_nothing_alive() -> None:
    from hyper_parallel.core import layout as module

    gc.collect()
    before = len(module._interned)
    made = [MESH.layout("dp", None, ragged={"dp": (i, 1000)}) for i in range(50)]
    assert len(module._interned) == before + 50
    del made
    gc.collect()
    assert len(module._interned) == before


def test_one_line() -> None:
    layout = DeviceMesh.grid(dp=2, tp=2, ep=2).layout("dp", None, ("tp",), partial={"ep": "sum"}, ragged={"dp": (1, 2)})
    assert str(layout) == "[dp~, -, tp] sum(ep)"
    assert str(MESH.layout(("tp", "dp"))) == "[(tp, dp)]"
    assert str(MESH.layout()) == "[]"


def test_questions() -> None:
    layout = MESH.layout(None, "tp", partial={"dp": "max"})
    assert layout.ndim == 2
    assert layout.sharded_axes == ("tp",)
    assert layout.partial_axes == ("dp",)
    assert (layout.dim_of("tp"), layout.dim_of("dp")) == (1, None)
    assert (layout.op_of("dp"), layout.op_of("tp")) == (ReduceOp.MAX, None)
    assert not layout.is_replicated
    assert MESH.layout(None, None).is_replicated
    assert layout.cotangent is MESH.layout(None, "tp")
    assert MESH.layout("dp").cotangent is MESH.layout("dp")


def test_change_is_a_new_value() -> None:
    layout = MESH.layout("dp", None, partial={"tp": "sum"}, ragged={"dp": (1, 2)})
    assert layout.with_dim(0, None) is MESH.layout(None, None, partial={"tp": "sum"})
    assert MESH.layout(None, "tp").with_dim(0, "dp", {"dp": (2, 2)}) is MESH.layout("dp", "tp", ragged={"dp": (2, 2)})
    assert layout.without_partial() is MESH.layout("dp", None, ragged={"dp": (1, 2)})
    assert layout.without_partial("dp") is layout
    assert MESH.layout("dp", None).with_partial("tp", op="avg") is MESH.layout("dp", None, partial={"tp": "avg"})
    assert layout is MESH.layout("dp", None, partial={"tp": "sum"}, ragged={"dp": (1, 2)})


# -- geometry -----------------------------------------------------------------------------------------


def test_local_shapes() -> None:
    layout = MESH.layout(("tp", "dp"), None)
    assert layout.local_shape((5, 3), 0) == (2, 3)
    assert [layout.box((5, 3), rank) for rank in range(4)] == [
        ((0, 2), (0, 3)),
        ((3, 4), (0, 3)),
        ((2, 3), (0, 3)),
        ((4, 5), (0, 3)),
    ]


@pytest.mark.parametrize("size", range(1, 10))
@pytest.mark.parametrize("sizes", [(2, 2), (2, 4), (3, 2), (4, 2)])
def test_data_parallel_inside_tensor_parallel_is_nested_chunking(size: int, sizes: tuple[int, int]) -> None:
    # D12, D13: what TP then FSDP really hold, for all sizes, uneven and empty pieces among them.
    torch = pytest.importorskip("torch")
    mesh = DeviceMesh.grid(dp=sizes[0], tp=sizes[1])
    layout = mesh.layout(("tp", "dp"))
    rows = torch.arange(size)
    seen: list[int] = []
    for tp in range(sizes[1]):
        outer = dict(enumerate(rows.chunk(sizes[1]))).get(tp, rows[:0])
        inner = dict(enumerate(outer.chunk(sizes[0])))
        for dp in range(sizes[0]):
            expected = inner.get(dp, rows[:0]).tolist()
            ((start, stop),) = layout.box((size,), mesh.rank_at((dp, tp)))
            assert list(range(start, stop)) == expected
            seen += expected
    assert seen == list(range(size))


def test_ragged_sizes_are_taken() -> None:
    mesh = DeviceMesh.grid(dp=4)
    layout = mesh.layout("dp", ragged={"dp": (2, 3, 0, 5)})
    layout.check_shape((10,))
    assert [layout.box((10,), rank) for rank in range(4)] == [((0, 2),), ((2, 5),), ((10, 10),), ((5, 10),)]


def test_ragged_sizes_under_an_outer_cut() -> None:
    layout = MESH.layout(("tp", "dp"), ragged={"dp": (2, 1)})
    layout.check_shape((5,))  # tp gives 3 and 2
    assert [layout.local_shape((5,), rank) for rank in range(4)] == [(2,), (2,), (1,), (0,)]


# -- placements ---------------------------------------------------------------------------------------


@given(st.data())
def test_placements_round_trip(data: st.DataObject) -> None:
    mesh = data.draw(meshes())
    dims = st.integers(0, 1)
    placements: list[Placement] = data.draw(
        st.lists(
            st.one_of(st.builds(Shard, dims), st.just(Replicate()), st.just(Partial("max"))),
            min_size=mesh.ndim,
            max_size=mesh.ndim,
        )
    )
    layout = Layout.from_placements(mesh, placements, 2)
    assert list(layout.placements) == placements
    assert Layout.from_placements(mesh, layout.placements, 2) is layout


def test_ragged_placements_round_trip() -> None:
    placements = (RaggedShard(1, (2, 3)), Shard(0))
    layout = Layout.from_placements(MESH, placements, 2)
    assert layout.placements == placements
    assert layout is MESH.layout("tp", "dp", ragged={"dp": (2, 3)})


def test_negative_dims() -> None:
    assert Layout.from_placements(MESH, [Shard(-1), Replicate()], 2) is MESH.layout(None, "dp")


def test_torch_placements_round_trip() -> None:
    theirs = pytest.importorskip("torch.distributed.tensor")
    placements = [theirs.Shard(1), theirs.Partial("avg")]
    layout = Layout.from_placements(MESH, placements, 2)
    assert layout is MESH.layout(None, "dp", partial={"tp": "avg"})
    assert as_layout(placements, MESH, 2) is layout


def test_as_layout() -> None:
    layout = MESH.layout("dp", None)
    assert as_layout(layout, None, 2) is layout
    assert as_layout(None, MESH, 2) is MESH.layout(None, None)
    assert as_layout(Shard(0), DeviceMesh.grid(dp=2), 1) is DeviceMesh.grid(dp=2).layout("dp")


# -- messages -----------------------------------------------------------------------------------------


def shape_check(layout: Layout, *shape: int) -> Any:
    return lambda: layout.check_shape(shape, "call")


@pytest.mark.parametrize(
    ("call", "error", "who", "what", "way_out"),
    [
        (lambda: MESH.layout("ep"), MeshError, "mesh (dp=2, tp=2)", "no axis 'ep'", "Use one of 'dp', 'tp'"),
        (lambda: MESH.layout("dp", "dp"), LayoutError, "layout", "'dp' is used twice", "Let each axis"),
        (
            lambda: MESH.layout("dp", partial={"dp": "sum"}),
            LayoutError,
            "layout",
            "'dp' is used twice",
            "Let each axis",
        ),
        (
            lambda: MESH.layout(None, partial={"dp": "sum", "tp": "max"}),
            PartialError,
            "layout",
            "sum(dp), max(tp) do not commute",
            "Finish one",
        ),
        (
            lambda: MESH.layout("dp", ragged={"dp": (1, 2, 3)}),
            LayoutError,
            "layout",
            "(1, 2, 3) for axis 'dp', which has 2 ranks",
            "Give one size",
        ),
        (lambda: MESH.layout(None, ragged={"dp": (1, 2)}), LayoutError, "layout", "'dp'", "Give one size"),
        (shape_check(MESH.layout("dp"), 2, 3), LayoutError, "call of shape (2, 3)", "1 dims", "one entry per dim"),
        (
            shape_check(MESH.layout("dp", ragged={"dp": (1, 2)}), 4),
            UnevenError,
            "call of shape (4,)",
            "add up to 3, dim 0 has 4",
            "Give sizes",
        ),
        (
            lambda: Layout.from_placements(MESH, [Shard(0)], 1),
            LayoutError,
            "placements",
            "1 for the 2 axes",
            "Give one per mesh axis",
        ),
        (
            lambda: Layout.from_placements(MESH, [Shard(2), Replicate()], 2),
            LayoutError,
            "Shard(dim=2) over axis 'dp'",
            "2 dims",
            "Shard a dim that it has",
        ),
        (
            lambda: MESH.layout(("tp", "dp")).placements,
            LayoutError,
            "placements of [(tp, dp)]",
            "against the order",
            "Read layout.dims",
        ),
        (lambda: as_layout(MESH.layout("dp"), None, 2), LayoutError, "layout", "1 dims, the tensor 2", "one entry"),
    ],
)
def test_messages(call: Any, error: type[Exception], who: str, what: str, way_out: str) -> None:
    with pytest.raises(error) as caught:
        call()
    text = str(caught.value)
    assert who in text
    assert what in text
    assert way_out in text
    assert "\n" not in text
