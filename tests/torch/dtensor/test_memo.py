# SPDX-License-Identifier: Apache-2.0
"""The node of `x.local(cotangent)` is shared by uses; it must never outlive its truth. All against one device."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from hyper_parallel import DTensor, distribute_tensor
from hyper_parallel.core.errors import OperandError
from hyper_parallel.testing import CommCounter, distributed
from tests.torch.dtensor.support import close, error_of, lay, mesh_of, noise, whole


class Pair:
    """The same tensors plain and distributed: an activation x whole on all ranks, weights split by rows."""

    def __init__(self, rows: int = 5, is_made: bool = False) -> None:
        mesh = mesh_of()
        self.mesh = mesh
        self.plain = {
            "x": noise(3, 4, dtype=torch.float64).requires_grad_(),
            "w": noise(rows, 4, seed=1, dtype=torch.float64).requires_grad_(),
            "v": noise(rows, 4, seed=2, dtype=torch.float64).requires_grad_(),
        }
        x_layout = mesh.layout("a", None) if is_made else mesh.layout(None, None)
        self.laid = {n: lay(t, x_layout if n == "x" else mesh.layout("a", None)) for n, t in self.plain.items()}
        self.is_made = is_made

    def run(self, function: Callable[[dict[str, Any]], Any]) -> None:
        """`function(tensors)` on both; what it returns, and all gradients, must agree."""
        mine, theirs = function(self.tensors()), function(self.plain)
        if theirs is not None:
            flat = lambda out: out if isinstance(out, (list, tuple)) else [out]  # noqa: E731
            for a, b in zip(flat(mine), flat(theirs), strict=True):
                close(whole(a), b.detach())
        self.same_gradients()

    def tensors(self) -> dict[str, Any]:
        """x comes out of a redistribute if `is_made`: its node is then built on the source."""
        if not self.is_made:
            return self.laid
        return {**self.laid, "x": self.laid["x"].redistribute(layout=self.mesh.layout(None, None))}

    def same_gradients(self) -> None:
        for name, tensor in self.plain.items():
            mine = self.laid[name].grad
            assert (mine is None) == (tensor.grad is None), name
            if mine is not None:
                close(whole(mine), tensor.grad)


def loss(t: dict[str, Any]) -> Any:
    return F.linear(t["x"], t["w"]).sin().sum() + (F.linear(t["x"], t["v"]) ** 2).sum()


MADE = pytest.mark.parametrize("is_made", [False, True], ids=["leaf", "made"])


@MADE
@distributed(world_size=2)
def test_no_grad_then_grad(is_made: bool) -> None:
    def function(t: dict[str, Any]) -> Any:
        with torch.no_grad():
            first = loss(t)
            assert not first.requires_grad
        out = loss(t)
        out.backward()
        return [first, out]

    Pair(is_made=is_made).run(function)


@MADE
@distributed(world_size=2)
def test_grad_then_no_grad(is_made: bool) -> None:
    def function(t: dict[str, Any]) -> Any:
        out = loss(t)
        with torch.no_grad():
            assert not loss(t).requires_grad
            assert not F.linear(t["x"], t["w"]).requires_grad
        out.backward()
        return out

    Pair(is_made=is_made).run(function)


@MADE
@distributed(world_size=2)
def test_inference_mode_then_grad(is_made: bool) -> None:
    def function(t: dict[str, Any]) -> Any:
        with torch.inference_mode():
            first = float(loss(t))
        out = loss(t)
        out.backward()
        return [torch.tensor(first, dtype=torch.float64), out]

    Pair(is_made=is_made).run(function)


@distributed(world_size=2)
def test_a_tensor_made_under_inference_mode_cannot_be_trained() -> None:
    mesh = mesh_of()
    with torch.inference_mode():
        x = distribute_tensor(noise(3, 4), mesh)
        w = distribute_tensor(noise(5, 4), mesh, mesh.layout("a", None))
        y = F.linear(x, w)
    assert y.is_inference()
    close(whole(y), F.linear(noise(3, 4), noise(5, 4)))
    weight = lay(noise(4, 4).requires_grad_(), mesh.layout("a", None))
    with pytest.raises(RuntimeError, match=r"[Ii]nference tensors"):
        F.linear(x, weight)


@MADE
@distributed(world_size=2)
def test_in_place_between_uses(is_made: bool) -> None:
    def function(t: dict[str, Any]) -> Any:
        # Weights that need no gradient here, so that nothing saves the x that is about to change.
        x = t["x"] * 1
        first = F.linear(x, t["w"].detach()).sum()
        x.mul_(2)
        second = F.linear(x, t["w"].detach()).sum()
        x[:, 1:3] = 0.5
        third = F.linear(x, t["v"]).sum()
        (first + second + third).backward()
        return [first, second, third]

    Pair(is_made=is_made).run(function)


@distributed(world_size=2)
def test_in_place_on_the_result_of_a_redistribute() -> None:
    pair = Pair(is_made=True)

    def function(t: dict[str, Any]) -> Any:
        x = t["x"].redistribute(layout=pair.mesh.layout(None, None)) if isinstance(t["x"], DTensor) else t["x"] * 1
        first = (x * 3).sum()
        x.mul_(2)
        second = F.linear(x, t["w"]).sum()
        (first + second).backward()
        return [first, second]

    assert pair.laid["x"].layout == pair.mesh.layout("a", None)
    mine, theirs = function(pair.laid), function(pair.plain)
    for a, b in zip(mine, theirs, strict=True):
        close(whole(a), b.detach())
    pair.same_gradients()


@distributed(world_size=2)
def test_in_place_under_no_grad_between_uses_of_a_leaf() -> None:
    def function(t: dict[str, Any]) -> Any:
        first = loss(t)
        first.backward()
        with torch.no_grad():
            t["w"].add_(1)
            t["v"].copy_(t["w"] * 2)
        second = loss(t)
        second.backward()
        return [first, second]

    Pair().run(function)


@distributed(world_size=2)
def test_a_leaf_changed_after_its_use_makes_backward_fail_as_in_torch() -> None:
    def function(t: dict[str, Any]) -> None:
        out = F.linear(t["x"], t["w"]).sum()
        with torch.no_grad():
            t["w"].add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.backward()

    pair = Pair()
    function(pair.plain)
    function(pair.laid)


@MADE
@distributed(world_size=2)
def test_several_forwards_before_one_backward(is_made: bool) -> None:
    def function(t: dict[str, Any]) -> Any:
        outs = [loss(t), loss({**t, "w": t["v"]}), loss(t)]
        sum(outs).backward()
        return outs

    Pair(is_made=is_made).run(function)


@distributed(world_size=2)
def test_several_forwards_and_backwards_in_another_order() -> None:
    def function(t: dict[str, Any]) -> Any:
        first, second, third = loss(t), loss(t), loss(t)
        second.backward()
        first.backward()
        fourth = loss(t)
        third.backward()
        fourth.backward()
        return [first, fourth]

    Pair().run(function)


@MADE
@distributed(world_size=2)
def test_retain_graph_twice(is_made: bool) -> None:
    def function(t: dict[str, Any]) -> Any:
        out = loss(t)
        out.backward(retain_graph=True)
        out.backward(retain_graph=True)
        out.backward()
        with pytest.raises(RuntimeError, match="second time"):
            out.backward()
        return out

    Pair(is_made=is_made).run(function)


@MADE
@distributed(world_size=2)
def test_hooks_on_intermediate_tensors(is_made: bool) -> None:
    def function(t: dict[str, Any]) -> Any:
        seen = []

        def double(grad: Any) -> Any:
            seen.append(grad.clone())
            return grad * 2

        x = t["x"] * 1 if not is_made or not isinstance(t["x"], DTensor) else t["x"]
        x.register_hook(double)
        h = F.linear(x, t["w"])
        h.register_hook(lambda grad: seen.append(grad.clone()))
        y = F.linear(x, t["v"])
        out = h.sin().sum() + (y * y).sum()
        out.backward()
        assert len(seen) == 2
        return [out, *seen]

    Pair(is_made=is_made).run(function)


@distributed(world_size=2)
def test_a_hook_sees_the_finished_gradient_once_though_the_tensor_is_used_thrice() -> None:
    pair = Pair()
    x = pair.laid["x"] * 1
    seen: list[Any] = []
    x.register_hook(seen.append)
    (loss({**pair.laid, "x": x}) + x.sum()).backward()
    assert [g.layout for g in seen] == [pair.mesh.layout(None, None)]


@distributed(world_size=2)
def test_a_hook_does_not_keep_its_tensor_alive() -> None:
    pair = Pair()
    pair.laid["x"].register_hook(lambda grad: None)
    loss(pair.laid).backward()
    gone = weakref.ref(pair.laid["x"])
    del pair
    gc.collect()
    assert gone() is None


@distributed(world_size=2)
def test_a_hook_too_late_is_refused() -> None:
    pair = Pair(is_made=True)
    x = pair.tensors()["x"]
    loss({**pair.laid, "x": x})
    text = error_of(lambda: x.register_hook(lambda grad: None), OperandError)
    assert "register_hook of DTensor (3, 4)" in text
    assert "Call register_hook before the first use" in text
    assert "retain_grad" in error_of(x.retain_grad, OperandError)


@MADE
@distributed(world_size=2)
def test_retain_grad_and_autograd_grad_of_intermediate_tensors(is_made: bool) -> None:
    def function(t: dict[str, Any]) -> Any:
        x = t["x"] * 1 if not is_made or not isinstance(t["x"], DTensor) else t["x"]
        h = F.linear(x, t["w"])
        h.retain_grad()
        out = h.sin().sum() + F.linear(x, t["v"]).cos().sum() + (x * x).sum()
        grads = torch.autograd.grad(out, [x, h, t["w"]], retain_graph=True)
        out.backward()
        return [out, h.grad, *grads]

    Pair(is_made=is_made).run(function)


@distributed(world_size=2)
def test_autograd_grad_of_a_tensor_that_a_redistribute_passed_by() -> None:
    pair = Pair(is_made=True)
    x = pair.tensors()["x"]
    out = x.redistribute(layout=pair.mesh.layout(None, "a")).sum()
    text = error_of(lambda: torch.autograd.grad(out, x), OperandError)
    assert "Ask for the gradient of the first one's input" in text
    (grad,) = torch.autograd.grad(out, pair.laid["x"])
    close(whole(grad), torch.ones(3, 4, dtype=torch.float64))


@distributed(world_size=2)
def test_autograd_grad_of_an_unused_tensor() -> None:
    def function(t: dict[str, Any]) -> None:
        out = t["w"].sum()
        with pytest.raises(RuntimeError, match="not have been used"):
            torch.autograd.grad(out, [t["x"]], retain_graph=True)
        assert torch.autograd.grad(out, [t["x"]], allow_unused=True) == (None,)

    for t in (Pair().plain, Pair().laid, Pair(is_made=True).tensors()):
        function(t)


# -- double backward ------------------------------------------------------------------------------


def gradient_penalty(t: dict[str, Any], inputs: tuple[str, ...], function: Callable[[dict[str, Any]], Any]) -> Any:
    grads = torch.autograd.grad(function(t), [t[n] for n in inputs], create_graph=True)
    total = sum((g * g * g).sum() for g in grads)
    total.backward()
    return [total, *grads]


@MADE
@pytest.mark.parametrize("inputs", [("x",), ("w", "v"), ("x", "w", "v")], ids="".join)
@distributed(world_size=2)
def test_double_backward(inputs: tuple[str, ...], is_made: bool) -> None:
    Pair(is_made=is_made).run(lambda t: gradient_penalty(t, inputs, lambda t: loss(t) ** 2))


@MADE
@distributed(world_size=2)
def test_double_backward_through_row_after_column_parallel(is_made: bool) -> None:
    """The pending sum in the middle: its gradient is whole, and that gradient's gradient is pending again."""

    def function(t: dict[str, Any]) -> Any:
        h = F.linear(t["x"], t["w"]).sin()
        y = F.linear(h, t["v"].t())
        return (y**3).sum()

    Pair(is_made=is_made).run(lambda t: gradient_penalty(t, ("x", "w", "v"), function))


