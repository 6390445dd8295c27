"""A plan of embedding tables compiled: each stack's lookup and update, and whole steps, by XLA:TPU beside the plan.

HBM that SparseCores take as their stack is in no memory analysis: the compiler's own high-water marks say it
(``rooftop.xla.sparsecore_marks``). Bytes are of one device unless said otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rooftop import __version__
from rooftop.arrays import Mesh
from rooftop.errors import Infeasible
from rooftop.explain.compiled import largest
from rooftop.models.tables_limits import Limits, StackLimits
from rooftop.models.tables_stacking import Stack
from rooftop.plan.embed import EmbedPlan, limits_of_stacks_text, limits_text
from rooftop.plan.embed_problem import per_device
from rooftop.quantities import format_bytes
from rooftop.xla.compiling import Progress, Request
from rooftop.xla.memory import OutOfMemory
from rooftop.xla.sparsecore_checks import PROGRAM, check_options, require_checks
from rooftop.xla.sparsecore_marks import TILE_MEMORY, Marks, compile_with_marks
from rooftop.xla.sparsecore_overlap import PIPELINING_OPTIONS, SparseCoreOverlap, sparsecore_overlap

SCHEMA = 1
#: Parts of a step that each stack is compiled for, and the planned memory that is theirs.
PARTS: Mapping[str, str] = {"lookup": "forward_stack", "update": "backward_stack"}
STEPS: tuple[str, ...] = ("sequential", "pipelined")
#: What a stack in HBM may differ by, compiled from planned.
TOLERANCE = 0.05
#: Limits that are too large for the compiler are tried again this much smaller, so many times.
_SMALLER, _TRIES = 0.9, 8


@dataclass(frozen=True, kw_only=True)
class Compilation:
    """How plans are compiled: see ``rooftop.xla.compiling``. ``checks`` are names of sparsecore_checks.CHECKS."""

    checks: tuple[str, ...] = ()
    timeout_s: float | None = None
    cache: bool = True
    on_progress: Progress | None = None

    def run(self, request: Request) -> Marks:
        """Compile one program."""
        return compile_with_marks(request, timeout_s=self.timeout_s, cache=self.cache, on_progress=self.on_progress)


@dataclass(frozen=True, kw_only=True)
class EmbedReport:
    """A plan's programs as the compiler made them: ``parts`` by stack and part, ``steps`` by name."""

    plan: EmbedPlan
    checks: tuple[str, ...]
    parts: Mapping[str, Mapping[str, Marks]]
    steps: Mapping[str, Marks]

    @cached_property
    def overlap(self) -> dict[str, SparseCoreOverlap]:
        """TensorCore work beside SparseCore work, by step."""
        return {name: sparsecore_overlap(one.compiled.module) for name, one in self.steps.items()}

    def needed_bytes(self, step: str) -> int:
        """HBM of a device: what XLA's heap holds at the peak, and the stacks of its SparseCores."""
        return needed_bytes(self.steps[step], self.plan)

    @property
    def capacity_bytes(self) -> float:
        """HBM of a device that programs may use."""
        return self.plan.problem.slice.chip.hbm_usable_bytes

    def stacks(self) -> list[dict[str, Any]]:
        """Each stack's lookup and update: HBM of one SparseCore and memory of a tile, planned and compiled."""
        own, found = per_device(self.plan.problem.slice), []
        for stack in self.plan.problem.stacking.stacks:
            planned = self.plan.stack_memory(stack)
            for part, name in PARTS.items():
                marks = self.parts[stack.name][part]
                hbm = planned[name] / own
                found.append(
                    {
                        "stack": stack.name,
                        "tables": [place.table.name for place in stack.places],
                        "part": part,
                        "planned_hbm_bytes": hbm,
                        "document_hbm_bytes": planned[f"{name}_document"] / own,
                        "hbm_bytes": marks.hbm_bytes,
                        "ratio": marks.hbm_bytes / hbm,
                        "holds": abs(marks.hbm_bytes / hbm - 1) <= TOLERANCE,
                        "planned_tile_bytes": planned["tile"],
                        "tile_bytes": marks.tile_bytes,
                    }
                )
        return found

    @property
    def agrees(self) -> bool:
        """Whether every stack in HBM is as planned, within TOLERANCE, and the plan found no obstacle either."""
        return not self.plan.obstacles and all(row["holds"] for row in self.stacks())

    @property
    def verdict(self) -> str:
        """One line."""
        rows = self.stacks()
        off = [f"{row['stack']} {row['part']} {row['ratio'] - 1:+.1%}" for row in rows if not row["holds"]]
        said = (
            f"SparseCore memory as planned within {TOLERANCE:.0%}" if not off else f"not as planned: {'; '.join(off)}"
        )
        if self.plan.obstacles:
            said = f"compiles, though the plan refuses it ({self.plan.obstacles[0]})"
        needed = max(self.needed_bytes(step) for step in STEPS)
        beside = self.overlap["pipelined"].share
        return (
            f"{said}; at most {format_bytes(needed)} of {format_bytes(self.capacity_bytes)} a device; pipelined, "
            f"{beside:.0%} of the TensorCores' computations beside SparseCore work"
        )

    def to_json(self, *, top: int = 10) -> dict[str, Any]:
        """As ``rooftop/schemas/compiled_embed.schema.json`` says; of each step's heap the ``top`` largest arrays."""
        return {
            **_head(self.plan, self.checks),
            "fits": True,
            "capacity_bytes": self.capacity_bytes,
            "stacks": self.stacks(),
            "steps": {name: self._step(name, top) for name in STEPS},
            "versions": dict(self.steps["pipelined"].compiled.versions),
            "agrees": self.agrees,
            "verdict": self.verdict,
        }

    def _step(self, name: str, top: int) -> dict[str, Any]:
        marks, overlap = self.steps[name], self.overlap[name]
        return {
            "options": step_options(name, self.checks),
            "planned_bytes": self.plan.memory["total"][name],
            "needed_bytes": self.needed_bytes(name),
            "heap_bytes": heap_bytes(marks),
            "arguments_bytes": marks.compiled.memory["argument"],
            "temporaries_bytes": marks.compiled.memory["temp"],
            "sparsecore_hbm_bytes": marks.hbm_bytes,
            "tile_bytes": marks.tile_bytes,
            "sparsecore_calls": overlap.calls,
            "tensorcore_computations": overlap.computations,
            "beside_sparsecores": overlap.beside,
            "overlap": overlap.share,
            "buffers": largest(marks.compiled.at_peak, top),
            "compile_s": marks.compiled.compile_s,
        }


