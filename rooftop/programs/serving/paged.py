"""Attention over a KV cache of pages: write the keys and values of new tokens, and read those of their sequences.

Dims: R rows (sequences of a step), C new tokens of a row, T = R C of all rows (of several ``Rows``, concatenated), P
pages of a row's block table, p tokens of a page; n and k the query and key/value heads of one device, g = n/k, H head
size.

A layer's pool is [pages + 1, 2, k, p, H]: in each page the keys of all heads, then the values. Latent attention caches
one row of kv_rank + d_rope elements for all heads: [pages + 1, 1, 1, p, W]. The last page receives writes of padding.
A TPU has rows W of whole ``LANES``: it stores an array whose last dim is no multiple of them with another dim last, and
would copy the pool in each step to read and to write rows. Elements behind a row's are zeros. Keys and values of heads
that are no such multiple share a row: [pages + 1, 1, k, p, W], W at least 2 H.
There are five readers:

- ``gather``: gathers pages by the block table, at most ``BLOCK`` tokens of a sequence at a time, with a running softmax
  over as many blocks as the longest sequence of the step needs. It runs on any backend, for every model;
- ``blocked``: the same for a few rows and tokens at a time, so that gathered data is still in a CPU's cache when it is
  multiplied, and rows are read up to the longest one of their group;
- ``ragged``: JAX's kernel for TPU (``jax.experimental.pallas.ops.tpu.ragged_paged_attention``), which reads only
  existing pages. It supports no sinks, no latents, no quantised cache and no ``PageParts``, and needs heads of a
  multiple of 128. Its pools are [pages + 1, p, 2 k, H], with the key and the value of a head adjacent, and tokens are
  written by ``rooftop.programs.serving.write_kernel``;
- ``rows``: for TPUs, ``rooftop.programs.serving.row_kernel`` for rows that generate, which reads only existing pages
  and writes the new token, and ``gather`` for prompts. It supports latents, and heads whose keys and values share a
  row; no quantised cache;
- ``kernel``: for GPUs, ``rooftop.programs.serving.paged_kernel`` for rows that generate, which reads only existing
  tokens, and ``gather`` for prompts. It supports no latents, and head sizes of powers of two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import prod

import jax
import jax.numpy as jnp
from jax import lax, named_scope
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Shaped

from rooftop.core.errors import RooftopError, unknown
from rooftop.core.rounding import ceil_div, next_multiple
from rooftop.models import ModelConfig
from rooftop.models.program_sizes import LANES, gathered_blocks, window_pages
from rooftop.programs.attention.scores import Scores
from rooftop.programs.serving.paged_kernel import HEAD_SIZES, paged_sums
from rooftop.programs.serving.row_kernel import PAGE_TOKENS, TABLE_BYTES, row_attention
from rooftop.programs.serving.write_kernel import write_tokens
from rooftop.programs.sharding import varying_as

#: The largest score so far, which is finite, and relative to it the sums of weights and of weighted values [..., d_v].
Sums = tuple[jax.Array, jax.Array, jax.Array]


@dataclass(frozen=True, kw_only=True)
class PageParts:
    """The mesh axes over which the tokens of every page are split; each device stores and reads a part of them.

    ``heads`` are (name, devices). Query heads are split over them too: every device computes attention with the heads
    of all of them, and gets the outputs of its own heads.
    """

    heads: tuple[tuple[str, int], ...] = ()

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes, in the order in which they split a page."""
        return tuple(axis for axis, _ in self.heads)

    @property
    def ways(self) -> int:
        """Number of parts of a page."""
        return prod(size for _, size in self.heads)

    def gathered(self, q: Float[Array, "R C n H"]) -> Float[Array, "R C all_heads H"]:
        """q with the heads of all devices along the axes."""
        return lax.all_gather(q, self.axes, axis=2, tiled=True) if self.axes else q

    def summed(self, sums: Sums) -> Sums:
        """Sums over all tokens of the own heads, from sums over a part of the tokens of all heads: [R, n, C, ...]."""
        top, total, weighted = sums
        raised = lax.pmax(top, self.axes)
        factor = jnp.exp(top - raised)
        own = top.shape[1] // self.ways
        raised = lax.dynamic_slice_in_dim(raised, lax.axis_index(self.axes) * own, own, axis=1)
        total, weighted = factor * total, factor[..., None] * weighted
        total, weighted = (lax.psum_scatter(x, self.axes, scatter_dimension=1, tiled=True) for x in (total, weighted))
        return raised, total, weighted


