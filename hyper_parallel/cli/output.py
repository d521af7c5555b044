# SPDX-License-Identifier: Apache-2.0
"""How commands print, and how they end when something is wrong."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec

import typer
from rich.console import Console

from hyper_parallel.core.errors import HyperParallelError

P = ParamSpec("P")


def print_plain(text: str) -> None:
    """Print lines as they are: tables are not wrapped, brackets are not markup."""
    Console(soft_wrap=True, highlight=False, markup=False).print(text)


def reports_errors(command: Callable[P, None]) -> Callable[P, None]:
    """The command; what this library raises on purpose becomes one line on stderr and exit status 2."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except HyperParallelError as error:
            Console(stderr=True, soft_wrap=True, highlight=False, markup=False).print(f"error: {error}")
            raise typer.Exit(2) from None

    return run
