"""Files that anybody may write, damaged in every way: read, or refused in one line; never a traceback or a hang."""

from __future__ import annotations

import hashlib
import io
import json
import random
import resource
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import save as save_tensors

import rooftop
from rooftop.checkpoints.huggingface_files import Checkpoint
from rooftop.checkpoints.tokenizer import Tokenizer, train_bpe
from rooftop.compiler.cache import Cache
from rooftop.core.errors import Infeasible, RooftopError
from rooftop.core.files import read_json_object
from rooftop.core.ledger import Ledger
from rooftop.embed.export import load as load_export
from rooftop.explain.measured.report import explain
from rooftop.models import from_huggingface
from rooftop.models.embedding_tables.files import load_tables
from rooftop.plan.embedding.plan import EmbedPlan
from rooftop.plan.serving.plan import ServingPlan
from rooftop.plan.training.plan import TrainingPlan
from rooftop.programs.training.program import TrainProgram
from rooftop.runs.checkpoints import Checkpoints
from rooftop.runs.folder import RunFolder
from rooftop.runs.records import MetricsFile, read_records
from rooftop.simulate.serving.traces import read_trace
from rooftop.train.data.corpus import documents, find_corpus
from rooftop.train.data.tokens import token_arrays
from rooftop.train.request import TrainRequest
from rooftop.train.start import shrunk_plan
from rooftop.ui.opened import first_look, opened_text
from rooftop.validation.table import read_table
from tests.support.mutations import mutate
from tests.support.traces import tpu, xspace
from tests.support.training_runs import CONFIG

ROOT = Path(__file__).parents[2]
#: Mutated inputs of all readers, in the quick tests and in the slow ones.
QUICK, SLOW = 400, 100_000
#: Seconds that one input may take, and bytes that it may allocate.
LIMIT_S, LIMIT_BYTES = 20, 1 << 30


@dataclass(frozen=True)
class Reader:
    """A reader of a file of this name, and a content that it takes."""

    file: str
    content: bytes
    read: Callable[[Path], object]


def _plan(kind: Any) -> Callable[[Path], object]:
    return lambda path: kind.from_json(read_json_object(path, field="plan", accepted="a plan"))


def _training_plan(path: Path) -> object:
    """As ``rooftop train`` does before it has devices, and as the page of a plan shows it."""
    plan = _plan(TrainingPlan)(path)
    assert isinstance(plan, TrainingPlan)
    TrainProgram.from_spec(shrunk_plan(plan.spec, 8), "a plan that is executable")
    return plan.to_json()


def _texts(path: Path) -> object:
    return [len(document.text) for document in documents(find_corpus([str(path)]))]


def _request(path: Path) -> object:
    return TrainRequest.resumed(path.parent, {})


def _checkpoint(path: Path) -> object:
    """The manifest with a right hash of its own, as one is written by a stranger."""
    body = path.read_text(encoding="utf-8", errors="replace")
    folder = path.parent / "checkpoints" / "3"
    folder.mkdir(parents=True, exist_ok=True)
    sha256 = hashlib.sha256(body.encode()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps({"sha256": sha256, "manifest": body}))
    checkpoints = Checkpoints(folder.parent)
    try:
        return checkpoints.restore_arrays()
    finally:
        checkpoints.close()


def _sidecar(path: Path) -> object:
    path.with_suffix(".bin").write_bytes(bytes(32))
    return token_arrays(find_corpus([str(path.with_suffix(".bin"))]), vocab=300)


def _safetensors(path: Path) -> object:
    checkpoint = Checkpoint.open(path.parent)
    return [checkpoint.read(name, (slice(None),)) for name in checkpoint.tensors]


def _index(path: Path) -> object:
    (path.parent / "a.safetensors").write_bytes(TENSORS)
    return Checkpoint.open(path.parent)


def _cached(path: Path) -> object:
    cache = Cache(folder=path.parent)
    path.rename(cache._path({}))
    return cache.find({})


def _metrics(path: Path) -> object:
    try:
        return read_records(path)
    finally:
        MetricsFile(path, step=2)


def _export(path: Path) -> object:
    np.save(path.parent / "0.npy", np.zeros((3, 4), np.int8))
    return load_export(path.parent)


def _npy() -> bytes:
    data = io.BytesIO()
    np.save(data, np.arange(60, dtype=np.uint16).reshape(6, 10))
    return data.getvalue()


def _parquet() -> bytes:
    data = io.BytesIO()
    pq.write_table(pa.table({"text": ["some text", "more text"] * 20}), data)
    return data.getvalue()


TENSORS = save_tensors({"a": np.zeros((4, 4), np.float32), "b": np.zeros(3, np.float16)})
JSONL = b"\n".join(json.dumps({"text": f"document {number}"}).encode() for number in range(5)) + b"\n"
METRICS = b'{"step": 1, "loss": 2.5}\n{"step": 2, "loss": 2.25, "seconds": 0.5}\n{"step": 2, "eval_loss": 2.0}\n'


