"""One stage of a pipeline: the tasks of ``rooftop.scheduling.pipeline`` on its layers, slot by slot.

A forward task keeps what the remat policy says, and a backward task computes the rest again, layer by layer. In a split
backward, BACKWARD does what the gradient of the input needs and WEIGHTS what remains (``rooftop.programs.split``).
The first part of the model embeds the tokens; the last computes the loss and its gradient in its forward task.

Dims: M microbatches, v chunks of the model on a stage, n periods of layers in a chunk, B, T, D as elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import P, lax, named_scope

from rooftop.models.segments import Segment
from rooftop.programs import transformer
from rooftop.programs.layer import Computation
from rooftop.programs.parameters import Batch, Transformer
from rooftop.programs.pipeline_passes import Layers, Passes, Stream, varying
from rooftop.scheduling.buffers import Buffer, Places
from rooftop.scheduling.pipeline import Op, Table

#: The means that an objective has beside its value, by their names.
Terms = dict[str, jax.Array]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class _Kept:
    """What a stage carries from slot to slot; ``buffers`` have their places first."""

    input: Stream
    gradient: Stream
    saved: list[jax.Array]
    split: list[jax.Array]
    of_layers: Layers
    of_tables: Transformer[jax.Array]
    found: tuple[jax.Array, Terms]


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One device's part of a pipeline: its layers [v, n, ...], all other weights, and all microbatches [M, B, T].

    ``begin`` is what comes before all shared layers, and ``finish`` the objective of what leaves them: both of the
    other weights and a microbatch.
    """

    stacks: Layers
    tables: Transformer[jax.Array]
    parts: Batch[jax.Array]
    how: Computation
    segment: Segment
    begin: Callable[[Transformer[jax.Array], Batch[jax.Array]], Stream]
    finish: Callable[[Stream, Transformer[jax.Array], Batch[jax.Array]], tuple[jax.Array, Terms]]
    table: Table
    manual: tuple[str, ...]

    def run(self, where: Places) -> tuple[tuple[jax.Array, Terms], Layers, Transformer[jax.Array]]:
        """The sums over this stage's tasks: of losses, of its layers' gradients and of the other weights'."""
        part, weights_ = _first(self.parts), _first(_first(self.stacks))
        x, period = self.begin(self.tables, part), transformer.period(self.segment, self.how)

        def through(stream: Stream, weights: Layers, at: transformer.Places) -> Stream:
            return stream.after(*period(stream.x, weights, at))

        passes = Passes.of(
            through, x, weights_, transformer.places(part, self.how), split_=self.table.split, manual=self.manual
        )
        stages, chunks = self.table.stages, self.table.chunks
        stage = lax.axis_index("stage")
        first_, last_ = stage == 0, stage == stages - 1

        def nothing() -> Stream:
            return varying(jax.tree.map(jnp.zeros_like, x), self.manual)

        def idle(kept: _Kept, task: _Task) -> tuple[_Kept, Stream, Stream]:
            return kept, nothing(), nothing()

        def forward(kept: _Kept, task: _Task) -> tuple[_Kept, Stream, Stream]:
            part = self.part(task)
            x = lax.cond(
                first_ & (task.chunk == 0),
                lambda: self.begin(self.tables, part),
                lambda: _at(kept.input, task.used[Buffer.INPUT]),
            )
            with named_scope("layers"):
                at = transformer.places(part, self.how)
                y, saved = lax.scan(lambda x, weights: passes.forward(x, weights, at), x, self.layers(task))

            def head() -> tuple[Any, Transformer[jax.Array], Stream]:
                found, pull, terms = jax.vjp(
                    lambda y, tables: self.finish(y, tables, part), y, self.tables, has_aux=True
                )
                dy, more = pull(varying(jnp.ones_like(found), self.manual))
                added = jax.tree.map(jnp.add, kept.found, (found, terms))
                return added, _added(kept.of_tables, more), _put(kept.gradient, dy, task.used[Buffer.GRADIENT])

            found, of_tables, gradient = lax.cond(
                last_ & (task.chunk == chunks - 1), head, lambda: (kept.found, kept.of_tables, kept.gradient)
            )
            buffer = [
                _put(buffer, each, task.used[Buffer.SAVED]) for buffer, each in zip(kept.saved, saved, strict=True)
            ]
            return replace(kept, saved=buffer, gradient=gradient, found=found, of_tables=of_tables), y, nothing()

        def backward(kept: _Kept, task: _Task) -> tuple[_Kept, Stream, Stream]:
            part = self.part(task)
            with named_scope("layers"):
                at = transformer.places(part, self.how)
                saved = [_at(buffer, task.used[Buffer.SAVED]) for buffer in kept.saved]
                dx, more = lax.scan(
                    lambda dy, of_layer: passes.backward(dy, *of_layer, at),
                    _at(kept.gradient, task.used[Buffer.GRADIENT]),
                    (self.layers(task), saved),
                    reverse=True,
                )
                if self.table.split:
                    buffer = [
                        _put(into, each, task.used[Buffer.SPLIT]) for into, each in zip(kept.split, more, strict=True)
                    ]
                    kept = replace(kept, split=buffer)
                else:
                    kept = replace(kept, of_layers=self.added(kept.of_layers, more, task))

            def tables() -> Transformer[jax.Array]:
                _, pull = jax.vjp(lambda tables: self.begin(tables, part), self.tables)
                return _added(kept.of_tables, pull(dx)[0])

            of_tables = lax.cond(first_ & (task.chunk == 0), tables, lambda: kept.of_tables)
            return replace(kept, of_tables=of_tables), nothing(), dx

        def weights(kept: _Kept, task: _Task) -> tuple[_Kept, Stream, Stream]:
            assert passes.weights is not None
            of_weights = passes.weights
            with named_scope("layers"):
                at = transformer.places(self.part(task), self.how)
                stashed = [_at(buffer, task.used[Buffer.SPLIT]) for buffer in kept.split]
                _, more = lax.scan(
                    lambda _, of_layer: (None, of_weights(*of_layer, at)), None, (self.layers(task), stashed)
                )
                return replace(kept, of_layers=self.added(kept.of_layers, more, task)), nothing(), nothing()

        ops = [
            self.declared(op, task) for op, task in ((Op.IDLE, idle), (Op.FORWARD, forward), (Op.BACKWARD, backward))
        ]
        ops += [self.declared(Op.WEIGHTS, weights)] if self.table.split else []
        round_ = [(each, (each + 1) % stages) for each in range(stages if chunks > 1 else stages - 1)]

        def slot(kept: _Kept, row: tuple[jax.Array, ...]) -> tuple[_Kept, None]:
            op, microbatch, chunk, used, arriving = (_at(each, stage) for each in row)
            task = _Task(microbatch=microbatch, chunk=chunk, used=used)
            kept, y, dx = lax.switch(op, ops, kept, task)
            with named_scope("pipeline"):
                y, dx = lax.ppermute(y, "stage", round_), lax.ppermute(dx, "stage", [(b, a) for a, b in round_])
            return replace(
                kept,
                input=_put(kept.input, y, arriving[Buffer.INPUT]),
                gradient=_put(kept.gradient, dx, arriving[Buffer.GRADIENT]),
            ), None

        rows = tuple(map(jnp.asarray, (where.op, where.microbatch, where.chunk, where.used, where.arriving)))
        kept, _ = lax.scan(slot, self.empty(x, passes, where), rows)
        return kept.found, kept.of_layers, kept.of_tables

    def declared(self, op: Op, branch: _Branch) -> _Branch:
        """A task in the scope that says how often a stage does it, of how many slots: readers cannot see that."""
        slots = self.table.slots
        times = sum((row[0].op if row[0] else Op.IDLE) is op for row in slots)

        def taken(kept: _Kept, task: _Task) -> tuple[_Kept, Stream, Stream]:
            with named_scope(f"taken[{times}:{len(slots)}]"):
                return branch(kept, task)

        return taken

    def empty(self, x: Stream, passes: Passes, where: Places) -> _Kept:
        """What is carried into the first slot."""

        def buffer(like: Any, kind: Buffer, *more: int) -> jax.Array:
            # One place more than is needed, for what nobody reads.
            return self.zeros(like, like.dtype, where.sizes[kind] + 1, *more)

        n = jax.tree.leaves(self.stacks)[0].shape[1]
        found = jax.eval_shape(self.finish, x, self.tables, _first(self.parts))
        return _Kept(
            input=jax.tree.map(lambda each: buffer(each, Buffer.INPUT), x),
            gradient=jax.tree.map(lambda each: buffer(each, Buffer.GRADIENT), x),
            saved=[buffer(each, Buffer.SAVED, n) for each in passes.saved],
            split=[buffer(each, Buffer.SPLIT, n) for each in passes.kept],
            of_layers=jax.tree.map(lambda weight: self.zeros(weight, jnp.float32), self.stacks),
            of_tables=jax.tree.map(lambda weight: self.zeros(weight, jnp.float32), self.tables),
            found=jax.tree.map(lambda each: self.zeros(each, each.dtype), found),
        )

    def zeros(self, like: Any, dtype: Any, *more: int) -> jax.Array:
        """Zeros [*more, *like], split as ``like``."""
        spec = like.sharding.spec if isinstance(like, jax.core.ShapedArray) else jax.typeof(like).sharding.spec
        made = jnp.zeros((*more, *like.shape), dtype, out_sharding=P(*(None for _ in more), *spec.partitions))
        return varying(made, self.manual)

    def part(self, task: _Task) -> Batch[jax.Array]:
        """The task's microbatch [B, T]."""
        found: Batch[jax.Array] = _at(self.parts, task.microbatch)
        return found

    def layers(self, task: _Task) -> Layers:
        """The layers [n, ...] of the task's chunk."""
        found: Layers = _at(self.stacks, task.chunk)
        return found

    def added(self, sums: Layers, more: Layers, task: _Task) -> Layers:
        """Gradients of the task's chunk added to all."""
        with named_scope("gradients"):
            return jax.tree.map(
                lambda sum_, each: _put(sum_, _at(sum_, task.chunk) + each.astype(jnp.float32), task.chunk), sums, more
            )


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class _Task:
    """What a stage does in a slot: int32 scalars, and the places that it uses in each buffer."""

    microbatch: jax.Array
    chunk: jax.Array
    used: jax.Array


_Branch = Callable[[_Kept, _Task], tuple[_Kept, Stream, Stream]]


def _first(tree: Any) -> Any:
    return jax.tree.map(lambda each: each[0], tree)


def _at(tree: Any, index: jax.Array) -> Any:
    return jax.tree.map(lambda array: lax.dynamic_index_in_dim(array, index, keepdims=False), tree)


def _put(tree: Any, update: Any, index: jax.Array) -> Any:
    return jax.tree.map(lambda array, new: lax.dynamic_update_index_in_dim(array, new, index, 0), tree, update)


def _added(sums: Any, more: Any) -> Any:
    with named_scope("gradients"):
        return jax.tree.map(lambda sum_, each: sum_ + each.astype(jnp.float32), sums, more)
