"""The decoder, with every collective stated where it happens.

Dims: B batch, T sequence, D model, F feed-forward, N query heads, K key/value heads, H head size, V vocabulary. JAX's
explicit mode carries shardings in the types: each reshard below is one collective and its transpose another, and
nothing is left for the partitioner to guess. With the default rules:

- the residual stream is split over batch and sequence; before a matmul it is gathered over tensor, and after one its
  partial sums are scattered over tensor, in the scope of that matmul;
- a weight is gathered over fsdp in its matmul's scope, and again in the backward pass, since no remat policy keeps it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import P, named_scope
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import reshard

from rooftop.errors import RooftopError
from rooftop.models.activations import parse_policy
from rooftop.models.config import ModelConfig
from rooftop.programs import loss as losses
from rooftop.programs.attention import BLOCK, attend
from rooftop.programs.describe import Kind, Segment, segments
from rooftop.programs.elementwise import add_bias, norm, scale_norm
from rooftop.programs.gathered_attention import gathered_attend
from rooftop.programs.mla import latent_qkv
from rooftop.programs.moe import activate, moe_mlp
from rooftop.programs.parameters import MLP, Attention, Batch, LatentAttention, Layer, MoE, Transformer
from rooftop.programs.positions import rotate, rotation, within_segments
from rooftop.programs.projection import project
from rooftop.programs.ring_attention import ring_attend, sequence_order
from rooftop.programs.routing import balance
from rooftop.programs.sharding import Specs, gather, on_shards, split_sequence

#: What layers read beside the stream: rotary angles of windowed layers (True) and of others, and the segments.
Places = tuple[dict[bool, jax.Array], jax.Array | None]
#: The layers of a period, by their weights and places, on the residual stream; and the loads of their experts.
Period = Callable[[jax.Array, tuple[Layer[jax.Array], ...], Places], tuple[jax.Array, list[jax.Array]]]
#: How attention over a context axis comes by the keys and values of other devices.
CONTEXT_ATTENTIONS: tuple[str, ...] = ("ring", "all_gather")


@dataclass(frozen=True, kw_only=True)
class Computation:
    """How a model is computed: its arrays by ``specs``, checkpoints by ``remat`` (see ``rooftop.models.activations``).

    ``attention`` is a kernel of ``rooftop.programs.attention``, with blocks of at most ``attention_block``. Over a
    context axis the sequence lies in ``context_order`` (see ``rooftop.programs.ring_attention``), and keys and values
    come by ``context_attention``: round a ring, or gathered (``rooftop.programs.gathered_attention``). Experts do
    ``expert_matmul``, and ``expert_capacity`` is the ``capacity_factor`` of ``rooftop.programs.moe``: None drops no
    token. ``z_loss`` and ``balance_loss`` are coefficients of what is added to the cross-entropy (see ``objective``).
    """

    model: ModelConfig
    specs: Specs
    remat: str = "none"
    attention: str = "reference"
    attention_block: int = BLOCK
    context_order: str = "zigzag"
    context_attention: str = "ring"
    expert_matmul: str = "batched"
    expert_capacity: float | None = None
    z_loss: float = 0.0
    balance_loss: float = 0.0

    def positions(self, batch: Batch[jax.Array]) -> jax.Array:
        """The positions of the tokens: [T] alike in all sequences, or [B, T] where sequences are packed or it is given.

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
        ways = jax.sharding.get_abstract_mesh().shape[ring[0]]
        return jnp.asarray(sequence_order(seq_len, ways, self.context_order))


def loss(weights: Transformer[jax.Array], batch: Batch[jax.Array], how: Computation, *, chunks: int) -> jax.Array:
    """The first of ``objective``: without its optional terms, mean cross-entropy in nats, a float32 scalar."""
    return objective(weights, batch, how, chunks=chunks)[0]


