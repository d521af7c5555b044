# SPDX-License-Identifier: Apache-2.0
"""Layout: which mesh axes split which tensor dim, in which order, and which reductions are pending."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn, TypeAlias

from hyper_parallel.core.box import Box, Cut, box_shape, owned_range
from hyper_parallel.core.device_mesh import DeviceMesh, as_mesh
from hyper_parallel.core.errors import LayoutError, PartialError, UnevenError
from hyper_parallel.core.placement_types import (
    Partial,
    Placement,
    RaggedShard,
    ReduceOp,
    Replicate,
    Shard,
    as_placement,
)

DimSpec: TypeAlias = "str | Sequence[str] | None"
PartialSpec: TypeAlias = "Mapping[str, ReduceOp | str] | Iterable[tuple[str, ReduceOp | str]]"
RaggedSpec: TypeAlias = "Mapping[str, Sequence[int]] | Iterable[tuple[str, Sequence[int]]]"
Split: TypeAlias = "tuple[str, tuple[int, ...] | None]"
"""One axis that splits a dim, and the sizes of its pieces (None: the chunk rule)."""

_interned: weakref.WeakValueDictionary[Any, Layout] = weakref.WeakValueDictionary()


class Layout:
    """How a tensor lies over a mesh.

    `dims[i]` holds the axes that split tensor dim i, outermost first: `("tp", "dp")` cuts by tp and
    then every piece by dp. Pieces follow `torch.chunk` unless the axis has `ragged` sizes. Axes that
    appear nowhere hold copies. Equal layouts are one object, so they compare and hash at once.

    Args:
        mesh: The mesh, ours or PyTorch's.
        dims: Per tensor dim an axis name, several names (outermost first), or None.
        partial: Axis -> pending reduction. Several pending reductions must commute.
        ragged: Axis -> sizes of its pieces, for axes that appear in `dims`.

    Raises:
        MeshError: unknown axis.
        LayoutError: an axis used twice, or ragged sizes that do not fit the axis.
        PartialError: pending reductions that do not commute.

    Communication: none. Memory: none beyond the value itself.

    Example:
        >>> mesh = DeviceMesh.grid(dp=2, tp=2)
        >>> layout = mesh.layout(("tp", "dp"), None)
        >>> layout.local_shape((5, 3), rank=0)
        (2, 3)
    """

    __slots__ = (
        "__weakref__",
        "_axis_dim",
        "_cotangent",
        "_hash",
        "dims",
        "is_replicated",
        "mesh",
        "partial",
        "ragged",
        "splits",
    )

    mesh: DeviceMesh
    dims: tuple[tuple[str, ...], ...]
    partial: tuple[tuple[str, ReduceOp], ...]
    ragged: tuple[tuple[str, tuple[int, ...]], ...]
    splits: tuple[tuple[Split, ...], ...]
    is_replicated: bool

    def __new__(
        cls,
        mesh: Any,
        dims: Iterable[DimSpec],
        *,
        partial: PartialSpec | None = None,
        ragged: RaggedSpec | None = None,
    ) -> Layout:
        """The one object with these values."""
        mesh = as_mesh(mesh)
        canonical = tuple(_axes_of(dim) for dim in dims)
        pending = _sorted_by_axis(mesh, _items(partial), ReduceOp.of)
        sizes = _sorted_by_axis(mesh, _items(ragged), tuple)
        key = (mesh, canonical, pending, sizes)
        found = _interned.get(key)
        if found is not None:
            return found
        _check(mesh, canonical, pending, sizes)
        return cls._intern(key)

    @classmethod
    def _intern(cls, key: Any) -> Layout:
        self = object.__new__(cls)
        mesh, dims, pending, sizes = key
        by_axis = dict(sizes)
        put = object.__setattr__
        put(self, "mesh", mesh)
        put(self, "dims", dims)
        put(self, "partial", pending)
        put(self, "ragged", sizes)
        put(self, "splits", tuple(tuple((a, by_axis.get(a)) for a in axes) for axes in dims))
        put(self, "is_replicated", not pending and not any(dims))
        put(self, "_hash", hash(key))
        put(self, "_axis_dim", {axis: i for i, axes in enumerate(dims) for axis in axes})
        put(self, "_cotangent", None)
        return _interned.setdefault(key, self)

    # -- values ---------------------------------------------------------------------------------

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"Layout.{name}: a layout never changes. Build a new one.")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"Layout.{name}: a layout never changes. Build a new one.")

    def __hash__(self) -> int:
        return self._hash  # type: ignore[no-any-return, attr-defined]

    # Equal layouts are interned, so the inherited identity comparison is comparison by value.

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.mesh, self.dims, self.partial, self.ragged)

    def __copy__(self) -> Layout:
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> Layout:
        return self

    def __repr__(self) -> str:
        text = f"Layout({self.mesh!r}, {self.dims!r}"
        if self.partial:
            text += f", partial={ {axis: op.value for axis, op in self.partial}!r}"
        if self.ragged:
            text += f", ragged={dict(self.ragged)!r}"
        return text + ")"

    def __str__(self) -> str:
        """One line: `[dp, -, (tp, ep)] sum(cp)`; `~` marks an axis with sizes of its own."""
        parts = []
        for splits in self.splits:
            names = [axis + ("~" if sizes is not None else "") for axis, sizes in splits]
            parts.append(names[0] if len(names) == 1 else f"({', '.join(names)})" if names else "-")
        pending = "".join(f" {op.value}({axis})" for axis, op in self.partial)
        return f"[{', '.join(parts)}]{pending}"

    # -- what it says ---------------------------------------------------------------------------

    @property
    def ndim(self) -> int:
        """Number of tensor dims."""
        return len(self.dims)

    @property
    def sharded_axes(self) -> tuple[str, ...]:
        """The axes that split some dim, in mesh order."""
        return tuple(axis for axis in self.mesh.axis_names if axis in self._axis_dim)  # type: ignore[attr-defined]

    @property
    def partial_axes(self) -> tuple[str, ...]:
        """The axes with a pending reduction, in mesh order."""
        return tuple(axis for axis, _ in self.partial)

    def dim_of(self, axis: str) -> int | None:
        """The tensor dim that `axis` splits, or None."""
        return self._axis_dim.get(axis)  # type: ignore[no-any-return, attr-defined]

    def op_of(self, axis: str) -> ReduceOp | None:
        """The reduction pending over `axis`, or None."""
        for name, op in self.partial:
            if name == axis:
                return op
        return None

    @property
    def cotangent(self) -> Layout:
        """Layout of the gradient of a local tensor with this layout: pending reductions become copies.

        See Note [Gradients have layouts] in core/dtensor.py.
        """
        found: Layout | None = self._cotangent  # type: ignore[attr-defined]
        if found is None:
            found = self.without_partial()
            object.__setattr__(self, "_cotangent", found)
        return found

    # -- geometry -------------------------------------------------------------------------------

    def cuts(self, dim: int, rank: int) -> tuple[Cut, ...]:
        """How `rank` cuts tensor dim `dim`, outermost first."""
        coord, mesh = self.mesh.coord(rank), self.mesh
        out = []
        for axis, sizes in self.splits[dim]:
            index = mesh.axis_names.index(axis)
            out.append(Cut(mesh.shape[index], coord[index], sizes))
        return tuple(out)

    def box(self, shape: Sequence[int], rank: int) -> Box:
        """Global indices that `rank` holds of a tensor of global `shape`."""
        return tuple(
            owned_range(size, self.cuts(dim, rank)) if self.dims[dim] else (0, size) for dim, size in enumerate(shape)
        )

    def local_shape(self, shape: Sequence[int], rank: int) -> tuple[int, ...]:
        """Shape of the local tensor of `rank` for a tensor of global `shape`."""
        return box_shape(self.box(shape, rank))

    def check_shape(self, shape: Sequence[int], what: str = "tensor") -> None:
        """Refuse a global shape that this layout cannot lay out.

        Args:
            shape: Global shape.
            what: Who asks, for the message.

        Raises:
            LayoutError: another number of dims.
            UnevenError: ragged sizes that do not add up to the size of the dim they cut.
        """
        if len(shape) != len(self.dims):
            raise LayoutError(
                f"{what} of shape {tuple(shape)}: the layout {self} has {len(self.dims)} dims, "
                f"the tensor {len(shape)}. Give one entry per dim."
            )
        if not self.ragged:
            return
        for dim, splits in enumerate(self.splits):
            longest = shape[dim]
            for axis, sizes in splits:
                if sizes is None:
                    longest = -(-longest // self.mesh.size(axis))
                    continue
                if sum(sizes) != longest:
                    raise UnevenError(
                        f"{what} of shape {tuple(shape)}: the ragged sizes {sizes} of axis {axis!r} add up "
                        f"to {sum(sizes)}, dim {dim} has {longest} to cut. Give sizes that add up to it."
                    )
                longest = max(sizes)

    # -- other layouts --------------------------------------------------------------------------

    def with_dim(self, dim: int, axes: DimSpec, ragged: RaggedSpec | None = None) -> Layout:
        """The layout whose dim `dim` is split by `axes` instead.

        Ragged sizes of axes that no longer appear are dropped; `ragged` adds sizes for new ones.
        """
        dims = list(self.dims)
        dims[dim] = _axes_of(axes)
        kept = {axis for names in dims for axis in names}
        sizes = {axis: s for axis, s in self.ragged if axis in kept}
        sizes.update((axis, tuple(s)) for axis, s in _items(ragged))
        return Layout(self.mesh, dims, partial=self.partial, ragged=sizes)

    def without_partial(self, *axes: str) -> Layout:
        """The layout without the pending reductions of `axes` (of all axes, if none is named)."""
        if not self.partial:
            return self
        kept = tuple(p for p in self.partial if axes and p[0] not in axes)
        return Layout(self.mesh, self.dims, partial=kept, ragged=self.ragged)

    def with_partial(self, *axes: str, op: ReduceOp | str = "sum") -> Layout:
        """The layout with a reduction pending over `axes` as well."""
        pending = dict(self.partial) | dict.fromkeys(axes, ReduceOp.of(op))
        return Layout(self.mesh, self.dims, partial=pending, ragged=self.ragged)

    # -- PyTorch's placements -------------------------------------------------------------------

    @classmethod
    def from_placements(cls, mesh: Any, placements: Sequence[Any], ndim: int) -> Layout:
        """The layout that PyTorch's list of placements means: one per mesh axis, axes cut in mesh order.

        Args:
            mesh: The mesh.
            placements: One per mesh axis, ours or PyTorch's.
            ndim: Number of dims of the tensor.

        Raises:
            LayoutError: wrong number of placements, or a dim the tensor does not have.
        """
        mesh = as_mesh(mesh)
        if len(placements) != mesh.ndim:
            raise LayoutError(
                f"placements {tuple(placements)}: {len(placements)} for the {mesh.ndim} axes of mesh {mesh}. "
                "Give one per mesh axis."
            )
        dims: list[list[str]] = [[] for _ in range(ndim)]
        pending: dict[str, str] = {}
        ragged: dict[str, tuple[int, ...]] = {}
        for axis, placement in zip(mesh.axis_names, map(as_placement, placements), strict=True):
            match placement:
                case Shard(dim) | RaggedShard(dim):
                    if not -ndim <= dim < ndim:
                        raise LayoutError(
                            f"{placement} over axis {axis!r}: the tensor has {ndim} dims. Shard a dim that it has."
                        )
                    dims[dim].append(axis)
                    if isinstance(placement, RaggedShard):
                        ragged[axis] = placement.sizes
                case Partial(op):
                    pending[axis] = op
                case _:
                    pass
        return cls(mesh, dims, partial=pending, ragged=ragged)

    @property
    def placements(self) -> tuple[Placement, ...]:
        """PyTorch's list of placements, one per mesh axis.

        Raises:
            LayoutError: a dim is cut in another order than that of the mesh, which the list cannot say.
        """
        order = {axis: i for i, axis in enumerate(self.mesh.axis_names)}
        sizes = dict(self.ragged)
        for axes in self.dims:
            if any(order[a] > order[b] for a, b in itertools.pairwise(axes)):
                raise LayoutError(
                    f"placements of {self}: a dim is cut by {axes}, against the order of mesh {self.mesh}. "
                    "Read layout.dims instead."
                )
        out: list[Placement] = []
        for axis in self.mesh.axis_names:
            dim, op = self.dim_of(axis), self.op_of(axis)
            if dim is not None:
                out.append(RaggedShard(dim, sizes[axis]) if axis in sizes else Shard(dim))
            else:
                out.append(Replicate() if op is None else Partial(op.value))
        return tuple(out)


def live_meshes() -> set[DeviceMesh]:
    """The meshes of all layouts that something still refers to."""
    return {layout.mesh for layout in list(_interned.values())}


def as_layout(spec: Any, mesh: Any, ndim: int, what: str = "layout") -> Layout:
    """A layout from what a PyTorch user may pass: a `Layout`, a list of placements, or None for all copies.

    Raises:
        LayoutError: no mesh is known, or the layout lies on another number of dims.
    """
    if isinstance(spec, Layout):
        if spec.ndim != ndim:
            raise LayoutError(
                f"{what}: the layout {spec} has {spec.ndim} dims, the tensor {ndim}. Give one entry per dim."
            )
        return spec
    mesh = as_mesh(mesh)
    if spec is None:
        return Layout(mesh, ((),) * ndim)
    if isinstance(spec, Placement):
        spec = (spec,)
    return Layout.from_placements(mesh, spec, ndim)


def _rebuild(mesh: DeviceMesh, dims: Any, partial: Any, ragged: Any) -> Layout:
    return Layout(mesh, dims, partial=partial, ragged=ragged)


def _axes_of(dim: DimSpec) -> tuple[str, ...]:
    if dim is None:
        return ()
    return (dim,) if isinstance(dim, str) else tuple(dim)


def _items(pairs: Any) -> tuple[tuple[str, Any], ...]:
    if pairs is None:
        return ()
    return tuple(pairs.items()) if isinstance(pairs, Mapping) else tuple(pairs)


def _sorted_by_axis(mesh: DeviceMesh, items: tuple[tuple[str, Any], ...], convert: Any) -> Any:
    if not items:
        return ()
    return tuple(sorted(((axis, convert(v)) for axis, v in items), key=lambda item: mesh.axis_index(item[0])))


def _check(
    mesh: DeviceMesh,
    dims: tuple[tuple[str, ...], ...],
    pending: tuple[tuple[str, ReduceOp], ...],
    ragged: tuple[tuple[str, tuple[int, ...]], ...],
) -> None:
    used = [axis for axes in dims for axis in axes] + [axis for axis, _ in pending]
    for axis in used:
        mesh.axis_index(axis)
    twice = next((axis for axis in used if used.count(axis) > 1), None)
    if twice is not None:
        raise LayoutError(
            f"layout {dims} on mesh {mesh}: axis {twice!r} is used twice. "
            "Let each axis split one dim or carry one reduction."
        )
    ops = {op for _, op in pending}
    if len(ops) > 1 and not all(op.is_linear for op in ops):
        kinds = ", ".join(f"{op.value}({axis})" for axis, op in pending)
        raise PartialError(
            f"layout {dims} on mesh {mesh}: the pending reductions {kinds} do not commute. Finish one of them first."
        )
    split_axes = {axis for axes in dims for axis in axes}
    for axis, sizes in ragged:
        if axis not in split_axes or len(sizes) != mesh.size(axis) or any(s < 0 for s in sizes):
            raise LayoutError(
                f"layout {dims} on mesh {mesh}: ragged sizes {sizes} for axis {axis!r}, which has "
                f"{mesh.size(axis)} ranks. Give one size >= 0 per rank of an axis that splits a dim."
            )
