"""The process of a script on a target: ``python -m rooftop.target.child REQUEST ANSWER PIPE``.

It runs the script as Python would, with a described slice in the place of JAX's devices, and writes the answer. Next to
it is a file for each program that was compiled, for a caller that gets no answer. The process ends when the file
descriptor PIPE is closed, which happens when its caller ends.
"""

from __future__ import annotations

import itertools
import json
import os
import runpy
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from rooftop.compiler.compiling import RequestError
from rooftop.core.errors import RooftopError
from rooftop.hardware import Slice
from rooftop.target.places import calling_place, raising_place
from rooftop.target.private import require_known_jax
from rooftop.target.records import Ending, ScriptError, ScriptRun


@dataclass(frozen=True, kw_only=True)
class ScriptRequest:
    """A script for a target: a file, a ``module`` or ``code``, with its ``arguments``.

    Of ``script``, ``module`` and ``code`` one is set. ``steps`` and ``min_flops`` are those of a session, ``options``
    are added to those that the script gives the compiler.
    """

    slice: str
    arguments: tuple[str, ...]
    script: str | None = None
    module: str | None = None
    code: str | None = None
    steps: int | None
    min_flops: float | None
    cache: bool
    options: Mapping[str, bool | int | str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ScriptAnswer:
    """The file that the process writes: a ``run``, or an ``error`` of the request."""

    run: ScriptRun | None = None
    error: RequestError | None = None


def main(question: Path, answer: Path, pipe: int) -> None:
    """Read a request, run the script, write the answer."""
    threading.Thread(target=_end_with_caller, args=(pipe,), daemon=True).start()
    request = msgspec.convert(json.loads(question.read_text(encoding="utf-8")), ScriptRequest)
    try:
        result = ScriptAnswer(run=_run(request, answer))
    except RooftopError as wrong:
        result = ScriptAnswer(error=RequestError(field=wrong.field, given=wrong.given, accepted=wrong.accepted))
    _finish(answer, result)


def _finish(answer: Path, result: ScriptAnswer) -> NoReturn:
    """Write the answer, and end."""
    sys.stdout.flush()
    sys.stderr.flush()
    _write(answer, msgspec.json.encode(result, enc_hook=str))
    # The devices are not there to be given back, and threads of the script may wait for ever.
    _EXIT(0)


def _run(request: ScriptRequest, answer: Path) -> ScriptRun:
    require_known_jax()
    from rooftop.target.session import Finished, Session, SessionOptions

    phase, numbers = answer.with_name("phase"), itertools.count()
    _write(phase, b"describing")
    options = SessionOptions(steps=request.steps, min_flops=request.min_flops, cache=request.cache)
    session = Session(
        slice=Slice.parse(request.slice),
        options=options,
        on_compile=lambda name: _write(phase, f"compiling {name}".encode()),
        on_program=lambda program: _write(
            answer.with_name(f"{PROGRAM}{next(numbers):06}.json"), msgspec.json.encode(program, enc_hook=str)
        ),
    )
    start = time.monotonic()
    session.start()
    variables = {name: os.environ.get(name) for name in _READ_ONCE}
    _write(phase, b"running")

    def ended(ending: Ending, error: ScriptError | None = None) -> ScriptRun:
        seconds = time.monotonic() - start
        notes = tuple(
            f"the script sets {name}, which is read before it starts: set it for rooftop compile"
            for name, value in variables.items()
            if os.environ.get(name) != value
        )
        record = replace(session.record, notes=(*session.record.notes, *notes))
        return ScriptRun(record=record, ending=ending, seconds=seconds, error=error)

    def exited(status: object, place: str) -> ScriptRun:
        if status in (None, 0):
            return ended("end")
        return ended("error", ScriptError(kind="exit", message=str(status), place=place))

    own = os.getpid()

    def leave(status: int) -> NoReturn:
        # Processes that the script has forked end in this way too.
        if os.getpid() == own:
            _finish(answer, ScriptAnswer(run=exited(status, calling_place())))
        _EXIT(status)

    os._exit = leave
    try:
        with session.compiling_with(request.options):
            _execute(request)
    except Finished:
        return ended("steps")
    except SystemExit as status:
        return exited(status.code, raising_place(status))
    except BaseException as raised:
        _print_traceback(raised)
        message = (str(raised).splitlines() or [""])[0]
        return ended("error", ScriptError(kind=type(raised).__name__, message=message, place=raising_place(raised)))
    return ended("end")


#: The name of a file with a program begins with it.
PROGRAM = "program-"
#: Scripts call the same function to end without Python's cleanup.
_EXIT = os._exit
#: Variables that XLA and libtpu read when they are loaded, which is before the script runs.
_READ_ONCE = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")


def _execute(request: ScriptRequest) -> None:
    """Run the script as ``python`` does, as ``__main__``."""
    if request.script is not None:
        sys.argv = [request.script, *request.arguments]
        sys.path[0] = str(Path(request.script).resolve().parent)
        runpy.run_path(request.script, run_name="__main__")
        return
    # Python puts the working directory first for modules and code.
    sys.path[0] = os.getcwd()
    if request.module is not None:
        sys.argv = [request.module, *request.arguments]
        runpy.run_module(request.module, run_name="__main__", alter_sys=True)
        return
    sys.argv = ["-c", *request.arguments]
    exec(compile(request.code or "", "<string>", "exec"), {"__name__": "__main__", "__builtins__": __builtins__})


def _print_traceback(error: BaseException) -> None:
    """The traceback as Python prints it, from the script's own first line on."""
    frames: Any = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        frames = frames.tb_next
    # A script that cannot be read has no line of its own.
    traceback.print_exception(type(error), error, frames)


def _end_with_caller(pipe: int) -> None:
    os.read(pipe, 1)
    _EXIT(1)


def _write(path: Path, data: bytes) -> None:
    unfinished = path.with_suffix(".tmp")
    unfinished.write_bytes(data)
    os.replace(unfinished, path)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
