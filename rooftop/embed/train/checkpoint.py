"""Checkpoints of tables, slots and dense weights: by table and not by stack, for any number of SparseCores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rooftop.core.errors import RooftopError
from rooftop.models.embedding_tables.stacking import Stacking, pack, unpack
from rooftop.runs.checkpoints import Checkpoints

Array = NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class Saved:
    """The content of a checkpoint. Dims: tables [V, W] by name, slots [V, W] or [V, 1] by table; dense arrays by path.

    ``step`` counts the batches that were trained, ``updates`` those that the tables have. ``job`` identifies the run in
    plain JSON values. ``refused`` has one line for each newer checkpoint that is damaged.
    """

    step: int
    updates: int
    job: Mapping[str, Any]
    tables: Mapping[str, Array]
    slots: Mapping[str, tuple[Array, ...]]
    dense: Mapping[str, Array]
    refused: tuple[str, ...] = field(default=(), compare=False)


def save(checkpoints: Checkpoints, saved: Saved) -> None:
    """Save a checkpoint in the background. Raises RooftopError if this or the last one cannot be written."""
    arrays = {f"table.{name}": array for name, array in saved.tables.items()}
    arrays |= {f"slot{index}.{name}": slot for name, slots in saved.slots.items() for index, slot in enumerate(slots)}
    arrays |= {f"dense.{name}": array for name, array in saved.dense.items()}
    checkpoints.save(saved.step, arrays, {"updates": saved.updates, "job": saved.job})


def restore(checkpoints: Checkpoints) -> Saved | None:
    """Restore the newest undamaged checkpoint; None if there are none.

    Raises RooftopError if all are damaged: a run that began anew would write over them.
    """
    if not checkpoints.steps():
        return None
    restored = checkpoints.restore_arrays()
    arrays: dict[str, dict[str, Array]] = {}
    for name, array in restored.state.items():
        kind, _, rest = name.partition(".")
        arrays.setdefault(kind, {})[rest] = array
    tables, slots = arrays["table"], {name: list[Array]() for name in arrays["table"]}
    for kind in sorted(kind for kind in arrays if kind.startswith("slot")):
        for name, array in arrays[kind].items():
            slots[name].append(array)
    return Saved(
        step=restored.step,
        tables=tables,
        slots={name: tuple(slot) for name, slot in slots.items()},
        dense=arrays.get("dense", {}),
        refused=restored.refused,
        updates=restored.extra["updates"],
        job=restored.extra["job"],
    )


def newest_tables(run: Path) -> Saved:
    """Restore the newest checkpoint of the run in the folder ``run``. Raises RooftopError if there is none."""
    checkpoints = Checkpoints(run / "checkpoints")
    try:
        saved = restore(checkpoints)
    finally:
        checkpoints.close()
    if saved is None:
        raise RooftopError("run", str(run), "a folder with a whole checkpoint, of rooftop embed train")
    return saved


def stacked(
    stacking: Stacking, saved: Saved, initial: Mapping[str, tuple[float, ...]]
) -> tuple[dict[str, Array], dict[str, tuple[Array, ...]]]:
    """Return the checkpoint's tables and slots as stacks of ``stacking``; padding of slots holds ``initial`` values.

    Raises RooftopError if the checkpoint is of other tables.
    """
    slots: dict[str, tuple[Array, ...]] = {}
    for stack in stacking.stacks:
        members = [place.table for place in stack.places]
        packed = []
        for index, value in enumerate(initial[stack.name]):
            narrow = stack.optimizer.slots(stack.width)[index] == 1 != stack.width
            members_values = {
                table.name: _slot(saved, table.name, index, table.width if narrow else 1)
                for table in stacking.tables.tables
                if table in members
            }
            # Packing needs all tables: those of other stacks lend their values.
            arrays = {name: members_values.get(name, array) for name, array in saved.tables.items()}
            array = pack(stacking, arrays, value)[stack.name]
            packed.append(array[:, :, :1].copy() if narrow else array)
        slots[stack.name] = tuple(packed)
    return pack(stacking, saved.tables), slots


def unstacked(
    stacking: Stacking, tables: Mapping[str, Array], slots: Mapping[str, tuple[Array, ...]]
) -> tuple[dict[str, Array], dict[str, tuple[Array, ...]]]:
    """Return tables and slots by table, of those by stack."""
    by_table: dict[str, tuple[Array, ...]] = {}
    for stack in stacking.stacks:
        parts = [unpack(stacking, {**tables, stack.name: slot}) for slot in slots[stack.name]]
        by_table |= {place.table.name: tuple(part[place.table.name] for part in parts) for place in stack.places}
    return unpack(stacking, tables), by_table


def _slot(saved: Saved, table: str, index: int, width: int) -> Array:
    if table not in saved.slots or index >= len(saved.slots[table]):
        raise RooftopError("checkpoint", f"slots of {table}", "the optimizer that the tables file names")
    return np.repeat(saved.slots[table][index], width, axis=1)
