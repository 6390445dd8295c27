"""Train steps of other frameworks on GPUs: each property changes the figures that it is about."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rooftop.arrays import parse_axes
from rooftop.core.errors import RooftopError
from rooftop.core.scopes import Phase
from rooftop.frameworks.framework import Framework, framework_of
from rooftop.frameworks.habits import Habits
from rooftop.frameworks.launches import LayerKernels
from rooftop.hardware import Slice
from rooftop.models import load_model
from rooftop.models.numerics import Numerics
from rooftop.plan.training.assumptions import Assumptions
from rooftop.plan.training.plan import TrainingPlan
from rooftop.plan.training.problem import Problem
from rooftop.plan.training.search import sweep
from rooftop.plan.training.workload import Workload
from rooftop.roofline.achievable import fractions
from rooftop.roofline.rules import distinct_parts

#: Habits of a program whose elementwise kernels are fused, next to those of PyTorch's matmuls and AllToAlls.
FUSED: Mapping[str, object] = {
    "kernels": "fused", "unstacked_passes": 0.0, "exchange_passes": 2.0, "hides_token_gradients": False,
}  # fmt: skip


def habits_of(model: str, on: str, **changed: object) -> Habits:
    """Habits of a plain program on XLA, but for those that are ``changed``."""
    plain = framework_of("maxtext", chip=Slice.parse(on).chip, model=load_model(model)).habits
    return replace(plain, **{"weighs_outputs": False, "group_rows": (), "group_dim": 0, **changed})  # type: ignore[arg-type]


def planned(model: str, on: str, axes: str, habits: Mapping[str, object], **more: object) -> TrainingPlan:
    problem = Problem(
        model=load_model(model),
        slice=Slice.parse(on),
        workload=Workload(batch_tokens=256 * 4096, seq_len=4096),
        axes=parse_axes(axes),
        framework=Framework(name="torchtitan", habits=habits_of(model, on, **habits)),
        remat="none",
        microbatches=4,
    )
    swept = sweep(replace(problem, **more))  # type: ignore[arg-type]
    return swept.plan(swept.best)


def seconds(plan: TrainingPlan, scope: str, *phases: Phase) -> float:
    """Expected seconds of a scope in all executions."""
    return sum(float(row.count * row.expected_s) for row in plan.ledger if row.scope == scope and row.phase in phases)


def moved(plan: TrainingPlan, scope: str, *phases: Phase) -> float:
    """HBM bytes of a scope in all executions."""
    return sum(float(row.count * row.hbm_bytes) for row in plan.ledger if row.scope == scope and row.phase in phases)


@pytest.mark.parametrize(
    ("experts", "active", "parts", "groups", "active_groups"),
    [(8, 2, 4, 1, 1), (8, 3, 2, 1, 1), (8, 3, 8, 4, 2), (12, 3, 3, 6, 3), (12, 4, 2, 6, 2), (8, 2, 1, 2, 1)],
)
def test_distinct_parts_are_the_mean_of_all_choices(
    experts: int, active: int, parts: int, groups: int, active_groups: int
) -> None:
    group, size = experts // groups, experts // parts
    counts = [
        len({expert // size for expert in chosen})
        for some in itertools.combinations(range(groups), active_groups)
        for chosen in itertools.combinations([e for e in range(experts) if e // group in some], active)
    ]
    expected = distinct_parts(experts, active, float(parts), groups=groups, active_groups=active_groups)
    assert float(expected) == pytest.approx(np.mean(counts))


def test_a_token_goes_once_to_each_node() -> None:
    """Network bytes fall to those of distinct nodes, of which DeepSeek's routing allows four."""
    copies, once = (
        planned("deepseek-v3", "h100:8x8", "expert=64", dict(dispatch=dispatch))  # type: ignore[arg-type]
        for dispatch in ("experts", "nodes")
    )
    network = [
        sum(
            float(collective.time_s["dcn"])
            for row in plan.ledger
            if (row.scope, row.phase) == ("layers/moe/combine", "forward")
            for collective in row.collectives
        )
        for plan in (copies, once)
    ]
    nodes = float(distinct_parts(256, 8, 8.0, groups=8, active_groups=4))
    assert 3 < nodes < 4
    assert network[1] / network[0] == pytest.approx(nodes / 8)
    assert once.expected_s < copies.expected_s


def test_in_one_node_a_token_goes_once_to_each_gpu() -> None:
    copies, once = (
        planned("qwen3-30b-a3b", "h100:8", "expert=8", dict(dispatch=dispatch))  # type: ignore[arg-type]
        for dispatch in ("experts", "nodes")
    )
    nvlink = [float(plan.ledger.total("ici")) for plan in (copies, once)]
    gpus = float(distinct_parts(128, 8, 8.0))
    exchanges = nvlink[0] - nvlink[1]
    moe = [
        sum(
            float(row.count * collective.time_s["ici"])
            for row in plan.ledger
            if row.scope in ("layers/moe/dispatch", "layers/moe/combine")
            for collective in row.collectives
        )
        for plan in (copies, once)
    ]
    assert exchanges == pytest.approx(moe[0] - moe[1])
    assert moe[1] / moe[0] == pytest.approx(gpus / 8)


