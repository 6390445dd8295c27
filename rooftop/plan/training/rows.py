"""The work of a training step, scope by scope: FLOPs, bytes and collectives of one device.

Chapters 4 and 5 of the book. A collective is in the scope of the matmul that it serves. Weights are gathered again
in the backward pass; that gather is part of the recompute phase, as a compiler sees it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, combinations
from typing import Literal

import numpy as np

from rooftop.arrays.rules import (
    AXES,
    COLUMN_AXES,
    EXPERT_AXES,
    GATHER_AXES,
    REPLICA_AXES,
    SEQUENCE_AXES,
    STAGE_AXES,
    TOKEN_AXES,
    copy_axes,
)
from rooftop.core.ledger import CollectiveKind, Ledger, Number
from rooftop.core.quantities import dtype_bytes
from rooftop.core.rounding import next_multiple
from rooftop.core.scopes import Phase
from rooftop.models.activations import MLP_CHECKPOINTS, POLICIES
from rooftop.models.attention import MatmulShape, attention_kind, parameters
from rooftop.models.config import MLA, MoE
from rooftop.models.mixers import STATE_BYTES, Recurrence
from rooftop.models.optimizers import NEWTON_SCHULZ_STEPS, SMALLEST_FACTORED_DIM, deal, newton_schulz_flops
from rooftop.models.program_sizes import LANES
from rooftop.models.segments import LayerKind, segments, shared_segment
from rooftop.plan.pricing import ALWAYS, RingSteps, StagePart, Transfer, Work
from rooftop.plan.shapes import MixerMatmuls, mlp_matmuls
from rooftop.plan.training.memory import shared_bytes
from rooftop.plan.training.pricing import price_work
from rooftop.plan.training.step import TrainingStep
from rooftop.roofline.achievable import grouped_matmul_seconds, kernel_flops
from rooftop.roofline.rules import distinct_parts

#: The scope in which each checkpoint of a layer is made, and so leaves for host memory and comes back.
_ATTENTION_CHECKPOINTS = {
    "layer_input": "layers/attn/norm",
    "attn_normed": "layers/attn/norm",
    "qkv": "layers/attn/qkv",
    "rope": "layers/attn/rope",
    "attn_core": "layers/attn/core",
    "attn_out": "layers/attn/out",
}
_DENSE_CHECKPOINTS = {
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


def training_ledger(step: TrainingStep) -> Ledger:
    """Every row of the step, with the exposed time of its collectives; figures broadcast to [C, K]."""
    return price_work(
        training_work(step), step.strategies, step.rates, step.assumptions, step.last_chunk,
        fills_stages=step.habits.fills_stages, launch_s=step.launch_s,
    )  # fmt: skip


def training_work(step: TrainingStep) -> list[Work]:
    """Every piece of work of a step, in the order in which it is first done."""
    microbatches, alone = step.strategies.microbatches, step.layers_alone
    layers, dense = step.layers - alone.every, step.dense_layers - alone.every_dense
    shared = _layers(step, dense * microbatches, (layers - dense) * microbatches)
    shared += _stacked(step, dense * microbatches, (layers - dense) * microbatches)
    if (period := len(segments(step.model)[shared_segment(step.model)].kinds)) > 1:
        shared = [replace(item, period=period) for item in shared]
    if np.any(step.padding_layers):
        shared = [replace(item, skipped=step.padding_layers / layers) for item in shared]
    first, last = _embed(step), _head(step)
    if np.any(alone.first):
        # What the first stage does alone is not kept from task to task: its backward pass begins with the tokens.
        begun = replace(step, strategies=step.strategies.with_policy(POLICIES["block"]))
        again = _embed(step, (alone.first > 0) * microbatches)[0]
        first += [replace(again, phase="recompute")]
        first += _layers(begun, alone.first_dense * microbatches, (alone.first - alone.first_dense) * microbatches)
    if np.any(alone.last):
        last += _layers(step, alone.last_dense * microbatches, (alone.last - alone.last_dense) * microbatches)
    work = [*_of("first", first), *shared, *_of("last", last), *_vector_sums(step)]
    return [*work, *_update(step), *_of("sends", _pipeline(step))]


def _of(part: StagePart, work: Iterable[Work]) -> list[Work]:
    """The work, as that of a part of the model."""
    return [replace(item, part=part) for item in work]


def _layers(step: TrainingStep, dense: Number, experts: Number) -> list[Work]:
    """Work of dense layers and of layers of experts, each times its execution count."""
    layers = dense + experts
    work = _attention(step, layers * step.attention_share) if step.model.attention_layers else []
    for kind, shapes, share in step.mixers:
        work += _mixer(step, kind, shapes, layers * share)
    if step.model.dense_layers:
        work += _mlp(step, dense)
    if step.model.moe is not None:
        work += _experts(step, experts)
    return work


def _stacked(step: TrainingStep, dense: Number, experts: Number) -> list[Work]:
    """Passes over the stacks of gradients of a stage's layers, as counted in compiled programs.

    A task fills the gradients of its layers with zeros first. Where a stage may skip a layer, each layer's gradients
    are copied into the stack.
    """
    if not np.any(step.staged) or not step.assumptions.own_program or step.slice.chip.kind != "tpu":
        return []
    sizes, gather = step.layer_parameters, step.strategies.devices(*GATHER_AXES)
    passes = np.where(step.padding_layers > 0, 3.0, 1.0)
    parts = [("layers/attn/qkv", dense + experts, sizes["attn"])]
    if step.model.dense_layers:
        parts.append(("layers/mlp/up", dense, sizes["mlp"]))
    if step.model.moe is not None:
        parts += [("layers/moe/experts", experts, sizes["experts"]), ("layers/moe/shared", experts, sizes["shared"])]
    return [
        Work(
            scope=scope, phase="backward", count=count,
            elementwise_bytes=step.staged * passes * elements / gather * step.element_bytes,
            formula="gradients of a task's layers begun with zeros, and put into their stack",
        )
        for scope, count, elements in parts
    ]  # fmt: skip


def _embed(step: TrainingStep, count: Number | None = None) -> list[Work]:
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


def _attention(step: TrainingStep, count: Number) -> list[Work]:
    model, tensor, tokens = step.model, step.tensor, step.tokens
    kind, shapes, kv_heads = attention_kind(model), step.attention, step.kv_heads
    d_qk, d_v = kind.head_sizes
    heads = step.widths.heads
    reference = step.assumptions.attention == "reference"
    scores = tokens * heads * step.pairs_per_token
    ring = step.strategies.devices(*SEQUENCE_AXES)
    stream = tokens * model.d_model * step.element_bytes
    queries_keys = tokens * (heads + kv_heads) * d_qk * step.element_bytes
    values = tokens * (heads + kv_heads) * d_v * step.element_bytes
    keys_values = tokens * kv_heads * (d_qk + d_v) * step.element_bytes

    unstacked = _unstacked_bytes(step, _ATTENTION_CHECKPOINTS, moe_layer=False)
    stacked = _stacked_bytes(step, _ATTENTION_CHECKPOINTS, moe_layer=False)

    # The reference stores its scores: written in float32, read and written by softmax, read by the second matmul.
    per_score = 12.0 if reference else 0.0

    # Windowed layers get the keys before their chunks, and again for the backward pass.
    ringed, before = step.key_exchange
    window = (Transfer("permute", SEQUENCE_AXES, before * keys_values, "tensor", 1 - step.staged),)
    around_bytes = ringed * keys_values * ring
    hops = np.maximum(ring - 1, 0)
    queries = tokens * heads * (d_qk + d_v) / 2 * step.element_bytes

    def merged(passes: _RingPasses) -> Number:
        """HBM bytes of a ring beyond those of its kernels, which write heads of whole registers."""
        lanes = LANES if step.slice.chip.kind == "tpu" else 1
        padded = (next_multiple(d_qk, lanes) + next_multiple(d_v, lanes)) / (d_qk + d_v)
        moved = padded * ((passes.once + passes.hop * hops) * queries + passes.keys_hop * hops * keys_values)
        # What small queries leave in VMEM was not read for latent attention.
        in_hbm = step.in_hbm(padded * queries) if model.mla is None else 1.0
        return np.where(ring > 1, ringed * (1 - step.staged) * in_hbm * moved, 0.0)

    fused = step.assumptions.fused_attention_gradients

    def core(phase: Phase, per_pair: Number, exchanged: Number, factor: Number = 1.0) -> Work:
        """``per_pair`` FLOPs per (query, key, head); keys and values go round ``exchanged`` times, or are gathered."""
        executed = per_pair / (d_qk + d_v)
        merging = merged(_RING_BACKWARD if phase == "backward" else _RING_FORWARD)
        moves = (
            Transfer("permute_ring", SEQUENCE_AXES, exchanged * around_bytes, "context", 1 - step.staged),
            Transfer(
                "reduce_scatter" if phase == "backward" else "all_gather",
                SEQUENCE_AXES, keys_values * ring, "tensor", step.staged,
            ),
        )  # fmt: skip
        return Work(
            scope="layers/attn/core",
            phase=phase,
            count=count * factor,
            flops={step.numerics.compute: per_pair * scores if reference else 0.0},
            kernel_flops=0.0 if reference else per_pair * scores,
            hbm_bytes=(executed / 2) * (queries_keys + values + per_score * scores),
            elementwise_bytes=merging + {"forward": stacked, "backward": unstacked}.get(phase, 0.0),
            matmul_s=step.rates.attention_s(
                scores,
                d_qk,
                d_v,
                backward=phase == "backward",
                fused=fused,
                kernels=step.assumptions.attention_kernels,
                queries=tokens * heads,
            )
            / step.habits.attention_speed,
            collectives=(moves if np.any(step.staged) else moves[:1]) + (() if phase == "recompute" else window),
            formula="2 FLOPs per pair, head and head size in each matmul of [T, S] blocks, masked blocks skipped",
        )

    kernels = _passes(step)
    passes = kernels.rope + (kernels.normed_heads if model.qk_norm else 0.0)
    rope = Work(
        scope="layers/attn/rope", phase="forward", count=count,
        hbm_bytes=passes * step.in_hbm(tokens * heads * d_qk * step.element_bytes) * queries_keys,
        vector_flops=VECTOR_OPS["rope"] * queries_keys / step.element_bytes,
        formula=f"queries and keys {'normalised, ' if model.qk_norm else ''}rotated, transposed, written: "
        f"{passes:.1f} passes{', but for what stays in VMEM' if step.slice.chip.kind == 'tpu' else ''}",
    )  # fmt: skip
    again = Work(
        scope="layers/attn/core", phase="recompute", count=count, collectives=window,
        formula="keys and values before the window's chunks fetched again",
    )  # fmt: skip
    recomputed = step.strategies.recomputed
    per_pair = float(kernel_flops(step.slice.chip, d_qk, d_v))
    gradients = float(kernel_flops(step.slice.chip, d_qk, d_v, backward=True, fused=fused))
    per_pair_backward = 2 * per_pair if reference else gradients
    core_again = recomputed("attn_core")
    nested = step.staged if step.assumptions.own_program else 0.0
    # Keys and values go round, then their gradients; the first hop is the one that the recomputation has made.
    around = 2.0 - core_again / np.maximum(ring - 1, 1)
    out_again = recomputed("attn_out") * (1.0 if _post_norms(step) else recomputed("mlp_input"))
    # Down-projections to latents are done where the tokens are, and the latents are gathered.
    latents = sum(m.n for m in shapes.latent)
    widths = model.d_model if kind.gathers_stream else 0.0
    gathered = tokens * (widths + latents) * step.element_bytes
    return [
        *norm(step, "layers/attn/norm", count, recomputed("attn_normed")),
        *matmuls(step, "layers/attn/qkv", count, shapes.latent, tokens / tensor, again=recomputed("qkv")),
        *matmuls(
            step,
            "layers/attn/qkv",
            count,
            shapes.into,
            tokens,
            gathered=gathered,
            again=recomputed("qkv"),
            keys=True,
            rings=step.rings * (1 - step.widths.copied_keys) if model.mla is None else 0.0,
            arrays=3 if model.mla is None else len(shapes.into),
            heads=(model.d_head,) if model.mla is None else (model.mla.d_nope + model.mla.d_v, d_qk),
        ),
        rope,
        recompute(rope, recomputed("rope")),
        backward(rope, kernels.rope_backward / kernels.rope),
        core("forward", per_pair, 1.0),
        # Even where its output is kept, the reference computes its scores again for the gradient of softmax. In a stage
        # of our program the backward pass of any kernel begins with its forward pass: residuals cannot leave nested
        # shard_maps.
        core("recompute", per_pair / 2 * (1 + core_again + nested), 1.0)
        if reference
        else core("recompute", per_pair, 1.0, core_again + nested),
        again,
        core("backward", per_pair_backward, around),
        *matmuls(
            step,
            "layers/attn/out",
            count,
            shapes.out,
            tokens,
            scattered=stream,
            again=out_again,
            residual=True,
            rings=step.rings,
        ),
        *offloads(step, count, _ATTENTION_CHECKPOINTS, moe_layer=False),
    ]


def _mixer(step: TrainingStep, kind: Recurrence, shapes: MixerMatmuls, count: Number) -> list[Work]:
    """A recurrent mixer: its projections, and its recurrence in chunks (``rooftop.models.mixers``)."""
    recomputed, tokens, element = step.strategies.recomputed, step.tokens, step.element_bytes
    stream = tokens * step.model.d_model * element
    width = sum((shape.n for shape in shapes.into), 0.0) + sum((shape.k for shape in shapes.out), 0.0)
    flops = kind.chunked_flops / step.tensor * tokens
    # With a context axis, the state after a device's part of a sequence goes on to the device of the next part.
    sequences = tokens * step.strategies.devices(*SEQUENCE_AXES) / step.positions
    state = Transfer("permute", SEQUENCE_AXES, kind.state / step.tensor * STATE_BYTES * sequences, "tensor")

    def core(phase: Phase, passes: float, factor: Number = 1.0) -> Work:
        return Work(
            scope="layers/attn/core", phase=phase, count=count * factor, flops={step.numerics.compute: passes * flops},
            matmul_s=passes * flops / step.rates.flops_per_s[step.numerics.compute],
            hbm_bytes=passes * tokens * width * element, collectives=(state,),
            formula="T tokens through the recurrence in chunks, and through the convolution before it",
        )  # fmt: skip

    again = recomputed("attn_core")
    return [
        *([] if kind.beside_attention else norm(step, "layers/attn/norm", count, recomputed("attn_normed"))),
        *matmuls(step, "layers/attn/qkv", count, shapes.into, tokens, gathered=stream, again=recomputed("qkv")),
        *matmuls(step, "layers/attn/core", count, shapes.inside, tokens, again=again),
        core("forward", 1.0),
        core("recompute", 1.0, again),
        core("backward", 2.0),
        *matmuls(step, "layers/attn/out", count, shapes.out, tokens, scattered=stream, again=0.0, residual=True),
    ]


def _mlp(step: TrainingStep, count: Number) -> list[Work]:
    recomputed = step.strategies.recomputed
    columns = step.columns(step.model.d_ff)
    up, down = mlp_matmuls(step.model, columns)
    stream = step.tokens * step.model.d_model * step.element_bytes
    again = recomputed("mlp_down") * _post_norms(step)
    unstacked = _unstacked_bytes(step, _DENSE_CHECKPOINTS, moe_layer=False)
    return [
        *norm(step, "layers/mlp/norm", count, recomputed("mlp_normed")),
        *matmuls(
            step,
            "layers/mlp/up",
            count,
            up,
            step.tokens,
            gathered=stream,
            again=recomputed("mlp_up"),
            rings=step.rings,
            arrays=step.model.mlp_matrices - 1,
            stacked=_stacked_bytes(step, _DENSE_CHECKPOINTS, moe_layer=False),
        ),
        *activation(step, "layers/mlp/act", count, step.tokens * columns, dense=True),
        *matmuls(
            step,
            "layers/mlp/down",
            count,
            down,
            step.tokens,
            scattered=stream,
            again=again,
            residual=True,
            rings=step.rings,
            unstacked=unstacked,
        ),
        *offloads(step, count, _DENSE_CHECKPOINTS, moe_layer=False),
    ]


def _experts(step: TrainingStep, count: Number) -> list[Work]:
    model, moe = step.model, step.model.moe
    assert moe is not None
    element = step.element_bytes

    def recomputed(name: str) -> Number:
        """1 where a checkpoint is made again, as all are in a stage (``programs.sharding.on_shards``)."""
        nested = step.staged if step.assumptions.own_program else 0.0
        again: Number = np.maximum(step.strategies.recomputed(name), nested)
        return again

    own = step.tokens / step.tensor  # The router and the exchange work on the sequence shard of each device.
    # Experts that pad a shard have slots like any other.
    slots = step.habits.capacity * moe.active * (step.widths.experts * step.expert_ways / moe.experts)
    up_tiles, down_tiles = step.habits.group_rows or (None, None)
    whole, columns = step.whole_experts, step.columns_of_expert
    # Tokens of the whole tensor group, unless each of its devices has its own experts.
    routed = np.where(whole, own, step.tokens) * slots
    sent = own * slots * model.d_model * element
    again = recomputed("mlp_up")
    exchange = _exchange(step, sent)
    # Each pair's weight goes with it, in float32; the expert's output comes back weighed.
    dispatch = _exchange(step, sent + 4.0 * own * slots)
    up, down = mlp_matmuls(model, columns)
    # Tokens of all expert shards meet here; each local expert sees its share of them.
    local = step.widths.experts
    per_expert = routed / local
    gathered = routed * model.d_model * element
    passes = _EXCHANGE_PASSES * step.passed(sent)
    if step.slice.chip.kind == "gpu":
        # PyTorch's AllToAll needs rows in order on either side; a dispatcher of nodes has one copy for each GPU until
        # then. XLA:GPU gathers and scatters rows by index, 10.7 passes in the five times that they are moved.
        twice = step.habits.kernels is not None and step.habits.dispatch == "experts"
        passes = _PERMUTE_PASSES * sent * (2.0 if twice else 1.0)
    masked_s: Number = 0.0
    if step.habits.one_hot:
        # Of each sequence, [slots, T] x [T, D]. The mask is written and read, and so are the rows.
        length = step.workload.seq_len
        masked_s = step.rates.matmul_s(
            slots * length, length, model.d_model, step.numerics.compute, np.maximum(1.0, own / length)
        )
        passes = 2.0 * own * slots * length * element + sent + own * model.d_model * element
    move = Work(
        scope="layers/moe/dispatch", phase="forward", count=count, hbm_bytes=passes, collectives=dispatch,
        matmul_s=masked_s,
        formula="k T D bytes put into slots and sent to their experts by an AllToAll, with the weights of k experts",
    )  # fmt: skip
    back = Work(
        scope="layers/moe/combine", phase="forward", count=count, hbm_bytes=passes, collectives=exchange,
        vector_flops=2 * sent / element, matmul_s=masked_s, formula="AllToAll back, then the weighted sum of k experts",
    )  # fmt: skip
    # Shards of several experts arrive device by device: a copy puts those of each expert together.
    together = np.where(
        (local > 1) & (step.strategies.devices(*GATHER_AXES) > 1),
        step.passed(step.stored(down) * local * step.operand_bytes),
        0.0,
    )
    hidden = routed * columns * element
    # The experts' inputs are gathered over tensor with their weights.
    shares = Work(
        scope="layers/moe/experts", phase="forward", count=count,
        collectives=(Transfer("all_gather", COLUMN_AXES, 4.0 * routed, "tensor", _unless(whole)),),
        formula="weights of k experts",
    )  # fmt: skip
    # The gradients of these weights read all hidden activations once more.
    of_shares = replace(backward(shares, 1.0), hbm_bytes=model.mlp_matrices * hidden)
    copies = Work(
        scope="layers/moe/experts", phase="forward", count=count, hbm_bytes=model.mlp_matrices * together,
        formula="gathered weights of several experts put together",
    )  # fmt: skip
    narrow = step.operand_bytes < step.element_bytes and step.assumptions.own_program
    widened = Work(
        scope="layers/moe/experts", phase="forward", count=count,
        elementwise_bytes=_WIDENED_PASSES * sent if narrow and step.slice.chip.kind == "tpu" else 0.0,
        formula="rows of experts made float32 before they are copied into the layout of matmuls in 8 bits",
    )  # fmt: skip
    scattered = (Transfer("reduce_scatter", COLUMN_AXES, 4.0 * routed, "tensor", _unless(whole)),)
    work = [
        # Kept are the rows of experts, not the norm's output that the router's gradient reads.
        *norm(step, "layers/mlp/norm", count, 1.0),
        *matmuls(step, "layers/moe/router", count, [step.router], own, again=again),
        move,
        recompute(move, recomputed("mlp_normed")),
        _moved_back(step, move),
        *matmuls(
            step,
            "layers/moe/experts",
            count * local,
            up,
            per_expert,
            gathered=gathered / local,
            again=again,
            dims=("embed", "expert"),
            experts=local,
            arrays=model.mlp_matrices - 1,
            whole=whole,
            stacked=_stacked_bytes(step, _EXPERT_CHECKPOINTS, moe_layer=True) / local,
            tiles=up_tiles,
        ),
        shares,
        copies,
        widened,
        recompute(shares, 1.0),
        replace(of_shares, collectives=scattered),
        *activation(step, "layers/moe/experts", count, routed * columns, again=recomputed("mlp_act")),
        *matmuls(
            step,
            "layers/moe/experts",
            count * local,
            down,
            per_expert,
            scattered=gathered / local,
            again=recomputed("mlp_down") if step.habits.weighs_outputs else 0.0,
            dims=("embed", "expert"),
            experts=local,
            whole=whole,
            unstacked=_unstacked_bytes(step, _EXPERT_CHECKPOINTS, moe_layer=True) / local,
            tiles=down_tiles,
        ),
        back,
        # A mask with the weights has a gradient too.
        replace(backward(back, 1.0), matmul_s=2.0 * masked_s),
        *offloads(step, count, _EXPERT_CHECKPOINTS, moe_layer=True),
    ]
    if moe.shared_d_ff:
        stream = step.tokens * model.d_model * element
        columns = step.columns(moe.shared_d_ff)
        up, down = mlp_matmuls(model, columns)
        scope = "layers/moe/shared"
        work += [
            *matmuls(step, scope, count, up, step.tokens, gathered=stream, again=again, arrays=model.mlp_matrices - 1),
            *activation(step, scope, count, step.tokens * columns, again=recomputed("mlp_act")),
            *matmuls(step, scope, count, down, step.tokens, scattered=stream, again=0.0),
        ]
    return work


def _moved_back(step: TrainingStep, move: Work) -> Work:
    """The way back of gradients of rows; XLA:GPU has gradients of experts' weights next to it."""
    back = backward(move, 1.0)
    if step.slice.chip.kind != "gpu" or step.habits.kernels is not None:
        return back
    return replace(back, collectives=tuple(replace(one, hides="gradient_scatter") for one in back.collectives))


