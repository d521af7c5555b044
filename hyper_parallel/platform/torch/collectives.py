# SPDX-License-Identifier: Apache-2.0
"""Tensor work and collectives that plans need, on torch and torch.distributed.

Sums of 16-bit values travel in 16 bits and are added in fp32; `avg` is a sum divided once, by us,
since back ends differ in what their AVG means (gloo's reduce-scatter does not divide at all).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from hyper_parallel.platform.torch.process_groups import pool

# torch 2.13 renamed them and warns under the old names.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_HALF = (torch.float16, torch.bfloat16)
_DIST_OP = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "prod": dist.ReduceOp.PRODUCT,
}
# all and any have no reduction of their own in torch.distributed; on bytes they are min and max.
_BOOL_OP = {"all": dist.ReduceOp.MIN, "any": dist.ReduceOp.MAX}


class TorchOps:
    """`TensorOps` on torch tensors."""

    def reshape(self, x: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """Contiguous `x` with other sizes."""
        return x.view(tuple(shape))

    def slice(self, x: torch.Tensor, box: tuple[tuple[int, int], ...]) -> torch.Tensor:
        """A view of the part of `x` inside `box`."""
        for dim, (start, stop) in enumerate(box):
            if stop - start != x.shape[dim]:
                x = x.narrow(dim, start, stop - start)
        return x

    def empty(self, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        """An uninitialised contiguous tensor."""
        return torch.empty(tuple(shape), dtype=like.dtype, device=like.device)

    def zeros(self, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        """A contiguous tensor of zeros."""
        return torch.zeros(tuple(shape), dtype=like.dtype, device=like.device)

    def write(self, x: torch.Tensor, box: tuple[tuple[int, int], ...], value: torch.Tensor) -> None:
        """Copy `value` into the part of `x` inside `box`."""
        self.slice(x, box).copy_(value)

    def scale(self, x: torch.Tensor, factor: float) -> torch.Tensor:
        """`x * factor`, in the dtype of `x`."""
        return x * factor if x.is_floating_point() or x.is_complex() else (x * factor).to(x.dtype)

    def reduce(self, parts: Sequence[torch.Tensor], op: str) -> torch.Tensor:
        """Combine `parts`, which are not changed."""
        return _reduce_stacked(torch.stack(tuple(parts)), op)

    def contiguous(self, x: torch.Tensor) -> torch.Tensor:
        """`x` in row-major order."""
        return x.contiguous()


def _reduce_stacked(parts: torch.Tensor, op: str) -> torch.Tensor:
    """Reduce (n, *shape) over its first dim."""
    match op:
        case "sum" | "avg":
            wide = parts.float() if parts.dtype in _HALF else parts
            total = wide.sum(0, dtype=wide.dtype if wide.dtype != torch.bool else torch.int64)
            if op == "avg":
                total = total / parts.shape[0]
            return total.to(parts.dtype)
        case "max":
            return parts.amax(0)
        case "min":
            return parts.amin(0)
        case "prod":
            wide = parts.float() if parts.dtype in _HALF else parts
            return wide.prod(0).to(parts.dtype)
        case "all":
            return parts.all(0)
        case "any":
            return parts.any(0)
    raise AssertionError(op)


class TorchCollectives:
    """`Collectives` on torch.distributed. No method changes its input."""

    def all_reduce(self, x: torch.Tensor, op: str, ranks: tuple[int, ...]) -> torch.Tensor:
        """The reduction of all `x`, on every rank."""
        if x.dtype in _HALF and op in ("sum", "avg", "prod"):
            return self._all_reduce_half(x, op, ranks)
        group = pool.group(ranks)
        if op in _BOOL_OP:
            out = x.to(torch.uint8, copy=True).contiguous()
            dist.all_reduce(out, _BOOL_OP[op], group=group)
            return out.to(x.dtype)
        out = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(out, _DIST_OP["sum" if op == "avg" else op], group=group)
        return out / len(ranks) if op == "avg" else out

    def _all_reduce_half(self, x: torch.Tensor, op: str, ranks: tuple[int, ...]) -> torch.Tensor:
        """Exchange pieces in 16 bits, combine them in fp32, gather the results in 16 bits."""
        num, numel = len(ranks), x.numel()
        per_rank = math.ceil(numel / num)
        flat = x.new_zeros(per_rank * num)
        flat[:numel] = x.reshape(-1)
        mine = self.reduce_scatter(flat.view(num, per_rank), op, ranks)
        return self.all_gather(mine, ranks).view(-1)[:numel].view(x.shape)

    def reduce_scatter(self, parts: torch.Tensor, op: str, ranks: tuple[int, ...]) -> torch.Tensor:
        """(n, *shape) -> (*shape): the reduction of this rank's part over all ranks."""
        group = pool.group(ranks)
        native = op in ("sum", "avg", "max", "min") and parts.dtype not in _HALF
        if native and dist.get_backend(group) != "gloo":
            out = parts.new_empty(parts.shape[1:])
            kind = _DIST_OP["sum" if op == "avg" else op]
            reduce_scatter_single(out, parts.contiguous(), kind, group=group)
            return out / len(ranks) if op == "avg" else out
        # gloo has no reduce-scatter (torch emulates it by an all-reduce), and 16-bit sums are ours.
        wire = parts.to(torch.uint8) if parts.dtype == torch.bool else parts.contiguous()
        received = torch.empty_like(wire)
        dist.all_to_all_single(received, wire, group=group)
        return _reduce_stacked(received.to(parts.dtype), op)

    def all_gather(self, x: torch.Tensor, ranks: tuple[int, ...]) -> torch.Tensor:
        """(*shape) -> (n, *shape)."""
        group = pool.group(ranks)
        out = torch.empty((len(ranks), *x.shape), dtype=x.dtype, device=x.device)
        all_gather_single(out.view(-1), x.contiguous().view(-1), group=group)
        return out

    def all_to_all(
        self,
        sends: Sequence[torch.Tensor],
        recv_shapes: Sequence[tuple[int, ...]],
        ranks: tuple[int, ...],
    ) -> list[torch.Tensor]:
        """Piece i goes to rank i of the group; one packed buffer each way."""
        group = pool.group(ranks)
        send_sizes = [piece.numel() for piece in sends]
        recv_sizes = [math.prod(shape) for shape in recv_shapes]
        packed = torch.cat([piece.reshape(-1) for piece in sends])
        received = packed.new_empty(sum(recv_sizes))
        dist.all_to_all_single(received, packed, recv_sizes, send_sizes, group=group)
        pieces = received.split(recv_sizes)
        return [piece.view(shape) for piece, shape in zip(pieces, recv_shapes, strict=True)]

    def broadcast(self, x: torch.Tensor, source: int, ranks: tuple[int, ...]) -> torch.Tensor:
        """`x` of the rank at position `source` of the group, on every rank."""
        out = x.clone(memory_format=torch.contiguous_format)
        dist.broadcast(out, src=ranks[source], group=pool.group(ranks))
        return out

    def all_gather_object(self, obj: Any, ranks: tuple[int, ...]) -> list[Any]:
        """One small picklable value per rank, in group order."""
        out: list[Any] = [None] * len(ranks)
        dist.all_gather_object(out, obj, group=pool.group(ranks))
        return out
