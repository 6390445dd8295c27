"""Lookups and updates of stacked, mod-sharded tables over any mesh: the work of SparseCores, on any device.

A SparseCore here is a part of a device that holds every C-th row; its ids come from host preprocessing
(``rooftop.embed``). Dims: B samples of a step, D devices, P SparseCores of each, C = D P, W width of a stack (padded),
S rows of activations of a SparseCore, n entries of a device's buffer. Tables and inputs are split over all axes of the
mesh, in their order.

Source: the SparseCore deep dive, sections 2, 7 and 8; the optimizers in ``embedding.optimizers`` name theirs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import P, lax, named_scope
from jaxtyping import Array, Bool, Float, Float32, Int, Shaped

from rooftop.core.errors import RooftopError, unknown
from rooftop.models.embedding_tables.limits import Limits, StackLimits, check_limits
from rooftop.models.embedding_tables.stacking import Stack, Stacking
from rooftop.models.embedding_tables.tables import Quantization
from rooftop.plan.embedding.exchange import EXCHANGES, ExchangeKind, cheapest_exchange
from rooftop.programs.embedding.buffers import BufferEntries, LookupInputs, StackInputs, read_places
from rooftop.programs.embedding.optimizers import Slots, merge_rows, true_widths, update_rows
from rooftop.programs.embedding.sparsecore import lookup_on_sparsecores, update_on_sparsecores
from rooftop.programs.embedding.state import EmbeddingState

#: Implementations: this module's own arithmetic, on any device, or XLA's SparseCore operations.
KERNELS: tuple[str, ...] = ("reference", "sparsecore")


@dataclass(frozen=True, kw_only=True, eq=False)
class EmbeddingProgram:
    """All options of lookup and update but the mesh.

    ``batch`` is B, of all devices. ``limits`` are those of the stacks, for one pass. ``exchange`` is one of
    ``plan.embedding.exchange.EXCHANGES`` for every stack, or None for the cheaper one of each. ``kernel`` is one of
    KERNELS: 'sparsecore' leaves lookup, exchange and update to XLA, on TPUs with SparseCores. ``minibatching``: the
    buffers are laid out for passes. ``sample_passes`` above 1: every batch has this number of passes over samples, and
    the gradients of a row are summed over all passes before it is updated. A program is hashed by identity, as a static
    argument of ``jax.jit``. Raises RooftopError.
    """

    stacking: Stacking
    batch: int
    limits: Limits
    minibatching: bool = False
    sample_passes: int = 1
    exchange: ExchangeKind | None = None
    kernel: str = "reference"

    def __post_init__(self) -> None:
        if self.kernel not in KERNELS:
            raise unknown("kernel", self.kernel, KERNELS)
        if self.kernel == "sparsecore" and not self.minibatching:
            raise RooftopError("minibatching", False, "true: SparseCores read buffers that are laid out for passes")
        if self.sample_passes > 1 and not self.minibatching:
            raise RooftopError("minibatching", False, "true: sample_passes need buffers that are laid out for passes")
        if self.exchange is not None and self.exchange not in EXCHANGES:
            raise unknown("exchange", self.exchange, EXCHANGES)
        if self.batch % self.stacking.cores:
            raise RooftopError("batch", self.batch, f"a multiple of {self.stacking.cores}, all SparseCores")
        check_limits(self.limits, self.stacking)

    @property
    def summed(self) -> tuple[str, ...]:
        """Stacks whose gradients SparseCores add up over a batch's passes before they update: ``state.sums``."""
        if self.kernel != "sparsecore" or self.sample_passes == 1:
            return ()
        return tuple(stack.name for stack in self.stacking.stacks if not stack.optimizer.additive)

    @property
    def samples(self) -> int:
        """Samples of one SparseCore."""
        return self.batch // self.stacking.cores

    def exchange_of(self, stack: Stack) -> ExchangeKind:
        """The exchange of ``stack``: of rows, or of activations."""
        limits = self.limits[stack.name]
        return self.exchange or cheapest_exchange(
            width=stack.width,
            max_ids=limits.max_ids,
            max_unique_ids=limits.max_unique_ids,
            samples=self.samples * stack.rows_per_sample,
            cores=self.stacking.cores,
            per_device=self.stacking.cores_per_device,
        )

    def sizes(self, stack: Stack, axes: Axes) -> Exchange:
        """The sizes of the stack's exchange over the mesh axes."""
        limits = self.limits[stack.name]
        return Exchange(
            axes=axes,
            devices=self.stacking.devices,
            per_device=self.stacking.cores_per_device,
            rows=stack.rows,
            samples=self.samples * stack.rows_per_sample,
            entries=limits.max_unique_ids if self.exchange_of(stack) == "rows" else limits.max_ids,
        )