@pytest.fixture(scope="module")
def readers() -> dict[str, Reader]:
    """Every reader by a name."""
    training = rooftop.plan_training("llama3-8b", on="v5e:4x4", batch_seqs=32, seq=1024, mesh="fsdp=8,tensor=2")
    serving = rooftop.plan_serving("llama3-8b", on="v5e:2x4", prompt=512, generate=128)
    tables = (ROOT / "docs" / "tables.toml").read_bytes()
    embedding = rooftop.plan_embedding(ROOT / "docs" / "tables.toml", on="v5p:2x2x1", batch_samples=1024)
    plans = [json.dumps(result.to_json()).encode() for result in (training, serving, embedding)]
    trained = train_bpe(["some text to train on, some more text"], 270)
    model = training.plan.problem.model.to_json()
    request = {
        "kind": "run", "schema": 3, "job": {"program": {"computation": {"model": model}}},
        "mesh": {"fsdp": 8}, "devices": {"name": "8 x cpu"}, "sessions": [],
        "arguments": {"data": ["/data"], "steps": 3, "mesh": {"fsdp": 8}, "batch_seqs": 8, "seed": 0},
    }  # fmt: skip
    manifest = {
        "schema": 1, "step": 3, "extra": {"seed": 1}, "arrays": {"a": "float32[4]"},
        "files": {"state/a": {"bytes": 4, "sha256": "0" * 64}},
    }  # fmt: skip
    runs = (ROOT / "rooftop" / "validation" / "data" / "measured_runs.csv").read_bytes()
    export = {
        "kind": "embed-export", "schema": 1, "dtype": "int8", "levels": 256,
        "tables": {"item": {"file": "0.npy", "shape": [3, 4], "bytes": 12, "low": -1.0, "step": 0.01}},
    }  # fmt: skip
    entry = {"format": 1, "request": {}, "sources": {}, "result": {"a": 1}}
    trace = b'{"arrival_s": 0, "prompt_tokens": 5, "output_tokens": 6, "hashes": [1, 2]}\n' * 3
    csv = b"arrival_s,prompt_tokens,output_tokens\n0,4,5\n1.5,3,2\n"
    return {
        "training plan": Reader("plan.json", plans[0], _training_plan),
        "serving plan": Reader("plan.json", plans[1], _plan(ServingPlan)),
        "embedding plan": Reader("plan.json", plans[2], _plan(EmbedPlan)),
        "ledger": Reader(
            "ledger.json",
            json.dumps({"rows": json.loads(plans[0])["ledger"]}).encode(),
            lambda path: Ledger.from_json(read_json_object(path, field="ledger", accepted="rows").get("rows")),
        ),
        "config": Reader("config.json", json.dumps(CONFIG).encode(), lambda path: from_huggingface(path)),
        "tables": Reader("tables.toml", tables, load_tables),
        "jsonl": Reader("data.jsonl", JSONL, _texts),
        "parquet": Reader("data.parquet", _parquet(), _texts),
        "text": Reader("data.txt", b"some text\n", _texts),
        "npy": Reader("data.npy", _npy(), lambda path: token_arrays(find_corpus([str(path)]), vocab=300)),
        "sidecar": Reader("data.json", b'{"dtype": "uint16", "eos": 2}', _sidecar),
        "requests": Reader("trace.jsonl", trace, read_trace),
        "requests csv": Reader("trace.csv", csv, read_trace),
        "run": Reader("run.json", json.dumps(request).encode(), _request),
        "folder": Reader("run.json", json.dumps(request).encode(), lambda path: RunFolder(path=path.parent).read()),
        "metrics": Reader("metrics.jsonl", METRICS, _metrics),
        "manifest": Reader("manifest", json.dumps(manifest).encode(), _checkpoint),
        "tokenizer": Reader("tokenizer.json", trained.definition.encode(), lambda path: Tokenizer.load(path).bos),
        "safetensors": Reader("model.safetensors", TENSORS, _safetensors),
        "index": Reader("model.safetensors.index.json", b'{"weight_map": {"a": "a.safetensors"}}', _index),
        "validation": Reader("runs.csv", b"\n".join(runs.splitlines()[:4]) + b"\n", read_table),
        "export": Reader("tables.json", json.dumps(export).encode(), _export),
        "cache": Reader("entry.json", json.dumps(entry).encode(), _cached),
        "page": Reader("plan.json", plans[0], lambda path: opened_text(path.name, path.read_bytes())),
        "page of a run": Reader("run.json", json.dumps(request).encode(), lambda path: first_look(path.parent)),
        "trace": Reader("host.xplane.pb", xspace(tpu(), tpu(1)), lambda path: explain(path).to_json()),
    }


class _Hung(BaseException):
    """An input that took longer than it may."""


def _on_alarm(number: int, frame: FrameType | None) -> None:
    raise _Hung(f"no answer in {LIMIT_S} s")


def run(reader: Reader, content: bytes, folder: Path) -> str:
    """Read the content as a file; what is wrong with that, empty if it was read, or refused in one line."""
    folder.mkdir()
    path = folder / reader.file
    path.write_bytes(content)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    try:
        reader.read(path)
    except (RooftopError, Infeasible) as error:
        line = str(error)
        if "\n" in line or "\x1b" in line or len(line) > 3000:
            return f"no short line: {line[:300]!r}"
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # panics of other languages too
        return f"{type(error).__name__}: {error}"[:300]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    return f"{grown:,} bytes more memory" if grown > LIMIT_BYTES else ""


@pytest.fixture
def alarm() -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, _on_alarm)
    yield
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("count", [QUICK, pytest.param(SLOW, marks=pytest.mark.slow)])
def test_every_reader_takes_or_refuses_damaged_files(
    readers: dict[str, Reader], tmp_path: Path, alarm: None, count: int
) -> None:
    failures, share = dict[str, str](), count // len(readers)
    for name, reader in readers.items():
        assert not run(reader, reader.content, tmp_path / name) or name == "manifest", name
        for seed in range(share):
            content = mutate(reader.content, random.Random(f"{name} {seed}"))
            if problem := run(reader, content, tmp_path / f"{name} {seed}"):
                failures[f"{name} {seed}"] = problem
    assert not failures, "\n".join(f"{key}: {problem}" for key, problem in failures.items())
