"""The training state on disk: saved by Orbax in the background, published whole, checked before it is believed.

A checkpoint is the folder ``<step>``: ``state``, which Orbax writes, and ``manifest.json``, written last, with size and
SHA-256 of every file and shape and dtype of every array. It is written as ``<step>.writing`` and renamed once it is
complete, so that a kill at any moment leaves either the whole of it or what was there before.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp  # type: ignore[import-untyped]
from jax.experimental import multihost_utils

from rooftop.core.errors import RooftopError
from rooftop.core.files import write_text

_MANIFEST, _STATE = "manifest.json", "state"
_SCHEMA = 1
#: Bytes in which one process tells the others what is wrong with a checkpoint.
_REPORT = 1024
#: How long processes wait for the slowest of them to check its part of what was written.
_PATIENCE_MS = 20 * 60 * 1000


@dataclass(frozen=True, kw_only=True)
class Restored:
    """What was read: ``state``, in the shardings asked for, of ``step``; ``extra`` as it was saved.

    ``refused``: one line for each newer checkpoint that is damaged, newest first.
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
        with path.open("rb") as file:
            return cls(sha256=hashlib.file_digest(file, "sha256").hexdigest(), bytes=file.tell())


@dataclass(frozen=True, kw_only=True)
class _Manifest:
    """What a checkpoint holds: files by their paths in it; arrays ('float32[8, 16]') by their paths in the state."""

    schema: int
    step: int
    extra: dict[str, Any]
    arrays: dict[str, str]
    files: dict[str, _File]

    def text(self) -> str:
        """As JSON, with its own SHA-256."""
        body = json.dumps(dataclasses.asdict(self))
        return json.dumps({"sha256": hashlib.sha256(body.encode()).hexdigest(), "manifest": body})

    @classmethod
    def read(cls, checkpoint: Path) -> _Manifest:
        path = checkpoint / _MANIFEST
        damaged = RooftopError(str(path), "a damaged file", "a manifest as it was written")
        try:
            whole = json.loads(path.read_text(encoding="utf-8"))
            body = whole["manifest"]
            if hashlib.sha256(body.encode()).hexdigest() != whole["sha256"]:
                raise damaged
            fields = json.loads(body)
        except (ValueError, KeyError, TypeError):
            raise damaged from None
        except OSError as error:
            raise RooftopError(str(path), error.strerror or "unreadable", "the manifest of a checkpoint") from None
        if fields["schema"] != _SCHEMA:
            raise RooftopError(f"{path}: schema", fields["schema"], f"{_SCHEMA}, which this version reads")
        files = {name: _File(**file) for name, file in fields["files"].items()}
        return cls(**fields | {"files": files})


