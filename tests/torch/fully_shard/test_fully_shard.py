# SPDX-License-Identifier: Apache-2.0
"""Wrapped models against one process on the whole batch, and against torch's own fully_shard."""

from __future__ import annotations

import copy
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from hyper_parallel import DTensor, HSDPModule, MixedPrecisionPolicy, Shard, fully_shard
from hyper_parallel.core.errors import OperandError
from hyper_parallel.testing import distributed
from tests.torch.fully_shard.support import (
    ROWS,
    assert_same,
    assert_same_trace,
    assert_sharded,
    full,
    full_grads,
    mean_grads,
    mean_over_ranks,
    mesh_1d,
    mesh_2d,
    my_rows,
    oracle,
    train,
    wrap_gpt,
)
from tests.torch.models import batch, make_gpt


def check_parity(mesh: Any, **options: Any) -> None:
    expected = oracle(make_gpt())
    model = wrap_gpt(make_gpt(), mesh=mesh, **options)
    assert_same_trace(train(model, my_rows), expected)
    assert_sharded(model)


@pytest.mark.parametrize("reshard", [None, True, False])
@distributed(1)
def test_parity_on_1_rank(reshard: bool | None) -> None:
    check_parity(mesh_1d(), reshard_after_forward=reshard)


@pytest.mark.parametrize("reshard", [None, True, False])
@distributed(2)
def test_parity_on_2_ranks(reshard: bool | None) -> None:
    check_parity(mesh_1d(), reshard_after_forward=reshard)


@distributed(3)
def test_parity_on_3_ranks() -> None:
    check_parity(mesh_1d())


@distributed(4)
def test_parity_on_4_ranks() -> None:
    check_parity(mesh_1d())


@pytest.mark.parametrize("reshard", [True, False])
@distributed(4)
def test_parity_of_hsdp(reshard: bool) -> None:
    check_parity(mesh_2d(2, 2), reshard_after_forward=reshard)


@distributed(2)
def test_f05_shard_axis_of_one_rank_still_reduces_over_replicas() -> None:
    check_parity(mesh_2d(2, 1))


@distributed(2)
def test_a_mesh_of_torch_is_taken() -> None:
    check_parity(dist.device_mesh.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))


@distributed(2)
def test_no_mesh_means_all_ranks() -> None:
    check_parity(None)


@distributed(2)
def test_same_as_torch_fully_shard() -> None:
    from torch.distributed.fsdp import fully_shard as torch_fully_shard

    mesh = dist.device_mesh.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    theirs = make_gpt()
    for block in theirs.blocks:
        torch_fully_shard(block, mesh=mesh)
    torch_fully_shard(theirs, mesh=mesh)
    ours = wrap_gpt(make_gpt(), mesh=mesh)
    grads = []
    for model in (ours, theirs):
        ids, targets = batch(0, ROWS)
        model(my_rows(ids), my_rows(targets)).backward()
        grads.append({n: p.grad.full_tensor() for n, p in model.named_parameters()})
    # gloo has no average, so torch's own result is already checked against the oracle by the parity tests.
    assert_same(grads[0], grads[1])


