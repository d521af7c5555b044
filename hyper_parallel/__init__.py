# SPDX-License-Identifier: Apache-2.0
"""hyper-parallel: one-device models on thousands of devices. Importing this imports no framework."""

from hyper_parallel.core.bounded_cache import cache_info as cache_info
from hyper_parallel.core.bounded_cache import set_cache_limit as set_cache_limit
from hyper_parallel.core.device_mesh import DeviceMesh as DeviceMesh
from hyper_parallel.core.device_mesh import init_device_mesh as init_device_mesh
from hyper_parallel.core.device_mesh import release_unused_groups as release_unused_groups
from hyper_parallel.core.dtensor import DTensor as DTensor
from hyper_parallel.core.dtensor import distribute_tensor as distribute_tensor
from hyper_parallel.core.dtensor import empty as empty
from hyper_parallel.core.dtensor import full as full
from hyper_parallel.core.dtensor import ones as ones
from hyper_parallel.core.dtensor import rand as rand
from hyper_parallel.core.dtensor import randn as randn
from hyper_parallel.core.dtensor import redistribute_many as redistribute_many
from hyper_parallel.core.dtensor import zeros as zeros
from hyper_parallel.core.fully_shard.api import HSDPModule as HSDPModule
from hyper_parallel.core.fully_shard.api import fully_shard as fully_shard
from hyper_parallel.core.fully_shard.policy import CPUOffloadPolicy as CPUOffloadPolicy
from hyper_parallel.core.fully_shard.policy import MixedPrecisionPolicy as MixedPrecisionPolicy
from hyper_parallel.core.fully_shard.policy import OffloadPolicy as OffloadPolicy
from hyper_parallel.core.layout import Layout as Layout
from hyper_parallel.core.placement_types import Partial as Partial
from hyper_parallel.core.placement_types import RaggedShard as RaggedShard
from hyper_parallel.core.placement_types import Replicate as Replicate
from hyper_parallel.core.placement_types import Shard as Shard
from hyper_parallel.core.protocols import get_platform as get_platform
from hyper_parallel.core.protocols import register_platform as register_platform
from hyper_parallel.core.protocols import set_platform as set_platform
from hyper_parallel.core.shard.api import local_map as local_map
from hyper_parallel.core.shard.api import register_sharding_rule as register_sharding_rule
from hyper_parallel.core.shard.api import shard_module as shard_module
from hyper_parallel.core.shard.sharding_plan import ShardingPlan as ShardingPlan
from hyper_parallel.core.shard.sharding_plan import Style as Style
from hyper_parallel.core.shard.sharding_plan import column_parallel as column_parallel
from hyper_parallel.core.shard.sharding_plan import row_parallel as row_parallel
from hyper_parallel.core.shard.sharding_plan import sequence_parallel as sequence_parallel
from hyper_parallel.core.shard.sharding_plan import vocabulary_parallel as vocabulary_parallel
from hyper_parallel.core.tensor_redistribution import Topology as Topology
from hyper_parallel.core.tensor_redistribution import plan as plan

register_platform("torch", "hyper_parallel.platform.torch")
register_platform("mindspore", "hyper_parallel.platform.mindspore")
