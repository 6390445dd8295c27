"""Sets of moments as sorted, disjoint intervals: unions, differences, and the part of a set before a moment.

Times that overlap are never added up: the time in which anything of a kind runs is the measure of a union. Moments are
integers (picoseconds in traces), so that measures are exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Intervals:
    """Half-open intervals [start, end), sorted, without overlap, none empty and no two touching. [N] each."""

    starts: Ints
    ends: Ints

    @classmethod
    def union(cls, starts: npt.ArrayLike, ends: npt.ArrayLike) -> Intervals:
        """The union of any intervals; those that end where they start are empty."""
        begin, stop = np.asarray(starts, np.int64), np.asarray(ends, np.int64)
        nonempty = stop > begin
        begin, stop = begin[nonempty], stop[nonempty]
        order = np.argsort(begin, kind="stable")
        begin, stop = begin[order], np.maximum.accumulate(stop[order]) if len(stop) else stop
        first = np.ones(len(begin), bool)
        first[1:] = begin[1:] > stop[:-1]
        last = np.append(np.flatnonzero(first)[1:] - 1, len(begin) - 1) if len(begin) else np.zeros(0, np.int64)
        return cls(begin[first], stop[last])

    @classmethod
    def of(cls, start: int, end: int) -> Intervals:
        """One interval."""
        return cls.union([start], [end])

    @classmethod
    def none(cls) -> Intervals:
        """No moment."""
        return cls.union([], [])

    def __len__(self) -> int:
        return len(self.starts)

    def __or__(self, other: Intervals) -> Intervals:
        return Intervals.union(np.append(self.starts, other.starts), np.append(self.ends, other.ends))

    def __and__(self, other: Intervals) -> Intervals:
        return self - (self - other)

    def __sub__(self, other: Intervals) -> Intervals:
        if not len(self) or not len(other):
            return self
        # Intersect with the gaps of ``other`` within [low, high).
        low, high = int(self.starts[0]), int(self.ends[-1])
        gaps_start = np.append(low, other.ends)
        gaps_end = np.append(other.starts, max(high, int(other.ends[-1])))
        return self._cut(gaps_start, np.maximum(gaps_start, gaps_end))

    def _cut(self, starts: Ints, ends: Ints) -> Intervals:
        """The intersection with sorted, disjoint intervals, some of which may be empty."""
        first = np.searchsorted(ends, self.starts, side="right")
        last = np.searchsorted(starts, self.ends, side="left")
        counts = np.maximum(last - first, 0)
        mine = np.repeat(np.arange(len(self)), counts)
        theirs = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts) + first[mine]
        return Intervals.union(np.maximum(self.starts[mine], starts[theirs]), np.minimum(self.ends[mine], ends[theirs]))

    @property
    def measure(self) -> int:
        """Total duration of the intervals."""
        return int(np.sum(self.ends - self.starts))

    @cached_property
    def _before(self) -> Ints:
        """Duration of the set before each start."""
        return np.append(0, np.cumsum(self.ends - self.starts))

    def until(self, moments: npt.ArrayLike) -> Ints:
        """Duration of the set before each of the ``moments``; a difference of two is the duration between them."""
        at = np.asarray(moments, np.int64)
        index = np.searchsorted(self.starts, at, side="right")
        whole = self._before[index]
        if not len(self):
            return np.zeros_like(at)
        over = np.maximum(self.ends[np.maximum(index - 1, 0)] - at, 0)
        return whole - np.where(index > 0, over, 0)


def shares(starts: Ints, ends: Ints, outside: Intervals) -> Floats:
    """Share of each of many intervals in their union, without the part in ``outside``. [N].

    A moment at which several of them run is divided equally among them, so that the shares add up to the measure of the
    union: no moment is counted twice.
    """
    moments = np.concatenate([starts, ends])
    steps = np.concatenate([np.ones(len(starts), np.int64), -np.ones(len(ends), np.int64)])
    order = np.argsort(moments, kind="stable")
    at = moments[order]
    running = np.cumsum(steps[order])
    free = np.diff(at - outside.until(at))
    parts = np.append(0.0, np.cumsum(np.where(running[:-1] > 0, free / np.maximum(running[:-1], 1), 0.0)))
    share_before = np.empty(len(at))
    share_before[order] = parts
    return share_before[len(starts) :] - share_before[: len(starts)]
