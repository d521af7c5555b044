# SPDX-License-Identifier: Apache-2.0
"""Floating point tensors of inputs and outputs in another dtype, wherever they are held."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
from torch.utils._pytree import tree_map


def cast_all(value: Any, dtype: torch.dtype) -> Any:
    """`value` with its floating point tensors cast: in lists, dicts, named tuples and dataclasses, which are copied."""
    return tree_map(lambda leaf: _cast(leaf, dtype), value)


def _cast(leaf: Any, dtype: torch.dtype) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.to(dtype) if leaf.is_floating_point() and leaf.dtype != dtype else leaf
    if isinstance(leaf, dict):
        out = copy.copy(leaf)
        for key, value in leaf.items():
            out[key] = cast_all(value, dtype)
        return out
    if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
        twin = copy.copy(leaf)
        for field in dataclasses.fields(leaf):
            # Also in frozen ones, and in fields that the constructor does not take.
            object.__setattr__(twin, field.name, cast_all(getattr(leaf, field.name), dtype))
        return twin
    return leaf
