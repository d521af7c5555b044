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
    threads = max((os.cpu_count() or 1) // num_processes, 1)
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    command = [*launch, str(TRAIN), *map(str, options)]
    if subprocess.run(command, env=environment, check=False).returncode:
        raise SystemExit(f"demo failed: {' '.join(command)}")


def losses(folder: Path) -> list[float]:
    return json.loads((folder / "losses.json").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=120)
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
    print(f"loss curve          {OUT / 'two' / 'loss.png'}")
    print(f"took                {time.perf_counter() - began:.0f} s")
    if two[-1] >= two[0]:
        raise SystemExit("demo failed: the loss did not fall.")
    if not difference <= TOLERANCE:
        raise SystemExit(f"demo failed: the losses differ by {difference:.2e}, more than {TOLERANCE}.")


if __name__ == "__main__":
    main()
