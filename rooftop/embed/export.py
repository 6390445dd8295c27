"""Tables for serving: whole, by name, in float32 as trained or in int8 with a range and the errors of each table.

Post-training quantisation as in section 13 of the SparseCore deep dive: 256 levels from low to high, both included;
values outside are clipped. The range is the one that the table was trained with (simulated quantisation), or that of
its values.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from jaxtyping import Float, Float32, Int8

from rooftop.core.errors import RooftopError, unknown
from rooftop.core.files import load_array, make_folder, read_text, sync, write_bytes, write_text
from rooftop.core.records import Record
from rooftop.models.embedding_tables.tables import Quantization, Tables

LEVELS = 256
#: Dtypes of exported tables.
DTYPES: tuple[str, ...] = ("int8", "f32")


@dataclass(frozen=True, kw_only=True)
class ExportedTable(Record):
    """An entry of tables.json: the file of a table, its shape [V, W] and bytes."""

    file: str
    shape: tuple[int, ...]
    bytes: int


@dataclass(frozen=True, kw_only=True)
class ExportedInt8Table(ExportedTable):
    """A table in int8, with its range and errors; ``relative_error`` is the RMS error over the RMS of the table."""

    low: float
    high: float
    step: float
    max_error: float
    rms_error: float
    relative_error: float
    clipped: int


@dataclass(frozen=True, kw_only=True)
class ExportedTables(Record):
    """The content of tables.json; ``levels`` of tables in int8."""

    sparse = frozenset({"levels"})

    kind: Literal["embed-export"] = "embed-export"
    schema: Literal[1] = 1
    dtype: str
    tables: Mapping[str, ExportedTable]
    levels: int | None = None

    @property
    def quantized(self) -> dict[str, ExportedInt8Table]:
        """The tables in int8, by name."""
        return {name: table for name, table in self.tables.items() if isinstance(table, ExportedInt8Table)}


@dataclass(frozen=True, kw_only=True)
class QuantizedTable:
    """A table as int8 ``codes`` [V, W]: a value is code + 128 steps above ``low``. Errors are of all values."""

    codes: Int8[np.ndarray, "V W"]
    low: float
    high: float
    max_error: float
    rms_error: float
    relative_error: float
    clipped: int

    @property
    def step(self) -> float:
        """Distance of two levels."""
        return (self.high - self.low) / (LEVELS - 1)

    @property
    def values(self) -> Float32[np.ndarray, "V W"]:
        """The table in float32, [V, W]."""
        return _values(self.codes, self.low, self.step)

    def exported(self, file: str) -> ExportedInt8Table:
        """The entry of tables.json of the table in a ``file``."""
        return ExportedInt8Table(
            file=file,
            shape=self.codes.shape,
            bytes=self.codes.nbytes,
            low=self.low,
            high=self.high,
            step=self.step,
            max_error=self.max_error,
            rms_error=self.rms_error,
            relative_error=self.relative_error,
            clipped=self.clipped,
        )


def quantize(table: Float[np.ndarray, "V W"], quantization: Quantization | None = None) -> QuantizedTable:
    """Quantise a table [V, W] to int8. Raises RooftopError for values that are not finite."""
    exact = np.asarray(table, np.float64)
    if not np.isfinite(exact).all():
        raise RooftopError("table", "values that are no finite numbers", "finite values")
    low, high = (
        (float(exact.min()), float(exact.max())) if quantization is None else (quantization.low, quantization.high)
    )
    if low == high:
        # A constant table: level 0 is exact with any step.
        high = low + 1.0
    step = (high - low) / (LEVELS - 1)
    codes = (np.rint((np.clip(exact, low, high) - low) / step) - 128).astype(np.int8)
    error = low + (codes.astype(np.float64) + 128) * step - exact
    rms, exact_rms = math.sqrt(float(np.mean(error**2))), math.sqrt(float(np.mean(exact**2)))
    return QuantizedTable(
        codes=codes,
        low=low,
        high=high,
        max_error=float(np.abs(error).max()),
        rms_error=rms,
        relative_error=rms / exact_rms if exact_rms else 0.0,
        clipped=int(((exact < low) | (exact > high)).sum()),
    )


def export(
    folder: Path, tables: Tables, values: Mapping[str, Float[np.ndarray, "..."]], *, dtype: str = "int8"
) -> ExportedTables:
    """Write each table as ``<index>.npy`` in ``dtype``, and tables.json; return its content. Raises RooftopError."""
    if dtype not in DTYPES:
        raise unknown("dtype", dtype, DTYPES)
    for table in tables.tables:
        if table.name not in values:
            raise RooftopError("checkpoint", f"no table {table.name}", "all tables of the tables file")
        if values[table.name].shape != (table.vocabulary, table.width):
            shape = "{} x {}".format(*values[table.name].shape)
            raise RooftopError(
                f"table {table.name}", shape, f"{table.vocabulary} x {table.width}, as the tables file says"
            )
    try:
        make_folder(folder)
        # The tables of an earlier export count no more; tables.json, written last, makes the new ones count.
        (folder / "tables.json").unlink(missing_ok=True)
        sync(folder)
    except OSError as error:
        raise RooftopError("output", str(folder), f"a folder that can be written ({error.strerror})") from None
    entries: dict[str, ExportedTable] = {}
    for index, table in enumerate(tables.tables):
        array, file = np.asarray(values[table.name], np.float32), f"{index}.npy"
        entry = ExportedTable(file=file, shape=array.shape, bytes=array.nbytes)
        if dtype == "int8":
            quantized = quantize(array, table.quantization)
            array, entry = quantized.codes, quantized.exported(file)
        data = io.BytesIO()
        np.save(data, array, allow_pickle=False)
        write_bytes(folder / file, data.getvalue())
        entries[table.name] = entry
    report = ExportedTables(dtype=dtype, tables=entries, levels=LEVELS if dtype == "int8" else None)
    write_text(folder / "tables.json", json.dumps(report.to_json(), indent=1) + "\n")
    return report


def load(folder: Path) -> dict[str, Float32[np.ndarray, "..."]]:
    """Load the tables of an export, [V, W] float32 each. Raises RooftopError if the folder holds none."""
    try:
        report = json.loads(read_text(folder / "tables.json"))
        tables = {}
        for name, table in report["tables"].items():
            stored = load_array(folder / table["file"], "export")
            is_int8 = report["dtype"] == "int8"
            if stored.dtype != (np.int8 if is_int8 else np.float32):
                raise ValueError(f"{table['file']} has elements of {stored.dtype}")
            tables[name] = _values(stored, float(table["low"]), float(table["step"])) if is_int8 else stored
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise RooftopError("export", str(folder), f"a folder that rooftop exported tables to ({error})") from None
    return tables


def _values(codes: Int8[np.ndarray, "V W"], low: float, step: float) -> Float32[np.ndarray, "V W"]:
    # Python's numbers overflow without a warning.
    largest = float(np.finfo(np.float32).max)
    if not all(abs(value) <= largest for value in (low, low + 255 * step)):
        raise ValueError(f"low {low:g} and step {step:g} give values beyond float32")
    return (low + (codes.astype(np.float64) + 128) * step).astype(np.float32)
