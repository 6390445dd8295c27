"""Causal attention on one device's share of the heads, behind one interface: ``attend``.

Dims: b local batch, T queries, S keys (T = S but for a ring's blocks), n local query heads, k local key/value heads,
g = n/k, H size of a query or key head, d_v of a value head. Query head i uses key/value head i // g. The kernels:

- ``reference``: plain, and differentiated by JAX. It stores all T*S scores, and computes those that are masked too;
- ``chunked``: keys a block at a time with a running softmax (Milakov and Gimelshein 2018), and a backward pass that
  computes each block's scores again (Dao 2023). No more than T*block scores exist at once; it skips no block. On any
  backend;
- ``splash``: JAX's Pallas kernels for TPU. Blocks that are masked as a whole are skipped;
- ``cudnn``: cuDNN's flash attention through JAX, on GPUs.

All do windows and the segments of packed sequences; all but ``cudnn`` soft caps, sinks, and value heads of another
size than keys. No kernel skips a block because of its segments, and to ``cudnn`` they are a mask of T*S elements.
``cudnn`` has not run yet: there was no GPU to try it on.

What a kernel returns and keeps for its backward pass, its output and the log-sum-exp of its scores, is named
``attn_core`` in here, for the remat policies of ``rooftop.models.activations``: to name the output again outside would
keep it twice.

XLA counts no FLOPs in a hand-written kernel, so these are declared in its ``op_name``. Every kernel is called under a
named scope such as ``kernel_flops[fwd=137438953472,dq=206158430208,dkv=274877906944]``: FLOPs of one execution on one
device, by a word of the kernel's name (``splash_mha_dq_no_residuals``; for cuDNN ``bwd`` belongs to the target that
ends in 'Backward', ``fwd`` to the other). The scope comes after ``layers/attn/core``, where a reader of scopes stops.
``kernel_scope`` writes it; ``rooftop.xla`` reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from rooftop.errors import RooftopError, unknown
from rooftop.programs.attention_scores import (
    BLOCK,
    KERNELS,
    Scores,
    Segments,
    block_size,
    declared,
    kernel_flops,
    kernel_scope,
    varying_alike,
)
from rooftop.programs.splash_attention import splash_attend, splash_block, splash_gradients

__all__ = [
    "BLOCK", "KERNELS", "Scores", "Segments", "add_sinks", "attend", "attend_behind", "attend_block", "block_gradients",
    "kernel_flops", "kernel_scope", "merge", "sink_gradients",
]  # fmt: skip


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    scale: float,
    kernel: str,
    window: int | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    block: int = BLOCK,
    segments: jax.Array | None = None,
) -> jax.Array:
    """Causal attention of q [b, T, n, H] to k [b, T, k, H] and v [b, T, k, d_v]: [b, T, n, d_v] in the dtype of q.

    A token attends to its ``window`` last positions, its own included (None: to all before it), and to none of another
    segment than its own (``segments`` [b, T] int32, not negative). ``sinks`` [n] are logits that join the softmax's
    denominator with no value. ``kernel`` is one of ``KERNELS``; it may be called inside ``jax.shard_map``, with
    ``check_vma=False`` for 'splash', whose outputs have no such type.

    Raises RooftopError for an unknown kernel, and for what a kernel does not do.
    """
    if kernel not in KERNELS:
        raise unknown("attention kernel", kernel, KERNELS)
    if q.shape[2] % k.shape[2]:
        raise RooftopError("query heads on a device", q.shape[2], f"a multiple of the {k.shape[2]} key/value heads")
    scores = Scores(scale=float(scale), window=window, softcap=softcap, block=block)
    return _ATTEND[kernel](scores, q, k, v, sinks, None, None if segments is None else (segments, segments))


def attend_behind(
    kernel: str,
    scores: Scores,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    sinks: jax.Array | None,
    absent: jax.Array,
    segments: Segments | None = None,
) -> jax.Array:
    """``attend`` to keys that begin ``scores.offset`` positions before the queries; the first ``absent`` do not exist.

    ``absent`` is an int32 scalar, so that devices of one program may differ in it. By every kernel but cuDNN's.
    """
    return _ATTEND[kernel](scores, q, k, v, sinks, absent, segments)


def attend_block(
    kernel: str, scores: Scores, q: jax.Array, k: jax.Array, v: jax.Array, segments: Segments | None, sent: Any
) -> tuple[tuple[jax.Array, jax.Array], Any]:
    """Attention to some of the keys: outputs [b, T, n, d_v] and their log-sum-exps [b, n, T] float32.

    Blocks merge by these (``merge``). A query that none of the keys counts for has the log-sum-exp -inf, or one so
    small that nothing of its output is left. Not differentiable: ``block_gradients`` is its backward pass.

    ``sent``, arrays that are on their way meanwhile, comes back when both are there. XLA takes a kernel for free, and
    would send behind the work on its results; so the two wait for each other before anything is done to either.
    """
    if kernel == "splash":
        return splash_block(scores, q, k, v, segments, sent)
    return lax.optimization_barrier((_chunked_block(scores, q, k, v, segments=segments), sent))


def block_gradients(
    kernel: str,
    scores: Scores,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    o: jax.Array,
    lse: jax.Array,
    do: jax.Array,
    segments: Segments | None,
    sent: Any,
) -> tuple[tuple[jax.Array, jax.Array, jax.Array], Any]:
    """Derivatives of q, k and v by way of these keys; o and lse are merged over all keys, do is o's derivative.

    ``sent`` as in ``attend_block``.
    """
    if kernel == "splash":
        return splash_gradients(scores, q, k, v, o, lse, do, segments, sent)
    return lax.optimization_barrier((_chunked_gradients(scores, q, k, v, o, lse, do, segments=segments), sent))


def merge(o: jax.Array, lse: jax.Array, other: jax.Array, other_lse: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Attention to two sets of keys from attention to each: o [b, T, n, d_v] float32 and lse [b, n, T], finite."""
    both = jnp.logaddexp(lse, other_lse)
    # A query without keys may come with any output.
    other = jnp.where(jnp.isneginf(_by_query(other_lse)), 0.0, other.astype(jnp.float32))
    return o * _by_query(jnp.exp(lse - both)) + other * _by_query(jnp.exp(other_lse - both)), both


