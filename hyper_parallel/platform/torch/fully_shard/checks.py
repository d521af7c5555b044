# SPDX-License-Identifier: Apache-2.0
"""What would train wrongly without a word, found before anything changes."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch.nn.utils import stateless

from hyper_parallel.core.errors import ParamStateError

if TYPE_CHECKING:
    from hyper_parallel.platform.torch.fully_shard.group import ParamGroup
    from hyper_parallel.platform.torch.fully_shard.unit import FlatParam


def check_optimizers(groups: Sequence[ParamGroup]) -> None:
    """Refuse to train when an optimizer holds the parameters as they were: it would change nothing.

    Raises:
        ParamStateError: an optimizer was built before `fully_shard`.
    """
    params = (param for group in groups for unit in group.units for param in unit.params)
    held = next(((param, old) for param in params if (old := param.original()) is not None), None)
    if held is None:
        return
    param, old = held
    lists = [x for x in gc.get_referrers(old) if type(x) is list]
    if any(
        isinstance(x, dict) and any(x.get("params") is y for y in lists) for y in lists for x in gc.get_referrers(y)
    ):
        raise ParamStateError(
            f'parameter "{param.name}": an optimizer holds it as it was before fully_shard, and would train nothing. '
            "Build the optimizer after wrapping."
        )


def check_lent(param: FlatParam) -> None:
    """Refuse what `torch.func.functional_call` put in the place of a parameter: gathering would keep it for good.

    Looks through the stack, which is done only where something else than the parameter was found.

    Raises:
        ParamStateError: a functional call is under way.
    """
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code is stateless._functional_call.__code__:
            raise ParamStateError(
                f'functional_call with another "{param.name}": fully_shard gathers a parameter from all ranks, and has '
                "no way to take one for a single call. Put the weights in with load_state_dict, or call the model "
                "unwrapped."
            )
        frame = frame.f_back  # type: ignore[assignment]
