"""Exact counts: parameters, FLOPs per token and KV-cache bytes of a ModelConfig (book, chapters 4 and 7).

One table of weights is the source of every count. Attention adds what no weight does: products over the context.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from rooftop.core.errors import unknown
from rooftop.core.quantities import dtype_bytes
from rooftop.models.attention import attention_kind
from rooftop.models.config import ModelConfig, MoE
from rooftop.models.mixers import recurrences, state_bytes

if TYPE_CHECKING:
    from rooftop.core.ledger import Number

COMPONENTS: tuple[str, ...] = (
    *("embed", "attn", "mixer", "mlp", "experts", "shared_experts", "router", "norms", "others", "unembed"),
)

#: Which keys a query is counted against. ``full``: all that its layer's window reaches, as the PaLM paper counts.
#: ``causal``: those of them that came before it.
ATTENTION: tuple[str, ...] = ("causal", "full", "none")


@dataclass(frozen=True, kw_only=True)
class Weight:
    """One tensor of the model: its ``shape``, its ``scope`` (of rooftop.core.scopes) and how many layers have one.

    A token uses ``active`` of it: k/E of the experts, all of anything else. ``matmul`` weights are multiplied with
    every token; biases, scales and lookup tables are not. ``dims`` are the logical dims of a vector
    (see ``rooftop.arrays.rules``) that sharding rules split.
    """

    name: str
    scope: str
    component: str
    shape: tuple[int, ...]
    layers: int = 1
    active: tuple[int, int] = (1, 1)
    matmul: bool = True
    dims: tuple[str, ...] = ()

    @property
    def params(self) -> int:
        """Elements over all layers."""
        return self.layers * math.prod(self.shape)

    @property
    def active_params(self) -> int:
        """Elements that one token uses, over all layers."""
        return self.params * self.active[0] // self.active[1]

    @property
    def as_matrices(self) -> tuple[int, ...]:
        """The shape as [..., in, out]: heads and their elements are one dim."""
        shape = self.shape
        if self.component != "attn":
            return shape
        if self.name == "out":
            return math.prod(shape[:-1]), shape[-1]
        return shape[0], math.prod(shape[1:])


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """Parameter counts. ``active`` is what one token uses: the whole embedding table, but only k of E experts."""

    total: int
    active: int
    by_component: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class Flops:
    """FLOPs per token of the forward pass: of matmuls with weights, and of attention over the context.

    Only multiply-adds of matmuls count, two each; the backward pass does each twice (by input and by weight), and no
    recomputation is counted, so these are the FLOPs of MFU. ``convention`` says what is in.
    """

    matmul: Number
    attention: Number
    convention: str

    @property
    def forward(self) -> Number:
        """Forward FLOPs per token."""
        return self.matmul + self.attention

    @property
    def backward(self) -> Number:
        """Backward FLOPs per token: twice the forward ones."""
        return 2 * self.forward

    @property
    def total(self) -> Number:
        """Training FLOPs per token: three times the forward ones."""
        return 3 * self.forward


def weights(config: ModelConfig) -> tuple[Weight, ...]:
    """Every tensor of the model, tied ones once."""
    return tuple(_weights(config))


def count_params(config: ModelConfig) -> Parameters:
    """Exact parameter counts, by component (those that the model has).

    Biases, attention sinks and DeepSeek-V3's per-expert correction bias count with their component, a table of learned
    positions with ``embed``, q/k norms and the norms of MLA's latents with ``norms``. Tied embeddings count once, as
    ``embed``. A multi-token-prediction head is not part of the model.
    """
    table = weights(config)
    by_component = {name: sum(weight.params for weight in table if weight.component == name) for name in COMPONENTS}
    return Parameters(
        total=sum(weight.params for weight in table),
        active=sum(weight.active_params for weight in table),
        by_component={name: count for name, count in by_component.items() if count},
    )


def flops_per_token(
    config: ModelConfig, seq_len: Number, *, attention: str = "causal", embeddings: bool = True
) -> Flops:
    """FLOPs per token of a sequence of ``seq_len`` tokens, averaged over its positions.

    Matmuls: 2 x the active matmul weights, with the unembedding (V x D, tied or not) if ``embeddings``. The lookup of
    an embedding is no matmul. Attention: query x key and weights x value, 2 x keys x N x (size of a key + size of a
    value) per layer, which is 4 x keys x N x H without MLA. With S = ``seq_len`` and w = min(S, window of the layer),
    keys is w in ``full``, and in ``causal`` the mean over positions w (1 - w / 2S), in which a position sees half of
    itself: without a window exactly half of full, as MFU is reported. (Seeing itself whole would add w / 2S.) MLA is
    counted as trained, with keys and values expanded. Training then does 6 x params + 12 L N H S (full) or 6 L N H S
    (causal) per token.

    In chunks, a window is a chunk, whose mean position sees half of it. A recurrent mixer adds its own FLOPs, one token
    after the other, whatever the context (``rooftop.models.mixers``).

    ``seq_len`` may be an array. Raises RooftopError on an unknown ``attention``.
    """
    if attention not in ATTENTION:
        raise unknown("attention", attention, ATTENTION)
    matmul = sum(weight.active_params for weight in weights(config) if weight.matmul and weight.component != "unembed")
    if embeddings:
        matmul += config.vocab * config.d_model
    keys: Number = 0.0
    for window, layers in _layers_by_window(config, cached=False):
        seen = _kept(seq_len, window)
        earlier = seen / 2 if config.windows_chunked else seen * (1 - seen / (2 * seq_len))
        keys = keys + layers * {"full": seen, "causal": earlier, "none": 0.0}[attention]
    mixed = 0.0 if attention == "none" else sum(layers * kind.flops for kind, layers in recurrences(config))
    return Flops(
        matmul=2 * matmul,
        attention=2 * keys * config.heads * (config.d_head + config.d_value) + mixed,
        convention=f"attention {attention}, unembedding {'in' if embeddings else 'out'}, embedding lookup out, "
        "backward twice forward, no recomputation",
    )


def kv_elements(config: ModelConfig) -> int:
    """Elements cached per token and layer: 2 K H, or with MLA the latent and the shared rotated key."""
    return attention_kind(config).cached


def kv_bytes_per_token(config: ModelConfig, dtype: str, seq_len: Number | None = None) -> Number:
    """Bytes of KV cache per token, over all layers.

    Without ``seq_len``: what one more token adds before any window is full. With it: the cache of a sequence of that
    length over its length, where a windowed layer keeps only min(seq_len, window) tokens. ``seq_len`` may be an array.
    """
    per_layer = kv_elements(config) * dtype_bytes(dtype)
    if seq_len is None:
        return sum(layers for _, layers in _layers_by_window(config)) * per_layer
    return kv_cache_bytes(config, dtype, seq_len) / seq_len


def kv_cache_bytes(config: ModelConfig, dtype: str, seq_len: Number) -> Number:
    """Bytes of the KV cache of one sequence of ``seq_len`` tokens: a windowed layer keeps min(seq_len, window) of them.

    A layer that reads the cache of another has none. A recurrent mixer keeps its state, whatever ``dtype`` and length.
    ``seq_len`` may be an array.
    """
    cached: Number = 0.0
    for window, layers in _layers_by_window(config):
        cached = cached + layers * _kept(seq_len, window)
    return cached * kv_elements(config) * dtype_bytes(dtype) + state_bytes(config)


def _layers_by_window(config: ModelConfig, *, cached: bool = True) -> list[tuple[int | None, int]]:
    """Windows of the layers with attention, each with their number; ``cached``: only of those with a cache."""
    mixers = config.mixers or ("attention",) * config.layers
    windows = [window for window, mixer in zip(config.windows, mixers, strict=True) if "attention" in mixer]
    if cached and config.shared_kv_layers:
        windows = windows[: -config.shared_kv_layers]
    return [(window, windows.count(window)) for window in sorted(set(windows), key=lambda window: window or 0)]


def _kept(seq_len: Number, window: int | None) -> Number:
    """min(seq_len, window), written so that it is right for arrays too."""
    if window is None:
        return seq_len
    apart = cast("Number", abs(seq_len - window))
    return (seq_len + window - apart) / 2


#: Weights that make what is cached: a layer that reads another's cache has none of them.
_OF_CACHE = frozenset(("k", "v", "k_bias", "v_bias", "k_norm"))


def _weights(config: ModelConfig) -> Iterator[Weight]:
    table = (config.vocab, config.d_model)
    yield Weight(name="tokens", scope="embed", component="embed", shape=table, matmul=False)
    if config.positions == "learned":
        shape = (config.position_offset + config.max_seq_len, config.d_model)
        yield Weight(name="positions", scope="embed", component="embed", shape=shape, matmul=False)
    for weight in attention_kind(config).weights() if config.attention_layers else ():
        yield Weight(
            name=weight.name,
            scope=f"layers/attn/{weight.part}",
            component="attn",
            shape=weight.shape,
            layers=config.attention_layers - (config.shared_kv_layers if weight.name in _OF_CACHE else 0),
            matmul=weight.matmul,
            dims=weight.dims,
        )
    for kind, layers in recurrences(config):
        for part in kind.weights():
            yield Weight(
                name=part.name,
                scope=f"layers/attn/{part.part}",
                component="mixer",
                shape=part.shape,
                layers=layers,
                matmul=part.matmul,
            )
    for other in config.others:
        yield Weight(
            name=other.name,
            scope="layers/mlp/up" if other.matmul else "layers/mlp/norm",
            component="others",
            shape=other.shape,
            layers=other.layers,
            matmul=other.matmul,
        )
    if config.dense_layers:
        yield from _mlp(config, "layers/mlp/{}", "mlp", config.d_ff, config.dense_layers, bias=config.mlp_bias)
    if config.moe is not None:
        yield from _experts(config, config.moe)
    yield from _norms(config)
    if not config.tied_embeddings:
        yield Weight(name="unembed", scope="unembed", component="unembed", shape=table[::-1])
    if config.unembed_bias:
        yield Weight(name="unembed_bias", scope="unembed", component="unembed", shape=(config.vocab,), matmul=False)


def _mlp(
    config: ModelConfig,
    scope: str,
    component: str,
    d_ff: int,
    layers: int,
    *,
    bias: bool,
    experts: tuple[int, ...] = (),
    active: tuple[int, int] = (1, 1),
) -> Iterator[Weight]:
    """The matrices of an MLP, or of all experts at once (``experts`` is then the leading dim, (E,))."""
    d_model = config.d_model
    matrices = [("up", d_model, d_ff), ("down", d_ff, d_model)]
    if config.mlp_matrices == 3:
        matrices.insert(0, ("gate", d_model, d_ff))
    for name, d_in, d_out in matrices:
        where = scope.format("down" if name == "down" else "up")
        for suffix, shape, matmul in (("", (d_in, d_out), True), ("_bias", (d_out,), False)):
            if matmul or bias:
                yield Weight(
                    name=name + suffix,
                    scope=where,
                    component=component,
                    shape=(*experts, *shape),
                    layers=layers,
                    active=active,
                    matmul=matmul,
                    dims=() if matmul else ("expert",) * len(experts) + (() if name == "down" else ("mlp",)),
                )


def _experts(config: ModelConfig, moe: MoE) -> Iterator[Weight]:
    layers, scope = config.moe_layers, "layers/moe/router"
    router: list[tuple[str, tuple[int, ...], bool]] = [("router", (config.d_model, moe.experts), True)]
    if moe.bias:
        router.append(("router_bias", (moe.experts,), False))
    if moe.correction_bias:
        router.append(("correction_bias", (moe.experts,), False))
    for name, shape, matmul in router:
        yield Weight(name=name, scope=scope, component="router", shape=shape, layers=layers, matmul=matmul)
    yield from _mlp(
        config,
        "layers/moe/experts",
        "experts",
        moe.d_ff,
        layers,
        bias=moe.bias,
        experts=(moe.experts,),
        active=(moe.active, moe.experts),
    )
    if moe.shared_d_ff:
        yield from _mlp(config, "layers/moe/shared", "shared_experts", moe.shared_d_ff, layers, bias=False)
    if moe.shared_gate:
        scope, shape = "layers/moe/shared", (config.d_model, 1)
        yield Weight(name="shared_gate", scope=scope, component="shared_experts", shape=shape, layers=layers)


def _norms(config: ModelConfig) -> Iterator[Weight]:
    layers, of_model = config.layers, []
    if config.norm_scale:
        of_model.append(("scale", config.d_model))
    if config.norm == "layer" and config.norm_scale and config.norm_bias:
        of_model.append(("bias", config.d_model))
    blocks = ("attn", "mlp") if config.mlp_matrices and config.parallel != "shared" else ("attn",)
    norms = [
        (f"{when}_{kind}", f"layers/{block}/norm", size, layers)
        for block in blocks
        for when, present in (("pre", config.pre_norms), ("post", config.post_norms))
        if present
        for kind, size in of_model
    ]
    if config.attention_layers:
        heads = attention_kind(config).norms()
        own = config.attention_layers - config.shared_kv_layers
        norms += [
            (name, "layers/attn/qkv", size, own if name in _OF_CACHE else config.attention_layers)
            for name, size in heads
        ]
    norms += [(kind, "final_norm", size, 1) for kind, size in of_model]
    if config.embed_norm:
        norms += [(f"embed_{kind}", "embed", size, 1) for kind, size in of_model]
    for name, scope, size, count in norms:
        yield Weight(name=name, scope=scope, component="norms", shape=(size,), layers=count, matmul=False)
