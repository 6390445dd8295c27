"""A recommender's step in jax-tpu-embedding: lookup on SparseCores, a tower on TensorCores, and the tables' update."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax_tpu_embedding.sparsecore.lib.nn import embedding, embedding_spec
from jax_tpu_embedding.sparsecore.utils import utils

ROWS, WIDTH, HIDDEN, BATCH = 2**20, 128, 1024, 16384
FEATURES = ("item", "category")
devices = jax.devices()
mesh = jax.sharding.Mesh(np.array(devices), ("x",))
tables = {
    name: embedding_spec.TableSpec(
        vocabulary_size=ROWS,
        embedding_dim=WIDTH,
        initializer=jax.nn.initializers.normal(0.02),
        optimizer=embedding_spec.AdagradOptimizerSpec(learning_rate=0.01),
        combiner="sum",
        name=name,
        max_ids_per_partition=1024,
        max_unique_ids_per_partition=1024,
    )
    for name in FEATURES
}
features = {
    name: embedding_spec.FeatureSpec(table_spec=table, input_shape=(BATCH, 1), output_shape=(BATCH, WIDTH), name=name)
    for name, table in tables.items()
}
embedding.prepare_feature_specs_for_training(features, global_device_count=mesh.size)
rows = NamedSharding(mesh, P("x", None))
variables = embedding.init_embedding_variables(jax.random.key(0), tables, rows)
layout = utils.embedding_table_format(mesh, rows.spec)
keys = jax.random.split(jax.random.key(1), 3)
tower = {
    "up": jax.random.normal(keys[0], (len(FEATURES) * WIDTH, HIDDEN)) * 0.06,
    "mix": jax.random.normal(keys[1], (HIDDEN, HIDDEN)) * 0.03,
    "out": jax.random.normal(keys[2], (HIDDEN, 1)) * 0.03,
}


def loss(tower, activations, labels):
    x = jnp.concatenate([activations[name].reshape(BATCH, WIDTH) for name in FEATURES], axis=1)
    x = jax.nn.relu(x @ tower["up"])
    x = jax.nn.relu(x @ tower["mix"])
    logits = (x @ tower["out"])[:, 0]
    return jnp.mean(jnp.logaddexp(0.0, logits) - labels * logits)


split = partial(jax.shard_map, mesh=mesh, check_vma=False)


@partial(jax.jit, donate_argnums=(1,), out_shardings=(None, layout, None))
def step(tower, variables, inputs, labels):
    lookup = partial(embedding.tpu_sparse_dense_matmul, global_device_count=mesh.size, feature_specs=features)
    activations = split(lookup, in_specs=(P("x"), P("x", None)), out_specs=P("x"))(inputs, variables)
    value, (slopes, of_rows) = jax.value_and_grad(loss, argnums=(0, 1))(tower, activations, labels)
    tower = jax.tree.map(lambda weight, slope: weight - 0.01 * slope, tower, slopes)
    update = partial(embedding.tpu_sparse_dense_matmul_grad, feature_specs=features)
    specs = (P("x"), P("x"), P("x", None))
    variables = split(update, in_specs=specs, out_specs=P("x", None))(of_rows, inputs, variables)
    return tower, variables, value


drawn = np.random.default_rng(0)
for _ in range(10):
    ids = {name: drawn.integers(0, ROWS, (BATCH, 1), dtype=np.int32) for name in FEATURES}
    inputs, _ = embedding.preprocess_sparse_dense_matmul_input(ids, None, features, mesh.size, mesh.size)
    inputs = jax.device_put(inputs, NamedSharding(mesh, P("x")))
    labels = jax.device_put(drawn.integers(0, 2, BATCH).astype(np.float32), NamedSharding(mesh, P("x")))
    tower, variables, value = step(tower, variables, inputs, labels)
print(value)
