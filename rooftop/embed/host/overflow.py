"""Ids over the limits: raise an error, or drop them in the order in which SparseCores read them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from jaxtyping import Bool, Int64

from rooftop.core.errors import RooftopError
from rooftop.embed.host.buffers import padded
from rooftop.embed.host.reference import Entries, rank
from rooftop.models.embedding_tables.limits import StackLimits
from rooftop.models.embedding_tables.stacking import Stack
from rooftop.models.embedding_tables.tables import SparseCoreConfig


class LimitsExceeded(RooftopError):
    """A batch needs more than the limits of a stack's program. Larger limits would hold it."""


def partition_excess(
    stack: str,
    limits: StackLimits,
    ids: Int64[np.ndarray, "G C"],
    rows: Int64[np.ndarray, "G C"],
    first: int,
    passes: int,
) -> LimitsExceeded | None:
    """Error for ids and different rows [G, C] of partitions; G are sources from ``first`` on, each with its passes."""
    for name, counts, things in (("max_ids", ids, "ids"), ("max_unique_ids", rows, "different ids")):
        most = getattr(limits, name)
        if counts.max(initial=0) > most:
            group, core = np.unravel_index(int(np.argmax(counts > most)), counts.shape)
            value = f"{counts[group, core]} {things} from SparseCore {first + int(group) // passes} for {core}"
            if passes > 1:
                value += f" in one of {passes} passes"
            return LimitsExceeded(f"limits of stack {stack}: {name}", value, _accepted(most, "minibatching"))
    return None


def buffer_excess(stack: str, capacity: int, sizes: Int64[np.ndarray, "G C"], per_row: int) -> LimitsExceeded | None:
    """Error for partitions of ``sizes`` [G, C] of which ``per_row`` groups share a row of ``capacity`` ids."""
    needed = padded(sizes).reshape(-1, per_row * sizes.shape[1]).sum(axis=1).max(initial=0)
    if needed <= capacity:
        return None
    return LimitsExceeded(f"limits of stack {stack}: buffer", f"{needed} ids, padded", _accepted(capacity))


def table_limits(stack: Stack, config: SparseCoreConfig) -> tuple[dict[int, int], dict[int, int]]:
    """Limits of ids and of different ids, by the table's index in the stack, for tables that have one."""

    def by_index(limits: Mapping[str, int] | None) -> dict[int, int]:
        indices = {place.table.name: index for index, place in enumerate(stack.places)}
        return {indices[name]: limit for name, limit in (limits or {}).items() if name in indices}

    return by_index(config.max_ids_per_table), by_index(config.max_unique_ids_per_table)


def table_excess(
    stack: Stack, config: SparseCoreConfig, ids: Int64[np.ndarray, "T G"], rows: Int64[np.ndarray, "T G"]
) -> RooftopError | None:
    """Error for ids and different rows [T, G] of tables and sources."""
    if config.max_ids_per_table is None and config.max_unique_ids_per_table is None:
        return None
    names = ("max_ids_per_table", "max_unique_ids_per_table")
    for name, limits, counts in zip(names, table_limits(stack, config), (ids, rows), strict=True):
        for index, most in limits.items():
            largest = counts[index].max(initial=0)
            if largest > most:
                field = f"config.{name}.{stack.places[index].table.name}"
                return RooftopError(field, f"{largest} ids of one SparseCore", _accepted(most))
    return None


def chip_excess(ids: Int64[np.ndarray, " devices"], most: int, bound: int) -> RooftopError | None:
    """Error for ids [devices] of all stacks together; ``bound`` per sample are ``most`` in all."""
    if ids.max(initial=0) <= most:
        return None
    value = f"{ids.max()} ids on chip {int(np.argmax(ids))}"
    return RooftopError("config.max_ids_per_chip_per_sample", value, _accepted(f"{bound} a sample, {most}"))


def _accepted(most: int | str, *ways: str) -> str:
    others = ", ".join(("a larger limit", *ways))
    return f"at most {most} (or {others} or allow_id_dropping)"


def drop_from_partitions(ids: Entries, max_ids: int, max_unique_ids: int, cores: int) -> Entries:
    """Keep the first ``max_ids`` ids of each partition that belong to its first ``max_unique_ids`` rows."""
    partitions = ids.partitions(cores)
    keep = (rank(partitions) < max_ids) & (_rows_before(ids.fresh, partitions) < max_unique_ids)
    return ids if keep.all() else ids.taken(keep)


def drop_from_tables(ids: Entries, passes: int, max_ids: dict[int, int], max_unique_ids: dict[int, int]) -> Entries:
    """Keep the first ids of each source and table, as many as the limits by the table's index in the stack allow."""
    keep = np.ones(len(ids.rows), np.bool_)
    for limits, unique in ((max_ids, False), (max_unique_ids, True)):
        for table, limit in limits.items():
            at = np.flatnonzero(ids.tables == table)
            sources = ids.groups[at] // passes
            keep[at] &= (_rows_before(ids.fresh[at], sources) if unique else rank(sources)) < limit
    return ids if keep.all() else ids.taken(keep)


def drop_from_sources(ids: Entries, passes: int, room: Int64[np.ndarray, " sources"]) -> Entries:
    """Keep the first ids of each source, at most ``room`` [sources]."""
    sources = ids.groups // passes
    keep = rank(sources) < room[sources]
    return ids if keep.all() else ids.taken(keep)


def drop_from_buffers(ids: Entries, capacity: int, per_row: int, groups: int, cores: int) -> Entries:
    """Keep ids that fit into rows of ``capacity`` ids, partitions padded; ``per_row`` groups share a row."""
    whole = padded(ids.sizes(groups, cores)).reshape(groups // per_row, -1)
    starts = (np.cumsum(whole, axis=1) - whole).reshape(-1)
    partitions = ids.partitions(cores)
    keep = starts[partitions] + rank(partitions) < capacity
    return ids if keep.all() else ids.taken(keep)


def _rows_before(fresh: Bool[np.ndarray, " n"], groups: Int64[np.ndarray, " n"]) -> Int64[np.ndarray, " n"]:
    """Different rows in each id's group up to it, without the group's first."""
    seen = np.cumsum(fresh)
    return seen - seen[np.searchsorted(groups, groups)]
