"""Matmuls in 8 bits with dynamic scales, for training (docs/train.md).

    y  = (q(x) q(w)) s_x s_w        int8, or float8 e4m3
    dx = (q(dy s_w) q(w)^T) s_g     the same; of float8 the gradient is e5m2, which has the wider range
    dw = x^T dy                     in the dtype of the activations

Each token of x, each token of dy s_w and each column of w has a scale: its largest magnitude over the largest value of
the dtype. Rounding is to the nearest, and its derivative counts as one (straight-through). The derivative of x reuses
the quantised weight of the forward pass. That of the weight is not quantised: it sums over tokens, so that one outlier
would set the scale of all of them, and its scales would need a maximum over every device that has tokens.

A weight is quantised in its shards, before fsdp gathers it: half the bytes move. Largest magnitudes are those of whole
rows and columns: devices that split a summed dim take the maximum of theirs. So results are those of one device, but
for the rounding of sums.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax import P, lax
from jax.sharding import AxisType, reshard
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Shaped

from rooftop.programs.model.grouped_matmul import RowGroups, grouped_products
from rooftop.programs.sharding import Dim, Specs, first_rows, gather, partial_sums, varying_alike

#: Dtypes of operands and of gradients in 8 bits, by the name of a matmul's dtype.
_DTYPES = MappingProxyType({"int8": ("int8", "int8"), "f8_e4m3": ("float8_e4m3fn", "float8_e5m2")})
#: The largest value of each; of int8 the least that is used is its negative.
_LARGEST = MappingProxyType({"int8": 127.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0})
#: Magnitudes below it count as it, so that rows of zeros have a scale.
_LEAST = 1e-30


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class NarrowWeight:
    """A weight [*batch, D, *F] as a matmul in 8 bits uses it.

    ``values`` in 8 bits, times ``scales`` [*batch, *F] in float32, are the weight. ``plain`` is the weight in the dtype
    of activations. Only its gradient is used: compilers remove its gather.
    """

    values: jax.Array
    scales: jax.Array
    plain: jax.Array

    @property
    def ndim(self) -> int:
        """Dims of the weight."""
        return self.values.ndim

    def first_rows(self, rows: int) -> NarrowWeight:
        """The first rows of D: the rest pads the weight at rest."""
        values, plain = (array[..., :rows, :] for array in (self.values, self.plain))
        return NarrowWeight(values=values, scales=self.scales, plain=plain)


def gather_in(
    dtype: str | None,
    weight: Float[Array, " stored *F"],
    specs: Specs,
    *dims: Dim,
    rows: int,
    sequence: str = "seq",
) -> Float[Array, " rows *F"] | NarrowWeight:
    """``sharding.gather`` of a weight for a matmul in ``dtype``, or in the weight's own for None."""
    plain = gather(weight, specs, *dims, rows=rows, sequence=sequence)
    if dtype is None:
        return plain
    spec = P(*specs.in_use(*dims, sequence=sequence).partitions)
    return narrowed(weight, plain, lambda values: first_rows(reshard(values, spec), rows), dtype)


def narrowed(
    weight: Float[Array, "*stored"],
    plain: Float[Array, "*dims"],
    into_use: Callable[[jax.Array], jax.Array],
    dtype: str,
    *,
    batch: int = 0,
) -> NarrowWeight:
    """The weight at rest, quantised; ``into_use`` gathers its values, as ``plain`` is gathered already."""
    values, scales = _quantised(lax.stop_gradient(weight), (batch,), _DTYPES[dtype][0])
    return NarrowWeight(values=into_use(values), scales=jnp.squeeze(scales, batch), plain=plain)


def narrow_matmul(
    x: Float[Array, "*rows D"],
    weight: NarrowWeight,
    out: P | None = None,
    *,
    batch: int = 0,
    summed: tuple[str, ...] = (),
    summed_back: tuple[str, ...] = (),
) -> Float[Array, "..."]:
    """x times the weight, for each of the first ``batch`` dims; split as ``out`` (None: as the operands).

    In explicit mode sharding says which devices have a part of a summed dim. In manual mode ``summed`` are the axes
    that split D, and ``summed_back`` those that split F.
    """
    x, values, scales, plain = varying_alike(x, weight.values, weight.scales, weight.plain)
    how = _How(out=out, batch=batch, summed=summed, summed_back=summed_back)
    return _multiply(x, values, scales, plain, how)


