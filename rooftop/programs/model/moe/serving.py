"""Experts of a server's step: a device gets all tokens, multiplies those of its own experts and scatters the sums."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax, named_scope

from rooftop.core.rounding import next_multiple
from rooftop.programs.model.grouped_matmul import RowGroups
from rooftop.programs.model.moe.axes import devices_along
from rooftop.programs.model.moe.experts import Experts
from rooftop.programs.model.moe.route import one_hot
from rooftop.programs.model.moe.slots import ExpertSlots, from_slots, to_slots


def gathered(tokens: jax.Array, shares: jax.Array, chosen: jax.Array, experts: Experts) -> jax.Array:
    """The sums [n, D] of the experts and of the shared ones for a device's ``tokens`` [n, D].

    ``chosen`` [n, k] are the tokens' experts, and ``shares`` their weights.
    """
    axes, here, active = experts.axes, experts.here, experts.moe.active
    with named_scope("dispatch"):
        every = axes.of_all(tokens)
        both = axes.of_all(jnp.concatenate([lax.bitcast_convert_type(shares, jnp.int32), chosen], axis=1))
        shares, chosen = lax.bitcast_convert_type(both[:, :active], jnp.float32), both[:, active:]
        own = chosen - axes.expert_index * here
        own = jnp.where((own >= 0) & (own < here), own, here)
    if experts.grouped:
        total = _of_rows(every, shares, own, experts, trips=_trips(chosen // here, len(every), experts))
    else:
        total = _of_slots(every, shares, own, experts)
    if experts.moe.shared_d_ff:
        total = _with_shared(total, every, experts)
    with named_scope("combine"):
        return axes.scatter_all(total)


def _of_slots(every: jax.Array, shares: jax.Array, own: jax.Array, experts: Experts) -> jax.Array:
    """Sums of this device's experts, each of which has a slot for any token."""
    active = experts.moe.active
    with named_scope("dispatch"):
        slots = ExpertSlots.of(own, experts.here, len(every))
        rows = to_slots(every, slots.pairs // active, slots.taken)
        shares = to_slots(shares.reshape(-1, 1), slots.pairs, slots.taken.reshape(-1, 1))
    with named_scope("experts"):
        y = experts.with_bias(experts.linear(experts.hidden(rows, "", shares=shares), "down"), None, shares)
    with named_scope("combine"):
        return from_slots(y, slots.pairs // active, slots.taken)


def _of_rows(every: jax.Array, shares: jax.Array, own: jax.Array, experts: Experts, *, trips: jax.Array) -> jax.Array:
    """Sums of this device's experts over sorted pairs, in as many pieces as the busiest device has."""
    pairs = _SortedPairs.of(every, shares, own, experts)
    if pairs.size >= len(pairs.groups.order):
        return pairs.all_at_once()

    def add(index: jax.Array, total: jax.Array) -> jax.Array:
        source, y = pairs.results(index * pairs.size)
        with named_scope("combine"):
            # A TPU multiplies faster than it adds rows by index.
            places = one_hot(source, len(every)).astype(y.dtype)
            return total + jnp.einsum("rt,rd->td", places, y)

    return lax.fori_loop(0, trips, add, jnp.zeros_like(every))


def _trips(shards: jax.Array, count: int, experts: Experts) -> jax.Array:
    """Pieces of ``_of_rows`` on the device with the most pairs: all devices agree on it, and so meet in each."""
    pairs = jnp.sum(one_hot(shards.reshape(-1), devices_along(experts.axes.expert)), axis=0, dtype=jnp.int32)
    return -(-jnp.max(pairs) // experts.piece_rows(count))


@dataclass(frozen=True, kw_only=True)
class _SortedPairs:
    """Pairs of all tokens and this device's experts, sorted by expert, in pieces of ``size`` rows.

    ``every`` are the tokens, ``shares`` and ``own`` those of their choices; ``own`` is the number of experts here for a
    choice of another device's. ``ends`` are the first pairs after each expert, ``filled`` the number of this device's
    pairs, and ``order`` the sorted pairs, padded to whole pieces.
    """

    experts: Experts
    every: jax.Array
    shares: jax.Array
    own: jax.Array
    groups: RowGroups
    ends: jax.Array
    filled: jax.Array
    order: jax.Array
    size: int

    @classmethod
    def of(cls, every: jax.Array, shares: jax.Array, own: jax.Array, experts: Experts) -> _SortedPairs:
        """Sort the pairs."""
        size = experts.piece_rows(len(every))
        with named_scope("dispatch"):
            groups = RowGroups.of(own.reshape(-1), experts.here)
            ends, filled = jnp.cumsum(groups.sizes), jnp.sum(groups.sizes)
            order = jnp.pad(groups.order, (0, max(0, next_multiple(len(groups.order), size) - len(groups.order))))
        return cls(
            experts=experts, every=every, shares=shares, own=own, groups=groups, ends=ends, filled=filled, order=order,
            size=size,
        )  # fmt: skip

    def results(self, first: jax.Array | int) -> tuple[jax.Array, jax.Array]:
        """The tokens of one piece's pairs, and their experts' results."""
        experts, size, active = self.experts, self.size, self.experts.moe.active
        with named_scope("dispatch"):
            pairs = lax.dynamic_slice_in_dim(self.order, first, size)
            there = (first + jnp.arange(size) < self.filled)[:, None]
            ids = jnp.where(there, self.own.reshape(-1, 1)[pairs], experts.here)[None]
            sizes = jnp.diff(jnp.clip(self.ends - first, 0, size), prepend=0)
            groups = RowGroups(order=pairs, places=self.groups.places, sizes=sizes)
            rows, shares = self.every[pairs // active][None], self.shares.reshape(-1, 1)[pairs][None]
        with named_scope("experts"):
            act = experts.hidden(rows, "", groups, ids, shares)
            return pairs // active, experts.with_bias(experts.linear(act, "down", groups), ids, shares)[0]

    def all_at_once(self) -> jax.Array:
        """The sums of the experts' results for each token, of a single piece."""
        active = self.experts.moe.active
        _, y = self.results(0)
        with named_scope("combine"):
            return from_slots(y[None], self.groups.order[None] // active, self.groups.places.reshape(-1, active))


def _with_shared(total: jax.Array, every: jax.Array, experts: Experts) -> jax.Array:
    """Partial sums of all tokens with those of the shared experts, of which a device adds those of its own part."""
    axes = experts.axes
    with named_scope("shared"):
        size = len(every) // devices_along(axes.expert)
        rows = lax.dynamic_slice_in_dim(every, axes.expert_index * size, size)
        y = experts.linear(experts.hidden(rows[None], "shared_"), "shared_down")[0]
        return axes.added_rows(total, experts.with_gate(y, rows))
