"""Collective matmuls equal the plain einsum on emulated devices, gradients too, and XLA:TPU overlaps what travels."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P

from bench.compiler.block import lower, overlapped_mlp
from rooftop.arrays import Mesh
from rooftop.compiler.compiling import Compiled, CompileRequest, compile_ahead_of_time
from rooftop.compiler.machine.schedule import timeline
from rooftop.core.errors import RooftopError
from rooftop.hardware import Slice
from rooftop.programs.einsum.collective_matmul import all_gather_einsum, einsum_all_reduce, einsum_reduce_scatter

Operation = Callable[..., jax.Array]
gather_left, gather_right = (partial(all_gather_einsum, gathered=operand) for operand in (0, 1))

#: Operation, spec, dim, and the letter that the axis splits in both operands and in the output ("" for none).
CASES: Mapping[str, tuple[Operation, str, str, tuple[str, str, str]]] = {
    "gather a contracted dim": (gather_left, "bd,df->bf", "d", ("d", "f", "f")),
    "gather for copies of the output": (gather_left, "bd,df->bf", "d", ("d", "", "")),
    "gather rows": (gather_left, "bd,df->bf", "b", ("b", "f", "f")),
    "gather the right operand": (gather_right, "bd,df->bf", "d", ("b", "d", "b")),
    "gather columns": (gather_right, "bd,df->bf", "f", ("b", "f", "b")),
    "gather a batch dim": (gather_left, "ebd,edf->ebf", "e", ("e", "f", "f")),
    "gather under a batch dim": (gather_right, "ebd,edf->ebf", "d", ("b", "d", "b")),
    "gather a vector": (gather_left, "d,df->f", "d", ("d", "f", "f")),
    "scatter columns": (einsum_reduce_scatter, "bd,df->bf", "f", ("d", "d", "f")),
    "scatter rows": (einsum_reduce_scatter, "bd,df->bf", "b", ("d", "d", "b")),
    "scatter a batch dim": (einsum_reduce_scatter, "ebd,edf->ebf", "e", ("d", "d", "e")),
    "scatter under a batch dim": (einsum_reduce_scatter, "ebd,edf->ebf", "f", ("d", "d", "f")),
    "scatter a vector": (einsum_reduce_scatter, "d,df->f", "f", ("d", "d", "f")),
    "all-reduce columns": (einsum_all_reduce, "bd,df->bf", "f", ("d", "d", "")),
    "all-reduce under a batch dim": (einsum_all_reduce, "ebd,edf->ebf", "b", ("d", "d", "")),
}


def mesh_of(**sizes: int) -> jax.sharding.Mesh:
    devices = np.array(jax.devices()[: math.prod(sizes.values())]).reshape(tuple(sizes.values()))
    return jax.sharding.Mesh(devices, tuple(sizes), axis_types=(jax.sharding.AxisType.Explicit,) * len(sizes))


def mapped(name: str, mesh: jax.sharding.Mesh, axis: Any = "Y", **options: Any) -> Operation:
    """A case as a function of whole arrays."""
    operation, spec, dim, splits = CASES[name]
    letters = re.split(",|->", spec)
    left, right, out = (
        P(*(axis if letter == split else None for letter in term)) for term, split in zip(letters, splits, strict=True)
    )
    function = partial(operation, spec, axis=axis, dim=dim, **options)
    # Where the output is the same everywhere along the axis, a permute's type cannot say so, and is not checked.
    local = jax.shard_map(function, mesh=mesh, in_specs=(left, right), out_specs=out, check_vma=bool(splits[2]))

    def run(a: jax.Array, b: jax.Array) -> jax.Array:
        a, b = (jax.device_put(x, jax.NamedSharding(mesh, spec)) for x, spec in ((a, left), (b, right)))
        return jax.jit(local)(a, b)

    return run


def operands(name: str, devices: int, dtype: Any = jnp.float32) -> tuple[jax.Array, jax.Array]:
    """Small whole numbers, whose sums are exact in float32. The sizes differ, and the halves of odd shards too."""
    size = {"e": devices, "b": 3 * devices, "d": 5 * devices, "f": 7 * devices}
    left, right = CASES[name][1].split("->")[0].split(",")
    return integers(0, *(size[x] for x in left), dtype=dtype), integers(1, *(size[x] for x in right), dtype=dtype)


def integers(seed: int, *shape: int, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).integers(-4, 5, shape), dtype)


@pytest.mark.parametrize(
    ("name", "devices", "bidirectional"),
    [
        pytest.param(name, *ring, marks=() if quick else pytest.mark.slow)
        for place, name in enumerate(CASES)
        for ring in ((2, True), (3, False), (4, True), *((n, way) for n in (1, 5, 8) for way in (False, True)))
        # Quick: odd and even rings by turns. In a ring of two both ways lead to the same device.
        for quick in [
            ring == ((3, False), (4, True))[place % 2]
            or (ring == (2, True) and name in ("gather rows", "scatter columns", "all-reduce columns"))
        ]
    ],
)
def test_equals_the_plain_einsum(name: str, devices: int, bidirectional: bool) -> None:
    """Value and both gradients, exactly."""
    mesh, arrays = mesh_of(Y=devices), operands(name, devices)
    expected, pull = jax.vjp(partial(jnp.einsum, CASES[name][1]), *arrays)
    # JAX shares the derivative of an output that is the same everywhere among its copies.
    derivative = devices * integers(2, *expected.shape)
    with jax.set_mesh(mesh):
        product, pull_back = jax.vjp(mapped(name, mesh, bidirectional=bidirectional), *arrays)
        gradients = pull_back(jax.device_put(derivative, product.sharding))
    for got, right in zip((product, *gradients), (expected, *pull(derivative)), strict=True):
        np.testing.assert_array_equal(got, right)


@pytest.mark.parametrize("name", ["gather a contracted dim", "gather rows", "scatter columns", "all-reduce columns"])
def test_an_axis_of_several(name: str) -> None:
    """The first of them is the major one, as in a PartitionSpec."""
    mesh, arrays = mesh_of(X=2, Y=4), operands(name, 8)
    with jax.set_mesh(mesh):
        np.testing.assert_array_equal(mapped(name, mesh, axis=("Y", "X"))(*arrays), jnp.einsum(CASES[name][1], *arrays))


@pytest.mark.parametrize("name", ["gather a contracted dim", "scatter columns", "all-reduce columns"])
def test_dtypes(name: str) -> None:
    """Sums are float32 on a device; between devices they have the output's dtype, as asked for."""
    mesh, spec = mesh_of(Y=4), CASES[name][1]
    rng = np.random.default_rng(0)
    exact = [jnp.asarray(rng.standard_normal(x.shape), jnp.bfloat16) for x in operands(name, 4)]
    expected = jnp.einsum(spec, *(x.astype(jnp.float32) for x in exact))
    with jax.set_mesh(mesh):
        narrow, wide = mapped(name, mesh)(*exact), mapped(name, mesh, dtype=jnp.float32)(*exact)
        eights = operands(name, 4, jnp.int8)
        whole = mapped(name, mesh, dtype=jnp.int32)(*eights)
    assert (narrow.dtype, wide.dtype, whole.dtype) == (jnp.bfloat16, jnp.float32, jnp.int32)
    np.testing.assert_allclose(wide, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(narrow.astype(jnp.float32), expected, rtol=2e-2, atol=5e-2)
    np.testing.assert_array_equal(whole, jnp.einsum(spec, *(x.astype(jnp.int32) for x in eights)))


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("sizes", [{"X": 2, "Y": 4}, {"X": 1, "Y": 8}, {"X": 1, "Y": 3}])
def test_block_equals_plain_block(sizes: dict[str, int], bidirectional: bool) -> None:
    """A whole MLP, In[B_X, D_Y] to Out[B_X, D_Y]: the weights' gradients are summed over X, where they have copies."""
    mesh, (b, d, f) = mesh_of(**sizes), (12, 48, 96)
    rng = np.random.default_rng(0)
    x, w_in, w_out, target = (
        jnp.asarray(rng.standard_normal(shape) / scale, jnp.float32)
        for shape, scale in (((b, d), 1.0), ((d, f), d**0.5), ((f, d), f**0.5), ((b, d), 1.0))
    )

    def plain(x: jax.Array, w_in: jax.Array, w_out: jax.Array, target: jax.Array) -> jax.Array:
        return jnp.sum((jax.nn.gelu(x @ w_in) @ w_out - target) ** 2)

    specs = (P("X", "Y"), P(None, "Y"), P("Y", None))
    local = partial(overlapped_mlp, axis="Y", bidirectional=bidirectional, activation="gelu")
    block = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=specs[0])

    def loss(x: jax.Array, w_in: jax.Array, w_out: jax.Array, target: jax.Array) -> jax.Array:
        return jnp.sum((block(x, w_in, w_out) - target) ** 2)

    expected, expected_gradients = jax.value_and_grad(plain, argnums=(0, 1, 2))(x, w_in, w_out, target)
    placed = [
        jax.device_put(array, jax.NamedSharding(mesh, spec))
        for array, spec in zip((x, w_in, w_out, target), (*specs, specs[0]), strict=True)
    ]
    with jax.set_mesh(mesh):
        step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2))).lower(*placed).compile()
        value, gradients = step(*placed)
        text = step.as_text()
    assert value == pytest.approx(float(expected), rel=1e-5)
    for got, correct in zip(gradients, expected_gradients, strict=True):
        np.testing.assert_allclose(got, correct, rtol=1e-4, atol=1e-4)
    # Forward and backward, nothing is gathered or scattered but by permutes; only the loss and copies are all-reduced.
    assert "collective-permute" in text
    assert not re.search(r"all-gather|reduce-scatter|all-to-all", text)


