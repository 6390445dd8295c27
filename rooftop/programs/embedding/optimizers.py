"""Updates of the rows of embedding tables: duplicates are merged, then one of six optimizers updates each used row.

Rows that no sample looked up, and their slots, stay unchanged ("lazy"). Dims: N rows, W width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from rooftop.models.embedding_tables.stacking import Stack
from rooftop.models.embedding_tables.tables import TableOptimizer

Slots = tuple[jax.Array, ...]


class RowState(NamedTuple):
    """Rows before an update, with all that it depends on. Slots are [N, W], or [N, 1] if they are one a row."""

    row: Float[Array, "N W"]
    slots: Slots
    #: Gradients.
    g: Float[Array, "N W"]
    #: Learning rate.
    rate: Float[Array, "..."]
    #: Updates of the table, counted from 1.
    step: Num[Array, "..."]
    #: Floats of each row without padding.
    widths: Float[Array, "N 1"]


def merge_rows(
    rows: Int[Array, " N"], gradients: Float[Array, "N W"], none: int
) -> tuple[Int[Array, " N"], Float[Array, "N W"]]:
    """Distinct rows, and the sum of the gradients of each. Values from ``none`` on are not rows."""
    order = jnp.argsort(rows, stable=True)
    rows = rows[order]
    fresh = jnp.concatenate([jnp.ones(1, bool), rows[1:] != rows[:-1]])
    group = jnp.cumsum(fresh) - 1
    sums = jnp.zeros_like(gradients).at[group].add(gradients[order], indices_are_sorted=True)
    # Fillers are distinct too, so that writers may rely on unique rows.
    fillers = none + 1 + jnp.arange(len(rows), dtype=rows.dtype)
    return fillers.at[group].set(rows, indices_are_sorted=True), sums


def update_rows(
    optimizer: TableOptimizer,
    table: Float[Array, "rows W"],
    slots: Slots,
    rows: Int[Array, " N"],
    gradients: Float[Array, "N W"],
    *,
    share: Float[Array, ""],
    step: Int[Array, ""],
    widths: Float[Array, " N"],
) -> tuple[Float[Array, "rows W"], Slots]:
    """``table`` and its slots after an update of ``rows``, which are distinct, by ``gradients``.

    Rows outside the table are ignored. ``share`` multiplies the optimizer's learning rate, ``step`` counts updates from
    1, ``widths`` are the floats of a row without padding.
    """
    if optimizer.clip is not None:
        gradients = jnp.clip(gradients, -optimizer.clip, optimizer.clip)
    old = table.at[rows].get(mode="fill", fill_value=0)
    old_slots = tuple(slot.at[rows].get(mode="fill", fill_value=1) for slot in slots)
    rate = jnp.float32(optimizer.learning_rate) * share
    new, new_slots = update_state(optimizer, RowState(old, old_slots, gradients, rate, step, widths[:, None]))
    written = table.at[rows].set(new, mode="drop", unique_indices=True)
    return written, tuple(
        slot.at[rows].set(values, mode="drop", unique_indices=True)
        for slot, values in zip(slots, new_slots, strict=True)
    )


def update_state(optimizer: TableOptimizer, old: RowState) -> tuple[jax.Array, Slots]:
    """New rows and slots by the optimizer's rule, without clipping."""
    return _RULES[optimizer.kind](optimizer, old)


def initial_slots(optimizer: TableOptimizer) -> tuple[float, ...]:
    """Initial value of each of the optimizer's slots."""
    begin = dict(optimizer.parameters).get("initial_accumulator", 0.0)
    return (begin, 0.0)[: len(optimizer.slots(1))] if optimizer.kind != "adam" else (0.0, 0.0)


def true_widths(stack: Stack, rows: Int[Array, " N"]) -> Int[Array, " N"]:
    """Floats without padding of each of ``rows`` (local to a SparseCore): tables of a stack may differ in width."""
    offsets = jnp.array([place.offset for place in stack.places])
    widths = jnp.array([place.table.width for place in stack.places])
    return widths[jnp.searchsorted(offsets, rows, side="right") - 1]


