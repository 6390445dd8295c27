"""The check of an einsum compares programs by the times that the table of strategies has."""

from __future__ import annotations

import pytest

from rooftop.algebra.einsums import Einsum, strategies
from rooftop.algebra.expression import parse
from rooftop.algebra.pricing import Prices
from rooftop.arrays import Mesh
from rooftop.explain.compiled.einsum import planned_program
from rooftop.hardware import Slice


def test_a_planned_program_takes_as_long_as_its_strategy() -> None:
    """HBM included: of few rows it decides which strategy is best."""
    einsum = parse("bf16[B_X, D_Y] @ bf16[D_Y, F] -> bf16[B_X, F]")
    assert isinstance(einsum, Einsum)
    mesh = Mesh.lay(Slice.parse("v5e:2x2"), {"X": 2, "Y": 2})
    prices = Prices(mesh=mesh, dims={"B": 8, "D": 2048, "F": 8192})
    for way in strategies(einsum, prices, overlapped=False):
        assert planned_program(way, prices).time_s == pytest.approx(way.time_s)
