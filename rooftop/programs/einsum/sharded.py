"""Programs of the algebra: every strategy of an einsum, and every path of a resharding, executed step by step.

An array that is unreduced over mesh axes is passed as its partial sums. They are stacked along leading dims, one for
each of these axes in mesh order, and split over the axes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import Mesh as DeviceMesh
from jax.sharding import PartitionSpec as P

from rooftop.algebra.einsums import Einsum, Strategy, strategies
from rooftop.algebra.expression import Reshard, parse
from rooftop.algebra.pricing import Prices
from rooftop.algebra.resharding import reshard
from rooftop.algebra.steps import Step, permutation
from rooftop.arrays import Mesh, ShardedArray
from rooftop.core.errors import RooftopError
from rooftop.hardware import Slice
from rooftop.programs.einsum.collective_matmul import all_gather_einsum, einsum_all_reduce, einsum_reduce_scatter

#: JAX's names of rooftop's dtypes.
DTYPES: dict[str, str] = {
    "bf16": "bfloat16",
    "f16": "float16",
    "f32": "float32",
    "int8": "int8",
    "int4": "int4",
    "f8_e4m3": "float8_e4m3fn",
    "f8_e5m2": "float8_e5m2",
    "f4_e2m1": "float4_e2m1fn",
    "int32": "int32",
    "uint32": "uint32",
    "bool": "bool",
}


def partition(array: ShardedArray, mesh: DeviceMesh) -> NamedSharding:
    """The sharding of a JAX array that represents ``array``, partial sums stacked in front."""
    stacked = [axis for axis in mesh.axis_names if axis in array.unreduced]
    return NamedSharding(mesh, P(*stacked, *(axes or None for axes in array.axes)))


def abstract(array: ShardedArray, sizes: Mapping[str, int], mesh: DeviceMesh) -> jax.ShapeDtypeStruct:
    """Shape, dtype and sharding of a JAX array that represents ``array``; ``sizes`` are the sizes of its dims."""
    stacked = tuple(mesh.shape[axis] for axis in mesh.axis_names if axis in array.unreduced)
    return jax.ShapeDtypeStruct(stacked + array.shape(sizes), DTYPES[array.dtype], sharding=partition(array, mesh))


def path_program(steps: Sequence[Step], sources: Sequence[ShardedArray], mesh: DeviceMesh) -> Callable[..., jax.Array]:
    """A function that applies steps one after another: to an array, or a multiplication first, to both operands."""
    target = steps[-1].output if steps else sources[0]

    def local(*operands: jax.Array) -> jax.Array:
        for step in steps:
            operands = (_apply(step, operands, mesh),)
        return operands[0]

    return _mapped(local, sources, target, mesh)


def einsum_program(strategy: Strategy, einsum: Einsum, mesh: DeviceMesh) -> Callable[..., jax.Array]:
    """A function of both operands that applies the steps of a strategy: those of the left operand come first."""
    place = next(index for index, step in enumerate(strategy.steps) if step.multiplies)
    multiply = strategy.steps[place]

    def local(left: jax.Array, right: jax.Array) -> jax.Array:
        array = einsum.left
        for step in strategy.steps[:place]:
            if array != multiply.inputs[0]:
                array, left = step.output, _apply(step, (left,), mesh)
            else:
                right = _apply(step, (right,), mesh)
        x = _apply(multiply, (left, right), mesh)
        for step in strategy.steps[place + 1 :]:
            x = _apply(step, (x,), mesh)
        return x

    return _mapped(local, (einsum.left, einsum.right), einsum.output, mesh)


def lower(mesh: DeviceMesh, arguments: Mapping[str, Any]) -> jax.stages.Lowered:
    """The plain program of an expression, for ``compiler.compiling.Request``: given shardings, XLA chooses the rest.

    ``arguments``: ``arrays`` (operands, then the output, in the notation) and ``dims``. With one operand, the array
    changes its sharding. Raises RooftopError for an unreduced output, which a plain program cannot have.
    """
    *operands, output = (ShardedArray.parse(text) for text in arguments["arrays"])
    if output.unreduced:
        raise RooftopError("output", str(output), "an output without partial sums: a plain program sums them")
    # Automatic axes: the partitioner chooses, as in programs that only place their arrays.
    auto = DeviceMesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))

    def plain(*arrays: jax.Array) -> jax.Array:
        whole = [x.sum(range(len(a.unreduced))) if a.unreduced else x for a, x in zip(operands, arrays, strict=True)]
        if len(whole) == 1:
            return whole[0]
        return jnp.einsum(_spec(operands, output), *whole, preferred_element_type=DTYPES[output.dtype])

    shapes = [abstract(array, arguments["dims"], auto) for array in operands]
    return jax.jit(plain, out_shardings=partition(output, auto)).lower(*shapes)


def lower_steps(mesh: DeviceMesh, arguments: Mapping[str, Any]) -> jax.stages.Lowered:
    """The program of one collective, written out with shard_map; ``arguments``: ``expression`` and ``dims``."""
    step = parse(arguments["expression"])
    if not isinstance(step, Step):
        raise RooftopError("expression", arguments["expression"], "one collective, such as AllGather_X(bf16[I_X, J])")
    program = path_program((step,), step.inputs, mesh)
    return jax.jit(program).lower(abstract(step.inputs[0], arguments["dims"], mesh))


def lower_strategy(mesh: DeviceMesh, arguments: Mapping[str, Any]) -> jax.stages.Lowered:
    """One strategy of an einsum, written out with shard_map, or the cheapest path of a resharding.

    ``arguments``: ``expression``, ``dims``, ``slice`` and ``layout`` (whose prices rank the strategies), ``rank`` (0 is
    the best) and ``overlapped`` (true to include collective matmuls).
    """
    laid = Mesh.from_layout(Slice.parse(arguments["slice"]), arguments["layout"])
    prices = Prices(mesh=laid, dims=arguments["dims"])
    asked = parse(arguments["expression"])
    operands: tuple[ShardedArray, ...]
    if isinstance(asked, Einsum):
        strategy = strategies(asked, prices, overlapped=arguments["overlapped"])[arguments["rank"]]
        program, operands = einsum_program(strategy, asked, mesh), (asked.left, asked.right)
    elif isinstance(asked, Reshard):
        steps = reshard(asked.source, asked.target, prices)
        program, operands = path_program(steps, (asked.source,), mesh), (asked.source,)
    else:
        raise RooftopError("expression", arguments["expression"], "an einsum or a resharding")
    return jax.jit(program).lower(*(abstract(array, arguments["dims"], mesh) for array in operands))


def _mapped(
    function: Callable[..., jax.Array], inputs: Sequence[ShardedArray], output: ShardedArray, mesh: DeviceMesh
) -> Callable[..., jax.Array]:
    """``function`` of local shards as a function of whole arrays."""

    def local(*shards: jax.Array) -> jax.Array:
        x = function(*(x.reshape(x.shape[len(array.unreduced) :]) for array, x in zip(inputs, shards, strict=True)))
        return x.reshape((1,) * len(output.unreduced) + x.shape)

    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=tuple(partition(array, mesh).spec for array in inputs),
        out_specs=partition(output, mesh).spec,
        # A gather by permutes returns the same array on every device, which JAX cannot infer.
        check_vma=False,
    )


def _apply(step: Step, operands: tuple[jax.Array, ...], mesh: DeviceMesh) -> jax.Array:
    """One step on local shards."""
    if step.multiplies:
        return _multiply(step, (operands[0], operands[1]))
    (x,), dims = operands, step.inputs[0].dims
    # Group the axes of each dim, in the order of its subscript.
    pairs = zip(step.axes, step.dims, strict=False)
    by_dim = [
        (dims.index(dim), tuple(axis for axis, _ in group)) for dim, group in groupby(pairs, lambda pair: pair[1])
    ]
    match step.op:
        case "all_gather":
            for dim, axes in by_dim:
                x = lax.all_gather(x, axes, axis=dim, tiled=True)
        case "reduce_scatter":
            for dim, axes in by_dim:
                x = lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True)
        case "all_reduce":
            x = lax.psum(x, step.axes)
        case "all_to_all":
            source, target = (dims.index(dim) for dim in step.dims)
            x = lax.all_to_all(x, step.axes, split_axis=target, concat_axis=source, tiled=True)
        case "permute":
            x = lax.ppermute(x, mesh.axis_names, [tuple(pair) for pair in permutation(step, mesh.shape).tolist()])
        case "slice":
            for dim, axes in by_dim:
                size = x.shape[dim] // lax.axis_size(axes)
                x = lax.dynamic_slice_in_dim(x, lax.axis_index(axes) * size, size, dim)
        case "pad":
            for dim, axes in by_dim:
                start, size = lax.axis_index(axes) * x.shape[dim], x.shape[dim] * lax.axis_size(axes)
                shape = (*x.shape[:dim], size, *x.shape[dim + 1 :])
                x = lax.dynamic_update_slice_in_dim(jnp.zeros(shape, x.dtype), x, start, dim)
        case "mask":
            x = jnp.where(lax.axis_index(step.axes) == 0, x, jnp.zeros_like(x))
    return x


def _multiply(step: Step, operands: tuple[jax.Array, jax.Array]) -> jax.Array:
    spec, dtype = _spec(step.inputs, step.output), DTYPES[step.output.dtype]
    if step.op == "einsum":
        # bf16 products are exact and summed in float32, as in the matrix unit.
        wide = jnp.int32 if jnp.issubdtype(operands[0].dtype, jnp.integer) else jnp.float32
        return jnp.einsum(spec, *operands, preferred_element_type=wide).astype(dtype)
    letters = dict(
        zip(
            (dim for array in (*step.inputs, step.output) for dim in array.dims), re.sub("[,>-]", "", spec), strict=True
        )
    )
    axis, letter, both = step.axes[0], letters[step.dims[0]], step.bidirectional
    if step.op == "all_gather_einsum":
        return all_gather_einsum(
            spec, *operands, axis=axis, gathered=step.operand, dim=letter, bidirectional=both, dtype=dtype
        )
    if step.op == "einsum_reduce_scatter":
        return einsum_reduce_scatter(spec, *operands, axis=axis, dim=letter, bidirectional=both, dtype=dtype)
    return einsum_all_reduce(spec, *operands, axis=axis, dim=letter, bidirectional=both, dtype=dtype)


def _spec(operands: Sequence[ShardedArray], output: ShardedArray) -> str:
    """The einsum in NumPy's notation, one letter for each dim."""
    dims = dict.fromkeys(dim for array in operands for dim in array.dims)
    letters = dict(zip(dims, "abcdefghijklmnopqrstuvwxyz", strict=False))
    terms = ["".join(letters[dim] for dim in array.dims) for array in (*operands, output)]
    return f"{terms[0]},{terms[1]}->{terms[2]}"
