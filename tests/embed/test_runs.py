"""Training runs stay whole: folder, losses, checkpoints, seed, and signals."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rooftop.core.errors import Infeasible, RooftopError
from rooftop.embed.criteo import read_batches, require_labels
from rooftop.embed.train.checkpoint import newest_tables
from rooftop.embed.train.request import EmbeddingTrainRequest
from rooftop.embed.train.trainer import Trainer, require_memory
from rooftop.models.embedding_tables.stacking import stack_tables
from rooftop.models.embedding_tables.tables import SparseCoreConfig, TableOptimizer
from rooftop.runs.folder import RunFolder
from rooftop.runs.records import MetricsFile
from rooftop.runs.schedule import Schedule
from tests.conftest import Answer
from tests.support.embedding_run import BATCH, tables, write_clicks

BATCHES = 8


@pytest.fixture(scope="module")
def clicks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("clicks") / "train.tsv"
    write_clicks(path, BATCHES * BATCH, seed=0)
    return path


def trainer(clicks: Path, run: Path, **changed: Any) -> Trainer:
    asked: dict[str, Any] = {
        "tables": tables(),
        "data": clicks,
        "run": run,
        "batch_samples": BATCH,
        "devices": 1,
        "save_every": 2,
    }
    return Trainer(EmbeddingTrainRequest(**{**asked, **changed}))


def saved_arrays(run: Path) -> dict[str, np.ndarray]:
    saved = newest_tables(run)
    slots = {f"slot of {name} {index}": slot for name, own in saved.slots.items() for index, slot in enumerate(own)}
    return {**saved.tables, **slots, **saved.dense}


def compiled_steps() -> int:
    gc.collect()
    there = jax.devices()[0].client.live_executables()
    return sum(program.hlo_modules()[0].name == "jit_sequential_step" for program in there)


def test_what_was_compiled_goes_with_its_run(clicks: Path, tmp_path: Path) -> None:
    """And with limits that were too small: a process has room for so many programs."""
    before = compiled_steps()
    first = trainer(clicks, tmp_path / "run", steps=1)
    first.train()
    assert compiled_steps() == before + 1
    del first
    assert compiled_steps() == before


def test_a_seed_is_that_of_the_run(clicks: Path, tmp_path: Path) -> None:
    begun = trainer(clicks, tmp_path / "run", seed=5, steps=2)
    begun.train()
    with pytest.raises(
        RooftopError, match=r"seed of the run .*: got 4; accepted: 5, as it began; or another folder for a new run"
    ):
        trainer(clicks, tmp_path / "run", seed=4)
    assert trainer(clicks, tmp_path / "run").seed == trainer(clicks, tmp_path / "run", seed=5).seed == 5
    for wrong in (-1, 2**31):
        with pytest.raises(RooftopError, match="seed: got"):
            trainer(clicks, tmp_path / "none", seed=wrong)
    assert not (tmp_path / "none").exists()


def test_a_run_reads_the_data_that_it_began_with(clicks: Path, tmp_path: Path) -> None:
    """Whatever the file is called, and if there is more in it by now: batches are counted from its first."""
    trainer(clicks, tmp_path / "run", steps=2).train()
    before = saved_arrays(tmp_path / "run")
    other, grown = tmp_path / "other.tsv", tmp_path / "grown.tsv"
    write_clicks(other, BATCHES * BATCH, seed=3)
    with pytest.raises(
        RooftopError, match=r"data of the run .*: got '[0-9a-f]{64}'; accepted: '[0-9a-f]{64}', as it began"
    ):
        trainer(other, tmp_path / "run")
    assert all(np.array_equal(array, before[name]) for name, array in saved_arrays(tmp_path / "run").items())
    grown.write_bytes(clicks.read_bytes() + other.read_bytes())
    longer = trainer(grown, tmp_path / "run")
    assert longer.done == 2 and len(longer.train()) == 2 * BATCHES - 2


def test_slots_of_another_optimizer_are_refused(clicks: Path, tmp_path: Path) -> None:
    trainer(clicks, tmp_path / "run", steps=2).train()
    model = tables()
    # As many slots of the same shape: nothing but its name tells it apart.
    other = dataclasses.replace(model.tables[0], optimizer=TableOptimizer(kind="adam"))
    before = saved_arrays(tmp_path / "run")
    with pytest.raises(
        RooftopError, match=r"tables.t1.optimizer of the run .*: got 'adam'; accepted: 'adagrad', as it began"
    ):
        trainer(clicks, tmp_path / "run", tables=dataclasses.replace(model, tables=(other, *model.tables[1:])))
    fewer = dataclasses.replace(model, tables=model.tables[1:], features=model.features[1:])
    with pytest.raises(RooftopError, match=r"tables.t1 of the run .*: got nothing; accepted: {'shape': '40 x 8'"):
        trainer(clicks, tmp_path / "run", tables=fewer)
    larger = dataclasses.replace(model.tables[0], vocabulary=41)
    with pytest.raises(
        RooftopError, match=r"tables.t1.shape of the run .*: got '41 x 8'; accepted: '40 x 8', as it began"
    ):
        trainer(clicks, tmp_path / "run", tables=dataclasses.replace(model, tables=(larger, *model.tables[1:])))
    # Another learning rate is no other optimizer.
    slower = dataclasses.replace(model.tables[0], optimizer=TableOptimizer(kind="adagrad", learning_rate=0.1))
    slowed = trainer(clicks, tmp_path / "run", tables=dataclasses.replace(model, tables=(slower, *model.tables[1:])))
    assert slowed.done == 2 and all(
        np.array_equal(array, before[name]) for name, array in saved_arrays(tmp_path / "run").items()
    )


def test_losses_of_batches_that_are_trained_on_again_are_written_once(clicks: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    trainer(clicks, run, steps=4).train()
    file = run / "metrics.jsonl"
    whole = file.read_text()
    # Killed behind its losses and before its checkpoint, in the middle of a line.
    file.write_text(whole + '{"step": 5, "loss": 0.5}\n{"step": 6, "lo')
    assert trainer(clicks, run).done == 4 and file.read_text() == whole
    losses = trainer(clicks, run).train()
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert [one["step"] for one in records] == list(range(1, BATCHES + 1))
    assert [one["loss"] for one in records[4:]] == losses


def test_losses_without_a_number_or_a_place(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(file, step=3)
    assert not file.exists()
    for step, loss in ((7, 0.5), (8, float("nan")), (9, float("inf"))):
        metrics.append({"step": step, "loss": loss})
    assert [json.loads(line) for line in file.read_text().splitlines()] == [
        {"step": 7, "loss": 0.5}, {"step": 8, "loss": None}, {"step": 9, "loss": None},
    ]  # fmt: skip
    file.unlink()
    file.mkdir()
    metrics.append({"step": 10, "loss": 0.5})
    error = metrics.sync()
    assert error is not None and str(error).startswith("metrics: got")
    with pytest.raises(RooftopError, match="metrics: got"):
        MetricsFile(file, step=0)
    # It waited for its place.
    file.rmdir()
    assert metrics.sync() is None
    assert json.loads(file.read_text()) == {"step": 10, "loss": 0.5}


def test_a_run_without_a_whole_checkpoint_does_not_begin_anew(clicks: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    trainer(clicks, run, steps=4).train()
    for manifest in run.glob("checkpoints/*/manifest.json"):
        manifest.write_text("[]")
    with pytest.raises(
        RooftopError, match=r"checkpoint: got .*/4/manifest.json is a damaged file; .*/2/manifest.json is a"
    ):
        trainer(clicks, run)
    assert len(list(run.glob("checkpoints/*/manifest.json"))) == 2


def test_what_a_killed_writer_left_goes(clicks: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    left = run / "checkpoints" / "1.writing"
    left.mkdir(parents=True)
    (left / "0.npy").write_bytes(b"half")
    trainer(clicks, run, steps=2).train()
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["2"]


@pytest.mark.parametrize("pipelined", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_stopped_run_goes_on_bit_for_bit(clicks: Path, tmp_path: Path, pipelined: bool) -> None:
    trainer(clicks, tmp_path / "whole", pipelined=pipelined, save_every=3).train()
    stopped = trainer(clicks, tmp_path / "parts", pipelined=pipelined, save_every=3)
    # A pipeline is drained for a checkpoint: where there is one anyway.
    last = 3 if pipelined else 4
    asked = iter([False] * last + [True])
    assert len(stopped.train(stopped=lambda: next(asked))) == last and stopped.done == last
    rest = trainer(clicks, tmp_path / "parts", pipelined=pipelined, save_every=3)
    assert rest.train(stopped=lambda: True) == [] and rest.done == last
    assert len(rest.train()) == BATCHES - last
    whole, parts = saved_arrays(tmp_path / "whole"), saved_arrays(tmp_path / "parts")
    assert whole.keys() == parts.keys() and all(np.array_equal(array, parts[name]) for name, array in whole.items())


@pytest.mark.slow
def test_a_schedule_scales_tables_and_dense_part_alike(
    clicks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With half of the learning rates a run is that of rates which are half as large."""
    model = tables()
    halved = tuple(
        dataclasses.replace(
            table, optimizer=dataclasses.replace(table.optimizer, learning_rate=table.optimizer.learning_rate / 2)
        )
        for table in model.tables
    )
    asked: dict[str, Any] = {"steps": 4, "learning_rate": 0.02}
    with monkeypatch.context() as patch:
        patch.setattr(Schedule, "share", lambda self, step: jnp.float32(0.5))
        trainer(clicks, tmp_path / "half", **asked, decay="linear").train()
    smaller = {"tables": dataclasses.replace(model, tables=halved), "learning_rate": 0.01}
    trainer(clicks, tmp_path / "small", steps=4, **smaller).train()
    trainer(clicks, tmp_path / "full", **asked).train()
    half, small, full = (saved_arrays(tmp_path / name) for name in ("half", "small", "full"))
    for name, array in half.items():
        np.testing.assert_allclose(array, small[name], rtol=1e-5, atol=1e-6)
    assert not np.allclose(half["t1"], full["t1"], rtol=1e-3, atol=1e-3)
    # Behind a checkpoint the schedule goes on where it was.
    for name, stops in (("once", (6,)), ("twice", (2, 6))):
        for stop in stops:
            trainer(clicks, tmp_path / name, steps=stop, warmup=3, decay="cosine", decay_steps=6).train()
    once, twice = saved_arrays(tmp_path / "once"), saved_arrays(tmp_path / "twice")
    assert all(np.array_equal(array, twice[name]) for name, array in once.items())


