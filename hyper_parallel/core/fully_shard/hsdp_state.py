# SPDX-License-Identifier: Apache-2.0
"""The states of a parameter group, and which may follow which."""

from __future__ import annotations

from enum import Enum

from hyper_parallel.core.errors import ParamStateError


class GroupState(Enum):
    """Where the parameters of a group are."""

    SHARDED = "sharded"
    """Each rank holds its shard; the full buffer has no memory."""
    UNSHARDING = "unsharding"
    """The all-gather is under way; nobody may read the full buffer."""
    UNSHARDED = "unsharded"
    """The full buffer is valid."""


_ALLOWED = {
    GroupState.SHARDED: (GroupState.UNSHARDING,),
    GroupState.UNSHARDING: (GroupState.UNSHARDED,),
    GroupState.UNSHARDED: (GroupState.SHARDED,),
}


def check_transition(name: str, before: GroupState, after: GroupState) -> None:
    """Refuse a change of state that would read or free memory at the wrong time.

    Raises:
        ParamStateError: `after` may not follow `before`.
    """
    if after not in _ALLOWED[before]:
        raise ParamStateError(
            f'group "{name}": it is {before.value} and cannot become {after.value}. Wait for the pending unshard first.'
        )
