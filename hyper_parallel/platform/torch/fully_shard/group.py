# SPDX-License-Identifier: Apache-2.0
"""ParamGroup: what happens to the parameters of one wrapped module (or list of modules) in forward and backward."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from hyper_parallel.core.errors import ParamStateError
from hyper_parallel.core.fully_shard.hsdp_state import GroupState, check_transition
from hyper_parallel.core.fully_shard.policy import MixedPrecisionPolicy
from hyper_parallel.platform.torch.dtensor import wrap
from hyper_parallel.platform.torch.fully_shard.casting import cast_all
from hyper_parallel.platform.torch.fully_shard.checks import Inventory, check_lent, check_optimizers
from hyper_parallel.platform.torch.fully_shard.context import RootContext
from hyper_parallel.platform.torch.fully_shard.gradients import (
    Carried,
    GradBuffer,
    UnitCall,
    UnitReduction,
)
from hyper_parallel.platform.torch.fully_shard.unit import FlatUnit
from hyper_parallel.platform.torch.graph_nodes import nodes_of
from hyper_parallel.platform.torch.spec import spec_of


class GroupCall:
    """One forward of a group.

    Attributes:
        units: Its units' calls.
        tensors: Per unit the full parameters that this forward uses.
        versions: Per unit the number of writes to its parameters before this forward.
        task: The backward pass that reached it first, -1 when none is under way.
        left: Units whose gradients are still being collected.
    """

    def __init__(self, units: list[UnitCall], tensors: list[list[torch.Tensor]]) -> None:
        self.units = units
        self.tensors = tensors
        self.versions = [call.unit.version for call in units]
        self.task = -1
        self.left = 0


class ParamGroup:
    """The parameters of one wrapped module, or of a list of modules wrapped as one.

    Args:
        name: For messages.
        modules: The wrapped modules.
        units: Their parameters, one unit per dtype.
        replicate_ranks: HSDP: the ranks that hold the same shards, this one among them.
        all_ranks: The ranks of all shards and replicas.
        mp_policy: Dtypes.
        reshard_after_forward: Free after forward; None: unless this turns out to be the root.
        ignored_sites: (module, name) of parameters that are left alone.
    """

    def __init__(
        self,
        name: str,
        modules: Sequence[nn.Module],
        units: list[FlatUnit],
        *,
        replicate_ranks: tuple[int, ...],
        all_ranks: tuple[int, ...],
        mp_policy: MixedPrecisionPolicy,
        reshard_after_forward: bool | None,
        ignored_sites: Sequence[tuple[nn.Module, str]],
    ) -> None:
        self.name = name
        self.modules = list(modules)
        self.units = units
        self.replicate_ranks = replicate_ranks
        self.all_ranks = all_ranks
        self.ignored_sites = list(ignored_sites)
        self.mp_policy = mp_policy
        self.reshard_after_forward = reshard_after_forward
        self.reshard_after_backward = True
        self.requires_gradient_sync = True
        self.requires_all_reduce = True
        self.divide_factor: float | None = None
        self.forward_prefetch: list[ParamGroup] = []
        self.backward_prefetch: list[ParamGroup] = []
        self.carried_shards: dict[FlatUnit, Carried] = {}
        self._carried_buffers: dict[FlatUnit, GradBuffer] = {}
        self.state = GroupState.SHARDED
        self._context: RootContext | None = None
        self._lock = threading.RLock()
        self._depth = 0
        self._left: set[int] = set()
        self._call: GroupCall | None = None
        self._manual: GroupCall | None = None
        self._active: list[GroupCall] = []
        self._shown: GroupCall | None = None
        self._inventory = Inventory(self)

    # -- states ---------------------------------------------------------------------------------

    def _become(self, state: GroupState) -> None:
        check_transition(self.name, self.state, state)
        self.state = state

    def start_unshard(self) -> None:
        """Begin the all-gather unless the parameters are there or on their way."""
        with self._lock:
            if self.state is GroupState.UNSHARDED and self._shown is None and any(u.is_stale for u in self.units):
                self.reshard()
            if self.state is not GroupState.SHARDED:
                return
            for unit in self.units:
                unit.adopt()
                unit.check_ready()
            self._become(GroupState.UNSHARDING)
            for unit in self.units:
                unit.gather()

    def unshard(self) -> None:
        """Have the full parameters: whoever comes first gathers, everybody waits."""
        with self._lock:
            self.start_unshard()
            self._wait()

    def _wait(self) -> None:
        if self.state is GroupState.UNSHARDING:
            for unit in self.units:
                unit.wait()
            self._become(GroupState.UNSHARDED)

    def reshard(self) -> None:
        """Free the full parameters."""
        with self._lock:
            if self.state is GroupState.SHARDED:
                return
            self._wait()
            for unit in self.units:
                unit.free()
            self._become(GroupState.SHARDED)

    def drop_unused(self) -> None:
        """Free what was prefetched but is used neither by a forward nor by a backward."""
        if self._call is None and not self._active and self._manual is None:
            self.reshard()

    # -- which parameters the modules see -------------------------------------------------------

    def _new_call(self) -> GroupCall:
        dtype = self.mp_policy.reduce_dtype
        calls = []
        for unit in self.units:
            call = UnitCall(unit, dtype or unit.gather_dtype, self._unit_done)
            call.carried = lambda unit=unit: self._carried_buffers.pop(unit, None)  # type: ignore[misc]
            calls.append(call)
        return GroupCall(calls, [call.full_parameters() for call in calls])

    def _show(self) -> None:
        """Let the modules have the full parameters during forward and backward, the sharded ones otherwise.

        In backward too: activation checkpointing runs parts of the module again, without its hooks.
        """
        call = self._call or (self._active[-1] if self._active else self._manual)
        if call is self._shown:
            return
        self._shown = call
        for i, unit in enumerate(self.units):
            for j, param in enumerate(unit.params):
                shown: torch.Tensor = param.sharded
                if call is not None:
                    shown = call.tensors[i][j]
                    if param.tp_layout is not None:
                        shown = wrap(shown, spec_of(param.tp_layout, param.shape))
                _put(param.sites, shown)

    # -- forward --------------------------------------------------------------------------------

    def pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Gather the parameters and put them in place; gather the next group's meanwhile."""
        context = self.root_context()
        if self._depth == 0 and self._call is None:
            self._enter(context)
        self._depth += 1
        dtype = self.mp_policy.param_dtype
        if dtype is not None and self.mp_policy.cast_forward_inputs:
            args, kwargs = cast_all((args, kwargs), dtype)
        return args, kwargs

    def _check_shown(self) -> None:
        """Between `unshard` and `reshard` nothing is adopted: only what was put in place may be there."""
        if self._manual is not None:
            for unit, tensors in zip(self.units, self._manual.tensors, strict=True):
                for param, shown in zip(unit.params, tensors, strict=True):
                    if getattr(param.current, "_local", param.current) is not shown:
                        check_lent(param)

    def _enter(self, context: RootContext) -> None:
        starts = context.root is self and not context.in_backward
        if starts:
            self._inventory.check()
        self._check_shown()
        following: list[ParamGroup] = []
        if not context.in_backward:
            if starts:
                context.begin_forward()
            following = context.enter(self)
        self.unshard()
        for group in following:
            group.start_unshard()
        self._left = {id(m) for m in self.modules}
        self._call = self._new_call()
        self._show()

    def post_forward(self, module: nn.Module, args: Any, out: Any) -> Any:
        """Free the parameters if so chosen, and see to it that they are there again when backward comes.

        Also called, with `out` None, when forward raised.
        """
        if self._depth == 0:
            return out  # forward raised before it reached `pre_forward`
        self._depth -= 1
        self._left.discard(id(module))
        call = self._call
        dtype = self.mp_policy.output_dtype
        if dtype is not None and out is not None:
            out = cast_all(out, dtype)
        has_raised = out is None and sys.exc_info()[1] is not None
        is_recorded = call is not None and torch.is_grad_enabled() and not has_raised
        is_watched = is_recorded and self._watch(out, call)  # type: ignore[arg-type]
        if self._depth == 0 and (not self._left or has_raised):
            self._leave(is_recorded=is_recorded, is_watched=is_watched)
        return out

    def _leave(self, *, is_recorded: bool, is_watched: bool) -> None:
        context = self.root_context()
        self._call = None
        self._show()
        if context.in_backward:
            return
        context.order.leave(self)
        frees = self.reshard_after_forward
        if frees is None:
            frees = context.root is not self
        # Where no output leads to the graph (a module that leaves its results somewhere else), nothing would announce
        # that backward needs the parameters again: they stay.
        stays = not frees and is_recorded if is_watched else is_recorded and self._has_trainable
        if not stays:
            self.drop_unused()
        if context.root is self:
            context.end_forward()
            for group in context.groups():
                group.close_forward()

    def close_forward(self) -> None:
        """End a forward that some module of a list never had."""
        if self._call is not None and self._depth == 0:
            self._call = None
            self._show()
            self.drop_unused()

    def _watch(self, out: Any, call: GroupCall) -> bool:
        """Call `_pre_backward` before the first node of this forward's graph runs."""
        nodes = nodes_of(out)
        for node in nodes:
            node.register_prehook(lambda grads: self._pre_backward(call))
        return bool(nodes)

    # -- backward -------------------------------------------------------------------------------

    def _pre_backward(self, call: GroupCall) -> None:
        context = self.root_context()
        task = context.note_backward(self)
        if call.task != -1:
            return
        self._check_unchanged(call)
        call.task = task
        call.left = len(call.units)
        self._active.append(call)
        self.unshard()
        self._show()
        wanted = self.backward_prefetch
        if not wanted:
            before = context.order.before(self)
            wanted = [before] if before is not None else []
        for group in wanted:
            group.start_unshard()

    def _check_unchanged(self, call: GroupCall) -> None:
        """Backward must see the parameters that forward saw, whether they are gathered again or not."""
        for unit, version in zip(self.units, call.versions, strict=True):
            if unit.version != version:
                raise ParamStateError(
                    f'backward to parameter "{unit.params[0].name}" and its group: it was modified by an inplace '
                    "operation after the forward, such as an optimizer's step. Do that after backward, or run the "
                    "forward again."
                )

    def _unit_done(self, call: UnitCall) -> None:
        """All gradients of a unit's forward are collected, as far as this backward pass goes."""
        self.root_context().note_backward(self)
        owner = next((g for g in self._active if call in g.units), None)
        if owner is not None and owner.task != torch._C._current_graph_task_id():
            # Re-entrant checkpointing: this pass inside of the owner's brought only those of one checkpointed part.
            self.root_context().put_off(self, owner)
            return
        self._reduce(call)
        if owner is None:
            return
        owner.left -= 1
        if owner.left == 0 and not self._has_frozen:
            self._close(owner)

    def finish_put_off(self, owner: GroupCall) -> None:
        """Reduce what `_unit_done` left, and end the backward of that forward."""
        for call in owner.units:
            self._reduce(call)
        if owner in self._active:
            self._close(owner)

    def _reduce(self, call: UnitCall) -> None:
        buffer, call.buffer = call.buffer, None
        if buffer is None:
            return
        if self.requires_gradient_sync:
            self.root_context().reduce(self, self._reduction(call.unit, buffer))
        else:
            self._carried_buffers[call.unit] = buffer

    @property
    def _has_trainable(self) -> bool:
        return any(p.local.requires_grad for unit in self.units for p in unit.params)

    @property
    def _has_frozen(self) -> bool:
        """Frozen parameters may be read after the last gradient of the others is there."""
        return any(not p.local.requires_grad for unit in self.units for p in unit.params)

    def _close(self, call: GroupCall) -> None:
        call.task = -1
        self._active.remove(call)
        self._settle()

    def _settle(self) -> None:
        """After a part of backward: show what its rest needs, and free what it does not."""
        self._show()
        if self.reshard_after_backward and not self.root_context().creates_graph:
            self.drop_unused()

    def _forget_backward(self) -> None:
        for call in self._active:
            call.task = -1
        self._active.clear()

    def reduce_carried(self) -> None:
        """Reduce what earlier backwards left, where this one did not reach the group and reductions are wanted."""
        if not self.requires_gradient_sync:
            return
        for unit in list(self._carried_buffers):
            self.root_context().reduce(self, self._reduction(unit, self._carried_buffers.pop(unit)))
        if self.requires_all_reduce:
            for unit in list(self.carried_shards):
                self.root_context().reduce(self, self._reduction(unit, None))

    def drop_carried(self) -> None:
        """Drop gradients of earlier backwards that were held back; what is in flight is put in place."""
        self.root_context().finish_reductions()
        self._carried_buffers.clear()
        self.carried_shards.clear()

    def _reduction(self, unit: FlatUnit, buffer: GradBuffer | None) -> UnitReduction:
        factor = self.divide_factor or len(self.all_ranks)
        return UnitReduction(
            unit,
            buffer,
            replicate_ranks=self.replicate_ranks,
            all_ranks=self.all_ranks,
            factor=factor,
            carry=self.carried_shards.pop(unit, None),
            all_reduce=self.requires_all_reduce,
        )

    def end_backward(self) -> None:
        """The whole backward pass is over."""
        self._forget_backward()
        self._settle()

    def abort(self) -> None:
        """Back to the sharded state after an exception; gradients collected so far are dropped."""
        self._carried_buffers.clear()
        self._forget_backward()
        self._call, self._depth, self._manual = None, 0, None
        self._show()
        self.reshard()

    # -- by hand --------------------------------------------------------------------------------

    def unshard_now(self, async_op: bool) -> UnshardHandle | None:
        """See `HSDPModule.unshard`."""
        self.start_unshard()
        handle = UnshardHandle(self)
        if async_op:
            return handle
        handle.wait()
        return None

    def show_until_reshard(self) -> None:
        """Full parameters stay in place until `reshard_now`."""
        self.unshard()
        if self._manual is None:
            self._manual = self._new_call()
            self._show()

    def reshard_now(self) -> None:
        """See `HSDPModule.reshard`."""
        if self._manual is not None and self.state is GroupState.UNSHARDED:
            for unit, tensors in zip(self.units, self._manual.tensors, strict=True):
                unit.write_back(tensors)
        self._manual = None
        self._show()
        self.drop_unused()

    def check_sharded(self) -> None:
        """Refuse to copy a module that has gathered parameters in place of its own."""
        if self._shown is not None:
            raise ParamStateError(
                f"copy of {self.name}: its parameters are gathered. Call reshard() first, and copy outside of forward."
            )

    def before_state_dict(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        """A state dict shows sharded parameters, also between `unshard` and `reshard`."""
        self._manual = None
        self._show()

    # -- the root -------------------------------------------------------------------------------

    def groups_below(self) -> Iterator[ParamGroup]:
        """This group and those of all wrapped modules inside."""
        seen = set()
        for module in self.modules:
            for child in module.modules():
                group = child.__dict__.get("_hsdp_group")
                if group is not None and id(group) not in seen:
                    seen.add(id(group))
                    yield group

    def root_context(self) -> RootContext:
        """The shared context; the outermost wrapped module that is called first makes it."""
        if self._context is None:
            groups = list(self.groups_below())
            context = RootContext(self, groups)
            places = {id(m): name for root in self.modules for name, m in root.named_modules()}
            for group in groups:
                group._rename(places)
            check_optimizers(groups)
            for group in groups:
                group._context = context
        assert self._context is not None
        return self._context

    def _rename(self, places: dict[int, str]) -> None:
        """Call parameters by their full names in messages, now that the root is known."""
        for param in (p for unit in self.units for p in unit.params):
            module, key = param.sites[0]
            param.name = ".".join(filter(None, (places.get(id(module)), key)))

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        for name in ("_lock", "_context", "_call", "_manual", "_shown", "_inventory"):
            state[name] = None
        state["_active"] = []
        # Units leave their full buffers behind.
        state["state"] = GroupState.SHARDED
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.RLock()
        self._inventory = Inventory(self)


class UnshardHandle:
    """What `unshard(async_op=True)` returns."""

    def __init__(self, group: ParamGroup) -> None:
        self._group = group

    def wait(self) -> None:
        """Have the full parameters in place."""
        self._group.show_until_reshard()


def _put(sites: Sequence[tuple[nn.Module, str]], tensor: torch.Tensor) -> None:
    for module, name in sites:
        module._parameters[name] = tensor  # type: ignore[assignment]
        if isinstance(module, nn.RNNBase):
            # RNNs keep a second list of their weights.
            module._flat_weights = [module._parameters.get(n) for n in module._flat_weights_names]