@pytest.mark.parametrize("devices", [1, 2])
def test_emulated_devices_take_one_step_at_a_time(
    clicks: Path, tmp_path: Path, devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two at once may wait for each other for ever, on many devices and few cores."""
    begun = trainer(clicks, tmp_path / "run", steps=2, devices=devices, save_every=8)
    waited: list[object] = []
    real = jax.block_until_ready

    def wait(value: object) -> object:
        waited.append(value)
        return real(value)

    monkeypatch.setattr("rooftop.embed.train.step.jax.block_until_ready", wait)
    begun.train()
    assert len(waited) == (0 if devices == 1 else 2)


def test_a_folder_has_one_writer(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with RunFolder(path=folder).claimed():
        with pytest.raises(RooftopError, match="no other process trains in"), RunFolder(path=folder).claimed():
            pass
        assert folder.is_dir()
    assert not folder.exists()
    with RunFolder(path=folder).claimed():
        (folder / "file").write_text("")
    assert sorted(path.name for path in folder.iterdir()) == [".lock", "file"]


def test_tables_that_no_memory_here_holds() -> None:
    model = tables()
    wide = dataclasses.replace(model.tables[0], vocabulary=2**31 - 512, width=4096)
    config = SparseCoreConfig(enable_fast_table_initialization=True, disable_table_stacking=True)
    for own, on_host, fits in (
        (SparseCoreConfig(disable_table_stacking=True), False, False),
        (config, True, False),
        (config, False, True),
    ):
        stacking = stack_tables(
            dataclasses.replace(model, tables=(wide, *model.tables[1:]), config=own),
            cores=8,
            cores_per_device=2,
            batch=64,
        )
        if fits:
            require_memory(stacking, batch=64, on_host=on_host)
        else:
            with pytest.raises(Infeasible, match="of this machine's memory: it has"):
                require_memory(stacking, batch=64, on_host=on_host)


@pytest.mark.parametrize("count", ["9" * 30, "9" * 400, "9" * 5000])
def test_a_count_that_is_none_is_named(tmp_path: Path, count: str) -> None:
    path = tmp_path / "huge.tsv"
    path.write_text("\t".join(["1", count, *[""] * 12, *["0000000a"] * 26]) + "\n")
    with pytest.raises(RooftopError, match="line 1: got"):
        list(read_batches(path, tables(), 1))


def test_an_auc_needs_both_labels(clicks: Path, tmp_path: Path) -> None:
    require_labels(clicks, BATCH)
    lines = clicks.read_text().splitlines(keepends=True)
    one = tmp_path / "one.tsv"
    # What is behind the last whole batch is not read.
    one.write_text("".join(f"0{line[1:]}" for line in lines[:BATCH]) + f"1{lines[0][1:]}")
    with pytest.raises(RooftopError, match="positives and negatives, and not 0 positives of 64"):
        require_labels(one, BATCH)


TOML = """
[tables.t1]
vocabulary = 40
width = 8
[features.C1]
table = "t1"
"""


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--seed", "-1"), "seed: got '-1'"),
        (("--decay", "cosin"), "decay: got 'cosin'; accepted: did you mean cosine"),
        (("--warmup", "-3"), "warmup: got '-3'"),
        (("--warmup", "3", "--final-lr", "nan"), "final-lr: got 'nan'"),
        (("--lr", "nan"), "lr: got 'nan'"),
        (("--save-every", "0"), "save-every: got '0'"),
    ],
)
def test_one_line_for_what_a_run_cannot_be(
    rooftop: Callable[..., Answer], clicks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...], says: str,
) -> None:  # fmt: skip
    # It would tell this whole process to keep what it compiles.
    monkeypatch.setattr("rooftop.runs.environment.keep_compilations", lambda: None)
    (tmp_path / "t.toml").write_text(TOML)
    answer = rooftop(
        "embed",
        "train",
        str(tmp_path / "t.toml"),
        str(clicks),
        str(tmp_path / "run"),
        "--batch-samples",
        str(BATCH),
        *words,
    )
    assert answer.status == 2 and says in answer.err and answer.err.count("\n") == 1 and not answer.out
    assert not (tmp_path / "run").exists()


def test_a_signal_saves_and_the_same_command_goes_on(clicks: Path, tmp_path: Path) -> None:
    (tmp_path / "long.tsv").write_text(100 * clicks.read_text())
    (tmp_path / "t.toml").write_text(TOML)
    command = [
        sys.executable, "-m", "rooftop", "embed", "train", str(tmp_path / "t.toml"), str(tmp_path / "long.tsv"),
        str(tmp_path / "run"), "--batch-samples", str(BATCH), "--devices", "1", "--save-every", "1000000",
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        # It makes them before it trains; by then a signal waits for the batch that is under way.
        while run.poll() is None and not (tmp_path / "run" / "limits-2.json").exists():
            with suppress(subprocess.TimeoutExpired):
                run.wait(0.1)
        run.send_signal(signal.SIGTERM)
        out, err = run.communicate()
    assert run.returncode == 0 and "Traceback" not in err, (out, err)
    assert out.startswith("stopped by SIGTERM and saved: the same command goes on\n")
    batches = newest_tables(tmp_path / "run").step if list(tmp_path.glob("run/checkpoints/*")) else 0
    assert f"\n{batches} batches of {BATCH} samples, 0 of them before\n" in out and batches < 100 * BATCHES
