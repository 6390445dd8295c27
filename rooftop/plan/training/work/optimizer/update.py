"""The update: gradients summed over copies and microbatches, then the optimizer."""

from __future__ import annotations

import numpy as np

from rooftop.arrays.rules import REPLICA_AXES, STAGE_AXES, copy_axes
from rooftop.core.quantities import dtype_bytes
from rooftop.plan.pricing import Transfer, Work
from rooftop.plan.training.step import TrainingStep
from rooftop.plan.training.work.elements import VECTOR_OPS
from rooftop.plan.training.work.optimizer.muon import newton_schulz_work


def update_work(step: TrainingStep) -> list[Work]:
    """Work of the update, once a step."""
    shards = step.trained_parameters
    total = shards["dense"] + shards["experts"] + shards["vocab"]
    gradient = dtype_bytes(step.numerics.gradients)
    partial = step.sequence_parameters
    sums = {
        copy_axes("embed", "expert"): shards["experts"],
        copy_axes("embed"): shards["dense"] + shards["vocab"] - partial,
        copy_axes("embed", sequence="residual_seq"): partial,
    }
    if step.adapters is not None:
        whole = step.whole_adapters["experts"]
        sums[copy_axes("embed", "expert")] = shards["experts"] - whole
        sums[copy_axes("embed", "expert", sequence="residual_seq")] = whole
    # Over stages, gradients of copies on other axes are summed in the backward pass, where they are made.
    vectors = sum(step.vectors.values(), 0.0) * step.layers / step.model.layers
    of_stages = {REPLICA_AXES: total + vectors, STAGE_AXES: shards["vocab"] + step.parameters_alone}
    reduce = tuple(
        Transfer("all_reduce", axes, elements * gradient, "gradient_all_reduce", when)
        for table, when in ((sums, 1 - step.staged), (of_stages, step.staged))
        for axes, elements in table.items()
    )
    reduce += tuple(
        Transfer(
            "all_reduce", axes, elements * gradient, "gradient_all_reduce",
            (1 - step.staged) * (np.asarray(elements) > 0),
        )
        for axes, elements in step.vectors.items()
    )  # fmt: skip
    # The first microbatch's gradients are the sums. The program of stages adds in every trip, whether or not there is
    # anything: to the layers of one chunk and, outside them, to what each stage holds. The gradients of a tied table's
    # lookup and of its matmul are made by different stages, and added one by one.
    more = np.maximum(step.strategies.microbatches - 1, 0)
    added = total * more * (not step.habits.adds_in_matmuls)
    if step.habits.staged_loop and np.any(step.staged):
        outside = shards["vocab"] * (1 + step.model.tied_embeddings)
        of_a_trip = (shards["dense"] + shards["experts"]) / step.strategies.chunks + outside
        added = np.where(step.staged, of_a_trip * step.strategies.trips, added)
    return [
        Work(
            scope="gradients", phase="update", count=1, collectives=reduce,
            hbm_bytes=total * gradient + added * (8 + gradient), vector_flops=2 * total,
            formula="gradient shards summed over the axes that hold copies; float32 sums over microbatches; norm",
        ),
        Work(
            scope="optimizer", phase="update", count=1,
            hbm_bytes=(total - shards["vocab"]) * step.numerics.update_bytes
            + shards["vocab"] * step.numerics.table_update_bytes,
            vector_flops=VECTOR_OPS["update"] * total, formula="state read and written once per parameter held",
        ),
        *(newton_schulz_work(step) if step.numerics.update.orthogonalised else ()),
    ]  # fmt: skip
