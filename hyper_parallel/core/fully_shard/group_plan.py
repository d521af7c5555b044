# SPDX-License-Identifier: Apache-2.0
"""Where the parameters of a group lie in one flat buffer, and which rows of each a rank owns.

Note [Flat groups]
    The buffer has N equal parts of S elements, rank r owns [r*S, (r+1)*S). A rank boundary that falls
    inside a parameter must fall between two of its rows (indices of dim 0), so that each shard is a
    box of the parameter and can be a DTensor. A parameter crossed by one boundary can be moved until it
    fits; one crossed by several needs S to be a multiple of its row. So S is chosen among multiples of
    the row sizes, the parameters with the largest rows are placed first, and the rest fill the holes.
    Everything follows from global facts (shapes, number of ranks): all ranks plan the same.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hyper_parallel.core.box import chunk_size

ALIGN_BYTES = 16
_GROWTH = 1.03
_MAX_MODULI = 4


@dataclass(frozen=True, slots=True)
class PlacedParam:
    """One parameter in the flat buffer.

    Attributes:
        offset: Position of its first element.
        num_rows: Size of dim 0; the longest over tensor-parallel ranks.
        row_numel: Elements per row, the longest likewise. Rows lie this far apart, also where they are shorter.
        sizes: Rows owned by each rank, in rank order.
    """

    offset: int
    num_rows: int
    row_numel: int
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements of the buffer that the parameter takes up."""
        return self.num_rows * self.row_numel

    @property
    def is_chunked(self) -> bool:
        """True if the ranks own what `torch.chunk` would give them."""
        size = chunk_size(self.num_rows, len(self.sizes))
        return all(rows == max(0, min(size, self.num_rows - rank * size)) for rank, rows in enumerate(self.sizes))

    def rows_of(self, rank: int) -> tuple[int, int]:
        """The half-open range of rows that `rank` owns."""
        start = sum(self.sizes[:rank])
        return start, start + self.sizes[rank]


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """The flat buffer of a group. See Note [Flat groups].

    Attributes:
        num_ranks: Number of parts.
        shard_numel: Elements of each part.
        params: One entry per parameter, in the order given.
    """

    num_ranks: int
    shard_numel: int
    params: tuple[PlacedParam, ...]

    @property
    def numel(self) -> int:
        """Elements of the whole buffer."""
        return self.num_ranks * self.shard_numel

    @property
    def used_numel(self) -> int:
        """Elements that belong to a parameter."""
        return sum(param.numel for param in self.params)

    @property
    def waste(self) -> float:
        """Share of the buffer that belongs to no parameter."""
        return 1 - self.used_numel / self.numel if self.numel else 0.0

    def local_offset(self, index: int, rank: int) -> int:
        """Position in the part of `rank` of the first row it owns of parameter `index`."""
        param = self.params[index]
        start = param.offset + param.rows_of(rank)[0] * param.row_numel
        return min(max(start - rank * self.shard_numel, 0), self.shard_numel)

    def holes(self) -> tuple[tuple[int, int], ...]:
        """The ranges of the buffer that belong to no parameter, in order."""
        taken = sorted((p.offset, p.offset + p.numel) for p in self.params if p.numel)
        edges = [0, *itertools.chain.from_iterable(taken), self.numel]
        return tuple((a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b)


def plan_group(shapes: Sequence[Sequence[int]], num_ranks: int, itemsize: int) -> GroupPlan:
    """Place parameters in a flat buffer of `num_ranks` equal parts.

    Args:
        shapes: Per parameter its shape (rows, ...), at least one dim; under tensor parallelism the longest over
            its ranks.
        num_ranks: Ranks that share the buffer.
        itemsize: Bytes per element, for alignment of the parameters to 16 bytes where no row boundary forbids it.

    Returns:
        The plan with the smallest part that was found. Same on all ranks.

    Communication: none. Memory: the plan.
    """
    rows = [(shape[0], math.prod(shape[1:])) for shape in shapes]
    align = max(1, ALIGN_BYTES // itemsize)
    for part in _part_sizes(rows, num_ranks, align):
        for order in _orders(rows):
            offsets = _place(rows, order, part, num_ranks, align)
            if offsets is not None:
                params = tuple(
                    PlacedParam(offset, n, row, _rows_per_rank(offset, n, row, part, num_ranks))
                    for offset, (n, row) in zip(offsets, rows, strict=True)
                )
                return GroupPlan(num_ranks, part, params)
    raise AssertionError("a part that holds every parameter always fits")


def _part_sizes(rows: Sequence[tuple[int, int]], num_ranks: int, align: int) -> Iterator[int]:
    """Candidates for the size of a part, ascending; the last holds all parameters."""
    total = sum(n * row for n, row in rows)
    by_weight: dict[int, int] = {}
    for n, row in rows:
        if row > 1 and n > 1:
            by_weight[row] = by_weight.get(row, 0) + n * row
    heaviest = sorted(by_weight, key=lambda row: (-by_weight[row], row))[:_MAX_MODULI]
    moduli = {align}
    for count in range(1, len(heaviest) + 1):
        moduli.update(math.lcm(*chosen) for chosen in itertools.combinations(heaviest, count))
    moduli |= {math.lcm(m, align) for m in moduli}
    largest = total + align * (len(rows) + 1)
    if num_ranks == 1:
        yield from (_round_up(total, align), _round_up(largest, align))
        return
    base = max(1, -(-total // num_ranks))
    found: set[int] = {_round_up(largest, align)}
    scale = 1.0
    while base * scale < largest:
        found.update(_round_up(math.ceil(base * scale), m) for m in moduli)
        scale *= _GROWTH
    yield from sorted(size for size in found if size <= _round_up(largest, align))


def _orders(rows: Sequence[tuple[int, int]]) -> Iterator[list[int]]:
    """Orders in which to place the parameters: largest rows first, then largest parameters first."""
    indices = range(len(rows))
    by_row = sorted(indices, key=lambda i: (-rows[i][1], -rows[i][0], i))
    by_size = sorted(indices, key=lambda i: (-rows[i][0] * rows[i][1], i))
    yield by_row
    if by_size != by_row:
        yield by_size


def _place(
    rows: Sequence[tuple[int, int]], order: Sequence[int], part: int, num_ranks: int, align: int
) -> list[int] | None:
    """Offsets for a given part size, first fit in `order`, or None if some parameter finds no place."""
    free = [(0, part * num_ranks)]
    offsets = [0] * len(rows)
    for index in order:
        num_rows, row = rows[index]
        numel = num_rows * row
        if not numel:
            continue
        for gap in free:
            offset = _fit(*gap, numel, row, part, align) if gap[1] - gap[0] >= numel else None
            if offset is not None:
                break
        else:
            return None
        offsets[index] = offset
        slot = free.index(gap)
        left = [(gap[0], offset), (offset + numel, gap[1])]
        free[slot : slot + 1] = [rest for rest in left if rest[0] < rest[1]]
    return offsets


def _fit(start: int, stop: int, numel: int, row: int, part: int, align: int) -> int | None:
    """The first place for a parameter in the gap [start, stop), aligned if there is one."""
    last = stop - numel
    boundary = (start // part + 1) * part
    on_row = start + (boundary - start) % row
    candidates = [_round_up(start, align), boundary]
    candidates += [on_row + k * row for k in range(align)]
    fitting = [o for o in candidates if o <= last and _cuts_between_rows(o, numel, row, part)]
    aligned = [o for o in fitting if o % align == 0]
    if aligned:
        return min(aligned)
    if _cuts_between_rows(start, numel, row, part):
        fitting.append(start)
    return min(fitting, default=None)


def _cuts_between_rows(offset: int, numel: int, row: int, part: int) -> bool:
    """True if every rank boundary inside a parameter at `offset` falls between two of its rows."""
    boundary, end = (offset // part + 1) * part, offset + numel
    if boundary >= end:
        return True
    if (boundary - offset) % row:
        return False
    return boundary + part >= end or part % row == 0


def _rows_per_rank(offset: int, num_rows: int, row: int, part: int, num_ranks: int) -> tuple[int, ...]:
    if not num_rows * row:
        return (num_rows, *[0] * (num_ranks - 1))
    end = offset + num_rows * row
    return tuple(max(0, min(end, (rank + 1) * part) - max(offset, rank * part)) // row for rank in range(num_ranks))


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
