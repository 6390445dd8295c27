"""Models: exact counts against published ones and transformers' own, the book's problems, and what always holds."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rooftop.core.errors import RooftopError
from rooftop.core.scopes import is_scope
from rooftop.models import (
    MLA,
    GatedDelta,
    Mamba,
    ModelConfig,
    MoE,
    OtherWeight,
    RopeScaling,
    count_params,
    flops_per_token,
    from_huggingface,
    kv_bytes_per_token,
    kv_cache_bytes,
    load_model,
    presets,
    weights,
)
from rooftop.models.counting import COMPONENTS

ORACLES = Path(__file__).parents[1] / "oracles"
GOLDEN: dict[str, dict[str, Any]] = json.loads((ORACLES / "parameter_counts.json").read_text())["models"]
#: Small models that turn on the switches which no preset has, and leave out what has a default.
VARIANTS: dict[str, dict[str, Any]] = json.loads((ORACLES / "variants.json").read_text())

#: Exact counts as their publishers or the model hub's safetensors metadata give them.
PUBLISHED = {
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "gemma2-9b": 9_241_705_984,
    "gemma2-27b": 27_227_128_320,
    "gemma3-27b": 27_009_346_304,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v2": 235_741_434_880,
    "deepseek-v3": 671_026_419_200,
}

#: Active parameters as published, with or (gpt-oss) without the embedding table.
ACTIVE = {
    "mixtral-8x7b": (12.9e9, True),
    "mixtral-8x22b": (39e9, True),
    "qwen3-235b-a22b": (22e9, True),
    "gpt-oss-20b": (3.61e9, False),
    "gpt-oss-120b": (5.13e9, False),
}


def transformer(**changes: Any) -> ModelConfig:
    """A made-up model with the sizes of the book's problems where they give none."""
    fields: dict[str, Any] = {
        "name": "made-up",
        "family": "llama",
        "layers": 64,
        "d_model": 4096,
        "d_ff": 16384,
        "heads": 32,
        "kv_heads": 32,
        "d_head": 128,
        "vocab": 32000,
        "max_seq_len": 8192,
    }
    return ModelConfig(**fields | changes)


# -- counts ------------------------------------------------------------------------------------------------------------


def _model(name: str) -> ModelConfig:
    return from_huggingface(VARIANTS[name]) if name in VARIANTS else load_model(name)


@pytest.mark.oracle
@pytest.mark.parametrize("name", GOLDEN)
def test_counts_windows_and_scales_equal_those_of_transformers(name: str) -> None:
    config, golden = _model(name), GOLDEN[name]
    counts = count_params(config)
    assert counts.total == golden["total"]
    assert counts.by_component == golden["by_component"]
    if "windows" in golden:
        assert list(config.layer_windows) == golden["windows"]
        assert (config.query_scale or config.d_head**-0.5) == pytest.approx(golden["query_scale"], rel=1e-12)
        assert getattr(config.rope_scaling, "attention_factor", 1.0) == golden["rope_attention_factor"]


def test_every_preset_and_variant_has_its_golden() -> None:
    assert set(GOLDEN) == {*presets(), *VARIANTS}


@pytest.mark.oracle
@pytest.mark.parametrize("name", VARIANTS)
def test_goldens_are_what_the_installed_transformers_says(name: str) -> None:
    for module in ("torch", "transformers"):
        pytest.importorskip(module, reason=f"{module} is not installed; the goldens hold what it said")
    spec = importlib.util.spec_from_file_location("make_parameter_counts", ORACLES / "make_parameter_counts.py")
    assert spec is not None and spec.loader is not None
    oracle = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(oracle)
    assert oracle.describe(VARIANTS[name]) == GOLDEN[name]


@pytest.mark.parametrize("name", PUBLISHED)
def test_totals_equal_the_published_ones(name: str) -> None:
    assert count_params(load_model(name)).total == PUBLISHED[name]


@pytest.mark.parametrize("name", ACTIVE)
def test_active_parameters_round_to_the_published_ones(name: str) -> None:
    counts = count_params(load_model(name))
    published, embedding_in = ACTIVE[name]
    assert counts.active - (0 if embedding_in else counts.by_component["embed"]) == pytest.approx(published, rel=1e-2)


@pytest.mark.parametrize(
    ("name", "billions"), [("llama4-scout", 17), ("llama4-maverick", 17), ("qwen3-coder-480b-a35b", 35)]
)
def test_active_parameters_are_as_many_whole_billions_as_published(name: str, billions: int) -> None:
    assert round(count_params(load_model(name)).active / 1e9) == billions


