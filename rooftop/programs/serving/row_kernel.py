"""A kernel for TPUs (Pallas, Mosaic) that reads the pages of sequences that generate, in pools of one row per token.

Such pools have latents, or the key and the value of a narrow head in one row. The kernel reads only pages in use, each
once, and multiplies a block of pages while the next one is copied, whose sequence may be the next. XLA would gather the
pages, multiply and add up in turn. It also writes the row of the new token, into the page that it has in VMEM and from
there to the pool: XLA:TPU copies a whole pool that fits VMEM there and back, to write rows of it. Dims are those of
``rooftop.programs.serving.paged``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int, Shaped

from rooftop.programs.attention.scores import Scores

#: Bytes of a block of pages, of which VMEM has two: large enough that its copies take longer than what comes with one.
_BLOCK_BYTES = 2**20
#: Most bytes of block tables, which are in scalar memory (1 MiB).
TABLE_BYTES = 2**19
#: Pages whose copies are begun together: one after the other their scalar instructions take longer than the copies.
_UNROLLED = 8
#: Tokens of a page are a multiple of it: the rows of a register of 16-bit elements.
PAGE_TOKENS = 16


def pages_of_block(page_bytes: int, pages: int) -> int:
    """Pages that are copied together, of the ``pages`` of a table."""
    block = _BLOCK_BYTES // page_bytes
    return max(1, min(pages, block // _UNROLLED * _UNROLLED if block > _UNROLLED else block))


def row_attention(
    scores: Scores,
    q: Float[Array, "R k g W"],
    new: Shaped[Array, "R k W"],
    values: Shaped[Array, "pages 1 k p W"],
    tables: Int[Array, "R P"],
    last: Int[Array, " R"],
    sinks: Float[Array, "k g"] | None,
    *,
    columns: int,
    least: float,
) -> tuple[Float[Array, "R k g columns"], Shaped[Array, "pages 1 k p W"]]:
    """Softmax attention of one query a row and head: weighted sums of the first ``columns`` of the rows that it sees.

    A query sees the tokens up to position ``last`` of its row that its window includes: the last one is ``new``, which
    is also written to the pool. A row whose ``last`` is -1 has no token: it writes nothing, and its output is zeros.
    ``least`` is below all scores. Declared FLOPs and bytes are those of sequences that fill their tables.
    """
    (count, kv_heads, group, size), (page_tokens, pages) = q.shape, (values.shape[3], tables.shape[1])
    item, tokens = values.dtype.itemsize, pages * page_tokens
    page = (kv_heads, page_tokens, size)
    block = pages_of_block(math.prod(page) * item, pages)
    # The cores of a chip that has two, such as v5p, take half of the rows each.
    cores = 2 if count % 2 == 0 else 1
    own = count // cores
    of_row = pl.BlockSpec((None, kv_heads, group, size), lambda core, row, *_: (core * own + row, 0, 0, 0))
    out = jax.ShapeDtypeStruct((count, kv_heads, group, columns), q.dtype)
    cost = pl.CostEstimate(
        flops=2 * count * kv_heads * group * tokens * (size + columns),
        bytes_accessed=count * kv_heads * ((tokens + 1 + page_tokens) * size + group * (size + columns)) * item,
        transcendentals=count * kv_heads * group * tokens,
    )
    spread = () if sinks is None else (sinks.astype(jnp.float32)[..., None],)
    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=2,
        grid=(cores, own),
        in_specs=[
            of_row,
            pl.BlockSpec((None, kv_heads, size), lambda core, row, *_: (core * own + row, 0, 0)),
            pl.BlockSpec(memory_space=pltpu.HBM),
            *(pl.BlockSpec((kv_heads, group, 1), lambda *_: (0, 0, 0)) for _ in spread),
        ],
        out_specs=[
            pl.BlockSpec((None, *out.shape[1:]), lambda core, row, *_: (core * own + row, 0, 0, 0)),
            pl.BlockSpec(memory_space=pltpu.HBM),
        ],
        scratch_shapes=[
            pltpu.VMEM((2, block, *page), values.dtype),
            pltpu.VMEM((kv_heads, group, columns), jnp.float32),
            pltpu.SMEM((1,), jnp.int32),
            pltpu.SemaphoreType.DMA((3,)),
        ],
    )
    # XLA:TPU would copy a pool that fits VMEM there, and back.
    pool = pltpu.with_memory_space_constraint(values.reshape(-1, *page), pltpu.HBM)
    attended, written = pl.pallas_call(
        partial(_kernel, scores, pages=pages, block=block, least=least),
        grid_spec=grid,
        out_shape=[out, jax.ShapeDtypeStruct(pool.shape, pool.dtype)],
        # Tables and ``last`` count too.
        input_output_aliases={4: 1},
        cost_estimate=cost,
        # Tables name pages of the pool; checks of each copy's bounds would take longer than the copy.
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary"), disable_bounds_checks=True),
        name="row_attention",
    )(tables.reshape(-1), last, q, new, pool, *spread)
    return attended, written.reshape(values.shape)


def _kernel(
    scores: Scores, tables_ref: Any, last_ref: Any, q_ref: Any, new_ref: Any, pool_ref: Any, *refs: Any, pages: int,
    block: int, least: float,
) -> None:  # fmt: skip
    """The output of one row: a loop over ``block`` pages at a time, whose copies are one block ahead, over rows too."""
    sinks_ref = refs[0] if len(refs) > 6 else None
    o_ref, written_ref, buffers, summed_ref, slot_ref, semaphores = refs[-6:]
    own = pl.num_programs(1)
    begin = pl.program_id(0) * own
    row = begin + pl.program_id(1)
    kv_heads, group, columns = summed_ref.shape
    page_tokens, size = buffers.shape[3:]

    def pages_of(row: Any) -> Any:
        """Pages in use, at least one."""
        return jnp.clip(lax.div(last_ref[row], page_tokens) + 1, 1, pages)

    def in_block(row: Any, index: Any) -> Any:
        return jnp.minimum(block, pages_of(row) - index * block)

    def copy(row: Any, index: Any, slot: Any, at: Any) -> Any:
        page = tables_ref[row * pages + index * block + at]
        return pltpu.make_async_copy(pool_ref.at[page], buffers.at[slot, at], semaphores.at[slot])

    def of_pages(row: Any, index: Any, do: Callable[[Any], None]) -> None:
        """``do`` for each page of a block."""
        count = in_block(row, index)
        groups = lax.div(count, _UNROLLED)

        def several(group: Any, _: None) -> None:
            for at in range(_UNROLLED):
                do(group * _UNROLLED + at)

        lax.fori_loop(0, groups, several, None)
        lax.fori_loop(groups * _UNROLLED, count, lambda at, _: do(at), None)

    def start(row: Any, index: Any, slot: Any) -> None:
        of_pages(row, index, lambda at: copy(row, index, slot, at).start())

    def wait(row: Any, index: Any, slot: Any) -> None:
        of_pages(row, index, lambda at: copy(row, index, slot, at).wait())

    @pl.when(row == begin)
    def _() -> None:
        # Weights of tokens that do not exist are zero, but what they multiply must be finite.
        buffers[...] = jnp.zeros_like(buffers)
        slot_ref[0] = 0
        start(row, 0, 0)

    first, blocks, last = slot_ref[0], lax.div(pages_of(row) + block - 1, block), last_ref[row]
    summed_ref[...] = jnp.zeros_like(summed_ref)

    def write() -> Any:
        """The copy of the page of the new token, the last one of the last block, to the pool."""
        slot, at = lax.rem(first + blocks - 1, 2), in_block(row, blocks - 1) - 1
        page = tables_ref[row * pages + pages_of(row) - 1]
        return pltpu.make_async_copy(buffers.at[slot, at], written_ref.at[page], semaphores.at[2])

    def add(index: Any, carry: tuple[tuple[jax.Array, jax.Array], ...]) -> tuple[tuple[jax.Array, jax.Array], ...]:
        slot = lax.rem(first + index, 2)
        ends = index + 1 == blocks
        following = row + ends.astype(jnp.int32)

        @pl.when(following < begin + own)
        def _() -> None:
            start(following, jnp.where(ends, 0, index + 1), 1 - slot)

        wait(row, index, slot)

        @pl.when(ends & (last >= 0))
        def _() -> None:
            at, token = in_block(row, index) - 1, new_ref[...].astype(jnp.float32)
            own = lax.broadcasted_iota(jnp.int32, (page_tokens, size), 0) == lax.rem(last, page_tokens)
            for head in range(kv_heads):
                page = jnp.where(own, token[head : head + 1], buffers[slot, at, head].astype(jnp.float32))
                buffers[slot, at, head] = page.astype(buffers.dtype)
            write().start()

        position = index * (block * page_tokens) + lax.broadcasted_iota(jnp.int32, (1, block * page_tokens), 1)
        seen, sums = scores.seen(last - position), []
        for head, (top, total) in enumerate(carry):
            cached = buffers[slot, :, head].reshape(block * page_tokens, size)
            logits = lax.dot_general(q_ref[head], cached, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
            logits = jnp.where(seen, scores.scaled(logits), least)
            raised = jnp.maximum(top, logits.max(1, keepdims=True))
            weights, factor = jnp.where(seen, jnp.exp(logits - raised), 0), jnp.exp(top - raised)
            more = jnp.dot(weights.astype(cached.dtype), cached[:, :columns], preferred_element_type=jnp.float32)
            summed_ref[head] = factor * summed_ref[head] + more
            sums.append((raised, factor * total + weights.sum(1, keepdims=True)))
        return tuple(sums)

    def none(head: int) -> tuple[jax.Array, jax.Array]:
        if sinks_ref is not None:
            return sinks_ref[head], jnp.ones((group, 1), jnp.float32)
        return jnp.full((group, 1), least, jnp.float32), jnp.zeros((group, 1), jnp.float32)

    sums = lax.fori_loop(0, blocks, add, tuple(none(head) for head in range(kv_heads)))
    slot_ref[0] = lax.rem(first + blocks, 2)

    @pl.when(last >= 0)
    def _() -> None:
        write().wait()

    for head, (_, total) in enumerate(sums):
        o_ref[head] = (summed_ref[head] / jnp.where(total == 0, 1.0, total)).astype(o_ref.dtype)
