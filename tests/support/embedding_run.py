"""A small run of a DLRM on made-up clicks, for tests in this process and for a process that can be killed."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from rooftop.models.embedding_tables.tables import EmbeddingTable, Feature, TableOptimizer, Tables

FEATURES = 4
BATCH = 64
#: Of the dense part, in runs that are to learn.
LEARNING_RATE = 1e-2


def tables() -> Tables:
    """C1 to C4 in tables of their own; two stack."""
    adagrad = TableOptimizer(kind="adagrad", learning_rate=0.2)
    rowwise = TableOptimizer(kind="rowwise_adagrad", learning_rate=0.2)
    return Tables(
        tables=tuple(
            EmbeddingTable(
                name=f"t{index + 1}", vocabulary=40 + index, width=8, optimizer=adagrad if index < 2 else rowwise
            )
            for index in range(FEATURES)
        ),
        features=tuple(Feature(name=f"C{index + 1}", table=f"t{index + 1}") for index in range(FEATURES)),
    )


def write_clicks(path: Path, lines: int, seed: int) -> None:
    """Lines of Criteo's format whose label depends on the categories of C1 to C4 alone; some fields are missing."""
    values = np.random.default_rng(7).normal(size=(FEATURES, 30))
    random = np.random.default_rng(seed)
    chosen = random.integers(0, 30, (lines, FEATURES))
    score = 1.5 * sum(values[index, chosen[:, index]] for index in range(FEATURES))
    label = (random.random(lines) < 1 / (1 + np.exp(-score))).astype(int)
    with path.open("w", encoding="utf-8") as file:
        for at in range(lines):
            counts = ["" if random.random() < 0.1 else str(random.integers(0, 50)) for _ in range(13)]
            others = ["" if random.random() < 0.1 else f"{random.integers(0, 2**32):08x}" for _ in range(26 - FEATURES)]
            file.write("\t".join([str(label[at]), *counts, *(f"{value:08x}" for value in chosen[at]), *others]) + "\n")


def main(data: Path, run: Path, devices: int, pipelined: bool) -> None:
    """Train to the end of ``data``."""
    from rooftop.embed.train.request import EmbeddingTrainRequest
    from rooftop.embed.train.trainer import Trainer

    options = EmbeddingTrainRequest(
        tables=tables(), data=data, run=run, batch_samples=BATCH, devices=devices, pipelined=pipelined, save_every=4,
        learning_rate=LEARNING_RATE,
    )  # fmt: skip
    Trainer(options).train()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "pipelined")
