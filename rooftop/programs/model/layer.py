"""The two halves of a layer on the residual stream: attention, and the MLP or mixture of experts.

Dims as in ``transformer``, which also lists the collectives. ``Computation`` holds the options.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

import jax
import jax.numpy as jnp
from jax import named_scope
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Float32, Int

from rooftop.arrays.rules import Rules, ways
from rooftop.capabilities import KERNELS, MATMUL_DTYPES, model_obstacle
from rooftop.core.errors import RooftopError, unknown
from rooftop.core.records import Record
from rooftop.models.activations import parse_policy
from rooftop.models.config import ModelConfig
from rooftop.models.widths import HeadSplit
from rooftop.programs.attention.attend import attend
from rooftop.programs.attention.context import CONTEXT_ATTENTIONS, ORDERS, context_attend, sequence_order
from rooftop.programs.attention.scores import BLOCK, Scores
from rooftop.programs.model.activation import activate
from rooftop.programs.model.mla import latent_qkv
from rooftop.programs.model.moe.mixture import EXPERT_MATMULS, moe_mlp
from rooftop.programs.model.narrow import NarrowWeight, gather_in, narrow_matmul
from rooftop.programs.model.operations import (
    add_bias,
    into_heads,
    norm,
    project,
    project_heads,
    project_left,
    scale_norm,
    width_norm,
)
from rooftop.programs.model.overlapped import StreamRing, project_gathered, project_scattered
from rooftop.programs.model.positions import rotate, within_segments
from rooftop.programs.parameters import MLP, Attention, Batch, LatentAttention, Layer, MoEWeights, Norm
from rooftop.programs.sharding import Specs, gather, on_shards, split_sequence, varying


@dataclass(frozen=True, kw_only=True)
class Computation(Record):
    """Options of a model's computation: sharding ``rules``, and checkpoints by ``remat`` (``models.activations``).

    ``attention`` is a kernel of ``attention.attend``, with blocks of at most ``attention_block``. Over a context axis
    the sequence is in ``context_order``, and keys and values arrive by ``context_attention``: around a ring, or
    gathered (``attention.context``). Experts use ``expert_matmul``; ``expert_capacity`` is the ``capacity_factor``
    of ``moe``: None drops no token; with ``experts_gather`` they get the tokens of all devices. ``z_loss`` and
    ``balance_loss`` are the coefficients of terms added to the cross-entropy (see ``objective``). ``matmul`` is the
    dtype of the matmuls of layers with their weights, but for routers (``model.narrow``; None: that of
    activations). ``weights_left`` multiplies by weights of attention and MLPs on one device as ``project_left``
    does. ``collective_matmuls``: those of attention and dense MLPs overlap the AllGather before and the
    ReduceScatter after them, as rings (``programs.model.overlapped``). Rings visit the devices over tensor in
    ``ring_order`` (None: as they are), and go ``both_ways`` round or one way.
    """

    closed = True

    model: ModelConfig
    remat: str = "block"
    attention: str = "reference"
    attention_block: int = BLOCK
    context_order: str = "zigzag"
    context_attention: str = "ring"
    expert_matmul: str = "batched"
    expert_capacity: float | None = None
    experts_gather: bool = False
    z_loss: float = 0.0
    balance_loss: float = 0.0
    matmul: str | None = None
    weights_left: bool = False
    collective_matmuls: bool = False
    ring_order: tuple[int, ...] | None = None
    both_ways: bool = False
    rules: Rules = Rules()

    def __post_init__(self) -> None:
        for name, known in (
            ("attention", KERNELS),
            ("context_order", ORDERS),
            ("context_attention", CONTEXT_ATTENTIONS),
            ("expert_matmul", EXPERT_MATMULS),
        ):
            if getattr(self, name) not in known:
                raise unknown(name, getattr(self, name), known)
        if self.matmul is not None and self.matmul not in MATMUL_DTYPES:
            raise unknown("matmul", self.matmul, MATMUL_DTYPES)
        if self.matmul is not None and (self.weights_left or self.collective_matmuls):
            raise RooftopError("matmul", self.matmul, "none with weights_left or collective_matmuls")
        if self.attention_block < 1:
            raise RooftopError("attention_block", self.attention_block, "a positive whole number")
        for name in ("z_loss", "balance_loss"):
            if not 0 <= (coefficient := getattr(self, name)) < math.inf:
                raise RooftopError(name, coefficient, "a number that is not negative; 0 for none")
        if self.balance_loss and self.model.moe is None:
            raise RooftopError("balance_loss", self.balance_loss, f"0 for {self.model.name}, which has no experts")
        if (missing := model_obstacle(self.model)) is not None:
            raise RooftopError("model", missing, "a model that programs can run; others are planned")
        parse_policy(self.remat)

    @cached_property
    def specs(self) -> Specs:
        """The specs of arrays."""
        return Specs(self.rules)

    @property
    def ring(self) -> StreamRing | None:
        """The ring of collective matmuls; None without them."""
        if not self.collective_matmuls:
            return None
        return StreamRing.of(self.specs, order=self.ring_order, bidirectional=self.both_ways)

    def saves(self, name: str) -> bool:
        """True if the backward pass has the checkpoint ``name``, and does not compute it again."""
        return parse_policy(self.remat)[name] != "recompute"

    def positions(self, batch: Batch[jax.Array]) -> jax.Array:
        """The positions of the tokens: [T], or [B, T] if the batch has positions or segments.

        Over a context axis the tokens are in the order in which the mesh splits them.
        """
        if batch.positions is not None:
            return batch.positions
        positions = self._in_sequence(batch.tokens.shape[1])
        return positions if batch.segments is None else within_segments(batch.segments, positions)

    def _in_sequence(self, seq_len: int) -> jax.Array:
        ring = self.specs.rules.activations["seq"]
        if not ring:
            return jnp.arange(seq_len)
        devices = ways(jax.sharding.get_abstract_mesh().shape, *ring)
        return jnp.asarray(sequence_order(seq_len, devices, self.context_order))


def attention(
    x: jax.Array,
    layer: Attention[jax.Array] | LatentAttention[jax.Array],
    how: Computation,
    heads: Callable[[jax.Array], jax.Array],
) -> jax.Array:
    """Attention of the residual stream x, times the model's ``residual_scale``, added to it.

    ``heads`` computes the outputs of all heads [B, T, N, d_v], split over N, from the normalised stream.
    """
    model, specs = how.model, how.specs
    normed = x
    if layer.norm is not None:
        with named_scope("norm"):
            normed = checkpoint_name(norm(x, layer.norm, model, specs), "attn_normed")
    o = heads(normed)
    out_bias = None if isinstance(layer, LatentAttention) else layer.out_bias
    with named_scope("out"):
        # XLA names a matmul after a reshape that it absorbs, so this reshape is in the scope of its matmul.
        o = o.reshape(*o.shape[:2], -1, out_sharding=specs.activation("batch", "seq", "heads"))
        y = add_bias(_scattered(o, layer.out, "heads", how), out_bias, specs.residual)
        y = checkpoint_name(y, "attn_out")
    if layer.post_norm is not None:
        with named_scope("norm"):
            y = norm(y, layer.post_norm, model, specs)
    with named_scope("out"):
        return checkpoint_name(x + _residual(y, model), "mlp_input")


def _residual(y: Float[Array, "B T D"], model: ModelConfig) -> Float[Array, "B T D"]:
    """The output of attention or of an MLP, as it is added to the stream."""
    return y if model.residual_scale == 1.0 else y * jnp.asarray(model.residual_scale, y.dtype)


def causal(
    normed: Float[Array, "B T D"],
    *,
    layer: Attention[jax.Array] | LatentAttention[jax.Array],
    turns: Float32[Array, "*turns"] | None,
    window: int | None,
    segments: Int[Array, "B T"] | None,
    how: Computation,
) -> Float[Array, "B T N d_v"]:
    """Causal attention of whole sequences, within ``segments`` if there are any."""
    model, sinks = how.model, None
    if isinstance(layer, LatentAttention):
        assert model.mla is not None
        q, k, v = latent_qkv(normed, layer, turns, model, model.mla, how.specs, how.matmul)
    else:
        q, k, v = qkv(normed, layer, turns, how)
        sinks = layer.sinks
    with named_scope("core"):
        return _core(q, k, v, sinks, window, segments, how)


def qkv(
    x: Float[Array, "B T D"], layer: Attention[jax.Array], turns: Float32[Array, "*turns"] | None, how: Computation
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T K H"], Float[Array, "B T K H"]]:
    """Queries, keys and values of the normalised x, rotated by ``turns`` if the layer has rotary positions."""
    model, specs = how.model, how.specs
    heads, kv_heads = (specs.activation("batch", "seq", name, None) for name in ("heads", "kv_heads"))
    with named_scope("qkv"):
        tensor = ways(jax.sharding.get_abstract_mesh().shape, *specs.rules.parameters["kv_heads"])
        copies_keys, ring = layer.k.shape[1] % tensor > 0, how.ring

        def of_heads(weight: jax.Array, name: str) -> jax.Array | NarrowWeight:
            return gather_in(how.matmul, weight, specs, "embed", name, None, rows=model.d_model)

        if ring is not None and not copies_keys:
            stored = (layer.q, "heads"), (layer.k, "kv_heads"), (layer.v, "kv_heads")
            weights = [gather(weight, specs, "embed", name, None, rows=model.d_model) for weight, name in stored]
            q, k, v = project_gathered(x, weights, ring, saved=how.saves("qkv"))
            q, k, v = (
                add_bias(q, layer.q_bias, heads),
                add_bias(k, layer.k_bias, kv_heads),
                add_bias(v, layer.v_bias, kv_heads),
            )
        else:
            h = split_sequence(x, specs.inputs(reduced="heads"))
            into = project_left if how.weights_left else project_heads
            if specs.width:
                into = partial(into_heads, specs=specs)
            q = add_bias(into(h, of_heads(layer.q, "heads")), layer.q_bias, heads)
            if copies_keys:
                k, v = (
                    _of_own_heads(h, *weights, how) for weights in ((layer.k, layer.k_bias), (layer.v, layer.v_bias))
                )
            else:
                k, v = into(h, of_heads(layer.k, "kv_heads")), into(h, of_heads(layer.v, "kv_heads"))
                k, v = add_bias(k, layer.k_bias, kv_heads), add_bias(v, layer.v_bias, kv_heads)
        q = checkpoint_name(q, "qkv")
        k, v = checkpoint_name(k, "qkv"), checkpoint_name(v, "qkv")
        if not model.qk_norm_after_rope:
            q, k = _qk_norm(q, k, layer, how)
    if turns is not None:
        with named_scope("rope"):
            q, k = (checkpoint_name(rotate(x, turns, interleaved=model.rope_interleaved), "rope") for x in (q, k))
    if model.qk_norm_after_rope:
        with named_scope("qkv"):
            q, k = _qk_norm(q, k, layer, how)
    return q, k, v


def _qk_norm(
    q: Float[Array, "B T N H"], k: Float[Array, "B T K H"], layer: Attention[jax.Array], how: Computation
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T K H"]]:
    """Queries and keys, normalised as the model says."""
    if layer.q_norm is None or layer.k_norm is None:
        return q, k
    model = how.model
    heads, kv_heads = (how.specs.activation("batch", "seq", name, None) for name in ("heads", "kv_heads"))
    if model.qk_norm == "width":
        sizes, axes = jax.sharding.get_abstract_mesh().shape, how.specs.rules.parameters
        groups, split = ways(sizes, *axes["kv_heads"]), ways(sizes, *axes["heads"])
        of_heads = HeadSplit.of(model, groups, split // groups)
        copies = of_heads.cached if of_heads.copies_keys else ()
        return (
            width_norm(q, layer.q_norm, model, heads, model.heads),
            width_norm(k, layer.k_norm, model, kv_heads, model.kv_heads, copies),
        )
    return scale_norm(q, layer.q_norm, model, heads), scale_norm(k, layer.k_norm, model, kv_heads)


def _of_own_heads(
    h: Float[Array, "B T D"], weight: Float[Array, "stored K H"], bias: Float[Array, "K H"] | None, how: Computation
) -> Float[Array, "B T S H"]:
    """Keys or values, on each device of the key/value heads that its query heads read: see ``HeadSplit``.

    All devices gather the weight of all heads, and choose from it.
    """
    specs = how.specs
    axes = specs.rules.parameters["kv_heads"]
    table = HeadSplit.of(how.model, ways(jax.sharding.get_abstract_mesh().shape, *axes)).key_table()
    dims = ("embed", None, None)
    whole = gather_in(how.matmul, weight, specs, *dims, rows=how.model.d_model, sequence="residual_seq")
    spec = jax.typeof(h).sharding.spec

    def local(h: jax.Array, whole: jax.Array | NarrowWeight, bias: jax.Array | None) -> jax.Array:
        own = jnp.asarray(table, jnp.int32)[jax.lax.axis_index(axes)]

        def chosen(array: jax.Array, axis: int) -> jax.Array:
            array = varying(array, specs.token_axes("residual_seq"))
            heads = [jax.lax.dynamic_slice_in_dim(array, head, 1, axis) for head in own]
            return jnp.concatenate(heads, axis)

        h = varying(h, axes)
        if isinstance(whole, NarrowWeight):
            # The scales have no dim of rows before that of heads.
            own_weight = NarrowWeight(
                values=chosen(whole.values, 1), scales=chosen(whole.scales, 0), plain=chosen(whole.plain, 1)
            )
            y = narrow_matmul(h, own_weight, summed_back=axes)
        else:
            y = jnp.einsum("btd,dkh->btkh", h, chosen(whole, 1))
        return y if bias is None else y + chosen(bias, 0)

    weights = (whole, bias)
    places = jax.tree.map(lambda array: jax.typeof(array).sharding.spec, weights)
    out = specs.activation("batch", "seq", "kv_heads", None)
    return on_shards(local, in_specs=(spec, *places), out_specs=out)(h, *weights)


def _core(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K d_v"],
    sinks: Float[Array, " N"] | None,
    window: int | None,
    segments: Int[Array, "B T"] | None,
    how: Computation,
) -> Float[Array, "B T N d_v"]:
    """Attention of queries, keys and values."""
    specs = how.specs
    heads = specs.activation("batch", "seq", "heads", None)
    kv_heads = specs.activation("batch", "seq", "kv_heads", None)
    sink_spec = None if sinks is None else jax.typeof(sinks).sharding.spec
    scores = Scores.of(how.model, window, how.attention_block)
    attention: Callable[..., jax.Array] = attend
    if ring := specs.rules.activations["seq"]:
        attention = partial(context_attend, axes=ring, order=how.context_order, by=how.context_attention)

    def local(
        q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None, segments: jax.Array | None
    ) -> jax.Array:
        return attention(how.attention, scores, q, k, v, sinks=sinks, segments=segments)

    # The type of a Pallas kernel's outputs does not say over which axes they vary.
    typed = how.attention != "splash"
    segment_spec = None if segments is None else specs.activation("batch", "seq")
    specs_in = (heads, kv_heads, kv_heads, sink_spec, segment_spec)
    o: jax.Array = on_shards(local, in_specs=specs_in, out_specs=heads, check_vma=typed)(q, k, v, sinks, segments)
    # In a pipeline stage no remat policy sees the names within a nested shard_map.
    return checkpoint_name(o, "attn_core") if jax.sharding.get_abstract_mesh().manual_axes else o


def feed_forward(
    x: Float[Array, "B T D"],
    layer: MLP[jax.Array] | MoEWeights[jax.Array],
    real: Bool[Array, "B T"] | None,
    how: Computation,
    *,
    of: Float[Array, "B T D"] | None = None,
    shared_norm: Norm[jax.Array] | None = None,
) -> tuple[Float[Array, "B T D"], Float32[Array, "devices 3 E"] | None]:
    """The MLP or the mixture of experts of the stream ``of`` (None: x), added to x; and the experts' load.

    ``shared_norm`` is the norm of the input where the layer has none of its own. Experts leave out tokens that are
    False in ``real``.
    """
    model, specs = how.model, how.specs
    normed, weights = x if of is None else of, layer.norm or shared_norm
    if weights is not None:
        with named_scope("mlp"), named_scope("norm"):
            normed = norm(normed, weights, model, specs)
    load = None
    if isinstance(layer, MLP):
        with named_scope("mlp"):
            y = _mlp(checkpoint_name(normed, "mlp_normed"), layer, how)
    else:
        y, load = moe_mlp(
            normed,
            layer,
            model,
            specs,
            matmul=how.expert_matmul,
            dtype=how.matmul,
            capacity_factor=how.expert_capacity,
            measured=how.balance_loss > 0,
            real=real,
            gathers=how.experts_gather,
        )
    with named_scope("mlp"):
        if layer.post_norm is not None:
            with named_scope("norm"):
                y = norm(y, layer.post_norm, model, specs)
        with named_scope("down"):
            return x + _residual(y, model), load


def transform(
    x: Float[Array, "B T D"],
    weights: Layer[jax.Array],
    heads: Callable[[jax.Array], jax.Array],
    real: Bool[Array, "B T"] | None,
    how: Computation,
) -> tuple[Float[Array, "B T D"], Float32[Array, "devices 3 E"] | None]:
    """The residual stream after one layer, and the experts' load; ``heads`` and ``real`` as above."""
    with named_scope("attn"):
        after = attention(x, weights.attn, how, heads)
    if how.model.parallel is None:
        return feed_forward(after, weights.mlp, real, how)
    return feed_forward(after, weights.mlp, real, how, of=x, shared_norm=weights.attn.norm)


