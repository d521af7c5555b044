# SPDX-License-Identifier: Apache-2.0
"""What the DTensor tests share: tensors in any layout, and the check of an op against plain torch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from hyper_parallel import DTensor, Layout, init_device_mesh
from hyper_parallel.core.errors import HyperParallelError

AXES = ("a", "b", "c")


def mesh_of(*sizes: int) -> Any:
    return init_device_mesh("cpu", sizes or (dist.get_world_size(),), mesh_dim_names=AXES[: max(len(sizes), 1)])


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Numbers of both signs, alike on all ranks, without touching the random state."""
    generator = torch.Generator().manual_seed(seed + 31 * sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def lay(full: torch.Tensor, layout: Layout, seed: int = 5) -> Any:
    """`full` under any layout, pending reductions included, with different operands on every rank."""
    mesh, rank = layout.mesh, dist.get_rank()
    piece = full.detach()
    for axis, op in layout.partial:
        size, index = mesh.size(axis), mesh.coord(rank)[mesh.axis_names.index(axis)]
        piece = _operand(piece, op.value, size, index, seed + 7 * mesh.axis_names.index(axis))
    box = layout.box(full.shape, rank)
    for dim, (start, stop) in enumerate(box):
        piece = piece.narrow(dim, start, stop - start)
    local = piece.clone(memory_format=torch.contiguous_format).requires_grad_(full.requires_grad)
    return DTensor.from_local(local, layout=layout, shape=full.shape)


def _operand(full: torch.Tensor, op: str, size: int, index: int, seed: int) -> torch.Tensor:
    """Operand `index` of `size` of a reduction whose value is `full`.

    The operands are eighths, so that sums of small integers are exact and ties stay ties.
    """
    parts = [(noise(*full.shape, seed=seed + i) * 24).round().to(full.dtype) / 8 for i in range(size)]
    match op:
        case "sum":
            return parts[index] - sum(parts[1:], parts[0]) + full if index == 0 else parts[index]
        case "avg":
            mean = sum(parts[1:], parts[0]) / size
            return full + parts[index] - mean
        case "max":
            return full if index == size - 1 else full - parts[index].abs()
        case "min":
            return full if index == size - 1 else full + parts[index].abs()
    raise AssertionError(op)


def layouts(mesh: Any, ndim: int, *, partial: Sequence[str] = ("sum",)) -> list[Layout]:
    """All layouts of a tensor: every axis copies, splits one of the dims in mesh order, or is pending."""
    out = []
    for choice in itertools.product((None, *range(ndim), *partial), repeat=mesh.ndim):
        dims: list[list[str]] = [[] for _ in range(ndim)]
        pending = {}
        for axis, what in zip(mesh.axis_names, choice, strict=True):
            if isinstance(what, int):
                dims[what].append(axis)
            elif what is not None:
                pending[axis] = what
        out.append(Layout(mesh, dims, partial=pending))
    return out


def special_layouts(mesh: Any, shape: Sequence[int], *, is_float: bool) -> list[Layout]:
    """Layouts that are rare: ragged pieces, inner axis first, pending averages and extremes."""
    axis, *rest = mesh.axis_names
    unit = [() for _ in shape]
    out = [Layout(mesh, unit)]
    for dim, size in enumerate(shape):
        for first in (size // 3, size):
            sizes = (first, *(0,) * (mesh.size(axis) - 2), size - first)
            out.append(Layout(mesh, [[axis] if d == dim else [] for d in range(len(shape))], ragged={axis: sizes}))
        if rest:
            out.append(Layout(mesh, [[rest[0], axis] if d == dim else [] for d in range(len(shape))]))
    for op in ("avg", "max", "min") if is_float else ():
        out.append(Layout(mesh, unit, partial={axis: op}))
        if rest and shape and op == "avg":
            out.append(Layout(mesh, [[rest[0]], *unit[1:]], partial={axis: op}))
            out.append(Layout(mesh, unit, partial={axis: op, rest[0]: "sum"}))
    return out


def whole(x: Any) -> Any:
    """Plain tensors from DTensors, lists included."""
    if isinstance(x, DTensor):
        return x.full_tensor().detach()
    if isinstance(x, torch.Tensor):
        return x.detach()
    return [whole(item) for item in x]


def close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


def on_all_ranks(value: Any) -> list[Any]:
    out: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(out, value)
    return out


def error_of(call: Callable[[], Any], kind: type[Exception] | tuple[type[Exception], ...] = HyperParallelError) -> str:
    """The text of the error that `call` raises: one line, alike on all ranks."""
    try:
        call()
    except kind as error:
        text = str(error)
    else:
        text = ""
    texts = on_all_ranks(text)
    assert len(set(texts)) == 1, texts
    assert text, f"no {kind}"
    assert "\n" not in text
    return text


# -- an op under all layouts of its operands -----------------------------------------------------


@dataclass(frozen=True)
class Case:
    """An op: its name, the call, its tensor operands, and how close the results must be."""

    name: str
    call: Callable[..., Any]
    operands: tuple[torch.Tensor, ...]
    tolerance: float = 1e-5


def f(*shape: int, seed: int = 0) -> torch.Tensor:
    """A float operand whose gradient is checked."""
    return noise(*shape, seed=seed).requires_grad_()


def i(high: int, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


def b(*shape: int, seed: int = 0) -> torch.Tensor:
    return noise(*shape, seed=seed) > 0


def case(name: str, call: Callable[..., Any], *operands: torch.Tensor, tolerance: float = 1e-5) -> Case:
    return Case(name, call, operands, tolerance)


def listed(out: Any) -> list[Any]:
    return [out] if isinstance(out, torch.Tensor) else list(out)


def forward_and_backward(call: Callable[..., Any], operands: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Full outputs, and full gradients of the operands for one mixed-sign gradient of the outputs."""
    for x in operands:
        x.grad = None
    outs = listed(call(*operands))
    roots = [o for o in outs if o.requires_grad]
    for n, out in enumerate(roots):
        out.backward(noise(*out.shape, seed=77 + n, dtype=out.dtype), retain_graph=n + 1 < len(roots))
    return [whole(o) for o in outs], [None if x.grad is None else gradient_of(x) for x in operands]


def gradient_of(x: torch.Tensor) -> torch.Tensor:
    """The gradient of the global value of a leaf.

    The leaf's own is that of this rank's operand: 1/n of it for one of n operands of an average, and all or nothing for
    an operand of an extreme.
    """
    if not isinstance(x, DTensor):
        return whole(x.grad)
    extreme = [axis for axis, op in x.layout.partial if not op.is_linear]
    layout = x.layout.cotangent.with_partial(*extreme)
    parts = DTensor.from_local(x.grad.to_local(), layout=layout, shape=x.shape)
    averaged = [x.layout.mesh.size(axis) for axis, op in x.layout.partial if op.value == "avg"]
    return whole(parts) * math.prod(averaged)


def failures(case: Case, mesh: Any, choices: Iterable[tuple[Layout, ...]]) -> list[str]:
    """Layouts under which the op differs from plain torch, or refuses to work."""
    expected = forward_and_backward(case.call, case.operands)
    found = []
    for chosen in choices:
        what = f"{case.name} {', '.join(map(str, chosen))}"
        operands = [
            lay(x, layout, seed=5 + 100 * n) for n, (x, layout) in enumerate(zip(case.operands, chosen, strict=True))
        ]
        try:
            actual = forward_and_backward(case.call, operands)
        except Exception as error:
            found.append(f"{what}: {type(error).__name__}: {error}")
            continue
        for kind, mine, theirs in zip(("forward", "gradient"), actual, expected, strict=True):
            found.extend(
                f"{what}: {kind} {n} {text}"
                for n, pair in enumerate(zip(mine, theirs, strict=True))
                if (text := _difference(*pair, case.tolerance))
            )
    return found


def _difference(actual: torch.Tensor | None, expected: torch.Tensor | None, tolerance: float) -> str:
    """How two results differ, or nothing."""
    if actual is None or expected is None:
        return "" if actual is expected else f"is {actual}, not {expected}"
    try:
        close(actual, expected, tolerance)
    except AssertionError as error:
        return " ".join(str(error).split())[:200]
    return ""
