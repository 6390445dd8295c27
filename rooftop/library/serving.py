"""Serving: plans of it, and the server itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from rooftop.capabilities import KV_SPLITS, published_weights
from rooftop.core.errors import RooftopError, one_of, unknown
from rooftop.core.files import write_json
from rooftop.core.quantities import (
    format_bytes,
    format_seconds,
    parse_bytes,
    parse_count,
    parse_dtype,
    parse_share,
)
from rooftop.core.records import field_values
from rooftop.hardware import Chip, Slice
from rooftop.library.results import Result, flat, ledger_rows
from rooftop.models import ModelConfig
from rooftop.models.stored import MXFP4_GROUP, KeptWeights
from rooftop.plan.pricing import BOUNDS
from rooftop.plan.serving import answer as serving
from rooftop.plan.serving.answer import ServingAnswer
from rooftop.plan.serving.assumptions import ServingAssumptions
from rooftop.plan.serving.engines.kernels import ENGINES
from rooftop.plan.serving.fleet import (
    OBJECTIVES,
    FleetAnswerDocument,
    FleetPoint,
    Recommendation,
    ServingFrontDocument,
    candidate_slices,
    front,
    recommend,
)
from rooftop.plan.serving.plan import ServingPlan
from rooftop.plan.serving.problem import LINKS, MODES, Mode, ServingProblem
from rooftop.plan.serving.search import pareto, smallest_slice
from rooftop.plan.serving.workload import DraftModel, ServingNumerics, ServingWorkload
from rooftop.present.documents import document
from rooftop.requests.function import of_request
from rooftop.requests.inputs import (
    axes_of,
    calibrated_places,
    chip_of,
    model_of,
    priced_places,
    rate_of,
    seconds_of,
    slice_of,
)
from rooftop.requests.planning import PlanServing
from rooftop.serve.request import ServeRequest

if TYPE_CHECKING:
    from rooftop.present.document import Document
    from rooftop.requests.likes import CountLike, DtypesLike, ServersLike
    from rooftop.serve.run import ReadyProcess

#: A progress callback: units done, units in all, and a label.
Progress: TypeAlias = Callable[[int, int, str], None]

#: Tokens of a prompt by default, of models made for as many and an answer.
PROMPT = 8192
#: Number formats that a search over chips tries by default.
_SEARCHED_OF_ENGINES = ("bf16", "f8_e4m3")
_SEARCHED = ("int8", "bf16")
#: Fields that say nothing about the front of generation.
_NOT_OF_FRONTS = (
    "batch_seqs", "prefill_mesh", "prefill_on", "link", "ttft", "tpot", "requests_per_second", "hit_rate", "host_dram",
    "mfu", "engine", "contexts",
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


@dataclass(frozen=True, kw_only=True)
class _Question:
    """A problem, and the slices, number formats and batchings that are searched for it."""

    problem: ServingProblem
    places: Mapping[str, Sequence[Slice]]
    numerics: Sequence[ServingNumerics]
    modes: list[Mode]
    searching: bool


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
    question = _question(request)
    problem = question.problem
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
    question = _question(request)
    points = front(question.problem, question.places, question.numerics, on_progress)
    return ServingFrontResult(request=request, model=question.problem.model.name, points=points)


def _question(request: PlanServing) -> _Question:
    """The problem, with everything read and checked. Raises RooftopError naming the field that is wrong."""
    places, searching = _servers(request.on)
    places = calibrated_places(priced_places(places, request.price), request.calibration)
    for name in ("mesh", "prefill_mesh", "prefill_on"):
        if searching and (value := getattr(request, name)) is not None:
            raise RooftopError(name.replace("_", "-"), value, "this with one slice, such as --on v5e:4x4")
    for name in ("draft_length", "acceptance"):
        if request.draft is None and name in request.changed():
            raise RooftopError(name.replace("_", "-"), getattr(request, name), "this with --draft MODEL, which guesses")
    first, config = next(iter(places.values()))[0], model_of(request.model)
    numerics = _numerics(request, config, searching=searching)
    batching, kv_split, host_dram = request.batching, request.kv_split, request.host_dram
    modes = [one_of("batching", batching, MODES)] if batching is not None else list(MODES if searching else MODES[:1])
    assumptions = ServingAssumptions(
        mfu=None if request.mfu is None else parse_share(request.mfu, "mfu"),
        engine=None if request.engine is None else one_of("engine", request.engine, tuple(ENGINES)),
    )
    with _published_by(config, asked=request.weights_dtype is not None):
        problem = ServingProblem(
            model=config,
            slice=first,
            workload=_workload(request, config),
            numerics=numerics[0],
            assumptions=assumptions if request.assume is None else assumptions.with_shares(request.assume),
            mode=modes[0],
            bounds=one_of("bounds", request.bounds, BOUNDS),
            axes=None if request.mesh is None else axes_of(request.mesh),
            prefill_axes=None if request.prefill_mesh is None else axes_of(request.prefill_mesh),
            kv_split=None if kv_split is None else one_of("kv-split", kv_split, KV_SPLITS),
            link=one_of("link", request.link, LINKS),
            draft=_draft(request),
            host_bytes=None if host_dram is None else float(parse_bytes(host_dram, "host-dram")),
            prefill_slice=_prefill_slice(request, first),
        )
    capacity, cached = problem.workload.held_tokens, problem.workload.context
    if not problem.book and cached is not None and cached > capacity:
        raise RooftopError("context", cached, f"at most {capacity:,}: the prompt and its answer")
    return _Question(problem=problem, places=places, numerics=numerics, modes=modes, searching=searching)


def _workload(request: PlanServing, config: ModelConfig) -> ServingWorkload:
    """Lengths, batch and targets. Raises RooftopError."""
    generate, prompt = parse_count(request.generate, "generate"), request.prompt
    longest_prompt = max(1, config.max_seq_len - generate)
    return ServingWorkload(
        prompt=min(PROMPT, longest_prompt) if prompt is None else parse_count(prompt, "prompt"),
        generate=generate,
        batch_seqs=None if request.batch_seqs is None else parse_count(request.batch_seqs, "batch-seqs"),
        context=None if request.context is None else parse_count(request.context, "context"),
        requests_per_second=rate_of(request.requests_per_second),
        ttft_s=None if request.ttft is None else seconds_of(request.ttft, "ttft"),
        tpot_s=None if request.tpot is None else seconds_of(request.tpot, "tpot"),
        hit_rate=parse_share(request.hit_rate, "hit-rate"),
    )


def _numerics(request: PlanServing, config: ModelConfig, *, searching: bool) -> list[ServingNumerics]:
    """The number formats that are asked for: of the weights, times those of the KV cache. Raises RooftopError."""
    engine, matmul, embeddings = request.engine, request.matmul_dtype, request.embeddings_dtype
    is_free = request.weights_dtype is None and request.bounds != "book"
    published = published_weights(config) if is_free else None
    if published is None:
        formats = _formats(_dtypes(request.weights_dtype, "weights-dtype", searching, engine), request.weight_group)
    elif request.weight_group is None:
        formats = [published]
    else:
        raise RooftopError("weight-group", request.weight_group, "this with --weights-dtype")
    return [
        ServingNumerics(
            weights=weights.dtype,
            kv=kv,
            flops=weights.dtype if engine and matmul == "bf16" else parse_dtype(matmul, "matmul-dtype"),
            embeddings="bf16" if embeddings is None else parse_dtype(embeddings, "embeddings-dtype"),
            weight_group=weights.group,
            only_experts=weights.only_experts,
            kv_sharing=parse_count(request.kv_sharing, "kv-sharing"),
        )
        for weights, kv in product(formats, _dtypes(request.kv_dtype, "kv-dtype", searching, engine))
    ]


def _draft(request: PlanServing) -> DraftModel | None:
    if request.draft is None:
        return None
    return DraftModel(
        model=model_of(request.draft),
        length=parse_count(request.draft_length, "draft-length"),
        acceptance=parse_share(request.acceptance, "acceptance"),
    )


def _prefill_slice(request: PlanServing, first: Slice) -> Slice | None:
    """The slice of a prefill server. Of the same chip, with the price that is given."""
    if request.prefill_on is None:
        return None
    slice_ = slice_of(request.prefill_on)
    return Slice(first.chip, slice_.shape, slice_.num_slices) if slice_.chip.name == first.chip.name else slice_


@contextmanager
def _published_by(model: ModelConfig, *, asked: bool) -> Iterator[None]:
    """Say of weights that an engine does not have, and that nobody ``asked`` for, where they come from."""
    try:
        yield
    except RooftopError as error:
        if asked or not error.field.startswith("weights-dtype"):
            raise
        choice = error.accepted.partition(",")[0]
        value, accepted = f"{error.given}, as {model.name} is published", f"{error.accepted}: --weights-dtype {choice}"
        raise RooftopError(error.field, value, accepted) from None


def _servers(on: ServersLike) -> tuple[dict[str, list[Slice]], bool]:
    """Slices that servers may be, by chip, and whether chips are searched. Raises RooftopError."""
    if isinstance(on, str):
        names: Sequence[Chip | str] = [name.strip() for name in on.split(",")]
        if ":" in on and len(names) > 1:
            raise RooftopError("on", on, "one slice, such as v5e:4x4, or chips without shapes, such as v5e,v6e")
        if ":" in on:
            slice_ = slice_of(on)
            return {slice_.chip.name: [slice_]}, False
    elif isinstance(on, Chip):
        names = [on]
    elif isinstance(on, Sequence):
        names = on
    else:
        slice_ = slice_of(on)
        return {slice_.chip.name: [slice_]}, False
    result = {}
    for name in names:
        spec = chip_of(name)
        result[spec.name] = candidate_slices(Slice(spec, spec.slice_shapes[0]))
    return result, True


def _dtypes(dtypes: DtypesLike | None, field: str, searching: bool, engine: str | None) -> list[str]:
    if dtypes is None:
        searched = _SEARCHED if engine is None else _SEARCHED_OF_ENGINES
        return list(searched) if searching else ["bf16"]
    names = dtypes.split(",") if isinstance(dtypes, str) else dtypes
    if len(names) > 1 and not searching:
        raise RooftopError(field, ",".join(names), "one dtype each on one slice; lists where chips are searched")
    return [parse_dtype(name, field) for name in names]


def _formats(dtypes: Sequence[str], group: CountLike | None) -> list[KeptWeights]:
    """Formats of the weights of all layers."""
    size = None if group is None else parse_count(group, "weight-group")
    return [
        KeptWeights(dtype=dtype, group=MXFP4_GROUP if size is None and dtype == "f4_e2m1" else size) for dtype in dtypes
    ]


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
