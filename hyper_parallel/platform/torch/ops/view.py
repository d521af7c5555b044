# SPDX-License-Identifier: Apache-2.0
"""Views and permutations: sizes among the arguments are global and become local for the call."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from hyper_parallel.core.layout import Layout
from hyper_parallel.core.shard.factor_rule import LINEAR, ONE, FactorRule
from hyper_parallel.core.shard.rules import view as rules
from hyper_parallel.core.tensor_redistribution.reshape import full_shape
from hyper_parallel.core.tensor_redistribution.reshape_plan import reshape_layouts
from hyper_parallel.platform.torch.dispatch import (
    Resolved,
    Rule,
    check_native,
    handles,
    name_of,
    register,
    resolved_cache,
    sharded,
)
from hyper_parallel.platform.torch.dtensor import TorchDTensor, wrap
from hyper_parallel.platform.torch.spec import Spec, spec_of


def _sizes(args: Sequence[Any]) -> tuple[int, ...]:
    if len(args) == 1 and isinstance(args[0], (list, tuple)):
        return tuple(args[0])
    return tuple(args)


class _View(NamedTuple):
    """A cached decision: where the operand has to go first, if anywhere, and what the result is."""

    target: Layout | None
    spec: Spec


def view_to(func: Any, input: TorchDTensor, new_shape: tuple[int, ...]) -> TorchDTensor:
    """`input` with other sizes, of which one may be -1: a view of the local parts wherever that is one of the whole.

    Communication: none where the shard survives, else the plan to the soonest layout that does. See Note [Shards
    through a reshape] in core/tensor_redistribution/reshape.py.
    """
    local = input._local
    if not local.requires_grad and not input._is_native:
        check_native(input)
    key = (view_to, input._spec, new_shape)
    found: _View | None = resolved_cache.get(key)
    if found is None:
        shape = tuple(input.shape)
        full = full_shape(new_shape, math.prod(shape))
        before, after = reshape_layouts(input.layout, shape, full, input.element_size())
        found = _View(None if before is input.layout else before, spec_of(after, full))
        resolved_cache.put(key, found)
    source = (input if found.target is None else input.redistribute(layout=found.target)).local()
    out = wrap(source.reshape(found.spec.local_shape), found.spec)
    if found.target is not None:
        out._lost_view = name_of(func)
    elif input._lost_view is not None:
        out._lost_view = input._lost_view
    elif not source.is_contiguous() and func.__name__ == "view" and not _share_memory(out._local, source):
        out._lost_view = "view"
    return out


def _share_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


@handles("view reshape")
def view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Other sizes for the same elements."""
    size = kwargs["shape"] if kwargs else args[1:]
    if len(size) == 1 and isinstance(size[0], torch.dtype):
        raise TypeError("view(dtype) of a DTensor: its elements cannot be reinterpreted. Use x.to(dtype).")
    return view_to(func, args[0], _sizes(size))


def _flatten(func: Any, input: Any, start_dim: int = 0, end_dim: int = -1) -> Any:
    """Neighbouring dims as one."""
    ndim = max(input.ndim, 1)
    start, end = _dim(start_dim, ndim), _dim(end_dim, ndim)
    if start > end:
        raise RuntimeError("flatten() has invalid args: start_dim cannot come after end_dim")
    length = math.prod(input.shape[start : end + 1])
    return view_to(func, input, (*input.shape[:start], length, *input.shape[end + 1 :]))


def _unflatten(func: Any, input: Any, dim: int, sizes: Any) -> Any:
    """One dim as several."""
    at = _dim(dim, input.ndim)
    return view_to(func, input, (*input.shape[:at], *full_shape(sizes, input.shape[at]), *input.shape[at + 1 :]))


def _squeeze(func: Any, input: Any, dim: Any = None) -> Any:
    """Without the dims of size 1 (the given ones, or all)."""
    dims = range(input.ndim) if dim is None else [_dim(d, max(input.ndim, 1)) for d in _sizes((dim,))]
    kept = [d for d in range(input.ndim) if d not in dims or input.shape[d] != 1]
    return view_to(func, input, tuple(input.shape[d] for d in kept))


def _ravel(func: Any, input: Any) -> Any:
    """All dims as one."""
    return view_to(func, input, (input.numel(),))


def _dim(dim: int, ndim: int) -> int:
    if not -ndim <= dim < ndim:
        raise IndexError(f"Dimension out of range (expected to be in range of [{-ndim}, {ndim - 1}], but got {dim})")
    return dim % ndim


def _with_args(ours: Callable[..., Any]) -> Callable[..., Any]:
    return lambda func, args, kwargs: ours(func, *args, **kwargs)


for _names, _ours in (("flatten", _flatten), ("unflatten", _unflatten), ("squeeze", _squeeze), ("ravel", _ravel)):
    register(_names, _with_args(_ours))


@handles("view_as reshape_as")
def view_as(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Sizes of another tensor."""
    return args[0].view(tuple(args[1].shape)) if func.__name__ == "view_as" else args[0].reshape(tuple(args[1].shape))


@sharded("transpose swapaxes swapdims", view=True)
def transpose(input: Any, dim0: int, dim1: int) -> Rule:
    """Two dims exchanged."""
    order = list(range(input.ndim))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return Rule(rules.permute(order))


@sharded("t adjoint", view=True)
def t(input: Any) -> Rule:
    """The two last dims exchanged (a vector stays)."""
    order = list(range(input.ndim))
    return Rule(rules.permute((*order[:-2], *order[:-3:-1]) if input.ndim > 1 else order))


@sharded("permute", view=True)
def permute(input: Any, *dims: Any) -> Rule:
    """Dims in another order."""
    return Rule(rules.permute([d % input.ndim for d in _sizes(dims)]))


@sharded("movedim moveaxis", view=True)
def movedim(input: Any, source: Any, destination: Any) -> Rule:
    """Some dims moved."""
    probe = torch.empty([i + 2 for i in range(input.ndim)], device="meta")
    order = [size - 2 for size in probe.movedim(source, destination).shape]
    return Rule(rules.permute(order))


@sharded("unsqueeze", view=True)
def unsqueeze(input: Any, dim: int) -> Rule:
    """A new dim of size 1."""
    order: list[int | None] = list(range(input.ndim))
    order.insert(dim % (input.ndim + 1), None)
    return Rule(rules.select_dims(input.ndim, order))


def _expand_local(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], resolved: Resolved) -> Any:
    return args[0].expand(resolved.outputs[0].local_shape)


@sharded("expand broadcast_to", view=True)
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
