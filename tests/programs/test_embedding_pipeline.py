"""Pipelined steps against a literal simulation of which step sees which update; sequential ones beside them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rooftop.embed.host.inputs import Ragged
from rooftop.embed.host.preprocess import Preprocessor
from rooftop.models.embedding_tables.stacking import stack_tables
from rooftop.models.embedding_tables.tables import Tables
from rooftop.programs.embedding.lookup import EmbeddingProgram
from rooftop.programs.embedding.pipeline import ModelState, StepProgram, pipelined_step, sequential_step
from rooftop.programs.embedding.state import device_inputs, initialise
from tests.programs.test_embedding import (
    BATCH,
    batch_of,
    every_pair,
    host,
    in_passes,
    inputs_of,
    limits_for,
    mesh_of,
    model,
)
from tests.support.embedding_reference import DenseTable, look_up, table_gradient

STEPS = 6


def dense_step(dense: Any, activations: dict[str, Any], batch: Any) -> tuple[Any, dict[str, Any], Any]:
    """A dense part whose every output depends on its weight, the activations and the batch; NumPy and JAX take it."""
    gradients = {name: dense * value + batch for name, value in activations.items()}
    loss = sum((value * value).sum() for value in activations.values())
    return dense * 0.9 + 0.001 * loss, gradients, loss


def share_of(step: Any) -> Any:
    return 1 / (1 + step)


class Literal:
    """Tables of every moment kept: a lookup reads those after the updates of the steps that it may see."""

    def __init__(self, tables: Tables, rows: dict[str, np.ndarray]) -> None:
        self.tables = tables
        self.dense = {name: DenseTable(tables.table(name), own) for name, own in rows.items()}
        self.after = [rows]

    def activations(self, ids: dict[str, Ragged], updates: int) -> dict[str, np.ndarray]:
        return {
            one.name: look_up(self.after[updates][one.table], ids[one.name], self.tables.table(one.table).combiner)
            for one in self.tables.features
        }

    def update(self, ids: dict[str, Ragged], gradients: dict[str, np.ndarray], share: float) -> None:
        for name, table in self.dense.items():
            looked = [(ids[one.name], gradients[one.name]) for one in self.tables.features_of(name)]
            table.update(*table_gradient(table.table, looked), share)
        self.after.append({name: table.rows.copy() for name, table in self.dense.items()})


@pytest.mark.parametrize(
    ("pipelined", "kind", "combiner", "devices"),
    [
        (False, "adagrad", "sum", 4),
        (True, "adam", "mean", 8),
        pytest.param(True, "adagrad", "sum", 4, marks=pytest.mark.slow),
        pytest.param(True, "ftrl", "sqrtn", 1, marks=pytest.mark.slow),
    ],
)
def test_each_lookup_sees_exactly_the_updates_that_the_rule_says(
    pipelined: bool, kind: str, combiner: str, devices: int
) -> None:
    run(model(kind, combiner), pipelined, devices)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 4, 8])
@pytest.mark.parametrize("minibatching", [False, True])
def test_every_optimizer_and_combiner_pipelined(devices: int, minibatching: bool) -> None:
    run(every_pair(), True, devices, minibatching)


def run(tables: Tables, pipelined: bool, devices: int, minibatching: bool = False) -> None:
    """Raises AssertionError where steps on so many devices differ from the simulation."""
    stacking = stack_tables(tables, cores=devices * 2, cores_per_device=2, batch=BATCH)
    batches = [batch_of(tables, seed) for seed in range(STEPS)]
    batch_inputs = [inputs_of(tables, batch) for batch in batches]
    limits = limits_for(stacking, batch_inputs)
    if minibatching:
        limits = in_passes(limits)
    preprocessor = Preprocessor(stacking, batch=BATCH, limits=limits, minibatching=minibatching)
    mesh = mesh_of(devices)
    embedded = EmbeddingProgram(stacking=stacking, batch=BATCH, limits=limits, minibatching=minibatching)
    program = StepProgram(embedding=embedded, dense=dense_step, share_of=share_of)
    embedding = initialise(stacking, mesh, seed=0)
    literal = Literal(tables, host(embedding, stacking))
    losses, passes = [], 0
    with jax.set_mesh(mesh):
        state = ModelState(embedding=embedding, dense=jnp.float32(0.5))
        step = jax.jit(pipelined_step if pipelined else sequential_step, static_argnums=0)
        for index, features in enumerate(batch_inputs):
            preprocessed = preprocessor.preprocess(features)
            passes = max(passes, preprocessed.minibatches)
            inputs = device_inputs(preprocessed.buffers, preprocessed.minibatches, mesh)
            state, said = step(program, state, inputs, jnp.float32(index))
            losses.append(said)
        for _ in range(2 if pipelined else 0):
            state, said = step(program, state, None, None)
            losses.append(said)
    assert (passes > 1) == minibatching
    if pipelined:
        assert losses[0] is None and losses[-1] is None
        losses = losses[1:-1]
    assert state.looked_up is None and state.differentiated is None

    dense, expected = 0.5, []
    for index, ids in enumerate(batches):
        # Sequential: all earlier steps' updates. Pipelined: step i is looked up after the update of step i - 2.
        activations = literal.activations(ids, max(0, index - 1) if pipelined else index)
        dense, gradients, said = dense_step(dense, activations, float(index))
        expected.append(said)
        literal.update(ids, gradients, share_of(index))
    np.testing.assert_allclose([float(loss) for loss in losses], expected, rtol=1e-5)
    np.testing.assert_allclose(float(state.dense), dense, rtol=1e-5)
    for name, rows in host(state.embedding, stacking).items():
        np.testing.assert_allclose(rows, literal.after[-1][name], rtol=1e-5, atol=1e-5)
    # The two modes differ on these data: neither passes for the other.
    other = literal.activations(batches[2], 2 if pipelined else 1)
    assert abs(dense_step(0.5, other, 0.0)[2] - expected[2]) > 1e-3 * expected[2]
