# SPDX-License-Identifier: Apache-2.0
"""Sharding rules in factors, written as einsum and Shardy write them: `"... m k+, ... k+ n -> ... m n"`.

x     passes through: may be sharded
x+    contracted: left sharded, the output is pending (`x+max`, `x+min`, ... for other reductions)
x^    must be whole on every rank
x~    addressed by index: may be sharded, the output is a pending sum (a masked kernel does the rest)
1     size 1 here: whole
...   any leading dims, aligned right
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from hyper_parallel.core.errors import ShapeError
from hyper_parallel.core.placement_types import ReduceOp

Dims = tuple[str, ...]
ONE = "1"
ELLIPSIS = "..."
_TOKEN = re.compile(r"(?P<name>[A-Za-z_]\w*)(?P<mark>\^|~|\+(?:sum|max|min|prod|all|any)?)?$")


class Kind(Enum):
    """What sharding a factor means for the op."""

    PASS = "pass"
    CONTRACT = "contract"
    WHOLE = "whole"
    INDEX = "index"


@dataclass(frozen=True, slots=True)
class Factor:
    """A factor that is not simply passed through."""

    kind: Kind
    op: ReduceOp = ReduceOp.SUM


PASS = Factor(Kind.PASS)
WHOLE = Factor(Kind.WHOLE)
LINEAR = frozenset((ReduceOp.SUM, ReduceOp.AVG))


@dataclass(frozen=True, slots=True)
class FactorRule:
    """A rule for operands of known numbers of dims.

    Attributes:
        operands: Per operand the factor of each dim; `"1"` for a dim of size 1 that is broadcast.
        outputs: Per output the factor of each dim.
        factors: The factors that are not simply passed through.
        terms: For ops linear in their operands: which operands are multiplied with each other; terms are added. `None`
            if the op is not linear.
        pending: Which pending reductions may stay pending through the op.
    """

    operands: tuple[Dims, ...]
    outputs: tuple[Dims, ...]
    factors: Mapping[str, Factor] = field(default_factory=dict)
    terms: tuple[tuple[int, ...], ...] | None = None
    pending: frozenset[ReduceOp] = frozenset()

    def factor(self, name: str) -> Factor:
        """What sharding factor `name` means."""
        return self.factors.get(name, PASS)


@dataclass(frozen=True, slots=True)
class RuleTemplate:
    """A parsed rule string; `bind` makes it a `FactorRule` for operands of given shapes."""

    text: str
    operands: tuple[Dims, ...]
    outputs: tuple[Dims, ...]
    factors: Mapping[str, Factor]
    terms: tuple[tuple[int, ...], ...] | None
    pending: frozenset[ReduceOp]

    def bind(self, shapes: Sequence[Sequence[int]]) -> FactorRule:
        """The rule for operands of these shapes. Trailing operands of the rule may be missing.

        Raises:
            ShapeError: more operands than the rule has, or with other numbers of dims.
        """
        if len(shapes) > len(self.operands):
            raise ShapeError(
                f"rule {self.text!r}: it has {len(self.operands)} operands, the call {len(shapes)}. Give a rule with "
                "one part per tensor."
            )
        operands = [_expand(dims, len(shape), self.text) for dims, shape in zip(self.operands, shapes, strict=False)]
        longest = max(
            (len(d) - len(t) + 1 for d, t in zip(operands, self.operands, strict=False) if ELLIPSIS in t), default=0
        )
        outputs = [
            _expand(dims, len(dims) - 1 + longest, self.text) if ELLIPSIS in dims else dims for dims in self.outputs
        ]
        terms = self.terms
        if terms is not None:
            terms = tuple(t for t in (tuple(i for i in term if i < len(shapes)) for term in terms) if t)
        rule = FactorRule(tuple(operands), tuple(outputs), self.factors, terms, self.pending)
        return with_broadcast(rule, shapes)


def with_broadcast(rule: FactorRule, shapes: Sequence[Sequence[int]]) -> FactorRule:
    """The rule with `"1"` where a dim of size 1 meets a larger one under the same factor."""
    largest: dict[str, int] = {}
    for dims, shape in zip(rule.operands, shapes, strict=True):
        for name, size in zip(dims, shape, strict=True):
            largest[name] = size if largest.get(name, 1) == 1 else largest[name]
    operands = tuple(
        tuple(ONE if size == 1 and largest[name] != 1 else name for name, size in zip(dims, shape, strict=True))
        for dims, shape in zip(rule.operands, shapes, strict=True)
    )
    return FactorRule(operands, rule.outputs, rule.factors, rule.terms, rule.pending)


def parse_rule(text: str, *, terms: str | None = None, pending: frozenset[ReduceOp] | None = None) -> RuleTemplate:
    """Parse a rule string.

    Args:
        text: The rule, `"operand, operand -> output, output"`.
        terms: Operand indices that are multiplied, terms separated by spaces: `"01 2"` for `x @ w + b`. Makes the op
            linear, so that pending sums and contracted factors may pass.
        pending: Reductions that may stay pending. Default: sum and avg for linear ops, else none.

    Raises:
        ValueError: the string does not follow the grammar.
    """
    left, arrow, right = text.partition("->")
    if not arrow:
        raise ValueError(f"rule {text!r}: there is no '->'. Write 'operands -> outputs'.")
    if "->" in right:
        raise ValueError(f"rule {text!r}: there is more than one '->'. Write 'operands -> outputs'.")
    factors: dict[str, Factor] = {}
    operands = tuple(_parse_dims(part, factors, text) for part in left.split(","))
    outputs = tuple(_parse_dims(part, factors, text) for part in right.split(","))
    _check_outputs(operands, outputs, factors, text)
    groups = None if terms is None else _parse_terms(terms, len(operands), text)
    if pending is None:
        pending = frozenset() if groups is None else LINEAR
    return RuleTemplate(text, operands, outputs, factors, groups, pending)


def _parse_dims(part: str, factors: dict[str, Factor], text: str) -> Dims:
    names = []
    for token in part.split():
        if token in (ELLIPSIS, ONE):
            names.append(token)
            continue
        match = _TOKEN.match(token)
        if match is None:
            raise ValueError(f"rule {text!r}: cannot read {token!r}. Use a name with one of ^ ~ +.")
        name, mark = match["name"], match["mark"]
        names.append(name)
        if mark:
            factor = _factor_of(mark)
            if factors.setdefault(name, factor) != factor:
                raise ValueError(f"rule {text!r}: {name!r} is marked in two ways. Give it one mark.")
    twice = next((n for n in names if n != ONE and names.count(n) > 1), None)
    if twice is not None:
        raise ValueError(f"rule {text!r}: {twice!r} occurs twice in {part.strip()!r}. Give each dim a name of its own.")
    return tuple(names)


def _check_outputs(operands: Sequence[Dims], outputs: Sequence[Dims], factors: Mapping[str, Factor], text: str) -> None:
    known = {ONE}.union(*operands)
    for name in (name for dims in outputs for name in dims):
        if name not in known:
            raise ValueError(f"rule {text!r}: no operand has the output's {name!r}. Use names of the operands, or 1.")
        if name in factors and factors[name].kind in (Kind.CONTRACT, Kind.INDEX):
            raise ValueError(f"rule {text!r}: {name!r} is summed over, yet in the output. Take it out, or its mark.")


def _parse_terms(terms: str, num_operands: int, text: str) -> tuple[tuple[int, ...], ...]:
    groups = tuple(tuple(int(digit) if digit.isdigit() else -1 for digit in term) for term in terms.split())
    if sorted(i for group in groups for i in group) != list(range(num_operands)):
        raise ValueError(
            f"rule {text!r}: terms {terms!r} do not name each of the {num_operands} operands once. Write its digit in "
            "one term, as in '01 2'."
        )
    return groups


def _factor_of(mark: str) -> Factor:
    match mark[0]:
        case "^":
            return WHOLE
        case "~":
            return Factor(Kind.INDEX)
        case _:
            return Factor(Kind.CONTRACT, ReduceOp.of(mark[1:] or "sum"))


def _expand(dims: Dims, ndim: int, text: str) -> Dims:
    num = ndim - (len(dims) - 1)
    if num < 0 if ELLIPSIS in dims else len(dims) != ndim:
        raise ShapeError(
            f"rule {text!r}: {' '.join(dims)!r} is written for an operand of {ndim} dims. Name each dim, or write "
            "'...' for leading ones."
        )
    if ELLIPSIS not in dims:
        return dims
    at = dims.index(ELLIPSIS)
    lead = tuple(f".{i}" for i in range(num, 0, -1))
    return dims[:at] + lead + dims[at + 1 :]
