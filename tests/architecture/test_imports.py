# SPDX-License-Identifier: Apache-2.0
"""Import directions and purity. See `[tool.importlinter]` in pyproject.toml."""

from __future__ import annotations

import ast
import pkgutil
import subprocess
import sys
from pathlib import Path

import hyper_parallel.core

ROOT = Path(__file__).parents[2]
FRAMEWORKS = ("torch", "mindspore", "numpy")
LINT = "from importlinter.cli import lint_imports_command; lint_imports_command()"


def lint(config: Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", LINT, str(config), "--no-cache"]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


def frameworks_after(code: str) -> list[str]:
    probe = f"import sys\n{code}\nprint([m for m in {FRAMEWORKS!r} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", probe], cwd=ROOT, capture_output=True, text=True, check=True)
    return list(ast.literal_eval(out.stdout))


def test_imports_point_one_way() -> None:
    result = lint(ROOT / "pyproject.toml", ROOT)
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_checker_can_fail(tmp_path: Path) -> None:
    package = tmp_path / "planted"
    for name in ("low", "high"):
        (package / name).mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "high" / "__init__.py").touch()
    (package / "low" / "__init__.py").write_text("import planted.high\n")
    config = tmp_path / "config.toml"
    config.write_text(
        '[tool.importlinter]\nroot_package = "planted"\n[[tool.importlinter.contracts]]\n'
        'name = "layers"\ntype = "layers"\nlayers = ["planted.high", "planted.low"]\n'
    )
    result = lint(config, tmp_path)
    assert result.returncode != 0
    assert "planted.low" in result.stdout


def test_core_and_root_import_no_framework() -> None:
    names = [m.name for m in pkgutil.walk_packages(hyper_parallel.core.__path__, "hyper_parallel.core.")]
    assert len(names) > 15
    imports = "\n".join(f"import {name}" for name in ("hyper_parallel", *names))
    assert frameworks_after(imports) == []


def test_the_harness_imports_no_framework() -> None:
    assert frameworks_after("import hyper_parallel.testing") == []


def test_the_purity_check_can_fail() -> None:
    assert frameworks_after("import numpy") == ["numpy"]