def lookup(program: EmbeddingProgram, tables: Mapping[str, jax.Array], inputs: LookupInputs) -> dict[str, jax.Array]:
    """Activations by feature: [B, width], of a sequence [B, length, width], split by samples over all mesh axes.

    Runs under ``jax.set_mesh``. Raises RooftopError if the mesh has another number of devices than the stacking.
    """
    axes = mesh_axes(program)

    def local(tables: dict[str, jax.Array], inputs: LookupInputs) -> dict[str, jax.Array]:
        features: dict[str, jax.Array] = {}
        for stack in program.stacking.stacks:
            with named_scope(f"tables/{stack.name}/lookup"):
                table = tables[stack.name].reshape(-1, stack.width)
                look = _lookup_on_sparsecores if program.kernel == "sparsecore" else _lookup
                activations = look(_StackWork.of(program, stack, axes, inputs), table)
                features |= split_features(program, stack, activations)
        return features

    return _on_devices(local, axes, P(axes))(dict(tables), inputs)


def update(
    program: EmbeddingProgram,
    state: EmbeddingState[jax.Array],
    inputs: LookupInputs,
    gradients: Mapping[str, jax.Array],
    share: jax.Array | float = 1.0,
) -> EmbeddingState[jax.Array]:
    """The state after the optimizers' update by the activations' ``gradients``, by feature as in ``lookup``.

    ``inputs`` are those of the lookup. ``share`` is the schedule's share of each table's learning rate at this step. A
    row that several samples looked up is updated once, by the sum of their gradients. Runs under ``jax.set_mesh``.
    """
    axes = mesh_axes(program)

    def local(
        state: EmbeddingState[jax.Array], inputs: LookupInputs, gradients: dict[str, jax.Array], share: jax.Array
    ) -> EmbeddingState[jax.Array]:
        step = state.step + 1
        tables, all_slots, all_sums = dict(state.tables), dict(state.slots), dict(state.sums)
        for stack in program.stacking.stacks:
            with named_scope(f"tables/{stack.name}/update"):
                own = join_features(program, stack, gradients)
                arrays = (
                    tables[stack.name].reshape(-1, stack.width),
                    tuple(slot.reshape(-1, slot.shape[-1]) for slot in all_slots[stack.name]),
                )
                work = _StackWork.of(program, stack, axes, inputs)
                if program.kernel == "sparsecore":
                    sums = all_sums[stack.name] if stack.name in program.summed else None
                    table, slots, sums = _update_on_sparsecores(work, arrays, own, share, step, sums)
                    all_sums |= {} if sums is None else {stack.name: sums}
                else:
                    table, slots = _update(work, arrays, own, share, step)
                tables[stack.name] = table.reshape(tables[stack.name].shape)
                all_slots[stack.name] = tuple(
                    new.reshape(old.shape) for new, old in zip(slots, all_slots[stack.name], strict=True)
                )
        return EmbeddingState(step=step, tables=tables, slots=all_slots, sums=all_sums)

    split: Any = P(axes)
    out: EmbeddingState[Any] = EmbeddingState(step=P(), tables=split, slots=split, sums=split)
    return _on_devices(local, axes, out)(state, inputs, dict(gradients), jnp.asarray(share, jnp.float32))


