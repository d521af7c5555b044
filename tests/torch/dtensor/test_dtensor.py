# SPDX-License-Identifier: Apache-2.0
"""DTensors as tensors: made, taken apart, moved, copied, refused. The oracle is plain torch or torch's own DTensor."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor as theirs
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh as their_mesh

import hyper_parallel as hp
from hyper_parallel import DTensor, Layout, Partial, RaggedShard, Replicate, Shard, distribute_tensor, local_map
from hyper_parallel.core.errors import LayoutError, NoRuleError, OperandError, PartialError, ShapeError, UnevenError
from hyper_parallel.testing import CommCounter, distributed
from tests.torch.dtensor.support import close, error_of, lay, layouts, mesh_of, noise, whole

SHAPES = [(8, 4), (5, 3), (1, 4), (2, 1), (0, 3), (7,), ()]


def meshes() -> list[Any]:
    return [mesh_of(), mesh_of(2, 2)] if dist.get_world_size() == 4 else [mesh_of()]


def box_of(full: torch.Tensor, layout: Layout) -> torch.Tensor:
    """This rank's part of a full tensor, by chunking as `torch.chunk` does, axis by axis."""
    coord = dict(zip(layout.mesh.axis_names, layout.mesh.coord(dist.get_rank()), strict=True))
    for dim, axes in enumerate(layout.dims):
        for axis in axes:
            size = -(-full.shape[dim] // layout.mesh.size(axis))
            start = min(coord[axis] * size, full.shape[dim])
            full = full.narrow(dim, start, min(size, full.shape[dim] - start))
    return full


# -- made and taken apart --------------------------------------------------------------------------


def check_round_trips() -> None:
    for mesh in meshes():
        for shape in SHAPES:
            full = noise(*shape)
            for layout in layouts(mesh, len(shape), partial=()):
                x = distribute_tensor(full, mesh, layout)
                assert x.layout is layout
                assert x.shape == full.shape
                assert torch.equal(x.to_local(), box_of(full, layout))
                assert torch.equal(x.full_tensor(), full)
                again = DTensor.from_local(x.to_local(), layout=layout)
                assert again.shape == full.shape
                assert torch.equal(again.full_tensor(), full)


@distributed(world_size=1)
def test_round_trips_on_one_rank() -> None:
    check_round_trips()


@distributed(world_size=3)
def test_round_trips_on_three_ranks() -> None:
    check_round_trips()


@distributed(world_size=4)
def test_round_trips_on_four_ranks() -> None:
    check_round_trips()


@distributed(world_size=3)
def test_redistribute_between_all_layouts() -> None:
    mesh = mesh_of()
    for shape in ((5, 3), (1, 4), (8, 6)):
        full = noise(*shape, dtype=torch.float64)
        for source in layouts(mesh, 2, partial=("sum", "avg", "max")):
            for target in layouts(mesh, 2, partial=("sum",)):
                x = lay(full, source)
                before = x._local.clone()
                y = x.redistribute(layout=target)
                assert y.layout is target
                close(whole(y), full, 1e-12)
                assert torch.equal(x._local, before)
                y._local.zero_()
                assert y is x or torch.equal(x._local, before), (source, target)


def plain_gradient(full: torch.Tensor) -> torch.Tensor:
    x = full.detach().clone().requires_grad_()
    (x.sin() * noise(*full.shape, seed=9, dtype=full.dtype)).sum().backward()
    return x.grad


def check_redistribute_gradients(mesh: Any, shape: tuple[int, ...]) -> None:
    full = noise(*shape, dtype=torch.float64)
    expected = plain_gradient(full)
    weight = noise(*shape, seed=9, dtype=torch.float64)
    for source in layouts(mesh, 2):
        for target in layouts(mesh, 2):
            x = lay(full.requires_grad_(), source)
            y = x.redistribute(layout=target)
            assert y.requires_grad
            if target.partial:
                y = y.redistribute(layout=mesh.layout(*[None] * 2))
            (y.sin() * distribute_tensor(weight, mesh, y.layout)).sum().backward()
            assert x.grad.layout == source.cotangent
            close(whole(x.grad), expected, 1e-12)


@distributed(world_size=3)
def test_gradients_of_redistribute_on_three_ranks() -> None:
    check_redistribute_gradients(mesh_of(), (5, 2))


@distributed(world_size=4)
def test_gradients_of_redistribute_on_a_2d_mesh() -> None:
    check_redistribute_gradients(mesh_of(2, 2), (5, 2))


@distributed(world_size=2)
def test_chains_of_redistributes_send_the_gradient_the_shortest_way() -> None:
    mesh = mesh_of()
    split, other, copies = mesh.layout("a", None), mesh.layout(None, "a"), mesh.layout(None, None)
    x = lay(noise(4, 6).requires_grad_(), split)
    y = x.redistribute(layout=copies).redistribute(layout=other).redistribute(layout=copies)
    weight = lay(noise(4, 6, seed=1), split)
    with CommCounter() as comm:
        (y * weight).sum().backward()
    # y is whole and used in split work: its gradient is pending, and is scattered to x at once.
    assert comm.total <= 1
    close(whole(x.grad), noise(4, 6, seed=1))


@distributed(world_size=2)
def test_redistribute_to_the_same_layout_is_the_tensor_itself() -> None:
    x = distribute_tensor(noise(4, 3), mesh_of(), [Shard(0)])
    assert x.redistribute(placements=[Shard(0)]) is x
    assert x.redistribute(layout=x.layout) is x


@distributed(world_size=4)
def test_layouts_that_torch_has_no_placements_for() -> None:
    mesh = mesh_of(2, 2)
    full = noise(7, 3)
    reversed_order = mesh.layout(("b", "a"), None)
    x = distribute_tensor(full, mesh, reversed_order)
    assert torch.equal(x.to_local(), box_of(full, reversed_order))
    assert torch.equal(x.full_tensor(), full)
    ragged = distribute_tensor(full, mesh_of(), [RaggedShard(0, (0, 4, 1, 2))])
    assert [len(t) for t in full.split((0, 4, 1, 2))][dist.get_rank()] == len(ragged.to_local())
    assert torch.equal(ragged.full_tensor(), full)


@distributed(world_size=3)
def test_distribute_tensor_takes_the_values_of_one_rank() -> None:
    rank = dist.get_rank()
    mine = noise(5, 2, seed=rank)
    for source in range(3):
        x = distribute_tensor(mine, mesh_of(), [Shard(0)], src_data_rank=source)
        assert torch.equal(x.full_tensor(), noise(5, 2, seed=source))
    with CommCounter() as comm:
        x = distribute_tensor(mine, mesh_of(), [Replicate()], src_data_rank=None)
    assert comm.total == 0
    assert torch.equal(x.to_local(), mine)


@distributed(world_size=2)
def test_distribute_tensor_makes_a_leaf_with_storage_of_its_own() -> None:
    mesh = mesh_of()
    full = noise(4, 3).requires_grad_()
    x = distribute_tensor(full, mesh, [Shard(0)])
    assert x.is_leaf
    assert x.requires_grad
    assert x.to_local().untyped_storage().nbytes() == 2 * 3 * 4
    with torch.no_grad():
        x.mul_(0)
    assert full.detach().abs().sum() > 0
    assert isinstance(distribute_tensor(nn.Parameter(full), mesh, [Shard(0)]), nn.Parameter)


@distributed(world_size=3)
def test_from_local_with_uneven_sizes() -> None:
    mesh, rank = mesh_of(), dist.get_rank()
    full = noise(5, 2)
    piece = full.split((2, 2, 1))[rank]
    assert torch.equal(DTensor.from_local(piece, mesh, [Shard(0)]).full_tensor(), full)
    with CommCounter() as comm:
        assert DTensor.from_local(piece, mesh, [Shard(0)], shape=(5, 2)).shape == (5, 2)
        assert DTensor.from_local(full, mesh).shape == (5, 2)
    assert comm.total == 0
    wrong = full.split((1, 2, 2))[rank]
    text = error_of(lambda: DTensor.from_local(wrong, mesh, [Shard(0)]), UnevenError)
    assert "from_local" in text
    assert "gives rank 0 2, but it has 1" in text
    assert "RaggedShard" in text
    assert "not (6, 2)" in error_of(
        lambda: DTensor.from_local(piece, mesh, [Shard(0)], shape=(6, 2), run_check=True), UnevenError
    )
    ragged = DTensor.from_local(wrong, mesh, [RaggedShard(0, (1, 2, 2))])
    assert torch.equal(ragged.full_tensor(), full)


# -- the same as torch's own -------------------------------------------------------------------------


def placements_of(kinds: str, module: Any) -> list[Any]:
    return [
        {"S": module.Shard(0), "T": module.Shard(1), "R": module.Replicate(), "P": module.Partial()}[k] for k in kinds
    ]


def both(kinds: str, local: torch.Tensor, shape: tuple[int, ...]) -> list[tuple[Any, torch.Tensor, Any]]:
    """(DTensor, leaf, placements module) of ours and torch's, from the same local tensor."""
    out = []
    size = (2, 2) if len(kinds) == 2 else (dist.get_world_size(),)
    for module, mesh in ((hp, mesh_of(*size)), (theirs, their_mesh("cpu", size))):
        leaf = local.clone().requires_grad_()
        placements = placements_of(kinds, module)
        if module is hp:
            x = DTensor.from_local(leaf, mesh, placements, shape=shape)
        else:
            stride = tuple(torch.empty(shape).stride())
            x = theirs.DTensor.from_local(leaf, mesh, placements, shape=torch.Size(shape), stride=stride)
        out.append((x, leaf, module))
    return out


def local_piece(kinds: str, shape: tuple[int, ...]) -> torch.Tensor:
    mesh = mesh_of(2, 2) if len(kinds) == 2 else mesh_of()
    layout = Layout.from_placements(mesh, placements_of(kinds, hp), len(shape))
    full = noise(*shape, seed=dist.get_rank() if "P" in kinds else 0, dtype=torch.float64)
    return box_of(full, layout).contiguous()


@pytest.mark.parametrize("source", ["S", "T", "R", "P"])
@pytest.mark.parametrize("target", ["S", "T", "R"])
@distributed(world_size=3)
def test_from_local_redistribute_to_local_as_in_torch(source: str, target: str) -> None:
    """Values and local gradients, for a gradient that differs from rank to rank."""
    shape = (5, 4)
    results = []
    for x, leaf, module in both(source, local_piece(source, shape), shape):
        y = x.redistribute(placements=placements_of(target, module)).to_local()
        y.backward(noise(*y.shape, seed=3 if target == "R" else 3 + dist.get_rank(), dtype=y.dtype))
        results.append((y.detach(), leaf.grad))
    for mine, their in zip(*results, strict=True):
        close(mine, their, 1e-12)


@pytest.mark.parametrize(
    ("kinds", "target"), [("SR", "RS"), ("RS", "TR"), ("PS", "RS"), ("SP", "SR"), ("ST", "RR"), ("PP", "SR")]
)
@distributed(world_size=4)
def test_from_local_redistribute_to_local_as_in_torch_on_a_2d_mesh(kinds: str, target: str) -> None:
    shape = (6, 4)
    results = []
    for x, leaf, module in both(kinds, local_piece(kinds, shape), shape):
        y = x.redistribute(placements=placements_of(target, module)).to_local()
        y.pow(3).sum().backward()
        results.append((y.detach(), leaf.grad))
    for mine, their in zip(*results, strict=True):
        close(mine, their, 1e-12)


@pytest.mark.parametrize("grad", ["P", "R"])
@pytest.mark.parametrize("source", ["S", "R"])
@distributed(world_size=2)
def test_full_tensor_with_grad_placements_as_in_torch(source: str, grad: str) -> None:
    """With Partial, each rank has its own gradient of the whole tensor, and they add up."""
    shape = (5, 4)
    results = []
    for x, leaf, module in both(source, local_piece(source, shape), shape):
        y = x.full_tensor(grad_placements=placements_of(grad, module))
        y.backward(noise(*shape, seed=dist.get_rank() if grad == "P" else 0, dtype=y.dtype))
        results.append((y.detach(), leaf.grad))
    for mine, their in zip(*results, strict=True):
        close(mine, their, 1e-12)


@pytest.mark.parametrize("grad", [None, "R", "P"])
@distributed(world_size=2)
def test_to_local_with_grad_placements_as_in_torch(grad: str | None) -> None:
    shape = (3, 4)
    results = []
    for x, leaf, module in both("R", local_piece("R", shape), shape):
        y = x.to_local() if grad is None else x.to_local(grad_placements=placements_of(grad, module))
        y.backward(noise(*shape, seed=dist.get_rank() if grad == "P" else 0, dtype=y.dtype))
        results.append((y.detach(), leaf.grad))
    for mine, their in zip(*results, strict=True):
        close(mine, their, 1e-12)


@distributed(world_size=2)
def test_takes_the_mesh_and_placements_of_torch() -> None:
    mesh = their_mesh("cpu", (2,), mesh_dim_names=("tp",))
    full = noise(5, 3)
    x = distribute_tensor(full, mesh, [theirs.Shard(0)])
    assert x.placements == (Shard(0),)
    assert torch.equal(x.redistribute(placements=[theirs.Replicate()]).to_local(), full)
    assert DTensor.from_local(full, mesh, [theirs.Partial()]).placements == (Partial(),)


@distributed(world_size=3)
def test_factories_as_in_torch() -> None:
    mesh, other = mesh_of(), their_mesh("cpu", (3,))
    for kinds in "STR":
        for name, arguments in (("zeros", ((5, 4),)), ("ones", (5, 4)), ("full", ((5, 4), 2.5))):
            mine = getattr(hp, name)(*arguments, device_mesh=mesh, placements=placements_of(kinds, hp))
            their = getattr(theirs, name)(*arguments, device_mesh=other, placements=placements_of(kinds, theirs))
            assert mine.shape == their.shape
            assert torch.equal(mine.to_local(), their.to_local())
            assert torch.equal(mine.full_tensor(), their.full_tensor())
    x = hp.ones(5, 4, device_mesh=mesh, placements=[Shard(0)], dtype=torch.int64)
    assert x.dtype == torch.int64
    x = hp.empty(0, 4, device_mesh=mesh, placements=[Shard(0)], requires_grad=True)
    assert x.requires_grad
    assert x.is_leaf
    assert x.full_tensor().shape == (0, 4)


@distributed(world_size=2)
def test_random_factories_are_alike_on_copies_and_independent_on_shards() -> None:
    mesh = mesh_of()
    for make in (hp.rand, hp.randn):
        copies = make(64, device_mesh=mesh)
        pieces = [torch.empty(64) for _ in range(2)]
        dist.all_gather(pieces, copies.to_local())
        assert torch.equal(*pieces)
        split = make(64, device_mesh=mesh, placements=[Shard(0)]).full_tensor()
        assert not torch.equal(split[:32], split[32:])
        assert len(split.unique()) == 64


@distributed(world_size=2)
def test_factories_like_another_tensor() -> None:
    mesh = mesh_of()
    x = distribute_tensor(noise(5, 3), mesh, [Shard(0)])
    for function, value in ((torch.zeros_like, 0), (torch.ones_like, 1)):
        y = function(x, dtype=torch.float64)
        assert y.layout is x.layout
        assert torch.equal(y.full_tensor(), torch.full((5, 3), value, dtype=torch.float64))
    assert torch.equal(x.new_full((2, 2), 7.0).full_tensor(), torch.full((2, 2), 7.0))
    assert torch.equal(x.new_zeros(5, 3).full_tensor(), torch.zeros(5, 3))
    pending = lay(noise(5, 3), mesh.layout(None, None, partial={"a": "sum"}))
    assert torch.equal(torch.ones_like(pending).full_tensor(), torch.ones(5, 3))


# -- as a tensor ---------------------------------------------------------------------------------------


@distributed(world_size=3)
def test_attributes_are_those_of_the_global_tensor() -> None:
    full = noise(5, 4, 2)
    x = distribute_tensor(full, mesh_of(), [Shard(0)])
    assert (x.shape, x.size(), x.size(1), x.size(-1)) == (full.shape, full.size(), 4, 2)
    assert (x.ndim, x.dim(), x.numel(), x.nelement(), len(x)) == (3, 3, 40, 40, 5)
    assert (x.dtype, x.device, x.layout.mesh) == (full.dtype, full.device, mesh_of())
    assert (x.stride(), x.stride(0)) == (full.stride(), 8)
    assert x.t is not None
    assert x.transpose(0, 2).stride() == full.transpose(0, 2).stride()
    assert x.nbytes == full.nbytes
    assert (x.is_floating_point(), torch.is_floating_point(x), x.is_complex(), torch.is_complex(x)) == (
        True,
        True,
        False,
        False,
    )
    assert (x.is_sparse, x.is_cpu, x.is_meta, x.is_contiguous()) == (False, True, False, True)
    assert (torch.is_tensor(x), isinstance(x, torch.Tensor), isinstance(x, DTensor)) == (True, True, True)
    assert hash(x) == hash(x)
    assert {x: 1}[x] == 1
    assert [torch.equal(a.full_tensor(), b) for a, b in zip(x, full, strict=True)] == [True] * 5


@distributed(world_size=2)
def test_values_are_those_of_the_global_tensor() -> None:
    mesh = mesh_of()
    full = noise(3, 2)
    x = distribute_tensor(full, mesh, [Shard(0)])
    assert x.tolist() == full.tolist()
    assert (x.numpy() == full.numpy()).all()
    assert (x.sum().item(), float(x.sum())) == (pytest.approx(full.sum().item()),) * 2
    assert bool((x == x).all()) is True
    assert int(hp.full((), 3, device_mesh=mesh)) == 3
    assert f"{x.sum():.3f}" == f"{full.sum():.3f}"
    assert torch.equal(x, distribute_tensor(full, mesh, [Shard(1)]))
    assert not torch.equal(x, distribute_tensor(full + 1, mesh, [Shard(1)]))
    assert torch.allclose(x, distribute_tensor(full + 1e-9, mesh))
    with pytest.raises(RuntimeError):
        x.item()
    text = repr(x)
    for part in ("DTensor(shape=(3, 2)", "layout=[a, -]", "mesh=", "dtype=torch.float32", "local="):
        assert part in text
    assert "requires_grad=True" in repr(x.requires_grad_())


def parameter(mesh: Any) -> nn.Parameter:
    return nn.Parameter(distribute_tensor(noise(5, 3), mesh, [Shard(0)]))


@distributed(world_size=2)
def test_parameter() -> None:
    mesh = mesh_of()
    p = parameter(mesh)
    assert isinstance(p, nn.Parameter)
    assert isinstance(p, DTensor)
    assert (p.requires_grad, p.is_leaf, p.grad_fn, p.grad) == (True, True, None, None)
    (p * 2).sum().backward()
    assert p.grad is p.grad
    assert p.grad.layout is p.layout
    assert torch.equal(p.grad.full_tensor(), torch.full((5, 3), 2.0))
    (p * 2).sum().backward()
    assert torch.equal(p.grad.full_tensor(), torch.full((5, 3), 4.0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the cycle that create_graph makes
        (p * 2).sum().backward(create_graph=True)
    # Now autograd has put another tensor in the place of the old one.
    assert torch.equal(p.grad.full_tensor().detach(), torch.full((5, 3), 6.0))
    p.grad = None
    assert p.grad is None
    p.grad = distribute_tensor(noise(5, 3), mesh, [Shard(1)])
    assert p.grad.layout is p.layout
    assert torch.equal(p.grad.full_tensor(), noise(5, 3))
    del p.grad
    assert p.grad is None
    assert "plain tensor" in error_of(lambda: setattr(p, "grad", noise(5, 3)), OperandError)
    frozen = nn.Parameter(p.detach(), requires_grad=False)
    assert not (frozen * 2).requires_grad


@distributed(world_size=2)
def test_requires_grad_detach_data() -> None:
    mesh = mesh_of()
    x = distribute_tensor(noise(5, 3), mesh, [Shard(0)])
    assert not x.requires_grad
    assert x.requires_grad_() is x
    y = x * 2
    assert (y.requires_grad, y.is_leaf, y.grad_fn is not None) == (True, False, True)
    for out in (y.detach(), y.data, x.detach()):
        assert (out.requires_grad, out.is_leaf, out.grad_fn) == (False, True, None)
        assert out.layout is x.layout
    assert x.detach().to_local().data_ptr() == x.to_local().data_ptr()
    y.detach_()
    assert (y.requires_grad, y.is_leaf) == (False, True)
    x.requires_grad = False
    assert not (x * 2).requires_grad
    x.data = distribute_tensor(noise(5, 3, seed=1), mesh, [Shard(1)])
    assert x.layout == mesh.layout("a", None)  # other values, laid as before
    assert torch.equal(x.full_tensor(), noise(5, 3, seed=1))
    assert "plain tensor" in error_of(lambda: setattr(x, "data", noise(5, 3)), OperandError)
    moved = distribute_tensor(noise(5, 3).requires_grad_(), mesh, [Shard(0)]).redistribute(placements=[Replicate()])
    assert (moved.requires_grad, moved.is_leaf, moved.grad_fn is not None) == (True, False, True)
    with torch.no_grad():
        assert not distribute_tensor(noise(4).requires_grad_(), mesh, [Shard(0)]).redistribute().requires_grad


@distributed(world_size=2)
def test_hooks() -> None:
    p = parameter(mesh_of())
    seen: list[Any] = []
    handle = p.register_hook(lambda grad: grad * 3)
    p.register_post_accumulate_grad_hook(lambda tensor: seen.append((tensor is p, tensor.grad.full_tensor())))
    p.sum().backward()
    assert torch.equal(p.grad.full_tensor(), torch.full((5, 3), 3.0))
    handle.remove()
    p.sum().backward()
    assert torch.equal(p.grad.full_tensor(), torch.full((5, 3), 4.0))
    assert [is_p for is_p, _ in seen] == [True, True]
    assert torch.equal(seen[0][1], torch.full((5, 3), 3.0))


@distributed(world_size=2)
def test_deepcopy() -> None:
    p = parameter(mesh_of())
    p.tag = ["mine"]
    p.sum().backward()
    q = copy.deepcopy(p)
    assert isinstance(q, nn.Parameter)
    assert (type(q), q.layout, q.shape, q.requires_grad) == (type(p), p.layout, p.shape, True)
    assert q.tag == ["mine"]
    assert q.tag is not p.tag
    assert torch.equal(q.grad.full_tensor(), p.grad.full_tensor())
    with torch.no_grad():
        q.add_(1)
    assert torch.equal(p.full_tensor(), noise(5, 3))
    tied = nn.ModuleList([nn.Linear(3, 5, bias=False), nn.Linear(3, 5, bias=False)])
    tied[0].weight = tied[1].weight = p
    copied = copy.deepcopy(tied)
    assert copied[0].weight is copied[1].weight
    with pytest.raises(RuntimeError, match="not a leaf"):
        copy.deepcopy(p * 2)


@distributed(world_size=2)
def test_pickle() -> None:
    mesh = mesh_of()
    for layout in layouts(mesh, 2, partial=("sum", "max")):
        assert pickle.loads(pickle.dumps(layout)) is layout
    p = parameter(mesh)
    file = io.BytesIO()
    torch.save({"p": p, "x": p.detach()}, file)
    file.seek(0)
    back = torch.load(file, weights_only=False)
    for name, expected in (("p", True), ("x", False)):
        assert isinstance(back[name], DTensor)
        assert (back[name].layout, back[name].requires_grad) == (p.layout, expected)
        assert torch.equal(back[name].full_tensor(), p.full_tensor())
    assert isinstance(back["p"], nn.Parameter)


@distributed(world_size=2)
def test_module_conversions() -> None:
    mesh = mesh_of()
    module = nn.Linear(3, 5)
    plain = copy.deepcopy(module)
    for name, p in list(module.named_parameters()):
        setattr(module, name, nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)], src_data_rank=0)))
        dist.broadcast(getattr(plain, name).data, 0)
    x = noise(2, 3)
    for convert in ("double", "half", "bfloat16", "float"):
        parameters = list(module.parameters())
        getattr(module, convert)()
        getattr(plain, convert)()
        assert all(a is b for a, b in zip(parameters, module.parameters(), strict=True))
        for p, q in zip(module.parameters(), plain.parameters(), strict=True):
            assert p.dtype == q.dtype
            assert torch.equal(p.full_tensor(), q.detach())
    module.to(torch.float64)
    assert all(p.dtype == torch.float64 for p in module.parameters())
    module(distribute_tensor(x.double(), mesh)).sum().backward()
    assert module.weight.grad.dtype == torch.float64
    module.float()
    assert module.weight.grad.dtype == torch.float32
    module.zero_grad()
    assert module.weight.grad is None
    module.requires_grad_(False)
    assert not module(distribute_tensor(x, mesh)).requires_grad
    state = module.state_dict()
    other = nn.Linear(3, 5)
    for name in state:
        setattr(other, name, nn.Parameter(hp.zeros(*state[name].shape, device_mesh=mesh, placements=[Shard(0)])))
    other.load_state_dict(state)
    assert all(
        torch.equal(a.full_tensor(), b.full_tensor())
        for a, b in zip(other.parameters(), module.parameters(), strict=True)
    )


