"""The work of a generate step and of a prefill, scope by scope: bytes, FLOPs and collectives of one device.

Chapter 7 of the book. Activations are copied over the devices that split a layer; each of the two blocks of a layer
ends in an AllReduce (1-D weight-stationary). With D split over ``fsdp`` (2-D) an AllGather and a ReduceScatter over the
columns' axes, of the devices' part of D, take the place of that AllReduce. Partial sums of the first matmul are
scattered over ``fsdp`` by tokens, so that each device has its own tokens' heads and hidden columns, which are gathered
again for the second matmul.

Models with experts also have that AllGather and ReduceScatter, as routers work on each device's own tokens. All tokens
are then gathered over ``expert``, and the sums of all experts are scattered back.

With pipeline stages the rows are those of one flight's step on its way through all stages. They are also those of one
device for the steps of all flights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rooftop.arrays.rules import COLUMN_AXES, EXPERT_AXES, GATHER_AXES, REPLICA_AXES, SEQUENCE_AXES, STAGE_AXES
from rooftop.core.ledger import CollectiveKind, Number
from rooftop.models import ModelConfig
from rooftop.models.attention import MatmulShape
from rooftop.models.mixers import CONV_BYTES, STATE_BYTES
from rooftop.models.program_sizes import expert_sum_rows
from rooftop.plan.pricing import StagePart, Transfer, Work
from rooftop.plan.serving.phase import ACTIVATION_BYTES, Phase
from rooftop.plan.serving.workload import ROUTER_DTYPE
from rooftop.plan.shapes import attended_pairs
from rooftop.roofline.achievable import kernel_flops


def generate_work(phase: Phase, context: Number) -> list[Work]:
    """One token for each of ``phase.tokens`` sequences, which hold ``context`` tokens of KV each."""
    sequences = phase.sequences(phase.step_tokens)
    attention = [*_attention_generate(phase, context), *_mixers(phase, sequences, chunked=False)]
    return [*_embed(phase), *attention, *_blocks(phase), *_sends(phase), *_head(phase, phase.own_tokens)]


def prefill_work(phase: Phase, before: float = 0.0, sequences: Number = 1, others: Number = 0.0) -> list[Work]:
    """``phase.tokens`` new tokens of ``sequences`` equal sequences, each after ``before`` tokens whose KV is there.

    ``others`` of the tokens are of sequences that generate in the same step: their attention is not here.
    """
    last = np.ceil(sequences / phase.ways(*REPLICA_AXES)) + others / phase.ways(*REPLICA_AXES, *EXPERT_AXES)
    attention = [*_attention_prefill(phase, before, sequences, others), *_mixers(phase, last, chunked=True)]
    return [*_embed(phase), *attention, *_blocks(phase), *_sends(phase), *_head(phase, last)]


def mixed_work(phase: Phase, generating: Phase, context: Number, prompts: Number = 1) -> list[Work]:
    """A step that prefills prompts and generates: ``phase`` has the tokens of both, ``generating`` those of the latter.

    The matmuls work on all tokens at once; the attention of sequences that generate is a kernel of its own.
    """
    reads = [item for item in _attention_generate(generating, context) if item.scope == "layers/attn/core"]
    return [*prefill_work(phase, 0.0, prompts, generating.tokens), *reads]


def chunk_pairs(model: ModelConfig, new: float, before: float, block: int) -> float:
    """(query, key) pairs that a causal kernel executes for ``new`` tokens after ``before``, averaged over layers.

    Among the new tokens as in training (blocks that are not masked); each new token also sees the tokens before, as far
    as its layer's window reaches.
    """
    windows = model.layer_windows or (None,)
    total = 0.0
    for window in set(windows):
        pairs = attended_pairs(int(new), window, block)
        if window is None:
            pairs += new * before
        else:
            reach = min(new, window)
            whole = min(max(window - before, 0.0), reach)
            pairs += whole * min(before, window) + (reach - whole) * (window - (whole + reach) / 2)
        total += windows.count(window) * pairs
    return total / len(windows)


def _pairs(model: ModelConfig, new: Number, before: float, block: int) -> Number:
    """``chunk_pairs`` of one number of new tokens, or of several at once."""
    if np.ndim(new) == 0:
        return chunk_pairs(model, float(new), before, block)
    sizes, index = np.unique(new, return_inverse=True)
    pairs: Number = np.array([chunk_pairs(model, float(size), before, block) for size in sizes])[index].reshape(
        np.shape(new)
    )
    return pairs


def _embed(phase: Phase) -> list[Work]:
    own = phase.ways(*GATHER_AXES)
    rows = phase.own_tokens * phase.model.d_model * ACTIVATION_BYTES / own
    several = np.where((phase.split > phase.ways(*COLUMN_AXES)) & (phase.ways(*COLUMN_AXES) > 1), 1.0, 0.0)
    # XLA:TPU sums where it gathers over several axes at once.
    gathered: tuple[tuple[CollectiveKind, Number], ...] = (("all_gather", 1 - several), ("all_reduce", several))
    gathers = tuple(
        Transfer(kind, phase.columns, rows, "critical", when=when) for kind, when in gathered if np.any(when)
    )
    if phase.scatters:
        # Columns are exchanged for tokens.
        gathers = (Transfer("all_to_all", phase.columns, rows / phase.split, "critical"),)
    looked_up = "rows looked up and gathered"
    return [_work(phase, "embed", 1, hbm_bytes=2 * rows, collectives=gathers, formula=looked_up, part="first")]


def _sends(phase: Phase) -> list[Work]:
    """The stream that each pipeline stage but the last hands to the next one: split, and whole again where it was."""
    if not phase.splits(*STAGE_AXES):
        return []
    stream = phase.own_tokens * phase.model.d_model * ACTIVATION_BYTES / phase.ways(*GATHER_AXES)
    divides = phase.scatters | (phase.model.d_model % np.asarray(phase.split) == 0)
    moved: tuple[Transfer, ...] = (
        Transfer("permute", STAGE_AXES, stream / np.where(divides, phase.split, 1.0), "stage"),
    )
    if not phase.scatters:
        moved += (Transfer("all_gather", phase.columns, stream, "critical", when=np.where(divides, 1.0, 0.0)),)
    formula = "2 T D bytes, split over columns' axes, to the next stage, and so from stage to stage"
    return [_work(phase, "pipeline", phase.stages - 1.0, collectives=moved, formula=formula, part="sends")]


def _attention_generate(phase: Phase, context: Number) -> list[Work]:
    layers, tokens = phase.model.attention_layers, phase.own_tokens
    d_qk, d_v = phase.kind.decode_sizes
    heads = phase.widths.heads * phase.ways(*SEQUENCE_AXES)
    # The part of a group's sequences that a device attends for: fsdp and context split the cache's tokens.
    sequences = phase.sequences(phase.step_tokens)
    kv = phase.device_kv_bytes(phase.step_tokens, context, stored=False) / layers
    seen = kv / (phase.cached_bytes(1.0, stored=False) / layers * phase.cache_share) * (1 + phase.guesses)
    flops = 2.0 * seen * heads * phase.kind.decode_width
    queries, outputs = (tokens / phase.ways(*GATHER_AXES) * heads * size * ACTIVATION_BYTES for size in (d_qk, d_v))
    moved: tuple[Transfer, ...] = ()
    if phase.placement.kv_split == "seq":
        # Every part of a sequence meets all queries; partial outputs, with their maxima and sums, are added up.
        moved += (
            Transfer("all_gather", SEQUENCE_AXES, queries, "critical"),
            Transfer("reduce_scatter", SEQUENCE_AXES, outputs + 4.0 * outputs / d_v, "critical"),
        )
    else:
        share = phase.ways(*SEQUENCE_AXES)
        moved += (
            Transfer("all_to_all", SEQUENCE_AXES, queries / share, "critical"),
            Transfer("all_to_all", SEQUENCE_AXES, outputs / share, "critical"),
        )
    written = sequences * (1 + phase.guesses) * phase.cached_bytes(1.0, stored=False) * phase.cache_share / layers
    return [
        *_projections(phase, layers),
        _work(
            phase, "kv_cache", layers, hbm_bytes=written, formula="the KV of one token of each sequence written"
        ),
        _work(
            phase, "layers/attn/core", layers, hbm_bytes=kv, flops=flops, flops_dtype="bf16", collectives=moved,
            matmul_s=flops / phase.rates.flops_per_s["bf16"], formula="all KV of the sequences here read once",
        ),
        *_matmuls(phase, "layers/attn/out", layers, phase.attention_out, tokens, into=False),
    ]  # fmt: skip


def _attention_prefill(phase: Phase, before: float, sequences: Number, others: Number) -> list[Work]:
    model, layers, tokens = phase.model, phase.model.attention_layers, phase.own_tokens
    d_qk, d_v = phase.kind.head_sizes
    heads, ring = phase.widths.heads, phase.ways(*EXPERT_AXES, *SEQUENCE_AXES)
    new = (phase.tokens - others) / sequences
    here = np.ceil(sequences / phase.ways(*REPLICA_AXES))
    pairs = here * _pairs(model, new, before, phase.rates.attention_block)
    scores = pairs / ring * heads
    chip = phase.placement.slice.chip
    flops = float(kernel_flops(chip, d_qk, d_v)) * scores
    keys_values = here * (new + before) / ring * phase.kv_heads * (d_qk + d_v) * ACTIVATION_BYTES
    written = phase.device_kv_bytes(sequences, new, stored=True) / layers
    queries = tokens * heads * (d_qk + d_v) * ACTIVATION_BYTES
    moved: tuple[Transfer, ...] = (
        Transfer("permute_ring", (*EXPERT_AXES, *SEQUENCE_AXES), keys_values * ring, "ring"),
    )
    if phase.splits(*GATHER_AXES):
        # A prompt's cache is on one of the devices along fsdp, which needs all of its tokens.
        ours = tokens * (heads * d_qk + phase.kv_heads * (d_qk + d_v)) * ACTIVATION_BYTES
        moved += (
            Transfer("all_gather", GATHER_AXES, ours, "critical"),
            Transfer("reduce_scatter", GATHER_AXES, tokens * heads * d_v * ACTIVATION_BYTES, "critical"),
        )
    return [
        *_projections(phase, layers),
        _work(phase, "kv_cache", layers, hbm_bytes=written, formula="the KV of every token written"),
        _work(
            phase, "layers/attn/core", layers, hbm_bytes=queries + keys_values, kernel_flops=flops,
            matmul_s=phase.rates.attention_s(scores, d_qk, d_v, backward=False, queries=tokens * heads),
            collectives=moved,
            formula="2 FLOPs per pair, head and head size in both matmuls, masked blocks skipped",
        ),
        *_matmuls(phase, "layers/attn/out", layers, phase.attention_out, tokens, into=False),
    ]  # fmt: skip


def _projections(phase: Phase, layers: Number) -> list[Work]:
    """Projections into attention; those up from latents are done by each device for its own tokens along ``fsdp``.

    Where ``fsdp`` does not split D, a device projects its own tokens of the stream down, and latents are gathered.
    """
    tokens, model, mla, own = phase.own_tokens, phase.model, phase.model.mla, phase.ways(*GATHER_AXES)
    scope = "layers/attn/qkv"
    up = _matmuls(phase, scope, layers, phase.attention_up, tokens / own, into=None, whole=True)
    if mla is None or not phase.scatters:
        return [*_matmuls(phase, scope, layers, phase.attention, tokens, into=True), *up]
    # The first are those to latents: all but the queries' where these have no latent.
    first = len(phase.attention) - (mla.q_rank is None)
    alone = np.where(np.asarray(own) == 1, 1.0, 0.0)
    latents = [
        Transfer("all_gather", phase.columns, tokens * size * ACTIVATION_BYTES, "critical", when=alone)
        for size in (mla.q_rank or model.d_model, phase.kind.cached)
    ]
    streams = [replace(transfer, when=1.0 - alone) for transfer in _into(phase, phase.attention, tokens)]
    moved = tuple(transfer for transfer in (*latents, *streams) if np.any(transfer.when))
    down_tokens = np.where(alone > 0, tokens / phase.split, tokens)
    return [
        *_matmuls(phase, scope, layers, phase.attention[:first], down_tokens, into=True, others=moved),
        *_matmuls(phase, scope, layers, phase.attention[first:], tokens, into=True, others=()),
        *up,
    ]


def _mixers(phase: Phase, sequences: Number, *, chunked: bool) -> list[Work]:
    """Recurrent mixers of ``sequences`` on a device, one token after the other or in chunks; states in and out."""
    work: list[Work] = []
    tokens = phase.own_tokens
    for kind, shapes, layers in phase.mixers:
        flops = (kind.chunked_flops if chunked else kind.flops) * tokens / phase.split
        widths = sum((m.n for m in shapes.into), 0.0) + sum((m.k for m in shapes.out), 0.0)
        state = (kind.state * STATE_BYTES + kind.waiting * CONV_BYTES) / phase.split
        work += [
            *_matmuls(phase, "layers/attn/qkv", layers, shapes.into, tokens, into=True),
            *_matmuls(phase, "layers/attn/core", layers, shapes.inside, tokens, into=None),
            _work(
                phase, "layers/attn/core", layers, flops=flops, flops_dtype="bf16",
                matmul_s=flops / phase.rates.flops_per_s["bf16"],
                hbm_bytes=2.0 * sequences * state + tokens * widths * ACTIVATION_BYTES,
                formula="the state of every sequence here read and written; the recurrence of its new tokens",
            ),
            *_matmuls(phase, "layers/attn/out", layers, shapes.out, tokens, into=False),
        ]  # fmt: skip
    return work


def _blocks(phase: Phase) -> list[Work]:
    """The MLP of dense layers, and routers, experts and shared experts of the others."""
    model, moe, tokens = phase.model, phase.model.moe, phase.own_tokens
    work: list[Work] = []
    if model.dense_layers:
        up, down = phase.mlp(model.d_ff)
        work += _matmuls(phase, "layers/mlp/up", model.dense_layers, up, tokens, into=True)
        work += _matmuls(phase, "layers/mlp/down", model.dense_layers, down, tokens, into=False)
    if moe is None:
        return work
    layers, own = model.moe_layers, phase.ways(*GATHER_AXES)
    routed, everyone, rows = tokens * moe.active, phase.tokens_of_all, phase.expert_rows
    row = model.d_model * ACTIVATION_BYTES / own
    norms, scores = (
        Transfer("all_reduce", GATHER_AXES, 4.0 * tokens / phase.split * size, "critical") for size in (1, moe.experts)
    )
    work += _matmuls(phase, "layers/moe/router", layers, [phase.router], tokens, into=None, dtype=ROUTER_DTYPE)
    summed = "squares for the norm, then scores, of parts of D summed"
    work.append(_work(phase, "layers/moe/router", layers, collectives=(norms, scores), formula=summed))
    # One axis after the other: the tokens that a device has next to an axis, and its own of them.
    part = np.ceil(tokens / phase.ways(*COLUMN_AXES))
    columns = [(COLUMN_AXES, tokens, part)]
    if phase.generating and phase.splits(*SEQUENCE_AXES):
        columns.insert(0, (SEQUENCE_AXES, part, np.ceil(tokens / phase.split)))
    # Of each token the routing has a share and an expert for each choice, of 4 bytes.
    there = [
        Transfer("all_gather", axes, count * size, "critical")
        for axes, count in (*((axes, count) for axes, count, _ in columns), (EXPERT_AXES, everyone))
        for size in (row, 8.0 * moe.active)
    ]
    back = (
        *_scatter(phase, EXPERT_AXES, everyone * row, tokens),
        *(one for axes, count, share in reversed(columns) for one in _scatter(phase, axes, count * row, share)),
    )
    # With an expert axis a matmul adds rows up, elsewhere each choice of a token is gathered.
    adds = 2.0 * everyone * rows * model.d_model / own if phase.splits(*EXPERT_AXES) else 0.0
    work += [
        _work(
            phase, "layers/moe/dispatch", layers, collectives=tuple(there), hbm_bytes=(everyone + 2.0 * rows) * row,
            formula="tokens and choices of all gathered; rows of the experts here",
        ),
        _work(
            phase, "layers/moe/combine", layers, collectives=back, hbm_bytes=(everyone + 2.0 * rows) * row,
            flops=adds, flops_dtype="bf16", matmul_s=adds / phase.rates.flops_per_s["bf16"],
            formula="the experts' sums, each back to its token's device",
        ),
    ]  # fmt: skip
    up, down = phase.mlp(moe.d_ff)
    for matmuls, sums in ((up, _hidden_sums(up, rows)), (down, _hidden(down, rows))):
        weights = phase.experts_read * sum(phase.weight_bytes(matmuls, phase.numerics.weights))
        converted = phase.experts_read * phase.convert_s(matmuls, phase.numerics.weights)
        work += _matmuls(
            phase, "layers/moe/experts", layers, matmuls, routed, into=None, weights=weights, converted=converted
        )
        work.append(_work(phase, "layers/moe/experts", layers, collectives=(sums,), formula="hidden rows over fsdp"))
    if moe.shared_d_ff:
        up, down = phase.mlp(moe.shared_d_ff)
        # Partial sums of the second matmul are added to those of the experts.
        for matmuls, sums in ((up, _hidden_sums(up, tokens)), (down, _hidden(down, tokens))):
            work += _matmuls(phase, "layers/moe/shared", layers, matmuls, tokens, into=None)
            work.append(_work(phase, "layers/moe/shared", layers, collectives=(sums,), formula="hidden rows over fsdp"))
    return work


def _scatter(phase: Phase, axes: tuple[str, ...], payload: Number, own: Number) -> list[Transfer]:
    """Experts' sums, scattered over ``axes`` so that a device has ``own`` rows: see ``expert_sum_rows``."""
    if phase.lanes == 1:
        return [Transfer("reduce_scatter", axes, payload, "critical")]
    padded = expert_sum_rows(own)
    scattered = np.where(padded > 0, 1.0, 0.0)
    sums = (
        Transfer("reduce_scatter", axes, payload * np.where(padded > 0, padded / own, 1.0), "critical", when=scattered),
        Transfer("all_reduce", axes, payload, "critical", when=1.0 - scattered),
    )
    return [transfer for transfer in sums if np.any(transfer.when)]


