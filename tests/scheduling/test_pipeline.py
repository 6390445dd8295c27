"""Pipeline tables and their simulation: every table is valid, and its bubble and memory are the closed forms'."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rooftop.arrays import Mesh
from rooftop.capabilities import Choice
from rooftop.core.errors import RooftopError
from rooftop.hardware import Slice
from rooftop.plan.layouts import from_mesh
from rooftop.plan.training.pricing import lockstep_s
from rooftop.plan.training.strategies import IDLE_SHARES, Strategies
from rooftop.scheduling.pipeline import (
    SCHEDULES,
    TRIP_OPS,
    ModelPart,
    PipelineSchedule,
    PipelineTable,
    StageBuffer,
    StageOp,
    Task,
    TripTask,
    least_slot_counts,
    least_trip_count,
    pipeline_table,
    slot_counts,
    trip_count,
    trip_table,
    waited_trips,
)
from rooftop.simulate.pipeline import Durations, bubble, idle_over_busy, most_in_flight, run

KINDS = [("eager_1f1b", 1), ("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zero_bubble", 1)]


@pytest.mark.parametrize(("schedule", "chunks"), KINDS)
@given(stages=st.integers(1, 6), rounds=st.integers(1, 4), seconds=st.tuples(*[st.integers(1, 8)] * 3))
def test_simulated_bubble_and_memory_equal_the_closed_forms(
    schedule: str, chunks: int, stages: int, rounds: int, seconds: tuple[int, int, int]
) -> None:
    microbatches = stages * rounds
    forward, dx, dw = seconds
    if schedule == "eager_1f1b":
        dx = max(dx, forward)
    durations = Durations(forward=forward, input_gradient=dx, weight_gradient=min(dw, forward, dx))
    size = {"stages": stages, "microbatches": microbatches, "chunks": chunks}
    result = run(pipeline_table(schedule, **size), durations)
    assert result.bubble == pytest.approx(bubble(schedule, **size, durations=durations))
    assert result.in_flight.max() == result.in_flight[0] == pytest.approx(most_in_flight(schedule, **size))
    work = microbatches * (forward + dx + float(durations.weight_gradient))
    assert result.busy == pytest.approx(work)


@pytest.mark.parametrize(("schedule", "chunks"), KINDS)
@given(stages=st.integers(2, 6), microbatches=st.integers(1, 30))
def test_trips_of_the_program_are_counted_without_its_table(
    schedule: PipelineSchedule, chunks: int, stages: int, microbatches: int
) -> None:
    if schedule == "interleaved" and microbatches > stages:
        microbatches -= microbatches % stages
    table = pipeline_table(schedule, stages=stages, microbatches=microbatches, chunks=chunks)
    trips = slot_counts(schedule, stages, microbatches, chunks).trips
    assert trips == len(trip_table(table).done) == trip_count(schedule, stages, microbatches, chunks)
    assert least_trip_count(schedule, stages, microbatches, chunks) <= trips
    # A forward and a backward slot of eager 1F1B are one trip, but for its ends.
    if schedule == "eager_1f1b":
        assert trips == microbatches + 2 * (stages - 1)
        assert len(table.slots) == 2 * (microbatches + stages - 1)


@pytest.mark.parametrize(("schedule", "chunks"), KINDS)
@given(
    stages=st.integers(2, 6),
    microbatches=st.integers(1, 30),
    seconds=st.tuples(*[st.integers(0, 8)] * 7),
)
def test_no_table_takes_less_than_the_least_counts(
    schedule: PipelineSchedule, chunks: int, stages: int, microbatches: int, seconds: tuple[int, ...]
) -> None:
    """Whatever tasks take, if those of the first part take more than inner ones, and going back the last part less."""
    if schedule == "interleaved" and microbatches > stages:
        microbatches -= microbatches % stages
    forward, backward, weights, begins, begins_back, less, ends = seconds
    of = {
        (StageOp.FORWARD, ModelPart.INNER): forward,
        (StageOp.FORWARD, ModelPart.FIRST): forward + begins,
        (StageOp.FORWARD, ModelPart.LAST): ends,
        (StageOp.BACKWARD, ModelPart.INNER): backward,
        (StageOp.BACKWARD, ModelPart.FIRST): backward + begins_back,
        (StageOp.BACKWARD, ModelPart.LAST): min(less, backward),
        (StageOp.WEIGHTS, ModelPart.INNER): weights,
    }
    least, table = (count(schedule, stages, microbatches, chunks) for count in (least_slot_counts, slot_counts))
    took = [
        sum(count * max(of[task] for task in mix) for mix, count in counts.mixes.items()) for counts in (least, table)
    ]
    assert took[0] <= took[1]
    assert least.trips <= table.trips


@pytest.mark.parametrize("stages", [4, 8])
@pytest.mark.parametrize("times", [1, 2, 4, 8])
def test_zero_bubble_below_interleaved_below_1f1b_as_gpipe(stages: int, times: int) -> None:
    microbatches = stages * times
    results = {
        schedule: run(pipeline_table(schedule, stages=stages, microbatches=microbatches, chunks=chunks), Durations())
        for schedule, chunks in KINDS
        if chunks < 3
    }
    share = {schedule: float(timeline.bubble.max()) for schedule, timeline in results.items()}
    assert share["zero_bubble"] < share["interleaved"] < share["1f1b"] == pytest.approx(share["gpipe"])
    assert share["gpipe"] == pytest.approx((stages - 1) / (microbatches + stages - 1))
    assert results["interleaved"].makespan == pytest.approx(3 * microbatches * (1 + (stages - 1) / (2 * microbatches)))
    assert results["zero_bubble"].makespan == 3 * microbatches + stages - 1
    assert share["eager_1f1b"] == pytest.approx(share["1f1b"])
    assert (
        list(results["eager_1f1b"].in_flight) == [min(microbatches, 2 * (4 - s) - 1) for s in range(4)] or stages == 8
    )
    assert list(results["1f1b"].in_flight) == [min(microbatches, stages - stage) for stage in range(stages)]
    assert set(results["gpipe"].in_flight) == {microbatches}
    assert set(results["zero_bubble"].in_flight) == {stages}
    if times > 1:
        assert results["1f1b"].in_flight.max() < results["gpipe"].in_flight.max()


def test_a_stage_that_is_slower_and_sends_that_take_time_make_a_step_longer() -> None:
    table = pipeline_table("1f1b", stages=4, microbatches=8)
    last = np.array([1.0, 1.0, 1.0, 1.5])
    slower = run(table, Durations(forward=last))
    assert slower.makespan > run(table, Durations()).makespan
    assert slower.bubble[0] > slower.bubble[3]
    # The first microbatch passes S - 1 times each way, and then a forward of each stage waits for what comes back.
    assert run(table, Durations(send=0.25)).makespan >= run(table, Durations()).makespan + 6 * 0.25


@pytest.mark.parametrize(("schedule", "chunks"), KINDS)
@given(stages=st.integers(2, 6), microbatches=st.integers(1, 30), seconds=st.tuples(*[st.integers(1, 9)] * 6))
def test_slots_counted_by_their_tasks_last_as_long_as_those_of_the_table(
    schedule: PipelineSchedule, chunks: int, stages: int, microbatches: int, seconds: tuple[int, ...]
) -> None:
    """The table, slot by slot with the longest task of any stage, against the mixes that are counted and priced."""
    if schedule == "interleaved" and microbatches > stages:
        microbatches -= microbatches % stages
    forward, recompute, backward, begin, begin_back, end = seconds
    short = (0.0, 0.5, 1.0)[forward % 3]
    table = pipeline_table(schedule, stages=stages, microbatches=microbatches, chunks=chunks)
    last = stages * chunks - 1

    def duration(stage: int, task: Task) -> float:
        part = task.chunk * stages + stage
        layers = short if part == last else 1.0
        match task.op:
            case StageOp.FORWARD:
                return layers * forward / chunks + begin * (part == 0) + end * (part == last)
            case StageOp.BACKWARD:
                of_weights = backward / 2 if table.split else 0.0
                return layers * (recompute + backward - of_weights) / chunks + begin_back * (part == 0)
            case _:
                return backward / 2 / chunks

    slots = [max(duration(stage, task) for stage, task in enumerate(row) if task is not None) for row in table.slots]
    mesh = Mesh.from_layout(Slice.parse(f"v5e:1x1@{stages}"), "stage=dcn")
    choice = Choice(remat="block", microbatches=microbatches, schedule=schedule, chunks=chunks)
    strategies = Strategies(from_mesh(mesh), (choice,))
    tasks = {
        ("forward", "layers"): forward, ("recompute", "layers"): recompute, ("backward", "layers"): backward,
        ("forward", "first"): begin, ("backward", "first"): begin_back, ("forward", "last"): end,
    }  # fmt: skip
    step = {owner: microbatches * np.float64(seconds) for owner, seconds in tasks.items()}
    assert lockstep_s(step, strategies, short) == pytest.approx(sum(slots))


@pytest.mark.parametrize("schedule", [schedule for schedule in SCHEDULES if schedule != "interleaved"])
@given(stages=st.integers(1, 6), microbatches=st.integers(1, 9))
def test_any_number_of_microbatches_has_a_table(schedule: str, stages: int, microbatches: int) -> None:
    table = pipeline_table(schedule, stages=stages, microbatches=microbatches)
    assert len(table.order(0)) == microbatches * (3 if schedule == "zero_bubble" else 2)
    assert table.in_flight(0) <= most_in_flight(schedule, stages=stages, microbatches=microbatches)


def test_the_plan_prices_the_same_schedules() -> None:
    """Its idle share and what it holds are the closed forms with dX and dW as long as forward."""
    assert set(IDLE_SHARES) == set(SCHEDULES)
    for schedule, share in IDLE_SHARES.items():
        chunks = 2 if schedule == "interleaved" else 1
        size = {"stages": 4, "microbatches": 8, "chunks": chunks}
        assert idle_over_busy(schedule, **size) == pytest.approx(share * 3 / (8 * chunks))


def tampered(table: PipelineTable, slot: int, stage: int, task: Task | None) -> tuple[tuple[Task | None, ...], ...]:
    rows = [list(row) for row in table.slots]
    rows[slot][stage] = task
    return tuple(map(tuple, rows))


def test_wrong_tables_are_refused() -> None:
    table = pipeline_table("zero_bubble", stages=2, microbatches=2)
    forward = Task(StageOp.FORWARD, 0)
    with pytest.raises(RooftopError, match="after forward of microbatch 0 by chunk 0 of stage 0"):
        replace(table, slots=tampered(table, 0, 1, forward))
    with pytest.raises(RooftopError, match="in two slots"):
        replace(table, slots=(*table.slots, (forward, None)))
    with pytest.raises(RooftopError, match="every task"):
        replace(table, slots=table.slots[:-1])
    with pytest.raises(RooftopError, match="every task"):
        replace(table, slots=(*table.slots, (Task(StageOp.FORWARD, 2), None)))
    with pytest.raises(RooftopError, match="one for each of 2"):
        replace(table, slots=(*table.slots, (None,)))


@pytest.mark.parametrize(
    ("schedule", "stages", "microbatches", "chunks", "field"),
    [
        ("1f2b", 4, 8, 1, "schedule"),
        ("gpipe", 0, 8, 1, "stages"),
        ("gpipe", 4, 0, 1, "microbatches"),
        ("1f1b", 4, 8, 2, "chunks"),
        ("interleaved", 4, 8, 1, "chunks"),
        ("interleaved", 4, 6, 2, "microbatches"),
    ],
)
def test_what_has_no_table_is_refused(schedule: str, stages: int, microbatches: int, chunks: int, field: str) -> None:
    with pytest.raises(RooftopError) as refused:
        pipeline_table(schedule, stages=stages, microbatches=microbatches, chunks=chunks)
    assert refused.value.field == field


def test_wrong_durations_are_refused() -> None:
    with pytest.raises(RooftopError, match="not negative"):
        Durations(send=-1.0)
    with pytest.raises(RooftopError, match="4 stages"):
        run(pipeline_table("gpipe", stages=4, microbatches=1), Durations(forward=np.ones(3)))


@pytest.mark.parametrize(("schedule", "chunks"), KINDS)
def test_nothing_is_overwritten_before_it_is_read(schedule: str, chunks: int) -> None:
    """Run the trips on buffers of names, in the program's order: every task reads what was made for it."""
    table = pipeline_table(schedule, stages=4, microbatches=8, chunks=chunks)
    trips = trip_table(table)
    nowhere, parts = trips.sizes, table.stages * chunks
    buffers = [{kind: dict[int, tuple[int, int]]() for kind in StageBuffer} for _ in range(table.stages)]
    # Gradients that neighbours send at the end of a trip arrive in the next one.
    late: list[tuple[int, tuple[int, int]]] = []
    order = list[tuple[int, Task]]()
    for trip in range(len(trips.done)):
        early = list[tuple[int, tuple[int, int]]]()
        arriving, late = late, []
        for at, op in enumerate(TRIP_OPS):
            for stage in np.flatnonzero(trips.done[trip, :, at]).tolist():
                key = int(trips.microbatch[trip, stage, at]), int(trips.chunk[trip, stage, at])
                order.append((stage, Task(op, *key)))
                part = key[1] * table.stages + stage
                used = dict(zip(StageBuffer, trips.used[trip, stage, at].tolist(), strict=True))
                reads, writes = {
                    StageOp.FORWARD: ([StageBuffer.INPUT] * (part > 0), [StageBuffer.SAVED]),
                    StageOp.BACKWARD: ([StageBuffer.GRADIENT, StageBuffer.SAVED], [StageBuffer.SPLIT] * table.split),
                    StageOp.WEIGHTS: ([StageBuffer.SPLIT], []),
                }[op]
                assert all(buffers[stage][kind][used[kind]] == key for kind in reads)
                if op == StageOp.FORWARD and part + 1 == parts:
                    writes.append(StageBuffer.GRADIENT)
                # The program writes a gradient, of the loss or zeros, wherever a forward task has a place for one.
                writes_gradient = op == StageOp.FORWARD and used[StageBuffer.GRADIENT] < nowhere[StageBuffer.GRADIENT]
                assert writes_gradient == (StageBuffer.GRADIENT in writes)
                for kind in writes:
                    assert used[kind] < nowhere[kind]
                    buffers[stage][kind][used[kind]] = key
                if op != StageOp.WEIGHTS and 0 <= (to := part + (1 if op == StageOp.FORWARD else -1)) < parts:
                    (early if op == StageOp.FORWARD else late).append((to % table.stages, (key[0], to // table.stages)))
            if op == StageOp.FORWARD:
                for stage, key in arriving:
                    buffers[stage][StageBuffer.GRADIENT][int(trips.arriving[trip, stage, StageBuffer.GRADIENT])] = key
                assert (trips.arriving[trip, :, StageBuffer.GRADIENT] < nowhere[StageBuffer.GRADIENT]).sum() == len(
                    arriving
                )
        for stage, key in early:
            buffers[stage][StageBuffer.INPUT][int(trips.arriving[trip, stage, StageBuffer.INPUT])] = key
        assert (trips.arriving[trip, :, StageBuffer.INPUT] < nowhere[StageBuffer.INPUT]).sum() == len(early)
    assert all([task for at, task in order if at == stage] == table.order(stage) for stage in range(table.stages))
    assert trips.sizes[StageBuffer.SAVED] == max(round(table.in_flight(s) * chunks) for s in range(4)) or table.split


@pytest.mark.parametrize("microbatches", [2, 8])
def test_trips_in_which_stages_wait_add_up_to_lockstep(microbatches: int) -> None:
    """Of eager 1F1B, by hand: 4 stages, the last of which has half of the layers."""
    table = pipeline_table("eager_1f1b", stages=4, microbatches=microbatches)
    waited = waited_trips(table, last_chunk=Fraction(1, 2), loss_longer=True)
    # Forward slots with the last stage in them last as long as its half of the layers and the loss.
    assert waited[TripTask.FINISH] == microbatches
    assert waited[TripTask.FORWARD] == 3 + Fraction(microbatches, 2)
    assert waited[TripTask.BEGIN] == min(3, microbatches)
    # In the first backward slot the last stage is alone.
    assert waited[TripTask.BACKWARD] == microbatches + 3 - Fraction(1, 2)
    assert waited[TripTask.BEGIN_BACKWARD] == microbatches
    layers = waited_trips(table, last_chunk=Fraction(1, 2), loss_longer=False)
    # Only in the last forward slot are no other stages.
    assert layers[TripTask.FORWARD] == microbatches + 3 - Fraction(1, 2)
    assert layers[TripTask.FINISH] == 1