class Checkpoints:
    """The checkpoints in ``folder``, shared by all processes of a run: each calls the same methods in the same order.

    The newest ``keep`` stay, and every one whose step is a multiple of ``every``. Raises RooftopError if they are not
    positive whole numbers.
    """

    def __init__(self, folder: Path, *, keep: int = 2, every: int | None = None) -> None:
        if keep < 1:
            raise RooftopError("keep", keep, "a positive whole number of checkpoints")
        if every is not None and every < 1:
            raise RooftopError("keep every", every, "a positive whole number of steps, or none")
        self.folder, self.keep, self.every = folder.absolute(), keep, every
        self._checkpointer = ocp.StandardCheckpointer()
        self._worker = ThreadPoolExecutor(1, "checkpoint")
        self._saving: Future[None] | None = None
        self._saves = 0
        logging.getLogger("absl").addFilter(_not_of_orbax)

    def steps(self) -> tuple[int, ...]:
        """The steps of the checkpoints that were completed, ascending. Whether they are undamaged, ``verify`` says."""
        return tuple(sorted(self._complete()))

    def save(self, step: int, state: Any, extra: Mapping[str, Any]) -> None:
        """Save ``state``, any pytree of arrays, and ``extra``, plain JSON values (those of the first process).

        Returns once the arrays are copied to the host, so that they may be donated; the rest is done in the background.
        One that has the same step is replaced; those of later steps, from which the run went back, are removed.

        Raises RooftopError if this or the last save could not be written: what was there before is untouched.
        """
        self.wait()
        self._saves += 1
        writing = self.folder / f"{step}.writing"
        leaves = _leaves(state)
        arrays = {name: _kind(leaf) for name, leaf in leaves.items()}
        try:
            if jax.process_index() == 0:
                self.folder.mkdir(parents=True, exist_ok=True)
                self._tidy()
                writing.mkdir()
            # Orbax lets the others in after the first process.
            self._checkpointer.save(writing / _STATE, leaves)
        except Exception as error:
            raise self._failed(step, error) from error
        manifest = _Manifest(schema=_SCHEMA, step=step, extra=dict(extra), arrays=arrays, files={})
        self._saving = self._worker.submit(self._finish, writing, manifest)

    def wait(self) -> None:
        """Wait until the last save is on disk. Raises RooftopError if it could not be written."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result()

    def close(self) -> None:
        """``wait``, and end the threads."""
        try:
            self.wait()
        finally:
            self._worker.shutdown()
            self._checkpointer.close()
            logging.getLogger("absl").removeFilter(_not_of_orbax)

    def restore(self, abstract: Any, step: int | None = None) -> Restored:
        """The state of ``step``, by default of the newest checkpoint that is undamaged.

        ``abstract`` is the state as ShapeDtypeStructs, whose shardings say where everything goes: any mesh, number of
        devices and number of processes. The values are those that were saved, bit for bit.

        Raises RooftopError if there is none, if ``step`` is damaged, or if arrays have other shapes or dtypes.
        """
        self.wait()
        found = self._complete()
        if step is not None and step not in found:
            raise RooftopError("checkpoint", step, f"one of the steps {sorted(found)} in {self.folder}")
        refused = list[str]()
        for candidate in sorted(found, reverse=True) if step is None else (step,):
            problem = _shared(self._damage(found[candidate]))
            if not problem:
                manifest = _Manifest.read(found[candidate])
                state = self._read(found[candidate], manifest, abstract)
                return Restored(step=candidate, state=state, extra=manifest.extra, refused=tuple(refused))
            refused.append(problem)
        raise RooftopError("checkpoint", "; ".join(refused) or "none", f"one that is whole in {self.folder}")

    def verify(self, step: int) -> None:
        """Compare every file of a checkpoint with its manifest. Raises RooftopError naming the one that differs."""
        found = self._complete()
        if step not in found:
            raise RooftopError("checkpoint", step, f"one of the steps {sorted(found)} in {self.folder}")
        problem = _shared(self._damage(found[step]))
        if problem:
            raise RooftopError("checkpoint", problem, "files as they were written")

    def _complete(self) -> dict[int, Path]:
        """Step -> folder. One that was moved aside counts until its successor stands."""
        found = {}
        for suffix in (".replaced", ""):
            for path in self.folder.glob(f"*{suffix}"):
                name = path.name.removesuffix(suffix)
                if name.isdecimal() and (path / _MANIFEST).exists():
                    found[int(name)] = path
        return found

    def _damage(self, checkpoint: Path) -> str:
        """What is wrong with this process's share of the files; empty if nothing is."""
        try:
            manifest = _Manifest.read(checkpoint)
            for name, found in _checksums(checkpoint, _share(manifest.files)):
                written = manifest.files[name]
                if found.bytes != written.bytes:
                    return f"{checkpoint / name} has {found.bytes} bytes of {written.bytes}"
                if found != written:
                    return f"{checkpoint / name} has other content than was written"
        except RooftopError as error:
            return f"{error.field} is {error.given}"
        except OSError as error:
            return f"{error.filename}: {error.strerror}"
        return ""

    def _read(self, checkpoint: Path, manifest: _Manifest, abstract: Any) -> Any:
        leaves = _leaves(abstract)
        for name in sorted(leaves.keys() | manifest.arrays.keys()):
            wanted = _kind(leaves[name]) if name in leaves else "no such array"
            stored = manifest.arrays.get(name, "no such array")
            if wanted != stored:
                raise RooftopError(f"checkpoint {checkpoint}: {name}", stored, f"{wanted}, as the program has it")
        restored = self._checkpointer.restore(checkpoint / _STATE, leaves)
        return jax.tree.unflatten(jax.tree.structure(abstract), [restored[name] for name in leaves])

    def _finish(self, writing: Path, manifest: _Manifest) -> None:
        """In the background: complete what Orbax wrote, publish it, remove what is no longer kept."""
        try:
            self._checkpointer.wait_until_finished()
            # All must see the same files: those of Orbax, which the first process puts in order at the end.
            self._barrier("written")
            files = sorted(str(path.relative_to(writing)) for path in (writing / _STATE).rglob("*") if path.is_file())
            parts = [writing / f"checksums.{process}.json" for process in range(jax.process_count())]
            found = {name: dataclasses.asdict(file) for name, file in _checksums(writing, _share(files))}
            write_text(parts[jax.process_index()], json.dumps(found))
            self._barrier("checked")
            if jax.process_index() == 0:
                for part in parts:
                    read = json.loads(part.read_text(encoding="utf-8"))
                    manifest.files.update({name: _File(**file) for name, file in read.items()})
                    part.unlink()
                write_text(writing / _MANIFEST, manifest.text())
                self._publish(writing, manifest.step)
                self._prune(manifest.step)
            self._barrier("published")
        except Exception as error:
            raise self._failed(manifest.step, error) from error

    def _publish(self, writing: Path, step: int) -> None:
        final, aside = self.folder / f"{step}", self.folder / f"{step}.replaced"
        if final.exists():
            _remove(aside)
            final.rename(aside)
        writing.rename(final)
        _sync(self.folder)
        _remove(aside)

    def _prune(self, step: int) -> None:
        complete = self._complete()
        newest = sorted(earlier for earlier in complete if earlier <= step)[-self.keep :]
        for each, path in complete.items():
            landmark = self.every is not None and each % self.every == 0
            if each > step or not (each in newest or landmark):
                _remove(path)

    def _tidy(self) -> None:
        """Remove what an interrupted process left."""
        complete = self._complete().values()
        for suffix in (".writing", ".removed", ".replaced"):
            for path in self.folder.glob(f"*{suffix}"):
                if path.name.removesuffix(suffix).isdecimal() and path not in complete:
                    shutil.rmtree(path)

    def _barrier(self, name: str) -> None:
        if jax.process_count() > 1:
            key = f"rooftop checkpoints: save {self._saves} in {self.folder} {name}"
            ocp.multihost.get_barrier_sync_fn()(key=key, timeout_ms=_PATIENCE_MS)

    def _failed(self, step: int, error: Exception) -> RooftopError:
        """The error that says so; the room that the attempt took is given back."""
        free = shutil.disk_usage(next(path for path in (self.folder, *self.folder.parents) if path.exists())).free
        if jax.process_index() == 0:
            shutil.rmtree(self.folder / f"{step}.writing", ignore_errors=True)
        # Of the arrays that failed with it nobody asks, which asyncio would say of each as it is freed.
        logging.getLogger("asyncio").addFilter(lambda record: f"{self.folder}" not in record.getMessage())
        steps = self.steps()
        last = f"step {steps[-1]} is the newest that is whole" if steps else "none is there yet"
        accepted = f"a folder with room for it ({free:,} bytes were free in {self.folder}; {last})"
        return RooftopError(f"checkpoint of step {step}", _reason(error), accepted)


