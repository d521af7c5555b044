# SPDX-License-Identifier: Apache-2.0
"""Printed plans of named situations. `pytest tests/golden --rewrite-golden` writes them anew; review the diff."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hyper_parallel.core.device_mesh import DeviceMesh
from hyper_parallel.core.layout import Layout
from hyper_parallel.core.tensor_redistribution import plan

GOLDEN = Path(__file__).parent / "plans.txt"
TWO = DeviceMesh.grid(a=8, b=8)
THREE = DeviceMesh.grid(a=4, b=4, c=4)
FOUR = DeviceMesh.grid(a=2, b=2, c=4, d=4)
SUM_A = {"a": "sum"}

# Name -> source, target, shape, number of steps, bytes received by the worst rank as a share of the tensor's.
# The first ten are the table of reference points of the design; P is a pending sum, S0 a shard of dim 0.
CASES: dict[str, tuple[Layout, Layout, tuple[int, ...], int, float]] = {
    "(8,8) S0,R -> R,S0": (TWO.layout("a", None), TWO.layout("b", None), (64, 64), 1, 0.125),
    "(8,8) S0,S0 -> R,S0": (TWO.layout(("a", "b"), None), TWO.layout("b", None), (64, 64), 1, 0.125),
    "(8,8) S0,S1 -> S1,S0": (TWO.layout("a", "b"), TWO.layout("b", "a"), (64, 64), 1, 0.0157),
    "(8,8) S0,S0 -> S1,S1": (TWO.layout(("a", "b"), None), TWO.layout(None, ("a", "b")), (64, 64), 1, 0.0157),
    "(8,8) R,S0 -> S0,S0": (TWO.layout("b", None), TWO.layout(("a", "b"), None), (64, 64), 1, 0.0157),
    "(8,8) P,P -> R,R": (
        TWO.layout(None, None, partial={"a": "sum", "b": "sum"}),
        TWO.layout(None, None),
        (64, 64),
        1,
        1.97,
    ),
    "(8,8) P,S0 -> S0,R": (TWO.layout("b", None, partial=SUM_A), TWO.layout("a", None), (64, 64), 3, 0.235),
    "(4,4,4) S0,S0,S0 -> S1,S1,S1": (
        THREE.layout(("a", "b", "c"), None),
        THREE.layout(None, ("a", "b", "c")),
        (64, 64),
        1,
        0.0157,
    ),
    "(4,4,4) P,S0,S0 -> S1,R,S1": (
        THREE.layout(("b", "c"), None, partial=SUM_A),
        THREE.layout(None, ("a", "c")),
        (64, 64),
        3,
        0.106,
    ),
    "(2,2,4,4) S0,S1,S2,S3 -> reversed": (
        FOUR.layout("a", "b", "c", "d"),
        FOUR.layout("d", "c", "b", "a"),
        (8, 8, 8, 8),
        1,
        0.0157,
    ),
    "gather of parameters, FSDP on top of TP": (TWO.layout(("b", "a"), None), TWO.layout("b", None), (64, 64), 1, 0.11),
    "full tensor, FSDP on top of TP": (TWO.layout(("b", "a"), None), TWO.layout(None, None), (64, 64), 1, 0.985),
    "gradients, HSDP": (
        TWO.layout(None, None, partial={"a": "avg", "b": "avg"}),
        TWO.layout("b", None),
        (64, 64),
        2,
        1.095,
    ),
    "sequence parallel to tensor parallel": (
        TWO.layout("a", "b", None),
        TWO.layout("a", None, "b"),
        (8, 64, 64),
        1,
        0.0157,
    ),
    "sum over one axis, average over the other": (
        TWO.layout(None, partial={"a": "sum", "b": "avg"}),
        TWO.layout(None),
        (64,),
        1,
        2.0,
    ),
    "uneven": (TWO.layout("a", None), TWO.layout(None, "a"), (20, 13), 1, 0.14),
    "ragged to chunks": (
        TWO.layout("a", None, ragged={"a": (1, 2, 3, 4, 5, 6, 7, 8)}),
        TWO.layout("a", None),
        (36, 2),
        1,
        0.14,
    ),
    "boxes that only change owner, behind an uneven cut": (
        TWO.layout(None, "a", ragged={"a": (1, 2, 3, 4, 5, 6, 7, 8)}),
        TWO.layout(None, "b", ragged={"b": (1, 2, 3, 4, 5, 6, 7, 8)}),
        (2, 36),
        1,
        0.223,
    ),
    "sum that leaves copies, on a large tensor that moves": (
        TWO.layout("a", None, partial={"b": "sum"}),
        TWO.layout(None, "a"),
        (4096, 4096),
        3,
        0.235,
    ),
    "copies to a pending sum": (TWO.layout("b", None), TWO.layout("b", None, partial=SUM_A), (64, 64), 1, 0.0),
    "pending sum to pending maximum": (
        TWO.layout(None, partial=SUM_A),
        TWO.layout(None, partial={"a": "max"}),
        (64,),
        2,
        1.75,
    ),
    "nothing to do": (TWO.layout("a", "b"), TWO.layout("a", "b"), (64, 64), 0, 0.0),
}


def printed() -> str:
    return "\n".join(f"# {name}\n{plan(src, dst, shape)}\n" for name, (src, dst, shape, _, _) in CASES.items())


def test_printed_plans(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--rewrite-golden", default=False):
        GOLDEN.write_text(printed(), encoding="ascii")
    assert printed() == GOLDEN.read_text(encoding="ascii")


@pytest.mark.parametrize("name", CASES)
def test_steps_and_bytes(name: str) -> None:
    src, dst, shape, num_steps, share = CASES[name]
    made: Any = plan(src, dst, shape)
    whole = 4
    for size in shape:
        whole *= size
    assert len(made.steps) == num_steps
    assert made.num_collectives <= 3
    assert max(made.bytes_received(rank) for rank in src.mesh.ranks) <= share * whole
