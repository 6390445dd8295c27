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
from rooftop.errors import Infeasible
from rooftop.explain.compiled import largest
from rooftop.explain.embedding_limits import LargestLimits, beyond_hbm, largest_of_stack, largest_of_step, over_bytes
from rooftop.explain.embedding_programs import (
    STACK_OF_PART,
    Compilation,
    heap_bytes,
    needed_bytes,
    part_request,
    step_options,
    step_request,
)
from rooftop.models.tables_limits import Limits
from rooftop.plan.embed import EmbedPlan
from rooftop.plan.embed_limits import limits_of_stacks_text, limits_text
from rooftop.plan.embed_problem import per_device
from rooftop.quantities import format_bytes
from rooftop.xla.memory import OutOfMemory
from rooftop.xla.sparsecore_checks import require_checks
from rooftop.xla.sparsecore_marks import TILE_MEMORY, Marks
from rooftop.xla.sparsecore_overlap import SparseCoreOverlap, sparsecore_overlap

SCHEMA = 1
STEPS: tuple[str, ...] = ("sequential", "pipelined")
#: What a stack in HBM may differ by, compiled from planned.
TOLERANCE = 0.05


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
            for part, name in STACK_OF_PART.items():
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

    ``largest`` are the largest limits found to compile, of the stack or of all stacks, in the proportion of the plan's;
    None if none were found.
    """

    plan: EmbedPlan
    checks: tuple[str, ...]
    part: str
    stack: str | None
    why: str
    largest: LargestLimits | None

    @property
    def infeasible(self) -> Infeasible:
        """The answer as an exception."""
        where = f"stack {self.stack}" if self.stack is not None else "all stacks"
        by = self.why
        if self.largest is not None:
            by += f"; at most {self._text(self.largest.limits)}, which compiles"
            by += f" ({self._text(self.largest.refused)} does not"
            by += ")" if self.largest.monotonic else ", though the compiler may take more)"
        elif self.plan.obstacles:
            by += f"; by the plan: {self.plan.obstacles[0]}"
        if self.largest is not None and (fitting := self.plan.in_passes_that_fit) is not None:
            by += f"; by the plan --sample-passes {fitting.problem.sample_passes} fits"
        return Infeasible(f"the {self.part} of {where} on {self.plan.problem.slice.name} does not fit", by)

    def _text(self, limits: Limits) -> str:
        return limits_of_stacks_text(limits) if self.stack is None else limits_text(limits[self.stack])

    def to_json(self, *, top: int = 10) -> dict[str, Any]:
        """As ``rooftop/schemas/compiled_embed.schema.json`` says."""
        largest = self.largest
        return {
            **_head(self.plan, self.checks),
            "fits": False,
            "capacity_bytes": self.plan.problem.slice.chip.hbm_usable_bytes,
            "part": self.part,
            "stack": self.stack,
            "why": self.why,
            "largest": None if largest is None or self.stack is None else vars(largest.limits[self.stack]),
            "largest_limits": None if largest is None else _plain(largest.limits),
            "refused_limits": None if largest is None else _plain(largest.refused),
            "refused_why": None if largest is None else _why(largest.why),
            "larger_refused": None if largest is None else largest.monotonic,
            "limits_tried": None if largest is None else largest.tried,
            "obstacles": self.plan.obstacles,
            "verdict": str(self.infeasible),
        }


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
        for part in STACK_OF_PART:
            try:
                parts[stack.name][part] = how.about(f"{part} of {stack.name}").run(
                    part_request(plan, part, stack, how.checks)
                )
            except Infeasible as no:
                found = largest_of_stack(plan, part, stack, no, how)
                return EmbedRefusal(
                    plan=plan, checks=how.checks, part=part, stack=stack.name, why=_why(no), largest=found
                )
    steps: dict[str, Marks] = {}
    for step in STEPS:
        try:
            steps[step] = how.about(f"{step} step").run(step_request(plan, step, how.checks))
        except Infeasible as no:
            return _no_room(plan, step, _why(no), no, over_bytes(no), how)
    report = EmbedReport(plan=plan, checks=how.checks, parts=parts, steps=steps)
    needed, capacity = report.needed_bytes("sequential"), report.capacity_bytes
    if needed > capacity:
        heap = heap_bytes(steps["sequential"])
        why = (
            f"{format_bytes(heap)} in XLA's heap and {format_bytes(needed - heap)} in the SparseCores' stacks, of "
            f"{format_bytes(capacity)} of HBM"
        )
        return _no_room(plan, "sequential", why, beyond_hbm(needed, plan), needed - capacity, how)
    return report


def _head(plan: EmbedPlan, checks: tuple[str, ...]) -> dict[str, Any]:
    slice_ = plan.problem.slice
    return {
        "kind": "compiled_embed",
        "schema": SCHEMA,
        "rooftop_version": __version__,
        "slice": {"name": slice_.name, "chips": slice_.chips, "devices": slice_.devices},
        "sparse_cores": plan.problem.cores,
        "batch": plan.problem.batch,
        "sample_passes": plan.problem.sample_passes,
        "checks": list(checks),
        "tile_capacity_bytes": plan.memory["tile_capacity"],
    }


def _plain(limits: Limits) -> dict[str, dict[str, int]]:
    return {name: dict(vars(one)) for name, one in limits.items()}


def _why(no: Infeasible) -> str:
    """What the compiler said, in a line."""
    if isinstance(no, OutOfMemory):
        return f"XLA needs {format_bytes(no.needed_bytes)} of {format_bytes(no.available_bytes)} of HBM"
    return f"no room in {no.what} ({no.by})" if no.what == TILE_MEMORY else str(no)


def _no_room(plan: EmbedPlan, step: str, why: str, no: Infeasible, over: float, how: Compilation) -> EmbedRefusal:
    """The refusal of a step that needs ``over`` bytes of HBM too many (infinity: that is not known)."""
    found = largest_of_step(plan, step, no, over, how)
    return EmbedRefusal(plan=plan, checks=how.checks, part=f"{step} step", stack=None, why=why, largest=found)
