# %% [markdown]
# # Compile any JAX function for a TPU slice, without a TPU
#
# The compiler is the real XLA:TPU. The function is plain JAX; its arguments are in the book's notation.

# %%
import jax
import jax.numpy as jnp

import rooftop


def step(x, w_in, w_out):
    h = jax.nn.relu(jnp.einsum("bd,df->bf", x, w_in))
    return jnp.einsum("bf,fd->bd", h, w_out, out_sharding=jax.P("X", "Y"))


report = rooftop.inspect(
    step, "bf16[2048_X, 2048]", "bf16[2048_X, 8192_Y]", "bf16[8192_Y, 2048_X]", on="v5e:2x2", mesh="X=2,Y=2"
)
report

# %% [markdown]
# The operations that take the longest, with what binds each:

# %%
for operation in report.slowest(3):
    print(f"{operation.matmul or operation.shape:20} {operation.expected_s * 1e6:7.1f} us  {operation.source}")
