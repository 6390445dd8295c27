"""Inputs of a simulation from a server's metrics: step times, overhead between programs, and rows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rooftop.core.errors import RooftopError
from rooftop.scheduling.serving.scheduler import Policy
from rooftop.serve.client.prediction import PredictionInput, deployment_of, measured_times, outside_s
from rooftop.serve.engine.configuration import Shapes
from rooftop.serve.engine.counters import Counters
from rooftop.simulate.serving.measured import MeasuredProgram, MeasuredTimes, prefill_rows

GENERATE = (("context_tokens", "512"), ("generating", "0"), ("sequences", "4"), ("tokens", "0"))
PREFILL = (("context_tokens", "512"), ("generating", "0"), ("sequences", "1"), ("tokens", "64"))


def reported(scale: float) -> PredictionInput:
    """A server that has run so many times ten steps, and answered as many requests."""
    one = {
        "steps_total": 10, "step_seconds_total": 5.0, "kv_pages": 32, "kv_page_tokens": 16,
        "time_to_first_token_seconds_sum": 3.0, "time_to_first_token_seconds_count": 10,
    }  # fmt: skip
    fixed = ("kv_pages", "kv_page_tokens")
    values = {(f"rooftop_{name}", ()): value * (1 if name in fixed else scale) for name, value in one.items()}
    for labels, runs, seconds in ((GENERATE, 8, 1.6), (PREFILL, 2, 2.4)):
        values["rooftop_program_runs_total", labels] = runs * scale
        values["rooftop_program_seconds_total", labels] = seconds * scale
    return PredictionInput(values=values)


def test_step_times_are_means_of_what_ran_in_between_and_of_what_goes_by_beside_it() -> None:
    times = measured_times(reported(1), reported(3))
    assert times.kv_tokens == 512
    # Of 10 s, programs took 8 in 20 steps.
    assert times.overhead_s == pytest.approx(0.1)
    assert times.generate_s(3, 30) == pytest.approx(0.1 + 0.2)
    assert times.mixed_s([(40, 0)], 3, 30) == pytest.approx(0.1 + 0.2 + 1.2)
    with pytest.raises(RooftopError, match="measured programs"):
        measured_times(reported(1), reported(1))


def test_servers_that_step_at_once_share_steps_and_have_pages_of_their_own() -> None:
    def at(scale: float, **more: float) -> PredictionInput:
        metrics = reported(scale)
        changed = {(f"rooftop_{name}", ()): value for name, value in more.items()}
        return PredictionInput(values={**metrics.values, **changed})

    policy = Policy(max_batch=9)
    # Programs took 8 of 10 s; two at a time they were under way in 5 of them, in 20 steps.
    two = measured_times(at(1, busy_seconds_total=2.5), at(3, servers=2, busy_seconds_total=7.5))
    assert (two.overhead_s, two.kv_tokens) == (pytest.approx(5 / 20), 256)
    copies = deployment_of(at(3, servers=2), two, policy=policy, prefix_cache=True)
    assert (copies.replicas, copies.policy.max_batch, copies.lockstep, copies.prefill_servers) == (2, 5, True, 0)
    # A server that prefills has 12 of 32 pages; the KV of a sequence takes as long as it did, or part of a step.
    apart = replace(policy, batching="disaggregated")
    parts = {"prefill_kv_pages": 12, "prefill_kv_groups": 2}
    sent = measured_times(reported(1), at(3, handovers_total=4, handover_seconds_total=0.2, **parts))
    assert (sent.kv_tokens, sent.prefill_kv_tokens, sent.prefill_kv_groups) == (320, 192, 2)
    assert sent.transfer_s(1) == sent.transfer_s(999) == pytest.approx(0.05)
    processes = deployment_of(reported(3), sent, policy=apart, prefix_cache=False)
    assert (processes.replicas, processes.prefill_servers, processes.lockstep) == (1, 1, False)
    within = measured_times(reported(1), at(3, servers=2, **parts))
    assert within.transfer_s(1) == 0 and within.kv_tokens == 320
    assert deployment_of(at(3, servers=2), within, policy=apart, prefix_cache=False).lockstep
    with pytest.raises(RooftopError, match="transfers were not measured"):
        measured_times(reported(1), reported(3)).transfer_s(1)


def test_a_step_whose_end_nobody_saw_took_no_longer_than_its_programs_do() -> None:
    counters, short, long = Counters(), (4, 1, 64, 0), (1, 64, 64, 0)
    for _ in range(2):
        counters.ran([short], 1.0)
        counters.stepped()
    # Both servers step: the first one was waited for, 9 s.
    counters.ran([long], 9.0)
    counters.ran([short], 9.0, at_most=True)
    counters.stepped()
    assert (counters.steps, counters.busy_s) == (3, 11.0)
    assert {program.tokens: (program.runs, program.seconds) for program in counters.program_times()} == {
        0: (3, 3.0),
        64: (1, 9.0),
    }


def test_what_passes_outside_the_engine_is_what_its_own_ttft_lacks() -> None:
    assert outside_s(reported(1), reported(2), 0.35) == pytest.approx(0.05)
    assert outside_s(reported(1), reported(1), 0.35) is None


@pytest.mark.parametrize(
    ("pieces", "full", "rows"), [(1, 4, 1), (2, 4, 1), (3, 4, 4), (4, 4, 4), (1, 1, 1), (4, 64, 1), (5, 64, 64)]
)
def test_a_few_pieces_go_one_by_one(pieces: int, full: int, rows: int) -> None:
    assert prefill_rows(pieces, full) == rows
    shapes = Shapes(batches=(1,), widths=(16,), contexts=(64,), prefill_tokens=16 * full)
    assert shapes.rows(pieces, 16) == rows and (rows, 16) in shapes.prefills


def test_pieces_are_priced_by_the_programs_that_the_engine_takes() -> None:
    def program(sequences: int, tokens: int, seconds: float) -> MeasuredProgram:
        return MeasuredProgram(sequences=sequences, tokens=tokens, context_tokens=64, seconds=seconds)

    alone, full, step = program(1, 16, 1.0), program(4, 64, 3.0), program(4, 0, 0.1)

    def seconds(programs: tuple[MeasuredProgram, ...], pieces: int) -> float:
        return MeasuredTimes(page_tokens=16, kv_tokens=640, programs=programs).prefill_s([(16, 0)] * pieces)

    assert [seconds((alone, full, step), pieces) for pieces in range(1, 8)] == [1, 2, 3, 3, 4, 5, 6]
    # What has not run is priced as what has.
    assert seconds((full, step), 1) == 3


def test_a_piece_is_prefilled_beside_what_generates_where_a_program_did_both() -> None:
    def program(sequences: int, tokens: int, seconds: float, generating: int = 0) -> MeasuredProgram:
        return MeasuredProgram(
            sequences=sequences, tokens=tokens, context_tokens=64, generating=generating, seconds=seconds
        )  # fmt: skip

    programs = (program(1, 16, 1.0), program(4, 64, 3.0), program(2, 0, 0.1), program(4, 0, 0.2))
    apart = MeasuredTimes(page_tokens=16, kv_tokens=640, programs=programs)
    mixing = MeasuredTimes(page_tokens=16, kv_tokens=640, programs=(*programs, program(1, 16, 1.1, 4)))
    piece = (16, 0)
    assert [apart.mixed_s([piece], 3, 30), mixing.mixed_s([piece], 3, 30)] == pytest.approx([1.2, 1.1])
    # Only what a single row holds, beside the largest batch; the pieces behind the first go alone.
    assert mixing.mixed_s([piece] * 2, 3, 30) == pytest.approx(2.1)
    assert mixing.mixed_s([piece], 2, 30) == pytest.approx(1.1) == 0.1 + mixing.prefill_s([piece])
    assert mixing.mixed_s([piece] * 4, 3, 30) == pytest.approx(3.2)
    assert mixing.prefill_s([piece]) == 1.0 and mixing.generate_s(3, 30) == 0.2
