"""The two matmuls of a Transformer's MLP, In[B_X, D_Y] Win[D, F_Y] Wout[F_Y, D] -> Out[B_X, D_Y], in three versions.

They do the same FLOPs, and differ in the gather of In over Y and the scatter of Out over Y (book chapter 10):

- ``overlapped``: two collective matmuls, an AllGather's and a ReduceScatter's;
- ``default``: XLA's choice, given the shardings of both matmuls' results;
- ``unreduced``: no collectives. In is already gathered, [B_X, D], and Out stays unreduced, [B_X, D]{U_Y}. This is the
  lower bound on time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import P, named_scope
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Float

from rooftop.core.errors import RooftopError, unknown
from rooftop.programs.einsum.collective_matmul import Axis, all_gather_einsum, einsum_reduce_scatter

_ACTIVATIONS: Mapping[str, Callable[[jax.Array], jax.Array]] = {
    "none": lambda x: x,
    "gelu": jax.nn.gelu,
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
}


def overlapped_mlp(
    x: Float[Array, "B D_Y"],
    w_in: Float[Array, "D F_Y"],
    w_out: Float[Array, "F_Y D"],
    *,
    axis: Axis,
    bidirectional: bool = True,
    activation: str = "none",
) -> Float[Array, "B D_Y"]:
    """The MLP on local shards, inside ``jax.shard_map``: ``axis`` is Y."""
    with named_scope("layers/mlp/up"):
        h = all_gather_einsum("bd,df->bf", x, w_in, axis=axis, dim="d", bidirectional=bidirectional)
    with named_scope("layers/mlp/act"):
        h = _ACTIVATIONS[activation](h)
    with named_scope("layers/mlp/down"):
        return einsum_reduce_scatter("bf,fd->bd", h, w_out, axis=axis, dim="d", bidirectional=bidirectional)


@dataclass(frozen=True, kw_only=True)
class BlockProgram:
    """All options of the block but the mesh: sizes B, D and F of whole arrays in bf16, version and activation.

    With ``backward`` it also takes a derivative of Out, and returns those of In, Win and Wout. Derivatives of the
    weights stay partial sums over X, except in ``default``, where XLA sums them.
    """

    B: int
    D: int
    F: int
    version: str = "overlapped"
    bidirectional: bool = True
    activation: str = "none"
    backward: bool = False

    def __post_init__(self) -> None:
        if self.version not in _VERSIONS:
            raise unknown("version", self.version, _VERSIONS)
        if self.activation not in _ACTIVATIONS:
            raise unknown("activation", self.activation, _ACTIVATIONS)


def lower(mesh: Mesh, arguments: Mapping[str, Any]) -> jax.stages.Lowered:
    """The block lowered for ``mesh``, whose devices may be remote; ``arguments`` are a BlockProgram's fields.

    Raises RooftopError for unknown fields, a mesh without axes X and Y, or sizes that do not divide over it.
    """
    try:
        program = BlockProgram(**arguments)
    except TypeError as error:
        raise RooftopError("block program", sorted(arguments), f"the fields of a BlockProgram ({error})") from None
    if set(mesh.shape) != {"X", "Y"}:
        raise RooftopError("mesh", ",".join(mesh.shape), "axes X and Y")
    for dim, size in (("B", program.B), ("D", program.D), ("F", program.F)):
        ways = mesh.shape["X" if dim == "B" else "Y"]
        if size % ways:
            raise RooftopError(dim, size, f"a multiple of {ways}, the size of its mesh axis")
    function, specs = _VERSIONS[program.version](program, mesh)
    b, d, f = program.B, program.D, program.F
    shapes = ((b, d), (d, f), (f, d), (b, d)) if program.backward else ((b, d), (d, f), (f, d))
    with jax.set_mesh(mesh):
        return jax.jit(function).lower(
            *(
                jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
                for shape, spec in zip(shapes, specs, strict=False)
            )
        )


_Block = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
_Lowerable = tuple[Callable[..., Any], tuple[P, ...]]
_WEIGHTS = P(None, "Y"), P("Y", None)


def _overlapped(program: BlockProgram, mesh: Mesh) -> _Lowerable:
    block = partial(overlapped_mlp, axis="Y", bidirectional=program.bidirectional, activation=program.activation)
    return _per_device(program, mesh, block, P("X", "Y"), P("X", "Y"))


def _unreduced(program: BlockProgram, mesh: Mesh) -> _Lowerable:
    def block(x: Float[Array, "B D"], w_in: Float[Array, "D F_Y"], w_out: Float[Array, "F_Y D"]) -> Float[Array, "B D"]:
        with named_scope("layers/mlp/up"):
            h = jnp.einsum("bd,df->bf", x, w_in)
        with named_scope("layers/mlp/act"):
            h = _ACTIVATIONS[program.activation](h)
        with named_scope("layers/mlp/down"):
            return jnp.einsum("bf,fd->bd", h, w_out)

    return _per_device(program, mesh, block, P("X", None), P(("X", "Y"), None))


def _default(program: BlockProgram, mesh: Mesh) -> _Lowerable:
    def block(x: Float[Array, "B D"], w_in: Float[Array, "D F"], w_out: Float[Array, "F D"]) -> Float[Array, "B D"]:
        with named_scope("layers/mlp/up"):
            h = jnp.einsum("bd,df->bf", x, w_in, out_sharding=P("X", "Y"))
        with named_scope("layers/mlp/act"):
            h = _ACTIVATIONS[program.activation](h)
        with named_scope("layers/mlp/down"):
            return jnp.einsum("bf,fd->bd", h, w_out, out_sharding=P("X", "Y"))

    def both(
        x: Float[Array, "B D"], w_in: Float[Array, "D F"], w_out: Float[Array, "F D"], derivative: Float[Array, "B D"]
    ) -> Any:
        out, pull = jax.vjp(block, x, w_in, w_out)
        return out, pull(derivative)

    return both if program.backward else block, (P("X", "Y"), *_WEIGHTS, P("X", "Y"))


def _per_device(program: BlockProgram, mesh: Mesh, block: _Block, x: P, out: P) -> _Lowerable:
    """A block of local shards as a function of whole arrays. Partial sums are concatenated along the first dim."""

    def both(*arrays: jax.Array) -> Any:
        # The derivative of a weight that varies over every axis stays partial sums.
        varying = [
            jax.lax.pcast(y, tuple(set(mesh.shape) - jax.typeof(y).manual_axis_type.varying), to="varying")
            for y in arrays
        ]
        result, pull = jax.vjp(block, *varying[:3])
        return result, pull(varying[3])

    specs = (x, *_WEIGHTS)
    if not program.backward:
        return jax.shard_map(block, mesh=mesh, in_specs=specs, out_specs=out), specs
    derivatives = out, P("X", "Y"), P(("X", "Y"), None)
    return jax.shard_map(both, mesh=mesh, in_specs=(*specs, x), out_specs=(out, derivatives)), (*specs, x)


_VERSIONS: Mapping[str, Callable[[BlockProgram, Mesh], _Lowerable]] = {
    "overlapped": _overlapped,
    "default": _default,
    "unreduced": _unreduced,
}
