"""Serving: plans of it, simulations of requests against a plan, and the server itself."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from rooftop.capabilities import KV_SPLITS
from rooftop.core.errors import Infeasible, RooftopError, one_of, unknown
from rooftop.core.files import read_json_object, write_json, write_text
from rooftop.core.quantities import (
    format_bytes,
    format_seconds,
    parse_bytes,
    parse_count,
    parse_dtype,
    parse_quantity,
    parse_share,
)
from rooftop.hardware import Chip, Slice
from rooftop.library.inputs import (
    AxesLike,
    CountLike,
    ModelLike,
    OnSlice,
    TimeLike,
    axes_of,
    chip_of,
    model_of,
    seconds_of,
    slice_of,
)
from rooftop.library.results import Result, flat, ledger_rows
from rooftop.plan.pricing import BOUNDS
from rooftop.plan.serving import answer as serving
from rooftop.plan.serving.answer import ServingAnswer
from rooftop.plan.serving.assumptions import ServingAssumptions
from rooftop.plan.serving.fleet import OBJECTIVES, Recommendation, candidate_slices, front, recommend
from rooftop.plan.serving.plan import ServingPlan
from rooftop.plan.serving.problem import LINKS, MODES, Mode, ServingProblem
from rooftop.plan.serving.search import pareto, smallest_slice
from rooftop.plan.serving.workload import DraftModel, ServingNumerics, ServingWorkload
from rooftop.scheduling.serving.scheduler import Policy, Routing
from rooftop.serve.request import ServeRequest
from rooftop.simulate.serving import engine as simulator
from rooftop.simulate.serving.deployment import Deployment
from rooftop.simulate.serving.metrics import ServingMetrics, Targets
from rooftop.simulate.serving.timeline import timeline
from rooftop.simulate.serving.traces import Lengths, RequestTrace, draw_trace, read_trace

if TYPE_CHECKING:
    from rooftop.present.document import Document
    from rooftop.serve.run import ReadyProcess

#: A server's slice, or chips that are searched: 'v5e:4x4', 'v5e,v6e', or a list of chips.
ServersLike: TypeAlias = Slice | OnSlice | Chip | str | Sequence[Chip | str]
#: A dtype, or several that are searched: 'int8,bf16' or a list.
DtypesLike: TypeAlias = str | Sequence[str]
#: Tokens of a request: a number, or LOW:HIGH to draw from.
LengthsLike: TypeAlias = Lengths | CountLike
#: Done, in all, and what comes next.
Progress: TypeAlias = Callable[[int, int, str], None]

#: Number formats that a search over chips tries by default.
_SEARCHED = ("int8", "bf16")
#: Seconds of traffic that a timeline shows.
_TIMELINE_S = 60.0


@dataclass(frozen=True, kw_only=True, repr=False)
class ServingPlanResult(Result):
    """The best plan for one kind of server; with a rate or several chips, of the fleet that is recommended."""

    answer: ServingAnswer
    recommendation: Recommendation | None = None

    @property
    def plan(self) -> ServingPlan:
        """The best plan."""
        return self.answer.plan

    @cached_property
    def _data(self) -> dict[str, object]:
        fleet = None if self.recommendation is None else self.recommendation.to_json()
        return self.answer.to_json() | {"recommendation": fleet}

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
        return [flat(point) for point in self.answer.front]

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
        """Raise Infeasible if the batch does not fit, or the plan misses a target of one slice."""
        self.plan.require_fit()
        if self.recommendation is None:
            self.plan.require_targets()

    @property
    def document(self) -> Document:
        """The plan, its reasons, and the timelines of a step and of a prefill."""
        from rooftop.present.documents import document

        return document(self._data)

    def write_plan(self, path: Path | str) -> None:
        """Write plan.json. Raises RooftopError if the path cannot be written."""
        write_json(Path(path), self._data)


@dataclass(frozen=True, kw_only=True, repr=False)
class ServingFrontResult(Result):
    """Slices, number formats and batches at which no other generates both faster and at less cost, fastest first."""

    model: str
    points: Sequence[dict[str, object]]

    def to_json(self) -> dict[str, object]:
        """The model and the points."""
        return {"kind": "pareto", "model": self.model, "pareto": list(self.points)}

    @property
    def rows(self) -> list[dict[str, object]]:
        """A point a row."""
        return [flat(point) for point in self.points]

    @property
    def summary(self) -> str:
        """The model and the number of points."""
        return f"{self.model}: {len(self.points)} ways to generate, none both slower and dearer than another"

    @property
    def document(self) -> Document:
        """The front as a picture and a table."""
        from rooftop.present.documents import document

        return document(self.to_json())


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
    prompt: CountLike = 8192,
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
    bounds: str = "usable",
    price: float | str | None = None,
    objective: str = "cost",
    contexts: Sequence[CountLike] | str | None = None,
) -> ServingPlanResult:
    """Plan serving on one slice, or recommend a fleet for a rate of requests or over several chips.

    Args:
        model: A preset, a ModelConfig, or the path of a Hugging Face config.json or of its folder.
        on: A slice, CHIP:SHAPE, or chips to search, such as 'v5e,v6e'.
        prompt: Tokens of a prompt.
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
        weights_dtype: Dtype of the layers' weights; several where chips are searched.
        kv_dtype: Dtype of the KV cache; several where chips are searched.
        matmul_dtype: Dtype of the layers' matmuls.
        embeddings_dtype: Dtype of embedding and unembedding; by default that of the weights.
        weight_group: Input channels of the weights that share a scale; all by default.
        kv_sharing: Layers that share one KV cache.
        mfu: Share of peak that a prefill reaches, instead of our own estimate.
        assume: Assumptions: 'hbm_read=0.9,latency=0.5'.
        bounds: 'usable' HBM, or the 'book' arithmetic.
        price: Dollars per chip-hour, instead of the list price.
        objective: Minimize 'cost' or 'chips' in a search.
        contexts: Contexts of the front; by default the workload's.

    A plan that does not fit or misses a target is returned: ``raise_if_infeasible`` raises Infeasible for it. Raises
    Infeasible if a search finds no servers that do, and RooftopError naming the argument that is wrong.
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
        kv_sharing=kv_sharing, mfu=mfu, assume=assume, bounds=bounds, price=price,
    )  # fmt: skip
    problem = question.problem
    if not question.searching and problem.workload.requests_per_second is None:
        return ServingPlanResult(answer=serving.plan_serving(problem, contexts=sizes))
    best = recommend(problem, question.where, question.numerics, question.modes, objective)
    plan = best.best.plan
    answer = ServingAnswer(
        plan=plan,
        smallest=smallest_slice(plan.problem, plan.batch),
        front=pareto(plan.problem, plan.problem.generate_placements(), sizes),
        searched=best.searched,
    )
    return ServingPlanResult(answer=answer, recommendation=best)


