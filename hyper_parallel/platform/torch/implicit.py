# SPDX-License-Identifier: Apache-2.0
"""Inside of a module wrapped by `shard_module`, plain tensors count as copies that all ranks hold alike.

Models make such tensors in `forward`: positions, masks, constants. Every rank runs the same code, so they
are alike. Outside of such a module nobody knows, and mixing is an error. Activation checkpointing runs parts
of a forward again within backward, on whatever thread the autograd engine uses: there the rule holds too, in
backward passes that go through an output of such a module, and in no others.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import torch

_state = threading.local()
# Backward pass -> mesh of the module that it reached last.
_reached: dict[int, Any] = {}


def implicit_mesh() -> Any:
    """The mesh on which plain tensors count as copies now, or None."""
    stack = getattr(_state, "meshes", None)
    if stack:
        return stack[-1]
    return _reached.get(torch._C._current_graph_task_id()) if _reached else None


def push(mesh: Any) -> None:
    """Plain tensors count as copies on `mesh` from here on."""
    if not hasattr(_state, "meshes"):
        _state.meshes = []
    _state.meshes.append(mesh)


def pop() -> None:
    """End what the last `push` began."""
    _state.meshes.pop()


def watch(nodes: Iterable[Any], mesh: Any) -> None:
    """Plain tensors count as copies on `mesh` in backward passes too, once they reach one of the `nodes`."""

    def reach(_: Any) -> None:
        task = torch._C._current_graph_task_id()
        if task not in _reached:
            torch.autograd.Variable._execution_engine.queue_callback(lambda: _reached.pop(task, None))
        _reached[task] = mesh

    for node in nodes:
        node.register_prehook(reach)
