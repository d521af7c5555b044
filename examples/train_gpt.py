# SPDX-License-Identifier: Apache-2.0
"""Train a byte-level GPT on the source text of the Python standard library, across processes.

One process:             python examples/train_gpt.py --steps 200
Two, fully sharded:      torchrun --standalone --nproc-per-node 2 examples/train_gpt.py --dp 2
Two, tensor parallel:    torchrun --standalone --nproc-per-node 2 examples/train_gpt.py --tp 2
Four, both:              torchrun --standalone --nproc-per-node 4 examples/train_gpt.py --dp 2 --tp 2
Stop and go on, on any number of processes:
    ... examples/train_gpt.py --dp 2 --checkpoint-dir runs/a --checkpoint-every 50
    ... examples/train_gpt.py --dp 4 --checkpoint-dir runs/a --resume

Every layout sees the same global batches and begins from the same weights, so the losses agree.

Shapes: B rows of this rank, T tokens, D width, H heads, V = 256 byte values.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn

from hyper_parallel import (
    DeviceMesh,
    MixedPrecisionPolicy,
    ShardingPlan,
    Style,
    column_parallel,
    fully_shard,
    init_device_mesh,
    row_parallel,
    sequence_parallel,
    shard_module,
    vocabulary_parallel,
)

VOCABULARY = 256
SIZES = ("layers", "width", "heads", "sequence")  # options that make another model


# -- the model: as for one device ------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.dropout = dropout
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        b, t, d = x_BTD.shape
        heads = (b, t, self.num_heads, d // self.num_heads)
        q, k, v = (f(x_BTD).view(heads).transpose(1, 2) for f in (self.query, self.key, self.value))
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, t, d))


class Block(nn.Module):
    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, num_heads, dropout)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        x_BTD = x_BTD + self.dropout(self.attention(self.norm1(x_BTD)))
        return x_BTD + self.dropout(self.down(F.gelu(self.up(self.norm2(x_BTD)))))


class Gpt(nn.Module):
    """The head is tied to the token embedding."""

    def __init__(self, width: int, num_layers: int, num_heads: int, sequence: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(sequence, width)
        self.blocks = nn.ModuleList(Block(width, num_heads, dropout) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                scale = 0.02 / math.sqrt(2 * num_layers) if name.endswith(("out.weight", "down.weight")) else 0.02
                nn.init.normal_(parameter, std=scale)
        self.head.weight = self.tokens.weight

    def forward(self, ids_BT: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
        positions_T = torch.arange(ids_BT.shape[1], device=ids_BT.device)
        x_BTD = self.tokens(ids_BT) + self.positions(positions_T)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        logits_BTV = self.head(self.norm(x_BTD))
        return F.cross_entropy(logits_BTV.flatten(0, 1).float(), targets_BT.flatten())


# -- how it is split: nothing of this is in the model ----------------------------------------------


def tensor_parallel_plan(split_sequence: bool) -> ShardingPlan:
    """Megatron's split, two reductions per block; `split_sequence`: norms and dropout work on parts of the sequence."""
    whole, part = (...,), (None, "tp", None)
    between = part if split_sequence else whole
    modules = {
        "tokens": vocabulary_parallel(outputs=between),
        "blocks.*.attention.out": row_parallel(outputs=between),
        "blocks.*.attention.*": column_parallel(),
        "blocks.*.up": column_parallel(),
        "blocks.*.down": row_parallel(outputs=between),
        "head": Style({"weight": ("tp", None)}),
    }
    if not split_sequence:
        return ShardingPlan(modules=modules)
    modules |= {"blocks.*.norm?": sequence_parallel(), "norm": sequence_parallel()}
    gathers = dict.fromkeys(("blocks.*.attention", "blocks.*.up", "head"), whole)
    return ShardingPlan(modules=modules, inputs=gathers)


