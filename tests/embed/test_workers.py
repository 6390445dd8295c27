"""Batches made ready by other processes: the same as here, in their order, whatever goes wrong with one of them."""

from __future__ import annotations

import json
import os
import pickle
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing
from copy import deepcopy
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rooftop.core.errors import RooftopError
from rooftop.embed.host import workers as worker_processes
from rooftop.embed.host.buffers import Buffers
from rooftop.embed.host.limits import estimate, observe
from rooftop.embed.host.overflow import LimitsExceeded
from rooftop.embed.host.preprocess import Preprocessed, Preprocessor
from rooftop.embed.host.workers import Line, Ready, make_ready
from rooftop.embed.train.request import EmbeddingTrainRequest
from rooftop.embed.train.trainer import Trainer
from tests.conftest import Answer
from tests.support.embedding_batches import ROWS, SAMPLES, STACKING, Batch, drawn, modules, split, split_or_die
from tests.support.embedding_run import BATCH, tables, write_clicks


def preprocessor(**asked: Any) -> Callable[[], Preprocessor]:
    seen = observe(Preprocessor(STACKING, batch=SAMPLES), (drawn(number)[1] for number in range(20)))
    return partial(Preprocessor, STACKING, batch=SAMPLES, limits=estimate(seen, STACKING), **asked)


def copied(ready: Ready[Any]) -> tuple[Any, Preprocessed]:
    """A copy of the buffers that the next batch overwrites."""
    return ready.rest, deepcopy(ready.made)


def same(one: Buffers, other: Buffers) -> bool:
    return all(
        np.array_equal(getattr(one, name), getattr(other, name), equal_nan=name == "gains") for name in Buffers._fields
    )


@pytest.mark.parametrize(
    ("minibatching", "workers"),
    [(False, 1), (True, 3), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((False, 3), (True, 1)))],
)
def test_batches_are_those_made_ready_here_and_come_in_order(workers: int, minibatching: bool) -> None:
    """More of them than lie with all workers at once; and what is kept of one is not that of the next."""
    make = preprocessor(minibatching=minibatching)
    batches = [drawn(number) for number in range(20)]
    here = [copied(one) for one in make_ready(iter(batches), split, make)]
    there = [copied(one) for one in make_ready(iter(batches), split, make, workers=workers)]
    assert len(here) == len(there) == len(batches)
    for number, ((rest, batch), (other_rest, other)) in enumerate(zip(here, there, strict=True)):
        assert rest.tolist() == other_rest.tolist() == [number] * 3
        assert batch.minibatches == other.minibatches
        assert all(same(batch.buffers[name], other.buffers[name]) for name in batch.buffers)
        assert batch.statistics.stacks.keys() == other.statistics.stacks.keys()
        for name, one in batch.statistics.stacks.items():
            for field in fields(one):
                assert np.array_equal(getattr(one, field.name), getattr(other.statistics.stacks[name], field.name))


def test_a_batch_that_is_larger_than_any_before() -> None:
    """Memory that two processes share grows with what goes through it."""
    make = partial(preprocessor(), out_of_range="off")
    sizes = [1, 2, 6, 3, 6, 1, 5]
    batches = [drawn(number, most) for number, most in enumerate(sizes)]
    here = [copied(one)[1] for one in make_ready(batches, split, make)]
    there = [copied(one)[1] for one in make_ready(batches, split, make, workers=2)]
    for one, other in zip(here, there, strict=True):
        assert all(same(one.buffers[name], other.buffers[name]) for name in one.buffers)


def bad_id() -> Batch:
    number, features = drawn(3)
    features["x"][0][0] = ROWS + 5
    return number, features


#: Where it goes wrong -> what stands in the fourth place, the error and its text.
WRONG: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "split": (lambda: (-7, {}), RooftopError, r"number: got -7; accepted: one from 0 on"),
    "ids": (
        bad_id, RooftopError, r"features.x: got '1 ids out of range, first 105 in row 0'; accepted: ids from 0 to 99",
    ),
    "limits": (lambda: drawn(3, 60), LimitsExceeded, r"limits of stack .*: max_ids: got"),
    "reading": (lambda: OSError("the disk is gone"), OSError, "the disk is gone"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("workers", "where"),
    [
        *((0, where) for where in WRONG),
        (2, "limits"),
        (2, "reading"),
        *(pytest.param(2, where, marks=pytest.mark.slow) for where in ("split", "ids")),
    ],
)
def test_what_is_wrong_with_a_batch_is_said_in_its_turn(workers: int, where: str) -> None:
    """Those before it come first: also where it is the reading that fails."""
    wrong, kind, says = WRONG[where]

    def read() -> Iterator[Batch]:
        yield from (drawn(number) for number in range(3))
        fourth = wrong()
        if isinstance(fourth, Exception):
            raise fourth
        yield fourth

    came = list[int]()
    with pytest.raises(kind, match=says) as caught:
        for one in make_ready(read(), split, preprocessor(), workers=workers):
            came.append(int(one.rest[0]))
    assert came == [0, 1, 2] and type(caught.value) is kind