def relu_net() -> nn.Sequential:
    torch.manual_seed(3)
    sizes = [(4, 3), (3, 3), (3, 2)]
    layers: list[nn.Module] = []
    for inputs, outputs in sizes:
        layers += [nn.Linear(inputs, outputs, bias=False), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def rank_input(*shape: int, seed: int = 0) -> torch.Tensor:
    """Another input on each rank."""
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    return torch.randn(*shape, generator=generator)


def plain_grads(model: nn.Module, inputs: list[torch.Tensor], factor: float = 1.0) -> dict[str, torch.Tensor]:
    """Mean over ranks of this rank's summed gradients, without any sharding."""
    model = copy.deepcopy(model)
    for x in inputs:
        (model(x).sum() * factor).backward()
    return mean_grads(model)


@distributed(2)
def test_f01_gradients_are_means_not_sums() -> None:
    model = relu_net()
    x = rank_input(5, 4)
    expected = plain_grads(model, [x])
    fully_shard(model, mesh=mesh_1d())
    model(x).sum().backward()
    assert_same(full_grads(model), expected)


@distributed(4)
def test_f02_divide_factor_is_the_same_on_one_and_two_axes() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    x = rank_input(2, 8)
    grads = []
    for mesh in (mesh_1d(), mesh_2d(2, 2)):
        model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
        for p in model.parameters():
            nn.init.ones_(p)
        plain = copy.deepcopy(model).bfloat16()
        plain(x.bfloat16()).sum().backward()
        expected = [
            g.float() * dist.get_world_size() / 300 for g in mean_over_ranks(p.grad.float() for p in plain.parameters())
        ]
        for layer in model:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        for layer in model:
            layer.set_gradient_divide_factor(300)
        model(x).sum().backward()
        grads.append([full(p.grad) for p in model.parameters()])
        torch.testing.assert_close(grads[-1], expected, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-6, atol=0)


@pytest.mark.parametrize("switch", ["set_requires_all_reduce", "set_requires_gradient_sync"])
@distributed(4)
def test_f03_put_off_reductions_miss_nothing(switch: str) -> None:
    model = relu_net()
    inputs = [rank_input(5, 4, seed=s) for s in range(3)]
    expected = plain_grads(model, inputs)
    fully_shard(model, mesh=mesh_2d(2, 2))
    for i, x in enumerate(inputs):
        getattr(model, switch)(i == 2)
        model(x).sum().backward()
    assert_same(full_grads(model), expected)


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("syncs", [(True, False, True), (False, False, True), (True, True)])
@distributed(2)
def test_f06_steps_with_and_without_sync_mix(syncs: tuple[bool, ...], reshard: bool) -> None:
    model = relu_net()
    inputs = [rank_input(5, 4, seed=s) for s in range(len(syncs))]
    expected = plain_grads(model, inputs)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh_1d(), reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh_1d(), reshard_after_forward=reshard)
    for _ in range(2):
        for x, sync in zip(inputs, syncs, strict=True):
            model.set_requires_gradient_sync(sync)
            model(x).sum().backward()
        assert_same(full_grads(model), expected)
        model.zero_grad()
        assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("sync", [True, False])
@distributed(2)
def test_accumulation_over_micro_batches(sync: bool) -> None:
    expected = oracle(make_gpt(), micro_batches=3)
    model = wrap_gpt(make_gpt(), mesh=mesh_1d())

    def before(micro: int) -> None:
        model.set_requires_gradient_sync(sync or micro == 2)

    assert_same_trace(train(model, my_rows, micro_batches=3, before_micro_batch=before), expected)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x) if dist.get_rank() == 0 else self.b(x)


@distributed(2)
def test_f08_a_branch_that_only_some_ranks_take_counts_as_zero_on_the_others() -> None:
    torch.manual_seed(1)
    model = Branches()
    x = rank_input(3, 4)
    plain = copy.deepcopy(model)
    plain(x).sum().backward()
    for p in plain.parameters():
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
    expected = mean_grads(plain)
    fully_shard(model, mesh=mesh_1d())
    model(x).sum().backward()
    assert_same(full_grads(model), expected)


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("is_nested", [True, False])
@pytest.mark.parametrize("how", ["in order", "reversed", "together"])
@distributed(2)
def test_f10_two_forwards_before_backward(how: str, is_nested: bool, reshard: bool) -> None:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(10, 10), nn.Tanh(), nn.Linear(10, 10))
    inputs = [rank_input(4, 10, seed=s) for s in (1, 2)]
    expected = plain_grads(model, inputs)
    if is_nested:
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=mesh_1d(), reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh_1d(), reshard_after_forward=reshard)
    losses = [model(x).sum() for x in inputs]
    if how == "together":
        (losses[0] + losses[1]).backward()
    else:
        for loss in losses if how == "in order" else reversed(losses):
            loss.backward()
    assert_same(full_grads(model), expected)
    assert_sharded(model)


class Checkpointed(nn.Module):
    def __init__(self, module: nn.Module, use_reentrant: bool) -> None:
        super().__init__()
        self.module = module
        self.use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.module, x, use_reentrant=self.use_reentrant)


