"""A dense decoder in the LLaMA style, with every collective stated where it happens.

Dims: B batch, T sequence, D model, F feed-forward, N query heads, K key/value heads, H head size, L layers,
V vocabulary. JAX's explicit mode carries shardings in the types: each ``reshard`` below is one collective and its
transpose another, and nothing is left for the partitioner to guess. With the default rules:

- the residual stream is split over batch and sequence; before a matmul it is gathered over tensor, and after one its
  partial sums are scattered over tensor, in the scope of that matmul;
- a weight is gathered over fsdp in its matmul's scope, and again in the backward pass, since no remat policy keeps it.
"""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax import P, named_scope
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import reshard

from rooftop.errors import RooftopError
from rooftop.models import ModelConfig
from rooftop.models.activations import parse_policy
from rooftop.programs.parameters import MLP, Attention, Batch, Layers, Parameter, Transformer, describe
from rooftop.programs.sharding import Dim, Specs, axes_of


def loss(
    weights: Transformer[jax.Array],
    batch: Batch[jax.Array],
    model: ModelConfig,
    specs: Specs,
    *,
    remat: str,
    loss_chunks: int,
    dtype: jnp.dtype,
) -> jax.Array:
    """Mean cross-entropy in nats over all B*T tokens, a float32 scalar.

    ``weights`` are float32 and at rest; matmuls run in ``dtype``; norms, softmax and loss in float32. Gradients are
    summed once, in ``dtype``, over the axes that hold copies of a weight. ``remat`` is a policy of
    ``rooftop.models.activations``. ``loss_chunks`` splits T for the logits: above one, the backward pass computes
    each chunk's logits again. Runs under ``jax.set_mesh``.

    Raises RooftopError for a model with other parts, a remat policy that is unknown or offloads, chunks that do not
    divide T, or a mesh that splits T within attention or layers into stages.
    """
    for axis in ("context", "stage"):
        if (ways := jax.sharding.get_abstract_mesh().shape.get(axis, 1)) > 1:
            raise RooftopError(f"mesh axis {axis}", ways, "1 in this program")
    seq_len = batch.tokens.shape[1]
    if seq_len % loss_chunks:
        raise RooftopError("loss_chunks", loss_chunks, f"a divisor of the sequence length {seq_len}")
    actions = parse_policy(remat)
    if offloaded := [name for name, action in actions.items() if action == "offload"]:
        raise RooftopError(f"remat of {offloaded[0]}", "offload", "save or recompute in this program")
    saved = [name for name, action in actions.items() if action == "save"]
    weights = _for_compute(weights, describe(model), specs, dtype)
    x = _embed(weights.embed, batch.tokens, specs)
    with named_scope("layers"):
        with named_scope("attn"), named_scope("rope"):
            rotation = _rotation(seq_len, model.d_head, model.rope_theta)

        # Positive lists only: "all but the weights" would keep a gathered weight under the reshard's own output.
        @partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names(*saved))
        def block(x: jax.Array, layer: Layers[jax.Array]) -> tuple[jax.Array, None]:
            with named_scope("attn"):
                x = _attention(x, layer.attn, rotation, model.norm_eps, specs)
            with named_scope("mlp"):
                x = _mlp(x, layer.mlp, model.norm_eps, specs)
            return x, None

        x, _ = jax.lax.scan(block, x, weights.layers)
    with named_scope("final_norm"):
        x = _rms_norm(x, weights.final_norm, model.norm_eps, specs)
    return _cross_entropy(x, weights.unembed, batch.targets, specs, loss_chunks)


def _for_compute(
    weights: Transformer[jax.Array], described: Transformer[Parameter], specs: Specs, dtype: jnp.dtype
) -> Transformer[jax.Array]:
    """Weights cast to ``dtype`` and marked reduced over the axes that hold copies: backward, one AllReduce of a shard.

    The cast stands outside the scan over layers, where XLA would move it anyway; so gradients stack up in ``dtype``.
    """

    def prepare(parameter: Parameter, array: jax.Array) -> jax.Array:
        with named_scope("optimizer"):
            array = array.astype(dtype)
        with named_scope("gradients"):
            copies = specs.residual_axes if parameter.fan_in is None else specs.copy_axes
            return _named_reshard(array, P(*specs.parameter(*parameter.dims), reduced=copies))

    return jax.tree.map(prepare, described, weights)


def _named_reshard(array: jax.Array, spec: P) -> jax.Array:
    """A reshard whose collectives keep the present scope in the compiled program, in the backward pass too.

    XLA names a collective after what made its operand: here the transpose of the second reshard, which moves nothing.
    """
    return reshard(reshard(array, spec), spec)


