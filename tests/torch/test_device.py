# SPDX-License-Identifier: Apache-2.0
"""The device handle: the CPU's for real, an accelerator's against a module that records what it is asked."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from hyper_parallel.platform.torch.device import DeviceError, DeviceHandle, device_handle, register_device


def test_the_cpu_has_no_streams_and_nothing_to_wait_for() -> None:
    handle = device_handle("cpu")
    assert handle is device_handle("cpu")
    assert not handle.has_streams
    assert handle.new_stream() is handle.current_stream() is handle.record_event() is None
    with handle.on(None):
        handle.wait_event(None)
        handle.synchronize()
    assert handle.current_device() == torch.device("cpu")
    assert handle.memory_allocated() > 2**20
    assert handle.max_memory_allocated() > 2**20


def test_the_random_state_of_the_cpu_is_put_back() -> None:
    handle = device_handle("cpu")
    state = handle.rng_state()
    first = torch.rand(3)
    handle.set_rng_state(state)
    assert torch.equal(torch.rand(3), first)


class Stream:
    def __init__(self) -> None:
        self.waits: list[Any] = []

    def wait_event(self, event: Any) -> None:
        self.waits.append(event)


class Event:
    stream: Any = None

    def record(self, stream: Any) -> None:
        self.stream = stream


class FakeModule:
    """What torch.cuda and its like have."""

    Stream, Event = Stream, Event

    def __init__(self) -> None:
        self.now = Stream()
        self.idle = False

    def current_stream(self) -> Stream:
        return self.now

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.now = self.now, stream
        yield
        self.now = before

    def current_device(self) -> int:
        return 3

    def synchronize(self) -> None:
        self.idle = True

    def memory_allocated(self) -> int:
        return 5

    def max_memory_allocated(self) -> int:
        return 7


def test_an_accelerator_is_driven_through_its_module() -> None:
    module = FakeModule()
    handle = DeviceHandle("cuda", module)
    assert handle.has_streams
    main, side = handle.current_stream(), handle.new_stream()
    with handle.on(side):
        assert handle.current_stream() is side
        event = handle.record_event()
    assert event.stream is side
    handle.wait_event(event)
    assert main.waits == [event]
    handle.synchronize()
    assert module.idle
    assert handle.current_device() == torch.device("cuda", 3)
    assert (handle.memory_allocated(), handle.max_memory_allocated()) == (5, 7)


def test_an_unknown_device_says_how_to_register_one() -> None:
    with pytest.raises(DeviceError, match=r"'quux'.*register_device\('quux', handle\)"):
        device_handle("quux")
    handle = DeviceHandle("quux", FakeModule())
    register_device("quux", handle)
    assert device_handle("quux") is handle
