"""Updates of the rows of embedding tables: duplicates merged, then one of six optimizers on each row that was used.

Rows that no sample looked up stay as they are, and so do their slots ("lazy"). Dims: N rows, W width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from rooftop.models.embedding_tables.stacking import Stack
from rooftop.models.embedding_tables.tables import TableOptimizer

Slots = tuple[jax.Array, ...]
#: From rows [N, W], their slots, gradients [N, W], the learning rate, the step counted from 1 and the rows' true
#: widths [N, 1] to new rows and slots.
Rule = Callable[[jax.Array, Slots, jax.Array, jax.Array, jax.Array, jax.Array], tuple[jax.Array, Slots]]


def merge_rows(rows: jax.Array, gradients: jax.Array, none: int) -> tuple[jax.Array, jax.Array]:
    """Rows [N], each once, and the sum [N, W] of the gradients of each. From ``none`` on they are no rows."""
    order = jnp.argsort(rows, stable=True)
    rows = rows[order]
    fresh = jnp.concatenate([jnp.ones(1, bool), rows[1:] != rows[:-1]])
    group = jnp.cumsum(fresh) - 1
    sums = jnp.zeros_like(gradients).at[group].add(gradients[order], indices_are_sorted=True)
    # Fillers differ too, so that whoever writes to the rows may rely on each coming once.
    fillers = none + 1 + jnp.arange(len(rows), dtype=rows.dtype)
    return fillers.at[group].set(rows, indices_are_sorted=True), sums


def update_rows(
    optimizer: TableOptimizer,
    table: jax.Array,
    slots: Slots,
    rows: jax.Array,
    gradients: jax.Array,
    *,
    share: jax.Array,
    step: jax.Array,
    widths: jax.Array,
) -> tuple[jax.Array, Slots]:
    """``table`` [rows, W] and its slots with ``rows`` [N], each of which comes once, updated by ``gradients`` [N, W].

    Rows beyond the table are left out. ``share`` multiplies the optimizer's learning rate, ``step`` counts updates from
    1, ``widths`` [N] are the floats of a row that are no padding.
    """
    if optimizer.clip is not None:
        gradients = jnp.clip(gradients, -optimizer.clip, optimizer.clip)
    old = table.at[rows].get(mode="fill", fill_value=0)
    old_slots = tuple(slot.at[rows].get(mode="fill", fill_value=1) for slot in slots)
    rate = jnp.float32(optimizer.learning_rate) * share
    new, new_slots = row_rule(optimizer)(old, old_slots, gradients, rate, step, widths[:, None])
    written = table.at[rows].set(new, mode="drop", unique_indices=True)
    return written, tuple(
        slot.at[rows].set(values, mode="drop", unique_indices=True)
        for slot, values in zip(slots, new_slots, strict=True)
    )


def row_rule(optimizer: TableOptimizer) -> Rule:
    """The optimizer's rule for rows, clipping excepted."""
    return _RULES[optimizer.kind](optimizer)


def initial_slots(optimizer: TableOptimizer) -> tuple[float, ...]:
    """What each of the optimizer's slots holds at first, everywhere."""
    begin = dict(optimizer.parameters).get("initial_accumulator", 0.0)
    return (begin, 0.0)[: len(optimizer.slots(1))] if optimizer.kind != "adam" else (0.0, 0.0)


def true_widths(stack: Stack, rows: jax.Array) -> jax.Array:
    """Floats that are no padding of each of ``rows`` (local to a SparseCore): tables of a stack may differ there."""
    offsets = jnp.array([place.offset for place in stack.places])
    widths = jnp.array([place.table.width for place in stack.places])
    return widths[jnp.searchsorted(offsets, rows, side="right") - 1]


def _sgd(optimizer: TableOptimizer) -> Rule:
    def rule(
        row: jax.Array, slots: Slots, g: jax.Array, rate: jax.Array, step: jax.Array, widths: jax.Array
    ) -> tuple[jax.Array, Slots]:
        return row - rate * g, ()

    return rule


def _adagrad(optimizer: TableOptimizer) -> Rule:
    """Duchi, Hazan and Singer 2011."""

    def rule(
        row: jax.Array, slots: Slots, g: jax.Array, rate: jax.Array, step: jax.Array, widths: jax.Array
    ) -> tuple[jax.Array, Slots]:
        total = slots[0] + g * g
        return row - rate * _over_root(g, total), (total,)

    return rule