def split_features(
    program: EmbeddingProgram, stack: Stack, activations: Float[Array, "rows W"]
) -> dict[str, jax.Array]:
    """A device's activations [P S, W] of a stack, feature by feature: [samples of the device, (length,) width]."""
    per_device = program.stacking.cores_per_device
    by_core = activations.reshape(per_device, -1, stack.width)
    features, start = {}, 0
    for place in stack.places:
        for feature in place.features:
            rows = program.samples * feature.rows_per_sample
            own = by_core[:, start : start + rows, : place.table.width]
            length = () if feature.length is None else (feature.length,)
            features[feature.name] = own.reshape(per_device * program.samples, *length, place.table.width)
            start += rows
    return features


def join_features(
    program: EmbeddingProgram, stack: Stack, features: Mapping[str, jax.Array]
) -> Float32[Array, "rows W"]:
    """The inverse of ``split_features``, padded with zeros to the width of the stack."""
    per_device = program.stacking.cores_per_device
    parts = []
    for place in stack.places:
        for feature in place.features:
            own = features[feature.name].astype(jnp.float32)
            own = own.reshape(per_device, program.samples * feature.rows_per_sample, place.table.width)
            parts.append(jnp.pad(own, ((0, 0), (0, 0), (0, stack.width - place.table.width))))
    return jnp.concatenate(parts, axis=1).reshape(-1, stack.width)


def mesh_axes(program: EmbeddingProgram) -> Axes:
    """All axes of the current mesh. Raises RooftopError if its number of devices is not the stacking's."""
    mesh = jax.sharding.get_abstract_mesh()
    if math.prod(mesh.axis_sizes) != program.stacking.devices:
        raise RooftopError("mesh", dict(mesh.shape), f"{program.stacking.devices} devices, as the tables are stacked")
    return mesh.axis_names


def _on_devices(local: Callable[..., Any], axes: Axes, out: Any) -> Callable[..., Any]:
    """``local`` on every device: arrays are split over all axes by their first dim, scalars are replicated.

    ``out`` has the structure of ``local``'s result, with P(axes) or P() as leaves.
    """

    def run(*arguments: Any) -> Any:
        specs = jax.tree.map(lambda leaf: P(axes) if leaf.ndim else P(), arguments)
        return jax.shard_map(local, in_specs=specs, out_specs=out, check_vma=False)(*arguments)

    return run


@dataclass(frozen=True, kw_only=True)
class _StackWork:
    """The lookups of a device in one stack, inside ``jax.shard_map``."""

    program: EmbeddingProgram
    stack: Stack
    axes: Axes
    inputs: StackInputs
    passes: Int[Array, ""]

    @classmethod
    def of(cls, program: EmbeddingProgram, stack: Stack, axes: Axes, inputs: LookupInputs) -> _StackWork:
        return cls(program=program, stack=stack, axes=axes, inputs=inputs.stacks[stack.name], passes=inputs.passes)

    @property
    def exchange(self) -> Exchange:
        return self.program.sizes(self.stack, self.axes)

    @property
    def by_rows(self) -> bool:
        return self.program.exchange_of(self.stack) == "rows"

    @property
    def limits(self) -> StackLimits:
        return self.program.limits[self.stack.name]

    def places(self) -> BufferEntries:
        stacking = self.program.stacking
        return read_places(
            self.inputs,
            self.passes,
            cores=stacking.cores,
            cores_per_device=stacking.cores_per_device,
            minibatching=self.program.minibatching,
        )

    def for_each_pass(self, places: BufferEntries, one: Callable[[jax.Array, Any], Any], begin: Any) -> Any:
        """Apply ``one`` to the mask of each pass's entries and the previous result, which is ``begin`` at first."""
        if not self.program.minibatching:
            return one(places.valid, begin)
        return lax.fori_loop(
            0, self.passes, lambda index, state: one(places.valid & (places.passes == index), state), begin
        )


