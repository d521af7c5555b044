# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from hyper_parallel.cli.app import make_app
from hyper_parallel.cli.show import cells, picture_lines, ranks_text
from hyper_parallel.core.box import box_numel, intersect
from hyper_parallel.core.device_mesh import DeviceMesh
from hyper_parallel.core.tensor_redistribution import plan, plan_reshape

ROOT = Path(__file__).parents[2]
MESH = ("--mesh", "dp=2,tp=4")


def call(*args: str) -> Result:
    return CliRunner().invoke(make_app(), args)


def test_plan_prints_the_plan() -> None:
    mesh = DeviceMesh.grid(dp=2, tp=4)
    done = call("plan", *MESH, "--shape", "4096,4096", "dp,tp -> tp,dp")
    assert done.exit_code == 0
    assert done.stdout == f"{plan(mesh.layout('dp', 'tp'), mesh.layout('tp', 'dp'), (4096, 4096))}\n"
    assert "exchange" in done.stdout


def test_plan_takes_each_option() -> None:
    move = "dp,- -> tp,-"
    default = call("plan", *MESH, "--shape", "64,64", move).stdout
    assert "4 B per element" in default
    assert "1024 B" in call("plan", *MESH, "--shape", "64,64", "--itemsize", "1", move).stdout
    capped = call("plan", *MESH, "--shape", "64,64", "--max-bytes", "10240", move).stdout
    assert capped.splitlines()[2].split()[0] == "slice"
    every = call("plan", *MESH, "--shape", "64,64", "--all", move).stdout
    assert every.startswith(default)
    assert "3 other candidates:" in every
    assert every.count("in all") == 4
    assert "0 other candidates." in call("plan", *MESH, "--shape", "64", "--all", "- -> -").stdout


def test_plan_to_another_shape() -> None:
    view = call("plan", *MESH, "--shape", "8,64", "--to-shape", "8,4,16", "dp,tp -> dp,tp,-").stdout
    assert view.splitlines() == ["[dp, tp] on (8, 64) -> [dp, tp, -] on (8, 4, 16)", "  a view of the local tensor"]
    moved = call("plan", *MESH, "--shape", "8,64", "--to-shape", "512", "-,tp -> tp").stdout
    mesh = DeviceMesh.grid(dp=2, tp=4)
    assert moved == f"{plan_reshape(mesh.layout(None, 'tp'), mesh.layout('tp'), (8, 64), (512,))}\n"
    assert "exchange" in moved


def test_a_layout_may_begin_with_a_dash() -> None:
    assert "slice" in call("plan", *MESH, "--shape", "8", "- -> dp").stdout
    assert call("show", "-,dp", *MESH, "--shape", "8,8").stdout.startswith("[-, dp]   shape (8, 8)")


@pytest.mark.parametrize(
    ("args", "fragment"),
    [
        (("plan", *MESH, "--shape", "8", "ep -> dp"), "error: mesh (dp=2, tp=4): it has no axis 'ep'"),
        (("plan", *MESH, "--shape", "8", "dp"), "error: move 'dp': it has no arrow"),
        (("plan", *MESH, "--shape", "8,8", "dp -> tp"), "error: plan of shape (8, 8)"),
        (("plan", *MESH, "--shape", "8", "--max-bytes", "1", "dp -> tp"), "max_bytes is 1"),
        (("plan", *MESH, "--shape", "8", "--to-shape", "9", "dp -> tp"), "the tensor has 8 elements"),
        (("show", *MESH, "--shape", "8,8", "dp"), "error: show of shape (8, 8)"),
        (("show", "--mesh", "dp", "--shape", "8,8", "dp"), "error: mesh 'dp'"),
    ],
)
def test_errors_are_one_line(args: tuple[str, ...], fragment: str) -> None:
    done = call(*args)
    assert done.exit_code == 2
    assert done.stdout == ""
    assert fragment in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_show_lists_every_rank() -> None:
    done = call("show", *MESH, "--shape", "10,8", "--itemsize", "2", "dp,tp")
    lines = done.stdout.splitlines()
    assert lines[0] == "[dp, tp]   shape (10, 8)   mesh (dp=2, tp=4)"
    start = next(i for i, line in enumerate(lines) if line.startswith("rank"))
    rows = [line.split() for line in lines[start + 1 :]]
    assert len(rows) == 8
    assert rows[6] == ["6", "1", "2", "5:10", "4:6", "5x2", "20", "B"]


