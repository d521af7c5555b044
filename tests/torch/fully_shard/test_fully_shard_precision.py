# SPDX-License-Identifier: Apache-2.0
"""Mixed precision: which dtype is seen where, and that sums lose nothing."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from hyper_parallel import MixedPrecisionPolicy, fully_shard
from hyper_parallel.testing import distributed
from tests.torch.fully_shard.support import (
    ROWS,
    full,
    mean_over_ranks,
    mesh_1d,
    mesh_2d,
    my_rows,
    train,
    wrap_gpt,
)
from tests.torch.models import batch, make_gpt

BF16 = torch.bfloat16
BF16_SUM_FP32 = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)


class Probe(nn.Module):
    """A linear that remembers the dtypes it met."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seen: list[Any] = []

    def forward(self, x: torch.Tensor, extra: dict[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
        self.seen = [x.dtype, self.linear.weight.dtype, None if extra is None else extra["ids"].dtype]
        return {"y": self.linear(x), "ids": torch.arange(3)}


@distributed(2)
def test_p_dtypes_of_inputs_parameters_and_outputs() -> None:
    policy = MixedPrecisionPolicy(param_dtype=BF16, output_dtype=torch.float32)
    model = fully_shard(Probe(), mesh=mesh_1d(), mp_policy=policy)
    out = model(torch.ones(2, 4), {"ids": torch.arange(3)})
    assert model.seen == [BF16, BF16, torch.int64]
    assert out["y"].dtype == torch.float32
    assert out["ids"].dtype == torch.int64
    out["y"].sum().backward()
    assert model.linear.weight.dtype == torch.float32
    assert model.linear.weight.grad.dtype == torch.float32


@distributed(2)
def test_inputs_are_left_alone_if_so_chosen() -> None:
    policy = MixedPrecisionPolicy(param_dtype=BF16, cast_forward_inputs=False)
    model = fully_shard(Probe(), mesh=mesh_1d(), mp_policy=policy)
    model(torch.ones(2, 4, dtype=BF16))
    assert model.seen[0] == BF16
    with pytest.raises(RuntimeError, match="dtype"):
        model(torch.ones(2, 4))
    assert model.seen[0] == torch.float32


class Scale(nn.Module):
    """Its weight's gradient is the sum of its input, which the test chooses."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@distributed(2)
def test_f17_sums_keep_what_BF16_would_lose(dtype: torch.dtype) -> None:
    """Rank 0 has 1, rank 1 has 2**-9: their BF16 sum is 1."""
    model = Scale()
    fully_shard(model, mesh=mesh_1d(), mp_policy=BF16_SUM_FP32)
    x = torch.full((8,), 1.0 if dist.get_rank() == 0 else 2.0**-9)
    model(x).sum().backward()
    assert model.weight.grad.dtype == torch.float32
    torch.testing.assert_close(full(model.weight.grad), torch.full((8,), (1 + 2.0**-9) / 2), rtol=0, atol=0)


@distributed(2)
def test_f17_frozen_in_the_first_forward_then_trained() -> None:
    model = Scale()
    fully_shard(model, mesh=mesh_1d(), mp_policy=BF16_SUM_FP32)
    model.requires_grad_(False)
    x = torch.full((8,), 1.0 if dist.get_rank() == 0 else 2.0**-9)
    model(x)
    model.requires_grad_(True)
    model(x).sum().backward()
    torch.testing.assert_close(full(model.weight.grad), torch.full((8,), (1 + 2.0**-9) / 2), rtol=0, atol=0)


@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2)])
@distributed(4)
def test_sums_over_four_ranks_keep_what_BF16_would_lose(mesh_shape: tuple[int, ...]) -> None:
    model = Scale()
    mesh = mesh_1d() if len(mesh_shape) == 1 else mesh_2d(*mesh_shape)
    fully_shard(model, mesh=mesh, mp_policy=BF16_SUM_FP32)
    values = [1.0, 2.0**-9, 2.0**-10, 2.0**-10]
    model(torch.full((8,), values[dist.get_rank()])).sum().backward()
    torch.testing.assert_close(full(model.weight.grad), torch.full((8,), sum(values) / 4), rtol=0, atol=0)


@distributed(2)
def test_accumulation_without_sync_adds_in_the_reduce_dtype() -> None:
    model = Scale()
    fully_shard(model, mesh=mesh_1d(), mp_policy=BF16_SUM_FP32)
    for i, value in enumerate((1.0, 2.0**-9, 2.0**-9)):
        model.set_requires_gradient_sync(i == 2)
        model(torch.full((8,), value)).sum().backward()
    torch.testing.assert_close(full(model.weight.grad), torch.full((8,), 1 + 2.0**-8), rtol=0, atol=0)


@distributed(2)
def test_sharded_accumulation_adds_in_the_dtype_of_the_parameter() -> None:
    model = Scale()
    fully_shard(model, mesh=mesh_1d(), mp_policy=BF16_SUM_FP32)
    for value in (1.0, 2.0**-9, 2.0**-9):
        model(torch.full((8,), value)).sum().backward()
    torch.testing.assert_close(full(model.weight.grad), torch.full((8,), 1 + 2.0**-8), rtol=0, atol=0)


@distributed(2)
def test_u06_BF16_parameters_with_fp32_reduction_get_BF16_gradients() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4).bfloat16()
    fully_shard(model, mesh=mesh_1d(), mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 4, dtype=BF16) * (dist.get_rank() + 1)).sum().backward()
    assert {p.grad.dtype for p in model.parameters()} == {BF16}
    torch.testing.assert_close(full(model.weight.grad), torch.full((4, 4), 3.0, dtype=BF16))
    optimizer.step()


@pytest.mark.parametrize("policy", [None, BF16_SUM_FP32])
@distributed(2)
def test_f18_several_dtypes_in_one_group(policy: MixedPrecisionPolicy | None) -> None:
    torch.manual_seed(0)

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6).bfloat16()
            self.norm = nn.LayerNorm(6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(self.linear(x.to(self.linear.weight.dtype)).to(self.norm.weight.dtype)).square()

    model = Mixed()
    x = torch.arange(12.0).view(2, 6) * (dist.get_rank() + 1)
    plain = copy.deepcopy(model)
    if policy is not None:
        plain = plain.bfloat16()
    plain(x).float().sum().backward()
    expected = mean_over_ranks(p.grad.float() for p in plain.parameters())
    dtypes = [p.dtype for p in model.parameters()]
    fully_shard(model, mesh=mesh_1d(), **({} if policy is None else {"mp_policy": policy}))
    model(x).float().sum().backward()
    assert [p.dtype for p in model.parameters()] == dtypes
    for p, dtype, value in zip(model.parameters(), dtypes, expected, strict=True):
        assert p.grad.dtype == dtype
        torch.testing.assert_close(full(p.grad).float(), value, rtol=1e-2, atol=1e-2)


@distributed(2)
def test_f28_integer_parameters_are_gathered_exactly_and_not_cast() -> None:
    class Quantised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.codes = nn.Parameter(torch.arange(250, 257).remainder(256).to(torch.uint8), requires_grad=False)
            self.scale = nn.Parameter(torch.ones(7))
            self.seen: Any = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen = self.codes.clone()
            return x * self.codes.to(x.dtype) * self.scale

    model = Quantised()
    codes = model.codes.detach().clone()
    fully_shard(model, mesh=mesh_1d(), mp_policy=BF16_SUM_FP32)
    model(torch.ones(7)).sum().backward()
    assert torch.equal(model.seen, codes)
    assert model.codes.grad is None
    torch.testing.assert_close(full(model.scale.grad), codes.to(BF16).float())


@pytest.mark.parametrize("context", ["plain", "output in fp32", "autocast"])
@pytest.mark.parametrize("use_reentrant", [False, True])
@distributed(2)
def test_f12_recomputation_casts_as_the_first_forward_did(use_reentrant: bool, context: str) -> None:
    torch.manual_seed(0)
    output = torch.float32 if context == "output in fp32" else None
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32, output_dtype=output)
    linear = nn.Linear(4, 4)
    x = torch.randn(3, 4).requires_grad_()
    grads = []
    for is_checkpointed in (False, True):
        model = fully_shard(copy.deepcopy(linear), mesh=mesh_1d(), mp_policy=policy)
        x.grad = None
        with torch.autocast("cpu", BF16, enabled=context == "autocast"):
            out = checkpoint(model, x, use_reentrant=use_reentrant) if is_checkpointed else model(x)
        out.float().square().sum().backward()
        grads.append([full(model.weight.grad), full(model.bias.grad), x.grad.clone()])
    torch.testing.assert_close(grads[1], grads[0], rtol=0, atol=0)


@distributed(2)
def test_BF16_training_follows_fp32() -> None:
    plain = train(wrap_gpt(make_gpt(), mesh=mesh_1d()), my_rows)
    mixed = train(wrap_gpt(make_gpt(), mesh=mesh_1d(), mp_policy=BF16_SUM_FP32), my_rows)
    torch.testing.assert_close(torch.tensor(mixed.losses), torch.tensor(plain.losses), rtol=2e-2, atol=0)


@distributed(2)
def test_BF16_gradients_equal_those_of_torch_fully_shard() -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPolicy
    from torch.distributed.fsdp import fully_shard as torch_fully_shard

    mesh = dist.device_mesh.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    theirs = make_gpt()
    policy = TorchPolicy(param_dtype=BF16, reduce_dtype=torch.float32)
    for block in theirs.blocks:
        torch_fully_shard(block, mesh=mesh, mp_policy=policy)
    torch_fully_shard(theirs, mesh=mesh, mp_policy=policy)
    ours = wrap_gpt(make_gpt(), mesh=mesh, mp_policy=BF16_SUM_FP32)
    ids, targets = (my_rows(t) for t in batch(0, ROWS))
    for model in (ours, theirs):
        model(ids, targets).backward()
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert mine.grad.dtype == other.grad.dtype
        torch.testing.assert_close(full(mine.grad), other.grad.full_tensor(), rtol=1e-5, atol=1e-6, msg=name)


@distributed(2)
def test_policies_of_torch_are_taken() -> None:
    from torch.distributed.fsdp import CPUOffloadPolicy
    from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPolicy

    policy = TorchPolicy(param_dtype=BF16, reduce_dtype=torch.float32, output_dtype=torch.float32)
    model = fully_shard(Probe(), mesh=mesh_1d(), mp_policy=policy, offload_policy=CPUOffloadPolicy(pin_memory=False))
    out = model(torch.ones(2, 4))
    assert model.seen[:2] == [BF16, BF16]
    assert out["y"].dtype == torch.float32
    out["y"].sum().backward()
    torch.testing.assert_close(full(model.linear.bias.grad), torch.full((4,), 2.0))


def test_offload_from_an_accelerator_is_refused_whosever_policy_it_is() -> None:
    from torch.distributed.fsdp import CPUOffloadPolicy as TorchOffload

    from hyper_parallel import CPUOffloadPolicy, DeviceMesh

    mesh = DeviceMesh.grid("cuda", dp=1)
    for policy in (CPUOffloadPolicy(), TorchOffload()):
        with pytest.raises(ValueError, match=r"offload from 'cuda' is not served"):
            fully_shard(nn.Linear(2, 2), mesh=mesh, offload_policy=policy)


@dataclasses.dataclass(frozen=True)
class Record:
    x: Any
    rest: Any = None


class Named(NamedTuple):
    x: Any
    rest: Any = None


class Own(dict[str, Any]):
    """A dict of a class that torch's pytrees do not know."""


class Opened(nn.Module):
    """Takes its input out of whatever holds it, and gives back the like."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.dtypes: list[torch.dtype] = []

    def forward(self, held: Any) -> Any:
        x, rest = (held["x"], held["rest"]) if isinstance(held, dict) else (held.x, held.rest)
        self.dtypes += [x.dtype, rest[0].dtype, rest[1].dtype]
        return type(held)(x=self.linear(x), rest=rest)


@pytest.mark.parametrize("kind", [Record, Named, dict, Own])
@distributed(2)
def test_inputs_and_outputs_are_cast_wherever_they_are_held(kind: Any) -> None:
    model = fully_shard(Opened(), mesh=mesh_1d(), mp_policy=MixedPrecisionPolicy(BF16, output_dtype=torch.float32))
    given = kind(x=torch.ones(2, 4), rest=[torch.ones(1), torch.ones(1, dtype=torch.long)])
    out = model(given)
    assert model.dtypes == [BF16, BF16, torch.long]
    x, rest = (out["x"], out["rest"]) if isinstance(out, dict) else (out.x, out.rest)
    assert type(out) is kind
    assert (x.dtype, rest[0].dtype, rest[1].dtype) == (torch.float32, torch.float32, torch.long)
    assert (given["x"] if isinstance(given, dict) else given.x).dtype == torch.float32, "the caller's own was changed"
    x.sum().backward()
    assert model.linear.weight.grad is not None
