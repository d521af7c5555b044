# SPDX-License-Identifier: Apache-2.0
"""Gradients have layouts: one process's numbers, with no collective more than the algebra asks for.

Shapes: B batch, T sequence, D width, F hidden width, H heads, K key heads, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hyper_parallel import (
    DTensor,
    Layout,
    ShardingPlan,
    Style,
    column_parallel,
    distribute_tensor,
    row_parallel,
    sequence_parallel,
    shard_module,
    vocabulary_parallel,
)
from hyper_parallel.testing import CommCounter, distributed
from tests.torch.dtensor.support import close, lay, mesh_of, noise, whole
from tests.torch.models import TinyGpt, batch, make_gpt


def leaf(full: torch.Tensor, layout: Layout) -> Any:
    return lay(full.requires_grad_(), layout)


def plain(*shape: int, seed: int = 0) -> torch.Tensor:
    """Float64, so that only rounding of 1e-15 separates different orders of summation."""
    return noise(*shape, seed=seed, dtype=torch.float64).requires_grad_()


def same_gradients(mine: dict[str, Any], theirs: dict[str, torch.Tensor], tolerance: float = 1e-5) -> None:
    """All gradients equal; names what differs."""
    assert mine.keys() == theirs.keys()
    for name, tensor in theirs.items():
        grad = mine[name].grad
        assert grad is not None, name
        assert tensor.grad is not None, name
        try:
            close(whole(grad), tensor.grad, tolerance)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None


# -- single rules ---------------------------------------------------------------------------------


def three_columns(mesh: Any, width: int, hidden: int) -> CommCounter:
    """Checks three column-parallel linears on one replicated activation; returns the backward's collectives."""
    tensors = {"x": plain(2, 5, width), **{n: plain(hidden, width, seed=ord(n)) for n in "qkv"}}
    replicate = mesh.layout(None, None, None)
    laid = {n: leaf(t, replicate if n == "x" else mesh.layout(mesh.axis_names, None)) for n, t in tensors.items()}
    expected = sum(F.linear(tensors["x"], tensors[n]).sin().sum() for n in "qkv")
    expected.backward()
    with CommCounter() as forward:
        loss = sum(F.linear(laid["x"], laid[n]).sin().sum() for n in "qkv")
    assert forward.total == 0
    close(whole(loss), expected.detach())
    with CommCounter() as backward:
        loss.backward()
    same_gradients(laid, tensors)
    return backward


@pytest.mark.parametrize("hidden", [12, 7, 2])
@distributed(world_size=3)
def test_three_column_parallel_linears_share_one_all_reduce(hidden: int) -> None:
    backward = three_columns(mesh_of(), 6, hidden)
    assert backward.counts == {"all_reduce": 1}
    assert backward.numel["all_reduce"] == 2 * 5 * 6


@distributed(world_size=4)
def test_three_column_parallel_linears_on_two_axes_share_one_all_reduce() -> None:
    assert three_columns(mesh_of(2, 2), 6, 10).counts == {"all_reduce": 1}


@distributed(world_size=1)
def test_three_column_parallel_linears_on_one_rank() -> None:
    three_columns(mesh_of(), 6, 7)


@distributed(world_size=2)
def test_a_replicated_activation_in_whole_work_needs_no_collective() -> None:
    mesh = mesh_of()
    x, w = plain(3, 4), plain(5, 4)
    xd, wd = leaf(x, mesh.layout(None, None)), leaf(w, mesh.layout(None, None))
    F.linear(x, w).pow(2).sum().backward()
    with CommCounter() as comm:
        F.linear(xd, wd).pow(2).sum().backward()
    assert comm.total == 0
    same_gradients({"x": xd, "w": wd}, {"x": x, "w": w})


@distributed(world_size=2)
def test_an_activation_in_split_and_whole_work_is_reduced_once() -> None:
    """The two uses have gradients of different layouts: one pending, one whole. Only the pending one moves."""
    mesh = mesh_of()
    x, w, v = plain(3, 4), plain(5, 4), plain(2, 4)
    xd, wd, vd = (
        leaf(t, layout)
        for t, layout in ((x, mesh.layout(None, None)), (w, mesh.layout("a", None)), (v, mesh.layout(None, None)))
    )
    (F.linear(x, w).cos().sum() + F.linear(x, v).sin().sum() + (x * x).sum()).backward()
    with CommCounter() as comm:
        loss = F.linear(xd, wd).cos().sum() + F.linear(xd, vd).sin().sum() + (xd * xd).sum()
    forward = comm.total
    with CommCounter() as comm:
        loss.backward()
    assert (forward, comm.counts) == (0, {"all_reduce": 1})
    same_gradients({"x": xd, "w": wd, "v": vd}, {"x": x, "w": w, "v": v})


