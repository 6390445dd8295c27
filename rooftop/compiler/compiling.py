"""Compile a program ahead of time with XLA:TPU, in a separate process.

libtpu needs its environment before JAX is imported, and restricts a process to one use. So a worker process loads it:
it reads a request from a file and writes the result to another file, atomically.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rooftop.arrays import Mesh
from rooftop.compiler.cache import Cache
from rooftop.compiler.hlo import text as hlo
from rooftop.compiler.memory import OutOfMemory, PeakMemory
from rooftop.core.errors import Infeasible, RooftopError
from rooftop.core.ledger import Ledger
from rooftop.hardware import Slice

#: Environment of libtpu for compilation without a TPU: no machine metadata, and several processes at a time.
ENVIRONMENT: Mapping[str, str] = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
#: Phases of a worker, in order: import JAX, let libtpu describe the slice, trace and lower the program, compile it, and
#: read the compiler's reports.
PHASES: tuple[str, ...] = ("starting", "describing", "lowering", "compiling", "reading")
#: Interval between calls of the progress callback.
_TICK_S = 0.25

#: Callback (phase, seconds since the start).
Progress = Callable[[str, float], None]


@dataclass(frozen=True, kw_only=True)
class CompileRequest:
    """A program to compile, and the devices to compile it for.

    ``program`` is 'module:function'. The function takes a jax Mesh and ``arguments`` (JSON) and returns a
    ``jax.stages.Lowered``. ``options`` are compiler options: booleans as Python ones, except for XLA options that take
    'true' and 'false'. ``save`` requests the executable, to be loaded on the real devices.
    """

    mesh: Mesh
    program: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, bool | int | str] = field(default_factory=dict)
    save: bool = False

    def to_json(self) -> dict[str, Any]:
        """The request as plain JSON values."""
        return {
            "slice": self.mesh.slice.name,
            "mesh": self.mesh.to_json(),
            "program": self.program,
            "arguments": dict(self.arguments),
            "options": dict(self.options),
            "save": self.save,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CompileRequest:
        """The inverse of ``to_json``."""
        fields = {name: value for name, value in data.items() if name not in ("slice", "mesh")}
        return cls(mesh=Mesh.from_json(Slice.parse(data["slice"]), data["mesh"]), **fields)


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """The compiler's result for a request. Bytes are those of one device.

    ``peak_bytes`` is XLA's own figure, and ``memory`` has its parts; ``at_peak`` lists the buffers that are alive at
    the peak (None if the compiler left no report). ``versions`` are those of jax, jaxlib and libtpu. ``executable`` is
    set if the request asked for it, see ``rooftop.compiler.worker``. ``cached``: the result comes from the cache.
    """

    mesh: Mesh
    hlo_text: str
    peak_bytes: int
    memory: Mapping[str, int]
    lower_s: float
    compile_s: float
    versions: Mapping[str, str]
    at_peak: PeakMemory | None = None
    executable: bytes | None = None
    cached: bool = False

    @classmethod
    def from_json(cls, mesh: Mesh, data: Mapping[str, Any], *, cached: bool = False) -> Compiled:
        """A worker's result as an object."""
        at_peak, executable = data["at_peak"], data["executable"]
        changed = {
            "at_peak": None if at_peak is None else PeakMemory.from_json(at_peak),
            "executable": None if executable is None else base64.b64decode(executable),
        }
        return cls(mesh=mesh, cached=cached, **{**data, **changed})

    @cached_property
    def module(self) -> hlo.Module:
        """The optimised and scheduled program of one device."""
        return hlo.parse(self.hlo_text)

    @cached_property
    def ledger(self) -> Ledger:
        """The compiled ledger, without times: ``rooftop.compiler.timed`` has those."""
        # Imported here: a worker does not read ledgers, so its cached answers stay valid when this module changes.
        from rooftop.compiler.ledger import read_ledger

        return read_ledger(self.module, self.mesh.shape, self.mesh)


def require_compiler() -> None:
    """Raise RooftopError if JAX, jaxtyping, libtpu or optax is not installed."""
    for package in ("jax", "jaxtyping", "libtpu", "optax"):
        if find_spec(package) is None:
            accepted = "a Python that has it, for XLA:TPU without a TPU: pip install 'rooftop[compile]' (Linux)"
            raise RooftopError(package, "not installed", accepted)


