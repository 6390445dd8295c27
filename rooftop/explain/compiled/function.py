"""Any JAX function compiled for a slice, without the slice: its compiled ledger and a roofline of every op.

Arguments are written in the notation of sharded arrays, or are arrays, abstract or real, in any pytree, next to
whatever else the function takes: Python numbers, static arguments, modules. JAX's own stages are taken too.
"""

from __future__ import annotations

import functools
import importlib
import os
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import Mesh as DeviceMesh
from jax.sharding import PartitionSpec as P

from rooftop.arrays import Mesh, ShardedArray, parse_axes, placed_mesh
from rooftop.compiler.compiling import ENVIRONMENT, Compiled, CompileRequest, Progress, compile_ahead_of_time
from rooftop.compiler.devices import coordinates_of, described_devices, topology_mesh
from rooftop.compiler.executables import compiled_program
from rooftop.compiler.hlo.printing import compiled_text
from rooftop.core.errors import Infeasible, RooftopError
from rooftop.explain.compiled.report import CompiledReport
from rooftop.hardware import Slice
from rooftop.programs.einsum.sharded import abstract
from rooftop.target.places import is_own, place
from rooftop.target.private import require_known_jax

#: What ``CompileRequest.program`` names.
PROGRAM = f"{__name__}:lower"
#: Compiler options by name, as ``jax.jit`` takes them.
Options = Mapping[str, bool | int | str]


def inspect(
    function: Any,
    *arguments: Any,
    on: Slice | str,
    keywords: Mapping[str, Any] | None = None,
    mesh: Mesh | Mapping[str, int] | str | None = None,
    dims: Mapping[str, int] | None = None,
    auto: bool = False,
    options: Options | None = None,
    timeout_s: float | None = None,
    cache: bool = True,
    save: bool = False,
    on_progress: Progress | None = None,
) -> CompiledReport:
    """Compile ``function(*arguments, **keywords)`` for the slice ``on``; the report has its ledger and operations.

    A leaf of ``arguments`` is an array in the notation ('bf16[8192_X, D_Y]', names sized by ``dims``), or anything with
    a shape and a dtype: split as its sharding says, on every device whole if it has none. Other leaves are passed as
    they are. ``mesh`` names the axes ('X=4,Y=4', or a Mesh with its layout); without one they are the slice's own, x,
    y, z. Axes are explicit, or left to the partitioner if ``auto``. An argument that is sharded over a mesh of the
    slice's own devices keeps it, and the report has its axes. ``function`` may be jitted, with its own options, or a
    stage of JAX (Traced, Lowered, Compiled), which takes no arguments. ``options`` are the compiler's.

    A callable is compiled in this process, which then holds libtpu. 'module:function' is compiled in a process of its
    own, with ``timeout_s``, ``cache`` and ``on_progress``. ``save`` keeps the executable.
    Raises OutOfMemory when the program does not fit in HBM, RooftopError when an argument is wrong, the function
    raises, or the compiler refuses the program.
    """
    slice_ = Slice.parse(on) if isinstance(on, str) else on
    laid = laid_mesh(slice_, mesh)
    parameters = {
        "function": function,
        "arrays": arguments,
        "keywords": dict(keywords or {}),
        "dims": dict(dims or {}),
        "auto": auto,
    }
    request = CompileRequest(mesh=laid, program=PROGRAM, arguments=parameters, options=dict(options or {}), save=save)
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
        return CompiledReport(plan=None, compiled=compiled)
    # libtpu reads these when it is first used.
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if save:
        from rooftop.compiler.worker import compile_here

        return CompiledReport(plan=None, compiled=Compiled(mesh=laid, **vars(compile_here(request))))
    return CompiledReport(plan=None, compiled=_in_session(request, whole_mesh=mesh is not None, cache=cache))


