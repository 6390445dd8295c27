"""Sizes of a model's dims on the devices of a mesh that does not divide them: padding, in one place.

JAX shards evenly. A dim that does not divide over its axes is stored with zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from rooftop.core.ledger import Number

    Ways = TypeVar("Ways", int, Number)

#: The largest padding of a dim that a search considers, relative to its size.
MOST_PADDING = 0.2


def share(size: Ways, ways: Ways) -> Ways:
    """The part of ``size`` that the busiest of ``ways`` devices has."""
    return -(-size // ways)


@dataclass(frozen=True, kw_only=True)
class PaddedDim:
    """A dim of ``size`` elements as it is stored: cut into equal parts, each filled up with zeros at its end.

    ``steps`` are numbers of parts, each with the size of a part once it is filled, in the order of filling.
    """

    size: int
    steps: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, size: int, *steps: tuple[int, int]) -> PaddedDim | None:
        """The dim after ``steps``, of which those that add nothing are left out; None if none is left."""
        useful, stored = list[tuple[int, int]](), size
        for parts, filled in steps:
            if parts * filled != stored:
                useful.append((parts, filled))
                stored = parts * filled
        return cls(size=size, steps=tuple(useful)) if useful else None

    @property
    def stored(self) -> int:
        """Elements that are stored."""
        return prod(self.steps[-1])

    @cached_property
    def positions(self) -> npt.NDArray[np.int64]:
        """The stored position of each element, ascending, [size]."""
        import numpy as np

        positions = np.arange(self.size)
        stored = self.size
        for parts, filled in self.steps:
            part = stored // parts
            positions = positions // part * filled + positions % part
            stored = parts * filled
        return positions
