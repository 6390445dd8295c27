"""Published benchmarks of serving engines next to our predictions of their mean TTFT and TPOT.

A run is a closed loop of clients on servers whose steps the plan prices: ``rooftop.plan.serving.engines``. Levels:
*bound*, one step of the batch, and one prefill of a prompt, at peak; *kernels*, the closed loop with the engine's
kernels alone; *expected*, with the overheads of a kernel that fit the runs of *other* models with the engine. The
*null* model knows neither load nor network: the weights read once, and 2 FLOPs per active parameter and token of a
prompt, at the median share of peak that other models' runs had with that engine (where there is none, with any). An
error is predicted / measured - 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from rooftop.core.errors import Infeasible, RooftopError
from rooftop.core.records import Record
from rooftop.plan.evidence import MeasuredRatio, Question, left_out_evidence, measured_ratio, model_key
from rooftop.plan.serving.assumptions import ServingAssumptions
from rooftop.plan.serving.engines.closed_loop import (
    ClosedLoop,
    LoopSteps,
    LoopTimes,
    PrefillServers,
    StepCosts,
    disaggregated_loop,
    loop_times,
)
from rooftop.plan.serving.engines.kernels import ENGINES
from rooftop.plan.serving.engines.rows import launches
from rooftop.plan.serving.placement import Placement
from rooftop.plan.serving.problem import ServingProblem
from rooftop.plan.serving.workload import ServingWorkload
from rooftop.validation.accuracy import Errors
from rooftop.validation.engine_runs import EngineRun, UnusableEngineRun, Workers, load_engine_runs

EngineLevel = Literal["bound", "kernels", "expected", "null"]
ENGINE_LEVELS: tuple[EngineLevel, ...] = get_args(EngineLevel)
Metric = Literal["tpot", "ttft"]
METRICS: tuple[Metric, ...] = ("tpot", "ttft")
_RESOURCES = ("hbm", "mxu", "ici", "dcn")
_LOAD = ("clients", "prompt", "generate", "requests", "budget", "reserved")
_STEPS = ("active", "chunks", "step_s", "mixed_s", "full_s", "full_tokens", "together")
#: Overheads that are tried, in seconds of a kernel.
_GAPS = tuple(1e-7 * gap for gap in (0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 24, 28, 32))
_HOST = tuple(1e-6 * host for host in (0, 10, 20, 30, 40, 50, 60, 70, 80, 100, 120))
#: The same of the front end: seconds of a request and of a token of its prompt, [2, N].
_FRONT = np.array([(1e-3 * request, 1e-6 * token) for request in range(0, 25, 4) for token in range(0, 21, 4)]).T

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Overheads:
    """Seconds next to each kernel of an engine: ``gap_s``, and ``host_s`` at least in steps that prefill.

    ``request_s`` of a request and ``token_s`` of a token of its prompt pass in the front end, one request after
    another. They are an engine's constants, fitted on runs: ``fit_overheads``.
    """

    gap_s: float = 0.0
    host_s: float = 0.0
    request_s: float = 0.0
    token_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class EngineComparison:
    """One run next to its predictions: seconds of 'tpot' and 'ttft' by level; None where there is none.

    ``interval_s``: the 5th and 95th percentile around what is expected, by the runs of other models.
    """

    run: EngineRun
    seconds: Mapping[Metric, Mapping[str, float | None]]
    active: float
    overheads: Overheads
    interval_s: Mapping[Metric, tuple[float, float] | None]

    def measured_s(self, metric: Metric) -> float:
        """The measured seconds."""
        return self.run.tpot_s if metric == "tpot" else self.run.ttft_s

    def error(self, metric: Metric, level: str) -> float | None:
        """Predicted / measured - 1; None where there is no prediction."""
        seconds = self.seconds[metric][level]
        return None if seconds is None else seconds / self.measured_s(metric) - 1

    def within(self, metric: Metric) -> bool | None:
        """True if the interval has the measurement; None without an interval."""
        interval_s = self.interval_s[metric]
        return None if interval_s is None else interval_s[0] <= self.measured_s(metric) <= interval_s[1]

    def beats_bound(self, metric: Metric) -> bool:
        """True if the measurement is below the bound, so an input of one of the two is wrong."""
        bound_s = self.seconds[metric]["bound"]
        return bound_s is not None and self.measured_s(metric) < bound_s


def engine_comparisons(runs: Sequence[EngineRun]) -> tuple[EngineComparison, ...]:
    """Predict the runs, with the overheads that the runs of other models have with the engine.

    Raises RooftopError for a run that cannot be priced.
    """
    return _compared(runs, _Loads.of(runs))


def _compared(runs: Sequence[EngineRun], loads: _Loads) -> tuple[EngineComparison, ...]:
    chosen = [Overheads()] * len(runs)
    kernels = loads.times(chosen)
    for (engine, model), members in _by_model(runs).items():
        others = [index for index, run in enumerate(runs) if run.engine == engine and model_key(run.model) != model]
        overheads = fit_overheads(runs, loads, others) or Overheads()
        for index in members:
            chosen[index] = overheads
    expected = loads.times(chosen)
    nulls = {metric: _null_seconds(runs, metric) for metric in METRICS}
    comparisons = tuple(
        EngineComparison(
            run=run,
            seconds={
                metric: {
                    "bound": float(loads.bounds[metric][index]),
                    "kernels": float(getattr(kernels, f"{metric}_s")[index]),
                    "expected": float(getattr(expected, f"{metric}_s")[index]),
                    "null": nulls[metric][index],
                }
                for metric in METRICS
            },
            active=float(expected.active[index]),
            overheads=chosen[index],
            interval_s={metric: None for metric in METRICS},
        )
        for index, run in enumerate(runs)
    )
    return _with_intervals(comparisons)


def _with_intervals(comparisons: Sequence[EngineComparison]) -> tuple[EngineComparison, ...]:
    """The comparisons with the intervals that plans would have, had they the runs of other models alone."""
    ratios = engine_ratios(comparisons)
    evidence = {(one.run, one.phase): learnt for one, learnt in zip(ratios, left_out_evidence(ratios), strict=True)}
    complete = []
    for one in comparisons:
        intervals: dict[Metric, tuple[float, float] | None] = {}
        for metric in METRICS:
            expected_s, bound_s = one.seconds[metric]["expected"], one.seconds[metric]["bound"]
            assert expected_s is not None
            assert bound_s is not None
            learnt = evidence.get((one.run.id, metric))
            intervals[metric] = None if learnt is None else learnt.interval_s(expected_s, bound_s)
        complete.append(replace(one, interval_s=intervals))
    return tuple(complete)


def _question(run: EngineRun, metric: Metric) -> Question:
    return Question.of(metric, run.model, run.generate_on.slice, run.prompt + run.generate // 2)


def engine_ratios(comparisons: Sequence[EngineComparison]) -> tuple[MeasuredRatio, ...]:
    """A row of ``rooftop/plan/engine_evidence.csv`` for the TPOT and TTFT of each benchmark.

    Overheads are those of other models. Left out are measurements below a bound, a TTFT with a queue for places in the
    cache or for servers that prefill, which no plan counts, and rows that repeat a measurement.
    """
    ratios: dict[tuple[str, float, float], list[MeasuredRatio]] = {}
    for one in comparisons:
        run, own = one.run, []
        for metric in METRICS:
            queued = metric == "ttft" and (run.prefill_on is not None or one.active < run.clients)
            expected_s = one.seconds[metric]["expected"]
            if expected_s is None or one.beats_bound(metric) or queued:
                continue
            own.append(
                measured_ratio(
                    _question(run, metric),
                    run.model,
                    framework=ENGINES[run.engine],
                    measured_s=one.measured_s(metric),
                    expected_s=expected_s,
                    run=run.id,
                )
            )
        ratios.setdefault((run.kind, run.ttft_s, run.tpot_s), own)
    return tuple(ratio for own in ratios.values() for ratio in own)


def fit_overheads(runs: Sequence[EngineRun], loads: _Loads, members: Sequence[int]) -> Overheads | None:
    """The overheads with the least mean absolute error of TPOT and TTFT on some runs, each model counted alike.

    None without runs. Only servers that also prefill are looked at.
    """
    chosen = np.array([index for index in members if runs[index].prefill_on is None], dtype=np.int64)
    if not len(chosen):
        return None
    models = np.array([model_key(runs[index].model) for index in chosen])
    weights = np.array([1.0 / np.sum(models == model) for model in models])
    measured = {
        "tpot": np.array([run.tpot_s for run in runs])[chosen],
        "ttft": np.array([run.ttft_s for run in runs])[chosen],
    }
    best, least = Overheads(), np.inf
    for gap_s in _GAPS:
        for host_s in _HOST:
            times = loads.aggregated(gap_s, host_s, _FRONT[:, :, np.newaxis], chosen)
            errors = [np.abs(getattr(times, f"{metric}_s") / measured[metric] - 1) for metric in METRICS]
            error = sum(np.sum(weights * np.minimum(one, 1.0), axis=-1) for one in errors)
            at = int(np.argmin(error))
            if error[at] < least:
                request_s, token_s = _FRONT[:, at].tolist()
                best = Overheads(gap_s=gap_s, host_s=host_s, request_s=request_s, token_s=token_s)
                least = float(error[at])
    return best


def overheads_of_engines(runs: Sequence[EngineRun]) -> dict[str, Overheads]:
    """The overheads that fit all runs of each engine."""
    loads = _Loads.of(runs)
    fitted = {
        engine: fit_overheads(runs, loads, [index for index, run in enumerate(runs) if run.engine == engine])
        for engine in sorted({run.engine for run in runs})
    }
    return {engine: overheads for engine, overheads in fitted.items() if overheads is not None}


def _by_model(runs: Sequence[EngineRun]) -> dict[tuple[str, str], list[int]]:
    members: dict[tuple[str, str], list[int]] = {}
    for index, run in enumerate(runs):
        members.setdefault((run.engine, model_key(run.model)), []).append(index)
    return members


@dataclass(frozen=True, kw_only=True)
class _Configuration:
    """Runs that differ in their load alone: the indices of ``members``, and how their servers are priced."""

    members: list[int]
    load: ClosedLoop
    costs: StepCosts
    servers: float
    prefill: PrefillServers | None
    steps: LoopSteps | None
    kernels: float


#: A configuration and the bounds of its members by metric.
_Price = tuple[_Configuration, Mapping[Metric, Floats]]


@dataclass(frozen=True, kw_only=True)
class _Loads:
    """All runs, priced by their kernels; ``bounds`` and ``kernels`` of a step are arrays over runs."""

    configurations: tuple[_Configuration, ...]
    bounds: Mapping[Metric, Floats]
    kernels: Floats
    load: ClosedLoop
    steps: LoopSteps

    @classmethod
    def of(cls, runs: Sequence[EngineRun]) -> _Loads:
        """Price the runs, those of one configuration together. Raises RooftopError for one that cannot be priced."""
        return cls.joined(
            [_price([runs[index] for index in members], members) for members in _configurations(runs)], len(runs)
        )

    @classmethod
    def joined(cls, prices: Sequence[_Price], runs: int) -> _Loads:
        """The configurations of so many runs as one."""
        bounds: dict[Metric, Floats] = {metric: np.zeros(runs) for metric in METRICS}
        columns: dict[str, Floats] = {name: np.zeros(runs) for name in (*_LOAD, *_STEPS)}
        equal, kernels = np.zeros(runs, dtype=bool), np.zeros(runs)
        for one, own_bounds in prices:
            members = one.members
            kernels[members] = one.kernels
            for metric in METRICS:
                bounds[metric][members] = own_bounds[metric]
            for name in _LOAD:
                columns[name][members] = getattr(one.load, name)
            equal[members] = one.load.equal
            if one.steps is not None:
                for name in _STEPS:
                    columns[name][members] = getattr(one.steps, name)
        return cls(
            configurations=tuple(one for one, _ in prices),
            bounds=bounds,
            kernels=kernels,
            load=ClosedLoop(**{name: columns[name] for name in _LOAD}, equal=equal),
            steps=LoopSteps(**{name: columns[name] for name in _STEPS}),
        )

    def aggregated(
        self, gap_s: Floats | float, host_s: Floats | float, front_s: Floats, members: npt.NDArray[np.int64]
    ) -> LoopTimes:
        """Times of ``members``, whose servers also prefill, with overheads of a kernel, one or one for each member.

        ``front_s``, of a request and of a token: [2, members], or [2, N, 1], and times are then [N, members].
        """
        load = replace(self.load, **{name: getattr(self.load, name)[members] for name in (*_LOAD, "equal")})
        steps = replace(self.steps, **{name: getattr(self.steps, name)[members] for name in _STEPS})
        kernels = self.kernels[members]
        request_s = front_s[0] + load.prompt * front_s[1]
        return loop_times(load, steps.with_overheads(kernels * gap_s, kernels * host_s, request_s))

    def times(self, overheads: Sequence[Overheads]) -> LoopTimes:
        """Times of all runs, each with its overheads."""
        count = len(self.kernels)
        result = LoopTimes(ttft_s=np.zeros(count), tpot_s=np.zeros(count), active=np.zeros(count))
        together = np.array(
            [index for one in self.configurations if one.prefill is None for index in one.members], dtype=np.int64
        )
        parts = []
        if len(together):
            gap_s, host_s, *front_s = np.array(
                [(one.gap_s, one.host_s, one.request_s, one.token_s) for one in (overheads[at] for at in together)]
            ).T
            parts.append((together, self.aggregated(gap_s, host_s, np.array(front_s), together)))
        for one in self.configurations:
            if one.prefill is not None:
                own = overheads[one.members[0]]
                times = disaggregated_loop(
                    one.load,
                    one.servers,
                    _with_gap(one.costs, one.kernels * own.gap_s),
                    _with_overheads(one.prefill, one.kernels, own),
                )
                parts.append((np.array(one.members), times))
        for members, times in parts:
            for name in ("ttft_s", "tpot_s", "active"):
                getattr(result, name)[members] = getattr(times, name)
        return result


def _with_gap(costs: StepCosts, gap_s: float) -> StepCosts:
    return replace(costs, generate_s=lambda batch, context: costs.generate_s(batch, context) + gap_s)


def _with_overheads(prefill: PrefillServers, kernels: float, overheads: Overheads) -> PrefillServers:
    gap_s, host_s = kernels * overheads.gap_s, kernels * overheads.host_s
    return replace(
        prefill,
        prefill_s=lambda tokens, together: np.maximum(prefill.prefill_s(tokens, together) + gap_s, host_s),
        front_s=lambda tokens: overheads.request_s + overheads.token_s * tokens,
    )


def _configurations(runs: Sequence[EngineRun]) -> list[list[int]]:
    """Indices of runs that differ in their load alone."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for index, run in enumerate(runs):
        servers = [
            None if workers is None else (workers.count, workers.slice.name, *workers.mesh.items())
            for workers in (run.generate_on, run.prefill_on)
        ]
        key = (model_key(run.model), run.engine, run.kernels, run.numerics, *servers, run.requests, run.shortest)
        groups.setdefault(key, []).append(index)
    return list(groups.values())