def _lookup(work: _StackWork, table: Float[Array, "rows W"]) -> Float[Array, "samples W"]:
    """A device's activations [P S, W] of a stack, from its rows."""
    exchange, places = work.exchange, work.places()
    look = lookup_rows if work.by_rows else lookup_activations
    quantization = work.stack.places[0].table.quantization
    result: jax.Array = work.for_each_pass(
        places,
        lambda mask, so_far: so_far + look(exchange, table, places, mask, quantization),
        jnp.zeros((exchange.per_device * exchange.samples, work.stack.width), table.dtype),
    )
    return result


def _lookup_on_sparsecores(work: _StackWork, table: Float[Array, "rows W"]) -> Float[Array, "samples W"]:
    """``_lookup`` on SparseCores; XLA exchanges the data."""
    program, stack = work.program, work.stack
    return lookup_on_sparsecores(
        work.inputs,
        work.passes,
        table,
        activations=program.stacking.cores_per_device * program.samples * stack.rows_per_sample,
        max_ids=work.limits.max_ids,
        max_unique_ids=work.limits.max_unique_ids,
        quantization=stack.places[0].table.quantization,
    )


def _update(
    work: _StackWork,
    arrays: tuple[Float[Array, "rows W"], Slots],
    gradients: Float[Array, "samples W"],
    share: Float[Array, ""],
    step: Int[Array, ""],
) -> tuple[Float[Array, "rows W"], Slots]:
    """A device's rows of a stack and their slots, ``arrays``, after the update by ``gradients`` [P S, W]."""
    exchange, stack, places = work.exchange, work.stack, work.places()
    rows_of = row_gradients_of_rows if work.by_rows else row_gradients_of_activations

    def one(mask: jax.Array, arrays: tuple[jax.Array, Slots]) -> tuple[jax.Array, Slots]:
        return changed(arrays, *rows_of(exchange, gradients, places, mask))

    def changed(arrays: tuple[jax.Array, Slots], rows: jax.Array, sums: jax.Array) -> tuple[jax.Array, Slots]:
        rows, sums = merge_rows(rows, sums, exchange.none)
        widths = true_widths(stack, rows % stack.rows).astype(jnp.float32)
        return update_rows(stack.optimizer, *arrays, rows, sums, share=share, step=step, widths=widths)

    def sums_of(index: jax.Array) -> tuple[jax.Array, jax.Array]:
        return rows_of(exchange, gradients, places, places.valid & (places.passes == index))

    if work.program.sample_passes > 1:
        # A row may be in every pass: the sums of all passes are concatenated and merged, and update it once.
        rows, sums = lax.map(sums_of, jnp.arange(work.program.sample_passes))
        return changed(arrays, rows.reshape(-1), sums.reshape(-1, stack.width))
    result: tuple[jax.Array, Slots] = work.for_each_pass(places, one, arrays)
    return result


def _update_on_sparsecores(
    work: _StackWork,
    arrays: tuple[Float[Array, "rows W"], Slots],
    gradients: Float[Array, "samples W"],
    share: Float[Array, ""],
    step: Int[Array, ""],
    sums: Float[Array, "rows W"] | None,
) -> tuple[Float[Array, "rows W"], Slots, Float[Array, "rows W"] | None]:
    """``_update`` on SparseCores, with the ``sums`` of the stack if it has them; XLA exchanges the data."""
    optimizer = work.stack.optimizer
    return update_on_sparsecores(
        work.inputs,
        work.passes,
        *arrays,
        gradients,
        optimizer=optimizer,
        rate=jnp.float32(optimizer.learning_rate) * share,
        step=step,
        max_ids=work.limits.max_ids,
        max_unique_ids=work.limits.max_unique_ids,
        sums=sums,
    )


