# SPDX-License-Identifier: Apache-2.0
"""What a user chooses about precision and offload: frozen values with PyTorch's names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Dtypes of a wrapped module.

    Attributes:
        param_dtype: Parameters in forward and backward, and what is gathered. Default: the parameters' own.
        reduce_dtype: Gradients while they are summed over ranks. Default: `param_dtype`, or the parameters' own.
        output_dtype: Floating point outputs of the module. Default: left as they are.
        cast_forward_inputs: Whether floating point inputs are cast to `param_dtype`.
    """

    param_dtype: Any = None
    reduce_dtype: Any = None
    output_dtype: Any = None
    cast_forward_inputs: bool = True


@dataclass(frozen=True)
class OffloadPolicy:
    """Where sharded parameters, gradients and optimizer state live: this one leaves them on the device."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Sharded state lives in host memory. On a CPU mesh it does so anyway; other devices are not served yet.

    Attributes:
        pin_memory: Whether host memory is pinned.
    """

    pin_memory: bool = True
