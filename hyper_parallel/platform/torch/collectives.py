# SPDX-License-Identifier: Apache-2.0
"""Tensor work and collectives that plans need, on torch and torch.distributed.

Sums of 16-bit values travel in 16 bits and are added in fp32; `avg` is a sum divided once, by us,
since back ends differ in what their AVG means (gloo's reduce-scatter does not divide at all).

Note [Pairs on gloo]
    gloo's all-gather copies in and out, its reduce-scatter is an all-reduce in disguise, and its all-to-all wants one
    packed buffer. Sends and receives between pairs read and write the tensors where they lie: a part that is one block
    of memory is neither packed nor unpacked. For parts of some MB this took half the time of gloo's all-gather. An
    all-reduce in two halves, with our adding between them, takes 1.0 to 1.4 times as long as gloo's and is closer to
    the exact sum.

Note [Who adds]
    Of two fp32 values one addition gives the nearest number. Of more, the CPU adds in float64 and rounds once (float64
    itself with compensation), which costs less than the network; so no sum made here is further from the exact one
    than torch's. Accelerators add in the dtype of the values, 16 bits in fp32, unless `compensated` asks for more.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from hyper_parallel.core.protocols import Reduction, Summation
from hyper_parallel.platform.torch.process_groups import pool

# torch 2.13 renamed them and warns under the old names.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

HALF = (torch.float16, torch.bfloat16)
_TAG = 13
_HALVES_BYTES = 1 << 16
"""Below it, an all-reduce is gloo's own: a second round would double its latency."""
_BLOCK = 1 << 15
"""Elements of a block of a sum in a wider dtype."""
_WIDE = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}
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

    def contiguous(self, x: torch.Tensor) -> torch.Tensor:
        """`x` in row-major order."""
        return x.contiguous()

    def prefers_halves(self, like: torch.Tensor, num_ranks: int) -> bool:
        """Large values on the CPU, where more than two ranks add. See Note [Pairs on gloo]."""
        return num_ranks > 2 and like.device.type == "cpu" and like.nbytes >= _HALVES_BYTES


# -- sums -----------------------------------------------------------------------------------------


def combine(parts: Sequence[torch.Tensor], reduction: Reduction) -> torch.Tensor:
    """The reduction of equal-shaped `parts`, in their order, as a new tensor of their dtype. They are not changed.

    16-bit sums are made in fp32, and divided and rounded once.
    """
    match reduction.op:
        case "sum":
            return _sum(parts, reduction)
        case "max":
            return _fold(torch.maximum, parts)
        case "min":
            return _fold(torch.minimum, parts)
        case "prod":
            wide = [part.float() for part in parts] if parts[0].dtype in HALF else parts
            return _fold(torch.mul, wide).to(parts[0].dtype)
        case "all":
            return _fold(torch.logical_and, parts)
        case "any":
            return _fold(torch.logical_or, parts)
    raise AssertionError(reduction)


