# SPDX-License-Identifier: Apache-2.0
"""What a `ShardingPlan` says of inputs and outputs of modules: checked when wrapping, done by hooks."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from hyper_parallel.core.device_mesh import DeviceMesh
from hyper_parallel.core.errors import LayoutError
from hyper_parallel.core.layout import as_layout
from hyper_parallel.core.shard.sharding_plan import Style, layout_for
from hyper_parallel.platform.torch.dtensor import TorchDTensor, wrap
from hyper_parallel.platform.torch.spec import spec_of


def check_inputs(child: nn.Module, name: str, style: Style) -> None:
    """Refuse inputs by names that the module's forward does not have.

    Raises:
        LayoutError: such a name.
    """
    if not isinstance(style.inputs, Mapping):
        return
    known = inspect.signature(child.forward).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in known.values()):
        return
    for key in style.inputs:
        if key not in known:
            raise LayoutError(
                f'inputs of "{name}": the plan names "{key}", which its forward does not take. Use {_listing(known)}.'
            )


def hook_io(child: nn.Module, name: str, mesh: DeviceMesh, style: Style) -> None:
    """Have inputs and outputs of `child` redistributed as they pass."""
    if style.inputs is not None:
        names = _positional_names(child) if isinstance(style.inputs, Mapping) else []

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
            specs = style.inputs
            if isinstance(specs, Mapping):
                by_place = [specs.get(key) for key in names[: len(args)]]
                specs = [*by_place, *[None] * (len(args) - len(by_place)), *(specs.get(key) for key in kwargs)]
            arranged = _arrange((*args, *kwargs.values()), specs, mesh, f'input of "{name}"')
            return tuple(arranged[: len(args)]), dict(zip(kwargs, arranged[len(args) :], strict=True))

        child.register_forward_pre_hook(before, with_kwargs=True)
    if style.outputs is not None:
        child.register_forward_hook(lambda _, args, out: _arranged_output(out, style.outputs, mesh, name))


def _positional_names(child: nn.Module) -> list[str]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [key for key, p in inspect.signature(child.forward).parameters.items() if p.kind in kinds]


def _arranged_output(out: Any, specs: Any, mesh: DeviceMesh, name: str) -> Any:
    what = f'output of "{name}"'
    if isinstance(specs, Mapping):
        specs = _specs_by_key(out, specs, what)
    elif isinstance(specs, list) and not isinstance(out, torch.Tensor) and len(specs) > len(out):
        raise LayoutError(f"{what}: the plan has {len(specs)} entries, it returns {len(out)}. Give one entry for each.")
    if isinstance(out, torch.Tensor):
        return _arrange((out,), specs, mesh, what)[0]
    if isinstance(out, Mapping):
        return type(out)(**dict(zip(out, _arrange(out.values(), specs, mesh, what), strict=True)))
    arranged = _arrange(out, specs, mesh, what)
    return type(out)(*arranged) if hasattr(out, "_fields") else type(out)(arranged)


def _specs_by_key(out: Any, specs: Mapping[str, Any], what: str) -> list[Any]:
    keys = list(out) if isinstance(out, Mapping) else getattr(out, "_fields", None)
    if keys is None:
        kind = "tensor" if isinstance(out, torch.Tensor) else type(out).__name__
        raise LayoutError(f"{what}: the plan goes by keys, it is a {kind}. Give a list, or one entry.")
    for key in specs:
        if key not in keys:
            raise LayoutError(f'{what}: the plan names "{key}", which it does not return. Use {_listing(keys)}.')
    return [specs.get(key) for key in keys]


def _listing(names: Iterable[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)


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
