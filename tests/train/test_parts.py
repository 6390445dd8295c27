"""The parts of the engine: schedules, small models, plans on other devices, divergence, where a NaN starts."""

from __future__ import annotations

import gc
import json
import math
import signal
import struct
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorboardX.proto.event_pb2 import Event, SessionLog

from rooftop.arrays import AXES, Mesh
from rooftop.capabilities import Choice
from rooftop.compiler.devices import local_devices, mesh_of, topology_mesh
from rooftop.core.errors import RooftopError
from rooftop.explain.compiled.training import request
from rooftop.hardware import Slice, chip_of_kind
from rooftop.models import ModelConfig, count_params, from_huggingface, load_model
from rooftop.models.sizing import SMALL_FAMILIES, small_model
from rooftop.plan.training.plan import TrainingPlan
from rooftop.plan.training.problem import Problem
from rooftop.plan.training.workload import Workload
from rooftop.programs.parameters import Batch, describe
from rooftop.programs.training.program import Optimizer, TrainProgram
from rooftop.programs.training.step import StepMetrics, TrainState, init_state, train_step
from rooftop.runs.folder import RunFolder
from rooftop.runs.records import MetricsFile, TensorBoardEvents, read_records
from rooftop.runs.schedule import DECAYS, Schedule
from rooftop.runs.signals import Signals, Stopped
from rooftop.train.diagnosis import find_origin
from rooftop.train.engine import TrainJob
from rooftop.train.evaluate import Forward
from rooftop.train.metrics import Divergence, StepRecord, TrainRates
from rooftop.train.request import TrainRequest
from rooftop.train.schedule import ScheduledOptimizer
from rooftop.train.start import map_plan, shrink, shrunk_plan
from tests.support.curves import program_of

TINY = {
    "model_type": "llama", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "vocab_size": 32,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 16, "rms_norm_eps": 1e-5,
}  # fmt: skip


# Schedules.


@pytest.mark.parametrize("decay", DECAYS)
def test_a_schedule_rises_then_falls_to_its_end(decay: str) -> None:
    schedule = Schedule(steps=50, warmup=10, decay=decay, final=0.2)
    shares = [float(schedule.share(step)) for step in range(60)]
    assert shares[0] == pytest.approx(0.1)
    assert shares[9] == shares[10] == pytest.approx(1.0)
    assert all(a < b for a, b in pairwise(shares[:10]))
    assert shares[50:] == pytest.approx([1.0 if decay == "constant" else 0.2] * 10)
    assert shares[30] == pytest.approx({"cosine": 0.6, "linear": 0.6, "constant": 1.0}[decay])
    assert [float(schedule.share(jnp.int32(step))) for step in range(0, 60, 7)] == pytest.approx(shares[::7])


def test_a_scheduled_optimizer_is_optax_with_that_schedule() -> None:
    """AdamW with decoupled decay, its learning rate a function of the step."""
    schedule = Schedule(steps=6, warmup=2)
    described = describe(from_huggingface(TINY, "tiny"))
    draw = np.random.default_rng(0)
    weights = jax.tree.map(lambda p: jnp.asarray(draw.normal(size=p.shape), jnp.float32), described)
    decays = jax.tree.map(lambda parameter: parameter.fan_in is not None, described)
    ours = ScheduledOptimizer(learning_rate=0.1, weight_decay=0.3, schedule=schedule).transformation(described)
    theirs = optax.adamw(lambda n: 0.1 * schedule.share(n), 0.9, 0.95, 1e-8, weight_decay=0.3, mask=decays)
    states, at = [ours.init(weights), theirs.init(weights)], [weights, weights]
    for step in range(4):
        gradients = jax.tree.map(lambda w, step=step: jnp.sin(w * (step + 1)), weights)
        for which, transformation in enumerate((ours, theirs)):
            changes, states[which] = transformation.update(gradients, states[which], at[which])
            at[which] = optax.apply_updates(at[which], changes)
    for mine, other in zip(jax.tree.leaves(at[0]), jax.tree.leaves(at[1]), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-7)


