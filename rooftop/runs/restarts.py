"""Supervision of a run: its processes are started, watched, and started again from the newest checkpoint.

A supervisor on each host has the worker of its process. The supervisor of process 0 leads: the others connect to it,
with a key that lies in the run's folder. It forms a generation of the processes that are there, and ends all of it
when one is lost or hangs. If some stay away the next generation has fewer processes, where the mesh allows; once all
are back it saves, and goes on with all.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import queue
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from rooftop.core.errors import RooftopError
from rooftop.core.files import make_folder
from rooftop.runs.beats import ProcessBeat, start_beating
from rooftop.runs.supervise import OURS, RESTARTED, WORKER, is_stopped
from rooftop.runs.vigil import Vigil

#: Seconds that a generation waits for processes that were lost, before it goes on without them.
_GRACE_S = 10.0
#: Seconds between signs of life of a supervisor, and without one until it counts as lost.
_ALIVE_S, _SILENT_S = 2.0, 30.0
#: Seconds that a supervisor looks for its lead.
_PATIENCE_S = 600.0
#: Longest pause before a restart, in seconds.
_LONGEST_PAUSE_S = 30.0
_HELLO_S = 10.0
#: Axes by which a smaller mesh has fewer devices: first those that change no matmul.
_SHRINKING = ("data", "fsdp", "expert", "context", "tensor", "stage")
_KEY_FILE = ".supervisor"
#: The file of a run that says what its processes did when they hung.
HANGS = "hangs.jsonl"


@dataclass(frozen=True, kw_only=True)
class Supervision:
    """A run under supervision: the ``arguments`` of its workers, without those of processes and mesh.

    ``process`` is the one that this supervisor has; None: all ``processes`` are here. The lead listens at ``host`` and
    ``port`` (0: any). ``axes`` is the mesh of all processes; None: it follows from the devices. ``max_restarts`` is the
    number of restarts without a new checkpoint between them.
    """

    arguments: tuple[str, ...]
    run: Path
    processes: int
    process: int | None
    host: str
    port: int
    axes: Mapping[str, int] | None
    max_restarts: int
    quiet: bool = False

    @property
    def resume(self) -> str:
        """The command that resumes the run."""
        return f"rooftop train --resume {shlex.quote(str(self.run))}"

    def newest(self) -> int:
        """The step of the newest checkpoint, 0 if there is none."""
        try:
            names = os.listdir(self.run / "checkpoints")
        except OSError:
            return 0
        return max((int(name) for name in names if name.isdecimal()), default=0)


def mesh_for(axes: Mapping[str, int] | None, processes: int, left: int) -> str | None:
    """The mesh of ``left`` of all ``processes``, as --mesh takes it; None where it follows from the devices.

    One axis shrinks with the number of processes. Raises ValueError if none divides.
    """
    if axes is None:
        return None
    sizes = dict(axes)
    if left != processes:
        for name in _SHRINKING:
            size = sizes.get(name, 1)
            if size > 1 and size * left % processes == 0:
                sizes[name] = size * left // processes
                break
        else:
            raise ValueError(f"no axis of {_written(sizes)} shrinks to {left} of {processes} processes")
    return _written(sizes)


def _written(axes: Mapping[str, int]) -> str:
    return ",".join(f"{name}={size}" for name, size in axes.items())


class _Connection:
    """Lines of JSON over a socket."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._lock = threading.Lock()
        self.lines = connected.makefile("rb")

    def send(self, **message: Any) -> None:
        """Send a message. A lost peer is noticed by its reader."""
        with self._lock, contextlib.suppress(OSError):
            self._socket.sendall(json.dumps(message).encode() + b"\n")

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


@dataclass(frozen=True, kw_only=True)
class _End:
    """The end of a worker: ``killed`` by its supervisor, or with ``status``, below zero for a signal, and ``line``."""

    process: int
    status: int
    killed: bool
    line: str

    def __str__(self) -> str:
        if self.status >= 0:
            return f"process {self.process} ended with status {self.status}"
        return f"process {self.process} was ended by {signal.Signals(-self.status).name}"


