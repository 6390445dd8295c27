"""Tables stored and looked up as one: stacking, padding, rotation, and each table back.

A stack is sharded over C SparseCores by modulo: row r of its table of rotation k lies on SparseCore (r + k) mod C, at
local row r div C + the table's offset in the shard. As stored, a stack has dims [C, rows per SparseCore, W].

Source: the SparseCore deep dive, sections 2, 7 and 10; the paddings are those of the public preprocessing libraries.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rooftop.core.errors import RooftopError, unknown
from rooftop.core.rounding import next_multiple
from rooftop.models.embedding_tables.tables import MOST_ROWS, EmbeddingTable, Feature, TableOptimizer, Tables

#: Floats of a row, and rows of a table on one SparseCore, are padded to multiples of this (32 bytes).
ALIGNMENT = 8
#: Activations of a stack that one SparseCore may hold, and tables of a stack (the deep dive's 5 to 100, section 2).
ACTIVATION_BYTES = 2 << 20
MOST_TABLES = 100
#: Bytes of a float of a table and of an optimizer's slots.
_FLOAT = 4


@dataclass(frozen=True, kw_only=True)
class StackPlace:
    """Rows of a table in its stack: ``rows`` local rows from ``offset`` on, on every SparseCore.

    SparseCore (id + ``rotation``) mod C has the row of ``id``, at local row ``offset`` + id div C.
    """

    table: EmbeddingTable
    offset: int
    rows: int
    rotation: int
    features: tuple[Feature, ...]


@dataclass(frozen=True, kw_only=True)
class Stack:
    """Tables that are stored and looked up as one. ``width`` is padded; a table's features are looked up in order."""

    name: str
    width: int
    places: tuple[StackPlace, ...]

    @property
    def optimizer(self) -> TableOptimizer:
        """The optimizer that all tables of the stack share."""
        return self.places[0].table.optimizer

    @property
    def combiner(self) -> str:
        """The combiner that all tables of the stack share."""
        return self.places[0].table.combiner

    @property
    def rows(self) -> int:
        """Rows on one SparseCore."""
        return sum(place.rows for place in self.places)

    @property
    def features(self) -> tuple[Feature, ...]:
        """All features, those of one table side by side: the order of the samples of a SparseCore."""
        return tuple(feature for place in self.places for feature in place.features)

    @property
    def rows_per_sample(self) -> int:
        """Rows of activations per sample of the input."""
        return sum(feature.rows_per_sample for feature in self.features)


@dataclass(frozen=True, kw_only=True)
class Stacking:
    """All stacks of a model, over ``cores`` SparseCores of which a device has ``cores_per_device``."""

    tables: Tables
    cores: int
    cores_per_device: int
    stacks: tuple[Stack, ...]

    @property
    def devices(self) -> int:
        """Devices that the tables lie on."""
        return self.cores // self.cores_per_device

    def stack(self, name: str) -> Stack:
        """A stack by its name. Raises RooftopError."""
        for stack in self.stacks:
            if stack.name == name:
                return stack
        raise unknown("stack", name, [stack.name for stack in self.stacks])

    def place(self, table: str) -> tuple[Stack, StackPlace]:
        """The stack of a table and its place there. Raises RooftopError."""
        for stack in self.stacks:
            for place in stack.places:
                if place.table.name == table:
                    return stack, place
        raise unknown("table", table, [table.name for table in self.tables.tables])


