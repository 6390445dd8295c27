"""Reading a table of published measurements: the columns, and rows whose bad cells are named in one line."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rooftop.core.errors import RooftopError
from rooftop.core.files import read_text
from rooftop.core.quantities import parse_count, parse_quantity

#: Columns that tell one run from another; the measurement columns follow.
RUN_COLUMNS: tuple[str, ...] = (
    *("source", "model", "params", "layers", "d_model", "d_ff", "heads", "kv_heads", "d_head", "vocab"),
    *("seq_len", "global_batch_seqs", "chip", "num_chips", "dp", "fsdp", "tp", "sp", "pp", "microbatch", "interleave"),
    *("dtype", "phase", "recompute", "where_found", "mlp_matrices", "tied_embeddings", "experts", "active_experts"),
)
COLUMNS: tuple[str, ...] = (*RUN_COLUMNS, "measured_metric", "measured_value", "unit")
#: Names that tables have for the same columns.
_ALIASES: Mapping[str, str] = {
    "gpu": "chip", "gpus": "num_chips", "num_gpus": "num_chips", "gbs": "global_batch_seqs", "seq": "seq_len",
    "metric": "measured_metric", "value": "measured_value",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TableRow:
    """One line of a table: a measurement of one run. ``number`` is its line in the file; the header is line 1.

    An empty cell means unknown, and so does a column that the table does not have. ``fault`` is the reason why the line
    has no cells of its own. The readers raise RooftopError with file, line and column.
    """

    table: str
    number: int
    cells: Mapping[str, str]
    fault: RooftopError | None = None

    def field(self, column: str) -> str:
        """Name of a cell in errors: 'other.csv line 7 num_chips'."""
        return f"{self.table} line {self.number} {column}"

    def error(self, column: str, accepted: str) -> RooftopError:
        """A RooftopError for the cell in ``column``."""
        return RooftopError(self.field(column), self.cells[column], accepted)

    def text(self, column: str) -> str | None:
        """The cell, or None where it is empty."""
        return self.cells[column] or None

    def required(self, column: str) -> str:
        """The cell, which may not be empty."""
        if not self.cells[column]:
            raise self.error(column, "a value: this column may not be empty")
        return self.cells[column]

    def count(self, column: str) -> int | None:
        """A positive whole number, or None where the cell is empty."""
        return parse_count(self.cells[column], self.field(column)) if self.cells[column] else None

    def required_count(self, column: str) -> int:
        """A positive whole number; the cell may not be empty."""
        return parse_count(self.required(column), self.field(column))

    def value(self, column: str) -> float:
        """A positive number; the cell may not be empty."""
        return parse_quantity(self.required(column), self.field(column))

    def choice(self, column: str, words: Mapping[str, bool]) -> bool | None:
        """Return the value of ``words`` for the cell, or None if it is empty."""
        word = self.text(column)
        if word is None:
            return None
        if word.lower() not in words:
            raise self.error(column, f"{' or '.join(words)}, or nothing")
        return words[word.lower()]


def table_columns(path: Path) -> list[str]:
    """The header of a CSV file. Raises RooftopError on a file that cannot be read."""
    try:
        return [column.strip() for column in next(csv.reader(io.StringIO(_content(path), newline="")), [])]
    except csv.Error as error:
        raise RooftopError("table of runs", str(path), f"a CSV file ({error})") from None


def read_table(
    path: Path | None = None, *, columns: Sequence[str] = COLUMNS, packaged: str = "measured_runs.csv"
) -> list[TableRow]:
    """The rows of a CSV table of measurements; without a path, of the table ``packaged`` that comes with rooftop.

    Further columns are kept in ``cells``. A row with more or fewer cells than the header has a ``fault``. Raises
    RooftopError on a file that cannot be read, and on one with none of the columns.
    """
    if path is None:
        name = packaged
        content = Path(__file__).with_name("data").joinpath(name).read_text(encoding="utf-8")
    else:
        name, content = str(path), _content(path)
    try:
        return _rows(name, content, columns)
    except csv.Error as error:
        raise RooftopError("table of runs", name, f"a CSV file ({error})") from None


def _content(path: Path) -> str:
    try:
        return read_text(path, encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise RooftopError("table of runs", str(path), f"a CSV file that can be read ({reason})") from None


def _rows(name: str, content: str, columns: Sequence[str]) -> list[TableRow]:
    reader = csv.reader(io.StringIO(content, newline=""), strict=True)
    header = [column.strip() for column in next(reader, [])]
    aliases = _ALIASES if columns is COLUMNS else {}
    header = [column if column in columns else aliases.get(column.lower(), column) for column in header]
    if not set(header) & set(columns):
        raise RooftopError(f"{name} header", ",".join(header), f"some of the columns {', '.join(columns)}")
    # Tables of training alone say no phase.
    phase = {"phase": "train"} if columns is COLUMNS and "phase" not in header else {}
    empty = dict.fromkeys(columns, "") | phase
    rows = []
    for cells in reader:
        if not any(cell.strip() for cell in cells):
            continue
        fault = None
        if len(cells) != len(header):
            accepted = f"{len(header)} cells, as in the header"
            fault = RooftopError(f"{name} line {reader.line_num}", f"{len(cells)} cells", accepted)
        stripped = {column: cell.strip() for column, cell in zip(header, cells, strict=False)}
        rows.append(TableRow(table=name, number=reader.line_num, cells=empty | stripped, fault=fault))
    return rows
