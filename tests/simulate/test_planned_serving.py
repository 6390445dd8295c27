"""Plans next to simulations of their own servers: the same TPOT and rate, or the reason why not."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

import rooftop
from rooftop.core.errors import Infeasible
from rooftop.library.simulation import SimulationResult
from rooftop.plan.serving.plan import ServingPlan

MODELS = ("llama3-8b", "qwen2.5-7b", "mistral-7b", "gemma3-4b", "mixtral-8x7b", "qwen3-30b-a3b")
SLICES = ("v5e:2x2", "v5e:4x4", "v6e:2x2", "v4:2x2x1", "v5p:2x2x1", "h100:1", "h200:2")
#: A plan and a simulation may differ by so much without a word.
CLOSE = 0.05


def questions(seed: int, count: int, mode: str, generate: tuple[int, ...]) -> Iterator[ServingPlan]:
    """So many plans of random small questions that fit."""
    draw = random.Random(seed)
    while count:
        model, on, tokens = draw.choice(MODELS), draw.choice(SLICES), draw.choice(generate)
        prompt, batch = draw.choice((64, 500, 2000, 9000)), draw.choice((1, 2, 3, 8, 32, 64))
        try:
            plan = rooftop.plan_serving(
                model, on=on, prompt=prompt, generate=tokens, batch_seqs=batch, batching=mode
            ).plan  # fmt: skip
        except Infeasible:
            continue
        if plan.fits:
            count -= 1
            yield plan


def off(plan: ServingPlan, simulated: SimulationResult, tpot_s: float) -> float:
    """The larger share by which the simulated TPOT and rate differ from a planned TPOT and the planned rate."""
    figures = simulated.report
    assert figures.tpot_s is not None
    rate = figures.tokens.generated_per_second / plan.tokens_per_s
    return max(abs(figures.tpot_s.mean / tpot_s - 1), abs(rate - 1))


COUNTS = [3, pytest.param(60, marks=pytest.mark.slow)]


@pytest.mark.parametrize("count", COUNTS)
def test_clients_with_equal_requests_meet_the_plan_of_an_interleaved_server(count: int) -> None:
    for plan in questions(1, count, "interleaved", (2, 3, 8, 30, 100, 400)):
        simulated = rooftop.simulate(plan, concurrency=plan.batch)
        assert plan.tpot_together_s is not None
        if plan.generate_on.spread > 1 and off(plan, simulated, plan.tpot_together_s) > CLOSE:
            # Groups of devices prefill at the same time, which costs models with experts more.
            assert any("groups of devices prefill" in note for note in simulated.report.notes)
            continue
        assert off(plan, simulated, plan.tpot_together_s) < CLOSE, plan
        # The TPOT of answers that differ is the larger one, and the answer says so.
        differs = abs(plan.tpot_together_s / plan.tpot_s - 1) > CLOSE
        assert [note for note in simulated.report.notes if "answers of one length" in note] != [] or not differs


@pytest.mark.parametrize("count", COUNTS)
def test_clients_with_answers_that_differ_meet_the_other_tpot(count: int) -> None:
    for plan in questions(2, count, "interleaved", (100, 200)):
        mean = plan.problem.workload.generate
        # The first answers, which all start together, and the last ones are a small share of so many.
        simulated = rooftop.simulate(
            plan, concurrency=plan.batch, generate=f"{mean // 2}:{2 * mean - mean // 2}", requests=40 * plan.batch
        )
        if plan.generate_on.spread > 1 and off(plan, simulated, plan.tpot_s) > CLOSE:
            assert any("groups of devices prefill" in note for note in simulated.report.notes)
            continue
        assert off(plan, simulated, plan.tpot_s) < CLOSE, plan


@pytest.mark.parametrize("count", COUNTS)
def test_disaggregated_servers_meet_the_plan_or_say_why_not(count: int) -> None:
    for plan in questions(3, count, "disaggregated", (2, 8, 30, 100, 400)):
        simulated = rooftop.simulate(plan, concurrency=plan.batch)
        if off(plan, simulated, plan.tpot_s) > CLOSE:
            assert any(": " in note for note in simulated.report.notes), simulated.report.notes


@pytest.mark.parametrize(("batch", "tpot_s"), [(32, 0.1226), (64, 0.2456)])
def test_a_published_question_has_one_answer(batch: int, tpot_s: float) -> None:
    """Long prompts, short answers: half of 31 or 63 prefills come between the tokens of clients that start together."""
    plan = rooftop.plan_serving(
        "qwen3-8b", on="h200:1", prompt=9000, generate=30, batching="interleaved", batch_seqs=batch
    ).plan  # fmt: skip
    simulated = rooftop.simulate(plan, concurrency=batch)
    assert simulated.report.tpot_s is not None
    assert simulated.report.tpot_s.mean == pytest.approx(tpot_s, rel=0.001) == plan.tpot_together_s
    assert plan.tpot_s == pytest.approx(plan.step_s + (batch - 1 - (batch - 1) / 58) / 29 * plan.prefill_s)
    (note,) = simulated.report.notes
    assert "answers of one length start and end together" in note


def test_a_rate_beyond_the_plans_is_said_first() -> None:
    planned = rooftop.plan_serving(
        "llama3-8b", on="v5e:2x2", prompt=1000, generate=50, batching="interleaved", batch_seqs=8,
        requests_per_second=20,
    )  # fmt: skip
    over = rooftop.simulate(planned, requests_per_second=500, duration=4)
    assert "times the plan's 20; servers finish " in over.report.notes[0]
    assert "and the queue grows to 1," in over.report.notes[0]
    assert "times the plan's 20" in str(over).splitlines()[1]
    # At its own rate there is nothing to say about it, and beside a plan without a rate only that the queue grows.
    assert not any("Requests come" in note for note in rooftop.simulate(planned, duration=30).report.notes)
    (note, *_) = rooftop.simulate(planned.plan.to_json(), requests_per_second=500, duration=4).report.notes
    assert note.startswith("Requests come at ") and "queue grows" in note
