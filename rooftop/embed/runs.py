"""Runs of arrays joined, keys merged and sorted by digits: loops that SciPy compiles for its sparse matrices.

They leave the interpreter to other threads for all the time that they take: ``ndarray.repeat`` and masks do not. And
NumPy's own sort of whole numbers takes five times as long on some cores (AMD's with AVX-512) as on others. SciPy comes
with JAX; where it is not installed NumPy does all of it. The methods of its matrices check and allocate, for longer
than the loops take in a batch of few samples: so the loops are called themselves.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rooftop.embed.space import Space

#: Bits of a digit at most: its counts stay in a core's first caches.
_DIGIT = 14
#: Keys below which counting takes longer than NumPy's sort, however slow: a digit has thousands of counts.
_FEW = 3_000
#: Keys up to which the loops' 32 bits tell the place of each.
_MANY = (1 << 31) - 1
#: Keys that a sort is tried on.
_TRIED = 30_000


@cache
def _loops() -> Any:
    """SciPy's compiled loops, or None. What only plans imports this module too, and SciPy takes a while to import."""
    try:
        from scipy.sparse import _sparsetools
    except ImportError:
        return None
    return _sparsetools


def join(
    bounds: NDArray[np.int32],
    given: NDArray[np.int32],
    also: NDArray[Any],
    out: NDArray[np.int32],
    also_out: NDArray[Any],
) -> None:
    """What two arrays [N] hold between each pair of ``bounds`` [..., 2], run behind run, into ``out`` and ``also_out``.

    These are as long as the runs are together, which is not checked, and of the dtypes of the arrays.
    """
    bounds = bounds.reshape(-1)
    if (loops := _loops()) is not None:
        # A matrix of which every other row is taken.
        rows = np.arange(0, len(bounds), 2, dtype=np.int32)
        loops.csr_row_index(len(rows), rows, bounds, given, also, out, also_out)
        return
    lengths = bounds[1::2] - bounds[::2]
    ends = np.cumsum(lengths)
    where = np.arange(len(out)) + (bounds[1::2] - ends).repeat(lengths)
    given.take(where, out=out, mode="clip")
    also.take(where, out=also_out, mode="clip")


def merge(keys: NDArray[np.uint32], gains: NDArray[np.float32], ends: Sequence[int]) -> list[int]:
    """Equal keys that follow each other become one, in place, and their ``gains`` its gain; both [N].

    They do so up to each of ``ends`` by themselves. Tells where what is left of each ends.
    """
    if (loops := _loops()) is not None:
        bounds = np.array([0, *ends], np.int32)
        # Rows of a matrix; keys are its columns.
        loops.csr_sum_duplicates(len(ends), len(keys), bounds, keys.view(np.int32), gains)
        found: list[int] = bounds[1:].tolist()
        return found
    last = np.empty(len(keys), np.bool_)
    np.not_equal(keys[1:], keys[:-1], out=last[:-1])
    last[[end - 1 for end in ends if end]] = True
    where = last.nonzero()[0]
    sums = np.add.reduceat(gains, np.concatenate([[0], where[:-1] + 1]))
    keys[: len(where)], gains[: len(where)] = keys[where], sums
    found = np.searchsorted(where, ends).tolist()
    return found


def sort(keys: NDArray[np.uint32], low: int, used: int, space: Space) -> None:
    """Sort keys [N] of ``used`` bits in place; those equal but for their lowest ``low`` bits come in order."""
    if _loops() is not None and _FEW <= len(keys) <= _MANY and _digits_are_faster():
        _by_digits(keys, None, low, used, space)
    else:
        keys.sort()


def sort_pairs(keys: NDArray[np.uint32], values: NDArray[np.float32], low: int, used: int, space: Space) -> None:
    """The same, and ``values`` [N] with them: those of equal keys in their order."""
    if _loops() is not None and len(keys) <= _MANY:
        _by_digits(keys, values, low, used, space)
        return
    order = np.argsort(keys, kind="stable")
    keys[:], values[:] = keys[order], values[order]


@cache
def _digits_are_faster() -> bool:
    """Whether sorting digit by digit is the faster way here: either gives the same."""
    space, keys = Space(), np.random.default_rng(0).integers(0, 1 << 26, _TRIED, np.uint32)

    def seconds(turn: int) -> float:
        own = keys.copy()
        start = time.perf_counter()
        if turn % 2:
            own.sort()
        else:
            _by_digits(own, None, 0, 26, space)
        return time.perf_counter() - start

    taken = [seconds(turn) for turn in range(8)]
    # The first of both also bring code and memory in.
    return min(taken[2::2]) < min(taken[3::2])


def _by_digits(keys: NDArray[np.uint32], values: NDArray[np.float32] | None, low: int, used: int, space: Space) -> None:
    """Stable counting sorts by the bits from ``low`` on, the lowest digit first."""
    count = len(keys)
    turns = max(-(-(used - low) // _DIGIT), 0)
    digits, counts = space.take("digits", count, np.int32), space.take("counts", (1 << _DIGIT) + 1, np.int32)
    # Without values, what goes along does not matter.
    also: NDArray[Any] = space.take("none", count, np.int8) if values is None else values
    also_other = also if values is None else space.take("other values", count, np.float32)
    loops = _loops()
    own, other = (keys.view(np.int32), also), (space.take("other keys", count, np.int32), also_other)
    shift = low
    for turn in range(turns):
        digit = -(-(used - shift) // (turns - turn))
        np.right_shift(own[0].view(np.uint32), np.uint32(shift), out=digits.view(np.uint32))
        if turn + 1 < turns:
            digits &= np.int32((1 << digit) - 1)
        # Of a matrix with digits as rows, keys as columns and values as entries.
        loops.coo_tocsr(1 << digit, count, count, digits, *own, counts[: (1 << digit) + 1], *other)
        own, other, shift = other, own, shift + digit
    if turns % 2:
        other[0][:], other[1][:] = own
