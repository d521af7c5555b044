# SPDX-License-Identifier: Apache-2.0
"""Which layouts an op runs under: proved by running it on all ranks in exact arithmetic, and chosen as one would."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import TypeAlias

import pytest

from hyper_parallel.core.device_mesh import DeviceMesh
from hyper_parallel.core.layout import Layout
from hyper_parallel.core.shard.factor_rule import FactorRule, parse_rule
from hyper_parallel.core.shard.propagation import Resolution, resolve
from hyper_parallel.core.shard.rules.attention import attention
from hyper_parallel.core.shard.rules.matmul import LINEAR_LAYER, matmul
from hyper_parallel.core.shard.rules.pointwise import Linearity, pointwise
from hyper_parallel.core.shard.rules.reduction import reduction, rowwise, trailing

Shape: TypeAlias = tuple[int, ...]
Index: TypeAlias = tuple[int, ...]
Values: TypeAlias = dict[Index, Fraction]

SMALL = DeviceMesh.grid(a=2, b=3)
BIG = DeviceMesh.grid(dp=64, tp=64)
DEEP = DeviceMesh.grid(pp=4, dp=16, cp=8, tp=8)


# -- an interpreter of rules ----------------------------------------------------------------------------


def indices(shape: Shape) -> Iterator[Index]:
    return itertools.product(*map(range, shape))


def numbers(shape: Shape, seed: int) -> Values:
    dice = random.Random(seed)
    return {i: Fraction(dice.randint(-9, 9)) for i in indices(shape)}


def piece(values: Values, layout: Layout, shape: Shape, rank: int) -> Values:
    """What `rank` holds, at global indices. Operands of a pending reduction are arbitrary but for their result."""
    box = layout.box(shape, rank)
    coord = dict(zip(layout.mesh.axis_names, layout.mesh.coord(rank), strict=True))
    out = {i: v for i, v in values.items() if all(lo <= x < hi for x, (lo, hi) in zip(i, box, strict=True))}
    for axis, op in layout.partial:
        size, mine = layout.mesh.size(axis), coord[axis]
        assert op.is_linear
        for i in out:
            others = [Fraction(3 * c + sum(i)) for c in range(1, size)]
            total = out[i] * (size if op.value == "avg" else 1)
            out[i] = total - sum(others) if mine == 0 else others[mine - 1]
    return out


def assembled(pieces: Sequence[Values], layout: Layout, shape: Shape) -> Values:
    """The global value of the pieces of all ranks; fails if copies differ or something is missing."""
    found: dict[Index, dict[Index, Fraction]] = {}
    for rank, values in enumerate(pieces):
        coord = dict(zip(layout.mesh.axis_names, layout.mesh.coord(rank), strict=True))
        at = tuple(coord[axis] for axis in layout.partial_axes)
        box = layout.box(shape, rank)
        inside = {i for i in indices(shape) if all(lo <= x < hi for x, (lo, hi) in zip(i, box, strict=True))}
        assert values.keys() == inside, (rank, layout)
        for i, v in values.items():
            assert found.setdefault(i, {}).setdefault(at, v) == v, f"copies differ at {i}"
    out = {}
    for i, parts in found.items():
        number = 1
        for axis, op in layout.partial:
            number *= layout.mesh.size(axis) if op.value == "avg" else 1
        out[i] = sum(parts.values(), Fraction(0)) / number
    assert out.keys() == set(indices(shape))
    return out


def run(rule: FactorRule, operands: Sequence[Values], sizes: dict[str, set[int]]) -> Values:
    """The op a linear rule describes: per term the product of its operands, summed over what the output lacks."""
    out_dims = rule.outputs[0]
    terms = rule.terms or (tuple(range(len(operands))),)
    out: Values = {}
    for place in itertools.product(*(sorted(sizes[name]) if name != "1" else [0] for name in out_dims)):
        at = {n: {x} for n, x in zip(out_dims, place, strict=True) if n != "1"}
        out[place] = sum((_term(rule, term, operands, {**sizes, **at}) for term in terms), Fraction(0))
    return out


def _term(rule: FactorRule, term: Sequence[int], operands: Sequence[Values], sizes: dict[str, set[int]]) -> Fraction:
    names = sorted({n for i in term for n in rule.operands[i] if n != "1"})
    total = Fraction(0)
    for place in itertools.product(*(sorted(sizes[n]) for n in names)):
        at = dict(zip(names, place, strict=True))
        product = Fraction(1)
        for i in term:
            value = operands[i][tuple(at.get(n, 0) for n in rule.operands[i])]
            # A rule without terms stands for an op that is not linear.
            product *= value if rule.terms else value * value + 1
        total += product
    return total


def check(rule: FactorRule, shapes: Sequence[Shape], layouts: Sequence[Layout]) -> Resolution:
    """Run the op whole, and piece by piece under the layouts chosen: the same."""
    mesh = layouts[0].mesh
    found = resolve(rule, layouts, shapes)
    values = [numbers(shape, n) for n, shape in enumerate(shapes)]
    whole = {
        n: set(range(size))
        for dims, shape in zip(rule.operands, shapes, strict=True)
        for n, size in zip(dims, shape, strict=True)
    }
    expected = run(rule, values, whole)
    out_shape = tuple(len(whole[n]) if n != "1" else 1 for n in rule.outputs[0])
    pieces = []
    for rank in mesh.ranks:
        local = [piece(v, t, s, rank) for v, t, s in zip(values, found.targets, shapes, strict=True)]
        sizes: dict[str, set[int]] = {}
        for dims, target, shape in zip(rule.operands, found.targets, shapes, strict=True):
            for name, (lo, hi) in zip(dims, target.box(shape, rank), strict=True):
                held = set(range(lo, hi))
                if name != "1":
                    assert sizes.setdefault(name, held) == held, f"{name} is cut in two ways: {found}"
        pieces.append(run(rule, local, sizes))
    assert assembled(pieces, found.outputs[0], out_shape) == expected, found
    return found


def all_layouts(mesh: DeviceMesh, ndim: int, partial: Sequence[str] = ("sum", "avg")) -> list[Layout]:
    out = []
    for choice in itertools.product((None, *range(ndim), *partial), repeat=mesh.ndim):
        for order in ([*mesh.axis_names], [*reversed(mesh.axis_names)]):
            dims: list[list[str]] = [[] for _ in range(ndim)]
            pending = {}
            for axis in order:
                what = choice[mesh.axis_names.index(axis)]
                if isinstance(what, int):
                    dims[what].append(axis)
                elif what is not None:
                    pending[axis] = what
            out.append(Layout(mesh, dims, partial=pending))
    return list(dict.fromkeys(out))


OPS: dict[str, tuple[FactorRule, list[Shape]]] = {
    "linear": (LINEAR_LAYER.bind([(4, 3), (5, 3), (5,)]), [(4, 3), (5, 3), (5,)]),
    "linear without bias": (LINEAR_LAYER.bind([(4, 3), (5, 3)]), [(4, 3), (5, 3)]),
    "matmul": (matmul((3, 4), (4, 2)), [(3, 4), (4, 2)]),
    "matmul of batches": (matmul((1, 3, 2), (4, 2, 2)), [(1, 3, 2), (4, 2, 2)]),
    "dot": (matmul((5,), (5,)), [(5,), (5,)]),
    "add": (pointwise([(3, 4), (3, 4)], Linearity.SUM), [(3, 4), (3, 4)]),
    "add broadcast": (pointwise([(3, 4), (4,)], Linearity.SUM), [(3, 4), (4,)]),
    "add broadcast 1": (pointwise([(3, 1), (1, 4)], Linearity.SUM), [(3, 1), (1, 4)]),
    "mul": (pointwise([(3, 4), (3, 4)], Linearity.PRODUCT), [(3, 4), (3, 4)]),
    "mul of three": (pointwise([(4,), (4,), (1,)], Linearity.PRODUCT), [(4,), (4,), (1,)]),
    "not linear": (pointwise([(3, 4), (3, 4)]), [(3, 4), (3, 4)]),
    "sum": (reduction(2, (0,), False), [(5, 3)]),
    "sum of all": (reduction(2, (0, 1), False), [(5, 3)]),
    "sum keepdim": (reduction(2, (1,), True), [(5, 3)]),
    "rowwise": (rowwise((2, 2), (1,), linear=True), [(3, 2), (3, 2)]),
}


@pytest.mark.parametrize("op", OPS)
def test_every_op_is_right_under_every_layout(op: str) -> None:
    rule, shapes = OPS[op]
    choices = list(itertools.product(*(all_layouts(SMALL, len(shape)) for shape in shapes)))
    if len(choices) > 150:
        choices = random.Random(op).sample(choices, 150)
    for layouts in choices:
        found = check(rule, shapes, layouts)
        again = resolve(rule, found.targets, shapes)
        assert (again.targets, again.outputs) == (found.targets, found.outputs), "what was chosen is not kept"


def test_the_interpreter_can_fail() -> None:
    """A rule that lies, and a layout that is none, are found."""
    lie = parse_rule("m k, k n -> m n", terms="01").bind([(3, 4), (4, 2)])
    layouts = [SMALL.layout(None, "a"), SMALL.layout("a", None)]
    with pytest.raises(AssertionError):
        check(lie, [(3, 4), (4, 2)], layouts)


# -- what is chosen, on thousands of ranks ----------------------------------------------------------------

LINEAR3 = LINEAR_LAYER.bind([(64, 512, 1024), (4096, 1024)])
LINEAR3_SHAPES = [(64, 512, 1024), (4096, 1024)]


def chosen(rule: FactorRule, shapes: Sequence[Shape], *layouts: Layout) -> tuple[list[str], list[str], list[str]]:
    found = resolve(rule, layouts, shapes)
    return [str(t) for t in found.targets], [str(c) for c in found.cotangents], [str(o) for o in found.outputs]


def test_column_parallel() -> None:
    layouts = BIG.layout("dp", None, None), BIG.layout("tp", None)
    targets, cotangents, outputs = chosen(LINEAR3, LINEAR3_SHAPES, *layouts)
    assert targets == ["[dp, -, -]", "[tp, -]"]
    assert cotangents == ["[dp, -, -] sum(tp)", "[tp, -] sum(dp)"]
    assert outputs == ["[dp, -, tp]"]


def test_row_parallel() -> None:
    targets, cotangents, outputs = chosen(LINEAR3, LINEAR3_SHAPES, BIG.layout("dp", None, "tp"), BIG.layout(None, "tp"))
    assert targets == ["[dp, -, tp]", "[-, tp]"]
    assert cotangents == ["[dp, -, tp]", "[-, tp] sum(dp)"]
    assert outputs == ["[dp, -, -] sum(tp)"]


def test_row_parallel_adds_the_bias_once() -> None:
    rule = LINEAR_LAYER.bind([(64, 1024), (512, 1024), (512,)])
    shapes = [(64, 1024), (512, 1024), (512,)]
    layouts = BIG.layout("dp", "tp"), BIG.layout(None, "tp"), BIG.layout(None)
    targets, cotangents, outputs = chosen(rule, shapes, *layouts)
    assert targets == ["[dp, tp]", "[-, tp]", "[-] sum(tp)"]
    assert cotangents == ["[dp, tp]", "[-, tp] sum(dp)", "[-] sum(dp)"]
    assert outputs == ["[dp, -] sum(tp)"]


def test_context_parallel_norm_weight_has_a_pending_gradient() -> None:
    rule, shapes = trailing(3, 1, 1), [(64, 4096, 1024), (1024,)]
    layouts = DEEP.layout("dp", ("cp", "tp"), None), DEEP.layout(None)
    targets, cotangents, outputs = chosen(rule, shapes, *layouts)
    assert targets == ["[dp, (cp, tp), -]", "[-]"]
    assert cotangents == ["[dp, (cp, tp), -]", "[-] sum(dp) sum(cp) sum(tp)"]
    assert outputs == ["[dp, (cp, tp), -]"]


def test_the_small_operand_moves() -> None:
    rule = LINEAR_LAYER.bind([(1 << 16, 1024), (1024, 1024)])
    targets, _, outputs = chosen(rule, [(1 << 16, 1024), (1024, 1024)], BIG.layout("dp", None), BIG.layout("dp", None))
    assert targets == ["[dp, -]", "[-, -]"]
    assert outputs == ["[dp, -]"]
    rule = LINEAR_LAYER.bind([(64, 1024), (1 << 16, 1024)])
    targets, _, outputs = chosen(rule, [(64, 1024), (1 << 16, 1024)], BIG.layout("dp", None), BIG.layout("dp", None))
    assert targets == ["[-, -]", "[dp, -]"]
    assert outputs == ["[-, dp]"]


def test_copies_stay_copies() -> None:
    targets, cotangents, outputs = chosen(
        LINEAR3, LINEAR3_SHAPES, DEEP.layout(None, None, None), DEEP.layout(None, None)
    )
    assert targets == cotangents == ["[-, -, -]", "[-, -]"]
    assert outputs == ["[-, -, -]"]


def test_two_pending_factors_of_a_product_are_never_multiplied() -> None:
    rule, shapes = pointwise([(8, 8), (8, 8)], Linearity.PRODUCT), [(8, 8), (8, 8)]
    pending = BIG.layout(None, None, partial={"tp": "sum"})
    targets, _, outputs = chosen(rule, shapes, pending, pending)
    assert sorted(targets) == ["[-, -]", "[-, -] sum(tp)"]
    assert outputs == ["[-, -] sum(tp)"]


def test_a_pending_sum_is_finished_for_what_is_not_linear() -> None:
    rule, shapes = pointwise([(8, 8)]), [(8, 8)]
    assert chosen(rule, shapes, BIG.layout(None, None, partial={"tp": "sum"}))[2] == ["[-, -]"]
    assert chosen(rule, shapes, BIG.layout("dp", None, partial={"tp": "sum"}))[2] == ["[dp, -]"]


def test_a_constant_may_be_added_to_an_average_but_not_to_a_sum() -> None:
    rule, shapes = pointwise([(8,)], Linearity.AFFINE), [(8,)]
    assert chosen(rule, shapes, BIG.layout(None, partial={"tp": "avg"}))[2] == ["[-] avg(tp)"]
    assert chosen(rule, shapes, BIG.layout(None, partial={"tp": "sum"}))[2] == ["[-]"]


def test_the_order_of_axes_follows_the_heaviest_operand() -> None:
    rule, shapes = pointwise([(64, 64), (64,)], Linearity.SUM), [(64, 64), (64,)]
    targets, _, outputs = chosen(rule, shapes, DEEP.layout(None, ("tp", "dp")), DEEP.layout(("dp", "tp")))
    assert targets == ["[-, (tp, dp)]", "[(tp, dp)]"]
    assert outputs == ["[-, (tp, dp)]"]


def test_a_changed_operand_stays_as_it_is() -> None:
    """In-place ops: the partner moves, however heavy it is."""
    rule, shapes = pointwise([(64, 64), (64, 64)], Linearity.SUM), [(64, 64), (64, 64)]
    kinds = [BIG.layout("dp", None), BIG.layout(None, "dp"), BIG.layout(None, None), BIG.layout("tp", "dp")]
    for mine, other in itertools.product(kinds, repeat=2):
        found = resolve(rule, [mine, other], shapes, fixed=0)
        assert found.targets[0] is mine
        assert found.outputs[0] is mine
    pending = BIG.layout(None, None, partial={"tp": "sum"})
    found = resolve(rule, [kinds[2], pending], shapes, fixed=0)
    assert found.targets == (kinds[2], kinds[2])


PRINT_CHOICES = """
import random
from hyper_parallel.core.shard.propagation import resolve
from tests.core.shard.test_propagation import DEEP, all_layouts, matmul
dice = random.Random(0)
options = all_layouts(DEEP, 2, ("sum",))
shapes = [(64, 64), (64, 64)]
for _ in range(40):
    found = resolve(matmul(*shapes), [dice.choice(options), dice.choice(options)], shapes)
    print(*found.targets, *found.cotangents, *found.outputs, sep=" | ")
