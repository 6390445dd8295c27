"""Memory of embedding tables on SparseCores: arrays in HBM, the compiler's stack, and a tile's own memory.

Sources: the SparseCore deep dive, section 9, for the stack's leading terms, and the compiler's high-water marks for
the rest (``embed.toml``). Formulas take numbers or NumPy arrays. Bytes of the stack are those of one SparseCore.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from rooftop.core.errors import RooftopError
from rooftop.core.ledger import Number
from rooftop.core.rounding import next_multiple
from rooftop.hardware import Chip
from rooftop.models.embedding_tables.tables import TableOptimizer

_FLOAT = 4


@cache
def figures() -> dict[str, Any]:
    """``embed.toml``: figures with their sources."""
    return tomllib.loads(Path(__file__).with_name("embed.toml").read_text(encoding="utf-8"))


def figure(*names: str) -> float:
    """One figure of ``embed.toml``. Raises RooftopError where it has none (of a chip without SparseCores)."""
    entry: Any = figures()
    for name in names:
        if name not in entry:
            raise RooftopError(".".join(names), name, f"one of {', '.join(entry)}")
        entry = entry[name]
    value: float = entry[0]
    return value


def sources() -> dict[str, str]:
    """Every figure of ``embed.toml`` with its source, by its path."""

    def of(data: Mapping[str, Any], path: str) -> dict[str, str]:
        result: dict[str, str] = {}
        for name, value in data.items():
            where = f"{path}{name}"
            result |= of(value, f"{where}.") if isinstance(value, Mapping) else {where: f"{value[0]}: {value[1]}"}
        return result

    return of(figures(), "")


def document_stack_bytes(phase: str, *, width: Number, max_unique_ids: Number, cores: Number) -> Number:
    """The deep dive's estimate: (2w + 1) U R 4 'forward' and 3w U R 4 'backward', R = ``cores`` replicas."""
    floats = 2 * width + 1 if phase == "forward" else 3 * width
    return floats * max_unique_ids * cores * _FLOAT


def replica_factor(*, max_ids: Number, max_unique_ids: Number, cores: Number, room: float) -> Number:
    """Logical replicas per SparseCore: the fewest with which a partition's ids fit in a tile of ``room`` bytes.

    Fewer SparseCores than a SparseCore has tiles are replicated too. The rule is what the high-water marks show; where
    no number of replicas helps it is the one that comes nearest.
    """
    factors = replica_factors()
    every = _by_factor(max_ids=max_ids, max_unique_ids=max_unique_ids, cores=cores)
    chosen = np.asarray(factors)[np.argmin(every, axis=0)]
    for factor, needed in zip(reversed(factors), reversed(every), strict=True):
        fits = needed <= room
        if factor == 1:
            fits = fits & (np.asarray(cores) >= figure("tiles", "count"))
        chosen = np.where(fits, factor, chosen)
    return chosen if np.ndim(chosen) else float(chosen)


def replica_factors() -> list[float]:
    """The numbers of logical replicas per SparseCore, rising."""
    replica_factors: list[float] = figures()["compiler"]["replica_factors"][0]
    return replica_factors


def stack_bytes(
    phase: str,
    *,
    width: Number,
    max_ids: Number,
    max_unique_ids: Number,
    cores: Number,
    slots: int,
    room: float,
    summed: bool = False,
) -> Number:
    """Stack in HBM of one SparseCore as the compiler allots it for one stack of tables.

    With R = ``cores`` times ``replica_factor``: 'forward' (2w + 1) U R 4 + I C 4, its U at most a replica's share of I;
    'backward' U R 4 times 3w + 5 for an optimizer without ``slots``, else 2 (slots + 1) w + 4. Both have a base arrays.
    Where gradients are ``summed`` over passes, the sums are one more slot: the update by them is larger than the loop
    that makes them, and takes its place.
    """
    times = replica_factor(max_ids=max_ids, max_unique_ids=max_unique_ids, cores=cores, room=room)
    base = figure("compiler", "stack_base_bytes")
    if phase == "forward":
        # A replica's share of the ids, in whole eights, holds at most so many different ones.
        share = np.ceil(np.maximum(max_ids, max_unique_ids) / times / 8) * 8
        unique = np.minimum(max_unique_ids, share) * times
        total: Any = (2 * width + 1) * unique * cores * _FLOAT + max_ids * cores * _FLOAT + base
    else:
        arrays = slots + summed
        floats = 3 * width + 5 if arrays == 0 else 2 * (arrays + 1) * width + 4
        total = floats * max_unique_ids * times * cores * _FLOAT + base
    return total if np.ndim(total) else float(total)


def tile_bytes(*, max_ids: Number, max_unique_ids: Number, cores: Number, factor: Number) -> Number:
    """Memory of a tile that one partition takes, its rows cut as narrow as they can be: 8 floats.

    The deep dive (section 7) says that all ids of a partition must fit; how much an id takes is the compiler's. The
    logical replicas, ``cores`` times ``factor``, share the ids, but not the unique ones; each takes a little itself.
    """
    unique, every = figure("tiles", "bytes_per_unique_id"), figure("tiles", "bytes_per_id")
    replicas = figure("tiles", "bytes_per_replica") * cores * factor
    return unique * max_unique_ids + every * max_ids / factor + replicas


def least_tile_bytes(*, max_ids: Number, max_unique_ids: Number, cores: Number) -> Number:
    """``tile_bytes`` with the number of replicas that takes the least: what has to fit."""
    least: Any = np.min(_by_factor(max_ids=max_ids, max_unique_ids=max_unique_ids, cores=cores), axis=0)
    return least if np.ndim(least) else float(least)


def _by_factor(*, max_ids: Number, max_unique_ids: Number, cores: Number) -> list[Any]:
    """``tile_bytes`` with each of ``replica_factors``."""
    shape = np.broadcast(max_ids, max_unique_ids, cores).shape
    sizes = {"max_ids": max_ids, "max_unique_ids": max_unique_ids, "cores": cores}
    return [np.broadcast_to(tile_bytes(factor=factor, **sizes), shape) for factor in replica_factors()]


def tile_capacity(chip: Chip) -> float:
    """Memory of a tile (TileSpmem), in bytes. Raises RooftopError for a chip without SparseCores."""
    return figure("tiles", "bytes", chip.name)


def tile_room(chip: Chip) -> float:
    """Bytes of a tile's memory for partitions; the compiler keeps the rest. Raises RooftopError."""
    return tile_capacity(chip) - figure("tiles", "reserved_bytes", chip.name)


def slot_floats(optimizer: TableOptimizer, width: int) -> int:
    """Floats per row of the optimizer's slots as they are stored: each padded to 8."""
    return sum(next_multiple(floats, 8) for floats in optimizer.slots(width))
