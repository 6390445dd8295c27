"""``rooftop plan serve`` as people type it: the answer, the file and the picture it writes, and what is refused."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from rooftop.core.records import schema
from rooftop.plan.serving.fleet import FleetAnswerDocument
from rooftop.plan.serving.plan import ServingPlan

Run = Callable[..., Any]
JOB = (
    *("plan", "serve", "llama3-70b", "--on", "v5e:4x4", "--prompt", "7680", "--generate", "512"),
    *("--weights-dtype", "int8", "--kv-dtype", "int8", "--batch-seqs", "32"),
)  # fmt: skip


def test_json_is_one_object_that_follows_the_schema(rooftop: Run) -> None:
    answer = rooftop(*JOB, "--json")
    assert (answer.status, answer.err) == (0, "")
    data = answer.json
    jsonschema.validate(data, schema(FleetAnswerDocument))
    assert data["generate"]["batch"] == 32
    assert data["memory"]["kv_per_token"] == 163840
    assert data["smallest_slice"] == "v5e:2x4"
    assert data["generate"]["tokens_per_s"] == pytest.approx(32 / data["generate"]["step_s"]["expected_s"])
    hours = 1e6 / data["generate"]["tokens_per_s"] / 3600
    assert data["cost_per_million_tokens"]["output"] == pytest.approx(hours * 16 * 1.2)


def test_book_bounds_and_mfu_are_the_books_arithmetic(rooftop: Run) -> None:
    job = (*JOB, "--prompt", "8192")
    data = rooftop(*job, "--bounds", "book", "--mfu", "0.4", "--json").json
    jsonschema.validate(data, schema(FleetAnswerDocument))
    assert data["memory"]["kv"] == pytest.approx(4.29497e10, rel=1e-5)
    assert data["memory"]["capacity"] == 256e9
    assert data["generate"]["step_s"]["lower_s"] == pytest.approx(8.76e-3 * 8.1 / 8.2, rel=1e-3)
    assert data["generate"]["breakdown"]["ici_s"] == 0
    assert data["prefill"]["seconds"] == pytest.approx(0.9096, rel=0.01)
    # The efficiency alone fixes the prefill, not the rest.
    usable = rooftop(*job, "--mfu", "0.4", "--json").json
    assert usable["prefill"]["seconds"] == data["prefill"]["seconds"]
    assert usable["generate"]["step_s"]["expected_s"] > data["generate"]["step_s"]["expected_s"]


def test_tables_say_the_answer_first(rooftop: Run) -> None:
    answer = rooftop(*JOB)
    assert answer.status == 0
    lines = [line for line in answer.out.splitlines() if line.strip()]
    assert lines[0].startswith("llama3-70b on v5e:4x4: batch 32")
    for part in ("TTFT", "TPOT", "Where a generate step goes", "layers/attn/core", "Why", "Batches worth having"):
        assert part in answer.out


@pytest.mark.parametrize(
    ("options", "first"),
    [
        (("llama3-70b", "--on", "v5e:2x2"), "Does not fit: 35.9 GB of 16.9 GB a device; nearest: batch "),
        (("llama3-8b", "--on", "v5e:4x4", "--batch-seqs", "9999"), "a device; nearest: batch 236 on v5e:4x4"),
        (("llama3-8b", "--on", "v6e:4x4", "--matmul-dtype", "int8"), "Not executable: rooftop serve multiplies in"),
        (("llama3-8b", "--on", "v5e:4x4", "--prompt", "8k"), "on v5e:4x4 with 7680 + 512 tokens"),
        (("llama3-8b", "--on", "v5e:4x4", "--kv-sharing", "2"), "Not executable: rooftop serve has no cache"),
    ],
)  # fmt: skip
def test_the_first_line_says_no_and_names_the_nearest(rooftop: Run, options: tuple[str, ...], first: str) -> None:
    printed = " ".join(rooftop("plan", "serve", *options).out.split("generate as")[0].split())
    assert first in printed and "nearest: batch" in printed
    answer = rooftop("plan", "serve", *options, "--json")
    assert answer.status == 1
    data = answer.json
    near = data["nearest"][0]
    again = rooftop(
        "plan", "serve", options[0], "--on", near["slice"], "--batch-seqs", str(near["batch"]), "--json",
        "--prompt", str(near["prompt"]), "--mesh", ",".join(f"{name}={size}" for name, size in near["mesh"].items()),
    ).json  # fmt: skip
    assert again["executable"] and again["memory"]["fits"]
    assert again["tpot_s"] == pytest.approx(near["tpot_s"])


def test_the_knee_has_the_smallest_and_the_largest_batch_beside_it(rooftop: Run) -> None:
    job = ("plan", "serve", "llama3-8b", "--on", "v5e:4x4")
    data = rooftop(*job, "--json").json
    assert (data["batch_rule"], data["smallest_batch"]["batch"]) == ("knee", 1)
    assert 1 < data["generate"]["batch"] < data["largest_batch"]["batch"]
    assert "the largest whose last doubling raised tokens/s by more than TPOT" in " ".join(rooftop(*job).out.split())


def test_plan_file_is_what_json_prints(rooftop: Run, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    printed = rooftop(*JOB, "-o", str(file), "--json").json
    data = json.loads(file.read_text())
    assert data == printed
    assert ServingPlan.from_json(data).step_s == data["generate"]["step_s"]["expected_s"]


def test_the_front_as_data_and_as_a_picture(rooftop: Run, tmp_path: Path) -> None:
    file = tmp_path / "front.svg"
    data = rooftop(*JOB, "--bounds", "book", "--contexts", "2k,8k,32k", "--plot", str(file), "--json").json
    contexts = {point["context"] for point in data["pareto"]}
    assert contexts == {2000, 8000, 32000}
    assert "prefers-color-scheme: dark" in file.read_text()
    drawing = ElementTree.fromstring(file.read_text())
    space = "{http://www.w3.org/2000/svg}"
    texts = [text.text or "" for text in drawing.iter(f"{space}text")]
    assert texts[0] == "llama3-70b: generation on v5e:4x4, int8 weights, int8 KV"
    assert {"step, logarithmic", "tokens/s per chip", "numbers next to points: batch"} <= set(texts)
    assert len(list(drawing.iter(f"{space}polyline"))) == 3
    assert len(list(drawing.iter(f"{space}circle"))) == len(data["pareto"])
    assert {f"context {size:,}" for size in (2000, 8000, 32000)} <= set(texts)


def test_given_placements_are_kept(rooftop: Run) -> None:
    options = ("--mesh", "context=4,tensor=4", "--kv-split", "seq", "--prefill-mesh", "tensor=16")
    data = rooftop(*JOB, *options, "--json").json
    assert {name: size for name, size in data["mesh"]["axes"].items() if size > 1} == {"context": 4, "tensor": 4}
    assert data["kv_split"] == "seq"
    assert data["prefill"]["mesh"]["axes"]["tensor"] == 16


def test_recommendation_over_chips(rooftop: Run) -> None:
    target = ("plan", "serve", "--requests-per-second", "40", "--ttft", "1s", "--tpot", "30ms", "--on", "v5e,v6e")
    data = rooftop(*target, "--json").json
    jsonschema.validate(data, schema(FleetAnswerDocument))
    recommendation = data["recommendation"]
    assert recommendation["best"]["ttft_s"] <= 1
    assert recommendation["best"]["tpot_s"] <= 0.03
    assert "dollars an hour against" in recommendation["others"][0]["why"]
    assert {fleet["chip"] for fleet in (recommendation["best"], *recommendation["others"])} == {"v5e", "v6e"}
    text = rooftop(*target).out
    assert "Recommended: " in text
    assert "Fleets compared: cheapest first" in text


def test_without_a_rate_servers_are_those_of_one_request_a_second(rooftop: Run) -> None:
    target = ("plan", "serve", "--on", "v5e", "--weights-dtype", "int8", "--kv-dtype", "int8", "--tpot", "30ms")
    one = rooftop(*target, "--json").json["recommendation"]["best"]
    many = rooftop(*target, "--requests-per-second", "1000", "--json").json["recommendation"]["best"]
    assert many["generate_servers"] == pytest.approx(1000 * one["generate_servers"], abs=1)
    assert "chips, $" in rooftop(*target).out
    assert "for each request a second; TTFT" in " ".join(rooftop(*target).out.split())


def test_a_rate_on_one_slice_counts_servers(rooftop: Run) -> None:
    data = rooftop(*JOB, "--requests-per-second", "10", "--json").json
    best = data["recommendation"]["best"]
    assert (best["generate_slice"], best["prefill_slice"], best["batch"]) == ("v5e:4x4", "v5e:4x4", 32)
    assert best["generate_servers"] == pytest.approx(
        10 * 512 / 32 / 0.8 * data["generate"]["step_s"]["expected_s"], abs=1
    )


def test_whole_front_over_chips(rooftop: Run) -> None:
    data = rooftop("plan", "serve", "--on", "v5e,v6e", "--for", "pareto", "--weights-dtype", "int8", "--json").json
    assert {"slice", "weights", "kv", "step_s"} <= set(data["pareto"][0])


def test_speculation_and_prefix_cache_are_shown(rooftop: Run) -> None:
    options = ("--draft", "llama3-8b", "--acceptance", "0.8", "--hit-rate", "0.5", "--host-dram", "400G")
    text = rooftop(*JOB, *options).out
    assert "speculation" in text
    assert "prefix cache" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--batch-seqs", "4000"), "at most 142 sequences fit"),
        (("--tpot", "1ms"), "misses its TPOT of 1 ms: nearest is 1"),
        (("--ttft", "10ms"), "misses its TTFT of 10 ms: nearest is"),
    ],
)
def test_no_is_status_one_and_one_line(rooftop: Run, options: tuple[str, ...], message: str) -> None:
    answer = rooftop(*JOB, *options, "--json")
    assert answer.status == 1
    assert answer.json["kind"] == "serve"
    (line,) = answer.err.strip().splitlines()
    assert message in line


@pytest.mark.parametrize(
    "option", [("--mesh", "tensor=8"), ("--prefill-mesh", "tensor=8"), ("--prefill-on", "v5e:4x4")]
)
def test_placements_are_not_fixed_where_chips_are_searched(rooftop: Run, option: tuple[str, str]) -> None:
    answer = rooftop("plan", "serve", "--on", "v5e", "--requests-per-second", "1", *option)
    assert answer.status == 2
    assert f"{option[0][2:]}: got {option[1]!r}; accepted: this with one slice" in answer.err


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("serve --on v5e:4x4 --draft llama3-8b --draft-length 1e9", "draft-length: got 1000000000"),
        ("train llama3-8b --on v5e:4x4 --batch-tokens 1e15", "batch-tokens: got 1000000000000000"),
        ("train llama3-8b --on v5e:4x4 --batch-seqs 16 --seq 1e13", "seq: got 10000000000000"),
        ("embed docs/tables.toml --on v5p:2x2x1 --batch-samples 1e15", "batch-samples: got 1000000000000000"),
        ("embed docs/tables.toml --on v5p:2x2x1 --sample-passes 1e15", "sample-passes: got 1000000000000000"),
        ("embed docs/tables.toml --on v5p:2x2x1 --host-threads 1e12", "host-threads: got 1000000000000"),
    ],
)
def test_absurd_figures_are_refused_by_the_name_of_their_option(rooftop: Run, command: str, message: str) -> None:
    answer = rooftop("plan", *command.split())
    assert answer.status == 2
    assert answer.err.startswith(f"rooftop: {message}; accepted: ")


def test_embedding_tables_that_do_not_fit_say_so_in_the_first_line(rooftop: Run) -> None:
    answer = rooftop("plan", "embed", "docs/tables.toml", "--on", "v5p:2x2x1", "--batch-samples", "1e9")
    assert answer.status == 1
    assert answer.out.startswith("Does not fit: 113 MB of 524 kB a tile")


def test_an_unreachable_target_names_the_nearest(rooftop: Run) -> None:
    answer = rooftop("plan", "serve", "--on", "v5e", "--ttft", "1ms", "--tpot", "10us", "--requests-per-second", "1")
    assert answer.status == 1
    (line,) = answer.out.splitlines()
    assert "nearest is TTFT" in line and answer.err == ""


@pytest.mark.parametrize(("option", "target"), [("--tpot", "1 ms"), ("--ttft", "10 ms")])
def test_the_first_line_says_which_target_is_missed(rooftop: Run, option: str, target: str) -> None:
    first = rooftop(*JOB, option, target.replace(" ", "")).out.splitlines()[0]
    assert first.startswith(f"Misses its {option[2:].upper()} of {target} with ")


def test_a_fleet_that_does_not_fit_names_the_nearest_server_that_does(rooftop: Run) -> None:
    job = ("plan", "serve", "llama3-70b", "--on", "v5e:2x2", "--requests-per-second", "1")
    answer = rooftop(*job)
    assert (answer.status, answer.err) == (1, "")
    (line,) = answer.out.splitlines()
    assert line.startswith(
        "llama3-70b does not fit: not one sequence on slices up to v5e:2x2; nearest that does: batch "
    )
    near = line.rpartition(" on ")[2]
    assert rooftop("plan", "serve", "llama3-70b", "--on", near).status == 0
    # The one object of --json is an answer, and there is none.
    answer = rooftop(*job, "--json")
    assert (answer.status, answer.out, answer.err) == (1, "", f"rooftop: {line}\n")


def test_the_first_line_says_that_contexts_are_longer_than_the_models(rooftop: Run) -> None:
    answer = rooftop(*JOB, "--contexts", "2k,32k")
    assert answer.status == 0
    first = " ".join(answer.out.splitlines()[:2])
    assert "batch 32, disaggregated; contexts of 32,000, the model was made for 8,192" in first


def test_options_that_a_front_of_chips_ignores_are_refused(rooftop: Run) -> None:
    answer = rooftop("plan", "serve", "llama3-8b", "--on", "v5e", "--for", "pareto", "--contexts", "2k")
    assert (answer.status, answer.err) == (2, "rooftop: contexts: got '2k'; accepted: this without --for pareto\n")


def test_a_fleet_that_no_one_could_build_is_a_no(rooftop: Run) -> None:
    answer = rooftop("plan", "serve", "llama3-8b", "--on", "v5e", "--requests-per-second", "1e9")
    assert (answer.status, answer.err) == (1, "")
    (line,) = answer.out.splitlines()
    assert "chips, more than 10,000,000; those serve" in line


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--on", "v5e:4x4", "--mesh", "stage=100"), "sizes whose product is the 16 devices"),
        (("--on", "v5e:4x4,v6e:4x4"), "chips without shapes"),
        (("--on", "v5x"), "v5e"),
        (("--weights-dtype", "int3"), "int8"),
        (("--weights-dtype", "int8,bf16"), "one dtype each"),
        (("--matmul-dtype", "fp8"), "matmul-dtype on v5e: got 'f8_e4m3'; accepted: "),
        (("--prompt", "0"), "positive number"),
        (("--ttft", "soon"), "500ms"),
        (("--ttft", "500"), "ttft: got '500'; accepted: a time with its unit: 500ms, 1.5s, 10m"),
        (("--context", "1M"), "context: got 1000000; accepted: at most 8,192: the prompt and its answer"),
        (("--context", "1e15"), "context: got 1000000000000000; accepted: at most 1,000,000,000,000 tokens"),
        (("--context", "1e15", "--bounds", "book"), "context: got 1000000000000000"),
        (("--contexts", "1e15"), "context: got 1000000000000000"),
        (("--draft", "llama3.1-405b"), "draft: got 'llama3.1-405b'; accepted: a model with fewer parameters than"),
        (("--draft", "llama3-70b"), "draft: got 'llama3-70b'; accepted: a model with fewer parameters than"),
        (("--mfu", "1.5"), "between 0 and 1"),
        (("--mfu", "0"), "between 0 and 1"),
        (("--hit-rate", "1"), "not including"),
        (("--batching", "apart"), "disaggregated"),
        (("--kv-split", "head"), "batch"),
        (("--link", "pcie"), "ici"),
        (("--bounds", "loose"), "book"),
        (("--mesh", "tensor=8"), "product is the 16 devices"),
        (("--mesh", "tensr=16"), "did you mean tensor"),
        (("--mesh", "expert=2,tensor=8"), "no experts"),
        (("--prefill-mesh", "fsdp=2,tensor=8"), "no fsdp axis in a prefill"),
        (("--prefill-on", "v6e:4x4"), "one slice of v5e"),
        (("--assume", "hbm=1"), "hbm_read"),
        (("--draft", "llama3-8b", "--acceptance", "2"), "between 0 and 1"),
        (("--draft", "llama3-8b", "--bounds", "book"), "usable with a draft"),
        (("--for", "fun", "--requests-per-second", "1"), "cost"),
        (("--contexts", "1"), "two tokens"),
        (("--price", "-1"), "positive number"),
        (("--price", "1e300"), "price: got '1e300'; accepted: at most 1e+06"),
        (("--price", "1e-300"), "price: got '1e-300'; accepted: at least 1e-06"),
        (("--price", "nan"), "positive number"),
        (("--requests-per-second", "1e15"), "at most 1e+12"),
        (("--requests-per-second", "1e-300"), "at least 1e-09"),
        (("--ttft", "1e300s"), "at most 1e+09s"),
        (("--ttft", "1e6s"), "up to 86,400 s"),
        (("--tpot", "nan"), "500ms"),
        (("--kv-sharing", "100"), "at most the 80 layers"),
        (("--weight-group", "1M"), "at most the 28672 inputs of a matmul"),
        (("--draft", "llama3-8b", "--draft-length", "1000"), "at most the 512 tokens of an answer"),
        (("--batch-seqs", "1e30"), "at most 1e+15"),
    ],
)
def test_bad_options_are_one_line(rooftop: Run, options: tuple[str, ...], message: str) -> None:
    answer = rooftop(*JOB, *options)
    assert answer.status == 2
    assert answer.out == ""
    (line,) = answer.err.strip().splitlines()
    assert line.startswith("rooftop: ")
    assert message in line


def test_simulated_requests_longer_than_the_model_are_flagged(rooftop: Run, tmp_path: Path) -> None:
    file = str(tmp_path / "plan.json")
    rooftop(*JOB, "-o", file)
    job = ("simulate", file, "--requests-per-second", "1", "--duration", "10s")
    longer = rooftop(*job, "--prompt", "9000").out.split("\n  requests")[0]
    assert "requests of 9,512 tokens, the model was made for 8,192" in " ".join(longer.split())
    assert "was made for" not in rooftop(*job).out
    refused = rooftop(*job, "--replicas", "1e12")
    assert (refused.status, "replicas: got 1000000000000; accepted: at most 10,000" in refused.err) == (2, True)
