# SPDX-License-Identifier: Apache-2.0
"""`fully_shard` on torch: from modules to parameter groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from hyper_parallel.core.device_mesh import DeviceMesh, as_mesh, init_device_mesh
from hyper_parallel.core.errors import MeshError
from hyper_parallel.core.fully_shard.api import wrapped_class
from hyper_parallel.core.fully_shard.group_plan import PlacedParam
from hyper_parallel.core.fully_shard.policy import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
)
from hyper_parallel.core.layout import Layout
from hyper_parallel.core.placement_types import Shard, as_placement
from hyper_parallel.platform.torch.dtensor import TorchDTensor
from hyper_parallel.platform.torch.fully_shard.group import ParamGroup
from hyper_parallel.platform.torch.fully_shard.unit import FlatParam, FlatUnit


def fully_shard(
    module: Any,
    *,
    mesh: Any,
    reshard_after_forward: bool | int | None,
    shard_placement_fn: Callable[[Any], Any] | None,
    mp_policy: MixedPrecisionPolicy,
    offload_policy: OffloadPolicy,
    ignored_params: set[Any],
) -> Any:
    """See `hyper_parallel.fully_shard`."""
    modules = list(module) if isinstance(module, (list, tuple)) else [module]
    _check_types(modules, ignored_params)
    for each in modules:
        if "_hsdp_group" in each.__dict__:
            raise ValueError(f"fully_shard({type(each).__name__}): the module is wrapped already. Wrap it once.")
    mesh = _mesh_for(modules, mesh)
    if _is_cpu_offload(offload_policy) and mesh.device_type != "cpu":
        raise ValueError(
            f"fully_shard(offload_policy=...): offload from {mesh.device_type!r} is not served yet. "
            "Leave the policy out."
        )
    shard_axis = mesh.axis_names[-1]
    params = _collect(modules, ignored_params, mesh)
    _check_placements(params, shard_placement_fn)
    _check_embeddings(params)
    num_shards = mesh.size(shard_axis)
    reshards = _as_bool(reshard_after_forward, num_shards)
    units = _units(params, mesh, shard_axis, mp_policy)
    rank = mesh.get_rank()
    replicas = mesh.group_ranks(mesh.axis_names[:-1], rank) if mesh.ndim > 1 else (rank,)
    group = ParamGroup(
        _name_of(modules),
        modules,
        units,
        replicate_ranks=replicas,
        all_ranks=mesh.group_ranks(mesh.axis_names, rank),
        mp_policy=mp_policy,
        reshard_after_forward=reshards,
        ignored_sites=_ignored_sites(modules, ignored_params),
    )
    for each in modules:
        _mix_in(each, group)
    return module


def _check_types(modules: Sequence[Any], ignored: Any) -> None:
    for each in modules:
        if not isinstance(each, nn.Module):
            raise TypeError(f"fully_shard({type(each).__name__}): not a module. Pass an nn.Module, or a list of them.")
    if isinstance(ignored, torch.Tensor) or not all(isinstance(p, torch.Tensor) for p in ignored):
        raise TypeError("fully_shard(ignored_params=...): not a set of parameters. Pass {model.head.weight, ...}.")


def _check_embeddings(params: Sequence[FlatParam]) -> None:
    """Lookups that write into the table, and gradients that are not dense, do not reach the shards."""
    for param in params:
        for module, _ in param.sites:
            for option in ("max_norm", "sparse"):
                value = getattr(module, option, None)
                if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and value:
                    raise ValueError(
                        f'fully_shard: "{param.name}" is the table of an {type(module).__name__}({option}={value}), '
                        "which is not served. Leave the option out, or add the table to ignored_params."
                    )


def _is_cpu_offload(policy: Any) -> bool:
    """Ours, or PyTorch's own class of that name."""
    return any(kind.__name__ == CPUOffloadPolicy.__name__ for kind in type(policy).__mro__)


