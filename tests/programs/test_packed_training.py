"""Packed batches, z-loss, load balancing and a step's metrics: on eight emulated devices as on one, and as defined."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rooftop.arrays.rules import Rules
from rooftop.core.errors import RooftopError
from rooftop.models import ModelConfig, from_huggingface
from rooftop.programs.attention.context import sequence_order
from rooftop.programs.model.layer import Computation
from rooftop.programs.model.moe.route import balance, load
from rooftop.programs.model.positions import within_segments
from rooftop.programs.model.transformer import logits, objective
from rooftop.programs.parameters import Batch, Transformer, describe, initialise
from rooftop.programs.training.program import Optimizer, TrainProgram
from rooftop.programs.training.step import StepMetrics, abstract_batch, init_state, lower, train_step
from tests.support.curves import initial_state, mesh_of, program_of
from tests.support.quickly import QUICKLY

ORACLES = Path(__file__).parents[1] / "oracles" / "logits"
SLOW = pytest.mark.slow
#: Lengths of the documents in each of eight sequences of 16; what is left is padding.
LENGTHS = ((9, 7), (4, 3, 9), (16,), (3, 4, 3), (7,), (3, 3, 3, 7), (9, 4), (4, 4, 4, 4))
SEQ_LEN = 16


@cache
def model_of(name: str) -> ModelConfig:
    return from_huggingface(json.loads((ORACLES / f"{name}.json").read_text())["config"], name)


def documents(vocab: int) -> list[list[np.ndarray]]:
    random = np.random.default_rng(0)
    return [[random.integers(0, vocab, length).astype(np.int32) for length in lengths] for lengths in LENGTHS]


def packed(vocab: int) -> Batch[np.ndarray]:
    """The documents, one after another in their sequences; the last token of each predicts nothing."""
    tokens, targets, segments, positions = np.zeros((4, len(LENGTHS), SEQ_LEN), np.int32)
    targets -= 1
    for row, texts in enumerate(documents(vocab)):
        start = 0
        for segment, text in enumerate(texts, 1):
            here = slice(start, start + len(text))
            tokens[row, here], segments[row, here], positions[row, here] = text, segment, np.arange(len(text))
            targets[row, start : here.stop - 1] = text[1:]
            start = here.stop
        positions[row, start:] = np.arange(SEQ_LEN - start)
    return Batch(tokens=tokens, targets=targets, segments=segments, positions=positions)


def program(model: ModelConfig, **changes: Any) -> TrainProgram:
    fields = {"batch": 8, "seq_len": SEQ_LEN, "packed": True, "attention": "chunked", "compute_dtype": "f32"}
    return program_of(**({"model": model, "gradient_norm": True, "z_loss": 1e-2} | fields | changes))


def step(
    trained: TrainProgram, mesh: jax.sharding.Mesh, batch: Batch[np.ndarray]
) -> tuple[dict[str, float], Transformer[np.ndarray]]:
    """The metrics that there are, and gradients (from Adam's first moment) of one step."""
    state = initial_state(trained, mesh)
    place = abstract_batch(trained, mesh).tokens.sharding
    order = sequence_order(SEQ_LEN, mesh.shape["context"], trained.computation.context_order)
    placed = jax.tree.map(lambda ids: jax.device_put(ids[:, order], place), batch)
    with jax.set_mesh(mesh):
        state, metrics = traced(trained, mesh)(state, placed)
    values = {name: float(value) for name, value in vars(metrics).items() if value is not None}
    moments = optax.tree_utils.tree_get(state.optimizer, "mu")
    return values, jax.tree.map(lambda m: np.asarray(m) / (1 - trained.optimizer.b1), moments)


_TRACED = dict[tuple[str, jax.sharding.Mesh], Any]()


def traced(trained: TrainProgram, mesh: jax.sharding.Mesh) -> Any:
    """The step of a program on a mesh, traced once for batches of one kind."""
    key = json.dumps(trained.to_json(), sort_keys=True), mesh
    if key not in _TRACED:
        _TRACED[key] = jax.jit(train_step(trained, trained.specs(mesh)), compiler_options=QUICKLY)
    return _TRACED[key]


def assert_close(actual: Transformer[np.ndarray], expected: Transformer[np.ndarray], tolerance: float = 1e-5) -> None:
    """Every gradient, relative to its largest element or a hundredth of the model's largest."""
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(expected))
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected), strict=True):
        scale = max(np.abs(b).max(), 1e-2 * largest)
        assert np.abs(a - b).max() / scale < tolerance, jax.tree_util.keystr(path)


