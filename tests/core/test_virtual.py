# SPDX-License-Identifier: Apache-2.0
"""Plans run on virtual ranks; the oracle is the global array itself."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections import Counter
from collections.abc import Generator, Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from hyper_parallel.core.device_mesh import DeviceMesh
from hyper_parallel.core.errors import CollectiveError, LayoutError
from hyper_parallel.core.layout import Layout
from hyper_parallel.core.placement_types import Partial, ReduceOp, Replicate, Shard
from hyper_parallel.core.protocols import Reduction, Summation
from hyper_parallel.core.tensor_redistribution import Plan, StepKind, compile_plan, execute, execute_steps, plan, run
from hyper_parallel.core.tensor_redistribution.execute import (
    AllGatherRequest,
    AllReduceRequest,
    AllToAllRequest,
    ReduceScatterRequest,
)
from hyper_parallel.platform.virtual import VirtualOps, VirtualWorld
from hyper_parallel.platform.virtual.tensor import Array, part_of, reduce_arrays, split_value
from hyper_parallel.testing.strategies import LayoutPair, draw_layout_pair, layout_pairs

# Whole numbers as floats: every sum is exact, so results are compared bit by bit, averages included.


def numbers(shape: tuple[int, ...], seed: int, *, is_bool: bool = False) -> Array:
    random_ = np.random.default_rng(seed)
    if is_bool:
        return random_.integers(0, 2, shape).astype(np.bool_)
    return random_.integers(-20, 20, shape).astype(np.float64)


def check_redistribute(src: Layout, dst: Layout, array: Array, seed: int) -> Plan:
    """Run the plan on all ranks and compare values, inputs, bytes and number of collectives with what they must be."""
    world = VirtualWorld(src.mesh)
    locals_ = world.distribute(array, src, np.random.default_rng(seed))
    kept = {rank: local.copy() for rank, local in locals_.items()}
    made = plan(src, dst, array.shape, array.itemsize)
    texts = repr(src), repr(dst)
    out = world.run_plan(made, locals_)

    np.testing.assert_array_equal(world.assemble(out, dst, array.shape), array)
    for rank, local in out.items():
        assert local.dtype == array.dtype
        assert local.shape == dst.local_shape(array.shape, rank)
        np.testing.assert_array_equal(locals_[rank], kept[rank])
        if made.steps:
            assert not np.shares_memory(local, locals_[rank])
        else:
            assert local is locals_[rank]
        assert world.bytes_received[rank] == made.bytes_received(rank)
    assert made.num_collectives <= 4
    if made.num_collectives == 0:
        assert not world.collectives
    assert (repr(src), repr(dst)) == texts  # U09
    return made


# -- every pair of layouts ----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("count", "max_ranks", "first_seed"), [(1400, 16, 0), (450, 64, 10_000)])
def test_random_layout_pairs(count: int, max_ranks: int, first_seed: int) -> None:
    most = 0
    kinds: Counter[str] = Counter()
    for seed in range(first_seed, first_seed + count):
        pair = draw_layout_pair(random.Random(seed).choice, max_ranks=max_ranks)
        array = numbers(pair.shape, seed, is_bool=pair.is_bool)
        made = check_redistribute(pair.src, pair.dst, array, seed)
        most = max(most, made.num_collectives)
        kinds.update(step.kind.value for step in made.steps)
    print(f"{count} pairs up to {max_ranks} ranks: at most {most} collectives, steps {dict(kinds)}")
    assert set(kinds) == {kind.value for kind in StepKind}


@pytest.mark.slow
def test_random_layout_pairs_on_128_ranks() -> None:
    mesh = DeviceMesh.grid(dp=4, tp=4, cp=8)
    for seed in range(150):
        pair = draw_layout_pair(random.Random(seed).choice, mesh=mesh, max_size=20)
        check_redistribute(pair.src, pair.dst, numbers(pair.shape, seed, is_bool=pair.is_bool), seed)


@given(layout_pairs())
def test_layout_pairs(pair: LayoutPair) -> None:
    check_redistribute(pair.src, pair.dst, numbers(pair.shape, 0, is_bool=pair.is_bool), 0)


@pytest.mark.parametrize("shape", [(5,), (7, 3), (3, 5)])
def test_all_pairs_of_placements_on_uneven_shapes(shape: tuple[int, ...]) -> None:
    # D07.
    mesh = DeviceMesh.grid(dp=2, tp=2)
    choices = [Replicate(), Shard(0), Partial(), *([Shard(1)] if len(shape) > 1 else [])]
    found = [Layout.from_placements(mesh, p, len(shape)) for p in itertools.product(choices, repeat=2)]
    assert len(found) == len(choices) ** 2
    for src, dst in itertools.product(found, repeat=2):
        check_redistribute(src, dst, numbers(shape, 1), 2)


@pytest.mark.parametrize("op", [op.value for op in ReduceOp])
def test_copies_to_pending_and_back(op: str) -> None:
    # D29: the value is kept, whatever the reduction.
    mesh = DeviceMesh.grid(dp=2, tp=3)
    array = numbers((5, 3), 3, is_bool=op in ("all", "any"))
    copies = mesh.layout(None, None)
    pending = mesh.layout(None, None, partial={"dp": op, "tp": op})
    world = VirtualWorld(mesh)
    there = world.redistribute(world.distribute(array, copies), copies, pending, array.shape)
    back = world.redistribute(there, pending, copies, array.shape)
    for rank in mesh.ranks:
        np.testing.assert_array_equal(back[rank], array)


def test_pending_sum_of_opposite_signs() -> None:
    mesh = DeviceMesh.grid(dp=2)
    src, dst = mesh.layout(None, partial={"dp": "sum"}), mesh.layout(None, partial={"dp": "avg"})
    world = VirtualWorld(mesh)
    out = world.redistribute({0: np.array([1.0, -5.0]), 1: np.array([-3.0, 6.0])}, src, dst, (2,))
    assert out[0].tolist() == [2.0, -10.0]
    assert world.assemble(out, dst, (2,)).tolist() == [-2.0, 1.0]


@pytest.mark.parametrize("shape", [(), (0,), (1,), (0, 3), (1, 1), (3, 0, 2)])
def test_shapes_at_the_edge(shape: tuple[int, ...]) -> None:
    mesh = DeviceMesh.grid(dp=2, tp=3)
    dims: list[Any] = [None, "dp", ("tp", "dp")]
    specs = [tuple(dim if i == j else None for j in range(len(shape))) for i in range(len(shape) or 1) for dim in dims]
    made = [mesh.layout(*spec) for spec in specs] + [mesh.layout(*[None] * len(shape), partial={"tp": "sum"})]
    for src, dst in itertools.product(made, repeat=2):
        check_redistribute(src, dst, numbers(shape, 0), 0)


def test_half_precision_sums_are_wide() -> None:
    mesh = DeviceMesh.grid(dp=4)
    value = np.array([2048.0, 1.0, 1.0, 1.0], np.float16)
    locals_ = {rank: value[rank : rank + 1] for rank in mesh.ranks}
    world = VirtualWorld(mesh)
    out = world.redistribute(locals_, mesh.layout(None, partial={"dp": "sum"}), mesh.layout(None), (1,))
    assert out[0].tolist() == [2052.0]  # 2051 rounded once; adding in 16 bits stays at 2048
    assert out[0].dtype == np.float16


# -- which path ---------------------------------------------------------------------------------------


def paths(src: Layout, dst: Layout, shape: tuple[int, ...]) -> set[str]:
    made = plan(src, dst, shape)
    out = set()
    for rank in src.mesh.ranks:
        for step in compile_plan(made, rank).steps:
            manner = "void" if step.is_void else "equal" if step.is_equal else "unequal"
            needs_manner = step.kind in (StepKind.REDUCE_SCATTER, StepKind.ALL_GATHER)
            out.add(f"{step.kind.value} {manner}" if needs_manner else step.kind.value)
    return out


def test_every_path_is_taken_and_right() -> None:
    mesh = DeviceMesh.grid(dp=2, tp=3)
    layout, pending = mesh.layout, {"tp": "sum"}
    cases: list[tuple[str, Layout, Layout, tuple[int, ...]]] = [
        ("slice", layout(None, None), layout("dp", None), (5, 6)),
        ("exchange", layout("tp", None), layout(None, "tp"), (5, 6)),
        ("all-reduce", layout(None, None, partial=pending), layout(None, None), (5, 6)),
        ("make-partial", layout(None, None), layout(None, None, partial=pending), (5, 6)),
        ("scale", layout(None, partial=pending), layout(None, partial={"tp": "avg"}), (5,)),
        ("reduce-scatter equal", layout(None, None, partial=pending), layout("tp", None), (6, 5)),
        ("reduce-scatter equal", layout(None, None, partial=pending), layout(None, "tp"), (5, 6)),
        ("reduce-scatter unequal", layout(None, None, partial=pending), layout(None, "tp"), (5, 5)),
        ("reduce-scatter void", layout("dp", None, partial=pending), layout("dp", "tp"), (1, 6)),
        ("all-gather equal", layout("tp", None), layout(None, None), (6, 5)),
        ("all-gather equal", layout(None, "tp"), layout(None, None), (5, 6)),
        ("all-gather unequal", layout(None, "tp"), layout(None, None), (5, 5)),
        ("all-gather void", layout("dp", "tp"), layout("dp", None), (1, 6)),
    ]
    for name, src, dst, shape in cases:
        assert name in paths(src, dst, shape), name
        check_redistribute(src, dst, numbers(shape, 0), 0)


class CountingOps(VirtualOps):
    """Counts what touches memory."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def empty(self, shape: Any, like: Array) -> Array:
        self.calls["empty"] += 1
        return super().empty(shape, like)

    def contiguous(self, x: Array) -> Array:
        self.calls["contiguous copy"] += not x.flags.c_contiguous
        return super().contiguous(x)


