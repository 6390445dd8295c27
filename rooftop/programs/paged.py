"""Attention over a KV cache of pages: writing the new tokens' keys and values, and reading those of a sequence.

Dims: R rows (sequences of a step), C new tokens of a row, P pages of its block table, p tokens of a page, S = P p; n
and k the query and key/value heads of one device, H head size.

A layer's pool is [pages + 1, p, 2 k, H], key and value of a head side by side: the layout of JAX's ragged paged
attention for TPU. Latent attention caches one row of kv_rank + d_rope elements for all heads: [pages + 1, p, 1, ...].
The last page takes what is written for padding. Two ways of reading:

- ``gather``: pages are gathered by the block table, at most ``BLOCK`` tokens of a sequence at a time, with a running
  softmax over as many blocks as the longest sequence of the step needs. On any backend, for every model;
- ``ragged``: JAX's kernel for TPU (``jax.experimental.pallas.ops.tpu.ragged_paged_attention``), which reads only the
  pages that there are. No sinks, no latents, heads of a multiple of 128, and no quantised cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from rooftop.errors import RooftopError, unknown
from rooftop.models import ModelConfig
from rooftop.programs.attention_scores import LANES, Scores
from rooftop.programs.sharding import varying_as

READERS: tuple[str, ...] = ("gather", "ragged")
#: Tokens of a sequence whose keys and values are gathered at a time.
BLOCK = 1024
#: Tokens of the cache and queries that the kernel takes at a time: what fits VMEM for 8 key/value heads of 128.
_KERNEL_TOKENS, _KERNEL_QUERIES = 512, 32


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Pages:
    """The pool of one layer: values [pages + 1, p, heads, H], and of an int8 cache ``scales`` [pages + 1, p, heads].

    A value is its int8 times its scale; there is one for each token and head.
    """

    values: jax.Array
    scales: jax.Array | None = None

    def write(self, page: jax.Array, offset: jax.Array, rows: jax.Array) -> Pages:
        """Put rows [..., heads, H] at ``offset`` [...] of ``page`` [...]."""
        if page.size == 1:
            # XLA makes a slice of a single place, updates it once more where it is read, and copies the pool for that.
            page, offset, rows = (jnp.repeat(each, 2, axis=0) for each in (page, offset, rows))
        if self.scales is None:
            return Pages(values=self.values.at[page, offset].set(rows.astype(self.values.dtype)))
        wide = rows.astype(jnp.float32)
        scale = jnp.maximum(jnp.max(jnp.abs(wide), axis=-1), 1e-30) / 127
        return Pages(
            values=self.values.at[page, offset].set(jnp.round(wide / scale[..., None]).astype(jnp.int8)),
            scales=self.scales.at[page, offset].set(scale),
        )

    def read(self, table: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """The tokens of the pages ``table`` [R, P]: [R, P p, heads, H]."""
        values = self.values.at[table].get(mode="promise_in_bounds")
        if self.scales is not None:
            scales = self.scales.at[table].get(mode="promise_in_bounds")
            values = (values.astype(jnp.float32) * scales[..., None]).astype(dtype)
        return values.reshape(table.shape[0], -1, *values.shape[3:])


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Rows:
    """Where a step's new tokens stand: block tables [R, P], ``start`` [R] tokens before them, ``count`` [R] of them.

    A row has room for C tokens, of which the first ``count`` are there. The table reaches to the last of these.
    """

    tables: jax.Array
    start: jax.Array
    count: jax.Array

    def positions(self, width: int) -> jax.Array:
        """Positions of the new tokens in their sequences, padding included: [R, C = ``width``]."""
        return self.start[:, None] + jnp.arange(width, dtype=jnp.int32)

    def places(self, width: int, page_tokens: int, scratch: int) -> tuple[jax.Array, jax.Array]:
        """Page and offset in it of each new token, [R, C]; ``scratch`` for padding."""
        positions = self.positions(width)
        index = jnp.minimum(positions // page_tokens, self.tables.shape[1] - 1)
        page = jnp.take_along_axis(self.tables, index, axis=1)
        there = jnp.arange(width) < self.count[:, None]
        return jnp.where(there, page, scratch), positions % page_tokens


def require_reader(reader: str, model: ModelConfig, *, quantised: bool) -> None:
    """Raises RooftopError for an unknown reader, and for what the kernel does not do."""
    if reader not in READERS:
        raise unknown("paged attention", reader, READERS)
    if reader == "ragged":
        for what, has in (
            ("latent attention", model.mla is not None),
            ("attention sinks", model.attention_sinks),
            (f"heads of {model.d_head}, no multiple of {LANES}", model.d_head % LANES != 0),
            ("an int8 cache", quantised),
        ):
            if has:
                raise RooftopError("paged attention", reader, f"gather: {model.name} has {what}")


def best_reader(model: ModelConfig, platform: str, *, quantised: bool) -> str:
    """The kernel on TPU where the model allows, else gather."""
    try:
        require_reader("ragged", model, quantised=quantised)
    except RooftopError:
        return "gather"
    return "ragged" if platform == "tpu" else "gather"


def attend_heads(
    reader: str,
    scores: Scores,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    sinks: jax.Array | None,
    pool: Pages,
    rows: Rows,
) -> tuple[jax.Array, Pages]:
    """Attention of new tokens, on one device: q [R, C, n, H], k and v [R, C, k, H] of them -> o [R, C, n, H], the pool.

    Keys and values are written first, and then read with all before them.
    """
    pages, page_tokens = pool.values.shape[:2]
    with_values = jnp.stack([k, v], axis=3).reshape(*k.shape[:2], -1, k.shape[3])
    pool = pool.write(*rows.places(q.shape[1], page_tokens, pages - 1), with_values)
    if reader == "ragged":
        return _ragged(scores, q, pool, rows), pool

    def read(table: jax.Array) -> tuple[jax.Array, jax.Array]:
        both = pool.read(table, q.dtype)
        both = both.reshape(*both.shape[:2], -1, 2, both.shape[3])
        return both[:, :, :, 0], both[:, :, :, 1]

    return _gathered(scores, q, sinks, rows, page_tokens, read), pool


def attend_latents(
    scores: Scores, q: jax.Array, latent: jax.Array, shared: jax.Array, pool: Pages, rows: Rows
) -> tuple[jax.Array, Pages]:
    """Attention in the space of latents, on one device (DeepSeek-V2 paper, section 2.1.2): no key is ever expanded.

    q [R, C, n, kv_rank + d_rope], its first part multiplied by the keys' up-projection; latent [R, C, kv_rank] and
    shared [R, C, d_rope] of the new tokens. Outputs o [R, C, n, kv_rank] are sums of latents.
    """
    pages, page_tokens = pool.values.shape[:2]
    rank = latent.shape[-1]
    both = jnp.concatenate([latent, shared], axis=-1)[:, :, None]
    pool = pool.write(*rows.places(q.shape[1], page_tokens, pages - 1), both)

    def read(table: jax.Array) -> tuple[jax.Array, jax.Array]:
        both = pool.read(table, q.dtype)
        return both, both[..., :rank]

    return _gathered(scores, q, None, rows, page_tokens, read), pool


#: Keys [R, S, k, H] and values [R, S, k, d_v] of the pages of a table.
_Read = Callable[[jax.Array], tuple[jax.Array, jax.Array]]


def _gathered(
    scores: Scores, q: jax.Array, sinks: jax.Array | None, rows: Rows, page_tokens: int, read: _Read
) -> jax.Array:
    """[R, C, n, d_v]: softmax over the tokens that the tables hold, as far as each query may see."""
    width, (count, pages) = q.shape[1], rows.tables.shape
    positions = rows.positions(width)
    step = min(pages, max(1, BLOCK // page_tokens))
    blocks = -(-pages // step)

    def part(table: jax.Array, first: jax.Array | int) -> tuple[jax.Array, jax.Array]:
        """Scores [R, k, g, C, S] of the tokens from ``first`` on, -inf where a query does not see them; values."""
        k, v = read(table)
        found = scores.logits(q.reshape(count, width, k.shape[2], -1, q.shape[3]), k)
        behind = positions[:, :, None] - (first + jnp.arange(k.shape[1], dtype=jnp.int32))
        seen = behind >= 0
        if scores.window is not None:
            seen &= behind < scores.window
        return jnp.where(seen[:, None, None], found, -jnp.inf), v

    def joined(carry: _Sums, table: jax.Array, first: jax.Array | int) -> _Sums:
        top, total, summed = carry
        found, v = part(table, first)
        raised = jnp.maximum(top, found.max(-1))
        # A query with no key so far: its weights must be 0, not exp(-inf + inf).
        against = jnp.where(jnp.isneginf(raised), 0.0, raised)
        weights, kept = jnp.exp(found - against[..., None]), jnp.exp(top - against)
        more = jnp.einsum("rkgcs,rskh->rkgch", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
        return raised, kept * total + weights.sum(-1), kept[..., None] * summed + more

    k, v = jax.eval_shape(read, rows.tables)
    heads = (count, k.shape[2], q.shape[2] // k.shape[2], width)
    first: _Sums = (
        varying_as(jnp.full(heads, -jnp.inf, jnp.float32), q),
        varying_as(jnp.zeros(heads, jnp.float32), q),
        varying_as(jnp.zeros((*heads, v.shape[3]), jnp.float32), q),
    )
    if blocks == 1:
        top, total, summed = joined(first, rows.tables, 0)
    else:
        tables = jnp.pad(rows.tables, ((0, 0), (0, blocks * step - pages)))

        def body(index: jax.Array, carry: _Sums) -> _Sums:
            table = lax.dynamic_slice_in_dim(tables, index * step, step, axis=1)
            return joined(carry, table, index * step * page_tokens)

        longest = jnp.max(rows.start + rows.count)
        trips = jnp.minimum(-(-longest // (step * page_tokens)), blocks)
        top, total, summed = lax.fori_loop(0, trips, body, first)
    if sinks is not None:
        sink = sinks.astype(jnp.float32).reshape(heads[1:3])[None, :, :, None]
        raised = jnp.maximum(top, sink)
        kept = jnp.exp(top - raised)
        total, summed = kept * total + jnp.exp(sink - raised), kept[..., None] * summed
    # Padding may see nothing; what it yields is never used, but must be a number.
    o = summed / jnp.where(total == 0, 1.0, total)[..., None]
    return jnp.moveaxis(o, 3, 1).reshape(count, width, q.shape[2], -1).astype(q.dtype)


#: The largest score so far [R, k, g, C], and by it the sums of weights and of weighted values [R, k, g, C, d_v].
_Sums = tuple[jax.Array, jax.Array, jax.Array]


def _ragged(scores: Scores, q: jax.Array, pool: Pages, rows: Rows) -> jax.Array:
    """The same by the TPU kernel: every row has C queries, those of padding behind the others, where none sees them."""
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

    count, width = q.shape[:2]
    room = rows.tables.shape[1] * pool.values.shape[1]
    o = ragged_paged_attention(
        q.reshape(count * width, *q.shape[2:]),
        pool.values,
        jnp.minimum(rows.start + width, room),
        rows.tables,
        jnp.arange(count + 1, dtype=jnp.int32) * width,
        jnp.full((1,), count, jnp.int32),
        sm_scale=scores.scale,
        sliding_window=scores.window,
        soft_cap=scores.softcap,
        # By itself it asks the first device for its kind, which is another one where a program is compiled ahead.
        num_kv_pages_per_block=min(rows.tables.shape[1], max(1, _KERNEL_TOKENS // pool.values.shape[1])),
        num_queries_per_block=min(count * width, _KERNEL_QUERIES),
    )
    return o.reshape(q.shape)
