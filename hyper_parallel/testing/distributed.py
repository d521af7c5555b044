# SPDX-License-Identifier: Apache-2.0
"""`@distributed`: run a pytest function on several ranks, each a process of its own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar, cast

from hyper_parallel.testing.worker import BODY_ATTRIBUTE
from hyper_parallel.testing.worker_pool import DistributedTestError as DistributedTestError
from hyper_parallel.testing.worker_pool import pool as pool

Body = TypeVar("Body", bound=Callable[..., object])


def distributed(
    world_size: int = 4, *, timeout: timedelta | float = 60.0, backend: str = "gloo"
) -> Callable[[Body], Body]:
    """Run a module-level pytest function on `world_size` ranks with a default process group of their own.

    The body sees RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE. Its seeds (random, numpy, torch) are 0 and its
    warnings are errors. Parameters and fixture values reach it pickled, as keyword arguments; what it returns is
    dropped. Called, the decorated function raises `DistributedTestError` if a rank fails, hangs, dies, or leaves
    threads or a process group behind.

    Args:
        world_size: Number of ranks, at least 1.
        timeout: Seconds or a timedelta until every rank's Python stacks are shown and the test fails. Collectives of
            the default process group time out at three quarters of it.
        backend: Backend of the process group.

    Returns:
        A decorator. Decorators of the body itself go below it.

    Raises:
        ValueError: `world_size` or `timeout` is not positive.
        TypeError: The function is not defined at module level, so workers cannot find it.

    Communication: none of its own; the body's.
    Memory: one process with torch per rank, kept until the session ends.

    Example:
        @distributed(world_size=4)
        def test_sum() -> None:
            x = torch.ones(1)
            torch.distributed.all_reduce(x)
            assert x.item() == 4
    """
    limit = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
    if world_size < 1:
        raise ValueError(f"distributed: world_size is {world_size}. Use at least 1 rank.")
    if limit <= timedelta(0):
        raise ValueError(f"distributed: timeout is {limit.total_seconds():g} s. Use a positive time.")

    def decorate(body: Body) -> Body:
        if "." in body.__qualname__:
            raise TypeError(f"distributed: {body.__qualname__} is not a module-level function. Move it there.")

        @functools.wraps(body)
        def run(**kwargs: Any) -> None:
            __tracebackhide__ = True
            pool.run(body, kwargs, world_size=world_size, timeout=limit, backend=backend)

        vars(run)[BODY_ATTRIBUTE] = body
        return cast("Body", run)

    return decorate