def _hidden_sums(matmuls: Sequence[MatmulShape], rows: Number) -> Transfer:
    """Partial sums over D of hidden columns, scattered over ``fsdp`` by rows."""
    outputs = rows * sum((m.n for m in matmuls), 0.0) * ACTIVATION_BYTES
    return Transfer("reduce_scatter", GATHER_AXES, outputs, "critical")


def _hidden(matmuls: Sequence[MatmulShape], rows: Number) -> Transfer:
    """Hidden columns of all rows along ``fsdp``."""
    inputs = rows * sum((m.k for m in matmuls), 0.0) * ACTIVATION_BYTES
    return Transfer("all_gather", GATHER_AXES, inputs, "critical")


def _head(phase: Phase, tokens: Number) -> list[Work]:
    """Unembedding and sampling of the last token of each sequence. All devices split the vocabulary, none D."""
    model, rows = phase.model, tokens * phase.ways(*EXPERT_AXES)
    work = _matmuls(phase, "unembed", 1, [phase.table], rows, into=None, dtype=phase.numerics.embeddings)
    if phase.scatters:
        # One axis after the other: XLA:TPU would sum where it gathers over several at once.
        whole, own = phase.own_tokens * model.d_model * ACTIVATION_BYTES, phase.ways(*GATHER_AXES)
        gathers = (
            Transfer("all_reduce", GATHER_AXES, 4.0 * phase.own_tokens / phase.split, "critical"),
            Transfer("all_gather", phase.columns, whole / own, "critical"),
            Transfer("all_gather", EXPERT_AXES, whole / own * phase.ways(*EXPERT_AXES), "critical"),
            Transfer("all_gather", GATHER_AXES, whole * phase.ways(*EXPERT_AXES), "critical"),
        )
        work.append(_work(phase, "unembed", 1, collectives=gathers, formula="the stream normalised and gathered"))
    chosen = tuple(
        Transfer("all_gather", axes, 8.0 * rows * phase.ways(*axes), "critical")
        for axes in (GATHER_AXES, phase.columns, EXPERT_AXES)
    )
    logits = 4.0 * rows * phase.vocab / phase.ways(*GATHER_AXES)
    return [
        *(replace(item, part="last") for item in work),
        _work(
            phase, "sample", 1, part="last", hbm_bytes=2 * logits, collectives=chosen,
            formula="float32 logits written and read; the best of each part of the vocabulary gathered",
        ),
    ]  # fmt: skip


