# SPDX-License-Identifier: Apache-2.0
"""N ranks in one process on numpy: runs the same plans as real processes do, for tests and dry runs."""

from hyper_parallel.platform.virtual.tensor import VirtualOps as VirtualOps
from hyper_parallel.platform.virtual.world import VirtualWorld as VirtualWorld