@pytest.mark.parametrize(
    "name",
    ["llama", *(pytest.param(name, marks=SLOW) for name in ("gpt2", "gemma2", "deepseek_v2_lite", "gpt_oss"))],
)
def test_a_packed_batch_is_its_documents(name: str) -> None:
    """Loss and gradients are those of the documents, one in a sequence. Rotary and learned positions."""
    model = model_of(name)
    how = Computation(model=model, rules=Rules().only({}), attention="chunked", z_loss=1e-2)
    mesh = mesh_of()
    weights = initialise(describe(model), jax.random.key(0), mesh, how.specs, jnp.float32)

    @partial(jax.jit, compiler_options=QUICKLY)
    def step(weights: Transformer[jax.Array], batch: Batch[jax.Array]) -> Any:
        return jax.value_and_grad(lambda weights: objective(weights, batch, how, chunks=1), has_aux=True)(weights)

    texts = [text for row in documents(model.vocab) for text in row]
    tokens, targets, segments = np.zeros((3, len(texts), SEQ_LEN), np.int32)
    targets -= 1
    for row, text in enumerate(texts):
        tokens[row, : len(text)], targets[row, : len(text) - 1], segments[row, : len(text)] = text, text[1:], 1
    with jax.set_mesh(mesh):
        (whole, whole_terms), whole_gradients = step(weights, replace(packed(model.vocab), positions=None))
        (alone, terms), gradients = step(weights, Batch(tokens=tokens, targets=targets, segments=segments))
    assert (targets >= 0).sum() == (packed(model.vocab).targets >= 0).sum()
    assert float(whole) == pytest.approx(float(alone), rel=1e-5)
    assert float(whole_terms["z_loss"]) == pytest.approx(float(terms["z_loss"]), rel=1e-5)
    assert_close(jax.tree.map(np.asarray, whole_gradients), jax.tree.map(np.asarray, gradients))


SHARDED = [
    ("llama", {"data": 2, "fsdp": 2, "tensor": 2}, {"microbatches": 2, "loss_chunks": 2}),
    *(
        pytest.param(name, sizes, changes, marks=SLOW)
        for name, sizes, changes in (
            (
                "deepseek_v2_lite",
                {"context": 2, "expert": 2, "tensor": 2},
                {"balance_loss": 0.1, "expert_matmul": "grouped"},
            ),
            ("llama", {"context": 2, "fsdp": 2, "tensor": 2}, {"context_attention": "all_gather"}),
            ("llama", {"context": 4, "fsdp": 2}, {"loss_chunks": 2}),
            ("gemma2", {"context": 2, "fsdp": 2, "tensor": 2}, {"microbatches": 2}),  # windows
            ("gemma2", {"context": 4, "fsdp": 2}, {"context_attention": "all_gather", "remat": "none"}),
            ("llama", {"context": 4, "tensor": 2}, {"context_order": "contiguous", "microbatches": 2}),
            ("llama", {"fsdp": 8}, {"attention": "reference", "remat": "minimal"}),
            ("gpt2", {"context": 2, "fsdp": 2, "tensor": 2}, {}),  # learned positions
            ("gpt_oss", {"expert": 2, "context": 2, "tensor": 2}, {"balance_loss": 0.1}),  # sinks
            ("deepseek_v3", {"expert": 4, "tensor": 2}, {"balance_loss": 0.1}),
            ("qwen3_moe", {"data": 2, "expert": 2, "fsdp": 2}, {"balance_loss": 0.1, "expert_matmul": "grouped"}),
        )
    ),
]


