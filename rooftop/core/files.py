"""Files that are whole or not there, folders of one writer, and caches.

A crash, a kill or a full disk leaves what was there before.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rooftop.core.errors import RooftopError


def cache_folder(kind: str) -> Path:
    """``rooftop/KIND`` in $XDG_CACHE_HOME, or in ~/.cache. Raises RooftopError where there is neither."""
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    except RuntimeError:
        raise RooftopError("XDG_CACHE_HOME", None, "a folder for what is kept, as you have no home folder") from None
    return home / "rooftop" / kind


def write_text(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` in one step. Raises RooftopError if the place cannot be written."""
    write_bytes(path, text.encode("utf-8"))


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
    except OSError as error:
        raise RooftopError("output file", str(path), f"a path that can be written ({error.strerror})") from None


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Keep other processes out of a run's folder; the system lets go for one that is killed.

    A folder that is made for it, and in which nothing comes to stand, goes again. Raises RooftopError if another
    process is in, or where the folder cannot be written.
    """
    # Systems without it have no runs to keep apart, but files to write.
    import fcntl

    created = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / ".lock").open("wb")
    except OSError as error:
        raise RooftopError("run", str(folder), f"a folder that can be written ({error.strerror})") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise RooftopError("run", str(folder), "a folder that no other process trains in now") from None
        try:
            yield
        finally:
            if created and [entry.name for entry in folder.iterdir()] == [".lock"]:
                (folder / ".lock").unlink()
                folder.rmdir()
