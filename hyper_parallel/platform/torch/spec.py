# SPDX-License-Identifier: Apache-2.0
"""Spec: a layout and a global shape as one interned object, and what of a full tensor it gives this rank."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from hyper_parallel.core.errors import PartialError
from hyper_parallel.core.layout import Layout
from hyper_parallel.core.placement_types import ReduceOp


class Spec:
    """Layout and global shape together, interned: what op resolution is keyed by."""

    __slots__ = ("__weakref__", "layout", "local_shape", "shape")

    def __init__(self, layout: Layout, shape: torch.Size) -> None:
        self.layout = layout
        self.shape = shape
        mesh = layout.mesh
        rank = mesh.get_rank()
        on_mesh = mesh.coord_of(rank) is not None
        self.local_shape = layout.local_shape(shape, rank) if on_mesh else (0,) * max(len(shape), 1)


_specs: weakref.WeakValueDictionary[Any, Spec] = weakref.WeakValueDictionary()


def spec_of(layout: Layout, shape: Sequence[int]) -> Spec:
    """The one `Spec` of this layout and global shape."""
    key = (layout, tuple(shape))
    found = _specs.get(key)
    if found is None:
        found = _specs.setdefault(key, Spec(layout, torch.Size(shape)))
    return found


def check_pending(layout: Layout, dtype: torch.dtype, what: str) -> None:
    """Refuse pending reductions that have no meaning for a dtype.

    Raises:
        PartialError: `sum`, `avg`, `prod` of bool, `avg` of integers, `all` or `any` of anything but bool, `max` or
            `min` of complex numbers.
    """
    for axis, op in layout.partial:
        if _has_meaning(op, dtype):
            continue
        raise PartialError(
            f"{what} with {op.value} pending over {axis!r}: that has no meaning for {dtype}. "
            f"Use {'all or any' if dtype == torch.bool else 'sum'}, or cast first."
        )


def _has_meaning(op: ReduceOp, dtype: torch.dtype) -> bool:
    match op:
        case ReduceOp.ALL | ReduceOp.ANY:
            return dtype == torch.bool
        case ReduceOp.MAX | ReduceOp.MIN:
            return not dtype.is_complex
        case ReduceOp.AVG:
            return dtype.is_floating_point or dtype.is_complex
        case _:
            return dtype != torch.bool


def piece(full: torch.Tensor, spec: Spec) -> torch.Tensor:
    """A copy of this rank's part of a full tensor, in storage of its own."""
    box = spec.layout.box(spec.shape, spec.layout.mesh.get_rank())
    for dim, (start, stop) in enumerate(box):
        full = full.narrow(dim, start, stop - start)
    return full.detach().clone(memory_format=torch.contiguous_format)
