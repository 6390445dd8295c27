"""The systolic array: closed form against a cycle-by-cycle run, and both against the book's rate."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rooftop.arrays.tiles import mxu_padding
from rooftop.core.errors import RooftopError
from rooftop.hardware import chip
from rooftop.simulate.systolic import SystolicArray
from tests.support.examples import examples
from tests.support.systolic_cells import multiply

MXU = SystolicArray(rows=128, columns=128)

arrays = st.builds(
    SystolicArray,
    rows=st.integers(1, 5),
    columns=st.integers(1, 5),
    mxus=st.integers(1, 3),
    double_buffered=st.booleans(),
    split=st.sampled_from(["n", "m"]),
)


@settings(max_examples=examples(400))
@given(arrays, st.integers(1, 12), st.integers(1, 12), st.integers(1, 12), st.integers(0, 2**32 - 1))
def test_the_closed_form_is_what_the_cells_do(array: SystolicArray, m: int, k: int, n: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    x, w = generator.integers(-9, 9, (m, k)), generator.integers(-9, 9, (k, n))
    product, cycles = multiply(array, x, w)
    assert np.array_equal(product, x @ w)
    assert cycles == array.cycles(m, k, n).total


@given(arrays, st.integers(1, 300), st.integers(1, 300), st.integers(1, 300))
def test_utilisation_stays_below_the_useful_share(array: SystolicArray, m: int, k: int, n: int) -> None:
    cycles = array.cycles(m, k, n)
    blocks = -(-k // array.rows) * array.rows * -(-n // array.columns) * array.columns
    assert 0 < cycles.utilisation <= k * n / blocks
    assert cycles.utilisation == pytest.approx(2 * m * k * n / (cycles.total * array.flops_per_cycle))
    buffered = SystolicArray(rows=array.rows, columns=array.columns, mxus=array.mxus, split=array.split)
    assert buffered.cycles(m, k, n).total <= cycles.total


def test_a_run_in_floating_point_at_full_size() -> None:
    generator = np.random.default_rng(0)
    array = SystolicArray(rows=128, columns=128, mxus=2)
    x, w = generator.standard_normal((40, 200)), generator.standard_normal((200, 300))
    product, cycles = multiply(array, x, w)
    assert np.allclose(product, x @ w)
    assert cycles == array.cycles(40, 200, 300).total


@pytest.mark.parametrize("m", [128, 1024])
def test_eight_rows_every_eight_cycles(m: int) -> None:
    # Chapter 2: bf16[8,128] x bf16[128,128] every 8 cycles, once weights and activations are in.
    one, more = MXU.cycles(m, 128, 128), MXU.cycles(m + 8, 128, 128)
    assert more.total - one.total == 8
    many = MXU.cycles(m, 128 * 3, 128 * 5)
    assert many.wait == 0
    assert many.stream == 3 * 5 * m
    assert many.total - many.fill - many.drain == 8 * (3 * 5 * m // 8)
    assert (many.fill, many.drain) == (128, 254)


def test_long_streams_reach_the_peak() -> None:
    assert MXU.cycles(2**20, 128, 128).utilisation == pytest.approx(1, abs=4e-4)
    assert SystolicArray(rows=256, columns=256, mxus=4).cycles(8192, 8192, 8192).utilisation > 0.99


def test_a_stream_shorter_than_the_array_waits_for_weights() -> None:
    short = MXU.cycles(8, 1280, 1280)
    assert short.wait == 99 * 120
    assert short.utilisation == pytest.approx(8 / 128, rel=0.05)
    slow = SystolicArray(rows=128, columns=128, double_buffered=False)
    assert slow.cycles(128, 1280, 1280).wait == 99 * 128
    assert slow.cycles(128, 1280, 1280).utilisation == pytest.approx(0.5, rel=0.02)


def test_more_arrays_want_more_columns() -> None:
    # Chapter 2: dims should exceed 128 times the number of arrays.
    four = SystolicArray(rows=128, columns=128, mxus=4)
    assert four.cycles(4096, 4096, 512).total == MXU.cycles(4096, 4096, 128).total
    assert four.cycles(4096, 4096, 128).total == MXU.cycles(4096, 4096, 128).total
    rows = SystolicArray(rows=128, columns=128, mxus=4, split="m")
    assert rows.cycles(4096, 4096, 128).utilisation > 3.9 * four.cycles(4096, 4096, 128).utilisation


@pytest.mark.parametrize("side", [128, 256])
def test_utilisation_of_a_long_stream_is_the_share_that_is_not_padding(side: int) -> None:
    array = SystolicArray(rows=side, columns=side)
    for k, n in ((64, 128), (128, 128), (200, 300), (256, 1024)):
        assert array.cycles(2**20, k, n).utilisation == pytest.approx(mxu_padding(2**20, k, n, side).useful, rel=1e-3)


def test_shapes_may_be_arrays() -> None:
    m, n = np.array([1, 8, 128, 1000]), np.array([[128], [640]])
    many = SystolicArray(rows=128, columns=128, mxus=4).cycles(m, 256, n)
    assert many.utilisation.shape == (2, 4)  # type: ignore[union-attr]
    for row in range(2):
        for column in range(4):
            one = SystolicArray(rows=128, columns=128, mxus=4).cycles(int(m[column]), 256, int(n[row, 0]))
            assert type(one.total) is int
            assert many.total[row, column] == one.total  # type: ignore[index]
            assert many.utilisation[row, column] == one.utilisation  # type: ignore[index]


@pytest.mark.parametrize(("name", "mxus"), [("v4", 8), ("v5e", 4), ("v5p", 8), ("v6e", 4)])
def test_the_arrays_of_a_chip_make_its_peak(name: str, mxus: int) -> None:
    array, spec = SystolicArray.of(chip(name)), chip(name)
    assert (array.rows, array.columns, array.mxus) == (spec.mxu_tile, spec.mxu_tile, mxus)
    assert array.flops_per_cycle * spec.clock_hz == pytest.approx(spec.flops_per_s["bf16"], rel=0.02)


@pytest.mark.parametrize(("name", "what"), [("v3", r"4\.55"), ("tpu7x", r"9\.24"), ("h100", "TPU")])
def test_chips_without_a_whole_number_of_arrays_are_refused(name: str, what: str) -> None:
    with pytest.raises(RooftopError, match=what):
        SystolicArray.of(chip(name))


def test_bad_input_is_refused() -> None:
    with pytest.raises(RooftopError, match="rows"):
        SystolicArray(rows=0, columns=128)
    split: Literal["n", "m"] = "k"  # type: ignore[assignment]
    with pytest.raises(RooftopError, match="split"):
        SystolicArray(rows=1, columns=1, split=split)
    with pytest.raises(RooftopError, match="positive"):
        MXU.cycles(0, 128, 128)
    with pytest.raises(RooftopError, match="matrices"):
        multiply(MXU, np.ones((2, 3)), np.ones((2, 3)))
