"""The worker process and the cache of its answers: what is kept, for how long, and that nothing is left running."""

from __future__ import annotations

import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rooftop.arrays import AXES, Mesh
from rooftop.compiler import cache as cache_module
from rooftop.compiler.cache import Cache, digest
from rooftop.compiler.compiling import (
    ENVIRONMENT,
    PHASES,
    CompileRequest,
    ask_worker,
    compile_ahead_of_time,
    last_words,
)
from rooftop.compiler.memory import OutOfMemory
from rooftop.compiler.worker import header, load, pack
from rooftop.core.errors import Infeasible, RooftopError
from rooftop.hardware import Slice

MESH = Mesh(Slice.parse("v5e:1x1"), dict.fromkeys(AXES, ()))


# ---- programs that the worker compiles ------------------------------------------------------------------------------


def multiply(mesh: jax.sharding.Mesh, arguments: Mapping[str, Any]) -> jax.stages.Lowered:
    """A square matmul of ``size``."""
    shape = jax.ShapeDtypeStruct((arguments["size"], arguments["size"]), jnp.bfloat16)
    with jax.set_mesh(mesh):
        return jax.jit(lambda x, w: x @ w).lower(shape, shape)


def stay(mesh: jax.sharding.Mesh, arguments: Mapping[str, Any]) -> jax.stages.Lowered:
    """Tell who compiles, then wait for ever."""
    Path(arguments["tell"]).write_text(str(os.getpid()))
    threading.Event().wait()
    raise AssertionError


def refuse(mesh: jax.sharding.Mesh, arguments: Mapping[str, Any]) -> jax.stages.Lowered:
    """A program that knows that its answer is no."""
    raise Infeasible("seven heads on four devices", "one too few")


def abort(mesh: jax.sharding.Mesh, arguments: Mapping[str, Any]) -> jax.stages.Lowered:
    """End as the compiler does where it finds a fault of its own: a reason, then a stack, then SIGABRT."""
    os.write(2, ABORTED.encode())
    os.kill(os.getpid(), signal.SIGABRT)
    raise AssertionError


def fail(mesh: jax.sharding.Mesh, arguments: Mapping[str, Any]) -> jax.stages.Lowered:
    """End with a traceback that the worker does not expect."""
    raise KeyboardInterrupt("a stray signal")


ABORTED = """\
WARNING: Logging before InitGoogle() is written to STDERR
E0000 00:00:1795868863.095427   19582 common_lib.cc:860] INVALID_ARGUMENT: env var TPU_WORKER_HOSTNAMES
F1128 12:28:01.812570   19582 fusion_emitter.cc:1234] Check failed: operand_index < operands.size() (3 vs. 3) fusion.7
*** Check failure stack trace: ***
    @     0x7f2f32300137       1888  FailureSignalHandler()
PC: @     0x7f2f54aa8eec  (unknown)  (unknown)
https://symbolize.stripped_domain/r/?trace=7f2f54aa8eec,7f2f54a5a04f&map=
E1128 12:28:03.646078   19582 process_state.cc:794] RAW: Raising signal 6 with default behavior
"""


def request(
    program: str, *, save: bool = False, options: Mapping[str, Any] | None = None, **arguments: Any
) -> CompileRequest:
    """A request for a program of this file."""
    return CompileRequest(
        mesh=MESH, program=f"{__name__}:{program}", arguments=arguments, options=options or {}, save=save
    )


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache, and programs that the worker finds."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]), prepend=":")
    return tmp_path / "rooftop" / "compiled"


def forbid_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    def popen(*_: Any, **__: Any) -> None:
        raise AssertionError("a worker was started")

    monkeypatch.setattr(subprocess, "Popen", popen)


# ---- compiling ------------------------------------------------------------------------------------------------------