def test_separate_kernels_read_and_write_what_fused_ones_do_not() -> None:
    xla, fused, eager = (
        planned("llama3-8b", "h100:8", "fsdp=8", kernels)  # type: ignore[arg-type]
        for kernels in ({}, FUSED, FUSED | {"kernels": "eager"})
    )
    norms, acts = (
        [moved(plan, scope, "forward", "backward") for plan in (xla, fused, eager)]
        for scope in ("layers/mlp/norm", "layers/mlp/act")
    )
    assert norms[0] < norms[1] < norms[2]
    # XLA:GPU's gradient of SwiGLU writes its result again: 3 and 6 passes, for 3 and 5.
    assert acts[0] / acts[1] == pytest.approx(9 / 8)
    assert acts[1] < acts[2]
    # SwiGLU reads two arrays and writes one; backward it reads three and writes two.
    tokens = 256 * 4096 / 8
    assert moved(fused, "layers/mlp/act", "forward", "backward") == pytest.approx(32 * 8 * tokens * 14336 * 2)


def test_matmuls_add_to_sums_of_gradients() -> None:
    apart, inside = (
        planned("llama3-8b", "h100:8", "data=8", dict(adds_in_matmuls=adds), remat="block") for adds in (False, True)
    )
    assert moved(inside, "gradients", "update") < moved(apart, "gradients", "update")
    assert moved(inside, "layers/mlp/up", "backward") > moved(apart, "layers/mlp/up", "backward")


def test_weights_that_are_quantised_once_are_not_quantised_for_each_microbatch() -> None:
    narrow = Numerics(matmul="f8_e4m3")
    again, once, twice = (
        planned("llama3-8b", "h100:8", "data=8", framework, numerics=narrow)
        for framework in (
            dict(),
            dict(quantises_once=True),
            dict(quantises_once=True, quantising_reads=2, quantised_copies=2),
        )
    )
    up = [moved(plan, "layers/mlp/up", "forward") for plan in (again, once, twice)]
    weights = 32 * 4096 * 2 * 14336
    # Four microbatches: read twice and written in 8 bits, in all or once.
    assert up[0] - up[1] == pytest.approx((4 - 1) * 5 * weights)
    inputs = 32 * (256 * 4096 / 8) * 4096
    assert up[2] - up[1] == pytest.approx(3 * inputs)


def test_stages_are_filled_with_layers_of_both_kinds() -> None:
    """61 layers over 16 chunks of four: the longest stage has 16, as Megatron-Bridge lays them out."""
    apart, filled = (
        planned(
            "deepseek-v3",
            "gb200:64x4",
            "stage=4,expert=64",
            dict(fills_stages=fills),
            schedule="interleaved",
            chunks=4,
        )
        for fills in (False, True)
    )
    assert np.ravel(filled.step.layers).tolist() == [16]
    assert np.ravel(apart.step.layers).tolist() == [16 + 3]
    assert filled.expected_s < apart.expected_s
    # What the last stage lacks in layers it has in the unembedding.
    assert filled.exposed_s()["idle"] < apart.exposed_s()["idle"]


def test_gathers_next_to_gradients_are_hidden() -> None:
    shown, hidden = (
        planned("llama3-70b", "h100:8", "tensor=8", {**FUSED, "hides_gradients": hides}) for hides in (False, True)
    )
    assert seconds(hidden, "layers/mlp/up", "backward") < seconds(shown, "layers/mlp/up", "backward")
    assert seconds(hidden, "layers/mlp/up", "forward") == seconds(shown, "layers/mlp/up", "forward")


def test_an_experts_own_matmul_starts_alone() -> None:
    together, apart = (
        planned("qwen3-30b-a3b", "h100:8", "expert=8", dict(groups_experts=groups)) for groups in (True, False)
    )
    assert seconds(apart, "layers/moe/experts", "forward") > seconds(together, "layers/moe/experts", "forward")


def test_slower_attention() -> None:
    fast, slow = (planned("llama3-8b", "h100:8", "fsdp=8", dict(attention_speed=speed)) for speed in (1.0, 0.5))
    assert seconds(slow, "layers/attn/core", "forward") == pytest.approx(
        2 * seconds(fast, "layers/attn/core", "forward")
    )


