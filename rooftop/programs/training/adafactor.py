"""Adafactor (Shazeer and Stern 2018): second moments of a matrix kept as the means of its rows and of its columns."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from rooftop.models.optimizers import SMALLEST_FACTORED_DIM
from rooftop.programs.parameters import Leaf, Parameter, Transformer

#: Of the paper, section 9: the decay of the moments is 1 - step**-0.8, updates are clipped to a root mean square of 1,
#: and weights count as at least this large.
_DECAY, _CLIP, _SMALLEST_WEIGHT = 0.8, 1.0, 1e-3
_EPSILON = 1e-30


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class SecondMoments(Generic[Leaf]):
    """Means of squared gradients: ``full``, of the parameter's shape, or over its columns and over its rows.

    ``rows`` has the parameter's dims without its column dim, ``columns`` those without its row dim.
    """

    full: Leaf | None = None
    rows: Leaf | None = None
    columns: Leaf | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class AdafactorState(Generic[Leaf]):
    """Number of updates, an int32 scalar, and the second moments of each parameter, as a tree of the weights."""

    count: Leaf
    moments: Any


def factored_dims(parameter: Parameter) -> tuple[int, int] | None:
    """Row and column dim of a parameter's matrices: the two largest, layers apart. None if it is not factored."""
    sizes = parameter.true_shape
    dims = sorted(range(int(parameter.stacked), len(sizes)), key=lambda dim: (sizes[dim], dim))[-2:]
    if len(dims) < 2 or sizes[dims[0]] < SMALLEST_FACTORED_DIM:
        return None
    return dims[0], dims[1]


def describe_moments(described: Transformer[Parameter]) -> Any:
    """A tree of the weights with the SecondMoments of each, as parameters."""

    def moments(parameter: Parameter) -> SecondMoments[Parameter]:
        if (dims := factored_dims(parameter)) is None:
            return SecondMoments(full=parameter)
        row, column = dims
        return SecondMoments(rows=_without(parameter, column), columns=_without(parameter, row))

    return jax.tree.map(moments, described)


def _without(parameter: Parameter, dim: int) -> Parameter:
    """The parameter without one dim."""
    shape, dims, padding = (
        (*entries[:dim], *entries[dim + 1 :]) for entries in (parameter.shape, parameter.dims, parameter.padding)
    )
    return replace(parameter, shape=shape, dims=dims, padding=padding)


def adafactor(described: Transformer[Parameter], learning_rate: float) -> optax.GradientTransformation:
    """The transformation from float32 gradients to updates, without momentum and weight decay.

    A weight changes by about ``learning_rate`` of the root mean square of its matrix, as in the paper (section 8), each
    layer by itself. Means leave padding out, where gradients and weights are zero.
    """

    def init(weights: Any) -> AdafactorState[jax.Array]:
        moments = jax.tree.map(lambda slot: jnp.zeros(slot.shape, jnp.float32), describe_moments(described))
        return AdafactorState(count=jnp.zeros((), jnp.int32), moments=moments)

    def update(gradients: Any, state: AdafactorState[jax.Array], weights: Any) -> tuple[Any, Any]:
        count = state.count + 1
        decay = 1.0 - count.astype(jnp.float32) ** -_DECAY
        moments = jax.tree.map(partial(_moved, decay=decay), described, gradients, state.moments)
        changes = jax.tree.map(partial(_change, learning_rate=learning_rate), described, gradients, moments, weights)
        return changes, AdafactorState(count=count, moments=moments)

    return optax.GradientTransformation(init, update)


def _moved(
    parameter: Parameter, gradient: Float[Array, "*dims"], old: SecondMoments[jax.Array], *, decay: Float[Array, ""]
) -> SecondMoments[jax.Array]:
    """The moments after a gradient."""
    squares = jnp.square(gradient) + _EPSILON
    if (dims := factored_dims(parameter)) is None:
        new = SecondMoments(full=squares)
    else:
        row, column = dims
        new = SecondMoments(
            rows=jnp.squeeze(_mean(squares, parameter, column), column),
            columns=jnp.squeeze(_mean(squares, parameter, row), row),
        )
    return jax.tree.map(lambda before, now: decay * before + (1.0 - decay) * now, old, new)


def _change(
    parameter: Parameter,
    gradient: Float[Array, "*dims"],
    moments: SecondMoments[jax.Array],
    weight: Float[Array, "*dims"],
    *,
    learning_rate: float,
) -> Float[Array, "*dims"]:
    """The change of a parameter whose moments are up to date."""
    dims, own = factored_dims(parameter), range(int(parameter.stacked), len(parameter.shape))
    if dims is not None and moments.rows is not None and moments.columns is not None:
        row, column = dims
        rows, columns = jnp.expand_dims(moments.rows, column), jnp.expand_dims(moments.columns, row)
        change = gradient * jax.lax.rsqrt(rows / _mean(rows, parameter, row)) * jax.lax.rsqrt(columns)
    else:
        assert moments.full is not None
        change = gradient * jax.lax.rsqrt(moments.full)
    change = change / jnp.maximum(1.0, jnp.sqrt(_mean(jnp.square(change), parameter, *own)) / _CLIP)
    scale = jnp.maximum(_SMALLEST_WEIGHT, jnp.sqrt(_mean(jnp.square(weight), parameter, *own)))
    return -learning_rate * scale * change


def _mean(x: Float[Array, "*dims"], parameter: Parameter, *dims: int) -> Float[Array, "*means"]:
    """The mean over some dims, which stay with a size of 1; zeros of padding do not count."""
    return jnp.sum(x, axis=dims, keepdims=True) / math.prod(parameter.true_shape[dim] for dim in dims)
