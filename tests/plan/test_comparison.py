"""Slices compared for a training job: what is recommended runs, fits and meets the limits, and limits have an order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rooftop
from rooftop.core.errors import Infeasible, RooftopError
from rooftop.hardware import Slice, chip, slice_sizes
from rooftop.library.planning import TrainingPlanResult
from rooftop.models import load_model
from rooftop.models.numerics import Numerics
from rooftop.plan.training import comparison
from rooftop.plan.training.comparison import Aim, Limits, SliceComparison, compare
from rooftop.plan.training.problem import Problem
from rooftop.plan.training.search import FASTEST, Sweep, SweepOptions, sweep
from rooftop.plan.training.workload import Workload
from tests.support.examples import examples


def problem(model: str = "llama3-8b", *, seqs: int = 256, tokens: float | None = 1e12, **more: Any) -> Problem:
    workload = Workload(batch_tokens=seqs * 4096, seq_len=4096, tokens=tokens)
    return Problem(model=load_model(model), slice=Slice.parse("v5e:1x1"), workload=workload, **more)


def sizes(*names: str, most: int = 256) -> dict[str, list[Slice]]:
    return {name: slice_sizes(chip(name), most) for name in names}


def figures(compared: SliceComparison) -> tuple[float, float]:
    """Days and dollars of the recommended slice."""
    best = compared.best
    assert best.days is not None and best.cost_usd is not None
    return best.days, best.cost_usd


@settings(max_examples=examples(2), deadline=None)
@given(
    st.sampled_from(["llama3-8b", "mixtral-8x7b"]),
    st.sampled_from([128, 250]),
    st.sampled_from([Limits(days=30), Limits(budget_usd=2e5), Limits(chips=64), Limits(days=60, budget_usd=1e5)]),
)
def test_the_recommended_slice_runs_and_fits(model: str, seqs: int, limits: Limits) -> None:
    where = {name: some[-4:] for name, some in sizes("v5e", "v6e", most=limits.chips or 256).items()}
    try:
        compared = compare(problem(model, seqs=seqs), where, limits, "time" if limits.days is None else "cost")
    except Infeasible:
        # 250 sequences split over few meshes.
        assert seqs == 250
        return
    for offer in (compared.best, *compared.others):
        assert offer.plan is not None and offer.plan.fits and not offer.plan.obstacles
        assert offer.plan.problem.slice == offer.slice
    document = compared.document
    best = document.best
    assert best.meets == compared.meets == (best.why in ("", "its times are bounds"))
    if best.meets:
        assert best.days is not None and best.cost_usd is not None
        assert best.days <= (limits.days or best.days) and best.chips <= (limits.chips or best.chips)
        assert best.cost_usd <= (limits.budget_usd or best.cost_usd)
        for other in document.others:
            assert other.why
            if other.meets:
                assert other.cost_usd is not None and other.days is not None
                assert other.days >= best.days if limits.days is None else other.cost_usd >= best.cost_usd


def test_more_of_a_limit_is_never_worse() -> None:
    """More dollars or chips are never slower; more days never cost more. The plans of a slice do not depend on them."""
    job, where = problem(), sizes("v6e", most=512)
    by_budget = [compare(job, where, Limits(budget_usd=usd), "time") for usd in (6e4, 1e5, 2e5)]
    met = [figures(compared)[0] for compared in by_budget if compared.meets]
    assert met and met == sorted(met, reverse=True)
    by_chips = [compare(job, sizes("v5e", most=most), Limits(chips=most), "time") for most in (40, 100, 256)]
    assert [compared.meets for compared in by_chips] == [True] * 3
    days = [figures(compared)[0] for compared in by_chips]
    assert days == sorted(days, reverse=True)
    by_days = [compare(job, where, Limits(days=most), "cost") for most in (6, 12, 40)]
    dollars = [figures(compared)[1] for compared in by_days if compared.meets]
    assert dollars and dollars == sorted(dollars, reverse=True)


def test_the_smallest_slice_is_the_first_that_fits() -> None:
    where = sizes("v5e")
    compared = compare(problem(tokens=None), where, Limits(), "chips")
    smaller = [size for size in where["v5e"] if size.chips < compared.best.slice.chips]
    assert smaller and compared.best.plan is not None and compared.best.plan.fits
    for size in smaller:
        with pytest.raises(Infeasible):
            compare(problem(tokens=None), {size.name: [size]}, Limits(), "chips")


@pytest.mark.parametrize(
    ("limits", "aim"),
    [
        (Limits(days=6), "cost"),
        (Limits(days=0.5), "cost"),
        (Limits(days=20, budget_usd=1e5), "time"),
        (Limits(budget_usd=1e5), "time"),
        (Limits(chips=64), "time"),
        (Limits(days=8), "chips"),
    ],
)
def test_bounds_rule_out_no_slice_that_would_win(limits: Limits, aim: Aim, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison is the same as with every slice priced, also where no slice meets the limits."""
    where = sizes("v5e", "v6e", most=limits.chips or 256)
    quick = compare(problem(), where, limits, aim).document
    ruled_out = []

    def whole(of: Problem, options: SweepOptions = FASTEST) -> Sweep:
        searched = sweep(of, replace(options, worth=None))
        if options.worth is not None and searched.fits.any():
            least = np.array([searched.expected_s[searched.best]])
            ruled_out.append(not options.worth(np.zeros((1, 0)), least))
        return searched

    monkeypatch.setattr(comparison, "sweep", whole)
    # A bound may keep a search from stopping early, so that it looks at one slice more.
    assert replace(compare(problem(), where, limits, aim).document, planned=quick.planned) == quick
    # Limits that most slices meet, or miss, leave some to be ruled out.
    assert any(ruled_out)