def add_sinks(o: jax.Array, lse: jax.Array, sinks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Sinks [n] joined to the denominators of o [b, T, n, d_v], whose log-sum-exps are lse [b, n, T]."""
    both = jnp.logaddexp(lse, sinks.astype(jnp.float32)[:, None])
    return (o * _by_query(jnp.exp(lse - both))).astype(o.dtype), both


def sink_gradients(sinks: jax.Array, o: jax.Array, lse: jax.Array, do: jax.Array) -> jax.Array:
    """The derivative of sinks [n], from what ``add_sinks`` returned and the derivative of its output."""
    share = jnp.exp(sinks.astype(jnp.float32)[:, None] - lse)
    return -jnp.einsum("bnt,btnh,btnh->n", share, o.astype(jnp.float32), do.astype(jnp.float32)).astype(sinks.dtype)


def _by_query(lse: jax.Array) -> jax.Array:
    """[b, n, T] as a factor of outputs [b, T, n, d_v]."""
    return lse.swapaxes(1, 2)[..., None]


def _reference(
    scores: Scores,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    sinks: jax.Array | None,
    absent: jax.Array | None,
    segments: Segments | None,
) -> jax.Array:
    mask = scores.mask(jnp.arange(q.shape[1]), jnp.arange(k.shape[1]), absent, segments)
    logits = jnp.where(mask, scores.logits(_grouped(q, k), k), -jnp.inf)
    if sinks is not None:
        sink = sinks.astype(jnp.float32).reshape(logits.shape[1:3])[None, :, :, None, None]
        logits = jnp.concatenate([logits, jnp.broadcast_to(sink, (*logits.shape[:-1], 1))], axis=-1)
    weights = jax.nn.softmax(logits, axis=-1)[..., : k.shape[1]].astype(v.dtype)
    o = jnp.einsum("bkgts,bskh->btkgh", weights, v)
    return checkpoint_name(o.reshape(*q.shape[:3], -1).astype(q.dtype), "attn_core")


def _chunked(
    scores: Scores,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    sinks: jax.Array | None,
    absent: jax.Array | None,
    segments: Segments | None,
) -> jax.Array:
    arrays, tree = jax.tree.flatten((q, k, v, sinks, absent, segments))
    return _chunked_attention(scores, *jax.tree.unflatten(tree, varying_alike(*arrays)))


#: A block of keys and values, the index of its first key, and the segments of its keys.
_Block = tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]
_Given = tuple[jax.Array, jax.Array, jax.Array, jax.Array | None, jax.Array | None, Segments | None]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _chunked_attention(scores: Scores, *given: *_Given) -> jax.Array:
    return _chunked_forward(scores, *given)[0]


def _chunked_forward(scores: Scores, *given: *_Given) -> tuple[jax.Array, tuple[_Given, jax.Array, jax.Array]]:
    q, k, v, sinks, absent, segments = given
    o, lse = _chunked_block(scores, q, k, v, absent, segments)
    if sinks is not None:
        o, lse = add_sinks(o, lse, sinks)
    o, lse = (checkpoint_name(each, "attn_core") for each in (o.astype(q.dtype), lse))
    return o, (given, o, lse)


def _chunked_backward(
    scores: Scores, saved: tuple[_Given, jax.Array, jax.Array], do: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None, None, None]:
    (q, k, v, sinks, absent, segments), o, lse = saved
    dsinks = None if sinks is None else sink_gradients(sinks, o, lse, do)
    return *_chunked_gradients(scores, q, k, v, o, lse, do, absent, segments), dsinks, None, None


_chunked_attention.defvjp(_chunked_forward, _chunked_backward)


def _grouped(q: jax.Array, k: jax.Array) -> jax.Array:
    """[b, T, n, H] -> [b, T, k, g, H]."""
    return q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[3])


def _blocks(x: jax.Array, size: int) -> jax.Array:
    """[b, S, ...] -> [S/size, b, size, ...], for a scan."""
    return jnp.moveaxis(x.reshape(x.shape[0], -1, size, *x.shape[2:]), 1, 0)


def _blocks_of(segments: Segments | None, size: int) -> jax.Array | None:
    """The segments of keys, as ``_blocks`` has the keys."""
    return None if segments is None else _blocks(segments[1], size)


def _meeting(segments: Segments | None, of_keys: jax.Array | None) -> Segments | None:
    """The segments of all queries and those of a block of keys."""
    return None if segments is None or of_keys is None else (segments[0], of_keys)


def _chunked_block(
    scores: Scores,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    absent: jax.Array | None = None,
    segments: Segments | None = None,
) -> tuple[jax.Array, jax.Array]:
    size, grouped, index = block_size(k.shape[1], scores.block), _grouped(q, k), jnp.arange(q.shape[1])

    def step(
        carry: tuple[jax.Array, jax.Array, jax.Array], block: _Block
    ) -> tuple[tuple[jax.Array, jax.Array, jax.Array], None]:
        (top, total, summed), (keys, values, start, of_keys) = carry, block
        mask = scores.mask(index, start + jnp.arange(size), absent, _meeting(segments, of_keys))
        logits = jnp.where(mask, scores.logits(grouped, keys), -jnp.inf)
        raised = jnp.maximum(top, logits.max(-1))
        # A query with no key so far: its weights must be 0, not exp(-inf + inf).
        against = jnp.where(jnp.isneginf(raised), 0.0, raised)
        weights, kept = jnp.exp(logits - against[..., None]), jnp.exp(top - against)
        found = jnp.einsum("bkgts,bskh->bkgth", weights.astype(v.dtype), values, preferred_element_type=jnp.float32)
        return (raised, kept * total + weights.sum(-1), kept[..., None] * summed + found), None

    rows = (q.shape[0], k.shape[2], grouped.shape[3], q.shape[1])
    zeros = varying_alike(q, jnp.zeros(rows, jnp.float32))[1]
    wide = varying_alike(q, jnp.zeros((*rows, v.shape[3]), jnp.float32))[1]
    starts = jnp.arange(0, k.shape[1], size)
    blocks = _blocks(k, size), _blocks(v, size), starts, _blocks_of(segments, size)
    (top, total, summed), _ = lax.scan(step, (zeros - jnp.inf, zeros, wide), blocks)
    o = jnp.moveaxis(summed / jnp.where(total == 0, 1.0, total)[..., None], 3, 1)
    return o.reshape(*q.shape[:3], -1), (top + jnp.log(total)).reshape(q.shape[0], q.shape[2], q.shape[1])


def _chunked_gradients(
    scores: Scores,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    o: jax.Array,
    lse: jax.Array,
    do: jax.Array,
    absent: jax.Array | None = None,
    segments: Segments | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    size, grouped, index = block_size(k.shape[1], scores.block), _grouped(q, k), jnp.arange(q.shape[1])
    d_out = do.reshape(*grouped.shape[:4], -1)
    by_head = (q.shape[0], k.shape[2], -1, q.shape[1], 1)
    lse = lse.reshape(by_head)
    # The derivative of softmax subtracts from each row the mean of what it gets: o . do.
    mean = jnp.einsum("btnh,btnh->bnt", o.astype(jnp.float32), do.astype(jnp.float32)).reshape(by_head)

    def step(dq: jax.Array, block: _Block) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        keys, values, start, of_keys = block
        logits = scores.logits(grouped, keys)
        mask = scores.mask(index, start + jnp.arange(size), absent, _meeting(segments, of_keys))
        weights = jnp.where(mask, jnp.exp(logits - lse), 0.0)
        dv = jnp.einsum("bkgts,btkgh->bskh", weights.astype(do.dtype), d_out, preferred_element_type=jnp.float32)
        d_weights = jnp.einsum("btkgh,bskh->bkgts", d_out, values, preferred_element_type=jnp.float32)
        d_logits = weights * (d_weights - mean) * scores.scale
        if scores.softcap is not None:
            d_logits *= 1 - jnp.square(logits / scores.softcap)
        d_logits = d_logits.astype(k.dtype)
        dk = jnp.einsum("bkgts,btkgh->bskh", d_logits, grouped, preferred_element_type=jnp.float32)
        dq += jnp.einsum("bkgts,bskh->btkgh", d_logits, keys, preferred_element_type=jnp.float32)
        return dq, (dk.astype(k.dtype), dv.astype(v.dtype))

    zeros = varying_alike(q, jnp.zeros(grouped.shape, jnp.float32))[1]
    starts = jnp.arange(0, k.shape[1], size)
    blocks = _blocks(k, size), _blocks(v, size), starts, _blocks_of(segments, size)
    dq, (dk, dv) = lax.scan(step, zeros, blocks)
    dk, dv = (jnp.moveaxis(each, 0, 1).reshape(whole.shape) for each, whole in ((dk, k), (dv, v)))
    return dq.reshape(q.shape).astype(q.dtype), dk, dv


def _cudnn(
    scores: Scores,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    sinks: jax.Array | None,
    absent: jax.Array | None,
    segments: Segments | None,
) -> jax.Array:
    if scores.softcap is not None:
        raise RooftopError("softcap of the cudnn kernel", scores.softcap, "none")
    if sinks is not None:
        raise RooftopError("sinks of the cudnn kernel", sinks.shape, "none")
    if absent is not None:
        raise RooftopError("kernel of attention to keys of other devices", "cudnn", "reference, chunked, splash")
    if v.shape[3] != k.shape[3]:
        raise RooftopError("size of value heads of the cudnn kernel", v.shape[3], f"{k.shape[3]}, that of keys")
    window = None if scores.window is None else (scores.window - 1, 0)
    alike = None if segments is None else (segments[0][:, :, None] == segments[1][:, None, :])[:, None]
    with declared("cudnn", scores, q, v):
        o = jax.nn.dot_product_attention(
            q, k, v, mask=alike, scale=scores.scale, is_causal=True, local_window_size=window, implementation="cudnn"
        )
    return checkpoint_name(o, "attn_core")


_Attend = Callable[
    [Scores, jax.Array, jax.Array, jax.Array, jax.Array | None, jax.Array | None, Segments | None], jax.Array
]
_ATTEND: Mapping[str, _Attend] = {
    "reference": _reference,
    "chunked": _chunked,
    "splash": splash_attend,
    "cudnn": _cudnn,
}
