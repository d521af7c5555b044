# SPDX-License-Identifier: Apache-2.0
"""The code blocks of the pages on layouts and redistribution, and the examples in docstrings, run."""

from __future__ import annotations

import doctest
import importlib
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("page", ["layout.md", "redistribution.md"])
def test_code_blocks_run(page: str) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(encoding="ascii"), re.DOTALL)
    assert len(blocks) >= 3
    exec(compile("\n".join(blocks), page, "exec"), {})


@pytest.mark.parametrize(
    "module",
    [
        "hyper_parallel.core.device_mesh",
        "hyper_parallel.core.layout",
        "hyper_parallel.core.tensor_redistribution.planner",
        "hyper_parallel.platform.virtual.world",
    ],
)
def test_docstring_examples_run(module: str) -> None:
    result = doctest.testmod(importlib.import_module(module))
    assert result.attempted > 0
    assert result.failed == 0