def _exchange(step: TrainingStep, payload: Number) -> tuple[Transfer, ...]:
    """The AllToAll of tokens over the devices that have experts."""
    whole, both = step.whole_experts, (*EXPERT_AXES, *COLUMN_AXES)
    over_experts = Transfer(
        "all_to_all", EXPERT_AXES, payload, "all_to_all", _unless(whole), shares=_sent_once(step, EXPERT_AXES)
    )
    if not np.any(whole):
        return (over_experts,)
    return over_experts, Transfer("all_to_all", both, payload, "all_to_all", whole, shares=_sent_once(step, both))


def _sent_once(step: TrainingStep, axes: tuple[str, ...]) -> Mapping[str, Number]:
    """The shares of an AllToAll's bytes that are left where a token is sent once to each node, and there to each GPU.

    A token goes to the nodes and GPUs that its experts are in; those of other nodes arrive at one GPU of a node, and go
    on to the others within it.
    """
    moe = step.model.moe
    if moe is None or step.habits.dispatch == "experts":
        return {}
    devices, within = step.strategies.devices(*axes), step.strategies.price("all_to_all", axes).ranks
    # Groups of layouts have least prices, those of the most devices in a node.
    node = float(np.prod(step.slice.chip.pod_shape))
    nodes = devices / (np.minimum(devices, node) if within is None else within)
    parts = partial(distinct_parts, moe.experts, moe.active, groups=moe.groups, active_groups=moe.active_groups)
    return {"ici": nodes * parts(devices) / moe.active, "dcn": parts(nodes) / moe.active}


