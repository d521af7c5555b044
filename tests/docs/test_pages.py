# SPDX-License-Identifier: Apache-2.0
"""Every code block of README and docs runs, docstring examples too; links lead somewhere."""

from __future__ import annotations

import contextlib
import doctest
import importlib
import re
import runpy
from pathlib import Path

import pytest

from hyper_parallel.testing import distributed

ROOT = Path(__file__).parents[2]
PAGES = sorted(str(path.relative_to(ROOT)) for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")))
PAGES += sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("hyper_parallel/**/README.md"))


START = "# torchrun --nproc-per-node 2"


def blocks(page: str) -> list[tuple[int, str]]:
    """The code blocks of a page, each with the number of lines before it."""
    text = (ROOT / page).read_text(encoding="ascii")
    found = re.finditer(r"```python\n(.*?)```", text, re.DOTALL)
    return [(text[: block.start(1)].count("\n"), block.group(1)) for block in found]


def join(source: str, line: int, block: str) -> str:
    """A block behind others, on the lines where the page has it."""
    return source + "\n" * (line - source.count("\n")) + block


def programs(page: str) -> list[str]:
    """The blocks of a page, those that say they come after others joined to them."""
    out: list[str] = []
    for line, block in blocks(page):
        header = block.splitlines()[0]
        if header == START:
            out.append(join("", line, block))
        else:
            assert header.startswith(f"{START}, after "), header
            out[-1] = join(out[-1], line, block)
    return out


@pytest.mark.parametrize("page", ["docs/layout.md", "docs/redistribution.md"])
def test_code_runs_without_a_framework(page: str) -> None:
    found = blocks(page)
    assert len(found) >= 3
    source = ""
    for line, block in found:
        source = join(source, line, block)
    exec(compile(source, str(ROOT / page), "exec"), {})


@distributed(2)
def run_program(source: str, page: str, folder: Path) -> None:
    with contextlib.chdir(folder):
        exec(compile(source, str(ROOT / page), "exec"), {})


@pytest.mark.parametrize("page", ["README.md", "docs/dtensor.md", "docs/fully_shard.md"])
def test_code_runs_on_two_ranks(page: str, tmp_path: Path) -> None:
    found = programs(page)
    assert found
    for source in found:
        run_program(source=source, page=page, folder=tmp_path)


def test_all_pages_with_code_are_run() -> None:
    run = {"docs/layout.md", "docs/redistribution.md", "README.md", "docs/dtensor.md", "docs/fully_shard.md"}
    assert {page for page in PAGES if blocks(page)} == run


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    targets = re.findall(r"\]\(([^)#]+)\)", (ROOT / page).read_text())
    local = [target for target in targets if not target.startswith("http")]
    assert [target for target in local if not ((ROOT / page).parent / target).exists()] == []


def test_the_page_of_errors_is_what_the_docstrings_say() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "make_errors.py"))["page"]()
    assert (ROOT / "docs" / "errors.md").read_text() == made, "run docs/make_errors.py"


@pytest.mark.parametrize(
    "module",
    [
        "hyper_parallel.core.bounded_cache",
        "hyper_parallel.core.device_mesh",
        "hyper_parallel.core.layout",
        "hyper_parallel.core.shard.sharding_plan",
        "hyper_parallel.core.tensor_redistribution.planner",
        "hyper_parallel.platform.virtual.world",
    ],
)
def test_docstring_examples_run(module: str) -> None:
    result = doctest.testmod(importlib.import_module(module))
    assert result.attempted > 0
    assert result.failed == 0
