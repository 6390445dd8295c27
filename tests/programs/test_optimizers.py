"""Optimizers equal those of optax, and on a mesh those of one device."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rooftop.models import ModelConfig
from rooftop.programs.parameters import Batch, Parameter, Transformer, describe
from rooftop.programs.training.adafactor import SecondMoments, adafactor, factored_dims
from rooftop.programs.training.muon import stack_dims
from rooftop.programs.training.program import Optimizer, TrainProgram
from rooftop.programs.training.step import abstract_batch, abstract_state, described_state, train_step
from tests.support.curves import initial_state, mesh_of, program_of
from tests.support.quickly import QUICKLY

#: Wide enough for Adafactor: it factors the tables, the MLP and the output of attention, and no query's [128, 8, 16].
WIDE = ModelConfig(
    name="wide", family="llama", layers=2, d_model=128, d_ff=202, heads=8, kv_heads=4, d_head=16, vocab=130,
    max_seq_len=16,
)  # fmt: skip


def layers_apart(tree: Transformer[Any]) -> list[Any]:
    """The tree with an entry for each layer of a stacked parameter."""
    leaves = jax.tree.leaves(jax.tree.map(lambda p, x: list(x) if p.stacked else [x], describe(WIDE), tree))
    return leaves


@pytest.mark.oracle
def test_adafactor_is_that_of_optax() -> None:
    """Three updates of random gradients, each layer's matrices by themselves."""
    described, random = describe(WIDE), np.random.default_rng(0)

    def draw(scale: float) -> Transformer[jax.Array]:
        return jax.tree.map(lambda p: jnp.asarray(scale * random.normal(size=p.shape), jnp.float32), described)

    weights, rate = draw(0.1), 0.01
    ours, theirs = adafactor(described, rate), optax.adafactor(rate)
    state, mine, whole = ours.init(weights), weights, layers_apart(weights)
    other = theirs.init(whole)
    for step in range(3):
        gradients = draw(10.0**step)
        changes, state = jax.jit(ours.update)(gradients, state, mine)
        mine = optax.apply_updates(mine, changes)
        changes, other = jax.jit(theirs.update)(layers_apart(gradients), other, whole)
        whole = optax.apply_updates(whole, changes)
        for own, expected in zip(layers_apart(mine), whole, strict=True):
            np.testing.assert_allclose(own, expected, rtol=2e-5, atol=1e-7)


@pytest.mark.oracle
def test_muon_is_that_of_optax() -> None:
    """Three updates: matrices as in optax.contrib.muon, and the rest as in optax.adamw."""
    described, random = describe(WIDE), np.random.default_rng(0)

    def draw(scale: float) -> Transformer[jax.Array]:
        return jax.tree.map(lambda p: jnp.asarray(scale * random.normal(size=p.shape), jnp.float32), described)

    ours = Optimizer(name="muon", learning_rate=0.01, matmul="f32").transformation(described)
    stacks = stack_dims(described)
    decays = jax.tree.map(lambda parameter: parameter.fan_in is not None, described)
    matrices = jax.tree.map(lambda stack: stack > 0, stacks)

    def dims(stack: int, parameter: Parameter) -> optax.contrib.MuonDimensionNumbers | None:
        columns = tuple(range(stack + 1, len(parameter.shape)))
        return optax.contrib.MuonDimensionNumbers((stack,), columns) if stack else None

    muon = optax.contrib.muon(
        0.01, weight_decay=0.1, consistent_rms=0.2, adam_weight_decay=0.1,
        muon_weight_dimension_numbers=jax.tree.map(dims, stacks, described),
    )  # fmt: skip
    adamw = optax.adamw(0.01, 0.9, 0.95, 1e-8, weight_decay=0.1, mask=decays)
    mine = whole = plain = draw(0.1)
    states = [optimizer.init(mine) for optimizer in (ours, muon, adamw)]
    for step in range(3):
        gradients = draw(10.0**step)
        changes, states[0] = jax.jit(ours.update)(gradients, states[0], mine)
        mine = optax.apply_updates(mine, changes)
        changes, states[1] = jax.jit(muon.update)(gradients, states[1], whole)
        whole = optax.apply_updates(whole, changes)
        changes, states[2] = jax.jit(adamw.update)(gradients, states[2], plain)
        plain = optax.apply_updates(plain, changes)
        for is_matrix, own, of_muon, of_adamw in zip(
            *map(jax.tree.leaves, (matrices, mine, whole, plain)), strict=True
        ):
            np.testing.assert_allclose(own, of_muon if is_matrix else of_adamw, rtol=2e-4, atol=2e-6)
    ((layer,),) = stacks.layers
    assert (layer.attn.q, layer.attn.out, layer.mlp.up, layer.mlp.norm.scale, stacks.embed) == (1, 1, 1, 0, 0)