@distributed(world_size=2)
def test_backward_from_any_layout_with_any_gradient() -> None:
    """The gradient given may be plain (a copy of the whole) or lie otherwise than the tensor."""
    mesh = mesh_of()
    full = noise(5, 3).requires_grad_()
    gradient = noise(5, 3, seed=1)
    full.sin().backward(gradient)
    for layout in layouts(mesh, 2):
        for given in (gradient, *(lay(gradient, g) for g in layouts(mesh, 2))):
            x = lay(full, layout)
            x.sin().backward(given)
            close(whole(x.grad), full.grad)
            x.grad = None
            torch.autograd.backward([x.sin()], [given])
            close(whole(x.grad), full.grad)
    x = lay(full, mesh.layout("a", None))
    with pytest.raises(RuntimeError, match="only for scalar outputs"):
        x.sin().backward()
    text = error_of(lambda: x.sin().backward(lay(noise(3), mesh.layout("a"))), ShapeError)
    assert "(5, 3)" in text
    assert "(3,)" in text


@distributed(world_size=2)
def test_backward_from_a_pending_extreme() -> None:
    """The gradient goes to the rank whose value it is, not to all."""
    mesh, rank = mesh_of(), dist.get_rank()
    leaf = torch.tensor([float(rank), -float(rank)]).requires_grad_()
    pending = DTensor.from_local(leaf, layout=mesh.layout(None, partial={"a": "max"}))
    (pending.redistribute() * 2).sum().backward()
    assert leaf.grad.tolist() == ([0.0, 2.0] if rank == 0 else [2.0, 0.0])
    leaf.grad = None
    pending.backward(distribute_tensor(torch.tensor([2.0, 2.0]), mesh))
    assert leaf.grad.tolist() == ([0.0, 2.0] if rank == 0 else [2.0, 0.0])