# -- the book's problems (chapters 4 to 8) -----------------------------------------------------------------------------


def test_f1_f2_f3_parameters_attention_share_and_cache_of_the_example() -> None:
    config = transformer()
    counts = count_params(config)
    without_norms = counts.total - counts.by_component["norms"]
    assert without_norms == pytest.approx(1.7442e10, rel=1e-4)  # the book: 16e9
    assert counts.by_component["attn"] / without_norms == pytest.approx(0.2462, abs=5e-5)  # the book: 25 %
    assert kv_bytes_per_token(config, "int8") == 524_288


def test_f5_attention_costs_as_much_as_its_projections_at_twice_the_model_dim() -> None:
    config = transformer()
    flops = flops_per_token(config, 2 * config.d_model, attention="full")
    assert flops.attention == 2 * count_params(config).by_component["attn"]


def test_f6_attention_dominates_training_beyond_eight_times_the_model_dim() -> None:
    config = transformer()
    flops = flops_per_token(config, 8 * config.d_model, attention="full", embeddings=False)
    assert flops.attention == flops.matmul
    assert flops.total == 3 * (flops.attention + flops.matmul)


def test_p8_p9_llama2_13b_parameters_and_training_state() -> None:
    parts = count_params(load_model("llama2-13b")).by_component
    assert parts["mlp"] == pytest.approx(8.4935e9, rel=1e-5)
    assert parts["attn"] == pytest.approx(4.1943e9, rel=1e-5)
    assert parts["embed"] + parts["unembed"] == pytest.approx(3.2768e8)
    without_norms = sum(parts.values()) - parts["norms"]
    assert without_norms == pytest.approx(1.30154e10, rel=1e-5)
    assert without_norms * (2 + 2 * 4) == pytest.approx(130.15e9, rel=1e-4)  # bf16 weights, two f32 moments


def test_a1_a2_llama3_70b_parameters_and_training_flops() -> None:
    counts = count_params(load_model("llama3-70b"))
    parts = counts.by_component
    assert parts["mlp"] == pytest.approx(5.63714e10, rel=1e-6)
    assert parts["embed"] + parts["unembed"] == pytest.approx(2.10135e9, rel=1e-5)
    assert parts["attn"] == pytest.approx(1.20796e10, rel=1e-6)
    without_norms = counts.total - parts["norms"]
    assert without_norms == pytest.approx(7.05524e10, rel=1e-6)
    assert 6 * without_norms == pytest.approx(4.2331e11, rel=2e-5)
    # The book counts the embedding lookup as a matmul; without it and with no attention the figure is 6 V D smaller.
    flops = flops_per_token(load_model("llama3-70b"), 1, attention="none")
    assert 6 * without_norms - flops.total == 6 * parts["embed"]


def test_i2_cache_of_one_llama2_13b_sequence() -> None:
    assert kv_cache_bytes(load_model("llama2-13b"), "bf16", 8192) == pytest.approx(6.71089e9, rel=1e-6)


def test_i7_parameters_of_the_18b_model() -> None:
    config = transformer(kv_heads=8, d_head=256, vocab=32128, tied_embeddings=True)
    counts = count_params(config)
    assert counts.total - counts.by_component["norms"] == pytest.approx(1.83852e10, rel=1e-5)
    assert kv_bytes_per_token(config, "int8") == 262_144


def test_b1_cache_of_llama3_70b_per_token() -> None:
    assert kv_bytes_per_token(load_model("llama3-70b"), "int8") == 163_840


# -- FLOPs and cache ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "seq_len", "tflops_per_chip", "tokens_per_s"),
    [
        ("llama3.1-8b", 8192, 413.433, 7138.89),
        ("llama3.1-70b", 8192, 443.385, 920.965),
        ("llama2-70b", 4096, 402.274, 905.021),
        ("mistral-7b", 8192, 431.981, 7776.813),
    ],
)
def test_training_flops_are_those_of_published_tpu_logs(
    name: str, seq_len: int, tflops_per_chip: float, tokens_per_s: float
) -> None:
    # Sample logs of AI-Hypercomputer/tpu-recipes, training/trillium, 2026-08-07: FLOPs per token are a log's TFLOP/s
    # over its tokens/s. They count attention in full, and Mistral's without its window.
    config = dataclasses.replace(load_model(name), layer_windows=())
    counted = flops_per_token(config, seq_len, attention="full").total
    assert counted == pytest.approx(tflops_per_chip * 1e12 / tokens_per_s, rel=1e-4)


