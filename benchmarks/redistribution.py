# SPDX-License-Identifier: Apache-2.0
"""Redistributions on real processes, ours and torch's DTensor in one job; overlap with computation; errors of sums.

Command: `torchrun --standalone --nproc-per-node=4 -m benchmarks.redistribution`.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor import Partial as TorchPartial
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard

import hyper_parallel as hp

SHAPE = (1024, 1536)
ROUNDS = 21
LATE = 0.03
CASES = (
    ("R,S0", "S0,R"),
    ("S0,S1", "S1,S0"),
    ("S0,S0", "S1,S1"),
    ("S0,R", "R,S0"),
    ("S0,S0", "R,S0"),
    ("R,S0", "S0,S0"),
    ("S0,S1", "R,R"),
    ("P,S0", "S0,R"),
    ("P,P", "R,R"),
    ("P,P", "S0,S1"),
)


def milliseconds(works: Sequence[Callable[[], object]], rounds: int = ROUNDS) -> list[float]:
    """Median time of each, the works taking turns; a round begins when all ranks are there."""
    times: list[list[float]] = [[] for _ in works]
    for round_ in range(rounds + 2):
        for i, work in enumerate(works):
            dist.barrier()
            began = time.perf_counter()
            work()
            if round_ > 1:
                times[i].append(time.perf_counter() - began)
    return [statistics.median(found) * 1e3 for found in times]


def slowest(values: Sequence[float]) -> list[float]:
    """The largest of every value over the ranks."""
    found = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.tolist()


def say(line: str = "") -> None:
    if dist.get_rank() == 0:
        print(line, flush=True)


# -- beside torch -------------------------------------------------------------------------------------


def placements(text: str, *, ours: bool) -> list[object]:
    made = {"R": hp.Replicate() if ours else TorchReplicate(), "P": hp.Partial() if ours else TorchPartial()}
    for dim in (0, 1):
        made[f"S{dim}"] = hp.Shard(dim) if ours else TorchShard(dim)
    return [made[part] for part in text.split(",")]


def print_beside_torch() -> None:
    """Ten redistributions of one tensor on a mesh of (2, 2)."""
    mesh = hp.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    theirs = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    say(f"## Redistribution of {SHAPE} fp32 on 4 processes, mesh (2, 2), median ms of the slowest rank\n")
    say("| from | to | ours | torch | ours / torch | our steps |\n| --- | --- | --- | --- | --- | --- |")
    totals = [0.0, 0.0]
    for before, after in CASES:
        layouts = [hp.Layout.from_placements(mesh, placements(text, ours=True), 2) for text in (before, after)]
        local = torch.randn(layouts[0].local_shape(SHAPE, dist.get_rank()))
        x = hp.DTensor.from_local(local, layout=layouts[0], shape=SHAPE)
        y = TorchDTensor.from_local(local, theirs, placements(before, ours=False))
        wanted = placements(after, ours=False)
        works = [
            lambda x=x, target=layouts[1]: x.redistribute(layout=target),
            lambda y=y, wanted=wanted: y.redistribute(placements=wanted).to_local() + 0,
        ]
        ours, torchs = slowest(milliseconds(works))
        steps = ", ".join(step.kind.value for step in hp.plan(*layouts, SHAPE).steps)
        say(f"| {before} | {after} | {ours:.2f} | {torchs:.2f} | {ours / torchs:.2f} | {steps} |")
        totals[0] += ours
        totals[1] += torchs
    say(f"| in all | | {totals[0]:.2f} | {totals[1]:.2f} | {totals[0] / totals[1]:.2f} | |\n")


# -- overlap ------------------------------------------------------------------------------------------


def compute() -> None:
    a, b = torch.ones(1, 4096), torch.ones(4096, 1024)
    for _ in range(4):
        a @ b


def overlap_works(x: hp.DTensor) -> dict[str, Callable[[], object]]:
    """Name -> what is timed: a redistribution of `x` before or behind a computation, and with peers that come late."""
    copies = [hp.Replicate()]
    is_first = dist.get_rank() == 0

    def then(work: Callable[[], object]) -> None:
        x.redistribute(placements=copies)
        work()

    def meanwhile(work: Callable[[], object]) -> None:
        coming = x.redistribute_async(placements=copies)
        work()
        coming.wait()

    def with_late_peers(order: Callable[[Callable[[], object]], None]) -> None:
        if not is_first:
            time.sleep(LATE)
        order(lambda: time.sleep(LATE) if is_first else None)

    late = f"{LATE * 1e3:.0f} ms"
    return {
        "all-gather to (2048, 2048)": lambda: x.redistribute(placements=copies),
        "a computation": compute,
        "one after the other": lambda: then(compute),
        "`redistribute_async`, computation, `wait`": lambda: meanwhile(compute),
        f"three ranks {late} late: `redistribute`, then {late} of the fourth's own": lambda: with_late_peers(then),
        "the same with `redistribute_async` before the fourth's own": lambda: with_late_peers(meanwhile),
    }


def print_overlap() -> None:
    """An asynchronous redistribution behind other work, and many small ones together."""
    mesh = hp.init_device_mesh("cpu", (4,), mesh_dim_names=("a",))
    works = overlap_works(hp.DTensor.from_local(torch.randn(512, 2048), mesh, [hp.Shard(0)]))
    small = [hp.DTensor.from_local(torch.randn(8, 64), mesh, [hp.Shard(0)]) for _ in range(32)]
    target = [[hp.Shard(1)]] * len(small)
    works["32 exchanges of (32, 64), one by one"] = lambda: [y.redistribute(placements=[hp.Shard(1)]) for y in small]
    works["32 exchanges of (32, 64), `redistribute_many`"] = lambda: hp.redistribute_many(small, target)
    say("## Overlap on 4 processes, median ms of the slowest rank\n")
    say("The four processes share two cores, so computation and copying take turns; waiting is what can be hidden.\n")
    say("| what | ms |\n| --- | --- |")
    for name, time_ in zip(works, slowest(milliseconds(list(works.values()))), strict=True):
        say(f"| {name} | {time_:.2f} |")
    say()


def print_pipeline() -> None:
    """Reduce-scatter and all-reduce of 48 MiB, as a pipeline and one behind the other."""
    from hyper_parallel.core.tensor_redistribution import execute, plan_cache

    mesh = hp.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    pending = mesh.layout(None, None, partial={"replicate": "sum", "shard": "sum"})
    x = hp.DTensor.from_local(torch.randn(4096, 3072), layout=pending, shape=(4096, 3072))
    target = mesh.layout("shard", None)
    found: dict[str, list[float]] = {"pipeline": [], "one behind the other": []}
    limit = execute.PIPELINE_BYTES
    for _ in range(3):
        for name, least in (("pipeline", limit), ("one behind the other", 1 << 40)):
            execute.PIPELINE_BYTES = least
            plan_cache.clear()
            found[name] += milliseconds([lambda: x.redistribute(layout=target)], 5)
    execute.PIPELINE_BYTES = limit
    plan_cache.clear()
    say("## Reduce-scatter, then all-reduce of (4096, 3072) fp32 on 4 processes, mesh (2, 2)\n")
    say("| how | ms |\n| --- | --- |")
    for name, times in found.items():
        say(f"| {name} | {slowest([statistics.median(times)])[0]:.1f} |")
    say()


# -- errors -------------------------------------------------------------------------------------------


def operands(dtype: torch.dtype, kind: str) -> list[torch.Tensor]:
    made = []
    for rank in range(dist.get_world_size()):
        generator = torch.Generator().manual_seed(rank)
        x = torch.randn(4096, generator=generator, dtype=torch.float64)
        made.append((x * 10.0 ** (rank % 4) if kind == "of four sizes" else x).to(dtype))
    if kind == "that cancel":
        made[-1] = (made[-1] - made[0]).to(dtype)
    return made


def print_errors() -> None:
    """Largest and mean distance of a sum over all ranks from the exact one."""
    mesh = hp.init_device_mesh("cpu", (4,), mesh_dim_names=("a",))
    say("## Error of a sum over 4 ranks against the exact one (`math.fsum`): largest / mean\n")
    say("| dtype | operands | torch all_reduce | ours | ours, compensated |\n| --- | --- | --- | --- | --- |")
    dtypes = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    for dtype, kind in itertools.product(dtypes, ("alike", "of four sizes", "that cancel")):
        parts = operands(dtype, kind)
        mine = parts[dist.get_rank()]
        theirs = mine.clone()
        dist.all_reduce(theirs)
        x = hp.DTensor.from_local(mine, mesh, [hp.Partial()])
        columns = zip(*(part.double().tolist() for part in parts), strict=True)
        exact = torch.tensor([math.fsum(column) for column in columns], dtype=torch.float64)
        sums = [theirs, x.full_tensor(), x.full_tensor(compensated=True)]
        errors = [(found.double() - exact).abs() for found in sums]
        texts = [f"{float(error.max()):.2g} / {float(error.mean()):.2g}" for error in errors]
        say(f"| {str(dtype).removeprefix('torch.')} | {kind} | {' | '.join(texts)} |")
    say()


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    print_beside_torch()
    print_overlap()
    print_pipeline()
    print_errors()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