def _in_session(request: CompileRequest, *, whole_mesh: bool, cache: bool) -> Compiled:
    """The program of ``request`` on devices that the program sees as its own.

    ``whole_mesh``: the mesh is asked for, and not only a default.
    """
    require_known_jax()
    from rooftop.target.session import Session, SessionOptions, active

    slice_, parameters = request.mesh.slice, request.arguments
    running = active()
    if running is not None and running.slice.name != slice_.name:
        raise RooftopError("on", slice_.name, f"the slice of the target that this process is on, {running.slice.name}")
    session = running or Session(slice=slice_, options=SessionOptions(cache=cache))
    stage = parameters["function"]
    if isinstance(stage, jax.stages.Compiled):
        return _read(stage, slice_)
    with nullcontext() if running is not None else session, session.compiling_with(request.options):
        mesh = topology_mesh(request.mesh, one_process=True)
        leaves = jax.tree.leaves((parameters["arrays"], parameters["keywords"]))
        # Inside a target arrays lie where the program has put them.
        default = running is None and not _sharded_here(leaves, session.devices)
        used = whole_mesh or default or any(map(_is_notation, leaves))
        try:
            if isinstance(stage, (jax.stages.Traced, jax.stages.Lowered)):
                lowered = stage.lower() if isinstance(stage, jax.stages.Traced) else stage
                _require_devices(lowered, session.devices, slice_)
                used = False
            else:
                with _users_errors(stage):
                    lowered = _lowered(mesh if used else None, parameters, mesh, session.stand_in_for)
            if request.options:
                # JAX remembers what it compiled without them.
                jax.clear_caches()
            compiled = lowered.compile()
            program = session.program_of(compiled)
            if program is None:
                # JAX remembers what it compiled before the session.
                return _read(compiled, slice_)
        except jax.errors.JaxRuntimeError as error:
            programs = session.record.programs
            if not programs or programs[-1].result.out_of_memory is None:
                message = (str(error).splitlines() or [""])[0]
                raise RooftopError("function", _name(stage), f"one that XLA compiles ({message})") from error
            program = programs[-1]
    return program.result.compiled(request.mesh if used else program.mesh(slice_), cached=program.cached)


def _read(stage: jax.stages.Compiled, slice_: Slice) -> Compiled:
    """A program that is compiled, without XLA's report of its memory: the peak is XLA's own figure."""
    here = described_devices(slice_, one_process=True)
    every = jax.tree.leaves((stage.input_shardings, stage.output_shardings))
    shardings = [sharding for sharding in every if sharding.device_set <= set(here)]
    meshes = [sharding.mesh for sharding in shardings if isinstance(sharding, NamedSharding)]
    memory: Any = stage.memory_analysis()
    if not shardings or memory is None:
        accepted = f"one over the devices of {slice_.name}: inside rooftop.target, or with rooftop.mesh"
        raise RooftopError("function", "a compiled stage for other devices", accepted)
    devices = list(meshes[0].devices.flat) if meshes else [next(iter(shardings[0].device_set))]
    axes = dict(meshes[0].shape) if meshes else {"devices": 1}
    program = compiled_program(
        compiled_text(stage),
        memory,
        Path(os.devnull),
        lower_s=0.0,
        compile_s=0.0,
        for_gpus=slice_.chip.kind == "gpu",
        options={},
    )
    return Compiled(mesh=placed_mesh(slice_, axes, coordinates_of(devices, slice_)), **vars(program))


@contextmanager
def _users_errors(function: Any) -> Iterator[None]:
    """Turn what a user's function raises while it is traced into one line that names the user's own line."""
    try:
        yield
    except (RooftopError, Infeasible, jax.errors.JaxRuntimeError):
        raise
    except Exception as error:
        raise RooftopError(
            "function", _name(function), f"one that lowers for this mesh ({explained(error)})"
        ) from error


def explained(error: BaseException) -> str:
    """'file:line: TypeError: ...' of an exception, with the innermost line outside of packages."""
    own = [
        place(frame.filename, frame.lineno or 0)
        for frame in traceback.extract_tb(error.__traceback__)
        if is_own(frame.filename)
    ]
    message = (str(error).splitlines() or [""])[0]
    return ": ".join([*own[-1:], type(error).__name__, message])


def _name(function: Any) -> str:
    if isinstance(function, str):
        return function
    return str(getattr(function, "__qualname__", None) or getattr(function, "__name__", type(function).__name__))


def _sharded_here(leaves: Iterable[Any], devices: tuple[Any, ...]) -> bool:
    """True if an argument, or the mesh that the caller has set, is over the described devices."""
    own = set(devices)
    shardings = [getattr(leaf, "sharding", None) for leaf in leaves]
    meshes = [sharding.mesh for sharding in shardings if isinstance(sharding, NamedSharding)]
    context = jax.sharding.get_mesh()
    return any(
        isinstance(mesh, DeviceMesh) and set(mesh.devices.flat) <= own for mesh in (*meshes, context) if mesh.size
    )


def _require_devices(lowered: Any, devices: tuple[Any, ...], slice_: Slice) -> None:
    """Raise RooftopError for a lowered stage whose devices are not those of the slice."""
    backend = lowered._lowering.compile_args.get("backend")
    if backend is not devices[0].client:
        platform = getattr(backend, "platform", "no device")
        accepted = f"one over the devices of {slice_.name}: inside rooftop.target, or with rooftop.mesh"
        raise RooftopError("function", f"a stage for {platform}", accepted)


