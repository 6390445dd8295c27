"""Evidence for planned times: published runs of a kind, how far off they were planned, and the interval they give.

``evidence.csv`` has a row for each published run that ``rooftop validate`` predicts: measured time over the time that
a plan of its framework expects. No figure of a plan was chosen with these ratios, so they say how far off the next plan
of the kind may be. rooftop's own program has no published runs: ``own_evidence.csv`` has the same runs priced as our
program.

The logarithm of a ratio is a sum of effects, each normal: of the place (a phase on a chip), of the framework, of the
model, of the model in the place, and of the run. The runs of a family and kind of model say how large each effect is
and what the measured places and frameworks have of it; a plan is a run of a model that is not among those measured.
Standard deviations of effects are not fitted but averaged over, each combination by how well it explains the runs, with
half-Cauchy priors as A. Gelman recommends for few groups (Prior distributions for variance parameters in hierarchical
models, 2006).

Intervals of a chip and kind with nine runs or more are then scaled so that of its runs, each with its own model left
out, nine in ten are inside: a conformal interval of each category (V. Vovk and others, Algorithmic learning in a random
world, 2005).
"""

from __future__ import annotations

import csv
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Literal, cast

import numpy as np
import numpy.typing as npt

from rooftop.core.records import Record, RelativeChange, derived, field_values
from rooftop.frameworks.framework import family_of
from rooftop.hardware import Calibrated, Chip, Slice
from rooftop.hardware import chip as find_chip
from rooftop.models import ModelConfig

Kind = Literal["dense", "experts"]
Phase = Literal["train", "decode", "prefill", "tpot", "ttft"]
#: An estimate has no published run of its kind, and a bound is arithmetic at peak rates, which nothing can beat.
Level = Literal["expected", "estimate", "bound", "calibrated"]
#: Phase, chip and kind of model.
Category = tuple[Phase, str, Kind]

#: Runs of a phase in words; the last two are benchmarks of engines under load.
_RUNS: Mapping[Phase, str] = {
    "train": "training",
    "decode": "decode steps",
    "prefill": "prefills",
    "tpot": "TPOT of engines under load on GPUs",
    "ttft": "TTFT of engines under load on GPUs",
}
#: The half-Cauchy prior's scale of each effect's standard deviation: plans are off by about a tenth. With half or twice
#: of it the published runs' intervals are as good (docs/evidence/runs.md).
_SCALE = 0.1
#: Standard deviations that are tried of each effect: the prior gives each the same probability.
DEVIATIONS = tuple(_SCALE * math.tan(math.pi / 2 * share) for share in (0.1, 0.3, 0.5, 0.7, 0.9))
#: Degrees of freedom that the variance between runs of other chips is worth.
_PRIOR = 2
#: The share of runs that an interval holds, and the fewest runs whose strays can say how wide it has to be for that.
_HELD, _FEWEST = 0.9, 9
#: Sequences more than so many times as long as any that was measured are outside the evidence.
_LONGER = 2
_COLUMNS = ("phase", "chip", "family", "kind", "framework", "model", "seq_len", "over_dcn", "ratio", "stray", "run")


