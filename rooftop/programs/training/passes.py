"""The forward and backward pass of one period of a pipeline stage's layers, traced once for all tasks of the stage.

A forward pass saves the residuals that JAX would by the remat policy, except those that the backward pass gets anyway:
the weights and the places of the tokens. They are a list of arrays, so that a stage can store them in buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun

from rooftop.programs.model.transformer import Places
from rooftop.programs.parameters import Layer
from rooftop.programs.sharding import varying

Layers = tuple[Layer[jax.Array], ...]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class ResidualStream:
    """The data that stages exchange: x [B, T, D], and the load of the experts of all layers so far.

    ``load`` [devices that split tokens, 3, E] is the sum of ``programs.model.moe.route.load`` over these layers; None:
    not measured. Derivatives have the same form.
    """

    x: jax.Array
    load: jax.Array | None = None

    def after(self, x: jax.Array, loads: Sequence[jax.Array]) -> ResidualStream:
        """The stream after layers whose output is ``x``, with the loads of their experts."""
        return ResidualStream(x=x, load=self.load if self.load is None else sum(loads, self.load))


#: Apply the layers of a period to the stream, given their weights and places.
Through = Callable[[ResidualStream, Layers, Places], ResidualStream]


@dataclass(frozen=True, kw_only=True)
class Passes:
    """The passes of a period; all results vary over the stage's manual axes.

    forward: x, weights, places -> y, saved. backward: dy, weights, saved, places -> dx, gradients of weights. If the
    backward pass is split: dx, kept_residuals, and weights: weights, kept_residuals, places -> gradients. ``saved`` and
    ``kept_residuals`` are the types of these arrays; x, y and their derivatives are streams.
    """

    forward: Callable[[ResidualStream, Layers, Places], tuple[ResidualStream, list[jax.Array]]]
    backward: Callable[[ResidualStream, Layers, list[jax.Array], Places], tuple[ResidualStream, Any]]
    weights: Callable[[Layers, list[jax.Array], Places], Layers] | None = None
    saved: Sequence[jax.core.ShapedArray]
    kept_residuals: Sequence[jax.core.ShapedArray] = ()

    @classmethod
    def of(
        cls, through: Through, x: ResidualStream, weights: Layers, at: Places, *, split_: bool, manual: tuple[str, ...]
    ) -> Passes:
        """The passes of ``through`` for arrays like the arguments: a stream, the weights of one period, its places."""
        streamed, arrays = jax.tree.structure(x), len(jax.tree.leaves(x))

        def stream_and(results: Sequence[jax.Array]) -> tuple[ResidualStream, list[jax.Array]]:
            """The stream made of a pass's first results, and the other results."""
            stream: ResidualStream = jax.tree.unflatten(streamed, results[:arrays])
            return stream, list(results[arrays:])

        def forwards(x: ResidualStream, weights: Layers, at: Places) -> tuple[ResidualStream, Any]:
            y, pull = jax.vjp(lambda weights, x: through(x, weights, at), weights, x)
            inputs = {id(leaf): _TaskInputs(index) for index, leaf in enumerate(jax.tree.leaves((weights, at)))}
            return y, jax.tree.map(lambda leaf: inputs.get(id(leaf), leaf), pull)

        traced, (_, pull) = jax.make_jaxpr(forwards, return_shape=True)(x, weights, at)
        saved, gradients = traced.out_avals[arrays:], jax.tree.structure(weights)
        form = jax.tree.structure(pull)

        def backwards(
            dy: ResidualStream, weights: Layers, saved: list[jax.Array], at: Places
        ) -> tuple[ResidualStream, Layers]:
            inputs = jax.tree.leaves((weights, at))
            pull = jax.tree.map(
                lambda leaf: inputs[leaf.index] if isinstance(leaf, _TaskInputs) else leaf,
                jax.tree.unflatten(form, saved),
                is_leaf=lambda leaf: isinstance(leaf, _TaskInputs),
            )
            more, dx = pull(dy)
            return dx, more

        back = jax.make_jaxpr(backwards)(x, weights, list(saved), at)

        def forward(x: ResidualStream, weights: Layers, at: Places) -> tuple[ResidualStream, list[jax.Array]]:
            return stream_and(varying(jaxpr_as_fun(traced)(*jax.tree.leaves((x, weights, at))), manual))

        if not split_:

            def backward(
                dy: ResidualStream, weights: Layers, saved: list[jax.Array], at: Places
            ) -> tuple[ResidualStream, Any]:
                dx, more = stream_and(varying(jaxpr_as_fun(back)(*jax.tree.leaves((dy, weights, saved, at))), manual))
                return dx, jax.tree.unflatten(gradients, more)

            return cls(forward=forward, backward=backward, saved=saved)

        inputs = (x, False), (weights, True), (saved, False), (at, True)
        stays = [stay for tree, stay in inputs for _ in jax.tree.leaves(tree)]
        parts = split(back, outputs_first=arrays, stays=stays)

        def of_input(
            dy: ResidualStream, weights: Layers, saved: list[jax.Array], at: Places
        ) -> tuple[ResidualStream, Any]:
            return stream_and(varying(jaxpr_as_fun(parts.first)(*jax.tree.leaves((dy, weights, saved, at))), manual))

        def of_weights(weights: Layers, residuals: list[jax.Array], at: Places) -> Layers:
            leaves = varying(jaxpr_as_fun(parts.second)(*jax.tree.leaves((weights, at)), *residuals), manual)
            result: Layers = jax.tree.unflatten(gradients, leaves)
            return result

        residuals = parts.first.out_avals[arrays:]
        return cls(forward=forward, backward=of_input, weights=of_weights, saved=saved, kept_residuals=residuals)


