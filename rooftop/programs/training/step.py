"""One optimizer step: loss, gradients summed over microbatches, update; and its lowering for any mesh."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic

import jax
import jax.numpy as jnp
import optax
from jax import P, named_scope
from jax.sharding import AbstractMesh, Mesh, NamedSharding, auto_axes, reshard
from jax.typing import DTypeLike

from rooftop.arrays.rules import STAGE_AXES, ways
from rooftop.core.errors import RooftopError
from rooftop.programs.model.loss import count_loss_tokens
from rooftop.programs.model.transformer import objective
from rooftop.programs.parameters import (
    Batch,
    Leaf,
    Parameter,
    Transformer,
    abstract,
    initialise,
    shardings,
    without_padding,
)
from rooftop.programs.sharding import Specs, in_parts, laid_out_as_argument, named_reshard
from rooftop.programs.training.adafactor import describe_moments
from rooftop.programs.training.muon import describe_squares
from rooftop.programs.training.pipeline import pipelined
from rooftop.programs.training.program import DTYPES, TrainProgram
from rooftop.scheduling.pipeline import pipeline_table


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class TrainState(Generic[Leaf]):
    """The state of training: step (int32 scalar), weights, and the optimizer's state in the form of optax."""

    step: Leaf
    weights: Transformer[Leaf]
    optimizer: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class StepMetrics(Generic[Leaf]):
    """Metrics of a step, float32 scalars; None: not requested or not applicable.

    ``loss`` is the mean cross-entropy in nats over the tokens that carry loss. ``z_loss`` and ``balance_loss`` are the
    means that a program with these coefficients adds to it, without the coefficients. ``tokens`` counts those that
    carry loss in a packed batch. ``gradient_norm`` is the norm of all gradients together, before clipping.
    """

    loss: Leaf
    z_loss: Leaf | None = None
    balance_loss: Leaf | None = None
    tokens: Leaf | None = None
    gradient_norm: Leaf | None = None


def init_state(program: TrainProgram, key: jax.Array, mesh: Mesh) -> TrainState[jax.Array]:
    """The state before the first step, every array created in its shards."""
    described = program.described(mesh)
    weights = initialise(described, key, mesh, program.specs(mesh), DTYPES[program.weights_dtype])
    with jax.set_mesh(mesh):
        optimizer_shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(program, mesh).optimizer)
        optimizer = jax.jit(program.optimizer.transformation(described).init, out_shardings=optimizer_shardings)(
            weights
        )
        step = jax.device_put(jnp.zeros((), jnp.int32), NamedSharding(mesh, P()))
        return TrainState(step=step, weights=weights, optimizer=optimizer)


def abstract_state(program: TrainProgram, mesh: Mesh | AbstractMesh) -> TrainState[jax.ShapeDtypeStruct]:
    """Shapes and shardings of the state, without memory."""
    described = program.described(mesh)
    specs = program.specs(mesh)
    weights = abstract(described, mesh, specs, DTYPES[program.weights_dtype])
    shapes = jax.eval_shape(program.optimizer.transformation(described).init, weights)
    # Moments have the shardings of their weights. They are stated here: eval_shape does not keep them in every JAX.
    places = shardings(_described_optimizer(shapes, described), mesh, specs)
    optimizer = jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), shapes, places
    )
    step = jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(mesh, P()))
    return TrainState(step=step, weights=weights, optimizer=optimizer)


def described_state(program: TrainProgram, mesh: Mesh | AbstractMesh) -> TrainState[Parameter]:
    """The state as parameters, which say how its arrays are padded."""
    described = program.described(mesh)
    weights = jax.tree.map(lambda parameter: jax.ShapeDtypeStruct(parameter.shape, jnp.float32), described)
    shapes = jax.eval_shape(program.optimizer.transformation(described).init, weights)
    return TrainState(step=_SCALAR, weights=described, optimizer=_described_optimizer(shapes, described))


_SCALAR = Parameter(shape=(), dims=())


def _described_optimizer(state: Any, described: Transformer[Parameter]) -> Any:
    """The optimizer's state as parameters: trees of moments are described as the weights are, counters as scalars."""
    trees = described, describe_moments(described), describe_squares(described)
    known = {jax.tree.structure(tree): tree for tree in trees}
    return jax.tree.map(
        lambda node: known.get(jax.tree.structure(node), _SCALAR),
        state,
        is_leaf=lambda node: jax.tree.structure(node) in known,
    )


