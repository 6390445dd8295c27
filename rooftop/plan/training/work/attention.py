"""Attention: norm, projections, rotation, the kernel or its reference, and the output projection."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rooftop.arrays.rules import SEQUENCE_AXES
from rooftop.core.ledger import Number
from rooftop.core.rounding import next_multiple
from rooftop.core.scopes import Phase
from rooftop.models.attention import attention_kind
from rooftop.models.program_sizes import LANES
from rooftop.plan.pricing import Transfer, Work
from rooftop.plan.training.step import TrainingStep
from rooftop.plan.training.work.checkpoints import offloads, stacked_bytes, unstacked_bytes
from rooftop.plan.training.work.elements import VECTOR_OPS, elementwise_passes, norm
from rooftop.plan.training.work.matmuls import matmuls
from rooftop.plan.training.work.phases import backward, recompute
from rooftop.roofline.achievable import kernel_flops

#: The scope in which each checkpoint of a layer is made, and so leaves for host memory and comes back.
_ATTENTION_CHECKPOINTS = {
    "layer_input": "layers/attn/norm",
    "attn_normed": "layers/attn/norm",
    "qkv": "layers/attn/qkv",
    "rope": "layers/attn/rope",
    "attn_core": "layers/attn/core",
    "attn_out": "layers/attn/out",
}


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


def attention_work(step: TrainingStep, count: Number) -> list[Work]:
    """Work of ``count`` attention layers."""
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

    unstacked = unstacked_bytes(step, _ATTENTION_CHECKPOINTS, moe_layer=False)
    stacked = stacked_bytes(step, _ATTENTION_CHECKPOINTS, moe_layer=False)

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

    kernels = elementwise_passes(step)
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
    out_again = recomputed("attn_out") * (1.0 if step.model.post_norms else recomputed("mlp_input"))
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
