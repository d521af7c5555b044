# SPDX-License-Identifier: Apache-2.0
"""Elementwise functions, in place and not."""

from __future__ import annotations

from typing import Any

import torch

from hyper_parallel.core.layout import Layout
from hyper_parallel.core.shard.rules.pointwise import Linearity
from hyper_parallel.core.shard.rules.pointwise import pointwise as pointwise_rule
from hyper_parallel.platform.torch.dispatch import (
    HANDLERS,
    Rule,
    ShardedOp,
    TorchDTensor,
    handles,
    register,
    sharded,
    spec_of,
    tensors_in,
    wrap,
)

NONLINEAR = (
    "abs absolute acos acosh asin asinh atan atanh ceil cos cosh deg2rad digamma erf erfc erfinv exp exp2 expm1 "
    "fix floor frac lgamma log log10 log1p log2 logit positive rad2deg reciprocal round rsqrt sgn sigmoid sign "
    "sin sinc sinh sqrt square tan tanh trunc relu relu6 gelu silu mish elu selu celu leaky_relu softplus "
    "softsign hardtanh hardswish hardsigmoid logsigmoid tanhshrink threshold nan_to_num clamp clip clamp_min "
    "clamp_max pow float_power atan2 fmod remainder floor_divide maximum minimum fmax fmin hypot copysign "
    "logaddexp where masked_fill eq ne lt le gt ge greater less not_equal isnan isinf isfinite isclose signbit "
    "logical_and logical_or logical_xor logical_not bitwise_and bitwise_or bitwise_xor bitwise_not "
    "bitwise_left_shift bitwise_right_shift lerp addcmul addcdiv heaviside xlogy"
)
NONLINEAR_OPERATORS = (
    "__pow__ __rpow__ __rdiv__ __floordiv__ __rfloordiv__ __mod__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ "
    "__and__ __or__ __xor__ __invert__ __rand__ __ror__ __rxor__ __lshift__ __rshift__"
)


def elementwise(*args: Any, **kwargs: Any) -> Rule:
    """Any elementwise function: nothing may stay pending."""
    return Rule(pointwise_rule([x.shape for x in tensors_in((*args, *kwargs.values()))]))


register(f"{NONLINEAR} {NONLINEAR_OPERATORS}", ShardedOp(elementwise, values=False))
register(" ".join(f"{name}_" for name in NONLINEAR.split()), ShardedOp(elementwise, values=False, in_place=True))


def added(input: Any, other: Any, *, alpha: Any = 1) -> Rule:
    """`input + alpha * other`: linear in tensors, affine if a number is added."""
    if isinstance(other, torch.Tensor):
        return Rule(pointwise_rule((input.shape, other.shape), Linearity.SUM))
    return Rule(pointwise_rule((input.shape,), Linearity.AFFINE))


register("rsub __rsub__", ShardedOp(added, values=False))
_add = ShardedOp(added, values=False)


