"""One optimizer step of the dense decoder: loss, gradients, AdamW; and how to lower it for any mesh."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic

import jax
import jax.numpy as jnp
from jax import P, named_scope
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from rooftop.arrays.rules import Rules
from rooftop.errors import RooftopError, unknown
from rooftop.models import ModelConfig
from rooftop.programs.parameters import Batch, Leaf, Parameter, Transformer, abstract, describe, initialise
from rooftop.programs.sharding import Specs
from rooftop.programs.transformer import loss

_DTYPES = {"bf16": jnp.bfloat16, "f32": jnp.float32}


@dataclass(frozen=True, kw_only=True)
class AdamW:
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019); norms' scales do not decay."""

    learning_rate: float = 3e-4
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class TrainState(Generic[Leaf]):
    """What a step reads and writes: step (int32 scalar), weights and both moments (float32)."""

    step: Leaf
    weights: Transformer[Leaf]
    first_moment: Transformer[Leaf]
    second_moment: Transformer[Leaf]


@dataclass(frozen=True, kw_only=True)
class TrainProgram:
    """All that decides the step, the mesh excepted. ``batch`` is B, in sequences of ``seq_len`` T; see ``loss``."""

    model: ModelConfig
    batch: int
    seq_len: int
    remat: str = "block"
    loss_chunks: int = 1
    compute_dtype: str = "bf16"
    optimizer: AdamW = AdamW()
    rules: Rules = Rules()

    def __post_init__(self) -> None:
        if self.compute_dtype not in _DTYPES:
            raise unknown("compute_dtype", self.compute_dtype, _DTYPES)

    def to_json(self) -> dict[str, Any]:
        """The program as plain JSON values."""
        return dataclasses.asdict(self) | {"model": self.model.to_json(), "rules": self.rules.to_json()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> TrainProgram:
        """The inverse of ``to_json``. Raises RooftopError on a field that a program does not have."""
        fields = dict(data)
        try:
            fields["model"] = ModelConfig.from_json(fields["model"])
            if "optimizer" in fields:
                fields["optimizer"] = AdamW(**fields["optimizer"])
            if "rules" in fields:
                fields["rules"] = Rules.from_json(fields["rules"])
            return cls(**fields)
        except (TypeError, KeyError) as error:
            raise RooftopError("train program", sorted(data), f"the fields of a TrainProgram ({error})") from None

    def specs(self, mesh: Mesh | AbstractMesh) -> Specs:
        """The specs of arrays on ``mesh``: the rules without the axes that split nothing there."""
        return Specs(self.rules.only({axis: size for axis, size in mesh.shape.items() if size > 1}))


def init_state(program: TrainProgram, key: jax.Array, mesh: Mesh) -> TrainState[jax.Array]:
    """The state before the first step, every array made in its shards."""
    weights = initialise(describe(program.model), key, mesh, program.specs(mesh))
    with jax.set_mesh(mesh):
        zeros = jax.jit(lambda weights: jax.tree.map(jnp.zeros_like, weights))
        step = jax.device_put(jnp.zeros((), jnp.int32), NamedSharding(mesh, P()))
        return TrainState(step=step, weights=weights, first_moment=zeros(weights), second_moment=zeros(weights))


def abstract_state(program: TrainProgram, mesh: Mesh | AbstractMesh) -> TrainState[jax.ShapeDtypeStruct]:
    """Shapes and shardings of the state, with no memory behind them."""
    weights = abstract(describe(program.model), mesh, program.specs(mesh))
    step = jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(mesh, P()))
    return TrainState(step=step, weights=weights, first_moment=weights, second_moment=weights)


def abstract_batch(program: TrainProgram, mesh: Mesh | AbstractMesh) -> Batch[jax.ShapeDtypeStruct]:
    """Shapes and shardings of one global batch. Raises RooftopError when it does not divide over the mesh."""
    specs = program.specs(mesh)
    for name, dim, size in (("batch", "batch", program.batch), ("seq_len", "residual_seq", program.seq_len)):
        axes = specs.rules.activations[dim]
        ways = math.prod(mesh.shape[axis] for axis in axes)
        if size % ways:
            raise RooftopError(name, size, f"a multiple of {ways} (mesh axes {', '.join(axes)})")
    ids = jax.ShapeDtypeStruct(
        (program.batch, program.seq_len), jnp.int32, sharding=NamedSharding(mesh, specs.activation("batch", "seq"))
    )
    return Batch(tokens=ids, targets=ids)


def train_step(
    program: TrainProgram, specs: Specs
) -> Callable[[TrainState[jax.Array], Batch[jax.Array]], tuple[TrainState[jax.Array], jax.Array]]:
    """The step: (state, batch) -> (state, loss). To be jitted under ``jax.set_mesh``, the state donated."""
    described = describe(program.model)

    def step(state: TrainState[jax.Array], batch: Batch[jax.Array]) -> tuple[TrainState[jax.Array], jax.Array]:
        value, gradients = jax.value_and_grad(loss)(
            state.weights,
            batch,
            program.model,
            specs,
            remat=program.remat,
            loss_chunks=program.loss_chunks,
            dtype=jnp.dtype(_DTYPES[program.compute_dtype]),
        )
        with named_scope("optimizer"):
            return _adamw(program.optimizer, described, state, gradients), value

    return step


def _adamw(
    optimizer: AdamW, described: Transformer[Parameter], state: TrainState[jax.Array], gradients: Transformer[jax.Array]
) -> TrainState[jax.Array]:
    """One AdamW update, elementwise in float32 on each weight's shards."""
    step = state.step + 1
    first_correction = 1 - optimizer.b1 ** step.astype(jnp.float32)
    second_correction = 1 - optimizer.b2 ** step.astype(jnp.float32)

    def update(
        parameter: Parameter, value: jax.Array, first: jax.Array, second: jax.Array, gradient: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        first = optimizer.b1 * first + (1 - optimizer.b1) * gradient
        second = optimizer.b2 * second + (1 - optimizer.b2) * jnp.square(gradient)
        change = first / first_correction / (jnp.sqrt(second / second_correction) + optimizer.eps)
        if parameter.fan_in is not None:
            change = change + optimizer.weight_decay * value
        return value - optimizer.learning_rate * change, first, second

    updated = jax.tree.map(update, described, state.weights, state.first_moment, state.second_moment, gradients)
    weights, first, second = jax.tree.transpose(jax.tree.structure(described), jax.tree.structure((0, 0, 0)), updated)
    return TrainState(step=step, weights=weights, first_moment=first, second_moment=second)


def lower(mesh: Mesh, arguments: Mapping[str, Any]) -> jax.stages.Lowered:
    """The step lowered for ``mesh``, whose devices need not be here; ``arguments`` is a TrainProgram in JSON.

    Raises RooftopError for a program that does not fit the mesh.
    """
    program = TrainProgram.from_json(arguments)
    with jax.set_mesh(mesh):
        step = jax.jit(train_step(program, program.specs(mesh)), donate_argnums=0)
        return step.lower(abstract_state(program, mesh), abstract_batch(program, mesh))
