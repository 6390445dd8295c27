"""Attention: norm, projections, rotation, the kernel or its reference, and the output projection."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np

from rooftop.arrays.rules import SEQUENCE_AXES
from rooftop.core.ledger import CollectiveKind, Number
from rooftop.core.rounding import next_multiple
from rooftop.core.scopes import Phase
from rooftop.models.attention import attention_kind
from rooftop.plan.pricing import Transfer, Work
from rooftop.plan.training.step import TrainingStep
from rooftop.plan.training.work.checkpoints import offloads, unstacked_bytes
from rooftop.plan.training.work.elements import VECTOR_OPS, norm
from rooftop.plan.training.work.matmuls.block import MatmulBlock
from rooftop.plan.training.work.matmuls.work import matmul_work
from rooftop.plan.training.work.phases import backward, recompute
from rooftop.roofline.achievable import KERNEL_MATMULS, kernel_flops

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
#: float32. As counted in compiled layers with rings of 2, 4 and 8 devices (docs/evidence/accuracy.md).
_RING_FORWARD = _RingPasses(once=15, hop=7, keys_hop=3.5)
_RING_BACKWARD = _RingPasses(once=8, hop=16.5, keys_hop=4.5)


@dataclass(frozen=True, kw_only=True)
class _ScorePasses:
    """HBM bytes of a score between the matmuls of the ``chunked`` kernel: heads ``alone``, or ``grouped`` by keys."""

    alone: float
    grouped: float


#: As XLA:GPU compiles them (jax 0.10.2, tests/compiler/test_targets.py). Forward: scores in float32 are read for their
#: maximum, for the sum of weights, and for weights, which are written in 16 bits.
#: Backward: scores and gradients of weights are read, weights and gradients of scores written in 16 bits; grouped, both
#: are transposed as well.
_CHUNKED_FORWARD = _ScorePasses(alone=14.0, grouped=14.0)
_CHUNKED_BACKWARD = _ScorePasses(alone=12.0, grouped=20.0)


def attention_work(step: TrainingStep, count: Number) -> list[Work]:
    """Work of ``count`` attention layers."""
    return [
        *norm(step, "layers/attn/norm", count, step.strategies.recomputed("attn_normed")),
        *_projections(step, count),
        *_rotation(step, count),
        *_core_work(_Core(step=step, count=count)),
        *_output(step, count),
        *offloads(step, count, _ATTENTION_CHECKPOINTS, moe_layer=False),
    ]


def _projections(step: TrainingStep, count: Number) -> list[Work]:
    """Projections to latents, if any, and to queries, keys and values.

    Down-projections to latents are done where the tokens are, and the latents are gathered.
    """
    model, shapes, kind = step.model, step.attention, attention_kind(step.model)
    latents = sum(m.n for m in shapes.latent)
    widths = model.d_model if kind.gathers_stream else 0.0
    block = partial(MatmulBlock, scope="layers/attn/qkv", count=count, again=step.strategies.recomputed("qkv"))
    into = block(
        shapes=shapes.into,
        tokens=step.tokens,
        gathered=step.tokens * (widths + latents) * step.element_bytes,
        keys=True,
        rings=step.rings * (1 - step.widths.copied_keys) if model.mla is None else 0.0,
        arrays=3 if model.mla is None else len(shapes.into),
    )
    latent = block(shapes=shapes.latent, tokens=step.tokens / step.tensor)
    return [*matmul_work(step, latent), *matmul_work(step, into)]


def _rotation(step: TrainingStep, count: Number) -> list[Work]:
    """Rotation of queries and keys, and their norms where they have some."""
    model, tokens, heads = step.model, step.tokens, step.widths.heads
    d_qk, _ = attention_kind(model).head_sizes
    queries_keys = tokens * (heads + step.kv_heads) * d_qk * step.element_bytes
    kernels = step.habits.passes
    passes = kernels.rope + (kernels.normed_heads if model.qk_norm else 0.0)
    rope = Work(
        scope="layers/attn/rope", phase="forward", count=count,
        hbm_bytes=passes * step.in_hbm(tokens * heads * d_qk * step.element_bytes) * queries_keys,
        vector_flops=VECTOR_OPS["rope"] * queries_keys / step.element_bytes,
        formula=f"queries and keys {'normalised, ' if model.qk_norm else ''}rotated, transposed, written: "
        f"{passes:.1f} passes{', but for what stays in VMEM' if step.habits.vmem_share else ''}",
    )  # fmt: skip
    return [
        rope,
        recompute(rope, step.strategies.recomputed("rope")),
        backward(rope, kernels.rope_backward / kernels.rope),
    ]


@dataclass(frozen=True, kw_only=True)
class _Core:
    """Attention between the projections, on one device: scores, and bytes of queries, keys and values."""

    step: TrainingStep
    count: Number

    @cached_property
    def head_sizes(self) -> tuple[int, int]:
        """Elements of a head of queries and keys, and of values."""
        return attention_kind(self.step.model).head_sizes

    @property
    def reference(self) -> bool:
        """True if scores are stored, not kept in a kernel."""
        return self.step.assumptions.attention == "reference"

    @property
    def chunked(self) -> bool:
        """True if the scores of blocks of keys go through HBM between matmuls that the compiler sees."""
        return self.step.kernel == "chunked"

    @cached_property
    def scores(self) -> Number:
        """(query, key, head) triples."""
        return self.step.tokens * self.step.widths.heads * self.step.pairs_per_token

    @cached_property
    def ring(self) -> Number:
        """Devices round which keys and values go."""
        return self.step.strategies.devices(*SEQUENCE_AXES)

    @cached_property
    def keys_values(self) -> Number:
        """Bytes of a device's keys and values."""
        return self.step.tokens * self.step.kv_heads * sum(self.head_sizes) * self.step.element_bytes

    @cached_property
    def window(self) -> tuple[Transfer, ...]:
        """Keys and values before a device's chunk, for windowed layers."""
        _, before = self.step.key_exchange
        return (Transfer("permute", SEQUENCE_AXES, before * self.keys_values, "tensor", 1 - self.step.staged),)

    def merged(self, passes: _RingPasses) -> Number:
        """HBM bytes of a ring beyond those of its kernels, which write heads of whole registers."""
        step, (d_qk, d_v) = self.step, self.head_sizes
        ringed, _ = step.key_exchange
        hops = np.maximum(self.ring - 1, 0)
        queries = step.tokens * step.widths.heads * (d_qk + d_v) / 2 * step.element_bytes
        lanes = step.lanes
        padded = (next_multiple(d_qk, lanes) + next_multiple(d_v, lanes)) / (d_qk + d_v)
        moved = padded * ((passes.once + passes.hop * hops) * queries + passes.keys_hop * hops * self.keys_values)
        # What small queries leave in VMEM was not read for latent attention.
        in_hbm = step.in_hbm(padded * queries) if step.model.mla is None else 1.0
        return np.where(self.ring > 1, ringed * (1 - step.staged) * in_hbm * moved, 0.0)

    def chunked_s(self, *, backward: bool) -> Number:
        """Expected seconds of the matmuls of blocks, each of all sequences and heads of a device."""
        step, (d_qk, d_v) = self.step, self.head_sizes
        rows = step.run_rows
        keys = np.minimum(step.attention_block, rows)
        batch = step.tokens / step.own_positions * step.widths.heads
        of_qk, of_v = KERNEL_MATMULS["bwd" if backward else "fwd"]
        alone = sum(
            many * step.rates.matmul_s(rows, size, keys, step.numerics.compute, batch)
            for many, size in ((of_qk, d_qk), (of_v, d_v))
        )
        seconds: Number = self.scores / (batch * rows * keys) * alone
        return seconds

    def chunked_bytes(self, *, backward: bool) -> Number:
        """HBM bytes of passes between the matmuls of blocks: over scores, and over sums that every block adds to.

        A block's outputs are added, by its matmul, to those of its run, which are scaled before: read and written in
        float32. Keys and values are copied out of their blocks, and so are the float32 sums of their gradients, which
        are put back.
        """
        step, (d_qk, d_v), rows = self.step, self.head_sizes, self.step.run_rows
        passes = _CHUNKED_BACKWARD if backward else _CHUNKED_FORWARD
        grouped = step.widths.heads > step.kv_heads
        scaled = 0.0 if backward else 8.0 * d_v / np.minimum(step.attention_block, rows)
        copied = (20.0 if backward else 4.0) * (d_qk + d_v) / rows * (step.kv_heads / step.widths.heads)
        return self.scores * (np.where(grouped, passes.grouped, passes.alone) + scaled + copied)

    def exchange(self, phase: Phase, rounds: Number) -> tuple[Transfer, ...]:
        """Keys and values that go round the ring in so many ``rounds``; in pipeline stages they are gathered."""
        step, (ringed, _) = self.step, self.step.key_exchange
        around = rounds * (ringed * self.keys_values * self.ring)
        round_ring = Transfer("permute_ring", SEQUENCE_AXES, around, "context", 1 - step.staged)
        if not np.any(step.staged):
            return (round_ring,)
        kind: CollectiveKind = "reduce_scatter" if phase == "backward" else "all_gather"
        return round_ring, Transfer(kind, SEQUENCE_AXES, self.keys_values * self.ring, "tensor", step.staged)

    def work(self, phase: Phase, per_pair: Number, rounds: Number, factor: Number = 1.0) -> Work:
        """Work of a phase of ``per_pair`` FLOPs per (query, key, head), ``factor`` times each layer."""
        step, (d_qk, d_v), scores = self.step, self.head_sizes, self.scores
        heads = step.tokens * (step.widths.heads + step.kv_heads)
        queries_keys, values = heads * d_qk * step.element_bytes, heads * d_v * step.element_bytes
        # The reference stores its scores: written in float32, read and written by softmax, read by the second matmul.
        # Between matmuls of blocks they are written in float32, and weights read in 16 bits.
        per_score = 12.0 if self.reference else 6.0 if self.chunked else 0.0
        merging = self.merged(_RING_BACKWARD if phase == "backward" else _RING_FORWARD)
        stacking: Number = 0.0
        if phase == "backward":
            stacking = unstacked_bytes(step, _ATTENTION_CHECKPOINTS, moe_layer=False)
        if self.chunked:
            matmul_s, blocks = (
                self.chunked_s(backward=phase == "backward"),
                self.chunked_bytes(backward=phase == "backward"),
            )
        else:
            blocks = 0.0
            matmul_s = step.rates.attention_s(
                scores,
                d_qk,
                d_v,
                backward=phase == "backward",
                fused=step.assumptions.fused_attention_gradients,
                kernels=step.assumptions.attention_kernels,
                queries=step.tokens * step.widths.heads,
            )
        seen = self.reference or self.chunked
        return Work(
            scope="layers/attn/core",
            phase=phase,
            count=self.count * factor,
            flops={step.numerics.compute: per_pair * scores if seen else 0.0},
            kernel_flops=0.0 if seen else per_pair * scores,
            hbm_bytes=(per_pair / (d_qk + d_v) / 2) * (queries_keys + values + per_score * scores),
            elementwise_bytes=merging + stacking + blocks,
            matmul_s=matmul_s / step.habits.attention_speed,
            collectives=self.exchange(phase, rounds) + (() if phase == "recompute" else self.window),
            formula="2 FLOPs per pair, head and head size in each matmul of [T, S] blocks, masked blocks skipped",
        )


