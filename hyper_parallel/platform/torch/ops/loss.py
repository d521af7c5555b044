# SPDX-License-Identifier: Apache-2.0
"""Cross entropy, also with classes split over ranks: logits are never gathered."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from hyper_parallel.core.layout import Layout
from hyper_parallel.core.shard.rules.index import cross_entropy as cross_entropy_rule
from hyper_parallel.platform.torch.autograd import move, transfer
from hyper_parallel.platform.torch.dispatch import (
    NoRuleError,
    Resolved,
    Rule,
    ShardedOp,
    handles,
    register,
    sharded,
)
from hyper_parallel.platform.torch.dtensor import TorchDTensor


def _losses(
    input: Any,
    target: Any,
    weight: Any = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Rule:
    class_dim = 0 if input.ndim == 1 else 1
    indices = target.ndim == input.ndim - 1
    rule = cross_entropy_rule(input.ndim, class_dim=class_dim, has_weight=weight is not None, target_is_classes=indices)
    shape = tuple(s for i, s in enumerate(input.shape) if i != class_dim)
    return Rule(rule, call=_local_losses, shapes=(shape,))


def _local_losses(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], resolved: Resolved) -> torch.Tensor:
    logits, target, weight, ignore_index, label_smoothing = args
    spec = resolved.targets[0]
    class_dim = 0 if logits.dim() == 1 else 1
    if not spec.layout.dims[class_dim]:
        return F.cross_entropy(
            logits, target, weight, ignore_index=ignore_index, reduction="none", label_smoothing=label_smoothing
        )
    rows = logits.movedim(class_dim, -1)
    log_probs = _SplitLogSoftmax.apply(rows, spec.layout, spec.shape, class_dim)
    start, stop = spec.layout.box(spec.shape, spec.layout.mesh.get_rank())[class_dim]
    split = Split(spec.layout, spec.layout.dims[class_dim])
    mine = weight[start:stop] if weight is not None else None
    if target.dim() == logits.dim():
        picked = target.movedim(class_dim, -1).to(log_probs.dtype)
        if label_smoothing:
            picked = picked * (1 - label_smoothing) + label_smoothing / spec.shape[class_dim]
        scaled = log_probs * picked if mine is None else log_probs * picked * mine
        return -split.sum(scaled.sum(-1))
    here = (target >= start) & (target < stop) & (target != ignore_index)
    valid = target != ignore_index
    known = ((target >= 0) & (target < spec.shape[class_dim])) | ~valid
    # A class that no rank has is out of range here too; so is it where there is but the one column put in for none.
    index = torch.where(here, target - start, torch.where(known, 0, spec.shape[class_dim]))
    columns = log_probs if stop > start else F.pad(log_probs, (0, 1))
    zero = log_probs.new_zeros(())
    losses = -split.sum(torch.where(here, columns.gather(-1, index.unsqueeze(-1)).squeeze(-1), zero))
    if weight is not None:
        losses = losses * weight[torch.where(valid, target, 0)]
    if label_smoothing:
        smooth = -split.sum((log_probs if mine is None else log_probs * mine).sum(-1))
        losses = losses * (1 - label_smoothing) + smooth * (label_smoothing / spec.shape[class_dim])
    return torch.where(valid, losses, zero)


class Split:
    """Reductions of per-row values over the axes that split the classes."""

    def __init__(self, layout: Layout, axes: tuple[str, ...]) -> None:
        self.mesh = layout.mesh
        self.axes = axes

    def reduce(self, rows: torch.Tensor, op: str) -> torch.Tensor:
        """`rows` of all ranks combined; not differentiable."""
        whole = Layout(self.mesh, ((),) * rows.dim())
        return transfer(rows, whole.with_partial(*self.axes, op=op), whole, tuple(rows.shape))

    def sum(self, rows: torch.Tensor, *, for_parts: bool = False) -> torch.Tensor:
        """The sum over ranks. `for_parts`: each rank goes on to use it with its own part of the classes."""
        whole = Layout(self.mesh, ((),) * rows.dim())
        pending = whole.with_partial(*self.axes)
        return move(rows, pending, whole, tuple(rows.shape), pending if for_parts else None)


class _SplitLogSoftmax(torch.autograd.Function):
    """log_softmax over a last dim split over ranks: two reductions of one value per row, no logits moved.

    The gradient is `g - softmax * sum(g)` with the sum over all ranks, so it is right for any use of the result.
    """

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, layout: Layout, shape: tuple[int, ...], class_dim: int) -> torch.Tensor:
        split = Split(layout, layout.dims[class_dim])
        wide = rows.float() if rows.dtype in (torch.float16, torch.bfloat16) else rows
        top = wide.amax(-1) if wide.shape[-1] else wide.new_full(wide.shape[:-1], -torch.inf)
        shifted = wide - split.reduce(top, "max").unsqueeze(-1)
        total = split.reduce(shifted.exp().sum(-1), "sum")
        out = shifted - total.log().unsqueeze(-1)
        ctx.save_for_backward(out)
        ctx.split, ctx.dtype = split, rows.dtype
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        (out,) = ctx.saved_tensors
        total = ctx.split.sum(grad.sum(-1), for_parts=True)
        return (grad - out.exp() * total.unsqueeze(-1)).to(ctx.dtype), None, None, None


_losses_op = ShardedOp(_losses)


@handles("cross_entropy")
def cross_entropy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Cross entropy with all of torch's options.

    The mean divides by the number (or weight) of the valid targets of the whole batch, however uneven the shards.

    Communication: with split classes three reductions of one value per row; for the mean one of a single value.
    """
    return _cross_entropy(*args, **kwargs)


