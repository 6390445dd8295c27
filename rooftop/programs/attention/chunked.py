"""Attention to one block of keys at a time, on any backend: the ``chunked`` kernel of ``attend``.

It keeps a running softmax (Milakov and Gimelshein 2018), and its backward pass recomputes the scores of each block (Dao
2023): at most T*block scores exist at once. Queries are processed in a few runs, each against only the blocks of keys
that count for it (``rooftop.programs.attention.scores.runs``).

Dims as in ``attend``; R the queries of a run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Float32, Int, Shaped

from rooftop.models.program_sizes import block_size
from rooftop.programs.attention.scores import (
    Absent,
    KeyRun,
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
    runs,
    sink_gradients,
)
from rooftop.programs.sharding import varying_alike

#: A block of keys and values, the index of its first key, and the segments of its keys.
_Block = tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]
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
    results = [
        _run(within, q[:, run.queries], k[:, run.keys], v[:, run.keys], missing, ids)
        for run, within, missing, ids in _runs(scores, q, k, absent, segments)
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
    queries, dk, dv = list[jax.Array](), None, None
    for run, within, missing, ids in _runs(scores, q, k, absent, segments):
        rows, keys = run.queries, run.keys
        of_rows = q[:, rows], k[:, keys], v[:, keys], lse[:, :, rows], mean[:, :, rows], do[:, rows]
        dq, more_k, more_v = _run_gradients(within, *of_rows, missing, ids)
        queries.append(dq)
        around = ((0, 0), (keys.start, k.shape[1] - keys.stop), (0, 0), (0, 0))
        more_k, more_v = (part if part.shape[1] == k.shape[1] else jnp.pad(part, around) for part in (more_k, more_v))
        dk, dv = (more_k, more_v) if dk is None or dv is None else (dk + more_k, dv + more_v)
    assert dk is not None and dv is not None
    return _joined(queries, 1).astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)


def _runs(
    scores: Scores, q: jax.Array, k: jax.Array, absent: jax.Array | None, segments: Segments | None
) -> Iterator[tuple[KeyRun, Scores, jax.Array | None, Segments | None]]:
    """Yield each run of queries with its scores, the number of its keys that do not exist, and its segments."""
    q_len, kv_len = q.shape[1], k.shape[1]
    for run in runs(q_len=q_len, kv_len=kv_len, window=scores.window, offset=scores.offset, block=scores.block):
        within = replace(scores, offset=scores.offset + run.queries.start - run.keys.start)
        missing = None if absent is None else absent - run.keys.start
        yield run, within, missing, segments and (segments[0][:, run.queries], segments[1][:, run.keys])


def _run(
    scores: Scores, q: Float[Array, "b R n H"], k: Keys, v: Values, absent: Absent, segments: Segments | None
) -> tuple[Float32[Array, "b R n d_v"], Float32[Array, "b n R"]]:
    """``chunked_block`` of one run of queries and its keys."""
    size, grouped, index = block_size(k.shape[1], scores.block), _grouped(q, k), jnp.arange(q.shape[1])

    def step(
        carry: tuple[jax.Array, jax.Array, jax.Array], block: _Block
    ) -> tuple[tuple[jax.Array, jax.Array, jax.Array], None]:
        (top, total, summed), (keys, values, start, of_keys) = carry, block
        ids = None if segments is None or of_keys is None else (segments[0], of_keys)
        logits, mask = scores.pairs(grouped, keys, index, start + jnp.arange(size), absent, ids)
        logits = jnp.where(mask, logits, -jnp.inf)
        raised = jnp.maximum(top, logits.max(-1))
        # A query without a key so far needs weights of 0, not exp(-inf + inf).
        against = jnp.where(jnp.isneginf(raised), 0.0, raised)
        weights, shrink = jnp.exp(logits - against[..., None]), jnp.exp(top - against)
        product = jnp.einsum("bkgts,bskh->bkgth", weights.astype(v.dtype), values, preferred_element_type=jnp.float32)
        return (raised, shrink * total + weights.sum(-1), shrink[..., None] * summed + product), None

    rows = (q.shape[0], k.shape[2], grouped.shape[3], q.shape[1])
    zeros = varying_alike(q, jnp.zeros(rows, jnp.float32))[1]
    wide = varying_alike(q, jnp.zeros((*rows, v.shape[3]), jnp.float32))[1]
    starts = jnp.arange(0, k.shape[1], size)
    blocks = _blocks(k, size), _blocks(v, size), starts, _blocks_of(segments, size)
    (top, total, summed), _ = lax.scan(step, (zeros - jnp.inf, zeros, wide), blocks)
    o = jnp.moveaxis(summed / jnp.where(total == 0, 1.0, total)[..., None], 3, 1)
    return o.reshape(*q.shape[:3], -1), (top + jnp.log(total)).reshape(q.shape[0], q.shape[2], q.shape[1])


def _run_gradients(
    scores: Scores,
    q: Float[Array, "b R n H"],
    k: Keys,
    v: Values,
    lse: Float32[Array, "b n R"],
    mean: Float32[Array, "b n R"],
    do: Float[Array, "b R n d_v"],
    absent: Absent,
    segments: Segments | None,
) -> tuple[Float32[Array, "b R n H"], Float32[Array, "b S k H"], Float32[Array, "b S k d_v"]]:
    """``chunked_gradients`` of one run."""
    size, grouped, index = block_size(k.shape[1], scores.block), _grouped(q, k), jnp.arange(q.shape[1])
    d_out = do.reshape(*grouped.shape[:4], -1)
    lse, mean = (row.reshape(q.shape[0], k.shape[2], -1, q.shape[1], 1) for row in (lse, mean))

    def step(dq: jax.Array, block: _Block) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        keys, values, start, of_keys = block
        ids = None if segments is None or of_keys is None else (segments[0], of_keys)
        logits, mask = scores.pairs(grouped, keys, index, start + jnp.arange(size), absent, ids)
        weights = jnp.where(mask, jnp.exp(logits - lse), 0.0)
        dv = jnp.einsum("bkgts,btkgh->bskh", weights.astype(do.dtype), d_out, preferred_element_type=jnp.float32)
        d_weights = jnp.einsum("btkgh,bskh->bkgts", d_out, values, preferred_element_type=jnp.float32)
        d_logits = scores.product_gradients(weights * (d_weights - mean), logits).astype(k.dtype)
        dk = jnp.einsum("bkgts,btkgh->bskh", d_logits, grouped, preferred_element_type=jnp.float32)
        dq += jnp.einsum("bkgts,bskh->btkgh", d_logits, keys, preferred_element_type=jnp.float32)
        return dq, (dk, dv)

    zeros = varying_alike(q, jnp.zeros(grouped.shape, jnp.float32))[1]
    starts = jnp.arange(0, k.shape[1], size)
    blocks = _blocks(k, size), _blocks(v, size), starts, _blocks_of(segments, size)
    dq, (dk, dv) = lax.scan(step, zeros, blocks)
    dk, dv = (jnp.moveaxis(blocks, 0, 1).reshape(whole.shape) for blocks, whole in ((dk, k), (dv, v)))
    return dq.reshape(q.shape), dk, dv


def _grouped(q: Queries, k: Keys) -> Float[Array, "b T k g H"]:
    """Queries grouped by their key/value head."""
    return q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[3])


def _blocks(x: Shaped[Array, "b S *rest"], size: int) -> Shaped[Array, "blocks b block *rest"]:
    """The blocks of a sequence, for a scan."""
    return jnp.moveaxis(x.reshape(x.shape[0], -1, size, *x.shape[2:]), 1, 0)


def _blocks_of(segments: Segments | None, size: int) -> Int[Array, "blocks b block"] | None:
    """The segments of the keys, in the blocks of ``_blocks``."""
    return None if segments is None else _blocks(segments[1], size)


def _joined(parts: list[jax.Array] | tuple[jax.Array, ...], dim: int) -> jax.Array:
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=dim)
