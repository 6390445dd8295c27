"""Criteo's click logs: a label, 13 counts and 26 hashed categories a line, separated by tabs, any of them missing."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from jaxtyping import Float32, Int64, Shaped
from numpy.typing import NDArray

from rooftop.core.errors import RooftopError
from rooftop.core.files import open_file
from rooftop.models.embedding_tables.tables import Tables


@dataclass(frozen=True, kw_only=True)
class CriteoBatch:
    """Labels of 0 and 1, dense values log(1 + count), and ids by feature."""

    label: Float32[np.ndarray, " B"]
    dense: Float32[np.ndarray, "B 13"]
    ids: Mapping[str, Int64[np.ndarray, " B"]]


def check_features(tables: Tables) -> tuple[str, ...]:
    """Return the features of ``tables``. Raises RooftopError unless all are columns of this format."""
    for feature in tables.features:
        if feature.name not in FEATURES or feature.weighted or feature.length is not None:
            raise RooftopError(f"features.{feature.name}", feature.name, "a plain feature named C1 to C26")
    return tuple(feature.name for feature in tables.features)


class CriteoLines(NamedTuple):
    """The ``text`` of a batch's lines, after ``first`` lines of the file."""

    first: int
    text: bytes


def read_lines(path: Path, batch: int, *, start: int = 0) -> Iterator[CriteoLines]:
    """Yield whole batches of ``batch`` lines from batch ``start`` on; a final partial batch is dropped.

    Raises RooftopError for a file that cannot be read.
    """
    try:
        with open_file(path) as file:
            for number, text in enumerate(whole_batches(file, batch, skip=start * batch), start):
                yield CriteoLines(number * batch, text)
    except OSError as error:
        raise RooftopError("data", str(path), f"a file that can be read ({error.strerror})") from None


def parse_lines(lines: CriteoLines, path: Path, tables: Tables, batch: int) -> CriteoBatch:
    """Parse the batch of these lines of the file at ``path``.

    A category's id is 1 + its hash modulo (the vocabulary of its table - 1); a missing one is id 0, a missing count 0.
    Raises RooftopError naming a line of another format.
    """
    names = check_features(tables)
    sizes = {name: tables.table(tables.feature(name).table).vocabulary for name in names}
    label, counts, ids = parse(lines.text, batch, sizes, path, lines.first)
    return CriteoBatch(label=label, dense=np.log1p(np.maximum(counts, 0)), ids=ids)


def split_lines(
    lines: CriteoLines, path: Path, tables: Tables, batch: int
) -> tuple[Mapping[str, Int64[np.ndarray, " B"]], CriteoBatch]:
    """Parse the batch of these lines into its ids and the rest. Raises RooftopError."""
    parsed = parse_lines(lines, path, tables, batch)
    return parsed.ids, replace(parsed, ids={})


def read_batches(path: Path, tables: Tables, batch: int, *, start: int = 0) -> Iterator[CriteoBatch]:
    """Yield the batches of ``read_lines``, parsed. Raises RooftopError."""
    check_features(tables)
    return (parse_lines(lines, path, tables, batch) for lines in read_lines(path, batch, start=start))


def count_batches(path: Path, batch: int) -> int:
    """Count the whole batches of a file. Raises RooftopError if it cannot be read."""
    try:
        with open_file(path) as file:
            return count_lines(file) // batch
    except OSError as error:
        raise RooftopError("data", str(path), f"a file that can be read ({error.strerror})") from None


def require_batches(path: Path, batch: int) -> int:
    """Count the whole batches of a file. Raises RooftopError if there are none."""
    count = count_batches(path, batch)
    if not count:
        raise RooftopError("data", str(path), f"at least one batch of {batch} lines")
    return count


def digest_first(path: Path, batch: int) -> str:
    """Return the SHA-256 of a file's first batch, which stays the same when the file grows. Raises RooftopError."""
    try:
        with open_file(path) as file:
            return hashlib.sha256(next(whole_batches(file, batch), b"")).hexdigest()
    except OSError as error:
        raise RooftopError("data", str(path), f"a file that can be read ({error.strerror})") from None


def require_labels(path: Path, batch: int) -> None:
    """Raise RooftopError unless the whole batches of a file have positives and negatives: an AUC needs both."""
    count = require_batches(path, batch) * batch
    with open_file(path) as file:
        positive = count_positives(file, count)
    if positive in (0, count):
        raise RooftopError("data", str(path), f"positives and negatives, and not {positive} positives of {count}")


def auc(labels: Shaped[np.ndarray, " B"], scores: Shaped[np.ndarray, " B"]) -> float:
    """Return the area under the ROC curve: how often a positive beats a negative, ties half (Hanley and McNeil 1982).

    Raises RooftopError unless there are both positives and negatives.
    """
    positive = np.asarray(labels) > 0.5
    count = int(positive.sum())
    if count in (0, len(positive)):
        raise RooftopError("labels", f"{count} positives of {len(positive)}", "positives and negatives")
    values, inverse, counts = np.unique(np.asarray(scores, np.float64), return_inverse=True, return_counts=True)
    del values
    ranks = np.cumsum(counts) - (counts - 1) / 2
    total = float(ranks[inverse][positive].sum())
    return (total - count * (count + 1) / 2) / (count * (len(positive) - count))


