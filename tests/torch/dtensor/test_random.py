# SPDX-License-Identifier: Apache-2.0
"""Random functions: copies alike, shards independent, nothing consumed by anything else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import hyper_parallel as hp
from hyper_parallel import DeviceMesh, Replicate, Shard, distribute_tensor, rand
from hyper_parallel.core.errors import MeshError
from hyper_parallel.testing import distributed
from tests.torch.dtensor.support import close, error_of, lay, mesh_of, noise, on_all_ranks, whole


def ones(layout: Any, *shape: int) -> Any:
    return lay(torch.ones(shape), layout)


@distributed(world_size=2)
def test_copies_are_alike_and_shards_are_not() -> None:
    mesh = mesh_of()
    for draw in (
        lambda x: F.dropout(x, 0.5),
        torch.bernoulli,
        torch.rand_like,
        torch.randn_like,
        lambda x: x.normal_(),
    ):
        x = draw(ones(mesh.layout(None), 64) * 0.5)
        pieces = on_all_ranks(x.to_local())
        assert torch.equal(*pieces)
        halves = draw(ones(mesh.layout("a"), 128) * 0.5).full_tensor().chunk(2)
        assert not torch.equal(*halves)


@distributed(world_size=4)
def test_shards_over_one_axis_have_copies_over_the_other() -> None:
    mesh = mesh_of(2, 2)
    pieces = on_all_ranks(F.dropout(ones(mesh.layout("a"), 128), 0.5).to_local())
    assert torch.equal(pieces[0], pieces[1])
    assert torch.equal(pieces[2], pieces[3])
    assert not torch.equal(pieces[0], pieces[2])


@distributed(world_size=2)
def test_a_whole_result_is_what_plain_torch_draws() -> None:
    mesh = mesh_of()
    x = distribute_tensor(torch.ones(40), mesh)
    torch.manual_seed(5)
    expected = [F.dropout(torch.ones(40), 0.3), torch.rand(4), torch.randn(3, 2)]
    torch.manual_seed(5)
    found = [F.dropout(x, 0.3), hp.rand(4, device_mesh=mesh), hp.randn(3, 2, device_mesh=mesh)]
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine.full_tensor(), theirs)


@distributed(world_size=2)
def test_all_ranks_consume_alike_and_others_nothing() -> None:
    """Rank 1's shard is empty, yet the generators go on in step."""
    mesh = mesh_of()
    x = distribute_tensor(torch.ones(1, 3), mesh, [Shard(0)])
    before = torch.get_rng_state()
    F.dropout(x, 0.5, training=False)
    (x * 2 + x.sum()).redistribute(placements=[Replicate()])
    assert torch.equal(torch.get_rng_state(), before)
    F.dropout(x, 0.5)
    assert not torch.equal(torch.get_rng_state(), before)
    states = on_all_ranks(torch.get_rng_state())
    assert torch.equal(*states)


@pytest.mark.parametrize("kind", ["a", None])
@distributed(world_size=2)
def test_checkpointing_draws_the_same_again(kind: str | None) -> None:
    mesh = mesh_of()
    x = lay(noise(6, 4).requires_grad_(), mesh.layout(kind, None))
    masks = []

    def part(x: Any) -> Any:
        y = F.dropout(x, 0.5)
        masks.append(whole(y) != 0)
        return y * y

    checkpoint(part, x, use_reentrant=False).sum().backward()
    assert len(masks) == 2
    assert torch.equal(*masks)
    # d/dx of (2 x mask)^2
    close(whole(x.grad), 8 * noise(6, 4) * masks[0])


@distributed(world_size=2)
def test_dropout_scales_and_drops_as_it_should() -> None:
    mesh = mesh_of()
    y = F.dropout(ones(mesh.layout("a"), 4000), 0.25).full_tensor()
    close(y.unique(), torch.tensor([0.0, 1 / 0.75]))
    # Five standard deviations of 4000 draws.
    assert abs((y == 0).float().mean().item() - 0.25) < 5 * (0.25 * 0.75 / 4000) ** 0.5


@distributed(world_size=2)
def test_initialisation_of_split_parameters() -> None:
    """The bounds of kaiming_uniform_ are those of the whole tensor, not of a rank's part."""
    mesh = mesh_of()
    w = hp.empty(64, 100, device_mesh=mesh, placements=[Shard(1)])
    nn.init.kaiming_uniform_(w, a=5**0.5)
    full = w.full_tensor()
    assert full.abs().max() <= 0.1
    assert full.abs().max() > 0.099
    assert not torch.equal(*full.chunk(2, 1))
    nn.init.trunc_normal_(w, std=0.02, a=-0.04, b=0.04)
    full = w.full_tensor()
    assert 0.039 < full.abs().max() <= 0.04
    assert not torch.equal(*full.chunk(2, 1))
    nn.init.constant_(w, 3.0)
    assert torch.equal(w.full_tensor(), torch.full((64, 100), 3.0))
    nn.init.normal_(w, 2.0, 0.5)
    assert abs(w.full_tensor().mean().item() - 2.0) < 5 * 0.5 / 6400**0.5


@distributed(world_size=2)
def test_ranks_that_were_seeded_differently_are_told() -> None:
    # A mesh is checked once, so one that no other test has.
    mesh = hp.init_device_mesh("cpu", (2,), mesh_dim_names=("seeded",))
    torch.manual_seed(dist.get_rank())
    x = distribute_tensor(torch.ones(4), mesh)
    text = error_of(lambda: F.dropout(x, 0.5), MeshError)
    assert "seeded differently" in text
    assert "torch.manual_seed" in text


@distributed(3, timeout=30)
def test_ranks_on_many_different_meshes_do_not_wait_for_each_others_checks() -> None:
    rank = dist.get_rank()
    pair = DeviceMesh("cpu", [0, 1], mesh_dim_names=("a",))

    def draw(mesh: DeviceMesh) -> None:
        rand(4, device_mesh=mesh, placements=[Shard(0)])

    if rank < 2:
        draw(pair)
    if rank != 1:
        for i in range(64):
            draw(DeviceMesh("cpu", [0, 2], mesh_dim_names=(f"b{i}",)))
    if rank < 2:
        draw(pair)
