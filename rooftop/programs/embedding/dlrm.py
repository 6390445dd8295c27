"""DLRM (Naumov et al. 2019): an MLP of dense features, embeddings, dot products of all pairs, and a second MLP.

Dims: B samples, F categorical features of one embedding width W, N dense features.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Generic

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import P, named_scope
from jax.sharding import NamedSharding
from jaxtyping import Array, Float

from rooftop.core.errors import RooftopError
from rooftop.programs.parameters import Leaf


@dataclass(frozen=True, kw_only=True)
class DlrmConfig:
    """Sizes of the dense part. ``features`` are looked up, in this order, each of ``width`` floats.

    ``bottom`` and ``top`` are hidden layers. The bottom MLP ends in ``width`` floats, the top one in a logit.
    """

    dense_features: int
    features: tuple[str, ...]
    width: int
    bottom: tuple[int, ...] = (64, 32)
    top: tuple[int, ...] = (64, 32)
    learning_rate: float = 1e-3

    def __post_init__(self) -> None:
        for name in ("dense_features", "width"):
            if getattr(self, name) < 1:
                raise RooftopError(name, getattr(self, name), "a positive whole number")

    @property
    def layers(self) -> dict[str, tuple[int, ...]]:
        """Sizes of each MLP, inputs first."""
        vectors = len(self.features) + 1
        return {
            "bottom": (self.dense_features, *self.bottom, self.width),
            "top": (self.width + vectors * (vectors - 1) // 2, *self.top, 1),
        }


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class DlrmBatch(Generic[Leaf]):
    """dense [B, N] float32, label [B] float32 of 0 and 1."""

    dense: Leaf
    label: Leaf


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class DlrmState(Generic[Leaf]):
    """Weights and biases of each MLP, and Adam's state."""

    weights: dict[str, list[tuple[Leaf, Leaf]]]
    optimizer: Any


@dataclass(frozen=True, kw_only=True)
class Dlrm:
    """The dense part of a step: a ``rooftop.programs.embedding.pipeline.DenseStep``.

    ``share_of`` returns the share of the learning rate for a step, counted from 0; None: always 1.
    """

    config: DlrmConfig
    share_of: Callable[[jax.Array], jax.Array] | None = None

    @property
    def _optimizer(self) -> optax.GradientTransformation:
        return optax.adam(self.config.learning_rate)

    def begin(self, seed: int) -> DlrmState[Any]:
        """Weights as in Glorot and Bengio 2010, and Adam's state, created on the host."""
        random = np.random.default_rng([seed, 1])
        weights = {
            name: [
                (
                    (random.standard_normal((a, b)) * np.sqrt(2 / (a + b))).astype(np.float32),
                    np.zeros(b, np.float32),
                )
                for a, b in pairwise(sizes)
            ]
            for name, sizes in self.config.layers.items()
        }
        return DlrmState(weights=weights, optimizer=self._optimizer.init(weights))

    def initialise(self, mesh: jax.sharding.Mesh, seed: int) -> DlrmState[jax.Array]:
        """The state of ``begin``, on every device of ``mesh``."""
        placed: DlrmState[jax.Array] = jax.device_put(self.begin(seed), NamedSharding(mesh, P()))
        return placed

    def logits(
        self,
        weights: Mapping[str, Sequence[tuple[jax.Array, jax.Array]]],
        activations: Mapping[str, Float[Array, "B W"]],
        dense: Float[Array, "B N"],
    ) -> Float[Array, " B"]:
        """Logits, from activations by feature and dense features."""
        bottom = _mlp(weights["bottom"], dense)
        vectors = jnp.stack([bottom, *(activations[name] for name in self.config.features)], axis=1)
        products = jnp.einsum("bfw,bgw->bfg", vectors, vectors)
        count = vectors.shape[1]
        above = np.flatnonzero(np.triu(np.ones((count, count), bool), 1))
        pairs = products.reshape(products.shape[0], -1)[:, above]
        return _mlp(weights["top"], jnp.concatenate([bottom, pairs], axis=1))[:, 0]

    def __call__(
        self, dense: DlrmState[jax.Array], activations: dict[str, jax.Array], batch: DlrmBatch[jax.Array]
    ) -> tuple[DlrmState[jax.Array], dict[str, jax.Array], jax.Array]:
        """The state after Adam's step, the activations' gradients, and the mean cross-entropy in nats.

        Each device has a part of the samples. Gradients of the weights, which all devices have, are summed over
        devices.
        """

        def loss(weights: Any, activations: dict[str, jax.Array], batch: DlrmBatch[jax.Array]) -> jax.Array:
            logits = self.logits(weights, activations, batch.dense)
            return jnp.sum(optax.sigmoid_binary_cross_entropy(logits, batch.label)) / len(logits)

        gradients, of_activations, value = loss_gradients(loss, dense.weights, activations, batch)
        with named_scope("optimizer"):
            changes, optimizer = self._optimizer.update(gradients, dense.optimizer, dense.weights)
            if self.share_of is not None:
                share = self.share_of(optax.tree_utils.tree_get(dense.optimizer, "count"))
                changes = jax.tree.map(lambda change: share * change, changes)
            weights = optax.apply_updates(dense.weights, changes)
        return dataclasses.replace(dense, weights=weights, optimizer=optimizer), of_activations, value


def loss_gradients(
    loss: Callable[[Any, dict[str, jax.Array], Any], jax.Array],
    weights: Any,
    activations: dict[str, jax.Array],
    batch: Any,
) -> tuple[Any, dict[str, jax.Array], jax.Array]:
    """Gradients of the weights and of the activations, and the mean loss, of the devices of the mesh in context.

    Each device has a part of the samples, of which ``loss`` is the mean, and all have the weights.
    """
    mesh = jax.sharding.get_abstract_mesh()
    axes, split = mesh.axis_names, P(mesh.axis_names)

    def local(
        weights: Any, activations: dict[str, jax.Array], batch: Any
    ) -> tuple[Any, dict[str, jax.Array], jax.Array]:
        def share(weights: Any, activations: dict[str, jax.Array]) -> jax.Array:
            with named_scope("loss"):
                return loss(weights, activations, batch) / mesh.size

        value, (of_weights, of_activations) = jax.value_and_grad(share, argnums=(0, 1))(weights, activations)
        with named_scope("gradients"):
            return jax.lax.psum(of_weights, axes), of_activations, jax.lax.psum(value, axes)

    in_specs, out_specs = (P(), split, split), (P(), split, P())
    return jax.shard_map(local, in_specs=in_specs, out_specs=out_specs, check_vma=False)(weights, activations, batch)


def _mlp(layers: Sequence[tuple[jax.Array, jax.Array]], x: Float[Array, "B inputs"]) -> Float[Array, "B outputs"]:
    for index, (weight, bias) in enumerate(layers):
        x = x @ weight + bias
        if index + 1 < len(layers):
            x = jax.nn.relu(x)
    return x