def checkpointed_net(where: str, use_reentrant: bool, sharded: bool, reshard: bool | None = None) -> nn.Module:
    """Three blocks, each checkpointed; fully_shard inside of the checkpoint, outside of it, or both."""
    torch.manual_seed(4)
    blocks = [nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 6)) for _ in range(3)]
    options = {"mesh": mesh_1d(), "reshard_after_forward": reshard} if sharded else {}
    out = []
    for block in blocks:
        if sharded and where == "both":
            fully_shard(block[0], **options)
        if sharded and where in ("inside", "both"):
            fully_shard(block, **options)
        wrapped = Checkpointed(block, use_reentrant)
        if sharded and where == "outside":
            fully_shard(wrapped, **options)
        out.append(wrapped)
    model = nn.Sequential(*out)
    return fully_shard(model, **options) if sharded else model


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("where", ["inside", "outside", "both", "root only"])
@distributed(2)
def test_f13_activation_checkpointing(where: str, use_reentrant: bool) -> None:
    x = rank_input(5, 6).requires_grad_()
    expected = plain_grads(checkpointed_net(where, use_reentrant, sharded=False), [x, x])
    model = checkpointed_net(where, use_reentrant, sharded=True, reshard=True)
    for _ in range(2):
        model(x).sum().backward()
        assert_sharded(model)
    assert_same(full_grads(model), expected)


@distributed(2)
def test_f11_two_forwards_with_checkpoint_and_nested_wraps() -> None:
    inputs = [rank_input(5, 6, seed=s).requires_grad_() for s in (1, 2)]
    plain = checkpointed_net("both", False, sharded=False)
    (plain(inputs[0]) - plain(inputs[1])).sum().backward()
    expected = mean_grads(plain)
    model = checkpointed_net("both", False, sharded=True)
    (model(inputs[0]) - model(inputs[1])).sum().backward()
    assert_same(full_grads(model), expected)
    assert_sharded(model)


@pytest.mark.parametrize("kind", ["in place on a view", "in place", "out of place"])
@distributed(2)
def test_f15_the_output_is_changed_after_the_module(kind: str) -> None:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    x, y = rank_input(1, 4), torch.ones(4)

    def loss_of(module: nn.Module) -> torch.Tensor:
        out = module(x) if kind == "in place" else module(x).squeeze(0)
        if kind == "out of place":
            out = out + y
        else:
            out += y
        return (out**2).sum()

    plain = copy.deepcopy(model)
    loss_of(plain).backward()
    expected = mean_grads(plain)
    for layer in model:
        fully_shard(layer, mesh=mesh_1d())
    fully_shard(model, mesh=mesh_1d(), reshard_after_forward=True)
    loss_of(model).backward()
    assert_same(full_grads(model), expected)


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("kind", ["frozen trunk", "alternating"])
@distributed(2)
def test_f20_frozen_parameters_have_no_gradient(kind: str, reshard: bool) -> None:
    torch.manual_seed(6)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    frozen = model[:2] if kind == "frozen trunk" else [model[0], model[2]]
    for layer in frozen:
        layer.requires_grad_(False)
    x = rank_input(3, 4).requires_grad_()
    expected = plain_grads(model, [x])
    if kind == "frozen trunk":
        for layer in model:
            fully_shard(layer, mesh=mesh_1d(), reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh_1d(), reshard_after_forward=reshard)
    model(x).sum().backward()
    assert_same(full_grads(model), expected)
    assert all((p.grad is None) == (not p.requires_grad) for p in model.parameters())
    assert_sharded(model)


@pytest.mark.parametrize("reshard", [True, False])
@distributed(2)
def test_f20_parameters_unfrozen_after_an_evaluation_train_at_once(reshard: bool) -> None:
    torch.manual_seed(6)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    x = rank_input(3, 4)
    unfrozen = copy.deepcopy(model).requires_grad_(True)
    expected = plain_grads(unfrozen, [x])
    for layer in model:
        fully_shard(layer, mesh=mesh_1d(), reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh_1d(), reshard_after_forward=reshard)
    model(x).sum().backward()
    with torch.no_grad():
        model(x)
    model.zero_grad()
    model.requires_grad_(True)
    model(x).sum().backward()
    assert_same(full_grads(model), expected)


