# SPDX-License-Identifier: Apache-2.0
"""What used to train wrongly without a word: it works now, or an error says so before anything has changed."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.utils import parametrizations, parametrize, prune

from hyper_parallel import HSDPModule, fully_shard
from hyper_parallel.core.errors import HyperParallelError, ParamStateError
from hyper_parallel.testing import distributed
from tests.torch.fully_shard.support import assert_same, assert_sharded, full_grads, full_params, mesh_1d, mesh_2d


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


@pytest.mark.parametrize("is_wrapped_yet", [False, True])
@pytest.mark.parametrize("how", ["module", "replaced", "inserted", "parameter"])
@distributed(2)
def test_parameters_added_after_wrapping_are_refused_by_name(how: str, is_wrapped_yet: bool) -> None:
    model = wrapped(net())
    if is_wrapped_yet:
        model(X).sum().backward()
    before = full_params(model)
    name = "3.weight"
    if how == "module":
        model.append(nn.Linear(3, 3))
    elif how == "replaced":
        model[1] = nn.Linear(5, 5)
        name = "1.weight"
    elif how == "inserted":
        model.insert(2, nn.Linear(5, 5))
        name = "2.weight"
    else:
        model[0].scale = nn.Parameter(torch.ones(3))
        name = "0.scale"
    for _ in range(2):
        with pytest.raises(ParamStateError, match=rf'"{name}".*added after fully_shard.*before wrapping'):
            model(X)
    with torch.no_grad():
        model(X)
    if how != "inserted":
        assert_same({n: v for n, v in full_params(model).items() if n in before}, before, 0, 0)


@distributed(2)
def test_what_was_added_properly_is_no_reason_to_refuse() -> None:
    model, plain = wrapped(net()), net()
    for module in (model, plain):
        module(X).sum().backward()
        head = nn.Linear(3, 3)
        nn.init.eye_(head.weight)
        module.append(head)
        module.append(nn.Linear(3, 3).requires_grad_(False))
        nn.init.ones_(module[4].weight)
    fully_shard(model[3], mesh=mesh_1d())
    for module in (model, plain):
        module.zero_grad()
        module(X).sum().backward()
    assert_same(full_grads(model), full_grads(plain))


@distributed(2)
def test_ignored_parameters_are_no_additions_in_a_copy_either() -> None:
    model = net()
    fully_shard(model[0], mesh=mesh_1d(), ignored_params={model[0].bias})
    fully_shard(model, mesh=mesh_1d(), ignored_params={model[0].bias, model[2].bias})
    for each in (model, copy.deepcopy(model), model.double()):
        each(X.to(each[0].bias.dtype)).sum().backward()
    assert model[2].bias.grad is not None


def prune_weight(module: nn.Module) -> None:
    prune.l1_unstructured(module, "weight", 3)


def parametrize_weight(module: nn.Module) -> None:
    parametrize.register_parametrization(module, "weight", nn.Identity())


@pytest.mark.parametrize(
    "change", [prune_weight, parametrize_weight, parametrizations.weight_norm, parametrizations.spectral_norm]
)
@distributed(2)
def test_tools_that_take_parameters_out_are_stopped_by_an_error(change: Callable[[nn.Module], None]) -> None:
    model = wrapped(net())
    model(X).sum().backward()
    with pytest.raises(HyperParallelError):  # noqa: PT012 - some fail themselves, the others the next forward
        change(model[0])
        model(X)


@pytest.mark.parametrize("grad", [torch.no_grad, torch.enable_grad])
@distributed(2)
def test_parameters_taken_out_after_wrapping_are_named(grad: Any) -> None:
    model = wrapped(net())
    model(X).sum().backward()
    del model[0].weight
    with grad(), pytest.raises(ParamStateError, match=r'"0.weight".*taken out.*before wrapping'):
        model(X)


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("how", ["optimizer", "foreach", "in place", "load_state_dict"])
@pytest.mark.parametrize("size", [1, 2])
@distributed(2)
def test_parameters_changed_between_forward_and_backward_are_noticed(size: int, how: str, reshard: bool) -> None:
    model, plain = net(), net()
    mesh = mesh_1d() if size == 2 else mesh_2d(2, 1)
    for module in (model[0], model):
        fully_shard(module, mesh=mesh, reshard_after_forward=reshard)
    state = {name: torch.ones_like(value) for name, value in plain.state_dict().items()}
    for module, error in ((plain, RuntimeError), (model, ParamStateError)):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.5, foreach=how == "foreach")
        module(X).sum().backward()
        loss = module(X).square().sum()
        if how in ("optimizer", "foreach"):
            optimizer.step()
        elif how == "in place":
            with torch.no_grad():
                module[2].weight.mul_(2)
        else:
            module.load_state_dict(state)
        with pytest.raises(error, match="modified by an inplace operation"):
            loss.backward()
    assert_sharded(model)
    for module in (model, plain):
        module.load_state_dict(state)
        module.zero_grad()
        module(X).square().sum().backward()
    assert_same(full_grads(model), full_grads(plain))


@pytest.mark.parametrize("reshard", [True, False])
@distributed(2)
def test_reading_data_between_forward_and_backward_does_no_harm(reshard: bool) -> None:
    model, plain = wrapped(net(), reshard_after_forward=reshard), net()
    for module in (model, plain):
        loss = module(X).square().sum()
        assert all(torch.isfinite(p.data).all() for p in module.parameters())
        loss.backward()
    assert_same(full_grads(model), full_grads(plain))


@pytest.mark.parametrize("switch", ["set_requires_gradient_sync", "set_requires_all_reduce"])
@distributed(4)
def test_zero_grad_of_the_model_drops_what_was_held_back(switch: str) -> None:
    model, plain = net(), net()
    for module in (model[0], model):
        fully_shard(module, mesh=mesh_2d(2, 2))
    getattr(model, switch)(False)
    model(X).sum().backward()
    model.zero_grad()
    getattr(model, switch)(True)
    for module in (model, plain):
        module(X).square().sum().backward()
    assert_same(full_grads(model), full_grads(plain))


@distributed(2)
def test_zero_grad_drops_what_was_still_under_way() -> None:
    model, plain = wrapped(net()), net()
    model(X)
    model.set_is_last_backward(False)
    model(X).sum().backward()
    model.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    model.set_is_last_backward(True)
    for module in (model, plain):
        module(X).square().sum().backward()
    assert_same(full_grads(model), full_grads(plain))


@distributed(2)
def test_the_first_block_that_backward_reaches_is_gathered_ahead() -> None:
    model = wrapped(net(), reshard_after_forward=True)
    model(X).sum().backward()
    block = model[0]._hsdp()
    states = []
    model[2].register_full_backward_hook(lambda *_: states.append(block.state.value))
    model(X.requires_grad_()).sum().backward()
    assert states == ["unsharding"]


@pytest.mark.parametrize("factor", [0, -1.0, float("nan"), float("inf")])
@distributed(2)
def test_a_divisor_that_is_none_is_refused(factor: float) -> None:
    model = wrapped(net())
    with pytest.raises(ValueError, match=r"set_gradient_divide_factor\(.*above 0"):
        model.set_gradient_divide_factor(factor)
    with pytest.raises(TypeError, match=r"set_gradient_divide_factor\('2'\)"):
        model.set_gradient_divide_factor("2")
    model(X).sum().backward()
    plain = net()
    plain(X).sum().backward()
    assert_same(full_grads(model), full_grads(plain))


@distributed(2)
def test_arguments_of_a_wrong_type_are_named() -> None:
    model = net()
    weight = model[0].weight
    for module, options, kind, parts in (
        ([], {}, ValueError, (r"fully_shard\(\[\]\): the list is empty",)),
        (torch.ones(2), {}, TypeError, ("Tensor", "not a module")),
        ([model, None], {}, TypeError, ("NoneType", "not a module")),
        (model, {"mp_policy": torch.bfloat16}, TypeError, ("mp_policy=torch.bfloat16", "MixedPrecisionPolicy")),
        (model, {"offload_policy": "cpu"}, TypeError, ("offload_policy='cpu'", "OffloadPolicy")),
        (model, {"reshard_after_forward": "no"}, TypeError, ("reshard_after_forward='no'",)),
        (model, {"shard_placement_fn": 0}, TypeError, ("shard_placement_fn=0",)),
        (model, {"ignored_params": ["weight"]}, TypeError, ("ignored_params",)),
        (model, {"ignored_params": weight}, TypeError, ("ignored_params",)),
    ):
        with pytest.raises(kind) as caught:
            fully_shard(module, mesh=mesh_1d(), **options)
        assert all(re.search(part, str(caught.value)) for part in parts), caught.value
    assert model[0].weight is weight
    fully_shard(model[0], mesh=mesh_1d(), mp_policy=torch.distributed.fsdp.MixedPrecisionPolicy())
    fully_shard(model, mesh=mesh_1d(), ignored_params=[model[2].bias])
    for name in ("set_modules_to_forward_prefetch", "set_modules_to_backward_prefetch"):
        with pytest.raises(ParamStateError, match=rf"{name}\(\[Linear\]\).*not wrapped"):
            getattr(model, name)([model[2]])
        with pytest.raises(TypeError, match=rf"{name}\(HSDPLinear\).*list"):
            getattr(model, name)(model[0])
        getattr(model, name)([model[0]])


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("option", [{"max_norm": 1.0}, {"sparse": True}])
@distributed(2)
def test_tables_that_lookups_write_into_are_refused(kind: Any, option: dict[str, Any]) -> None:
    model = nn.Sequential(kind(6, 3, **option))
    with pytest.raises(ValueError, match=rf'"0.weight".*{next(iter(option))}=.*ignored_params'):
        fully_shard(model, mesh=mesh_1d())
    assert not isinstance(model, HSDPModule)
    fully_shard(model, mesh=mesh_1d(), ignored_params={model[0].weight})
    model(torch.tensor([[1, 2]])).sum().backward()


@distributed(2)
def test_a_submodule_that_two_wrapped_modules_hold_is_refused_with_the_way_out() -> None:
    shared = nn.Linear(4, 4)
    pair = [nn.Sequential(shared), nn.Sequential(shared)]
    fully_shard(pair[0], mesh=mesh_1d())
    with pytest.raises(ValueError, match=r'"0.weight".*another wrapped module.*shared submodule first'):
        fully_shard(pair[1], mesh=mesh_1d())
    assert not isinstance(pair[1], HSDPModule)


@distributed(2)
def test_the_way_out_for_shared_submodules_works() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Sequential(shared := nn.Linear(4, 4)), nn.Tanh(), nn.Sequential(shared, nn.Linear(4, 4)))
    model = copy.deepcopy(plain)
    for module in (model[0][0], model[0], model[2], model):
        fully_shard(module, mesh=mesh_1d())
    for module in (model, plain):
        module(X).sum().backward()
    assert_same(full_grads(model), full_grads(plain))
