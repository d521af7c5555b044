# SPDX-License-Identifier: Apache-2.0
"""Elementwise ops: one rule, with broadcasting, in four strengths of linearity."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from hyper_parallel.core.placement_types import ReduceOp
from hyper_parallel.core.shard.factor_rule import LINEAR, FactorRule, with_broadcast

Shape = Sequence[int]


class Linearity(Enum):
    """How an elementwise op depends on its tensor operands."""

    NONE = "none"
    SUM = "sum"
    """Adds its operands (each scaled by constants): a pending sum may stay if all operands take part in it."""
    PRODUCT = "product"
    """Multiplies them: a pending sum may stay if exactly one operand has it."""
    AFFINE = "affine"
    """Adds a constant: a pending average may stay, a pending sum would add it once per rank."""


def pointwise(shapes: Sequence[Shape], linearity: Linearity = Linearity.NONE) -> FactorRule:
    """Dims aligned from the right, sizes of 1 broadcast."""
    ndim = max(len(shape) for shape in shapes)
    names = tuple(f".{i}" for i in range(ndim, 0, -1))
    operands = tuple(names[ndim - len(shape) :] for shape in shapes)
    indices = range(len(shapes))
    match linearity:
        case Linearity.NONE:
            rule = FactorRule(operands, (names,))
        case Linearity.SUM:
            rule = FactorRule(operands, (names,), {}, tuple((i,) for i in indices), LINEAR)
        case Linearity.PRODUCT:
            rule = FactorRule(operands, (names,), {}, (tuple(indices),), LINEAR)
        case Linearity.AFFINE:
            rule = FactorRule(operands, (names,), {}, None, frozenset((ReduceOp.AVG,)))
    return with_broadcast(rule, shapes)