# Small models.


@pytest.mark.parametrize("parameters", [500_000, 2_000_000, 4_000_000, 30_000_000, 500_000_000])
def test_a_small_llama_has_about_that_many_parameters(parameters: int) -> None:
    model = small_model(f"llama:{parameters}", vocab=1024, max_seq_len=512)
    assert count_params(model).total == pytest.approx(parameters, rel=0.3)
    assert model.kv_heads % 2 == 0


def test_a_small_mixtral_has_eight_experts_and_about_that_many_parameters() -> None:
    model = small_model("mixtral:5M")
    assert model.moe is not None and (model.moe.experts, model.moe.active) == (8, 2)
    assert count_params(model).total == pytest.approx(5e6, rel=0.3)


@pytest.mark.parametrize("family", SMALL_FAMILIES)
def test_a_small_model_has_a_smallest_and_a_largest_size(family: str) -> None:
    for size in ("1000", "10G"):
        with pytest.raises(RooftopError, match=f"{family}:N with N from"):
            small_model(f"{family}:{size}", vocab=1024, max_seq_len=512)


# Plans on other devices.


@given(st.lists(st.integers(1, 64), min_size=6, max_size=6), st.integers(1, 64))
def test_shrunk_axes_fit_and_divide(sizes: list[int], devices: int) -> None:
    axes = dict(zip(AXES, sizes, strict=True))
    shrunk = shrink(axes, devices)
    assert math.prod(shrunk.values()) <= devices
    assert all(axes[axis] % shrunk[axis] == 0 for axis in AXES)
    if math.prod(sizes) <= devices:
        assert shrunk == axes


def test_the_largest_axis_shrinks_first() -> None:
    assert shrink({"fsdp": 1024, "tensor": 4}, 8) == dict.fromkeys(AXES, 1) | {"fsdp": 2, "tensor": 4}
    assert shrink({"data": 3, "fsdp": 2}, 4) == dict.fromkeys(AXES, 1) | {"fsdp": 2}


def planned(on: str = "v5e:4x4", **axes: int) -> TrainingPlan:
    """A plan of 64 sequences of 128 tokens, in two microbatches."""
    slice_ = Slice.parse(on)
    problem = Problem(
        model=load_model("llama3-8b"), slice=slice_, workload=Workload(batch_tokens=64 * 128, seq_len=128)
    )
    choice = Choice(remat="block", microbatches=2)
    return TrainingPlan(problem=problem, mesh=Mesh.lay(slice_, dict.fromkeys(AXES, 1) | axes), choice=choice)


def test_a_shrunk_step_keeps_the_sequences_of_a_device() -> None:
    small = shrunk_plan(planned(fsdp=8, tensor=2).spec, 4)
    assert small.axes == dict.fromkeys(AXES, 1) | {"fsdp": 2, "tensor": 2}
    # 64 sequences over 8: 8 on a device, 4 in each of two microbatches.
    assert (small.sequences, small.seq_len, small.choice.microbatches) == (16, 128, 2)


def test_a_plan_is_only_run_elsewhere_when_that_is_asked_for() -> None:
    here = replace(local_devices(), devices=tuple(jax.devices()[:8]))
    large = planned(fsdp=8, tensor=2)
    with pytest.raises(RooftopError, match="--shrink to run it with mesh fsdp=4,tensor=2, 32 sequences of 128"):
        map_plan(large, here, as_is=False, shrink=False)
    with pytest.raises(RooftopError, match="--devices 16"):
        map_plan(large, here, as_is=True, shrink=False)
    small = planned("v5e:2x4", fsdp=4, tensor=2)
    assert map_plan(small, here, as_is=True, shrink=False)[0] == small.spec
    with pytest.raises(RooftopError, match="one of the two"):
        TrainRequest(run="run", data="corpus", steps=1, as_is=True, shrink=True)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("TPU v5 lite", "v5e"), ("TPU v5", "v5p"), ("TPU v6 lite", "v6e"), ("TPU7x", "tpu7x"), ("TPU v4", "v4"),
        ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H200", "h200"), ("cpu", None), ("TPU v99", None),
    ],
)  # fmt: skip
def test_devices_are_chips_of_the_catalogue(kind: str, name: str | None) -> None:
    spec = chip_of_kind(kind)
    assert (None if spec is None else spec.name) == name


