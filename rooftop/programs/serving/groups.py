"""Sequences of a KV cache spread over groups of devices: each sequence has all its pages on one group, which attends.

The split that chapter 7 of the book has for what key/value heads leave over, and that plans call ``kv_split`` batch.
A layer's pool has the pages of one group after those of another, each group's with one for padding behind them; block
tables count through all of them. Queries change between two ways of being split, by heads as projections leave them
and by sequences as the cache needs them:

- where the rows of a step are in equal blocks, one for each group in turn, by one AllToAll of queries, one of outputs;
- else (few rows, as in the prefill of one prompt) every group gets all queries and attends for those of its own rows.
  Others read nothing for them, and add zeros.

Dims as in ``rooftop.programs.serving.paged``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod

import jax
import jax.numpy as jnp
from jax import P, lax

from rooftop.programs.serving.paged import Pages, Rows
from rooftop.programs.sharding import on_shards

#: Of queries [T, n, H], what is cached of the new tokens [T, ...] each, pool, rows: outputs [T, n, ...], pool.
Attend = Callable[[jax.Array, tuple[jax.Array, ...], Pages, tuple[Rows, ...]], tuple[jax.Array, Pages]]


@dataclass(frozen=True, kw_only=True)
class DeviceGroups:
    """The mesh axes over which sequences are spread, with their sizes [(name, devices)].

    Over ``tokens`` axes the layers have the tokens of a step split as well, so that rows in blocks are where they
    belong; over ``heads`` axes they have the query heads split.
    """

    tokens: tuple[tuple[str, int], ...] = ()
    heads: tuple[tuple[str, int], ...] = ()

    @property
    def axes(self) -> tuple[str, ...]:
        """All of them, in the order in which they count groups."""
        return tuple(axis for axis, _ in (*self.tokens, *self.heads))

    @property
    def ways(self) -> int:
        """How many groups there are."""
        return prod(size for _, size in (*self.tokens, *self.heads))

    def attend(
        self, attend: Attend, q: jax.Array, new: tuple[jax.Array, ...], pool: Pages, rows: tuple[Rows, ...]
    ) -> tuple[jax.Array, Pages]:
        """Outputs [T, n, ...] of queries [T, n, H] of this device, the tokens of the ``rows``: one of them if split.

        ``new`` [T, ...] has all heads of the group: it is alike over the ``heads`` axes. On one device of many, in a
        ``shard_map``.
        """
        if not self.axes:
            return attend(q, new, pool, rows)
        (one,) = rows
        blocks = one.start.shape[0] % self.ways == 0
        return (self._in_blocks if blocks else self._everywhere)(attend, q, new, pool, one)

    def _in_blocks(
        self, attend: Attend, q: jax.Array, new: tuple[jax.Array, ...], pool: Pages, rows: Rows
    ) -> tuple[jax.Array, Pages]:
        size = rows.start.shape[0] // self.ways
        own = jax.tree.map(lambda each: _block(each, self.axes, size), rows)
        own = replace(own, tables=own.tables % pool.values.shape[0])
        heads = tuple(axis for axis, _ in self.heads)
        if heads:
            q = lax.all_to_all(q, heads, split_axis=0, concat_axis=1, tiled=True)
            new = tuple(_block(each, heads, size * rows.width) for each in new)
        o, pool = attend(q, new, pool, (own,))
        if heads:
            o = lax.all_to_all(o, heads, split_axis=1, concat_axis=0, tiled=True)
        return o, pool

    def _everywhere(
        self, attend: Attend, q: jax.Array, new: tuple[jax.Array, ...], pool: Pages, rows: Rows
    ) -> tuple[jax.Array, Pages]:
        pages = pool.values.shape[0]
        here = rows.tables[:, 0] // pages == lax.axis_index(self.axes)
        own = replace(
            rows,
            tables=jnp.where(here[:, None], rows.tables % pages, pages - 1),
            start=jnp.where(here, rows.start, 0),
            count=jnp.where(here, rows.count, 0),
        )
        tokens, heads = (tuple(axis for axis, _ in each) for each in (self.tokens, self.heads))
        if tokens:
            q, *others = (lax.all_gather(each, tokens, axis=0, tiled=True) for each in (q, *new))
            new = tuple(others)
        if heads:
            q = lax.all_gather(q, heads, axis=1, tiled=True)
        o, pool = attend(q, new, pool, (own,))
        here = jnp.repeat(here, rows.width)
        o = jnp.where(here.reshape(-1, *(1 for _ in o.shape[1:])), o, 0)
        if heads:
            o = lax.psum_scatter(o, heads, scatter_dimension=1, tiled=True)
        if tokens:
            o = lax.psum_scatter(o, tokens, scatter_dimension=0, tiled=True)
        return o, pool

    def of_heads(self, array: jax.Array) -> jax.Array:
        """[n] of the query heads here as those of all heads with which this device attends."""
        heads = tuple(axis for axis, _ in self.heads)
        return lax.all_gather(array, heads, axis=0, tiled=True) if heads else array

    def take(self, pool: jax.Array, pages: jax.Array, spec: P) -> jax.Array:
        """The contents of ``pages`` [m] of a pool [all pages, ...] that is split as ``spec``, alike in all groups."""
        if not self.axes:
            return pool[pages]

        def local(pool: jax.Array, pages: jax.Array) -> jax.Array:
            here, page = self._own(pool, pages)
            found = jnp.where(here.reshape(-1, *(1 for _ in pool.shape[1:])), pool[page], jnp.zeros((), pool.dtype))
            return lax.psum(found, self.axes)

        apart = P(None, *spec.partitions[1:])
        found: jax.Array = on_shards(local, in_specs=(spec, P(None)), out_specs=apart)(pool, pages)
        return found

    def put(self, pool: jax.Array, pages: jax.Array, contents: jax.Array, spec: P) -> jax.Array:
        """The pool with ``contents`` [m, ...], as ``take`` gives them, in ``pages`` [m]."""
        if not self.axes:
            return pool.at[pages].set(contents)

        def local(pool: jax.Array, pages: jax.Array, contents: jax.Array) -> jax.Array:
            _, page = self._own(pool, pages)
            return pool.at[page].set(contents)

        apart = P(None, *spec.partitions[1:])
        found: jax.Array = on_shards(local, in_specs=(spec, P(None), apart), out_specs=spec)(pool, pages, contents)
        return found

    def _own(self, pool: jax.Array, pages: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Which pages are of this group; and where they are in its pool: others where padding goes."""
        here = pages // pool.shape[0] == lax.axis_index(self.axes)
        return here, jnp.where(here, pages % pool.shape[0], pool.shape[0] - 1)


def _block(array: jax.Array, axes: tuple[str, ...], size: int) -> jax.Array:
    """The ``size`` elements of the first dim that are this device's along ``axes``."""
    return lax.dynamic_slice_in_dim(array, lax.axis_index(axes) * size, size, axis=0)
