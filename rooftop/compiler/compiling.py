"""Compile a program ahead of time with XLA:TPU or XLA:GPU, in a separate process.

libtpu needs its environment before JAX is imported, and restricts a process to one use. So a worker process loads the
compiler: it reads a request from a file and writes the result to another file, atomically.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from rooftop.arrays import Mesh
from rooftop.compiler.cache import Cache
from rooftop.compiler.hlo import text as hlo
from rooftop.compiler.memory import MemoryShortage, OutOfMemory, PeakMemory
from rooftop.compiler.partitioner import FullRematerialization
from rooftop.compiler.targets import PLUGIN, XLA_GPU
from rooftop.core.errors import Infeasible, RooftopError
from rooftop.core.extras import require
from rooftop.core.records import field_values, plain
from rooftop.core.scratch import scratch_folder
from rooftop.hardware import Slice

#: Environment for compilation without TPUs and GPUs: no search for devices; for libtpu also no machine metadata, and
#: several processes at a time.
ENVIRONMENT: Mapping[str, str] = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
#: Phases of a worker, in order: import JAX, let the compiler describe the slice, trace and lower the program, compile
#: it, and read the compiler's reports.
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
    'true' and 'false'. ``defaults`` are rooftop's own: ``options`` override them, and one that the compiler refuses is
    left out. ``save`` requests the executable, to be loaded on the real devices.
    """

    mesh: Mesh
    program: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, bool | int | str] = field(default_factory=dict)
    defaults: Mapping[str, bool | int | str] = field(default_factory=dict)
    save: bool = False

    def to_json(self) -> dict[str, Any]:
        """The request as plain JSON values."""
        data: dict[str, Any] = plain({"slice": self.mesh.slice.name, **field_values(self), "mesh": self.mesh.described})
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CompileRequest:
        """The inverse of ``to_json``."""
        fields = {name: value for name, value in data.items() if name not in ("slice", "mesh")}
        return cls(mesh=Mesh.from_json(Slice.parse(data["slice"]), data["mesh"]), **fields)


@dataclass(frozen=True, kw_only=True)
class CompiledProgram:
    """The compiler's result for a program. Bytes are those of one device.

    ``peak_bytes`` is XLA's own figure, and ``memory`` has its parts; ``at_peak`` lists the buffers that are alive at
    the peak (None if the compiler left no report). ``versions`` are those of jax, jaxlib and the compiler. ``options``
    are those that it was compiled with, and ``left_out`` those of rooftop that the compiler refused. ``executable`` is
    set if the request asked for it: see ``rooftop.compiler.worker``. ``rematerialized`` are arrays that the
    partitioner warns of.
    """

    hlo_text: str
    peak_bytes: int
    memory: Mapping[str, int]
    lower_s: float
    compile_s: float
    versions: Mapping[str, str]
    options: Mapping[str, bool | int | str] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    at_peak: PeakMemory | None = None
    rematerialized: tuple[FullRematerialization, ...] = ()
    executable: bytes | None = None


@dataclass(frozen=True, kw_only=True)
class Compiled(CompiledProgram):
    """A compiled program and the ``mesh`` that it was compiled for. ``cached``: the result comes from the cache."""

    mesh: Mesh
    cached: bool = False

    @cached_property
    def module(self) -> hlo.Module:
        """The optimised and scheduled program of one device."""
        return hlo.parse(self.hlo_text)


@dataclass(frozen=True, kw_only=True)
class ProgramRefusal:
    """The fields of an Infeasible that a program raises before it is compiled, or that the compiler gives."""

    what: str
    by: str


@dataclass(frozen=True, kw_only=True)
class WorkerResult:
    """A ``program``, or the one reason why there is none. It is valid as long as its sources are."""

    program: CompiledProgram | None = None
    out_of_memory: MemoryShortage | None = None
    infeasible: ProgramRefusal | None = None

    @classmethod
    def refused(cls, no: Infeasible) -> WorkerResult:
        """The result that raises ``no`` when it is read."""
        if isinstance(no, OutOfMemory):
            return cls(out_of_memory=no.record)
        return cls(infeasible=ProgramRefusal(what=no.what, by=no.by))

    def compiled(self, mesh: Mesh, *, cached: bool) -> Compiled:
        """The program. Raises OutOfMemory or Infeasible if there is none."""
        if self.out_of_memory is not None:
            raise self.out_of_memory.error
        if self.infeasible is not None:
            raise Infeasible(self.infeasible.what, self.infeasible.by)
        assert self.program is not None
        return Compiled(mesh=mesh, cached=cached, **vars(self.program))


@dataclass(frozen=True, kw_only=True)
class RequestError:
    """The fields of a RooftopError."""

    field: str
    given: Any
    accepted: str


@dataclass(frozen=True, kw_only=True)
class WorkerAnswer:
    """The file that a worker writes: a result, or an ``error``; ``sources`` are the digests of the files it read."""

    sources: Mapping[str, str]
    result: WorkerResult | None = None
    error: RequestError | None = None


def require_compiler(kind: str = "tpu") -> None:
    """Raise RooftopError if JAX, jaxtyping, optax or the compiler for a ``kind`` of chip is not installed."""
    name, extra, plugin = ("XLA:GPU", "gpu-compile", PLUGIN) if kind == "gpu" else ("XLA:TPU", "compile", "libtpu")
    require(extra, "jax", plugin, "optax", purpose=f"on Linux, for {name} without a {name[-3:]}")


