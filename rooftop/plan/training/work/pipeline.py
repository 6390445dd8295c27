"""Work of pipeline stages alone: what they send, and how their tasks collect gradients."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rooftop.arrays.rules import REPLICA_AXES, STAGE_AXES
from rooftop.core.ledger import Number
from rooftop.plan.pricing import Transfer, Work
from rooftop.plan.training.memory import shared_bytes
from rooftop.plan.training.step import TrainingStep
from rooftop.plan.training.work.phases import backward


def sending_work(step: TrainingStep) -> list[Work]:
    """Activations passed to the next stage, and back; the idle time is added when the rest is known.

    Our program puts a microbatch's checkpoints into their place in the stage's buffer after each trip, whether or not
    there are any: a read and a write.
    """
    staged = bool(np.any(step.staged))
    sent = step.tokens * step.model.d_model * step.element_bytes / step.tensor
    transfer = Transfer("permute", STAGE_AXES, sent, "stage")
    copied: Number = 0.0
    if staged and step.habits.staged_loop:
        copied = 2.0 * step.staged * shared_bytes(step, "save") / step.strategies.chunks
    work = Work(
        scope="pipeline", phase="forward", count=step.strategies.trips if staged else 1.0, collectives=(transfer,),
        elementwise_bytes=copied,
        formula="T D bytes to the next stage in each trip through the schedule, whether or not it has a use for them; "
        "checkpoints of a microbatch put into their buffer",
    )  # fmt: skip
    return [work, replace(backward(work, 1.0), elementwise_bytes=0.0)]


def vector_work(step: TrainingStep) -> list[Work]:
    """Gradients of scales and biases, which stages sum over the axes that hold copies where they are made."""
    if not np.any(step.staged):
        return []
    microbatches, layers = step.strategies.microbatches, step.layers - step.padding_layers
    return [
        Work(
            scope=weight.scope,
            phase="backward",
            count=microbatches
            if weight.scope == "final_norm"
            else microbatches * layers * weight.layers / step.model.layers,
            collectives=(
                Transfer(
                    "all_reduce",
                    tuple(axis for axis in axes if axis not in REPLICA_AXES),
                    own * step.element_bytes,
                    "gradient_scatter",
                    step.staged,
                ),
            ),
            formula="the gradient of a vector, summed over the devices whose tokens met it",
            part="last" if weight.scope == "final_norm" else "layers",
        )
        for weight, own, axes in step.vector_weights
    ]
