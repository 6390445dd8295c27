"""The process that compiles: ``python -m rooftop.compiler.worker REQUEST RESULT``, both JSON files.

The result has a program, or the reason why there is none; it is written atomically. The file ``phase`` next to it has
the current phase.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import pickle
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import msgspec
from jax.experimental import serialize_executable

from rooftop import __version__
from rooftop.compiler.cache import digest
from rooftop.compiler.compiling import CompiledProgram, CompileRequest, RequestError, WorkerAnswer, WorkerResult
from rooftop.compiler.devices import topology_mesh
from rooftop.compiler.executables import compiled_program, read_reports, reporting_options
from rooftop.compiler.hlo.printing import compiled_text
from rooftop.compiler.memory import OutOfMemory, PeakMemory, read_exceeded
from rooftop.compiler.options import compile_without_refused
from rooftop.compiler.partitioner import DriverLog
from rooftop.core.errors import Infeasible, RooftopError
from rooftop.core.scratch import scratch_folder


def main(question: Path, answer: Path) -> None:
    """Read a request, compile it, write the result."""
    threading.Thread(target=_end_with_caller, daemon=True).start()
    phase = answer.with_name("phase")
    result, error = None, None
    try:
        request = CompileRequest.from_json(json.loads(question.read_text(encoding="utf-8")))
        result = WorkerResult(program=compile_here(request, lambda name: _write(phase, name.encode())))
    except Infeasible as no:
        # XLA has too little memory for the program, or the program itself says no before it is compiled.
        result = WorkerResult.refused(no)
    except RooftopError as wrong:
        error = RequestError(field=wrong.field, given=wrong.given, accepted=wrong.accepted)
    _write(answer, msgspec.json.encode(WorkerAnswer(sources=_sources(), result=result, error=error), enc_hook=str))


def compile_here(request: CompileRequest, on_phase: Callable[[str], None] = lambda name: None) -> CompiledProgram:
    """Compile in this process.

    Raises OutOfMemory if the program does not fit in HBM, RooftopError if the compiler rejects it.
    """
    for_gpus = request.mesh.slice.chip.kind == "gpu"
    start = time.perf_counter()
    on_phase("describing")
    mesh, lower = topology_mesh(request.mesh), _program(request.program)
    on_phase("lowering")
    try:
        lowered = lower(mesh, request.arguments)
    except (RooftopError, Infeasible):
        raise
    except Exception as error:  # the caller gets one line of any exception; stderr has the rest
        traceback.print_exc()
        raise RooftopError("program", request.program, f"one that lowers for this mesh ({_line(error)})") from None
    lower_s = time.perf_counter() - start
    on_phase("compiling")
    log = DriverLog()
    with scratch_folder("rooftop-dump-") as folder:
        try:
            reporting = reporting_options(folder, for_gpus=for_gpus)
            options = {**reporting, **request.defaults, **request.options}
            own = [name for name in options if name not in request.options]
            compiled, left_out = compile_without_refused(lowered.compile, options, own)
        except jax.errors.JaxRuntimeError as error:
            on_phase("reading")
            raise _refusal(request, error, folder) from None
        compile_s = time.perf_counter() - start - lower_s
        on_phase("reading")
        program = compiled_program(
            compiled_text(compiled),
            compiled.memory_analysis(),
            folder,
            lower_s=lower_s,
            compile_s=compile_s,
            for_gpus=for_gpus,
            options={name: options[name] for name in options if name not in (*reporting, *left_out)},
            left_out=left_out,
            log=log.read(),
        )
    if for_gpus and program.peak_bytes > (usable := request.mesh.slice.device_hbm_usable_bytes):
        # XLA:GPU compiles programs of any size; they end when they run.
        raise _exceeded(request, program.peak_bytes, usable, program.at_peak)
    return replace(program, executable=pack(compiled, request, program.versions)) if request.save else program


def _program(name: str) -> Callable[..., Any]:
    module, _, function = name.partition(":")
    try:
        attribute: Callable[..., Any] = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise RooftopError("program", name, f"module:function ({error})") from None
    return attribute


def _refusal(request: CompileRequest, error: Exception, folder: Path) -> OutOfMemory | RooftopError:
    """The error for a program that XLA does not compile: out of memory, or a wrong request."""
    exceeded = read_exceeded(str(error))
    if exceeded is None:
        # The answer has the first line only; the log has all of them.
        print(error, file=sys.stderr)
        return RooftopError("program", request.program, f"one that XLA compiles ({_line(error)})")
    return _exceeded(request, *exceeded, read_reports(folder))


def _exceeded(
    request: CompileRequest, needed_bytes: float, available_bytes: float, at_peak: PeakMemory | None
) -> OutOfMemory:
    what = f"{request.program} on {request.mesh.slice.name}"
    return OutOfMemory(what, needed_bytes=needed_bytes, available_bytes=available_bytes, at_peak=at_peak)


def _sources() -> Mapping[str, str]:
    """Digests of the imported source files: rooftop's, and the user's own outside of installed packages."""
    package = Path(__file__).parents[1]
    installed = [Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    files = {Path(name) for module in list(sys.modules.values()) if (name := getattr(module, "__file__", None))}
    return {
        str(path): digest(path)
        for path in sorted(files)
        if path.suffix == ".py" and (package in path.parents or not any(folder in path.parents for folder in installed))
    }


def _end_with_caller() -> None:
    """End this process when its caller ends, which closes the pipe."""
    # Not sys.stdin: Python aborts at its exit while a daemon thread holds the lock of that buffer.
    while os.read(0, 4096):
        pass
    os._exit(1)


def _write(path: Path, data: bytes) -> None:
    unfinished = path.with_suffix(".tmp")
    unfinished.write_bytes(data)
    os.replace(unfinished, path)


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


_KIND = "rooftop executable"


def pack(compiled: jax.stages.Compiled, request: CompileRequest, versions: Mapping[str, str]) -> bytes:
    """The bytes of a file for ``load``."""
    header = {"kind": _KIND, "rooftop_version": __version__, "versions": dict(versions), "request": request.to_json()}
    return json.dumps(header).encode() + b"\n" + pickle.dumps(serialize_executable.serialize(compiled))


def header(data: bytes) -> dict[str, Any]:
    """The first line: ``versions`` of jax and the compiler, the ``request``. Raises RooftopError for other files."""
    try:
        first_line: dict[str, Any] = json.loads(data.partition(b"\n")[0])
        if first_line["kind"] == _KIND:
            return first_line
    except (ValueError, KeyError, TypeError):
        pass
    raise RooftopError("executable", f"{len(data)} bytes", "a file that rooftop compile --save has written")


def load(data: bytes, devices: Sequence[jax.Device] | None = None) -> jax.stages.Compiled:
    """The executable, on the number of ``devices`` that it was compiled for (by default all that JAX has).

    Raises RooftopError unless the local versions equal those that compiled it: XLA guarantees no compatibility.
    """
    compiled_by = header(data)["versions"]
    here = {name: importlib.metadata.version(name) for name in compiled_by}
    if here != compiled_by:
        needed, present = (", ".join(f"{name} {number}" for name, number in x.items()) for x in (compiled_by, here))
        raise RooftopError("executable", present, f"the versions that compiled it: {needed}")
    serialized, arguments, results = pickle.loads(data.partition(b"\n")[2])
    loaded: jax.stages.Compiled = serialize_executable.deserialize_and_load(
        serialized, arguments, results, execution_devices=devices
    )
    return loaded


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
