"""Limits from data: observed over a stream, estimated with headroom, kept in a file, and fed back with few recompiles.

SparseCores are compiled for limits (``models.tables_limits``). Too low, and batches are split or lose ids; too high,
and buffers are larger than they need be (the SparseCore deep dive, sections 7 and 10). New limits mean a new program:
limits come from a ladder of rungs a quarter apart, so that however the data drift few programs are ever compiled.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rooftop.core.errors import RooftopError
from rooftop.core.files import parse_json, read_text, write_text
from rooftop.core.records import Record
from rooftop.core.rounding import next_multiple
from rooftop.embed.host.preprocess import Preprocessor
from rooftop.embed.host.statistics import StackStatistics, Statistics
from rooftop.models.embedding_tables.limits import Limits, StackLimits, check_limits, full_buffer
from rooftop.models.embedding_tables.stacking import ALIGNMENT, Stacking
from rooftop.plan.embedding.limits import rung

#: Room that limits leave above observed sizes, as a fraction.
HEADROOM = 0.1
#: A program is given up for a smaller one only where its buffers could be smaller than this part of them.
_WORTH_SHRINKING = 0.5
_KIND, _SCHEMA = "embed-limits", 1


def observe(preprocessor: Preprocessor, batches: Iterable[Mapping[str, Any]]) -> Statistics:
    """Statistics of a stream of batches: the most that any of them needs.

    Raises RooftopError for an empty stream or an invalid id (with the number of its batch).
    """
    observe: Statistics | None = None
    for number, batch in enumerate(batches, start=1):
        try:
            statistics = preprocessor.observe(batch)
        except RooftopError as error:
            raise RooftopError(f"batch {number}: {error.field}", error.given, error.accepted) from None
        observe = statistics if observe is None else observe.merged(statistics)
    if observe is None:
        raise RooftopError("batches", "none", "at least one batch to observe")
    return observe


def estimate(statistics: Statistics, stacking: Stacking, *, headroom: float = HEADROOM) -> dict[str, StackLimits]:
    """Limits for observed sizes and ``headroom`` (a fraction) more, on the ladder's rungs."""
    _check_headroom(headroom)
    # Every pass has partitions of its own.
    partitions = stacking.cores * statistics.minibatches
    return {name: _with_headroom(stack, partitions, headroom) for name, stack in statistics.stacks.items()}


def expected(
    stacking: Stacking, *, batch: int, sample_passes: int = 1, headroom: float = HEADROOM
) -> dict[str, StackLimits]:
    """Limits before any data: from each feature's ``ids_per_sample``, ids spread evenly over the SparseCores.

    ``batch`` samples on all devices, in ``sample_passes`` over them. A partition of m expected ids is given
    m + 6 sqrt(m) and ``headroom`` more: the fullest of many Poisson counts. Skewed data need more: what is observed
    decides.
    """
    _check_headroom(headroom)
    expected = {}
    for stack in stacking.stacks:
        ids = sum(feature.ids_per_sample * feature.rows_per_sample for feature in stack.features)
        of_core, partitions = batch / stacking.cores * ids, stacking.cores * sample_passes
        mean = of_core / partitions
        ids_of_partition = rung((mean + 6 * math.sqrt(mean)) * (1 + headroom))
        ids_of_core = (of_core + 6 * math.sqrt(of_core)) * (1 + headroom)
        buffer = rung(ids_of_core + (ALIGNMENT - 1) * partitions)
        expected[stack.name] = StackLimits(
            max_ids=ids_of_partition,
            max_unique_ids=min(ids_of_partition, next_multiple(stack.rows, ALIGNMENT)),
            buffer=min(buffer, full_buffer(ids_of_partition, partitions)),
        )
    return expected


def feed_back(limits: Limits, statistics: Statistics, stacking: Stacking, *, headroom: float = HEADROOM) -> Limits:
    """Limits to continue a run with: the same object if its program is to be kept.

    A program is given up if a batch exceeded its limits, or if half of its buffers, all stacks together, would do. As
    it is compiled again anyway, every stack then gets the limits that it needs now; a stack that fits with its headroom
    keeps them. Raises RooftopError if limits and statistics are of different stacks.
    """
    check_limits(limits, stacking)
    needed = estimate(statistics, stacking, headroom=headroom)
    exceeded = any(_exceeds(statistics.stacks[name], limits[name]) for name in limits)
    smaller = sum(needed[name].buffer for name in limits) <= _WORTH_SHRINKING * sum(
        limits[name].buffer for name in limits
    )
    if not exceeded and not smaller:
        return limits
    if smaller and not exceeded:
        return needed
    return {name: limits[name] if _covers(limits[name], needed[name]) else needed[name] for name in limits}


def grown(limits: Limits, statistics: Statistics, stacking: Stacking, *, headroom: float = HEADROOM) -> Limits:
    """Limits raised to hold the observed sizes with ``headroom``; none becomes smaller."""
    needed = estimate(statistics, stacking, headroom=headroom)
    return {
        name: StackLimits(**{limit: max(value, getattr(needed[name], limit)) for limit, value in vars(current).items()})
        for name, current in limits.items()
    }


