"""Loss and gradients of a batch whose microbatches pass through pipeline stages, by a table of ``rooftop.scheduling``.

One program runs on all devices. It is manual (``jax.shard_map``) over the stage axis, and over the axes that hold
copies of the weights, whose gradients are summed once at the end. It scans over the trips of the table: each kind of
task is one ``jax.lax.cond``, so that a stage pays only for its own, and neighbours exchange results (``ppermute``)
while the next kind is done. The collectives of a task are among the devices of one stage, which do the same task;
collectives between stages are outside of conditionals. Sums over microbatches and buffers are outside too: XLA copies
what a conditional passes through.

The other mesh axes stay explicit. JAX 0.10.2 has no ``reduced`` and ``unreduced`` types together with manual axes, so
that here gradients are summed over fsdp, and partial sums over tensor, at the end of the matmul that computes them.

Stages share the layers of the longest run of periods (``rooftop.models.segments.shared_segment``). Layers before it,
such as dense layers before those of experts, belong to the embedding, and layers after it to the loss: all stages have
the weights of both, as they have the tables, and the first and the last stage use them.

Where the periods do not divide over stages and chunks, their stack is padded at its end with zeros. A stage skips the
padding by ``lax.cond``, whose condition is the same on all devices of the stage: the last chunks have fewer layers, or
none.

Dims: M microbatches, S stages, v chunks of the model on a stage, B, T, D as elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax import P, named_scope

from rooftop.core.errors import RooftopError
from rooftop.core.records import field_values
from rooftop.models.segments import Segment, segments, shared_segment
from rooftop.programs.model import transformer
from rooftop.programs.model.layer import Computation
from rooftop.programs.model.moe.route import no_load
from rooftop.programs.parameters import Batch, Transformer
from rooftop.programs.sharding import Dim, Specs, in_parts, on_some_shards, psum, varying
from rooftop.programs.training.passes import Layers, ResidualStream
from rooftop.programs.training.stage import FirstWeights, LastWeights, Stage, Terms
from rooftop.scheduling.pipeline import PipelineTable, trip_table


class _StageSpecs(Specs):
    """Specs inside a stage: no array is ``reduced`` or ``unreduced``."""

    def activation(self, *dims: Dim, reduced: str | None = None, unreduced: str | None = None) -> P:
        """An activation, its partial sums summed."""
        return super().activation(*dims)

    def token_axes(self, sequence: str = "seq") -> frozenset[str]:
        """No axis: the gradient of a weight is summed over tokens where it is computed."""
        return frozenset()


class _StageComputation(Computation):
    """A computation inside a stage."""

    @cached_property
    def specs(self) -> Specs:
        """The specs inside a stage."""
        return _StageSpecs(self.rules)


def pipelined(
    weights: Transformer[jax.Array],
    batch: Batch[jax.Array],
    how: Computation,
    table: PipelineTable,
    *,
    loss_chunks: int,
    summed: jnp.dtype,
    counted: jax.Array | None = None,
) -> tuple[tuple[jax.Array, Terms], Transformer[jax.Array]]:
    """``transformer.objective`` of a batch and its gradients, both as means over microbatches.

    ``weights`` are in their stored sharding (``Specs.parameter``), shared layers over ``stage``, in the dtype of
    matmuls. So are the gradients, summed over microbatches in float32 and over devices in ``summed``. ``counted`` is
    the number of tokens of a packed batch that carry loss. Stored weights are in the order of the model, so interleaved
    chunks of layers are exchanged between stages before and after. Runs under ``jax.set_mesh``.

    Raises RooftopError for more chunks than periods of layers, remat with offload, and a context axis with ring
    attention.
    """
    if how.specs.rules.activations["seq"] and how.context_attention == "ring":
        # On CPU devices a permutation waits for all devices, but stages reach different ones.
        raise RooftopError("context_attention", how.context_attention, "all_gather with pipeline stages")
    cut = _Cut.of(how, table)
    shared = cut.shared
    parts = jax.tree.map(lambda ids: in_parts(ids, table.microbatches, dim=0), batch)

    def of_shared(layers: tuple[Layers, ...], here: Layers) -> tuple[Layers, ...]:
        """The layers of all segments, with ``here`` as the shared one."""
        return (*layers[:shared], here, *layers[shared + 1 :])

    def body(stacks: Layers, tables: Transformer[jax.Array], parts: Batch[jax.Array], counted: Any) -> Any:
        stacks, tables, parts, counted = varying((stacks, tables, parts, counted), cut.typed)
        ends = _Ends(cut=cut, tables=tables, loss_chunks=loss_chunks, counted=counted)
        losses, layer_gradients, begun, finished = ends.stage(stacks, parts).run(trip_table(table))
        table_gradients = ends.gradients(begun, finished)
        with named_scope("gradients"):
            layer_gradients, table_gradients = jax.tree.map(
                lambda sum_: sum_.astype(summed), (layer_gradients, table_gradients)
            )
            return psum(losses, cut.manual), psum(layer_gradients, cut.copies), psum(table_gradients, cut.manual)

    by_stage = P(None, "stage")
    counted_share = None if counted is None else counted / cut.shares
    stacks, tables = _by_chunk(weights.layers[shared], table), replace(weights, layers=of_shared(weights.layers, ()))
    losses, layer_gradients, table_gradients = on_some_shards(
        body,
        stacks,
        tables,
        parts,
        counted_share,
        axes=cut.manual,
        in_specs=(by_stage, P(), P(None, cut.copies or None), P()),
        out_specs=(P(), *jax.tree.map(lambda weight: jax.typeof(weight).sharding.spec, (stacks, tables))),
        check_vma=bool(cut.typed),
    )
    return losses, replace(table_gradients, layers=of_shared(table_gradients.layers, _by_layer(layer_gradients)))


@dataclass(frozen=True, kw_only=True)
class _Cut:
    """A model and a mesh cut into stages.

    ``runs`` are the model's segments, of which stages share that at index ``shared``. ``copies`` are the axes that hold
    copies of the weights. ``shares`` is the number of parts that an objective is the mean of, and ``inside`` the
    computation of a stage.
    """

    runs: Sequence[Segment]
    shared: int
    copies: tuple[str, ...]
    shares: int
    inside: Computation
    table: PipelineTable

    @classmethod
    def of(cls, how: Computation, table: PipelineTable) -> _Cut:
        """The cut of the mesh in context. Raises RooftopError for more chunks than periods of layers."""
        runs, shared = segments(how.model), shared_segment(how.model)
        _require_enough(runs[shared], table)
        mesh = jax.sharding.get_abstract_mesh()
        batch_axes, stored = how.specs.rules.activations["batch"], how.specs.rules.parameters
        split_axes = {axis for name, axes in stored.items() if name != "layers" for axis in axes}
        copies = tuple(axis for at, axis in enumerate(batch_axes) if not split_axes & set(batch_axes[: at + 1]))
        rules = how.rules.only(dict.fromkeys(set(mesh.shape) - {"stage", *copies}, 1))
        return cls(
            runs=runs, shared=shared, copies=copies, table=table,
            inside=_StageComputation(**field_values(how) | {"rules": rules}),
            shares=table.microbatches * math.prod(mesh.shape[axis] for axis in copies),
        )  # fmt: skip

    @property
    def manual(self) -> tuple[str, ...]:
        """Axes over which the program is manual."""
        return ("stage", *self.copies)

    @property
    def typed(self) -> tuple[str, ...]:
        """Manual axes over which types say that arrays vary."""
        # The type of a Pallas kernel's outputs does not say over which axes they vary: then no type here does.
        return () if self.inside.attention == "splash" else self.manual


@dataclass(frozen=True, kw_only=True)
class _Ends:
    """The model before and after the shared layers, whose weights are in ``tables``: embedding, other layers and loss.

    ``counted`` is this part's share of the tokens that carry loss.
    """

    cut: _Cut
    tables: Transformer[jax.Array]
    loss_chunks: int
    counted: jax.Array | None

    @property
    def tied(self) -> bool:
        """True if both ends have the same table."""
        return self.tables.unembed is None

    def stage(self, stacks: Layers, parts: Batch[jax.Array]) -> Stage:
        """This device's stage, with ``stacks`` as its shared layers."""
        cut, tables = self.cut, self.tables
        first = FirstWeights(embed=tables.embed, positions=tables.positions, layers=tables.layers[: cut.shared])
        last = LastWeights(
            norm=tables.final_norm,
            unembed=tables.embed if tables.unembed is None else tables.unembed,
            layers=tables.layers[cut.shared + 1 :],
        )
        return Stage(
            stacks=stacks, first=first, last=last, parts=parts, how=cut.inside, segment=cut.runs[cut.shared],
            begin=self.begin, finish=self.finish, tied=self.tied, table=cut.table, manual=cut.typed,
        )  # fmt: skip

    def begin(self, first: FirstWeights, part: Batch[jax.Array]) -> ResidualStream:
        """The stream of a microbatch before the shared layers."""
        cut, inside = self.cut, self.cut.inside
        assert first.embed is not None
        with named_scope("embed"):
            x = transformer.embed(replace(self.tables, embed=first.embed, positions=first.positions), part, inside)
        load = varying(no_load(inside.model, inside.specs), cut.typed) if inside.balance_loss else None
        return _through(cut.runs[: cut.shared], first.layers, ResidualStream(x=x, load=load), part, inside)

    def finish(self, stream: ResidualStream, last: LastWeights, part: Batch[jax.Array]) -> tuple[jax.Array, Terms]:
        """The share of the objective that a microbatch has, from the stream after the shared layers."""
        cut, inside, tables = self.cut, self.cut.inside, self.tables
        stream = _through(cut.runs[cut.shared + 1 :], last.layers, stream, part, inside)
        tables = replace(
            tables,
            final_norm=last.norm,
            embed=last.unembed if self.tied else tables.embed,
            unembed=None if self.tied else last.unembed,
        )
        result = transformer.head_loss(stream.x, tables, part, inside, chunks=self.loss_chunks, counted=self.counted)
        if stream.load is not None:
            with named_scope("loss"):
                load = psum(jnp.sum(stream.load, axis=0), cut.copies)
            result = transformer.balanced(*result, load, inside)
        share: tuple[jax.Array, Terms] = jax.tree.map(lambda mean: mean / cut.shares, result)
        return share

    def gradients(self, begun: FirstWeights, finished: LastWeights) -> Transformer[jax.Array]:
        """Gradients of ``tables`` from those of the first and of the last weights."""
        return Transformer(
            embed=finished.unembed if begun.embed is None else begun.embed,
            positions=begun.positions,
            layers=(*begun.layers, (), *finished.layers),
            final_norm=finished.norm,
            unembed=None if begun.embed is None else finished.unembed,
        )


