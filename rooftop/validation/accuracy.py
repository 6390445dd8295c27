"""Errors of predictions against published step times, at three levels and next to a null model.

Levels (never mixed): *bound*, the least time the hardware allows; *uncalibrated*, from achievable fractions that no
whole run was used for; *calibrated*, times one factor per chip and framework, the median of measured / uncalibrated
over the runs of *other* models with both; on GPUs over those of its framework, or of all, where there are none. The
*null* model takes the median FLOP/s per chip of those runs, and needs
no theory at all. Factors and nulls are learnt from dense models only; an error is predicted / measured - 1.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from rooftop.core.errors import RooftopError
from rooftop.core.records import Record, field_values
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
from rooftop.validation.runs import PublishedRun, load_published

Level = Literal["bound", "uncalibrated", "calibrated", "null"]
LEVELS: tuple[Level, ...] = get_args(Level)

_Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A measurement next to predictions of it, in seconds: those of a level are in the field named ``<level>_s``."""

    measured_s: float
    bound_s: float
    null_s: float | None

    def error(self, level: str) -> float | None:
        """Predicted / measured - 1 at a level: negative where the prediction is too fast; None where there is none."""
        seconds: float | None = getattr(self, f"{level}_s")
        return None if seconds is None else seconds / self.measured_s - 1

    @property
    def beats_bound(self) -> bool:
        """True if the measurement is below the bound, so an input of one of the two is wrong."""
        return self.measured_s < self.bound_s


@dataclass(frozen=True, kw_only=True)
class ComparisonRecord(Record):
    """A run of training next to its predictions, in seconds per step, bytes and tokens. None: not known.

    ``command`` is the command line of the plan; ``error`` is predicted / measured - 1 by level; ``measured_from`` names
    the published metric, and ``assumed`` says how the table was read.
    """

    id: str
    source: str
    command: str
    model: str
    slice: str
    over_dcn: bool
    mesh: Mapping[str, int] | None
    seq_len: int
    batch_tokens: int
    dtype: str
    published_dtype: str | None
    remat: str | None
    measured_from: str
    measured_s: float
    bound_s: float
    uncalibrated_s: float
    calibrated_s: float | None
    null_s: float | None
    interval_s: tuple[float, float] | None
    error: Mapping[Level, float | None]
    beats_bound: bool
    measured_memory_bytes: Mapping[str, float]
    assumed: tuple[str, ...]
    where_found: str
    notes: tuple[str, ...]
    reason: str | None

    @property
    def best_level(self) -> Level:
        """'calibrated', or 'uncalibrated' where there is no calibration."""
        return "uncalibrated" if self.calibrated_s is None else "calibrated"

    @property
    def best_s(self) -> float:
        """Seconds per step at the best level."""
        return self.uncalibrated_s if self.calibrated_s is None else self.calibrated_s


@dataclass(frozen=True, kw_only=True)
class Comparison(Compared):
    """One run next to its predictions, in seconds per step; None where no other dense model ran so on the chip."""

    run: PublishedRun
    uncalibrated_s: float
    calibrated_s: float | None
    interval_s: tuple[float, float] | None
    """The 5th and 95th percentile around the uncalibrated prediction, by the runs of other models."""

    @property
    def within(self) -> bool | None:
        """True if the interval holds the measurement; None without an interval."""
        return None if self.interval_s is None else self.interval_s[0] <= self.measured_s <= self.interval_s[1]

    @property
    def best_level(self) -> str:
        """'calibrated', or 'uncalibrated' where there is no calibration."""
        return "uncalibrated" if self.calibrated_s is None else "calibrated"

    def record(self, command: str, notes: Sequence[str] = (), reason: str | None = None) -> ComparisonRecord:
        """The run and its predictions as they are written, with ``notes`` and the ``reason`` for its error.

        ``command`` is the command line that plans it.
        """
        run = self.run
        return ComparisonRecord(
            id=run.id,
            source=run.source,
            command=command,
            model=run.model.name,
            slice=run.slice.name,
            over_dcn=run.over_dcn,
            mesh=run.mesh,
            seq_len=run.seq_len,
            batch_tokens=run.batch_tokens,
            dtype=run.dtype,
            published_dtype=run.published_dtype,
            remat=run.remat.published,
            measured_from=run.step_from,
            measured_s=self.measured_s,
            bound_s=self.bound_s,
            uncalibrated_s=self.uncalibrated_s,
            calibrated_s=self.calibrated_s,
            null_s=self.null_s,
            interval_s=self.interval_s,
            error={level: self.error(level) for level in LEVELS},
            beats_bound=self.beats_bound,
            measured_memory_bytes=run.measured_memory_bytes,
            assumed=run.assumed,
            where_found=run.where_found,
            notes=tuple(notes),
            reason=reason,
        )


