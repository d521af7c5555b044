# SPDX-License-Identifier: Apache-2.0
"""State dicts, meta devices, and parameters that are moved or replaced after wrapping."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hyper_parallel import (
    DTensor,
    Partial,
    Shard,
    ShardingPlan,
    column_parallel,
    distribute_tensor,
    fully_shard,
    init_device_mesh,
    shard_module,
)
from hyper_parallel.core.errors import ParamStateError
from hyper_parallel.testing import distributed
from tests.torch.fully_shard.support import (
    ROWS,
    assert_same,
    assert_sharded,
    full,
    full_params,
    mesh_1d,
    mesh_2d,
    my_rows,
    oracle,
    train,
    wrap_gpt,
)
from tests.torch.models import batch, make_gpt


def uneven_net() -> nn.Sequential:
    torch.manual_seed(11)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def wrapped(model: nn.Sequential, reshard: bool | None = None) -> nn.Sequential:
    fully_shard(model[0], mesh=mesh_1d(), reshard_after_forward=reshard)
    return fully_shard(model, mesh=mesh_1d(), reshard_after_forward=reshard)


def plain_state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("reshard", [None, True, False])
@pytest.mark.parametrize("when", ["at once", "after evaluation", "after training", "between unshard and reshard"])
@distributed(2)
def test_f24_a_state_dict_is_sharded_whatever_ran_before(when: str, reshard: bool | None) -> None:
    model = uneven_net()
    expected = plain_state(model)
    wrapped(model, reshard)
    if when == "after evaluation":
        with torch.no_grad():
            model(torch.ones(2, 4))
    elif when == "after training":
        model(torch.ones(2, 4)).sum().backward()
    elif when == "between unshard and reshard":
        model.unshard()
    state = model.state_dict()
    assert all(isinstance(value, DTensor) for value in state.values())
    assert_same({name: full(value) for name, value in state.items()}, expected, rtol=0, atol=0)
    model(torch.ones(2, 4)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@distributed(2)
def test_f24_true_means_resharded_for_the_root_too() -> None:
    model = wrapped(uneven_net(), reshard=True)
    out = model(torch.ones(2, 4))
    assert_sharded(model)
    out.sum().backward()
    assert_sharded(model)


@pytest.mark.parametrize("reshard", [None, True, False])
@distributed(2)
def test_f24_weights_are_dtensors_after_an_evaluation(reshard: bool | None) -> None:
    model = wrapped(uneven_net(), reshard)
    with torch.no_grad():
        model(torch.ones(2, 4))
    assert all(isinstance(p, DTensor) for p in model.parameters())


@distributed(2)
def test_weights_changed_between_two_evaluations_are_seen() -> None:
    model, plain = uneven_net(), uneven_net()
    wrapped(model, reshard=False)
    with torch.no_grad():
        torch.testing.assert_close(model(torch.ones(2, 4)), plain(torch.ones(2, 4)))
        for p in (*model.parameters(), *plain.parameters()):
            p.mul_(2)
        torch.testing.assert_close(model(torch.ones(2, 4)), plain(torch.ones(2, 4)))


@pytest.mark.parametrize("is_assigned", [False, True])
@pytest.mark.parametrize("kind", ["sharded", "plain"])
@distributed(2)
def test_c03_loaded_weights_are_used_by_the_next_forward_and_the_optimizer(kind: str, is_assigned: bool) -> None:
    other = uneven_net()
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(3)
    x = torch.ones(2, 4)
    expected_out = other(x)
    state = plain_state(other)
    if kind == "sharded":
        state = wrapped(copy.deepcopy(other)).state_dict()
    model = wrapped(uneven_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(x)
    model.load_state_dict(state, assign=is_assigned)
    torch.testing.assert_close(model(x), expected_out)
    optimizer.zero_grad()
    model(x).sum().backward()
    other(x).sum().backward()
    optimizer.step()
    torch.testing.assert_close([full(p) for p in model.parameters()], [p.detach() - p.grad for p in other.parameters()])
    torch.testing.assert_close(model(x), nn_with_step(other)(x))


def nn_with_step(model: nn.Module) -> nn.Module:
    out = copy.deepcopy(model)
    with torch.no_grad():
        for p, old in zip(out.parameters(), model.parameters(), strict=True):
            p.sub_(old.grad)
    return out


@pytest.mark.parametrize("is_assigned", [False, True])
@distributed(2)
def test_c01_a_full_state_dict_into_a_model_on_meta(is_assigned: bool) -> None:
    source = uneven_net()
    with torch.device("meta"):
        model = uneven_net()
    wrapped(model)
    if not is_assigned:
        model.to_empty(device="cpu")
    missing, unexpected = model.load_state_dict(plain_state(source), assign=is_assigned, strict=True)
    assert (missing, unexpected) == ([], [])
    assert not any(p.is_meta for p in model.parameters())
    assert_same(full_params(model), plain_state(source), rtol=0, atol=0)
    x = torch.ones(2, 4)
    torch.testing.assert_close(model(x), source(x))


@distributed(2)
def test_c01_missing_and_unexpected_keys_are_reported() -> None:
    model = wrapped(uneven_net())
    state = plain_state(uneven_net())
    state["extra"] = state.pop("2.bias")
    with pytest.raises(RuntimeError, match=r"2\.bias"):
        model.load_state_dict(state)
    result = model.load_state_dict(state, strict=False)
    assert result.missing_keys == ["2.bias"]
    assert result.unexpected_keys == ["extra"]


@distributed(2)
def test_a_state_dict_of_another_shape_is_refused_by_name() -> None:
    model = wrapped(uneven_net())
    state = plain_state(uneven_net())
    state["2.bias"] = torch.ones(4)
    with pytest.raises(RuntimeError, match=r"2\.bias"):
        model.load_state_dict(state)


@distributed(2)
def test_f41_both_names_of_a_tied_parameter_are_saved_and_taken() -> None:
    model = wrap_gpt(make_gpt(), mesh=mesh_1d())
    state = model.state_dict()
    assert {"tokens.weight", "head.weight"} <= set(state)
    source = plain_state(make_gpt())
    for value in source.values():
        value.mul_(2)
    model.load_state_dict(source)
    assert_same({n: full(v) for n, v in model.state_dict().items()}, source, rtol=0, atol=0)
    assert model.head.weight is model.tokens.weight


@distributed(2)
def test_optimizer_state_is_sharded_as_the_parameters_are() -> None:
    model = wrapped(uneven_net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    for p in model.parameters():
        for name in ("exp_avg", "exp_avg_sq"):
            moment = optimizer.state[p][name]
            assert moment.layout == p.layout
            assert moment.to_local().shape == p.to_local().shape
    twin = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(twin)
    assert all(isinstance(optimizer.state[p]["exp_avg"], DTensor) for p in model.parameters())


@distributed(2)
def test_sharded_training_goes_on_from_a_full_state_dict() -> None:
    model = wrap_gpt(make_gpt(), mesh=mesh_1d())
    train(model, my_rows, steps=2)
    whole = {name: full(value) for name, value in model.state_dict().items()}
    fresh = make_gpt()
    fresh.load_state_dict(whole)
    ids, targets = batch(9, ROWS)
    torch.testing.assert_close(model(ids, targets), fresh(ids, targets))
    again = wrap_gpt(make_gpt(), mesh=mesh_2d(1, 2))
    again.load_state_dict(whole)
    torch.testing.assert_close(again(ids, targets), fresh(ids, targets))


class Rotary(nn.Module):
    """Owns a parameter and a buffer, and counts how often it is initialised."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.empty(5, 4))
        self.register_buffer("angles", torch.empty(3))
        self.inner = nn.Linear(4, 5)
        self.num_resets = 0
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.num_resets += 1
        nn.init.kaiming_uniform_(self.gain)
        with torch.no_grad():
            self.angles.copy_(torch.arange(3.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) @ self.gain * self.angles.sum()


@distributed(2)
def test_f35_meta_init_reaches_each_parameter_and_buffer_once() -> None:
    with torch.device("meta"):
        model = nn.Sequential(Rotary(), Rotary())
    for block in model:
        fully_shard(block.inner, mesh=mesh_1d())
        fully_shard(block, mesh=mesh_1d())
    fully_shard(model, mesh=mesh_1d())
    model.to_empty(device="cpu")
    for module in model.modules():
        if isinstance(module, Rotary):
            module.num_resets = 0
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert not any(t.is_meta for t in (*model.parameters(), *model.buffers()))
    assert [block.num_resets for block in model] == [1, 1]
    for block in model:
        # fan-in 4 of the global (5, 4), not of a shard
        gain = full(block.gain)
        assert gain.abs().max() <= (6 / 4) ** 0.5
        assert gain.abs().max() > 0.5 * (6 / 4) ** 0.5
        assert gain.unique().numel() == gain.numel()
        torch.testing.assert_close(block.angles, torch.arange(3.0))
    out = model(torch.ones(2, 4))
    assert torch.isfinite(out).all()
    out.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@distributed(1)
def test_u03_meta_init_on_one_rank_then_adamw() -> None:
    torch.manual_seed(0)
    with torch.device("meta"):
        model = nn.Linear(4, 3)
    fully_shard(model, mesh=mesh_1d())
    model.to_empty(device="cpu")
    model.reset_parameters()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    before = [full(p) for p in model.parameters()]
    out = model(torch.ones(2, 4))
    assert not isinstance(out, DTensor)
    out.sum().backward()
    assert all(p.is_leaf and isinstance(p, DTensor) and isinstance(p.grad, DTensor) for p in model.parameters())
    optimizer.step()
    for p, old in zip(model.parameters(), before, strict=True):
        assert not torch.equal(full(p), old)
        torch.testing.assert_close(full(p), old * (1 - 0.1 * 0.01) - 0.1, rtol=1e-4, atol=1e-5)


@distributed(2)
def test_moving_to_another_dtype_after_wrapping_is_followed() -> None:
    model, plain = uneven_net(), uneven_net().double()
    wrapped(model)
    x = torch.ones(2, 4, dtype=torch.float64)
    model.double()
    torch.testing.assert_close(model(x), plain(x))
    (model(x).sum() * (dist.get_rank() + 1)).backward()
    plain(x).sum().backward()
    torch.testing.assert_close([full(p.grad) for p in model.parameters()], [p.grad * 1.5 for p in plain.parameters()])
    with torch.no_grad():
        for p in (*model.parameters(), *plain.parameters()):
            p.mul_(2)
    torch.testing.assert_close(model(x), plain(x))


@distributed(2)
def test_data_of_a_parameter_set_by_hand_is_used() -> None:
    model, plain = uneven_net(), uneven_net()
    wrapped(model)
    with torch.no_grad():
        model[0].weight.copy_(full(model[0].weight).mul(2))
        plain[0].weight.mul_(2)
    torch.testing.assert_close(model(torch.ones(2, 4)), plain(torch.ones(2, 4)))
    model[0].weight.data = (model[0].weight * 2).data
    with torch.no_grad():
        plain[0].weight.mul_(2)
    torch.testing.assert_close(model(torch.ones(2, 4)), plain(torch.ones(2, 4)))


@distributed(2)
def test_training_after_a_round_trip_of_the_state_dict_is_the_same() -> None:
    expected = oracle(make_gpt())
    model = wrap_gpt(make_gpt(), mesh=mesh_1d())
    model.load_state_dict(model.state_dict())
    assert_same(train(model, my_rows).params, expected.params, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("how", ["optimizer", "in place", "through data", "foreach"])
@distributed(2)
def test_what_is_changed_between_two_forwards_is_gathered_again_on_all_ranks(how: str) -> None:
    # One row: rank 1 holds an empty shard, and must notice the change all the same.
    torch.manual_seed(3)
    model, plain = nn.Linear(4, 1, bias=False), nn.Linear(4, 1, bias=False)
    plain.load_state_dict(model.state_dict())
    fully_shard(model, mesh=mesh_1d(), reshard_after_forward=False)
    x = torch.ones(2, 4)
    torch.testing.assert_close(model(x), plain(x))
    for module in (model, plain):
        (p,) = module.parameters()
        if how == "optimizer":
            p.grad = torch.ones_like(p)
            torch.optim.SGD([p], lr=0.5).step()
        elif how == "foreach":
            p.grad = torch.ones_like(p)
            torch.optim.SGD([p], lr=0.5, foreach=True).step()
        elif how == "in place":
            with torch.no_grad():
                p.mul_(3)
        else:
            p.data.mul_(3)
    torch.testing.assert_close(model(x), plain(x))


@pytest.mark.parametrize("is_sharded", [False, True])
@distributed(2)
def test_a_vector_of_all_parameters_there_and_back(is_sharded: bool) -> None:
    model, plain = wrapped(uneven_net()), uneven_net()
    layouts = [p.layout for p in model.parameters()]
    for module in (model, plain):
        vector = torch.nn.utils.parameters_to_vector(module.parameters())
        if module is model and is_sharded:
            vector = distribute_tensor(full(vector), mesh_1d(), [Shard(0)])
        torch.nn.utils.vector_to_parameters(vector * 2, module.parameters())
    assert [p.layout for p in model.parameters()] == layouts
    x = torch.ones(2, 4)
    for module in (model, plain):
        module(x).sum().backward()
    torch.testing.assert_close(model(x), plain(x))
    torch.testing.assert_close([full(p.grad) for p in model.parameters()], [p.grad for p in plain.parameters()])


@pytest.mark.parametrize("when", ["at once", "after forward"])
@pytest.mark.parametrize("how", ["pickle", "torch.save", "deepcopy"])
@distributed(2)
def test_a_wrapped_model_is_copied_as_a_whole(how: str, when: str) -> None:
    model, plain = wrapped(uneven_net(), reshard=False), uneven_net()
    x = torch.ones(2, 4)
    if when == "after forward":
        model(x)
    if how == "pickle":
        twin = pickle.loads(pickle.dumps(model))
    elif how == "torch.save":
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    else:
        twin = copy.deepcopy(model)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    assert type(twin[0]) is type(model[0])
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    optimizer_of_plain = torch.optim.SGD(plain.parameters(), lr=0.1)
    for module, each in ((twin, optimizer), (plain, optimizer_of_plain)):
        for _ in range(2):
            each.zero_grad()
            module(x).square().sum().backward()
            each.step()
    assert_same(full_params(twin), full_params(plain))
    assert all(isinstance(p, DTensor) for p in twin.parameters())


@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickle.dumps])
@distributed(2)
def test_a_model_with_gathered_parameters_is_not_copied(duplicate: Callable[[nn.Module], Any]) -> None:
    model = wrapped(uneven_net())
    model[0].unshard()
    with pytest.raises(ParamStateError, match=r"copy of Linear.*Call reshard\(\) first"):
        duplicate(model)
    model[0].reshard()
    duplicate(model)


@distributed(4)
def test_state_dicts_are_loaded_without_code_from_the_file() -> None:
    model = uneven_net()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    shard_module(model, mesh["tp"], ShardingPlan(modules={"0": column_parallel("tp", outputs=(...,))}))
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    pending = DTensor.from_local(torch.ones(2), mesh["dp"], [Partial()])
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "pending": pending}, file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    assert state["pending"].layout == pending.layout
    for name, p in model.state_dict().items():
        assert state["model"][name].layout == p.layout
        assert torch.equal(full(state["model"][name]), full(p))
    optimizer.load_state_dict(state["optimizer"])
