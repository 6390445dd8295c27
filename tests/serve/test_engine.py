"""The engine against transformers' greedy tokens, however it batches, pages, chunks, shares and preempts."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rooftop.models import ModelConfig
from rooftop.programs.serving.decode import Decoder
from rooftop.scheduling.serving.scheduler import Policy
from rooftop.serve.engine.requests import Sampling
from tests.support.engines import CONFIGURATION, GREEDY, NAMES, again, answers, checkpoint, engine, greedy

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
QUICK = ("llama", "deepseek_v3")


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("name", "stages"),
    [(QUICK[0], 2), *(pytest.param(name, 1, marks=() if name in QUICK else pytest.mark.slow) for name in NAMES)],
)
def test_outputs_equal_those_of_transformers_in_every_mode(name: str, stages: int, tmp_path: Path) -> None:
    original = engine(checkpoint(name, tmp_path), replace(CONFIGURATION, mesh=(("stage", stages),)))
    for mode, (changes, happened) in MODES.items():
        serving = again(original, **changes)
        tokens, expected = greedy(name, serving)
        assert tokens == expected, mode
        stats = serving.stats()
        # A flight has half of the requests, which need no preemption: ``test_random_work`` has both.
        if stages == 1:
            assert {key: getattr(stats, key) > 0 for key in happened} == happened, mode
        if mode == "chunked":
            # Chunks of one prompt were prefilled in the programs that generated for others.
            assert any(program.generating and program.runs for program in stats.program_times)


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("name", "mesh", "kv_split"),
    [
        ("llama", {"tensor": 2, "context": 2}, "seq"),
        pytest.param("llama", {"tensor": 2, "context": 2}, "batch", marks=pytest.mark.slow),
        pytest.param("llama", {"tensor": 2}, "seq", marks=pytest.mark.slow),
        pytest.param("llama", {"tensor": 4}, "seq", marks=pytest.mark.slow),
        pytest.param("llama", {"context": 4}, "seq", marks=pytest.mark.slow),
        pytest.param("llama", {"context": 4}, "batch", marks=pytest.mark.slow),
        pytest.param("llama", {"data": 2, "tensor": 2}, "seq", marks=pytest.mark.slow),
        pytest.param("gemma2", {"context": 2}, "seq", marks=pytest.mark.slow),
        pytest.param("gemma2", {"context": 2}, "batch", marks=pytest.mark.slow),
        pytest.param("deepseek_v3", {"tensor": 2}, "seq", marks=pytest.mark.slow),
        pytest.param("deepseek_v3", {"tensor": 2, "context": 2}, "seq", marks=pytest.mark.slow),
        pytest.param("deepseek_v3", {"tensor": 2, "context": 2}, "batch", marks=pytest.mark.slow),
        pytest.param("deepseek_v3", {"expert": 2, "context": 2}, "seq", marks=pytest.mark.slow),
        pytest.param("deepseek_v3", {"expert": 2, "context": 2}, "batch", marks=pytest.mark.slow),
        pytest.param("gpt_oss", {"expert": 2, "tensor": 2}, "seq", marks=pytest.mark.slow),
        pytest.param("gpt_oss", {"context": 2}, "batch", marks=pytest.mark.slow),
        pytest.param("olmo2", {"tensor": 2, "context": 2}, "seq", marks=pytest.mark.slow),
        pytest.param("olmo2", {"tensor": 4}, "seq", marks=pytest.mark.slow),
        pytest.param("cohere2", {"tensor": 2}, "seq", marks=pytest.mark.slow),
        pytest.param("qwen2_moe", {"expert": 2, "tensor": 2}, "seq", marks=pytest.mark.slow),
    ],
)
def test_sharded_outputs_are_the_same(name: str, mesh: dict[str, int], kv_split: str, tmp_path: Path) -> None:
    """Also with fewer key/value heads than devices; and each device has its share of the cache, and no more."""
    serving = engine(checkpoint(name, tmp_path), replace(CONFIGURATION, mesh=tuple(mesh.items()), kv_split=kv_split))
    tokens, expected = greedy(name, serving)
    assert tokens == expected
    model = serving.model
    by_heads = 1 if model.mla is not None else min(mesh.get("tensor", 1), model.kv_heads)
    share = 1 / (by_heads * mesh.get("context", 1) * mesh.get("expert", 1))
    for leaf in serving.replicas[0].pool_leaves:
        assert leaf.sharding is not None
        alone = (leaf.shape[0], *_page(model, serving.configuration.page_tokens))
        assert math.prod(leaf.sharding.shard_shape(leaf.shape)) == math.prod(alone) * share


def _page(model: ModelConfig, page_tokens: int) -> tuple[int, ...]:
    """A page of a layer as the cache of one device has it."""
    return Decoder(model=model, page_tokens=page_tokens).page_shape


@pytest.mark.slow
def test_copies_share_the_requests(tmp_path: Path) -> None:
    """Each prompt goes where its beginning is cached; the others to the copy with the least to do."""
    serving = engine(checkpoint("llama", tmp_path), replace(CONFIGURATION, mesh=(("data", 2),)))
    tokens, expected = greedy("llama", serving, at_once=False)
    assert tokens == expected
    before = serving.stats()
    assert before.pages == 2 * (CONFIGURATION.pages or 0)
    repeated = again(serving)
    prompts = [case["prompt"] for case in GREEDY["llama"]]
    repeated.start()
    answers(repeated, prompts * 2, [Sampling(max_tokens=1, temperature=0.0)] * (2 * len(prompts)), at_once=False)
    # What one copy has cached, the second round finds: no prompt went to the other one.
    page = CONFIGURATION.page_tokens
    assert repeated.stats().prefix_tokens >= sum((len(prompt) - 1) // page * page for prompt in prompts)


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("name", "stages"),
    [
        ("llama", 1),
        pytest.param("llama", 2, marks=pytest.mark.slow),
        pytest.param("deepseek_v3", 1, marks=pytest.mark.slow),
    ],
)
def test_disaggregated_outputs_are_the_same(name: str, stages: int, tmp_path: Path) -> None:
    policy = Policy(max_batch=4, batching="disaggregated")
    how = replace(CONFIGURATION, policy=policy, prefill_devices=stages, mesh=(("stage", stages),))
    original = engine(checkpoint(name, tmp_path), how)
    for changes in (
        {},
        {"pages": 11},
        {"pages": 11, "policy": Policy(max_batch=4, batching="disaggregated", preemption="swap")},
    ):
        serving = again(original, **changes)
        tokens, expected = greedy(name, serving)
        assert tokens == expected, changes
        # A flight has half of the requests.
        assert stages > 1 or (serving.stats().preemptions > 0) == bool(changes)
