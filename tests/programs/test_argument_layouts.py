"""The gradient of a lookup comes in rows; the update runs in the layout that the table is stored in."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P
from jax.sharding import AxisType, NamedSharding

from rooftop.arrays import Mesh
from rooftop.hardware import Slice
from rooftop.programs.sharding import laid_out_as_argument

#: Shards of 360 columns, which pad least with rows in the lanes of registers.
ROWS, COLUMNS, FSDP = 8192, 1440, 4


def update(table: jax.Array, moment: jax.Array, ids: jax.Array, *, laid_out: bool) -> tuple[jax.Array, jax.Array]:
    """A step of momentum on a table whose rows ``ids`` are looked up."""

    def loss(table: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(table.at[ids].get(out_sharding=P(None, None, "fsdp"))).astype(jnp.float32))

    gradient = jax.grad(loss)(table.astype(jnp.bfloat16))
    gradient = laid_out_as_argument(gradient, "f32") if laid_out else gradient
    moment = 0.9 * moment + gradient.astype(jnp.float32)
    return table - 0.1 * moment, moment


def arrays(mesh: jax.sharding.Mesh, columns: int = COLUMNS) -> tuple[jax.ShapeDtypeStruct, ...]:
    table = jax.ShapeDtypeStruct((ROWS, columns), jnp.float32, sharding=NamedSharding(mesh, P(None, "fsdp")))
    return table, table, jax.ShapeDtypeStruct((8, 256), jnp.int32, sharding=NamedSharding(mesh, P()))


def lower(mesh: jax.sharding.Mesh, arguments: Mapping[str, Any]) -> jax.stages.Lowered:
    laid_out, columns = arguments["laid_out"], arguments.get("columns", COLUMNS)
    with jax.set_mesh(mesh):
        return jax.jit(partial(update, laid_out=laid_out), donate_argnums=(0, 1)).lower(*arrays(mesh, columns))


@pytest.mark.oracle
def test_only_the_gradient_is_copied_into_another_layout() -> None:
    """Without it libtpu 0.0.42.1 copies the float32 table and its moment into rows, and back."""
    pytest.importorskip("libtpu", reason="libtpu is not installed")
    from rooftop.compiler.compiling import CompileRequest, compile_ahead_of_time

    mesh = Mesh.from_layout(Slice.parse("v5p:2x2x1"), "fsdp=x+y")
    copies = {}
    for laid_out in (False, True):
        request = CompileRequest(mesh=mesh, program=f"{__name__}:lower", arguments={"laid_out": laid_out})
        text = compile_ahead_of_time(request).hlo_text
        entry = text[text.index("\nENTRY ") :]
        copies[laid_out] = re.findall(rf"= (\w+)\[{ROWS},{COLUMNS // FSDP}\]\S* copy\(", entry)
    assert copies[False].count("f32") == 4
    assert copies[True].count("f32") == 0


@pytest.mark.oracle
def test_a_gradient_that_is_split_over_many_devices_is_not_gathered() -> None:
    """libtpu 0.0.42.1 gathers the operand of a layout constraint outside of a ``shard_map``, and cuts it again."""
    pytest.importorskip("libtpu", reason="libtpu is not installed")
    from rooftop.compiler.compiling import CompileRequest, compile_ahead_of_time

    mesh = Mesh.from_layout(Slice.parse("v5p:4x4x4"), "fsdp=x+y+z")
    request = CompileRequest(mesh=mesh, program=f"{__name__}:lower", arguments={"laid_out": True, "columns": 128})
    text = compile_ahead_of_time(request).hlo_text
    assert not re.findall(r" (?:all-gather|all-reduce|reduce-scatter)\(", text)


def test_an_array_keeps_its_values_and_its_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the layout imposed on a CPU too, where programs leave arrays as they are."""
    mesh = jax.make_mesh((FSDP,), ("fsdp",), axis_types=(AxisType.Explicit,))
    generator = np.random.default_rng(0)
    table, moment = (generator.normal(size=(ROWS, COLUMNS)).astype(np.float32) for _ in range(2))
    ids = generator.integers(0, ROWS, (8, 256))
    with jax.set_mesh(mesh):
        places = arrays(mesh)
        results = []
        for laid_out in (False, True):
            with monkeypatch.context() as patch:
                patch.setattr(jax.lax, "platform_dependent", lambda array, tpu, default: tpu(array))
                lowered = lower(mesh, {"laid_out": laid_out})
            assert ("LayoutConstraint" in lowered.as_text()) == laid_out
            placed = [jax.device_put(x, place.sharding) for x, place in zip((table, moment, ids), places, strict=True)]
            results.append(lowered.compile()(*placed))
        assert "LayoutConstraint" not in lower(mesh, {"laid_out": True}).as_text()
    for plain, turned in zip(*results, strict=True):
        assert turned.sharding.spec == P(None, "fsdp")
        np.testing.assert_array_equal(plain, turned)


def test_an_array_that_is_stored_in_rows_is_unchanged() -> None:
    mesh = jax.make_mesh((FSDP,), ("fsdp",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        rows = jax.device_put(np.zeros((16, 512), np.float32), NamedSharding(mesh, P(None, "fsdp")))
        assert laid_out_as_argument(rows, "f32") is rows
