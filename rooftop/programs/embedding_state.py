"""The state of embedding tables on a mesh: stacks and optimizer slots, begun, placed, described; and a step's inputs.

Dims as in ``rooftop.programs.embedding``. Every array is split over all axes of the mesh by its first dim. Tables lie
as the ``kernel`` that reads them (``embedding.KERNELS``) wants them: [C, rows, W] for the reference, and for
SparseCores [C rows, W], on TPUs row after row without a float of padding. In the TensorCores' layout a row of 64 floats
fills 128, and every step would copy all tables to SparseCores and back.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic

import jax
import jax.numpy as jnp
import numpy as np
from jax import P
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding

from rooftop.models.tables import Initializer
from rooftop.models.tables_stacking import ALIGNMENT, Place, Stack, Stacking, pack
from rooftop.programs.embedding_buffers import LookupInputs, StackInputs
from rooftop.programs.embedding_optimizers import initial_slots
from rooftop.programs.embedding_sparsecore import NO_SUM
from rooftop.programs.parameters import Leaf


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class EmbeddingState(Generic[Leaf]):
    """Tables by stack, [C, rows, W] or [C rows, W], optimizer slots likewise, and the updates so far (int32 scalar).

    ``sums`` [C rows, W] are of the stacks that ``EmbeddingProgram.summed`` names: NO_SUM between two steps, so that no
    checkpoint has them.
    """

    step: Leaf
    tables: dict[str, Leaf]
    slots: dict[str, tuple[Leaf, ...]]
    sums: dict[str, Leaf] = field(default_factory=dict)


def initialise(
    stacking: Stacking, mesh: jax.sharding.Mesh, seed: int, kernel: str = "reference"
) -> EmbeddingState[jax.Array]:
    """Tables as their initialisers say, and slots, split over all axes of ``mesh``, for ``kernel``.

    Made on the host and sent, or on the devices, as the config says: of the same distributions, with other values. A
    table's values depend on ``seed`` and its name: not on stacking, nor on how many SparseCores there are.
    """
    if not stacking.tables.config.initialized_on_host:
        with jax.set_mesh(mesh):
            made, slots = begin_on_devices(stacking, mesh, seed, kernel)()
        return EmbeddingState(step=_count(mesh, 0), tables=made, slots=slots)
    tables = {
        table.name: _begin(
            table.initializer,
            (table.vocabulary, table.width),
            np.random.default_rng([seed, zlib.crc32(table.name.encode())]),
        )
        for table in stacking.tables.tables
    }
    return place_state(stacking, mesh, pack(stacking, tables), _first_slots(stacking), 0, kernel)


def place_state(
    stacking: Stacking,
    mesh: jax.sharding.Mesh,
    tables: Mapping[str, np.ndarray[Any, Any]],
    slots: Mapping[str, tuple[np.ndarray[Any, Any], ...]],
    step: int,
    kernel: str = "reference",
) -> EmbeddingState[jax.Array]:
    """Stacks and slots of the host, [C, rows, W] each, on the devices of ``mesh`` for ``kernel``."""
    where = table_format(mesh, kernel)

    def place(array: np.ndarray[Any, Any]) -> jax.Array:
        return jax.device_put(array.reshape(stored_shape(array.shape, kernel)), where)

    return EmbeddingState(
        step=_count(mesh, step),
        tables={stack.name: place(tables[stack.name]) for stack in stacking.stacks},
        slots={stack.name: tuple(place(slot) for slot in slots[stack.name]) for stack in stacking.stacks},
    )


def host_state(
    stacking: Stacking, state: EmbeddingState[jax.Array]
) -> tuple[dict[str, np.ndarray[Any, Any]], dict[str, tuple[np.ndarray[Any, Any], ...]]]:
    """Stacks and slots on the host, [C, rows, W] each, for whichever kernel they lie on the devices."""

    def fetch(array: jax.Array) -> np.ndarray[Any, Any]:
        return np.asarray(array).reshape(stacking.cores, -1, array.shape[-1])

    return (
        {name: fetch(table) for name, table in state.tables.items()},
        {name: tuple(fetch(slot) for slot in own) for name, own in state.slots.items()},
    )


def abstract_state(
    stacking: Stacking, mesh: jax.sharding.Mesh, kernel: str = "reference"
) -> EmbeddingState[jax.ShapeDtypeStruct]:
    """Shapes, shardings and layouts of the state for ``kernel``."""
    where = table_format(mesh, kernel)

    def array(stack: Stack, width: int) -> jax.ShapeDtypeStruct:
        shape = stored_shape((stacking.cores, stack.rows, width), kernel)
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=where)

    return EmbeddingState(
        step=jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(mesh, P())),
        tables={stack.name: array(stack, stack.width) for stack in stacking.stacks},
        slots={
            stack.name: tuple(array(stack, width) for width in stack.optimizer.slots(stack.width))
            for stack in stacking.stacks
        },
    )


def begin_sums(stacking: Stacking, mesh: jax.sharding.Mesh, stacks: Iterable[str]) -> dict[str, jax.Array]:
    """``sums`` of these ``stacks`` for a state on the devices of ``mesh``, begun where they lie."""
    where = table_format(mesh, "sparsecore")

    def begin() -> dict[str, jax.Array]:
        shapes = abstract_sums(stacking, mesh, stacks)
        return {name: jnp.full(one.shape, NO_SUM, one.dtype) for name, one in shapes.items()}

    made: dict[str, jax.Array] = jax.jit(begin, out_shardings=where)()
    return made


def abstract_sums(
    stacking: Stacking, mesh: jax.sharding.Mesh, stacks: Iterable[str]
) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes, shardings and layouts of ``sums``: those of the tables, as SparseCores read them."""
    tables = abstract_state(stacking, mesh, "sparsecore").tables
    return {name: tables[name] for name in stacks}


