"""Matmuls of rows that are sorted by group, with one matrix per group: ``jax.lax.ragged_dot`` and its derivatives.

XLA:TPU has a kernel for ``ragged_dot``, and hence for the derivative of the rows. For the derivative of the matrices it
computes a dense product of all rows for every group, G times the FLOPs (jax 0.10.2, libtpu 0.0.42.1). Here that
derivative is a loop over tiles of rows. Its trip count, and the number of tiles that the kernel visits, depend on the
number of rows that belong to a group, which is known on the device only: no compiler counts these FLOPs. XLA:CPU
computes ``ragged_dot`` as dense products.

Dims: R rows of one device, G groups (experts), d and f the sizes of a matrix.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax, named_scope
from jaxtyping import Array, Bool, Float, Float32, Int, Shaped

from rooftop.core.errors import RooftopError
from rooftop.programs.quantised import Quantised
from rooftop.programs.sharding import varying_alike

#: Rows of a tile. For each tile a float32 matrix of sums is read and written, which takes as long as the FLOPs of this
#: many rows on a TPU v5e (8 bytes per element at 819 GB/s, 2 FLOPs per element and row at 197 TFLOP/s).
TILE = 1024


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class RowGroups:
    """Rows in the order of their groups; rows of no group come last.

    ``order`` [R]: the row at each sorted index; ``places`` [R]: the sorted index of each row. ``sizes`` [G]: rows of
    each group; their sum may be less than R.
    """

    order: jax.Array
    places: jax.Array
    sizes: jax.Array

    @classmethod
    def of(cls, groups: Int[Array, " R"], count: int) -> RowGroups:
        """The order of rows whose groups are ``groups``; group ``count`` means no group."""
        size = len(groups)
        if size * (count + 1) >= 2**31:
            raise RooftopError("rows of experts on a device", size, f"fewer than 2**31 / {count + 1}")
        # A single key without a payload, as in ``rooftop.programs.model.moe.slots.ExpertSlots``.
        index = jnp.arange(size, dtype=jnp.int32)
        order = lax.sort(groups * size + index, is_stable=False) % size
        places = jnp.zeros_like(order).at[order].set(index, unique_indices=True)
        sizes = jnp.sum(groups[:, None] == jnp.arange(count, dtype=groups.dtype), axis=0, dtype=jnp.int32)
        return cls(order=order, places=places, sizes=sizes)

    def sorted(self, rows: Shaped[Array, "R d"]) -> Shaped[Array, "R d"]:
        """The rows in the order of their groups."""
        return _permuted(rows, self.order, self.places)

    def unsorted(self, rows: Shaped[Array, "R d"]) -> Shaped[Array, "R d"]:
        """The inverse of ``sorted``."""
        return _permuted(rows, self.places, self.order)


@jax.custom_vjp
def _permuted(rows: Shaped[Array, "R d"], order: Int[Array, " R"], inverse: Int[Array, " R"]) -> Shaped[Array, "R d"]:
    """rows[order]. The backward pass gathers by ``inverse``, where JAX would scatter."""
    return rows.at[order].get(mode="promise_in_bounds", unique_indices=True)


def _forward(rows: jax.Array, order: jax.Array, inverse: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _permuted(rows, order, inverse), (order, inverse)


def _backward(indices: tuple[jax.Array, jax.Array], gradient: jax.Array) -> tuple[jax.Array, None, None]:
    order, inverse = indices
    return _permuted(gradient, inverse, order), None, None


_permuted.defvjp(_forward, _backward)


def grouped_matmul(
    rows: Float[Array, "R d"], matrices: Float[Array, "G d f"], groups: RowGroups
) -> Float[Array, "R f"]:
    """Sorted rows, each times the matrix of its group; zeros for rows of no group."""
    rows, matrices = varying_alike(rows, matrices)
    return _matmul(rows, matrices, groups)


@jax.custom_vjp
def _matmul(rows: Float[Array, "R d"], matrices: Float[Array, "G d f"], groups: RowGroups) -> Float[Array, "R f"]:
    y = lax.ragged_dot(rows, matrices, groups.sizes)
    in_group = jnp.arange(len(rows)) < jnp.sum(groups.sizes)
    return jnp.where(in_group[:, None], y, 0)


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


def grouped_matmul_of(
    rows: Float[Array, "R d"], matrices: Quantised, groups: RowGroups, *, tile: int, visits: float
) -> Float[Array, "R f"]:
    """``grouped_matmul`` with quantised matrices [G, d, f]; not for gradients.

    XLA:TPU would write matrices of a ragged matmul to HBM in full first. In a loop over tiles, each with the matrix of
    one group, it converts the matrix in the matmul's operand. The rows of a group begin a ``tile``, so that a matrix is
    read once if they are no more than that. ``visits`` of tiles are expected.
    """
    tiles = _Visits.of(groups.sizes, min(tile, len(rows)), len(rows), from_groups=True)

    def visit(index: jax.Array, y: jax.Array) -> jax.Array:
        with named_scope(f"trips[{visits:.3f}]"):
            group, start, own = tiles.visit(index)
            product = lax.dynamic_slice_in_dim(rows, start, tiles.size) @ matrices.of_group(group).in_full(rows.dtype)
            before = lax.dynamic_slice_in_dim(y, start, tiles.size)
            return lax.dynamic_update_slice_in_dim(y, jnp.where(own[:, None], product, before), start, 0)

    zeros = jnp.zeros((len(rows), matrices.values.shape[-1]), rows.dtype)
    return lax.fori_loop(0, tiles.count, visit, varying_alike(rows, matrices.values, zeros)[2])


@dataclass(frozen=True, kw_only=True)
class _Visits:
    """Visits of tiles of ``size`` rows by the groups that have rows in them, ``count`` in all, group after group.

    The first tile of a group begins at its row of ``origins``. A tile that spans several groups is visited once for
    each. Rows of no group are in no visit.
    """

    size: int
    rows: int
    sizes: jax.Array
    ends: jax.Array
    origins: jax.Array
    first: jax.Array
    visits: jax.Array
    visited: jax.Array

    @classmethod
    def of(cls, sizes: Int[Array, " G"], size: int, rows: int, *, from_groups: bool = False) -> _Visits:
        """Visits of ``rows`` sorted by groups of these ``sizes``; with ``from_groups`` each has tiles of its own."""
        ends = jnp.cumsum(sizes)
        origins = ends - sizes if from_groups else jnp.zeros_like(ends)
        first, last = (ends - sizes - origins) // size, (ends - 1 - origins) // size
        visits = jnp.where(sizes > 0, last - first + 1, 0)
        return cls(
            size=size, rows=rows, sizes=sizes, ends=ends, origins=origins, first=first, visits=visits,
            visited=jnp.cumsum(visits),
        )  # fmt: skip

    @property
    def count(self) -> Int[Array, ""]:
        """The number of visits."""
        return self.visited[-1]

    def visit(self, index: Int[Array, ""]) -> tuple[Int[Array, ""], Int[Array, ""], Bool[Array, " size"]]:
        """The group of a visit, the first row of its tile, and the rows of the tile that are the group's."""
        group = jnp.sum(index >= self.visited)
        tile = self.first[group] + index - (self.visited[group] - self.visits[group])
        # If rows are no whole number of tiles, the last tile starts earlier; its repeated rows are masked.
        first = self.origins[group] + tile * self.size
        start = jnp.minimum(first, self.rows - self.size)
        row = start + jnp.arange(self.size)
        begin = jnp.maximum(first, self.ends[group] - self.sizes[group])
        return group, start, (row >= begin) & (row < self.ends[group])


def grouped_products(
    rows: Float[Array, "R d"], others: Float[Array, "R f"], sizes: Int[Array, " G"]
) -> Float32[Array, "G d f"]:
    """For each group, its rows transposed times its rows of ``others``.

    A loop over tiles of rows, which ends with the last group, so that rows of no group cost nothing.
    """
    visits = _Visits.of(sizes, min(TILE, len(rows)), len(rows))

    def visit(index: jax.Array, total: jax.Array) -> jax.Array:
        group, start, own = visits.visit(index)
        left, right = (lax.dynamic_slice_in_dim(x, start, visits.size) for x in (rows, others))
        more = jnp.einsum("rd,rf->df", jnp.where(own[:, None], left, 0), right, preferred_element_type=jnp.float32)
        return total.at[group].add(more)

    zeros = jnp.zeros((len(sizes), rows.shape[1], others.shape[1]), jnp.float32)
    return lax.fori_loop(0, visits.count, visit, varying_alike(rows, others, zeros)[2])