@distributed(world_size=2)
def test_double_backward_through_a_mean_and_an_extreme() -> None:
    def function(t: dict[str, Any]) -> Any:
        return F.linear(t["x"], t["w"]).mean(1).pow(3).sum() + (t["v"] ** 3).amax(0).pow(2).sum()

    Pair(rows=5).run(lambda t: gradient_penalty(t, ("x", "w", "v"), function))


@distributed(world_size=2)
def test_double_backward_through_split_cross_entropy() -> None:
    target = torch.tensor([0, 4, 2])

    def function(t: dict[str, Any]) -> Any:
        logits = F.linear(t["x"], t["w"])
        ids = distribute_tensor(target, t["x"].device_mesh) if isinstance(t["x"], DTensor) else target
        return F.cross_entropy(logits, ids) + F.cross_entropy(logits, ids, label_smoothing=0.1, reduction="sum")

    Pair(rows=5).run(lambda t: gradient_penalty(t, ("x", "w"), function))


@distributed(world_size=2)
def test_third_derivative() -> None:
    def function(t: dict[str, Any]) -> Any:
        out = (F.linear(t["x"], t["w"]).sin() ** 2).sum()
        (first,) = torch.autograd.grad(out, [t["x"]], create_graph=True)
        (second,) = torch.autograd.grad((first**2).sum(), [t["w"]], create_graph=True)
        (second**2).sum().backward()
        return [first, second]

    Pair().run(function)


