"""The programs of a plan of embedding tables: their compile requests, and the memory that they take of a device."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rooftop.arrays import Mesh
from rooftop.compiler.compiling import CompileRequest, Progress
from rooftop.compiler.sparsecore import PIPELINING_OPTIONS, PROGRAM, Marks, check_options, compile_with_marks
from rooftop.models.embedding_tables.limits import Limits, StackLimits
from rooftop.models.embedding_tables.stacking import Stack
from rooftop.plan.embedding.plan import EmbedPlan
from rooftop.plan.embedding.problem import per_device

#: Parts of a step that each stack is compiled for, and the planned memory that is theirs.
STACK_OF_PART: Mapping[Literal["lookup", "update"], str] = {"lookup": "forward_stack", "update": "backward_stack"}


@dataclass(frozen=True, kw_only=True)
class Compilation:
    """Options for compiling plans: see ``rooftop.compiler.compiling``. ``checks`` are names of CHECKS."""

    checks: tuple[str, ...] = ()
    timeout_s: float | None = None
    cache: bool = True
    on_progress: Progress | None = None

    def run(self, request: CompileRequest) -> Marks:
        """Compile one program."""
        return compile_with_marks(request, timeout_s=self.timeout_s, cache=self.cache, on_progress=self.on_progress)

    def about(self, what: str) -> Compilation:
        """The same options, with ``what`` in front of each line of progress."""
        report = self.on_progress
        if report is None:
            return self
        return dataclasses.replace(self, on_progress=lambda phase, seconds: report(f"{what}: {phase}", seconds))


def part_request(
    plan: EmbedPlan, part: str, stack: Stack, checks: tuple[str, ...] = (), limits: StackLimits | None = None
) -> CompileRequest:
    """One stack's lookup or update; with other ``limits`` than the plan's if given."""
    arguments = {**_arguments(plan), "part": part, "only": stack.name}
    if limits is not None:
        arguments["limits"] = {stack.name: vars(limits)}
    return CompileRequest(mesh=_mesh(plan), program=PROGRAM, arguments=arguments, options=check_options(checks))


def step_request(
    plan: EmbedPlan, step: str, checks: tuple[str, ...] = (), limits: Limits | None = None
) -> CompileRequest:
    """A whole step over all stacks, with other ``limits`` than the plan's if given.

    A tower of layers with the plan's FLOPs stands for the dense part.
    """
    arguments = {**_arguments(plan), "part": step, "dense_flops": plan.problem.dense_flops}
    if limits is not None:
        arguments["limits"] = {name: vars(one) for name, one in limits.items()}
    # A pipelined step is scheduled again once SparseCores have their work.
    defaults = PIPELINING_OPTIONS if step == "pipelined" else {}
    options = check_options(checks)
    return CompileRequest(mesh=_mesh(plan), program=PROGRAM, arguments=arguments, options=options, defaults=defaults)


def heap_bytes(marks: Marks) -> int:
    """Bytes of XLA's heap in a device's HBM at the peak, from its buffers: XLA's own figure may include the stack."""
    at_peak = marks.compiled.at_peak
    return marks.compiled.peak_bytes if at_peak is None else at_peak.allocated_bytes


def needed_bytes(marks: Marks, plan: EmbedPlan) -> int:
    """Bytes of HBM of a device that a program takes: XLA's heap at the peak, and the stacks of its SparseCores."""
    return heap_bytes(marks) + marks.hbm_bytes * per_device(plan.problem.slice)


def _mesh(plan: EmbedPlan) -> Mesh:
    return Mesh.lay(plan.problem.slice, {"data": plan.problem.slice.devices})


def _arguments(plan: EmbedPlan) -> dict[str, Any]:
    problem = plan.problem
    return {
        "tables": problem.tables.to_json(),
        "cores_per_device": per_device(problem.slice),
        "batch": problem.batch,
        "sample_passes": problem.sample_passes,
        "limits": {stack.name: vars(problem.limits[stack.name]) for stack in problem.stacking.stacks},
        "kernel": "sparsecore",
    }
