# SPDX-License-Identifier: Apache-2.0
"""`shard_module`, `local_map`, `register_sharding_rule`: the framework-free entries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hyper_parallel.core.device_mesh import as_mesh
from hyper_parallel.core.protocols import get_platform, platform_of
from hyper_parallel.core.shard.factor_rule import parse_rule
from hyper_parallel.core.shard.sharding_plan import ShardingPlan


def shard_module(module: Any, mesh: Any, plan: ShardingPlan, *, src_data_rank: int | None = 0) -> Any:
    """Split a model's parameters over a mesh as the plan says, in place.

    All parameters and buffers become DTensors (whole on all ranks where the plan is silent), inputs and outputs of the
    named modules are redistributed as they pass. The model's code stays as it is: sizes in it are global ones.
    Inside its forward, plain tensors that meet DTensors count as copies that all ranks hold alike.

    Args:
        module: The model; parameters may be on the meta device.
        mesh: Mesh whose axes the plan names, ours or PyTorch's.
        plan: What goes where.
        src_data_rank: Position in the mesh of the rank whose values count, or None if all ranks hold the same.

    Returns:
        `module`.

    Raises:
        LayoutError: an entry that does not fit its tensor, that matches nothing in the model, or that gives a parameter
            another layout than an earlier call did.
        ParamStateError: a module inside is wrapped by `fully_shard`, which comes second.
        TypeError: `plan` is no plan.

    Communication: one broadcast per parameter and buffer, none with `src_data_rank=None`.
    Memory: each rank keeps its part; the full parameters are freed.
    """
    if not isinstance(plan, ShardingPlan):
        raise TypeError(
            f"shard_module(plan={plan!r}): it is a {type(plan).__name__}. Pass a ShardingPlan, such as "
            'ShardingPlan(modules={"up": column_parallel("tp")}).'
        )
    return platform_of(module).modules().shard_module(module, as_mesh(mesh), plan, src_data_rank=src_data_rank)


def local_map(
    func: Callable[..., Any],
    out_layouts: Any,
    in_layouts: Any = None,
    *,
    out_shapes: Any = None,
) -> Callable[..., Any]:
    """Run `func` on local tensors: the way to use custom kernels and `autograd.Function`s with DTensors.

    Args:
        func: Takes and returns plain tensors.
        out_layouts: Layout of the output, or one per output (None for an output that is not a tensor).
        in_layouts: Layout each DTensor argument must have, redistributed if need be; None entries are left as they are.
        out_shapes: Global shape of each output. Default: what the local shapes of all ranks add up to.

    Returns:
        A function of DTensors. Along an axis that splits some argument, the gradients of whole ones are summed.

    Communication: redistributes arguments that lie otherwise; one all-gather of shapes without `out_shapes`.
    """
    mapped: Callable[..., Any] = get_platform().modules().local_map(func, out_layouts, in_layouts, out_shapes)
    return mapped


def register_sharding_rule(func: Any, rule: str, *, terms: str | None = None) -> None:
    """Give a function a sharding rule.

    Args:
        func: The function as it is called: `torch.x`, a Tensor method, or one of your own that handles
            `__torch_function__`.
        rule: `"operand, operand -> output"` in factors: `x` passes, `x+` is summed over, `x^` must be whole, `...` any
            leading dims. Operands are the tensor arguments in order.
        terms: For functions linear in their operands which are multiplied: `"01 2"` for `a * b + c`; lets sums stay
            pending.

    Raises:
        ValueError: the rule cannot be read.

    Communication: none.
    """
    get_platform().modules().register_rule(func, parse_rule(rule, terms=terms))
