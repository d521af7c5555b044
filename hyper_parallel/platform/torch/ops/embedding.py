# SPDX-License-Identifier: Apache-2.0
"""Embedding, also with a vocabulary split over ranks."""

from __future__ import annotations

from typing import Any

import torch

from hyper_parallel.core.shard.rules.index import EMBEDDING
from hyper_parallel.platform.torch.dispatch import NoRuleError, Resolved, Rule, sharded


@sharded("embedding")
def embedding(
    input: Any,
    weight: Any,
    padding_idx: Any = None,
    max_norm: Any = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Rule:
    """Rows of `weight`; a rank that holds part of them gives zeros for the others: the output is a pending sum."""
    if max_norm is not None or scale_grad_by_freq or sparse:
        raise NoRuleError(
            "embedding(max_norm, scale_grad_by_freq or sparse): these look at the whole table. Run it with local_map."
        )
    rule = EMBEDDING.bind((input.shape, weight.shape))
    return Rule(rule, call=_embed)


def _embed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], resolved: Resolved) -> torch.Tensor:
    spec = resolved.targets[1]
    if not spec.layout.dims[0]:
        return func(*args, **kwargs)
    index, weight = args[0], args[1]
    padding_idx = kwargs.get("padding_idx", args[2] if len(args) > 2 else None)
    start, stop = spec.layout.box(spec.shape, spec.layout.mesh.get_rank())[0]
    here = (index >= start) & (index < stop)
    if stop == start:
        # A row to look up for nothing, so that this rank too refuses an index that no rank has.
        weight = torch.cat((weight, weight.new_zeros(1, weight.shape[1])))
    if padding_idx is not None:
        padding_idx = padding_idx % spec.shape[0]
        padding_idx = padding_idx - start if start <= padding_idx < stop else None
    known = (index >= 0) & (index < spec.shape[0])
    local_index = torch.where(here, index - start, torch.where(known, 0, spec.shape[0]))
    rows = torch.nn.functional.embedding(local_index, weight, padding_idx)
    return rows * here.unsqueeze(-1)
