"""Adafactor: means of squares over rows and over columns, summed over the devices that split them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from rooftop.arrays.rules import COLUMN_AXES, GATHER_AXES
from rooftop.core.ledger import Number
from rooftop.models.optimizers import SMALLEST_FACTORED_DIM
from rooftop.plan.pricing import Transfer, Work
from rooftop.plan.training.step import TrainingStep
from rooftop.plan.training.work.optimizer.matrices import StackedMatrix, layer_matrices, stacked_layers


@dataclass(frozen=True, kw_only=True)
class _StoredDim:
    """A dim of a stored array: its size over all devices and the ``axes`` that split it."""

    size: Number
    axes: tuple[str, ...] = ()


def factored_work(step: TrainingStep) -> list[Work]:
    """Adafactor's means over rows and columns of all weights, summed over the devices that split them."""
    model, d, vocab = step.model, step.widths.stored(step.model.d_model), step.widths.vocab * step.tensor
    sums: dict[tuple[str, ...], Number] = {}

    def add(dims: Sequence[_StoredDim], many: Number) -> None:
        """The means of so ``many`` arrays; both dims are the largest, as in ``programs.training.adafactor``."""
        order = sorted(range(len(dims)), key=lambda at: (float(np.min(dims[at].size)), at))[-2:]
        if np.min(dims[order[0]].size) < SMALLEST_FACTORED_DIM:
            return
        of_device = many * np.prod([dim.size / step.strategies.devices(*dim.axes) for dim in dims], axis=0)
        for gone in (dims[at] for at in order):
            ways = step.strategies.devices(*gone.axes)
            mean = 4.0 * of_device * ways / gone.size
            sums[gone.axes] = sums.get(gone.axes, 0.0) + np.where(ways > 1, mean, 0.0)

    for kind, stacked, _ in stacked_layers(step):
        for matrix in layer_matrices(step, kind):
            many = stacked * matrix.arrays * (1.0 if matrix.experts is None else matrix.experts) * matrix.when
            for dims, when in _stored_dims(matrix):
                add(dims, many * when)
        if kind.moe and model.moe is not None:
            add((_StoredDim(size=d, axes=GATHER_AXES), _StoredDim(size=model.moe.experts)), stacked)
    columns = _StoredDim(size=d, axes=(*GATHER_AXES, *COLUMN_AXES))
    add((_StoredDim(size=vocab), columns), 1.0)
    if model.positions == "learned":
        add((_StoredDim(size=model.position_offset + model.max_seq_len), columns), 1.0)
    if not model.tied_embeddings:
        add((_StoredDim(size=d, axes=GATHER_AXES), _StoredDim(size=vocab, axes=COLUMN_AXES)), 1.0)
    transfers = tuple(
        Transfer("all_reduce", axes, nbytes, "gradient_all_reduce", np.where(np.asarray(nbytes) > 0, 1.0, 0.0))
        for axes, nbytes in sums.items()
        if axes
    )
    formula = "means of squares over rows and over columns, summed over the devices that split them"
    return [Work(scope="optimizer", phase="update", count=1, collectives=transfers, formula=formula)]


def _stored_dims(matrix: StackedMatrix) -> Iterator[tuple[tuple[_StoredDim, ...], Number]]:
    """The dims of one matrix for each place where tensor may split it, and 1 where it does."""
    in_columns = 0.0 if matrix.in_columns is None else matrix.in_columns
    for value in (0, 1):
        when = np.where(np.asarray(in_columns) == value, 1.0, 0.0)
        if not np.any(when):
            continue
        split = () if matrix.in_columns is None else COLUMN_AXES
        rows = _StoredDim(size=matrix.rows, axes=(*GATHER_AXES, *(() if value else split)))
        axes = split if value else ()
        if matrix.head is None:
            yield (rows, _StoredDim(size=matrix.columns, axes=axes)), when
        else:
            heads = _StoredDim(size=matrix.columns / matrix.head, axes=axes)
            yield (rows, heads, _StoredDim(size=matrix.head)), when
