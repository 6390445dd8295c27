"""A disk that loses power: the operations on a folder are recorded, and any crash of them can be looked at.

A model of what a file system may lose, stricter than the usual ones. What is on the disk is what was synchronised: the
content of a file by an fsync of the file, the entries of a folder by an fsync of the folder. Of the rest, any file may
be empty, torn, of zeros or whole, and any folder may have the entries of any moment since its last fsync, each folder
by itself: operations reach the disk in any order across folders. Bytes that were synchronised stay when more is
appended to them. Calls of Python's ``os`` are operations; writes of other libraries are seen at the next one, and count
as not synchronised.
"""

from __future__ import annotations

import errno
import os
import random
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

#: Calls before and after which a crash may happen. All but fsync change names.
_CALLS = ("fsync", "rename", "replace", "unlink", "remove", "rmdir", "mkdir", "link")


@dataclass(frozen=True)
class Crash:
    """A moment, by its number.

    ``names`` are the entries that a folder may have, newest last, by its inode; ``synced`` and ``contents`` are what a
    file has on the disk and in memory.
    """

    number: int
    root: int
    names: dict[int, tuple[dict[str, int], ...]]
    synced: dict[int, bytes]
    contents: dict[int, bytes]

    def write(self, folder: Path, how: str, seed: int = 0) -> None:
        """Write the disk after the crash to ``folder``, which is new.

        ``how``: ``lost`` has nothing that was not synchronised; ``names`` has all names, and no content that was not;
        ``torn`` draws each by ``seed``.
        """
        draw = random.Random(f"{seed} {self.number}")
        self._write(self.root, folder, how, draw, set())

    def _write(self, inode: int, folder: Path, how: str, draw: random.Random, above: set[int]) -> None:
        folder.mkdir()
        versions = self.names[inode]
        entries = {"lost": versions[0], "names": versions[-1], "torn": draw.choice(versions)}[how]
        for name, child in sorted(entries.items()):
            if child in self.names:
                if child not in above:
                    self._write(child, folder / name, how, draw, above | {inode})
            else:
                (folder / name).write_bytes(self._content(child, how, draw))

    def _content(self, inode: int, how: str, draw: random.Random) -> bytes:
        durable, latest = self.synced.get(inode, b""), self.contents.get(inode, b"")
        if durable == latest or how != "torn":
            return durable
        # What was synchronised before more was appended stays.
        least = len(durable) if latest.startswith(durable) else 0
        cut = draw.randint(least, len(latest))
        return draw.choice([durable, latest, latest[:cut], latest[:cut] + bytes(len(latest) - cut)])


@dataclass
class Disk:
    """The operations below ``root``, which exists. ``on_crash`` gets each moment, in the operation's thread."""

    root: Path
    on_crash: Callable[[Crash], None]
    _names: dict[int, list[dict[str, int]]] = field(default_factory=dict)
    _synced: dict[int, bytes] = field(default_factory=dict)
    _contents: dict[int, bytes] = field(default_factory=dict)
    #: Descriptors of what was removed: an inode with one is not used again.
    _open: list[int] = field(default_factory=list)
    _lock: Any = field(default_factory=threading.RLock)
    _inside: bool = False
    _crashes: int = 0

    @contextmanager
    def recording(self) -> Iterator[Disk]:
        """Record operations of this process. What is there at first is on the disk."""
        self._look()
        for inode, versions in self._names.items():
            del self._names[inode][: len(versions) - 1]
        self._synced.update(self._contents)
        before = {name: getattr(os, name) for name in _CALLS}
        for name, call in before.items():
            setattr(os, name, self._recorded(name, call))
        try:
            yield self
        finally:
            for name, call in before.items():
                setattr(os, name, call)
            for handle in self._open:
                os.close(handle)

    def _recorded(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(*arguments: Any, **named: Any) -> Any:
            with self._lock:
                if self._inside or not self._is_below(name, arguments, named):
                    return call(*arguments, **named)
                self._inside = True
                try:
                    self._keep(name, arguments, named)
                    self._look()
                    self._crash()
                    answer = call(*arguments, **named)
                    if name == "fsync":
                        self._sync(arguments[0])
                    self._look()
                    self._crash()
                    return answer
                finally:
                    self._inside = False

        return recorded

    def _is_below(self, name: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> bool:
        try:
            return self._path(name, arguments, named).is_relative_to(self.root)
        except (OSError, TypeError):
            return False

    @staticmethod
    def _path(name: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> Path:
        if name == "fsync":
            return Path(os.readlink(f"/proc/self/fd/{arguments[0]}"))
        folder = named.get("dir_fd", named.get("src_dir_fd"))
        path = Path(os.fsdecode(arguments[0]))
        return path.absolute() if folder is None else Path(os.readlink(f"/proc/self/fd/{folder}")) / path

    def _keep(self, name: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Keep the inodes that this call may free."""
        gone = []
        if name in ("unlink", "remove", "rmdir"):
            gone = [self._path(name, arguments, named)]
        elif name in ("rename", "replace"):
            gone = [Path(os.fsdecode(arguments[1]))]
        for path in gone:
            with suppress(OSError):
                self._open.append(os.open(path, os.O_RDONLY))

    def _look(self) -> None:
        """Read the folder as it is: its names now, and the contents of its files."""
        waiting = [self.root]
        while waiting:
            folder = waiting.pop()
            try:
                inode, entries = folder.stat().st_ino, dict[str, int]()
                listed = sorted(folder.iterdir())
            except OSError:
                continue
            for path in listed:
                try:
                    status = path.lstat()
                    if stat.S_ISDIR(status.st_mode):
                        waiting.append(path)
                    else:
                        self._contents[status.st_ino] = path.read_bytes()
                    entries[path.name] = status.st_ino
                except OSError as error:
                    # A thread of another library has removed it since.
                    if error.errno != errno.ENOENT:
                        raise
            versions = self._names.setdefault(inode, [{}])
            if versions[-1] != entries:
                versions.append(entries)

    def _sync(self, handle: int) -> None:
        status = os.fstat(handle)
        if stat.S_ISDIR(status.st_mode):
            self._look()
            del self._names[status.st_ino][:-1]
        else:
            with open(f"/proc/self/fd/{handle}", "rb") as file:
                self._synced[status.st_ino] = file.read()

    def _crash(self) -> None:
        self._crashes += 1
        self.on_crash(
            Crash(
                number=self._crashes,
                root=self.root.stat().st_ino,
                names={inode: tuple(versions) for inode, versions in self._names.items()},
                synced=dict(self._synced),
                contents=dict(self._contents),
            )
        )