class FourBlocks(nn.Module):
    """Runs the blocks it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: torch.Tensor, order: tuple[int, ...]) -> list[torch.Tensor]:
        outs = []
        for i in order:
            x = torch.tanh(self.blocks[i](x))
            outs.append(x)
        return outs


def four_blocks(sharded: bool, **options: Any) -> FourBlocks:
    torch.manual_seed(8)
    model = FourBlocks()
    if sharded:
        for block in model.blocks:
            fully_shard(block, mesh=mesh_1d(), **options)
        fully_shard(model, mesh=mesh_1d(), **options)
    return model


@distributed(2)
def test_f23_backward_through_a_part_of_the_model() -> None:
    x = rank_input(3, 4)
    plain, model = four_blocks(False), four_blocks(True)
    for _ in range(2):
        plain(x, (0, 1, 2, 3))[1].sum().backward()
        model(x, (0, 1, 2, 3))[1].sum().backward()
        assert_sharded(model)
    assert_same(full_grads(model), mean_grads(plain))


@distributed(2)
def test_f23_interleaved_micro_batches_with_last_backward() -> None:
    inputs = [rank_input(3, 4, seed=s) for s in (1, 2)]
    plain, model = four_blocks(False), four_blocks(True)
    for _ in range(2):
        for module in (plain, model):
            module.zero_grad()
            losses = [module(x, (0, 1, 2, 3))[-1].sum() for x in inputs]
            for i, loss in enumerate(losses):
                if module is model:
                    model.set_is_last_backward(i == 1)
                loss.backward()
        assert_same(full_grads(model), mean_grads(plain))
        assert_sharded(model)


@distributed(2)
def test_f37_the_order_of_blocks_changes_between_steps() -> None:
    x = rank_input(3, 4)
    plain, model = four_blocks(False), four_blocks(True)
    for order in ((0, 1, 2, 3), (0, 1, 2, 3), (0, 2, 3), (0, 1, 1, 3), (3, 2, 1, 0), (0, 1, 2, 3)):
        for module in (plain, model):
            module.zero_grad()
            module(x, order)[-1].sum().backward()
        assert_same(full_grads(model), mean_grads(plain))
        assert_sharded(model)


@distributed(2)
def test_explicit_prefetch_lists() -> None:
    x = rank_input(3, 4)
    plain, model = four_blocks(False), four_blocks(True)
    blocks = list(model.blocks)
    blocks[0].set_modules_to_forward_prefetch([blocks[1], blocks[2]])
    blocks[3].set_modules_to_backward_prefetch([blocks[2], blocks[1]])
    plain(x, (0, 1, 2, 3))[-1].sum().backward()
    model(x, (0, 1, 2, 3))[-1].sum().backward()
    assert_same(full_grads(model), mean_grads(plain))
    assert_sharded(model)


@distributed(2)
def test_f26_tied_weights_stay_one_parameter() -> None:
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8, bias=False))
    model[1].weight = model[0].weight
    ids = torch.tensor([[1, 2, dist.get_rank()]])
    plain = copy.deepcopy(model)
    plain(ids).square().sum().backward()
    (expected,) = mean_over_ranks([plain[0].weight.grad])
    fully_shard(model, mesh=mesh_1d())
    assert model[0].weight is model[1].weight
    assert len(list(model.parameters())) == 1
    model(ids).square().sum().backward()
    torch.testing.assert_close(full(model[0].weight.grad), expected)
    assert model[0].weight is model[1].weight


@distributed(2)
def test_f32_post_accumulate_hooks_run_once_with_the_reduced_gradient() -> None:
    model = relu_net()
    inputs = [rank_input(5, 4, seed=s) for s in (1, 2)]
    expected = [plain_grads(model, inputs[:1]), plain_grads(model, inputs)]
    fully_shard(model, mesh=mesh_1d())
    seen: list[tuple[str, torch.Tensor]] = []
    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, name=name: seen.append((name, full(p.grad).clone())))
    for step, x in enumerate(inputs):
        seen.clear()
        model(x).sum().backward()
        assert len(seen) == 3
        assert_same(dict(seen), expected[step])


@distributed(1)
def test_f33_deepcopy_and_averaged_model() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    fully_shard(model[0], mesh=mesh_1d())
    fully_shard(model, mesh=mesh_1d())
    x = torch.randn(3, 4)
    model(x).sum().backward()
    averaged = torch.optim.swa_utils.AveragedModel(model)
    twin = copy.deepcopy(model)
    torch.testing.assert_close(twin(x), model(x))
    assert isinstance(twin[0], HSDPModule)
    before = [full(p).clone() for p in model.parameters()]
    with torch.no_grad():
        for p in twin.parameters():
            p.mul_(2)
    torch.testing.assert_close([full(p) for p in model.parameters()], before, rtol=0, atol=0)
    averaged.update_parameters(twin)
    torch.testing.assert_close([full(p) for p in averaged.module.parameters()], [2 * b for b in before])
    twin.zero_grad()
    twin(x).sum().backward()
    torch.testing.assert_close(full(twin[1].bias.grad), torch.full((2,), 3.0))


@distributed(2)
def test_f33_deepcopy_on_two_ranks_is_independent() -> None:
    model = wrap_gpt(make_gpt(), mesh=mesh_1d())
    ids, targets = (my_rows(t) for t in batch(0, ROWS))
    model(ids, targets).backward()
    twin = copy.deepcopy(model)
    before = {n: full(p).clone() for n, p in model.named_parameters()}
    with torch.no_grad():
        for p in twin.parameters():
            p.zero_()
    assert_same({n: full(p) for n, p in model.named_parameters()}, before, rtol=0, atol=0)
    torch.testing.assert_close(twin(ids), torch.zeros(*ids.shape, 37))
    twin.zero_grad()
    twin(ids, targets).backward()
    assert_sharded(twin)


@distributed(2)
def test_a_list_of_modules_is_one_group() -> None:
    torch.manual_seed(9)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 2))
    x = rank_input(3, 4)
    expected = plain_grads(model, [x, x])
    fully_shard([model[2], model[3]], mesh=mesh_1d())
    fully_shard(model, mesh=mesh_1d())
    assert model[2]._hsdp() is model[3]._hsdp()
    for _ in range(2):
        model(x).sum().backward()
        assert_sharded(model)
    assert_same(full_grads(model), expected)


@distributed(2)
def test_unshard_and_reshard_by_hand() -> None:
    torch.manual_seed(1)
    model = nn.Linear(5, 3)
    weight = model.weight.detach().clone()
    fully_shard(model, mesh=mesh_1d())
    handle = model.unshard(async_op=True)
    handle.wait()
    assert not isinstance(model.weight, DTensor)
    torch.testing.assert_close(model.weight.detach(), weight, rtol=0, atol=0)
    model.reshard()
    assert_sharded(model)
    assert model.unshard() is None
    assert not isinstance(model.weight, DTensor)
    model.reshard()
    assert_sharded(model)


@distributed(2)
def test_reshard_after_backward_can_be_put_off() -> None:
    model = wrap_gpt(make_gpt(), mesh=mesh_1d())
    expected = oracle(make_gpt(), steps=1, micro_batches=2)

    def before(micro: int) -> None:
        model.set_reshard_after_backward(micro == 1)

    trace = train(model, my_rows, steps=1, micro_batches=2, before_micro_batch=before)
    assert_same_trace(trace, expected)
    assert_sharded(model)


@distributed(2)
def test_ignored_parameters_stay_plain_and_local() -> None:
    model = nn.Linear(4, 4)
    bias = model.bias
    fully_shard(model, mesh=mesh_1d(), ignored_params={bias})
    assert model.bias is bias
    assert isinstance(model.weight, DTensor)
    x = rank_input(3, 4)
    (model(x) * (dist.get_rank() + 1)).sum().backward()
    torch.testing.assert_close(bias.grad, torch.full((4,), 3.0 * (dist.get_rank() + 1)))


@distributed(2)
def test_an_lstm_keeps_its_second_list_of_weights_in_step() -> None:
    torch.manual_seed(2)
    model = nn.LSTM(5, 7)
    x = rank_input(4, 2, 5)
    plain = copy.deepcopy(model)
    plain(x)[0].sum().backward()
    expected = mean_grads(plain)
    fully_shard(model, mesh=mesh_1d(), reshard_after_forward=True)
    out, _ = model(x)
    torch.testing.assert_close(out, plain(x)[0])
    out.sum().backward()
    assert_same(full_grads(model), expected)
    assert_sharded(model)


@distributed(4)
def test_f29_one_row_and_empty_parameters_leave_ranks_empty() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor([2.0]))
            self.nothing = nn.Parameter(torch.empty(0, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale + self.nothing.sum()

    model = Odd()
    x = rank_input(3)
    (expected,) = mean_over_ranks([x.sum().reshape(1)])
    fully_shard(model, mesh=mesh_1d())
    model(x).sum().backward()
    torch.testing.assert_close(full(model.scale.grad), expected)
    assert full(model.nothing.grad).shape == (0, 4)


@distributed(2)
def test_f28_attributes_of_parameters_survive() -> None:
    model = nn.Linear(4, 4)
    model.weight.my_tag = "kept"
    fully_shard(model, mesh=mesh_1d())
    assert model.weight.my_tag == "kept"
    model(rank_input(2, 4)).sum().backward()
    assert model.weight.my_tag == "kept"


@pytest.mark.parametrize("kind", ["reshard", "placement"])
@distributed(2)
def test_f30_options_that_are_not_served_are_refused_before_anything_changes(kind: str) -> None:
    options: dict[str, Any] = {"reshard_after_forward": 3}
    parts = ["reshard_after_forward", "3", "2 shard ranks"]
    if kind == "placement":
        options = {"shard_placement_fn": lambda p: Shard(1) if p.dim() == 2 else None}
        parts = ['"weight"', "(4, 4)", "dim 0"]
    model = nn.Linear(4, 4)
    weight = model.weight
    with pytest.raises(ValueError, match="fully_shard") as caught:
        fully_shard(model, mesh=mesh_1d(), **options)
    assert all(part in str(caught.value) for part in parts)
    assert model.weight is weight
    assert not isinstance(model, HSDPModule)


@distributed(2)
def test_f29_a_parameter_without_dims_is_refused_by_name() -> None:
    model = nn.Module()
    model.logit_scale = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(ValueError, match=r"logit_scale.*ignored_params"):
        fully_shard(model, mesh=mesh_1d())


def test_ranks_agree_from_the_first_call_on_whether_lists_of_dtensors_take_the_foreach_way() -> None:
    # Rules load with the first intercepted call. One rank may have made one, its peer not; both must clip alike.
    program = (
        "import sys\n"
        "from torch.optim import optimizer\n"
        "from torch.utils import _foreach_utils\n"
        "from hyper_parallel.platform.torch.dtensor import TorchDTensor\n"
        "assert 'hyper_parallel.platform.torch.ops' not in sys.modules\n"
        "assert TorchDTensor in optimizer._foreach_supported_types\n"
        "assert TorchDTensor in _foreach_utils._foreach_supported_types\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@distributed(2)
def test_wrapping_twice_is_refused() -> None:
    model = fully_shard(nn.Linear(4, 4), mesh=mesh_1d())
    with pytest.raises(ValueError, match=r"Linear.*wrapped already"):
        fully_shard(model, mesh=mesh_1d())


@pytest.mark.parametrize("kind", ["two groups", "group and root"])
@distributed(2)
def test_f26_tied_weights_in_two_groups_are_refused_with_the_way_out(kind: str) -> None:
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8, bias=False))
    model[1].weight = model[0].weight
    fully_shard(model[0], mesh=mesh_1d())
    other, name = (model[1], "weight") if kind == "two groups" else (model, "1.weight")
    with pytest.raises(ValueError, match=rf'"{name}" is tied.*\[a, b\]'):
        fully_shard(other, mesh=mesh_1d())
    assert not isinstance(other, HSDPModule)


@distributed(2)
def test_f26_tied_weights_in_one_group_of_two_modules() -> None:
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8, bias=False))
    model[1].weight = model[0].weight
    ids = torch.tensor([[1, 2, dist.get_rank()]])
    plain = copy.deepcopy(model)
    plain(ids).square().sum().backward()
    (expected,) = mean_over_ranks([plain[0].weight.grad])
    fully_shard([model[0], model[1]], mesh=mesh_1d())
    fully_shard(model, mesh=mesh_1d())
    model(ids).square().sum().backward()
    torch.testing.assert_close(full(model[0].weight.grad), expected)
    assert model[0].weight is model[1].weight


@distributed(2)
def test_f21_two_models_are_frozen_in_turns() -> None:
    torch.manual_seed(0)
    models = [nn.Linear(4, 4), nn.Linear(4, 1)]
    plain = copy.deepcopy(models)
    for model in models:
        fully_shard(model, mesh=mesh_1d())
    x = rank_input(2, 4)
    for pair, is_sharded in ((models, True), (plain, False)):
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in pair]
        for step in range(4):
            turn = step % 2
            pair[turn].requires_grad_(True)
            pair[1 - turn].requires_grad_(False)
            before = full(pair[1 - turn].weight)
            for model in pair:
                model.zero_grad()
            pair[1](pair[0](x)).sum().backward()
            if not is_sharded:
                for p in pair[turn].parameters():
                    (p.grad,) = mean_over_ranks([p.grad])
            optimizers[turn].step()
            assert torch.equal(full(pair[1 - turn].weight), before)
            assert pair[1 - turn].weight.grad is None
    for mine, theirs in zip(models, plain, strict=True):
        assert_same({n: full(p) for n, p in mine.named_parameters()}, dict(theirs.named_parameters()))


@pytest.mark.parametrize("foreach", [True, False])
@distributed(2)
def test_f34_g01_ignored_and_sharded_parameters_share_an_optimizer_and_a_norm(foreach: bool) -> None:
    torch.manual_seed(0)
    model, plain = nn.Linear(4, 4), nn.Linear(4, 4)
    plain.load_state_dict(model.state_dict())
    fully_shard(model, mesh=mesh_1d(), ignored_params={model.bias})
    for module in (model, plain):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, foreach=foreach)
        for _ in range(2):
            optimizer.zero_grad()
            module(torch.ones(2, 4)).square().sum().backward()
            module.norm = torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5, foreach=foreach)
            optimizer.step()
    assert float(model.norm) == pytest.approx(float(plain.norm), rel=1e-5)
    assert_same({n: full(p) for n, p in model.named_parameters()}, dict(plain.named_parameters()))


@distributed(2)
def test_using_a_sharded_parameter_outside_of_forward_says_so() -> None:
    model = fully_shard(nn.Linear(4, 4), mesh=mesh_1d())
    with pytest.raises(OperandError, match=r"linear.*fully_shard.*unshard\(\)"):
        nn.functional.linear(torch.ones(1, 4), model.weight)


class MaybeB(nn.Module):
    """Uses its second layer when told to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, uses_b: bool) -> torch.Tensor:
        y = torch.tanh(self.a(x))
        return self.b(y) if uses_b else y


