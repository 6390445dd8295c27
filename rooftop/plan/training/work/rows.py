"""The work of a training step, scope by scope: FLOPs, bytes and collectives of one device.

Chapters 4 and 5 of the book. A collective is in the scope of the matmul that it serves. Weights are gathered again
in the backward pass; that gather is part of the recompute phase, as a compiler sees it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from rooftop.core.ledger import Ledger, Number
from rooftop.models.activations import POLICIES
from rooftop.models.segments import segments, shared_segment
from rooftop.plan.pricing import StagePart, Work
from rooftop.plan.training.pricing import price_work
from rooftop.plan.training.step import TrainingStep
from rooftop.plan.training.work.attention import attention_work
from rooftop.plan.training.work.experts import expert_work
from rooftop.plan.training.work.head import embedding_work, head_work
from rooftop.plan.training.work.mlp import mlp_work
from rooftop.plan.training.work.optimizer.update import update_work
from rooftop.plan.training.work.pipeline import sending_work, vector_work
from rooftop.plan.training.work.recurrence import mixer_work


def training_ledger(step: TrainingStep) -> Ledger:
    """Every row of the step, with the exposed time of its collectives; figures broadcast to [C, K]."""
    return price_work(training_work(step), step)


def training_work(step: TrainingStep) -> list[Work]:
    """Every piece of work of a step, in the order in which it is first done."""
    microbatches, alone = step.strategies.microbatches, step.layers_alone
    layers, dense = step.layers - alone.every, step.dense_layers - alone.every_dense
    shared = _layers(step, dense * microbatches, (layers - dense) * microbatches)
    if (period := len(segments(step.model)[shared_segment(step.model)].kinds)) > 1:
        shared = [replace(item, period=period) for item in shared]
    if np.any(step.padding_layers):
        shared = [replace(item, skipped=step.padding_layers / layers) for item in shared]
    first, last = embedding_work(step), head_work(step)
    if np.any(alone.first):
        # What the first stage does alone is not kept from task to task: its backward pass begins with the tokens.
        begun = replace(step, strategies=step.strategies.with_policy(POLICIES["block"]))
        again = embedding_work(step, (alone.first > 0) * microbatches)[0]
        first += [replace(again, phase="recompute")]
        first += _layers(begun, alone.first_dense * microbatches, (alone.first - alone.first_dense) * microbatches)
    if np.any(alone.last):
        last += _layers(step, alone.last_dense * microbatches, (alone.last - alone.last_dense) * microbatches)
    work = [*_of("first", first), *shared, *_of("last", last), *vector_work(step)]
    return [*work, *update_work(step), *_of("sends", sending_work(step))]


def _of(part: StagePart, work: Iterable[Work]) -> list[Work]:
    """The work, as that of a part of the model."""
    return [replace(item, part=part) for item in work]


def _layers(step: TrainingStep, dense: Number, experts: Number) -> list[Work]:
    """Work of dense layers and of layers of experts, each times its execution count."""
    layers = dense + experts
    work = attention_work(step, layers * step.attention_share) if step.model.attention_layers else []
    for kind, shapes, share in step.mixers:
        work += mixer_work(step, kind, shapes, layers * share)
    if step.model.dense_layers:
        work += mlp_work(step, dense)
    if step.model.moe is not None:
        work += expert_work(step, experts)
    return work
