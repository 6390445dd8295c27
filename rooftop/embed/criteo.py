"""Criteo's click logs: a label, 13 counts and 26 hashed categories a line, separated by tabs, any of them missing."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rooftop.embed.criteo_lines import FEATURES, count_lines, count_positives, parse, whole_batches
from rooftop.errors import RooftopError
from rooftop.models.tables import Tables


@dataclass(frozen=True, kw_only=True)
class CriteoBatch:
    """label [B] float32 of 0 and 1; dense [B, 13] float32, log(1 + count); ids by feature, [B] int64 each."""

    label: NDArray[np.float32]
    dense: NDArray[np.float32]
    ids: Mapping[str, NDArray[np.int64]]


def check_features(tables: Tables) -> tuple[str, ...]:
    """The features of ``tables``, all of them columns of these data. Raises RooftopError."""
    for feature in tables.features:
        if feature.name not in FEATURES or feature.weighted or feature.length is not None:
            raise RooftopError(f"features.{feature.name}", feature.name, "a plain feature named C1 to C26")
    return tuple(feature.name for feature in tables.features)


class Lines(NamedTuple):
    """The ``text`` of a batch's lines, behind ``first`` lines of the file."""

    first: int
    text: bytes


def read_lines(path: Path, batch: int, *, start: int = 0) -> Iterator[Lines]:
    """Whole batches of ``batch`` lines, from batch ``start`` on; what is left over at the end of the file is not read.

    Raises RooftopError.
    """
    try:
        with path.open("rb") as file:
            for number, text in enumerate(whole_batches(file, batch, skip=start * batch), start):
                yield Lines(number * batch, text)
    except OSError as error:
        raise RooftopError("data", str(path), f"a file that can be read ({error.strerror})") from None


def parse_lines(lines: Lines, path: Path, tables: Tables, batch: int) -> CriteoBatch:
    """The batch that these lines of the file at ``path`` are.

    A category's id is 1 + its hash modulo (the vocabulary of its table - 1); a missing one is id 0, a missing count 0.
    Raises RooftopError for a line that is none of this format, naming it.
    """
    names = check_features(tables)
    sizes = {name: tables.table(tables.feature(name).table).vocabulary for name in names}
    label, counts, ids = parse(lines.text, batch, sizes, path, lines.first)
    return CriteoBatch(label=label, dense=np.log1p(np.maximum(counts, 0)), ids=ids)


def split_lines(
    lines: Lines, path: Path, tables: Tables, batch: int
) -> tuple[Mapping[str, NDArray[np.int64]], CriteoBatch]:
    """The ids of the batch that these lines are, and the rest of it. Raises RooftopError."""
    found = parse_lines(lines, path, tables, batch)
    return found.ids, replace(found, ids={})


def read_batches(path: Path, tables: Tables, batch: int, *, start: int = 0) -> Iterator[CriteoBatch]:
    """The batches of ``read_lines``, parsed. Raises RooftopError."""
    check_features(tables)
    return (parse_lines(lines, path, tables, batch) for lines in read_lines(path, batch, start=start))


def count_batches(path: Path, batch: int) -> int:
    """Whole batches of a file. Raises RooftopError if it cannot be read."""
    try:
        with path.open("rb") as file:
            return count_lines(file) // batch
    except OSError as error:
        raise RooftopError("data", str(path), f"a file that can be read ({error.strerror})") from None


def require_batches(path: Path, batch: int) -> int:
    """Whole batches of a file, at least one. Raises RooftopError."""
    found = count_batches(path, batch)
    if not found:
        raise RooftopError("data", str(path), f"at least one batch of {batch} lines")
    return found


def digest_first(path: Path, batch: int) -> str:
    """SHA-256 of the lines of a file's first batch: a file that grows keeps it. Raises RooftopError."""
    try:
        with path.open("rb") as file:
            return hashlib.sha256(next(whole_batches(file, batch), b"")).hexdigest()
    except OSError as error:
        raise RooftopError("data", str(path), f"a file that can be read ({error.strerror})") from None


def require_labels(path: Path, batch: int) -> None:
    """Raises RooftopError unless the whole batches of a file have positives and negatives: an AUC needs both."""
    count = require_batches(path, batch) * batch
    with path.open("rb") as file:
        positive = count_positives(file, count)
    if positive in (0, count):
        raise RooftopError("data", str(path), f"positives and negatives, and not {positive} positives of {count}")


def auc(labels: NDArray[Any], scores: NDArray[Any]) -> float:
    """Area under the ROC curve: how often a positive scores above a negative, ties half (Hanley and McNeil 1982).

    Raises RooftopError unless there are both positives and negatives.
    """
    positive = np.asarray(labels) > 0.5
    count = int(positive.sum())
    if count in (0, len(positive)):
        raise RooftopError("labels", f"{count} positives of {len(positive)}", "positives and negatives")
    values, inverse, counts = np.unique(np.asarray(scores, np.float64), return_inverse=True, return_counts=True)
    del values
    ranks = np.cumsum(counts) - (counts - 1) / 2
    total = float(ranks[inverse][positive].sum())
    return (total - count * (count + 1) / 2) / (count * (len(positive) - count))