def serving_front(
    model: ModelLike = "llama3-70b",
    *,
    on: ServersLike,
    prompt: CountLike = 8192,
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
    bounds: str = "usable",
    price: float | str | None = None,
) -> ServingFrontResult:
    """The fastest and cheapest ways to generate over slices, number formats and batches; see ``plan_serving``.

    Raises RooftopError naming the argument that is wrong.
    """
    question = _question(
        model, on=on, prompt=prompt, generate=generate, context=context, draft=draft, draft_length=draft_length,
        acceptance=acceptance, batching=batching, mesh=mesh, kv_split=kv_split, weights_dtype=weights_dtype,
        kv_dtype=kv_dtype, matmul_dtype=matmul_dtype, embeddings_dtype=embeddings_dtype, weight_group=weight_group,
        kv_sharing=kv_sharing, assume=assume, bounds=bounds, price=price,
    )  # fmt: skip
    points = front(question.problem, question.where, question.numerics)
    return ServingFrontResult(model=question.problem.model.name, points=points)


def _question(
    model: ModelLike,
    *,
    on: ServersLike,
    prompt: CountLike,
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
    bounds: str,
    price: float | str | None,
) -> _Question:
    """The problem, with everything read and checked. Raises RooftopError naming the argument that is wrong."""
    where, searching = _servers(on, price)
    for name, value in (("mesh", mesh), ("prefill-mesh", prefill_mesh), ("prefill-on", prefill_on)):
        if searching and value is not None:
            raise RooftopError(name, value, "this with one slice, such as --on v5e:4x4")
    first = next(iter(where.values()))[0]
    prefill_slice = None if prefill_on is None else slice_of(prefill_on)
    if prefill_slice is not None and prefill_slice.chip.name == first.chip.name:
        # The same chip, with the price that is given.
        prefill_slice = Slice(first.chip, prefill_slice.shape, prefill_slice.num_slices)
    numerics = [
        ServingNumerics(
            weights=weights,
            kv=kv,
            flops=parse_dtype(matmul_dtype, "matmul-dtype"),
            embeddings=None if embeddings_dtype is None else parse_dtype(embeddings_dtype, "embeddings-dtype"),
            weight_group=None if weight_group is None else parse_count(weight_group, "weight-group"),
            kv_sharing=parse_count(kv_sharing, "kv-sharing"),
        )
        for weights, kv in product(
            _dtypes(weights_dtype, "weights-dtype", searching), _dtypes(kv_dtype, "kv-dtype", searching)
        )
    ]
    modes = [one_of("batching", batching, MODES)] if batching is not None else list(MODES if searching else MODES[:1])
    assumptions = ServingAssumptions(mfu=None if mfu is None else parse_share(mfu, "mfu"))
    problem = ServingProblem(
        model=model_of(model),
        slice=first,
        workload=ServingWorkload(
            prompt=parse_count(prompt, "prompt"),
            generate=parse_count(generate, "generate"),
            batch_seqs=None if batch_seqs is None else parse_count(batch_seqs, "batch-seqs"),
            context=None if context is None else parse_count(context, "context"),
            requests_per_second=_rate(requests_per_second),
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


def _servers(on: ServersLike, price: float | str | None) -> tuple[dict[str, list[Slice]], bool]:
    """Slices that servers may be, by chip, and whether chips are searched. Raises RooftopError."""
    if isinstance(on, str):
        names: Sequence[Chip | str] = [name.strip() for name in on.split(",")]
        if ":" in on and len(names) > 1:
            raise RooftopError("on", on, "one slice, such as v5e:4x4, or chips without shapes, such as v5e,v6e")
        if ":" in on:
            where = slice_of(on, price=price)
            return {where.chip.name: [where]}, False
    elif isinstance(on, Chip):
        names = [on]
    elif isinstance(on, Sequence):
        names = on
    else:
        where = slice_of(on, price=price)
        return {where.chip.name: [where]}, False
    result = {}
    for name in names:
        spec = chip_of(name)
        like = slice_of(Slice(spec, spec.slice_shapes[0]), price=price)
        result[spec.name] = candidate_slices(like)
    return result, True


def _dtypes(dtypes: DtypesLike | None, field: str, searching: bool) -> list[str]:
    if dtypes is None:
        return list(_SEARCHED) if searching else ["bf16"]
    names = dtypes.split(",") if isinstance(dtypes, str) else dtypes
    if len(names) > 1 and not searching:
        raise RooftopError(field, ",".join(names), "one dtype each on one slice; lists where chips are searched")
    return [parse_dtype(name, field) for name in names]


def _contexts(contexts: Sequence[CountLike] | str | None) -> list[int] | None:
    if contexts is None:
        return None
    sizes = contexts.split(",") if isinstance(contexts, str) else contexts
    return [parse_count(size, "contexts") for size in sizes]


def _rate(requests_per_second: float | str | None) -> float | None:
    return None if requests_per_second is None else parse_quantity(requests_per_second, "requests-per-second")


@dataclass(frozen=True, kw_only=True, repr=False)
class SimulationResult(Result):
    """Requests served by a plan: the latencies that users see, and the load of the servers."""

    plan: ServingPlan
    deployment: Deployment
    metrics: ServingMetrics

    @cached_property
    def _data(self) -> dict[str, object]:
        from rooftop import __version__

        problem, policy, trace = self.plan.problem, self.deployment.policy, self.metrics.simulation.trace
        return {
            "kind": "simulation",
            "schema": 1,
            "rooftop_version": __version__,
            "plan": {
                "model": problem.model.name,
                "slice": problem.slice.name,
                "prefill_slice": problem.prefill_server.name,
                "mode": problem.mode,
                "batch": self.plan.batch,
                "ttft_s": self.plan.ttft_s,
                "tpot_s": self.plan.tpot_s,
            },
            "deployment": {
                "batching": policy.batching,
                "chunk_tokens": policy.chunk_tokens,
                "max_batch": policy.max_batch,
                "preemption": policy.preemption,
                "replicas": self.deployment.replicas,
                "prefill_servers": self.deployment.prefill_servers,
                "routing": self.deployment.routing.kind,
                "prefix_cache": self.deployment.prefix_cache,
                "host_kv_tokens": self.deployment.host_kv_tokens,
            },
            "trace": {
                "requests": len(trace),
                "seconds": float(trace.arrival_s[-1]),
                "mean_prompt_tokens": float(trace.prompt_tokens.mean()),
                "mean_output_tokens": float(trace.output_tokens.mean()),
                "hashes": trace.hashes is not None,
            },
        } | self.metrics.to_json()

    def to_json(self) -> dict[str, object]:
        """Plan, deployment, trace, latencies and servers."""
        return dict(self._data)

    @property
    def rows(self) -> list[dict[str, object]]:
        """A request a row: its lengths and times; times of refused requests are None."""
        simulation, metrics = self.metrics.simulation, self.metrics
        trace, requests = simulation.trace, simulation.requests
        lengths = zip(
            trace.arrival_s.tolist(),
            trace.prompt_tokens.tolist(),
            trace.output_tokens.tolist(),
            requests.cached,
            requests.server,
            requests.preemptions,
            strict=True,
        )
        names = ("arrival_s", "prompt_tokens", "output_tokens", "cached_tokens", "server", "preemptions")
        times = ("ttft_s", "tpot_s", "worst_itl_s", "e2e_s")
        seconds = zip(*(getattr(metrics, name).tolist() for name in times), strict=True)
        return [
            {"request": number}
            | dict(zip(names, counts, strict=True))
            | {name: None if math.isnan(value) else value for name, value in zip(times, spent, strict=True)}
            for number, (counts, spent) in enumerate(zip(lengths, seconds, strict=True))
        ]

    @property
    def document(self) -> Document:
        """Latencies that users feel, and the work of servers."""
        from rooftop.present.documents import document

        return document(self.to_json())

    @property
    def summary(self) -> str:
        """Requests served, and mean and tail of the latencies."""
        metrics, deployment = self.metrics, self.deployment
        data = metrics.to_json()
        ttft, tpot = data["ttft_s"], data["tpot_s"]
        latencies = [
            f"{name} {format_seconds(values['p50'])} median, {format_seconds(values['p99'])} at p99"
            for name, values in (("TTFT", ttft), ("TPOT", tpot))
            if values is not None
        ]
        return (
            f"{self.plan.problem.model.name} on {deployment.replicas} x {self.plan.problem.slice.name}, "
            f"{deployment.policy.batching}: {metrics.finished:,} of {len(metrics.simulation.trace):,} requests\n"
            f"{'; '.join(latencies)}"
        )

    def raise_if_infeasible(self) -> None:
        """Raise Infeasible if no request was served."""
        if not self.metrics.finished:
            refused = next(iter(self.metrics.simulation.requests.refused.values()))
            raise Infeasible("no request can be served", refused)

    def write_requests(self, path: Path | str) -> None:
        """Write ``rows`` as CSV."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        for number, row in enumerate(self.rows):
            if not number:
                writer.writerow(row)
            writer.writerow(f"{cell:.9g}" if isinstance(cell, float) else cell for cell in row.values())
        write_text(Path(path), text.getvalue())

    def write_perfetto(self, path: Path | str) -> None:
        """Write the timeline of the first minute for ui.perfetto.dev."""
        write_text(Path(path), json.dumps(timeline(self.metrics.simulation, _TIMELINE_S), allow_nan=False))


def simulate(
    plan: ServingPlanResult | ServingPlan | Mapping[str, object] | Path | str,
    *,
    trace: RequestTrace | Path | str | None = None,
    requests_per_second: float | str | None = None,
    duration: TimeLike = 600.0,
    prompt: LengthsLike | None = None,
    generate: LengthsLike | None = None,
    burstiness: float | str = 1.0,
    seed: int = 0,
    hash_tokens: CountLike = 512,
    batching: str | None = None,
    chunk_tokens: CountLike | None = None,
    batch_seqs: CountLike | None = None,
    replicas: CountLike | None = None,
    prefill_servers: CountLike | None = None,
    routing: str = "least_loaded",
    preemption: str = "recompute",
    prefix_cache: bool = False,
    host_dram: CountLike | None = None,
    ttft: TimeLike | None = None,
    tpot: TimeLike | None = None,
    on_progress: Progress | None = None,
) -> SimulationResult:
    """Serve requests by a serving plan, step by step, before anyone pays for it.

    Args:
        plan: A result of ``plan_serving``, a plan, or a plan.json (its content or path).
        trace: Requests, or the path of a JSONL or CSV file of them; by default they are drawn.
        requests_per_second: Rate of drawn requests; by default the plan's.
        duration: Time span of drawn requests.
        prompt: Tokens of a prompt: 512 or '128:1024'; by default the plan's.
        generate: Tokens of an answer, likewise.
        burstiness: Shape of the times between requests: 1 is Poisson, below it requests come in bursts.
        seed: Seed of everything that is drawn.
        hash_tokens: Tokens that a hash of a trace stands for.
        batching: static, interleaved or disaggregated; by default the plan's.
        chunk_tokens: Most tokens of a step, with prompts prefilled in chunks; by default prompts are whole.
        batch_seqs: Sequences that a server has in progress at most; by default the plan's batch.
        replicas: Servers (disaggregated: that generate); by default the plan's, or 1.
        prefill_servers: Servers that prefill (disaggregated); by default the plan's.
        routing: round_robin, least_loaded or affinity.
        preemption: recompute or swap, when pages run out.
        prefix_cache: Keep the KV of prompts for those that begin alike.
        host_dram: Bytes of each host for prefixes and swapped sequences.
        ttft: Target of the time to first token, for goodput; by default the plan's.
        tpot: Target of the time per output token, likewise.
        on_progress: Called with requests done, requests in all, and a label.

    Raises RooftopError naming the argument that is wrong, and Infeasible if the servers have no room for a cache.
    """
    planned, fleet = _planned(plan)
    batching = batching or planned.problem.mode
    policy = Policy(
        max_batch=planned.batch if batch_seqs is None else parse_count(batch_seqs, "batch-seqs"),
        batching=batching,
        chunk_tokens=None if chunk_tokens is None else parse_count(chunk_tokens, "chunk-tokens"),
        preemption=preemption,
    )
    generators = (
        math.ceil(fleet.get("generate_servers") or 1) if replicas is None else parse_count(replicas, "replicas")
    )
    prefillers = None if prefill_servers is None else parse_count(prefill_servers, "prefill-servers")
    if prefillers is None and batching == "disaggregated":
        prefillers = math.ceil(fleet.get("prefill_servers") or planned.prefill_per_generate * generators)
    times = planned.step_times()
    if preemption == "swap" and host_dram is None:
        raise RooftopError("preemption", "swap", "swap with --host-dram, the memory that each host has for it")
    if min(times.kv_tokens // times.kv_groups, times.prefill_kv_tokens // times.prefill_kv_groups) < times.page_tokens:
        planned.require_fit()
        problem = planned.problem
        raise Infeasible(f"{problem.model.name} on {problem.slice.name}", "no HBM is left for a KV cache")
    deployment = Deployment(
        policy=policy,
        times=times,
        replicas=generators,
        prefill_servers=prefillers or 0,
        routing=Routing(kind=routing),
        prefix_cache=prefix_cache,
        host_kv_tokens=0 if host_dram is None else times.host_tokens(parse_bytes(host_dram, "host-dram")),
    )
    work = planned.problem.workload
    if trace is None and requests_per_second is None:
        requests_per_second = work.requests_per_second
    requests = trace_of(
        trace,
        requests_per_second=requests_per_second,
        duration=duration,
        prompt=work.prompt if prompt is None else prompt,
        generate=work.generate if generate is None else generate,
        burstiness=burstiness,
        seed=seed,
        hash_tokens=hash_tokens,
    )
    if prefix_cache and requests.hashes is None:
        raise RooftopError("prefix-cache", "requests without hashes", "a --trace whose hashes say what prompts share")
    targets = targets_of(work.ttft_s if ttft is None else ttft, work.tpot_s if tpot is None else tpot)
    simulation = simulator.simulate(requests, deployment, on_progress)
    return SimulationResult(
        plan=planned, deployment=deployment, metrics=ServingMetrics(simulation=simulation, targets=targets)
    )


def trace_of(
    trace: RequestTrace | Path | str | None,
    *,
    requests_per_second: float | str | None,
    duration: TimeLike,
    prompt: LengthsLike,
    generate: LengthsLike,
    burstiness: float | str,
    seed: int,
    hash_tokens: CountLike,
) -> RequestTrace:
    """The requests of a trace, or as they are drawn; see ``simulate``. Raises RooftopError."""
    if trace is not None:
        if requests_per_second is not None:
            raise RooftopError("requests-per-second", requests_per_second, "this or --trace, not both")
        if isinstance(trace, RequestTrace):
            return trace
        return read_trace(Path(trace), hash_tokens=parse_count(hash_tokens, "hash-tokens"))
    per_second = _rate(requests_per_second)
    if per_second is None:
        raise RooftopError("requests-per-second", None, "this or --trace: there is no rate")
    return draw_trace(
        requests_per_second=per_second,
        requests=max(1, round(per_second * seconds_of(duration, "duration"))),
        prompt=_lengths(prompt, "prompt"),
        output=_lengths(generate, "generate"),
        burstiness=parse_quantity(burstiness, "burstiness"),
        seed=seed,
    )


def targets_of(ttft: TimeLike | None, tpot: TimeLike | None) -> Targets:
    """Targets of goodput. Raises RooftopError."""
    return Targets(
        ttft_s=None if ttft is None else seconds_of(ttft, "ttft"),
        tpot_s=None if tpot is None else seconds_of(tpot, "tpot"),
    )


def read_serving_plan(path: Path | str) -> ServingPlan:
    """The plan in a plan.json. Raises RooftopError for any other file."""
    return _planned(path)[0]


def _lengths(lengths: LengthsLike, field: str) -> Lengths:
    return lengths if isinstance(lengths, Lengths) else Lengths.parse(str(lengths), field)


def _planned(
    plan: ServingPlanResult | ServingPlan | Mapping[str, object] | Path | str,
) -> tuple[ServingPlan, Mapping[str, float | None]]:
    """A plan, and the servers of the fleet that it recommends (empty: none). Raises RooftopError."""
    if isinstance(plan, ServingPlan):
        return plan, {}
    if isinstance(plan, ServingPlanResult):
        best = None if plan.recommendation is None else plan.recommendation.best
        return plan.plan, {} if best is None else {
            "generate_servers": best.generate_servers, "prefill_servers": best.prefill_servers
        }  # fmt: skip
    data: Mapping[str, object]
    if isinstance(plan, (str, Path)):
        data = read_json_object(Path(plan), field="plan", accepted="a plan.json written by rooftop plan serve")
    else:
        data = plan
    planned = ServingPlan.from_json(data)
    recommendation = data.get("recommendation")
    best_fleet = recommendation.get("best", {}) if isinstance(recommendation, Mapping) else {}
    return planned, best_fleet


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
