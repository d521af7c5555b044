# SPDX-License-Identifier: Apache-2.0
"""The example trains alike on any number of processes, also after it was killed and resumed on another number."""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = ("--layers", 2, "--width", 32, "--sequence", 32, "--batch", 8, "--steps-planned", 12, "--device", "cpu")
STEPS = 8
LIMIT = 240


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
    """Exit status and output; a script that hangs is killed, and the test fails with what it wrote."""
    with started(num_processes, script, *options, cwd=cwd) as process:
        try:
            output, _ = process.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            kill_all(process)
            pytest.fail(f"{script} {options} did not end within {LIMIT} s; it wrote\n{process.communicate()[0]}")
        return process.returncode, output


def train(num_processes: int, folder: Path, *options: object) -> list[float]:
    """The loss of every step."""
    status, output = run(num_processes, "train_gpt.py", *SMALL, "--quiet", "--out", folder, *options, cwd=folder.parent)
    assert status == 0, output
    losses: list[float] = json.loads((folder / "losses.json").read_text())
    return losses


def kill_after_checkpoint(num_processes: int, checkpoints: Path, *options: object) -> int:
    """Train without end, kill all processes as soon as there is a complete checkpoint; returns its step."""
    wanted = ("--checkpoint-dir", checkpoints, "--checkpoint-every", 3, "--steps", 10_000)
    with started(
        num_processes, "train_gpt.py", *SMALL, "--quiet", *wanted, *options, cwd=checkpoints.parent
    ) as process:
        deadline = time.monotonic() + LIMIT
        while not list(checkpoints.glob("step-*/.metadata")):
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline, "no checkpoint came"
            time.sleep(0.02)
        kill_all(process)
    return max(int(path.parent.name.removeprefix("step-")) for path in checkpoints.glob("step-*/.metadata"))


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    losses = train(1, tmp_path_factory.mktemp("one") / "out", "--steps", STEPS)
    assert losses[-1] < losses[0] - 0.1
    return losses


def test_two_by_two_has_the_losses_of_one_process(tmp_path: Path, one_process: list[float]) -> None:
    losses = train(4, tmp_path / "out", "--dp", 2, "--tp", 2, "--steps", STEPS)
    assert losses == pytest.approx(one_process, abs=1e-3)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((2, "--accumulate", 2), (4, "--dp", 2, "--tp", 2, "--sequence-parallel")),
        ((4, "--dp", 4), (1,)),
    ],
    ids=["2-to-4", "4-to-1"],
)
def test_killed_and_resumed_on_another_number_of_processes(
    tmp_path: Path, one_process: list[float], before: tuple[Any, ...], after: tuple[Any, ...]
) -> None:
    checkpoints = tmp_path / "checkpoints"
    done = kill_after_checkpoint(before[0], checkpoints, *before[1:])
    last = max(done + 3, STEPS)
    expected = one_process if last == STEPS else train(1, tmp_path / "expected", "--steps", last)
    resume = ("--checkpoint-dir", checkpoints, "--resume", "--steps", last)
    resumed = train(after[0], tmp_path / "out", *resume, *after[1:])
    assert resumed == pytest.approx(expected, abs=1e-3)


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    """The example as a module."""
    return runpy.run_path(str(EXAMPLES / "train_gpt.py"))


@pytest.mark.parametrize(
    ("world_size", "options", "parts"),
    [
        (1, "--dp 3", ("--dp 3 x --tp 1 needs 3 processes, there are 1", "--nproc-per-node 3")),
        (2, "--tp 2 --dp 2", ("--dp 2 x --tp 2 needs 4 processes, there are 2", "--nproc-per-node 4")),
        (2, "--tp 2 --heads 3 --width 96", ("--tp 2 does not divide --heads 3",)),
        (1, "--heads 3", ("--heads 3 does not divide --width 128",)),
        (2, "--dp 2 --batch 7", ("--batch 7 rows", "--dp 2 x --accumulate 1")),
        (1, "--accumulate 5", ("--batch 16 rows", "--accumulate 5")),
        (1, "--sequence-parallel", ("--tp above 1", "--tp is 1")),
        (2, "--tp 2 --sequence 33 --sequence-parallel", ("divides --sequence 33",)),
        (1, "--tp 0", ("--tp 0 is too small",)),
        (1, "--dp -1", ("--dp -1 is too small",)),
        (1, "--steps 0", ("--steps 0 is too small",)),
        (1, "--resume", ("--resume needs a folder", "--checkpoint-dir")),
        (1, "--checkpoint-every 2", ("--checkpoint-every needs a folder", "--checkpoint-dir")),
    ],
)
def test_what_cannot_be_is_refused_with_one_line(
    script: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    world_size: int,
    options: str,
    parts: tuple[str, ...],
) -> None:
    monkeypatch.setattr(sys, "argv", ["train_gpt.py", *options.split()])
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    with pytest.raises(SystemExit) as caught:
        script["parse"]()
    message = str(caught.value)
    assert all(part in message for part in parts), message
    assert message.startswith("train_gpt.py: ")
    assert message.count("\n") == 0


def test_an_impossible_layout_ends_all_processes(tmp_path: Path) -> None:
    status, output = run(2, "train_gpt.py", "--dp", 3, cwd=tmp_path)
    assert status != 0
    assert output.startswith("train_gpt.py: --dp 3 x --tp 1 needs 3 processes, there are 2."), output
    # torchrun adds a report of its own, which no script can leave out; there is none of the example's.
    assert 'train_gpt.py", line' not in output, output


def test_without_a_checkpoint_there_is_nothing_to_resume(script: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "step-000004").mkdir()  # cut off: DCP writes .metadata last
    with pytest.raises(SystemExit, match="there is no complete checkpoint in"):
        script["latest_checkpoint"](tmp_path)


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    checkpoints = ("--checkpoint-dir", tmp_path / "checkpoints")
    train(1, tmp_path / "out", *checkpoints, "--steps", 1)
    status, output = run(1, "train_gpt.py", *SMALL, *checkpoints, "--resume", "--heads", 2, cwd=tmp_path)
    assert (status, "Traceback" in output) == (1, False), output
    assert "it was made with --heads 4, not 2" in output


def test_demo(tmp_path: Path) -> None:
    status, output = run(1, "demo.py", "--steps", 8, cwd=tmp_path)
    assert status == 0, output
    assert all(part in output for part in ("first loss", "last loss", "largest difference", "loss curve"))
    curve = tmp_path / "runs" / "demo" / "loss.png"
    assert curve.read_bytes().startswith(b"\x89PNG")
