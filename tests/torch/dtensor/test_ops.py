# SPDX-License-Identifier: Apache-2.0
"""Every op that a GPT and a Llama step call, under all layouts of its operands, against plain torch."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from hyper_parallel.testing import distributed
from tests.torch.dtensor.support import (
    Case,
    b,
    case,
    f,
    failures,
    i,
    layouts,
    mesh_of,
    noise,
    special_layouts,
)

# Sizes 5, 3, 1 are uneven on 2, 3 and 4 ranks; 1 and 2 leave some of 3 or 4 ranks without anything.


def matmul_cases() -> list[Case]:
    return [
        case("linear", F.linear, f(2, 3, 5), f(4, 5), f(4)),
        case("linear without bias", F.linear, f(3, 5), f(4, 5)),
        case("matmul 2 2", torch.matmul, f(3, 5), f(5, 2)),
        case("matmul 3 2", torch.matmul, f(2, 3, 5), f(5, 2)),
        case("matmul 3 3", torch.matmul, f(2, 3, 5), f(2, 5, 2)),
        case("matmul broadcast", lambda x, y: x @ y, f(2, 1, 3, 5), f(3, 5, 2)),
        case("matmul 1 1", torch.matmul, f(5), f(5, seed=1)),
        case("matmul 1 2", torch.matmul, f(5), f(5, 3)),
        case("matmul 2 1", torch.matmul, f(3, 5), f(5)),
        case("matmul 3 1", torch.matmul, f(2, 3, 5), f(5)),
        case("matmul 1 3", torch.matmul, f(5), f(2, 5, 3)),
        case("bmm", torch.bmm, f(2, 3, 5), f(2, 5, 2)),
        case("mv", torch.mv, f(3, 5), f(5)),
        case("outer", torch.outer, f(3), f(5)),
        case("addmm", torch.addmm, f(2), f(3, 5), f(5, 2)),
        case("addmm of a matrix", lambda z, x, y: torch.addmm(z, x, y, beta=0.5, alpha=2), f(3, 2), f(3, 5), f(5, 2)),
        case("einsum bij,bjk->bik", lambda x, y: torch.einsum("bij,bjk->bik", x, y), f(2, 3, 5), f(2, 5, 3)),
        case("einsum implicit", lambda x, y: torch.einsum("ij,jk", x, y), f(3, 5), f(5, 3)),
        case("einsum sum", lambda x: torch.einsum("bij->j", x), f(2, 3, 5)),
        case("einsum ellipsis", lambda x, y: torch.einsum("...i,oi->...o", x, y), f(2, 3, 5), f(4, 5)),
    ]


def model_cases() -> list[Case]:
    mask = torch.arange(4)[:, None] >= torch.arange(4)
    q, k, v = f(2, 4, 4, 3), f(2, 4, 4, 3, seed=1), f(2, 4, 4, 3, seed=2)
    k2, v2 = f(2, 2, 4, 3, seed=1), f(2, 2, 4, 3, seed=2)
    sdpa = F.scaled_dot_product_attention
    out = [
        case("embedding", F.embedding, i(7, 3, 5), f(7, 4)),
        case("embedding padding_idx", lambda x, w: F.embedding(x, w, padding_idx=-3), i(7, 3, 5), f(7, 4)),
        case("embedding of 1 row", F.embedding, i(1, 3), f(1, 4)),
        case("layer_norm", lambda x, w, c: F.layer_norm(x, (5,), w, c), f(2, 3, 5), f(5), f(5, seed=1)),
        case("layer_norm of 2 dims", lambda x: F.layer_norm(x, (3, 5)), f(2, 3, 5)),
        case("rms_norm", lambda x, w: F.rms_norm(x, (5,), w, 1e-6), f(2, 3, 5), f(5)),
        case("rms_norm frozen weight", lambda x, w: F.rms_norm(x, (5,), w), f(2, 3, 5), f(5).detach()),
        case(
            "rms_norm in pieces",
            lambda x, w: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w,
            f(2, 3, 5),
            f(5),
        ),
        case("softmax", lambda x: F.softmax(x, -1), f(2, 3, 5)),
        case("softmax dim 0", lambda x: torch.softmax(x, dim=0), f(3, 5)),
        case("log_softmax", lambda x: F.log_softmax(x, dim=1), f(2, 3, 5)),
        case("gelu", F.gelu, f(3, 5)),
        case("gelu tanh", lambda x: F.gelu(x, approximate="tanh"), f(3, 5)),
        case("silu gate", lambda x, y: F.silu(x) * y, f(3, 5), f(3, 5, seed=1)),
        case("relu", F.relu, f(3, 5)),
        case("sigmoid", torch.sigmoid, f(3, 5)),
        case("rotary", rotary, f(2, 3, 5, 4), f(5, 4).detach(), f(5, 4, seed=1).detach()),
        case("sdpa causal", lambda q, k, v: sdpa(q, k, v, is_causal=True), q, k, v),
        case("sdpa masked", lambda q, k, v, m: sdpa(q, k, v, attn_mask=m), q, k, v, mask),
        case("sdpa mask per head", sdpa, q, k, v, noise(1, 4, 4, 4, seed=3)),
        case("sdpa grouped", lambda q, k, v: sdpa(q, k, v, is_causal=True, enable_gqa=True), q, k2, v2),
        case(
            "sdpa one key head",
            lambda q, k, v: sdpa(q, k, v, enable_gqa=True),
            q,
            f(2, 1, 4, 3, seed=1),
            f(2, 1, 4, 3, seed=2),
        ),
        case("sdpa 3 dims", sdpa, f(3, 4, 3), f(3, 4, 3, seed=1), f(3, 4, 2)),
    ]
    return out


def rotary(x: Any, cos: Any, sin: Any) -> Any:
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos[None, None] + turned * sin.unsqueeze(0).unsqueeze(0)


def loss_cases() -> list[Case]:
    rows = i(5, 7)
    ignored = torch.where(torch.arange(7) % 3 == 0, -100, rows)
    only_last = torch.where(torch.arange(7) < 6, -100, rows)
    none = torch.full((7,), -100)
    ce = F.cross_entropy
    probabilities = torch.softmax(f(7, 5, seed=3).detach(), -1)
    w = f(5).detach().abs() + 0.1
    return [
        case("cross_entropy", ce, f(7, 5), rows),
        case("cross_entropy ignored", ce, f(7, 5), ignored),
        case("cross_entropy one valid", ce, f(7, 5), only_last),
        case("cross_entropy none valid", ce, f(7, 5), none),
        case("cross_entropy ignore_index=2", lambda x, t: ce(x, t, ignore_index=2), f(7, 5), rows),
        case("cross_entropy sum", lambda x, t: ce(x, t, reduction="sum"), f(7, 5), ignored),
        case("cross_entropy none", lambda x, t: ce(x, t, reduction="none"), f(7, 5), ignored),
        case("cross_entropy smooth", lambda x, t: ce(x, t, label_smoothing=0.1), f(7, 5), ignored),
        case("cross_entropy weight", lambda x, t, w: ce(x, t, w), f(7, 5), ignored, w),
        case("cross_entropy weight smooth", lambda x, t, w: ce(x, t, w, label_smoothing=0.2), f(7, 5), ignored, w),
        case("cross_entropy weight sum", lambda x, t, w: ce(x, t, weight=w, reduction="sum"), f(7, 5), ignored, w),
        case("cross_entropy probabilities", ce, f(7, 5), probabilities),
        case("cross_entropy probabilities smooth", lambda x, t: ce(x, t, label_smoothing=0.1), f(7, 5), probabilities),
        case("cross_entropy 3 dims", ce, f(2, 5, 3), i(5, 2, 3)),
        case("cross_entropy 3 dims weight", lambda x, t, w: ce(x, t, w), f(2, 5, 3), i(5, 2, 3), w),
        case("cross_entropy 1 dim", ce, f(5), i(5)),
        # Plain torch rounds the log-probabilities to the 8 bits of bfloat16, a split loss adds them in float32.
        case("cross_entropy bf16", lambda x, t: ce(x.bfloat16(), t).float(), f(7, 5), rows, tolerance=2**-7),
        case("nll_loss", F.nll_loss, f(7, 5), rows),
        case("mse_loss", F.mse_loss, f(3, 5), f(3, 5, seed=1)),
        case("l1_loss", lambda x, y: F.l1_loss(x, y, reduction="sum"), f(3, 5), f(3, 5, seed=1)),
        case(
            "log_softmax gather", lambda x, t: -F.log_softmax(x, -1).gather(-1, t.unsqueeze(-1)).mean(), f(7, 5), rows
        ),
    ]


def pointwise_cases() -> list[Case]:
    x, y = f(3, 5), f(3, 5, seed=1)
    positive = (f(3, 5).detach().abs() + 0.5).requires_grad_()
    return [
        case("add", torch.add, x, y),
        case("add broadcast", lambda x, y: x + y, f(2, 3, 5), f(5)),
        case("add broadcast 1", lambda x, y: x + y, f(3, 1), f(1, 5)),
        case("add alpha", lambda x, y: torch.add(x, y, alpha=-2), x, y),
        case("add number", lambda x: x + 10, x),
        case("radd number", lambda x: 10 + x, x),
        case("add 0-dim", lambda x: x + torch.tensor(10.0), x),
        case("sub", lambda x, y: x - y, x, y),
        case("sub number", lambda x: x - 2.5, x),
        case("rsub number", lambda x: 2.5 - x, x),
        case("mul", lambda x, y: x * y, x, y),
        case("mul itself", lambda x: x * x, x),
        case("mul number", lambda x: 3 * x, x),
        case("mul number right", lambda x: x * -0.5, x),
        case("mul 0-dim", lambda x: x * torch.tensor(2.0), x),
        case("div", lambda x, y: x / y, x, positive),
        case("div number", lambda x: x / 4, x),
        case("rdiv number", lambda x: 4 / x, positive),
        case("div itself", lambda x: x / x, positive),
        case("floor_divide", lambda x: x // 0.3, x.detach()),
        case("neg", lambda x: -x, x),
        case("pow", lambda x: x**2, x),
        case("pow 3", lambda x: torch.pow(x, 3.0), x),
        case("rpow", lambda x: 2**x, x),
        case("rsqrt", torch.rsqrt, positive),
        case("sqrt", lambda x: x.sqrt(), positive),
        case("exp", torch.exp, x),
        case("abs", lambda x: x.abs(), x),
        case("clamp", lambda x: x.clamp(-0.5, max=0.5), x),
        case("where", lambda c, x, y: torch.where(c, x, y), b(3, 5, seed=4), x, y),
        case("where number", lambda c, x: torch.where(c, x, 0.0), b(3, 5, seed=4), x),
        case("masked_fill", lambda x, m: x.masked_fill(m, -1e9), x, b(3, 5, seed=4)),
        case("masked_fill broadcast", lambda x, m: x.masked_fill(m, 2.0), f(2, 3, 5), b(3, 1, seed=4)),
        case("maximum", torch.maximum, x, y),
        case("lerp", lambda x, y: torch.lerp(x, y, 0.3), x, y),
        case("addcmul", lambda x, y, z: torch.addcmul(x, y, z, value=0.5), x, y, f(3, 5, seed=2)),
        case("eq", lambda x, y: x == y, i(2, 3, 5), i(2, 3, 5, seed=1)),
        case("ne number", lambda x: x != 1, i(3, 3, 5)),
        case("ge", lambda x, y: x >= y, x.detach(), y.detach()),
        case("lt number", lambda x: x < 0.1, x.detach()),
        case("logical", lambda p, q: (p & q) | ~p, b(3, 5), b(3, 5, seed=1)),
        case("double", lambda x: x.double(), x),
        case("bfloat16", lambda x: x.bfloat16().float(), x),
        case("to int", lambda x: x.to(torch.int64), x.detach() * 3),
        case("to bool", lambda x: x.bool(), i(2, 3, 5)),
        case("type_as", lambda x, y: x.type_as(y), x, y.detach().double()),
        case("int mul", lambda x: x * 3, i(5, 3, 5)),
        case("int mul float", lambda x: x * 0.5, i(5, 3, 5)),
        case("add promotes", lambda x, y: x + y, x, y.detach().double()),
        case("isnan", torch.isnan, x.detach()),
        case("0-dim ops", lambda x, y: (x + 1) * y - x, f(), f(seed=1)),
        case("size-1 dims", lambda x, y: x * y + x, f(1, 5), f(3, 1)),
    ]


def view_cases() -> list[Case]:
    x, y = f(3, 5), f(3, 5, seed=1)
    z = f(2, 3, 4)
    return [
        case("view split heads", lambda x: x.view(2, 3, 4, 2), f(2, 3, 8)),
        case("view join heads", lambda x: x.reshape(2, 3, 8), f(2, 3, 4, 2)),
        case("view flatten", lambda x: x.view(-1), x),
        case("view flatten lead", lambda x: x.view(-1, 4), z),
        case("view (4,6) to (8,3)", lambda x: x.view(8, 3), f(4, 6)),
        case("view (6,) to (2,3)", lambda x: x.view(2, 3), f(6)),
        case("view (12,8) to (16,6)", lambda x: x.view(-1, 6), f(12, 8)),
        case("view (4,4,4) to (8,8)", lambda x: x.view(8, 8), f(4, 4, 4)),
        case("view same", lambda x: x.view(3, 5), x),
        case("view ones", lambda x: x.view(1, 3, 1, 5), x),
        case("view drops ones", lambda x: x.view(3, 5), f(1, 3, 1, 5)),
        case("view of size 1", lambda x: x.view(1, 2), f(1, 2)),
        case("reshape empty", lambda x: x.reshape(0, 4), f(0, 2, 2)),
        case("view_as", lambda x, y: x.view_as(y), f(15), y.detach()),
        case("reshape of transposed", lambda x: x.t().reshape(-1), x),
        case("flatten", lambda x: x.flatten(), z),
        case("flatten 0 1", lambda x: x.flatten(0, 1), z),
        case("flatten 1", lambda x: torch.flatten(x, 1), z),
        case("unflatten", lambda x: x.unflatten(-1, (2, -1)), f(3, 4)),
        case("transpose", lambda x: x.transpose(1, 2), z),
        case("t", lambda x: x.t(), x),
        case("T", lambda x: x.T, x),
        case("mT", lambda x: x.mT, z),
        case("permute", lambda x: x.permute(2, 0, 1), z),
        case("permute negative", lambda x: torch.permute(x, (-1, 0, 1)), z),
        case("movedim", lambda x: x.movedim(0, -1), z),
        case("unsqueeze", lambda x: x.unsqueeze(1), x),
        case("unsqueeze -1", lambda x: x.unsqueeze(-1), x),
        case("squeeze", lambda x: x.squeeze(), f(1, 3, 1, 5)),
        case("squeeze dim", lambda x: x.squeeze(0), f(1, 3, 1)),
        case("squeeze dims", lambda x: x.squeeze((0, 2)), f(1, 3, 1)),
        case("squeeze nothing", lambda x: x.squeeze(1), x),
        case("expand", lambda x: x.expand(2, 3, 5), f(3, 1)),
        case("expand -1", lambda x: x.expand(2, -1, -1), x),
        case("expand_as", lambda x, y: x.expand_as(y), f(1, 5), y.detach()),
        case("repeat", lambda x: x.repeat(2, 1, 3), x),
        case("repeat_interleave", lambda x: x.repeat_interleave(2, dim=1), f(2, 4, 3)),
        case("repeat_interleave uneven", lambda x: torch.repeat_interleave(x, 3, 0), x),
        case("split", lambda x: x.split(2, dim=1), x),
        case("split sizes", lambda x: torch.split(x, [1, 4], -1), x),
        case("chunk", lambda x: x.chunk(3, dim=-1), f(2, 6)),
        case("chunk uneven", lambda x: x.chunk(2), x),
        case("tensor_split", lambda x: x.tensor_split(2, dim=1), x),
        case("unbind", lambda x: x.unbind(1), x),
        case("cat", lambda x, y: torch.cat([x, y], dim=1), x, f(3, 2)),
        case("cat 0", lambda x, y: torch.cat((x, y)), x, y),
        case("stack", lambda x, y: torch.stack([x, y], dim=-1), x, y),
        case("stack 0", lambda x, y: torch.stack([x, y]), x, y),
        case("narrow", lambda x: x.narrow(1, 1, 3), x),
        case("select", lambda x: x.select(1, -1), x),
        case("index_select", lambda x, n: x.index_select(1, n), x, i(5, 4)),
        case("gather", lambda x, n: x.gather(1, n), x, i(5, 3, 2)),
        case("tril", lambda x: x.tril(), f(4, 5)),
        case("triu 1", lambda x: torch.triu(x, 1), f(4, 5)),
        case("flip", lambda x: x.flip(1), x),
        case("roll", lambda x: x.roll(1, 0), x),
        case("pad", lambda x: F.pad(x, (1, 2)), x),
        case("pad nonzero", lambda x: F.pad(x, (1, 2), value=3.0), x),
        case("contiguous", lambda x: x.t().contiguous(), x),
        case("clone", lambda x: x.clone(), x),
        case("x[0]", lambda x: x[0], z),
        case("x[-1]", lambda x: x[-1], z),
        case("x[1:]", lambda x: x[1:], z),
        case("x[:, 1:3]", lambda x: x[:, 1:3], z),
        case("x[:, -1]", lambda x: x[:, -1], z),
        case("x[..., 1]", lambda x: x[..., 1], z),
        case("x[..., ::2, :]", lambda x: x[..., ::2, :], z),
        case("x[None]", lambda x: x[None], z),
        case("x[:, None, :, 0]", lambda x: x[:, None, :, 0], z),
        case("x[..., None]", lambda x: x[..., None], z),
        case("x[:]", lambda x: x[:], z),
        case("x[n]", lambda x, n: x[n], z, i(2, 5)),
        case("x[:, n]", lambda x, n: x[:, n], z, i(3, 2, 2)),
        case("x[n, m]", lambda x, n, m: x[n, m], z, i(2, 5), i(3, 5)),
        case("x[n, :, m]", lambda x, n, m: x[n, :, m], z, i(2, 5), i(4, 5)),
        case("x[n, 1]", lambda x, n: x[n, 1], z, i(2, 5)),
        case("x[1, :, n]", lambda x, n: x[1, :, n], z, i(4, 5)),
        case("x[n, None, m]", lambda x, n, m: x[n, None, m], z, i(2, 5), i(3, 5)),
        case("x[n, m] broadcast", lambda x, n, m: x[n, m], z, i(2, 5, 1), i(3, 2)),
    ]


def reduction_cases() -> list[Case]:
    x = f(3, 5)
    z = f(2, 3, 4)
    ties = torch.tensor([[1.0, 2.0, 2.0], [2.0, 2.0, 0.0], [-1.0, 2.0, 2.0]])
    return [
        case("sum", lambda x: x.sum(), x),
        case("sum dim", lambda x: x.sum(1), z),
        case("sum dims", lambda x: x.sum((0, -1), keepdim=True), z),
        case("sum dtype", lambda x: x.sum(0, dtype=torch.float64), x),
        case("sum bool", lambda x: x.sum(), b(3, 5)),
        case("sum int", lambda x: x.sum(0), i(5, 3, 5)),
        case("mean", lambda x: x.mean(), x),
        case("mean dim", lambda x: x.mean(dim=0), x),
        case("mean keepdim", lambda x: x.mean(-1, keepdim=True), z),
        case("mean dims", lambda x: torch.mean(x, (0, 1)), z),
        case("mean of 1 row", lambda x: x.mean(), f(1, 4)),
        case("amax", lambda x: x.amax(), x),
        case("amax dim", lambda x: x.amax(0), x),
        case("amin keepdim", lambda x: x.amin(1, keepdim=True), x),
        case("amax ties", lambda x: x.amax(), ties.clone().requires_grad_()),
        case("amin ties dim", lambda x: x.amin(0, keepdim=True), ties.clone().requires_grad_()),
        case("amax without gradient", lambda x: x.amax(), ties),
        case("amax of int", lambda x: x.amax(1), i(9, 3, 5)),
        case("amax twice", lambda x: x.amax(1).amax(0), x),
        case("amax of 1 row", lambda x: x.amax(0), f(1, 4)),
        case("max", lambda x: x.max(), x),
        case("min", lambda x: torch.min(x), x),
        case("max dim", lambda x: x.max(0), x),
        case("min dim keepdim", lambda x: torch.min(x, 1, keepdim=True), x),
        case("max dim=", lambda x: torch.max(x, dim=-1), x),
        case("max two", lambda x, y: torch.max(x, y), x, f(3, 5, seed=1)),
        case("max ties", lambda x: x.max(0), ties),
        case("median", lambda x: x.median(1), x),
        case("median all", lambda x: x.median(), x),
        case("mode", lambda x: x.mode(0), ties),
        case("kthvalue", lambda x: x.kthvalue(2, 0), x),
        case("kthvalue dim=", lambda x: torch.kthvalue(x, k=2, dim=1, keepdim=True), x),
        case("argmax", lambda x: x.argmax(), x.detach()),
        case("argmax dim", lambda x: x.argmax(dim=0), x.detach()),
        case("argmax ties", lambda x: x.argmax(1, keepdim=True), ties),
        case("argmin", lambda x: torch.argmin(x, -1), x.detach()),
        case("topk", lambda x: x.topk(2, dim=0), x),
        case("topk largest", lambda x: torch.topk(x, 2, largest=False), x),
        case("sort", lambda x: x.sort(0), x),
        case("sort descending", lambda x: torch.sort(x, dim=1, descending=True), x),
        case("argsort", lambda x: x.argsort(1), x.detach()),
        case("cumsum", lambda x: x.cumsum(0), x),
        case("cumprod", lambda x: x.cumprod(dim=1), x),
        case("logsumexp", lambda x: x.logsumexp(-1), x),
        case("var", lambda x: x.var(0), x),
        case("var correction", lambda x: x.var(1, correction=0), x),
        case("var unbiased", lambda x: x.var(1, False), x),
        case("var (dim, unbiased, keepdim)", lambda x: x.var(0, True, True), x),
        case("var (unbiased)", lambda x: x.var(False), x),
        case("std", lambda x: x.std(), x),
        case("prod", lambda x: x.prod(0), x),
        case("prod all", lambda x: x.prod(), x),
        case("norm", lambda x: x.norm(), x),
        case("norm 1", lambda x: x.norm(1), x),
        case("norm dim", lambda x: torch.norm(x, 2, 1), x),
        case("vector_norm", lambda x: torch.linalg.vector_norm(x), x),
        case("vector_norm inf", lambda x: torch.linalg.vector_norm(x, float("inf"), 0), x),
        case("all", lambda x: x.all(), b(3, 5)),
        case("all dim", lambda x: x.all(0), torch.arange(15).reshape(3, 5) > 3),
        case("any", lambda x: x.any(), torch.arange(15).reshape(3, 5) > 13),
        case("any dim", lambda x: x.any(1, keepdim=True), torch.arange(15).reshape(3, 5) > 11),
        case("count_nonzero", lambda x: x.count_nonzero(), i(2, 3, 5)),
        case("aminmax", lambda x: tuple(torch.aminmax(x)), x.detach()),
        case("isclose", torch.isclose, x.detach(), f(3, 5).detach() * 1.0000001),
    ]


FAMILIES = {
    "matmul": matmul_cases,
    "model": model_cases,
    "loss": loss_cases,
    "pointwise": pointwise_cases,
    "view": view_cases,
    "reduction": reduction_cases,
}


def choices(case: Case, mesh: Any, limit: int) -> list[Any]:
    """Layouts of the operands: all, or a fixed random sample of `limit`."""
    pending = lambda x: ("sum",) if x.is_floating_point() else ()  # noqa: E731
    options = [layouts(mesh, x.ndim, partial=pending(x)) for x in case.operands]
    found = list(itertools.product(*options))
    return found if len(found) <= limit else random.Random(case.name).sample(found, limit)


def special_choices(case: Case, mesh: Any, limit: int) -> list[Any]:
    dice = random.Random(case.name)
    options = [special_layouts(mesh, x.shape, is_float=x.is_floating_point()) for x in case.operands]
    return [tuple(dice.choice(o) for o in options) for _ in range(limit)]


def check(family: str, mesh: Any, limit: int, choose: Any = choices) -> None:
    found = [text for c in FAMILIES[family]() for text in failures(c, mesh, choose(c, mesh, limit))]
    assert not found, f"{len(found)} wrong:\n" + "\n".join(found)


@pytest.mark.parametrize("family", FAMILIES)
@distributed(world_size=2)
def test_all_layouts_on_two_ranks(family: str) -> None:
    check(family, mesh_of(), 64)


@pytest.mark.parametrize("family", FAMILIES)
@distributed(world_size=3)
def test_with_empty_shards_on_three_ranks(family: str) -> None:
    check(family, mesh_of(), 6)


@pytest.mark.parametrize("family", FAMILIES)
@distributed(world_size=4)
def test_sample_of_layouts_on_a_2d_mesh(family: str) -> None:
    check(family, mesh_of(2, 2), 6)


@pytest.mark.parametrize("family", FAMILIES)
@distributed(world_size=2)
def test_special_layouts_on_two_ranks(family: str) -> None:
    check(family, mesh_of(), 8, special_choices)


@pytest.mark.parametrize("family", FAMILIES)
@distributed(world_size=4)
def test_special_layouts_on_a_2d_mesh(family: str) -> None:
    check(family, mesh_of(2, 2), 4, special_choices)


@pytest.mark.parametrize("family", FAMILIES)
@distributed(world_size=1)
def test_on_one_rank(family: str) -> None:
    check(family, mesh_of(), 4)
    assert dist.get_world_size() == 1
