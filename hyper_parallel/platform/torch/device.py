# SPDX-License-Identifier: Apache-2.0
"""One handle per device type: streams, events, synchronisation, memory, random state.

The module that torch registers for a device (`torch.cuda`, `torch.npu`, `torch.xpu`, `torch.mps`, a private
backend) has these under the same names, so one class serves them all. The CPU has no streams: its
handle does nothing, for real. Only the CPU part has run on the machines this was developed on.
"""

from __future__ import annotations

import contextlib
import resource
from pathlib import Path
from typing import Any

import torch

from hyper_parallel.core.errors import HyperParallelError


class DeviceError(HyperParallelError, ValueError):
    """A device type that torch knows no module for.

    Wrong: `device_handle("xyz")`.
    Why: streams and events come from the module torch registers for the device.
    Right: import the device's package first, or call `register_device(name, handle)`.
    """


class DeviceHandle:
    """Streams, events, memory and random state of an accelerator, through the module torch has for it."""

    has_streams = True

    def __init__(self, device_type: str, module: Any) -> None:
        self.device_type = device_type
        self._module = module

    def current_device(self) -> torch.device:
        """The device this process works on."""
        return torch.device(self.device_type, self._module.current_device())

    def new_stream(self) -> Any:
        """A side stream."""
        return self._module.Stream()

    def current_stream(self) -> Any:
        """The stream that work is put on now."""
        return self._module.current_stream()

    def on(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        """Put work on `stream` inside the block."""
        return self._module.stream(stream)

    def record_event(self) -> Any:
        """An event after all work put on the current stream so far."""
        event = self._module.Event()
        event.record(self._module.current_stream())
        return event

    def wait_event(self, event: Any) -> None:
        """Work put on the current stream from now on waits for `event`; the host does not."""
        self._module.current_stream().wait_event(event)

    def synchronize(self) -> None:
        """Block the host until the device is idle."""
        self._module.synchronize()

    def memory_allocated(self) -> int:
        """Bytes held by tensors now."""
        return int(self._module.memory_allocated())

    def max_memory_allocated(self) -> int:
        """Largest number of bytes held by tensors since the start."""
        return int(self._module.max_memory_allocated())

    def rng_state(self) -> torch.Tensor:
        """State of the device's random generator."""
        return self._module.get_rng_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        """Set the state of the device's random generator."""
        self._module.set_rng_state(state)


class CpuHandle(DeviceHandle):
    """The CPU: work is done when the call returns, so there is nothing to wait for."""

    has_streams = False

    def __init__(self) -> None:
        super().__init__("cpu", None)

    def current_device(self) -> torch.device:
        """The CPU."""
        return torch.device("cpu")

    def new_stream(self) -> None:
        """None: there are no streams."""
        return

    def current_stream(self) -> None:
        """None: there are no streams."""
        return

    def on(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        """A block that changes nothing."""
        return contextlib.nullcontext()

    def record_event(self) -> None:
        """None: all work is done."""
        return

    def wait_event(self, event: Any) -> None:
        """Return at once."""

    def synchronize(self) -> None:
        """Return at once."""

    def memory_allocated(self) -> int:
        """Resident bytes of the process (the CPU allocator keeps no count); the peak where the system tells no more."""
        try:
            pages = int(Path("/proc/self/statm").read_text().split()[1])
        except OSError:
            return self.max_memory_allocated()
        return pages * resource.getpagesize()

    def max_memory_allocated(self) -> int:
        """Largest resident size of the process in bytes."""
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def rng_state(self) -> torch.Tensor:
        """State of the default generator."""
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        """Set the state of the default generator."""
        torch.set_rng_state(state)


_handles: dict[str, DeviceHandle] = {"cpu": CpuHandle()}


def register_device(device_type: str, handle: DeviceHandle) -> None:
    """Use `handle` for a device type that torch has no module for, or whose module differs from `torch.cuda`."""
    _handles[device_type] = handle


def device_handle(device_type: str) -> DeviceHandle:
    """The handle of a device type.

    Raises:
        DeviceError: torch has no module for it, and none was registered.
    """
    found = _handles.get(device_type)
    if found is None:
        try:
            module = torch.get_device_module(device_type)
        except RuntimeError as error:
            raise DeviceError(
                f"device {device_type!r}: torch has no module for it. Import the device's package first, or call "
                f"register_device({device_type!r}, handle)."
            ) from error
        found = _handles[device_type] = DeviceHandle(device_type, module)
    return found