def _fold(function: Callable[..., torch.Tensor], parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return functools.reduce(function, parts) if len(parts) > 1 else parts[0].clone()


def _sum(parts: Sequence[torch.Tensor], reduction: Reduction) -> torch.Tensor:
    first = parts[0]
    dtype = first.dtype
    # See Note [Who adds].
    is_careful = reduction.summation is Summation.COMPENSATED or (len(parts) > 2 and first.device.type == "cpu")
    if is_careful and dtype in (torch.float64, torch.complex128):
        total = _compensated(parts)
    else:
        wide = _WIDE.get(dtype, dtype) if is_careful or dtype in HALF else dtype
        if wide != dtype and first.device.type == "cpu":
            return _sum_in_blocks(parts, wide, reduction.divisor)
        total = first.to(wide, copy=True)
        for part in parts[1:]:
            total += part
    if reduction.divisor > 1:
        total = total / reduction.divisor
    return total.to(dtype)


def _sum_in_blocks(parts: Sequence[torch.Tensor], wide: torch.dtype, divisor: int) -> torch.Tensor:
    """A sum in a wider dtype, block by block, so that the wide values stay in the cache."""
    flat = [part.reshape(-1) for part in parts]
    out = torch.empty_like(flat[0])
    room = flat[0].new_empty(min(out.numel(), _BLOCK), dtype=wide)
    for start in range(0, out.numel(), _BLOCK):
        stop = min(start + _BLOCK, out.numel())
        total = room[: stop - start].copy_(flat[0][start:stop])
        for part in flat[1:]:
            total += part[start:stop]
        if divisor > 1:
            total /= divisor
        out[start:stop] = total
    return out.view(parts[0].shape)


def _compensated(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """A sum whose rounding errors are summed beside it and added at the end (Neumaier 1974, by Knuth's two-sum)."""
    total, lost = parts[0].clone(), torch.zeros_like(parts[0])
    for part in parts[1:]:
        new = total + part
        kept = new - total
        lost += (total - (new - kept)) + (part - kept)
        total = new
    return torch.where(torch.isfinite(lost), total + lost, total)


# -- under way ------------------------------------------------------------------------------------


class Pending:
    """A collective under way.

    Args:
        works: What torch gave for it.
        finish: What is left to do when they have ended; returns the result.
        tensors: What they read and write: gloo's sends and receives do not keep it alive.
    """

    __slots__ = ("_finish", "_tensors", "_works")

    def __init__(self, works: Sequence[Any], finish: Callable[[], Any], *tensors: Any) -> None:
        self._works = works
        self._finish = finish
        self._tensors = tensors

    def wait(self) -> Any:
        """The result, once the data are there (with streams: once the current one will have them)."""
        works, self._works = self._works, ()
        for work in works:
            work.wait()
        self._tensors = ()
        return self._finish()

    def __del__(self) -> None:
        if self._works:
            _abandoned.append((self._works, self._tensors))


_abandoned: list[tuple[Sequence[Any], tuple[Any, ...]]] = []
"""Collectives that nobody waited for. A receive that is dropped would be taken back, and its sender wait for ever."""


def _settle_abandoned() -> None:
    """Wait for what nobody waited for. The other ranks have issued it before what is issued next, so they come."""
    while _abandoned:
        works, _ = _abandoned.pop()
        for work in works:
            work.wait()


def _nothing() -> None:
    return None


class TorchCollectives:
    """`Collectives` on torch.distributed."""

    def all_reduce(self, x: torch.Tensor, reduction: Reduction, ranks: tuple[int, ...]) -> Pending:
        """The reduction of all `x`, on every rank; in the backend's order and precision."""
        group = pool.group(ranks)
        op, divisor = reduction.op, reduction.divisor
        if op in _BOOL_OP:
            wire = x.to(torch.uint8, copy=True).contiguous()
            work = dist.all_reduce(wire, _BOOL_OP[op], group=group, async_op=True)
            return Pending([work], lambda: wire.to(x.dtype))
        out = x.clone(memory_format=torch.contiguous_format)
        work = dist.all_reduce(out, _DIST_OP[op], group=group, async_op=True)
        return Pending([work], lambda: out if divisor == 1 else (out / divisor).to(out.dtype))

    def reduce_scatter(
        self, parts: Sequence[torch.Tensor], reduction: Reduction, ranks: tuple[int, ...], *, is_equal: bool
    ) -> Pending:
        """The reduction of this rank's part over all ranks."""
        group = pool.group(ranks)
        first = parts[0]
        is_native = is_equal and reduction.op in ("sum", "max", "min") and first.dtype not in HALF
        if is_native and reduction.summation is Summation.FAST and not _is_gloo(group, first):
            return _native_reduce_scatter(parts, reduction, group)
        own = parts[group.rank()]
        wire = [part.to(torch.uint8) for part in parts] if own.dtype == torch.bool else parts
        received = wire[0].new_empty((len(ranks), *own.shape)).unbind()
        exchanged = self._exchange(wire, received, group)

        def finish() -> torch.Tensor:
            exchanged.wait()
            # All in rank order, so that every rank and every run adds in the same order.
            operands = [own if i == group.rank() else piece.to(own.dtype) for i, piece in enumerate(received)]
            return combine(operands, reduction)

        return Pending([], finish)

    def all_gather(
        self, x: torch.Tensor, outs: Sequence[torch.Tensor], ranks: tuple[int, ...], *, is_equal: bool
    ) -> Pending:
        """`x` of every rank in `outs`."""
        group = pool.group(ranks)
        x = x.contiguous()
        if not is_equal or _is_gloo(group, x):
            return self.all_to_all([x] * len(ranks), outs, ranks)
        block = one_block(outs)
        whole = block if block is not None else x.new_empty((len(ranks), *x.shape))
        work = all_gather_single(whole.view(-1), x.view(-1), group=group, async_op=True)
        return Pending([work], _nothing if block is not None else lambda: _copy_all(outs, whole.unbind()))

    def all_to_all(
        self, sends: Sequence[torch.Tensor], outs: Sequence[torch.Tensor], ranks: tuple[int, ...]
    ) -> Pending:
        """What every rank sends to this one in `outs`."""
        group = pool.group(ranks)
        own = group.rank()
        exchanged = self._exchange(sends, outs, group)
        if outs[own].numel():
            outs[own].copy_(sends[own])
        return exchanged

    def _exchange(self, sends: Sequence[torch.Tensor], outs: Sequence[torch.Tensor], group: Any) -> Pending:
        """Parts of other ranks in `outs`; this rank's own is left alone."""
        _settle_abandoned()
        own = group.rank()
        packed = [part if part.is_contiguous() or i == own else part.contiguous() for i, part in enumerate(sends)]
        landing = [out if out.is_contiguous() or i == own else out.new_empty(out.shape) for i, out in enumerate(outs)]
        if _is_gloo(group, sends[0]):
            works = _pairwise(packed, landing, group)
        else:
            none = sends[0].new_empty(0)
            packed[own], landing[own] = none, none.clone()
            works = [dist.all_to_all(landing, packed, group=group, async_op=True)]
        apart = [(out, piece) for out, piece in zip(outs, landing, strict=True) if out is not piece and piece.numel()]
        finish = (lambda: _copy_all(*zip(*apart, strict=True))) if apart else _nothing
        return Pending(works, finish, packed, landing)

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


def _is_gloo(group: Any, x: torch.Tensor) -> bool:
    """Whether gloo serves tensors like `x` in a group, which may have a backend per device type."""
    return _backends(dist.get_backend_config(group)).get(x.device.type) == "gloo"


@functools.lru_cache(maxsize=64)
def _backends(config: str) -> dict[str, str]:
    """`cpu:gloo,cuda:nccl` by device type."""
    return dict(part.split(":") for part in config.split(","))


def _native_reduce_scatter(parts: Sequence[torch.Tensor], reduction: Reduction, group: Any) -> Pending:
    block = one_block(parts)
    wire = torch.stack(tuple(parts)) if block is None else block
    out = wire.new_empty(parts[0].shape)
    work = reduce_scatter_single(out.view(-1), wire.view(-1), _DIST_OP[reduction.op], group=group, async_op=True)
    divisor = reduction.divisor
    return Pending([work], lambda: out if divisor == 1 else (out / divisor).to(out.dtype))


def one_block(parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Equal parts that lie one behind the other as one flat tensor without a copy, else None."""
    first = parts[0]
    numel, start = first.numel(), first.storage_offset()
    base = first.untyped_storage().data_ptr()
    for i, part in enumerate(parts):
        in_place = part.storage_offset() == start + i * numel and part.untyped_storage().data_ptr() == base
        if not (in_place and part.is_contiguous()):
            return None
    return first.as_strided((len(parts) * numel,), (1,), start)


def _copy_all(outs: Sequence[torch.Tensor], pieces: Sequence[torch.Tensor]) -> None:
    for out, piece in zip(outs, pieces, strict=True):
        out.copy_(piece)


def _pairwise(sends: Sequence[torch.Tensor], outs: Sequence[torch.Tensor], group: Any) -> list[Any]:
    """A receive from and a send to every other rank that has or wants something. See Note [Pairs on gloo]."""
    own, num = group.rank(), group.size()
    # Each rank begins with its next neighbour, so that no rank is sent to by all at once.
    order = [(own + step) % num for step in range(1, num)]
    works = [group.recv([outs[i]], i, _TAG) for i in reversed(order) if outs[i].numel()]
    return works + [group.send([sends[i]], i, _TAG) for i in order if sends[i].numel()]
