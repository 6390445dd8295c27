"""Slots for the pairs of a token and an expert that it chose: which pair is in which, and rows into them and back.

Dims as in ``rooftop.programs.moe``: n tokens of one device, E experts (or shards of them), k active ones, C capacity.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from rooftop import models
from rooftop.errors import RooftopError
from rooftop.programs.routing import one_hot


def capacity(tokens: int, moe: models.MoE, factor: float | None, shards: int) -> int:
    """Slots C of a device of ``tokens`` n for each of ``shards`` X of the experts: ``factor`` n k / X, at most all.

    All that can be needed, also for None, is n min(k, E/X). A factor of 1 is what evenly chosen experts need, and what
    a plan counts. Raises RooftopError if it is not positive.
    """
    all_ = tokens * min(moe.active, moe.experts // shards)
    if factor is None:
        return all_
    if not factor > 0:
        raise RooftopError("capacity_factor", factor, "a positive number, or none to drop nothing")
    return min(all_, math.ceil(factor * tokens * moe.active / shards))


@dataclass(frozen=True, kw_only=True)
class Slots:
    """Which pair is in which slot, and the reverse. Pair p = token x k + choice.

    ``pairs`` [E, C]: the pair in each slot, n k where the slot is empty. ``taken`` [n, k]: the slot of each pair, E C
    where it was dropped.
    """

    pairs: jax.Array
    taken: jax.Array

    @classmethod
    def of(cls, chosen: jax.Array, experts: int, capacity: int) -> Slots:
        """C slots for each expert filled in the order of pairs; ``chosen`` [n, k] are ids of experts."""
        pair, size = jnp.arange(chosen.size, dtype=jnp.int32), chosen.size
        if size * experts >= 2**31:
            raise RooftopError("pairs of token and expert on a device", size, f"fewer than 2**31 / {experts}")
        # One key and nothing beside it: of all ways to rank, the one that XLA:TPU compiles fastest.
        expert, order = jnp.divmod(lax.sort(chosen.reshape(-1) * size + pair, is_stable=False), size)
        count = jnp.sum(one_hot(chosen.reshape(-1), experts), axis=0, dtype=jnp.int32)
        first = jnp.cumsum(count) - count
        place = jnp.arange(capacity, dtype=jnp.int32)
        rank = pair - first[expert]
        slot = jnp.where(rank < capacity, expert * capacity + rank, experts * capacity)
        return cls(
            pairs=jnp.where(place < count[:, None], order.at[first[:, None] + place].get(mode="clip"), size),
            taken=jnp.zeros_like(pair).at[order].set(slot, unique_indices=True).reshape(chosen.shape),
        )


@jax.custom_vjp
def to_slots(x: jax.Array, source: jax.Array, slots: jax.Array) -> jax.Array:
    """Rows of x [n, D] for every slot: row source[e, c], zeros where that is n or more: [E, C, D].

    ``slots`` [n, k] is the reverse, the slots that each row went to: the gradient is ``from_slots``, a gather too.
    """
    return x.at[source].get(mode="fill", fill_value=0)


@jax.custom_vjp
def from_slots(rows: jax.Array, source: jax.Array, slots: jax.Array) -> jax.Array:
    """The sum over k of the rows [E, C, D] in slots [n, k], those beyond E C left out: [n, D]. Summed in float32."""
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
