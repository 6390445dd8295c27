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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
from jax import P, lax, named_scope

from rooftop.core.errors import RooftopError
from rooftop.models.segments import Segment, segments, shared_segment
from rooftop.programs.model import transformer
from rooftop.programs.model.layer import Computation
from rooftop.programs.model.moe.route import no_load
from rooftop.programs.parameters import Batch, Norm, Transformer
from rooftop.programs.sharding import Dim, Specs, in_parts, on_some_shards, psum, varying
from rooftop.programs.training.passes import Layers, Passes, ResidualStream, Through, saved_on_host
from rooftop.scheduling.pipeline import (
    TRIP_OPS,
    PipelineTable,
    StageBuffer,
    TripTable,
    TripTask,
    trip_table,
    waited_trips,
)


class _StageSpecs(Specs):
    """Specs inside a stage: no array is ``reduced`` or ``unreduced``."""

    def activation(self, *dims: Dim, reduced: str | None = None, unreduced: str | None = None) -> P:
        """An activation, its partial sums summed."""
        return super().activation(*dims)

    def token_axes(self, sequence: str = "seq") -> frozenset[str]:
        """No axis: the gradient of a weight is summed over tokens where it is computed."""
        return frozenset()


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
    runs, shared = segments(how.model), shared_segment(how.model)
    _require_enough(runs[shared], table)
    mesh = jax.sharding.get_abstract_mesh()
    batch_axes, stored = how.specs.rules.activations["batch"], how.specs.rules.parameters
    split_axes = {axis for name, axes in stored.items() if name != "layers" for axis in axes}
    copies = tuple(axis for at, axis in enumerate(batch_axes) if not split_axes & set(batch_axes[: at + 1]))
    manual = ("stage", *copies)
    shares = table.microbatches * math.prod(mesh.shape[axis] for axis in copies)
    inside = replace(how, specs=_StageSpecs(how.specs.rules.only(dict.fromkeys(set(mesh.shape) - set(manual), 1))))
    parts = jax.tree.map(lambda ids: in_parts(ids, table.microbatches, dim=0), batch)
    # The type of a Pallas kernel's outputs does not say over which axes they vary: then no type here does.
    typed = () if how.attention == "splash" else manual

    def of_shared(layers: tuple[Layers, ...], here: Layers) -> tuple[Layers, ...]:
        """The layers of all segments, with ``here`` as the shared one."""
        return (*layers[:shared], here, *layers[shared + 1 :])

    def body(stacks: Layers, tables: Transformer[jax.Array], parts: Batch[jax.Array], counted: Any) -> Any:
        stacks, tables, parts, counted = varying((stacks, tables, parts, counted), typed)
        first = _First(embed=tables.embed, positions=tables.positions, layers=tables.layers[:shared])
        last = _Last(
            norm=tables.final_norm,
            unembed=tables.embed if tables.unembed is None else tables.unembed,
            layers=tables.layers[shared + 1 :],
        )

        def begin(first: _First, part: Batch[jax.Array]) -> ResidualStream:
            assert first.embed is not None
            with named_scope("embed"):
                x = transformer.embed(replace(tables, embed=first.embed, positions=first.positions), part, inside)
            load = varying(no_load(how.model, inside.specs), typed) if how.balance_loss else None
            return _through(runs[:shared], first.layers, ResidualStream(x=x, load=load), part, inside)

        def finish(stream: ResidualStream, last: _Last, part: Batch[jax.Array]) -> tuple[jax.Array, Terms]:
            stream = _through(runs[shared + 1 :], last.layers, stream, part, inside)
            tied = tables.unembed is None
            tables_ = replace(
                tables,
                final_norm=last.norm,
                embed=last.unembed if tied else tables.embed,
                unembed=None if tied else last.unembed,
            )
            result = transformer.head_loss(stream.x, tables_, part, inside, chunks=loss_chunks, counted=counted)
            if stream.load is not None:
                with named_scope("loss"):
                    load = psum(jnp.sum(stream.load, axis=0), copies)
                result = transformer.balanced(*result, load, inside)
            share: tuple[jax.Array, Terms] = jax.tree.map(lambda mean: mean / shares, result)
            return share

        stage = Stage(
            stacks=stacks, first=first, last=last, parts=parts, how=inside, segment=runs[shared], begin=begin,
            finish=finish, tied=tables.unembed is None, table=table, manual=typed,
        )  # fmt: skip
        losses, layer_gradients, begun, finished = stage.run(trip_table(table))
        table_gradients = Transformer(
            embed=finished.unembed if begun.embed is None else begun.embed,
            positions=begun.positions,
            layers=(*begun.layers, (), *finished.layers),
            final_norm=finished.norm,
            unembed=None if begun.embed is None else finished.unembed,
        )
        with named_scope("gradients"):
            layer_gradients, table_gradients = jax.tree.map(
                lambda sum_: sum_.astype(summed), (layer_gradients, table_gradients)
            )
            return psum(losses, manual), psum(layer_gradients, copies), psum(table_gradients, manual)

    by_stage = P(None, "stage")
    counted_share = None if counted is None else counted / shares
    stacks, tables = _by_chunk(weights.layers[shared], table), replace(weights, layers=of_shared(weights.layers, ()))
    losses, layer_gradients, table_gradients = on_some_shards(
        body,
        stacks,
        tables,
        parts,
        counted_share,
        axes=manual,
        in_specs=(by_stage, P(), P(None, copies or None), P()),
        out_specs=(P(), *jax.tree.map(lambda weight: jax.typeof(weight).sharding.spec, (stacks, tables))),
        check_vma=bool(typed),
    )
    return losses, replace(table_gradients, layers=of_shared(table_gradients.layers, _by_layer(layer_gradients)))


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