@distributed(world_size=2)
def test_backward_with_create_graph() -> None:
    def function(t: dict[str, Any]) -> Any:
        with warnings.catch_warnings():
            # torch warns of the cycle between a parameter and its gradient.
            warnings.simplefilter("ignore")
            loss(t).backward(create_graph=True)
        gradient = t["x"].grad
        t["x"].grad = None
        (gradient**2).sum().backward()
        for x in t.values():
            x.grad = x.grad.detach()  # or torch's cycle keeps them for good
        return gradient.detach()

    Pair().run(function)


# -- activation checkpointing ---------------------------------------------------------------------


@MADE
@distributed(world_size=2)
def test_checkpoint(is_made: bool) -> None:
    def part(x: Any, w: Any, v: Any) -> Any:
        return F.linear(F.linear(x, w).sin(), v.t())

    def function(t: dict[str, Any]) -> Any:
        first = checkpoint(part, t["x"], t["w"], t["v"], use_reentrant=False)
        second = checkpoint(part, t["x"], t["v"], t["w"], use_reentrant=False)
        out = (first * second).sum() + loss(t)
        out.backward()
        return out

    Pair(is_made=is_made).run(function)


@distributed(world_size=2)
def test_checkpoint_recomputes_with_the_collectives_of_its_own_only() -> None:
    pair = Pair()

    def part(x: Any, w: Any, v: Any) -> Any:
        return F.linear(F.linear(x, w).sin(), v.t())

    t = pair.laid
    y = checkpoint(part, t["x"], t["w"], t["v"], use_reentrant=False)
    with CommCounter() as comm:
        y.redistribute(layout=pair.mesh.layout(None, None)).sum().backward()
    # One for the sum that was pending, one for the gradient of x.
    assert comm.counts == {"all_reduce": 2}


