"""Published benchmarks of serving engines next to the plans that their users would ask for.

A run is a request for a plan under load (``rooftop plan serve --engine ... --concurrency ...``), and what is expected
of it is that plan's TTFT and TPOT. Levels: *bound*, one step of the batch, and one prefill of a prompt, at peak;
*kernels*, the plan with the engine's kernels alone; *expected*, the plan; *left_out*, the plan with overheads that fit
the runs of *other* models with the engine (``data/left_out_overheads.toml``). The *null* model knows neither load nor
network: the weights read once, and 2 FLOPs per active parameter and token of a prompt, at the median share of peak that
other models' runs had with that engine (where there is none, with any). An error is predicted / measured - 1.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from rooftop.core.errors import Infeasible, RooftopError
from rooftop.core.quantities import parse_count
from rooftop.core.records import Record, field_values
from rooftop.frameworks.engines import Overheads
from rooftop.models.counting import count_params
from rooftop.plan.evidence import (
    Evidence,
    MeasuredRatio,
    Question,
    evidence_for,
    left_out_evidence,
    measured_ratio,
    measured_ratios,
    model_key,
)
from rooftop.plan.serving.batches import search_batches
from rooftop.plan.serving.engines.closed_loop import LoopTimes
from rooftop.plan.serving.times.clients import ServedLoads, served_loads
from rooftop.requests.serving_problems import serving_question
from rooftop.validation.accuracy import Errors
from rooftop.validation.engine_runs import EngineRun, UnusableEngineRun, load_engine_runs
from rooftop.validation.predict import command_of

EngineLevel = Literal["bound", "kernels", "expected", "left_out", "null"]
ENGINE_LEVELS: tuple[EngineLevel, ...] = get_args(EngineLevel)
Metric = Literal["tpot", "ttft"]
METRICS: tuple[Metric, ...] = ("tpot", "ttft")

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class EnginePrediction:
    """A run's place among ``loads`` that are priced together, and the overheads that a plan of it has."""

    run: EngineRun
    loads: ServedLoads
    at: int
    overheads: Overheads

    def times(self, overheads: Overheads) -> LoopTimes:
        """TTFT and TPOT of all loads with these overheads."""
        return self.loads.times(overheads)

    def seconds(self, metric: Metric, overheads: Overheads) -> float:
        """The seconds of a metric with these overheads."""
        return float(getattr(self.times(overheads), f"{metric}_s")[self.at])

    def bound_s(self, metric: Metric) -> float:
        """Seconds that nothing can beat."""
        return float(getattr(self.loads.bounds, f"{metric}_s")[self.at])


@dataclass(frozen=True, kw_only=True)
class EngineComparison:
    """One run next to its predictions: seconds of 'tpot' and 'ttft' by level; None where there is none.

    ``left_out_overheads`` are those of other models. ``estimate``: no benchmark speaks for the engine's prices.
    ``interval_s``: the 5th and 95th percentile around what is expected, by the runs of other models.
    """

    run: EngineRun
    seconds: Mapping[Metric, Mapping[str, float | None]]
    active: float
    left_out_overheads: Overheads
    estimate: bool
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

    @property
    def queues(self) -> bool:
        """True if clients wait for places in a cache, or for servers that prefill."""
        return self.run.prefill_on is not None or self.active < self.run.clients


def predictions(runs: Sequence[EngineRun]) -> tuple[list[EnginePrediction], list[UnusableEngineRun]]:
    """The plans of runs, and the runs that have none, with the reason.

    Runs that differ in their clients are priced together.
    """
    groups: dict[str, list[EngineRun]] = {}
    for run in runs:
        alike = replace(run.request, concurrency=1, requests=None).to_json()
        groups.setdefault(json.dumps(alike, sort_keys=True), []).append(run)
    priced: dict[int, EnginePrediction] = {}
    refused: dict[int, UnusableEngineRun] = {}
    for members in groups.values():
        try:
            loads, overheads = _priced(members)
        except (RooftopError, Infeasible) as why:
            refused.update((run.line, UnusableEngineRun.of(run, str(why))) for run in members)
            continue
        for at, run in enumerate(members):
            priced[run.line] = EnginePrediction(run=run, loads=loads, at=at, overheads=overheads)
    return [priced[run.line] for run in runs if run.line in priced], [refused[line] for line in sorted(refused)]


def _priced(members: Sequence[EngineRun]) -> tuple[ServedLoads, Overheads]:
    """The loads of plans that differ in their clients alone, and the overheads of their engine."""
    plan = search_batches(serving_question(members[0].request).problem).best
    first = plan.problem.workload.load
    assert first is not None
    loads = [
        replace(first, concurrency=run.clients, requests=parse_count(run.request.requests or 1, "requests"))
        for run in members
    ]
    return served_loads(plan.problem, plan.generate_on, plan.prefill_on, loads), plan.problem.overheads


