"""Cross-entropy over a split vocabulary. Logits are computed once, in chunks, and never stored whole.

Dims: B batch, T sequence, D model, V vocabulary.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import P, named_scope
from jax.sharding import reshard
from jaxtyping import Array, Float, Float32, Int

from rooftop.programs.model.operations import project, project_left
from rooftop.programs.sharding import Specs, first_rows, in_parts, named_reshard, split_sequence, varying_as, whole


def count_loss_tokens(targets: Int[Array, "B T"]) -> Float32[Array, ""]:
    """Number of targets of a packed batch that carry loss (are not negative), at least 1."""
    with named_scope("loss"):
        return jnp.maximum(jnp.sum(targets >= 0, dtype=jnp.int32), 1).astype(jnp.float32)


def logits(
    x: Float[Array, "B T D"],
    matrix: Float[Array, "D V"],
    softcap: float | None,
    *,
    vocab: int | None = None,
    left: bool = False,
    rounded: bool = False,
) -> Float32[Array, "B T V"]:
    """x @ matrix in float32, bent by ``softcap`` c to c tanh(y/c).

    Logits from ``vocab`` on, of columns that pad the matrix, are minus infinity. With ``left`` the matrix is the left
    operand, as in ``project_left``; ``rounded`` is that of ``project``.
    """
    with named_scope("unembed"):
        if left:
            y = project_left(x, matrix, dtype=jnp.float32)
        else:
            y = project(x, matrix, dtype=jnp.float32, rounded=rounded)
        y = y if softcap is None else softcap * jnp.tanh(y / softcap)
        return y if vocab is None or vocab == y.shape[-1] else jnp.where(_ids(y) < vocab, y, -jnp.inf)


def _ids(logits: Float32[Array, "B T V"]) -> Int[Array, "B T V"]:
    """The token of each logit."""
    return jax.lax.broadcasted_iota(jnp.int32, logits.shape, 2, out_sharding=jax.typeof(logits).sharding)


def head(
    x: Float[Array, "B T D"], unembed: Float[Array, "*unembed"], specs: Specs, *, tied: bool
) -> tuple[Float[Array, "B T D"], Float[Array, "D V"]]:
    """Both operands of the last matmul, gathered: x over T, and the matrix over D.

    ``unembed`` is [D, V]; a tied one is the embedding table [V, D], split over D only: an AllToAll splits V instead.
    """
    with named_scope("unembed"):
        x = split_sequence(x, specs.activation("batch", "seq", None, reduced="vocab"))
        if tied:
            unembed = reshard(unembed, specs.at_rest("vocab", "embed")).T
        return x, first_rows(named_reshard(unembed, specs.in_use("embed", "vocab")), x.shape[-1])


def cross_entropy(
    x: Float[Array, "B T D"],
    unembed: Float[Array, "*unembed"],
    targets: Int[Array, "B T"],
    specs: Specs,
    *,
    tied: bool,
    chunks: int,
    softcap: float | None,
    vocab: int,
    z_loss: float = 0.0,
    counted: Float32[Array, ""] | None = None,
    rounded: bool = False,
) -> tuple[Float32[Array, ""], Float32[Array, ""] | None]:
    """Mean of -log softmax(x @ unembed)[target], and optionally of (log Z)**2; unembed is at rest.

    With a coefficient ``z_loss``, the first result also has ``z_loss`` times the mean of (log Z)**2, where Z is the
    softmax's denominator. The second result is that mean, which is not differentiable. Means are over all tokens; with
    ``counted`` they are sums over the tokens whose target is not negative, divided by it. V is ``vocab``; columns of
    the matrix from there on are padding.

    T is processed in ``chunks``. The gradients of a chunk are computed with its logits, so that the backward pass does
    not recompute these. With ``rounded`` the gradients of the float32 logits are rounded to the dtype of x before they
    are multiplied. A TPU's matrix unit rounds them anyway; a GPU multiplies float32 at half the rate, as TF32.
    """
    # The barrier completes the gradient of the unembedding before the layers' backward pass begins. Without it, XLA
    # keeps that gradient unreduced until the end.
    x, unembed = jax.lax.optimization_barrier((x, unembed))
    x, matrix = head(x, unembed, specs, tied=tied)
    return _chunked(x, matrix, targets, counted, chunks, softcap, vocab, z_loss, rounded)


#: The loss, and (log Z)**2 if it is a part of the loss: of each token, or their means.
_Losses = tuple[jax.Array, jax.Array | None]


@partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6, 7, 8))
def _chunked(
    x: Float[Array, "B T D"],
    matrix: Float[Array, "D V"],
    targets: Int[Array, "B T"],
    counted: Float32[Array, ""] | None,
    chunks: int,
    softcap: float | None,
    vocab: int,
    z_loss: float,
    rounded: bool,
) -> _Losses:
    def body(_: None, chunk: tuple[jax.Array, jax.Array]) -> tuple[None, _Losses]:
        return None, _token_losses(chunk[0], matrix, chunk[1], counted is not None, softcap, vocab, z_loss, rounded)

    _, losses = jax.lax.scan(body, None, (in_parts(x, chunks, dim=1), in_parts(targets, chunks, dim=1)))
    with named_scope("loss"):
        return _means(losses, targets, counted)


def _means(losses: _Losses, targets: jax.Array, counted: jax.Array | None) -> _Losses:
    by = targets.size if counted is None else counted
    means: _Losses = jax.tree.map(lambda values: jnp.sum(values) / by, losses)
    return means


def _forward(
    x: jax.Array,
    matrix: jax.Array,
    targets: jax.Array,
    counted: jax.Array | None,
    chunks: int,
    softcap: float | None,
    vocab: int,
    z_loss: float,
    rounded: bool,
) -> tuple[_Losses, tuple[jax.Array, jax.Array]]:
    def body(d_matrix: jax.Array, chunk: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, tuple[_Losses, jax.Array]]:
        rows, labels = chunk

        def of(rows: jax.Array, matrix: jax.Array) -> _Losses:
            return _token_losses(rows, matrix, labels, counted is not None, softcap, vocab, z_loss, rounded)

        losses, pull, squares = jax.vjp(of, rows, matrix, has_aux=True)
        with named_scope("loss"):
            by = 1 / targets.size if counted is None else 1 / counted
            share = varying_as(jnp.full(losses.shape, by, out_sharding=jax.typeof(losses).sharding), losses)
        dx, more = pull(share)
        with named_scope("unembed"):
            return d_matrix + more, ((losses, squares), dx)

    spec = jax.typeof(matrix).sharding.spec
    with named_scope("unembed"):
        zeros = jnp.zeros(matrix.shape, matrix.dtype, out_sharding=P(*spec.partitions))
        zeros = varying_as(reshard(zeros, P(*spec.partitions, unreduced=spec.reduced)), matrix)
    d_matrix, (losses, dx) = jax.lax.scan(body, zeros, (in_parts(x, chunks, dim=1), in_parts(targets, chunks, dim=1)))
    with named_scope("loss"):
        return _means(losses, targets, counted), (whole(dx, dim=1), d_matrix)


def _backward(
    chunks: int,
    softcap: float | None,
    vocab: int,
    z_loss: float,
    rounded: bool,
    gradients: tuple[jax.Array, jax.Array],
    cotangents: _Losses,
) -> tuple[jax.Array, jax.Array, None, None]:
    def scaled(gradient: jax.Array) -> jax.Array:
        axes = jax.typeof(gradient).sharding.spec.unreduced
        return reshard(cotangents[0].astype(gradient.dtype), P(reduced=axes)) * gradient

    with named_scope("loss"):
        dx, d_matrix = map(scaled, gradients)
        return dx, d_matrix, None, None


_chunked.defvjp(_forward, _backward)


def _token_losses(
    x: Float[Array, "B T D"],
    matrix: Float[Array, "D V"],
    targets: Int[Array, "B T"],
    masked: bool,
    softcap: float | None,
    vocab: int,
    z_loss: float,
    rounded: bool,
) -> _Losses:
    """-log softmax(x @ matrix)[target] + z_loss (log Z)**2, and (log Z)**2 if there is a z_loss: [B, T] float32 each.

    ``masked``: zeros where the target is negative.
    """
    y = logits(x, matrix, softcap, vocab=vocab, rounded=rounded)
    with named_scope("loss"):
        top = jax.lax.stop_gradient(jnp.max(y, axis=-1, keepdims=True))
        total = jnp.sum(jnp.exp(y - top), axis=-1)
        # Selected by comparison: an index into the split V would need a gather.
        label = jnp.sum(jnp.where(_ids(y) == targets[..., None], y, 0.0), axis=-1)
        log_z = jnp.log(total) + top[..., 0]
        losses, squares = log_z - label, jnp.square(log_z) if z_loss else None
        if squares is not None:
            losses = losses + z_loss * squares
        if masked:
            losses, squares = jax.tree.map(lambda values: jnp.where(targets >= 0, values, 0.0), (losses, squares))
        return losses, squares