@dataclass(frozen=True, kw_only=True)
class Errors(Record):
    """Errors of ``runs`` runs as fractions: signed mean, and mean, median and largest absolute error."""

    runs: int
    mean: float
    mean_absolute: float
    median_absolute: float
    largest_absolute: float

    @classmethod
    def at(cls, level: str, comparisons: Iterable[Compared]) -> Errors | None:
        """The errors at a level of those that have one; None if none has."""
        return cls.of(one.error(level) for one in comparisons)

    @classmethod
    def of(cls, errors: Iterable[float | None]) -> Errors | None:
        """The errors that there are; None if there is none."""
        signed = np.array([error for error in errors if error is not None])
        if not signed.size:
            return None
        absolute = np.abs(signed)
        return cls(
            runs=signed.size,
            mean=float(signed.mean()),
            mean_absolute=float(absolute.mean()),
            median_absolute=float(np.median(absolute)),
            largest_absolute=float(absolute.max()),
        )


@dataclass(frozen=True, kw_only=True)
class Group(Record):
    """Some of the runs, ``by`` 'cohort', 'chip', 'slices' or 'source'; errors by level, None where no run has any.

    ``covered`` is the share of the ``with_interval`` runs whose interval, learnt from other models, holds them.
    """

    by: str
    name: str
    runs: int
    errors: Mapping[Level, Errors | None]
    with_interval: int
    covered: float | None
    note: str | None

    @property
    def best_errors(self) -> Errors | None:
        """Errors at the calibrated level; at the uncalibrated one where no run has that."""
        return self.errors["calibrated"] or self.errors["uncalibrated"]


@dataclass(frozen=True, kw_only=True)
class AccuracyReport:
    """Every run next to its predictions, and the errors by group."""

    comparisons: tuple[Comparison, ...]
    groups: tuple[Group, ...]

    @property
    def beats_bound(self) -> tuple[str, ...]:
        """Ids of the runs that were measured below their bound."""
        return tuple(one.run.id for one in self.comparisons if one.beats_bound)

    def worst(self, count: int) -> tuple[Comparison, ...]:
        """The ``count`` runs with the largest absolute error at their best level, worst first."""
        return tuple(sorted(self.comparisons, key=lambda one: -abs(one.error(one.best_level) or 0.0))[:count])


@dataclass(frozen=True, kw_only=True)
class Peers:
    """Runs that factors, nulls and intervals are learnt from, with measured / uncalibrated of each."""

    runs: tuple[PublishedRun, ...]
    ratios: tuple[float, ...]

    @classmethod
    def of(cls, runs: Sequence[PublishedRun], uncalibrated_s: npt.ArrayLike) -> Peers:
        """Runs with their uncalibrated seconds per step."""
        seconds = np.asarray(uncalibrated_s, dtype=np.float64)
        measured = np.array([run.step_s for run in runs])
        return cls(runs=tuple(runs), ratios=tuple((measured / seconds).tolist()))

    @classmethod
    def shipped(cls) -> Peers:
        """The runs that come with rooftop, with the ratios of ``evidence.csv``."""
        ratios = {one.run: one.ratio for one in measured_ratios() if one.phase == "train"}
        runs = tuple(run for run in load_published().runs if run.id in ratios)
        return cls(runs=runs, ratios=tuple(ratios[run.id] for run in runs))


