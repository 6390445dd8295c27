"""A device's part of a pipeline, and its tasks in the trips of a table: see ``rooftop.programs.training.pipeline``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
from jax import P, lax, named_scope

from rooftop.models.segments import Segment
from rooftop.programs.model import transformer
from rooftop.programs.model.layer import Computation
from rooftop.programs.parameters import Batch, Norm
from rooftop.programs.sharding import varying
from rooftop.programs.training.passes import Layers, Passes, ResidualStream, Through, saved_on_host
from rooftop.scheduling.pipeline import (
    TRIP_OPS,
    PipelineTable,
    StageBuffer,
    TripTable,
    TripTask,
    waited_trips,
)

#: The means that an objective has next to its value, by name.
Terms = dict[str, jax.Array]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class FirstWeights:
    """Weights that the first stage uses alone, or their gradients: the embedding, and layers before the shared ones.

    A gradient of ``embed`` is None where it is summed with that of the unembedding.
    """

    embed: jax.Array | None
    positions: jax.Array | None
    layers: tuple[Layers, ...]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class LastWeights:
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
    first_gradients: FirstWeights
    last_gradients: LastWeights
    losses: tuple[jax.Array, Terms]


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One device's part of a pipeline: its layers [v, n, ...], all other weights, and all microbatches [M, B, T].

    The layers of all stages together are the periods of ``segment``, and padding after them.

    ``begin`` computes the stream before all shared layers from ``first`` and a microbatch, and ``finish`` the objective
    from the stream after them, ``last`` and the microbatch. ``tied``: both have the same table.
    """

    stacks: Layers
    first: FirstWeights
    last: LastWeights
    parts: Batch[jax.Array]
    how: Computation
    segment: Segment
    begin: Callable[[FirstWeights, Batch[jax.Array]], ResidualStream]
    finish: Callable[[ResidualStream, LastWeights, Batch[jax.Array]], tuple[jax.Array, Terms]]
    tied: bool
    table: PipelineTable
    manual: tuple[str, ...]

    def run(self, trips: TripTable) -> tuple[tuple[jax.Array, Terms], Layers, FirstWeights, LastWeights]:
        """The sums over this stage's tasks: losses, and gradients of its layers and of the other weights."""
        part, weights = _first(self.parts), _first(_first(self.stacks))
        x, at = self.begin(self.first, part), transformer.places(part, self.how)

        def through(remat: str) -> Through:
            period = transformer.period(self.segment, replace(self.how, remat=remat))
            return lambda stream, weights, at: stream.after(*period(stream.x, weights, at))

        # A task's layers save on the device, and all that they saved goes to the host after the task.
        saving = self.how.remat.replace("=offload", "=save")
        passes = Passes.of(through(saving), x, weights, at, split_=self.table.split, manual=self.manual)
        hosted = [False] * len(passes.saved)
        if saving != self.how.remat:
            hosted = saved_on_host(through(self.how.remat), x, weights, at)
        index = lax.axis_index("stage")
        tasks = _Tasks(
            stage=self, trips=trips, passes=passes, hosted=hosted, index=index, at_first=index == 0,
            at_last=index == self.table.stages - 1, counts=self.counts(trips),
            nothing=self.zeros_of(jax.tree.map(jax.typeof, x)),
        )  # fmt: skip
        rows = tuple(map(jnp.asarray, (trips.done, trips.microbatch, trips.chunk, trips.used, trips.arriving)))
        carry, _ = lax.scan(tasks.trip, self.empty(x, passes, trips, hosted), rows)
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


