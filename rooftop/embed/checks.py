"""Ids that are no rows of their table: found, named, and then refused, left out or moved to the nearest row."""

from __future__ import annotations

import warnings

import numpy as np

from rooftop.core.errors import RooftopError, unknown
from rooftop.embed.inputs import Ragged

#: What may be done about an id outside [0, vocabulary).
POLICIES: tuple[str, ...] = ("error", "warn", "clamp", "off")
#: Offenders that a message names.
_NAMED = 3


def check_policy(policy: str) -> None:
    """Raises RooftopError unless ``policy`` is one of POLICIES."""
    if policy not in POLICIES:
        raise unknown("out_of_range", str(policy), POLICIES)


def check_ids(ids: Ragged, vocabulary: int, *, feature: str, table: str, policy: str) -> tuple[Ragged, int]:
    """The ids that are rows of a table of ``vocabulary`` rows, and how many were not.

    ``error`` refuses a batch with others (RooftopError), ``warn`` leaves the others out and says so, ``clamp`` takes
    the nearest row. ``off`` does not look: such an id then reads some other row of its stack.
    """
    if policy == "off" or not ids.values.size or _within(ids, vocabulary):
        return ids, 0
    bad = (ids.values < 0) | (ids.values >= vocabulary)
    at = np.flatnonzero(bad)
    samples = np.searchsorted(ids.row_splits, at[:_NAMED], side="right") - 1
    named = ", ".join(
        f"{value} in row {sample}"
        for value, sample in zip(ids.values[at[:_NAMED]].tolist(), samples.tolist(), strict=True)
    )
    given = f"{len(at)} ids out of range, first {named}"
    accepted = f"ids from 0 to {vocabulary - 1}, the rows of table {table}"
    if policy == "error":
        raise RooftopError(f"features.{feature}", given, accepted)
    if policy == "clamp":
        clamped = np.clip(ids.values, 0, vocabulary - 1)
        return Ragged(values=clamped, row_splits=ids.row_splits, weights=ids.weights), len(at)
    warnings.warn(f"features.{feature}: {given}; left out: {accepted}", stacklevel=2)
    good = ~bad
    before = np.concatenate([[0], np.cumsum(good, dtype=np.int64)])
    weights = None if ids.weights is None else ids.weights[good]
    return Ragged(values=ids.values[good], row_splits=before[ids.row_splits], weights=weights), len(at)


def _within(ids: Ragged, vocabulary: int) -> bool:
    """Whether all ids are rows, in one pass: as an unsigned number a negative one is larger than any row."""
    values = ids.values
    if values.dtype.kind == "i":
        values = values.view(f"u{values.dtype.itemsize}")
    return bool(np.maximum.reduce(values) < vocabulary)
