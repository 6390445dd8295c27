"""The record of measured collectives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rooftop.arrays.mesh import MeshLayout
from rooftop.core.measurements import MeasuredCollectives
from rooftop.core.records import Record


@dataclass(frozen=True, kw_only=True, repr=False)
class CollectivesRecord(Record):
    """Times of collectives over ``axes`` of a mesh; with a ``slice``, next to what is planned for it."""

    kind: Literal["collectives"] = "collectives"
    mesh: MeshLayout
    axes: tuple[str, ...]
    dtype: str
    slice: str | None
    measured: MeasuredCollectives
