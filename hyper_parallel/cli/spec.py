# SPDX-License-Identifier: Apache-2.0
"""Meshes, shapes and layouts as text.

A layout is one entry per dim: an axis, several in brackets (outermost first), or `-`; sizes of an axis's own follow a
colon. Pending reductions stand behind. The form that layouts print in is read too:

    dp,tp            (tp,dp),-            dp:3/5/0/8,-            -,tp sum(dp)            [dp, -] avg(tp)
"""

from __future__ import annotations

import re

from hyper_parallel.core.device_mesh import DeviceMesh
from hyper_parallel.core.errors import LayoutError, MeshError, ShapeError
from hyper_parallel.core.layout import Layout

_DIM = r"(?:\([^()]*\)|[^(),\s]+)"
_LAYOUT = re.compile(rf"(?P<dims>{_DIM}(?:\s*,\s*{_DIM})*)?(?P<pending>(?:\s*\b\w+\([^()]*\))*)")
_PENDING = re.compile(r"(\w+)\(([^()]*)\)")


def parse_mesh(text: str) -> DeviceMesh:
    """`dp=2,tp=4` -> a mesh over ranks 0 to 7.

    Raises:
        MeshError: something else than names and sizes.
    """
    axes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.partition("=")
        name = name.strip()
        if not name or name in axes or not size.strip().isdecimal() or int(size) == 0:
            raise MeshError(f"mesh {text!r}: {part.strip()!r} is not a new axis and its size. Write it as dp=2,tp=4.")
        axes[name] = int(size)
    return DeviceMesh.grid("cpu", **axes)


def parse_shape(text: str) -> tuple[int, ...]:
    """`4096,1024` -> sizes; nothing for a tensor without dims.

    Raises:
        ShapeError: something else than sizes.
    """
    parts = [part.strip() for part in text.replace("x", ",").split(",")] if text.strip() else []
    if not all(part.isdecimal() for part in parts):
        raise ShapeError(f"shape {text!r}: it is not a list of sizes. Write it as 4096,1024.")
    return tuple(map(int, parts))


def parse_layout(mesh: DeviceMesh, text: str) -> Layout:
    """A layout on `mesh`. See the module's docstring for the form.

    Raises:
        LayoutError: another form.
        MeshError: unknown axis.
        PartialError: unknown reduction.
    """
    inner = re.sub(r"\[([^\[\]]*)\]", r"\1", text, count=1).strip()
    found = _LAYOUT.fullmatch(inner)
    if found is None:
        raise LayoutError(f"layout {text!r}: it cannot be read. Write one axis, (axis, axis) or - per dim, as dp,-.")
    dims: list[tuple[str, ...]] = []
    ragged: dict[str, tuple[int, ...]] = {}
    for entry in re.findall(_DIM, found["dims"] or ""):
        axes = [] if entry == "-" else [axis.strip() for axis in entry.strip("()").split(",") if axis.strip()]
        dims.append(tuple(_take_sizes(axis, ragged, text) for axis in axes))
    pending = {
        axis.strip(): op for op, axes_text in _PENDING.findall(found["pending"]) for axis in axes_text.split(",")
    }
    return Layout(mesh, dims, partial=pending, ragged=ragged)


def _take_sizes(text: str, ragged: dict[str, tuple[int, ...]], whole: str) -> str:
    axis, colon, sizes = text.partition(":")
    if colon:
        if not re.fullmatch(r"\d+(/\d+)*", sizes):
            raise LayoutError(f"layout {whole!r}: {sizes!r} are not sizes of {axis!r}. Write them as {axis}:3/5.")
        ragged[axis] = tuple(map(int, sizes.split("/")))
    return axis


def parse_move(mesh: DeviceMesh, text: str) -> tuple[Layout, Layout]:
    """`dp,tp -> tp,dp` -> two layouts.

    Raises:
        LayoutError: not two layouts with an arrow between them.
    """
    parts = text.split("->")
    if len(parts) != 2:
        raise LayoutError(f"move {text!r}: it has no arrow between two layouts. Write it as dp,- -> -,dp.")
    return parse_layout(mesh, parts[0]), parse_layout(mesh, parts[1])
