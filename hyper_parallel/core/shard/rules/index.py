# SPDX-License-Identifier: Apache-2.0
"""Lookups: embedding, gather, and rows picked by an index tensor."""

from __future__ import annotations

from hyper_parallel.core.shard.factor_rule import WHOLE, FactorRule, parse_rule

EMBEDDING = parse_rule("..., v~ d -> ... d")


def cross_entropy(ndim: int, *, class_dim: int, has_weight: bool, target_is_classes: bool) -> FactorRule:
    """Per-row losses `(N, C, ...), (N, ...) -> (N, ...)`; a split class dim is reduced inside the kernel.

    Args:
        ndim: Number of dims of the logits.
        class_dim: Which of them are the classes.
        has_weight: Whether class weights are given (whole on every rank).
        target_is_classes: Whether targets are class indices rather than probabilities.
    """
    names = tuple("c" if i == class_dim else f"n{i}" for i in range(ndim))
    rows = tuple(name for name in names if name != "c")
    operands = [names, rows if target_is_classes else names]
    if has_weight:
        operands.append(("w",))
    return FactorRule(tuple(operands), (rows,), {"w": WHOLE})
