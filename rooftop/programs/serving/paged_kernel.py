"""A kernel for GPUs (Pallas, Triton) that reads the pages of sequences that generate.

It reads only the tokens that exist, each once, and stores no copy of them. Dims are those of
``rooftop.programs.serving.paged``.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float, Int, Shaped

from rooftop.core.rounding import ceil_div, next_multiple
from rooftop.programs.attention.scores import Scores

#: Sizes of heads that Triton's blocks can have.
HEAD_SIZES: tuple[int, ...] = (16, 32, 64, 128, 256)
#: Least rows of a matmul of the matrix units.
_ROWS = 16
#: Tokens that a program reads at a time.
_BLOCK = 64
#: Programs of a launch, where sequences are long enough: a few for each of the 100 to 150 multiprocessors of a GPU.
_PROGRAMS = 512
_WARPS, _STAGES = 4, 3


def paged_sums(
    scores: Scores,
    q: Float[Array, "R k g H"],
    values: Shaped[Array, "pages 2 k p H"],
    scales: Float[Array, "pages 2 k p"] | None,
    tables: Int[Array, "R P"],
    last: Int[Array, " R"],
    *,
    least: float,
) -> tuple[Float[Array, "R k g"], Float[Array, "R k g"], Float[Array, "R k g H"]]:
    """The largest score, and relative to it the sums of weights and of weighted values, of one query a row and head.

    A query sees the tokens up to position ``last`` of its row that its window includes. The sums of a row that sees
    none are zeros, and its largest score is ``least``. The FLOPs are four times queries, tokens and head size.
    """
    (count, kv_heads, group, size), pages = q.shape, tables.shape[1]
    page_tokens = values.shape[3]
    tokens = pages * page_tokens
    queries = max(_ROWS, 1 << (group - 1).bit_length())
    splits = max(1, min(ceil_div(tokens, _BLOCK), ceil_div(_PROGRAMS, count * kv_heads)))
    tokens_of_split = next_multiple(ceil_div(tokens, splits), _BLOCK)
    splits = ceil_div(tokens, tokens_of_split)
    body = partial(
        _kernel, scores, kv_heads=kv_heads, group=group, queries=queries, page_tokens=page_tokens,
        tokens=tokens_of_split, least=least, quantised=scales is not None,
    )  # fmt: skip
    by_query = pl.BlockSpec((None, None, None, queries), lambda row, head, split: (row, head, split, 0))
    of_query = jax.ShapeDtypeStruct((count, kv_heads, splits, queries), jnp.float32)

    def call(*operands: jax.Array, interpret: bool) -> tuple[jax.Array, ...]:
        outputs: tuple[jax.Array, ...] = pl.pallas_call(
            body,
            grid=(count, kv_heads, splits),
            in_specs=[pl.no_block_spec] * (4 if scales is None else 5),
            out_specs=[
                by_query,
                by_query,
                pl.BlockSpec((None, None, None, queries, size), lambda row, head, split: (row, head, split, 0, 0)),
            ],
            out_shape=[of_query, of_query, jax.ShapeDtypeStruct((*of_query.shape, size), jnp.float32)],
            compiler_params=triton.CompilerParams(num_warps=_WARPS, num_stages=_STAGES),
            interpret=interpret,
            name="paged_attention",
        )(*operands)
        return outputs

    operands = (
        q.reshape(-1, size),
        values.reshape(-1, size),
        tables.reshape(-1),
        last,
        *(() if scales is None else (scales.reshape(-1),)),
    )
    with jax.named_scope(f"kernel_flops[each={4 * count * kv_heads * group * tokens * size}]"):
        top, total, summed = lax.platform_dependent(
            *operands, cpu=partial(call, interpret=True), default=partial(call, interpret=False)
        )
    raised = top.max(2)
    factor = jnp.exp(top - raised[:, :, None])
    total, summed = (factor * total).sum(2), (factor[..., None] * summed).sum(2)
    return raised[..., :group], total[..., :group], summed[:, :, :group]


def _kernel(
    scores: Scores, q_ref: Any, values_ref: Any, tables_ref: Any, last_ref: Any, *refs: Any, kv_heads: int,
    group: int, queries: int, page_tokens: int, tokens: int, least: float, quantised: bool,
) -> None:  # fmt: skip
    """Sums over ``tokens`` of a row for the ``group`` of one key/value head, the last repeated to ``queries``."""
    scales_ref, (top_ref, total_ref, summed_ref) = refs[0] if quantised else None, refs[-3:]
    row, head, split = (pl.program_id(axis) for axis in range(3))
    first_query = (row * kv_heads + head) * group
    q = q_ref[first_query + jnp.minimum(jnp.arange(queries, dtype=jnp.int32), group - 1)]
    last = last_ref[row]
    pages = tables_ref.shape[0] // pl.num_programs(0)
    begin, end = split * tokens, jnp.minimum((split + 1) * tokens, last + 1)
    if scores.window is not None:
        begin = jnp.maximum(begin, (last - scores.window + 1) // _BLOCK * _BLOCK)

    def body(index: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        top, total, summed = carry
        asked = begin + index * _BLOCK + jnp.arange(_BLOCK, dtype=jnp.int32)
        # After the last token that token is read again, and masked: no page belongs to the others.
        position = jnp.minimum(asked, end - 1)
        page = tables_ref[row * pages + position // page_tokens]

        def read(part: int) -> tuple[jax.Array, jax.Array | None]:
            at = ((page * 2 + part) * kv_heads + head) * page_tokens + position % page_tokens
            return values_ref[at].astype(q.dtype), None if scales_ref is None else scales_ref[at]

        (k, k_scales), (v, v_scales) = read(0), read(1)
        logits = triton.dot(q, k, trans_b=True)
        if k_scales is not None:
            logits = logits * k_scales[None, :]
        seen = (asked < end) & scores.seen(last - position)
        logits = jnp.where(seen[None, :], scores.scaled(logits), -jnp.inf)
        raised = jnp.maximum(top, logits.max(1))
        weights, factor = jnp.exp(logits - raised[:, None]), jnp.exp(top - raised)
        total = factor * total + weights.sum(1)
        if v_scales is not None:
            weights = weights * v_scales[None, :]
        more = triton.dot(weights.astype(v.dtype), v)
        return raised, total, factor[:, None] * summed + more

    none = (
        jnp.full((queries,), least, jnp.float32),
        jnp.zeros((queries,), jnp.float32),
        jnp.zeros(q.shape, jnp.float32),
    )
    trips = jnp.maximum(0, (end - begin + _BLOCK - 1) // _BLOCK)
    top, total, summed = lax.fori_loop(0, trips, body, none)
    top_ref[...], total_ref[...], summed_ref[...] = top, total, summed
