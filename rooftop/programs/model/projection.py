"""A matmul with a weight, whose gradient is computed in the weight's own layout.

Dims: B batch, T sequence, D and F those of the weight.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import P, lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float


def project(
    x: Float[Array, "B T D"], weight: Float[Array, "D F"], out: P | None = None, dtype: DTypeLike | None = None
) -> Float[Array, "B T F"]:
    """x times weight, split as ``out`` (None: as the operands), in ``dtype``.

    JAX's own derivative computes the weight's gradient as dy^T x and transposes it, which takes a CPU about as long as
    the matmul; XLA:TPU chooses the layout of either. ``weight`` is as returned by ``Specs.in_use``: its gradient is
    unreduced over its ``reduced`` axes.
    """
    return _project(x, weight, out, dtype)


def project_left(
    x: Float[Array, "B T D"], weight: Float[Array, " D *F"], dtype: DTypeLike | None = None
) -> Float[Array, "B T *F"]:
    """x times weight, computed as weight^T x^T; not for gradients.

    A CPU multiplies a weight stored as [..., D] in place; as the right operand it would be copied first.
    """
    y = lax.dot_general(weight, x, (((0,), (2,)), ((), ())), preferred_element_type=dtype)
    return jnp.moveaxis(y, (-2, -1), (0, 1))


def _product(
    x: Float[Array, "B T D"], weight: Float[Array, "D F"], out: P | None, dtype: DTypeLike | None
) -> Float[Array, "B T F"]:
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
