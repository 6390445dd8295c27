"""Pipeline stages: losses and gradients of every schedule equal those of the unpipelined program on one device."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend.core import jaxpr_as_fun

from rooftop.arrays import AXES, Mesh
from rooftop.capabilities import Choice
from rooftop.core.errors import RooftopError
from rooftop.hardware import Slice
from rooftop.models import ModelConfig, MoE, load_model
from rooftop.plan.training.plan import TrainingPlan
from rooftop.plan.training.problem import Problem
from rooftop.plan.training.workload import Workload
from rooftop.programs.parameters import Layer
from rooftop.programs.training.passes import split
from rooftop.programs.training.program import Optimizer, TrainProgram
from rooftop.programs.training.step import TrainState, init_state, lower
from tests.support.curves import MODEL, mesh_of, program, train

SLOW = pytest.mark.slow


def largest_error(actual: Any, expected: Any) -> float:
    """Largest difference in any array, relative to that array's largest element."""
    errors = jax.tree.map(lambda a, b: float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-30)), actual, expected)
    return max(jax.tree.leaves(errors))


def within(stacks: Any, expected: Any) -> Any:
    """Stacks without layers of padding, which those of ``wanted`` have not."""
    return jax.tree.map(lambda array, like: array[: len(like)] if array.ndim else array, stacks, expected)


def beyond(stacks: Any, expected: Any) -> Any:
    """The layers of padding."""
    return jax.tree.map(lambda array, like: array[len(like) :] if array.ndim else array, stacks, expected)


