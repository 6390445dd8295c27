"""Inputs: ids in any accepted form become values and row splits; batches of them from Parquet files.

Forms are ragged, SciPy, Arrow, padded dense, one id per sample, and sequences. CSR, Arrow lists and dense arrays
without padding are not copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32, Integer
from numpy.typing import ArrayLike, NDArray

from rooftop.core.errors import RooftopError, unknown
from rooftop.core.extras import require
from rooftop.models.embedding_tables.tables import Feature, Tables

#: Marks a place without an id in a padded dense array.
PAD = -1
#: Suffix of the column of a weighted feature's weights.
WEIGHTS = "_weights"
_FORMS = (
    "Ragged, (values, row_splits), a SciPy matrix, an Arrow list array, a padded 2-D array of ids, a 1-D array with"
    " one id per sample, or lists; with weights, a pair (ids, weights)"
)
_ARROW = "an Arrow array of whole numbers or of lists of them"


@dataclass(frozen=True, kw_only=True)
class Ragged:
    """Ids of a batch: sample b has ``values[row_splits[b]:row_splits[b + 1]]``, and ``weights`` likewise (or None).

    Dims: N ids, B samples.
    """

    values: Integer[np.ndarray, " N"]
    row_splits: Integer[np.ndarray, " B+1"]
    weights: Float32[np.ndarray, " N"] | None = None

    @property
    def rows(self) -> int:
        """B, the number of samples."""
        return len(self.row_splits) - 1


def ragged(values: ArrayLike, row_splits: ArrayLike, weights: ArrayLike | None = None, *, name: str = "ids") -> Ragged:
    """Check values, row splits and weights against one another. Raises RooftopError, naming ``name``."""
    ids = _ids(values, name)
    splits = np.asarray(row_splits)
    if ids.ndim != 1:
        raise RooftopError(name, f"values of {ids.ndim} dims", "values of one dim")
    if splits.ndim != 1 or splits.dtype.kind not in "iu" or not len(splits):
        raise RooftopError(f"{name}: row_splits", _kind(splits), "whole numbers in one dim, 0 first")
    if splits[0] != 0 or splits[-1] != len(ids):
        problem = f"from {splits[0]} to {splits[-1]}"
        raise RooftopError(f"{name}: row_splits", problem, f"from 0 to {len(ids)}, the number of values")
    if splits.dtype.kind == "u":
        splits = splits.astype(np.int64)
    falls = splits[1:] < splits[:-1]
    # Faster than any().
    if np.count_nonzero(falls):
        at = int(np.argmax(falls))
        problem = f"{splits[at]} and then {splits[at + 1]} at {at}"
        raise RooftopError(f"{name}: row_splits", problem, "numbers that do not fall")
    return Ragged(values=ids, row_splits=splits, weights=_weights(weights, len(ids), name))


def as_ragged(ids: Any, feature: Feature) -> Ragged:
    """Ids of ``feature`` in any accepted form, a row per sample (of a sequence: per position).

    Weighted features come as a pair (ids, weights) of the same form, as a ``Ragged`` with weights or as a SciPy
    matrix, whose columns are the ids and whose entries the weights. Raises RooftopError.
    """
    name = f"features.{feature.name}"
    as_ragged = ids if isinstance(ids, Ragged) else _any(ids, feature, name)
    if isinstance(ids, Ragged):
        as_ragged = ragged(ids.values, ids.row_splits, ids.weights, name=name)
    if feature.weighted and as_ragged.weights is None:
        raise RooftopError(name, "ids without weights", "ids and weights: the feature is weighted")
    if not feature.weighted and as_ragged.weights is not None:
        raise RooftopError(name, "ids and weights", "ids alone: the feature is not weighted")
    if feature.length is None or _is_dense(ids):
        return as_ragged
    return _positions(as_ragged, feature.length, name)


def _any(raw: Any, feature: Feature, name: str) -> Ragged:
    if type(raw).__module__.startswith("scipy.sparse"):
        return from_scipy(raw, weighted=feature.weighted, name=name)
    ids, weights = raw, None
    if isinstance(raw, tuple) and len(raw) == 2:
        if feature.weighted:
            ids, weights = raw
            if isinstance(ids, tuple) and len(ids) == 2:
                return ragged(ids[0], ids[1], weights, name=name)
        else:
            return ragged(raw[0], raw[1], name=name)
    if isinstance(raw, tuple) and len(raw) == 3:
        return ragged(*raw, name=name)
    if _is_arrow(ids):
        return from_arrow(ids, weights, name=name)
    if isinstance(ids, np.ndarray) and ids.dtype != object:
        return from_dense(ids, weights, length=feature.length, name=name)
    if isinstance(ids, Sequence | np.ndarray) and not isinstance(ids, str | bytes):
        return from_lists(ids, weights, name=name)
    raise RooftopError(name, type(raw).__name__, _FORMS)


def from_scipy(matrix: Any, *, weighted: bool = False, name: str = "ids") -> Ragged:
    """A SciPy CSR or COO matrix of dims [B, V]: columns are ids, entries are weights if ``weighted``.

    CSR is not copied. The entries of a COO matrix keep their order within a sample.
    """
    if matrix.ndim != 2 or matrix.format not in ("csr", "coo"):
        raise RooftopError(name, f"a {matrix.format} array of {matrix.ndim} dims", "a CSR or COO matrix of 2 dims")
    if matrix.format == "csr":
        return ragged(matrix.indices, matrix.indptr, matrix.data if weighted else None, name=name)
    rows, ids, weights = matrix.row, matrix.col, matrix.data
    if (rows[1:] < rows[:-1]).any():
        order = np.argsort(rows, kind="stable")
        rows, ids, weights = rows[order], ids[order], weights[order]
    splits = np.searchsorted(rows, np.arange(matrix.shape[0] + 1))
    return ragged(ids, splits, weights if weighted else None, name=name)


def from_arrow(array: Any, weights: Any = None, *, name: str = "ids") -> Ragged:
    """An Arrow list array (pyarrow, polars, pandas); a null is a sample without ids. What lies as Arrow is not copied.

    An array of whole numbers is one id per sample, and a null there a sample without one.
    """
    pa, _ = _arrow()
    values, splits = _arrow_parts(pa, array, name)
    if weights is None:
        return ragged(values, splits, name=name)
    weight_values, weight_splits = _arrow_parts(pa, weights, f"{name}: weights")
    if not np.array_equal(splits, weight_splits):
        raise RooftopError(f"{name}: weights", "lists of other lengths", "as many weights as ids in every sample")
    return ragged(values, splits, weight_values, name=name)


def _arrow_parts(pa: Any, array: Any, name: str) -> tuple[NDArray[Any], NDArray[Any]]:
    """Values and row splits of an Arrow array."""
    if not isinstance(array, pa.Array | pa.ChunkedArray):
        try:
            array = pa.chunked_array(array) if hasattr(array, "__arrow_c_stream__") else pa.array(array)
        except pa.ArrowException as error:
            reason = " ".join(str(error).split())
            raise RooftopError(name, f"a column that Arrow does not take ({reason})", _ARROW) from None
    if isinstance(array, pa.ChunkedArray):
        array = array.chunk(0) if array.num_chunks == 1 else array.combine_chunks()
    kind = array.type
    if pa.types.is_fixed_size_list(kind):
        array = array.cast(pa.list_(kind.value_type))
        kind = array.type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        if array.null_count:
            # A null may have a length in its offsets; flatten() leaves its values out.
            lengths = array.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
            splits = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
            values = array.flatten()
        else:
            offsets = array.offsets.to_numpy()
            splits = offsets - offsets[0] if len(offsets) and offsets[0] else offsets
            values = array.values.slice(offsets[0], offsets[-1] - offsets[0]) if len(offsets) else array.values
            splits = splits if len(splits) else np.zeros(1, np.int64)
        if values.null_count:
            raise RooftopError(name, f"{values.null_count} nulls inside lists", "lists without nulls")
    else:
        splits = np.concatenate([[0], np.cumsum(np.asarray(array.is_valid()), dtype=np.int64)])
        values = array.drop_null()
    if not (pa.types.is_integer(values.type) or pa.types.is_floating(values.type)):
        raise RooftopError(name, str(kind), _ARROW)
    return values.to_numpy(), splits


def from_dense(array: Any, weights: Any = None, *, length: int | None = None, name: str = "ids") -> Ragged:
    """An array of dims [B, most ids], PAD where there is none, or of dims [B], one id per sample.

    With ``length`` L the array is that of a sequence, of dims [B, L], and gives B x L rows. An array without padding
    is not copied.
    """
    ids = _ids(array, name)
    if length is not None and (ids.ndim != 2 or ids.shape[1] != length):
        raise RooftopError(name, f"an array of shape {ids.shape}", f"shape (batch, {length}): a sequence")
    if ids.ndim not in (1, 2):
        raise RooftopError(name, f"an array of {ids.ndim} dims", "one dim or two")
    row_weights = None
    if weights is not None:
        row_weights = np.asarray(weights)
        if row_weights.shape != ids.shape:
            raise RooftopError(f"{name}: weights", f"shape {row_weights.shape}", f"the shape of the ids, {ids.shape}")
    width = 1 if ids.ndim == 1 or length is not None else ids.shape[1]
    rows = ids.size if width == 1 else ids.shape[0]
    there = ids != PAD if ids.dtype.kind == "i" else None
    if there is None or there.all():
        splits = np.arange(rows + 1, dtype=np.int64) * width
        return ragged(ids.reshape(-1), splits, None if row_weights is None else row_weights.reshape(-1), name=name)
    counts = there.reshape(rows, width).sum(axis=1)
    splits = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
    return ragged(ids[there], splits, None if row_weights is None else row_weights[there], name=name)


def from_lists(lists: Sequence[Any] | NDArray[Any], weights: Any = None, *, name: str = "ids") -> Ragged:
    """A sequence with, for each sample, a sequence of ids (lists, or arrays of any length)."""
    try:
        splits = np.cumsum([0, *(len(sample) for sample in lists)], dtype=np.int64)
        values = _flat(lists)
        flat_weights = None
        if weights is not None:
            lengths = [len(sample) for sample in weights]
            if not np.array_equal(np.cumsum([0, *lengths]), splits):
                raise RooftopError(
                    f"{name}: weights", "lists of other lengths", "as many weights as ids in every sample"
                )
            flat_weights = _flat(weights)
    except (TypeError, ValueError, OverflowError) as error:
        raise RooftopError(name, f"lists that are no lists of numbers ({error})", "a list of ids per sample") from None
    if not len(values):
        values = values.astype(np.int64)
    return ragged(values, splits, flat_weights, name=name)


def _flat(lists: Any) -> NDArray[Any]:
    if len(lists) and all(isinstance(sample, np.ndarray) for sample in lists):
        return np.concatenate(list(lists))
    return np.asarray(list(chain.from_iterable(lists)))


def _positions(ragged: Ragged, length: int, name: str) -> Ragged:
    """Lists of at most ``length`` ids as sequences: a row per position, the last ones empty."""
    lengths = np.diff(ragged.row_splits)
    if len(lengths) and lengths.max() > length:
        at = int(np.argmax(lengths > length))
        raise RooftopError(name, f"{lengths[at]} ids in sample {at}", f"at most {length} ids: the sequence's length")
    there = np.arange(length) < lengths[:, None]
    splits = np.concatenate([[0], np.cumsum(there.reshape(-1), dtype=np.int64)])
    return Ragged(values=ragged.values, row_splits=splits, weights=ragged.weights)


def _is_dense(ids: object) -> bool:
    array = ids[0] if isinstance(ids, tuple) else ids
    return isinstance(array, np.ndarray) and array.ndim == 2


def _is_arrow(ids: object) -> bool:
    """True if pyarrow takes it as it is: columns of pandas before 3.0 say so of their insides alone."""
    offers = ("__arrow_c_array__", "__arrow_c_stream__", "__arrow_array__")
    return type(ids).__module__.startswith("pandas.") or any(hasattr(ids, name) for name in offers)


def _ids(values: ArrayLike, name: str) -> Integer[np.ndarray, "..."]:
    try:
        ids = np.asarray(values)
    except ValueError as error:
        raise RooftopError(name, f"values that are no array ({error})", "whole numbers") from None
    if ids.dtype.kind not in "iu":
        if ids.size == 0 and ids.dtype.kind == "f":
            return ids.astype(np.int64)
        raise RooftopError(name, f"{_kind(ids)} ids", "whole-number ids")
    # The numba kernel reads the bits as they are.
    return ids if ids.dtype.isnative else ids.astype(ids.dtype.newbyteorder("="))


def _weights(weights: ArrayLike | None, count: int, name: str) -> Float32[np.ndarray, " count"] | None:
    if weights is None:
        return None
    result = np.asarray(weights)
    if result.dtype.kind not in "iuf" or result.shape != (count,):
        raise RooftopError(f"{name}: weights", f"{_kind(result)} of shape {result.shape}", f"{count} numbers")
    result = np.ascontiguousarray(result, dtype=np.float32)
    if not np.isfinite(result).all():
        at = int(np.argmin(np.isfinite(result)))
        raise RooftopError(f"{name}: weights", f"{result[at]} at {at}", "finite numbers")
    return result


def _kind(array: NDArray[Any]) -> str:
    return "no numbers" if array.dtype.kind in "OUS" else str(array.dtype)


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
            raise RooftopError("data", str(file), f"a Parquet file ({_reason(error)})") from None


def _reason(error: Exception) -> str:
    """The reason of pyarrow's error on one line; of a missing file without its path, which the line has."""
    if isinstance(error, FileNotFoundError):
        return "No such file or directory"
    return " ".join(str(error).split())


def count_samples(files: Sequence[Path]) -> int:
    """Count the rows of all files by their footers. Raises RooftopError for a file that cannot be read."""
    pa, pq = _arrow()
    rows = 0
    for file in files:
        try:
            rows += pq.read_metadata(file).num_rows
        except (OSError, pa.ArrowException) as error:
            raise RooftopError("data", str(file), f"a Parquet file ({_reason(error)})") from None
    return rows


def _arrow() -> tuple[Any, Any]:
    """Import pyarrow and its Parquet module. Raises RooftopError if it is not installed."""
    require("parquet", "pyarrow")
    import pyarrow as pa
    import pyarrow.parquet as pq

    return pa, pq


def _inputs(table: Any, tables: Tables) -> dict[str, Any]:
    return {
        feature.name: (table.column(feature.name), table.column(feature.name + WEIGHTS))
        if feature.weighted
        else table.column(feature.name)
        for feature in tables.features
    }
