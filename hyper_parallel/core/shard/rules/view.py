# SPDX-License-Identifier: Apache-2.0
"""Views: where the dims of the input are found in the output."""

from __future__ import annotations

from collections.abc import Sequence

from hyper_parallel.core.shard.factor_rule import LINEAR, ONE, WHOLE, FactorRule


def permute(order: Sequence[int]) -> FactorRule:
    """Output dim i is input dim `order[i]`."""
    names = tuple(f"d{i}" for i in range(len(order)))
    return FactorRule((names,), (tuple(names[i] for i in order),), {}, ((0,),), LINEAR)


def select_dims(ndim: int, output: Sequence[int | None], whole: Sequence[int] = ()) -> FactorRule:
    """Output dim i is input dim `output[i]`, or new (None). Dims in `whole`, or that vanish, must be whole."""
    names = tuple(f"d{i}" for i in range(ndim))
    gone = set(range(ndim)) - {i for i in output if i is not None}
    factors = {names[i]: WHOLE for i in gone.union(whole)}
    out = tuple(ONE if i is None else names[i] for i in output)
    return FactorRule((names,), (out,), factors, ((0,),), LINEAR)
