# SPDX-License-Identifier: Apache-2.0
"""DTensor: a tensor with a global shape whose data lies over a mesh. The framework-free part.

Note [Gradients have layouts]
    Autograd runs on local tensors, so a gradient is a local tensor too, and has a layout of its own.
    A local tensor that all ranks of an axis hold alike (Replicate) can be used in two ways. If the op
    splits its work along that axis (another operand is sharded on it), each rank computes a share of
    the gradient: its layout is Partial("sum") on the axis. If not, the gradient is alike everywhere.
    So an op asks for a local tensor *under a cotangent layout*, and what it gets is a node whose
    forward does nothing and whose backward redistributes the gradient from the cotangent's layout to
    the tensor's own. The node is kept: ten uses with one cotangent share one all-reduce.
    If the tensor came out of a redistribute, the node is built on that redistribute's *source*: the
    backward of an all-gather whose result is used in split work is a reduce-scatter.
    The gradient of a pending value is alike on all ranks of the axis; that of Partial("avg") also
    carries the factor 1/n, so that sums over ranks come out right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hyper_parallel.core.errors import UnevenError
from hyper_parallel.core.layout import Layout
from hyper_parallel.core.protocols import get_platform, platform_of


class DTensor:
    """A distributed tensor: global shape outside, one local piece per rank inside.

    The framework's class completes this one (`isinstance(x, DTensor)` holds on all of them). Ordinary
    functions and operators work on it and give what the one-device program gives.
    """

    __slots__ = ()

    @classmethod
    def from_local(
        cls,
        local_tensor: Any,
        device_mesh: Any = None,
        placements: Sequence[Any] | None = None,
        *,
        run_check: bool | None = None,
        shape: Sequence[int] | None = None,
        stride: Sequence[int] | None = None,
        layout: Layout | None = None,
    ) -> Any:
        """The DTensor whose piece on this rank is `local_tensor`.

        Args:
            local_tensor: This rank's piece (or operand of the pending reduction).
            device_mesh: Mesh, ours or PyTorch's; may be omitted with `layout`.
            placements: One per mesh axis. Default: copies on all ranks.
            run_check: Compare the local shapes of all ranks. Default: only when `shape` is not given and
                some dim is sharded, since the global shape cannot be known otherwise.
            shape: Global shape. Saves the comparison.
            stride: Accepted as in PyTorch; strides are those of `local_tensor`.
            layout: Instead of mesh and placements.

        Returns:
            DTensor of global shape `shape`, differentiable: the gradient of `local_tensor` has its layout.

        Raises:
            UnevenError: the local sizes do not follow the layout; with `run_check` on every rank.
            LayoutError: layout and tensor differ in number of dims.

        Communication: one all-gather of the local shapes if `run_check`, else none. Memory: none, the piece is shared.
        """
        dtensor_type = platform_of(local_tensor).dtensor_type()
        return dtensor_type._from_local(local_tensor, device_mesh, placements, run_check, shape, layout)


def distribute_tensor(
    tensor: Any,
    device_mesh: Any = None,
    placements: Sequence[Any] | Layout | None = None,
    *,
    src_data_rank: int | None = 0,
) -> Any:
    """Spread a full tensor over a mesh.

    Args:
        tensor: Full tensor, same shape on every rank.
        device_mesh: Mesh, ours or PyTorch's; may be omitted if `placements` is a Layout.
        placements: One per mesh axis, or a Layout. Default: copies on all ranks.
        src_data_rank: Position in the mesh (row-major) of the rank whose data is used, or None: every rank uses its
            own, which must be the same everywhere.

    Returns:
        Leaf DTensor with the dtype and `requires_grad` of `tensor`.

    Raises:
        LayoutError: layout and tensor differ in number of dims.

    Communication: one broadcast of the full tensor over the mesh, none with `src_data_rank=None`.
    Memory: this rank's piece; the full tensor is not kept.
    """
    return platform_of(tensor).dtensor_type()._distribute(tensor, device_mesh, placements, src_data_rank)


def redistribute_many(tensors: Sequence[Any], layouts: Sequence[Any], **options: Any) -> list[Any]:
    """Give several tensors other layouts together: their collectives are under way at the same time.

    Args:
        tensors: DTensors, independent of each other, in the same order on all ranks.
        layouts: For each a Layout or a list of placements on its own mesh; None for copies on all ranks.
        options: As in `DTensor.redistribute`.

    Returns:
        The tensors under their new layouts, differentiable.

    Raises:
        LayoutError: another number of layouts than of tensors, or one that does not fit; before any data moves.

    Communication: as many collectives as `redistribute` of each, in as many rounds as the longest plan has.
    Memory: the sum of what the plans hold.
    """
    if not tensors:
        return []
    found: list[Any] = platform_of(tensors[0]).dtensor_type()._redistribute_many(tensors, layouts, options)
    return found


def global_shape_of(
    layout: Layout, local_shapes: Mapping[int, tuple[int, ...]], what: str = "from_local"
) -> tuple[int, ...]:
    """The global shape that local shapes of all ranks add up to.

    Args:
        layout: How the tensor lies.
        local_shapes: Rank -> shape of its local tensor, for every rank of the mesh.
        what: Who asks, for the message.

    Raises:
        UnevenError: the sizes do not follow the layout; names dim, rank, expected and actual size.
    """
    mesh = layout.mesh
    first = mesh.ranks[0]
    shape = []
    for dim, axes in enumerate(layout.dims):
        group = mesh.group_ranks(axes, first)
        shape.append(sum(local_shapes[rank][dim] for rank in group))
    layout.check_shape(shape, what)
    for rank in mesh.ranks:
        expected = layout.local_shape(shape, rank)
        actual = tuple(local_shapes[rank])
        for dim, (want, have) in enumerate(zip(expected, actual, strict=True)):
            if want != have:
                raise UnevenError(
                    f"{what}: the local sizes of dim {dim} add up to {shape[dim]}, of which {layout} gives rank "
                    f"{rank} {want}, but it has {have}. Use RaggedShard(dim, sizes) for sizes of your own."
                )
    return tuple(shape)


def _make(name: str, size: Any, values: tuple[Any, ...], options: dict[str, Any]) -> Any:
    shape = tuple(size[0]) if len(size) == 1 and isinstance(size[0], Sequence) else tuple(size)
    return get_platform().dtensor_type()._factory(name, shape, values, **options)


def zeros(*size: Any, **options: Any) -> Any:
    """A DTensor of zeros; each rank makes only its part.

    Args:
        size: Global sizes, as numbers or as one sequence.
        options: `device_mesh`, `placements` (or a Layout), `dtype`, `requires_grad`.

    Communication: none. Memory: this rank's part.
    """
    return _make("zeros", size, (), options)


def ones(*size: Any, **options: Any) -> Any:
    """A DTensor of ones; arguments as for `zeros`."""
    return _make("ones", size, (), options)


def empty(*size: Any, **options: Any) -> Any:
    """A DTensor without values; arguments as for `zeros`."""
    return _make("empty", size, (), options)


def full(size: Any, fill_value: Any, **options: Any) -> Any:
    """A DTensor of one value; other arguments as for `zeros`."""
    return _make("full", (size,), (fill_value,), options)


def rand(*size: Any, **options: Any) -> Any:
    """A DTensor of uniform numbers in [0, 1): copies alike, shards independent; arguments as for `zeros`.

    Communication: the first random op on a mesh compares the seeds of its ranks.
    """
    return _make("rand", size, (), options)


def randn(*size: Any, **options: Any) -> Any:
    """A DTensor of standard normal numbers; as `rand`."""
    return _make("randn", size, (), options)
