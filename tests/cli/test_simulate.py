"""``rooftop simulate``: plans in, latencies out; what is wrong is one line."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from rooftop.core.records import schema
from rooftop.simulate.serving.metrics import SimulationReport

Run = Callable[..., Any]


def plan(rooftop: Run, path: Path, *options: str) -> Any:
    """A plan of LLaMA-3 70B in int8 on v5e 4x4, written to ``path``."""
    like = ("llama3-70b", "--on", "v5e:4x4", "--weights-dtype", "int8", "--kv-dtype", "int8")
    answer = rooftop("plan", "serve", *like, "-o", str(path), "--json", *options)
    assert answer.status == 0, answer.err
    return answer.json


def check_report(report: Any) -> None:
    """Every key of the schema and no other, and figures within their range."""
    jsonschema.validate(report, schema(SimulationReport))
    assert report.keys() == SimulationReport.__dataclass_fields__.keys() | {"request"}
    assert report["servers"]
    assert report["plan"]["batch"] >= 1
    for path, value in _figures(report):
        if isinstance(value, float | int):
            assert value >= 0, path
            if "utilisation" in path or path[-1] in ("share", "mean_occupancy", "max_occupancy"):
                assert value <= 1.000001, path


def _figures(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, item in items:
        yield from _figures(item, (*path, str(name)))
    if not items:
        yield path, value


@pytest.fixture
def plan_file(rooftop: Run, tmp_path: Path) -> str:
    path = tmp_path / "plan.json"
    plan(rooftop, path, "--prompt", "1000", "--generate", "100", "--batch-seqs", "8")
    return str(path)


@pytest.mark.parametrize("mode", ["interleaved", "disaggregated"])
def test_at_low_load_latencies_are_those_of_the_plan(rooftop: Run, tmp_path: Path, mode: str) -> None:
    path = tmp_path / "plan.json"
    planned = plan(rooftop, path, "--prompt", "7680", "--generate", "512", "--batch-seqs", "1", "--batching", mode)
    report = rooftop("simulate", str(path), "--requests-per-second", "0.001", "--duration", "20000s", "--json").json
    assert report["deployment"]["batching"] == mode
    assert report["ttft_s"]["p50"] == pytest.approx(planned["ttft_s"], rel=0.01)
    assert report["tpot_s"]["p50"] == pytest.approx(planned["tpot_s"], rel=0.01)
    assert report["plan"]["ttft_s"] == planned["ttft_s"]


def test_clients_wait_for_their_answers(rooftop: Run, plan_file: str) -> None:
    report = rooftop("simulate", plan_file, "--concurrency", "4", "--json").json
    assert (report["trace"]["clients"], report["requests"]["offered"], report["requests"]["finished"]) == (4, 40, 40)
    # A closed loop is always full: Little's law with 4 requests, but for the last ones.
    inside = report["requests"]["per_second"] * report["e2e_s"]["mean"]
    assert 3.5 < inside <= 4


def test_json_is_one_object_and_the_same_every_time(rooftop: Run, plan_file: str, tmp_path: Path) -> None:
    command = ("simulate", plan_file, "--requests-per-second", "10", "--duration", "60s", "--ttft", "500ms", "--json")
    answer = rooftop(*command, "-o", str(tmp_path / "simulation.json"))
    assert (answer.status, answer.err) == (0, "")
    assert answer.json == rooftop(*command).json == json.loads((tmp_path / "simulation.json").read_text())
    report = answer.json
    check_report(report)
    assert (report["kind"], report["requests"]["offered"], report["requests"]["finished"]) == ("simulation", 600, 600)
    assert report["tokens"]["generated"] == 600 * 100
    assert report["goodput"]["ttft_target_s"] == 0.5
    assert {server["role"] for server in report["servers"]} == {"prefill", "generate"}
    other = rooftop(*command, "--seed", "1").json
    assert other["ttft_s"] != report["ttft_s"]


def test_tables_and_files(rooftop: Run, plan_file: str, tmp_path: Path) -> None:
    requests, drawn = tmp_path / "requests.csv", tmp_path / "timeline.json"
    answer = rooftop(
        "simulate", plan_file, "--requests-per-second", "5", "--duration", "20s", "--prompt", "100:900",
        "--batching", "interleaved", "--chunk-tokens", "256", "--replicas", "2", "--tpot", "50ms",
        "--per-request", str(requests), "--perfetto", str(drawn),
    )  # fmt: skip
    assert (answer.status, answer.err) == (0, "")
    for words in ("2 x v5e:4x4", "TTFT", "goodput", "chunks of 256", "busy"):
        assert words in answer.out
    with requests.open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 100
    assert all(100 <= int(row["prompt_tokens"]) <= 900 for row in rows)
    assert all(0 < float(row["ttft_s"]) < float(row["e2e_s"]) for row in rows)
    assert json.loads(drawn.read_text())["traceEvents"]


def test_traces_with_a_prefix_cache(rooftop: Run, plan_file: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [
        {
            "timestamp": 20_000 * turn,
            "input_length": 513 + 512 * turn,
            "output_length": 8,
            "hash_ids": [*range(turn + 2)],
        }
        for turn in range(4)
    ]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    command = ("simulate", plan_file, "--trace", str(trace), "--json")
    assert rooftop(*command).json["tokens"]["cached"] == 0
    cached = rooftop(*command, "--prefix-cache", "--replicas", "2", "--routing", "affinity").json
    check_report(cached)
    assert cached["tokens"]["cached"] == 512 + 1024 + 1536
    assert cached["trace"]["hashes"] is True


def test_a_recommended_fleet_is_simulated_as_it_is(rooftop: Run, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    rate = ("--prompt", "1000", "--generate", "100", "--requests-per-second", "20", "--ttft", "2s", "--tpot", "50ms")
    fleet = plan(rooftop, path, *rate)["recommendation"]["best"]
    report = rooftop("simulate", str(path), "--duration", "30s", "--json").json
    assert report["requests"]["offered"] == 600
    assert report["deployment"]["replicas"] == fleet["generate_servers"]
    assert report["deployment"]["prefill_servers"] == fleet["prefill_servers"]
    assert (report["goodput"]["ttft_target_s"], report["goodput"]["tpot_target_s"]) == (2.0, 0.05)


@pytest.mark.parametrize(
    ("options", "status", "message"),
    [
        ((), 2, "requests-per-second: got nothing"),
        (("--concurrency", "8", "--requests-per-second", "1"), 2, "this or --requests-per-second, not both"),
        (("--concurrency", "8", "--trace", "x.csv"), 2, "this or --trace, not both"),
        (("--concurrency", "8", "--requests", "7"), 2, "requests: got 7; accepted: 8 to"),
        (("--requests", "7"), 2, "requests of clients, with --concurrency"),
        (("--requests-per-second", "0"), 2, "requests-per-second: got '0'"),
        (("--requests-per-second", "1", "--trace", "x.csv"), 2, "this or --trace, not both"),
        (("--trace", "nowhere.csv"), 2, "a file that can be read"),
        (("--requests-per-second", "1", "--prompt", "9:3"), 2, "prompt: got '9:3'"),
        (("--requests-per-second", "1", "--batching", "interleave"), 2, "did you mean"),
        (("--requests-per-second", "1", "--routing", "affinity"), 2, "affinity with a prefix cache"),
        (("--requests-per-second", "1", "--prefix-cache"), 2, "a --trace whose hashes say what prompts share"),
        (("--requests-per-second", "1", "--preemption", "swap"), 2, "swap with --host-dram"),
        (("--requests-per-second", "1", "--ttft", "soon"), 2, "ttft: got 'soon'"),
        (("--requests-per-second", "1", "--prompt", "many"), 2, "prompt: got 'many'"),
        (("--requests-per-second", "1M", "--duration", "1000000s"), 2, "requests: got 1000000000000"),
        (("--requests-per-second", "1", "--seed", "-1"), 2, "seed: got '-1'"),
        (("--requests-per-second", "1", "--prompt", "100M"), 1, "no request can be served: "),
    ],
)
def test_what_is_wrong_is_one_line(
    rooftop: Run, plan_file: str, options: tuple[str, ...], status: int, message: str
) -> None:
    answer = rooftop("simulate", plan_file, *options)
    assert answer.status == status
    (line,) = answer.err.strip().splitlines()
    assert line.startswith("rooftop: ")
    assert message in line


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"kind": "train", "schema": 1}'])
def test_plans_that_are_none(rooftop: Run, tmp_path: Path, text: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text, encoding="utf-8")
    answer = rooftop("simulate", str(path), "--requests-per-second", "1")
    assert answer.status == 2
    (line,) = answer.err.strip().splitlines()
    assert line.startswith("rooftop: plan")


def test_a_batch_of_one_request_of_one_token_has_no_times_between_tokens(rooftop: Run, plan_file: str) -> None:
    command = ("simulate", plan_file, "--requests-per-second", "0.1", "--duration", "10s", "--generate", "1", "--json")
    report = rooftop(*command).json
    check_report(report)
    assert report["tpot_s"] is None
    assert report["itl_s"] is None


def test_drafts_are_not_simulated(rooftop: Run, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan(rooftop, path, "--prompt", "100", "--generate", "10", "--draft", "llama3-8b", "--batch-seqs", "1",
         "--batching", "interleaved")  # fmt: skip
    answer = rooftop("simulate", str(path), "--requests-per-second", "1")
    assert answer.status == 2
    assert "draft" in answer.err
