# SPDX-License-Identifier: Apache-2.0
"""New tensors: like another DTensor, or from a shape and a mesh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hyper_parallel.core.layout import as_layout
from hyper_parallel.platform.torch.dispatch import handles
from hyper_parallel.platform.torch.dtensor import TorchDTensor, wrap
from hyper_parallel.platform.torch.ops.random import draw
from hyper_parallel.platform.torch.spec import spec_of


@handles("zeros_like ones_like empty_like full_like")
def _like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TorchDTensor:
    """A tensor of the same shape and layout; where the other is pending, this one is a copy on all ranks."""
    x, rest = args[0], args[1:]
    requires_grad = kwargs.pop("requires_grad", False)
    out = wrap(func(x._local.detach(), *rest, **kwargs), x._grad_spec())
    return out.requires_grad_() if requires_grad else out


@handles("new_zeros new_ones new_empty new_full")
def _new(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TorchDTensor:
    """A tensor of another shape, a copy on all ranks; of the same shape, laid out alike."""
    x = args[0]
    num_values = 1 if func.__name__ == "new_full" else 0
    sizes = kwargs.pop("size", None)
    if sizes is None:
        sizes = args[1] if isinstance(args[1], (list, tuple)) else args[1 : len(args) - num_values]
    values = args[len(args) - num_values :] if num_values and "fill_value" not in kwargs else ()
    shape = tuple(sizes)
    spec = x._grad_spec() if shape == tuple(x.shape) else spec_of(as_layout(None, x.device_mesh, len(shape)), shape)
    return wrap(func(x._local.detach(), spec.local_shape, *values, **kwargs), spec)


@handles("new_tensor")
def _new_tensor(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TorchDTensor:
    """A tensor of given values, a copy on all ranks."""
    x = args[0]
    local = func(x._local.detach(), *args[1:], **kwargs)
    return wrap(local, spec_of(as_layout(None, x.device_mesh, local.dim()), local.shape))


def factory(
    name: str,
    size: Sequence[int],
    values: Sequence[Any],
    device_mesh: Any,
    placements: Any,
    dtype: torch.dtype | None,
    requires_grad: bool,
) -> TorchDTensor:
    """`torch.<name>(size, *values)` laid out over a mesh; every rank makes only its own part."""
    layout = as_layout(placements, device_mesh, len(size), name)
    layout.check_shape(size, name)
    spec = spec_of(layout.cotangent, size)
    func = getattr(torch, name)
    make = lambda: func(spec.local_shape, *values, dtype=dtype, device=layout.mesh.device_type)  # noqa: E731
    local = draw(spec.layout, make) if name in ("rand", "randn") else make()
    return wrap(local.requires_grad_(requires_grad), spec)
