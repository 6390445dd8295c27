"""Where the stages of a pipeline keep what they will need: a place in a buffer from the slot that makes it to its use.

A program that runs a table has arrays of one shape on every stage, so each buffer has the places that the stage with
most needs. No clock and no JAX.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from rooftop.scheduling.pipeline import Op, Table, Task


class Buffer(IntEnum):
    """What is kept: inputs and output gradients that came, what forward keeps for backward, what a split one for dW."""

    INPUT = 0
    GRADIENT = 1
    SAVED = 2
    SPLIT = 3


@dataclass(frozen=True, kw_only=True)
class Places:
    """A table for a program to run; all arrays are int32, [slots, S] but for those of buffers, [slots, S, buffers].

    ``op``, ``microbatch`` and ``chunk`` of each task; ``used``, the place in each buffer that it reads or writes; and
    ``arriving``, the places of what has come from other stages (an input, a gradient) when the slot is over, [slots, S,
    2]. ``sizes`` are the places in each buffer; the number that follows the last place stands for nowhere.
    """

    op: npt.NDArray[np.int32]
    microbatch: npt.NDArray[np.int32]
    chunk: npt.NDArray[np.int32]
    used: npt.NDArray[np.int32]
    arriving: npt.NDArray[np.int32]
    sizes: tuple[int, ...]


def places(table: Table) -> Places:
    """The places of all that a table's tasks make, as few in each buffer as its busiest stage needs."""
    at = {
        (stage, task): slot
        for slot, row in enumerate(table.slots)
        for stage, task in enumerate(row)
        if task is not None
    }
    kept = {buffer: [_assigned(_lives(table, at, stage, buffer)) for stage in range(table.stages)] for buffer in Buffer}
    sizes = tuple(1 + max((place for found in kept[buffer] for place in found.values()), default=-1) for buffer in kept)
    shape = len(table.slots), table.stages
    op, microbatch, chunk = (np.zeros(shape, np.int32) for _ in range(3))
    used = np.broadcast_to(np.array(sizes, np.int32), (*shape, len(Buffer))).copy()
    arriving = used[..., : Buffer.SAVED].copy()
    for (stage, task), slot in at.items():
        op[slot, stage], microbatch[slot, stage], chunk[slot, stage] = task.op, task.microbatch, task.chunk
        for buffer in Buffer:
            if (place := kept[buffer][stage].get((task.microbatch, task.chunk))) is not None:
                used[slot, stage, buffer] = place
        # What a task of another stage has made for this one comes at the end of that task's slot.
        for maker, made in table.needs(task, stage):
            if made.op == task.op:
                buffer = Buffer.INPUT if task.op == Op.FORWARD else Buffer.GRADIENT
                arriving[at[maker, made], stage, buffer] = used[slot, stage, buffer]
    return Places(op=op, microbatch=microbatch, chunk=chunk, used=used, arriving=arriving, sizes=sizes)


#: A microbatch and a chunk, with the slots in which what they need is made and read.
_Life = tuple[tuple[int, int], int, int]


def _lives(table: Table, at: dict[tuple[int, Task], int], stage: int, buffer: Buffer) -> Iterable[_Life]:
    reader = {Buffer.INPUT: Op.FORWARD, Buffer.SPLIT: Op.WEIGHTS}.get(buffer, Op.BACKWARD)
    for task in table.order(stage):
        if task.op == reader:
            forward, backward = (task._replace(op=op) for op in (Op.FORWARD, Op.BACKWARD))
            # An input and a gradient come from another stage, but the last part of the model makes its gradient
            # itself, with the loss, in its forward task.
            made = [need for need in table.needs(task, stage) if need[1].op == task.op]
            if buffer == Buffer.SPLIT:
                made = [(stage, backward)]
            elif buffer == Buffer.SAVED or (buffer == Buffer.GRADIENT and not made):
                made = [(stage, forward)]
            if made:
                yield (task.microbatch, task.chunk), at[made[0]], at[stage, task]


def _assigned(lives: Iterable[_Life]) -> dict[tuple[int, int], int]:
    """The lowest free place for each life in turn; one that is read in a slot is free for what is made in it."""
    found, free, busy = dict[tuple[int, int], int](), list[int](), list[tuple[int, int]]()
    for key, made, read in sorted(lives, key=lambda life: life[1:]):
        while busy and busy[0][0] <= made:
            heapq.heappush(free, heapq.heappop(busy)[1])
        place = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (read, place))
        found[key] = place
    return found