def test_a_worker_that_fails_says_where_and_one_that_is_killed_how() -> None:
    came, killed = list[int](), partial(split_or_die, how="killed")
    with pytest.raises(RooftopError, match=r"workers: got 'one of 2 that ended with signal 9'; accepted: fewer"):
        for one in make_ready([drawn(number) for number in range(9)], killed, preprocessor(), workers=2):
            came.append(one.rest)
    # The batch in the other worker ends with it, if it is not ready yet.
    assert came in ([0], [0, 1])
    with pytest.raises(ZeroDivisionError, match="in a worker") as caught:
        list(make_ready([drawn(2)], partial(split_or_die, how="raised"), preprocessor(), workers=1))
    assert "split_or_die" in caught.value.__notes__[0]


def test_warnings_of_workers_are_said_here() -> None:
    bad_id = drawn(0)
    bad_id[1]["y"][0][0] = -1
    with pytest.warns(UserWarning, match=r"features.y: 1 ids out of range, first -1"):
        (one,) = make_ready([bad_id], split, preprocessor(out_of_range="warn"), workers=1)
    assert one.made.statistics.out_of_range == {"x": 0, "y": 1}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(make_ready([drawn(0)], split, preprocessor(), workers=1))


def children() -> set[int]:
    listed = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
    return set(map(int, listed.read_text().split())) if listed.exists() else set()


def test_workers_end_with_what_they_were_asked_for() -> None:
    before = children()
    with closing(make_ready((drawn(n) for n in range(1000)), split, preprocessor(), workers=2)) as ready:
        assert int(next(ready).rest[0]) == 0
    assert children() <= before
    assert not list(make_ready([], split, preprocessor(), workers=2)) and children() <= before


def test_workers_import_neither_jax_nor_what_the_run_is_of() -> None:
    (one,) = make_ready([drawn(0)], modules, preprocessor(), workers=1)
    assert "rooftop.embed.host.preprocess" in one.rest and not one.rest & {
        "jax",
        "rooftop.embed.train.trainer",
        "click",
    }


@pytest.mark.parametrize("wrong", [-1, 257, 1.5, True, "2"])
def test_numbers_of_workers(wrong: Any) -> None:
    with pytest.raises(RooftopError, match=r"workers: got .*; accepted: a whole number from 0 to 256"):
        make_ready([], split, preprocessor(), workers=wrong)


def test_a_process_reads_what_another_writes_in_place() -> None:
    ends = socket.socketpair()
    one, other = (Line(end) for end in ends)
    sent = {"a": np.arange(1000), "b": (np.ones((3, 5), np.float32), "text"), "none": np.empty(0)}
    spans = one.send(4, sent)
    mine = one.shared(4, spans)
    place, got = other.receive()
    assert place == 4 and got["b"][1] == "text" and np.array_equal(got["a"], sent["a"])
    assert np.array_equal(got["b"][0], sent["b"][0]) and got["none"].size == 0
    got["a"][7] = -1
    assert mine["a"][7] == -1 and sent["a"][7] == 7
    # What fits goes to the same memory; what does not to some of its own.
    one.send(4, np.zeros(10, np.int64))
    assert other.receive()[1].tolist() == [0] * 10
    one.send(4, np.ones(100_000))
    large = other.receive()[1]
    one.close()
    assert large.sum() == 100_000
    with pytest.raises(EOFError):
        other.receive()
    other.close()
    assert large.sum() == 100_000


def test_where_there_is_no_room_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ends = socket.socketpair()
    one, other = (Line(end) for end in ends)
    # The memory is full: a file goes where temporary files do.
    monkeypatch.setattr(worker_processes, "_MEMORY", tmp_path / "none")
    one.send(0, np.arange(10))
    assert other.receive()[1].tolist() == list(range(10))
    monkeypatch.setattr(worker_processes.tempfile, "gettempdir", lambda: str(tmp_path / "nor here"))
    with pytest.raises(RooftopError, match=r"memory: got '\d+ bytes to hand to another process'; accepted: room"):
        one.send(0, np.arange(100_000))
    one.send(0, np.arange(5))
    assert other.receive()[1].tolist() == list(range(5))
    one.close(), other.close()


def test_copies_of_buffers_lie_elsewhere() -> None:
    for own in preprocessor()().buffers().values():
        for copied in (deepcopy(own), pickle.loads(pickle.dumps(own))):
            assert same(own, copied)
            assert not np.shares_memory(own.embedding_ids, copied.embedding_ids)


@pytest.fixture(scope="module")
def clicks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("clicks") / "train.tsv"
    write_clicks(path, 20 * BATCH, seed=0)
    return path