# -- refused -------------------------------------------------------------------------------------------


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad * 2


@distributed(world_size=2)
def test_an_autograd_function_of_the_user() -> None:
    """It would lose its graph without a word: refused at the first use, done through local_map."""
    mesh = mesh_of()
    x = lay(noise(5, 3).requires_grad_(), mesh.layout("a", None))
    out = Doubled.apply(x)
    for use in (lambda: out.sum(), lambda: out + x, lambda: torch.stack([x, out])):
        text = error_of(use, OperandError)
        assert "DTensor (5, 3) [a, -]" in text
        assert "autograd.Function" in text
        assert "local_map" in text
    local_map(Doubled.apply, x.layout, out_shapes=x.shape)(x).sum().backward()
    assert torch.equal(x.grad.full_tensor(), torch.full((5, 3), 2.0))
    with torch.no_grad():
        assert torch.equal((Doubled.apply(x) + 0.0).full_tensor(), noise(5, 3) * 2)


@distributed(world_size=4)
def test_an_op_without_a_rule() -> None:
    """One text on every rank: the op, the operands' layouts, the ways out."""
    mesh = mesh_of(2, 2)
    x = lay(noise(6, 6), mesh.layout("a", "b"))
    y = lay(noise(6, 6), mesh.layout(None, None, partial={"a": "sum"}))
    for call, name in (
        (lambda: torch.linalg.qr(x), "qr"),
        (lambda: torch.cdist(x, y), "cdist"),
        (lambda: x.cholesky(), "cholesky"),
    ):
        with CommCounter() as comm:
            try:
                call()
            except NoRuleError as caught:
                error = caught
        assert comm.total == 0
        texts = [None] * 4
        dist.all_gather_object(texts, str(error))
        assert len(set(texts)) == 1
        for part in (
            name,
            "DTensor float32 (6, 6) [a, b]",
            "no sharding rule",
            "register_sharding_rule",
            "local_map",
            "full_tensor()",
        ):
            assert part in str(error)
    assert "[-, -] sum(a)" in error_of(lambda: torch.cdist(x, y), NoRuleError)


