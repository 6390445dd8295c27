"""The decoder, with every collective stated where it happens.

Dims: B batch, T sequence, D model, F feed-forward, N query heads, K key/value heads, H head size, V vocabulary. JAX's
explicit mode carries shardings in the types: each reshard below is one collective and its transpose another, and
nothing is left to the partitioner. With the default rules:

- the residual stream is split over batch and sequence. It is gathered over tensor before a matmul, and the matmul's
  partial sums are scattered over tensor, in the scope of that matmul;
- a weight is gathered over fsdp in its matmul's scope, and again in the backward pass, since no remat policy saves it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import P, named_scope
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import reshard
from jaxtyping import Array, Float, Float32, Int

from rooftop.arrays.rules import STAGE_AXES, ways
from rooftop.capabilities import KERNELS_OF_CHIP
from rooftop.core.errors import RooftopError
from rooftop.models.activations import parse_policy
from rooftop.models.segments import LayerKind, Segment, segments
from rooftop.programs.attention.attend import CUDNN_FORWARD
from rooftop.programs.model import loss as losses
from rooftop.programs.model.layer import Computation, causal, transform
from rooftop.programs.model.moe.route import balance
from rooftop.programs.model.operations import norm
from rooftop.programs.model.positions import rotation
from rooftop.programs.parameters import Batch, Layer, Transformer
from rooftop.programs.sharding import on_shards

#: Inputs of layers other than the stream: rotary angles of windowed layers (True) and of others, the segments, and for
#: layers of experts the tokens that are no padding (None: all).
Places = tuple[dict[bool, jax.Array], jax.Array | None, jax.Array | None]
#: Apply the layers of a period to the residual stream, given their weights and places; also return experts' loads.
Period = Callable[[jax.Array, tuple[Layer[jax.Array], ...], Places], tuple[jax.Array, list[jax.Array]]]


def loss(
    weights: Transformer[jax.Array], batch: Batch[jax.Array], how: Computation, *, chunks: int
) -> Float32[Array, ""]:
    """The first result of ``objective``: without optional terms, mean cross-entropy in nats."""
    return objective(weights, batch, how, chunks=chunks)[0]


def objective(
    weights: Transformer[jax.Array],
    batch: Batch[jax.Array],
    how: Computation,
    *,
    chunks: int,
    counted: jax.Array | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The training objective, and the means that it adds to the cross-entropy; float32 scalars.

    Mean cross-entropy is in nats, over the tokens that carry loss: all B*T, or in a packed or padded batch those whose
    target is not negative; ``counted`` is their number (None: counted here). The means come by name and without their
    coefficients: ``z_loss``, the mean over the same tokens of (log Z)**2 with Z the denominator of the softmax (PaLM
    paper, section 5); and ``balance_loss``, ``rooftop.programs.model.moe.route.balance`` of all layers.

    ``weights`` are at rest (``Specs.at_rest``), in the dtype of matmuls; norms, softmax and loss are in float32. T is
    split into ``chunks`` for the logits. Runs under ``jax.set_mesh``.

    Raises RooftopError for chunks that do not divide T, or a mesh with stages.
    """
    x, load = _stream(weights, batch, how)
    value, terms = head_loss(x, weights, batch, how, chunks=chunks, counted=counted)
    return (value, terms) if load is None else balanced(value, terms, load, how)