COUNTS, CATEGORIES = 13, 26
#: Features of a model of these data are called C1 to C26, in the order of the columns.
FEATURES: tuple[str, ...] = tuple(f"C{index + 1}" for index in range(CATEGORIES))

_COLUMNS = 1 + COUNTS + CATEGORIES
_COLUMN = {name: 1 + COUNTS + index for index, name in enumerate(FEATURES)}
#: Bytes read at a time.
_BLOCK = 1 << 20
#: Lines parsed at a time: their arrays stay in a core's cache.
_LINES = 1024
#: Bytes, and so digits, of a word.
_WORD = 8
_NEWLINE, _RETURN = b"\n\r"
#: Codes of characters other than digits are above those of digits, which are their values; ends of fields are highest.
_OTHER, _MINUS, _FIRST_END = 0x80, 0x81, 0xFE


def _codes() -> bytes:
    codes = bytearray([_OTHER]) * 256
    for value, digit in enumerate(b"0123456789abcdef"):
        codes[digit] = value
    codes[ord("A") : ord("G")] = range(10, 16)
    codes[ord("-")] = _MINUS
    codes[ord("\t")], codes[_NEWLINE] = _FIRST_END, _FIRST_END + 1
    return bytes(codes)


_CODES = _codes()


def count_lines(file: BinaryIO) -> int:
    """Count the lines of a file, the last one with or without its newline."""
    return sum(int(np.count_nonzero(begins)) for begins, _ in _blocks(file))


def count_positives(file: BinaryIO, lines: int) -> int:
    """Count those of the first ``lines`` lines that begin with a 1."""
    positives = 0
    for begins, block in _blocks(file):
        at = np.flatnonzero(begins)[:lines]
        positives += int(np.count_nonzero(block[at] == ord("1")))
        lines -= len(at)
    return positives


def _blocks(file: BinaryIO) -> Iterator[tuple[NDArray[np.bool_], NDArray[np.uint8]]]:
    """Yield a file block by block: a mask of the bytes that begin a line, and the bytes."""
    last = b"\n"
    while block := file.read(_BLOCK):
        codes = np.frombuffer(last + block, np.uint8)
        yield codes[:-1] == _NEWLINE, codes[1:]
        last = block[-1:]


def whole_batches(file: BinaryIO, batch: int, *, skip: int = 0) -> Iterator[bytes]:
    """Yield the text of every ``batch`` lines, each with its newline, after the first ``skip`` lines.

    Memory holds no more than a batch and a block. A final partial batch is dropped.
    """
    parts, missing = list[bytes](), batch
    for block in chain([_rest_after(file, skip)], iter(lambda: file.read(_BLOCK), b"")):
        ends, begin = _newlines(block) + 1, 0
        for end in ends[missing - 1 :: batch].tolist():
            yield b"".join([*parts, block[begin:end]])
            parts, begin = [], end
        parts.append(block[begin:])
        missing = (missing - len(ends) - 1) % batch + 1
    if missing == 1 and (rest := b"".join(parts)) and not rest.endswith(b"\n"):
        yield rest + b"\n"


def _rest_after(file: BinaryIO, lines: int) -> bytes:
    """Skip the first ``lines`` lines of a file; return the rest of the last block read."""
    while lines and (block := file.read(_BLOCK)):
        newlines = int(np.count_nonzero(np.frombuffer(block, np.uint8) == _NEWLINE))
        if newlines >= lines:
            return block[_newlines(block)[lines - 1] + 1 :]
        lines -= newlines
    return b""


def _newlines(block: bytes) -> NDArray[np.int64]:
    return np.flatnonzero(np.frombuffer(block, np.uint8) == _NEWLINE)


def parse(
    text: bytes, batch: int, sizes: Mapping[str, int], path: Path, first: int
) -> tuple[NDArray[np.float32], NDArray[np.float32], dict[str, NDArray[np.int64]]]:
    """Return labels [B], counts [B, 13], and ids [B] by feature of the B = ``batch`` lines of ``text``.

    ``sizes`` are the vocabularies of the features; every line has its newline. Raises RooftopError naming the
    first line of another format, counted from ``first``.
    """
    # The column of a table of one row is not read: the id is 0.
    large = {name: size for name, size in sizes.items() if size > 1}
    label, counts = np.zeros(batch, np.float32), np.zeros((batch, COUNTS), np.float32)
    ids = np.zeros((len(large), batch), np.int64)
    ends, odd = _newlines(text) + 1, list[int]()
    for low in range(0, batch, _LINES):
        part = slice(low, min(low + _LINES, batch))
        piece = text[ends[low - 1] if low else 0 : ends[part.stop - 1]]
        odd += (low + _parse_plain(piece, large, label[part], counts[part], ids[:, part])).tolist()
    lines = text.split(b"\n") if odd else []
    for at in odd:
        try:
            label[at], counts[at], ids[:, at] = parse_line(lines[at], large)
        except ValueError as error:
            accepted = f"a label, {COUNTS} whole numbers and {CATEGORIES} hexadecimal ones, separated by tabs"
            raise RooftopError(f"{path} line {first + at + 1}", str(error), accepted) from None
    parsed = dict(zip(large, ids, strict=True))
    return label, counts, {name: parsed[name] if name in parsed else np.zeros(batch, np.int64) for name in sizes}


