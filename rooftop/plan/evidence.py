"""Evidence for planned times: published runs of a kind, how far off they were planned, and the interval they give.

``evidence.csv`` has a row for each published run that ``rooftop validate`` predicts: measured time over expected time.
No figure of a plan was chosen with these ratios, so they say how far off the next plan of the kind may be.

The ratios are modelled as log-normal: a mean per chip and kind of model, a deviation per model, and one per run. Both
variances are shrunk towards those of the other chips of the same kind, worth ``_PRIOR`` degrees of freedom. Where
several frameworks ran on chips of a family, each deviates too, and a plan is one more. The interval is Student's
prediction interval for a run of a model that is not among those measured.
"""

from __future__ import annotations

import csv
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from pathlib import Path
from statistics import NormalDist, fmean, variance
from typing import Literal, cast

from rooftop.core.records import Record, derived, field_values
from rooftop.hardware import Calibrated, Chip, Slice
from rooftop.models import ModelConfig

Kind = Literal["dense", "experts"]
Phase = Literal["train", "decode", "prefill", "tpot", "ttft"]
Level = Literal["expected", "bound", "calibrated"]

#: Runs of a phase in words; the last two are benchmarks of engines under load.
_RUNS: Mapping[Phase, str] = {
    "train": "training",
    "decode": "decode steps",
    "prefill": "prefills",
    "tpot": "TPOT of engines under load on GPUs",
    "ttft": "TTFT of engines under load on GPUs",
}
#: Degrees of freedom that the variances of other chips are worth.
_PRIOR = 2
#: Sequences more than so many times as long as any that was measured are outside the evidence.
_LONGER = 2
_COLUMNS = ("phase", "chip", "family", "kind", "framework", "model", "seq_len", "over_dcn", "ratio", "run")


@dataclass(frozen=True, kw_only=True)
class MeasuredRatio:
    """A published run: the time that was measured over the time that was expected.

    ``family`` is 'tpu' or 'gpu', ``model`` the sizes of the model (``model_key``), ``run`` the run's name.
    """

    phase: Phase
    chip: str
    family: str
    kind: Kind
    framework: str
    model: str
    seq_len: int
    over_dcn: bool
    ratio: float
    run: str

    @property
    def error(self) -> float:
        """Expected / measured - 1: negative where the plan is too fast."""
        return 1 / self.ratio - 1

    @property
    def cells(self) -> dict[str, str]:
        """The row of ``evidence.csv``."""
        values = vars(self) | {"over_dcn": int(self.over_dcn), "ratio": f"{self.ratio:.4f}"}
        return {name: str(values[name]) for name in _COLUMNS}


@dataclass(frozen=True, kw_only=True)
class Question:
    """A planned time: of ``phase`` on a chip of a ``family``, for a model of a ``kind``."""

    phase: Phase
    chip: str
    family: str
    kind: Kind
    seq_len: int
    over_dcn: bool

    @classmethod
    def of(cls, phase: Phase, model: ModelConfig, where: Slice, seq_len: int) -> Question:
        """The question that a plan of ``model`` on a slice answers."""
        return cls.about(phase, model, where.chip, seq_len, over_dcn=where.over_dcn)

    @classmethod
    def about(cls, phase: Phase, model: ModelConfig, chip: Chip, seq_len: int, *, over_dcn: bool = False) -> Question:
        """The question about ``model`` on a chip, over DCN or not."""
        kind: Kind = "dense" if model.moe is None else "experts"
        return cls(phase=phase, chip=chip.name, family=chip.kind, kind=kind, seq_len=seq_len, over_dcn=over_dcn)

    def __str__(self) -> str:
        if self.under_load:
            return _RUNS[self.phase]
        models = "mixtures of experts" if self.kind == "experts" else "dense models"
        return f"{_RUNS[self.phase]} of {models} on {self.chip}"

    @property
    def under_load(self) -> bool:
        """True if benchmarks of serving engines are evidence."""
        return self.phase in ("tpot", "ttft")


