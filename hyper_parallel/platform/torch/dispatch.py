# SPDX-License-Identifier: Apache-2.0
"""Function-level interception: look up the op, resolve layouts (cached), call it on local tensors, wrap.

Note [Hot path]
    A hit costs one walk over the arguments, which makes the key and unwraps at once, one dict look-up
    and one wrapper. Layouts are interned in `Spec`s, so the key hashes by identity. Numbers enter the key
    by type only, unless the op's result layout depends on their value: a learning rate never does.

Note [Lost views]
    A view whose operand has to be redistributed first (`p[0]` of a parameter whose rows are sharded) is a view of
    that copy: what is written into it would never reach the base. Such results, and views of them, carry the name
    of the op, and in-place ops refuse them on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hyper_parallel.core.bounded_cache import BoundedCache, watch_cache
from hyper_parallel.core.errors import LayoutError, NoRuleError, OperandError
from hyper_parallel.core.layout import Layout
from hyper_parallel.core.shard.factor_rule import FactorRule
from hyper_parallel.core.shard.propagation import resolve
from hyper_parallel.platform.torch.dtensor import TorchDTensor, wrap
from hyper_parallel.platform.torch.implicit import implicit_mesh
from hyper_parallel.platform.torch.spec import Spec, spec_of

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
HANDLERS: dict[Any, Handler] = {}
_grad_fn_of: Any = torch._C.TensorBase.grad_fn.__get__  # type: ignore[union-attr]
_no_torch_function = torch._C.DisableTorchFunctionSubclass


resolved_cache = BoundedCache(4096)
watch_cache("resolved ops", resolved_cache.info, resolved_cache)


_NO_KWARGS: dict[str, Any] = {}


def dispatch(cls: type, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
    """`TorchDTensor.__torch_function__`."""
    handler = HANDLERS.get(func)
    if handler is None:
        raise missing_rule(func, args, kwargs or {})
    if kwargs and kwargs.get("out") is not None:
        return _into(handler, func, args, kwargs)
    if kwargs and kwargs.get("inplace") is True:
        return _inplace(handler, func, args, kwargs)
    return handler(func, args, kwargs or _NO_KWARGS)


def _into(handler: Handler, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call with `out=`: the target keeps its layout, whatever the op runs under."""
    target = kwargs["out"]
    result = handler(func, args, {name: arg for name, arg in kwargs.items() if name != "out"})
    if not isinstance(target, TorchDTensor) or not isinstance(result, TorchDTensor) or target.shape != result.shape:
        raise OperandError(
            f"{name_of(func)} with out=: the target must be one DTensor of the shape of the result. Call it without "
            "out= and copy the result."
        )
    return target.copy_(result)


