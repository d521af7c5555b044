# SPDX-License-Identifier: Apache-2.0
"""Calls over lists of tensors (foreach and fused optimizers, clipping): one interception, then plain local lists."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hyper_parallel.core.errors import LayoutError
from hyper_parallel.core.layout import Layout
from hyper_parallel.core.placement_types import ReduceOp
from hyper_parallel.platform.torch.autograd import transfer
from hyper_parallel.platform.torch.dispatch import HANDLERS, describe, lost_view, name_of
from hyper_parallel.platform.torch.dtensor import TorchDTensor, wrap


def _is_list(arg: Any) -> bool:
    return isinstance(arg, (list, tuple)) and bool(arg) and isinstance(arg[0], torch.Tensor)


def _specs_of(tensors: Sequence[Any]) -> list[Any]:
    """The spec of each DTensor, None for plain tensors."""
    try:
        return [x._spec for x in tensors]
    except AttributeError:
        return [getattr(x, "_spec", None) for x in tensors]


def _local_list(func: Any, arg: Sequence[Any], lead: Sequence[Any], specs: list[Any]) -> list[torch.Tensor]:
    """Local tensors of a list, each laid out as its partner in the leading list (with `specs`) is."""
    # Specs are interned: lists that need nothing, as an optimizer's do, compare by identity in one go.
    if None not in specs and _specs_of(arg) == specs:
        return [x._local for x in arg]
    out = []
    for x, first, spec in zip(arg, lead, specs, strict=True):
        if not isinstance(x, TorchDTensor):
            if spec is not None and x.dim() > 0:
                raise LayoutError(
                    f"{name_of(func)}: a plain {describe(x)} is paired with {describe(first)}. Spread it with "
                    "distribute_tensor first."
                )
            out.append(x)
            continue
        if spec is None:
            raise LayoutError(
                f"{name_of(func)}: {describe(x)} is paired with a plain {describe(first)}. Spread that with "
                "distribute_tensor first."
            )
        if x.shape == first.shape:
            x = x.redistribute(layout=first.layout)
        elif x.ndim:
            raise LayoutError(
                f"{name_of(func)}: {describe(x)} is paired with {describe(first)}. Give both one shape, or use the "
                "function on one tensor."
            )
        else:
            x = x.redistribute(layout=Layout(x.device_mesh, ()))
        out.append(x._local)
    return out


def foreach(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An elementwise function over lists, run once on the local tensors of all of them.

    Tensors of different meshes and layouts may share a list; partners are brought to the layout of the first.
    """
    lead = next(arg for arg in (*args, *kwargs.values()) if _is_list(arg))
    in_place = func.__name__.endswith("_")
    if in_place:
        lost = next((x for x in lead if getattr(x, "_lost_view", None) is not None), None)
        if lost is not None:
            raise lost_view(func, lost)
    specs = _specs_of(lead)
    if any(spec is not None and spec.layout.partial for spec in set(specs)):
        given, lead = lead, [_finished(x, func, in_place) for x in lead]
        args = tuple(lead if arg is given else arg for arg in args)
        kwargs = {name: lead if arg is given else arg for name, arg in kwargs.items()}
        specs = _specs_of(lead)
    with torch.no_grad():
        local_args = [_local_list(func, arg, lead, specs) if _is_list(arg) else _number(arg) for arg in args]
        local_kwargs = {
            name: _local_list(func, arg, lead, specs) if _is_list(arg) else _number(arg) for name, arg in kwargs.items()
        }
        out = func(*local_args, **local_kwargs)
    if in_place or out is None:
        return None
    return [o if spec is None else wrap(o, spec) for o, spec in zip(out, specs, strict=True)]


def _finished(x: Any, func: Any, in_place: bool) -> Any:
    if not isinstance(x, TorchDTensor) or not x.layout.partial:
        return x
    if in_place:
        raise LayoutError(
            f"{name_of(func)}: {describe(x)} is pending and cannot be changed in place. Redistribute it first."
        )
    return x.redistribute(layout=x.layout.without_partial())


def _number(arg: Any) -> Any:
    if isinstance(arg, TorchDTensor):
        return arg.full_tensor()
    return arg


def foreach_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Norms of whole tensors as plain 0-dim tensors, alike on all ranks.

    Communication: one all-reduce of a vector of values per set of axes that split some tensor, however many tensors.
    """
    return _foreach_norm(*args, **kwargs)


def _foreach_norm(tensors: Sequence[Any], ord: Any = 2, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    order = float(ord)
    op = ReduceOp.MAX if order == float("inf") else ReduceOp.SUM
    finished = [_finished(x, torch._foreach_norm, False) for x in tensors]
    local = [x._local if isinstance(x, TorchDTensor) else x for x in finished]
    norms = list(torch._foreach_norm([_nonempty(x) for x in local], order, dtype=dtype))
    groups: dict[tuple[Any, tuple[str, ...]], list[int]] = {}
    for i, x in enumerate(finished):
        if isinstance(x, TorchDTensor) and x.layout.sharded_axes:
            groups.setdefault((x.device_mesh, x.layout.sharded_axes), []).append(i)
    for (mesh, axes), members in groups.items():
        values = torch.stack([norms[i].detach() for i in members])
        wide = values.float() if values.dtype in (torch.float16, torch.bfloat16) else values
        powers = wide if op is ReduceOp.MAX else wide**order
        whole = Layout(mesh, (None,))
        total = transfer(powers, whole.with_partial(*axes, op=op), whole, tuple(powers.shape))
        result = total if op is ReduceOp.MAX else total ** (1 / order)
        for i, value in zip(members, result.to(values.dtype).unbind(), strict=True):
            norms[i] = value
    return norms


def _nonempty(x: torch.Tensor) -> torch.Tensor:
    """Norms of nothing are 0, which torch refuses to compute for infinity."""
    return x if x.numel() else x.new_zeros(1)


def unscale(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """GradScaler's step: gradients times a number, and one flag for an overflow on any rank.

    Communication: one all-reduce of a single value per mesh whose axes split some gradient.
    """
    grads, found, factor = args
    func([x._local if isinstance(x, TorchDTensor) else x for x in grads], found, _number(factor))
    axes: dict[Any, dict[str, None]] = {}
    for x in grads:
        if isinstance(x, TorchDTensor) and x.layout.sharded_axes:
            axes.setdefault(x.device_mesh, {}).update(dict.fromkeys(x.layout.sharded_axes))
    for mesh, names in axes.items():
        whole = Layout(mesh, ((),) * found.dim())
        pending = whole.with_partial(*names, op=ReduceOp.MAX)
        found.copy_(transfer(found, pending, whole, tuple(found.shape)))


for _name in dir(torch):
    if _name.startswith("_foreach_") or (_name.startswith("_fused_") and _name.endswith("_")):
        HANDLERS[getattr(torch, _name)] = foreach
HANDLERS[torch._foreach_norm] = foreach_norm
HANDLERS[torch._amp_foreach_non_finite_check_and_unscale_] = unscale
