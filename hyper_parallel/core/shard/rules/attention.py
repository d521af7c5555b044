# SPDX-License-Identifier: Apache-2.0
"""Scaled dot-product attention: batch and heads split, each query row needs all keys."""

from __future__ import annotations

from collections.abc import Sequence

from hyper_parallel.core.layout import Layout
from hyper_parallel.core.shard.factor_rule import ONE, WHOLE, Factor, FactorRule

Shape = Sequence[int]


def attention(
    query: Shape, key: Shape, value: Shape, mask: Shape | None, *, is_causal: bool, layouts: Sequence[Layout]
) -> FactorRule:
    """`(..., H, Q, D), (..., H', K, D), (..., H', K, E) -> (..., H, Q, E)`; H' may divide H (grouped queries).

    Args:
        query: Shape of the queries.
        key: Shape of the keys.
        value: Shape of the values.
        mask: Shape of the mask, broadcast against (..., H, Q, K), or None.
        is_causal: Rows are then tied to their position, so queries must be whole.
        layouts: Layouts of queries, keys and values: with grouped queries heads stay split only where every axis that
            splits some of them cuts both head counts evenly.
    """
    num_lead = len(query) - 3
    lead = tuple(f"b{i}" for i in range(max(num_lead, 0)))
    has_heads = len(query) > 2
    factors: dict[str, Factor] = {"k": WHOLE, "d": WHOLE}
    if is_causal:
        factors["q"] = WHOLE
    if has_heads and query[-3] != key[-3]:
        axes = {axis: None for layout in layouts for axis in layout.dims[-3]}
        parts = layouts[0].mesh.num_ranks(tuple(axes))
        if query[-3] % parts or key[-3] % parts or any(layout.ragged for layout in layouts):
            factors["h"] = WHOLE
    heads = ("h",) if has_heads else ()
    operands = [
        (*lead, *heads, "q", "d"),
        (*lead, *heads, "k", "d"),
        (*lead, *heads, "k", "e"),
    ]
    if mask is not None:
        names = (*lead, *heads, "q", "k")[-len(mask) :]
        full = dict(zip((*lead, *heads), query, strict=False)) | {"q": query[-2], "k": key[-2]}
        operands.append(tuple(ONE if n == 1 and full[name] != 1 else name for name, n in zip(names, mask, strict=True)))
    return FactorRule(tuple(operands), ((*lead, *heads, "q", "e"),), factors)
