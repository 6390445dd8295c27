"""Matmuls in 8 bits: the scheme in NumPy, meshes against one device, and what training with them costs in loss."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from rooftop.arrays.rules import Rules
from rooftop.capabilities import MATMUL_DTYPES, TRAINING, obstacles
from rooftop.core.errors import RooftopError
from rooftop.models import MLA
from rooftop.programs.model.grouped_matmul import RowGroups
from rooftop.programs.model.layer import Computation
from rooftop.programs.model.narrow import NarrowWeight, gather_in, grouped_narrow_matmul, narrow_matmul, narrowed
from rooftop.programs.sharding import Specs
from rooftop.programs.training.program import TrainProgram
from rooftop.programs.training.step import abstract_batch, abstract_state, train_step
from tests.programs.test_promise import EXPERTS, MODEL, spec_of
from tests.support.curves import mesh_of
from tests.support.promise import outcome, stepped

Array = np.ndarray[Any, Any]


def rounded(x: Array, axis: int | tuple[int, ...], kind: str) -> Array:
    """x as its values in 8 bits times their scales."""
    top = {"int8": 127.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}[kind]
    scale = np.abs(x).max(axis=axis, keepdims=True) / top
    values = np.rint(x / scale) if kind == "int8" else (x / scale).astype(getattr(ml_dtypes, kind)).astype(np.float64)
    return np.asarray(values * scale)


def reference(x: Array, w: Array, dy: Array, kinds: tuple[str, str]) -> tuple[Array, Array, Array]:
    """y, dx and dw of x [B, T, D] times w [D, F], in float64."""
    of_columns = np.abs(w).max(axis=0) / {"int8": 127.0, "float8_e4m3fn": 448.0}[kinds[0]]
    rounded_w = rounded(w, 0, kinds[0])
    y = rounded(x, -1, kinds[0]) @ rounded_w
    dx = rounded(dy * of_columns, -1, kinds[1]) @ (rounded_w / of_columns).T
    return y, dx, np.einsum("btd,btf->df", x, dy)


KINDS = {"int8": ("int8", "int8"), "f8_e4m3": ("float8_e4m3fn", "float8_e5m2")}


@pytest.mark.parametrize("dtype", MATMUL_DTYPES)
def test_matmuls_are_those_of_the_scheme(dtype: str) -> None:
    rng = np.random.default_rng(0)
    x, w, dy = (rng.normal(size=size).astype(np.float32) for size in ((2, 5, 16), (16, 12), (2, 5, 12)))
    x[0, 0, 3], w[:, 4], x[1, 2] = 50.0, 1e-4, 0.0

    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        weight = gather_in(dtype, w, Specs(Rules().only({})), None, None, rows=16)
        assert isinstance(weight, NarrowWeight)
        return narrow_matmul(x, weight)

    with jax.set_mesh(mesh_of()):
        y, pull = jax.vjp(f, jnp.asarray(x), jnp.asarray(w))
        dx, dw = pull(jnp.asarray(dy))
    x[1, 2] = 1e-12  # A row of zeros has a scale.
    expected = reference(*(part.astype(np.float64) for part in (x, w, dy)), KINDS[dtype])
    for ours, theirs in zip((y, dx, dw), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5 * np.abs(theirs).max())
    # Rounding is felt: it is the derivative of the weight alone that has none.
    exact = np.einsum("btd,df->btf", x, w)
    assert 1e-3 < np.abs(y - exact).max() / np.abs(exact).max() < 0.1
    assert np.isfinite(np.asarray(dx)).all()


@pytest.mark.parametrize("dtype", MATMUL_DTYPES)
def test_grouped_matmuls_are_those_of_each_expert(dtype: str) -> None:
    """Rows of experts, of which some belong to none, next to one matmul for each expert."""
    rng = np.random.default_rng(1)
    rows, weights, dy = (jnp.asarray(rng.normal(size=size), jnp.float32) for size in ((24, 8), (3, 8, 6), (24, 6)))
    experts = np.sort(rng.integers(0, 4, 24))

    def weight(w: jax.Array) -> NarrowWeight:
        return narrowed(w, w, lambda values: values, dtype, batch=1)

    def grouped(rows: jax.Array, w: jax.Array) -> jax.Array:
        return grouped_narrow_matmul(rows, weight(w), RowGroups.of(jnp.asarray(experts), 3))

    def apart(rows: jax.Array, w: jax.Array) -> jax.Array:
        every = narrow_matmul(jnp.broadcast_to(rows, (3, *rows.shape)), weight(w), batch=1)
        return jnp.sum(jnp.where((experts == np.arange(3)[:, None])[..., None], every, 0), axis=0)

    # As inside shard_map, without explicit sharding.
    results = [(y, *pull(dy)) for y, pull in (jax.vjp(f, rows, weights) for f in (grouped, apart))]
    for ours, theirs in zip(*results, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


LATENT = replace(
    MODEL, layer_windows=(), attention_sinks=False, qkv_bias=False, kv_heads=4,
    mla=MLA(q_rank=16, kv_rank=8, d_nope=4, d_rope=4, d_v=8),
)  # fmt: skip
TWO_LAYERS = replace(MODEL, layers=2, layer_windows=())


@pytest.mark.parametrize(
    ("axes", "changes", "dtype"),
    [
        ({"data": 2, "fsdp": 2, "tensor": 2}, {"microbatches": 2, "remat": "minimal"}, "int8"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ({"expert": 2, "fsdp": 2, "tensor": 2}, {"model": EXPERTS}, "f8_e4m3"),
                (
                    {"stage": 2, "tensor": 2},
                    {"model": TWO_LAYERS, "microbatches": 2, "schedule": "zero_bubble"},
                    "int8",
                ),
                ({"tensor": 2, "fsdp": 2}, {"model": LATENT}, "f8_e4m3"),
            )
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else str(value),
)  # fmt: skip
def test_meshes_multiply_as_one_device(axes: dict[str, int], changes: dict[str, Any], dtype: str) -> None:
    """Scales are those of whole rows and columns, so that only the order of sums differs."""
    spec = spec_of(axes, matmul=dtype, **changes)
    assert not list(obstacles(TRAINING, spec))
    program = TrainProgram.from_spec(spec, "any")
    computation = replace(program.computation, expert_capacity=None)
    program = replace(
        program, computation=computation, optimizer=replace(program.optimizer, learning_rate=1.0, eps=1.0)
    )
    plain = replace(program, computation=replace(computation, matmul=None))
    alone = replace(program, microbatches=1, schedule="1f1b")
    (loss, before, after), (expected_loss, _, expected), (other_loss, _, _) = (
        stepped(program, mesh_of(**axes)), stepped(alone, mesh_of()), stepped(plain, mesh_of(**axes))
    )  # fmt: skip
    assert loss == pytest.approx(expected_loss, rel=1e-5) != pytest.approx(other_loss, rel=1e-5)
    for ours, theirs, old in zip(*map(jax.tree.leaves, (after, expected, before)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4 * max(np.abs(theirs - old).max(), 1e-3))


def test_weights_are_gathered_in_8_bits() -> None:
    """Gathers over fsdp of the layers' weights are int8, that of the unembedding is not."""
    mesh = mesh_of(fsdp=2)
    program = TrainProgram.from_spec(spec_of({"fsdp": 2}, matmul="int8", compute="bf16"), "any")
    with jax.set_mesh(mesh):
        step = jax.jit(train_step(program, program.specs(mesh)))
        text = step.lower(abstract_state(program, mesh), abstract_batch(program, mesh)).compile().as_text()
    gathers = [line.split(" = ")[1] for line in text.splitlines() if " all-gather(" in line]
    of_layers = [line for line in gathers if "/attn/" in line or "/mlp/" in line]
    assert of_layers and all(line.startswith("s8") for line in of_layers), gathers
    # The unembedding's matrix is not quantised.
    assert len(gathers) > len(of_layers)


def test_what_has_no_program_is_refused() -> None:
    with pytest.raises(RooftopError, match="matmul: got 'int4'"):
        Computation(model=MODEL, matmul="int4")
    with pytest.raises(RooftopError, match="none with weights_left"):
        Computation(model=MODEL, matmul="int8", weights_left=True)


@pytest.mark.slow
def test_random_steps_draw_narrow_matmuls() -> None:
    """Key/value heads that devices have in common are the one place where parts of a gradient are rounded apart."""
    assert outcome(spec_of({"tensor": 4}, matmul="int8")).failure is None
