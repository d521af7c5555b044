# SPDX-License-Identifier: Apache-2.0
"""Views: where the dims of the input are found in the output."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hyper_parallel.core.errors import ShapeError
from hyper_parallel.core.layout import Layout
from hyper_parallel.core.shard.factor_rule import LINEAR, ONE, WHOLE, Factor, FactorRule

Shape = Sequence[int]


def full_shape(shape: Shape, numel: int) -> tuple[int, ...]:
    """`shape` with its -1 filled in.

    Raises:
        ShapeError: the sizes do not make `numel` elements.
    """
    known = math.prod(size for size in shape if size != -1)
    out = tuple(shape)
    if -1 in out:
        missing = numel // known if known else 0
        out = tuple(missing if size == -1 else size for size in out)
    if math.prod(out) != numel:
        raise ShapeError(f"view to {tuple(shape)}: the tensor has {numel} elements. Give sizes that multiply to it.")
    return out


def reshape(layout: Layout, shape: Shape, new_shape: Shape) -> FactorRule:
    """`view`/`reshape` to `new_shape` (no -1): a sharded dim survives as the outermost of its group.

    The dims are matched in groups of equal numbers of elements. Inside a group the first dim (of size over
    1) of the input and that of the output share a factor if every shard's boundary falls on a boundary of
    both; any other dim must be whole.
    """
    operand = [ONE] * len(shape)
    output = [ONE] * len(new_shape)
    factors: dict[str, Factor] = {}
    for group, (ins, outs) in enumerate(_groups(shape, new_shape)):
        for i in ins:
            operand[i] = f"w{group}_{i}"
            factors[operand[i]] = WHOLE
        if not ins or not outs:
            continue
        first, target = ins[0], outs[0]
        same = len(ins) == len(outs) == 1
        if same or _survives(layout, first, shape[first], new_shape[target]):
            operand[first] = output[target] = f"g{group}"
    return FactorRule((tuple(operand),), (tuple(output),), factors, ((0,),), LINEAR)


def _survives(layout: Layout, dim: int, size: int, new_size: int) -> bool:
    parts = math.prod(layout.mesh.size(axis) for axis in layout.dims[dim])
    ragged = any(sizes is not None for _, sizes in layout.splits[dim])
    return not ragged and size % parts == 0 and new_size % parts == 0


def _groups(shape: Shape, new_shape: Shape) -> list[tuple[list[int], list[int]]]:
    """Runs of dims with equal products; dims of size 1 belong to no group unless they match one to one."""
    if 0 in shape or 0 in new_shape:
        common = 0
        while common < min(len(shape), len(new_shape)) and shape[common] == new_shape[common]:
            common += 1
        head = [([i], [i]) for i in range(common)]
        rest: tuple[list[int], list[int]] = (list(range(common, len(shape))), [])
        return [*head, rest] if rest[0] else head
    if tuple(shape) == tuple(new_shape):
        return [([i], [i]) for i in range(len(shape))]
    ins = [i for i, size in enumerate(shape) if size != 1]
    outs = [j for j, size in enumerate(new_shape) if size != 1]
    groups: list[tuple[list[int], list[int]]] = []
    a = b = 0
    while a < len(ins) and b < len(outs):
        left, right = [ins[a]], [outs[b]]
        n, m = shape[ins[a]], new_shape[outs[b]]
        a, b = a + 1, b + 1
        while n != m:
            if n < m:
                n *= shape[ins[a]]
                left.append(ins[a])
                a += 1
            else:
                m *= new_shape[outs[b]]
                right.append(outs[b])
                b += 1
        groups.append((left, right))
    ones: list[tuple[list[int], list[int]]] = [([i], []) for i, size in enumerate(shape) if size == 1]
    return groups + ones


def permute(order: Sequence[int]) -> FactorRule:
    """Output dim i is input dim `order[i]`."""
    names = tuple(f"d{i}" for i in range(len(order)))
    return FactorRule((names,), (tuple(names[i] for i in order),), {}, ((0,),), LINEAR)


def select_dims(ndim: int, output: Sequence[int | None], whole: Sequence[int] = ()) -> FactorRule:
    """Output dim i is input dim `output[i]`, or new (None). Dims in `whole`, or that vanish, must be whole."""
    names = tuple(f"d{i}" for i in range(ndim))
    gone = set(range(ndim)) - {i for i in output if i is not None}
    factors = {names[i]: WHOLE for i in gone.union(whole)}
    out = tuple(ONE if i is None else names[i] for i in output)
    return FactorRule((names,), (out,), factors, ((0,),), LINEAR)
