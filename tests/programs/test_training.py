"""The training program on eight emulated devices equals a plain, unsharded transformer written out here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rooftop.arrays import AXES, Mesh
from rooftop.arrays.rules import Rules
from rooftop.capabilities import Choice
from rooftop.core.errors import RooftopError
from rooftop.hardware import Slice
from rooftop.models import ModelConfig, load_model
from rooftop.models.numerics import Numerics
from rooftop.plan.training.assumptions import Assumptions
from rooftop.plan.training.plan import TrainingPlan
from rooftop.plan.training.problem import Problem
from rooftop.plan.training.workload import Workload
from rooftop.programs.attention.context import sequence_order
from rooftop.programs.parameters import Batch, Transformer, describe, initialise, shardings
from rooftop.programs.sharding import Specs
from rooftop.programs.training.program import Optimizer, TrainProgram
from rooftop.programs.training.step import (
    StepMetrics,
    TrainState,
    abstract_batch,
    abstract_state,
    init_state,
    lower,
    train_step,
)
from tests.support.curves import initial_state, mesh_of, program_of
from tests.support.quickly import QUICKLY

MODEL = ModelConfig(
    name="tiny", family="llama", layers=2, d_model=64, d_ff=96, heads=8, kv_heads=4, d_head=16, vocab=128,
    max_seq_len=16,
)  # fmt: skip
BATCH, SEQ_LEN = 4, 16


def program(**changes: Any) -> TrainProgram:
    fields = {"model": MODEL, "batch": BATCH, "seq_len": SEQ_LEN, "compute_dtype": "f32"}
    return program_of(**(fields | changes))


def ids() -> tuple[np.ndarray, np.ndarray]:
    text = np.random.default_rng(0).integers(0, MODEL.vocab, (BATCH, SEQ_LEN + 1)).astype(np.int32)
    return text[:, :-1], text[:, 1:]


def one_step(trained: TrainProgram, mesh: jax.sharding.Mesh) -> tuple[TrainState[np.ndarray], float]:
    state = initial_state(trained, mesh)
    place = abstract_batch(trained, mesh)
    order = sequence_order(SEQ_LEN, mesh.shape["context"], trained.computation.context_order)
    tokens, targets = (jax.device_put(tokens[:, order], place.tokens.sharding) for tokens in ids())
    with jax.set_mesh(mesh):
        step = jax.jit(train_step(trained, trained.specs(mesh)), donate_argnums=0, compiler_options=QUICKLY)
        state, metrics = step(state, Batch(tokens=tokens, targets=targets))
    return jax.tree.map(np.asarray, state), float(metrics.loss)


def plain_loss(weights: Transformer[jax.Array], tokens: jax.Array, targets: jax.Array) -> jax.Array:
    """The same transformer, one layer after another, with no sharding, scan, remat or chunks."""

    def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
        return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + MODEL.norm_eps) * scale

    def rotate(x: jax.Array) -> jax.Array:
        # As complex numbers: element i and element i + H/2 make one, turned by position * theta**(-2i/H).
        half = x.shape[-1] // 2
        angle = jnp.arange(SEQ_LEN)[:, None] * MODEL.rope_theta ** (-jnp.arange(half) / half)
        turned = (x[..., :half] + 1j * x[..., half:]) * jnp.exp(1j * angle)[:, None, :]
        return jnp.concatenate([turned.real, turned.imag], -1)

    x = weights.embed[tokens]
    ((stack,),) = weights.layers
    for layer in range(MODEL.layers):
        attn, mlp = (jax.tree.map(lambda w: w[layer], part) for part in (stack.attn, stack.mlp))  # noqa: B023
        h = norm(x, attn.norm.scale)
        q, k = rotate(jnp.einsum("btd,dnh->btnh", h, attn.q)), rotate(jnp.einsum("btd,dkh->btkh", h, attn.k))
        k, v = (
            jnp.repeat(heads, MODEL.heads // MODEL.kv_heads, 2) for heads in (k, jnp.einsum("btd,dkh->btkh", h, attn.v))
        )
        scores = jnp.einsum("btnh,bsnh->bnts", q, k) / MODEL.d_head**0.5
        scores = jnp.where(np.tril(np.ones((SEQ_LEN, SEQ_LEN), bool)), scores, -1e30)
        mixed = jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), v)
        x = x + mixed.reshape(BATCH, SEQ_LEN, -1) @ attn.out
        h = norm(x, mlp.norm.scale)
        gate = h @ mlp.gate
        x = x + (gate / (1 + jnp.exp(-gate)) * (h @ mlp.up)) @ mlp.down
    logits = jax.nn.log_softmax(norm(x, weights.final_norm.scale) @ weights.unembed)
    return -jnp.take_along_axis(logits, targets[..., None], -1).mean()


@pytest.fixture(scope="module")
def expected() -> tuple[float, Transformer[np.ndarray], Transformer[np.ndarray]]:
    """Loss, gradients and initial weights of the plain transformer."""
    trained = program()
    weights = initial_state(trained, mesh_of()).weights
    weights = jax.tree.map(lambda w: jnp.asarray(np.asarray(w)), weights)
    loss, gradients = jax.jit(jax.value_and_grad(plain_loss))(weights, *ids())
    return float(loss), jax.tree.map(np.asarray, gradients), jax.tree.map(np.asarray, weights)


def moments(state: TrainState[np.ndarray], name: str) -> Transformer[np.ndarray]:
    moment: Transformer[np.ndarray] = optax.tree_utils.tree_get(state.optimizer, name)
    return moment


def largest_error(actual: Transformer[np.ndarray], reference: Transformer[np.ndarray]) -> float:
    """Largest difference in any array, relative to that array's largest element."""
    errors = jax.tree.map(lambda a, b: float(np.abs(a - b).max() / np.abs(b).max()), actual, reference)
    return max(jax.tree.leaves(errors))


