# SPDX-License-Identifier: Apache-2.0
"""A training step of a 25.7 M parameter GPT: unsharded, our fully_shard and torch's, interleaved in one job.

Run under torchrun. Peak memory is that of all tensors, from the allocator's own events (torch.profiler), so buffers
inside the communication library count too where they are tensors.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.profiler import ProfilerActivity, profile, record_function

import hyper_parallel as hp

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from train_gpt import Gpt

SEQUENCE = 128


def build(wrap: Callable[[torch.nn.Module], object] | None) -> tuple[Gpt, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Gpt(width=512, num_layers=8, num_heads=8, sequence=SEQUENCE)
    if wrap is not None:
        for block in model.blocks:
            wrap(block)
        wrap(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)


def step(model: Gpt, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> float:
    loss = model(ids[:, :-1], ids[:, 1:].contiguous())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def peak_bytes(wrap: Callable[[torch.nn.Module], object] | None, ids: torch.Tensor) -> int:
    """Most bytes of tensors alive at once during the third step."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        model, optimizer = build(wrap)
        step(model, optimizer, ids)
        step(model, optimizer, ids)
        with record_function("measured step"):
            step(model, optimizer, ids)
    events = profiler.profiler.kineto_results.events()
    window = next(e for e in events if e.name() == "measured step")
    start, stop = window.start_ns(), window.start_ns() + window.duration_ns()
    alive = peak = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        alive += event.nbytes()
        if start <= event.start_ns() <= stop:
            peak = max(peak, alive)
    return peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=12)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    wraps = {"unsharded": None, "ours": hp.fully_shard, "torch FSDP2": torch_fully_shard}
    if rank == 0:
        print(
            f"## Training step, GPT of 25.7 M parameters, sequence {SEQUENCE}, fp32, {world} processes (gloo), AdamW\n"
        )
        print(
            "| batch per rank | | step ms (median) | over unsharded | over torch FSDP2 "
            "| peak tensor MiB | over torch FSDP2 |"
        )
        print("|---|---|---|---|---|---|---|")
    for rows in (4, 1):
        ids = torch.randint(0, 256, (rows, SEQUENCE + 1), generator=torch.Generator().manual_seed(rank))
        peaks = {name: peak_bytes(wrap, ids) for name, wrap in wraps.items()}
        built = {name: build(wrap) for name, wrap in wraps.items()}
        seconds: dict[str, list[float]] = {name: [] for name in wraps}
        losses: dict[str, float] = {}
        for turn in range(args.steps + 2):
            for name, (model, optimizer) in built.items():
                dist.barrier()
                began = time.perf_counter()
                losses[name] = step(model, optimizer, ids)
                dist.barrier()
                if turn >= 2:
                    seconds[name].append(time.perf_counter() - began)
        assert abs(losses["ours"] - losses["torch FSDP2"]) < 1e-3, losses
        if rank == 0:
            report(rows, {n: statistics.median(s) * 1e3 for n, s in seconds.items()}, peaks)
        del built
    dist.destroy_process_group()


def report(rows: int, times: dict[str, float], peaks: dict[str, int]) -> None:
    for name in times:
        cells = [
            f"{times[name]:.0f}",
            f"{times[name] / times['unsharded']:.2f}",
            f"{times[name] / times['torch FSDP2']:.2f}",
            f"{peaks[name] / 2**20:.0f}",
            f"{peaks[name] / peaks['torch FSDP2']:.2f}",
        ]
        print(f"| {rows} | {name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
