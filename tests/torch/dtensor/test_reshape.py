# SPDX-License-Identifier: Apache-2.0
"""View ops and reshaping redistributions on real ranks, forward and gradient; writes through views."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hyper_parallel import Partial, Replicate, Shard, distribute_tensor
from hyper_parallel.core.errors import LayoutError, OperandError, ShapeError
from hyper_parallel.testing import CommCounter, distributed
from tests.torch.dtensor.support import lay, layouts, mesh_of, noise, special_layouts

VIEWS: dict[str, tuple[tuple[int, ...], Callable[[Any], Any]]] = {
    "flatten": ((4, 3, 2), lambda x: x.flatten()),
    "flatten some": ((4, 3, 2), lambda x: x.flatten(1)),
    "flatten uneven": ((5, 6), lambda x: torch.flatten(x, 0, 1)),
    "view": ((4, 3, 2), lambda x: x.view(4, -1)),
    "view inner": ((2, 4, 8), lambda x: x.view(8, 8)),
    "view across": ((12, 8), lambda x: x.view(-1, 6)),
    "split dim": ((6, 4), lambda x: x.reshape(2, 3, 4)),
    "split short dim": ((6,), lambda x: x.view(2, 3)),
    "unflatten": ((3, 12), lambda x: x.unflatten(1, (4, -1))),
    "merge and split": ((4, 4, 4), lambda x: x.view(8, 8)),
    "size one": ((1, 2), lambda x: x.view(1, 2)),
    "size one lost": ((1, 6), lambda x: x.view(6)),
    "squeeze": ((1, 3, 1, 4), lambda x: x.squeeze()),
    "squeeze one": ((1, 3, 1, 4), lambda x: x.squeeze(2)),
    "squeeze none": ((2, 3), lambda x: x.squeeze(0)),
    "unsqueeze": ((3, 4), lambda x: x.unsqueeze(1)),
    "ravel": ((5, 2), lambda x: x.ravel()),
    "view_as": ((6, 2), lambda x: x.view_as(torch.empty(3, 4))),
    "empty": ((0, 4), lambda x: x.view(2, 0)),
    "empty shards": ((3, 2), lambda x: x.reshape(6)),
}


def check_view(full: torch.Tensor, work: Callable[[Any], Any], layout: Any) -> None:
    plain = full.clone().requires_grad_()
    expected = work(plain)
    weight = noise(*expected.shape, seed=4)
    (expected * weight).sum().backward()
    x = lay(full.clone().requires_grad_(), layout)
    out = work(x)
    assert out.shape == expected.shape
    torch.testing.assert_close(out.detach().full_tensor(), expected.detach(), atol=1e-5, rtol=1e-5)
    (out * distribute_tensor(weight, layout.mesh)).sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), plain.grad, atol=1e-5, rtol=1e-5)


def check_all_views(mesh: Any) -> None:
    for shape, work in VIEWS.values():
        special = [
            one for one in special_layouts(mesh, shape, is_float=True) if all(o.value == "sum" for _, o in one.partial)
        ]
        for layout in (*layouts(mesh, len(shape)), *special):
            check_view(noise(*shape), work, layout)


@distributed(2)
def test_views_of_all_layouts() -> None:
    check_all_views(mesh_of())


@pytest.mark.slow
@distributed(4)
def test_views_of_all_layouts_on_two_axes() -> None:
    check_all_views(mesh_of(2, 2))


@distributed(4)
def test_d16_what_a_view_cannot_do_moves() -> None:
    full = noise(12, 8)
    x = distribute_tensor(full, mesh_of(), [Shard(1)])
    with CommCounter() as comm:
        y = x.view(-1, 6)
    assert comm.counts == {"all_to_all": 1}
    torch.testing.assert_close(y.full_tensor(), full.view(16, 6))


@distributed(6)
def test_d17_rows_keep_their_place() -> None:
    mesh = mesh_of(2, 3)
    cube = noise(4, 4, 4)
    x = distribute_tensor(cube, mesh, [Shard(1), Replicate()])
    torch.testing.assert_close(x.view(8, 8).full_tensor(), cube.view(8, 8))
    flat = mesh_of(6)
    y = distribute_tensor(noise(12, 8), flat, [Shard(1)]).view(16, 6)
    torch.testing.assert_close(y.full_tensor(), noise(12, 8).view(16, 6))


@distributed(2)
def test_d19_d20_shards_that_survive_cost_nothing() -> None:
    mesh = mesh_of()
    cases: list[tuple[tuple[int, ...], Shard, tuple[int, ...], str]] = [
        ((5, 6), Shard(0), (-1,), "[a~]"),
        ((8, 6), Shard(0), (2, 4, 6), "[a, -, -]"),
        ((1, 2), Shard(0), (1, 2), "[a, -]"),
        ((3, 2), Shard(0), (3, 2), "[a, -]"),
        ((4, 6), Shard(0), (24,), "[a]"),
        ((4, 6), Shard(1), (2, 2, 6), "[-, -, a]"),
        ((1, 6), Shard(0), (6,), "[a~]"),
    ]
    for shape, placement, new_shape, expected in cases:
        x = distribute_tensor(noise(*shape), mesh, [placement])
        with CommCounter() as comm:
            y = x.view(new_shape)
        assert comm.total == 0
        assert str(y.layout) == expected
        assert y._local.untyped_storage().data_ptr() == x._local.untyped_storage().data_ptr()
        torch.testing.assert_close(y.full_tensor(), noise(*shape).view(new_shape))


@distributed(2)
def test_results_with_pieces_of_their_own_size_go_on() -> None:
    mesh = mesh_of()
    full, other = noise(5, 6), noise(30, seed=2)
    plain = full.clone().requires_grad_()
    x = lay(full.clone().requires_grad_(), mesh.layout("a", None))

    def work(x: Any, other: Any) -> Any:
        y = x.view(-1) * other + 1
        z = torch.softmax(y, 0) + y.view(5, 6).sum(1).mean()
        return (z.unflatten(0, (3, 10)) @ torch.cat([y, y])[:10]).norm()

    with torch.no_grad():
        expected = work(full, other)
    work(plain, other).backward()
    out = work(x, distribute_tensor(other, mesh))
    torch.testing.assert_close(out.detach().full_tensor(), expected, atol=1e-5, rtol=1e-5)
    out.backward()
    torch.testing.assert_close(x.grad.full_tensor(), plain.grad, atol=1e-5, rtol=1e-5)


@distributed(4)
def test_redistribution_to_another_shape() -> None:
    mesh = mesh_of(2, 2)
    full, weight = noise(4, 6), noise(8, 3, seed=7)
    for src, dst in itertools.product(layouts(mesh, 2), repeat=2):
        x = lay(full.clone().requires_grad_(), src)
        y = x.redistribute(layout=dst, shape=(8, -1))
        assert y.layout is dst
        torch.testing.assert_close(y.detach().full_tensor(), full.view(8, 3), atol=1e-5, rtol=1e-5)
        (y * distribute_tensor(weight, mesh)).sum().backward()
        torch.testing.assert_close(x.grad.full_tensor(), weight.view(4, 6), atol=1e-5, rtol=1e-5)
    z = lay(full, mesh.layout("a", None)).redistribute(placements=[Shard(0), Replicate()], shape=(24,))
    torch.testing.assert_close(z.full_tensor(), full.view(24))
    with pytest.raises(ShapeError, match=r"view to \(5,\): the tensor has 24 elements"):
        lay(full, mesh.layout("a", None)).redistribute(placements=[Replicate()] * 2, shape=(5,))
    with pytest.raises(LayoutError, match="2 dims, the tensor 1"):
        lay(full, mesh.layout("a", None)).redistribute(layout=mesh.layout("a", None), shape=(24,))


# -- writes through views -----------------------------------------------------------------------------


@distributed(2)
def test_d21_writes_through_a_view_reach_the_base() -> None:
    mesh = mesh_of()
    for layout in layouts(mesh, 2, partial=()):
        x = lay(noise(9, 8), layout)
        plain = noise(9, 8)
        with torch.no_grad():
            for work in (lambda t: t.view(9, 2, 4).mul_(2), lambda t: t.t().add_(1), lambda t: t.unsqueeze(0).neg_()):
                work(plain)
                work(x)
        torch.testing.assert_close(x.full_tensor(), plain)


@distributed(2)
def test_d21_d22_writes_that_would_be_lost_are_refused() -> None:
    mesh = mesh_of()
    x = distribute_tensor(noise(8, 8), mesh, [Shard(0)])
    columns = distribute_tensor(noise(8, 8), mesh, [Shard(1)])
    works: dict[str, Callable[[], Any]] = {
        "select": lambda: x.select(0, 0).zero_(),
        "__getitem__": lambda: x[0].zero_(),
        "narrow": lambda: x.narrow(0, 0, 2).mul_(2),
        "split": lambda: x.split(4)[1].add_(1),
        "unbind": lambda: next(iter(x)).fill_(3),
        "view": lambda: columns.view(-1).mul_(2),
    }
    for name, work in works.items():
        with pytest.raises(
            OperandError, match=f"in place on DTensor .* result of {name}, for which data had to be moved"
        ):
            work()
    more: list[Callable[[], Any]] = [
        lambda: nn.init.zeros_(x[:2]),
        lambda: nn.init.constant_(x[:2], 3.0),
        lambda: x[:2].detach().zero_(),
        lambda: x[:2].data.zero_(),
        lambda: x[:2].t().zero_(),
        lambda: x[:2][1].zero_(),
        lambda: x[:2].view(-1).zero_(),
        lambda: x[:2].copy_(noise(2, 8)),
        lambda: x[:2].__setitem__(slice(None), 1.0),
        lambda: torch.add(x[:2], 1, out=x[:2]),
        lambda: torch.relu_(x[:2]),
        lambda: nn.functional.relu(x[:2], inplace=True),
        lambda: torch._foreach_mul_([x[:2]], 2.0),
        lambda: x[:2].normal_(),
    ]
    for work in more:
        with pytest.raises(OperandError, match=r"Redistribute the base first, or change a clone\(\)"):
            work()
    torch.testing.assert_close(x.full_tensor(), noise(8, 8))
    changed = x[:2].clone().zero_()  # a copy of its own may be changed
    assert changed.full_tensor().abs().sum() == 0
    kept = x[:, :2].mul_(2)  # nothing moved, so the base changes
    torch.testing.assert_close(x.full_tensor()[:, :2], kept.full_tensor())
    torch.testing.assert_close(x.full_tensor()[:, :2], noise(8, 8)[:, :2] * 2)


@distributed(2)
def test_pending_values_pass_through_views() -> None:
    mesh = mesh_of()
    for op in ("sum", "avg", "max"):
        x = lay(noise(4, 6), mesh.layout(None, None, partial={"a": op}))
        with CommCounter() as comm:
            y = x.view(3, 8).flatten()
        assert comm.total == 0
        assert y.layout.placements == (Partial(op),)
        torch.testing.assert_close(y.full_tensor(), noise(4, 6).flatten(), atol=1e-5, rtol=1e-5)


@distributed(1)
def test_wrong_sizes_raise_as_in_torch() -> None:
    x = distribute_tensor(noise(4, 6), mesh_of(), [Shard(0)])
    with pytest.raises(IndexError, match="Dimension out of range"):
        x.flatten(0, 5)
    with pytest.raises(IndexError, match="Dimension out of range"):
        x.squeeze(3)
    with pytest.raises(RuntimeError, match="start_dim cannot come after end_dim"):
        x.flatten(1, 0)
    with pytest.raises(ShapeError, match="24 elements"):
        x.view(5, 5)
    with pytest.raises(TypeError, match="view\\(dtype\\)"):
        x.view(torch.int32)
