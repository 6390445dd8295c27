"""``rooftop.train`` and ``rooftop.train_embedding``: requests or keywords in, results out."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from dataclasses import MISSING, fields
from pathlib import Path

import pytest

import rooftop
from rooftop.cli.embed import train as embed_verb
from rooftop.cli.train import command as train_verb
from rooftop.core.errors import RooftopError
from rooftop.embed.export import load
from rooftop.embed.train.request import EmbeddingTrainRequest
from rooftop.train.request import TrainRequest
from tests.support.embedding_run import BATCH, tables, write_clicks
from tests.support.training_runs import write_corpus


def test_a_run_by_keywords_and_resumed_by_a_request(tmp_path: Path) -> None:
    folder = write_corpus(tmp_path)
    result = rooftop.train(
        model=folder / "config.json", data=folder / "corpus", run=folder / "run", steps=2, vocab=300, seq_len=32,
        batch_seqs=8, samples=0, mesh="data=1",
    )  # fmt: skip
    assert result.step == 2 and result.stopped_by is None and result.last is not None
    assert [row["step"] for row in result.rows if "loss" in row] == [1, 2]
    assert result.rows[1]["loss"] == result.last.loss and result.rows[-1]["eval_loss"] == result.evaluation.loss
    assert repr(result).startswith("step 2 done; loss ") and repr(result).endswith(f"; run in {folder / 'run'}")
    request = TrainRequest.resumed(folder / "run", {"steps": 3})
    assert (request.batch_seqs, request.seq_len, request.decay_steps, request.axes) == (8, 32, 2, {"data": 1})
    resumed = rooftop.train(request)
    assert resumed.step == 3 and len([row for row in resumed.rows if "loss" in row]) == 3
    data = json.loads(json.dumps(resumed.to_json()))
    assert data["kind"] == "train" and data["last"] == resumed.rows[-2] and data["samples"] == []
    with pytest.raises(RooftopError, match=r"program.optimizer.learning_rate of the run .*: got 0.1; accepted: 0.0003"):
        rooftop.train(TrainRequest.resumed(folder / "run", {"learning_rate": 0.1}))
    with pytest.raises(RooftopError, match="devices: got 3; accepted: 8, as JAX has started with"):
        rooftop.train(TrainRequest.resumed(folder / "run", {"devices": 3}))


def test_tables_by_keywords_and_exported(tmp_path: Path) -> None:
    write_clicks(tmp_path / "train.tsv", 4 * BATCH, seed=0)
    asked = {"tables": tables(), "data": tmp_path / "train.tsv", "run": tmp_path / "run", "batch_samples": BATCH}
    result = rooftop.train_embedding(EmbeddingTrainRequest(**asked, devices=1, steps=2))
    assert (result.batches, result.begun_at, len(result.losses)) == (2, 0, 2)
    result = rooftop.train_embedding(**asked, devices=1)
    assert (result.batches, result.begun_at, len(result.losses)) == (4, 2, 2)
    assert [row["step"] for row in result.rows] == [1, 2, 3, 4]
    assert [row["loss"] for row in result.rows[2:]] == list(result.losses)
    assert repr(result).startswith(f"4 batches of {BATCH} samples, 2 of them before")
    exported = rooftop.export_embedding(tables=tables(), run=tmp_path / "run", output=tmp_path / "out", dtype="float32")
    assert [row["table"] for row in exported.rows] == list(load(tmp_path / "out")) == ["t1", "t2", "t3", "t4"]
    assert exported.to_json()["dtype"] == "f32" and repr(exported).endswith("as they were trained in 4 batches")
    with pytest.raises(RooftopError, match="request: got 'a request and steps'"):
        rooftop.train_embedding(EmbeddingTrainRequest(**asked), steps=2)


@pytest.mark.parametrize(("verb", "request_type"), [(train_verb, TrainRequest), (embed_verb, EmbeddingTrainRequest)])
def test_options_are_the_fields_of_the_request(verb, request_type) -> None:  # type: ignore[no-untyped-def]
    own = {"coordinator", "processes", "process", "resume", "as_json", "supervise", "max_restarts"}
    own |= {"request_file", "save_request"}
    options = {param.name: param for param in verb.params if param.name not in own}
    assert set(options) == {field.name for field in fields(request_type)}
    for field in fields(request_type):
        default = options[field.name].default
        # An option without a default, and a flag, have none of their own.
        if field.default is not MISSING and field.default not in (None, False, ()):
            assert default == field.default, field.name


def test_functions_show_the_fields_and_options_are_read_before_jax() -> None:
    assert set(inspect.signature(rooftop.train).parameters) == {field.name for field in fields(TrainRequest)}
    code = (
        "import sys, rooftop\nassert rooftop.train.__doc__\n"
        "try:\n    rooftop.train(run='r', data='d', steps=1, model='llama:1M', decay='cosin')\n"
        "except rooftop.core.errors.RooftopError as error:\n    print(error)\n"
        "assert 'jax' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("decay: got 'cosin'; accepted: did you mean cosine?")
