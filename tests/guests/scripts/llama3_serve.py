"""Llama 3 of jax-llm-examples, 8B in two layers with random weights: a prefill, and tokens decoded one by one.

Calls are those of the example's main.py.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from llama3_jax import model as llama3

kernels = "kernels" in sys.argv
mesh = jax.make_mesh((1, 4, jax.device_count() // 4), ("x", "y", "z"), axis_types=(AxisType.Explicit,) * 3)
config = llama3.Config(
    embed=4096,
    ffw_size=14336,
    q_heads=32,
    kv_heads=8,
    num_layers=2,
    head_dim=128,
    vocab_size=128256,
    max_seq_len=2048,
    causal=True,
    use_prefill_attn_kernel=kernels,
    use_decode_attn_kernel=kernels,
    quant_layer=False,
    quant_cache=False,
    mesh=mesh,
)
weights = llama3.Weights.init(jax.random.key(0), config)
prompts = np.ones((16, 1024), np.int32)
with jax.sharding.set_mesh(mesh):
    empty = llama3.KVCache.init(jax.random.key(1), config, prompts.shape[0])
    tokens, logits, cache = llama3.prefill(prompts, weights, empty, config)
    tokens = tokens.at[:, cache.iter - 1 : cache.iter].get(out_sharding=P(None, None))
    written = []
    for _ in range(8):
        written.append(tokens)
        tokens, cache = llama3.decode_step(tokens, weights, cache, config)
print(np.array(jnp.concatenate(written, axis=-1)).shape)
