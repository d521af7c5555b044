# SPDX-License-Identifier: Apache-2.0
"""Inside of a module wrapped by `shard_module`, plain tensors count as copies that all ranks hold alike.

Models make such tensors in `forward`: positions, masks, constants. Every rank runs the same code, so they
are alike. Outside of such a module nobody knows, and mixing is an error. Activation checkpointing runs parts
of a forward again within backward, on whatever thread the autograd engine uses: there the rule holds too.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

_state = threading.local()
_latest: list[Any] = [None]


def implicit_mesh() -> Any:
    """The mesh on which plain tensors count as copies now, or None."""
    stack = getattr(_state, "meshes", None)
    if stack:
        return stack[-1]
    in_backward = torch._C._current_graph_task_id() != -1
    return _latest[0] if in_backward else None


def push(mesh: Any) -> None:
    """Plain tensors count as copies on `mesh` from here on."""
    if not hasattr(_state, "meshes"):
        _state.meshes = []
    _latest[0] = mesh
    _state.meshes.append(mesh)


def pop() -> None:
    """End what the last `push` began."""
    _state.meshes.pop()
