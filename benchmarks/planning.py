# SPDX-License-Identifier: Apache-2.0
"""Plans: bytes against the lower bound, planning time beside torch's planners, growth with the number of ranks.

Commands: `python -m benchmarks.planning [--pairs 10000] [--no-torch]`.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from hyper_parallel.core.device_mesh import DeviceMesh
from hyper_parallel.core.layout import Layout
from hyper_parallel.core.placement_types import Partial, Replicate, Shard
from hyper_parallel.core.tensor_redistribution import Plan, compile_plan, compiled_plan, plan
from hyper_parallel.core.tensor_redistribution.table import show_bytes
from hyper_parallel.testing.strategies import draw_layout

MESHES = (
    DeviceMesh.grid(a=8, b=8),
    DeviceMesh.grid(a=2, b=3, c=4),
    DeviceMesh.grid(a=16, b=8),
    DeviceMesh.grid(a=2, b=2, c=4, d=4),
    DeviceMesh.grid(a=8, b=16, c=8),
    DeviceMesh.grid(a=64, b=64),
    DeviceMesh.grid(a=8, b=8, c=8, d=8),
)
SIZES = {1: (1 << 16, 1 << 22), 2: (1 << 10, 1 << 14), 3: (1 << 7, 1 << 10)}
KINDS = ("even", "uneven", "ragged")


# -- bytes --------------------------------------------------------------------------------------------


def ranges(layout: Layout, shape: Sequence[int]) -> Any:
    """Starts and stops (2, ndim, ranks) of all ranks' boxes, in mesh order."""
    mesh = layout.mesh
    coords = np.indices(mesh.shape).reshape(mesh.ndim, -1)
    out = np.zeros((2, len(shape), coords.shape[1]), np.int64)
    for dim, (length, splits) in enumerate(zip(shape, layout.splits, strict=True)):
        start, stop = out[0, dim], out[1, dim]
        stop[:] = length
        for axis, sizes in splits:
            position = coords[mesh.axis_index(axis)]
            if sizes is None:
                piece = -(-(stop - start) // mesh.size(axis))
                begin, end = start + piece * position, start + piece * (position + 1)
            else:
                ends = np.cumsum((0, *sizes))
                begin, end = start + ends[position], start + ends[position + 1]
            start[:], stop[:] = np.minimum(begin, stop), np.minimum(end, stop)
    return out


def missing(src: Layout, dst: Layout, shape: Sequence[int]) -> Any:
    """Per rank, the elements of its box under `dst` that its box under `src` lacks."""
    has, wants = ranges(src, shape), ranges(dst, shape)
    common = np.minimum(has[1], wants[1]) - np.maximum(has[0], wants[0])
    return (wants[1] - wants[0]).prod(0) - common.clip(0).prod(0)


def bytes_and_bound(made: Plan) -> tuple[int, int]:
    """Received by the rank that receives most, and what no plan can beat, for plans without pending reductions."""
    steps = [step for step in made.steps if step.kind.communicates]
    nothing = np.zeros(made.src.mesh.size(), np.int64)
    received = sum((missing(step.src, step.dst, made.shape) for step in steps), nothing)
    bound = missing(made.src, made.dst, made.shape).max()
    return int(received.max()) * made.itemsize, int(bound) * made.itemsize


class BytesRow(NamedTuple):
    """Ratios of received bytes to the lower bound, for one kind of sizes."""

    kind: str
    num_pairs: int
    mean: float
    highest: float
    most_collectives: int
    median_microseconds: float


def random_pair(seed: int, kind: str) -> tuple[Layout, Layout, tuple[int, ...]]:
    random_ = random.Random(seed)
    mesh = random_.choice(MESHES)
    ndim = random_.choice((1, 2, 3))
    shape = tuple(random_.randrange(*SIZES[ndim]) for _ in range(ndim))
    if kind == "even":
        unit = mesh.size()
        shape = tuple(-(-size // unit) * unit for size in shape)
    src, dst = (draw_layout(random_.choice, mesh, shape, ragged=kind == "ragged", partial=False) for _ in range(2))
    return src, dst, shape


def bytes_row(kind: str, num_pairs: int) -> BytesRow:
    ratios, seconds = [], []
    most = 0
    for seed in range(num_pairs):
        src, dst, shape = random_pair(seed, kind)
        began = time.perf_counter()
        made = plan(src, dst, shape, 4)
        seconds.append(time.perf_counter() - began)
        received, bound = bytes_and_bound(made)
        most = max(most, made.num_collectives)
        if bound:
            ratios.append(received / bound)
        elif received:
            ratios.append(math.inf)
    median = statistics.median(seconds) * 1e6
    return BytesRow(kind, num_pairs, statistics.mean(ratios), max(ratios), most, median)


def bytes_table(num_pairs: int) -> list[BytesRow]:
    """`num_pairs` in all, a third of each kind of sizes."""
    return [bytes_row(kind, -(-num_pairs // len(KINDS))) for kind in KINDS]


def print_bytes(num_pairs: int) -> None:
    print("## Received bytes over the lower bound\n")
    print("| sizes | pairs | mean | highest | most collectives | planning, median us |")
    print("| --- | --- | --- | --- | --- | --- |")
    for row in bytes_table(num_pairs):
        print(
            f"| {row.kind} | {row.num_pairs} | {row.mean:.4f} | {row.highest:.3f} | {row.most_collectives} "
            f"| {row.median_microseconds:.0f} |"
        )
    print()


# -- time ---------------------------------------------------------------------------------------------

# The ten cases of the reference table: sizes of the mesh, and per axis of it what a layout does with the tensor.
CASES = (
    ((8, 8), "S0 R", "R S0"),
    ((8, 8), "S0 S0", "R S0"),
    ((8, 8), "S0 S1", "S1 S0"),
    ((8, 8), "S0 S0", "S1 S1"),
    ((8, 8), "R S0", "S0 S0"),
    ((8, 8), "P P", "R R"),
    ((8, 8), "P S0", "S0 R"),
    ((4, 4, 4), "S0 S0 S0", "S1 S1 S1"),
    ((4, 4, 4), "P S0 S0", "S1 R S1"),
    ((2, 2, 4, 4), "S0 S1 S2 S3", "S3 S2 S1 S0"),
)
NAMES = ("a", "b", "c", "d")


def shape_of(sizes: tuple[int, ...]) -> tuple[int, ...]:
    return (64, 64, 64, 64) if len(sizes) == 4 else (4096, 4096)


def our_layout(sizes: tuple[int, ...], spec: str) -> Layout:
    mesh = DeviceMesh.grid(**dict(zip(NAMES, sizes, strict=False)))
    placements = [Partial() if p == "P" else Replicate() if p == "R" else Shard(int(p[1])) for p in spec.split()]
    return Layout.from_placements(mesh, placements, len(shape_of(sizes)))


def microseconds(work: Callable[[], object], rounds: int) -> float:
    """Median time of one call."""
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e6


class TorchPlanners:
    """torch's two planners on meshes of 64 ranks that exist on paper only (its fake process group)."""

    def __init__(self) -> None:
        import torch
        import torch.distributed as dist
        from torch.distributed.tensor import _redistribute
        from torch.testing._internal.distributed.fake_pg import FakeStore

        self.torch = torch
        self.redistribute = _redistribute
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=64)

    def specs(self, sizes: tuple[int, ...], *texts: str) -> list[Any]:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Partial as TorchPartial
        from torch.distributed.tensor import Replicate as TorchReplicate
        from torch.distributed.tensor import Shard as TorchShard
        from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=NAMES[: len(sizes)])
        empty = self.torch.empty(shape_of(sizes), device="meta")
        meta = TensorMeta(empty.shape, empty.stride(), empty.dtype)
        made = {"P": TorchPartial(), "R": TorchReplicate(), **{f"S{dim}": TorchShard(dim) for dim in range(4)}}
        return [DTensorSpec(mesh, tuple(made[p] for p in text.split()), tensor_meta=meta) for text in texts]

    def row(self, sizes: tuple[int, ...], src: str, dst: str) -> list[str]:
        """Median times and numbers of communicating steps of the greedy and the graph planner."""
        before, after = self.specs(sizes, src, dst)
        out = []
        for is_graph in (False, True):

            def work(is_graph: bool = is_graph) -> Any:
                self.redistribute.clear_redistribute_planner_cache()
                return self.redistribute._gen_transform_infos_non_cached(before, after, is_graph)

            began = time.perf_counter()
            found = work()
            took = time.perf_counter() - began
            median = microseconds(work, 11) if took < 0.05 else took * 1e6
            moves = [info.src_dst_placements for info in found]
            num = sum(not p.is_replicate() and p != q for p, q in moves)
            out += [f"{median:.0f}", str(num)]
        return out


def print_times(*, with_torch: bool) -> None:
    print("## Planning, median us of one call, and communicating steps\n")
    head = ["mesh", "case", "cold", "cached", "steps"]
    theirs = TorchPlanners() if with_torch else None
    head += ["torch greedy", "steps", "torch graph", "steps"] if theirs else []
    print(f"| {' | '.join(head)} |\n|{' --- |' * len(head)}")
    for sizes, before, after in CASES:
        src, dst, shape = our_layout(sizes, before), our_layout(sizes, after), shape_of(sizes)
        cold = microseconds(lambda: plan(src, dst, shape, 4), 101)  # noqa: B023 (called at once)
        compiled_plan(src, dst, shape, 4, 0)
        cached = microseconds(lambda: compiled_plan(src, dst, shape, 4, 0), 1001)  # noqa: B023
        row = [str(sizes), f"{before} -> {after}", f"{cold:.0f}", f"{cached:.2f}"]
        row.append(str(plan(src, dst, shape, 4).num_collectives))
        row += theirs.row(sizes, before, after) if theirs else []
        print(f"| {' | '.join(row)} |", flush=True)
    print()


# -- growth -------------------------------------------------------------------------------------------


def print_growth() -> None:
    """An all-to-all over all ranks of ever larger meshes: from rows to columns, 4096 bytes for each pair of ranks."""
    print("## An exchange of all ranks with all, 4096 B per pair\n")
    print("| ranks | plan us | ready for one rank ms | us per peer | received per rank | sent per rank |")
    print("| --- | --- | --- | --- | --- | --- |")
    for outer, inner in ((16, 8), (128, 8), (512, 8)):
        mesh = DeviceMesh.grid(a=outer, b=inner)
        size = mesh.size() * 32
        src, dst = mesh.layout(("a", "b"), None), mesh.layout(None, ("a", "b"))
        cold = microseconds(lambda: plan(src, dst, (size, size), 4), 21)  # noqa: B023
        made = plan(src, dst, (size, size), 4)
        ready = microseconds(lambda: compile_plan(made, 5), 5)  # noqa: B023
        print(
            f"| {mesh.size()} | {cold:.0f} | {ready / 1e3:.1f} | {ready / mesh.size():.1f} "
            f"| {show_bytes(made.bytes_received(5))} | {show_bytes(made.bytes_sent(5))} |",
            flush=True,
        )
    print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=10_000, help="random pairs of layouts")
    parser.add_argument("--no-torch", action="store_true", help="leave torch's planners out")
    args = parser.parse_args()
    print_bytes(args.pairs)
    print_times(with_torch=not args.no_torch)
    print_growth()


if __name__ == "__main__":
    main()