def stack_tables(
    tables: Tables,
    *,
    cores: int,
    cores_per_device: int,
    batch: int,
    activation_bytes: int = ACTIVATION_BYTES,
    most_tables: int = MOST_TABLES,
) -> Stacking:
    """Stack the tables that agree in padded width, optimizer, combiner and quantisation.

    In the order of the tables, one joins the first stack where the activations that a SparseCore holds of it stay
    within ``activation_bytes`` and the tables within ``most_tables``. ``batch`` is B, the samples of a step on all
    devices; a SparseCore holds B x rows per sample / ``cores`` activations of the padded width, in float32. With
    ``disable_table_stacking`` every table is a stack of its own. Raises RooftopError.
    """
    for field, count in (("cores", cores), ("cores_per_device", cores_per_device), ("batch", batch)):
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise RooftopError(field, count, "a whole number of at least 1")
    if cores % cores_per_device:
        raise RooftopError("cores", cores, f"a multiple of cores_per_device, {cores_per_device}")
    # A device's samples are split over its SparseCores: what does not divide is held, and refused, by preprocessing.
    bytes_of = {
        table.name: next_multiple(table.width, ALIGNMENT) * _FLOAT * (batch * _rows_per_sample(tables, table) // cores)
        for table in tables.tables
    }
    groups: dict[object, list[list[EmbeddingTable]]] = {}
    for table in tables.tables:
        alike = (next_multiple(table.width, ALIGNMENT), table.optimizer, table.combiner, table.quantization)
        key: object = table.name if tables.config.disable_table_stacking else alike
        candidates = groups.setdefault(key, [])
        for group in candidates:
            used = sum(bytes_of[member.name] for member in group)
            if used + bytes_of[table.name] <= activation_bytes and len(group) < most_tables:
                group.append(table)
                break
        else:
            candidates.append([table])
    stacks = [_stack(tables, group, cores, cores_per_device) for kind in groups.values() for group in kind]
    return Stacking(tables=tables, cores=cores, cores_per_device=cores_per_device, stacks=tuple(stacks))


def _rows_per_sample(tables: Tables, table: EmbeddingTable) -> int:
    return sum(feature.rows_per_sample for feature in tables.features_of(table.name))


def _stack(tables: Tables, members: Iterable[EmbeddingTable], cores: int, cores_per_device: int) -> Stack:
    places = list[StackPlace]()
    offset = 0
    for index, table in enumerate(members):
        rows = next_multiple(table.vocabulary, ALIGNMENT * cores) // cores
        rotation = index * cores_per_device % cores
        features = tables.features_of(table.name)
        places.append(StackPlace(table=table, offset=offset, rows=rows, rotation=rotation, features=features))
        offset += rows
    name = _stack_name([place.table.name for place in places])
    if offset * cores > MOST_ROWS:
        raise RooftopError(f"stack {name}", offset * cores, f"at most {MOST_ROWS} rows: ids have 32 bits")
    return Stack(name=name, width=next_multiple(places[0].table.width, ALIGNMENT), places=tuple(places))


def _stack_name(names: list[str]) -> str:
    """The names joined, or their beginning and a digest: a stack's name is a part of file names and scopes."""
    joined = "+".join(names)
    if len(joined) <= 60:
        return joined
    return f"{joined[:40]}...{hashlib.sha256(joined.encode()).hexdigest()[:12]}"


def pack(stacking: Stacking, tables: Mapping[str, NDArray[Any]], padding: float = 0.0) -> dict[str, NDArray[Any]]:
    """Stacks, each of dims [C, rows per SparseCore, padded W], of whole tables, each of dims [V, W].

    What is padding holds ``padding``. Raises RooftopError if a table is missing, unknown or has another shape.
    """
    names = [table.name for table in stacking.tables.tables]
    for name in tables:
        if name not in names:
            raise unknown("table", name, names)
    packed = {}
    for stack in stacking.stacks:
        dtypes = [np.asarray(tables[p.table.name]).dtype for p in stack.places if p.table.name in tables]
        out = np.full((stacking.cores, stack.rows, stack.width), padding, np.result_type(*dtypes) if dtypes else None)
        for place in stack.places:
            table = place.table
            values = np.asarray(tables[table.name]) if table.name in tables else None
            if values is None or values.shape != (table.vocabulary, table.width):
                shape = "no such table" if values is None else values.shape
                raise RooftopError(f"table {table.name}", shape, f"an array of shape {(table.vocabulary, table.width)}")
            whole = np.full((place.rows * stacking.cores, stack.width), padding, out.dtype)
            whole[: table.vocabulary, : table.width] = values
            shards = whole.reshape(place.rows, stacking.cores, stack.width).swapaxes(0, 1)
            out[:, place.offset : place.offset + place.rows] = np.roll(shards, place.rotation, axis=0)
        packed[stack.name] = out
    return packed


def unpack(stacking: Stacking, stacks: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Each table back, of dims [V, W], from its stack of dims [C, rows per SparseCore, padded W].

    Arrays of optimizer slots with one float per row have a last dim of 1 there, and here. Raises RooftopError.
    """
    unpacked = {}
    for stack in stacking.stacks:
        if stack.name not in stacks:
            raise RooftopError("stacks", f"no {stack.name}", f"all of {', '.join(one.name for one in stacking.stacks)}")
        array = np.asarray(stacks[stack.name])
        if array.ndim != 3 or array.shape[:2] != (stacking.cores, stack.rows) or array.shape[2] not in (1, stack.width):
            raise RooftopError(
                f"stack {stack.name}", array.shape, f"an array of shape {(stacking.cores, stack.rows, stack.width)}"
            )
        for place in stack.places:
            shards = np.roll(array[:, place.offset : place.offset + place.rows], -place.rotation, axis=0)
            whole = shards.swapaxes(0, 1).reshape(-1, array.shape[2])
            unpacked[place.table.name] = whole[: place.table.vocabulary, : place.table.width].copy()
    return {table.name: unpacked[table.name] for table in stacking.tables.tables}


@dataclass(frozen=True, kw_only=True)
class StackReport:
    """Memory of a stack. Bytes are those of all SparseCores together; ``waste`` is padding / stored, 0 to 1."""

    name: str
    tables: tuple[str, ...]
    width: int
    rows: int
    table_bytes: int
    slot_bytes: int
    padding_bytes: int
    waste: float
    activation_bytes_per_core: int


def report(stacking: Stacking, *, batch: int) -> list[StackReport]:
    """Memory of each stack: its tables, the optimizer's slots, the padding, and a SparseCore's activations.

    A slot with one float per row is stored padded to ALIGNMENT floats, as rows of a table are.
    """
    reports = []
    for stack in stacking.stacks:
        rows = stack.rows * stacking.cores
        useful = slots = useful_slots = 0
        for place in stack.places:
            useful += place.table.vocabulary * place.table.width * _FLOAT
            useful_slots += place.table.vocabulary * sum(stack.optimizer.slots(place.table.width)) * _FLOAT
        slots = rows * sum(next_multiple(floats, ALIGNMENT) for floats in stack.optimizer.slots(stack.width)) * _FLOAT
        stored = rows * stack.width * _FLOAT
        padding = stored + slots - useful - useful_slots
        reports.append(
            StackReport(
                name=stack.name,
                tables=tuple(place.table.name for place in stack.places),
                width=stack.width,
                rows=rows,
                table_bytes=stored,
                slot_bytes=slots,
                padding_bytes=padding,
                waste=padding / (stored + slots),
                activation_bytes_per_core=math.ceil(batch * stack.rows_per_sample / stacking.cores)
                * stack.width
                * _FLOAT,
            )
        )
    return reports
