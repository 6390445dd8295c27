"""Meshes on the torus, and the book's notation."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rooftop.arrays import AxisPiece, Mesh, PlacedMesh, ShardedArray, parse_axes, placed_mesh
from rooftop.arrays.rules import Rules
from rooftop.core.errors import RooftopError
from rooftop.core.records import read_record
from rooftop.hardware import Slice

V5P = Slice.parse("v5p:4x4x8")


def split() -> Mesh:
    return Mesh.from_layout(V5P, "fsdp=x+y+z[2:4],tensor=z[1:2]")


def test_layout_text_round_trips() -> None:
    mesh = split()
    assert mesh.shape == {"fsdp": 64, "tensor": 2}
    assert mesh.layout == "fsdp=x+y+z[2:4],tensor=z[1:2]"
    assert Mesh.from_json(V5P, mesh.to_json()) == mesh


def test_every_device_once_and_groups_where_they_belong() -> None:
    coordinates = split().device_coordinates()
    assert coordinates.shape == (64, 2, 3)
    flat = {tuple(c) for c in coordinates.reshape(-1, 3).tolist()}
    assert len(flat) == 128
    # The two devices of a tensor group are neighbours on z.
    assert np.all(coordinates[:, 1] - coordinates[:, 0] == [0, 0, 1])


def test_rings() -> None:
    mesh = split()
    assert mesh.span("fsdp").ring.tolist() == [True, True, True]
    assert mesh.span("fsdp").stride.tolist() == [1, 1, 2]
    assert mesh.span("tensor").ring.tolist() == [False, False, False]
    assert mesh.span("context").devices == 1


@pytest.mark.parametrize(
    ("axes", "what"),
    [
        ({"fsdp": (AxisPiece("x", 1, 4), AxisPiece("y", 1, 4))}, "z"),
        ({"fsdp": (AxisPiece("x", 1, 4), AxisPiece("y", 1, 4), AxisPiece("z", 1, 4))}, "z"),
        (
            {
                "fsdp": (AxisPiece("x", 1, 4), AxisPiece("y", 1, 4), AxisPiece("z", 1, 8)),
                "tensor": (AxisPiece("z", 1, 2),),
            },
            "z",
        ),
        ({"fsdp": (AxisPiece("x", 1, 4), AxisPiece("y", 1, 4), AxisPiece("w", 1, 8))}, "z"),
    ],
)
def test_gaps_overlaps_and_unknown_axes_are_refused(axes: dict[str, tuple[AxisPiece, ...]], what: str) -> None:
    with pytest.raises(RooftopError, match=what):
        Mesh(V5P, axes)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("tensr=4", "tensor"),
        ("tensor=0", "positive"),
        ("tensor=4,tensor=2", "once"),
        ("tensor", "positive"),
        ("", "one of"),
    ],
)
def test_bad_axes_name_the_fault(text: str, what: str) -> None:
    with pytest.raises(RooftopError, match=what):
        parse_axes(text)


def test_axes_text() -> None:
    assert parse_axes(" fsdp=1024, tensor=4 ") == {"fsdp": 1024, "tensor": 4}


@pytest.mark.parametrize("text", ["bf16[B_X, D_YZ]{U_W}", "int8[128_XY, 2048]", "f32[I, J]", "bf16[B_{fsdp,data}, D]"])
def test_notation_round_trips(text: str) -> None:
    array = ShardedArray.parse(text)
    assert str(array) == text
    assert ShardedArray.parse(str(array)) == array


@pytest.mark.parametrize(
    ("text", "written", "nbytes"),
    [("i32[8, D_X]", "int32[8, D_X]", 4), ("uint32[8]", "uint32[8]", 4), ("pred[8]", "bool[8]", 1)],
)
def test_tokens_keys_and_masks_are_arrays_too(text: str, written: str, nbytes: int) -> None:
    array = ShardedArray.parse(text)
    assert str(array) == written
    assert array.device_bytes({"D": 4}, {"X": 2}) == nbytes * (16 if "D" in text else 8)


def test_notation_counts_bytes() -> None:
    array, mesh = ShardedArray.parse("bf16[B_X, D_YZ]{U_W}"), {"X": 2, "Y": 4, "Z": 2, "W": 2}
    dims = {"B": 32, "D": 4096}
    assert array.local_shape(dims, mesh) == (16, 512)
    assert array.device_bytes(dims, mesh) == 16 * 512 * 2
    assert array.total_bytes(dims, mesh) == 16 * 512 * 2 * 32


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("bf16[B_X, D_X]", "X is used 2 times"),
        ("bf16[B_X]{U_X}", "X is used 2 times"),
        ("bf61[B]", "bf16"),
        ("bf16 B, D", "such as"),
    ],
)
def test_bad_notation_names_the_fault(text: str, what: str) -> None:
    with pytest.raises(RooftopError, match=what):
        ShardedArray.parse(text)


def test_uneven_dims_name_the_nearest_even_ones() -> None:
    with pytest.raises(RooftopError, match="30 or 33"):
        ShardedArray.parse("bf16[B_X]").local_shape({"B": 32}, {"X": 3})


def test_rules_refuse_a_mesh_axis_used_twice() -> None:
    with pytest.raises(RooftopError, match="once"):
        Rules(parameters={"embed": ("fsdp", "fsdp")})
    assert read_record(Rules, Rules().to_json(), "rules") == Rules()
    assert Rules().only({"fsdp": 4}).activations["batch"] == ("fsdp",)


names = st.lists(st.sampled_from("XYZW"), unique=True, max_size=4)


@given(names, st.integers(1, 4), st.integers(1, 4))
def test_local_bytes_times_ways_is_one_copy(axes: list[str], a: int, b: int) -> None:
    mesh = {"X": 2, "Y": 2, "Z": 4, "W": 8}
    array = ShardedArray(dtype="bf16", dims=("I", "J"), axes=(tuple(axes[:2]), tuple(axes[2:])))
    dims = {"I": a * 64, "J": b * 64}
    ways = int(np.prod([mesh[axis] for axis in axes]))
    assert array.device_bytes(dims, mesh) * ways == dims["I"] * dims["J"] * 2


# ---- meshes in an order of devices of the program -------------------------------------------------------------------


@pytest.mark.parametrize("slice_name", ["v5e:4x4", "v5p:4x4x8", "v4:2x2x4", "tpu7x:2x2x2", "v5e:4x4@2"])
@pytest.mark.parametrize("sizes", [{"a": 4, "b": 0}, {"b": 0, "c": 2}, {"a": 2, "b": 0, "c": 2}, {"b": 0}])
def test_a_layout_is_recognised_by_where_its_devices_are(slice_name: str, sizes: dict[str, int]) -> None:
    slice_ = Slice.parse(slice_name)
    rest = slice_.devices // prod(size or 1 for size in sizes.values())
    mesh = Mesh.lay(slice_, {name: size or rest for name, size in sizes.items()})
    places = mesh.device_coordinates().reshape(slice_.devices, -1)
    assert placed_mesh(slice_, mesh.shape, places) == mesh


def test_devices_in_another_order_keep_their_axes() -> None:
    """A snake over the slice: its axis still fills the grid, and each device is where the program has it."""
    slice_ = Slice.parse("v5e:4x4")
    snake = [(x, y if x % 2 == 0 else 3 - y) for x in range(4) for y in range(4)]
    mesh = placed_mesh(slice_, {"ring": 16}, snake)
    assert isinstance(mesh, PlacedMesh)
    assert mesh.regular
    assert mesh.device_coordinates().tolist() == [list(place) for place in snake]
    assert mesh.span("ring").size.tolist() == [4, 4]


def test_devices_without_a_pattern_are_priced_on_a_layout_of_rooftop() -> None:
    slice_ = Slice.parse("v5e:4x4")
    places = [(x, y) for x in range(4) for y in range(4)]
    places[0], places[5] = places[5], places[0]
    mesh = placed_mesh(slice_, {"a": 4, "b": 4}, places)
    assert isinstance(mesh, PlacedMesh)
    assert not mesh.regular
    assert mesh.axes == Mesh.lay(slice_, {"a": 4, "b": 4}).axes
    assert mesh.device_coordinates()[0, 0].tolist() == [1, 1]


def test_a_mesh_of_some_devices_leaves_the_others_unused() -> None:
    slice_ = Slice.parse("v5e:4x4")
    mesh = placed_mesh(slice_, {"a": 2, "b": 2}, [(0, 0), (0, 1), (1, 0), (1, 1)])
    assert mesh.shape == {"unused": 4, "a": 2, "b": 2}
    assert (mesh.span("a").size.tolist(), mesh.span("b").size.tolist()) == ([2, 1], [1, 2])
    assert placed_mesh(slice_, {"devices": 1}, [(2, 3)]).shape == {"unused": 16, "devices": 1}
    for places in ([(0, 0), (0, 1), (0, 2)], [(0, 0), (0, 0), (0, 1)]):
        with pytest.raises(RooftopError, match="a divisor of the 16"):
            placed_mesh(slice_, {"a": 3}, places)
