"""Models by their names on the Hugging Face hub: presets, the local cache, and a hub on loopback."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rooftop.core.errors import RooftopError
from rooftop.models import find_model, load_model, model_meaning, preset_names, preset_source, presets
from rooftop.models.hub import Repository

#: Ids -> preset.
PRESETS = """
meta-llama/Llama-3.1-8B llama3.1-8b
meta-llama/Llama-3.1-8B-Instruct llama3.1-8b
meta-llama/Meta-Llama-3.1-8B-Instruct llama3.1-8b
unsloth/Meta-Llama-3.1-8B-Instruct llama3.1-8b
unsloth/Llama-3.1-8B llama3.1-8b
NousResearch/Meta-Llama-3-8B-Instruct llama3-8b
meta-llama/Meta-Llama-3-8B llama3-8b
meta-llama/Meta-Llama-3-70B-Instruct llama3-70b
meta-llama/Llama-3.1-70B-Instruct llama3.1-70b
meta-llama/Meta-Llama-3.1-70B-Instruct llama3.1-70b
meta-llama/Llama-3.3-70B-Instruct llama3.1-70b
unsloth/Llama-3.3-70B-Instruct llama3.1-70b
meta-llama/Llama-3.1-405B llama3.1-405b
meta-llama/Llama-3.1-405B-Instruct llama3.1-405b
meta-llama/Meta-Llama-3.1-405B-Instruct llama3.1-405b
meta-llama/Llama-3.2-1B llama3.2-1b
meta-llama/Llama-3.2-1B-Instruct llama3.2-1b
meta-llama/Llama-3.2-3B-Instruct llama3.2-3b
meta-llama/Llama-2-7b-hf llama2-7b
meta-llama/Llama-2-7b-chat-hf llama2-7b
meta-llama/Llama-2-13b-chat-hf llama2-13b
meta-llama/Llama-2-70b-chat-hf llama2-70b
meta-llama/Llama-4-Scout-17B-16E-Instruct llama4-scout
meta-llama/Llama-4-Scout-17B-16E llama4-scout
meta-llama/Llama-4-Maverick-17B-128E-Instruct llama4-maverick
Qwen/Qwen2.5-7B qwen2.5-7b
Qwen/Qwen2.5-7B-Instruct qwen2.5-7b
Qwen/Qwen2.5-32B-Instruct qwen2.5-32b
Qwen/Qwen2.5-72B qwen2.5-72b
Qwen/Qwen2.5-72B-Instruct qwen2.5-72b
Qwen/Qwen3-0.6B qwen3-0.6b
Qwen/Qwen3-0.6B-Base qwen3-0.6b
Qwen/Qwen3-8B qwen3-8b
Qwen/Qwen3-8B-Base qwen3-8b
unsloth/Qwen3-8B qwen3-8b
Qwen/Qwen3-32B qwen3-32b
Qwen/Qwen3-30B-A3B qwen3-30b-a3b
Qwen/Qwen3-30B-A3B-Instruct-2507 qwen3-30b-a3b
Qwen/Qwen3-30B-A3B-Thinking-2507 qwen3-30b-a3b
Qwen/Qwen3-235B-A22B qwen3-235b-a22b
Qwen/Qwen3-235B-A22B-Instruct-2507 qwen3-235b-a22b
Qwen/Qwen3-235B-A22B-Thinking-2507 qwen3-235b-a22b
Qwen/Qwen3-Coder-480B-A35B-Instruct qwen3-coder-480b-a35b
Qwen/Qwen3-Next-80B-A3B-Instruct qwen3-next-80b-a3b
Qwen/Qwen3-Next-80B-A3B-Thinking qwen3-next-80b-a3b
deepseek-ai/DeepSeek-V3 deepseek-v3
deepseek-ai/DeepSeek-V3-0324 deepseek-v3
deepseek-ai/DeepSeek-V3-Base deepseek-v3
deepseek-ai/DeepSeek-R1 deepseek-v3
deepseek-ai/DeepSeek-R1-0528 deepseek-v3
deepseek-ai/DeepSeek-V2-Lite-Chat deepseek-v2-lite
deepseek-ai/DeepSeek-V2-Chat deepseek-v2
deepseek-ai/DeepSeek-V3.2 deepseek-v3.2
mistralai/Mistral-7B-v0.1 mistral-7b
mistralai/Mixtral-8x7B-v0.1 mixtral-8x7b
mistralai/Mixtral-8x22B-v0.1 mixtral-8x22b
google/gemma-2-9b-it gemma2-9b
google/gemma-2-27b-it gemma2-27b
google/gemma-3-4b-it gemma3-4b
google/gemma-3-12b-it gemma3-12b
google/gemma-3-27b-it gemma3-27b
google/gemma-3-27b-pt gemma3-27b
unsloth/gemma-3-12b-it gemma3-12b
google/gemma-3n-E4B-it gemma3n-e4b
openai/gpt-oss-20b gpt-oss-20b
openai/gpt-oss-120b gpt-oss-120b
unsloth/gpt-oss-20b gpt-oss-20b
microsoft/phi-4 phi4
unsloth/phi-4 phi4
zai-org/GLM-4.5 glm-4.5
zai-org/GLM-4.5-Air glm-4.5-air
zai-org/GLM-4.5-Air-Base glm-4.5-air
zai-org/GLM-4.6 glm-4.6
moonshotai/Kimi-K2-Instruct kimi-k2
moonshotai/Kimi-K2-Instruct-0905 kimi-k2
MiniMaxAI/MiniMax-M2.5 minimax-m2.5
allenai/Olmo-3-7B-Instruct olmo3-7b
allenai/Olmo-3-32B-Think olmo3-32b
unsloth/Llama-3.2-1B-Instruct-bf16 llama3.2-1b
Llama-3.1-8B-Instruct llama3.1-8b
Qwen3-32B qwen3-32b
https://huggingface.co/meta-llama/Llama-3.1-8B-Instruct llama3.1-8b
https://huggingface.co/Qwen/Qwen3-30B-A3B-Instruct-2507/tree/main qwen3-30b-a3b
https://huggingface.co/Qwen/Qwen3-8B/blob/main/config.json qwen3-8b
huggingface.co/Qwen/Qwen3-8B?library=transformers qwen3-8b
hf.co/openai/gpt-oss-20b gpt-oss-20b
hf://meta-llama/Llama-3.2-3B llama3.2-3b
"""
#: Ids of other architectures, and of formats of weights that a preset does not have.
ASKED = """
neuralmagic/Meta-Llama-3.1-8B-Instruct-FP8 RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic
nvidia/Llama-3.1-405B-Instruct-FP4 RedHatAI/Meta-Llama-3.1-70B-Instruct-quantized.w8a8 Qwen/Qwen3-32B-AWQ
Qwen/Qwen3-30B-A3B-FP8 Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4 Qwen/Qwen3-235B-A22B-Instruct-2507-FP8
unsloth/Llama-3.1-8B-Instruct-bnb-4bit unsloth/gpt-oss-20b-BF16 Qwen/Qwen3-4B Qwen/Qwen3-14B
Qwen/Qwen2.5-7B-Instruct-1M Qwen/Qwen2.5-Coder-7B-Instruct Qwen/Qwen2.5-VL-7B-Instruct Qwen/QwQ-32B
mistralai/Mistral-7B-Instruct-v0.3 mistralai/Mistral-Small-24B-Instruct-2501 deepseek-ai/DeepSeek-V3.1
deepseek-ai/DeepSeek-R1-Distill-Llama-8B meta-llama/Llama-Guard-3-8B meta-llama/Llama-3.2-11B-Vision-Instruct
google/gemma-3-1b-it microsoft/Phi-3-mini-4k-instruct facebook/opt-125m openai-community/gpt2
unsloth/DeepSeek-V3-GGUF
"""
TABLE = [tuple(line.split()) for line in PRESETS.split("\n") if line]
CONFIG = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "hidden_act": "silu", "rope_theta": 10000.0,
}  # fmt: skip
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


class _Hub(BaseHTTPRequestHandler):
    """A hub with a few repositories."""

    def do_GET(self) -> None:  # a name of http.server
        self.server.asked.append((self.path, dict(self.headers)))  # type: ignore[attr-defined]
        status, body = {
            "/org/tiny/resolve/main/config.json": (200, json.dumps(CONFIG)),
            "/org/tiny-FP8/resolve/main/config.json": (200, json.dumps({**CONFIG, "quantization_config": FP8})),
            "/org/tiny/resolve/v2/config.json": (200, json.dumps({**CONFIG, "num_hidden_layers": 3})),
            "/org/gated/resolve/main/config.json": (403, ""),
            "/org/broken/resolve/main/config.json": (200, "<html>"),
        }.get(self.path, (404, ""))
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: object) -> None:
        """Nothing is logged."""


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty cache, and no hub to ask."""
    for name in ("HF_HUB_CACHE", "HF_TOKEN", "HF_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("no_proxy", "*")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, dict[str, str]]]]:
    """A hub on loopback, and the requests that it gets."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    server.asked = []  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}/")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    yield server.asked  # type: ignore[attr-defined]
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(("name", "preset"), TABLE)
def test_an_id_is_the_preset_of_its_architecture(name: str, preset: str) -> None:
    assert find_model(name) == load_model(preset)
    assert preset_source(name) == preset_source(preset)
    assert model_meaning(name) in (None, f"{name} is {preset}")


@pytest.mark.parametrize("name", ASKED.split())
def test_other_architectures_and_formats_are_asked_of_the_hub(name: str) -> None:
    assert model_meaning(name) == f"{name} is https://huggingface.co/{name}/resolve/main/config.json"
    with pytest.raises(RooftopError, match=rf"^model: got '{name}'; accepted: .*HF_HUB_OFFLINE is set$") as error:
        find_model(name)
    assert "\n" not in str(error.value)


def test_the_table_has_a_hundred_ids() -> None:
    assert len(TABLE) + len(ASKED.split()) >= 100 and {preset for _, preset in TABLE} <= set(presets())


def test_a_format_that_a_preset_does_not_have_names_the_preset_of_its_sizes() -> None:
    for name in ("neuralmagic/Meta-Llama-3.1-8B-Instruct-FP8", "x/Llama-3.1-8B-Instruct-AWQ-INT4"):
        with pytest.raises(RooftopError, match=r"llama3.1-8b has its sizes; --weights-dtype its format"):
            find_model(name)


def test_a_configuration_is_fetched_with_its_format(hub: list[tuple[str, dict[str, str]]]) -> None:
    plain, stored = find_model("org/tiny"), find_model("org/tiny-FP8")
    assert plain.name == "tiny" and plain.layers == 2 and plain.stored is None
    assert stored.stored is not None and stored.stored.method == "fp8"
    assert find_model("https://huggingface.co/org/tiny/tree/v2").layers == 3
    assert [path.rpartition("/")[0] for path, _ in hub] == [
        "/org/tiny/resolve/main", "/org/tiny-FP8/resolve/main", "/org/tiny/resolve/v2",
    ]  # fmt: skip
    assert not any("Authorization" in headers for _, headers in hub)


def test_a_token_goes_to_the_hub(hub: list[tuple[str, dict[str, str]]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    find_model("org/tiny")
    assert hub[0][1]["Authorization"] == "Bearer hf_secret"
    with pytest.raises(RooftopError, match="403") as error:
        find_model("org/gated")
    assert "hf_secret" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("org/gated", r"shows it to those with access alone \(403\): set HF_TOKEN, or mend the name"),
        ("org/none", r"has no config\.json of it \(404\)"),
        ("org/broken", r"config\.json is no JSON"),
    ],
)
@pytest.mark.usefixtures("hub")
def test_what_the_hub_does_not_have_is_refused_in_one_line(name: str, message: str) -> None:
    with pytest.raises(RooftopError, match=rf"^model: got '{name}'; accepted: a preset .*{message}") as error:
        find_model(name)
    assert "\n" not in str(error.value)


def test_a_hub_that_does_not_answer_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{free.getsockname()[1]}")
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        with pytest.raises(RooftopError, match=r"http://127\.0\.0\.1:\d+ did not answer \(Connection refused\)$"):
            find_model("org/tiny")


def test_an_endpoint_that_is_no_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "file:///etc")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    with pytest.raises(RooftopError, match=r"^HF_ENDPOINT: got 'file:///etc'; accepted: an address"):
        find_model("org/tiny")


def test_the_local_cache_is_read_before_the_hub_is_asked(tmp_path: Path) -> None:
    folder = tmp_path / "hf" / "hub" / "models--meta-llama--Llama-3.1-8B-Instruct"
    for commit, layers in (("abc", 4), ("def", 5)):
        (folder / "snapshots" / commit).mkdir(parents=True)
        (folder / "snapshots" / commit / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": layers}))
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("abc")
    name = "meta-llama/Llama-3.1-8B-Instruct"
    model = find_model(name)
    assert (model.name, model.layers) == ("Llama-3.1-8B-Instruct", 4)
    assert model_meaning(name) == f"{name} is {folder / 'snapshots' / 'abc' / 'config.json'}"
    assert find_model(f"https://huggingface.co/{name}/tree/def").layers == 5
    # The preset of an own repository is read as it ships.
    assert find_model("meta-llama/Llama-3.1-8B") == load_model("llama3.1-8b")


def test_a_folder_of_that_path_is_read_before_the_hub_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "tiny").mkdir(parents=True)
    (tmp_path / "org" / "tiny" / "config.json").write_text(json.dumps(CONFIG))
    monkeypatch.chdir(tmp_path)
    assert find_model("org/tiny").layers == 2 and model_meaning("org/tiny") is None


@given(st.sampled_from(sorted(preset_names())), st.sampled_from(["", "-Instruct", "-it", "-2507", "-chat-hf", "-Base"]))
def test_words_that_say_nothing_of_the_architecture_leave_the_preset(name: str, suffix: str) -> None:
    assert find_model(name + suffix) == load_model(name)


@given(st.text(max_size=40))
def test_any_text_is_a_repository_or_none(text: str) -> None:
    repository = Repository.parse(text)
    assert repository is None or repository.id.count("/") == 1
    parts = [] if repository is None else [*repository.id.split("/"), repository.revision]
    assert not any(part.startswith(".") for part in parts)
