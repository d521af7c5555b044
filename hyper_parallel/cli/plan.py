# SPDX-License-Identifier: Apache-2.0
"""`hyper-parallel plan`: the steps from one layout to another, before anything is moved."""

from __future__ import annotations

from typing import Annotated

import typer

from hyper_parallel.cli.output import print_plain, reports_errors
from hyper_parallel.cli.spec import parse_mesh, parse_move, parse_shape
from hyper_parallel.core.tensor_redistribution import plan_reshape
from hyper_parallel.core.tensor_redistribution.planner import candidates
from hyper_parallel.core.tensor_redistribution.planner import plan as make_plan


@reports_errors
def plan(
    move: Annotated[str, typer.Argument(help='Two layouts, as in "dp,tp -> tp,dp" or "(tp,dp),- sum(cp) -> -,dp".')],
    mesh: Annotated[str, typer.Option(help="Axes and sizes, outermost first, as dp=2,tp=4.")],
    shape: Annotated[str, typer.Option(help="Global shape, as 4096,1024.")],
    to_shape: Annotated[str | None, typer.Option(help="Global shape afterwards; the second layout lies on it.")] = None,
    itemsize: Annotated[int, typer.Option(min=1, help="Bytes per element.")] = 4,
    max_bytes: Annotated[int | None, typer.Option(min=0, help="Most bytes a rank may hold at once.")] = None,
    all_: Annotated[
        bool, typer.Option("--all", help="Print the other candidates as well, if the shape stays.")
    ] = False,
) -> None:
    """Print the plan of a redistribution: its steps with bytes received, bytes held at once and predicted time."""
    grid = parse_mesh(mesh)
    src, dst = parse_move(grid, move)
    sizes = parse_shape(shape)
    if to_shape is not None:
        print_plain(str(plan_reshape(src, dst, sizes, parse_shape(to_shape), itemsize, max_bytes=max_bytes)))
        return
    chosen = make_plan(src, dst, sizes, itemsize, max_bytes=max_bytes)
    print_plain(str(chosen))
    if not all_:
        return
    others = [other for other in candidates(src, dst, sizes, itemsize) if other != chosen]
    print_plain(f"\n{len(others)} other candidates" + (":" if others else "."))
    for other in others:
        print_plain("\n" + str(other))