class CountingWorld(VirtualWorld):
    """Counts the parts that do not lie in one block of memory, which a network has to pack or unpack."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__(mesh)
        self.ops = CountingOps()
        self.packed = self.unpacked = 0

    def _answer(self, members: Any) -> list[Any]:
        for request in members:
            match request:
                case AllToAllRequest(sends, outs, _):
                    self._count_copies(sends, outs)
                case AllGatherRequest(x, outs, _):
                    self._count_copies((x,), outs)
                case ReduceScatterRequest(parts, _, _):
                    self._count_copies(parts, ())
        return super()._answer(members)

    def _count_copies(self, sends: Any, outs: Any) -> None:
        self.packed += any(not part.flags.c_contiguous for part in sends)
        self.unpacked += any(not part.flags.c_contiguous for part in outs)


def count_copies(src: Layout, dst: Layout, array: Array) -> dict[str, int]:
    """What one rank copies: buffers of the executor, packing and unpacking."""
    world = CountingWorld(src.mesh)
    world.redistribute(world.distribute(array, src), src, dst, array.shape)
    counts = Counter(world.ops.calls) + Counter(pack=world.packed, unpack=world.unpacked)
    return {name: count // src.mesh.size() for name, count in counts.items() if count}


def test_at_most_one_pack_and_one_unpack() -> None:
    mesh = DeviceMesh.grid(dp=2, tp=2)
    pending = {"dp": "sum"}
    array = numbers((4, 4), 0)
    assert count_copies(mesh.layout("dp", None), mesh.layout(None, None), array) == {"empty": 1}
    assert count_copies(mesh.layout(None, "dp"), mesh.layout(None, None), array) == {"empty": 1, "unpack": 1}
    assert count_copies(mesh.layout(None, None, partial=pending), mesh.layout("dp", None), array) == {}
    assert count_copies(mesh.layout(None, None, partial=pending), mesh.layout(None, "dp"), array) == {"pack": 1}
    assert count_copies(mesh.layout(None, None, partial=pending), mesh.layout(None, None), array) == {}
    # One side lies in order, the other does not: one of the two copies.
    assert count_copies(mesh.layout("dp", None), mesh.layout(None, "dp"), array) == {"empty": 1, "pack": 1}
    assert count_copies(mesh.layout(None, "dp"), mesh.layout("dp", None), array) == {"empty": 1, "unpack": 1}
    cubes = numbers((2, 4, 4), 0)
    both = count_copies(mesh.layout(None, "dp", None), mesh.layout(None, None, "dp"), cubes)
    assert both == {"empty": 1, "pack": 1, "unpack": 1}
    # Rows that change owner: both sides lie in order.
    ragged = mesh.layout("dp", None).with_dim(0, "dp", {"dp": (1, 3)})
    assert count_copies(mesh.layout("dp", None), ragged, array) == {"empty": 1}
    # Slicing alone is copied out, so that a later in-place op does not reach the source.
    assert count_copies(mesh.layout(None, None), mesh.layout("dp", None), array) == {"empty": 1}


def test_a_dim_of_size_one_in_front_needs_no_packing() -> None:
    mesh = DeviceMesh.grid(dp=2)
    array = numbers((1, 6), 0)
    assert count_copies(mesh.layout(None, "dp"), mesh.layout(None, None), array) == {"empty": 1}
    assert count_copies(mesh.layout(None, None, partial={"dp": "sum"}), mesh.layout(None, "dp"), array) == {}


def test_axes_in_their_own_order_need_no_packing() -> None:
    mesh = DeviceMesh.grid(dp=2, tp=3)
    for axes in (("tp", "dp"), ("dp", "tp")):
        assert count_copies(mesh.layout(axes), mesh.layout(None), numbers((12,), 0)) == {"empty": 1}


# -- rounds -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [8, 9, 13])
def test_a_large_reduce_scatter_before_an_all_reduce_is_a_pipeline(
    length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execute, "PIPELINE_BYTES", 64)
    mesh = DeviceMesh.grid(dp=2, tp=2)
    src, dst = mesh.layout(None, None, partial={"dp": "sum", "tp": "avg"}), mesh.layout("tp", None)
    array = numbers((length, 3), 0)
    world = VirtualWorld(mesh)
    made = plan(src, dst, array.shape, 8)
    assert [step.kind.value for step in made.steps] == ["reduce-scatter", "all-reduce"]
    out = world.run_plan(made, world.distribute(array, src))
    np.testing.assert_array_equal(world.assemble(out, dst, array.shape), array)
    num_groups = 2
    assert world.collectives["ReduceScatter"] == world.collectives["AllReduce"] == num_groups * execute.NUM_CHUNKS
    assert world.bytes_received[0] == made.bytes_received(0)
    assert compile_plan(made, 0).num_rounds(array, world.ops, Summation.FAST) == execute.NUM_CHUNKS + 1
    assert (
        compile_plan(made, 0).num_rounds(array, world.ops, Summation.ORDERED) == 3
    )  # in one piece, whose adding is ours


def test_a_pipeline_has_both_kinds_under_way_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execute, "PIPELINE_BYTES", 64)
    mesh = DeviceMesh.grid(dp=2, tp=2)
    src, dst = mesh.layout(None, None, partial={"dp": "sum", "tp": "sum"}), mesh.layout("tp", None)
    compiled = compile_plan(plan(src, dst, (8, 3), 8), 0)
    execution = execute_steps(compiled, numbers((8, 3), 0), VirtualOps())
    rounds = []
    answers = None
    with contextlib.suppress(StopIteration):
        while True:
            round_ = execution.send(answers)  # type: ignore[arg-type] # None starts a generator
            rounds.append([type(request).__name__.removesuffix("Request") for request in round_])
            answers = [r.parts[0] if isinstance(r, ReduceScatterRequest) else r.x for r in round_]  # type: ignore[union-attr]
    assert rounds == [["ReduceScatter"], *[["ReduceScatter", "AllReduce"]] * 3, ["AllReduce"]]


@given(layout_pairs())
@settings(max_examples=60)
def test_the_number_of_rounds_is_known_before(pair: LayoutPair) -> None:
    src, dst, shape, is_bool = pair
    world = VirtualWorld(src.mesh)
    made = plan(src, dst, shape, 8)
    for summation in Summation:
        counts: Counter[int] = Counter()

        def counted(rank: int, program: Any, counts: Counter[int] = counts) -> Any:
            answers = None
            while True:
                try:
                    round_ = program.send(answers)
                except StopIteration as done:
                    return done.value
                counts[rank] += 1
                answers = yield round_

        programs = {
            rank: counted(rank, execute_steps(compile_plan(made, rank), local, world.ops, summation))
            for rank, local in world.distribute(numbers(shape, 0, is_bool=is_bool), src).items()
        }
        world.run(programs)
        for rank in src.mesh.ranks:
            assert compile_plan(made, rank).num_rounds(numbers((), 0), world.ops, summation) == counts[rank]


def test_a_source_that_may_change_is_copied_before_the_last_round() -> None:
    mesh = DeviceMesh.grid(dp=2)
    compiled = compile_plan(plan(mesh.layout("dp"), mesh.layout(None), (4,)), 0)
    local = np.arange(2.0)
    for keeps_source in (True, False):
        (request,) = next(execute_steps(compiled, local, VirtualOps(), keeps_source=keeps_source))
        assert isinstance(request, AllGatherRequest)
        assert np.shares_memory(request.x, local) is keeps_source


# -- one process --------------------------------------------------------------------------------------


class Done:
    """A collective that has ended."""

    def __init__(self, result: Any = None) -> None:
        self.result = result

    def wait(self) -> Any:
        return self.result


class Recorder:
    """`Collectives` that note how they were called and answer as if every rank were alike."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def all_reduce(self, x: Array, reduction: Reduction, ranks: tuple[int, ...]) -> Done:
        self.calls.append(f"all_reduce {reduction.op} {ranks}")
        return Done(reduce_arrays([x] * len(ranks), reduction.op))

    def reduce_scatter(self, parts: Any, reduction: Reduction, ranks: tuple[int, ...], *, is_equal: bool) -> Done:
        self.calls.append(f"reduce_scatter {reduction.op} {ranks}")
        return Done(reduce_arrays([parts[0]] * len(ranks), reduction.op))

    def all_gather(self, x: Array, outs: Any, ranks: tuple[int, ...], *, is_equal: bool) -> Done:
        self.calls.append(f"all_gather {ranks}")
        return self._filled(outs, x)

    def all_to_all(self, sends: Any, outs: Any, ranks: tuple[int, ...]) -> Done:
        self.calls.append(f"all_to_all {ranks}")
        return self._filled(outs, sends[0])

    def _filled(self, outs: Any, x: Array) -> Done:
        for out in outs:
            out[...] = np.resize(x, out.shape)
        return Done()


