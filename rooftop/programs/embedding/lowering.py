"""Programs with embedding tables, lowered for described TPUs, for ``rooftop.compiler.compiling``."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import P, named_scope
from jax.sharding import NamedSharding
from jaxtyping import Array, Float32

from rooftop.core.errors import unknown
from rooftop.models.embedding_tables.files import tables_from_json
from rooftop.models.embedding_tables.limits import StackLimits, pointers_of_device
from rooftop.models.embedding_tables.stacking import Stacking, stack_tables
from rooftop.programs.embedding.buffers import LookupInputs, StackInputs
from rooftop.programs.embedding.dlrm import Dlrm, DlrmBatch, DlrmConfig, loss_gradients
from rooftop.programs.embedding.lookup import EmbeddingProgram, lookup, update
from rooftop.programs.embedding.pipeline import (
    DenseStep,
    Differentiated,
    LookedUp,
    ModelState,
    StepProgram,
    compiled_step,
    place_of,
)
from rooftop.programs.embedding.state import EmbeddingState, abstract_state, abstract_sums

#: Programs to lower: one part of a step, or a step of a DLRM.
PARTS: tuple[str, ...] = ("lookup", "update", "sequential", "pipelined")


def lower_part(mesh: jax.sharding.Mesh, arguments: Mapping[str, Any]) -> Any:
    """Lower a part of a step, or a step.

    ``arguments``: tables (as ``Tables.to_json``), cores_per_device, batch, limits by stack, part, kernel. ``only``
    names the stack of a lookup or update (all of them without). For a whole step ``dense`` is the number of dense
    features of a DLRM; without it, ``dense_flops`` is the work of a Tower. ``sample_passes`` is 1 by default. Raises
    RooftopError for an unknown part or stack.
    """
    part = arguments["part"]
    if part not in PARTS:
        raise unknown("part", part, PARTS)
    per_device = arguments["cores_per_device"]
    stacking = stack_tables(
        tables_from_json(arguments["tables"]),
        cores=per_device * mesh.size,
        cores_per_device=per_device,
        batch=arguments["batch"],
    )
    if "only" in arguments:
        stacking = dataclasses.replace(stacking, stacks=(stacking.stack(arguments["only"]),))
    names = {stack.name for stack in stacking.stacks}
    program = EmbeddingProgram(
        stacking=stacking,
        batch=arguments["batch"],
        limits={name: StackLimits(**limits) for name, limits in arguments["limits"].items() if name in names},
        minibatching=True,
        sample_passes=arguments.get("sample_passes", 1),
        kernel=arguments["kernel"],
    )
    state, inputs = abstract_embedding(program, mesh), abstract_inputs(program, mesh)
    activations = abstract_activations(program, mesh)
    with jax.set_mesh(mesh):
        if part == "lookup":
            return jax.jit(lookup, static_argnums=0).lower(program, state.tables, inputs)
        if part == "update":
            return jax.jit(
                update, static_argnums=0, donate_argnums=1, out_shardings=jax.tree.map(place_of, state)
            ).lower(program, state, inputs, activations)
        if "dense" in arguments:
            dense = abstract_dlrm(Dlrm(config=dlrm_config(stacking, arguments["dense"])), program.batch, mesh)
        else:
            dense = _tower(program, mesh, arguments)
        return _lower_step(program, state, inputs, activations, dense, part)


def abstract_embedding(program: EmbeddingProgram, mesh: jax.sharding.Mesh) -> EmbeddingState[jax.ShapeDtypeStruct]:
    """Shapes, shardings and layouts of the whole state of the tables."""
    state = abstract_state(program.stacking, mesh, program.kernel)
    return dataclasses.replace(state, sums=abstract_sums(program.stacking, mesh, program.summed))


def abstract_inputs(program: EmbeddingProgram, mesh: jax.sharding.Mesh) -> LookupInputs:
    """Shapes of buffers laid out for minibatches."""
    stacking = program.stacking
    split = NamedSharding(mesh, P(mesh.axis_names))
    pointers = pointers_of_device(stacking.cores, stacking.cores_per_device, minibatching=True)

    def array(size: int, dtype: Any) -> Any:
        return jax.ShapeDtypeStruct((mesh.size, size), dtype, sharding=split)

    stacks = {}
    for stack in stacking.stacks:
        entries = program.limits[stack.name].buffer * stacking.cores_per_device
        stacks[stack.name] = StackInputs(
            row_pointers=array(pointers, jnp.int32),
            embedding_ids=array(entries, jnp.int32),
            sample_ids=array(entries, jnp.int32),
            gains=array(entries, jnp.float32),
        )
    passes: Any = jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(mesh, P()))
    return LookupInputs(stacks=stacks, passes=passes)


def abstract_activations(program: EmbeddingProgram, mesh: jax.sharding.Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of activations by feature."""
    split = NamedSharding(mesh, P(mesh.axis_names))
    tables = program.stacking.tables
    return {
        feature.name: jax.ShapeDtypeStruct(
            (program.batch, *(() if feature.length is None else (feature.length,)), tables.table(feature.table).width),
            jnp.float32,
            sharding=split,
        )
        for stack in program.stacking.stacks
        for feature in stack.features
    }


