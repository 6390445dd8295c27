"""The corpus: files, folders and globs of plain text, JSONL and Parquet, or of token ids."""

from __future__ import annotations

import glob
import hashlib
import importlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rooftop.core.errors import RooftopError, unknown
from rooftop.core.extras import require
from rooftop.core.files import open_file, read_bytes

#: What to call with how many bytes are done, how many there are, and what comes next.
Progress = Callable[[int, int, str], None]

#: How a file is read, by its suffix; any other suffix is plain text.
KINDS: dict[str, str] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".npy": "tokens",
    ".bin": "tokens",
}
_ROWS = 1024


@dataclass(frozen=True, kw_only=True)
class CorpusSource:
    """A file: ``kind`` is text, jsonl, parquet or tokens, ``digest`` the SHA-256 of its content in hexadecimal."""

    path: Path
    kind: str
    bytes: int
    digest: str


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Files to train on, in the order of their names; ``left_out`` are files that are not UTF-8 text."""

    sources: tuple[CorpusSource, ...]
    left_out: tuple[Path, ...] = ()

    @property
    def bytes(self) -> int:
        """Bytes of all files."""
        return sum(source.bytes for source in self.sources)

    @property
    def tokenised(self) -> bool:
        """True if the files hold token ids, False if they hold text."""
        return any(source.kind == "tokens" for source in self.sources)


@dataclass(frozen=True, kw_only=True)
class CorpusDocument:
    """The text of a document; ``bytes_read`` of the corpus at its end."""

    text: str
    bytes_read: int


def find_corpus(data: Sequence[str], *, progress: Progress | None = None) -> Corpus:
    """Find the corpus of files, folders (all files below but hidden ones) and globs (``**`` for folders below).

    A file named alone must be readable as what its suffix says; what a folder or glob finds and is not UTF-8 text is
    left out. Every file is read once, for its digest. Raises RooftopError for a name that stands for nothing, a file
    that cannot be read, or text together with token ids.
    """
    result: dict[Path, bool] = {}
    for name in data:
        for path, alone in find_files(name):
            result[path] = result.get(path, False) or alone
    sizes = {path: path.stat().st_size for path in result}
    sources, left_out, done = [], [], 0
    for path, alone in result.items():
        if progress is not None:
            progress(done, sum(sizes.values()), f"reading {path.name}")
        kind = KINDS.get(path.suffix.lower(), "text")
        try:
            digest = _digest(path, kind)
        except OSError as error:
            raise RooftopError("data", str(path), f"a file that can be read ({error.strerror})") from None
        except UnicodeDecodeError as error:
            if alone:
                raise RooftopError("data", str(path), f"UTF-8 text ({error.reason} at byte {error.start})") from None
            left_out.append(path)
        else:
            sources.append(CorpusSource(path=path, kind=kind, bytes=sizes[path], digest=digest))
        done += sizes[path]
    if not any(source.bytes for source in sources):
        raise RooftopError("data", " ".join(data), "files with text or token ids in them: there is nothing to train on")
    if len({source.kind == "tokens" for source in sources}) > 1:
        raise RooftopError("data", " ".join(data), "either text or token ids (.npy, .bin), not both")
    return Corpus(sources=tuple(sources), left_out=tuple(left_out))


def documents(corpus: Corpus, *, field: str = "text") -> Iterator[CorpusDocument]:
    """Yield documents with text: each plain text file, each row of JSONL or Parquet by its ``field``.

    Raises RooftopError for a row without that field, naming it, for a file that is not what its suffix says, or where
    Parquet cannot be read here.
    """
    before = 0
    for source in corpus.sources:
        if source.kind == "jsonl":
            texts = _jsonl(source.path, field)
        elif source.kind == "parquet":
            texts = _parquet(source, field)
        elif source.kind == "text":
            texts = ((_text(read_bytes(path, most=source.bytes)), source.bytes) for path in [source.path])
        else:
            raise RooftopError("data", str(source.path), "text, JSONL or Parquet where text is needed")
        try:
            for text, bytes_read in texts:
                if text:
                    yield CorpusDocument(text=text, bytes_read=before + bytes_read)
        except (OSError, UnicodeDecodeError) as error:
            raise RooftopError("data", str(source.path), f"a file that stays as it was found ({error})") from None
        before += source.bytes


def sidecar(path: Path) -> Path:
    """The JSON file next to a .bin or .npy of token ids, which describes it and has its name."""
    return path.with_suffix(".json")


def find_files(name: str) -> list[tuple[Path, bool]]:
    """The files of a name, and True if it names a single one. Raises RooftopError if there are none."""
    path = Path(name).expanduser()
    if path.is_file():
        return [(path, True)]
    if path.is_dir():
        below = (item for item in path.rglob("*") if not any(p.startswith(".") for p in item.relative_to(path).parts))
    elif glob.has_magic(name):
        below = (Path(item) for item in glob.iglob(str(path), recursive=True))
    else:
        raise RooftopError("data", name, "a file, a folder or a glob: there is none of this name")
    arrays = [suffix for suffix, kind in KINDS.items() if kind == "tokens"]
    result = sorted(
        item
        for item in below
        if item.is_file() and not (item.suffix == ".json" and any(item.with_suffix(s).exists() for s in arrays))
    )
    if not result:
        raise RooftopError("data", name, "a folder or glob with files in it: there are none")
    return [(item, False) for item in result]


def _digest(path: Path, kind: str) -> str:
    if kind == "text":
        content = read_bytes(path, most=path.stat().st_size)
        _text(content)
        return hashlib.sha256(content).hexdigest()
    with open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _text(content: bytes) -> str:
    """Decode UTF-8 without NUL bytes: text has none and most other files do. Raises UnicodeDecodeError."""
    if (place := content.find(0)) >= 0:
        raise UnicodeDecodeError("utf-8", content, place, place + 1, "NUL")
    return content.decode("utf-8")


def _jsonl(path: Path, field: str) -> Iterator[tuple[str, int]]:
    done = 0
    with open_file(path) as file:
        for number, line in enumerate(file, start=1):
            done += len(line)
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise RooftopError("data", f"{path}:{number}", f"one JSON object a line ({error})") from None
            if not isinstance(row, dict):
                raise RooftopError("data", f"{path}:{number}", f"a JSON object with the field {field!r}")
            yield _field(row, field, f"{path}:{number}"), done


def _parquet(source: CorpusSource, field: str) -> Iterator[tuple[str, int]]:
    require("parquet", "pyarrow", purpose=f"to read {source.path}")
    parquet: Any = importlib.import_module("pyarrow.parquet")
    try:
        file = parquet.ParquetFile(source.path)
    except (OSError, ValueError) as error:
        raise RooftopError("data", str(source.path), f"a Parquet file ({_one_line(error)})") from None
    with file:
        if field not in file.schema_arrow.names:
            raise unknown(f"field of {source.path}", field, file.schema_arrow.names)
        rows, number = max(file.metadata.num_rows, 1), 0
        try:
            for batch in file.iter_batches(batch_size=_ROWS, columns=[field]):
                for row in batch.to_pylist():
                    number += 1
                    yield _field(row, field, f"{source.path} row {number}"), source.bytes * number // rows
        except (OSError, ValueError) as error:
            raise RooftopError("data", str(source.path), f"a whole Parquet file ({_one_line(error)})") from None


def _field(row: dict[str, Any], field: str, place: str) -> str:
    if field not in row:
        raise unknown(f"field of {place}", field, row)
    text = row[field]
    if not isinstance(text, str):
        raise RooftopError(f"field {field} of {place}", text, "text")
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        raise RooftopError(f"field {field} of {place}", ascii(text)[:40], "text: it has half of a surrogate pair")
    return text


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
