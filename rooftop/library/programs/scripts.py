"""JAX programs as they are, on a slice you do not have: a script, a block of Python, and meshes for one function."""

from __future__ import annotations

import os
import re
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from rooftop.compiler.compiling import ENVIRONMENT, require_compiler
from rooftop.core.errors import RooftopError
from rooftop.core.files import write_json, write_text
from rooftop.core.quantities import LARGEST_QUANTITY, parse_quantity
from rooftop.explain.compiled.report import CompiledReport
from rooftop.explain.scripts import ScriptReport
from rooftop.hardware import Slice
from rooftop.library.programs.compiling import CompileResult
from rooftop.library.results import Result, in_answer
from rooftop.present.documents import document
from rooftop.requests.inputs import mesh_on, seconds_of, slice_of
from rooftop.requests.kinds import COUNT_OR_ZERO
from rooftop.requests.likes import AxesLike, CountLike, SliceLike, TimeLike
from rooftop.requests.programs import CheckProgram, Compile
from rooftop.runs.environment import uninterrupted
from rooftop.target.private import require_known_jax
from rooftop.target.records import Ending, ScriptError, ScriptRun
from rooftop.target.running import STEPS, run_script

if TYPE_CHECKING:
    import jax

    from rooftop.arrays import Mesh
    from rooftop.present.document import Document
    from rooftop.target.session import Session


@dataclass(frozen=True, kw_only=True, repr=False)
class ScriptResult(Result):
    """A script, or a block of Python, on a slice: the programs that it compiled."""

    report: ScriptReport
    request: Compile | None = None

    def to_json(self, *, top: int = 20) -> dict[str, object]:
        """Every program with its compilation, and what was not computed; ``top`` operations and buffers of each."""
        return self.report.to_json(top=top) | in_answer(self.request)

    @property
    def rows(self) -> list[dict[str, object]]:
        """A program a row."""
        rows = list[dict[str, object]]()
        for shown in self.report.programs:
            program, compiled = shown.program, shown.report
            rows.append(
                {
                    "program": program.name,
                    "source": program.source,
                    "called_from": program.called_from,
                    "calls": program.calls,
                    "matmul_flops": program.matmul_flops,
                    "fits": shown.shortage is None,
                    "expected_s": shown.expected_s if compiled is not None else None,
                    "peak_bytes": None if compiled is None else compiled.peak_bytes,
                    "differs": "; ".join(program.differs),
                }
            )
        return rows

    @property
    def summary(self) -> str:
        """The verdict on the costliest program."""
        return self.report.verdict

    @property
    def programs(self) -> tuple[CompileResult, ...]:
        """The compilations of the programs that fit and can be read, in the order in which they were compiled."""
        reports = (shown.report for shown in self.report.programs)
        return tuple(CompileResult(report=report) for report in reports if isinstance(report, CompiledReport))

    @property
    def costliest(self) -> CompileResult:
        """The compilation of the program whose calls take longest.

        A script that failed has those that were compiled before. Raises Infeasible if a program does not fit in HBM,
        RooftopError without a program.
        """
        index = self.report.costliest
        compiled = None if index is None else self.report.programs[index].report
        if compiled is None:
            self.raise_if_infeasible()
            raise RooftopError("script", self.report.command, f"one that compiles a program ({self.report.verdict})")
        return CompileResult(report=compiled)

    def raise_if_infeasible(self) -> None:
        """Raise Infeasible if a program does not fit in HBM, RooftopError if the script failed for another reason."""
        for problem in self.report.problems:
            raise problem

    @property
    def document(self) -> Document:
        """The programs, and the costliest one in detail."""
        return document(self.report.record())

    def write_files(self, folder: Path | str) -> None:
        """Write the JSON report and the optimised HLO of every program into a folder."""
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RooftopError("out", str(folder), f"a folder that can be written ({error.strerror})") from None
        write_json(Path(folder) / "report.json", self.to_json())
        for number, program in enumerate(self.report.run.record.programs, start=1):
            if program.result.program is not None:
                name = re.sub(r"\W+", "_", program.name).strip("_") or "program"
                write_text(Path(folder) / f"{number}_{name}.hlo.txt", program.result.program.hlo_text)


def compile_script(
    command: Sequence[str] | str,
    *,
    on: SliceLike,
    steps: CountLike = STEPS,
    min_flops: float | str | None = None,
    timeout: TimeLike | None = None,
    cache: bool = True,
    on_progress: Callable[[str, float], None] | None = None,
) -> ScriptResult:
    """Run your own script on a slice you do not have, and compile its programs with XLA:TPU or XLA:GPU.

    Args:
        command: Words of a command line, 'python train.py --layers 2' or a list of them.
        on: The slice.
        steps: Stop after so many calls of one program; 0 runs the script to its end.
        min_flops: Matmul FLOPs, over all devices, from which a jit is compiled; 0 compiles every program. By default
            1e8, and your own jits whose arguments are split or large.
        timeout: Seconds, or '10m', after which the script is ended.
        cache: Take the answer of an equal program from the cache.
        on_progress: Callback (phase, seconds).

    The script runs in a process of its own; what it prints goes to stderr. Raises RooftopError for a wrong command. A
    script that fails, or a program that does not fit, is in the result: ``raise_if_infeasible`` raises for it.
    """
    words = shlex.split(command) if isinstance(command, str) else [str(word) for word in command]
    request = Compile(words, on=on, steps=steps, min_flops=min_flops, timeout=timeout, cache=cache)
    return script_result(request, on_progress)


