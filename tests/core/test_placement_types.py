# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest

from hyper_parallel.core.errors import LayoutError, PartialError
from hyper_parallel.core.placement_types import (
    Partial,
    Placement,
    RaggedShard,
    ReduceOp,
    Replicate,
    Shard,
    as_placement,
)

ALL = [Shard(0), Shard(-1), RaggedShard(1, (2, 0, 3)), Replicate(), *(Partial(op.value) for op in ReduceOp)]


@pytest.mark.parametrize("placement", ALL, ids=str)
def test_placements_are_values(placement: Placement) -> None:
    again = eval(repr(placement))
    assert again == placement
    assert hash(again) == hash(placement)
    assert copy.deepcopy(placement) == placement
    assert pickle.loads(pickle.dumps(placement)) == placement
    assert as_placement(placement) is placement


@pytest.mark.parametrize("placement", ALL, ids=str)
def test_placements_never_change(placement: Placement) -> None:
    for name in ("dim", "sizes", "reduce_op", "other"):
        with pytest.raises((AttributeError, TypeError, dataclasses.FrozenInstanceError)):
            setattr(placement, name, 1)


def test_kinds_differ() -> None:
    assert len(set(ALL)) == len(ALL)
    assert Shard(0) != RaggedShard(0, (1, 1))


def test_questions() -> None:
    assert Shard(0).is_shard()
    assert Shard(0).is_shard(0)
    assert not Shard(0).is_shard(1)
    assert RaggedShard(1, (1, 2)).is_shard(1)
    assert Replicate().is_replicate()
    assert not Replicate().is_shard()
    assert Partial("max").is_partial()
    assert Partial("max").is_partial("max")
    assert not Partial("max").is_partial("sum")
    assert not Shard(0).is_partial()
    assert not Shard(0).is_replicate()


def test_only_sum_and_avg_are_linear() -> None:
    assert [op.value for op in ReduceOp if op.is_linear] == ["sum", "avg"]


def test_unknown_reduction() -> None:
    with pytest.raises(PartialError, match=r"Partial\('mean'\): no such reduction\. Use one of sum, avg"):
        Partial("mean")


def test_negative_ragged_size() -> None:
    with pytest.raises(LayoutError, match=r"RaggedShard\(0, \(1, -1\)\): a size is negative\. Give one size"):
        RaggedShard(0, (1, -1))


def test_torch_placements_are_understood() -> None:
    theirs = pytest.importorskip("torch.distributed.tensor")
    assert as_placement(theirs.Shard(1)) == Shard(1)
    assert as_placement(theirs.Replicate()) == Replicate()
    assert as_placement(theirs.Partial()) == Partial("sum")
    assert as_placement(theirs.Partial("max")) == Partial("max")


@pytest.mark.parametrize("obj", [0, "dp", None, object()])
def test_other_objects_are_refused(obj: object) -> None:
    with pytest.raises(LayoutError, match=r"not a placement .* Use Shard, RaggedShard, Replicate or Partial"):
        as_placement(obj)