@dataclass(frozen=True, kw_only=True)
class Dense:
    """The dense part of a step, and the shapes of its state and of a batch."""

    model: DenseStep
    state: Any
    batch: Any


def abstract_dlrm(model: Dlrm, samples: int, mesh: jax.sharding.Mesh) -> Dense:
    """A DLRM on ``mesh``, and a batch of ``samples``."""
    whole, split = NamedSharding(mesh, P()), NamedSharding(mesh, P(mesh.axis_names))
    state = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole),
        jax.eval_shape(lambda: model.begin(0)),
    )
    batch = DlrmBatch(
        dense=jax.ShapeDtypeStruct((samples, model.config.dense_features), jnp.float32, sharding=split),
        label=jax.ShapeDtypeStruct((samples,), jnp.float32, sharding=split),
    )
    return Dense(model=model, state=state, batch=batch)


def _tower(program: EmbeddingProgram, mesh: jax.sharding.Mesh, arguments: Mapping[str, Any]) -> Dense:
    tables = program.stacking.tables
    features = tuple((feature.name, tables.table(feature.table).width) for feature in tables.features)
    model = Tower(features=features, flops=arguments["dense_flops"])
    whole, split = NamedSharding(mesh, P()), NamedSharding(mesh, P(mesh.axis_names))
    state = [jax.ShapeDtypeStruct(shape, jnp.float32, sharding=whole) for shape in model.shapes()]
    return Dense(model=model, state=state, batch=jax.ShapeDtypeStruct((program.batch,), jnp.float32, sharding=split))


def _lower_step(
    program: EmbeddingProgram,
    state: EmbeddingState[jax.ShapeDtypeStruct],
    inputs: LookupInputs,
    activations: dict[str, jax.ShapeDtypeStruct],
    dense: Dense,
    part: str,
) -> Any:
    model_state: ModelState[Any] = ModelState(embedding=state, dense=dense.state)
    if part == "pipelined":
        model_state = dataclasses.replace(
            model_state,
            looked_up=LookedUp(inputs=inputs, activations=activations, batch=dense.batch),
            differentiated=Differentiated(inputs=inputs, gradients=activations),
        )
    both = StepProgram(embedding=program, dense=dense.model)
    step = compiled_step(both, model_state, inputs, dense.batch, pipelined=part == "pipelined")
    return step.lower(both, model_state, inputs, dense.batch)


def dlrm_config(stacking: Stacking, dense_features: int) -> DlrmConfig:
    """A DLRM over all features of the tables, which have one width."""
    tables = stacking.tables
    return DlrmConfig(
        dense_features=dense_features,
        features=tuple(feature.name for feature in tables.features),
        width=tables.tables[0].width,
    )


#: Layers: from the activations to H, from H to H, and to one logit.
_SQUARE = 2
_EIGHT = 8


@dataclass(frozen=True, kw_only=True)
class Tower:
    """A DenseStep of ``rooftop.programs.embedding.pipeline``, of about ``flops`` matmul FLOPs per sample, forward.

    ``features`` are (name, width) of the looked-up activations. Positions of a sequence are averaged. The loss is the
    mean squared error to ``batch``, minimised by gradient descent.
    """

    features: tuple[tuple[str, int], ...]
    flops: float

    @property
    def inputs(self) -> int:
        """Floats of a sample: the widths of all features."""
        return sum(width for _, width in self.features)

    @property
    def width(self) -> int:
        """H with 2 (inputs H + 2 H^2) FLOPs, a multiple of 8, at least 8."""
        inputs, products = self.inputs, self.flops / 2
        exact = (math.sqrt(inputs**2 + 4 * _SQUARE * products) - inputs) / (2 * _SQUARE)
        return max(_EIGHT, round(exact / _EIGHT) * _EIGHT)

    @property
    def flops_per_sample(self) -> int:
        """Matmul FLOPs of a sample, forward, with the chosen width."""
        return 2 * (self.inputs * self.width + _SQUARE * self.width**2 + self.width)

    def shapes(self) -> list[tuple[int, int]]:
        """Shapes of the weights, first layer first."""
        return [(self.inputs, self.width), *[(self.width, self.width)] * _SQUARE, (self.width, 1)]

    def __call__(
        self, dense: list[jax.Array], activations: dict[str, jax.Array], batch: Float32[Array, " B"]
    ) -> tuple[list[jax.Array], dict[str, jax.Array], jax.Array]:
        """New weights, the activations' gradients, and the loss; weights are on every device, samples split."""

        def loss(weights: list[jax.Array], activations: dict[str, jax.Array], batch: jax.Array) -> jax.Array:
            pooled = [activations[name] for name, _ in self.features]
            x = jnp.concatenate([y.mean(1) if y.ndim == 3 else y for y in pooled], axis=1)
            for weight in weights[:-1]:
                x = jax.nn.relu(x @ weight)
            return jnp.mean(((x @ weights[-1])[:, 0] - batch) ** 2)

        gradients, of_activations, value = loss_gradients(loss, dense, activations, batch)
        with named_scope("optimizer"):
            return [weight - 1e-3 * own for weight, own in zip(dense, gradients, strict=True)], of_activations, value
