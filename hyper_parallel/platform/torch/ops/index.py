# SPDX-License-Identifier: Apache-2.0
"""Indexing, slicing, joining and cutting. A dim that is cut or looked up in must be whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hyper_parallel.core.errors import NoRuleError
from hyper_parallel.core.shard.factor_rule import LINEAR, ONE, WHOLE, FactorRule, with_broadcast
from hyper_parallel.core.shard.rules.reduction import rowwise
from hyper_parallel.core.shard.rules.view import select_dims
from hyper_parallel.platform.torch.dispatch import Rule, ShardedOp, register, sharded


@sharded("cat concat concatenate")
def cat(tensors: Any, dim: int = 0) -> Rule:
    """Join along a dim, which must be whole."""
    return Rule(rowwise([x.ndim for x in tensors], (dim % tensors[0].ndim,), linear=True))


@sharded("stack")
def stack(tensors: Any, dim: int = 0) -> Rule:
    """Join along a new dim."""
    ndim = tensors[0].ndim
    names = tuple(f"d{i}" for i in range(ndim))
    at = dim % (ndim + 1)
    terms = tuple((i,) for i in range(len(tensors)))
    return Rule(FactorRule((names,) * len(tensors), ((*names[:at], ONE, *names[at:]),), {}, terms, LINEAR))


@sharded("split chunk tensor_split split_with_sizes")
def split(input: Any, *args: Any, **kwargs: Any) -> Rule:
    """Cut along a dim, which must be whole."""
    dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
    return Rule(rowwise((input.ndim,), (dim % input.ndim,), linear=True))


@sharded("unbind")
def unbind(input: Any, dim: int = 0) -> Rule:
    """Cut into slices along a dim, which must be whole."""
    at = dim % input.ndim
    kept = [i for i in range(input.ndim) if i != at]
    return Rule(select_dims(input.ndim, kept))


@sharded("select")
def select(input: Any, dim: int, index: int) -> Rule:
    """One slice along a dim, which must be whole."""
    at = dim % input.ndim
    return Rule(select_dims(input.ndim, [i for i in range(input.ndim) if i != at]))


@sharded("narrow")
def narrow(input: Any, dim: int, start: int, length: int) -> Rule:
    """A range along a dim, which must be whole."""
    return Rule(rowwise((input.ndim,), (dim % input.ndim,), linear=True))


@sharded("index_select")
def index_select(input: Any, dim: int, index: Any) -> Rule:
    """Slices picked by a 1-D index along a dim, which must be whole."""
    names = [f"d{i}" for i in range(input.ndim)]
    out = list(names)
    out[dim % input.ndim] = "n"
    return Rule(FactorRule((tuple(names), ("n",)), (tuple(out),), {names[dim % input.ndim]: WHOLE}))


@sharded("gather take_along_dim")
def gather(input: Any, dim: int, index: Any, **_: Any) -> Rule:
    """Elements picked along a dim, which must be whole; other dims must agree in size to be split."""
    at = dim % input.ndim
    names = [f"d{i}" for i in range(input.ndim)]
    picked = [f"p{i}" if i == at or input.shape[i] != index.shape[i] else n for i, n in enumerate(names)]
    whole = {n: WHOLE for i, n in enumerate(names) if picked[i] != n}
    whole |= {n: WHOLE for i, n in enumerate(picked) if n != names[i] and i != at}
    return Rule(FactorRule((tuple(names), tuple(picked)), (tuple(picked),), whole))


def _getitem(input: Any, index: Any) -> Rule:
    """`x[index]` with ints, slices, None, Ellipsis, and index or mask tensors."""
    parts = list(index) if isinstance(index, tuple) else [index]
    parts = _fill_ellipsis(parts, input.ndim)
    names = [f"d{i}" for i in range(input.ndim)]
    output: list[str] = []
    factors = {}
    indices: list[torch.Tensor] = []
    at, insert = 0, None
    for part in parts:
        if part is None:
            output.append(ONE)
            continue
        if isinstance(part, torch.Tensor):
            if part.dtype == torch.bool or isinstance(part, bool):
                raise NoRuleError(
                    "x[mask]: the number of elements it picks depends on the data. Use torch.where, or gather first "
                    "with full_tensor()."
                )
            insert = len(output) if insert is None else insert
            indices.append(part)
            factors[names[at]] = WHOLE
        elif isinstance(part, slice):
            if part != slice(None):
                factors[names[at]] = WHOLE
            output.append(names[at])
        elif isinstance(part, int):
            factors[names[at]] = WHOLE
        else:
            raise NoRuleError(
                f"x[{type(part).__name__}]: indexing of this kind has no rule. Use slices or index tensors."
            )
        at += 1
    if not indices:
        rule = FactorRule((tuple(names),), (tuple(output),), factors, ((0,),), LINEAR)
        return Rule(rule)
    return Rule(_advanced(names, output, factors, indices, parts, insert or 0, input.shape))


def _advanced(
    names: Sequence[str],
    output: list[str],
    factors: dict[str, Any],
    indices: Sequence[torch.Tensor],
    parts: Sequence[Any],
    insert: int,
    shape: Sequence[int],
) -> FactorRule:
    ndim = max(i.ndim for i in indices)
    picked = tuple(f".{i}" for i in range(ndim, 0, -1))
    operands = [picked[ndim - i.ndim :] for i in indices]
    where = [i for i, part in enumerate(parts) if isinstance(part, (torch.Tensor, int)) and not isinstance(part, bool)]
    if where[-1] - where[0] + 1 != len(where):
        insert = 0
    output[insert:insert] = picked
    rule = FactorRule((tuple(names), *operands), (tuple(output),), factors)
    return with_broadcast(rule, [shape, *(i.shape for i in indices)])


def _fill_ellipsis(parts: list[Any], ndim: int) -> list[Any]:
    used = sum(1 for part in parts if part is not None and part is not Ellipsis)
    missing = [slice(None)] * (ndim - used)
    at = next((i for i, part in enumerate(parts) if part is Ellipsis), None)
    if at is None:
        return parts + missing
    return parts[:at] + missing + parts[at + 1 :]


class _Getitem(ShardedOp):
    """Slices are not hashable, so indexing always takes the general way."""

    __slots__ = ()

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._general(func, args, kwargs)


register("__getitem__", _Getitem(_getitem))


def _setitem(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """`x[index] = value`: where the index takes whole dims only, each rank writes its part."""
    x, index, value = args
    target = x[index]
    if target.layout is not x.layout and x.layout.sharded_axes and target.layout != _kept(x, target):
        raise NoRuleError(
            f"x[...] = value with x {tuple(x.shape)} {x.layout}: the index cuts a sharded dim. Redistribute x first, "
            "or build the result with torch.where."
        )
    local = x._pin()
    if isinstance(value, torch.Tensor):
        value = torch.empty_like(target).copy_(value)._local
    local[index] = value


def _kept(x: Any, target: Any) -> Any:
    """The layout of `target` if indexing moved nothing: all axes of `x` still split it."""
    return target.layout if target.layout.sharded_axes == x.layout.sharded_axes else None


register("__setitem__", _setitem)


def _pad(input: Any, pad: Any, mode: str = "constant", value: Any = None) -> Rule:
    """Padding; padded dims must be whole."""
    dims = [input.ndim - 1 - i for i in range(len(pad) // 2) if pad[2 * i] or pad[2 * i + 1]]
    return Rule(rowwise((input.ndim,), dims))


register("pad", ShardedOp(_pad))
