"""Every way to lay the training axes on a slice's physical axes, as arrays.

Each physical axis is divided among the logical ones in one of a few ways. ``Layouts`` holds for C layouts which of the
divisions each of the P physical axes has, and which of the few mesh shapes follows: very many layouts take little
memory. The search prices them all at once; ``mesh`` turns one of them into a Mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import combinations, permutations, product
from math import prod
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from rooftop.arrays.mesh import AxisPiece, AxisSpan, Floats, Ints, Mesh, joint_span, span
from rooftop.arrays.rules import AXES
from rooftop.core.errors import unknown
from rooftop.hardware import PhysicalAxis, Slice

#: The most logical axes that share one physical axis: pieces of a third would be too short for a torus axis.
MAX_SHARING = 2
#: Those that share a switch, where every piece has the whole rate.
MAX_SHARING_SWITCH = 3


#: The different (size, stride) of a group of logical axes on one physical axis, and which of them each division has.
Runs: TypeAlias = tuple[Ints, npt.NDArray[np.int32]]


@dataclass(frozen=True)
class Division:
    """The n ways to divide one physical axis among ``AXES``: sizes and strides of each, [n, A]."""

    size: Ints
    stride: Ints
    runs: dict[tuple[PhysicalAxis, tuple[str, ...]], Runs] = field(default_factory=dict, repr=False, compare=False)
    """The runs that are known: those of one physical axis are the same on every slice."""

    def runs_of(self, axis: PhysicalAxis, names: tuple[str, ...]) -> Runs:
        """The different (size, stride) of a group of logical axes on a physical axis, and which each division has."""
        if (axis, names) not in self.runs:
            positions = [AXES.index(name) for name in names]
            run = joint_span((axis,), [(self.size[:, [at]], self.stride[:, [at]]) for at in positions])
            pairs = np.concatenate([run.size, run.stride], axis=-1)
            different, kind = np.unique(pairs, axis=0, return_inverse=True)
            self.runs[axis, names] = different, kind.reshape(-1).astype(np.int32)
        return self.runs[axis, names]


@dataclass(frozen=True)
class Ways:
    """The W different ways in which logical axes are laid, arrays [W, P], and that of each layout, ``of`` [C]."""

    spans: AxisSpan
    of: npt.NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.spans.size)

    @cached_property
    def within_slice(self) -> Floats:
        """Devices of the group within one slice, or node, [W]."""
        inside = np.array([axis.resource == "ici" for axis in self.spans.physical])
        devices: Floats = np.prod(self.spans.size, axis=-1, where=inside).astype(np.float64)
        return devices

    def __getitem__(self, index: Any) -> Ways:
        """The ways of the layouts at an index."""
        return Ways(self.spans, self.of[index])


@dataclass(frozen=True)
class Layouts:
    """Layouts of ``AXES`` on the physical axes of a slice.

    ``divisions`` are those of each physical axis; ``divided`` says which of them each layout has, [C, P]. ``shapes``
    are the devices along each logical axis in S different meshes, [S, A]; ``shape_of`` says which each layout has, [C].
    """

    slice: Slice
    divisions: tuple[Division, ...]
    divided: npt.NDArray[np.int32]
    shapes: Ints
    shape_of: npt.NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.divided)

    @cached_property
    def devices(self) -> Ints:
        """Devices along each logical axis, [C, A]."""
        return self.shapes[self.shape_of]

    def along(self, *names: str) -> Ints:
        """Devices along the named axes together, [C]."""
        devices: Ints = np.prod(self.shapes[:, [AXES.index(name) for name in names]], axis=-1)
        return devices[self.shape_of]

    @cached_property
    def _columns(self) -> list[npt.NDArray[np.int32]]:
        """``divided`` of each physical axis, [C]: in memory one after the other, to be read fast."""
        return list(np.ascontiguousarray(self.divided.T))

    def ways(self, *names: str) -> Ways:
        """Every way in which logical axes are laid, as one group of devices.

        Very many layouts have few such ways: a figure of one group alone is computed once for each.
        """
        pairs = zip(self.slice.physical_axes, self.divisions, strict=True)
        runs = [division.runs_of(axis, names) for axis, division in pairs]
        code: npt.NDArray[np.int32] = np.zeros(len(self), np.int32)
        total = 1
        for column, (different, kind) in zip(self._columns, runs, strict=True):
            if len(different) > 1:
                code *= len(different)
                code += kind[column]
                total *= len(different)
        # There are few codes: a table of them is filled faster than they are sorted.
        example = np.full(total, -1, np.int32)
        example[code] = np.arange(len(self), dtype=np.int32)
        used = np.flatnonzero(example >= 0)
        number = np.zeros(total, np.int32)
        number[used] = np.arange(len(used), dtype=np.int32)
        chosen = self.divided[example[used]]
        laid = [different[kind[chosen[:, p]]] for p, (different, kind) in enumerate(runs)]
        size, stride = (np.stack([run[:, figure] for run in laid], axis=-1) for figure in (0, 1))
        return Ways(span(self.slice.physical_axes, size, stride), number[code])

    def by_shape(self) -> tuple[Layouts, Ints, Ints]:
        """The layouts in order of mesh shapes, and of each in order of what is laid between slices.

        Returned with where those of each shape begin, and those of each shape that are alike between slices.
        """
        rank = np.empty(len(self.shapes), np.int32)
        rank[np.lexsort(self.shapes.T)] = np.arange(len(self.shapes))
        shape, group, count = rank[self.shape_of], rank[self.shape_of], len(self.shapes)
        for axis, division, column in zip(self.slice.physical_axes, self.divisions, self._columns, strict=True):
            if axis.resource == "dcn":
                group, count = group * len(division.size) + column, count * len(division.size)
        # Short integers are sorted digit by digit, in linear time.
        order = np.argsort(group.astype(np.uint16) if count < 2**16 else group, kind="stable")
        return self[order], _starts(shape[order]), _starts(group[order])

    def __getitem__(self, index: Any) -> Layouts:
        """The layouts at an index."""
        return replace(self, divided=self.divided[index], shape_of=self.shape_of[index])

    def mesh(self, index: int) -> Mesh:
        """One layout as a Mesh; axes of size 1 are kept, so that programs can always name them."""
        physical = [axis.name for axis in self.slice.physical_axes]
        axes: dict[str, tuple[AxisPiece, ...]] = {}
        for position, name in enumerate(AXES):
            laid = [
                (axis, int(division.stride[way, position]), int(division.size[way, position]))
                for axis, division, way in zip(physical, self.divisions, self.divided[index], strict=True)
            ]
            axes[name] = tuple(AxisPiece(axis, stride, size) for axis, stride, size in laid if size > 1)
        return Mesh(self.slice, axes)


def _starts(groups: npt.NDArray[np.int32]) -> Ints:
    """Where each run of equal numbers begins."""
    starts: Ints = np.flatnonzero(np.append(True, groups[1:] != groups[:-1])).astype(np.int64)
    return starts


def from_mesh(mesh: Mesh) -> Layouts:
    """A given mesh as one layout. Raises RooftopError on an axis that no plan has."""
    divisions = {
        axis.name: Division(np.ones((1, len(AXES)), np.int64), np.ones((1, len(AXES)), np.int64))
        for axis in mesh.slice.physical_axes
    }
    for name, pieces in mesh.axes.items():
        if name not in AXES:
            raise unknown("mesh axis", name, AXES)
        for piece in pieces:
            where = 0, AXES.index(name)
            divisions[piece.axis].size[where], divisions[piece.axis].stride[where] = piece.size, piece.stride
    shape = np.array([[mesh.size(name) for name in AXES]])
    return Layouts(
        mesh.slice, tuple(divisions.values()), np.zeros((1, len(divisions)), np.int32), shape, np.zeros(1, np.int32)
    )


def shapes_alone(slice_: Slice, shapes: Ints) -> Layouts:
    """Mesh shapes [S, A] without the physical axes, for figures that depend on the shape alone."""
    count = len(shapes)
    return Layouts(slice_, (), np.zeros((count, 0), np.int32), shapes, np.arange(count, dtype=np.int32))


def enumerate_layouts(
    slice_: Slice,
    axes: Sequence[str],
    divides: Mapping[str, int],
    most: Mapping[str, int] | None = None,
    accepts: Callable[[Layouts], npt.NDArray[np.bool_]] | None = None,
) -> Layouts:
    """All layouts of ``axes`` on ``slice_`` in which the devices along each axis divide ``divides[name]`` (if given).

    An axis has at most ``most[name]`` devices (if given). ``accepts`` (if given) says of ``shapes_alone`` which are
    wanted, [S]: there are far fewer of them than of layouts.

    Every physical axis is divided among at most ``MAX_SHARING`` logical axes in either order, a switch among at most
    ``MAX_SHARING_SWITCH``. Physical axes that are
    alike (same length and links) are interchangeable: one of the permutations stands for all.
    """
    physical = slice_.physical_axes
    divisions = [_division(axis, tuple(axes)) for axis in physical]
    # Zero is divided by everything: no limit.
    whole = np.array([divides.get(name, 0) for name in AXES])
    limit = np.array([(most or {}).get(name, slice_.devices) for name in AXES])
    # The product is built one physical axis at a time, without layouts that do not divide: it never grows large. What
    # divides depends on the shape of the mesh alone.
    shapes = np.ones((1, len(AXES)), np.int64)
    divided, shape_of = np.zeros((1, 0), np.int32), np.zeros(1, np.int32)
    for position, (axis, division) in enumerate(zip(physical, divisions, strict=True)):
        grown = shapes[:, None] * division.size
        good = np.all((whole % grown == 0) & (grown <= limit), axis=-1)
        different, like = _different(grown[good], slice_.devices)
        if accepts is not None and position == len(physical) - 1:
            accepted = accepts(shapes_alone(slice_, different))
            good[good] = accepted[like]
            different, like = different[accepted], (np.cumsum(accepted) - 1)[like[accepted[like]]]
        keep = good[shape_of]
        if position and _alike(axis, physical[position - 1]):
            keep &= divided[:, -1:] <= np.arange(len(division.size))
        old, new = np.nonzero(keep)
        after = np.zeros(good.shape, np.int32)
        shapes, after[good] = different, like
        divided = np.concatenate([divided[old], new[:, None].astype(np.int32)], axis=-1)
        shape_of = after[shape_of[old], new]
    return Layouts(slice_, tuple(divisions), divided, shapes, shape_of)


def mesh_shapes(devices: int, axes: Sequence[str], most: Mapping[str, int] | None = None) -> Ints:
    """Every way to split ``devices`` among ``axes``, at most ``most[name]`` along each (if given), [S, A]."""
    divisors = np.array([n for n in range(1, devices + 1) if devices % n == 0])
    shapes, rest = np.ones((1, len(AXES)), np.int64), np.array([devices])
    for position, name in enumerate(AXES):
        if name in axes:
            fits = (rest[:, None] % divisors == 0) & (divisors <= (most or {}).get(name, devices))
            old, new = np.nonzero(fits)
            shapes, rest = shapes[old], rest[old] // divisors[new]
            shapes[:, position] = divisors[new]
    whole: Ints = shapes[rest == 1]
    return whole


def ranked_layouts(slice_: Slice, shapes: Ints, orders: Sequence[Sequence[str]]) -> Layouts:
    """The layouts of mesh shapes, [S, A], in which devices have their ranks in one of ``orders``, innermost axis first.

    Ranks fill one physical axis after the other. Left out are shapes of which an axis would have part of a node that
    does not divide it.
    """
    physical = slice_.physical_axes
    ends = np.cumprod([1, *(axis.size for axis in physical)])
    pieces, shape_of = [], []
    for order in orders:
        places = [AXES.index(name) for name in order]
        begin = np.ones(shapes.shape, np.int64)
        begin[:, places[1:]] = np.cumprod(shapes[:, places], axis=1)[:, :-1]
        # Ranks that each axis has of each physical one, as sizes and strides, [S, P, A].
        low = np.maximum(begin[:, None], ends[:-1, None])
        high = np.maximum(np.minimum((begin * shapes)[:, None], ends[1:, None]), low)
        size, inside = high // low, high > low
        whole = (high % low == 0) & (low % ends[:-1, None] == 0) | ~inside
        good = np.all(whole, axis=(1, 2)) & np.all(np.prod(size, axis=1) == shapes, axis=1)
        stride = np.where(inside, low // ends[:-1, None], 1)
        pieces.append(np.stack([size, stride], axis=-1)[good])
        shape_of.append(np.flatnonzero(good))
    laid, of = np.concatenate(pieces), np.concatenate(shape_of).astype(np.int32)
    divisions, divided = [], []
    for position in range(len(physical)):
        kinds, kind = np.unique(laid[:, position].reshape(len(laid), -1), axis=0, return_inverse=True)
        rows = kinds.reshape(len(kinds), len(AXES), 2)
        divisions.append(Division(rows[..., 0], rows[..., 1]))
        divided.append(kind.reshape(-1).astype(np.int32))
    # Orders that differ in axes of one device alone are one layout.
    _, first = np.unique(np.column_stack([*divided, of]), axis=0, return_index=True)
    return Layouts(slice_, tuple(divisions), np.column_stack(divided)[first], shapes, of[first])


def _different(shapes: Ints, devices: int) -> tuple[Ints, Ints]:
    """The different rows of shapes [n, A], and which of them each row is; all sizes divide ``devices``."""
    divisors = np.array([n for n in range(1, devices + 1) if devices % n == 0])
    code = np.zeros(len(shapes), np.int64)
    for sizes in shapes.T:
        code = code * len(divisors) + np.searchsorted(divisors, sizes)
    _, first, like = np.unique(code, return_index=True, return_inverse=True)
    return shapes[first], like


def _alike(one: PhysicalAxis, other: PhysicalAxis) -> bool:
    return one.kind == other.kind == "torus" and (one.size, one.wrapped) == (other.size, other.wrapped)


@lru_cache(maxsize=256)
def _division(axis: PhysicalAxis, names: tuple[str, ...]) -> Division:
    """Every division of one physical axis among a few of ``names``; of three the order is that of ``names``."""
    divisions: list[dict[str, tuple[int, int]]] = []
    for sharing in range(1, (MAX_SHARING_SWITCH if axis.kind == "switch" else MAX_SHARING) + 1):
        if axis.size == 1:
            divisions.append({})
            break
        for chosen in permutations(names, sharing) if sharing <= MAX_SHARING else combinations(names, sharing):
            for sizes in _ordered_factors(axis.size, sharing):
                strides = np.cumprod([1, *sizes[:-1]])
                divisions.append({name: (n, int(s)) for name, n, s in zip(chosen, sizes, strides, strict=True)})
    size, stride = np.ones((len(divisions), len(AXES)), np.int64), np.ones((len(divisions), len(AXES)), np.int64)
    for row, division in enumerate(divisions):
        for name, (n, s) in division.items():
            size[row, AXES.index(name)], stride[row, AXES.index(name)] = n, s
    return Division(size, stride)


def _ordered_factors(value: int, count: int) -> list[tuple[int, ...]]:
    """Every way to write ``value`` as an ordered product of ``count`` factors above 1."""
    factors = [n for n in range(2, value + 1) if value % n == 0]
    return [chosen for chosen in product(factors, repeat=count) if prod(chosen) == value]
