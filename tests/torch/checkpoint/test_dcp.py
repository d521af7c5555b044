# SPDX-License-Identifier: Apache-2.0
"""Save and resume through torch.distributed.checkpoint: other numbers of ranks, other meshes, torch's own loaders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from hyper_parallel import DTensor, Partial, Replicate, Shard, distribute_tensor, fully_shard, init_device_mesh
from hyper_parallel.core.errors import CheckpointError
from hyper_parallel.testing import distributed
from tests.torch.fully_shard.support import (
    ROWS,
    Trace,
    assert_same,
    full,
    full_params,
    mesh_1d,
    mesh_2d,
    my_rows,
    oracle,
    wrap_gpt,
)
from tests.torch.models import batch, make_gpt


def steps(model: nn.Module, optimizer: Any, first: int, last: int) -> list[float]:
    """Train on the batches of steps `first` to `last` and return their mean losses."""
    losses = []
    for step in range(first, last):
        ids, targets = batch(step, ROWS)
        optimizer.zero_grad()
        loss = model(my_rows(ids), my_rows(targets))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
    return losses


def gpt_and_adamw(mesh: Any) -> tuple[nn.Module, torch.optim.AdamW]:
    model = wrap_gpt(make_gpt(), mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def save(path: Path, mesh: Any) -> None:
    model, optimizer = gpt_and_adamw(mesh)
    steps(model, optimizer, 0, 2)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)


def resume(path: Path, mesh: Any) -> None:
    """Go on from step 2 and compare with a run of one process that was never interrupted."""
    expected: Trace = oracle(make_gpt(), steps=4)
    model, optimizer = gpt_and_adamw(mesh)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    losses = steps(model, optimizer, 2, 4)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected.losses[2:]), rtol=1e-4, atol=1e-5)
    assert_same(full_params(model), expected.params, rtol=1e-3, atol=1e-4)


@distributed(2)
def save_on_two(path: Path) -> None:
    save(path, mesh_1d())


@distributed(4)
def save_on_two_by_two(path: Path) -> None:
    save(path, mesh_2d(2, 2))


@distributed(1)
def resume_on_one(path: Path) -> None:
    resume(path, mesh_1d())


@distributed(3)
def resume_on_three(path: Path) -> None:
    resume(path, mesh_1d())


@distributed(4)
def resume_on_four(path: Path) -> None:
    resume(path, mesh_1d())


@distributed(4)
def resume_on_two_by_two(path: Path) -> None:
    resume(path, mesh_2d(2, 2))


@pytest.mark.parametrize("load", [resume_on_one, resume_on_three, resume_on_four, resume_on_two_by_two])
def test_c06_saved_on_two_ranks_resumes_on_any_number(tmp_path: Path, load: Any) -> None:
    save_on_two(path=tmp_path)
    load(path=tmp_path)


@pytest.mark.parametrize("load", [resume_on_one, resume_on_three])
def test_c06_saved_with_replicas_resumes_without(tmp_path: Path, load: Any) -> None:
    save_on_two_by_two(path=tmp_path)
    load(path=tmp_path)


@distributed(2)
def save_model(path: Path) -> None:
    model = wrap_gpt(make_gpt(), mesh=mesh_1d())
    dcp.save(model.state_dict(), checkpoint_id=path)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
def test_torch_reads_our_checkpoint_into_plain_tensors(tmp_path: Path) -> None:
    save_model(path=tmp_path)
    plain = make_gpt()
    expected = {name: value.detach().clone() for name, value in plain.state_dict().items()}
    state = {name: torch.zeros_like(value) for name, value in expected.items()}
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    assert_same(state, expected, rtol=0, atol=0)


@distributed(2)
def exchange_with_torch(path: Path) -> None:
    from torch.distributed.fsdp import fully_shard as torch_fully_shard

    mesh = dist.device_mesh.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    theirs = torch_fully_shard(make_gpt(), mesh=mesh)
    expected = {name: p.full_tensor().detach().clone() for name, p in theirs.named_parameters()}
    dcp.save(theirs.state_dict(), checkpoint_id=path / "theirs")
    ours = wrap_gpt(make_gpt(), mesh=mesh_1d())
    with torch.no_grad():
        for p in ours.parameters():
            p.zero_()
    state = ours.state_dict()
    dcp.load(state, checkpoint_id=path / "theirs")
    ours.load_state_dict(state)
    assert_same(full_params(ours), expected, rtol=0, atol=0)
    dcp.save(ours.state_dict(), checkpoint_id=path / "ours")
    with torch.no_grad():
        for p in theirs.parameters():
            p.zero_()
    state = theirs.state_dict()
    dcp.load(state, checkpoint_id=path / "ours")
    theirs.load_state_dict(state)
    assert_same({n: p.full_tensor().detach() for n, p in theirs.named_parameters()}, expected, rtol=0, atol=0)


def test_torch_fsdp2_and_ours_read_each_others_checkpoints(tmp_path: Path) -> None:
    exchange_with_torch(path=tmp_path)


LAYOUTS = {
    "rows": (Shard(0), Replicate()),
    "both dims": (Shard(0), Shard(1)),
    "one dim twice": (Shard(0), Shard(0)),
    "copies": (Replicate(), Replicate()),
}


def numbers() -> torch.Tensor:
    return torch.arange(35.0).reshape(5, 7)


@distributed(4)
def save_layouts(path: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    state = {name: distribute_tensor(numbers(), mesh, placements) for name, placements in LAYOUTS.items()}
    state["short"] = distribute_tensor(torch.tensor([3.0]), mesh, (Shard(0), Shard(0)))
    dcp.save(state, checkpoint_id=path)


@distributed(3)
def load_layouts(path: Path) -> None:
    mesh = mesh_1d()
    for placement in (Shard(0), Shard(1), Replicate()):
        state = {name: distribute_tensor(torch.zeros(5, 7), mesh, (placement,)) for name in LAYOUTS}
        state["short"] = distribute_tensor(torch.zeros(1), mesh, (Shard(0),))
        dcp.load(state, checkpoint_id=path)
        assert_same({n: full(state[n]) for n in LAYOUTS}, dict.fromkeys(LAYOUTS, numbers()), rtol=0, atol=0)
        assert full(state["short"]).tolist() == [3.0]


def test_every_layout_loads_into_every_other(tmp_path: Path) -> None:
    # C04: in "short", most ranks have no data under the key.
    save_layouts(path=tmp_path)
    load_layouts(path=tmp_path)


@distributed(2)
def test_a_pending_sum_is_not_saved_as_if_it_were_a_value() -> None:
    pending = DTensor.from_local(torch.ones(3), mesh_1d(), (Partial(),))
    with pytest.raises(CheckpointError, match="Redistribute it first"):
        pending.__create_write_items__("x", pending)


@distributed(2)
def test_frozen_parameters_and_buffers_are_saved_too(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model[0].requires_grad_(False)
    expected = {name: value.detach().clone() for name, value in model.state_dict().items()}
    fully_shard(model, mesh=mesh_1d())
    path = tmp_path
    dcp.save(model.state_dict(), checkpoint_id=path)
    with torch.no_grad():
        for value in (*model.parameters(), *model.buffers()):
            value.zero_()
    state = model.state_dict()
    dcp.load(state, checkpoint_id=path)
    model.load_state_dict(state)
    assert_same({name: full(value) for name, value in model.state_dict().items()}, expected, rtol=0, atol=0)
