# SPDX-License-Identifier: Apache-2.0
"""The autograd side of a DTensor: gradients, hooks and `backward`, all of which live on the local tensor."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from hyper_parallel.core.errors import OperandError, ShapeError
from hyper_parallel.core.layout import Layout
from hyper_parallel.platform.torch.autograd import avg_factor, move
from hyper_parallel.platform.torch.spec import Spec, piece, spec_of

_no_torch_function = torch._C.DisableTorchFunctionSubclass
_base = torch._C.TensorBase


class ReducedHooks:
    """Hooks on a leaf whose gradient autograd never sees: whoever brings it, as `fully_shard` does, runs them.

    Attributes:
        before: Called with the gradient of one backward, may return another.
        after: Called with the leaf once the gradient is accumulated.
        data_reads: How often `.data` was read, which counts as a write in the leaf's version.
    """

    def __init__(self) -> None:
        self.before: dict[int, Callable[[torch.Tensor], torch.Tensor | None]] = OrderedDict()
        self.after: dict[int, Callable[[torch.Tensor], None]] = OrderedDict()
        self.data_reads = 0

    def add(self, when: str, hook: Callable[[torch.Tensor], Any]) -> RemovableHandle:
        """Add a hook to `before` or `after`."""
        hooks = getattr(self, when)
        handle = RemovableHandle(hooks)
        hooks[handle.id] = hook
        return handle


class Differentiable(torch.Tensor):
    """What `TorchDTensor` has of a tensor's autograd interface."""

    _local: torch.Tensor
    _spec: Spec
    # For the result of a redistribute: an anchor in the graph of its source, and the source's layout.
    _origin: tuple[torch.Tensor, Layout] | None = None
    # Cotangent layout -> (version, local tensor under it). See Note [Gradients have layouts].
    _memo: dict[Layout, tuple[int, torch.Tensor]] | None = None
    # The last answer of `grad`.
    _grad_wrapper: Any = None
    # Result of `full_tensor(cache=True)`, its version, the local tensor it came from, and the version of that.
    _full: tuple[torch.Tensor, int, torch.Tensor, int] | None = None
    # The op that made this as a view of a copy. See Note [Lost views] in dispatch.py.
    _lost_view: str | None = None
    # Whether a redistribute took `_origin` over, so that gradients pass this tensor by.
    _is_bypassed = False

    _wrap: Callable[[torch.Tensor, Spec], Any]
    redistribute: Callable[..., Any]

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
                f"{what} of DTensor {tuple(self.shape)} {self._spec.layout}: this result of a redistribute was already "
                f"used, and those uses would be missed. Call {what} before the first use."
            )
        return self._pin()

    def _root(self) -> Any:
        """This tensor as the start of a backward pass: a pending extreme is finished, to know whose it is."""
        extreme = tuple(axis for axis, op in self._spec.layout.partial if not op.is_linear)
        return self.redistribute(layout=self._spec.layout.without_partial(*extreme)) if extreme else self

    @property
    def requires_grad(self) -> bool:
        """Whether gradients flow to or through this tensor."""
        return self._local.requires_grad or self._origin is not None

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        """Switch gradients on or off, in place."""
        self._local.requires_grad_(requires_grad)
        self._memo = None
        with _no_torch_function():
            _base.requires_grad.__set__(self, requires_grad)  # type: ignore[attr-defined]
        return self

    @property
    def grad(self) -> Any:
        """The gradient, laid out as the tensor is (pending reductions done)."""
        grad = self._local.grad
        if grad is None:
            self._grad_wrapper = None
            return None
        # Optimizers read it several times per step.
        found = self._grad_wrapper
        if found is None or found._local is not grad:
            found = self._grad_wrapper = self._wrap(grad, self._grad_spec())
        return found

    @grad.setter
    def grad(self, value: Any) -> None:
        if value is not None and not isinstance(value, Differentiable):
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

    @property
    def data(self) -> Any:
        """The same values outside of the graph."""
        reduced = getattr(self._local, "reduced_hooks", None)
        if reduced is not None:
            # `fully_shard` gathers anew what was changed, which a write through `.data` would not show.
            reduced.data_reads += 1
            torch.autograd.graph.increment_version(self._local)
        return self._alias(self._local.data)

    @data.setter
    def data(self, value: Any) -> None:
        if not isinstance(value, Differentiable):
            raise OperandError("x.data = ...: x is a DTensor, the value a plain tensor. Assign a DTensor.")
        if value.shape == self.shape and value._spec.layout.mesh == self._spec.layout.mesh:
            # Whatever the values come from, the tensor goes on lying as it did.
            value = value.redistribute(layout=self._grad_spec().layout)
        self._local.data = value._local
        self._spec = value._spec
        self._origin = self._memo = self._grad_wrapper = self._full = None

    def detach(self) -> Any:
        """The same values outside of the graph."""
        return self._alias(self._local.detach())

    def _alias(self, local: torch.Tensor) -> Any:
        out = self._wrap(local, self._spec)
        if self._lost_view is not None:
            out._lost_view = self._lost_view
        return out

    def detach_(self) -> Any:
        """Leave the graph, in place."""
        self._origin = self._memo = None
        self._local.detach_()
        return self

    def backward(
        self,
        gradient: Differentiable | None = None,
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
            inputs = [i._local if isinstance(i, Differentiable) else i for i in inputs]
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
        elif isinstance(gradient, Differentiable):
            local = gradient.redistribute(layout=spec.layout).local()
        else:
            local = piece(gradient, spec)
        return local if factor == 1 else local / factor

    def register_hook(self, hook: Callable[[Differentiable], Differentiable | None]) -> Any:
        """Call `hook` with the gradient (a DTensor) whenever one is computed; it may return another."""
        # Without this tensor itself: the local one holds the hook, and the graph, unseen by Python, the local one.
        spec, wrap = self._grad_spec(), self._wrap

        def on_local(grad: torch.Tensor | None) -> torch.Tensor | None:
            if grad is None:
                return None
            out = hook(wrap(grad, spec))
            return None if out is None else out.redistribute(layout=spec.layout)._local

        reduced = getattr(self._local, "reduced_hooks", None)
        if reduced is not None:
            return reduced.add("before", on_local)
        return self._pin_for_gradient("register_hook").register_hook(on_local)

    def register_post_accumulate_grad_hook(self, hook: Callable[[Differentiable], None]) -> Any:
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
