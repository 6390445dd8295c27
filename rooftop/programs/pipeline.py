"""Loss and gradients of a batch whose microbatches pass through pipeline stages, by a table of ``rooftop.scheduling``.

One program runs on all devices. It is manual (``jax.shard_map``) over the stage axis, and over the axes that hold
copies of the weights, whose gradients are summed once at the end. It scans over the table's slots: each stage does its
own task by ``jax.lax.switch``, and neighbours exchange results (``ppermute``). The collectives of a task are among the
devices of one stage, which do the same task; those between stages stand outside of the switch.

The other mesh axes stay explicit. JAX 0.10.2 has no ``reduced`` and ``unreduced`` types beside manual axes, so that in
here gradients are summed over fsdp, and partial sums over tensor, where the matmul that makes them ends.

Stages share the layers of the longest run of periods (``rooftop.models.segments.shared_segment``). What stands before
it, such as dense layers before those of experts, goes with the embedding, and what stands behind it with the loss: all
stages have the weights of both, as they have the tables, and the first and the last use them.

Dims: M microbatches, S stages, v chunks of the model on a stage, B, T, D as elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import P, lax, named_scope

from rooftop.errors import RooftopError
from rooftop.models.segments import Segment, segments, shared_segment
from rooftop.programs import transformer
from rooftop.programs.layer import Computation
from rooftop.programs.moe import no_load
from rooftop.programs.parameters import Batch, Transformer
from rooftop.programs.pipeline_passes import Layers, Stream, varying
from rooftop.programs.pipeline_stage import Stage, Terms
from rooftop.programs.sharding import Dim, Specs, in_parts
from rooftop.scheduling.buffers import places
from rooftop.scheduling.pipeline import Table


class _StageSpecs(Specs):
    """Specs inside a stage: nothing is left ``reduced`` or ``unreduced``."""

    def activation(self, *dims: Dim, reduced: str | None = None, unreduced: str | None = None) -> P:
        """An activation, its partial sums summed."""
        return super().activation(*dims)

    def token_axes(self, sequence: str = "seq") -> frozenset[str]:
        """No axis: the gradient of a weight is summed over tokens where it is made."""
        return frozenset()


def pipelined(
    weights: Transformer[jax.Array],
    batch: Batch[jax.Array],
    how: Computation,
    table: Table,
    *,
    loss_chunks: int,
    summed: jnp.dtype,
    counted: jax.Array | None = None,
) -> tuple[tuple[jax.Array, Terms], Transformer[jax.Array]]:
    """``transformer.objective`` of a batch and its gradients: both are means over microbatches.

    ``weights`` are as they are stored (``Specs.parameter``), shared layers over ``stage``, in the dtype of matmuls; so
    are the gradients, summed over microbatches in float32 and over devices in ``summed``. ``counted`` tokens of the
    whole batch carry loss, if it is packed. Interleaved chunks of layers are exchanged between stages before and after:
    stored weights lie in the order of the model. Runs under ``jax.set_mesh``.

    Raises RooftopError for layers that stages cannot share evenly, remat with offload, and a context axis with ring
    attention.
    """
    if "=offload" in how.remat:
        raise RooftopError("remat", how.remat, "no offload with pipeline stages")
    if how.specs.rules.activations["seq"] and how.context_attention == "ring":
        # On CPU devices a permutation waits for all devices, and stages are not at the same one.
        raise RooftopError("context_attention", how.context_attention, "all_gather with pipeline stages")
    runs, shared = segments(how.model), shared_segment(how.model)
    _require_even(runs[shared], table)
    mesh = jax.sharding.get_abstract_mesh()
    batch_axes, stored = how.specs.rules.activations["batch"], how.specs.rules.parameters
    split_axes = {axis for name, axes in stored.items() if name != "layers" for axis in axes}
    copies = tuple(axis for at, axis in enumerate(batch_axes) if not split_axes & set(batch_axes[: at + 1]))
    manual = ("stage", *copies)
    shares = table.microbatches * math.prod(mesh.shape[axis] for axis in copies)
    inside = replace(how, specs=_StageSpecs(how.specs.rules.only(dict.fromkeys(set(mesh.shape) - set(manual), 1))))
    parts = jax.tree.map(lambda ids: in_parts(ids, table.microbatches, dim=0), batch)
    # A Pallas kernel's outputs do not say over which axes they vary; then nothing in here says so.
    typed = () if how.attention == "splash" else manual

    def of_shared(layers: tuple[Layers, ...], here: Layers) -> tuple[Layers, ...]:
        """The layers of all segments, those of the shared one in place of what is there."""
        return (*layers[:shared], here, *layers[shared + 1 :])

    def body(stacks: Layers, tables: Transformer[jax.Array], parts: Batch[jax.Array], counted: Any) -> Any:
        stacks, tables, parts, counted = varying((stacks, tables, parts, counted), typed)

        def begin(tables: Transformer[jax.Array], part: Batch[jax.Array]) -> Stream:
            with named_scope("embed"):
                x = transformer.embed(tables, part, inside)
            load = varying(no_load(how.model, inside.specs), typed) if how.balance_loss else None
            return _through(runs[:shared], tables.layers[:shared], Stream(x=x, load=load), part, inside)

        def finish(stream: Stream, tables: Transformer[jax.Array], part: Batch[jax.Array]) -> tuple[jax.Array, Terms]:
            stream = _through(runs[shared + 1 :], tables.layers[shared + 1 :], stream, part, inside)
            found = transformer.head_loss(stream.x, tables, part, inside, chunks=loss_chunks, counted=counted)
            if stream.load is not None:
                with named_scope("loss"):
                    load = lax.psum(jnp.sum(stream.load, axis=0), copies)
                found = transformer.balanced(*found, load, inside)
            each: tuple[jax.Array, Terms] = jax.tree.map(lambda mean: mean / shares, found)
            return each

        stage = Stage(
            stacks=stacks, tables=tables, parts=parts, how=inside, segment=runs[shared], begin=begin, finish=finish,
            table=table, manual=typed,
        )  # fmt: skip
        found, of_layers, of_tables = stage.run(places(table))
        with named_scope("gradients"):
            of_layers, of_tables = jax.tree.map(lambda sum_: sum_.astype(summed), (of_layers, of_tables))
            of_layers = jax.tree.map(lambda sum_: lax.psum(sum_, copies), of_layers) if copies else of_layers
            return lax.psum(found, manual), of_layers, lax.psum(of_tables, manual)

    by_stage = P(None, "stage")
    of_each = None if counted is None else counted / shares
    found, of_layers, of_tables = jax.shard_map(
        body,
        in_specs=(by_stage, P(), P(None, copies or None), P()),
        out_specs=(P(), by_stage, P()),
        axis_names=set(manual),
        check_vma=bool(typed),
    )(_by_chunk(weights.layers[shared], table), replace(weights, layers=of_shared(weights.layers, ())), parts, of_each)
    return found, replace(of_tables, layers=of_shared(of_tables.layers, _by_layer(of_layers)))


def _through(
    runs: Sequence[Segment], layers: Sequence[Layers], stream: Stream, part: Batch[jax.Array], how: Computation
) -> Stream:
    """The stream behind the layers of whole segments, which the first stage or the last does alone."""
    with named_scope("layers"):
        at = transformer.places(part, how)
        for run, stacks in zip(runs, layers, strict=True):
            period = transformer.period(run, how)
            # One by one: inside a stage JAX 0.10.2 cannot differentiate a scan over them.
            for repeat in range(run.repeats):
                weights = jax.tree.map(lambda weight, repeat=repeat: weight[repeat], stacks)
                stream = stream.after(*period(stream.x, weights, at))
    return stream


def _require_even(run: Segment, table: Table) -> None:
    """Raise RooftopError if the stages' chunks cannot share the periods of ``run`` evenly."""
    if run.repeats % (table.stages * table.chunks):
        periods = f"{run.repeats} periods of {len(run.kinds)} layers"
        given = f"{table.stages} x {table.chunks} chunks"
        raise RooftopError("mesh axis stage", given, f"parts that divide the {periods} evenly")


def _by_chunk(stacks: Layers, table: Table) -> Layers:
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
