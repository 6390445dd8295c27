"""Host preprocessing beside jax-tpu-embedding's, on random cases drawn by hypothesis.

Run with a Python that has jax-tpu-embedding==0.1.0, hypothesis, numba and click:

    python tests/oracles/compare_embed_host.py [CASES]             # compare, with both kernels
    python tests/oracles/compare_embed_host.py [CASES] FILE.npz    # write what the reference made of cases 0, 1, ...
    python tests/oracles/compare_embed_host.py --digests CASES FILE.npz    # the same in a few numbers a case

It prints how many cases were compared. Where limits are exceeded and nothing may be dropped the reference aborts the
process: we must refuse such a case, and it is not given to the reference.
"""

from __future__ import annotations

import collections
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[2])]
logging.disable(logging.WARNING)

from embed_host_cases import Case, Digest, Expected, check, draw  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from jax_tpu_embedding.sparsecore.lib.nn import embedding, embedding_spec  # noqa: E402

from rooftop.core.errors import RooftopError  # noqa: E402


def reference(case: Case) -> tuple[int, dict[str, Expected]]:
    """Minibatches and stacks, by our names, that jax-tpu-embedding makes of a case."""
    stacking = case.stacking()
    inputs = case.inputs(stacking.tables)
    tables, limits = stacking.tables, next(iter(case.limits(stacking).values()))
    optimizer = embedding_spec.SGDOptimizerSpec()
    specs = {
        table.name: embedding_spec.TableSpec(
            name=table.name,
            vocabulary_size=table.vocabulary,
            embedding_dim=table.width,
            initializer=lambda *_: None,
            optimizer=optimizer,
            combiner=table.combiner,
            max_ids_per_partition=limits.max_ids,
            max_unique_ids_per_partition=limits.max_unique_ids,
        )
        for table in tables.tables
    }
    features = [
        embedding_spec.FeatureSpec(
            name=feature.name,
            table_spec=specs[feature.table],
            input_shape=(case.batch, 1),
            output_shape=(case.batch, specs[feature.table].embedding_dim),
        )
        for feature in tables.features
    ]
    counts = {"global_device_count": case.devices, "num_sc_per_device": case.cores_per_device}
    if case.stacked:
        embedding.auto_stack_tables(
            features,
            **counts,
            stack_to_max_ids_per_partition=lambda *_: limits.max_ids,
            stack_to_max_unique_ids_per_partition=lambda *_: limits.max_unique_ids,
        )
    else:
        embedding.prepare_feature_specs_for_training(features, **counts)
    names = {}
    for feature, spec in zip(tables.features, features, strict=True):
        stacked = spec.table_spec.stacked_table_spec
        names[stacking.place(feature.table)[0].name] = stacked.stack_name
        # Frozen, and shared by all features of the stack.
        object.__setattr__(stacked, "suggested_coo_buffer_size_per_device", limits.buffer * case.cores_per_device)
    # It reads ids of 64 bits as if they had 32.
    ids = [_objects(np.split(one.values.astype(np.int32), one.row_splits[1:-1])) for one in inputs.values()]
    weights = None
    if case.weighted:
        weights = [_objects(np.split(one.weights, one.row_splits[1:-1])) for one in inputs.values()]
    output, statistics = embedding.preprocess_sparse_dense_matmul_input(
        ids,
        weights,
        features,
        case.devices,
        case.devices,
        num_sc_per_device=case.cores_per_device,
        allow_id_dropping=case.dropping,
        enable_minibatching=case.minibatching,
    )
    parts = (output.lhs_row_pointers, output.lhs_embedding_ids, output.lhs_sample_ids, output.lhs_gains)
    passes = int(output.num_minibatches[0])
    rows = case.devices if case.minibatching else case.cores
    used = max(case.cores, 8) * (case.cores_per_device * passes if case.minibatching else 1)
    activations = {}
    for ours, theirs in names.items():
        pointers, ids, samples, gains = (part[theirs].reshape(rows, -1) for part in parts)
        there = np.arange(ids.shape[1]) < -(-pointers[:, :used].max(axis=1) // 8)[:, None] * 8
        activations[ours] = Expected(
            size=ids.size,
            max_ids=statistics.max_ids_per_partition[theirs],
            max_unique_ids=statistics.max_unique_ids_per_partition[theirs],
            buffer=statistics.required_buffer_size_per_sc[theirs],
            dropped=int(statistics.id_drop_counters[theirs]),
            pointers=pointers[:, :used],
            ids=ids[there],
            samples=samples[there],
            gains=gains[there],
        )
    return passes, {stack.name: activations[stack.name] for stack in stacking.stacks}


def _objects(rows: list[Any]) -> Any:
    objects = np.empty(len(rows), object)
    objects[:] = rows
    return objects


def compare(case: Case) -> str:
    """Raises AssertionError where the two differ; says what was compared."""
    ours = case.run(accelerate=False)
    if isinstance(ours, RooftopError):
        assert not case.dropping
        assert isinstance(case.run(accelerate=True), RooftopError)
        return "refused"
    minibatches, expected = reference(case)
    accelerated = case.run(accelerate=True, threads=2)
    assert not isinstance(accelerated, RooftopError)
    check(case, accelerated, minibatches, expected)
    return check(case, ours, minibatches, expected)


def write(cases: int, file: Path) -> None:
    """Write the arrays of the reference for the cases that we do not refuse."""
    arrays: dict[str, Any] = {}
    for seed in range(cases):
        case = draw(seed)
        if isinstance(case.run(accelerate=False), RooftopError):
            continue
        minibatches, expected = reference(case)
        arrays[f"{seed}/minibatches"] = minibatches
        for name, one in expected.items():
            arrays |= {f"{seed}/{name}/{field}": value for field, value in vars(one).items()}
    np.savez_compressed(file, **arrays)


def write_digests(cases: int, file: Path) -> None:
    """The digests of what the reference made of the cases that we do not refuse, and which those are."""
    refused = np.zeros(cases, bool)
    digests = {"whole": np.zeros(cases, np.uint64), "dropped": np.zeros(cases, np.int32)}
    digests |= {name: np.zeros(cases, np.float64) for name in ("along", "sizes")}
    for seed in range(cases):
        case = draw(seed)
        refused[seed] = isinstance(case.run(accelerate=False), RooftopError)
        if not refused[seed]:
            for name, value in vars(Digest.of(*reference(case))).items():
                digests[name][seed] = value
    np.savez_compressed(file, refused=refused, **digests)


def main() -> None:
    """Compare as many cases as asked for, or write them."""
    warnings.simplefilter("ignore")
    if sys.argv[1:2] == ["--digests"]:
        write_digests(int(sys.argv[2]), Path(sys.argv[3]))
        return
    cases = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    if len(sys.argv) > 2:
        write(cases, Path(sys.argv[2]))
        return
    totals: collections.Counter[str] = collections.Counter()

    @settings(max_examples=cases, deadline=None, derandomize=True, database=None)
    @given(st.integers(0, 2**40).map(draw))
    def every(case: Case) -> None:
        totals[compare(case)] += 1

    every()
    print("; ".join(f"{name}: {count}" for name, count in sorted(totals.items())))


if __name__ == "__main__":
    main()