@pytest.mark.parametrize(
    ("src", "dst", "call"),
    [
        ({"partial": {"dp": "max"}}, {}, "all_reduce max (0, 2)"),
        ({"partial": {"dp": "sum"}}, {"first": "dp"}, "reduce_scatter sum (0, 2)"),
        ({"first": "dp"}, {}, "all_gather (0, 2)"),
        ({"first": "dp"}, {"second": "dp"}, "all_to_all (0, 2)"),
    ],
)
def test_run_asks_the_collectives_of_the_process(src: Any, dst: Any, call: str) -> None:
    mesh = DeviceMesh.grid(dp=2, tp=2)

    def layout(first: Any = None, second: Any = None, partial: Any = None) -> Layout:
        return mesh.layout(first, second, partial=partial)

    before, after = layout(**src), layout(**dst)
    collectives = Recorder()
    compiled = compile_plan(plan(before, after, (4, 4)), 2)
    out = run(compiled, numbers(before.local_shape((4, 4), 2), 0), VirtualOps(), collectives)
    assert collectives.calls == [call]
    assert out.shape == after.local_shape((4, 4), 2)


# -- the virtual platform itself ----------------------------------------------------------------------


@pytest.mark.parametrize("op", list(ReduceOp))
@pytest.mark.parametrize("num", [1, 2, 5])
def test_operands_give_the_value_and_differ(op: ReduceOp, num: int) -> None:
    value = numbers((40,), 1, is_bool=op in (ReduceOp.ALL, ReduceOp.ANY))
    parts = split_value(value, op, num, np.random.default_rng(2))
    assert len(parts) == num
    np.testing.assert_array_equal(reduce_arrays(parts, op), value)
    if num > 1:
        assert any((part != value).any() for part in parts)
    if op is ReduceOp.SUM and num > 1:
        assert min(part.min() for part in parts) < 0 < max(part.max() for part in parts)


