"""The origin of a NaN: a step is repeated with every value checked, in the order of the program.

The step's jaxpr is traced again with a check for NaN and infinity after each equation; loops over layers and
microbatches check in each turn. Equations carry the scopes that the program opened.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import P
from jax.extend import core
from jax.sharding import reshard

from rooftop.core.scopes import UNSCOPED, scope_and_phase


@dataclass(frozen=True, kw_only=True)
class NanOrigin:
    """The first operation that produced a NaN (or an infinity, by ``what``): its scope, phase and JAX name.

    ``turns`` are the indices of the loops around it, outermost first: microbatches, and layers of one kind.
    """

    what: str
    scope: str
    phase: str
    operation: str
    turns: tuple[int, ...]

    def __str__(self) -> str:
        where = f"{self.scope} ({self.phase})" if self.scope != UNSCOPED else f"no scope ({self.phase})"
        turns = f" in turn {'.'.join(map(str, self.turns))} of the loop around it" if self.turns else ""
        return f"the first {self.what} is made in {where}, by {self.operation}{turns}"


@dataclass(frozen=True)
class _Place:
    """A jaxpr equation and its path: one index for each enclosing loop body, and its own in the innermost.

    ``reverse`` marks loops that run from their last turn to the first.
    """

    stack: str
    operation: str
    at: tuple[int, ...]
    reverse: tuple[bool, ...]

    def order(self, turns: Sequence[int]) -> tuple[int, ...]:
        """Return its position in the execution, in these turns of its loops."""
        signed = (-turn if backwards else turn for turn, backwards in zip(turns, self.reverse, strict=True))
        loops = (number for pair in zip(self.at, signed, strict=False) for number in pair)
        return (*loops, self.at[-1])


_Flags = list[tuple[_Place, jax.Array]]


def find_origin(step: Callable[..., Any], *arguments: Any) -> NanOrigin | None:
    """Run ``step`` once, checked, and return the origin of its first NaN, or else infinity. None: all is finite.

    An infinity below zero is a mask and no failure. An argument that is not finite is reported as such. Runs under
    ``jax.set_mesh``; several processes call it together.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(arguments):
        if jnp.issubdtype(leaf.dtype, jnp.floating) and not bool(_all_finite(leaf)):
            name = jax.tree_util.keystr(path[1:]).lstrip(".")
            return NanOrigin(
                what="NaN or infinity", scope=name, phase="before the step", operation="the state", turns=()
            )
    flat, tree = jax.tree.flatten(arguments)
    closed = jax.make_jaxpr(lambda *leaves: step(*jax.tree.unflatten(tree, leaves)))(*flat)
    places: list[_Place] = []

    def checked(*leaves: Any) -> list[jax.Array]:
        flags: _Flags = []
        _evaluate(closed.jaxpr, closed.consts, leaves, _Place("", "", (), ()), flags)
        places[:] = [place for place, _ in flags]
        return [flag for _, flag in flags]

    result = [np.asarray(flag) for flag in jax.jit(checked, compiler_options=_quickly())(*flat)]
    for kind, what in ((0, "NaN"), (1, "infinity")):
        marked = [
            (place.order(turns), tuple(turns), place)
            for place, flag in zip(places, result, strict=True)
            for turns in np.argwhere(flag[..., kind]).tolist()
        ]
        if marked:
            _, turns, place = min(marked, key=lambda entry: entry[0])
            scope, phase = scope_and_phase(place.stack)
            return NanOrigin(what=what, scope=scope, phase=phase, operation=place.operation, turns=turns)
    return None