def parse_line(line: bytes, sizes: Mapping[str, int]) -> tuple[float, list[int], list[int]]:
    """Return label, counts, and ids of the features of one line. Raises ValueError for another format."""
    fields = line.rstrip(b"\r\n").split(b"\t")
    if len(fields) != _COLUMNS:
        raise ValueError(f"{len(fields)} columns")
    if fields[0] not in (b"0", b"1"):
        raise ValueError("a label that is neither 0 nor 1")
    counts = [_count(count) if count else 0 for count in fields[1 : 1 + COUNTS]]
    categories = [fields[_COLUMN[name]] for name in sizes]
    ids = [
        1 + int(text, 16) % (size - 1) if text and size > 1 else 0
        for text, size in zip(categories, sizes.values(), strict=True)
    ]
    return float(fields[0]), counts, ids


def _count(text: bytes) -> int:
    count = int(text)
    if abs(count) >= 2**63:
        raise ValueError("a count of more than 64 bits")
    return count


def _parse_plain(
    text: bytes,
    sizes: Mapping[str, int],
    label: NDArray[np.float32],
    counts: NDArray[np.float32],
    ids: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Fill ``label``, ``counts`` and ``ids`` from lines as in Criteo's own files; return the indices of other lines."""
    batch = len(label)
    # A word that begins at the last byte ends in this padding.
    padded = (text + bytes(_WORD)).translate(_CODES)
    codes = np.frombuffer(padded, np.uint8)
    separators = np.flatnonzero(codes >= _FIRST_END)
    # There are as many newlines as lines: if every fortieth separator is one, the others are tabs.
    if len(separators) != batch * _COLUMNS or not np.all(codes[separators[_COLUMNS - 1 :: _COLUMNS]] > _FIRST_END):
        return np.arange(batch)
    ends = separators.reshape(batch, _COLUMNS)
    starts = np.zeros_like(ends)
    np.add(separators[:-1], 1, out=starts.reshape(-1)[1:])
    ends[:, -1] -= np.frombuffer(text, np.uint8)[ends[:, -1] - 1] == _RETURN
    lengths = ends - starts

    label[:] = codes[starts[:, 0]]
    odd = (label > 1) | (lengths[:, 0] != 1)

    begin, length = starts[:, 1 : 1 + COUNTS], lengths[:, 1 : 1 + COUNTS]
    negative = codes[begin] == _MINUS
    values, faults = _numbers(padded, begin + negative, length - negative, 10)
    odd |= np.any(faults | (negative & (length == 1)), axis=1)
    # Counts below 0 are read as 0.
    counts[:] = np.where(negative, 0, values)

    columns = [_COLUMN[name] for name in sizes]
    begin, length = starts.T[columns], lengths.T[columns]
    values, faults = _numbers(padded, begin, length, 16)
    odd |= np.any(faults, axis=0)
    rows = np.array([size - 1 for size in sizes.values()], np.uint64)[:, None]
    ids[:] = np.where(length > 0, values % rows + np.uint64(1), 0)
    return np.flatnonzero(odd)


def _numbers(
    padded: bytes, starts: NDArray[np.int64], lengths: NDArray[np.int64], radix: int
) -> tuple[NDArray[np.uint64], NDArray[np.bool_]]:
    """Numbers of fields of up to eight digits, 0 for an empty field; and a mask of all other fields."""
    words = np.ndarray(len(padded) - _WORD + 1, "<u8", padded, strides=(1,))[starts]
    # The first digit is in the lowest byte: the shift drops the bytes after the field and adds zeros before it.
    words <<= (8 * (_WORD - lengths)).astype(np.uint64)
    faults = (lengths > _WORD) | ((words + _bytes(0x80 - radix)) & _bytes(0x80) != 0)
    # Join neighbours, twice as wide each time: one digit a byte, then two digits in two, four in four.
    for bits in (8, 16, 32):
        words = words * np.uint64(radix ** (bits // 8)) + (words >> np.uint64(bits))
        words &= np.uint64((2**64 - 1) // (2**bits + 1))
    return words, faults


def _bytes(value: int) -> np.uint64:
    """A word whose bytes are all ``value``."""
    return np.uint64(value * 0x0101010101010101)