def _mlp(x: Float[Array, "B T D"], layer: MLP[jax.Array], how: Computation) -> Float[Array, "B T D"]:
    """The MLP of the normalised x, gated or not."""
    specs = how.specs
    hidden = specs.activation("batch", "seq", "mlp")

    def projected() -> tuple[jax.Array, ...]:
        """x times the gate, if there is one, and times up."""
        stored = (layer.up,) if layer.gate is None else (layer.gate, layer.up)
        if (ring := how.ring) is not None:
            weights = [gather(weight, specs, "embed", "mlp", rows=x.shape[-1]) for weight in stored]
            return project_gathered(x, weights, ring, saved=how.saves("mlp_up"))
        matrices = [gather_in(how.matmul, weight, specs, "embed", "mlp", rows=x.shape[-1]) for weight in stored]
        h = split_sequence(x, specs.inputs(reduced="mlp"))
        if specs.width:
            # Sums over D are scattered over tokens.
            sums = specs.inputs("mlp", unreduced="embed")
            return tuple(split_sequence(project(h, matrix, sums), hidden) for matrix in matrices)
        return tuple((project_left if how.weights_left else project)(h, matrix) for matrix in matrices)

    with named_scope("up"):
        *gates, up = projected()
        gate = checkpoint_name(add_bias(gates[0], layer.gate_bias, hidden), "mlp_up") if gates else None
        up = checkpoint_name(add_bias(up, layer.up_bias, hidden), "mlp_up")
    with named_scope("act"):
        act = checkpoint_name(activate(gate, up, how.model), "mlp_act")
    with named_scope("down"):
        y = add_bias(_scattered(act, layer.down, "mlp", how), layer.down_bias, specs.residual)
        return checkpoint_name(y, "mlp_down")


def _scattered(
    x: Float[Array, "B T rows"], weight: Float[Array, "stored_rows D"], dim: str, how: Computation
) -> Float[Array, "B T D"]:
    """x times a weight whose rows are split over ``dim``; partial sums are scattered into the stream's sharding.

    FSDP may store more rows than x has, zeros among them.
    """
    specs = how.specs
    if (ring := how.ring) is not None:
        return project_scattered(x, gather(weight, specs, (dim, "embed"), None, rows=x.shape[-1]), ring)
    matrix = gather_in(how.matmul, weight, specs, (dim, "embed"), None, rows=x.shape[-1])
    if how.weights_left:
        return project_left(x, matrix)
    if specs.width:
        x = split_sequence(x, specs.inputs(dim))
    y = project(x, matrix, specs.inputs(unreduced=dim))
    return split_sequence(y, specs.residual)