def test_assemble_finds_copies_that_differ() -> None:
    mesh = DeviceMesh.grid(dp=2)
    world = VirtualWorld(mesh)
    with pytest.raises(LayoutError, match=r"copy on rank 1 under \[-\] differs .* Find who changed it"):
        world.assemble({0: np.array([1.0]), 1: np.array([2.0])}, mesh.layout(None), (1,))


def test_assemble_finds_wrong_shapes() -> None:
    mesh = DeviceMesh.grid(dp=2)
    world = VirtualWorld(mesh)
    with pytest.raises(LayoutError, match=r"rank 1 has \(3,\), \[dp\] gives it \(2,\)"):
        world.assemble({0: np.zeros(2), 1: np.zeros(3)}, mesh.layout("dp"), (4,))


def run_programs(*requests: Any) -> Mapping[int, Any]:
    def program(request: Any) -> Generator[Any, Any, Any]:
        if request is None:
            return None
        (answer,) = yield (request,)
        return answer if answer is not None else request.outs

    world = VirtualWorld(DeviceMesh.grid(dp=len(requests)))
    return world.run({rank: program(request) for rank, request in enumerate(requests)})


X = np.array([1.0, 2.0])
SUM, MAX = Reduction("sum"), Reduction("max")


def blanks(*sizes: int) -> tuple[Array, ...]:
    return tuple(np.zeros(size) for size in sizes)