def _rowwise_adagrad(optimizer: TableOptimizer) -> Rule:
    """One accumulator a row: the mean of the squares of its gradient (Mudigere et al. 2021, section 4.1.4)."""

    def rule(
        row: jax.Array, slots: Slots, g: jax.Array, rate: jax.Array, step: jax.Array, widths: jax.Array
    ) -> tuple[jax.Array, Slots]:
        total = slots[0] + jnp.sum(g * g, axis=1, keepdims=True) / widths
        return row - rate * _over_root(g, total), (total,)

    return rule


def _adam(optimizer: TableOptimizer) -> Rule:
    """Kingma and Ba 2015, on the rows in use alone; the bias is corrected by the steps of the whole table."""
    beta1, beta2, epsilon = optimizer["beta1"], optimizer["beta2"], optimizer["epsilon"]
    # Of the numbers themselves: 0.999 rounded to float32 has lost 1e-5 of its logarithm.
    logs = [jnp.float32(math.log(beta) if beta else -math.inf) for beta in (beta1, beta2)]

    def rule(
        row: jax.Array, slots: Slots, g: jax.Array, rate: jax.Array, step: jax.Array, widths: jax.Array
    ) -> tuple[jax.Array, Slots]:
        first = beta1 * slots[0] + (1 - beta1) * g
        second = beta2 * slots[1] + (1 - beta2) * g * g
        # 1 - beta^t through expm1: near 1 the difference of float32 powers has few digits left.
        left1, left2 = (-jnp.expm1(step * log) for log in logs)
        return row - rate * (first / left1) / (jnp.sqrt(second / left2) + epsilon), (first, second)

    return rule


def _ftrl(optimizer: TableOptimizer) -> Rule:
    """FTRL-Proximal (McMahan et al. 2013, algorithm 1), with the power of the accumulator free and beta added to it."""
    power, l1, l2, beta = (optimizer[name] for name in ("learning_rate_power", "l1", "l2", "beta"))

    def rule(
        row: jax.Array, slots: Slots, g: jax.Array, rate: jax.Array, step: jax.Array, widths: jax.Array
    ) -> tuple[jax.Array, Slots]:
        total = slots[0] + g * g
        grown = total**-power
        linear = slots[1] + g - (grown - slots[0] ** -power) / rate * row
        below = (grown + beta) / rate + 2 * l2
        new = jnp.where(below <= 0, 0.0, (jnp.clip(linear, -l1, l1) - linear) / below)
        # A learning rate of 0, at the beginning of a schedule, moves nothing.
        moving = rate > 0
        return jnp.where(moving, new, row), (
            jnp.where(moving, total, slots[0]),
            jnp.where(moving, linear, slots[1]),
        )

    return rule


def _adagrad_momentum(optimizer: TableOptimizer) -> Rule:
    """Adagrad, or with beta2 below 1 a decaying mean of squares, whose scaled gradients gather momentum."""
    momentum, beta2, epsilon, power = (optimizer[name] for name in ("momentum", "beta2", "epsilon", "power"))

    def rule(
        row: jax.Array, slots: Slots, g: jax.Array, rate: jax.Array, step: jax.Array, widths: jax.Array
    ) -> tuple[jax.Array, Slots]:
        total = slots[0] + g * g if beta2 == 1 else beta2 * slots[0] + (1 - beta2) * g * g
        moving = momentum * slots[1] + jnp.where(g == 0, 0.0, g * (total + epsilon) ** (-1 / power))
        return row - rate * moving, (total, moving)

    return rule


def _over_root(g: jax.Array, total: jax.Array) -> jax.Array:
    """g / sqrt(total), and 0 where an accumulator that began at 0 has seen nothing. NaNs stay, to be found."""
    return jnp.where(total == 0, 0.0, g / jnp.sqrt(total))


_RULES: Mapping[str, Callable[[TableOptimizer], Rule]] = {
    "sgd": _sgd,
    "adagrad": _adagrad,
    "rowwise_adagrad": _rowwise_adagrad,
    "adam": _adam,
    "ftrl": _ftrl,
    "adagrad_momentum": _adagrad_momentum,
}
