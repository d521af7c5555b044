# SPDX-License-Identifier: Apache-2.0
"""TorchDTensor: the wrapper subclass. Autograd lives on its local tensor; ops are intercepted in dispatch.py."""

from __future__ import annotations

import copy
import importlib
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.optim.optimizer import _foreach_supported_types as _types_of_optimizers
from torch.utils._foreach_utils import _foreach_supported_types as _types_of_clipping
from torch.utils.hooks import RemovableHandle

from hyper_parallel.core.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor import DTensor, global_shape_of
from hyper_parallel.core.errors import LayoutError, OperandError, PartialError, ShapeError, UnevenError
from hyper_parallel.core.layout import Layout, as_layout
from hyper_parallel.core.placement_types import Placement
from hyper_parallel.platform.torch.autograd import anchor, avg_factor, move, transfer

_make_wrapper = torch.Tensor._make_wrapper_subclass
_no_torch_function = torch._C.DisableTorchFunctionSubclass
_base = torch._C.TensorBase


class Spec:
    """Layout and global shape together, interned: what op resolution is keyed by."""

    __slots__ = ("__weakref__", "layout", "local_shape", "shape")

    def __init__(self, layout: Layout, shape: torch.Size) -> None:
        self.layout = layout
        self.shape = shape
        mesh = layout.mesh
        rank = mesh.get_rank()
        on_mesh = mesh.coord_of(rank) is not None
        self.local_shape = layout.local_shape(shape, rank) if on_mesh else None


_specs: weakref.WeakValueDictionary[Any, Spec] = weakref.WeakValueDictionary()


def spec_of(layout: Layout, shape: Sequence[int]) -> Spec:
    """The one `Spec` of this layout and global shape."""
    key = (layout, tuple(shape))
    found = _specs.get(key)
    if found is None:
        found = _specs.setdefault(key, Spec(layout, torch.Size(shape)))
    return found


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


class ReducedHooks:
    """Hooks on a leaf whose gradient autograd never sees: whoever brings it, as `fully_shard` does, runs them.

    Attributes:
        before: Called with the gradient of one backward, may return another.
        after: Called with the leaf once the gradient is accumulated.
    """

    def __init__(self) -> None:
        self.before: dict[int, Callable[[torch.Tensor], torch.Tensor | None]] = OrderedDict()
        self.after: dict[int, Callable[[torch.Tensor], None]] = OrderedDict()

    def add(self, when: str, hook: Callable[[torch.Tensor], Any]) -> RemovableHandle:
        """Add a hook to `before` or `after`."""
        hooks = getattr(self, when)
        handle = RemovableHandle(hooks)
        hooks[handle.id] = hook
        return handle


