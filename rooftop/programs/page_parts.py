"""Pages of a KV cache whose tokens are split over devices: where each one's are, and attention from all parts.

Of every page each device has some tokens, so that whatever a step reads, they read equal parts of it, and of a long
sequence too: one sequence is enough to use all of the cache, where ``rooftop.programs.page_groups`` needs one for each
group. Queries are gathered, and outputs scattered: the split that plans call ``kv_split`` seq.

Dims as in ``rooftop.programs.paged``.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import jax
import jax.numpy as jnp
from jax import lax

#: The largest score so far, a finite number, and by it the sums of weights and of weighted values [..., d_v].
Sums = tuple[jax.Array, jax.Array, jax.Array]


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The mesh axes over which the tokens of every page are split, so that each device has and reads a part of them.

    Query heads are split over them too: every device attends with all of theirs, and gets back the outputs of its own.
    With their sizes, [(name, devices)].
    """

    heads: tuple[tuple[str, int], ...] = ()

    @property
    def axes(self) -> tuple[str, ...]:
        """In the order in which they split a page."""
        return tuple(axis for axis, _ in self.heads)

    @property
    def ways(self) -> int:
        """In how many parts a page is."""
        return prod(size for _, size in self.heads)

    def gathered(self, q: jax.Array) -> jax.Array:
        """q [R, C, n, H] with the heads of all devices along the axes."""
        return lax.all_gather(q, self.axes, axis=2, tiled=True) if self.axes else q

    def summed(self, sums: Sums) -> Sums:
        """Sums over parts of the tokens as those over all: [R, n, C, ...] of all heads here to those of own heads."""
        top, total, weighted = sums
        raised = lax.pmax(top, self.axes)
        kept = jnp.exp(top - raised)
        own = top.shape[1] // self.ways
        raised = lax.dynamic_slice_in_dim(raised, lax.axis_index(self.axes) * own, own, axis=1)
        total, weighted = kept * total, kept[..., None] * weighted
        total, weighted = (
            lax.psum_scatter(each, self.axes, scatter_dimension=1, tiled=True) for each in (total, weighted)
        )
        return raised, total, weighted


@dataclass(frozen=True, kw_only=True)
class Part:
    """What of a page of ``page_tokens`` one device has: ``own_tokens``, from ``first`` on."""

    parts: Parts
    page_tokens: int
    own_tokens: int
    first: jax.Array | int

    @classmethod
    def of(cls, parts: Parts, own_tokens: int) -> Part:
        """This device's part."""
        first = lax.axis_index(parts.axes) * own_tokens if parts.axes else 0
        return cls(parts=parts, page_tokens=parts.ways * own_tokens, own_tokens=own_tokens, first=first)

    def tokens(self, first: jax.Array | int, pages: int) -> jax.Array:
        """The positions [pages, own_tokens] of the tokens here of so many pages, which begin at ``first``."""
        begin = first + self.first + self.page_tokens * jnp.arange(pages, dtype=jnp.int32)
        return begin[:, None] + jnp.arange(self.own_tokens, dtype=jnp.int32)
