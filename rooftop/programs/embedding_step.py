"""Whole steps as XLA compiles them: tables stay where and as they lie, and are updated in place."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial, wraps
from typing import Any

import jax

from rooftop.programs.embedding_buffers import LookupInputs
from rooftop.programs.embedding_pipeline import ModelState, StepProgram, pipelined_step, sequential_step


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