Axes = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """The sizes of one stack's exchange.

    ``rows`` are those of one SparseCore, ``samples`` its rows of activations, ``entries`` those of a partition: its
    limit of unique ids, or of ids.
    """

    axes: Axes
    devices: int
    per_device: int
    rows: int
    samples: int
    entries: int

    @property
    def none(self) -> int:
        """A row that does not exist on any device."""
        return self.per_device * self.rows

    def slots(self, places: BufferEntries, within: Int[Array, " n"], mask: Bool[Array, " n"]) -> Int[Array, " n"]:
        """Index of each entry's id in the send buffer, [D, P of destination, P of source, entries] flattened."""
        partition = places.destination * self.per_device + places.source
        # Entries over the compiled limits are dropped; preprocessing makes sure that there are none.
        used = mask & (within < self.entries)
        return jnp.where(used, partition * self.entries + within, self.size)

    @property
    def size(self) -> int:
        """Entries of a device's send buffer."""
        return self.devices * self.per_device**2 * self.entries

    def to_holders(self, values: Shaped[Array, " size *rest"]) -> Shaped[Array, " size *rest"]:
        """An AllToAll between the order of the samples' devices and that of the rows' devices, in either direction."""
        if self.devices == 1:
            return values
        parts = values.reshape(self.devices, -1, *values.shape[1:])
        return lax.all_to_all(parts, self.axes, 0, 0).reshape(values.shape)

    def flat_rows(self, asked: Int[Array, " size"]) -> Int[Array, " size"]:
        """Indices into the concatenated rows of a device's SparseCores; ``asked`` are local to a SparseCore."""
        shape = (self.devices, self.per_device, self.per_device * self.entries)
        core = jnp.arange(self.per_device)[None, :, None]
        asked = asked.reshape(shape)
        return jnp.where(asked < self.rows, core * self.rows + asked, self.none).reshape(-1)


def lookup_rows(
    exchange: Exchange,
    table: Float[Array, "rows W"],
    places: BufferEntries,
    mask: Bool[Array, " n"],
    quantization: Quantization | None,
) -> Float[Array, "samples W"]:
    """Activations [P S, W] of the entries in ``mask``: rows are sent to the samples, which combine them."""
    slots, asked = _asked(exchange, places, mask)
    rows = _gather(table, exchange.flat_rows(exchange.to_holders(asked)), quantization)
    received = exchange.to_holders(rows).at[slots].get(mode="fill", fill_value=0)
    gains = jnp.where(mask, places.gain, 0)[:, None]
    return _by_sample(exchange, places, mask, received * gains)


def row_gradients_of_rows(
    exchange: Exchange, gradients: Float[Array, "samples W"], places: BufferEntries, mask: Bool[Array, " n"]
) -> tuple[Int[Array, " size"], Float[Array, "size W"]]:
    """Rows of this device's SparseCores, and for each the gradient summed over the samples of one SparseCore.

    ``gradients`` [P S, W] are those of the activations.
    """
    slots, asked = _asked(exchange, places, mask)
    own = _of_places(exchange, gradients, places, mask)
    sums = jnp.zeros((exchange.size, gradients.shape[1]), gradients.dtype).at[slots].add(own, mode="drop")
    return exchange.flat_rows(exchange.to_holders(asked)), exchange.to_holders(sums)


def lookup_activations(
    exchange: Exchange,
    table: Float[Array, "rows W"],
    places: BufferEntries,
    mask: Bool[Array, " n"],
    quantization: Quantization | None,
) -> Float[Array, "samples W"]:
    """Activations [P S, W] of the entries in ``mask``: holders of rows combine them and send the sums."""
    rows, samples, gains = _entries(exchange, places, mask)
    parts = _gather(table, rows, quantization) * gains[:, None]
    all_samples = exchange.devices * exchange.per_device * exchange.samples
    sums = jnp.zeros((all_samples, table.shape[1]), table.dtype).at[samples].add(parts, mode="drop")
    return sums if exchange.devices == 1 else lax.psum_scatter(sums, exchange.axes, tiled=True)


