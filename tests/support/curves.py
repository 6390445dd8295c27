"""Tiny programs, trained for some steps on any mesh of emulated devices: what tests of training compare."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import numpy as np

from rooftop.arrays import AXES
from rooftop.models import ModelConfig
from rooftop.programs.attention.context import sequence_order
from rooftop.programs.model.layer import Computation
from rooftop.programs.parameters import Batch
from rooftop.programs.training.program import TrainProgram
from rooftop.programs.training.step import TrainState, abstract_batch, abstract_state, init_state, train_step
from tests.support.quickly import QUICKLY

MODEL = ModelConfig(
    name="tiny", family="llama", layers=8, d_model=32, d_ff=48, heads=4, kv_heads=2, d_head=8, vocab=64,
    max_seq_len=16,
)  # fmt: skip
BATCH, SEQ_LEN = 8, 16


def mesh_of(**sizes: int) -> jax.sharding.Mesh:
    shape = tuple(sizes.get(axis, 1) for axis in AXES)
    devices = np.array(jax.devices()[: math.prod(shape)]).reshape(shape)
    return jax.sharding.Mesh(devices, AXES, axis_types=(jax.sharding.AxisType.Explicit,) * len(AXES))


def program_of(**fields: Any) -> TrainProgram:
    """A program from its own fields and those of its computation together: tests vary both alike."""
    names = {field.name for field in dataclasses.fields(Computation)}
    own = {name: value for name, value in fields.items() if name not in names}
    return TrainProgram(computation=Computation(**{name: fields[name] for name in fields if name in names}), **own)


def program(**changes: Any) -> TrainProgram:
    fields = {"model": MODEL, "batch": BATCH, "seq_len": SEQ_LEN, "compute_dtype": "f32", "microbatches": 4}
    return program_of(**(fields | changes))


_INITIAL = dict[tuple[str, ...], TrainState[np.ndarray]]()


def initial_state(program: TrainProgram, mesh: jax.sharding.Mesh) -> TrainState[jax.Array]:
    """State before the first step, seed 0, created once for each optimizer and set of parameters with their padding.

    programs/test_training.py holds that the values do not depend on the mesh, so that a second mesh gets a copy of them
    and compiles no program to create them.
    """
    parameters = program.described(mesh)
    key = repr(parameters), repr(program.optimizer), program.weights_dtype
    if key not in _INITIAL:
        _INITIAL[key] = jax.tree.map(np.asarray, init_state(program, jax.random.key(0), mesh))
    # A step may donate the state, so that its arrays are not those that stay here.
    return jax.tree.map(
        lambda values, leaf: jax.device_put(values, leaf.sharding, may_alias=False),
        _INITIAL[key],
        abstract_state(program, mesh),
    )


def train(program: TrainProgram, mesh: jax.sharding.Mesh, steps: int = 1) -> tuple[list[float], TrainState[np.ndarray]]:
    """The losses of so many steps, each on text of its own, and the last state."""
    rng, losses = np.random.default_rng(0), []
    order = sequence_order(SEQ_LEN, mesh.shape["context"], program.computation.context_order)
    state, place = initial_state(program, mesh), abstract_batch(program, mesh)
    with jax.set_mesh(mesh):
        step = jax.jit(train_step(program, program.specs(mesh)), donate_argnums=0, compiler_options=QUICKLY)
        for _ in range(steps):
            # Only half of the vocabulary is used, so that there is something to learn.
            text = rng.integers(0, program.model.vocab // 2, (BATCH, SEQ_LEN + 1)).astype(np.int32)
            fields = {"tokens": text[:, :-1], "targets": text[:, 1:]}
            if program.packed:
                segments = np.sort(rng.integers(1, 4, (BATCH, SEQ_LEN)), axis=1).astype(np.int32)
                first = np.concatenate([np.ones((BATCH, 1), bool), segments[:, 1:] != segments[:, :-1]], axis=1)
                starts = np.maximum.accumulate(np.where(first, np.arange(SEQ_LEN), 0), axis=1)
                fields |= {"segments": segments, "positions": (np.arange(SEQ_LEN) - starts).astype(np.int32)}
                last = np.concatenate([first[:, 1:], np.ones((BATCH, 1), bool)], axis=1)
                # Microbatches differ in how many of their tokens carry loss.
                fields["targets"] = np.where(last | (np.arange(BATCH) < 2)[:, None], -1, fields["targets"])
            on = {name: jax.device_put(ids[:, order], place.tokens.sharding) for name, ids in fields.items()}
            # One step at a time: emulated devices share threads, and two steps could wait for each other.
            state, metrics = jax.block_until_ready(step(state, Batch(**on)))
            losses.append(float(metrics.loss))
    return losses, jax.tree.map(np.asarray, state)
