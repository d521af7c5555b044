# SPDX-License-Identifier: Apache-2.0
"""DTensors in torch.distributed.checkpoint: a rank's box is a chunk, whatever mesh and layout it comes from."""

from __future__ import annotations

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from hyper_parallel.core.box import box_numel, box_shape
from hyper_parallel.core.errors import CheckpointError
from hyper_parallel.platform.torch.dtensor import TorchDTensor


def chunks(x: TorchDTensor) -> list[ChunkStorageMetadata]:
    """The part of `x` on this rank: one chunk, or none if the shard is empty or the rank outside of the mesh.

    Raises:
        CheckpointError: `x` has a pending reduction.
    """
    if x.layout.partial:
        raise CheckpointError(
            f"checkpoint of DTensor {tuple(x.shape)} {x.layout}: its value is on no rank yet. Redistribute it first."
        )
    mesh = x.device_mesh
    rank = mesh.get_rank()
    if mesh.coord_of(rank) is None:
        return []
    box = x.layout.box(x.shape, rank)
    if box_numel(box) == 0:
        return []
    return [ChunkStorageMetadata(torch.Size(start for start, _ in box), torch.Size(box_shape(box)))]


def write_items(x: TorchDTensor, fqn: str) -> list[WriteItem]:
    """What DCP shall write of `x`; copies on several ranks are written once, by DCP's own choice."""
    properties = TensorProperties(dtype=x.dtype, requires_grad=x.requires_grad)
    return [
        WriteItem(
            MetadataIndex(fqn, chunk.offsets),
            WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk, properties, torch.Size(x.shape)),
        )
        for chunk in chunks(x)
    ]


def shard_at(x: TorchDTensor, index: MetadataIndex) -> torch.Tensor:
    """The memory of the chunk that `index` names.

    Raises:
        CheckpointError: this rank has no such chunk.
    """
    own = chunks(x)
    if not own or (index.offset is not None and own[0].offsets != index.offset):
        raise CheckpointError(
            f'checkpoint tensor "{index.fqn}": this rank holds no chunk at {index.offset}. Load into the layout that '
            "was planned for."
        )
    return x._local.detach()
