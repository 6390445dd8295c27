"""Batches of stacks for tests of host preprocessing, made ready in one way and another."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from rooftop.embed.inputs import Ragged
from rooftop.embed.preprocess import Preprocessed, Preprocessor
from rooftop.models.embedding_tables.limits import StackLimits, full_buffer
from rooftop.models.embedding_tables.stacking import Stacking, stack_tables
from rooftop.models.embedding_tables.tables import EmbeddingTable, Feature, SparseCoreConfig, TableOptimizer, Tables


@st.composite
def stacks(draw: st.DrawFn) -> tuple[Stacking, int, dict[str, Ragged]]:
    """Tables that lie in one stack, on any number of SparseCores, with ids of any width that have no weights."""
    devices, per_device = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    combiner, cores = draw(st.sampled_from(["sum", "mean", "sqrtn"])), devices * per_device
    tables = tuple(
        EmbeddingTable(
            name=f"t{index}",
            vocabulary=draw(st.sampled_from([1, 2, 7, 50, 120])),
            width=8,
            combiner=combiner,
            optimizer=TableOptimizer(kind="sgd"),
        )
        for index in range(draw(st.integers(2, 5)))
    )
    features = tuple(
        Feature(name=f"f{index}{own}", table=table.name, length=draw(st.sampled_from([None, None, 3])))
        for index, table in enumerate(tables)
        for own in range(draw(st.integers(1, 2)))
    )
    model = Tables(tables=tables, features=features, config=SparseCoreConfig(max_ids_per_chip_per_sample=10**6))
    batch = cores * draw(st.integers(1, 5))
    stacking = stack_tables(model, cores=cores, cores_per_device=per_device, batch=batch)
    rng, inputs = np.random.default_rng(draw(st.integers(0, 2**32))), {}
    for feature in features:
        splits = np.concatenate([[0], np.cumsum(rng.integers(0, 1 if feature.length else 9, batch))])
        values = rng.integers(0, model.table(feature.table).vocabulary, splits[-1])
        dtype = draw(st.sampled_from(["i1", "u2", "i4", "u4", "i8", "u8", ">i4", ">i8"]))
        of_splits = draw(st.sampled_from(["i2", "i4", "i8", "u4", ">i8"]))
        inputs[feature.name] = Ragged(values=values.astype(dtype), row_splits=splits.astype(of_splits))
    return stacking, batch, inputs


def made(
    model: tuple[Stacking, int, dict[str, Ragged]],
    *,
    minibatching: bool,
    threads: int = 1,
    accelerate: bool = False,
) -> Preprocessed:
    """The batch made ready, in buffers in which everything fits."""
    stacking, batch, inputs = model
    one = StackLimits(max_ids=512, max_unique_ids=512, buffer=full_buffer(512, stacking.cores))
    limits = {stack.name: one for stack in stacking.stacks}
    return Preprocessor(
        stacking, batch=batch, limits=limits, minibatching=minibatching, threads=threads, accelerate=accelerate
    ).preprocess(inputs)


def assert_same(ours: Preprocessed, other: Preprocessed) -> None:
    """The same buffers and statistics."""
    for name, buffers in other.buffers.items():
        for field in ("row_pointers", "embedding_ids", "sample_ids", "gains"):
            np.testing.assert_array_equal(getattr(ours.buffers[name], field), getattr(buffers, field))
        mine, seen = ours.statistics.stacks[name], other.statistics.stacks[name]
        for field in ("max_ids", "max_unique_ids", "buffer"):
            np.testing.assert_array_equal(getattr(mine, field), getattr(seen, field))
        assert (mine.table_ids, mine.table_unique_ids, mine.ids) == (seen.table_ids, seen.table_unique_ids, seen.ids)
