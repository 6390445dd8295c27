"""Ids per second of batches preprocessed for SparseCores, next to jax-tpu-embedding's C++, in one run.

    python bench/speed/embed_host.py > bench/results/embed_host.csv

Needs a Python that has jax-tpu-embedding==0.1.0 and numba beside this repository's dependencies. The work: 26 features
with a table of 1e6 rows each, on 8 chips of 4 SparseCores; the mean number of ids of a feature runs from 1 to 50, ids
are drawn from a zipf distribution (exponent 1.05). Routes take turns within a run, in a process of their own for each
number of threads; limits and buffers are those that the batch needs, and 10 % more. The reference is given its fastest
input form. Outputs are compared before anything is timed. Times are the fastest and the median of all runs, and
the least CPU time of the process: on a shared machine only CPU time says much. Ratios are to the reference's faster
form.

Workers are as many processes as there are threads, of one thread each, which have the ids in their own memory, as they
do where they read them; theirs is the time of a batch, of several that the caller takes from them one after another.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import logging
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
CHIPS, CORES_PER_CHIP, FEATURES, VOCABULARY, EXPONENT = 8, 4, 26, 1_000_000, 1.05
BATCHES = (1024, 4096, 16384)
#: Batches taken of workers in a run, and batches that each worker has ready or under way at most.
TAKEN, AHEAD = 8, 2
COLUMNS = "threads,batch,stacked,combiner,ids,route,min_ms,median_ms,cpu_ms,ids_per_s,ratio_min,ratio_median,ratio_cpu"


def draw(batch: int, seed: int = 0) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Ids and row splits of every feature."""
    rng = np.random.default_rng(seed)
    weights = 1 / np.arange(1, VOCABULARY + 1) ** EXPONENT
    cumulative = np.cumsum(weights) / weights.sum()
    batches = {}
    for index, mean in enumerate(np.linspace(1, 50, FEATURES)):
        lengths = np.minimum(rng.poisson(mean, batch), int(3 * mean) + 1)
        splits = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        # Popular ids lie anywhere.
        ranks = np.minimum(np.searchsorted(cumulative, rng.random(splits[-1])), VOCABULARY - 1)
        batches[f"f{index:02d}"] = (((ranks * 7919 + index) % VOCABULARY).astype(np.int32), splits)
    return batches


