"""Description of a ModelConfig's weights: the shape and the dims of each parameter.

Dims: D model, F feed-forward, N query heads, K key/value heads, H head size, V vocabulary, E experts, n layers of one
kind that a scan runs over.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax

from rooftop.models.config import MLA, ModelConfig
from rooftop.models.config import MoE as Mixture
from rooftop.models.segments import LayerKind, segments, shared_segment
from rooftop.programs.parameters import MLP, Attention, LatentAttention, Layer, MoEWeights, Norm, Parameter, Transformer
from rooftop.programs.sharding import Dim


def describe(model: ModelConfig) -> Transformer[Parameter]:
    """The one description of the weights, which gives shapes, shardings and initial values.

    Weights after a nonlinearity are two-dimensional, with tensor and then fsdp on their rows, so that shards stay thick
    enough for the hardware's tiles. Tables are split over D only: a lookup exchanges no rows. Layers that pipeline
    stages share (``shared_segment``) are split over the stages; all stages have the few other layers.
    """
    d, v = model.d_model, model.vocab
    table = (None, ("embed", "vocab") if model.tied_embeddings else ("vocab", "embed"))
    learned = model.positions == "learned"
    unembed = Parameter(shape=(d, v), dims=("embed", "vocab"), fan_in=d)
    shared = shared_segment(model)
    return Transformer(
        embed=Parameter(shape=(v, d), dims=table, fan_in=d),
        positions=Parameter(shape=(model.max_seq_len, d), dims=table, fan_in=d) if learned else None,
        layers=tuple(
            tuple(_layer(model, kind, segment.repeats, "layers" if at == shared else None) for kind in segment.kinds)
            for at, segment in enumerate(segments(model))
        ),
        final_norm=_norm(model, ()),
        unembed=None if model.tied_embeddings else unembed,
    )


def _layer(model: ModelConfig, kind: LayerKind, n: int, dim: Dim) -> Layer[Parameter]:
    layer = Layer(
        attn=_attention(model, n) if model.mla is None else _latent(model, model.mla, n),
        mlp=_mixture(model, model.moe, n) if kind.moe and model.moe is not None else _mlp(model, n),
    )
    return jax.tree.map(lambda weight: replace(weight, dims=(dim, *weight.dims[1:]), stacked=True), layer)


def _norm(model: ModelConfig, stack: tuple[int, ...]) -> Norm[Parameter]:
    vector = partial(_vector, (*stack, model.d_model), sequence="residual_seq")
    scale = vector(value=0.0 if model.norm_offset else 1.0)
    return Norm(scale=scale, bias=vector() if model.norm == "layer" else None)


def _post_norm(model: ModelConfig, n: int) -> Norm[Parameter] | None:
    return _norm(model, (n,)) if model.norms_per_layer == 4 else None


def _vector(shape: tuple[int, ...], *dims: Dim, sequence: str = "seq", value: float = 0.0) -> Parameter:
    """A scale, bias or sink: starts as a constant. The last dims are ``dims``."""
    dims = (*(None,) * (len(shape) - len(dims)), *dims)
    return Parameter(shape=shape, dims=dims, value=value, sequence=sequence)


def _attention(model: ModelConfig, n: int) -> Attention[Parameter]:
    d, h, heads, kv_heads = model.d_model, model.d_head, model.heads, model.kv_heads
    head_scale = _vector((n, h), sequence="residual_seq", value=0.0 if model.norm_offset else 1.0)

    def into(name: str, heads: int) -> Parameter:
        return Parameter(shape=(n, d, heads, h), dims=(None, "embed", name, None), fan_in=d)

    def bias(name: str, heads: int) -> Parameter | None:
        return _vector((n, heads, h), name, None) if model.qkv_bias else None

    return Attention(
        norm=_norm(model, (n,)),
        q=into("heads", heads),
        k=into("kv_heads", kv_heads),
        v=into("kv_heads", kv_heads),
        out=_rows(n, heads * h, d, "heads"),
        q_bias=bias("heads", heads),
        k_bias=bias("kv_heads", kv_heads),
        v_bias=bias("kv_heads", kv_heads),
        out_bias=_vector((n, d), sequence="residual_seq") if model.attn_out_bias else None,
        q_norm=head_scale if model.qk_norm else None,
        k_norm=head_scale if model.qk_norm else None,
        sinks=_vector((n, heads), "heads") if model.attention_sinks else None,
        post_norm=_post_norm(model, n),
    )


def _latent(model: ModelConfig, mla: MLA, n: int) -> LatentAttention[Parameter]:
    """Weights of latent attention.

    The projections down to latents read the residual stream in its own sharding, so all of its axes sum their
    gradients.
    """
    d, heads, rank = model.d_model, model.heads, mla.q_rank
    down = partial(Parameter, dims=(None, "embed", None), fan_in=d, sequence="residual_seq")
    up = partial(Parameter, dims=(None, "embed", "heads", None))
    scale = partial(_vector, sequence="residual_seq", value=1.0)
    return LatentAttention(
        norm=_norm(model, (n,)),
        q_down=None if rank is None else down(shape=(n, d, rank)),
        q_norm=None if rank is None else scale((n, rank)),
        q=up(shape=(n, rank or d, heads, model.d_head), fan_in=rank or d),
        kv_down=down(shape=(n, d, mla.kv_rank + mla.d_rope)),
        kv_norm=scale((n, mla.kv_rank)),
        kv_up=up(shape=(n, mla.kv_rank, heads, mla.d_nope + mla.d_v), fan_in=mla.kv_rank),
        out=_rows(n, heads * mla.d_v, d, "heads"),
        post_norm=_post_norm(model, n),
    )


def _rows(n: int, rows: int, d: int, name: str) -> Parameter:
    return Parameter(shape=(n, rows, d), dims=(None, (name, "embed"), None), fan_in=rows)


def _mlp(model: ModelConfig, n: int) -> MLP[Parameter]:
    d, f = model.d_model, model.d_ff
    gated, bias = model.mlp_matrices == 3, model.mlp_bias
    into = Parameter(shape=(n, d, f), dims=(None, "embed", "mlp"), fan_in=d)
    hidden = _vector((n, f), "mlp")
    return MLP(
        norm=_norm(model, (n,)),
        gate=into if gated else None,
        up=into,
        down=_rows(n, f, d, "mlp"),
        gate_bias=hidden if gated and bias else None,
        up_bias=hidden if bias else None,
        down_bias=_vector((n, d), sequence="residual_seq") if bias else None,
        post_norm=_post_norm(model, n),
    )


def _mixture(model: ModelConfig, moe: Mixture, n: int) -> MoEWeights[Parameter]:
    d, f, e, shared = model.d_model, moe.d_ff, moe.experts, moe.shared_d_ff
    gated = model.mlp_matrices == 3
    into = Parameter(shape=(n, e, d, f), dims=(None, "expert", "embed", "mlp"), fan_in=d)
    hidden = _vector((n, e, f), "expert", "mlp")
    choice = _vector((n, e), sequence="residual_seq")
    shared_into = Parameter(shape=(n, d, shared), dims=(None, "embed", "mlp"), fan_in=d)
    return MoEWeights(
        norm=_norm(model, (n,)),
        router=Parameter(shape=(n, d, e), dims=(None, "embed", None), fan_in=d, sequence="residual_seq"),
        gate=into if gated else None,
        up=into,
        down=Parameter(shape=(n, e, f, d), dims=(None, "expert", ("mlp", "embed"), None), fan_in=f),
        router_bias=choice if moe.bias else None,
        correction_bias=choice if moe.correction_bias else None,
        gate_bias=hidden if gated and moe.bias else None,
        up_bias=hidden if moe.bias else None,
        down_bias=_vector((n, e, d), "expert", None, sequence="residual_seq") if moe.bias else None,
        shared_gate=shared_into if gated and shared else None,
        shared_up=shared_into if shared else None,
        shared_down=_rows(n, shared, d, "mlp") if shared else None,
        post_norm=_post_norm(model, n),
    )
