"""Files that a user names, which are read up to a limit; files and folders that are whole or not there; JSON; caches.

A crash, a kill, a power cut or a full disk leaves what was there before. Content reaches the disk before the rename
that makes it count, and the rename before the call returns.
"""

from __future__ import annotations

import atexit
import errno
import io
import json
import os
import select
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from tokenize import TokenError
from typing import Any

from rooftop.core.errors import RooftopError
from rooftop.core.scratch import scratch_folder

#: Errors of a folder that cannot be synchronised: not readable, or not a call of its file system.
_NO_FOLDER_SYNC = (errno.EACCES, errno.EINVAL, errno.ENOTSUP)

#: Errors of np.load: the header of a .npy is Python, which fails to be read in as many ways as Python does.
_NO_ARRAY = (
    OSError, ValueError, SyntaxError, TypeError, ArithmeticError, MemoryError, RecursionError, TokenError,
)  # fmt: skip


#: Bytes of a file that is read whole: a plan, a table, a configuration. Modules and traces may be larger.
MOST_BYTES = 2**28
#: Seconds without a byte after which a pipe is given up.
PIPE_S = 60.0
_CHUNK = 2**20


def read_bytes(path: Path, *, most: int = MOST_BYTES) -> bytes:
    """The content of a file that a user names, or what comes through a pipe, such as ``<(rooftop plan ...)``.

    Raises OSError if it cannot be read, for a folder, a device or a socket, for more than ``most`` bytes, and for a
    pipe through which nothing comes.
    """
    return b"".join(_chunks(path, most))


def read_text(path: Path, *, encoding: str = "utf-8", errors: str = "strict", most: int = MOST_BYTES) -> str:
    """The text of a file that a user names; see ``read_bytes``. Raises OSError, and UnicodeDecodeError."""
    return io.TextIOWrapper(io.BytesIO(read_bytes(path, most=most)), encoding=encoding, errors=errors).read()


def open_file(path: Path) -> io.BufferedReader:
    """Open a regular file that a user names, to read it in parts. Raises OSError for anything else."""
    require_file(path)
    return path.open("rb")


def require_file(path: Path) -> None:
    """Raise OSError unless the path is that of a regular file: a pipe would wait, and a device may have no end."""
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode):
        raise _no_file(mode)


def _no_file(mode: int) -> OSError:
    if stat.S_ISDIR(mode):
        return IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    kind = "a device" if stat.S_ISCHR(mode) or stat.S_ISBLK(mode) else "a pipe" if stat.S_ISFIFO(mode) else "a socket"
    return OSError(errno.EINVAL, f"{kind} and no file")


def _chunks(path: Path, most: int) -> Iterator[bytes]:
    mode = path.stat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode)):
        raise _no_file(mode)
    # The open of a pipe would wait for somebody who writes to it.
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        is_pipe, left = stat.S_ISFIFO(os.fstat(handle).st_mode), most
        if os.fstat(handle).st_size > most:
            left = -1
        while left >= 0:
            if is_pipe and not select.select([handle], [], [], PIPE_S)[0]:
                raise OSError(errno.ETIMEDOUT, f"a pipe through which nothing came in {PIPE_S:g} s")
            chunk = os.read(handle, min(_CHUNK, left + 1))
            if not chunk:
                return
            left -= len(chunk)
            if left >= 0:
                yield chunk
    finally:
        os.close(handle)
    raise OSError(errno.EFBIG, f"more than {most >> 20:,} MiB")


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text, which may begin with a byte order mark. Raises ValueError, and RecursionError.

    An object that has one key twice is an error, as readers differ in which value they take, and so is NaN.
    """
    if isinstance(text, bytes):
        text = text.decode("utf-8-sig")
    try:
        return json.loads(text.removeprefix("\ufeff"), object_pairs_hook=_object, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        if error.doc.startswith(("//", "/*"), error.pos):
            raise ValueError(f"a comment in line {error.lineno}, which JSON does not have") from None
        raise


def _no_constant(name: str) -> float:
    raise ValueError(f"{name}, which is no number of JSON")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} twice")
    return result


def cache_folder(kind: str) -> Path:
    """``rooftop/KIND`` in $XDG_CACHE_HOME, or in ~/.cache: a folder that exists and can be written.

    Where there is none, a temporary folder stands in until this process ends, for the processes that it starts too, and
    a line on stderr says so.
    """
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        folder = Path(home).expanduser() / "rooftop" / kind
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except (OSError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "there is no home folder"
        place = Path(os.path.expanduser(home)) / "rooftop"
        sys.stderr.write(
            f"rooftop: nothing is cached: {place} cannot be written ({reason}); XDG_CACHE_HOME names another folder\n"
        )
        stack = ExitStack()
        os.environ["XDG_CACHE_HOME"] = str(stack.enter_context(scratch_folder("rooftop-cache-")))
        atexit.register(stack.close)
        return cache_folder(kind)
    return folder


def write_text(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` in one step. Raises RooftopError if the place cannot be written."""
    write_bytes(path, text.encode("utf-8"))


