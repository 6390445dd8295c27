"""Causal attention on one device's share of the heads, behind one interface: ``attend``.

Dims: b local batch, T queries, S keys (T = S but for a ring's blocks), n local query heads, k local key/value heads,
g = n/k, H size of a query or key head, d_v of a value head. Query head i uses key/value head i // g. The kernels:

- ``reference``: plain, and differentiated by JAX. It stores all T*S scores, and computes those that are masked too;
- ``chunked``: keys a block at a time on any backend (``rooftop.programs.attention.chunked``). Most of the blocks that
  are masked as a whole are skipped;
- ``splash``: JAX's Pallas kernels for TPU. All such blocks are skipped;
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
``kernel_scope`` writes it; ``rooftop.compiler`` reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from rooftop.capabilities import KERNELS
from rooftop.core.errors import RooftopError, unknown
from rooftop.programs.attention.chunked import chunked_attend, chunked_block, chunked_gradients
from rooftop.programs.attention.scores import BLOCK, Scores, Segments, declared, kernel_flops, kernel_scope
from rooftop.programs.attention.splash import splash_attend, splash_block, splash_gradients

__all__ = [
    "BLOCK", "Scores", "Segments", "attend", "attend_behind", "attend_block", "block_gradients",
    "kernel_flops", "kernel_scope",
]  # fmt: skip


def attend(
    kernel: str,
    scores: Scores,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    sinks: jax.Array | None = None,
    segments: jax.Array | None = None,
) -> jax.Array:
    """Causal attention of q [b, T, n, H] to k [b, T, k, H] and v [b, T, k, d_v]: [b, T, n, d_v] in the dtype of q.

    A token attends to the ``scores.window`` last positions, its own included (None: to all before it), and to none of
    another segment than its own (``segments`` [b, T] int32, not negative). ``sinks`` [n] are logits that join the
    softmax's denominator with no value. ``kernel`` is one of ``KERNELS``; it may be called inside ``jax.shard_map``,
    with ``check_vma=False`` for 'splash', whose outputs have no such type.

    Raises RooftopError for an unknown kernel, and for what a kernel does not do.
    """
    if kernel not in KERNELS:
        raise unknown("attention kernel", kernel, KERNELS)
    if q.shape[2] % k.shape[2]:
        raise RooftopError("query heads on a device", q.shape[2], f"a multiple of the {k.shape[2]} key/value heads")
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

    Blocks merge by these (``rooftop.programs.attention.scores``). A query that none of the keys counts for has the
    log-sum-exp -inf, or one so small that nothing of its output is left. Not differentiable: ``block_gradients`` is its
    backward pass.

    ``sent``, arrays that are on their way meanwhile, comes back when both are there. XLA takes a kernel for free, and
    would send behind the work on its results; so the two wait for each other before anything is done to either.
    """
    if kernel == "splash":
        return splash_block(scores, q, k, v, segments, sent)
    return lax.optimization_barrier((chunked_block(scores, q, k, v, segments=segments), sent))


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
    return lax.optimization_barrier((chunked_gradients(scores, q, k, v, o, lse, do, segments=segments), sent))


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
    grouped = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[3])
    logits = jnp.where(mask, scores.logits(grouped, k), -jnp.inf)
    if sinks is not None:
        sink = sinks.astype(jnp.float32).reshape(logits.shape[1:3])[None, :, :, None, None]
        logits = jnp.concatenate([logits, jnp.broadcast_to(sink, (*logits.shape[:-1], 1))], axis=-1)
    weights = jax.nn.softmax(logits, axis=-1)[..., : k.shape[1]].astype(v.dtype)
    o = jnp.einsum("bkgts,bskh->btkgh", weights, v)
    return checkpoint_name(o.reshape(*q.shape[:3], -1).astype(q.dtype), "attn_core")


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
    "chunked": chunked_attend,
    "splash": splash_attend,
    "cudnn": _cudnn,
}
