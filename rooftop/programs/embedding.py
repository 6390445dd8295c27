"""Lookups in stacked, mod-sharded tables and their updates, over any mesh: what SparseCores compute, on any device.

A SparseCore here is a part of a device that holds every C-th row; its ids come from host preprocessing
(``rooftop.embed``). Dims: B samples of a step, D devices, P SparseCores of each, C = D P, W width of a stack (padded).
Tables and inputs are split over all axes of the mesh, in their order.

Source: the SparseCore deep dive, sections 2, 7 and 8; the optimizers in ``embedding_optimizers`` name theirs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import P, lax, named_scope

from rooftop.errors import RooftopError, unknown
from rooftop.models.tables_limits import Limits, StackLimits, check_limits
from rooftop.models.tables_stacking import Stack, Stacking
from rooftop.plan.embed_exchange import EXCHANGES, cheapest_exchange
from rooftop.programs.embedding_buffers import LookupInputs, Places, StackInputs, read_places
from rooftop.programs.embedding_exchange import (
    Axes,
    Exchange,
    lookup_activations,
    lookup_rows,
    row_gradients_of_activations,
    row_gradients_of_rows,
)
from rooftop.programs.embedding_optimizers import Slots, merge_rows, true_widths, update_rows
from rooftop.programs.embedding_sparsecore import lookup_on_sparsecores, update_on_sparsecores
from rooftop.programs.embedding_state import EmbeddingState

#: Who looks up and updates: this module's own arithmetic, on any device, or XLA's SparseCore operations.
KERNELS: tuple[str, ...] = ("reference", "sparsecore")


@dataclass(frozen=True, kw_only=True, eq=False)
class EmbeddingProgram:
    """All that decides lookup and update, the mesh excepted.

    ``batch`` is B, of all devices. ``limits`` are the stacks', of one pass. ``exchange``
    is one of ``rooftop.plan.embed_exchange.EXCHANGES`` for every stack, or None for the cheaper one of each. ``kernel``
    is one of KERNELS: 'sparsecore' hands lookup, exchange and update to XLA, on TPUs that have SparseCores.
    ``minibatching`` says that the buffers are laid out for passes; ``sample_passes`` above 1 that these are over
    samples, so many in every batch: gradients of a row are then summed over all passes before it is updated. A program
    is hashed as the object that it is: a static argument of ``jax.jit``. Raises RooftopError.
    """

    stacking: Stacking
    batch: int
    limits: Limits
    minibatching: bool = False
    sample_passes: int = 1
    exchange: str | None = None
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

    def exchange_of(self, stack: Stack) -> str:
        """How devices exchange what they look up in ``stack``."""
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
        found: dict[str, jax.Array] = {}
        for stack in program.stacking.stacks:
            with named_scope(f"tables/{stack.name}/lookup"):
                table = tables[stack.name].reshape(-1, stack.width)
                look = _lookup_on_sparsecores if program.kernel == "sparsecore" else _lookup
                activations = look(_Work.of(program, stack, axes, inputs), table)
                found |= split_features(program, stack, activations)
        return found

    return _on_devices(local, axes, P(axes))(dict(tables), inputs)


def update(
    program: EmbeddingProgram,
    state: EmbeddingState[jax.Array],
    inputs: LookupInputs,
    gradients: Mapping[str, jax.Array],
    share: jax.Array | float = 1.0,
) -> EmbeddingState[jax.Array]:
    """The state after the optimizers' update by the activations' ``gradients`` (by feature, as ``lookup`` gives them).

    ``inputs`` are those whose lookup the gradients are of. ``share`` of each table's learning rate is used: what a
    schedule says for this step. A row that several samples looked up gets the sum of their gradients, once. Runs under
    ``jax.set_mesh``.
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
                held = (
                    tables[stack.name].reshape(-1, stack.width),
                    tuple(slot.reshape(-1, slot.shape[-1]) for slot in all_slots[stack.name]),
                )
                work = _Work.of(program, stack, axes, inputs)
                if program.kernel == "sparsecore":
                    sums = all_sums[stack.name] if stack.name in program.summed else None
                    table, slots, sums = _update_on_sparsecores(work, held, own, share, step, sums)
                    all_sums |= {} if sums is None else {stack.name: sums}
                else:
                    table, slots = _update(work, held, own, share, step)
                tables[stack.name] = table.reshape(tables[stack.name].shape)
                all_slots[stack.name] = tuple(
                    new.reshape(old.shape) for new, old in zip(slots, all_slots[stack.name], strict=True)
                )
        return EmbeddingState(step=step, tables=tables, slots=all_slots, sums=all_sums)

    split: Any = P(axes)
    out: EmbeddingState[Any] = EmbeddingState(step=P(), tables=split, slots=split, sums=split)
    return _on_devices(local, axes, out)(state, inputs, dict(gradients), jnp.asarray(share, jnp.float32))


def split_features(program: EmbeddingProgram, stack: Stack, activations: jax.Array) -> dict[str, jax.Array]:
    """A device's activations [P S, W] of a stack, feature by feature: [samples of the device, (length,) width]."""
    per_device = program.stacking.cores_per_device
    by_core = activations.reshape(per_device, -1, stack.width)
    found, at = {}, 0
    for place in stack.places:
        for feature in place.features:
            rows = program.samples * feature.rows_per_sample
            own = by_core[:, at : at + rows, : place.table.width]
            length = () if feature.length is None else (feature.length,)
            found[feature.name] = own.reshape(per_device * program.samples, *length, place.table.width)
            at += rows
    return found


