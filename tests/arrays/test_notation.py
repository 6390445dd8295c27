"""The notation in its three styles, and what it says about bytes and copies."""

from __future__ import annotations

import string
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rooftop.arrays.notation import ShardedArray
from rooftop.core.errors import RooftopError
from rooftop.core.quantities import DTYPE_BYTES, dtype_bytes

MESH = {"X": 2, "Y": 4, "Z": 3, "W": 5, "fsdp": 2, "DP": 3, "X1": 2, "x": 2, "1": 2}
STYLES = ("ascii", "unicode", "latex")


@st.composite
def arrays(draw: st.DrawFn, axes: st.SearchStrategy[str]) -> ShardedArray:
    names = st.text(string.ascii_letters, min_size=1, max_size=3) | st.sampled_from(["128", "4Ki"])
    dims = draw(st.lists(names, max_size=4, unique=True))
    used = draw(st.lists(axes, max_size=6, unique=True))
    dtype = draw(st.sampled_from(sorted(DTYPE_BYTES)))
    if draw(st.integers(0, 5)) == 0:
        chip = tuple(draw(st.lists(st.integers(0, 31), min_size=1, max_size=3)))
        return ShardedArray(dtype=dtype, dims=tuple(dims), axes=((),) * len(dims), at=chip)
    home = [draw(st.integers(0, len(dims))) for _ in used]
    per_dim = [tuple(axis for axis, place in zip(used, home, strict=True) if place == k) for k in range(len(dims) + 1)]
    return ShardedArray(
        dtype=dtype,
        dims=tuple(dims),
        axes=tuple(per_dim[:-1]),
        unreduced=per_dim[-1],
        at=draw(st.sampled_from(["", "host"])),
    )


axis_names = st.sampled_from(string.ascii_uppercase) | st.text(string.ascii_letters + "0189_", min_size=1, max_size=4)


@given(arrays(axis_names), st.sampled_from(STYLES))
def test_every_style_round_trips(array: ShardedArray, style: str) -> None:
    assert ShardedArray.parse(array.to_text(style)) == array  # type: ignore[arg-type]


@given(arrays(st.sampled_from(sorted(MESH))), st.integers(1, 3))
def test_local_bytes_times_devices_are_copies_times_replication(array: ShardedArray, factor: int) -> None:
    size = factor * prod(MESH.values())
    dims = dict.fromkeys(array.dims, size)
    total = array.device_bytes(dims, MESH) * array.devices(MESH)
    assert total == array.total_bytes(dims, MESH)
    assert total == array.one_copy_bytes(dims) * array.replication(MESH) * array.partial_sums(MESH)
    assert array.one_copy_bytes(dims) == size ** len(dims) * dtype_bytes(array.dtype)


def test_the_quiz_of_chapter_3() -> None:
    array, mesh = ShardedArray.parse("int8[128_XY, 2048]"), {"X": 2, "Y": 8, "Z": 2}
    assert array.local_shape({}, mesh) == (8, 2048)
    assert array.device_bytes({}, mesh) == 16384
    assert array.total_bytes({}, mesh) == 524288
    assert array.replication(mesh) == 2


def test_copies_and_partial_sums() -> None:
    mesh = {"X": 2, "Y": 4, "Z": 8}
    array = ShardedArray.parse("bf16[I_X, J]{U_Y}")
    assert (array.replication(mesh), array.partial_sums(mesh), array.devices(mesh)) == (8, 4, 64)
    chip = ShardedArray.parse("bf16[8, 128, 8192]@(0,0)")
    assert (chip.replication(mesh), chip.partial_sums(mesh), chip.devices(mesh)) == (1, 1, 1)
    assert chip.total_bytes({}, mesh) == chip.one_copy_bytes({}) == 8 * 128 * 8192 * 2
    host = ShardedArray.parse("int8[J_XY, K]@host")
    assert host.total_bytes({"J": 64, "K": 2}, mesh) == 64 * 2 * 8


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("bf16[Iₓ, Jᵧ]{Uₜ}", "bf16[I_X, J_Y]{U_T}"),
        ("bf16[Iₓᵧ, J]", "bf16[I_XY, J]"),
        ("bf16[Iₓ₁, J]", "bf16[I_{X1}, J]"),
        ("bf16[Iᵦᵪ, J₁]", "bf16[I_BX, J_1]"),
        (" f32 [ I_X , J ] { U_Y } @ host ", "f32[I_X, J]{U_Y}@host"),
        ("f32[I_{X Y}, J_{ fsdp , tensor }]{ U_{W} }", "f32[I_XY, J_{fsdp,tensor}]{U_W}"),
        ("f32[I , J_expert ]", "f32[I, J_{expert}]"),
        ("f32[I]@( 1, 2 )", "f32[I]@(1,2)"),
        ("f32[I_{fsdp}, J_{DP,}]", "f32[I_{fsdp}, J_{DP,}]"),
        ("int8[J_XY, K]@host", "int8[J_XY, K]@host"),
        ("bf16[8, 128, 8192]@(0,0)", "bf16[8, 128, 8192]@(0,0)"),
        (r"$\text{bf16}[I_X, J_{YZ}]\{U_W\}$", "bf16[I_X, J_YZ]{U_W}"),
        (r"\mathbf{A}[I_Z, J]\{\ U_{XY} \}", "bf16[I_Z, J]{U_XY}"),
        (r"\text{Out}[B_X,\,\textcolor{red}{D}]", "bf16[B_X, D]"),
        (r"\text{f8\_e4m3}[B_{\text{fsdp},\text{tensor}}]", "f8_e4m3[B_{fsdp,tensor}]"),
        ("A'[I]", "bf16[I]"),
        ("int8[I]", "int8[I]"),
    ],
)
def test_forms_that_are_read(text: str, plain: str) -> None:
    assert str(ShardedArray.parse(text, "bf16")) == plain