def _head(step: TrainingStep) -> list[Work]:
    """Final norm, unembedding and loss, once per microbatch; on the last stage of a pipeline."""
    model, count = step.model, step.strategies.microbatches
    table = MatmulShape(model.d_model * np.ones_like(step.tensor), np.asarray(step.widths.vocab))
    stream = step.tokens * model.d_model * step.element_bytes
    logits = step.tokens * step.widths.vocab
    # Over the split vocabulary: the maximum, then the sum and the label's logit, each a float32 per token.
    sums = tuple(Transfer("all_reduce", COLUMN_AXES, 4.0 * step.tokens * floats, "tensor") for floats in (1, 2))
    mean = Transfer("all_reduce", TOKEN_AXES, 4.0, "tensor")
    unembed = matmuls(step, "unembed", count, [table], step.tokens, gathered=stream, again=0.0)
    loss = Work(
        scope="loss", phase="forward", count=count, hbm_bytes=8.0 * logits, collectives=(*sums, mean),
        vector_flops=VECTOR_OPS["loss"] * logits,
        formula="float32 logits read twice; maximum and sums over the split vocabulary",
    )  # fmt: skip
    losses = [loss, backward(loss, 1.0, collectives=False)]
    if step.assumptions.own_program:
        unembed = _in_chunks(step, table, unembed)
    if step.assumptions.own_program:
        # The derivative of the softmax belongs to the gradients of the unembedding.
        formula = "float32 logits read for the sums over the split vocabulary"
        passes = _stored_logits(step, logits) if step.slice.chip.kind == "tpu" else 8.0 * logits
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
    gradients = logits if step.slice.chip.kind == "tpu" else element * count
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
    if step.slice.chip.kind == "tpu":
        return work
    derivative = Work(
        scope="unembed", phase="backward", count=both.count, hbm_bytes=(4.0 + element) * count,
        formula="derivative of the softmax: float32 logits read, their gradients written in the dtype of matmuls",
    )  # fmt: skip
    return [*work, derivative]


