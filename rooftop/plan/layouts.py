"""Every way to lay the training axes on a slice's physical axes, as arrays.

``Layouts`` holds sizes and strides [C, A, P] for C layouts, A logical and P physical axes. The search prices them all
at once; ``mesh`` turns one of them into a Mesh.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import permutations, product
from math import prod
from typing import Any

import numpy as np

from rooftop.arrays.mesh import AxisPiece, AxisSpan, Ints, Mesh, span
from rooftop.arrays.rules import AXES, DCN_AXES
from rooftop.core.errors import unknown
from rooftop.hardware import PhysicalAxis, Slice

#: The most logical axes that share one physical axis: pieces of a third would be too short for a torus axis.
MAX_SHARING = 2


@dataclass(frozen=True)
class Layouts:
    """Layouts of ``AXES`` on the physical axes of a slice; ``size`` and ``stride`` are [C, A, P]."""

    slice: Slice
    size: Ints
    stride: Ints

    def __len__(self) -> int:
        return len(self.size)

    @cached_property
    def devices(self) -> Ints:
        """Devices along each logical axis, [C, A]."""
        devices: Ints = np.prod(self.size, axis=-1)
        return devices

    def along(self, *names: str) -> Ints:
        """Devices along the named axes together, [C]."""
        devices: Ints = np.prod(self.devices[:, [AXES.index(name) for name in names]], axis=-1)
        return devices

    def span(self, name: str) -> AxisSpan:
        """The spans of one logical axis, arrays [C, P]."""
        position = AXES.index(name)
        return span(self.slice.physical_axes, self.size[:, position], self.stride[:, position])

    def distinct(self, name: str) -> tuple[Ints, Ints]:
        """Layouts that hold every way one logical axis is laid, and for each layout which of them is like it.

        Very many layouts have few such ways: a figure of one axis alone is computed once for each.
        """
        position = AXES.index(name)
        code = np.zeros(len(self), np.int64)
        for p, axis in enumerate(self.slice.physical_axes):
            digit = self.size[:, position, p] * (axis.size + 1) + self.stride[:, position, p]
            code = code * (axis.size + 1) ** 2 + digit
        _, first, like = np.unique(code, return_index=True, return_inverse=True)
        return first, like

    def __getitem__(self, index: Any) -> Layouts:
        """The layouts at an index."""
        return Layouts(self.slice, self.size[index], self.stride[index])

    def mesh(self, index: int) -> Mesh:
        """One layout as a Mesh; axes of size 1 are kept, so that programs can always name them."""
        physical = [axis.name for axis in self.slice.physical_axes]
        axes: dict[str, tuple[AxisPiece, ...]] = {}
        for position, name in enumerate(AXES):
            sizes, strides = self.size[index, position], self.stride[index, position]
            axes[name] = tuple(
                AxisPiece(physical[p], int(strides[p]), int(sizes[p])) for p in range(len(physical)) if sizes[p] > 1
            )
        return Mesh(self.slice, axes)


def from_mesh(mesh: Mesh) -> Layouts:
    """A given mesh as one layout. Raises RooftopError on an axis that no plan has."""
    physical = [axis.name for axis in mesh.slice.physical_axes]
    size = np.ones((1, len(AXES), len(physical)), np.int64)
    stride = np.ones_like(size)
    for name, pieces in mesh.axes.items():
        if name not in AXES:
            raise unknown("mesh axis", name, AXES)
        for piece in pieces:
            where = 0, AXES.index(name), physical.index(piece.axis)
            size[where], stride[where] = piece.size, piece.stride
    return Layouts(mesh.slice, size, stride)


def enumerate_layouts(
    slice_: Slice, axes: Sequence[str], divides: Mapping[str, int], most: Mapping[str, int] | None = None
) -> Layouts:
    """All layouts of ``axes`` on ``slice_`` in which the devices along each axis divide ``divides[name]`` (if given).

    An axis has at most ``most[name]`` devices (if given).

    Over DCN only ``DCN_AXES`` run; every physical axis is divided among at most ``MAX_SHARING`` logical
    axes, in either order. Physical axes that are alike (same length and links) are interchangeable: one of the
    permutations stands for all.
    """
    physical = slice_.physical_axes
    allowed = {axis.name: [name for name in axes if _may_run(name, axis)] for axis in physical}
    choices = [_divisions(axis, allowed[axis.name]) for axis in physical]
    # The product is built one physical axis at a time, without layouts that do not divide: it never grows large.
    size = np.ones((1, len(AXES), 0), np.int64)
    stride = np.ones((1, len(AXES), 0), np.int64)
    order = np.zeros((1, 0), np.int64)
    # Zero is divided by everything: no limit.
    whole = np.array([divides.get(name, 0) for name in AXES])
    limit = np.array([(most or {}).get(name, slice_.devices) for name in AXES])
    for position, (axis, (sizes, strides)) in enumerate(zip(physical, choices, strict=True)):
        old, new = (grid.ravel() for grid in np.meshgrid(np.arange(len(size)), np.arange(len(sizes)), indexing="ij"))
        devices = np.prod(size, axis=-1)[old] * sizes[new]
        keep = np.all((whole % devices == 0) & (devices <= limit), axis=-1)
        if position and _alike(axis, physical[position - 1]):
            keep &= order[old, -1] <= new
        old, new = old[keep], new[keep]
        size = np.concatenate([size[old], sizes[new][..., None]], axis=-1)
        stride = np.concatenate([stride[old], strides[new][..., None]], axis=-1)
        order = np.concatenate([order[old], new[:, None]], axis=-1)
    return Layouts(slice_, size, stride)


def _may_run(name: str, axis: PhysicalAxis) -> bool:
    """True if a physical axis may carry a logical one: between slices ``DCN_AXES`` only, inside a slice any."""
    return axis.name != "dcn" or name in DCN_AXES


def _alike(one: PhysicalAxis, other: PhysicalAxis) -> bool:
    return one.kind == other.kind == "torus" and (one.size, one.wrapped) == (other.size, other.wrapped)


def _divisions(axis: PhysicalAxis, names: Sequence[str]) -> tuple[Ints, Ints]:
    """Sizes and strides [n, A] of every division of one physical axis among up to MAX_SHARING of ``names``."""
    divisions: list[dict[str, tuple[int, int]]] = []
    for sharing in range(1, MAX_SHARING + 1):
        if axis.size == 1:
            divisions.append({})
            break
        for chosen in permutations(names, sharing):
            for sizes in _ordered_factors(axis.size, sharing):
                strides = np.cumprod([1, *sizes[:-1]])
                divisions.append({name: (n, int(s)) for name, n, s in zip(chosen, sizes, strides, strict=True)})
    size, stride = np.ones((len(divisions), len(AXES)), np.int64), np.ones((len(divisions), len(AXES)), np.int64)
    for row, division in enumerate(divisions):
        for name, (n, s) in division.items():
            size[row, AXES.index(name)], stride[row, AXES.index(name)] = n, s
    return size, stride


def _ordered_factors(value: int, count: int) -> list[tuple[int, ...]]:
    """Every way to write ``value`` as an ordered product of ``count`` factors above 1."""
    factors = [n for n in range(2, value + 1) if value % n == 0]
    return [chosen for chosen in product(factors, repeat=count) if prod(chosen) == value]