@pytest.mark.parametrize(("name", "sizes", "changes"), SHARDED)
def test_sharded_packed_step_equals_the_one_device_step(
    name: str, sizes: Mapping[str, int], changes: Mapping[str, Any]
) -> None:
    """All metrics and gradients; on one device in one microbatch, whose means are over all that carry loss."""
    model = model_of(name)
    batch = packed(model.vocab)
    # On one device there is no context to gather.
    ways = ("microbatches", "loss_chunks", "expert_matmul", "context_attention")
    one = {key: value for key, value in changes.items() if key not in ways}
    expected, wanted_gradients = step(program(model, **one), mesh_of(), replace(batch, positions=None))
    actual, gradients = step(program(model, **changes), mesh_of(**sizes), replace(batch, positions=None))
    assert actual == pytest.approx(expected, rel=1e-5)
    assert expected["tokens"] == (batch.targets >= 0).sum()
    assert all(
        expected[name] for name in ("z_loss", "gradient_norm", *(["balance_loss"] if "balance_loss" in one else []))
    )
    assert_close(gradients, wanted_gradients, 2e-5)


@pytest.mark.slow
def test_positions_may_be_given() -> None:
    """Those that restart are what is derived; others are other positions."""
    model, mesh = model_of("llama"), mesh_of(context=2, fsdp=2)
    batch, trained = packed(model.vocab), program(model, microbatches=2)
    # On one device, whose step other tests here have compiled.
    derived, _ = step(program(model), mesh_of(), replace(batch, positions=None))
    assert step(trained, mesh, batch)[0] == pytest.approx(derived, rel=1e-5)
    other = np.broadcast_to(np.arange(SEQ_LEN, dtype=np.int32) ** 2 % 13, batch.tokens.shape)
    assert step(trained, mesh, replace(batch, positions=other))[0]["loss"] != pytest.approx(derived["loss"], rel=1e-4)


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_positions_restart_in_any_order_of_the_sequence(devices: int) -> None:
    batch = packed(96)
    order = sequence_order(SEQ_LEN, devices, "zigzag")
    mesh = mesh_of(context=devices)
    ids = jax.device_put(batch.segments[:, order], jax.NamedSharding(mesh, jax.P(None, "context")))
    with jax.set_mesh(mesh):
        restarted = jax.jit(within_segments)(ids, jnp.asarray(order))
    assert (np.asarray(restarted) == batch.positions[:, order]).all()


def test_a_batch_without_any_loss_changes_nothing() -> None:
    model = model_of("llama")
    batch = packed(model.vocab)
    empty = replace(batch, targets=np.full_like(batch.targets, -1))
    # The step of the test of positions.
    metrics, gradients = step(program(model, microbatches=2), mesh_of(context=2, fsdp=2), empty)
    assert (metrics["loss"], metrics["z_loss"], metrics["gradient_norm"]) == (0, 0, 0)
    assert all((gradient == 0).all() for gradient in jax.tree.leaves(gradients))


@pytest.mark.slow
def test_z_loss_is_the_mean_square_of_log_z() -> None:
    """Value and gradient, against the formula on logits that are there as a whole."""
    model, mesh = model_of("gemma2"), mesh_of()  # its logits are soft-capped
    how = Computation(model=model, rules=Rules().only({}), z_loss=0.3)
    weights = initialise(describe(model), jax.random.key(0), mesh, how.specs, jnp.float32)
    text = np.random.default_rng(1).integers(0, model.vocab, (2, 13), np.int32)
    batch = Batch(tokens=jnp.asarray(text[:, :-1]), targets=jnp.asarray(text[:, 1:]))

    def plain(weights: Transformer[jax.Array]) -> tuple[jax.Array, jax.Array]:
        exp = jnp.exp(logits(weights, batch.tokens, how))
        z = exp.sum(-1)
        picked = jnp.take_along_axis(exp, batch.targets[..., None], -1)[..., 0]
        squares = (jnp.log(z) ** 2).mean()
        return -jnp.log(picked / z).mean() + 0.3 * squares, squares

    def ours(weights: Transformer[jax.Array]) -> Any:
        return objective(weights, batch, how, chunks=3)

    with jax.set_mesh(mesh):
        both = jax.jit(lambda w: [jax.value_and_grad(f, has_aux=True)(w) for f in (plain, ours)])(weights)
    ((value_expected, squares), wanted_gradients), ((value, terms), gradients) = jax.tree.map(np.asarray, both)
    assert float(value) == pytest.approx(float(value_expected), rel=1e-5)
    assert float(terms["z_loss"]) == pytest.approx(float(squares), rel=1e-5)
    assert squares > 1
    assert_close(gradients, wanted_gradients)


