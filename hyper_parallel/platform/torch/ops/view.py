# SPDX-License-Identifier: Apache-2.0
"""Views and permutations: sizes among the arguments are global and become local for the call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hyper_parallel.core.shard.factor_rule import LINEAR, ONE, FactorRule
from hyper_parallel.core.shard.rules import view as rules
from hyper_parallel.platform.torch.dispatch import Resolved, Rule, handles, sharded


def _sizes(args: Sequence[Any]) -> tuple[int, ...]:
    if len(args) == 1 and isinstance(args[0], (list, tuple)):
        return tuple(args[0])
    return tuple(args)


def _to_local_shape(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], resolved: Resolved) -> Any:
    return args[0].reshape(resolved.outputs[0].local_shape)


@sharded("view reshape", values=True)
def view(input: Any, *size: Any, shape: Any = None) -> Rule:
    """Other sizes for the same elements."""
    if len(size) == 1 and isinstance(size[0], torch.dtype):
        raise TypeError("view(dtype) of a DTensor: its elements cannot be reinterpreted. Use x.to(dtype).")
    new_shape = rules.full_shape(shape or _sizes(size), input.numel())
    return Rule(rules.reshape(input.layout, input.shape, new_shape), call=_to_local_shape, shapes=(new_shape,))


@sharded("flatten")
def flatten(input: Any, start_dim: int = 0, end_dim: int = -1) -> Rule:
    """Neighbouring dims as one."""
    start, end = start_dim % max(input.ndim, 1), end_dim % max(input.ndim, 1)
    return view(input, (*input.shape[:start], -1, *input.shape[end + 1 :]))


@sharded("unflatten")
def unflatten(input: Any, dim: int, sizes: Any) -> Rule:
    """One dim as several."""
    at = dim % input.ndim
    sizes = rules.full_shape(sizes, input.shape[at])
    return view(input, (*input.shape[:at], *sizes, *input.shape[at + 1 :]))


@handles("view_as reshape_as")
def view_as(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Sizes of another tensor."""
    return args[0].view(tuple(args[1].shape)) if func.__name__ == "view_as" else args[0].reshape(tuple(args[1].shape))


@sharded("transpose swapaxes swapdims")
def transpose(input: Any, dim0: int, dim1: int) -> Rule:
    """Two dims exchanged."""
    order = list(range(input.ndim))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return Rule(rules.permute(order))


@sharded("t adjoint")
def t(input: Any) -> Rule:
    """The two last dims exchanged (a vector stays)."""
    order = list(range(input.ndim))
    return Rule(rules.permute((*order[:-2], *order[:-3:-1]) if input.ndim > 1 else order))


@sharded("permute")
def permute(input: Any, *dims: Any) -> Rule:
    """Dims in another order."""
    return Rule(rules.permute([d % input.ndim for d in _sizes(dims)]))


@sharded("movedim moveaxis")
def movedim(input: Any, source: Any, destination: Any) -> Rule:
    """Some dims moved."""
    probe = torch.empty([i + 2 for i in range(input.ndim)], device="meta")
    order = [size - 2 for size in probe.movedim(source, destination).shape]
    return Rule(rules.permute(order))


@sharded("unsqueeze")
def unsqueeze(input: Any, dim: int) -> Rule:
    """A new dim of size 1."""
    order: list[int | None] = list(range(input.ndim))
    order.insert(dim % (input.ndim + 1), None)
    return Rule(rules.select_dims(input.ndim, order))


@sharded("squeeze")
def squeeze(input: Any, dim: Any = None) -> Rule:
    """Without the dims of size 1 (the given ones, or all)."""
    dims = range(input.ndim) if dim is None else [d % max(input.ndim, 1) for d in _sizes((dim,))]
    gone = [d for d in dims if input.ndim and input.shape[d] == 1]
    kept = [d for d in range(input.ndim) if d not in gone]
    shape = tuple(input.shape[d] for d in kept)
    return Rule(rules.select_dims(input.ndim, kept), call=_to_local_shape, shapes=(shape,))


def _expand_local(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], resolved: Resolved) -> Any:
    return args[0].expand(resolved.outputs[0].local_shape)


@sharded("expand broadcast_to")
def expand(input: Any, *size: Any) -> Rule:
    """Dims of size 1 repeated, without a copy."""
    sizes = _sizes(size)
    lead = len(sizes) - input.ndim
    shape = tuple(input.shape[i - lead] if s == -1 else s for i, s in enumerate(sizes))
    names = tuple(f"d{i}" for i in range(input.ndim))
    same = [i >= lead and input.shape[i - lead] == shape[i] for i in range(len(shape))]
    out = tuple(names[i - lead] if same[i] else ONE for i in range(len(shape)))
    operand = tuple(n if same[i + lead] else ONE for i, n in enumerate(names))
    torch.empty(input.shape, device="meta").expand(shape)
    rule = FactorRule((operand,), (out,), {}, ((0,),), LINEAR)
    return Rule(rule, call=_expand_local, shapes=(shape,))


@handles("expand_as")
def expand_as(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Sizes of another tensor."""
    return args[0].expand(tuple(args[1].shape))


@sharded("repeat tile")
def repeat(input: Any, *repeats: Any) -> Rule:
    """Dims repeated with a copy; a repeated dim must be whole."""
    times = _sizes(repeats)
    lead = len(times) - input.ndim
    kept: list[int | None] = [None] * lead + list(range(input.ndim))
    whole = [d for d in range(input.ndim) if times[d + lead] != 1]
    return Rule(rules.select_dims(input.ndim, kept, whole))


@sharded("repeat_interleave")
def repeat_interleave(input: Any, repeats: int, dim: int | None = None, **_: Any) -> Rule:
    """Each slice along a dim repeated; the dim keeps its split where every shard is a whole number of slices."""
    if dim is None:
        return Rule(rules.select_dims(input.ndim, [None], range(input.ndim)))
    at = dim % input.ndim
    parts = input.device_mesh.num_ranks(input.layout.dims[at])
    whole = [] if input.shape[at] % parts == 0 and not input.layout.ragged else [at]
    return Rule(rules.select_dims(input.ndim, list(range(input.ndim)), whole))
