"""Subjects of a search: the program of a plan, a function, or the costliest program of a script."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

from rooftop.arrays.mesh import Mesh
from rooftop.compiler.compiling import Compiled, CompileRequest, Progress, compile_ahead_of_time
from rooftop.core.errors import Infeasible, RooftopError
from rooftop.explain.compiled.function import PROGRAM
from rooftop.explain.compiled.training import request
from rooftop.explain.scripts import ScriptReport
from rooftop.hardware import Slice
from rooftop.plan.training.plan import TrainingPlan
from rooftop.target.running import run_script
from rooftop.tune.factors import (
    Factor,
    OptionValue,
    changed_plan,
    few_layers,
    in_turns,
    option_factors,
    plan_factors,
)


class Subject(Protocol):
    """A program that a search compiles with factors."""

    @property
    def slice(self) -> Slice:
        """The slice that it is compiled for."""

    @property
    def name(self) -> str:
        """The program in words."""

    @property
    def identity(self) -> Mapping[str, Any]:
        """All that the program follows from, as JSON values: trials of another program are not taken for its own."""

    def factors(self, searched: Sequence[str]) -> tuple[Factor, ...]:
        """Factors to try, in this order; ``searched`` names their kinds."""

    def compile(self, factors: Sequence[Factor], *, layers: int | None, cache: bool, on_progress: Progress) -> Compiled:
        """The program with these factors, and only so many ``layers`` (None: all).

        Raises Infeasible if it does not fit, RooftopError if it is refused.
        """

    def fewest_layers(self) -> int | None:
        """Layers of the smallest proxy; None if there is none."""

    def lines(self, factors: Sequence[Factor]) -> tuple[str, ...]:
        """Lines that set the factors, to be pasted."""


def options_of(factors: Sequence[Factor]) -> dict[str, OptionValue]:
    """Options of the compiler of all factors; the last one wins."""
    return {name: value for factor in factors for name, value in factor.options.items()}


def change_of(factors: Sequence[Factor]) -> dict[str, Any]:
    """The change of all factors; the last one wins."""
    return {name: value for factor in factors for name, value in factor.change.items()}


def option_lines(options: Mapping[str, OptionValue], slice_: Slice) -> tuple[str, ...]:
    """The environment variable, and the argument of jax.jit, that set options of the compiler."""
    if not options:
        return ()
    flags = " ".join(f"--{name}={_flag(value)}" for name, value in options.items())
    variable = "XLA_FLAGS" if slice_.chip.kind == "gpu" else "LIBTPU_INIT_ARGS"
    return f'{variable}="{flags}"', f"jax.jit(step, compiler_options={dict(options)!r})"


def _flag(value: OptionValue) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


@dataclass(frozen=True, kw_only=True)
class TunedPlan:
    """The train step of a plan."""

    plan: TrainingPlan

    @property
    def slice(self) -> Slice:
        """The slice of the plan."""
        return self.plan.problem.slice

    @property
    def name(self) -> str:
        """Model, slice and mesh."""
        mesh = ",".join(f"{name}={size}" for name, size in self.plan.mesh.shape.items() if size > 1)
        return f"{self.plan.problem.model.name} on {self.slice.name}, {mesh or 'one device'}"

    @cached_property
    def identity(self) -> Mapping[str, Any]:
        """The request of the plan's program."""
        return request(self.plan).to_json()

    def factors(self, searched: Sequence[str]) -> tuple[Factor, ...]:
        """Options and changes of the plan, in turns."""
        return in_turns([plan_factors(self.plan, name) for name in searched])

    def compile(self, factors: Sequence[Factor], *, layers: int | None, cache: bool, on_progress: Progress) -> Compiled:
        """The step of the changed plan."""
        plan = self.changed(factors)
        asked = request(plan if layers is None else few_layers(plan, layers))
        asked = replace(asked, options={**asked.options, **options_of(factors)})
        return compile_ahead_of_time(asked, cache=cache, on_progress=on_progress)

    def changed(self, factors: Sequence[Factor]) -> TrainingPlan:
        """The plan with the factors' changes; options of the compiler are in no plan."""
        return changed_plan(self.plan, change_of(factors))

    def fewest_layers(self) -> int | None:
        """Layers of the smallest plan of the model's kind; None if it is no smaller, or if no program runs it."""
        try:
            count = few_layers(self.plan).problem.model.layers
        except RooftopError:
            return None
        return count if count < self.plan.problem.model.layers else None

    def lines(self, factors: Sequence[Factor]) -> tuple[str, ...]:
        """Options of rooftop plan train, then those of the compiler."""
        words = []
        for name, value in change_of(factors).items():
            option = f"--{name.replace('_', '-')}"
            if isinstance(value, bool):
                words.append(option if value else f"--no-{name.replace('_', '-')}")
            elif name != "attention_block":
                words.append(f"{option} {shlex.quote(str(value))}")
        line = (f"rooftop plan train ... {' '.join(words)}",) if words else ()
        return (*line, *option_lines(options_of(factors), self.slice))