def _matmuls(
    phase: Phase,
    scope: str,
    count: Number,
    matmuls: Sequence[MatmulShape],
    tokens: Number,
    *,
    into: bool | None,
    weights: Number | None = None,
    dtype: str | None = None,
    converted: Number | None = None,
    whole: bool = False,
    others: tuple[Transfer, ...] | None = None,
) -> list[Work]:
    """Matmuls of ``tokens`` rows. ``into`` a block from the stream (True), out of it (False), or neither (None).

    ``weights``: bytes read, if not all of them once, and ``converted``, seconds of their conversion, during which the
    matrix unit waits. ``whole`` weights are not split over ``fsdp``. ``others`` replace the collectives.
    """
    if not matmuls:
        return []
    rate = phase.rates
    own = 1.0 if whole else phase.ways(*GATHER_AXES)
    # D is the dim that is summed over, or that of the outputs, which the vocabulary is too.
    shapes = [(m.k / own, m.n) if into else (m.k, m.n / own) for m in matmuls]
    flops = 2.0 * sum((tokens * m.parameters for m in matmuls), 0.0) / own
    seconds = sum((rate.matmul_s(tokens, k, n, phase.numerics.flops) for k, n in shapes), 0.0)
    seconds = np.maximum(seconds, phase.convert_s(matmuls, dtype) if converted is None else converted)
    stream = tokens * phase.model.d_model * ACTIVATION_BYTES / own
    collectives: tuple[Transfer, ...] = ()
    if others is not None:
        collectives = others
    elif phase.scatters and into:
        collectives = _into(phase, matmuls, tokens)
    elif phase.scatters and into is False:
        sums = _scatter(phase, phase.columns, stream, np.ceil(tokens / phase.split))
        collectives = (_hidden(matmuls, tokens), *sums)
    elif into is False:
        collectives = (Transfer("all_reduce", phase.columns, stream, "critical"),)
    read = sum(phase.weight_bytes(matmuls, dtype, whole=whole)) if weights is None else weights
    moved = sum((tokens * (k + n) for k, n in shapes), 0.0) * ACTIVATION_BYTES
    return [
        _work(
            phase, scope, count, hbm_bytes=read + moved, flops=flops, flops_dtype=phase.numerics.flops,
            matmul_s=seconds, collectives=collectives, formula=" + ".join("2 B k n" for _ in matmuls),
        )
    ]  # fmt: skip