@distributed(world_size=2)
def test_a_dtensor_in_the_dispatcher_raises() -> None:
    x = distribute_tensor(noise(4, 3), mesh_of(), [Shard(0)])
    text = error_of(lambda: torch.ops.aten.add.Tensor(x, x), NoRuleError)
    assert "no sharding rule" in text


@distributed(world_size=2)
def test_in_place_ops_keep_the_layout() -> None:
    mesh = mesh_of()
    full, other = noise(5, 3), noise(5, 3, seed=1)
    calls = [
        lambda x, y: x.add_(y),
        lambda x, y: x.mul_(y),
        lambda x, y: x.copy_(y),
        lambda x, y: x.sub_(1).clamp_(min=0),
        lambda x, y: x.zero_(),
        lambda x, y: x.masked_fill_(y > 0, 7.0),
        lambda x, y: x.fill_(3.0),
        lambda x, y: x.lerp_(y, 0.25),
        lambda x, y: x.__setitem__((slice(None), slice(None)), y),
    ]
    for layout in (mesh.layout("a", None), mesh.layout(None, "a"), mesh.layout(None, None)):
        for partner in (mesh.layout("a", None), mesh.layout(None, "a"), mesh.layout(None, None, partial={"a": "sum"})):
            for n, call in enumerate(calls):
                x, expected = lay(full, layout), full.clone()
                local = x._local
                call(x, lay(other, partner))
                call(expected, other.clone())
                assert x._local is local, n
                assert x.layout is layout, n
                close(whole(x), expected)


