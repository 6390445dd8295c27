"""Matmuls on shards: each device multiplies its own part, whatever XLA:TPU takes to be cheaper."""

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
from rooftop.arrays.rules import Rules
from rooftop.hardware import Slice
from rooftop.programs.model.operations import project, project_heads
from rooftop.programs.sharding import Specs, gather, partial_sums, regroups_weight, split_sequence

TOKENS, D = 1024, 4096
#: Axes of a mesh whose expert axis is larger than fsdp, and by which the batch is split in the other order.
INVERTED = ("fsdp", "expert", "tensor")
SPECS = Specs(Rules().only(dict.fromkeys(INVERTED, 1)))


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
    assert {kind: shape.removeprefix("1,") for shape, kind in steps} == {
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


def projections(x: jax.Array, heads: jax.Array, columns: jax.Array) -> tuple[jax.Array, jax.Array]:
    """x, gathered over tensor, times a weight [D, N, H] and a weight [D, F], each gathered over fsdp."""
    h = split_sequence(x, SPECS.inputs(reduced="heads"))
    into_heads = gather(heads, SPECS, "embed", "heads", None, rows=x.shape[-1])
    into_columns = gather(columns, SPECS, "embed", "mlp", rows=x.shape[-1])
    return project_heads(h, into_heads), project(h, into_columns)


def operands(mesh: jax.sharding.Mesh, tokens: int, d: int, heads: int, dtype: Any) -> dict[str, jax.ShapeDtypeStruct]:
    batch = mesh.shape["fsdp"] * mesh.shape["expert"]
    shapes = {
        "x": ((batch, tokens, d), SPECS.residual),
        "heads": ((d, heads, d // heads), SPECS.at_rest("embed", "heads", None)),
        "columns": ((d, d), SPECS.at_rest("embed", "mlp")),
        "dq": ((batch, tokens, heads, d // heads), SPECS.activation("batch", "seq", "heads", None)),
        "dh": ((batch, tokens, d), SPECS.activation("batch", "seq", "mlp")),
    }
    return {
        name: jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
        for name, (shape, spec) in shapes.items()
    }


def gradients(
    x: jax.Array, heads: jax.Array, columns: jax.Array, dq: jax.Array, dh: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    dx, d_heads, d_columns = jax.vjp(projections, x, heads, columns)[1]((dq, dh))
    return dx, d_heads, d_columns


def lower_gradients(mesh: jax.sharding.Mesh, arguments: Mapping[str, Any]) -> jax.stages.Lowered:
    with jax.set_mesh(mesh):
        return jax.jit(gradients).lower(**operands(mesh, TOKENS, 2048, 16, jnp.bfloat16))


@pytest.mark.oracle
def test_weights_are_gathered_over_fsdp_for_the_gradient_of_an_input() -> None:
    """With JAX's own derivative libtpu 0.0.42.1 permutes the shards and gathers them over half of expert."""
    pytest.importorskip("libtpu", reason="libtpu is not installed")
    from rooftop.compiler.compiling import CompileRequest, compile_ahead_of_time
    from rooftop.explain.compiled.report import CompiledReport

    mesh = Mesh.from_layout(Slice.parse("tpu7x:2x2x2"), "fsdp=x,expert=y+z,tensor=core")
    compiled = compile_ahead_of_time(CompileRequest(mesh=mesh, program=f"{__name__}:lower_gradients"))
    moved = [
        (collective.kind, collective.axes)
        for row in CompiledReport(plan=None, compiled=compiled).ledger
        for collective in row.collectives
    ]
    assert set(moved) == {
        ("all_gather", ("tensor",)),
        ("reduce_scatter", ("tensor",)),
        ("all_gather", ("fsdp",)),
        ("reduce_scatter", ("fsdp",)),
    }


def test_gradients_on_shards_are_those_of_the_matmuls() -> None:
    mesh = jax.make_mesh((2, 2, 2), INVERTED, axis_types=(AxisType.Explicit,) * 3)
    generator = np.random.default_rng(0)
    with jax.set_mesh(mesh):
        places = operands(mesh, 4, 16, 4, jnp.float32)
        values = {name: generator.normal(size=place.shape).astype(np.float32) for name, place in places.items()}
        placed = {name: jax.device_put(value, places[name].sharding) for name, value in values.items()}
        assert regroups_weight(split_sequence(placed["x"], SPECS.inputs(reduced="heads")))
        results = jax.jit(gradients)(**placed)
        dx, d_heads, d_columns = (reshard(dw, P(*jax.typeof(dw).sharding.spec.partitions)) for dw in results)
    x, heads, columns, dq, dh = values.values()
    np.testing.assert_allclose(dx, np.einsum("btnh,dnh->btd", dq, heads) + dh @ columns.T, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(d_heads, np.einsum("btd,btnh->dnh", x, dq), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(d_columns, np.einsum("btd,btf->df", x, dh), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("sizes", "regrouped"), [((4, 2, 1), False), ((2, 4, 1), False), ((4, 2, 2), False), ((2, 4, 2), True)]
)
def test_only_a_batch_in_another_order_than_the_mesh_is_regrouped(sizes: tuple[int, ...], regrouped: bool) -> None:
    mesh = jax.sharding.AbstractMesh(sizes, INVERTED, axis_types=(AxisType.Explicit,) * 3)
    x = jax.ShapeDtypeStruct((16, 4, 16), jnp.float32, sharding=NamedSharding(mesh, SPECS.inputs(reduced="heads")))
    with jax.sharding.use_abstract_mesh(mesh):
        answers: list[bool] = []
        jax.eval_shape(lambda x: answers.append(regroups_weight(x)), x)
    assert answers == [regrouped]
