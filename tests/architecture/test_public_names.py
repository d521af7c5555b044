# SPDX-License-Identifier: Apache-2.0
"""The names that users import from the root; a change here is a change of the API."""

from __future__ import annotations

import inspect

import hyper_parallel

NAMES = [
    "CPUOffloadPolicy",
    "DTensor",
    "DeviceMesh",
    "HSDPModule",
    "Layout",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "Partial",
    "RaggedShard",
    "Replicate",
    "Shard",
    "ShardingPlan",
    "Style",
    "Topology",
    "cache_info",
    "column_parallel",
    "distribute_tensor",
    "empty",
    "full",
    "fully_shard",
    "get_platform",
    "init_device_mesh",
    "local_map",
    "ones",
    "plan",
    "rand",
    "randn",
    "redistribute_many",
    "register_platform",
    "register_sharding_rule",
    "release_unused_groups",
    "row_parallel",
    "sequence_parallel",
    "set_cache_limit",
    "set_platform",
    "shard_module",
    "vocabulary_parallel",
    "zeros",
]


def test_root_exports_exactly_these() -> None:
    found = {n for n, v in vars(hyper_parallel).items() if not n.startswith("_") and not inspect.ismodule(v)}
    assert found == set(NAMES)


def test_each_has_a_docstring() -> None:
    assert [name for name in NAMES if not getattr(hyper_parallel, name).__doc__] == []