@dataclass(frozen=True, kw_only=True)
class PagePart:
    """The part of a page of ``page_tokens`` that a device stores: ``own_tokens``, from ``first`` on."""

    parts: PageParts
    page_tokens: int
    own_tokens: int
    first: jax.Array | int

    @classmethod
    def of(cls, parts: PageParts, own_tokens: int) -> PagePart:
        """This device's part."""
        first = lax.axis_index(parts.axes) * own_tokens if parts.axes else 0
        return cls(parts=parts, page_tokens=parts.ways * own_tokens, own_tokens=own_tokens, first=first)

    def tokens(self, first: jax.Array | int, pages: int) -> Int[Array, "pages own_tokens"]:
        """The positions of the local tokens of ``pages`` pages, the first of which begins at ``first``."""
        begin = first + self.first + self.page_tokens * jnp.arange(pages, dtype=jnp.int32)
        return begin[:, None] + jnp.arange(self.own_tokens, dtype=jnp.int32)


READERS: tuple[str, ...] = ("gather", "blocked", "ragged", "rows", "kernel")
#: Tokens of a sequence whose keys and values are gathered at a time.
BLOCK = 1024
#: The same of ``blocked`` for a row that generates; rows per group, and the limit on the queries of a group.
SMALL_BLOCK, GROUP, QUERIES = 32, 8, 32
#: Below all scores; unlike -inf, it can be subtracted from itself.
_LEAST = -1e30
#: Tokens of the cache and queries that the kernel processes at a time: they fit VMEM for 8 key/value heads of 128.
_KERNEL_TOKENS, _KERNEL_QUERIES = 512, 32


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Pages:
    """The pool of one layer: values [pages + 1, 2, k, p, H], and for an int8 cache ``scales`` [pages + 1, 2, k, p].

    A cached number is its int8 value times its scale; each token and head has a scale.
    """

    values: jax.Array
    scales: jax.Array | None = None

    def write(
        self,
        page: Int[Array, " tokens"],
        offset: Int[Array, " tokens"],
        tokens: Float[Array, "tokens parts k H"],
        *,
        by_rows: bool = False,
        unique: bool = False,
    ) -> Pages:
        """Write tokens at ``offset`` of ``page``, and zeros behind their elements.

        ``by_rows`` is for TPUs: XLA:TPU writes rows of a matrix in place, and would copy a pool of more dims to another
        layout. ``unique`` is for GPUs, where XLA else writes with atomic operations, of which two for the same token
        (``_many``) wait for each other: only tokens of padding, and equal ones, have a place in common.
        """
        page, offset, tokens = _many(page, offset, tokens)
        tokens = _widened(tokens, self.values.shape[-1])
        if self.scales is None:
            values, (_, parts, heads, page_tokens, size) = self.values, self.values.shape
            if by_rows:
                first = (page[:, None] * (parts * heads) + jnp.arange(parts * heads, dtype=jnp.int32)) * page_tokens
                rows = values.reshape(-1, size).at[(first + offset[:, None]).reshape(-1)]
                return Pages(values=rows.set(tokens.reshape(-1, size).astype(values.dtype)).reshape(values.shape))
            written = values.at[page, :, :, offset].set(tokens.astype(values.dtype), unique_indices=unique)
            return Pages(values=written)
        wide = tokens.astype(jnp.float32)
        scale = jnp.maximum(jnp.max(jnp.abs(wide), axis=-1), 1e-30) / 127
        return Pages(
            values=self.values.at[page, :, :, offset].set(
                jnp.round(wide / scale[..., None]).astype(jnp.int8), unique_indices=unique
            ),
            scales=self.scales.at[page, :, :, offset].set(scale, unique_indices=unique),
        )

    def read(
        self, part: int, table: Int[Array, "R P"], dtype: DTypeLike, *, by_rows: bool = False
    ) -> Float[Array, "R k S H"]:
        """The keys (``part`` 0) or values (1) of the pages ``table``, head by head, S = P p tokens.

        ``by_rows`` is the fastest way to copy them on a CPU.
        """
        values = _taken(self.values, part, table, by_rows=by_rows)
        if self.scales is not None:
            scales = _taken(self.scales, part, table, by_rows=by_rows)
            values = (values.astype(jnp.float32) * scales[..., None]).astype(dtype)
        return values