def test_what_was_compiled_once_is_not_compiled_again(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    seen: list[tuple[str, float]] = []
    first = compile_ahead_of_time(request("multiply", size=256), on_progress=lambda *now: seen.append(now))
    phases = list(dict.fromkeys(phase for phase, _ in seen))
    assert phases == [phase for phase in PHASES if phase in phases]
    assert [elapsed for _, elapsed in seen] == sorted(elapsed for _, elapsed in seen)
    assert (first.cached, first.executable) == (False, None)
    (entry,) = folder.iterdir()
    sources = json.loads(entry.read_text())["sources"]
    assert {str(Path(__file__)), str(Path(cache_module.__file__))} <= set(sources)
    assert not any("/jax/" in name for name in sources)
    forbid_workers(monkeypatch)
    again = compile_ahead_of_time(request("multiply", size=256))
    assert again.cached
    fields = ("hlo_text", "peak_bytes", "memory", "lower_s", "compile_s", "versions", "at_peak")
    assert all(getattr(again, name) == getattr(first, name) for name in fields)
    for other in (request("multiply", size=512), request("multiply", size=256, options={"xla_x": True})):
        with pytest.raises(AssertionError, match="a worker was started"):
            compile_ahead_of_time(other)
    with pytest.raises(AssertionError, match="a worker was started"):
        compile_ahead_of_time(request("multiply", size=256), cache=False)


def test_out_of_memory_is_an_answer_that_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """By how much, and what would have filled the memory, with the line of the program."""
    asked = request("multiply", size=2**17)
    with pytest.raises(OutOfMemory, match=r"needs 96\.\d\dGiB of the 15\.75GiB of HBM of a device: 80\.\d\dGiB") as no:
        compile_ahead_of_time(asked)
    at_peak = no.value.at_peak
    assert at_peak is not None
    assert at_peak.allocated_bytes == pytest.approx(no.value.needed_bytes, rel=1e-3)
    assert at_peak.peak_bytes == sum(at_peak.by_class.values()) == pytest.approx(3 * 2**35, rel=1e-3)
    result = next(buffer for buffer in at_peak.buffers if buffer.memory_class == "workspace" and buffer.bytes > 2**34)
    assert result.source == f"{__file__}:{multiply.__code__.co_firstlineno + 4}"
    assert {buffer.name for buffer in at_peak.buffers if buffer.memory_class == "other" and buffer.bytes > 2**34} == {
        "w",
        "x",
    }
    forbid_workers(monkeypatch)
    with pytest.raises(OutOfMemory) as again:
        compile_ahead_of_time(asked)
    assert (str(again.value), again.value.at_peak) == (str(no.value), at_peak)


def test_a_programs_own_no_is_an_answer() -> None:
    with pytest.raises(Infeasible, match="seven heads on four devices: one too few"):
        compile_ahead_of_time(request("refuse"))


def test_an_option_that_there_is_not(folder: Path) -> None:
    """A compilation that fails is not cached."""
    with pytest.raises(RooftopError, match=r"program: .*xla_no_such_option"):
        compile_ahead_of_time(request("multiply", size=256, options={"xla_no_such_option": True}))
    assert not [*folder.glob("*")]


def test_a_compiler_that_aborts_says_why(folder: Path) -> None:
    """The reason, the signal and the phase, in one line; no stack."""
    with pytest.raises(RooftopError) as error:
        compile_ahead_of_time(request("abort"))
    assert error.value.accepted == (
        "one that XLA compiles (its compiler ended while lowering, signal 6 (SIGABRT): fusion_emitter.cc:1234] "
        "Check failed: operand_index < operands.size() (3 vs. 3) fusion.7)"
    )
    assert not [*folder.glob("*")]


def test_a_worker_that_raises_says_what() -> None:
    with pytest.raises(
        RooftopError, match=r"while lowering, (status 1|signal 2 \(SIGINT\)): KeyboardInterrupt: a stray"
    ):
        compile_ahead_of_time(request("fail"))


@pytest.mark.parametrize(
    ("log", "status", "words"),
    [
        ("", -9, "signal 9 (SIGKILL): killed, as where memory is short"),
        ("\n \n", 3, "status 3: it printed no reason"),
        ("Traceback:\n  File 'x.py', line 3\nValueError: no number\n", 1, "status 1: ValueError: no number"),
        (
            "F0102 03:04:05.6  7 a.cc:1] first\nF0102 03:04:05.6  7 b.cc:2] second\n",
            -6,
            "signal 6 (SIGABRT): a.cc:1] first",
        ),
        (
            "2026-01-02 a.cc:1] Check failed: ok\nAborted\n",
            -6,
            "signal 6 (SIGABRT): 2026-01-02 a.cc:1] Check failed: ok",
        ),
    ],
)
def test_last_words_are_the_reason(log: str, status: int, words: str) -> None:
    assert last_words(log, status) == words


# ---- the worker -----------------------------------------------------------------------------------------------------


def is_gone(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    return False


def test_an_interrupted_compilation_leaves_no_process(tmp_path: Path) -> None:
    id_file = tmp_path / "process"

    def interrupt(phase: str, elapsed_s: float) -> None:
        if id_file.exists() and id_file.read_text():
            raise KeyboardInterrupt(phase)

    with pytest.raises(KeyboardInterrupt, match="lowering"):
        compile_ahead_of_time(request("stay", tell=str(id_file)), on_progress=interrupt)
    assert is_gone(int(id_file.read_text()))


def test_a_worker_that_has_answered_ends_by_itself() -> None:
    """Its caller still holds the pipe that it watches."""
    output = ask_worker(request("refuse"))
    assert (output.exit_status, "Fatal Python error" in output.log) == (0, False)


def test_a_time_out_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    class Popen(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", Popen)
    with pytest.raises(RooftopError, match=rf"timeout_s: got 0\.0; accepted: longer than compiling {__name__}:stay"):
        compile_ahead_of_time(request("stay", tell=os.devnull), timeout_s=0.0)
    (worker,) = started
    assert is_gone(worker.pid)


def test_a_worker_ends_with_its_caller(tmp_path: Path) -> None:
    question = tmp_path / "request.json"
    question.write_text(json.dumps(request("stay", tell=os.devnull).to_json()))
    command = [sys.executable, "-m", "rooftop.compiler.worker", str(question), str(tmp_path / "result.json")]
    with subprocess.Popen(command, env={**os.environ, **ENVIRONMENT}, stdin=subprocess.PIPE) as worker:
        # Its caller's end of the pipe closes, as it does when that process dies.
        worker.communicate()
    assert worker.returncode == 1
    assert not (tmp_path / "result.json").exists()


# ---- the cache ------------------------------------------------------------------------------------------------------

ASKED = {"program": "rooftop.programs.training.step:lower", "arguments": {"batch": 8}}
RESULT = {"hlo_text": "HloModule", "peak_bytes": 7}


def test_an_answer_holds_while_its_sources_do(tmp_path: Path) -> None:
    store, source = Cache(folder=tmp_path / "cache"), tmp_path / "program.py"
    source.write_text("a = 1\n")
    store.keep(ASKED, RESULT, {str(source): digest(source)})
    assert store.find(ASKED) == RESULT
    source.write_text("a = 2\n")
    assert store.find(ASKED) is None
    source.write_text("a = 1\n")
    assert store.find(ASKED) == RESULT
    source.unlink()
    assert store.find(ASKED) is None


def test_an_answer_is_that_of_one_compiler_and_one_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    store, mine = Cache(folder=tmp_path / "cache"), {"program": "mine:lower"}
    for asked in (ASKED, mine):
        store.keep(asked, RESULT, {})
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_something=true")
    assert store.find(ASKED) is None
    monkeypatch.delenv("LIBTPU_INIT_ARGS")
    with monkeypatch.context() as elsewhere:
        elsewhere.chdir(tmp_path)
        # rooftop's own programs are the same everywhere; another folder may have another module of the same name.
        assert (store.find(ASKED), store.find(mine)) == (RESULT, None)
    version = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "9" if name == "libtpu" else version(name))
    assert store.find(ASKED) is None


@pytest.mark.parametrize(
    "damage", ["", "{", "[]", "null", '{"format": 1}', '{"format": 1, "sources": [], "result": 0}']
)
def test_a_damaged_answer_is_none_and_is_replaced(tmp_path: Path, damage: str) -> None:
    store = Cache(folder=tmp_path)
    store.keep(ASKED, RESULT, {})
    (path,) = tmp_path.iterdir()
    path.write_text(damage)
    assert store.find(ASKED) is None
    store.keep(ASKED, RESULT, {})
    assert store.find(ASKED) == RESULT
    path.write_bytes(b"\xff\xfe")
    assert store.find(ASKED) is None


def test_what_was_not_used_for_longest_makes_room(tmp_path: Path) -> None:
    large = Cache(folder=tmp_path)
    for number in range(4):
        large.keep({"number": number}, RESULT, {})
        os.utime(max(tmp_path.iterdir(), key=lambda path: path.stat().st_mtime_ns), (number, number))
    size = next(tmp_path.iterdir()).stat().st_size
    assert large.find({"number": 0}) == RESULT
    Cache(folder=tmp_path, limit_bytes=3 * size).keep({"number": 4}, RESULT, {})
    stored = [number for number in range(5) if large.find({"number": number})]
    assert stored == [0, 3, 4]


def test_a_cache_that_cannot_be_written_keeps_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = Cache(folder=tmp_path / "file" / "cache")
    store.keep(ASKED, RESULT, {})
    assert store.find(ASKED) is None


# ---- executables ----------------------------------------------------------------------------------------------------


def test_executables_are_stamped() -> None:
    program = compile_ahead_of_time(request("multiply", size=256, save=True))
    assert program.executable is not None
    stamp = header(program.executable)
    assert stamp["versions"] == dict(program.versions)
    assert CompileRequest.from_json(stamp["request"]) == request("multiply", size=256, save=True)
    assert len(program.executable) > 10_000
    other = program.executable.replace(b'"jax": "', b'"jax": "1', 1)
    with pytest.raises(RooftopError, match=r"the versions that compiled it: jax 1"):
        load(other)
    with pytest.raises(RooftopError, match="a file that rooftop compile --save has written"):
        header(b"PK\x03\x04")


def test_an_executable_runs_where_its_devices_are() -> None:
    """On the CPU, which is here."""
    compiled = jax.jit(lambda x: 2 * x).lower(jax.ShapeDtypeStruct((4,), jnp.float32)).compile()
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "libtpu")}
    loaded = load(pack(compiled, request("multiply", size=4), versions), jax.devices()[:1])
    np.testing.assert_array_equal(loaded(jnp.arange(4.0)), 2 * np.arange(4.0))