def _vector_sums(step: TrainingStep) -> list[Work]:
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


def _update(step: TrainingStep) -> list[Work]:
    shards = step.held_parameters
    total = shards["dense"] + shards["experts"] + shards["vocab"]
    gradient = dtype_bytes(step.numerics.gradients)
    partial = step.sequence_parameters
    sums = {
        copy_axes("embed", "expert"): shards["experts"],
        copy_axes("embed"): shards["dense"] + shards["vocab"] - partial,
        copy_axes("embed", sequence="residual_seq"): partial,
    }
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
    read = total * gradient
    if step.assumptions.own_program and step.slice.chip.kind == "tpu":
        # The loop over microbatches adds the first one's to zeros. Each microbatch's stacks of layers' gradients begin
        # as zeros, too. Only clipping, and the norm as a metric, read sums once more.
        stacks = step.strategies.microbatches * (shards["dense"] + shards["experts"]) * step.element_bytes
        read = np.where(step.staged, read, stacks)
        added = total * step.strategies.microbatches * (more > 0)
    if step.assumptions.own_program and np.any(step.staged):
        outside = shards["vocab"] * (1 + step.model.tied_embeddings)
        of_a_trip = (shards["dense"] + shards["experts"]) / step.strategies.chunks + outside
        added = np.where(step.staged, of_a_trip * step.strategies.trips, added)
    return [
        Work(
            scope="gradients", phase="update", count=1, collectives=reduce,
            hbm_bytes=read + added * (8 + gradient), vector_flops=2 * total,
            formula="gradient shards summed over the axes that hold copies; float32 sums over microbatches; norm",
        ),
        Work(
            scope="optimizer", phase="update", count=1,
            hbm_bytes=(total - shards["vocab"]) * step.numerics.update_bytes
            + shards["vocab"] * step.numerics.table_update_bytes,
            vector_flops=VECTOR_OPS["update"] * total, formula="state read and written once per parameter held",
        ),
        *(_orthogonalise(step) if step.numerics.update.orthogonalised else ()),
        *(_factored(step) if step.numerics.update.factored else ()),
    ]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _StackedMatrix:
    """A stacked weight: one matrix [rows, columns] as all devices store it, [C, 1].

    Fsdp splits its rows. Tensor splits its columns if ``in_columns`` is 1 and its rows if 0, or nothing if None. Of
    several heads the columns are [heads, ``head``], and tensor splits the heads. ``arrays`` weights are alike, each of
    so many ``experts`` on a device: ``whole`` ones if tensor deals them out. ``when`` is 1 where the weight is stored
    like this.
    """

    rows: Number
    columns: Number
    in_columns: Number | None
    head: int | None = None
    arrays: int = 1
    experts: Number | None = None
    whole: bool = False
    when: Number = 1.0


def _orthogonalise(step: TrainingStep) -> list[Work]:
    """Newton-Schulz steps of all matrices, and the collectives that deal them out: see ``optimizers.deal``."""
    return [
        _of_matrix(step, matrix, stacked, staged=staged)
        for kind, stacked, staged in _stacks(step)
        for matrix in _matrices(step, kind)
    ]


def _stacks(step: TrainingStep) -> Iterator[tuple[LayerKind, Number, bool]]:
    """Each kind of layer of each segment: how many are stacked, and if pipeline stages share them."""
    for at, segment in enumerate(segments(step.model)):
        shared = at == shared_segment(step.model)
        stacked = np.where(step.staged, step.periods, segment.repeats) if shared else np.float64(segment.repeats)
        for kind in segment.kinds:
            yield kind, stacked, shared


def _matrices(step: TrainingStep, kind: LayerKind) -> Iterator[_StackedMatrix]:
    """The matrices of one layer, as programs store them."""
    model, moe = step.model, step.model.moe
    yield from _attention_matrices(step) if model.mla is None else _latent_matrices(step, model.mla)
    if kind.moe and moe is not None:
        yield from _expert_matrices(step, moe)
        if moe.shared_d_ff:
            yield from _mlp_matrices(step, moe.shared_d_ff)
    else:
        yield from _mlp_matrices(step, model.d_ff)


def _expert_matrices(step: TrainingStep, moe: MoE) -> Iterator[_StackedMatrix]:
    whole, expert = step.whole_experts, step.strategies.devices(*EXPERT_AXES)
    if not np.all(whole):
        for matrix in _mlp_matrices(step, moe.d_ff, np.ceil(moe.experts / expert)):
            yield replace(matrix, when=1.0 - whole)
    if np.any(whole):
        d, hidden, stored = step.model.d_model, moe.d_ff * np.ones_like(expert), step.widths.stored
        of_experts = partial(
            _StackedMatrix,
            in_columns=None,
            experts=np.ceil(moe.experts / (expert * step.tensor)),
            whole=True,
            when=whole,
        )
        yield of_experts(rows=stored(d), columns=hidden, arrays=step.model.mlp_matrices - 1)
        yield of_experts(rows=stored(hidden), columns=d)


