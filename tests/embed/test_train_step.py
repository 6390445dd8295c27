"""The step that ``rooftop embed train`` runs on SparseCores: compiled for three chips, and all around it on the CPU."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from rooftop.arrays import Mesh
from rooftop.compiler.compiling import CompileRequest
from rooftop.compiler.sparsecore import PIPELINING_OPTIONS, compile_with_marks, refusal, sparsecore_overlap
from rooftop.core.errors import Infeasible, RooftopError
from rooftop.embed.train.checkpoint import Saved, newest_tables
from rooftop.embed.train.request import EmbeddingTrainRequest
from rooftop.embed.train.step import STAGES, StepTarget, compiler_options, lower_step
from rooftop.embed.train.trainer import Trainer
from rooftop.hardware import Slice
from rooftop.models.embedding_tables.limits import StackLimits, full_buffer
from rooftop.models.embedding_tables.tables import EmbeddingTable, Feature, TableOptimizer, Tables
from rooftop.plan.embedding.problem import per_device, stacking_on
from tests.support.embedding_run import BATCH, tables, write_clicks

BATCHES = 6
SLICES = ("v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1")


def device(kind: str) -> Any:
    return SimpleNamespace(platform="tpu", device_kind=kind)


def elementwise() -> Tables:
    """Two features in one stack with a slot, two in another with two."""
    kinds = ("adagrad", "adagrad", "adam", "adam")
    return Tables(
        tables=tuple(
            EmbeddingTable(
                name=f"t{index + 1}", vocabulary=500_000 + index, width=32, optimizer=TableOptimizer(kind=kind)
            )
            for index, kind in enumerate(kinds)
        ),
        features=tuple(Feature(name=f"C{index + 1}", table=f"t{index + 1}") for index in range(len(kinds))),
    )


def request(on: str, stage: str) -> CompileRequest:
    where = Slice.parse(on)
    cores = per_device(where) * where.devices
    limits = StackLimits(max_ids=512, max_unique_ids=256, buffer=full_buffer(512, cores))
    stacks = stacking_on(elementwise(), where, 128 * cores).stacks
    return CompileRequest(
        mesh=Mesh.lay(where, {"data": where.devices}),
        program="rooftop.embed.train.step:lower_step",
        arguments={
            "tables": elementwise().to_json(),
            "batch": 128 * cores,
            "limits": {stack.name: vars(limits) for stack in stacks},
            "stage": stage,
        },
        options=PIPELINING_OPTIONS if stage == "pipelined" else {},
    )


def check_compiled(on: str, stage: str) -> None:
    marks = compile_with_marks(request(on, stage))
    overlap = sparsecore_overlap(marks.compiled.module)
    assert overlap.calls >= 1
    memory, stacks = marks.compiled.memory, stacking_on(elementwise(), Slice.parse(on), 4096).stacks
    if stage != "scores":
        rows = sum(stack.rows * (1 + len(stack.optimizer.slots(1))) for stack in stacks)
        state_bytes = rows * 32 * 4 * per_device(Slice.parse(on))
        # Tables and slots lie without padding, are updated where they are, and are there once.
        assert state_bytes <= memory["alias"] <= memory["argument"] < 1.2 * state_bytes
        assert marks.compiled.at_peak is not None
        assert sum(one.bytes > state_bytes / 8 for one in marks.compiled.at_peak.buffers) == sum(
            1 + len(stack.optimizer.slots(1)) for stack in stacks
        )
    if stage == "pipelined":
        assert overlap.share > 0.8


@pytest.mark.slow
@pytest.mark.parametrize("on", SLICES)
@pytest.mark.parametrize("stage", ["sequential", "pipelined"])
def test_the_step_of_a_run_compiles_for_sparsecores(on: str, stage: str) -> None:
    check_compiled(on, stage)


@pytest.mark.slow
@pytest.mark.parametrize("stage", sorted({*STAGES, "scores"} - {"sequential", "pipelined"}))
def test_what_else_a_run_compiles_does_too(stage: str) -> None:
    check_compiled("v6e:2x2", stage)


@pytest.mark.slow
@pytest.mark.parametrize("on", SLICES)
def test_a_step_in_passes_over_samples_compiles(on: str) -> None:
    asked = request(on, "pipelined")
    marks = compile_with_marks(dataclasses.replace(asked, arguments={**asked.arguments, "sample_passes": 4}))
    stacks = stacking_on(elementwise(), Slice.parse(on), 4096).stacks
    rows = sum(stack.rows * (2 + len(stack.optimizer.slots(1))) for stack in stacks)
    state_bytes = rows * 32 * 4 * per_device(Slice.parse(on))
    assert state_bytes <= marks.compiled.memory["alias"] <= marks.compiled.memory["argument"] < 1.2 * state_bytes
    assert sparsecore_overlap(marks.compiled.module).share > 0.5


def test_the_devices_decide_who_looks_up() -> None:
    for kind, own in (("TPU v5", 4), ("TPU v5p", 4), ("TPU v6 lite", 2), ("TPU7x", 2)):
        assert StepTarget.of(device(kind), elementwise()) == StepTarget(kernel="sparsecore", cores_per_device=own)
    assert StepTarget.of(device("TPU v5p"), elementwise(), 4).cores_per_device == 4
    with pytest.raises(RooftopError, match="cores_per_device: got 2; accepted: 4"):
        StepTarget.of(device("TPU v5p"), elementwise(), 2)
    # An optimizer that needs whole rows, and chips without SparseCores or whose compiler refuses them.
    assert StepTarget.of(device("TPU v5p"), tables()).kernel == "reference"
    for kind in ("TPU v4", "TPU v5 lite"):
        assert StepTarget.of(device(kind), elementwise()).kernel == "reference"
    here = jax.devices()[0]
    assert StepTarget.of(here, elementwise()) == StepTarget(kernel="reference", cores_per_device=2)
    assert StepTarget.of(here, elementwise(), 3).cores_per_device == 3


def test_a_pipeline_on_sparsecores_is_told_to_overlap() -> None:
    target = StepTarget(kernel="sparsecore", cores_per_device=4)
    options = device("TPU v5p")
    assert compiler_options(target, options, (), pipelined=True) == PIPELINING_OPTIONS
    assert compiler_options(target, options, (), pipelined=False) == {}
    elsewhere = StepTarget(kernel="reference", cores_per_device=2)
    assert compiler_options(elsewhere, jax.devices()[0], ("nan",), pipelined=True) == {}


def test_stages_are_known() -> None:
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    with pytest.raises(RooftopError, match="did you mean pipelined"):
        lower_step(mesh, {**request("v6e:2x2", "sequential").arguments, "stage": "pipeline"})


@pytest.mark.parametrize(
    ("said", "what"),
    [
        ("INTERNAL: Can't fit a single row. TileSpmem bytes: 262112", "tile memory"),
        ("E1000: Ran out of memory in memory space hbm. Used 31.30G of 31.25G hbm.", "31.30GiB of the 31.25GiB of HBM"),
        ("RESOURCE_EXHAUSTED: program (40.5G) exceeds available HBM (31.25G)", "40.50GiB of the 31.25GiB of HBM"),
    ],
)
def test_a_step_without_room_is_an_answer(said: str, what: str) -> None:
    no = refusal(said)
    assert isinstance(no, Infeasible) and what in str(no)
    assert refusal("INTERNAL: a fault") is None


@pytest.fixture(scope="module")
def clicks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("clicks") / "train.tsv"
    write_clicks(path, BATCHES * BATCH, seed=0)
    return path


@pytest.fixture
def sparsecores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs for SparseCores whose operations are the reference's: all but these operations is as on a TPU."""
    monkeypatch.setattr(
        "rooftop.embed.train.trainer.StepTarget",
        SimpleNamespace(of=lambda *_: StepTarget(kernel="sparsecore", cores_per_device=2)),
    )
    monkeypatch.setattr("rooftop.embed.train.trainer.compiler_options", lambda *_, **__: {})
    monkeypatch.setattr("rooftop.programs.embedding.lookup._lookup_on_sparsecores", _reference("_lookup"))
    monkeypatch.setattr(
        "rooftop.programs.embedding.lookup._update_on_sparsecores",
        lambda *arguments: (*_reference("_update")(*arguments[:-1]), arguments[-1]),
    )