def objective(
    weights: Transformer[jax.Array],
    batch: Batch[jax.Array],
    how: Computation,
    *,
    chunks: int,
    counted: jax.Array | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """What training minimises, and the means that were added to the cross-entropy for it; float32 scalars.

    Mean cross-entropy is in nats, over the tokens that carry loss: all B*T, or of a packed batch those whose target is
    not negative, whose number is ``counted`` (float32; None: counted here). The means, without their coefficients, by
    whose names they come: ``z_loss``, over the same tokens of (log Z)**2 with Z the denominator of the softmax (PaLM
    paper, section 5); and ``balance_loss``, ``rooftop.programs.routing.balance`` of all layers.

    ``weights`` are at rest (``Specs.at_rest``), in the dtype of matmuls; norms, softmax and loss are in float32. T is
    split into ``chunks`` for the logits. Runs under ``jax.set_mesh``.

    Raises RooftopError for an unknown remat policy, chunks that do not divide T, a mesh with stages, or a
    ``balance_loss`` of a model without experts.
    """
    if how.balance_loss and how.model.moe is None:
        raise RooftopError("balance_loss", how.balance_loss, f"0 for {how.model.name}, which has no experts")
    x, load = _stream(weights, batch, how)
    value, terms = head_loss(x, weights, batch, how, chunks=chunks, counted=counted)
    if load is not None:
        with named_scope("loss"):
            terms["balance_loss"] = balance(load)
            value = value + how.balance_loss * terms["balance_loss"]
    return value, terms


def head_loss(
    x: jax.Array,
    weights: Transformer[jax.Array],
    batch: Batch[jax.Array],
    how: Computation,
    *,
    chunks: int,
    counted: jax.Array | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """``objective`` of the stream x [B, T, D] after all layers, without what the layers add to it."""
    x = final_norm(x, weights, how)
    matrix = weights.embed if weights.unembed is None else weights.unembed
    if batch.segments is not None and counted is None:
        counted = losses.carrying(batch.targets)
    value, squares = losses.cross_entropy(
        x,
        matrix,
        batch.targets,
        how.specs,
        chunks=chunks,
        softcap=how.model.final_softcap,
        tied=weights.unembed is None,
        z_loss=how.z_loss,
        counted=counted,
    )
    return value, {} if squares is None else {"z_loss": squares}


def logits(weights: Transformer[jax.Array], tokens: jax.Array, how: Computation) -> jax.Array:
    """Logits [B, T, V] in float32, V split over tensor; see ``objective``."""
    tied = weights.unembed is None
    matrix = weights.embed if weights.unembed is None else weights.unembed
    stream, _ = _stream(weights, Batch(tokens=tokens, targets=tokens), how)
    x, matrix = losses.head(final_norm(stream, weights, how), matrix, how.specs, tied=tied)
    return losses.logits(x, matrix, how.model.final_softcap)


def _stream(
    weights: Transformer[jax.Array], batch: Batch[jax.Array], how: Computation
) -> tuple[jax.Array, jax.Array | None]:
    """The residual stream [B, T, D] after all layers, and the load of all experts, if asked for.

    The load is ``rooftop.programs.routing.load`` summed over layers and devices.
    """
    if (ways := jax.sharding.get_abstract_mesh().shape.get("stage", 1)) > 1:
        raise RooftopError("mesh axis stage", ways, "1 in this program")
    with named_scope("embed"):
        x = embed(weights, batch, how)
    loads = list[jax.Array]()
    with named_scope("layers"):
        at = places(batch, how)
        for segment, stacks in zip(segments(how.model), weights.layers, strict=True):
            layers = period(segment, how)

            def body(
                x: jax.Array, weights: tuple[Layer[jax.Array], ...], layers: Period = layers
            ) -> tuple[jax.Array, list[jax.Array]]:
                return layers(x, weights, at)

            x, found = jax.lax.scan(body, x, stacks)
            loads += found
    if not loads:
        return x, None
    with named_scope("loss"):
        return x, jnp.sum(jnp.stack([jnp.sum(load, axis=(0, 1)) for load in loads]), axis=0)


def places(batch: Batch[jax.Array], how: Computation) -> Places:
    """Where the batch's tokens stand, as all layers read it."""
    with named_scope("attn"), named_scope("rope"):
        positions = how.positions(batch)
        return {local: rotation(how.model, positions, local=local) for local in (False, True)}, batch.segments


def period(segment: Segment, how: Computation) -> Period:
    """The layers of one period of ``segment``, each a checkpoint by the remat policy.

    Raises RooftopError for an unknown remat policy.
    """
    actions = parse_policy(how.remat)
    # Positive lists only: "all but the weights" would keep a gathered weight under the reshard's own output.
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[name for name, action in actions.items() if action == "save"],
        names_which_can_be_offloaded=[name for name, action in actions.items() if action == "offload"],
        offload_src="device",
        offload_dst="pinned_host",
    )

    def layer(kind: Kind, x: jax.Array, weights: Layer[jax.Array], at: Places) -> tuple[jax.Array, jax.Array | None]:
        turns, ids = at
        x = checkpoint_name(x, "layer_input")
        local = kind.window is not None and how.model.rope_local_theta is not None
        with named_scope("attn"):
            heads = partial(_causal, layer=weights.attn, turns=turns[local], window=kind.window, segments=ids, how=how)
            x = attention(x, weights.attn, how, heads)
        return feed_forward(x, weights.mlp, ids, how)

    blocks = [jax.checkpoint(partial(layer, kind), policy=policy) for kind in segment.kinds]

    def through(x: jax.Array, layers: tuple[Layer[jax.Array], ...], at: Places) -> tuple[jax.Array, list[jax.Array]]:
        found = []
        for block, weights in zip(blocks, layers, strict=True):
            x, load = block(x, weights, at)
            found += [] if load is None else [load]
        return x, found

    return through


def final_norm(x: jax.Array, weights: Transformer[jax.Array], how: Computation) -> jax.Array:
    """The norm behind the last layer, of the residual stream [B, T, D]."""
    with named_scope("final_norm"):
        return norm(x, weights.final_norm, how.model, how.specs)


def embed(weights: Transformer[jax.Array], batch: Batch[jax.Array], how: Computation) -> jax.Array:
    """Rows of the table [V, D] for the batch's tokens, and of learned positions: the residual stream [B, T, D].

    Each device reads its columns of the rows that its fsdp group needs. One AllToAll over fsdp then trades columns
    for batch, another over tensor trades columns for sequence; in one step the partitioner would replicate the array.
    """
    model, specs = how.model, how.specs
    fsdp, tensor = specs.rules.parameters["embed"], specs.rules.parameters["vocab"]
    copies = tuple(axis for axis in specs.rules.activations["batch"] if axis not in fsdp)
    (seq,), (residual_seq,) = specs.activation("seq"), specs.activation("residual_seq")
    (columns,) = specs.parameter(("embed", "vocab") if model.tied_embeddings else ("vocab", "embed"))
    x = weights.embed.at[reshard(batch.tokens, P(copies, seq))].get(out_sharding=P(copies, seq, columns))
    # The axis that is minor in the columns leaves first: what it trades is contiguous.
    sequences, *_ = specs.residual
    x = reshard(x, P(copies, residual_seq, fsdp) if model.tied_embeddings else P(sequences, seq, tensor))
    x = reshard(x, specs.residual)
    if model.embed_scale != 1.0:
        x = x * jnp.asarray(model.embed_scale, x.dtype)
    if weights.positions is None:
        return x
    everywhere = P(None, None, reduced=specs.token_axes("residual_seq"))
    where = how.positions(batch)
    place = P(*(sequences, residual_seq)[-where.ndim :])
    where = reshard(where, place)

    def local(x: jax.Array, table: jax.Array, where: jax.Array) -> jax.Array:
        return x + jax.lax.pcast(table, tuple(everywhere.reduced), to="varying")[where]

    add = on_shards(local, in_specs=(specs.residual, everywhere, place), out_specs=specs.residual)
    return add(x, reshard(weights.positions, everywhere), where)


def attention(
    x: jax.Array,
    layer: Attention[jax.Array] | LatentAttention[jax.Array],
    how: Computation,
    heads: Callable[[jax.Array], jax.Array],
) -> jax.Array:
    """Attention on the residual stream [B, T, D], added to it.

    ``heads`` makes the outputs of all heads [B, T, N, d_v], split over N, of the normalised stream.
    """
    model, specs = how.model, how.specs
    with named_scope("norm"):
        normed = checkpoint_name(norm(x, layer.norm, model, specs), "attn_normed")
    o = heads(normed)
    out_bias = None if isinstance(layer, LatentAttention) else layer.out_bias
    with named_scope("out"):
        # XLA names a matmul after a reshape that it absorbs, so this one stands in the scope of its matmul.
        o = o.reshape(*o.shape[:2], -1, out_sharding=specs.activation("batch", "seq", "heads"))
        y = add_bias(_scattered(o, layer.out, "heads", specs), out_bias, specs.residual)
        y = checkpoint_name(y, "attn_out")
    if layer.post_norm is not None:
        with named_scope("norm"):
            y = norm(y, layer.post_norm, model, specs)
    with named_scope("out"):
        return checkpoint_name(x + y, "mlp_input")


def _causal(
    normed: jax.Array,
    *,
    layer: Attention[jax.Array] | LatentAttention[jax.Array],
    turns: jax.Array,
    window: int | None,
    segments: jax.Array | None,
    how: Computation,
) -> jax.Array:
    """Causal attention of whole sequences, within ``segments`` [B, T] if there are any: [B, T, N, d_v]."""
    model, sinks = how.model, None
    if isinstance(layer, LatentAttention):
        assert model.mla is not None
        q, k, v = latent_qkv(normed, layer, turns, model, model.mla, how.specs)
    else:
        q, k, v = qkv(normed, layer, turns, how)
        sinks = layer.sinks
    with named_scope("core"):
        return _core(q, k, v, sinks, window, segments, how)


def qkv(
    x: jax.Array, layer: Attention[jax.Array], turns: jax.Array, how: Computation
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries [B, T, N, H], keys and values [B, T, K, H] of the normalised x [B, T, D]; rotated if positions are."""
    model, specs = how.model, how.specs
    heads, kv_heads = (specs.activation("batch", "seq", name, None) for name in ("heads", "kv_heads"))
    with named_scope("qkv"):
        h = split_sequence(x, specs.activation("batch", "seq", None, reduced="heads"))
        # Not by ``project``: with one head on a device XLA:TPU would make an AllReduce of the gradient's ReduceScatter.
        q = jnp.einsum("btd,dnh->btnh", h, gather(layer.q, specs, "embed", "heads", None))
        k = jnp.einsum("btd,dkh->btkh", h, gather(layer.k, specs, "embed", "kv_heads", None))
        v = jnp.einsum("btd,dkh->btkh", h, gather(layer.v, specs, "embed", "kv_heads", None))
        q = checkpoint_name(add_bias(q, layer.q_bias, heads), "qkv")
        k = checkpoint_name(add_bias(k, layer.k_bias, kv_heads), "qkv")
        v = checkpoint_name(add_bias(v, layer.v_bias, kv_heads), "qkv")
        if layer.q_norm is not None and layer.k_norm is not None:
            q = scale_norm(q, layer.q_norm, model, heads)
            k = scale_norm(k, layer.k_norm, model, kv_heads)
    if model.positions != "rope":
        return q, k, v
    with named_scope("rope"):
        q, k = (checkpoint_name(rotate(each, turns, interleaved=model.rope_interleaved), "rope") for each in (q, k))
        return q, k, v


def _core(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    sinks: jax.Array | None,
    window: int | None,
    segments: jax.Array | None,
    how: Computation,
) -> jax.Array:
    """Attention proper: [B, T, N, d_v] from q [B, T, N, H], k [B, T, K, H], v [B, T, K, d_v] and sinks [N]."""
    model, specs = how.model, how.specs
    heads = specs.activation("batch", "seq", "heads", None)
    kv_heads = specs.activation("batch", "seq", "kv_heads", None)
    sink_spec = None if sinks is None else jax.typeof(sinks).sharding.spec
    attention = partial(attend, block=how.attention_block)
    if ring := specs.rules.activations["seq"]:
        over = ring_attend if how.context_attention == "ring" else gathered_attend
        attention = partial(over, block=how.attention_block, axis=ring[0], order=how.context_order)

    def local(
        q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None, segments: jax.Array | None
    ) -> jax.Array:
        return attention(
            q, k, v,
            scale=model.d_head**-0.5 if model.query_scale is None else model.query_scale,
            kernel=how.attention, window=window, softcap=model.attn_softcap, sinks=sinks, segments=segments,
        )  # fmt: skip

    # A Pallas kernel's outputs do not say over which axes they vary.
    typed = how.attention != "splash"
    segment_spec = None if segments is None else specs.activation("batch", "seq")
    specs_in = (heads, kv_heads, kv_heads, sink_spec, segment_spec)
    return on_shards(local, in_specs=specs_in, out_specs=heads, check_vma=typed)(q, k, v, sinks, segments)


def feed_forward(
    x: jax.Array, layer: MLP[jax.Array] | MoE[jax.Array], segments: jax.Array | None, how: Computation
) -> tuple[jax.Array, jax.Array | None]:
    """The MLP or the mixture of experts on the residual stream [B, T, D], added to it; and the experts' load."""
    model, specs = how.model, how.specs
    with named_scope("mlp"), named_scope("norm"):
        normed = norm(x, layer.norm, model, specs)
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
            capacity_factor=how.expert_capacity,
            measured=how.balance_loss > 0,
            segments=segments,
        )
    with named_scope("mlp"):
        if layer.post_norm is not None:
            with named_scope("norm"):
                y = norm(y, layer.post_norm, model, specs)
        with named_scope("down"):
            return x + y, load


def _mlp(x: jax.Array, layer: MLP[jax.Array], how: Computation) -> jax.Array:
    """The MLP of the normalised x [B, T, D], gated or not."""
    specs = how.specs
    hidden = specs.activation("batch", "seq", "mlp")

    def into(h: jax.Array, weight: jax.Array, bias: jax.Array | None) -> jax.Array:
        y = project(h, gather(weight, specs, "embed", "mlp"))
        return checkpoint_name(add_bias(y, bias, hidden), "mlp_up")

    with named_scope("up"):
        h = split_sequence(x, specs.activation("batch", "seq", None, reduced="mlp"))
        gate = None if layer.gate is None else into(h, layer.gate, layer.gate_bias)
        up = into(h, layer.up, layer.up_bias)
    with named_scope("act"):
        act = checkpoint_name(activate(gate, up, how.model), "mlp_act")
    with named_scope("down"):
        y = add_bias(_scattered(act, layer.down, "mlp", specs), layer.down_bias, specs.residual)
        return checkpoint_name(y, "mlp_down")


def _scattered(x: jax.Array, weight: jax.Array, dim: str, specs: Specs) -> jax.Array:
    """x [B, T, dim] times weight [dim, D], its partial sums scattered into the residual stream's sharding."""
    partial_sums = specs.activation("batch", "seq", None, unreduced=dim)
    y = project(x, gather(weight, specs, (dim, "embed"), None), partial_sums)
    return split_sequence(y, specs.residual)