def _mesh_for(modules: Sequence[nn.Module], mesh: Any) -> DeviceMesh:
    if mesh is None:
        devices = {p.device.type for m in modules for p in m.parameters() if not p.is_meta}
        device = devices.pop() if len(devices) == 1 else "cpu"
        if not torch.distributed.is_initialized():
            init_device_mesh(device, (1,))
        return init_device_mesh(device, (torch.distributed.get_world_size(),), mesh_dim_names=("dp",))
    mesh = as_mesh(mesh)
    if mesh.ndim not in (1, 2):
        raise MeshError(
            f"fully_shard on mesh {mesh}: it has {mesh.ndim} axes. Pass a 1-D mesh to shard over, or a 2-D one to "
            "replicate over its first axis and shard over its second."
        )
    mesh.coord(mesh.get_rank())
    return mesh


def _as_bool(value: bool | int | None, num_shards: int) -> bool | None:
    if value is None or isinstance(value, bool):
        return value
    if value == 1:
        return False
    if value == num_shards:
        return True
    raise ValueError(
        f"fully_shard(reshard_after_forward={value}): numbers other than 1 and the {num_shards} shard ranks are not "
        "served yet. Use True or False."
    )


def _name_of(modules: Sequence[nn.Module]) -> str:
    return "+".join(type(m).__name__ for m in modules)


def _collect(modules: Sequence[nn.Module], ignored: set[Any], mesh: DeviceMesh) -> list[FlatParam]:
    """The parameters that no wrapped submodule has, each once, with all places that hold it."""
    ignored_ids = {id(p) for p in ignored}
    found: dict[int, FlatParam] = {}
    for module in modules:
        for prefix, child in _own_modules(module):
            for key, tensor in child._parameters.items():
                if tensor is None or id(tensor) in ignored_ids:
                    continue
                if id(tensor) in found:
                    found[id(tensor)].sites.append((child, key))
                    continue
                found[id(tensor)] = _flat_param(f"{prefix}{key}", child, key, tensor, mesh)
    return list(found.values())


def _ignored_sites(modules: Sequence[nn.Module], ignored: set[Any]) -> list[tuple[nn.Module, str]]:
    ids = {id(p) for p in ignored}
    own = (child for module in modules for _, child in _own_modules(module))
    return [(child, key) for child in own for key, tensor in child._parameters.items() if id(tensor) in ids]


def _own_modules(module: nn.Module, prefix: str = "") -> list[tuple[str, nn.Module]]:
    out = [(prefix, module)]
    for name, child in module.named_children():
        if "_hsdp_group" not in child.__dict__:
            out.extend(_own_modules(child, f"{prefix}{name}."))
    return out


def _flat_param(name: str, module: nn.Module, key: str, tensor: nn.Parameter, mesh: DeviceMesh) -> FlatParam:
    if getattr(tensor, "_is_taken", False):
        raise ValueError(
            f'fully_shard: parameter "{name}" is tied with one that another wrapped module has sharded already. Wrap '
            "both modules as one group, fully_shard([a, b]), or leave both to the module around them."
        )
    if tensor.dim() == 0:
        raise ValueError(
            f'fully_shard: parameter "{name}" has no dims and cannot be cut. Give it shape (1,), or add it to '
            "ignored_params."
        )
    if isinstance(tensor, TorchDTensor) and hasattr(tensor._local, "reduced_hooks"):
        raise ValueError(
            f'fully_shard: parameter "{name}" is in a submodule that another wrapped module holds too, and has sharded '
            "already. Wrap the shared submodule first, by itself, or both modules as one group, fully_shard([a, b])."
        )
    layout = tensor.layout if isinstance(tensor, TorchDTensor) else None
    if layout is None:
        shape = full_shape = tuple(tensor.shape)
        planned = (shape[0], _numel(shape[1:]))
        local = tensor.detach()
    else:
        layout = _tensor_parallel_layout(name, layout, mesh)
        shape = tuple(tensor.shape)
        local = tensor._local.detach()  # type: ignore[attr-defined]
        full_shape = tuple(local.shape)
        shapes = [layout.local_shape(shape, rank) for rank in layout.mesh.ranks]
        planned = (max(s[0] for s in shapes), max(_numel(s[1:]) for s in shapes))
    local.requires_grad_(tensor.requires_grad)
    return FlatParam(name, [(module, key)], tensor, local, shape, full_shape, layout, planned)


def _numel(shape: Sequence[int]) -> int:
    return torch.Size(shape).numel()


