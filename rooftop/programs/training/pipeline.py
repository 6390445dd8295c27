"""Loss and gradients of a batch whose microbatches pass through pipeline stages, by a table of ``rooftop.scheduling``.

One program runs on all devices. It is manual (``jax.shard_map``) over the stage axis, and over the axes that hold
copies of the weights, whose gradients are summed once at the end. It scans over the table's slots: each stage does its
own task by ``jax.lax.switch``, and neighbours exchange results (``ppermute``). The collectives of a task are among the
devices of one stage, which do the same task; collectives between stages are outside of the switch.

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
from typing import Any

import jax
import jax.numpy as jnp
from jax import P, lax, named_scope

from rooftop.core.errors import RooftopError
from rooftop.models.segments import Segment, segments, shared_segment
from rooftop.programs.model import transformer
from rooftop.programs.model.layer import Computation
from rooftop.programs.model.moe import no_load
from rooftop.programs.parameters import Batch, Transformer
from rooftop.programs.sharding import Dim, Specs, in_parts, varying
from rooftop.programs.training.passes import Layers, Passes, ResidualStream
from rooftop.scheduling.pipeline import BufferPlaces, PipelineTable, StageBuffer, StageOp, places


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
    if "=offload" in how.remat:
        raise RooftopError("remat", how.remat, "no offload with pipeline stages")
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

        def begin(tables: Transformer[jax.Array], part: Batch[jax.Array]) -> ResidualStream:
            with named_scope("embed"):
                x = transformer.embed(tables, part, inside)
            load = varying(no_load(how.model, inside.specs), typed) if how.balance_loss else None
            return _through(runs[:shared], tables.layers[:shared], ResidualStream(x=x, load=load), part, inside)

        def finish(
            stream: ResidualStream, tables: Transformer[jax.Array], part: Batch[jax.Array]
        ) -> tuple[jax.Array, Terms]:
            stream = _through(runs[shared + 1 :], tables.layers[shared + 1 :], stream, part, inside)
            result = transformer.head_loss(stream.x, tables, part, inside, chunks=loss_chunks, counted=counted)
            if stream.load is not None:
                with named_scope("loss"):
                    load = lax.psum(jnp.sum(stream.load, axis=0), copies)
                result = transformer.balanced(*result, load, inside)
            share: tuple[jax.Array, Terms] = jax.tree.map(lambda mean: mean / shares, result)
            return share

        stage = Stage(
            stacks=stacks, tables=tables, parts=parts, how=inside, segment=runs[shared], begin=begin, finish=finish,
            table=table, manual=typed,
        )  # fmt: skip
        losses, layer_gradients, table_gradients = stage.run(places(table))
        with named_scope("gradients"):
            layer_gradients, table_gradients = jax.tree.map(
                lambda sum_: sum_.astype(summed), (layer_gradients, table_gradients)
            )
            layer_gradients = (
                jax.tree.map(lambda sum_: lax.psum(sum_, copies), layer_gradients) if copies else layer_gradients
            )
            return lax.psum(losses, manual), layer_gradients, lax.psum(table_gradients, manual)

    by_stage = P(None, "stage")
    counted_share = None if counted is None else counted / shares
    losses, layer_gradients, table_gradients = jax.shard_map(
        body,
        in_specs=(by_stage, P(), P(None, copies or None), P()),
        out_specs=(P(), by_stage, P()),
        axis_names=set(manual),
        check_vma=bool(typed),
    )(
        _by_chunk(weights.layers[shared], table),
        replace(weights, layers=of_shared(weights.layers, ())),
        parts,
        counted_share,
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
class _StageCarry:
    """The carry of a stage from slot to slot. Buffers have a leading dim of places."""

    input: ResidualStream
    gradient: ResidualStream
    saved: list[jax.Array]
    split: list[jax.Array]
    layer_gradients: Layers
    table_gradients: Transformer[jax.Array]
    losses: tuple[jax.Array, Terms]


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One device's part of a pipeline: its layers [v, n, ...], all other weights, and all microbatches [M, B, T].

    The layers of all stages together are the periods of ``segment``, and padding after them.

    ``begin`` computes the stream before all shared layers, and ``finish`` the objective from the stream after them.
    Both get the other weights and a microbatch.
    """

    stacks: Layers
    tables: Transformer[jax.Array]
    parts: Batch[jax.Array]
    how: Computation
    segment: Segment
    begin: Callable[[Transformer[jax.Array], Batch[jax.Array]], ResidualStream]
    finish: Callable[[ResidualStream, Transformer[jax.Array], Batch[jax.Array]], tuple[jax.Array, Terms]]
    table: PipelineTable
    manual: tuple[str, ...]

    def run(self, where: BufferPlaces) -> tuple[tuple[jax.Array, Terms], Layers, Transformer[jax.Array]]:
        """The sums over this stage's tasks: of losses, of its layers' gradients and of the other weights' gradients."""
        part, weights_ = _first(self.parts), _first(_first(self.stacks))
        x, period = self.begin(self.tables, part), transformer.period(self.segment, self.how)

        def through(stream: ResidualStream, weights: Layers, at: transformer.Places) -> ResidualStream:
            return stream.after(*period(stream.x, weights, at))

        passes = Passes.of(
            through, x, weights_, transformer.places(part, self.how), split_=self.table.split, manual=self.manual
        )
        stages, chunks, residuals = self.table.stages, self.table.chunks, list(passes.kept_residuals)
        stage = lax.axis_index("stage")
        first_, last_ = stage == 0, stage == stages - 1

        def nothing() -> ResidualStream:
            return varying(jax.tree.map(jnp.zeros_like, x), self.manual)

        def idle(carry: _StageCarry, task: _StageTask) -> tuple[_StageCarry, ResidualStream, ResidualStream]:
            return carry, nothing(), nothing()

        def forward(carry: _StageCarry, task: _StageTask) -> tuple[_StageCarry, ResidualStream, ResidualStream]:
            part = self.part(task)
            x = lax.cond(
                first_ & (task.chunk == 0),
                lambda: self.begin(self.tables, part),
                lambda: _at(carry.input, task.used[StageBuffer.INPUT]),
            )
            with named_scope("layers"):
                at = transformer.places(part, self.how)
                y, saved = lax.scan(
                    lambda x, of_layer: self.skipped(
                        of_layer.skipped,
                        lambda: passes.forward(x, of_layer.weights, at),
                        lambda: (x, self.zeros_of(passes.saved)),
                    ),
                    x,
                    self.layers(task),
                )

            def head() -> tuple[Any, Transformer[jax.Array], ResidualStream]:
                loss, pull, terms = jax.vjp(
                    lambda y, tables: self.finish(y, tables, part), y, self.tables, has_aux=True
                )
                dy, more = pull(varying(jnp.ones_like(loss), self.manual))
                added = jax.tree.map(jnp.add, carry.losses, (loss, terms))
                return (
                    added,
                    _added(carry.table_gradients, more),
                    _put(carry.gradient, dy, task.used[StageBuffer.GRADIENT]),
                )

            losses, table_gradients, gradient = lax.cond(
                last_ & (task.chunk == chunks - 1), head, lambda: (carry.losses, carry.table_gradients, carry.gradient)
            )
            buffer = [
                _put(buffer, x, task.used[StageBuffer.SAVED]) for buffer, x in zip(carry.saved, saved, strict=True)
            ]
            new = replace(carry, saved=buffer, gradient=gradient, losses=losses, table_gradients=table_gradients)
            return new, y, nothing()

        def backward(carry: _StageCarry, task: _StageTask) -> tuple[_StageCarry, ResidualStream, ResidualStream]:
            part = self.part(task)
            with named_scope("layers"):
                at = transformer.places(part, self.how)
                saved = [_at(buffer, task.used[StageBuffer.SAVED]) for buffer in carry.saved]
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
                if self.table.split:
                    buffer = [
                        _put(into, x, task.used[StageBuffer.SPLIT]) for into, x in zip(carry.split, more, strict=True)
                    ]
                    carry = replace(carry, split=buffer)
                else:
                    carry = replace(carry, layer_gradients=self.added(carry.layer_gradients, more, task))

            def tables() -> Transformer[jax.Array]:
                _, pull = jax.vjp(lambda tables: self.begin(tables, part), self.tables)
                return _added(carry.table_gradients, pull(dx)[0])

            table_gradients = lax.cond(first_ & (task.chunk == 0), tables, lambda: carry.table_gradients)
            return replace(carry, table_gradients=table_gradients), nothing(), dx

        def weights(carry: _StageCarry, task: _StageTask) -> tuple[_StageCarry, ResidualStream, ResidualStream]:
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
                return (
                    replace(carry, layer_gradients=self.added(carry.layer_gradients, more, task)),
                    nothing(),
                    nothing(),
                )

        ops = [
            self.declared(op, task)
            for op, task in ((StageOp.IDLE, idle), (StageOp.FORWARD, forward), (StageOp.BACKWARD, backward))
        ]
        ops += [self.declared(StageOp.WEIGHTS, weights)] if self.table.split else []
        round_ = [(device, (device + 1) % stages) for device in range(stages if chunks > 1 else stages - 1)]

        def slot(carry: _StageCarry, row: tuple[jax.Array, ...]) -> tuple[_StageCarry, None]:
            op, microbatch, chunk, used, arriving = (_at(column, stage) for column in row)
            task = _StageTask(microbatch=microbatch, chunk=chunk, used=used)
            carry, y, dx = lax.switch(op, ops, carry, task)
            with named_scope("pipeline"):
                y, dx = lax.ppermute(y, "stage", round_), lax.ppermute(dx, "stage", [(b, a) for a, b in round_])
            return replace(
                carry,
                input=_put(carry.input, y, arriving[StageBuffer.INPUT]),
                gradient=_put(carry.gradient, dx, arriving[StageBuffer.GRADIENT]),
            ), None

        rows = tuple(map(jnp.asarray, (where.op, where.microbatch, where.chunk, where.used, where.arriving)))
        carry, _ = lax.scan(slot, self.empty(x, passes, where), rows)
        return carry.losses, carry.layer_gradients, carry.table_gradients

    def declared(self, op: StageOp, branch: _Branch) -> _Branch:
        """A task in the scope that declares in how many of the slots a stage runs it: HLO does not show that."""
        slots = self.table.slots
        times = sum((row[0].op if row[0] else StageOp.IDLE) is op for row in slots)

        def taken(carry: _StageCarry, task: _StageTask) -> tuple[_StageCarry, ResidualStream, ResidualStream]:
            with named_scope(f"taken[{times}:{len(slots)}]"):
                return branch(carry, task)

        return taken

    def empty(self, x: ResidualStream, passes: Passes, where: BufferPlaces) -> _StageCarry:
        """The carry into the first slot."""

        def buffer(like: Any, kind: StageBuffer, *more: int) -> jax.Array:
            # An extra place receives what arrives for nobody. A stage's own tasks always have a place.
            arrives = kind in (StageBuffer.INPUT, StageBuffer.GRADIENT)
            return self.zeros(like, like.dtype, where.sizes[kind] + arrives, *more)

        n = self.periods
        losses = jax.eval_shape(self.finish, x, self.tables, _first(self.parts))
        return _StageCarry(
            input=jax.tree.map(lambda leaf: buffer(leaf, StageBuffer.INPUT), x),
            gradient=jax.tree.map(lambda leaf: buffer(leaf, StageBuffer.GRADIENT), x),
            saved=[buffer(kind, StageBuffer.SAVED, n) for kind in passes.saved],
            split=[buffer(kind, StageBuffer.SPLIT, n) for kind in passes.kept_residuals],
            layer_gradients=jax.tree.map(lambda weight: self.zeros(weight, jnp.float32), self.stacks),
            table_gradients=jax.tree.map(lambda weight: self.zeros(weight, jnp.float32), self.tables),
            losses=jax.tree.map(lambda scalar: self.zeros(scalar, scalar.dtype), losses),
        )

    def zeros(self, like: Any, dtype: Any, *more: int) -> jax.Array:
        """Zeros [*more, *like], split as ``like``."""
        spec = like.sharding.spec if isinstance(like, jax.core.ShapedArray) else jax.typeof(like).sharding.spec
        zeros = jnp.zeros((*more, *like.shape), dtype, out_sharding=P(*(None for _ in more), *spec.partitions))
        return varying(zeros, self.manual)

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
    """The task of a stage in a slot: int32 scalars, and the place that it uses in each buffer."""

    microbatch: jax.Array
    chunk: jax.Array
    used: jax.Array


_Branch = Callable[[_StageCarry, _StageTask], tuple[_StageCarry, ResidualStream, ResidualStream]]


def _first(tree: Any) -> Any:
    return jax.tree.map(lambda array: array[0], tree)


def _at(tree: Any, index: jax.Array) -> Any:
    return jax.tree.map(lambda array: lax.dynamic_index_in_dim(array, index, keepdims=False), tree)


def _put(tree: Any, update: Any, index: jax.Array) -> Any:
    return jax.tree.map(lambda array, new: lax.dynamic_update_index_in_dim(array, new, index, 0), tree, update)


def _added(sums: Any, more: Any) -> Any:
    with named_scope("gradients"):
        return jax.tree.map(lambda sum_, gradient: sum_ + gradient.astype(jnp.float32), sums, more)
