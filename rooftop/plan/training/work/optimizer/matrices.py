"""The weight matrices that optimizers see, as programs stack and split them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from rooftop.arrays.rules import EXPERT_AXES
from rooftop.core.ledger import Number
from rooftop.models.config import MLA, MoE
from rooftop.models.segments import LayerKind, segments, shared_segment
from rooftop.plan.training.step import TrainingStep


@dataclass(frozen=True, kw_only=True)
class StackedMatrix:
    """A stacked weight: one matrix [rows, columns] as all devices store it, [C, 1].

    Fsdp splits its rows. Tensor splits its columns if ``in_columns`` is 1 and its rows if 0, or nothing if None.
    ``arrays`` weights are alike, each of so many ``experts`` on a device: ``whole`` ones if tensor deals them out.
    ``when`` is 1 where the weight is stored like this.
    """

    rows: Number
    columns: Number
    in_columns: Number | None
    arrays: int = 1
    experts: Number | None = None
    whole: bool = False
    when: Number = 1.0


def stacked_layers(step: TrainingStep) -> Iterator[tuple[LayerKind, Number, bool]]:
    """Each kind of layer of each segment: how many are stacked, and if pipeline stages share them."""
    for at, segment in enumerate(segments(step.model)):
        shared = at == shared_segment(step.model)
        stacked = np.where(step.staged, step.periods, segment.repeats) if shared else np.float64(segment.repeats)
        for kind in segment.kinds:
            yield kind, stacked, shared


def layer_matrices(step: TrainingStep, kind: LayerKind) -> Iterator[StackedMatrix]:
    """The matrices of one layer, as programs store them."""
    model, moe = step.model, step.model.moe
    yield from _attention_matrices(step) if model.mla is None else _latent_matrices(step, model.mla)
    if kind.moe and moe is not None:
        yield from _expert_matrices(step, moe)
        if moe.shared_d_ff:
            yield from _mlp_matrices(step, moe.shared_d_ff)
    else:
        yield from _mlp_matrices(step, model.d_ff)


def _expert_matrices(step: TrainingStep, moe: MoE) -> Iterator[StackedMatrix]:
    whole, expert = step.whole_experts, step.strategies.devices(*EXPERT_AXES)
    if not np.all(whole):
        for matrix in _mlp_matrices(step, moe.d_ff, np.ceil(moe.experts / expert)):
            yield replace(matrix, when=1.0 - whole)
    if np.any(whole):
        d, hidden, stored = step.model.d_model, moe.d_ff * np.ones_like(expert), step.widths.stored
        of_experts = partial(
            StackedMatrix,
            in_columns=None,
            experts=np.ceil(moe.experts / (expert * step.tensor)),
            whole=True,
            when=whole,
        )
        yield of_experts(rows=stored(d), columns=hidden, arrays=step.model.mlp_matrices - 1)
        yield of_experts(rows=stored(hidden), columns=d)


def _mlp_matrices(step: TrainingStep, hidden: int, experts: Number | None = None) -> Iterator[StackedMatrix]:
    d, columns, stored = step.model.d_model, step.columns(hidden), step.widths.stored
    yield StackedMatrix(
        rows=stored(d), columns=columns * step.tensor, in_columns=1, arrays=step.model.mlp_matrices - 1, experts=experts
    )
    yield StackedMatrix(rows=stored(columns) * step.tensor, columns=d, in_columns=0, experts=experts)


def _attention_matrices(step: TrainingStep) -> Iterator[StackedMatrix]:
    model, widths, tensor = step.model, step.widths, step.tensor
    d, h, copied = model.d_model, model.d_head, widths.copied_keys > 0
    yield StackedMatrix(rows=widths.stored(d), columns=widths.heads * tensor * h, in_columns=1)
    yield StackedMatrix(
        rows=np.where(copied, widths.spread(d), widths.stored(d)),
        columns=np.where(copied, model.kv_heads, step.kv_heads * tensor) * h,
        in_columns=1 - widths.copied_keys,
        arrays=2,
    )
    yield StackedMatrix(rows=widths.stored(widths.heads * h) * tensor, columns=d, in_columns=0)


def _latent_matrices(step: TrainingStep, mla: MLA) -> Iterator[StackedMatrix]:
    model, widths = step.model, step.widths
    d, heads = model.d_model, widths.heads * step.tensor
    if mla.q_rank is not None:
        yield StackedMatrix(rows=widths.stored(d), columns=mla.q_rank, in_columns=None)
    queries = heads * model.d_head
    yield StackedMatrix(rows=widths.stored(mla.q_rank or d), columns=queries, in_columns=1)
    yield StackedMatrix(rows=widths.stored(d), columns=mla.kv_rank + mla.d_rope, in_columns=None)
    head = mla.d_nope + mla.d_v
    yield StackedMatrix(rows=widths.stored(mla.kv_rank), columns=heads * head, in_columns=1)
    yield StackedMatrix(rows=widths.stored(widths.heads * mla.d_v) * step.tensor, columns=d, in_columns=0)
