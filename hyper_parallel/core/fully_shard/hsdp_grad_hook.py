# SPDX-License-Identifier: Apache-2.0
"""What happens to a gradient: dtype on the wire, division, reduction, accumulation. Pure decisions.

Note [One division]
    A gradient is divided exactly once, by the number of ranks over which it is averaged (shard axis
    times replicate axis) or by the user's factor, whatever the mesh. No backend is asked for an average.
    The division comes after the sum, except for a sum that a backend forms in fp16: there it comes before,
    or the sum could overflow.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class GradOptions:
    """What the user may switch between two backwards.

    Attributes:
        is_synced: Reduce after backward; else keep the full gradients and add the next ones to them.
        is_all_reduced: With a replicate axis: reduce over it too; else keep the shard's sum and add the next.
        divide_factor: Instead of the number of ranks.
        reshard_after_backward: Drop the full parameters after backward.
        reduces_unused: Reduce zeros for a group whose backward did not run.
    """

    is_synced: bool = True
    is_all_reduced: bool = True
    divide_factor: float | None = None
    reshard_after_backward: bool = True
    reduces_unused: bool = False


@dataclass(frozen=True, slots=True)
class Precision:
    """Dtypes of one flat unit, and their sizes in bytes where one has to choose.

    Attributes:
        param: Of the sharded parameters.
        gathered: Of the full parameters, hence of their gradients.
        reduce: In which gradients are summed.
        grad: Of the sharded gradients.
    """

    param: Any
    gathered: Any
    reduce: Any
    grad: Any

    @classmethod
    def of(cls, policy: Any, dtype: Any, is_floating: bool) -> Precision:
        """The dtypes that `policy` gives parameters of `dtype`."""
        if not is_floating:
            return cls(dtype, dtype, dtype, dtype)
        gathered = policy.param_dtype or dtype
        return cls(dtype, gathered, policy.reduce_dtype or gathered, policy.grad_dtype or dtype)

    def wire(self, *, sums_locally: bool, is_accumulating: bool) -> Any:
        """Dtype of the full gradient buffer.

        Where the sum is formed by us, in fp32, values travel as they were computed: widening them first would
        change nothing but the bytes. Gradients of several backwards are added in the reduce dtype.
        """
        return self.gathered if sums_locally and not is_accumulating else self.reduce


def divide_factors(factor: float, *, is_divided_first: bool) -> tuple[float, float]:
    """Divisors before and after the sum. See Note [One division]."""
    return (factor, 1.0) if is_divided_first else (1.0, factor)
