"""Passes over samples as SparseCores make them: gradients added up over all passes, then each row updated once.

What XLA's operation does in a pass is done here with dense arithmetic, as its compiled loop shows it: gradients merged
by row over all devices, rows read, the rule run, rows written.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import rooftop.programs.embedding.lookup as programs
from rooftop.core.errors import RooftopError
from rooftop.embed.host.preprocess import Preprocessor
from rooftop.embed.train.checkpoint import newest_tables
from rooftop.embed.train.request import EmbeddingTrainRequest
from rooftop.embed.train.step import StepTarget
from rooftop.embed.train.trainer import Trainer
from rooftop.models.embedding_tables.limits import StackLimits
from rooftop.models.embedding_tables.stacking import Stacking, stack_tables, unpack
from rooftop.models.embedding_tables.tables import OPTIMIZERS, TableOptimizer
from rooftop.programs.embedding.buffers import StackInputs, read_places
from rooftop.programs.embedding.lookup import EmbeddingProgram, update
from rooftop.programs.embedding.sparsecore import NO_SUM, RowRule
from rooftop.programs.embedding.state import EmbeddingState, begin_sums, device_inputs, host_state, initialise
from tests.programs.test_embedding import BATCH, batch_of, gradients_of, inputs_of, limits_for, mesh_of, model
from tests.support.embedding_run import BATCH as CLICKS
from tests.support.embedding_run import tables as click_tables
from tests.support.embedding_run import write_clicks

PASSES, PER_DEVICE = 4, 2
ELEMENTWISE = [kind for kind in OPTIMIZERS if TableOptimizer(kind=kind).elementwise]


def bind(*operands: jax.Array, rule: RowRule, count: int, config: str) -> list[jax.Array]:
    """One device's part of XLA's update, inside ``jax.shard_map`` over the axes of the mesh that is set."""
    del config
    mesh = jax.sharding.get_abstract_mesh()
    axes, devices = mesh.axis_names, mesh.size
    inputs = StackInputs(*(), **dict(zip(StackInputs.__dataclass_fields__, operands[:4], strict=True)))
    passes, state, (gradients, rate, step) = operands[4], operands[5 : 5 + count], operands[5 + count :]
    places = [
        read_places(
            jax.tree.map(lambda array, device=device: array.reshape(devices, 1, -1)[device], gathered),
            passes,
            cores=devices * PER_DEVICE,
            cores_per_device=PER_DEVICE,
            minibatching=True,
        )
        for gathered in [jax.tree.map(lambda array: lax.all_gather(array, axes, tiled=True), inputs)]
        for device in range(devices)
    ]
    everyones = lax.all_gather(gradients, axes)
    here, rows, samples = lax.axis_index(axes), state[0].shape[0], len(gradients) // PER_DEVICE

    def one(index: jax.Array, rows_of: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        total, touched = jnp.zeros((rows, gradients.shape[1])), jnp.zeros(rows, bool)
        for device, place in enumerate(places):
            mine = place.valid & (place.passes == index) & (place.destination // PER_DEVICE == here)
            at = jnp.where(mine, place.destination % PER_DEVICE * (rows // PER_DEVICE) + place.row, rows)
            own = everyones[device][jnp.where(mine, place.source * samples + place.sample, 0)]
            total = total.at[at].add(own * place.gain[:, None], mode="drop")
            touched = touched.at[at].set(True, mode="drop")
        new = rule(total, rows_of, rate, step)
        return tuple(jnp.where(touched[:, None], a, b) for a, b in zip(new, rows_of, strict=True))

    return list(lax.fori_loop(0, passes, one, state))


@pytest.fixture
def operation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rooftop.programs.embedding.sparsecore._update", SimpleNamespace(bind=bind))
    monkeypatch.setattr("rooftop.programs.embedding.lookup._lookup_on_sparsecores", programs._lookup)


def updated(
    program: EmbeddingProgram, devices: int, passes: int, steps: int = 2
) -> tuple[dict[str, np.ndarray], list[np.ndarray], EmbeddingState[jax.Array]]:
    """Tables and slots after some steps, and the state."""
    stacking, mesh = program.stacking, mesh_of(devices)
    preprocessor = Preprocessor(stacking, batch=BATCH, limits=program.limits, minibatching=True, sample_passes=passes)
    state = initialise(stacking, mesh, 0, program.kernel)
    state = dataclasses.replace(state, sums=begin_sums(stacking, mesh, program.summed))
    with jax.set_mesh(mesh):
        for seed in range(steps):
            preprocessed = preprocessor.preprocess(inputs_of(stacking.tables, batch_of(stacking.tables, seed)))
            gradients = gradients_of(stacking.tables, seed)
            placed = jax.device_put(gradients, jax.NamedSharding(mesh, jax.P(mesh.axis_names)))
            inputs = device_inputs(preprocessed.buffers, preprocessed.minibatches, mesh)
            state = jax.jit(update, static_argnums=0)(program, state, inputs, placed, 1 / (1 + seed))
    tables, slots = host_state(stacking, state)
    return unpack(stacking, tables), [slot for own in slots.values() for slot in own], state


def stacked(kind: str, clip: float | None = None, devices: int = 4) -> tuple[Stacking, dict[str, StackLimits]]:
    tables = model(kind, "sqrtn", clip=clip)
    stacking = stack_tables(tables, cores=devices * PER_DEVICE, cores_per_device=PER_DEVICE, batch=BATCH)
    return stacking, limits_for(stacking, [inputs_of(tables, batch_of(tables, seed)) for seed in range(2)], PASSES)


@pytest.mark.parametrize(
    ("kind", "clip", "devices"),
    [
        # Quick: one that clips, one with two slots.
        *(pytest.param(kind, None, 4, marks=() if kind == "adam" else pytest.mark.slow) for kind in ELEMENTWISE),
        ("sgd", 0.5, 1),
    ],
)
def test_sparsecores_update_a_row_of_several_passes_once(
    kind: str, clip: float | None, devices: int, operation: None
) -> None:
    stacking, limits = stacked(kind, clip, devices)
    asked: dict[str, Any] = {"stacking": stacking, "batch": BATCH, "limits": limits, "minibatching": True}
    reference = updated(EmbeddingProgram(**asked, sample_passes=PASSES), devices, PASSES)
    program = EmbeddingProgram(**asked, sample_passes=PASSES, kernel="sparsecore")
    results = updated(program, devices, PASSES)
    for name, rows in reference[0].items():
        np.testing.assert_allclose(results[0][name], rows, rtol=1e-5, atol=1e-5)
    for one, other in zip(results[1], reference[1], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
    # Only updates that add need no sums; none of the others is under way between two steps.
    additive = kind == "sgd" and clip is None
    assert set(results[2].sums) == (set() if additive else {stack.name for stack in stacking.stacks})
    assert all(bool((sums == NO_SUM).all()) for sums in results[2].sums.values())
    # An update in every pass would be another one.
    if kind == "adam":
        every = updated(EmbeddingProgram(**asked, kernel="sparsecore"), devices, PASSES)[0]
        assert any(not np.allclose(every[name], rows, rtol=1e-4, atol=1e-4) for name, rows in reference[0].items())


@pytest.mark.parametrize("kind", ELEMENTWISE)
def test_a_sum_that_is_no_number_is_applied_too(kind: str) -> None:
    optimizer = TableOptimizer(kind=kind)
    rule = RowRule(optimizer=optimizer, what="apply")
    state = (jnp.ones((2, 8)), *(jnp.full((2, 8), 0.5) for _ in optimizer.slots(8)))
    (sums,) = RowRule(optimizer=optimizer, what="add")(
        jnp.full((2, 8), jnp.nan), (jnp.full((2, 8), NO_SUM),), jnp.float32(0.1), jnp.float32(1)
    )
    new, *_ = rule(jnp.zeros((2, 8)), (*state, sums.at[1].set(NO_SUM)), jnp.float32(0.1), jnp.float32(1))
    assert jnp.isnan(new[0]).all() and jnp.array_equal(new[1], state[0][1])


@pytest.fixture(scope="module")
def clicks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("clicks") / "train.tsv"
    write_clicks(path, 6 * CLICKS, seed=0)
    return path


def run(clicks: Path, folder: Path, **changed: Any) -> Trainer:
    asked: dict[str, Any] = {
        "tables": click_tables(),
        "data": clicks,
        "run": folder,
        "batch_samples": CLICKS,
        "devices": 1,
    }
    trainer = Trainer(EmbeddingTrainRequest(**{**asked, "save_every": 2, **changed}))
    trainer.train()
    return trainer


def tables_of(folder: Path) -> dict[str, np.ndarray]:
    return dict(newest_tables(folder).tables)


@pytest.mark.slow
def test_a_run_in_passes_is_that_of_one_pass(
    clicks: Path, tmp_path: Path, operation: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    once = run(clicks, tmp_path / "once")
    passes = run(clicks, tmp_path / "passes", sample_passes=4)
    assert (once.passes, passes.passes) == (1, 4)
    assert (
        all(passes._step.limits[name].max_ids <= limits.max_ids for name, limits in once._step.limits.items())
        and passes.limits_file.name == "limits-2-4-passes.json"
    )
    target = SimpleNamespace(of=lambda *_: StepTarget(kernel="sparsecore", cores_per_device=2))
    monkeypatch.setattr("rooftop.embed.train.trainer.StepTarget", target)
    monkeypatch.setattr("rooftop.embed.train.trainer.compiler_options", lambda *_, **__: {})
    adagrad = [dataclasses.replace(stack, optimizer=TableOptimizer(kind="adagrad")) for stack in click_tables().tables]
    tables = dataclasses.replace(click_tables(), tables=tuple(adagrad))
    # Killed after four batches, and gone on with: nothing that a checkpoint lacks is under way.
    whole = run(clicks, tmp_path / "whole", sample_passes=4, tables=tables, pipelined=True)
    assert set(whole.state.embedding.sums) == {stack.name for stack in whole.stacking.stacks}
    run(clicks, tmp_path / "parts", sample_passes=4, tables=tables, pipelined=True, steps=4)
    run(clicks, tmp_path / "parts", sample_passes=4, tables=tables, pipelined=True)
    for name, rows in tables_of(tmp_path / "whole").items():
        assert np.array_equal(rows, tables_of(tmp_path / "parts")[name])
    for name, rows in tables_of(tmp_path / "once").items():
        np.testing.assert_allclose(rows, tables_of(tmp_path / "passes")[name], rtol=1e-4, atol=1e-5)


def test_passes_are_counted(clicks: Path, tmp_path: Path) -> None:
    with pytest.raises(RooftopError, match="sample_passes: got 65; accepted: a whole number from 1 to 64"):
        run(clicks, tmp_path / "run", sample_passes=65)
