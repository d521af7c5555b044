# SPDX-License-Identifier: Apache-2.0
"""Random functions: copies alike, shards independent, nothing consumed by anything else.

Note [Random state]
    Where the result lies whole on every rank, the default generator is used as it stands: ranks that were
    seeded alike draw alike. Where it is split, one number drawn from that generator, mixed with the
    position of the shard, seeds the draw. So all ranks consume the same, recomputation by activation
    checkpointing draws the same again, and a mesh of one rank gives what plain torch gives. Ranks that
    were seeded differently cannot hold equal copies; the first random op on a mesh checks that.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from hyper_parallel.core.device_mesh import DeviceMesh
from hyper_parallel.core.errors import MeshError
from hyper_parallel.core.layout import Layout
from hyper_parallel.core.shard.rules.pointwise import pointwise
from hyper_parallel.platform.torch.device import device_handle
from hyper_parallel.platform.torch.dispatch import HANDLERS, Rule, ShardedOp, register

# Nothing is forgotten: ranks know different meshes, and one that forgot alone would wait for the others in a new check.
_checked_meshes: set[DeviceMesh] = set()


def check_seeds(mesh: DeviceMesh) -> None:
    """Once per mesh: were all its ranks seeded alike?"""
    if mesh in _checked_meshes or mesh.size() == 1:
        return
    from hyper_parallel.platform.torch import platform

    seeds = platform.collectives.all_gather_object(torch.initial_seed(), mesh.ranks)
    if len(set(seeds)) > 1:
        raise MeshError(
            f"random op on mesh {mesh}: its ranks were seeded differently ({seeds[:4]} ...), so copies would differ. "
            "Call torch.manual_seed with one value on all ranks of the mesh."
        )
    _checked_meshes.add(mesh)


def shard_index(layout: Layout) -> int:
    """Position of this rank's shard among all shards of the layout; 0 on a tensor that is whole."""
    mesh, index = layout.mesh, 0
    coord = mesh.coord(mesh.get_rank())
    for axis, size, position in zip(mesh.axis_names, mesh.shape, coord, strict=True):
        if layout.dim_of(axis) is not None:
            index = index * size + position
    return index


def random_call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], resolved: Any) -> Any:
    """Run a random function on a local tensor. See Note [Random state]."""
    return draw(resolved.outputs[0].layout, lambda: func(*args, **kwargs))


def draw(layout: Layout, call: Any) -> Any:
    """Run `call`, which draws random numbers, for a result with this layout."""
    mesh = layout.mesh
    if mesh.size() == 1:
        return call()
    check_seeds(mesh)
    if all(mesh.size(axis) == 1 for axis in layout.sharded_axes):
        return call()
    handle = device_handle(mesh.device_type)
    seed = int(torch.randint(2**62, ()))
    seed = (seed + 0x9E3779B97F4A7C15 * (shard_index(layout) + 1)) % 2**63
    cpu_state = torch.get_rng_state()
    device_state = handle.rng_state() if handle.has_streams else None
    torch.manual_seed(seed)
    try:
        return call()
    finally:
        torch.set_rng_state(cpu_state)
        if device_state is not None:
            handle.set_rng_state(device_state)


def _random(input: Any, *args: Any, **kwargs: Any) -> Rule:
    """A random function of one tensor that keeps its shape."""
    return Rule(pointwise((input.shape,)), call=random_call)


def _dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Rule:
    """Dropout: random only while training."""
    return Rule(pointwise((input.shape,)), call=random_call if training and p > 0 else None)


register("dropout alpha_dropout", ShardedOp(_dropout))
register("bernoulli rand_like randn_like randint_like", ShardedOp(_random))
register(
    "normal_ uniform_ bernoulli_ exponential_ log_normal_ cauchy_ geometric_ random_",
    ShardedOp(_random, in_place=True, values=False),
)


def _init_uniform(tensor: Any, a: float = 0.0, b: float = 1.0, generator: Any = None) -> Any:
    with torch.no_grad():
        return tensor.uniform_(a, b) if generator is None else tensor.uniform_(a, b, generator=generator)


def _init_normal(tensor: Any, mean: float = 0.0, std: float = 1.0, generator: Any = None) -> Any:
    with torch.no_grad():
        return tensor.normal_(mean, std) if generator is None else tensor.normal_(mean, std, generator=generator)


def _init_constant(tensor: Any, val: float) -> Any:
    with torch.no_grad():
        return tensor.fill_(val)


def _init_kaiming_uniform(
    tensor: Any, a: float = 0, mode: Any = "fan_in", nonlinearity: Any = "leaky_relu", generator: Any = None
) -> Any:
    """He et al. 2015 (arXiv 1502.01852): bound = gain * sqrt(3 / fan), fans being those of the global shape."""
    fan = nn.init._calculate_correct_fan(tensor, mode)
    bound = nn.init.calculate_gain(nonlinearity, a) * math.sqrt(3 / fan)
    return _init_uniform(tensor, -bound, bound, generator)


# The functions of nn.init that torch hands over whole; the others arrive here op by op.
for _init, _ours in (
    (nn.init.uniform_, _init_uniform),
    (nn.init.normal_, _init_normal),
    (nn.init.constant_, _init_constant),
    (nn.init.kaiming_uniform_, _init_kaiming_uniform),
):
    HANDLERS[_init] = lambda func, args, kwargs, ours=_ours: ours(*args, **kwargs)  # type: ignore[misc]
