# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import enum
import os
import random
import signal
import threading
import warnings
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from hyper_parallel.testing import DistributedTestError, distributed


class Color(enum.Enum):
    RED = 1


def failure_of(test: object, **kwargs: object) -> str:
    assert callable(test)
    with pytest.raises(DistributedTestError) as caught:
        test(**kwargs)
    return str(caught.value)


def check_sum(expected: int) -> None:
    x = torch.ones(1)
    dist.all_reduce(x)
    assert x.item() == expected


@distributed(1)
def test_all_reduce_on_one_rank() -> None:
    check_sum(1)


@distributed(2)
def test_all_reduce_on_two_ranks() -> None:
    check_sum(2)


@distributed()
def test_all_reduce_on_four_ranks() -> None:
    check_sum(4)


@pytest.mark.parametrize("value", [3, 7])
@pytest.mark.parametrize("color", [Color.RED])
@distributed(2)
def test_parameters_and_fixtures_reach_the_body(value: int, color: Color, tmp_path: Path) -> None:
    assert value in (3, 7)
    assert color is Color.RED
    (tmp_path / f"rank{dist.get_rank()}").write_text(str(value))
    dist.barrier()
    assert sorted(path.read_text() for path in tmp_path.iterdir()) == [str(value)] * 2


@distributed(2)
def test_launcher_variables() -> None:
    rank = str(dist.get_rank())
    assert (os.environ["RANK"], os.environ["LOCAL_RANK"]) == (rank, rank)
    assert (os.environ["WORLD_SIZE"], os.environ["LOCAL_WORLD_SIZE"]) == ("2", "2")
    assert torch.get_num_threads() == 1


@distributed(2)
@torch.no_grad()
def test_decorators_below_stay_on_the_body() -> None:
    assert not torch.is_grad_enabled()


@distributed(2)
def write_state(directory: Path) -> None:
    assert "LEFT_BY_A_TEST" not in os.environ
    os.environ["LEFT_BY_A_TEST"] = "1"
    state = f"{os.getpid()} {random.random()} {np.random.rand()} {torch.rand(1).item()}"
    (directory / f"{dist.get_rank()}").write_text(state)


def states(directory: Path) -> list[list[str]]:
    """Per rank: process id, then one draw of each random generator."""
    directory.mkdir()
    write_state(directory=directory)
    return [(directory / str(rank)).read_text().split() for rank in range(2)]


def test_workers_are_reused_and_start_afresh(tmp_path: Path) -> None:
    first, second = states(tmp_path / "first"), states(tmp_path / "second")
    assert first == second
    assert first[0][0] != first[1][0]
    assert first[0][1:] == first[1][1:]


@distributed(2)
def test_warnings_are_errors() -> None:
    with pytest.raises(FutureWarning, match="planted"):
        warnings.warn("planted is deprecated", FutureWarning, stacklevel=1)


@distributed(2)
def test_old_collective_names_do_not_warn() -> None:
    gathered = torch.empty(2)
    dist.all_gather_into_tensor(gathered, torch.ones(1))
    dist.reduce_scatter_tensor(torch.empty(1), gathered)


@distributed(2)
def fail_on_rank_one() -> None:
    if dist.get_rank() == 1:
        print("printed before failing")
        raise ValueError("planted")


def test_failing_rank_is_named_and_its_output_shown(tmp_path: Path) -> None:
    before = states(tmp_path / "before")
    text = failure_of(fail_on_rank_one)
    assert "rank 1 failed" in text
    assert "ValueError: planted" in text
    assert "in fail_on_rank_one" in text
    assert "| printed before failing" in text
    assert "rank 0" not in text
    assert states(tmp_path / "after") == before


@distributed(3)
def fail_on_two_ranks() -> None:
    if dist.get_rank() != 1:
        raise ValueError(f"planted {dist.get_rank()}")


