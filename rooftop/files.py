"""Files that are whole or not there: a crash, a kill or a full disk leaves what was there before."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from rooftop.errors import RooftopError


def write_text(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` in one step. Raises RooftopError if the place cannot be written."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Path, data: bytes) -> None:
    """Write ``data`` to ``path`` in one step. Raises RooftopError if the place cannot be written."""
    try:
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
