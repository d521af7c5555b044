# SPDX-License-Identifier: Apache-2.0
"""The one differentiable primitive: redistribute. See Note [Gradients have layouts] in core/dtensor.py."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from hyper_parallel.core.errors import PartialError
from hyper_parallel.core.layout import Layout
from hyper_parallel.core.placement_types import ReduceOp
from hyper_parallel.core.protocols import Summation
from hyper_parallel.core.tensor_redistribution import Topology, redistribute_local


@dataclass(frozen=True, slots=True)
class Manner:
    """How a redistribution is done; the same on every rank.

    Attributes:
        summation: How carefully sums are made, in backward too.
        topology: What communication is taken to cost. Default: that of the mesh.
        max_bytes: Most bytes to hold at once. Default: any number.
        backward_dtype: Dtype in which the gradient travels. Default: as it arrives.
    """

    summation: Summation = Summation.FAST
    topology: Topology | None = None
    max_bytes: int | None = None
    backward_dtype: torch.dtype | None = None


PLAIN = Manner()


def manner_of(backward_dtype: torch.dtype | None, options: dict[str, Any]) -> Manner:
    """The manner that the keywords of `redistribute` ask for.

    Raises:
        TypeError: another keyword.
    """
    unknown = next((name for name in options if name not in _OPTIONS), None)
    if unknown is not None:
        raise TypeError(f"redistribute({unknown}=...): no such argument. Use one of {', '.join(_OPTIONS)}.")
    if options.get("compensated"):
        summation = Summation.COMPENSATED
    else:
        summation = Summation.ORDERED if options.get("deterministic") else Summation.FAST
    return Manner(summation, options.get("topology"), options.get("max_bytes"), backward_dtype)


_OPTIONS = ("deterministic", "compensated", "topology", "max_bytes")


def _platform() -> Any:
    from hyper_parallel.platform.torch import platform

    return platform


def transfer(
    local: torch.Tensor, src: Layout, dst: Layout, shape: tuple[int, ...], manner: Manner = PLAIN
) -> torch.Tensor:
    """The local tensor under `dst` of the value that `local` is under `src`; not differentiable."""
    if src is dst:
        return local
    with torch.no_grad():
        return redistribute_local(
            local.detach(),
            src,
            dst,
            tuple(shape),
            local.element_size(),
            _platform(),
            topology=manner.topology,
            max_bytes=manner.max_bytes,
            summation=manner.summation,
        )


def move(
    local: torch.Tensor,
    src: Layout,
    dst: Layout,
    shape: tuple[int, ...],
    cotangent: Layout | None = None,
    data: torch.Tensor | None = None,
    manner: Manner = PLAIN,
) -> torch.Tensor:
    """Differentiable redistribution of a local tensor.

    Args:
        local: Local tensor under `src`.
        src: Layout of `local`.
        dst: Layout of the result.
        shape: Global shape.
        cotangent: Layout in which the gradient of the result will arrive. Default: that of `dst`.
        data: The result's values, where they were computed before.
        manner: How it is done.

    Communication: one plan src -> dst (none with `data`); backward one plan cotangent -> `src.cotangent`.
    """
    cotangent = cotangent or dst.cotangent
    if not (local.requires_grad and torch.is_grad_enabled()):
        return data if data is not None else transfer(local, src, dst, shape, manner)
    if data is None and src is dst and cotangent is dst.cotangent:
        return local
    extreme = tuple(axis for axis, op in src.partial if not op.is_linear)
    finished = tuple(axis for axis in extreme if dst.op_of(axis) is not src.op_of(axis))
    if finished:
        middle = src.without_partial(*finished)
        local = _FinishExtreme.apply(local, src, middle, tuple(shape))
        return move(local, middle, dst, shape, cotangent, data, manner)
    shape = tuple(shape)
    if data is None:
        data = transfer(local, src, dst, shape, manner)
    there = _Map(src, dst, shape, 1.0, manner)
    back = _Map(cotangent, src.cotangent, shape, avg_factor(dst) / avg_factor(src), manner)
    return _Redistribute.apply(local, (data,), there, back)


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
    def forward(ctx: Any, local: torch.Tensor) -> torch.Tensor:
        return local.new_empty(()).expand(local.shape)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


@dataclass(frozen=True, slots=True)
class _Map:
    """A linear map between the local tensors of all ranks: a redistribution, times a number."""

    src: Layout
    dst: Layout
    shape: tuple[int, ...]
    factor: float
    manner: Manner

    def __call__(self, local: torch.Tensor) -> torch.Tensor:
        dtype = local.dtype
        wire = local if self.manner.backward_dtype is None else local.to(self.manner.backward_dtype)
        out = transfer(wire, self.src, self.dst, self.shape, self.manner).to(dtype)
        return out if self.factor == 1 else out * self.factor


class _Redistribute(torch.autograd.Function):
    """The map `there`; its gradient goes the way of the adjoint map `back`, whose own gradient is `there` again."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, data: tuple[torch.Tensor], there: _Map, back: _Map) -> torch.Tensor:
        ctx.maps = (there, back)
        # The data come in a tuple so that autograd does not take the result for a view of an input.
        return data[0].detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        there, back = ctx.maps
        out = back(grad)
        if grad.requires_grad and torch.is_grad_enabled():
            out = _Redistribute.apply(grad, (out,), back, there)
        return out, None, None, None


class _FinishExtreme(torch.autograd.Function):
    """A pending max or min: the gradient goes to the operands that equal the result, shared evenly among ties."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, src: Layout, dst: Layout, shape: tuple[int, ...]) -> torch.Tensor:
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
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        local, out = ctx.saved_tensors
        src, dst, shape = ctx.route
        axes = tuple(a for a in src.partial_axes if dst.op_of(a) is None)
        hit = (local == out).to(grad.dtype)
        ties = transfer(hit, dst.with_partial(*axes), dst, shape)
        grad = move(grad, dst.cotangent, dst.cotangent, shape, dst.cotangent.with_partial(*axes))
        return grad * (hit / ties), None, None, None