def _split_sequence(x: jax.Array, spec: P) -> jax.Array:
    """x [B, T, D] resharded to ``spec``: T gathered before a matmul, or its partial sums scattered after one.

    With one sequence on a device, XLA:TPU makes an AllReduce of that ReduceScatter, and sends twice the bytes, unless
    the dim of size one is folded into T first.
    """
    batch, seq_len, width = x.shape
    source, mesh = jax.typeof(x).sharding.spec, jax.sharding.get_abstract_mesh()
    if batch > math.prod(mesh.shape[axis] for axis in axes_of(source.partitions[0])):
        return _named_reshard(x, spec)

    def folded(spec: P) -> P:
        tokens = tuple(axis for entry in spec.partitions[:2] for axis in axes_of(entry))
        return P(tokens, None, reduced=spec.reduced, unreduced=spec.unreduced)

    rows = x.reshape(batch * seq_len, width, out_sharding=folded(source))
    return _named_reshard(rows, folded(spec)).reshape(batch, seq_len, width, out_sharding=spec)


def _gather(weight: jax.Array, specs: Specs, *dims: Dim) -> jax.Array:
    """AllGather of a weight over fsdp; backward, ReduceScatter of its gradient."""
    return reshard(weight, specs.in_use(*dims))


def _embed(table: jax.Array, tokens: jax.Array, specs: Specs) -> jax.Array:
    """Rows of ``table`` [V, D] for ``tokens`` [B, T]: the residual stream [B, T, D].

    Each device reads its columns of the rows that its fsdp group needs. One AllToAll over fsdp then trades columns
    for batch, another over tensor trades columns for sequence; in one step the partitioner would replicate the array.
    """
    fsdp, tensor = specs.rules.parameters["embed"], specs.rules.parameters["vocab"]
    copies = tuple(axis for axis in specs.rules.activations["batch"] if axis not in fsdp)
    (seq,) = specs.activation("seq")
    with named_scope("embed"):
        ids = reshard(tokens, P(copies, seq))
        x = table.at[ids].get(out_sharding=P(copies, seq, tensor + fsdp))
        x = reshard(x, P(*specs.activation("batch", "seq"), tensor))
        return reshard(x, specs.activation("batch", "residual_seq", None))


def _attention(
    x: jax.Array, layer: Attention[jax.Array], rotation: jax.Array, norm_eps: float, specs: Specs
) -> jax.Array:
    """Causal grouped-query attention on the residual stream [B, T, D]."""
    with named_scope("norm"):
        normed = checkpoint_name(_rms_norm(x, layer.norm, norm_eps, specs), "attn_normed")
    with named_scope("qkv"):
        h = _split_sequence(normed, specs.activation("batch", "seq", None, reduced="heads"))
        q = jnp.einsum("btd,dnh->btnh", h, _gather(layer.q, specs, "embed", "heads", None))
        k = jnp.einsum("btd,dkh->btkh", h, _gather(layer.k, specs, "embed", "kv_heads", None))
        v = jnp.einsum("btd,dkh->btkh", h, _gather(layer.v, specs, "embed", "kv_heads", None))
        q, k, v = (checkpoint_name(each, "qkv") for each in (q, k, v))
    with named_scope("rope"):
        q, k = (checkpoint_name(_rope(each, rotation), "rope") for each in (q, k))
    with named_scope("core"):
        heads = specs.activation("batch", "seq", "heads", None)
        kv_heads = specs.activation("batch", "seq", "kv_heads", None)
        grouped = specs.activation("batch", "seq", "kv_heads", None, None)
        core = jax.shard_map(_causal_attention, in_specs=(heads, kv_heads, kv_heads), out_specs=grouped)
        o = checkpoint_name(core(q, k, v), "attn_core")
    with named_scope("out"):
        # XLA names a matmul after a reshape that it absorbs, so this one stands in the scope of its matmul.
        o = o.reshape(*o.shape[:2], -1, out_sharding=specs.activation("batch", "seq", "heads"))
        return checkpoint_name(x + _project(o, layer.out, "heads", "attn_out", specs), "mlp_input")


def _mlp(x: jax.Array, layer: MLP[jax.Array], norm_eps: float, specs: Specs) -> jax.Array:
    """SwiGLU on the residual stream [B, T, D]."""
    with named_scope("norm"):
        normed = checkpoint_name(_rms_norm(x, layer.norm, norm_eps, specs), "mlp_normed")
    with named_scope("up"):
        h = _split_sequence(normed, specs.activation("batch", "seq", None, reduced="mlp"))
        gate = checkpoint_name(jnp.einsum("btd,df->btf", h, _gather(layer.gate, specs, "embed", "mlp")), "mlp_up")
        up = checkpoint_name(jnp.einsum("btd,df->btf", h, _gather(layer.up, specs, "embed", "mlp")), "mlp_up")
    with named_scope("act"):
        act = checkpoint_name(jax.nn.silu(gate) * up, "mlp_act")
    with named_scope("down"):
        return x + _project(act, layer.down, "mlp", "mlp_down", specs)


