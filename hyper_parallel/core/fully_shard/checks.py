# SPDX-License-Identifier: Apache-2.0
"""Arguments of `fully_shard` that are of a wrong kind, refused by name."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from hyper_parallel.core.fully_shard.policy import MixedPrecisionPolicy, OffloadPolicy


def check_arguments(
    modules: Sequence[Any],
    *,
    reshard_after_forward: Any,
    shard_placement_fn: Any,
    mp_policy: Any,
    offload_policy: Any,
) -> None:
    """Refuse wrong types. PyTorch's own policies are taken: they have the same name and attributes.

    Raises:
        TypeError: names the argument.
        ValueError: an empty list of modules.
    """
    if not modules:
        raise ValueError("fully_shard([]): the list is empty. Pass the modules that form the group.")
    _check("reshard_after_forward", reshard_after_forward, ("bool", "int"), "True, False or None")
    _check("mp_policy", mp_policy, (MixedPrecisionPolicy.__name__,), "MixedPrecisionPolicy(param_dtype=...)")
    _check("offload_policy", offload_policy, (OffloadPolicy.__name__,), "OffloadPolicy() or CPUOffloadPolicy()")
    if shard_placement_fn is not None and not callable(shard_placement_fn):
        raise TypeError(
            f"fully_shard(shard_placement_fn={shard_placement_fn!r}): it is no function. Pass one of a parameter."
        )


def _check(argument: str, value: Any, kinds: Sequence[str], wanted: str) -> None:
    if value is not None and not any(kind.__name__ in kinds for kind in type(value).__mro__):
        raise TypeError(f"fully_shard({argument}={value!r}): it is a {type(value).__name__}. Pass {wanted}.")


def check_factor(factor: Any) -> float:
    """A number to divide gradients by.

    Raises:
        TypeError: no number.
        ValueError: not above 0, or not finite.
    """
    if isinstance(factor, bool) or not isinstance(factor, (int, float)):
        raise TypeError(f"set_gradient_divide_factor({factor!r}): it is a {type(factor).__name__}. Pass a number.")
    if not (factor > 0 and math.isfinite(factor)):
        raise ValueError(
            f"set_gradient_divide_factor({factor}): gradients cannot be divided by it. Pass a finite number above 0."
        )
    return factor