def published_balance(router_logits: list[np.ndarray], active: int, mask: np.ndarray) -> float:
    """The published formula in NumPy: every layer's logits [n, E], n tokens of which ``mask`` [n] counts."""
    rows = np.concatenate(router_logits).astype(np.float64)
    weights = np.tile(mask, len(router_logits)).astype(np.float64)
    probabilities = np.exp(rows) / np.exp(rows).sum(-1, keepdims=True)
    chosen = np.argsort(-probabilities, axis=-1)[:, :active]
    per_choice = np.eye(rows.shape[1])[chosen]  # [n, k, E]
    tokens_per_expert = (per_choice * weights[:, None, None]).sum(0) / weights.sum()
    mean_probability = (probabilities * weights[:, None]).sum(0) / weights.sum()
    return float((tokens_per_expert * mean_probability).sum() * rows.shape[1])


def test_balance_is_the_published_formula() -> None:
    moe, random = model_of("qwen3_moe").moe, np.random.default_rng(0)
    assert moe is not None
    layers = [random.standard_normal((40, moe.experts)).astype(np.float32) * 2 for _ in range(3)]
    segments = random.integers(0, 3, 40).astype(np.int32)

    def ours(layers: list[jax.Array], segments: jax.Array | None) -> jax.Array:
        chosen = [jax.lax.top_k(logits, moe.active)[1] for logits in layers]
        real = None if segments is None else segments > 0
        return balance(sum(load(logits, ids, real, moe) for logits, ids in zip(layers, chosen, strict=True)))

    for ids, mask in ((None, np.ones(40, bool)), (jnp.asarray(segments), segments > 0)):
        value, gradients = jax.value_and_grad(ours)([jnp.asarray(layer) for layer in layers], ids)
        assert float(value) == pytest.approx(published_balance(layers, moe.active, mask), rel=1e-5)
        # A change too small to choose other experts.
        change = [random.standard_normal(layer.shape).astype(np.float32) for layer in layers]
        there, back = (
            published_balance([x + sign * 1e-4 * dx for x, dx in zip(layers, change, strict=True)], moe.active, mask)
            for sign in (1, -1)
        )
        slope = sum(float((g * dx).sum()) for g, dx in zip(gradients, change, strict=True))
        assert slope == pytest.approx((there - back) / 2e-4, rel=1e-3)


def test_even_experts_have_the_least_balance_loss() -> None:
    """It is then the number of experts that a token uses."""
    moe = model_of("qwen3_moe").moe
    assert moe is not None
    first = np.tile(np.arange(moe.active, dtype=np.int32), (moe.experts, 1))
    in_turn = (first + np.arange(moe.experts, dtype=np.int32)[:, None]) % moe.experts
    even = load(jnp.zeros((moe.experts, moe.experts)), jnp.asarray(in_turn), None, moe)
    assert float(balance(even)) == pytest.approx(moe.active)
    crowded = load(jnp.zeros((moe.experts, moe.experts)).at[:, : moe.active].set(9.0), jnp.asarray(first), None, moe)
    assert float(balance(crowded)) == pytest.approx(moe.experts, rel=0.01)


