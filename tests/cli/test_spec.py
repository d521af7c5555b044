# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyper_parallel.cli.spec import parse_layout, parse_mesh, parse_move, parse_shape
from hyper_parallel.core.device_mesh import DeviceMesh
from hyper_parallel.core.errors import HyperParallelError, LayoutError, MeshError, PartialError, ShapeError
from hyper_parallel.testing.strategies import layout_pairs

MESH = DeviceMesh.grid(dp=2, tp=4, cp=2)


def test_meshes() -> None:
    assert parse_mesh("dp=2,tp=4,cp=2") == MESH
    assert parse_mesh(" dp = 2 , tp = 4 ") == DeviceMesh.grid(dp=2, tp=4)


@pytest.mark.parametrize("text", ["", "dp", "dp=", "dp=0", "dp=-1", "=2", "dp=2,dp=2", "dp=2,", "dp=x"])
def test_other_meshes_are_refused(text: str) -> None:
    with pytest.raises(MeshError) as caught:
        parse_mesh(text)
    for fragment in (f"mesh {text!r}", "is not a new axis and its size", "Write it as dp=2,tp=4"):
        assert fragment in str(caught.value)


@pytest.mark.parametrize(("text", "shape"), [("4096,12", (4096, 12)), ("4096x12", (4096, 12)), ("", ()), (" 0 ", (0,))])
def test_shapes(text: str, shape: tuple[int, ...]) -> None:
    assert parse_shape(text) == shape


@pytest.mark.parametrize("text", ["a", "4,", "-1", "4.5", "4 5"])
def test_other_shapes_are_refused(text: str) -> None:
    with pytest.raises(ShapeError, match=r"it is not a list of sizes\. Write it as 4096,1024"):
        parse_shape(text)


@pytest.mark.parametrize(
    ("text", "dims", "options"),
    [
        ("dp,tp", ("dp", "tp"), {}),
        ("-,dp", (None, "dp"), {}),
        ("(tp,dp),-", (("tp", "dp"), None), {}),
        ("( tp , dp ) , -", (("tp", "dp"), None), {}),
        ("[(tp, dp), -]", (("tp", "dp"), None), {}),
        ("- sum(dp)", (None,), {"partial": {"dp": "sum"}}),
        ("-,tp max(dp) max(cp)", (None, "tp"), {"partial": {"dp": "max", "cp": "max"}}),
        ("[-, tp] avg(dp,cp)", (None, "tp"), {"partial": {"dp": "avg", "cp": "avg"}}),
        ("dp:3/5,-", ("dp", None), {"ragged": {"dp": (3, 5)}}),
        ("(dp:3/5,cp)", (("dp", "cp"),), {"ragged": {"dp": (3, 5)}}),
        ("", (), {}),
        ("[]", (), {}),
        ("[] sum(dp)", (), {"partial": {"dp": "sum"}}),
    ],
)
def test_layouts(text: str, dims: Any, options: Any) -> None:
    assert parse_layout(MESH, text) is MESH.layout(*dims, **options)


@given(layout_pairs(ragged=False))
def test_layouts_are_read_as_they_print(pair: Any) -> None:
    mesh = DeviceMesh.grid(**dict(zip(pair.src.mesh.axis_names, pair.src.mesh.shape, strict=True)))
    for layout in (pair.src, pair.dst):
        read = parse_layout(mesh, str(layout))
        assert (read.dims, read.partial) == (layout.dims, layout.partial)
    assert tuple(map(str, parse_move(mesh, f"{pair.src} -> {pair.dst}"))) == (str(pair.src), str(pair.dst))


@pytest.mark.parametrize(
    ("text", "error", "fragment"),
    [
        ("dp,,tp", LayoutError, "cannot be read. Write one axis"),
        ("(dp", LayoutError, "cannot be read. Write one axis"),
        ("((dp))", LayoutError, "cannot be read. Write one axis"),
        ("dp:3/x", LayoutError, "'3/x' are not sizes of 'dp'. Write them as dp:3/5"),
        ("ep", MeshError, "no axis 'ep'. Use one of"),
        ("- mean(dp)", PartialError, "no such reduction. Use one of"),
        ("dp,dp", LayoutError, "used twice. Let each axis"),
    ],
)
def test_other_layouts_are_refused(text: str, error: type[Exception], fragment: str) -> None:
    with pytest.raises(error) as caught:
        parse_layout(MESH, text)
    assert fragment in str(caught.value)


@pytest.mark.parametrize("text", ["dp", "dp -> tp -> cp", "dp > tp"])
def test_a_move_has_one_arrow(text: str) -> None:
    with pytest.raises(LayoutError, match=r"no arrow between two layouts\. Write it as"):
        parse_move(MESH, text)


@given(st.text("dpt,()-[] sum", max_size=14))
def test_any_text_is_read_or_refused_in_one_line(text: str) -> None:
    mesh = DeviceMesh.grid(dp=2, tp=2)
    said = ""
    try:
        parsed = parse_layout(mesh, text)
    except HyperParallelError as error:
        said = str(error)
    else:
        assert parse_layout(mesh, str(parsed)).dims == parsed.dims
    assert len(said.splitlines()) <= 1
