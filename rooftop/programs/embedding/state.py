"""The state of embedding tables on a mesh: stacks and optimizer slots, initialised, placed and described; step inputs.

Dims as in ``lookup``. Every array is split over all axes of the mesh by its first dim. The layout of tables depends on
the ``kernel`` that reads them (``lookup.KERNELS``): [C, rows, W] for the reference, and [C rows, W] for SparseCores, on
TPUs row after row without padding. In the TensorCores' layout a row of 64 floats fills 128, and every step would copy
all tables to SparseCores and back.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import P
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding
from jaxtyping import Array, Float32, Int

from rooftop.models.embedding_tables.stacking import ALIGNMENT, Stack, Stacking, StackPlace, pack
from rooftop.models.embedding_tables.tables import Initializer
from rooftop.programs.embedding.buffers import LookupInputs, StackInputs
from rooftop.programs.embedding.optimizers import initial_slots
from rooftop.programs.embedding.sparsecore import NO_SUM
from rooftop.programs.parameters import Leaf


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class EmbeddingState(Generic[Leaf]):
    """Tables by stack, [C, rows, W] or [C rows, W], optimizer slots likewise, and the number of updates (int32 scalar).

    ``sums`` [C rows, W] belong to the stacks of ``EmbeddingProgram.summed``. They are NO_SUM between two steps, so that
    checkpoints do not contain them.
    """

    step: Leaf
    tables: dict[str, Leaf]
    slots: dict[str, tuple[Leaf, ...]]
    sums: dict[str, Leaf] = field(default_factory=dict)


def initialise(
    stacking: Stacking, mesh: jax.sharding.Mesh, seed: int, kernel: str = "reference"
) -> EmbeddingState[jax.Array]:
    """Tables and slots with their initial values, split over all axes of ``mesh``, for ``kernel``.

    They are created on the host and sent, or on the devices, as the config says: the same distributions, other values.
    A table's values depend on ``seed`` and its name, and not on stacking or the number of SparseCores.
    """
    if not stacking.tables.config.initialized_on_host:
        with jax.set_mesh(mesh):
            device_tables, slots = begin_on_devices(stacking, mesh, seed, kernel)()
        return EmbeddingState(step=_count(mesh, 0), tables=device_tables, slots=slots)
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
    tables: Mapping[str, npt.NDArray[Any]],
    slots: Mapping[str, tuple[npt.NDArray[Any], ...]],
    step: int,
    kernel: str = "reference",
) -> EmbeddingState[jax.Array]:
    """Stacks and slots of the host, [C, rows, W] each, on the devices of ``mesh`` for ``kernel``."""
    where = table_format(mesh, kernel)

    def place(array: npt.NDArray[Any]) -> jax.Array:
        return jax.device_put(array.reshape(stored_shape(array.shape, kernel)), where)

    return EmbeddingState(
        step=_count(mesh, step),
        tables={stack.name: place(tables[stack.name]) for stack in stacking.stacks},
        slots={stack.name: tuple(place(slot) for slot in slots[stack.name]) for stack in stacking.stacks},
    )


def host_state(
    stacking: Stacking, state: EmbeddingState[Any]
) -> tuple[dict[str, npt.NDArray[Any]], dict[str, tuple[npt.NDArray[Any], ...]]]:
    """Stacks and slots on the host, [C, rows, W] each, from the layout of any kernel."""

    def fetch(array: jax.Array | npt.NDArray[Any]) -> npt.NDArray[Any]:
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
    """``sums`` of these ``stacks`` for a state on the devices of ``mesh``, initialised in place."""
    where = table_format(mesh, "sparsecore")

    def begin() -> dict[str, jax.Array]:
        shapes = abstract_sums(stacking, mesh, stacks)
        return {name: jnp.full(shape.shape, NO_SUM, shape.dtype) for name, shape in shapes.items()}

    sums: dict[str, jax.Array] = jax.jit(begin, out_shardings=where)()
    return sums


def abstract_sums(
    stacking: Stacking, mesh: jax.sharding.Mesh, stacks: Iterable[str]
) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes, shardings and layouts of ``sums``, which are those of the tables in the layout for SparseCores."""
    tables = abstract_state(stacking, mesh, "sparsecore").tables
    return {name: tables[name] for name in stacks}


