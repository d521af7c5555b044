# SPDX-License-Identifier: Apache-2.0
"""Indexing, slicing, joining and cutting. A dim that is cut or looked up in must be whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hyper_parallel.core.errors import LayoutError, NoRuleError, OperandError
from hyper_parallel.core.shard.factor_rule import LINEAR, ONE, WHOLE, FactorRule, with_broadcast
from hyper_parallel.core.shard.rules.reduction import rowwise
from hyper_parallel.core.shard.rules.view import select_dims
from hyper_parallel.platform.torch.dispatch import (
    Rule,
    ShardedOp,
    TorchDTensor,
    adopt,
    describe,
    lost_view,
    register,
    sharded,
)


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


@sharded("split chunk tensor_split split_with_sizes", view=True)
def split(input: Any, *args: Any, **kwargs: Any) -> Rule:
    """Cut along a dim, which must be whole."""
    dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
    return Rule(rowwise((input.ndim,), (dim % input.ndim,), linear=True))


@sharded("unbind", view=True)
def unbind(input: Any, dim: int = 0) -> Rule:
    """Cut into slices along a dim, which must be whole."""
    at = dim % input.ndim
    kept = [i for i in range(input.ndim) if i != at]
    return Rule(select_dims(input.ndim, kept))


@sharded("select", view=True)
def select(input: Any, dim: int, index: int) -> Rule:
    """One slice along a dim, which must be whole."""
    at = dim % input.ndim
    return Rule(select_dims(input.ndim, [i for i in range(input.ndim) if i != at]))


@sharded("narrow", view=True)
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
    # Ints are taken out first, as slices of size 1: they neither join index tensors nor part them.
    kept = [part for part in parts if isinstance(part, torch.Tensor) or not isinstance(part, int)]
    where = [i for i, part in enumerate(kept) if isinstance(part, torch.Tensor)]
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


register("__getitem__", _Getitem(_getitem, view=True))


def _setitem(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """`x[index] = value`: where the index takes whole dims only, each rank writes its part."""
    x, index, value = args
    if not isinstance(x, TorchDTensor):
        raise OperandError(
            f"x[...] = ... with a plain {describe(x)}: its index or value is a DTensor. Spread x with "
            "distribute_tensor, or use full_tensor() of the other."
        )
    if x.layout.partial:
        raise LayoutError(
            f"x[...] = ...: {describe(x)} is pending and cannot be changed in place. Redistribute it first."
        )
    if x._lost_view is not None:
        raise lost_view(func, x)
    index = adopt(index, x.device_mesh, func, args)
    if x.layout.sharded_axes:
        _refuse_cut(x, index)
    if isinstance(value, torch.Tensor):
        # Laid out as what it replaces.
        replaced: Any = torch.empty_like(x.detach()[index])
        value = replaced.copy_(value)._local
    x._pin()[_whole_index(index)] = value


def _whole_index(index: Any) -> Any:
    """An index whose tensors are plain and whole."""
    if isinstance(index, tuple):
        return tuple(_whole_index(part) for part in index)
    return index.full_tensor() if isinstance(index, TorchDTensor) else index


def _refuse_cut(x: TorchDTensor, index: Any) -> None:
    """Refuse an index that takes a part of a sharded dim: the ranks would need different ones."""
    parts = [p for p in (index if isinstance(index, tuple) else (index,)) if p is not None]
    if any(isinstance(p, torch.Tensor) and p.dtype == torch.bool for p in parts):
        parts = [0] * x.ndim
    for dim, part in enumerate(_fill_ellipsis(parts, x.ndim)):
        if part != slice(None) and x.layout.dims[dim]:
            raise NoRuleError(
                f"x[...] = value with x {tuple(x.shape)} {x.layout}: the index cuts dim {dim}, which is sharded. "
                "Redistribute x first, or build the result with torch.where."
            )


register("__setitem__", _setitem)


def _pad(input: Any, pad: Any, mode: str = "constant", value: Any = None) -> Rule:
    """Padding; padded dims must be whole."""
    dims = [input.ndim - 1 - i for i in range(len(pad) // 2) if pad[2 * i] or pad[2 * i + 1]]
    return Rule(rowwise((input.ndim,), dims))


register("pad", ShardedOp(_pad))
