# SPDX-License-Identifier: Apache-2.0
"""DTensors from plain tensors: from pieces, and from a whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hyper_parallel.core.dtensor import global_shape_of
from hyper_parallel.core.errors import OperandError, PartialError, UnevenError
from hyper_parallel.core.layout import Layout, as_layout
from hyper_parallel.platform.torch import full_state_dicts
from hyper_parallel.platform.torch.dtensor import TorchDTensor, wrap
from hyper_parallel.platform.torch.spec import piece, spec_of

# When the first DTensor is made, not on import: it loads torch.distributed.tensor (0.5 s), as optimizers do.
full_state_dicts.install()


def from_local(
    local: torch.Tensor,
    device_mesh: Any,
    placements: Any,
    run_check: bool | None,
    shape: Sequence[int] | None,
    layout: Layout | None,
) -> TorchDTensor:
    """See `DTensor.from_local`."""
    if isinstance(local, TorchDTensor):
        raise OperandError("from_local: got a DTensor. Pass a plain tensor, or use x.redistribute.")
    layout = as_layout(layout or placements, device_mesh, local.dim(), "from_local")
    sharded = any(layout.dims)
    if run_check or (run_check is None and shape is None and sharded):
        from hyper_parallel.platform.torch import platform

        ranks = layout.mesh.ranks
        shapes = platform.collectives.all_gather_object(tuple(local.shape), ranks)
        found = global_shape_of(layout, dict(zip(ranks, shapes, strict=True)))
        if shape is not None and tuple(shape) != found:
            raise UnevenError(
                f"from_local: the local sizes make shape {found}, not {tuple(shape)}. Pass the right shape."
            )
        shape = found
    elif shape is None:
        shape = _even_shape(layout, local.shape)
    return TorchDTensor(local, layout, shape)


def distribute(tensor: torch.Tensor, device_mesh: Any, placements: Any, src_data_rank: int | None) -> TorchDTensor:
    """See `hyper_parallel.distribute_tensor`."""
    if isinstance(tensor, TorchDTensor):
        raise OperandError("distribute_tensor: got a DTensor. Use x.redistribute to change its layout.")
    layout = as_layout(placements, device_mesh, tensor.dim(), "distribute_tensor")
    layout.check_shape(tensor.shape, "distribute_tensor")
    if layout.partial:
        raise PartialError(
            f"distribute_tensor to {layout}: a full tensor has no operands of a pending reduction. "
            "Use Shard or Replicate, or DTensor.from_local with Partial."
        )
    spec = spec_of(layout, tensor.shape)
    full = tensor.detach()
    if src_data_rank is not None and layout.mesh.size() > 1 and not full.is_meta:
        from hyper_parallel.platform.torch import platform

        full = platform.collectives.broadcast(full, src_data_rank, layout.mesh.ranks)
    local = piece(full, spec)
    out = wrap(local.requires_grad_(tensor.requires_grad), spec)
    return torch.nn.Parameter(out, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else out  # type: ignore[return-value]


def _even_shape(layout: Layout, local_shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(size * layout.mesh.num_ranks(axes) for size, axes in zip(local_shape, layout.dims, strict=True))