@distributed(world_size=2)
def test_reentrant_checkpoint_of_plain_tensors_around_dtensors() -> None:
    pair = Pair()
    x = noise(3, 4, dtype=torch.float64).requires_grad_()

    def part(x: torch.Tensor) -> torch.Tensor:
        replicated = DTensor.from_local(x, pair.mesh)
        y = F.linear(F.linear(replicated, pair.laid["w"]).sin(), pair.laid["v"].t())
        return y.full_tensor()

    def expected(x: torch.Tensor) -> torch.Tensor:
        return F.linear(F.linear(x, pair.plain["w"]).sin(), pair.plain["v"].t())

    for _ in range(2):
        out = checkpoint(part, x, use_reentrant=True)
        (out * out).sum().backward()
        y = expected(pair.plain["x"])
        (y * y).sum().backward()
    close(out, y)
    close(x.grad, pair.plain["x"].grad)
    pair.plain["x"].grad = None
    pair.same_gradients()


@distributed(world_size=2)
def test_reentrant_checkpoint_of_a_dtensor_is_refused() -> None:
    """It is an autograd.Function, which cannot see the graph inside; without the refusal gradients would be lost."""
    pair = Pair()
    out = checkpoint(lambda x: F.linear(x, pair.laid["w"]), pair.laid["x"], use_reentrant=True)
    text = error_of(lambda: out.sum(), OperandError)
    assert "use_reentrant=False" in text
    assert "local_map" in text


# -- over steps -----------------------------------------------------------------------------------


@pytest.mark.parametrize("foreach", [False, True])
@distributed(world_size=2)
def test_leaves_reused_over_steps(foreach: bool) -> None:
    def function(t: dict[str, Any]) -> Any:
        optimizer = torch.optim.AdamW(list(t.values()), lr=0.1, foreach=foreach)
        losses = []
        for _ in range(4):
            optimizer.zero_grad()
            out = loss(t)
            out.backward()
            losses.append(out)
            optimizer.step()
        return [*losses, *t.values()]

    Pair().run(function)


@distributed(world_size=2)
def test_a_parameter_replaced_through_data() -> None:
    def function(t: dict[str, Any]) -> Any:
        first = loss(t)
        first.backward()
        t["x"].data = t["x"].data * 2
        second = loss(t)
        second.backward()
        return [first, second]

    Pair().run(function)


@distributed(world_size=2)
def test_requires_grad_switched_between_uses() -> None:
    def function(t: dict[str, Any]) -> Any:
        t["x"].requires_grad_(False)
        first = loss(t)
        first.backward()
        assert t["x"].grad is None
        t["x"].requires_grad_(True)
        second = loss(t)
        second.backward()
        return [first, second]

    Pair().run(function)


@MADE
@distributed(world_size=2)
def test_the_memo_keeps_no_graph_alive(is_made: bool) -> None:
    """The last use of a leaf's node must not hold what the forward saved."""
    pair = Pair(is_made=is_made)
    t = pair.tensors()
    h = F.linear(t["x"], t["w"])
    saved = weakref.ref(h._local)
    h.sin().sum().backward()
    del h
    gc.collect()
    assert saved() is None