def kernels(**more: Any) -> LayerKernels:
    """A layer of Qwen3-30B-A3B with 8 experts on a device, in BF16."""
    layer = {"quantise": 0, "scales": 0, "experts": 8, "grouped": False, "dispatch": "nodes", "tensor": 0}
    return LayerKernels(model=load_model("qwen3-30b-a3b"), **{**layer, **more})


def test_kernels_of_a_layer_are_those_of_a_published_profile() -> None:
    """Nsight Systems counted 463,348 in 64 microbatches of 48 layers (Megatron-Bridge, expert-parallel overlap)."""
    layer = kernels().of(moe=True)
    share = 64 * 48 * (layer.forward + layer.backward) / 463_348
    # Casts, zeros and sums of PyTorch are not counted.
    assert 0.65 < share < 1.0


def test_every_expert_has_kernels_of_its_own() -> None:
    """In a pass a tensor is quantised once; a matmul has three products, two of them backward."""
    layers = {
        (experts, quantise): kernels(experts=experts, quantise=quantise).of(moe=True)
        for experts in (8, 16)
        for quantise in (0, 4)
    }
    more = [layers[16, quantise].forward - layers[8, quantise].forward for quantise in (0, 4)]
    assert more == [8 * 2 * 1, 8 * 2 * (1 + 4)]
    more = [layers[16, quantise].backward - layers[8, quantise].backward for quantise in (0, 4)]
    assert more == [8 * 2 * 2, 8 * 2 * (2 + 4)]
    grouped = [kernels(experts=experts, quantise=4, grouped=True).of(moe=True) for experts in (8, 16)]
    assert grouped[0] == grouped[1]


def test_graphs_are_launched_at_once() -> None:
    eager = kernels().of(moe=True)
    attention, whole = (kernels(graphs=graphs).of(moe=True) for graphs in (("attn",), ("layer",)))
    assert (whole.forward, whole.backward) == (1, 1)
    # Three norms, two projections, two rotations, the core, the sum.
    assert eager.forward - attention.forward == 3 + 2 + 2 + 1 + 1 - 1
    assert eager.backward > attention.backward


def test_layers_that_are_recomputed_are_launched_again() -> None:
    model = load_model("llama3-8b")
    layer = {"quantise": 0, "scales": 0, "experts": 0, "grouped": True, "dispatch": "experts", "tensor": 0}
    once, again = (LayerKernels(model=model, again=names, **layer).of(moe=False) for names in ({}, {"qkv": 1.0}))  # type: ignore[arg-type]
    assert (again.forward - once.forward, again.backward - once.backward) == (0, 1)


def test_the_host_sets_the_pace_of_kernels_that_are_shorter_than_their_launches() -> None:
    """Passes over layers last as long as their launches, or as the device takes."""

    def passes(plan: TrainingPlan, *phases: Phase) -> float:
        scopes = {row.scope for row in plan.ledger if row.scope.startswith("layers/") or row.scope == "host_gap"}
        return sum(seconds(plan, scope, *phases) for scope in scopes)

    both = (("forward",), ("recompute", "backward"))
    device, short, long = (
        planned("qwen3-30b-a3b", "h100:8", "expert=8", {**FUSED, "groups_experts": False, "launch_s": launch})
        for launch in (0.0, 1e-6, 1e-3)
    )
    assert short.expected_s == pytest.approx(device.expected_s)
    for phases in both:
        assert passes(long, *phases) == pytest.approx(float(np.ravel(long.step.launch_s[phases[-1]])[0]))
        assert passes(long, *phases) > 2 * passes(device, *phases)
    assert long.lower_s == device.lower_s


@pytest.mark.parametrize("axes", ["expert=8", "stage=2,expert=4"])
def test_launches_are_in_the_search_as_in_the_ledger(axes: str) -> None:
    problem = Problem(
        model=load_model("qwen3-30b-a3b"),
        slice=Slice.parse("h100:8"),
        workload=Workload(batch_tokens=64 * 4096, seq_len=4096),
        axes=parse_axes(axes),
        assumptions=Assumptions(calibration=1.25),
        framework=Framework(
            name="torchtitan",
            habits=habits_of("qwen3-30b-a3b", "h100:8", **FUSED, launch_s=500e-6, graphs=("moe_router",)),
        ),
        remat="none",
        microbatches=8,
    )
    swept = sweep(problem)
    plan = swept.plan(swept.best)
    assert seconds(plan, "host_gap", "forward", "backward") > 0
    assert float(swept.expected_s[swept.best]) == pytest.approx(plan.expected_s)


@pytest.mark.parametrize(
    ("field", "value", "accepted"),
    [
        ("dispatch", "all", "experts"),
        ("kernels", "slow", "fused"),
        ("attention_speed", 0.0, "positive"),
        ("launch_s", -1e-6, "0 or more"),
        ("graphs", ("experts",), "moe_router"),
    ],
)
def test_properties_that_no_framework_has(field: str, value: object, accepted: str) -> None:
    with pytest.raises(RooftopError, match=accepted) as error:
        Habits(**{field: value})  # type: ignore[arg-type]
    assert field in str(error.value)


