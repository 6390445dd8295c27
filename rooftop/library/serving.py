"""Serving: plans of it, and the server itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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
from rooftop.library.inputs import (
    AxesLike,
    CalibrationLike,
    CountLike,
    ModelLike,
    OnSlice,
    PriceLike,
    TimeLike,
    axes_of,
    calibrated_places,
    chip_of,
    model_of,
    priced_places,
    rate_of,
    seconds_of,
    slice_of,
)
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
from rooftop.serve.request import ServeRequest

if TYPE_CHECKING:
    from rooftop.serve.run import ReadyProcess

#: A server's slice, or chips that are searched: 'v5e:4x4', 'v5e,v6e', or a list of chips.
ServersLike: TypeAlias = Slice | OnSlice | Chip | str | Sequence[Chip | str]
#: A dtype, or several that are searched: 'int8,bf16' or a list.
DtypesLike: TypeAlias = str | Sequence[str]

#: A progress callback: units done, units in all, and a label.
Progress: TypeAlias = Callable[[int, int, str], None]

#: Tokens of a prompt by default, of models made for as many and an answer.
PROMPT = 8192
#: Number formats that a search over chips tries by default.
_SEARCHED_OF_ENGINES = ("bf16", "f8_e4m3")
_SEARCHED = ("int8", "bf16")


@dataclass(frozen=True, kw_only=True, repr=False)
class ServingPlanResult(Result):
    """The best plan for one kind of server; with a rate or several chips, of the fleet that is recommended."""

    document_kind = "serve"

    answer: ServingAnswer
    recommendation: Recommendation | None = None

    @property
    def plan(self) -> ServingPlan:
        """The best plan."""
        return self.answer.plan

    @cached_property
    def _data(self) -> dict[str, object]:
        answer = self.answer.document
        return FleetAnswerDocument(
            **field_values(answer),
            recommendation=None if self.recommendation is None else self.recommendation.document,
        ).to_json()

    def to_json(self) -> dict[str, object]:
        """plan.json: all that is needed to simulate and to serve."""
        return dict(self._data)

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
        write_json(Path(path), self._data)


@dataclass(frozen=True, kw_only=True, repr=False)
class ServingFrontResult(Result):
    """Slices, number formats and batches at which no other generates both faster and at less cost, fastest first."""

    document_kind = "pareto"

    model: str
    points: Sequence[FleetPoint]

    def to_json(self) -> dict[str, object]:
        """The model and the points."""
        return ServingFrontDocument(kind="pareto", model=self.model, pareto=tuple(self.points)).to_json()

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
    where: Mapping[str, Sequence[Slice]]
    numerics: Sequence[ServingNumerics]
    modes: list[Mode]
    searching: bool


def plan_serving(
    model: ModelLike = "llama3-70b",
    *,
    on: ServersLike,
    prompt: CountLike | None = None,
    generate: CountLike = 512,
    batch_seqs: CountLike | None = None,
    context: CountLike | None = None,
    requests_per_second: float | str | None = None,
    ttft: TimeLike | None = None,
    tpot: TimeLike | None = None,
    hit_rate: float | str = 0.0,
    host_dram: CountLike | None = None,
    draft: ModelLike | None = None,
    draft_length: CountLike = 4,
    acceptance: float | str = 0.7,
    batching: str | None = None,
    mesh: AxesLike | None = None,
    prefill_mesh: AxesLike | None = None,
    prefill_on: Slice | OnSlice | str | None = None,
    kv_split: str | None = None,
    link: str = "dcn",
    weights_dtype: DtypesLike | None = None,
    kv_dtype: DtypesLike | None = None,
    matmul_dtype: str = "bf16",
    embeddings_dtype: str | None = None,
    weight_group: CountLike | None = None,
    kv_sharing: CountLike = 1,
    mfu: float | str | None = None,
    assume: str | None = None,
    engine: str | None = None,
    calibration: CalibrationLike | None = None,
    bounds: str = "usable",
    price: PriceLike | None = None,
    objective: str = "cost",
    contexts: Sequence[CountLike] | str | None = None,
    on_progress: Progress | None = None,
) -> ServingPlanResult:
    """Plan serving on one slice, or recommend a fleet for a rate of requests or over several chips.

    Args:
        model: A preset, a ModelConfig, or the path of a Hugging Face config.json or of its folder.
        on: A slice, CHIP:SHAPE, or chips to search, such as 'v5e,v6e'.
        prompt: Tokens of a prompt; by default 8,192, or as many as the model's longest sequence leaves.
        generate: Tokens of an answer.
        batch_seqs: Sequences generated together; searched by default.
        context: Tokens cached at the step that is priced; by default the prompt and half of the answer.
        requests_per_second: Rate to plan servers for.
        ttft: Target of the time to first token.
        tpot: Target of the time per output token.
        hit_rate: Share of a prompt that the prefix cache holds.
        host_dram: Bytes of a host's memory for the prefix cache.
        draft: Draft model of speculative decoding.
        draft_length: Tokens that the draft guesses a round.
        acceptance: Probability that a guess is right.
        batching: disaggregated or interleaved; by default the former, both where chips are searched.
        mesh: Axes of generation; searched by default.
        prefill_mesh: Axes of prefill; searched by default.
        prefill_on: Slice of a prefill server, if it is another one of the same chip.
        kv_split: The part of the cache that context splits: 'batch' or 'seq'; searched by default.
        link: The network between prefill and generate servers: 'ici' or 'dcn'.
        weights_dtype: Dtype of the layers' weights; several where chips are searched. By default the format of the
            published checkpoint, where an engine keeps it, and bf16 elsewhere.
        kv_dtype: Dtype of the KV cache; several where chips are searched.
        matmul_dtype: Dtype of the layers' matmuls.
        embeddings_dtype: Dtype of embedding and unembedding; by default bf16, as engines have them.
        weight_group: Input channels of the weights that share a scale; by default all, and 32 of f4_e2m1 (MXFP4).
        kv_sharing: Layers that share one KV cache.
        mfu: Share of peak that a prefill reaches, instead of our own estimate.
        assume: Assumptions: 'hbm_read=0.9,latency=0.5'.
        engine: Engine whose kernels are priced on a GPU, 'vllm' or 'trtllm', instead of our own programs. Matmuls are
            then in the weights' dtype unless ``matmul_dtype`` says otherwise.
        calibration: A calibration file of `rooftop calibrate`, or its fractions: they replace the catalogue's.
        bounds: 'usable' HBM, or the 'book' arithmetic.
        price: Dollars per chip-hour, instead of the list price; by chip where several are searched: 'h100=2.5,v5p=3'.
        objective: Minimize 'cost' or 'chips' in a search.
        contexts: Contexts of the front; by default the workload's.
        on_progress: Called with kinds of servers priced, their number, and a label, while chips are searched.

    A plan that does not fit, misses a target or is not executable is returned: ``raise_if_infeasible`` raises
    Infeasible for it. Raises Infeasible if a search finds no servers that do, and RooftopError naming the argument that
    is wrong.
    """
    if objective not in OBJECTIVES:
        raise unknown("for", objective, (*OBJECTIVES, "pareto"))
    sizes = _contexts(contexts)
    question = _question(
        model, on=on, prompt=prompt, generate=generate, batch_seqs=batch_seqs, context=context,
        requests_per_second=requests_per_second, ttft=ttft, tpot=tpot, hit_rate=hit_rate, host_dram=host_dram,
        draft=draft, draft_length=draft_length, acceptance=acceptance, batching=batching, mesh=mesh,
        prefill_mesh=prefill_mesh, prefill_on=prefill_on, kv_split=kv_split, link=link, weights_dtype=weights_dtype,
        kv_dtype=kv_dtype, matmul_dtype=matmul_dtype, embeddings_dtype=embeddings_dtype, weight_group=weight_group,
        kv_sharing=kv_sharing, mfu=mfu, assume=assume, engine=engine, calibration=calibration, bounds=bounds,
        price=price,
    )  # fmt: skip
    problem = question.problem
    if not question.searching and problem.workload.requests_per_second is None:
        return ServingPlanResult(answer=serving.plan_serving(problem, contexts=sizes))
    best = recommend(problem, question.where, question.numerics, question.modes, objective, on_progress)
    plan = best.best.plan
    answer = ServingAnswer(
        plan=plan,
        rule="fleet",
        extremes=None,
        smallest=smallest_slice(plan.problem, plan.batch),
        front=pareto(plan.problem, plan.problem.nearest_engines(plan.problem.generate_placements()), sizes),
        searched=best.searched,
    )
    return ServingPlanResult(answer=answer, recommendation=best)


def serving_front(
    model: ModelLike = "llama3-70b",
    *,
    on: ServersLike,
    prompt: CountLike | None = None,
    generate: CountLike = 512,
    context: CountLike | None = None,
    draft: ModelLike | None = None,
    draft_length: CountLike = 4,
    acceptance: float | str = 0.7,
    batching: str | None = None,
    mesh: AxesLike | None = None,
    kv_split: str | None = None,
    weights_dtype: DtypesLike | None = None,
    kv_dtype: DtypesLike | None = None,
    matmul_dtype: str = "bf16",
    embeddings_dtype: str | None = None,
    weight_group: CountLike | None = None,
    kv_sharing: CountLike = 1,
    assume: str | None = None,
    calibration: CalibrationLike | None = None,
    bounds: str = "usable",
    price: PriceLike | None = None,
    on_progress: Progress | None = None,
) -> ServingFrontResult:
    """The fastest and cheapest ways to generate over slices, number formats and batches; see ``plan_serving``.

    Raises RooftopError naming the argument that is wrong.
    """
    question = _question(
        model, on=on, prompt=prompt, generate=generate, context=context, draft=draft, draft_length=draft_length,
        acceptance=acceptance, batching=batching, mesh=mesh, kv_split=kv_split, weights_dtype=weights_dtype,
        kv_dtype=kv_dtype, matmul_dtype=matmul_dtype, embeddings_dtype=embeddings_dtype, weight_group=weight_group,
        kv_sharing=kv_sharing, assume=assume, calibration=calibration, bounds=bounds, price=price,
    )  # fmt: skip
    points = front(question.problem, question.where, question.numerics, on_progress)
    return ServingFrontResult(model=question.problem.model.name, points=points)


def _question(
    model: ModelLike,
    *,
    on: ServersLike,
    prompt: CountLike | None,
    generate: CountLike,
    batch_seqs: CountLike | None = None,
    context: CountLike | None,
    requests_per_second: float | str | None = None,
    ttft: TimeLike | None = None,
    tpot: TimeLike | None = None,
    hit_rate: float | str = 0.0,
    host_dram: CountLike | None = None,
    draft: ModelLike | None,
    draft_length: CountLike,
    acceptance: float | str,
    batching: str | None,
    mesh: AxesLike | None,
    prefill_mesh: AxesLike | None = None,
    prefill_on: Slice | OnSlice | str | None = None,
    kv_split: str | None,
    link: str = "dcn",
    weights_dtype: DtypesLike | None,
    kv_dtype: DtypesLike | None,
    matmul_dtype: str,
    embeddings_dtype: str | None,
    weight_group: CountLike | None,
    kv_sharing: CountLike,
    mfu: float | str | None = None,
    assume: str | None,
    engine: str | None = None,
    calibration: CalibrationLike | None,
    bounds: str,
    price: PriceLike | None,
) -> _Question:
    """The problem, with everything read and checked. Raises RooftopError naming the argument that is wrong."""
    where, searching = _servers(on)
    where = calibrated_places(priced_places(where, price), calibration)
    for name, value in (("mesh", mesh), ("prefill-mesh", prefill_mesh), ("prefill-on", prefill_on)):
        if searching and value is not None:
            raise RooftopError(name, value, "this with one slice, such as --on v5e:4x4")
    first = next(iter(where.values()))[0]
    prefill_slice = None if prefill_on is None else slice_of(prefill_on)
    if prefill_slice is not None and prefill_slice.chip.name == first.chip.name:
        # The same chip, with the price that is given.
        prefill_slice = Slice(first.chip, prefill_slice.shape, prefill_slice.num_slices)
    config, answer_tokens = model_of(model), parse_count(generate, "generate")
    published = None if weights_dtype is not None or bounds == "book" else published_weights(config)
    if published is None:
        formats = _formats(_dtypes(weights_dtype, "weights-dtype", searching, engine), weight_group)
    elif weight_group is None:
        formats = [published]
    else:
        raise RooftopError("weight-group", weight_group, "this with --weights-dtype")
    numerics = [
        ServingNumerics(
            weights=weights.dtype,
            kv=kv,
            flops=weights.dtype if engine and matmul_dtype == "bf16" else parse_dtype(matmul_dtype, "matmul-dtype"),
            embeddings="bf16" if embeddings_dtype is None else parse_dtype(embeddings_dtype, "embeddings-dtype"),
            weight_group=weights.group,
            only_experts=weights.only_experts,
            kv_sharing=parse_count(kv_sharing, "kv-sharing"),
        )
        for weights, kv in product(formats, _dtypes(kv_dtype, "kv-dtype", searching, engine))
    ]
    modes = [one_of("batching", batching, MODES)] if batching is not None else list(MODES if searching else MODES[:1])
    assumptions = ServingAssumptions(
        mfu=None if mfu is None else parse_share(mfu, "mfu"),
        engine=None if engine is None else one_of("engine", engine, tuple(ENGINES)),
    )
    longest_prompt = max(1, config.max_seq_len - answer_tokens)
    with _published_by(config, asked=weights_dtype is not None):
        problem = ServingProblem(
            model=config,
            slice=first,
            workload=ServingWorkload(
                prompt=min(PROMPT, longest_prompt) if prompt is None else parse_count(prompt, "prompt"),
                generate=answer_tokens,
                batch_seqs=None if batch_seqs is None else parse_count(batch_seqs, "batch-seqs"),
                context=None if context is None else parse_count(context, "context"),
                requests_per_second=rate_of(requests_per_second),
                ttft_s=None if ttft is None else seconds_of(ttft, "ttft"),
                tpot_s=None if tpot is None else seconds_of(tpot, "tpot"),
                hit_rate=parse_share(hit_rate, "hit-rate"),
            ),
            numerics=numerics[0],
            assumptions=assumptions if assume is None else assumptions.with_shares(assume),
            mode=modes[0],
            bounds=one_of("bounds", bounds, BOUNDS),
            axes=None if mesh is None else axes_of(mesh),
            prefill_axes=None if prefill_mesh is None else axes_of(prefill_mesh),
            kv_split=None if kv_split is None else one_of("kv-split", kv_split, KV_SPLITS),
            link=one_of("link", link, LINKS),
            draft=None
            if draft is None
            else DraftModel(
                model=model_of(draft),
                length=parse_count(draft_length, "draft-length"),
                acceptance=parse_share(acceptance, "acceptance"),
            ),
            host_bytes=None if host_dram is None else float(parse_bytes(host_dram, "host-dram")),
            prefill_slice=prefill_slice,
        )
    capacity, cached = problem.workload.held_tokens, problem.workload.context
    if not problem.book and cached is not None and cached > capacity:
        raise RooftopError("context", cached, f"at most {capacity:,}: the prompt and its answer")
    return _Question(problem=problem, where=where, numerics=numerics, modes=modes, searching=searching)


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
            where = slice_of(on)
            return {where.chip.name: [where]}, False
    elif isinstance(on, Chip):
        names = [on]
    elif isinstance(on, Sequence):
        names = on
    else:
        where = slice_of(on)
        return {where.chip.name: [where]}, False
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
    Infeasible if weights or cache do not fit the devices here.
    """
    from rooftop.serve.run import run

    if not isinstance(request, ServeRequest):
        request = ServeRequest(checkpoint=Path(request))
    run(request, on_ready=on_ready or (lambda ready: None), on_progress=on_progress)