@dataclass(frozen=True, kw_only=True)
class MeasuredRatio:
    """A published run: the time that was measured over the time that was expected.

    ``family`` is 'tpu' or 'gpu', ``model`` the sizes of the model (``model_key``), ``run`` the run's name. ``stray`` is
    the distance of the ratio from the middle of the interval that runs of other models give, in half widths of that
    interval before it is scaled (``with_strays``); None without such an interval.
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
    stray: float | None = None

    @property
    def place(self) -> str:
        """The phase and the chip."""
        return f"{self.phase} on {self.chip}"

    @property
    def category(self) -> Category:
        """The phase, the chip and the kind of model."""
        return self.phase, self.chip, self.kind

    @property
    def error(self) -> float:
        """Expected / measured - 1: negative where the plan is too fast."""
        return 1 / self.ratio - 1

    @property
    def ours(self) -> bool:
        """False: a published run is not of our program."""
        return False

    @property
    def cells(self) -> dict[str, str]:
        """The row of ``evidence.csv``."""
        stray = "" if self.stray is None else f"{self.stray:.3f}"
        values = vars(self) | {"over_dcn": int(self.over_dcn), "ratio": f"{self.ratio:.4f}", "stray": stray}
        return {name: str(values[name]) for name in _COLUMNS}


@dataclass(frozen=True, kw_only=True)
class Question:
    """A planned time: of ``phase`` on a chip of a ``family``, for a model of a ``kind``.

    ``framework`` runs it. None: our program, which is one more framework where several ran on chips of the family; with
    ``ours`` all runs are priced as our program.
    """

    phase: Phase
    chip: str
    family: str
    kind: Kind
    seq_len: int
    over_dcn: bool
    framework: str | None = None
    ours: bool = False

    @classmethod
    def of(cls, phase: Phase, model: ModelConfig, where: Slice, seq_len: int) -> Question:
        """The question that a plan of ``model`` on a slice answers."""
        return cls.about(phase, model, where.chip, seq_len, over_dcn=where.over_dcn)

    def priced_as(self, framework: str | None) -> Question:
        """The question of a plan that is priced as a framework's program; None: as our own."""
        return replace(self, framework=framework, ours=framework is None)

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
    def place(self) -> str:
        """The phase and the chip."""
        return f"{self.phase} on {self.chip}"

    @property
    def category(self) -> Category:
        """The phase, the chip and the kind of model."""
        return self.phase, self.chip, self.kind

    @property
    def under_load(self) -> bool:
        """True if benchmarks of serving engines are evidence."""
        return self.phase in ("tpot", "ttft")


def measured_ratio(
    question: Question, model: ModelConfig, *, framework: str, measured_s: float, expected_s: float, run: str
) -> MeasuredRatio:
    """The ratio of a run that was measured and expected in seconds."""
    ratio = measured_s / expected_s
    fields = {**field_values(question), "framework": framework}
    del fields["ours"]
    return MeasuredRatio(**fields, model=model_key(model), ratio=ratio, run=run)


@dataclass(frozen=True, kw_only=True)
class Evidence(Record):
    """Published runs next to which a planned time stands, and the share of it that a run takes.

    ``level`` is 'estimate' if no run of the kind was measured on the chip, 'bound' for the book's arithmetic, and
    'calibrated' if the fractions of the chip are those that a user has measured, ``calibrated_by`` a file: published
    runs then say how far whole steps stray.
    ``factor`` are the 5th and 95th percentile of measured / expected; ``mean_error`` and ``mean_absolute_error`` are of
    expected / measured - 1. ``unlike`` says in which way the plan is outside the evidence, which widens the interval.
    With ``ours`` the runs are of other programs, priced as rooftop's.
    """

    level: Level
    subject: str
    runs: int
    models: int
    frameworks: tuple[str, ...]
    mean_error: RelativeChange | None
    mean_absolute_error: float | None
    factor: tuple[float, float] | None
    unlike: tuple[str, ...]
    calibrated_by: str | None = None
    ours: bool = False

    @derived
    def text(self) -> str:
        """The evidence in one line."""
        if self.calibrated_by is not None:
            published = replace(self, calibrated_by=None).text if self.runs else f"no published runs ({self.subject})"
            return f"calibrated by {self.calibrated_by}; {published}"
        if self.level == "bound":
            return f"a bound: {self.subject}"
        if self.level == "estimate":
            return f"an estimate: {'; '.join(self.unlike) or f'nothing measured on this chip ({self.subject})'}"
        assert self.mean_absolute_error is not None
        models = "1 model" if self.models == 1 else f"{self.models} models"
        text = (
            f"{self.subject}: {models}, {', '.join(self.frameworks)}{', priced as our program' if self.ours else ''}; "
            f"expected times are {self.mean_absolute_error:.1%} off on average"
        )
        return "; ".join((text, *self.unlike))

    @classmethod
    def without_runs(cls, level: Literal["estimate", "bound"], subject: str, *unlike: str) -> Evidence:
        """The evidence for a time that no published run says anything about: it gives no interval."""
        return cls(
            level=level,
            subject=subject,
            runs=0,
            models=0,
            frameworks=(),
            mean_error=None,
            mean_absolute_error=None,
            factor=None,
            unlike=unlike,
        )

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


