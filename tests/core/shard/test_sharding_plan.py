# SPDX-License-Identifier: Apache-2.0
"""Names of a plan: which entry counts for what, and what is said of entries that fit nothing."""

from __future__ import annotations

import pytest

from hyper_parallel.core.device_mesh import DeviceMesh
from hyper_parallel.core.errors import LayoutError, MeshError
from hyper_parallel.core.layout import Layout
from hyper_parallel.core.shard.sharding_plan import (
    ShardingPlan,
    Style,
    column_parallel,
    layout_for,
    row_parallel,
    sequence_parallel,
    vocabulary_parallel,
)

MESH = DeviceMesh.grid(dp=2, tp=4)


def test_names_and_patterns() -> None:
    plan = ShardingPlan(modules={"layers.0.up": row_parallel(), "layers.*.up": column_parallel(), "head?": Style()})
    assert plan.parameter_spec("layers.0.up", "weight") == (None, "tp")
    assert plan.parameter_spec("layers.1.up", "weight") == ("tp", None)
    assert plan.parameter_spec("layers.1.up", "bias") == ("tp",)
    assert plan.parameter_spec("layers.1.down", "weight") is None
    assert plan.style_of("head1") == Style()


def test_the_first_match_counts() -> None:
    first = ShardingPlan(modules={"*": column_parallel(), "down": row_parallel()})
    second = ShardingPlan(modules={"down": row_parallel(), "*": column_parallel()})
    assert first.parameter_spec("down", "weight") == ("tp", None)
    assert second.parameter_spec("down", "weight") == (None, "tp")


def test_patterns_cross_dots_and_respect_case() -> None:
    plan = ShardingPlan(modules={"*.up": column_parallel()})
    assert plan.parameter_spec("a.b.c.up", "weight") == ("tp", None)
    assert plan.parameter_spec("up", "weight") is None
    assert plan.parameter_spec("a.Up", "weight") is None


def test_parameters_go_before_styles() -> None:
    plan = ShardingPlan(modules={"up": column_parallel()}, parameters={"up.weight": (None, "dp"), "scale": ("tp",)})
    assert plan.parameter_spec("up", "weight") == (None, "dp")
    assert plan.parameter_spec("up", "bias") == ("tp",)
    assert plan.parameter_spec("", "scale") == ("tp",)


def test_inputs_and_outputs_go_before_styles() -> None:
    plan = ShardingPlan(
        modules={"norm": sequence_parallel()}, inputs={"norm": ("dp", ...)}, outputs={"nor*": [None, ("tp",)]}
    )
    style = plan.style_of("norm")
    assert style.inputs == ("dp", ...)
    assert style.outputs == [None, ("tp",)]
    assert plan.style_of("other") == Style()


def test_styles() -> None:
    assert column_parallel("x").parameters == {"weight": ("x", None), "bias": ("x",)}
    assert row_parallel("x").parameters == {"weight": (None, "x"), "bias": (None,)}
    assert row_parallel("x").outputs == (...,)
    assert vocabulary_parallel("x").parameters == {"weight": ("x", None)}
    assert sequence_parallel("x", dim=0, ndim=2).inputs == ("x", None)
    assert sequence_parallel("x").outputs == (None, "x", None)


def test_names_that_match_nothing() -> None:
    plan = ShardingPlan(
        modules={"layers.*.up": Style(), "layrs.*": Style()},
        parameters={"scale": (None,), "layers.0.up.wieght": (None, None)},
        inputs={"head": None},
        outputs={"layers.?.up": None},
    )
    names = ["", "layers", "layers.0", "layers.0.up"]
    assert plan.unmatched(names, ["layers.0.up.weight", "scale"]) == ["layrs.*", "head", "layers.0.up.wieght"]
    assert ShardingPlan().unmatched(names, []) == []


def test_dims_of_an_entry() -> None:
    assert layout_for(("tp", None), MESH, 2, "x") is MESH.layout("tp", None)
    assert layout_for((("dp", "tp"), None), MESH, 2, "x") is MESH.layout(("dp", "tp"), None)
    assert layout_for((..., "tp"), MESH, 4, "x") is MESH.layout(None, None, None, "tp")
    assert layout_for(("dp", ..., "tp"), MESH, 2, "x") is MESH.layout("dp", "tp")
    assert layout_for((...,), MESH, 0, "x") is MESH.layout()
    assert layout_for(None, MESH, 2, "x") is MESH.layout(None, None)
    layout = Layout(MESH, ("tp", None))
    assert layout_for(layout, MESH, 2, "x") is layout


@pytest.mark.parametrize(("spec", "ndim"), [(("tp",), 2), (("tp", None, None), 2), (("dp", ..., "tp"), 1)])
def test_another_number_of_dims(spec: tuple[object, ...], ndim: int) -> None:
    with pytest.raises(LayoutError) as caught:
        layout_for(spec, MESH, ndim, 'parameter "up.weight"')
    message = str(caught.value)
    assert message.startswith('parameter "up.weight": the plan gives')
    assert f"the tensor has {ndim}" in message
    assert "one entry per dim" in message


@pytest.mark.parametrize("spec", [("ep", None), (("dp", "ep"), None)])
def test_an_axis_that_the_mesh_lacks(spec: tuple[object, ...]) -> None:
    with pytest.raises(MeshError) as caught:
        layout_for(spec, MESH, 2, 'parameter "up.weight"')
    message = str(caught.value)
    assert message.startswith('parameter "up.weight": the plan names axis "ep"')
    assert "mesh (dp=2, tp=4) has no such axis" in message
    assert 'Use "dp", "tp"' in message


def test_plans_are_values() -> None:
    make = lambda: ShardingPlan(modules={"*.up": column_parallel()}, inputs={"x": (...,)})  # noqa: E731
    assert make() == make()
    with pytest.raises(AttributeError):
        make().modules = {}  # type: ignore[misc]


def test_misspelt_parameters_of_styles() -> None:
    plan = ShardingPlan(
        modules={
            "layers.*.up": Style({"wieght": ("tp", None), "bias": ("tp",)}),
            "layers.*.down": Style({"weight": (None, "tp"), "inner.weight": ("tp",), "extra": ("tp",)}),
            "absent": Style({"weight": ("tp",)}),
        }
    )
    held = {"layers.0.up": ["weight"], "layers.0.down": ["weight", "bias"], "layers.1.down": ["weight", "extra"]}
    assert plan.misspelt(held) == ["layers.*.up.wieght", "layers.*.down.inner.weight"]
    # Linears without a bias are split like those with one.
    assert ShardingPlan(modules={"layers.*": column_parallel()}).misspelt(held) == []