@distributed(world_size=2)
def test_in_place_ops_on_a_pending_sum() -> None:
    """Linear ones go on; others would have to finish it first, which no in-place op may."""
    mesh = mesh_of()
    layout = mesh.layout(None, None, partial={"a": "sum"})
    full, other = noise(5, 3), noise(5, 3, seed=1)
    for call in (
        lambda x, y: x.add_(y),
        lambda x, y: x.copy_(y),
        lambda x, y: x.mul_(3),
        lambda x, y: x.zero_(),
        lambda x, y: x.sub_(y, alpha=2),
        lambda x, y: x.mul_(lay(other, layout) if isinstance(x, DTensor) else y),
    ):
        x, expected = lay(full, layout), full.clone()
        call(x, distribute_tensor(other, mesh, [Shard(0)]))
        call(expected, other)
        assert x.layout is layout
        close(whole(x), expected)
    x = lay(full, layout).copy_(other)
    close(whole(x), other)
    for call in (
        lambda x: x.add_(1),
        lambda x: x.relu_(),
        lambda x: x.fill_(2.0),
        lambda x: x.pow_(2),
        lambda x: x.__setitem__(0, 1.0),
        lambda x: torch.nn.init.ones_(x),
    ):
        x = lay(full, layout)
        before = x._local.clone()
        with CommCounter() as comm:
            text = error_of(lambda call=call, x=x: call(x), LayoutError)
        assert comm.total == 0
        assert "edistribute it first" in text
        assert torch.equal(x._local, before)