def _cross_entropy(
    input: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    if size_average is not None or reduce is not None:
        reduction = torch.nn._reduction.legacy_get_string(size_average, reduce)
    losses = _losses_op(F.cross_entropy, (input, target, weight, ignore_index, label_smoothing), {})
    if reduction == "none":
        return losses.to(input.dtype)
    total = losses.sum()
    if reduction == "sum":
        return total.to(input.dtype)
    if not isinstance(target, TorchDTensor):
        target = TorchDTensor(target, Layout(input.device_mesh, ((),) * target.ndim), target.shape)
    return (total / _divisor(target, losses, input, weight, ignore_index)).to(input.dtype)


def _divisor(target: Any, losses: Any, input: Any, weight: Any, ignore_index: int) -> Any:
    """Number of valid targets of the whole batch, or the sum of their class weights."""
    if target.ndim == input.ndim:
        return float(losses.numel())
    valid = target.detach() != ignore_index
    if weight is None:
        counts = valid
    else:
        with torch.no_grad():
            full = weight.full_tensor() if isinstance(weight, TorchDTensor) else weight
            local = torch.where(valid._local, full[torch.where(valid._local, target._local, 0)], 0)
            counts = TorchDTensor(local, valid.layout, valid.shape)
    return counts.sum().redistribute()


@sharded("nll_loss")
def nll_loss(input: Any, target: Any, weight: Any = None, *args: Any, **kwargs: Any) -> Rule:
    """Negative log likelihood: whole on every rank."""
    from hyper_parallel.core.shard.factor_rule import WHOLE, FactorRule

    operands = [x for x in (input, target, weight) if x is not None]
    dims = tuple(tuple(f"o{i}d{j}" for j in range(x.ndim)) for i, x in enumerate(operands))
    shape = target.shape if kwargs.get("reduction", "mean") == "none" else ()
    out = tuple(f"r{j}" for j in range(len(shape)))
    return Rule(FactorRule(dims, (out,), {n: WHOLE for d in dims for n in d}))


def _mse(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Squared or absolute error, reduced over the whole tensor."""
    return _error(func, *args, **kwargs)


def _error(
    func: Any,
    input: Any,
    target: Any,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
    weight: Any = None,
) -> Any:
    if weight is not None:
        raise NoRuleError(
            f"{func.__name__} with weight: it has no rule. Multiply the errors of reduction='none' by it."
        )
    if size_average is not None or reduce is not None:
        reduction = torch.nn._reduction.legacy_get_string(size_average, reduce)
    difference = input - target
    errors = difference.abs() if func.__name__ == "l1_loss" else difference * difference
    return errors if reduction == "none" else errors.mean() if reduction == "mean" else errors.sum()


register("mse_loss l1_loss", _mse)
