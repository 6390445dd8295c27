"""Texts drawn from the model, by computing the whole sequence again for every token: enough to see what it learned."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import numpy as np

from rooftop.checkpoints.tokenizer import Tokenizer
from rooftop.errors import RooftopError
from rooftop.programs.parameters import Transformer
from rooftop.programs.train_program import TrainProgram
from rooftop.train.evaluate import Forward


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How many samples, of how many tokens behind the ``prompt``; ``temperature`` 0 takes the likeliest each time."""

    count: int
    tokens: int = 64
    prompt: str = ""
    temperature: float = 0.8
    seed: int = 0


def sample(
    program: TrainProgram, mesh: jax.sharding.Mesh, weights: Transformer[jax.Array], tokenizer: Tokenizer, how: Sampling
) -> list[str]:
    """Samples, their prompt included; one that ends its document is cut there. The same seed draws the same.

    Raises RooftopError for a prompt that is empty where nothing begins a document, or that leaves no room.
    """
    prompt = ([] if tokenizer.bos is None else [tokenizer.bos]) + tokenizer.encode(how.prompt).tolist()
    if not prompt:
        raise RooftopError("prompt", how.prompt, "a text: nothing begins a document in this tokenizer")
    longest = min(len(prompt) + how.tokens, program.model.max_seq_len)
    if longest <= len(prompt):
        raise RooftopError("prompt", f"{len(prompt)} tokens", f"fewer than the model's {longest}")
    forward = Forward(program, mesh, ("stage", "context"))
    rows = -(-how.count // forward.rows) * forward.rows
    ways = math.prod(
        forward.own_mesh.shape[axis] for axis in program.specs(forward.own_mesh).rules.activations["residual_seq"]
    )
    ids = np.zeros((rows, -(-longest // ways) * ways), np.int32)
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