@dataclass(frozen=True, kw_only=True)
class StackNeeds(Record):
    """A stack of tables: the ids that a stream of batches had, what it needs of each limit, and the limits."""

    name: str
    tables: tuple[str, ...]
    ids: int
    observed: Mapping[str, int]
    limits: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class LimitsRecord(Record):
    """Limits for a stream of batches, next to what it needs. ``kept`` says if the current ones serve (None: none)."""

    batches: int
    cores: int
    sample_passes: int
    kept: bool | None
    out_of_range: Mapping[str, int]
    stacks: tuple[StackNeeds, ...]


@dataclass(frozen=True, kw_only=True)
class LimitUse:
    """A compiled limit next to the observed size."""

    stack: str
    limit: str
    compiled: int
    observed: int

    @property
    def used(self) -> float:
        """observed / compiled; above 1 the limit was exceeded."""
        return self.observed / self.compiled


def compare(limits: Limits, statistics: Statistics) -> list[LimitUse]:
    """Compiled and observed sizes of each stack and limit."""
    return [
        LimitUse(stack=name, limit=limit, compiled=getattr(limits[name], limit), observed=observed)
        for name, stack in statistics.stacks.items()
        for limit, observed in _most(stack).items()
    ]


def write_limits(
    path: Path, limits: Limits, stacking: Stacking, *, batch: int, batches: int = 0, sample_passes: int = 1
) -> None:
    """Write limits for ``batch`` samples on all devices, looked up in ``sample_passes`` over samples.

    ``batches`` were observed. Raises RooftopError.
    """
    check_limits(limits, stacking)
    data = {
        "kind": _KIND,
        "schema": _SCHEMA,
        "cores": stacking.cores,
        "cores_per_device": stacking.cores_per_device,
        "batch": batch,
        "batches": batches,
        "sample_passes": sample_passes,
        "stacks": {
            stack.name: {
                "tables": [place.table.name for place in stack.places],
                **vars(limits[stack.name]),
            }
            for stack in stacking.stacks
        },
    }
    write_text(path, json.dumps(data, indent=1) + "\n")


def read_limits(path: Path, stacking: Stacking, *, batch: int, sample_passes: int = 1) -> dict[str, StackLimits]:
    """Limits that ``write_limits`` wrote for the same stacks, SparseCores, batch and passes. Raises RooftopError."""
    accepted = "a limits file that rooftop wrote"
    try:
        data = parse_json(read_text(path))
    except OSError as error:
        raise RooftopError("limits", str(path), f"a file that can be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise RooftopError("limits", str(path), f"{accepted} (not JSON: {error})") from None
    if not isinstance(data, dict) or data.get("kind") != _KIND or data.get("schema") != _SCHEMA:
        raise RooftopError("limits", str(path), f"{accepted}, of schema {_SCHEMA}")
    expected_fields = {"cores": stacking.cores, "cores_per_device": stacking.cores_per_device, "batch": batch}
    for field, value in {**expected_fields, "sample_passes": sample_passes}.items():
        # Files from before there were passes over samples do not say that theirs is one.
        recorded = data.get(field, 1 if field == "sample_passes" else None)
        if recorded != value:
            raise RooftopError(f"limits: {field}", recorded, f"{value}, as here: observe the data again")
    stacks = data.get("stacks")
    if not isinstance(stacks, dict):
        raise RooftopError("limits: stacks", stacks, "limits for each stack")
    result = {}
    for name, fields in stacks.items():
        names = ("tables", *StackLimits.__dataclass_fields__)
        if not isinstance(fields, dict) or set(fields) != set(names):
            raise RooftopError(f"limits: stack {name}", fields, f"the fields {', '.join(names)}")
        tables = fields["tables"]
        if name in (stack.name for stack in stacking.stacks):
            here = [place.table.name for place in stacking.stack(name).places]
            if tables != here:
                raise RooftopError(f"limits: stack {name}", f"tables {tables}", f"tables {here}, as here")
        result[name] = StackLimits(**{field: value for field, value in fields.items() if field != "tables"})
    check_limits(result, stacking)
    return result


def _most(stack: StackStatistics) -> dict[str, int]:
    """Largest observed sizes by the name of their limit."""
    return {
        "max_ids": int(stack.max_ids.max(initial=0)),
        "max_unique_ids": int(stack.max_unique_ids.max(initial=0)),
        "buffer": int(stack.buffer.max(initial=0)),
    }


def _with_headroom(stack: StackStatistics, partitions: int, headroom: float) -> StackLimits:
    result = {limit: rung(observed * (1 + headroom)) for limit, observed in _most(stack).items()}
    result["buffer"] = min(result["buffer"], full_buffer(result["max_ids"], partitions))
    result["max_unique_ids"] = min(result["max_unique_ids"], result["max_ids"])
    return StackLimits(**result)


def _exceeds(stack: StackStatistics, limits: StackLimits) -> bool:
    return any(observed > getattr(limits, limit) for limit, observed in _most(stack).items())


def _covers(limits: StackLimits, needed: StackLimits) -> bool:
    """True if limits hold the needed ones and are not twice as large."""
    enough = all(getattr(limits, limit) >= value for limit, value in vars(needed).items())
    return enough and needed.buffer > _WORTH_SHRINKING * limits.buffer


def _check_headroom(headroom: float) -> None:
    if isinstance(headroom, bool) or not isinstance(headroom, int | float) or not 0 <= headroom <= 100:
        raise RooftopError("headroom", headroom, "a fraction from 0 on, such as 0.1 for a tenth more")