def join_features(program: EmbeddingProgram, stack: Stack, features: Mapping[str, jax.Array]) -> jax.Array:
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
    """All axes of the mesh that is set. Raises RooftopError if it has not the stacking's number of devices."""
    mesh = jax.sharding.get_abstract_mesh()
    if math.prod(mesh.axis_sizes) != program.stacking.devices:
        raise RooftopError("mesh", dict(mesh.shape), f"{program.stacking.devices} devices, as the tables are stacked")
    return mesh.axis_names


def _on_devices(local: Callable[..., Any], axes: Axes, out: Any) -> Callable[..., Any]:
    """``local`` on every device: arrays are split over all axes by their first dim, scalars are whole.

    ``out`` is what ``local`` returns, in its place P(axes) or P().
    """

    def run(*arguments: Any) -> Any:
        specs = jax.tree.map(lambda leaf: P(axes) if leaf.ndim else P(), arguments)
        return jax.shard_map(local, in_specs=specs, out_specs=out, check_vma=False)(*arguments)

    return run


@dataclass(frozen=True, kw_only=True)
class _Work:
    """What a device looks up in one stack, inside ``jax.shard_map``."""

    program: EmbeddingProgram
    stack: Stack
    axes: Axes
    inputs: StackInputs
    passes: jax.Array

    @classmethod
    def of(cls, program: EmbeddingProgram, stack: Stack, axes: Axes, inputs: LookupInputs) -> _Work:
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

    def places(self) -> Places:
        stacking = self.program.stacking
        return read_places(
            self.inputs,
            self.passes,
            cores=stacking.cores,
            cores_per_device=stacking.cores_per_device,
            minibatching=self.program.minibatching,
        )

    def for_each_pass(self, places: Places, one: Callable[[jax.Array, Any], Any], begin: Any) -> Any:
        """``one`` with the places of each pass in turn, and what the passes before it have made of ``begin``."""
        if not self.program.minibatching:
            return one(places.valid, begin)
        return lax.fori_loop(
            0, self.passes, lambda index, held: one(places.valid & (places.passes == index), held), begin
        )


def _lookup(work: _Work, table: jax.Array) -> jax.Array:
    """A device's activations [P S, W] of a stack, from its rows of it [rows, W]."""
    exchange, places = work.exchange, work.places()
    look = lookup_rows if work.by_rows else lookup_activations
    quantization = work.stack.places[0].table.quantization
    found: jax.Array = work.for_each_pass(
        places,
        lambda wanted, so_far: so_far + look(exchange, table, places, wanted, quantization),
        jnp.zeros((exchange.per_device * exchange.samples, work.stack.width), table.dtype),
    )
    return found


def _lookup_on_sparsecores(work: _Work, table: jax.Array) -> jax.Array:
    """As ``_lookup``: XLA exchanges what SparseCores need."""
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
    work: _Work, held: tuple[jax.Array, Slots], gradients: jax.Array, share: jax.Array, step: jax.Array
) -> tuple[jax.Array, Slots]:
    """A device's rows of a stack and their slots, ``held``, after the update by ``gradients`` [P S, W]."""
    exchange, stack, places = work.exchange, work.stack, work.places()
    rows_of = row_gradients_of_rows if work.by_rows else row_gradients_of_activations

    def one(wanted: jax.Array, held: tuple[jax.Array, Slots]) -> tuple[jax.Array, Slots]:
        return changed(held, *rows_of(exchange, gradients, places, wanted))

    def changed(held: tuple[jax.Array, Slots], rows: jax.Array, sums: jax.Array) -> tuple[jax.Array, Slots]:
        rows, sums = merge_rows(rows, sums, exchange.none)
        widths = true_widths(stack, rows % stack.rows).astype(jnp.float32)
        return update_rows(stack.optimizer, *held, rows, sums, share=share, step=step, widths=widths)

    def sums_of(index: jax.Array) -> tuple[jax.Array, jax.Array]:
        return rows_of(exchange, gradients, places, places.valid & (places.passes == index))

    if work.program.sample_passes > 1:
        # A row may be in every pass: their sums of gradients lie side by side, are merged, and update it once.
        rows, sums = lax.map(sums_of, jnp.arange(work.program.sample_passes))
        return changed(held, rows.reshape(-1), sums.reshape(-1, stack.width))
    found: tuple[jax.Array, Slots] = work.for_each_pass(places, one, held)
    return found


def _update_on_sparsecores(
    work: _Work,
    held: tuple[jax.Array, Slots],
    gradients: jax.Array,
    share: jax.Array,
    step: jax.Array,
    sums: jax.Array | None,
) -> tuple[jax.Array, Slots, jax.Array | None]:
    """As ``_update``, with the ``sums`` of the stack if it needs them: XLA exchanges what SparseCores need."""
    optimizer = work.stack.optimizer
    return update_on_sparsecores(
        work.inputs,
        work.passes,
        *held,
        gradients,
        optimizer=optimizer,
        rate=jnp.float32(optimizer.learning_rate) * share,
        step=step,
        max_ids=work.limits.max_ids,
        max_unique_ids=work.limits.max_unique_ids,
        sums=sums,
    )
