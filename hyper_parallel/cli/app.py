# SPDX-License-Identifier: Apache-2.0
"""The commands put together."""

from __future__ import annotations

import typer

from hyper_parallel.cli.plan import plan
from hyper_parallel.cli.show import show


def make_app() -> typer.Typer:
    """The command line as a typer application."""
    app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
    # A layout may begin with "-", which is not an option.
    settings = {"ignore_unknown_options": True}
    app.command(context_settings=settings)(plan)
    app.command(context_settings=settings)(show)
    app.callback()(_describe)
    return app


def _describe() -> None:
    """Layouts and redistributions of distributed tensors, on paper: no framework, no devices."""
