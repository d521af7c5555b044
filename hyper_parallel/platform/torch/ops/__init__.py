# SPDX-License-Identifier: Apache-2.0
"""Which rule serves which torch function. Importing this fills the table of dispatch.py."""

from hyper_parallel.platform.torch.dispatch import dispatch
from hyper_parallel.platform.torch.dtensor import TorchDTensor
from hyper_parallel.platform.torch.ops import attributes as attributes
from hyper_parallel.platform.torch.ops import embedding as embedding
from hyper_parallel.platform.torch.ops import factories as factories
from hyper_parallel.platform.torch.ops import index as index
from hyper_parallel.platform.torch.ops import loss as loss
from hyper_parallel.platform.torch.ops import matmul as matmul
from hyper_parallel.platform.torch.ops import norm as norm
from hyper_parallel.platform.torch.ops import optimizer as optimizer
from hyper_parallel.platform.torch.ops import pointwise as pointwise
from hyper_parallel.platform.torch.ops import random as random
from hyper_parallel.platform.torch.ops import reduction as reduction
from hyper_parallel.platform.torch.ops import view as view

TorchDTensor.__torch_function__ = classmethod(dispatch)  # type: ignore[assignment, method-assign]
