"""Tables, optimizer slots and dense weights on disk, by table and not by stack: any number of SparseCores reads them.

A checkpoint is the folder ``<step>``: one ``.npy`` file for each array, and ``manifest.json``, which names them with
their SHA-256. It is written as ``<step>.writing`` and renamed once it is whole: a kill at any moment leaves the whole
of it or what was there before.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rooftop.core.errors import RooftopError
from rooftop.core.files import write_bytes, write_text
from rooftop.models.embedding_tables.stacking import Stacking, pack, unpack
from rooftop.models.embedding_tables.tables import Tables

_SCHEMA = 1
#: Checkpoints that stay: the newest, and the one before it.
_KEPT = 2
#: What a folder is called at the end until its checkpoint is whole.
_WRITING = ".writing"
#: What of a run, beside its arrays, its checkpoints hold.
_FACTS = ("samples", "seed", "data")

Array = NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class Saved:
    """What a checkpoint holds. Dims: tables [V, W] by name, slots [V, W] or [V, 1] by table; dense arrays by path.

    ``step`` counts the updates of the tables, ``batch`` the batches that were read, of ``samples`` each. ``seed`` is
    the run's, ``data`` the digest of the first batch of its data, ``optimizers`` the kinds that the slots are of, by
    table. Checkpoints from before the last four were written down have None, and no kinds.
    """

    step: int
    batch: int
    tables: Mapping[str, Array]
    slots: Mapping[str, tuple[Array, ...]]
    dense: Mapping[str, Array]
    samples: int | None = None
    seed: int | None = None
    data: str | None = None
    optimizers: Mapping[str, str] = field(default_factory=dict)


def save(folder: Path, saved: Saved) -> Path:
    """Write a checkpoint below ``folder`` and return its place. Raises RooftopError if it cannot be written."""
    arrays = {f"table.{name}": array for name, array in saved.tables.items()}
    arrays |= {f"slot{index}.{name}": slot for name, slots in saved.slots.items() for index, slot in enumerate(slots)}
    arrays |= {f"dense.{name}": array for name, array in saved.dense.items()}
    final = folder / str(saved.batch)
    writing = folder / f"{saved.batch}{_WRITING}"
    try:
        for stopped in folder.glob(f"*{_WRITING}"):
            # Whoever wrote there was killed: a run has one writer.
            shutil.rmtree(stopped, ignore_errors=True)
        writing.mkdir(parents=True)
    except OSError as error:
        raise RooftopError("checkpoints", str(folder), f"a folder that can be written ({error.strerror})") from None
    sums = {}
    for index, (name, array) in enumerate(arrays.items()):
        data = io.BytesIO()
        np.save(data, np.asarray(array), allow_pickle=False)
        write_bytes(writing / f"{index}.npy", data.getvalue())
        sums[name] = {"file": f"{index}.npy", "sha256": hashlib.sha256(data.getvalue()).hexdigest()}
    facts = {name: getattr(saved, name) for name in ("step", "batch", *_FACTS)}
    manifest = {"schema": _SCHEMA, **facts, "optimizers": dict(saved.optimizers), "arrays": sums}
    write_text(writing / "manifest.json", json.dumps(manifest, indent=1))
    shutil.rmtree(final, ignore_errors=True)
    try:
        os.replace(writing, final)
    except OSError as error:
        raise RooftopError("checkpoints", str(final), f"a place that can be written ({error.strerror})") from None
    for old in sorted(_steps(folder))[:-_KEPT]:
        shutil.rmtree(folder / str(old), ignore_errors=True)
    return final


def restore(folder: Path) -> Saved | None:
    """The newest whole checkpoint below ``folder``; None if there are none. A damaged one is passed over.

    Raises RooftopError where all are damaged: a run that began anew would write over them.
    """
    steps = sorted(_steps(folder), reverse=True)
    for batch in steps:
        found = _read(folder / str(batch))
        if found is not None:
            return found
    if steps:
        raise RooftopError("checkpoints", str(folder), f"a whole one (all {len(steps)} are damaged), or another folder")
    return None


def require_tables(saved: Saved, tables: Tables) -> None:
    """Raises RooftopError unless the checkpoint is of these tables and of optimizers of these kinds."""
    names = [table.name for table in tables.tables]
    for name in saved.tables:
        if name not in names:
            raise RooftopError("tables", f"no {name}", "the tables of the checkpoint")
    for table in tables.tables:
        if table.name not in saved.tables:
            raise RooftopError("tables", table.name, f"the tables of the checkpoint: {', '.join(saved.tables)}")
        there = saved.tables[table.name].shape
        if there != (table.vocabulary, table.width):
            given = f"{table.vocabulary} x {table.width}"
            raise RooftopError(f"tables.{table.name}", given, "{} x {}, as in the checkpoint".format(*there))
        kind = saved.optimizers.get(table.name, table.optimizer.kind)
        if kind != table.optimizer.kind:
            raise RooftopError(f"tables.{table.name}.optimizer", table.optimizer.kind, f"{kind}, as in the checkpoint")


def stacked(
    stacking: Stacking, saved: Saved, beginnings: Mapping[str, tuple[float, ...]]
) -> tuple[dict[str, Array], dict[str, tuple[Array, ...]]]:
    """The checkpoint's tables and slots as stacks of ``stacking``; padding of slots holds their ``beginnings``.

    Raises RooftopError where the checkpoint is of other tables.
    """
    slots: dict[str, tuple[Array, ...]] = {}
    for stack in stacking.stacks:
        members = [place.table for place in stack.places]
        packed = []
        for index, value in enumerate(beginnings[stack.name]):
            narrow = stack.optimizer.slots(stack.width)[index] == 1 != stack.width
            own = {
                table.name: _slot(saved, table.name, index, table.width if narrow else 1)
                for table in stacking.tables.tables
                if table in members
            }
            # Packing wants all tables; those of other stacks lend their values.
            every = {name: own.get(name, array) for name, array in saved.tables.items()}
            array = pack(stacking, every, value)[stack.name]
            packed.append(array[:, :, :1].copy() if narrow else array)
        slots[stack.name] = tuple(packed)
    return pack(stacking, saved.tables), slots


def unstacked(
    stacking: Stacking, tables: Mapping[str, Array], slots: Mapping[str, tuple[Array, ...]]
) -> tuple[dict[str, Array], dict[str, tuple[Array, ...]]]:
    """Tables, and their slots, of stacks and theirs: by table."""
    found: dict[str, tuple[Array, ...]] = {}
    for stack in stacking.stacks:
        names = [place.table.name for place in stack.places]
        parts = [unpack(stacking, {**tables, stack.name: slot}) for slot in slots[stack.name]]
        found |= {name: tuple(part[name] for part in parts) for name in names}
    return unpack(stacking, tables), found


def _slot(saved: Saved, table: str, index: int, width: int) -> Array:
    if table not in saved.slots or index >= len(saved.slots[table]):
        raise RooftopError("checkpoint", f"slots of {table}", "the optimizer that the tables file names")
    return np.repeat(saved.slots[table][index], width, axis=1)


def _steps(folder: Path) -> list[int]:
    return [int(path.name) for path in folder.iterdir() if path.name.isdecimal()] if folder.is_dir() else []


def _read(folder: Path) -> Saved | None:
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        step, batch = int(manifest["step"]), int(manifest["batch"])
        arrays = {}
        for name, entry in manifest["arrays"].items():
            data = (folder / entry["file"]).read_bytes()
            if hashlib.sha256(data).hexdigest() != entry["sha256"]:
                return None
            arrays[name] = np.load(io.BytesIO(data), allow_pickle=False)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None

    def named(kind: str) -> dict[str, Array]:
        return {name.partition(".")[2]: array for name, array in arrays.items() if name.partition(".")[0] == kind}

    tables = named("table")
    slots = {name: list[Array]() for name in tables}
    index = 0
    while own := named(f"slot{index}"):
        for name, array in own.items():
            slots[name].append(array)
        index += 1
    return Saved(
        step=step,
        batch=batch,
        tables=tables,
        slots={name: tuple(own) for name, own in slots.items()},
        dense=named("dense"),
        optimizers=manifest.get("optimizers", {}),
        **{name: manifest.get(name) for name in _FACTS},
    )
