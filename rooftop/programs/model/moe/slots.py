"""Slots: the pairs of token and chosen expert that a device sends, in arrays of one size."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from rooftop.core.errors import RooftopError
from rooftop.core.rounding import ceil_div
from rooftop.models import MoE
from rooftop.programs.model.moe.route import one_hot


def capacity(tokens: int, moe: MoE, factor: float | None, shards: int) -> int:
    """Slots C of a device of ``tokens`` n for each of ``shards`` X of the experts: ``factor`` n k / X, and at most all.

    A shard has E/X experts, rounded up. All, which None means too, is n min(k, E/X). Evenly chosen experts need a
    factor of 1, and plans assume it. Raises RooftopError if it is not positive.
    """
    per_shard = ceil_div(moe.experts, shards)
    largest = tokens * min(moe.active, per_shard)
    if factor is None:
        return largest
    if not factor > 0:
        raise RooftopError("capacity_factor", factor, "a positive number, or none to drop nothing")
    return min(largest, math.ceil(factor * tokens * moe.active / (moe.experts / per_shard)))


@dataclass(frozen=True, kw_only=True)
class ExpertSlots:
    """The pair in each slot and the slot of each pair. Pair p = token x k + choice.

    ``pairs``: the pair in each slot, n k if the slot is empty. ``taken``: the slot of each pair, E C if it was dropped.
    """

    pairs: Int[Array, "E C"]
    taken: Int[Array, "n k"]

    @classmethod
    def of(cls, chosen: Int[Array, "n k"], experts: int, capacity: int) -> ExpertSlots:
        """Fill C slots of each expert in the order of pairs; ``chosen`` are ids of experts, or E for no expert."""
        pair, size = jnp.arange(chosen.size, dtype=jnp.int32), chosen.size
        if size * (experts + 1) >= 2**31:
            raise RooftopError("pairs of token and expert on a device", size, f"fewer than 2**31 / {experts + 1}")
        # A single key without a payload is the ranking that XLA:TPU compiles fastest.
        expert, order = jnp.divmod(lax.sort(chosen.reshape(-1) * size + pair, is_stable=False), size)
        count = jnp.sum(one_hot(chosen.reshape(-1), experts), axis=0, dtype=jnp.int32)
        first = jnp.cumsum(count) - count
        place = jnp.arange(capacity, dtype=jnp.int32)
        # Pairs of no expert come last: their rank is at least the number of all.
        rank = pair - first.at[expert].get(mode="fill", fill_value=-size)
        slot = jnp.where(rank < capacity, expert * capacity + rank, experts * capacity)
        return cls(
            pairs=jnp.where(place < count[:, None], order.at[first[:, None] + place].get(mode="clip"), size),
            taken=jnp.zeros_like(pair).at[order].set(slot, unique_indices=True).reshape(chosen.shape),
        )


@jax.custom_vjp
def to_slots(x: Float[Array, "n D"], source: Int[Array, "E C"], slots: Int[Array, "n k"]) -> Float[Array, "E C D"]:
    """Rows of x for every slot: row source[e, c], and zeros if that is n or more.

    ``slots`` is the inverse, the slots of each row, so that the gradient is ``from_slots``, a gather too.
    """
    return x.at[source].get(mode="fill", fill_value=0)


@jax.custom_vjp
def from_slots(rows: Float[Array, "E C D"], source: Int[Array, "E C"], slots: Int[Array, "n k"]) -> Float[Array, "n D"]:
    """The sum over k of the rows in ``slots``, summed in float32. Slots from E C on are left out."""
    flat = rows.reshape(-1, rows.shape[-1])
    picked = flat.at[slots].get(mode="fill", fill_value=0)
    return jnp.sum(picked, axis=1, dtype=jnp.float32).astype(rows.dtype)


_Indices = tuple[jax.Array, jax.Array]


def _to_slots(x: jax.Array, source: jax.Array, slots: jax.Array) -> tuple[jax.Array, _Indices]:
    return to_slots(x, source, slots), (source, slots)


def _from_slots(rows: jax.Array, source: jax.Array, slots: jax.Array) -> tuple[jax.Array, _Indices]:
    return from_slots(rows, source, slots), (source, slots)


to_slots.defvjp(_to_slots, lambda indices, gradient: (from_slots(gradient, *indices), None, None))
from_slots.defvjp(_from_slots, lambda indices, gradient: (to_slots(gradient, *indices), None, None))
