# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hyper_parallel.testing import DistributedTestError, distributed


def check_sum(expected: int) -> None:
    x = torch.ones(1)
    dist.all_reduce(x)
    assert x.item() == expected


@distributed(1)
def test_runs_on_one_rank() -> None:
    check_sum(1)


@distributed(4)
def test_runs_on_four_ranks() -> None:
    check_sum(4)


@pytest.mark.parametrize("value", [3, 7])
@distributed(2)
def test_parameters_and_fixtures_reach_the_body(value: int, tmp_path: Path) -> None:
    assert value in (3, 7)
    (tmp_path / f"rank{dist.get_rank()}").write_text(str(value))
    dist.barrier()
    assert len(list(tmp_path.iterdir())) == 2


@distributed(2)
def write_pid(directory: Path) -> None:
    (directory / f"{dist.get_rank()}").write_text(str(os.getpid()))


def test_workers_are_reused(tmp_path: Path) -> None:
    pids = []
    for run in ("first", "second"):
        directory = tmp_path / run
        directory.mkdir()
        write_pid(directory=directory)
        pids.append(sorted(path.read_text() for path in directory.iterdir()))
    assert pids[0] == pids[1]


@distributed(2)
def fail_on_rank_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("planted")


def test_failing_rank_is_named() -> None:
    with pytest.raises(DistributedTestError, match="rank 1 failed") as caught:
        fail_on_rank_one()
    assert "planted" in str(caught.value)
    assert "rank 0" not in str(caught.value)


@distributed(2)
def fail_while_the_other_waits() -> None:
    if dist.get_rank() == 1:
        raise ValueError("planted")
    dist.barrier()


@distributed(2, timeout=3)
def skip_a_collective() -> None:
    if dist.get_rank() == 0:
        wait_for_the_missing_rank()


def wait_for_the_missing_rank() -> None:
    dist.recv(torch.ones(1), src=1)


@distributed(2, timeout=2)
def sleep_for_ever() -> None:
    import threading

    threading.Event().wait()


def test_time_out_prints_all_stacks() -> None:
    with pytest.raises(DistributedTestError) as caught:
        sleep_for_ever()
    text = str(caught.value)
    assert text.count("sleep_for_ever") >= 2
    assert "rank 0 did not end within 2 s" in text
    assert "rank 1 did not end" in text


@distributed(2)
def die_on_rank_one() -> None:
    if dist.get_rank() == 1:
        os._exit(7)
    dist.barrier()


def test_dead_rank_is_reported_and_replaced() -> None:
    with pytest.raises(DistributedTestError, match="rank 1 died with exit code 7"):
        die_on_rank_one()
    test_runs_on_four_ranks()
