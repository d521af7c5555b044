# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from hyper_parallel.core.box import box_numel
from hyper_parallel.core.device_mesh import DeviceMesh
from hyper_parallel.core.errors import MeshError
from hyper_parallel.core.layout import Layout
from hyper_parallel.core.protocols import Reduction
from hyper_parallel.core.tensor_redistribution import StepKind, Topology, plan
from hyper_parallel.core.tensor_redistribution.cost import REPEATS, largest_piece, step_cost, step_seconds
from hyper_parallel.core.tensor_redistribution.planner import candidates
from hyper_parallel.platform.virtual import VirtualOps
from hyper_parallel.testing.strategies import LayoutPair, layout_pairs

GRID = DeviceMesh.grid(dp=4, tp=2)
FLAT = Topology((1e-6, 1e-6), (1e-9, 1e-9), 1e-12)


# -- topology -----------------------------------------------------------------------------------------


def test_a_topology_is_a_value() -> None:
    assert Topology([1e-6, 1e-6], [1e-9, 1e-9], 1e-12) == FLAT  # type: ignore[arg-type]
    assert hash(Topology([1e-6, 1e-6], [1e-9, 1e-9], 1e-12)) == hash(FLAT)  # type: ignore[arg-type]
    assert eval(repr(FLAT)) == FLAT
    assert copy.deepcopy(FLAT) == FLAT
    with pytest.raises(AttributeError):
        FLAT.gamma = 1.0  # type: ignore[misc]


def test_inner_axes_lie_in_one_machine() -> None:
    made = Topology.of(DeviceMesh.grid(pp=4, dp=4, cp=2, tp=4))
    assert made.alpha[0] == made.alpha[1] > made.alpha[2] == made.alpha[3]
    assert made.beta[0] == made.beta[1] > made.beta[2] == made.beta[3]
    made = Topology.of(DeviceMesh.grid(dp=2, tp=16))
    assert made.beta[0] == made.beta[1] == Topology.of(DeviceMesh.grid(dp=16)).beta[0]


@pytest.mark.parametrize(
    ("alpha", "beta", "gamma", "fragments"),
    [
        ((1.0,), (1.0, 1.0), 1.0, ("Topology", "1 alphas and 2 betas", "Give one of each")),
        ((1.0,), (0.0,), 1.0, ("Topology", "a cost is 0.0", "Give seconds above 0")),
        ((-1.0,), (1.0,), 1.0, ("Topology", "a cost is -1.0", "Give seconds above 0")),
        ((1.0,), (1.0,), float("nan"), ("Topology", "a cost is nan", "Give seconds above 0")),
    ],
)
def test_messages(alpha: Any, beta: Any, gamma: float, fragments: tuple[str, ...]) -> None:
    with pytest.raises(MeshError) as caught:
        Topology(alpha, beta, gamma)
    assert all(fragment in str(caught.value) for fragment in fragments)


def test_a_topology_of_another_mesh_is_refused() -> None:
    layout = DeviceMesh.grid(dp=2).layout("dp")
    with pytest.raises(MeshError) as caught:
        plan(layout, layout, (4,), topology=FLAT)
    for fragment in ("Topology of 2 axes", "(dp=2) has 1", "Give one alpha and beta for each"):
        assert fragment in str(caught.value)


# -- steps --------------------------------------------------------------------------------------------


@given(layout_pairs())
def test_the_largest_piece_is_the_largest(pair: LayoutPair) -> None:
    shapes = [pair.src.local_shape(pair.shape, rank) for rank in pair.src.mesh.ranks]
    for dim, size in enumerate(largest_piece(pair.src, pair.shape)):
        pieces = [shape[dim] for shape in shapes]
        assert size >= max(pieces)
        assert size == max(pieces) or pair.src.ragged  # a ragged axis may cut an end short
    if not pair.src.ragged:
        assert np.prod(largest_piece(pair.src, pair.shape)) == max(np.prod(shape) for shape in shapes)


