# SPDX-License-Identifier: Apache-2.0
"""The PyTorch platform."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from hyper_parallel.platform.torch.collectives import TorchCollectives, TorchOps
from hyper_parallel.platform.torch.process_groups import pool


class TorchPlatform:
    """`Platform` on torch and torch.distributed."""

    name = "torch"

    def __init__(self) -> None:
        self.ops = TorchOps()
        self.collectives = TorchCollectives()

    def rank(self) -> int:
        """Global rank of this process."""
        return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))

    def world_size(self) -> int:
        """Number of processes of the job."""
        return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))

    def init_process_group(self, device_type: str) -> None:
        """Start the default process group as torchrun describes it, or alone without torchrun."""
        if dist.is_initialized():
            return
        if device_type != "cpu":
            local_rank = int(os.environ.get("LOCAL_RANK", "0"))
            torch.get_device_module(device_type).set_device(local_rank)
        backend = dist.get_default_backend_for_device(device_type)
        if "RANK" in os.environ:
            dist.init_process_group(backend)
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)

    def process_group(self, ranks: tuple[int, ...]) -> Any:
        """The pooled process group of exactly these ranks."""
        return pool.group(ranks)

    def release_unused_groups(self) -> int:
        """See `hyper_parallel.release_unused_groups`."""
        return pool.release_unused()

    def dtensor_type(self) -> type:
        """`TorchDTensor`."""
        from hyper_parallel.platform.torch.dtensor import TorchDTensor

        return TorchDTensor

    def modules(self) -> Any:
        """The module with `shard_module`, `fully_shard` and their kin."""
        from hyper_parallel.platform.torch import modules

        return modules


platform = TorchPlatform()
