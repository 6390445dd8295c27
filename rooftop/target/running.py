"""A user's own script on a target, in a process of its own. This module needs no JAX."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from rooftop.compiler.compiling import ENVIRONMENT, Progress, require_compiler, wait_for
from rooftop.core.errors import RooftopError
from rooftop.core.scratch import scratch_folder
from rooftop.hardware import Slice
from rooftop.target.child import PROGRAM, ScriptAnswer, ScriptRequest
from rooftop.target.records import ScriptError, ScriptRun, TargetProgram, TargetRecord

#: Calls of one program after which a script is stopped, by default.
STEPS = 3
#: Without these libtpu looks for a machine that it is on, and complains that there is none.
_QUIET = {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_ACCELERATOR_TYPE": "v5litepod-16"}
#: Options of Python that take a value as the next word.
_VALUED = ("-X", "-W")
_COMMAND = "python SCRIPT ARGUMENTS, python -m MODULE ARGUMENTS, or python -c CODE"


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command line of Python: the ``interpreter`` with its own options, and what it runs."""

    interpreter: tuple[str, ...]
    arguments: tuple[str, ...]
    script: str | None = None
    module: str | None = None
    code: str | None = None

    @classmethod
    def parse(cls, words: Sequence[str]) -> Command:
        """The command in ``words``. Raises RooftopError for a program that is not Python, and without a script."""
        text = " ".join(words)
        if not words:
            raise RooftopError("command", None, _COMMAND)
        first, rest = words[0], list(words[1:])
        if first.endswith(".py"):
            interpreter, rest = [sys.executable], list(words)
        elif not Path(first).name.startswith("python"):
            raise RooftopError("command", text, _COMMAND)
        elif os.sep in first:
            if shutil.which(first) is None:
                raise RooftopError("command", first, "a Python that is installed")
            interpreter = [first]
        else:
            # A bare python is the one that runs rooftop.
            interpreter = [sys.executable]
        while rest and rest[0].startswith("-") and rest[0] not in ("-m", "-c"):
            count = 2 if rest[0] in _VALUED else 1
            interpreter += rest[:count]
            rest = rest[count:]
        command = cls(interpreter=tuple(interpreter), arguments=())
        if not rest or (rest[0] in ("-m", "-c") and len(rest) < 2):
            raise RooftopError("command", text, _COMMAND)
        if rest[0] == "-m":
            return replace(command, module=rest[1], arguments=tuple(rest[2:]))
        if rest[0] == "-c":
            return replace(command, code=rest[1], arguments=tuple(rest[2:]))
        if not Path(rest[0]).is_file():
            raise RooftopError("script", rest[0], "a Python file that exists")
        return replace(command, script=rest[0], arguments=tuple(rest[1:]))


def run_script(
    words: Sequence[str],
    on: Slice,
    *,
    steps: int | None = STEPS,
    min_flops: float | None = None,
    timeout_s: float | None = None,
    cache: bool = True,
    options: Mapping[str, bool | int | str] | None = None,
    quiet: bool = False,
    on_progress: Progress | None = None,
) -> ScriptRun:
    """Run a Python command line on a described slice until its end, or until a program was called ``steps`` times.

    ``options`` are added to those that the script gives the compiler. What the script prints goes to stderr, or if
    ``quiet`` nowhere. A script that is ended after ``timeout_s``, by a signal or by the system keeps the programs that
    were compiled, with the error. Raises RooftopError for a wrong command or slice, and for such an end before any
    program.
    """
    command = Command.parse(words)
    require_compiler(on.chip.kind)
    request = ScriptRequest(
        slice=on.name,
        script=command.script,
        module=command.module,
        code=command.code,
        arguments=command.arguments,
        steps=steps,
        min_flops=min_flops,
        cache=cache,
        options=dict(options or {}),
    )
    with scratch_folder("rooftop-target-") as folder:
        question, answer = folder / "request.json", folder / "answer.json"
        question.write_bytes(msgspec.json.encode(request))
        # A stderr without a file, such as a notebook's, gets what the script printed when it has ended.
        keeps = not quiet and not _has_descriptor(sys.stderr)
        log = (folder / "log").open("w+", encoding="utf-8", errors="replace") if keeps else None
        output = subprocess.DEVNULL if quiet else sys.stderr.fileno() if log is None else log
        reading, writing = os.pipe()
        # The child reads the pipe until it is closed, which happens when this process ends.
        process = subprocess.Popen(
            [*command.interpreter, "-m", "rooftop.target.child", str(question), str(answer), str(reading)],
            env={**_QUIET, **os.environ, **ENVIRONMENT, "PYTHONPATH": _path()},
            pass_fds=(reading,),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            # Ctrl-C in a terminal reaches this process only, which kills the child below.
            start_new_session=True,
        )
        os.close(reading)
        start, late = time.monotonic(), False
        try:
            wait_for(process, folder / "phase", timeout_s, on_progress or (lambda phase, elapsed_s: None))
        except subprocess.TimeoutExpired:
            late = True
        finally:
            # Processes that the script has started, such as readers of its data, end with it.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            os.close(writing)
            if log is not None:
                log.seek(0)
                sys.stderr.write(log.read())
                log.close()
        if not answer.exists():
            error = _timeout(timeout_s) if late else _end(process.returncode)
            return _cut_short(folder, error, words, time.monotonic() - start)
        result = msgspec.convert(json.loads(answer.read_bytes()), ScriptAnswer)
    if result.run is None:
        assert result.error is not None
        raise RooftopError(result.error.field, result.error.given, result.error.accepted)
    return result.run


def _timeout(timeout_s: float | None) -> ScriptError:
    return ScriptError(kind="timeout", message=f"{timeout_s:g} s", place="")


def _end(status: int) -> ScriptError:
    """The end of a process that wrote no answer."""
    message = f"status {status}" if status >= 0 else f"signal {-status} ({signal.strsignal(-status)})"
    return ScriptError(kind="killed", message=message, place="")


def _cut_short(folder: Path, error: ScriptError, words: Sequence[str], seconds: float) -> ScriptRun:
    """A run without an answer, with the programs in ``folder``. Raises RooftopError if there are none."""
    files = sorted(folder.glob(f"{PROGRAM}*.json"))
    if not files:
        raise error.refusal(" ".join(words))
    programs = tuple(msgspec.convert(json.loads(file.read_bytes()), TargetProgram) for file in files)
    note = "calls are counted up to the first of each program: the script did not end by itself"
    return ScriptRun(
        record=TargetRecord(programs=programs, notes=(note,)), ending="error", seconds=seconds, error=error
    )


def _path() -> str:
    """PYTHONPATH with the folder of this package, for another interpreter."""
    here = str(Path(__file__).parents[2])
    return os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])


def _has_descriptor(stream: object) -> bool:
    try:
        return int(stream.fileno()) >= 0  # type: ignore[attr-defined]
    except (AttributeError, OSError, ValueError):
        return False
