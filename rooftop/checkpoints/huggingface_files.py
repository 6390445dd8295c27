"""A folder of safetensors files: its contents, slices of its tensors, and writing of one tensor after another.

The library writes only tensors that are all in memory, so this module writes itself. The format: eight bytes with the
header's length, little-endian; the header, JSON from names to dtype, shape and offsets; the tensors' bytes.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from rooftop.checkpoints.names import Array
from rooftop.core.errors import RooftopError
from rooftop.core.files import make_folder, parse_json, publish, read_text, require_file, write_bytes, write_text

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
#: Dtypes of 8 bits that NumPy lacks, and with it the library.
_BYTES = ("F8_E4M3", "F8_E8M0")
_CODES = {dtype: code for code, dtype in _DTYPES.items()}


@dataclass(frozen=True, kw_only=True)
class CheckpointTensor:
    """A tensor without its values."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def bytes(self) -> int:
        """Its size."""
        return int(np.prod(self.shape)) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """The tensors in a folder: name -> (file, the format's code of the dtype, shape)."""

    folder: Path
    tensors: Mapping[str, tuple[Path, str, tuple[int, ...]]]

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        """Read names, dtypes and shapes.

        Raises RooftopError on a file that is missing, damaged or inconsistent with the index.
        """
        index = folder / _INDEX
        try:
            names = parse_json(read_text(index))["weight_map"] if index.exists() else None
            files = {folder / _SINGLE} if names is None else {folder / str(file) for file in names.values()}
        except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise RooftopError(str(index), f"{type(error).__name__}", "an index from tensors to files") from None
        tensors = dict[str, tuple[Path, str, tuple[int, ...]]]()
        for path in sorted(files):
            with _opened(path) as file:
                for name in file.keys():  # noqa: SIM118 (not a dict)
                    tensor = file.get_slice(name)
                    tensors[name] = path, tensor.get_dtype(), tuple(tensor.get_shape())
        for name, where in (names or {}).items():
            if name not in tensors or tensors[name][0] != folder / where:
                raise RooftopError(f"checkpoint tensor {name}", f"not in {folder / where}", f"there, as {index} says")
        return cls(folder=folder, tensors=tensors)

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def dtype(self, name: str) -> np.dtype[Any]:
        """The dtype of a tensor. Raises RooftopError if there is no such tensor, or its dtype is unsupported."""
        self.shape(name)
        path, code, _ = self.tensors[name]
        if code not in _DTYPES:
            raise RooftopError(
                f"{path}: dtype of {name}", code, f"{', '.join(_DTYPES)}: weights that are not quantised"
            )
        return _DTYPES[code]

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor. Raises RooftopError if there is no such tensor."""
        if name not in self.tensors:
            raise RooftopError("checkpoint tensor", name, f"a tensor of this name in {self.folder}")
        return self.tensors[name][2]

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise RooftopError unless the tensor exists, in a supported dtype and of this shape."""
        self.dtype(name)
        if self.shape(name) != shape:
            raise RooftopError(f"{self.folder}: shape of {name}", self.shape(name), f"{shape}, as the model has it")

    def read(self, name: str, region: tuple[slice, ...]) -> Array:
        """A part of a tensor; only this part is read into memory. Elements of 8 bits are read as uint8."""
        path, code, shape = self.tensors[name]
        if code in _BYTES:
            start = _header(path, path.stat().st_mtime_ns)[name]
            bytes_: Array = np.array(np.memmap(path, np.uint8, "r", offset=start, shape=shape)[region])
            return bytes_
        # Opened for each part: pages of an open file count as memory of this process.
        with _opened(path) as file:
            part: Array = file.get_slice(name)[region]
            return part


#: Bytes of a header, as the format limits them.
_MOST_HEADER = 100_000_000