def test_a_chip_without_published_runs_says_that_its_times_are_estimates() -> None:
    """Runs count by kind of model: on v4 dense models were measured, mixtures of experts were not."""
    where = {name: [Slice.parse(name)] for name in ("v5e:8x8", "v3:16x16", "v4:4x4x8")}
    for model, bounds in (("llama3-8b", {"v3"}), ("mixtral-8x7b", {"v3", "v4", "v5e"})):
        compared = compare(problem(model), where, Limits(), "time")
        offers = {offer.slice.chip.name: offer for offer in (compared.best, *compared.others)}
        assert {name for name, offer in offers.items() if offer.is_estimate} == bounds & offers.keys()
        assert "v4" in offers and ("its times are estimates" in compared.why(offers["v4"])) == ("v4" in bounds)


def test_a_job_that_meets_no_limit_names_the_nearest() -> None:
    compared = compare(problem(), {"v5e:4x4": [Slice.parse("v5e:4x4")]}, Limits(days=3, chips=8), "cost")
    assert not compared.meets
    with pytest.raises(Infeasible, match=r"no slice trains .* nearest is v5e:4x4: .* days, not 3; 16 chips, not 8"):
        compared.require_met()


def test_nothing_that_fits_says_why() -> None:
    with pytest.raises(Infeasible, match=r"cannot be trained on v5e:2x2: does not fit: .* over the 16\.9 GB"):
        compare(problem("llama3-70b"), {"v5e:2x2": [Slice.parse("v5e:2x2")]}, Limits(), "time")
    narrow = replace(problem("gemma2-9b"), numerics=Numerics(compute="f16"))
    with pytest.raises(Infeasible, match="no program multiplies in bf16"):
        compare(narrow, sizes("h100"), Limits(), "chips")


@pytest.mark.parametrize(
    ("on", "more", "message"),
    [
        ("v5p", {}, "on: got 'v5p'; accepted: with a shape"),
        ("v5p,v6e:4x4", {}, "on: got 'v5p'"),
        ("v5p", {"days": 3}, "days: got 3.0; accepted: this with --tokens"),
        ("v5p", {"budget": "$2M"}, r"budget: got 2000000.0; accepted: this with --tokens"),
        ("v5p", {"chips": 4, "mesh": "fsdp=4"}, "mesh: got 'fsdp=4'; accepted: this with one slice"),
        ("h100:8x2,v5e:4x4", {"layout": "fsdp=x"}, "layout: got 'fsdp=x'"),
        ("v5p:4x4x4", {"days": "soon"}, "days: got 'soon'"),
        ("v5p:4x4x4", {}, "batch: got nothing"),
    ],
)
def test_wrong_questions_name_what_is_wrong(on: str, more: dict[str, Any], message: str) -> None:
    with pytest.raises(RooftopError, match=message):
        rooftop.plan_training("llama3-8b", on=on, **more)


def test_slices_are_compared_and_the_best_is_planned() -> None:
    """Objects are taken like names; the batch is 4 Mi tokens unless one is given; the plan is of the best slice."""
    result = rooftop.plan_training(
        "llama3-8b", on=[Slice.parse("v5e:8x8"), "v6e:8x8", "v5e:2x2"], tokens="1T", alternatives=2
    )
    assert isinstance(result, TrainingPlanResult) and result.comparison is not None
    data: Any = result.to_json()
    assert data["workload"]["batch_tokens"] == 4 * 2**20
    assert data["slice"]["name"] == data["comparison"]["best"]["slice"] == "v6e:8x8"
    assert data["days"] == data["comparison"]["best"]["days"]
    assert [entry["slice"] for entry in data["comparison"]["others"]] == ["v5e:8x8"]
    assert [entry["name"] for entry in data["comparison"]["left_out"]] == ["v5e:2x2"]
    assert data["executable"] and data["memory"]["fits"]


@pytest.mark.parametrize(("tokens", "batch"), [(None, 4), ("2T", 4), ("15T", 16)])
def test_a_usual_batch_keeps_a_run_to_a_million_steps(tokens: str | None, batch: int) -> None:
    compared = rooftop.plan_training("qwen3-0.6b", on="v6e:4x4,v6e:8x8", tokens=tokens, alternatives=1)
    assert compared.plan.problem.workload.batch_tokens == batch * 2**20


def test_progress_names_each_slice() -> None:
    calls: list[tuple[int, int, str]] = []
    rooftop.plan_training("llama3-8b", on="v5e:8x8,v6e:8x8", on_progress=lambda *call: calls.append(call))
    assert calls == [(0, 2, "v5e:8x8"), (1, 2, "v6e:8x8")]
