"""The forward pass alone: cross-entropy on held-out documents, and the logits that samples are drawn from."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import P
from jax.sharding import AxisType, Mesh, reshard

from rooftop.arrays.rules import REPLICA_AXES, SEQUENCE_AXES, STAGE_AXES
from rooftop.checkpoints.tokenizer import Tokenizer
from rooftop.core.errors import RooftopError
from rooftop.core.records import Record, derived
from rooftop.programs.model.layer import Computation
from rooftop.programs.model.transformer import logits, objective
from rooftop.programs.parameters import Batch, Transformer, abstract, moved
from rooftop.programs.training.program import DTYPES, TrainProgram
from rooftop.train.data.loading import Loader, place


@dataclass(frozen=True, kw_only=True)
class Evaluation(Record):
    """Mean cross-entropy ``loss``, in nats over the ``tokens`` that carry loss; perplexity is its exponential."""

    loss: float
    tokens: int

    @derived
    def perplexity(self) -> float:
        """exp(loss), infinite where that is no float."""
        return math.exp(self.loss) if self.loss < 700 else math.inf


@dataclass(frozen=True)
class Forward:
    """A program's forward pass on the devices of ``mesh``, with the axes ``into_data`` used for data instead."""

    program: TrainProgram
    mesh: Mesh
    into_data: tuple[str, ...] = STAGE_AXES

    @property
    def _moves(self) -> bool:
        return any(self.mesh.shape[axis] > 1 for axis in self.into_data)

    @cached_property
    def own_mesh(self) -> Mesh:
        """The mesh of the forward pass: the same devices, all ``AXES``; ``mesh`` itself if no axis moves."""
        if not self._moves:
            return self.mesh
        moved = (*REPLICA_AXES, *self.into_data)
        rest = tuple(axis for axis in self.mesh.axis_names if axis not in moved)
        order = [self.mesh.axis_names.index(axis) for axis in (*moved, *rest) if axis in self.mesh.axis_names]
        sizes = {axis: self.mesh.shape[axis] for axis in rest}
        names = (*REPLICA_AXES, *self.into_data, *rest)
        shape = (-1, *(1 for _ in names[1 : len(moved)]), *sizes.values())
        devices = self.mesh.devices.transpose(order).reshape(shape)
        return Mesh(devices, names, axis_types=(AxisType.Explicit,) * len(names))

    def padded(self, sequences: int, positions: int) -> tuple[int, int]:
        """Sequences and positions of a batch that holds this many: see ``TrainProgram.padded``."""
        return replace(self.program, batch=sequences, seq_len=positions, microbatches=1).padded(self.own_mesh)

    def weights(self, weights: Transformer[jax.Array]) -> Transformer[jax.Array]:
        """Return the weights of the training mesh laid out for this one; the same arrays if no axis moves."""
        if not self._moves:
            return weights
        # Axes that become data split no padded dim but layers: other padding is the same on both meshes.
        program, mesh = self.program, self.own_mesh
        here: Transformer[jax.Array] = moved(
            weights, abstract(program.described(mesh), mesh, program.specs(mesh), DTYPES[program.weights_dtype])
        )
        return here

    def _in_use(self, weights: Transformer[jax.Array]) -> Transformer[jax.Array]:
        dtype = DTYPES[self.program.compute_dtype]
        cast: Transformer[jax.Array] = jax.tree.map(lambda weight: weight.astype(dtype), weights)
        return cast

    @property
    def _how(self) -> Computation:
        return replace(self.program.computation, rules=self.program.specs(self.own_mesh).rules)

    @cached_property
    def _mean(self) -> Callable[[Any, Any], jax.Array]:
        how = replace(self._how, z_loss=0.0, balance_loss=0.0)

        def mean(weights: Transformer[jax.Array], batch: Batch[jax.Array]) -> jax.Array:
            return objective(self._in_use(weights), batch, how, chunks=self.program.loss_chunks)[0]

        return jax.jit(mean)

    @cached_property
    def _next(self) -> Callable[..., jax.Array]:
        how = self._how

        def next_(weights: Transformer[jax.Array], tokens: jax.Array, length: jax.Array) -> jax.Array:
            y = logits(self._in_use(weights), tokens, how)
            y = reshard(y, P())
            last: jax.Array = jax.lax.dynamic_index_in_dim(y, length - 1, axis=1, keepdims=False)
            return last

        return jax.jit(next_)

    def evaluate(self, weights: Transformer[jax.Array], held_out: Loader, *, most: int) -> Evaluation:
        """Return the cross-entropy of the documents of ``held_out``, in its batches with what padding the mesh needs.

        Of more than ``most`` batches that many are used, evenly spread and always the same.
        """
        padded = self.padded(held_out.batch, held_out.packing.seq_len)
        specs, order = self.program.specs(self.own_mesh), self.program.computation.context_order
        weights = self.weights(weights)
        total, count = 0.0, 0
        with jax.set_mesh(self.own_mesh):
            steps = held_out.steps_per_epoch
            for step in range(steps) if steps <= most else np.linspace(0, steps - 1, most).astype(int).tolist():
                batch = place(held_out, step, self.own_mesh, specs, order, padded=padded)
                tokens = int(jnp.sum(batch.targets >= 0))
                total += float(self._mean(weights, batch)) * tokens
                count += tokens
        return Evaluation(loss=total / max(count, 1), tokens=count)

    def next_logits(self, weights: Transformer[jax.Array], tokens: np.ndarray[Any, Any], length: int) -> Any:
        """Return logits [B, V] after the first ``length`` of ``tokens`` [B, T]; ``weights`` lie on ``own_mesh``."""
        specs = self.program.specs(self.own_mesh)
        sharding = jax.NamedSharding(self.own_mesh, specs.activation("batch", "seq"))
        with jax.set_mesh(self.own_mesh):
            placed = jax.make_array_from_callback(tokens.shape, sharding, lambda index: tokens[index])
            return np.asarray(self._next(weights, placed, jnp.int32(length)))


