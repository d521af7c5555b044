# SPDX-License-Identifier: Apache-2.0
"""Redistribution: plan it, read it, run it."""

from __future__ import annotations

from hyper_parallel.core.layout import Layout
from hyper_parallel.core.protocols import Platform, Summation, Tensor
from hyper_parallel.core.tensor_redistribution.cache import compiled_plan as compiled_plan
from hyper_parallel.core.tensor_redistribution.cache import plan_cache as plan_cache
from hyper_parallel.core.tensor_redistribution.cost import Topology as Topology
from hyper_parallel.core.tensor_redistribution.drive import run as run
from hyper_parallel.core.tensor_redistribution.drive import run_many as run_many
from hyper_parallel.core.tensor_redistribution.drive import start as start
from hyper_parallel.core.tensor_redistribution.execute import BoxTable as BoxTable
from hyper_parallel.core.tensor_redistribution.execute import CompiledPlan as CompiledPlan
from hyper_parallel.core.tensor_redistribution.execute import compile_plan as compile_plan
from hyper_parallel.core.tensor_redistribution.execute import execute_steps as execute_steps
from hyper_parallel.core.tensor_redistribution.planner import Plan as Plan
from hyper_parallel.core.tensor_redistribution.planner import plan as plan
from hyper_parallel.core.tensor_redistribution.reshape_plan import ReshapePlan as ReshapePlan
from hyper_parallel.core.tensor_redistribution.reshape_plan import cached_reshape_plan as cached_reshape_plan
from hyper_parallel.core.tensor_redistribution.reshape_plan import plan_reshape as plan_reshape
from hyper_parallel.core.tensor_redistribution.steps import Step as Step
from hyper_parallel.core.tensor_redistribution.steps import StepKind as StepKind


def redistribute_local(
    local: Tensor,
    src: Layout,
    dst: Layout,
    shape: tuple[int, ...],
    itemsize: int,
    platform: Platform,
    rank: int | None = None,
    *,
    topology: Topology | None = None,
    max_bytes: int | None = None,
    summation: Summation = Summation.FAST,
) -> Tensor:
    """This rank's local tensor under `dst`, from the one under `src`; not differentiable.

    Args:
        local: Local tensor under `src`; not changed.
        src: Layout it has.
        dst: Layout it shall have, on the same mesh.
        shape: Global shape.
        itemsize: Bytes per element.
        platform: The framework of `local`.
        rank: Global rank. Default: that of this process.
        topology: What communication costs, the same on every rank. Default: `Topology.of` the mesh.
        max_bytes: Most bytes to hold at once, the same on every rank. Default: any number.
        summation: How carefully sums are made.

    Returns:
        `local` itself if nothing has to be done, else a tensor that shares no memory with it.

    Raises:
        LayoutError: as `plan`, on every rank, before any data moves.

    Communication: that of `plan(src, dst, shape)`. Memory: `Plan.peak_bytes`.
    """
    if src is dst:
        return local
    rank = platform.rank() if rank is None else rank
    compiled = compiled_plan(src, dst, shape, itemsize, rank, topology, max_bytes)
    return run(compiled, local, platform.ops, platform.collectives, summation)
