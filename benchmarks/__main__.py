# SPDX-License-Identifier: Apache-2.0
"""Run all benchmarks and write their tables to `benchmarks/results/<date>-<machine>.md`."""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import subprocess
import sys
from pathlib import Path

RESULTS = Path(__file__).with_name("results")


def run(module: str, num_processes: int, *options: str) -> str:
    """The table that `python -m benchmarks.<module>` prints."""
    launch = [sys.executable, "-m"]
    if num_processes > 1:
        launch += ["torch.distributed.run", "--standalone", f"--nproc-per-node={num_processes}", "-m"]
    command = [*launch, f"benchmarks.{module}", *options]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PYTHONPATH": str(Path.cwd())}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}\n{done.stderr}")
    print(done.stdout, flush=True)
    return done.stdout


def machine() -> str:
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.machine(),
    )
    return f"{os.cpu_count()} cores, {model}, no accelerator"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the tables to benchmarks/results")
    args = parser.parse_args()
    tables = [run("op_overhead", 1), run("planning", 1), run("redistribution", 4)]
    tables += [run("fully_shard_step", num) for num in (2, 4)]
    if args.write:
        import torch

        RESULTS.mkdir(exist_ok=True)
        name = f"{datetime.datetime.now(tz=datetime.UTC):%Y-%m-%d}-{os.cpu_count()}-cores.md"
        title = f"# {name.removesuffix('.md')}\n\n"
        head = f"{title}{machine()}; torch {torch.__version__}; Python {platform.python_version()}.\n\n"
        (RESULTS / name).write_text(head + "\n".join(tables))


if __name__ == "__main__":
    main()