SLOW = pytest.mark.slow
CASES = [
    pytest.param({}, {"remat": "none"}, marks=SLOW),
    ({"data": 2, "fsdp": 2, "tensor": 2}, {"remat": "block", "loss_chunks": 2}),  # one sequence on a device
    pytest.param({"fsdp": 2, "tensor": 4}, {"remat": "matmuls"}, marks=SLOW),  # two
    ({"fsdp": 2}, {"microbatches": 2, "remat": "block,qkv=offload,layer_input=offload", "loss_chunks": 2}),
    ({"fsdp": 2, "tensor": 4}, {"remat": "matmuls", "collective_matmuls": True}),
    pytest.param(
        {"fsdp": 2, "tensor": 4},
        {"remat": "block", "collective_matmuls": True, "ring_order": (0, 1, 3, 2), "both_ways": True},
        marks=SLOW,
    ),
    pytest.param({"context": 2, "data": 2, "tensor": 2}, {"remat": "block", "collective_matmuls": True}, marks=SLOW),
    pytest.param({"fsdp": 4, "tensor": 2}, {"remat": "none", "collective_matmuls": True}, marks=SLOW),
    pytest.param({"fsdp": 4}, {"remat": "none", "loss_chunks": 4}, marks=SLOW),
    pytest.param({"data": 4}, {"remat": "minimal"}, marks=SLOW),
    pytest.param({"data": 2, "expert": 2}, {}, marks=SLOW),
    pytest.param({"data": 2, "tensor": 4}, {"remat": "block,qkv=save"}, marks=SLOW),
    pytest.param({"fsdp": 4, "tensor": 2}, {"remat": "full", "loss_chunks": 2}, marks=SLOW),
    pytest.param({"tensor": 4}, {"remat": "none", "microbatches": 4}, marks=SLOW),
    pytest.param({"data": 2, "tensor": 2}, {"microbatches": 2, "attention": "chunked"}, marks=SLOW),
    pytest.param({"context": 4, "tensor": 2}, {"loss_chunks": 2}, marks=SLOW),
    pytest.param({"context": 2, "fsdp": 2}, {"context_order": "contiguous", "attention": "chunked"}, marks=SLOW),
]


