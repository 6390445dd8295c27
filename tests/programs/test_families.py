"""Every family that models/ reads, against transformers: logits, loss and gradients of tiny models in float32."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rooftop.arrays.rules import Rules
from rooftop.capabilities import model_obstacle
from rooftop.checkpoints.names import entries
from rooftop.core.errors import RooftopError
from rooftop.models import count_params, from_huggingface, load_model, presets
from rooftop.models.segments import segments
from rooftop.programs.attention.context import sequence_order
from rooftop.programs.model.layer import Computation
from rooftop.programs.model.transformer import logits, loss
from rooftop.programs.parameters import Batch, Transformer, describe
from rooftop.programs.training.program import TrainProgram
from rooftop.programs.training.step import abstract_batch, train_step
from tests.support.checkpoint_tensors import from_checkpoint, to_checkpoint
from tests.support.curves import initial_state, mesh_of, program_of
from tests.support.quickly import QUICKLY
from tests.support.tiny_models import NAMES, TINY, case


@pytest.mark.parametrize("name", NAMES)
def test_checkpoint_names_there_and_back(name: str) -> None:
    """Each published tensor has one place, every element of our weights is filled, and nothing changes on the way."""
    model, facts, weights, _ = case(name)
    assert {entry.name for entry in entries(model)} == set(facts["weights"])
    back = to_checkpoint(model, from_checkpoint(model, weights))
    assert all((back[tensor] == array).all() and back[tensor].shape == array.shape for tensor, array in weights.items())


#: Every kind of layer: scaled rotations, windows, soft caps, biases, norms of heads, sinks, latents, kinds of routers,
#: learned positions; layers without rotation beside an MLP in parallel; experts in every second layer. The other models
#: combine these.
QUICK = {
    "llama",
    "gemma3",
    "gpt_oss",
    "deepseek_v3",
    "gpt2",
    "cohere2",
}


@pytest.mark.oracle
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in NAMES]
)
def test_logits_and_gradients_equal_those_of_transformers(name: str) -> None:
    model, facts, tensors, golden = case(name)
    weights = jax.tree.map(jnp.asarray, from_checkpoint(model, tensors))
    mesh = mesh_of()
    how = Computation(model=model, rules=Rules().only({}), remat="none")
    batch = Batch(tokens=jnp.asarray(golden["tokens"]), targets=jnp.asarray(golden["targets"]))

    def step(weights: Transformer[jax.Array]) -> Any:
        return logits(weights, batch.tokens, how), jax.value_and_grad(loss)(weights, batch, how, chunks=1)

    with jax.set_mesh(mesh):
        actual, (value, gradients) = jax.jit(step, compiler_options=QUICKLY)(weights)
    assert np.abs(np.asarray(actual) - golden["logits"]).max() < 1e-4
    assert float(value) == pytest.approx(float(golden["loss"]), abs=1e-5)
    grads = to_checkpoint(model, jax.tree.map(np.asarray, gradients))
    summary = np.stack([TINY.summarise(tensor, grads[tensor]) for tensor in facts["weights"]])
    largest = np.abs(golden["gradients"]).max(axis=1, keepdims=True)
    # Without rotation a bias of keys adds the same to all scores of a query: its gradient is rounding, there and here.
    rounding = largest < facts["gradients_noise"]
    assert (np.abs(summary) < 10 * facts["gradients_noise"])[rounding[:, 0]].all()
    worst = np.abs(summary - golden["gradients"]) / np.maximum(largest, 1e-6)
    assert np.where(rounding, 0.0, worst).max() < 1e-4


#: The tiny models that a sharded step is tried on, the sequence length (a multiple of 8), and meshes of 8 devices.
SHARDED = {
    "gemma2": [{"data": 2, "fsdp": 2, "tensor": 2}, {"context": 2, "fsdp": 2, "tensor": 2}],
    "deepseek_v3": [{"expert": 2, "fsdp": 2, "tensor": 2}, {"data": 2, "fsdp": 2, "tensor": 2}],
    "deepseek_v2_lite": [{"context": 2, "fsdp": 2, "tensor": 2}],
    "gpt_oss": [{"expert": 2, "fsdp": 2, "tensor": 2}],
    "gpt2": [{"data": 2, "fsdp": 2, "tensor": 2}, {"context": 2, "fsdp": 2, "tensor": 2}],
    "qwen3_moe": [{"data": 2, "expert": 2, "tensor": 2}],
    "llama": [{"data": 2, "fsdp": 2, "tensor": 2}],
    "olmo2": [{"data": 2, "fsdp": 2, "tensor": 2}, {"context": 2, "fsdp": 2, "tensor": 2}],
    "cohere2": [{"context": 2, "fsdp": 2, "tensor": 2}],
    "qwen2_moe": [{"expert": 2, "fsdp": 2, "tensor": 2}],
    "opt": [{"data": 2, "fsdp": 2, "tensor": 2}],
}
MESHES = [(name, sizes) for name, meshes in SHARDED.items() for sizes in meshes]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "sizes"), MESHES)
def test_sharded_step_equals_the_one_device_step(name: str, sizes: dict[str, int]) -> None:
    """Loss and gradients of the train step, microbatches and chunks included, on eight devices as on one.

    The quick tests have LLaMA and DeepSeek-V2-Lite in test_packed_training.py.
    """
    model = case(name)[0]
    program = program_of(
        model=model, batch=8, seq_len=16, microbatches=2, loss_chunks=2, attention="chunked", compute_dtype="f32"
    )
    one_loss, one = train(program, mesh_of())
    loss, gradients = train(program, mesh_of(**sizes))
    assert loss == pytest.approx(one_loss, abs=2e-6)
    # Relative to the model's largest: the bias of keys has no gradient but rounding.
    largest = max(np.abs(gradient).max() for gradient in jax.tree.leaves(one))
    worst = jax.tree.map(lambda a, b: np.abs(a - b).max() / max(np.abs(b).max(), 1e-3 * largest), gradients, one)
    assert max(jax.tree.leaves(worst)) < 1e-4


def train(program: TrainProgram, mesh: jax.sharding.Mesh) -> tuple[float, Transformer[np.ndarray]]:
    """Loss and gradients (from Adam's first moment) of one step."""
    state = initial_state(program, mesh)
    place = abstract_batch(program, mesh).tokens
    order = sequence_order(program.seq_len, mesh.shape["context"], program.computation.context_order)
    text = np.random.default_rng(0).integers(0, program.model.vocab, (program.batch, program.seq_len + 1), np.int32)
    tokens, targets = (jax.device_put(ids[:, order], place.sharding) for ids in (text[:, :-1], text[:, 1:]))
    with jax.set_mesh(mesh):
        step = jax.jit(train_step(program, program.specs(mesh)), compiler_options=QUICKLY)
        state, metrics = step(state, Batch(tokens=tokens, targets=targets))
    return float(metrics.loss), jax.tree.map(np.asarray, optax.tree_utils.tree_get(state.optimizer, "mu"))


def test_a_family_without_names_is_refused_by_name() -> None:
    keys = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96}
    model = from_huggingface({"model_type": "falcon", **keys}, "falcon")
    with pytest.raises(RooftopError, match="model family: got 'falcon'"):
        entries(model)


def test_layers_become_few_scans() -> None:
    """The period that repeats most; what is left over follows."""
    periods = {
        "llama3-8b": [(32, (None,))],
        "gemma2-9b": [(21, (4096, None))],
        "gemma3-27b": [(10, (1024,) * 5 + (None,)), (2, (1024,))],
        "deepseek-v3": [(3, (None,)), (58, (None,))],
    }
    for name, shape in periods.items():
        parts = segments(load_model(name))
        assert [(part.repeats, tuple(kind.window for kind in part.kinds)) for part in parts] == shape
        assert [kind.moe for part in parts for kind in part.kinds] == (
            [False, True] if name == "deepseek-v3" else [False] * sum(len(part.kinds) for part in parts)
        )
    assert segments(load_model("gemma3-27b"))[0].layer(5, 9) == 59


@pytest.mark.parametrize("name", [name for name in presets() if model_obstacle(load_model(name)) is None])
def test_described_weights_are_those_that_are_counted(name: str) -> None:
    model = load_model(name)
    described = sum(math.prod(parameter.shape) for parameter in jax.tree.leaves(describe(model)))
    assert described == count_params(model).total
