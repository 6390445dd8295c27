"""Programs of models whose dims the mesh does not divide equal those of one device, and their padding stays zero."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from rooftop.checkpoints.huggingface import load_weights, save_weights
from rooftop.models import MLA, ModelConfig, MoE
from rooftop.programs.parameters import (
    Batch,
    Parameter,
    Transformer,
    abstract,
    describe,
    padding_in_parts,
    padding_last,
)
from rooftop.programs.training.program import TrainProgram
from rooftop.programs.training.step import (
    abstract_batch,
    abstract_state,
    described_state,
    init_state,
    repadded,
    train_step,
    unpadded,
)
from rooftop.runs.checkpoints import Checkpoints
from tests.support.curves import mesh_of, program_of
from tests.support.quickly import QUICKLY

BATCH, SEQ_LEN = 4, 16


def tiny(**changes: Any) -> ModelConfig:
    fields = {
        "name": "tiny", "family": "qwen2", "layers": 2, "d_model": 20, "d_ff": 13, "heads": 6, "kv_heads": 3,
        "d_head": 4, "vocab": 61, "max_seq_len": SEQ_LEN,
    }  # fmt: skip
    return ModelConfig(**(fields | changes))


EXPERTS = MoE(experts=5, active=2, d_ff=7, shared_d_ff=9, dense_layers=1, bias=True, correction_bias=True)
LATENTS = MLA(q_rank=7, kv_rank=9, d_nope=4, d_rope=2, d_v=5)


def program(model: ModelConfig, **changes: Any) -> TrainProgram:
    fields = {"model": model, "batch": BATCH, "seq_len": SEQ_LEN, "compute_dtype": "f32", "gradient_norm": True}
    return program_of(**(fields | changes))


def true(array: Any, parameter: Parameter) -> np.ndarray:
    """The array without padding, all of which must be zero."""
    elements = np.asarray(array)
    unpadded = elements
    for at, dim in enumerate(parameter.padding):
        if dim is not None:
            unpadded = np.take(unpadded, dim.positions, axis=at)
    assert np.count_nonzero(unpadded) == np.count_nonzero(elements)
    return unpadded


def trained(step_of: TrainProgram, mesh: jax.sharding.Mesh) -> tuple[list[float], Transformer[np.ndarray]]:
    """Losses and norms of the gradients of three steps, and the weights after them without padding."""
    described = step_of.described(mesh)
    state, metrics = init_state(step_of, jax.random.key(0), mesh), list[float]()
    ids = np.random.default_rng(0).integers(0, step_of.model.vocab, (BATCH, SEQ_LEN + 1)).astype(np.int32)
    place = abstract_batch(step_of, mesh).tokens.sharding
    batch = Batch(tokens=jax.device_put(ids[:, :-1], place), targets=jax.device_put(ids[:, 1:], place))
    with jax.set_mesh(mesh):
        step = jax.jit(train_step(step_of, step_of.specs(mesh)), donate_argnums=0, compiler_options=QUICKLY)
        for _ in range(3):
            state, of_step = step(state, batch)
            metrics += [float(of_step.loss), float(of_step.gradient_norm)]
    return metrics, jax.tree.map(true, state.weights, described)


@pytest.mark.parametrize(
    ("model", "axes", "how"),
    [
        (tiny(layers=1, qkv_bias=True), {"fsdp": 2, "tensor": 4}, {}),
        *(
            pytest.param(model, axes, how, marks=pytest.mark.slow)
            for model, axes, how in (
                (tiny(attention_sinks=True, tied_embeddings=True, attn_out_bias=True, mlp_bias=True, norm="layer",
                      positions="learned"), {"fsdp": 2, "tensor": 4}, {}),
                (tiny(kv_heads=6), {"fsdp": 2, "tensor": 4}, {}),
                (tiny(heads=5, kv_heads=1), {"data": 2, "tensor": 4}, {}),
                (tiny(qk_norm="head", norm_placement="sandwich"), {"tensor": 8}, {}),
                (tiny(), {"fsdp": 2, "tensor": 4}, {"remat": "none", "microbatches": 2}),
                (tiny(), {"fsdp": 2, "tensor": 2, "stage": 2}, {"microbatches": 2}),
                (tiny(kv_heads=2), {"tensor": 4, "stage": 2}, {"microbatches": 2}),
                (tiny(moe=EXPERTS), {"fsdp": 2, "tensor": 2, "expert": 2}, {}),
                (tiny(moe=EXPERTS), {"expert": 4}, {"expert_matmul": "grouped"}),
                (tiny(mla=LATENTS, heads=5, kv_heads=5, d_head=6), {"fsdp": 2, "tensor": 4}, {}),
            )
        ),
    ],
)  # fmt: skip
def test_training_equals_one_device(model: ModelConfig, axes: dict[str, int], how: dict[str, Any]) -> None:
    expected, weights = trained(program(model, **how), mesh_of())
    mesh = mesh_of(**axes)
    assert any(
        parameter.padding for parameter in jax.tree.leaves(describe(model, program(model).specs(mesh).ways(axes)))
    )
    metrics, padded = trained(program(model, **how), mesh)
    assert metrics == pytest.approx(expected, rel=1e-5)
    for ours, theirs in zip(jax.tree.leaves(padded), jax.tree.leaves(weights), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_a_run_continues_on_another_mesh(tmp_path: Path) -> None:
    asked, checkpoints = program(tiny(layers=1)), Checkpoints(tmp_path)
    meshes = [mesh_of(fsdp=2, tensor=4), mesh_of(fsdp=4, tensor=2), mesh_of()]
    described = [described_state(asked, mesh) for mesh in meshes]
    state = init_state(asked, jax.random.key(1), meshes[0])
    with jax.set_mesh(meshes[0]):
        last = repadded(state, described[0], padding_last)
        checkpoints.save(1, last, {}, unpadded=unpadded(state, described[0]))
    expected = jax.tree.leaves(jax.tree.map(true, state, described[0]))
    for mesh, of_mesh in zip(meshes, described, strict=True):
        shapes = abstract_state(asked, mesh)
        restored = checkpoints.restore(shapes, unpadded=unpadded(shapes, of_mesh)).state
        with jax.set_mesh(mesh):
            restored = repadded(restored, of_mesh, padding_in_parts)
        for ours, theirs in zip(jax.tree.leaves(jax.tree.map(true, restored, of_mesh)), expected, strict=True):
            np.testing.assert_array_equal(ours, theirs)
    checkpoints.close()


@pytest.mark.parametrize(
    "model",
    [
        tiny(layers=1, qkv_bias=True),
        pytest.param(
            tiny(family="deepseek_v3", mla=LATENTS, heads=5, kv_heads=5, d_head=6, rope_interleaved=True,
                 moe=MoE(experts=5, active=2, d_ff=7, shared_d_ff=7, dense_layers=1, scoring="sigmoid",
                         group_score="top2_sum", correction_bias=True)), marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_published_checkpoints_have_no_padding(tmp_path: Path, model: ModelConfig) -> None:
    axes = {"fsdp": 2, "tensor": 2, "expert": 2} if model.moe is not None else {"fsdp": 2, "tensor": 4}
    mesh, one = mesh_of(**axes), mesh_of()
    asked = program(model)
    specs = asked.specs(mesh)
    described = describe(model, specs.ways(mesh.shape))
    weights = init_state(asked, jax.random.key(1), mesh).weights
    save_weights(tmp_path / "out", model, weights, described=described)
    plain = load_weights(tmp_path / "out", model, abstract(describe(model), one, asked.specs(one), np.float32))
    back = load_weights(tmp_path / "out", model, abstract(described, mesh, specs, np.float32), described=described)
    unpadded_weights = jax.tree.map(true, weights, described)
    for ours, theirs in zip(jax.tree.leaves(plain), jax.tree.leaves(unpadded_weights), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    for ours, theirs in zip(jax.tree.leaves(back), jax.tree.leaves(weights), strict=True):
        np.testing.assert_array_equal(ours, theirs)