@pytest.mark.parametrize(("sizes", "changes"), CASES)
def test_step_equals_plain_transformer(
    sizes: Mapping[str, int], changes: Mapping[str, Any], expected: tuple[float, Any, Any]
) -> None:
    """Loss, gradients (from the first moment) and AdamW, whatever mesh, remat, microbatches, chunks and kernel."""
    wanted_loss, wanted_gradients, weights = expected
    adamw = Optimizer(learning_rate=1e-2, weight_decay=0.5)
    state, loss = one_step(program(**changes, optimizer=adamw), mesh_of(**sizes))
    assert loss == pytest.approx(wanted_loss, rel=1e-5)
    gradients = jax.tree.map(lambda m: m / (1 - adamw.b1), moments(state, "mu"))
    assert largest_error(gradients, wanted_gradients) < 1e-4
    squares = jax.tree.map(lambda v: np.sqrt(v / (1 - adamw.b2)), moments(state, "nu"))
    assert largest_error(squares, jax.tree.map(np.abs, wanted_gradients)) < 1e-4
    # After one step Adam's change is the gradient's sign; matrices decay, norms do not.
    decay = jax.tree.map(lambda p: 0.0 if p.fan_in is None else adamw.weight_decay, describe(MODEL))
    changed = jax.tree.map(
        lambda w, g, d: w - adamw.learning_rate * (g / (np.abs(g) + adamw.eps) + d * w), weights, gradients, decay
    )
    assert largest_error(state.weights, changed) < 1e-5
    assert state.step == 1


def test_collective_matmuls_send_shards_and_gather_nothing() -> None:
    """In layers all data over tensor goes in permutes. A sum over all devices is what a CPU makes of a scatter."""
    mesh = mesh_of(tensor=4)
    counts = {}
    for overlaps in (False, True):
        trained = program(remat="block", collective_matmuls=overlaps)
        with jax.set_mesh(mesh):
            step = jax.jit(train_step(trained, trained.specs(mesh)))
            text = step.lower(abstract_state(trained, mesh), abstract_batch(trained, mesh)).compile().as_text()
        counts[overlaps] = [
            sum(f" {kind}(" in line and "layers" in line for line in text.splitlines())
            for kind in ("all-gather", "all-reduce", "collective-permute")
        ]
    assert counts[False][2] == 0 < min(counts[False][:2])
    assert counts[True][0] == 0 < counts[True][2]
    assert counts[True][1] < counts[False][1]


def test_axes_over_two_slices_equal_the_plain_transformer(expected: tuple[float, Any, Any]) -> None:
    """FSDP within and between slices, its devices those of the layout: emulated ones are numbered slice by slice."""
    slice_ = Slice.parse("v5e:2x2@2")
    layout = Mesh(slice_, dict.fromkeys(AXES, ()) | dict(Mesh.from_layout(slice_, "fsdp=x+dcn,tensor=y").axes))
    x, y, between = np.moveaxis(layout.device_coordinates(), -1, 0)
    devices = np.array(jax.devices())[4 * between + 2 * x + y]
    explicit = (jax.sharding.AxisType.Explicit,) * len(AXES)
    mesh = jax.sharding.Mesh(devices, AXES, axis_types=explicit)
    state, loss = one_step(program(optimizer=Optimizer(name="sgd", learning_rate=1.0)), mesh)
    wanted_loss, gradients, weights = expected
    assert loss == pytest.approx(wanted_loss, rel=1e-5)
    assert largest_error(state.weights, jax.tree.map(np.subtract, weights, gradients)) < 1e-5


def test_bf16_stays_near_float32(expected: tuple[float, Any, Any]) -> None:
    _, loss = one_step(program(compute_dtype="bf16"), mesh_of(fsdp=2, tensor=2))
    assert loss == pytest.approx(expected[0], rel=2e-2)
    assert loss != pytest.approx(expected[0], rel=1e-7)


def test_initial_weights_do_not_depend_on_the_mesh() -> None:
    key, described = jax.random.key(3), describe(MODEL)
    one, many = (
        initialise(described, key, mesh, Specs(Rules().only(mesh.shape)), jnp.float32)
        for mesh in (mesh_of(), mesh_of(data=2, fsdp=2, tensor=2))
    )
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((np.asarray(a) == np.asarray(b)).all()), one, many))
    assert float(jnp.std(one.layers[0][0].mlp.down)) == pytest.approx(MODEL.d_ff**-0.5, rel=0.05)
    assert (np.asarray(one.final_norm.scale) == 1).all()


