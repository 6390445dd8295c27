"""A language model in Haiku: ``hk.transform``, scanned layers with remat, ``jax.jit`` with shardings and donation."""

import functools

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

V, D, N, F, LAYERS, B, T = 4096, 512, 4, 2048, 4, 64, 256
mesh = Mesh(np.array(jax.devices()), ("data",))
split, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())


def norm(x):
    return hk.LayerNorm(axis=-1, create_scale=True, create_offset=True)(x)


class Layer(hk.Module):
    def __call__(self, x):
        init = hk.initializers.VarianceScaling(0.02)
        y = norm(x)
        mask = jnp.tril(jnp.ones((1, 1, T, T), bool))
        x = x + hk.MultiHeadAttention(N, D // N, w_init=init)(y, y, y, mask=mask)
        return x + hk.Sequential([hk.Linear(F), jax.nn.gelu, hk.Linear(D)])(norm(x))


@hk.transform
def forward(tokens):
    x = hk.Embed(V, D)(tokens)
    x = hk.experimental.layer_stack(LAYERS)(hk.remat(Layer()))(x)
    return hk.Linear(V, with_bias=False)(norm(x))


optimizer = optax.adamw(1e-3)


@functools.partial(jax.jit, in_shardings=(whole, whole, split), out_shardings=whole, donate_argnums=(0, 1))
def update(params, state, tokens):
    def loss_fn(params):
        logits = forward.apply(params, None, tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    loss, grads = jax.value_and_grad(loss_fn)(params)
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss


params = jax.jit(forward.init)(jax.random.key(0), np.zeros((1, T), np.int32))
params, state = jax.device_put((params, optimizer.init(params)), whole)
rng = np.random.default_rng(0)
for i in range(50):
    tokens = rng.integers(0, V, (B, T + 1), dtype=np.int32)
    params, state, loss = update(params, state, tokens)
    print("step", i, "loss", float(loss))
