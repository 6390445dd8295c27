"""Both ends of the model: embedding, and final norm, unembedding and loss."""

from __future__ import annotations

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
    work = [
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
    return work if step.adapters is None else work[:1]


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
    if step.habits.staged_loop and np.any(step.staged):
        unembed = [replace(item, collectives=_summed_in_stages(step, item)) for item in unembed]
    work = [*norm(step, "final_norm", count, 0.0), *unembed]
    if model.tied_embeddings:
        turned = Transfer("all_to_all", COLUMN_AXES, step.held_parameters["vocab"] * step.element_bytes, "all_to_all")
        turn = Work(
            scope="unembed", phase="forward", count=count, collectives=(turned,),
            formula="the embedding table, split over D, split over V instead",
        )  # fmt: skip
        work += [turn, backward(turn, 1.0)] if step.adapters is None else [turn]
    return [*work, loss, backward(loss, 1.0, collectives=False)]


def _summed_in_stages(step: TrainingStep, item: Work) -> tuple[Transfer, ...]:
    """The transfers of the unembedding: in a stage each chunk adds up its partial sums on every device, in float32."""
    scattered = ("reduce_scatter", COLUMN_AXES)
    transfers: list[Transfer] = []
    for transfer in item.collectives:
        if (transfer.kind, transfer.axes) == scattered:
            nbytes = 4.0 * step.tokens * step.model.d_model
            transfers.append(replace(transfer, when=transfer.when * (1 - step.staged)))
            transfers.append(
                Transfer("all_reduce", COLUMN_AXES, nbytes, "tensor", step.staged, pieces=step.loss_chunks)
            )
        else:
            transfers.append(transfer)
    return tuple(transfers)