def _priced(runs: Sequence[EngineRun]) -> tuple[list[EngineRun], _Loads, list[UnusableEngineRun]]:
    """The runs that can be priced, their prices, and the others with the reason."""
    prices: list[_Price] = []
    refused: dict[int, UnusableEngineRun] = {}
    waiting = _configurations(runs)
    while waiting:
        members = waiting.pop()
        try:
            prices.append(_price([runs[index] for index in members], members))
        except (RooftopError, Infeasible) as why:
            if len(members) == 1:
                refused[members[0]] = UnusableEngineRun.of(runs[members[0]], str(why))
            else:
                # They differ in their load, which may be what is wrong with one of them alone.
                waiting += [[index] for index in members]
    priced = [index for index in range(len(runs)) if index not in refused]
    place = {index: at for at, index in enumerate(priced)}
    prices = [(replace(one, members=[place[index] for index in one.members]), bounds) for one, bounds in prices]
    unusable = [refused[index] for index in sorted(refused)]
    return [runs[index] for index in priced], _Loads.joined(prices, len(priced)), unusable


def _price(runs: Sequence[EngineRun], members: list[int]) -> _Price:
    """Steps and bounds of runs of one configuration."""
    first, assumptions = runs[0], ServingAssumptions(engine=runs[0].kernels, gap_s=0.0, host_s=0.0)
    mean = (1 + first.shortest) / 2
    load = ClosedLoop(
        clients=np.array([run.clients for run in runs], np.float64),
        prompt=np.array([run.prompt for run in runs]) * mean,
        generate=np.array([run.generate for run in runs]) * mean,
        requests=first.requests,
        equal=first.shortest == 1.0,
        budget=np.array([run.budget for run in runs], np.float64),
        reserved=first.reserved,
    )
    problem, placement = _server(first, first.generate_on, assumptions)
    costs = _costs(problem, placement, first)
    active = np.minimum(load.places(costs.kv_tokens), load.clients / first.generate_on.count)
    if first.prefill_on is None:
        prefill, prefilling, servers = problem, problem.shared_prefill(placement), None
    else:
        prefill, own = _server(first, first.prefill_on, assumptions)
        prefilling = prefill.shared_prefill(own)
        copies = first.prefill_on.mesh.get("expert", 1)
        servers = PrefillServers(
            count=float(first.prefill_on.count),
            copies=float(copies),
            prefill_s=lambda tokens, together: np.asarray(prefill.prompts_s(prefilling, tokens, copies * together)),
            transfer_s=lambda tokens: _transfer_s(problem, first, tokens),
        )
        # How many generate is not known here: one at least.
        active = np.ones(len(runs))
    step = problem.generate(placement, active, load.context)
    alone = {tokens: prefill.prefill(prefilling, tokens) for tokens in set(load.prompt.tolist())}
    bounds: dict[Metric, Floats] = {
        "tpot": np.max([np.broadcast_to(step.total(name), len(runs)) for name in _RESOURCES], axis=0),
        "ttft": np.array(
            [max(float(alone[tokens].total(name)) for name in _RESOURCES) for tokens in load.prompt.tolist()]
        ),
    }
    configuration = _Configuration(
        members=members,
        load=load,
        costs=costs,
        servers=float(first.generate_on.count),
        prefill=servers,
        steps=LoopSteps.of(load, costs) if servers is None else None,
        kernels=float(launches(problem.phase("generate", placement, 1.0))),
    )
    return configuration, bounds


