"""Evidence for planned times: published runs of a kind, how far off they were planned, and the interval they give.

``evidence.csv`` has a row for each published run that ``rooftop validate`` predicts: measured time over expected time.
No figure of a plan was chosen with these ratios, so they say how far off the next plan of the kind may be.

The ratios are modelled as log-normal: a mean per chip and kind of model, a deviation per model, and one per run. Both
variances are shrunk towards those of the other chips of the same kind, worth ``_PRIOR`` degrees of freedom. The
interval is Student's prediction interval for a run of a model that is not among those measured.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from pathlib import Path
from statistics import NormalDist, fmean
from typing import Literal, cast

from rooftop.core.records import Record, derived, field_values
from rooftop.hardware import Calibrated, Slice
from rooftop.models import ModelConfig

Kind = Literal["dense", "experts"]
Phase = Literal["train", "decode", "prefill"]
Level = Literal["expected", "bound", "calibrated"]

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
        return cls(
            phase=phase,
            chip=where.chip.name,
            family=where.chip.kind,
            kind="dense" if model.moe is None else "experts",
            seq_len=seq_len,
            over_dcn=where.over_dcn,
        )

    def __str__(self) -> str:
        models = "mixtures of experts" if self.kind == "experts" else "dense models"
        runs = {"train": "training", "decode": "decode steps", "prefill": "prefills"}[self.phase]
        return f"{runs} of {models} on {self.chip}"


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
def measured_ratios() -> tuple[MeasuredRatio, ...]:
    """The rows of ``evidence.csv``."""
    with Path(__file__).with_name("evidence.csv").open(encoding="utf-8", newline="") as file:
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


def evidence_for(question: Question, ratios: Sequence[MeasuredRatio] | None = None) -> Evidence:
    """The evidence for a planned time among ``ratios``: by default those of all published runs."""
    ratios = measured_ratios() if ratios is None else ratios
    ratios = [one for one in ratios if (one.phase, one.kind) == (question.phase, question.kind)]
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
    unlike = []
    longest = max(one.seq_len for one in own)
    if question.seq_len > _LONGER * longest:
        unlike.append(f"none longer than {longest:,} tokens")
    if question.over_dcn and not any(one.over_dcn for one in own):
        unlike.append("none over nodes" if question.family == "gpu" else "none over DCN")
    return Evidence(
        level="expected",
        subject=str(question),
        runs=len(own),
        models=len({one.model for one in own}),
        frameworks=tuple(sorted({one.framework for one in own})),
        mean_error=fmean(one.error for one in own),
        mean_absolute_error=fmean(abs(one.error) for one in own),
        factor=_factor(own, _others(ratios, question), len(unlike)),
        unlike=tuple(unlike),
    )


@dataclass(frozen=True)
class _Spread:
    """Log-ratios of a chip and kind: their mean over models, and sums of squares with their degrees of freedom."""

    mean: float
    models: int
    between: float
    within: float
    runs: int

    @classmethod
    def of(cls, ratios: Sequence[MeasuredRatio]) -> _Spread:
        logs = _grouped(ratios, lambda one: one.model)
        values = [[math.log(one.ratio) for one in runs] for runs in logs.values()]
        means = [fmean(runs) for runs in values]
        mean = fmean(means)
        return cls(
            mean=mean,
            models=len(means),
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


def _factor(own: Sequence[MeasuredRatio], others: Sequence[_Spread], unlike: int) -> tuple[float, float]:
    """The 5th and 95th percentile of measured / expected for a run of another model."""
    spread = _Spread.of(own)
    groups = (spread, *others)
    between = [one.between / (one.models - 1) for one in groups if one.models > 1]
    freedom = sum(one.models - 1 for one in groups)
    if len(between) < 2:
        # One model a chip says how far models are from the expectation, not how far from each other.
        between += [one.mean**2 for one in groups]
        freedom += len(groups)
    within = [one.within / (one.runs - one.models) for one in groups if one.runs > one.models]
    model = (spread.between + _PRIOR * fmean(between)) / (spread.models - 1 + _PRIOR)
    run = (spread.within + _PRIOR * fmean(within or [0.0])) / (spread.runs - spread.models + _PRIOR)
    deviation = math.sqrt(model * (1 + 1 / spread.models + unlike) + run)
    margin = _student(max(freedom, 2)) * deviation
    return math.exp(spread.mean - margin), math.exp(spread.mean + margin)


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