def measured_ratio(
    question: Question, model: ModelConfig, *, framework: str, measured_s: float, expected_s: float, run: str
) -> MeasuredRatio:
    """The ratio of a run that was measured and expected in seconds."""
    ratio = measured_s / expected_s
    return MeasuredRatio(**vars(question), framework=framework, model=model_key(model), ratio=ratio, run=run)


@dataclass(frozen=True, kw_only=True)
class Evidence(Record):
    """Published runs next to which a planned time stands, and the share of it that a run takes.

    ``level`` is 'bound' if no run of the kind was measured on the chip, and 'calibrated' if the fractions of the chip
    are those that a user has measured, ``calibrated_by`` a file: published runs then say how far whole steps stray.
    ``factor`` are the 5th and 95th percentile of measured / expected; ``mean_error`` and ``mean_absolute_error`` are of
    expected / measured - 1. ``unlike`` says in which way the plan is outside the evidence, which widens the interval.
    """

    level: Level
    subject: str
    runs: int
    models: int
    frameworks: tuple[str, ...]
    mean_error: float | None
    mean_absolute_error: float | None
    factor: tuple[float, float] | None
    unlike: tuple[str, ...]
    calibrated_by: str | None = None

    @derived
    def text(self) -> str:
        """The evidence in one line."""
        if self.calibrated_by is not None:
            published = replace(self, calibrated_by=None).text if self.runs else f"no published runs ({self.subject})"
            return f"calibrated by {self.calibrated_by}; {published}"
        if self.level == "bound":
            return f"a bound: nothing measured on this chip ({self.subject})"
        assert self.mean_absolute_error is not None
        models = "1 model" if self.models == 1 else f"{self.models} models"
        text = (
            f"{self.subject}: {models}, {', '.join(self.frameworks)}; expected times are "
            f"{self.mean_absolute_error:.1%} off on average"
        )
        return "; ".join((text, *self.unlike))

    def calibrated(self, calibration: Calibrated | None) -> Evidence:
        """The evidence for a plan by fractions that a user has measured; the same without any."""
        return self if calibration is None else replace(self, level="calibrated", calibrated_by=calibration.by)

    def interval_s(self, expected_s: float, lower_s: float = 0.0) -> tuple[float, float] | None:
        """The 5th and 95th percentile of the seconds that were expected to be ``expected_s``; None without evidence.

        The expectation is never outside, and nothing is below the bound ``lower_s``.
        """
        if self.factor is None:
            return None
        low, high = self.factor
        return max(min(low, 1.0) * expected_s, min(lower_s, expected_s)), max(high, 1.0) * expected_s


def others_evidence(ratios: Sequence[MeasuredRatio], one: MeasuredRatio) -> Evidence:
    """The evidence for a run among the runs of other models."""
    question = Question(**field_values(one, Question))
    return evidence_for(question, [other for other in ratios if other.model != one.model])


def model_key(model: ModelConfig) -> str:
    """The sizes of a model as one word: one architecture under two names is one model."""
    dims = (model.layers, model.d_model, model.d_ff, model.heads, model.kv_heads, model.d_head, model.vocab)
    experts = () if model.moe is None else (model.moe.experts, model.moe.active, model.moe.d_ff)
    return ":".join("x".join(map(str, sizes)) for sizes in (dims, experts) if sizes)


@cache
def measured_ratios(name: str = "evidence.csv") -> tuple[MeasuredRatio, ...]:
    """The rows of ``evidence.csv``, or of ``engine_evidence.csv``: benchmarks of engines."""
    with Path(__file__).with_name(name).open(encoding="utf-8", newline="") as file:
        return tuple(
            MeasuredRatio(
                phase=cast(Phase, row["phase"]),
                kind=cast(Kind, row["kind"]),
                **{name: row[name] for name in ("chip", "family", "framework", "model", "run")},
                seq_len=int(row["seq_len"]),
                over_dcn=row["over_dcn"] == "1",
                ratio=float(row["ratio"]),
            )
            for row in csv.DictReader(file)
        )


