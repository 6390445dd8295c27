"""Embedding lookups and optimizers, written out densely in float64: what programs are compared with."""

from __future__ import annotations

import numpy as np

from rooftop.embed.host.inputs import Ragged
from rooftop.models.embedding_tables.tables import EmbeddingTable, TableOptimizer


def combine_weights(ids: Ragged, combiner: str) -> np.ndarray:
    """The factor of every id: its weight, divided as the combiner says by what its sample's weights make."""
    weights = np.ones(len(ids.values)) if ids.weights is None else ids.weights.astype(np.float64)
    combined = np.zeros(len(weights))
    for begin, end in zip(ids.row_splits[:-1], ids.row_splits[1:], strict=True):
        own = weights[begin:end]
        below = {"sum": 1.0, "mean": own.sum(), "sqrtn": np.sqrt((own * own).sum())}[combiner]
        combined[begin:end] = own / below if below else 0.0
    return combined


def look_up(table: np.ndarray, ids: Ragged, combiner: str) -> np.ndarray:
    """[rows of activations, width]."""
    of = np.repeat(np.arange(ids.rows), np.diff(ids.row_splits))
    activations = np.zeros((ids.rows, table.shape[1]))
    np.add.at(activations, of, combine_weights(ids, combiner)[:, None] * table[ids.values])
    return activations


def table_gradient(table: EmbeddingTable, looked: list[tuple[Ragged, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """[vocabulary, width], and which rows were looked up; ``looked`` are ids and their activations' gradients."""
    gradient = np.zeros((table.vocabulary, table.width))
    used = np.zeros(table.vocabulary, bool)
    for ids, own in looked:
        of = np.repeat(np.arange(ids.rows), np.diff(ids.row_splits))
        np.add.at(gradient, ids.values, combine_weights(ids, table.combiner)[:, None] * own[of])
        used[ids.values] = True
    return gradient, used


class DenseTable:
    """One table and its slots, every row updated by itself."""

    def __init__(self, table: EmbeddingTable, rows: np.ndarray) -> None:
        self.table, self.rows, self.step = table, rows.astype(np.float64), 0
        begin = dict(table.optimizer.parameters).get("initial_accumulator", 0.0)
        self.slots = [np.zeros_like(self.rows), np.zeros_like(self.rows)]
        if table.optimizer.kind != "adam":
            self.slots[0] += begin

    def update(self, gradient: np.ndarray, used: np.ndarray, share: float = 1.0) -> None:
        optimizer = self.table.optimizer
        self.step += 1
        if optimizer.clip is not None:
            gradient = np.clip(gradient, -optimizer.clip, optimizer.clip)
        for row in np.flatnonzero(used):
            own = [slot[row] for slot in self.slots]
            self.rows[row], new = updated(
                optimizer, self.rows[row], own, gradient[row], optimizer.learning_rate * share, self.step
            )
            for slot, value in zip(self.slots, new, strict=True):
                slot[row] = value


def updated(
    optimizer: TableOptimizer, w: np.ndarray, slots: list[np.ndarray], g: np.ndarray, rate: float, step: int
) -> tuple[np.ndarray, list[np.ndarray]]:
    """One row and its slots after one gradient."""
    a, b = slots
    p = dict(optimizer.parameters)
    if optimizer.kind == "sgd":
        return w - rate * g, [a, b]
    if optimizer.kind == "adagrad":
        a = a + g**2
        return w - rate * g / np.sqrt(a), [a, b]
    if optimizer.kind == "rowwise_adagrad":
        a = a + np.mean(g**2)
        return w - rate * g / np.sqrt(a), [a, b]
    if optimizer.kind == "adam":
        a = p["beta1"] * a + (1 - p["beta1"]) * g
        b = p["beta2"] * b + (1 - p["beta2"]) * g**2
        m, v = a / (1 - p["beta1"] ** step), b / (1 - p["beta2"] ** step)
        return w - rate * m / (np.sqrt(v) + p["epsilon"]), [a, b]
    if optimizer.kind == "adagrad_momentum":
        a = a + g**2 if p["beta2"] == 1 else p["beta2"] * a + (1 - p["beta2"]) * g**2
        b = p["momentum"] * b + g * (a + p["epsilon"]) ** (-1 / p["power"])
        return w - rate * b, [a, b]
    assert optimizer.kind == "ftrl"
    new = a + g**2
    k = -p["learning_rate_power"]
    z = b + g - (new**k - a**k) / rate * w
    quadratic = (p["beta"] + new**k) / rate + 2 * p["l2"]
    return np.where(np.abs(z) <= p["l1"], 0.0, -(z - np.sign(z) * p["l1"]) / quadratic), [new, z]