def engine_comparisons(priced: Sequence[EnginePrediction], *, shipped: bool = True) -> tuple[EngineComparison, ...]:
    """The predictions next to what was measured.

    Intervals are those of the benchmarks that come with rooftop; if these are the runs (not ``shipped``), they are
    learnt from them, each with its model left out.
    """
    nulls = {metric: _null_seconds([one.run for one in priced], metric) for metric in METRICS}
    cached: dict[tuple[int, Overheads], LoopTimes] = {}

    def seconds(one: EnginePrediction, metric: str, overheads: Overheads) -> float:
        key = id(one.loads), overheads
        if key not in cached:
            cached[key] = one.times(overheads)
        return float(getattr(cached[key], metric)[one.at])

    comparisons = []
    for index, one in enumerate(priced):
        others = left_out_overheads(one.run.engine, model_key(one.run.model)) or one.overheads
        levels = {"kernels": Overheads(), "expected": one.overheads, "left_out": others}
        comparisons.append(
            EngineComparison(
                run=one.run,
                seconds={
                    metric: {
                        "bound": one.bound_s(metric),
                        **{level: seconds(one, f"{metric}_s", overheads) for level, overheads in levels.items()},
                        "null": nulls[metric][index],
                    }
                    for metric in METRICS
                },
                active=seconds(one, "active", one.overheads),
                left_out_overheads=others,
                estimate=bool(one.loads.engine.habits.estimate),
                interval_s=dict.fromkeys(METRICS),
            )
        )
    return _with_intervals(comparisons, shipped=shipped)


@cache
def _overheads_of_others() -> Mapping[str, Mapping[str, Mapping[str, float]]]:
    return tomllib.loads(
        Path(__file__).with_name("data").joinpath("left_out_overheads.toml").read_text(encoding="utf-8")
    )


def left_out_overheads(engine: str, model: str) -> Overheads | None:
    """The overheads that fit an engine's runs of models other than ``model`` (its ``model_key``).

    None for a model of which no run was used to choose the engine's overheads.
    """
    figures = _overheads_of_others().get(engine, {}).get(model)
    return None if figures is None else Overheads(**figures)


def _with_intervals(comparisons: Sequence[EngineComparison], *, shipped: bool) -> tuple[EngineComparison, ...]:
    """The comparisons with intervals around the plan whose overheads are those of other models."""
    ratios = engine_ratios(comparisons)
    learnt = map(_shipped_evidence, ratios) if shipped else left_out_evidence(ratios)
    # Rows of a user's table may have one name.
    evidence = {(one.run, one.phase, one.chip, one.framework): other for one, other in zip(ratios, learnt, strict=True)}
    complete = []
    for one in comparisons:
        intervals: dict[Metric, tuple[float, float] | None] = {}
        for metric in METRICS:
            expected_s, bound_s = one.seconds[metric]["left_out"], one.seconds[metric]["bound"]
            assert expected_s is not None
            assert bound_s is not None
            known = evidence.get((one.run.id, metric, one.run.generate_on.slice.chip.name, one.run.title))
            intervals[metric] = None if known is None or one.estimate else known.interval_s(expected_s, bound_s)
        complete.append(replace(one, interval_s=intervals))
    return tuple(complete)


def _shipped_evidence(ratio: MeasuredRatio) -> Evidence:
    """The evidence that a plan like a run has, without the runs of its model."""
    question = Question(**field_values(ratio, Question))
    return _evidence_without(question, ratio.model)


@cache
def _evidence_without(question: Question, model: str) -> Evidence:
    return evidence_for(question, tuple(one for one in measured_ratios("engine_evidence.csv") if one.model != model))


def _question(run: EngineRun, metric: Metric) -> Question:
    return Question.of(metric, run.model, run.generate_on.slice, run.prompt + run.generate // 2)


def engine_ratios(comparisons: Sequence[EngineComparison]) -> tuple[MeasuredRatio, ...]:
    """A row of ``rooftop/plan/engine_evidence.csv`` for the TPOT and TTFT of each benchmark.

    Overheads are those of other models. Left out are measurements below a bound, a TTFT with a queue for places in the
    cache or for servers that prefill, and rows that repeat a measurement.
    """
    ratios: dict[tuple[str, float, float], list[MeasuredRatio]] = {}
    for one in comparisons:
        run, own = one.run, []
        for metric in METRICS:
            expected_s = one.seconds[metric]["left_out"]
            if expected_s is None or one.beats_bound(metric) or (metric == "ttft" and one.queues):
                continue
            own.append(
                measured_ratio(
                    _question(run, metric),
                    run.model,
                    framework=run.title,
                    measured_s=one.measured_s(metric),
                    expected_s=expected_s,
                    run=run.id,
                )
            )
        ratios.setdefault((run.kind, run.ttft_s, run.tpot_s), own)
    return tuple(ratio for own in ratios.values() for ratio in own)


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
    count = count_params(run.model)
    if metric == "tpot":
        return count.total * run.numerics.weight_bytes / (workers.slice.chips * workers.slice.chip.hbm_bytes_per_s)
    return 2.0 * count.active * run.prompt / workers.slice.flops_per_s(run.numerics.flops)


@dataclass(frozen=True, kw_only=True)
class EngineRunRecord(Record):
    """A benchmark of an engine next to its predictions: seconds and errors by metric ('tpot', 'ttft') and level.

    ``command`` is the command line of its plan, whose TTFT and TPOT are the level 'expected'. ``active``: sequences
    that have a place in the cache at once. ``left_out_overheads_s`` of a kernel: 'gap_s', and 'host_s' in steps that
    prefill; of the front end: 'request_s' of a request and 'token_s' of a token. None: not known.
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
    left_out_overheads_s: Mapping[str, float]
    command: str
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
            engine=run.title,
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
            left_out_overheads_s=vars(one.left_out_overheads),
            command=command_of(run.request),
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
    priced, unpriced = predictions(read)
    unusable = sorted((*unread, *unpriced), key=lambda one: one.line)
    return EngineReport(comparisons=engine_comparisons(priced, shipped=path is not None), unusable=tuple(unusable))


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
