"""Queries, keys and values of multi-head latent attention, expanded as in training (DeepSeek-V2 paper, section 2.1).

Latents are computed on the residual stream, which is split over the sequence. They, and not the wider stream, are
gathered over tensor; then each device expands them for its own heads. Where the stream is split over D too, it is
gathered over tensor first, and the latents' sums are scattered over its axes by tokens.

Dims: B batch, T sequence, D model, N heads, d_qk = d_nope + d_rope.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import P, named_scope
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import reshard
from jaxtyping import Array, Float, Float32

from rooftop.models.config import MLA, ModelConfig
from rooftop.programs.model.narrow import gather_in
from rooftop.programs.model.operations import into_heads, project, project_heads, scale_norm
from rooftop.programs.model.positions import rotate
from rooftop.programs.parameters import LatentAttention
from rooftop.programs.sharding import Specs, on_shards, split_sequence


def latent_qkv(
    x: Float[Array, "B T D"],
    layer: LatentAttention[jax.Array],
    turns: Float32[Array, "*turns"] | None,
    model: ModelConfig,
    mla: MLA,
    specs: Specs,
    matmul: str | None = None,
) -> tuple[Float[Array, "B T N d_qk"], Float[Array, "B T N d_qk"], Float[Array, "B T N d_v"]]:
    """Queries and keys, rotated if the layer has rotary positions, and values of the normalised x.

    x is split as the residual stream, the results by heads. ``turns``: see ``rooftop.programs.model.positions``.
    ``matmul``: see ``narrow.gather_in``.
    """
    gathered = specs.activation("batch", "seq", None, reduced="heads")
    heads = specs.activation("batch", "seq", "heads", None)
    q, latent, shared = latents(x, layer, turns, model, mla, specs, matmul)
    with named_scope("qkv"):
        kv_up = gather_in(matmul, layer.kv_up, specs, "embed", "heads", None, rows=mla.kv_rank)
        kv = checkpoint_name(project_heads(latent, kv_up), "qkv")
    with named_scope("rope"):

        def expand(kv: jax.Array, shared: jax.Array) -> tuple[jax.Array, jax.Array]:
            k, v = jnp.split(kv, [mla.d_nope], axis=-1)
            shared = jnp.broadcast_to(shared[:, :, None], (*k.shape[:3], mla.d_rope))
            return jnp.concatenate([k, shared], axis=-1), v

        # In shard_map the gradient of the shared key stays a partial sum over heads, scattered with the latent's.
        k, v = on_shards(expand, in_specs=(heads, gathered), out_specs=(heads, heads))(kv, shared)
        return checkpoint_name(q, "rope"), checkpoint_name(k, "rope"), v


def latents(
    x: Float[Array, "B T D"],
    layer: LatentAttention[jax.Array],
    turns: Float32[Array, "*turns"] | None,
    model: ModelConfig,
    mla: MLA,
    specs: Specs,
    matmul: str | None = None,
) -> tuple[Float[Array, "B T N d_qk"], Float[Array, "B T kv_rank"], Float[Array, "B T d_rope"]]:
    """Queries, and the entries of the cache for each token, which all heads share.

    These are the normalised latent of keys and values, and one key. Queries and this key are rotated by ``turns`` if
    the layer has rotary positions.
    """
    gathered = specs.activation("batch", "seq", None, reduced="heads")
    # Where the tokens of a latent are.
    place = specs.activation("batch", "seq", None) if specs.width else specs.residual

    def down(x: jax.Array, weight: jax.Array) -> jax.Array:
        matrix = gather_in(matmul, weight, specs, "embed", None, rows=x.shape[-1], sequence="residual_seq")
        if specs.width:
            return split_sequence(project(x, matrix, specs.inputs(unreduced="embed")), place)
        return checkpoint_name(project(x, matrix), "qkv")

    with named_scope("qkv"):
        if specs.width:
            x = split_sequence(x, specs.inputs())
        queries = x
        if layer.q_down is not None and layer.q_norm is not None:
            queries = scale_norm(down(x, layer.q_down), layer.q_norm, model, place)
        if specs.width and layer.q_down is None:
            q = into_heads(x, layer.q, specs)
        else:
            queries = split_sequence(queries, gathered)
            q_up = gather_in(matmul, layer.q, specs, "embed", "heads", None, rows=queries.shape[-1])
            q = checkpoint_name(project_heads(queries, q_up), "qkv")
        latent, shared = jnp.split(down(x, layer.kv_down), [mla.kv_rank], axis=-1)
        latent = scale_norm(latent, layer.kv_norm, model, place)
    if turns is not None:
        with named_scope("rope"):
            # The key that all heads share is rotated on the device of its token, by turns of its own: XLA:TPU would
            # split those of the queries in the same way, and gather them in each layer.
            own = turns if turns.ndim > 4 else reshard(turns, P(None, place.partitions[1], None, None))
            shared = rotate(shared[:, :, None], own, interleaved=model.rope_interleaved)[:, :, 0]
    with named_scope("qkv"):
        both = split_sequence(jnp.concatenate([latent, shared], axis=-1), gathered)
        latent, shared = jnp.split(both, [mla.kv_rank], axis=-1)
    if turns is not None:
        with named_scope("rope"):
            plain, turned = jnp.split(q, [mla.d_nope], axis=-1)
            q = jnp.concatenate([plain, rotate(turned, turns, interleaved=model.rope_interleaved)], axis=-1)
    return q, latent, shared