def _inplace(handler: Handler, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call with `inplace=True`, as activations and dropout have it."""
    target = args[0]
    if target.layout.partial:
        # The op runs on the finished sum, which is not where the target's data are.
        return target.copy_(handler(func, (target.clone(), *args[1:]), {**kwargs, "inplace": False}))
    if target._lost_view is not None:
        raise lost_view(func, target)
    target._pin()
    handler(func, args, kwargs)
    return target


def missing_rule(func: Any, args: Iterable[Any], kwargs: dict[str, Any]) -> NoRuleError:
    """The uniform error of an op without a rule."""
    operands = ", ".join(map(describe, tensors_in((*args, *kwargs.values()))))
    name = name_of(func)
    return NoRuleError(
        f"{name}({operands}): no sharding rule. Register one with register_sharding_rule({name}, '...'), run it "
        "with local_map, or gather first with full_tensor()."
    )


def name_of(func: Any) -> str:
    """A function's name as users write it."""
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__"):
        return getattr(getattr(func, "__self__", None), "__name__", name)
    return name


def describe(tensor: torch.Tensor) -> str:
    """One operand in an error message: dtype, shape, layout."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    if isinstance(tensor, TorchDTensor):
        return f"DTensor {dtype} {tuple(tensor.shape)} {tensor.layout}"
    return f"Tensor {dtype} {tuple(tensor.shape)}"


def tensors_in(args: Iterable[Any]) -> list[torch.Tensor]:
    """All tensors among the arguments, lists included, in order."""
    out: list[torch.Tensor] = []
    for arg in args:
        if isinstance(arg, torch.Tensor):
            out.append(arg)
        elif type(arg) in (list, tuple):
            out.extend(tensors_in(arg))
    return out


def substitute(arg: Any, locals_: Any) -> Any:
    """`arg` with each tensor replaced by the next of the iterator `locals_`."""
    if isinstance(arg, torch.Tensor):
        return next(locals_)
    if type(arg) in (list, tuple):
        return type(arg)(substitute(item, locals_) for item in arg)
    return arg


# -- resolving ----------------------------------------------------------------------------------


@dataclass(slots=True)
class Rule:
    """What an op's rule function returns.

    Attributes:
        factors: The sharding rule for the tensor operands in the order of the arguments.
        call: Runs the op on local tensors, `call(func, args, kwargs, resolved)`; default: `func(*args, **kwargs)`.
        shapes: Global shapes of the outputs; default: found by running the op on meta tensors.
    """

    factors: FactorRule
    call: Callable[[Any, tuple[Any, ...], dict[str, Any], Resolved], Any] | None = None
    shapes: tuple[Sequence[int], ...] | None = None


@dataclass(slots=True)
class Resolved:
    """A cached decision: how operands must lie, and how outputs do.

    Attributes:
        operands: Per tensor operand (target or None if it fits, cotangent or None if it is the natural one).
        outputs: Per output tensor its spec.
        targets: Per tensor operand its spec when the op runs.
        call: As in `Rule`.
        is_direct: No operand needs moving or a cotangent of its own, and there is one output.
    """

    operands: tuple[tuple[Layout | None, Layout | None], ...]
    targets: tuple[Spec, ...]
    outputs: tuple[Spec, ...]
    call: Any
    is_direct: bool


class ShardedOp:
    """Handler of an op with a factor rule.

    Args:
        rule: Called on a cache miss with the op's own arguments; returns a `Rule`.
        values: Whether numbers among the arguments decide the layouts (dims, sizes); else only their type does.
        in_place: Whether the first operand is changed and returned.
        dtypes: Whether the operands' dtypes decide the layouts.
        view: Whether the results share memory with the first operand. See Note [Lost views].
    """

    __slots__ = ("dtypes", "in_place", "rule", "values", "view")

    def __init__(
        self,
        rule: Callable[..., Rule],
        *,
        values: bool = True,
        in_place: bool = False,
        dtypes: bool = False,
        view: bool = False,
    ) -> None:
        self.rule = rule
        self.view = view
        self.values = values
        self.in_place = in_place
        self.dtypes = dtypes

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: C901 - one walk
        """Run the op. See Note [Hot path]."""
        key: list[Any] = [func]
        plain: list[Any] = []
        operands: list[TorchDTensor] = []
        direct = True
        values = self.values
        for arg in args:
            kind = type(arg)
            if kind is TorchDTensor:
                local = arg._local
                if not local.requires_grad and not arg._is_native:
                    check_native(arg)
                if arg._origin is not None:
                    direct = False
                key.append(arg._spec)
                if self.dtypes:
                    key.append(local.dtype)
                operands.append(arg)
                plain.append(local)
            elif kind is float or kind is int:
                key.append(arg if values else kind)
                plain.append(arg)
            elif kind is bool:
                # False and 0 are one key otherwise: `x.var(False)` is not `x.var(0)`.
                key.append((bool, arg))
                plain.append(arg)
            elif kind is list or kind is tuple or isinstance(arg, torch.Tensor):
                return self._general(func, args, kwargs)
            else:
                key.append(arg)
                plain.append(arg)
        if kwargs:
            for name, arg in kwargs.items():
                kind = type(arg)
                if kind is list or kind is tuple or isinstance(arg, torch.Tensor):
                    return self._general(func, args, kwargs)
                key.append(name)
                key.append(kind if kind is float and not values else arg)
        resolved = resolved_cache.entries.get(tuple(key))
        if resolved is None:
            resolved = self._resolve(func, args, kwargs, operands, tuple(key))
        else:
            resolved_cache.hits += 1
        if direct and resolved.is_direct:
            if self.in_place and args[0]._lost_view is not None:
                raise lost_view(func, args[0])
            if resolved.call is None:
                out = func(*plain, **kwargs) if kwargs else func(*plain)
            else:
                out = resolved.call(func, tuple(plain), kwargs, resolved)
            if self.in_place:
                return args[0]
            wrapped = wrap(out, resolved.outputs[0])
            if self.view and args[0]._lost_view is not None:
                wrapped._lost_view = args[0]._lost_view
            return wrapped
        return self._run(func, args, kwargs, operands, resolved)

    def _general(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """As `__call__`, for arguments with lists or plain tensors."""
        if _are_numbers(tensors_in((*args, *kwargs.values()))):
            return func(*map(_number, args), **{name: _number(arg) for name, arg in kwargs.items()})
        mesh = mesh_of(func, args, kwargs)
        args = tuple(adopt(arg, mesh, func, args) for arg in args)
        kwargs = {name: adopt(arg, mesh, func, args) for name, arg in kwargs.items()}
        operands: list[Any] = tensors_in((*args, *kwargs.values()))
        key = (func, *(self._key_of(arg) for arg in args), *((n, self._key_of(a)) for n, a in kwargs.items()))
        for operand in operands:
            if not operand._local.requires_grad and not operand._is_native:
                check_native(operand)
        resolved = resolved_cache.entries.get(key)
        if resolved is None:
            resolved = self._resolve(func, args, kwargs, operands, key)
        else:
            resolved_cache.hits += 1
        return self._run(func, args, kwargs, operands, resolved)

    def _key_of(self, arg: Any) -> Any:
        kind = type(arg)
        if kind is TorchDTensor:
            return (arg._spec, arg._local.dtype) if self.dtypes else arg._spec
        if kind is list or kind is tuple or kind is torch.Size:
            return (kind, *(self._key_of(item) for item in arg))
        if kind is slice:
            return (slice, arg.start, arg.stop, arg.step)
        if kind is bool:
            return (bool, arg)
        if (kind is float or kind is int) and not self.values:
            return kind
        return arg

    def _resolve(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], operands: Sequence[Any], key: Any
    ) -> Resolved:
        found = resolved_cache.revive(key)
        if found is not None:
            return found
        one_mesh(func, operands)
        rule = self.rule(*args, **kwargs)
        single = True
        shapes = rule.shapes
        if shapes is None:
            shapes, single = output_shapes(func, args, kwargs)
        layouts = [x.layout for x in operands]
        chosen = resolve(rule.factors, layouts, [x.shape for x in operands], fixed=0 if self.in_place else None)
        if self.in_place and (chosen.targets[0] is not layouts[0] or chosen.outputs[0] is not layouts[0]):
            raise LayoutError(
                f"{name_of(func)}({', '.join(map(describe, operands))}): the tensor to change would need layout "
                f"{chosen.outputs[0]}. Redistribute it first, or use the form that returns a new tensor."
            )
        if len(chosen.outputs) == 1 < len(shapes):
            outputs = tuple(spec_of(chosen.outputs[0], shape) for shape in shapes)
        else:
            outputs = tuple(spec_of(o, s) for o, s in zip(chosen.outputs, shapes, strict=True))
        moves = tuple(
            (None if target is layout else target, None if cotangent is target.cotangent else cotangent)
            for target, cotangent, layout in zip(chosen.targets, chosen.cotangents, layouts, strict=True)
        )
        targets = tuple(spec_of(t, x.shape) for t, x in zip(chosen.targets, operands, strict=True))
        direct = single and all(move == (None, None) for move in moves)
        resolved = Resolved(moves, targets, outputs, rule.call, direct)
        resolved_cache.put(key, resolved)
        return resolved

    def _run(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        operands: Sequence[TorchDTensor],
        resolved: Resolved,
    ) -> Any:
        if self.in_place:
            if operands[0]._lost_view is not None:
                raise lost_view(func, operands[0])
            operands[0]._pin()
        locals_ = [
            (x if target is None else x.redistribute(layout=target)).local(cotangent)
            for x, (target, cotangent) in zip(operands, resolved.operands, strict=True)
        ]
        if self.in_place:
            locals_[0] = operands[0]._local
        feed = iter(locals_)
        local_args = tuple(substitute(arg, feed) for arg in args)
        local_kwargs = {name: substitute(arg, feed) for name, arg in kwargs.items()}
        if resolved.call is None:
            out = func(*local_args, **local_kwargs)
        else:
            out = resolved.call(func, local_args, local_kwargs, resolved)
        if self.in_place:
            return args[0]
        wrapped = wrap_all(out, resolved.outputs)
        if self.view:
            moved = resolved.operands[0][0] is not None
            mark_lost(wrapped, name_of(func) if moved else operands[0]._lost_view)
        return wrapped


def mark_lost(views: Any, name: str | None) -> None:
    """Note what lost the connection between `views` and their base, if anything did. See Note [Lost views]."""
    if name is not None:
        for view in tensors_in((views,)):
            view._lost_view = name  # type: ignore[attr-defined]


def lost_view(func: Any, x: TorchDTensor) -> OperandError:
    """The error of an in-place op on a view that has no base. See Note [Lost views]."""
    return OperandError(
        f"{name_of(func)} in place on {describe(x)}: it is the result of {x._lost_view}, for which data had to be "
        "moved, so the base would not change. Redistribute the base first, or change a clone() and put it back."
    )


def wrap_all(out: Any, specs: Sequence[Spec]) -> Any:
    """The outputs of a local call as DTensors, in the structure the op returns."""
    if isinstance(out, torch.Tensor):
        return wrap(out, specs[0])
    wrapped = [
        wrap(item, spec) if isinstance(item, torch.Tensor) else item for item, spec in zip(out, specs, strict=True)
    ]
    return type(out)(wrapped) if isinstance(out, (list, tuple)) else wrapped


def output_shapes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[torch.Size, ...], bool]:
    """Global shapes of an op's outputs, from running it on tensors without data; and whether it returns just a tensor.

    Wrong arguments raise torch's own error here, in global sizes, on every rank, before any data moves.
    """
    with torch.no_grad():
        feed = (torch.empty(x.shape, dtype=x.dtype, device="meta") for x in tensors_in((*args, *kwargs.values())))
        meta_args = tuple(substitute(arg, feed) for arg in args)
        meta_kwargs = {name: substitute(arg, feed) for name, arg in kwargs.items()}
        out = func(*meta_args, **meta_kwargs)
    single = isinstance(out, torch.Tensor)
    return tuple(x.shape for x in tensors_in((out,) if single else tuple(out))), single


# -- operands -----------------------------------------------------------------------------------


def check_native(x: TorchDTensor) -> None:
    """Refuse a DTensor that came out of a user's `autograd.Function`: its graph would be lost silently."""
    if not torch.is_grad_enabled():
        return
    if x._origin is None:
        with _no_torch_function():
            escaped = _grad_fn_of(x) is not None
        if escaped:
            raise OperandError(
                f"DTensor {tuple(x.shape)} {x.layout}: it came out of an autograd.Function, which cannot see the "
                "graph inside. Call the Function through local_map; with torch.utils.checkpoint, use_reentrant=False."
            )
    x._is_native = True


def mesh_of(func: Any, args: Iterable[Any], kwargs: dict[str, Any]) -> Any:
    """The mesh of the DTensor operands."""
    for x in tensors_in((*args, *kwargs.values())):
        if isinstance(x, TorchDTensor):
            return x.device_mesh
    raise missing_rule(func, args, kwargs)


def one_mesh(func: Any, operands: Sequence[TorchDTensor]) -> None:
    """Refuse operands on different meshes."""
    mesh = operands[0].device_mesh
    for x in operands[1:]:
        if x.device_mesh != mesh:
            raise LayoutError(
                f"{name_of(func)}({', '.join(map(describe, operands))}): the operands lie on meshes {mesh} and "
                f"{x.device_mesh}. Bring them onto one mesh first."
            )


def _are_numbers(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether all DTensors are mere numbers (0-dim, no gradient) in an op on plain tensors: a clipping factor."""
    inside = [x for x in tensors if isinstance(x, TorchDTensor)]
    return (
        any(x.dim() for x in tensors)
        and not any(x.dim() or (x.requires_grad and torch.is_grad_enabled()) for x in inside)
        and implicit_mesh() is None
    )


def _number(arg: Any) -> Any:
    if type(arg) in (list, tuple):
        return type(arg)(map(_number, arg))
    return arg.full_tensor() if isinstance(arg, TorchDTensor) else arg


def adopt(arg: Any, mesh: Any, func: Any, args: Any) -> Any:
    """A plain tensor among DTensors as copies on all ranks, where that can be meant.

    A 0-dim tensor counts as a number. Others count as copies inside of a module wrapped by `shard_module`;
    anywhere else nobody can know, so they are refused.
    """
    if type(arg) in (list, tuple):
        return type(arg)(adopt(item, mesh, func, args) for item in arg)
    if not isinstance(arg, torch.Tensor) or isinstance(arg, TorchDTensor):
        return arg
    if arg.dim() == 0 or implicit_mesh() is not None:
        return wrap(arg, spec_of(Layout(mesh, ((),) * arg.dim()), arg.shape))
    position = next((i for i, a in enumerate(args) if a is arg), None)
    where = "an argument" if position is None else f"argument {position}"
    if any(isinstance(x, TorchDTensor) and hasattr(x._local, "reduced_hooks") for x in tensors_in(args)):
        raise OperandError(
            f"{name_of(func)}: {where} is a plain {describe(arg)}, another a parameter that fully_shard has sharded. "
            "Run it within the forward of the wrapped module, or between its unshard() and reshard()."
        )
    raise OperandError(
        f"{name_of(func)}: {where} is a plain {describe(arg)}, the others are DTensors on mesh {mesh}. Spread it with "
        "distribute_tensor(t, mesh), or take the others' pieces with to_local()."
    )


# -- registering --------------------------------------------------------------------------------

_NAMESPACES = (
    torch,
    torch.Tensor,
    torch.nn.functional,
    torch._C._nn,
    torch.special,
    torch.linalg,
    torch._C._VariableFunctions,
)


def functions(name: str) -> list[Any]:
    """All of torch's functions and methods called `name`."""
    found = [getattr(space, name) for space in _NAMESPACES if hasattr(space, name)]
    return list(dict.fromkeys(f for f in found if callable(f)))


def register(names: str, handler: Handler) -> None:
    """Make `handler` serve all functions called by one of the space-separated `names`."""
    for name in names.split():
        for func in functions(name):
            HANDLERS[func] = handler


def sharded(names: str, **options: bool) -> Callable[[Callable[..., Rule]], Callable[..., Rule]]:
    """Decorator: the rule function of all ops called by one of `names`; see `ShardedOp` for the options."""

    def decorate(rule: Callable[..., Rule]) -> Callable[..., Rule]:
        register(names, ShardedOp(rule, **options))
        return rule

    return decorate


def handles(names: str) -> Callable[[Handler], Handler]:
    """Decorator: a handler written by hand for all functions called by one of `names`."""

    def decorate(handler: Handler) -> Handler:
        register(names, handler)
        return handler

    return decorate