def _through(
    runs: Sequence[Segment], layers: Sequence[Layers], stream: ResidualStream, part: Batch[jax.Array], how: Computation
) -> ResidualStream:
    """The stream after the layers of whole segments, which belong to the first or the last stage alone."""
    with named_scope("layers"):
        at = transformer.places(part, how)
        for run, stacks in zip(runs, layers, strict=True):
            period = transformer.period(run, how)
            # Unrolled: inside a stage JAX 0.10.2 cannot differentiate a scan over the layers.
            for repeat in range(run.repeats):
                weights = jax.tree.map(lambda weight, repeat=repeat: weight[repeat], stacks)
                stream = stream.after(*period(stream.x, weights, at))
    return stream


def _require_enough(run: Segment, table: PipelineTable) -> None:
    """Raise RooftopError if the stages have more chunks than ``run`` has periods."""
    if table.stages * table.chunks > run.repeats:
        periods = f"{run.repeats} periods of {len(run.kinds)} layers"
        parts = f"{table.stages} x {table.chunks} chunks"
        raise RooftopError("mesh axis stage", parts, f"at most one for each of the {periods}")


def _by_chunk(stacks: Layers, table: PipelineTable) -> Layers:
    """[L, ...] split over stages -> [v, L/v, ...] with the second dim split: part c S + s of the model on stage s."""

    def move(weight: jax.Array) -> jax.Array:
        spec = jax.typeof(weight).sharding.spec.partitions
        shape = (table.chunks, weight.shape[0] // table.chunks, *weight.shape[1:])
        return weight.reshape(shape, out_sharding=P(None, *spec))

    with named_scope("pipeline"):
        return jax.tree.map(move, stacks)


def _by_layer(stacks: Layers) -> Layers:
    """The inverse of ``_by_chunk``."""

    def move(weight: jax.Array) -> jax.Array:
        _, *spec = jax.typeof(weight).sharding.spec.partitions
        return weight.reshape(-1, *weight.shape[2:], out_sharding=P(*spec))

    with named_scope("pipeline"):
        return jax.tree.map(move, stacks)