@dataclass(frozen=True, kw_only=True)
class EmbedRefusal:
    """A plan that the compiler finds no room for: ``part`` of ``stack`` (None: a whole step), and why.

    ``largest`` are limits that did compile, of the stack or of all stacks, the largest that were tried; None if none
    were found.
    """

    plan: EmbedPlan
    checks: tuple[str, ...]
    part: str
    stack: str | None
    why: str
    largest: Limits | None

    @property
    def infeasible(self) -> Infeasible:
        """The answer as an exception."""
        where = f"stack {self.stack}" if self.stack is not None else "all stacks"
        by = self.why
        if self.largest is not None:
            most = limits_of_stacks_text(self.largest) if self.stack is None else limits_text(self.largest[self.stack])
            by += f"; at most {most}, which compiles"
        elif self.plan.obstacles:
            by += f"; by the plan: {self.plan.obstacles[0]}"
        return Infeasible(f"the {self.part} of {where} on {self.plan.problem.slice.name} does not fit", by)

    def to_json(self, *, top: int = 10) -> dict[str, Any]:
        """As ``rooftop/schemas/compiled_embed.schema.json`` says."""
        return {
            **_head(self.plan, self.checks),
            "fits": False,
            "capacity_bytes": self.plan.problem.slice.chip.hbm_usable_bytes,
            "part": self.part,
            "stack": self.stack,
            "why": self.why,
            "largest": None if self.largest is None or self.stack is None else vars(self.largest[self.stack]),
            "largest_limits": None if self.largest is None else {name: vars(one) for name, one in self.largest.items()},
            "obstacles": self.plan.obstacles,
            "verdict": str(self.infeasible),
        }


def heap_bytes(marks: Marks) -> int:
    """What XLA's heap holds of a device's HBM at the peak, by its buffers: its own figure may have some stack in it."""
    at_peak = marks.compiled.at_peak
    return marks.compiled.peak_bytes if at_peak is None else at_peak.allocated_bytes


def needed_bytes(marks: Marks, plan: EmbedPlan) -> int:
    """HBM of a device that a program takes: what XLA's heap holds at the peak, and the stacks of its SparseCores."""
    return heap_bytes(marks) + marks.hbm_bytes * per_device(plan.problem.slice)


def compile_embed_plan(plan: EmbedPlan, how: Compilation) -> EmbedReport | EmbedRefusal:
    """Compile lookup and update of every stack, then both steps; a refusal where the compiler finds no room.

    Raises RooftopError for checks that the compiler does not know and for what it refuses otherwise.
    """
    require_checks(
        how.checks,
        plan.problem.slice,
        timeout_s=how.timeout_s,
        cache=how.cache,
        on_progress=how.on_progress,
    )
    parts: dict[str, dict[str, Marks]] = {}
    for stack in plan.problem.stacking.stacks:
        parts[stack.name] = {}
        for part in PARTS:
            try:
                parts[stack.name][part] = how.run(part_request(plan, part, stack, how.checks))
            except Infeasible as no:
                return EmbedRefusal(
                    plan=plan,
                    checks=how.checks,
                    part=part,
                    stack=stack.name,
                    why=_why(no),
                    largest=_largest(plan, part, stack, how),
                )
    steps: dict[str, Marks] = {}
    for step in STEPS:
        try:
            steps[step] = how.run(step_request(plan, step, how.checks))
        except Infeasible as no:
            return _no_room(plan, step, _why(no), _over(no), how)
    report = EmbedReport(plan=plan, checks=how.checks, parts=parts, steps=steps)
    needed, capacity = report.needed_bytes("sequential"), report.capacity_bytes
    if needed > capacity:
        heap = heap_bytes(steps["sequential"])
        why = (
            f"{format_bytes(heap)} in XLA's heap and {format_bytes(needed - heap)} in the SparseCores' stacks, of "
            f"{format_bytes(capacity)} of HBM"
        )
        return _no_room(plan, "sequential", why, needed - capacity, how)
    return report


