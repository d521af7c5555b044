# SPDX-License-Identifier: Apache-2.0
"""Full state dicts of `torch.distributed.checkpoint.state_dict` for our DTensors: gathered, and cut again.

torch asks for its own class DTensor wherever it gathers or cuts, and takes any other tensor for a whole one: a save
with `full_state_dict=True` would silently write the shards of one rank. It has no hook, so the four private functions
through which all such tensors pass are extended, once, in their places. `tests/torch/checkpoint` fails if they move.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.distributed import _state_dict_utils
from torch.distributed.checkpoint import state_dict as _users

from hyper_parallel.platform.torch.dtensor import TorchDTensor


def install() -> None:
    """Extend torch's functions; the second call does nothing.

    Communication: none. Gathering then is one plan per tensor to copies on all ranks, cutting is none.
    """
    if hasattr(_state_dict_utils._iterate_state_dict, "__wrapped__"):
        return
    for name, extend in (
        ("_iterate_state_dict", _gathering),
        ("_broadcast_tensors", _cutting_some),
        ("_broadcast_state_dict", _cutting),
        ("_distribute_state_dict", _cutting),
    ):
        original = getattr(_state_dict_utils, name)
        extended = functools.wraps(original)(extend(original))
        for module in (_state_dict_utils, _users):
            if hasattr(module, name):
                setattr(module, name, extended)


def _gathering(iterate: Callable[..., Any]) -> Callable[..., Any]:
    """What torch does to its own DTensors is done to ours: the protocol it uses is the same."""

    def extended(value: Any, sharded_func: Any, dtensor_func: Any, tensor_func: Any, **options: Any) -> Any:
        if isinstance(value, TorchDTensor):
            tensor_func = dtensor_func
        return iterate(value, sharded_func, dtensor_func, tensor_func, **options)

    return extended


def _cutting(spread: Callable[..., None]) -> Callable[..., None]:
    """Whole tensors that were put in the place of our DTensors are cut as those were."""

    def extended(full_state_dict: Any, local_state_dict: dict[str, Any], *args: Any, **options: Any) -> None:
        layouts = _layouts(local_state_dict, local_state_dict)
        spread(full_state_dict, local_state_dict, *args, **options)
        _cut(local_state_dict, layouts)

    return extended


def _cutting_some(spread: Callable[..., None]) -> Callable[..., None]:
    """As `_cutting` for some keys, so that only their whole tensors are held at a time."""

    def extended(full_state_dict: Any, local_state_dict: dict[str, Any], keys: list[str], *args: Any) -> None:
        layouts = _layouts(local_state_dict, keys)
        spread(full_state_dict, local_state_dict, keys, *args)
        _cut(local_state_dict, layouts)

    return extended


def _layouts(state: dict[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    return {key: value.layout for key in keys if isinstance(value := state.get(key), TorchDTensor)}


def _cut(state: dict[str, Any], layouts: dict[str, Any]) -> None:
    for key, layout in layouts.items():
        whole = state.get(key)
        if isinstance(whole, torch.Tensor) and not isinstance(whole, TorchDTensor):
            # Every rank has the same values here, none of which need sending.
            piece = TorchDTensor._distribute(whole.detach(), None, layout, None)
            # A view would keep the whole tensor alive.
            state[key] = piece.clone() if piece._local.numel() < whole.numel() else piece