def test_adafactor_keeps_a_row_and_a_column_of_each_matrix() -> None:
    described = describe(WIDE)
    trained = program_of(model=WIDE, batch=4, seq_len=16, optimizer=Optimizer(name="adafactor"))
    state = abstract_state(trained, mesh_of())
    moments = jax.tree.leaves(state.optimizer.moments, is_leaf=lambda node: isinstance(node, SecondMoments))
    for parameter, second in zip(jax.tree.leaves(described), moments, strict=True):
        if (dims := factored_dims(parameter)) is None:
            assert second.full.shape == parameter.shape
        else:
            rows, columns = (np.delete(parameter.shape, dim) for dim in reversed(dims))
            assert (second.full, second.rows.shape, second.columns.shape) == (None, tuple(rows), tuple(columns))
    ((layer,),) = described.layers
    assert [factored_dims(p) for p in (described.embed, layer.mlp.up, layer.attn.out)] == [(1, 0), (1, 2), (1, 2)]
    assert factored_dims(layer.attn.q) is None and factored_dims(layer.mlp.norm.scale) is None


@pytest.mark.parametrize(
    "sizes",
    [
        {"fsdp": 2, "tensor": 4},  # F and the vocabulary are padded.
        # Two layers go to four devices, and those with copies share them out.
        pytest.param({"data": 2, "fsdp": 4}, marks=pytest.mark.slow),
        pytest.param({"stage": 2, "fsdp": 2, "tensor": 2}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("name", [pytest.param("adafactor", marks=pytest.mark.slow), "muon"])
def test_optimizers_on_a_mesh_are_those_of_one_device(name: str, sizes: dict[str, int]) -> None:
    optimizer = Optimizer(name=name, learning_rate=0.1, matmul="f32")
    trained = program_of(model=WIDE, batch=16, seq_len=16, compute_dtype="f32", optimizer=optimizer)
    (loss, alone), (same, split) = (two_steps(trained, mesh) for mesh in (mesh_of(), mesh_of(**sizes)))
    assert same == pytest.approx(loss, rel=1e-5)
    for ours, theirs in zip(split, alone, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=5e-5 if name == "muon" else 1e-5)


def two_steps(trained: TrainProgram, mesh: jax.sharding.Mesh) -> tuple[float, list[np.ndarray]]:
    """The loss of the second step, and all arrays of the state after it, without padding."""
    state, place = initial_state(trained, mesh), abstract_batch(trained, mesh)
    text = np.random.default_rng(0).integers(0, WIDE.vocab, (16, 17)).astype(np.int32)
    tokens, targets = (jax.device_put(ids, place.tokens.sharding) for ids in (text[:, :-1], text[:, 1:]))
    with jax.set_mesh(mesh):
        step = jax.jit(train_step(trained, trained.specs(mesh)), donate_argnums=0, compiler_options=QUICKLY)
        for _ in range(2):
            state, metrics = step(state, Batch(tokens=tokens, targets=targets))
    true = jax.tree.map(cut, state, described_state(trained, mesh))
    return float(metrics.loss), jax.tree.leaves(true)


def cut(array: jax.Array, parameter: Parameter) -> np.ndarray:
    """The array without padding."""
    elements = np.asarray(array)
    for at, dim in enumerate(parameter.padding):
        if dim is not None:
            elements = np.take(elements, dim.positions, axis=at)
    return elements
