"""Padded batches on emulated devices train as the same batch without padding does on one device."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from rooftop.models import ModelConfig
from rooftop.models.config import MoE
from rooftop.programs.attention.context import sequence_order
from rooftop.programs.parameters import Batch, Transformer
from rooftop.programs.training.program import Optimizer, TrainProgram
from rooftop.programs.training.step import abstract_batch, train_step
from tests.support.curves import initial_state, mesh_of, program_of
from tests.support.quickly import QUICKLY

SLOW = pytest.mark.slow
DENSE = ModelConfig(
    name="tiny", family="llama", layers=2, d_model=32, d_ff=48, heads=4, kv_heads=2, d_head=8, vocab=64, max_seq_len=16
)
EXPERTS = ModelConfig(
    name="tiny-moe", family="mixtral", layers=2, d_model=32, d_ff=48, heads=4, kv_heads=2, d_head=8, vocab=64,
    max_seq_len=16, moe=MoE(experts=4, active=2, d_ff=16),
)  # fmt: skip
SEQUENCES, SEQ_LEN = 3, 13


def program(model: ModelConfig, **changes: Any) -> TrainProgram:
    fields = {
        "model": model, "batch": SEQUENCES, "seq_len": SEQ_LEN, "attention": "chunked", "compute_dtype": "f32",
        "optimizer": Optimizer(name="sgd", learning_rate=1.0), "z_loss": 1e-2,
        "balance_loss": 0.0 if model.moe is None else 0.1,
    }  # fmt: skip
    return program_of(**(fields | changes))


def batch_of(trained: TrainProgram) -> Batch[np.ndarray]:
    """Random text; packed, of two documents a sequence and one token of padding."""
    random = np.random.default_rng(0)
    text = random.integers(0, trained.model.vocab, (SEQUENCES, SEQ_LEN + 1)).astype(np.int32)
    tokens, targets = text[:, :-1], text[:, 1:].copy()
    if not trained.packed:
        return Batch(tokens=tokens, targets=targets)
    segments = np.tile(np.repeat([1, 2, 0], [5, SEQ_LEN - 6, 1]).astype(np.int32), (SEQUENCES, 1))
    positions = np.tile(np.concatenate([np.arange(5), np.arange(SEQ_LEN - 5)]).astype(np.int32), (SEQUENCES, 1))
    targets[:, 4] = targets[:, -2:] = -1
    return Batch(tokens=tokens, targets=targets, segments=segments, positions=positions)


def one_step(trained: TrainProgram, mesh: jax.sharding.Mesh) -> tuple[dict[str, float], Transformer[np.ndarray]]:
    """The metrics and the updated weights of one step."""
    state, like, batch = initial_state(trained, mesh), abstract_batch(trained, mesh), batch_of(trained)
    more = [(0, padded - size) for padded, size in zip(like.tokens.shape, batch.tokens.shape, strict=True)]
    ring = mesh.shape["context"]
    order = sequence_order(like.tokens.shape[1], ring, trained.computation.context_order if ring > 1 else "contiguous")

    def place(name: str) -> jax.Array | None:
        ids = getattr(batch, name)
        if ids is None:
            return None
        ids = np.pad(ids, more, constant_values=-1 if name == "targets" else 0)
        return jax.device_put(ids[:, order], like.tokens.sharding)

    placed = Batch(**{name: place(name) for name in ("tokens", "targets", "segments", "positions")}, padded=like.padded)
    with jax.set_mesh(mesh):
        step = jax.jit(train_step(trained, trained.specs(mesh)), donate_argnums=0, compiler_options=QUICKLY)
        state, metrics = jax.block_until_ready(step(state, placed))
    values = {name: float(value) for name, value in vars(metrics).items() if value is not None}
    return values, jax.tree.map(np.asarray, state.weights)


@pytest.mark.parametrize(
    ("model", "sizes", "changes"),
    [
        (DENSE, {"fsdp": 2, "context": 2, "tensor": 2}, {"microbatches": 2, "attention": "reference"}),
        pytest.param(EXPERTS, {"fsdp": 2, "expert": 2}, {}, marks=SLOW),
        pytest.param(DENSE, {"data": 4, "tensor": 2}, {"packed": True}, marks=SLOW),
        pytest.param(DENSE, {"fsdp": 2, "context": 4}, {"packed": True}, marks=SLOW),
        pytest.param(DENSE, {"fsdp": 8}, {}, marks=SLOW),
        pytest.param(DENSE, {"stage": 2, "fsdp": 2, "tensor": 2}, {"microbatches": 2}, marks=SLOW),
        pytest.param(
            DENSE, {"stage": 2, "data": 2, "context": 2}, {"microbatches": 2, "context_attention": "all_gather"},
            marks=SLOW,
        ),
        pytest.param(EXPERTS, {"expert": 4, "tensor": 2}, {"packed": True, "expert_matmul": "grouped"}, marks=SLOW),
        pytest.param(EXPERTS, {"stage": 2, "expert": 2, "tensor": 2}, {}, marks=SLOW),
        pytest.param(EXPERTS, {"expert": 2, "context": 2, "tensor": 2}, {"expert_matmul": "grouped"}, marks=SLOW),
    ],
)  # fmt: skip
def test_padding_changes_neither_loss_nor_update(
    model: ModelConfig, sizes: dict[str, int], changes: dict[str, Any]
) -> None:
    trained, mesh = program(model, **changes), mesh_of(**sizes)
    assert trained.padded(mesh) != (SEQUENCES, SEQ_LEN)
    alone = {"microbatches": 1, "context_attention": "ring"}
    expected, weights = one_step(program(model, **(changes | alone)), mesh_of())
    metrics, updated = one_step(trained, mesh)
    assert metrics == pytest.approx(expected, rel=2e-5)
    jax.tree.map(lambda ours, theirs: np.testing.assert_allclose(ours, theirs, atol=2e-5), updated, weights)
