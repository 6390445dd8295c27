"""JAX's megablox grouped matmul alone: rows of 16 experts, one device's part, on every device."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.megablox import gmm
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

ROWS, D, F, E = 8192, 2048, 7168, 16
mesh = jax.make_mesh((16,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
split = P("data")


@jax.jit
@functools.partial(jax.shard_map, mesh=mesh, in_specs=(split, P(), split), out_specs=split, check_vma=False)
def experts(rows, weights, sizes):
    return gmm(rows, weights, sizes, preferred_element_type=jnp.bfloat16, tiling=(512, 512, 512))


rows = jax.device_put(jnp.zeros((16 * ROWS, D), jnp.bfloat16), NamedSharding(mesh, split))
weights = jax.device_put(jnp.zeros((E, D, F), jnp.bfloat16), NamedSharding(mesh, P()))
sizes = jax.device_put(jnp.full((16 * E,), ROWS // E, jnp.int32), NamedSharding(mesh, split))
for _ in range(10):
    out = experts(rows, weights, sizes)
print(out.shape)