def test_groups_may_be_at_different_places() -> None:
    ranks = (0, 1)
    assert [x.tolist() for x in run_programs(*[AllReduceRequest(X, SUM, ranks)] * 2).values()] == [[2, 4]] * 2
    assert run_programs(None, AllGatherRequest(X, blanks(2), (1,), True))[1][0].tolist() == [1, 2]
    swapped = [AllToAllRequest((X[:1], X[1:]), blanks(1, 1), (1, 0)) for _ in range(2)]
    assert [x.tolist() for x in run_programs(*swapped)[0]] == [[2], [2]]


@pytest.mark.parametrize(
    ("requests", "fragments"),
    [
        (
            (AllReduceRequest(X, SUM, (0, 1)), AllReduceRequest(X, MAX, (0, 1))),
            ("ranks (0, 1)", "'sum'", "'max'", "Call the same"),
        ),
        (
            (AllReduceRequest(X, SUM, (0, 1)), AllGatherRequest(X, blanks(2, 2), (0, 1), True)),
            ("ranks (0, 1)", "AllReduce", "AllGather", "Call the same"),
        ),
        (
            (AllGatherRequest(X, blanks(2, 2), (0, 1), True), AllGatherRequest(X[:1], blanks(1, 1), (0, 1), True)),
            ("ranks (0, 1)", "(2,)", "(1,)", "Call the same"),
        ),
        (
            (AllReduceRequest(X, SUM, (0, 1)), None),
            ("rank 0 waits in AllReduce of ranks (0, 1)", "no group is complete", "Call it on all"),
        ),
        (
            (AllReduceRequest(X, SUM, (0, 1)), AllReduceRequest(X, SUM, (1, 0))),
            ("rank 0 waits", "rank 1 waits", "no group is complete", "Call it on all"),
        ),
        (
            (AllToAllRequest((X, X), blanks(2, 2), (0, 1)), AllToAllRequest((X, X), blanks(1, 2), (0, 1))),
            ("rank 0 sends (2,)", "rank 1 expects (1,)", "same plan"),
        ),
    ],
)
def test_ranks_that_disagree_are_named(requests: Any, fragments: tuple[str, ...]) -> None:
    with pytest.raises(CollectiveError) as caught:
        run_programs(*requests)
    for fragment in fragments:
        assert fragment in str(caught.value)
    assert "\n" not in str(caught.value)


