"""One period of a pipeline stage's layers, forwards and backwards, traced once for all its tasks.

What a forward pass keeps is what JAX would by the remat policy, less what the backward pass gets anyway: the weights,
and the places of the tokens. It is a list of arrays, so that a stage can put it into buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun

from rooftop.programs.model.transformer import Places
from rooftop.programs.parameters import Layer

Layers = tuple[Layer[jax.Array], ...]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class ResidualStream:
    """What passes from stage to stage: x [B, T, D], and what the experts of the layers so far got of its tokens.

    ``load`` [devices that split tokens, 3, E] is the sum of ``programs.model.moe.load`` over these layers; None:
    not measured. Derivatives come back in the same form.
    """

    x: jax.Array
    load: jax.Array | None = None

    def after(self, x: jax.Array, loads: Sequence[jax.Array]) -> ResidualStream:
        """The stream behind layers that made it ``x``, with the loads of their experts."""
        return ResidualStream(x=x, load=self.load if self.load is None else sum(loads, self.load))


#: The layers of a period on the stream, by their weights and places.
Through = Callable[[ResidualStream, Layers, Places], ResidualStream]


@dataclass(frozen=True, kw_only=True)
class Passes:
    """The passes of a period: all results vary over the stage's manual axes.

    forward: x, weights, places -> y, saved. backward: dy, weights, saved, places -> dx, gradients of weights; if it is
    split -> dx, kept, and weights: weights, kept, places -> gradients. ``saved`` and ``kept`` are the types of these;
    x, y and their derivatives are streams.
    """

    forward: Callable[[ResidualStream, Layers, Places], tuple[ResidualStream, list[jax.Array]]]
    backward: Callable[[ResidualStream, Layers, list[jax.Array], Places], tuple[ResidualStream, Any]]
    weights: Callable[[Layers, list[jax.Array], Places], Layers] | None = None
    saved: Sequence[jax.core.ShapedArray]
    kept: Sequence[jax.core.ShapedArray] = ()

    @classmethod
    def of(
        cls, through: Through, x: ResidualStream, weights: Layers, at: Places, *, split_: bool, manual: tuple[str, ...]
    ) -> Passes:
        """The passes of ``through`` for arrays such as the given ones: a stream, the weights of one period."""
        streamed, arrays = jax.tree.structure(x), len(jax.tree.leaves(x))

        def stream_and(found: Sequence[jax.Array]) -> tuple[ResidualStream, list[jax.Array]]:
            """The stream that the first of a pass's results are, and the other results."""
            made: ResidualStream = jax.tree.unflatten(streamed, found[:arrays])
            return made, list(found[arrays:])

        def forwards(x: ResidualStream, weights: Layers, at: Places) -> tuple[ResidualStream, Any]:
            y, pull = jax.vjp(lambda weights, x: through(x, weights, at), weights, x)
            given = {id(leaf): _TaskInputs(index) for index, leaf in enumerate(jax.tree.leaves((weights, at)))}
            return y, jax.tree.map(lambda leaf: given.get(id(leaf), leaf), pull)

        traced, (_, pull) = jax.make_jaxpr(forwards, return_shape=True)(x, weights, at)
        saved, gradients = traced.out_avals[arrays:], jax.tree.structure(weights)
        form = jax.tree.structure(pull)

        def backwards(
            dy: ResidualStream, weights: Layers, saved: list[jax.Array], at: Places
        ) -> tuple[ResidualStream, Layers]:
            given = jax.tree.leaves((weights, at))
            whole = jax.tree.map(
                lambda leaf: given[leaf.index] if isinstance(leaf, _TaskInputs) else leaf,
                jax.tree.unflatten(form, saved),
                is_leaf=lambda leaf: isinstance(leaf, _TaskInputs),
            )
            more, dx = whole(dy)
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
        stays = [stay for each, stay in inputs for _ in jax.tree.leaves(each)]
        parts = split(back, wanted=arrays, stays=stays)

        def of_input(
            dy: ResidualStream, weights: Layers, saved: list[jax.Array], at: Places
        ) -> tuple[ResidualStream, Any]:
            return stream_and(varying(jaxpr_as_fun(parts.first)(*jax.tree.leaves((dy, weights, saved, at))), manual))

        def of_weights(weights: Layers, kept: list[jax.Array], at: Places) -> Layers:
            more = varying(jaxpr_as_fun(parts.second)(*jax.tree.leaves((weights, at)), *kept), manual)
            found: Layers = jax.tree.unflatten(gradients, more)
            return found

        kept = parts.first.out_avals[arrays:]
        return cls(forward=forward, backward=of_input, weights=of_weights, saved=saved, kept=kept)


