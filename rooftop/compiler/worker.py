"""The process that compiles: ``python -m rooftop.compiler.worker REQUEST RESULT``, both JSON files.

The result holds a program, or why there is none; it appears whole or not at all. What the process is about stands in
the file ``phase`` beside it.
"""

from __future__ import annotations

import base64
import importlib
import importlib.metadata
import json
import os
import pickle
import sys
import sysconfig
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable

from rooftop import __version__
from rooftop.compiler.cache import digest
from rooftop.compiler.compiling import CompileRequest
from rooftop.compiler.devices import topology_mesh
from rooftop.compiler.hlo import text as hlo
from rooftop.compiler.memory import OutOfMemory, PeakMemory, read_exceeded, read_memory
from rooftop.core.errors import Infeasible, RooftopError


def main(question: Path, answer: Path) -> None:
    """Read a request, compile it, write the result."""
    threading.Thread(target=_end_with_caller, daemon=True).start()
    phase = answer.with_name("phase")
    try:
        request = CompileRequest.from_json(json.loads(question.read_text(encoding="utf-8")))
        result = {"result": _plain(compile_here(request, lambda name: _write(phase, name))), "sources": _sources()}
    except OutOfMemory as no:
        result = {"result": {"out_of_memory": no.to_json()}, "sources": _sources()}
    except Infeasible as no:
        # A program's own answer, before there is anything to compile.
        result = {"result": {"infeasible": {"what": no.what, "by": no.by}}, "sources": _sources()}
    except RooftopError as wrong:
        error = {"field": wrong.field, "given": wrong.given, "accepted": wrong.accepted}
        result = {"error": error, "sources": _sources()}
    _write(answer, json.dumps(result, default=str))


def compile_here(request: CompileRequest, on_phase: Callable[[str], None] = lambda name: None) -> dict[str, Any]:
    """Compile in this process; the fields of ``Compiled``, mesh excepted.

    Raises OutOfMemory when the program does not fit in HBM, RooftopError when the compiler refuses it.
    """
    start = time.perf_counter()
    on_phase("describing")
    mesh, lower = topology_mesh(request.mesh), _program(request.program)
    on_phase("lowering")
    try:
        lowered = lower(mesh, request.arguments)
    except (RooftopError, Infeasible):
        raise
    except Exception as error:  # whatever a program raises, its caller gets one line; stderr has the rest
        traceback.print_exc()
        raise RooftopError("program", request.program, f"one that lowers for this mesh ({_line(error)})") from None
    lower_s = time.perf_counter() - start
    on_phase("compiling")
    with tempfile.TemporaryDirectory(prefix="rooftop-dump-") as folder:
        reports = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        try:
            compiled = lowered.compile({**reports, **request.options})
        except jax.errors.JaxRuntimeError as error:
            on_phase("reading")
            raise _refusal(request, error, Path(folder)) from None
        compile_s = time.perf_counter() - start - lower_s
        on_phase("reading")
        at_peak = _peak_memory(Path(folder))
    memory = compiled.memory_analysis()
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "libtpu")}
    return {
        "hlo_text": compiled.as_text(),
        "peak_bytes": memory.peak_memory_in_bytes,
        "memory": {
            name: getattr(memory, f"{name}_size_in_bytes")
            for name in ("argument", "output", "alias", "temp", "generated_code", "host_argument", "host_temp")
        },
        "lower_s": lower_s,
        "compile_s": compile_s,
        "versions": versions,
        "at_peak": at_peak,
        "executable": pack(compiled, request, versions) if request.save else None,
    }


def _plain(result: Mapping[str, Any]) -> dict[str, Any]:
    """The fields as JSON values: what ``Compiled.from_json`` takes."""
    at_peak, executable = result["at_peak"], result["executable"]
    return {
        **result,
        "at_peak": at_peak and at_peak.to_json(),
        "executable": executable and base64.b64encode(executable).decode(),
    }


