"""Whether ids keep within limits; what does not is said as the error that it is where nothing may be dropped."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from rooftop.core.errors import RooftopError
from rooftop.models.embedding_tables.limits import StackLimits
from rooftop.models.embedding_tables.stacking import Stack
from rooftop.models.embedding_tables.tables import SparseCoreConfig


class LimitsExceeded(RooftopError):
    """A batch needs more than the limits of a stack's program: larger ones would hold it."""


def partition_excess(
    stack: str, limits: StackLimits, ids: NDArray[np.int64], rows: NDArray[np.int64], first: int, passes: int
) -> LimitsExceeded | None:
    """For ids and different rows [G, C] of partitions; G are sources from ``first`` on, each with its passes."""
    for name, counts, what in (("max_ids", ids, "ids"), ("max_unique_ids", rows, "different ids")):
        most = getattr(limits, name)
        if counts.max(initial=0) > most:
            group, core = np.unravel_index(int(np.argmax(counts > most)), counts.shape)
            given = f"{counts[group, core]} {what} from SparseCore {first + int(group) // passes} for {core}"
            if passes > 1:
                given += f" in one of {passes} passes"
            return LimitsExceeded(f"limits of stack {stack}: {name}", given, _accepted(most, "minibatching"))
    return None


def buffer_excess(stack: str, capacity: int, whole: NDArray[np.int64], per_row: int) -> LimitsExceeded | None:
    """For padded partitions [G, C] of which ``per_row`` groups share a row of ``capacity`` ids."""
    needed = whole.reshape(-1, per_row * whole.shape[1]).sum(axis=1).max(initial=0)
    if needed <= capacity:
        return None
    return LimitsExceeded(f"limits of stack {stack}: buffer", f"{needed} ids, padded", _accepted(capacity))


def table_limits(stack: Stack, config: SparseCoreConfig) -> tuple[dict[int, int], dict[int, int]]:
    """Limits of ids and of different ids, by the table's place in the stack, where the config has some."""

    def of(limits: Mapping[str, int] | None) -> dict[int, int]:
        names = {place.table.name: index for index, place in enumerate(stack.places)}
        return {names[name]: limit for name, limit in (limits or {}).items() if name in names}

    return of(config.max_ids_per_table), of(config.max_unique_ids_per_table)


def table_excess(
    stack: Stack, config: SparseCoreConfig, ids: NDArray[np.int64], rows: NDArray[np.int64]
) -> RooftopError | None:
    """For ids and different rows [T, G] of tables and sources."""
    if config.max_ids_per_table is None and config.max_unique_ids_per_table is None:
        return None
    names = ("max_ids_per_table", "max_unique_ids_per_table")
    for name, limits, counts in zip(names, table_limits(stack, config), (ids, rows), strict=True):
        for index, most in limits.items():
            found = counts[index].max(initial=0)
            if found > most:
                field = f"config.{name}.{stack.places[index].table.name}"
                return RooftopError(field, f"{found} ids of one SparseCore", _accepted(most))
    return None


def chip_excess(ids: NDArray[np.int64], most: int, bound: int) -> RooftopError | None:
    """For the ids [devices] of all stacks together, ``bound`` a sample and ``most`` in all."""
    if ids.max(initial=0) <= most:
        return None
    field, found = "config.max_ids_per_chip_per_sample", ids.max()
    return RooftopError(field, f"{found} ids on chip {int(np.argmax(ids))}", _accepted(f"{bound} a sample, {most}"))


def _accepted(most: int | str, *ways: str) -> str:
    others = ", ".join(("a larger limit", *ways))
    return f"at most {most} (or {others} or allow_id_dropping)"
