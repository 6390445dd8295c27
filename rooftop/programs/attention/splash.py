"""JAX's splash attention, Pallas kernels for TPU, as a kernel of ``rooftop.programs.attention.attend``.

The kernels run inside ``jax.shard_map`` with ``check_vma=False``, on one device's heads, and build their masks there:
the lists of blocks to visit are small arrays, and masks within blocks are computed from indices. On a CPU they run in
Pallas' interpret mode, for tests.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jaxtyping import Array, Float

from rooftop.core.errors import RooftopError
from rooftop.models.program_sizes import LANES, block_size
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
    declared,
)

#: Keys that the TPU kernels multiply at a time, if the block is a multiple of it.
_COMPUTED_KEYS = 512


def _splash_kernel(
    scores: Scores, q: Queries, k: Keys, *, residuals: bool, packed: bool = False
) -> splash.SplashAttentionKernel:
    """The kernels, in one grid over all heads of all sequences. With ``residuals`` forward returns log-sum-exps.

    The kernels take the segments of a single sequence: each sequence of a packed batch is a call, and ``jax.vmap``
    turns the calls into one grid. Raises RooftopError for a length that is not a multiple of 128.
    """
    lengths = (q.shape[1], k.shape[1])
    for length in lengths:
        if length % LANES:
            raise RooftopError("sequence length of the splash kernel", length, f"a multiple of {LANES}")
    if scores.offset >= lengths[1] - 1 and (scores.window is None or scores.window >= scores.offset + lengths[0]):
        mask: masks.Mask = masks.FullMask(lengths)
    elif scores.window is None:
        mask = masks.CausalMask(lengths, offset=scores.offset)
    else:
        mask = masks.LocalMask(lengths, window_size=(scores.window - 1, 0), offset=scores.offset)
    rows, columns = (block_size(length, scores.block) for length in lengths)
    computed = _COMPUTED_KEYS if columns % _COMPUTED_KEYS == 0 else columns
    return splash.make_splash_mha(
        masks.MultiHeadMask([mask] * (q.shape[2] if packed else q.shape[0] * q.shape[2])),
        head_shards=1,
        q_seq_shards=1,
        attn_logits_soft_cap=scores.softcap,
        save_residuals=residuals,
        residual_checkpoint_name=None if residuals else "attn_core",
        block_sizes=splash.BlockSizes(
            block_q=rows, block_kv=columns, block_kv_compute=computed,
            block_q_dkv=rows, block_kv_dkv=columns, block_kv_dkv_compute=computed,
            block_q_dq=rows, block_kv_dq=columns,
        ),
    )  # fmt: skip


def _by_head(x: Queries) -> Float[Array, "heads T H"]:
    """All heads of all sequences in one dim."""
    return x.swapaxes(1, 2).reshape(-1, x.shape[1], x.shape[3])


def _by_token(x: Float[Array, "heads T H"], batch: int) -> Queries:
    """The inverse of ``_by_head``."""
    return x.reshape(batch, -1, *x.shape[1:]).swapaxes(1, 2)


def _heads_first(x: Queries) -> Float[Array, "b n T H"]:
    """Swap the dims of tokens and heads."""
    return x.swapaxes(1, 2)


def _scaled(scores: Scores, q: Float[Array, "*dims"]) -> Float[Array, "*dims"]:
    """Scale queries, which rounds them to their dtype once more: the kernels do not scale."""
    return q * scores.scale


def splash_attend(
    scores: Scores, q: Queries, k: Keys, v: Values, sinks: Sinks | None, absent: Absent, segments: Segments | None
) -> Outputs:
    """``rooftop.programs.attention.attend.attend`` by these kernels; ``absent`` None: all keys exist."""
    kernel = _splash_kernel(scores, q, k, residuals=False, packed=segments is not None)
    if segments is not None:
        of_queries, of_keys = segments
        if absent is not None:
            of_keys = jnp.where(jnp.arange(k.shape[1]) < absent, -1, of_keys)

        def one_sequence(q: jax.Array, k: jax.Array, v: jax.Array, of_queries: jax.Array, of_keys: jax.Array) -> Any:
            return kernel(q, k, v, splash.SegmentIds(q=of_queries, kv=of_keys), sinks)

        with declared("splash", scores, q, v):
            o: Any = jax.vmap(one_sequence)(
                _heads_first(_scaled(scores, q)), _heads_first(k), _heads_first(v), of_queries, of_keys
            )
        return _heads_first(o)
    tiled_sinks = None if sinks is None else jnp.tile(sinks, q.shape[0])
    ids = None
    if absent is not None:
        of_keys = (jnp.arange(k.shape[1]) < absent).astype(jnp.int32)
        ids = splash.SegmentIds(q=jnp.zeros(q.shape[1], jnp.int32), kv=of_keys)
    with declared("splash", scores, q, v):
        o = kernel(_by_head(_scaled(scores, q)), _by_head(k), _by_head(v), ids, tiled_sinks)
    return _by_token(o, q.shape[0])


def splash_block(
    scores: Scores, q: Queries, k: Keys, v: Values, segments: Segments | None, sent: Any
) -> tuple[tuple[Outputs, LogSums], Any]:
    """``rooftop.programs.attention.attend.attend_block`` by these kernels."""
    kernel = _splash_kernel(scores, q, k, residuals=True, packed=segments is not None)
    with declared("splash", scores, q, v):
        if segments is None:
            result = kernel(_by_head(_scaled(scores, q)), _by_head(k), _by_head(v))
        else:
            ids = splash.SegmentIds(q=segments[0], kv=segments[1])
            result = jax.vmap(kernel)(*map(_heads_first, (_scaled(scores, q), k, v)), ids)
    (o, (lse,)), sent = lax.optimization_barrier((result, sent))
    o = _by_token(o, q.shape[0]) if segments is None else _heads_first(o)
    return (o, lse.reshape(q.shape[0], -1, q.shape[1])), sent


def splash_gradients(
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
    """``rooftop.programs.attention.attend.block_gradients`` by these kernels."""
    kernel = _splash_kernel(scores, q, k, residuals=True, packed=segments is not None)
    settings = {name: kernel.kwargs[name] for name in _SETTINGS}

    def gradients(q: Any, k: Any, v: Any, ids: Any, o: Any, lse: Any, do: Any) -> Any:
        saved = (q, k, v, ids, None, o, lse, kernel.dq_mask_info, kernel.dkv_mask_info)
        # A private function: the public one differentiates only with the log-sum-exps of its own keys.
        return splash._splash_attention_bwd(**settings, res=saved, do=do)[3:6]

    order = _by_head if segments is None else _heads_first
    wide = order(_scaled(scores, q)), order(k), order(v)
    with declared("splash", scores, q, v):
        if segments is None:
            result = gradients(*wide, None, order(o), lse.reshape(-1, q.shape[1]), order(do))
        else:
            ids = splash.SegmentIds(q=segments[0], kv=segments[1])
            result = jax.vmap(gradients)(*wide, ids, order(o), lse, order(do))
    result, sent = lax.optimization_barrier((result, sent))
    dq, dk, dv = (_by_token(x, q.shape[0]) if segments is None else _heads_first(x) for x in result)
    return (_scaled(scores, dq), dk, dv), sent


#: Arguments of the kernels' backward pass that are not arrays.
_SETTINGS = (
    "save_residuals", "mask_value", "is_mqa", "block_sizes", "residual_checkpoint_name", "mask_function",
    "attn_logits_soft_cap", "interpret",
)  # fmt: skip
