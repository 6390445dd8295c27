"""Any JAX function compiled for a TPU slice, without the slice: its compiled ledger and a roofline of every op.

Arguments are written in the notation of sharded arrays, or are abstract (or real) JAX arrays, in any pytree.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import Mesh as DeviceMesh
from jax.sharding import PartitionSpec as P

from rooftop.arrays import Mesh, ShardedArray, parse_axes
from rooftop.compiler.compiling import ENVIRONMENT, Compiled, CompileRequest, Progress, compile_ahead_of_time
from rooftop.core.errors import RooftopError
from rooftop.explain.compiled.report import CompiledReport
from rooftop.hardware import Slice
from rooftop.programs.einsum.sharded import abstract

#: What ``CompileRequest.program`` names.
PROGRAM = f"{__name__}:lower"


def inspect(
    function: Callable[..., Any] | str,
    *arguments: Any,
    on: Slice | str,
    mesh: Mesh | Mapping[str, int] | str | None = None,
    dims: Mapping[str, int] | None = None,
    auto: bool = False,
    timeout_s: float | None = None,
    cache: bool = True,
    save: bool = False,
    on_progress: Progress | None = None,
) -> CompiledReport:
    """Compile ``function(*arguments)`` for the slice ``on``; the report has its ledger, operations and verdict.

    A leaf of ``arguments`` is an array in the notation ('bf16[8192_X, D_Y]', names sized by ``dims``), or anything with
    a shape and a dtype: split as its sharding says, on every device whole if it has none. ``mesh`` names the axes
    ('X=4,Y=4', or a Mesh with its layout); without one they are the slice's own, x, y, z. Axes are explicit, or left
    to the partitioner if ``auto``. ``function`` may be jitted, with its own options.

    A callable is compiled in this process, which then holds libtpu. 'module:function' is compiled in a process of its
    own, with ``timeout_s``, ``cache`` and ``on_progress``. ``save`` keeps the executable.
    Raises OutOfMemory when the program does not fit in HBM, RooftopError when an argument is wrong or the compiler
    refuses the program.
    """
    laid = laid_mesh(Slice.parse(on) if isinstance(on, str) else on, mesh)
    parameters = {"function": function, "arrays": arguments, "dims": dict(dims or {}), "auto": auto}
    request = CompileRequest(mesh=laid, program=PROGRAM, arguments=parameters, save=save)
    if isinstance(function, str):
        texts = [_text(argument) for argument in arguments]
        named = replace(request, arguments=parameters | {"arrays": texts})
        try:
            compiled = compile_ahead_of_time(named, timeout_s=timeout_s, cache=cache, on_progress=on_progress)
        except RooftopError as error:
            if error.given != PROGRAM:
                raise
            # The user's function failed, not PROGRAM, which lowers it.
            raise RooftopError("function", function, error.accepted) from None
    else:
        # libtpu reads these when it is first used.
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        from rooftop.compiler.worker import compile_here

        compiled = Compiled(mesh=laid, **vars(compile_here(request)))
    return CompiledReport(plan=None, compiled=compiled)


def laid_mesh(slice_: Slice, mesh: Mesh | Mapping[str, int] | str | None) -> Mesh:
    """A mesh on ``slice_``, from its axes and sizes; without any, the physical axes of the slice."""
    if isinstance(mesh, Mesh):
        return mesh
    if mesh is None:
        sizes: Mapping[str, int] = {axis.name: axis.size for axis in slice_.physical_axes}
    else:
        sizes = parse_axes(mesh, None) if isinstance(mesh, str) else mesh
    return Mesh.lay(slice_, sizes)


def lower(mesh: DeviceMesh, arguments: Mapping[str, Any]) -> jax.stages.Lowered:
    """The function lowered for ``mesh``, for ``rooftop.compiler.compiling.CompileRequest``.

    ``arguments``: ``function`` ('module:function' or a callable), ``arrays`` (a pytree), ``dims`` and ``auto``.
    """
    kind = AxisType.Auto if arguments["auto"] else AxisType.Explicit
    mesh = DeviceMesh(mesh.devices, mesh.axis_names, axis_types=(kind,) * len(mesh.axis_names))
    function = arguments["function"]
    if isinstance(function, str):
        function = _imported(function)
    shapes = jax.tree.map(lambda leaf: _abstract(leaf, arguments["dims"], mesh), tuple(arguments["arrays"]))
    jitted = function if hasattr(function, "lower") else jax.jit(function)
    with jax.set_mesh(mesh):
        lowered: jax.stages.Lowered = jitted.lower(*shapes)
        return lowered


def _imported(name: str) -> Callable[..., Any]:
    module, _, path = name.partition(":")
    try:
        result: Any = importlib.import_module(module)
        for part in path.split("."):
            result = getattr(result, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise RooftopError("function", name, f"module:function that can be imported ({error})") from None
    if not callable(result):
        raise RooftopError("function", name, f"a function; this is a {type(result).__name__}")
    called: Callable[..., Any] = result
    return called


def _abstract(leaf: Any, dims: Mapping[str, int], mesh: DeviceMesh) -> jax.ShapeDtypeStruct:
    if isinstance(leaf, str | ShardedArray):
        array = ShardedArray.parse(leaf) if isinstance(leaf, str) else leaf
        if array.at or array.unreduced:
            raise RooftopError("argument", str(array), "an array in the HBM of the mesh, without partial sums")
        # Raises RooftopError, with the nearest sizes that divide, for a dim that does not.
        array.local_shape(dims, dict(mesh.shape))
        return abstract(array, dims, mesh)
    if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
        raise RooftopError("argument", leaf, "an array in the notation, such as bf16[8192_X, 4096], or a JAX array")
    sharding = getattr(leaf, "sharding", None)
    spec = sharding.spec if isinstance(sharding, NamedSharding) else P()
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))


def _text(argument: Any) -> str:
    if not isinstance(argument, str | ShardedArray):
        raise RooftopError("argument", argument, "arrays in the notation, beside a function that is named")
    return str(argument)
