"""A matmul with a weight, whose gradient is written in the weight's own layout.

Dims: B batch, T sequence, D and F those of the weight.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import P, lax
from jax.typing import DTypeLike


def project(x: jax.Array, weight: jax.Array, out: P | None = None, dtype: DTypeLike | None = None) -> jax.Array:
    """x [B, T, D] times weight [D, F]: [B, T, F], split as ``out`` says (None: as the operands are), in ``dtype``.

    JAX's own derivative makes the weight's gradient as dy^T x and transposes it, which costs a CPU about as much time
    as the matmul; XLA:TPU picks the layout of either. ``weight`` is as ``Specs.in_use`` has it: its gradient is
    unreduced over the axes over which it is ``reduced``.
    """
    return _project(x, weight, out, dtype)


def project_left(x: jax.Array, weight: jax.Array, dtype: DTypeLike | None = None) -> jax.Array:
    """x [B, T, D] times weight [D, ...]: [B, T, ...], computed as weight^T x^T; not for gradients.

    With a weight that lies as [..., D] a CPU multiplies it as it is, where it would copy the right operand first.
    """
    y = lax.dot_general(weight, x, (((0,), (2,)), ((), ())), preferred_element_type=dtype)
    return jnp.moveaxis(y, (-2, -1), (0, 1))


def _product(x: jax.Array, weight: jax.Array, out: P | None, dtype: DTypeLike | None) -> jax.Array:
    return lax.dot_general(x, weight, (((2,), (0,)), ((), ())), preferred_element_type=dtype, out_sharding=out)


_project = jax.custom_vjp(_product, nondiff_argnums=(2, 3))


def _forward(
    x: jax.Array, weight: jax.Array, out: P | None, dtype: DTypeLike | None
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _product(x, weight, out, dtype), (x, weight)


def _backward(
    out: P | None, dtype: DTypeLike | None, saved: tuple[jax.Array, jax.Array], dy: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, weight = saved
    (dx,) = jax.vjp(partial(_product, weight=weight, out=out, dtype=dtype), x)[1](dy)
    spec = jax.typeof(weight).sharding.spec
    unreduced = P(*spec.partitions, unreduced=spec.reduced)
    dw = lax.dot_general(x, dy, (((0, 1), (0, 1)), ((), ())), preferred_element_type=dtype, out_sharding=unreduced)
    return dx, dw.astype(weight.dtype)


_project.defvjp(_forward, _backward)