def left_out_evidence(
    ratios: Sequence[MeasuredRatio], scaled_by: Literal["runs", "models"] | None = "runs"
) -> tuple[Evidence, ...]:
    """The evidence for each run among the runs of other models, scaled by the strays of all runs but itself.

    ``scaled_by`` 'models': other runs of its model do not scale it either; None: nothing does.
    """
    left_out = _left_out(ratios)
    of_category: dict[Category, list[MeasuredRatio]] = {}
    for run, _ in left_out:
        of_category.setdefault(run.category, []).append(run)
    result = []
    for one, evidence in left_out:
        others = of_category[one.category] if scaled_by else []
        apart = (run for run in others if (run.model != one.model if scaled_by == "models" else run is not one))
        result.append(_scaled(evidence, _strays(apart)))
    return tuple(result)


def with_strays(ratios: Sequence[MeasuredRatio]) -> tuple[MeasuredRatio, ...]:
    """The ratios with their strays: each with its own model left out."""
    return tuple(run for run, _ in _left_out(ratios))


def _left_out(ratios: Sequence[MeasuredRatio]) -> list[tuple[MeasuredRatio, Evidence]]:
    """Each run with its stray, and the evidence of other models for it, not scaled.

    Other runs of its model say whether it is outside of the evidence: runs of its chip and kind are there.
    """
    of_model: dict[str, list[MeasuredRatio]] = {}
    for one in ratios:
        of_model.setdefault(one.model, []).append(one)
    others = {model: [one for one in ratios if one.model != model] for model in of_model}
    known: dict[tuple[object, ...], Evidence] = {}
    runs = []
    for one in ratios:
        question, stray = Question(**field_values(one, Question)), None
        measured = [*others[one.model], *(run for run in of_model[one.model] if run is not one)]
        unlike = _unlike(question, [run for run in measured if run.category == one.category], measured)
        key = question, unlike, one.model
        if key not in known:
            known[key] = _unscaled(question, others[one.model], unlike)
        evidence = known[key]
        if evidence.factor is not None:
            low, high = (math.log(edge) for edge in evidence.factor)
            stray = (2 * math.log(one.ratio) - low - high) / (high - low)
        runs.append((replace(one, stray=stray), evidence))
    return runs


def _strays(ratios: Iterable[MeasuredRatio]) -> list[float]:
    """Distances by which runs stray, in order."""
    return sorted(abs(one.stray) for one in ratios if one.stray is not None)


def model_key(model: ModelConfig) -> str:
    """The sizes of a model as one word: one architecture under two names is one model."""
    dims = (model.layers, model.d_model, model.d_ff, model.heads, model.kv_heads, model.d_head, model.vocab)
    experts = () if model.moe is None else (model.moe.experts, model.moe.active, model.moe.d_ff)
    return ":".join("x".join(map(str, sizes)) for sizes in (dims, experts) if sizes)


