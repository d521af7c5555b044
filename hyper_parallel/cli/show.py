# SPDX-License-Identifier: Apache-2.0
"""`hyper-parallel show`: which rank holds which part of a tensor."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hyper_parallel.cli.output import print_plain, reports_errors
from hyper_parallel.cli.spec import parse_layout, parse_mesh, parse_shape
from hyper_parallel.core.box import Box, box_numel, box_shape
from hyper_parallel.core.layout import Layout
from hyper_parallel.core.tensor_redistribution.table import show_bytes

MOST_CELLS = 16
"""Pictures with more rows or columns than this are left out of the text."""


@reports_errors
def show(
    layout: Annotated[str, typer.Argument(help='A layout, as in "dp,tp" or "(tp,dp),- sum(cp)".')],
    mesh: Annotated[str, typer.Option(help="Axes and sizes, outermost first, as dp=2,tp=4.")],
    shape: Annotated[str, typer.Option(help="Global shape, as 4096,1024.")],
    itemsize: Annotated[int, typer.Option(min=1, help="Bytes per element.")] = 4,
    max_rows: Annotated[int, typer.Option(min=1, help="Most ranks to list.")] = 32,
    out: Annotated[Path | None, typer.Option(help="Draw to this file as well (.png, .svg, ...).")] = None,
) -> None:
    """Print which rank holds which part of a tensor, as a table and, for one or two dims, as a picture."""
    grid = parse_mesh(mesh)
    parsed = parse_layout(grid, layout)
    sizes = parse_shape(shape)
    parsed.check_shape(sizes, "show")
    print_plain(f"{parsed}   shape {sizes}   mesh {grid}")
    if parsed.partial:
        axes = ", ".join(parsed.partial_axes)
        print_plain(f"Ranks along {axes} hold operands of a pending reduction.")
    picture = picture_lines(parsed, sizes)
    if picture:
        print_plain("\n" + "\n".join(picture) + "\n")
    _print_table(parsed, sizes, itemsize, max_rows)
    if out is not None:
        draw(parsed, sizes, out)
        print_plain(f"drawn to {out}")


def _print_table(layout: Layout, shape: tuple[int, ...], itemsize: int, max_rows: int) -> None:
    mesh = layout.mesh
    table = Table(box=None, pad_edge=False)
    for title in ("rank", *mesh.axis_names, *(f"dim {dim}" for dim in range(len(shape))), "local shape", "bytes"):
        table.add_column(title, justify="right")
    for rank in mesh.ranks[:max_rows]:
        box = layout.box(shape, rank)
        ranges = [f"{start}:{stop}" if start < stop else "none" for start, stop in box]
        local = "x".join(map(str, box_shape(box))) or "scalar"
        row = [str(rank), *map(str, mesh.coord(rank)), *ranges, local, show_bytes(itemsize * box_numel(box))]
        table.add_row(*(Text(cell) for cell in row))
    console = Console(highlight=False, markup=False)
    # As wide as it needs to be: a cut column would hide what was asked for.
    console.print(table, width=max(console.width, 8 + 14 * len(table.columns)), soft_wrap=True)
    left_out = mesh.size() - max_rows
    if left_out > 0:
        print_plain(f"{left_out} more ranks; --max-rows lists them.")


def cells(layout: Layout, shape: Sequence[int]) -> dict[Box, list[int]]:
    """Box -> the ranks that hold it; empty boxes are left out."""
    held: defaultdict[Box, list[int]] = defaultdict(list)
    for rank in layout.mesh.ranks:
        box = layout.box(shape, rank)
        if box_numel(box):
            held[box].append(rank)
    return dict(held)


def picture_lines(layout: Layout, shape: Sequence[int]) -> list[str]:
    """A tensor of one or two dims as a grid of pieces with the ranks that hold them; nothing if it would not fit."""
    if len(shape) not in (1, 2) or 0 in shape:
        return []
    held = _as_matrix(shape, cells(layout, shape))
    rows = sorted({box[0] for box in held})
    columns = sorted({box[1] for box in held})
    if len(rows) > MOST_CELLS or len(columns) > MOST_CELLS:
        return []
    texts = [[ranks_text(held.get((row, column), [])) for column in columns] for row in rows]
    widths = [max(len(f"{start}:{stop}"), *(len(line[i]) for line in texts)) for i, (start, stop) in enumerate(columns)]
    margin = max(len(f"{start}:{stop}") for start, stop in rows)
    rule = " " * margin + " +" + "+".join("-" * (width + 2) for width in widths) + "+"
    titles = (f" {start}:{stop}".ljust(width + 2) for (start, stop), width in zip(columns, widths, strict=True))
    lines = [(" " * margin + "  " + " ".join(titles)).rstrip(), rule]
    for (start, stop), line in zip(rows, texts, strict=True):
        body = "|".join(f" {text.ljust(width)} " for text, width in zip(line, widths, strict=True))
        lines += [f"{start}:{stop}".rjust(margin) + f" |{body}|", rule]
    return lines


def _as_matrix(shape: Sequence[int], held: dict[Box, list[int]]) -> dict[Box, list[int]]:
    """The same with two dims: a vector is one row."""
    return {((0, 1), *box) if len(shape) == 1 else box: ranks for box, ranks in held.items()}


def ranks_text(ranks: Sequence[int]) -> str:
    """`0-3 8`: runs of ranks, each given by its ends."""
    runs = []
    for _, run in itertools.groupby(enumerate(sorted(ranks)), key=lambda pair: pair[1] - pair[0]):
        members = [rank for _, rank in run]
        runs.append(str(members[0]) if len(members) == 1 else f"{members[0]}-{members[-1]}")
    return " ".join(runs)


def draw(layout: Layout, shape: Sequence[int], out: Path) -> None:
    """Draw the pieces of the first two dims to a file, with the ranks that hold them.

    Raises:
        typer.Exit: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Rectangle
    except ImportError:
        print_plain("error: --out draws with matplotlib. Install it: pip install matplotlib.")
        raise typer.Exit(2) from None
    merged: defaultdict[Box, list[int]] = defaultdict(list)
    for box, ranks in cells(layout, shape).items():
        merged[(((0, 1),) * (2 - len(box)) + box)[:2]] += ranks
    height, width = (max((box[dim][1] for box in merged), default=1) for dim in (0, 1))
    figure = Figure(figsize=(6, 6), layout="constrained")
    axes = figure.add_subplot(title=f"{layout}  {tuple(shape)}  {layout.mesh}")
    for i, (((top, bottom), (left, right)), ranks) in enumerate(sorted(merged.items())):
        patch = Rectangle((left, top), right - left, bottom - top, facecolor=f"C{i % 10}", edgecolor="black", alpha=0.5)
        axes.add_patch(patch)
        axes.text((left + right) / 2, (top + bottom) / 2, ranks_text(ranks), ha="center", va="center", wrap=True)
    is_vector = len(shape) == 1
    axes.set(xlim=(0, width), ylim=(height, 0), xlabel="dim 0" if is_vector else "dim 1")
    axes.set_ylabel("" if is_vector else "dim 0")
    figure.savefig(out)
