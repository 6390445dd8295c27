"""Host preprocessing beside tensorflow-tpu's kernels, which run on the CPU, on random cases drawn by hypothesis.

Run with a Python that has tensorflow-tpu==2.20.0 (installed with --no-deps, then what its import asks for), hypothesis
and click:

    python tests/oracles/compare_embed_host_tf.py [CASES]

Compared are the sorted ids of every SparseCore, partition by partition, with rows, samples and gains, and what the
limits need, in one pass and with room for all. Where a batch needs several passes (minibatches), the buffers are
compared that the kernels lay out for them. What decides on the passes, and the hash that puts ids into buckets, is not:
that kernel ends its process where there is no TPU; ours are given to the other. It prints how much was compared.
"""

from __future__ import annotations

import collections
import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[2])]
os.environ |= {"TF_CPP_MIN_LOG_LEVEL": "3", "TPU_SKIP_MDS_QUERY": "1"}

import tensorflow as tf  # noqa: E402
from embed_host_cases import Case, draw  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from rooftop.core.errors import RooftopError  # noqa: E402
from rooftop.embed.host.inputs import Ragged  # noqa: E402
from rooftop.embed.host.minibatching import bucket_of  # noqa: E402
from rooftop.embed.host.preprocess import Preprocessed  # noqa: E402
from rooftop.models.embedding_tables.limits import BUCKETS  # noqa: E402
from rooftop.models.embedding_tables.stacking import Stack, Stacking  # noqa: E402

#: More than any case needs.
ROOM = 1 << 12
#: What pads ids, here and there.
PADDING = 2**31 - 1


def roomy(seed: int) -> Case:
    """A case of one pass in which nothing is dropped, of as many SparseCores as a chip may have for the kernels."""
    return dataclasses.replace(
        draw(seed), max_ids=ROOM, max_unique_ids=ROOM, buffer=1.0, dropping=False, minibatching=False
    )


def sorted_by_core(case: Case, stacking: Stacking, stack: Stack, inputs: dict[str, Ragged], device: int) -> list[Any]:
    """Of each SparseCore of a device (rows of activations, local rows, gains, ends of partitions), by the kernels."""
    own, samples = case.cores_per_device, case.samples * case.cores_per_device
    features = len(stack.features)
    lists: list[list[list[Any]]] = [[[] for _ in range(own)] for _ in range(3)]
    offsets, position = [], 0
    for place in stack.places:
        for feature in place.features:
            ids = inputs[feature.name]
            splits = ids.row_splits[device * samples : (device + 1) * samples + 1]
            span = slice(splits[0], splits[-1])
            weights = np.ones(splits[-1] - splits[0], np.float32) if ids.weights is None else ids.weights[span]
            tensors = tf.raw_ops.ConvertToListOfSparseCoreCooTensors(
                indices_or_row_splits=(splits - splits[0]).astype(np.int32),
                values=ids.values[span].astype(np.int32),
                weights=weights,
                sample_count=samples,
                num_sc_per_chip=own,
                row_offset=position * samples,
                col_offset=place.offset * case.cores,
                col_shift=place.rotation,
                num_sc_shards=case.cores,
                stacked_table_sample_count=features * samples,
                combiner=case.combiner,
            )
            for into, parts in zip(lists, tensors, strict=True):
                for core in range(own):
                    into[core].append(parts[core])
            offsets.append(place.offset * case.cores)
            position += 1
    return [
        tf.raw_ops.SortListOfSparseCoreCooTensors(
            row_ids_list=lists[0][core],
            col_ids_list=lists[1][core],
            gains_list=lists[2][core],
            sample_count_list=[case.samples] * features,
            col_offset_list=offsets,
            num_replica=case.devices,
            table_vocab_size=stack.rows * case.cores,
            feature_width=stack.width,
            num_sc_per_chip=own,
            max_ids_per_sparse_core=ROOM,
            max_unique_ids_per_sparse_core=ROOM,
            table_name=stack.name,
        )
        for core in range(own)
    ]