def test_every_failing_rank_is_shown() -> None:
    text = failure_of(fail_on_two_ranks)
    assert "ValueError: planted 0" in text
    assert "ValueError: planted 2" in text
    assert "rank 1" not in text


@distributed(2, timeout=60)
def fail_while_the_other_waits() -> None:
    if dist.get_rank() == 1:
        raise ValueError("planted")
    threading.Event().wait()


def test_rank_that_waits_for_a_failed_one_is_given_up_after_a_grace() -> None:
    text = failure_of(fail_while_the_other_waits)
    assert "rank 1 failed" in text
    assert "ValueError: planted" in text
    assert "rank 0 did not end after another rank failed" in text
    assert text.count("in fail_while_the_other_waits") == 2
    test_all_reduce_on_two_ranks()


@distributed(2, timeout=timedelta(seconds=2))
def never_end() -> None:
    threading.Event().wait()


def test_time_out_shows_the_stacks_of_all_ranks() -> None:
    text = failure_of(never_end)
    for rank in range(2):
        assert f"rank {rank} did not end within 2 s" in text
        assert f"stacks of rank {rank}:" in text
    assert text.count("in never_end") == 2
    test_all_reduce_on_two_ranks()


@distributed(2, timeout=3)
def skip_a_collective() -> None:
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1))
    threading.Event().wait()


def test_skipped_collective_times_out_before_the_test() -> None:
    text = failure_of(skip_a_collective)
    assert "rank 0 failed" in text
    assert "dist.all_reduce" in text
    assert "rank 1 did not end after another rank failed" in text
    assert text.count("in skip_a_collective") == 2
    test_all_reduce_on_two_ranks()


@distributed(2)
def exit_on_rank_one() -> None:
    if dist.get_rank() == 1:
        print("last words")
        os._exit(7)
    threading.Event().wait()


@distributed(2)
def be_killed_on_rank_zero() -> None:
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Event().wait()


def test_dead_rank_is_reported_and_replaced() -> None:
    text = failure_of(exit_on_rank_one)
    assert "rank 1 died with exit code 7" in text
    assert "| last words" in text
    assert "rank 0 died with exit code -9 (SIGKILL)" in failure_of(be_killed_on_rank_zero)
    test_all_reduce_on_four_ranks()


@distributed(2)
def leave_a_thread() -> None:
    threading.Thread(target=threading.Event().wait, name="left-behind").start()


@distributed(1)
def leave_a_group() -> None:
    setattr(dist, "destroy_process_group", lambda: None)  # noqa: B010 - mypy refuses the assignment


def test_leftovers_fail_the_test_and_their_process_goes(tmp_path: Path) -> None:
    before = states(tmp_path / "before")
    assert "The test left threads running: left-behind." in failure_of(leave_a_thread)
    assert "The test left a process group behind." in failure_of(leave_a_group)
    after = states(tmp_path / "after")
    assert {rank[0] for rank in before}.isdisjoint(rank[0] for rank in after)


@distributed(2)
def interrupt_the_parent() -> None:
    if dist.get_rank() == 0:
        os.kill(os.getppid(), signal.SIGINT)
    threading.Event().wait()


def test_interrupt_ends_the_workers_of_the_test() -> None:
    # A job started in the background inherits an ignored SIGINT.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            interrupt_the_parent()
    finally:
        signal.signal(signal.SIGINT, before)
    test_all_reduce_on_two_ranks()


@distributed(1)
def take(value: object) -> None:
    raise AssertionError("not reached")


def test_wrong_use_is_refused() -> None:
    with pytest.raises(TypeError, match=r"value \(function\) cannot be pickled.*Create it in the body"):
        take(value=lambda: None)
    with pytest.raises(ValueError, match=r"world_size is 0\. Use at least 1 rank"):
        distributed(0)
    with pytest.raises(ValueError, match=r"timeout is 0 s\. Use a positive time"):
        distributed(timeout=0)
    with pytest.raises(TypeError, match=r"not a module-level function\. Move it there"):
        distributed()(lambda: None)
