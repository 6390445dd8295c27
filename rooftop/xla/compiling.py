"""Compile a program ahead of time with XLA:TPU, in a process of its own.

libtpu wants its environment before JAX is imported and keeps a process for one use, so the caller stays without it: a
worker reads a request from a file and writes the result to another, whole or not at all.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from rooftop.arrays import Mesh
from rooftop.errors import Infeasible, RooftopError
from rooftop.hardware import Slice
from rooftop.ledger import Ledger
from rooftop.xla import hlo
from rooftop.xla.compiled import read_ledger

#: What libtpu needs to compile with no TPU: no look-up of the machine, and more than one process at a time.
ENVIRONMENT: Mapping[str, str] = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to compile, and for which devices.

    ``program`` is 'module:function'. The function takes a jax Mesh and ``arguments`` (JSON) and returns a
    ``jax.stages.Lowered``. ``options`` are compiler options: booleans as Python ones, except for those of XLA's that
    take 'true' and 'false'.
    """

    mesh: Mesh
    program: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, bool | int | str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The request as plain JSON values."""
        return {
            "slice": self.mesh.slice.name,
            "mesh": self.mesh.to_json(),
            "program": self.program,
            "arguments": dict(self.arguments),
            "options": dict(self.options),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Request:
        """The inverse of ``to_json``."""
        mesh = Mesh.from_json(Slice.parse(data["slice"]), data["mesh"])
        return cls(mesh=mesh, program=data["program"], arguments=data["arguments"], options=data["options"])


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """What the compiler made of a request. Bytes are those of one device.

    ``peak_bytes`` is what must fit in HBM; ``memory`` has XLA's figures of which it is made. ``versions`` are those of
    jax, jaxlib and libtpu.
    """

    mesh: Mesh
    hlo_text: str
    peak_bytes: int
    memory: Mapping[str, int]
    lower_s: float
    compile_s: float
    versions: Mapping[str, str]

    @cached_property
    def module(self) -> hlo.Module:
        """The optimised and scheduled program of one device."""
        return hlo.parse(self.hlo_text)

    @cached_property
    def ledger(self) -> Ledger:
        """The compiled ledger."""
        return read_ledger(self.module, self.mesh.shape)


def compile_ahead_of_time(request: Request, *, timeout_s: float | None = None) -> Compiled:
    """Compile ``request`` in a worker process and wait for it.

    Raises Infeasible when the program does not fit in HBM, RooftopError when the request is wrong, the compiler
    refuses the program, or it takes longer than ``timeout_s``.
    """
    for package in ("jax", "libtpu"):
        if importlib.util.find_spec(package) is None:
            accepted = "a Python that has it, for XLA:TPU without a TPU: pip install 'rooftop[compile]' (Linux)"
            raise RooftopError(package, "not installed", accepted)
    with tempfile.TemporaryDirectory(prefix="rooftop-compile-") as folder:
        question, answer = Path(folder, "request.json"), Path(folder, "result.json")
        question.write_text(json.dumps(request.to_json()), encoding="utf-8")
        command = [sys.executable, "-m", "rooftop.xla.worker", str(question), str(answer)]
        try:
            worker = subprocess.run(
                command,
                env={**os.environ, **ENVIRONMENT},
                capture_output=True,
                text=True,
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise RooftopError("timeout_s", timeout_s, f"longer than compiling {request.program} takes") from None
        if not answer.exists():
            last = (worker.stderr.strip().splitlines() or ["no message"])[-1]
            raise RooftopError("program", request.program, f"one that XLA compiles (exit {worker.returncode}: {last})")
        result = json.loads(answer.read_text(encoding="utf-8"))
    if "infeasible" in result:
        raise Infeasible(**result["infeasible"])
    if "error" in result:
        raise RooftopError(**result["error"])
    return Compiled(mesh=request.mesh, **result)