def script_result(
    request: Compile | CheckProgram, on_progress: Callable[[str, float], None] | None = None
) -> ScriptResult:
    """Run the script of a request on its slice, and compile its programs."""
    slice_, words = slice_of(request.required_slice()), cast("Sequence[str]", request.program)
    run = run_script(
        words,
        slice_,
        steps=steps_of(request.steps),
        min_flops=flops_of(request.min_flops),
        timeout_s=None if request.timeout is None else seconds_of(request.timeout, "timeout"),
        cache=request.cache,
        on_progress=on_progress,
    )
    report = ScriptReport(slice=slice_, command=shlex.join(words), run=run)
    return ScriptResult(report=report, request=request if isinstance(request, Compile) else None)


def steps_of(steps: CountLike | None) -> int | None:
    """Calls of one program after which a script is stopped; None runs it to its end. Raises RooftopError."""
    return STEPS if steps is None else COUNT_OR_ZERO.read(steps, "steps") or None


def flops_of(text: float | str | None) -> float | None:
    """Matmul FLOPs from which jits are compiled; 0 is a number too. Raises RooftopError, naming ``min-flops``."""
    return None if text is None else parse_quantity(text, "min-flops", largest=LARGEST_QUANTITY, zero=True)


class Target:
    """A slice that JAX takes for its own devices, in a ``with`` statement: see ``rooftop.target``."""

    def __init__(self, slice_: Slice, *, min_flops: float | None, cache: bool) -> None:
        self.slice = slice_
        self._min_flops, self._cache = min_flops, cache
        self._session: Session | None = None
        self._start, self._seconds = 0.0, 0.0
        self._error: ScriptError | None = None

    def __enter__(self) -> Target:
        _prepare(self.slice)
        from rooftop.target.session import Session, SessionOptions

        options = SessionOptions(min_flops=self._min_flops, cache=self._cache)
        self._session = Session(slice=self.slice, options=options)
        self._session.start()
        self._start = time.monotonic()
        return self

    def __exit__(self, kind: object, error: BaseException | None, frames: object) -> None:
        from rooftop.target.places import raising_place

        assert self._session is not None
        self._session.stop()
        self._seconds = time.monotonic() - self._start
        if error is not None:
            message = (str(error).splitlines() or [""])[0]
            self._error = ScriptError(kind=type(error).__name__, message=message, place=raising_place(error))

    @property
    def result(self) -> ScriptResult:
        """The programs that were compiled until now."""
        if self._session is None:
            raise RooftopError("target", "a target that was not entered", "with rooftop.target(...) as target")
        ending: Ending = "end" if self._error is None else "error"
        run = ScriptRun(record=self._session.record, ending=ending, seconds=self._seconds, error=self._error)
        return ScriptResult(report=ScriptReport(slice=self.slice, command="a block of Python", run=run))

    @property
    def programs(self) -> tuple[CompileResult, ...]:
        """The compilations of the programs that fit, in the order in which they were compiled."""
        return self.result.programs


def target(on: SliceLike, *, min_flops: float | str | None = None, cache: bool = True) -> Target:
    """Make a slice you do not have the devices of JAX, in a ``with`` statement.

    Args:
        on: The slice.
        min_flops: Matmul FLOPs, over all devices, from which a jit is compiled; 0 compiles every program. By default
            1e8, and your own jits whose arguments are split or large.
        cache: Take the answer of an equal program from the cache.

    Inside, ``jax.devices()`` is the slice, arrays have a type and a sharding but no memory, and a jit is compiled when
    it is called first. ``result`` has the programs. JAX's caches are cleared at both ends. Raises RooftopError for a
    slice that the compiler does not know, inside another target, and with a JAX whose internals are not known.
    """
    return Target(slice_of(on), min_flops=flops_of(min_flops), cache=cache)


def mesh(
    on: SliceLike, axes: AxesLike | Mesh | None = None, *, layout: str | None = None, auto: bool = False
) -> jax.sharding.Mesh:
    """A JAX mesh over the devices of a slice you do not have, for ``rooftop.inspect`` and ``rooftop.target``.

    Args:
        on: The slice.
        axes: Axes and sizes, 'data=4,model=4', or a Mesh; the slice's own axes x, y, z by default.
        layout: Axes pinned to the torus, 'data=x,model=y'.
        auto: Leave axes to the partitioner, instead of JAX's explicit mode.

    All meshes of a slice are over the same devices, so that one program may use several. Raises RooftopError.
    """
    slice_ = slice_of(on)
    laid = mesh_on(slice_, axes, layout)
    _prepare(slice_)
    from rooftop.explain.compiled.function import device_mesh

    return device_mesh(laid, auto=auto)


def _prepare(slice_: Slice) -> None:
    """Check what is installed, and set what libtpu reads when it is first used."""
    require_compiler(slice_.chip.kind)
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    with uninterrupted():
        require_known_jax()