@pytest.mark.parametrize("hidden", [8, 5])
@distributed(world_size=2)
def test_row_parallel_after_column_parallel(hidden: int) -> None:
    mesh = mesh_of()
    full = {
        "x": plain(2, 3, 6),
        "up": plain(hidden, 6, seed=1),
        "b": plain(hidden, seed=2),
        "down": plain(6, hidden, seed=3),
        "c": plain(6, seed=4),
    }
    layouts = {
        "x": mesh.layout(None, None, None),
        "up": mesh.layout("a", None),
        "b": mesh.layout("a"),
        "down": mesh.layout(None, "a"),
        "c": mesh.layout(None),
    }
    laid = {n: leaf(t, layouts[n]) for n, t in full.items()}

    def run(t: dict[str, Any]) -> Any:
        return F.linear(F.gelu(F.linear(t["x"], t["up"], t["b"])), t["down"], t["c"])

    y = run(full)
    y.pow(2).sum().backward()
    with CommCounter() as forward:
        yd = run(laid)
        assert forward.total == 0
        assert yd.layout == mesh.layout(None, None, None, partial={"a": "sum"})
        finished = yd.redistribute(layout=mesh.layout(None, None, None))
    assert forward.counts == {"all_reduce": 1}
    close(whole(finished), y.detach())
    with CommCounter() as backward:
        finished.pow(2).sum().backward()
    assert backward.counts == {"all_reduce": 1}
    same_gradients(laid, full)


@pytest.mark.parametrize("length", [6, 5, 2])
@distributed(world_size=3)
def test_sequence_parallelism_transposes_its_collectives(length: int) -> None:
    """All-gather in, reduce-scatter out; in backward each is the other. No all-reduce of an activation."""
    mesh = mesh_of()
    full = {"x": plain(2, length, 6), "up": plain(9, 6, seed=1), "down": plain(6, 9, seed=2)}
    split = mesh.layout(None, "a", None)
    laid = {
        "x": leaf(full["x"], split),
        "up": leaf(full["up"], mesh.layout("a", None)),
        "down": leaf(full["down"], mesh.layout(None, "a")),
    }
    y = F.linear(F.silu(F.linear(full["x"], full["up"])), full["down"])
    y.sin().sum().backward()
    with CommCounter() as forward:
        gathered = laid["x"].redistribute(layout=mesh.layout(None, None, None))
        yd = F.linear(F.silu(F.linear(gathered, laid["up"])), laid["down"]).redistribute(layout=split)
    close(whole(yd), y.detach())
    loss = yd.sin().sum()
    with CommCounter() as backward:
        loss.backward()
    for comm in (forward, backward):
        assert comm.all_reduce == 0
        assert comm.total == 2
        if length % 3 == 0:
            assert comm.counts == {"all_gather": 1, "reduce_scatter": 1}
    same_gradients(laid, full)


@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("length", [6, 1])
@distributed(world_size=2)
def test_norm_weights_under_sequence_parallelism(norm: str, length: int) -> None:
    """Their gradient is a pending sum over the sequence's ranks, reduced once per weight though used twice."""
    mesh = mesh_of()
    full = {"x": plain(2, length, 6), "w": plain(6, seed=1)}
    if norm == "layer_norm":
        full["b"] = plain(6, seed=2)
    laid = {n: leaf(t, mesh.layout(None, "a", None) if n == "x" else mesh.layout(None)) for n, t in full.items()}

    def run(t: dict[str, Any]) -> Any:
        for _ in range(2):
            if norm == "layer_norm":
                y = F.layer_norm(t["x"], (6,), t["w"], t["b"])
            else:
                y = F.rms_norm(t["x"], (6,), t["w"], 1e-6)
            t = {**t, "x": y}
        return (y * y * y).sum()

    run(full).backward()
    with CommCounter() as forward:
        loss = run(laid)
    assert forward.total == 0
    with CommCounter() as backward:
        loss.backward()
    assert backward.counts == {"all_reduce": len(full) - 1}
    for name in full.keys() - {"x"}:
        assert laid[name].grad.layout == mesh.layout(None)
    same_gradients(laid, full)


