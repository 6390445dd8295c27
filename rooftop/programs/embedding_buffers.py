"""What one device's preprocessed buffers say: of each place, where its id comes from and which row it asks for.

Dims: n places of a device's buffer, P SparseCores of a device, C of all devices, K row pointers of a buffer row.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from rooftop.models.tables_stacking import ALIGNMENT


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class StackInputs:
    """What the devices look up in one stack, as host preprocessing lays it out.

    row_pointers int32 [devices, pointers], embedding_ids and sample_ids int32 and gains float32 [devices, n]: split
    over the devices. ``rooftop.embed.host.buffers`` describes the layout.
    """

    row_pointers: jax.Array
    embedding_ids: jax.Array
    sample_ids: jax.Array
    gains: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class LookupInputs:
    """What the devices look up in all stacks, by name, and in how many ``passes`` (int32 scalar: minibatches)."""

    stacks: dict[str, StackInputs]
    passes: jax.Array


@dataclass(frozen=True, kw_only=True)
class Places:
    """Every place of a device's buffer, [n] each; where ``valid`` is false it is padding and the rest means nothing.

    ``source`` 0 to P - 1 and ``destination`` 0 to C - 1 are SparseCores, ``passes`` the minibatch; ``row`` is local to
    the destination, ``sample`` to the source. ``rank`` counts the ids of the same partition before this one, ``unique``
    the different rows before that of this one; ``first`` says that the row has not been before.
    """

    valid: jax.Array
    source: jax.Array
    destination: jax.Array
    passes: jax.Array
    row: jax.Array
    sample: jax.Array
    gain: jax.Array
    rank: jax.Array
    unique: jax.Array
    first: jax.Array


def read_places(
    inputs: StackInputs, passes: jax.Array, *, cores: int, cores_per_device: int, minibatching: bool
) -> Places:
    """The places of one device's buffers, the leading dim of whose arrays is 1 (inside ``jax.shard_map``)."""
    # With minibatching the SparseCores of a device share one row of the buffer.
    rows = 1 if minibatching else cores_per_device
    stride = max(cores, ALIGNMENT)
    ends = inputs.row_pointers.reshape(rows, -1)
    ids = inputs.embedding_ids.reshape(rows, -1)
    pointers, capacity = ends.shape[1], ids.shape[1]
    padded_ends = -(-ends // ALIGNMENT) * ALIGNMENT

    # The partition of a place is the number of partitions that end, padding included, at it or before it.
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
    return Places(
        valid=valid.reshape(-1),
        source=source.reshape(-1),
        destination=(within % stride).reshape(-1),
        passes=of_pass.reshape(-1),
        row=ids.reshape(-1),
        sample=inputs.sample_ids.reshape(-1),
        # What pads holds NaN, which would spread through products with zero.
        gain=jnp.where(valid.reshape(-1), inputs.gains.reshape(-1), 0.0),
        rank=(at - start).reshape(-1),
        unique=unique.reshape(-1),
        first=first.reshape(-1),
    )