def _program(name: str) -> Callable[..., Any]:
    module, _, function = name.partition(":")
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise RooftopError("program", name, f"module:function ({error})") from None
    return found


def _peak_memory(folder: Path) -> PeakMemory | None:
    """What the compiler's reports say; None if it has left none (its own options may send them elsewhere)."""
    endings = ("-buffer-assignment.txt", "-live-range.txt", ".txt")
    names = [next(folder.glob(f"*.after_optimizations{ending}"), None) for ending in endings]
    texts = [path.read_text(encoding="utf-8") for path in names if path is not None]
    if len(texts) < len(endings):
        return None
    assignment, live_ranges, module = texts
    return read_memory(assignment, live_ranges, hlo.parse(module))


def _refusal(request: CompileRequest, error: Exception, folder: Path) -> OutOfMemory | RooftopError:
    """Why XLA did not compile: out of memory is an answer, anything else a wrong request."""
    exceeded = read_exceeded(str(error))
    if exceeded is None:
        # The answer has its first line; a reader of the log may want all of them.
        print(error, file=sys.stderr)
        return RooftopError("program", request.program, f"one that XLA compiles ({_line(error)})")
    return OutOfMemory(
        f"{request.program} on {request.mesh.slice.name}",
        needed_bytes=exceeded[0],
        available_bytes=exceeded[1],
        at_peak=_peak_memory(folder),
    )


def _sources() -> Mapping[str, str]:
    """Digests of the source files that were imported: rooftop's, and the user's that come from no installed package."""
    package = Path(__file__).parents[1]
    installed = [Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    files = {Path(name) for module in list(sys.modules.values()) if (name := getattr(module, "__file__", None))}
    return {
        str(path): digest(path)
        for path in sorted(files)
        if path.suffix == ".py" and (package in path.parents or not any(each in path.parents for each in installed))
    }


def _end_with_caller() -> None:
    """End this process when its caller has gone, which closes its end of the pipe."""
    sys.stdin.buffer.read()
    os._exit(1)


def _write(path: Path, text: str) -> None:
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(text, encoding="utf-8")
    os.replace(unfinished, path)


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


_KIND = "rooftop executable"


def pack(compiled: jax.stages.Compiled, request: CompileRequest, versions: Mapping[str, str]) -> bytes:
    """The bytes of a file that ``load`` reads."""
    header = {"kind": _KIND, "rooftop_version": __version__, "versions": dict(versions), "request": request.to_json()}
    return json.dumps(header).encode() + b"\n" + pickle.dumps(serialize_executable.serialize(compiled))


def header(data: bytes) -> dict[str, Any]:
    """The first line: ``versions`` of jax, jaxlib and libtpu, the ``request``. Raises RooftopError for other files."""
    try:
        found: dict[str, Any] = json.loads(data.partition(b"\n")[0])
        if found["kind"] == _KIND:
            return found
    except (ValueError, KeyError, TypeError):
        pass
    raise RooftopError("executable", f"{len(data)} bytes", "a file that rooftop compile --save has written")


def load(data: bytes, devices: Sequence[jax.Device] | None = None) -> jax.stages.Compiled:
    """The executable, on as many ``devices`` as it was compiled for (all that JAX has, unless given).

    Raises RooftopError unless the versions here are those that compiled it: XLA promises nothing between them.
    """
    compiled_by = header(data)["versions"]
    here = {name: importlib.metadata.version(name) for name in compiled_by}
    if here != compiled_by:
        needed, found = (", ".join(f"{name} {number}" for name, number in each.items()) for each in (compiled_by, here))
        raise RooftopError("executable", found, f"the versions that compiled it: {needed}")
    serialized, arguments, results = pickle.loads(data.partition(b"\n")[2])
    loaded: jax.stages.Compiled = serialize_executable.deserialize_and_load(
        serialized, arguments, results, execution_devices=devices
    )
    return loaded


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
