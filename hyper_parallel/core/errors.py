# SPDX-License-Identifier: Apache-2.0
"""The error tree.

    HyperParallelError
      MeshError(ValueError)         axes, sizes, ranks, sub-meshes
      LayoutError(ValueError)       layout and tensor do not fit
        UnevenError                 a shard does not follow the chunk rule
      ShapeError(ValueError)        global shapes, reshape, views
      NoRuleError(RuntimeError)     op without a sharding rule
      OperandError(RuntimeError)    an operand of a kind the op cannot take
      PartialError(ValueError)      pending sum used by an op that cannot carry it
      ParamStateError(RuntimeError) a fully_shard group is in the wrong state
      CollectiveError(RuntimeError) a peer is missing, late or disagrees
        CollectiveTimeout(TimeoutError)
      CacheError(ValueError)        unknown cache or limit
      CheckpointError(RuntimeError) damaged, incomplete or foreign checkpoint
      InternalError(RuntimeError)   our bug; asks for a report

Messages are one line: `<call or op> <tensor>: <what is wrong, both values>. <what to do>.`
They hold only facts that every rank knows, so all ranks print the same text.

What an operator (`a + b`) may raise is never a TypeError: torch's operators of tensors take that for "not implemented",
and Python then puts "unsupported operand type(s)" in place of the message.
"""


class HyperParallelError(Exception):
    """Base of every error this library raises on purpose."""


class MeshError(HyperParallelError, ValueError):
    """The axes, sizes or ranks of a mesh do not fit what was asked.

    Wrong: `init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))["ep"]`.
    Why: the mesh has no axis of that name; axes are looked up by name only.
    Right: `mesh["tp"]`, or `mesh["dp", "tp"]` for both.
    """


class LayoutError(HyperParallelError, ValueError):
    """A layout does not fit the mesh or the tensor it is used with.

    Wrong: `mesh.layout("dp", "dp")`.
    Why: one mesh axis can split one tensor dim only; used twice, ranks off the diagonal would own nothing.
    Right: `mesh.layout("dp", None)`, or split two dims by two axes.
    """


class UnevenError(LayoutError):
    """Local sizes do not follow the rule that the layout states.

    Wrong: `DTensor.from_local(local, mesh, [Shard(0)])` with sizes 2, 3, 4, 5 on four ranks.
    Why: `Shard` cuts as `torch.chunk` does (4, 4, 4, 2 for 14 rows); other sizes would be gathered out of place.
    Right: pass `RaggedShard(0, (2, 3, 4, 5))`, which gives every rank a size of its own.
    """


class ShapeError(HyperParallelError, ValueError):
    """Global shapes do not fit the operation.

    Wrong: `x.view(3, 5)` on a tensor of 16 elements.
    Why: sizes are always global ones; a local size is never guessed from them.
    Right: give the shape the one-device program would give.
    """


class NoRuleError(HyperParallelError, RuntimeError):
    """An op has no sharding rule, so nobody knows what its shards mean.

    Wrong: `torch.linalg.qr(x)` on a sharded tensor.
    Why: running it on each shard would give another result than on the whole tensor.
    Right: `register_sharding_rule`, `local_map`, or gather first with `x.full_tensor()`.
    """


class OperandError(HyperParallelError, RuntimeError):
    """An operand is of a kind that the op cannot combine with a DTensor.

    Wrong: `x + torch.ones(8)` with `x` a DTensor, outside of a module wrapped by `shard_module`.
    Why: nobody knows whether the plain tensor is one rank's piece or a copy of the whole.
    Right: `distribute_tensor(torch.ones(8), x.device_mesh)`, or `DTensor.from_local` for a piece.
    """


class PartialError(HyperParallelError, ValueError):
    """A pending reduction meets an op that needs the finished value.

    Wrong: `mesh.layout(None, partial={"dp": "sum", "tp": "max"})`.
    Why: a sum and a maximum do not commute, so the value would depend on the order.
    Right: finish one of them first with `x.redistribute(...)`.
    """


class ParamStateError(HyperParallelError, RuntimeError):
    """A call that the present state of a `fully_shard` group does not allow.

    Wrong: `module.set_requires_gradient_sync(False)` on a module that was never wrapped.
    Why: there is no group whose state could change.
    Right: `fully_shard(module)` first.
    """


class CollectiveError(HyperParallelError, RuntimeError):
    """A peer is missing, late, or takes part in another operation.

    Wrong: `if rank == 0: x.full_tensor()`.
    Why: gathering needs every rank of the mesh; the others never come.
    Right: call it on all ranks and use the result on one.
    """


class CollectiveTimeout(CollectiveError, TimeoutError):
    """A peer did not join a collective within the time-out of its group.

    Wrong: one rank leaves the training loop early.
    Why: the others wait in the next all-gather.
    Right: agree on the number of steps; the message names operation, group and tensor.
    """


class CacheError(HyperParallelError, ValueError):
    """A cache that does not exist, or a limit that cannot be kept.

    Wrong: `set_cache_limit("plan", 100)`.
    Why: the caches are those that `cache_info()` lists; a misspelt one would be limited silently never.
    Right: `set_cache_limit("plans", 100)`.
    """


class CheckpointError(HyperParallelError, RuntimeError):
    """A checkpoint is damaged, incomplete, or does not fit the model.

    Wrong: saving a DTensor with a pending sum.
    Why: its value exists on no rank yet.
    Right: `x.redistribute(...)` to Shard or Replicate first.
    """


class InternalError(HyperParallelError, RuntimeError):
    """An invariant of this library does not hold: our bug, never the user's.

    Wrong: nothing you did.
    Why: the message says which invariant.
    Right: report it with the output of `hyper_parallel.cache_info()` and the printed plan.
    """
