# SPDX-License-Identifier: Apache-2.0
"""`torch.distributed.checkpoint.state_dict` with full state dicts: no shard is ever taken for a whole tensor."""

from __future__ import annotations

import copy
import inspect
import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _state_dict_utils
from torch.distributed.checkpoint import state_dict as dcp_state_dict
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from hyper_parallel import DTensor, ShardingPlan, column_parallel, fully_shard, init_device_mesh, shard_module
from hyper_parallel.testing import distributed
from tests.torch.fully_shard.support import assert_same, full, full_params, mesh_1d

WAYS = ["fully_shard", "shard_module"]


def net() -> nn.Sequential:
    torch.manual_seed(11)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    model.register_buffer("steps", torch.tensor(3))
    return model


def spread(model: nn.Sequential, way: str) -> nn.Sequential:
    if way == "shard_module":
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        return shard_module(model, mesh, ShardingPlan(modules={"0": column_parallel(outputs=(...,))}))
    fully_shard(model[0], mesh=mesh_1d())
    return fully_shard(model, mesh=mesh_1d())


def trained(model: nn.Module) -> tuple[nn.Module, torch.optim.AdamW]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step(model, optimizer)
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.arange(8.0).view(2, 4) - 3).square().sum().backward()
    optimizer.step()


def assert_plain(actual: Any, expected: Any) -> None:
    """Same nested dicts, with plain tensors only."""
    flat, _ = _state_dict_utils._flatten_state_dict(actual)
    wanted, _ = _state_dict_utils._flatten_state_dict(expected)
    assert set(flat) == set(wanted)
    for name, value in wanted.items():
        assert type(flat[name]) is type(value), name
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(flat[name], value, msg=lambda text, n=name: f"{n}: {text}")
        else:
            assert flat[name] == value, name


@pytest.mark.parametrize("way", WAYS)
@distributed(2)
def test_full_state_dicts_are_whole_and_plain(way: str) -> None:
    plain = trained(net())
    ours = trained(spread(net(), way))
    options = StateDictOptions(full_state_dict=True)
    assert_plain(get_model_state_dict(ours[0], options=options), get_model_state_dict(plain[0], options=options))
    assert_plain(get_optimizer_state_dict(*ours, options=options), get_optimizer_state_dict(*plain, options=options))
    model_state, optimizer_state = get_state_dict(*ours, options=options)
    expected = get_state_dict(*plain, options=options)
    assert_plain(model_state, expected[0])
    assert_plain(optimizer_state, expected[1])


@pytest.mark.parametrize("way", WAYS)
@distributed(2)
def test_with_cpu_offload_rank_0_has_all_and_the_others_nothing(way: str) -> None:
    plain, ours = trained(net()), trained(spread(net(), way))
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    states = get_state_dict(*ours, options=options)
    expected = get_state_dict(*plain, options=StateDictOptions(full_state_dict=True))
    if dist.get_rank() == 0:
        assert_plain(states[0], expected[0])
        assert_plain(states[1], expected[1])
    else:
        assert states == ({}, {})


@distributed(2)
def test_with_cpu_offload_alone_they_stay_sharded() -> None:
    model, _ = trained(spread(net(), "fully_shard"))
    state = get_model_state_dict(model, options=StateDictOptions(cpu_offload=True))
    assert all(isinstance(value, DTensor) for name, value in state.items() if name != "steps")
    assert_same({n: full(v) for n, v in state.items()}, {n: full(v) for n, v in model.state_dict().items()}, 0, 0)


@pytest.mark.parametrize("sends", [False, True])
@pytest.mark.parametrize("way", WAYS)
@distributed(2)
def test_full_state_dicts_are_taken(way: str, sends: bool) -> None:
    plain = trained(net())
    source = copy.deepcopy(get_state_dict(*plain, options=StateDictOptions(full_state_dict=True)))
    if sends and dist.get_rank() > 0:
        for value in source[0].values():
            value.zero_()
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=sends)
    model = spread(net(), way)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.3)
    set_state_dict(model, optimizer, model_state_dict=source[0], optim_state_dict=source[1], options=options)
    assert_same(full_params(model), full_params(plain[0]), 0, 0)
    for p in model.parameters():
        assert optimizer.state[p]["exp_avg"].layout == p.layout
    step(*plain)
    step(model, optimizer)
    assert_same(full_params(model), full_params(plain[0]))