def compare(case: Case) -> collections.Counter[str]:
    """Raises AssertionError where the two differ; counts what was compared."""
    ours = case.run(accelerate=False)
    assert isinstance(ours, Preprocessed), ours
    stacking, totals = case.stacking(), collections.Counter[str]()
    inputs = case.inputs(stacking.tables)
    for stack in stacking.stacks:
        mine, seen = ours.buffers[stack.name], ours.statistics.stacks[stack.name]
        arrays = [array.reshape(case.cores, -1) for array in (mine.sample_ids, mine.embedding_ids, mine.gains)]
        pointers = mine.row_pointers.reshape(case.cores, -1)
        most = np.zeros((2, case.devices, case.cores), np.int64)
        for device in range(case.devices):
            for core, theirs in enumerate(sorted_by_core(case, stacking, stack, inputs, device)):
                source = device * case.cores_per_device + core
                samples, rows, gains, ends = (tensor.numpy() for tensor in theirs)
                for destination in range(case.cores):
                    begin, end = ends[destination], ends[destination + 1]
                    first = 0 if destination == 0 else -(-pointers[source, destination - 1] // 8) * 8
                    assert pointers[source, destination] - first == end - begin
                    here, there = slice(first, pointers[source, destination]), slice(begin, end)
                    np.testing.assert_array_equal(arrays[0][source, here], samples[there])
                    np.testing.assert_array_equal(arrays[1][source, here], rows[there])
                    np.testing.assert_allclose(arrays[2][source, here], gains[there], rtol=3e-6)
                    counts = (end - begin, len(np.unique(rows[there])))
                    most[:, device, destination] = np.maximum(most[:, device, destination], counts)
                    totals += collections.Counter(partitions=1, ids=int(end - begin))
        np.testing.assert_array_equal(seen.max_ids, most[0])
        np.testing.assert_array_equal(seen.max_unique_ids, most[1])
    totals["cases"] += 1
    return totals


def in_passes(seed: int) -> Case:
    """A case whose partitions may overflow, looked up in as many passes as it takes."""
    return dataclasses.replace(draw(seed), buffer=1.0, dropping=False, minibatching=True)


def root_first(mask: int) -> int:
    """The mask of open joints as the kernels read it: from the root to the leaves, ours is from the leaves on."""
    position, bit, count = 0, 0, BUCKETS // 2
    while count:
        for index in range(count):
            position |= (mask >> bit & 1) << (count - 1 + index)
            bit += 1
        count //= 2
    return position


def compare_passes(case: Case) -> collections.Counter[str]:
    """Raises AssertionError where buffers for several passes differ; counts what was compared."""
    masks = [0]
    ours = case.run(accelerate=False, combine=lambda mask: masks.append(mask) or mask)
    if isinstance(ours, RooftopError):
        return collections.Counter(refused=1)
    if ours.minibatches == 1:
        return collections.Counter()
    stacking, totals = case.stacking(), collections.Counter[str]()
    inputs = case.inputs(stacking.tables)
    one = dataclasses.replace(case, max_ids=ROOM, max_unique_ids=ROOM, minibatching=False)
    for stack in stacking.stacks:
        mine = ours.buffers[stack.name]
        for device in range(case.devices):
            lists: list[list[Any]] = [[], [], [], []]
            for theirs in sorted_by_core(one, stacking, stack, inputs, device):
                samples, rows, gains, ends = (tensor.numpy() for tensor in theirs)
                destinations = np.repeat(np.arange(case.cores), np.diff(ends[: case.cores + 1]))
                partitions = destinations * BUCKETS + bucket_of(rows.astype(np.int64) * case.cores + destinations)
                order = np.lexsort((samples, rows, partitions))
                counts = np.bincount(partitions, minlength=case.cores * BUCKETS)
                for into, values in zip(lists, (samples, rows, gains), strict=False):
                    into.append(values[order])
                lists[3].append(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32))
            pointers, samples, rows, gains, pointers_used, used, passes = (
                tensor.numpy()
                for tensor in tf.raw_ops.ConvertToSparseCoreCsrWrappedCooTensor(
                    sorted_row_ids_list=lists[0],
                    sorted_col_ids_list=lists[1],
                    sorted_gains_list=lists[2],
                    id_counts_list=lists[3],
                    splits=np.array(root_first(masks[-1]), np.int64),
                    sample_count_per_sc=case.samples * len(stack.features),
                    num_replica=case.devices,
                    max_minibatches_per_sc=BUCKETS,
                    max_ids_per_chip_per_sample=ROOM,
                    table_vocab_size=stack.rows * case.cores,
                    feature_width=stack.width,
                    table_name=stack.name,
                    allow_id_dropping=False,
                )
            )
            assert passes == ours.minibatches
            np.testing.assert_array_equal(mine.row_pointers[device, :pointers_used], pointers[:pointers_used])
            np.testing.assert_array_equal(mine.sample_ids[device, :used], samples[:used])
            np.testing.assert_array_equal(mine.embedding_ids[device, :used], rows[:used])
            there = mine.sample_ids[device, :used] != PADDING
            np.testing.assert_allclose(mine.gains[device, :used][there], gains[:used][there], rtol=3e-6)
            totals += collections.Counter({"ids in passes": int(there.sum())})
    totals["cases in passes"] += 1
    return totals


def main() -> None:
    """Compare as many cases as asked for."""
    cases = int(sys.argv[1]) if len(sys.argv) > 1 else 300
    totals = collections.Counter[str]()

    @settings(max_examples=cases, deadline=None, derandomize=True, database=None)
    @given(st.integers(0, 2**40).map(roomy))
    def every(case: Case) -> None:
        totals.update(compare(case))

    @settings(max_examples=cases, deadline=None, derandomize=True, database=None)
    @given(st.integers(0, 2**40).map(in_passes))
    def every_in_passes(case: Case) -> None:
        totals.update(compare_passes(case))

    every()
    every_in_passes()
    print(f"tensorflow-tpu {tf.__version__}; " + "; ".join(f"{name}: {count:,}" for name, count in totals.items()))


if __name__ == "__main__":
    main()
