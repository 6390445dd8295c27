"""Temporary folders that are collected even if the process that made them is killed."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # not on this system: folders of killed processes stay
    fcntl = None  # type: ignore[assignment]

_LOCK = "in-use.lock"
#: Seconds for which a folder without a lock may be one that is just being made.
_NEW_S = 60.0


@contextmanager
def scratch_folder(prefix: str) -> Iterator[Path]:
    """A new folder for temporary files, removed at the end; ``prefix`` begins its name.

    Folders of this prefix that killed processes have left are removed too: a process locks a file in its folder, and
    the system unlocks it when the process ends, however that is.
    """
    _collect(prefix)
    with tempfile.TemporaryDirectory(prefix=prefix) as name:
        folder = Path(name)
        with (folder / _LOCK).open("w") as lock:
            if fcntl is not None:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield folder


def _collect(prefix: str) -> None:
    """Remove the folders of this prefix that no process has."""
    if fcntl is None:
        return
    for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        # It may be another user's, or be removed meanwhile.
        with suppress(OSError):
            if time.time() - folder.stat().st_mtime < _NEW_S or folder.is_symlink():
                continue
            with (folder / _LOCK).open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