def _not_of_orbax(record: logging.LogRecord) -> bool:
    """Orbax logs each error with its stack, from every thread that meets it; it is raised here as well, once."""
    return "orbax" not in record.pathname or record.levelno < logging.ERROR


def _leaves(tree: Any) -> dict[str, Any]:
    """Leaves by their paths, in the order of the tree."""
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _kind(leaf: Any) -> str:
    return f"{np.dtype(leaf.dtype).name}{list(leaf.shape)}"


def _share(names: Iterable[str]) -> list[str]:
    """The part of the files that this process reads."""
    return sorted(names)[jax.process_index() :: jax.process_count()]


def _checksums(folder: Path, names: Iterable[str]) -> Iterator[tuple[str, _File]]:
    with ThreadPoolExecutor() as pool:
        yield from pool.map(lambda name: (name, _File.of(folder / name)), names)


def _shared(problem: str) -> str:
    """What any process found wrong, the same on all of them."""
    if jax.process_count() == 1:
        return problem
    told = problem.encode()[:_REPORT].ljust(_REPORT, b"\0")
    everyone = multihost_utils.process_allgather(np.frombuffer(told, np.uint8))
    reports = [row.tobytes().rstrip(b"\0").decode(errors="replace") for row in np.asarray(everyone)]
    return next((report for report in reports if report), "")


def _remove(checkpoint: Path) -> None:
    """Remove a checkpoint; nobody ever sees a part of it."""
    if checkpoint.exists():
        condemned = checkpoint.with_name(f"{checkpoint.name.split('.')[0]}.removed")
        checkpoint.rename(condemned)
        shutil.rmtree(condemned)


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _reason(error: BaseException) -> str:
    """The cause in one line: the reason that the system gives, if it gave one."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, RooftopError):
        return str(error.given)
    lines = str(error).splitlines() or [type(error).__name__]
    named = [os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)]
    return next((reason for reason in named if reason in str(error)), lines[0])