def _reference(name: str) -> Any:
    import rooftop.programs.embedding.lookup as programs

    return getattr(programs, name)


def run(clicks: Path, folder: Path, **changed: Any) -> tuple[Trainer, list[float], Saved]:
    options: dict[str, Any] = {"tables": tables(), "data": clicks, "run": folder, "batch_samples": BATCH, "devices": 4}
    trainer = Trainer(EmbeddingTrainRequest(**{**options, "save_every": 2, **changed}))
    losses = trainer.train()
    return trainer, losses, newest_tables(folder)


def same(one: Saved, other: Saved) -> bool:
    slots = [(one.slots[name], other.slots[name]) for name in one.slots]
    pairs = [(one.tables[name], other.tables[name]) for name in one.tables]
    pairs += [pair for a, b in slots for pair in zip(a, b, strict=True)]
    return (one.step, one.updates) == (other.step, other.updates) and all(np.array_equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("pipelined", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_runs_on_sparsecores_are_those_of_the_reference(
    clicks: Path, tmp_path: Path, pipelined: bool, request: pytest.FixtureRequest
) -> None:
    _, losses, saved = run(clicks, tmp_path / "reference", pipelined=pipelined)
    request.getfixturevalue("sparsecores")
    trainer, actual, here = run(clicks, tmp_path / "whole", pipelined=pipelined)
    assert trainer.state.embedding.tables[trainer.stacking.stacks[0].name].ndim == 2
    assert actual == losses and same(saved, here)
    # Killed after four batches and gone on with; and one that a device of another kind began.
    run(clicks, tmp_path / "parts", pipelined=pipelined, steps=4)
    assert same(run(clicks, tmp_path / "parts", pipelined=pipelined)[2], here)
    assert trainer.evaluate(clicks) > 0.5


def test_runs_move_between_sparsecores_and_others(clicks: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    whole = run(clicks, tmp_path / "whole")[2]
    run(clicks, tmp_path / "moved", steps=2)
    request.getfixturevalue("sparsecores")
    assert same(run(clicks, tmp_path / "moved")[2], whole)