@given(layout_pairs(max_ranks=12))
def test_costs_bound_what_ranks_do(pair: LayoutPair) -> None:
    for made in candidates(pair.src, pair.dst, pair.shape, 1):
        for step in made.steps:
            cost = step_cost(step, pair.shape)
            ranks = pair.src.mesh.ranks
            assert cost.received >= max(step.received(pair.shape, rank) for rank in ranks)
            if not step.copy_axes or step.kind is not StepKind.EXCHANGE:
                assert cost.sent >= max(step.sent(pair.shape, rank) for rank in ranks)


def figures(src: Layout, dst: Layout, *shape: int) -> list[tuple[int, ...]]:
    return [tuple(step_cost(step, shape)) for step in plan(src, dst, shape, topology=FLAT).steps]


def test_costs_of_known_steps() -> None:
    layout, pending = GRID.layout, {"dp": "sum"}
    assert figures(layout("dp", None), layout(None, None), 8, 8) == [(3, 48, 48, 64, 80)]
    assert figures(layout(None, None, partial=pending), layout("dp", None), 8, 8) == [(3, 48, 48, 64, 144)]
    assert figures(layout(None, None, partial=pending), layout(None, None), 8, 8) == [(6, 96, 96, 64, 128)]
    assert figures(layout("dp", None), layout(None, "dp"), 8, 8) == [(3, 16, 16, 32, 32)]
    assert figures(layout(None, None), layout("dp", None), 8, 8) == [(0, 0, 0, 0, 80)]
    # A swap of boxes has one peer and needs no packing.
    assert figures(layout("dp", "tp"), layout("dp", "tp", ragged={"tp": (4, 4)}), 8, 8) == []
    assert figures(layout(("dp", "tp"), None), layout(("tp", "dp"), None), 8, 8) == [(1, 8, 8, 0, 16)]


def test_what_a_giver_gives_most() -> None:
    # Dim 0 is cut by b only, and a set of copies wants one eighth of it: all of that from one giver.
    mesh = DeviceMesh.grid(a=8, b=8)
    found = candidates(mesh.layout("b", None), mesh.layout(("a", "b"), None), (512, 4), 1)
    apart = next(made for made in found if made.steps[0].axes == ("b",))
    assert step_cost(apart.steps[0], (512, 4)).sent == 512 // 8 * 4
    assert max(apart.bytes_sent(rank) for rank in mesh.ranks) == 512 // 8 * 4 * 7 // 8
    spread = next(made for made in found if made.steps[0].axes == ("a", "b"))
    assert step_cost(spread.steps[0], (512, 4)).sent == 512 // 64 * 4
    assert max(spread.bytes_sent(rank) for rank in mesh.ranks) == 512 // 64 * 4


def test_seconds_of_a_step() -> None:
    topology = Topology((2e-6, 1e-6), (3e-9, 1e-9), 5e-12)
    (step,) = plan(GRID.layout("dp", "tp"), GRID.layout(None, None), (8, 8)).steps
    cost = step_cost(step, (8, 8))
    slowest = 2e-6 * (1 + 7) + 4 * (3e-9 * 56 + 5e-12 * 64)
    assert step_seconds(step, cost, 4, topology) == pytest.approx(slowest)
    giving = next(  # one rank of each set of copies gives to all the others
        made.steps[0]
        for made in candidates(GRID.layout("tp", None), GRID.layout(("dp", "tp"), None), (64, 1))
        if made.steps[0].axes == ("tp",)
    )
    cost = step_cost(giving, (64, 1))
    assert cost.sent > cost.received
    expected = 1e-6 * (1 + cost.peers) + 4 * (1e-9 * cost.sent + 5e-12 * cost.copied)
    assert step_seconds(giving, cost, 4, topology) == pytest.approx(expected)
    (local,) = plan(GRID.layout(None, None), GRID.layout("dp", None), (8, 8)).steps
    assert step_seconds(local, step_cost(local, (8, 8)), 4, topology) == 0


