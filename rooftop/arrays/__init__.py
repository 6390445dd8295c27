"""Sharded arrays: the book's notation, and meshes laid on the physical axes of a slice."""

from rooftop.arrays.mesh import AXES, AxisPiece, AxisSpan, Mesh, parse_axes, span
from rooftop.arrays.notation import ShardedArray

__all__ = ["AXES", "AxisPiece", "AxisSpan", "Mesh", "ShardedArray", "parse_axes", "span"]
