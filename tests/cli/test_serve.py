"""``rooftop serve`` and ``rooftop bench serve``: a tiny checkpoint made on the spot, served by the real engine."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from rooftop.core.errors import RooftopError
from rooftop.core.records import schema
from rooftop.library.benchmarks import ServingBenchResult
from rooftop.models import count_params, from_huggingface
from rooftop.scheduling.serving.scheduler import Policy
from rooftop.serve.api.texts import Texts
from rooftop.serve.engine.configuration import configuration_of
from rooftop.serve.request import ServeRequest, shrunk
from rooftop.serve.source import make_example, read_source
from rooftop.simulate.serving.measured import MeasuredProgram, MeasuredTimes
from tests.support.quickly import QUICK_FLAGS
from tests.support.serving_process import ROOFTOP, TEXT, Served, started, write_served_model

LONGEST = 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_served_model(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    command = [
        ROOFTOP, "serve", str(folder), "--port", "0", "--json",
        "--batch-seqs", "4", "--max-model-len", str(LONGEST), "--chunk-tokens", "24",
        "--max-queue", "400", "--pages", "20",
    ]  # fmt: skip
    environment = os.environ | {"XLA_FLAGS": QUICK_FLAGS, "JAX_PLATFORMS": "cpu"}
    with started(command, folder.parent, env=environment) as server:
        yield server


def test_greedy_answers_are_the_same_whole_streamed_and_together(served: Served) -> None:
    client = served.client()
    whole = client.completions.create(model="tiny", prompt=TEXT, max_tokens=20, temperature=0, logprobs=2)
    again = client.completions.create(model="tiny", prompt=[TEXT] * 6, max_tokens=20, temperature=0)
    assert {choice.text for choice in again.choices} == {whole.choices[0].text}
    parts = client.completions.create(model="tiny", prompt=TEXT, max_tokens=20, temperature=0, stream=True)
    assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text
    entries = whole.choices[0].logprobs
    assert entries is not None and entries.token_logprobs is not None and entries.top_logprobs is not None
    # Greedy: the token is the likeliest one.
    for logprob, top in zip(entries.token_logprobs, entries.top_logprobs, strict=True):
        assert logprob is not None and logprob == max(top.values()) <= 0


def test_seeds_draw_the_same(served: Served) -> None:
    client = served.client()

    def text(**fields: Any) -> list[str]:
        completion = client.completions.create(model="tiny", prompt="a", max_tokens=12, temperature=1.5, **fields)
        return [choice.text for choice in completion.choices]

    assert text(seed=3, n=2) == [text(seed=3)[0], text(seed=4)[0]]
    assert text(seed=3) != text(seed=4)


def test_a_chat_of_a_schema(served: Served) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"enum": ["x", "yy"]}, "b": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    answer_format: Any = {"type": "json_schema", "json_schema": {"name": "made", "schema": schema}}
    messages: Any = [{"role": "user", "content": "hi"}]
    completion = served.client().chat.completions.create(
        model="tiny", messages=messages, n=4, response_format=answer_format
    )
    assert len(completion.choices) == 4
    for choice in completion.choices:
        jsonschema.validate(json.loads(choice.message.content or ""), schema)


def test_two_hundred_streams_of_which_half_leave(served: Served) -> None:
    """Each answer is whole or was left by its client; then nothing runs, no page is held, nothing was compiled."""

    async def one(client: httpx.AsyncClient, number: int) -> int:
        body = {
            "model": "tiny", "prompt": f"{number} {TEXT}", "max_tokens": 12, "ignore_eos": True, "stream": True,
            "stream_options": {"include_usage": True},
        }  # fmt: skip
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200
            async for line in answer.aiter_lines():
                if number % 2:
                    return 0
                if line.startswith("data:") and '"choices":[]' in line:
                    return int(json.loads(line.removeprefix("data:"))["usage"]["completion_tokens"])
        raise AssertionError(f"answer {number} broke off")

    async def everyone() -> list[int]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=served.url, limits=limits, timeout=120) as client:
            return list(await asyncio.gather(*(one(client, number) for number in range(200))))

    assert asyncio.run(everyone()) == [0 if number % 2 else 12 for number in range(200)]
    served.wait_until_idle()
    assert served.metric("rooftop_waiting_requests") == 0
    assert served.metric("rooftop_kv_pages_used") == 0
    assert served.metric("rooftop_compilations_total") == 0
    assert served.metric("rooftop_prefix_hit_tokens_total") > 0


def test_what_can_never_be_served_is_refused_before(served: Served) -> None:
    answer = served.complete(prompt=[1] * LONGEST)
    assert answer.status_code == 400 and f"1 to {LONGEST - 1} tokens" in answer.json()["error"]["message"]
    assert served.complete(prompt=[5] * (LONGEST - 1), max_tokens=1).status_code == 200


def test_a_replay_stands_beside_its_simulation(served: Served, rooftop: Callable[..., Any], tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [{"arrival_s": 0.02 * n, "prompt_tokens": 8 + n % 9, "output_tokens": 2 + n % 7} for n in range(30)]
    trace.write_text("\n".join(map(json.dumps, rows)))
    answer = rooftop("bench", "serve", "--url", served.url, "--trace", str(trace), "--ttft", "1000s", "--json")
    assert (answer.status, answer.err) == (0, "")
    jsonschema.validate(answer.json, schema(ServingBenchResult))
    measured, predicted = answer.json["measured"], answer.json["predicted"]
    assert answer.json["predicted_by"] == "step times that the server measured"
    assert measured["requests"]["finished"] == predicted["requests"]["finished"] == 30
    assert (
        measured["tokens"]["generated"] == predicted["tokens"]["generated"] == sum(row["output_tokens"] for row in rows)
    )
    assert measured["tokens"]["prompt"] == sum(row["prompt_tokens"] for row in rows)
    assert measured["goodput"]["share"] == 1
    for figures in (measured, predicted):
        assert 0 < figures["ttft_s"]["p50"] <= figures["ttft_s"]["max"] <= figures["e2e_s"]["max"]
    table = rooftop("bench", "serve", "--url", served.url, "--requests-per-second", "20", "--duration", "500ms",
                    "--prompt", "8", "--generate", "4:8")  # fmt: skip
    assert table.status == 0 and "10 of 10 requests" in table.out
    assert table.out.count("predicted") >= 4


def test_clients_and_their_texts_are_simulated_too(served: Served, rooftop: Callable[..., Any], tmp_path: Path) -> None:
    texts = tmp_path / "texts.jsonl"
    texts.write_text('{"prompt": "a mesh"}\n{"prompt": "a slice"}\n')
    load = ("--concurrency", "3", "--requests", "9", "--texts", str(texts), "--generate", "4")
    data = rooftop("bench", "serve", "--url", served.url, *load, "--json").json
    jsonschema.validate(data, schema(ServingBenchResult))
    assert data["trace"]["clients"] == 3
    for side in ("measured", "predicted"):
        assert data[side]["requests"]["finished"] == 9, data["predicted_by"]
    assert data["predicted"]["tokens"]["prompt"] == data["measured"]["tokens"]["prompt"]
    assert data["trace"]["mean_prompt_tokens"] == data["measured"]["tokens"]["prompt"] / 9


TOOLS: Any = [
    {"type": "function", "function": {"name": "go", "parameters": {
        "type": "object", "properties": {"to": {"enum": ["l", "r"]}}, "required": ["to"],
        "additionalProperties": False}}}
]  # fmt: skip


def test_a_call_of_a_tool(served: Served) -> None:
    """The model draws at random: what it says is a call all the same."""
    with served.client().chat.completions.stream(
        model="tiny", messages=[{"role": "user", "content": "hi"}], tools=TOOLS, tool_choice="required", max_tokens=40
    ) as stream:
        (choice,) = stream.get_final_completion().choices
    (call,) = choice.message.tool_calls or ()
    assert call.function.name == "go"
    jsonschema.validate(json.loads(call.function.arguments), TOOLS[0]["function"]["parameters"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "exact"),
    [
        (["--draft", "{folder}", "--draft-length", "2"], True),
        (["--draft-length", "3"], True),
        (["--devices", "4", "--mesh", "data=2,tensor=2"], True),
        (["--devices", "4", "--mesh", "tensor=2,context=2", "--weights-dtype", "int8", "--kv-dtype", "int8"], False),
        (["--devices", "2", "--batching", "disaggregated", "--prefill-devices", "1", "--chunk-tokens", "0"], True),
    ],
)
def test_every_way_of_serving_answers_alike(folder: Path, served: Served, arguments: list[str], exact: bool) -> None:
    def texts(asked: Served) -> list[str]:
        completion = asked.client().completions.create(
            model="tiny", prompt=[TEXT, "a b a b"], max_tokens=20, temperature=0
        )
        return [choice.text for choice in completion.choices]

    command = [
        ROOFTOP, "serve", str(folder), "--port", "0", "--json",
        "--batch-seqs", "4", "--max-model-len", str(LONGEST), "--pages", "20",
        *(argument.format(folder=folder) for argument in arguments),
    ]  # fmt: skip
    with started(command, folder.parent, env=os.environ | {"XLA_FLAGS": QUICK_FLAGS, "JAX_PLATFORMS": "cpu"}) as other:
        if exact:
            assert texts(other) == texts(served)
        test_a_chat_of_a_schema(other)
        test_a_call_of_a_tool(other)
        test_seeds_draw_the_same(other)
        assert (other.metric("rooftop_accepted_tokens_total") > 0) == ("--draft-length" in arguments)
        other.wait_until_idle()
        assert other.metric("rooftop_compilations_total") == 0
        assert other.stop()[0] == 0


def test_a_server_that_is_told_to_stop_ends_with_status_0(folder: Path, served: Served) -> None:
    """Last, because it ends the server of the tests before."""
    status, log = served.stop()
    assert status == 0
    assert [line["event"] for line in log if line["level"] == "error"] == []
    assert [line["event"].partition(" ")[0] for line in log].count("compiling") >= 1
    assert log[-1] == log[-1] | {"event": "drained", "all_finished": True}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["/nowhere"], "checkpoint: got '/nowhere'; accepted: the folder of a checkpoint"),
        (["{folder}", "--port", "99999"], "port: got '99999'; accepted: a whole number from 0 to 65535"),
        (["{folder}", "--port", "http"], "port: got 'http'"),
        (["{folder}", "--log-level", "loud"], "log-level: got 'loud'"),
        (["{folder}", "--kv-dtype", "int3"], "kv-dtype: got 'int3'; accepted: did you mean int8 or int4? one of"),
        (["{folder}", "--kv-dtype", "f8_e4m3"], "kv-dtype: got 'f8_e4m3'; accepted: one of bf16, f32, int8"),
        (["{folder}", "--compute-dtype", "f8"], "compute-dtype: got 'f8'"),
        (["{folder}", "--compute-dtype", "fp16"], "compute-dtype: got 'fp16'; accepted: "),
        (["{folder}", "--weights-dtype", "int4"], "weight-group: got nothing; accepted: 32, 64, 128"),
        (["{folder}", "--weights-dtype", "int8", "--weight-group", "32"], "weight-group: got 32"),
        (["{folder}", "--weights-dtype", "bf16", "--kv-dtype", "f32"], "compute-dtype: got 'weights-dtype bf16, kv"),
        (["{folder}", "--batch-seqs", "many"], "batch-seqs: got 'many'"),
        (["{folder}", "--max-model-len", "0"], "max-model-len: got '0'"),
        (["{folder}", "--batching", "random"], "batching: got 'random'; accepted: one of disaggregated, interleaved\n"),
        (
            ["{folder}", "--batching", "static"],
            "batching: got 'static'; accepted: one of disaggregated, interleaved\n",
        ),
        (["{folder}", "--chunk-tokens", "8"], "chunk-tokens: got 8; accepted: more than the largest batch (32)"),
        (["{folder}", "--draft", "/nowhere"], "draft: got '/nowhere'; accepted: the folder of a checkpoint"),
        (["{folder}", "--processes", "2"], "processes: got 2; accepted: this with --coordinator"),
        (["{folder}", "--process", "0"], "process: got 0; accepted: this with --coordinator"),
        (["{folder}", "--mesh", "rows=2"], "mesh axis: got 'rows'"),
        (["{folder}", "--on", "v5e:2x2"], "option: got '--on'"),
        (["{folder}", "--pages", "1"], "pages: got 1; accepted: 32 or more: a page for each of the 32 sequences"),
        (["{folder}", "--draft", "{folder}"], "draft-length: got 0; accepted: 1 or more with a draft model"),
        (["llama:2M", "--port", "abc"], "port: got 'abc'"),
        (["{folder}", "--drain", "soon"], "drain: got 'soon'"),
        (["{folder}", "--chat-template", "/nowhere"], "chat template: got '/nowhere'"),
        (["{folder}", "--weights-of", "x"], "weights-of: got 'x'; accepted: this with a plan only"),
        (["{folder}", "--host", "no.such.host.invalid"], "host: got 'no.such.host.invalid'"),
        (["{folder}/config.json"], "plan"),
        (
            ["{folder}", "--max-model-len", "512", "--port", "0"],
            "max-model-len: got 512; accepted: at most the model's 256",
        ),
    ],
)
def test_wrong_options_are_one_line(
    rooftop: Callable[..., Any], folder: Path, arguments: list[str], message: str
) -> None:
    answer = rooftop("serve", *(argument.format(folder=folder) for argument in arguments))
    assert (answer.status, answer.out) == (2, "")
    assert answer.err.count("\n") == 1 and message in answer.err


def test_a_plan_needs_the_checkpoint_of_its_model(rooftop: Callable[..., Any], folder: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text(rooftop("plan", "serve", "llama3-8b", "--on", "v5e:2x4", "--json").out)
    answer = rooftop("serve", str(plan))
    assert answer.status == 2 and "accepted: --weights-of DIR: the folder of a checkpoint of llama3-8b" in answer.err
    answer = rooftop("serve", str(plan), "--weights-of", str(folder))
    assert answer.status == 2 and "a checkpoint of the plan's model, llama3-8b" in answer.err


def test_a_plan_says_where_and_how_much(rooftop: Callable[..., Any], folder: Path, tmp_path: Path) -> None:
    """Also one that has searched for its batch; and what an engine does not split is refused."""
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_attention_heads": 8, "hidden_size": 64}))
    asked = ["plan", "serve", str(tmp_path / "config.json"), "--on", "v5e:2x2", "--prompt", "32", "--generate", "32"]
    plan = tmp_path / "plan.json"
    mesh = ["--mesh", "context=2,tensor=2", "--kv-split"]
    for more, axes in (
        ([*mesh, "seq"], {"context": 2, "tensor": 2}), ([*mesh, "batch"], {"context": 2, "tensor": 2}), ([], None)
    ):  # fmt: skip
        document = json.loads(rooftop(*asked, *more, "--json").out)
        assert document["workload"]["batch_seqs"] is None
        configuration = configuration_of(document)
        assert configuration.policy.max_batch == document["generate"]["batch"] > 1
        assert axes is None or dict(configuration.mesh) == axes
        assert configuration.kv_split == document["kv_split"]
        plan.write_text(json.dumps(document))
        assert read_source(plan, tmp_path).plan == document
    kinds = {("int8", "int8", None): ("int8", "int8"), ("int4", "bf16", 64): ("int4-64", "plain"),
             ("f8_e4m3", "bf16", None): ("f8_e4m3", "plain"),
             ("int4", "f8_e4m3", None): ("plain", "plain")}  # fmt: skip
    for (weights, kv, group), engines in kinds.items():
        document["dtypes"] |= {"weights": weights, "kv": kv, "weight_group": group}
        assert (configuration_of(document).weights_dtype, configuration_of(document).kv_dtype) == engines
    document["mesh"]["axes"]["rows"] = 2
    with pytest.raises(
        RooftopError, match=r"plan mesh axis rows: got 2; accepted: 1: an engine's axes are data, stage"
    ):
        configuration_of(document)


def test_an_example_is_made_once(rooftop: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = make_example(Path("llama:1M"))
    model = from_huggingface(folder / "config.json")
    assert 0.5e6 < count_params(model).total < 2e6
    texts = Texts.load(folder, vocab=model.vocab, ends=())
    assert texts.ends and texts.chat([{"role": "user", "content": "hi"}], TOOLS, None, longest=999)
    assert "<tool_call>" in (texts.template_text(with_tools=True) or "")
    stamp = (folder / "model.safetensors").stat()
    assert make_example(Path("llama:1M")) == folder and (folder / "model.safetensors").stat() == stamp
    for wrong in ("llama:many", "llama:1", "llama:70B"):
        answer = rooftop("serve", wrong)
        assert (answer.status, answer.out, answer.err.count("\n")) == (2, "", 1)


def test_a_request_becomes_a_configuration(folder: Path) -> None:
    request = ServeRequest(
        checkpoint=folder, batch_seqs=64, mesh={"tensor": 4, "expert": 2}, kv_dtype="int8", weights_dtype="f32",
        draft_length=3, prefix_cache=False, max_queue=7,
    )  # fmt: skip
    configuration = request.configuration(None)
    assert configuration.policy == Policy(max_batch=64, chunk_tokens=288)
    assert (
        configuration.kv_dtype,
        configuration.prefix_cache,
        configuration.max_queue,
        configuration.draft_length,
    ) == ("int8", False, 7, 3)
    assert (configuration.weights_dtype, configuration.compute_dtype) == ("plain", "float32")
    assert dict(shrunk(configuration, 4).mesh) == {"tensor": 2, "expert": 2}
    assert (configuration.kv_split, replace(request, kv_split="batch").configuration(None).kv_split) == ("seq", "batch")
    assert replace(request, chunk_tokens=0).configuration(None).policy.chunk_tokens is None
    grouped = replace(request, weights_dtype="int4", weight_group=64).configuration(None)
    assert (grouped.weights_dtype, grouped.compute_dtype) == ("int4-64", None)
    planned = replace(configuration, weights_dtype="int8", kv_dtype="int8", mesh=(("tensor", 2),))
    followed = ServeRequest(checkpoint=folder).configuration(planned)
    assert (followed.weights_dtype, followed.kv_dtype, followed.mesh) == ("int8", "int8", (("tensor", 2),))


def test_options_and_the_port_are_checked_before_jax_is_imported(folder: Path) -> None:
    """Wrong options and an occupied port are answered by a process in which JAX cannot be imported."""
    code = (
        "import socket, sys\nsys.modules.update(dict.fromkeys(('jax', 'jaxlib', 'uvicorn', 'starlette')))\n"
        "from rooftop.core import extras\nextras.is_installed = lambda _: True\n"
        "from rooftop.cli.main import main\n"
        "taken = socket.create_server(('127.0.0.1', 0)).getsockname()[1]\n"
        f"for words in (['--port', str(taken)], ['--pages', '1'], ['--mesh', 'rows=2'], ['--chunk-tokens', '8']):\n"
        f"    try: main(['serve', {str(folder)!r}, *words])\n    except SystemExit as end: print(end.code)\n"
    )
    code = code.replace(
        "taken = socket.create_server(('127.0.0.1', 0)).getsockname()[1]",
        "listening = socket.create_server(('127.0.0.1', 0))\ntaken = listening.getsockname()[1]",
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["2"] * 4, done.stderr
    assert [line.partition(": got")[0] for line in done.stderr.splitlines()] == [
        "rooftop: port", "rooftop: pages", "rooftop: mesh axis", "rooftop: chunk-tokens",
    ]  # fmt: skip


def test_help_and_errors_import_nothing_heavy() -> None:
    code = (
        "import sys\nfrom rooftop.cli.main import main\n"
        "for words in (['serve', '--help'], ['bench', 'serve', '--help']):\n"
        "    try: main(words)\n    except SystemExit: pass\n"
        "print([name for name in ('jax', 'numpy', 'starlette', 'httpx', 'rich') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--url", "http://127.0.0.1:9", "--requests-per-second", "1"], 2, "url: got 'http://127.0.0.1:9'"),
        (["--url", "nonsense", "--requests-per-second", "1"], 2, "url: got 'nonsense'"),
        (["--url", "http://127.0.0.1:9"], 2, "requests-per-second: got nothing; accepted: this, --trace or"),
        (["--url", "http://127.0.0.1:9", "--trace", "/nowhere.csv"], 2, "trace file"),
        (["--url", "http://127.0.0.1:9", "--requests-per-second", "1", "--plan", "/nowhere"], 2, "plan"),
    ],
)
def test_a_replay_that_cannot_be_is_one_line(
    rooftop: Callable[..., Any], arguments: list[str], status: int, message: str
) -> None:
    answer = rooftop("bench", "serve", *arguments)
    assert (answer.status, answer.out) == (status, "")
    assert answer.err.count("\n") == 1 and message in answer.err


def test_measured_times_are_those_of_the_programs() -> None:
    def program(sequences: int, tokens: int, context_tokens: int, seconds: float) -> MeasuredProgram:
        return MeasuredProgram(sequences=sequences, tokens=tokens, context_tokens=context_tokens, seconds=seconds)

    times = MeasuredTimes(
        page_tokens=16, kv_tokens=1024, overhead_s=0.5,
        programs=(
            program(1, 0, 64, 1.0), program(4, 0, 64, 2.0), program(4, 0, 256, 3.0),
            program(1, 16, 64, 10.0), program(4, 64, 64, 20.0), program(1, 64, 256, 40.0),
        ),
    )  # fmt: skip
    assert [times.generate_s(1, 10), times.generate_s(2, 10), times.generate_s(3, 600)] == [1.5, 2.5, 3.5]
    assert times.generate_s(9, 9) == 2.5  # Larger than any that ran: the largest.
    assert times.prefill_s([(10, 0)]) == 10.5
    assert times.prefill_s([(10, 0), (5, 3)]) == 20.5
    assert times.prefill_s([(70, 0)]) == 0.5 + 40 + 10  # In pieces of 64 and 6.
    assert times.mixed_s([(10, 0)], 2, 20) == 12.5