@dataclass
class _Lead:
    """The supervisor that decides. ``members`` are the connections of supervisors by process."""

    of: Supervision
    listening: socket.socket
    key: str
    members: dict[int, _Connection] = field(default_factory=dict)
    events: queue.Queue[tuple[str, int, Any]] = field(default_factory=queue.Queue)
    stopping: bool = False
    _heard: dict[int, float] = field(default_factory=dict)
    _stopped: dict[int, bool] = field(default_factory=dict)

    def accept(self) -> None:
        """Take connections until the socket is closed."""
        while True:
            try:
                connected, _ = self.listening.accept()
            except OSError:
                return
            threading.Thread(target=self._greet, args=(connected,), daemon=True).start()

    def _greet(self, connected: socket.socket) -> None:
        connected.settimeout(_HELLO_S)
        connection, process = _Connection(connected), -1
        try:
            hello = json.loads(connection.lines.readline(4096))
            process = int(hello["process"])
            if not hmac.compare_digest(str(hello["key"]), self.key) or not 0 <= process < self.of.processes:
                raise ValueError
            connected.settimeout(None)
        except (OSError, ValueError, KeyError, TypeError):
            connection.close()
            return
        self.events.put(("hello", process, connection))
        with contextlib.suppress(OSError, ValueError):
            for line in connection.lines:
                message = json.loads(line)
                self.events.put((message.pop("kind"), process, message))
        self.events.put(("gone", process, connection))

    def lead(self) -> None:
        """Form one generation after another until the run ends; then tell all supervisors the status."""
        generation = failures = 0
        newest, fewer = self.of.newest(), True
        while True:
            members = self._gather(fewer=fewer and generation > 0)
            if self.stopping:
                return self._finish(0)
            generation += 1
            reason, end = self._generation(generation, members)
            if end is not None and len(members) < self.of.processes:
                self._say(f"{len(members)} of {self.of.processes} processes cannot go on: {end.line or end}")
                fewer = False
                continue
            if end is not None:
                return self._finish(end.status)
            if not reason:
                return self._finish(0)
            if reason == _BACK:
                continue
            step = self.of.newest()
            failures, newest = 1 if step > newest else failures + 1, step
            if self.stopping:
                return self._finish(1)
            if failures > self.of.max_restarts:
                self._say(f"{reason}; {self.of.max_restarts} restarts without a new checkpoint; {self.of.resume}")
                return self._finish(1)
            self._say(f"{reason}; restart {failures} of at most {self.of.max_restarts}, after step {step}")
            time.sleep(min(2.0 ** (failures - 1) - 1, _LONGEST_PAUSE_S))

    def _gather(self, *, fewer: bool) -> list[int]:
        """Wait for all processes; with ``fewer``, after a while for as many as have a mesh."""
        since = said_at = time.monotonic()
        while not self.stopping:
            self._take_events()
            missing = [process for process in range(self.of.processes) if process not in self.members]
            if not missing:
                break
            now = time.monotonic()
            if fewer and self.members and now - since > _GRACE_S:
                with contextlib.suppress(ValueError):
                    mesh = mesh_for(self.of.axes, self.of.processes, len(self.members))
                    self._say(f"going on without process {', '.join(map(str, missing))}: mesh {mesh or 'of the rest'}")
                    break
            if now - said_at > 60:
                said_at = now
                self._say(f"waiting for process {', '.join(map(str, missing))}")
        return sorted(self.members)

    def _take_events(self) -> tuple[str, int, Any] | None:
        """Take one event; those of connections are handled here."""
        try:
            kind, process, message = self.events.get(timeout=0.5)
        except queue.Empty:
            now = time.monotonic()
            for silent in [process for process, at in self._heard.items() if now - at > _SILENT_S]:
                self.members[silent].close()
            return None
        self._heard[process] = time.monotonic()
        if kind == "hello":
            if (before := self.members.get(process)) is not None:
                before.close()
            self.members[process] = message
        elif kind == "gone":
            if self.members.get(process) is not message:
                return None
            del self.members[process], self._heard[process]
        elif kind == "alive":
            self._stopped[process] = bool(message["stopped"])
        elif kind == "stop":
            self.stopping = True
        return kind, process, message

    def _generation(self, generation: int, members: list[int]) -> tuple[str, _End | None]:
        """Run one generation to its end. Returns the reason to begin another, or the end of a worker that refuses."""
        with socket.socket() as free:
            free.bind((self.of.host, 0))
            port = free.getsockname()[1]
        mesh = mesh_for(self.of.axes, self.of.processes, len(members))
        vigil, running, ends = Vigil(time.monotonic), set(members), list[_End]()
        reason, killed, saving = "", False, False
        for rank, process in enumerate(members):
            vigil.start(process)
            where = f"{self.of.host}:{port}"
            self.members[process].send(
                kind="start", generation=generation, rank=rank, count=len(members), coordinator=where, mesh=mesh
            )
        while running:
            event = self._take_events()
            if event is not None:
                kind, process, message = event
                if kind in ("gone", "hello") and process in running:
                    running.discard(process)
                    vigil.forget(process)
                    reason = reason or f"the supervisor of process {process} is lost"
                elif kind == "beat" and process in running and message["generation"] == generation:
                    vigil.take(process, ProcessBeat(**message["beat"]))
                elif kind == "ended" and process in running and message["generation"] == generation:
                    running.discard(process)
                    vigil.forget(process)
                    end = _End(process=process, **{name: message[name] for name in ("status", "killed", "line")})
                    ends.append(end)
                    if end.status != 0 and not end.killed:
                        # JAX aborts a process that has lost another, which may only be stopped.
                        aborted = end.status == -signal.SIGABRT
                        stopped = vigil.stopped(self._stopped) if aborted else None
                        reason = reason or stopped or str(end)
            if not reason and not saving and (problem := vigil.problem(self._stopped)):
                reason = problem
                self._keep_report(problem, vigil)
            if reason and not killed:
                killed = True
                for process in running:
                    self.members[process].send(kind="kill")
            if not saving and not reason and len(members) < len(self.members) == self.of.processes:
                saving = True
                self._say("all processes are back: saving, to go on with all of them")
                self.members[members[0]].send(kind="save")
        own = [end for end in ends if end.status != 0 and not end.killed]
        # What one process met, the others report as a loss.
        for end in own:
            if end.status in (1, 2):
                return "", end
        signalled = [end for end in own if end.status < 0 and end.status != -signal.SIGABRT]
        if signalled and own[0] is not signalled[0] and reason == str(own[0]):
            reason = str(signalled[0])
        return reason or (_BACK if saving else ""), None

    def _keep_report(self, problem: str, vigil: Vigil) -> None:
        """Append what all processes said last to a file of the run: their steps, collectives and stacks."""
        line = json.dumps({"unix_s": time.time(), "problem": problem, "processes": vigil.report()})
        # A disk that fails keeps no run from going on.
        with contextlib.suppress(OSError), open(self.of.run / HANGS, "a", encoding="utf-8") as file:
            file.write(line + "\n")

    def _finish(self, status: int) -> None:
        for connection in self.members.values():
            connection.send(kind="finish", status=status)

    def _say(self, line: str) -> None:
        _write(sys.stderr, f"rooftop: {line}\n".encode())


