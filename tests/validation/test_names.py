"""Chips and models under the names of publications: words that change nothing are known, all others are not."""

from __future__ import annotations

from collections import defaultdict

import pytest

from rooftop.core.errors import RooftopError
from rooftop.hardware import published_chip
from rooftop.models import preset_names
from rooftop.validation.names import published_model


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("B300-SXM", "b300"),
        ("h100_sxm", "h100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("GB200-NVL72", "gb200"),
        ("H100-96GB-SXM", "h100-96gb"),
        ("Google TPU v6e", "v6e"),
    ],
)
def test_chips(name: str, known: str) -> None:
    assert published_chip(name).name == known


@pytest.mark.parametrize("name", ["H100-PCIe", "H100 NVL", "GB200-NVL4", "A100-40GB", "L40S", "v5e-16", "", "SXM"])
def test_other_products_are_not_found(name: str) -> None:
    with pytest.raises(RooftopError, match="chip: got"):
        published_chip(name)


@pytest.mark.parametrize(
    ("name", "preset", "dtype"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", "llama3.1-8b", None),
        ("nvidia/Llama-3.1-405B-Instruct-FP4", "llama3.1-405b", "fp4"),
        ("nvidia/DeepSeek-R1-0528-NVFP4-v2", "deepseek-v3", "nvfp4"),
        ("google/gemma-3-27b-it", "gemma3-27b", None),
        ("Qwen/Qwen3-235B-A22B-Instruct-2507", "qwen3-235b-a22b", None),
        ("gpt-oss-120b", "gpt-oss-120b", None),
        ("Llama-4-Maverick-17B-128E-Instruct-FP8", "llama4-maverick", "fp8"),
        ("DeepSeek-R1-Distill-Llama-70B", None, None),
        ("Qwen2.5-VL-7B-Instruct", None, None),
        ("Mistral-7B-Instruct-v0.3", None, None),
        ("deepseek-v3.1", None, None),
    ],
)
def test_models(name: str, preset: str | None, dtype: str | None) -> None:
    published = published_model(name)
    assert (published.preset, published.dtype) == (preset, dtype)


def test_no_name_is_of_two_presets() -> None:
    named = defaultdict(set)
    for alias, preset in preset_names().items():
        named[published_model(alias).preset].add(preset)
    assert all(presets == {name} for name, presets in named.items())
