# SPDX-License-Identifier: Apache-2.0
"""hyper-parallel: one-device models on thousands of devices. Importing this imports no framework."""

from hyper_parallel.core.device_mesh import DeviceMesh as DeviceMesh
from hyper_parallel.core.device_mesh import init_device_mesh as init_device_mesh
from hyper_parallel.core.layout import Layout as Layout
from hyper_parallel.core.placement_types import Partial as Partial
from hyper_parallel.core.placement_types import RaggedShard as RaggedShard
from hyper_parallel.core.placement_types import Replicate as Replicate
from hyper_parallel.core.placement_types import Shard as Shard
from hyper_parallel.core.protocols import get_platform as get_platform
from hyper_parallel.core.protocols import register_platform, set_platform
from hyper_parallel.core.protocols import set_platform as set_platform

register_platform("torch", "hyper_parallel.platform.torch")
register_platform("mindspore", "hyper_parallel.platform.mindspore")
