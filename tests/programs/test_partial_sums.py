"""Matmuls over a split dim: each device multiplies its own part, whatever XLA:TPU takes to be cheaper."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P, lax
from jax.sharding import AxisType, NamedSharding, reshard

from rooftop.arrays import Mesh
from rooftop.hardware import Slice
from rooftop.programs.sharding import partial_sums

TOKENS, D = 1024, 4096


def product(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x[B, T, D] weight[D, D], both split over tensor along the dim that is summed, scattered over T."""
    batch = jax.typeof(x).sharding.spec.partitions[0]
    dot = partial(lax.dot_general, dimension_numbers=(((2,), (0,)), ((), ())))
    y = partial_sums(dot, P(batch, None, None, unreduced={"tensor"}), x, reshard(weight, P("tensor", None)))
    return reshard(y, P(batch, "tensor", None))


def arrays(mesh: jax.sharding.Mesh, tokens: int, d: int, dtype: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
    split = {"x": P(("fsdp", "expert"), None, "tensor"), "weight": P(("tensor", "fsdp"), None)}
    shapes = {"x": (8, tokens, d), "weight": (d, d)}
    return tuple(
        jax.ShapeDtypeStruct(shapes[name], dtype, sharding=NamedSharding(mesh, spec)) for name, spec in split.items()
    )


def lower(mesh: jax.sharding.Mesh, arguments: Mapping[str, Any]) -> jax.stages.Lowered:
    with jax.set_mesh(mesh):
        return jax.jit(product).lower(*arrays(mesh, TOKENS, D, jnp.bfloat16))


@pytest.mark.oracle
def test_no_operand_is_gathered_over_the_axes_of_a_sum() -> None:
    """Of the plain ``dot_general`` libtpu 0.0.42.1 gathers both operands here, and adds up two whole products."""
    pytest.importorskip("libtpu", reason="libtpu is not installed")
    from rooftop.compiler.compiling import CompileRequest, compile_ahead_of_time

    mesh = Mesh.from_layout(Slice.parse("tpu7x:2x2x2"), "fsdp=x+core,expert=y,tensor=z")
    text = compile_ahead_of_time(CompileRequest(mesh=mesh, program=f"{__name__}:lower")).hlo_text
    steps = re.findall(r"= \w+\[([\d,]+)\]\S* (all-gather|reduce-scatter|convolution)\(", text)
    assert {kind: shape for shape, kind in steps} == {
        "all-gather": f"{D // 2},{D}",
        "convolution": f"{TOKENS},{D}",
        "reduce-scatter": f"{TOKENS // 2},{D}",
    }
    assert len(steps) == 3


def test_partial_sums_are_those_of_the_matmul() -> None:
    shape, names = (2, 2, 2), ("fsdp", "expert", "tensor")
    mesh = jax.make_mesh(shape, names, axis_types=(AxisType.Explicit,) * 3)
    generator = np.random.default_rng(0)
    with jax.set_mesh(mesh):
        places = arrays(mesh, 4, 16, jnp.float32)
        x, weight = (generator.normal(size=place.shape).astype(np.float32) for place in places)
        placed = [jax.device_put(array, place.sharding) for array, place in zip((x, weight), places, strict=True)]
        y, pull = jax.vjp(product, *placed)
        dx, dw = pull(y)
    assert jax.typeof(y).sharding.spec == P(("fsdp", "expert"), "tensor", None)
    np.testing.assert_allclose(y, x @ weight, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(dx, (x @ weight) @ weight.T, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(dw, np.einsum("btd,bte->de", x, x @ weight), rtol=1e-4, atol=1e-4)
