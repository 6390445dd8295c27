"""Plans of fine-tuning: low-rank adapters are trained, and the model's weights are frozen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rooftop import plan_training
from rooftop.core.errors import RooftopError
from rooftop.models import count_params, from_huggingface, load_model
from rooftop.models.adapters import BASE_BYTES, TARGETS, Adapters
from rooftop.plan.pricing import scalar
from rooftop.plan.training.plan import TrainingPlan

#: Sizes of llama2-7b: layers, D, F, vocabulary.
L, D, F, V = 32, 4096, 11008, 32000
SEQ = 2048


def plan(model: str = "llama2-7b", on: str = "h100:8", mesh: str | None = "fsdp=8", **asked: Any) -> TrainingPlan:
    """A plan of eight sequences."""
    request: dict[str, Any] = {"batch_seqs": 8, "seq": SEQ, "remat": "block", "microbatches": 1, "alternatives": 1}
    return plan_training(model, on=on, mesh=mesh, **(request | asked)).plan


def moved(planned: TrainingPlan, kind: str, *phases: str) -> float:
    """Payload bytes of the collectives of a kind over fsdp in the layers."""
    return sum(
        float(row.count * collective.bytes)
        for row in planned.ledger
        for collective in row.collectives
        if collective.kind == kind and row.phase in phases and row.scope.startswith("layers/")
    )


@pytest.mark.parametrize(
    ("model", "targets", "by_hand"),
    [
        # rank x (in + out) of each matrix, as peft counts them.
        ("llama2-7b", ("qkv",), 16 * L * 3 * (D + D)),
        ("llama2-7b", ("attn_out",), 16 * L * (D + D)),
        ("llama2-7b", ("mlp",), 16 * L * 3 * (D + F)),
        ("llama3-8b", TARGETS, 41_943_040),
        ("llama3-70b", TARGETS, 207_093_760),
        # 8 experts of three matrices in each layer; the router has none.
        ("mixtral-8x7b", ("mlp",), 16 * 32 * 8 * 3 * (4096 + 14336)),
        # Latents: queries from D to 1,536 and on to 128 heads of 192, keys and values by 576 and 512 to heads of 256.
        (
            "deepseek-v3",
            ("qkv",),
            16 * 61 * ((7168 + 1536) + (1536 + 128 * 192) + (7168 + 576) + (512 + 128 * 256)),
        ),
    ],
)
def test_parameters_are_rank_times_both_sizes_of_each_matrix(
    model: str, targets: tuple[str, ...], by_hand: int
) -> None:
    assert Adapters(rank=16, targets=targets).count(load_model(model)) == by_hand


@pytest.mark.parametrize("model", ["llama2-7b", "llama3-8b", "gemma2-9b", "mixtral-8x7b", "deepseek-v3"])
def test_one_device_holds_what_is_counted(model: str) -> None:
    adapters = Adapters(rank=16)
    step = plan(model, on="h100:1", mesh="data=1", lora=16).step
    # rooftop stores the first dense layers of DeepSeek-V3 next to those with experts.
    assert sum(scalar(part) for part in step.trained_parameters.values()) == adapters.count(load_model(model))


def test_frozen_matrices_cost_four_flops_a_parameter_and_adapters_six() -> None:
    planned = plan(on="h100:1", mesh="data=1", remat="none", lora=16)
    tokens = 8 * SEQ
    frozen = L * (4 * D * D + 3 * D * F) + D * V
    a = 16 * L * (3 * D + D + 2 * D + F)
    b = Adapters(rank=16).count(load_model("llama2-7b")) - a
    executed = sum(row.count * sum(row.flops.values()) for row in planned.ledger)
    # x A is made again in the backward pass.
    assert executed == pytest.approx(tokens * (4 * frozen + 6 * (a + b) + 2 * a), rel=1e-12)
    attention = 3 * 2 * L * SEQ / 2 * D * 2
    assert planned.flops_per_token == pytest.approx(4 * frozen + 6 * (a + b) + attention, rel=1e-12)


def test_frozen_weights_are_gathered_as_they_are_stored_and_have_no_gradients() -> None:
    matrices = L * (4 * D * D + 3 * D * F)
    count = Adapters(rank=16).count(load_model("llama2-7b"))
    for base, nbytes in BASE_BYTES.items():
        planned = plan(lora=16, base_format=base)
        for phase in ("forward", "recompute"):
            assert moved(planned, "all_gather", phase) == pytest.approx(matrices * nbytes + 2 * count, rel=1e-9)
        assert moved(planned, "reduce_scatter", "backward") == pytest.approx(2 * count, rel=1e-9)
    assert moved(plan(), "reduce_scatter", "backward") == pytest.approx(2 * matrices, rel=1e-9)


def test_only_gradients_of_adapters_are_summed_over_copies() -> None:
    planned = plan(mesh="data=8", lora=16)
    sums = [
        float(row.count * collective.bytes)
        for row in planned.ledger
        for collective in row.collectives
        if row.scope == "gradients"
    ]
    assert sum(sums) == pytest.approx(2 * Adapters(rank=16).count(load_model("llama2-7b")))


def test_tensor_sums_the_gradients_of_what_it_does_not_split() -> None:
    """A of weights whose columns are split, and B of those whose rows are, are whole on each device."""
    planned = plan(mesh="tensor=8", lora=16)
    whole = 16 * L * (3 * D + D + 2 * D + D)
    sums = [
        collective.bytes
        for row in planned.ledger
        for collective in row.collectives
        if row.scope == "gradients" and collective.axes == ("tensor",)
    ]
    assert sums == pytest.approx([2 * whole])
    assert scalar(planned.step.trained_parameters["dense"]) == pytest.approx(
        whole + (Adapters(rank=16).count(load_model("llama2-7b")) - whole) / 8
    )


@pytest.mark.parametrize(
    ("model", "mesh", "on"),
    [
        ("llama2-7b", "fsdp=8", "h100:8"),
        ("llama2-7b", "fsdp=2,tensor=4", "v5e:2x4"),
        ("llama2-7b", "stage=4,tensor=2", "h100:8"),
        ("mixtral-8x7b", "fsdp=2,expert=4", "h100:8"),
        ("deepseek-v3", "expert=8,tensor=2", "h100:8x2"),
    ],
)
def test_memory_rises_with_rank_and_stays_below_that_of_full_training(model: str, mesh: str, on: str) -> None:
    full = plan(model, on=on, mesh=mesh)
    ranks = [plan(model, on=on, mesh=mesh, lora=rank) for rank in (1, 8, 64, 256)]
    nbytes = [planned.memory_bytes for planned in ranks]
    assert nbytes == sorted(nbytes)
    assert len(set(nbytes)) == len(nbytes)
    assert nbytes[-1] < full.memory_bytes
    seconds = [planned.expected_s for planned in ranks]
    assert seconds == sorted(seconds)
    assert seconds[0] < full.expected_s


def test_a_narrower_base_takes_less_memory() -> None:
    nbytes = [plan(lora=16, base_format=base).memory["weights"] for base in ("bf16", "int8", "int4", "nf4")]
    assert nbytes == sorted(nbytes, reverse=True)


def test_state_of_frozen_weights_is_the_weights_alone() -> None:
    planned = plan(on="h100:1", mesh="data=1", lora=16, base_format="int4")
    matrices, tables = L * (4 * D * D + 3 * D * F), 2 * V * D
    count = Adapters(rank=16).count(load_model("llama2-7b"))
    assert count_params(load_model("llama2-7b")).total == matrices + tables + (2 * L + 1) * D
    # Of adapters float32 weights, and their copy in bf16 unless the peak is the loss.
    least = matrices * BASE_BYTES["int4"] + 2 * tables + 4 * count
    assert least <= planned.memory["weights"] <= least + 2 * count
    assert planned.memory["optimizer"] == 8 * count


def test_qlora_of_70b_in_four_bits_is_near_48_gb_on_one_gpu() -> None:
    """Fine-tuning LLaMA-3 70B in 4 bits takes about 48 GB on one GPU, 35 GB of them the weights of its layers."""
    planned = plan("llama3-70b", on="a100:1", mesh="data=1", seq=512, batch_seqs=1, lora=16, base_format="int4")
    assert 43e9 < planned.memory_bytes < 50e9
    layers = scalar(planned.step.frozen_bytes) - 2 * 2 * 128_256 * 8192
    assert layers == pytest.approx(35e9, rel=0.02)


def test_the_plan_says_that_no_program_runs_it() -> None:
    result = plan_training("llama2-7b", on="h100:8", batch_seqs=8, lora=16, base_format="int4")
    document = result.to_json()
    assert document["executable"] is False
    assert "no program of rooftop trains adapters" in str(document["obstacles"])
    assert document["adapters"] == {
        "rank": 16,
        "targets": ["qkv", "attn_out", "mlp"],
        "base": "int4",
        "parameters": Adapters(rank=16).count(load_model("llama2-7b")),
    }
    text = result.document
    assert "LoRA of rank 16 on qkv, attn_out, mlp" in str(text)
    again = TrainingPlan.from_json(document)
    assert again.problem.adapters == Adapters(rank=16, base="int4")
    assert again.expected_s == result.plan.expected_s
    assert result.plan.interval_s is None
    assert "adapters" not in plan_training("llama2-7b", on="h100:8", batch_seqs=8).to_json()


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"lora": 0}, "lora"),
        ({"lora": 5000}, "lora"),
        ({"lora": 16, "lora_targets": "qkv,router"}, "lora-targets"),
        ({"lora": 16, "lora_targets": ""}, "lora-targets"),
        ({"lora": 16, "base_format": "int3"}, "base-format"),
        ({"base_format": "int4"}, "base-format"),
        ({"lora": 16, "optimizer": "muon"}, "optimizer"),
        ({"lora": 16, "framework": "torchtitan"}, "lora"),
        ({"lora": 16, "framework": "all"}, "lora"),
        ({"lora": 16, "chips": 64, "on": "h100"}, "lora"),
    ],
)
def test_what_cannot_be_is_refused_by_its_name(asked: dict[str, Any], field: str) -> None:
    default: dict[str, Any] = {"on": "h100:8", "batch_seqs": 8, **asked}
    with pytest.raises(RooftopError) as refused:
        plan_training("llama2-7b", **default)
    assert refused.value.field == field


def test_recurrent_mixers_have_no_adapters() -> None:
    counts = json.loads((Path(__file__).parents[1] / "oracles" / "type_counts.json").read_text())["models"]
    model = from_huggingface(counts["qwen3_next"]["default"]["config"], "qwen3_next")
    with pytest.raises(RooftopError, match="no recurrent mixers"):
        plan_training(model, on="h100:8", batch_seqs=8, lora=16)