@distributed(world_size=2)
def test_in_place_ops_that_would_change_shape_or_cut_a_sharded_dim() -> None:
    mesh = mesh_of()
    x = lay(noise(1, 3), mesh.layout("a", None))
    before = x._local.clone()
    with pytest.raises(RuntimeError, match=r"output with shape|broadcast"):
        x.add_(distribute_tensor(noise(5, 3), mesh))
    assert torch.equal(x._local, before)
    x = lay(noise(5, 3), mesh.layout("a", None))
    before = x._local.clone()
    for index in (0, slice(1, 3), (0, 1), distribute_tensor(torch.tensor([0, 2]), mesh)):
        with CommCounter() as comm:
            text = error_of(lambda index=index: x.__setitem__(index, 1.0), NoRuleError)
        assert comm.total == 0
        assert "cuts dim 0, which is sharded" in text
        assert "torch.where" in text
    assert torch.equal(x._local, before)
    expected = noise(5, 3)
    x[:, 1], expected[:, 1] = 9.0, 9.0
    x[..., distribute_tensor(torch.tensor([0, 2]), mesh)] = distribute_tensor(noise(5, 2, seed=1), mesh)
    expected[..., torch.tensor([0, 2])] = noise(5, 2, seed=1)
    close(whole(x), expected)