def leave_one_model_out(
    values: npt.ArrayLike,
    peers: Sequence[PublishedRun],
    *,
    runs: Sequence[PublishedRun] | None = None,
    pools: bool = False,
) -> _Floats:
    """For each run the median of ``values``, one a peer, over dense peers of other models with its chip and framework.

    The ``runs`` are the peers themselves by default. A model is its sizes, not its name: one architecture published
    under two names is not another model. NaN where there is no other model. With ``pools`` runs on GPUs that have none
    take those of their framework on other GPUs, or else those of all frameworks; mixtures of experts on TPUs take other
    mixtures, on their chip or else on all TPUs; and in both each model counts once, with the median of its runs.
    """
    array, runs = np.asarray(values, dtype=np.float64), peers if runs is None else runs
    chips = np.array([peer.slice.chip.name for peer in peers])
    frameworks = np.array([peer.framework for peer in peers])
    gpus = np.array([peer.slice.chip.kind == "gpu" for peer in peers], dtype=bool)
    dense = np.array([peer.model.moe is None for peer in peers], dtype=bool)
    models = np.array([model_key(peer.model) for peer in peers])
    medians = np.full(len(runs), np.nan)
    for index, run in enumerate(runs):
        on_gpu = run.slice.chip.kind == "gpu"
        experts = pools and not on_gpu and run.model.moe is not None
        others = (~dense if experts else dense) & (models != model_key(run.model)) & (gpus == on_gpu)
        framework = frameworks == run.framework
        pooled = pools and (on_gpu or experts)
        for chosen in (others & framework & (chips == run.slice.chip.name), others & framework, others):
            if chosen.any():
                by_model = [np.median(array[chosen & (models == model)]) for model in sorted(set(models[chosen]))]
                medians[index] = np.median(by_model if pooled else array[chosen])
            if chosen.any() or not pooled:
                break
    return medians


def null_seconds(runs: Sequence[PublishedRun], peers: Sequence[PublishedRun] | None = None) -> _Floats:
    """Seconds per step of the null model: the run's FLOPs at the median FLOP/s per chip of other models; or NaN."""
    peers = runs if peers is None else peers
    rates = leave_one_model_out([peer.flops_per_s_per_chip for peer in peers], peers, runs=runs)
    return np.array([run.model_flops / run.slice.chips for run in runs]) / rates


def calibrated_seconds(
    runs: Sequence[PublishedRun], uncalibrated_s: npt.ArrayLike, peers: Peers | None = None
) -> _Floats:
    """Uncalibrated seconds times the factor of other models' runs: ``leave_one_model_out`` with pools; NaN if none."""
    uncalibrated = np.asarray(uncalibrated_s, dtype=np.float64)
    peers = Peers.of(runs, uncalibrated) if peers is None else peers
    return uncalibrated * leave_one_model_out(peers.ratios, peers.runs, runs=runs, pools=True)


def training_ratios(runs: Sequence[PublishedRun], expected_s: Sequence[float]) -> tuple[MeasuredRatio, ...]:
    """A row of ``rooftop/plan/evidence.csv`` for each run, with the uncalibrated seconds per step."""
    return tuple(
        measured_ratio(
            Question.of("train", run.model, run.slice, run.seq_len),
            run.model,
            framework=run.framework,
            measured_s=run.step_s,
            expected_s=seconds,
            run=run.id,
        )
        for run, seconds in zip(runs, expected_s, strict=True)
    )


def summarise(
    runs: Sequence[PublishedRun], bound_s: npt.ArrayLike, uncalibrated_s: npt.ArrayLike, peers: Peers | None = None
) -> AccuracyReport:
    """Compare predicted seconds per step (one per run, at two levels) with the measured ones.

    Factors, nulls and intervals are learnt from ``peers``; without them from the runs, each with its model left out.
    Then the cohort 'dense TPU, bf16' is calibrated, and has its null, from its own runs only; every other group shares
    the factors of all runs. Raises RooftopError unless there is one positive number per run at either level.
    """
    bound, uncalibrated = np.asarray(bound_s, dtype=np.float64), np.asarray(uncalibrated_s, dtype=np.float64)
    for name, array in (("bound_s", bound), ("uncalibrated_s", uncalibrated)):
        if array.shape != (len(runs),) or not (np.isfinite(array) & (array > 0)).all():
            raise RooftopError(name, array.tolist(), f"{len(runs)} positive numbers, one per run")
    comparisons = _compare(runs, bound, uncalibrated, peers)
    bf16 = np.array([run.dense_tpu and run.dtype == "bf16" for run in runs], dtype=bool)
    bf16_runs = [run for run, chosen in zip(runs, bf16, strict=True) if chosen]
    groups = [
        *_grouped("cohort", comparisons, lambda run: "dense TPU" if run.dense_tpu else None),
        *_grouped("cohort", _compare(bf16_runs, bound[bf16], uncalibrated[bf16], peers), lambda _: "dense TPU, bf16"),
        *_grouped("slices", comparisons, _span),
        *_grouped("chip", comparisons, _chip),
        *_grouped("source", comparisons, lambda run: run.source),
    ]
    return AccuracyReport(comparisons=comparisons, groups=tuple(groups))


