"""The engine against transformers' greedy tokens, however it batches, pages, chunks, shares and preempts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engines import CONFIGURATION, NAMES, again, checkpoint, engine, greedy

from rooftop.scheduling.serving import Policy

#: Each switch on its own, and several together: what an engine is told, and what must have happened then.
MODES: dict[str, tuple[dict[str, Any], dict[str, bool]]] = {
    "one at a time": ({"policy": Policy(max_batch=1), "prefix_cache": False}, {}),
    "batched": ({"policy": Policy(max_batch=4), "prefix_cache": False}, {}),
    "chunked": ({"policy": Policy(max_batch=4, chunk_tokens=6), "prefix_cache": False}, {}),
    "prefixes": ({"policy": Policy(max_batch=2)}, {"prefix_tokens": True}),
    "chunks and prefixes": ({}, {}),
    "recompute": ({"policy": Policy(max_batch=4, chunk_tokens=6), "pages": 11}, {"preemptions": True}),
    "swap": (
        {"policy": Policy(max_batch=4, chunk_tokens=6, preemption="swap"), "pages": 11, "prefix_cache": False},
        {"preemptions": True},
    ),
    "host tier": ({"policy": Policy(max_batch=2, preemption="swap"), "pages": 12}, {}),
}
#: One of each kind in the quick tests: plain attention; windows and soft caps; latents and experts.
QUICK = ("llama", "gemma2", "deepseek_v3")


@pytest.mark.oracle
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in NAMES]
)
def test_outputs_equal_those_of_transformers_in_every_mode(name: str, tmp_path: Path) -> None:
    made = engine(checkpoint(name, tmp_path))
    for mode, (changes, happened) in MODES.items():
        serving = again(made, **changes)
        found, wanted = greedy(name, serving)
        assert found == wanted, mode
        stats = serving.stats()
        assert {key: getattr(stats, key) > 0 for key in happened} == happened, mode


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("llama", {"tensor": 2}),
        pytest.param("llama", {"tensor": 4}, marks=pytest.mark.slow),
        pytest.param("deepseek_v3", {"tensor": 2}, marks=pytest.mark.slow),
        pytest.param("gpt_oss", {"expert": 2, "tensor": 2}, marks=pytest.mark.slow),
    ],
)
def test_sharded_outputs_are_the_same(name: str, mesh: dict[str, int], tmp_path: Path) -> None:
    """Also with fewer key/value heads than devices."""
    made = engine(checkpoint(name, tmp_path), replace(CONFIGURATION, mesh=tuple(mesh.items())))
    found, wanted = greedy(name, made)
    assert found == wanted


@pytest.mark.oracle
@pytest.mark.parametrize("name", ["llama", pytest.param("deepseek_v3", marks=pytest.mark.slow)])
def test_disaggregated_outputs_are_the_same(name: str, tmp_path: Path) -> None:
    policy = Policy(max_batch=4, batching="disaggregated")
    made = engine(checkpoint(name, tmp_path), replace(CONFIGURATION, policy=policy, prefill_devices=1))
    for changes in (
        {},
        {"pages": 11},
        {"pages": 11, "policy": Policy(max_batch=4, batching="disaggregated", preemption="swap")},
    ):
        serving = again(made, **changes)
        found, wanted = greedy(name, serving)
        assert found == wanted, changes
        assert (serving.stats().preemptions > 0) == bool(changes)