@pytest.mark.parametrize("table", ["vocabulary", "replicated", "width"])
@pytest.mark.parametrize("vocab", [8, 7, 1])
@distributed(world_size=2)
def test_tied_embedding_and_head(table: str, vocab: int) -> None:
    """The one leaf gets the sum of two gradients: rows picked by tokens, and the head's product."""
    mesh = mesh_of()
    weight = plain(vocab, 6)
    ids = torch.randint(0, vocab, (3, 4), generator=torch.Generator().manual_seed(1))
    layout = {
        "vocabulary": mesh.layout("a", None),
        "replicated": mesh.layout(None, None),
        "width": mesh.layout(None, "a"),
    }[table]
    tied = leaf(weight, layout)

    def run(ids: Any, weight: Any) -> Any:
        x = F.embedding(ids, weight)
        return F.cross_entropy(F.linear(x.tanh(), weight).flatten(0, 1), ids.flatten())

    expected = run(ids, weight)
    expected.backward()
    loss = run(distribute_tensor(ids, mesh), tied)
    loss.backward()
    close(whole(loss), expected.detach())
    assert tied.grad.layout == layout
    same_gradients({"w": tied}, {"w": weight})


@distributed(world_size=2)
def test_an_average_over_data_parallel_ranks() -> None:
    """A loss that is Partial("avg"): the gradient is that of the mean, whoever the consumer is."""
    mesh = mesh_of()
    values = noise(2, 4)
    x = values.clone().requires_grad_()
    (x.mean(0) ** 2).sum().backward()
    mine = values[torch.distributed.get_rank()].clone().requires_grad_()
    average = DTensor.from_local(mine, layout=mesh.layout(None, partial={"a": "avg"}))
    (average**2).sum().backward()
    close(mine.grad, x.grad[torch.distributed.get_rank()])


@distributed(world_size=2)
def test_the_local_tensor_is_shared_by_uses_under_one_cotangent() -> None:
    mesh = mesh_of()
    x = leaf(plain(3, 4), mesh.layout(None, None))
    pending = mesh.layout(None, None, partial={"a": "sum"})
    assert x.local(pending) is x.local(pending)
    assert x.local() is not x.local(pending)
    assert x.local() is x.local(mesh.layout(None, None))


# -- whole models ---------------------------------------------------------------------------------

MESHES = {1: (1,), 2: (2,), 3: (3,), 4: (4,)}


class LlamaBlock(nn.Module):
    """RMSNorm, rotary grouped-query attention, SwiGLU."""

    def __init__(self, width: int = 24, num_heads: int = 4, num_key_heads: int = 2, hidden: int = 20) -> None:
        super().__init__()
        self.num_heads, self.num_key_heads, self.head_dim = num_heads, num_key_heads, width // num_heads
        self.attention_norm = nn.RMSNorm(width, eps=1e-6)
        self.wq = nn.Linear(width, width, bias=False)
        self.wk = nn.Linear(width, num_key_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(width, num_key_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(width, width, bias=False)
        self.ffn_norm = nn.RMSNorm(width, eps=1e-6)
        self.w1 = nn.Linear(width, hidden, bias=False)
        self.w3 = nn.Linear(width, hidden, bias=False)
        self.w2 = nn.Linear(hidden, width, bias=False)

    def attention(self, x_BTD: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor) -> torch.Tensor:
        b, t, _ = x_BTD.shape
        q_BHTD = self.wq(x_BTD).view(b, t, self.num_heads, self.head_dim).transpose(1, 2)
        k_BKTD = self.wk(x_BTD).view(b, t, self.num_key_heads, self.head_dim).transpose(1, 2)
        v_BKTD = self.wv(x_BTD).view(b, t, self.num_key_heads, self.head_dim).transpose(1, 2)
        q_BHTD, k_BKTD = rotate(q_BHTD, cos_TD, sin_TD), rotate(k_BKTD, cos_TD, sin_TD)
        y = F.scaled_dot_product_attention(q_BHTD, k_BKTD, v_BKTD, is_causal=True, enable_gqa=True)
        return self.wo(y.transpose(1, 2).reshape(b, t, -1))

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        cos_TD, sin_TD = rotary_tables(x_BTD.shape[1], self.head_dim)
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), cos_TD, sin_TD)
        y_BTD = self.ffn_norm(x_BTD)
        return x_BTD + self.w2(F.silu(self.w1(y_BTD)) * self.w3(y_BTD))


