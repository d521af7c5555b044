# SPDX-License-Identifier: Apache-2.0
"""Sums, means, extremes, and ops along a dim that must be whole."""

from __future__ import annotations

import math
from typing import Any

import torch

from hyper_parallel.core.device_mesh import DeviceMesh
from hyper_parallel.core.layout import Layout
from hyper_parallel.core.placement_types import ReduceOp
from hyper_parallel.core.shard.factor_rule import ONE, FactorRule
from hyper_parallel.core.shard.rules.reduction import (
    normal_dims,
    reduction,
    rowwise,
    whole_reduction,
)
from hyper_parallel.platform.torch.autograd import move, transfer
from hyper_parallel.platform.torch.dispatch import HANDLERS, Handler, Rule, ShardedOp, handles, register, sharded


@sharded("sum nansum")
def sum_(input: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Rule:
    """Sum over dims; sharded ones leave a pending sum."""
    return Rule(reduction(input.ndim, normal_dims(dim, input.ndim), keepdim))


@sharded("mean", dtypes=True)
def mean(input: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Rule:
    """Mean over dims: a local sum over the number of elements of the whole tensor, so uneven shards count right."""
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


def _neutral(op: ReduceOp, dtype: torch.dtype) -> Any:
    if dtype == torch.bool:
        return op is ReduceOp.MIN
    if dtype.is_floating_point:
        return math.inf if op is ReduceOp.MIN else -math.inf
    info = torch.iinfo(dtype)
    return info.max if op is ReduceOp.MIN else info.min


def _local_extreme(func: Any, local: torch.Tensor, dims: tuple[int, ...], keepdim: bool, op: ReduceOp) -> torch.Tensor:
    """`amax` or `amin` of a piece, which may have no element along `dims`."""
    if all(local.shape[d] for d in dims):
        return func(local, dims, keepdim)
    kept = [1 if d in dims else n for d, n in enumerate(local.shape) if keepdim or d not in dims]
    return local.new_full(kept, _neutral(op, local.dtype))


def _extreme(op: ReduceOp) -> Any:
    """Extremes over dims; sharded ones leave a pending extreme."""

    def rule(input: Any, dim: Any = (), keepdim: bool = False) -> Rule:
        dims = normal_dims(dim, input.ndim)

        def call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], resolved: Any) -> torch.Tensor:
            return _local_extreme(func, args[0], dims, keepdim, op)

        return Rule(reduction(input.ndim, dims, keepdim, op), call=call)

    return rule


def _extreme_with_gradient(op: ReduceOp) -> Any:
    """As `_extreme`, finished at once: all elements that equal the result share the gradient, on whichever rank."""

    def rule(input: Any, dim: Any = (), keepdim: bool = False) -> Rule:
        dims = normal_dims(dim, input.ndim)

        def call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], resolved: Any) -> torch.Tensor:
            layout = resolved.targets[0].layout
            axes = tuple(axis for d in dims for axis in layout.dims[d])
            if not axes:
                return func(args[0], dims, keepdim)
            out = _SplitExtreme.apply(args[0], func, dims, op, layout.mesh, axes)
            return out if keepdim else out.squeeze(dims)

        names = tuple(f"d{i}" for i in range(input.ndim))
        kept = tuple(ONE if i in dims else name for i, name in enumerate(names) if keepdim or i not in dims)
        return Rule(FactorRule((names,), (kept,)), call=call)

    return rule


class _SplitExtreme(torch.autograd.Function):
    """`amax` or `amin`, keeping dims, of a tensor that `axes` split along the reduced dims."""

    @staticmethod
    def forward(
        ctx: Any,
        local: torch.Tensor,
        func: Any,
        dims: tuple[int, ...],
        op: ReduceOp,
        mesh: DeviceMesh,
        axes: tuple[str, ...],
    ) -> torch.Tensor:
        out = finished(_local_extreme(func, local, dims, True, op), mesh, axes, op)
        ctx.save_for_backward(local, out)
        ctx.split = (dims, mesh, axes)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        local, out = ctx.saved_tensors
        dims, mesh, axes = ctx.split
        hit = (local == out).to(grad.dtype)
        ties = finished(hit.sum(dims, keepdim=True), mesh, axes, ReduceOp.SUM)
        whole = Layout(mesh, ((),) * grad.dim())
        grad = move(grad, whole, whole, tuple(grad.shape), whole.with_partial(*axes))
        return grad * (hit / ties), None, None, None, None, None