def _core_work(core: _Core) -> list[Work]:
    """The kernel or the reference, in each phase.

    Even where its output is kept, the reference computes its scores again for the gradient of softmax. In a stage of
    our program the backward pass of any kernel begins with its forward pass: residuals cannot leave nested shard_maps.
    """
    step, chip, (d_qk, d_v) = core.step, core.step.slice.chip, core.head_sizes
    fused = step.assumptions.fused_attention_gradients
    per_pair = float(kernel_flops(chip, d_qk, d_v))
    gradients = float(kernel_flops(chip, d_qk, d_v, backward=True, fused=fused))
    again = step.strategies.recomputed("attn_core")
    nested = step.staged if step.habits.staged_loop else 0.0
    if core.reference:
        repeated = core.work("recompute", per_pair / 2 * (1 + again + nested), 1.0)
    else:
        repeated = core.work("recompute", per_pair, 1.0, again + nested)
    window = Work(
        scope="layers/attn/core", phase="recompute", count=core.count, collectives=core.window,
        formula="keys and values before the window's chunks fetched again",
    )  # fmt: skip
    # Keys and values go round, then their gradients; the first hop is the one that the recomputation has made.
    rounds = 2.0 - again / np.maximum(core.ring - 1, 1)
    return [
        core.work("forward", per_pair, 1.0),
        repeated,
        window,
        core.work("backward", 2 * per_pair if core.reference else gradients, rounds),
    ]


def _output(step: TrainingStep, count: Number) -> list[Work]:
    """The output projection, added to the residual stream; a norm after it reads its output again."""
    again = step.strategies.recomputed("attn_out")
    block = MatmulBlock(
        scope="layers/attn/out",
        count=count,
        shapes=step.attention.out,
        tokens=step.tokens,
        scattered=step.tokens * step.model.d_model * step.element_bytes,
        again=again * (1.0 if step.model.post_norms else step.strategies.recomputed("mlp_input")),
        residual=True,
        rings=step.rings,
    )
    return matmul_work(step, block)
