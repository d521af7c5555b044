# SPDX-License-Identifier: Apache-2.0
"""`TensorOps` and reductions on numpy arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Bounds = tuple[tuple[int, int], ...]


def _index(box: Bounds) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)


def reduce_arrays(parts: Sequence[Array], op: str) -> Array:
    """Combine equal-shaped arrays; sums of fewer than 32 bits are accumulated in float32."""
    stacked = np.stack(list(parts))
    narrow = stacked.dtype == np.float16
    wide = stacked.astype(np.float32) if narrow else stacked
    match op:
        case "sum":
            out = wide.sum(0, dtype=wide.dtype)
        case "avg":
            out = wide.sum(0, dtype=wide.dtype) / len(stacked)
        case "prod":
            out = wide.prod(0, dtype=wide.dtype)
        case "max":
            out = wide.max(0)
        case "min":
            out = wide.min(0)
        case "all":
            out = wide.all(0)
        case "any":
            out = wide.any(0)
        case _:
            raise AssertionError(op)
    return np.asarray(out, dtype=stacked.dtype)


class VirtualOps:
    """`TensorOps` on numpy."""

    def reshape(self, x: Array, shape: Sequence[int]) -> Array:
        """Contiguous `x` with other sizes."""
        return x.reshape(tuple(shape))

    def slice(self, x: Array, box: Bounds) -> Array:
        """A view of the part of `x` inside `box`."""
        return x[_index(box)]

    def empty(self, shape: Sequence[int], like: Array) -> Array:
        """An array filled with a value that no test expects, so that a hole shows."""
        fill = True if like.dtype == np.bool_ else 113
        return np.full(tuple(shape), fill, like.dtype)

    def zeros(self, shape: Sequence[int], like: Array) -> Array:
        """An array of zeros."""
        return np.zeros(tuple(shape), like.dtype)

    def write(self, x: Array, box: Bounds, value: Array) -> None:
        """Copy `value` into the part of `x` inside `box`."""
        x[_index(box)] = value

    def scale(self, x: Array, factor: float) -> Array:
        """`x * factor` in the dtype of `x`."""
        return (x * factor).astype(x.dtype)

    def reduce(self, parts: Sequence[Array], op: str) -> Array:
        """Combine equal-shaped arrays."""
        return reduce_arrays(parts, op)

    def contiguous(self, x: Array) -> Array:
        """`x` in row-major order."""
        return np.ascontiguousarray(x).reshape(x.shape)