def _mlp_matrices(step: TrainingStep, hidden: int, experts: Number | None = None) -> Iterator[_StackedMatrix]:
    d, columns, stored = step.model.d_model, step.columns(hidden), step.widths.stored
    yield _StackedMatrix(
        rows=stored(d), columns=columns * step.tensor, in_columns=1, arrays=step.model.mlp_matrices - 1, experts=experts
    )
    yield _StackedMatrix(rows=stored(columns) * step.tensor, columns=d, in_columns=0, experts=experts)


def _attention_matrices(step: TrainingStep) -> Iterator[_StackedMatrix]:
    model, widths, tensor = step.model, step.widths, step.tensor
    d, h, copied = model.d_model, model.d_head, widths.copied_keys > 0
    yield _StackedMatrix(rows=widths.stored(d), columns=widths.heads * tensor * h, in_columns=1, head=h)
    yield _StackedMatrix(
        rows=np.where(copied, widths.spread(d), widths.stored(d)),
        columns=np.where(copied, model.kv_heads, step.kv_heads * tensor) * h,
        in_columns=1 - widths.copied_keys,
        head=h,
        arrays=2,
    )
    yield _StackedMatrix(rows=widths.stored(widths.heads * h) * tensor, columns=d, in_columns=0)


def _latent_matrices(step: TrainingStep, mla: MLA) -> Iterator[_StackedMatrix]:
    model, widths = step.model, step.widths
    d, heads = model.d_model, widths.heads * step.tensor
    if mla.q_rank is not None:
        yield _StackedMatrix(rows=widths.stored(d), columns=mla.q_rank, in_columns=None)
    queries = heads * model.d_head
    yield _StackedMatrix(rows=widths.stored(mla.q_rank or d), columns=queries, in_columns=1, head=model.d_head)
    yield _StackedMatrix(rows=widths.stored(d), columns=mla.kv_rank + mla.d_rope, in_columns=None)
    head = mla.d_nope + mla.d_v
    yield _StackedMatrix(rows=widths.stored(mla.kv_rank), columns=heads * head, in_columns=1, head=head)
    yield _StackedMatrix(rows=widths.stored(widths.heads * mla.d_v) * step.tensor, columns=d, in_columns=0)


@dataclass(frozen=True, kw_only=True)
class _StoredDim:
    """A dim of a stored array: its size over all devices and the ``axes`` that split it."""

    size: Number
    axes: tuple[str, ...] = ()


def _factored(step: TrainingStep) -> list[Work]:
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

    for kind, stacked, _ in _stacks(step):
        for matrix in _matrices(step, kind):
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


def _stored_dims(matrix: _StackedMatrix) -> Iterator[tuple[tuple[_StoredDim, ...], Number]]:
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


def _of_matrix(step: TrainingStep, matrix: _StackedMatrix, stacked: Number, *, staged: bool) -> Work:
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


def _pipeline(step: TrainingStep) -> list[Work]:
    """Activations passed to the next stage, and back; the idle time is added when the rest is known.

    Our program puts a microbatch's checkpoints into their place in the stage's buffer after each trip, whether or not
    there are any: a read and a write.
    """
    staged = bool(np.any(step.staged))
    sent = step.tokens * step.model.d_model * step.element_bytes / step.tensor
    transfer = Transfer("permute", STAGE_AXES, sent, "stage")
    copied: Number = 0.0
    if staged and step.assumptions.own_program:
        copied = 2.0 * step.staged * shared_bytes(step, "save") / step.strategies.chunks
    work = Work(
        scope="pipeline", phase="forward", count=step.strategies.trips if staged else 1.0, collectives=(transfer,),
        elementwise_bytes=copied,
        formula="T D bytes to the next stage in each trip through the schedule, whether or not it has a use for them; "
        "checkpoints of a microbatch put into their buffer",
    )  # fmt: skip
    return [work, replace(backward(work, 1.0), elementwise_bytes=0.0)]


def _post_norms(step: TrainingStep) -> bool:
    """True if outputs of attention and MLP are normalised before they are added: their norms read them again."""
    return step.model.post_norms


#: Checkpoints that no matmul makes; those that the scan over layers keeps in any case are counted with the norms.
_APART = ("attn_normed", "rope", "attn_core", "mlp_normed")
#: Passes over the rows of experts on their way there or back, as counted in compiled programs: rows gathered by index,
#: zeros in empty slots, and copies into the layouts of the AllToAll and of the matmuls.
_EXCHANGE_PASSES = 4.0
#: Passes more over rows of experts, in units of bf16, before they are quantised in the forward pass: a read and a write
#: as float32 (3), a copy of these into the layout of the matmul (4), and a read of float32 in place of bf16 (1).
#: Counted in the program of DeepSeek-V2-Lite in int8 (docs/accuracy.md).
_WIDENED_PASSES = 8.0
#: Passes of XLA:GPU over the checkpoints of a layer: written to their stacks by copies, and copied out of them.
_STACK_PASSES = 5.0
#: Passes (a read or a write) of a kernel that puts the rows of experts in order, by token or by expert.
_PERMUTE_PASSES = 2.0


@dataclass(frozen=True, kw_only=True)
class _RingPasses:
    """HBM passes of ring attention outside its kernels: of queries ``once`` and each ``hop``, of keys and values."""

    once: float
    hop: float
    keys_hop: float


#: Queries are cut, scaled and transposed for each hop, and outputs, their log-sum-exps and gradients are merged in
#: float32. As counted in compiled layers with rings of 2, 4 and 8 devices (docs/accuracy.md).
_RING_FORWARD = _RingPasses(once=15, hop=7, keys_hop=3.5)
_RING_BACKWARD = _RingPasses(once=8, hop=16.5, keys_hop=4.5)

#: HBM passes (a read or a write) of elementwise work that XLA:TPU does not fuse into matmuls, in one forward execution;
#: the backward pass has twice as many. Together 18 D + 38 (N + K) H bytes per token and layer in bf16, as counted in
#: compiled layers (docs/achievable.md): norms, and around attention the rotation, transposes and log-sum-exps. Gates
#: and residual sums are fused, and paid in the matmuls' fraction of peak.
_NORM_PASSES = 1.5
ROPE_PASSES = 38 / 6
#: Passes more where queries and keys are normalised before they are rotated: XLA writes them in float32 between, as
#: counted in the programs of Qwen3-0.6B (docs/accuracy.md).
_NORMED_HEADS_PASSES = 3.3


@dataclass(frozen=True, kw_only=True)
class _ElementwisePasses:
    """HBM passes (a read or a write of bf16) of elementwise work in one execution, by scope.

    ``norm`` has the residual sum before it; ``normed_heads`` are those of rope where queries and keys are normalised
    first; ``act_more`` are those of an activation beyond one kernel that reads its
    inputs and writes its result, forward; backward there are twice as many. ``again``: an activation that is recomputed
    is a kernel of its own, not a second result of its gradient's.
    """

    norm: float
    norm_backward: float
    rope: float
    rope_backward: float
    normed_heads: float = 0.0
    act_more: float = 0.0
    again: bool = True


