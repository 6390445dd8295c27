"""Sharded arrays: the book's notation, and meshes laid on the physical axes of a slice."""

from rooftop.arrays.mesh import AxisPiece, AxisSpan, Mesh, PlacedMesh, parse_axes, placed_mesh, span
from rooftop.arrays.notation import ShardedArray
from rooftop.arrays.rules import AXES

__all__ = ["AXES", "AxisPiece", "AxisSpan", "Mesh", "PlacedMesh", "ShardedArray", "parse_axes", "placed_mesh", "span"]
