"""A batch's features, checked and made ready: ids, where their samples go, and the gains of each sample."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rooftop.core.errors import RooftopError, unknown
from rooftop.embed.checks import check_ids
from rooftop.embed.inputs import Ragged, as_ragged
from rooftop.embed.keys import Layout, Looked
from rooftop.models.embedding_tables.stacking import Stack, Stacking, StackPlace


@dataclass(frozen=True, kw_only=True)
class TableLayout:
    """A table of a stack: its keys, and the first row of activations of its features on a source."""

    layout: Layout
    first_sample: int
    #: By feature, its first row of activations of the table, and how many it has on a source.
    spans: Mapping[str, tuple[int, int]]


@dataclass(frozen=True, kw_only=True)
class TableBatch:
    """What one batch looks up in a table: its features, and the gains [sources, samples] of a sample's every id."""

    table: TableLayout
    features: tuple[Looked, ...]
    gains: NDArray[np.float32] | None


def layouts(stacking: Stacking, stack: Stack, samples: int) -> tuple[TableLayout, ...]:
    """The tables of a stack when each source has ``samples`` samples. A source's activations are feature by feature.

    Raises RooftopError where a lookup cannot be told by 64 bits.
    """
    found, first = list[TableLayout](), 0
    for place in stack.places:
        spans, offset = dict[str, tuple[int, int]](), 0
        for feature in place.features:
            spans[feature.name] = (offset, samples * feature.rows_per_sample)
            offset += samples * feature.rows_per_sample
        layout = Layout(place=place, cores=stacking.cores, samples=offset)
        if not layout.most_sources():
            raise RooftopError(
                "batch", f"{offset} lookups of a SparseCore", f"fewer: those in table {place.table.name}"
            )
        found.append(TableLayout(layout=layout, first_sample=first, spans=spans))
        first += offset
    return tuple(found)


def check_names(inputs: Mapping[str, Any], stacking: Stacking) -> None:
    """Raises RooftopError unless there are ids for each feature and for nothing else."""
    names = [feature.name for feature in stacking.tables.features]
    if inputs.keys() == set(names):
        return
    for name in inputs:
        if name not in names:
            raise unknown("feature", str(name), names)
    for name in names:
        if name not in inputs:
            raise RooftopError(f"features.{name}", "no ids", "ids for each feature")


def look(
    table: TableLayout, inputs: Mapping[str, Any], *, batch: int, sources: int, out_of_range: str
) -> tuple[TableBatch, dict[str, int]]:
    """The ids that a batch looks up in a table, and how many of each feature were out of range.

    ``batch`` samples lie on ``sources`` SparseCores, equally many on each, in their order. Raises RooftopError.
    """
    place = table.layout.place
    found: list[Looked] = []
    bad: dict[str, int] = {}
    for feature in place.features:
        ids = as_ragged(inputs[feature.name], feature)
        if ids.rows != batch * feature.rows_per_sample:
            given = f"{ids.rows // feature.rows_per_sample} samples"
            raise RooftopError(f"features.{feature.name}", given, f"{batch} samples, the batch of this host")
        ids, bad[feature.name] = check_ids(
            ids, place.table.vocabulary, feature=feature.name, table=place.table.name, policy=out_of_range
        )
        offset, rows = table.spans[feature.name]
        found.append(Looked(ids=ids, offset=offset, rows=rows))
    return TableBatch(table=table, features=tuple(found), gains=_gains(place, found, sources)), bad


def _gains(place: StackPlace, features: list[Looked], sources: int) -> NDArray[np.float32] | None:
    """The gain by which a sample's every id (or its weight) is multiplied; None if that is 1."""
    if place.table.combiner == "sum":
        return None
    parts = [sample_gains(one.ids, place.table.combiner).reshape(sources, one.rows) for one in features]
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)


def sample_gains(ids: Ragged, combiner: str) -> NDArray[np.float32]:
    """1 / sum(w) (mean) or 1 / sqrt(sum(w^2)) (sqrtn) of each sample's weights w; 0 where that is no number.

    A sample without ids has none to multiply; one whose weights sum to zero gives zeros, as if it had no ids.
    """
    lengths = np.diff(ids.row_splits)
    if ids.weights is None:
        sums = lengths if combiner == "mean" else np.sqrt(lengths)
        return np.divide(1, sums, out=np.zeros(len(sums), np.float32), where=lengths > 0, casting="same_kind")
    terms = ids.weights.astype(np.float64)
    if combiner == "sqrtn":
        terms *= terms
    filled = np.flatnonzero(lengths)
    sums = np.zeros(len(lengths))
    if len(filled):
        sums[filled] = np.add.reduceat(terms, ids.row_splits[:-1][filled])
    if combiner == "sqrtn":
        sums = np.sqrt(sums)
    found = np.divide(1, sums, out=np.zeros(len(sums)), where=sums != 0)
    return np.where(np.abs(found) < 1 / np.finfo(np.float32).tiny, found, 0).astype(np.float32)