@pytest.mark.parametrize(
    ("operation", "spec", "dim", "shapes", "field"),
    [
        (gather_left, "bd,df->bf", "f", ((4, 4), (16, 4)), "dim"),
        (gather_left, "bd,df->bf", "x", ((4, 4), (16, 4)), "dim"),
        (gather_left, "bd,df->bf", "d", ((4, 4), (12, 4)), "size of d"),
        (gather_left, "bd,df->bf", "d", ((4, 4, 4), (16, 4)), "operand bd"),
        (gather_left, "bd,df", "d", ((4, 4), (16, 4)), "spec"),
        (gather_left, "bd,df->f", "d", ((4, 4), (16, 4)), "spec"),
        (gather_left, "bb,bd->d", "d", ((4, 4), (4, 4)), "spec"),
        (einsum_reduce_scatter, "bd,df->bf", "d", ((4, 4), (4, 4)), "dim"),
        (einsum_reduce_scatter, "bd,df->bf", "f", ((4, 4), (4, 6)), "size of f"),
        (einsum_all_reduce, "bd,df->bf", "f", ((4, 4), (5, 8)), "size of d"),
    ],
)
def test_what_does_not_fit_is_refused(
    operation: Operation, spec: str, dim: str, shapes: tuple[tuple[int, ...], ...], field: str
) -> None:
    function = partial(operation, spec, axis="Y", dim=dim)
    local = jax.shard_map(function, mesh=mesh_of(Y=4), in_specs=(P(), P()), out_specs=P("Y"))
    with pytest.raises(RooftopError) as refused:
        jax.eval_shape(local, *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))
    assert refused.value.field == field


