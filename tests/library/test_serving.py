"""The library's functions of serving and embedding: the same answers as their verbs, from values or strings."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import rooftop as library
from rooftop.core.errors import Infeasible, RooftopError
from rooftop.hardware import Slice, chip
from rooftop.library.results import Result

Run = Callable[..., Any]
TOML = '[tables.user]\nvocabulary = 100000\nwidth = 64\n[features.user_id]\ntable = "user"\n'


def check(result: Result) -> None:
    """Every result has JSON, flat rows, a short repr and a page for notebooks."""
    json.dumps(result.to_json(), allow_nan=False)
    assert result.rows and all(not isinstance(cell, (dict, list)) for row in result.rows for cell in row.values())
    assert repr(result) == result.summary and result.summary.count("\n") <= 2
    assert "<table" in result._repr_html_()


def test_a_serving_plan_is_that_of_the_verb(rooftop: Run) -> None:
    options = ("--prompt", "1Ki", "--generate", "100", "--batch-seqs", "8", "--weights-dtype", "INT8", "--tpot", "1s")
    printed = rooftop("plan", "serve", "llama3-8b", "--on", "v5e:2x2", *options, "--json").json
    result = library.plan_serving(
        "llama3-8b", on=Slice.parse("v5e:2x2"), prompt=1024, generate=100, batch_seqs=8, weights_dtype="int8", tpot=1.0
    )
    assert json.loads(json.dumps(result.to_json())) == printed
    check(result)
    assert {row["phase"] for row in result.rows} == {"generate", "prefill"}
    assert result.page().startswith("<!doctype html>")
    result.raise_if_infeasible()
    slow = library.plan_serving("llama3-8b", on="v5e:2x2", batch_seqs=8, prompt="1Ki", generate=100, tpot="1ms")
    with pytest.raises(Infeasible, match="misses its TPOT"):
        slow.raise_if_infeasible()


def test_a_recommendation_is_that_of_the_verb(rooftop: Run) -> None:
    job = ("plan", "serve", "llama3-8b", "--on", "v5e,v6e", "--kv-dtype", "bf16")
    result = library.plan_serving("llama3-8b", on=[chip("v5e"), "v6e"], requests_per_second=10, kv_dtype=["bf16"])
    assert json.loads(json.dumps(result.to_json())) == rooftop(*job, "--requests-per-second", "10", "--json").json
    check(result)
    front = library.serving_front("llama3-8b", on="v5e,v6e", kv_dtype="bf16")
    assert json.loads(json.dumps(front.to_json())) == rooftop(*job, "--for", "pareto", "--json").json
    check(front)


def test_a_simulation_is_that_of_the_verb(rooftop: Run, tmp_path: Path) -> None:
    plan = library.plan_serving("llama3-8b", on="v5e:2x2", prompt=1000, generate=100, batch_seqs=8)
    file = tmp_path / "plan.json"
    plan.write_plan(file)
    options = ("--requests-per-second", "2", "--duration", "30s", "--seed", "3", "--host-dram", "16G", "--preemption")
    printed = rooftop("simulate", str(file), *options, "swap", "--json").json
    more: Any = {"requests_per_second": "2", "duration": 30.0, "seed": 3, "host_dram": 16 * 10**9, "preemption": "swap"}
    result = library.simulate(plan, **more)
    answer, of_file = (json.loads(json.dumps(sim.to_json())) for sim in (result, library.simulate(file, **more)))
    assert of_file == printed
    # A plan that was not read from a file stands in the request.
    assert answer.pop("request").pop("plan") == json.loads(file.read_text())
    assert answer == {name: value for name, value in printed.items() if name != "request"}
    assert result.deployment.host_kv_tokens == pytest.approx(16e9 / (2 * 32 * 8 * 128 * 2), abs=1)
    assert len(result.rows) == 60
    check(result)


def test_embedding_is_that_of_the_verbs(rooftop: Run, tmp_path: Path) -> None:
    tables, data = tmp_path / "tables.toml", tmp_path / "data.parquet"
    tables.write_text(TOML)
    pq.write_table(pa.table({"user_id": list(range(640))}), data)
    plan = library.plan_embedding(tables, on="v5p:2x2x1", batch_samples="4Ki")
    command = ("plan", "embed", str(tables), "--on", "v5p:2x2x1", "--batch-samples", "4096", "--json")
    assert json.loads(json.dumps(plan.to_json())) == rooftop(*command).json
    check(plan)
    limits = library.embedding_limits(tables, data, on="v6e:2x2", batch_samples=64)
    stats = ("embed", "stats", str(tables), str(data), "--on", "v6e:2x2", "--batch-samples", "64", "--json")
    assert json.loads(json.dumps(limits.to_json())) == rooftop(*stats).json
    check(limits)
    assert library.embedding_limits(tables, [data], on="v6e:2x2", batch_samples=64, limits=limits.limits).kept is True


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: library.plan_serving("llama3-8b", on="v5e:2x2", ttft="500"), "ttft: got '500'"),
        (lambda: library.plan_serving("llama3-8b", on="v5e:2x2", ttft=-1.0), "ttft: got -1.0"),
        (lambda: library.plan_serving("llama3-8b", on="v5e:2x2", weights_dtype=["int8", "bf16"]), "weights-dtype"),
        (lambda: library.plan_serving("llama3-8b", on="v5e:2x2", objective="speed"), "for: got 'speed'"),
        (lambda: library.plan_serving("llama3-8b", on="v5e:2x2", prompt="2e15"), "prompt: got '2e15'"),
        (lambda: library.plan_embedding("nowhere.toml", on="v5p:2x2x1"), "tables"),
        (lambda: library.simulate({"kind": "train"}), "plan"),
        (lambda: library.ServeRequest(checkpoint=Path("x"), port=70000), "port: got 70000"),
        (lambda: library.ServeRequest(checkpoint=Path("x"), weights_dtype="int3"), "weights-dtype: got 'int3'"),
    ],
)
def test_wrong_arguments_are_named(call: Callable[[], object], message: str) -> None:
    with pytest.raises(RooftopError) as raised:
        call()
    assert str(raised.value).startswith(message)


def test_planning_and_simulating_import_no_jax() -> None:
    code = (
        "import sys, rooftop\n"
        "plan = rooftop.plan_serving('llama3-8b', on='v5e:2x2', batch_seqs=1)\n"
        "rooftop.simulate(plan, requests_per_second=1, duration='5s')\n"
        "rooftop.ServeRequest\n"
        "print([name for name in ('jax', 'starlette', 'uvicorn', 'rich') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