def test_attention_flops_of_mla_use_its_own_head_sizes() -> None:
    flops = flops_per_token(load_model("deepseek-v3"), 1000, attention="full")
    assert flops.attention == 61 * 2 * 1000 * 128 * (192 + 128)


def test_cache_of_mla_is_its_latent_and_one_rotated_key() -> None:
    assert kv_bytes_per_token(load_model("deepseek-v3"), "bf16") == 61 * (512 + 64) * 2


def test_windowed_layers_keep_only_their_window() -> None:
    config = transformer(layers=4, layer_windows=(100, None, 100, None))
    per_layer = 2 * 32 * 128
    assert kv_cache_bytes(config, "int8", 100) == 4 * 100 * per_layer
    assert kv_cache_bytes(config, "int8", 1000) == 2 * (100 + 1000) * per_layer
    assert kv_bytes_per_token(config, "int8", 1000) == pytest.approx(2 * 1.1 * per_layer)
    assert kv_bytes_per_token(config, "int8") == 4 * per_layer


def test_the_convention_is_said_and_an_unknown_one_refused() -> None:
    assert (
        "attention full, unembedding out"
        in flops_per_token(transformer(), 8, attention="full", embeddings=False).convention
    )
    with pytest.raises(RooftopError, match=r"attention: got 'casual'.*causal"):
        flops_per_token(transformer(), 8, attention="casual")
    with pytest.raises(RooftopError, match="dtype"):
        kv_bytes_per_token(transformer(), "fp8")


@st.composite
def configs(draw: st.DrawFn) -> ModelConfig:
    """Valid models of every kind, small."""
    whole = st.integers(1, 12)
    layers, kv_heads = draw(st.integers(1, 6)), draw(whole)
    heads, d_head = kv_heads * draw(st.integers(1, 4)), 2 * draw(whole)
    window = st.none() | st.integers(1, 64)
    mla = moe = None
    plain: dict[str, Any] = {}
    if draw(st.booleans()):
        mla = MLA(
            q_rank=draw(st.none() | whole),
            kv_rank=draw(whole),
            d_nope=draw(whole),
            d_rope=2 * draw(whole),
            d_v=draw(whole),
        )
        kv_heads, d_head = heads, mla.d_nope + mla.d_rope
    else:
        plain = {name: draw(st.booleans()) for name in ("qkv_bias", "attn_out_bias", "attn_gate", "attention_sinks")}
        plain["qk_norm"] = draw(st.sampled_from([None, "head", "heads", "width", "unit"]))
    if draw(st.booleans()):
        experts = draw(whole)
        moe = MoE(
            experts=experts,
            active=draw(st.integers(1, experts)),
            d_ff=draw(whole),
            shared_d_ff=draw(st.integers(0, 8)),
            dense_layers=draw(st.integers(0, layers - 1)),
            bias=draw(st.booleans()),
            correction_bias=draw(st.booleans()),
        )
    scaling = RopeScaling(kind="linear", factor=draw(st.floats(1, 64)))
    return ModelConfig(
        name="random",
        family="llama",
        layers=layers,
        d_model=draw(whole),
        d_ff=draw(whole),
        heads=heads,
        kv_heads=kv_heads,
        d_head=d_head,
        vocab=draw(whole),
        max_seq_len=draw(whole),
        mlp_matrices=draw(st.sampled_from([2, 3])),
        tied_embeddings=draw(st.booleans()),
        mlp_bias=draw(st.booleans()),
        norm=draw(st.sampled_from(["rms", "layer"])),
        norm_placement=draw(st.sampled_from(["pre", "post", "sandwich"])),
        positions=draw(st.sampled_from(["rope", "learned"])),
        layer_windows=tuple(draw(window) for _ in range(layers)) if draw(st.booleans()) else (),
        attn_softcap=draw(st.none() | st.floats(1, 100)),
        rope_scaling=draw(st.sampled_from([None, scaling])),
        moe=moe,
        mla=mla,
        **plain,
    )


@given(configs())
def test_json_round_trip(config: ModelConfig) -> None:
    text = json.dumps(config.to_json(), allow_nan=False)
    again = ModelConfig.from_json(json.loads(text))
    assert again == config
    assert hash(again) == hash(config)


@given(configs())
def test_counts_add_up(config: ModelConfig) -> None:
    counts = count_params(config)
    assert sum(counts.by_component.values()) == counts.total
    if config.moe is None or config.moe.active == config.moe.experts:
        assert counts.active == counts.total
    else:
        idle = config.moe.experts - config.moe.active
        assert counts.total - counts.active == counts.by_component["experts"] * idle // config.moe.experts
    assert counts.active <= counts.total