def test_collectives_are_counted_per_group() -> None:
    mesh = DeviceMesh.grid(dp=2, tp=3)
    world = VirtualWorld(mesh)
    array = numbers((6,), 0)
    world.redistribute(world.distribute(array, mesh.layout("tp")), mesh.layout("tp"), mesh.layout(None), (6,))
    assert world.collectives == {"AllGather": 2}
    assert dict(world.bytes_received) == dict.fromkeys(mesh.ranks, 4 * 8)


def test_requests_show_no_memory_of_the_executor() -> None:
    # The executor hands out the local tensor itself; collectives promise not to change it.
    mesh = DeviceMesh.grid(dp=2)
    compiled = compile_plan(plan(mesh.layout(None, partial={"dp": "sum"}), mesh.layout("dp"), (4,)), 0)
    local = np.arange(4.0)
    (request,) = next(execute_steps(compiled, local, VirtualOps()))
    assert isinstance(request, ReduceScatterRequest)
    assert all(np.shares_memory(part, local) for part in request.parts)  # no packing copy
    assert [part.shape for part in request.parts] == [(2,), (2,)]


# -- all pairs of layouts -----------------------------------------------------------------------------


def all_layouts(mesh: DeviceMesh, ndim: int) -> list[Layout]:
    """Every axis copies, splits one of the dims (in mesh order), or is pending."""
    choices = [Replicate(), Partial(), *map(Shard, range(ndim))]
    return [Layout.from_placements(mesh, p, ndim) for p in itertools.product(choices, repeat=mesh.ndim)]


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"dp": 2, "tp": 2}, {"dp": 2, "tp": 3}, {"dp": 2, "tp": 2, "cp": 2}])
@pytest.mark.parametrize("shape", [(7,), (3,), (5, 4), (2, 3, 5)])
def test_all_pairs_of_layouts(sizes: dict[str, int], shape: tuple[int, ...]) -> None:
    """Uneven sizes, and ranks that own nothing wherever more pieces are cut than there are indices."""
    mesh = DeviceMesh.grid(**sizes)
    array = numbers(shape, 0)
    found = all_layouts(mesh, len(shape))
    world = VirtualWorld(mesh)
    for src in found:
        locals_ = world.distribute(array, src)
        for dst in found:
            made = plan(src, dst, shape, 8)
            assert made.num_collectives <= 4
            out = world.run_plan(made, locals_)
            if dst.partial:
                np.testing.assert_array_equal(world.assemble(out, dst, shape), array)
            else:
                for rank, local in out.items():
                    assert np.array_equal(local, part_of(array, dst.box(shape, rank)))