def rotary_tables(length: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    frequency = 100.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
    angle = torch.outer(torch.arange(length), torch.cat((frequency, frequency)))
    return angle.cos(), angle.sin()


def rotate(x_BHTD: Any, cos_TD: Any, sin_TD: Any) -> Any:
    half = x_BHTD.shape[-1] // 2
    turned = torch.cat((-x_BHTD[..., half:], x_BHTD[..., :half]), dim=-1)
    return x_BHTD * cos_TD + turned * sin_TD


class Llama(nn.Module):
    def __init__(self, vocab: int = 13) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, 24)
        self.layers = nn.ModuleList(LlamaBlock() for _ in range(2))
        self.norm = nn.RMSNorm(24, eps=1e-6)
        self.head = nn.Linear(24, vocab, bias=False)

    def forward(self, ids_BT: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
        x_BTD = self.tokens(ids_BT)
        for layer in self.layers:
            x_BTD = layer(x_BTD)
        return F.cross_entropy(self.head(self.norm(x_BTD)).flatten(0, 1), targets_BT.flatten())


def make_llama() -> Llama:
    torch.manual_seed(3)
    model = Llama()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(noise(*parameter.shape, seed=len(name)) * 0.1)
    return model


def llama_plan(axis: str, is_split: bool) -> ShardingPlan:
    part = (None, axis, None) if is_split else (...,)
    modules = {
        "tokens": vocabulary_parallel(axis, outputs=part),
        "layers.*.w[qkv13]": column_parallel(axis),
        "layers.*.w[o2]": row_parallel(axis, outputs=part),
        "head": column_parallel(axis),
    }
    if not is_split:
        return ShardingPlan(modules=modules)
    modules |= {"*norm": sequence_parallel(axis)}
    outputs = dict.fromkeys(("layers.*.attention_norm", "layers.*.ffn_norm", "norm"), (...,))
    return ShardingPlan(modules=modules, outputs=outputs)


def gpt_plan(axis: str, is_split: bool) -> ShardingPlan:
    part = (None, axis, None) if is_split else (...,)
    modules = {
        "tokens": vocabulary_parallel(axis, outputs=part),
        "blocks.*.attention.out": row_parallel(axis, outputs=part),
        "blocks.*.attention.?": column_parallel(axis),
        "blocks.*.up": column_parallel(axis),
        "blocks.*.down": row_parallel(axis, outputs=part),
        "head": Style({"weight": (axis, None)}),
    }
    if not is_split:
        return ShardingPlan(modules=modules)
    modules |= {"blocks.*.norm?": sequence_parallel(axis), "norm": sequence_parallel(axis)}
    inputs = dict.fromkeys(("blocks.*.attention", "blocks.*.up", "head"), (...,))
    return ShardingPlan(modules=modules, inputs=inputs)


def check_model(
    make: Callable[[], Any], mesh: Any, plan: ShardingPlan, vocab: int, tolerance: float = 1e-5
) -> CommCounter:
    """One step of a sharded model against the same of a plain one; returns the backward's collectives."""
    ids, targets = batch(0, 3, vocab=vocab)
    expected_model = make()
    expected = expected_model(ids, targets)
    expected.backward()
    model = shard_module(make(), mesh, plan, src_data_rank=None)
    loss = model(ids, targets)
    close(whole(loss), expected.detach(), tolerance)
    with CommCounter() as backward:
        loss.backward()
    same_gradients(dict(model.named_parameters()), dict(expected_model.named_parameters()), tolerance)
    for name, parameter in model.named_parameters():
        assert parameter.grad.layout == parameter.layout, name
    return backward


@pytest.mark.parametrize("is_split", [False, True])
@distributed(world_size=2)
def test_gpt_on_two_ranks(is_split: bool) -> None:
    backward = check_model(make_gpt, mesh_of(), gpt_plan("a", is_split), 37)
    if not is_split:
        # Two per block (attention's input, the feed-forward's), the head's input, and three values per row in the loss.
        assert backward.all_gather == backward.reduce_scatter == 0


@pytest.mark.parametrize("is_split", [False, True])
@distributed(world_size=2)
def test_llama_on_two_ranks(is_split: bool) -> None:
    check_model(make_llama, mesh_of(), llama_plan("a", is_split), 13)


@pytest.mark.parametrize("is_split", [False, True])
@distributed(world_size=3)
def test_gpt_and_llama_on_three_ranks_which_divide_nothing(is_split: bool) -> None:
    check_model(make_gpt, mesh_of(), gpt_plan("a", is_split), 37)
    check_model(make_llama, mesh_of(), llama_plan("a", is_split), 13)


@pytest.mark.parametrize("is_split", [False, True])
@distributed(world_size=4)
def test_gpt_and_llama_on_four_ranks(is_split: bool) -> None:
    """Four ranks, two key heads: half of the ranks would own no key head."""
    check_model(make_gpt, mesh_of(), gpt_plan("a", is_split), 37)
    check_model(make_llama, mesh_of(), llama_plan("a", is_split), 13)


@distributed(world_size=1)
def test_gpt_and_llama_on_one_rank() -> None:
    assert check_model(make_gpt, mesh_of(), gpt_plan("a", True), 37).total == 0
    assert check_model(make_llama, mesh_of(), llama_plan("a", True), 13).total == 0


def with_rows_split(plan: ShardingPlan, axis: str) -> ShardingPlan:
    """Also splits the batch: ids and targets enter with their rows over `axis`."""
    rows = (axis, None)

    def of(spec: Any) -> Any:
        return (axis, None, None) if spec == (...,) else None if spec is None else (axis, *spec[1:])

    modules = {n: Style(s.parameters, of(s.inputs), of(s.outputs)) for n, s in plan.modules.items()}
    return ShardingPlan(
        modules=modules,
        inputs={n: of(s) for n, s in plan.inputs.items()} | {"": [rows, rows]},
        outputs={n: of(s) for n, s in plan.outputs.items()},
    )


@pytest.mark.parametrize("is_split", [False, True])
@distributed(world_size=4)
def test_gpt_and_llama_on_a_2d_mesh_with_uneven_rows(is_split: bool) -> None:
    mesh = mesh_of(2, 2)
    check_model(make_gpt, mesh, with_rows_split(gpt_plan("b", is_split), "a"), 37)
    check_model(make_llama, mesh, with_rows_split(llama_plan("b", is_split), "a"), 13)


def number_of(make: Callable[[], TinyGpt], mesh: Any, plan: ShardingPlan) -> tuple[CommCounter, CommCounter]:
    ids, targets = batch(0, 2, vocab=36, length=8)
    model = shard_module(make(), mesh, plan, src_data_rank=None)
    with CommCounter() as forward:
        loss = model(ids, targets)
    with CommCounter() as backward:
        loss.backward()
    return forward, backward


@distributed(world_size=2)
def test_collectives_of_a_tensor_parallel_gpt() -> None:
    forward, backward = number_of(lambda: make_gpt(vocab=36), mesh_of(), gpt_plan("a", False))
    # Forward: embedding, two per block, three values per row in the loss. Backward: two per block, the head's input,
    # one value per row in the loss.
    assert forward.counts == {"all_reduce": 1 + 2 * 2 + 3}
    assert backward.counts == {"all_reduce": 2 * 2 + 1 + 1}


@distributed(world_size=2)
def test_collectives_of_a_sequence_parallel_gpt() -> None:
    forward, backward = number_of(lambda: make_gpt(vocab=36), mesh_of(), gpt_plan("a", True))
    assert forward.counts == {"reduce_scatter": 1 + 2 * 2, "all_gather": 2 * 2 + 1, "all_reduce": 3}
    # Transposed; the slice of the position embeddings becomes an all-gather. One all-reduce per weight that is whole
    # while the sequence is split (five norms of two), and one value per row in the loss. The biases of row-parallel
    # layers are added by one rank, under a gradient that is gathered anyway.
    assert backward.counts == {"reduce_scatter": 2 * 2 + 1, "all_gather": 1 + 2 * 2 + 1, "all_reduce": 5 * 2 + 1}
