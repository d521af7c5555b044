# SPDX-License-Identifier: Apache-2.0
"""Cost of a DTensor op over a plain one, in one process: ours and torch's, interleaved."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard
from torch.distributed.tensor import distribute_tensor as torch_distribute

import hyper_parallel as hp

REPEATS = 15


def microseconds(functions: dict[str, Callable[[], object]], calls: int) -> dict[str, float]:
    """Best of several rounds, the functions taking turns."""
    best = dict.fromkeys(functions, float("inf"))
    for round_ in range(REPEATS + 1):
        for name, function in functions.items():
            began = time.perf_counter()
            for _ in range(calls):
                function()
            if round_:
                best[name] = min(best[name], (time.perf_counter() - began) / calls * 1e6)
    return best


def chain(x: torch.Tensor) -> torch.Tensor:
    y = x
    for _ in range(10):
        y = (y * x) + x
    return y


def main() -> None:
    torch.set_num_threads(1)
    mesh = hp.init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    theirs = dist.init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    plain = torch.randn(8, 8)
    kinds: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "plain": torch.clone,
        "ours": lambda t: hp.distribute_tensor(t, mesh, [hp.Shard(0)]),
        "torch": lambda t: torch_distribute(t, theirs, [Shard(0)]),
    }
    leaves = {name: make(plain).requires_grad_() for name, make in kinds.items()}
    ones = {name: make(torch.ones(8, 8)) for name, make in kinds.items()}
    values = {name: make(plain) for name, make in kinds.items()}
    cases: dict[str, tuple[int, Callable[[str], Callable[[], object]]]] = {
        "20 small ops, forward + backward, per op": (50, lambda k: lambda: chain(leaves[k]).backward(ones[k])),
        "x + x": (2000, lambda k: lambda: values[k] + values[k]),
        "x @ x": (2000, lambda k: lambda: values[k] @ values[k]),
        "x.view(64)": (2000, lambda k: lambda: values[k].view(64)),
        "x.add_(1)": (2000, lambda k: lambda: values[k].add_(1)),
    }
    print(
        "## Cost of one op, microseconds over a plain tensor (8 x 8, one process, best of "
        f"{REPEATS} rounds)\n\n| op | plain | ours over plain | torch DTensor over plain |\n|---|---|---|---|"
    )
    for case, (calls, make) in cases.items():
        found = microseconds({name: make(name) for name in kinds}, calls)
        per = 20 if case.startswith("20") else 1
        row = [found["plain"] / per, (found["ours"] - found["plain"]) / per, (found["torch"] - found["plain"]) / per]
        print(f"| {case} | " + " | ".join(f"{value:.1f}" for value in row) + " |")
    optimizers()


def optimizers(num: int = 200) -> None:
    """A step of AdamW over many small parameters."""
    mesh = hp.init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    theirs = dist.init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    makers = {
        "plain": lambda t: t.clone(),
        "ours": lambda t: hp.distribute_tensor(t, mesh, [hp.Shard(0)]),
        "torch": lambda t: torch_distribute(t, theirs, [Shard(0)]),
    }
    steps = {}
    for name, make in makers.items():
        parameters = [torch.nn.Parameter(make(torch.randn(8, 8))) for _ in range(num)]
        for parameter in parameters:
            parameter.grad = make(torch.randn(8, 8))
        steps[name] = torch.optim.AdamW(parameters, foreach=True).step
    found = microseconds(steps, 5)
    print(
        f"| AdamW foreach, {num} parameters, whole step | {found['plain']:.0f} "
        f"| {found['ours'] - found['plain']:.0f} | "
        f"{found['torch'] - found['plain']:.0f} |"
    )


if __name__ == "__main__":
    main()