def part_request(
    plan: EmbedPlan, part: str, stack: Stack, checks: tuple[str, ...] = (), limits: StackLimits | None = None
) -> Request:
    """One stack's lookup or update; with other ``limits`` than the plan's if given."""
    arguments = {**_arguments(plan), "part": part, "only": stack.name}
    if limits is not None:
        arguments["limits"] = {stack.name: vars(limits)}
    return Request(mesh=_mesh(plan), program=PROGRAM, arguments=arguments, options=check_options(checks))


def step_request(plan: EmbedPlan, step: str, checks: tuple[str, ...] = (), limits: Limits | None = None) -> Request:
    """A whole step over all stacks, with other ``limits`` than the plan's if given.

    A tower of layers with the plan's FLOPs stands for the dense part.
    """
    arguments = {**_arguments(plan), "part": step, "dense_flops": plan.problem.dense_flops}
    if limits is not None:
        arguments["limits"] = {name: vars(one) for name, one in limits.items()}
    return Request(mesh=_mesh(plan), program=PROGRAM, arguments=arguments, options=step_options(step, checks))


def step_options(step: str, checks: tuple[str, ...]) -> dict[str, bool | int | str]:
    """Compiler options of a step: a pipelined one is scheduled again once SparseCores have their work."""
    return {**(PIPELINING_OPTIONS if step == "pipelined" else {}), **check_options(checks)}


def _head(plan: EmbedPlan, checks: tuple[str, ...]) -> dict[str, Any]:
    slice_ = plan.problem.slice
    return {
        "kind": "compiled_embed",
        "schema": SCHEMA,
        "rooftop_version": __version__,
        "slice": {"name": slice_.name, "chips": slice_.chips, "devices": slice_.devices},
        "sparse_cores": plan.problem.cores,
        "batch": plan.problem.batch,
        "checks": list(checks),
        "tile_capacity_bytes": plan.memory["tile_capacity"],
    }


def _mesh(plan: EmbedPlan) -> Mesh:
    return Mesh.lay(plan.problem.slice, {"data": plan.problem.slice.devices})


def _arguments(plan: EmbedPlan) -> dict[str, Any]:
    problem = plan.problem
    return {
        "tables": problem.tables.to_json(),
        "cores_per_device": per_device(problem.slice),
        "batch": problem.batch,
        "limits": {stack.name: vars(problem.limits[stack.name]) for stack in problem.stacking.stacks},
        "kernel": "sparsecore",
    }


def _why(no: Infeasible) -> str:
    """What the compiler said, in a line."""
    if isinstance(no, OutOfMemory):
        return f"XLA needs {format_bytes(no.needed_bytes)} of {format_bytes(no.available_bytes)} of HBM"
    return f"no room in {no.what} ({no.by})" if no.what == TILE_MEMORY else str(no)


def _largest(plan: EmbedPlan, part: str, stack: Stack, how: Compilation) -> Limits | None:
    """Limits that compile, in the proportion of the plan's: those of the plan's arithmetic first, then smaller."""
    own = plan.problem.limits[stack.name]
    limits = plan.largest_in_tile(stack)
    for _ in range(_TRIES):
        if limits == own:
            limits = limits.scaled(_SMALLER)
            continue
        try:
            how.run(part_request(plan, part, stack, how.checks, limits))
        except Infeasible:
            limits = limits.scaled(_SMALLER)
        else:
            return {stack.name: limits}
    return None


def _no_room(plan: EmbedPlan, step: str, why: str, over: float | None, how: Compilation) -> EmbedRefusal:
    """The refusal of a step that needs ``over`` bytes of HBM too many (None: not HBM is too small).

    Limits that do are looked for by the plan's arithmetic: what the compiler finds too much is taken off its room.
    """
    largest, room = None, plan.memory["total"][step]
    for _ in range(_TRIES):
        # A little more than that, so that few programs are compiled in vain.
        room -= (over or 0) / _SMALLER
        limits = None if over is None else plan.largest_in_hbm(room, step)
        if limits is None:
            break
        try:
            marks = how.run(step_request(plan, step, how.checks, limits))
            over = needed_bytes(marks, plan) - plan.problem.slice.chip.hbm_usable_bytes
        except OutOfMemory as no:
            over = _over(no)
            continue
        if over <= 0:
            largest = limits
            break
    return EmbedRefusal(plan=plan, checks=how.checks, part=f"{step} step", stack=None, why=why, largest=largest)


def _over(no: Infeasible) -> float | None:
    """Bytes of HBM that a program needs too many, if that is why it was refused; told in hundredths of a GiB."""
    return max(no.needed_bytes - no.available_bytes, 2**30 / 100) if isinstance(no, OutOfMemory) else None
