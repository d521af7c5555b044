# SPDX-License-Identifier: Apache-2.0
"""Products of matrices: linear in each operand, the bias is a term of its own."""

from __future__ import annotations

from collections.abc import Sequence

from hyper_parallel.core.shard.factor_rule import FactorRule, parse_rule

Shape = Sequence[int]

LINEAR_LAYER = parse_rule("... i+, o i+, o -> ... o", terms="01 2")
OUTER = parse_rule("m, n -> m n", terms="01")
_ADDMM_0 = parse_rule(", m k+, k+ n -> m n", terms="0 12")
_ADDMM_1 = parse_rule("n, m k+, k+ n -> m n", terms="0 12")
_ADDMM_2 = parse_rule("m n, m k+, k+ n -> m n", terms="0 12")
_MATRIX_MATRIX = parse_rule("... m k+, ... k+ n -> ... m n", terms="01")
_VECTOR_MATRIX = parse_rule("k+, ... k+ n -> ... n", terms="01")
_MATRIX_VECTOR = parse_rule("... m k+, k+ -> ... m", terms="01")
_VECTOR_VECTOR = parse_rule("k+, k+ ->", terms="01")


def matmul(a: Shape, b: Shape) -> FactorRule:
    """`torch.matmul` of vectors, matrices and batches of them."""
    match len(a) > 1, len(b) > 1:
        case True, True:
            template = _MATRIX_MATRIX
        case False, True:
            template = _VECTOR_MATRIX
        case True, False:
            template = _MATRIX_VECTOR
        case _:
            template = _VECTOR_VECTOR
    return template.bind((a, b))


def addmm(bias: Shape, a: Shape, b: Shape) -> FactorRule:
    """`bias + a @ b`, the bias (m, n) or broadcast to it."""
    template = (_ADDMM_0, _ADDMM_1, _ADDMM_2)[len(bias)]
    return template.bind((bias, a, b))
