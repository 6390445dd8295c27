"""A backward pass in two: what the gradient of the input needs, and what remains for the gradients of the weights.

Zero-bubble schedules (Qi et al. 2023) do the two at different times. The cut goes between the equations of the traced
backward pass, matmul by matmul: an equation is of the first part if the input's gradient depends on it, and of the
second otherwise. What crosses the cut are mostly the operands of the weights' matmuls, to be kept in between.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

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
