"""Tests of ``rooftop.plan.evidence``: which runs speak for a plan, and how often their intervals hold."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.stats import multivariate_normal, norm

import rooftop
from rooftop.hardware import Slice
from rooftop.models import load_model
from rooftop.plan.evidence import (
    DEVIATIONS,
    Category,
    Evidence,
    MeasuredRatio,
    Question,
    evidence_for,
    left_out_evidence,
    measured_ratios,
    model_key,
    network_variance,
    run_variances,
    with_strays,
)
from tests.support.examples import examples


def _ratio(**changes: Any) -> MeasuredRatio:
    fields: Mapping[str, Any] = {
        "phase": "train",
        "chip": "v5e",
        "family": "tpu",
        "kind": "dense",
        "framework": "MaxText",
        "model": "a",
        "seq_len": 2048,
        "over_dcn": False,
        "ratio": 1.1,
        "run": "run",
    }
    return MeasuredRatio(**{**fields, **changes})


def _question(**changes: Any) -> Question:
    fields: Mapping[str, Any] = {
        "phase": "train",
        "chip": "v5e",
        "family": "tpu",
        "kind": "dense",
        "seq_len": 2048,
        "over_dcn": False,
    }
    return Question(**{**fields, **changes})


def _width(evidence: Evidence) -> float:
    assert evidence.factor is not None
    return evidence.factor[1] / evidence.factor[0]


_FOUR = tuple(
    _ratio(chip=chip, model=model, ratio=ratio)
    for chip, model, ratio in (("v5e", "a", 1.1), ("v5e", "b", 1.2), ("v5p", "a", 0.95), ("v5p", "c", 1.05))
)


@pytest.mark.parametrize("name", ["evidence.csv", "engine_evidence.csv"])
def test_nine_in_ten_runs_left_out_are_in_their_interval(name: str) -> None:
    """Of each phase, chip and kind with ten runs; the interval that effects give is of other models."""
    inside: dict[Category, list[bool]] = {}
    runs = measured_ratios(name)
    for one, evidence in zip(runs, left_out_evidence(runs), strict=True):
        interval = evidence.interval_s(1.0)
        if interval is not None:
            inside.setdefault(one.category, []).append(interval[0] <= one.ratio <= interval[1])
    shares = {category: sum(own) / len(own) for category, own in inside.items() if len(own) >= 10}
    assert len(shares) == (9 if name == "evidence.csv" else 8)
    # Runs on A100 are faster than expected, and intervals reach to the expectation.
    reaching = {("train", "a100", "dense"): 1.0} if name == "evidence.csv" else {}
    assert reaching.items() <= shares.items()
    assert all(0.9 <= share <= 0.95 for category, share in shares.items() if category not in reaching), shares


def test_the_file_has_the_strays_of_its_runs() -> None:
    runs = measured_ratios()
    for one, fresh in zip(runs, with_strays(runs), strict=True):
        assert one.stray == pytest.approx(fresh.stray, abs=2e-2 * (1 + abs(fresh.stray or 0))), one.run


def test_runs_that_stray_far_widen_the_interval() -> None:
    """As many of n strays are inside as a tenth of n + 1 leaves out; eight are too few to say anything."""
    strays = [0.1, -0.2, 0.3, -0.4, 0.5, -0.6, 0.7, -0.8, 0.9, 3.0]
    runs = [replace(_FOUR[index % 4], chip="v5e", stray=stray) for index, stray in enumerate(strays)]

    def width(runs: Sequence[MeasuredRatio]) -> float:
        return math.log(_width(evidence_for(_question(), runs)))

    plain = [replace(one, stray=None) for one in runs]
    assert width(runs) == pytest.approx(3.0 * width(plain))
    assert width(runs[:9]) == pytest.approx(0.9 * width(plain[:9]))
    assert width(runs[:8]) == pytest.approx(width(plain[:8]))
    elsewhere = [replace(one, chip="v5p") for one in runs]
    assert width([*plain, *elsewhere]) == pytest.approx(
        width([*plain, *(replace(one, stray=None) for one in elsewhere)])
    )


def test_runs_over_dcn_widen_its_interval_by_what_they_differ() -> None:
    over = [replace(one, over_dcn=True, ratio=one.ratio * 1.2) for one in _FOUR]
    near = [replace(one, over_dcn=True, ratio=one.ratio * 1.001) for one in _FOUR]
    assert network_variance([*_FOUR, *over]) == pytest.approx(math.log(1.2) ** 2)
    far, close = (_width(evidence_for(_question(over_dcn=True), [*_FOUR, *runs])) for runs in (over, near))
    assert far > 1.2 * close
    assert network_variance(_FOUR) == 0.0


def test_the_interval_holds_nine_in_ten_of_what_the_model_assumes() -> None:
    draw = random.Random(0)
    inside, draws = 0, examples(400, quick=150)
    for _ in range(draws):

        def run(chip: str, model: str, shift: float) -> MeasuredRatio:
            return _ratio(chip=chip, model=model, ratio=2.718281828 ** (shift + draw.gauss(0, 0.02)))

        chips = {chip: draw.gauss(0, 0.1) for chip in ("v4", "v5e", "v5p", "v6e")}
        ratios = [
            run(chip, f"{chip} {index}", mean + deviation)
            for chip, mean in chips.items()
            for index in range(4)
            for deviation in [draw.gauss(0, 0.08)]
            for _ in range(3)
        ]
        new = run("v5e", "new", chips["v5e"] + draw.gauss(0, 0.08)).ratio
        factor = evidence_for(_question(), ratios).factor
        assert factor is not None
        inside += factor[0] <= new <= factor[1]
    assert 0.86 <= inside / draws <= 0.96


def test_the_interval_is_that_of_the_joint_normal_distribution_of_all_runs() -> None:
    """The mixture over standard deviations, by SciPy, of runs one by one: the code has means of cells."""
    ratios = [*_FOUR, _ratio(ratio=1.16), _ratio(chip="v5p", framework="other", model="a", ratio=1.3)]
    levels = [(one.place, one.framework, one.model, (one.place, one.framework, one.model)) for one in ratios]
    new = ("train on v5e", "MaxText", "new", ("new",))
    run = run_variances(ratios)
    logs = np.log([one.ratio for one in ratios])
    same = [np.array([[a[at] == b[at] for b in (*levels, new)] for a in (*levels, new)]) for at in range(4)]
    noise = np.diag([*(run[one.place] for one in ratios), run["train on v5e"]])
    mixture = []
    for deviations in itertools.product(DEVIATIONS, repeat=4):
        # A mean of which nothing is known: a variance of 1e4.
        joint = sum(s**2 * one for s, one in zip(deviations, same, strict=True)) + noise + 1e4
        covariance, across = joint[:-1, :-1], joint[-1, :-1]
        solved = np.linalg.solve(covariance, np.array([logs, across]).T)
        mean, variance = across @ solved[:, 0], joint[-1, -1] - across @ solved[:, 1]
        mixture.append((multivariate_normal(cov=covariance).logpdf(logs), mean, math.sqrt(variance)))
    likelihood, means, scales = np.array(mixture).T
    weights = np.exp(likelihood - likelihood.max())
    expected = [
        math.exp(brentq(lambda x, p=p: np.average(norm.cdf(x, means, scales), weights=weights) - p, -9, 9))
        for p in (0.05, 0.95)
    ]
    assert evidence_for(_question(framework="MaxText"), ratios).factor == pytest.approx(expected, rel=1e-3)


def test_a_framework_that_ran_has_a_narrower_interval_than_our_programs() -> None:
    ratios = [*_FOUR, *(_ratio(chip="v4", framework="other", model=model, ratio=1.5) for model in "ad")]
    ours, known, new = (
        evidence_for(_question(framework=framework), ratios) for framework in (None, "MaxText", "never seen")
    )
    assert _width(known) < _width(ours) < _width(new)
    assert (ours.unlike, known.unlike, new.unlike) == ((), (), ("none of never seen",))
    # Left out is the model of a published run, not its framework.
    run = _ratio(model="left out")
    assert left_out_evidence([*ratios, run])[-1].factor == known.factor


def test_runs_of_other_phases_say_how_far_models_stray() -> None:
    alone = [_ratio(phase="decode", ratio=ratio) for ratio in (0.95, 1.0, 1.05)]
    alike = [_ratio(chip=chip, model=model, ratio=1.0) for chip in ("v5e", "v5p", "v6e") for model in "abcd"]
    few, many = (evidence_for(_question(phase="decode"), [*alone, *others]) for others in ((), alike))
    assert _width(many) < 0.7 * _width(few)
    assert (few.runs, many.runs) == (3, 3)


def test_without_a_run_on_the_chip_a_plan_is_an_estimate() -> None:
    evidence = evidence_for(_question(chip="v3"), _FOUR)
    assert (evidence.level, evidence.factor, evidence.interval_s(1.0)) == ("estimate", None, None)
    assert evidence.text == "an estimate: nothing measured on this chip (training of dense models on v3)"
    assert evidence_for(_question(kind="experts"), _FOUR).level == "estimate"
    assert evidence_for(_question(phase="decode"), _FOUR).level == "estimate"


def test_evidence_says_which_runs_and_how_far_off() -> None:
    evidence = evidence_for(_question(), _FOUR)
    assert (evidence.runs, evidence.models, evidence.frameworks) == (2, 2, ("MaxText",))
    assert evidence.mean_error == pytest.approx((1 / 1.1 + 1 / 1.2) / 2 - 1)
    assert evidence.text.endswith(f"{evidence.mean_absolute_error:.1%} off on average")


@pytest.mark.parametrize(
    ("change", "unlike"),
    [
        ({"seq_len": 4096}, ()),
        ({"seq_len": 4097}, ("none longer than 2,048 tokens",)),
        ({"over_dcn": True}, ("none over DCN",)),
        ({"seq_len": 131072, "over_dcn": True}, ("none longer than 2,048 tokens", "none over DCN")),
    ],
)
def test_outside_the_evidence_the_interval_widens(change: dict[str, Any], unlike: tuple[str, ...]) -> None:
    usual, evidence = evidence_for(_question(), _FOUR), evidence_for(_question(**change), _FOUR)
    assert evidence.unlike == unlike
    assert (_width(evidence) > _width(usual)) == bool(unlike)


def test_frameworks_that_differ_widen_the_interval() -> None:
    """Runs on another chip say how far frameworks differ; mixtures, which one ran, take it from dense models."""
    alike, differing = (
        [*_FOUR, _ratio(chip="v4", framework="other", model="d", ratio=ratio), _ratio(kind="experts", model="e")]
        for ratio in (1.075, 2.0)
    )
    for kind in ("dense", "experts"):
        assert _width(evidence_for(_question(kind=kind), differing)) > _width(evidence_for(_question(kind=kind), alike))


def test_a_chip_without_runs_has_those_of_its_family_and_a_wider_interval() -> None:
    model = load_model("qwen3-30b-a3b")
    known, alike, none = (
        evidence_for(Question.of("train", model, Slice.parse(on), 4096).priced_as("Megatron Core"))
        for on in ("gb200:8", "gb300:8", "v4:2x2x1")
    )
    assert alike.runs == known.runs
    assert alike.unlike == ("none on gb300: those of gb200",)
    assert _width(alike) > _width(known)
    assert none.level == "estimate"


def test_our_program_has_the_evidence_of_runs_that_are_priced_as_it() -> None:
    model, where = load_model("llama3-8b"), Slice.parse("h100:8")
    question = Question.of("train", model, where, 8192)
    ours, theirs = (evidence_for(question.priced_as(name)) for name in (None, "Megatron Core"))
    assert ours.runs == theirs.runs
    assert "priced as our program" in ours.text
    assert "priced as our program" not in theirs.text
    assert ours.mean_absolute_error != theirs.mean_absolute_error
    assert "none of torchtitan" in evidence_for(question.priced_as("torchtitan")).text


def test_more_models_narrow_the_interval() -> None:
    more = (*_FOUR, *(_ratio(model=f"m{index}", ratio=1.1 + 0.1 * (index % 2)) for index in range(6)))
    assert _width(evidence_for(_question(), more)) < _width(evidence_for(_question(), _FOUR))


def test_an_interval_holds_its_expectation_and_nothing_below_the_bound() -> None:
    evidence = evidence_for(_question(), [_ratio(chip=one.chip, model=one.model, ratio=2 * one.ratio) for one in _FOUR])
    low, high = evidence.interval_s(1.0, 0.7) or (0.0, 0.0)
    assert 0.7 <= low <= 1.0 < high
    assert (evidence_for(_question(), _FOUR).interval_s(1.0, 1.05) or (0.0,))[0] == 1.0


def test_a_model_is_left_out_by_its_sizes() -> None:
    llama = rooftop.model("llama3-8b").config
    assert model_key(llama) == "32x4096x14336x32x8x128x128256"
    assert model_key(rooftop.model("mixtral-8x7b").config).endswith(":8x2x14336")
    assert left_out_evidence(_FOUR)[0].runs == 1


def test_a_plan_carries_its_interval() -> None:
    plan = rooftop.plan_training("llama3-8b", on="v5e:4x4", batch_seqs=32).to_json()
    step, evidence = plan["step"], plan["evidence"]
    assert isinstance(step, dict)
    assert isinstance(evidence, dict)
    low, high = step["interval_s"]
    assert step["lower_s"] <= low <= step["expected_s"] <= high
    assert (evidence["level"], evidence["runs"], evidence["frameworks"]) == ("expected", 12, ["MaxText"])
    plan = rooftop.plan_training("llama3-8b", on="v3:4x4", batch_seqs=32).to_json()
    step, evidence = plan["step"], plan["evidence"]
    assert isinstance(step, dict)
    assert isinstance(evidence, dict)
    assert (step["interval_s"], evidence["level"]) == (None, "estimate")


def test_a_serving_plan_carries_its_intervals() -> None:
    plan = rooftop.plan_serving("llama3-8b", on="v5e:2x2").to_json()
    evidence = plan["evidence"]
    assert isinstance(evidence, dict)
    for name in ("tpot_s", "ttft_s"):
        low, high = evidence[name]
        assert low <= plan[name] <= high
    evidence = rooftop.plan_serving("llama3-8b", on="v6e:2x2").to_json()["evidence"]
    assert isinstance(evidence, dict)
    assert (evidence["decode"]["level"], evidence["tpot_s"]) == ("estimate", None)
