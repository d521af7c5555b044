# SPDX-License-Identifier: Apache-2.0
"""One worker process of the pool: takes a test body, joins a process group, runs it, reports."""

from __future__ import annotations

import faulthandler
import importlib.util
import os
import pickle
import random
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType

BODY_ATTRIBUTE = "distributed_body"
"""Where `@distributed` keeps the undecorated function; decorators further out copy it along."""


@dataclass(frozen=True, slots=True)
class Job:
    """One rank's part of a test.

    Arguments travel pickled: their classes may live in the test module, which the worker loads first.
    """

    module: str
    file: str
    name: str
    arguments: dict[str, bytes]
    rank: int
    world_size: int
    store: str
    backend: str
    group_timeout: timedelta
    path: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a job: the text of a failure, and whether the process may serve another test."""

    failure: str | None
    is_reusable: bool


def main(connection: Connection, log: str, stacks: str) -> None:
    """Serve jobs until the pipe closes. Output goes to the file `log`; SIGUSR1 writes stacks and ends the process."""
    _redirect(Path(log), Path(stacks))
    # Ctrl-C reaches the whole process group; the parent decides what happens to its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Ranks share the machine's few cores; each computes on one thread.
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)
    connection.send("ready")
    while True:
        try:
            job = connection.recv()
        except EOFError:
            return
        outcome = run(job)
        sys.stdout.flush()
        connection.send(outcome)


def _redirect(log: Path, stacks: Path) -> None:
    # Both streams stay open for the life of the process.
    stream = log.open("w", buffering=1)
    os.dup2(stream.fileno(), 1)
    os.dup2(stream.fileno(), 2)
    sys.stdout = sys.stderr = stream
    faulthandler.enable(stream)
    # `chain` goes on to the default action, which ends the process: once it is gone, its stacks are complete.
    faulthandler.register(signal.SIGUSR1, stacks.open("w"), all_threads=True, chain=True)


def run(job: Job) -> Outcome:
    """Run a job's body in a process group, environment and warning filter of its own."""
    threads = _lasting_threads()
    failures = []
    try:
        with _launcher_environment(job), _strict_warnings():
            _call_body(job)
    except BaseException as error:
        frames = error.__traceback__.tb_next if error.__traceback__ else None
        failures.append("".join(traceback.format_exception(type(error), error, frames)))
    leftovers = _leftovers(threads)
    failures.extend(leftovers)
    return Outcome("\n".join(failures) or None, is_reusable=not leftovers)


def _call_body(job: Job) -> None:
    sys.path[:] = job.path
    body = _find_body(job)
    arguments = {name: pickle.loads(value) for name, value in job.arguments.items()}
    with _process_group(job):
        _seed()
        body(**arguments)


def _find_body(job: Job) -> Callable[..., object]:
    found = getattr(_load(job.module, job.file), job.name)
    body: Callable[..., object] = getattr(found, BODY_ATTRIBUTE, found)
    return body


def _load(name: str, file: str) -> ModuleType:
    """The test module under the name it has in the parent, so that pickled classes are the same."""
    module = sys.modules.get(name)
    if module is not None and module.__file__ == file:
        return module
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


@contextmanager
def _launcher_environment(job: Job) -> Iterator[None]:
    before = dict(os.environ)
    rank, world_size = str(job.rank), str(job.world_size)
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world_size, LOCAL_WORLD_SIZE=world_size)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def _strict_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # torch 2.13 renames these two; the new names do not exist in 2.6, which we support.
        renamed = r"`torch\.distributed\.(all_gather_into_tensor|reduce_scatter_tensor)` is deprecated"
        warnings.filterwarnings("ignore", message=renamed, category=FutureWarning)
        yield


@contextmanager
def _process_group(job: Job) -> Iterator[None]:
    import torch.distributed as dist

    store = dist.FileStore(job.store, job.world_size)
    dist.init_process_group(
        job.backend, store=store, rank=job.rank, world_size=job.world_size, timeout=job.group_timeout
    )
    # A body without communication may end, and close its connections, while another rank still makes them.
    if store.add("joined", 1) == job.world_size:
        store.set("all joined", "")
    store.wait(["all joined"], job.group_timeout)
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _seed() -> None:
    import numpy as np
    import torch

    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def _lasting_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if not thread.daemon}


def _leftovers(threads: set[threading.Thread]) -> list[str]:
    """What the body left in the process; destroying the default group has ended the other groups too."""
    import torch.distributed as dist

    names = sorted(thread.name for thread in _lasting_threads() - threads)
    found = [f"The test left threads running: {', '.join(names)}. Join them in the body."] if names else []
    if dist.is_initialized():
        found.append("The test left a process group behind. Do not replace or block its destruction.")
    return found
