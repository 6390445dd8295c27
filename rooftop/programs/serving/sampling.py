"""How the next tokens are chosen from logits, on the device; what a row draws does not depend on the other rows.

Dims: R rows, V vocabulary, S slots (places of running requests).
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class SampledChoice:
    """How each row chooses, [R] each: see ``rooftop.serve.engine.requests.Sampling``; ``top_k`` 0 is all.

    ``seed`` [R, 2] uint32 and ``drawn``, the number of the token in its request, decide what is drawn.
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    seed: jax.Array
    drawn: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Adjustments:
    """What changes the logits of requests, by their slots; kept on the device from step to step.

    ``bias`` [S, V] float32 is added; ``seen`` [S, V] int32 counts the tokens generated, plus ``IN_PROMPT`` for those of
    the prompt; bit t of ``mask`` [S, ceil(V/32)] uint32 allows token t. ``penalties`` [S, 3] float32: presence,
    frequency, repetition.
    """

    bias: jax.Array
    seen: jax.Array
    mask: jax.Array
    penalties: jax.Array

    @classmethod
    def none(cls, slots: int, vocab: int) -> Adjustments:
        """Those that change nothing."""
        return cls(
            bias=jnp.zeros((slots, vocab), jnp.float32),
            seen=jnp.zeros((slots, vocab), jnp.int32),
            mask=jnp.full((slots, -(-vocab // 32)), 2**32 - 1, jnp.uint32),
            penalties=jnp.tile(jnp.array([0.0, 0.0, 1.0], jnp.float32), (slots, 1)),
        )

    def apply(self, logits: jax.Array, slots: jax.Array) -> jax.Array:
        """Logits [R, V] of the requests in ``slots`` [R], changed."""
        seen, penalties = self.seen[slots], self.penalties[slots]
        presence, frequency, repetition = (penalties[:, i, None] for i in range(3))
        generated = seen % IN_PROMPT
        divided = jnp.where(logits > 0, logits / repetition, logits * repetition)
        logits = jnp.where(seen > 0, divided, logits)
        logits = logits - frequency * generated - presence * (generated > 0) + self.bias[slots]
        token = jnp.arange(logits.shape[1], dtype=jnp.uint32)
        bits = self.mask[slots][:, token // 32] >> (token % 32)
        return jnp.where(bits & 1 == 1, logits, -jnp.inf)


#: Added to the count of a token that the prompt has; more tokens than that no request generates.
IN_PROMPT = 2**24


def choose(logits: jax.Array, how: SampledChoice) -> jax.Array:
    """Tokens [R] int32 by logits [R, V] float32; draws by the Gumbel trick (Gumbel 1954), each row with its own key."""
    likeliest = largest(logits)

    def drawn() -> jax.Array:
        scaled = filtered(logits, how)
        keys = jax.vmap(jax.random.fold_in)(jax.random.wrap_key_data(how.seed, impl="threefry2x32"), how.drawn)
        noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[1:], jnp.float32))(keys)
        return jnp.where(how.temperature > 0, largest(scaled + noise), likeliest)

    # Sorting and drawing take longer than all else of a small model: only where a row asks for it.
    return lax.cond(jnp.any(how.temperature > 0), drawn, lambda: likeliest)


def largest(x: jax.Array) -> jax.Array:
    """The first index of the largest of x [R, V], [R] int32: as argmax, which XLA:CPU does element by element."""
    index = jnp.arange(x.shape[1], dtype=jnp.int32)
    return jnp.min(jnp.where(x == jnp.max(x, axis=1, keepdims=True), index, x.shape[1] - 1), axis=1)


def filtered(logits: jax.Array, how: SampledChoice) -> jax.Array:
    """Logits [R, V] by temperature, -inf where ``top_k``, ``top_p`` or ``min_p`` leaves a token out.

    What is as likely as the last that is kept is kept too.
    """
    scaled = logits / jnp.where(how.temperature > 0, how.temperature, 1.0)[:, None]
    wanted = (how.top_k > 0) | (how.top_p < 1) | (how.min_p > 0)

    def cut() -> jax.Array:
        size = logits.shape[1]
        order = jnp.flip(jnp.sort(scaled, axis=-1), axis=-1)
        last = jnp.where(how.top_k > 0, jnp.minimum(how.top_k, size), size) - 1
        least = jnp.take_along_axis(order, last[:, None], axis=-1)
        kept = jax.nn.softmax(jnp.where(order >= least, order, -jnp.inf), axis=-1)
        before = jnp.cumsum(kept, axis=-1) - kept
        inside = (before < how.top_p[:, None]) & (kept > 0)
        least = jnp.min(jnp.where(inside, order, jnp.inf), axis=-1, keepdims=True)
        # log(0) is -inf: nothing is left out.
        least = jnp.maximum(least, order[:, :1] + jnp.log(how.min_p)[:, None])
        return jnp.where(scaled >= least, scaled, -jnp.inf)

    return lax.cond(jnp.any(wanted & (how.temperature > 0)), cut, lambda: scaled)


def log_probabilities(logits: jax.Array, tokens: jax.Array, count: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Log-probabilities of ``tokens`` [R], and of the ``count`` likeliest tokens with their ids, [R, count]."""
    found = jax.nn.log_softmax(logits, axis=-1)
    top, ids = lax.top_k(found, count)
    return jnp.take_along_axis(found, tokens[:, None], axis=-1)[:, 0], top, ids.astype(jnp.int32)