def trained(clicks: Path, run: Path, **asked: Any) -> tuple[Trainer, list[float]]:
    asked = {"tables": tables(), "data": clicks, "run": run, "batch_samples": BATCH, "devices": 1, **asked}
    trainer = Trainer(EmbeddingTrainRequest(save_every=4, **asked))
    return trainer, trainer.train()


@pytest.mark.slow
def test_a_run_with_workers_is_the_same_run(clicks: Path, tmp_path: Path) -> None:
    """Bit for bit, in two parts as well; and what is evaluated too."""
    here, losses = trained(clicks, tmp_path / "here")
    _, first = trained(clicks, tmp_path / "there", workers=2, steps=7)
    there, second = trained(clicks, tmp_path / "there", workers=2)
    assert losses == first + second and len(losses) == 20
    assert here.evaluate(clicks) == there.evaluate(clicks)
    names = [(run / "metrics.jsonl").read_text() for run in (tmp_path / "here", tmp_path / "there")]
    assert names[0] == names[1]


@pytest.mark.slow
def test_limits_grow_for_a_batch_of_a_worker(tmp_path: Path) -> None:
    """The first batches look one row up; later ones, which were made ready ahead, many."""
    path, few = tmp_path / "clicks.tsv", "\t".join(["1", *["1"] * 13, *["5"] * 26]) + "\n"
    many = tmp_path / "many.tsv"
    write_clicks(many, 4 * BATCH, seed=1)
    path.write_text(few * (18 * BATCH) + many.read_text())
    _, losses = trained(path, tmp_path / "here", steps=18)
    before = json.loads((tmp_path / "here" / "limits-2.json").read_text())
    _, more = trained(path, tmp_path / "here")
    _, others = trained(path, tmp_path / "there", workers=2)
    assert losses + more == others and len(others) == 22
    after, there = (json.loads((tmp_path / run / "limits-2.json").read_text()) for run in ("here", "there"))
    assert after == there != before


@pytest.mark.slow
def test_a_line_of_another_format_stops_a_run_where_it_stands(clicks: Path, tmp_path: Path) -> None:
    path = tmp_path / "clicks.tsv"
    lines = clicks.read_text().splitlines()
    lines[17 * BATCH + 3] = "2" + lines[17 * BATCH + 3][1:]
    path.write_text("\n".join(lines) + "\n")
    run = tmp_path / "run"
    with pytest.raises(RooftopError, match=rf"line {17 * BATCH + 4}: got 'a label that is neither 0 nor 1'"):
        trained(path, run, workers=2)
    # The last checkpoint holds what was trained before.
    trainer, losses = trained(clicks, run, workers=2)
    assert (trainer.done, len(losses)) == (20, 4)


def test_workers_from_the_command_line(
    rooftop: Callable[..., Answer], clicks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Told of like any other option."""
    # It would tell this whole process to keep what it compiles.
    monkeypatch.setattr("rooftop.runs.environment.keep_compilations", lambda: None)
    toml = tmp_path / "tables.toml"
    toml.write_text(
        "".join(f'[tables.t{n}]\nvocabulary = 40\nwidth = 8\n[features.C{n}]\ntable = "t{n}"\n' for n in (1, 2))
    )
    asked = ["embed", "train", str(toml), str(clicks), str(tmp_path / "run"), "--batch-samples", str(BATCH), "--json"]
    said = json.loads(rooftop(*asked, "--workers", "2").out)
    assert said["batches"] == 20
    refused = rooftop(*asked, "--workers", "1000")
    assert refused.status == 2 and "workers: got 1000; accepted: a whole number from 0 to 256" in refused.err
    assert len(refused.err.splitlines()) == 1


KILLED = """
import sys, time
sys.path.insert(0, {root!r})
from functools import partial
from tests.support.embedding_batches import SAMPLES, STACKING, drawn, split
from rooftop.embed.host.limits import estimate
from rooftop.embed.host.preprocess import Preprocessor
from rooftop.embed.host.workers import make_ready
limits = estimate(Preprocessor(STACKING, batch=SAMPLES).observe(drawn(0)[1]), STACKING, headroom=4)
make = partial(Preprocessor, STACKING, batch=SAMPLES, limits=limits)
ready = make_ready((drawn(n) for n in range(10**6)), split, make, workers=2)
next(ready)
from pathlib import Path
import os
print(Path(f"/proc/{{os.getpid()}}/task/{{os.getpid()}}/children").read_text(), flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="children are listed on Linux alone")
def test_workers_of_a_process_that_is_killed_end() -> None:
    code = KILLED.format(root=str(Path(__file__).parents[2]))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        theirs = [int(number) for number in process.stdout.readline().split()]
        process.kill()
        process.wait()
    assert len(theirs) == 2

    def running(number: int) -> bool:
        status = Path(f"/proc/{number}/status")
        return status.exists() and "State:\tZ" not in status.read_text()

    for _ in range(600):
        if not any(running(number) for number in theirs):
            return
        time.sleep(0.1)
    raise AssertionError("workers outlive the process that they work for")
