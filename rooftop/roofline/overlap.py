"""The transfers of a step that overlap its computation, from the compilers' own schedules."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from rooftop.hardware import chip as find_chip

#: Collectives of a layer that XLA runs next to computation.
Asynchronous = Literal["none", "gathers", "all"]
#: Without a schedule, transfers off the critical path hide: the expectation is then the bound.
_UNREAD = {"weight_gather": 1.0, "gradient_scatter": 1.0}


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """The default schedule of one chip's compiler.

    ``hidden``: asynchronous share by kind of transfer. ``whole_slice_scatter``: the collective that a ReduceScatter
    over every device of a slice becomes, ``whole_slice_gather`` the same of an AllGather. ``whole_tiles``: it scatters
    whole tiles only (``rooftop.arrays.tiles.summed_whole``). ``windowed_einsum``: False if XLA's own
    collective matmuls of gathered weights take longer than what they replace. ``asynchronous``: collectives of a layer
    that XLA runs next to any computation (``rooftop.plan.parts``). ``collective_matmuls``: True if it overlaps the
    permutes of our collective matmuls, so that plans may have them. ``small_in_vmem``: the share of VMEM below which
    arrays around attention stay there from one operation to the next, the smaller the more of them; 0: none does.
    ``source`` is the evidence.
    """

    hidden: Mapping[str, float]
    whole_slice_scatter: str
    whole_slice_gather: str
    whole_tiles: bool
    windowed_einsum: bool
    asynchronous: Asynchronous
    collective_matmuls: bool
    small_in_vmem: float
    source: str


@cache
def overlap(chip_name: str) -> Overlap:
    """The schedule of a chip's compiler. Raises RooftopError on an unknown chip."""
    name = find_chip(chip_name).name
    table = tomllib.loads(Path(__file__).with_name("overlap.toml").read_text(encoding="utf-8"))
    entry = table.get(name, {})
    return Overlap(
        hidden={kind: float(entry.get(kind, share)) for kind, share in _UNREAD.items()},
        whole_slice_scatter=entry.get("whole_slice_scatter", "reduce_scatter"),
        whole_slice_gather=entry.get("whole_slice_gather", "all_gather"),
        whole_tiles=entry.get("whole_tiles", True),
        windowed_einsum=entry.get("windowed_einsum", True),
        asynchronous=entry.get("asynchronous", "none"),
        collective_matmuls=entry.get("collective_matmuls", False),
        small_in_vmem=float(entry.get("small_in_vmem", 0.0)),
        source=entry.get("source", "no schedule was read: what may hide, hides"),
    )