def _span(run: PublishedRun) -> str | None:
    if not run.dense_tpu:
        return None
    return "dense TPU, over DCN" if run.over_dcn else "dense TPU, single slice"


def _chip(run: PublishedRun) -> str:
    return run.slice.chip.name if run.model.moe is None else f"{run.slice.chip.name}, experts"


def _compare(
    runs: Sequence[PublishedRun], bound_s: _Floats, uncalibrated_s: _Floats, peers: Peers | None
) -> tuple[Comparison, ...]:
    if not runs:
        return ()
    calibrated = calibrated_seconds(runs, uncalibrated_s, peers)
    null = null_seconds(runs, None if peers is None else peers.runs)
    ratios = training_ratios(runs, [float(seconds) for seconds in uncalibrated_s])
    if peers is None:
        # As a plan has it, runs of serving help to say how far runs stray.
        evidence = left_out_evidence((*ratios, *(ratio for ratio in measured_ratios() if ratio.phase != "train")))
    else:
        evidence = tuple(map(_shipped_evidence, ratios))
    return tuple(
        Comparison(
            run=run,
            measured_s=run.step_s,
            bound_s=float(bound_s[index]),
            uncalibrated_s=float(uncalibrated_s[index]),
            calibrated_s=None if np.isnan(calibrated[index]) else float(calibrated[index]),
            null_s=None if np.isnan(null[index]) else float(null[index]),
            interval_s=evidence[index].interval_s(float(uncalibrated_s[index]), float(bound_s[index])),
        )
        for index, run in enumerate(runs)
    )


def _shipped_evidence(ratio: MeasuredRatio) -> Evidence:
    """The evidence that a plan like a run has, without the run itself."""
    question = Question(**field_values(ratio, Question))
    return evidence_for(question, tuple(one for one in measured_ratios() if one.run != ratio.run))


def _grouped(by: str, comparisons: Sequence[Comparison], name_of: Callable[[PublishedRun], str | None]) -> list[Group]:
    """One Group per name, in order of appearance; runs named None are in none."""
    named: dict[str, list[Comparison]] = {}
    for one in comparisons:
        name = name_of(one.run)
        if name is not None:
            named.setdefault(name, []).append(one)
    return [_group(by, name, members) for name, members in named.items()]


def _group(by: str, name: str, members: Sequence[Comparison]) -> Group:
    errors = {level: Errors.at(level, members) for level in LEVELS}
    alone = sorted({one.run.slice.chip.name for one in members if one.calibrated_s is None})
    some = " for some runs" if any(one.calibrated_s is not None for one in members) else ""
    note = f"no other dense model on {', '.join(alone)}{some}: uncalibrated only, and no null" if alone else None
    pooled = {one.run.slice.chip.name for one in members if one.calibrated_s is not None and one.null_s is None}
    if pooled:
        names = ", ".join(sorted(pooled))
        note = f"no other dense model of a framework on {names}: calibrated on other GPUs, and no null for those runs"
    inside = [one.within for one in members if one.within is not None]
    return Group(
        by=by,
        name=name,
        runs=len(members),
        errors=errors,
        with_interval=len(inside),
        covered=sum(inside) / len(inside) if inside else None,
        note=note,
    )


def load_reasons(path: Path | None = None) -> dict[str, str]:
    """Why single runs are off, by run id: the table [reasons] of a TOML file, by default ``data/reasons.toml``.

    Without the file there are no reasons.
    """
    path = path or Path(__file__).with_name("data") / "reasons.toml"
    if not path.is_file():
        return {}
    reasons = tomllib.loads(path.read_text(encoding="utf-8")).get("reasons", {})
    return {str(run): str(reason) for run, reason in reasons.items()}