def test_peaks_cover_all_ranks() -> None:
    src, dst = GRID.layout("dp", None), GRID.layout(None, ("tp", "dp"))
    made = plan(src, dst, (10, 7), 2)
    assert made.peak_bytes() == max(made.peak_bytes(rank) for rank in GRID.ranks)
    assert made.peak_bytes() == 2 * (3 * 7 + 10 * 1)
    nothing = plan(src, src, (10, 7), 2)
    assert nothing.peak_bytes() == 2 * max(box_numel(src.box((10, 7), rank)) for rank in GRID.ranks)


# -- measuring ----------------------------------------------------------------------------------------


class Done:
    """A collective that has ended."""

    def __init__(self, result: Any) -> None:
        self.result = result

    def wait(self) -> Any:
        return self.result


class MeasuredJob:
    """A platform of virtual tensors whose transfers and copies advance a clock; some rank is slower than ours."""

    def __init__(self, alpha: float, beta: float, gamma: float, slowest: float) -> None:
        self.now = 0.0
        self.costs = alpha, beta, gamma
        self.slowest = slowest
        self.name = "measured"
        self.collectives: Any = self
        self.ops: Any = _CopiesOnAClock(self)
        self.num_exchanges = 0

    def clock(self) -> float:
        return self.now

    def rank(self) -> int:
        return 1

    def all_to_all(self, sends: Sequence[Any], outs: Sequence[Any], ranks: tuple[int, ...]) -> Any:
        self.num_exchanges += 1
        assert 1 in ranks
        assert [send.shape for send in sends] == [out.shape for out in outs]
        peers = len(ranks) - 1
        self.now += self.costs[0] * (1 + peers) + self.costs[1] * (peers or 1) * (sends[0].nbytes - sends[0].itemsize)
        return Done(None)

    def all_reduce(self, x: Any, reduction: Reduction, ranks: tuple[int, ...]) -> Any:
        assert (reduction, ranks) == (Reduction("max"), tuple(range(8)))
        return Done(x * self.slowest)


class _CopiesOnAClock(VirtualOps):
    def __init__(self, job: MeasuredJob) -> None:
        self.job = job

    def write(self, x: Any, box: Any, value: Any) -> None:
        super().write(x, box, value)
        self.job.now += self.job.costs[2] * value.nbytes


def test_measuring_finds_the_costs_of_the_slowest() -> None:
    job = MeasuredJob(2e-6, 3e-9, 5e-10, slowest=2.0)
    found = Topology.measure(GRID, job, np.ones(3), numel=1000, clock=job.clock)  # type: ignore[arg-type]
    assert found.alpha == pytest.approx((4e-6, 4e-6))
    assert found.beta == pytest.approx((6e-9, 6e-9))
    assert found.gamma == pytest.approx(1e-9)
    assert job.num_exchanges == 2 * 2 * (1 + REPEATS)
    found.check(GRID)


def test_noise_never_makes_a_transfer_free() -> None:
    job = MeasuredJob(1e-6, -1e-9, 1e-10, slowest=1.0)
    found = Topology.measure(GRID, job, np.ones(3, np.float32), numel=500, clock=job.clock)  # type: ignore[arg-type]
    assert all(beta > 0 for beta in found.beta)


def test_plans_with_a_topology_are_equal_on_all_ranks() -> None:
    specs = [("dp", None), ("tp", None), (None, ("tp", "dp")), (("dp", "tp"), None)]
    for first, second in itertools.product(specs, repeat=2):
        src, dst = GRID.layout(*first), GRID.layout(*second)
        made = plan(src, dst, (64, 64), topology=FLAT)
        assert made == plan(src, dst, (64, 64), topology=copy.deepcopy(FLAT))
        seconds = sum(step_seconds(step, step_cost(step, (64, 64)), 4, FLAT) for step in made.steps)
        assert made.seconds == pytest.approx(seconds)
