# SPDX-License-Identifier: Apache-2.0
"""The one differentiable primitive: redistribute. See Note [Gradients have layouts] in core/dtensor.py."""

from __future__ import annotations

import math
from typing import Any

import torch

from hyper_parallel.core.errors import PartialError
from hyper_parallel.core.layout import Layout
from hyper_parallel.core.placement_types import ReduceOp
from hyper_parallel.core.tensor_redistribution import redistribute_local


def _platform() -> Any:
    from hyper_parallel.platform.torch import platform

    return platform


def transfer(local: torch.Tensor, src: Layout, dst: Layout, shape: tuple[int, ...]) -> torch.Tensor:
    """The local tensor under `dst` of the value that `local` is under `src`; not differentiable."""
    if src is dst:
        return local
    with torch.no_grad():
        return redistribute_local(local.detach(), src, dst, tuple(shape), local.element_size(), _platform())


def move(
    local: torch.Tensor,
    src: Layout,
    dst: Layout,
    shape: tuple[int, ...],
    cotangent: Layout | None = None,
    data: torch.Tensor | None = None,
) -> torch.Tensor:
    """Differentiable redistribution of a local tensor.

    Args:
        local: Local tensor under `src`.
        src: Layout of `local`.
        dst: Layout of the result.
        shape: Global shape.
        cotangent: Layout in which the gradient of the result will arrive. Default: that of `dst`.
        data: The result's values, where they were computed before.

    Communication: one plan src -> dst (none with `data`); backward one plan cotangent -> `src.cotangent`.
    """
    cotangent = cotangent or dst.cotangent
    if not (local.requires_grad and torch.is_grad_enabled()):
        return data if data is not None else transfer(local, src, dst, shape)
    if data is None and src is dst and cotangent is dst.cotangent:
        return local
    extreme = tuple(axis for axis, op in src.partial if not op.is_linear)
    finished = tuple(axis for axis in extreme if dst.op_of(axis) is not src.op_of(axis))
    if finished:
        middle = src.without_partial(*finished)
        local = _FinishExtreme.apply(local, src, middle, tuple(shape))
        return move(local, middle, dst, shape, cotangent, data)
    if data is None:
        data = transfer(local, src, dst, shape)
    return _Redistribute.apply(local, (data,), src, dst, cotangent, tuple(shape))


def anchor(local: torch.Tensor) -> torch.Tensor:
    """A tensor of no memory that stands for `local` in the graph, as it is now.

    Later in-place changes of `local` do not reach it, and it does not keep the data of `local` alive.
    """
    return _Anchor.apply(local)


def avg_factor(layout: Layout) -> int:
    """Product of the sizes of the axes over which an average is pending."""
    return math.prod(layout.mesh.size(a) for a, op in layout.partial if op is ReduceOp.AVG)


class _Anchor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return local.new_empty(()).expand(local.shape)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad


class _Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        local: torch.Tensor,
        data: tuple[torch.Tensor],
        src: Layout,
        dst: Layout,
        cotangent: Layout,
        shape: tuple[int, ...],
    ) -> torch.Tensor:
        ctx.route = (cotangent, src.cotangent, avg_factor(dst) / avg_factor(src), shape)
        # The data come in a tuple so that autograd does not take the result for a view of an input.
        return data[0].detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        cotangent, target, factor, shape = ctx.route
        out = move(grad, cotangent, target, shape)
        if factor != 1:
            out = out * factor
        return out, None, None, None, None, None


class _FinishExtreme(torch.autograd.Function):
    """A pending max or min: the gradient goes to the operands that equal the result, shared evenly among ties."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, local: torch.Tensor, src: Layout, dst: Layout, shape: tuple[int, ...]
    ) -> torch.Tensor:
        ops = {op for _, op in src.partial}
        if not ops <= {ReduceOp.MAX, ReduceOp.MIN}:
            raise PartialError(
                f"backward through a pending {'/'.join(sorted(o.value for o in ops))} of {src}: its gradient is not "
                "defined here. Redistribute the operands first."
            )
        out = transfer(local, src, dst, shape)
        ctx.save_for_backward(local, out)
        ctx.route = (src, dst, shape)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        local, out = ctx.saved_tensors
        src, dst, shape = ctx.route
        axes = tuple(a for a in src.partial_axes if dst.op_of(a) is None)
        hit = (local == out).to(grad.dtype)
        ties = transfer(hit, dst.with_partial(*axes), dst, shape)
        return grad * hit / ties, None, None, None