# ---- mixtures of experts in MaxText ---------------------------------------------------------------------------------


def on_v5p(habits: Habits, **more: object) -> TrainingPlan:
    """DeepSeek-V2-Lite on 4 v5p chips, each of which has all 64 experts; nothing is kept but the layers' inputs."""
    return planned("deepseek-v2-lite", "v5p:2x2x1", "fsdp=4", habits, microbatches=1, remat="block", **more)


def multiplied(plan: TrainingPlan, *phases: Phase) -> float:
    """Expected seconds of the experts' matmuls: what else is in their scope has no "k n" in its formula."""
    return sum(
        float(row.count * row.expected_s)
        for row in plan.ledger
        if row.scope == "layers/moe/experts"
        and row.phase in phases
        and ("k n" in row.formula or "matmul" in row.formula)
    )


def test_tiles_that_two_experts_share_are_executed_for_both() -> None:
    """The closed form against groups drawn at random: each tile of rows once for each expert that has one in it."""
    experts, tile = 64, 512
    generator = np.random.default_rng(0)
    visits = []
    for _ in range(20):
        sizes = generator.multinomial(64 * 4096 * 6 // 4, [1 / experts] * experts)
        ends = np.cumsum(sizes)
        visits.append(np.sum(-(-ends // tile) - (ends - sizes) // tile))
    rows = 64 * 4096 * 6 / 4 / experts
    assert tile * np.mean(visits) / experts == pytest.approx(rows + tile * (1 - 1 / experts), rel=0.01)

    small, large = (on_v5p(dict(group_rows=((rows, rows, rows), (rows, rows, rows)))) for rows in (128, 512))
    rows_of_expert = 256 * 4096 * 6 / 4 / experts
    expected = (rows_of_expert + 512 * 63 / 64) / (rows_of_expert + 128 * 63 / 64)
    assert multiplied(large, "backward") / multiplied(small, "backward") == pytest.approx(expected, rel=0.01)


def test_dims_of_grouped_kernels_are_whole_tiles() -> None:
    tiles = ((512, 512, 512), (512, 512, 512))
    whole, padded = (on_v5p(dict(group_rows=tiles, group_dim=dim)) for dim in (0, 1024))
    # F 1408 takes two tiles of 1024, D 2048 is two. By hand: three matrices of 64 experts in 26 layers, two gradients.
    executed = 64 * (256 * 4096 * 6 / 4 / 64 + 512 * 63 / 64)
    fit = fractions("v5p").grouped
    assert fit is not None
    more = 26 * 3 * 2 * executed * 2048 * (2048 - 1408) / 459e12 * (1 / fit.inputs + 1 / fit.weights)
    assert multiplied(padded, "backward") - multiplied(whole, "backward") == pytest.approx(more, rel=0.01)
    # The bound knows no tiles.
    assert padded.lower_s == whole.lower_s


def test_outputs_that_are_weighted_are_made_again() -> None:
    plain, weighted = (on_v5p(dict(weighs_outputs=weighs)) for weighs in (False, True))
    more = multiplied(weighted, "recompute") / multiplied(plain, "recompute")
    # Down next to gate and up: three matrices in place of two.
    assert 1.3 < more < 1.6
    assert multiplied(weighted, "forward", "backward") == multiplied(plain, "forward", "backward")


def test_slots_of_experts_are_multiplied_full_or_not() -> None:
    even, roomy = (on_v5p(dict(capacity=capacity)) for capacity in (1.0, 1.25))
    assert multiplied(roomy, "backward") / multiplied(even, "backward") == pytest.approx(1.25, abs=0.04)
    with pytest.raises(RooftopError, match="capacity"):
        Habits(capacity=0.5)


def test_masks_put_tokens_into_slots_by_matmuls() -> None:
    plain, masked = (on_v5p(dict(one_hot=one_hot)) for one_hot in (False, True))
    # [slots, T] x [T, D] of 64 sequences a device, 6 experts a token, in 26 layers, forward.
    flops = 2 * 64 * (6 * 4096) * 4096 * 2048 * 26
    forward = seconds(masked, "layers/moe/dispatch", "forward")
    assert flops / 459e12 < forward < 1.3 * flops / 459e12
    assert seconds(masked, "layers/moe/combine", "backward") == pytest.approx(2 * forward, rel=0.01)
    assert masked.expected_s > plain.expected_s


def test_tiles_are_of_two_kinds_of_matmuls() -> None:
    with pytest.raises(RooftopError, match="group_rows"):
        Habits(group_rows=((512, 512, 512),))
