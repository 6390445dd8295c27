"""Choice of the next tokens from logits, on the device. Draws of a row do not depend on the other rows.

Dims: R rows, V vocabulary, S slots (of running requests).
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import P, lax
from jaxtyping import Array, Float, Float32, Int, Int32, UInt

from rooftop.core.rounding import ceil_div
from rooftop.programs.sharding import axes_of, on_shards


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class SampledChoice:
    """Options of each row's choice: see ``rooftop.serve.engine.requests.Sampling``; ``top_k`` 0 means all.

    ``seed`` and ``drawn``, the number of the token in its request, determine the draw.
    """

    temperature: Float32[Array, " R"]
    top_k: Int32[Array, " R"]
    top_p: Float32[Array, " R"]
    min_p: Float32[Array, " R"]
    seed: UInt[Array, "R 2"]
    drawn: Int32[Array, " R"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Adjustments:
    """Adjustments to the logits of requests, by slot; kept on the device from step to step.

    ``bias`` is added; ``seen`` counts the generated tokens, plus ``IN_PROMPT`` for tokens of the prompt; bit t of
    ``mask`` allows token t. ``penalties``: presence, frequency, repetition.
    """

    bias: Float32[Array, "S V"]
    seen: Int32[Array, "S V"]
    mask: UInt[Array, "S words"]
    penalties: Float32[Array, "S 3"]

    @classmethod
    def none(cls, slots: int, vocab: int) -> Adjustments:
        """Adjustments that change nothing."""
        return cls(
            bias=jnp.zeros((slots, vocab), jnp.float32),
            seen=jnp.zeros((slots, vocab), jnp.int32),
            mask=jnp.full((slots, ceil_div(vocab, 32)), 2**32 - 1, jnp.uint32),
            penalties=jnp.tile(jnp.array([0.0, 0.0, 1.0], jnp.float32), (slots, 1)),
        )

    def apply(self, logits: Float32[Array, "R V"], slots: Int[Array, " R"]) -> Float32[Array, "R V"]:
        """Adjusted logits of the requests in ``slots``."""
        seen, penalties = self.seen[slots], self.penalties[slots]
        presence, frequency, repetition = (penalties[:, i, None] for i in range(3))
        generated = seen % IN_PROMPT
        divided = jnp.where(logits > 0, logits / repetition, logits * repetition)
        logits = jnp.where(seen > 0, divided, logits)
        logits = logits - frequency * generated - presence * (generated > 0) + self.bias[slots]
        token = jnp.arange(logits.shape[1], dtype=jnp.uint32)
        bits = self.mask[slots][:, token // 32] >> (token % 32)
        return jnp.where(bits & 1 == 1, logits, -jnp.inf)


#: Added to the count of a token in the prompt; larger than the number of tokens that any request generates.
IN_PROMPT = 2**24


def choose(logits: Float32[Array, "R V"], how: SampledChoice) -> Int32[Array, " R"]:
    """Tokens chosen by logits; draws use the Gumbel trick (Gumbel 1954), with a key for each row."""
    likeliest = largest(logits)

    def drawn() -> jax.Array:
        scaled = filtered(logits, how)
        keys = jax.vmap(jax.random.fold_in)(jax.random.wrap_key_data(how.seed, impl="threefry2x32"), how.drawn)
        noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[1:], jnp.float32))(keys)
        return jnp.where(how.temperature > 0, largest(scaled + noise), likeliest)

    # Sorting and drawing take longer than the rest of a small model: only if a row needs it.
    return lax.cond(jnp.any(how.temperature > 0), drawn, lambda: likeliest)


def largest(x: Float[Array, "R V"]) -> Int32[Array, " R"]:
    """The first index of the largest element of each row. XLA:CPU computes argmax element by element, more slowly."""
    index = jnp.arange(x.shape[1], dtype=jnp.int32)
    return jnp.min(jnp.where(x == jnp.max(x, axis=1, keepdims=True), index, x.shape[1] - 1), axis=1)


def largest_of_parts(x: Float32[Array, "R V"]) -> Int32[Array, " R"]:
    """``largest`` where devices split V: each sends its largest element, and that element's index."""
    spec = jax.typeof(x).sharding.spec
    axes = axes_of(spec.partitions[1])
    if not axes:
        return largest(x)

    def local(x: jax.Array) -> jax.Array:
        first = lax.axis_index(axes) * x.shape[1]
        best = jnp.stack([lax.bitcast_convert_type(jnp.max(x, axis=1), jnp.int32), first + largest(x)])
        for axis in reversed(axes):
            # One axis after the other: XLA:TPU would sum where it gathers over several at once.
            every = lax.all_gather(best, axis)
            # Parts are in the order of V: of equal elements the first wins.
            part = largest(lax.bitcast_convert_type(every[:, 0], jnp.float32).T)
            best = jnp.take_along_axis(every, part[None, None], axis=0)[0]
        return best[1]

    # All devices have the same result, which the type of a gathered array does not say.
    tokens: jax.Array = on_shards(local, in_specs=(spec,), out_specs=P(None), check_vma=False)(x)
    return tokens


def filtered(logits: Float32[Array, "R V"], how: SampledChoice) -> Float32[Array, "R V"]:
    """Logits divided by temperature, -inf for tokens that ``top_k``, ``top_p`` or ``min_p`` excludes.

    Tokens as likely as the last included one are included too.
    """
    scaled = logits / jnp.where(how.temperature > 0, how.temperature, 1.0)[:, None]
    has_filter = (how.top_k > 0) | (how.top_p < 1) | (how.min_p > 0)

    def cut() -> jax.Array:
        size = logits.shape[1]
        order = jnp.flip(jnp.sort(scaled, axis=-1), axis=-1)
        last = jnp.where(how.top_k > 0, jnp.minimum(how.top_k, size), size) - 1
        least = jnp.take_along_axis(order, last[:, None], axis=-1)
        probabilities = jax.nn.softmax(jnp.where(order >= least, order, -jnp.inf), axis=-1)
        before = jnp.cumsum(probabilities, axis=-1) - probabilities
        inside = (before < how.top_p[:, None]) & (probabilities > 0)
        least = jnp.min(jnp.where(inside, order, jnp.inf), axis=-1, keepdims=True)
        # log(0) is -inf: no token is excluded.
        least = jnp.maximum(least, order[:, :1] + jnp.log(how.min_p)[:, None])
        return jnp.where(scaled >= least, scaled, -jnp.inf)

    return lax.cond(jnp.any(has_filter & (how.temperature > 0)), cut, lambda: scaled)


def log_probabilities(
    logits: Float32[Array, "R V"], tokens: Int[Array, " R"], count: int
) -> tuple[Float32[Array, " R"], Float32[Array, "R count"], Int32[Array, "R count"]]:
    """Log-probabilities of ``tokens``, and of the ``count`` likeliest tokens with their ids."""
    scores = jax.nn.log_softmax(logits, axis=-1)
    top, ids = lax.top_k(scores, count)
    return jnp.take_along_axis(scores, tokens[:, None], axis=-1)[:, 0], top, ids.astype(jnp.int32)