def parallelize(model: Gpt, mesh: DeviceMesh, args: argparse.Namespace) -> None:
    """Tensor parallelism inside, fully sharded data parallelism around it."""
    if args.tp > 1:
        shard_module(model, mesh["tp"], tensor_parallel_plan(args.sequence_parallel), src_data_rank=None)
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(args.precision)
    policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32 if half else None)
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"], mp_policy=policy)
    fully_shard(model, mesh=mesh["dp"], mp_policy=policy)


# -- data: real text that is on every machine ------------------------------------------------------


def standard_library_text(num_bytes: int) -> torch.Tensor:
    """Source text of the standard library, as a tensor of bytes (num_bytes,)."""
    root = Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    if not (root / "os.py").exists():
        refuse(f"there is no source text of the standard library in {root}. Use a Python that comes with its sources.")
    for path in sorted(root.glob("*.py")) + sorted(root.glob("[a-z]*/*.py")):
        if "site-packages" not in path.parts and "test" not in path.parts:
            text += path.read_bytes()
            if len(text) >= num_bytes:
                break
    return torch.frombuffer(text[:num_bytes], dtype=torch.uint8)


def global_batch(text: torch.Tensor, step: int, rows: int, sequence: int) -> torch.Tensor:
    """The batch of a step, (rows, sequence + 1): the same whatever the number of processes."""
    generator = torch.Generator().manual_seed(1_000_003 + step)
    starts = torch.randint(len(text) - sequence - 1, (rows,), generator=generator)
    return torch.stack([text[s : s + sequence + 1] for s in starts]).long()


# -- training --------------------------------------------------------------------------------------


def learning_rate(step: int, args: argparse.Namespace) -> float:
    warmup = max(args.steps_planned // 10, 1)
    if step < warmup:
        return args.lr * (step + 1) / warmup
    progress = (step - warmup) / max(args.steps_planned - warmup, 1)
    return args.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * min(progress, 1.0))))


def train_step(model: Gpt, optimizer: torch.optim.Optimizer, batch: torch.Tensor, args: argparse.Namespace) -> float:
    """One optimizer step; returns the mean loss of the whole global batch."""
    total = 0.0
    micro_batches = batch.chunk(args.accumulate)
    for rows in micro_batches:
        loss = model(rows[:, :-1], rows[:, 1:].contiguous()) / len(micro_batches)
        loss.backward()
        total += float(loss.detach())
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return total


def mean_over(value: float, mesh: DeviceMesh) -> float:
    """Mean of a number over the data-parallel ranks."""
    x = torch.tensor(value, device=mesh.device_type)
    dist.all_reduce(x, group=mesh.get_group("dp"))
    return float(x) / mesh.size("dp")


class State:
    """What a checkpoint holds. DCP reads and writes each rank's part of it."""

    def __init__(self, model: Gpt, optimizer: torch.optim.Optimizer, sizes: dict[str, int]) -> None:
        self.model = model
        self.optimizer = optimizer
        self.sizes = sizes
        self.step = 0
        self.losses: list[float] = []

    def _names(self) -> list[str]:
        return [name for name, _ in self.model.named_parameters()]

    def save(self, directory: Path) -> None:
        dcp.save(self._contents(), checkpoint_id=directory / f"step-{self.step:06d}")

    def load(self, path: Path) -> None:
        self._check_sizes(path)
        # A fresh optimizer has no state to load into; a step with zero gradients makes it.
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        for group in self.optimizer.param_groups:
            group["lr"] = 0.0
        self.optimizer.step()
        self.optimizer.zero_grad()
        contents = self._contents()
        contents["losses"] = torch.zeros(int(path.name.removeprefix("step-")), dtype=torch.float64)
        dcp.load(contents, checkpoint_id=path)
        self.step = int(contents["step"])
        self.losses = contents["losses"].tolist()

    def _check_sizes(self, path: Path) -> None:
        """Refuse a checkpoint of another model: DCP would fill what fits, and heads show in no shape."""
        saved = torch.zeros(len(self.sizes), dtype=torch.int64)
        dcp.load({"sizes": saved}, checkpoint_id=path)
        for (name, here), there in zip(self.sizes.items(), saved.tolist(), strict=True):
            if here != there:
                refuse(f"--resume from {path}: it was made with --{name} {there}, not {here}. Pass --{name} {there}.")

    def _contents(self) -> dict[str, object]:
        state = self.optimizer.state_dict()["state"]
        optimizer = {name: state[i] for i, name in enumerate(self._names()) if i in state}
        return {
            "sizes": torch.tensor(list(self.sizes.values())),
            "model": self.model.state_dict(),
            "optimizer": optimizer,
            "step": torch.tensor(self.step),
            "losses": torch.tensor(self.losses, dtype=torch.float64),
        }


