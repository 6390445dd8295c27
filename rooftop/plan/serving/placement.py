"""Placements of a phase of serving: one mesh, or several that are priced at once.

Of several, ways and prices are arrays [P, 1], which broadcast with batch sizes [B]; each formula of a phase holds for
either.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from math import lcm, prod
from typing import Any, Protocol

import numpy as np

from rooftop.arrays import Mesh
from rooftop.arrays.mesh import AxisPiece, AxisSpan, Floats, Ints, Reach, joint_span, reach
from rooftop.arrays.rules import BATCH_AXES, COLUMN_AXES, EXPERT_AXES, GATHER_AXES, SEQUENCE_AXES, STAGE_AXES, ways
from rooftop.capabilities import KV_SPLITS, KvSplit
from rooftop.core.errors import unknown
from rooftop.core.ledger import Number
from rooftop.hardware import Slice
from rooftop.models.program_sizes import SUBLANES
from rooftop.roofline.collectives import Price, joined_price, price


class Placed(Protocol):
    """The interface of one placement or of several."""

    @property
    def slice(self) -> Slice:
        """The slice under the mesh."""
        ...

    @property
    def chips(self) -> Number:
        """Chips of the slice."""
        ...

    @property
    def kv_split(self) -> KvSplit:
        """Part of the cache that ``context`` splits: 'batch' or 'seq'."""
        ...

    def ways(self, axes: tuple[str, ...]) -> Number:
        """Devices along mesh axes together; 1 for an axis that the mesh does not have."""
        ...

    def used(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """The mesh axes, of those named, that have several devices in any placement."""
        ...

    def price(self, kind: str, axes: tuple[str, ...]) -> Price:
        """The price of a collective over mesh axes together; computed once."""
        ...

    @property
    def resting(self) -> dict[Hashable, tuple[Number, ...]]:
        """Bytes on a device that do not depend on the batch, by what they depend on: computed once."""
        ...

    @property
    def shapes(self) -> dict[Hashable, dict[str, Any]]:
        """Properties of phases that do not depend on tokens, by phase and model, then by name: computed once."""
        ...

    def joined(self) -> Placed:
        """The same devices with context and tensor merged into one tensor axis: the two are adjacent."""
        ...


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The mesh of a phase, and the part of the cache that ``context`` splits: 'batch' or 'seq'.

    ``joined_of`` is the mesh of the engine whose context and tensor axes are joined in this one.
    """

    mesh: Mesh
    kv_split: KvSplit = "batch"
    joined_of: Mesh | None = None

    def __post_init__(self) -> None:
        if self.kv_split not in KV_SPLITS:
            raise unknown("kv-split", self.kv_split, KV_SPLITS)

    @property
    def slice(self) -> Slice:
        """The slice under the mesh."""
        return self.mesh.slice

    @property
    def chips(self) -> int:
        """See ``Placed``."""
        return self.slice.chips

    @property
    def engine_mesh(self) -> Mesh:
        """The mesh as an engine has it."""
        return self.joined_of or self.mesh

    @property
    def spread(self) -> int:
        """Equal parts of a generate server's batch: one for each group of devices that shares a cache, in each flight.

        With D split over ``fsdp``, so many that tokens are split evenly too: see ``Phase.token_unit``.
        """
        groups = self.ways(BATCH_AXES) * (1 if self.kv_split == "seq" else self.ways(SEQUENCE_AXES))
        if self.ways(GATHER_AXES) > 1:
            groups = SUBLANES * lcm(groups, self.ways((*SEQUENCE_AXES, *COLUMN_AXES)))
        return groups * self.ways(STAGE_AXES)

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Devices along each mesh axis."""
        return self.mesh.shape

    @cached_property
    def _ways(self) -> dict[tuple[str, ...], int]:
        return {}

    def ways(self, axes: tuple[str, ...]) -> int:
        """See ``Placed``."""
        if axes not in self._ways:
            self._ways[axes] = ways(self.sizes, *axes)
        return self._ways[axes]

    def used(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """See ``Placed``."""
        return tuple(axis for axis in axes if self.sizes.get(axis, 1) > 1)

    @cached_property
    def _prices(self) -> dict[tuple[str, tuple[str, ...]], Price]:
        return {}

    def price(self, kind: str, axes: tuple[str, ...]) -> Price:
        """See ``Placed``."""
        key = _priced_as(kind), axes
        if key not in self._prices:
            self._prices[key] = price(key[0], self.mesh.span(*axes))
        return self._prices[key]

    @cached_property
    def resting(self) -> dict[Hashable, tuple[Number, ...]]:
        """See ``Placed``."""
        return {}

    @cached_property
    def shapes(self) -> dict[Hashable, dict[str, Any]]:
        """See ``Placed``."""
        return {}

    def joined(self) -> Placement:
        """See ``Placed``."""
        return self._joined

    @cached_property
    def _joined(self) -> Placement:
        return Placement(mesh=_joined(self.mesh), joined_of=self.engine_mesh)

    @cached_property
    def homes(self) -> list[tuple[Placements, int]]:
        """The first group that this placement was in, and its row there: prices of other groups are taken from it."""
        return []

    @cached_property
    def groups(self) -> dict[tuple[int, ...], Placements]:
        """Groups that begin with this placement, by the identities of their members: prices are computed once."""
        return {}


@dataclass(frozen=True, kw_only=True)
class Placements:
    """Several meshes [P] on slices of one chip, priced together: rows have the same structure, figures are [P, 1].

    All or none of them split D over ``fsdp``, all or none have an ``expert`` axis, and all or none have stages. Those
    on one slice are next to each other.
    """

    members: Sequence[Placement]

    def __post_init__(self) -> None:
        for row, placement in enumerate(self.members):
            if not placement.homes:
                placement.homes.append((self, row))

    @property
    def slice(self) -> Slice:
        """The slice under the first mesh."""
        return self.members[0].slice

    @cached_property
    def chips(self) -> Floats:
        """See ``Placed``; [P, 1]."""
        return np.array([[float(placement.chips)] for placement in self.members])

    @property
    def kv_split(self) -> KvSplit:
        """The part of the cache that ``context`` splits, in all of them."""
        return self.members[0].kv_split

    @cached_property
    def _home(self) -> tuple[Placements, Ints] | None:
        """An earlier group that has all the members, and their rows there; None if there is none."""
        home = self.members[0].homes[0][0]
        if home is self or any(placement.homes[0][0] is not home for placement in self.members):
            return None
        return home, np.array([placement.homes[0][1] for placement in self.members])

    @cached_property
    def _by_network(self) -> list[Placements]:
        """The meshes on slices with the same physical axes, which may differ in length and wraparound."""
        parts = [list(some) for _, some in groupby(self.members, key=_axis_names)]
        return [self] if len(parts) == 1 else [Placements(members=some) for some in parts]

    @cached_property
    def _pieces(self) -> dict[str, tuple[Ints, Ints]]:
        """Sizes and strides of each mesh axis along the physical axes, [P, physical]; 1 where it is not used."""
        position = {axis.name: at for at, axis in enumerate(self.slice.physical_axes)}
        shape = len(self.members), len(position)
        laid = {name: (np.ones(shape, np.int64), np.ones(shape, np.int64)) for name in self._sizes}
        for row, placement in enumerate(self.members):
            for name, pieces in placement.mesh.axes.items():
                size, stride = laid[name]
                for piece in pieces:
                    size[row, position[piece.axis]], stride[row, position[piece.axis]] = piece.size, piece.stride
        return laid

    @cached_property
    def _reach(self) -> Reach:
        rows = [reach(placement.slice.physical_axes) for placement in self.members]
        return np.stack([length for length, _ in rows]), np.stack([wrapped for _, wrapped in rows])

    def span(self, axes: Iterable[str]) -> AxisSpan:
        """``Mesh.span`` of every mesh, arrays [P, physical]. All slices have the same physical axes."""
        pieces = [self._pieces[name] for name in axes if name in self._pieces]
        return joint_span(self.slice.physical_axes, pieces, self._reach)

    @cached_property
    def _prices(self) -> dict[tuple[str, tuple[str, ...]], Price]:
        return {}

    @cached_property
    def _ways(self) -> dict[tuple[str, ...], Floats]:
        return {}

    @cached_property
    def _sizes(self) -> dict[str, Floats]:
        """Devices along each mesh axis, [P, 1]."""
        names = dict.fromkeys(name for placement in self.members for name in placement.mesh.axes)
        return {name: np.array([[float(placement.sizes.get(name, 1))] for placement in self.members]) for name in names}

    def ways(self, axes: tuple[str, ...]) -> Floats:
        """See ``Placed``; [P, 1]."""
        if axes not in self._ways:
            sizes = (self._sizes[axis] for axis in axes if axis in self._sizes)
            self._ways[axes] = prod(sizes, start=np.ones((len(self.members), 1)))
        return self._ways[axes]

    @cached_property
    def _used(self) -> frozenset[str]:
        return frozenset(name for name, sizes in self._sizes.items() if np.any(sizes > 1))

    def used(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """See ``Placed``."""
        return tuple(axis for axis in axes if axis in self._used)

    def price(self, kind: str, axes: tuple[str, ...]) -> Price:
        """See ``Placed``; arrays [P, 1]."""
        key = _priced_as(kind), axes
        if key not in self._prices:
            if self._home is None:
                own = [price(key[0], part.span(axes)) for part in self._by_network]
                self._prices[key] = joined_price(own).map(lambda value: value[:, None])
            else:
                home, rows = self._home
                self._prices[key] = home.price(*key).map(lambda value: value[rows])
        return self._prices[key]

    @cached_property
    def resting(self) -> dict[Hashable, tuple[Number, ...]]:
        """See ``Placed``."""
        return {}

    @cached_property
    def shapes(self) -> dict[Hashable, dict[str, Any]]:
        """See ``Placed``."""
        return {}

    def joined(self) -> Placements:
        """See ``Placed``."""
        return self._joined

    @cached_property
    def _joined(self) -> Placements:
        return Placements(members=[placement.joined() for placement in self.members])


def together(placements: Sequence[Placement]) -> Iterator[tuple[list[int], Placed]]:
    """Group placements on slices of one chip that can be priced together: indices and the group."""
    alike: dict[tuple[bool, ...], dict[KvSplit, list[int]]] = {}
    for at, placement in enumerate(placements):
        kind = tuple(placement.ways(axes) > 1 for axes in (GATHER_AXES, EXPERT_AXES, STAGE_AXES))
        alike.setdefault(kind, {}).setdefault(placement.kv_split, []).append(at)
    for splits in alike.values():
        for members in splits.values():
            if len(members) == 1:
                yield members, placements[members[0]]
            else:
                chosen = [placements[at] for at in members]
                key, groups = tuple(map(id, chosen)), chosen[0].groups
                if key not in groups:
                    groups[key] = Placements(members=chosen)
                yield members, groups[key]


def _axis_names(placement: Placement) -> list[str]:
    return [axis.name for axis in placement.slice.physical_axes]


def _priced_as(kind: str) -> str:
    # A ReduceScatter is an AllGather run backwards: the same bytes over the same links.
    return "all_gather" if kind == "reduce_scatter" else kind


def _joined(mesh: Mesh) -> Mesh:
    joined: dict[str, AxisPiece] = {}
    for piece in (piece for axis in (*SEQUENCE_AXES, *COLUMN_AXES) for piece in mesh.axes.get(axis, ())):
        other = joined.get(piece.axis, AxisPiece(piece.axis, piece.stride, 1))
        joined[piece.axis] = AxisPiece(piece.axis, min(piece.stride, other.stride), piece.size * other.size)
    empty = dict.fromkeys((*SEQUENCE_AXES, *COLUMN_AXES), ())
    return Mesh(mesh.slice, {**mesh.axes, **empty, COLUMN_AXES[0]: tuple(joined.values())})
