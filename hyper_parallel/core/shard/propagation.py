# SPDX-License-Identifier: Apache-2.0
"""From the operands' layouts to the layouts an op runs under: chosen per mesh axis, by what moving would cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hyper_parallel.core.device_mesh import DeviceMesh
from hyper_parallel.core.layout import Layout, Split
from hyper_parallel.core.placement_types import ReduceOp
from hyper_parallel.core.shard.factor_rule import ONE, FactorRule, Kind

Shape = Sequence[int]


@dataclass(frozen=True, slots=True)
class Resolution:
    """Layouts an op runs under.

    Attributes:
        targets: Per operand the layout it must have.
        cotangents: Per operand the layout its gradient will have. See Note [Gradients have layouts].
        outputs: Per output its layout.
    """

    targets: tuple[Layout, ...]
    cotangents: tuple[Layout, ...]
    outputs: tuple[Layout, ...]


@dataclass(frozen=True, slots=True)
class _Choice:
    """What one mesh axis does to the op: shard a factor, leave a reduction pending, or nothing."""

    factor: str | None = None
    op: ReduceOp | None = None
    # Operands that must be pending over the axis.
    pending: frozenset[int] = frozenset()


_REPLICATE = _Choice()


def resolve(
    rule: FactorRule, layouts: Sequence[Layout], shapes: Sequence[Shape], *, fixed: int | None = None
) -> Resolution:
    """Choose the layouts of operands and outputs.

    For each mesh axis the candidates are the factors that some operand has on it, a pending reduction if
    the op lets it pass, and Replicate. The one whose redistributions move the fewest elements wins; ties go
    to the order just given, so that all ranks choose alike.

    Args:
        rule: The op's rule, bound to the operands' shapes.
        layouts: Per operand its layout, all on one mesh.
        shapes: Per operand its global shape.
        fixed: An operand that is changed in place: it stays as it is if the op can be done so, whatever that costs.

    Communication: none. Cost: mesh axes x candidates x operands, some ten microseconds.
    """
    mesh = layouts[0].mesh
    weights = [math.prod(shape) or 1 for shape in shapes]
    if fixed is not None:
        weights[fixed] = sum(weights) * 1000
    choices: dict[str, _Choice] = {}
    for axis in mesh.axis_names:
        candidates = _candidates(rule, axis, layouts)
        if fixed is not None:
            candidates = [c for c in candidates if _keeps(rule, fixed, layouts[fixed], axis, c)] or candidates
        choices[axis] = _choose(candidates, rule, axis, mesh.size(axis), layouts, weights, choices)
    splits = _factor_splits(rule, choices, layouts, weights)
    targets = tuple(_layout(mesh, dims, splits, _operand_pending(i, choices)) for i, dims in enumerate(rule.operands))
    cotangents = tuple(
        target.cotangent.with_partial(*_split_work(rule, i, choices)) for i, target in enumerate(targets)
    )
    pending = {axis: choice.op for axis, choice in choices.items() if choice.op is not None}
    outputs = tuple(_layout(mesh, dims, splits, pending) for dims in rule.outputs)
    return Resolution(targets, cotangents, outputs)


def _choose(
    candidates: Sequence[_Choice],
    rule: FactorRule,
    axis: str,
    size: int,
    layouts: Sequence[Layout],
    weights: Sequence[float],
    earlier: dict[str, _Choice],
) -> _Choice:
    taken = {choice.op for choice in earlier.values() if choice.op is not None}
    best, best_cost = _REPLICATE, math.inf
    for choice in candidates:
        if choice.op is not None and not _commutes(choice.op, taken):
            continue
        cost = sum(
            weight * _cost(layout, axis, size, _wanted(rule, i, layout, choice))
            for i, (layout, weight) in enumerate(zip(layouts, weights, strict=True))
        )
        if cost < best_cost:
            best, best_cost = choice, cost
    return best


def _commutes(op: ReduceOp, taken: set[ReduceOp]) -> bool:
    return not taken or taken == {op} or (op.is_linear and all(t.is_linear for t in taken))


def _candidates(rule: FactorRule, axis: str, layouts: Sequence[Layout]) -> list[_Choice]:
    factors: dict[str, None] = {}
    ops: dict[ReduceOp, None] = {}
    for dims, layout in zip(rule.operands, layouts, strict=True):
        dim, op = layout.dim_of(axis), layout.op_of(axis)
        if dim is not None:
            factors.setdefault(dims[dim])
        elif op is not None:
            ops.setdefault(op)
    out = [c for name in factors if (c := _shard_factor(rule, name)) is not None]
    for op in ops:
        if op in rule.pending:
            out.extend(_keep_pending(rule, axis, op, layouts))
    out.append(_REPLICATE)
    return out


def _shard_factor(rule: FactorRule, name: str) -> _Choice | None:
    if name == ONE:
        return None
    factor = rule.factor(name)
    match factor.kind:
        case Kind.WHOLE:
            return None
        case Kind.PASS:
            return _Choice(factor=name)
        case Kind.CONTRACT | Kind.INDEX:
            if factor.op is not ReduceOp.SUM or rule.terms is None:
                return _Choice(factor=name, op=factor.op)
            # Terms without the factor are added once, not once per rank: one operand of each goes pending.
            others = [term for term in rule.terms if not any(name in rule.operands[i] for i in term)]
            return _Choice(factor=name, op=factor.op, pending=frozenset(term[0] for term in others))


def _keep_pending(rule: FactorRule, axis: str, op: ReduceOp, layouts: Sequence[Layout]) -> list[_Choice]:
    if rule.terms is None:
        return [_Choice(op=op, pending=frozenset(range(len(rule.operands))))]
    # Of every product exactly one operand stays pending: two of them would multiply sums by parts.
    picked = []
    for term in rule.terms:
        held = [i for i in term if layouts[i].op_of(axis) is not None]
        picked.append(held[0] if held else term[0])
    return [_Choice(op=op, pending=frozenset(picked))]


def _wanted(rule: FactorRule, operand: int, layout: Layout, choice: _Choice) -> int | ReduceOp | None:
    """The dim this operand must have the axis on, the reduction that must be pending, or None for copies."""
    if operand in choice.pending:
        return choice.op
    if choice.factor is not None and choice.factor in rule.operands[operand]:
        return rule.operands[operand].index(choice.factor)
    return None


def _keeps(rule: FactorRule, operand: int, layout: Layout, axis: str, choice: _Choice) -> bool:
    """Whether the operand may stay as it is on this axis, and the output is laid out alike."""
    state = layout.dim_of(axis) if layout.op_of(axis) is None else layout.op_of(axis)
    output: int | ReduceOp | None = choice.op
    if output is None and choice.factor in rule.outputs[0]:
        output = rule.outputs[0].index(choice.factor)
    return state == output == _wanted(rule, operand, layout, choice)


def _cost(layout: Layout, axis: str, size: int, wanted: int | ReduceOp | None) -> float:
    """Elements received per element of the operand, to bring one axis from what it is to what is wanted."""
    dim, op = layout.dim_of(axis), layout.op_of(axis)
    share = (size - 1) / size
    if dim is not None:
        return 0.0 if dim == wanted else share / size if isinstance(wanted, int) else share
    if op is not None:
        if isinstance(wanted, ReduceOp):
            both_linear = op.is_linear and wanted.is_linear
            return 0.0 if op is wanted or both_linear else 2 * share
        return share if wanted is not None else 2 * share
    # A local slice or mask moves nothing; the trace of cost keeps an operand that fits from being touched.
    return 0.0 if wanted is None else 1e-6


def _factor_splits(
    rule: FactorRule, choices: dict[str, _Choice], layouts: Sequence[Layout], weights: Sequence[float]
) -> dict[str, tuple[Split, ...]]:
    """Per factor the axes that split it, outermost first, as the heaviest operand has them."""
    wanted: dict[str, list[str]] = {}
    for axis, choice in choices.items():
        if choice.factor is not None:
            wanted.setdefault(choice.factor, []).append(axis)
    out: dict[str, tuple[Split, ...]] = {}
    by_weight = sorted(range(len(layouts)), key=lambda i: -weights[i])
    for name, axes in wanted.items():
        merged: tuple[Split, ...] = ()
        for i in by_weight:
            dims = rule.operands[i]
            if name in dims:
                merged = _merged(merged, [s for s in layouts[i].splits[dims.index(name)] if s[0] in axes])
        out[name] = merged
    return out


def _merged(splits: tuple[Split, ...], others: Sequence[Split]) -> tuple[Split, ...]:
    """`splits` and then those of `others` that are not among them.

    The sizes of a ragged split are those of what the splits before it leave, so they hold only after the same ones.
    """
    known = {axis for axis, _ in splits}
    fits = True
    for at, (axis, sizes) in enumerate(others):
        fits = fits and splits[:at] == tuple(others[:at])
        if axis not in known:
            splits += ((axis, sizes if fits and len(splits) == at else None),)
    return splits


def _operand_pending(operand: int, choices: dict[str, _Choice]) -> dict[str, ReduceOp]:
    return {axis: choice.op for axis, choice in choices.items() if operand in choice.pending and choice.op is not None}


def _split_work(rule: FactorRule, operand: int, choices: dict[str, _Choice]) -> list[str]:
    """Axes along which this operand is replicated but the op's work is split."""
    out = []
    for axis, choice in choices.items():
        if operand in choice.pending or choice == _REPLICATE:
            continue
        if choice.factor is None or choice.factor not in rule.operands[operand]:
            out.append(axis)
    return out


def _layout(
    mesh: DeviceMesh,
    dims: Sequence[str],
    splits: dict[str, tuple[Split, ...]],
    pending: dict[str, ReduceOp],
) -> Layout:
    units = [splits.get(name, ()) for name in dims]
    ragged = {axis: sizes for dim in units for axis, sizes in dim if sizes is not None}
    return Layout(mesh, [[axis for axis, _ in dim] for dim in units], partial=pending, ragged=ragged)
