"""Rows sorted by group, each group times a matrix of its own: ``jax.lax.ragged_dot``, and its derivatives.

XLA:TPU has a kernel for ``ragged_dot``, and so for the derivative of the rows; but of the derivative of the matrices it
makes a dense product of all rows for every group, G times the FLOPs (jax 0.10.2, libtpu 0.0.42.1). That one is a loop
over tiles of rows here. The number of its trips, and of the tiles that the kernel visits, is the number of rows that
belong to a group, which only the device knows: no compiler counts their FLOPs. XLA:CPU makes dense products of
``ragged_dot``.

Dims: R rows of one device, G groups (experts), d and f the sizes of a matrix.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from rooftop.core.errors import RooftopError
from rooftop.programs.attention.scores import varying_alike

#: Rows of a tile: for each, a matrix of sums is read and written, in float32. This many multiply as long as that takes
#: on a TPU v5e (8 bytes of an element at 819 GB/s, 2 FLOPs of it for each row at 197 TFLOP/s).
TILE = 1024


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class RowGroups:
    """Rows in order of their groups, those of no group last.

    ``order`` [R]: the row at each place; ``places`` [R]: the place of each row. ``sizes`` [G]: rows of each group,
    which may be fewer than R in all.
    """

    order: jax.Array
    places: jax.Array
    sizes: jax.Array

    @classmethod
    def of(cls, groups: jax.Array, count: int) -> RowGroups:
        """The order of rows whose groups are ``groups`` [R] int32, those of group G = ``count`` being of none."""
        size = len(groups)
        if size * (count + 1) >= 2**31:
            raise RooftopError("rows of experts on a device", size, f"fewer than 2**31 / {count + 1}")
        # One key and nothing beside it, as in ``rooftop.programs.model.moe.ExpertSlots``.
        index = jnp.arange(size, dtype=jnp.int32)
        order = lax.sort(groups * size + index, is_stable=False) % size
        places = jnp.zeros_like(order).at[order].set(index, unique_indices=True)
        sizes = jnp.sum(groups[:, None] == jnp.arange(count, dtype=groups.dtype), axis=0, dtype=jnp.int32)
        return cls(order=order, places=places, sizes=sizes)

    def sorted(self, rows: jax.Array) -> jax.Array:
        """Rows [R, d] in order."""
        return _permuted(rows, self.order, self.places)

    def back(self, rows: jax.Array) -> jax.Array:
        """The inverse of ``sorted``."""
        return _permuted(rows, self.places, self.order)


@jax.custom_vjp
def _permuted(rows: jax.Array, order: jax.Array, inverse: jax.Array) -> jax.Array:
    """rows[order]; backward by ``inverse``, where JAX would scatter."""
    return rows.at[order].get(mode="promise_in_bounds", unique_indices=True)


def _forward(rows: jax.Array, order: jax.Array, inverse: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _permuted(rows, order, inverse), (order, inverse)


def _backward(indices: tuple[jax.Array, jax.Array], gradient: jax.Array) -> tuple[jax.Array, None, None]:
    order, inverse = indices
    return _permuted(gradient, inverse, order), None, None


_permuted.defvjp(_forward, _backward)


def grouped_matmul(rows: jax.Array, matrices: jax.Array, groups: RowGroups) -> jax.Array:
    """Sorted rows [R, d], each times its group's of ``matrices`` [G, d, f]: [R, f], zeros for rows of no group."""
    rows, matrices = varying_alike(rows, matrices)
    return _matmul(rows, matrices, groups)


@jax.custom_vjp
def _matmul(rows: jax.Array, matrices: jax.Array, groups: RowGroups) -> jax.Array:
    y = lax.ragged_dot(rows, matrices, groups.sizes)
    kept = jnp.arange(len(rows)) < jnp.sum(groups.sizes)
    return jnp.where(kept[:, None], y, 0)


_Saved = tuple[jax.Array, jax.Array, RowGroups]


def _multiply(rows: jax.Array, matrices: jax.Array, groups: RowGroups) -> tuple[jax.Array, _Saved]:
    return _matmul(rows, matrices, groups), (rows, matrices, groups)


def _gradients(saved: _Saved, gradient: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    rows, matrices, groups = saved
    return (
        _matmul(gradient, matrices.swapaxes(1, 2), groups),
        grouped_products(rows, gradient, groups.sizes).astype(matrices.dtype),
        None,
    )


_matmul.defvjp(_multiply, _gradients)


def grouped_products(rows: jax.Array, others: jax.Array, sizes: jax.Array) -> jax.Array:
    """Of each group, its rows [R, d] transposed times its rows of ``others`` [R, f]: [G, d, f] float32.

    A loop over tiles of rows; a tile with the ends of groups in it is visited once for each. The loop ends where the
    groups do, so that rows of no group cost nothing.
    """
    size = min(TILE, len(rows))
    ends = jnp.cumsum(sizes)
    first, last = (ends - sizes) // size, (ends - 1) // size
    visits = jnp.where(sizes > 0, last - first + 1, 0)
    visited = jnp.cumsum(visits)

    def visit(index: jax.Array, found: jax.Array) -> jax.Array:
        group = jnp.sum(index >= visited)
        tile = first[group] + index - (visited[group] - visits[group])
        # The last tile begins earlier where rows are no whole number of tiles; what it repeats does not count.
        start = jnp.minimum(tile * size, len(rows) - size)
        row = start + jnp.arange(size)
        own = (row >= jnp.maximum(tile * size, ends[group] - sizes[group])) & (row < ends[group])
        left, right = (lax.dynamic_slice_in_dim(x, start, size) for x in (rows, others))
        more = jnp.einsum("rd,rf->df", jnp.where(own[:, None], left, 0), right, preferred_element_type=jnp.float32)
        return found.at[group].add(more)

    zeros = jnp.zeros((len(sizes), rows.shape[1], others.shape[1]), jnp.float32)
    return lax.fori_loop(0, visited[-1], visit, varying_alike(rows, others, zeros)[2])