@dataclass(frozen=True, kw_only=True)
class _Tasks:
    """The tasks of a stage in a trip, whose layers do the ``passes``.

    ``index`` is the stage's own, and ``at_first`` and ``at_last`` say if it is an end of the pipeline. ``counts`` are
    the scopes of tasks, ``hosted`` says which saved arrays lie on the host, and ``nothing`` is a stream of zeros.
    """

    stage: Stage
    trips: TripTable
    passes: Passes
    hosted: Sequence[bool]
    index: jax.Array
    at_first: jax.Array
    at_last: jax.Array
    counts: Mapping[TripTask, str]
    nothing: ResidualStream

    def trip(self, carry: _StageCarry, row: tuple[jax.Array, ...]) -> tuple[_StageCarry, None]:
        """One task of each kind, where the table has one for this stage, and the exchanges between them."""
        stage = self.stage
        done, microbatch, chunk, used, arriving = (_at(column, self.index) for column in row)
        ahead, back, later = (
            _StageTask(done=done[at] > 0, microbatch=microbatch[at], chunk=chunk[at], used=used[at])
            for at in range(len(TRIP_OPS))
        )
        # A gradient arrives while the stage goes forward, and an input while it goes back.
        arrived = self.exchanged(carry.sent, back=True)
        y, carry = self.go_ahead(carry, ahead)
        losses, of_last, dy = self.finish(y, carry, ahead)
        gradient = _put(carry.gradient, dy, ahead.used[StageBuffer.GRADIENT])
        gradient = _put(gradient, arrived, arriving[StageBuffer.GRADIENT])
        carry = replace(
            carry,
            gradient=gradient,
            losses=jax.tree.map(jnp.add, carry.losses, losses),
            last_gradients=_added(carry.last_gradients, of_last),
        )
        arrived = self.exchanged(y, back=False)
        dx, more = self.go_back(carry, back)
        of_first = self.begin_back(dx, back)
        if stage.table.split:
            carry, more = self.go_later(carry, more, back, later)
        last_gradients = carry.last_gradients
        if stage.tied:
            both = _added(last_gradients.unembed, of_first.embed)
            last_gradients, of_first = replace(last_gradients, unembed=both), replace(of_first, embed=None)
        return replace(
            carry,
            input=_put(carry.input, arrived, arriving[StageBuffer.INPUT]),
            sent=dx,
            layer_gradients=stage.added(carry.layer_gradients, more, later if stage.table.split else back),
            first_gradients=_added(carry.first_gradients, of_first),
            last_gradients=last_gradients,
        ), None

    def go_ahead(self, carry: _StageCarry, task: _StageTask) -> tuple[ResidualStream, _StageCarry]:
        """The output of the task's chunk for its microbatch, and the carry with what its layers saved."""
        stage = self.stage
        x = self.once(
            TripTask.BEGIN,
            task.done & self.at_first & (task.chunk == 0),
            lambda: stage.begin(stage.first, stage.part(task)),
            lambda: _at(carry.input, task.used[StageBuffer.INPUT]),
        )
        y, saved = self.once(
            TripTask.FORWARD,
            task.done,
            lambda: self.forward(x, task),
            lambda: (
                x,
                [
                    stage.zeros(kind, kind.dtype, stage.periods)
                    if on_host
                    else _at(buffer, task.used[StageBuffer.SAVED])
                    for buffer, kind, on_host in zip(carry.saved, self.passes.saved, self.hosted, strict=True)
                ],
            ),
        )
        # What is saved has its place before the loss needs room. In the host's memory one place is for nobody.
        place = task.used[StageBuffer.SAVED]
        nowhere = jnp.where(task.done, place, self.trips.sizes[StageBuffer.SAVED])
        buffers = [
            _put(buffer, jax.device_put(new, jax.memory.Space.Host), nowhere) if on_host else _put(buffer, new, place)
            for buffer, new, on_host in zip(carry.saved, saved, self.hosted, strict=True)
        ]
        y, buffers = lax.optimization_barrier((y, buffers))
        return y, replace(carry, saved=buffers)

    def forward(self, x: ResidualStream, task: _StageTask) -> tuple[ResidualStream, list[jax.Array]]:
        """The stream after the layers of the task's chunk, and what they save."""
        stage, passes = self.stage, self.passes
        with named_scope("layers"):
            at = transformer.places(stage.part(task), stage.how)
            y, saved = lax.scan(
                lambda x, of_layer: stage.skipped(
                    of_layer.skipped,
                    lambda: passes.forward(x, of_layer.weights, at),
                    lambda: (x, stage.zeros_of(passes.saved)),
                ),
                x,
                stage.layers(task),
            )
            return y, saved

    def finish(self, y: ResidualStream, carry: _StageCarry, task: _StageTask) -> tuple[Any, LastWeights, Any]:
        """The objective of the task's microbatch after the last chunk, and gradients of the last weights and of y."""
        stage = self.stage

        def of_part() -> tuple[tuple[jax.Array, Terms], LastWeights, ResidualStream]:
            part = stage.part(task)
            loss, pull, terms = jax.vjp(lambda y, last: stage.finish(y, last, part), y, stage.last, has_aux=True)
            dy, gradients = pull(varying(jnp.ones_like(loss), stage.manual))
            return (loss, varying(terms, stage.manual)), gradients, dy

        results: tuple[Any, LastWeights, Any] = self.once(
            TripTask.FINISH,
            task.done & self.at_last & (task.chunk == stage.table.chunks - 1),
            of_part,
            lambda: (stage.zeros_of(carry.losses), stage.zeros_of(stage.last), self.nothing),
        )
        return results

    def go_back(self, carry: _StageCarry, task: _StageTask) -> tuple[ResidualStream, Any]:
        """Gradients of the chunk's input and of its weights; of a split table, the residuals in place of these."""
        stage, used = self.stage, task.used
        fetched = [
            jax.device_put(_at(buffer, used[StageBuffer.SAVED]), jax.memory.Space.Device) if on_host else None
            for buffer, on_host in zip(carry.saved, self.hosted, strict=True)
        ]
        results: tuple[ResidualStream, Any] = self.once(
            TripTask.BACKWARD,
            task.done,
            lambda: self.backward(carry, task, fetched),
            lambda: (
                self.nothing,
                [_at(buffer, used[StageBuffer.SPLIT]) for buffer in carry.split]
                if stage.table.split
                else stage.zeros_of(_first(stage.stacks)),
            ),
        )
        return results

    def backward(
        self, carry: _StageCarry, task: _StageTask, fetched: Sequence[jax.Array | None]
    ) -> tuple[ResidualStream, Any]:
        """The backward pass of the layers of the task's chunk; ``fetched`` are the saved arrays that were hosted."""
        stage, passes = self.stage, self.passes
        residuals = list(passes.kept_residuals)
        with named_scope("layers"):
            at = transformer.places(stage.part(task), stage.how)
            saved = [
                back if back is not None else _at(buffer, task.used[StageBuffer.SAVED])
                for buffer, back in zip(carry.saved, fetched, strict=True)
            ]
            dx, more = lax.scan(
                lambda dy, of_layer: stage.skipped(
                    of_layer[0].skipped,
                    lambda: passes.backward(dy, of_layer[0].weights, of_layer[1], at),
                    lambda: (dy, stage.zeros_of(residuals if stage.table.split else of_layer[0].weights)),
                ),
                _at(carry.gradient, task.used[StageBuffer.GRADIENT]),
                (stage.layers(task), saved),
                reverse=True,
            )
            return dx, more

    def begin_back(self, dx: ResidualStream, task: _StageTask) -> FirstWeights:
        """Gradients of the first weights from that of the first chunk's input."""
        stage = self.stage

        def of_part() -> FirstWeights:
            _, pull = jax.vjp(lambda first: stage.begin(first, stage.part(task)), stage.first)
            gradients: FirstWeights = pull(dx)[0]
            return gradients

        of_first: FirstWeights = self.once(
            TripTask.BEGIN_BACKWARD,
            task.done & self.at_first & (task.chunk == 0),
            of_part,
            lambda: stage.zeros_of(stage.first),
        )
        return of_first

    def go_later(
        self, carry: _StageCarry, more: Sequence[jax.Array], back: _StageTask, later: _StageTask
    ) -> tuple[_StageCarry, Layers]:
        """Keep the residuals ``more`` of the task ``back``, and return the gradients of the weights of ``later``."""
        stage, places = self.stage, back.used[StageBuffer.SPLIT]
        carry = replace(carry, split=[_put(buffer, new, places) for buffer, new in zip(carry.split, more, strict=True)])
        gradients: Layers = self.once(
            TripTask.WEIGHTS,
            later.done,
            lambda: self.weights(carry, later),
            lambda: stage.zeros_of(_first(stage.stacks)),
        )
        return carry, gradients

    def weights(self, carry: _StageCarry, task: _StageTask) -> Layers:
        """Gradients of the weights of the task's chunk, from the residuals that a split backward pass kept."""
        stage, of_weights = self.stage, self.passes.weights
        assert of_weights is not None
        with named_scope("layers"):
            at = transformer.places(stage.part(task), stage.how)
            stashed = [_at(buffer, task.used[StageBuffer.SPLIT]) for buffer in carry.split]
            _, more = lax.scan(
                lambda _, of_layer: stage.skipped(
                    of_layer[0].skipped,
                    lambda: (None, of_weights(of_layer[0].weights, of_layer[1], at)),
                    lambda: (None, stage.zeros_of(of_layer[0].weights)),
                ),
                None,
                (stage.layers(task), stashed),
            )
            gradients: Layers = more
            return gradients

    def once(self, task: TripTask, condition: jax.Array, do: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
        """One kind of task. Its scope declares how often it is done: HLO does not show that."""

        def taken() -> Any:
            with named_scope(self.counts[task]):
                return do()

        return lax.cond(condition, taken, otherwise)

    def exchanged(self, stream: ResidualStream, *, back: bool) -> ResidualStream:
        """The result of the stage before; ``back``: of the one after."""
        stages, chunks = self.stage.table.stages, self.stage.table.chunks
        ahead = [(device, (device + 1) % stages) for device in range(stages if chunks > 1 else stages - 1)]
        with named_scope("pipeline"):
            sent: ResidualStream = lax.ppermute(stream, "stage", [(b, a) for a, b in ahead] if back else ahead)
            return sent


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