def row_gradients_of_activations(
    exchange: Exchange, gradients: Float[Array, "samples W"], places: BufferEntries, mask: Bool[Array, " n"]
) -> tuple[Int[Array, " size"], Float[Array, "size W"]]:
    """Rows and gradients, from the gathered gradients of all devices' activations; see ``row_gradients_of_rows``."""
    rows, samples, gains = _entries(exchange, places, mask)
    all_gradients = gradients if exchange.devices == 1 else lax.all_gather(gradients, exchange.axes, tiled=True)
    return rows, all_gradients.at[samples].get(mode="fill", fill_value=0) * gains[:, None]


def _asked(
    exchange: Exchange, places: BufferEntries, mask: Bool[Array, " n"]
) -> tuple[Int[Array, " n"], Int[Array, " size"]]:
    """Index of each entry's row among the requested rows, and the requested rows, once per partition."""
    slots = exchange.slots(places, places.unique, mask)
    asked = jnp.full(exchange.size, exchange.rows, jnp.int32)
    firsts = jnp.where(places.first, slots, exchange.size)
    return slots, asked.at[firsts].set(places.row, mode="drop")


def _entries(
    exchange: Exchange, places: BufferEntries, mask: Bool[Array, " n"]
) -> tuple[Int[Array, " size"], Int[Array, " size"], Float[Array, " size"]]:
    """Entries on the devices of their rows: rows, samples of all devices (0 to C S), and gains."""
    slots = exchange.slots(places, places.rank, mask)

    def sent(values: jax.Array, filler: float) -> jax.Array:
        return exchange.to_holders(jnp.full(exchange.size, filler, values.dtype).at[slots].set(values, mode="drop"))

    first = (lax.axis_index(exchange.axes) if exchange.axes else 0) * exchange.per_device
    samples = (first + places.source) * exchange.samples + places.sample
    beyond = exchange.devices * exchange.per_device * exchange.samples
    rows = exchange.flat_rows(sent(places.row, exchange.rows))
    return rows, sent(samples, beyond), sent(places.gain, 0.0)


def _gather(
    table: Float[Array, "rows W"], rows: Int[Array, " n"], quantization: Quantization | None
) -> Float[Array, "n W"]:
    """Rows of a device's table; zeros for rows that it does not have."""
    values = table.at[rows].get(mode="fill", fill_value=0)
    return values if quantization is None else quantized(values, quantization)


def quantized(rows: Float[Array, "n W"], quantization: Quantization) -> Float[Array, "n W"]:
    """Values rounded to the nearest of the levels, the range's ends included (the SparseCore deep dive, section 13)."""
    step = (quantization.high - quantization.low) / (quantization.buckets - 1)
    clipped = jnp.clip(rows, quantization.low, quantization.high)
    return quantization.low + jnp.round((clipped - quantization.low) / step) * step


def _of_places(
    exchange: Exchange, activations: Float[Array, "samples W"], places: BufferEntries, mask: Bool[Array, " n"]
) -> Float[Array, "n W"]:
    """The activation of each entry's sample, times the entry's gain."""
    sample = jnp.where(mask, places.source * exchange.samples + places.sample, len(activations))
    return activations.at[sample].get(mode="fill", fill_value=0) * jnp.where(mask, places.gain, 0)[:, None]


def _by_sample(
    exchange: Exchange, places: BufferEntries, mask: Bool[Array, " n"], values: Float[Array, "n W"]
) -> Float[Array, "samples W"]:
    """The sum of the entries' ``values`` for each row of activations."""
    count = exchange.per_device * exchange.samples
    sample = jnp.where(mask, places.source * exchange.samples + places.sample, count)
    return jnp.zeros((count, values.shape[1]), values.dtype).at[sample].add(values, mode="drop")
