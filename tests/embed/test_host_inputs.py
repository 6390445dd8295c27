"""Every form in which ids come gives the same ids, samples and weights."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import scipy.sparse
from hypothesis import given
from hypothesis import strategies as st

from rooftop.core.errors import RooftopError
from rooftop.embed.host.inputs import Ragged, as_ragged, from_arrow, from_dense, from_lists, from_scipy, ragged
from rooftop.embed.host.lookups import check_ids
from rooftop.models.embedding_tables.tables import Feature

PLAIN, WEIGHTED = Feature(name="f", table="t"), Feature(name="f", table="t", weighted=True)
SEQUENCE = Feature(name="f", table="t", length=4)
LISTS = st.lists(st.lists(st.integers(0, 30), max_size=5), min_size=1, max_size=6)


def same(one: Ragged, other: Ragged) -> None:
    np.testing.assert_array_equal(one.row_splits, other.row_splits)
    np.testing.assert_array_equal(one.values, other.values)
    assert (one.weights is None) == (other.weights is None)
    if one.weights is not None and other.weights is not None:
        np.testing.assert_array_equal(one.weights, other.weights)


def weights_of(lists: list[list[int]]) -> list[list[float]]:
    return [[1 + row + column / 8 for column in range(len(ids))] for row, ids in enumerate(lists)]


@given(LISTS)
def test_forms_of_ids(lists: list[list[int]]) -> None:
    values = np.array([one for ids in lists for one in ids], np.int64)
    splits = np.cumsum([0, *(len(ids) for ids in lists)])
    expected = Ragged(values=values, row_splits=splits)
    rows = np.empty(len(lists), object)
    rows[:] = [np.array(ids, np.int32) for ids in lists]
    dense = np.full((len(lists), 5), -1)
    for row, ids in zip(dense, lists, strict=True):
        row[: len(ids)] = ids
    array = pa.array(lists, pa.list_(pa.int64()))
    whole = [
        array,
        array.cast(pa.large_list(pa.int64())),
        pa.chunked_array([array]),
        pa.chunked_array([array[:1], array[1:]]),
    ]
    behind = pa.array([[7, 7], *lists, [8]], pa.list_(pa.int64()))[1:-1]
    for given_ in (expected, (values, splits), (values, splits.astype(np.uint8)), lists, rows, dense, *whole, behind):
        same(as_ragged(given_, PLAIN), expected)


@pytest.mark.parametrize("dtype", [">i2", ">i4", ">i8", ">u4"])
def test_ids_in_the_other_byte_order_are_turned(dtype: str) -> None:
    """Else 2**24 would pass for 1, and 1 for a number out of range."""
    values, splits = np.array([1, 0, 300]), np.array([0, 1, 3])
    turned = values.astype(dtype)
    for given_ in ((turned, splits.astype(">i8")), Ragged(values=turned, row_splits=splits)):
        ragged = as_ragged(given_, PLAIN)
        same(ragged, Ragged(values=values, row_splits=splits))
        assert ragged.values.dtype.isnative
    large = Ragged(values=np.array([1 << 24], ">i4"), row_splits=np.array([0, 1]))
    with pytest.raises(RooftopError, match="1 ids out of range, first 16777216 in row 0"):
        check_ids(as_ragged(large, PLAIN), 2, feature="f", table="t", policy="error")


@given(LISTS)
def test_forms_of_ids_with_weights(lists: list[list[int]]) -> None:
    weights = weights_of(lists)
    values = np.array([one for ids in lists for one in ids], np.int64)
    flat = np.array([one for row in weights for one in row], np.float32)
    splits = np.cumsum([0, *(len(ids) for ids in lists)])
    expected = Ragged(values=values, row_splits=splits, weights=flat)
    arrow = (pa.array(lists, pa.list_(pa.int64())), pa.array(weights, pa.list_(pa.float32())))
    dense, dense_weights = np.full((len(lists), 5), -1), np.zeros((len(lists), 5))
    for row, (ids, ones) in enumerate(zip(lists, weights, strict=True)):
        dense[row, : len(ids)], dense_weights[row, : len(ids)] = ids, ones
    rows = np.repeat(np.arange(len(lists)), np.diff(splits))
    coo = scipy.sparse.coo_array((flat, (rows, values)), shape=(len(lists), 31))
    turned = scipy.sparse.coo_array((flat[::-1], (rows[::-1], values[::-1])), shape=(len(lists), 31))
    csr = scipy.sparse.csr_array((flat, values, splits), shape=(len(lists), 31))
    for given_ in (
        expected,
        (values, splits, flat),
        ((values, splits), flat),
        (lists, weights),
        arrow,
        (dense, dense_weights),
        coo,
        csr,
    ):
        same(as_ragged(given_, WEIGHTED), expected)
    ragged = as_ragged(turned, WEIGHTED)
    np.testing.assert_array_equal(ragged.row_splits, splits)
    for begin, end in pairwise(splits):
        np.testing.assert_array_equal(ragged.values[begin:end], values[begin:end][::-1])
    same(as_ragged(csr, PLAIN), Ragged(values=values, row_splits=splits))


def test_nothing_is_copied_that_need_not_be() -> None:
    values, splits = np.arange(6, dtype=np.int32), np.array([0, 2, 6])
    assert np.shares_memory(as_ragged((values, splits), PLAIN).values, values)
    csr = scipy.sparse.csr_array((np.ones(6, np.float32), values, splits), shape=(2, 6))
    ragged = as_ragged(csr, WEIGHTED)
    assert np.shares_memory(ragged.values, csr.indices) and np.shares_memory(ragged.weights, csr.data)
    array = pa.array([[1, 2], [3]], pa.list_(pa.int32()))
    assert np.shares_memory(from_arrow(array).values, array.values.to_numpy())
    dense = np.arange(6).reshape(3, 2)
    assert np.shares_memory(as_ragged(dense, PLAIN).values, dense)


def test_arrow_nulls_and_scalars() -> None:
    same(as_ragged(pa.array([[1, 2], None, [], [3]]), PLAIN), from_lists([[1, 2], [], [], [3]]))
    same(as_ragged(pa.array([4, None, 6]), PLAIN), from_lists([[4], [], [6]]))
    same(as_ragged(pa.array([[1, 2], [3, 4]], pa.list_(pa.int64(), 2)), PLAIN), from_lists([[1, 2], [3, 4]]))
    same(as_ragged(pa.array([], pa.list_(pa.int64())), PLAIN), ragged(np.zeros(0, int), [0]))
    for array in (pa.array([[1, None]]), pa.array([["a"]]), pa.array(["a"])):
        with pytest.raises(RooftopError, match=r"features\.f: got"):
            as_ragged(array, PLAIN)


def test_columns_of_pandas_are_read_as_arrow() -> None:
    """Those before 3.0 offer Arrow neither as an array nor as a stream; whatever pyarrow makes of one is read."""

    class Series:
        def __init__(self, lists: list[list[Any]]) -> None:
            self.lists = lists

        def __arrow_array__(self, type: object = None) -> pa.Array:
            return pa.array(self.lists)

    same(as_ragged(Series([[1, 2], [], [3]]), PLAIN), from_lists([[1, 2], [], [3]]))
    with pytest.raises(RooftopError, match=r"features\.f: got .a column that Arrow does not take") as error:
        as_ragged(Series([[1, "a"]]), PLAIN)
    assert "\n" not in str(error.value)
    # A Series has not even that, but pyarrow knows it.
    column = np.array([4, 0, 9]).view(type("Series", (np.ndarray,), {"__module__": "pandas.core.series"}))
    same(as_ragged(column, PLAIN), from_lists([[4], [0], [9]]))


def test_one_id_per_sample() -> None:
    same(as_ragged(np.array([4, 0, 9]), PLAIN), from_lists([[4], [0], [9]]))
    same(as_ragged(np.array([4, -1, 9]), PLAIN), from_lists([[4], [], [9]]))
    same(as_ragged(np.array([4, 9], np.uint32), PLAIN), from_lists([[4], [9]]))


def test_sequences_have_a_row_per_position() -> None:
    expected = from_lists([[5], [6], [], [], [], [], [], [], [1], [2], [3], [4]])
    lists = [[5, 6], [], [1, 2, 3, 4]]
    dense = np.array([[5, 6, -1, -1], [-1, -1, -1, -1], [1, 2, 3, 4]])
    for given_ in (lists, dense, pa.array(lists), from_lists(lists)):
        same(as_ragged(given_, SEQUENCE), expected)
    # In a dense array a position may be empty before one that is not.
    same(as_ragged(np.array([[-1, 7, -1, 8]]), SEQUENCE), from_lists([[], [7], [], [8]]))
    with pytest.raises(RooftopError, match=r"features\.f: got '5 ids in sample 1'; accepted: at most 4 ids"):
        as_ragged([[1], [1, 2, 3, 4, 5]], SEQUENCE)
    with pytest.raises(RooftopError, match=r"shape \(3, 3\)'; accepted: shape \(batch, 4\)"):
        as_ragged(np.zeros((3, 3), int), SEQUENCE)


@pytest.mark.parametrize(
    ("given_", "feature", "says"),
    [
        (([[1], [2]], [[1.0], []]), WEIGHTED, "weights: got 'lists of other lengths'"),
        ((np.array([1, 2]), np.array([0, 2]), np.array([1.0])), WEIGHTED, "accepted: 2 numbers"),
        (
            (np.array([1, 2]), np.array([0, 2]), np.array([1.0, np.nan])),
            WEIGHTED,
            "weights: got 'nan at 1'; accepted: finite",
        ),
        ((np.zeros((2, 2), int), np.zeros((2, 3))), WEIGHTED, "accepted: the shape of the ids"),
        ((pa.array([[1]]), pa.array([[1.0, 2.0]])), WEIGHTED, "weights: got 'lists of other lengths'"),
        ([[1]], WEIGHTED, "got 'ids without weights'"),
        (scipy.sparse.csc_array((2, 2)), PLAIN, "got 'a csc array of 2 dims'"),
        (object(), PLAIN, "got 'object'; accepted: Ragged"),
        (np.zeros(3), PLAIN, "got 'float64 ids'"),
        (Ragged(values=np.zeros(3), row_splits=np.array([0, 3])), PLAIN, "got 'float64 ids'"),
    ],
)
def test_one_line_for_what_does_not_fit(given_: Any, feature: Feature, says: str) -> None:
    with pytest.raises(RooftopError) as error:
        as_ragged(given_, feature)
    assert says in str(error.value) and "\n" not in str(error.value)


def test_functions_by_name() -> None:
    same(from_dense(np.array([[1, -1], [2, 3]])), from_lists([[1], [2, 3]]))
    same(from_scipy(scipy.sparse.csr_array(np.array([[0, 5], [0, 0]]))), from_lists([[1], []]))
    assert from_lists([]).rows == 0
