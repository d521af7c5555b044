# SPDX-License-Identifier: Apache-2.0
"""Where backward enters a module: the autograd nodes of its outputs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from hyper_parallel.platform.torch.dtensor import TorchDTensor


def nodes_of(out: Any) -> list[Any]:
    """The nodes that made the tensors of an output, each once. A hook on a node outlives changes of the tensor."""
    nodes = {id(node): node for tensor in _tensors_in(out) if (node := _node_of(tensor)) is not None}
    return list(nodes.values())


def _tensors_in(value: Any, depth: int = 4) -> Iterator[torch.Tensor]:
    """All tensors in an output, also in dataclasses and other objects, to some depth."""
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif depth and hasattr(leaf, "__dict__") and not isinstance(leaf, (type, nn.Module)):
            yield from _tensors_in(list(vars(leaf).values()), depth - 1)


def _node_of(tensor: torch.Tensor) -> Any:
    if isinstance(tensor, TorchDTensor):
        if tensor._origin is not None:
            return tensor._origin[0].grad_fn
        return tensor._local.grad_fn
    return tensor.grad_fn