@distributed(world_size=2)
def test_setitem_carries_gradients() -> None:
    mesh = mesh_of()
    x, y = noise(5, 3).requires_grad_(), noise(5, seed=1).requires_grad_()
    xd, yd = lay(x, mesh.layout("a", None)), lay(y, mesh.layout("a"))
    for a, b in ((x, y), (xd, yd)):
        z = a * 2
        z[:, 1] = b
        (z * z).sum().backward()
    close(whole(xd.grad), x.grad)
    close(whole(yd.grad), y.grad)


@distributed(world_size=2)
def test_a_plain_tensor_among_dtensors() -> None:
    """Nobody knows whether it is a piece or a copy; a number in a tensor is a number."""
    mesh = mesh_of()
    x = distribute_tensor(noise(5, 3), mesh, [Shard(0)])
    plain = noise(5, 3)
    for call, name in (
        (lambda: x + plain, "add"),
        (lambda: plain + x, "add"),
        (lambda: plain @ x.t(), "matmul"),
        (lambda: torch.cat([x, plain]), "cat"),
        (lambda: F.linear(x, torch.ones(2, 3)), "linear"),
        (lambda: torch.where(plain > 0, x, 0.0), "where"),
        (lambda: x.add_(plain), "add_"),
    ):
        text = error_of(call, OperandError)
        assert name in text
        assert "plain Tensor" in text
        assert "distribute_tensor(t, mesh)" in text
        assert "to_local()" in text
    close(whole(x * torch.tensor(2.0)), plain * 2)
    close(whole(torch.tensor(2.0) - x), 2 - plain)
    assert "DTensor" in error_of(lambda: plain.__setitem__(0, x[0]), OperandError)