@dataclass(frozen=True, kw_only=True)
class _How:
    """Static parameters of a matmul, as in ``narrow_matmul``."""

    out: P | None
    batch: int
    summed: tuple[str, ...]
    summed_back: tuple[str, ...]


def _product(x: jax.Array, values: jax.Array, scales: jax.Array, plain: jax.Array, how: _How) -> Float[Array, "..."]:
    batch, of_columns = how.batch, values.ndim - how.batch - 1
    rows, row_scales = _quantised(x, (x.ndim - 1,), values.dtype.name, how.summed)
    alike = tuple(range(batch))
    y = _dot(rows, values, (((x.ndim - 1,), (batch,)), (alike, alike)), how.out)
    row_scales = row_scales.reshape(*row_scales.shape, *(1,) * (of_columns - 1))
    free = tuple(range(batch, batch + x.ndim - 1 - batch))
    return _scaled(y, row_scales, jnp.expand_dims(scales, free)).astype(x.dtype)


_multiply = jax.custom_vjp(_product, nondiff_argnums=(4,))

_Saved = tuple[jax.Array, jax.Array, jax.Array, "_Layout"]


@jax.tree_util.register_static
@dataclass(frozen=True, kw_only=True)
class _Layout:
    """The dtype and the spec of a weight's gradient, as ``_spec_of_gradient``."""

    dtype: DTypeLike
    spec: P | None


def _forward(
    x: jax.Array, values: jax.Array, scales: jax.Array, plain: jax.Array, how: _How
) -> tuple[jax.Array, _Saved]:
    layout = _Layout(dtype=plain.dtype, spec=_spec_of_gradient(plain))
    return _product(x, values, scales, plain, how), (x, values, scales, layout)


def _backward(how: _How, saved: _Saved, dy: jax.Array) -> tuple[jax.Array, None, None, jax.Array]:
    x, values, scales, layout = saved
    batch, of_rows = how.batch, x.ndim - 1 - how.batch
    alike, free, columns = (tuple(range(*ends)) for ends in ((batch,), (batch, batch + of_rows), (x.ndim - 1, dy.ndim)))
    weighed = _retyped(dy).astype(jnp.float32) * jnp.expand_dims(scales, free)
    g, g_scales = _quantised(weighed, columns, _gradient_dtype(values), how.summed_back)
    over = columns, tuple(range(batch + 1, values.ndim))
    dx = _dot(g, values, (over, (alike, alike)), _spec_of_gradient(x))
    dx = _scaled(dx, g_scales.reshape(*x.shape[:-1], 1)).astype(x.dtype)
    dw = lax.dot_general(x, dy, ((free, free), (alike, alike)), out_sharding=layout.spec)
    return dx, None, None, dw.astype(layout.dtype)


_multiply.defvjp(_forward, _backward)


def grouped_narrow_matmul(
    rows: Float[Array, "R D"],
    weight: NarrowWeight,
    groups: RowGroups,
    *,
    summed: tuple[str, ...] = (),
    summed_back: tuple[str, ...] = (),
) -> Float[Array, "R F"]:
    """``grouped_matmul`` in 8 bits: sorted rows, each times the matrix of its group; zeros for rows of no group."""
    rows, values, scales, plain = varying_alike(rows, weight.values, weight.scales, weight.plain)
    how = _How(out=None, batch=1, summed=summed, summed_back=summed_back)
    return _multiply_groups(rows, values, scales, plain, groups, how)


def _group_product(
    rows: jax.Array, values: jax.Array, scales: jax.Array, plain: jax.Array, groups: RowGroups, how: _How
) -> Float[Array, "R F"]:
    quantised, row_scales = _quantised(rows, (1,), values.dtype.name, how.summed)
    y = lax.ragged_dot(quantised, values, groups.sizes, preferred_element_type=_sums(values.dtype))
    # Rows of no group have scales of zero.
    return _scaled(y, row_scales, _of_groups(scales, groups)).astype(rows.dtype)


_multiply_groups = jax.custom_vjp(_group_product, nondiff_argnums=(5,))