def compile_ahead_of_time(
    request: CompileRequest, *, timeout_s: float | None = None, cache: bool = True, on_progress: Progress | None = None
) -> Compiled:
    """Compile ``request`` in a worker process and wait for it, unless the ``cache`` has the answer.

    ``on_progress`` is called a few times a second. Raises OutOfMemory (an Infeasible) if the program does not fit in
    HBM, and RooftopError if the request is wrong, the compiler rejects the program, or it takes longer than
    ``timeout_s``. The worker ends with this call, even if the call raises, and with this process.
    """
    require_compiler()
    question = request.to_json()
    store = Cache.of_user()
    result = store.find(question) if cache else None
    cached = result is not None
    if result is None:
        output = ask_worker(request, timeout_s=timeout_s, on_progress=on_progress)
        if output.answer is None:
            raise output.failure
        if "error" in output.answer:
            raise RooftopError(**output.answer["error"])
        result = output.answer["result"]
        if cache:
            store.keep(question, result, output.answer["sources"])
    return read_result(request, result, cached=cached)


def read_result(request: CompileRequest, result: Mapping[str, Any], *, cached: bool) -> Compiled:
    """A worker's result. Raises OutOfMemory or Infeasible if the result says so."""
    if "out_of_memory" in result:
        raise OutOfMemory.from_json(result["out_of_memory"])
    if "infeasible" in result:
        raise Infeasible(**result["infeasible"])
    return Compiled.from_json(request.mesh, result, cached=cached)


@dataclass(frozen=True, kw_only=True)
class WorkerOutput:
    """Output of a worker: its ``answer`` and its ``log``.

    An answer is a result and the sources that it depends on, or an error; None if the worker was terminated.
    """

    program: str
    answer: Mapping[str, Any] | None
    log: str
    exit_status: int

    @property
    def failure(self) -> RooftopError:
        """The last line of the log as an error."""
        last = (self.log.strip().splitlines() or ["no message"])[-1]
        return RooftopError("program", self.program, f"one that XLA compiles (exit {self.exit_status}: {last})")


def ask_worker(
    request: CompileRequest,
    *,
    timeout_s: float | None = None,
    on_progress: Progress | None = None,
    environment: Mapping[str, str] | None = None,
) -> WorkerOutput:
    """Compile in a new worker, with ``environment`` in addition to libtpu's. Raises RooftopError after a timeout."""
    with tempfile.TemporaryDirectory(prefix="rooftop-compile-") as name:
        folder = Path(name)
        question, answer, log = folder / "request.json", folder / "result.json", folder / "log"
        question.write_text(json.dumps(request.to_json()), encoding="utf-8")
        with log.open("w", encoding="utf-8") as output:
            worker = subprocess.Popen(
                [sys.executable, "-m", "rooftop.compiler.worker", str(question), str(answer)],
                env={**os.environ, **ENVIRONMENT, **(environment or {})},
                # The worker reads stdin until it is closed, which happens when this process ends.
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                # Ctrl-C in a terminal reaches this process only, which kills the worker below.
                start_new_session=True,
            )
            try:
                _wait(worker, folder / "phase", timeout_s, on_progress or (lambda phase, elapsed_s: None))
            except subprocess.TimeoutExpired:
                raise RooftopError("timeout_s", timeout_s, f"longer than compiling {request.program} takes") from None
            finally:
                worker.kill()
                worker.communicate()
        return WorkerOutput(
            program=request.program,
            answer=json.loads(answer.read_text(encoding="utf-8")) if answer.exists() else None,
            log=log.read_text(encoding="utf-8", errors="replace"),
            exit_status=worker.returncode,
        )


def _wait(worker: subprocess.Popen[bytes], phase: Path, timeout_s: float | None, on_progress: Progress) -> None:
    """Wait until the worker has ended. Raises TimeoutExpired when it takes longer than ``timeout_s``."""
    start = time.monotonic()
    while True:
        elapsed_s = time.monotonic() - start
        on_progress(phase.read_text(encoding="utf-8") if phase.exists() else PHASES[0], elapsed_s)
        left_s = _TICK_S if timeout_s is None else min(_TICK_S, timeout_s - elapsed_s)
        try:
            worker.wait(timeout=max(0.0, left_s))
            return
        except subprocess.TimeoutExpired:
            if timeout_s is not None and time.monotonic() - start >= timeout_s:
                raise