def _project(x: jax.Array, weight: jax.Array, dim: str, name: str, specs: Specs) -> jax.Array:
    """x [B, T, dim] times weight [dim, D], its partial sums scattered into the residual stream's sharding."""
    partial_sums = specs.activation("batch", "seq", None, unreduced=dim)
    y = jnp.einsum("btf,fd->btd", x, _gather(weight, specs, (dim, "embed"), None), out_sharding=partial_sums)
    return checkpoint_name(_split_sequence(y, specs.activation("batch", "residual_seq", None)), name)


def _rms_norm(x: jax.Array, scale: jax.Array, eps: float, specs: Specs) -> jax.Array:
    """x / rms(x) * scale over D, in float32; x [B, T, D] as the residual stream is split, scale [D].

    In shard_map the gradient of the scale stays unreduced, to be all-reduced once for all layers.
    """

    def local(x: jax.Array, scale: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
        return wide.astype(x.dtype) * scale

    spec = specs.activation("batch", "residual_seq", None)
    return jax.shard_map(local, in_specs=(spec, P(None, reduced=specs.residual_axes)), out_specs=spec)(x, scale)


def _rotation(seq_len: int, d_head: int, theta: float) -> jax.Array:
    """Cosines and sines of the rotary angles, [2, T, 1, H/2] float32 (Su et al. 2021, RoFormer)."""
    frequency = theta ** (-jnp.arange(0, d_head, 2, dtype=jnp.float32) / d_head)
    angle = jnp.arange(seq_len, dtype=jnp.float32)[:, None] * frequency
    return jnp.stack([jnp.cos(angle), jnp.sin(angle)])[:, :, None, :]


def _rope(x: jax.Array, rotation: jax.Array) -> jax.Array:
    """Turn x [B, T, heads, H]; the two halves of H are the coordinates, as in Hugging Face checkpoints."""
    cos, sin = rotation
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


def _causal_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Reference attention on local heads: q [b, T, n, H], k and v [b, T, k, H] -> [b, T, k, n/k, H].

    It computes all T*T scores and masks half of them, so its FLOPs are those of full attention.
    """
    b, t, _, h = q.shape
    q = q.reshape(b, t, k.shape[2], -1, h)
    scores = jnp.einsum("btkgh,bskh->bkgts", q, k, preferred_element_type=jnp.float32) * h**-0.5
    causal = jnp.arange(t)[:, None] >= jnp.arange(t)[None, :]
    weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf), axis=-1).astype(v.dtype)
    return jnp.einsum("bkgts,bskh->btkgh", weights, v)


def _cross_entropy(x: jax.Array, unembed: jax.Array, targets: jax.Array, specs: Specs, chunks: int) -> jax.Array:
    """Mean of -log softmax(x @ unembed)[target]; x [B, T, D], unembed [D, V], V split throughout."""
    # The barrier makes the gradient of the unembedding complete before the layers' backward pass begins: without it,
    # XLA keeps that gradient in full until the end.
    x, unembed = jax.lax.optimization_barrier((x, unembed))
    with named_scope("unembed"):
        x = _split_sequence(x, specs.activation("batch", "seq", None, reduced="vocab"))
        matrix = _named_reshard(unembed, specs.in_use("embed", "vocab"))

    def chunk_loss(x: jax.Array, targets: jax.Array) -> jax.Array:
        """The loss of each sequence, summed over the chunk's positions: [B]."""
        with named_scope("unembed"):
            logits = jnp.einsum("btd,dv->btv", x, matrix, preferred_element_type=jnp.float32)
        with named_scope("loss"):
            top = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
            top = checkpoint_name(top, "loss_max")
            total = checkpoint_name(jnp.sum(jnp.exp(logits - top), axis=-1), "loss_sum")
            # Picked by comparison: an index into the split V would need a gather.
            ids = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 2, out_sharding=jax.typeof(logits).sharding)
            label = jnp.sum(jnp.where(ids == targets[..., None], logits, 0.0), axis=-1)
            return jnp.sum(jnp.log(total) + top[..., 0] - label, axis=-1)

    if chunks == 1:
        losses = chunk_loss(x, targets)
    else:
        # A chunk's logits are computed again in the backward pass, their reductions over V are not.
        policy = jax.checkpoint_policies.save_only_these_names("loss_max", "loss_sum")
        checkpointed = jax.checkpoint(chunk_loss, policy=policy)

        def split(array: jax.Array) -> jax.Array:
            return jnp.moveaxis(array.reshape(array.shape[0], chunks, -1, *array.shape[2:]), 1, 0)

        def body(losses: jax.Array, chunk: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            return losses + checkpointed(*chunk), None

        start = jnp.zeros(targets.shape[:1], jnp.float32, out_sharding=specs.activation("batch"))
        losses, _ = jax.lax.scan(body, start, (split(x), split(targets)))
    with named_scope("loss"):
        return jnp.sum(losses) / targets.size
