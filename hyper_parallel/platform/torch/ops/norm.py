# SPDX-License-Identifier: Apache-2.0
"""Layer and RMS norm, attention."""

from __future__ import annotations

from typing import Any

from hyper_parallel.core.shard.rules.attention import attention
from hyper_parallel.core.shard.rules.reduction import trailing
from hyper_parallel.platform.torch.dispatch import Rule, sharded
from hyper_parallel.platform.torch.ops.random import random_call


@sharded("layer_norm")
def layer_norm(
    input: Any, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any
) -> Rule:
    """Normalised dims must be whole; the others may be split, weights then get pending gradients."""
    num_weights = (weight is not None) + (bias is not None)
    return Rule(trailing(input.ndim, len(normalized_shape), num_weights))


@sharded("rms_norm")
def rms_norm(input: Any, normalized_shape: Any, weight: Any = None, eps: float | None = None) -> Rule:
    """As `layer_norm`."""
    return Rule(trailing(input.ndim, len(normalized_shape), weight is not None))


@sharded("scaled_dot_product_attention")
def sdpa(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **_: Any,
) -> Rule:
    """Batch and heads may be split."""
    rule = attention(
        query.shape,
        key.shape,
        value.shape,
        None if attn_mask is None else attn_mask.shape,
        is_causal=is_causal,
        layouts=(query.layout, key.layout, value.layout),
    )
    return Rule(rule, call=random_call if dropout_p > 0 else None)
