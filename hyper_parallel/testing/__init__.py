# SPDX-License-Identifier: Apache-2.0
"""Tools for tests of distributed code; users may use them too."""

from hyper_parallel.testing.counters import CommCounter as CommCounter
from hyper_parallel.testing.distributed import DistributedTestError as DistributedTestError
from hyper_parallel.testing.distributed import distributed as distributed