def unpadded(state: TrainState[Any], described: TrainState[Parameter]) -> TrainState[jax.ShapeDtypeStruct]:
    """Shapes and dtypes of the state without padding."""
    return jax.tree.map(
        lambda leaf, parameter: jax.ShapeDtypeStruct(parameter.true_shape, leaf.dtype), state, described
    )


def repadded(
    state: TrainState[jax.Array],
    described: TrainState[Parameter],
    how: Callable[[jax.Array, Parameter], jax.Array],
) -> TrainState[jax.Array]:
    """The state with its padding moved by ``how``: ``padding_last``, or back by ``padding_in_parts``.

    Runs under ``jax.set_mesh``.
    """

    def moved(leaf: jax.Array, parameter: Parameter) -> jax.Array:
        if not parameter.pads_inside:
            return leaf
        return jax.jit(auto_axes(lambda array: how(array, parameter), out_sharding=leaf.sharding))(leaf)

    return jax.tree.map(moved, state, described)


def abstract_batch(program: TrainProgram, mesh: Mesh | AbstractMesh) -> Batch[jax.ShapeDtypeStruct]:
    """Shapes and shardings of one global batch, padded where the program's own does not divide over ``mesh``.

    Over a context axis its sequences are in ``context_order``. Raises RooftopError if positions do not divide into
    chunks of the loss.
    """
    specs, shape = program.specs(mesh), program.padded(mesh)
    on_device = shape[1] // ways(mesh.shape, *specs.rules.activations["seq"])
    if on_device % program.loss_chunks:
        raise RooftopError("loss_chunks", program.loss_chunks, f"a divisor of the {on_device} positions of a device")
    ids = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=NamedSharding(mesh, specs.activation("batch", "seq")))
    if program.packed:
        return Batch(tokens=ids, targets=ids, segments=ids, positions=ids)
    return Batch(tokens=ids, targets=ids, padded=shape != (program.batch, program.seq_len))


_Terms = dict[str, jax.Array]
_Step = Callable[[TrainState[jax.Array], Batch[jax.Array]], tuple[TrainState[jax.Array], StepMetrics[jax.Array]]]


def train_step(program: TrainProgram, specs: Specs) -> _Step:
    """The step: (state, batch) -> (state, metrics). Jit it under ``jax.set_mesh``, with the state donated.

    Means of a packed or padded batch are over the tokens of all its microbatches and devices that carry loss.
    """
    how = replace(program.computation, rules=specs.rules)
    compute = jnp.dtype(DTYPES[program.compute_dtype])
    summed = jnp.dtype(DTYPES[program.gradient_dtype or program.compute_dtype])

    def step(
        state: TrainState[jax.Array], batch: Batch[jax.Array]
    ) -> tuple[TrainState[jax.Array], StepMetrics[jax.Array]]:
        described = program.described(jax.sharding.get_abstract_mesh())
        counted = None
        if batch.segments is not None:
            counted = count_loss_tokens(batch.targets)
        elif batch.padded:
            counted = jnp.float32(program.batch * program.seq_len)
        per_microbatch = None if counted is None else counted / program.microbatches

        def share(weights: Transformer[jax.Array], batch: Batch[jax.Array]) -> tuple[jax.Array, _Terms]:
            result = objective(weights, batch, how, chunks=program.loss_chunks, counted=per_microbatch)
            shares: tuple[jax.Array, _Terms] = jax.tree.map(lambda mean: mean / program.microbatches, result)
            return shares

        # Cast outside the scan over layers, where XLA would move the cast anyway: gradients are stacked in this dtype.
        weights = _as(state.weights, summed)
        if (stages := ways(jax.sharding.get_abstract_mesh().shape, *STAGE_AXES)) > 1:
            table = pipeline_table(
                program.schedule, stages=stages, microbatches=program.microbatches, chunks=program.chunks
            )
            weights = _as(weights, compute)
            (value, terms), gradients = pipelined(
                weights, batch, how, table, loss_chunks=program.loss_chunks, summed=summed, counted=counted
            )
        else:
            weights, reduce = jax.vjp(lambda weights: _shared(weights, described, specs), weights)
            weights = _as(weights, compute)
            if program.microbatches == 1:
                (value, terms), gradients = jax.value_and_grad(share, has_aux=True)(weights, batch)
            else:
                (value, terms), gradients = _accumulated(share, weights, batch, program.microbatches)
            with named_scope("gradients"):
                (gradients,) = reduce(jax.tree.map(lambda gradient: gradient.astype(summed), gradients))
        with named_scope("gradients"):
            if gradients.unembed is not None:
                # The gradient of a lookup comes in rows, and the update would be compiled so.
                embed = laid_out_as_argument(gradients.embed, program.weights_dtype)
                gradients = replace(gradients, embed=embed)
            gradients = jax.tree.map(lambda gradient: gradient.astype(jnp.float32), gradients)
            gradients = jax.tree.map(without_padding, gradients, described)
            norm = optax.tree.norm(gradients) if program.gradient_norm else None
            gradients = program.optimizer.clip(gradients)
        with named_scope("optimizer"):
            transformation = program.optimizer.transformation(described)
            changes, optimizer = transformation.update(gradients, state.optimizer, state.weights)
            weights = optax.apply_updates(state.weights, changes)
        with named_scope("loss"):
            for name, mean in terms.items():
                value = value - getattr(how, name) * mean
        tokens = None if batch.segments is None else counted
        metrics = StepMetrics(loss=value, **terms, tokens=tokens, gradient_norm=norm)
        return TrainState(step=state.step + 1, weights=weights, optimizer=optimizer), metrics

    return step