def _server(run: EngineRun, workers: Workers, assumptions: ServingAssumptions) -> tuple[ServingProblem, Placement]:
    problem = ServingProblem(
        model=run.model,
        slice=workers.slice,
        workload=ServingWorkload(prompt=run.prompt, generate=run.generate),
        numerics=run.numerics,
        assumptions=assumptions,
        mode="interleaved" if run.prefill_on is None else "disaggregated",
        axes=workers.mesh,
        kv_split="batch",
    )
    return problem, problem.generate_placements()[0]


def _costs(problem: ServingProblem, placement: Placement, run: EngineRun) -> StepCosts:
    # Copies of attention that are balanced prefill at the same time.
    together = run.generate_on.mesh.get("expert", 1) if run.balanced else 1
    return StepCosts(
        generate_s=lambda batch, context: np.asarray(problem.generate_s(placement, batch, context)),
        mixed_s=lambda prompt, count, batch, context: np.asarray(
            problem.mixed_s(placement, prompt, batch, context, together * count)
        ),
        together=together,
        kv_tokens=_room_tokens(problem, placement, run),
    )


def _room_tokens(problem: ServingProblem, placement: Placement, run: EngineRun) -> float:
    """Tokens whose KV fits a server: in a share of all memory, or of that which weights leave."""
    if run.memory_of_free:
        return run.memory * problem.room_tokens(placement, generating=True)
    return float(problem.room_tokens(placement, generating=True, share=run.memory))


