# SPDX-License-Identifier: Apache-2.0
"""Sums, means, extremes, and ops along a dim that must be whole."""

from __future__ import annotations

import math
from typing import Any

import torch

from hyper_parallel.core.placement_types import ReduceOp
from hyper_parallel.core.shard.rules.reduction import (
    normal_dims,
    reduction,
    rowwise,
    whole_reduction,
)
from hyper_parallel.platform.torch.dispatch import HANDLERS, Rule, ShardedOp, handles, register, sharded


@sharded("sum nansum")
def sum_(input: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Rule:
    """Sum over dims; sharded ones leave a pending sum."""
    return Rule(reduction(input.ndim, normal_dims(dim, input.ndim), keepdim))


@sharded("mean")
def mean(input: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Rule:
    """Mean over dims: a local sum divided by the number of elements of the whole tensor, so uneven shards count right."""
    dims = normal_dims(dim, input.ndim)
    if not (dtype or input.dtype).is_floating_point:
        raise RuntimeError("mean(): could not infer output dtype. Input dtype must be a floating point dtype")
    count = math.prod(input.shape[d] for d in dims)

    def call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], resolved: Any) -> torch.Tensor:
        if resolved.targets[0].local_shape == resolved.targets[0].shape:
            return func(*args, **kwargs)
        total = torch.sum(args[0], dims, keepdim=keepdim, dtype=dtype)
        return total / count

    return Rule(reduction(input.ndim, dims, keepdim), call=call)


def _extreme(op: ReduceOp) -> Any:
    def rule(input: Any, dim: Any = (), keepdim: bool = False) -> Rule:
        dims = normal_dims(dim, input.ndim)
        neutral = _neutral(op, input.dtype)

        def call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], resolved: Any) -> torch.Tensor:
            local = args[0]
            if any(local.shape[d] == 0 for d in dims):
                shape = resolved.outputs[0].local_shape
                return local.new_full(shape, neutral) + local.sum()
            return func(*args, **kwargs)

        return Rule(reduction(input.ndim, dims, keepdim, op), call=call)

    return rule


def _neutral(op: ReduceOp, dtype: torch.dtype) -> Any:
    if dtype == torch.bool:
        return op is ReduceOp.MIN
    if dtype.is_floating_point:
        return math.inf if op is ReduceOp.MIN else -math.inf
    info = torch.iinfo(dtype)
    return info.max if op is ReduceOp.MIN else info.min


register("amax", ShardedOp(_extreme(ReduceOp.MAX), dtypes=True))
register("amin", ShardedOp(_extreme(ReduceOp.MIN), dtypes=True))


@sharded("max min median mode kthvalue", dtypes=True)
def _with_indices(input: Any, *args: Any, **kwargs: Any) -> Rule:
    """Value and index along one dim, which must be whole: a local index would be a wrong one."""
    position = 1 if kwargs.pop("k", None) is not None else 0
    numbers = [a for a in args if not isinstance(a, bool)]
    dim = kwargs.get("dim", numbers[position] if len(numbers) > position else -1)
    keepdim = kwargs.get("keepdim", any(a is True for a in args))
    return Rule(whole_reduction(input.ndim, normal_dims(dim, input.ndim), keepdim, 2))


_max_along, _full_max = HANDLERS[torch.max], HANDLERS[torch.amax]
_full_min = HANDLERS[torch.amin]


@handles("max min")
def _max(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`max(x)`, `max(x, dim)` and `max(x, y)` are three functions under one name."""
    is_max = func.__name__ == "max"
    if len(args) == 1 and not kwargs:
        return _full_max(torch.amax, args, {}) if is_max else _full_min(torch.amin, args, {})
    other = args[1] if len(args) > 1 else kwargs.get("other")
    if isinstance(other, torch.Tensor):
        return (torch.maximum if is_max else torch.minimum)(args[0], other)
    return _max_along(func, args, kwargs)


def _all_any(op: ReduceOp) -> Any:
    def rule(input: Any, dim: Any = None, keepdim: bool = False) -> Rule:
        return Rule(reduction(input.ndim, normal_dims(dim, input.ndim), keepdim, op))

    return rule


register("all", ShardedOp(_all_any(ReduceOp.ALL)))
register("any", ShardedOp(_all_any(ReduceOp.ANY)))


@sharded("prod var std logsumexp argmax argmin norm aminmax count_nonzero")
def _whole(input: Any, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Rule:
    """Reductions whose dims must be whole."""
    if isinstance(dim, bool):
        dim = None
    dims = kwargs.get("dim", dim)
    return Rule(whole_reduction(input.ndim, normal_dims(dims, input.ndim), keepdim))


@sharded("norm")
def _norm(input: Any, p: Any = "fro", dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Rule:
    """Norm over dims, which must be whole."""
    return Rule(whole_reduction(input.ndim, normal_dims(dim, input.ndim), keepdim))


@sharded("vector_norm")
def _vector_norm(x: Any, ord: Any = 2, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Rule:
    """Norm over dims, which must be whole."""
    return Rule(whole_reduction(x.ndim, normal_dims(dim, x.ndim), keepdim))


@sharded("softmax log_softmax softmin cumsum cumprod logcumsumexp")
def _along(input: Any, dim: Any = None, *args: Any, **kwargs: Any) -> Rule:
    """Functions along one dim, which must be whole."""
    return Rule(rowwise((input.ndim,), (dim % input.ndim,)))


@sharded("sort argsort")
def _sort(input: Any, dim: int = -1, *args: Any, **kwargs: Any) -> Rule:
    """Sorting along one dim, which must be whole."""
    return Rule(rowwise((input.ndim,), (kwargs.get("dim", dim) % input.ndim,)))


@sharded("topk")
def _topk(input: Any, k: int, dim: int = -1, *args: Any, **kwargs: Any) -> Rule:
    """Largest values and their indices along one dim, which must be whole."""
    return Rule(rowwise((input.ndim,), (dim % input.ndim,), 2))


@sharded("tril triu", values=False)
def _triangle(input: Any, diagonal: int = 0) -> Rule:
    """Triangles of matrices, which must be whole."""
    return Rule(rowwise((input.ndim,), (input.ndim - 2, input.ndim - 1), linear=True))


@sharded("flip roll")
def _moved(input: Any, *args: Any, **kwargs: Any) -> Rule:
    """Elements moved within the tensor, which must be whole along all dims."""
    return Rule(rowwise((input.ndim,), range(input.ndim), linear=True))


@handles("equal")
def _equal(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether all elements are equal: one answer for all ranks."""
    a, b = args
    return tuple(a.shape) == tuple(b.shape) and bool((a == b).all())


@handles("allclose")
def _allclose(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether all elements are close: one answer for all ranks."""
    return bool(torch.isclose(*args, **kwargs).all())