#: The reason of a generation that ended for one with all processes.
_BACK = "all processes are back"
_OUTPUT = threading.Lock()


def _write(stream: TextIO, line: bytes) -> None:
    with _OUTPUT, contextlib.suppress(OSError, ValueError):
        stream.buffer.write(line)
        stream.buffer.flush()


@dataclass
class _Agent:
    """The supervisor of one process: it starts and ends the worker as the lead says."""

    of: Supervision
    process: int
    address: tuple[str, int]
    status: int | None = None
    _worker: subprocess.Popen[bytes] | None = None
    _killed: bool = False
    _ending: bool = False
    _connection: _Connection | None = None
    _stdout: list[bytes] = field(default_factory=list)

    def run(self) -> None:
        """Connect to the lead and follow it, until it says that the run has ended."""
        since = time.monotonic()
        while self.status is None:
            try:
                connected = socket.create_connection(self.address, timeout=_HELLO_S)
                key = (self.of.run / _KEY_FILE).read_text(encoding="utf-8")
            except OSError:
                if self._ending or time.monotonic() - since > _PATIENCE_S:
                    line = f"rooftop: process {self.process} cannot reach process 0 at {self.address[0]}"
                    _write(sys.stderr, f"{line}; {self.of.resume}\n".encode())
                    self.status = 1
                    return
                time.sleep(0.5)
                continue
            connected.settimeout(None)
            self._connection = _Connection(connected)
            self._connection.send(kind="hello", process=self.process, key=key)
            threading.Thread(target=self._say_alive, args=(self._connection,), daemon=True).start()
            with contextlib.suppress(OSError, ValueError):
                for text in self._connection.lines:
                    self._follow(json.loads(text))
                    since = time.monotonic()
            self.kill()
            self._connection.close()

    def _follow(self, message: dict[str, Any]) -> None:
        match message["kind"]:
            case "start":
                self._start(message)
            case "kill":
                self.kill()
            case "save" if self._worker is not None:
                self._stdout.clear()
                self._worker.send_signal(signal.SIGTERM)
            case "finish":
                self.status = message["status"]
                _write(sys.stdout, b"".join(self._stdout))
                assert self._connection is not None
                self._connection.close()

    def terminate(self) -> None:
        """Have the run save and end."""
        self._ending = True
        if self._connection is not None:
            self._connection.send(kind="stop")
        worker = self._worker
        if worker is not None and worker.poll() is None:
            worker.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End the worker, also one that is stopped."""
        worker = self._worker
        if worker is not None and worker.poll() is None:
            self._killed = True
            worker.kill()

    def _say_alive(self, connection: _Connection) -> None:
        while self.status is None and connection is self._connection:
            worker = self._worker
            connection.send(kind="alive", stopped=worker is not None and is_stopped(worker.pid))
            time.sleep(_ALIVE_S)

    def _start(self, message: dict[str, Any]) -> None:
        extra = [] if message["mesh"] is None else ["--mesh", message["mesh"]]
        if self.of.processes > 1:
            extra += ["--coordinator", message["coordinator"], "--processes", str(message["count"])]
            extra += ["--process", str(message["rank"])]
        self._killed = False
        worker, beats = start_beating(
            ("-m", "rooftop", *self.of.arguments, *extra),
            environment={WORKER: str(os.getpid()), RESTARTED: "1"},
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        self._worker = worker
        threading.Thread(target=self._watch, args=(worker, beats, message["generation"]), daemon=True).start()

    def _watch(self, worker: subprocess.Popen[bytes], beats: Iterator[ProcessBeat], generation: int) -> None:
        """Pass on what a worker writes, as it comes, and its beats; then its end."""
        lines = list[bytes]()
        # Several processes write to one terminal: each line says whose it is.
        mark = b"" if self.of.process is not None or self.of.processes == 1 else f"[{self.process}] ".encode()
        connection = self._connection
        assert connection is not None and worker.stdout is not None and worker.stderr is not None
        output, errors = worker.stdout, worker.stderr

        def copy_stdout() -> None:
            for line in output:
                if self.of.quiet:
                    self._stdout.append(line)
                else:
                    _write(sys.stdout, line)

        def copy_stderr() -> None:
            for line in errors:
                if line.startswith(OURS):
                    lines.append(line)
                _write(sys.stderr, mark + line)

        def copy_beats() -> None:
            for beat in beats:
                connection.send(kind="beat", generation=generation, beat=vars(beat))

        threads = [threading.Thread(target=target, daemon=True) for target in (copy_stdout, copy_stderr, copy_beats)]
        for thread in threads:
            thread.start()
        status = worker.wait()
        for thread in threads:
            thread.join(5.0)
        line = lines[-1].decode(errors="replace").strip() if lines else ""
        connection.send(kind="ended", generation=generation, status=status, killed=self._killed, line=line)


def keep_running(of: Supervision) -> int:
    """Supervise the processes of a run that are here until it ends. Returns the exit status.

    SIGTERM and SIGINT save the run and end it. Raises RooftopError if the lead cannot listen.
    """
    lead: _Lead | None = None
    address = (of.host, of.port)
    if of.process in (None, 0):
        key = secrets.token_hex(16)
        try:
            make_folder(of.run)
            file = of.run / _KEY_FILE
            file.unlink(missing_ok=True)
            with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as written:
                written.write(key)
            listening = socket.create_server(address)
        except OSError as error:
            accepted = f"HOST:PORT of this process, and a folder that can be written ({error.strerror})"
            raise RooftopError("coordinator", f"{of.host}:{of.port}", accepted) from None
        address = listening.getsockname()[:2]
        lead = _Lead(of=of, listening=listening, key=key)
        threading.Thread(target=lead.accept, daemon=True).start()
    agents = [_Agent(of, process, address) for process in (range(of.processes) if of.process is None else [of.process])]

    def on_signal(number: int, frame: FrameType | None) -> None:
        for agent in agents:
            agent.terminate()

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
    threads = [threading.Thread(target=agent.run, daemon=True) for agent in agents]
    if lead is not None:
        threads.append(threading.Thread(target=lead.lead, daemon=True))
    try:
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            for thread in threads:
                thread.join(0.2)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for agent in agents:
            agent.kill()
        if lead is not None:
            lead.listening.close()
            (of.run / _KEY_FILE).unlink(missing_ok=True)
    return max(agent.status or 0 for agent in agents)
