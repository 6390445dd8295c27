"""One process of several that work on checkpoints together: PROCESS OF PORT FOLDER, then what to do, one or more of:

``save STEP`` and ``restore`` a small state; the first process prints what was restored, as JSON. ``copy``: read the
published checkpoint FOLDER/in in float32 over
eight devices and write it to FOLDER/out, with its own dtypes and config, and to FOLDER/plain, without.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np

SHAPES = {"rows": (16, 6), "columns": (6, 16), "both": (8, 8), "step": ()}


def values(step: int) -> dict[str, np.ndarray]:
    """The state of a step, in float32."""
    draw = np.random.default_rng(step)
    return {name: np.asarray(draw.normal(size=shape), np.float32) for name, shape in SHAPES.items()}


def main() -> None:
    process, processes, port = map(int, sys.argv[1:4])
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={8 // processes}"
    import jax
    from jax import P
    from jax.sharding import NamedSharding

    from rooftop.runs.checkpoints import Checkpoints

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", processes, process)
    # Devices of different processes side by side along both axes.
    devices = np.array(jax.devices()).reshape(2, 4).T.reshape(2, 4)
    mesh = jax.sharding.Mesh(devices, ("a", "b"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    specs = {"rows": P(("a", "b")), "columns": P(None, "b"), "both": P("b", "a"), "step": P()}
    places = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
    folder = Path(sys.argv[4])
    if sys.argv[5:] == ["copy"]:
        copy(folder)
        return
    checkpoints = Checkpoints(folder, keep=2)
    todo = iter(sys.argv[5:])
    with jax.set_mesh(mesh):
        for verb in todo:
            if verb == "save":
                step = int(next(todo))
                state = {
                    name: jax.make_array_from_callback(
                        array.shape, places[name], lambda index, array=array: array[index]
                    )
                    for name, array in values(step).items()
                }
                checkpoints.save(step, state, {"seed": step})
                checkpoints.wait()
                assert step in checkpoints.steps()
            else:
                abstract = {
                    name: jax.ShapeDtypeStruct(shape, np.float32, sharding=places[name])
                    for name, shape in SHAPES.items()
                }
                restored = checkpoints.restore(abstract)
                expected = values(restored.step)
                for name, array in restored.state.items():
                    assert array.sharding == places[name]
                    for shard in array.addressable_shards:
                        assert np.array_equal(np.asarray(shard.data), expected[name][shard.index])
                if process == 0:
                    print(json.dumps({"step": restored.step, "extra": restored.extra, "refused": restored.refused}))
    checkpoints.close()


def copy(folder: Path) -> None:
    """Experts over processes, so that each reads its own."""
    import jax
    import jax.numpy as jnp

    from rooftop.arrays import AXES
    from rooftop.arrays.rules import Rules
    from rooftop.checkpoints.huggingface import load_weights, save_weights
    from rooftop.models import from_huggingface
    from rooftop.programs.parameters import abstract, describe
    from rooftop.programs.sharding import Specs

    sizes = {"fsdp": 2, "tensor": 2, "expert": 2}
    devices = np.array(jax.devices()).reshape([sizes.get(axis, 1) for axis in AXES])
    mesh = jax.sharding.Mesh(devices, AXES, axis_types=(jax.sharding.AxisType.Explicit,) * len(AXES))
    model = from_huggingface(folder / "in")
    with jax.set_mesh(mesh):
        weights = load_weights(
            folder / "in", model, abstract(describe(model), mesh, Specs(Rules().only(sizes)), jnp.float32)
        )
        save_weights(folder / "out", model, weights, source=folder / "in", shard_bytes=50_000)
        save_weights(folder / "plain", model, weights)


if __name__ == "__main__":
    main()
