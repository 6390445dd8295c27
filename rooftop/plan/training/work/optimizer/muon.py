"""Muon: Newton-Schulz steps of all matrices, and the collectives that deal them out."""

from __future__ import annotations

from itertools import chain, combinations

import numpy as np

from rooftop.arrays.rules import AXES, COLUMN_AXES, EXPERT_AXES, GATHER_AXES, STAGE_AXES
from rooftop.core.ledger import Number
from rooftop.models.optimizers import NEWTON_SCHULZ_STEPS, deal, newton_schulz_flops
from rooftop.plan.pricing import Transfer, Work
from rooftop.plan.training.step import TrainingStep
from rooftop.plan.training.work.optimizer.matrices import StackedMatrix, layer_matrices, stacked_layers


def newton_schulz_work(step: TrainingStep) -> list[Work]:
    """Newton-Schulz steps of all matrices, and the collectives that deal them out: see ``optimizers.deal``."""
    return [
        _of_matrix(step, matrix, stacked, staged=staged)
        for kind, stacked, staged in stacked_layers(step)
        for matrix in layer_matrices(step, kind)
    ]


def _of_matrix(step: TrainingStep, matrix: StackedMatrix, stacked: Number, *, staged: bool) -> Work:
    """Groups of a stacked weight's matrices, one after another."""
    devices, rates, element = step.strategies.devices, step.rates, step.element_bytes
    dtype = step.numerics.compute
    split = COLUMN_AXES if matrix.in_columns is not None else ()
    of_experts = () if matrix.experts is None else (*EXPERT_AXES, *(COLUMN_AXES if matrix.whole else ()))
    stacks = (*of_experts, *(STAGE_AXES if staged else ()))
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
        scope="optimizer", phase="update", count=dealt.groups * matrix.arrays * matrix.when,
        flops={dtype: newton_schulz_flops(short, long, parts)},
        matmul_s=NEWTON_SCHULZ_STEPS * sum((rates.matmul_s(m, k, n, dtype) for m, k, n in products), 0.0),
        hbm_bytes=NEWTON_SCHULZ_STEPS * element * (4.0 * short * own + 5.0 * short * short),
        collectives=tuple(transfers), formula="5 x (2 m m n + 2 m m m + 2 m m n) of each device's matrix [m, n]",
    )  # fmt: skip