def compiler_versions(kind: str = "tpu") -> dict[str, str]:
    """Versions of jax, jaxlib and the compiler for a ``kind`` of chip."""
    names = ("jax", "jaxlib", XLA_GPU if kind == "gpu" else "libtpu")
    return {name: importlib.metadata.version(name) for name in names}


def compile_ahead_of_time(
    request: CompileRequest, *, timeout_s: float | None = None, cache: bool = True, on_progress: Progress | None = None
) -> Compiled:
    """Compile ``request`` in a worker process and wait for it, unless the ``cache`` has the answer.

    ``on_progress`` is called a few times a second. Raises OutOfMemory (an Infeasible) if the program does not fit in
    HBM, and RooftopError if the request is wrong, the compiler rejects the program, or it takes longer than
    ``timeout_s``. The worker ends with this call, even if the call raises, and with this process.
    """
    require_compiler(request.mesh.slice.chip.kind)
    question = request.to_json()
    store = Cache.of_user()
    known = store.find(question) if cache else None
    if known is not None:
        return msgspec.convert(known, WorkerResult).compiled(request.mesh, cached=True)
    output = ask_worker(request, timeout_s=timeout_s, on_progress=on_progress)
    if output.answer is None or output.answer.result is None:
        raise output.failure
    if cache:
        store.keep(question, msgspec.to_builtins(output.answer.result), output.answer.sources)
    return output.answer.result.compiled(request.mesh, cached=False)


@dataclass(frozen=True, kw_only=True)
class WorkerOutput:
    """Output of a worker: its ``answer``, None if it was terminated, its ``log`` and its last ``phase``."""

    program: str
    answer: WorkerAnswer | None
    log: str
    exit_status: int
    phase: str

    @property
    def failure(self) -> RooftopError:
        """The error of the answer; without an answer the reason that the log has."""
        if self.answer is not None and (error := self.answer.error) is not None:
            return RooftopError(error.field, error.given, error.accepted)
        end = f"its compiler ended while {self.phase}, {last_words(self.log, self.exit_status)}"
        return RooftopError("program", self.program, f"one that XLA compiles ({end})")


#: The prefix of a line in which a library of Google's ends its process: 'F1128 12:28:02.869569   19582 '.
_FATAL = re.compile(r"F\d{4} [\d:.]+ +\d+ ")
#: Lines that say where a process was, not why it ended, and lines that libtpu writes whenever it is loaded.
_PLACES = re.compile(
    r"\s*@ +0x|PC: @|\*\*\* |https?://symbolize|[EWI]\d{4} .*(\] RAW: |TPU_WORKER_HOSTNAMES)|=== Source|learning/|"
    r"\S+\.cc:\d+$|Current thread|Thread 0x|\s*File \"|\s*<no Python frame>|Python runtime state|Extension modules|"
    r"WARNING: Logging before|Failed to find host bounds"
)


def last_words(log: str, exit_status: int) -> str:
    """Return, in one line, how a process ended and the line of its ``log`` that says why.

    That line is the first fatal one, or the last one that is no part of a stack trace.
    """
    how = f"status {exit_status}"
    if exit_status < 0:
        how = f"signal {-exit_status} ({signal.Signals(-exit_status).name})"
    lines = [line.strip() for line in log.splitlines() if line.strip() and not _PLACES.match(line)]
    fatal = [_FATAL.sub("", line) for line in lines if _FATAL.match(line) or "Check failed" in line]
    unsaid = "killed, as where memory is short" if exit_status == -signal.SIGKILL else "it printed no reason"
    return f"{how}: {(fatal[:1] or lines[-1:] or [unsaid])[0]}"


def ask_worker(
    request: CompileRequest,
    *,
    timeout_s: float | None = None,
    on_progress: Progress | None = None,
    environment: Mapping[str, str] | None = None,
) -> WorkerOutput:
    """Compile in a new worker, with ``environment`` in addition to libtpu's. Raises RooftopError after a timeout."""
    with scratch_folder("rooftop-compile-") as folder:
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
                wait_for(worker, folder / "phase", timeout_s, on_progress or (lambda phase, elapsed_s: None))
            except subprocess.TimeoutExpired:
                raise RooftopError("timeout_s", timeout_s, f"longer than compiling {request.program} takes") from None
            finally:
                worker.kill()
                worker.communicate()
        return WorkerOutput(
            program=request.program,
            answer=msgspec.json.decode(answer.read_bytes(), type=WorkerAnswer) if answer.exists() else None,
            log=log.read_text(encoding="utf-8", errors="replace"),
            exit_status=worker.returncode,
            phase=_phase(folder / "phase"),
        )


def wait_for(worker: subprocess.Popen[bytes], phase: Path, timeout_s: float | None, on_progress: Progress) -> None:
    """Wait until a process has ended; the file ``phase`` has its phase.

    Raises TimeoutExpired when it takes longer than ``timeout_s``.
    """
    start = time.monotonic()
    while True:
        elapsed_s = time.monotonic() - start
        on_progress(_phase(phase), elapsed_s)
        left_s = _TICK_S if timeout_s is None else min(_TICK_S, timeout_s - elapsed_s)
        try:
            worker.wait(timeout=max(0.0, left_s))
            return
        except subprocess.TimeoutExpired:
            if timeout_s is not None and time.monotonic() - start >= timeout_s:
                raise


def _phase(file: Path) -> str:
    return file.read_text(encoding="utf-8") if file.exists() else PHASES[0]
