# SPDX-License-Identifier: Apache-2.0
"""`fully_shard` and `HSDPModule`: PyTorch FSDP2's call and methods, for any framework."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hyper_parallel.core.errors import ParamStateError
from hyper_parallel.core.fully_shard.checks import check_arguments, check_factor
from hyper_parallel.core.fully_shard.policy import MixedPrecisionPolicy, OffloadPolicy
from hyper_parallel.core.protocols import platform_of


def fully_shard(
    module: Any,
    *,
    mesh: Any = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[Any], Any] | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: set[Any] | None = None,
) -> Any:
    """Spread the parameters of `module` that no wrapped submodule has yet over the data-parallel ranks, in place.

    Wrap inner modules first (each transformer block), the whole model last. Between uses each rank holds its shard;
    a module's parameters are gathered before its forward and backward, and gradients are reduced to shards. The
    module's class is mixed with `HSDPModule`. Parameters are DTensors: build the optimizer after wrapping.

    Args:
        module: A module, or a list of modules that form one group.
        mesh: 1-D: shard over it. 2-D: replicate over its first axis, shard over its second (HSDP). Default: all ranks.
            A sub-mesh of a larger mesh whose other axes already split the parameters (tensor parallelism) is fine.
        reshard_after_forward: Free the gathered parameters after forward. None: yes, but not for the root module.
            An int means fewer ranks to gather from in backward; only 1 (False) and the full size (True) are served yet.
        shard_placement_fn: Parameter -> `Shard(0)` or None. Other dims are not served yet.
        mp_policy: Dtypes; see `MixedPrecisionPolicy`.
        offload_policy: See `OffloadPolicy`.
        ignored_params: Parameters to leave alone; their gradients stay local.

    Returns:
        `module` (or the list).

    Raises:
        MeshError: the mesh does not contain this rank, or is not joined with that of tensor-parallel parameters.
        ValueError: an option that is not served, or a parameter that cannot be sharded; names it.
        TypeError: an argument of a wrong type; names it.

    Communication: none (parameters are taken as they are on each rank; load or initialise them alike).
    Memory: the shard of each parameter; the full ones are freed.
    """
    modules = list(module) if isinstance(module, (list, tuple)) else [module]
    check_arguments(
        modules,
        reshard_after_forward=reshard_after_forward,
        shard_placement_fn=shard_placement_fn,
        mp_policy=mp_policy,
        offload_policy=offload_policy,
    )
    return (
        platform_of(modules[0])
        .modules()
        .fully_shard(
            module,
            mesh=mesh,
            reshard_after_forward=reshard_after_forward,
            shard_placement_fn=shard_placement_fn,
            mp_policy=mp_policy or MixedPrecisionPolicy(),
            offload_policy=offload_policy or OffloadPolicy(),
            ignored_params=set() if ignored_params is None else ignored_params,
        )
    )


class HSDPModule:
    """What `fully_shard` mixes into a module's class: PyTorch's `FSDPModule` methods."""

    def _hsdp(self) -> Any:
        state = self.__dict__.get("_hsdp_group")
        if state is None:
            raise ParamStateError(f"{type(self).__name__}: the module is not wrapped. Call fully_shard(module) first.")
        return state

    def unshard(self, async_op: bool = False) -> Any:
        """Gather this module's own parameters and put them in place until `reshard()`.

        Args:
            async_op: Return a handle whose `wait()` ends the gather.

        Communication: one all-gather over the shard ranks.
        """
        return self._hsdp().unshard_now(async_op)

    def reshard(self) -> None:
        """Free this module's gathered parameters and put the sharded ones in place."""
        self._hsdp().reshard_now()

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether backward reduces gradients over ranks; if not, full gradients are accumulated on each rank."""
        self._each(recurse, "requires_gradient_sync", requires_gradient_sync)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """HSDP: whether backward also reduces over the replicate axis; if not, that waits for a later backward."""
        self._each(recurse, "requires_all_reduce", requires_all_reduce)

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether gathered parameters are freed after forward."""
        self._each(recurse, "reshard_after_forward", reshard_after_forward)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Whether gathered parameters are freed after backward."""
        self._each(recurse, "reshard_after_backward", reshard_after_backward)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide summed gradients by `factor`, a number above 0, instead of by the number of ranks."""
        self._hsdp().divide_factor = check_factor(factor)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Whether the next backward is the last of several: if not, pending reductions may stay in flight."""
        self._hsdp().root_context().is_last_backward = is_last_backward

    def set_modules_to_forward_prefetch(self, modules: Sequence[Any]) -> None:
        """Modules to gather while this one's forward runs, instead of the one that came next last time."""
        self._hsdp().forward_prefetch = _groups_of("set_modules_to_forward_prefetch", modules)

    def set_modules_to_backward_prefetch(self, modules: Sequence[Any]) -> None:
        """Modules to gather while this one's backward runs, instead of the one before it in forward."""
        self._hsdp().backward_prefetch = _groups_of("set_modules_to_backward_prefetch", modules)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As PyTorch's; drops what `set_requires_gradient_sync(False)` holds back too, which an optimizer cannot."""
        for group in self._hsdp().groups_below():
            group.drop_carried()
        super().zero_grad(set_to_none)  # type: ignore[misc]

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A class made at run time has no name to be found by: copies and pickles go by the class that was wrapped.
        self._hsdp().check_sharded()
        return _again, (type(self).__bases__[1],), self.__getstate__()

    def _each(self, recurse: bool, name: str, value: Any) -> None:
        groups = self._hsdp().groups_below() if recurse else [self._hsdp()]
        for group in groups:
            setattr(group, name, value)


_wrapped_classes: dict[type, type] = {}


def wrapped_class(kind: type) -> type:
    """The class of wrapped modules of class `kind`."""
    if kind not in _wrapped_classes:
        made = type(f"HSDP{kind.__name__}", (HSDPModule, kind), {"__module__": kind.__module__})
        _wrapped_classes[kind] = made
    return _wrapped_classes[kind]


def _again(kind: type) -> Any:
    return object.__new__(wrapped_class(kind))


def _groups_of(call: str, modules: Sequence[Any]) -> list[Any]:
    if not isinstance(modules, (list, tuple)):
        raise TypeError(f"{call}({type(modules).__name__}): not a list. Pass a list of wrapped modules.")
    for module in modules:
        if not isinstance(module, HSDPModule):
            raise ParamStateError(
                f"{call}([{type(module).__name__}]): it is not wrapped. Call fully_shard on it first."
            )
    return [module._hsdp() for module in modules]
