"""Samples per second from lines of Criteo's format to what SparseCores read, by workers.

    python bench/speed/embed_feed.py > bench/results/embed_feed.csv

Needs nothing but this repository and its dependencies. The file is made up: 13 counts and 26 categories a line, one in
ten of them missing. Each of 26 features has a table of 1e6 rows of 16 floats, on 8 chips of 4 SparseCores; batches are
read, parsed, sorted and taken over as ``rooftop embed train`` does it. Numbers of workers take turns; a worker that
was not started is none, and the caller's process does it all. Times are of a batch, of those of a whole file but the
first few, the fastest and the median of all turns.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import sys
import tempfile
import time
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
CHIPS, CORES_PER_CHIP, FEATURES, VOCABULARY = 8, 4, 26, 1_000_000
#: Batches of a turn that are not timed: workers start, and fill what they may have ahead.
FIRST = 8


def write(path: Path, lines: int) -> None:
    """So many lines."""
    random = np.random.default_rng(0)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(lines):
            there = random.random(13 + FEATURES) >= 0.1
            counts = [str(value) for value in random.integers(0, 3000, 13)]
            categories = [f"{value:08x}" for value in random.integers(0, 2**32, FEATURES)]
            fields = (text if present else "" for text, present in zip(counts + categories, there, strict=True))
            file.write("\t".join([str(random.integers(0, 2)), *fields]) + "\n")


def main() -> None:
    """Measure and print a CSV table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--batches", type=int, default=48)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--turns", type=int, default=7)
    chosen = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    from rooftop.embed.criteo import read_batches, read_lines, split_lines
    from rooftop.embed.host.limits import estimate, observe
    from rooftop.embed.host.preprocess import Preprocessor
    from rooftop.embed.host.workers import make_ready
    from rooftop.models.embedding_tables.stacking import stack_tables
    from rooftop.models.embedding_tables.tables import EmbeddingTable, Feature, Tables

    names = [f"C{index + 1}" for index in range(FEATURES)]
    model = Tables(
        tables=tuple(EmbeddingTable(name=name, vocabulary=VOCABULARY, width=16) for name in names),
        features=tuple(Feature(name=name, table=name) for name in names),
    )
    stacking = stack_tables(model, cores=CHIPS * CORES_PER_CHIP, cores_per_device=CORES_PER_CHIP, batch=chosen.batch)
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("numpy", "scipy"))
    command = " ".join(["python bench/speed/embed_feed.py", *sys.argv[1:]])
    print(f"# {command}; {versions}; {os.cpu_count()} cores; {time.strftime('%Y-%m-%d')}")
    print("batch,workers,accelerate,min_ms,median_ms,samples_per_s")
    installed = importlib.util.find_spec("numba") is not None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "clicks.tsv"
        write(path, chosen.batch * (FIRST + chosen.batches))
        first = (batch.ids for batch in islice(read_batches(path, model, chosen.batch), FIRST))
        limits = estimate(observe(Preprocessor(stacking, batch=chosen.batch), first), stacking)
        for accelerate in (False, True) if installed else (False,):
            make = partial(Preprocessor, stacking, batch=chosen.batch, limits=limits, accelerate=accelerate)
            split = partial(split_lines, path=path, tables=model, batch=chosen.batch)
            times: dict[int, list[float]] = {count: [] for count in chosen.workers}
            for _ in range(chosen.turns):
                for count in chosen.workers:
                    ready = make_ready(read_lines(path, chosen.batch), split, make, workers=count)
                    for _ in islice(ready, FIRST):
                        pass
                    start = time.perf_counter()
                    for _ in islice(ready, chosen.batches):
                        pass
                    times[count].append((time.perf_counter() - start) / chosen.batches)
                    ready.close()
            for count, seconds in times.items():
                low, middle = min(seconds), median(seconds)
                row = (chosen.batch, count, accelerate, f"{low * 1e3:.3f}", f"{middle * 1e3:.3f}")
                print(*row, round(chosen.batch / low), sep=",", flush=True)


if __name__ == "__main__":
    main()