def saved_on_host(through: Through, x: ResidualStream, weights: Layers, at: Places) -> list[bool]:
    """For each array that ``Passes.of`` saves: True where the remat policy of ``through`` offloads it."""
    saved = Passes.of(through, x, weights, at, split_=False, manual=()).saved
    return [aval.memory_space is jax.memory.Space.Host for aval in saved]


@jax.tree_util.register_static
@dataclass(frozen=True)
class _TaskInputs:
    """Stands for an array that a forward pass does not save: a weight or a place, by index."""

    index: int


#: Equations that group others, and could contain matmuls of both parts.
_GROUPS = {"checkpoint", "remat2", "jit", "pjit", "closed_call", "core_call"}


@dataclass(frozen=True, kw_only=True)
class Split:
    """``first``: inputs -> the first outputs, then residuals. ``second``: retained inputs, residuals -> other outputs.

    ``residuals`` is the number of arrays that cross the cut.
    """

    first: ClosedJaxpr
    second: ClosedJaxpr
    residuals: int


def split(traced: ClosedJaxpr, *, outputs_first: int, stays: Sequence[bool]) -> Split:
    """Cut ``traced`` so that its first part computes the first ``outputs_first`` outputs.

    ``stays`` says for each input if the second part gets it too. The second part's other inputs become residuals.
    """
    inlined = _inlined(traced.jaxpr)
    outputs = inlined.outvars
    first = _dependencies(_variables(outputs[:outputs_first]), inlined.eqns)
    computed = {var for equation in first for var in equation.outvars}
    later = [equation for equation in inlined.eqns if not computed.intersection(equation.outvars)]
    second = _dependencies(_variables(outputs[outputs_first:]), later)
    stay = [var for var, stays_ in zip(inlined.invars, stays, strict=True) if stays_]
    known = {*inlined.constvars, *stay, *(var for equation in second for var in equation.outvars)}
    read = _variables([*(atom for equation in second for atom in equation.invars), *outputs[outputs_first:]])
    residuals = [var for var in dict.fromkeys(read) if var not in known]
    return Split(
        first=_closed(traced, inlined.invars, [*outputs[:outputs_first], *residuals], first),
        second=_closed(traced, [*stay, *residuals], outputs[outputs_first:], second),
        residuals=len(residuals),
    )


def _dependencies(variables: Iterable[Var], equations: Sequence[JaxprEqn]) -> list[JaxprEqn]:
    """The equations that ``variables`` depend on, in order."""
    needed, required = set(variables), list[JaxprEqn]()
    for equation in reversed(equations):
        if needed.intersection(equation.outvars):
            needed.update(_variables(equation.invars))
            required.append(equation)
    return required[::-1]


def _closed(
    traced: ClosedJaxpr, inputs: Sequence[Var], outputs: Sequence[object], equations: list[JaxprEqn]
) -> ClosedJaxpr:
    jaxpr = traced.jaxpr.replace(
        invars=list(inputs),
        outvars=list(outputs),
        eqns=equations,
        debug_info=traced.jaxpr.debug_info.with_unknown_names(),
    )
    return ClosedJaxpr(jaxpr, traced.consts)


def _inlined(jaxpr: Jaxpr) -> Jaxpr:
    """The computation without equations that group others."""
    names = dict[Var, Var | Literal]()

    def of(atom: Var | Literal) -> Var | Literal:
        return names.get(atom, atom) if isinstance(atom, Var) else atom

    def flat(jaxpr: Jaxpr, within: JaxprEqn | None) -> list[JaxprEqn]:
        flattened = list[JaxprEqn]()
        for equation in jaxpr.eqns:
            source = equation.source_info
            if within is not None:
                stack = within.source_info.name_stack + source.name_stack
                source = source.replace(name_stack=stack)
            equation = equation.replace(invars=[of(atom) for atom in equation.invars], source_info=source)
            inner = equation.params.get("jaxpr")
            if equation.primitive.name not in _GROUPS:
                # A group may be called twice: each call needs new variables.
                fresh = [Var(var.aval) for var in equation.outvars]
                names.update(zip(equation.outvars, fresh, strict=True))
                flattened.append(equation.replace(outvars=fresh))
                continue
            consts: Sequence[object] = ()
            if isinstance(inner, ClosedJaxpr):
                inner, consts = inner.jaxpr, inner.consts
            assert not consts and not inner.constvars
            names.update(zip(inner.invars, equation.invars, strict=True))
            flattened += flat(inner, equation)
            names.update(zip(equation.outvars, [of(atom) for atom in inner.outvars], strict=True))
        return flattened

    equations = flat(jaxpr, None)
    return jaxpr.replace(eqns=equations, outvars=[of(atom) for atom in jaxpr.outvars])


def _variables(atoms: Sequence[object]) -> list[Var]:
    return [atom for atom in atoms if isinstance(atom, Var) and not isinstance(atom, Literal)]
