# SPDX-License-Identifier: Apache-2.0
"""Inside of a module wrapped by `shard_module`, plain tensors count as copies that all ranks hold alike.

Models make such tensors in `forward`: positions, masks, constants. Every rank runs the same code, so they
are alike. Outside of such a module nobody knows, and mixing is an error.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

_state = threading.local()


def implicit_mesh() -> Any:
    """The mesh on which plain tensors count as copies now, or None."""
    stack = getattr(_state, "meshes", None)
    return stack[-1] if stack else None


def push(mesh: Any) -> None:
    """Plain tensors count as copies on `mesh` from here on."""
    if not hasattr(_state, "meshes"):
        _state.meshes = []
    _state.meshes.append(mesh)


def pop() -> None:
    """End what the last `push` began."""
    _state.meshes.pop()


@contextlib.contextmanager
def implicit_replication(mesh: Any) -> Iterator[None]:
    """Plain tensors that meet DTensors inside the block count as copies on all ranks of `mesh`."""
    push(mesh)
    try:
        yield
    finally:
        pop()
