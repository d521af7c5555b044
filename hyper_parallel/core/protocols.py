# SPDX-License-Identifier: Apache-2.0
"""What a framework provides, and how it is found.

Every seam is a small `Protocol`. A platform is loaded by name on first use: the core never imports a framework.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from hyper_parallel.core.errors import HyperParallelError

Tensor = Any
"""A framework's plain tensor. The core only passes it on."""


class TensorOps(Protocol):
    """Local tensor work that executing a plan needs. All shapes are local."""

    def reshape(self, x: Tensor, shape: Sequence[int]) -> Tensor:
        """Contiguous `x` with other sizes, without a copy."""
        ...

    def slice(self, x: Tensor, box: tuple[tuple[int, int], ...]) -> Tensor:
        """The part of `x` inside `box`, without a copy where the framework can."""
        ...

    def empty(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """An uninitialised contiguous tensor with the dtype and device of `like`."""
        ...

    def zeros(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """A contiguous tensor of zeros with the dtype and device of `like`."""
        ...

    def write(self, x: Tensor, box: tuple[tuple[int, int], ...], value: Tensor) -> None:
        """Copy `value` into the part of `x` inside `box`."""
        ...

    def scale(self, x: Tensor, factor: float) -> Tensor:
        """`x` times a number, as a new tensor of the same dtype."""
        ...

    def contiguous(self, x: Tensor) -> Tensor:
        """`x` in row-major order, `x` itself if it already is."""
        ...

    def prefers_halves(self, like: Tensor, num_ranks: int) -> bool:
        """Whether sums over so many ranks shall be a reduce-scatter and an all-gather; the same on all of them."""
        ...


class Summation(Enum):
    """How carefully a sum over ranks is made. Values of 16 bits are added in fp32 and travel in 16 bits in any case."""

    FAST = "fast"
    """As the backend does it best."""
    ORDERED = "ordered"
    """In the order of the ranks, by us: the same bits in every run, on any backend."""
    COMPENSATED = "compensated"
    """In that order and in twice the precision, rounded once: fp32 in float64, float64 with its rounding errors."""


@dataclass(frozen=True, slots=True)
class Reduction:
    """What becomes of the values of all ranks.

    Attributes:
        op: `sum`, `max`, `min`, `prod`, `all` or `any`.
        divisor: What the sum is divided by, once, before it is rounded to the dtype of the values.
        summation: How carefully it is made.
    """

    op: str
    divisor: int = 1
    summation: Summation = Summation.FAST


class Pending(Protocol):
    """A collective under way."""

    def wait(self) -> Any:
        """Its result, once it is there (on a device with streams: once the current stream will have it)."""
        ...


class Collectives(Protocol):
    """Communication that a plan step needs, over the ranks of one group, in group order.

    Every method starts a collective and returns at once. Inputs must not be changed until it has ended, and are not
    changed by it. Parts and outputs may be views of any strides: what cannot travel as it lies is packed on the way.
    """

    def all_reduce(self, x: Tensor, reduction: Reduction, ranks: tuple[int, ...]) -> Pending:
        """Result: the reduction of all `x`, on every rank, in memory of its own."""
        ...

    def reduce_scatter(
        self, parts: Sequence[Tensor], reduction: Reduction, ranks: tuple[int, ...], *, is_equal: bool
    ) -> Pending:
        """`parts[i]` goes to rank i. Result: the reduction of this rank's part, in memory of its own.

        `is_equal`: all parts have one shape, which every rank of the group knows.
        """
        ...

    def all_gather(self, x: Tensor, outs: Sequence[Tensor], ranks: tuple[int, ...], *, is_equal: bool) -> Pending:
        """Write `x` of rank i into `outs[i]`, on every rank. `is_equal`: all have one shape."""
        ...

    def all_to_all(self, sends: Sequence[Tensor], outs: Sequence[Tensor], ranks: tuple[int, ...]) -> Pending:
        """Write what rank i sends to this rank into `outs[i]`. Sizes may differ or be 0."""
        ...


class Platform(Protocol):
    """One framework."""

    name: str
    ops: TensorOps
    collectives: Collectives

    def rank(self) -> int:
        """Global rank of this process (0 when nothing was started)."""
        ...

    def world_size(self) -> int:
        """Number of processes of the job (1 when nothing was started)."""
        ...

    def init_process_group(self, device_type: str) -> None:
        """Start the job's default process group unless it runs already."""
        ...

    def process_group(self, ranks: tuple[int, ...]) -> Any:
        """The pooled process group of exactly these ranks."""
        ...

    def release_unused_groups(self) -> int:
        """See `hyper_parallel.release_unused_groups`."""
        ...

    def dtensor_type(self) -> Any:
        """The framework's class of distributed tensors."""
        ...

    def modules(self) -> Modules:
        """What the framework does with modules and functions."""
        ...


class Modules(Protocol):
    """Work on a framework's modules and functions."""

    def fully_shard(self, module: Any, **options: Any) -> Any:
        """See `hyper_parallel.fully_shard`."""
        ...

    def shard_module(self, module: Any, mesh: Any, plan: Any, *, src_data_rank: int | None) -> Any:
        """See `hyper_parallel.shard_module`."""
        ...

    def local_map(self, func: Any, out_layouts: Any, in_layouts: Any, out_shapes: Any) -> Any:
        """See `hyper_parallel.local_map`."""
        ...

    def register_rule(self, func: Any, template: Any) -> None:
        """See `hyper_parallel.register_sharding_rule`."""
        ...


class PlatformError(HyperParallelError, RuntimeError):
    """No framework, or more than one, can be meant.

    Wrong: `init_device_mesh(...)` in a process that imported no framework and has none installed.
    Why: someone has to move the data.
    Right: install one (`pip install hyper-parallel[torch]`) or call `set_platform("torch")`.
    """


class _Registry:
    """Platforms by name: where to import them from, and those in use."""

    def __init__(self) -> None:
        self.modules: dict[str, str] = {}
        self.loaded: dict[str, Platform] = {}
        self.current: Platform | None = None


_registry = _Registry()


def register_platform(name: str, module: str) -> None:
    """Make `set_platform(name)` and tensors of that framework find `module`, which exports `platform`.

    Args:
        name: Root module of the framework's tensors, `"torch"` for `torch.Tensor`.
        module: Import path of the adapter.
    """
    _registry.modules[name] = module


def load_platform(name: str) -> Platform:
    """The platform called `name`, imported on the first call.

    Raises:
        PlatformError: nothing is registered under that name.
    """
    found = _registry.loaded.get(name)
    if found is None:
        module = _registry.modules.get(name)
        if module is None:
            known = ", ".join(sorted(_registry.modules))
            raise PlatformError(f"platform {name!r}: not registered. Use one of {known}.")
        found = importlib.import_module(module).platform
        _registry.loaded[name] = found
    return found


def set_platform(name: str | None) -> None:
    """Choose the platform of this process; None returns to the default.

    Raises:
        PlatformError: nothing is registered under that name.
    """
    _registry.current = None if name is None else load_platform(name)


def get_platform() -> Platform:
    """The platform of this process: the one set, else `HYPER_PARALLEL_PLATFORM`, else torch.

    Raises:
        PlatformError: the chosen framework cannot be imported.
    """
    if _registry.current is None:
        name = os.environ.get("HYPER_PARALLEL_PLATFORM", "torch")
        try:
            _registry.current = load_platform(name)
        except ImportError as error:
            raise PlatformError(
                f"platform {name!r}: {error}. Install it, or choose another with set_platform."
            ) from error
    return _registry.current


def platform_of(obj: object) -> Platform:
    """The platform whose framework defines the type of `obj` (a tensor, a module).

    Raises:
        PlatformError: no base class of `obj` belongs to a registered framework.
    """
    for base in type(obj).__mro__:
        name = base.__module__.partition(".")[0]
        if name in _registry.modules:
            return load_platform(name)
    raise PlatformError(f"{type(obj).__name__}: belongs to no registered framework. Pass a tensor or module of one.")
