"""The work of Muon: matrices of layers dealt out to devices, orthogonalised there, and back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, combinations

import numpy as np

from rooftop.arrays.rules import AXES, COLUMN_AXES, EXPERT_AXES, GATHER_AXES, STAGE_AXES
from rooftop.core.ledger import Number
from rooftop.models.config import MLA
from rooftop.models.optimizers import NEWTON_SCHULZ_STEPS, deal, newton_schulz_flops
from rooftop.models.segments import LayerKind, segments, shared_segment
from rooftop.plan.pricing import Transfer, Work
from rooftop.plan.training.step import TrainingStep


@dataclass(frozen=True, kw_only=True)
class _Matrix:
    """A stacked weight: one matrix [rows, columns] as all devices store it, [C, 1].

    Fsdp splits its rows. Tensor splits its columns if ``in_columns`` is 1 and its rows if 0, or nothing if None.
    ``arrays`` weights are alike, each of so many ``experts`` on a device.
    """

    rows: Number
    columns: Number
    in_columns: Number | None
    arrays: int = 1
    experts: Number | None = None


def orthogonalise(step: TrainingStep) -> list[Work]:
    """Newton-Schulz steps of all matrices, and the collectives that deal them out: see ``optimizers.deal``."""
    model, work = step.model, []
    for at, segment in enumerate(segments(model)):
        shared = at == shared_segment(model)
        stacked = np.where(step.staged, step.periods, segment.repeats) if shared else np.float64(segment.repeats)
        for kind in segment.kinds:
            work += [_of_matrix(step, matrix, stacked, staged=shared) for matrix in _matrices(step, kind)]
    return work


def _matrices(step: TrainingStep, kind: LayerKind) -> Iterator[_Matrix]:
    """The matrices of one layer, as programs store them."""
    model, moe = step.model, step.model.moe
    yield from _attention(step) if model.mla is None else _latent(step, model.mla)
    if kind.moe and moe is not None:
        yield from _mlp(step, moe.d_ff, step.widths.experts)
        if moe.shared_d_ff:
            yield from _mlp(step, moe.shared_d_ff)
    else:
        yield from _mlp(step, model.d_ff)


def _mlp(step: TrainingStep, hidden: int, experts: Number | None = None) -> Iterator[_Matrix]:
    d, columns, stored = step.model.d_model, step.columns(hidden), step.widths.stored
    yield _Matrix(
        rows=stored(d), columns=columns * step.tensor, in_columns=1, arrays=step.model.mlp_matrices - 1, experts=experts
    )
    yield _Matrix(rows=stored(columns) * step.tensor, columns=d, in_columns=0, experts=experts)


def _attention(step: TrainingStep) -> Iterator[_Matrix]:
    model, widths, tensor = step.model, step.widths, step.tensor
    d, h, copied = model.d_model, model.d_head, widths.copied_keys > 0
    yield _Matrix(rows=widths.stored(d), columns=widths.heads * tensor * h, in_columns=1)
    yield _Matrix(
        rows=np.where(copied, widths.spread(d), widths.stored(d)),
        columns=np.where(copied, model.kv_heads, step.kv_heads * tensor) * h,
        in_columns=1 - widths.copied_keys,
        arrays=2,
    )
    yield _Matrix(rows=widths.stored(widths.heads * h) * tensor, columns=d, in_columns=0)


def _latent(step: TrainingStep, mla: MLA) -> Iterator[_Matrix]:
    model, widths = step.model, step.widths
    d, heads = model.d_model, widths.heads * step.tensor
    if mla.q_rank is not None:
        yield _Matrix(rows=widths.stored(d), columns=mla.q_rank, in_columns=None)
    yield _Matrix(rows=widths.stored(mla.q_rank or d), columns=heads * model.d_head, in_columns=1)
    yield _Matrix(rows=widths.stored(d), columns=mla.kv_rank + mla.d_rope, in_columns=None)
    yield _Matrix(rows=widths.stored(mla.kv_rank), columns=heads * (mla.d_nope + mla.d_v), in_columns=1)
    yield _Matrix(rows=widths.stored(widths.heads * mla.d_v) * step.tensor, columns=d, in_columns=0)


def _of_matrix(step: TrainingStep, matrix: _Matrix, stacked: Number, *, staged: bool) -> Work:
    """Groups of a stacked weight's matrices, one after another."""
    devices, rates, element = step.strategies.devices, step.rates, step.element_bytes
    dtype = step.numerics.compute
    split = COLUMN_AXES if matrix.in_columns is not None else ()
    stacks = (*(EXPERT_AXES if matrix.experts is not None else ()), *(STAGE_AXES if staged else ()))
    rows, columns = np.asarray(matrix.rows, np.float64), np.asarray(matrix.columns, np.float64)
    gather, wide = devices(*GATHER_AXES), devices(*split)
    in_columns = np.asarray(0.0 if matrix.in_columns is None else matrix.in_columns)
    sum_columns = (columns > rows) | ((columns == rows) & (in_columns > 0))
    copies = [axis for axis in reversed(AXES) if axis not in (*GATHER_AXES, *split, *stacks)]
    dealt = deal(
        stacked * (1.0 if matrix.experts is None else matrix.experts),
        gather=gather,
        columns=wide,
        splits_long=(wide > 1) & ((in_columns > 0) == sum_columns),
        copies=[devices(axis) for axis in copies],
    )
    shares = dict(zip(copies, dealt.copies, strict=True))
    sharing = np.prod([np.where(shares[axis], devices(axis), 1.0) for axis in copies], axis=0)
    shard = rows * columns / (gather * wide) * element
    local = dealt.together / sharing * shard

    def exchange(axes: tuple[str, ...], when: Number) -> Transfer:
        """There and back."""
        return Transfer("all_to_all", axes, 2.0 * local, "all_to_all", when, pieces=2)

    both = dealt.columns * (1 - in_columns) * (wide > 1)
    transfers = [exchange(GATHER_AXES, 1 - both)]
    if split:
        transfers += [exchange((*GATHER_AXES, *split), both), exchange(split, dealt.columns * in_columns)]
    for axes in chain.from_iterable(combinations(copies, size) for size in range(1, len(copies) + 1)):
        when = np.prod([np.where(shares[axis], axis in axes, axis not in axes) for axis in copies], axis=0)
        if np.any(when):
            transfers.append(Transfer("all_gather", axes[::-1], dealt.together * shard, "all_to_all", when))
    parts = np.where(dealt.columns, 1.0, wide)
    short, long = np.minimum(rows, columns), np.maximum(rows, columns)
    if split:
        sums = NEWTON_SCHULZ_STEPS * short * short * element
        transfers.append(
            Transfer("all_reduce", split, sums, "all_to_all", 1 - dealt.columns, pieces=NEWTON_SCHULZ_STEPS)
        )
    own = long / parts
    products = ((short, own, short), (short, short, short), (short, short, own))
    return Work(
        scope="optimizer", phase="update", count=dealt.groups * matrix.arrays,
        flops={dtype: newton_schulz_flops(short, long, parts)},
        matmul_s=NEWTON_SCHULZ_STEPS * sum((rates.matmul_s(m, k, n, dtype) for m, k, n in products), 0.0),
        hbm_bytes=NEWTON_SCHULZ_STEPS * element * (4.0 * short * own + 5.0 * short * short),
        collectives=tuple(transfers), formula="5 x (2 m m n + 2 m m m + 2 m m n) of each device's matrix [m, n]",
    )  # fmt: skip
