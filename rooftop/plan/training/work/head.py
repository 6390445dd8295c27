"""Both ends of the model: embedding, and final norm, unembedding and loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rooftop.arrays.rules import COLUMN_AXES, EXPERT_AXES, GATHER_AXES, TOKEN_AXES
from rooftop.core.ledger import Number
from rooftop.models.attention import MatmulShape
from rooftop.plan.pricing import Transfer, Work
from rooftop.plan.training.step import TrainingStep
from rooftop.plan.training.work.elements import VECTOR_OPS, norm
from rooftop.plan.training.work.matmuls.block import MatmulBlock
from rooftop.plan.training.work.matmuls.work import matmul_work
from rooftop.plan.training.work.phases import backward


def embedding_work(step: TrainingStep, count: Number | None = None) -> list[Work]:
    """The table is split over D; each device looks up its columns for all, then two AllToAlls give tokens back."""
    model, element = step.model, step.element_bytes
    rows = step.tokens * step.widths.spread(model.d_model) * element / step.tensor
    exchange = (
        Transfer("all_to_all", GATHER_AXES, rows, "all_to_all"),
        Transfer("all_to_all", COLUMN_AXES, rows, "all_to_all"),
    )
    # Every device looks up the tokens of its whole fsdp group, whose int32 ids it gathers first.
    ids = Transfer("all_gather", GATHER_AXES, 4.0 * step.tokens * step.strategies.devices(*GATHER_AXES), "all_to_all")
    # A stage gathers them again in its backward task, unless it repeats the lookup there.
    alone = step.staged * (step.layers_alone.first == 0)
    again = replace(ids, when=alone)
    # In stages a table's gradient is made where all of the experts' tokens have met, with their ids.
    met = step.strategies.devices(*EXPERT_AXES)
    meet = tuple(
        Transfer("all_gather", EXPERT_AXES, met * payload, "all_to_all", step.staged) for payload in (rows, ids.payload)
    )
    table = step.held_parameters["vocab"] / (1 if model.tied_embeddings else 2) * element
    count = step.strategies.microbatches if count is None else count
    return [
        Work(
            scope="embed", phase="forward", count=count, hbm_bytes=2 * rows, collectives=(ids, *exchange),
            formula="T D bytes looked up, exchanged over fsdp and tensor",
        ),
        Work(
            scope="embed", phase="backward", count=count, hbm_bytes=2 * rows + table,
            collectives=(again, *exchange, *meet),
            formula="the transpose: rows exchanged, then added into the table's shard",
        ),
    ]  # fmt: skip


def head_work(step: TrainingStep) -> list[Work]:
    """Final norm, unembedding and loss, once per microbatch; on the last stage of a pipeline."""
    model, count = step.model, step.strategies.microbatches
    table = MatmulShape(model.d_model * np.ones_like(step.tensor), np.asarray(step.widths.vocab))
    stream = step.tokens * model.d_model * step.element_bytes
    logits = step.tokens * step.widths.vocab
    # Over the split vocabulary: the maximum, then the sum and the label's logit, each a float32 per token.
    sums = tuple(Transfer("all_reduce", COLUMN_AXES, 4.0 * step.tokens * floats, "tensor") for floats in (1, 2))
    mean = Transfer("all_reduce", TOKEN_AXES, 4.0, "tensor")
    block = MatmulBlock(scope="unembed", count=count, shapes=[table], tokens=step.tokens, gathered=stream, again=0.0)
    unembed = matmul_work(step, block)
    loss = Work(
        scope="loss", phase="forward", count=count, hbm_bytes=8.0 * logits, collectives=(*sums, mean),
        vector_flops=VECTOR_OPS["loss"] * logits,
        formula="float32 logits read twice; maximum and sums over the split vocabulary",
    )  # fmt: skip
    losses = [loss, backward(loss, 1.0, collectives=False)]
    if step.habits.chunked_loss:
        unembed = _in_chunks(step, table, unembed)
        # The derivative of the softmax belongs to the gradients of the unembedding.
        formula = "float32 logits read for the sums over the split vocabulary"
        passes = _stored_logits(step, logits) if step.habits.fused_loss else 8.0 * logits
        losses = [replace(loss, hbm_bytes=passes, formula=formula)]
    work = [*norm(step, "final_norm", count, 0.0), *unembed]
    if model.tied_embeddings:
        turned = Transfer("all_to_all", COLUMN_AXES, step.held_parameters["vocab"] * step.element_bytes, "all_to_all")
        turn = Work(
            scope="unembed", phase="forward", count=count, collectives=(turned,),
            formula="the embedding table, split over D, split over V instead",
        )  # fmt: skip
        work += [turn, backward(turn, 1.0)]
    return [*work, *losses]


def _stored_logits(step: TrainingStep, logits: Number) -> Number:
    """HBM bytes of a pass over float32 ``logits``: none if XLA keeps those of a chunk in VMEM, of which it takes half.

    Compiled programs keep 33 MB of 128 MiB there, and do not keep 65 MB of 64 MiB.
    """
    chip = step.slice.chip
    chunk = 4.0 * step.tokens / step.loss_chunks * step.widths.vocab
    return logits * np.where(chunk > chip.vmem_bytes / chip.devices / 2, 4.0, 0.0)


def _in_chunks(step: TrainingStep, table: MatmulShape, unembed: Sequence[Work]) -> list[Work]:
    """The unembedding as our program runs it: chunk by chunk, on TPUs with the loss fused into it.

    Each chunk reads the matrix, and writes its float32 logits. Both gradients read the logits', and that of the matrix
    reads and writes the sum of the chunks before. On TPUs the derivative of the softmax is computed as the matrix unit
    reads the logits, and rounded there. On GPUs it is a pass of its own, which rounds.
    """
    forward, both = unembed
    element, dtype = step.element_bytes, step.numerics.compute
    chunks = step.loss_chunks
    count = step.tokens * table.n
    logits = _stored_logits(step, count)
    gradients = logits if step.habits.fused_loss else element * count
    rows, matrix = step.tokens * table.k * element, table.parameters * element
    halved = {name: flops / 2 for name, flops in both.flops.items()}
    of_matrix = Work(
        scope="unembed", phase="backward", count=both.count, flops=halved,
        matmul_s=step.rates.matmul_s(table.k, step.tokens, table.n, dtype),
        hbm_bytes=rows + gradients + 2.0 * chunks * matrix,
        formula="dW: 2 T k n; the sum of all chunks read and written for each",
    )  # fmt: skip
    collectives = both.collectives
    if np.any(step.staged):
        # In a stage each chunk's partial sums are added up over tensor at once, on every device, in float32.
        summed = Transfer("all_reduce", COLUMN_AXES, 4.0 * step.tokens * table.k, "tensor", step.staged, pieces=chunks)
        unstaged = 1 - step.staged
        others = (
            replace(one, when=one.when * unstaged) if (one.kind, one.axes) == ("reduce_scatter", COLUMN_AXES) else one
            for one in collectives
        )
        collectives = (*others, summed)
    of_rows = replace(
        both, collectives=collectives, flops=halved, matmul_s=step.rates.matmul_s(step.tokens, table.n, table.k, dtype),
        vector_flops=VECTOR_OPS["loss"] * step.tokens * table.n,
        hbm_bytes=rows + gradients + chunks * matrix, formula="dX: 2 T k n",
    )  # fmt: skip
    work = [replace(forward, hbm_bytes=rows + logits + chunks * matrix), of_rows, of_matrix]
    if step.habits.fused_loss:
        return work
    derivative = Work(
        scope="unembed", phase="backward", count=both.count, hbm_bytes=(4.0 + element) * count,
        formula="derivative of the softmax: float32 logits read, their gradients written in the dtype of matmuls",
    )  # fmt: skip
    return [*work, derivative]
