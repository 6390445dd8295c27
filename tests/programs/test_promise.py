"""The promise test: a step that is said to be executable is built, compiled and run, and equals that of one device.

``python -m tests.support.promise --count N`` runs more, and prints what was refused for which reason.
"""

from __future__ import annotations

from typing import Any

import jax
import pytest
from hypothesis import HealthCheck, given, settings

from rooftop.arrays.rules import Rules
from rooftop.capabilities import TRAINING, TrainingSpec, obstacles
from rooftop.core.errors import RooftopError
from rooftop.models import ModelConfig
from rooftop.programs.training.program import TrainProgram
from tests.support.examples import examples
from tests.support.promise import outcome, specs

SLOW = pytest.mark.slow
MODEL = ModelConfig(
    name="tiny", family="llama", layers=2, d_model=16, d_ff=16, heads=4, kv_heads=2, d_head=8, vocab=32,
    max_seq_len=16, layer_windows=(5, None), tied_embeddings=True, qkv_bias=True, attention_sinks=True,
)  # fmt: skip
#: Steps that draws may run.
RANDOM_STEPS = 2000


def spec_of(axes: dict[str, int], **changes: Any) -> TrainingSpec:
    """A step of the tiny model in float32."""
    fields: dict[str, Any] = {
        "model": MODEL, "axes": axes, "sequences": 8, "seq_len": 16, "kernel": "reference", "attention_block": 8,
        "compute": "f32", "matmul": "f32", "gradients": "f32", "rules": Rules().only(axes),
    }  # fmt: skip
    return TrainingSpec(**(fields | changes))


@pytest.mark.parametrize(
    "spec",
    [
        spec_of({"data": 2, "fsdp": 2, "tensor": 2}, remat="minimal", microbatches=2),
        spec_of({"context": 2, "fsdp": 2}, kernel="chunked", remat="full"),
        spec_of({"fsdp": 2, "tensor": 2}, compute="bf16", matmul="bf16", weights="bf16", moments="bf16"),
    ],
    ids=lambda spec: "-".join(spec.axes),
)
def test_executable_steps_equal_one_device(spec: TrainingSpec) -> None:
    assert not list(obstacles(TRAINING, spec))
    assert outcome(spec).failure is None


@settings(max_examples=examples(1000, quick=200), deadline=None, suppress_health_check=list(HealthCheck))
@given(specs())
def test_what_is_refused_is_refused_by_name(spec: TrainingSpec) -> None:
    reasons = list(obstacles(TRAINING, spec))
    if reasons:
        with pytest.raises(RooftopError) as refusal:
            TrainProgram.from_spec(spec, "another plan")
        assert refusal.value.given == reasons[0]
        assert all(reasons)
    else:
        assert TrainProgram.from_spec(spec, "another plan").batch == spec.sequences


@SLOW
@settings(max_examples=RANDOM_STEPS, deadline=None, suppress_health_check=list(HealthCheck), report_multiple_bugs=False)
@given(specs())
def test_random_steps_that_are_executable_equal_one_device(spec: TrainingSpec) -> None:
    failure = outcome(spec).failure
    # Compiled programs of thousands of models would fill the memory.
    jax.clear_caches()
    assert failure is None, failure
