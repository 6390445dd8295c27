"""One period of a pipeline stage's layers, forwards and backwards, traced once for all its tasks.

What a forward pass keeps is what JAX would by the remat policy, less what the backward pass gets anyway: the weights,
and the places of the tokens. It is a list of arrays, so that a stage can put it into buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax
from jax.extend.core import jaxpr_as_fun

from rooftop.programs.parameters import Layer
from rooftop.programs.split import split
from rooftop.programs.transformer import Period, Places

Layers = tuple[Layer[jax.Array], ...]


@dataclass(frozen=True, kw_only=True)
class Passes:
    """The passes of a period: all results vary over the stage's manual axes.

    forward: x, weights, places -> y, saved. backward: dy, weights, saved, places -> dx, gradients of weights; if it is
    split -> dx, kept, and weights: weights, kept, places -> gradients. ``saved`` and ``kept`` are the types of these.
    """

    forward: Callable[[jax.Array, Layers, Places], tuple[jax.Array, list[jax.Array]]]
    backward: Callable[[jax.Array, Layers, list[jax.Array], Places], tuple[jax.Array, Any]]
    weights: Callable[[Layers, list[jax.Array], Places], Layers] | None = None
    saved: Sequence[jax.core.ShapedArray]
    kept: Sequence[jax.core.ShapedArray] = ()

    @classmethod
    def of(
        cls, period: Period, x: jax.Array, weights: Layers, at: Places, *, split_: bool, manual: tuple[str, ...]
    ) -> Passes:
        """The passes of ``period`` for arrays such as the given ones: x [B, T, D], the weights of one period."""

        def forwards(x: jax.Array, weights: Layers, at: Places) -> tuple[jax.Array, Any]:
            y, pull = jax.vjp(lambda weights, x: period(x, weights, at)[0], weights, x)
            given = {id(leaf): _Given(index) for index, leaf in enumerate(jax.tree.leaves((weights, at)))}
            return y, jax.tree.map(lambda leaf: given.get(id(leaf), leaf), pull)

        traced, (_, pull) = jax.make_jaxpr(forwards, return_shape=True)(x, weights, at)
        saved, gradients = traced.out_avals[1:], jax.tree.structure(weights)
        form = jax.tree.structure(pull)

        def backwards(dy: jax.Array, weights: Layers, saved: list[jax.Array], at: Places) -> tuple[jax.Array, Layers]:
            given = jax.tree.leaves((weights, at))
            whole = jax.tree.map(
                lambda leaf: given[leaf.index] if isinstance(leaf, _Given) else leaf,
                jax.tree.unflatten(form, saved),
                is_leaf=lambda leaf: isinstance(leaf, _Given),
            )
            more, dx = whole(dy)
            return dx, more

        back = jax.make_jaxpr(backwards)(x, weights, list(saved), at)

        def forward(x: jax.Array, weights: Layers, at: Places) -> tuple[jax.Array, list[jax.Array]]:
            y, *saved = varying(jaxpr_as_fun(traced)(*jax.tree.leaves((x, weights, at))), manual)
            return y, saved

        if not split_:

            def backward(dy: jax.Array, weights: Layers, saved: list[jax.Array], at: Places) -> tuple[jax.Array, Any]:
                dx, *more = varying(jaxpr_as_fun(back)(*jax.tree.leaves((dy, weights, saved, at))), manual)
                return dx, jax.tree.unflatten(gradients, more)

            return cls(forward=forward, backward=backward, saved=saved)

        inputs = ((x,), False), (weights, True), (saved, False), (at, True)
        stays = [stay for arrays, stay in inputs for _ in jax.tree.leaves(arrays)]
        parts = split(back, wanted=1, stays=stays)

        def of_input(dy: jax.Array, weights: Layers, saved: list[jax.Array], at: Places) -> tuple[jax.Array, Any]:
            dx, *kept = varying(jaxpr_as_fun(parts.first)(*jax.tree.leaves((dy, weights, saved, at))), manual)
            return dx, kept

        def of_weights(weights: Layers, kept: list[jax.Array], at: Places) -> Layers:
            more = varying(jaxpr_as_fun(parts.second)(*jax.tree.leaves((weights, at)), *kept), manual)
            found: Layers = jax.tree.unflatten(gradients, more)
            return found

        kept = parts.first.out_avals[1:]
        return cls(forward=forward, backward=of_input, weights=of_weights, saved=saved, kept=kept)


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Given:
    """In place of an array that a forward pass does not keep: a weight or a place, by index."""

    index: int


def varying(tree: Any, axes: tuple[str, ...]) -> Any:
    """Arrays as varying over the manual axes, so that no gradient is summed over them before the end."""

    def vary(array: jax.Array) -> jax.Array:
        had = jax.typeof(array).manual_axis_type.varying
        missing = tuple(axis for axis in axes if axis not in had)
        return lax.pcast(array, missing, to="varying") if missing else array

    return jax.tree.map(vary, tree)
