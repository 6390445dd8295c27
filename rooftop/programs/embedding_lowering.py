"""Programs with embedding tables lowered for described TPUs: what ``rooftop.xla.compiling`` compiles."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import P
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding

from rooftop.errors import unknown
from rooftop.models.tables_files import tables_from_json
from rooftop.models.tables_limits import StackLimits, pointers_of_device
from rooftop.models.tables_stacking import ALIGNMENT, Stacking, stack_tables
from rooftop.programs.dlrm import Dlrm, DlrmBatch, DlrmConfig
from rooftop.programs.embedding import EmbeddingProgram, lookup, update
from rooftop.programs.embedding_buffers import LookupInputs, StackInputs
from rooftop.programs.embedding_pipeline import (
    DenseStep,
    Differentiated,
    LookedUp,
    ModelState,
    StepProgram,
    pipelined_step,
    sequential_step,
)
from rooftop.programs.embedding_state import EmbeddingState, abstract_state
from rooftop.programs.tower import Tower

#: What may be lowered: one part of a step, or a step of a DLRM.
PARTS: tuple[str, ...] = ("lookup", "update", "sequential", "pipelined")


def lower_part(mesh: jax.sharding.Mesh, arguments: Mapping[str, Any]) -> Any:
    """``arguments``: tables (as ``Tables.to_json``), cores_per_device, batch, limits by stack, part, kernel; dense.

    ``only`` names the stack that a lookup or update is of (all of them without). For a whole step ``dense`` is the
    number of dense features of a DLRM, or, without, ``dense_flops`` what a Tower computes. Raises RooftopError for an
    unknown part or stack.
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
        limits={name: StackLimits(**one) for name, one in arguments["limits"].items() if name in names},
        minibatching=True,
        kernel=arguments["kernel"],
    )
    state, inputs = as_stored(abstract_state(stacking, mesh)), abstract_inputs(program, mesh)
    activations = abstract_activations(program, mesh)
    with jax.set_mesh(mesh):
        if part == "lookup":
            return jax.jit(lookup, static_argnums=0).lower(program, state.tables, inputs)
        if part == "update":
            return _lower_as_stored(update, program, state, inputs, activations)
        dense = _dlrm(program, mesh, arguments["dense"]) if "dense" in arguments else _tower(program, mesh, arguments)
        return _lower_step(program, state, inputs, activations, dense, part)


def abstract_inputs(program: EmbeddingProgram, mesh: jax.sharding.Mesh) -> LookupInputs:
    """Shapes of buffers that are laid out for minibatches."""
    stacking = program.stacking
    split = NamedSharding(mesh, P(mesh.axis_names))
    pointers = pointers_of_device(stacking.cores, stacking.cores_per_device, minibatching=True)

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
        for stack in program.stacking.stacks
        for feature in stack.features
    }


@dataclass(frozen=True, kw_only=True)
class _Dense:
    """The dense part of a step, and the shapes of its state and of a batch."""

    model: DenseStep
    state: Any
    batch: Any


def _dlrm(program: EmbeddingProgram, mesh: jax.sharding.Mesh, features: int) -> _Dense:
    model = Dlrm(config=dlrm_config(program.stacking, features))
    whole, split = NamedSharding(mesh, P()), NamedSharding(mesh, P(mesh.axis_names))
    state = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole),
        jax.eval_shape(lambda: model.begin(0)),
    )
    batch = DlrmBatch(
        dense=jax.ShapeDtypeStruct((program.batch, features), jnp.float32, sharding=split),
        label=jax.ShapeDtypeStruct((program.batch,), jnp.float32, sharding=split),
    )
    return _Dense(model=model, state=state, batch=batch)


def _tower(program: EmbeddingProgram, mesh: jax.sharding.Mesh, arguments: Mapping[str, Any]) -> _Dense:
    tables = program.stacking.tables
    features = tuple((feature.name, tables.table(feature.table).width) for feature in tables.features)
    model = Tower(features=features, flops=arguments["dense_flops"])
    whole, split = NamedSharding(mesh, P()), NamedSharding(mesh, P(mesh.axis_names))
    state = [jax.ShapeDtypeStruct(shape, jnp.float32, sharding=whole) for shape in model.shapes()]
    return _Dense(model=model, state=state, batch=jax.ShapeDtypeStruct((program.batch,), jnp.float32, sharding=split))


def _lower_step(
    program: EmbeddingProgram,
    state: EmbeddingState[jax.ShapeDtypeStruct],
    inputs: LookupInputs,
    activations: dict[str, jax.ShapeDtypeStruct],
    dense: _Dense,
    part: str,
) -> Any:
    held: ModelState[Any] = ModelState(embedding=state, dense=dense.state)
    if part == "pipelined":
        held = ModelState(
            embedding=state,
            dense=dense.state,
            looked_up=LookedUp(inputs=inputs, activations=activations, batch=dense.batch),
            differentiated=Differentiated(inputs=inputs, gradients=activations),
        )
    step = pipelined_step if part == "pipelined" else sequential_step
    both = StepProgram(embedding=program, dense=dense.model)
    return _lower_as_stored(step, both, held, inputs, dense.batch)


def as_stored(state: EmbeddingState[jax.ShapeDtypeStruct]) -> EmbeddingState[jax.ShapeDtypeStruct]:
    """The state's shapes as SparseCores read tables: [C rows, W], row after row, without a float of padding.

    In the TensorCores' layout a row of 64 floats fills 128, and every step would copy all tables to it and back.
    """
    rows = Layout(major_to_minor=(0, 1), tiling=((ALIGNMENT,),))

    def stored(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        if not leaf.ndim:
            return leaf
        shape = (leaf.shape[0] * leaf.shape[1], leaf.shape[2])
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=Format(rows, leaf.sharding))

    return jax.tree.map(stored, state)


def _lower_as_stored(step: Callable[..., Any], program: Any, state: Any, *arguments: Any) -> Any:
    """``step`` lowered so that what it makes of ``state``, which is donated, is laid out as it was."""
    held = {(leaf.shape, leaf.dtype): leaf.format for leaf in jax.tree.leaves(state) if leaf.format.layout is not None}
    made = jax.eval_shape(lambda *given: step(program, *given), state, *arguments)
    out = jax.tree.map(lambda leaf: held.get((leaf.shape, leaf.dtype)), made)
    return jax.jit(step, static_argnums=0, donate_argnums=1, out_shardings=out).lower(program, state, *arguments)


def dlrm_config(stacking: Stacking, dense_features: int) -> DlrmConfig:
    """A DLRM over all features of the tables, which have one width."""
    tables = stacking.tables
    return DlrmConfig(
        dense_features=dense_features,
        features=tuple(feature.name for feature in tables.features),
        width=tables.tables[0].width,
    )
