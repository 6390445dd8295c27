"""Checkpoints of a run's state: saved by Orbax in the background, published whole, verified before use.

A checkpoint is the folder ``<step>``: ``state``, written by Orbax, and ``manifest.json``, written last, with size and
SHA-256 of every file and shape and dtype of every array. It is written and synchronised to disk as ``<step>.writing``
and renamed once it is complete. A kill or a power loss at any moment leaves the whole of it or the checkpoint before:
no older one is removed before the new one is on the disk under its name.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import shutil
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp  # type: ignore[import-untyped]
from jax.experimental import multihost_utils
from numpy.typing import NDArray

from rooftop.core.errors import RooftopError
from rooftop.core.files import make_folder, open_file, publish, read_text, remove_folder, sync, write_text
from rooftop.core.records import plain, read_record

_MANIFEST, _STATE = "manifest.json", "state"
_SCHEMA = 1
#: Bytes in which a process reports a damaged file to the others.
_REPORT = 1024
#: Time for the slowest process to hash its share of the files.
_TIMEOUT_MS = 20 * 60 * 1000
#: Seconds before each further attempt to save on a disk that failed.
_PAUSES_S = (1.0, 4.0)


@dataclass(frozen=True, kw_only=True)
class Restored:
    """The ``state`` of ``step``, in the requested shardings, and the ``extra`` values saved with it.

    ``refused`` has one line for each newer checkpoint that is damaged, newest first.
    """

    step: int
    state: Any
    extra: dict[str, Any]
    refused: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class _File:
    """Size in bytes and SHA-256 of a file."""

    bytes: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> _File:
        with open_file(path) as file:
            return cls(sha256=hashlib.file_digest(file, "sha256").hexdigest(), bytes=file.tell())


@dataclass(frozen=True, kw_only=True)
class _Manifest:
    """Content of a checkpoint: files by path, arrays ('float32[8, 16]') by their path in the state."""

    schema: int
    step: int
    extra: dict[str, Any]
    arrays: dict[str, str]
    files: dict[str, _File]

    def text(self) -> str:
        """The manifest as JSON, with its own SHA-256."""
        body = json.dumps(plain(self))
        return json.dumps({"sha256": hashlib.sha256(body.encode()).hexdigest(), "manifest": body})

    @classmethod
    def read(cls, checkpoint: Path) -> _Manifest:
        path = checkpoint / _MANIFEST
        try:
            content = json.loads(read_text(path))
            body = content["manifest"]
            if hashlib.sha256(body.encode()).hexdigest() != content["sha256"]:
                raise ValueError("another hash")
            fields = json.loads(body)
            if fields["schema"] != _SCHEMA:
                raise RooftopError(f"{path}: schema", fields["schema"], f"{_SCHEMA}, which this version reads")
            return read_record(cls, fields, str(path))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise RooftopError(str(path), "a damaged file", "a manifest as it was written") from None
        except OSError as error:
            reason = "missing" if isinstance(error, FileNotFoundError) else error.strerror or "unreadable"
            raise RooftopError(str(path), reason, "the manifest of a checkpoint") from None


@dataclass(frozen=True)
class _Saving:
    """A save under way: ``future`` returns the reason of a failure, empty without one."""

    folder: Path
    step: int
    future: Future[str]


class Checkpoints:
    """The checkpoints in ``folder``. All processes of a run share them and call the same methods in the same order.

    The newest ``keep`` stay, and every one whose step is a multiple of ``every``. Where ``folder`` cannot be written,
    checkpoints go to the folder ``also``, and those in both are the checkpoints of the run. ``on_message`` is called
    with a line for each attempt to save that fails. Raises RooftopError unless ``keep`` and ``every`` are positive and
    the folders differ.
    """

    def __init__(
        self, folder: Path, *, keep: int = 2, every: int | None = None, also: Path | None = None,
        on_message: Callable[[str], None] | None = None,
    ) -> None:  # fmt: skip
        if keep < 1:
            raise RooftopError("keep", keep, "a positive whole number of checkpoints")
        if every is not None and every < 1:
            raise RooftopError("keep every", every, "a positive whole number of steps, or none")
        if also is not None and also.resolve() == folder.resolve():
            raise RooftopError("save-also", str(also), "another folder than the run's")
        self.folder, self.keep, self.every = folder.absolute(), keep, every
        self.also = None if also is None else also.absolute()
        self._on_message = on_message
        self._checkpointer = ocp.StandardCheckpointer()
        self._worker = ThreadPoolExecutor(1, "checkpoint")
        self._saving: _Saving | None = None
        self._saves = 0
        logging.getLogger("absl").addFilter(_is_no_orbax_error)
        # Left over from a save that failed, which is said in a line of ours.
        warnings.filterwarnings("ignore", message="coroutine 'async_serialize_from_host", category=RuntimeWarning)

    def steps(self) -> tuple[int, ...]:
        """Steps of the complete checkpoints, ascending. ``verify`` tells if one is damaged."""
        return tuple(sorted({step for step, _ in self._complete()}))

    def save(
        self, step: int, state: Any, extra: Mapping[str, Any], *, unpadded: Any = None, last: bool = False
    ) -> None:
        """Save ``state``, any pytree of arrays, and ``extra``, plain JSON values (those of the first process).

        ``unpadded`` is the state as ShapeDtypeStructs without zeros at the ends of its dims, which a mesh needs. By
        default the state has none.

        Returns once the arrays are copied to the host, so that they may be donated; a thread writes them. The
        ``last`` save, and one after a save that failed, waits until it is on the disk: it is tried again after pauses,
        then in the folder ``also``. A checkpoint of the same step is replaced; those of later steps belong to an
        abandoned course and are removed.

        Raises RooftopError if no attempt succeeds: earlier checkpoints stay untouched.
        """
        try:
            self.wait()
        except RooftopError as lost:
            self._say(f"{lost.field} was not written: {lost.given}; saving step {step} instead")
            last = True

        def attempt(folder: Path, *, waits: bool) -> RooftopError | None:
            try:
                self._begin(folder, step, state, extra, unpadded)
                if waits:
                    self.wait()
            except RooftopError as failed:
                return failed
            return None

        error = attempt(self.folder, waits=last)
        for pause in _PAUSES_S:
            if error is None:
                return
            self._say(f"{error.field}: {error.given}; trying again in {pause:g} s")
            time.sleep(pause)
            error = attempt(self.folder, waits=True)
        if error is not None and self.also is not None:
            error = attempt(self.also, waits=True)
            if error is None:
                self._say(f"checkpoint of step {step} is in {self.also}")
        if error is not None:
            raise error

    def wait(self) -> None:
        """Wait until the last save is on disk. Raises RooftopError, on all processes, if one could not write it."""
        saving, self._saving = self._saving, None
        if saving is not None and (reason := _first_of_all_processes(saving.future.result())):
            raise self._failed(saving.folder, saving.step, reason)

    def close(self) -> None:
        """Wait for the last save and end the threads. Raises RooftopError if this process could not write it.

        Other processes are not asked: this one may close because they are lost.
        """
        saving, self._saving = self._saving, None
        try:
            if saving is not None and (reason := saving.future.result()):
                raise self._failed(saving.folder, saving.step, reason)
        finally:
            self._worker.shutdown()
            self._checkpointer.close()
            logging.getLogger("absl").removeFilter(_is_no_orbax_error)

    def restore(self, abstract: Any, step: int | None = None, *, unpadded: Any = None) -> Restored:
        """Restore the state of ``step``, by default of the newest undamaged checkpoint.

        ``abstract`` is the state as ShapeDtypeStructs, whose shardings may be of any mesh, number of devices and number
        of processes. ``unpadded`` is as for ``save``: zeros at the ends of dims may be others than were saved. The
        values are those that were saved, bit for bit.

        Raises RooftopError if there is no checkpoint, if ``step`` is damaged, or if shapes or dtypes differ.
        """
        checkpoint, manifest, refused = self._newest(step)
        leaves = _leaves(abstract)
        shapes = leaves if unpadded is None else _leaves(unpadded)
        for name in sorted(shapes.keys() | manifest.arrays.keys()):
            expected = _kind(shapes[name]) if name in shapes else "no such array"
            stored = manifest.arrays.get(name, "no such array")
            if expected != stored:
                raise RooftopError(f"checkpoint {checkpoint}: {name}", stored, f"{expected}, as the program has it")
        # Not strict: Orbax adds zeros, or cuts them off, where padding differs.
        restored = self._restored(checkpoint, leaves, strict=False)
        state = jax.tree.unflatten(jax.tree.structure(abstract), [restored[name] for name in leaves])
        return Restored(step=manifest.step, state=state, extra=manifest.extra, refused=refused)

    def restore_arrays(self, step: int | None = None) -> Restored:
        """Restore like ``restore``, with the state as NumPy arrays by name: a flat dict that was saved as one.

        Needs no shapes beforehand and one process. Raises RooftopError like ``restore``.
        """
        checkpoint, manifest, refused = self._newest(step)
        arrays: dict[str, NDArray[Any]] = self._restored(checkpoint)
        return Restored(step=manifest.step, state=arrays, extra=manifest.extra, refused=refused)

    def _restored(self, checkpoint: Path, *arguments: Any, **options: Any) -> Any:
        """The arrays that Orbax reads. Raises RooftopError for files that match their hashes and are none of Orbax."""
        try:
            return self._checkpointer.restore(checkpoint / _STATE, *arguments, **options)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise RooftopError("checkpoint", str(checkpoint), f"the state of a run ({_reason(error)})") from error

    def verify(self, step: int) -> None:
        """Compare every file of a checkpoint with its manifest. Raises RooftopError naming a file that differs."""
        self._newest(step)

    def _newest(self, step: int | None) -> tuple[Path, _Manifest, tuple[str, ...]]:
        """The newest undamaged checkpoint, or that of ``step``; and a line for each newer, damaged one."""
        self.wait()
        complete = self._complete()
        known = sorted({other for other, _ in complete})
        if step is not None and step not in known:
            raise RooftopError("checkpoint", step, f"one of the steps {known} in {self._places}")
        refused = list[str]()
        for candidate in known[::-1] if step is None else (step,):
            for path in (path for other, path in complete if other == candidate):
                damage = _first_of_all_processes(self._damage(path))
                if not damage:
                    return path, _Manifest.read(path), tuple(refused)
                refused.append(damage)
        raise RooftopError("checkpoint", "; ".join(refused) or "none", f"one that is whole in {self._places}")

    @property
    def _folders(self) -> tuple[Path, ...]:
        return (self.folder,) if self.also is None else (self.folder, self.also)

    @property
    def _places(self) -> str:
        return " or ".join(map(str, self._folders))

    def _complete(self) -> list[tuple[int, Path]]:
        """Steps and folders. A checkpoint that was moved aside counts until its successor is in place.

        One under its own name was given it with a manifest: without one it is damaged, and ``_damage`` says so.
        """
        complete = list[tuple[int, Path]]()
        for folder in self._folders:
            paths = dict[int, Path]()
            for suffix in (".replaced", ""):
                for path in _entries(folder, suffix):
                    step = int(path.name.removesuffix(suffix))
                    if (path / _MANIFEST).exists() or (not suffix and step not in paths):
                        paths[step] = path
            complete += paths.items()
        return complete

    def _damage(self, checkpoint: Path) -> str:
        """The first damage in this process's share of the files; empty without any."""
        try:
            manifest = _Manifest.read(checkpoint)
            for name, file in _checksums(checkpoint, _share(manifest.files)):
                written = manifest.files[name]
                if file.bytes != written.bytes:
                    return f"{checkpoint / name} has {file.bytes} bytes of {written.bytes}"
                if file != written:
                    return f"{checkpoint / name} has other content than was written"
        except RooftopError as error:
            return f"{error.field} is {error.given}"
        except OSError as error:
            return f"{error.filename}: {error.strerror}"
        return ""

    def _begin(self, folder: Path, step: int, state: Any, extra: Mapping[str, Any], unpadded: Any) -> None:
        """Copy the arrays to the host and have a thread write them. Raises RooftopError on all processes."""
        self._saves += 1
        writing = folder / f"{step}.writing"
        leaves = _leaves(state)
        arrays = {name: _kind(leaf) for name, leaf in (leaves if unpadded is None else _leaves(unpadded)).items()}
        reason = ""
        if jax.process_index() == 0:
            try:
                make_folder(folder)
                self._tidy(folder)
                writing.mkdir()
            except OSError as error:
                reason = _reason(error)
        if reason := _first_of_all_processes(reason):
            raise self._failed(folder, step, reason)
        try:
            # Orbax lets the other processes in after the first one.
            self._checkpointer.save(writing / _STATE, leaves)
        except Exception as error:
            raise self._failed(folder, step, _reason(error)) from error
        manifest = _Manifest(schema=_SCHEMA, step=step, extra=dict(extra), arrays=arrays, files={})
        self._saving = _Saving(folder, step, self._worker.submit(self._finish, writing, manifest))

    def _finish(self, writing: Path, manifest: _Manifest) -> str:
        """Complete the files of Orbax, publish the checkpoint and remove old ones. Runs in the background.

        Returns the reason of a failure, empty without one. A process that fails goes through all barriers, as the
        others would wait for it there.
        """
        reason = ""
        for name, phase in (("written", self._write), ("checked", self._check), ("published", self._publish)):
            if not reason:
                try:
                    phase(writing, manifest)
                except Exception as error:
                    reason = _reason(error)
            self._barrier(name)
        return reason

    def _write(self, writing: Path, manifest: _Manifest) -> None:
        """Wait for the files of Orbax. The first process moves them last: all must see the same ones."""
        self._checkpointer.wait_until_finished()

    def _check(self, writing: Path, manifest: _Manifest) -> None:
        """Hash this process's share of the files."""
        files = sorted(str(path.relative_to(writing)) for path in (writing / _STATE).rglob("*") if path.is_file())
        if jax.process_count() > 1:
            # On a network's file system only the host that wrote a file can bring it to the disk.
            own = {f"process_{jax.process_index()}", f"ocdbt.process_{jax.process_index()}"}
            for name in files:
                if own.intersection(Path(name).parts):
                    sync(writing / name)
        share = plain(dict(_checksums(writing, _share(files))))
        write_text(writing / _part(jax.process_index()), json.dumps(share))

    def _publish(self, writing: Path, manifest: _Manifest) -> None:
        """In the first process: write the manifest, give the checkpoint its name, and remove old ones."""
        if jax.process_index() != 0:
            return
        for process in range(jax.process_count()):
            part = writing / _part(process)
            if not part.exists():
                raise OSError(0, f"process {process} could not write its files")
            checksums = json.loads(part.read_text(encoding="utf-8"))
            manifest.files.update({name: _File(**file) for name, file in checksums.items()})
            part.unlink()
        write_text(writing / _MANIFEST, manifest.text())
        final, aside = writing.with_suffix(""), writing.with_suffix(".replaced")
        if final.exists():
            _remove(aside)
            final.rename(aside)
            sync(writing.parent)
        # Orbax synchronises arrays only.
        publish(writing, final)
        _remove(aside)
        self._prune(manifest.step)

    def _prune(self, step: int) -> None:
        complete = self._complete()
        newest = sorted({earlier for earlier, _ in complete if earlier <= step})[-self.keep :]
        for other, path in complete:
            is_landmark = self.every is not None and other % self.every == 0
            if other > step or not (other in newest or is_landmark):
                # The new checkpoint is whole: one too many is no failure of it.
                with contextlib.suppress(OSError):
                    _remove(path)

    def _tidy(self, folder: Path) -> None:
        """Remove the remains of an interrupted process."""
        complete = [path for _, path in self._complete()]
        for suffix in (".writing", ".removed", ".replaced"):
            for path in _entries(folder, suffix):
                if path not in complete:
                    shutil.rmtree(path)

    def _barrier(self, name: str) -> None:
        if jax.process_count() > 1:
            key = f"rooftop checkpoints: save {self._saves} in {self.folder} {name}"
            ocp.multihost.get_barrier_sync_fn()(key=key, timeout_ms=_TIMEOUT_MS)

    def _say(self, line: str) -> None:
        if self._on_message is not None:
            self._on_message(line)

    def _failed(self, folder: Path, step: int, reason: str) -> RooftopError:
        """The error of a failed save, whose files are removed to free their space."""
        try:
            free = shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free
        except OSError:
            free = 0
        if jax.process_index() == 0:
            shutil.rmtree(folder / f"{step}.writing", ignore_errors=True)
        # asyncio would log every other array of this save that failed as well, when it is freed.
        logging.getLogger("asyncio").addFilter(lambda record: f"{folder}" not in record.getMessage())
        steps = self.steps()
        last = f"step {steps[-1]} is the newest that is whole" if steps else "none is there yet"
        accepted = f"a folder with room for it ({free:,} bytes were free in {folder}; {last})"
        return RooftopError(f"checkpoint of step {step}", reason, accepted)


