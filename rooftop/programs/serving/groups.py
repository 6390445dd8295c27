"""Sequences of a KV cache spread over groups of devices: a group has all pages of its sequences.

The group also computes their attention. Chapter 7 of the book uses this split for devices beyond the number of
key/value heads; plans call it ``kv_split`` batch. A layer's pool has the pages of one group after those of another,
each group's followed by a page for padding; block tables index all of them. Queries change between two shardings: by
heads, as projections return them, and by sequences, as the cache needs them:

- if the rows of a step form equal blocks, one for each group in turn: one AllToAll of queries and one of outputs;
- otherwise (few rows, as in the prefill of one prompt) every group gets all queries and computes attention for its own
  rows. For other rows it reads nothing and adds zeros.

Dims as in ``rooftop.programs.serving.paged``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod

import jax
import jax.numpy as jnp
from jax import P, lax
from jaxtyping import Array, Bool, Float, Int, Shaped

from rooftop.programs.serving.paged import Pages, Rows
from rooftop.programs.sharding import on_shards

#: Maps queries [T, n, H], the new tokens' arrays [T, ...] to be cached, pool and rows to outputs [T, n, ...] and pool.
Attend = Callable[[jax.Array, tuple[jax.Array, ...], Pages, tuple[Rows, ...]], tuple[jax.Array, Pages]]


@dataclass(frozen=True, kw_only=True)
class DeviceGroups:
    """The mesh axes over which sequences are spread, with their sizes [(name, devices)].

    Over ``tokens`` axes the layers split the tokens of a step too, so that rows in blocks are on the right device; over
    ``heads`` axes they split the query heads.
    """

    tokens: tuple[tuple[str, int], ...] = ()
    heads: tuple[tuple[str, int], ...] = ()

    @property
    def axes(self) -> tuple[str, ...]:
        """All axes, in the order in which they count groups."""
        return tuple(axis for axis, _ in (*self.tokens, *self.heads))

    @property
    def ways(self) -> int:
        """Number of groups."""
        return prod(size for _, size in (*self.tokens, *self.heads))

    def attend(
        self,
        attend: Attend,
        q: Float[Array, "T n H"],
        new: tuple[Shaped[Array, "T ..."], ...],
        pool: Pages,
        rows: tuple[Rows, ...],
    ) -> tuple[Float[Array, "T n *size"], Pages]:
        """Outputs of this device's queries for the tokens of the ``rows``: one ``Rows`` if sequences are spread.

        ``new`` has all heads of the group: it is the same along the ``heads`` axes. Runs on one device, in a
        ``shard_map``.
        """
        if not self.axes:
            return attend(q, new, pool, rows)
        (single,) = rows
        blocks = single.start.shape[0] % self.ways == 0
        return (self._in_blocks if blocks else self._everywhere)(attend, q, new, pool, single)

    def _in_blocks(
        self, attend: Attend, q: Float[Array, "T n H"], new: tuple[jax.Array, ...], pool: Pages, rows: Rows
    ) -> tuple[Float[Array, "T n *size"], Pages]:
        size = rows.start.shape[0] // self.ways
        own = jax.tree.map(lambda x: _block(x, self.axes, size), rows)
        own = replace(own, tables=own.tables % pool.values.shape[0])
        heads = tuple(axis for axis, _ in self.heads)
        if heads:
            q = lax.all_to_all(q, heads, split_axis=0, concat_axis=1, tiled=True)
            new = tuple(_block(x, heads, size * rows.width) for x in new)
        o, pool = attend(q, new, pool, (own,))
        if heads:
            o = lax.all_to_all(o, heads, split_axis=1, concat_axis=0, tiled=True)
        return o, pool

    def _everywhere(
        self, attend: Attend, q: Float[Array, "T n H"], new: tuple[jax.Array, ...], pool: Pages, rows: Rows
    ) -> tuple[Float[Array, "T n *size"], Pages]:
        pages = pool.values.shape[0]
        here = rows.tables[:, 0] // pages == lax.axis_index(self.axes)
        own = replace(
            rows,
            tables=jnp.where(here[:, None], rows.tables % pages, pages - 1),
            start=jnp.where(here, rows.start, 0),
            count=jnp.where(here, rows.count, 0),
        )
        tokens, heads = (tuple(axis for axis, _ in x) for x in (self.tokens, self.heads))
        if tokens:
            q, *others = (lax.all_gather(x, tokens, axis=0, tiled=True) for x in (q, *new))
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

    def of_heads(self, array: Float[Array, " n"]) -> Float[Array, " all_heads"]:
        """Values of the local query heads, gathered over all heads with which this device computes attention."""
        heads = tuple(axis for axis, _ in self.heads)
        return lax.all_gather(array, heads, axis=0, tiled=True) if heads else array

    def take(self, pool: Shaped[Array, " pages *page"], pages: Int[Array, " m"], spec: P) -> Shaped[Array, " m *page"]:
        """The contents of ``pages`` of a pool that is split by ``spec``, replicated over all groups."""
        if not self.axes:
            return pool[pages]

        def local(pool: jax.Array, pages: jax.Array) -> jax.Array:
            here, page = self._own(pool, pages)
            contents = jnp.where(here.reshape(-1, *(1 for _ in pool.shape[1:])), pool[page], jnp.zeros((), pool.dtype))
            return lax.psum(contents, self.axes)

        apart = P(None, *spec.partitions[1:])
        contents: jax.Array = on_shards(local, in_specs=(spec, P(None)), out_specs=apart)(pool, pages)
        return contents

    def put(
        self, pool: Shaped[Array, " pages *page"], pages: Int[Array, " m"], contents: Shaped[Array, " m *page"], spec: P
    ) -> Shaped[Array, " pages *page"]:
        """The pool with ``contents``, as returned by ``take``, in ``pages``."""
        if not self.axes:
            return pool.at[pages].set(contents)

        def local(pool: jax.Array, pages: jax.Array, contents: jax.Array) -> jax.Array:
            _, page = self._own(pool, pages)
            return pool.at[page].set(contents)

        apart = P(None, *spec.partitions[1:])
        updated: jax.Array = on_shards(local, in_specs=(spec, P(None), apart), out_specs=spec)(pool, pages, contents)
        return updated

    def _own(self, pool: jax.Array, pages: Int[Array, " m"]) -> tuple[Bool[Array, " m"], Int[Array, " m"]]:
        """Mask of the pages of this group, and their index in its pool; other pages get that of the padding page."""
        here = pages // pool.shape[0] == lax.axis_index(self.axes)
        return here, jnp.where(here, pages % pool.shape[0], pool.shape[0] - 1)


def _block(array: Shaped[Array, " all *rest"], axes: tuple[str, ...], size: int) -> Shaped[Array, " size *rest"]:
    """This device's ``size`` elements of the first dim along ``axes``."""
    return lax.dynamic_slice_in_dim(array, lax.axis_index(axes) * size, size, axis=0)