def _as(weights: Transformer[jax.Array], dtype: DTypeLike) -> Transformer[jax.Array]:
    with named_scope("optimizer"):
        return jax.tree.map(lambda weight: weight.astype(dtype), weights)


def _shared(weights: Transformer[jax.Array], described: Transformer[Parameter], specs: Specs) -> Transformer[jax.Array]:
    """Weights marked reduced over the axes that hold copies: the backward pass has one AllReduce of a shard."""

    def mark(parameter: Parameter, weight: jax.Array) -> jax.Array:
        return named_reshard(weight, specs.at_rest(*parameter.dims, sequence=parameter.sequence))

    with named_scope("gradients"):
        return jax.tree.map(mark, described, weights)


def _accumulated(
    share: Callable[[Transformer[jax.Array], Batch[jax.Array]], tuple[jax.Array, _Terms]],
    weights: Transformer[jax.Array],
    batch: Batch[jax.Array],
    microbatches: int,
) -> tuple[tuple[jax.Array, _Terms], Transformer[jax.Array]]:
    """Sums over microbatches of their shares of the objective and its terms and, in float32, of the gradients."""

    def zeros(weight: jax.Array) -> jax.Array:
        spec = jax.typeof(weight).sharding.spec
        start = jnp.zeros(weight.shape, jnp.float32, out_sharding=P(*spec.partitions))
        return reshard(start, P(*spec.partitions, unreduced=spec.reduced))

    def body(total: _Total, part: Batch[jax.Array]) -> tuple[_Total, None]:
        values, gradients = jax.value_and_grad(share, has_aux=True)(weights, part)
        with named_scope("gradients"):
            summed = jax.tree.map(lambda sum_, more: sum_ + more.astype(jnp.float32), total[1], gradients)
            return (jax.tree.map(jnp.add, total[0], values), summed), None

    parts = jax.tree.map(lambda ids: in_parts(ids, microbatches, dim=0), batch)
    shapes = jax.eval_shape(share, weights, jax.tree.map(lambda ids: ids[0], parts))
    with named_scope("gradients"):
        start = jax.tree.map(lambda scalar: jnp.zeros((), scalar.dtype), shapes), jax.tree.map(zeros, weights)
    total, _ = jax.lax.scan(body, start, parts)
    return total


_Total = tuple[tuple[jax.Array, _Terms], Transformer[jax.Array]]


def lower(mesh: Mesh, arguments: Mapping[str, Any]) -> jax.stages.Lowered:
    """The step lowered for ``mesh``, whose devices may be remote; ``arguments`` is a TrainProgram in JSON.

    Raises RooftopError for a program that does not fit the mesh.
    """
    program = TrainProgram.from_json(arguments)
    with jax.set_mesh(mesh):
        step = jax.jit(train_step(program, program.specs(mesh)), donate_argnums=0)
        return step.lower(abstract_state(program, mesh), abstract_batch(program, mesh))