#: By ``Framework.kernels``. Fused kernels read their inputs and write their results once: a sum 3 passes, a norm 2, its
#: gradient 3, and 3 for the sum of two gradients; rotation 2. Eager PyTorch has a kernel for each operation, with
#: float32 between them: RMSNorm converts (3 passes), squares (4), averages (2), scales (4), converts (3) and multiplies
#: (2), about half as much again backward; rotation converts, multiplies and converts back (10); SwiGLU is two kernels.
#: XLA:GPU fuses nothing into cuBLAS's matmuls: as counted in compiled layers (docs/compile.md).
_ELEMENTWISE: Mapping[str | None, _ElementwisePasses] = {
    None: _ElementwisePasses(
        norm=_NORM_PASSES,
        norm_backward=3.0,
        rope=ROPE_PASSES,
        rope_backward=2 * ROPE_PASSES,
        normed_heads=_NORMED_HEADS_PASSES,
    ),
    "xla:gpu": _ElementwisePasses(norm=3.5, norm_backward=5.5, rope=2.0, rope_backward=2.0, again=False),
    "fused": _ElementwisePasses(norm=5.0, norm_backward=6.0, rope=2.0, rope_backward=2.0),
    "eager": _ElementwisePasses(norm=21.0, norm_backward=30.0, rope=10.0, rope_backward=12.0, act_more=2.0),
}


def _passes(step: TrainingStep) -> _ElementwisePasses:
    xla = "xla:gpu" if step.slice.chip.kind == "gpu" else None
    return _ELEMENTWISE[step.habits.kernels or xla]


#: HBM passes of collective matmuls beyond those of plain ones, as counted in compiled layers
#: (docs/collective-matmul.md): of their outputs, whose buffers XLA copies; of a gathered stream that the gradients of
#: weights read, put together from shards; and of a scattered shard, of which a device's own term is added last.
_BUFFER_PASSES, _WHOLE_PASSES, _SCATTER_PASSES = 2.0, 2.0, 4.0
#: Pieces of a matmul whose output is scattered piece by piece: Megatron's user buffers have four (Megatron-Bridge's
#: performance guide).
_SCATTER_PIECES = 4

#: Vector operations per element: RMSNorm, rotation, gate times activation, residual add, softmax with loss, AdamW.
VECTOR_OPS = {"norm": 4, "rope": 4, "act": 5, "add": 1, "loss": 6, "update": 14}


