"""The work of a training step, scope by scope: FLOPs, bytes and collectives of one device.

Chapters 4 and 5 of the book. A collective stands in the scope of the matmul that it serves. Weights are gathered again
in the backward pass; that gather is part of the recompute phase, as a compiler sees it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from rooftop.ledger import Number
from rooftop.models.activations import POLICIES
from rooftop.plan import passes
from rooftop.plan.pricing import Transfer, Work
from rooftop.plan.shapes import (
    Matmul,
    attention_head_sizes,
    attention_matmuls,
    mean_attended_pairs,
    mlp_matmuls,
)
from rooftop.plan.strategies import TOKEN_AXES
from rooftop.quantities import dtype_bytes
from rooftop.roofline.achievable import kernel_flops

if TYPE_CHECKING:
    from rooftop.plan.training import TrainingStep

#: The scope in which each checkpoint of a layer is made, and so leaves for host memory and comes back.
_ATTENTION_CHECKPOINTS = {
    "layer_input": "layers/attn/norm",
    "attn_normed": "layers/attn/norm",
    "qkv": "layers/attn/qkv",
    "rope": "layers/attn/rope",
    "attn_core": "layers/attn/core",
    "attn_out": "layers/attn/out",
}
_MLP_CHECKPOINTS = {
    "mlp_input": "layers/mlp/norm",
    "mlp_normed": "layers/mlp/norm",
    "mlp_up": "layers/mlp/up",
    "mlp_act": "layers/mlp/act",
    "mlp_down": "layers/mlp/down",
}
_EXPERT_CHECKPOINTS = {
    "mlp_input": "layers/mlp/norm",
    "mlp_normed": "layers/moe/dispatch",
    "mlp_up": "layers/moe/experts",
    "mlp_act": "layers/moe/experts",
    "mlp_down": "layers/moe/experts",
}


def training_work(step: TrainingStep) -> list[Work]:
    """Every piece of work of a step, in the order in which it is first done."""
    each, alone = step.strategies.microbatches, step.layers_alone
    dense = step.dense_layers - alone.first_dense
    work = [*_embed(step), *_layers(step, dense * each, (step.layers - alone.first - dense) * each)]
    if np.any(alone.first):
        # What the first stage does alone is not kept from task to task: its backward pass begins with the tokens.
        begun = replace(step, strategies=step.strategies.with_policy(POLICIES["block"]))
        again = _embed(step, (alone.first > 0) * each)[0]
        work += [replace(again, phase="recompute")]
        work += _layers(begun, alone.first_dense * each, (alone.first - alone.first_dense) * each)
    return [*work, *_head(step), *_update(step), *_pipeline(step)]


def _layers(step: TrainingStep, dense: Number, experts: Number) -> list[Work]:
    """Layers of both kinds, as often as each is done."""
    work = _attention(step, dense + experts)
    if step.model.dense_layers:
        work += _mlp(step, dense)
    if step.model.moe is not None:
        work += _experts(step, experts)
    return work


def _embed(step: TrainingStep, count: Number | None = None) -> list[Work]:
    """The table is split over D; each device looks up its columns for all, then two AllToAlls give tokens back."""
    model, element = step.model, step.element_bytes
    rows = step.tokens * model.d_model * element / step.tensor
    exchange = (
        Transfer("all_to_all", ("fsdp",), rows, "all_to_all"),
        Transfer("all_to_all", ("tensor",), rows, "all_to_all"),
    )
    # Every device looks up the tokens of its whole fsdp group, whose int32 ids it gathers first.
    ids = Transfer("all_gather", ("fsdp",), 4.0 * step.tokens * step.strategies.devices("fsdp"), "all_to_all")
    # In stages a table's gradient is made where all of the experts' tokens have met.
    meet = Transfer("all_gather", ("expert",), rows * step.strategies.devices("expert"), "all_to_all", step.staged)
    table = step.held_parameters["vocab"] / (1 if model.tied_embeddings else 2) * element
    count = step.strategies.microbatches if count is None else count
    return [
        Work(
            scope="embed", phase="forward", count=count, hbm_bytes=2 * rows, collectives=(ids, *exchange),
            formula="T D bytes looked up, exchanged over fsdp and tensor",
        ),
        Work(
            scope="embed", phase="backward", count=count, hbm_bytes=2 * rows + table, collectives=(*exchange, meet),
            formula="the transpose: rows exchanged, then added into the table's shard",
        ),
    ]  # fmt: skip


def _attention(step: TrainingStep, count: Number) -> list[Work]:
    model, tensor, tokens = step.model, step.tensor, step.tokens
    matmuls = attention_matmuls(model, tensor)
    d_qk, d_v = attention_head_sizes(model)
    heads = model.heads / tensor
    kv_heads = np.maximum(model.kv_heads / tensor, 1.0)
    reference = step.assumptions.attention == "reference"
    block = step.workload.seq_len if reference else step.assumptions.attention_block or step.rates.attention_block
    pairs = mean_attended_pairs(model, step.workload.seq_len, block)
    scores = tokens * heads * pairs / step.workload.seq_len
    stream = tokens * model.d_model * step.element_bytes
    queries_keys = tokens * (heads + kv_heads) * d_qk * step.element_bytes
    values = tokens * (heads + kv_heads) * d_v * step.element_bytes
    keys_values = tokens * kv_heads * (d_qk + d_v) * step.element_bytes

    ring = step.strategies.devices("context")

    # The reference stores its scores: written in float32, read and written by softmax, read by the second matmul.
    per_score = 12.0 if reference else 0.0

    def core(phase: str, per_pair: Number, exchanged: Number, factor: Number = 1.0) -> Work:
        """``per_pair`` FLOPs per (query, key, head); keys and values go round ``exchanged`` times."""
        matmuls = per_pair / (d_qk + d_v)
        return Work(
            scope="layers/attn/core",
            phase=phase,
            count=count * factor,
            flops={step.numerics.compute: per_pair * scores if reference else 0.0},
            kernel_flops=0.0 if reference else per_pair * scores,
            hbm_bytes=(matmuls / 2) * (queries_keys + values + per_score * scores),
            matmul_s=step.rates.attention_s(scores, d_qk, d_v, backward=phase == "backward"),
            collectives=(Transfer("permute_ring", ("context",), exchanged * keys_values * ring, "context"),),
            formula="2 FLOPs per pair, head and head size in each matmul of [T, S] blocks, masked blocks skipped",
        )

    rope = Work(
        scope="layers/attn/rope", phase="forward", count=count, hbm_bytes=passes.ROPE_PASSES * queries_keys,
        vector_flops=passes.VECTOR_OPS["rope"] * queries_keys / step.element_bytes,
        formula="queries and keys rotated, transposed, written: 6.3 passes",
    )  # fmt: skip
    recomputed = step.strategies.recomputed
    forward = float(kernel_flops(step.slice.chip, d_qk, d_v))
    backward = 2 * forward if reference else float(kernel_flops(step.slice.chip, d_qk, d_v, backward=True))
    core_again = recomputed("attn_core")
    # Keys and values go round, then their gradients; the first hop is the one that the recomputation has made.
    around = 2.0 - core_again / np.maximum(ring - 1, 1)
    out_again = recomputed("attn_out") * (1.0 if _post_norms(step) else recomputed("mlp_input"))
    # MLA gathers what its latents hold, each of its down-projections being done where the tokens are.
    latents = sum(m.n for m in matmuls.latent)
    widths = model.d_model if model.mla is None or model.mla.q_rank is None else 0.0
    gathered = tokens * (widths + latents) * step.element_bytes
    return [
        *passes.norm(step, "layers/attn/norm", count, recomputed("attn_normed")),
        *passes.matmuls(step, "layers/attn/qkv", count, matmuls.latent, tokens / tensor, again=recomputed("qkv")),
        *passes.matmuls(
            step, "layers/attn/qkv", count, matmuls.into, tokens, gathered=gathered, again=recomputed("qkv")
        ),
        rope,
        passes.recompute(rope, recomputed("rope")),
        passes.backward(rope, 2.0),
        core("forward", forward, 1.0),
        # Even where its output is kept, the reference computes its scores again for the gradient of softmax.
        core("recompute", forward / 2 * (1 + core_again), 1.0)
        if reference
        else core("recompute", forward, 1.0, core_again),
        core("backward", backward, around),
        *passes.matmuls(
            step, "layers/attn/out", count, matmuls.out, tokens, scattered=stream, again=out_again, residual=True
        ),
        *passes.offloads(step, count, _ATTENTION_CHECKPOINTS, moe_layer=False),
    ]


def _mlp(step: TrainingStep, count: Number) -> list[Work]:
    recomputed = step.strategies.recomputed
    up, down = mlp_matmuls(step.model, step.model.d_ff, step.tensor)
    stream = step.tokens * step.model.d_model * step.element_bytes
    again = recomputed("mlp_down") * _post_norms(step)
    return [
        *passes.norm(step, "layers/mlp/norm", count, recomputed("mlp_normed")),
        *passes.matmuls(step, "layers/mlp/up", count, up, step.tokens, gathered=stream, again=recomputed("mlp_up")),
        *passes.activation(step, "layers/mlp/act", count, step.tokens * step.model.d_ff / step.tensor),
        *passes.matmuls(
            step, "layers/mlp/down", count, down, step.tokens, scattered=stream, again=again, residual=True
        ),
        *passes.offloads(step, count, _MLP_CHECKPOINTS, moe_layer=False),
    ]


def _experts(step: TrainingStep, count: Number) -> list[Work]:
    model, moe = step.model, step.model.moe
    assert moe is not None
    recomputed, element = step.strategies.recomputed, step.element_bytes
    own = step.tokens / step.tensor  # The router and the exchange work on the sequence shard of each device.
    routed = step.tokens * moe.active
    sent = own * moe.active * model.d_model * element
    again = recomputed("mlp_up")
    exchange = (Transfer("all_to_all", ("expert",), sent, "all_to_all"),)
    # Each pair's weight goes with it, in float32; the expert's output comes back weighed.
    dispatch = (Transfer("all_to_all", ("expert",), sent + 4.0 * own * moe.active, "all_to_all"),)
    up, down = mlp_matmuls(model, moe.d_ff, step.tensor)
    # Tokens of all expert shards meet here; each local expert sees its share of them.
    local = moe.experts / step.strategies.devices("expert")
    per_expert = routed / local
    gathered = routed * model.d_model * element
    router = Matmul(float(model.d_model) * np.ones_like(step.tensor), float(moe.experts) * np.ones_like(step.tensor))
    move = Work(
        scope="layers/moe/dispatch", phase="forward", count=count, hbm_bytes=2 * sent, collectives=dispatch,
        formula="AllToAll of k T D bytes over expert, and of the weights of k experts",
    )  # fmt: skip
    back = Work(
        scope="layers/moe/combine", phase="forward", count=count, hbm_bytes=2 * sent, collectives=exchange,
        vector_flops=2 * sent / element, formula="AllToAll back, then the weighted sum of k experts",
    )  # fmt: skip
    # The experts' inputs are gathered over tensor with their weights.
    shares = Work(
        scope="layers/moe/experts", phase="forward", count=count,
        collectives=(Transfer("all_gather", ("tensor",), 4.0 * routed, "tensor"),), formula="weights of k experts",
    )  # fmt: skip
    scattered = (Transfer("reduce_scatter", ("tensor",), 4.0 * routed, "tensor"),)
    work = [
        *passes.norm(step, "layers/mlp/norm", count, recomputed("mlp_normed")),
        *passes.matmuls(step, "layers/moe/router", count, [router], own, again=again),
        move,
        passes.recompute(move, recomputed("mlp_normed")),
        passes.backward(move, 1.0),
        *passes.matmuls(
            step,
            "layers/moe/experts",
            count * local,
            up,
            per_expert,
            gathered=gathered / local,
            again=again,
            copies=("context",),
        ),
        shares,
        passes.recompute(shares, 1.0),
        replace(passes.backward(shares, 1.0), collectives=scattered),
        *passes.activation(step, "layers/moe/experts", count, routed * moe.d_ff / step.tensor),
        *passes.matmuls(
            step,
            "layers/moe/experts",
            count * local,
            down,
            per_expert,
            scattered=gathered / local,
            again=0.0,
            copies=("context",),
        ),
        back,
        passes.backward(back, 1.0),
        *passes.offloads(step, count, _EXPERT_CHECKPOINTS, moe_layer=True),
    ]
    if moe.shared_d_ff:
        stream = step.tokens * model.d_model * element
        up, down = mlp_matmuls(model, moe.shared_d_ff, step.tensor)
        scope = "layers/moe/shared"
        work += [
            *passes.matmuls(step, scope, count, up, step.tokens, gathered=stream, again=again),
            *passes.activation(step, scope, count, step.tokens * moe.shared_d_ff / step.tensor),
            *passes.matmuls(step, scope, count, down, step.tokens, scattered=stream, again=0.0),
        ]
    return work


def _head(step: TrainingStep) -> list[Work]:
    """Final norm, unembedding and loss, once per microbatch; on the last stage of a pipeline."""
    model, count = step.model, step.strategies.microbatches
    table = Matmul(model.d_model * np.ones_like(step.tensor), model.vocab / step.tensor)
    stream = step.tokens * model.d_model * step.element_bytes
    logits = step.tokens * model.vocab / step.tensor
    # Over the split vocabulary: the maximum, then the sum and the label's logit, each a float32 per token.
    sums = tuple(Transfer("all_reduce", ("tensor",), 4.0 * step.tokens * each, "tensor") for each in (1, 2))
    mean = Transfer("all_reduce", TOKEN_AXES, 4.0, "tensor")
    loss = Work(
        scope="loss", phase="forward", count=count, hbm_bytes=8.0 * logits, collectives=(*sums, mean),
        vector_flops=passes.VECTOR_OPS["loss"] * logits,
        formula="float32 logits read twice; maximum and sums over the split vocabulary",
    )  # fmt: skip
    work = [
        *passes.norm(step, "final_norm", count, 0.0),
        *passes.matmuls(step, "unembed", count, [table], step.tokens, gathered=stream, again=0.0),
    ]
    if model.tied_embeddings:
        turned = Transfer("all_to_all", ("tensor",), step.held_parameters["vocab"] * step.element_bytes, "all_to_all")
        turn = Work(
            scope="unembed", phase="forward", count=count, collectives=(turned,),
            formula="the embedding table, split over D, split over V instead",
        )  # fmt: skip
        work += [turn, passes.backward(turn, 1.0)]
    return [
        *work,
        loss,
        passes.backward(loss, 1.0, collectives=False),
    ]


def _update(step: TrainingStep) -> list[Work]:
    held = step.held_parameters
    total = held["dense"] + held["experts"] + held["vocab"]
    gradient = dtype_bytes(step.numerics.gradients)
    partial = step.sequence_parameters
    sums = {
        ("data", "context"): held["experts"],
        ("data", "expert", "context"): held["dense"] + held["vocab"] - partial,
        ("data", "expert", "context", "tensor"): partial,
    }
    # Stages sum what expert and context hold copies of where it is made, and all of them hold some weights.
    of_stages = {("data",): total, ("stage",): held["vocab"] + step.parameters_alone}
    reduce = tuple(
        Transfer("all_reduce", axes, elements * gradient, "gradient_all_reduce", when)
        for found, when in ((sums, 1 - step.staged), (of_stages, step.staged), (step.vectors, 1.0))
        for axes, elements in found.items()
    )
    more = np.maximum(step.strategies.microbatches - 1, 0)
    return [
        Work(
            scope="gradients", phase="update", count=1, collectives=reduce,
            hbm_bytes=total * (gradient + more * (8 + gradient)), vector_flops=2 * total,
            formula="gradient shards summed over the axes that hold copies; float32 sums over microbatches; norm",
        ),
        Work(
            scope="optimizer", phase="update", count=1, hbm_bytes=total * step.numerics.update_bytes,
            vector_flops=passes.VECTOR_OPS["update"] * total, formula="state read and written once per parameter held",
        ),
    ]  # fmt: skip


def _pipeline(step: TrainingStep) -> list[Work]:
    """Activations passed to the next stage, and back; the idle time is added when the rest is known."""
    sent = step.tokens * step.model.d_model * step.element_bytes / step.tensor
    count = step.strategies.microbatches * step.strategies.chunks
    work = Work(
        scope="pipeline", phase="forward", count=count, collectives=(Transfer("permute", ("stage",), sent, "stage"),),
        formula="T D bytes to the next stage for each microbatch and chunk",
    )  # fmt: skip
    return [work, passes.backward(work, 1.0)]


def _post_norms(step: TrainingStep) -> bool:
    """Whether the outputs of attention and MLP are normalised before they are added: their norms read them again."""
    return step.model.norms_per_layer == 4