def _of_groups(scales: Float32[Array, "G F"], groups: RowGroups) -> Float32[Array, "R F"]:
    """The scales of each sorted row's group; zeros for rows of no group."""
    index = jnp.arange(len(groups.order))
    group = jnp.sum(index[:, None] >= jnp.cumsum(groups.sizes), axis=1)
    return scales.at[group].get(mode="fill", fill_value=0.0)


def _forward_groups(
    rows: jax.Array, values: jax.Array, scales: jax.Array, plain: jax.Array, groups: RowGroups, how: _How
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array, RowGroups, _Layout]]:
    layout = _Layout(dtype=plain.dtype, spec=None)
    y = _group_product(rows, values, scales, plain, groups, how)
    return y, (rows, values, scales, groups, layout)


def _backward_groups(
    how: _How, saved: tuple[jax.Array, jax.Array, jax.Array, RowGroups, _Layout], dy: jax.Array
) -> tuple[jax.Array, None, None, jax.Array, None]:
    rows, values, scales, groups, layout = saved
    weighed = dy.astype(jnp.float32) * _of_groups(scales, groups)
    g, g_scales = _quantised(weighed, (1,), _gradient_dtype(values), how.summed_back)
    dx = lax.ragged_dot(g, values.swapaxes(1, 2), groups.sizes, preferred_element_type=_sums(values.dtype))
    in_group = jnp.arange(len(rows)) < jnp.sum(groups.sizes)
    dx = jnp.where(in_group[:, None], _scaled(dx, g_scales), 0).astype(rows.dtype)
    return dx, None, None, grouped_products(rows, dy, groups.sizes).astype(layout.dtype), None


_multiply_groups.defvjp(_forward_groups, _backward_groups)


def _quantised(
    x: Float[Array, "*dims"], dims: tuple[int, ...], dtype: str, axes: tuple[str, ...] = ()
) -> tuple[Shaped[Array, "*dims"], Float32[Array, "*scales"]]:
    """x in 8 bits, with one scale for all of ``dims``, which stay as dims of size 1; manual ``axes`` split these."""
    wide = _retyped(x).astype(jnp.float32)
    largest = jnp.max(jnp.abs(wide), axis=dims, keepdims=True)
    largest = jnp.maximum(lax.pmax(largest, axes) if axes else largest, _LEAST)
    top = _LARGEST[dtype]
    values = wide * (top / largest)
    return (jnp.round(values) if dtype == "int8" else values).astype(dtype), largest / top


def _dot(left: jax.Array, right: jax.Array, dims: Any, out: P | None) -> jax.Array:
    """A ``dot_general`` of operands in 8 bits, with sums in 32."""
    product = partial(lax.dot_general, dimension_numbers=dims, preferred_element_type=_sums(right.dtype))
    return partial_sums(product, out, left, right)


def _scaled(y: jax.Array, *scales: jax.Array) -> jax.Array:
    """y, which may be unreduced, times its scales."""
    wide = y.astype(jnp.float32)
    for scale in scales:
        wide = wide * _retyped(scale, jax.typeof(wide).sharding.spec.unreduced)
    return wide


def _retyped(x: jax.Array, reduced: Set[str] = frozenset()) -> jax.Array:
    """x, in the same places, with a type that is ``reduced`` over these axes and no others. No data moves."""
    spec = jax.typeof(x).sharding.spec
    return x if spec.reduced == reduced else reshard(x, P(*spec.partitions, reduced=reduced))


def _spec_of_gradient(x: jax.Array) -> P | None:
    """The spec in which a matmul computes the gradient of x; None in manual mode, where there are none."""
    if AxisType.Explicit not in jax.sharding.get_abstract_mesh().axis_types:
        return None
    spec = jax.typeof(x).sharding.spec
    return P(*spec.partitions, unreduced=spec.reduced)


def _sums(dtype: DTypeLike) -> DTypeLike:
    """The dtype in which products of 8 bits are summed."""
    return jnp.int32 if dtype == jnp.int8 else jnp.float32


def _gradient_dtype(values: jax.Array) -> str:
    """The dtype of gradients next to operands in the dtype of ``values``."""
    return dict(_DTYPES.values())[values.dtype.name]
