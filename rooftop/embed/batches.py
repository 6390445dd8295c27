"""Batches from Parquet files: a column of ids, or of lists of ids, for each feature."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rooftop.core.errors import RooftopError, unknown
from rooftop.models.embedding_tables.tables import Tables

#: Suffix of the column of a weighted feature's weights.
WEIGHTS = "_weights"


def parquet_batches(files: Sequence[Path], tables: Tables, batch: int) -> Iterator[dict[str, Any]]:
    """Yield whole batches of ``batch`` samples for ``Preprocessor``, in the order of the files.

    A feature's ids are the column of its name, its weights the column NAME_weights. The remainder of a file is carried
    into the next file; a final partial batch is dropped. Raises RooftopError for a file or column that cannot be read.
    """
    pa, pq = _arrow()
    columns = [feature.name for feature in tables.features]
    columns += [feature.name + WEIGHTS for feature in tables.features if feature.weighted]
    rest: Any = None
    for file in files:
        try:
            opened = pq.ParquetFile(file)
            for column in columns:
                if column not in opened.schema_arrow.names:
                    raise unknown(f"data: column of {file}", column, opened.schema_arrow.names)
            for read in opened.iter_batches(batch_size=batch, columns=columns):
                table = pa.Table.from_batches([read])
                rest = table if rest is None else pa.concat_tables([rest, table])
                while rest.num_rows >= batch:
                    yield _inputs(rest.slice(0, batch), tables)
                    rest = rest.slice(batch)
        except (OSError, pa.ArrowException) as error:
            raise RooftopError("data", str(file), f"a Parquet file ({' '.join(str(error).split())})") from None


def count_samples(files: Sequence[Path]) -> int:
    """Count the rows of all files by their footers. Raises RooftopError for a file that cannot be read."""
    pa, pq = _arrow()
    rows = 0
    for file in files:
        try:
            rows += pq.read_metadata(file).num_rows
        except (OSError, pa.ArrowException) as error:
            raise RooftopError("data", str(file), f"a Parquet file ({' '.join(str(error).split())})") from None
    return rows


def _arrow() -> tuple[Any, Any]:
    """Import pyarrow and its Parquet module. Raises RooftopError if it is not installed."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise RooftopError("data", "Parquet", "pyarrow to be installed (pip install 'rooftop[parquet]')") from None
    return pa, pq


def _inputs(table: Any, tables: Tables) -> dict[str, Any]:
    return {
        feature.name: (table.column(feature.name), table.column(feature.name + WEIGHTS))
        if feature.weighted
        else table.column(feature.name)
        for feature in tables.features
    }
