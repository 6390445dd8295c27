"""Pipeline schedules as tables: what each stage does in each time slot. No clock and no JAX.

A step passes M microbatches through S stages. Each stage has ``chunks`` v parts of the model: part c of stage s is part
c S + s of all, in the order in which a microbatch meets them. A stage does one task a slot:

- FORWARD of a microbatch through a chunk;
- BACKWARD, its way back. Where a table splits it, only the gradient of the chunk's input is made (dX, which the stage
  before waits for);
- WEIGHTS, the other half of a split one: gradients of weights (dW), for which nobody waits, so that they fill gaps.

A result that another stage needs is there in the next slot. ``slot_counts`` counts slots by the tasks that they
contain, which is all that the time of stages in lockstep depends on. What the slots last is the business of
``rooftop.plan.training.pricing`` and ``rooftop.simulate.pipeline``. Sources: chapter 5 of the book and the papers that
each schedule names.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from fractions import Fraction
from functools import lru_cache
from itertools import cycle
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from rooftop.core.errors import RooftopError, one_of
from rooftop.core.rounding import next_multiple


class StageOp(IntEnum):
    """Operation of a stage in a slot."""

    IDLE = 0
    FORWARD = 1
    BACKWARD = 2
    WEIGHTS = 3


class Task(NamedTuple):
    """One operation on one microbatch by one chunk of a stage. A tuple, since tables look thousands of them up."""

    op: StageOp
    microbatch: int
    chunk: int = 0


class ModelPart(IntEnum):
    """The part of the model that a task passes: the first one has the embedding, and the last one the loss."""

    INNER = 0
    FIRST = 1
    LAST = 2


#: Tasks of one slot that differ in length, over all stages.
SlotMix = frozenset[tuple[StageOp, ModelPart]]
#: A stage's tasks in the order in which it does them.
Order = Sequence[Task]
#: Names of pipeline schedules.
PipelineSchedule = Literal["eager_1f1b", "gpipe", "1f1b", "interleaved", "zero_bubble"]
#: The schedule of a plan that names none.
DEFAULT_SCHEDULE: PipelineSchedule = "eager_1f1b"


@dataclass(frozen=True, kw_only=True)
class PipelineTable:
    """Task of each stage in each slot: ``slots[t][s]`` is a task, or None for an idle stage.

    Raises RooftopError for a table in which a task is missing, done twice, or done before what it needs.
    """

    stages: int
    microbatches: int
    chunks: int = 1
    split: bool = False
    slots: tuple[tuple[Task | None, ...], ...]

    def __post_init__(self) -> None:
        done = dict[tuple[int, Task], int]()
        for slot, row in enumerate(self.slots):
            if len(row) != self.stages:
                raise RooftopError(f"pipeline table slot {slot}", f"{len(row)} tasks", f"one for each of {self.stages}")
            for stage, task in ((stage, task) for stage, task in enumerate(row) if task is not None):
                if (stage, task) in done:
                    raise RooftopError("pipeline table", f"{named(task, stage)} in two slots", "each task once")
                for need in self.needs(task, stage):
                    if done.get(need, slot) >= slot:
                        raise RooftopError(
                            "pipeline table",
                            f"{named(task, stage)} in slot {slot}",
                            f"it after {named(need[1], need[0])}",
                        )
                done[stage, task] = slot
        expected_tasks = {(stage, task) for stage in range(self.stages) for task in self.tasks()}
        if wrong := expected_tasks ^ set(done):
            stage, task = min(wrong)
            raise RooftopError(
                "pipeline table", f"{len(wrong)} tasks wrong, such as {named(task, stage)}", "every task, and no other"
            )

    def tasks(self) -> Iterator[Task]:
        """Every task of one stage, in no particular order."""
        ops = (
            (StageOp.FORWARD, StageOp.BACKWARD, StageOp.WEIGHTS) if self.split else (StageOp.FORWARD, StageOp.BACKWARD)
        )
        return (
            Task(op, microbatch, chunk)
            for microbatch in range(self.microbatches)
            for chunk in range(self.chunks)
            for op in ops
        )

    def needs(self, task: Task, stage: int) -> tuple[tuple[int, Task], ...]:
        """The (stage, task) pairs whose results ``task`` of ``stage`` reads."""
        return needs(task, stage, self.stages, self.chunks)

    def order(self, stage: int) -> list[Task]:
        """One stage's tasks, in the order of their slots."""
        return [task for row in self.slots if (task := row[stage]) is not None]

    def in_flight(self, stage: int) -> float:
        """The most microbatches whose activations ``stage`` holds at once; one chunk's are 1/v of a microbatch's.

        They are held from the forward task until the last of the backward tasks.
        """
        current, most, last = 0, 0, StageOp.WEIGHTS if self.split else StageOp.BACKWARD
        for task in self.order(stage):
            current += task.op == StageOp.FORWARD
            most = max(most, current)
            current -= task.op == last
        return most / self.chunks


