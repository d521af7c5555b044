# SPDX-License-Identifier: Apache-2.0
"""`shard_module` and `local_map` on torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hyper_parallel.core.device_mesh import DeviceMesh
from hyper_parallel.core.errors import LayoutError, ParamStateError
from hyper_parallel.core.layout import Layout, as_layout
from hyper_parallel.core.shard.sharding_plan import ShardingPlan, layout_for
from hyper_parallel.platform.torch import full_state_dicts, implicit
from hyper_parallel.platform.torch.dispatch import HANDLERS, Rule, ShardedOp, tensors_in
from hyper_parallel.platform.torch.dtensor import TorchDTensor
from hyper_parallel.platform.torch.graph_nodes import nodes_of
from hyper_parallel.platform.torch.module_io import check_inputs, hook_io

# `fully_shard` makes DTensors on its own. On import this would be too soon: see building.py.
full_state_dicts.install()


def shard_module(
    module: nn.Module, mesh: DeviceMesh, plan: ShardingPlan, *, src_data_rank: int | None = 0
) -> nn.Module:
    """See `hyper_parallel.shard_module`."""
    modules = dict(module.named_modules(remove_duplicate=False))
    _check_plan(module, modules, plan)
    layouts = _parameter_layouts(modules, mesh, plan)
    made: dict[int, Any] = {}
    for name, child in modules.items():
        for kind in (child._parameters, child._buffers):
            for key, tensor in kind.items():
                if tensor is None or isinstance(tensor, TorchDTensor):
                    continue
                if id(tensor) not in made:
                    layout = layouts.get(id(tensor)) or as_layout(None, mesh, tensor.dim())
                    made[id(tensor)] = _spread(tensor, layout, src_data_rank)
                kind[key] = made[id(tensor)]
        hook_io(child, name, mesh, plan.style_of(name))
        child.register_load_state_dict_pre_hook(_before_load)
    _hook_root(module, mesh)
    return module


def _check_plan(module: nn.Module, modules: dict[str, nn.Module], plan: ShardingPlan) -> None:
    """Refuse a plan that does not fit the model, before anything changes."""
    what = f"shard_module of {type(module).__name__}"
    wrapped = next((type(child).__name__ for child in modules.values() if "_hsdp_group" in child.__dict__), None)
    if wrapped is not None:
        raise ParamStateError(f"{what}: {wrapped} is wrapped by fully_shard already. Call shard_module first.")
    unmatched = plan.unmatched(list(modules), [n for n, _ in module.named_parameters(remove_duplicate=False)])
    unmatched += plan.misspelt({name: child._parameters.keys() for name, child in modules.items()})
    if unmatched:
        raise LayoutError(
            f"{what}: the plan's {unmatched[0]!r} matches nothing in it. Correct the name, or remove the entry."
        )
    for name, child in modules.items():
        check_inputs(child, name, plan.style_of(name))


def _parameter_layouts(modules: dict[str, nn.Module], mesh: DeviceMesh, plan: ShardingPlan) -> dict[int, Layout]:
    """Tensor identity -> layout; a tied parameter takes what the plan says under any of its names."""
    out: dict[int, Layout] = {}
    named: dict[int, str] = {}
    for module, child in modules.items():
        for name, tensor in child._parameters.items():
            spec = None if tensor is None else plan.parameter_spec(module, name)
            if spec is None:
                continue
            full = f"{module}.{name}" if module else name
            layout = layout_for(spec, mesh, tensor.dim(), f'parameter "{full}"')  # type: ignore[union-attr]
            if isinstance(tensor, TorchDTensor) and tensor.layout is not layout:
                raise LayoutError(
                    f'parameter "{full}": the plan gives it {layout} on mesh {mesh}, it lies {tensor.layout} on mesh '
                    f"{tensor.device_mesh} already. Put all of it in one plan, and call shard_module once."
                )
            if out.setdefault(id(tensor), layout) is not layout:
                raise LayoutError(
                    f'parameter "{full}": the plan gives it {layout}, but {out[id(tensor)]} as "{named[id(tensor)]}", '
                    "with which it is tied. Give both names the same."
                )
            named[id(tensor)] = full
    return out


def _spread(tensor: torch.Tensor, layout: Layout, src_data_rank: int | None) -> torch.Tensor:
    out = TorchDTensor._distribute(tensor, None, layout, src_data_rank)
    for key, value in tensor.__dict__.items():
        out.__dict__.setdefault(key, value)
    return out


def _before_load(module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *_: Any) -> None:
    """With `assign=True` tensors are put in place as they are: they shall lie as those whose place they take.

    Plain ones are taken to be alike on all ranks, as without `assign`.
    """
    if not metadata.get("assign_to_params_buffers", False):
        return
    for key, own in (*module._parameters.items(), *module._buffers.items()):
        given = state.get(prefix + key)
        if isinstance(own, TorchDTensor) and isinstance(given, torch.Tensor) and given.shape == own.shape:
            if isinstance(given, TorchDTensor):
                state[prefix + key] = given.redistribute(layout=own.layout)
            else:
                state[prefix + key] = TorchDTensor._distribute(given.detach(), None, own.layout, None)


def _hook_root(module: nn.Module, mesh: DeviceMesh) -> None:
    def before(_: nn.Module, args: Any) -> None:
        implicit.push(mesh)

    def after(_: nn.Module, args: Any, out: Any) -> None:
        implicit.pop()
        if torch.is_grad_enabled():
            implicit.watch(nodes_of(out), mesh)

    module.register_forward_pre_hook(before, prepend=True)
    module.register_forward_hook(after, always_call=True)


def local_map(func: Callable[..., Any], out_layouts: Any, in_layouts: Any, out_shapes: Any) -> Callable[..., Any]:
    """See `hyper_parallel.local_map`."""

    def run(*args: Any, **kwargs: Any) -> Any:
        tensors = [x for x in args if isinstance(x, TorchDTensor)]
        wanted = iter(_listed(in_layouts, len(tensors)))
        moved = [_moved(x, next(wanted)) if isinstance(x, TorchDTensor) else x for x in args]
        split = {
            a for x in moved if isinstance(x, TorchDTensor) for a in (*x.layout.sharded_axes, *x.layout.partial_axes)
        }
        local = [_local_under(x, split) if isinstance(x, TorchDTensor) else x for x in moved]
        out = func(*local, **kwargs)
        single = not isinstance(out, (list, tuple))
        outs = [out] if single else list(out)
        shapes = _listed(out_shapes, len(outs))
        done = [_wrapped(*item) for item in zip(outs, _listed(out_layouts, len(outs)), shapes, strict=True)]
        return done[0] if single else type(out)(done)

    return run


def _listed(value: Any, num: int) -> list[Any]:
    if isinstance(value, (list, tuple)) and len(value) == num and not all(isinstance(v, int) for v in value):
        return list(value)
    return [value] * num


def _moved(x: TorchDTensor, layout: Layout | None) -> TorchDTensor:
    return x if layout is None else x.redistribute(layout=layout)


def _local_under(x: TorchDTensor, split: set[str]) -> torch.Tensor:
    used = set(x.layout.sharded_axes) | set(x.layout.partial_axes)
    return x.local(x.layout.cotangent.with_partial(*sorted(split - used)))


def _wrapped(local: Any, layout: Layout | None, shape: Any) -> Any:
    if not isinstance(local, torch.Tensor) or layout is None:
        return local
    return TorchDTensor._from_local(local, None, None, None, shape, layout)


def register_rule(func: Any, template: Any) -> None:
    """See `hyper_parallel.register_sharding_rule`."""

    def rule(*args: Any, **kwargs: Any) -> Rule:
        return Rule(template.bind([x.shape for x in tensors_in((*args, *kwargs.values()))]))

    HANDLERS[func] = ShardedOp(rule)


def fully_shard(module: Any, **options: Any) -> Any:
    """See `hyper_parallel.fully_shard`."""
    from hyper_parallel.platform.torch import fully_shard as implementation

    return implementation.fully_shard(module, **options)
