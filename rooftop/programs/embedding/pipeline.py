"""Steps of a model with embeddings: sequential, or pipelined over SparseCores and TensorCores.

Sequential, step i: lookup i, dense forward and backward i, update i.

Pipelined, in step i the SparseCores update the tables with the gradients of step i-2 and then look up step i, while the
TensorCores compute step i-1. Neither needs the other's result, so they may overlap. A lookup thus sees the updates of
steps up to i-2: its activations and gradients are stale by one step. The first and the last steps fill and drain the
pipeline. Source: the SparseCore deep dive, section 5.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, Generic, Protocol

import jax

from rooftop.programs.embedding.buffers import LookupInputs
from rooftop.programs.embedding.lookup import EmbeddingProgram, lookup, update
from rooftop.programs.embedding.state import EmbeddingState
from rooftop.programs.parameters import Leaf


class DenseStep(Protocol):
    """The TensorCores' part of a step: everything except the tables."""

    def __call__(
        self, dense: Any, activations: dict[str, jax.Array], batch: Any
    ) -> tuple[Any, dict[str, jax.Array], Any]:
        """The dense state after its update, the activations' gradients (by feature), and the step's metrics."""


#: Share of the learning rates at a step, an int32 scalar counted from 0.
ShareOf = Callable[[jax.Array], jax.Array]


@dataclass(frozen=True, kw_only=True, eq=False)
class StepProgram:
    """Options of a step: the tables' program, the dense part, and the tables' learning-rate schedule (None: 1)."""

    embedding: EmbeddingProgram
    dense: DenseStep
    share_of: ShareOf | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class LookedUp(Generic[Leaf]):
    """A step after its lookup, which waits for the TensorCores."""

    inputs: LookupInputs
    activations: dict[str, Leaf]
    batch: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Differentiated(Generic[Leaf]):
    """A step whose gradients wait for the SparseCores."""

    inputs: LookupInputs
    gradients: dict[str, Leaf]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class ModelState(Generic[Leaf]):
    """Tables, dense part, and the steps in flight in a pipeline (None: no step)."""

    embedding: EmbeddingState[Leaf]
    dense: Any
    looked_up: LookedUp[Leaf] | None = None
    differentiated: Differentiated[Leaf] | None = None


def sequential_step(
    program: StepProgram, state: ModelState[jax.Array], inputs: LookupInputs, batch: Any
) -> tuple[ModelState[jax.Array], Any]:
    """The state after a whole step, and its metrics."""
    activations = lookup(program.embedding, state.embedding.tables, inputs)
    dense, gradients, metrics = program.dense(state.dense, activations, batch)
    embedding = _updated(program, state.embedding, Differentiated(inputs=inputs, gradients=gradients))
    return ModelState(embedding=embedding, dense=dense), metrics


def pipelined_step(
    program: StepProgram, state: ModelState[jax.Array], inputs: LookupInputs | None, batch: Any
) -> tuple[ModelState[jax.Array], Any]:
    """The state after step i of the pipeline, and the metrics of step i-1 (None if there was none).

    ``inputs`` and ``batch`` are those of step i; without ``inputs`` the pipeline drains, and is empty after two such
    calls. The steps in flight decide which program this is: filling, full or draining.
    """
    embedding, dense = state.embedding, state.dense
    if state.differentiated is not None:
        embedding = _updated(program, embedding, state.differentiated)
    looked_up = None
    if inputs is not None:
        activations = lookup(program.embedding, embedding.tables, inputs)
        looked_up = LookedUp(inputs=inputs, activations=activations, batch=batch)
    differentiated, metrics = None, None
    if state.looked_up is not None:
        previous = state.looked_up
        dense, gradients, metrics = program.dense(dense, previous.activations, previous.batch)
        differentiated = Differentiated(inputs=previous.inputs, gradients=gradients)
    return ModelState(embedding=embedding, dense=dense, looked_up=looked_up, differentiated=differentiated), metrics


def _updated(
    program: StepProgram, embedding: EmbeddingState[jax.Array], step: Differentiated[jax.Array]
) -> EmbeddingState[jax.Array]:
    share = 1.0 if program.share_of is None else program.share_of(embedding.step)
    return update(program.embedding, embedding, step.inputs, step.gradients, share)


def compiled_step(
    program: StepProgram,
    state: ModelState[Any],
    inputs: LookupInputs | None,
    batch: Any,
    *,
    pipelined: bool,
    options: Mapping[str, bool | int | str] | None = None,
) -> jax.stages.Wrapped:
    """A jitted step of this module for arguments like these, arrays or shapes with formats; call it with them.

    ``state`` is donated; tables and slots keep their formats. A pipeline that fills, is full or drains needs a program
    for each case. ``options`` are the compiler's. Runs under ``jax.set_mesh``.
    """
    step = pipelined_step if pipelined else sequential_step
    after, metrics = jax.tree.map(lambda _: None, jax.eval_shape(partial(step, program), state, inputs, batch))
    out = dataclasses.replace(after, embedding=jax.tree.map(place_of, state.embedding)), metrics

    # JAX caches a function's executables as long as the function lives: a new function can be freed.
    @wraps(step)
    def own(*arguments: Any) -> Any:
        return step(*arguments)

    return jax.jit(
        own, static_argnums=0, donate_argnums=1, out_shardings=out, compiler_options=dict(options) if options else None
    )


def place_of(leaf: Any) -> Any:
    """The format of an array or of a shape; its sharding if it has no layout."""
    return leaf.sharding if leaf.format.layout is None else leaf.format
