# SPDX-License-Identifier: Apache-2.0
"""Reductions over dims, and ops that need some dims whole."""

from __future__ import annotations

from collections.abc import Sequence

from hyper_parallel.core.placement_types import ReduceOp
from hyper_parallel.core.shard.factor_rule import (
    LINEAR,
    ONE,
    WHOLE,
    Factor,
    FactorRule,
    Kind,
)


def normal_dims(dims: int | Sequence[int] | None, ndim: int) -> tuple[int, ...]:
    """`dims` as non-negative ints; None or an empty list means all."""
    if dims is None:
        return tuple(range(ndim))
    listed = (dims,) if isinstance(dims, int) else tuple(dims)
    return tuple(sorted(d % max(ndim, 1) for d in listed)) if listed else tuple(range(ndim))


def _names(ndim: int) -> tuple[str, ...]:
    return tuple(f"d{i}" for i in range(ndim))


def reduction(ndim: int, dims: Sequence[int], keepdim: bool, op: ReduceOp = ReduceOp.SUM) -> FactorRule:
    """Reduce `dims`; a sharded one leaves the output pending."""
    names = _names(ndim)
    out = tuple(ONE if i in dims else name for i, name in enumerate(names) if keepdim or i not in dims)
    contracted = {names[d]: Factor(Kind.CONTRACT, op) for d in dims if ndim}
    if op.is_linear:
        return FactorRule((names,), (out,), contracted, ((0,),), LINEAR)
    return FactorRule((names,), (out,), contracted, None, frozenset((op,)))


def whole_reduction(ndim: int, dims: Sequence[int], keepdim: bool, num_outputs: int = 1) -> FactorRule:
    """Reduce `dims`, which must be whole (indices, variances, medians)."""
    names = _names(ndim)
    out = tuple(ONE if i in dims else name for i, name in enumerate(names) if keepdim or i not in dims)
    return FactorRule((names,), (out,) * num_outputs, {names[d]: WHOLE for d in dims if ndim})


def rowwise(ndims: Sequence[int], dims: Sequence[int], num_outputs: int = 1, *, linear: bool = False) -> FactorRule:
    """Operands of one number of dims, of which `dims` must be whole (softmax, sort, cumsum, cat, flip)."""
    names = _names(ndims[0])
    operands = (names,) * len(ndims)
    factors = {names[d]: WHOLE for d in dims}
    terms = tuple((i,) for i in range(len(ndims))) if linear else None
    return FactorRule(operands, (names,) * num_outputs, factors, terms, LINEAR if linear else frozenset())


def trailing(ndim: int, num_normalized: int, num_weights: int) -> FactorRule:
    """An operand whose last dims must be whole, and weights over just those (layer and RMS norm)."""
    names = _names(ndim)
    last = names[ndim - num_normalized :]
    return FactorRule((names, *((last,) * num_weights)), (names,), dict.fromkeys(last, WHOLE))
