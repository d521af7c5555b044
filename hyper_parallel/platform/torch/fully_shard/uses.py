# SPDX-License-Identifier: Apache-2.0
"""Which parameters of a unit got no gradient on any rank: theirs stays as it is, `None` mostly."""

from __future__ import annotations

import torch
import torch.distributed as dist

from hyper_parallel.platform.torch.process_groups import pool


class Uses:
    """Asks all ranks which parameters they have a gradient of. Every rank must, as none knows whether another needs it.

    Args:
        used: Indices of the parameters that this rank has a gradient of.
        num: Number of parameters of the unit.
        ranks: The ranks whose gradients are summed.
        device: Where the unit lies.

    Communication: one all-reduce of `num` bytes, none for a single parameter: it has a gradient wherever its unit has.
    """

    def __init__(self, used: set[int], num: int, ranks: tuple[int, ...], device: torch.device) -> None:
        self._missing = [i for i in range(num) if i not in used]
        self._flags: torch.Tensor | None = None
        if num > 1 and len(ranks) > 1:
            self._flags = torch.ones(num, dtype=torch.uint8, device=device)
            if self._missing:
                self._flags[self._missing] = 0
            self._work = dist.all_reduce(self._flags, dist.ReduceOp.MAX, group=pool.group(ranks), async_op=True)

    def unused(self) -> set[int]:
        """Indices of the parameters that no rank has a gradient of."""
        if self._flags is None:
            return set(self._missing)
        self._work.wait()
        if not self._missing:
            # Not read where the answer is known: on an accelerator that would stop the host.
            return set()
        flags = self._flags.tolist()
        return {i for i in self._missing if not flags[i]}