def test_forms_that_are_written() -> None:
    array = ShardedArray.parse("bf16[I_XY, J_Z, batch_{fsdp,a_b}]{U_T}@host")
    # There is no subscript z, so that J keeps the plain form.
    assert array.to_text("unicode") == "bf16[Iₓᵧ, J_Z, batch_{fsdp,a_b}]{Uₜ}@host"
    assert array.to_text("latex") == (
        r"\text{bf16}[I_{XY}, J_Z, \text{batch}_{\text{fsdp},\text{a\_b}}]\{U_T\}@\text{host}"
    )


def test_with_axes_keeps_dtype_dims_and_place() -> None:
    array = ShardedArray.parse("int8[I_X, J]{U_Y}@host")
    assert str(array.with_axes(((), ("X", "Y")))) == "int8[I, J_XY]@host"
    assert str(array.with_axes(((), ()), ("Y",))) == "int8[I, J]{U_Y}@host"


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("A[I_X, J]", "dtype: got 'A'; accepted: one of bf16"),
        ("bf16[I_X, J_X]", "X is used 2 times"),
        ("bf16[I_X]{U_X}", "X is used 2 times"),
        ("bf16[I_X, I]", "I is named 2 times"),
        ("bf16[I_, J]", "after each underscore"),
        ("bf16[I_{}, J]", "after each underscore"),
        ("bf16[I_{X,,Y}, J]", "between commas"),
        ("bf16[I_{,}, J]", "between commas"),
        ("bf16[I,, J]", "such as"),
        ("bf16[I]{U_}", "after each underscore"),
        ("bf16[I]{U}", "U_W"),
        ("bf16[I]{}", "such as"),
        ("bf16[I]{V_X}", "U_W"),
        ("bf16[I_{fsdp tensor}]", "letters, digits and underscores"),
        ("bf16[0, 3]", "positive"),
        ("bf16[3x]", "positive"),
        ("bf16[I]@disk", "host"),
        ("bf16[I]@()", "coordinates"),
        ("bf16[I]@(0,-1)", "coordinates"),
        ("bf16[I]@(0,)", "coordinates"),
        ("bf16[I_X]@(0,0)", "one chip"),
        ("bf16[I]{U_X}@(0,0)", "one chip"),
        ("bf16[I", "such as"),
        ("$", "such as"),
        (r"\mathbf{A[I]", "such as"),
    ],
)
def test_bad_notation_is_refused_in_one_line(text: str, what: str) -> None:
    with pytest.raises(RooftopError, match=what) as refused:
        ShardedArray.parse(text)
    assert "\n" not in str(refused.value)


@given(st.text("bf16[I_XJ]{U}@(0,)ₓ\\ $", max_size=24))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        array = ShardedArray.parse(text)
    except RooftopError:
        return
    assert ShardedArray.parse(str(array)) == array


def test_equal_numbers_may_stand_side_by_side() -> None:
    assert ShardedArray.parse("bf16[128_X, 128]").shape({}) == (128, 128)


def test_faults_of_construction_are_named() -> None:
    with pytest.raises(RooftopError, match="one entry for each of the dims I, J"):
        ShardedArray(dtype="bf16", dims=("I", "J"), axes=((),))
    with pytest.raises(RooftopError, match="letters and digits"):
        ShardedArray(dtype="bf16", dims=("d_model",), axes=((),))
    with pytest.raises(RooftopError, match="style"):
        ShardedArray.parse("bf16[I]").to_text("roman")  # type: ignore[arg-type]
    with pytest.raises(RooftopError, match="mesh axis: got 'Q'"):
        ShardedArray.parse("bf16[I_Q]").replication({"X": 2})
