"""The hardware catalogue: chips with a source for every figure, and the geometry of slices built of them."""

from __future__ import annotations

from rooftop.hardware.calibrated import AttentionCurve, Calibrated, CollectiveFit, MatmulFit
from rooftop.hardware.chips import GIVEN, Chip, Figure, catalogue, chip, chip_of_kind
from rooftop.hardware.names import canonical, is_slice, named_chip, published_chip, renamed, slice_names
from rooftop.hardware.slices import MOST_CHIPS, PhysicalAxis, Slice, slice_sizes

__all__ = [
    "GIVEN",
    "MOST_CHIPS",
    "AttentionCurve",
    "Calibrated",
    "Chip",
    "CollectiveFit",
    "Figure",
    "MatmulFit",
    "PhysicalAxis",
    "Slice",
    "canonical",
    "catalogue",
    "chip",
    "chip_of_kind",
    "is_slice",
    "named_chip",
    "published_chip",
    "renamed",
    "slice_names",
    "slice_sizes",
]