def head_loss(
    x: Float[Array, "B T D"],
    weights: Transformer[jax.Array],
    batch: Batch[jax.Array],
    how: Computation,
    *,
    chunks: int,
    counted: jax.Array | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """``objective`` of the stream x after all layers, without the terms that layers add."""
    x = final_norm(x, weights, how)
    matrix = weights.embed if weights.unembed is None else weights.unembed
    if batch.masked and counted is None:
        counted = losses.count_loss_tokens(batch.targets)
    value, squares = losses.cross_entropy(
        x,
        matrix,
        batch.targets,
        how.specs,
        chunks=chunks,
        softcap=how.model.final_softcap,
        tied=weights.unembed is None,
        vocab=how.model.vocab,
        z_loss=how.z_loss,
        counted=counted,
        rounded=how.attention in KERNELS_OF_CHIP["gpu"],
    )
    return value, {} if squares is None else {"z_loss": squares}


def balanced(
    value: Float32[Array, ""], terms: dict[str, jax.Array], load: Float32[Array, "3 E"], how: Computation
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """An objective and its terms, plus the balance loss of the ``load`` of all experts."""
    with named_scope("loss"):
        mean = balance(load)
        return value + how.balance_loss * mean, terms | {"balance_loss": mean}


def logits(weights: Transformer[jax.Array], tokens: Int[Array, "B T"], how: Computation) -> Float32[Array, "B T V"]:
    """Logits, V split over tensor; see ``objective``. Those of a padded vocabulary's padding are minus infinity."""
    tied = weights.unembed is None
    matrix = weights.embed if weights.unembed is None else weights.unembed
    stream, _ = _stream(weights, Batch(tokens=tokens, targets=tokens), how)
    x, matrix = losses.head(final_norm(stream, weights, how), matrix, how.specs, tied=tied)
    return losses.logits(x, matrix, how.model.final_softcap, vocab=how.model.vocab)


def _stream(
    weights: Transformer[jax.Array], batch: Batch[jax.Array], how: Computation
) -> tuple[Float[Array, "B T D"], Float32[Array, "3 E"] | None]:
    """The residual stream after all layers, and the load of all experts if it is measured.

    The load is ``rooftop.programs.model.moe.route.load`` summed over layers and devices.
    """
    if (stages := ways(jax.sharding.get_abstract_mesh().shape, *STAGE_AXES)) > 1:
        raise RooftopError("mesh axis stage", stages, "1 in this program")
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

            x, period_loads = jax.lax.scan(body, x, stacks)
            loads += period_loads
    if not loads:
        return x, None
    with named_scope("loss"):
        return x, jnp.sum(jnp.stack([jnp.sum(load, axis=(0, 1)) for load in loads]), axis=0)


def places(batch: Batch[jax.Array], how: Computation) -> Places:
    """Rotary angles, segments and padding of the batch's tokens, as all layers read them."""
    with named_scope("attn"), named_scope("rope"):
        positions = how.positions(batch)
        turns = {local: rotation(how.model, positions, local=local) for local in (False, True)}
    real = None
    if how.model.moe is not None and batch.masked:
        with named_scope("moe"), named_scope("router"):
            real = batch.targets >= 0 if batch.segments is None else batch.segments > 0
    return turns, batch.segments, real


def period(segment: Segment, how: Computation) -> Period:
    """The layers of one period of ``segment``, each a checkpoint by the remat policy.

    Raises RooftopError for an unknown remat policy.
    """
    actions = parse_policy(how.remat)
    # Positive lists only: "all but the weights" would save a gathered weight as the output of its reshard.
    named = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[name for name, action in actions.items() if action == "save"],
        names_which_can_be_offloaded=[name for name, action in actions.items() if action == "offload"],
        offload_src="device",
        offload_dst="pinned_host",
    )

    (naming,) = jax.make_jaxpr(partial(checkpoint_name, name="attn_core"))(0.0).eqns

    def policy(primitive: Any, *arrays: Any, **parameters: Any) -> Any:
        if primitive.name == CUDNN_FORWARD:
            return named(naming.primitive, *arrays, **naming.params)
        return named(primitive, *arrays, **parameters)

    def layer(
        kind: LayerKind, x: jax.Array, weights: Layer[jax.Array], at: Places
    ) -> tuple[jax.Array, jax.Array | None]:
        turns, ids, real = at
        x = checkpoint_name(x, "layer_input")
        local = kind.window is not None and how.model.rope_local_theta is not None
        own = turns[local] if kind.rope and how.model.positions == "rope" else None
        heads = partial(causal, layer=weights.attn, turns=own, window=kind.window, segments=ids, how=how)
        return transform(x, weights, heads, real, how)

    blocks = [jax.checkpoint(partial(layer, kind), policy=policy) for kind in segment.kinds]

    def through(x: jax.Array, layers: tuple[Layer[jax.Array], ...], at: Places) -> tuple[jax.Array, list[jax.Array]]:
        loads = []
        for block, weights in zip(blocks, layers, strict=True):
            x, load = block(x, weights, at)
            loads += [] if load is None else [load]
        return x, loads

    return through


def final_norm(x: Float[Array, "B T D"], weights: Transformer[jax.Array], how: Computation) -> Float[Array, "B T D"]:
    """The norm after the last layer, of the residual stream, times the scale of the logits."""
    with named_scope("final_norm"):
        x, scale = norm(x, weights.final_norm, how.model, how.specs), how.model.logits_scale
        return x if scale == 1.0 else x * jnp.asarray(scale, x.dtype)


def embed(weights: Transformer[jax.Array], batch: Batch[jax.Array], how: Computation) -> Float[Array, "B T D"]:
    """The residual stream: rows of the table [V, D] for the batch's tokens, plus learned positions.

    Each device reads its columns of the rows that its fsdp group needs. Then an AllToAll over fsdp trades columns for
    batch, and another over tensor trades columns for sequence. In a single step the partitioner would replicate the
    array.
    """
    model, specs = how.model, how.specs
    fsdp, tensor = specs.rules.parameters["embed"], specs.rules.parameters[specs.table]
    copies = tuple(axis for axis in specs.rules.activations["batch"] if axis not in fsdp)
    (residual_seq,) = specs.activation("residual_seq")
    inner = model.tied_embeddings or bool(specs.width)
    (columns,) = specs.parameter(("embed", specs.table) if inner else (specs.table, "embed"))
    seq = specs.inputs().partitions[1]
    x = weights.embed.at[reshard(batch.tokens, P(copies, seq))].get(out_sharding=P(copies, seq, columns))
    # The minor axis of the columns is exchanged first: its data is contiguous.
    sequences, *_ = specs.residual
    x = reshard(x, P(copies, residual_seq, fsdp) if inner else P(sequences, seq, tensor))
    x = reshard(x, specs.residual)
    if x.shape[-1] != model.d_model:
        x = jax.lax.slice_in_dim(x, 0, model.d_model, axis=-1)
    if model.embed_scale != 1.0:
        x = x * jnp.asarray(model.embed_scale, x.dtype)
    if weights.positions is None:
        return x
    everywhere = P(None, *specs.residual.partitions[2:], reduced=specs.token_axes("residual_seq"))
    positions = how.positions(batch)
    position_spec = P(*(sequences, residual_seq)[-positions.ndim :])
    positions = reshard(positions, position_spec)
    if model.position_offset:
        positions = positions + model.position_offset

    def local(x: jax.Array, table: jax.Array, positions: jax.Array) -> jax.Array:
        return x + jax.lax.pcast(table, tuple(everywhere.reduced), to="varying")[positions]

    add = on_shards(local, in_specs=(specs.residual, everywhere, position_spec), out_specs=specs.residual)
    table = reshard(weights.positions, everywhere)
    if table.shape[-1] != model.d_model:
        table = jax.lax.slice_in_dim(table, 0, model.d_model, axis=-1)
    return add(x, table, positions)