def _quickly() -> dict[str, Any] | None:
    """Compiler options for a program that runs once: on a CPU, optimising takes longer than running."""
    if jax.default_backend() != "cpu":
        return None
    return {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


@jax.jit
def _all_finite(leaf: jax.Array) -> jax.Array:
    return jnp.all(jnp.isfinite(leaf))


def _evaluate(jaxpr: Any, consts: Sequence[Any], arguments: Sequence[Any], at: _Place, flags: _Flags) -> list[Any]:
    """Evaluate a jaxpr called at the path ``at``, with flags; loops and calls are entered."""
    values: dict[Any, Any] = {}

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, core.Literal) else values[atom]

    values.update(zip(jaxpr.constvars, consts, strict=True))
    values.update(zip(jaxpr.invars, arguments, strict=True))
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        words = (at.stack, str(equation.source_info.name_stack), "rematted_computation" if _again(equation) else "")
        here = replace(at, stack="/".join(word for word in words if word), operation=name)
        inputs = [read(atom) for atom in equation.invars]
        with equation.ctx.manager:
            if name == "scan":
                outputs = _scan(equation, inputs, replace(here, at=(*at.at, len(flags))), flags)
            elif (inner := _inner(equation)) is not None:
                outputs = _evaluate(inner.jaxpr, inner.consts, inputs, here, flags)
            else:
                out = equation.primitive.bind(*inputs, **equation.primitive.get_bind_params(equation.params))
                outputs = list(out) if equation.primitive.multiple_results else [out]
                _check(outputs, replace(here, at=(*at.at, len(flags))), flags)
        values.update(zip(equation.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _again(equation: Any) -> bool:
    """True if the equation recomputes, in the backward pass, a value that was not saved."""
    return bool(equation.params.get("differentiated", False)) and equation.primitive.name in ("checkpoint", "remat2")


def _scan(equation: Any, operands: list[Any], at: _Place, flags: _Flags) -> list[Any]:
    parameters = equation.params
    body, reverse = _closed(parameters["jaxpr"]), parameters["reverse"]
    if "ft_in" in parameters:  # newer than JAX 0.10
        consts, carry, inputs = (list(part) for part in parameters["ft_in"].update(operands).unpack())
    else:
        fixed, behind = parameters["num_consts"], parameters["num_consts"] + parameters["num_carry"]
        consts, carry, inputs = operands[:fixed], operands[fixed:behind], operands[behind:]
    carried = len(carry)
    inside = replace(at, reverse=(*at.reverse, reverse))
    places: list[_Place] = []

    def turn(carry: list[Any], item: list[Any]) -> tuple[list[Any], tuple[list[Any], list[jax.Array]]]:
        within: _Flags = []
        out = _evaluate(body.jaxpr, body.consts, [*consts, *carry, *item], inside, within)
        places[:] = [place for place, _ in within]
        return out[:carried], (out[carried:], [flag for _, flag in within])

    carry, (outputs, marks) = jax.lax.scan(turn, carry, inputs, length=parameters["length"], reverse=reverse)
    flags += zip(places, marks, strict=True)
    return [*carry, *outputs]


def _inner(equation: Any) -> Any:
    """The jaxpr that an equation calls; None for others: kernels and ``shard_map`` are checked as a whole."""
    if equation.primitive.name in ("jit", "pjit", "closed_call", "checkpoint", "remat2", "custom_jvp_call"):
        return _closed(equation.params.get("jaxpr", equation.params.get("call_jaxpr")))
    if equation.primitive.name == "custom_vjp_call":
        return _closed(equation.params["call_jaxpr"])
    return None


def _closed(jaxpr: Any) -> Any:
    """The closed form of a jaxpr: which equations hold an open one depends on JAX."""
    return jaxpr if hasattr(jaxpr, "consts") else core.ClosedJaxpr(jaxpr, ())


def _check(outputs: list[Any], place: _Place, flags: _Flags) -> None:
    """Flags of all results together, [2]: NaN, and infinity. Unreduced sums are checked once they are summed."""
    marks = []
    for array in outputs:
        spec = jax.typeof(array).sharding.spec
        if jnp.issubdtype(array.dtype, jnp.floating) and not spec.unreduced:
            array = reshard(array, P(*spec.partitions)) if spec.reduced else array
            marks.append(jnp.stack([jnp.any(jnp.isnan(array)), jnp.any(array == jnp.inf)]))
    if marks:
        flags.append((place, jnp.any(jnp.stack(marks), axis=0)))