def write_ratios(ratios: Iterable[MeasuredRatio], path: Path) -> None:
    """Write rows of ``evidence.csv``."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, _COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(ratio.cells for ratio in ratios)


def was_measured(question: Question) -> bool:
    """True if a published run of the kind was measured on the chip: expected times are no mere bounds then."""
    asked = (question.phase, question.chip, question.kind)
    return any((one.phase, one.chip, one.kind) == asked for one in measured_ratios())


def evidence_for(question: Question, ratios: Sequence[MeasuredRatio] | None = None) -> Evidence:
    """The evidence for a planned time among ``ratios``: by default those of all published runs of its phase."""
    if ratios is None:
        ratios = measured_ratios("engine_evidence.csv" if question.under_load else "evidence.csv")
    ratios = [one for one in ratios if one.phase == question.phase]
    if question.under_load:
        return _under_load(question, ratios)
    of_frameworks = _of_frameworks(ratios, question)
    ratios = [one for one in ratios if one.kind == question.kind]
    own = [one for one in ratios if one.chip == question.chip]
    if not own:
        return Evidence(
            level="bound",
            subject=str(question),
            runs=0,
            models=0,
            frameworks=(),
            mean_error=None,
            mean_absolute_error=None,
            factor=None,
            unlike=(),
        )
    unlike = _unlike(question, own)
    factor = _factor(own, _others(ratios, question), len(unlike), of_frameworks)
    if of_frameworks:
        unlike.append("they are priced as their frameworks run them")
    return _evidence(question, own, factor, unlike)


def _under_load(question: Question, ratios: Sequence[MeasuredRatio]) -> Evidence:
    """The evidence for an engine's latency: its kernels are priced one by one, and miss alike on all GPUs.

    Benchmarks of all chips and kinds of models count together, each model alike.
    """
    unlike = _unlike(question, ratios)
    if not any((one.chip, one.kind) == (question.chip, question.kind) for one in ratios):
        models = "mixtures of experts" if question.kind == "experts" else "dense models"
        unlike.append(f"none of {models} on {question.chip}")
    return _evidence(question, ratios, _pooled_factor(ratios, len(unlike)), unlike)


def _unlike(question: Question, own: Sequence[MeasuredRatio]) -> list[str]:
    """The ways in which a plan is outside of the evidence."""
    unlike = []
    longest = max(one.seq_len for one in own)
    if question.seq_len > _LONGER * longest:
        unlike.append(f"none longer than {longest:,} tokens")
    if question.over_dcn and not any(one.over_dcn for one in own):
        unlike.append("none over nodes" if question.family == "gpu" else "none over DCN")
    return unlike


def _evidence(
    question: Question, own: Sequence[MeasuredRatio], factor: tuple[float, float], unlike: Sequence[str]
) -> Evidence:
    return Evidence(
        level="expected",
        subject=str(question),
        runs=len(own),
        models=len({one.model for one in own}),
        frameworks=tuple(sorted({one.framework for one in own})),
        mean_error=fmean(one.error for one in own),
        mean_absolute_error=fmean(abs(one.error) for one in own),
        factor=factor,
        unlike=tuple(unlike),
    )


@dataclass(frozen=True)
class _Spread:
    """Log-ratios of a chip and kind: their mean over models by ``names``, and sums of squares."""

    mean: float
    names: frozenset[str]
    between: float
    within: float
    runs: int

    @property
    def models(self) -> int:
        """The number of models."""
        return len(self.names)

    @classmethod
    def of(cls, ratios: Sequence[MeasuredRatio]) -> _Spread:
        logs = _grouped(ratios, lambda one: one.model)
        values = [[math.log(one.ratio) for one in runs] for runs in logs.values()]
        means = [fmean(runs) for runs in values]
        mean = fmean(means)
        return cls(
            mean=mean,
            names=frozenset(logs),
            between=sum((value - mean) ** 2 for value in means),
            within=sum((value - fmean(runs)) ** 2 for runs in values for value in runs),
            runs=len(ratios),
        )


def _others(ratios: Sequence[MeasuredRatio], question: Question) -> list[_Spread]:
    """Spreads of the other chips of the family, or of all others where it has none."""
    chips = _grouped([one for one in ratios if one.chip != question.chip], lambda one: f"{one.family} {one.chip}")
    spreads = {name: _Spread.of(members) for name, members in chips.items()}
    family = [spread for name, spread in spreads.items() if name.startswith(question.family)]
    return family or list(spreads.values())


def _of_frameworks(ratios: Sequence[MeasuredRatio], question: Question) -> float:
    """The variance between the frameworks that ran on chips of the family, with dense models: all of them ran those."""
    family = [one for one in ratios if (one.family, one.kind) == (question.family, "dense")]
    spreads = [_Spread.of(members) for members in _grouped(family, lambda one: one.framework).values()]
    return variance([spread.mean for spread in spreads]) if len(spreads) > 1 else 0.0


def _factor(
    own: Sequence[MeasuredRatio], others: Sequence[_Spread], unlike: int, of_frameworks: float
) -> tuple[float, float]:
    """The 5th and 95th percentile of measured / expected for a run of another model."""
    spread = _Spread.of(own)
    groups = (spread, *others)
    between = [one.between / (one.models - 1) for one in groups if one.models > 1]
    freedom = sum(one.models - 1 for one in groups)
    if len(between) < 2:
        # One model a chip says how far models are from the expectation, not how far from each other. One model on
        # several chips says it once.
        between += [one.mean**2 for one in groups]
        freedom += len(frozenset[str]().union(*(one.names for one in groups)))
    within = [one.within / (one.runs - one.models) for one in groups if one.runs > one.models]
    model = (spread.between + _PRIOR * fmean(between)) / (spread.models - 1 + _PRIOR)
    run = (spread.within + _PRIOR * fmean(within or [0.0])) / (spread.runs - spread.models + _PRIOR)
    frameworks = len({one.framework for one in own})
    deviation = math.sqrt(model * (1 + 1 / spread.models + unlike) + run + of_frameworks * (1 + 1 / frameworks))
    margin = _student(max(freedom, 2)) * deviation
    return math.exp(spread.mean - margin), math.exp(spread.mean + margin)


def _pooled_factor(ratios: Sequence[MeasuredRatio], unlike: int) -> tuple[float, float]:
    """The 5th and 95th percentile of many ratios, each model counted alike, for a run of another model.

    Their distances from the median grow as those of a mean over as many models do: by sqrt(1 + 1/models).
    """
    models = Counter(one.model for one in ratios)
    ordered = sorted((math.log(one.ratio), 1 / models[one.model]) for one in ratios)
    total, below, places = len(models), 0.0, []
    for _, weight in ordered:
        places.append((below + weight / 2) / total)
        below += weight

    def percentile(share: float) -> float:
        after = bisect_left(places, share)
        if after in (0, len(places)):
            return ordered[min(after, len(places) - 1)][0]
        part = (share - places[after - 1]) / (places[after] - places[after - 1])
        return ordered[after - 1][0] + part * (ordered[after][0] - ordered[after - 1][0])

    median, wider = percentile(0.5), math.sqrt(1 + 1 / len(models) + unlike)
    low, high = (median + wider * (percentile(share) - median) for share in (0.05, 0.95))
    return math.exp(low), math.exp(high)


def _student(freedom: int) -> float:
    """The 95th percentile of Student's t, from two degrees of freedom on."""
    if freedom == 2:
        return float(0.9 * math.sqrt(2 / (1 - 0.9**2)))
    # Abramowitz and Stegun, 26.7.5: within 0.3 % from three degrees on.
    z = float(NormalDist().inv_cdf(0.95))
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / float(freedom) ** power for power, term in enumerate(terms, start=1))


def _grouped(ratios: Iterable[MeasuredRatio], key: Callable[[MeasuredRatio], str]) -> Mapping[str, list[MeasuredRatio]]:
    return {name: list(members) for name, members in groupby(sorted(ratios, key=key), key)}
