"""A pipeline schedule against a clock: the time of a step, the wait of each stage, what it holds; and closed forms.

Every stage does its tasks in the order of its table, each as soon as it can: stages go at their own pace. Those of
rooftop's program wait for the longest task of each slot instead, which ``rooftop.plan.training.pricing`` prices.
Sources: chapter 5 of the book; Narayanan et al. 2021 (1F1B, interleaved); Qi et al. 2023 (zero bubble).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from rooftop.arrays.rules import STAGE_AXES
from rooftop.core.errors import RooftopError, unknown
from rooftop.core.ledger import Number
from rooftop.plan.documents import PipelineFigures
from rooftop.plan.pricing import scalar
from rooftop.plan.training.work.rows import training_ledger
from rooftop.scheduling.pipeline import SCHEDULES, PipelineTable, Task, pipeline_table

if TYPE_CHECKING:
    from rooftop.plan.training.plan import TrainingPlan

Floats = npt.NDArray[np.float64]
#: One figure for all stages, or one for each.
PerStage = float | Floats


@dataclass(frozen=True, kw_only=True)
class Durations:
    """Seconds that a stage needs for one microbatch: forward, dX and dW; a chunk takes its part of them.

    Scalars, or arrays [S] if stages differ. ``send`` is what a result is under way to another stage, which neither of
    the two is kept from working by. Raises RooftopError for a negative one.
    """

    forward: PerStage = 1.0
    input_gradient: PerStage = 1.0
    weight_gradient: PerStage = 1.0
    send: float = 0.0

    def __post_init__(self) -> None:
        for name in ("forward", "input_gradient", "weight_gradient", "send"):
            if np.any(np.asarray(getattr(self, name)) < 0):
                raise RooftopError(f"duration {name}", getattr(self, name), "seconds, not negative")

    def of(self, table: PipelineTable) -> Floats:
        """Seconds of each kind of task on each stage, [ops, S]; without a split BACKWARD is dX and dW together."""
        backward = np.asarray(self.input_gradient) + (0.0 if table.split else np.asarray(self.weight_gradient))
        kinds = (0.0, self.forward, backward, self.weight_gradient)
        try:
            return np.stack([np.broadcast_to(np.asarray(kind, float), table.stages) for kind in kinds]) / table.chunks
        except ValueError:
            raise RooftopError("durations", kinds[1:], f"scalars, or arrays of {table.stages} stages") from None


@dataclass(frozen=True, kw_only=True)
class PipelineTimeline:
    """When everything happened: ``spans[s]`` are a stage's tasks with their start and end, in seconds from the start.

    ``in_flight`` is the most microbatches whose activations each stage held at once, [S].
    """

    table: PipelineTable
    spans: tuple[tuple[tuple[Task, float, float], ...], ...]
    in_flight: Floats

    @property
    def makespan(self) -> float:
        """Seconds from the first start to the last end."""
        return max(end for stage in self.spans for _, _, end in stage)

    @property
    def busy(self) -> Floats:
        """Seconds that each stage worked, [S]."""
        return np.array([sum(end - start for _, start, end in stage) for stage in self.spans])

    @property
    def bubble(self) -> Floats:
        """Share of the makespan that each stage did not work, [S]."""
        return 1 - self.busy / self.makespan


def run(table: PipelineTable, durations: Durations) -> PipelineTimeline:
    """The step with every stage at its own pace."""
    seconds = durations.of(table)
    ends = dict[tuple[int, Task], float]()
    free = [0.0] * table.stages
    spans: list[list[tuple[Task, float, float]]] = [[] for _ in range(table.stages)]
    for row in table.slots:
        # Inputs of a task are in earlier slots of the table, so their times are known.
        for stage, task in ((stage, task) for stage, task in enumerate(row) if task is not None):
            arrived = (ends[need] + durations.send * (need[0] != stage) for need in table.needs(task, stage))
            start = max([free[stage], *arrived])
            end = start + float(seconds[task.op, stage])
            free[stage] = ends[stage, task] = end
            spans[stage].append((task, start, end))
    in_flight = np.array([table.in_flight(stage) for stage in range(table.stages)])
    return PipelineTimeline(table=table, spans=tuple(map(tuple, spans)), in_flight=in_flight)


def durations_of(plan: TrainingPlan) -> Durations:
    """Seconds of one microbatch on one stage, from the rows of a plan.

    Forward; dX with what is recomputed, and dW, half of the backward pass each.
    """
    seconds = dict.fromkeys(("forward", "backward", "recompute"), 0.0)
    for row in plan.ledger:
        if row.phase in seconds and row.scope != "pipeline":
            seconds[row.phase] += float(row.count * row.expected_s) / plan.choice.microbatches
    half = seconds["backward"] / 2
    return Durations(forward=seconds["forward"], input_gradient=half + seconds["recompute"], weight_gradient=half)


def of_plan(plan: TrainingPlan) -> PipelineFigures:
    """The figures of a plan's pipeline."""
    schedule, sizes = plan.choice.schedule, _sizes(plan)
    timeline, durations = plan_timeline(plan), durations_of(plan)
    return PipelineFigures(
        schedule=schedule,
        **sizes,
        bubble=float(timeline.bubble.max()),
        bubble_closed_form=float(bubble(schedule, durations=durations, **sizes)),
        in_flight=float(timeline.in_flight.max()),
        in_flight_closed_form=float(most_in_flight(schedule, **sizes)),
        passes_s=timeline.makespan,
        lockstep_s=lockstep_s(plan),
    )


