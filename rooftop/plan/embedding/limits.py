"""Limits that a plan proposes: shares of those given, and those of one of several passes over samples.

A batch in N passes is looked up and updated N times, each time by an N-th of every SparseCore's samples (the SparseCore
deep dive, section 14). Limits are those of one pass; tables, activations and buffers stay as large as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

from rooftop.core.rounding import next_multiple
from rooftop.models.embedding_tables.limits import BUCKETS, Limits, StackLimits, full_buffer
from rooftop.models.embedding_tables.stacking import ALIGNMENT

#: One limit is so many times the one below on the ladder.
_RUNG = 1.25
#: Standard deviations that the fullest of many passes may lie above their mean.
_DEVIATIONS = 6

Answer = TypeVar("Answer")


def rung(value: float) -> int:
    """The first rung of the ladder of limits that is not below ``value``: multiples of 8, about a quarter apart."""
    limit = ALIGNMENT
    while limit < value:
        limit = next_multiple(math.ceil(limit * _RUNG), ALIGNMENT)
    return limit


def limits_in_passes(limits: StackLimits, passes: int, cores: int, *, before: int = 1) -> StackLimits:
    """``limits`` of one of ``before`` passes as those of one of more ``passes``, if samples are in no special order.

    Each id of a partition is then in a pass with probability before / passes: the fullest has its mean and 6 standard
    deviations. Different ids may all be in each pass. ``cores`` are all SparseCores; their partitions are padded in
    each pass. What a pass of real data needs is observed (``rooftop embed stats --sample-passes``).
    """
    part = before / passes
    mean = limits.max_ids * part
    ids = min(limits.max_ids, rung(mean + _DEVIATIONS * math.sqrt(mean * (1 - part))))
    buffer = rung(limits.buffer + ALIGNMENT * cores * passes)
    return StackLimits(
        max_ids=ids,
        max_unique_ids=min(limits.max_unique_ids, ids),
        buffer=min(buffer, full_buffer(ids, cores * passes)),
    )


def in_fewest_passes(
    before: int, samples: int, in_passes: Callable[[int], Answer], fits: Callable[[Answer], bool]
) -> Answer | None:
    """The first of ``in_passes(before + 1)`` and so on that ``fits``: at most a pass for each of ``samples``."""
    for passes in range(before + 1, min(BUCKETS, samples) + 1):
        answer = in_passes(passes)
        if fits(answer):
            return answer
    return None


def share_that(fits: Callable[[float], bool]) -> float:
    """The largest share of 1 that ``fits``, to a thousandth; 0 if none is found to."""
    low, high = 0.0, 1.0
    while high - low > 1e-3 * high and high > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def limits_of_stacks_text(limits: Limits) -> str:
    """Limits of several stacks as text."""
    return "; ".join(f"{name} {limits_text(own)}" for name, own in limits.items())


def limits_text(limits: StackLimits) -> str:
    """Limits as text."""
    return f"max_unique_ids {limits.max_unique_ids} with max_ids {limits.max_ids}"
