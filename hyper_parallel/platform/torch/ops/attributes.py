# SPDX-License-Identifier: Apache-2.0
"""Attribute reads that reach torch's own getters, and small questions about a tensor."""

from __future__ import annotations

from typing import Any

import torch

from hyper_parallel.core.errors import OperandError
from hyper_parallel.platform.torch.dispatch import HANDLERS, register
from hyper_parallel.platform.torch.dtensor import TorchDTensor

_OF_LOCAL = (
    "is_cuda is_cpu is_sparse is_sparse_csr is_quantized is_meta is_nested is_mkldnn is_mps is_xpu "
    "is_vulkan is_ipu is_maia is_mtia is_xla names output_nr _version itemsize volatile is_hpu"
)
_no_torch_function = torch._C.DisableTorchFunctionSubclass


def _on_local(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(args[0]._local, *args[1:], **kwargs)


def _on_wrapper(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with _no_torch_function():
        return func(*args, **kwargs)


def _nbytes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    return args[0].numel() * args[0].element_size()


def _transposed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TorchDTensor:
    x = args[0]
    return x.t() if x.ndim <= 2 else x.permute(tuple(reversed(range(x.ndim))))


def _matrix_transposed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TorchDTensor:
    return args[0].transpose(-2, -1)


for _name in _OF_LOCAL.split():
    if hasattr(torch.Tensor, _name):
        HANDLERS[getattr(torch.Tensor, _name).__get__] = _on_local
HANDLERS[torch.Tensor.nbytes.__get__] = _nbytes  # type: ignore[attr-defined]
HANDLERS[torch.Tensor.T.__get__] = _transposed  # type: ignore[attr-defined]
HANDLERS[torch.Tensor.mT.__get__] = _matrix_transposed  # type: ignore[attr-defined]
register("is_floating_point is_complex is_signed get_device is_inference is_same_size", _on_local)
register("is_shared is_pinned is_conj is_neg", _on_local)
register("data_ptr untyped_storage storage_offset", _on_wrapper)


def _of_both_locals(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(*(x._local if isinstance(x, TorchDTensor) else x for x in args), **kwargs)


# nn.Module asks it whether `to`, `double` and the like may keep the parameter objects.
HANDLERS[torch._has_compatible_shallow_copy_type] = _of_both_locals


def _share_memory(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TorchDTensor:
    args[0]._local.share_memory_()
    return args[0]


register("share_memory_", _share_memory)


def _grad(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _autograd_grad(*args, **kwargs)


def _autograd_grad(
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    **options: Any,
) -> tuple[Any, ...]:
    """`torch.autograd.grad`: a DTensor input's gradient is the sum over the nodes its uses went through."""
    outputs = (outputs,) if isinstance(outputs, torch.Tensor) else tuple(outputs)
    inputs = (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs)
    if any(isinstance(x, TorchDTensor) and hasattr(x._local, "reduced_hooks") for x in inputs):
        raise OperandError(
            "torch.autograd.grad of parameters wrapped by fully_shard: their gradients are reduced into `.grad` at the "
            "end of backward. Call backward() and read `.grad`."
        )
    given = (None,) * len(outputs) if grad_outputs is None else grad_outputs
    given = (given,) if isinstance(given, torch.Tensor) else tuple(given)
    roots, seeds = _roots_and_seeds(outputs, given)
    nodes = [_nodes_of(x) for x in inputs]
    flat = [node for group in nodes for node, _ in group]
    allow_unused = options.pop("allow_unused", None) or options.get("materialize_grads", False)
    if any(isinstance(x, TorchDTensor) and x._origin is not None for x in inputs):
        options["allow_unused"] = True
    else:
        options["allow_unused"] = allow_unused
    grads = iter(torch.autograd.grad(roots, flat, seeds, retain_graph, create_graph, **options))
    out = tuple(_combine(x, [(next(grads), c) for _, c in group]) for x, group in zip(inputs, nodes, strict=True))
    if not allow_unused and any(grad is None for grad in out):
        raise RuntimeError(
            "One of the differentiated Tensors appears to not have been used in the graph. Set allow_unused=True if "
            "this is the desired behavior."
        )
    return out


def _roots_and_seeds(tensors: tuple[torch.Tensor, ...], given: tuple[Any, ...]) -> tuple[list[torch.Tensor], list[Any]]:
    pairs = [t.root_and_seed(g) if isinstance(t, TorchDTensor) else (t, g) for t, g in zip(tensors, given, strict=True)]
    return [root for root, _ in pairs], [seed for _, seed in pairs]


def _nodes_of(x: torch.Tensor) -> list[tuple[torch.Tensor, Any]]:
    if not isinstance(x, TorchDTensor):
        return [(x, None)]
    if x._origin is None:
        return [(x._local, x.layout.cotangent)]
    if x._is_bypassed:
        raise OperandError(
            f"autograd.grad for DTensor {tuple(x.shape)} {x.layout}: it came out of a redistribute and went into "
            "another, which joined the two. Ask for the gradient of the first one's input."
        )
    x.local()
    return [(node, cotangent) for cotangent, (_, node) in (x._memo or {}).items()]


def _combine(x: torch.Tensor, grads: list[tuple[torch.Tensor | None, Any]]) -> Any:
    if not isinstance(x, TorchDTensor):
        return grads[0][0]
    total: Any = None
    for grad, cotangent in grads:
        if grad is not None:
            part = TorchDTensor(grad, cotangent, x.shape).redistribute(layout=x.layout.cotangent)
            total = part if total is None else total + part
    return total


HANDLERS[torch.autograd.grad] = _grad
HANDLERS[torch.autograd.backward] = lambda func, args, kwargs: _autograd_backward(*args, **kwargs)


def _autograd_backward(
    tensors: Any, grad_tensors: Any = None, retain_graph: bool | None = None, create_graph: bool = False, **options: Any
) -> None:
    tensors = (tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors)
    given = (None,) * len(tensors) if grad_tensors is None else grad_tensors
    given = (given,) if isinstance(given, torch.Tensor) else tuple(given)
    roots, seeds = _roots_and_seeds(tensors, given)
    torch.autograd.backward(roots, seeds, retain_graph, create_graph, **options)
