"""Meshes: named axes laid on the physical axes of a slice, whole, split or merged.

A logical axis is a list of pieces, at most one per physical axis. A piece of size n and stride s on a physical axis
of length A groups the devices whose coordinates there differ by multiples of s. That decides its ring, its
wraparound, the links it may use, and with whom it shares them: s groups interleave on the same links.

``Span`` says that for one logical axis, or for the same logical axis in many layouts at once (arrays [..., P]).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from rooftop.errors import RooftopError, unknown
from rooftop.hardware import PhysicalAxis, Slice

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

#: The axes that rooftop's own programs use, in mesh order: slowest network first.
AXES: tuple[str, ...] = ("data", "stage", "fsdp", "expert", "context", "tensor")


@dataclass(frozen=True)
class Piece:
    """The part of a logical axis that lies on one physical axis: ``size`` devices, ``stride`` apart."""

    axis: str
    stride: int
    size: int


@dataclass(frozen=True, kw_only=True)
class Span:
    """What the devices of one logical axis see of the network; every array is [..., P] over physical axes.

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

    def __getitem__(self, index: Any) -> Span:
        """The spans of some layouts only."""
        return Span(physical=self.physical, size=self.size[index], stride=self.stride[index], ring=self.ring[index])


def span(physical: tuple[PhysicalAxis, ...], size: Ints, stride: Ints) -> Span:
    """The span of a logical axis from its sizes and strides, both [..., P] in the order of ``physical``.

    A piece closes into a ring only if it reaches right round a wrapped physical axis; a shorter run of chips on a
    wrapped axis is an open line.
    """
    length = np.array([axis.size for axis in physical])
    wrapped = np.array([axis.wrapped for axis in physical])
    ring = wrapped & (size * stride == length) & (size > 1)
    # Through a switch every device has its own port: interleaved groups share nothing.
    switched = np.array([axis.kind in ("switch", "dcn", "core") for axis in physical])
    return Span(physical=physical, size=size, stride=np.where(switched, 1, stride), ring=ring)


@dataclass(frozen=True)
class Mesh:
    """Named axes over the devices of a slice. Every device is used exactly once."""

    slice: Slice
    axes: Mapping[str, tuple[Piece, ...]]

    def __post_init__(self) -> None:
        physical = {axis.name: axis for axis in self.slice.physical_axes}
        for name, axis in physical.items():
            pieces = sorted(
                (piece for pieces in self.axes.values() for piece in pieces if piece.axis == name),
                key=lambda piece: (piece.stride, piece.size),
            )
            strides = [prod(piece.size for piece in pieces[:rank]) for rank in range(len(pieces) + 1)]
            if [*(piece.stride for piece in pieces), axis.size] != strides:
                given = ", ".join(f"{piece.axis}[{piece.stride}:{piece.size}]" for piece in pieces) or "nothing"
                raise RooftopError(
                    "mesh", given, f"pieces that tile physical axis {name} of size {axis.size} without gap or overlap"
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
        return prod(self.shape.get(name, 1) for name in names)

    def span(self, name: str) -> Span:
        """What the devices of one logical axis see of the network, arrays [P]."""
        physical = self.slice.physical_axes
        order = {axis.name: position for position, axis in enumerate(physical)}
        size, stride = np.ones(len(physical), np.int64), np.ones(len(physical), np.int64)
        for piece in self.axes.get(name, ()):
            size[order[piece.axis]], stride[order[piece.axis]] = piece.size, piece.stride
        return span(physical, size, stride)

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

        def write(piece: Piece) -> str:
            return piece.axis if piece.size == lengths[piece.axis] else f"{piece.axis}[{piece.stride}:{piece.size}]"

        return ",".join(f"{name}={'+'.join(map(write, pieces))}" for name, pieces in self.axes.items() if pieces)

    def to_json(self) -> dict[str, Any]:
        """``axes`` (name -> size) and ``layout`` (name -> pieces), as plan.json holds them."""
        return {
            "axes": self.shape,
            "layout": {
                name: [{"axis": piece.axis, "stride": piece.stride, "size": piece.size} for piece in pieces]
                for name, pieces in self.axes.items()
            },
        }

    @classmethod
    def from_json(cls, slice_: Slice, data: Mapping[str, Any]) -> Mesh:
        """The inverse of ``to_json``, on the slice that the plan names."""
        try:
            return cls(
                slice_,
                {
                    name: tuple(Piece(entry["axis"], int(entry["stride"]), int(entry["size"])) for entry in pieces)
                    for name, pieces in data["layout"].items()
                },
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise RooftopError("mesh", data, f"the axes and layout of a plan ({error!r})") from None

    @classmethod
    def from_layout(cls, slice_: Slice, text: str) -> Mesh:
        """A mesh from ``--layout`` text: 'fsdp=x+y,tensor=z[1:4],context=z[4:4]'."""
        lengths = {axis.name: axis.size for axis in slice_.physical_axes}
        axes: dict[str, tuple[Piece, ...]] = {}
        for entry in text.split(","):
            name, _, pieces = entry.strip().partition("=")
            axes[name] = tuple(_parse_piece(piece, lengths) for piece in pieces.split("+"))
        return cls(slice_, axes)


def _parse_piece(text: str, lengths: Mapping[str, int]) -> Piece:
    match = re.fullmatch(r"\s*(\w+)(?:\[(\d+):(\d+)\])?\s*", text)
    if match is None:
        raise RooftopError("layout", text, "AXIS or AXIS[STRIDE:SIZE], such as x or z[1:4]")
    axis, stride, size = match.groups()
    if axis not in lengths:
        raise unknown("layout axis", axis, lengths)
    return Piece(axis, int(stride or 1), int(size or lengths[axis]))


def parse_axes(text: str, known: Iterable[str] = AXES) -> dict[str, int]:
    """Axis sizes from ``--mesh`` text: 'fsdp=1024,tensor=4'. Raises RooftopError on a bad name, size or repetition."""
    sizes: dict[str, int] = {}
    names = tuple(known)
    for entry in text.split(","):
        name, _, size = (part.strip() for part in entry.partition("="))
        if name not in names:
            raise unknown("mesh axis", name, names)
        if name in sizes:
            raise RooftopError("mesh", text, f"each axis once; {name} is given twice")
        if not size.isdecimal() or int(size) < 1:
            raise RooftopError(f"mesh axis {name}", size, "a positive whole number, as in tensor=4")
        sizes[name] = int(size)
    return sizes
