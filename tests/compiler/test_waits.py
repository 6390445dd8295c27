"""The collectives in which a compiled program can wait: those of its text over the axes that processes share."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from rooftop.compiler.collectives.waits import axes_over_processes, collectives_over, waiting_line


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return jax.make_mesh((2, 2), ("data", "tensor"), devices=jax.devices()[:4])


@pytest.fixture(scope="module")
def text(mesh: Mesh) -> str:
    """A program with one sum over data, and a sum and a gather over tensor."""

    @partial(jax.shard_map, mesh=mesh, in_specs=P("data", "tensor"), out_specs=P("data", "tensor"))
    def program(x: jax.Array) -> jax.Array:
        with jax.named_scope("gradients"):
            total = lax.psum(x, "data")
        with jax.named_scope("layers/attn/core"):
            part = lax.psum(x * 2, "tensor")
        with jax.named_scope("layers/mlp/up"):
            whole = lax.all_gather(jnp.tanh(x), "tensor", axis=1, tiled=True)
        return total + part + whole[:, : x.shape[1]] * jnp.sum(whole)

    x = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=NamedSharding(mesh, P("data", "tensor")))
    return jax.jit(program).lower(x).compile().as_text() or ""


def test_collectives_over_an_axis_are_those_that_the_program_names(text: str, mesh: Mesh) -> None:
    sizes = dict(mesh.shape)
    assert [one.kind for one in collectives_over(text, sizes, ["data"])] == ["all_reduce"]
    assert sorted(one.kind for one in collectives_over(text, sizes, ["tensor"])) == ["all_gather", "all_reduce"]
    assert waiting_line(text, sizes, ["data"]) == "its all_reduce over data of gradients"
    line = waiting_line(text, sizes, ["data", "tensor"])
    assert line.startswith("one of its 3 collectives over processes: ")
    assert set(line.partition(": ")[2].split("; ")) == {
        "1 all_reduce over data of gradients",
        "1 all_reduce over tensor of layers/attn/core",
        "1 all_gather over tensor of layers/mlp/up",
    }


def test_a_program_without_such_collectives_and_one_that_cannot_be_read(text: str) -> None:
    assert waiting_line(text, {"data": 2, "tensor": 2}, []) == "a program that has no collective over "
    assert waiting_line("no HLO", {"data": 2}, ["data"]).startswith("a program whose collectives cannot be read")


class Device:
    """A device of a process."""

    def __init__(self, process: int) -> None:
        self.process_index = process


def test_axes_over_processes_are_those_along_which_devices_change_their_process(mesh: Mesh) -> None:
    assert axes_over_processes(mesh) == ("data", "tensor")

    class Several:
        devices = np.array([[Device(0), Device(0)], [Device(1), Device(1)]])
        axis_names = ("data", "tensor")

    assert axes_over_processes(Several()) == ("data",)  # type: ignore[arg-type]
