# SPDX-License-Identifier: Apache-2.0
"""The example trains alike on any number of processes, also after it was killed and resumed on another number."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = ("--layers", 2, "--width", 32, "--sequence", 32, "--batch", 8, "--steps-planned", 12, "--device", "cpu")
STEPS = 8
LIMIT = 150


def kill_all(process: subprocess.Popen[str]) -> None:
    """SIGKILL a process and all below it; torchrun puts each worker in a session of its own."""
    found = [process.pid]
    for pid in found:
        with contextlib.suppress(FileNotFoundError):
            found += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@contextmanager
def started(num_processes: int, script: str, *options: object, cwd: Path) -> Iterator[subprocess.Popen[str]]:
    """A script, under torchrun where it has several processes; all are killed at the end whatever happens."""
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_processes}"]
    command = [sys.executable, *(launch if num_processes > 1 else []), str(EXAMPLES / script), *map(str, options)]
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            kill_all(process)
        process.communicate()


def run(num_processes: int, script: str, *options: object, cwd: Path) -> tuple[int, str]:
    """Exit status and output."""
    with started(num_processes, script, *options, cwd=cwd) as process:
        output, _ = process.communicate(timeout=LIMIT)
        return process.returncode, output


def train(num_processes: int, folder: Path, *options: object) -> list[float]:
    """The loss of every step."""
    status, output = run(num_processes, "train_gpt.py", *SMALL, "--quiet", "--out", folder, *options, cwd=folder.parent)
    assert status == 0, output
    losses: list[float] = json.loads((folder / "losses.json").read_text())
    return losses


def kill_after_checkpoint(num_processes: int, checkpoints: Path, *options: object) -> None:
    """Train without end, and kill all processes as soon as there is a complete checkpoint."""
    wanted = ("--checkpoint-dir", checkpoints, "--checkpoint-every", 3, "--steps", 10_000)
    with started(
        num_processes, "train_gpt.py", *SMALL, "--quiet", *wanted, *options, cwd=checkpoints.parent
    ) as process:
        deadline = time.monotonic() + LIMIT
        while not list(checkpoints.glob("step-*/.metadata")):
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline, "no checkpoint came"
            time.sleep(0.05)
        kill_all(process)


def assert_same_losses(actual: list[float], expected: list[float]) -> None:
    assert len(actual) >= STEPS
    assert actual[:STEPS] == pytest.approx(expected[:STEPS], abs=1e-3)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    losses = train(1, tmp_path_factory.mktemp("one") / "out", "--steps", STEPS)
    assert losses[-1] < losses[0] - 0.1
    return losses


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_two_by_two_has_the_losses_of_one_process(
    tmp_path: Path, one_process: list[float], sequence_parallel: bool
) -> None:
    extra = ["--sequence-parallel"] if sequence_parallel else []
    assert_same_losses(train(4, tmp_path / "out", "--dp", 2, "--tp", 2, "--steps", STEPS, *extra), one_process)


def test_accumulation_has_the_losses_of_one_process(tmp_path: Path, one_process: list[float]) -> None:
    assert_same_losses(train(2, tmp_path / "out", "--accumulate", 2, "--steps", STEPS), one_process)


@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 1)])
def test_killed_and_resumed_on_another_number_of_processes(
    tmp_path: Path, one_process: list[float], before: int, after: int
) -> None:
    checkpoints = tmp_path / "checkpoints"
    kill_after_checkpoint(before, checkpoints)
    done = max(int(path.parent.name.removeprefix("step-")) for path in checkpoints.glob("step-*/.metadata"))
    last = max(done + 3, STEPS)
    expected = one_process if last == STEPS else train(1, tmp_path / "expected", "--steps", last)
    resumed = train(after, tmp_path / "out", "--checkpoint-dir", checkpoints, "--resume", "--steps", last)
    assert len(resumed) == last
    assert resumed == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (("--dp", 3), ("--dp 3 x --tp 1 needs 3 processes, there are 1", "--nproc-per-node 3")),
        (("--dp", 1, "--heads", 3), ("--heads 3 does not divide --width 128",)),
        (("--accumulate", 5), ("--batch 16 rows", "--accumulate 5")),
        (("--sequence-parallel",), ("--sequence-parallel needs --tp > 1",)),
        (("--resume",), ("--resume needs --checkpoint-dir",)),
        (("--resume", "--checkpoint-dir", "nowhere"), ("no complete checkpoint in nowhere",)),
    ],
)
def test_what_cannot_be_is_said_in_one_line(
    tmp_path: Path, options: tuple[object, ...], parts: tuple[str, ...]
) -> None:
    status, output = run(1, "train_gpt.py", *options, cwd=tmp_path)
    assert status != 0
    assert all(part in output for part in parts), output
    assert "Traceback" not in output


def test_demo(tmp_path: Path) -> None:
    status, output = run(1, "demo.py", "--steps", 8, cwd=tmp_path)
    assert status == 0, output
    assert all(part in output for part in ("first loss", "last loss", "largest difference", "loss curve"))
    curve = tmp_path / "runs" / "demo" / "loss.png"
    assert curve.read_bytes().startswith(b"\x89PNG")
