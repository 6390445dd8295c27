"""JAX's splash attention alone, forward and backward: causal, 16 sequences, 16 heads, 2048 tokens, head size 128."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

B, N, T, H = 16, 16, 2048, 128
mesh = jax.make_mesh((16,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
mask = splash_attention_mask.MultiHeadMask([splash_attention_mask.CausalMask((T, T))] * N)
kernel = splash_attention_kernel.make_splash_mha(mask, head_shards=1, q_seq_shards=1)
spec = P("data", None, None, None)


@functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), spec, spec, spec), out_specs=spec, check_vma=False)
def attention(kernel, q, k, v):
    return jax.vmap(kernel)(q, k, v)


@jax.jit
def gradients(q, k, v, cotangent):
    out, back = jax.vjp(functools.partial(attention, kernel), q, k, v)
    return out, back(cotangent)


arrays = [jax.device_put(jnp.zeros((B, N, T, H), jnp.bfloat16), NamedSharding(mesh, spec)) for _ in range(4)]
for _ in range(10):
    out, grads = gradients(*arrays)
print(out.shape)
