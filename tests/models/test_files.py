"""Models from Hugging Face files and presets, and the verb that shows them."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rooftop.core.errors import RooftopError
from rooftop.models import ModelConfig, RopeScaling, from_huggingface, load_model, preset_source, presets

PRESETS = Path(__file__).parents[2] / "rooftop" / "models" / "presets"


def _tiny(model_type: str, **more: Any) -> dict[str, Any]:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
    return {"model_type": model_type, **sizes, "vocab_size": 160, "num_key_value_heads": 2, **more}


_TINY_DEEPSEEK = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 12,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
}


def _llama(**changes: Any) -> dict[str, Any]:
    return {key: value for key, value in (_tiny("llama") | changes).items() if value != "absent"}


def test_absent_keys_take_the_defaults_of_the_family() -> None:
    config = from_huggingface(_llama(num_key_value_heads="absent"))
    assert (config.kv_heads, config.d_head, config.max_seq_len, config.rope_theta) == (4, 16, 2048, 10_000.0)
    assert (config.norm_eps, config.tied_embeddings, config.activation) == (1e-6, False, "silu")
    assert from_huggingface(_tiny("qwen3")).d_head == 128
    assert from_huggingface(_tiny("mistral")).layer_windows == (4096,) * 3
    assert from_huggingface(_tiny("mistral", sliding_window=None)).layer_windows == ()
    gemma = from_huggingface(_tiny("gemma2"))
    assert (gemma.attn_softcap, gemma.final_softcap, gemma.embed_scale) == (50.0, 30.0, 8.0)
    assert from_huggingface(_tiny("gemma2", attn_logit_softcapping=None)).attn_softcap is None


def test_both_spellings_of_rotary_settings_mean_the_same() -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    old = from_huggingface(_llama(rope_theta=5e5, rope_scaling={"rope_type": "llama3", **scaling}))
    new = from_huggingface(_llama(rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **scaling}))
    assert old == new
    assert old.rope_scaling is not None and old.rope_scaling.high_freq_factor == 4.0
    local = {"full_attention": {"rope_type": "linear", "factor": 8.0}, "sliding_attention": {"rope_theta": 123.0}}
    gemma = from_huggingface(_tiny("gemma3_text", rope_parameters=local))
    assert (gemma.rope_theta, gemma.rope_local_theta) == (1e6, 123.0)
    assert gemma.rope_scaling == RopeScaling(kind="linear", factor=8.0)


def test_the_text_part_of_a_multimodal_file_is_read() -> None:
    nested = {"model_type": "gemma3", "vision_config": {"hidden_size": 8}, "text_config": _tiny("gemma3_text")}
    text = from_huggingface(_tiny("gemma3_text"))
    assert dataclasses.replace(from_huggingface(nested), family="gemma3_text") == text


@pytest.mark.parametrize(
    ("data", "key"),
    [
        (_llama(hidden_size="absent"), "hidden_size"),
        (_llama(hidden_size="64"), "hidden_size"),
        (_llama(hidden_size=0), "hidden_size"),
        (_llama(num_hidden_layers=10**9), "num_hidden_layers"),
        (_llama(vocab_size=True), "vocab_size"),
        (_llama(rms_norm_eps="small"), "rms_norm_eps"),
        (_llama(hidden_act="mish"), "hidden_act"),
        (_llama(tie_word_embeddings="yes"), "tie_word_embeddings"),
        (_llama(num_key_value_heads=3), "kv_heads"),
        (_llama(rope_scaling={"rope_type": "dynamic", "factor": 2.0}), "rope_scaling.rope_type"),
        (_llama(rope_scaling={"rope_type": "linear"}), "rope_scaling.factor"),
        (_llama(rope_scaling="yarn"), "rope_scaling"),
        (_llama(partial_rotary_factor=0.5), "partial_rotary_factor"),
        (_llama(model_type="lama"), "model_type"),
        (_llama(model_type=None), "model_type"),
        (_tiny("gemma3", text_config=[1]), "text_config"),
        (_tiny("gemma3", text_config={"hidden_size": None}), "text_config.hidden_size"),
        (_tiny("gemma2", layer_types=["chunked_attention"] * 3), "layer_types"),
        (_tiny("gemma2", layer_types=["full_attention"]), "layer_windows"),
        (_tiny("gemma2", layer_types=["sliding_attention"] * 3, sliding_window=None), "sliding_window"),
        (_tiny("gemma2", use_bidirectional_attention=True), "use_bidirectional_attention"),
        (_tiny("mistral", layer_types=["full_attention"] * 3), "layer_types"),
        (_tiny("qwen3_moe", decoder_sparse_step=2, mlp_only_layers=[0]), "mlp_only_layers"),
        (_tiny("qwen3_moe", mlp_only_layers=[1]), "mlp_only_layers"),
        (_tiny("mixtral"), "num_local_experts"),
        (_tiny("mixtral", num_local_experts=2, num_experts_per_tok=3), "moe.active"),
        (_tiny("deepseek_v3", **_TINY_DEEPSEEK), "q_lora_rank"),
        (_tiny("deepseek_v3", **_TINY_DEEPSEEK, q_lora_rank=None, attention_bias=True), "attention_bias"),
        (_tiny("deepseek_v3", **_TINY_DEEPSEEK, q_lora_rank=None, scoring_func="softmax"), "scoring_func"),
        (_tiny("deepseek_v2", **_TINY_DEEPSEEK, q_lora_rank=None, topk_method="noaux_tc"), "topk_method"),
        ({"model_type": "gpt2", "scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
    ],
)
def test_a_bad_file_is_one_line_with_the_file_and_the_key(tmp_path: Path, data: dict[str, Any], key: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(data))
    with pytest.raises(RooftopError) as caught:
        load_model(str(path))
    assert caught.value.field == f"{path}: {key}"
    assert "\n" not in str(caught.value)


def test_nan_is_no_number_of_json(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(_llama(rms_norm_eps=float("nan"))))
    with pytest.raises(RooftopError, match="NaN"):
        load_model(str(path))


def test_an_unknown_model_type_lists_the_accepted_ones() -> None:
    with pytest.raises(RooftopError, match=r"accepted: one of .*deepseek_v3.*gpt_oss.*llama.*qwen3") as caught:
        from_huggingface(_llama(model_type="qwen3x"))
    # A type that is spelled alike may compute something else.
    assert "did you mean" not in str(caught.value)


def test_a_key_that_no_family_reads_is_refused_unless_it_is_off() -> None:
    known = from_huggingface(_llama())
    for off in (None, False, 0, 0.0, []):
        assert from_huggingface(_llama(residual_mixing=off)) == known
    assert from_huggingface(_llama(attention_dropout=0.1, transformers_version="5.23.0")) == known
    for data, field in (
        (_llama(residual_mixing=0.5), "residual_mixing"),
        (_llama(rope_scaling={"rope_type": "linear", "factor": 2.0, "skew": 3}), "rope_scaling.skew"),
        (_llama(sliding_window=128), "sliding_window"),
        (_tiny("gemma2", hidden_size_per_layer_input=8), "hidden_size_per_layer_input"),
    ):
        with pytest.raises(RooftopError, match="may change the computation") as caught:
            from_huggingface(data)
        assert caught.value.field == f"config: {field}"


def test_the_language_model_of_any_multimodal_file_is_read() -> None:
    text = _tiny("qwen2", vocab_size=200)
    wrapper = {"model_type": "llava_onevision", "vision_config": {"hidden_size": 8}, "text_config": text}
    assert from_huggingface(wrapper) == from_huggingface(text)
    assert from_huggingface({**wrapper, "tie_word_embeddings": True}).tied_embeddings
    with pytest.raises(RooftopError, match=r"config: text_config\.residual_mixing"):
        from_huggingface({**wrapper, "text_config": {**text, "residual_mixing": 1}})


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", "3", '"llama"', "[" * 100_000, "\xff\xfe"])
def test_a_file_that_is_no_object_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "broken.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(RooftopError) as caught:
        load_model(str(path))
    assert caught.value.field == str(path)


def test_models_are_found_by_name_alias_repository_file_and_directory(tmp_path: Path) -> None:
    config = load_model("llama3.1-8b")
    for name in ("LLaMA3.1-8B", "llama-3.1-8b", "meta-llama/Llama-3.1-8B"):
        assert load_model(name) == config
    directory = tmp_path / "my-model"
    directory.mkdir()
    with pytest.raises(RooftopError, match="no such file"):
        load_model(str(directory))
    (directory / "config.json").write_text(json.dumps(_llama()))
    assert load_model(str(directory)) == load_model(str(directory / "config.json"))
    assert load_model(str(directory)).name == "my-model"
    (tmp_path / "other.json").write_text(json.dumps(_llama()))
    assert load_model(str(tmp_path / "other.json")).name == "other"


def test_near_misses_are_suggested() -> None:
    with pytest.raises(RooftopError, match=r"^model: got 'lama3-8b'.*did you mean llama3-8b"):
        load_model("lama3-8b")
    for name in ("", "a" * 5000, "no\0where", "missing.json", "no/such/directory"):
        with pytest.raises(RooftopError):
            load_model(name)


def test_every_preset_says_where_it_is_from_and_names_are_unambiguous() -> None:
    assert {path.stem for path in PRESETS.glob("*.json")} == set(presets())
    seen: dict[str, str] = {}
    for name in presets():
        data = json.loads((PRESETS / f"{name}.json").read_text())
        source = preset_source(name)
        assert source is not None and len(source) > 40
        for alias in {name, data.get("_name_or_path", name), *data.get("aliases", ())}:
            assert seen.setdefault(alias.lower(), name) == name
            assert load_model(alias).name == name
    assert preset_source("no-such-model") is None


def test_model_as_json(rooftop: Callable[..., Any]) -> None:
    answer = rooftop("model", "gpt-oss-20b", "--seq", "8Ki", "--json")
    figures = answer.json
    assert (answer.status, answer.err) == (0, "")
    assert (figures["name"], figures["params"], figures["seq_len"]) == ("gpt-oss-20b", 20_914_757_184, 8192)
    assert sum(figures["params_by_component"].values()) == figures["params"] > figures["active_params"]
    flops = figures["flops_per_token"]
    assert flops["forward"] == flops["forward_matmul"] + flops["forward_attention"] == flops["total"] / 3
    assert flops["total_full_attention"] > flops["total"]
    assert "attention causal" in flops["convention"]
    assert figures["kv_bytes_per_token"]["bf16"] == 2 * figures["kv_bytes_per_token"]["int8"] == 49_152
    assert figures["kv_cache_bytes"]["int8"] == 12 * (8192 + 128) * 2 * 8 * 64
    assert ModelConfig.from_json(figures["config"]) == load_model("gpt-oss-20b")


def test_model_as_a_table(rooftop: Callable[..., Any]) -> None:
    answer = rooftop("model", "llama3-8b")
    assert answer.status == 0
    for text in ("8,030,261,248", "L=32 D=4096", "16,083,058,688", "attention causal", "meta-llama/Meta-Llama-3-8B"):
        assert text in answer.out


def test_the_default_sequence_fits_the_model(rooftop: Callable[..., Any]) -> None:
    assert rooftop("model", "gpt3-175b", "--json").json["seq_len"] == 2048
    assert rooftop("model", "llama3-8b", "--json").json["seq_len"] == 4096


def test_model_alone_lists_the_presets(rooftop: Callable[..., Any]) -> None:
    answer = rooftop("model")
    assert answer.status == 0
    assert all(name in answer.out for name in presets())
    assert [model["name"] for model in rooftop("model", "--json").json["models"]] == list(presets())


def test_a_file_named_like_a_preset_has_no_source(rooftop: Callable[..., Any], tmp_path: Path) -> None:
    directory = tmp_path / "llama3-8b"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(_llama()))
    figures = rooftop("model", str(directory), "--json").json
    assert (figures["name"], figures["source"]) == ("llama3-8b", None)


def test_names_are_not_read_as_markup(rooftop: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "[bold]a[x].json"
    path.write_text(json.dumps(_llama()))
    assert "[bold]a[x]  L=3" in rooftop("model", str(path)).out


@pytest.mark.parametrize(
    "args",
    [
        ("lama3-8b",),
        ("llama3-8b", "--seq", "x"),
        ("llama3-8b", "--seq", "0"),
        ("gpt3-175b", "--seq", "2049"),
        ("no.json",),
    ],
)
def test_bad_input_is_one_line_and_status_2(rooftop: Callable[..., Any], args: tuple[str, ...]) -> None:
    answer = rooftop("model", *args, "--json")
    assert (answer.status, answer.out) == (2, "")
    assert answer.err.count("\n") == 1 and answer.err.startswith("rooftop: ")


def test_models_import_nothing_heavy() -> None:
    code = (
        "import sys; from rooftop.models import count_params, load_model; count_params(load_model('llama3-8b'));"
        "print([name for name in ('jax', 'numpy', 'scipy', 'torch', 'transformers', 'rich') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