def _into(phase: Phase, matmuls: Sequence[MatmulShape], tokens: Number) -> tuple[Transfer, ...]:
    """Collectives of a block's first matmuls where the stream is split over columns' axes."""
    stream = tokens * phase.model.d_model * ACTIVATION_BYTES / phase.ways(*GATHER_AXES)
    return (
        Transfer("all_reduce", GATHER_AXES, 4.0 * tokens / phase.split, "critical"),
        Transfer("all_gather", phase.columns, stream, "critical"),
        _hidden_sums(matmuls, tokens),
    )


def _work(
    phase: Phase,
    scope: str,
    count: Number,
    *,
    formula: str,
    hbm_bytes: Number = 0.0,
    flops: Number = 0.0,
    flops_dtype: str = "bf16",
    kernel_flops: Number = 0.0,
    matmul_s: Number = 0.0,
    collectives: tuple[Transfer, ...] = (),
    part: StagePart = "layers",
) -> Work:
    used = tuple(_over(transfer, axes) for transfer in collectives if (axes := phase.placement.used(transfer.axes)))
    return Work(
        scope=scope,
        phase=phase.phase,
        count=count,
        formula=formula,
        flops={flops_dtype: flops} if (flops if isinstance(flops, float) else np.any(flops)) else {},
        kernel_flops=kernel_flops,
        hbm_bytes=hbm_bytes,
        matmul_s=matmul_s,
        collectives=used,
        part=part,
    )


def _over(transfer: Transfer, axes: tuple[str, ...]) -> Transfer:
    """A transfer over some of its axes."""
    return transfer if axes == transfer.axes else replace(transfer, axes=axes)