def _sgd(optimizer: TableOptimizer, old: RowState) -> tuple[jax.Array, Slots]:
    return old.row - old.rate * old.g, ()


def _adagrad(optimizer: TableOptimizer, old: RowState) -> tuple[jax.Array, Slots]:
    """Duchi, Hazan and Singer 2011."""
    total = old.slots[0] + old.g * old.g
    return old.row - old.rate * _over_root(old.g, total), (total,)


def _rowwise_adagrad(optimizer: TableOptimizer, old: RowState) -> tuple[jax.Array, Slots]:
    """One accumulator a row: the mean of the squares of its gradient (Mudigere et al. 2021, section 4.1.4)."""
    total = old.slots[0] + jnp.sum(old.g * old.g, axis=1, keepdims=True) / old.widths
    return old.row - old.rate * _over_root(old.g, total), (total,)


def _adam(optimizer: TableOptimizer, old: RowState) -> tuple[jax.Array, Slots]:
    """Kingma and Ba 2015, on used rows only; the bias correction counts the steps of the whole table."""
    beta1, beta2, epsilon = optimizer["beta1"], optimizer["beta2"], optimizer["epsilon"]
    first = beta1 * old.slots[0] + (1 - beta1) * old.g
    second = beta2 * old.slots[1] + (1 - beta2) * old.g * old.g
    # Logarithms of the exact numbers: rounding 0.999 to float32 changes its logarithm by 1e-5.
    logs = [jnp.float32(math.log(beta) if beta else -math.inf) for beta in (beta1, beta2)]
    # 1 - beta^t through expm1: the difference of float32 powers near 1 has few digits.
    left1, left2 = (-jnp.expm1(old.step * log) for log in logs)
    return old.row - old.rate * (first / left1) / (jnp.sqrt(second / left2) + epsilon), (first, second)


def _ftrl(optimizer: TableOptimizer, old: RowState) -> tuple[jax.Array, Slots]:
    """FTRL-Proximal (McMahan et al. 2013, algorithm 1), with any power of the accumulator, to which beta is added."""
    power, l1, l2, beta = (optimizer[name] for name in ("learning_rate_power", "l1", "l2", "beta"))
    total = old.slots[0] + old.g * old.g
    grown = total**-power
    linear = old.slots[1] + old.g - (grown - old.slots[0] ** -power) / old.rate * old.row
    below = (grown + beta) / old.rate + 2 * l2
    new = jnp.where(below <= 0, 0.0, (jnp.clip(linear, -l1, l1) - linear) / below)
    # A learning rate of 0, at the start of a schedule, changes nothing.
    moving = old.rate > 0
    slots = (jnp.where(moving, total, old.slots[0]), jnp.where(moving, linear, old.slots[1]))
    return jnp.where(moving, new, old.row), slots


def _adagrad_momentum(optimizer: TableOptimizer, old: RowState) -> tuple[jax.Array, Slots]:
    """Adagrad with momentum; with beta2 below 1 its accumulator is a decaying mean of squares."""
    momentum, beta2, epsilon, power = (optimizer[name] for name in ("momentum", "beta2", "epsilon", "power"))
    total = old.slots[0] + old.g * old.g if beta2 == 1 else beta2 * old.slots[0] + (1 - beta2) * old.g * old.g
    moving = momentum * old.slots[1] + jnp.where(old.g == 0, 0.0, old.g * (total + epsilon) ** (-1 / power))
    return old.row - old.rate * moving, (total, moving)


def _over_root(g: Float[Array, "N W"], total: Float[Array, " N #W"]) -> Float[Array, "N W"]:
    """g / sqrt(total), and 0 where the accumulator is 0. NaNs are kept, so that they are noticed."""
    return jnp.where(total == 0, 0.0, g / jnp.sqrt(total))


_RULES: Mapping[str, Callable[[TableOptimizer, RowState], tuple[jax.Array, Slots]]] = {
    "sgd": _sgd,
    "adagrad": _adagrad,
    "rowwise_adagrad": _rowwise_adagrad,
    "adam": _adam,
    "ftrl": _ftrl,
    "adagrad_momentum": _adagrad_momentum,
}