@lru_cache(maxsize=1024)
def _header(path: Path, modified: int) -> Mapping[str, int]:
    """Where the tensors of a file begin; ``modified`` is the time of its last change.

    Raises ValueError for a header in which a name stands twice: readers differ in which tensor they take.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > _MOST_HEADER:
            raise ValueError(f"a header of {length:,} bytes")
        try:
            header = parse_json(file.read(length).rstrip())
            return {
                name: 8 + length + int(entry["data_offsets"][0])
                for name, entry in header.items()
                if name != "__metadata__"
            }
        except (LookupError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"a header that is none ({type(error).__name__})") from None


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """An open safetensors file. Raises RooftopError if it is missing or damaged."""
    try:
        require_file(path)
        _header(path, path.stat().st_mtime_ns)
        opened = safe_open(path, framework="numpy")
    except FileNotFoundError:
        raise RooftopError(str(path), "no such file", "a safetensors file") from None
    except (SafetensorError, OSError, ValueError) as error:
        raise RooftopError(str(path), str(error), "a whole safetensors file") from None
    with opened as file:
        yield file


def require_new(folder: Path) -> None:
    """Raise RooftopError unless ``folder`` does not exist yet and can be created."""
    if folder.exists():
        raise RooftopError("export folder", str(folder), "a path where nothing is yet")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}."):
            pass
    except OSError as error:
        raise RooftopError("export folder", str(folder), f"a path that can be written ({error.strerror})") from None


def write_checkpoint(
    folder: Path,
    tensors: Sequence[CheckpointTensor],
    content: Callable[[CheckpointTensor], Array],
    config: Mapping[str, Any] | bytes,
    shard_bytes: int,
    complete: Callable[[Path], None] | None = None,
) -> None:
    """Write ``config`` and the result of ``content`` for each of ``tensors``, in order, one at a time.

    Files have at most ``shard_bytes`` of tensors, or one tensor. ``complete`` adds further files to the folder before
    it gets its name. A power cut leaves the whole folder or none. Raises RooftopError if ``folder`` exists already or
    cannot be written; then it is not created.
    """
    if shard_bytes < 1:
        raise RooftopError("bytes of a file", shard_bytes, "a positive whole number")
    require_new(folder)
    files = _files(tensors, shard_bytes)
    try:
        make_folder(folder.parent)
        unfinished = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
        try:
            for name, members in files.items():
                with (unfinished / name).open("wb") as file:
                    _write(file, members, content)
            if len(files) > 1:
                where = {tensor.name: name for name, members in files.items() for tensor in members}
                size = sum(tensor.bytes for tensor in tensors)
                index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(where.items()))}
                write_text(unfinished / _INDEX, json.dumps(index, indent=2) + "\n")
            written = config if isinstance(config, bytes) else (json.dumps(config, indent=2) + "\n").encode()
            write_bytes(unfinished / "config.json", written)
            if complete is not None:
                complete(unfinished)
            # mkdtemp creates private folders; give the checkpoint the permissions of the user's other folders.
            umask = os.umask(0)
            os.umask(umask)
            unfinished.chmod(0o777 & ~umask)
            publish(unfinished, folder)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
    except OSError as error:
        raise RooftopError("export folder", str(folder), f"a path that can be written ({error.strerror})") from None


def _files(tensors: Sequence[CheckpointTensor], shard_bytes: int) -> dict[str, list[CheckpointTensor]]:
    """File name -> its tensors: a tensor that does not fit starts the next file."""
    groups, size = [list[CheckpointTensor]()], 0
    for tensor in tensors:
        if groups[-1] and size + tensor.bytes > shard_bytes:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += tensor.bytes
    if len(groups) == 1:
        return {_SINGLE: groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups, 1)}


def _write(file: BinaryIO, tensors: Sequence[CheckpointTensor], content: Callable[[CheckpointTensor], Array]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        offsets = [offset, offset := offset + tensor.bytes]
        header[tensor.name] = {"dtype": _CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for tensor in tensors:
        file.write(np.ascontiguousarray(content(tensor)).reshape(-1).view(np.uint8).data)
    file.flush()
    os.fsync(file.fileno())
