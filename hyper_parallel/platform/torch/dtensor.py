# SPDX-License-Identifier: Apache-2.0
"""TorchDTensor: the wrapper subclass. Autograd lives on its local tensor; ops are intercepted in dispatch.py."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.optim.optimizer import _foreach_supported_types as _types_of_optimizers
from torch.utils._foreach_utils import _foreach_supported_types as _types_of_clipping

from hyper_parallel.core import device_mesh, layout
from hyper_parallel.core.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor import DTensor
from hyper_parallel.core.errors import LayoutError, OperandError, UnevenError
from hyper_parallel.core.layout import Layout, as_layout
from hyper_parallel.core.placement_types import Placement, ReduceOp
from hyper_parallel.platform.torch.autograd import PLAIN, Manner, anchor, manner_of, move, transfer
from hyper_parallel.platform.torch.dtensor_autograd import Differentiable
from hyper_parallel.platform.torch.spec import Spec, check_pending, spec_of

_make_wrapper = torch.Tensor._make_wrapper_subclass
_no_torch_function = torch._C.DisableTorchFunctionSubclass
_base = torch._C.TensorBase


def wrap(local: torch.Tensor, spec: Spec) -> TorchDTensor:
    """The DTensor of a local tensor, unchecked and without a copy."""
    out = _make_wrapper(
        TorchDTensor,
        spec.shape,
        dtype=local.dtype,
        device=local.device,
        requires_grad=local.requires_grad,
    )
    out._local = local
    out._spec = spec
    return out


class TorchDTensor(Differentiable, DTensor):
    """A distributed tensor on torch.

    Shape, dtype and device are those of the global tensor; the data and the autograd graph are those of the
    local tensor inside. Build one with `distribute_tensor` or `DTensor.from_local`.

    Args:
        local: This rank's piece, which is shared, not copied.
        layout: How the tensor lies.
        shape: Global shape.

    Raises:
        UnevenError: `local` has not the shape that the layout gives this rank.

    Communication: none. Memory: none.
    """

    # Set once the wrapper is known not to have come out of a user's autograd.Function.
    _is_native = False
    _wrap = staticmethod(wrap)

    @staticmethod
    def __new__(cls: type, local: torch.Tensor, layout: Layout, shape: Sequence[int]) -> TorchDTensor:
        """Check, then wrap."""
        layout.check_shape(shape, "DTensor")
        check_pending(layout, local.dtype, "DTensor")
        spec = spec_of(layout, shape)
        if tuple(local.shape) != spec.local_shape:
            raise UnevenError(
                f"DTensor of shape {tuple(shape)} {layout}: the local tensor has shape {tuple(local.shape)}, the "
                f"layout gives this rank {spec.local_shape}. Pass the right piece, or RaggedShard sizes."
            )
        return wrap(local, spec)

    def __init__(self, *args: object, **kwargs: object) -> None:
        """Everything is done in `__new__`."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # The first intercepted call loads the rules, whose import puts `dispatch` in this place.
        importlib.import_module("hyper_parallel.platform.torch.ops")
        return cls.__torch_function__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise OperandError(
            f"{func}: a DTensor got past the function level into the dispatcher. Run the code around it with "
            "local_map, or pass it x.to_local()."
        )

    # -- building -------------------------------------------------------------------------------

    @classmethod
    def _from_local(cls, local: torch.Tensor, *options: Any) -> TorchDTensor:
        return importlib.import_module("hyper_parallel.platform.torch.building").from_local(local, *options)

    @classmethod
    def _distribute(cls, tensor: torch.Tensor, *options: Any) -> TorchDTensor:
        return importlib.import_module("hyper_parallel.platform.torch.building").distribute(tensor, *options)

    @classmethod
    def _factory(
        cls,
        name: str,
        size: tuple[int, ...],
        values: tuple[Any, ...],
        *,
        device_mesh: Any = None,
        placements: Any = None,
        dtype: torch.dtype | None = None,
        requires_grad: bool = False,
    ) -> TorchDTensor:
        from hyper_parallel.platform.torch.ops.factories import factory

        return factory(name, size, values, device_mesh, placements, dtype, requires_grad)

    @classmethod
    def _redistribute_many(cls, tensors: Sequence[Any], layouts: Sequence[Any], options: dict[str, Any]) -> list[Any]:
        return _moving().redistribute_many(tensors, layouts, options)

    # -- what it is -----------------------------------------------------------------------------

    @property
    def layout(self) -> Layout:  # type: ignore[override]
        """How the tensor lies over the mesh."""
        return self._spec.layout

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh it lies on."""
        return self._spec.layout.mesh

    @property
    def placements(self) -> tuple[Placement, ...]:
        """PyTorch's list of placements, one per mesh axis; see `Layout.placements`."""
        return self._spec.layout.placements

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """Global shape."""
        return self._spec.shape

    @property
    def ndim(self) -> int:  # type: ignore[override]
        """Number of dims."""
        return len(self._spec.shape)

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        """Element type."""
        return self._local.dtype

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Device of the local tensor."""
        return self._local.device

    def size(self, dim: int | None = None) -> Any:
        """Global shape, or the size of one dim."""
        return self._spec.shape if dim is None else self._spec.shape[dim]

    def dim(self) -> int:
        """Number of dims."""
        return len(self._spec.shape)

    def numel(self) -> int:
        """Number of elements of the global tensor."""
        return self._spec.shape.numel()

    nelement = numel

    def stride(self, dim: int | None = None) -> Any:
        """Strides a full tensor would have whose dims lie in memory in the order of the local ones."""
        local = self._local.stride()
        order = sorted(range(self.ndim), key=lambda d: (-local[d], d))
        strides, step = [0] * self.ndim, 1
        for d in reversed(order):
            strides[d] = step
            step *= max(self.shape[d], 1)
        return tuple(strides) if dim is None else strides[dim]

    def is_contiguous(self, memory_format: Any = torch.contiguous_format) -> bool:
        """Whether the local tensor is."""
        return self._local.is_contiguous(memory_format=memory_format)

    def element_size(self) -> int:
        """Bytes per element."""
        return self._local.element_size()

    def is_floating_point(self) -> bool:
        """Whether the elements are floating point numbers."""
        return self._local.is_floating_point()

    def is_complex(self) -> bool:
        """Whether the elements are complex numbers."""
        return self._local.is_complex()

    @property
    def is_sparse(self) -> bool:  # type: ignore[override]
        """Whether the local tensor is."""
        return self._local.is_sparse

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a 0-d tensor")
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.unbind(0))

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        grad = ", requires_grad=True" if self.requires_grad else ""
        return (
            f"DTensor(shape={tuple(self.shape)}, layout={self.layout}, mesh={self.device_mesh}, "
            f"dtype={self.dtype}{grad}, local={self._local.detach()})"
        )

    # -- moving ---------------------------------------------------------------------------------

    def redistribute(
        self,
        device_mesh: Any = None,
        placements: Any = None,
        *,
        layout: Layout | None = None,
        shape: Sequence[int] | None = None,
        forward_dtype: torch.dtype | None = None,
        backward_dtype: torch.dtype | None = None,
        **options: Any,
    ) -> TorchDTensor:
        """The same global tensor under another layout; differentiable.

        Args:
            device_mesh: Must be the tensor's own mesh.
            placements: One per mesh axis, or a Layout. Default: copies on all ranks.
            layout: Instead of mesh and placements.
            shape: New global shape with as many elements, of which one size may be -1; placements and layout are
                then those on the new shape. Default: the tensor's.
            forward_dtype: Dtype of the result, cast before anything moves. Default: the tensor's.
            backward_dtype: Dtype in which the gradient travels. Default: as it arrives.
            options: `deterministic=True` adds in the order of the ranks, so that every run gives the same bits;
                `compensated=True` also in twice the precision, rounded once; `topology`, `max_bytes` go to `plan`.

        Returns:
            `self` if nothing changes, else a new DTensor. Sources and results never share a layout object's state.

        Raises:
            LayoutError: another mesh, a layout that does not fit the tensor, or no plan keeps to `max_bytes`.
            ShapeError: `shape` has another number of elements.
            PartialError: a pending reduction that has no meaning for the dtype.

        Communication: at most 4 collectives, `plan(x.layout, layout, x.shape).bytes_received(rank)` bytes; with `shape`
        that of `plan_reshape`, none where a view does it.
        Memory: `plan(...).peak_bytes(rank)` bytes beside the source. With `shape` the result may be a view of it.
        """
        x: Any = self if forward_dtype is None else self.to(forward_dtype)
        if shape is not None and tuple(shape) != tuple(x.shape):
            wanted = layout or placements
            return _moving().reshape(x, tuple(shape), device_mesh, wanted, backward_dtype, options)
        target = x.target_layout(device_mesh, placements, layout)
        manner = manner_of(backward_dtype, options) if options or backward_dtype else PLAIN
        source, size = x.layout, x._spec.shape
        if target is source:
            return x
        if x.has_extreme_gradient():
            return wrap(move(x.local(), source, target, size, manner=manner), spec_of(target, size))
        return x.moved(transfer(x._local, source, target, size, manner), target, manner)

    def redistribute_async(
        self, device_mesh: Any = None, placements: Any = None, *, layout: Layout | None = None, **options: Any
    ) -> Any:
        """As `redistribute`, under way when it returns: `wait()` on the result gives the DTensor.

        The tensor may be changed or freed meanwhile: what is sent is what it held at the call. It need not be waited
        for. If the plan has several collectives, all but the last have ended on return.

        Communication: as `redistribute`. Memory: a copy of the local tensor beside that, where it is sent as it lies.

        Example:
            coming = x.redistribute_async(layout=target)
            y = torch.relu(z)
            x = coming.wait()
        """
        return _moving().redistribute_async(self, self.target_layout(device_mesh, placements, layout), options)

    def target_layout(self, device_mesh: Any, placements: Any, layout: Layout | None) -> Layout:
        """The checked layout that a caller of `redistribute` means."""
        spec = self._spec
        mesh = spec.layout.mesh if device_mesh is None else device_mesh
        target = as_layout(layout or placements, mesh, len(spec.shape), "redistribute")
        if target is spec.layout:
            return target
        if target.mesh != spec.layout.mesh:
            raise LayoutError(
                f"redistribute from mesh {spec.layout.mesh} to {target.mesh}: the meshes differ. "
                "Use a layout on the tensor's own mesh."
            )
        target.check_shape(spec.shape, "redistribute")
        check_pending(target, self._local.dtype, "redistribute")
        return target

    def has_extreme_gradient(self) -> bool:
        """Whether a gradient has to find its way through a pending max or min."""
        return (
            self.requires_grad
            and torch.is_grad_enabled()
            and any(not op.is_linear for _, op in self._spec.layout.partial)
        )

    def moved(self, data: torch.Tensor, target: Layout, manner: Manner = PLAIN) -> TorchDTensor:
        """This tensor under `target`, whose local values `data` were computed before."""
        out = wrap(data, spec_of(target, self._spec.shape))
        if self.requires_grad and torch.is_grad_enabled():
            if manner is PLAIN:
                self._is_bypassed = True
                out._origin = self._origin or (anchor(self._local), self._spec.layout)
                with _no_torch_function():
                    _base.requires_grad.__set__(out, True)  # type: ignore[attr-defined]
            else:
                out = wrap(move(self.local(), self.layout, target, self._spec.shape, None, data, manner), out._spec)
        return out

    def to_local(self, *, grad_placements: Any = None) -> torch.Tensor:
        """This rank's piece, differentiable.

        Args:
            grad_placements: How the gradient of the piece will lie. Default: as the tensor does, copies where it is
                pending. Pass `Partial()` for an axis along which the ranks use a replicated piece for different work.

        Communication: none; backward redistributes the gradient if `grad_placements` says otherwise.
        """
        if grad_placements is None:
            out = self.local()
        else:
            out = self.local(as_layout(grad_placements, self.device_mesh, self.ndim, "to_local"))
        return out if torch.is_grad_enabled() else out.detach()

    def full_tensor(self, *, grad_placements: Any = None, cache: bool = False, **options: Any) -> torch.Tensor:
        """The whole tensor, on every rank; all ranks of the mesh must call it.

        Args:
            grad_placements: As in `to_local`.
            cache: Keep the result, and give it again until this tensor or the result is changed in place. For
                tensors without a gradient, or under `no_grad`; pass the same on every rank.
            options: As in `redistribute`.

        Communication: one plan to copies on all ranks: receives nearly the whole tensor, (n - 1) / n of it over n
        shards, twice that for a pending sum. None if it is cached.
        Memory: the whole tensor on each rank, as long as it lives; with `cache` as long as this tensor lives.
        """
        if cache and not (self.requires_grad and torch.is_grad_enabled()):
            return _moving().cached_full_tensor(self, options)
        whole = self.redistribute(layout=as_layout(None, self.device_mesh, self.ndim), **options)
        return whole.to_local(grad_placements=grad_placements)

    def full_tensor_async(self, *, grad_placements: Any = None, **options: Any) -> Any:
        """As `full_tensor`, under way when it returns: `wait()` on the result gives the tensor.

        Communication and memory: as `full_tensor`; see `redistribute_async`.
        """
        return _moving().full_tensor_async(self, grad_placements, options)

    def item(self) -> Any:
        """The value of a one-element tensor, the same on all ranks of the mesh, which must all call it."""
        return self.detach().full_tensor().item()

    def tolist(self) -> Any:
        """The whole tensor as nested lists; all ranks of the mesh must call it."""
        return self.detach().full_tensor().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """The whole tensor as an array; all ranks of the mesh must call it."""
        return (self.detach() if force else self).full_tensor().numpy(force=force)

    def __bool__(self) -> bool:
        return bool(self.item())

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __index__(self) -> int:
        return self.detach().full_tensor().__index__()

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if self.ndim == 0 else object.__format__(self, spec)

    # -- torch.distributed.checkpoint's protocol for tensors in pieces ---------------------------

    def __create_write_items__(self, fqn: str, object: Any) -> Any:
        return importlib.import_module("hyper_parallel.platform.torch.checkpoint").write_items(self, fqn)

    def __create_chunk_list__(self) -> Any:
        return importlib.import_module("hyper_parallel.platform.torch.checkpoint").chunks(self)

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        return importlib.import_module("hyper_parallel.platform.torch.checkpoint").shard_at(self, index)

    # -- copying --------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> TorchDTensor:
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError(
                "deepcopy of a DTensor that is not a leaf: its graph cannot be copied. Use x.detach() first."
            )
        local = self._local.detach().clone(memory_format=torch.preserve_format)
        out = wrap(local.requires_grad_(self._local.requires_grad), self._spec)
        memo[id(self)] = out
        if self._local.grad is not None:
            local.grad = self._local.grad.clone()
        for name, value in self.__dict__.items():
            if name not in OWN_ATTRIBUTES:
                out.__dict__[name] = copy.deepcopy(value, memo)
        return out

    def __reduce_ex__(self, protocol: Any) -> Any:
        local = self._local.detach()
        if local.untyped_storage().nbytes() != local.numel() * local.element_size():
            local = local.clone()
        extra = {k: v for k, v in self.__dict__.items() if k not in OWN_ATTRIBUTES}
        return _rebuild, (local, self.layout, tuple(self.shape), self.requires_grad, extra)


OWN_ATTRIBUTES = frozenset(
    ("_local", "_spec", "_origin", "_memo", "_grad_wrapper", "_is_bypassed", "_is_native", "_full", "_lost_view")
)


def _moving() -> Any:
    return importlib.import_module("hyper_parallel.platform.torch.moving")


def _rebuild(
    local: torch.Tensor, layout: Layout, shape: tuple[int, ...], requires_grad: bool, extra: dict[str, Any]
) -> TorchDTensor:
    out = wrap(local.requires_grad_(requires_grad), spec_of(layout, shape))
    out.__dict__.update(extra)
    return out


# torch takes the foreach way of optimizers and of clipping only for the tensor types in these two lists. Set here and
# not with the rules, which load later: ranks that disagreed would issue different collectives.
for _types in (_types_of_optimizers, _types_of_clipping):
    if TorchDTensor not in _types:
        _types.append(TorchDTensor)

# What `__reduce_ex__` writes, so that `torch.load` takes it with `weights_only=True`: values only, no code.
torch.serialization.add_safe_globals([_rebuild, device_mesh._rebuild, layout._rebuild, ReduceOp])