class TorchDTensor(DTensor, torch.Tensor):
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

    _local: torch.Tensor
    _spec: Spec
    # For the result of a redistribute: an anchor in the graph of its source, and the source's layout.
    _origin: tuple[torch.Tensor, Layout] | None = None
    # Cotangent layout -> (version, local tensor under it). See Note [Gradients have layouts].
    _memo: dict[Layout, tuple[int, torch.Tensor]] | None = None
    # The last answer of `grad`.
    _grad_wrapper: TorchDTensor | None = None
    # Whether a redistribute took `_origin` over, so that gradients pass this tensor by.
    _is_bypassed = False
    # Set once the wrapper is known not to have come out of a user's autograd.Function.
    _is_native = False

    @staticmethod
    def __new__(cls: type, local: torch.Tensor, layout: Layout, shape: Sequence[int]) -> TorchDTensor:
        """Check, then wrap."""
        layout.check_shape(shape, "DTensor")
        spec = spec_of(layout, shape)
        if spec.local_shape is not None and tuple(local.shape) != spec.local_shape:
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
    def _from_local(
        cls,
        local: torch.Tensor,
        device_mesh: Any,
        placements: Any,
        run_check: bool | None,
        shape: Sequence[int] | None,
        layout: Layout | None,
    ) -> TorchDTensor:
        if isinstance(local, TorchDTensor):
            raise OperandError("from_local: got a DTensor. Pass a plain tensor, or use x.redistribute.")
        layout = as_layout(layout or placements, device_mesh, local.dim(), "from_local")
        sharded = any(layout.dims)
        if run_check or (run_check is None and shape is None and sharded):
            from hyper_parallel.platform.torch import platform

            ranks = layout.mesh.ranks
            shapes = platform.collectives.all_gather_object(tuple(local.shape), ranks)
            found = global_shape_of(layout, dict(zip(ranks, shapes, strict=True)))
            if shape is not None and tuple(shape) != found:
                raise UnevenError(
                    f"from_local: the local sizes make shape {found}, not {tuple(shape)}. Pass the right shape."
                )
            shape = found
        elif shape is None:
            shape = _even_shape(layout, local.shape)
        return cls(local, layout, shape)

    @classmethod
    def _distribute(
        cls, tensor: torch.Tensor, device_mesh: Any, placements: Any, src_data_rank: int | None
    ) -> TorchDTensor:
        if isinstance(tensor, TorchDTensor):
            raise OperandError("distribute_tensor: got a DTensor. Use x.redistribute to change its layout.")
        layout = as_layout(placements, device_mesh, tensor.dim(), "distribute_tensor")
        layout.check_shape(tensor.shape, "distribute_tensor")
        if layout.partial:
            raise PartialError(
                f"distribute_tensor to {layout}: a full tensor has no operands of a pending reduction. "
                "Use Shard or Replicate, or DTensor.from_local with Partial."
            )
        spec = spec_of(layout, tensor.shape)
        full = tensor.detach()
        if src_data_rank is not None and layout.mesh.size() > 1 and not full.is_meta:
            from hyper_parallel.platform.torch import platform

            full = platform.collectives.broadcast(full, src_data_rank, layout.mesh.ranks)
        local = _piece(full, spec)
        out = wrap(local.requires_grad_(tensor.requires_grad), spec)
        return torch.nn.Parameter(out, tensor.requires_grad) if _is_parameter(tensor) else out  # type: ignore[return-value]

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

    # -- autograd, which lives on the local tensor ----------------------------------------------

    def local(self, cotangent: Layout | None = None) -> torch.Tensor:
        """The local tensor, to be used under a cotangent layout (default: its own).

        Two uses under the same cotangent share one node, so the gradient is redistributed once.
        See Note [Gradients have layouts].

        Communication: none; the backward of the node redistributes the gradient from `cotangent` to the layout's own.
        """
        local, origin = self._local, self._origin
        natural = self._spec.layout.cotangent
        if origin is None:
            if cotangent is None or cotangent is natural or not local.requires_grad:
                return local
            source, src = local, self._spec.layout
        else:
            source, src = origin
        if not torch.is_grad_enabled():
            return local
        cotangent = cotangent or natural
        memo = self._memo
        if memo is None:
            memo = self._memo = {}
        found = memo.get(cotangent)
        if found is not None and found[0] == local._version:
            return found[1]
        node = move(source, src, self._spec.layout, self._spec.shape, cotangent, data=local.detach())
        memo[cotangent] = (local._version, node)
        return node

    def _pin(self) -> torch.Tensor:
        """Make the local tensor itself the node that all later uses go through, and return it."""
        if self._origin is not None:
            self._local = self.local()
            self._origin = None
        self._memo = None
        return self._local

    def _pin_for_gradient(self, what: str) -> torch.Tensor:
        """As `_pin`, for something that must see all of the gradient: earlier uses would go past it."""
        if self._origin is not None and (self._memo or self._is_bypassed):
            raise OperandError(
                f"{what} of DTensor {tuple(self.shape)} {self.layout}: this result of a redistribute was already used, "
                f"and those uses would be missed. Call {what} before the first use."
            )
        return self._pin()

    def _root(self) -> TorchDTensor:
        """This tensor as the start of a backward pass: a pending extreme is finished, to know whose it is."""
        extreme = tuple(axis for axis, op in self.layout.partial if not op.is_linear)
        return self.redistribute(layout=self.layout.without_partial(*extreme)) if extreme else self

    @property
    def requires_grad(self) -> bool:
        """Whether gradients flow to or through this tensor."""
        return self._local.requires_grad or self._origin is not None

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> TorchDTensor:
        """Switch gradients on or off, in place."""
        self._local.requires_grad_(requires_grad)
        self._memo = None
        with _no_torch_function():
            _base.requires_grad.__set__(self, requires_grad)  # type: ignore[attr-defined]
        return self

    @property  # type: ignore[override]
    def grad(self) -> TorchDTensor | None:
        """The gradient, laid out as the tensor is (pending reductions done)."""
        grad = self._local.grad
        if grad is None:
            self._grad_wrapper = None
            return None
        # Optimizers read it several times per step.
        found = self._grad_wrapper
        if found is None or found._local is not grad:
            found = self._grad_wrapper = wrap(grad, self._grad_spec())
        return found

    @grad.setter
    def grad(self, value: TorchDTensor | None) -> None:
        if value is not None and not isinstance(value, TorchDTensor):
            raise OperandError(
                "x.grad = ...: x is a DTensor, the gradient a plain tensor. Assign a DTensor with the layout of x."
            )
        self._grad_wrapper = None
        self._local.grad = None if value is None else value.redistribute(layout=self._grad_spec().layout)._local

    @grad.deleter
    def grad(self) -> None:
        self._grad_wrapper = self._local.grad = None

    def _grad_spec(self) -> Spec:
        layout = self._spec.layout
        return self._spec if not layout.partial else spec_of(layout.cotangent, self._spec.shape)

    @property
    def grad_fn(self) -> Any:  # type: ignore[override]
        """The node that made this tensor, None for a leaf."""
        return self.local().grad_fn

    @property
    def is_leaf(self) -> bool:  # type: ignore[override]
        """Whether the tensor was made by the user rather than by an op that records gradients."""
        return self._origin is None and self._local.is_leaf

    @property
    def retains_grad(self) -> bool:  # type: ignore[override]
        """Whether a non-leaf keeps its gradient."""
        return self._local.retains_grad

    def retain_grad(self) -> None:
        """Keep the gradient of a non-leaf in `grad`."""
        self._pin_for_gradient("retain_grad").retain_grad()

    @property  # type: ignore[override]
    def data(self) -> TorchDTensor:
        """The same values outside of the graph."""
        if getattr(self._local, "reduced_hooks", None) is not None:
            # `fully_shard` gathers anew what was changed, which a write through `.data` would not show.
            torch.autograd.graph.increment_version(self._local)
        return wrap(self._local.data, self._spec)

    @data.setter
    def data(self, value: TorchDTensor) -> None:
        if not isinstance(value, TorchDTensor):
            raise OperandError("x.data = ...: x is a DTensor, the value a plain tensor. Assign a DTensor.")
        self._local.data = value._local
        self._spec, self._origin, self._memo, self._grad_wrapper = value._spec, None, None, None

    def detach(self) -> TorchDTensor:
        """The same values outside of the graph."""
        return wrap(self._local.detach(), self._spec)

    def detach_(self) -> TorchDTensor:
        """Leave the graph, in place."""
        self._origin = self._memo = None
        self._local.detach_()
        return self

    def backward(
        self,
        gradient: TorchDTensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        """Gradients of this tensor in all leaves; every rank of the mesh must call it.

        Args:
            gradient: Gradient of this tensor, a DTensor of its shape; may be omitted for a scalar.
            retain_graph: As in PyTorch.
            create_graph: As in PyTorch.
            inputs: Leaves to accumulate into. Default: all.
        """
        if inputs is not None:
            inputs = [inputs] if isinstance(inputs, torch.Tensor) else inputs
            inputs = [i._local if isinstance(i, TorchDTensor) else i for i in inputs]
        root, seed = self.root_and_seed(gradient)
        root.backward(seed, retain_graph, create_graph, inputs=inputs)

    def root_and_seed(self, gradient: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Where a backward pass from this tensor starts, and with what, for a global `gradient` (default: ones)."""
        with torch.enable_grad():
            x = self._root()
            return x.local(), x._seed(gradient)

    def _seed(self, gradient: torch.Tensor | None) -> torch.Tensor:
        spec, factor = self._grad_spec(), avg_factor(self._spec.layout)
        if gradient is None:
            if self.numel() != 1:
                raise RuntimeError("grad can be implicitly created only for scalar outputs")
            local = torch.ones_like(self._local)
        elif gradient.shape != self.shape:
            raise ShapeError(
                f"backward from a DTensor of shape {tuple(self.shape)}: the gradient has shape "
                f"{tuple(gradient.shape)}. Pass one of the same global shape."
            )
        elif isinstance(gradient, TorchDTensor):
            local = gradient.redistribute(layout=spec.layout).local()
        else:
            local = _piece(gradient, spec)
        return local if factor == 1 else local / factor

    def register_hook(self, hook: Callable[[TorchDTensor], TorchDTensor | None]) -> Any:
        """Call `hook` with the gradient (a DTensor) whenever one is computed; it may return another."""
        spec = self._grad_spec()

        def on_local(grad: torch.Tensor | None) -> torch.Tensor | None:
            if grad is None:
                return None
            out = hook(wrap(grad, spec))
            return None if out is None else out.redistribute(layout=spec.layout)._local

        reduced = getattr(self._local, "reduced_hooks", None)
        if reduced is not None:
            return reduced.add("before", on_local)
        return self._pin_for_gradient("register_hook").register_hook(on_local)

    def register_post_accumulate_grad_hook(self, hook: Callable[[TorchDTensor], None]) -> Any:
        """Call `hook` with this leaf after its gradient was accumulated."""
        itself = weakref.ref(self)

        def on_local(_: torch.Tensor) -> None:
            tensor = itself()
            if tensor is not None:
                hook(tensor)

        reduced = getattr(self._local, "reduced_hooks", None)
        if reduced is not None:
            return reduced.add("after", on_local)
        return self._local.register_post_accumulate_grad_hook(on_local)

    # -- moving ---------------------------------------------------------------------------------

    def redistribute(
        self,
        device_mesh: Any = None,
        placements: Any = None,
        *,
        layout: Layout | None = None,
    ) -> TorchDTensor:
        """The same global tensor under another layout; differentiable.

        Args:
            device_mesh: Must be the tensor's own mesh.
            placements: One per mesh axis, or a Layout. Default: copies on all ranks.
            layout: Instead of mesh and placements.

        Returns:
            `self` if nothing changes, else a new DTensor. Sources and results never share a layout object's state.

        Raises:
            LayoutError: another mesh, or a layout that does not fit the tensor.

        Communication: at most 4 collectives, `plan(x.layout, layout, x.shape).bytes_received(rank)` bytes.
        Memory: `plan(...).peak_bytes(rank)` bytes beside the source.
        """
        spec = self._spec
        mesh = spec.layout.mesh if device_mesh is None else device_mesh
        target = as_layout(layout or placements, mesh, len(spec.shape), "redistribute")
        if target is spec.layout:
            return self
        if target.mesh != spec.layout.mesh:
            raise LayoutError(
                f"redistribute from mesh {spec.layout.mesh} to {target.mesh}: the meshes differ. "
                "Use a layout on the tensor's own mesh."
            )
        target.check_shape(spec.shape, "redistribute")
        out = wrap(transfer(self._local, spec.layout, target, spec.shape), spec_of(target, spec.shape))
        if self.requires_grad and torch.is_grad_enabled():
            if any(not op.is_linear for _, op in spec.layout.partial):
                out._local = move(self.local(), spec.layout, target, spec.shape)
            else:
                self._is_bypassed = True
                out._origin = self._origin or (anchor(self._local), spec.layout)
                with _no_torch_function():
                    _base.requires_grad.__set__(out, True)  # type: ignore[attr-defined]
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

    def full_tensor(self, *, grad_placements: Any = None) -> torch.Tensor:
        """The whole tensor, on every rank; all ranks of the mesh must call it.

        Args:
            grad_placements: As in `to_local`.

        Communication: one plan to copies on all ranks: receives nearly the whole tensor.
        Memory: the whole tensor on each rank.
        """
        whole = self.redistribute(layout=as_layout(None, self.device_mesh, self.ndim))
        return whole.to_local(grad_placements=grad_placements)

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
            if name not in _OWN_ATTRIBUTES:
                out.__dict__[name] = copy.deepcopy(value, memo)
        return out

    def __reduce_ex__(self, protocol: Any) -> Any:
        local = self._local.detach()
        if local.untyped_storage().nbytes() != local.numel() * local.element_size():
            local = local.clone()
        extra = {k: v for k, v in self.__dict__.items() if k not in _OWN_ATTRIBUTES}
        return _rebuild, (local, self.layout, tuple(self.shape), self.requires_grad, extra)


_OWN_ATTRIBUTES = frozenset(("_local", "_spec", "_origin", "_memo", "_grad_wrapper", "_is_bypassed", "_is_native"))


def _rebuild(
    local: torch.Tensor, layout: Layout, shape: tuple[int, ...], requires_grad: bool, extra: dict[str, Any]
) -> TorchDTensor:
    out = wrap(local.requires_grad_(requires_grad), spec_of(layout, shape))
    out.__dict__.update(extra)
    return out


def _is_parameter(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, torch.nn.Parameter)


def _even_shape(layout: Layout, local_shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(size * layout.mesh.num_ranks(axes) for size, axes in zip(local_shape, layout.dims, strict=True))


def _piece(full: torch.Tensor, spec: Spec) -> torch.Tensor:
    """A copy of this rank's part of a full tensor, in storage of its own."""
    box = spec.layout.box(spec.shape, spec.layout.mesh.get_rank())
    for dim, (start, stop) in enumerate(box):
        full = full.narrow(dim, start, stop - start)
    return full.detach().clone(memory_format=torch.contiguous_format)


# torch takes the foreach way of optimizers and of clipping only for the tensor types in these two lists. Set here and
# not with the rules, which load later: ranks that disagreed would issue different collectives.
for _types in (_types_of_optimizers, _types_of_clipping):
    if TorchDTensor not in _types:
        _types.append(TorchDTensor)
