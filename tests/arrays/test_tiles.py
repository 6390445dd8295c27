"""HLO layouts against an independent construction, and default layouts against the compiler's."""

from __future__ import annotations

import re
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rooftop.arrays.tiles import (
    TileLayout,
    default_layout,
    mxu_padding,
    padded_shape,
)
from rooftop.core.errors import RooftopError
from rooftop.hardware import Slice

Ints = npt.NDArray[np.int64]


@st.composite
def layouts(draw: st.DrawFn) -> TileLayout:
    shape = draw(st.lists(st.integers(1, 7), max_size=4))
    tiles = draw(st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=3), max_size=3))
    return TileLayout(
        dtype=draw(st.sampled_from(["f32", "bf16", "s8", "pred"])),
        shape=tuple(shape),
        minor_to_major=tuple(draw(st.permutations(range(len(shape))))),
        tiles=tuple(map(tuple, tiles)),
        memory_space=draw(st.integers(0, 3)),
        element_bits=draw(st.sampled_from([None, 4])),
    )


def brute_force(layout: TileLayout) -> Ints:
    """Memory order by padding, reshaping and transposing an array of element numbers; -1 is padding."""
    array = np.arange(prod(layout.shape)).reshape(layout.shape).transpose(layout.minor_to_major[::-1])
    for tile in layout.tiles:
        array = array.reshape((1,) * (len(tile) - array.ndim) + array.shape)
        lead = array.ndim - len(tile)
        padding = [(0, 0)] * lead + [(0, -size % block) for size, block in zip(array.shape[lead:], tile, strict=True)]
        array = np.pad(array, padding, constant_values=-1)
        split = [part for size, block in zip(array.shape[lead:], tile, strict=True) for part in (size // block, block)]
        array = array.reshape((*array.shape[:lead], *split))
        inner = list(range(lead, array.ndim))
        array = array.transpose((*range(lead), *inner[::2], *inner[1::2]))
    return array.ravel()


@given(layouts())
def test_text_round_trips(layout: TileLayout) -> None:
    assert TileLayout.parse(str(layout)) == layout


def physical_order(layout: TileLayout) -> Ints:
    """Row-major index of the element at each position in memory, or -1 for padding, by the layout's offsets."""
    order = np.full(prod(layout.tiled_shape), -1, np.int64)
    if order.size:
        order[np.ravel(layout.offset(tuple(np.indices(layout.shape))))] = np.arange(prod(layout.shape))
    return order


@given(layouts())
def test_memory_order_is_that_of_reshape_and_transpose(layout: TileLayout) -> None:
    order = physical_order(layout)
    assert order.tolist() == brute_force(layout).tolist()
    assert len(order) == prod(layout.tiled_shape)


@given(layouts())
def test_every_element_has_one_place_in_memory(layout: TileLayout) -> None:
    offsets = {layout.offset(index) for index in np.ndindex(*layout.shape)}
    assert len(offsets) == prod(layout.shape)
    assert min(offsets) >= 0 and max(offsets) < prod(layout.tiled_shape)
    assert layout.expansion == prod(layout.tiled_shape) / prod(layout.shape) >= 1
    assert prod(layout.shape) <= prod(layout.padded_shape) <= prod(layout.tiled_shape)


def test_the_books_f32_3_5() -> None:
    layout = TileLayout.parse("f32[3,5]{1,0:T(2,2)}")
    assert layout.padded_shape == (4, 6)
    assert layout.expansion == pytest.approx(1.6)
    assert layout.nbytes == 4 * 6 * 4
    assert layout.memory == "hbm"
    # Within a block (0,0), (0,1), (1,0), (1,1); blocks row by row.
    assert [layout.offset(index) for index in ((0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (2, 0))] == [0, 1, 2, 3, 4, 12]
    assert physical_order(layout).tolist()[8:16] == [4, -1, 9, -1, 10, 11, -1, -1]
    assert TileLayout.parse("bf16[3,5]{1,0:T(2,2)}").nbytes == 4 * 6 * 2


def test_the_books_two_levels_of_tiles() -> None:
    # The book's figure has a comma before the T.
    layout = TileLayout.parse("bf16[4,8]{1,0,T(2,4)(2,1)}")
    assert str(layout) == "bf16[4,8]{1,0:T(2,4)(2,1)}"
    assert layout.expansion == 1
    # Rows 0 and 1 of a column lie side by side, in one word of 4 bytes; a block of 2 x 4 is finished first.
    assert physical_order(layout).tolist()[:10] == [0, 8, 1, 9, 2, 10, 3, 11, 4, 12]
    fusion = TileLayout.parse("bf16[32,32,8192]{2,1,0:T(8,128)(2,1)S(1)}")
    assert (fusion.memory, fusion.minor_to_major, fusion.expansion) == ("vmem", (2, 1, 0), 1)
    assert fusion.tiled_shape == (32, 4, 64, 4, 128, 2, 1)
    assert fusion.nbytes == 32 * 32 * 8192 * 2


@pytest.mark.parametrize(
    ("text", "canonical", "nbytes"),
    [
        ("f32[3, 5]", "f32[3,5]{1,0}", 60),
        ("f32[]{:T(128)}", "f32[]{:T(128)}", 512),
        ("bf16[2,3]{0,1}", "bf16[2,3]{0,1}", 12),
        ("s4[8,128]{1,0:T(8,128)(8,1)E(4)}", "s4[8,128]{1,0:T(8,128)(8,1)E(4)}", 512),
        ("s4[8,128]{1,0:T(8,128)}", "s4[8,128]{1,0:T(8,128)}", 1024),
        ("pred[5]{0:T(512)(128)(4,1)S(0)}", "pred[5]{0:T(512)(128)(4,1)}", 512),
        ("f32[4]{0:S(3)}", "f32[4]{0:S(3)}", 16),
        ("f32[0,5]{1,0:T(8,128)}", "f32[0,5]{1,0:T(8,128)}", 0),
    ],
)
def test_other_forms(text: str, canonical: str, nbytes: int) -> None:
    layout = TileLayout.parse(text)
    assert str(layout) == canonical
    assert layout.nbytes == nbytes


def test_a_memory_space_without_a_name_keeps_its_number() -> None:
    assert TileLayout.parse("f32[4]{0:S(3)}").memory == "3"


def test_a_tile_that_does_not_divide_the_one_before_it_pads_again() -> None:
    layout = TileLayout.parse("f32[3]{0:T(3)(2)}")
    assert (layout.padded_shape, layout.tiled_shape, layout.nbytes) == ((3,), (1, 2, 2), 16)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("f33[2]", "f32"),
        ("f32[2,3]{0}", "2 dims"),
        ("f32[2,3]{1,1}", "each once"),
        ("f32[2,3]{1,0:T(0,2)}", "positive"),
        ("f32[2,3]{1,0:T()}", "positive"),
        ("f32[2,3]{1,0:T(2,*)}", "such as"),
        ("f32[2,,3]", "such as"),
        ("f32[2,3]{1,0:T(8,128)L(1024)}", "such as"),
        ("f32[2]{0:E(0)}", "positive"),
        ("f32", "such as"),
    ],
)
def test_bad_layouts_are_refused(text: str, what: str) -> None:
    with pytest.raises(RooftopError, match=what):
        TileLayout.parse(text)


@pytest.mark.parametrize("index", [(3, 0), (0, -1), (0,), (0, np.array([0, 5]))])
def test_an_index_outside_the_array_is_refused(index: tuple[Any, ...]) -> None:
    with pytest.raises(RooftopError, match="index"):
        TileLayout.parse("f32[3,5]{1,0:T(2,2)}").offset(index)


def test_padding() -> None:
    assert padded_shape((3, 5), (2, 2)) == (4, 6)
    assert padded_shape((7, 3, 130), (8, 128)) == (7, 8, 256)
    assert padded_shape((5,), (8, 128)) == (8, 128)


def test_mxu_padding() -> None:
    whole = mxu_padding(8, 128, 256, 128)
    assert (whole.m, whole.k, whole.n, whole.useful) == (8, 128, 256, 1)
    # Chapter 2: weights need at least 128 in both dims, 256 on v6e.
    assert mxu_padding(512, 64, 128, 128).useful == 0.5
    assert mxu_padding(512, 128, 128, 256).useful == 0.25
    assert mxu_padding(1, 128, 128, 128).useful == 1 / 8
    many = mxu_padding(np.array([1, 100]), 200, np.array([128, 129]), 128)
    assert many.m.tolist() == [8, 104] and many.k == 256 and many.n.tolist() == [128, 256]
    assert many.useful * many.m * many.k * many.n == pytest.approx([200 * 128, 100 * 200 * 129])


@pytest.mark.parametrize(
    "text",
    [
        # As libtpu 0.0.42.1 (jax 0.10.2) lays out arguments; v4, v5e, v5p, v6e and TPU7x agreed.
        "f32[]{:T(128)}",
        "f32[200]{0:T(256)}",
        "bf16[4096]{0:T(1024)(128)(2,1)}",
        "bf16[3,128]{1,0:T(4,128)(2,1)}",
        "bf16[17,128]{1,0:T(8,128)(2,1)}",
        "bf16[32,32,8192]{2,1,0:T(8,128)(2,1)}",
        "f32[1000,3]{0,1:T(4,128)}",
        "f32[16,1,128]{2,1,0:T(1,128)}",
        "bf16[16,1,128]{2,0,1:T(8,128)(2,1)}",
        "s8[33,128]{1,0:T(8,128)(4,1)}",
        "s8[96,128]{1,0:T(32,128)(4,1)}",
        "f8e4m3fn[64,32]{0,1:T(32,128)(4,1)}",
        "s4[64,128]{1,0:T(64,128)(8,1)E(4)}",
        "pred[5]{0:T(512)(128)(4,1)}",
    ],
)
def test_default_layouts(text: str) -> None:
    compiled = TileLayout.parse(text)
    assert str(default_layout(compiled.dtype, compiled.shape)) == text


@pytest.mark.parametrize(("dtype", "what"), [("f64", "32 bits"), ("bf61", "bf16")])
def test_dtypes_without_a_default_layout_are_refused(dtype: str, what: str) -> None:
    with pytest.raises(RooftopError, match=what):
        default_layout(dtype, (8, 128))


def lower(mesh: Any, arguments: dict[str, Any]) -> Any:
    """A program for ``compile_ahead_of_time`` whose arguments have the shapes and dtypes given."""
    import jax

    sharding = jax.NamedSharding(mesh, jax.P())
    arrays = [jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for dtype, shape in arguments["arrays"]]
    return jax.jit(lambda *arrays: [array == array for array in arrays]).lower(*arrays)


@pytest.mark.oracle
def test_default_layouts_are_those_that_the_compiler_here_gives() -> None:
    pytest.importorskip("libtpu", reason="libtpu is not installed")
    from rooftop.arrays import Mesh
    from rooftop.compiler.compiling import CompileRequest, compile_ahead_of_time

    generator = np.random.default_rng(0)
    sizes = [1, 1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 31, 32, 33, 64, 96, 100, 128, 200, 300, 1024]
    drawn = [tuple(map(int, generator.choice(sizes, rank))) for rank in (0, 1, 1, 2, 2, 2, 3, 3, 4) for _ in range(16)]
    shapes = [shape for shape in drawn if prod(shape) < 200_000]
    names = {"float32": "f32", "bfloat16": "bf16", "int8": "s8", "int4": "s4", "float8_e5m2": "f8e5m2", "bool": "pred"}
    arrays = [(dtype, shape) for dtype in names for shape in shapes]
    mesh = Mesh.from_layout(Slice.parse("v5e:1x1"), "X=x+y")
    request = CompileRequest(mesh=mesh, program=f"{__name__}:lower", arguments={"arrays": arrays})
    header = compile_ahead_of_time(request).hlo_text.partition("->")[0]
    compiled = re.findall(r"\w+\[[\d,]*\]\{[^}]*\}", header)
    assert len(arrays) > 500
    assert compiled == [str(default_layout(names[dtype], shape)) for dtype, shape in arrays]