@cache
def measured_ratios(name: str = "evidence.csv") -> tuple[MeasuredRatio, ...]:
    """The rows of ``evidence.csv``, of ``own_evidence.csv``, or of ``engine_evidence.csv``: benchmarks of engines."""
    with Path(__file__).with_name(name).open(encoding="utf-8", newline="") as file:
        return tuple(
            MeasuredRatio(
                phase=cast(Phase, row["phase"]),
                kind=cast(Kind, row["kind"]),
                **{name: row[name] for name in ("chip", "family", "framework", "model", "run")},
                seq_len=int(row["seq_len"]),
                over_dcn=row["over_dcn"] == "1",
                ratio=float(row["ratio"]),
                stray=float(row["stray"]) if row["stray"] else None,
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
    """The evidence for a planned time among ``ratios``: by default those of all published runs.

    Runs of its phase, chip and kind of model count; those of other chips and phases help to say how far runs stray.
    """
    if ratios is None:
        name = "engine_evidence.csv" if question.under_load else "own_evidence.csv" if question.ours else "evidence.csv"
        ratios = measured_ratios(name)
    own = _own(question, ratios)
    strays = _strays(own) if any(one.category == question.category for one in own) else []
    return _scaled(_unscaled(question, ratios, _unlike(question, own, ratios)), strays)


def _own(question: Question, ratios: Sequence[MeasuredRatio]) -> list[MeasuredRatio]:
    """Runs of the question's phase, chip and kind; where there are none those on chips of the chip's family."""
    own = [one for one in ratios if one.category == question.category]
    if own:
        return own
    phase, _, kind = question.category
    alike = [one for one in ratios if (one.phase, one.kind) == (phase, kind)]
    return [one for one in alike if family_of(one.chip) == family_of(question.chip)]


def _scaled(evidence: Evidence, strays: Sequence[float]) -> Evidence:
    """The evidence with an interval that is wide enough for nine in ten of runs that stray so far, in order.

    The place of one more run among n is as likely as any other: ceil(0.9 (n + 1)) of the n are to be inside. Nothing
    narrows the interval of a plan that is outside of the evidence.
    """
    if evidence.factor is None or len(strays) < _FEWEST:
        return evidence
    low, high = (math.log(edge) for edge in evidence.factor)
    scale = strays[math.ceil(_HELD * (len(strays) + 1)) - 1]
    if evidence.unlike:
        scale = max(1.0, scale)
    middle, half = (low + high) / 2, scale * (high - low) / 2
    return replace(evidence, factor=(math.exp(middle - half), math.exp(middle + half)))


def _unscaled(question: Question, ratios: Sequence[MeasuredRatio], unlike: Sequence[str]) -> Evidence:
    """The evidence with the interval that effects give; benchmarks of engines are pooled.

    The kernels of engines are priced one by one, and miss alike on all GPUs.
    """
    family = tuple(one for one in ratios if one.family == question.family)
    same = [one for one in family if one.phase == question.phase]
    own = same if question.under_load else _own(question, same)
    if not own:
        return Evidence.without_runs("estimate", str(question))
    if question.under_load:
        families = {family_of(one.chip) for one in own}
        if family_of(question.chip) not in families:
            return Evidence.without_runs("estimate", str(question), f"no benchmark on {question.chip} or its family")
        return _evidence(question, own, _pooled_factor(own, len(unlike)), unlike)
    ran = {one.framework for one in same}
    if question.framework is None and len(ran) == 1:
        question = replace(question, framework=ran.pop())
    low, high = _effects(family, question.kind).percentiles(
        question.place, question.framework, len(unlike), over_dcn=question.over_dcn
    )
    return _evidence(question, own, (math.exp(low), math.exp(high)), unlike)


def _unlike(question: Question, own: Sequence[MeasuredRatio], ratios: Sequence[MeasuredRatio]) -> tuple[str, ...]:
    """The ways in which a plan is outside of the evidence; ``own`` are the runs of its category.

    Of engines all that ran in its phase count.
    """
    unlike = []
    if question.under_load:
        if all(one.category != question.category for one in own):
            models = "mixtures of experts" if question.kind == "experts" else "dense models"
            unlike.append(f"none of {models} on {question.chip}")
        own = [one for one in ratios if one.phase == question.phase]
    if own and question.seq_len > _LONGER * (longest := max(one.seq_len for one in own)):
        unlike.append(f"none longer than {longest:,} tokens")
    if own and not question.under_load and all(one.chip != question.chip for one in own):
        chips = ", ".join(sorted({one.chip for one in own}))
        unlike.append(f"none on {question.chip}: those of {chips}")
    if own and question.framework is not None and all(one.framework != question.framework for one in own):
        unlike.append(f"none of {question.framework}")
    if own and question.over_dcn and not any(one.over_dcn for one in own):
        unlike.append("none over nodes" if find_chip(question.chip).switched else "none over DCN")
    return tuple(unlike)


def _evidence(
    question: Question, own: Sequence[MeasuredRatio], factor: tuple[float, float] | None, unlike: Sequence[str]
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
        ours=question.ours,
    )


Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class _Effects:
    """The effects that log-ratios are sums of, by combination of standard deviations [S].

    ``variances`` [S, 4] of place (a phase on a chip), framework, model, and model in a place, each combination with its
    weight [S], given the runs. ``levels`` has the places and frameworks of the cells [2, C]: runs of a model by a
    framework in a place. ``means`` [S] are of all ratios, ``deviations`` [S, C] those of cells from it, times
    ``inverses`` of their covariance [S, C, C]. ``run`` is the variance between runs of a cell in each place, and
    ``network`` what runs over DCN, or over nodes, have in addition.
    """

    variances: Floats
    weights: Floats
    levels: tuple[tuple[str, ...], tuple[str, ...]]
    means: Floats
    deviations: Floats
    inverses: Floats
    run: Mapping[str, float]
    network: float

    @classmethod
    def of(cls, ratios: Sequence[MeasuredRatio], frameworks: Floats | None = None) -> _Effects:
        """The effects of runs of a family and kind; ``frameworks``: the prior of that standard deviation."""
        cells, run = _cells(ratios), run_variances(ratios)
        places, ran, models = zip(*cells, strict=True)
        values = np.array([fmean(logs) for logs in cells.values()])
        of_mean = np.array([run[place] / len(logs) for place, logs in zip(places, cells.values(), strict=True)])
        same = [np.equal.outer(level, level) for level in (np.array(places), np.array(ran), np.array(models))]
        variances = np.array(list(product(DEVIATIONS, repeat=4))) ** 2
        shared = np.array([*same, np.eye(len(values))], dtype=np.float64)
        covariances = np.tensordot(variances, shared, axes=1) + np.diag(of_mean)
        inverses = np.linalg.inv(covariances)
        precision = inverses.sum((1, 2))
        means = inverses.sum(1) @ values / precision
        distances = values - means[:, np.newaxis]
        deviations = np.einsum("scd,sd->sc", inverses, distances)
        likelihood = np.linalg.slogdet(covariances)[1] + np.log(precision) + np.sum(distances * deviations, axis=1)
        weights = np.exp((likelihood.min() - likelihood) / 2).reshape((len(DEVIATIONS),) * 4)
        if frameworks is not None:
            weights *= frameworks[:, np.newaxis, np.newaxis]
        return cls(
            variances=variances,
            weights=weights.ravel() / weights.sum(),
            levels=(places, ran),
            means=means,
            deviations=deviations,
            inverses=inverses,
            run=run,
            network=network_variance(ratios),
        )

    @property
    def of_frameworks(self) -> Floats:
        """The probability of each standard deviation between frameworks."""
        return np.asarray(self.weights.reshape((len(DEVIATIONS),) * 4).sum((0, 2, 3)))

    def percentiles(self, place: str, framework: str | None, unlike: int, *, over_dcn: bool) -> tuple[float, float]:
        """The 5th and 95th percentile of the log-ratio of another model in a place with runs.

        A run that is ``unlike`` all measured ones in some ways strays in each as far as a model does.
        """
        shares = np.array([[one == level for one in self.levels[at]] for at, level in enumerate((place, framework))])
        shared = self.variances[:, :2] @ shares
        means = self.means + np.sum(shared * self.deviations, axis=1)
        solved = np.einsum("scd,sd->sc", self.inverses, shared)
        run = self.run[place] if place in self.run else fmean(self.run.values())
        variances = self.variances.sum(1) + unlike * self.variances[:, 2:].sum(1) + run
        variances += over_dcn * self.network
        variances += (1 - solved.sum(1)) ** 2 / self.inverses.sum((1, 2)) - np.sum(shared * solved, axis=1)
        likely = self.weights > 1e-4 * self.weights.max()
        mixture = list(zip(self.weights[likely], means[likely], np.sqrt(2 * variances[likely]), strict=True))
        total = sum(weight for weight, _, _ in mixture)

        def percentile(share: float) -> float:
            low, high = -10.0, 10.0
            while high - low > 1e-6:
                middle = (low + high) / 2
                below = sum(weight * (1 + math.erf((middle - mean) / scale)) / 2 for weight, mean, scale in mixture)
                low, high = (middle, high) if below < share * total else (low, middle)
            return (low + high) / 2

        return percentile(0.05), percentile(0.95)


def run_variances(ratios: Sequence[MeasuredRatio]) -> dict[str, float]:
    """The variance between log-ratios of one model by one framework, in each place, drawn towards that of all."""
    squares: dict[str, float] = dict.fromkeys((one.place for one in ratios), 0.0)
    freedom = dict.fromkeys(squares, 0)
    for (place, _, _), logs in _cells(ratios).items():
        mean = fmean(logs)
        squares[place] += sum((one - mean) ** 2 for one in logs)
        freedom[place] += len(logs) - 1
    everywhere = sum(squares.values()) / max(1, sum(freedom.values()))
    return {place: (squares[place] + _PRIOR * everywhere) / (freedom[place] + _PRIOR) for place in squares}


def network_variance(ratios: Sequence[MeasuredRatio]) -> float:
    """The mean square by which log-ratios over DCN, or over nodes, differ from those of the same cell without; or 0."""
    apart = {over: _cells([one for one in ratios if one.over_dcn == over]) for over in (False, True)}
    both = apart[False].keys() & apart[True].keys()
    return fmean([(fmean(apart[True][cell]) - fmean(apart[False][cell])) ** 2 for cell in both] or [0.0])


def _cells(ratios: Sequence[MeasuredRatio]) -> dict[tuple[str, str, str], list[float]]:
    """Log-ratios by place, framework and model."""
    cells: dict[tuple[str, str, str], list[float]] = {}
    for one in ratios:
        cells.setdefault((one.place, one.framework, one.model), []).append(math.log(one.ratio))
    return cells


@lru_cache(maxsize=64)
def _effects(ratios: tuple[MeasuredRatio, ...], kind: Kind) -> _Effects:
    """The effects of runs of a family with models of a kind."""
    dense = tuple(one for one in ratios if one.kind == "dense")
    if kind == "dense" or not dense:
        return _Effects.of(tuple(one for one in ratios if one.kind == kind))
    # All frameworks of a family ran dense models, and one of them mixtures.
    return _Effects.of(tuple(one for one in ratios if one.kind == kind), _effects(dense, "dense").of_frameworks)


def _pooled_factor(ratios: Sequence[MeasuredRatio], unlike: int) -> tuple[float, float] | None:
    """The 5th and 95th percentile of many ratios, each model counted alike, for a run of another model.

    None where all ratios are equal, which does not say how far runs stray. Their distances from the median grow as
    those of a mean over as many models do: by sqrt(1 + 1/models).
    """
    models = Counter(one.model for one in ratios)
    ordered = sorted((math.log(one.ratio), 1 / models[one.model]) for one in ratios)
    if ordered[0][0] == ordered[-1][0]:
        return None
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
