"""Builders of documents: one for each kind of answer, from its record. Data that ``--json`` prints is read as one.

A builder is imported when its kind is asked for.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rooftop.core.errors import unknown
from rooftop.core.records import Record, read_record
from rooftop.core.timelines import Lanes
from rooftop.present.document import MOST_LANES, Document, Timeline


@dataclass(frozen=True, kw_only=True)
class AnswerKind:
    """A kind of answer: its name in words, and its builder as MODULE:FUNCTION.

    ``record`` is the record that the builder takes, as MODULE:CLASS, or a function that picks the class for some data.
    ``lanes`` is a function of the record that yields its timelines.
    """

    what: str
    builder: str
    record: str
    lanes: str = ""

    def read(self, data: Mapping[str, Any]) -> Record:
        """The record in plain JSON. Raises RooftopError naming the field that is wrong."""
        named = _load(self.record)
        record: Record = read_record(
            named if isinstance(named, type) else named(data), data, self.what.removeprefix("a ").removeprefix("an ")
        )
        return record


def _load(name: str) -> Any:
    module, _, member = name.partition(":")
    return getattr(importlib.import_module(module), member)


#: Kinds of answers whose data names their kind.
KINDS: dict[str, AnswerKind] = {
    "train": AnswerKind(
        what="a plan of a training run",
        builder="training:training_plan",
        record="rooftop.plan.training.answer:TrainingAnswerDocument",
        lanes="training:training_lanes",
    ),
    "serve": AnswerKind(
        what="a plan of a server",
        builder="serving:serving_plan",
        record="rooftop.plan.serving.fleet:FleetAnswerDocument",
        lanes="serving:serving_lanes",
    ),
    "pareto": AnswerKind(
        what="a front of servers", builder="serving:front", record="rooftop.plan.serving.fleet:ServingFrontDocument"
    ),
    "embed": AnswerKind(
        what="a plan of embedding tables",
        builder="embedding:embedding_plan",
        record="rooftop.plan.embedding.plan:EmbedPlanDocument",
    ),
    "compiled_embed": AnswerKind(
        what="a compilation of embedding tables",
        builder="embedding:compiled_embedding",
        record="rooftop.explain.embedding.compiled:record_kind",
    ),
    "simulation": AnswerKind(
        what="a simulation",
        builder="serving:simulation",
        record="rooftop.simulate.serving.metrics:SimulationReport",
    ),
    "compiled": AnswerKind(
        what="a compilation", builder="compiled:compilation", record="rooftop.explain.compiled.report:record_kind"
    ),
    "script": AnswerKind(
        what="a script on a slice", builder="scripts:script", record="rooftop.explain.scripts:ScriptRecord"
    ),
    "check": AnswerKind(what="a checked program", builder="checked:checked", record="rooftop.check.report:CheckRecord"),
    "tuned": AnswerKind(what="a tuned program", builder="tuned:tuned", record="rooftop.tune.records:TuneRecord"),
    "explained": AnswerKind(
        what="an explained run", builder="explained:explained", record="rooftop.explain.measured.report:ExplainedRecord"
    ),
    "difference": AnswerKind(
        what="a difference of two runs",
        builder="explained:difference",
        record="rooftop.explain.difference:Difference",
    ),
    "calibration": AnswerKind(
        what="a calibration", builder="calibration:calibration", record="rooftop.roofline.calibration:Calibration"
    ),
    "operations": AnswerKind(
        what="operations", builder="explained:operations", record="rooftop.explain.operations:OperationsRecord"
    ),
}
#: Kinds that only their verb prints: their data does not name them.
_NAMELESS: dict[str, AnswerKind] = {
    "validation": AnswerKind(
        what="a validation", builder="validation:validation", record="rooftop.validation.report:ValidationRecord"
    ),
    "matmul": AnswerKind(
        what="a sharded product", builder="matmul:matmul", record="rooftop.explain.compiled.checks:ExpressionRecord"
    ),
    "bench collectives": AnswerKind(
        what="measured collectives",
        builder="matmul:collectives",
        record="rooftop.profile.microbench.records:CollectivesRecord",
    ),
    "bench serve": AnswerKind(
        what="a measured server", builder="serving:server", record="rooftop.serve.client.metrics:ServingBenchRecord"
    ),
}


def timeline_about(lanes: Lanes) -> str:
    """The note of a timeline, and the number of lanes that are not drawn."""
    left = len(lanes.lanes) - MOST_LANES
    parts = (lanes.note, f"{left} more lanes are not drawn" if left > 0 else "")
    return "; ".join(part for part in parts if part) or f"{lanes.source}, one step"


def document(
    answer: Mapping[str, Any] | Record, *, kind: str | None = None, lanes: Sequence[Lanes] = (), **context: Any
) -> Document:
    """The document of an answer, a record or its JSON, with timelines. ``context`` goes to the builder.

    ``kind`` is that of an answer that does not name its own.

    Raises RooftopError for a kind that has no document, and for JSON that is not of its kind.
    """
    name = kind or str(getattr(answer, "kind", None) if isinstance(answer, Record) else answer.get("kind"))
    kinds = KINDS | _NAMELESS
    if name not in kinds:
        raise unknown("document", name, kinds)
    how = kinds[name]
    record = answer if isinstance(answer, Record) else how.read(answer)
    builder: Callable[..., Document] = _load(f"{__name__}.{how.builder}")
    built = builder(record, **context)
    if not lanes and how.lanes:
        planned: Callable[[Any], Iterable[Lanes]] = _load(f"{__name__}.{how.lanes}")
        lanes = tuple(planned(record))
    drawn = tuple(
        Timeline(title=item.title, about=timeline_about(item), section="Timeline", lanes=item, detail=True)
        for item in lanes
    )
    at = next((at for at, chart in enumerate(built.charts) if chart.section == "Memory"), len(built.charts))
    return replace(built, charts=(*built.charts[:at], *drawn, *built.charts[at:]))
