"""Operations of layers with their weights: matmuls, norms and biases.

The gradient of a matmul's weight is computed in the weight's own layout, and that of its input on shards where XLA:TPU
would gather the weight over the wrong axes. Norms and biases work on shards, without communication: scales and biases
arrive ``reduced`` over the axes that split the tokens, and their gradients stay unreduced, for one all-reduce after all
layers.

Dims: B batch, T sequence, D and F those of the weight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import P, lax
from jax.sharding import reshard
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32

from rooftop.models.config import ModelConfig
from rooftop.programs.model.narrow import NarrowWeight, narrow_matmul
from rooftop.programs.parameters import Norm
from rooftop.programs.sharding import (
    Specs,
    axes_of,
    on_shards,
    one_sequence,
    partial_sums,
    regroups_weight,
    split_sequence,
)


def project(
    x: Float[Array, "B T D"],
    weight: Float[Array, "D F"] | NarrowWeight,
    out: P | None = None,
    dtype: DTypeLike | None = None,
    *,
    rounded: bool = False,
) -> Float[Array, "B T F"]:
    """x times weight, split as ``out`` (None: as the operands), in ``dtype``, or in 8 bits by a ``NarrowWeight``.

    With ``rounded``, gradients are computed from dy in the dtype of x, whatever ``dtype`` is.

    JAX's own derivative computes the weight's gradient as dy^T x and transposes it, which takes a CPU about as long as
    the matmul; XLA:TPU chooses the layout of either. ``weight`` is as returned by ``Specs.in_use``: its gradient is
    unreduced over its ``reduced`` axes.
    """
    if isinstance(weight, NarrowWeight):
        return narrow_matmul(x, weight, out)
    return _project(x, weight, out, dtype, rounded)


def project_heads(x: Float[Array, "B T D"], weight: Float[Array, "D N H"] | NarrowWeight) -> Float[Array, "B T N H"]:
    """x times a weight of heads."""
    if isinstance(weight, NarrowWeight):
        return narrow_matmul(x, weight)
    # Not ``project``: with one head on a device, XLA:TPU would turn the gradient's ReduceScatter into an AllReduce.
    return _project_heads(x, weight) if regroups_weight(x) else _heads(x, weight)


def into_heads(
    h: Float[Array, "B T D"], weight: Float[Array, "D heads H"], specs: Specs
) -> Float[Array, "B T heads H"]:
    """h times a weight that stays split over D: the sums over D are scattered over tokens."""
    (_, heads, _), width = jax.typeof(weight).sharding.spec, weight.shape[0]
    matrix = weight.reshape(width, -1, out_sharding=P(specs.parameter("embed").partitions[0], heads))
    (batch, seq, _), (tokens, *_) = specs.inputs("heads"), specs.activation("seq")
    y = project(h, matrix, P(batch, seq, heads, unreduced=frozenset(specs.width)))
    y = split_sequence(y, P(batch, tokens, heads))
    return y.reshape(*y.shape[:2], *weight.shape[1:], out_sharding=P(batch, tokens, heads, None))


def project_left(
    x: Float[Array, "B T D"], weight: Float[Array, " D *F"] | NarrowWeight, dtype: DTypeLike | None = None
) -> Float[Array, "B T *F"]:
    """x times weight, computed as weight^T x^T; not for gradients, nor in 8 bits.

    A CPU multiplies a weight stored as [..., D] in place; as the right operand it would be copied first.
    """
    assert isinstance(weight, jax.Array)
    y = lax.dot_general(weight, x, (((0,), (2,)), ((), ())), preferred_element_type=dtype)
    return jnp.moveaxis(y, (-2, -1), (0, 1))


def _product(
    x: Float[Array, "B T D"], weight: Float[Array, "D F"], out: P | None, dtype: DTypeLike | None, rounded: bool = False
) -> Float[Array, "B T F"]:
    del rounded
    if _is_of_rows(x):
        return _of_rows(x, weight, out, dtype)
    product = partial(lax.dot_general, dimension_numbers=(((2,), (0,)), ((), ())), preferred_element_type=dtype)
    return partial_sums(product, out, x, weight)


def _is_of_rows(x: Float[Array, "B T D"]) -> bool:
    """True if a product of x is computed as that of a matrix, its one sequence on each device.

    In a pipeline stage XLA:TPU sums products where they are computed, and scatters the sum over tokens only if it has
    no dim of size one: otherwise it moves twice the bytes (libtpu 0.0.42.1; docs/evidence/accuracy.md).
    """
    return bool(jax.sharding.get_abstract_mesh().manual_axes) and one_sequence(x)


def _of_rows(
    x: Float[Array, "B T D"], weight: Float[Array, " D *F"], out: P | None = None, dtype: DTypeLike | None = None
) -> Float[Array, "B T *F"]:
    """x times weight, split as ``out`` (None: as the operands), with one sequence on each device."""
    batch, seq, width = jax.typeof(x).sharding.spec.partitions
    out = out or P(batch, seq, *jax.typeof(weight).sharding.spec.partitions[1:])
    tokens = (*axes_of(batch), *axes_of(seq))
    rows = x.reshape(-1, x.shape[-1], out_sharding=P(tokens, width))
    columns, of_rows = (((1,), (0,)), ((), ())), P(tokens, *out.partitions[2:])
    y = lax.dot_general(rows, weight, columns, preferred_element_type=dtype, out_sharding=of_rows)
    return y.reshape(*x.shape[:2], *weight.shape[1:], out_sharding=out)


_project = jax.custom_vjp(_product, nondiff_argnums=(2, 3, 4))


def _forward(
    x: jax.Array, weight: jax.Array, out: P | None, dtype: DTypeLike | None, rounded: bool
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _product(x, weight, out, dtype), (x, weight)


def _heads(x: Float[Array, "B T D"], weight: Float[Array, "D N H"]) -> Float[Array, "B T N H"]:
    return _of_rows(x, weight) if _is_of_rows(x) else jnp.einsum("btd,dnh->btnh", x, weight)


_project_heads = jax.custom_vjp(_heads)


def _heads_backward(saved: tuple[jax.Array, jax.Array], dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, weight = saved
    (dw,) = jax.vjp(partial(_heads, x), weight)[1](dy)
    return _input_gradient(x, dy, weight), dw


_project_heads.defvjp(lambda x, weight: (_heads(x, weight), (x, weight)), _heads_backward)


def _backward(
    out: P | None, dtype: DTypeLike | None, rounded: bool, saved: tuple[jax.Array, jax.Array], dy: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, weight = saved
    if rounded:
        dtype, dy = None, dy.astype(x.dtype)
    if regroups_weight(x):
        dx = _input_gradient(x, dy, weight, dtype)
    else:
        (dx,) = jax.vjp(partial(_product, weight=weight, out=out, dtype=dtype), x)[1](dy)
    return dx, weight_gradient(x, dy, weight, dtype)


def _input_gradient(
    x: Float[Array, "B T D"], dy: Float[Array, "B T *F"], weight: Float[Array, " D *F"], dtype: DTypeLike | None = None
) -> Float[Array, "B T D"]:
    """The gradient of an x that a weight multiplies, computed on shards: unreduced over the ``reduced`` axes of x."""
    spec = jax.typeof(x).sharding.spec
    columns = tuple(range(2, dy.ndim)), tuple(range(1, weight.ndim))
    product = partial(lax.dot_general, dimension_numbers=(columns, ((), ())), preferred_element_type=dtype)
    return partial_sums(product, P(*spec.partitions, unreduced=spec.reduced), dy, weight).astype(x.dtype)


def weight_gradient(
    x: Float[Array, "B T D"], dy: Float[Array, "B T *F"], weight: Float[Array, " D *F"], dtype: DTypeLike | None = None
) -> Float[Array, " D *F"]:
    """The gradient of a weight that x is multiplied by, unreduced over the weight's ``reduced`` axes."""
    spec = jax.typeof(weight).sharding.spec
    unreduced = P(*spec.partitions, unreduced=spec.reduced)
    dw = lax.dot_general(x, dy, (((0, 1), (0, 1)), ((), ())), preferred_element_type=dtype, out_sharding=unreduced)
    return dw.astype(weight.dtype)


