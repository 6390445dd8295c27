"""The hardware catalogue: chips with a source for every figure, and the geometry of slices built of them."""

from __future__ import annotations

from rooftop.hardware.calibrated import AttentionCurve, Calibrated, CollectiveFit, MatmulFit
from rooftop.hardware.chips import GIVEN, Chip, Figure, catalogue, chip, chip_of_kind
from rooftop.hardware.slices import PhysicalAxis, Slice, slice_sizes

__all__ = [
    "GIVEN",
    "AttentionCurve",
    "Calibrated",
    "Chip",
    "CollectiveFit",
    "Figure",
    "MatmulFit",
    "PhysicalAxis",
    "Slice",
    "catalogue",
    "chip",
    "chip_of_kind",
    "slice_sizes",
]