@distributed(world_size=2)
def test_sums_of_losses_stay_pending() -> None:
    """`sum(losses)` begins with the int 0, which is added to nothing."""
    mesh = mesh_of()
    x = distribute_tensor(noise(4, 3), mesh, [Shard(0)])
    with CommCounter() as comm:
        total = sum([x.sum(), (x * x).sum()])
    assert comm.total == 0
    close(whole(total), (noise(4, 3) + noise(4, 3) ** 2).sum())


@distributed(world_size=4)
def test_wrong_arguments_are_refused_on_every_rank() -> None:
    mesh, other = mesh_of(), mesh_of(2, 2)
    x = distribute_tensor(noise(5, 3), mesh, [Shard(0)])
    y = distribute_tensor(noise(5, 3), other)
    assert "the meshes differ" in error_of(lambda: x.redistribute(layout=other.layout("a", None)), LayoutError)
    assert "operands lie on meshes" in error_of(lambda: x + y, LayoutError)
    assert "got a DTensor" in error_of(lambda: distribute_tensor(x, mesh), OperandError)
    assert "got a DTensor" in error_of(lambda: DTensor.from_local(x, mesh), OperandError)
    pending = mesh.layout(None, None, partial={"a": "sum"})
    assert "no operands of a pending reduction" in error_of(
        lambda: distribute_tensor(noise(5, 3), mesh, pending), PartialError
    )
    assert error_of(lambda: distribute_tensor(noise(5, 3), mesh, [Shard(2)]), LayoutError)
    assert error_of(lambda: x.redistribute(placements=[Shard(0), Shard(1)]), LayoutError)
    x.mean()
    assert "could not infer output dtype" in error_of(lambda: x.long().mean(), RuntimeError)
    assert "view to (4, 4)" in error_of(lambda: x.view(4, 4), ShapeError)
    with pytest.raises(RuntimeError, match="broadcast"):
        x + distribute_tensor(noise(4, 3), mesh)


@distributed(world_size=2)
def test_out_and_inplace_arguments() -> None:
    """What is written to keeps its layout and graph, also if the op had to run under another."""
    mesh = mesh_of()
    full = noise(5, 3)
    kinds = [mesh.layout("a", None), mesh.layout(None, "a"), mesh.layout(None, None, partial={"a": "sum"})]
    for source in kinds:
        for target in kinds:
            out = lay(noise(5, 3, seed=1), target)
            for call in (lambda x, out: torch.exp(x, out=out), lambda x, out: torch.add(x, x, alpha=2, out=out)):
                assert call(lay(full, source), out) is out
                assert out.layout is target
                close(whole(out), call(full, torch.empty(5, 3)))
        for function in (F.relu, F.silu, F.elu):
            results = []
            for leaf in (full.clone().requires_grad_(), lay(full.clone().requires_grad_(), source)):
                x = leaf.redistribute() if isinstance(leaf, DTensor) else leaf * 1
                y = function(x, inplace=True)
                assert y is x
                (x * x).sum().backward()
                results.append((whole(y), whole(leaf.grad)))
            for mine, their in zip(*results, strict=True):
                close(mine, their)
    x = lay(full, kinds[0])
    text = error_of(lambda: torch.exp(x, out=lay(noise(3), mesh.layout(None))), OperandError)
    assert "exp with out=" in text


@pytest.mark.parametrize("vocab", [4, 1])
@distributed(world_size=2)
def test_indices_that_no_rank_has(vocab: int) -> None:
    """Masked kernels must not take them for another rank's; ranks without any row refuse them too."""
    mesh = mesh_of()
    for bad in (vocab, vocab + 7, -1):
        ids = distribute_tensor(torch.tensor([0, bad]), mesh)
        for layout in (mesh.layout("a", None), mesh.layout(None, None)):
            weight = lay(noise(vocab, 3), layout)
            assert "range" in error_of(lambda weight=weight, ids=ids: F.embedding(ids, weight), IndexError)
        for layout in (mesh.layout(None, "a"), mesh.layout(None, None)):
            logits = lay(noise(2, vocab), layout)
            assert "out of bounds" in error_of(
                lambda logits=logits, ids=ids: F.cross_entropy(logits, ids), (IndexError, RuntimeError)
            )


@distributed(world_size=2)
def test_arguments_of_losses_are_not_dropped() -> None:
    mesh = mesh_of()
    x, y = noise(5, 3), noise(5, 3, seed=1)
    xd, yd = lay(x, mesh.layout("a", None)), lay(y, mesh.layout(None, "a"))
    for function in (F.mse_loss, F.l1_loss):
        for reduction in ("none", "sum", "mean"):
            close(whole(function(xd, yd, reduction=reduction)), function(x, y, reduction=reduction))
    # torch itself does not hand on the weight of l1_loss.
    assert "mse_loss with weight" in error_of(lambda: F.mse_loss(xd, yd, weight=xd), NoRuleError)