@dataclass(frozen=True, kw_only=True)
class SampleOptions:
    """``count`` samples of ``tokens`` tokens after the ``prompt``; ``temperature`` 0 takes the likeliest token."""

    count: int
    tokens: int = 64
    prompt: str = ""
    temperature: float = 0.8
    seed: int = 0


def sample(
    program: TrainProgram,
    mesh: jax.sharding.Mesh,
    weights: Transformer[jax.Array],
    tokenizer: Tokenizer,
    how: SampleOptions,
) -> list[str]:
    """Return samples with their prompt, cut at the end of their document. The same seed draws the same ones.

    Raises RooftopError for an empty prompt if the tokenizer has no first token of a document, and one that is too long.
    """
    prompt = ([] if tokenizer.bos is None else [tokenizer.bos]) + tokenizer.encode(how.prompt).tolist()
    if not prompt:
        raise RooftopError("prompt", how.prompt, "a text: nothing begins a document in this tokenizer")
    longest = min(len(prompt) + how.tokens, program.model.max_seq_len)
    if longest <= len(prompt):
        raise RooftopError("prompt", f"{len(prompt)} tokens", f"fewer than the model's {longest}")
    forward = Forward(program, mesh, (*STAGE_AXES, *SEQUENCE_AXES))
    ids = np.zeros(forward.padded(how.count, longest), np.int32)
    ids[:, : len(prompt)] = prompt
    laid, random = forward.weights(weights), np.random.default_rng(how.seed)
    for length in range(len(prompt), longest):
        scores = forward.next_logits(laid, ids, length)[:, : tokenizer.vocab].astype(np.float64)
        if how.temperature:
            # Gumbel (1954): the largest of the perturbed scores is a draw from their softmax.
            scores = scores / how.temperature + random.gumbel(size=scores.shape)
        ids[:, length] = scores.argmax(axis=-1)
    return [tokenizer.decode(_document(row[:longest].tolist(), len(prompt), tokenizer.eos)) for row in ids[: how.count]]


def _document(ids: list[int], prompt: int, eos: int | None) -> list[int]:
    return ids[: ids.index(eos, prompt)] if eos in ids[prompt:] else ids
