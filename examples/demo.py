# SPDX-License-Identifier: Apache-2.0
"""`make demo`: train across two processes, stop half way, resume, and compare every loss with one process."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

TRAIN = Path(__file__).with_name("train_gpt.py")
OUT = Path("runs/demo")
TOLERANCE = 1e-3


def train(num_processes: int, *options: object) -> None:
    """Run the example, under torchrun where there is more than one process."""
    launch = [sys.executable]
    if num_processes > 1:
        launch += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_processes}"]
    # Half of the cores: threads that wait for a core which something else uses made a step 4 times slower (2 cores).
    threads = max((os.cpu_count() or 1) // (2 * num_processes), 1)
    environment = {"OMP_NUM_THREADS": str(threads)} | os.environ
    command = [*launch, str(TRAIN), *map(str, options)]
    if subprocess.run(command, env=environment, check=False).returncode:
        raise SystemExit(f"demo failed: {' '.join(command)}")


def losses(folder: Path) -> list[float]:
    return json.loads((folder / "losses.json").read_text())


def draw(two: list[float], one: list[float], resumed_at: int, path: Path) -> None:
    """Both losses above, their difference below."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    steps = range(1, len(two) + 1)
    figure, (above, below) = plt.subplots(
        2, 1, figsize=(8, 5.5), sharex=True, height_ratios=(3, 1), layout="constrained"
    )
    above.plot(steps, one, linewidth=5, color="#c9d7e8", label="one process")
    above.plot(steps, two, linewidth=1.3, color="#1f4e8c", label="two processes, fully_shard")
    above.set(ylabel="loss (nats per byte)", title="byte-level GPT on the source of the Python standard library")
    below.semilogy(steps, [max(abs(a - b), 1e-9) for a, b in zip(two, one, strict=True)], color="#1f4e8c", linewidth=1)
    below.axhline(TOLERANCE, color="#b03030", linewidth=1, linestyle=":")
    below.annotate("allowed", (1, TOLERANCE), (2, -9), textcoords="offset points", color="#b03030", fontsize=8)
    below.set(xlabel="step", ylabel="difference", ylim=(1e-9, 1e-2))
    for axes in (above, below):
        axes.axvline(resumed_at + 0.5, color="grey", linewidth=1, linestyle="--")
        axes.grid(alpha=0.25)
    above.annotate("stopped, resumed", (resumed_at + 0.5, max(two)), (4, -4), textcoords="offset points", fontsize=8)
    above.legend(frameon=False)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    steps = parser.parse_args().steps
    if steps < 2:
        raise SystemExit("demo: --steps must be at least 2, since it stops half way. Use STEPS=20 or more.")
    began = time.perf_counter()
    shutil.rmtree(OUT, ignore_errors=True)
    half = steps // 2
    checkpoints = ("--checkpoint-dir", OUT / "checkpoints", "--steps-planned", steps)

    print(f"== two processes, fully_shard: steps 1 to {half}, then a checkpoint", flush=True)
    train(2, "--dp", 2, "--steps", half, "--out", OUT / "first", *checkpoints)
    print(f"== two processes, resumed from the checkpoint: steps {half + 1} to {steps}", flush=True)
    train(2, "--dp", 2, "--steps", steps, "--resume", "--out", OUT / "two", *checkpoints)
    print(f"== one process, for comparison: steps 1 to {steps}", flush=True)
    train(1, "--steps", steps, "--out", OUT / "one")

    two, one = losses(OUT / "two"), losses(OUT / "one")
    difference = max(abs(a - b) for a, b in zip(two, one, strict=True))
    print(f"\nfirst loss          {two[0]:.4f}")
    print(f"last loss           {two[-1]:.4f}")
    print(f"largest difference  {difference:.2e}  between two processes and one, over {steps} steps")
    draw(two, one, half, OUT / "loss.png")
    print(f"loss curve          {OUT / 'loss.png'}")
    print(f"took                {time.perf_counter() - began:.0f} s")
    if two[-1] >= two[0]:
        raise SystemExit("demo failed: the loss did not fall.")
    if not difference <= TOLERANCE:
        raise SystemExit(f"demo failed: the losses differ by {difference:.2e}, more than {TOLERANCE}.")


if __name__ == "__main__":
    main()