def test_abstract_state_is_what_is_initialised() -> None:
    trained, mesh = program(), mesh_of(fsdp=2, tensor=4)
    real, planned = init_state(trained, jax.random.key(0), mesh), abstract_state(trained, mesh)

    def same(a: jax.Array, b: jax.ShapeDtypeStruct) -> bool:
        # Newer releases of JAX write a spec out to all dims.
        return (a.shape, a.dtype) == (b.shape, b.dtype) and a.sharding.is_equivalent_to(b.sharding, a.ndim)

    assert jax.tree.all(jax.tree.map(same, real, planned))


def test_thousands_of_devices_without_any() -> None:
    """The types of a whole step on 4,096 devices, shardings included: the state goes out as it came in."""
    mesh = jax.sharding.AbstractMesh(
        (1, 1, 1024, 1, 1, 4), AXES, axis_types=(jax.sharding.AxisType.Explicit,) * len(AXES)
    )
    trained = program_of(model=load_model("llama3-70b"), batch=1024, seq_len=4096)
    with jax.sharding.use_abstract_mesh(mesh):
        before, batch = abstract_state(trained, mesh), abstract_batch(trained, mesh)
        after, metrics = jax.eval_shape(train_step(trained, trained.specs(mesh)), before, batch)
    down = before.weights.layers[0][0].mlp.down
    assert down.sharding.shard_shape(down.shape) == (80, 28672 // 4096, 8192)
    assert jax.tree.all(jax.tree.map(lambda a, b: a.sharding.spec == b.sharding.spec, before.weights, after.weights))
    assert metrics == StepMetrics(loss=metrics.loss)
    assert (metrics.loss.shape, metrics.loss.dtype) == ((), jnp.float32)


def test_json_round_trip() -> None:
    trained = program(
        optimizer=Optimizer(learning_rate=1e-3, clip_norm=1.0), rules=Rules().only({"data": 1, "fsdp": 1})
    )
    assert TrainProgram.from_json(trained.to_json()) == trained
    rings = program(collective_matmuls=True, ring_order=(0, 1, 3, 2))
    assert TrainProgram.from_json(json.loads(json.dumps(rings.to_json()))) == rings


@pytest.mark.parametrize(
    ("changes", "sizes", "field"),
    [
        ({"remat": "blok"}, {}, "remat"),
        ({"loss_chunks": 3}, {}, "loss_chunks"),
        ({"attention": "flash"}, {}, "attention"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(changes: dict[str, Any], sizes: dict[str, int], field: str) -> None:
    with pytest.raises(RooftopError) as refused:
        lower(mesh_of(**sizes), program(**changes).to_json())
    assert refused.value.field == field
    assert "\n" not in str(refused.value)


def plan(layout: str, collective_matmuls: bool = False, **changes: Any) -> TrainingPlan:
    """A plan.json for LLaMA-3 8B on 16 chips."""
    slice_ = Slice.parse(changes.pop("on", "v5e:4x4"))
    problem = Problem(
        model=load_model("llama3-8b"), slice=slice_, workload=Workload(batch_tokens=2**19, seq_len=4096), **changes
    )
    axes = {name: () for name in AXES} | dict(Mesh.from_layout(slice_, layout).axes)
    choice = Choice(
        remat="block,qkv=offload",
        microbatches=4,
        collective_matmuls=collective_matmuls,
    )
    return TrainingPlan(problem=problem, mesh=Mesh(slice_, axes), choice=choice)


def test_program_of_a_plan() -> None:
    numerics = Numerics(optimizer="lion", moments="bf16", gradients="f32")
    trained = TrainProgram.from_plan(plan("fsdp=x,tensor=y", numerics=numerics))
    assert (trained.model, trained.batch, trained.seq_len, trained.microbatches) == (
        load_model("llama3-8b"),
        128,
        4096,
        4,
    )
    how = trained.computation
    assert (how.remat, how.attention, how.attention_block) == ("block,qkv=offload", "splash", 1024)
    assert (trained.compute_dtype, trained.weights_dtype, trained.gradient_dtype) == ("bf16", "f32", "f32")
    assert trained.optimizer == Optimizer(name="lion", moments="bf16")
    assert how.specs.rules == Rules()
    # 8 sequences of 4096 on each device, 1024 of their tokens at a time.
    assert trained.loss_chunks == 32
    assert TrainProgram.from_json(trained.to_json()) == trained
    rings = TrainProgram.from_plan(plan("fsdp=x+y[2:2],tensor=z+y[1:2]", collective_matmuls=True, on="v5p:2x4x2"))
    assert rings.computation.collective_matmuls
    assert (rings.computation.ring_order, rings.computation.both_ways) == ((0, 1, 3, 2), True)
    stored = TrainProgram.from_plan(plan("context=x,fsdp=y", assumptions=Assumptions(attention="reference")))
    assert (stored.computation.attention, stored.loss_chunks) == ("reference", 8)


@pytest.mark.parametrize(
    ("layout", "changes", "obstacle"),
    [
        ("fsdp=x,tensor=y", {"numerics": Numerics(matmul="int4")}, "no program multiplies in int4"),
        ("fsdp=x,tensor=y", {"numerics": Numerics(weights="f16")}, "no program has weights in f16"),
    ],
)
def test_plans_that_are_no_program_yet(layout: str, changes: dict[str, Any], obstacle: str) -> None:
    asked = plan(layout, **changes)
    with pytest.raises(RooftopError, match=obstacle) as refused:
        TrainProgram.from_plan(asked)
    assert (refused.value.field, refused.value.given) == ("plan", asked.obstacles[0])
    with pytest.raises(RooftopError, match="plan schema: got nothing; accepted: a value: this field is required"):
        TrainingPlan.from_json({"kind": "train"})


@pytest.mark.parametrize(("name", "state"), [("adam", ("mu", "nu")), ("lion", ("mu",)), ("sgd", ())])
def test_optimizers_keep_their_moments_in_any_dtype(name: str, state: tuple[str, ...]) -> None:
    trained = program(optimizer=Optimizer(name=name, moments="bf16"), weights_dtype="bf16")
    abstract = abstract_state(trained, mesh_of(fsdp=2))
    assert jax.tree.all(jax.tree.map(lambda leaf: leaf.dtype == jnp.bfloat16, abstract.weights))
    state_leaves = [leaf for leaf in jax.tree.leaves(abstract.optimizer) if leaf.shape]
    assert len(state_leaves) == len(state) * len(jax.tree.leaves(abstract.weights))
    assert all(leaf.dtype == jnp.bfloat16 for leaf in state_leaves)


def test_clipped_gradients_have_the_norm_asked_for(expected: tuple[float, Any, Any]) -> None:
    _, gradients, weights = expected
    trained = program(optimizer=Optimizer(name="sgd", learning_rate=1.0, clip_norm=0.5))
    state, _ = one_step(trained, mesh_of(fsdp=2, tensor=2))
    norm = optax.tree.norm(gradients)
    assert norm > 1
    expected_weights = jax.tree.map(lambda w, g: w - 0.5 * g / norm, weights, gradients)
    assert largest_error(state.weights, expected_weights) < 1e-5


def test_unknown_program_field_and_dtype() -> None:
    with pytest.raises(RooftopError, match="bf16, f32"):
        program(compute_dtype="f64")
    whole = program().to_json()
    for wrong in ({"speed": 11}, {"computation": whole["computation"] | {"speed": 11}}, {"computation": 11}):
        with pytest.raises(RooftopError, match=r"^train program (field|computation|computation\.field): got "):
            TrainProgram.from_json(whole | wrong)


def test_specs_refuse_collisions_and_unknown_dims() -> None:
    specs = Specs(Rules())
    with pytest.raises(RooftopError, match="at most once"):
        specs.activation("residual_seq", "heads")
    with pytest.raises(RooftopError, match="did you mean heads"):
        specs.parameter("hedas")
    mesh = mesh_of(fsdp=8)
    assert shardings(describe(MODEL), mesh, specs).embed.spec == specs.parameter(None, ("vocab", "embed"))