def _tensor_parallel_layout(name: str, layout: Layout, mesh: DeviceMesh) -> Layout:
    """The layout without the data-parallel axes, on the mesh of the others."""
    for axis in mesh.axis_names:
        if axis in layout.mesh.axis_names and (layout.dim_of(axis) is not None or layout.op_of(axis) is not None):
            raise MeshError(
                f'fully_shard: parameter "{name}" {layout} is split over axis {axis!r} already, over which it shall be '
                "sharded. Pass a mesh of other axes."
            )
    others = tuple(axis for axis in layout.mesh.axis_names if axis not in mesh.axis_names)
    if others == layout.mesh.axis_names:
        return layout
    sub = layout.mesh.submesh(others, layout.mesh.get_rank())
    return Layout(sub, layout.dims, partial=layout.partial, ragged=layout.ragged)


def _check_placements(params: Sequence[FlatParam], shard_placement_fn: Callable[[Any], Any] | None) -> None:
    if shard_placement_fn is None:
        return
    for param in params:
        placement = shard_placement_fn(param.sharded)
        if placement is not None and as_placement(placement) != Shard(0):
            raise ValueError(
                f'fully_shard: shard_placement_fn asks for {placement} of "{param.name}" {param.shape}; only dim 0 is '
                "served yet. Return Shard(0) or None."
            )


def _units(
    params: Sequence[FlatParam], mesh: DeviceMesh, shard_axis: str, policy: MixedPrecisionPolicy
) -> list[FlatUnit]:
    """One unit per dtype, frozen parameters apart so that they have no gradient buffer."""
    kinds: dict[Any, list[FlatParam]] = {}
    for param in params:
        kinds.setdefault((param.local.dtype, param.local.requires_grad), []).append(param)
    rank = mesh.get_rank()
    ranks = mesh.group_ranks((shard_axis,), rank)
    return [
        FlatUnit(
            members,
            [_sharded_layout(param, mesh, shard_axis) for param in members],
            ranks,
            ranks.index(rank),
            policy.param_dtype,
        )
        for members in kinds.values()
    ]


def _sharded_layout(param: FlatParam, mesh: DeviceMesh, shard_axis: str) -> Callable[[PlacedParam], Layout]:
    """From the rows each rank owns to the layout of the sharded parameter."""

    def layout(placed: PlacedParam) -> Layout:
        if param.tp_layout is None:
            ragged = None if placed.is_chunked else {shard_axis: placed.sizes}
            return Layout(mesh, (shard_axis, *(None for _ in param.shape[1:])), ragged=ragged)
        tp = param.tp_layout
        whole = _joined_mesh(param, mesh)
        dims = ((*tp.dims[0], shard_axis), *tp.dims[1:])
        # Uneven tensor-parallel pieces are all cut at the rows of the largest, which the chunk rule would not do.
        even = param.shape[0] % max(tp.mesh.num_ranks(tp.dims[0]), 1) == 0
        sizes_of = dict(tp.ragged)
        if not (placed.is_chunked and even):
            sizes_of[shard_axis] = placed.sizes
        return Layout(whole, dims, ragged=sizes_of)

    return layout


def _joined_mesh(param: FlatParam, mesh: DeviceMesh) -> DeviceMesh:
    """The mesh that has both the data-parallel and the tensor-parallel axes."""
    tp = param.tp_layout
    assert tp is not None
    for whole in (mesh.root, tp.mesh.root):
        if set(mesh.axis_names) | set(tp.mesh.axis_names) <= set(whole.axis_names):
            rank = mesh.get_rank()
            if whole.submesh(tp.mesh.axis_names, rank) == tp.mesh and whole.submesh(mesh.axis_names, rank) == mesh:
                return whole
    raise MeshError(
        f'fully_shard on mesh {mesh}: parameter "{param.name}" lies on mesh {tp.mesh}, which has no mesh in common '
        'with it. Make one mesh with both axes, and use mesh["tp"] and mesh["dp"].'
    )


def _mix_in(module: nn.Module, group: ParamGroup) -> None:
    module.__class__ = wrapped_class(type(module))
    module.__dict__["_hsdp_group"] = group
    module.register_forward_pre_hook(group.pre_forward, prepend=True, with_kwargs=True)
    module.register_forward_hook(group.post_forward, always_call=True)
    module.register_state_dict_pre_hook(group.before_state_dict)