def plan_timeline(plan: TrainingPlan) -> PipelineTimeline:
    """A plan's pipeline as its table runs, each stage at its own pace."""
    return run(pipeline_table(plan.choice.schedule, **_sizes(plan)), durations_of(plan))


def _sizes(plan: TrainingPlan) -> dict[str, int]:
    choice = plan.choice
    return {"stages": plan.mesh.size(*STAGE_AXES), "microbatches": choice.microbatches, "chunks": choice.chunks}


def lockstep_s(plan: TrainingPlan) -> float:
    """Seconds of a plan's passes if all stages pass from slot to slot together."""
    step = plan.step
    rows = training_ledger(replace(step, habits=replace(step.habits, lockstep=True)))
    return scalar(sum(row.count * row.expected_s for row in rows if row.phase != "update"))


def idle_over_busy(
    schedule: str, *, stages: Number, microbatches: Number, chunks: Number = 1, durations: Durations = Durations()
) -> Number:
    """Idle time of every stage over its busy time; stages are equal, sends take no time.

    GPipe and 1F1B wait S - 1 of M microbatches' work (eager 1F1B if forward is no longer than backward), and
    interleaved the v-th part of that (M a multiple of S). Zero bubble waits only for forward and dX, less the dW that
    fills the gap (Qi et al. 2023); for M >= S, and dW no longer than forward or dX.
    """
    if schedule not in SCHEDULES:
        raise unknown("schedule", schedule, SCHEDULES)
    waiting = (stages - 1) / (microbatches * chunks)
    if schedule != "zero_bubble":
        return waiting
    forward, dx, dw = durations.forward, durations.input_gradient, durations.weight_gradient
    return waiting * (forward + dx - dw) / (forward + dx + dw)


def bubble(
    schedule: str, *, stages: Number, microbatches: Number, chunks: Number = 1, durations: Durations = Durations()
) -> Number:
    """Share of a step that every stage is idle, in closed form; see ``idle_over_busy``."""
    ratio = idle_over_busy(schedule, stages=stages, microbatches=microbatches, chunks=chunks, durations=durations)
    return ratio / (1 + ratio)


def most_in_flight(schedule: str, *, stages: Number, microbatches: Number, chunks: Number = 1) -> Number:
    """The most microbatches whose activations a stage holds at once, in closed form: that of the first stage.

    GPipe holds all, 1F1B and zero bubble as many as there are stages, interleaved (S - 1)/v more, and eager 1F1B S - 1.
    """
    if schedule not in SCHEDULES:
        raise unknown("schedule", schedule, SCHEDULES)
    if schedule == "gpipe":
        return microbatches
    most = stages + (stages - 1) / chunks if schedule in ("interleaved", "eager_1f1b") else stages
    return np.minimum(microbatches, most)
