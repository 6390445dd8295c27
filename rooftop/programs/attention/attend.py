"""Causal attention on one device's share of the heads, through one interface: ``attend``.

Dims: b local batch, T queries, S keys (S differs from T only for keys of other devices), n local query heads, k local
key/value heads, g = n/k, H size of a query or key head, d_v size of a value head. Query head i uses key/value head i //
g. The kernels:

- ``reference``: plain JAX, differentiated by JAX. It computes and stores all T*S scores, masked ones included;
- ``chunked``: one block of keys at a time, on any backend (``rooftop.programs.attention.chunked``). It skips most of
  the blocks that are fully masked;
- ``splash``: JAX's Pallas kernels for TPU. They skip all fully masked blocks;
- ``cudnn``: cuDNN's flash attention through JAX, on GPUs.

All support windows and the segments of packed sequences. All but ``cudnn`` support soft caps, sinks, and value heads of
another size than key heads. No kernel skips a block because of its segments; ``cudnn`` gets them as a mask of T*S
elements. On an H100, outputs and gradients of ``cudnn`` in bf16 are within 0.3 % of ``reference`` in float32.

A kernel saves its output and the log-sum-exp of its scores for the backward pass. Both are named ``attn_core`` here,
for the remat policies of ``rooftop.models.activations``; policies recognise cuDNN's by its primitive. Do not name the
output again outside: it would be saved twice.

XLA counts no FLOPs in a hand-written kernel, so ``op_name`` declares them. Every kernel is called under a named scope
such as ``kernel_flops[fwd=137438953472,dq=206158430208,dkv=274877906944]``: FLOPs of one execution on one device, keyed
by a word of the kernel's name (``splash_mha_dq_no_residuals``; for cuDNN ``bwd`` is the target whose name ends in
'Backward', and ``fwd`` the other one). The scope follows ``layers/attn/core``, where a reader of scopes stops.
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
from rooftop.programs.attention.scores import (
    Absent,
    Keys,
    LogSums,
    Outputs,
    Queries,
    Scores,
    Segments,
    Sinks,
    TokenSegments,
    Values,
    declared,
)
from rooftop.programs.attention.splash import splash_attend, splash_block, splash_gradients


def attend(
    kernel: str,
    scores: Scores,
    q: Queries,
    k: Keys,
    v: Values,
    *,
    sinks: Sinks | None = None,
    absent: Absent = None,
    segments: TokenSegments | Segments | None = None,
) -> Outputs:
    """Causal attention, in the dtype of q.

    A token attends to the last ``scores.window`` positions, its own included (None: to all earlier ones), and only
    within its own segment. Keys may begin ``scores.offset`` positions before the queries; the first ``absent`` of them
    do not exist. ``segments`` are those of the tokens, or of the queries and of the keys where these differ.
    ``kernel`` is one of ``KERNELS``. Inside ``jax.shard_map``, 'splash' needs ``check_vma=False``, because its outputs
    have no such type.

    Raises RooftopError for an unknown kernel and for features that a kernel does not support.
    """
    if kernel not in KERNELS:
        raise unknown("attention kernel", kernel, KERNELS)
    if q.shape[2] % k.shape[2]:
        raise RooftopError("query heads on a device", q.shape[2], f"a multiple of the {k.shape[2]} key/value heads")
    both = segments if segments is None or isinstance(segments, tuple) else (segments, segments)
    return _ATTEND[kernel](scores, q, k, v, sinks, absent, both)


def attend_block(
    kernel: str, scores: Scores, q: Queries, k: Keys, v: Values, segments: Segments | None, sent: Any
) -> tuple[tuple[Outputs, LogSums], Any]:
    """Outputs and log-sum-exps of attention to some of the keys.

    Log-sum-exps merge the results of several blocks (``rooftop.programs.attention.scores``). A query that no key counts
    for has a log-sum-exp of -inf, or one so small that its output vanishes in the merge. Not differentiable:
    ``block_gradients`` is the backward pass.

    ``sent`` are arrays in transfer; they come back once both the transfer and the kernel are complete. XLA assumes that
    a kernel takes no time, and would start the transfer after the work on its results; the barrier makes them overlap.
    """
    if kernel == "splash":
        return splash_block(scores, q, k, v, segments, sent)
    return lax.optimization_barrier((chunked_block(scores, q, k, v, segments=segments), sent))


def block_gradients(
    kernel: str,
    scores: Scores,
    q: Queries,
    k: Keys,
    v: Values,
    o: Outputs,
    lse: LogSums,
    do: Outputs,
    segments: Segments | None,
    sent: Any,
) -> tuple[tuple[Queries, Keys, Values], Any]:
    """Derivatives of q, k and v through these keys. o and lse are merged over all keys; do is the derivative of o.

    ``sent`` as in ``attend_block``.
    """
    if kernel == "splash":
        return splash_gradients(scores, q, k, v, o, lse, do, segments, sent)
    return lax.optimization_barrier((chunked_gradients(scores, q, k, v, o, lse, do, segments=segments), sent))


def _reference(
    scores: Scores, q: Queries, k: Keys, v: Values, sinks: Sinks | None, absent: Absent, segments: Segments | None
) -> Outputs:
    grouped = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[3])
    logits, mask = scores.pairs(grouped, k, jnp.arange(q.shape[1]), jnp.arange(k.shape[1]), absent, segments)
    logits = jnp.where(mask, logits, -jnp.inf)
    if sinks is not None:
        sink = sinks.astype(jnp.float32).reshape(logits.shape[1:3])[None, :, :, None, None]
        logits = jnp.concatenate([logits, jnp.broadcast_to(sink, (*logits.shape[:-1], 1))], axis=-1)
    weights = jax.nn.softmax(logits, axis=-1)[..., : k.shape[1]].astype(v.dtype)
    o = jnp.einsum("bkgts,bskh->btkgh", weights, v)
    return checkpoint_name(o.reshape(*q.shape[:3], -1).astype(q.dtype), "attn_core")


def _cudnn(
    scores: Scores, q: Queries, k: Keys, v: Values, sinks: Sinks | None, absent: Absent, segments: Segments | None
) -> Outputs:
    if scores.softcap is not None:
        raise RooftopError("softcap of the cudnn kernel", scores.softcap, "none")
    if sinks is not None:
        raise RooftopError("sinks of the cudnn kernel", sinks.shape, "none")
    if absent is not None:
        raise RooftopError("kernel of attention to keys of other devices", "cudnn", "reference, chunked, splash")
    if v.shape[3] != k.shape[3]:
        raise RooftopError("size of value heads of the cudnn kernel", v.shape[3], f"{k.shape[3]}, that of keys")
    window = None if scores.window is None else (scores.window - 1, 0)
    same_segment = None if segments is None else (segments[0][:, :, None] == segments[1][:, None, :])[:, None]
    with declared("cudnn", scores, q, v):
        o = jax.nn.dot_product_attention(
            q,
            k,
            v,
            mask=same_segment,
            scale=scores.scale,
            is_causal=True,
            local_window_size=window,
            implementation="cudnn",
        )
    return o


#: JAX's primitive of cuDNN's forward kernel. Its log-sum-exp can have no name, so remat policies take the primitive for
#: ``attn_core``; a name for its output would save that twice.
CUDNN_FORWARD = "dot_product_attention_fwd_wrapper"

_Attend = Callable[
    [Scores, jax.Array, jax.Array, jax.Array, jax.Array | None, jax.Array | None, Segments | None], jax.Array
]
_ATTEND: Mapping[str, _Attend] = {
    "reference": _reference,
    "chunked": chunked_attend,
    "splash": splash_attend,
    "cudnn": _cudnn,
}
