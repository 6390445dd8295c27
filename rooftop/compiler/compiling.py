"""Compile a program ahead of time with XLA:TPU, in a process of its own.

libtpu wants its environment before JAX is imported and keeps a process for one use, so the caller stays without it: a
worker reads a request from a file and writes the result to another, whole or not at all.
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

#: What libtpu needs to compile with no TPU: no look-up of the machine, and more than one process at a time.
ENVIRONMENT: Mapping[str, str] = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
#: What a worker does, in order: it starts (JAX is imported), has libtpu describe the slice, traces and lowers the
#: program, compiles it, and reads the compiler's reports.
PHASES: tuple[str, ...] = ("starting", "describing", "lowering", "compiling", "reading")
#: How often the caller hears of progress.
_TICK_S = 0.25

#: Told the phase and the seconds since the beginning.
Progress = Callable[[str, float], None]


@dataclass(frozen=True, kw_only=True)
class CompileRequest:
    """What to compile, and for which devices.

    ``program`` is 'module:function'. The function takes a jax Mesh and ``arguments`` (JSON) and returns a
    ``jax.stages.Lowered``. ``options`` are compiler options: booleans as Python ones, except for those of XLA's that
    take 'true' and 'false'. ``save`` asks for the executable, to be loaded where the devices are.
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
    """What the compiler made of a request. Bytes are those of one device.

    ``peak_bytes`` is XLA's own figure and ``memory`` has those of which it is made; ``at_peak`` says what is alive then
    (None where the compiler left no report). ``versions`` are those of jax, jaxlib and libtpu. ``executable`` is there
    if the request asked for it, see ``rooftop.compiler.worker``; ``cached`` says that nothing was compiled just now.
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
        """What a worker's result says."""
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
        # A worker needs no reader, so that its answer holds although a reader has changed.
        from rooftop.compiler.ledger import read_ledger

        return read_ledger(self.module, self.mesh.shape, self.mesh)


def require_compiler() -> None:
    """Raise RooftopError where JAX, libtpu or optax is not installed."""
    for package in ("jax", "libtpu", "optax"):
        if find_spec(package) is None:
            accepted = "a Python that has it, for XLA:TPU without a TPU: pip install 'rooftop[compile]' (Linux)"
            raise RooftopError(package, "not installed", accepted)


def compile_ahead_of_time(
    request: CompileRequest, *, timeout_s: float | None = None, cache: bool = True, on_progress: Progress | None = None
) -> Compiled:
    """Compile ``request`` in a worker process and wait for it, unless the ``cache`` has the answer.

    ``on_progress`` is called a few times a second. Raises OutOfMemory (an Infeasible) when the program does not fit in
    HBM, RooftopError when the request is wrong, the compiler refuses the program, or it takes longer than
    ``timeout_s``. The worker ends with the call, however that ends, and with this process.
    """
    require_compiler()
    asked = request.to_json()
    store = Cache.of_user()
    result = store.find(asked) if cache else None
    found = result is not None
    if result is None:
        said = ask_worker(request, timeout_s=timeout_s, on_progress=on_progress)
        if said.answer is None:
            raise said.failure
        if "error" in said.answer:
            raise RooftopError(**said.answer["error"])
        result = said.answer["result"]
        if cache:
            store.keep(asked, result, said.answer["sources"])
    return read_result(request, result, cached=found)


def read_result(request: CompileRequest, result: Mapping[str, Any], *, cached: bool) -> Compiled:
    """A worker's result. Raises OutOfMemory, or Infeasible, where that is why there is no program."""
    if "out_of_memory" in result:
        raise OutOfMemory.from_json(result["out_of_memory"])
    if "infeasible" in result:
        raise Infeasible(**result["infeasible"])
    return Compiled.from_json(request.mesh, result, cached=cached)


@dataclass(frozen=True, kw_only=True)
class Said:
    """What a worker left: its ``answer`` and its ``log``.

    An answer is a result and the sources that it depends on, or an error; a worker that was ended has none.
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
) -> Said:
    """Have a new worker compile, with ``environment`` beside what libtpu needs. Raises RooftopError after a timeout."""
    with tempfile.TemporaryDirectory(prefix="rooftop-compile-") as name:
        folder = Path(name)
        question, answer, log = folder / "request.json", folder / "result.json", folder / "log"
        question.write_text(json.dumps(request.to_json()), encoding="utf-8")
        with log.open("w", encoding="utf-8") as output:
            worker = subprocess.Popen(
                [sys.executable, "-m", "rooftop.compiler.worker", str(question), str(answer)],
                env={**os.environ, **ENVIRONMENT, **(environment or {})},
                # The worker reads it to the end, which comes when this process does.
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                # Ctrl-C in a terminal reaches this process alone, which ends the worker below.
                start_new_session=True,
            )
            try:
                _wait(worker, folder / "phase", timeout_s, on_progress or (lambda phase, elapsed_s: None))
            except subprocess.TimeoutExpired:
                raise RooftopError("timeout_s", timeout_s, f"longer than compiling {request.program} takes") from None
            finally:
                worker.kill()
                worker.communicate()
        return Said(
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
