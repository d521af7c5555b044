# SPDX-License-Identifier: Apache-2.0
"""A flat unit: the parameters of one group and dtype in one buffer. See Note [Flat groups] in core.

Note [One storage for life]
    Autograd keeps views of the full parameters for backward. They must read the re-gathered weights there, never what
    another group left in the memory. So the full buffer of a unit is one storage object for the unit's life, whose
    memory comes and goes under it (`resize_`); the allocator does the pooling. Full parameters are separate tensor
    objects over that storage (`set_`), with version counters of their own: filling the buffer anew does not count as
    changing a saved tensor.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hyper_parallel.core.fully_shard.group_plan import GroupPlan, plan_group
from hyper_parallel.core.layout import Layout
from hyper_parallel.platform.torch.dtensor import OWN_ATTRIBUTES, TorchDTensor, wrap
from hyper_parallel.platform.torch.dtensor_autograd import ReducedHooks
from hyper_parallel.platform.torch.fully_shard.checks import check_lent
from hyper_parallel.platform.torch.fully_shard.transfer import Transfer, gather_flat
from hyper_parallel.platform.torch.spec import spec_of


def _nothing() -> None:
    return None


@dataclass(eq=False)
class FlatParam:
    """One parameter of a unit.

    Attributes:
        name: Full name, for messages.
        sites: Every (module, attribute) that holds it: more than one if it is tied.
        sharded: The parameter users and optimizers see: an `nn.Parameter` that is a DTensor.
        local: The local tensor of `sharded`: an autograd leaf over the unit's shard.
        shape: Global shape.
        full_shape: Shape after gathering: the tensor-parallel local one, or the global.
        tp_layout: Layout over the tensor-parallel mesh, or None.
        planned_shape: (rows, elements per row), the largest of any tensor-parallel rank.
        address: Where the data of `local` lay when it was made.
        original: The parameter it was before, if that is still alive.
    """

    name: str
    sites: list[tuple[nn.Module, str]]
    sharded: Any
    local: torch.Tensor
    shape: tuple[int, ...]
    full_shape: tuple[int, ...]
    tp_layout: Layout | None
    planned_shape: tuple[int, int]
    strides: tuple[int, ...] = field(init=False)

    address: int = field(init=False, default=0)
    original: Callable[[], Any] = field(init=False, default=_nothing)

    def __post_init__(self) -> None:
        inner = self.full_shape[1:]
        steps = [math.prod(inner[i + 1 :]) for i in range(len(inner))]
        # The row stride is that of the largest tensor-parallel rank, so that all ranks cut at the same rows.
        self.strides = (self.planned_shape[1], *steps)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "original": _nothing}

    def hold(self, leaf: torch.Tensor, hooks: ReducedHooks) -> None:
        """Make `leaf` the local tensor."""
        leaf.reduced_hooks = hooks  # type: ignore[attr-defined]
        self.local, self.address = leaf, leaf.data_ptr()

    @property
    def current(self) -> Any:
        """What the modules have in the place of the parameter."""
        module, name = self.sites[0]
        return module._parameters[name]

    @property
    def is_in_place(self) -> bool:
        """Whether the modules still have `sharded`, and its data are where they were put."""
        local = self.local
        return self.current is self.sharded and self.sharded._local is local and local.data_ptr() == self.address


class FlatUnit:
    """Shard and full buffer of some parameters of one dtype.

    Args:
        params: The parameters, still whole (`sharded` and `local` are set here).
        layouts: Per parameter a function from its place in the plan to its sharded layout.
        ranks: The ranks it is sharded over.
        position: This rank's position among them.
        gather_dtype: Dtype of the full parameters.
    """

    def __init__(
        self,
        params: list[FlatParam],
        layouts: Sequence[Any],
        ranks: tuple[int, ...],
        position: int,
        gather_dtype: torch.dtype | None,
    ) -> None:
        first = params[0].local
        self.params = params
        self.ranks = ranks
        self.position = position
        self.dtype = first.dtype
        self.gather_dtype = gather_dtype if gather_dtype and first.is_floating_point() else first.dtype
        self.plan: GroupPlan = plan_group([p.planned_shape for p in params], len(ranks), first.element_size())
        self.shard = torch.zeros(self.plan.shard_numel, dtype=first.dtype, device=first.device)
        self._full: torch.Tensor | None = None
        self._transfer: Transfer | None = None
        self._gathered_version = -1
        with torch.no_grad():
            for i, param in enumerate(params):
                self._take(i, param, layouts[i])

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_full": None, "_transfer": None, "_gathered_version": -1}

    @property
    def gather_is_alias(self) -> bool:
        """Whether the full buffer is the shard itself: one rank, same dtype."""
        return len(self.ranks) == 1 and self.gather_dtype == self.dtype

    def _take(self, index: int, param: FlatParam, layout_of: Any) -> None:
        """Move this rank's rows into the shard and make the sharded parameter."""
        whole = param.local
        layout = layout_of(self.plan.params[index])
        first, last = self._rows(index)
        piece = self._shard_view(index)
        if not whole.is_meta:
            piece.copy_(whole[first:last])
        sharded = nn.Parameter(wrap(piece, spec_of(layout, param.shape)), whole.requires_grad)
        # Attributes that users put on the parameter stay with it.
        sharded.__dict__.update(
            {k: v for k, v in param.sharded.__dict__.items() if k not in (*OWN_ATTRIBUTES, "_is_param")}
        )
        # Other modules may still hold the original, which nobody trains from here on.
        param.sharded._is_taken = True
        param.original = weakref.ref(param.sharded)
        param.sharded = sharded
        param.hold(sharded._local, ReducedHooks())  # type: ignore[attr-defined]
        for module, name in param.sites:
            module._parameters[name] = param.sharded

    def _rows(self, index: int) -> tuple[int, int]:
        first, last = self.plan.params[index].rows_of(self.position)
        num = self.params[index].full_shape[0]
        return min(first, num), min(last, num)

    def _shard_view(self, index: int) -> torch.Tensor:
        return self._rows_view(self.shard, index)

    def _rows_view(self, flat: torch.Tensor, index: int) -> torch.Tensor:
        """This rank's rows of a parameter in a flat tensor of the size of the shard."""
        param = self.params[index]
        first, last = self._rows(index)
        shape = (last - first, *param.full_shape[1:])
        offset = self.plan.local_offset(index, self.position)
        return flat.as_strided(shape, param.strides, flat.storage_offset() + offset)

    def grad_views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Per parameter this rank's rows of a flat gradient shard."""
        return [self._rows_view(flat, i) for i in range(len(self.params))]

    def buffer_view(self, flat: torch.Tensor, index: int) -> torch.Tensor:
        """A whole parameter in a flat tensor of the size of the full buffer."""
        param = self.params[index]
        if math.prod(param.full_shape) == 0:
            return flat.new_empty(param.full_shape)
        return flat.as_strided(param.full_shape, param.strides, flat.storage_offset() + self.plan.params[index].offset)

    # -- keeping up with users ------------------------------------------------------------------

    def adopt(self) -> None:
        """Follow parameters that were replaced (`to_empty`, `load_state_dict(assign=True)`, `deepcopy`, `to`).

        Their values move into the shard, and old and new objects share one leaf, so optimizers built on either work.
        """
        replaced = [param for param in self.params if not param.is_in_place]
        if replaced:
            check_lent(replaced[0])
            with torch.no_grad():
                self._rebuild([param.current for param in self.params])

    def _rebuild(self, current: Sequence[Any]) -> None:
        locals_ = [self._local_of(new, param) for new, param in zip(current, self.params, strict=True)]
        kinds = {(x.dtype, x.device) for x in locals_}
        if len(kinds) > 1:
            names = ", ".join(f"{p.name} {x.dtype} {x.device}" for p, x in zip(self.params, locals_, strict=True))
            raise ValueError(
                f"fully_shard: the parameters of one group now differ in dtype or device ({names}). "
                "Move or cast the whole module at once."
            )
        dtype, device = kinds.pop()
        fresh = dtype != self.dtype or device != self.shard.device
        if fresh:
            if self.gather_dtype == self.dtype:
                self.gather_dtype = dtype
            self.dtype = dtype
            self.shard = torch.zeros(self.plan.shard_numel, dtype=dtype, device=device)
            self._full = None
        for i, (new, param, local) in enumerate(zip(current, self.params, locals_, strict=True)):
            self._bind(i, param, new, local)

    def _local_of(self, new: Any, param: FlatParam) -> torch.Tensor:
        layout = param.sharded.layout
        if isinstance(new, TorchDTensor):
            if tuple(new.shape) != param.shape:
                raise ValueError(
                    f'parameter "{param.name}": replaced by one of shape {tuple(new.shape)}, it has {param.shape}. '
                    "Assign one of that shape."
                )
            return new.redistribute(layout=layout)._local
        return TorchDTensor._distribute(new.detach(), None, layout, None)._local

    def _bind(self, index: int, param: FlatParam, new: Any, local: torch.Tensor) -> None:
        view = self._shard_view(index)
        if not local.is_meta and local.data_ptr() != view.data_ptr():
            view.copy_(local)
        leaf = view.detach().requires_grad_(new.requires_grad)
        hooks = None
        if isinstance(new, TorchDTensor):
            leaf.grad = new._local.grad
            hooks = getattr(new._local, "reduced_hooks", None)
        else:
            new = nn.Parameter(wrap(leaf, param.sharded._spec), new.requires_grad)
        for wrapper in (new, param.sharded):
            wrapper._local = leaf
            wrapper._memo = None
        param.sharded = new
        param.hold(leaf, hooks or ReducedHooks())
        for module, name in param.sites:
            module._parameters[name] = new

    @property
    def version(self) -> int:
        """Number of writes to the parameters. Mere reads of `.data` count as writes elsewhere, not here."""
        return self.shard._version - sum(param.local.reduced_hooks.data_reads for param in self.params)  # type: ignore[attr-defined]

    # -- gathering ------------------------------------------------------------------------------

    @property
    def is_stale(self) -> bool:
        """Whether parameters were changed or replaced after the full buffer was filled.

        Every rank's leaves count as changed with any of them, empty ones too, so that ranks agree.
        """
        return self._gathered_version != self.shard._version or not all(param.is_in_place for param in self.params)

    def check_ready(self) -> None:
        """Refuse to gather what has no data yet."""
        if self.shard.is_meta:
            raise ValueError(
                f'parameter "{self.params[0].name}": it is still on the meta device. Call module.to_empty(device=...) '
                "and initialise it before the first forward."
            )

    def gather(self) -> None:
        """Start filling the full buffer."""
        self._gathered_version = self.shard._version
        if self.gather_is_alias:
            return
        if self._full is None:
            # The buffer outlives inference mode, and must not be one of its tensors.
            with torch.inference_mode(False):
                self._full = torch.empty(self.plan.numel, dtype=self.gather_dtype, device=self.shard.device)
        else:
            self._full.untyped_storage().resize_(self._full.numel() * self._full.element_size())
        shard = self.shard if self.gather_dtype == self.dtype else self.shard.to(self.gather_dtype)
        self._transfer = gather_flat(self._full, shard, self.ranks, self.position)

    def wait(self) -> None:
        """End what `gather` began."""
        if self._transfer is not None:
            self._transfer.wait()
            self._transfer = None

    def free(self) -> None:
        """Give the full buffer's memory back. See Note [One storage for life]."""
        if self._full is not None:
            self._full.untyped_storage().resize_(0)

    def write_back(self, tensors: Sequence[torch.Tensor]) -> None:
        """Bring what was changed in place in full parameters, on all ranks alike, into the shard."""
        with torch.no_grad():
            for index, (param, full) in enumerate(zip(self.params, tensors, strict=True)):
                if full._version > _FRESH and not self.gather_is_alias:
                    first, last = self._rows(index)
                    param.local.copy_(full[first:last])

    @property
    def full_nbytes(self) -> int:
        """Bytes that the full buffer holds now."""
        return 0 if self._full is None else self._full.untyped_storage().nbytes()

    def full_parameters(self) -> list[torch.Tensor]:
        """The gathered parameters as new plain tensors over the full buffer."""
        flat = self.shard if self._full is None else self._full
        storage, base = flat.untyped_storage(), flat.storage_offset()
        out = []
        for param, placed in zip(self.params, self.plan.params, strict=True):
            view = torch.empty(0, dtype=flat.dtype, device=flat.device)
            if math.prod(param.full_shape):
                view.set_(storage, base + placed.offset, param.full_shape, param.strides)
            else:
                view = view.new_empty(param.full_shape)
            out.append(view)
        return out


_FRESH = 1
"""Version of a tensor that was just made with `set_`."""