def _transfer_s(problem: ServingProblem, run: EngineRun, tokens: Floats) -> Floats:
    """Seconds of a prompt's KV over the network between servers: every GPU has a part of it."""
    per_token = float(problem.phase("generate", problem.generate_placements()[0], 1.0).cached_bytes(1.0, stored=True))
    chip = run.generate_on.slice.chip
    return tokens * per_token / (run.generate_on.slice.chips * chip.dcn_bytes_per_s)


def _null_seconds(runs: Sequence[EngineRun], metric: Metric) -> list[float | None]:
    ideal = np.array([_ideal_s(run, metric) for run in runs])
    measured = np.array([run.tpot_s if metric == "tpot" else run.ttft_s for run in runs])
    models = np.array([model_key(run.model) for run in runs])
    engines = np.array([f"{run.engine} {run.generate_on.slice.chip.name} {run.mode}" for run in runs])
    seconds: dict[tuple[str, str], float | None] = {}
    for key in set(zip(engines.tolist(), models.tolist(), strict=True)):
        others = models != key[1]
        own = others & (engines == key[0])
        chosen = own if own.any() else others
        seconds[key] = float(np.median(measured[chosen] / ideal[chosen])) if chosen.any() else None
    nulls: list[float | None] = []
    for index in range(len(runs)):
        share = seconds[engines[index], models[index]]
        nulls.append(None if share is None else float(ideal[index]) * share)
    return nulls


