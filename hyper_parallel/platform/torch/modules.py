# SPDX-License-Identifier: Apache-2.0
"""`shard_module` and `local_map` on torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from hyper_parallel.core.device_mesh import DeviceMesh
from hyper_parallel.core.errors import LayoutError
from hyper_parallel.core.layout import Layout, as_layout
from hyper_parallel.core.shard.sharding_plan import ShardingPlan, layout_for
from hyper_parallel.platform.torch import full_state_dicts, implicit
from hyper_parallel.platform.torch.dispatch import HANDLERS, Rule, ShardedOp, tensors_in
from hyper_parallel.platform.torch.dtensor import TorchDTensor, wrap
from hyper_parallel.platform.torch.spec import spec_of

# `fully_shard` makes DTensors on its own. On import this would be too soon: see building.py.
full_state_dicts.install()


def shard_module(
    module: nn.Module, mesh: DeviceMesh, plan: ShardingPlan, *, src_data_rank: int | None = 0
) -> nn.Module:
    """See `hyper_parallel.shard_module`."""
    modules = dict(module.named_modules(remove_duplicate=False))
    unmatched = plan.unmatched(list(modules), [n for n, _ in module.named_parameters(remove_duplicate=False)])
    if unmatched:
        raise LayoutError(
            f"shard_module of {type(module).__name__}: the plan's {unmatched[0]!r} matches nothing in it. "
            "Correct the name, or remove the entry."
        )
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
        _hook_io(child, name, mesh, plan)
    _hook_root(module, mesh)
    return module


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


def _hook_io(child: nn.Module, name: str, mesh: DeviceMesh, plan: ShardingPlan) -> None:
    style = plan.style_of(name)
    if style.inputs is not None:

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
            specs = style.inputs
            if isinstance(specs, Mapping):
                specs = [*(None for _ in args), *(specs.get(key) for key in kwargs)]
            arranged = _arrange((*args, *kwargs.values()), specs, mesh, f'input of "{name}"')
            return tuple(arranged[: len(args)]), dict(zip(kwargs, arranged[len(args) :], strict=True))

        child.register_forward_pre_hook(before, with_kwargs=True)
    if style.outputs is not None:

        def after(_: nn.Module, args: Any, out: Any) -> Any:
            what, specs = f'output of "{name}"', style.outputs
            if isinstance(out, torch.Tensor):
                return _arrange((out,), specs, mesh, what)[0]
            if isinstance(out, Mapping):
                if isinstance(specs, Mapping):
                    specs = [specs.get(key) for key in out]
                return type(out)(**dict(zip(out, _arrange(out.values(), specs, mesh, what), strict=True)))
            arranged = _arrange(out, specs, mesh, what)
            return type(out)(*arranged) if hasattr(out, "_fields") else type(out)(arranged)

        child.register_forward_hook(after)


def _arrange(values: Iterable[Any], specs: Any, mesh: DeviceMesh, what: str) -> list[Any]:
    """Tensors redistributed as the plan says: a list has one entry per value, anything else is for the first tensor."""
    out = list(values)
    if not isinstance(specs, list):
        first = next((i for i, v in enumerate(out) if isinstance(v, torch.Tensor)), None)
        specs = [specs if i == first else None for i in range(len(out))]
    for i, (value, spec) in enumerate(zip(out, specs, strict=False)):
        if spec is None or not isinstance(value, torch.Tensor):
            continue
        if not isinstance(value, TorchDTensor):
            value = wrap(value, spec_of(as_layout(None, mesh, value.dim()), value.shape))
        out[i] = value.redistribute(layout=layout_for(spec, mesh, value.ndim, what))
    return out


def _hook_root(module: nn.Module, mesh: DeviceMesh) -> None:
    def before(_: nn.Module, args: Any) -> None:
        implicit.push(mesh)

    def after(_: nn.Module, args: Any, out: Any) -> None:
        implicit.pop()

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
