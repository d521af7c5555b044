# SPDX-License-Identifier: Apache-2.0
"""shard_module, local_map and register_sharding_rule, against plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils.checkpoint import checkpoint

from hyper_parallel import (
    DTensor,
    Shard,
    ShardingPlan,
    Style,
    column_parallel,
    distribute_tensor,
    local_map,
    register_sharding_rule,
    row_parallel,
    shard_module,
)
from hyper_parallel.core.errors import LayoutError, MeshError, NoRuleError, OperandError, ShapeError
from hyper_parallel.testing import CommCounter, distributed
from tests.torch.dtensor.support import close, error_of, lay, mesh_of, noise, whole
from tests.torch.models import make_gpt


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 7)
        self.down = nn.Linear(7, 4)
        self.register_buffer("scale", torch.tensor([0.5, 1.0, 2.0, 3.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # A constant made on the way, as models do.
        return self.down(F.gelu(self.up(x)) + torch.ones(7)) * self.scale


def make_mlp() -> Mlp:
    torch.manual_seed(1)
    return Mlp()


PLAN = ShardingPlan(modules={"up": column_parallel("a"), "down": row_parallel("a")})


@distributed(world_size=2)
def test_shard_module_on_plain_inputs() -> None:
    mesh = mesh_of()
    plain, model = make_mlp(), make_mlp()
    assert shard_module(model, mesh, PLAN) is model
    assert model.up.weight.layout == mesh.layout("a", None)
    assert model.down.weight.layout == mesh.layout(None, "a")
    assert model.down.bias.layout == model.scale.layout == mesh.layout(None)
    assert all(isinstance(p, nn.Parameter) for p in model.parameters())
    assert [n for n, _ in model.named_buffers()] == ["scale"]
    x = noise(3, 4)
    expected = plain(x)
    expected.sum().backward()
    out = model(x)
    assert isinstance(out, DTensor)
    out.sum().backward()
    close(whole(out), expected.detach())
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        close(whole(a.grad), b.grad)


@distributed(world_size=2)
def test_plain_tensors_count_as_copies_inside_the_module_only() -> None:
    model = shard_module(make_mlp(), mesh_of(), PLAN)
    model(noise(3, 4))
    assert "distribute_tensor" in error_of(lambda: model.scale * torch.ones(4), OperandError)
    model.down.register_forward_pre_hook(lambda module, args: (_ for _ in ()).throw(KeyError("stop")))
    with pytest.raises(KeyError, match=r"stop"):
        model(noise(3, 4))
    # Also after a forward that failed.
    assert "distribute_tensor" in error_of(lambda: model.scale * torch.ones(4), OperandError)


@pytest.mark.parametrize("use_reentrant", [False, True])
@distributed(world_size=2)
def test_checkpointing_around_a_sharded_module(use_reentrant: bool) -> None:
    """Plain tensors in and out, so both kinds work; the recomputation runs within backward."""
    plain, model = make_mlp(), shard_module(make_mlp(), mesh_of(), PLAN)
    x, y = noise(3, 4).requires_grad_(), noise(3, 4).requires_grad_()
    plain(x).pow(2).sum().backward()
    out = checkpoint(lambda t: model(DTensor.from_local(t, mesh_of())).full_tensor(), y, use_reentrant=use_reentrant)
    out.pow(2).sum().backward()
    close(y.grad, x.grad)
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        close(whole(a.grad), b.grad)


class Again(Mlp):
    """Runs its inside, where plain tensors are made, again in backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=False) * torch.ones(4)


def make_again() -> Again:
    torch.manual_seed(1)
    return Again()


@distributed(world_size=2)
def test_plain_tensors_count_as_copies_where_backward_runs_the_module_again() -> None:
    plain, model = make_again(), shard_module(make_again(), mesh_of(), PLAN)
    for module in (plain, model):
        for _ in range(2):
            module(noise(3, 4)).pow(2).sum().backward()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        close(whole(a.grad), b.grad)


@distributed(world_size=2)
def test_in_other_backward_passes_they_do_not() -> None:
    model = shard_module(make_mlp(), mesh_of(), PLAN)
    model(noise(3, 4)).sum().backward()
    x = lay(noise(4), mesh_of().layout("a")).requires_grad_()
    x.register_hook(lambda grad: grad * torch.ones(4))
    assert "distribute_tensor" in error_of(lambda: (x * 2).sum().backward(), OperandError)


@distributed(world_size=2)
def test_tied_parameters_stay_tied() -> None:
    mesh = mesh_of()
    plan = ShardingPlan(modules={"tokens": Style({"weight": ("a", None)})})
    model = shard_module(make_gpt(), mesh, plan)
    assert model.head.weight is model.tokens.weight
    assert model.head.weight.layout == mesh.layout("a", None)
    differs = ShardingPlan(parameters={"tokens.weight": ("a", None), "head.weight": (None, "a")})
    text = error_of(lambda: shard_module(make_gpt(), mesh, differs), LayoutError)
    assert 'parameter "head.weight"' in text
    assert '"tokens.weight", with which it is tied' in text