def test_show_tells_of_pending_reductions_and_of_empty_ranks() -> None:
    out = call("show", *MESH, "--shape", "3", "tp sum(dp)").stdout
    assert "Ranks along dp hold operands of a pending reduction." in out
    assert [line.split() for line in out.splitlines() if "none" in line] == [
        ["3", "0", "3", "none", "0", "0", "B"],
        ["7", "1", "3", "none", "0", "0", "B"],
    ]


def test_show_lists_no_more_than_asked() -> None:
    out = call("show", *MESH, "--shape", "8", "--max-rows", "3", "dp").stdout
    assert "5 more ranks; --max-rows lists them." in out
    assert len([line for line in out.splitlines() if line.endswith("16 B")]) == 3


def test_the_picture() -> None:
    mesh = DeviceMesh.grid(dp=2, tp=2)
    assert picture_lines(mesh.layout("tp", None), (5, 3)) == [
        "      0:3",
        "    +-----+",
        "0:3 | 0 2 |",
        "    +-----+",
        "3:5 | 1 3 |",
        "    +-----+",
    ]
    assert picture_lines(mesh.layout(("tp", "dp")), (4,)) == [
        "      0:1   1:2   2:3   3:4",
        "    +-----+-----+-----+-----+",
        "0:1 | 0   | 2   | 1   | 3   |",
        "    +-----+-----+-----+-----+",
    ]
    assert picture_lines(mesh.layout("tp", None, None), (5, 3, 2)) == []
    assert picture_lines(mesh.layout("tp", None), (0, 3)) == []
    assert picture_lines(DeviceMesh.grid(dp=17).layout("dp"), (17,)) == []


def test_cells_cover_the_tensor_once() -> None:
    mesh = DeviceMesh.grid(dp=2, tp=3, cp=2)
    layout = mesh.layout(("tp", "dp"), "cp", ragged={"dp": (1, 3)})
    held = cells(layout, (10, 5))
    assert sum(map(box_numel, held)) == 50
    boxes = list(held)
    assert all(intersect(a, b) is None for i, a in enumerate(boxes) for b in boxes[:i])


@pytest.mark.parametrize(
    ("ranks", "text"), [([], ""), ([3], "3"), ([2, 0, 1], "0-2"), ([0, 2, 3, 9], "0 2-3 9"), ([0, 1], "0-1")]
)
def test_runs_of_ranks(ranks: list[int], text: str) -> None:
    assert ranks_text(ranks) == text


@pytest.mark.parametrize(("shape", "layout"), [("8", "dp"), ("10,7", "dp,tp"), ("4,4,4", "-,(tp,dp),-"), ("", "")])
def test_show_draws(tmp_path: Path, shape: str, layout: str) -> None:
    target = tmp_path / "ranks.png"
    done = call("show", *MESH, "--shape", shape, "--out", str(target), layout)
    assert done.exit_code == 0
    assert f"drawn to {target}" in done.stdout
    assert target.read_bytes().startswith(b"\x89PNG")


# -- as a process -------------------------------------------------------------------------------------


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False)


def test_the_module_is_the_command() -> None:
    done = run("-m", "hyper_parallel.cli", "plan", *MESH, "--shape", "4096,4096", "dp,tp -> tp,dp")
    assert done.returncode == 0
    assert done.stdout.splitlines()[2].split()[0] == "exchange"
    assert "Usage: hyper-parallel" in run("-m", "hyper_parallel.cli", "--help").stdout


PROBE = """
import sys
from typer.testing import CliRunner
from hyper_parallel.cli.app import make_app
for args in (["plan", "dp -> -"], ["show", "dp"]):
    assert CliRunner().invoke(make_app(), [*args, "--mesh", "dp=2", "--shape", "8"]).exit_code == 0
print([name for name in ("torch", "mindspore", "numpy", "matplotlib") if name in sys.modules])
"""


def test_no_framework_is_imported() -> None:
    assert run("-c", PROBE).stdout.strip() == "[]"


def test_that_check_can_fail() -> None:
    assert run("-c", "import numpy\n" + PROBE).stdout.strip() == "['numpy']"


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_a_missing_extra_is_named(missing: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None\nfrom hyper_parallel.cli.__main__ import main\nmain()"
    done = run("-c", code)
    assert done.returncode == 1
    assert f"{missing} is missing. Install the extra: pip install 'hyper-parallel[cli]'" in done.stderr