# Metrics.


def test_a_loss_that_rises_is_told_from_one_that_shakes() -> None:
    shaking, rising = Divergence(1.0, window=10), Divergence(1.0, window=10)
    draw = np.random.default_rng(0)
    assert all(shaking.rise(5 - step / 100 + float(draw.normal()) / 3) is None for step in range(300))
    rises = [rising.rise(5 - step / 100 if step < 100 else 4 + (step - 100) / 5) for step in range(120)]
    first = next(step for step, rise in enumerate(rises) if rise is not None)
    assert 104 <= first <= 112
    assert rises[first] == pytest.approx(1.0, abs=0.3)


def test_the_slowest_process_is_named() -> None:
    metrics = StepMetrics(loss=jnp.float32(1), gradient_norm=jnp.float32(1), tokens=jnp.int32(8))
    how = {"learning_rate": 0.1, "seconds": 1.0, "waited_s": 0.0, "unix_s": 0.0}
    rates = TrainRates(flops_per_token=1.0, convention="", peak_flops_per_s=None)
    record = StepRecord.of(1, metrics, **how, rates=rates, host_s=(0.1, 0.2, 2.5, 0.3)).to_json()
    assert [record[name] for name in ("slowest_process", "slowest_host_s", "median_host_s")] == [2, 2.5, 0.25]
    assert "slowest_process" not in StepRecord.of(1, metrics, **how, rates=rates, host_s=(0.1,)).to_json()


def test_mfu_is_model_flops_over_peak() -> None:
    model = from_huggingface(TINY, "tiny")
    rates = TrainRates.of(model, 16, 1e9)
    assert rates.mfu(100.0) == pytest.approx(100 * rates.flops_per_token / 1e9)
    assert TrainRates.of(model, 16, None).mfu(100.0) is None


