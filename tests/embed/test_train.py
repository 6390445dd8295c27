"""A DLRM on clicks with a planted signal: it learns, survives kill -9 bit for bit, and moves to other devices."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rooftop.core.errors import Infeasible, RooftopError
from rooftop.embed.criteo import FEATURES, auc, count_batches, read_batches
from rooftop.embed.host.limits import read_limits, write_limits
from rooftop.embed.train.checkpoint import newest_tables
from rooftop.embed.train.request import EmbeddingTrainRequest
from rooftop.embed.train.trainer import Trainer, check_dense, check_finite
from rooftop.explain.measured.report import explain
from rooftop.models.embedding_tables.limits import StackLimits
from rooftop.models.embedding_tables.stacking import stack_tables
from rooftop.models.embedding_tables.tables import Initializer
from rooftop.profile.planes import read_trace
from tests.support import embedding_run
from tests.support.embedding_run import BATCH, LEARNING_RATE, tables, write_clicks

BATCHES = 24


@pytest.fixture(scope="module")
def clicks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clicks")
    write_clicks(folder / "train.tsv", BATCHES * BATCH, seed=0)
    write_clicks(folder / "test.tsv", 8 * BATCH, seed=1)
    return folder


def options(clicks: Path, run: Path, **changed: object) -> EmbeddingTrainRequest:
    asked: dict[str, object] = {"tables": tables(), "data": clicks / "train.tsv", "run": run, "batch_samples": BATCH}
    return EmbeddingTrainRequest(**{**asked, "devices": 4, "save_every": 4, **changed})  # type: ignore[arg-type]


def equal(one: Path, other: Path) -> bool:
    """True if the newest checkpoints of two runs hold the same bits."""
    a, b = newest_tables(one), newest_tables(other)
    assert (a.step, a.updates, a.job) == (b.step, b.updates, b.job)
    arrays = [(a.tables[name], b.tables[name]) for name in a.tables] + [
        (x, y) for name in a.slots for x, y in zip(a.slots[name], b.slots[name], strict=True)
    ]
    arrays += [(a.dense[name], b.dense[name]) for name in a.dense]
    return all(x.tobytes() == y.tobytes() for x, y in arrays)


def learn(clicks: Path, run: Path, *, pipelined: bool) -> None:
    """Train on all batches; raises AssertionError where nothing is learnt."""
    trainer = Trainer(options(clicks, run, pipelined=pipelined, learning_rate=LEARNING_RATE))
    before = trainer.evaluate(clicks / "test.tsv")
    losses = trainer.train()
    assert len(losses) == BATCHES
    metrics = trainer.evaluate(clicks / "test.tsv")
    assert abs(before - 0.5) < 0.1 and metrics > 0.7, (before, metrics)


@pytest.mark.slow
def test_it_learns_a_planted_signal(clicks: Path, tmp_path: Path) -> None:
    learn(clicks, tmp_path / "run", pipelined=False)


def test_a_pipelined_run_learns_and_killed_at_any_moment_goes_on_bit_for_bit(clicks: Path, tmp_path: Path) -> None:
    script = [sys.executable, embedding_run.__file__, str(clicks / "train.tsv")]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    killed = tmp_path / "killed"
    process = subprocess.Popen([*script, str(killed), "4", "pipelined"], env=environment)
    while process.poll() is None and not list(killed.glob("checkpoints/[0-9]/manifest.json")):
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.1)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    saved = newest_tables(killed)
    assert saved.step < BATCHES
    rest = Trainer(options(clicks, killed, pipelined=True, learning_rate=LEARNING_RATE)).train()
    assert len(rest) == BATCHES - saved.step
    learn(clicks, tmp_path / "whole", pipelined=True)
    assert equal(killed, tmp_path / "whole")


def test_limits_grow_where_a_batch_cannot_be_split(clicks: Path, tmp_path: Path) -> None:
    lines = [line.split("\t") for line in (clicks / "train.tsv").read_text().splitlines()[: 8 * BATCH]]
    # From the fifth batch on everyone looks up the same rows, more than a pass may: that no split helps.
    for line in lines[5 * BATCH :]:
        line[14:18] = ["00000001"] * 4
    data, limits = tmp_path / "skewed.tsv", tmp_path / "limits.json"
    data.write_text("".join("\t".join(line) + "\n" for line in lines))
    stacking = stack_tables(tables(), cores=2, cores_per_device=2, batch=BATCH)
    small = {stack.name: StackLimits(max_ids=24, max_unique_ids=24, buffer=256) for stack in stacking.stacks}
    write_limits(limits, small, stacking, batch=BATCH)
    asked: dict[str, Any] = {"data": data, "devices": 1, "save_every": 3}
    whole = Trainer(options(clicks, tmp_path / "whole", limits=limits, **asked))
    grown: list[tuple[int, int]] = []
    assert len(whole.train(lambda done, last: grown.append((done, last)))) == 8
    assert grown == [(done, 8) for done in range(8)] and whole.passes > 1 and whole.dropped == 0
    after = read_limits(whole.limits_file, stacking, batch=BATCH)
    assert all(one.max_ids >= 32 and one.buffer >= 256 for one in after.values())
    # Ended where they grew and gone on with: the same bits, and every loss is written down once.
    parts = tmp_path / "parts"
    Trainer(options(clicks, parts, limits=limits, steps=5, **asked)).train()
    assert read_limits(parts / whole.limits_file.name, stacking, batch=BATCH) == small
    Trainer(options(clicks, parts, **asked)).train()
    assert equal(tmp_path / "whole", parts)
    assert (parts / "metrics.jsonl").read_text() == (tmp_path / "whole" / "metrics.jsonl").read_text()
    assert read_limits(parts / whole.limits_file.name, stacking, batch=BATCH) == after


@pytest.mark.slow
def test_a_run_moves_to_other_devices(clicks: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    eight = Trainer(options(clicks, run, devices=8, steps=8, learning_rate=1e-2))
    eight.train()
    four = Trainer(options(clicks, run, devices=4, learning_rate=1e-2))
    assert four.done == 8 and four.evaluate(clicks / "test.tsv") == eight.evaluate(clicks / "test.tsv")
    assert len(four.train()) == BATCHES - 8 and four.evaluate(clicks / "test.tsv") > 0.6


def test_a_damaged_checkpoint_is_passed_over(clicks: Path, tmp_path: Path) -> None:
    Trainer(options(clicks, tmp_path / "run", devices=1, steps=8)).train()
    folder = tmp_path / "run" / "checkpoints"
    newest = max((path for path in (folder / "8").rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    newest.write_bytes(newest.read_bytes()[:-1])
    assert newest_tables(tmp_path / "run").step == 4
    resumed = Trainer(options(clicks, tmp_path / "run", devices=1, steps=8))
    assert resumed.done == 4 and len(resumed.refused) == 1 and str(newest) in resumed.refused[0]


def test_a_batch_is_what_the_lines_say(tmp_path: Path) -> None:
    path = tmp_path / "three.tsv"
    counts, categories = ["3"] + [""] * 12, ["0000000a", ""] + ["ffffffff"] * 24
    good = "\t".join(["1", *counts, *categories])
    path.write_text("\n".join([good, good.replace("1\t3", "0\t-2", 1), good]) + "\n")
    (batch,) = read_batches(path, tables(), 2)
    assert batch.label.tolist() == [1, 0] and count_batches(path, 2) == 1
    assert batch.dense[:, 0].tolist() == [np.log1p(np.float32(3)), 0] and not batch.dense[:, 1:].any()
    sizes = [table.vocabulary for table in tables().tables]
    assert [int(batch.ids[name][0]) for name in FEATURES[:4]] == [
        1 + 10 % (sizes[0] - 1), 0, 1 + 0xFFFFFFFF % (sizes[2] - 1), 1 + 0xFFFFFFFF % (sizes[3] - 1),
    ]  # fmt: skip


@pytest.mark.parametrize("change", [("1\t3", "2\t3"), ("1\t3", "1\tx"), ("\tffffffff", ""), ("0000000a", "0000000g")])
def test_a_line_of_another_format_is_named(tmp_path: Path, change: tuple[str, str]) -> None:
    path = tmp_path / "bad.tsv"
    good = "\t".join(["1", *(["3"] + [""] * 12), *(["0000000a", ""] + ["ffffffff"] * 24)])
    path.write_text("\n".join([good, good.replace(*change, 1)]) + "\n")
    with pytest.raises(RooftopError, match="line 2"):
        list(read_batches(path, tables(), 2))


def test_auc_counts_pairs() -> None:
    random = np.random.default_rng(0)
    labels, scores = random.integers(0, 2, 60), random.integers(0, 9, 60)
    pairs = [(p > n) + 0.5 * (p == n) for p in scores[labels == 1] for n in scores[labels == 0]]
    assert abs(auc(labels, scores) - np.mean(pairs)) < 1e-12
    with pytest.raises(RooftopError, match="positives"):
        auc(np.ones(3), np.zeros(3))


def test_a_number_that_is_none_is_named_with_its_table_and_batch(clicks: Path, tmp_path: Path) -> None:
    trainer = Trainer(options(clicks, tmp_path / "run", devices=1))
    stack, place = trainer.stacking.place("t2")
    check_finite(trainer.state.embedding, trainer.stacking, 7)
    core = (5 + place.rotation) % trainer.stacking.cores
    at = (core, place.offset + 5 // trainer.stacking.cores, 3)
    state = trainer.state.embedding
    broken: Any = np.array(state.tables[stack.name])
    broken[at] = np.nan
    state = dataclasses.replace(state, tables={**state.tables, stack.name: broken})
    with pytest.raises(Infeasible, match=r"table t2 after batch 7: 1 rows .* first row 5"):
        check_finite(state, trainer.stacking, 7)
    check_dense({"a": np.zeros(3)}, 7)
    with pytest.raises(Infeasible, match=r"dense part after batch 7: 2 values of b that are no finite numbers"):
        check_dense({"a": np.zeros(3), "b": np.array([np.inf, 1, np.nan])}, 7)


def test_the_check_names_the_batch_that_broke_a_table(clicks: Path, tmp_path: Path) -> None:
    model = tables()
    wild = dataclasses.replace(model.tables[2], initializer=Initializer(kind="constant", parameters=(("value", 3e38),)))
    model = dataclasses.replace(model, tables=(*model.tables[:2], wild, *model.tables[3:]))
    late = Trainer(options(clicks, tmp_path / "late", tables=model, devices=1, save_every=8))
    with pytest.raises(Infeasible, match="after batch 8:"):
        late.train()
    checked = Trainer(options(clicks, tmp_path / "run", tables=model, devices=1, save_every=8, checks=("nan",)))
    with pytest.raises(Infeasible, match=r"table t\d after batch [1-7]:"):
        checked.train()


def test_checks_of_sparsecores_need_sparsecores(clicks: Path, tmp_path: Path) -> None:
    with pytest.raises(RooftopError, match=r"check: got 'bounds'; accepted: nan: .* not for cpu"):
        Trainer(options(clicks, tmp_path / "run", checks=("nan", "bounds")))


def test_a_trace_tells_batches_tables_and_what_was_dropped(clicks: Path, tmp_path: Path) -> None:
    trainer = Trainer(options(clicks, tmp_path / "run", steps=4, profile=(2, 3), devices=2))
    trainer.train()
    trace = read_trace(trainer.folder.profile)
    lines = [line.read(("dropped_ids", "minibatches")) for host in trace.hosts for line in host.threads]
    dropped, passes = (
        np.concatenate([stats.stats[name].values[stats.stats[name].present] for stats in lines])
        for name in ("dropped_ids", "minibatches")
    )
    assert dropped.tolist() == [0, 0] and len(passes) == 2 and (passes >= 1).all()
    explained = explain(trainer.folder.profile).to_json()
    assert [step["number"] for step in explained["steps"]] == [2, 3]
    scopes = {row["scope"] for row in explained["rows"]}
    assert any(scope.startswith("tables/") and scope.endswith("/lookup") for scope in scopes), scopes
