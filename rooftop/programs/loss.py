"""Cross-entropy over a vocabulary that stays split, its logits computed once and, in chunks, never whole.

Dims: B batch, T sequence, D model, V vocabulary.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import P, named_scope
from jax.sharding import reshard

from rooftop.programs.sharding import Specs, in_parts, named_reshard, split_sequence, whole


def logits(x: jax.Array, matrix: jax.Array, softcap: float | None) -> jax.Array:
    """x [B, T, D] @ matrix [D, V] in float32, [B, T, V], bent by ``softcap`` c to c tanh(y/c)."""
    with named_scope("unembed"):
        y = jnp.einsum("btd,dv->btv", x, matrix, preferred_element_type=jnp.float32)
        return y if softcap is None else softcap * jnp.tanh(y / softcap)


def head(x: jax.Array, unembed: jax.Array, specs: Specs, *, tied: bool) -> tuple[jax.Array, jax.Array]:
    """Both operands of the last matmul, gathered: x [B, T, D] over T, and the matrix [D, V] over D.

    A tied ``unembed`` is the embedding table [V, D] split over D only: an AllToAll splits V in its place.
    """
    with named_scope("unembed"):
        x = split_sequence(x, specs.activation("batch", "seq", None, reduced="vocab"))
        if tied:
            unembed = reshard(unembed, specs.at_rest("vocab", "embed")).T
        return x, named_reshard(unembed, specs.in_use("embed", "vocab"))


def cross_entropy(
    x: jax.Array,
    unembed: jax.Array,
    targets: jax.Array,
    specs: Specs,
    *,
    tied: bool,
    chunks: int,
    softcap: float | None,
) -> jax.Array:
    """Mean of -log softmax(x @ unembed)[target] over all tokens; x [B, T, D], unembed at rest, targets [B, T].

    Float32 scalar. T is done in ``chunks``; each chunk's gradients are computed while its logits are there, in place of
    computing them again in the backward pass.
    """
    # The barrier makes the gradient of the unembedding complete before the layers' backward pass begins: without it,
    # XLA keeps that gradient in full until the end.
    x, unembed = jax.lax.optimization_barrier((x, unembed))
    x, matrix = head(x, unembed, specs, tied=tied)
    return _chunked(x, matrix, targets, chunks, softcap)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _chunked(x: jax.Array, matrix: jax.Array, targets: jax.Array, chunks: int, softcap: float | None) -> jax.Array:
    def body(_: None, chunk: tuple[jax.Array, jax.Array]) -> tuple[None, jax.Array]:
        return None, _token_losses(chunk[0], matrix, chunk[1], softcap)

    _, losses = jax.lax.scan(body, None, (in_parts(x, chunks, dim=1), in_parts(targets, chunks, dim=1)))
    with named_scope("loss"):
        return jnp.sum(losses) / targets.size


def _forward(
    x: jax.Array, matrix: jax.Array, targets: jax.Array, chunks: int, softcap: float | None
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    def body(d_matrix: jax.Array, chunk: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        rows, labels = chunk
        losses, pull = jax.vjp(partial(_token_losses, targets=labels, softcap=softcap), rows, matrix)
        with named_scope("loss"):
            share = jnp.full(losses.shape, 1 / targets.size, out_sharding=jax.typeof(losses).sharding)
        dx, more = pull(share)
        with named_scope("unembed"):
            return d_matrix + more, (losses, dx)

    spec = jax.typeof(matrix).sharding.spec
    with named_scope("unembed"):
        zeros = jnp.zeros(matrix.shape, matrix.dtype, out_sharding=P(*spec.partitions))
        zeros = reshard(zeros, P(*spec.partitions, unreduced=spec.reduced))
    d_matrix, (losses, dx) = jax.lax.scan(body, zeros, (in_parts(x, chunks, dim=1), in_parts(targets, chunks, dim=1)))
    with named_scope("loss"):
        return jnp.sum(losses) / targets.size, (whole(dx, dim=1), d_matrix)


def _backward(
    chunks: int, softcap: float | None, gradients: tuple[jax.Array, jax.Array], cotangent: jax.Array
) -> tuple[jax.Array, jax.Array, None]:
    def scaled(gradient: jax.Array) -> jax.Array:
        axes = jax.typeof(gradient).sharding.spec.unreduced
        return reshard(cotangent.astype(gradient.dtype), P(reduced=axes)) * gradient

    with named_scope("loss"):
        dx, d_matrix = map(scaled, gradients)
        return dx, d_matrix, None


_chunked.defvjp(_forward, _backward)


def _token_losses(x: jax.Array, matrix: jax.Array, targets: jax.Array, softcap: float | None) -> jax.Array:
    """-log softmax(x @ matrix)[target], [B, T] float32."""
    y = logits(x, matrix, softcap)
    with named_scope("loss"):
        top = jax.lax.stop_gradient(jnp.max(y, axis=-1, keepdims=True))
        total = jnp.sum(jnp.exp(y - top), axis=-1)
        # Picked by comparison: an index into the split V would need a gather.
        ids = jax.lax.broadcasted_iota(jnp.int32, y.shape, 2, out_sharding=jax.typeof(y).sharding)
        label = jnp.sum(jnp.where(ids == targets[..., None], y, 0.0), axis=-1)
        return jnp.log(total) + top[..., 0] - label