def _taken(
    pool: Shaped[Array, "pages parts k p *rest"], part: int, table: Int[Array, "R P"], *, by_rows: bool
) -> Shaped[Array, "R k S *rest"]:
    """``part`` of the pages ``table``. ``by_rows`` the tokens of a head in a page are a row of a matrix.

    Elsewhere they are a matrix of their own: XLA:TPU would copy the pool to make rows of them. XLA:CPU copies rows
    at the memory's speed. But fused with the reshape that follows, it computes the index of each element, and takes
    twice as long. With ``by_rows`` the copy is in a branch, which is always taken and never fused.
    """
    pages, parts, heads, page_tokens, *rest = pool.shape
    index = (table * parts + part)[:, None] * heads + jnp.arange(heads, dtype=jnp.int32)[:, None]
    matrix = pool.reshape(pages * parts * heads, *((-1,) if by_rows else (page_tokens, *rest)))

    def copied() -> jax.Array:
        return matrix.at[index.reshape(-1)].get(mode="promise_in_bounds")

    def zeros() -> jax.Array:
        return varying_as(varying_as(jnp.zeros((index.size, matrix.shape[1]), pool.dtype), pool), table)

    rows = lax.cond(table[0, 0] >= 0, copied, zeros) if by_rows else copied()
    return rows.reshape(table.shape[0], heads, table.shape[1] * page_tokens, *rest)


def _widened(array: Shaped[Array, "*dims H"], size: int) -> Shaped[Array, "*dims size"]:
    """The array with zeros behind its last dim."""
    if array.shape[-1] == size:
        return array
    return jnp.pad(array, (*((0, 0) for _ in array.shape[:-1]), (0, size - array.shape[-1])))


