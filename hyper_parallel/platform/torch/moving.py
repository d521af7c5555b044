# SPDX-License-Identifier: Apache-2.0
"""Redistributions beyond the plain one: behind other work, several together, kept, to another shape.

See Note [In flight] in drive.py.

On a device with streams they run on a side stream that waits for what the current one has put out so far, and
`wait` makes the current stream wait for it; the host never blocks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from hyper_parallel.core.errors import LayoutError
from hyper_parallel.core.layout import Layout, as_layout
from hyper_parallel.core.tensor_redistribution import cached_reshape_plan, compiled_plan, run_many, start
from hyper_parallel.core.tensor_redistribution.execute import CompiledPlan
from hyper_parallel.core.tensor_redistribution.reshape import full_shape
from hyper_parallel.platform.torch import platform
from hyper_parallel.platform.torch.autograd import Manner, anchor, manner_of
from hyper_parallel.platform.torch.device import DeviceHandle, device_handle
from hyper_parallel.platform.torch.dtensor import TorchDTensor, wrap
from hyper_parallel.platform.torch.spec import check_pending, spec_of

_streams: dict[torch.device, Any] = {}
"""One side stream per device, which all redistributions in flight share, so that they keep their order."""


class InFlight:
    """What is under way; `wait` gives it."""

    def __init__(self, finish: Callable[[], Any]) -> None:
        self._finish: Callable[[], Any] | None = finish
        self._result: Any = None

    def wait(self) -> Any:
        """The result, the same object every time.

        Communication: none but what is under way.
        """
        if self._finish is not None:
            self._result, self._finish = self._finish(), None
        return self._result


def redistribute_async(x: TorchDTensor, target: Layout, options: dict[str, Any]) -> InFlight:
    """See `TorchDTensor.redistribute_async`."""
    manner = manner_of(None, options)
    if target is x.layout or x.has_extreme_gradient():
        done = x.redistribute(layout=target, **options)
        return InFlight(lambda: done)
    source = _Source(x)
    local = x._local.detach()
    side = _Side(local)
    with torch.no_grad(), side.behind():
        running = start(_compiled(x, target, manner), local, platform.ops, platform.collectives, manner.summation)

    def finish() -> TorchDTensor:
        with torch.no_grad(), side.on():
            data = running.finish()
        side.join(data)
        return source.moved(data, target, manner)

    return InFlight(finish)


class _Source:
    """The place of a tensor in the graph at the time of a call, whatever becomes of it later; holds no data."""

    def __init__(self, x: TorchDTensor) -> None:
        self._is_graded = x.requires_grad and torch.is_grad_enabled()
        node = anchor(x.local()) if self._is_graded else x._local.detach().new_empty(()).expand(x._local.shape)
        self._place = x._wrap(node, x._spec)

    def moved(self, data: torch.Tensor, target: Layout, manner: Manner) -> TorchDTensor:
        """The tensor under `target`, with gradients if there were any at the call."""
        with torch.set_grad_enabled(self._is_graded):
            return self._place.moved(data, target, manner)


def full_tensor_async(x: TorchDTensor, grad_placements: Any, options: dict[str, Any]) -> InFlight:
    """See `TorchDTensor.full_tensor_async`."""
    coming = redistribute_async(x, as_layout(None, x.device_mesh, x.ndim), options)
    return InFlight(lambda: coming.wait().to_local(grad_placements=grad_placements))


def cached_full_tensor(x: TorchDTensor, options: dict[str, Any]) -> torch.Tensor:
    """See `cache` of `TorchDTensor.full_tensor`."""
    local = x._local
    if local.is_inference():
        return x.full_tensor(**options)  # has no count of its changes
    found = x._full
    if found is not None:
        result, its_version, source, version = found
        if source is local and local._version == version and result._version == its_version:
            return result
    with torch.no_grad():
        result = x.full_tensor(**options)
    x._full = result, result._version, local, local._version
    return result


def redistribute_many(
    tensors: Sequence[TorchDTensor], layouts: Sequence[Any], options: dict[str, Any]
) -> list[TorchDTensor]:
    """See `hyper_parallel.redistribute_many`."""
    if len(tensors) != len(layouts):
        raise LayoutError(
            f"redistribute_many: {len(tensors)} tensors, {len(layouts)} layouts. Give one layout for each tensor."
        )
    manner = manner_of(None, options)
    targets = [x.target_layout(None, spec, None) for x, spec in zip(tensors, layouts, strict=True)]
    out: list[Any] = [None] * len(tensors)
    together = []
    for i, (x, target) in enumerate(zip(tensors, targets, strict=True)):
        if target is x.layout or x.has_extreme_gradient():
            out[i] = x.redistribute(layout=target, **options)
        else:
            together.append(i)
    work = [(_compiled(tensors[i], targets[i], manner), tensors[i]._local.detach()) for i in together]
    with torch.no_grad():
        results = run_many(work, platform.ops, platform.collectives, manner.summation)
    for i, data in zip(together, results, strict=True):
        out[i] = tensors[i].moved(data, targets[i], manner)
    return out


def reshape(
    x: TorchDTensor,
    shape: tuple[int, ...],
    device_mesh: Any,
    wanted: Any,
    backward_dtype: torch.dtype | None,
    options: dict[str, Any],
) -> TorchDTensor:
    """`x` on another global shape and in another layout; each stage is differentiable. See Note [Stages].

    Communication: that of `plan_reshape`.
    """
    shape = full_shape(shape, x.numel())
    target = as_layout(wanted, x.device_mesh if device_mesh is None else device_mesh, len(shape), "redistribute")
    check_pending(target, x.dtype, "redistribute")
    manner = manner_of(backward_dtype, options)
    made = cached_reshape_plan(
        x.layout, target, tuple(x.shape), shape, x.element_size(), manner.topology, manner.max_bytes
    )
    for stage in made.stages:
        x = _seen(x, stage.src, stage.shape)
        x = x.redistribute(layout=stage.dst, backward_dtype=backward_dtype, **options)
    return _seen(x, target, shape)


def _seen(x: TorchDTensor, layout: Layout, shape: tuple[int, ...]) -> TorchDTensor:
    """`x` under the layout on another shape that gives every rank the same elements."""
    if layout is x.layout and shape == tuple(x.shape):
        return x
    spec = spec_of(layout, shape)
    return wrap(x.local().reshape(spec.local_shape), spec)


def _compiled(x: TorchDTensor, target: Layout, manner: Manner) -> CompiledPlan:
    return compiled_plan(
        x.layout,
        target,
        tuple(x.shape),
        x.element_size(),
        platform.rank(),
        manner.topology,
        manner.max_bytes,
    )


class _Side:
    """The side stream of a tensor's device; nothing where there are no streams."""

    def __init__(self, x: torch.Tensor) -> None:
        self._x = x
        self._handle: DeviceHandle = device_handle(x.device.type)
        self._stream: Any = None
        if self._handle.has_streams:
            if x.device not in _streams:
                _streams[x.device] = self._handle.new_stream()
            self._stream = _streams[x.device]

    @contextlib.contextmanager
    def behind(self) -> Iterator[None]:
        """Work on the side stream, behind what the current one has put out so far."""
        event = self._handle.record_event()
        with self.on():
            self._handle.wait_event(event)
            if self._stream is not None:
                self._x.record_stream(self._stream)
            yield

    def on(self) -> contextlib.AbstractContextManager[Any]:
        """Work on the side stream."""
        return self._handle.on(self._stream)

    def join(self, result: torch.Tensor) -> None:
        """Make the current stream wait for the side stream, and the result belong to it."""
        with self.on():
            event = self._handle.record_event()
        self._handle.wait_event(event)
        if self._stream is not None:
            result.record_stream(self._handle.current_stream())
