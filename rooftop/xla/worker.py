"""The process that compiles: ``python -m rooftop.xla.worker REQUEST RESULT``, both JSON files.

The result holds a program, or why there is none; it appears whole or not at all.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import re
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from rooftop.errors import Infeasible, RooftopError
from rooftop.xla.compiling import Request
from rooftop.xla.topology import topology_mesh


def main(question: Path, answer: Path) -> None:
    """Read a request, compile it, write the result."""
    try:
        result = compile_here(Request.from_json(json.loads(question.read_text(encoding="utf-8"))))
    except Infeasible as no:
        result = {"infeasible": {"what": no.what, "by": no.by}}
    except RooftopError as wrong:
        result = {"error": {"field": wrong.field, "given": wrong.given, "accepted": wrong.accepted}}
    unfinished = answer.with_suffix(".tmp")
    unfinished.write_text(json.dumps(result, default=str), encoding="utf-8")
    os.replace(unfinished, answer)


def compile_here(request: Request) -> dict[str, Any]:
    """Compile in this process; the fields of ``Compiled``, mesh excepted.

    Raises Infeasible when the program does not fit in HBM, RooftopError when the compiler refuses it.
    """
    start = time.perf_counter()
    mesh, lower = topology_mesh(request.mesh), _program(request.program)
    try:
        lowered = lower(mesh, request.arguments)
    except (RooftopError, Infeasible):
        raise
    except Exception as error:  # whatever a program raises, its caller gets one line; stderr has the rest
        traceback.print_exc()
        raise RooftopError("program", request.program, f"one that lowers for this mesh ({_line(error)})") from None
    lower_s = time.perf_counter() - start
    try:
        compiled = lowered.compile(dict(request.options))
    except jax.errors.JaxRuntimeError as error:
        raise _refusal(request, error) from None
    compile_s = time.perf_counter() - start - lower_s
    memory = compiled.memory_analysis()
    return {
        "hlo_text": compiled.as_text(),
        "peak_bytes": memory.peak_memory_in_bytes,
        "memory": {
            name: getattr(memory, f"{name}_size_in_bytes")
            for name in ("argument", "output", "alias", "temp", "generated_code", "host_argument", "host_temp")
        },
        "lower_s": lower_s,
        "compile_s": compile_s,
        "versions": {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "libtpu")},
    }


def _program(name: str) -> Callable[..., Any]:
    module, _, function = name.partition(":")
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise RooftopError("program", name, f"module:function ({error})") from None
    return found


def _refusal(request: Request, error: Exception) -> Infeasible | RooftopError:
    """Why XLA did not compile: out of memory is an answer, anything else a wrong request."""
    exceeded = re.search(r"\(([\d.]+[KMGT]?)\) exceeds available HBM \(([\d.]+[KMGT]?)\)", str(error))
    if exceeded:
        by = f"needs {exceeded.group(1)}iB of the {exceeded.group(2)}iB of HBM of a device"
        return Infeasible(f"{request.program} on {request.mesh.slice.name}", by)
    return RooftopError("program", request.program, f"one that XLA compiles ({_line(error)})")


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
