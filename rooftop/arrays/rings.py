"""Rings through the devices of a mesh axis: neighbours on the network follow each other."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import permutations
from math import prod

import numpy as np
import numpy.typing as npt

from rooftop.arrays.mesh import AxisSpan, Mesh


@dataclass(frozen=True, kw_only=True)
class DeviceRing:
    """The devices along an axis by their indices, in the ``order`` in which a ring visits them.

    ``closed``: the last is a neighbour of the first, so that data can go both ways round.
    """

    order: tuple[int, ...]
    closed: bool

    @classmethod
    def of(cls, mesh: Mesh, axis: str) -> DeviceRing:
        """A ring of neighbours, closed if ``closes`` says that there is one.

        It goes back and forth along the pieces of the axis, the first of them slowest: a reflected Gray code.
        """
        pieces, span = mesh.axes.get(axis, ()), mesh.span(axis)
        sizes = tuple(piece.size for piece in pieces)
        names = [physical.name for physical in span.physical]
        turns = [bool(_turns(span)[names.index(piece.axis)]) for piece in pieces]
        # Two neighbours in the slowest piece, or a ring of an even number, bring the last device next to the first.
        slowest_first = min(permutations(range(len(pieces))), key=lambda order: [not turns[at] for at in order[:1]])
        index = np.arange(prod(sizes)).reshape([sizes[at] for at in range(len(sizes))]).transpose(slowest_first)
        places = _reflected([sizes[at] for at in slowest_first])
        return cls(order=tuple(int(index[place]) for place in places), closed=bool(closes(span)))


def closes(span: AxisSpan) -> npt.NDArray[np.bool_]:
    """True where a ring through the devices of a group closes, [...]; two devices have one way to each other."""
    used = span.size > 1
    several = np.sum(used, axis=-1) > 1
    closed: npt.NDArray[np.bool_] = np.any(np.where(several[..., None], _turns(span), span.ring), axis=-1)
    return closed & (span.devices > 2)


def _turns(span: AxisSpan) -> npt.NDArray[np.bool_]:
    """Pieces that a path which goes there and back along the others leaves where it entered them, [..., P]."""
    turns: npt.NDArray[np.bool_] = (span.size == 2) | (span.ring & (span.size % 2 == 0))
    return turns


def _reflected(sizes: list[int]) -> list[tuple[int, ...]]:
    """Every place, one step after the other along one dim at a time."""
    places: list[tuple[int, ...]] = [()]
    for size in reversed(sizes):
        places = [(at, *rest) for at in range(size) for rest in (places if at % 2 == 0 else places[::-1])]
    return places