@cache
def drawn(batch: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """The batch of a size, drawn once in each process."""
    return draw(batch)


def split(batch: int) -> tuple[dict[str, tuple[np.ndarray, np.ndarray]], None]:
    """Ids and nothing else."""
    return drawn(batch), None


@dataclass
class Workers:
    """Processes that make one batch after another ready."""

    ready: Iterator[Any]
    ahead: int

    def __call__(self) -> Any:
        """The next batch."""
        return next(self.ready).made

    def seconds(self) -> float:
        """Of a batch. Before and behind it, the processes wait."""
        for _ in range(self.ahead):
            self()
        start = time.perf_counter()
        for _ in range(TAKEN):
            self()
        seconds = (time.perf_counter() - start) / TAKEN
        time.sleep(2 * seconds * self.ahead)
        return seconds


def routes(batch: int, threads: int, stacked: bool, combiner: str) -> tuple[int, dict[str, Callable[[], Any]]]:
    """Number of ids, and the function that preprocesses them, by route."""
    from jax_tpu_embedding.sparsecore.lib.nn import embedding, embedding_spec

    from rooftop.core.rounding import next_multiple
    from rooftop.embed.host.preprocess import Preprocessor
    from rooftop.embed.host.workers import make_ready
    from rooftop.models.embedding_tables.limits import StackLimits
    from rooftop.models.embedding_tables.stacking import stack_tables
    from rooftop.models.embedding_tables.tables import EmbeddingTable, Feature, SparseCoreConfig, TableOptimizer, Tables

    inputs = draw(batch)
    names = [f"t{index:02d}" for index in range(FEATURES)]
    optimizer = TableOptimizer(kind="sgd")
    model = Tables(
        tables=tuple(
            EmbeddingTable(name=name, vocabulary=VOCABULARY, width=16, combiner=combiner, optimizer=optimizer)
            for name in names
        ),
        features=tuple(Feature(name=f"f{name[1:]}", table=name) for name in names),
        config=SparseCoreConfig(disable_table_stacking=not stacked, max_ids_per_chip_per_sample=10_000),
    )
    cores = CHIPS * CORES_PER_CHIP
    # Stacks are the reference's: it, too, is told to stack everything.
    stacking = stack_tables(model, cores=cores, cores_per_device=CORES_PER_CHIP, batch=batch, activation_bytes=1 << 40)
    seen = Preprocessor(stacking, batch=batch, accelerate=False).observe(inputs).stacks
    limits = {
        name: StackLimits(
            max_ids=int(one.max_ids.max() * 1.1) + 8,
            max_unique_ids=int(one.max_unique_ids.max() * 1.1) + 8,
            buffer=next_multiple(int(one.buffer.max() * 1.1), 8),
        )
        for name, one in seen.items()
    }
    specs = [
        embedding_spec.TableSpec(
            name=name,
            vocabulary_size=VOCABULARY,
            embedding_dim=16,
            initializer=lambda *_: None,
            optimizer=embedding_spec.SGDOptimizerSpec(),
            combiner=combiner,
        )
        for name in names
    ]
    features = [
        embedding_spec.FeatureSpec(
            name=f"f{t.name[1:]}", table_spec=t, input_shape=(batch, 1), output_shape=(batch, 16)
        )
        for t in specs
    ]
    counts = {"global_device_count": CHIPS, "num_sc_per_device": CORES_PER_CHIP}
    if stacked:
        embedding.table_stacking.auto_stack_tables(features, **counts, activation_mem_bytes_limit=1 << 40)
    else:
        embedding.prepare_feature_specs_for_training(features, **counts)
    stacks = {}
    for name, feature in zip(names, features, strict=True):
        mine, spec = stacking.place(name)[0].name, feature.table_spec.stacked_table_spec
        stacks[mine] = spec.stack_name
        for field, value in (
            ("max_ids_per_partition", limits[mine].max_ids),
            ("max_unique_ids_per_partition", limits[mine].max_unique_ids),
            ("suggested_coo_buffer_size_per_device", limits[mine].buffer * CORES_PER_CHIP),
        ):
            object.__setattr__(spec, field, value)
    ragged = []
    for values, splits in inputs.values():
        rows = np.empty(batch, object)
        rows[:] = np.split(values, splits[1:-1])
        ragged.append(rows)
    indices, values, shapes = [], [], []
    for ids, splits in inputs.values():
        lengths = np.diff(splits)
        rows = np.repeat(np.arange(batch), lengths)
        columns = np.arange(len(ids)) - np.repeat(splits[:-1], lengths)
        indices.append(np.stack([rows, columns], axis=1).astype(np.int64))
        values.append(ids)
        shapes.append(np.array([batch, lengths.max()], np.int64))
    common = (features, CHIPS, CHIPS)
    per_core = {"num_sc_per_device": CORES_PER_CHIP}
    calls: dict[str, Callable[[], Any]] = {
        "jax-tpu-embedding ragged": lambda: embedding.preprocess_sparse_dense_matmul_input(
            ragged, None, *common, **per_core
        ),
        "jax-tpu-embedding coo": lambda: embedding.preprocess_sparse_dense_matmul_input_from_sparse_tensor(
            indices, values, shapes, *common, **per_core
        ),
    }
    for route, accelerate in (("rooftop numpy", False), ("rooftop numba", True)):
        ours = Preprocessor(stacking, batch=batch, limits=limits, threads=threads, accelerate=accelerate)
        buffers = ours.buffers()
        calls[route] = lambda ours=ours, buffers=buffers: ours.preprocess(inputs, out=buffers)
    # Workers import what they are given from a module, which this file is not where it is run.
    from embed_host import split

    make = partial(Preprocessor, stacking, batch=batch, limits=limits, accelerate=True)
    calls["rooftop numba workers"] = Workers(
        make_ready(itertools.repeat(batch), split, make, workers=threads), AHEAD * threads
    )
    outputs = {route: do() for route, do in calls.items()}
    theirs = outputs["jax-tpu-embedding ragged"][0]
    for route in (route for route in outputs if route.startswith("rooftop")):
        for mine, name in stacks.items():
            device_buffers = outputs[route].buffers[mine]
            assert np.array_equal(device_buffers.row_pointers.reshape(-1), theirs.lhs_row_pointers[name])
            ends = device_buffers.row_pointers.reshape(cores, -1).max(axis=1)
            for array, other in (
                (device_buffers.embedding_ids, theirs.lhs_embedding_ids[name]),
                (device_buffers.sample_ids, theirs.lhs_sample_ids[name]),
                (device_buffers.gains, theirs.lhs_gains[name]),
            ):
                for core, end in enumerate(ends):
                    np.testing.assert_allclose(
                        array.reshape(cores, -1)[core, :end], other.reshape(cores, -1)[core, :end], rtol=1e-5
                    )
    return sum(len(ids) for ids, _ in inputs.values()), calls


def measure(threads: int, batch: int, stacked: bool, combiner: str, runs: int) -> list[dict[str, Any]]:
    """Rows of the table."""
    ids, calls = routes(batch, threads, stacked, combiner)
    walls: dict[str, list[float]] = {route: [] for route in calls}
    cpus: dict[str, list[float]] = {route: [] for route in calls}
    for _ in range(runs):
        for route, do in calls.items():
            if isinstance(do, Workers):
                walls[route].append(do.seconds())
                continue
            start, used = time.perf_counter(), time.process_time()
            do()
            walls[route].append(time.perf_counter() - start)
            cpus[route].append(time.process_time() - used)
    theirs = [route for route in calls if route.startswith("jax")]

    def best(of: Callable[[str], float]) -> float:
        return min(of(route) for route in theirs)

    return [
        {
            "threads": threads,
            "batch": batch,
            "stacked": stacked,
            "combiner": combiner,
            "ids": ids,
            "route": route,
            "min_ms": round(min(walls[route]) * 1e3, 3),
            "median_ms": round(median(walls[route]) * 1e3, 3),
            "cpu_ms": round(min(cpus[route]) * 1e3, 3) if cpus[route] else "",
            "ids_per_s": round(ids / min(walls[route])),
            "ratio_min": round(best(lambda r: min(walls[r])) / min(walls[route]), 2),
            "ratio_median": round(best(lambda r: median(walls[r])) / median(walls[route]), 2),
            "ratio_cpu": round(best(lambda r: min(cpus[r])) / min(cpus[route]), 2) if cpus[route] else "",
        }
        for route in calls
    ]


def main() -> None:
    """Measure and print a CSV table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    parser.add_argument("--combiners", nargs="+", default=["sum", "mean"])
    parser.add_argument("--child", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.child:
        sys.path.insert(0, str(ROOT))
        logging.disable(logging.WARNING)
        warnings.simplefilter("ignore")
        threads, batch, stacked, combiner = json.loads(chosen.child)
        print(json.dumps(measure(threads, batch, stacked, combiner, chosen.runs)))
        return
    versions = ", ".join(
        f"{name} {importlib.metadata.version(name)}" for name in ("jax-tpu-embedding", "jax", "numpy", "numba")
    )
    command = " ".join(["python bench/speed/embed_host.py", *sys.argv[1:]])
    machine = f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}"
    print(f"# {command}; {versions}; {machine}; {time.strftime('%Y-%m-%d')}")
    print(COLUMNS)
    for threads in chosen.threads:
        environment = os.environ | {
            "SPARSECORE_INPUT_PREPROCESSING_THREADS": str(threads),
            "OMP_NUM_THREADS": "1",
            "TF_CPP_MIN_LOG_LEVEL": "3",
        }
        for stacked in (True, False):
            for combiner in chosen.combiners:
                for batch in chosen.batches:
                    child = json.dumps([threads, batch, stacked, combiner])
                    command = [sys.executable, __file__, "--runs", str(chosen.runs), "--child", child]
                    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
                    for row in json.loads(done.stdout.splitlines()[-1]):
                        print(",".join(str(row[column]) for column in COLUMNS.split(",")), flush=True)


if __name__ == "__main__":
    main()