#: The means that an objective has next to its value, by name.
Terms = dict[str, jax.Array]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class _First:
    """Weights that the first stage uses alone, or their gradients: the embedding, and layers before the shared ones.

    A gradient of ``embed`` is None where it is summed with that of the unembedding.
    """

    embed: jax.Array | None
    positions: jax.Array | None
    layers: tuple[Layers, ...]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class _Last:
    """Weights that the last stage uses alone, or their gradients. ``unembed`` is the embedding table if tied."""

    norm: Norm[jax.Array]
    unembed: jax.Array
    layers: tuple[Layers, ...]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class _StageCarry:
    """The carry of a stage from trip to trip. Buffers have a leading dim of places; ``sent`` is a gradient to send."""

    input: ResidualStream
    gradient: ResidualStream
    sent: ResidualStream
    saved: list[jax.Array]
    split: list[jax.Array]
    layer_gradients: Layers
    first_gradients: _First
    last_gradients: _Last
    losses: tuple[jax.Array, Terms]


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One device's part of a pipeline: its layers [v, n, ...], all other weights, and all microbatches [M, B, T].

    The layers of all stages together are the periods of ``segment``, and padding after them.

    ``begin`` computes the stream before all shared layers from ``first`` and a microbatch, and ``finish`` the objective
    from the stream after them, ``last`` and the microbatch. ``tied``: both have the same table.
    """

    stacks: Layers
    first: _First
    last: _Last
    parts: Batch[jax.Array]
    how: Computation
    segment: Segment
    begin: Callable[[_First, Batch[jax.Array]], ResidualStream]
    finish: Callable[[ResidualStream, _Last, Batch[jax.Array]], tuple[jax.Array, Terms]]
    tied: bool
    table: PipelineTable
    manual: tuple[str, ...]

    def run(self, trips: TripTable) -> tuple[tuple[jax.Array, Terms], Layers, _First, _Last]:
        """The sums over this stage's tasks: losses, and gradients of its layers and of the other weights."""
        part, weights_ = _first(self.parts), _first(_first(self.stacks))
        x, at = self.begin(self.first, part), transformer.places(part, self.how)

        def through(remat: str) -> Through:
            period = transformer.period(self.segment, replace(self.how, remat=remat))
            return lambda stream, weights, at: stream.after(*period(stream.x, weights, at))

        # A task's layers save on the device, and all that they saved goes to the host after the task.
        saving = self.how.remat.replace("=offload", "=save")
        passes = Passes.of(through(saving), x, weights_, at, split_=self.table.split, manual=self.manual)
        hosted = [False] * len(passes.saved)
        if saving != self.how.remat:
            hosted = saved_on_host(through(self.how.remat), x, weights_, at)
        stages, chunks, residuals = self.table.stages, self.table.chunks, list(passes.kept_residuals)
        stage = lax.axis_index("stage")
        at_first, at_last = stage == 0, stage == stages - 1
        counts = self.counts(trips)
        nothing = self.zeros_of(jax.tree.map(jax.typeof, x))

        def once(task: TripTask, condition: jax.Array, do: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
            """One kind of task. Its scope declares how often it is done: HLO does not show that."""

            def taken() -> Any:
                with named_scope(counts[task]):
                    return do()

            return lax.cond(condition, taken, otherwise)

        def forward(x: ResidualStream, task: _StageTask) -> tuple[ResidualStream, list[jax.Array]]:
            with named_scope("layers"):
                at = transformer.places(self.part(task), self.how)
                y, saved = lax.scan(
                    lambda x, of_layer: self.skipped(
                        of_layer.skipped,
                        lambda: passes.forward(x, of_layer.weights, at),
                        lambda: (x, self.zeros_of(passes.saved)),
                    ),
                    x,
                    self.layers(task),
                )
                return y, saved

        def finish(y: ResidualStream, task: _StageTask) -> tuple[tuple[jax.Array, Terms], _Last, ResidualStream]:
            part = self.part(task)
            loss, pull, terms = jax.vjp(lambda y, last: self.finish(y, last, part), y, self.last, has_aux=True)
            dy, gradients = pull(varying(jnp.ones_like(loss), self.manual))
            return (loss, varying(terms, self.manual)), gradients, dy

        def backward(
            carry: _StageCarry, task: _StageTask, fetched: Sequence[jax.Array | None]
        ) -> tuple[ResidualStream, Any]:
            with named_scope("layers"):
                at = transformer.places(self.part(task), self.how)
                saved = [
                    back if back is not None else _at(buffer, task.used[StageBuffer.SAVED])
                    for buffer, back in zip(carry.saved, fetched, strict=True)
                ]
                dx, more = lax.scan(
                    lambda dy, of_layer: self.skipped(
                        of_layer[0].skipped,
                        lambda: passes.backward(dy, of_layer[0].weights, of_layer[1], at),
                        lambda: (dy, self.zeros_of(residuals if self.table.split else of_layer[0].weights)),
                    ),
                    _at(carry.gradient, task.used[StageBuffer.GRADIENT]),
                    (self.layers(task), saved),
                    reverse=True,
                )
                return dx, more

        def begin_backward(dx: ResidualStream, task: _StageTask) -> _First:
            _, pull = jax.vjp(lambda first: self.begin(first, self.part(task)), self.first)
            gradients: _First = pull(dx)[0]
            return gradients

        def weights(carry: _StageCarry, task: _StageTask) -> Layers:
            assert passes.weights is not None
            of_weights = passes.weights
            with named_scope("layers"):
                at = transformer.places(self.part(task), self.how)
                stashed = [_at(buffer, task.used[StageBuffer.SPLIT]) for buffer in carry.split]
                _, more = lax.scan(
                    lambda _, of_layer: self.skipped(
                        of_layer[0].skipped,
                        lambda: (None, of_weights(of_layer[0].weights, of_layer[1], at)),
                        lambda: (None, self.zeros_of(of_layer[0].weights)),
                    ),
                    None,
                    (self.layers(task), stashed),
                )
                gradients: Layers = more
                return gradients

        def exchanged(stream: ResidualStream, *, back: bool) -> ResidualStream:
            """The result of the stage before; ``back``: of the one after."""
            ahead = [(device, (device + 1) % stages) for device in range(stages if chunks > 1 else stages - 1)]
            with named_scope("pipeline"):
                sent: ResidualStream = lax.ppermute(stream, "stage", [(b, a) for a, b in ahead] if back else ahead)
                return sent

        def trip(carry: _StageCarry, row: tuple[jax.Array, ...]) -> tuple[_StageCarry, None]:
            done, microbatch, chunk, used, arriving = (_at(column, stage) for column in row)
            ahead, back, later = (
                _StageTask(done=done[at] > 0, microbatch=microbatch[at], chunk=chunk[at], used=used[at])
                for at in range(len(TRIP_OPS))
            )
            # A gradient arrives while the stage goes forward, and an input while it goes back.
            arrived = exchanged(carry.sent, back=True)
            x = once(
                TripTask.BEGIN,
                ahead.done & at_first & (ahead.chunk == 0),
                lambda: self.begin(self.first, self.part(ahead)),
                lambda: _at(carry.input, ahead.used[StageBuffer.INPUT]),
            )
            y, saved = once(
                TripTask.FORWARD,
                ahead.done,
                lambda: forward(x, ahead),
                lambda: (
                    x,
                    [
                        self.zeros(kind, kind.dtype, self.periods)
                        if on_host
                        else _at(buffer, ahead.used[StageBuffer.SAVED])
                        for buffer, kind, on_host in zip(carry.saved, passes.saved, hosted, strict=True)
                    ],
                ),
            )
            # What is saved has its place before the loss needs room. In the host's memory one place is for nobody.
            place = ahead.used[StageBuffer.SAVED]
            nowhere = jnp.where(ahead.done, place, trips.sizes[StageBuffer.SAVED])
            buffers = [
                _put(buffer, jax.device_put(new, jax.memory.Space.Host), nowhere)
                if on_host
                else _put(buffer, new, place)
                for buffer, new, on_host in zip(carry.saved, saved, hosted, strict=True)
            ]
            y, buffers = lax.optimization_barrier((y, buffers))
            losses, of_last, dy = once(
                TripTask.FINISH,
                ahead.done & at_last & (ahead.chunk == chunks - 1),
                lambda: finish(y, ahead),
                lambda: (self.zeros_of(carry.losses), self.zeros_of(self.last), nothing),
            )
            gradient = _put(carry.gradient, dy, ahead.used[StageBuffer.GRADIENT])
            gradient = _put(gradient, arrived, arriving[StageBuffer.GRADIENT])
            carry = replace(
                carry,
                gradient=gradient,
                saved=buffers,
                losses=jax.tree.map(jnp.add, carry.losses, losses),
                last_gradients=_added(carry.last_gradients, of_last),
            )
            arrived = exchanged(y, back=False)
            fetched = [
                jax.device_put(_at(buffer, back.used[StageBuffer.SAVED]), jax.memory.Space.Device) if on_host else None
                for buffer, on_host in zip(carry.saved, hosted, strict=True)
            ]
            dx, more = once(
                TripTask.BACKWARD,
                back.done,
                lambda: backward(carry, back, fetched),
                lambda: (
                    nothing,
                    [_at(buffer, back.used[StageBuffer.SPLIT]) for buffer in carry.split]
                    if self.table.split
                    else self.zeros_of(_first(self.stacks)),
                ),
            )
            of_first = once(
                TripTask.BEGIN_BACKWARD,
                back.done & at_first & (back.chunk == 0),
                lambda: begin_backward(dx, back),
                lambda: self.zeros_of(self.first),
            )
            if self.table.split:
                places = back.used[StageBuffer.SPLIT]
                carry = replace(
                    carry, split=[_put(buffer, new, places) for buffer, new in zip(carry.split, more, strict=True)]
                )
                more = once(
                    TripTask.WEIGHTS,
                    later.done,
                    lambda: weights(carry, later),
                    lambda: self.zeros_of(_first(self.stacks)),
                )
            last_gradients = carry.last_gradients
            if self.tied:
                both = _added(last_gradients.unembed, of_first.embed)
                last_gradients, of_first = replace(last_gradients, unembed=both), replace(of_first, embed=None)
            return replace(
                carry,
                input=_put(carry.input, arrived, arriving[StageBuffer.INPUT]),
                sent=dx,
                layer_gradients=self.added(carry.layer_gradients, more, later if self.table.split else back),
                first_gradients=_added(carry.first_gradients, of_first),
                last_gradients=last_gradients,
            ), None

        rows = tuple(map(jnp.asarray, (trips.done, trips.microbatch, trips.chunk, trips.used, trips.arriving)))
        carry, _ = lax.scan(trip, self.empty(x, passes, trips, hosted), rows)
        return carry.losses, carry.layer_gradients, carry.first_gradients, carry.last_gradients

    def counts(self, trips: TripTable) -> dict[TripTask, str]:
        """Scopes that declare for each kind of task how many trips of a stage do it, and for how many all wait."""
        table, rows = self.table, len(trips.done)
        missing = min(self.padding, self.periods)
        layer = sum(leaf.size for leaf in jax.tree.leaves(self.stacks)) / (self.periods * table.chunks)
        # Forward and backward of the unembedding, and forward of layers.
        waited = waited_trips(
            table,
            last_chunk=Fraction(self.periods - missing, self.periods),
            loss_longer=3 * self.last.unembed.size >= missing * layer,
        )
        every = table.microbatches * table.chunks
        times = {
            TripTask.BEGIN: table.microbatches, TripTask.FORWARD: every, TripTask.FINISH: table.microbatches,
            TripTask.BACKWARD: every, TripTask.BEGIN_BACKWARD: table.microbatches, TripTask.WEIGHTS: every,
        }  # fmt: skip
        return {task: f"taken[{times[task]}:{rows}:{float(waited[task]):g}]" for task in TripTask}

    def empty(self, x: ResidualStream, passes: Passes, trips: TripTable, hosted: Sequence[bool]) -> _StageCarry:
        """The carry into the first trip."""

        def buffer(like: Any, kind: StageBuffer, *more: int) -> jax.Array:
            # An extra place receives what arrives for nobody. A stage's own tasks always have a place.
            arrives = kind in (StageBuffer.INPUT, StageBuffer.GRADIENT)
            return self.zeros(like, like.dtype, trips.sizes[kind] + arrives, *more)

        def sums(weights: Any) -> Any:
            return jax.tree.map(lambda weight: self.zeros(weight, jnp.float32), weights)

        n = self.periods
        losses = jax.eval_shape(self.finish, x, self.last, _first(self.parts))
        return _StageCarry(
            input=jax.tree.map(lambda leaf: buffer(leaf, StageBuffer.INPUT), x),
            gradient=jax.tree.map(lambda leaf: buffer(leaf, StageBuffer.GRADIENT), x),
            sent=jax.tree.map(lambda leaf: self.zeros(leaf, leaf.dtype), x),
            saved=[
                self.on_host(kind, trips.sizes[StageBuffer.SAVED] + 1, n)
                if on_host
                else buffer(kind, StageBuffer.SAVED, n)
                for kind, on_host in zip(passes.saved, hosted, strict=True)
            ],
            split=[buffer(kind, StageBuffer.SPLIT, n) for kind in passes.kept_residuals],
            layer_gradients=sums(self.stacks),
            first_gradients=sums(replace(self.first, embed=None) if self.tied else self.first),
            last_gradients=sums(self.last),
            losses=jax.tree.map(lambda scalar: self.zeros(scalar, scalar.dtype), losses),
        )

    def zeros(self, like: Any, dtype: Any, *more: int) -> jax.Array:
        """Zeros [*more, *like], split as ``like``."""
        spec = like.sharding.spec if isinstance(like, jax.core.ShapedArray) else jax.typeof(like).sharding.spec
        zeros = jnp.zeros((*more, *like.shape), dtype, out_sharding=P(*(None for _ in more), *spec.partitions))
        return varying(zeros, self.manual)

    def on_host(self, like: Any, *more: int) -> jax.Array:
        """Zeros [*more, *like] in the memory of the host."""
        return jax.device_put(self.zeros(like, like.dtype, *more), jax.memory.Space.Host)

    def part(self, task: _StageTask) -> Batch[jax.Array]:
        """The task's microbatch [B, T]."""
        microbatch: Batch[jax.Array] = _at(self.parts, task.microbatch)
        return microbatch

    @property
    def periods(self) -> int:
        """Periods of layers that a chunk has room for."""
        n: int = jax.tree.leaves(self.stacks)[0].shape[1]
        return n

    @property
    def padding(self) -> int:
        """Periods that the chunks of all stages have room for, beyond those of the model."""
        return self.periods * self.table.stages * self.table.chunks - self.segment.repeats

    def layers(self, task: _StageTask) -> _ChunkLayers:
        """The layers [n, ...] of the task's chunk."""
        if not self.padding:
            return _ChunkLayers(weights=_at(self.stacks, task.chunk))
        first = (task.chunk * self.table.stages + lax.axis_index("stage")) * self.periods
        skipped = first + jnp.arange(self.periods) >= self.segment.repeats
        return _ChunkLayers(weights=_at(self.stacks, task.chunk), skipped=skipped)

    def skipped(self, skipped: jax.Array | None, layer: Callable[[], Any], identity: Callable[[], Any]) -> Any:
        """The results of ``layer``, or of ``identity`` for padding. The scope declares how often layers are done."""
        if skipped is None:
            return layer()

        def taken() -> Any:
            with named_scope(f"taken[{self.segment.repeats}:{self.segment.repeats + self.padding}]"):
                return layer()

        return lax.cond(skipped, identity, taken)

    def zeros_of(self, like: Any) -> Any:
        """Zeros in place of arrays of a layer."""
        return jax.tree.map(lambda leaf: self.zeros(leaf, leaf.dtype), like)

    def added(self, sums: Layers, more: Layers, task: _StageTask) -> Layers:
        """Gradients of the task's chunk added to all."""
        # As in ``_added``.
        more = lax.optimization_barrier(more)
        with named_scope("gradients"):
            return jax.tree.map(
                lambda sum_, gradient: _put(sum_, _at(sum_, task.chunk) + gradient.astype(jnp.float32), task.chunk),
                sums,
                more,
            )


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class _ChunkLayers:
    """The layers of a chunk [n, ...], and which of them are padding [n]; None without any."""

    weights: Layers
    skipped: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class _StageTask:
    """A task of a stage in a trip: if it is done, int32 scalars, and the place that it uses in each buffer."""

    done: jax.Array
    microbatch: jax.Array
    chunk: jax.Array
    used: jax.Array


def _first(tree: Any) -> Any:
    return jax.tree.map(lambda array: array[0], tree)


def _at(tree: Any, index: jax.Array) -> Any:
    return jax.tree.map(lambda array: lax.dynamic_index_in_dim(array, index, keepdims=False), tree)


def _put(tree: Any, update: Any, index: jax.Array) -> Any:
    return jax.tree.map(lambda array, new: lax.dynamic_update_index_in_dim(array, new, index, 0), tree, update)


def _added(sums: Any, more: Any) -> Any:
    """Sums in float32, with more added to them."""
    # XLA would make the float32 values in a conditional, and write them.
    more = lax.optimization_barrier(more)
    with named_scope("gradients"):
        return jax.tree.map(lambda sum_, gradient: sum_ + gradient.astype(jnp.float32), sums, more)
