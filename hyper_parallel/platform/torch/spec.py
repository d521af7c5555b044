# SPDX-License-Identifier: Apache-2.0
"""Spec: a layout and a global shape as one interned object, and what of a full tensor it gives this rank."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from hyper_parallel.core.layout import Layout


class Spec:
    """Layout and global shape together, interned: what op resolution is keyed by."""

    __slots__ = ("__weakref__", "layout", "local_shape", "shape")

    def __init__(self, layout: Layout, shape: torch.Size) -> None:
        self.layout = layout
        self.shape = shape
        mesh = layout.mesh
        rank = mesh.get_rank()
        on_mesh = mesh.coord_of(rank) is not None
        self.local_shape = layout.local_shape(shape, rank) if on_mesh else None


_specs: weakref.WeakValueDictionary[Any, Spec] = weakref.WeakValueDictionary()


def spec_of(layout: Layout, shape: Sequence[int]) -> Spec:
    """The one `Spec` of this layout and global shape."""
    key = (layout, tuple(shape))
    found = _specs.get(key)
    if found is None:
        found = _specs.setdefault(key, Spec(layout, torch.Size(shape)))
    return found


def piece(full: torch.Tensor, spec: Spec) -> torch.Tensor:
    """A copy of this rank's part of a full tensor, in storage of its own."""
    box = spec.layout.box(spec.shape, spec.layout.mesh.get_rank())
    for dim, (start, stop) in enumerate(box):
        full = full.narrow(dim, start, stop - start)
    return full.detach().clone(memory_format=torch.contiguous_format)