def _many(page: jax.Array, offset: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Pages, offsets and tokens, repeated if there is only one.

    XLA turns a single update into a slice, which it updates again where it is read, and copies the pool for that.
    """
    if page.size > 1:
        return page, offset, tokens
    return jnp.repeat(page, 2, axis=0), jnp.repeat(offset, 2, axis=0), jnp.repeat(tokens, 2, axis=0)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Rows:
    """The new tokens of a step: block tables [R, P], ``start`` [R] earlier tokens, ``count`` [R] new ones.

    A row has space for C = ``width`` tokens, of which the first ``count`` are valid. The table covers the last of
    these.
    """

    tables: jax.Array
    start: jax.Array
    count: jax.Array
    width: int = field(metadata={"static": True})

    @property
    def tokens(self) -> int:
        """R C."""
        return self.start.shape[0] * self.width

    def positions(self) -> Int[Array, "R C"]:
        """Positions of the new tokens in their sequences, padding included."""
        return self.start[:, None] + jnp.arange(self.width, dtype=jnp.int32)

    def places(self, part: PagePart, scratch: int) -> tuple[Int[Array, "R C"], Int[Array, "R C"]]:
        """Page and offset of each new token; page ``scratch`` for padding and for other devices' tokens."""
        positions = self.positions()
        index = jnp.minimum(positions // part.page_tokens, self.tables.shape[1] - 1)
        page = jnp.take_along_axis(self.tables, index, axis=1)
        there = jnp.arange(self.width) < self.count[:, None]
        offset = positions % part.page_tokens - part.first
        if part.parts.ways > 1:
            there &= (offset >= 0) & (offset < part.own_tokens)
            offset %= part.own_tokens
        return jnp.where(there, page, scratch), offset


#: Pages that are not split.
_WHOLE = PageParts()


def require_reader(reader: str, model: ModelConfig, *, quantised: bool) -> None:
    """Raise RooftopError for an unknown reader, and for a model that the kernel does not support."""
    if reader not in READERS:
        raise unknown("paged attention", reader, READERS)
    if reader == "ragged":
        for feature, has in (
            ("latent attention", model.mla is not None),
            ("attention sinks", model.attention_sinks),
            (f"heads of {model.d_head}, no multiple of {LANES}", model.d_head % LANES != 0),
            ("an int8 cache", quantised),
        ):
            if has:
                raise RooftopError("paged attention", reader, f"gather: {model.name} has {feature}")
    if reader == "rows" and (quantised or (model.mla is None and model.d_head % LANES == 0)):
        feature = "an int8 cache" if quantised else f"heads of {model.d_head}, a multiple of {LANES}"
        raise RooftopError("paged attention", reader, f"gather: {model.name} has {feature}")
    if reader == "kernel" and (model.mla is not None or model.d_head not in HEAD_SIZES):
        feature = "latent attention" if model.mla is not None else f"heads of {model.d_head}, not one of {HEAD_SIZES}"
        raise RooftopError("paged attention", reader, f"gather: {model.name} has {feature}")


def best_reader(model: ModelConfig, platform: str, *, quantised: bool) -> str:
    """The platform's kernel if it supports the model, else ``gather``; ``blocked`` on CPU."""
    if platform == "cpu":
        return "blocked"
    for reader in ("ragged", "rows") if platform == "tpu" else ("kernel",):
        try:
            require_reader(reader, model, quantised=quantised)
        except RooftopError:
            continue
        return reader
    return "gather"


def attend_heads(
    reader: str,
    scores: Scores,
    q: Float[Array, "T n H"],
    k: Float[Array, "T k H"],
    v: Float[Array, "T k H"],
    sinks: Float[Array, " n"] | None,
    pool: Pages,
    rows: Sequence[Rows],
    parts: PageParts = _WHOLE,
) -> tuple[Float[Array, "T n H"], Pages]:
    """Attention of new tokens on one device: outputs, and the pool with their keys and values.

    All keys and values are written first, and then read together with the earlier ones. Each device reads its own
    ``parts`` of pages (not with ``ragged``).
    """
    pages = pool.values.shape[0]
    if reader == "ragged":
        part = PagePart.of(parts, pool.values.shape[1])
        both = jnp.stack([k, v], axis=2).reshape(k.shape[0], -1, k.shape[2]).astype(pool.values.dtype)
        pool = Pages(values=write_tokens(pool.values, *_places(rows, part, pages - 1), both))
        return _by_rows(lambda q, _, rows, pool: (_ragged(scores, q, pool, rows), pool), q, both, rows, pool)
    part, size = PagePart.of(parts, pool.values.shape[3]), q.shape[-1]
    together = pool.values.shape[1] == 1
    new = jnp.concatenate([k, v], axis=-1)[:, None] if together else jnp.stack([k, v], axis=1)
    pool = _written(reader, pool, rows, part, new)
    q = _widened(q, pool.values.shape[-1])

    def attend(q: jax.Array, new: jax.Array, rows: Rows, pool: Pages) -> tuple[jax.Array, Pages]:
        if _has_row_kernel(reader, pool, rows):
            return _from_row_kernel(scores, q, new, sinks, pool, rows, q.shape[-1])
        if reader == "kernel" and rows.width == 1:
            return _from_kernel(scores, q, sinks, pool, rows), pool

        def read(table: jax.Array) -> tuple[jax.Array, jax.Array]:
            parts = range(1 if together else 2)
            k, *v = (pool.read(part, table, q.dtype, by_rows=reader == "blocked") for part in parts)
            return k, v[0] if v else k

        by = "gather" if reader in ("kernel", "rows") else reader
        return _attended(by, scores, q, sinks, rows, read, part), pool

    o, pool = _by_rows(attend, q, new, rows, pool)
    return o[..., size : 2 * size] if together else o, pool


def attend_latents(
    reader: str,
    scores: Scores,
    q: Float[Array, "T n d_qk"],
    latent: Float[Array, "T kv_rank"],
    shared: Float[Array, "T d_rope"],
    pool: Pages,
    rows: Sequence[Rows],
    parts: PageParts = _WHOLE,
) -> tuple[Float[Array, "T n kv_rank"], Pages]:
    """Attention in the space of latents, on one device (DeepSeek-V2 paper, section 2.1.2): keys are never expanded.

    The first part of q is multiplied by the keys' up-projection already. Outputs are sums of latents.
    """
    part, rank = PagePart.of(parts, pool.values.shape[3]), latent.shape[-1]
    both = jnp.concatenate([latent, shared], axis=-1)[:, None, None]
    pool = _written(reader, pool, rows, part, both)
    q = _widened(q, pool.values.shape[-1])

    def attend(q: jax.Array, new: jax.Array, rows: Rows, pool: Pages) -> tuple[jax.Array, Pages]:
        if _has_row_kernel(reader, pool, rows):
            o, pool = _from_row_kernel(scores, q, new, None, pool, rows, next_multiple(rank, LANES))
            return o[..., :rank], pool

        def read(table: jax.Array) -> tuple[jax.Array, jax.Array]:
            both = pool.read(0, table, q.dtype, by_rows=reader == "blocked")
            return both, both[..., :rank]

        return _attended("gather" if reader == "rows" else reader, scores, q, None, rows, read, part), pool

    return _by_rows(attend, q, both, rows, pool)


def _written(reader: str, pool: Pages, rows: Sequence[Rows], part: PagePart, new: Float[Array, "T parts k H"]) -> Pages:
    """The pool with the new tokens of the rows, except those that a kernel writes when it reads."""
    apart = _of_rows(new, rows)
    written = [(block, own) for block, own in zip(rows, apart, strict=True) if not _has_row_kernel(reader, pool, block)]
    if not written:
        return pool
    page, offset = _places([block for block, _ in written], part, pool.values.shape[0] - 1)
    tokens = jnp.concatenate([own for _, own in written])
    return pool.write(page, offset, tokens, by_rows=reader in ("gather", "rows"), unique=reader == "kernel")


def _places(rows: Sequence[Rows], part: PagePart, scratch: int) -> tuple[Int[Array, " T"], Int[Array, " T"]]:
    """``Rows.places`` of all rows."""
    flat = [[x.reshape(-1) for x in block.places(part, scratch)] for block in rows]
    page, offset = (jnp.concatenate(x) for x in zip(*flat, strict=True))
    return page, offset


#: Maps the queries [R, C, n, H] of a ``Rows``, its new tokens [R C, ...] and the pool to outputs and the pool.
_Attend = Callable[[jax.Array, jax.Array, Rows, Pages], tuple[jax.Array, Pages]]


def _by_rows(
    attend: _Attend, q: Float[Array, "T n H"], new: Shaped[Array, "T ..."], rows: Sequence[Rows], pool: Pages
) -> tuple[Float[Array, "T n d_v"], Pages]:
    """Outputs of queries and the pool; ``attend`` processes each of the ``rows``."""
    outputs = list[jax.Array]()
    for block, queries, own in zip(rows, _of_rows(q, rows), _of_rows(new, rows), strict=True):
        o, pool = attend(queries.reshape(-1, block.width, *q.shape[1:]), own, block, pool)
        outputs.append(o.reshape(-1, *o.shape[2:]))
    return jnp.concatenate(outputs), pool


def _of_rows(tokens: Shaped[Array, "T ..."], rows: Sequence[Rows]) -> list[jax.Array]:
    """The tokens [R C, ...] of each of the ``rows``."""
    ends = list(accumulate(block.tokens for block in rows))
    return [tokens[end - block.tokens : end] for block, end in zip(rows, ends, strict=True)]


#: Returns keys [R, k, P p, H] and values [R, k, P p, d_v] of the pages of a table.
_Read = Callable[[jax.Array], tuple[jax.Array, jax.Array]]


def _attended(
    reader: str,
    scores: Scores,
    q: Float[Array, "R C n H"],
    sinks: Float[Array, " n"] | None,
    rows: Rows,
    read: _Read,
    part: PagePart,
) -> Float[Array, "R C n d_v"]:
    """Softmax attention over the tokens of the tables, as far as each query may see."""
    count, width = q.shape[:2]
    q = part.parts.gathered(q)
    rows = _in_window(rows, scores.window, part.page_tokens)
    if reader == "gather":
        return _gathered(scores, q, sinks, rows, read, part, BLOCK if width > 1 else _fitting(q, rows, read, part))
    block = min(max(SMALL_BLOCK, width), BLOCK)
    most = min(GROUP, count, max(1, QUERIES // width))
    size = max(size for size in range(1, most + 1) if count % size == 0)
    if size == count:
        return _gathered(scores, q, sinks, rows, read, part, block)
    groups = jax.tree.map(lambda x: x.reshape(-1, size, *x.shape[1:]), (q, rows))
    outputs = lax.map(lambda group: _gathered(scores, group[0], sinks, group[1], read, part, block), groups)
    return outputs.reshape(count, width, *outputs.shape[3:])


def _in_window(rows: Rows, window: int | None, page_tokens: int) -> Rows:
    """The rows with tables of the pages that their new tokens see, positions relative to the first of these pages."""
    pages = rows.tables.shape[1]
    if window is None or (seen := window_pages(window, rows.width, page_tokens)) >= pages:
        return rows
    first = jnp.clip((rows.start - window + 1) // page_tokens, 0, pages - seen)
    tables = jnp.take_along_axis(rows.tables, first[:, None] + jnp.arange(seen, dtype=jnp.int32), axis=1)
    return replace(rows, tables=tables, start=rows.start - first * page_tokens)


def _fitting(q: Float[Array, "R 1 n H"], rows: Rows, read: _Read, part: PagePart) -> int:
    """Tokens of a block of rows that generate: see ``gathered_blocks``."""
    pages, (keys, _) = rows.tables.shape[1], jax.eval_shape(read, rows.tables)
    scores = 4 * q.shape[0] * q.shape[2] * pages * part.own_tokens
    blocks = int(gathered_blocks(pages, (keys.size * keys.dtype.itemsize + scores) / pages))
    return ceil_div(pages, blocks) * part.own_tokens


def _gathered(
    scores: Scores,
    q: Float[Array, "R C all_heads H"],
    sinks: Float[Array, " n"] | None,
    rows: Rows,
    read: _Read,
    part: PagePart,
    block: int,
) -> Float[Array, "R C n d_v"]:
    """``_attended`` for one group of rows, ``block`` tokens at a time. M = g C are the queries of a key/value head."""
    (count, width, heads, size), pages = q.shape, rows.tables.shape[1]
    k, v = jax.eval_shape(read, rows.tables)
    kv_heads, page_tokens = k.shape[1], k.shape[2] // pages
    group = heads // kv_heads
    q = jnp.moveaxis(q.reshape(count, width, kv_heads, group, size), 1, 3).reshape(count, kv_heads, -1, size)
    positions = jnp.tile(rows.positions(), (1, group))
    step = min(pages, max(1, block // page_tokens))
    blocks = ceil_div(pages, step)

    def joined(carry: Sums, table: jax.Array, first: jax.Array | int) -> Sums:
        """Add the tokens from ``first`` on, which are in the pages of ``table``, to the sums."""
        top, total, summed = carry
        k, v = read(table)
        logits = jnp.einsum("rkmh,rkth->rkmt", q, k, preferred_element_type=jnp.float32)
        distance = positions[:, :, None] - part.tokens(first, step).reshape(-1)
        logits = jnp.where(scores.seen(distance)[:, None], scores.scaled(logits), -jnp.inf)
        raised = jnp.maximum(top, logits.max(3))
        weights, factor = jnp.exp(logits - raised[..., None]), jnp.exp(top - raised)
        more = jnp.einsum("rkmt,rkth->rkmh", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
        return raised, factor * total + weights.sum(3), factor[..., None] * summed + more

    sums = q.shape[:3]
    none: Sums = (
        varying_as(jnp.full(sums, _LEAST, jnp.float32), q),
        varying_as(jnp.zeros(sums, jnp.float32), q),
        varying_as(jnp.zeros((*sums, v.shape[3]), jnp.float32), q),
    )
    if blocks == 1:
        top, total, summed = joined(none, rows.tables, 0)
    else:
        tables = jnp.pad(rows.tables, ((0, 0), (0, blocks * step - pages)))

        def body(index: jax.Array, carry: Sums) -> Sums:
            # The program is for sequences that fill their tables.
            with named_scope(f"trips[{blocks}]"):
                table = lax.dynamic_slice_in_dim(tables, index * step, step, axis=1)
                return joined(carry, table, index * step * part.page_tokens)

        longest = jnp.max(rows.start + rows.count)
        trips = jnp.minimum(-(-longest // (step * part.page_tokens)), blocks)
        top, total, summed = lax.fori_loop(0, trips, body, none)
    top, total, summed = (x.reshape(count, heads, width, *x.shape[3:]) for x in (top, total, summed))
    if part.parts.ways > 1:
        top, total, summed = part.parts.summed((top, total, summed))
    return _divided((top, total, summed), sinks).astype(q.dtype)


def _divided(sums: Sums, sinks: Float[Array, " n"] | None) -> Float[Array, "R C n d_v"]:
    """Outputs from sums [R, n, C, ...] over all tokens, to which sinks add their weights."""
    top, total, summed = sums
    if sinks is not None:
        sink = sinks.astype(jnp.float32)[None, :, None]
        raised = jnp.maximum(top, sink)
        factor = jnp.exp(top - raised)
        total, summed = factor * total + jnp.exp(sink - raised), factor[..., None] * summed
    # Padding may see no token; its output is never used, but must be finite.
    return jnp.moveaxis(summed / jnp.where(total == 0, 1.0, total)[..., None], 1, 2)


def _from_kernel(
    scores: Scores, q: Float[Array, "R 1 n H"], sinks: Float[Array, " n"] | None, pool: Pages, rows: Rows
) -> Float[Array, "R 1 n H"]:
    """Attention of rows that generate, by the kernel for GPUs."""
    (count, _, heads, size), kv_heads = q.shape, pool.values.shape[2]
    rows = _in_window(rows, scores.window, pool.values.shape[3])
    sums = paged_sums(
        scores, q.reshape(count, kv_heads, heads // kv_heads, size), pool.values, pool.scales, rows.tables, rows.start,
        least=_LEAST,
    )  # fmt: skip
    top, total, summed = (x.reshape(count, heads, 1, *x.shape[3:]) for x in sums)
    return _divided((top, total, summed), sinks).astype(q.dtype)


def _has_row_kernel(reader: str, pool: Pages, rows: Rows) -> bool:
    """True for rows that generate, if a token is a row of the pool, and the kernel takes its pages and tables."""
    if reader != "rows" or rows.width > 1 or 4 * rows.tables.size > TABLE_BYTES:
        return False
    _, parts, _, page_tokens, size = pool.values.shape
    return parts == 1 and pool.scales is None and size % LANES == 0 and page_tokens % PAGE_TOKENS == 0


def _from_row_kernel(
    scores: Scores,
    q: Float[Array, "R 1 n W"],
    new: Float[Array, "R 1 k H"],
    sinks: Float[Array, " n"] | None,
    pool: Pages,
    rows: Rows,
    columns: int,
) -> tuple[Float[Array, "R 1 n columns"], Pages]:
    """Attention of rows that generate, by the kernel for TPUs, and the pool with their ``new`` tokens."""
    (count, _, heads, size), kv_heads = q.shape, pool.values.shape[2]
    rows = _in_window(rows, scores.window, pool.values.shape[3])
    o, values = row_attention(
        scores, q.reshape(count, kv_heads, heads // kv_heads, size),
        _widened(new[:, 0], size).astype(pool.values.dtype), pool.values, rows.tables,
        jnp.where(rows.count > 0, rows.start, -1), None if sinks is None else sinks.reshape(kv_heads, -1),
        columns=columns, least=_LEAST,
    )  # fmt: skip
    return o.reshape(count, 1, heads, columns), Pages(values=values)


def _ragged(scores: Scores, q: Float[Array, "R C n H"], pool: Pages, rows: Rows) -> Float[Array, "R C n H"]:
    """Attention by the TPU kernel. Every row has C queries; padding follows the valid ones, where none sees it."""
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

    count, width = q.shape[:2]
    room = rows.tables.shape[1] * pool.values.shape[1]
    o = ragged_paged_attention(
        q.reshape(count * width, *q.shape[2:]),
        # XLA:TPU would copy a pool that fits VMEM there.
        pltpu.with_memory_space_constraint(pool.values, pltpu.HBM),
        jnp.minimum(rows.start + width, room),
        rows.tables,
        jnp.arange(count + 1, dtype=jnp.int32) * width,
        jnp.full((1,), count, jnp.int32),
        sm_scale=scores.scale,
        sliding_window=scores.window,
        soft_cap=scores.softcap,
        # The kernel's defaults depend on the first local device, which is wrong in ahead-of-time compilation.
        num_kv_pages_per_block=min(rows.tables.shape[1], max(1, _KERNEL_TOKENS // pool.values.shape[1])),
        num_queries_per_block=min(count * width, _KERNEL_QUERIES),
    )
    return o.reshape(q.shape)