def _ideal_s(run: EngineRun, metric: Metric) -> float:
    """All weights read once; or 2 FLOPs per active parameter and token of a prompt: at peak."""
    workers = run.generate_on if metric == "tpot" or run.prefill_on is None else run.prefill_on
    problem = ServingProblem(model=run.model, slice=workers.slice, workload=ServingWorkload(), numerics=run.numerics)
    total, active = problem.params
    if metric == "tpot":
        return total * run.numerics.weight_bytes / (workers.slice.chips * workers.slice.chip.hbm_bytes_per_s)
    return 2.0 * active * run.prompt / workers.slice.flops_per_s(run.numerics.flops)


@dataclass(frozen=True, kw_only=True)
class EngineRunRecord(Record):
    """A benchmark of an engine next to its predictions: seconds and errors by metric ('tpot', 'ttft') and level.

    ``active``: sequences that have a place in the cache at once. ``overheads_s`` of a kernel: 'gap_s', and 'host_s' in
    steps that prefill; of the front end: 'request_s' of a request and 'token_s' of a token. None: not known.
    ``from_source``: sizes of the servers, which the row does not say, are those that its source says elsewhere.
    """

    id: str
    source: str
    model: str
    engine: str
    version: str | None
    slice: str
    servers: int
    mesh: Mapping[str, int]
    prefill_slice: str | None
    weights: str
    kv: str
    prompt: int
    generate: int
    concurrency: int
    active: float
    measured_s: Mapping[str, float]
    predicted_s: Mapping[str, Mapping[str, float | None]]
    error: Mapping[Metric, Mapping[EngineLevel, float | None]]
    interval_s: Mapping[str, tuple[float, float] | None]
    overheads_s: Mapping[str, float]
    beats_bound: tuple[str, ...]
    assumed: tuple[str, ...]
    from_source: bool
    where_found: str

    @classmethod
    def of(cls, one: EngineComparison) -> EngineRunRecord:
        """The record of a comparison."""
        run = one.run
        return cls(
            id=run.id,
            source=run.source,
            model=run.model.name,
            engine=ENGINES[run.engine],
            version=run.version,
            slice=run.generate_on.slice.name,
            servers=run.generate_on.count,
            mesh=run.generate_on.mesh,
            prefill_slice=None if run.prefill_on is None else run.prefill_on.slice.name,
            weights=run.numerics.weights,
            kv=run.numerics.kv,
            prompt=run.prompt,
            generate=run.generate,
            concurrency=run.clients,
            active=one.active,
            measured_s={metric: one.measured_s(metric) for metric in METRICS},
            predicted_s={metric: one.seconds[metric] for metric in METRICS},
            error={metric: {level: one.error(metric, level) for level in ENGINE_LEVELS} for metric in METRICS},
            interval_s={metric: one.interval_s[metric] for metric in METRICS},
            overheads_s=vars(one.overheads),
            beats_bound=tuple(metric for metric in METRICS if one.beats_bound(metric)),
            assumed=run.assumed,
            from_source=run.from_source,
            where_found=run.where_found,
        )


