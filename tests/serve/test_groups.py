"""An engine whose cache is spread over groups of devices by sequences: what it schedules, and what it answers."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import P
from jax.sharding import NamedSharding

from rooftop.arrays import Mesh
from rooftop.compiler.devices import topology_mesh
from rooftop.core.errors import RooftopError
from rooftop.hardware import Slice
from rooftop.models import load_model
from rooftop.programs.parameters import Parameter, describe
from rooftop.programs.serving.decode import Decoder, by_layer
from rooftop.scheduling.serving.cache import CachedSequence, KvCache
from rooftop.scheduling.serving.groups import GroupedScheduler
from rooftop.scheduling.serving.scheduler import PREEMPTION, Policy
from rooftop.serve.engine.configuration import Configuration, Shapes
from rooftop.serve.engine.engine import PagedEngine
from rooftop.serve.engine.loading import load
from rooftop.serve.engine.programs import Programs
from rooftop.serve.engine.requests import Sampling
from rooftop.serve.engine.steps import check_scheduler, rows_of
from tests.serve.test_engine import MODES
from tests.support.engines import CONFIGURATION, GREEDY, again, answers, checkpoint, engine, greedy
from tests.support.examples import examples

#: Two groups; prompts are prefilled one at a time by all of them, or two at a time, each by its own.
GROUPED = replace(
    CONFIGURATION,
    mesh=(("context", 2),),
    kv_split="batch",
    shapes=Shapes(batches=(2, 4), widths=(8,), contexts=(32,), prefill_tokens=16),
)
#: The pages of two groups have to be short for a group to be.
SHORT = {"recompute": 16, "swap": 16, "host tier": 20}


@pytest.fixture(scope="module")
def grouped(tmp_path_factory: pytest.TempPathFactory) -> PagedEngine:
    return engine(checkpoint("llama", tmp_path_factory.mktemp("groups")), GROUPED)


@pytest.mark.oracle
@pytest.mark.parametrize("mode", MODES)
def test_outputs_are_those_of_transformers_in_every_mode(grouped: PagedEngine, mode: str) -> None:
    changes, happened = MODES[mode]
    changes = changes | ({"pages": SHORT[mode]} if mode in SHORT else {})
    serving = again(grouped, **changes)
    tokens, expected = greedy("llama", serving)
    assert tokens == expected
    stats = serving.stats()
    assert {key: getattr(stats, key) > 0 for key in happened} == happened


@pytest.mark.slow
@pytest.mark.oracle
@pytest.mark.parametrize("changes", [{"draft_length": 3}, {"policy": Policy(max_batch=4, batching="disaggregated")}])
@pytest.mark.parametrize(("name", "axis"), [("llama", "context"), ("deepseek_v3", "context"), ("gpt_oss", "expert")])
def test_guesses_and_two_groups_of_groups_change_nothing(
    name: str, axis: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    apart = {"prefill_devices": 2} if "policy" in changes else {}
    serving = engine(checkpoint(name, tmp_path), replace(GROUPED, mesh=((axis, 2),), **changes, **apart))
    tokens, expected = greedy(name, serving)
    assert tokens == expected
    assert (serving.stats().guessed > 0) == ("draft_length" in changes) or name != "llama"


@pytest.mark.slow
def test_a_draft_and_an_int8_cache_have_their_groups(tmp_path: Path) -> None:
    """An engine with groups answers like one without; also when sequences lose their place."""
    folder = checkpoint("llama", tmp_path)
    asked = [Sampling(max_tokens=12, temperature=0.5, seed=row) for row in range(6)]
    prompts = [case["prompt"] for case in GREEDY["llama"]][:6]
    outputs = list[list[list[int | None]]]()
    for configuration in (replace(GROUPED, mesh=()), GROUPED):
        drafting = engine(folder, replace(configuration, draft_length=3, kv_dtype="int8"), draft=folder)
        for changes in ({}, {"pages": 18, "policy": Policy(max_batch=4, chunk_tokens=6, preemption="swap")}):
            serving = again(drafting, **changes)
            serving.start()
            outputs.append([[token.token for token in answer] for answer in answers(serving, prompts, asked)])
            assert serving.stats().accepted > 0
    assert outputs[0] == outputs[1] == outputs[2] == outputs[3]


def test_what_groups_cannot_be_is_named(tmp_path: Path) -> None:
    folder = checkpoint("llama", tmp_path)
    with pytest.raises(RooftopError, match=r"batches: got .*multiples of the 2 groups"):
        load(folder, replace(GROUPED, shapes=CONFIGURATION.shapes and replace(CONFIGURATION.shapes, batches=(1, 4))))
    with pytest.raises(
        RooftopError, match="max_model_len: got 32; accepted: at most the 12 tokens of one group's 3 pages"
    ):
        load(folder, replace(GROUPED, pages=7))
    with pytest.raises(RooftopError, match="kv_split: got 'heads'"):
        Configuration(kv_split="heads")
    with pytest.raises(RooftopError, match=r"mesh axis expert: got 2; accepted: 1: .* has no experts"):
        load(folder, Configuration(mesh=(("expert", 2),)))


def test_rows_of_groups_are_in_blocks() -> None:
    assert rows_of([0, 0, 1, 0, 1], 6, 2) == [0, 1, 3, 2, 4]
    assert rows_of([1, 1, 0], 2, 2) == [1, -1, 0]
    # Too few for a block of each: as they come.
    assert rows_of([1, 0, 1], 3, 2) == [0, 1, 2]
    assert rows_of([0] * 3, 2, 1) == [0, 1, -1]


@settings(deadline=None, max_examples=examples(60))
@given(
    seed=st.integers(0, 2**32), groups=st.integers(2, 4), page_tokens=st.integers(1, 4), pages=st.integers(4, 12),
    host_pages=st.integers(0, 6), max_batch=st.integers(1, 8), chunked=st.booleans(),
    preemption=st.sampled_from(PREEMPTION),
)  # fmt: skip
def test_every_sequence_is_served_on_one_group_and_no_page_is_lost(
    seed: int, groups: int, page_tokens: int, pages: int, host_pages: int, max_batch: int, chunked: bool,
    preemption: str,
) -> None:  # fmt: skip
    """Whatever comes and leaves when; a step has no more tokens than it may, and a group no more sequences."""
    chance = random.Random(seed)
    chunk = chance.randint(max_batch + groups, 24) if chunked else None
    caches = [
        KvCache(
            page_tokens=page_tokens, pages=pages, host_pages=host_pages, prefixes=True,
            first=group * (pages + 1), host_first=group * host_pages,
        )
        for group in range(groups)
    ]  # fmt: skip
    scheduler = GroupedScheduler(Policy(max_batch=max_batch, chunk_tokens=chunk, preemption=preemption), caches)
    coming, here, home = list[CachedSequence](), list[CachedSequence](), dict[CachedSequence, int]()
    for number in range(chance.randint(1, 12)):
        prompt = chance.randint(1, pages * page_tokens)
        keys = tuple((number % 3, at) for at in range(prompt // page_tokens))
        generate = chance.randint(1, pages * page_tokens - prompt + 1)
        coming.append(CachedSequence(id=number, prompt_tokens=prompt, max_tokens=generate, keys=keys))
    for _ in range(3000):
        while coming and chance.random() < 0.3:
            here.append(coming.pop(0))
            scheduler.submit(here[-1])
        if here and chance.random() < 0.05:
            scheduler.finish(here.pop(chance.randrange(len(here))))
        step = scheduler.next_step()
        check_scheduler(scheduler, here)
        if step is None:
            assert not here, "none waits while there is nothing to do"
            if not coming:
                break
            continue
        assert chunk is None or step.generating + sum(chunk.tokens for chunk in step.chunks) <= chunk
        assert step.generating == (0 if step.chunks and chunk is None else len(scheduler.generating))
        for group, pool in enumerate(scheduler.groups):
            first = group * (pages + 1)
            assert len(pool.generating) + len(pool.prefilling) <= -(-max_batch // groups)
            for sequence in (*pool.generating, *pool.prefilling):
                assert home.setdefault(sequence, group) == sequence.group == group
                assert all(first <= page < first + pages for page in sequence.pages)
        scheduler.complete(step)
        for sequence in list(here):
            pool = scheduler.groups[sequence.group]
            if sequence.generated + max(0, pool.kv_tokens(sequence) - sequence.length) >= sequence.max_tokens:
                scheduler.finish(sequence)
                here.remove(sequence)
    assert not here and not coming
    assert all(cache.device.used == cache.host.used == 0 for cache in caches)


def test_sequences_go_where_their_prefix_is_or_the_fewest_pages_are_used() -> None:
    caches = [KvCache(page_tokens=2, pages=20, prefixes=True, first=group * 21) for group in range(2)]
    scheduler = GroupedScheduler(Policy(max_batch=8, chunk_tokens=64), caches)

    def admitted(number: int, prompt: int, name: str) -> int:
        keys = tuple((name, at) for at in range(prompt // 2))
        sequence = CachedSequence(id=number, prompt_tokens=prompt, max_tokens=4, keys=keys)
        scheduler.submit(sequence)
        step = scheduler.next_step()
        assert step is not None
        scheduler.complete(step)
        return sequence.group

    first = admitted(0, 16, "a")
    assert admitted(1, 4, "b") == 1 - first
    assert admitted(2, 4, "c") == 1 - first
    # Its beginning is cached where more pages are in use, but not many more.
    assert admitted(3, 8, "b") == 1 - first
    assert admitted(4, 16, "a") == first


@pytest.mark.slow
@pytest.mark.parametrize(("kv_split", "reader"), [("batch", "ragged"), ("seq", "gather")])
def test_what_a_step_sends_on_a_tpu_is_what_plans_count(kv_split: str, reader: str) -> None:
    """In each layer two AllToAlls, or a gather of queries and a scatter of outputs; the kernel reads whole pages."""
    model = replace(load_model("llama3-8b"), layers=2, vocab=32768, kv_heads=2)
    mesh = topology_mesh(Mesh.lay(Slice.parse("v5e:2x4"), {"expert": 1, "tensor": 2, "context": 4}))
    decoder = Decoder(
        model=model, sizes=(("tensor", 2), ("context", 4)), kv_split=kv_split, reader=reader, dtype="bfloat16"
    )

    def apart(parameter: Parameter, leaf: jax.ShapeDtypeStruct) -> Any:
        if not parameter.stacked:
            return leaf
        place = NamedSharding(mesh, P(*leaf.sharding.spec[1:]))
        return (jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype, sharding=place),) * leaf.shape[0]

    weights = by_layer(decoder, jax.tree.map(apart, describe(model), decoder.abstract_weights(mesh)))
    shapes = Shapes(batches=(32,), widths=(256,), contexts=(8192,), prefill_tokens=256)
    programs = Programs(decoder, mesh, weights, pages=4 * 1025 - 1, slots=32, shapes=shapes)
    programs.compile([("step", (32, 1, 512))])
    text = programs["step", (32, 1, 512)].as_text()
    assert text is not None
    counts = {
        kind: len(re.findall(rf" {kind}(?:-start)?\(.*layers/attn/core", text))
        for kind in ("all-to-all", "all-gather", "reduce-scatter")
    }
    if kv_split == "batch":
        assert counts == {"all-to-all": 2 * model.layers, "all-gather": 0, "reduce-scatter": 0}
        assert text.count("ragged_paged_attention") >= model.layers
    else:
        assert counts["all-to-all"] == 0 and counts["all-gather"] >= model.layers
