# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
from hypothesis import given

from hyper_parallel.core.device_mesh import DeviceMesh, as_mesh
from hyper_parallel.core.errors import MeshError
from hyper_parallel.testing.strategies import meshes


@given(meshes())
def test_meshes_are_values(mesh: DeviceMesh) -> None:
    again = eval(repr(mesh))
    assert again == mesh
    assert hash(again) == hash(mesh)
    assert copy.deepcopy(mesh) is mesh
    assert copy.copy(mesh) is mesh
    assert pickle.loads(pickle.dumps(mesh)) == mesh


def test_meshes_never_change() -> None:
    mesh = DeviceMesh.grid(dp=2, tp=2)
    for name in (*DeviceMesh.__slots__[1:], "other"):
        with pytest.raises(AttributeError, match="never changes"):
            setattr(mesh, name, 1)
    with pytest.raises(AttributeError, match="never changes"):
        del mesh.shape
    assert mesh == DeviceMesh.grid(dp=2, tp=2)


def test_meshes_differ_by_every_part() -> None:
    parts: list[Any] = [
        DeviceMesh.grid(dp=2, tp=2),
        DeviceMesh.grid("cuda", dp=2, tp=2),
        DeviceMesh.grid(dp=2, cp=2),
        DeviceMesh.grid(dp=4),
        DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("dp", "tp")),
        "mesh",
    ]
    assert len(set(parts)) == len(parts)


@given(meshes())
def test_coordinates_and_ranks_are_inverse(mesh: DeviceMesh) -> None:
    assert [mesh.rank_at(mesh.coord(rank)) for rank in mesh.ranks] == list(mesh.ranks)
    assert mesh.coord_of(max(mesh.ranks) + 1) is None


@given(meshes())
def test_groups_cover_the_mesh_once(mesh: DeviceMesh) -> None:
    for axes in [(), mesh.axis_names, mesh.axis_names[:1], mesh.axis_names[::-1]]:
        groups = mesh.groups(axes)
        assert sorted(rank for group in groups for rank in group) == sorted(mesh.ranks)
        assert {len(group) for group in groups} == {mesh.num_ranks(axes)}


def test_group_order_is_that_of_the_axes() -> None:
    mesh = DeviceMesh.grid(dp=2, tp=3)
    assert mesh.group_ranks(("dp", "tp"), 4) == (0, 1, 2, 3, 4, 5)
    assert mesh.group_ranks(("tp", "dp"), 4) == (0, 3, 1, 4, 2, 5)
    assert mesh.group_ranks((), 4) == (4,)


def test_submesh_and_flatten() -> None:
    mesh = DeviceMesh.grid(pp=2, dp=2, tp=2)
    part = mesh.submesh(("dp", "tp"), 5)
    assert (part.ranks, part.axis_names, part.root) == ((4, 5, 6, 7), ("dp", "tp"), mesh)
    assert mesh.submesh("tp", 5).ranks == (4, 5)
    flat = mesh.flatten("data", ("dp", "tp"))
    assert (flat.shape, flat.axis_names, flat.ranks) == ((2, 4), ("pp", "data"), mesh.ranks)
    assert part.flatten("all").root.axis_names == ("pp", "all")
    assert pickle.loads(pickle.dumps(part)).root == mesh


def test_default_names() -> None:
    assert DeviceMesh("cpu", [[0, 1]]).axis_names == ("axis_0", "axis_1")


def test_torch_mesh_is_understood() -> None:
    torch = pytest.importorskip("torch")

    # As torch's class looks from outside; a real one needs a process group (see tests/torch).
    fake = type("DeviceMesh", (), {})()
    fake.device_type, fake.mesh_dim_names = "cpu", ("dp", "tp")
    fake.mesh = torch.arange(4).reshape(2, 2)
    assert as_mesh(fake) == DeviceMesh.grid(dp=2, tp=2)
    part = type("DeviceMesh", (), {"_get_root_mesh": lambda self: fake})()
    part.device_type, part.mesh_dim_names, part.mesh = "cpu", ("tp",), torch.tensor([2, 3])
    assert as_mesh(part).ranks == (2, 3)
    assert as_mesh(part).root == DeviceMesh.grid(dp=2, tp=2)
    fake.mesh_dim_names = None
    assert as_mesh(fake).axis_names == ("axis_0", "axis_1")


def test_real_torch_mesh_is_understood() -> None:
    dist = pytest.importorskip("torch.distributed")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    assert not dist.is_initialized(), "another test left a process group"
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=4)
    try:
        theirs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        ours = as_mesh(theirs)
        assert ours == DeviceMesh.grid(dp=2, tp=2)
        part = as_mesh(theirs["tp"])
        assert (part.ranks, part.root) == ((2, 3), ours)
        assert part == ours.submesh("tp", 3)
    finally:
        dist.destroy_process_group()


def test_layout_shortcut() -> None:
    mesh = DeviceMesh.grid(dp=2, tp=2)
    assert str(mesh.layout("dp", ("tp",), None)) == "[dp, tp, -]"


GRID = DeviceMesh.grid(dp=2, tp=4)


@pytest.mark.parametrize(
    ("call", "who", "what", "way_out"),
    [
        (lambda: GRID.axis_index("ep"), "mesh (dp=2, tp=4)", "no axis 'ep'", "Use one of 'dp', 'tp'"),
        (lambda: GRID.size(2), "mesh (dp=2, tp=4)", "no axis 2", "Use one of"),
        (lambda: GRID.coord(8), "mesh (dp=2, tp=4)", "does not contain rank 8", "Call this on its ranks"),
        (lambda: GRID.flatten("x", ("tp", "dp")), "flatten ('tp', 'dp')", "not neighbours", "Name them as"),
        (lambda: as_mesh("cpu"), "mesh 'cpu'", "not a DeviceMesh", "Build one with init_device_mesh"),
        (lambda: DeviceMesh("cpu", [[0, 1], [2]]), "DeviceMesh", "different shapes", "Make a full grid"),
        (lambda: DeviceMesh("cpu", [0, 0]), "DeviceMesh of shape (2,)", "rank appears twice", "Use each once"),
        (lambda: DeviceMesh("cpu", []), "DeviceMesh of shape (0,)", "0 ranks", "sizes of at least 1"),
        (
            lambda: DeviceMesh("cpu", [0, 1], mesh_dim_names=("a", "b")),
            "DeviceMesh of shape (2,)",
            "2 axis names",
            "one name per axis",
        ),
        (
            lambda: DeviceMesh("cpu", [[0], [1]], mesh_dim_names=("a", "a")),
            "DeviceMesh of shape (2, 1)",
            "not distinct",
            "Rename one",
        ),
    ],
)
def test_messages(call: Any, who: str, what: str, way_out: str) -> None:
    with pytest.raises(MeshError) as caught:
        call()
    text = str(caught.value)
    assert who in text
    assert what in text
    assert way_out in text
    assert "\n" not in text