@handles("add sub subtract __radd__ __add__ __sub__")
def _added(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Adding the int 0 changes nothing, so sums may stay pending: Python's `sum(losses)` begins with it."""
    if len(args) == 2 and type(args[1]) is int and args[1] == 0:
        return args[0].clone()
    return _add(func, args, kwargs)


register("add_ sub_ subtract_ __iadd__ __isub__", ShardedOp(added, values=False, in_place=True))


def multiplied(input: Any, other: Any) -> Rule:
    """`input * other`: linear in each."""
    if isinstance(other, torch.Tensor):
        shapes = [x.shape for x in (input, other) if isinstance(x, torch.Tensor)]
        return Rule(pointwise_rule(shapes, Linearity.PRODUCT))
    return Rule(pointwise_rule((input.shape,), Linearity.SUM))


register("mul multiply __mul__ __rmul__", ShardedOp(multiplied, values=False))
register("mul_ multiply_ __imul__", ShardedOp(multiplied, values=False, in_place=True))


def divided(input: Any, other: Any, *, rounding_mode: Any = None) -> Rule:
    """`input / other`: linear in the numerator."""
    shapes = [x.shape for x in (input, other) if isinstance(x, torch.Tensor)]
    pending_divisor = isinstance(other, TorchDTensor) and other.layout.partial
    if rounding_mode is not None or pending_divisor or not isinstance(input, torch.Tensor):
        return Rule(pointwise_rule(shapes))
    return Rule(pointwise_rule(shapes, Linearity.PRODUCT if len(shapes) > 1 else Linearity.SUM))


register("div divide true_divide __truediv__", ShardedOp(divided, values=False))
register("div_ divide_ true_divide_ __itruediv__", ShardedOp(divided, values=False, in_place=True))


def same(input: Any, *args: Any, **kwargs: Any) -> Rule:
    """A function linear in its one tensor that keeps the shape."""
    return Rule(pointwise_rule((input.shape,), Linearity.SUM))


register("neg negative clone contiguous alias conj resolve_conj resolve_neg view_as_real_copy", ShardedOp(same))
register("neg_ negative_", ShardedOp(same, in_place=True))


@sharded("to type float double half bfloat16 int long short char byte bool type_as cpu cuda", dtypes=True)
def cast(input: Any, *args: Any, **kwargs: Any) -> Rule:
    """Another dtype or device. A pending sum stays pending if no bits are lost on the way."""
    # The new dtype is read off an empty tensor of the old one.
    probe = torch.empty(0, dtype=input.dtype)
    target = _cast_of(probe, args, kwargs) or input.dtype
    widening = target.is_floating_point and torch.promote_types(input.dtype, target) == target
    linearity = Linearity.SUM if widening and input.dtype.is_floating_point else Linearity.NONE
    return Rule(pointwise_rule((input.shape,), linearity), call=_cast_local, shapes=(input.shape,))


def _cast_of(probe: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype | None:
    for arg in (*args, *kwargs.values()):
        if isinstance(arg, torch.dtype):
            return arg
        if isinstance(arg, torch.Tensor):
            return arg.dtype
    return None


def _cast_local(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], resolved: Any) -> Any:
    return func(*args, **kwargs)


_FIXED_CASTS = {
    "float": torch.float32,
    "double": torch.float64,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "int": torch.int32,
    "long": torch.int64,
    "short": torch.int16,
    "char": torch.int8,
    "byte": torch.uint8,
    "bool": torch.bool,
}


def _fixed_cast(dtype: torch.dtype) -> Any:
    return lambda input, *args, **kwargs: cast(input, dtype)


for _name, _dtype in _FIXED_CASTS.items():
    HANDLERS[getattr(torch.Tensor, _name)] = ShardedOp(_fixed_cast(_dtype), dtypes=True)


def _type_as(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0].to(args[1].dtype)


register("type_as", _type_as)


def _to(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`to(other)` means the dtype and device of `other`, which takes no part as an operand."""
    if len(args) > 1 and isinstance(args[1], torch.Tensor):
        args = (args[0], args[1].device, args[1].dtype, *args[2:])
    return _to_op(func, args, kwargs)


_to_op = HANDLERS[torch.Tensor.to]
register("to", _to)


@sharded("copy_", in_place=True)
def _copy_same_layout(target: Any, source: Any, non_blocking: bool = False) -> Rule:
    """`copy_` between DTensors; the source takes the layout of the target."""
    return Rule(pointwise_rule((target.shape, source.shape), Linearity.SUM))


_copy_op = HANDLERS[torch.Tensor.copy_]


def _copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`copy_`: a plain full tensor, alike on all ranks, fills a DTensor with this rank's part of it."""
    target, source = args[0], args[1]
    if not isinstance(target, TorchDTensor):
        return target.copy_(source.full_tensor(), *args[2:], **kwargs)
    if not isinstance(source, TorchDTensor):
        whole = Layout(target.device_mesh, ((),) * source.dim())
        source = wrap(source.to(target.device), spec_of(whole, source.shape))
    return _copy_op(func, (target, source, *args[2:]), kwargs)


register("copy_", _copy)


def _filled(input: Any, *args: Any) -> Rule:
    return Rule(pointwise_rule((input.shape,)))


register("fill_", ShardedOp(_filled, values=False, in_place=True))
register("zero_", ShardedOp(same, in_place=True))
