"""Steps of a model with embeddings: one after the other, or SparseCores and TensorCores at work on different steps.

Sequential, step i: lookup i, dense forward and backward i, update i.

Pipelined, in step i the SparseCores update the tables with the gradients of step i-2 and then look step i up, while the
TensorCores compute step i-1. None of the two needs what the other makes, so that they may overlap. A lookup thus sees
the updates of all steps up to i-2, not of i-1: its activations, and so its gradients, are stale by one step. The first
and the last steps fill and drain the pipeline. Source: the SparseCore deep dive, section 5.
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
    """The TensorCores' part of a step: everything but the tables."""

    def __call__(
        self, dense: Any, activations: dict[str, jax.Array], batch: Any
    ) -> tuple[Any, dict[str, jax.Array], Any]:
        """The dense state after its own update, the activations' gradients (by feature), and what the step tells."""


#: Share of the learning rates at a step, an int32 scalar counted from 0.
ShareOf = Callable[[jax.Array], jax.Array]


@dataclass(frozen=True, kw_only=True, eq=False)
class StepProgram:
    """What decides a step: the tables', the dense part, and the schedule of the tables' learning rates (None: 1)."""

    embedding: EmbeddingProgram
    dense: DenseStep
    share_of: ShareOf | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class LookedUp(Generic[Leaf]):
    """A step that has been looked up and waits for the TensorCores."""

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
    """Tables, dense part, and what is under way in a pipeline (None: nothing)."""

    embedding: EmbeddingState[Leaf]
    dense: Any
    looked_up: LookedUp[Leaf] | None = None
    differentiated: Differentiated[Leaf] | None = None


def sequential_step(
    program: StepProgram, state: ModelState[jax.Array], inputs: LookupInputs, batch: Any
) -> tuple[ModelState[jax.Array], Any]:
    """The state after a whole step, and what it tells."""
    activations = lookup(program.embedding, state.embedding.tables, inputs)
    dense, gradients, told = program.dense(state.dense, activations, batch)
    embedding = _updated(program, state.embedding, Differentiated(inputs=inputs, gradients=gradients))
    return ModelState(embedding=embedding, dense=dense), told


def pipelined_step(
    program: StepProgram, state: ModelState[jax.Array], inputs: LookupInputs | None, batch: Any
) -> tuple[ModelState[jax.Array], Any]:
    """The state after step i of the pipeline, and what step i-1 tells (None if there was none).

    ``inputs`` and ``batch`` are those of step i; without ``inputs`` the pipeline drains: after two such calls nothing
    is under way. What is under way decides which program this is: filling, full or draining.
    """
    embedding, dense = state.embedding, state.dense
    if state.differentiated is not None:
        embedding = _updated(program, embedding, state.differentiated)
    looked_up = None
    if inputs is not None:
        activations = lookup(program.embedding, embedding.tables, inputs)
        looked_up = LookedUp(inputs=inputs, activations=activations, batch=batch)
    differentiated, told = None, None
    if state.looked_up is not None:
        before = state.looked_up
        dense, gradients, told = program.dense(dense, before.activations, before.batch)
        differentiated = Differentiated(inputs=before.inputs, gradients=gradients)
    return ModelState(embedding=embedding, dense=dense, looked_up=looked_up, differentiated=differentiated), told


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
    """A step of ``embedding_pipeline`` for arguments like these, arrays or shapes with formats; call it with them.

    ``state`` is donated, and tables and slots come back in the formats in which they went in. What is under way in a
    pipeline decides what is compiled: one that fills, is full or drains needs a program each. ``options`` are the
    compiler's. Runs under ``jax.set_mesh``.
    """
    step = pipelined_step if pipelined else sequential_step
    after, told = jax.tree.map(lambda _: None, jax.eval_shape(partial(step, program), state, inputs, batch))
    out = dataclasses.replace(after, embedding=jax.tree.map(place_of, state.embedding)), told

    # JAX keeps what it compiled of a function for as long as there is that function.
    @wraps(step)
    def own(*arguments: Any) -> Any:
        return step(*arguments)

    return jax.jit(
        own, static_argnums=0, donate_argnums=1, out_shardings=out, compiler_options=dict(options) if options else None
    )


def place_of(leaf: Any) -> Any:
    """The format of an array or of a shape, or where it has no layout its sharding."""
    return leaf.sharding if leaf.format.layout is None else leaf.format
