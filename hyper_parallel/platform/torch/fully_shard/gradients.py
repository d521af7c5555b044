# SPDX-License-Identifier: Apache-2.0
"""From the gradients of full parameters to those of the shards.

Note [One node per forward]
    The full parameters of a unit come out of one autograd node per forward, `_Gathered`. The engine runs its backward
    when all uses that this backward pass reaches are done: that is the moment to reduce, whatever the control flow,
    the number of forwards or of uses. So that full gradients do not pile up until then, each passes a hook that
    copies it into the unit's flat buffer (the one copy a gradient sees) and hands on a stand-in without memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from hyper_parallel.core.errors import ParamStateError
from hyper_parallel.platform.torch.fully_shard.transfer import Reduction
from hyper_parallel.platform.torch.fully_shard.uses import Uses
from hyper_parallel.platform.torch.process_groups import pool

if TYPE_CHECKING:
    from hyper_parallel.platform.torch.fully_shard.unit import FlatUnit


_FIRST = 2**64 - 1


class GradBuffer:
    """A flat buffer that full gradients are collected in."""

    def __init__(self, unit: FlatUnit, dtype: torch.dtype) -> None:
        self.unit = unit
        self.flat = torch.empty(unit.plan.numel, dtype=dtype, device=unit.shard.device)
        self.used: set[int] = set()

    def add(self, index: int, grad: torch.Tensor) -> None:
        """Put a gradient in its place."""
        view = self.unit.buffer_view(self.flat, index)
        if index in self.used:
            view.add_(grad)
        else:
            view.copy_(grad)
            self.used.add(index)

    def complete(self) -> torch.Tensor:
        """The buffer with zeros wherever no gradient came."""
        plan = self.unit.plan
        for start, stop in plan.holes():
            self.flat[start:stop].zero_()
        for index, param in enumerate(plan.params):
            if index not in self.used:
                self.flat.narrow(0, param.offset, param.numel).zero_()
        return self.flat


class UnitCall:
    """One forward's use of a unit: collects its gradients and says when they are all there."""

    def __init__(self, unit: FlatUnit, dtype: torch.dtype, on_done: Callable[[UnitCall], None]) -> None:
        self.unit = unit
        self.dtype = dtype
        self.on_done = on_done
        self.buffer: GradBuffer | None = None
        self.carried: Callable[[], GradBuffer | None] = lambda: None

    def full_parameters(self) -> list[torch.Tensor]:
        """The unit's full parameters, in the graph where gradients are wanted."""
        leaves = [param.local for param in self.unit.params]
        if not torch.is_grad_enabled() or not any(leaf.requires_grad for leaf in leaves):
            return self.unit.full_parameters()
        wanted = tuple(i for i, leaf in enumerate(leaves) if leaf.requires_grad)
        outputs = _Gathered.apply(self, wanted, *(leaves[i] for i in wanted))
        out = self.unit.full_parameters() if len(wanted) < len(leaves) else list(outputs)
        for i, full in zip(wanted, outputs, strict=True):
            out[i] = self._watched(i, full)
        return out

    def _watched(self, index: int, full: torch.Tensor) -> torch.Tensor:
        view = full.view_as(full)

        def collect(grad: torch.Tensor) -> torch.Tensor:
            if torch.is_grad_enabled() and grad.requires_grad:
                raise ParamStateError(
                    f'backward(create_graph=True) to parameter "{self.unit.params[index].name}": its gradient is '
                    "reduced over ranks and has no graph. Differentiate with respect to inputs only, or leave out "
                    "fully_shard."
                )
            if self.buffer is None:
                self.buffer = self.carried() or GradBuffer(self.unit, self.dtype)
            self.buffer.add(index, grad)
            return grad.new_zeros(()).expand(grad.shape)

        view.register_hook(collect)
        # The engine takes the ready node with the highest number first. This one is as old as the forward and would
        # come last, its gradient waiting; with the number that leaves have, it comes at once.
        view.grad_fn._set_sequence_nr(_FIRST)  # type: ignore[union-attr]
        return view