_project.defvjp(_forward, _backward)


def norm(x: Float[Array, "B T D"], weights: Norm[jax.Array], model: ModelConfig, specs: Specs) -> Float[Array, "B T D"]:
    """The model's norm over D, in float32; x is split as the residual stream, scale and bias are [D]."""

    def local(x: jax.Array, weights: Norm[jax.Array]) -> jax.Array:
        wide = x.astype(jnp.float32)
        if model.norm == "layer":
            wide = wide - _mean(wide, specs.width)
        y = _scaled(_unit(wide, model, specs.width), weights.scale, x.dtype, model)
        return y if weights.bias is None else y + weights.bias

    return _on_shards(local, specs.residual, x, weights)


def scale_norm(
    x: Float[Array, "*dims size"], scale: Float[Array, " size"], model: ModelConfig, spec: P
) -> Float[Array, "*dims size"]:
    """RMS norm over the last dim of x, a head or a latent; ``spec`` is the spec of x."""
    return _on_shards(
        lambda x, scale: _scaled(_unit(x.astype(jnp.float32), model), scale, x.dtype, model), spec, x, scale
    )


def width_norm(
    x: Float[Array, "B T heads H"],
    scale: Float[Array, "heads H"],
    model: ModelConfig,
    spec: P,
    heads: int,
    copies: Sequence[int] = (),
) -> Float[Array, "B T heads H"]:
    """RMS norm over all ``heads`` together, without padding, of which devices have some each.

    ``copies`` are the head in each place of x where heads are there several times: each counts once.
    """
    axes, size = axes_of(spec.partitions[2]), heads * x.shape[-1]
    share = 1 / np.bincount(copies)[list(copies)] if copies else np.ones(x.shape[2])

    def local(x: jax.Array, weights: tuple[jax.Array, jax.Array]) -> jax.Array:
        wide, (scale, share) = x.astype(jnp.float32), weights
        squares = jnp.square(wide) * share[:, None] if copies else jnp.square(wide)
        squares = jnp.sum(squares, axis=(-2, -1), keepdims=True)
        squares = lax.psum(squares, axes) if axes else squares
        return _scaled(wide * lax.rsqrt(squares / size + model.norm_eps), scale, x.dtype, model)

    return _on_shards(local, spec, x, (scale, reshard(jnp.asarray(share, jnp.float32), P(axes or None))))


