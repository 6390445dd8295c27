"""A stand-in for a model's dense part of which only the FLOPs are known: layers of one width over all activations.

Dims: B samples, F features, W their widths, H the tower's width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import P, named_scope

#: Layers: from the activations to H, from H to H, and to one logit.
_SQUARE = 2
_EIGHT = 8


@dataclass(frozen=True, kw_only=True)
class Tower:
    """A DenseStep of ``rooftop.programs.embedding_pipeline``, of about ``flops`` matmul FLOPs a sample, forward.

    ``features`` are (name, width) of what is looked up. Positions of a sequence are averaged. It learns the mean
    squared error to ``batch``, [B] float32, by gradient descent.
    """

    features: tuple[tuple[str, int], ...]
    flops: float

    @property
    def inputs(self) -> int:
        """Floats of a sample: the widths of all features."""
        return sum(width for _, width in self.features)

    @property
    def width(self) -> int:
        """H with 2 (inputs H + 2 H^2) FLOPs, in whole eights, at least 8."""
        inputs, products = self.inputs, self.flops / 2
        exact = (math.sqrt(inputs**2 + 4 * _SQUARE * products) - inputs) / (2 * _SQUARE)
        return max(_EIGHT, round(exact / _EIGHT) * _EIGHT)

    @property
    def flops_per_sample(self) -> int:
        """Matmul FLOPs of a sample, forward, of the width that was chosen."""
        return 2 * (self.inputs * self.width + _SQUARE * self.width**2 + self.width)

    def shapes(self) -> list[tuple[int, int]]:
        """Shapes of the weights, first layer first."""
        return [(self.inputs, self.width), *[(self.width, self.width)] * _SQUARE, (self.width, 1)]

    def __call__(
        self, dense: list[jax.Array], activations: dict[str, jax.Array], batch: jax.Array
    ) -> tuple[list[jax.Array], dict[str, jax.Array], jax.Array]:
        """New weights, the activations' gradients, and the loss; weights are whole on every device, samples split."""
        mesh = jax.sharding.get_abstract_mesh()
        axes, devices = mesh.axis_names, mesh.size

        def local(weights: Any, activations: dict[str, jax.Array], batch: jax.Array) -> Any:
            def loss(weights: list[jax.Array], activations: dict[str, jax.Array]) -> jax.Array:
                with named_scope("loss"):
                    pooled = [activations[name] for name, _ in self.features]
                    x = jnp.concatenate([each.mean(1) if each.ndim == 3 else each for each in pooled], axis=1)
                    for weight in weights[:-1]:
                        x = jax.nn.relu(x @ weight)
                    return jnp.mean(((x @ weights[-1])[:, 0] - batch) ** 2) / devices

            value, (of_weights, of_activations) = jax.value_and_grad(loss, argnums=(0, 1))(weights, activations)
            with named_scope("gradients"):
                return jax.lax.psum(of_weights, axes), of_activations, jax.lax.psum(value, axes)

        split = P(axes)
        gradients, of_activations, value = jax.shard_map(
            local, in_specs=(P(), split, split), out_specs=(P(), split, P()), check_vma=False
        )(dense, activations, batch)
        with named_scope("optimizer"):
            return [weight - 1e-3 * own for weight, own in zip(dense, gradients, strict=True)], of_activations, value
