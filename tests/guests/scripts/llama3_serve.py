"""Llama 3 of jax-llm-examples, called as its main.py does, with its TPU kernel for prefill and random weights."""

import jax
import numpy as np
from jax.sharding import AxisType, set_mesh
from llama3_jax import model

mesh = jax.make_mesh((2, 4, 2), ("x", "y", "z"), axis_types=(AxisType.Explicit,) * 3)
config = model.Config(
    embed=4096, ffw_size=14336, q_heads=32, kv_heads=8, num_layers=2, head_dim=128, vocab_size=128256,
    max_seq_len=4096, causal=True, use_prefill_attn_kernel=True, use_decode_attn_kernel=False, quant_layer=False,
    quant_cache=False, mesh=mesh,
)  # fmt: skip
weights = model.Weights.init(jax.random.key(0), config)
prompts = np.ones((32, 1024), np.int32)
with set_mesh(config.mesh):
    cache = model.KVCache.init(jax.random.key(1), config, prompts.shape[0])
    tokens, logits, cache = model.prefill(prompts, weights, cache, config)
    tokens = tokens.at[:, cache.iter - 1 : cache.iter].get(out_sharding=jax.P(None, None))
    for _ in range(16):
        tokens, cache = model.decode_step(tokens, weights, cache, config)
print(tokens.shape)
