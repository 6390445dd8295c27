"""Files and folders that are whole or not there, JSON files, and caches.

A crash, a kill, a power cut or a full disk leaves what was there before. Content reaches the disk before the rename
that makes it count, and the rename before the call returns.
"""

from __future__ import annotations

import atexit
import errno
import json
import os
import shutil
import sys
import tempfile
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
        return np.load(path, mmap_mode="r", allow_pickle=False)
    # Its header is Python, which fails to be read in as many ways as Python does.
    except (
        OSError,
        ValueError,
        SyntaxError,
        TypeError,
        OverflowError,
        MemoryError,
        RecursionError,
        TokenError,
    ) as error:
        raise RooftopError(field, str(path), f"a .npy array ({error})") from None


def read_json_object(path: Path, *, field: str, accepted: str) -> dict[str, Any]:
    """The object in a JSON file, read once: ``path`` may be a pipe. Raises RooftopError, naming ``field``."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RooftopError(field, str(path), f"{accepted} ({error.strerror})") from None
    except ValueError as error:
        raise RooftopError(field, str(path), f"{accepted} (not JSON: {error})") from None
    except RecursionError:
        raise RooftopError(field, str(path), f"{accepted} (nested too deeply)") from None
    if not isinstance(data, dict):
        raise RooftopError(field, str(path), f"{accepted} (this is no JSON object)")
    return data