def _entries(folder: Path, suffix: str) -> list[Path]:
    """Folders named by a step and ``suffix``; none where ``folder`` cannot be read."""
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    return [folder / name for name in names if name.endswith(suffix) and name.removesuffix(suffix).isdecimal()]


def _part(process: int) -> str:
    """The file with the checksums of a process."""
    return f"checksums.{process}.json"


def _is_no_orbax_error(record: logging.LogRecord) -> bool:
    """False for errors that Orbax logs with a stack, from every thread: they are raised here, once."""
    return "orbax" not in record.pathname or record.levelno < logging.ERROR


def _leaves(tree: Any) -> dict[str, Any]:
    """Leaves by their paths, in the order of the tree; those of a flat dict by its keys."""
    return {_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _name(path: tuple[Any, ...]) -> str:
    match path:
        case (jax.tree_util.DictKey(key=str(key)),):
            return key
    return jax.tree_util.keystr(path)


def _kind(leaf: Any) -> str:
    return f"{np.dtype(leaf.dtype).name}{list(leaf.shape)}"


def _share(names: Iterable[str]) -> list[str]:
    """The files that this process hashes."""
    return sorted(names)[jax.process_index() :: jax.process_count()]


def _checksums(folder: Path, names: Iterable[str]) -> Iterator[tuple[str, _File]]:
    with ThreadPoolExecutor() as pool:
        yield from pool.map(lambda name: (name, _File.of(folder / name)), names)


def _first_of_all_processes(damage: str) -> str:
    """The damage that the first of the processes with any has met, the same on all of them."""
    if jax.process_count() == 1:
        return damage
    report = np.frombuffer(damage.encode()[:_REPORT].ljust(_REPORT, b"\0"), np.uint8)
    reports = np.asarray(multihost_utils.process_allgather(report))
    texts = [row.tobytes().rstrip(b"\0").decode(errors="replace") for row in reports]
    return next((text for text in texts if text), "")


def _remove(checkpoint: Path) -> None:
    if checkpoint.exists():
        remove_folder(checkpoint, checkpoint.with_name(f"{checkpoint.name.split('.')[0]}.removed"))


def _reason(error: BaseException) -> str:
    """The cause in one line: the system's reason, if it gave one."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, RooftopError):
        return str(error.given)
    lines = str(error).splitlines() or [type(error).__name__]
    named = [os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)]
    return next((reason for reason in named if reason in str(error)), lines[0])
