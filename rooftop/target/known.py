"""The part of a program whose values are small and follow from known ones: it is computed on the CPU.

Programs look at such values while they run: PRNG keys, step counters, positions in a cache, learning rates. Equations
are taken from the traced program, so that a counter comes out right although the step around it is never executed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax._src import core
from jax._src.interpreters import partial_eval

from rooftop.target.computing import computing
from rooftop.target.standin import SMALL, is_known, value_of
from rooftop.target.written import inner_jaxprs, jaxpr_of

#: Primitives that pass values on: they say where, not what.
_PASSED = frozenset({"sharding_constraint", "reshard", "mesh_cast", "optimization_barrier", "copy", "copy_p"})
#: Primitives that call the program in one of their parameters.
_CALLS: Mapping[str, str] = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "checkpoint": "jaxpr",
    "remat2": "jaxpr",
}
#: Primitives that are not evaluated on the CPU: they need devices, or call back.
_LEFT_OUT = frozenset(
    {
        "pallas_call", "shard_map", "device_put", "io_callback", "pure_callback", "debug_callback", "debug_print",
        "custom_partitioning", "ffi_call",
    }
)  # fmt: skip
#: Test of values for infinities and NaN.
_FINITE = "is_finite"
#: Trips of the longest loop that is evaluated.
_TRIPS = 1000


@dataclass(frozen=True, kw_only=True)
class KnownPart:
    """A jitted ``function`` of the ``arguments`` (positions in the program) that gives its ``results`` (positions)."""

    function: Any
    arguments: tuple[int, ...]
    results: tuple[int, ...]

    def values(self, arguments: Sequence[Any]) -> dict[int, Any]:
        """Known results by their position."""
        with computing():
            computed = self.function(*(value_of(arguments[position]) for position in self.arguments))
        return dict(zip(self.results, computed, strict=True))


def known_part(program: Any, arguments: Sequence[bool]) -> KnownPart | None:
    """The part of a jaxpr that follows from the known ``arguments``; None if no result does."""
    jaxpr, constants = jaxpr_of(program)
    known = {variable for variable, is_it in zip(jaxpr.invars, arguments, strict=True) if is_it}
    known |= {variable for variable, value in zip(jaxpr.constvars, constants, strict=True) if is_known(value)}
    equations = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == _FINITE:
            # Values that nobody computes are taken to be finite: programs stop for those that are not.
            equation = equation.replace(invars=[])
        if all(_is_known(variable, known) for variable in equation.invars) and _is_computed(equation):
            equations.append(equation)
            known |= set(equation.outvars)
    results = tuple(at for at, variable in enumerate(jaxpr.outvars) if _is_known(variable, known))
    if not results:
        return None
    part = jaxpr.replace(
        eqns=equations,
        outvars=[jaxpr.outvars[at] for at in results],
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )
    part, used = partial_eval.dce_jaxpr(part, [True] * len(results), instantiate=False)
    kept_constants = {
        variable: value_of(value)
        for variable, value in zip(jaxpr.constvars, constants, strict=True)
        if variable in part.constvars
    }
    positions = tuple(at for at, is_used in enumerate(used) if is_used)
    names = [jaxpr.invars[at] for at in positions]

    def compute(*values: Any) -> list[Any]:
        return _evaluate(part, kept_constants | dict(zip(names, values, strict=True)))

    return KnownPart(function=jax.jit(compute), arguments=positions, results=results)


def _is_known(variable: Any, known: set[Any]) -> bool:
    return type(variable) is core.Literal or variable in known


def _is_computed(equation: Any) -> bool:
    """True if an equation, and all within it, is small enough and can be evaluated on the CPU."""
    if equation.effects or equation.primitive.name in _LEFT_OUT or equation.params.get("length", 0) > _TRIPS:
        return False
    if any(getattr(variable.aval, "size", SMALL + 1) > SMALL for variable in equation.outvars):
        return False
    return all(_is_computed(inner) for jaxpr in inner_jaxprs(equation) for inner in jaxpr.eqns)


def _evaluate(jaxpr: Any, values: dict[Any, Any]) -> list[Any]:
    """The results of a jaxpr without its meshes, from the ``values`` of its variables."""

    def value(variable: Any) -> Any:
        return variable.val if type(variable) is core.Literal else values[variable]

    for equation in jaxpr.eqns:
        name, operands = equation.primitive.name, [value(variable) for variable in equation.invars]
        if name in _PASSED:
            outputs = operands
        elif name == _FINITE and not operands:
            outputs = [jax.numpy.ones(equation.outvars[0].aval.shape, bool)]
        elif name in _CALLS:
            inner, constants = jaxpr_of(equation.params[_CALLS[name]])
            variables = dict(zip(inner.constvars, constants, strict=True)) | dict(
                zip(inner.invars, operands, strict=True)
            )
            outputs = _evaluate(inner, variables)
        else:
            placed = {
                key: None if key in ("sharding", "out_sharding") else parameter
                for key, parameter in equation.params.items()
            }
            bound = equation.primitive.bind(*operands, **placed)
            outputs = bound if equation.primitive.multiple_results else [bound]
        values = values | dict(zip(equation.outvars, outputs, strict=True))
    return [value(variable) for variable in jaxpr.outvars]
