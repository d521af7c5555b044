# SPDX-License-Identifier: Apache-2.0
"""fully_shard around tensor and sequence parallelism, against one process on the whole batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.utils.checkpoint import checkpoint

from hyper_parallel import (
    DTensor,
    MixedPrecisionPolicy,
    Shard,
    ShardingPlan,
    distribute_tensor,
    fully_shard,
    init_device_mesh,
    shard_module,
)
from hyper_parallel.core.errors import MeshError, OperandError
from hyper_parallel.core.shard.sharding_plan import (
    Style,
    column_parallel,
    row_parallel,
    sequence_parallel,
    vocabulary_parallel,
)
from hyper_parallel.testing import distributed
from tests.torch.fully_shard.support import (
    ROWS,
    Trace,
    assert_same,
    assert_same_trace,
    assert_sharded,
    full,
    full_grads,
    full_params,
    mesh_1d,
    my_rows,
    oracle,
    wrap_gpt,
)
from tests.torch.models import TinyGpt, batch, make_gpt

LENGTH = 9  # of the sequence: two ranks get 5 and 4 of it


def plan(split_sequence: bool) -> ShardingPlan:
    whole, part = (...,), (None, "tp", None)
    between = part if split_sequence else whole
    modules = {
        "tokens": vocabulary_parallel(outputs=between),
        "blocks.*.attention.out": row_parallel(outputs=between),
        "blocks.*.attention.?": column_parallel(),
        "blocks.*.up": column_parallel(),
        "blocks.*.down": row_parallel(outputs=between),
        "head": Style({"weight": ("tp", None)}),
    }
    if not split_sequence:
        return ShardingPlan(modules=modules)
    modules |= {"blocks.*.norm?": sequence_parallel(), "norm": sequence_parallel()}
    gathers = dict.fromkeys(("blocks.*.attention", "blocks.*.up", "head"), whole)
    return ShardingPlan(modules=modules, inputs=gathers)


def mesh(dp: int, tp: int) -> Any:
    return init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))


def wrapped(dp: int, tp: int, split_sequence: bool = False, **options: Any) -> TinyGpt:
    whole = mesh(dp, tp)
    model = shard_module(make_gpt(), whole["tp"], plan(split_sequence), src_data_rank=None)
    return wrap_gpt(model, mesh=whole["dp"], **options)


def train(
    model: TinyGpt,
    dp: int,
    tp: int,
    first: int = 0,
    last: int = 3,
    optimizer: Any = None,
    index: int | None = None,
) -> Trace:
    """As `support.train`; data-parallel ranks get different rows, tensor-parallel ones the same."""
    trace = Trace()
    rank = mesh(dp, tp).get_local_rank("dp") if index is None else index
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(first, last):
        ids, targets = (my_rows(t, rank, dp) for t in batch(step, ROWS))
        optimizer.zero_grad()
        loss = model(ids, targets)
        loss.backward()
        total = full(loss)
        torch.distributed.all_reduce(total)
        trace.losses.append(total.item() / (dp * tp))
        trace.grads.append(full_grads(model))
        trace.norms.append(float(full(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))))
        optimizer.step()
    trace.params = full_params(model)
    return trace


def check_parity(dp: int, tp: int, split_sequence: bool, **options: Any) -> None:
    expected = oracle(make_gpt())
    model = wrapped(dp, tp, split_sequence, **options)
    assert_same_trace(train(model, dp, tp), expected)
    assert_sharded(model)


@pytest.mark.parametrize("split_sequence", [False, True])
@pytest.mark.parametrize("dp", [1, 2])
@distributed(4)
def test_parity_on_2_tensor_parallel_ranks(dp: int, split_sequence: bool) -> None:
    if dp == 1:
        # The other two ranks are a second, independent job.
        check_parity(1, 4, split_sequence)
    else:
        check_parity(2, 2, split_sequence)


@pytest.mark.parametrize("split_sequence", [False, True])
@distributed(2)
def test_parity_with_tensor_parallelism_only(split_sequence: bool) -> None:
    check_parity(1, 2, split_sequence)


@pytest.mark.slow
@distributed(8, timeout=120)
def test_hsdp_over_tensor_parallelism_on_8_ranks() -> None:
    expected = oracle(make_gpt(), steps=2)
    whole = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replicate", "shard", "tp"))
    model = shard_module(make_gpt(), whole["tp"], plan(True), src_data_rank=None)
    wrap_gpt(model, mesh=whole["replicate", "shard"])
    assert model.blocks[0].up.weight.layout.dims[0] == ("tp", "shard")
    index = 2 * whole.get_local_rank("replicate") + whole.get_local_rank("shard")
    assert_same_trace(train(model, 4, 2, 0, 2, index=index), expected)
    assert_sharded(model)


@pytest.mark.parametrize("reshard", [True, False])
@distributed(4)
def test_parity_whether_resharded_or_not(reshard: bool) -> None:
    check_parity(2, 2, True, reshard_after_forward=reshard)


@distributed(3)
def test_vocabulary_and_width_that_3_ranks_do_not_divide() -> None:
    torch.manual_seed(5)
    plain = nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 7, bias=False))
    plain[1].weight = plain[0].weight
    ids = torch.tensor([[0, 3, 6, 5]])
    plain(ids).square().sum().backward()
    model = nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 7, bias=False))
    model[1].weight = model[0].weight
    with torch.no_grad():
        model[0].weight.copy_(plain[0].weight)
    whole = mesh(1, 3)
    shard_module(model, whole["tp"], ShardingPlan(modules={"0": vocabulary_parallel(), "1": column_parallel()}))
    fully_shard(model, mesh=whole["dp"])
    model(ids).square().sum().backward()
    assert model[0].weight is model[1].weight
    torch.testing.assert_close(full(model[0].weight.grad), plain[0].weight.grad)


@distributed(4)
def test_a_bf16_run_keeps_close_to_the_fp32_one() -> None:
    expected = oracle(make_gpt())
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    trace = train(wrapped(2, 2, mp_policy=policy), 2, 2)
    # bf16 has 8 bits: a relative error of 4e-3 per value
    torch.testing.assert_close(torch.tensor(trace.losses), torch.tensor(expected.losses), rtol=1e-2, atol=1e-2)
    assert all(p.dtype == torch.float32 for p in trace.params.values())


@distributed(4)
def test_parameters_show_both_axes() -> None:
    model = wrapped(2, 2)
    assert str(model.blocks[0].up.weight.layout).startswith("[")
    layout = model.blocks[0].up.weight.layout
    assert layout.dims[0] == ("tp", "dp")
    assert layout.mesh.axis_names == ("dp", "tp")
    assert model.blocks[0].down.weight.layout.dims == (("dp",), ("tp",))
    ids, targets = batch(0, ROWS)
    model(ids, targets).backward()
    assert model.blocks[0].up.weight.grad.layout == layout


def checkpoint_attention(model: TinyGpt, use_reentrant: bool) -> TinyGpt:
    for block in model.blocks:
        inner = block.attention.forward
        block.attention.forward = lambda x, inner=inner: checkpoint(inner, x, use_reentrant=use_reentrant)
    return model


@distributed(4)
def test_f13_checkpointed_parts() -> None:
    expected = oracle(make_gpt())
    assert_same_trace(train(checkpoint_attention(wrapped(2, 2), False), 2, 2), expected)


@distributed(4)
def test_f13_reentrant_checkpointing_of_dtensors_is_refused_with_the_way_out() -> None:
    model = checkpoint_attention(wrapped(2, 2), True)
    with pytest.raises(OperandError, match="use_reentrant=False"):
        model(*batch(0, ROWS))


class Masked(nn.Module):
    """Makes a plain tensor in forward, which is a copy on all tensor-parallel ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 6)
        self.down = nn.Linear(6, 4)

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)) * torch.arange(6.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


@distributed(2)
def test_f13_plain_tensors_made_in_a_checkpointed_part() -> None:
    torch.manual_seed(0)
    plain = Masked()
    x = torch.randn(3, 4, requires_grad=True)
    plain.down(torch.tanh(plain.up(x)) * torch.arange(6.0)).square().sum().backward()
    expected = {n: p.grad.clone() for n, p in plain.named_parameters()}
    plain.zero_grad()
    whole = mesh(1, 2)
    model = shard_module(
        plain, whole["tp"], ShardingPlan(modules={"up": column_parallel(), "down": row_parallel()}), src_data_rank=None
    )
    fully_shard(model, mesh=whole["dp"])
    model(x.detach().requires_grad_()).square().sum().backward()
    assert_same(full_grads(model), expected)


@distributed(4)
def test_a_parameter_on_a_mesh_of_its_own_is_refused_by_name() -> None:
    model = nn.Linear(4, 4)
    other = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), other, (Shard(0),)))
    with pytest.raises(MeshError, match=r"weight.*no mesh in common"):
        fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "x"))["dp"])
    assert isinstance(model.weight, DTensor)


def save(path: Path, dp: int, tp: int) -> None:
    model = wrapped(dp, tp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, dp, tp, 0, 2, optimizer)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)


@distributed(4)
def save_on_four(path: Path) -> None:
    save(path, 2, 2)


@distributed(2)
def resume_without_tensor_parallelism(path: Path) -> None:
    expected = oracle(make_gpt())
    model = wrap_gpt(make_gpt(), mesh=mesh_1d())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    trace = train(model, 2, 1, 2, 3, optimizer)
    torch.testing.assert_close(torch.tensor(trace.losses), torch.tensor(expected.losses[2:]), rtol=1e-4, atol=1e-5)
    assert_same(trace.params, expected.params, rtol=1e-3, atol=1e-4)


def test_c06_saved_with_tensor_parallelism_resumes_without(tmp_path: Path) -> None:
    save_on_four(path=tmp_path)
    resume_without_tensor_parallelism(path=tmp_path)
