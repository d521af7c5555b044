# SPDX-License-Identifier: Apache-2.0
"""Placements: what one mesh axis does to a tensor. PyTorch's names, frozen values of our own."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from hyper_parallel.core.errors import LayoutError, PartialError


class ReduceOp(enum.Enum):
    """How the pieces of a pending reduction combine."""

    SUM = "sum"
    AVG = "avg"
    MAX = "max"
    MIN = "min"
    PROD = "prod"
    ALL = "all"
    ANY = "any"

    @classmethod
    def of(cls, op: ReduceOp | str) -> ReduceOp:
        """The member named by `op`.

        Raises:
            PartialError: no reduction has that name.
        """
        if isinstance(op, ReduceOp):
            return op
        try:
            return cls(op)
        except ValueError:
            names = ", ".join(member.value for member in cls)
            raise PartialError(f"Partial({op!r}): no such reduction. Use one of {names}.") from None

    @property
    def is_linear(self) -> bool:
        """True for sum and avg, which commute with each other and with scaling."""
        return self in (ReduceOp.SUM, ReduceOp.AVG)

    def __repr__(self) -> str:
        return f"ReduceOp.{self.name}"


class Placement:
    """Base of all placements, so that one `isinstance` covers them."""

    __slots__ = ()

    def is_shard(self, dim: int | None = None) -> bool:
        """True if this splits a dim (that `dim`, if given)."""
        return False

    def is_replicate(self) -> bool:
        """True if every rank of the axis holds the same."""
        return False

    def is_partial(self, reduce_op: str | None = None) -> bool:
        """True if a reduction over the axis is pending (of that kind, if given)."""
        return False


@dataclass(frozen=True, slots=True)
class Shard(Placement):
    """Dim `dim` is cut into as many pieces as the axis has ranks, as `torch.chunk` cuts.

    Attributes:
        dim: Tensor dim, negative counted from the end.
    """

    dim: int

    def is_shard(self, dim: int | None = None) -> bool:
        """True if `dim` is None or the dim this splits."""
        return dim is None or dim == self.dim


@dataclass(frozen=True, slots=True)
class RaggedShard(Placement):
    """Dim `dim` is cut into pieces of given sizes.

    Under an outer split (another axis on the same dim) the sizes are those of the largest outer
    piece; a shorter piece is cut at the same offsets and ends early.

    Attributes:
        dim: Tensor dim, negative counted from the end.
        sizes: Number of indices for each rank of the axis, in order.
    """

    dim: int
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", tuple(self.sizes))
        if any(size < 0 for size in self.sizes):
            raise LayoutError(
                f"RaggedShard({self.dim}, {self.sizes}): a size is negative. "
                "Give one size >= 0 for each rank of the axis."
            )

    def is_shard(self, dim: int | None = None) -> bool:
        """True if `dim` is None or the dim this splits."""
        return dim is None or dim == self.dim


@dataclass(frozen=True, slots=True)
class Replicate(Placement):
    """Every rank of the axis holds the same values."""

    def is_replicate(self) -> bool:
        """Always true."""
        return True


@dataclass(frozen=True, slots=True)
class Partial(Placement):
    """Every rank of the axis holds one operand of a reduction that is still to be done.

    Attributes:
        reduce_op: `sum`, `avg`, `max`, `min`, `prod`, or for bool `all`, `any`.
    """

    reduce_op: str = "sum"

    def __post_init__(self) -> None:
        object.__setattr__(self, "reduce_op", ReduceOp.of(self.reduce_op).value)

    def is_partial(self, reduce_op: str | None = None) -> bool:
        """True if `reduce_op` is None or this one's."""
        return reduce_op is None or reduce_op == self.reduce_op


def as_placement(obj: object) -> Placement:
    """Our placement for `obj`: one of ours, or PyTorch's own.

    Raises:
        LayoutError: `obj` is not a placement, or one that cannot be expressed (a strided shard).
    """
    if isinstance(obj, Placement):
        return obj
    # PyTorch's placements are recognised by name, so that the core imports no framework.
    match type(obj).__name__:
        case "Shard":
            return Shard(int(obj.dim))  # type: ignore[attr-defined]
        case "Replicate":
            return Replicate()
        case "Partial":
            return Partial(str(obj.reduce_op))  # type: ignore[attr-defined]
    raise LayoutError(
        f"placement {obj!r}: not a placement that can be expressed here. "
        "Use Shard, RaggedShard, Replicate or Partial, or build a Layout with ordered axes."
    )