@distributed(world_size=2)
def test_plans_that_do_not_fit() -> None:
    mesh = mesh_of()
    for plan, kind, parts in (
        (
            ShardingPlan(modules={"upp": column_parallel("a")}),
            LayoutError,
            ("'upp' matches nothing", "Correct the name"),
        ),
        (ShardingPlan(parameters={"up.weight": ("a",)}), LayoutError, ('parameter "up.weight"', "the tensor has 2")),
        (ShardingPlan(modules={"up": column_parallel("tp")}), MeshError, ('parameter "up.weight"', '"tp"', 'Use "a"')),
    ):
        model = make_mlp()
        text = error_of(lambda model=model, plan=plan: shard_module(model, mesh, plan), kind)
        for part in parts:
            assert part in text
        assert not any(isinstance(p, DTensor) for p in model.parameters()), "changed before it was checked"


@distributed(world_size=2)
def test_shard_module_takes_the_values_of_one_rank() -> None:
    torch.manual_seed(torch.distributed.get_rank())
    model = Mlp()
    mine = model.up.weight.detach().clone()
    expected = [mine.clone(), mine.clone()]
    torch.distributed.all_gather(expected, mine)
    shard_module(model, mesh_of(), PLAN, src_data_rank=1)
    assert torch.equal(model.up.weight.full_tensor(), expected[1])


# -- local_map ----------------------------------------------------------------------------------------


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        assert type(x) is torch.Tensor
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x * x * grad


@distributed(world_size=3)
def test_local_map_of_an_autograd_function() -> None:
    mesh = mesh_of()
    x = noise(5, 2).requires_grad_()
    (x**3).sum().backward()
    for layout in (mesh.layout("a", None), mesh.layout(None, None), mesh.layout(None, None, partial={"a": "sum"})):
        y = lay(x, layout)
        out = local_map(Cube.apply, mesh.layout("a", None), [mesh.layout("a", None)])(y)
        assert (out.shape, out.layout) == ((5, 2), mesh.layout("a", None))
        out.sum().backward()
        close(whole(y.grad), x.grad)


@distributed(world_size=2)
def test_local_map_sums_the_gradients_of_whole_arguments_in_split_work() -> None:
    mesh = mesh_of()
    x, w = noise(5, 3).requires_grad_(), noise(3, seed=1).requires_grad_()
    (x * w).sin().sum().backward()
    xd, wd = lay(x, mesh.layout("a", None)), lay(w, mesh.layout(None))
    out = local_map(lambda x, w: (x * w).sin(), xd.layout, out_shapes=x.shape)(xd, wd)
    with CommCounter() as comm:
        out.sum().backward()
    assert comm.counts == {"all_reduce": 1}
    close(whole(xd.grad), x.grad)
    close(whole(wd.grad), w.grad)


@distributed(world_size=2)
def test_local_map_with_several_outputs_and_other_arguments() -> None:
    mesh = mesh_of()
    x = lay(noise(4, 3), mesh.layout("a", None))

    def both(x: torch.Tensor, number: int, *, flag: bool) -> tuple[torch.Tensor, torch.Tensor, str]:
        return x * number, x.sum(0), "yes" if flag else "no"

    layouts = (x.layout, mesh.layout(None, partial={"a": "sum"}), None)
    scaled, total, text = local_map(both, layouts)(x, 3, flag=True)
    close(whole(scaled), noise(4, 3) * 3)
    close(whole(total), noise(4, 3).sum(0))
    assert text == "yes"


# -- register_sharding_rule ---------------------------------------------------------------------------


def scaled_sum(x: Any, w: Any, scale: float = 1.0) -> Any:
    """`sum over rows of x * w`, a function of the user's own."""
    if has_torch_function((x, w)):
        return handle_torch_function(scaled_sum, (x, w), x, w, scale)
    return (x * w).sum(-2) * scale


@distributed(world_size=2)
def test_a_rule_of_the_users_own() -> None:
    mesh = mesh_of()
    x, w = noise(2, 5, 3).requires_grad_(), noise(5, 3, seed=1).requires_grad_()
    assert "scaled_sum" in error_of(
        lambda: scaled_sum(lay(x, mesh.layout(None, None, None)), lay(w, mesh.layout(None, None))), NoRuleError
    )
    register_sharding_rule(scaled_sum, "... r+ c, r+ c -> ... c", terms="01")
    expected = scaled_sum(x, w, 2.0)
    expected.cos().sum().backward()
    for x_dims in ((None, None, None), (None, "a", None), (None, None, "a"), ("a", None, None)):
        for w_dims in ((None, None), ("a", None), (None, "a")):
            xd, wd = lay(x, mesh.layout(*x_dims)), lay(w, mesh.layout(*w_dims))
            out = scaled_sum(xd, wd, 2.0)
            close(whole(out), expected.detach())
            out.cos().sum().backward()
            close(whole(xd.grad), x.grad)
            close(whole(wd.grad), w.grad)
    with CommCounter() as comm:
        out = scaled_sum(lay(x, mesh.layout(None, "a", None)), lay(w, mesh.layout("a", None)))
    assert comm.total == 0
    assert out.layout == mesh.layout(None, None, partial={"a": "sum"})
    text = error_of(
        lambda: scaled_sum(lay(x, mesh.layout(None, None, None)), lay(noise(3), mesh.layout(None))), ShapeError
    )
    assert "'r c' is written for an operand of 1 dims" in text


@distributed(world_size=1)
def test_a_rule_that_cannot_be_read() -> None:
    with pytest.raises(ValueError, match=r"no operand has the output's 'z'"):
        register_sharding_rule(torch.cdist, "a b, c b -> z")
    x = distribute_tensor(noise(2, 2), mesh_of(), [Shard(0)])
    with pytest.raises(NoRuleError):
        torch.cdist(x, x)
