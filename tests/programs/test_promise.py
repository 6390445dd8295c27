"""The promise test: a step that is said to be executable is built, compiled and run, and equals that of one device.

``python -m tests.support.promise --count N`` runs more, and prints what was refused for which reason.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest

from rooftop.arrays.rules import Rules
from rooftop.capabilities import KERNELS, TRAINING, Choice, TrainingSpec, _runs, attention_kernel, obstacles
from rooftop.core.errors import RooftopError
from rooftop.models import MLA, ModelConfig, MoE, RopeScaling
from rooftop.models.numerics import Numerics
from rooftop.programs.training.program import TrainProgram
from tests.support.curves import mesh_of
from tests.support.examples import examples
from tests.support.promise import DROPPING, outcome, random_spec, refusal_table, refusals, stepped

EVIDENCE = Path(__file__).parents[2] / "docs" / "evidence" / "promise.md"
SLOW = pytest.mark.slow
MODEL = ModelConfig(
    name="tiny", family="llama", layers=1, d_model=16, d_ff=16, heads=4, kv_heads=2, d_head=8, vocab=32,
    max_seq_len=16, layer_windows=(5,), tied_embeddings=True, qkv_bias=True, attention_sinks=True,
)  # fmt: skip
EXPERTS = replace(MODEL, layers=2, layer_windows=(), moe=MoE(experts=4, active=2, d_ff=8))
LATENT = replace(
    MODEL, layers=2, layer_windows=(None, 5), kv_heads=4, qkv_bias=False, attention_sinks=False, attn_softcap=20.0,
    mla=MLA(q_rank=8, kv_rank=8, d_nope=4, d_rope=4, d_v=4),
)  # fmt: skip
#: Steps that are drawn, of which three in four run.
RANDOM_STEPS = 400


def spec_of(axes: dict[str, int], **changes: Any) -> TrainingSpec:
    """A step of the tiny model in float32."""
    fields: dict[str, Any] = {
        "model": MODEL, "axes": axes, "sequences": 8, "seq_len": 16, "kernel": "reference", "attention_block": 8,
        "compute": "f32", "matmul": "f32", "gradients": "f32", "rules": Rules().only(axes),
    } | changes  # fmt: skip
    choice, numerics = (
        kind(**{field.name: fields.pop(field.name) for field in dataclasses.fields(kind) if field.name in fields})
        for kind in (Choice, Numerics)
    )
    return TrainingSpec(choice=choice, numerics=numerics, **fields)


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param(
            spec_of(
                {"expert": 2, "context": 2, "stage": 2}, model=EXPERTS, kernel="chunked", remat="full", microbatches=2
            ),
            marks=pytest.mark.slow,
        ),
        spec_of(
            {"data": 2, "fsdp": 2, "tensor": 2}, remat="minimal", microbatches=2, compute="bf16", matmul="bf16",
            weights="bf16", moments="bf16", gradients="bf16",
        ),
        # The attention of GPUs for latents, softcaps and windows, which cuDNN's has not.
        spec_of(
            {"context": 2, "tensor": 2}, model=LATENT, kernel=attention_kernel("gpu", LATENT), kind="gpu", remat="block"
        ),
    ],
    ids=lambda spec: "-".join(spec.axes),
)  # fmt: skip
def test_executable_steps_equal_one_device(spec: TrainingSpec) -> None:
    assert not list(obstacles(TRAINING, spec))
    assert outcome(spec).failure is None


def test_a_zero_bubble_pipeline_saves_the_keys_that_devices_share() -> None:
    """Computed again for the gradients of inputs alone, JAX 0.10.2 would not choose a device's heads in a stage."""
    model = replace(MODEL, layers=2, layer_windows=(), heads=3, kv_heads=1)
    axes = {"stage": 2, "tensor": 2}
    again, saved = (
        spec_of(axes, model=model, schedule="zero_bubble", microbatches=2, remat=remat)
        for remat in ("block", "matmuls")
    )
    assert [obstacle for obstacle in obstacles(TRAINING, again) if "qkv is to be saved" in str(obstacle)]
    assert not list(obstacles(TRAINING, saved))


def test_latent_attention_without_rotation_is_that_of_angles_of_zero() -> None:
    latent = replace(
        MODEL, layers=2, layer_windows=(), kv_heads=4, qkv_bias=False, attention_sinks=False,
        mla=MLA(q_rank=8, kv_rank=8, d_nope=4, d_rope=4, d_v=8),
    )  # fmt: skip
    losses = []
    for changes in (
        {"rope_layers": (False, False)}, {"rope_scaling": RopeScaling(kind="linear", factor=1e12)}, {},
    ):  # fmt: skip
        spec = spec_of({"tensor": 2}, model=replace(latent, **changes))
        assert outcome(spec).failure is None
        losses.append(stepped(TrainProgram.from_spec(spec, "any"), mesh_of(**spec.axes))[0])
    unrotated, still, rotated = losses
    assert unrotated == pytest.approx(still, rel=1e-6)
    assert unrotated != pytest.approx(rotated, rel=1e-5)


def test_what_is_refused_is_refused_by_name() -> None:
    for number in range(examples(1000, quick=60)):
        spec = random_spec(0, number, KERNELS)
        reasons = list(obstacles(TRAINING, spec))
        if reasons:
            with pytest.raises(RooftopError) as refusal:
                TrainProgram.from_spec(spec, "another plan")
            assert refusal.value.given == reasons[0]
            assert all(reasons)
        else:
            assert TrainProgram.from_spec(spec, "another plan").batch == spec.sequences


def test_every_refusal_of_a_train_step_is_listed() -> None:
    page = EVIDENCE.read_text(encoding="utf-8")
    _, _, rows = page.partition("| property | refusal | steps |")
    listed = re.findall(r"^\| (.+?) \| .+? \| \d+ \|$", rows, re.MULTILINE)
    always_runs = {item.name for item in TRAINING if item.obstacle is _runs}
    assert set(listed) == {item.name for item in TRAINING} - always_runs
    for number in range(examples(4000, quick=300)):
        for name, refusal in refusals(random_spec(2, number, KERNELS)):
            assert f"| {name} | {refusal} |" in page


@SLOW
def test_the_documentation_counts_refusals() -> None:
    drawn = (random_spec(1, number, KERNELS) for number in range(4000))
    assert refusal_table(drawn) in EVIDENCE.read_text(encoding="utf-8")


@SLOW
@pytest.mark.parametrize("start", range(0, RANDOM_STEPS, 10))
def test_random_steps_that_are_executable_equal_one_device(start: int) -> None:
    numbers = range(start, start + 10)
    failures = {number: outcome(random_spec(0, number), drops=number % DROPPING == 0).failure for number in numbers}
    # Compiled programs of thousands of models would fill the memory.
    jax.clear_caches()
    assert not any(failures.values()), failures
