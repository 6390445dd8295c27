"""Money and risk in plans: prices by chip, intervals next to the figures that decide, and the batch that was chosen."""

from __future__ import annotations

import pytest

import rooftop
from rooftop.core.errors import RooftopError
from rooftop.library.planning import TrainingPlanResult
from rooftop.present.document import Table

_SLICES = "h100:2x8,v5p:2x2x4,v6e:4x4"


def test_a_price_is_that_of_its_chip() -> None:
    """Prices by chip change the dollars of those chips only; words and mappings are the same."""
    plain = rooftop.plan_training("llama3-8b", on=_SLICES, tokens="1T", batch_seqs=512)
    priced = rooftop.plan_training("llama3-8b", on=_SLICES, tokens="1T", batch_seqs=512, price="h100=2.7,v5p=8.4")
    mapped = rooftop.plan_training(
        "llama3-8b", on=_SLICES, tokens="1T", batch_seqs=512, price={"h100": 2.7, "v5p": 8.4}
    )

    def dollars(result: TrainingPlanResult) -> dict[str, float]:
        assert result.comparison is not None
        compared = result.comparison.document
        costs = {offer.chip: offer.cost_usd for offer in (compared.best, *compared.others)}
        assert None not in costs.values()
        return {chip: usd for chip, usd in costs.items() if usd is not None}

    before, after = dollars(plain), dollars(priced)
    assert {name: round(after[name] / before[name], 6) for name in before} == {"h100": 0.25, "v5p": 2.0, "v6e": 1.0}
    assert after == dollars(mapped)


@pytest.mark.parametrize(
    ("price", "accepted"),
    [
        ("2.5", "h100=2.5,v5p=2.5"),
        (2.5, "h100=2.5,v5p=2.5"),
        ("h200=2.5", "h100, v5p"),
        ("h100=2,h100=3", "once for each chip"),
        ("h100=0", "positive number"),
        ("h100=", "number"),
    ],
)
def test_a_price_that_is_of_no_chip_is_refused(price: float | str, accepted: str) -> None:
    for verb in (
        lambda: rooftop.plan_training("llama3-8b", on="h100:8,v5p:4x4x4", tokens="1T", price=price),
        lambda: rooftop.plan_serving("llama3-8b", on="h100,v5p", price=price),
    ):
        with pytest.raises(RooftopError) as refused:
            verb()
        assert refused.value.field == "price" and accepted in str(refused.value)
        assert "\n" not in str(refused.value)


def test_a_chip_without_a_price_is_asked_for_by_name() -> None:
    with pytest.raises(RooftopError, match="--price tpu7x=USD"):
        rooftop.plan_training("llama3-8b", on="tpu7x", tokens="1T", days=30)
    mixed = rooftop.plan_training("llama3-8b", on="tpu7x:2x2x1,v5p:2x2x1", tokens="1T", budget="1T")
    assert "--price tpu7x=USD" in mixed.page()


def test_a_comparison_shows_its_risk() -> None:
    """Intervals are those of the plans that give the figures; candidates within one are not told apart."""
    result = rooftop.plan_training("llama3-8b", on=_SLICES, tokens="1T", batch_seqs=512)
    assert result.comparison is not None
    compared = result.comparison
    by_slice = {offer.slice.name: offer for offer in (compared.best, *compared.others)}
    best = compared.document.best
    for offer in (best, *compared.document.others):
        plan = by_slice[offer.slice].plan
        assert plan is not None and plan.interval_s is not None
        assert offer.interval_days == tuple(plan.problem.days_at(seconds) for seconds in plan.interval_s)
        assert offer.interval_usd == tuple(plan.problem.cost_usd_at(seconds) for seconds in plan.interval_s)
        assert offer.evidence_runs == plan.evidence.runs
        assert offer.days is not None and best.days is not None and best.interval_days is not None
        low, high = offer.interval_days
        within = low <= best.days <= high or best.interval_days[0] <= offer.days <= best.interval_days[1]
        assert ("not distinguishable" in offer.why) == (within and offer is not best)
    # The same chips, twice as many: dollars do not tell them apart, and days do.
    alike = rooftop.plan_training("llama3-8b", on="v5p:4x4x4,v5p:4x4x8", tokens="1T", batch_seqs=512, days=365)
    assert alike.comparison is not None
    assert "not distinguishable" in alike.comparison.document.others[0].why
    text = alike.page()
    for words in ("90% of days", "90% of dollars", "runs", "not distinguishable", "2025-02", "that rooftop can run"):
        assert words in text


