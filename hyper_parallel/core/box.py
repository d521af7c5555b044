# SPDX-License-Identifier: Apache-2.0
"""Boxes of global indices: which part of a tensor a rank owns.

A box is one half-open range `(start, stop)` per tensor dim. Everything a redistribution needs
(who owns what, what overlaps, where it lies in a local tensor) is arithmetic on boxes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

Range: TypeAlias = tuple[int, int]
Box: TypeAlias = tuple[Range, ...]


class Cut(NamedTuple):
    """One split of a dim, seen from one rank.

    Attributes:
        num: Number of pieces (the size of the mesh axis).
        position: Which piece is ours (the coordinate on that axis).
        sizes: The pieces' sizes, or None for the chunk rule.
    """

    num: int
    position: int
    sizes: tuple[int, ...] | None = None


def chunk_size(length: int, num: int) -> int:
    """Size of all chunks but the trailing ones when `length` is cut into `num`, as `torch.chunk` does."""
    return -(-length // num)


def cut_range(start: int, stop: int, cut: Cut) -> Range:
    """The piece of `[start, stop)` that `cut` selects; it may be empty."""
    if cut.sizes is None:
        size = chunk_size(stop - start, cut.num)
        begin = start + size * cut.position
        end = begin + size
    else:
        begin = start + sum(cut.sizes[: cut.position])
        end = begin + cut.sizes[cut.position]
    return min(begin, stop), min(end, stop)


def owned_range(length: int, cuts: Iterable[Cut]) -> Range:
    """The range left of `[0, length)` after all `cuts`, outermost first.

    An empty range is given as `(length, length)`, so that no empty piece shares its start with a
    real one (checkpoints tell pieces apart by their offsets).
    """
    start, stop = 0, length
    for cut in cuts:
        start, stop = cut_range(start, stop, cut)
    return (start, stop) if start < stop else (length, length)


def box_shape(box: Box) -> tuple[int, ...]:
    """Number of indices in each dim."""
    return tuple(stop - start for start, stop in box)


def box_numel(box: Box) -> int:
    """Number of elements; 1 for the box of a 0-dim tensor."""
    return math.prod(stop - start for start, stop in box)


def whole_box(shape: Sequence[int]) -> Box:
    """The box of all indices of `shape`."""
    return tuple((0, size) for size in shape)


def intersect(a: Box, b: Box) -> Box | None:
    """The common part of two boxes, or None if they share no element."""
    out = []
    for (a_start, a_stop), (b_start, b_stop) in zip(a, b, strict=True):
        start, stop = max(a_start, b_start), min(a_stop, b_stop)
        if start >= stop:
            return None
        out.append((start, stop))
    return tuple(out)


def relative_to(box: Box, origin: Box) -> Box:
    """`box` in coordinates that count from the start of `origin`."""
    return tuple((start - base, stop - base) for (start, stop), (base, _) in zip(box, origin, strict=True))


def contains(outer: Box, inner: Box) -> bool:
    """True if every element of `inner` lies in `outer`; an empty `inner` always does."""
    return box_numel(inner) == 0 or all(
        a_start <= b_start and b_stop <= a_stop
        for (a_start, a_stop), (b_start, b_stop) in zip(outer, inner, strict=True)
    )
