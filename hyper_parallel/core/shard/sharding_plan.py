# SPDX-License-Identifier: Apache-2.0
"""ShardingPlan: names of parameters and modules -> how they lie. A value; applying it is `shard_module`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from types import EllipsisType
from typing import Any, TypeAlias

from hyper_parallel.core.device_mesh import DeviceMesh
from hyper_parallel.core.errors import LayoutError, MeshError
from hyper_parallel.core.layout import Layout, as_layout

DimsSpec: TypeAlias = "Sequence[str | Sequence[str] | EllipsisType | None] | Layout"
"""Per dim an axis, several, or None; `...` stands for as many None as fit."""


@dataclass(frozen=True, slots=True)
class Style:
    """How one kind of module is split.

    Attributes:
        parameters: Name inside the module -> how it lies. Parameters not named stay whole on all ranks.
        inputs: How the first tensor argument shall lie (a list: one entry per argument; a mapping: by keyword), or
            None to leave it.
        outputs: How the first output shall lie (a list: one entry per output; a mapping: by key), or None to leave it.
    """

    parameters: Mapping[str, DimsSpec] = field(default_factory=dict)
    inputs: Any = None
    outputs: Any = None


def column_parallel(axis: str = "tp", *, inputs: Any = None, outputs: Any = None) -> Style:
    """A Linear whose output features are split over `axis`; no communication in forward, one reduction in backward."""
    return Style({"weight": (axis, None), "bias": (axis,)}, inputs, outputs)


def row_parallel(axis: str = "tp", *, inputs: Any = None, outputs: Any = (...,)) -> Style:
    """A Linear whose input features are split over `axis`; its pending sums are finished into `outputs`.

    By default that is copies; with `outputs` split along the sequence the reduction is a reduce-scatter.
    """
    return Style({"weight": (None, axis), "bias": (None,)}, inputs, outputs)


def sequence_parallel(axis: str = "tp", *, dim: int = 1, ndim: int = 3) -> Style:
    """A module (a norm, dropout) that works on a part of the sequence, with whole weights and summed gradients."""
    spec = tuple(axis if i == dim else None for i in range(ndim))
    return Style({}, spec, spec)


def vocabulary_parallel(axis: str = "tp", *, outputs: Any = (...,)) -> Style:
    """An Embedding whose rows are split over `axis`; pending sums are finished into `outputs` (default: copies)."""
    return Style({"weight": (axis, None)}, None, outputs)


@dataclass(frozen=True, slots=True)
class ShardingPlan:
    """How a model is split over a mesh.

    Keys are names as in `named_parameters` and `named_modules`, or patterns with `*` and `?`; the first match in the
    order written counts. Everything not named stays whole on all ranks.

    Attributes:
        modules: Module name -> style.
        parameters: Parameter name -> how it lies; goes before the styles.
        inputs: Module name -> how its inputs shall lie; goes before the styles.
        outputs: Module name -> how its outputs shall lie; goes before the styles.

    Example:
        >>> plan = ShardingPlan(modules={"*.up": column_parallel("tp"), "*.down": row_parallel("tp")})
        >>> plan.style_of("layers.0.up").parameters["weight"]
        ('tp', None)
    """

    modules: Mapping[str, Style] = field(default_factory=dict)
    parameters: Mapping[str, DimsSpec] = field(default_factory=dict)
    inputs: Mapping[str, Any] = field(default_factory=dict)
    outputs: Mapping[str, Any] = field(default_factory=dict)

    def style_of(self, module: str) -> Style:
        """What this plan says of a module."""
        style = _first(self.modules, module) or Style()
        return Style(
            style.parameters,
            style.inputs if (found := _first(self.inputs, module)) is None else found,
            style.outputs if (found := _first(self.outputs, module)) is None else found,
        )

    def parameter_spec(self, module: str, name: str) -> DimsSpec | None:
        """How the parameter `name` of `module` lies, or None: whole on all ranks."""
        full = f"{module}.{name}" if module else name
        found = _first(self.parameters, full)
        return self.style_of(module).parameters.get(name) if found is None else found

    def unmatched(self, modules: Sequence[str], parameters: Sequence[str]) -> list[str]:
        """Keys that match nothing: most likely misspelt."""
        keys = [(k, modules) for k in (*self.modules, *self.inputs, *self.outputs)]
        keys += [(k, parameters) for k in self.parameters]
        return [key for key, names in keys if not any(fnmatchcase(name, key) for name in names)]

    def misspelt(self, parameters: Mapping[str, Collection[str]]) -> list[str]:
        """Names in styles that no module of the style has, as `module.name`; `bias` may be missing.

        Args:
            parameters: Module name -> names of its own parameters.
        """
        out = []
        for pattern, style in self.modules.items():
            held = [names for module, names in parameters.items() if fnmatchcase(module, pattern)]
            unknown = (key for key in style.parameters if not any(key in names for names in held))
            out += [f"{pattern}.{key}" for key in unknown if held and key != "bias"]
        return out


def layout_for(spec: Any, mesh: DeviceMesh, ndim: int, what: str) -> Layout:
    """The layout that an entry of a plan means for a tensor of `ndim` dims.

    Raises:
        LayoutError: another number of dims.
        MeshError: an axis that the mesh lacks.
    """
    if isinstance(spec, Layout) or spec is None:
        return as_layout(spec, mesh, ndim, what)
    dims = list(spec)
    if Ellipsis in dims:
        at = dims.index(Ellipsis)
        dims[at : at + 1] = [None] * (ndim - len(dims) + 1)
    if len(dims) != ndim:
        raise LayoutError(
            f"{what}: the plan gives {len(dims)} dims {tuple(spec)}, the tensor has {ndim}. Give one entry per dim, "
            "or '...'."
        )
    for dim in dims:
        for axis in (dim,) if isinstance(dim, str) else dim or ():
            if axis not in mesh.axis_names:
                names = ", ".join(f'"{name}"' for name in mesh.axis_names)
                raise MeshError(f'{what}: the plan names axis "{axis}", mesh {mesh} has no such axis. Use {names}.')
    return Layout(mesh, dims)


def _first(table: Mapping[str, Any], name: str) -> Any:
    return next((value for pattern, value in table.items() if fnmatchcase(name, pattern)), None)