# ---- what XLA:TPU makes of it ----------------------------------------------------------------------------------------


def compile_block(**arguments: Any) -> Compiled:
    mesh = Mesh.from_layout(Slice.parse("v5e:4x4"), "X=x,Y=y")
    fields = {"B": 8192, "D": 8192, "F": 32768, "bidirectional": False} | arguments
    request = CompileRequest(mesh=mesh, program="bench.compiler.block:lower", arguments=fields)
    return compile_ahead_of_time(request, timeout_s=1200)


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"bidirectional": True}, marks=pytest.mark.slow),
        pytest.param({"activation": "gelu"}, marks=pytest.mark.slow),
        pytest.param({"backward": True}, marks=pytest.mark.slow),
    ],
)
def test_nothing_is_exposed(arguments: dict[str, Any]) -> None:
    """Every hop goes on beside a matmul; there is no other communication."""
    compiled = compile_block(**arguments)
    schedule = timeline(compiled.module, compiled.mesh, estimates="xla")
    kinds = sorted(entry.collective.ledger_entry.kind for entry in schedule.collectives)
    assert set(kinds) == {"all_gather", "reduce_scatter"}
    assert schedule.exposed_s == 0
    assert not re.search(r" (all-gather|reduce-scatter|all-reduce|all-to-all)\(", compiled.hlo_text)


@pytest.mark.slow
@pytest.mark.parametrize("estimates", ["rooftop", "xla"])
def test_overlapped_block_is_nearly_free_of_communication(estimates: str) -> None:
    """Within a tenth of the block that does not communicate, and faster than XLA's own."""
    total = {}
    for version in ("overlapped", "unreduced", "default"):
        compiled = compile_block(version=version)
        total[version] = timeline(compiled.module, compiled.mesh, estimates=estimates).total_s
    assert total["unreduced"] < total["overlapped"] < 1.1 * total["unreduced"]
    assert total["overlapped"] < 0.9 * total["default"]


@pytest.mark.parametrize(
    ("arguments", "batch_axis", "field"),
    [
        ({"version": "overlaped"}, "X", "version"),
        ({"activation": "tanh"}, "X", "activation"),
        ({"speed": 11}, "X", "block program"),
        ({"F": 30}, "X", "F"),
        ({}, "data", "mesh"),
    ],
)
def test_block_programs_that_are_refused(arguments: dict[str, Any], batch_axis: str, field: str) -> None:
    with pytest.raises(RooftopError) as refused:
        lower(mesh_of(**{batch_axis: 2, "Y": 4}), {"B": 8, "D": 8, "F": 16} | arguments)
    assert refused.value.field == field
