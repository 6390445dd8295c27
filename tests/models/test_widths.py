"""Padding of dims that a mesh does not divide."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rooftop.models import load_model
from rooftop.models.widths import HeadSplit, ModelWidths, PaddedDim

sizes = st.integers(1, 12)


@given(sizes, sizes, sizes, sizes)
def test_positions_are_those_of_an_array_that_is_padded_step_by_step(
    parts: int, part: int, more: int, devices: int
) -> None:
    size = parts * part
    filled = part + more
    shard = -(-parts * filled // devices)
    if parts * filled % devices:
        return
    dim = PaddedDim.of(size, (parts, filled), (devices, shard + more))
    assert dim is not None
    array = np.arange(1, size + 1).reshape(parts, part)
    array = np.pad(array, ((0, 0), (0, more))).reshape(devices, -1)
    array = np.pad(array, ((0, 0), (0, more))).ravel()
    assert dim.stored == len(array)
    assert (array[dim.positions] == np.arange(1, size + 1)).all()
    assert np.count_nonzero(array) == size


def test_a_dim_that_divides_has_no_padding() -> None:
    assert PaddedDim.of(12, (1, 12), (4, 3)) is None


@given(sizes, sizes, st.integers(1, 40), st.integers(1, 6))
def test_each_device_has_the_keys_that_its_queries_read(groups: int, readers: int, devices: int, sharing: int) -> None:
    split = HeadSplit(heads=groups * readers, kv_heads=groups, ways=devices, sharing=sharing)
    dim = split.padded()
    positions = np.arange(split.heads) if dim is None else dim.positions
    stored = split.heads if dim is None else dim.stored
    assert stored == devices * split.queries
    assert split.queries % split.keys == split.queries % sharing == 0
    # Whether or not heads are copied, the key/value head in a group's cache is the one that each query head reads.
    of_slot = np.repeat(np.array(split.cached).reshape(devices, -1), split.queries // split.keys, axis=1).ravel()
    assert (of_slot[positions] == np.arange(split.heads) // readers).all()
    if not split.copies_keys:
        # Key/value heads are split as they are, or padded as query heads are.
        assert split.keys == (split.queries if readers == 1 else groups // devices)
        return
    copies = split.padded_keys()
    assert copies is not None and copies.stored == devices * split.keys and set(split.cached) == set(range(groups))
    assert (copies.sources == split.cached).all()


@pytest.mark.parametrize(("heads", "kv_heads", "ways", "keys"), [(40, 8, 16, 1), (32, 8, 16, 1), (28, 4, 8, 1),
    (64, 8, 12, 3), (40, 40, 16, 3), (64, 8, 8, 1), (64, 8, 4, 2)])  # fmt: skip
def test_key_heads_of_a_device(heads: int, kv_heads: int, ways: int, keys: int) -> None:
    assert HeadSplit(heads=heads, kv_heads=kv_heads, ways=ways).keys == keys


def test_widths_of_many_meshes_are_those_of_each() -> None:
    model = replace(load_model("llama3-8b"), heads=40, kv_heads=8, vocab=50257)
    tensor = np.array([1.0, 3.0, 8.0, 16.0])
    widths = ModelWidths(model=model, tensor=tensor, fsdp=np.array([7.0, 1.0, 4.0, 96.0]), expert=np.ones(4))
    shared = replace(widths, sharing=np.array([1.0, 2.0, 3.0, 5.0]))
    for at, (ways, sharing) in enumerate(zip(tensor.astype(int), shared.sharing.astype(int), strict=True)):
        split = HeadSplit.of(model, int(ways), int(sharing))
        assert np.asarray(shared.heads)[at] * sharing == split.queries and np.asarray(shared.kv_heads)[at] == split.keys
    for at, ways in enumerate(tensor.astype(int)):
        split = HeadSplit.of(model, int(ways))
        assert (np.asarray(widths.heads)[at], np.asarray(widths.kv_heads)[at]) == (split.queries, split.keys)
        assert np.asarray(widths.copied_keys)[at] == split.copies_keys
        assert np.asarray(widths.vocab)[at] * ways >= model.vocab > (np.asarray(widths.vocab)[at] - 1) * ways
    # D is 4096 of 7 x 586, 3 x 1366, 32 x 128 and 1536 x 3; heads are 40 of 42 and of 48.
    assert np.asarray(widths.padding) == pytest.approx([4102 / 4096 - 1, 0.05, 50264 / 50257 - 1, 0.2])