def matmuls(
    step: TrainingStep,
    scope: str,
    count: Number,
    shapes: Sequence[MatmulShape],
    tokens: Number,
    *,
    again: Number,
    gathered: Number | None = None,
    scattered: Number | None = None,
    residual: bool = False,
    dims: tuple[str, ...] = ("embed",),
    keys: bool = False,
    experts: Number = 1.0,
    arrays: int = 1,
    heads: Sequence[int] = (),
    unstacked: Number = 0.0,
    stacked: Number = 0.0,
    rings: Number = 0.0,
    whole: Number = 0.0,
    tiles: tuple[int, int, int] | None = None,
) -> list[Work]:
    """Forward, recompute and backward of ``shapes``, matmuls that share an input or feed one output.

    ``gathered`` is the bytes of the input once gathered over tensor, ``scattered`` those of the partial sums that
    are scattered over it; ``again`` is 1 where the forward pass is recomputed; ``residual`` adds the sum into the
    residual stream. ``dims`` are logical dims of the weights: axes that split none of them hold copies, whose
    gradients are summed at once in pipeline stages, elsewhere once a step. ``keys``: key and value heads are among the
    columns, which are gathered over tensor too where devices have heads in common. Weights are in ``arrays`` arrays,
    each with collectives of its own, of as many ``experts`` at once; ``shapes`` are of one. The columns of each may be
    ``heads`` of so many elements. ``stacked`` are bytes of checkpoints that the forward pass moves, ``unstacked`` those
    that the backward pass moves before it. Where ``rings`` is 1, shards of the input or the output travel next to the
    matmul, which is done in pieces. Where ``whole`` is 1, tensor splits nothing here, and nothing is gathered or
    scattered over it. ``tiles`` are rows of a tile of the kernels that multiply the rows of all ``experts``, forward,
    for gradients of inputs and of weights; None: the compiler multiplies the experts as one batch.
    """
    if not shapes:
        return []
    element, compute = step.element_bytes, step.numerics.compute
    # Routers and the unembedding multiply in the dtype of activations.
    dtype = step.numerics.matmul if scope.startswith("layers") and scope != "layers/moe/router" else compute
    operand = element if dtype == compute else step.operand_bytes
    narrow = operand < element
    of_gradient = "f8_e5m2" if dtype == "f8_e4m3" else dtype
    of_sum = of_gradient if step.assumptions.narrow_gradients else compute
    weights = parameters(shapes)
    inputs = sum((tokens * m.k for m in shapes), 0.0)
    outputs = sum((tokens * m.n for m in shapes), 0.0)
    flops = 2.0 * sum((tokens * m.parameters for m in shapes), 0.0)
    # Arrays that share an input read it one by one, and their gradients of it are added up in HBM. Those of matmuls in
    # 8 bits are of 32 bits until the last one.
    sharing = arrays if len(shapes) == 1 and step.assumptions.own_program else 1
    read, of_input = sharing * inputs, (sharing - 1) * 2.0 * (4.0 if narrow else element) + element
    forward_bytes = (read + weights) * operand + outputs * element
    backward_bytes = (outputs + weights) * (operand + element) + read * element + inputs * of_input
    # Rows that fsdp adds are cut off once the weight is gathered, and put to its gradient.
    stored = step.stored(shapes)
    cut = np.where(stored > weights, (stored + weights) * element, 0.0) if step.assumptions.own_program else 0.0
    # An activation is read and written in fewer bits: its maxima are fused into what makes it. A device quantises its
    # own part of a weight, which it reads for the maxima and once more.
    of_weight = weights / step.strategies.devices(*GATHER_AXES) * (2.0 * element + operand) if narrow else 0.0
    if step.habits.quantises_once:
        of_weight = of_weight / step.strategies.microbatches
    # A device's part of a weight is copied out of the stack of layers before it is gathered, forward into VMEM. What is
    # not gathered is copied for the backward pass only.
    out_of_stack: tuple[Number, Number] = (0.0, 0.0)
    if scope.startswith("layers") and step.assumptions.own_program and step.slice.chip.kind == "tpu":
        ways = step.strategies.devices(*GATHER_AXES)
        part = weights / ways * element
        out_of_stack = np.where(ways > 1, part, 0.0), 2.0 * part
    # Sums of gradients are read by the matmuls that add to them.
    summed_bytes = element * weights if step.habits.adds_in_matmuls else 0.0
    quantised = step.habits.quantising_reads * element + step.habits.quantised_copies * operand
    of_inputs, of_outputs = (size * quantised if narrow else 0.0 for size in (inputs, outputs))
    stream = tokens * step.model.d_model * element / step.tensor
    weights = (stored - (step.own_keys if keys else 0.0)) * element

    def share_s(m: Number, k: Number, n: Number, dtype: str) -> Number:
        """Seconds of one expert's part of the batch, or of its own matmul."""
        if not step.habits.groups_experts:
            return step.rates.matmul_s(m, k, n, dtype)
        return step.rates.matmul_s(m, k, n, dtype, experts) / experts

    def grouped_s(of: Literal["forward", "inputs", "weights"], rows: Number, shape: MatmulShape, dtype: str) -> Number:
        """Seconds of one expert's part of a kernel, which executes tiles that two experts share for both.

        The cores of a device deal out the columns of the result by tiles.
        """
        assert tiles is not None
        executed = rows + tiles[("forward", "inputs", "weights").index(of)] * (1.0 - 1.0 / experts)
        tile, chip = step.habits.group_dim, step.rates.chip
        columns = shape.n if len(shapes) > 1 else shape.n / arrays
        k, n = shape.k, columns
        if tile:
            dealt = tile * chip.cores // chip.devices
            of_k, of_n = (dealt, tile) if of == "inputs" else (tile, dealt)
            k, n = next_multiple(k, of_k), next_multiple(n, of_n)
        return grouped_matmul_seconds(chip, of, executed, k, n * (shape.n / columns), dtype)

    def into_s(rows: Number) -> Number:
        if tiles is not None:
            return sum((grouped_s("forward", rows, m, dtype) for m in shapes), 0.0)
        return sum((share_s(rows, m.k, m.n, dtype) for m in shapes), 0.0)

    def back_s(rows: Number) -> Number:
        if tiles is not None:
            return sum((grouped_s("inputs", rows, m, of_gradient) for m in shapes), 0.0)
        return sum((share_s(rows, m.n, m.k, of_gradient) for m in shapes), 0.0)

    forward_s, dx_s = into_s(tokens), back_s(tokens)
    forward_ring: RingSteps | None = None
    backward_ring: RingSteps | None = None
    forward_passes: Number = 0.0
    again_passes: Number = 0.0
    backward_passes: Number = 0.0
    payload = gathered if scattered is None else scattered
    if payload is not None and np.any(rings):
        # A gathered input makes one matmul of each shard. A scattered output has this device's shard as one, and the
        # others in halves.
        shard, into, out = tokens / step.tensor, *((into_s, back_s) if scattered is None else (back_s, into_s))
        gathered_s: Number = step.tensor * into(shard)
        scattered_s: Number = out(shard) + 2 * (step.tensor - 1) * out(shard / 2)
        if step.habits.kernels is not None:
            # An input is quantised once; what each piece more costs is the start of its matmul.
            start_s = step.rates.fractions.matmul["16-bit"].start_s
            gathered_s, scattered_s = into(tokens), out(tokens) + (_SCATTER_PIECES - 1) * start_s
            gathered_s = gathered_s + (step.tensor - 1) * start_s
        pieces_s = gathered_s, scattered_s
        ring = partial(
            RingSteps,
            on=rings,
            members=step.tensor,
            pieces=0 if step.habits.kernels is None else _SCATTER_PIECES,
            at_once=step.rates.overlap.asynchronous == "all",
        )
        gathering, scattering = ring(beside_s=into(shard), sums=False), ring(beside_s=out(shard), sums=True)
        added = rings * _SCATTER_PASSES * payload / step.tensor
        if scattered is None:
            forward_s, dx_s = np.where(rings, pieces_s[0], forward_s), np.where(rings, pieces_s[1], dx_s)
            forward_ring, backward_ring = gathering, scattering
            forward_passes = rings * _BUFFER_PASSES * outputs * element
            again_passes = again * (forward_passes + rings * _WHOLE_PASSES * payload)
            backward_passes = added + rings * (arrays - 1) * payload
        else:
            forward_s, dx_s = np.where(rings, pieces_s[1], forward_s), np.where(rings, pieces_s[0], dx_s)
            forward_ring, backward_ring = scattering, gathering
            forward_passes, again_passes = added, again * added
            backward_passes = rings * _WHOLE_PASSES * payload
    if tiles is None:
        dw_s = sum((share_s(m.k, tokens, m.n, of_sum) for m in shapes), 0.0)
    else:
        dw_s = sum((grouped_s("weights", tokens, m, of_sum) for m in shapes), 0.0)
    pieces = arrays / experts
    gather_weight: tuple[Transfer, ...] = (
        Transfer("all_gather", GATHER_AXES, weights * operand / element, "weight_gather", pieces=pieces),
    )
    split_columns = _unless(whole)
    # Maxima of whole columns of weights, and of whole tokens, each a float32, where devices split the summed dim.
    input_maxima: tuple[Transfer, ...] = ()
    gradient_maxima: tuple[Transfer, ...] = ()
    if narrow:
        columns = 4.0 * sum((m.n for m in shapes), 0.0)
        over_columns = scattered is not None
        split = (*GATHER_AXES, *COLUMN_AXES) if over_columns else GATHER_AXES
        gather_weight += (
            Transfer("all_reduce", split, columns, "tensor", split_columns if over_columns else ALWAYS, pieces=pieces),
        )
        if over_columns and np.any(whole):
            gather_weight += (Transfer("all_reduce", GATHER_AXES, columns, "tensor", whole, pieces=pieces),)
        of_tokens = partial(Transfer, "all_reduce", COLUMN_AXES, hides="tensor", when=split_columns)
        if over_columns:
            input_maxima = (of_tokens(4.0 * tokens, pieces=1 / experts),)
        elif gathered is not None:
            gradient_maxima = (of_tokens(4.0 * tokens * arrays, pieces=pieces),)
    several_experts = experts if "expert" in dims else 0.0
    scatter_weight: tuple[Transfer, ...] = ()
    for shape, head in zip(shapes, heads or (0,) * len(shapes), strict=True):
        # Several shapes are one array each; a gate and an up are one shape.
        columns = shape.n if len(shapes) > 1 or head else shape.n / arrays
        summed = step.summed_whole(MatmulShape(shape.k, columns), head=head, experts=several_experts)
        share = weights if len(shapes) == 1 else step.stored([shape]) * element
        # Parts of heads or experts are scattered in whole tiles or not at all.
        moves, rows = (0.0, 0.0) if head or "expert" in dims else step.shifts(shape.k)
        scatter_weight += (
            Transfer(
                "reduce_scatter", GATHER_AXES, share, "gradient_scatter", pieces=pieces / len(shapes), summed=summed,
                shifts=moves * pieces / len(shapes), shifted=rows * columns * element,
            ),
        )  # fmt: skip
    if keys and np.any(step.copied_keys):
        copied, both, when = step.copied_keys * element, (*GATHER_AXES, *COLUMN_AXES), step.widths.copied_keys
        gather_weight += (Transfer("all_gather", both, copied * operand / element, "weight_gather", when, pieces=2),)
        scatter_weight += (Transfer("reduce_scatter", both, copied, "gradient_scatter", when, pieces=2),)
    if np.any(step.staged):
        own = weights / step.strategies.devices(*GATHER_AXES)
        copies = tuple(axis for axis in copy_axes(*dims) if axis not in REPLICA_AXES)
        scatter_weight += (Transfer("all_reduce", copies, own, "gradient_scatter", step.staged),)

    def exchange(kind: CollectiveKind, payload: Number | None, ring: RingSteps | None) -> tuple[Transfer, ...]:
        if payload is None:
            return ()
        if step.habits.quantises_once and kind == "all_gather":
            # Inputs and gradients are quantised where they are made.
            payload = payload * operand / element
        return (Transfer(kind, COLUMN_AXES, payload, "tensor", split_columns, pieces=1 / experts, ring=ring),)

    gather_input = exchange("all_gather", gathered, forward_ring)
    scatter_input = exchange("reduce_scatter", gathered, backward_ring)
    scatter_output = exchange("reduce_scatter", scattered, forward_ring)
    gather_output = exchange("all_gather", scattered, backward_ring)
    # Where no matmul is repeated, none can be next to the hops.
    again_ring = None if forward_ring is None else replace(forward_ring, on=forward_ring.on * again)
    input_again = exchange("all_gather", gathered, again_ring)
    if step.habits.hides_gradients:
        # Inputs arrive next to matmuls of gradients of inputs, and these are summed next to those of weights.
        input_again, scatter_input = (
            tuple(replace(one, hides="gradient_scatter", ring=None) for one in some)
            for some in (input_again, scatter_input)
        )
    terms = " + ".join("2 T k n" for _ in shapes)
    once = scope == "unembed"  # Outside the layers nothing is recomputed and the gathered weight is still there.
    forward = Work(
        scope=scope, phase="forward", count=count, flops={dtype: flops}, matmul_s=forward_s,
        hbm_bytes=forward_bytes,
        elementwise_bytes=of_inputs + of_weight + forward_passes + cut + out_of_stack[0] + stacked,
        vector_flops=VECTOR_OPS["add"] * stream / element if residual else 0.0,
        collectives=gather_weight + gather_input + input_maxima + scatter_output, formula=terms,
    )  # fmt: skip
    backward = Work(
        scope=scope, phase="backward", count=count,
        flops={of_sum: 2 * flops} if of_gradient == of_sum else {of_gradient: flops, of_sum: flops},
        matmul_s=dx_s + dw_s, hbm_bytes=backward_bytes + summed_bytes,
        elementwise_bytes=of_outputs + unstacked + backward_passes + cut,
        collectives=scatter_weight + gather_output + gradient_maxima + scatter_input,
        formula=f"dX and dW: 2 x ({terms})",
    )  # fmt: skip
    # In the backward pass weights, and inputs that are kept as shards, are gathered whether or not the matmul is
    # repeated; the matmul and its scattered output only if its result was not kept.
    regather = Work(
        scope=scope, phase="recompute", count=0 if once else count,
        flops={dtype: flops * again}, matmul_s=forward_s * again,
        hbm_bytes=forward_bytes * again,
        elementwise_bytes=of_inputs * again + of_weight + again_passes + cut + out_of_stack[1],
        collectives=gather_weight
        + input_again
        + tuple(replace(t, payload=t.payload * again) for t in (*input_maxima, *scatter_output)),
        formula="weights and inputs gathered again; the matmul repeated where its output was not kept",
    )  # fmt: skip
    return [forward, backward] if once else [forward, regather, backward]