def table_format(mesh: jax.sharding.Mesh, kernel: str) -> NamedSharding | Format:
    """Format of tables and slots on ``mesh`` for ``kernel``; devices other than TPUs choose the layout."""
    split = NamedSharding(mesh, P(mesh.axis_names))
    if kernel != "sparsecore" or mesh.devices.flat[0].platform != "tpu":
        return split
    return Format(Layout(major_to_minor=(0, 1), tiling=((ALIGNMENT,),)), split)


def stored_shape(shape: tuple[int, ...], kernel: str) -> tuple[int, ...]:
    """The shape of an array [C, rows, W] on the devices for ``kernel``."""
    return (shape[0] * shape[1], shape[2]) if kernel == "sparsecore" else shape


def device_inputs(buffers: Mapping[str, Any], passes: int, mesh: jax.sharding.Mesh) -> LookupInputs:
    """Preprocessed ``buffers`` (``rooftop.embed.host.buffers.Buffers`` by stack) on the devices of ``mesh``.

    The arrays are copied: the caller may overwrite the buffers.
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
    """A jitted function that creates tables and slots: each device its own rows, from keys of seed, table and row.

    No data is sent. It runs under ``jax.set_mesh``.
    """
    axes, own = mesh.axis_names, stacking.cores_per_device

    def local() -> tuple[dict[str, jax.Array], dict[str, tuple[jax.Array, ...]]]:
        cores = jax.lax.axis_index(axes) * own + jnp.arange(own)
        tables, slots = {}, {}
        for stack in stacking.stacks:
            parts = [_rows_of(stacking, place, cores, stack.width, seed) for place in stack.places]
            table = jnp.concatenate(parts, axis=1)
            tables[stack.name] = table.reshape(stored_shape(table.shape, kernel))
            slots[stack.name] = tuple(
                jnp.full(stored_shape((own, stack.rows, width), kernel), value, jnp.float32)
                for width, value in zip(stack.optimizer.slots(stack.width), initial_slots(stack.optimizer), strict=True)
            )
        return tables, slots

    mapped = jax.shard_map(local, mesh=mesh, in_specs=(), out_specs=P(axes), check_vma=False)
    return jax.jit(mapped, out_shardings=table_format(mesh, kernel))


def _count(mesh: jax.sharding.Mesh, step: int) -> jax.Array:
    return jax.device_put(np.int32(step), NamedSharding(mesh, P()))


def _rows_of(
    stacking: Stacking, place: StackPlace, cores: Int[Array, " P"], width: int, seed: int
) -> Float32[Array, "P rows W"]:
    """The rows of a table on SparseCores ``cores``, zero where they are padding."""
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
        sample = (
            jax.random.truncated_normal(key, -2.0, 2.0, shape)
            if initializer.kind == "truncated_normal"
            else jax.random.normal(key, shape)
        )
        return initializer["mean"] + initializer["stddev"] * sample

    values = jnp.where((ids < table.vocabulary)[..., None], jax.vmap(jax.vmap(row))(ids), 0.0)
    return jnp.pad(values, ((0, 0), (0, 0), (0, width - table.width)))


def _begin(initializer: Initializer, shape: tuple[int, ...], random: np.random.Generator) -> npt.NDArray[np.float32]:
    if initializer.kind == "constant":
        return np.full(shape, initializer["value"], np.float32)
    if initializer.kind == "uniform":
        low, high = initializer["low"], initializer["high"]
        return (low + (high - low) * random.random(shape, np.float32)).astype(np.float32)
    values = random.standard_normal(shape, np.float32)
    if initializer.kind == "truncated_normal":
        while (far := np.abs(values) > 2).any():
            values[far] = random.standard_normal(int(far.sum()), np.float32)
    return (initializer["mean"] + initializer["stddev"] * values).astype(np.float32)


def _first_slots(stacking: Stacking) -> dict[str, tuple[npt.NDArray[Any], ...]]:
    return {
        stack.name: tuple(
            np.full((stacking.cores, stack.rows, width), value, np.float32)
            for width, value in zip(stack.optimizer.slots(stack.width), initial_slots(stack.optimizer), strict=True)
        )
        for stack in stacking.stacks
    }
