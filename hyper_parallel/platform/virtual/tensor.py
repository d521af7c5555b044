# SPDX-License-Identifier: Apache-2.0
"""`TensorOps`, reductions and their inverse, on numpy arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias, assert_never

import numpy as np
import numpy.typing as npt

from hyper_parallel.core.box import Box
from hyper_parallel.core.placement_types import ReduceOp
from hyper_parallel.core.protocols import Summation

Array: TypeAlias = npt.NDArray[Any]


def part_of(x: Array, box: Box) -> Array:
    """A view of the part of `x` inside `box`, also of a 0-dim `x`."""
    index: Any = (*(slice(start, stop) for start, stop in box), ...)
    part: Array = x[index]
    return part


def reduce_arrays(
    parts: Sequence[Array], op: ReduceOp | str, divisor: int = 1, summation: Summation = Summation.FAST
) -> Array:
    """Combine equal-shaped arrays, result in their dtype; 16-bit ones are combined in float32."""
    dtype = parts[0].dtype
    stacked = np.stack(list(parts))
    wide = stacked.astype(np.float32) if dtype == np.float16 else stacked
    if summation is Summation.COMPENSATED and dtype.kind == "f":
        wide = stacked.astype(np.float64)
    match ReduceOp.of(op):
        case ReduceOp.SUM:
            out = wide.sum(0)
        case ReduceOp.AVG:
            out = wide.sum(0) / len(parts)
        case ReduceOp.PROD:
            out = wide.prod(0)
        case ReduceOp.MAX:
            out = wide.max(0)
        case ReduceOp.MIN:
            out = wide.min(0)
        case ReduceOp.ALL:
            out = wide.all(0)
        case ReduceOp.ANY:
            out = wide.any(0)
        case never:
            assert_never(never)
    return np.asarray(out if divisor == 1 else out / divisor, dtype=dtype)


def split_value(value: Array, op: ReduceOp, num: int, random: np.random.Generator) -> list[Array]:
    """`num` operands whose reduction by `op` is `value`: of mixed sign, and no two alike where the op allows it.

    Exact for integers up to a few thousands, also as floats.
    """
    shape, dtype = value.shape, value.dtype
    # Which operand carries what the others leave open, element by element.
    carrier = random.integers(0, num, shape)
    match op:
        case ReduceOp.SUM | ReduceOp.AVG:
            total = value * num if op is ReduceOp.AVG else value
            drawn = random.integers(-50, 50, (num, *shape)).astype(dtype)
            rest = total - np.where(carrier == np.arange(num).reshape(-1, *[1] * value.ndim), 0, drawn).sum(0)
            out = [np.where(carrier == i, rest, drawn[i]) for i in range(num)]
        case ReduceOp.PROD:
            signs = random.choice([-1, 1], (num, *shape)).astype(dtype)
            out = [np.where(carrier == i, value * signs.prod(0) * signs[i], signs[i]) for i in range(num)]
        case ReduceOp.MAX | ReduceOp.MIN:
            sign = -1 if op is ReduceOp.MAX else 1
            gaps = random.integers(0, 50, (num, *shape))
            out = [np.where(carrier == i, value, value + sign * gaps[i]) for i in range(num)]
        case ReduceOp.ALL | ReduceOp.ANY:
            neutral = op is ReduceOp.ALL
            noise = random.integers(0, 2, (num, *shape)).astype(np.bool_)
            out = [np.where((carrier == i) | (value == neutral), value, noise[i]) for i in range(num)]
        case never:
            assert_never(never)
    return [np.asarray(part, dtype) for part in out]


class VirtualOps:
    """`TensorOps` on numpy."""

    def reshape(self, x: Array, shape: Sequence[int]) -> Array:
        """Contiguous `x` with other sizes."""
        return x.reshape(tuple(shape), copy=False)

    def slice(self, x: Array, box: Box) -> Array:
        """A view of the part of `x` inside `box`."""
        return part_of(x, box)

    def empty(self, shape: Sequence[int], like: Array) -> Array:
        """An array of a value that no test uses, so that a hole shows."""
        return np.full(tuple(shape), True if like.dtype == np.bool_ else 113, like.dtype)

    def zeros(self, shape: Sequence[int], like: Array) -> Array:
        """An array of zeros."""
        return np.zeros(tuple(shape), like.dtype)

    def write(self, x: Array, box: Box, value: Array) -> None:
        """Copy `value`, which must have the shape of `box`, into the part of `x` inside it."""
        part = part_of(x, box)
        assert part.shape == value.shape, (part.shape, value.shape)
        part[...] = value

    def scale(self, x: Array, factor: float) -> Array:
        """`x * factor` in the dtype of `x`."""
        return np.asarray(x * factor, dtype=x.dtype)

    def contiguous(self, x: Array) -> Array:
        """`x` in row-major order."""
        return x if x.flags.c_contiguous else x.copy()

    def prefers_halves(self, like: Array, num_ranks: int) -> bool:
        """No: virtual ranks all-reduce in one go."""
        return False