class _Gathered(torch.autograd.Function):
    """See Note [One node per forward]."""

    @staticmethod
    def forward(ctx: Any, call: UnitCall, wanted: tuple[int, ...], *leaves: torch.Tensor) -> Any:
        ctx.call = call
        ctx.set_materialize_grads(False)
        full = call.unit.full_parameters()
        return tuple(full[i] for i in wanted)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.call.on_done(ctx.call)
        return (None, None, *(None for _ in grads))


class Carried(NamedTuple):
    """HSDP: a reduced shard that still lacks the replicas' share, and which parameters this rank had gradients of."""

    flat: torch.Tensor
    used: set[int]


class UnitReduction:
    """A unit's gradients on their way to the shards.

    Args:
        unit: The unit.
        buffer: Its collected gradients; None if only `carry` is left to be finished.
        replicate_ranks: HSDP: the ranks that hold the same shard.
        all_ranks: The ranks of all shards and replicas.
        factor: What the sum is divided by.
        carry: HSDP: what earlier backwards left.
        all_reduce: Whether to reduce over the replicas now.
    """

    def __init__(
        self,
        unit: FlatUnit,
        buffer: GradBuffer | None,
        *,
        replicate_ranks: tuple[int, ...],
        all_ranks: tuple[int, ...],
        factor: float,
        carry: Carried | None,
        all_reduce: bool,
    ) -> None:
        self.unit = unit
        self.replicate_ranks = replicate_ranks
        self.factor = factor
        self.carry = carry
        used = (set() if buffer is None else buffer.used) | (set() if carry is None else carry.used)
        self._used = used
        self._reduction = None if buffer is None else Reduction(buffer.complete(), unit.ranks, unit.position)
        self._uses = Uses(used, len(unit.params), all_ranks, unit.shard.device) if all_reduce else None

    def finish(self) -> tuple[torch.Tensor, set[int]] | None:
        """Wait, and return the flat gradient shard in the parameters' dtype, and which parameters nobody used.

        None if the replicas' share is put off.
        """
        carry, self.carry = self.carry, None
        if self._reduction is None:
            assert carry is not None
            total = carry.flat
        else:
            total = self._reduction.result()
            if carry is not None:
                total = total.add_(carry.flat)
        if self._uses is None:
            self.carry = Carried(total, self._used)
            return None
        if len(self.replicate_ranks) > 1:
            torch.distributed.all_reduce(total, group=pool.group(self.replicate_ranks))
        if self.factor != 1:
            total = total.div_(self.factor)
        return total.to(self.unit.dtype), self._uses.unused()


def accumulate(unit: FlatUnit, flat: torch.Tensor, unused: set[int]) -> None:
    """Add a reduced gradient shard to the parameters' `.grad`, and run the hooks users put on them."""
    leaves, grads = [], []
    for index, (param, grad) in enumerate(zip(unit.params, unit.grad_views(flat), strict=True)):
        if param.local.requires_grad and index not in unused:
            leaves.append(param.local)
            grads.append(_changed_by_hooks(param.local, grad))
    held = [(leaf.grad, grad) for leaf, grad in zip(leaves, grads, strict=True) if leaf.grad is not None]
    with torch.no_grad():
        if held:
            torch._foreach_add_(*zip(*held, strict=True))
        for leaf, grad in zip(leaves, grads, strict=True):
            if leaf.grad is None:
                leaf.grad = grad
    for leaf in leaves:
        for hook in tuple(leaf.reduced_hooks.after.values()):  # type: ignore[attr-defined]
            hook(leaf)


def _changed_by_hooks(leaf: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    for hook in tuple(leaf.reduced_hooks.before.values()):  # type: ignore[attr-defined]
        changed = hook(grad)
        if changed is not None:
            grad = changed
    return grad