FOUR, MIXED = {"stage": 4}, {"stage": 2, "fsdp": 2, "tensor": 2}
INTERLEAVED = {"schedule": "interleaved", "chunks": 2}
EXPERTS = ModelConfig(**(MODEL.__dict__ | {"family": "mixtral", "moe": MoE(experts=4, active=2, d_ff=16)}))
#: Two dense layers, then six of experts.
DENSE_FIRST = ModelConfig(**(EXPERTS.__dict__ | {"moe": MoE(experts=4, active=2, d_ff=16, dense_layers=2)}))
#: Two periods of two layers, and four layers behind them.
TAILED = ModelConfig(**(MODEL.__dict__ | {"layer_windows": (4, None, 4, None, 4, 4, 4, 4)}))
#: Over four stages two layers on each of the first two, one on the third and none on the last.
FIVE = ModelConfig(**(MODEL.__dict__ | {"layers": 5}))
TIED = ModelConfig(**(MODEL.__dict__ | {"tied_embeddings": True}))
#: Attention and MLP are parallel; every second layer rotates a part of each head.
PARALLEL = ModelConfig(
    **(
        MODEL.__dict__
        | {"parallel": "shared", "norm": "layer", "norm_bias": False, "rotary_dims": 2, "logits_scale": 0.5}
        | {"rope_layers": (True, False) * (MODEL.layers // 2), "residual_scale": 0.5}
    )
)
#: Norms of outputs alone, and of all heads together.
POST = ModelConfig(**(MODEL.__dict__ | {"norm_placement": "post", "qk_norm": "width"}))
CASES = [
    pytest.param({"stage": 2, "tensor": 2}, {"model": PARALLEL}, id="parallel", marks=SLOW),
    pytest.param(MIXED, {"model": POST}, id="post-norms", marks=SLOW),
    pytest.param({"stage": 2}, {"model": POST, "schedule": "zero_bubble"}, id="post-norms-split", marks=SLOW),
    pytest.param(FOUR, {"schedule": "eager_1f1b"}, id="eager", marks=SLOW),
    pytest.param(FOUR, {"schedule": "eager_1f1b", "model": FIVE}, id="eager-uneven", marks=SLOW),
    pytest.param(FOUR, {"schedule": "gpipe"}, id="gpipe", marks=SLOW),
    pytest.param(FOUR, {"schedule": "1f1b"}, id="1f1b", marks=SLOW),
    pytest.param(FOUR, {"schedule": "1f1b", "model": FIVE}, id="1f1b-uneven", marks=SLOW),
    pytest.param(FOUR, {"schedule": "gpipe", "model": FIVE}, id="gpipe-uneven", marks=SLOW),
    pytest.param(FOUR, INTERLEAVED, id="interleaved", marks=SLOW),
    pytest.param({"stage": 2}, {**INTERLEAVED, "model": FIVE}, id="interleaved-uneven"),
    *(
        pytest.param(sizes, {**how, "remat": "block,qkv=offload,layer_input=offload"}, id=f"offload-{name}", marks=SLOW)
        for name, sizes, how in (
            ("1f1b", FOUR, {"schedule": "1f1b"}),
            ("interleaved", FOUR, INTERLEAVED),
            ("zero-bubble", MIXED, {"schedule": "zero_bubble", "model": FIVE}),
            ("experts", {"stage": 2, "expert": 2}, {"model": EXPERTS, "microbatches": 2}),
        )
    ),

    pytest.param(FOUR, {"schedule": "zero_bubble", "model": FIVE}, id="zero_bubble-uneven", marks=SLOW),
    pytest.param(FOUR, {"schedule": "zero_bubble"}, id="zero_bubble", marks=SLOW),
    pytest.param(MIXED, {"schedule": "zero_bubble", "remat": "matmuls"}, id="zero_bubble-mixed", marks=SLOW),
    pytest.param(
        MIXED, {"schedule": "zero_bubble", "remat": "matmuls", "model": FIVE}, id="zero_bubble-mixed-uneven"
    ),
    pytest.param(MIXED, {"schedule": "gpipe", "remat": "none"}, id="gpipe-mixed", marks=SLOW),
    pytest.param(MIXED, {"schedule": "1f1b", "loss_chunks": 2}, id="1f1b-mixed", marks=SLOW),
    pytest.param(MIXED, INTERLEAVED, id="interleaved-mixed", marks=SLOW),
    pytest.param({"stage": 2, "data": 2, "expert": 2}, {"model": EXPERTS, "microbatches": 2}, id="experts", marks=SLOW),
    pytest.param(
        {"stage": 2, "fsdp": 2, "tensor": 2}, {"model": EXPERTS, "schedule": "zero_bubble"}, id="experts-split",
        marks=SLOW,
    ),
    pytest.param({"stage": 2}, {"model": DENSE_FIRST, "balance_loss": 0.1}, id="dense-first", marks=SLOW),
    pytest.param({"stage": 4}, {"model": DENSE_FIRST, "balance_loss": 0.1}, id="dense-first-uneven", marks=SLOW),
    pytest.param({"stage": 2, "fsdp": 2, "tensor": 2}, {"model": DENSE_FIRST}, id="dense-first-mixed", marks=SLOW),
    pytest.param({"stage": 2}, {"model": TAILED, "schedule": "gpipe"}, id="tailed", marks=SLOW),
    pytest.param({"stage": 4, "data": 2}, {"model": TIED, "microbatches": 2, "z_loss": 1e-2}, id="tied", marks=SLOW),
    pytest.param({"stage": 2, "data": 2}, {"packed": True, "schedule": "zero_bubble"}, id="packed", marks=SLOW),
    pytest.param(
        {"stage": 2, "context": 2, "data": 2}, {"context_attention": "all_gather", "attention": "chunked"},
        id="context", marks=SLOW,
    ),
]  # fmt: skip


@pytest.fixture(scope="module")
def unpipelined() -> Callable[..., tuple[list[float], TrainState[np.ndarray]]]:
    """``train`` on one device, once for programs that differ in nothing that counts there."""
    known = dict[str, tuple[list[float], TrainState[np.ndarray]]]()

    def trained(trained_program: TrainProgram, steps: int = 1) -> tuple[list[float], TrainState[np.ndarray]]:
        computation = replace(trained_program.computation, remat="block")
        alike = replace(trained_program, schedule="1f1b", chunks=1, loss_chunks=1, computation=computation)
        key = f"{alike.to_json()} {steps}"
        if key not in known:
            known[key] = train(alike, mesh_of(), steps)
        return known[key]

    return trained


@pytest.mark.parametrize(("sizes", "changes"), CASES)
def test_one_step_equals_the_unpipelined_one(
    sizes: Mapping[str, int], changes: Mapping[str, Any], unpipelined: Callable[..., Any]
) -> None:
    """Loss, and by way of the first moment gradients, which are not to vanish."""
    adamw = Optimizer(learning_rate=1e-2)
    trained = program(**changes, optimizer=adamw)
    wanted_losses, expected = unpipelined(trained)
    losses, state = train(trained, mesh_of(**sizes))
    assert losses == pytest.approx(wanted_losses, rel=1e-5)
    moments, wanted_moments = (
        optax.tree_utils.tree_get(trained_state.optimizer, "mu") for trained_state in (state, expected)
    )
    for stacks in (moments, state.weights):
        assert not any(padding.any() for padding in jax.tree.leaves(beyond(stacks, wanted_moments)))
    moments = within(moments, wanted_moments)
    assert min(float(np.abs(moment).max()) for moment in jax.tree.leaves(wanted_moments)) > 0
    assert largest_error(moments, wanted_moments) < 1e-5
    assert state.step == 1


@pytest.mark.parametrize(
    ("sizes", "changes"),
    [
        pytest.param({"stage": 2, "data": 2}, {"schedule": "zero_bubble", "packed": True}, id="copies", marks=SLOW),
        pytest.param({"stage": 2, "expert": 2, "tensor": 2}, INTERLEAVED, id="experts", marks=SLOW),
    ],
)
def test_the_balance_of_experts_is_that_of_all_stages_and_copies(
    sizes: Mapping[str, int], changes: Mapping[str, Any]
) -> None:
    """As without stages on the same mesh, by which microbatches have the same sequences; and it counts."""
    trained_program = program(model=EXPERTS, microbatches=2, balance_loss=1.0, **changes)
    alike = replace(trained_program, schedule="1f1b", chunks=1)
    without = replace(alike, computation=replace(alike.computation, balance_loss=0.0))
    plain = mesh_of(**(dict(sizes) | {"stage": 1}))
    (losses, state), (wanted_losses, expected), (_, unbalanced) = (
        train(trained_program, mesh_of(**sizes)), train(alike, plain), train(without, plain)
    )  # fmt: skip
    assert losses == pytest.approx(wanted_losses, rel=1e-5)
    moments = [
        optax.tree_utils.tree_get(trained_state.optimizer, "mu") for trained_state in (state, expected, unbalanced)
    ]
    assert largest_error(moments[0], moments[1]) < 1e-5
    assert largest_error(moments[2], moments[1]) > 1e-2


@SLOW
@pytest.mark.parametrize("sizes", [FOUR, MIXED], ids=["stages", "mixed"])
@pytest.mark.parametrize(
    "changes", [{"schedule": name} for name in ("eager_1f1b", "gpipe", "1f1b", "zero_bubble")] + [INTERLEAVED],
    ids=lambda changes: changes["schedule"],
)  # fmt: skip
def test_a_curve_of_twenty_steps_equals_the_unpipelined_one(
    sizes: Mapping[str, int], changes: Mapping[str, Any], unpipelined: Callable[..., Any]
) -> None:
    trained_program = program(**changes, optimizer=Optimizer(name="sgd", learning_rate=0.5))
    expected, _ = unpipelined(trained_program, steps=20)
    losses, _ = train(trained_program, mesh_of(**sizes), steps=20)
    assert expected[-1] < expected[0] - 0.3
    assert losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("changes", "sizes", "field"),
    [
        ({"schedule": "1f2b"}, {"stage": 2}, "schedule"),
        ({"chunks": 2}, {"stage": 2}, "chunks"),
        ({}, {"stage": 2, "context": 2}, "context_attention"),
        ({"schedule": "interleaved", "chunks": 5}, {"stage": 2}, "mesh axis stage"),
        ({**INTERLEAVED, "microbatches": 8}, {"stage": 3}, "microbatches"),
        ({"balance_loss": 0.01}, {"stage": 2}, "balance_loss"),  # a model without experts
        ({"model": DENSE_FIRST}, {"stage": 8}, "mesh axis stage"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(changes: dict[str, Any], sizes: dict[str, int], field: str) -> None:
    with pytest.raises(RooftopError) as refused:
        lower(mesh_of(**sizes), program(**changes).to_json())
    assert refused.value.field == field
    assert "\n" not in str(refused.value)


def test_a_stage_keeps_attention_by_its_name() -> None:
    """The backward pass of a stage repeats attention for its own gradient, and once more unless its output is kept."""
    once, twice = (
        lower(mesh_of(stage=2), program(remat=f"block{more}").to_json()).as_text().count("stablehlo.exponential")
        for more in (",attn_core=save", "")
    )
    assert 0 < once < twice


def test_stages_do_their_own_layers_only() -> None:
    """Layers and their state are split over stages; embeddings are on all of them."""
    trained_program, mesh = program(), mesh_of(**MIXED)
    weights = init_state(trained_program, jax.random.key(0), mesh).weights
    ((layers,),) = weights.layers
    assert isinstance(layers, Layer)
    assert layers.attn.q.sharding.shard_shape(layers.attn.q.shape) == (4, 16, 2, 8)
    assert "stage" not in str(weights.embed.sharding.spec)


def test_weights_enter_and_leave_stages_in_their_shards() -> None:
    """No layer's weight and no table is gathered before the loop over trips, and no gradient after it."""
    compiled = lower(mesh_of(**MIXED), program().to_json()).compile().as_text()
    outside_loops = compiled[compiled.index("\nENTRY") :]
    assert " while(" in outside_loops
    assert "all-gather" in compiled
    assert "all-gather" not in outside_loops


def test_stages_add_up_16_bits_in_float32_on_cpus() -> None:
    """XLA:CPU ends the process on sums of 16 bits among devices that are defined by a constrained scalar."""
    text = lower(mesh_of(stage=2, data=2, tensor=2), program(compute_dtype="bf16").to_json()).as_text()
    sums = re.findall(r'"stablehlo.all_reduce".*?stablehlo.return', text, re.DOTALL)
    constrained = [sum_ for sum_ in sums if "sharding_constraint" in sum_]
    assert any("tensor<f32>" in sum_ for sum_ in constrained)
    assert not [sum_ for sum_ in constrained if "tensor<bf16>" in sum_]


def test_stages_with_one_sequence_multiply_matrices() -> None:
    """XLA:TPU scatters the sums of products [T, D], and turns those of [1, T, D] into AllReduces."""
    of_one, of_two = (
        _operands(lower(mesh_of(**MIXED), program(microbatches=microbatches).to_json()).as_text())
        for microbatches in (4, 2)
    )
    assert ("4x16x32", "32x48") in of_two
    assert ("32x32", "32x48") in of_one
    # The gradients of weights are sums over both dims.
    assert {right[:5] for left, right in of_one if left.startswith("2x16x")} == {"2x16x"}


def _operands(stablehlo: str) -> set[tuple[str, str]]:
    """Shapes of both operands of every matmul."""
    return set(re.findall(r"stablehlo.dot_general .* : \(tensor<([\dx]+)xf32>, tensor<([\dx]+)xf32>\)", stablehlo))


def test_a_split_backward_pass_leaves_the_weights_matmuls_for_later() -> None:
    """Of y = tanh(x a) b, remat and all: the first part makes dx, the second da and db by one matmul each."""

    @jax.checkpoint
    def layer(a: jax.Array, b: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.tanh(x @ a) @ b

    def backward(dy: jax.Array, a: jax.Array, b: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        da, db, dx = jax.vjp(layer, a, b, x)[1](dy)
        return dx, da, db

    shapes = (3, 4), (4, 2), (5, 3), (5, 2)
    a, b, x, dy = (jax.random.normal(jax.random.key(at), shape) for at, shape in enumerate(shapes))
    traced = jax.make_jaxpr(backward)(dy, a, b, x)
    parts = split(traced, outputs_first=1, stays=[False, True, True, False])
    matmuls = [
        sum(equation.primitive.name == "dot_general" for equation in part.eqns) for part in (parts.first, parts.second)
    ]
    assert matmuls == [3, 2]
    dx, *saved = jaxpr_as_fun(parts.first)(dy, a, b, x)
    assert len(saved) == parts.residuals
    # Kept are x, dy, the hidden activations and their gradient, and nothing else.
    assert parts.residuals == 4
    gradients = (dx, *jaxpr_as_fun(parts.second)(a, b, *saved))
    assert largest_error(list(gradients), list(backward(dy, a, b, x))) < 1e-6


def test_program_of_a_plan_with_stages() -> None:
    slice_ = Slice.parse("v5e:4x4")
    workload = Workload(batch_tokens=2**19, seq_len=4096)
    problem = Problem(model=load_model("llama3-8b"), slice=slice_, workload=workload, schedule="interleaved", chunks=2)
    axes = {name: () for name in AXES} | dict(Mesh.from_layout(slice_, "stage=x,context=y").axes)
    choice = Choice(
        remat="block", microbatches=8, schedule="interleaved", chunks=2
    )  # fmt: skip
    trained_program = TrainProgram.from_plan(TrainingPlan(problem=problem, mesh=Mesh(slice_, axes), choice=choice))
    assert (trained_program.schedule, trained_program.chunks, trained_program.microbatches) == ("interleaved", 2, 8)
    assert trained_program.computation.context_attention == "all_gather"
    assert TrainProgram.from_json(trained_program.to_json()) == trained_program