def table_format(mesh: jax.sharding.Mesh, kernel: str) -> NamedSharding | Format:
    """How tables and slots lie on the devices of ``mesh`` for ``kernel``; other devices than TPUs choose themselves."""
    split = NamedSharding(mesh, P(mesh.axis_names))
    if kernel != "sparsecore" or mesh.devices.flat[0].platform != "tpu":
        return split
    return Format(Layout(major_to_minor=(0, 1), tiling=((ALIGNMENT,),)), split)


def stored_shape(shape: tuple[int, ...], kernel: str) -> tuple[int, ...]:
    """The shape in which an array [C, rows, W] lies on the devices for ``kernel``."""
    return (shape[0] * shape[1], shape[2]) if kernel == "sparsecore" else shape


def device_inputs(buffers: Mapping[str, Any], passes: int, mesh: jax.sharding.Mesh) -> LookupInputs:
    """Preprocessed ``buffers`` (``rooftop.embed.host.buffers.Buffers`` by stack) on the devices of ``mesh``.

    The arrays are copied: the caller may write the buffers again.
    """
    split = NamedSharding(mesh, P(mesh.axis_names))
    names = ("row_pointers", "embedding_ids", "sample_ids", "gains")
    return LookupInputs(
        stacks={
            stack: StackInputs(**{name: jax.device_put(np.array(getattr(one, name)), split) for name in names})
            for stack, one in buffers.items()
        },
        passes=jax.device_put(np.int32(passes), NamedSharding(mesh, P())),
    )


def begin_on_devices(stacking: Stacking, mesh: jax.sharding.Mesh, seed: int, kernel: str) -> jax.stages.Wrapped:
    """What makes tables and slots: each device its own rows, from keys of seed, table and row. Nothing is sent.

    It runs under ``jax.set_mesh``.
    """
    axes, own = mesh.axis_names, stacking.cores_per_device

    def local() -> tuple[dict[str, jax.Array], dict[str, tuple[jax.Array, ...]]]:
        cores = jax.lax.axis_index(axes) * own + jnp.arange(own)
        tables, slots = {}, {}
        for stack in stacking.stacks:
            parts = [_rows_of(stacking, place, cores, stack.width, seed) for place in stack.places]
            made = jnp.concatenate(parts, axis=1)
            tables[stack.name] = made.reshape(stored_shape(made.shape, kernel))
            slots[stack.name] = tuple(
                jnp.full(stored_shape((own, stack.rows, width), kernel), value, jnp.float32)
                for width, value in zip(stack.optimizer.slots(stack.width), initial_slots(stack.optimizer), strict=True)
            )
        return tables, slots

    mapped = jax.shard_map(local, mesh=mesh, in_specs=(), out_specs=P(axes), check_vma=False)
    return jax.jit(mapped, out_shardings=table_format(mesh, kernel))


def _count(mesh: jax.sharding.Mesh, step: int) -> jax.Array:
    return jax.device_put(np.int32(step), NamedSharding(mesh, P()))


def _rows_of(stacking: Stacking, place: Place, cores: jax.Array, width: int, seed: int) -> jax.Array:
    """The rows [P, rows, W] of a table on SparseCores ``cores`` [P], padding zero."""
    table, initializer = place.table, place.table.initializer
    table_key = jax.random.fold_in(jax.random.key(seed), zlib.crc32(table.name.encode()))
    first = (cores - place.rotation) % stacking.cores
    ids = jnp.arange(place.rows)[None, :] * stacking.cores + first[:, None]

    def row(index: jax.Array) -> jax.Array:
        key, shape = jax.random.fold_in(table_key, index), (table.width,)
        if initializer.kind == "constant":
            return jnp.full(shape, initializer["value"], jnp.float32)
        if initializer.kind == "uniform":
            return jax.random.uniform(key, shape, jnp.float32, initializer["low"], initializer["high"])
        drawn = (
            jax.random.truncated_normal(key, -2.0, 2.0, shape)
            if initializer.kind == "truncated_normal"
            else jax.random.normal(key, shape)
        )
        return initializer["mean"] + initializer["stddev"] * drawn

    made = jnp.where((ids < table.vocabulary)[..., None], jax.vmap(jax.vmap(row))(ids), 0.0)
    return jnp.pad(made, ((0, 0), (0, 0), (0, width - table.width)))


def _begin(
    initializer: Initializer, shape: tuple[int, ...], random: np.random.Generator
) -> np.ndarray[Any, np.dtype[np.float32]]:
    if initializer.kind == "constant":
        return np.full(shape, initializer["value"], np.float32)
    if initializer.kind == "uniform":
        low, high = initializer["low"], initializer["high"]
        return (low + (high - low) * random.random(shape, np.float32)).astype(np.float32)
    found = random.standard_normal(shape, np.float32)
    if initializer.kind == "truncated_normal":
        while (far := np.abs(found) > 2).any():
            found[far] = random.standard_normal(int(far.sum()), np.float32)
    return (initializer["mean"] + initializer["stddev"] * found).astype(np.float32)


def _first_slots(stacking: Stacking) -> dict[str, tuple[np.ndarray[Any, Any], ...]]:
    return {
        stack.name: tuple(
            np.full((stacking.cores, stack.rows, width), value, np.float32)
            for width, value in zip(stack.optimizer.slots(stack.width), initial_slots(stack.optimizer), strict=True)
        )
        for stack in stacking.stacks
    }
