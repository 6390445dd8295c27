"""Serving: plans of it, and the server itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from rooftop.core.errors import RooftopError, unknown
from rooftop.core.files import write_json
from rooftop.core.quantities import (
    format_bytes,
    format_seconds,
    parse_count,
)
from rooftop.core.records import field_values
from rooftop.library.results import Result, flat, ledger_rows
from rooftop.plan.serving import answer as serving
from rooftop.plan.serving.answer import ServingAnswer
from rooftop.plan.serving.fleet import (
    OBJECTIVES,
    FleetAnswerDocument,
    FleetPoint,
    Recommendation,
    ServingFrontDocument,
    front,
    recommend,
)
from rooftop.plan.serving.plan import ServingPlan
from rooftop.plan.serving.search import pareto, smallest_slice
from rooftop.present.documents import document
from rooftop.requests.function import of_request
from rooftop.requests.planning import PlanServing
from rooftop.requests.serving_problems import serving_question
from rooftop.serve.request import ServeRequest

if TYPE_CHECKING:
    from rooftop.present.document import Document
    from rooftop.requests.likes import CountLike
    from rooftop.serve.run import ReadyProcess

#: A progress callback: units done, units in all, and a label.
Progress: TypeAlias = Callable[[int, int, str], None]

#: Fields that say nothing about the front of generation.
_NOT_OF_FRONTS = (
    "batch_seqs", "prefill_mesh", "prefill_on", "link", "ttft", "tpot", "requests_per_second", "hit_rate", "host_dram",
    "mfu", "engine", "release", "engine_settings", "contexts",
    "concurrency", "requests", "shortest", "replicas", "prefill_servers",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, repr=False)
class ServingPlanResult(Result):
    """The best plan for one kind of server; with a rate or several chips, of the fleet that is recommended."""

    request: PlanServing
    answer: ServingAnswer
    recommendation: Recommendation | None = None

    @property
    def plan(self) -> ServingPlan:
        """The best plan."""
        return self.answer.plan

    @cached_property
    def record(self) -> FleetAnswerDocument:
        """plan.json as a record."""
        return FleetAnswerDocument(
            **field_values(self.answer.document),
            recommendation=None if self.recommendation is None else self.recommendation.document,
            request=self.request.to_json(),
        )

    def to_json(self) -> dict[str, object]:
        """plan.json: all that is needed to simulate and to serve."""
        return self.record.to_json()

    @property
    def document(self) -> Document:
        """The plan, its ledgers and reasons, and the front of batches."""
        return document(self.record)

    @property
    def rows(self) -> list[dict[str, object]]:
        """The planned ledgers of a generate step and of a prefill."""
        return [*ledger_rows(self.plan.generate), *ledger_rows(self.plan.prefill)]

    @property
    def front(self) -> list[dict[str, object]]:
        """Batches at which no other is both faster and cheaper, a flat dict each."""
        return [flat(point.to_json()) for point in self.answer.front]

    @property
    def summary(self) -> str:
        """Fleet or batch, latencies and memory."""
        plan = self.plan
        problem = plan.problem
        fleet = None if self.recommendation is None else self.recommendation.best
        servers = f"{problem.slice.name}, batch {plan.batch}" if fleet is None else fleet.name
        ttft_s, tpot_s = (plan.ttft_s, plan.tpot_s) if fleet is None else (fleet.ttft_s, fleet.tpot_s)
        fits = "" if plan.fits else "does not fit: "
        return (
            f"{problem.model.name} on {servers}\n"
            f"{fits}TTFT {format_seconds(ttft_s)}, TPOT {format_seconds(tpot_s)}, "
            f"{plan.tokens_per_s:,.0f} tok/s a server, {format_bytes(float(plan.memory.total))} of "
            f"{format_bytes(problem.capacity)} a device"
        )

    def raise_if_infeasible(self) -> None:
        """Raise Infeasible if the batch does not fit, a target of one slice is missed, or our engine does not run it.

        Another engine runs the plans that are priced for it, and nothing the book's arithmetic.
        """
        self.plan.require_fit()
        if self.recommendation is None:
            self.plan.require_targets()
        self.answer.require_executable()

    def write_plan(self, path: Path | str) -> None:
        """Write plan.json. Raises RooftopError if the path cannot be written."""
        write_json(Path(path), self.to_json())


@dataclass(frozen=True, kw_only=True, repr=False)
class ServingFrontResult(Result):
    """Slices, number formats and batches at which no other generates both faster and at less cost, fastest first."""

    request: PlanServing
    model: str
    points: Sequence[FleetPoint]

    @property
    def record(self) -> ServingFrontDocument:
        """The answer as it is written."""
        return ServingFrontDocument(
            kind="pareto", model=self.model, pareto=tuple(self.points), request=self.request.to_json()
        )

    def to_json(self) -> dict[str, object]:
        """The model and the points."""
        return self.record.to_json()

    @property
    def document(self) -> Document:
        """The front as a chart and a table."""
        return document(self.record)

    @property
    def rows(self) -> list[dict[str, object]]:
        """A point a row."""
        return [flat(point.to_json()) for point in self.points]

    @property
    def summary(self) -> str:
        """The model and the number of points."""
        return f"{self.model}: {len(self.points)} ways to generate, none both slower and dearer than another"


@of_request(PlanServing)
def plan_serving(request: PlanServing, on_progress: Progress | None = None) -> ServingPlanResult:
    """Plan serving on one slice, or recommend a fleet for a rate of requests or over several chips.

    ``on_progress`` is called with kinds of servers priced, their number, and a label, while chips are searched.

    A plan that does not fit, misses a target or is not executable is returned: ``raise_if_infeasible`` raises
    Infeasible for it. Raises Infeasible if a search finds no servers that do, and RooftopError naming the field that
    is wrong.
    """
    if request.objective not in OBJECTIVES:
        raise unknown("for", request.objective, (*OBJECTIVES, "pareto"))
    sizes = _contexts(request.contexts)
    question = serving_question(request)
    problem = question.problem
    if question.searching and problem.workload.load is not None:
        raise RooftopError("concurrency", request.concurrency, "this with one slice, such as --on h100:4")
    if not question.searching and problem.workload.requests_per_second is None:
        return ServingPlanResult(request=request, answer=serving.plan_serving(problem, contexts=sizes))
    best = recommend(problem, question.places, question.numerics, question.modes, request.objective, on_progress)
    plan = best.best.plan
    answer = ServingAnswer(
        plan=plan,
        rule="fleet",
        extremes=None,
        smallest=smallest_slice(plan.problem, plan.batch),
        front=pareto(plan.problem, plan.problem.nearest_engines(plan.problem.generate_placements()), sizes),
        searched=best.searched,
    )
    return ServingPlanResult(request=request, answer=answer, recommendation=best)


@of_request(PlanServing)
def serving_front(request: PlanServing, on_progress: Progress | None = None) -> ServingFrontResult:
    """The fastest and cheapest ways to generate over slices, number formats and batches.

    Raises RooftopError naming the field that is wrong, or that says nothing about a step of generation.
    """
    for name, value in request.changed().items():
        if name in _NOT_OF_FRONTS:
            raise RooftopError(name.replace("_", "-"), value, "this without --for pareto")
    request = replace(request, objective="pareto")
    question = serving_question(request)
    points = front(question.problem, question.places, question.numerics, on_progress)
    return ServingFrontResult(request=request, model=question.problem.model.name, points=points)


def _contexts(contexts: Sequence[CountLike] | str | None) -> list[int] | None:
    if contexts is None:
        return None
    sizes = contexts.split(",") if isinstance(contexts, str) else contexts
    return [parse_count(size, "contexts") for size in sizes]


def serve(
    request: ServeRequest | Path | str,
    *,
    on_ready: Callable[[ReadyProcess], None] | None = None,
    on_progress: Progress | None = None,
) -> None:
    """Serve a model as OpenAI's API until SIGTERM or SIGINT.

    Args:
        request: A ServeRequest (``rooftop.ServeRequest``), or only its checkpoint: a folder or 'llama:2M'.
        on_ready: Called when requests are answered, with the address.
        on_progress: Called with programs compiled, programs in all, and a label.

    Call it in the main thread, before JAX is imported. Raises RooftopError naming the field that is wrong, and
    Infeasible if weights or cache do not fit the local devices.
    """
    from rooftop.serve.run import run

    if not isinstance(request, ServeRequest):
        request = ServeRequest(checkpoint=Path(request))
    run(request, on_ready=on_ready or (lambda ready: None), on_progress=on_progress)