def norm(step: TrainingStep, scope: str, count: Number, again: Number) -> list[Work]:
    """A layer's norms of one scope, or the final one, on the residual stream; ``again`` 1 where they are recomputed."""
    stream = step.tokens * step.model.d_model * step.element_bytes / step.tensor
    times = step.model.norms_per_layer / 2 if scope.startswith("layers") else 1.0
    passes = _passes(step)
    forward = Work(
        scope=scope, phase="forward", count=count, hbm_bytes=passes.norm * stream * times,
        vector_flops=VECTOR_OPS["norm"] * times * stream / step.element_bytes,
        formula=f"T D read, partly fused into what reads it: {passes.norm:.2g} passes",
    )  # fmt: skip
    return [forward, recompute(forward, again), backward(forward, passes.norm_backward / passes.norm)]


def activation(
    step: TrainingStep, scope: str, count: Number, hidden: Number, *, dense: bool = False, again: Number | None = None
) -> list[Work]:
    """Vector work on T F elements; its traffic is that of the matmuls that it is fused into.

    A result of a ``dense`` layer that is kept, of several sequences, has passes of its own: its inputs are read and it
    is written; in the backward pass a copy has the layout of the gradient's matmul. A collective matmul writes its
    output piece by piece: the activation is then fused with nothing but the copy of kept inputs.
    """
    again = step.strategies.recomputed("mlp_act") if again is None else again
    if step.habits.kernels is not None or step.slice.chip.kind == "gpu":
        return _activation_kernels(step, scope, count, hidden, again=again)
    apart = dense * step.rings * hidden * step.element_bytes
    alone = apart * step.strategies.recomputed("mlp_up")
    sequences = step.tokens * step.strategies.devices(*SEQUENCE_AXES) / step.workload.seq_len
    passed = dense * (1 - again) * (sequences > 1) * hidden * step.element_bytes
    forward = Work(
        scope=scope, phase="forward", count=count, vector_flops=VECTOR_OPS["act"] * hidden,
        elementwise_bytes=step.model.mlp_matrices * (passed + alone),
        formula="T F elements, fused into the matmuls around them unless it is kept",
    )  # fmt: skip
    back = replace(backward(forward, 2.0), elementwise_bytes=2.0 * passed + (2 * step.model.mlp_matrices - 1) * apart)
    return [forward, recompute(replace(forward, elementwise_bytes=0.0), again), back]


def _activation_kernels(step: TrainingStep, scope: str, count: Number, hidden: Number, *, again: Number) -> list[Work]:
    """Vector work on T F elements in kernels of its own."""
    passes, matrices = _passes(step), step.model.mlp_matrices
    forward = Work(
        scope=scope, phase="forward", count=count, vector_flops=VECTOR_OPS["act"] * hidden,
        elementwise_bytes=(matrices + passes.act_more) * hidden * step.element_bytes,
        formula="T F elements, a kernel of its own: its inputs read, its result written",
    )  # fmt: skip
    # A kernel that gives the activation again, too, writes one array more.
    moved = (2 * matrices - passes.again + 2 * passes.act_more) * hidden * step.element_bytes
    once_more = recompute(forward if passes.again else replace(forward, elementwise_bytes=0.0), again)
    return [forward, once_more, replace(backward(forward, 2.0), elementwise_bytes=moved)]


def offloads(step: TrainingStep, count: Number, scopes: Mapping[str, str], *, moe_layer: bool) -> list[Work]:
    """Offloaded checkpoints of a layer on their way to host memory, and back for the backward pass."""
    own = step.tokens / step.tensor * step.element_bytes
    work = []
    for name, scope in scopes.items():
        offloaded = step.strategies.kept("offload", step.model, moe_layer=moe_layer, names=(name,))
        if offloaded.any():
            formula = f"T elements of {name} to host memory and back"
            work += [
                Work(scope=scope, phase=phase, count=count, host_bytes=offloaded * own, formula=formula)
                for phase in ("forward", "backward")
            ]
    return work


def _unstacked_bytes(step: TrainingStep, scopes: Iterable[str], *, moe_layer: bool) -> Number:
    """Bytes that a layer's backward pass moves to have the named checkpoints, as counted in compiled programs.

    Layers are scanned, so that checkpoints of all are stacked. XLA copies a layer's out of the stack (a read and a
    write), and does not fuse that with what reads them. A stage takes a microbatch's out of its buffer in the same way.
    The layer's input is counted with the norms. XLA:GPU copies them into the stack, too; other frameworks on GPUs have
    no stacks.
    """
    if step.habits.kernels is not None:
        return 0.0
    names = [name for name in scopes if name != "layer_input"]
    elements = step.strategies.kept("save", step.model, moe_layer=moe_layer, names=names)
    if moe_layer and np.any(step.staged):
        inside = [name for name in names if name in MLP_CHECKPOINTS]
        # A stage keeps nothing of what happens next to its experts.
        elements = elements - step.staged * step.strategies.kept("save", step.model, moe_layer=True, names=inside)
    passes = _STACK_PASSES if step.slice.chip.kind == "gpu" else 2.0
    return passes * (1.0 + step.staged) * elements * step.tokens / step.tensor * step.element_bytes


def _stacked_bytes(step: TrainingStep, scopes: Iterable[str], *, moe_layer: bool) -> Number:
    """Bytes that a layer's forward pass moves to keep the named checkpoints, as counted in compiled programs.

    XLA:TPU fuses the results of matmuls with their stacks. The results of norms, of the rotation and of attention's
    kernel are read once more and written; what is small is read from VMEM.
    """
    if not step.assumptions.own_program or step.slice.chip.kind != "tpu":
        return 0.0
    names = [name for name in scopes if name in _APART]
    elements = step.strategies.kept("save", step.model, moe_layer=moe_layer, names=names)
    copied = elements * (1.0 - step.staged) * step.tokens / step.tensor * step.element_bytes
    return copied * (1.0 + step.in_hbm(copied / len(names)))


def _unless(condition: Number) -> Number:
    """``Transfer.when`` of a transfer that takes place where ``condition`` is 0."""
    return 1.0 - condition if np.any(condition) else ALWAYS


def recompute(work: Work, repeated: Number) -> Work:
    """Forward work repeated in the backward pass, where ``repeated`` is 1."""
    return replace(work, phase="recompute", count=work.count * repeated)


def backward(work: Work, factor: float, *, collectives: bool = True) -> Work:
    """The backward pass of elementwise or moving work: ``factor`` times the traffic, the transposed collectives."""
    return replace(
        work,
        phase="backward",
        hbm_bytes=factor * work.hbm_bytes,
        vector_flops=factor * work.vector_flops,
        collectives=work.collectives if collectives else (),
        formula=f"backward of: {work.formula}",
    )
