"""A GPT in Equinox: ``filter_jit`` with donation, ``filter_shard``, dropout keys, data-parallel as its examples are."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

V, D, N, F, LAYERS, B, T = 8192, 1024, 8, 4096, 1, 64, 256
mesh = jax.make_mesh((16,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))
split, whole = NamedSharding(mesh, P("batch")), NamedSharding(mesh, P())


class Block(eqx.Module):
    norm1: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    norm2: eqx.nn.LayerNorm
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    dropout: eqx.nn.Dropout

    def __init__(self, key):
        a, b, c = jax.random.split(key, 3)
        self.norm1, self.norm2 = eqx.nn.LayerNorm(D), eqx.nn.LayerNorm(D)
        self.attention = eqx.nn.MultiheadAttention(N, D, key=a)
        self.up, self.down = eqx.nn.Linear(D, F, key=b), eqx.nn.Linear(F, D, key=c)
        self.dropout = eqx.nn.Dropout(0.1)

    def __call__(self, x, key):
        y = jax.vmap(self.norm1)(x)
        x = x + self.attention(y, y, y, jnp.tril(jnp.ones((T, T), bool)))
        y = jax.vmap(lambda token: self.down(jax.nn.gelu(self.up(self.norm2(token)))))(x)
        return x + self.dropout(y, key=key)


class GPT(eqx.Module):
    embedding: eqx.nn.Embedding
    blocks: list[Block]
    head: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, LAYERS + 2)
        self.embedding, self.head = eqx.nn.Embedding(V, D, key=keys[0]), eqx.nn.Linear(D, V, key=keys[1])
        self.blocks = [Block(key) for key in keys[2:]]

    def __call__(self, tokens, key):
        x = jax.vmap(self.embedding)(tokens)
        for block, own in zip(self.blocks, jax.random.split(key, LAYERS), strict=True):
            x = block(x, own)
        return jax.vmap(self.head)(x)


optim = optax.adamw(1e-3)


@eqx.filter_jit(donate="all-except-first")
def train_step(batch, model, state, key):
    inputs, targets = eqx.filter_shard(batch, split)
    model, state = eqx.filter_shard((model, state), whole)

    def loss_fn(model):
        logits = jax.vmap(model)(inputs, jax.random.split(key, B))
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    loss, grads = eqx.filter_value_and_grad(loss_fn)(model)
    updates, state = optim.update(grads, state, eqx.filter(model, eqx.is_inexact_array))
    return eqx.filter_shard((eqx.apply_updates(model, updates), state), whole), loss


model = GPT(jax.random.key(0))
state = optim.init(eqx.filter(model, eqx.is_inexact_array))
model, state = eqx.filter_shard((model, state), whole)
key, rng = jax.random.key(1), np.random.default_rng(0)
for i in range(50):
    key, own = jax.random.split(key)
    tokens = rng.integers(0, V, (B, T + 1), dtype=np.int32)
    batch = eqx.filter_shard((tokens[:, :-1], tokens[:, 1:]), split)
    (model, state), loss = train_step(batch, model, state, own)
    print("step", i, "loss", loss.item())
