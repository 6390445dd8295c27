"""The API over real sockets, from the real openai client; the engine echoes, so that each answer is known."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from pydantic import BaseModel

from rooftop.core.errors import RooftopError
from rooftop.serve.sockets import bind
from tests.support import serving_echo
from tests.support.serving_process import TEXT, Served, started

#: A template by which calls are written as Hermes and Qwen write them.
TOOL_USE = "{{ messages[-1].content }}{# <tool_call> #}"


class Place(BaseModel):
    city: str
    country: str | None = None


class Weather(BaseModel):
    """The weather at places."""

    places: list[Place]
    days: int


def serving(folder: Path, **options: Any) -> AbstractContextManager[Served]:
    command = [sys.executable, str(Path(serving_echo.__file__)), json.dumps(options), str(folder)]
    return started(command, folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    serving_echo.tokenizer().save(folder)
    # With tools the engine says what the last message says.
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text(TOOL_USE)
    return folder


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    breaks = int(serving_echo.tokenizer().encode("X")[0])
    with serving(folder, engine={"breaks": breaks}) as server:
        yield server


@pytest.fixture(scope="module")
def client(served: Served) -> openai.OpenAI:
    return served.client()


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["echo"]
    assert client.models.retrieve("echo").id == "echo"
    with pytest.raises(openai.NotFoundError, match="accepted: 'echo'"):
        client.models.retrieve("other")


def test_a_chat_whole_and_streamed(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "system", "content": "be 日本"}, {"role": "user", "content": "Größe 🙂?"}]
    whole = client.chat.completions.create(model="echo", messages=messages)
    (choice,) = whole.choices
    # The prompt comes back, special tokens unseen; with the token that ends a turn the engine ends its answer.
    assert choice.message.role == "assistant" and choice.finish_reason == "stop"
    assert (choice.message.content or "").startswith("system\nbe 日本")
    assert whole.usage is not None
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    parts = list(
        client.chat.completions.create(
            model="echo", messages=messages, stream=True, stream_options={"include_usage": True}
        )
    )
    *parts, last = parts
    assert parts[0].choices[0].delta.role == "assistant"
    assert "".join(part.choices[0].delta.content or "" for part in parts) == choice.message.content
    assert [part.choices[0].finish_reason for part in parts][-1] == "stop"
    assert all(part.usage is None for part in parts)
    assert last.choices == [] and last.usage is not None and last.usage.total_tokens == whole.usage.total_tokens
    assert len({part.id for part in [*parts, last]}) == 1


def test_completions_of_several_prompts_and_choices(client: openai.OpenAI) -> None:
    completion = client.completions.create(model="echo", prompt=["abc", "the lazy dog"], n=2, max_tokens=30)
    assert [choice.text for choice in completion.choices] == ["abc", "abc", "the lazy dog", "the lazy dog"]
    assert [choice.index for choice in completion.choices] == [0, 1, 2, 3]
    tokenizer = serving_echo.tokenizer()
    count = len(tokenizer.encode("abc")) + len(tokenizer.encode("the lazy dog"))
    assert completion.usage is not None and completion.usage.prompt_tokens == count
    ids = tokenizer.encode("fox").tolist()
    assert client.completions.create(model="echo", prompt=ids).choices[0].text == "fox"
    assert client.completions.create(model="echo", prompt="fox", echo=True).choices[0].text == "foxfox"
    texts = ["", ""]
    for part in client.completions.create(model="echo", prompt="日本語 Größe", n=2, max_tokens=50, stream=True):
        for choice in part.choices:
            texts[choice.index] += choice.text
    assert texts == ["日本語 Größe"] * 2


def test_lengths_and_stop_strings(served: Served, client: openai.OpenAI) -> None:
    cut = client.completions.create(model="echo", prompt=TEXT, max_tokens=3)
    assert cut.choices[0].finish_reason == "length" and cut.usage is not None and cut.usage.completion_tokens == 3
    completion = client.completions.create(
        model="echo", prompt=TEXT, max_tokens=400, stop=["x j", "zzz"], extra_body={"ignore_eos": True}
    )
    assert completion.choices[0].text == TEXT.partition("x j")[0] and completion.choices[0].finish_reason == "stop"
    streamed = client.completions.create(model="echo", prompt=TEXT, max_tokens=100, stop="x j", stream=True)
    assert "".join(part.choices[0].text for part in streamed) == TEXT.partition("x j")[0]
    token = int(serving_echo.tokenizer().encode(" brown")[0])
    ended = client.completions.create(model="echo", prompt=TEXT, max_tokens=100, extra_body={"stop_token_ids": [token]})
    assert ended.choices[0].finish_reason == "stop" and ended.choices[0].text == "the quick"
    # What a stop string ended does not go on in the engine.
    served.wait_until_idle()


def test_log_probabilities(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "Größe"}]
    completion = client.chat.completions.create(model="echo", messages=messages, logprobs=True, top_logprobs=2)
    content = completion.choices[0].logprobs
    assert content is not None and content.content is not None
    spelled = b"".join(bytes(entry.bytes or []) for entry in content.content)
    assert "Größe".encode() in spelled
    assert all(len(entry.top_logprobs) == 2 and entry.logprob == -0.5 for entry in content.content)
    parts = client.chat.completions.create(model="echo", messages=messages, logprobs=True, stream=True)
    streamed = [part.choices[0].logprobs for part in parts]
    assert [entry.token for logprobs in streamed if logprobs for entry in logprobs.content or ()] == [
        entry.token for entry in content.content
    ]
    legacy = client.completions.create(model="echo", prompt=TEXT, max_tokens=5, logprobs=1).choices[0]
    assert legacy.logprobs is not None and legacy.logprobs.tokens is not None
    assert "".join(legacy.logprobs.tokens) == legacy.text
    assert [
        legacy.text[at:][: len(token)]
        for at, token in zip(legacy.logprobs.text_offset or [], legacy.logprobs.tokens, strict=True)
    ] == legacy.logprobs.tokens


def test_answers_of_a_schema(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}, "b": {"enum": ["x", "y"]}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    messages: Any = [{"role": "user", "content": "make it"}]
    answer_format: Any = {"type": "json_schema", "json_schema": {"name": "made", "schema": schema, "strict": True}}
    completion = client.chat.completions.create(model="echo", messages=messages, response_format=answer_format)
    jsonschema.validate(json.loads(completion.choices[0].message.content or ""), schema)
    assert completion.choices[0].finish_reason == "stop"
    completion = client.chat.completions.create(
        model="echo", messages=messages, n=2, extra_body={"guided_regex": "(yes|no)[0-9]{2}"}
    )
    assert [choice.message.content for choice in completion.choices] == ["no00", "no00"]


def test_errors_have_openai_s_form(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "hi"}]
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt", messages=messages)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model="echo", messages=messages, temperature=3)
    assert wrong.value.param == "temperature" and "got 3; accepted: number from 0 to 2" in wrong.value.message
    with pytest.raises(openai.BadRequestError, match="no tools"):
        client.chat.completions.create(model="echo", messages=[{"role": "tool", "content": "x", "tool_call_id": "1"}])
    # By the code clients know that less may do.
    with pytest.raises(openai.BadRequestError, match=r"prompt: got '\d+ tokens'") as long:
        client.completions.create(model="echo", prompt=TEXT * 100)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(
        openai.BadRequestError, match=r"max_tokens: got 4000; accepted: at most \d+: prompt of 9"
    ) as long:
        client.completions.create(model="echo", prompt=TEXT, max_tokens=4000)
    assert (long.value.code, long.value.param) == ("context_length_exceeded", "max_tokens")
    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(model="echo", messages=messages, max_completion_tokens=4000)
    assert (long.value.code, long.value.param) == ("context_length_exceeded", "max_completion_tokens")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            b'{"model": ',
            "body: got '{\"model\": '; accepted: JSON in UTF-8, without NaN, Infinity or half a surrogate pair (Input",
        ),
        (b"", "body: got ''; accepted: JSON"),
        (b'{"model": "echo", "prompt": "a", "suffix": "x"}', "suffix: got 'x'; accepted: one of model, max_tokens"),
        (b'{"model": "echo", "prompt": "a", "best_of": 2}', "best_of: got 2; accepted: 1"),
        (b'{"prompt": "a", "skip_special_tokens": false}', "skip_special_tokens: got False; accepted: true"),
        (b'{"prompt": "a", "min_tokens": 5}', "min_tokens: got 5; accepted: 0"),
        (
            b'{"prompt": "a", "guided_regex": "a", "response_format": {"type": "json_object"}}',
            "guided_regex: got 'a'; accepted: this without response_format",
        ),
        (
            b'{"prompt": "a", "guided_json": {}, "structured_outputs": {"regex": "a"}}',
            "structured_outputs.regex: got 'a'; accepted: this without guided_json",
        ),
        (b'{"prompt": "a", "guided_json": {"type": "strange"}}', "guided_json: got 'a constraint"),
        (b'{"model": "echo"}', "prompt: got nothing; accepted: a string that is not empty"),
    ],
)
def test_what_is_wrong_is_said_as_it_was_given(served: Served, body: bytes, message: str) -> None:
    answer = served.http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400 and answer.json()["error"]["message"].startswith(message)


def test_fields_that_clients_of_other_servers_send(served: Served) -> None:
    """Hints that nothing reads, and fields with the only value that is served."""
    both: dict[str, Any] = {
        "service_tier": "auto", "prompt_cache_key": "a", "safety_identifier": "b", "priority": 1, "best_of": 1,
        "min_tokens": 0, "length_penalty": 1.0, "use_beam_search": False, "skip_special_tokens": True,
        "spaces_between_special_tokens": True, "include_stop_str_in_output": False,
    }  # fmt: skip
    chat = {"reasoning_effort": "low", "modalities": ["text"], "verbosity": "low", "add_generation_prompt": True}
    messages = [{"role": "user", "content": "a"}]
    answers = (
        served.http.post("/v1/completions", json={"prompt": "a", **both}),
        served.http.post("/v1/chat/completions", json={"messages": messages, "echo": False, **chat, **both}),
    )
    assert [answer.status_code for answer in answers] == [200, 200], [answer.text for answer in answers]


@pytest.mark.parametrize("model", [{}, {"model": None}, {"model": "echo"}])
def test_a_request_without_a_model_asks_the_one_that_is_served(served: Served, model: dict[str, Any]) -> None:
    chat = served.http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "a"}], **model})
    text = served.http.post("/v1/completions", json={"prompt": "a", **model})
    assert [(answer.status_code, answer.json().get("model")) for answer in (chat, text)] == [(200, "echo")] * 2
    schemas = {"components": served.http.get("/openapi.json").json()["components"]}
    jsonschema.validate({"prompt": "a", **model}, {"$ref": "#/components/schemas/CompletionRequest", **schemas})


def test_a_part_that_is_no_text_is_named(client: openai.OpenAI) -> None:
    picture: Any = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model="echo", messages=[{"role": "user", "content": [picture]}])
    assert wrong.value.param == "messages[0].content[0].type"
    assert "got 'image_url'; accepted: one of \"text\"" in wrong.value.message


def test_what_the_engine_breaks_off_is_an_error(served: Served, client: openai.OpenAI) -> None:
    with pytest.raises(openai.InternalServerError, match="a step failed"):
        client.completions.create(model="echo", prompt="X marks", max_tokens=20)
    parts = client.completions.create(model="echo", prompt="X marks", max_tokens=20, stream=True)
    with pytest.raises(openai.APIError, match="a step failed"):
        list(parts)
    assert "[DONE]" not in served.complete(prompt="X marks", stream=True).text


@pytest.mark.parametrize(
    ("content", "kind", "status"),
    [
        (b'{"model": "echo", "prompt": "a"}', "text/plain", 415),
        (b"", "application/json", 400),
        (b"{", "application/json", 400),
        (b"\xff\xfe", "application/json", 400),
        (b"[" * 50_000, "application/json", 400),
        (b'{"model": "echo", "prompt": "\\udc00"}', "application/json", 400),
        (b'{"model": "echo", "prompt": "' + b"a" * (33 * 2**20) + b'"}', "application/json", 413),
        (b'{"model": "echo", "prompt": "' + b"ab " * 2**17 + b'"}', "application/json", 400),
    ],
    ids=["type", "empty", "cut", "bytes", "deep", "surrogate", "huge", "long"],
)
def test_malformed_and_huge_bodies(served: Served, content: bytes, kind: str, status: int) -> None:
    answer = served.http.post("/v1/completions", content=content, headers={"content-type": kind})
    assert answer.status_code == status
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert len(answer.text) < 2000 and "\\n" not in answer.text
    assert served.complete().json()["choices"][0]["text"] == TEXT


def test_paths_and_methods_that_are_not(served: Served) -> None:
    assert served.http.get("/v1/nothing").json()["error"]["message"] == (
        "GET /v1/nothing: Not Found; GET /openapi.json lists what is there"
    )
    answer = served.http.get("/v1/completions")
    assert answer.status_code == 405 and "error" in answer.json() and answer.headers["allow"] == "POST"


def test_health_and_metrics(served: Served) -> None:
    assert served.http.get("/health").json() == {"status": "alive", "step_age_s": 0.0}
    assert served.http.get("/ready").json() == {"status": "ready"}
    before = served.metric("rooftop_time_to_first_token_seconds_count")
    gaps = served.metric("rooftop_inter_token_latency_seconds_count")
    served.complete(n=2, max_tokens=4)
    assert served.metric("rooftop_time_to_first_token_seconds_count") == before + 2
    assert served.metric("rooftop_inter_token_latency_seconds_count") == gaps + 6
    text = served.http.get("/metrics").text
    for name in (
        "time_to_first_token_seconds", "time_per_output_token_seconds", "inter_token_latency_seconds",
        "request_seconds",
        "waiting_requests", "running_requests", "kv_pages_used", "kv_pages", "prefix_hit_tokens_total",
        "preemptions_total", "accepted_tokens_total", "compilations_total", "host_seconds_total", "sequences_total",
    ):  # fmt: skip
        assert f"\n# HELP rooftop_{name} " in f"\n{text}", name
    assert 'rooftop_policy{batching="interleaved",chunk_tokens="",max_batch="64",' in text


def test_the_published_document_says_what_there_is(served: Served) -> None:
    document = served.http.get("/openapi.json").json()
    assert set(document["paths"]) == {
        "/v1/models", "/v1/models/{model}", "/v1/completions", "/v1/chat/completions", "/health", "/ready", "/metrics",
        "/openapi.json",
    }  # fmt: skip
    schemas = {"components": document["components"]}
    for body, name in (
        (served.complete(logprobs=2).json(), "Completion"),
        (served.http.get("/v1/models").json(), "Models"),
    ):
        jsonschema.validate(body, {"$ref": f"#/components/schemas/{name}", **schemas})
    chat = {"model": "echo", "messages": [{"role": "user", "content": "a"}], "logprobs": True}
    body = served.http.post("/v1/chat/completions", json=chat).json()
    jsonschema.validate(body, {"$ref": "#/components/schemas/ChatCompletion", **schemas})
    with served.http.stream("POST", "/v1/chat/completions", json=chat | {"stream": True}) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        *events, done = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert done == "[DONE]"
    for event in events:
        jsonschema.validate(json.loads(event), {"$ref": "#/components/schemas/ChatCompletionChunk", **schemas})


def test_clients_that_leave_are_cancelled(folder: Path) -> None:
    with serving(folder, engine={"step_s": 0.01, "max_model_len": 100_000}) as served:
        long: Any = {"max_tokens": 50_000, "ignore_eos": True}
        with served.client().completions.create(
            model="echo", prompt=TEXT, max_tokens=50_000, stream=True, extra_body={"ignore_eos": True}
        ) as parts:
            next(iter(parts))
            assert served.metric("rooftop_running_requests") == 1
        served.wait_until_idle()
        with pytest.raises(httpx.ReadTimeout):
            served.complete(**long, n=3, timeout=httpx.Timeout(30, read=0.2))
        served.wait_until_idle()
        # A client that is gone in the middle of its request is no one's trouble.
        with socket.create_connection(("127.0.0.1", int(served.url.rpartition(":")[2]))) as half:
            half.sendall(
                b"POST /v1/completions HTTP/1.1\r\ncontent-length: 100\r\ncontent-type: application/json\r\n\r\n{"
            )
        assert served.complete().status_code == 200
        assert served.metric("rooftop_sequences_total") == 5
        status, log = served.stop()
    assert status == 0
    assert sum(line.get("broken_off") == "the client left" for line in log) == 2
    assert not any(line["level"] == "error" for line in log), log


def test_a_full_queue_is_429(folder: Path) -> None:
    with serving(folder, engine={"room": 2, "step_s": 0.01, "max_model_len": 100_000}) as served:
        long: Any = {"max_tokens": 50_000, "extra_body": {"ignore_eos": True}}
        with served.client().completions.create(model="echo", prompt=TEXT, stream=True, **long) as parts:
            next(iter(parts))
            # Of two more there is room for one: neither is taken.
            with pytest.raises(openai.RateLimitError) as full:
                served.client().completions.create(model="echo", prompt="a", n=2)
            assert full.value.response.headers["retry-after"] == "3"
            assert full.value.code == "rate_limit_exceeded"
            assert served.client().completions.create(model="echo", prompt="a").choices[0].text == "a"
        served.wait_until_idle()


def call(city: str) -> str:
    arguments = json.dumps({"places": [{"city": city}], "days": 2}, ensure_ascii=False)
    return f'<tool_call>\n{{"name": "Weather", "arguments": {arguments}}}\n</tool_call>'


def test_calls_of_tools_whole_and_streamed(client: openai.OpenAI) -> None:
    tools: Any = [openai.pydantic_function_tool(Weather)]
    messages: Any = [{"role": "user", "content": f"Let me see.\n{call('Köln')}\n{call('{')}"}]
    completion = client.chat.completions.create(model="echo", messages=messages, tools=tools)
    (choice,) = completion.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me see.")
    calls = [call for call in choice.message.tool_calls or () if call.type == "function"]
    assert [call.function.name for call in calls] == ["Weather"] * 2
    assert [Weather.model_validate_json(call.function.arguments).places[0].city for call in calls] == ["Köln", "{"]
    assert len({call.id for call in calls}) == 2
    # The client's own reading of a stream: it refuses parts that do not fit together.
    with client.chat.completions.stream(model="echo", messages=messages, tools=tools) as stream:
        deltas = [event for event in stream if event.type == "tool_calls.function.arguments.delta"]
        final = stream.get_final_completion().choices[0]
    assert len(deltas) > 4
    assert (final.finish_reason, final.message.content) == ("tool_calls", "Let me see.")
    parsed = [call.function.parsed_arguments for call in final.message.tool_calls or ()]
    assert parsed == [Weather(places=[Place(city=city)], days=2) for city in ("Köln", "{")]
    cut = client.chat.completions.create(model="echo", messages=messages, tools=tools, max_tokens=60).choices[0]
    assert cut.finish_reason == "length" and len(cut.message.tool_calls or ()) == 1
    text: Any = [{"role": "user", "content": "a <tool_call> of none"}]
    plain = client.chat.completions.create(model="echo", messages=text, tools=tools).choices[0]
    assert (plain.finish_reason, plain.message.content) == ("stop", "a <tool_call> of none")
    assert plain.message.tool_calls is None
    # Not asked for tools: what looks like a call is text, by the template without tools.
    none = client.chat.completions.create(model="echo", messages=messages, tools=tools, tool_choice="none")
    assert call("Köln") in (none.choices[0].message.content or "")


def test_an_answer_must_call_a_tool(client: openai.OpenAI) -> None:
    function: Any = {"name": "turn", "parameters": {"type": "object", "properties": {"to": {"enum": ["left"]}},
                     "required": ["to"], "additionalProperties": False}}  # fmt: skip
    tools: Any = [{"type": "function", "function": function}, {"type": "function", "function": {"name": "stay"}}]
    messages: Any = [{"role": "user", "content": "Go!"}]
    named: Any = {"type": "function", "function": {"name": "turn"}}
    for choice, offered in ((named, tools), ("required", tools[:1])):
        asked: Any = {"model": "echo", "messages": messages, "tools": offered, "tool_choice": choice}
        with client.chat.completions.stream(**asked) as stream:
            streamed = stream.get_final_completion()
        for completion in (client.chat.completions.create(**asked), streamed):
            (call,) = completion.choices[0].message.tool_calls or ()
            assert (call.function.name, json.loads(call.function.arguments)) == ("turn", {"to": "left"})
            assert completion.choices[0].finish_reason == "tool_calls" and not completion.choices[0].message.content
    for wrong, message in (
        ({"tool_choice": "required"}, "none or auto where there are no tools"),
        ({"tools": tools, "tool_choice": {"type": "function", "function": {"name": "trun"}}}, "did you mean turn"),
        ({"tools": tools, "tool_choice": "always"}, "tool_choice"),
        ({"tools": tools, "tool_choice": "required", "response_format": {"type": "json_object"}}, "response_format"),
    ):
        fields: Any = wrong
        with pytest.raises(openai.BadRequestError, match=message):
            client.chat.completions.create(model="echo", messages=messages, **fields)


def test_keys(folder: Path) -> None:
    with serving(folder, settings={"keys": ["sesame", "open"]}) as served:
        for key in ("sesame", "open"):
            assert served.client(key).completions.create(model="echo", prompt="a").choices[0].text == "a"
        with pytest.raises(openai.AuthenticationError) as wrong:
            served.client("wrong").models.list()
        assert wrong.value.code == "invalid_api_key"
        assert served.http.get("/v1/models").status_code == 401
        assert served.http.get("/v1/models").headers["www-authenticate"] == "Bearer"
        assert served.http.get("/health").status_code == served.http.get("/metrics").status_code == 200
        assert served.http.get("/openapi.json").json()["paths"]["/v1/models"]["get"]["security"] == [{"key": []}]


def test_web_pages_may_not_ask_unless_they_are_named(served: Served, folder: Path) -> None:
    preflight = {"origin": "https://page.example", "access-control-request-method": "POST"}
    answer = served.http.options("/v1/completions", headers=preflight)
    assert not any(name.startswith("access-control") for name in answer.headers)
    with serving(folder, settings={"origins": ["https://page.example"]}) as named:
        answer = named.http.options("/v1/completions", headers=preflight)
        assert answer.headers["access-control-allow-origin"] == "https://page.example"
        other = named.http.options("/v1/completions", headers=preflight | {"origin": "https://other.example"})
        assert "access-control-allow-origin" not in other.headers


def test_sigterm_finishes_what_runs(folder: Path) -> None:
    with serving(folder, engine={"holds_last": True}) as served:
        parts = iter(
            served.client().completions.create(
                model="echo", prompt="abc", max_tokens=60, stream=True, extra_body={"ignore_eos": True}
            )
        )
        text = next(parts).choices[0].text
        served.process.send_signal(signal.SIGTERM)
        text += "".join(part.choices[0].text for part in parts)
        status, lines = served.ended()
    assert text == "abc" * 20 and status == 0
    assert [line["event"] for line in lines] == ["ready", "draining", "answered", "drained"]
    assert lines[-1]["all_finished"] is True


def test_what_takes_longer_than_the_drain_ends_with_an_error(folder: Path) -> None:
    with serving(folder, engine={"step_s": 0.02, "max_model_len": 100_000}, drain_s=0.2) as served:
        parts = iter(
            served.client().completions.create(
                model="echo", prompt="abc", max_tokens=60_000, stream=True, extra_body={"ignore_eos": True}
            )
        )
        next(parts)
        served.process.send_signal(signal.SIGTERM)
        with pytest.raises(openai.APIError, match="shutting down"):
            list(parts)
        status, lines = served.ended()
    assert status == 0
    assert [line["all_finished"] for line in lines if line["event"] == "drained"] == [False]
    assert [line["broken_off"] for line in lines if line["event"] == "broken off"] == ["the server is shutting down"]


@pytest.mark.parametrize("texts", [False, True])
def test_logs_hold_prompts_only_if_asked(folder: Path, texts: bool) -> None:
    with serving(folder, settings={"log_texts": texts}) as served:
        served.complete(prompt="secret words", max_tokens=50)
        served.complete(prompt="secret words", max_tokens=50, stream=True)
        served.complete(prompt="secret words", max_tokens="secret")
        status, log = served.stop()
    assert status == 0
    answered = [line for line in log if line["event"] == "answered"]
    assert [line["finish"] for line in answered] == [["stop"]] * 2
    assert all(line["ttft_s"] <= line["seconds"] for line in answered)
    assert ("secret" in json.dumps(log)) == texts


def test_a_port_that_is_taken_or_none_is_one_line() -> None:
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        with pytest.raises(RooftopError, match=r"port: got \d+; accepted: one that is free at 127.0.0.1"):
            bind("127.0.0.1", taken.getsockname()[1])
    with pytest.raises(RooftopError, match="host: got 'no such host'"):
        bind("no such host", 0)


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/models/{model}"])
def test_schemathesis_finds_nothing(folder: Path, path: str) -> None:
    """A tool that nobody here wrote asks for what the document promises; the server answers as before at the end."""
    with serving(folder) as served:
        command = [
            str(Path(sys.executable).with_name("schemathesis")), "run", f"{served.url}/openapi.json",
            "--include-path", path,
            "--max-examples", "150", "--seed", "1", "--workers", "1", "--no-color",
            "--phases", "examples,coverage,fuzzing", "--request-timeout", "30",
            # What does not fit together, or into the model, is refused as well: no schema says that.
            "--exclude-checks", "positive_data_acceptance",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
        assert done.returncode == 0, done.stdout[-6000:]
        served.wait_until_idle()
        assert served.complete().json()["choices"][0]["text"] == TEXT
