"""Published benchmarks of serving engines next to our predictions of their mean TTFT and TPOT.

A run is a closed loop of clients on servers whose steps the plan prices (``rooftop.plan.serving.engines.closed_loop``).
Levels: *bound*, one step of the batch, and one prefill of a prompt, at peak; *expected*, the closed loop. The *null*
model knows neither load nor network: the weights read once, and 2 FLOPs per active parameter and token of a prompt, at
the median share of peak that other models' runs had with that engine (where there is none, with any). An error is
predicted / measured - 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from rooftop.core.records import Record
from rooftop.plan.evidence import model_key
from rooftop.plan.serving.assumptions import ServingAssumptions
from rooftop.plan.serving.engines.closed_loop import (
    ClosedLoop,
    ClosedLoopTimes,
    PrefillServers,
    StepCosts,
    closed_loop,
    disaggregated_loop,
)
from rooftop.plan.serving.engines.kernels import ENGINES
from rooftop.plan.serving.placement import Placement
from rooftop.plan.serving.problem import ServingProblem
from rooftop.plan.serving.workload import ServingWorkload
from rooftop.validation.accuracy import Errors
from rooftop.validation.engine_runs import EngineRun, UnusableEngineRun, Workers, load_engine_runs

ENGINE_LEVELS = ("bound", "expected", "null")
Metric = Literal["tpot", "ttft"]
METRICS: tuple[Metric, ...] = ("tpot", "ttft")
_RESOURCES = ("hbm", "mxu", "ici", "dcn")

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class EngineComparison:
    """One run next to its predictions: seconds of 'tpot' and 'ttft' by level; None where there is none."""

    run: EngineRun
    seconds: Mapping[Metric, Mapping[str, float | None]]
    active: float

    def measured_s(self, metric: Metric) -> float:
        """The measured seconds."""
        return self.run.tpot_s if metric == "tpot" else self.run.ttft_s

    def error(self, metric: Metric, level: str) -> float | None:
        """Predicted / measured - 1; None where there is no prediction."""
        seconds = self.seconds[metric][level]
        return None if seconds is None else seconds / self.measured_s(metric) - 1

    def beats_bound(self, metric: Metric) -> bool:
        """True if the measurement is below the bound, so an input of one of the two is wrong."""
        bound_s = self.seconds[metric]["bound"]
        return bound_s is not None and self.measured_s(metric) < bound_s


def engine_comparisons(runs: Sequence[EngineRun]) -> tuple[EngineComparison, ...]:
    """Predict the runs, those of one configuration together."""
    seconds: list[dict[Metric, dict[str, float | None]]] = [{"tpot": {}, "ttft": {}} for _ in runs]
    active = np.zeros(len(runs))
    for members in _configurations(runs):
        chosen = [runs[index] for index in members]
        bounds, times = _predict(chosen, ServingAssumptions(engine=chosen[0].engine))
        active[members] = times.active
        for place, index in enumerate(members):
            for metric in METRICS:
                seconds[index][metric] |= {
                    "bound": float(bounds[metric][place]),
                    "expected": float(getattr(times, f"{metric}_s")[place]),
                }
    for metric in METRICS:
        for index, null_s in enumerate(_null_seconds(runs, metric)):
            seconds[index][metric]["null"] = null_s
    return tuple(
        EngineComparison(run=run, seconds=seconds[index], active=float(active[index])) for index, run in enumerate(runs)
    )


def _configurations(runs: Sequence[EngineRun]) -> list[list[int]]:
    """Indices of runs that differ in their load alone."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for index, run in enumerate(runs):
        servers = [
            None if workers is None else (workers.count, workers.slice.name, *workers.mesh.items())
            for workers in (run.generate_on, run.prefill_on)
        ]
        key = (model_key(run.model), run.engine, run.version, run.numerics, *servers, run.requests, run.shortest)
        groups.setdefault(key, []).append(index)
    return list(groups.values())


def _predict(
    runs: Sequence[EngineRun], assumptions: ServingAssumptions
) -> tuple[Mapping[Metric, Floats], ClosedLoopTimes]:
    """Bounds and expectations of runs of one configuration: arrays [R]."""
    first = runs[0]
    mean = (1 + first.shortest) / 2
    load = ClosedLoop(
        clients=np.array([run.clients for run in runs], np.float64),
        prompt=np.array([run.prompt for run in runs]) * mean,
        generate=np.array([run.generate for run in runs]) * mean,
        requests=first.requests,
        budget=float(first.budget),
        reserved=first.reserved,
    )
    problem, placement = _server(first, first.generate_on, assumptions)
    costs = _costs(problem, placement, first)
    if first.prefill_on is None:
        prefilling = problem.shared_prefill(placement)
        times = closed_loop(load, costs)
        prefill = problem
    else:
        prefill, own = _server(first, first.prefill_on, assumptions)
        prefilling = prefill.shared_prefill(own)
        # Each copy of the attention has a prompt of its own.
        prompts = first.prefill_on.mesh.get("expert", 1)
        servers = PrefillServers(
            count=float(first.prefill_on.count),
            prompts=float(prompts),
            prefill_s=lambda tokens: np.asarray(prefill.prompts_s(prefilling, tokens, prompts)),
            transfer_s=lambda tokens: _transfer_s(problem, first, tokens),
        )
        times = disaggregated_loop(load, float(first.generate_on.count), costs, servers)
    context = load.prompt + load.generate / 2
    step = problem.generate(placement, np.minimum(times.active, load.clients / first.generate_on.count), context)
    alone = [prefill.prefill(prefilling, float(tokens)) for tokens in load.prompt]
    bounds: dict[Metric, Floats] = {
        "tpot": np.max([np.broadcast_to(step.total(name), len(runs)) for name in _RESOURCES], axis=0),
        "ttft": np.array([max(float(prompt.total(name)) for name in _RESOURCES) for prompt in alone]),
    }
    return bounds, times


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
    return StepCosts(
        generate_s=lambda batch, context: np.asarray(problem.generate_s(placement, batch, context)),
        mixed_s=lambda prompt, batch, context: np.asarray(problem.mixed_s(placement, prompt, batch, context)),
        kv_tokens=float(problem.room_tokens(placement, generating=True, share=run.memory)),
    )


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

    ``active``: sequences that have a place in the cache at once. None: not known.
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
    error: Mapping[str, Mapping[str, float | None]]
    beats_bound: tuple[str, ...]
    assumed: tuple[str, ...]
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
            beats_bound=tuple(metric for metric in METRICS if one.beats_bound(metric)),
            assumed=run.assumed,
            where_found=run.where_found,
        )


@dataclass(frozen=True, kw_only=True)
class EngineGroup(Record):
    """Benchmarks of one engine, chip, model and mode: errors by metric and level."""

    name: str
    runs: int
    errors: Mapping[str, Mapping[str, Errors | None]]


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
    runs, unusable = load_engine_runs(path)
    return EngineReport(comparisons=engine_comparisons(runs), unusable=tuple(unusable))


def _group(name: str, members: Sequence[EngineComparison]) -> EngineGroup:
    return EngineGroup(
        name=name,
        runs=len(members),
        errors={
            metric: {level: Errors.of([one.error(metric, level) for one in members]) for level in ENGINE_LEVELS}
            for metric in METRICS
        },
    )
