"""The work of a step of a serving engine on GPUs, scope by scope, with each kernel at its measured time.

Engines keep the stream whole on every GPU: a layer's two blocks end in an AllReduce over ``tensor``. Over ``expert``
each GPU has a copy of attention and its own sequences (attention data parallelism) and a part of the experts: all
tokens are gathered before the experts, and their sums scattered after them. A step may prefill prompts next to
sequences that generate; matmuls then work on all tokens at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from rooftop.arrays.rules import COLUMN_AXES, EXPERT_AXES
from rooftop.core.ledger import CollectiveKind, Number
from rooftop.models.attention import MatmulShape
from rooftop.plan.pricing import Transfer, Work
from rooftop.plan.serving.engines.kernels import EngineKernels, KernelFit
from rooftop.plan.serving.phase import ACTIVATION_BYTES, Phase
from rooftop.plan.serving.rows import chunk_pairs
from rooftop.plan.serving.workload import ROUTER_DTYPE
from rooftop.roofline.achievable import kernel_flops
from rooftop.roofline.rules import distinct_experts

#: Bytes of a number that is quantised: BF16 read, a byte written.
QUANTISED_BYTES = 3.0


def launches(phase: Phase) -> Number:
    """Kernels of a step, without those of its head: matmuls, each with one that quantises, and what is between them."""
    model, moe = phase.model, phase.model.moe
    quantised = phase.numerics.shared_weights != "bf16"
    matmul = 2 if quantised else 1
    summed = np.where(np.asarray(phase.ways(*COLUMN_AXES, *EXPERT_AXES)) > 1, 1.0, 0.0)
    # Norm, projections, rotation with the write of the cache, core, projection out, sum; latents have norms too.
    attention = 3 + 2 * matmul + summed + (2 + matmul if model.mla is not None else 0)
    attention = attention + (0 if model.qk_norm is None else 1)
    # Norm, gate and up, the gate's product, down, sum.
    dense = 2 + 2 * matmul + summed
    experts: Number = 0.0
    if moe is not None:
        shared = 1 + 2 * matmul if moe.shared_d_ff else 0
        # Norm, router, choice, two to sort, quantise, two grouped matmuls, the gate's product, the sum of the choices.
        experts = 10 + shared + summed
    total: Number = model.attention_layers * attention + model.dense_layers * dense + model.moe_layers * experts
    return total


def _transfers_s(item: Work) -> Number:
    total: Number = sum((0.0 if one.seconds is None else one.seconds for one in item.collectives), 0.0)
    return total


@dataclass(frozen=True, kw_only=True)
class KernelStep:
    """A step of one server: a token for each of ``batch`` sequences with ``context`` tokens of KV, and ``prompts``.

    Each prompt has ``prompt`` new tokens after ``before`` whose KV is there. ``gap_s``: seconds next to each kernel
    in which none runs that was measured. A kernel takes ``host_s`` at least where there are prompts, or no ``graphs``:
    the host then launches the kernels of the step one by one. Figures may be arrays over steps.
    """

    phase: Phase
    kernels: EngineKernels
    gap_s: float = 0.0
    host_s: float = 0.0
    graphs: bool = True
    batch: Number = 0.0
    context: Number = 0.0
    prompt: Number = 0.0
    prompts: Number = 0
    before: float = 0.0

    @property
    def work(self) -> list[Work]:
        """The rows of the step, of the busiest GPU."""
        work = [*self._attention(), *self._blocks(), *self._head()]
        layers, kernels = self.phase.model.layers, launches(self.phase)
        seconds = self._elementwise_s() + kernels / layers * self.gap_s
        work.append(
            self._row(
                "layers/attn/norm", layers, seconds, hbm_bytes=self._elementwise_bytes,
                formula="norms, rotations, gates and quantising, and gaps between kernels",
            )
        )  # fmt: skip
        if (np.any(np.asarray(self.prompts) > 0) or not self.graphs) and self.host_s:
            busy = sum((item.count * (item.matmul_s + _transfers_s(item)) for item in work), 0.0)
            waits = np.maximum(kernels * self.host_s - busy, 0.0)
            work.append(self._row("layers/attn/norm", 1, waits, formula="the host launches kernels one by one"))
        return work

    @property
    def copies(self) -> Number:
        """GPUs that have a copy of attention each."""
        return self.phase.ways(*EXPERT_AXES)

    @property
    def sequences(self) -> Number:
        """Sequences that generate on the busiest GPU."""
        return np.ceil(self.batch / self.copies)

    @property
    def own_prompts(self) -> Number:
        """Prompts that are prefilled on the busiest GPU."""
        return np.ceil(self.prompts / self.copies)

    @property
    def own_tokens(self) -> Number:
        """Tokens of the busiest GPU's attention."""
        return self.sequences + self.own_prompts * self.prompt

    @property
    def all_tokens(self) -> Number:
        """Tokens of all copies."""
        return self.batch + self.prompts * self.prompt

    @property
    def dtype(self) -> str:
        """The kernels of matmuls: checkpoints of mixtures of experts have a scale for each block of weights."""
        dtype = self.phase.numerics.shared_weights
        return "f8_block" if dtype == "f8_e4m3" and self.phase.model.moe is not None else dtype

    def _attention(self) -> list[Work]:
        phase, layers = self.phase, self.phase.model.attention_layers
        work = [
            self._matmul("layers/attn/qkv", layers, phase.attention),
            *([self._matmul("layers/attn/qkv", layers, phase.attention_up)] if phase.attention_up else ()),
        ]
        if phase.model.qk_norm == "width":
            # The squares of all heads' queries and keys are summed over the GPUs: two numbers a token, float32.
            work += self._sum("layers/attn/qkv", layers, 2 * 4.0 * self.own_tokens)
        if np.any(np.asarray(self.batch) > 0):
            work.append(self._generating(layers))
        if np.any(np.asarray(self.prompts) > 0):
            work.append(self._prefilling(layers))
        work.append(self._matmul("layers/attn/out", layers, phase.attention_out))
        return [*work, *self._sum("layers/attn/out", layers)]

    def _generating(self, layers: int) -> Work:
        phase = self.phase
        token = phase.cached_bytes(1.0, stored=False) / layers * phase.cache_share
        kv = self.sequences * (phase.cached_bytes(self.context, stored=False) / layers * phase.cache_share + token)
        heads = phase.widths.heads
        flops = 2.0 * self.sequences * self.context * heads * phase.kind.decode_width
        known = self.kernels.attention
        fit = self.kernels.latent if phase.model.mla is not None else known.get(phase.numerics.kv, known["bf16"])
        matmul_s = flops / phase.rates.flops_per_s["bf16"]
        seconds = np.where(np.asarray(self.batch) > 0, fit.seconds(kv / phase.rates.hbm_bytes_per_s, matmul_s), 0.0)
        return self._row(
            "layers/attn/core", layers, seconds, hbm_bytes=kv, flops=flops, flops_dtype="bf16",
            formula="all KV of the sequences here read once",
        )  # fmt: skip

    def _prefilling(self, layers: int) -> Work:
        phase = self.phase
        d_qk, d_v = phase.kind.head_sizes
        heads, rates = phase.widths.heads, phase.rates
        sizes, index = np.unique(np.asarray(self.prompt), return_inverse=True)
        pairs = [chunk_pairs(phase.model, float(size), self.before, rates.attention_block) for size in sizes]
        scores = self.own_prompts * np.array(pairs)[index].reshape(np.shape(self.prompt)) * heads
        queries = self.own_prompts * self.prompt * heads
        keys = self.own_prompts * (self.prompt + self.before) * phase.kv_heads
        return self._row(
            "layers/attn/core", layers, rates.attention_s(scores, d_qk, d_v, backward=False, queries=queries),
            hbm_bytes=(queries + keys) * (d_qk + d_v) * ACTIVATION_BYTES,
            kernel_flops=float(kernel_flops(rates.chip, d_qk, d_v)) * scores,
            formula="2 FLOPs per pair, head and head size in both matmuls, masked blocks skipped",
        )  # fmt: skip

    def _blocks(self) -> list[Work]:
        phase, model, moe = self.phase, self.phase.model, self.phase.model.moe
        work: list[Work] = []
        if model.dense_layers:
            up, down = phase.mlp(model.d_ff)
            work += [
                self._matmul("layers/mlp/up", model.dense_layers, up),
                self._matmul("layers/mlp/down", model.dense_layers, down),
                *self._sum("layers/mlp/down", model.dense_layers),
            ]
        if moe is None:
            return work
        layers = model.moe_layers
        work.append(self._matmul("layers/moe/router", layers, [phase.router], dtype=ROUTER_DTYPE))
        work += self._exchange("layers/moe/dispatch", layers, "all_gather")
        up, down = phase.mlp(moe.d_ff)
        weights = sum(sum(phase.weight_bytes(matmuls, phase.numerics.weights)) for matmuls in (up, down))
        read = distinct_experts(moe.experts, moe.active, self.all_tokens) / self.copies * weights
        rows = self.all_tokens * moe.active / self.copies
        flops = 2.0 * rows * sum((m.parameters for m in [*up, *down]), 0.0)
        moved = read + 2.0 * rows * model.d_model * ACTIVATION_BYTES
        fits, dtype = self.kernels.experts, phase.numerics.weights
        fit = fits.get(dtype) or self.kernels.matmul[dtype]
        seconds = fit.seconds(
            moved / phase.rates.hbm_bytes_per_s, flops / phase.rates.flops_per_s[phase.numerics.flops]
        )
        work.append(
            self._row(
                "layers/moe/experts", layers, seconds, hbm_bytes=moved, flops=flops,
                flops_dtype=phase.numerics.flops, formula="grouped matmuls of the experts here",
            )
        )  # fmt: skip
        if moe.shared_d_ff:
            up, down = phase.mlp(moe.shared_d_ff)
            work += [self._matmul("layers/moe/shared", layers, matmuls) for matmuls in (up, down)]
        return [
            *work,
            *self._exchange("layers/moe/combine", layers, "reduce_scatter"),
            *self._sum("layers/moe/combine", layers),
        ]

    def _head(self) -> list[Work]:
        phase = self.phase
        rows = self.sequences + self.own_prompts
        logits = self._matmul("unembed", 1, [phase.table], dtype=phase.numerics.embeddings, tokens=rows)
        sampled = 3 * 4.0 * rows * phase.vocab
        seconds = sampled / (phase.rates.hbm_bytes_per_s * phase.rates.fractions.hbm)
        return [logits, self._row("sample", 1, seconds, hbm_bytes=sampled, formula="float32 logits written and read")]

    @property
    def _elementwise_bytes(self) -> Number:
        """Bytes of a layer's passes between kernels: two norms with the residual, rotations, the gate, quantising."""
        phase, model = self.phase, self.phase.model
        hidden = model.d_ff if model.moe is None else model.moe.active * model.moe.d_ff
        projected = sum((m.n for m in phase.attention), 0.0)
        widths = 8 * model.d_model + 2 * projected + 2.5 * hidden / phase.split / self.copies
        return self.own_tokens * widths * ACTIVATION_BYTES

    def _elementwise_s(self) -> Number:
        return self._elementwise_bytes / (self.phase.rates.hbm_bytes_per_s * self.phase.rates.fractions.hbm)

    def _matmul(
        self, scope: str, count: Number, matmuls: Sequence[MatmulShape], *, dtype: str | None = None,
        tokens: Number | None = None,
    ) -> Work:  # fmt: skip
        """Matmuls of the same rows as one kernel."""
        phase = self.phase
        rows = self.own_tokens if tokens is None else tokens
        kernel = dtype or self.dtype
        stored = dtype or phase.numerics.shared_weights
        flops_dtype = dtype or phase.numerics.flops
        flops = 2.0 * rows * sum((m.parameters for m in matmuls), 0.0)
        moved = (
            sum(phase.weight_bytes(matmuls, stored)) + rows * sum((m.k + m.n for m in matmuls), 0.0) * ACTIVATION_BYTES
        )
        fit = self._fit(kernel)
        # The rows are the same for all: they are quantised once.
        quantised = rows * matmuls[0].k * QUANTISED_BYTES
        seconds = fit.seconds(
            moved / phase.rates.hbm_bytes_per_s,
            flops / phase.rates.flops_per_s[flops_dtype],
            quantised / phase.rates.hbm_bytes_per_s,
        )
        return self._row(
            scope, count, seconds, hbm_bytes=moved, flops=flops, flops_dtype=flops_dtype,
            formula=" + ".join("2 B k n" for _ in matmuls),
        )  # fmt: skip

    def _fit(self, dtype: str) -> KernelFit:
        return self.kernels.matmul[dtype]

    def _sum(self, scope: str, count: Number, payload: Number | None = None) -> list[Work]:
        """The AllReduce of a block's stream over ``tensor``, by the engine's own kernel within a node."""
        axes = self.phase.placement.used(COLUMN_AXES)
        if not axes:
            return []
        if payload is None:
            payload = self.own_tokens * self.phase.model.d_model * ACTIVATION_BYTES
        price = self.phase.placement.price("all_reduce", axes)
        ranks = np.asarray(self.phase.ways(*axes))
        general_s = price.expected_s(payload, self.phase.rates.network("all_reduce"))
        within = ranks <= prod(self.phase.placement.slice.chip.pod_shape)
        seconds = np.where(within, np.minimum(self.kernels.all_reduce_s(payload, ranks), general_s), general_s)
        return [self._collective(scope, count, "all_reduce", axes, payload, seconds)]

    def _exchange(self, scope: str, count: Number, kind: CollectiveKind) -> list[Work]:
        """All tokens gathered over ``expert``, or the experts' sums scattered back."""
        axes = self.phase.placement.used(EXPERT_AXES)
        if not axes:
            return []
        payload = self.own_tokens * self.copies * self.phase.model.d_model * ACTIVATION_BYTES
        price = self.phase.placement.price(kind, axes)
        seconds = price.expected_s(payload, self.phase.rates.network(kind))
        return [self._collective(scope, count, kind, axes, payload, seconds)]

    def _collective(
        self, scope: str, count: Number, kind: CollectiveKind, axes: tuple[str, ...], payload: Number, seconds: Number
    ) -> Work:
        transfer = Transfer(kind, axes, payload, "critical", seconds=seconds)
        work = self._row(scope, count, 0.0, formula="tokens x D x 2 bytes")
        return replace(work, collectives=(transfer,))

    def _row(
        self, scope: str, count: Number, seconds: Number, *, formula: str, hbm_bytes: Number = 0.0, flops: Number = 0.0,
        flops_dtype: str = "bf16", kernel_flops: Number = 0.0,
    ) -> Work:  # fmt: skip
        """A row whose kernel takes so many seconds, its bytes included."""
        return Work(
            scope=scope,
            phase=self.phase.phase,
            count=count,
            formula=formula,
            flops={flops_dtype: flops} if np.any(flops) else {},
            kernel_flops=kernel_flops,
            hbm_bytes=hbm_bytes,
            matmul_s=seconds,
        )
