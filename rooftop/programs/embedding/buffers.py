"""One device's preprocessed buffers, decoded: the source and the requested row of each entry.

Dims: n entries of a device's buffer, P SparseCores of a device, C of all devices, K row pointers of a buffer row.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int, Int32

from rooftop.core.rounding import next_multiple
from rooftop.models.embedding_tables.stacking import ALIGNMENT


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class StackInputs:
    """Ids that the devices look up in one stack, in the layout of host preprocessing.

    All arrays are split over the devices by their first dim. ``rooftop.embed.host.buffers`` describes the layout.
    """

    row_pointers: Int32[Array, "devices pointers"]
    embedding_ids: Int32[Array, "devices n"]
    sample_ids: Int32[Array, "devices n"]
    gains: Float32[Array, "devices n"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class LookupInputs:
    """Ids that the devices look up in all stacks, by name, in ``passes`` minibatches."""

    stacks: dict[str, StackInputs]
    passes: Int32[Array, ""]


@dataclass(frozen=True, kw_only=True)
class BufferEntries:
    """Every entry of a device's buffer. Where ``valid`` is false it is padding and the other fields mean nothing.

    ``source`` 0 to P - 1 and ``destination`` 0 to C - 1 are SparseCores, ``passes`` is the minibatch. ``row`` is local
    to the destination, ``sample`` to the source. ``rank`` counts the earlier ids of the same partition, ``unique`` the
    different rows among them. ``first`` is true for the first entry of a row in its partition.
    """

    valid: Bool[Array, " n"]
    source: Int[Array, " n"]
    destination: Int[Array, " n"]
    passes: Int[Array, " n"]
    row: Int[Array, " n"]
    sample: Int[Array, " n"]
    gain: Float32[Array, " n"]
    rank: Int[Array, " n"]
    unique: Int[Array, " n"]
    first: Bool[Array, " n"]


def read_places(
    inputs: StackInputs, passes: Int[Array, ""], *, cores: int, cores_per_device: int, minibatching: bool
) -> BufferEntries:
    """The entries of one device's buffers, whose arrays have a leading dim of 1 (inside ``jax.shard_map``)."""
    # With minibatching the SparseCores of a device share one row of the buffer.
    rows = 1 if minibatching else cores_per_device
    stride = max(cores, ALIGNMENT)
    ends = inputs.row_pointers.reshape(rows, -1)
    ids = inputs.embedding_ids.reshape(rows, -1)
    pointers, capacity = ends.shape[1], ids.shape[1]
    padded_ends = next_multiple(ends, ALIGNMENT)

    # The partition of an entry is the number of partitions that end, padding included, at it or before it.
    of_row = jnp.arange(rows)[:, None]
    ending = jnp.zeros((rows, capacity + 1), jnp.int32).at[of_row, jnp.minimum(padded_ends, capacity)].add(1)
    partition = jnp.cumsum(ending, axis=1)[:, :capacity]
    within = jnp.minimum(partition, pointers - 1)
    at = jnp.arange(capacity, dtype=jnp.int32)
    valid = (partition < pointers) & (at < jnp.take_along_axis(ends, within, axis=1))
    starts = jnp.concatenate([jnp.zeros((rows, 1), ends.dtype), padded_ends[:, :-1]], axis=1)
    start = jnp.take_along_axis(starts, within, axis=1)

    before = jnp.concatenate([jnp.full((rows, 1), -1, ids.dtype), ids[:, :-1]], axis=1)
    first = valid & ((at == start) | (ids != before))
    seen = jnp.concatenate([jnp.zeros((rows, 1), jnp.int32), jnp.cumsum(first, axis=1, dtype=jnp.int32)], axis=1)
    unique = seen[:, 1:] - 1 - jnp.take_along_axis(seen, start, axis=1)

    group = within // stride
    source, of_pass = (group // passes, group % passes) if minibatching else (of_row + 0 * group, 0 * group)
    return BufferEntries(
        valid=valid.reshape(-1),
        source=source.reshape(-1),
        destination=(within % stride).reshape(-1),
        passes=of_pass.reshape(-1),
        row=ids.reshape(-1),
        sample=inputs.sample_ids.reshape(-1),
        # Padding holds NaN, which would spread through products with zero.
        gain=jnp.where(valid.reshape(-1), inputs.gains.reshape(-1), 0.0),
        rank=(at - start).reshape(-1),
        unique=unique.reshape(-1),
        first=first.reshape(-1),
    )
