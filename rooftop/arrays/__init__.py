"""Sharded arrays: the book's notation, and meshes laid on the physical axes of a slice."""

from rooftop.arrays.mesh import AXES, Mesh, Piece, Span, parse_axes, span
from rooftop.arrays.notation import ShardedArray

__all__ = ["AXES", "Mesh", "Piece", "ShardedArray", "Span", "parse_axes", "span"]
