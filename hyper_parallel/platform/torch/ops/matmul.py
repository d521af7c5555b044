# SPDX-License-Identifier: Apache-2.0
"""Matrix products."""

from __future__ import annotations

from typing import Any

from hyper_parallel.core.errors import NoRuleError
from hyper_parallel.core.placement_types import ReduceOp
from hyper_parallel.core.shard.factor_rule import LINEAR as LINEAR_OPS
from hyper_parallel.core.shard.factor_rule import Factor, FactorRule, Kind, with_broadcast
from hyper_parallel.core.shard.rules import matmul as rules
from hyper_parallel.platform.torch.dispatch import Rule, sharded


@sharded("linear")
def linear(input: Any, weight: Any, bias: Any = None) -> Rule:
    """`input @ weight.T + bias`."""
    shapes = [x.shape for x in (input, weight, bias) if x is not None]
    return Rule(rules.LINEAR_LAYER.bind(shapes))


@sharded("matmul mm bmm mv dot __matmul__ __rmatmul__")
def matmul(input: Any, other: Any) -> Rule:
    """Products of vectors, matrices and batches."""
    return Rule(rules.matmul(input.shape, other.shape))


@sharded("addmm", values=False)
def addmm(input: Any, mat1: Any, mat2: Any, *, beta: float = 1, alpha: float = 1) -> Rule:
    """`beta * input + alpha * mat1 @ mat2`."""
    return Rule(rules.addmm(input.shape, mat1.shape, mat2.shape))


@sharded("outer ger")
def outer(input: Any, vec2: Any) -> Rule:
    """Product of two vectors."""
    return Rule(rules.OUTER.bind((input.shape, vec2.shape)))


@sharded("einsum")
def einsum(equation: str, *operands: Any) -> Rule:
    """Any contraction written as an einsum equation without diagonals."""
    tensors = operands[0] if len(operands) == 1 and isinstance(operands[0], (list, tuple)) else operands
    left, _, right = equation.replace(" ", "").partition("->")
    parts = left.split(",")
    if "->" not in equation:
        letters = sorted(c for c in set(left) - set(".,") if left.count(c) == 1)
        right = ("..." if "..." in left else "") + "".join(letters)
    dims = [_letters(part, x.ndim) for part, x in zip(parts, tensors, strict=True)]
    if any(len(set(d)) != len(d) for d in dims):
        raise NoRuleError(f"einsum({equation!r}): an operand names a dim twice. Take its diagonal first.")
    lead = max((len([n for n in d if n[0] == "."]) for d in dims), default=0)
    out = _letters(right, len(right.replace("...", "")) + (lead if "..." in right else 0))
    summed = {n: Factor(Kind.CONTRACT, ReduceOp.SUM) for d in dims for n in d if n not in out}
    rule = FactorRule(tuple(dims), (out,), summed, (tuple(range(len(dims))),), LINEAR_OPS)
    return Rule(with_broadcast(rule, [x.shape for x in tensors]))


def _letters(part: str, ndim: int) -> tuple[str, ...]:
    before, dots, after = part.partition("...")
    num = ndim - len(before) - len(after)
    lead = tuple(f".{i}" for i in range(num, 0, -1)) if dots else ()
    return (*before, *lead, *after)
