"""Optimizers of plans, from optax, with their state in any dtype and their arithmetic in float32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from rooftop.capabilities import OPTIMIZERS, STATE_DTYPES
from rooftop.core.errors import RooftopError, unknown
from rooftop.programs.parameters import Parameter, Transformer

#: JAX's dtypes of arrays that live from step to step.
DTYPES = dict(zip(STATE_DTYPES, (jnp.bfloat16, jnp.float32), strict=True))


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """Adam (Kingma and Ba 2015), AdamW (Loshchilov and Hutter 2019), Lion (Chen et al. 2023) or plain SGD, by ``name``.

    ``weight_decay`` is decoupled, for adamw and lion only; scales, biases and sinks do not decay. ``clip_norm`` limits
    the norm of all gradients together. ``moments`` is the dtype of the state.
    """

    name: str = "adamw"
    learning_rate: float = 3e-4
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float | None = None
    moments: str = "f32"

    def __post_init__(self) -> None:
        if self.name not in OPTIMIZERS:
            raise unknown("optimizer", self.name, OPTIMIZERS)
        if self.moments not in DTYPES:
            raise unknown("dtype of moments", self.moments, DTYPES)
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise RooftopError("clip_norm", self.clip_norm, "a positive number, or none")

    def clip(self, gradients: Transformer[jax.Array]) -> Transformer[jax.Array]:
        """Gradients scaled down to ``clip_norm`` if their norm is larger."""
        if self.clip_norm is None:
            return gradients
        clipped, _ = optax.clip_by_global_norm(self.clip_norm).update(gradients, optax.EmptyState())
        return clipped

    def transformation(self, described: Transformer[Parameter]) -> optax.GradientTransformation:
        """The optax transformation from float32 gradients to updates of the weights."""
        decays = jax.tree.map(lambda parameter: parameter.fan_in is not None, described)
        decay = optax.add_decayed_weights(self.weight_decay, decays)
        adam = optax.scale_by_adam(self.b1, self.b2, self.eps)
        parts = {
            "adamw": (adam, decay),
            "adam": (adam,),
            "lion": (optax.scale_by_lion(self.b1, self.b2), decay),
            "sgd": (),
        }[self.name]
        return _stored(optax.chain(*parts, optax.scale_by_learning_rate(self.learning_rate)), DTYPES[self.moments])


def _stored(inner: optax.GradientTransformation, dtype: Any) -> optax.GradientTransformation:
    """``inner`` in float32, its state stored in ``dtype``."""

    def init(weights: Any) -> Any:
        return _cast(inner.init(_cast(weights, jnp.float32)), dtype)

    def update(gradients: Any, state: Any, weights: Any) -> tuple[Any, Any]:
        changes, state = inner.update(gradients, _cast(state, jnp.float32), _cast(weights, jnp.float32))
        return changes, _cast(state, dtype)

    return optax.GradientTransformation(init, update)


def _cast(tree: Any, dtype: Any) -> Any:
    """The tree with its floating arrays in ``dtype``; counters stay as they are."""
    return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)
