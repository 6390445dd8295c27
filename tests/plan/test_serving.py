"""Serving plans: what their ledgers, memory, search and times promise."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rooftop.arrays.mesh import Mesh
from rooftop.arrays.rules import AXES
from rooftop.core.errors import Infeasible, RooftopError
from rooftop.hardware import Slice
from rooftop.models import ModelConfig, load_model
from rooftop.models.segments import stage_layers
from rooftop.plan.serving import fleet as fleets
from rooftop.plan.serving.answer import plan_serving
from rooftop.plan.serving.assumptions import ServingAssumptions
from rooftop.plan.serving.batches import search_batches
from rooftop.plan.serving.fleet import LOAD, candidate_slices, front, recommend
from rooftop.plan.serving.nearest import nearest_plans
from rooftop.plan.serving.placement import Placement, together
from rooftop.plan.serving.plan import ServingPlan
from rooftop.plan.serving.problem import ServingProblem
from rooftop.plan.serving.rows import chunk_pairs
from rooftop.plan.serving.search import (
    MOST_SEQUENCES,
    batch_grid,
    best_prefill,
    most_sequences,
    price_prompts,
    server_memory,
    sweep_generate,
    sweep_slices,
    token_s,
)
from rooftop.plan.serving.workload import DraftModel, ServingNumerics, ServingWorkload
from rooftop.roofline import rules
from rooftop.roofline.achievable import fractions
from tests.support.examples import examples

INT8 = ServingNumerics(weights="int8", kv="int8")
LLAMA = load_model("llama3-70b")


def problem(model: ModelConfig = LLAMA, on: str = "v5e:4x4", batch: int | None = 32, **more: object) -> ServingProblem:
    """A problem of 8192 tokens in and 512 out; ``more`` are fields of the problem or of its workload."""
    of_workload = {name: more.pop(name) for name in list(more) if name in ServingWorkload.__dataclass_fields__}
    workload = ServingWorkload(batch_seqs=batch, **of_workload)  # type: ignore[arg-type]
    fields: dict[str, object] = {
        "model": model, "slice": Slice.parse(on), "workload": workload, "numerics": INT8,
    }  # fmt: skip
    return ServingProblem(**(fields | more))  # type: ignore[arg-type]


def place(on: str, kv_split: str = "batch", **sizes: int) -> Placement:
    """A placement with these axis sizes."""
    mesh = Mesh.lay(Slice.parse(on), {name: sizes.get(name, 1) for name in AXES})
    return Placement(mesh=mesh, kv_split=kv_split)


def kv_bytes(job: ServingProblem, placement: Placement, batch: int) -> float:
    """Bytes of the cache on a device, without scales."""
    return float(job.memory(placement, float(batch), prefilling=False, generating=True).kv)


# ---- the ledger -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["llama3-70b", "mixtral-8x7b", "gemma3-27b", "deepseek-v2", "gpt-oss-120b"])
def test_plan_and_ledger_add_up_and_stay_above_their_bound(model: str) -> None:
    answer = plan_serving(problem(load_model(model), "v5p:2x2x4", prompt=2048, generate=128))
    plan = answer.plan
    rows = plan.generate
    assert plan.step_s == pytest.approx(sum(float(row.count * row.expected_s) for row in rows))
    assert plan.lower_s <= plan.step_s <= float(rows.serial_s)
    assert plan.prefill_s >= max(float(plan.prefill.total(name)) for name in ("hbm", "mxu", "ici"))
    busy = plan.breakdown.to_json()
    assert busy["weights_s"] + busy["kv_s"] == pytest.approx(float(rows.total("hbm")))


def test_a_ring_hides_behind_no_more_attention_than_there_is() -> None:
    """Keys and values of 128 heads go round 32 devices: they take longer than the attention to them."""
    job = problem(load_model("deepseek-v3"), "v5p:4x4x8")
    (core,) = (row for row in job.prefill(place("v5p:4x4x8", expert=32, context=4), 8192.0) if "core" in row.scope)
    (ring,) = core.collectives
    attention_s = float(core.expected_s) - float(ring.exposed_s)
    assert float(ring.expected_s) > 2 * attention_s
    assert float(ring.exposed_s) == pytest.approx(float(ring.expected_s) - attention_s)


@pytest.mark.parametrize("mode", ["disaggregated", "interleaved"])
@pytest.mark.parametrize(
    ("model", "on"), [("deepseek-v2", "v5e:4x4"), ("gemma2-9b", "v5p:2x2x4"), ("llama3-8b", "h100:8x2")]
)
def test_placements_that_are_priced_at_once_are_priced_as_each_by_itself(model: str, on: str, mode: str) -> None:
    job = problem(load_model(model), on, mode=mode)
    placements, batches = job.generate_placements(), np.array([1.0, 7.0, 300.0])
    assert sum(1 for _ in together(placements)) < len(placements) / 2
    for sizes in (batches, batches[:1]):
        swept = sweep_generate(job, placements, sizes)
        for row, placement in enumerate(placements):
            np.testing.assert_array_equal(swept.expected_s[row], token_s(job, placement, sizes))
            np.testing.assert_array_equal(swept.memory_bytes[row], server_memory(job, placement, sizes))


@pytest.mark.parametrize(
    ("model", "slices"), [("deepseek-v2", ("v5e:2x4", "v5e:4x4")), ("llama3-8b", ("h100:8", "h100:8x2"))]
)
def test_slices_that_are_priced_at_once_are_priced_as_each_by_itself(model: str, slices: tuple[str, ...]) -> None:
    batches = [np.array([1.0, 7.0, 300.0]), np.array([4.0, 64.0])]
    workload = ServingWorkload(hit_rate=0.5)
    jobs = [replace(problem(load_model(model), on), workload=workload) for on in slices]
    placements = [job.generate_placements() for job in jobs]
    alone = [sweep_generate(job, some, own) for job, some, own in zip(jobs, placements, batches, strict=True)]
    prompts = [
        [float(job.prompt_s(place.joined())) for place in some] for job, some in zip(jobs, placements, strict=True)
    ]
    for swept, lone in zip(sweep_slices(jobs, placements, batches), alone, strict=True):
        np.testing.assert_array_equal(swept.expected_s, lone.expected_s)
        np.testing.assert_array_equal(swept.memory_bytes, lone.memory_bytes)
    every = [place.joined() for some in placements for place in some]
    np.testing.assert_array_equal(price_prompts(jobs[0], every), np.concatenate(prompts))


def test_weights_and_cache_are_read_once() -> None:
    job = problem()
    step = job.generate(place("v5e:4x4", context=2, tensor=8), 32.0)
    core = next(row for row in step if row.scope == "layers/attn/core")
    # 32 sequences of 8448 tokens, 163840 bytes each and a float32 scale per head of 128, over 16 devices.
    assert 80 * float(core.hbm_bytes) == pytest.approx(32 * 8448 * 163840 * (1 + 4 / 128) / 16)
    weights = sum(float(row.count * row.hbm_bytes) for row in step if row.scope.startswith("layers/mlp"))
    # A float32 scale per column, and activations in and out: two matmuls of D to 2 F/16 and of F/16 to D.
    scales = 4 * 80 * (2 * 28672 / 16 + 8192)
    moved = 2 * 80 * 32 * (8192 + 2 * 28672 / 16 + 28672 / 16 + 8192)
    assert weights == pytest.approx(3 * 80 * 8192 * 28672 / 16 + scales + moved)


def test_each_block_ends_in_one_all_reduce_of_the_batch() -> None:
    step = problem().generate(place("v5e:4x4", tensor=16), 32.0)
    summed = [(row.scope, one) for row in step for one in row.collectives if one.kind == "all_reduce"]
    assert [scope for scope, _ in summed] == ["layers/attn/out", "layers/mlp/down"]
    assert all(float(one.bytes) == 32 * 8192 * 2 for _, one in summed)


def test_splitting_the_batch_costs_two_all_to_alls_and_the_sequence_a_gather_and_a_scatter() -> None:
    def kinds(split: str) -> list[tuple[str, float]]:
        step = problem().generate(place("v5e:4x4", split, context=2, tensor=8), 32.0)
        core = next(row for row in step if row.scope == "layers/attn/core")
        return [(one.kind, float(one.bytes)) for one in core.collectives]

    queries = 32 * 64 * 128 * 2 / 8
    assert kinds("batch") == [("all_to_all", queries / 2), ("all_to_all", queries / 2)]
    (gather, scatter) = kinds("seq")
    assert gather == ("all_gather", queries)
    assert scatter == ("reduce_scatter", queries + 8 * 32 * 8)


def test_2d_moves_what_the_book_counts() -> None:
    step = problem(on="v5e:4x4").generate(place("v5e:4x4", fsdp=4, tensor=4), 32.0)
    rows = {row.scope: row for row in step}
    up = {one.kind: float(one.bytes) for one in rows["layers/mlp/up"].collectives if float(one.bytes) > 1000}
    assert up == {"all_gather": 32 * 8192 * 2 / 4, "reduce_scatter": 32 * 2 * 28672 * 2 / 4}
    down = {one.kind: float(one.bytes) for one in rows["layers/mlp/down"].collectives}
    assert down == {"all_gather": 32 * 28672 * 2 / 4, "reduce_scatter": 32 * 8192 * 2 / 4}


def test_a_large_slice_splits_d_too() -> None:
    plan = plan_serving(problem(on="v5e:16x16", batch=512)).plan
    assert plan.generate_on.mesh.size("fsdp") > 1
    reason = next(reason for reason in plan.reasons if reason.rule.startswith("2-D"))
    assert reason.holds


def test_only_experts_that_are_used_are_read() -> None:
    assert float(rules.distinct_experts(8, 2, 1.0)) == pytest.approx(2)
    assert float(rules.distinct_experts(8, 2, np.float64(1000))) == pytest.approx(8)
    model = load_model("mixtral-8x7b")
    job = problem(model, prompt=1024, generate=64, numerics=ServingNumerics())

    def read(batch: float) -> float:
        step = job.generate(place("v5e:4x4", context=2, tensor=8), batch)
        return sum(float(row.count * row.hbm_bytes) for row in step if row.scope == "layers/moe/experts")

    whole = 32 * 8 * 3 * 4096 * 14336 * 2 / 16
    assert read(1.0) == pytest.approx(whole / 4, rel=0.01)
    assert read(4.0) == pytest.approx(whole * (1 - 0.75**4), rel=0.01)


@given(st.integers(1, 300), st.integers(0, 300), st.none() | st.integers(1, 200))
def test_chunks_see_the_tokens_before_them(new: int, before: int, window: int | None) -> None:
    model = replace(LLAMA, layer_windows=(window,) * 80 if window else ())
    rows = np.arange(before, before + new)[:, None]
    columns = np.arange(before + new)[None, :]
    seen = columns <= rows
    if window is not None:
        seen &= columns > rows - window
    # Blocks of one: exact counts. Of the keys before the chunk a window may leave one more or less by its first token.
    assert chunk_pairs(model, new, before, 1) == pytest.approx(int(seen.sum()), abs=new + 1)


# ---- memory ---------------------------------------------------------------------------------------------------------


def test_a_cache_has_copies_beyond_its_heads_and_none_if_it_is_split() -> None:
    job = problem()
    one = 32 * 8704 * 163840 / 16
    assert kv_bytes(job, place("v5e:4x4", context=2, tensor=8), 32) == pytest.approx(one)
    assert kv_bytes(job, place("v5e:4x4", "seq", context=2, tensor=8), 32) == pytest.approx(one)
    assert kv_bytes(job, place("v5e:4x4", tensor=16), 32) == pytest.approx(2 * one)
    # Three sequences over two: the busiest device holds two of them, or half of each.
    assert kv_bytes(job, place("v5e:4x4", context=2, tensor=8), 3) == pytest.approx(one / 32 * 2 * 2)
    assert kv_bytes(job, place("v5e:4x4", "seq", context=2, tensor=8), 3) == pytest.approx(one / 32 * 3)


def test_a_latent_is_copied_over_tensor() -> None:
    job = problem(load_model("deepseek-v2"), on="v6e:4x4", numerics=ServingNumerics())
    latent = 16 * 8704 * 60 * 640 * 2  # 512 + 64 elements in whole lanes
    assert kv_bytes(job, place("v6e:4x4", tensor=16), 16) == pytest.approx(latent)
    assert kv_bytes(job, place("v6e:4x4", expert=16), 16) == pytest.approx(latent / 16)


def test_windows_bound_the_cache_and_sharing_divides_it() -> None:
    model = load_model("gemma3-27b")
    job = problem(model, on="v5e:4x4", numerics=ServingNumerics())
    windows = model.windows
    tokens = sum(8704 if window is None else min(8704, window) for window in windows)
    assert kv_bytes(job, place("v5e:4x4", tensor=16), 1) == pytest.approx(tokens * 2 * 16 * 128 * 2 / 16)
    shared = replace(job, numerics=ServingNumerics(kv_sharing=2))
    layout = place("v5e:4x4", tensor=16)
    assert kv_bytes(shared, layout, 1) == pytest.approx(kv_bytes(job, layout, 1) / 2)
    # What is shared is read by every layer all the same.
    assert float(shared.generate(layout, 1.0).total("hbm")) == float(job.generate(layout, 1.0).total("hbm"))


def test_scales_are_counted() -> None:
    def scales(**changed: object) -> float:
        numerics = replace(INT8, kv="bf16", **changed)
        memory = problem(numerics=numerics).memory(place("v5e:4x4", tensor=16), 0.0, prefilling=False, generating=True)
        return float(memory.scales)

    grouped = scales(weights="int4", weight_group=128)
    assert grouped == pytest.approx(70.5e9 * 2 / 128 / 16, rel=0.03)
    # A float32 for 8,192 inputs or more, and a bf16 for 128.
    assert 0 < scales(weights="int8") < grouped / 10
    assert scales(weights="bf16") == 0


@settings(max_examples=examples(20))
@given(st.integers(1, 200), st.sampled_from(["batch", "seq"]))
def test_the_largest_batch_is_the_last_that_fits(prompt: int, split: str) -> None:
    job = problem(prompt=prompt * 128, kv_split=split)
    layout = place("v5e:4x4", split, context=2, tensor=8)
    most = most_sequences(job, layout)

    def fits(batch: int) -> bool:
        memory = job.memory(layout, float(batch), prefilling=False, generating=True)
        return float(memory.total) <= job.capacity

    assert fits(most)
    assert not fits(most + 1)


def test_small_caches_allow_large_batches() -> None:
    job = problem(load_model("llama3.2-1b"), "v5p:4x4x8", prompt=1024, generate=64)
    layout = place("v5p:4x4x8", data=1, context=4, tensor=32)
    most = most_sequences(job, layout)
    assert 4096 < most < MOST_SEQUENCES
    memory = job.memory(layout, np.array([most, most + 4.0]), prefilling=False, generating=True)
    assert (np.asarray(memory.total) <= job.capacity).tolist() == [True, False]


def test_what_does_not_fit_says_what_is_left() -> None:
    answer = plan_serving(problem(batch=400))
    with pytest.raises(Infeasible, match=r"400 sequences of 8,704 tokens.*are left; at most 1\d\d sequences fit"):
        answer.plan.require_fit()


# ---- times ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["disaggregated", "interleaved"])
@pytest.mark.parametrize("model", ["llama3-70b", "gemma3-27b", "mistral-7b", "mixtral-8x7b", "deepseek-v2-lite"])
def test_step_times_are_the_plans(model: str, mode: str) -> None:
    job = problem(load_model(model), "v5e:4x4", batch=24, prompt=3000, generate=200, mode=mode)
    plan = plan_serving(job).plan
    times = plan.step_times()
    context = round(job.step_context)
    assert times.generate_s(24, 24 * context) == pytest.approx(plan.step_s, rel=1e-9)
    assert times.prefill_s([(3000, 0)]) == pytest.approx(plan.prefill_s, rel=0.01)
    for batch, tokens in ((1, 100), (7, 2000), (160, 600), (1500, 50)):
        priced = float(job.generate(plan.generate_on, float(batch), context=float(tokens)).expected_s)
        assert times.generate_s(batch, batch * tokens) == pytest.approx(priced, rel=1e-6)
    assert times.kv_tokens >= 24 * job.workload.held_tokens
    assert times.transfer_s(3000) == pytest.approx(plan.transfer_s, rel=0.1)


def test_prefill_in_chunks_pays_for_the_weights_again() -> None:
    times = plan_serving(problem(mode="interleaved")).plan.step_times()
    whole = times.prefill_s([(8192, 0)])
    halves = times.prefill_s([(4096, 0)]) + times.prefill_s([(4096, 4096)])
    assert whole < halves < 1.2 * whole
    alone = times.generate_s(32, 32 * 8448)
    mixed = times.mixed_s([(512, 0)], 32, 32 * 8448)
    assert max(alone, times.prefill_s([(512, 0)])) < mixed < alone + times.prefill_s([(512, 0)])


def test_interleaving_puts_prefills_between_tokens() -> None:
    apart, together = (plan_serving(problem(mode=mode)).plan for mode in ("disaggregated", "interleaved"))
    # Of 31 others half of those that start in the same pause, 31 / 511 in the mean, are prefilled before it.
    assert together.tpot_s == pytest.approx(together.step_s + (31 - 31 / 511 / 2) / 511 * together.prefill_s)
    assert together.tpot_together_s == pytest.approx(together.step_s + 31 / 2 / 511 * together.prefill_s)
    assert apart.tpot_together_s is None
    assert apart.tpot_s == pytest.approx(apart.step_s + apart.transfer_s / 511)
    alone = plan_serving(problem(mode="interleaved", batch=1)).plan
    assert alone.tpot_s == alone.tpot_together_s == alone.step_s


def test_the_rate_of_an_interleaved_server_counts_its_prefills() -> None:
    answer = plan_serving(problem(mode="interleaved"))
    plan = answer.plan
    cycle_s = 32 * plan.prefill_s + 511 * plan.step_s
    assert plan.tokens_per_s == pytest.approx(32 * 512 / cycle_s)
    # Its own latencies mean the same: 32 sequences of a prefill and 511 tokens each.
    assert plan.tokens_per_s == pytest.approx(32 * 512 / (plan.prefill_s + 511 * plan.tpot_s), rel=0.01)
    price = plan.problem.slice.price_usd_per_hour
    assert price is not None
    assert plan.cost_per_million_tokens.output == pytest.approx(price / 3600 / plan.tokens_per_s * 1e6)
    # So does each batch of the front, and a batch of one prefills too.
    assert all(point.tokens_per_s < 1 / plan.prefill_s * 512 for point in answer.front)
    alone = plan_serving(problem(mode="interleaved", batch=1)).plan
    assert alone.tokens_per_s == pytest.approx(512 / (alone.prefill_s + 511 * alone.step_s))


def test_a_fleet_of_interleaved_servers_keeps_its_load_with_their_own_prefills() -> None:
    asked = problem(mode="interleaved", batch=1, requests_per_second=40.0)
    best = recommend(asked, {"v5e": [asked.slice]}, [asked.numerics], ["interleaved"]).best
    busy_s = best.plan.prefill_s + 511 * best.plan.step_s
    assert 40.0 * busy_s / best.generate_servers <= LOAD


def test_transfer_and_prefix_cache() -> None:
    plan = plan_serving(problem(hit_rate=0.75, host_bytes=400e9)).plan
    cold = plan_serving(problem()).plan
    kv = 8192 * 163840 * (1 + 4 / 128)
    share = fractions("v5e")
    assert cold.problem.prompt_kv_bytes == pytest.approx(kv)
    assert cold.transfer_s == pytest.approx(kv / (16 * 3.125e9 * share.dcn))
    assert cold.problem.prompt_kv_bytes / cold.transfer_rates["ici"] == pytest.approx(
        kv / (4 * 4.5e10 * max(share.ici["permute"].share))
    )
    cache = plan.to_json()["prefix_cache"]
    assert cache["prefill_without_s"] == pytest.approx(cold.prefill_s)
    assert cache["read_s"] == pytest.approx(0.75 * kv / (16 * 1.6e10))
    assert 2 < cache["speedup"] < 4
    assert cache["prompts_held"] == int(2 * 400e9 / kv)


def test_speculation_trades_flops_for_steps() -> None:
    assert rules.speculated_tokens(4, 0.0) == 1
    assert rules.speculated_tokens(4, 1.0) == 5
    assert rules.speculated_tokens(3, 0.5) == pytest.approx((1 - 0.5**4) / 0.5)
    draft = DraftModel(model=load_model("llama3-8b"), length=4, acceptance=0.8)
    slow = plan_serving(problem(batch=4)).plan
    fast = plan_serving(problem(batch=4, draft=draft)).plan
    assert fast.token_s < 0.8 * slow.token_s
    # A round: four guesses one after another, and a check of five tokens.
    draft_figures = fast.to_json()["draft"]
    assert draft_figures["round_s"] == pytest.approx(draft_figures["guess_s"] + draft_figures["check_s"])
    assert draft_figures["round_s"] == pytest.approx(fast.token_s * draft_figures["tokens_per_round"])
    small = plan_serving(problem(draft.model, batch=4, axes=fast.generate_on.mesh.shape)).plan
    assert draft_figures["guess_s"] == pytest.approx(4 * small.step_s, rel=1e-6)
    assert slow.step_s < draft_figures["check_s"] < 1.3 * slow.step_s
    # The draft model prefills the prompt too, and its KV is sent as well.
    assert fast.prefill_s == pytest.approx(slow.prefill_s + draft_figures["prefill_s"])
    kv = 8192 * (163840 + 2 * 8 * 128 * 32) * (1 + 4 / 128)
    assert fast.problem.prompt_kv_bytes == pytest.approx(kv)
    # Both models are held, and none of it pays if nothing is accepted.
    assert float(fast.memory.weights) > float(slow.memory.weights) + 0.9 * 8e9 / 16
    useless = DraftModel(model=draft.model, length=4, acceptance=0.0)
    assert plan_serving(problem(batch=4, draft=useless)).plan.token_s > slow.token_s


def test_narrow_dtypes_are_chosen_apart() -> None:
    def step(**dtypes: str) -> float:
        return plan_serving(problem(on="v5e:4x8", numerics=ServingNumerics(**dtypes))).plan.step_s

    assert step(weights="int4", kv="int8") < step(weights="int8", kv="int8") < step(weights="int8", kv="bf16")
    assert step(weights="int8", kv="bf16") < step()
    with pytest.raises(RooftopError, match="matmul-dtype on v5e"):
        problem(numerics=ServingNumerics(flops="f8_e4m3"))


def test_assumptions_are_named_and_bounded() -> None:
    best = ServingAssumptions().with_shares("hbm_read=1,bytes=1,latency=1")
    plan, ideal = plan_serving(problem()).plan, plan_serving(problem(assumptions=best)).plan
    assert ideal.lower_s <= ideal.step_s < plan.step_s
    for text in ("hbm=1", "latency=2", "bytes=x", "hbm_read=0"):
        with pytest.raises(RooftopError):
            ServingAssumptions().with_shares(text)


# ---- search ---------------------------------------------------------------------------------------------------------


def test_a_target_of_tpot_bounds_the_batch() -> None:
    fast = plan_serving(problem(batch=None, tpot_s=0.010)).plan
    free = plan_serving(problem(batch=None)).plan
    assert fast.tpot_s <= 0.010 < free.tpot_s
    assert fast.batch < free.batch < free.max_batch
    with pytest.raises(Infeasible, match=r"misses its TPOT of 1 ms: nearest is"):
        plan_serving(problem(batch=None, tpot_s=0.001)).plan.require_targets()


@pytest.mark.parametrize("model", ["llama3-70b", "qwen3-30b-a3b", "deepseek-v2-lite"])
def test_the_knee_is_the_last_doubling_that_pays(model: str) -> None:
    """Twice the batch raises tokens/s by a smaller factor than TPOT, half of it has a worse ratio of the two."""
    job = problem(load_model(model), batch=None, prompt=2048, generate=512)
    plans = search_batches(job).plans
    knee = search_batches(job).knee

    def ratio(batch: int) -> float:
        plan = min(plans, key=lambda plan: abs(plan.batch - batch))
        return plan.batch / plan.tpot_s**2

    assert ratio(knee.batch) >= ratio(knee.batch // 2)
    assert 2 * knee.batch > plans[-1].batch or ratio(2 * knee.batch) < ratio(knee.batch)


#: Fields of small models whose heads, columns and experts divide over some meshes and not over others.
MODELS = st.builds(
    lambda base, heads, kv, columns, vocab: replace(
        load_model(base), heads=heads * kv, kv_heads=kv, d_ff=columns, vocab=vocab, layers=4
    ),
    st.sampled_from(["llama3-8b", "qwen3-8b"]), st.integers(1, 8), st.integers(1, 8),
    st.sampled_from([1408, 4096, 5504, 14336]), st.sampled_from([32000, 50257]),
)  # fmt: skip


@settings(max_examples=examples(150, quick=12), deadline=None)
@given(
    model=MODELS | st.sampled_from(["mixtral-8x7b", "deepseek-v2-lite", "gpt-oss-20b", "llama3-70b"]).map(load_model),
    on=st.sampled_from(["v5e:2x2", "v5e:4x4", "v6e:2x4", "v5p:2x2x2"]),
    mode=st.sampled_from(["disaggregated", "interleaved"]),
    tpot_s=st.sampled_from([None, 0.005, 0.05]),
    batch=st.sampled_from([None, None, 7, 470]),
    rate=st.sampled_from([None, 5.0]),
)
def test_what_is_recommended_is_executable_and_so_is_the_nearest(
    model: ModelConfig, on: str, mode: str, tpot_s: float | None, batch: int | None, rate: float | None
) -> None:
    asked = problem(model, on, batch, mode=mode, prompt=2048, generate=256, tpot_s=tpot_s, requests_per_second=rate)
    try:
        if rate is None:
            answer = plan_serving(asked)
        else:
            best = recommend(asked, {"chip": [asked.slice]}, [INT8], [mode]).best
            assert best.plan.fits and not best.plan.obstacles
            return
    except (Infeasible, RooftopError):
        return
    plan = answer.plan
    possible = any(
        float(server_memory(asked, place, float(batch or 1))) <= asked.capacity and not asked.obstacles(place)
        for place in asked.generate_placements()
    )
    assert (plan.fits and not plan.obstacles) == possible
    if possible:
        assert not answer.nearest
        assert batch is not None or plan.batch % plan.generate_on.spread == 0 or plan.batch < plan.generate_on.spread
        return
    # What does not fit or has no engine says so, and every plan that it names has one.
    for near in nearest_plans(plan.problem):
        assert near.fits and not near.obstacles


def test_the_front_falls_nowhere() -> None:
    points = plan_serving(problem(batch=None)).front
    steps = [point.step_s for point in points]
    rates = [point.tokens_per_s_per_chip for point in points]
    assert len(points) > 10
    assert steps == sorted(steps)
    assert rates == sorted(rates)


def test_the_plan_adds_up_to_what_the_sweep_saw() -> None:
    job = problem(batch=None)
    places = job.generate_placements()
    swept = sweep_generate(job, places, batch_grid(100))
    for at in (0, 10, len(swept.batches) - 1):
        batch = int(swept.batches[at])
        plan = plan_serving(replace(job, workload=replace(job.workload, batch_seqs=batch))).plan
        assert plan.step_s == pytest.approx(float(swept.fastest_s[at]), rel=1e-12)
        assert plan.generate_on.mesh.axes == swept.best(at).mesh.axes


def _recommend(objective: str = "cost", model: ModelConfig = LLAMA, **targets: float) -> object:
    where = {name: candidate_slices(Slice.parse(f"{name}:4x4")) for name in ("v5e", "v6e")}
    asked = problem(model, batch=None, **targets)
    return recommend(asked, where, [INT8, ServingNumerics()], ["disaggregated", "interleaved"], objective)


def test_recommendation_meets_the_targets_and_beats_the_others() -> None:
    recommendation = _recommend(requests_per_second=40.0, ttft_s=0.5, tpot_s=0.03)
    best = recommendation.best
    assert best.ttft_s <= 0.5
    assert best.tpot_s <= 0.03
    work = best.plan.problem.workload
    assert best.generate_servers * best.plan.batch * LOAD >= 40 * work.generate * best.plan.token_s
    assert best.prefill_servers * LOAD >= 40 * best.plan.prefill_s
    assert best.usd_per_hour == pytest.approx(best.chips * best.plan.problem.slice.chip.price_usd_per_hour)
    costs = [fleet.usd_per_hour for fleet in (best, *recommendation.others)]
    assert costs == sorted(costs)
    assert all("dollars an hour against" in recommendation.why(other) for other in recommendation.others)
    fewest = _recommend("chips", requests_per_second=40.0, ttft_s=0.5, tpot_s=0.03)
    assert fewest.best.chips <= best.chips


@pytest.mark.parametrize("rate", [None, 2.0, 40.0])
def test_slices_that_are_not_priced_have_no_better_fleet(rate: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    targets = {"ttft_s": 0.5, "tpot_s": 0.03} | ({} if rate is None else {"requests_per_second": rate})
    small = load_model("llama3.2-1b")
    pruned = _recommend(model=small, **targets)
    monkeypatch.setattr(fleets, "_is_settled", lambda best, slice_: False)
    whole = _recommend(model=small, **targets)
    assert [one.name for one in (whole.best, *whole.others)] == [one.name for one in (pruned.best, *pruned.others)]
    assert (whole.searched > pruned.searched) == (rate is not None)


def test_an_unreachable_target_names_the_nearest() -> None:
    with pytest.raises(Infeasible, match=r"reaches TTFT 1 ms and TPOT 10 us: nearest is TTFT .* times the target"):
        _recommend(requests_per_second=1.0, ttft_s=1e-3, tpot_s=1e-5)


def test_the_nearest_is_as_near_as_servers_can_make_it() -> None:
    with pytest.raises(Infeasible) as error:
        _recommend(requests_per_second=40.0, ttft_s=5e-3)
    job = problem(on="v6e:8x8")
    _, fastest = best_prefill(job, job.engine_prefills())
    reached = float(error.value.by.split("TTFT ")[1].split(" ms")[0]) / 1e3
    # Ten times the servers that the load needs: the mean wait is a twentieth of a prefill, and a bit.
    assert fastest < reached < 1.1 * fastest


def test_where_a_server_runs_may_be_fixed() -> None:
    job = problem(requests_per_second=10.0, axes={"context": 4, "tensor": 4}, prefill_slice=Slice.parse("v5e:8x8"))
    best = recommend(job, {"v5e": [job.slice]}, [INT8], ["disaggregated"]).best
    assert best.plan.generate_on.mesh.size("context", "tensor") == 16
    assert best.plan.generate_on.mesh.size("context") == 4
    assert best.plan.problem.prefill_server.name == "v5e:8x8"


def test_a_chip_without_measurements_says_that_its_times_are_estimates() -> None:
    where = {name: candidate_slices(Slice.parse(on)) for name, on in (("v5e", "v5e:4x4"), ("v3", "v3:4x4"))}
    recommendation = recommend(problem(requests_per_second=10.0), where, [INT8], ["disaggregated"], "chips")
    by_chip = {fleet.plan.problem.slice.chip.name: fleet for fleet in (recommendation.best, *recommendation.others)}
    assert (by_chip["v5e"].is_estimate, by_chip["v3"].is_estimate) == (False, True)
    assert "times are estimates" in recommendation.why(by_chip["v3"])


def test_the_front_over_chips_is_faster_or_cheaper() -> None:
    where = {name: candidate_slices(Slice.parse(f"{name}:4x4"))[:4] for name in ("v5e", "v6e")}
    points = front(problem(batch=None), where, [INT8])
    costs = [point.usd_per_million_tokens for point in points]
    assert costs == sorted(costs, reverse=True)
    assert {point.slice.split(":")[0] for point in points} <= {"v5e", "v6e"}


def test_a_plan_file_is_the_plan() -> None:
    draft = DraftModel(model=load_model("llama3-8b"), length=3, acceptance=0.6)
    job = problem(mode="disaggregated", prefill_slice=Slice.parse("v5e:8x8"), draft=draft, link="ici")
    plan = plan_serving(job).plan
    again = ServingPlan.from_json(json.loads(json.dumps(plan.to_json())))
    assert (again.step_s, again.token_s, again.prefill_s) == (plan.step_s, plan.token_s, plan.prefill_s)
    assert again.to_json() == plan.to_json()
    for broken in ({}, {"kind": "train", "schema": 1}, {"kind": "serve", "schema": 1}):
        with pytest.raises(RooftopError, match="plan"):
            ServingPlan.from_json(broken)


# ---- pipeline stages ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["llama3-70b", "deepseek-v3", "gpt-oss-120b"])
def test_stages_halve_what_a_device_stores_and_take_the_time_of_both(model: str) -> None:
    """Two slices with half of the layers each, next to one slice with all layers and half of the sequences."""
    config, inner = load_model(model), {"expert": 4, "tensor": 4} if "llama" not in model else {"tensor": 16}
    alone, staged = place("v5e:4x4", **inner), place("v5e:4x4@2", stage=2, **inner)
    one, two = (problem(config, on, mode="interleaved") for on in ("v5e:4x4", "v5e:4x4@2"))
    halves = [len(layers) for layers in stage_layers(config.layers, 2)]
    for batch in (32, 33):
        flight = -(-batch // 2)
        memory = two.memory(staged, float(batch), prefilling=False, generating=True)
        of_flight = one.memory(alone, float(flight), prefilling=False, generating=True)
        assert float(memory.kv) == pytest.approx(2 * float(of_flight.kv) * halves[0] / config.layers)
        step, way = two.generate(staged, float(batch)), one.generate(alone, float(flight))
        assert [row.scope for row in step if row.scope != "pipeline"] == [row.scope for row in way]
        sends, idle = (row for row in step if row.scope == "pipeline")
        # The latency that hides behind streams hides as much of both.
        rows = sum(float(row.count * row.expected_s) for row in step if row.scope != "pipeline")
        assert rows == pytest.approx(float(way.expected_s), rel=1e-9)
        assert float(step.expected_s) == pytest.approx(
            rows + float(sends.count * sends.expected_s + idle.expected_s), rel=1e-9
        )
        assert float(two.generate_s(staged, float(batch))) == pytest.approx(float(step.expected_s), rel=1e-9)
        first = sum(float(row.count * row.expected_s) for row in step if row.scope == "embed")
        last = sum(float(row.count * row.expected_s) for row in step if row.scope in ("unembed", "sample"))
        layer = (rows - first - last) / config.layers
        slowest = max(halves[0] * layer + first, halves[1] * layer + last)
        assert float(step.expected_s) == pytest.approx(max(2 * slowest, rows + float(sends.expected_s)), rel=1e-9)
        assert float(two.prompt_interval_s(staged.joined())) < 0.6 * float(two.prompt_s(staged.joined()))
    # Devices along expert split the vocabulary, and each looks up its own tokens. The first stage has the lookup.
    table = config.vocab * config.d_model * 2
    lookup, unembed = table / inner["tensor"], table / 16
    weights = float(two.memory(staged, 32.0, prefilling=False, generating=True).weights)
    most = float(one.memory(alone, 32.0, prefilling=False, generating=True).weights)
    assert weights == pytest.approx((most - lookup - unembed) / 2 + lookup, rel=0.03)


def test_one_sequence_takes_the_way_through_all_stages() -> None:
    """Nothing waits for a slower stage: no other flight is on its way."""
    staged = place("v5e:4x4@2", stage=2, tensor=16)
    step = problem(on="v5e:4x4@2").generate(staged, 1.0)
    sends, idle = (row for row in step if row.scope == "pipeline")
    assert (float(sends.count), float(idle.expected_s)) == (1.0, 0.0)
    (sent, gathered) = sends.collectives
    assert (sent.kind, sent.axes, float(sent.bytes)) == ("permute", ("stage",), LLAMA.d_model * 2 / 16)
    assert (gathered.kind, gathered.axes, float(gathered.bytes)) == ("all_gather", ("tensor",), LLAMA.d_model * 2)
    assert float(sends.expected_s) == pytest.approx(float(sent.expected_s) + float(gathered.exposed_s))


@pytest.mark.parametrize("mode", ["interleaved", "disaggregated"])
def test_slices_are_joined_by_stages_and_by_nothing_else(mode: str) -> None:
    """A model that no slice holds is planned on two, as an engine runs it."""
    alone, job = (
        problem(load_model("llama3.1-405b"), on, batch=None, mode=mode, numerics=ServingNumerics())
        for on in ("v5e:4x8", "v5e:4x8@2")
    )
    assert not search_batches(alone).best.fits
    plan = plan_serving(job).plan
    assert plan.fits and not plan.obstacles
    assert plan.generate_on.mesh.shape["stage"] == plan.prefill_on.mesh.shape["stage"] == 2
    assert [piece.axis for piece in plan.generate_on.mesh.axes["stage"]] == ["dcn"]
    assert ServingPlan.from_json(plan.to_json()).step_s == pytest.approx(plan.step_s)
    with pytest.raises(RooftopError, match="one with pipeline stages'; accepted: one without"):
        plan.step_times()


def test_a_cache_of_stages_is_sent_to_the_same_mesh() -> None:
    job = problem(load_model("llama3.1-405b"), "v5e:4x8@2", mode="disaggregated")
    generate, other = (place("v5e:4x8@2", stage=stages, tensor=64 // stages) for stages in (2, 4))
    assert job.obstacles(generate, generate.joined()) == []
    assert "the same mesh" in "; ".join(job.obstacles(generate, other.joined()))
