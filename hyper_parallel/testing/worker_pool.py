# SPDX-License-Identifier: Apache-2.0
"""The worker processes that `@distributed` runs test bodies in, kept from test to test.

Importing torch takes seconds, so a worker does it once and stays. One that died, hung or was left dirty is replaced.
"""

from __future__ import annotations

import atexit
import itertools
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import timedelta
from multiprocessing import connection as mp_connection
from pathlib import Path

from hyper_parallel.testing.worker import Job, Outcome, main

GRACE = timedelta(seconds=5)
"""How long the other ranks may take to end after one has failed, and a worker to write its stacks."""

GROUP_SHARE = 0.75
"""Time-out of the process group as a share of the test's: a stuck collective says so before the test is given up."""


class DistributedTestError(AssertionError):
    """Some rank failed, hung or died; the message says which, with tracebacks or stacks."""


class _Worker:
    """Parent's end of one process."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._stacks = log.with_suffix(".stacks")
        context = multiprocessing.get_context("spawn")
        self.pipe, child = context.Pipe()
        self._process = context.Process(target=main, args=(child, str(log), str(self._stacks)), daemon=True)
        self._process.start()
        child.close()
        self.sentinel = self._process.sentinel
        self._mark = 0

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    def wait_ready(self) -> None:
        try:
            self.pipe.recv()
        except EOFError:
            self.kill()
            raise DistributedTestError(f"a worker {self.cause_of_death()} while it started{self.output()}") from None

    def submit(self, job: Job) -> None:
        self._mark = self._log.stat().st_size
        self.pipe.send(job)

    def outcome(self) -> Outcome | None:
        """What the worker reported, None if it is still running or died before it could."""
        try:
            return self.pipe.recv() if self.pipe.poll() else None
        except (EOFError, ConnectionResetError):
            self._process.join()
            return None

    def cause_of_death(self) -> str:
        code = self._process.exitcode
        assert code is not None
        name = f" ({signal.Signals(-code).name})" if code < 0 else ""
        return f"died with exit code {code}{name}"

    def output(self) -> str:
        """Indented lines that the current test wrote to stdout and stderr."""
        if not self._log.exists():
            return ""
        lines = self._log.read_bytes()[self._mark :].decode(errors="replace").splitlines()
        return "".join(f"\n  | {line}" for line in lines)

    def ask_for_stacks(self) -> None:
        if self.is_alive and self._process.pid is not None:
            os.kill(self._process.pid, signal.SIGUSR1)

    def stacks(self) -> str:
        self._process.join(GRACE.total_seconds())
        return self._stacks.read_text(errors="replace").strip() or "(none written)"

    def kill(self) -> None:
        self._process.kill()
        self._process.join()
        self.pipe.close()


class WorkerPool:
    """As many workers as the largest test so far needed."""

    def __init__(self) -> None:
        self._workers: list[_Worker] = []
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        self._numbers = itertools.count()

    def run(
        self,
        body: Callable[..., object],
        kwargs: dict[str, object],
        *,
        world_size: int,
        timeout: timedelta,
        backend: str,
    ) -> None:
        """Run `body(**kwargs)` on `world_size` ranks.

        Raises:
            DistributedTestError: A rank raised, died, or did not end within `timeout`.
            TypeError: An argument cannot be pickled. Before any rank starts.
        """
        job = Job(
            module=body.__module__,
            file=_source_file(body),
            name=body.__qualname__,
            arguments={name: _pickled(name, value) for name, value in kwargs.items()},
            rank=0,
            world_size=world_size,
            store=str(self._new_path("store")),
            backend=backend,
            group_timeout=timeout * GROUP_SHARE,
            path=tuple(sys.path),
        )
        members = self._members(world_size)
        try:
            for rank, worker in enumerate(members):
                worker.submit(replace(job, rank=rank))
            watch = _Watch(members, timeout)
            watch.wait()
        except BaseException:
            # Ctrl-C or pytest's own time-out: the ranks are still in the middle of the test.
            self._discard(members)
            raise
        if not watch.is_reusable:
            self._discard(members)
        if watch.has_failed:
            raise DistributedTestError(watch.text())

    def close(self) -> None:
        """End all workers."""
        self._discard(list(self._workers))
        if self._directory is not None:
            self._directory.cleanup()
            self._directory = None

    def _members(self, world_size: int) -> list[_Worker]:
        self._discard([worker for worker in self._workers if not worker.is_alive])
        new: list[_Worker] = []
        try:
            new.extend(_Worker(self._new_path("worker")) for _ in range(world_size - len(self._workers)))
            for worker in new:
                worker.wait_ready()
        except BaseException:
            _kill(new)
            raise
        self._workers += new
        return self._workers[:world_size]

    def _new_path(self, stem: str) -> Path:
        if self._directory is None:
            self._directory = tempfile.TemporaryDirectory(prefix="hyper-parallel-test-")
        return Path(self._directory.name) / f"{stem}-{next(self._numbers)}"

    def _discard(self, workers: list[_Worker]) -> None:
        _kill(workers)
        self._workers = [worker for worker in self._workers if worker not in workers]


class _Watch:
    """Waits for the ranks of one test and says what became of them."""

    def __init__(self, members: list[_Worker], timeout: timedelta) -> None:
        self._members = members
        self._running = dict(enumerate(members))
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout.total_seconds()
        self._verdicts: dict[int, str] = {}
        self.is_reusable = True

    @property
    def has_failed(self) -> bool:
        return bool(self._verdicts)

    def wait(self) -> None:
        """Return when every rank has ended, one has died, or time is up."""
        dead: list[int] = []
        while self._running and not dead:
            sources = [source for worker in self._running.values() for source in (worker.pipe, worker.sentinel)]
            if not mp_connection.wait(sources, max(self._deadline - time.monotonic(), 0)):
                self._give_up()
                return
            dead = [rank for rank in list(self._running) if self._collect(rank)]

    def text(self) -> str:
        """What each rank has to say: those with a verdict in the order they ended, then those that printed."""
        silent = [rank for rank, worker in enumerate(self._members) if rank not in self._verdicts and worker.output()]
        quiet = {rank: "was still running" if rank in self._running else "did not fail" for rank in silent}
        parts = {**self._verdicts, **quiet}
        return "\n\n".join(f"rank {rank} {what}{self._members[rank].output()}" for rank, what in parts.items())

    def _collect(self, rank: int) -> bool:
        """Note what became of the rank, if anything did; true if it died."""
        worker = self._running[rank]
        outcome = worker.outcome()
        if outcome is None:
            if worker.is_alive:
                return False
            self._end(rank, worker.cause_of_death(), is_reusable=False)
            return True
        self._end(rank, f"failed:\n{outcome.failure}" if outcome.failure else None, is_reusable=outcome.is_reusable)
        return False

    def _end(self, rank: int, verdict: str | None, *, is_reusable: bool) -> None:
        del self._running[rank]
        self.is_reusable &= is_reusable
        if verdict is not None:
            self._verdicts[rank] = verdict.rstrip()
            self._deadline = min(self._deadline, time.monotonic() + GRACE.total_seconds())

    def _give_up(self) -> None:
        """Take every rank's stacks, which ends the processes."""
        self.is_reusable = False
        late = "after another rank failed" if self._verdicts else f"within {self._timeout.total_seconds():g} s"
        for worker in self._members:
            worker.ask_for_stacks()
        for rank, worker in enumerate(self._members):
            state = f"did not end {late}" if rank in self._running else self._verdicts.get(rank, "did not fail")
            self._verdicts[rank] = f"{state}\nstacks of rank {rank}:\n{worker.stacks()}"


def _source_file(body: Callable[..., object]) -> str:
    # Not inspect.getfile: for a body that has decorators of its own it names the decorator's file.
    file = sys.modules[body.__module__].__file__
    assert file is not None
    return file


def _pickled(name: str, value: object) -> bytes:
    try:
        return pickle.dumps(value)
    except Exception as error:
        kind = type(value).__name__
        raise TypeError(f"@distributed: {name} ({kind}) cannot be pickled: {error}. Create it in the body.") from error


def _kill(workers: Iterable[_Worker]) -> None:
    for worker in workers:
        worker.kill()


pool = WorkerPool()
atexit.register(pool.close)