def finished(rows: torch.Tensor, mesh: DeviceMesh, axes: tuple[str, ...], op: ReduceOp) -> torch.Tensor:
    """Values of all ranks along `axes` combined; not differentiable."""
    whole = Layout(mesh, ((),) * rows.dim())
    return transfer(rows, whole.with_partial(*axes, op=op), whole, tuple(rows.shape))


def amax_at_once(input: Any, dim: Any = (), keepdim: bool = False) -> Any:
    """`torch.amax` under a name of its own: rules are cached by function."""
    return torch.amax(input, dim, keepdim)


def amin_at_once(input: Any, dim: Any = (), keepdim: bool = False) -> Any:
    """`torch.amin` under a name of its own."""
    return torch.amin(input, dim, keepdim)


def _either_extreme(op: ReduceOp, at_once: Any) -> Handler:
    with_gradient, pending = ShardedOp(_extreme_with_gradient(op)), ShardedOp(_extreme(op))

    def handler(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args[0].requires_grad and torch.is_grad_enabled():
            return with_gradient(at_once, args, kwargs)
        return pending(func, args, kwargs)

    return handler


register("amax", _either_extreme(ReduceOp.MAX, amax_at_once))
register("amin", _either_extreme(ReduceOp.MIN, amin_at_once))


@sharded("max min median nanmedian mode")
def _with_indices(input: Any, dim: int = -1, keepdim: bool = False) -> Rule:
    """Value and index along one dim, which must be whole: a local index would be a wrong one."""
    return Rule(whole_reduction(input.ndim, normal_dims(dim, input.ndim), keepdim, 2))


@sharded("kthvalue")
def _kthvalue(input: Any, k: int, dim: int = -1, keepdim: bool = False) -> Rule:
    """As `_with_indices`."""
    return Rule(whole_reduction(input.ndim, normal_dims(dim, input.ndim), keepdim, 2))


def full_median(input: Any) -> Rule:
    """The median of all elements, which must be whole."""
    return Rule(whole_reduction(input.ndim, normal_dims(None, input.ndim), False))


_median_along, _median_of_all = HANDLERS[torch.median], ShardedOp(full_median)


@handles("median nanmedian")
def _median(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`median(x)` and `median(x, dim)` are two functions under one name."""
    of_all = len(args) == 1 and not kwargs
    return (_median_of_all if of_all else _median_along)(func, args, kwargs)


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


@sharded("prod logsumexp argmax argmin aminmax count_nonzero")
def _whole(input: Any, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Rule:
    """Reductions whose dims must be whole."""
    return Rule(whole_reduction(input.ndim, normal_dims(dim, input.ndim), keepdim))


@sharded("var std")
def _spread(input: Any, *args: Any, keepdim: bool = False, **kwargs: Any) -> Rule:
    """Variances: dims must be whole. The forms are `(unbiased)` and `(dim, unbiased, keepdim)`."""
    dim = kwargs.get("dim", None if not args or isinstance(args[0], bool) else args[0])
    keepdim = args[2] if len(args) > 2 else keepdim
    dims = normal_dims(dim, input.ndim)
    return Rule(whole_reduction(input.ndim, dims, keepdim), call=_nonempty_spread(dims, keepdim))


def _nonempty_spread(dims: tuple[int, ...], keepdim: bool) -> Any:
    def call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], resolved: Any) -> torch.Tensor:
        local = args[0]
        if local.numel() == 0 and math.prod(resolved.targets[0].shape):
            # torch would warn of too few elements, on the ranks alone that own none.
            return local.sum(dims, keepdim=keepdim)
        return func(*args, **kwargs)

    return call


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
def _shifted(input: Any, *args: Any, **kwargs: Any) -> Rule:
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
