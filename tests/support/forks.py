"""Processes of ``rooftop`` that fork from one that has imported JAX: they start in milliseconds.

Each is a process of its own, with its own devices, signals and output, that can be killed. Run as a program, this file
is the server that they fork from: FORKS SOCKET. It ends when its stdin is closed.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

#: What a training run imports; none of these starts JAX's backend.
IMPORTED = (
    "jax", "jax.numpy", "optax", "orbax.checkpoint", "safetensors", "tokenizers", "rooftop.cli.main",
    "rooftop.cli.train", "rooftop.cli.live", "rooftop.library.training", "rooftop.train.engine",
)  # fmt: skip


#: The environment variable of a function MODULE:NAME that a fork calls before it runs.
BEFORE = "ROOFTOP_TESTS_BEFORE"


class Fork:
    """``rooftop ARGUMENTS`` in a fork, with what tests use of ``subprocess.Popen``."""

    def __init__(self, arguments: Sequence[str], changes: Mapping[str, str], *, shim: bool = False) -> None:
        """``changes`` are environment variables after those of the tests; with ``shim`` those of shim.c have effect."""
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(_server(shim))
        read, write = os.pipe()
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed by communicate)
        message = json.dumps([list(arguments), dict(changes)]).encode()
        socket.send_fds(self._connection, [message], [write, self._errors.fileno()])
        os.close(write)
        self.stdout = os.fdopen(read)
        self.pid = self._receive()
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit status, None if it runs."""
        if self.returncode is None and select.select([self._connection], [], [], 0)[0]:
            self.returncode = self._receive()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, if it runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for the end; return the rest of stdout, and stderr."""
        with self.stdout, self._connection, self._errors:
            out = self.stdout.read()
            if self.returncode is None:
                self._connection.settimeout(timeout)
                self.returncode = self._receive()
            self._errors.seek(0)
            return out, self._errors.read()

    def _receive(self) -> int:
        return int.from_bytes(self._connection.recv(4, socket.MSG_WAITALL), "big", signed=True)


@cache
def _server(shim: bool) -> str:
    """Start the server of this test process, with or without the shim; return its address."""
    folder = tempfile.TemporaryDirectory(prefix="rooftop-forks-")
    address = str(Path(folder.name) / "socket")
    # Unbuffered, as forks are; newer Pythons warn of threads, of which NumPy's are safe.
    command = [sys.executable, "-P", "-u", "-W", "ignore::DeprecationWarning", __file__, address]
    # A server that starts has no use for it, and may not find it.
    from tests.support.shim import preload

    environment = os.environ | (preload() if shim else {})
    server = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert server.stdin is not None and server.stdout is not None
    assert server.stdout.readline() == b"ready\n"

    def end() -> None:
        server.communicate()
        folder.cleanup()

    atexit.register(end)
    return address


def _serve(address: str) -> None:
    for name in IMPORTED:
        importlib.import_module(name)
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(address)
    listening.listen()
    print("ready")
    while listening in select.select([listening, sys.stdin], [], [])[0]:
        _reap()
        connection, _ = listening.accept()
        message, descriptors, *_ = socket.recv_fds(connection, 1 << 16, 2)
        if os.fork() == 0:
            listening.close()
            _wait_for_process(connection, message, descriptors)
            return
        connection.close()
        _close(descriptors)
    _reap()


def _reap() -> None:
    """Forget the forks that have ended; their CPU time counts as the server's."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _wait_for_process(connection: socket.socket, message: bytes, descriptors: Sequence[int]) -> None:
    """Fork the process; send its number and its exit status. The process itself returns from here when it has ended."""
    process = os.fork()
    if process == 0:
        connection.close()
        _run(message, descriptors)
        return
    _close(descriptors)
    connection.sendall(process.to_bytes(4, "big", signed=True))
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    connection.sendall(status.to_bytes(4, "big", signed=True))
    os._exit(0)


def _run(message: bytes, descriptors: Sequence[int]) -> None:
    arguments, changes = json.loads(message)
    for descriptor, standard in zip((os.open(os.devnull, os.O_RDONLY), *descriptors), range(3), strict=True):
        os.dup2(descriptor, standard)
        os.close(descriptor)
    os.environ.update(changes)
    sys.argv = ["rooftop", *arguments]
    if (name := os.environ.pop(BEFORE, None)) is not None:
        module, _, function = name.partition(":")
        getattr(importlib.import_module(module), function)()
    from rooftop.cli.main import main

    main()


def _close(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


if __name__ == "__main__":
    _serve(sys.argv[1])
