"""The weights of the tiny models: drawn by a rule from a weight's name and shape, so that none is stored.

NumPy only: make_logits.py gives them to transformers, our tests to the program. RandomState's stream is frozen by
NumPy's compatibility policy (NEP 19), and only products and square roots follow, so that every machine draws the same.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

#: How many elements of a gradient are stored.
SAMPLES = 16


def weight(name: str, shape: Sequence[int], norm_mean: float = 1.0) -> NDArray[np.float32]:
    """The weight called ``name`` in a checkpoint, float32 of ``shape``.

    Standard deviations: 0.3 for embedding tables, (rows x columns)**-0.25 for other matrices (the geometric mean of
    what keeps the size of activations in either direction; a leading axis counts experts), 0.3 around ``norm_mean``
    for scales of norms (0 for Gemma, which stores their difference from 1), 0.5 for attention sinks, 0.2 for biases.
    """
    mean = 0.0
    if "embed_tokens" in name or name.split(".")[-2:-1] in (["wte"], ["wpe"]):
        deviation = 0.3
    elif len(shape) > 1 and not name.endswith("bias"):
        deviation = 1 / math.sqrt(math.sqrt(shape[-2] * shape[-1]))
    elif name.endswith("norm.weight") or (".ln_" in name and name.endswith("weight")):
        mean, deviation = norm_mean, 0.3
    else:
        deviation = 0.5 if name.endswith("sinks") else 0.2
    return (mean + deviation * _uniform(name, shape)).astype(np.float32)


def weights(shapes: Mapping[str, Sequence[int]], norm_mean: float = 1.0) -> dict[str, NDArray[np.float32]]:
    """``weight`` of every name."""
    return {name: weight(name, shape, norm_mean) for name, shape in shapes.items()}


def direction(name: str, shape: Sequence[int]) -> NDArray[np.float64]:
    """Float64 of ``shape``, mean 0 and deviation 1, which the gradient of the weight ``name`` is projected on."""
    return _uniform(f"direction of {name}", shape)


def summarise(name: str, gradient: NDArray[np.floating]) -> NDArray[np.float64]:
    """Stored facts of a gradient: its Euclidean norm, its inner product with ``direction``, and SAMPLES elements.

    The elements are spread evenly over the gradient in row-major order; they repeat when it has fewer. Float64 of
    2 + SAMPLES. Norm and inner product see every element: a transposed or permuted gradient has another product.
    """
    flat = np.asarray(gradient, np.float64).reshape(-1)
    spread = np.arange(SAMPLES) * flat.size // SAMPLES
    product = flat @ direction(name, gradient.shape).reshape(-1)
    return np.concatenate([[np.linalg.norm(flat), product], flat[spread]])


def checksum(arrays: Mapping[str, NDArray[np.float32]]) -> int:
    """CRC-32 over the little-endian bytes of the arrays, sorted by name."""
    crc = 0
    for name in sorted(arrays):
        crc = zlib.crc32(np.ascontiguousarray(arrays[name], "<f4").tobytes(), crc)
    return crc


def _uniform(name: str, shape: Sequence[int]) -> NDArray[np.float64]:
    draw = np.random.RandomState(zlib.crc32(name.encode())).uniform(-1.0, 1.0, tuple(shape))
    return draw * math.sqrt(3)
