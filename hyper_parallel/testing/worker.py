# SPDX-License-Identifier: Apache-2.0
"""One worker process of the pool: takes a test body, joins its process group, runs it, reports."""

from __future__ import annotations

import faulthandler
import importlib.util
import os
import random
import signal
import sys
import traceback
import warnings
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Job:
    """One rank's part of a test."""

    file: str
    name: str
    kwargs: dict[str, Any]
    rank: int
    world_size: int
    store: str
    backend: str
    seconds: float
    path: tuple[str, ...]


def main(connection: Connection, log: str) -> None:
    """Serve jobs until the pipe closes. Output and stack dumps go to the file `log`."""
    stream = open(log, "w", buffering=1)  # noqa: SIM115 - it stays open for the life of the process
    os.dup2(stream.fileno(), 1)
    os.dup2(stream.fileno(), 2)
    faulthandler.enable(stream)
    faulthandler.register(signal.SIGUSR1, stream, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import torch

    torch.set_num_threads(1)
    connection.send("ready")
    while True:
        try:
            job = connection.recv()
        except EOFError:
            return
        try:
            _run(job)
            connection.send(None)
        except BaseException:
            connection.send(traceback.format_exc())


def _run(job: Job) -> None:
    sys.path[:] = list(job.path)
    body = _body(job)
    launch = {
        "RANK": job.rank,
        "LOCAL_RANK": job.rank,
        "WORLD_SIZE": job.world_size,
        "LOCAL_WORLD_SIZE": job.world_size,
    }
    os.environ.update({name: str(value) for name, value in launch.items()})
    import torch.distributed as dist

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # torch's own notices, none of them about our code.
        warnings.filterwarnings("ignore", module=r"torch\..*")
        warnings.filterwarnings("ignore", message=r".*is deprecated.*", category=FutureWarning)
        dist.init_process_group(
            job.backend,
            init_method=f"file://{job.store}",
            rank=job.rank,
            world_size=job.world_size,
            timeout=timedelta(seconds=max(job.seconds - 5, 5)),
        )
        try:
            _seed()
            body(**job.kwargs)
        finally:
            _leave()


def _leave() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)


def _seed() -> None:
    import numpy as np
    import torch

    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def _body(job: Job) -> Any:
    """The undecorated test function, from its module loaded by path."""
    module = _modules.get(job.file)
    if module is None:
        name = f"_distributed_test_{len(_modules)}_{Path(job.file).stem}"
        spec = importlib.util.spec_from_file_location(name, job.file)
        if spec is None or spec.loader is None:
            raise ImportError(job.file)
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        _modules[job.file] = module
    found: Any = module
    for part in job.name.split("."):
        found = getattr(found, part)
    return getattr(found, "__wrapped__", found)


_modules: dict[str, Any] = {}