def laid_mesh(slice_: Slice, mesh: Mesh | Mapping[str, int] | str | None) -> Mesh:
    """A mesh on ``slice_``, from its axes and sizes; without any, the physical axes of the slice."""
    if isinstance(mesh, Mesh):
        return mesh
    if mesh is None:
        sizes: Mapping[str, int] = {axis.name: axis.size for axis in slice_.physical_axes}
    else:
        sizes = parse_axes(mesh, None) if isinstance(mesh, str) else mesh
    return Mesh.lay(slice_, sizes)


def device_mesh(mesh: Mesh, *, auto: bool) -> DeviceMesh:
    """JAX's mesh over the described devices of a slice, which are the same in every call."""
    return _with_axes(topology_mesh(mesh, one_process=True), auto)


def lower(mesh: DeviceMesh, arguments: Mapping[str, Any]) -> jax.stages.Lowered:
    """The function lowered for ``mesh``, for ``rooftop.compiler.compiling.CompileRequest``.

    ``arguments``: ``function`` ('module:function' or a callable), ``arrays`` (a pytree), ``keywords``, ``dims``,
    ``auto``, and ``settings``: keywords whose values are Python's, and not traced.
    """
    with _users_errors(arguments["function"]):
        lowered: jax.stages.Lowered = _lowered(mesh, arguments, mesh)
        return lowered


def _lowered(
    context: DeviceMesh | None,
    arguments: Mapping[str, Any],
    mesh: DeviceMesh,
    array: Callable[[jax.ShapeDtypeStruct], Any] = lambda shape: shape,
) -> Any:
    """The function lowered, with the mesh ``context`` set; arrays without a mesh of their own lie on it.

    ``array`` turns the shape, dtype and sharding of an argument into what the function is lowered for.
    """
    mesh = _with_axes(mesh, arguments["auto"])
    function = arguments["function"]
    if isinstance(function, str):
        function = _imported(function)
    positional, named = jax.tree.map(
        lambda leaf: _argument(leaf, arguments["dims"], mesh, array, whole=context is not None),
        (tuple(arguments["arrays"]), dict(arguments.get("keywords") or {})),
    )
    settings = arguments.get("settings") or {}
    if hasattr(function, "lower"):
        # Its own static arguments say what is not traced.
        jitted, named = function, {**named, **settings}
    else:
        jitted = jax.jit(functools.partial(function, **settings) if settings else function)
    with nullcontext() if context is None else jax.set_mesh(mesh):
        return jitted.lower(*positional, **named)


def _with_axes(mesh: DeviceMesh, auto: bool) -> DeviceMesh:
    kind = AxisType.Auto if auto else AxisType.Explicit
    return DeviceMesh(mesh.devices, mesh.axis_names, axis_types=(kind,) * len(mesh.axis_names))


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


def _is_notation(leaf: Any) -> bool:
    return isinstance(leaf, ShardedArray) or (isinstance(leaf, str) and "[" in leaf)


def _argument(
    leaf: Any, dims: Mapping[str, int], mesh: DeviceMesh, array: Callable[[jax.ShapeDtypeStruct], Any], *, whole: bool
) -> Any:
    """An ``array`` of the leaf's shape, dtype and sharding if it is an array; other leaves as they are.

    ``whole``: an array without a sharding over the mesh's devices is on all of them.
    """
    if _is_notation(leaf):
        written = ShardedArray.parse(leaf) if isinstance(leaf, str) else leaf
        if written.at or written.unreduced:
            raise RooftopError("argument", str(written), "an array in the HBM of the mesh, without partial sums")
        # Raises RooftopError, with the nearest sizes that divide, for a dim that does not.
        written.local_shape(dims, dict(mesh.shape))
        return array(abstract(written, dims, mesh))
    if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
        return leaf
    sharding = getattr(leaf, "sharding", None)
    described = set(mesh.devices.flat)
    if not whole and isinstance(leaf, jax.Array) and leaf.sharding.device_set <= described:
        # It may not be placed, and then goes where other arguments are.
        return leaf
    if isinstance(sharding, NamedSharding):
        if not (isinstance(sharding.mesh, DeviceMesh) and set(sharding.mesh.devices.flat) <= described):
            sharding = NamedSharding(mesh, sharding.spec)
    elif whole:
        sharding = NamedSharding(mesh, P())
    elif sharding is not None and not sharding.device_set <= described:
        sharding = None
    return array(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding))


def _text(argument: Any) -> Any:
    if isinstance(argument, (bool, int, float)):
        return argument
    if not isinstance(argument, str | ShardedArray):
        raise RooftopError("argument", argument, "arrays in the notation, next to a function that is named")
    return str(argument)