@jax.tree_util.register_static
@dataclass(frozen=True)
class _TaskInputs:
    """In place of an array that a forward pass does not keep: a weight or a place, by index."""

    index: int


def varying(tree: Any, axes: tuple[str, ...]) -> Any:
    """Arrays as varying over the manual axes, so that no gradient is summed over them before the end."""

    def vary(array: jax.Array) -> jax.Array:
        had = jax.typeof(array).manual_axis_type.varying
        missing = tuple(axis for axis in axes if axis not in had)
        return lax.pcast(array, missing, to="varying") if missing else array

    return jax.tree.map(vary, tree)


#: Equations that only group others, and so would put the matmuls of both parts into one.
_GROUPS = {"checkpoint", "remat2", "jit", "pjit", "closed_call", "core_call"}


@dataclass(frozen=True, kw_only=True)
class Split:
    """``first``: inputs -> the wanted outputs, then what is kept. ``second``: inputs that stay, and kept -> the others.

    ``kept`` counts what crosses the cut.
    """

    first: ClosedJaxpr
    second: ClosedJaxpr
    kept: int


def split(traced: ClosedJaxpr, *, wanted: int, stays: Sequence[bool]) -> Split:
    """Cut ``traced`` so that its first part makes the first ``wanted`` outputs.

    ``stays`` says of each input whether the second part gets it too; of the others it keeps what it needs.
    """
    inlined = _inlined(traced.jaxpr)
    outputs = inlined.outvars
    first = _making(_variables(outputs[:wanted]), inlined.eqns)
    made = {var for equation in first for var in equation.outvars}
    later = [equation for equation in inlined.eqns if not made.intersection(equation.outvars)]
    second = _making(_variables(outputs[wanted:]), later)
    stay = [var for var, stays_ in zip(inlined.invars, stays, strict=True) if stays_]
    known = {*inlined.constvars, *stay, *(var for equation in second for var in equation.outvars)}
    read = _variables([*(atom for equation in second for atom in equation.invars), *outputs[wanted:]])
    kept = [var for var in dict.fromkeys(read) if var not in known]
    return Split(
        first=_closed(traced, inlined.invars, [*outputs[:wanted], *kept], first),
        second=_closed(traced, [*stay, *kept], outputs[wanted:], second),
        kept=len(kept),
    )


def _making(wanted: Iterable[Var], equations: Sequence[JaxprEqn]) -> list[JaxprEqn]:
    """The equations that ``wanted`` depend on, in order."""
    needed, found = set(wanted), list[JaxprEqn]()
    for equation in reversed(equations):
        if needed.intersection(equation.outvars):
            needed.update(_variables(equation.invars))
            found.append(equation)
    return found[::-1]


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
    """The same computation without equations that only group others."""
    names = dict[Var, Var | Literal]()

    def of(atom: Var | Literal) -> Var | Literal:
        return names.get(atom, atom) if isinstance(atom, Var) else atom

    def flat(jaxpr: Jaxpr, within: JaxprEqn | None) -> list[JaxprEqn]:
        found = list[JaxprEqn]()
        for equation in jaxpr.eqns:
            source = equation.source_info
            if within is not None:
                stack = within.source_info.name_stack + source.name_stack
                source = source.replace(name_stack=stack)
            equation = equation.replace(invars=[of(atom) for atom in equation.invars], source_info=source)
            inner = equation.params.get("jaxpr")
            if equation.primitive.name not in _GROUPS:
                # A group may be called twice: its variables are new ones in each call.
                fresh = [Var(var.aval) for var in equation.outvars]
                names.update(zip(equation.outvars, fresh, strict=True))
                found.append(equation.replace(outvars=fresh))
                continue
            consts: Sequence[object] = ()
            if isinstance(inner, ClosedJaxpr):
                inner, consts = inner.jaxpr, inner.consts
            assert not consts and not inner.constvars
            names.update(zip(inner.invars, equation.invars, strict=True))
            found += flat(inner, equation)
            names.update(zip(equation.outvars, [of(atom) for atom in inner.outvars], strict=True))
        return found

    equations = flat(jaxpr, None)
    return jaxpr.replace(eqns=equations, outvars=[of(atom) for atom in jaxpr.outvars])


def _variables(atoms: Sequence[object]) -> list[Var]:
    return [atom for atom in atoms if isinstance(atom, Var) and not isinstance(atom, Literal)]