def test_metrics_go_on_behind_a_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 2, "eval_loss": 1}\n{"step": 3}\n{"step": 4, "lo')
    file = MetricsFile(path, step=2)
    file.append({"step": 3, "loss": 2.0})
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines == [{"step": 1}, {"step": 2}, {"step": 2, "eval_loss": 1}, {"step": 3, "loss": 2.0}]


def test_metrics_without_room_go_to_a_second_file_and_come_back(tmp_path: Path) -> None:
    path, also = tmp_path / "run" / "metrics.jsonl", tmp_path / "also" / "metrics.jsonl"
    path.parent.mkdir()
    file = MetricsFile(path, step=0, also=also)
    file.append({"step": 1, "loss": 1.0})
    assert file.sync() is None and not also.exists()
    path.rename(tmp_path / "kept")
    path.mkdir()
    file.append({"step": 2, "loss": 2.0})
    file.append({"step": 2, "eval_loss": 2.5})
    assert file.sync() is None and len(also.read_text().splitlines()) == 2
    path.rmdir()
    (tmp_path / "kept").rename(path)
    file.append({"step": 3, "loss": 3.0})
    MetricsFile(path, step=3, also=also)
    records = [
        {"step": 1, "loss": 1.0},
        {"step": 2, "loss": 2.0},
        {"step": 2, "eval_loss": 2.5},
        {"step": 3, "loss": 3.0},
    ]
    assert list(read_records(path)) == records and not also.exists()
    path.write_text("[" * 100_000)
    with pytest.raises(RooftopError, match=f"metrics: got '{path}:1'"):
        read_records(path)


def points(folder: Path) -> tuple[dict[tuple[str, int], float], list[int]]:
    """(tag, step) -> value of all event files, and the steps from which on they void what was there."""
    values, voided = {}, []
    for file in sorted(folder.iterdir()):
        data = file.read_bytes()
        while data:
            # A record: its length in 8 bytes, 4 of checksum, itself, 4 of checksum.
            (length,) = struct.unpack("<Q", data[:8])
            event = Event.FromString(data[12 : 12 + length])
            data = data[16 + length :]
            values |= {(value.tag, event.step): value.simple_value for value in event.summary.value}
            voided += [event.step] if event.session_log.status == SessionLog.START else []
    return values, voided


def test_metrics_come_as_tensorboard_events(tmp_path: Path) -> None:
    events = TensorBoardEvents(tmp_path, step=0)
    for step in (1, 2, 3):
        events.append({"step": step, "unix_s": 1e9 + step, "loss": 4.0 / step, "mfu": None, "tokens": 8})
    events.append({"step": 3, "eval_loss": 1.5})
    events.close()
    again = TensorBoardEvents(tmp_path, step=2)
    again.append({"step": 3, "loss": 0.5})
    again.close()
    values, voided = points(tmp_path)
    losses = {("train/loss", 1): 4.0, ("train/loss", 2): 2.0, ("train/loss", 3): 0.5}
    assert values == losses | {("train/tokens", step): 8.0 for step in (1, 2, 3)} | {("eval/loss", 3): 1.5}
    assert voided == [3]


# Where a NaN starts.


@cache
def tiny_program(**changes: Any) -> TrainProgram:
    fields = {"batch": 4, "seq_len": 16, "packed": True, "compute_dtype": "f32", "attention": "chunked"}
    return program_of(**{"model": from_huggingface(TINY, "tiny"), "gradient_norm": True} | fields | changes)


def poisoned(state: TrainState[jax.Array], *names: str, layer: int) -> TrainState[jax.Array]:
    """The state with some weights of one layer far too large."""

    def large(path: tuple[Any, ...], weight: jax.Array) -> jax.Array:
        name = jax.tree_util.keystr(path)
        return weight.at[layer].mul(1e30) if name.endswith(names) else weight

    return replace(state, weights=jax.tree_util.tree_map_with_path(large, state.weights))


@pytest.mark.parametrize(
    ("names", "layer", "scope"),
    [
        ((".attn.q", ".attn.k"), 1, "layers/attn/core"),
        ((".mlp.up", ".mlp.gate"), 2, "layers/mlp/down"),
        ((".mlp.norm.scale",), 0, None),
    ],
    ids=["scores", "products", "nothing"],
)
@pytest.mark.slow
@pytest.mark.parametrize("microbatches", [1, 2])
def test_the_scope_of_the_first_nan_is_found(
    names: tuple[str, ...], layer: int, scope: str | None, microbatches: int
) -> None:
    """Infinite scores make a NaN in their softmax; infinite products of both signs where they are summed."""
    program = tiny_program(microbatches=microbatches)
    mesh = mesh_of({}, local_devices())
    ids = np.random.default_rng(0).integers(0, 32, (4, 16)).astype(np.int32)
    places = np.tile(np.arange(16, dtype=np.int32), (4, 1))
    batch = Batch(tokens=ids, targets=ids, segments=np.ones_like(ids), positions=places)
    with jax.set_mesh(mesh):
        state = init_state(program, jax.random.key(0), mesh)
        if scope is not None:
            state = poisoned(state, *names, layer=layer)
        origin = find_origin(train_step(program, program.specs(mesh)), state, jax.tree.map(jnp.asarray, batch))
    if scope is None:
        assert origin is None
        return
    assert origin is not None
    assert (origin.what, origin.scope, origin.phase) == ("NaN", scope, "forward")
    assert origin.turns == ((0,) if microbatches > 1 else ()) + (layer,)
    assert f"in turn {'.'.join(map(str, origin.turns))} of the loop around it" in str(origin)


def test_a_state_that_is_not_finite_is_named() -> None:
    origin = find_origin(lambda state: state, {"a": jnp.ones(3), "b": jnp.array([1.0, jnp.nan])})
    assert origin is not None
    assert "'b'" in origin.scope and origin.phase == "before the step"


# The forward pass on another mesh.


def test_samples_see_the_same_logits_on_any_mesh() -> None:
    model: ModelConfig = replace(from_huggingface(TINY, "tiny"), kv_heads=2)
    ids = np.random.default_rng(0).integers(0, 32, (8, 16)).astype(np.int32)
    samples = []
    for axes in ({}, {"fsdp": 2, "tensor": 2, "context": 2}):
        program = tiny_program(model=model, optimizer=Optimizer())
        mesh = mesh_of(axes, local_devices())
        forward = Forward(program, mesh, ("stage", "context"))
        weights = init_state(program, jax.random.key(0), mesh).weights
        assert forward.own_mesh.shape["context"] == 1
        samples.append(forward.next_logits(forward.weights(weights), ids, 9))
    np.testing.assert_allclose(samples[0], samples[1], atol=1e-5)


def test_weights_in_another_dtype_are_converted_on_the_mesh_of_training() -> None:
    program = tiny_program(optimizer=Optimizer(), compute_dtype="bf16")
    mesh = mesh_of({"data": 2, "fsdp": 4}, local_devices())
    forward = Forward(program, mesh, ("stage", "context"))
    weights = init_state(program, jax.random.key(0), mesh).weights
    assert np.isfinite(forward.next_logits(forward.weights(weights), np.zeros((8, 16), np.int32), 9)).all()


def test_a_folder_in_which_nothing_began_goes_again(tmp_path: Path) -> None:
    new, there = RunFolder(path=tmp_path / "new"), RunFolder(path=tmp_path / "there")
    there.path.mkdir()
    for folder in (new, there):
        with pytest.raises(RooftopError), folder.claimed():
            raise RooftopError("steps", "ten", "a number")
    assert not new.path.exists() and there.path.exists()
    with new.claimed():
        new.write({})
    assert new.read() is not None


# ---------------------------------------------------------------- signals


def test_a_signal_before_the_first_step_is_raised() -> None:
    with pytest.raises(Stopped, match="stopped by SIGINT before the first step"), Signals():
        signal.raise_signal(signal.SIGINT)


def test_a_signal_in_a_callback_of_the_garbage_collector_is_not_lost() -> None:
    """Raised there it would be printed and forgotten, which fails as a warning that nobody can catch."""

    def on_collection(phase: str, info: dict[str, int]) -> None:
        if info["generation"] == 2 and phase == "start":
            signal.raise_signal(signal.SIGINT)

    gc.disable()
    gc.callbacks.append(on_collection)
    try:
        with Signals() as signals:
            gc.collect()
    finally:
        gc.callbacks.remove(on_collection)
        gc.enable()
    assert signals.caught is signal.SIGINT


# The compiler's options.


@pytest.mark.parametrize(
    ("name", "axes", "options"),
    [
        ("v5p:2x2x2", {"fsdp": 8}, 3),  # Gathers over a whole slice stay gathers.
        ("v5p:2x2x1@2", {"data": 2, "fsdp": 4}, 3),
        ("v5p:2x2x2", {"fsdp": 4, "tensor": 2}, 0),
        ("tpu7x:2x2x1", {"fsdp": 8}, 1),  # Gathers of weights are no rings of pieces.
        ("tpu7x:2x2x1", {"tensor": 8}, 0),
        ("v5e:2x4", {"fsdp": 8}, 0),
    ],
)
def test_a_run_is_compiled_with_the_options_of_its_plan(name: str, axes: dict[str, int], options: int) -> None:
    slice_ = Slice.parse(name)
    workload = Workload(batch_tokens=8 * 512, seq_len=512)
    problem = Problem(model=small_model("llama:10M", vocab=512, max_seq_len=512), slice=slice_, workload=workload)
    plan = TrainingPlan(problem=problem, mesh=Mesh.lay(slice_, axes), choice=Choice(remat="block"))
    planned = request(plan)
    job = TrainJob(program=TrainProgram.from_plan(plan), mesh=topology_mesh(plan.mesh), seed=0)
    assert job.compiler_options == planned.defaults
    assert len(planned.defaults) == options
