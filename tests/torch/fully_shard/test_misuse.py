# SPDX-License-Identifier: Apache-2.0
"""What used to train wrongly without a word: it works now, or an error says so before anything has changed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call

from hyper_parallel import fully_shard
from hyper_parallel.core.errors import ParamStateError
from hyper_parallel.testing import distributed
from tests.torch.fully_shard.support import assert_same, assert_sharded, full_params, mesh_1d


def net() -> nn.Sequential:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    model.register_buffer("gain", torch.ones(()))
    return model


def wrapped(model: nn.Sequential, **options: Any) -> nn.Sequential:
    fully_shard(model[0], mesh=mesh_1d(), **options)
    return fully_shard(model, mesh=mesh_1d(), **options)


X = torch.arange(8.0).view(2, 4) - 3


@pytest.mark.parametrize("is_unsharded", [False, True])
@pytest.mark.parametrize("kind", ["plain", "parameter", "dtensor"])
@distributed(2)
def test_functional_call_is_refused_and_leaves_nothing_behind(kind: str, is_unsharded: bool) -> None:
    model = wrapped(net())
    expected, before = model(X).detach(), full_params(model)
    weights: dict[str, Any] = {name: 2 * value for name, value in before.items()}
    if kind == "parameter":
        weights = {name: nn.Parameter(value) for name, value in weights.items()}
    elif kind == "dtensor":
        weights = {name: (2 * p).detach() for name, p in model.named_parameters()}
    if is_unsharded:
        model[0].unshard()
    with pytest.raises(ParamStateError, match=r'functional_call.*"[02].weight".*load_state_dict'):
        functional_call(model, weights, (X,))
    if is_unsharded:
        model[0].reshard()
    assert_same(full_params(model), before, 0, 0)
    with torch.no_grad():
        torch.testing.assert_close(model(X), expected, rtol=0, atol=0)
    assert_sharded(model)


@distributed(2)
def test_functional_call_with_other_buffers_works() -> None:
    class Scaled(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.register_buffer("gain", torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.gain

    torch.manual_seed(0)
    model = Scaled()
    plain = copy.deepcopy(model)
    fully_shard(model, mesh=mesh_1d())
    given = {"gain": torch.full((4,), 3.0)}
    torch.testing.assert_close(functional_call(model, given, (X,)), functional_call(plain, given, (X,)))
    same = dict(model.named_parameters())
    torch.testing.assert_close(functional_call(model, same, (X,)), plain(X))
