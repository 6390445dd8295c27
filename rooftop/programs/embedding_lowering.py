"""Programs with embedding tables lowered for described TPUs: what ``rooftop.xla.compiling`` compiles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import P
from jax.sharding import NamedSharding

from rooftop.errors import unknown
from rooftop.models.tables_files import tables_from_json
from rooftop.models.tables_stacking import ALIGNMENT, Stacking, stack_tables
from rooftop.programs.dlrm import Dlrm, DlrmBatch, DlrmConfig
from rooftop.programs.embedding import EmbeddingProgram, lookup, update
from rooftop.programs.embedding_buffers import LookupInputs, StackInputs
from rooftop.programs.embedding_pipeline import (
    Differentiated,
    LookedUp,
    ModelState,
    StepProgram,
    pipelined_step,
    sequential_step,
)
from rooftop.programs.embedding_state import EmbeddingState, abstract_state

#: What may be lowered: one part of a step, or a step of a DLRM.
PARTS: tuple[str, ...] = ("lookup", "update", "sequential", "pipelined")
#: Buckets of ids by which minibatches are made: so many row pointers a partition has room for.
_BUCKETS = 64


@dataclass(frozen=True, kw_only=True)
class _Limits:
    max_ids: int
    max_unique_ids: int
    buffer: int


def lower_part(mesh: jax.sharding.Mesh, arguments: Mapping[str, Any]) -> Any:
    """``arguments``: tables (as ``Tables.to_json``), cores_per_device, batch, limits by stack, part, kernel; dense.

    ``dense`` is the number of dense features of the DLRM, for a whole step. Raises RooftopError for an unknown part.
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
    program = EmbeddingProgram(
        stacking=stacking,
        batch=arguments["batch"],
        limits={name: _Limits(**one) for name, one in arguments["limits"].items()},
        minibatching=True,
        kernel=arguments["kernel"],
    )
    state, inputs = abstract_state(stacking, mesh), abstract_inputs(program, mesh)
    activations = abstract_activations(program, mesh)
    with jax.set_mesh(mesh):
        if part == "lookup":
            return jax.jit(lookup, static_argnums=0).lower(program, state.tables, inputs)
        if part == "update":
            return jax.jit(update, static_argnums=0, donate_argnums=1).lower(program, state, inputs, activations)
        return _lower_step(program, state, inputs, activations, mesh, arguments["dense"], part)


def abstract_inputs(program: EmbeddingProgram, mesh: jax.sharding.Mesh) -> LookupInputs:
    """Shapes of buffers that are laid out for minibatches."""
    stacking = program.stacking
    split = NamedSharding(mesh, P(mesh.axis_names))
    pointers = max(stacking.cores, ALIGNMENT) * stacking.cores_per_device * _BUCKETS

    def array(size: int, dtype: Any) -> Any:
        return jax.ShapeDtypeStruct((mesh.size, size), dtype, sharding=split)

    stacks = {}
    for stack in stacking.stacks:
        places = program.limits[stack.name].buffer * stacking.cores_per_device
        stacks[stack.name] = StackInputs(
            row_pointers=array(pointers, jnp.int32),
            embedding_ids=array(places, jnp.int32),
            sample_ids=array(places, jnp.int32),
            gains=array(places, jnp.float32),
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
        for feature in tables.features
    }


def _lower_step(
    program: EmbeddingProgram,
    state: EmbeddingState[jax.ShapeDtypeStruct],
    inputs: LookupInputs,
    activations: dict[str, jax.ShapeDtypeStruct],
    mesh: jax.sharding.Mesh,
    dense_features: int,
    part: str,
) -> Any:
    model = Dlrm(config=dlrm_config(program.stacking, dense_features))
    whole, split = NamedSharding(mesh, P()), NamedSharding(mesh, P(mesh.axis_names))
    dense = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole),
        jax.eval_shape(lambda: model.begin(0)),
    )
    batch = DlrmBatch(
        dense=jax.ShapeDtypeStruct((program.batch, dense_features), jnp.float32, sharding=split),
        label=jax.ShapeDtypeStruct((program.batch,), jnp.float32, sharding=split),
    )
    held: ModelState[Any] = ModelState(embedding=state, dense=dense)
    if part == "pipelined":
        held = ModelState(
            embedding=state,
            dense=dense,
            looked_up=LookedUp(inputs=inputs, activations=activations, batch=batch),
            differentiated=Differentiated(inputs=inputs, gradients=activations),
        )
    step = pipelined_step if part == "pipelined" else sequential_step
    both = StepProgram(embedding=program, dense=model)
    return jax.jit(step, static_argnums=0, donate_argnums=1).lower(both, held, inputs, batch)


def dlrm_config(stacking: Stacking, dense_features: int) -> DlrmConfig:
    """A DLRM over all features of the tables, which have one width."""
    tables = stacking.tables
    return DlrmConfig(
        dense_features=dense_features,
        features=tuple(feature.name for feature in tables.features),
        width=tables.tables[0].width,
    )
