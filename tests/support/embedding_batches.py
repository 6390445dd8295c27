"""Batches of two features for workers, which import this module: it takes no JAX."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from rooftop.core.errors import RooftopError
from rooftop.models.embedding_tables.stacking import Stacking, stack_tables
from rooftop.models.embedding_tables.tables import EmbeddingTable, Feature, SparseCoreConfig, Tables

SAMPLES, ROWS = 32, 100
TABLES = Tables(
    tables=(
        EmbeddingTable(name="a", vocabulary=ROWS, width=8, combiner="mean"),
        EmbeddingTable(name="b", vocabulary=ROWS, width=8),
    ),
    features=(Feature(name="x", table="a"), Feature(name="y", table="b")),
    config=SparseCoreConfig(allow_id_dropping=False),
)
STACKING: Stacking = stack_tables(TABLES, cores=4, cores_per_device=2, batch=SAMPLES)

Batch = tuple[int, dict[str, Any]]


def drawn(number: int, most: int = 6) -> Batch:
    random = np.random.default_rng(number)
    features = {}
    for name in ("x", "y"):
        splits = np.concatenate([[0], np.cumsum(random.integers(0, most, SAMPLES))])
        features[name] = (random.integers(0, ROWS, splits[-1]), splits)
    return number, features


def split(batch: Batch) -> tuple[Mapping[str, Any], np.ndarray]:
    number, ids = batch
    if number < 0:
        raise RooftopError("number", number, "one from 0 on")
    return ids, np.full(3, number)


def modules(batch: Batch) -> tuple[Mapping[str, Any], set[str]]:
    """Modules that the process has imported."""
    return batch[1], set(sys.modules)


def split_or_die(batch: Batch, how: str) -> tuple[Mapping[str, Any], int]:
    if batch[0] == 2:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ZeroDivisionError("in a worker")
    return batch[1], batch[0]
