# SPDX-License-Identifier: Apache-2.0
"""DeviceMesh: a grid of ranks with named axes. A plain value: it holds no device and no process group."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from hyper_parallel.core.errors import MeshError
from hyper_parallel.core.protocols import get_platform

if TYPE_CHECKING:
    from hyper_parallel.core.layout import DimSpec, Layout, PartialSpec, RaggedSpec


class DeviceMesh:
    """A grid of ranks with named axes.

    Meshes compare by value, never change, and are cheap: building or slicing one talks to nobody.
    Process groups are made when a collective first needs them, in a pool shared by all meshes.

    Args:
        device_type: `"cpu"`, `"cuda"`, `"npu"`, ...
        mesh: Nested sequences (or an array) of distinct global ranks; its nesting is the grid's shape.
        mesh_dim_names: One name per axis. Default `axis_0, axis_1, ...`.

    Raises:
        MeshError: ragged nesting, repeated ranks, repeated or missing names.

    Communication: none. Memory: one integer per rank.

    Example:
        >>> mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
        >>> mesh.group_ranks(("dp",), rank=1)
        (1, 3)
    """

    __slots__ = ("__weakref__", "_coords", "_hash", "axis_names", "device_type", "ranks", "root", "shape")

    device_type: str
    shape: tuple[int, ...]
    axis_names: tuple[str, ...]
    ranks: tuple[int, ...]
    root: DeviceMesh

    def __init__(self, device_type: str, mesh: Any, *, mesh_dim_names: Sequence[str] | None = None) -> None:
        nested = mesh.tolist() if hasattr(mesh, "tolist") else mesh
        shape, ranks = _flatten_nested(nested)
        names = tuple(mesh_dim_names) if mesh_dim_names is not None else tuple(f"axis_{i}" for i in range(len(shape)))
        self._set(device_type, shape, names, ranks, None)

    def _set(
        self,
        device_type: str,
        shape: tuple[int, ...],
        names: tuple[str, ...],
        ranks: tuple[int, ...],
        root: DeviceMesh | None,
    ) -> None:
        _check(shape, names, ranks)
        put = object.__setattr__
        put(self, "device_type", device_type)
        put(self, "shape", shape)
        put(self, "axis_names", names)
        put(self, "ranks", ranks)
        put(self, "root", self if root is None else root)
        put(self, "_hash", hash((device_type, shape, names, ranks)))
        put(self, "_coords", dict(zip(ranks, itertools.product(*map(range, shape)), strict=True)))

    @classmethod
    def _make(
        cls,
        device_type: str,
        shape: tuple[int, ...],
        names: tuple[str, ...],
        ranks: tuple[int, ...],
        root: DeviceMesh | None = None,
    ) -> DeviceMesh:
        self = object.__new__(cls)
        self._set(device_type, shape, names, ranks, root)
        return self

    @classmethod
    def grid(cls, device_type: str = "cpu", /, **axes: int) -> DeviceMesh:
        """A mesh over ranks `0 .. n-1` in row-major order, from axis names and sizes.

        Unlike `init_device_mesh` it starts no framework, so any number of ranks can be planned for.

        Example:
            >>> DeviceMesh.grid("cpu", dp=2, tp=4).shape
            (2, 4)
        """
        shape = tuple(axes.values())
        return cls._make(device_type, shape, tuple(axes), tuple(range(math.prod(shape))))

    # -- values ---------------------------------------------------------------------------------

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"DeviceMesh.{name}: a mesh never changes. Build a new one.")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"DeviceMesh.{name}: a mesh never changes. Build a new one.")

    def __hash__(self) -> int:
        return self._hash  # type: ignore[no-any-return, attr-defined]

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, DeviceMesh):
            return NotImplemented
        return (
            self._hash == other._hash  # type: ignore[attr-defined]
            and self.ranks == other.ranks
            and self.shape == other.shape
            and self.axis_names == other.axis_names
            and self.device_type == other.device_type
        )

    def __reduce__(self) -> tuple[Any, ...]:
        root = None if self.root is self else self.root
        return _rebuild, (self.device_type, self.shape, self.axis_names, self.ranks, root)

    def __copy__(self) -> DeviceMesh:
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> DeviceMesh:
        return self

    def __repr__(self) -> str:
        if self.ranks == tuple(range(len(self.ranks))) and all(map(str.isidentifier, self.axis_names)):
            axes = "".join(f", {n}={s}" for n, s in zip(self.axis_names, self.shape, strict=True))
            return f"DeviceMesh.grid({self.device_type!r}{axes})"
        nested = _nest(self.ranks, self.shape)
        return f"DeviceMesh({self.device_type!r}, {nested}, mesh_dim_names={self.axis_names!r})"

    def __str__(self) -> str:
        axes = ", ".join(f"{n}={s}" for n, s in zip(self.axis_names, self.shape, strict=True))
        return f"({axes})"

    # -- shape ----------------------------------------------------------------------------------

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def mesh_dim_names(self) -> tuple[str, ...]:
        """The axes' names, under PyTorch's name for them."""
        return self.axis_names

    def size(self, mesh_dim: int | str | None = None) -> int:
        """Number of ranks in all, or along one axis (name or index)."""
        if mesh_dim is None:
            return len(self.ranks)
        return self.shape[self.axis_index(mesh_dim)]

    def axis_index(self, axis: int | str) -> int:
        """Position of `axis` among the axes.

        Raises:
            MeshError: no such axis.
        """
        if isinstance(axis, int):
            if -self.ndim <= axis < self.ndim:
                return axis % self.ndim
        elif axis in self.axis_names:
            return self.axis_names.index(axis)
        names = ", ".join(repr(name) for name in self.axis_names)
        raise MeshError(f"mesh {self}: it has no axis {axis!r}. Use one of {names}.")

    def num_ranks(self, axes: Sequence[str]) -> int:
        """Number of ranks along all of `axes` together."""
        return math.prod(self.shape[self.axis_index(axis)] for axis in axes)

    # -- ranks ----------------------------------------------------------------------------------

    def coord_of(self, rank: int) -> tuple[int, ...] | None:
        """Coordinates of a global rank, or None if the mesh does not contain it."""
        return self._coords.get(rank)  # type: ignore[no-any-return, attr-defined]

    def coord(self, rank: int) -> tuple[int, ...]:
        """Coordinates of a global rank.

        Raises:
            MeshError: the mesh does not contain it.
        """
        found = self.coord_of(rank)
        if found is None:
            raise MeshError(f"mesh {self}: it does not contain rank {rank}. Call this on its ranks only.")
        return found

    def rank_at(self, coord: Sequence[int]) -> int:
        """Global rank at the given coordinates."""
        index = 0
        for position, size in zip(coord, self.shape, strict=True):
            index = index * size + position
        return self.ranks[index]

    def group_ranks(self, axes: Sequence[str], rank: int) -> tuple[int, ...]:
        """Global ranks that differ from `rank` along `axes` only, in row-major order of `axes` as given."""
        base = list(self.coord(rank))
        where = [self.axis_index(axis) for axis in axes]
        out = []
        for position in itertools.product(*(range(self.shape[i]) for i in where)):
            for i, p in zip(where, position, strict=True):
                base[i] = p
            out.append(self.rank_at(base))
        return tuple(out)

    def groups(self, axes: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """All groups of `axes`, each as in `group_ranks`; together they cover the mesh once."""
        seen: dict[tuple[int, ...], None] = {}
        for rank in self.ranks:
            seen.setdefault(self.group_ranks(axes, rank))
        return tuple(seen)

    def get_rank(self) -> int:
        """Global rank of this process."""
        return get_platform().rank()

    def get_coordinate(self) -> tuple[int, ...] | None:
        """Coordinates of this process, or None if it is not in the mesh."""
        return self.coord_of(get_platform().rank())

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        """Coordinate of this process along one axis (may be omitted on a mesh of one axis)."""
        if mesh_dim is None and self.ndim != 1:
            raise MeshError(f"get_local_rank on mesh {self}: which axis is not said. Pass its name.")
        return self.coord(self.get_rank())[self.axis_index(0 if mesh_dim is None else mesh_dim)]

    def get_group(self, mesh_dim: int | str | None = None) -> Any:
        """The framework's process group of this process along one axis (or over all ranks of a 1-D mesh).

        Communication: the first call for a group creates it, which all its ranks must do together.
        """
        if mesh_dim is None and self.ndim != 1:
            raise MeshError(f"get_group on mesh {self}: which axis is not said. Pass its name.")
        axis = self.axis_names[self.axis_index(0 if mesh_dim is None else mesh_dim)]
        return get_platform().process_group(self.group_ranks((axis,), self.get_rank()))

    # -- other meshes ---------------------------------------------------------------------------

    def __getitem__(self, axes: str | tuple[str, ...]) -> DeviceMesh:
        """The sub-mesh of `axes` that contains this process."""
        return self.submesh(axes, self.get_rank())

    def submesh(self, axes: str | tuple[str, ...], rank: int) -> DeviceMesh:
        """The sub-mesh of `axes`, in the order given, that contains `rank`.

        Raises:
            MeshError: unknown or repeated axis, or `rank` outside of the mesh.
        """
        names = (axes,) if isinstance(axes, str) else tuple(axes)
        shape = tuple(self.size(name) for name in names)
        return DeviceMesh._make(self.device_type, shape, names, self.group_ranks(names, rank), self.root)

    def flatten(self, name: str, axes: Sequence[str] | None = None) -> DeviceMesh:
        """The same ranks with neighbouring `axes` (default: all) merged into one called `name`.

        Raises:
            MeshError: `axes` are not neighbours in mesh order.
        """
        merged = self.axis_names if axes is None else tuple(axes)
        first = self.axis_index(merged[0])
        last = first + len(merged)
        if self.axis_names[first:last] != merged:
            raise MeshError(
                f"flatten {merged} of mesh {self}: the axes are not neighbours in that order. "
                "Name them as the mesh orders them."
            )
        shape = (*self.shape[:first], math.prod(self.shape[first:last]), *self.shape[last:])
        names = (*self.axis_names[:first], name, *self.axis_names[last:])
        root = None if self.root is self else self.root.flatten(name, merged)
        return DeviceMesh._make(self.device_type, shape, names, self.ranks, root)

    def layout(
        self,
        *dims: DimSpec,
        partial: PartialSpec | None = None,
        ragged: RaggedSpec | None = None,
    ) -> Layout:
        """The `Layout` on this mesh that splits tensor dim i by `dims[i]`: an axis, several (outermost first), or None.

        Example:
            >>> str(DeviceMesh.grid(dp=2, tp=2).layout("dp", ("tp",), None))
            '[dp, tp, -]'
        """
        from hyper_parallel.core.layout import Layout

        return Layout(self, dims, partial=partial, ragged=ragged)


def init_device_mesh(
    device_type: str, mesh_shape: tuple[int, ...], *, mesh_dim_names: tuple[str, ...] | None = None
) -> DeviceMesh:
    """A mesh over the first ranks of the job, in row-major order; starts the default process group if need be.

    Args:
        device_type: `"cpu"`, `"cuda"`, `"npu"`, ...
        mesh_shape: Size of each axis.
        mesh_dim_names: Name of each axis. Default `axis_0, axis_1, ...`.

    Raises:
        MeshError: the job has fewer ranks than the mesh.

    Communication: the framework's rendezvous, once per job. None afterwards.
    """
    platform = get_platform()
    platform.init_process_group(device_type)
    num_ranks = math.prod(mesh_shape)
    if num_ranks > platform.world_size():
        raise MeshError(
            f"init_device_mesh({device_type!r}, {mesh_shape}): the mesh has {num_ranks} ranks, "
            f"the job {platform.world_size()}. Start more processes or shrink the mesh."
        )
    names = tuple(mesh_dim_names or (f"axis_{i}" for i in range(len(mesh_shape))))
    return DeviceMesh._make(device_type, tuple(mesh_shape), names, tuple(range(num_ranks)))


def release_unused_groups() -> int:
    """Close the process groups that no tensor on any rank needs any more; every rank of the job must call it.

    Groups are shared by all meshes with the same ranks, and made when a collective first needs them. They are never
    closed behind anyone's back: ranks would do it at different times, and the next collective would hang.

    Returns:
        Number of groups closed on this rank.

    Communication: one exchange of small objects over the whole job. Memory: plans and resolved ops are forgotten,
    since they refer to meshes.
    """
    return get_platform().release_unused_groups()


def _rebuild(*values: Any) -> DeviceMesh:
    return DeviceMesh._make(*values)


def as_mesh(obj: Any) -> DeviceMesh:
    """Our mesh for `obj`: one of ours, or PyTorch's own `DeviceMesh`.

    Raises:
        MeshError: `obj` is neither.
    """
    if isinstance(obj, DeviceMesh):
        return obj
    if type(obj).__name__ != "DeviceMesh" or not hasattr(obj, "mesh_dim_names"):
        raise MeshError(f"mesh {obj!r}: not a DeviceMesh. Build one with init_device_mesh.")
    mesh = DeviceMesh(obj.device_type, obj.mesh, mesh_dim_names=obj.mesh_dim_names)
    theirs = obj._get_root_mesh() if hasattr(obj, "_get_root_mesh") else obj
    if theirs is obj or theirs == obj:
        return mesh
    return DeviceMesh._make(mesh.device_type, mesh.shape, mesh.axis_names, mesh.ranks, as_mesh(theirs))


def _check(shape: tuple[int, ...], names: tuple[str, ...], ranks: tuple[int, ...]) -> None:
    if len(names) != len(shape):
        raise MeshError(
            f"DeviceMesh of shape {shape}: {len(names)} axis names {names} for {len(shape)} axes. "
            "Give one name per axis."
        )
    if len(set(names)) != len(names) or not all(isinstance(n, str) and n for n in names):
        raise MeshError(f"DeviceMesh of shape {shape}: the axis names {names} are not distinct words. Rename one.")
    if any(size < 1 for size in shape) or math.prod(shape) != len(ranks):
        raise MeshError(f"DeviceMesh of shape {shape}: {len(ranks)} ranks do not fill it. Give sizes of at least 1.")
    if len(set(ranks)) != len(ranks):
        raise MeshError(f"DeviceMesh of shape {shape}: a rank appears twice in {ranks}. Use each once.")


def _flatten_nested(nested: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if isinstance(nested, int):
        return (), (nested,)
    parts = [_flatten_nested(part) for part in nested]
    shapes = {shape for shape, _ in parts}
    if len(shapes) > 1:
        raise MeshError(f"DeviceMesh: nested rows of different shapes {sorted(shapes)}. Make a full grid.")
    inner = shapes.pop() if shapes else ()
    return (len(parts), *inner), tuple(rank for _, ranks in parts for rank in ranks)


def _nest(ranks: tuple[int, ...], shape: tuple[int, ...]) -> Any:
    if not shape:
        return ranks[0]
    step = len(ranks) // shape[0]
    return [_nest(ranks[i * step : (i + 1) * step], shape[1:]) for i in range(shape[0])]