def test_the_batch_that_is_chosen_is_said_with_half_and_twice() -> None:
    """The figures are those of plans with that batch; a batch that is given needs no such line."""
    result = rooftop.plan_training("llama3-8b", on="v5p:2x2x4,v6e:4x4", tokens="1T")
    answer, work = result.answer, result.plan.problem.workload
    assert [other.batch_tokens / work.batch_tokens for other in answer.other_batches] == [0.5, 2]
    assert result.comparison is not None
    for other in answer.other_batches:
        same = result.plan.problem.slice
        plan = rooftop.plan_training("llama3-8b", on=same, tokens="1T", batch_tokens=other.batch_tokens)
        assert other.step_s == pytest.approx(plan.plan.expected_s, rel=0.02)
        assert other.mfu == pytest.approx(plan.plan.mfu, rel=0.02)
    first = "\n".join(result.document.verdict.details)
    assert "chosen as none was given" in first and "half of it" in first and "twice as many" in first
    asked = rooftop.plan_training("llama3-8b", on="v5p:2x2x4,v6e:4x4", tokens="1T", batch_tokens=work.batch_tokens)
    assert not asked.answer.other_batches and "none was given" not in asked.page()


def test_dollars_of_a_fleet_are_those_of_its_rate() -> None:
    """Tokens in and out of an hour, at their prices, make up the bill; full load is cheaper, and next to it."""
    result = rooftop.plan_serving(
        "llama3-8b", on="v5e,v6e", requests_per_second=20, prompt=2048, generate=256, kv_dtype="int8"
    )
    recommendation = result.to_json()["recommendation"]
    assert isinstance(recommendation, dict)
    for fleet in (recommendation["best"], *recommendation["others"]):
        prices, hour = fleet["token_prices"], 20 * 3600 / 1e6
        bill = hour * (2048 * prices["input"] + 256 * prices["output"])
        assert bill == pytest.approx(fleet["usd_per_hour"])
        assert prices["full_load_output"] < prices["output"] and prices["full_load_input"] < prices["input"]
    (cost,) = (figure for figure in result.document.figures if figure.name == "usd_per_million_tokens")
    assert cost.value == recommendation["best"]["token_prices"]["output"]
    assert "at 20 requests/s; at full load $" in cost.note and "(list: " in cost.note
    (alone,) = (
        figure
        for figure in rooftop.plan_serving("llama3-8b", on="v5e:2x2").document.figures
        if figure.name == "usd_per_million_tokens"
    )
    assert "at full load" in alone.note and "requests/s" not in alone.note


def test_fleets_are_a_table_with_each_chip() -> None:
    """Each chip has a row, with its prices; one that misses the targets says what comes nearest."""
    result = rooftop.plan_serving(
        "llama3-8b", on="v5e,v5p,v6e", requests_per_second=20, ttft="250ms", kv_dtype="int8", price="v5e=1,v5p=3,v6e=2"
    )
    (table,) = (chart for chart in result.document.charts if isinstance(chart, Table) and chart.section == "Fleets")
    assert [column.name for column in table.columns][:3] == ["fleet", "chips", "$/h"]
    assert {"more", "$/M out", "TTFT", "TPOT", "batch", "evidence"} <= {column.name for column in table.columns}
    for name in ("v5e", "v5p", "v6e"):
        assert any(name in row[0] for row in table.rows)
    assert "v5e $1" in table.about and "(given)" in table.about


def test_a_chip_that_misses_the_targets_says_what_comes_nearest() -> None:
    result = rooftop.plan_serving(
        "llama3-70b", on="v5e,v6e", requests_per_second=40, ttft="500ms", tpot="30ms", kv_dtype="bf16"
    )
    assert result.recommendation is not None
    assert [(lost.chip, lost.why[:10]) for lost in result.recommendation.left_out] == [("v5e", "nearest is")]
