"""Published measurements of serving next to our predictions: prefill, decode and serving rows of a table of runs.

Levels: *max_hbm_flops*, the longer of HBM and FLOPs at peak, without a network; *bound*, with it; *uncalibrated*, the
plan with no share that a run of serving was used for; *expected*, the plan as it is, whose shares ``CALIBRATED`` were
chosen with decode rows in sight; *left_out*, the same with these shares chosen by the decode rows of other shardings
only. The *null* model knows no batch, context or network: the weights alone (of a prefill: 2 FLOPs per parameter and
token) at the median share of peak of the other runs on that chip. An error is predicted / measured - 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from rooftop.core.errors import Infeasible, RooftopError
from rooftop.core.ledger import Ledger
from rooftop.core.records import Record
from rooftop.hardware import Chip
from rooftop.plan.evidence import MeasuredRatio, Phase, Question, measured_ratio
from rooftop.plan.serving.assumptions import CALIBRATED, SHARES, ServingAssumptions
from rooftop.plan.serving.placement import Placement
from rooftop.plan.serving.pricing import price_serving
from rooftop.plan.serving.problem import ServingProblem
from rooftop.plan.serving.rows import prefill_work
from rooftop.plan.serving.workload import ServingWorkload
from rooftop.roofline.achievable import fractions
from rooftop.validation.accuracy import Compared, Errors
from rooftop.validation.runs import Unusable
from rooftop.validation.serving_runs import ServingRun, load_serving, serving_readings

ServingLevel = Literal["max_hbm_flops", "bound", "uncalibrated", "expected", "left_out", "null"]
SERVING_LEVELS: tuple[ServingLevel, ...] = get_args(ServingLevel)
#: Among these the shares of the level 'left_out' are chosen.
_TRIED = {"hbm_read": (0.8, 0.85, 0.9, 0.95, 1.0), "latency": (0.0, 0.25, 0.5, 0.75, 1.0)}


@dataclass(frozen=True, kw_only=True)
class ServingComparisonRecord(Record):
    """A run of serving next to its predictions in seconds; tokens of caches and requests. None: not known.

    ``measured`` has the published metrics, and ``error`` is predicted / measured - 1 by level.
    """

    id: str
    source: str
    model: str
    slice: str
    mesh: Mapping[str, int] | None
    phase: str
    batch: int
    context: int | None
    prompt: int | None
    generate: int | None
    weights: str
    kv: str
    measured: Mapping[str, float]
    measured_s: float
    max_hbm_flops_s: float
    bound_s: float
    uncalibrated_s: float
    expected_s: float
    left_out_s: float | None
    null_s: float | None
    error: Mapping[ServingLevel, float | None]
    beats_bound: bool
    implied_context: float | None
    assumed: tuple[str, ...]
    reason: str | None
    where_found: str


@dataclass(frozen=True, kw_only=True)
class AssumedShare(Record):
    """A share that the levels 'expected' and 'uncalibrated' assume, and the ``source`` of the former.

    ``calibrated``: it was chosen with runs of serving in sight.
    """

    expected: float
    uncalibrated: float
    calibrated: bool
    source: str


@dataclass(frozen=True, kw_only=True)
class UnusableServing(Record):
    """A published run of serving that says too little, with the lines of the table."""

    source: str
    model: str
    why: str
    lines: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class ServingRecord(Record):
    """Runs of serving next to their predictions; errors by phase and level, and assumed shares by chip and name."""

    rows: tuple[ServingComparisonRecord, ...]
    summary: Mapping[str, Mapping[ServingLevel, Errors | None]]
    shares: Mapping[str, Mapping[str, AssumedShare]]
    beats_bound: tuple[str, ...]
    unusable: tuple[UnusableServing, ...]


@dataclass(frozen=True, kw_only=True)
class ServingComparison(Compared):
    """One run next to its predictions in seconds.

    ``null_s`` is None where no other run of its phase was on the chip, ``left_out_s`` where none had another sharding.
    ``implied_context``: tokens in each cache at which a decode step is expected to take what was measured.
    """

    run: ServingRun
    max_hbm_flops_s: float
    uncalibrated_s: float
    expected_s: float
    left_out_s: float | None
    implied_context: float | None
    reason: str | None

    @property
    def record(self) -> ServingComparisonRecord:
        """The run and its predictions as they are written."""
        run = self.run
        return ServingComparisonRecord(
            id=run.id,
            source=run.source,
            model=run.model.name,
            slice=run.slice.name,
            mesh=run.mesh,
            phase=run.phase,
            batch=run.batch,
            context=run.context,
            prompt=run.prompt,
            generate=run.generate,
            weights=run.numerics.weights,
            kv=run.numerics.kv,
            measured=run.measured,
            measured_s=self.measured_s,
            max_hbm_flops_s=self.max_hbm_flops_s,
            bound_s=self.bound_s,
            uncalibrated_s=self.uncalibrated_s,
            expected_s=self.expected_s,
            left_out_s=self.left_out_s,
            null_s=self.null_s,
            error={level: self.error(level) for level in SERVING_LEVELS},
            beats_bound=self.beats_bound,
            implied_context=self.implied_context,
            assumed=run.assumed,
            reason=self.reason,
            where_found=run.where_found,
        )


@dataclass(frozen=True, kw_only=True)
class ServingReport:
    """Every serving run next to its predictions, errors by group, and the rows that say too little."""

    comparisons: tuple[ServingComparison, ...]
    unusable: tuple[Unusable, ...]

    @cached_property
    def groups(self) -> dict[str, dict[ServingLevel, Errors | None]]:
        """Errors by level, by phase; of decode also without the runs that beat their bound."""
        chosen: dict[str, Callable[[ServingComparison], bool]] = {
            "decode": lambda one: one.run.phase == "decode",
            "decode, no bound beaten": lambda one: one.run.phase == "decode" and not one.beats_bound,
            "prefill": lambda one: one.run.phase == "prefill",
            "serve": lambda one: one.run.phase == "serve",
        }
        return {
            name: {level: Errors.at(level, members) for level in SERVING_LEVELS}
            for name, selected in chosen.items()
            if (members := [one for one in self.comparisons if selected(one)])
        }

    @property
    def shares(self) -> dict[str, dict[str, AssumedShare]]:
        """The assumed shares by chip and name."""
        shares_by_chip: dict[str, dict[str, AssumedShare]] = {}
        for chip in {one.run.slice.chip.name: one.run.slice.chip for one in self.comparisons}.values():
            plan, plain = ServingAssumptions(), ServingAssumptions(shares=uncalibrated_shares(chip))
            sources = plan.sources(chip)
            shares_by_chip[chip.name] = {
                name: AssumedShare(
                    expected=plan.share(name, chip),
                    uncalibrated=plain.share(name, chip),
                    calibrated=name in CALIBRATED,
                    source=sources[name],
                )
                for name in SHARES
            }
        return shares_by_chip

    @property
    def record(self) -> ServingRecord:
        """The report as it is written."""
        return ServingRecord(
            rows=tuple(one.record for one in self.comparisons),
            summary=self.groups,
            shares=self.shares,
            beats_bound=tuple(one.run.id for one in self.comparisons if one.beats_bound),
            unusable=tuple(
                UnusableServing(source=one.source, model=one.model, why=one.why, lines=one.lines)
                for one in self.unusable
            ),
        )


def serving_report(path: Path | None = None) -> ServingReport:
    """Predict every serving row of a table; without a path, of the one that comes with rooftop."""
    read, unusable = load_serving(path)
    runs = []
    for run in read:
        try:
            predict(run, {})
            _ideal_s(run)
        except (RooftopError, Infeasible) as why:
            unusable.append(_unusable(run, why))
        else:
            runs.append(run)
    columns = zip(runs, _null_seconds(runs), _left_out_seconds(runs), strict=True)
    return ServingReport(
        comparisons=tuple(_compare(*column) for column in columns),
        unusable=tuple(sorted(unusable, key=lambda one: one.lines)),
    )


def _unusable(run: ServingRun, why: Exception) -> Unusable:
    """A run that was read and cannot be priced."""
    return Unusable(
        source=run.source,
        model=run.model.name,
        chip=run.slice.chip.name,
        num_chips=run.slice.chips,
        why=str(why),
        measured=run.measured,
        measured_memory_bytes={},
        lines=run.lines,
    )


def serving_ratios(comparisons: Sequence[ServingComparison]) -> tuple[MeasuredRatio, ...]:
    """A row of ``rooftop/plan/evidence.csv`` for each decode step and prefill that does not beat its bound.

    Shares of decode steps are those chosen by the runs of other shardings: none was chosen with the run in sight.
    """
    ratios = []
    for one in comparisons:
        run = one.run
        phase: Phase = "decode" if run.phase == "decode" else "prefill"
        expected_s, tokens = (one.left_out_s, run.context) if phase == "decode" else (one.expected_s, run.prompt)
        if run.phase == phase and expected_s is not None and tokens is not None and not one.beats_bound:
            ratios.append(
                measured_ratio(
                    Question.of(phase, run.model, run.slice, tokens),
                    run.model,
                    framework=run.source,
                    measured_s=run.measured_s,
                    expected_s=expected_s,
                    run=run.id,
                )
            )
    return tuple(ratios)


def uncalibrated_shares(chip: Chip) -> dict[str, float]:
    """Shares in the place of ``CALIBRATED`` that owe nothing to runs of serving.

    HBM at the fraction that a microbenchmark of copies reached; no latency hidden, since nothing measures how much is.
    """
    return {"hbm_read": fractions(chip).hbm, "latency": 0.0}


def _compare(run: ServingRun, null_s: float | None, left_out_s: float | None) -> ServingComparison:
    predicted = predict(run, {})
    implied = None
    if predicted.of_context is not None and run.context is not None:
        empty, full = predicted.of_context(0.0), predicted.of_context(float(run.context))
        # Where FLOPs take longer than HBM, reading the caches takes no time of its own.
        if full > empty:
            implied = max(0.0, (run.measured_s - empty) / (full - empty) * run.context)
    return ServingComparison(
        run=run,
        measured_s=run.measured_s,
        max_hbm_flops_s=predicted.max_hbm_flops_s,
        bound_s=predicted.bound_s,
        uncalibrated_s=predict(run, uncalibrated_shares(run.slice.chip)).expected_s,
        expected_s=predicted.expected_s,
        left_out_s=left_out_s,
        null_s=null_s,
        implied_context=implied,
        reason=_reason(run.id),
    )


def _left_out_seconds(runs: Sequence[ServingRun]) -> list[float | None]:
    """Seconds of decode steps with the shares that fit best the runs of other shardings on the chip.

    The sharding is what the runs of one model differ in most. Runs that beat their bound say nothing of shares.
    """
    tried = [dict(zip(_TRIED, shares, strict=True)) for shares in product(*_TRIED.values())]
    decode = [index for index, run in enumerate(runs) if run.phase == "decode"]
    seconds = {index: np.array([predict(runs[index], shares).expected_s for shares in tried]) for index in decode}
    sound = [index for index in decode if predict(runs[index], {}).bound_s <= runs[index].measured_s]
    best_seconds: list[float | None] = [None] * len(runs)
    for index in decode:
        run = runs[index]
        others = [
            np.abs(seconds[other] / runs[other].measured_s - 1)
            for other in sound
            if runs[other].slice.chip.name == run.slice.chip.name and runs[other].mesh != run.mesh
        ]
        if others:
            best_seconds[index] = float(seconds[index][np.mean(others, axis=0).argmin()])
    return best_seconds


def _null_seconds(runs: Sequence[ServingRun]) -> list[float | None]:
    """Seconds at the median share of peak of the other runs of the phase and chip, which differ in batch or mesh."""
    ideal = [_ideal_s(run) for run in runs]
    null_seconds: list[float | None] = []
    for run, own in zip(runs, ideal, strict=True):
        others = [
            other.measured_s / seconds
            for other, seconds in zip(runs, ideal, strict=True)
            if (other.phase, other.slice.chip.name) == (run.phase, run.slice.chip.name)
            and (other.model.name, other.batch, other.mesh) != (run.model.name, run.batch, run.mesh)
        ]
        null_seconds.append(own * float(np.median(others)) if others else None)
    return null_seconds


def _ideal_s(run: ServingRun) -> float:
    """The weights read once, each replica its own; of a prefill 2 FLOPs per parameter and token, at peak."""
    problem = ServingProblem(
        model=run.model, slice=run.slice, workload=ServingWorkload(), numerics=run.numerics, bounds="book"
    )
    total, active = problem.params
    if run.phase == "prefill":
        assert run.prompt is not None
        return 2.0 * active * run.batch * run.prompt / run.slice.flops_per_s(run.numerics.flops)
    replicas = (run.mesh or {}).get("data", 1)
    rate = run.slice.chips * run.slice.chip.hbm_bytes_per_s
    return replicas * total * run.numerics.weight_bytes / rate


def _reason(run_id: str) -> str | None:
    reasons: Mapping[str, str] = serving_readings()["reasons"]
    fitting = [beginning for beginning in reasons if run_id.startswith(beginning)]
    return reasons[max(fitting, key=len)] if fitting else None


@dataclass(frozen=True, kw_only=True)
class ServingPrediction:
    """Seconds of a run's step: the longer of HBM and FLOPs at peak; that with the network; what is expected.

    ``of_context``: what is expected of a decode step by the tokens in each cache; None for other phases.
    """

    max_hbm_flops_s: float
    bound_s: float
    expected_s: float
    of_context: Callable[[float], float] | None


def predict(run: ServingRun, shares: Mapping[str, float]) -> ServingPrediction:
    """A run as the plan prices it, with ``shares`` in the place of those that a plan assumes."""
    problem = ServingProblem(
        model=run.model,
        slice=run.slice,
        workload=ServingWorkload(
            prompt=run.prompt or run.context or 1,
            generate=run.generate or 1,
            batch_seqs=run.batch,
            context=run.context if run.phase == "decode" else None,
        ),
        numerics=run.numerics,
        assumptions=ServingAssumptions(shares=shares),
        mode="interleaved",
        axes=run.mesh,
        prefill_axes=run.mesh,
    )
    batch = float(run.batch)
    if run.phase == "prefill":
        ledgers = [_prefill_batch(problem, place, run) for place in problem.prefill_placements()]
        return _prediction(min(ledgers, key=lambda ledger: float(ledger.expected_s)), 0.0, 0.0, None)
    places = problem.generate_placements()
    place = min(places, key=lambda place: float(problem.generate(place, batch).expected_s))
    step = problem.generate(place, batch)
    if run.phase == "decode":
        return _prediction(step, 0.0, 0.0, lambda tokens: float(problem.generate(place, batch, tokens).expected_s))
    assert run.generate is not None
    assert run.prompt is not None
    prefill = problem.prefill(problem.shared_prefill(place), float(run.prompt))
    # While each sequence generates its answer, all others are prefilled once.
    per_step = batch / run.generate
    bound = max(float(prefill.total(name)) for name in ("hbm", "mxu", "ici"))
    return _prediction(step, per_step * bound, per_step * float(prefill.expected_s), None)


def _prediction(
    ledger: Ledger, more_bound_s: float, more_expected_s: float, of_context: Callable[[float], float] | None
) -> ServingPrediction:
    busy = {name: float(ledger.total(name)) for name in ("hbm", "mxu", "ici", "dcn")}
    return ServingPrediction(
        max_hbm_flops_s=max(busy["hbm"], busy["mxu"]) + more_bound_s,
        bound_s=max(busy.values()) + more_bound_s,
        expected_s=float(ledger.expected_s) + more_expected_s,
        of_context=of_context,
    )


def _prefill_batch(problem: ServingProblem, place: Placement, run: ServingRun) -> Ledger:
    """All prompts of the batch in one prefill."""
    assert run.prompt is not None
    phase = problem.phase("prefill", place, float(run.batch * run.prompt))
    return price_serving(prefill_work(phase, 0.0, run.batch), place, problem.rates, problem.assumptions)
