"""Rotary positions (Su et al. 2021, RoFormer), stretched as the model requires; angles in float32.

Dims: B batch, T sequence, H the rotated size of a head.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import P
from jax.sharding import reshard
from jaxtyping import Array, Float, Float32, Int

from rooftop.models.config import ModelConfig, RopeScaling


def frequencies(model: ModelConfig, *, local: bool = False) -> npt.NDArray[np.float64]:
    """Radians per position of each rotated pair, [H/2]; ``local``: for a windowed layer.

    Scaled by RopeScaling: linear (Chen et al. 2023), as LLaMA 3.1, or by YaRN (Peng et al. 2023, section 3).
    """
    size = model.rotated if model.mla is None else model.mla.d_rope
    local = local and model.rope_local_theta is not None
    theta = model.rope_local_theta if local and model.rope_local_theta else model.rope_theta
    radians: npt.NDArray[np.float64] = theta ** (-np.arange(0, size, 2) / size)
    scaling = None if local else model.rope_scaling
    if scaling is None:
        return radians
    return radians * (1 - _stretched(radians, scaling, theta) * (1 - 1 / scaling.factor))


def rotation(
    model: ModelConfig, positions: Int[Array, "*tokens"], *, local: bool = False
) -> Float32[Array, "2 *tokens 1 half_H"]:
    """Cosines and sines of the rotary angles at ``positions``, [T] or [B, T], times YaRN's attention factor."""
    angle = positions.astype(jnp.float32)[..., None] * jnp.asarray(frequencies(model, local=local), jnp.float32)
    turns = jnp.stack([jnp.cos(angle), jnp.sin(angle)])[..., None, :]
    factor = 1.0 if local or model.rope_scaling is None else model.rope_scaling.attention_factor
    return turns if factor == 1.0 else turns * factor


def rotate(
    x: Float[Array, "B T heads H"], turns: Float32[Array, "*turns"], *, interleaved: bool = False
) -> Float[Array, "B T heads H"]:
    """Rotate the first elements of each head, as many as there are ``turns`` for, two each.

    The two halves of them are the coordinates, or neighbours if ``interleaved``. Interleaved pairs come out as halves:
    queries and keys are reordered alike, which leaves their products unchanged.
    """
    batch, seq, *_ = jax.typeof(x).sharding.spec.partitions
    if turns.ndim == 5:
        turns = reshard(turns, P(None, batch, seq, None, None))
    cos, sin = turns
    rotated = 2 * turns.shape[-1]
    wide = x[..., :rotated].astype(jnp.float32)
    first, second = (wide[..., 0::2], wide[..., 1::2]) if interleaved else jnp.split(wide, 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    turned = turned.astype(x.dtype)
    return turned if rotated == x.shape[-1] else jnp.concatenate([turned, x[..., rotated:]], axis=-1)


def within_segments(segments: Int[Array, "B T"], positions: Int[Array, " T"]) -> Int[Array, "B T"]:
    """Positions counted from the start of each segment; ``positions`` are those in the sequence.

    The tokens of a segment are adjacent in the sequence; the order of ``positions`` is arbitrary.
    """
    spec = jax.typeof(segments).sharding.spec
    # Each token needs the segments of its whole sequence: a few integers, small compared with its embedding.
    ids = reshard(segments, P(spec.partitions[0], None))[:, jnp.argsort(positions)]
    starts = jnp.concatenate([jnp.ones_like(ids[:, :1], bool), ids[:, 1:] != ids[:, :-1]], axis=1)
    index = jax.lax.broadcasted_iota(jnp.int32, ids.shape, 1, out_sharding=jax.typeof(ids).sharding)
    counted = index - jax.lax.cummax(jnp.where(starts, index, 0), axis=1)
    return reshard(counted[:, positions], spec)


def _stretched(
    frequency: npt.NDArray[np.float64], scaling: RopeScaling, theta: float
) -> npt.NDArray[np.float64] | float:
    """Share of the scaling factor that divides each frequency: 0 leaves it unchanged, 1 divides it fully."""
    original = scaling.original_max_seq_len
    if scaling.kind == "llama3":
        assert original and scaling.low_freq_factor and scaling.high_freq_factor
        turns = original * frequency / (2 * math.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        return 1 - np.clip((turns - low) / (high - low), 0, 1)
    if scaling.kind == "yarn":
        assert original and scaling.beta_fast and scaling.beta_slow
        size = 2 * len(frequency)

        def dim(turns: float) -> float:
            """The (fractional) pair that makes this many turns in the original length."""
            return size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

        first, last = dim(scaling.beta_fast), dim(scaling.beta_slow)
        if scaling.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, size - 1)
        return np.clip((np.arange(len(frequency)) - first) / max(last - first, 1e-3), 0, 1)
    return 1.0