@dataclass(frozen=True, kw_only=True)
class EngineGroup(Record):
    """Benchmarks of one engine, chip, model and mode: errors by metric and level.

    ``covered`` is the share of the ``with_interval`` runs, by metric, whose interval has the measurement.
    """

    name: str
    runs: int
    errors: Mapping[Metric, Mapping[EngineLevel, Errors | None]]
    with_interval: Mapping[Metric, int]
    covered: Mapping[Metric, float | None]


@dataclass(frozen=True, kw_only=True)
class UnusableEngineRecord(Record):
    """A row of a table that says too little, with its line."""

    source: str
    model: str
    engine: str
    why: str
    line: int


@dataclass(frozen=True, kw_only=True)
class EnginesRecord(Record):
    """Benchmarks of engines next to their predictions, errors by group, and rows that say too little."""

    rows: tuple[EngineRunRecord, ...]
    groups: tuple[EngineGroup, ...]
    unusable: tuple[UnusableEngineRecord, ...]


@dataclass(frozen=True, kw_only=True)
class EngineReport:
    """Every benchmark of an engine next to its predictions, and the rows that say too little."""

    comparisons: tuple[EngineComparison, ...]
    unusable: tuple[UnusableEngineRun, ...]

    @cached_property
    def groups(self) -> tuple[EngineGroup, ...]:
        """Errors of each kind of run, and of all."""
        kinds: dict[str, list[EngineComparison]] = {}
        for one in sorted(self.comparisons, key=lambda one: one.run.kind):
            kinds.setdefault(one.run.kind, []).append(one)
        if len(kinds) > 1:
            kinds["all"] = list(self.comparisons)
        return tuple(_group(name, members) for name, members in kinds.items())

    @property
    def record(self) -> EnginesRecord:
        """The report as it is written."""
        return EnginesRecord(
            rows=tuple(EngineRunRecord.of(one) for one in self.comparisons),
            groups=self.groups,
            unusable=tuple(UnusableEngineRecord(**vars(one)) for one in self.unusable),
        )


def engine_report(path: Path | None = None) -> EngineReport:
    """Predict every benchmark of a table; without a path, of the one that comes with rooftop."""
    read, unread = load_engine_runs(path)
    runs, loads, unpriced = _priced(read)
    unusable = sorted((*unread, *unpriced), key=lambda one: one.line)
    return EngineReport(comparisons=_compared(runs, loads), unusable=tuple(unusable))


def _group(name: str, members: Sequence[EngineComparison]) -> EngineGroup:
    inside = {metric: [within for one in members if (within := one.within(metric)) is not None] for metric in METRICS}
    return EngineGroup(
        name=name,
        runs=len(members),
        errors={
            metric: {level: Errors.of([one.error(metric, level) for one in members]) for level in ENGINE_LEVELS}
            for metric in METRICS
        },
        with_interval={metric: len(inside[metric]) for metric in METRICS},
        covered={metric: sum(inside[metric]) / len(inside[metric]) if inside[metric] else None for metric in METRICS},
    )