def check_left_out_of_the_last_backward(mesh: Any, switch: str) -> None:
    model, plain = MaybeB(), MaybeB()
    for module in (model.a, model.b, model):
        fully_shard(module, mesh=mesh)
    for _ in range(2):
        for micro, uses_b in enumerate((True, False)):
            x = rank_input(3, 4, seed=micro)
            getattr(model, switch)(micro == 1)
            for module in (model, plain):
                module(x, uses_b).square().sum().backward()
        assert_same(full_grads(model), mean_grads(plain))
        model.zero_grad()
        plain.zero_grad()
    assert_sharded(model)


@distributed(2)
def test_f06_gradients_held_back_arrive_though_the_last_backward_leaves_their_group_out() -> None:
    check_left_out_of_the_last_backward(mesh_1d(), "set_requires_gradient_sync")


@pytest.mark.parametrize("switch", ["set_requires_gradient_sync", "set_requires_all_reduce"])
@distributed(4)
def test_f03_the_same_with_replicas(switch: str) -> None:
    check_left_out_of_the_last_backward(mesh_2d(2, 2), switch)


@distributed(2)
def test_f06_held_back_gradients_of_what_was_frozen_meanwhile_do_not_come_back() -> None:
    model, plain = MaybeB(), MaybeB()
    for module in (model.a, model.b, model):
        fully_shard(module, mesh=mesh_1d())
    x = rank_input(3, 4)
    model.set_requires_gradient_sync(False)
    model(x, True).sum().backward()
    model.set_requires_gradient_sync(True)
    model.a.requires_grad_(False)
    model(x, True).sum().backward()
    model.zero_grad()
    model.a.requires_grad_(True)
    for module in (model, plain):
        module(x, True).sum().backward()
    assert_same(full_grads(model), mean_grads(plain))


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@distributed(2)
def test_inference_mode_may_come_first(dtype: torch.dtype | None) -> None:
    model, plain = MaybeB(), MaybeB()
    policy = MixedPrecisionPolicy(param_dtype=dtype, output_dtype=torch.float32)
    for module in (model.a, model.b, model):
        fully_shard(module, mesh=mesh_1d(), mp_policy=policy)
    x = rank_input(3, 4)
    tolerance = {} if dtype is None else {"rtol": 2e-2, "atol": 2e-2}
    for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad, torch.inference_mode, torch.enable_grad):
        with mode():
            out = model(x, True)
            torch.testing.assert_close(out.detach().clone(), plain(x, True).detach().clone(), **tolerance)
        if mode is torch.enable_grad:
            out.sum().backward()
    assert_sharded(model)
