"""Attention to one block of keys at a time, on any backend: the ``chunked`` kernel of ``attend``.

It keeps a running softmax (Milakov and Gimelshein 2018), and its backward pass recomputes the scores of each block (Dao
2023): at most T*block scores exist at once. Queries are processed in a few runs, each against only the blocks of keys
that count for it (``rooftop.models.program_sizes.runs``).

Dims as in ``attend``; R the queries of a run.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Float32, Int, Shaped

from rooftop.models.program_sizes import KeyRun, block_size, runs
from rooftop.programs.attention.scores import (
    Absent,
    Keys,
    LogSums,
    Outputs,
    Queries,
    Scores,
    Segments,
    Sinks,
    Values,
    WideOutputs,
    add_sinks,
    sink_gradients,
)
from rooftop.programs.sharding import varying_alike

#: Blocks of keys and values, and the segments of their keys.
_KeyBlocks = tuple[jax.Array, jax.Array, jax.Array | None]
#: The arguments of ``_attention`` after ``scores``.
_Operands = tuple[jax.Array, jax.Array, jax.Array, jax.Array | None, jax.Array | None, Segments | None]


def chunked_attend(
    scores: Scores, q: Queries, k: Keys, v: Values, sinks: Sinks | None, absent: Absent, segments: Segments | None
) -> Outputs:
    """Attention in the dtype of q; see ``rooftop.programs.attention.attend.attend``."""
    arrays, tree = jax.tree.flatten((q, k, v, sinks, absent, segments))
    return _attention(scores, *jax.tree.unflatten(tree, varying_alike(*arrays)))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(
    scores: Scores, q: Queries, k: Keys, v: Values, sinks: Sinks | None, absent: Absent, segments: Segments | None
) -> Outputs:
    return _forward(scores, q, k, v, sinks, absent, segments)[0]


def _forward(
    scores: Scores, q: Queries, k: Keys, v: Values, sinks: Sinks | None, absent: Absent, segments: Segments | None
) -> tuple[Outputs, tuple[_Operands, Outputs, LogSums]]:
    o, lse = chunked_block(scores, q, k, v, absent, segments)
    if sinks is not None:
        o, lse = add_sinks(o, lse, sinks)
    o, lse = (checkpoint_name(x, "attn_core") for x in (o.astype(q.dtype), lse))
    return o, ((q, k, v, sinks, absent, segments), o, lse)


def _backward(
    scores: Scores, saved: tuple[_Operands, jax.Array, jax.Array], do: Outputs
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None, None, None]:
    (q, k, v, sinks, absent, segments), o, lse = saved
    dsinks = None if sinks is None else sink_gradients(sinks, o, lse, do)
    return *chunked_gradients(scores, q, k, v, o, lse, do, absent, segments), dsinks, None, None


_attention.defvjp(_forward, _backward)


def chunked_block(
    scores: Scores, q: Queries, k: Keys, v: Values, absent: Absent = None, segments: Segments | None = None
) -> tuple[WideOutputs, LogSums]:
    """Outputs and log-sum-exps of attention to these keys; not differentiable."""
    size = block_size(k.shape[1], scores.block)
    keys = _blocks(k, size), _blocks(v, size), _blocks_of(segments, size)
    results = [
        _run(scores, q[:, run.queries], keys, _block_indices(run, size), run.queries.start, absent, ids)
        for run, ids in _runs(scores, q, k, segments)
    ]
    outputs, sums = zip(*results, strict=True)
    return _joined(outputs, 1), _joined(sums, 2)


def chunked_gradients(
    scores: Scores,
    q: Queries,
    k: Keys,
    v: Values,
    o: Outputs,
    lse: LogSums,
    do: Outputs,
    absent: Absent = None,
    segments: Segments | None = None,
) -> tuple[Queries, Keys, Values]:
    """Derivatives of q, k and v through these keys; see ``rooftop.programs.attention.attend.block_gradients``."""
    # The derivative of softmax subtracts a mean from each row: o . do.
    mean = jnp.einsum("btnh,btnh->bnt", o.astype(jnp.float32), do.astype(jnp.float32))
    size = block_size(k.shape[1], scores.block)
    keys = _blocks(k, size), _blocks(v, size), _blocks_of(segments, size)
    # Runs add to the same sums, one after another: sums of their own would all be there at once.
    sums = _zeros(q, keys[0].shape), _zeros(q, keys[1].shape)
    queries = list[jax.Array]()
    for run, ids in _runs(scores, q, k, segments):
        rows, at = run.queries, _block_indices(run, size)
        of_rows = q[:, rows], keys, lse[:, :, rows], mean[:, :, rows], do[:, rows]
        dq, sums = _run_gradients(scores, *of_rows, sums, at, rows.start, absent, ids)
        queries.append(dq)
    dk, dv = (
        jnp.moveaxis(blocks, 0, 1).reshape(x.shape).astype(x.dtype) for blocks, x in zip(sums, (k, v), strict=True)
    )
    return _joined(queries, 1).astype(q.dtype), dk, dv


def _runs(
    scores: Scores, q: jax.Array, k: jax.Array, segments: Segments | None
) -> Iterator[tuple[KeyRun, jax.Array | None]]:
    """Yield each run of queries with their segments."""
    q_len, kv_len = q.shape[1], k.shape[1]
    for run in runs(q_len=q_len, kv_len=kv_len, window=scores.window, offset=scores.offset, block=scores.block):
        yield run, None if segments is None else segments[0][:, run.queries]


def _block_indices(run: KeyRun, size: int) -> Int[Array, " blocks"]:
    """Indices of the blocks of a run's keys."""
    return jnp.arange(run.keys.start // size, run.keys.stop // size)


def _run(
    scores: Scores,
    q: Float[Array, "b R n H"],
    blocks: _KeyBlocks,
    indices: Int[Array, " blocks"],
    start: int,
    absent: Absent,
    segments: Int[Array, "b R"] | None,
) -> tuple[Float32[Array, "b R n d_v"], Float32[Array, "b n R"]]:
    """``chunked_block`` of a run of queries, the first at ``start``, and the blocks of keys at ``indices``."""
    grouped, index = _grouped(q, blocks[0].shape[3]), start + jnp.arange(q.shape[1])

    def step(
        carry: tuple[jax.Array, jax.Array, jax.Array], at: jax.Array
    ) -> tuple[tuple[jax.Array, jax.Array, jax.Array], None]:
        top, total, summed = carry
        # JAX would take masks, and an array of -inf, that no operand is part of out of the loop, and store them.
        top, at, masked = lax.optimization_barrier((top, at, jnp.float32(-jnp.inf)))
        keys, values, positions, ids = _block(blocks, at, segments)
        logits, mask = scores.pairs(grouped, keys, index, positions, absent, ids)
        logits = jnp.where(mask, logits, masked)
        raised = jnp.maximum(top, logits.max(-1))
        # A query without a key so far needs weights of 0, not exp(-inf + inf).
        against = jnp.where(jnp.isneginf(raised), 0.0, raised)
        weights, shrink = jnp.exp(logits - against[..., None]), jnp.exp(top - against)
        product = jnp.einsum(
            "bkgts,bskh->bkgth", weights.astype(values.dtype), values, preferred_element_type=jnp.float32
        )
        return (raised, shrink * total + weights.sum(-1), shrink[..., None] * summed + product), None

    rows = (q.shape[0], *grouped.shape[2:4], q.shape[1])
    zeros, wide = _zeros(q, rows), _zeros(q, (*rows, blocks[1].shape[4]))
    (top, total, summed), _ = lax.scan(step, (zeros - jnp.inf, zeros, wide), indices)
    o = jnp.moveaxis(summed / jnp.where(total == 0, 1.0, total)[..., None], 3, 1)
    return o.reshape(*q.shape[:3], -1), (top + jnp.log(total)).reshape(q.shape[0], q.shape[2], q.shape[1])


def _run_gradients(
    scores: Scores,
    q: Float[Array, "b R n H"],
    blocks: _KeyBlocks,
    lse: Float32[Array, "b n R"],
    mean: Float32[Array, "b n R"],
    do: Float[Array, "b R n d_v"],
    sums: tuple[jax.Array, jax.Array],
    indices: Int[Array, " blocks"],
    start: int,
    absent: Absent,
    segments: Int[Array, "b R"] | None,
) -> tuple[Float32[Array, "b R n H"], tuple[jax.Array, jax.Array]]:
    """Derivatives of a run's queries, and ``sums`` of those of blocks of keys and values with the run's added."""
    grouped, index = _grouped(q, blocks[0].shape[3]), start + jnp.arange(q.shape[1])
    d_out = do.reshape(*grouped.shape[:4], -1)
    lse, mean = (row.reshape(q.shape[0], grouped.shape[2], -1, q.shape[1], 1) for row in (lse, mean))

    def step(
        carry: tuple[jax.Array, jax.Array, jax.Array], at: jax.Array
    ) -> tuple[tuple[jax.Array, jax.Array, jax.Array], None]:
        dq, sum_k, sum_v = carry
        keys, values, positions, ids = _block(blocks, at, segments)
        logits, mask = scores.pairs(grouped, keys, index, positions, absent, ids)
        weights = jnp.where(mask, jnp.exp(logits - lse), 0.0)
        dv = jnp.einsum("bkgts,btkgh->bskh", weights.astype(do.dtype), d_out, preferred_element_type=jnp.float32)
        d_weights = jnp.einsum("btkgh,bskh->bkgts", d_out, values, preferred_element_type=jnp.float32)
        d_logits = scores.product_gradients(weights * (d_weights - mean), logits).astype(keys.dtype)
        dk = jnp.einsum("bkgts,btkgh->bskh", d_logits, grouped, preferred_element_type=jnp.float32)
        dq += jnp.einsum("bkgts,bskh->btkgh", d_logits, keys, preferred_element_type=jnp.float32)
        return (dq, _added(sum_k, dk, at), _added(sum_v, dv, at)), None

    (dq, *sums_after), _ = lax.scan(step, (_zeros(q, grouped.shape), *sums), indices)
    return dq.reshape(q.shape), (sums_after[0], sums_after[1])


def _block(
    blocks: _KeyBlocks, at: Int[Array, ""], segments: Int[Array, "b R"] | None
) -> tuple[jax.Array, jax.Array, jax.Array, Segments | None]:
    """The keys and values of the block at an index, the positions of its keys, and the segments of both sides."""
    keys, values, of_keys = (x if x is None else lax.dynamic_index_in_dim(x, at, keepdims=False) for x in blocks)
    assert keys is not None and values is not None
    ids = None if segments is None or of_keys is None else (segments, of_keys)
    return keys, values, at * keys.shape[1] + jnp.arange(keys.shape[1]), ids


def _added(sums: jax.Array, more: jax.Array, at: Int[Array, ""]) -> jax.Array:
    """Blocks with ``more`` added to the one at an index."""
    before = lax.dynamic_index_in_dim(sums, at, keepdims=False)
    return lax.dynamic_update_index_in_dim(sums, before + more, at, 0)


def _zeros(like: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Zeros in float32 that vary over mesh axes as ``like`` does."""
    return varying_alike(like, jnp.zeros(shape, jnp.float32))[1]


def _grouped(q: Queries, kv_heads: int) -> Float[Array, "b T k g H"]:
    """Queries grouped by their key/value head."""
    return q.reshape(*q.shape[:2], kv_heads, -1, q.shape[3])


def _blocks(x: Shaped[Array, "b S *rest"], size: int) -> Shaped[Array, "blocks b block *rest"]:
    """The blocks of a sequence, for a scan."""
    return jnp.moveaxis(x.reshape(x.shape[0], -1, size, *x.shape[2:]), 1, 0)


def _blocks_of(segments: Segments | None, size: int) -> Int[Array, "blocks b block"] | None:
    """The segments of the keys, in the blocks of ``_blocks``."""
    return None if segments is None else _blocks(segments[1], size)


def _joined(parts: list[jax.Array] | tuple[jax.Array, ...], dim: int) -> jax.Array:
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=dim)