@pytest.mark.parametrize("sends", [False, True])
@distributed(2)
def test_the_two_halves_apart(sends: bool) -> None:
    plain = trained(net())
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=sends)
    has = dist.get_rank() == 0 or not sends
    model = spread(net(), "fully_shard")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.3)
    # A copy: torch takes a step count as it is, and the two optimizers would share it.
    source = copy.deepcopy((get_model_state_dict(plain[0]), get_optimizer_state_dict(*plain))) if has else ({}, {})
    set_model_state_dict(model, source[0], options=options)
    set_optimizer_state_dict(model, optimizer, source[1], options=options)
    step(*plain)
    step(model, optimizer)
    assert_same(full_params(model), full_params(plain[0]))


@pytest.mark.parametrize("sends", [False, True])
@distributed(2)
def test_a_full_state_dict_into_a_model_on_meta(sends: bool) -> None:
    source = net()
    with torch.device("meta"):
        model = net()
    model.steps = source.steps
    spread(model, "fully_shard")
    has = dist.get_rank() == 0 or not sends
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=sends)
    with warnings.catch_warnings():
        # torch warns of a helper of its own where all parameters are on meta.
        warnings.simplefilter("ignore")
        set_model_state_dict(model, source.state_dict() if has else {}, options=options)
    model(torch.ones(2, 4)).sum().backward()
    assert_same(full_params(model), full_params(source), 0, 0)


@distributed(2)
def test_the_gathered_tensors_are_no_views_of_what_trains_on() -> None:
    model, optimizer = trained(spread(net(), "fully_shard"))
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    kept = {name: value.clone() for name, value in state.items()}
    step(model, optimizer)
    assert_same(state, kept, 0, 0)


WRAPPED = "model = hyper_parallel.fully_shard(nn.Linear(2, 2))"
BY_HAND = (
    "model = nn.Linear(2, 2)\n"
    "mesh = hyper_parallel.init_device_mesh('cpu', (1,))\n"
    "for name, p in list(model.named_parameters()):\n"
    "    model.register_parameter(name, nn.Parameter(hyper_parallel.distribute_tensor(p.detach(), mesh)))"
)


@pytest.mark.parametrize("making", [WRAPPED, BY_HAND])
@pytest.mark.parametrize("first", ["hyper_parallel", "torch.distributed.checkpoint.state_dict"])
def test_the_order_of_imports_does_not_matter(first: str, making: str) -> None:
    second = {"hyper_parallel": "torch.distributed.checkpoint.state_dict"}.get(first, "hyper_parallel")
    program = (
        f"import {first}\n"
        "import torch\n"
        "from torch import nn\n"
        "import hyper_parallel\n"
        f"{making}\n"
        f"import {second}\n"
        "from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict\n"
        "state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))\n"
        "assert all(type(value) is torch.Tensor for value in state.values()), state\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_torch_still_has_what_is_extended() -> None:
    # If this fails, torch has moved the functions that `full_state_dicts.py` extends: extend their successors.
    from hyper_parallel.platform.torch import full_state_dicts

    full_state_dicts.install()
    parameters = {
        name: list(inspect.signature(inspect.unwrap(getattr(_state_dict_utils, name))).parameters)
        for name in ("_iterate_state_dict", "_broadcast_tensors", "_broadcast_state_dict", "_distribute_state_dict")
    }
    assert parameters["_iterate_state_dict"][:4] == [
        "iter_object",
        "sharded_tensor_func",
        "dtensor_func",
        "tensor_func",
    ]
    assert parameters["_broadcast_tensors"][:3] == ["full_state_dict", "local_state_dict", "keys"]
    for name in ("_broadcast_state_dict", "_distribute_state_dict"):
        assert parameters[name][:2] == ["full_state_dict", "local_state_dict"]
        assert getattr(dcp_state_dict, name) is getattr(_state_dict_utils, name)