def add_bias(x: Float[Array, "*dims"], bias: Float[Array, "*last"] | None, spec: P) -> Float[Array, "*dims"]:
    """x plus a bias over its last dims; x if ``bias`` is None. ``spec`` is the spec of x."""
    return x if bias is None else _on_shards(lambda x, bias: x + bias, spec, x, bias)


def _scaled(
    unit: Float32[Array, "*dims"], scale: Float[Array, "*last"] | None, dtype: DTypeLike, model: ModelConfig
) -> Float[Array, "*dims"]:
    """A normalised array in ``dtype``, times its scale if there is one."""
    if scale is None:
        return unit.astype(dtype)
    if model.norm_offset:
        # 1 + scale would add an array that is not reduced to one that is.
        return (unit + unit * scale).astype(dtype)
    return unit.astype(dtype) * scale


def _unit(x: Float32[Array, "*dims"], model: ModelConfig, axes: tuple[str, ...] = ()) -> Float32[Array, "*dims"]:
    return x * jax.lax.rsqrt(_mean(jnp.square(x), axes) + model.norm_eps)


def _mean(x: Float32[Array, "*dims"], axes: tuple[str, ...]) -> Float32[Array, "*one"]:
    """The mean over the last dim, which ``axes`` split."""
    mean = jnp.mean(x, axis=-1, keepdims=True)
    return lax.pmean(mean, axes) if axes else mean


def _on_shards(local: Callable[..., jax.Array], spec: P, x: Float[Array, "*dims"], weights: object) -> jax.Array:
    """``local`` of the shards of x, split by ``spec``, and of weights in their present sharding."""
    weight_specs = jax.tree.map(lambda weight: jax.typeof(weight).sharding.spec, weights)
    return on_shards(local, in_specs=(spec, weight_specs), out_specs=spec)(x, weights)