@given(configs())
def test_tied_embeddings_save_vocabulary_times_model_dim(config: ModelConfig) -> None:
    tied, untied = (dataclasses.replace(config, tied_embeddings=choice) for choice in (True, False))
    assert count_params(untied).total - count_params(tied).total == config.vocab * config.d_model
    assert flops_per_token(untied, 8).total == flops_per_token(tied, 8).total


@given(configs(), st.integers(1, 200))
def test_windows_never_add_flops_or_cache(config: ModelConfig, seq_len: int) -> None:
    everywhere = dataclasses.replace(config, layer_windows=())
    for attention in ("causal", "full"):
        windowed, whole = (flops_per_token(model, seq_len, attention=attention) for model in (config, everywhere))
        assert windowed.attention <= whole.attention
        assert windowed.matmul == whole.matmul
    assert kv_cache_bytes(config, "bf16", seq_len) <= kv_cache_bytes(everywhere, "bf16", seq_len)
    full = flops_per_token(everywhere, seq_len, attention="full")
    assert flops_per_token(everywhere, seq_len).attention == full.attention / 2
    assert full.backward == 2 * full.forward


@given(configs(), st.integers(1, 200))
def test_causal_attention_is_the_mean_over_positions(config: ModelConfig, seq_len: int) -> None:
    keys = 0.0
    for window in config.windows:
        seen = [min(position + 1, window or seq_len) for position in range(seq_len)]
        # A position sees half of itself: the convention takes min(S, window) / 2S off the sum of whole keys.
        keys += sum(seen) / seq_len - min(seq_len, window or seq_len) / (2 * seq_len)
    expected = 2 * keys * config.heads * (config.d_head + config.d_value)
    assert flops_per_token(config, seq_len).attention == pytest.approx(expected)


@given(configs(), st.lists(st.integers(1, 300), min_size=1, max_size=5))
def test_arrays_of_sequence_lengths_give_what_scalars_give(config: ModelConfig, lengths: list[int]) -> None:
    array = np.array(lengths, dtype=np.float64)
    for attention in ("causal", "full", "none"):
        expected = [flops_per_token(config, length, attention=attention).total for length in lengths]
        np.testing.assert_allclose(flops_per_token(config, array, attention=attention).total, expected, rtol=1e-12)
    np.testing.assert_allclose(
        kv_bytes_per_token(config, "int4", array), [kv_bytes_per_token(config, "int4", length) for length in lengths]
    )


@given(configs())
def test_every_weight_has_a_scope_a_component_and_a_name_of_its_own(config: ModelConfig) -> None:
    table = weights(config)
    assert all(is_scope(weight.scope) and weight.component in COMPONENTS for weight in table)
    assert len({(weight.scope, weight.name) for weight in table}) == len(table)
    assert all(len(weight.shape) >= 2 for weight in table if weight.matmul)