def balanced(name: str, *weights: float) -> tuple[list[dict[str, float]], list[np.ndarray]]:
    """Metrics and the gradient of the last routers, with such weights of the balance loss."""
    model = model_of(name)
    batch = replace(packed(model.vocab), positions=None)
    results = [step(program(model, balance_loss=weight), mesh_of(), batch) for weight in weights]
    return [metrics for metrics, _ in results], [gradients.layers[-1][-1].mlp.router for _, gradients in results]


@pytest.mark.slow
def test_balance_loss_is_a_part_of_the_objective() -> None:
    """It changes the gradient of routers, and the loss that is told stays the cross-entropy."""
    # A test above has compiled the second of the two steps.
    (without, balance), (router, balanced_router) = balanced("deepseek_v2_lite", 0.0, 0.1)
    assert balance["loss"] == pytest.approx(without["loss"], rel=1e-5)
    assert "balance_loss" not in without
    assert balance["balance_loss"] > 1
    assert np.abs(balanced_router - router).max() > 1e-5


@SLOW
@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v2_lite"])
def test_balance_loss_counts_in_proportion_to_its_weight(name: str) -> None:
    (_, *metrics), (router, *routers) = balanced(name, 0.0, 0.1, 0.2)
    assert metrics[0]["balance_loss"] == metrics[1]["balance_loss"]
    once, twice = (balanced_router - router for balanced_router in routers)
    np.testing.assert_allclose(twice, 2 * once, atol=1e-3 * np.abs(twice).max())


@SLOW
def test_gradient_norm_is_told_before_clipping() -> None:
    model = model_of("llama")
    batch = packed(model.vocab)
    clipped = Optimizer(clip_norm=1e-3)
    # Without clipping on one device, whose step other tests here have compiled.
    metrics, gradients = step(program(model), mesh_of(), replace(batch, positions=None))
    assert metrics["gradient_norm"] == pytest.approx(float(optax.tree.norm(gradients)), rel=1e-5)
    again, short = step(program(model, optimizer=clipped), mesh_of(fsdp=2, tensor=2), batch)
    assert again["gradient_norm"] == pytest.approx(metrics["gradient_norm"], rel=1e-5)
    assert float(optax.tree.norm(short)) == pytest.approx(1e-3, rel=1e-4)


def test_what_is_not_asked_for_is_not_told() -> None:
    model, mesh = model_of("llama"), mesh_of(fsdp=2)
    trained = program(model, packed=False, gradient_norm=False, z_loss=0.0)
    batch = abstract_batch(trained, mesh)
    assert (batch.segments, batch.positions) == (None, None)
    with jax.set_mesh(mesh):
        _, metrics = jax.eval_shape(
            train_step(trained, trained.specs(mesh)), init_state(trained, jax.random.key(0), mesh), batch
        )
    assert metrics == StepMetrics(loss=metrics.loss)


def test_json_has_what_is_new_and_reads_what_is_old() -> None:
    trained = program(model_of("qwen3_moe"), balance_loss=0.01, expert_matmul="grouped", context_attention="all_gather")
    assert TrainProgram.from_json(json.loads(json.dumps(trained.to_json()))) == trained
    new = {"packed", "z_loss", "balance_loss", "gradient_norm", "expert_matmul", "context_attention"}
    stored = trained.to_json()
    stored["computation"] = {key: value for key, value in stored["computation"].items() if key not in new}
    old = TrainProgram.from_json({key: value for key, value in stored.items() if key not in new})
    assert old == program_of(model=trained.model, batch=8, seq_len=SEQ_LEN, attention="chunked", compute_dtype="f32")


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"z_loss": -1.0}, "z_loss"),
        ({"balance_loss": math.nan}, "balance_loss"),
        ({"balance_loss": 0.01}, "balance_loss"),  # a model without experts
        ({"context_attention": "rng"}, "context_attention"),
        ({"expert_matmul": "dense"}, "expert_matmul"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(RooftopError) as refused:
        lower(mesh_of(), program(model_of("llama"), **changes).to_json())
    assert refused.value.field == field
    assert "\n" not in str(refused.value)
