"""Meshes: named axes laid on the physical axes of a slice, whole, split or merged.

A logical axis is a list of pieces, at most one per physical axis. A piece of size n and stride s on a physical axis
of length A groups the devices whose coordinates there differ by multiples of s. That decides its ring, its
wraparound, the links it may use, and with whom it shares them: s groups interleave on the same links.

``AxisSpan`` says that for one logical axis, or for the same logical axis in many layouts at once (arrays [..., P]).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from rooftop.arrays.rules import AXES, axis_name, ways
from rooftop.core.errors import RooftopError, unknown
from rooftop.core.records import Record, read_record
from rooftop.hardware import PhysicalAxis, Slice

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class AxisPiece:
    """The part of a logical axis that lies on one physical axis: ``size`` devices, ``stride`` apart."""

    axis: str
    stride: int
    size: int


@dataclass(frozen=True, kw_only=True)
class AxisSpan:
    """The network as devices along one logical axis see it; every array is [..., P] over physical axes.

    ``size`` is 1 where the axis is not used. ``ring`` marks pieces that close through a wraparound; ``stride`` is the
    number of physical links per hop, and so the number of groups that share each link.
    """

    physical: tuple[PhysicalAxis, ...]
    size: Ints
    stride: Ints
    ring: npt.NDArray[np.bool_]

    @property
    def devices(self) -> Ints:
        """Devices in the group, [...]."""
        devices: Ints = np.prod(self.size, axis=-1)
        return devices

    @property
    def ports(self) -> Ints:
        """Links of one device into each physical axis: 2 on a ring, 1 on an open line or a switch."""
        return np.where(self.ring, 2, 1)

    @property
    def bytes_per_s(self) -> Floats:
        """One-way bytes/s into one device through each physical axis, shared links divided among their groups."""
        link = np.array([axis.bytes_per_s for axis in self.physical])
        rate: Floats = self.ports * link / self.stride
        return rate

    def __getitem__(self, index: Any) -> AxisSpan:
        """The spans of some layouts only."""
        return AxisSpan(physical=self.physical, size=self.size[index], stride=self.stride[index], ring=self.ring[index])


#: Lengths of physical axes, and whether they wrap around, [..., P].
Reach = tuple[Ints, npt.NDArray[np.bool_]]


def reach(physical: tuple[PhysicalAxis, ...]) -> Reach:
    """Lengths of physical axes, and whether they wrap around, [P]."""
    return np.array([axis.size for axis in physical]), np.array([axis.wrapped for axis in physical])


def span(physical: tuple[PhysicalAxis, ...], size: Ints, stride: Ints, within: Reach | None = None) -> AxisSpan:
    """The span of a logical axis from its sizes and strides, both [..., P] in the order of ``physical``.

    A piece closes into a ring only if it reaches right round a wrapped physical axis; a shorter run of chips on a
    wrapped axis is an open line. ``within``: the reach of slices that differ in it, [..., P].
    """
    length, wrapped = within or reach(physical)
    ring = wrapped & (size * stride == length) & (size > 1)
    # Through a switch every device has its own port: interleaved groups share nothing.
    switched = np.array([axis.kind in ("switch", "dcn", "core") for axis in physical])
    return AxisSpan(physical=physical, size=size, stride=np.where(switched, 1, stride), ring=ring)


def joint_span(
    physical: tuple[PhysicalAxis, ...], axes: Iterable[tuple[Ints, Ints]], within: Reach | None = None
) -> AxisSpan:
    """The span of several logical axes together, from the sizes and strides of each, [..., P].

    Pieces of several axes on one physical axis join into a longer run. Where they are not next to each other the stride
    is that of an even run of as many devices: the mean number of groups that share a link. ``within``: see ``span``.
    """
    length, wrapped = within or reach(physical)
    size, first, end = np.ones_like(length), length, np.ones_like(length)
    for own, apart in axes:
        size = size * own
        first = np.where(own > 1, np.minimum(first, apart), first)
        end = np.where(own > 1, np.maximum(end, apart * own), end)
    stride = np.where(size > 1, np.where(first * size == end, first, length // size), 1)
    return span(physical, size, stride, (length, wrapped))


@dataclass(frozen=True, kw_only=True)
class MeshLayout(Record):
    """A mesh without its slice, as plans write it: the size of each axis, and the pieces it consists of."""

    axes: Mapping[str, int]
    layout: Mapping[str, tuple[AxisPiece, ...]]

    def on(self, slice_: Slice) -> Mesh:
        """The mesh on a slice. Raises RooftopError if the pieces do not tile it, or the sizes are of others."""
        mesh = Mesh(slice_, {name: self.layout.get(name, ()) for name in {**self.axes, **self.layout}})
        for name, size in self.axes.items():
            if size != mesh.shape.get(name, 1):
                raise RooftopError(f"mesh.axes.{name}", size, f"{mesh.shape.get(name, 1)}, the size of its layout")
        return mesh


@dataclass(frozen=True)
class Mesh:
    """Named axes over the devices of a slice. Every device is used exactly once."""

    slice: Slice
    axes: Mapping[str, tuple[AxisPiece, ...]]

    def __post_init__(self) -> None:
        physical = {axis.name: axis for axis in self.slice.physical_axes}
        for name, axis in physical.items():
            pieces = sorted(
                (piece for pieces in self.axes.values() for piece in pieces if piece.axis == name),
                key=lambda piece: (piece.stride, piece.size),
            )
            strides = [prod(piece.size for piece in pieces[:rank]) for rank in range(len(pieces) + 1)]
            if [*(piece.stride for piece in pieces), axis.size] != strides:
                pieces_text = ", ".join(f"{piece.axis}[{piece.stride}:{piece.size}]" for piece in pieces) or "nothing"
                raise RooftopError(
                    "mesh",
                    pieces_text,
                    f"pieces that tile physical axis {name} of size {axis.size} without gap or overlap",
                )
        for laid in self.axes.values():
            for piece in laid:
                if piece.axis not in physical:
                    raise unknown("mesh physical axis", piece.axis, physical)

    @property
    def shape(self) -> dict[str, int]:
        """Devices along each logical axis, in mesh order."""
        return {name: prod(piece.size for piece in pieces) for name, pieces in self.axes.items()}

    def size(self, *names: str) -> int:
        """Devices along the named axes together; 1 for an axis that the mesh does not have."""
        return ways(self.shape, *names)

    def span(self, *names: str) -> AxisSpan:
        """The network as devices along the named axes together see it, arrays [P]: see ``joint_span``."""
        return joint_span(self.slice.physical_axes, [self.pieces(name) for name in names])

    def across(self, name: str) -> int:
        """Devices along an axis across slices, or nodes of GPUs: the part of it that lies over DCN."""
        sizes, _ = self.pieces(name)
        return prod(
            int(size) for size, axis in zip(sizes, self.slice.physical_axes, strict=True) if axis.resource == "dcn"
        )

    def pieces(self, name: str) -> tuple[Ints, Ints]:
        """Sizes and strides of an axis along the physical axes, [P]; 1 where it is not used."""
        position = {axis.name: at for at, axis in enumerate(self.slice.physical_axes)}
        size, stride = np.ones(len(position), np.int64), np.ones(len(position), np.int64)
        for piece in self.axes.get(name, ()):
            size[position[piece.axis]], stride[position[piece.axis]] = piece.size, piece.stride
        return size, stride

    def device_coordinates(self) -> Ints:
        """Physical coordinates of every device, [*mesh shape, P]: what a program lays its devices out by."""
        physical = [axis.name for axis in self.slice.physical_axes]
        shape = tuple(self.shape.values())
        coordinates = np.zeros((*shape, len(physical)), np.int64)
        for dim, pieces in enumerate(self.axes.values()):
            index = np.arange(shape[dim])
            # The first piece varies slowest within its axis, as in row-major order.
            for piece in reversed(pieces):
                along = (index % piece.size) * piece.stride
                index = index // piece.size
                view = along.reshape([-1 if position == dim else 1 for position in range(len(shape))])
                coordinates[..., physical.index(piece.axis)] += view
        return coordinates

    @property
    def layout(self) -> str:
        """The layout as ``--layout`` takes it: 'fsdp=x+y,tensor=z[1:4]' (``[stride:size]`` where split)."""
        lengths = {axis.name: axis.size for axis in self.slice.physical_axes}

        def write(piece: AxisPiece) -> str:
            return piece.axis if piece.size == lengths[piece.axis] else f"{piece.axis}[{piece.stride}:{piece.size}]"

        return ",".join(f"{name}={'+'.join(map(write, pieces))}" for name, pieces in self.axes.items() if pieces)

    @property
    def described(self) -> MeshLayout:
        """The mesh without its slice."""
        return MeshLayout(axes=self.shape, layout=self.axes)

    def to_json(self) -> dict[str, Any]:
        """``axes`` and ``layout`` (see ``MeshLayout``)."""
        return self.described.to_json()

    @classmethod
    def from_json(cls, slice_: Slice, data: object) -> Mesh:
        """The inverse of ``to_json``, on the slice that the plan names."""
        return read_record(MeshLayout, data, "mesh").on(slice_)

    @classmethod
    def lay(cls, slice_: Slice, sizes: Mapping[str, int]) -> Mesh:
        """Axes of those sizes on the physical axes of a slice: as few pieces as possible, whole axes before split ones.

        Among equals the order of the axes follows that of the network, slowest first (DCN, x, y, z, cores of a chip);
        the later of two axes that share a physical axis gets neighbours. Raises RooftopError if the sizes do not
        multiply to the devices of the slice.
        """
        if prod(sizes.values()) != slice_.devices:
            requested = " x ".join(f"{name}={size}" for name, size in sizes.items())
            raise RooftopError(
                "mesh", requested, f"sizes that multiply to the {slice_.devices} devices of {slice_.name}"
            )
        physical = sorted(slice_.physical_axes, key=lambda axis: {"dcn": 0, "core": 2}.get(axis.kind, 1))
        best = _fewest_pieces(tuple(axis.size for axis in physical), tuple(sizes.values()))
        pieces: dict[str, tuple[AxisPiece, ...]] = {name: () for name in sizes}
        for axis, factors in zip(physical, best, strict=True):
            for position, (name, factor) in enumerate(zip(sizes, factors, strict=True)):
                if factor > 1:
                    pieces[name] += (AxisPiece(axis.name, prod(factors[position + 1 :]), factor),)
        return cls(slice_, pieces)

    @classmethod
    def from_layout(cls, slice_: Slice, text: str, *, of_model: bool = False) -> Mesh:
        """A mesh from ``--layout`` text: 'fsdp=x+y,tensor=z[1:4],context=z[4:4]'. Raises RooftopError.

        With ``of_model`` the axes may have the names that frameworks have for those of a model's mesh.
        """
        lengths = {axis.name: axis.size for axis in slice_.physical_axes}
        axes: dict[str, tuple[AxisPiece, ...]] = {}
        for entry in text.split(","):
            name, equals, pieces = (part.strip() for part in entry.partition("="))
            name = axis_name(name) if of_model else name
            if not equals or name in axes:
                raise RooftopError("layout", text, "AXIS=PIECES for each axis once, such as fsdp=x+y,tensor=z[1:4]")
            axes[name] = tuple(_parse_piece(piece, lengths) for piece in pieces.split("+"))
        return cls(slice_, axes)


@dataclass(frozen=True)
class PlacedMesh(Mesh):
    """A mesh whose devices stand in an order of their own.

    ``places`` has the physical coordinates of each device, in the order in which the axes count them. ``regular``: the
    devices of every axis fill evenly spaced coordinates, so that ``axes`` says where they lie; otherwise ``axes`` is
    the layout that rooftop chooses for axes of these sizes, and prices of collectives are those of that layout.
    """

    places: tuple[tuple[int, ...], ...] = ()
    regular: bool = True

    def device_coordinates(self) -> Ints:
        """Physical coordinates of every device, [*mesh shape, P]."""
        return np.array(self.places, np.int64).reshape(*self.shape.values(), -1)


#: Name of the axis over copies of a mesh that has only some of the devices of its slice.
UNUSED = "unused"


def placed_mesh(slice_: Slice, sizes: Mapping[str, int], coordinates: Iterable[Iterable[int]]) -> Mesh:
    """The mesh of a program that lays its devices out itself: axes of ``sizes`` over devices at ``coordinates``.

    ``coordinates`` are along the physical axes of the slice, in the order in which the axes count the devices. A mesh
    of some of the devices gets a first axis ``unused`` over the others. Raises RooftopError unless all the devices of
    the slice are a multiple of those of the mesh.
    """
    places = tuple(tuple(int(coordinate) for coordinate in place) for place in coordinates)
    count = prod(sizes.values())
    if count != len(set(places)) or len(places) != count or slice_.devices % count:
        written = " x ".join(f"{name}={size}" for name, size in sizes.items())
        raise RooftopError("mesh", written, f"axes over different devices, a divisor of the {slice_.devices}")
    shape = dict(sizes)
    if count < slice_.devices:
        shape = {UNUSED: slice_.devices // count, **shape}
    grid = np.array(places, np.int64).reshape(*sizes.values(), len(slice_.physical_axes))
    axes = _pieces_of(slice_, dict(sizes), grid)
    if axes is not None and count < slice_.devices:
        axes = _with_unused(slice_, axes)
    regular, mesh = axes is not None, None
    if axes is not None:
        try:
            mesh = Mesh(slice_, axes)
        except RooftopError:
            regular = False
    mesh = mesh or Mesh.lay(slice_, shape)
    if np.array_equal(mesh.device_coordinates().reshape(-1, len(places[0]))[:count], np.array(places)):
        return mesh
    if count < slice_.devices:
        # Copies of the mesh fill the slice in any order: nothing is sent to them.
        used = set(places)
        everywhere = np.ndindex(*(axis.size for axis in slice_.physical_axes))
        places += tuple(place for place in everywhere if place not in used)
    return PlacedMesh(slice_, mesh.axes, places, regular)


def _pieces_of(slice_: Slice, sizes: Mapping[str, int], grid: Ints) -> dict[str, tuple[AxisPiece, ...]] | None:
    """The pieces of each axis, from coordinates [*sizes, P]; None if an axis fills unevenly spaced coordinates."""
    pieces: dict[str, tuple[AxisPiece, ...]] = {}
    for position, (name, size) in enumerate(sizes.items()):
        groups = np.moveaxis(grid, position, -2).reshape(-1, size, grid.shape[-1])
        laid = []
        for column, physical in enumerate(slice_.physical_axes):
            values = np.sort(groups[:, :, column], axis=1)
            distinct = np.unique(values[0])
            if len(distinct) == 1:
                if np.any(values[:, :1] != values):
                    return None
                continue
            stride = int(distinct[1] - distinct[0])
            expected = np.repeat(distinct - distinct[0], size // len(distinct)) if size % len(distinct) == 0 else None
            if expected is None or np.any(np.diff(distinct) != stride) or np.any(values - values[:, :1] != expected):
                return None
            # The first index at which the coordinate changes: pieces that change late vary slowest.
            period = int(np.argmax(groups[0, :, column] != groups[0, 0, column]))
            laid.append((-period, AxisPiece(physical.name, stride, len(distinct))))
        if prod(piece.size for _, piece in laid) != size:
            return None
        pieces[name] = tuple(piece for _, piece in sorted(laid, key=lambda entry: entry[0]))
    return pieces


def _with_unused(slice_: Slice, axes: Mapping[str, tuple[AxisPiece, ...]]) -> dict[str, tuple[AxisPiece, ...]] | None:
    """The axes with a first one over the rest of every physical axis; None if it does not divide."""
    rest = []
    for physical in slice_.physical_axes:
        used = prod(piece.size for pieces in axes.values() for piece in pieces if piece.axis == physical.name)
        if physical.size % used:
            return None
        if used < physical.size:
            rest.append(AxisPiece(physical.name, used, physical.size // used))
    return {UNUSED: tuple(rest), **axes}


def _parse_piece(text: str, lengths: Mapping[str, int]) -> AxisPiece:
    match = re.fullmatch(r"\s*(\w+)(?:\[(\d+):(\d+)\])?\s*", text)
    if match is None:
        raise RooftopError("layout", text, "AXIS or AXIS[STRIDE:SIZE], such as x or z[1:4]")
    axis, stride, size = match.groups()
    if axis not in lengths:
        raise unknown("layout axis", axis, lengths)
    return AxisPiece(axis, int(stride or 1), int(size or lengths[axis]))


@lru_cache(maxsize=4096)
def _fewest_pieces(lengths: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Factors of each physical axis by logical axis: the fewest pieces, then the fewest crossings of the two orders."""
    # Divide one physical axis after another.
    layouts: list[tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]] = [((), sizes)]
    for length in lengths:
        layouts = [
            ((*before, factors), tuple(size // factor for size, factor in zip(left, factors, strict=True)))
            for before, left in layouts
            for factors in _factors(length, left)
        ]
    pieces = [sum(n > 1 for factors in divisions for n in factors) for divisions, _ in layouts]
    fewest = min(pieces)
    _, best = min(
        (_crossings(divisions), divisions) for (divisions, _), n in zip(layouts, pieces, strict=True) if n == fewest
    )
    return best


@lru_cache(maxsize=4096)
def _factors(value: int, sizes: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Every way to write ``value`` as an ordered product of factors, ones included, each of which divides its size."""
    if len(sizes) == 1:
        return ((value,),) if sizes[0] % value == 0 else ()
    return tuple(
        (factor, *rest)
        for factor in range(1, min(value, sizes[0]) + 1)
        if value % factor == 0 and sizes[0] % factor == 0
        for rest in _factors(value // factor, sizes[1:])
    )


def _crossings(divisions: tuple[tuple[int, ...], ...]) -> int:
    """Pairs of pieces of a layout in which the later logical axis has the earlier physical one."""
    columns = [[column for column, n in enumerate(factors) if n > 1] for factors in divisions]
    return sum(one > other for early, late in combinations(columns, 2) for one in early for other in late)


def parse_axes(text: str, known: Iterable[str] | None = AXES) -> dict[str, int]:
    """Axis sizes from ``--mesh`` text: 'fsdp=1024,tensor=4'. Raises RooftopError on a bad name, size or repetition.

    ``known`` are the names that are accepted, and with them what frameworks call them; None accepts any word.
    """
    sizes: dict[str, int] = {}
    names = None if known is None else tuple(known)
    for entry in text.split(","):
        name, _, size = (part.strip() for part in entry.partition("="))
        name = name if names is None else axis_name(name)
        if names is None and not name.isidentifier():
            raise RooftopError("mesh axis", name, "NAME=SIZE, such as X=4")
        if names is not None and name not in names:
            raise unknown("mesh axis", name, names)
        if name in sizes:
            raise RooftopError("mesh", text, f"each axis once; {name} is given twice")
        if not size.isdecimal() or int(size) < 1:
            raise RooftopError(f"mesh axis {name}", size, "a positive whole number, as in tensor=4")
        sizes[name] = int(size)
    return sizes
