# SPDX-License-Identifier: Apache-2.0
"""`@distributed`: run a test body in several processes that are kept from test to test.

Importing torch takes seconds, so workers do it once and stay. A time-out prints the Python stacks of
every rank; a failure prints every failing rank's traceback; a dead or stuck worker is replaced.
"""

from __future__ import annotations

import atexit
import functools
import inspect
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing import connection as mp_connection
from pathlib import Path
from typing import Any, TypeVar

from hyper_parallel.testing.worker import Job, main

Body = TypeVar("Body", bound=Callable[..., None])
GRACE_SECONDS = 5.0
"""How long the other ranks may take to end after one has failed."""


class DistributedTestError(AssertionError):
    """Some rank failed, hung or died; the message says which, with tracebacks or stacks."""


class _Worker:
    def __init__(self, directory: Path, number: int) -> None:
        self.log = directory / f"worker-{number}.log"
        context = multiprocessing.get_context("spawn")
        self.pipe, child = context.Pipe()
        self.process = context.Process(target=main, args=(child, str(self.log)), daemon=True)
        self.process.start()
        child.close()
        self.mark = 0

    def wait_ready(self) -> None:
        self.pipe.recv()

    def submit(self, job: Job) -> None:
        self.mark = self.log.stat().st_size if self.log.exists() else 0
        self.pipe.send(job)

    def output(self) -> str:
        with open(self.log, errors="replace") as stream:
            stream.seek(self.mark)
            return stream.read().strip()

    def dump_stacks(self) -> None:
        if self.process.is_alive() and self.process.pid is not None:
            os.kill(self.process.pid, signal.SIGUSR1)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


class WorkerPool:
    """Worker processes, as many as the largest test so far needed."""

    def __init__(self) -> None:
        self.workers: list[_Worker] = []
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        self._jobs = 0

    def _grow(self, num: int) -> None:
        if self._directory is None:
            self._directory = tempfile.TemporaryDirectory(prefix="hyper-parallel-test-")
        # Workers share the machine's few cores; each computes on one thread.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        new = [
            _Worker(Path(self._directory.name), self._jobs * 1000 + len(self.workers) + i)
            for i in range(num - len(self.workers))
        ]
        for worker in new:
            worker.wait_ready()
        self.workers.extend(new)

    def run(
        self, body: Callable[..., None], kwargs: dict[str, Any], world_size: int, seconds: float, backend: str
    ) -> None:
        """Run `body(**kwargs)` on `world_size` ranks.

        Raises:
            DistributedTestError: a rank raised, died, or did not end within `seconds`.
        """
        self._jobs += 1
        self._grow(world_size)
        assert self._directory is not None
        store = str(Path(self._directory.name) / f"store-{self._jobs}")
        members = self.workers[:world_size]
        for rank, worker in enumerate(members):
            job = Job(
                inspect.getfile(body), body.__qualname__, kwargs, rank, world_size, store, backend, seconds, tuple(sys.path)
            )
            worker.submit(job)
        report = _Watch(members, seconds).wait()
        if report.is_stuck:
            for worker in members:
                worker.kill()
            self.workers = [w for w in self.workers if w not in members]
        if report.text:
            raise DistributedTestError(report.text)

    def close(self) -> None:
        """End all workers."""
        for worker in self.workers:
            worker.kill()
        self.workers.clear()
        if self._directory is not None:
            self._directory.cleanup()
            self._directory = None


class _Report:
    def __init__(self) -> None:
        self.parts: list[str] = []
        self.is_stuck = False

    @property
    def text(self) -> str:
        return "\n\n".join(self.parts)


class _Watch:
    """Waits for the ranks of one test and says what became of them."""

    def __init__(self, members: list[_Worker], seconds: float) -> None:
        self.members = members
        self.running = dict(enumerate(members))
        self.deadline = time.monotonic() + seconds
        self.seconds = seconds
        self.report = _Report()

    def wait(self) -> _Report:
        while self.running:
            left = self.deadline - time.monotonic()
            sources = [w.pipe for w in self.running.values()]
            ends = [w.process.sentinel for w in self.running.values()]
            ready = mp_connection.wait([*sources, *ends], timeout=max(left, 0))
            if not ready:
                self._give_up()
                break
            for rank in list(self.running):
                self._collect(rank)
        return self.report

    def _collect(self, rank: int) -> None:
        worker = self.running[rank]
        try:
            if worker.pipe.poll():
                failure = worker.pipe.recv()
                del self.running[rank]
                if failure is not None:
                    self._fail(f"rank {rank} failed:\n{failure}{_indented(worker.output())}")
                return
        except EOFError:
            pass
        if not worker.process.is_alive():
            del self.running[rank]
            worker.process.join()
            self.report.is_stuck = True
            self._fail(f"rank {rank} died with exit code {worker.process.exitcode}{_indented(worker.output())}")

    def _fail(self, text: str) -> None:
        self.report.parts.append(text)
        self.deadline = min(self.deadline, time.monotonic() + GRACE_SECONDS)

    def _give_up(self) -> None:
        self.report.is_stuck = True
        why = "after another rank failed" if self.report.parts else f"within {self.seconds:g} s"
        for worker in self.members:
            worker.dump_stacks()
        time.sleep(0.3)  # the signal handlers write their stacks
        for rank, worker in enumerate(self.members):
            state = f"did not end {why}" if rank in self.running else "had ended"
            self.report.parts.append(f"rank {rank} {state}, its stacks:{_indented(worker.output())}")


def _indented(text: str) -> str:
    return "".join(f"\n  | {line}" for line in text.splitlines())


pool = WorkerPool()
atexit.register(pool.close)


def distributed(world_size: int = 2, *, timeout: float = 60.0, backend: str = "gloo") -> Callable[[Body], Body]:
    """Run a module-level pytest function in `world_size` processes with a process group of their own.

    Args:
        world_size: Number of ranks.
        timeout: Seconds until every rank's stacks are printed and the test fails.
        backend: Backend of the process group.

    Returns:
        A decorator. Parameters and fixture values that can be pickled reach the body as keyword arguments. Seeds are 0
        and warnings are errors in each rank.

    Raises:
        DistributedTestError: when the test is called and a rank fails; shows every failing rank's traceback.

    Example:
        @distributed(world_size=4)
        def test_sum() -> None:
            x = torch.ones(1)
            torch.distributed.all_reduce(x)
            assert x.item() == 4
    """

    def decorate(body: Body) -> Body:
        @functools.wraps(body)
        def run(**kwargs: Any) -> None:
            __tracebackhide__ = True
            pool.run(body, kwargs, world_size, timeout, backend)

        return run  # type: ignore[return-value]

    return decorate
