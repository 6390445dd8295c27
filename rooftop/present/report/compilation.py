"""The page of a compilation: what the compiler made of a program beside its plan, with both timelines."""

from __future__ import annotations

from rooftop.compiler.machine.lanes import compiled_lanes
from rooftop.explain.compiled.report import CompiledReport
from rooftop.explain.compiled.training import Refusal
from rooftop.present.report import Material, page
from rooftop.simulate.planned import planned_lanes


def compiled_page(answer: CompiledReport | Refusal) -> str:
    """The page as HTML; of a refusal, what fills the memory that is too small."""
    plan = answer.plan
    lanes = [] if plan is None else [planned_lanes(plan)]
    if isinstance(answer, CompiledReport):
        lanes.append(compiled_lanes(answer.compiled.module, answer.timeline, title="compiled: the schedule of XLA"))
    data = answer.to_json()
    return page(Material(data=data, plan=None if plan is None else plan.to_json(), lanes=lanes))