@lru_cache(maxsize=1 << 14)
def needs(task: Task, stage: int, stages: int, chunks: int) -> tuple[tuple[int, Task], ...]:
    """The (stage, task) pairs whose results ``task`` of ``stage`` reads, in a pipeline of that many stages, chunks."""
    op, microbatch, chunk = task.op, task.microbatch, task.chunk
    if op == StageOp.WEIGHTS:
        return ((stage, Task(StageOp.BACKWARD, microbatch, chunk)),)
    part = chunk * stages + stage
    other = part - 1 if op == StageOp.FORWARD else part + 1
    producers = ((other % stages, Task(op, microbatch, other // stages)),) if 0 <= other < stages * chunks else ()
    return producers if op == StageOp.FORWARD else (*producers, (stage, Task(StageOp.FORWARD, microbatch, chunk)))


def named(task: Task, stage: int) -> str:
    """A task in words, for messages."""
    return f"{task.op.name.lower()} of microbatch {task.microbatch} by chunk {task.chunk} of stage {stage}"


def pipeline_table(schedule: str, *, stages: int, microbatches: int, chunks: int = 1) -> PipelineTable:
    """The table of a schedule: one of ``SCHEDULES``, of which 'interleaved' has 2 or more ``chunks``.

    Every stage does its tasks in the schedule's order, each in the first slot in which it can. Slots of 'eager_1f1b'
    are of forward tasks and of backward tasks in turn; 'zero_bubble' splits backward tasks.

    Raises RooftopError for an unknown schedule, for sizes that are not positive, for chunks in a schedule that has
    none, for an interleaved one without, and where its last group of microbatches would be smaller than the others:
    stages would wait for one another.
    """
    name_ = require_schedule(schedule, chunks)
    for name, value in (("stages", stages), ("microbatches", microbatches)):
        if value < 1:
            raise RooftopError(name, value, "a positive whole number")
    if schedule == "interleaved" and microbatches > stages and microbatches % stages:
        raise RooftopError("microbatches", microbatches, f"a multiple of the {stages} stages that are interleaved")
    split = schedule == "zero_bubble"
    slots = _slots(name_, stages, microbatches, chunks)
    return PipelineTable(stages=stages, microbatches=microbatches, chunks=chunks, split=split, slots=slots)


def _slots(schedule: PipelineSchedule, stages: int, microbatches: int, chunks: int) -> _Slots:
    orders = [SCHEDULES[schedule](stage, stages, microbatches, chunks) for stage in range(stages)]
    return _placed(orders, stages, chunks, turns=_IN_TURN if schedule == "eager_1f1b" else _ANY)


@dataclass(frozen=True, kw_only=True)
class SlotCounts:
    """The trips of a schedule's table (``TripTable``), and the numbers of its slots by the tasks that may be longest.

    Tasks of the first part are at least as long as those of inner ones, and those of the last part have no more layers:
    of a slot the mix has no task that another of the same kind is sure to outlast.
    """

    trips: int
    mixes: Mapping[SlotMix, int]


@lru_cache(maxsize=1 << 12)
def slot_counts(schedule: PipelineSchedule, stages: int, microbatches: int, chunks: int = 1) -> SlotCounts:
    """The counts of a schedule's table, which need not be made."""
    if schedule in ("eager_1f1b", "gpipe"):
        waves = microbatches + stages - 1
        trips = waves + stages - 1 if schedule == "eager_1f1b" else 2 * waves - 1
        return SlotCounts(trips=trips, mixes=Counter(_waves(stages, microbatches)))
    if schedule == "interleaved" and microbatches > stages:
        # Other numbers have no table.
        microbatches = next_multiple(microbatches, stages)
    # Beyond the pipeline's ends, slots repeat with each microbatch, or each group of them.
    period = stages if schedule == "interleaved" else 1
    whole = 2 * stages
    if microbatches > whole + period:
        near = whole + (microbatches - whole) % period
        fewer, more = (slot_counts(schedule, stages, count, chunks) for count in (near, near + period))
        times = (microbatches - near) // period
        mixes = {
            mix: count for mix in {**fewer.mixes, **more.mixes}
            if (count := (1 - times) * fewer.mixes.get(mix, 0) + times * more.mixes.get(mix, 0))
        }  # fmt: skip
        return SlotCounts(trips=fewer.trips + times * (more.trips - fewer.trips), mixes=mixes)
    slots = _slots(schedule, stages, microbatches, chunks)
    return SlotCounts(trips=_trips(slots)[-1] + 1, mixes=_mixes(slots, chunks))


def trip_count(schedule: PipelineSchedule, stages: int, microbatches: int, chunks: int = 1) -> int:
    """The trips of ``slot_counts``: those of the usual numbers of microbatches need no table."""
    if schedule == "1f1b" and stages > 1:
        return 2 * (microbatches + stages) - 3
    if schedule == "interleaved" and microbatches >= stages > 1 and microbatches + stages > 4:
        return 2 * (next_multiple(microbatches, stages) * chunks + stages - 1)
    return slot_counts(schedule, stages, microbatches, chunks).trips


def least_trip_count(schedule: PipelineSchedule, stages: int, microbatches: int, chunks: int = 1) -> int:
    """At most ``trip_count``, and never of a table: each stage does a task for each microbatch and chunk."""
    if schedule == "zero_bubble" or (schedule == "interleaved" and microbatches < max(stages, 3)):
        return microbatches * chunks
    return trip_count(schedule, stages, microbatches, chunks)


def least_slot_counts(schedule: PipelineSchedule, stages: int, microbatches: int, chunks: int = 1) -> SlotCounts:
    """Counts with which a step takes no longer than with those of the schedule's table, and which need no table.

    The stage before the last one begins after a task of each stage before it, then does tasks of every microbatch and
    chunk, all of inner length; and where weights' gradients do not fill the end, one of each stage before it follows.
    Of two stages it is the last one that begins later, whose last chunk has the end of the model.
    """
    if schedule in ("eager_1f1b", "gpipe"):
        return slot_counts(schedule, stages, microbatches, chunks)
    tasks, split = microbatches * chunks, schedule == "zero_bubble"
    ends, before = (0, stages - 2) if stages > 2 else (microbatches, 1)
    after = 0 if split else before
    mixes = {
        frozenset({(StageOp.FORWARD, ModelPart.INNER)}): tasks - ends + before,
        frozenset({(StageOp.FORWARD, ModelPart.LAST)}): ends,
        frozenset({(StageOp.BACKWARD, ModelPart.INNER)}): tasks - ends + after,
        frozenset({(StageOp.BACKWARD, ModelPart.LAST)}): ends,
    }
    if split and stages > 2:
        mixes[frozenset({(StageOp.WEIGHTS, ModelPart.INNER)})] = tasks
    trips = least_trip_count(schedule, stages, microbatches, chunks)
    return SlotCounts(trips=trips, mixes=mixes if stages > 1 else {})


def _waves(stages: int, microbatches: int) -> Iterator[SlotMix]:
    """The mixes of slots in which all stages go forward, or all back, as microbatches come in and leave one by one."""
    for op in (StageOp.FORWARD, StageOp.BACKWARD):
        for wave in range(microbatches + stages - 1):
            begin, end = max(0, wave - microbatches + 1), min(stages - 1, wave)
            if op == StageOp.BACKWARD:
                begin, end = stages - 1 - end, stages - 1 - begin
            # The first and the last stage at work, and any between them.
            yield _mix((op, _part(stage, stages - 1)) for stage in {begin, (begin + end + 1) // 2, end})


def _mixes(slots: _Slots, chunks: int) -> Mapping[SlotMix, int]:
    """The numbers of slots by mix."""
    stages = len(slots[0])
    last = stages * chunks - 1
    return Counter(
        _mix((task.op, _part(task.chunk * stages + stage, last)) for stage, task in enumerate(row) if task is not None)
        for row in slots
    )


def _part(index: int, last: int) -> ModelPart:
    return ModelPart.FIRST if index == 0 else ModelPart.LAST if index == last else ModelPart.INNER


def _mix(tasks: Iterable[tuple[StageOp, ModelPart]]) -> SlotMix:
    # No part has weights of its own in a split backward pass.
    present = {(op, ModelPart.INNER if op == StageOp.WEIGHTS else part) for op, part in tasks}
    for op in (StageOp.FORWARD, StageOp.BACKWARD):
        if (op, ModelPart.FIRST) in present:
            present.discard((op, ModelPart.INNER))
        # The loss and its gradient belong to the last part's forward task.
        if op != StageOp.FORWARD and {(op, ModelPart.FIRST), (op, ModelPart.INNER)} & present:
            present.discard((op, ModelPart.LAST))
    return frozenset(present)


def require_schedule(schedule: str, chunks: int) -> PipelineSchedule:
    """Return the schedule of that name.

    Raises RooftopError for an unknown one, and for a number of chunks per stage that it does not have.
    """
    name = one_of("schedule", schedule, SCHEDULES)
    if chunks < 1 or (chunks > 1) != (name == "interleaved"):
        raise RooftopError("chunks", chunks, "2 or more with the interleaved schedule, 1 with any other")
    return name


_Slots = tuple[tuple[Task | None, ...], ...]
#: The kinds of tasks in slots, turn by turn.
_Turns = Sequence[frozenset[StageOp]]
_ANY: _Turns = (frozenset(StageOp),)
_IN_TURN: _Turns = (frozenset({StageOp.FORWARD}), frozenset({StageOp.BACKWARD}))


def _placed(orders: Sequence[Order], stages: int, chunks: int, *, turns: _Turns = _ANY) -> _Slots:
    """Each stage's tasks in order, each in the first slot of its turn that comes after those of all that it needs."""
    done, after = set[tuple[int, Task]](), [0] * stages
    slots = list[tuple[Task | None, ...]]()
    waits = [[needs(task, stage, stages, chunks) for task in order] for stage, order in enumerate(orders)]
    empty = 0
    for turn in cycle(turns):
        if all(at == len(order) for at, order in zip(after, orders, strict=True)):
            break
        row = list[Task | None]()
        for stage, order in enumerate(orders):
            at = after[stage]
            ready = at < len(order) and order[at].op in turn and done.issuperset(waits[stage][at])
            row.append(order[at] if ready else None)
        if not any(row):
            empty += 1
            if empty == len(turns):
                raise RooftopError("pipeline orders", orders, "orders in which no stage waits for ever")
            continue
        empty = 0
        slots.append(tuple(row))
        for stage, task in ((stage, task) for stage, task in enumerate(row) if task is not None):
            done.add((stage, task))
            after[stage] += 1
    return tuple(slots)


def _gpipe(stage: int, stages: int, microbatches: int, chunks: int) -> Order:
    """All forward passes, then all backward passes (Huang et al. 2019)."""
    return [Task(op, microbatch) for op in (StageOp.FORWARD, StageOp.BACKWARD) for microbatch in range(microbatches)]


def _one_f_one_b(stage: int, stages: int, microbatches: int, chunks: int) -> Order:
    """As many forward passes as there are stages from here on, then one backward for one forward (PipeDream-Flush)."""
    forward, backward = (
        [Task(op, microbatch) for microbatch in range(microbatches)] for op in (StageOp.FORWARD, StageOp.BACKWARD)
    )
    return _alternating(forward, backward, first=stages - stage)


def _eager_one_f_one_b(stage: int, stages: int, microbatches: int, chunks: int) -> Order:
    """1F1B with nearly twice the microbatches in flight (Zhuang et al. 2022, section 4).

    A result then has two slots to reach its reader, and no stage does a forward task while another does a backward one:
    stages that wait for one another in every slot take no longer than at their own pace.
    """
    forward, backward = (
        [Task(op, microbatch) for microbatch in range(microbatches)] for op in (StageOp.FORWARD, StageOp.BACKWARD)
    )
    return _alternating(forward, backward, first=2 * (stages - stage) - 1)


def _interleaved(stage: int, stages: int, microbatches: int, chunks: int) -> Order:
    """1F1B over groups of S microbatches, each group through all chunks before the next (Narayanan et al. 2021)."""
    groups = [range(at, min(at + stages, microbatches)) for at in range(0, microbatches, stages)]
    forward = [
        Task(StageOp.FORWARD, microbatch, chunk) for group in groups for chunk in range(chunks) for microbatch in group
    ]
    backward = [
        Task(StageOp.BACKWARD, microbatch, chunk)
        for group in groups
        for chunk in reversed(range(chunks))
        for microbatch in group
    ]
    return _alternating(forward, backward, first=2 * (stages - stage - 1) + (chunks - 1) * stages + 1)


def _zero_bubble(stage: int, stages: int, microbatches: int, chunks: int) -> Order:
    """ZB-H1 (Qi et al. 2023, section 2): 1F1B in which dW waits, without more activations than 1F1B's first stage has.

    Those are S. A stage needs only S - s of them to keep busy, and so may be s microbatches behind with its dW: it
    catches up where it would wait for gradients at the end. Their ZB-H2 holds twice the activations so as to begin the
    next step early on the first stages; within one step it ends no sooner, and is not here.
    """
    forward, backward = (
        [Task(op, microbatch) for microbatch in range(microbatches)] for op in (StageOp.FORWARD, StageOp.BACKWARD)
    )
    order, behind = list[Task](), list[Task]()
    for task in _alternating(forward, backward, first=stages - stage):
        order.append(task)
        if task.op == StageOp.BACKWARD:
            behind.append(Task(StageOp.WEIGHTS, task.microbatch))
            if len(behind) > stage:
                order.append(behind.pop(0))
    return [*order, *behind]


def _alternating(forward: Order, backward: Order, *, first: int) -> list[Task]:
    """``first`` forward tasks, then a backward and a forward in turn, then the backward tasks that are left."""
    order = list(forward[:first])
    for at, task in enumerate(backward):
        order += [task, *forward[first + at : first + at + 1]]
    return order


#: From the names of schedules to the order of one stage's tasks: (stage, stages, microbatches, chunks) -> tasks.
SCHEDULES: Mapping[PipelineSchedule, Callable[[int, int, int, int], Order]] = {
    "eager_1f1b": _eager_one_f_one_b,
    "gpipe": _gpipe,
    "1f1b": _one_f_one_b,
    "interleaved": _interleaved,
    "zero_bubble": _zero_bubble,
}


class StageBuffer(IntEnum):
    """Buffers of a stage: received inputs and gradients, values saved for backward, values that dX saves for dW."""

    INPUT = 0
    GRADIENT = 1
    SAVED = 2
    SPLIT = 3


#: Tasks of a stage in the order in which a trip does them.
TRIP_OPS = (StageOp.FORWARD, StageOp.BACKWARD, StageOp.WEIGHTS)


@dataclass(frozen=True, kw_only=True)
class TripTable:
    """A table for a program to run in trips of a loop; arrays are int32, [trips, S, ops, ...], ops as ``TRIP_OPS``.

    A trip is one slot, or one of forward tasks and the next one without any. ``done`` is 1 for a task that a stage has
    in a trip, of ``microbatch`` and ``chunk``; ``used`` [..., buffers] is the place in each buffer that it reads or
    writes. ``arriving`` [trips, S, 2] are the places of what comes from other stages: an input, at the end of the trip
    in which it is made, and a gradient, between the forward and the backward tasks of the next one. ``sizes`` are the
    places in each buffer; the number that follows the last place of these two stands for nowhere.
    """

    done: npt.NDArray[np.int32]
    microbatch: npt.NDArray[np.int32]
    chunk: npt.NDArray[np.int32]
    used: npt.NDArray[np.int32]
    arriving: npt.NDArray[np.int32]
    sizes: tuple[int, ...]


def trip_table(table: PipelineTable) -> TripTable:
    """The trips of a table, with places for all that its tasks make, as few as the busiest stage needs."""
    at = {
        (stage, task): slot
        for slot, row in enumerate(table.slots)
        for stage, task in enumerate(row)
        if task is not None
    }
    assigned = {
        buffer: [_assigned(_lives(table, at, stage, buffer)) for stage in range(table.stages)] for buffer in StageBuffer
    }
    sizes = tuple(
        1 + max((place for by_stage in assigned[buffer] for place in by_stage.values()), default=-1)
        for buffer in assigned
    )
    trip_of = _trips(table.slots)
    shape = trip_of[-1] + 1, table.stages, len(TRIP_OPS)
    done, microbatch, chunk = (np.zeros(shape, np.int32) for _ in range(3))
    # Without a task, values that are saved are written back to where they are.
    nowhere = [sizes[buffer] if buffer < StageBuffer.SAVED else 0 for buffer in StageBuffer]
    used = np.broadcast_to(np.array(nowhere, np.int32), (*shape, len(StageBuffer))).copy()
    arriving = used[:, :, 0, : StageBuffer.SAVED].copy()
    for (stage, task), slot in at.items():
        place = trip_of[slot], stage, TRIP_OPS.index(task.op)
        done[place], microbatch[place], chunk[place] = 1, task.microbatch, task.chunk
        ends = task.chunk * table.stages + stage == table.stages * table.chunks - 1
        for buffer in StageBuffer:
            # A forward task has a place for a gradient if it makes that with the loss.
            if task.op == StageOp.FORWARD and buffer == StageBuffer.GRADIENT and not ends:
                continue
            if (index := assigned[buffer][stage].get((task.microbatch, task.chunk))) is not None:
                used[(*place, buffer)] = index
        for maker, producer in table.needs(task, stage):
            if producer.op == task.op:
                forward = task.op == StageOp.FORWARD
                buffer = StageBuffer.INPUT if forward else StageBuffer.GRADIENT
                arriving[trip_of[at[maker, producer]] + (not forward), stage, buffer] = used[(*place, buffer)]
    return TripTable(done=done, microbatch=microbatch, chunk=chunk, used=used, arriving=arriving, sizes=sizes)


def _trips(slots: _Slots) -> list[int]:
    """The trip of each slot."""
    trips, alone = list[int](), True
    for row in slots:
        ops = {task.op for task in row if task is not None}
        joins = not alone and StageOp.FORWARD not in ops
        trips.append((trips[-1] if trips else -1) + (not joins))
        alone = joins or ops != {StageOp.FORWARD}
    return trips


class TripTask(IntEnum):
    """Tasks of a trip as a program does them: those of the first and of the last part of the model stand apart."""

    BEGIN = 0
    FORWARD = 1
    FINISH = 2
    BACKWARD = 3
    BEGIN_BACKWARD = 4
    WEIGHTS = 5


def waited_trips(table: PipelineTable, *, last_chunk: Fraction, loss_longer: bool) -> dict[TripTask, Fraction]:
    """The number of trips in which all stages wait for a task of each kind; all of it together is a step in lockstep.

    Backward tasks are taken to outlast forward ones, with or without the loss, and these those of weights alone.
    ``last_chunk`` is the share of a chunk's layers that the last part of the model has; ``loss_longer``: loss and its
    gradient last longer than the layers that it lacks.
    """
    trips = dict.fromkeys(TripTask, Fraction(0))
    for mix, count in _mixes(table.slots, table.chunks).items():
        forward, backward = ({part for of, part in mix if of == op} for op in (StageOp.FORWARD, StageOp.BACKWARD))
        if backward:
            trips[TripTask.BACKWARD] += count * (last_chunk if backward == {ModelPart.LAST} else 1)
            trips[TripTask.BEGIN_BACKWARD] += count * (ModelPart.FIRST in backward)
        elif forward:
            loss = ModelPart.LAST in forward and (loss_longer or len(forward) == 1)
            trips[TripTask.FORWARD] += count * (last_chunk if loss else 1)
            trips[TripTask.FINISH] += count * loss
            trips[TripTask.BEGIN] += count * (ModelPart.FIRST in forward and not loss)
        else:
            trips[TripTask.WEIGHTS] += count
    return trips


#: A microbatch and a chunk, with the slots in which what they need is made and read.
_Life = tuple[tuple[int, int], int, int]


def _lives(table: PipelineTable, at: dict[tuple[int, Task], int], stage: int, buffer: StageBuffer) -> Iterable[_Life]:
    reader = {StageBuffer.INPUT: StageOp.FORWARD, StageBuffer.SPLIT: StageOp.WEIGHTS}.get(buffer, StageOp.BACKWARD)
    for task in table.order(stage):
        if task.op == reader:
            forward, backward = (task._replace(op=op) for op in (StageOp.FORWARD, StageOp.BACKWARD))
            # An input and a gradient come from another stage, but the last part of the model makes its gradient
            # itself, with the loss, in its forward task.
            producers = [need for need in table.needs(task, stage) if need[1].op == task.op]
            if buffer == StageBuffer.SPLIT:
                producers = [(stage, backward)]
            elif buffer == StageBuffer.SAVED or (buffer == StageBuffer.GRADIENT and not producers):
                producers = [(stage, forward)]
            if producers:
                yield (task.microbatch, task.chunk), at[producers[0]], at[stage, task]


def _assigned(lives: Iterable[_Life]) -> dict[tuple[int, int], int]:
    """The lowest free place for each life in turn. A place is free again in the slot in which its value is read."""
    slots, free, busy = dict[tuple[int, int], int](), list[int](), list[tuple[int, int]]()
    for key, written, read in sorted(lives, key=lambda life: life[1:]):
        while busy and busy[0][0] <= written:
            heapq.heappush(free, heapq.heappop(busy)[1])
        place = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (read, place))
        slots[key] = place
    return slots