def latest_checkpoint(directory: Path) -> Path:
    """The newest complete checkpoint: DCP writes `.metadata` last."""
    complete = sorted(path.parent for path in directory.glob("step-*/.metadata"))
    if not complete:
        refuse(f"--resume: there is no complete checkpoint in {directory}. Train with --checkpoint-every first.")
    return complete[-1]


@contextmanager
def progress(args: argparse.Namespace, start: int) -> Iterator[object]:
    """A progress bar on rank 0; yields a function to call after every step."""
    if dist.get_rank() != 0 or args.quiet:
        yield lambda step, loss, tokens: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(),
        TextColumn("{task.description}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns) as bar:
        task = bar.add_task("", total=args.steps, completed=start)

        def show(step: int, loss: float, tokens_per_second: float) -> None:
            memory = peak_memory(args.device) / 2**20
            bar.update(
                task,
                completed=step,
                description=f"loss {loss:.4f}  {tokens_per_second:,.0f} tokens/s  {memory:,.0f} MiB",
            )

        yield show


def peak_memory(device: str) -> int:
    """Bytes of this process at most: tensors on an accelerator, resident memory on the CPU."""
    if device == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return torch.get_device_module(device).max_memory_allocated()


def draw_curve(losses: list[float], path: Path, title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(range(1, len(losses) + 1), losses, linewidth=1.2)
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title=title)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def refuse(text: str) -> NoReturn:
    """End with one line, the same on every rank."""
    raise SystemExit(f"train_gpt.py: {text}")


def check(args: argparse.Namespace, world_size: int) -> None:
    """What cannot be ends here, before anything is started."""
    for name in ("dp", "tp", *SIZES, "batch", "accumulate", "steps"):
        if getattr(args, name) < 1:
            refuse(f"--{name} {getattr(args, name)} is too small. Give at least 1.")
    if args.dp * args.tp != world_size:
        refuse(
            f"--dp {args.dp} x --tp {args.tp} needs {args.dp * args.tp} processes, there are {world_size}. "
            f"Start with torchrun --standalone --nproc-per-node {args.dp * args.tp}, or change --dp and --tp."
        )
    if args.heads % args.tp:
        refuse(f"--tp {args.tp} does not divide --heads {args.heads}. Choose a number of heads that it divides.")
    if args.width % args.heads:
        refuse(f"--heads {args.heads} does not divide --width {args.width}. Choose a width that it divides.")
    if args.batch % (args.dp * args.accumulate):
        refuse(
            f"--batch {args.batch} rows cannot be split over --dp {args.dp} x --accumulate {args.accumulate}. "
            "Choose a multiple."
        )
    if args.sequence_parallel and (args.tp == 1 or args.sequence % args.tp):
        refuse(
            f"--sequence-parallel needs a --tp above 1 that divides --sequence {args.sequence}, and --tp is {args.tp}. "
            "Change one of them."
        )
    if args.checkpoint_dir is None and (args.resume or args.checkpoint_every):
        option = "--resume" if args.resume else "--checkpoint-every"
        refuse(f"{option} needs a folder. Add --checkpoint-dir.")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--dp", type=int, default=0, help="data-parallel ranks (fully sharded); 0: all that --tp leaves")
    add("--tp", type=int, default=1, help="tensor-parallel ranks")
    add("--sequence-parallel", action="store_true", help="split the sequence between tensor-parallel parts")
    add("--layers", type=int, default=4)
    add("--width", type=int, default=128)
    add("--heads", type=int, default=4)
    add("--sequence", type=int, default=128, help="tokens per row")
    add("--batch", type=int, default=16, help="rows per step, over all ranks")
    add("--accumulate", type=int, default=1, help="micro-batches per step")
    add("--steps", type=int, default=100, help="step to stop at")
    add("--steps-planned", type=int, default=0, help="length of the learning rate schedule; 0: --steps")
    add("--lr", type=float, default=1e-3)
    add("--dropout", type=float, default=0.0)
    add("--precision", choices=("fp32", "bf16", "fp16"), default="fp32", help="of parameters in forward and backward")
    add("--device", default="", help="cpu, cuda, npu, ...; default: an accelerator if there is one")
    add("--checkpoint-dir", type=Path, default=None)
    add("--checkpoint-every", type=int, default=0, help="steps; 0: at the end only")
    add("--resume", action="store_true", help="go on from the newest checkpoint in --checkpoint-dir")
    add("--out", type=Path, default=Path("runs/gpt"), help="folder for losses.json and loss.png")
    add("--seed", type=int, default=0)
    add("--quiet", action="store_true", help="no progress bar")
    args = parser.parse_args()
    if not args.device:
        accelerator = torch.accelerator.current_accelerator()
        args.device = accelerator.type if accelerator is not None else "cpu"
    args.steps_planned = args.steps_planned or args.steps
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    args.dp = args.dp or max(world_size // max(args.tp, 1), 1)
    check(args, world_size)
    return args


def main() -> None:
    args = parse()
    mesh = init_device_mesh(args.device, (args.dp, args.tp), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(args.seed)  # the same weights on every rank
    model = Gpt(args.width, args.layers, args.heads, args.sequence, args.dropout).to(args.device)
    num_parameters = sum(p.numel() for p in model.parameters())
    parallelize(model, mesh, args)
    torch.manual_seed(args.seed + 1 + mesh.get_local_rank("dp"))  # dropout differs between rows, not within a tp group
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.1)
    state = State(model, optimizer, {name: getattr(args, name) for name in SIZES})
    if args.resume:
        state.load(latest_checkpoint(args.checkpoint_dir))
    if dist.get_rank() == 0:
        print(f"{num_parameters:,} parameters, mesh {mesh}, from step {state.step} to {args.steps}", flush=True)

    text = standard_library_text(4 << 20)
    mine = args.batch // args.dp
    first_row = mesh.get_local_rank("dp") * mine
    with progress(args, state.step) as show:
        while state.step < args.steps:
            began = time.perf_counter()
            batch = global_batch(text, state.step, args.batch, args.sequence)
            rows = batch[first_row : first_row + mine].to(args.device)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(state.step, args)
            loss = mean_over(train_step(model, optimizer, rows, args), mesh)
            state.losses.append(loss)
            state.step += 1
            show(state.step, loss, args.batch * args.sequence / (time.perf_counter() - began))
            due = args.checkpoint_every and state.step % args.checkpoint_every == 0
            if args.checkpoint_dir is not None and (due or state.step == args.steps):
                state.save(args.checkpoint_dir)
    if dist.get_rank() == 0:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "losses.json").write_text(json.dumps(state.losses))
        draw_curve(state.losses, args.out / "loss.png", f"byte-level GPT, {num_parameters:,} parameters, mesh {mesh}")
        print(f"first loss {state.losses[0]:.4f}, last loss {state.losses[-1]:.4f}, curve in {args.out / 'loss.png'}")
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
