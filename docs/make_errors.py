# SPDX-License-Identifier: Apache-2.0
"""Write docs/errors.md from the docstrings of the error classes."""

from __future__ import annotations

import inspect
from pathlib import Path

from hyper_parallel.core import errors
from hyper_parallel.core.errors import HyperParallelError
from hyper_parallel.core.protocols import PlatformError

PAGE = Path(__file__).with_name("errors.md")
HEAD = """# Errors

Every error this library raises on purpose is a `HyperParallelError`. A message is one line: the call, the tensor, what
is wrong with both values, and what to do. It holds only facts that all ranks know, so all ranks print the same.

This page is made from the docstrings by `docs/make_errors.py`.
"""


def page() -> str:
    """The text of docs/errors.md."""
    classes = [c for c in vars(errors).values() if inspect.isclass(c) and issubclass(c, HyperParallelError)]
    return HEAD + "".join(map(section, [*classes[1:], PlatformError]))


def section(error: type[HyperParallelError]) -> str:
    """One class: its bases, its first line, and the wrong / why / right of its docstring."""
    bases = ", ".join(f"`{base.__name__}`" for base in error.__bases__)
    first, _, rest = inspect.cleandoc(error.__doc__ or "").partition("\n")
    lines = "".join(
        f"- {line}\n"
        for line in " ".join(rest.split()).replace(" Why:", "\nWhy:").replace(" Right:", "\nRight:").splitlines()
    )
    return f"\n## {error.__name__} ({bases})\n\n{first}\n\n{lines}"


if __name__ == "__main__":
    PAGE.write_text(page())
