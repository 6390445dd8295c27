"""Lookups and their gradients on one device of many: ids go to the rows, rows or sums of them come back.

All functions run inside ``jax.shard_map`` over every axis of the mesh, with one device's arrays. Both exchanges of
``rooftop.plan.embed_exchange`` give the same sums, in another order. Dims: D devices, P SparseCores of each, C = D P,
U unique ids and I ids that a partition may have, S rows of activations of a SparseCore, W width.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from rooftop.models.tables import Quantization
from rooftop.programs.embedding_buffers import Places

Axes = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """The sizes of one stack's exchange. ``rows`` are those of one SparseCore, ``samples`` S, ``entries`` U or I."""

    axes: Axes
    devices: int
    per_device: int
    rows: int
    samples: int
    entries: int

    @property
    def none(self) -> int:
        """A row that no device has."""
        return self.per_device * self.rows

    def slots(self, places: Places, within: jax.Array, wanted: jax.Array) -> jax.Array:
        """Where each place's id lies in what is sent, [D, P of destination, P of source, entries] in one dim."""
        partition = places.destination * self.per_device + places.source
        # A place beyond what the program was compiled for is left out; preprocessing has seen to it that there is none.
        used = wanted & (within < self.entries)
        return jnp.where(used, partition * self.entries + within, self.size)

    @property
    def size(self) -> int:
        """Entries of all that a device sends."""
        return self.devices * self.per_device**2 * self.entries

    def to_holders(self, values: jax.Array) -> jax.Array:
        """From [size, ...] as the samples' device has it to [size, ...] as the rows' has it, or back: an AllToAll."""
        if self.devices == 1:
            return values
        parts = values.reshape(self.devices, -1, *values.shape[1:])
        return lax.all_to_all(parts, self.axes, 0, 0).reshape(values.shape)

    def flat_rows(self, asked: jax.Array) -> jax.Array:
        """Rows of a device's SparseCores one after the other, of ``asked`` [size] that are local to each."""
        shape = (self.devices, self.per_device, self.per_device * self.entries)
        core = jnp.arange(self.per_device)[None, :, None]
        asked = asked.reshape(shape)
        return jnp.where(asked < self.rows, core * self.rows + asked, self.none).reshape(-1)


def lookup_rows(
    exchange: Exchange, table: jax.Array, places: Places, wanted: jax.Array, quantization: Quantization | None
) -> jax.Array:
    """Activations [P S, W] of the ``wanted`` places: rows come to the samples, which combine them."""
    slots, asked = _asked(exchange, places, wanted)
    rows = _gather(table, exchange.flat_rows(exchange.to_holders(asked)), quantization)
    found = exchange.to_holders(rows).at[slots].get(mode="fill", fill_value=0)
    gains = jnp.where(wanted, places.gain, 0)[:, None]
    return _by_sample(exchange, places, wanted, found * gains)


def row_gradients_of_rows(
    exchange: Exchange, gradients: jax.Array, places: Places, wanted: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Rows [size] of this device's SparseCores and the gradient [size, W] that each sample's SparseCore has for each.

    ``gradients`` [P S, W] are those of the activations.
    """
    slots, asked = _asked(exchange, places, wanted)
    own = _of_places(exchange, gradients, places, wanted)
    sums = jnp.zeros((exchange.size, gradients.shape[1]), gradients.dtype).at[slots].add(own, mode="drop")
    return exchange.flat_rows(exchange.to_holders(asked)), exchange.to_holders(sums)


def lookup_activations(
    exchange: Exchange, table: jax.Array, places: Places, wanted: jax.Array, quantization: Quantization | None
) -> jax.Array:
    """Activations [P S, W] of the ``wanted`` places: the holders of rows combine them, sums come to the samples."""
    rows, samples, gains = _entries(exchange, places, wanted)
    parts = _gather(table, rows, quantization) * gains[:, None]
    every = exchange.devices * exchange.per_device * exchange.samples
    sums = jnp.zeros((every, table.shape[1]), table.dtype).at[samples].add(parts, mode="drop")
    return sums if exchange.devices == 1 else lax.psum_scatter(sums, exchange.axes, tiled=True)


def row_gradients_of_activations(
    exchange: Exchange, gradients: jax.Array, places: Places, wanted: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """As ``row_gradients_of_rows``, from the activations' gradients of all devices, gathered."""
    rows, samples, gains = _entries(exchange, places, wanted)
    every = gradients if exchange.devices == 1 else lax.all_gather(gradients, exchange.axes, tiled=True)
    return rows, every.at[samples].get(mode="fill", fill_value=0) * gains[:, None]


def _asked(exchange: Exchange, places: Places, wanted: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Where each place finds its row among those asked for, and the rows asked for [size], each once a partition."""
    slots = exchange.slots(places, places.unique, wanted)
    asked = jnp.full(exchange.size, exchange.rows, jnp.int32)
    firsts = jnp.where(places.first, slots, exchange.size)
    return slots, asked.at[firsts].set(places.row, mode="drop")


def _entries(exchange: Exchange, places: Places, wanted: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """As the holders have them: rows, samples of all devices (0 to C S), gains, [size] each."""
    slots = exchange.slots(places, places.rank, wanted)

    def sent(values: jax.Array, filler: float) -> jax.Array:
        return exchange.to_holders(jnp.full(exchange.size, filler, values.dtype).at[slots].set(values, mode="drop"))

    first = (lax.axis_index(exchange.axes) if exchange.axes else 0) * exchange.per_device
    samples = (first + places.source) * exchange.samples + places.sample
    beyond = exchange.devices * exchange.per_device * exchange.samples
    rows = exchange.flat_rows(sent(places.row, exchange.rows))
    return rows, sent(samples, beyond), sent(places.gain, 0.0)


def _gather(table: jax.Array, rows: jax.Array, quantization: Quantization | None) -> jax.Array:
    """Rows [N, W] of a device's table, zeros for those that it does not have."""
    found = table.at[rows].get(mode="fill", fill_value=0)
    return found if quantization is None else quantized(found, quantization)


def quantized(rows: jax.Array, quantization: Quantization) -> jax.Array:
    """Values moved to the nearest of the levels, the range's ends included (the SparseCore deep dive, section 13)."""
    step = (quantization.high - quantization.low) / (quantization.buckets - 1)
    clipped = jnp.clip(rows, quantization.low, quantization.high)
    return quantization.low + jnp.round((clipped - quantization.low) / step) * step


def _of_places(exchange: Exchange, activations: jax.Array, places: Places, wanted: jax.Array) -> jax.Array:
    """What each place's sample has, times the place's gain: [n, W]."""
    at = jnp.where(wanted, places.source * exchange.samples + places.sample, len(activations))
    return activations.at[at].get(mode="fill", fill_value=0) * jnp.where(wanted, places.gain, 0)[:, None]


def _by_sample(exchange: Exchange, places: Places, wanted: jax.Array, values: jax.Array) -> jax.Array:
    """The sum of the places' ``values`` [n, W] for each row of activations."""
    count = exchange.per_device * exchange.samples
    at = jnp.where(wanted, places.source * exchange.samples + places.sample, count)
    return jnp.zeros((count, values.shape[1]), values.dtype).at[at].add(values, mode="drop")
