# SPDX-License-Identifier: Apache-2.0
"""Optimizers, clipping and loss scaling over parameters of mixed layouts, against one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm

from hyper_parallel import DTensor, Layout, distribute_tensor
from hyper_parallel.core.errors import LayoutError
from hyper_parallel.testing import CommCounter, distributed
from tests.torch.dtensor.support import close, error_of, lay, mesh_of, noise, whole

SHAPES = {
    "split": (5, 3),
    "columns": (4, 6),
    "whole": (3,),
    "one row": (1, 4),
    "both": (4, 6),
    "number": (),
    "ragged": (5, 2),
}


def layouts(mesh: Any) -> dict[str, Layout]:
    first, rest = mesh.axis_names[0], mesh.axis_names[1:] or mesh.axis_names
    last = rest[-1]
    both = (first, last) if first != last else first
    sizes = (4, 1, *(0,) * (mesh.size(first) - 2)) if mesh.size(first) > 1 else (5,)
    ragged = mesh.layout(None, None).with_dim(0, first, {first: sizes})
    return {
        "split": mesh.layout(first, None),
        "columns": mesh.layout(None, last),
        "whole": mesh.layout(None),
        "one row": mesh.layout(last, None),
        "both": mesh.layout(both, None),
        "number": mesh.layout(),
        "ragged": ragged,
    }


class Model:
    """Parameters of every layout, with the gradients of one process in the same layouts."""

    def __init__(self, mesh: Any | None, dtype: torch.dtype = torch.float64) -> None:
        self.parameters: dict[str, nn.Parameter] = {}
        self.mesh = mesh
        for name, shape in SHAPES.items():
            full = noise(*shape, seed=len(name), dtype=dtype)
            if mesh is not None:
                full = distribute_tensor(full, mesh, layouts(mesh)[name])
            self.parameters[name] = nn.Parameter(full)

    def set_gradients(self, step: int, scale: float = 1.0) -> None:
        for name, parameter in self.parameters.items():
            full = noise(*SHAPES[name], seed=100 * step + len(name), dtype=parameter.dtype) * scale
            if self.mesh is not None:
                # Through autograd, so that a replicated parameter's gradient is one that autograd made.
                full = distribute_tensor(full, self.mesh, parameter.layout)
            (parameter * full).sum().backward()

    def same(self, other: Model) -> None:
        """Parameters and gradients equal those of a plain model."""
        for name, theirs in other.parameters.items():
            mine = self.parameters[name]
            assert isinstance(mine, DTensor)
            assert mine.layout == layouts(self.mesh)[name]
            close(whole(mine), theirs.detach(), 1e-12 if theirs.dtype == torch.float64 else 1e-5)
            if theirs.grad is not None:
                close(whole(mine.grad), theirs.grad, 1e-12 if theirs.dtype == torch.float64 else 1e-5)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p, **o: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True, **o),
    "adam": lambda p, **o: torch.optim.Adam(p, lr=0.1, weight_decay=0.01, amsgrad=True, **o),
    "adamw": lambda p, **o: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1, **o),
    "adagrad": lambda p, **o: torch.optim.Adagrad(p, lr=0.1, **o),
    "rmsprop": lambda p, **o: torch.optim.RMSprop(p, lr=0.1, momentum=0.5, centered=True, **o),
}
WAYS = {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
FUSED = ("sgd", "adam", "adamw", "adagrad")
CASES = [(name, way) for name in OPTIMIZERS for way in WAYS if way != "fused" or name in FUSED]


def train(model: Model, name: str, way: str) -> torch.optim.Optimizer:
    optimizer = OPTIMIZERS[name](list(model.parameters.values()), **WAYS[way])
    for step in range(3):
        for key, parameter in model.parameters.items():
            full = noise(*SHAPES[key], seed=100 * step + len(key), dtype=parameter.dtype)
            parameter.grad = full if model.mesh is None else lay(full, parameter.layout)
        optimizer.step()
    return optimizer


def check_optimizer(mesh: Any, name: str, way: str) -> None:
    expected, actual = Model(None), Model(mesh)
    theirs = train(expected, name, way)
    with CommCounter() as comm:
        optimizer = train(actual, name, way)
    assert comm.total == 0
    actual.same(expected)
    for parameter, other in zip(actual.parameters.values(), expected.parameters.values(), strict=True):
        for key, value in theirs.state[other].items():
            if isinstance(value, torch.Tensor):
                mine = optimizer.state[parameter][key]
                close(whole(mine), value, 1e-12)
                assert value.dim() == 0 or mine.layout == parameter.layout, key


@pytest.mark.parametrize(("name", "way"), CASES)
@distributed(world_size=2)
def test_optimizer_on_two_ranks(name: str, way: str) -> None:
    check_optimizer(mesh_of(), name, way)


@pytest.mark.parametrize(("name", "way"), [("adamw", way) for way in WAYS] + [("sgd", "foreach")])
@distributed(world_size=4)
def test_optimizer_on_a_2d_mesh(name: str, way: str) -> None:
    check_optimizer(mesh_of(2, 2), name, way)


@pytest.mark.parametrize("way", WAYS)
@distributed(world_size=3)
def test_optimizer_with_empty_shards(way: str) -> None:
    check_optimizer(mesh_of(), "adamw", way)


@pytest.mark.parametrize("way", WAYS)
@distributed(world_size=1)
def test_optimizer_on_one_rank(way: str) -> None:
    check_optimizer(mesh_of(), "adamw", way)


@distributed(world_size=2)
def test_foreach_is_what_torch_takes_by_default_on_every_rank() -> None:
    """Decided by type when the package is imported: ranks that decided differently would wait for each other."""
    from torch.optim.optimizer import _default_to_fused_or_foreach
    from torch.utils._foreach_utils import _foreach_supported_types

    model = Model(mesh_of())
    assert type(next(iter(model.parameters.values()))) in _foreach_supported_types
    # On CPU torch prefers the loop; the point is that nothing refuses.
    assert _default_to_fused_or_foreach(list(model.parameters.values()), False, False) == (False, False)


@pytest.mark.parametrize("foreach", [None, False, True])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0, float("inf")])
@distributed(world_size=2)
def test_clipping_by_norm(norm_type: float, foreach: bool | None) -> None:
    expected, actual = Model(None), Model(mesh_of())
    for max_norm in (0.5, 1e6):
        for model in (expected, actual):
            model.set_gradients(1)
        theirs = clip_grad_norm_(expected.parameters.values(), max_norm, norm_type, foreach=foreach)
        mine = clip_grad_norm_(actual.parameters.values(), max_norm, norm_type, foreach=foreach)
        close(whole(mine), theirs, 1e-12)
        actual.same(expected)


@pytest.mark.parametrize("foreach", [False, True])
@distributed(world_size=4)
def test_clipping_by_norm_on_a_2d_mesh(foreach: bool) -> None:
    expected, actual = Model(None), Model(mesh_of(2, 2))
    for model in (expected, actual):
        model.set_gradients(1)
    close(
        whole(clip_grad_norm_(actual.parameters.values(), 0.5, foreach=foreach)),
        clip_grad_norm_(expected.parameters.values(), 0.5),
        1e-12,
    )
    actual.same(expected)


@distributed(world_size=2)
def test_clipping_communicates_one_vector_however_many_parameters() -> None:
    mesh = mesh_of()
    parameters = [nn.Parameter(distribute_tensor(noise(4, 3, seed=i), mesh, mesh.layout("a", None))) for i in range(20)]
    for parameter in parameters:
        parameter.grad = distribute_tensor(noise(4, 3), mesh, mesh.layout("a", None))
    with CommCounter() as comm:
        clip_grad_norm_(parameters, 1.0, foreach=True)
    assert comm.counts == {"all_reduce": 1}
    assert comm.numel["all_reduce"] == 20


@distributed(world_size=3)
def test_clipping_with_empty_shards_and_other_clippings() -> None:
    mesh = mesh_of()
    expected, actual = Model(None), Model(mesh)
    for model in (expected, actual):
        model.set_gradients(2)
    close(
        whole(get_total_norm([p.grad for p in actual.parameters.values()], float("inf"))),
        get_total_norm([p.grad for p in expected.parameters.values()], float("inf")),
    )
    for foreach in (False, True):
        for model in (expected, actual):
            clip_grad_value_(model.parameters.values(), 0.3, foreach=foreach)
        actual.same(expected)


@distributed(world_size=2)
def test_a_gradient_that_is_not_finite_raises_on_all_ranks() -> None:
    actual = Model(mesh_of())
    actual.set_gradients(1)
    if torch.distributed.get_rank() == 1:
        actual.parameters["split"].grad._local[0] = float("inf")
    text = error_of(lambda: clip_grad_norm_(actual.parameters.values(), 1.0, error_if_nonfinite=True), RuntimeError)
    assert "non-finite" in text


@pytest.mark.parametrize("foreach", [False, True])
@distributed(world_size=2)
def test_loss_scaling(foreach: bool) -> None:
    """What a gradient scaler does: unscale, look for overflow on any rank, skip or step."""
    expected, actual = Model(None), Model(mesh_of())
    optimizers = [torch.optim.SGD(m.parameters.values(), lr=0.1, foreach=foreach) for m in (expected, actual)]
    for step, overflows in enumerate((False, True, False)):
        for model, optimizer in zip((expected, actual), optimizers, strict=True):
            optimizer.zero_grad()
            model.set_gradients(step, scale=1024.0)
            gradients = [p.grad for p in model.parameters.values()]
            torch._foreach_div_(gradients, 1024.0) if foreach else [g.div_(1024.0) for g in gradients]
            if overflows:
                _overflow(model)
            finite = bool(torch.stack([torch.isfinite(g).all() for g in gradients]).all())
            assert finite is not overflows
            if finite:
                optimizer.step()
        for a, b in zip(actual.parameters.values(), expected.parameters.values(), strict=True):
            close(whole(a), b.detach(), 1e-12)


@distributed(world_size=2)
def test_gradient_scaler_of_torch() -> None:
    """The real one: its unscale step is one fused call over all gradients, its flag must be alike on all ranks."""
    expected, actual = Model(None, torch.float32), Model(mesh_of(), torch.float32)
    scalers = [torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=1) for _ in range(2)]
    optimizers = [torch.optim.SGD(m.parameters.values(), lr=0.1) for m in (expected, actual)]
    for step in range(3):
        for model, scaler, optimizer in zip((expected, actual), scalers, optimizers, strict=True):
            optimizer.zero_grad()
            scaler.scale(torch.ones(()))
            model.set_gradients(step, scale=scaler.get_scale())
            if step == 1:
                _overflow(model)
            scaler.step(optimizer)
            scaler.update()
        assert [s.get_scale() for s in scalers] == [(128.0, 64.0, 128.0)[step]] * 2
        for a, b in zip(actual.parameters.values(), expected.parameters.values(), strict=True):
            close(whole(a), b.detach())


def _overflow(model: Model) -> None:
    """Puts an infinity into the last row of "split", which the last rank owns."""
    gradient = model.parameters["split"].grad
    if not isinstance(gradient, DTensor):
        gradient[-1, 0] = float("inf")
    elif torch.distributed.get_rank() == 1:
        gradient._local[-1, 0] = float("inf")


@distributed(world_size=2)
def test_foreach_over_lists_of_several_layouts_and_meshes() -> None:
    mesh, other = mesh_of(), mesh_of(2, 1)
    full = [noise(4, 3), noise(3, seed=1), noise(5, 2, seed=2)]
    mine = [
        distribute_tensor(full[0], mesh, mesh.layout("a", None)),
        distribute_tensor(full[1], mesh),
        distribute_tensor(full[2], other, other.layout("a", "b")),
    ]
    partners = [
        distribute_tensor(full[0], mesh, mesh.layout(None, "a")),
        distribute_tensor(full[1], mesh, mesh.layout("a")),
        distribute_tensor(full[2], other),
    ]
    for function in (torch._foreach_add, torch._foreach_mul, torch._foreach_maximum):
        for a, b in zip(function(mine, partners), function(full, full), strict=True):
            close(whole(a), b)
    for a, b in zip(torch._foreach_pow(2.0, mine), torch._foreach_pow(2.0, full), strict=True):
        close(whole(a), b)
    torch._foreach_mul_(mine, [2.0, 3.0, 4.0])
    torch._foreach_addcmul_(mine, partners, partners, value=0.5)
    torch._foreach_mul_(full, [2.0, 3.0, 4.0])
    plain = [noise(4, 3), noise(3, seed=1), noise(5, 2, seed=2)]
    torch._foreach_addcmul_(full, plain, plain, value=0.5)
    for a, b in zip(mine, full, strict=True):
        close(whole(a), b)


@distributed(world_size=2)
def test_foreach_finishes_pending_sums_or_refuses_to_change_them() -> None:
    mesh = mesh_of()
    full = noise(4, 3)
    pending = lay(full, mesh.layout(None, None, partial={"a": "sum"}))
    for out, expected in zip(torch._foreach_exp([pending]), torch._foreach_exp([full]), strict=True):
        close(whole(out), expected)
    close(whole(torch._foreach_norm([pending])[0]), full.norm())
    before = pending._local.clone()
    text = error_of(lambda: torch._foreach_mul_([pending], 2.0), LayoutError)
    assert "pending" in text
    assert "Redistribute it first" in text
    assert torch.equal(pending._local, before)


@pytest.mark.parametrize("is_lead_plain", [False, True])
@distributed(world_size=2)
def test_foreach_refuses_plain_partners(is_lead_plain: bool) -> None:
    mesh = mesh_of()
    lists = [[distribute_tensor(noise(4, 3), mesh, mesh.layout("a", None))], [noise(4, 3)]]
    before = lists[0][0]._local.clone()
    text = error_of(lambda: torch._foreach_add_(*(reversed(lists) if is_lead_plain else lists)), LayoutError)
    assert "_foreach_add_" in text
    assert "distribute_tensor" in text
    assert torch.equal(lists[0][0]._local, before)


@pytest.mark.parametrize("way", WAYS)
@distributed(world_size=2)
def test_optimizer_after_a_change_of_dtype(way: str) -> None:
    """`module.double()` changes parameters in place, their gradients then have the new dtype."""
    mesh = mesh_of()
    models = []
    for is_plain in (True, False):
        module = nn.Linear(3, 5)
        with torch.no_grad():
            for name, parameter in list(module.named_parameters()):
                full = noise(*parameter.shape, seed=len(name))
                layout = mesh.layout("a", *(None for _ in parameter.shape[1:]))
                setattr(module, name, nn.Parameter(full if is_plain else distribute_tensor(full, mesh, layout)))
        parameters = list(module.parameters())
        module.double()
        assert all(a is b for a, b in zip(module.parameters(), parameters, strict=True))
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, **WAYS[way])
        x = noise(2, 3, dtype=torch.float64)
        for _ in range(2):
            module(x if is_plain else distribute_tensor(x, mesh)).pow(2).sum().backward()
            optimizer.step()
        models.append(module)
    for a, b in zip(models[1].parameters(), models[0].parameters(), strict=True):
        assert a.dtype == b.dtype == torch.float64
        close(whole(a), b.detach(), 1e-12)
