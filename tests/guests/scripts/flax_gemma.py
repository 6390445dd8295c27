"""A Gemma-like decoder in Flax NNX: one key/value head, rotated, gated GELU, tied embedding, capped logits, AdamW."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

V, D, F, N, H, LAYERS, B, T = 8192, 1024, 4096, 4, 256, 1, 32, 256
mesh = jax.make_mesh((4, 4), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)


def weight(rngs, shape, spec):
    init = nnx.with_partitioning(nnx.initializers.normal(0.02), spec)
    return nnx.Param(init(rngs.params(), shape, jnp.float32))


def rotate(x):
    angle = jnp.arange(T)[:, None, None] / 10000 ** (jnp.arange(0, H, 2) / H)
    first, second = jnp.split(x, 2, axis=-1)
    sin, cos = jnp.sin(angle).astype(x.dtype), jnp.cos(angle).astype(x.dtype)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


class Attention(nnx.Module):
    def __init__(self, rngs):
        self.q = weight(rngs, (D, N, H), ("fsdp", "tensor", None))
        self.kv = weight(rngs, (2, D, H), (None, "fsdp", None))
        self.out = weight(rngs, (N, H, D), ("tensor", None, "fsdp"))

    def __call__(self, x):
        q = rotate(jnp.einsum("btd,dnh->btnh", x, self.q.astype(x.dtype)))
        k, v = jnp.einsum("btd,cdh->cbth", x, self.kv.astype(x.dtype))
        k = rotate(k[:, :, None])[:, :, 0]
        scores = jnp.einsum("btnh,bsh->bnts", q * H**-0.5, k)
        scores = jnp.where(jnp.tril(jnp.ones((T, T), bool)), scores.astype(jnp.float32), -1e30)
        mixed = jnp.einsum("bnts,bsh->btnh", jax.nn.softmax(scores).astype(x.dtype), v)
        return jnp.einsum("btnh,nhd->btd", mixed, self.out.astype(x.dtype))


class FeedForward(nnx.Module):
    def __init__(self, rngs):
        self.gate = weight(rngs, (D, F), ("fsdp", "tensor"))
        self.up = weight(rngs, (D, F), ("fsdp", "tensor"))
        self.down = weight(rngs, (F, D), ("tensor", "fsdp"))

    def __call__(self, x):
        gate, up = (jnp.einsum("btd,df->btf", x, w.astype(x.dtype)) for w in (self.gate, self.up))
        return jnp.einsum("btf,fd->btd", jax.nn.gelu(gate) * up, self.down.astype(x.dtype))


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm1, self.norm2 = nnx.RMSNorm(D, rngs=rngs), nnx.RMSNorm(D, rngs=rngs)
        self.attention, self.mlp = Attention(rngs), FeedForward(rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm1(x).astype(x.dtype))
        x = x + self.mlp(self.norm2(x).astype(x.dtype))
        return jax.lax.with_sharding_constraint(x, P("fsdp", None, None))


class Gemma(nnx.Module):
    def __init__(self, rngs):
        self.embedding = weight(rngs, (V, D), ("tensor", "fsdp"))
        self.layers = nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.norm = nnx.RMSNorm(D, rngs=rngs)

    def __call__(self, tokens):
        table = self.embedding.astype(jnp.bfloat16)
        x = table[tokens] * jnp.bfloat16(D**0.5)
        for layer in self.layers:
            x = layer(x)
        logits = jnp.einsum("btd,vd->btv", self.norm(x).astype(x.dtype), table)
        return 30 * jnp.tanh(logits.astype(jnp.float32) / 30)


@nnx.jit
def create():
    model = Gemma(nnx.Rngs(0))
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-3, 100, 1000)
    return model, nnx.Optimizer(model, optax.adamw(schedule), wrt=nnx.Param)


def loss_fn(model, batch):
    logits = model(batch["inputs"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()


@nnx.jit
def train_step(model, optimizer, batch):
    loss, grads = nnx.value_and_grad(loss_fn)(model, batch)
    optimizer.update(model, grads)
    return loss


with jax.set_mesh(mesh):
    model, optimizer = create()
    print(sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param))), "parameters")
    rng = np.random.default_rng(0)
    for _ in range(100):
        tokens = rng.integers(0, V, (B, T + 1), dtype=np.int32)
        batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}
        batch = jax.device_put(batch, NamedSharding(mesh, P("fsdp")))
        print("step", int(optimizer.step.get_value()), "loss", float(train_step(model, optimizer, batch)))