def write_json(path: Path, data: object) -> None:
    """Write ``data`` as indented JSON to ``path`` in one step. Raises RooftopError if the place cannot be written."""
    write_text(path, json.dumps(data, indent=1, allow_nan=False) + "\n")


def write_bytes(path: Path, data: bytes) -> None:
    """Write ``data`` to ``path`` in one step. Raises RooftopError if the place cannot be written.

    A link keeps pointing where it points. A pipe or a device (/dev/stdout, /dev/null) is written to, and stays one.
    """
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(data)
            return
        path = path.resolve()
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            # mkstemp makes private files; a plan is as readable as any file that its owner writes.
            umask = os.umask(0)
            os.umask(umask)
            os.chmod(temporary, 0o666 & ~umask)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
        sync(path.parent)
    except OSError as error:
        raise RooftopError("output file", str(path), f"a path that can be written ({error.strerror})") from None


def sync(path: Path) -> None:
    """Write a file, or the entries of a folder, from the system's memory to the disk. Raises OSError.

    Nothing happens to a folder that cannot be opened, or whose file system has no such call.
    """
    is_folder = path.is_dir()
    try:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        if not (is_folder and error.errno in _NO_FOLDER_SYNC):
            raise


def sync_all(folder: Path) -> None:
    """Write a folder and all that is in it to the disk. A rename may reach the disk before what it renames."""
    for path in (*folder.rglob("*"), folder):
        sync(path)


def publish(unfinished: Path, folder: Path) -> None:
    """Give a folder its final name, on the disk: all that is in it first, then the name. Raises OSError."""
    sync_all(unfinished)
    unfinished.rename(folder)
    sync(folder.parent)


def make_folder(folder: Path) -> None:
    """Create a folder and those above it, on the disk. Nothing happens to one that exists. Raises OSError."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in reversed(missing):
        sync(path.parent)


def remove_folder(folder: Path, condemned: Path) -> None:
    """Remove a folder. It is first renamed, on the disk, so that a part of it is never taken for the whole."""
    folder.rename(condemned)
    sync(condemned.parent)
    shutil.rmtree(condemned)


def load_array(path: Path, field: str) -> Any:
    """The memory-mapped array of a .npy file. Raises RooftopError, naming ``field``."""
    import numpy as np  # light commands read none

    try:
        require_file(path)
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except _NO_ARRAY as error:
        raise RooftopError(field, str(path), f"a .npy array ({error})") from None


def read_json_object(path: Path, *, field: str, accepted: str) -> dict[str, Any]:
    """The object in a JSON file, read once: ``path`` may be a pipe. Raises RooftopError, naming ``field``."""
    try:
        data = parse_json(read_bytes(path))
    except OSError as error:
        raise RooftopError(field, str(path), f"{accepted} ({error.strerror})") from None
    except ValueError as error:
        raise RooftopError(field, str(path), f"{accepted} (not JSON: {error})") from None
    except RecursionError:
        raise RooftopError(field, str(path), f"{accepted} (nested too deeply)") from None
    if not isinstance(data, dict):
        raise RooftopError(field, str(path), f"{accepted} (this is no JSON object)")
    return data