"""


def test_all_ranks_choose_alike_whatever_their_hash_seed() -> None:
    """Ties go by the order of operands and axes, never by that of a set."""
    outputs = [
        subprocess.run(
            [sys.executable, "-c", PRINT_CHOICES],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert outputs[0].count("\n") == 40
    assert outputs[0] == outputs[1]


def test_ragged_sizes_hold_only_where_the_splits_before_are_the_same() -> None:
    """(3, 5) rows cut over "a" mean nothing for what "b" leaves of the dim."""
    mesh = DeviceMesh.grid(a=2, b=2)
    ragged = mesh.layout(None).with_dim(0, "a", {"a": (3, 5)})
    rule, shapes = pointwise([(8,), (8,)], Linearity.SUM), [(8,), (8,)]
    assert resolve(rule, [ragged, mesh.layout(None)], shapes).outputs[0] is ragged
    assert resolve(rule, [mesh.layout(None), ragged], shapes).outputs[0] is ragged
    both = resolve(rule, [mesh.layout("b"), ragged], shapes)
    assert both.targets == (mesh.layout(("b", "a")),) * 2
    behind = Layout(mesh, [("a", "b")], ragged={"a": (3, 5)})
    assert resolve(rule, [ragged, behind], shapes).outputs[0] is behind
    check(rule, shapes, [mesh.layout("b"), ragged])
    check(rule, shapes, [ragged, behind])


@pytest.mark.parametrize(
    ("heads", "key_heads", "query_dims", "key_dims", "expected"),
    [
        (8, 2, "tp", "tp", "[-, -, -, -]"),  # two key heads cannot be cut for eight ranks
        (8, 2, None, "tp", "[-, -, -, -]"),
        (16, 8, "tp", "tp", "[-, tp, -, -]"),
        (16, 8, "tp", None, "[-, tp, -, -]"),
        (8, 8, "tp", "tp", "[-, tp, -, -]"),
        (3, 3, "tp", "tp", "[-, tp, -, -]"),  # equal counts may be uneven
    ],
)
def test_grouped_attention_keeps_heads_together(
    heads: int, key_heads: int, query_dims: str | None, key_dims: str | None, expected: str
) -> None:
    query, key = (2, heads, 16, 4), (2, key_heads, 16, 4)
    layouts = [DEEP.layout(None, dims, None, None) for dims in (query_dims, key_dims, key_dims)]
    rule = attention(query, key, key, None, is_causal=True, layouts=layouts)
    found = resolve(rule, layouts, [query, key, key])
    assert [str(t) for t in (*found.targets, *found.outputs)] == [expected] * 4