def setting_factors(vary: Mapping[str, Sequence[Any]]) -> tuple[Factor, ...]:
    """A factor for each value of a setting but the first, which is that of the baseline."""
    groups = [
        [Factor(knob=name, name=f"{name}={value}", change={name: value}) for value in values[1:]]
        for name, values in vary.items()
    ]
    return in_turns(groups)


@dataclass(frozen=True, kw_only=True)
class TunedFunction:
    """A function, 'module:function', of ``arrays`` in the notation; ``vary`` has the values of its own settings."""

    function: str
    arrays: tuple[str, ...]
    mesh: Mesh
    dims: Mapping[str, int] = field(default_factory=dict)
    auto: bool = False
    options: Mapping[str, OptionValue] = field(default_factory=dict)
    vary: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    @property
    def slice(self) -> Slice:
        """The slice of the mesh."""
        return self.mesh.slice

    @property
    def name(self) -> str:
        """Function, slice and mesh."""
        mesh = ",".join(f"{name}={size}" for name, size in self.mesh.shape.items())
        return f"{self.function} on {self.slice.name}, {mesh}"

    @property
    def identity(self) -> Mapping[str, Any]:
        """The request of the baseline."""
        return self._request(()).to_json()

    def factors(self, searched: Sequence[str]) -> tuple[Factor, ...]:
        """Options of the compiler, and the settings that vary."""
        options = option_factors(self.slice) if "options" in searched else ()
        return in_turns([options, setting_factors(self.vary)])

    def compile(self, factors: Sequence[Factor], *, layers: int | None, cache: bool, on_progress: Progress) -> Compiled:
        """The function with the factors' options and settings."""
        try:
            return compile_ahead_of_time(self._request(factors), cache=cache, on_progress=on_progress)
        except RooftopError as error:
            raise RooftopError("function", self.function, error.accepted) from None

    def _request(self, factors: Sequence[Factor]) -> CompileRequest:
        settings = {name: values[0] for name, values in self.vary.items()} | change_of(factors)
        arguments = {
            "function": self.function, "arrays": self.arrays, "dims": self.dims, "auto": self.auto, "settings": settings
        }  # fmt: skip
        options = {**self.options, **options_of(factors)}
        return CompileRequest(mesh=self.mesh, program=PROGRAM, arguments=arguments, options=options)

    def fewest_layers(self) -> int | None:
        """None: how a function is made smaller is not known."""
        return None

    def lines(self, factors: Sequence[Factor]) -> tuple[str, ...]:
        """Settings, then options of the compiler, with those of the baseline."""
        words = ", ".join(f"{name}={value!r}" for name, value in change_of(factors).items())
        options = {**self.options, **options_of(factors)} if options_of(factors) else {}
        return (*((f"{self.function}(..., {words})",) if words else ()), *option_lines(options, self.slice))


@dataclass(frozen=True, kw_only=True)
class TunedScript:
    """A script, and of it the program that takes longest; ``{NAME}`` in its words is the value of a setting."""

    words: tuple[str, ...]
    slice: Slice
    steps: int | None
    min_flops: float | None
    vary: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The command and the slice."""
        return f"{shlex.join(self.words)} on {self.slice.name}"

    @property
    def identity(self) -> Mapping[str, Any]:
        """The command, its settings and the slice."""
        vary = {name: list(values) for name, values in self.vary.items()}
        return {
            "words": list(self.words), "slice": self.slice.name, "steps": self.steps, "min_flops": self.min_flops,
            "vary": vary,
        }  # fmt: skip

    def factors(self, searched: Sequence[str]) -> tuple[Factor, ...]:
        """Options of the compiler, and the settings that vary."""
        options = option_factors(self.slice) if "options" in searched else ()
        return in_turns([options, setting_factors(self.vary)])

    def compile(self, factors: Sequence[Factor], *, layers: int | None, cache: bool, on_progress: Progress) -> Compiled:
        """The program of the script that takes longest.

        Raises RooftopError for a script that fails, or compiles no program that can be read.
        """
        words = self._command(change_of(factors))
        run = run_script(
            words, self.slice, steps=self.steps, min_flops=self.min_flops, cache=cache, options=options_of(factors),
            quiet=True, on_progress=on_progress,
        )  # fmt: skip
        report = ScriptReport(slice=self.slice, command=shlex.join(words), run=run)
        for problem in report.problems:
            if isinstance(problem, (Infeasible, RooftopError)):
                raise problem
        compiled = None if report.costliest is None else report.programs[report.costliest].report
        if compiled is None:
            raise RooftopError("script", shlex.join(words), "one that compiles a program which can be read")
        return compiled.compiled

    def _command(self, change: Mapping[str, Any]) -> tuple[str, ...]:
        values = {name: own[0] for name, own in self.vary.items()} | dict(change)
        words = list(self.words)
        for name, value in values.items():
            words = [word.replace("{" + name + "}", str(value)) for word in words]
        return tuple(words)

    def fewest_layers(self) -> int | None:
        """None: how a script is made smaller is not known."""
        return None

    def lines(self, factors: Sequence[Factor]) -> tuple[str, ...]:
        """The command with its settings, then options of the compiler."""
        change = change_of(factors)
        return (
            *((shlex.join(self._command(change)),) if change else ()),
            *option_lines(options_of(factors), self.slice),
        )
