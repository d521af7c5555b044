# SPDX-License-Identifier: Apache-2.0
"""Figures as text, and rows as a table."""

from __future__ import annotations

from collections.abc import Sequence


def show_bytes(nbytes: int) -> str:
    """A number of bytes for people: exact below 10 KiB, then three digits."""
    if nbytes < 10 * 1024:
        return f"{nbytes} B"
    amount, unit = nbytes / 1024, "KiB"
    for larger in ("MiB", "GiB", "TiB", "PiB"):
        if amount < 1000:
            break
        amount, unit = amount / 1024, larger
    return f"{amount:.3g} {unit}"


def show_seconds(seconds: float) -> str:
    """A time for people, three digits."""
    if seconds == 0:
        return "0"
    for unit, size in (("us", 1e-6), ("ms", 1e-3)):
        if seconds < 999.5 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


def aligned(rows: Sequence[tuple[str, ...]], num_numbers: int) -> list[str]:
    """The rows as lines; the last `num_numbers` columns are numbers and stand to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    first_number = len(widths) - num_numbers
    return [
        "   ".join(
            cell.ljust(width) if i < first_number else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
