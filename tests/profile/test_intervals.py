"""Sets of moments against the moments themselves."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rooftop.profile.intervals import Intervals, shares

PAIRS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8)), max_size=12)
Pairs = list[tuple[int, int]]


def intervals(pairs: Pairs) -> Intervals:
    return Intervals.union([start for start, _ in pairs], [start + size for start, size in pairs])


def moments(pairs: Pairs) -> set[int]:
    return {at for start, size in pairs for at in range(start, start + size)}


def of(union: Intervals) -> set[int]:
    return {
        at for start, end in zip(union.starts.tolist(), union.ends.tolist(), strict=True) for at in range(start, end)
    }


@given(PAIRS, PAIRS)
def test_unions_differences_and_intersections_are_those_of_the_moments(one: Pairs, other: Pairs) -> None:
    first, second = intervals(one), intervals(other)
    assert of(first) == moments(one)
    assert of(first | second) == moments(one) | moments(other)
    assert of(first - second) == moments(one) - moments(other)
    assert of(first & second) == moments(one) & moments(other)
    assert first.measure == len(moments(one))
    for result in (first, first | second, first - second):
        assert (result.starts < result.ends).all(), "none is empty"
        assert (result.ends[:-1] < result.starts[1:]).all(), "none touches the next"


@given(PAIRS, st.lists(st.integers(-3, 50), min_size=1))
def test_what_lies_before_a_moment(pairs: Pairs, at: list[int]) -> None:
    expected = [len([moment for moment in moments(pairs) if moment < one]) for one in at]
    assert intervals(pairs).until(at).tolist() == expected


@given(PAIRS.filter(bool), PAIRS)
def test_shares_add_up_to_what_any_of_them_covers_alone(pairs: Pairs, outside: Pairs) -> None:
    starts = np.array([start for start, _ in pairs], np.int64)
    ends = starts + np.array([size for _, size in pairs], np.int64)
    parts = shares(starts, ends, intervals(outside))
    covered = moments(pairs) - moments(outside)
    expected = [
        sum(1 / sum(at in range(low, low + size) for low, size in pairs) for at in moments([pair]) & covered)
        for pair in pairs
    ]
    assert parts.tolist() == pytest.approx(expected)
    assert parts.sum() == pytest.approx(len(covered))