# -- configs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"layers": 0}, "layers"),
        ({"layers": 100_000}, "layers"),
        ({"d_model": 4096.0}, "d_model"),
        ({"vocab": True}, "vocab"),
        ({"kv_heads": 5}, "kv_heads"),
        ({"d_head": 7}, "d_head"),
        ({"name": ""}, "name"),
        ({"mlp_matrices": 4}, "mlp_matrices"),
        ({"norm": "batch"}, "norm"),
        ({"activation": "tanh"}, "activation"),
        ({"positions": "absolute"}, "positions"),
        ({"norm_placement": "between"}, "norm_placement"),
        ({"norm_placement": "post", "parallel": "own"}, "norm_placement"),
        ({"qk_norm": 1}, "qk_norm"),
        ({"rotary_dims": 7}, "rotary_dims"),
        ({"rotary_dims": 256}, "rotary_dims"),
        ({"layers": 2, "rope_layers": (True,)}, "rope_layers"),
        ({"layers": 1, "mixers": ("conv",)}, "mixers"),
        ({"layers": 1, "mixers": ("mamba",)}, "mamba"),
        ({"mamba": Mamba(d_inner=8, d_state=4, conv=4)}, "mamba"),
        ({"mlp_matrices": 0, "moe": MoE(experts=4, active=2, d_ff=8)}, "mlp_matrices"),
        ({"shared_kv_layers": 64}, "shared_kv_layers"),
        ({"rope_theta": float("nan")}, "rope_theta"),
        ({"rope_theta": 10**400}, "rope_theta"),
        ({"attn_softcap": -1.0}, "attn_softcap"),
        ({"layer_windows": (8,)}, "layer_windows"),
        ({"layers": 1, "layer_windows": (0,)}, "layer_windows"),
        ({"layers": 1, "layer_windows": [8]}, "layer_windows"),
        ({"swiglu_limit": 7.0, "activation": "gelu"}, "swiglu_limit"),
        ({"moe": {"experts": 4}}, "moe"),
        ({"layers": 2, "moe": MoE(experts=4, active=2, d_ff=8, dense_layers=2)}, "moe.dense_layers"),
        ({"mla": MLA(q_rank=None, kv_rank=4, d_nope=8, d_rope=4, d_v=8)}, "d_head"),
        ({"d_head": 12, "kv_heads": 8, "mla": MLA(q_rank=1, kv_rank=4, d_nope=8, d_rope=4, d_v=8)}, "kv_heads"),
        ({"d_head": 12, "qkv_bias": True, "mla": MLA(q_rank=1, kv_rank=4, d_nope=8, d_rope=4, d_v=8)}, "qkv_bias"),
    ],
)
def test_a_contradictory_config_names_its_field(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(RooftopError) as caught:
        transformer(**changes)
    assert caught.value.field == field
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("part", "fields", "field"),
    [
        (MoE, {"experts": 8, "active": 9, "d_ff": 4}, "moe.active"),
        (MoE, {"experts": 8, "active": 3, "d_ff": 4, "groups": 4}, "moe.active"),
        (MoE, {"experts": 8, "active": 1, "d_ff": 4, "groups": 3}, "moe.groups"),
        (MoE, {"experts": 8, "active": 1, "d_ff": 4, "active_groups": 2}, "moe.active_groups"),
        (MoE, {"experts": 8, "active": 1, "d_ff": 4, "scoring": "tanh"}, "moe.scoring"),
        (MoE, {"experts": 8, "active": 1, "d_ff": 4, "group_score": "mean"}, "moe.group_score"),
        (MoE, {"experts": 8, "active": 1, "d_ff": 0}, "moe.d_ff"),
        (MoE, {"experts": 8, "active": 1, "d_ff": 4, "shared_gate": True}, "moe.shared_gate"),
        (Mamba, {"d_inner": 8, "d_state": 4, "conv": 4, "heads": 3}, "mamba.heads"),
        (GatedDelta, {"key_heads": 2, "value_heads": 3, "d_key": 4, "d_value": 4, "conv": 4}, "gated_delta.key_heads"),
        (OtherWeight, {"name": "x", "shape": (2, 3, 4), "matmul": True}, "others.shape"),
        (MLA, {"q_rank": 0, "kv_rank": 4, "d_nope": 8, "d_rope": 4, "d_v": 8}, "mla.q_rank"),
        (MLA, {"q_rank": 1, "kv_rank": 4, "d_nope": 8, "d_rope": 3, "d_v": 8}, "mla.d_rope"),
        (RopeScaling, {"kind": "ntk", "factor": 2.0}, "rope_scaling.kind"),
        (RopeScaling, {"kind": "linear", "factor": 0}, "rope_scaling.factor"),
        (RopeScaling, {"kind": "llama3", "factor": 2.0, "original_max_seq_len": 8}, "rope_scaling.low_freq_factor"),
    ],
)
def test_a_contradictory_part_names_its_field(part: Any, fields: dict[str, Any], field: str) -> None:
    with pytest.raises(RooftopError) as caught:
        part(**fields)
    assert caught.value.field == field


def test_from_json_refuses_what_is_no_model() -> None:
    data = load_model("mixtral-8x7b").to_json()
    for broken, field in (
        ({**data, "d_modle": 1}, "model field"),
        ({name: value for name, value in data.items() if name != "heads"}, "model heads"),
        ({**data, "moe": {**data["moe"], "experts": "8"}}, "model moe.experts"),
        ({**data, "moe": {"active": 1}}, "model moe.experts"),
        ({**data, "moe": {**data["moe"], "topk": 1}}, "model moe.field"),
        ({**data, "mla": 3}, "model mla"),
        ([data], "model"),
    ):
        with pytest.raises(RooftopError) as caught:
            ModelConfig.from_json(broken)
        assert caught.value.field == field


def test_windows_that_hold_nowhere_are_no_windows() -> None:
    config = transformer(layers=2, layer_windows=(None, None))
    assert config == transformer(layers=2)
    assert config.windows == (None, None)
