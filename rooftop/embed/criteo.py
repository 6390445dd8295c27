"""Criteo's click logs: a label, 13 counts and 26 hashed categories a line, separated by tabs, any of them missing."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rooftop.core.errors import RooftopError
from rooftop.models.embedding_tables.tables import Tables


@dataclass(frozen=True, kw_only=True)
class CriteoBatch:
    """label [B] float32 of 0 and 1; dense [B, 13] float32, log(1 + count); ids by feature, [B] int64 each."""

    label: NDArray[np.float32]
    dense: NDArray[np.float32]
    ids: Mapping[str, NDArray[np.int64]]


def check_features(tables: Tables) -> tuple[str, ...]:
    """The features of ``tables``, all of them columns of these data. Raises RooftopError."""
    for feature in tables.features:
        if feature.name not in FEATURES or feature.weighted or feature.length is not None:
            raise RooftopError(f"features.{feature.name}", feature.name, "a plain feature named C1 to C26")
    return tuple(feature.name for feature in tables.features)


class CriteoLines(NamedTuple):
    """The ``text`` of a batch's lines, behind ``first`` lines of the file."""

    first: int
    text: bytes


def read_lines(path: Path, batch: int, *, start: int = 0) -> Iterator[CriteoLines]:
    """Whole batches of ``batch`` lines, from batch ``start`` on; what is left over at the end of the file is not read.

    Raises RooftopError.
    """
    try:
        with path.open("rb") as file:
            for number, text in enumerate(whole_batches(file, batch, skip=start * batch), start):
                yield CriteoLines(number * batch, text)
    except OSError as error:
        raise RooftopError("data", str(path), f"a file that can be read ({error.strerror})") from None


def parse_lines(lines: CriteoLines, path: Path, tables: Tables, batch: int) -> CriteoBatch:
    """The batch that these lines of the file at ``path`` are.

    A category's id is 1 + its hash modulo (the vocabulary of its table - 1); a missing one is id 0, a missing count 0.
    Raises RooftopError for a line that is none of this format, naming it.
    """
    names = check_features(tables)
    sizes = {name: tables.table(tables.feature(name).table).vocabulary for name in names}
    label, counts, ids = parse(lines.text, batch, sizes, path, lines.first)
    return CriteoBatch(label=label, dense=np.log1p(np.maximum(counts, 0)), ids=ids)


def split_lines(
    lines: CriteoLines, path: Path, tables: Tables, batch: int
) -> tuple[Mapping[str, NDArray[np.int64]], CriteoBatch]:
    """The ids of the batch that these lines are, and the rest of it. Raises RooftopError."""
    found = parse_lines(lines, path, tables, batch)
    return found.ids, replace(found, ids={})


def read_batches(path: Path, tables: Tables, batch: int, *, start: int = 0) -> Iterator[CriteoBatch]:
    """The batches of ``read_lines``, parsed. Raises RooftopError."""
    check_features(tables)
    return (parse_lines(lines, path, tables, batch) for lines in read_lines(path, batch, start=start))


def count_batches(path: Path, batch: int) -> int:
    """Whole batches of a file. Raises RooftopError if it cannot be read."""
    try:
        with path.open("rb") as file:
            return count_lines(file) // batch
    except OSError as error:
        raise RooftopError("data", str(path), f"a file that can be read ({error.strerror})") from None


def require_batches(path: Path, batch: int) -> int:
    """Whole batches of a file, at least one. Raises RooftopError."""
    found = count_batches(path, batch)
    if not found:
        raise RooftopError("data", str(path), f"at least one batch of {batch} lines")
    return found


def digest_first(path: Path, batch: int) -> str:
    """SHA-256 of the lines of a file's first batch: a file that grows keeps it. Raises RooftopError."""
    try:
        with path.open("rb") as file:
            return hashlib.sha256(next(whole_batches(file, batch), b"")).hexdigest()
    except OSError as error:
        raise RooftopError("data", str(path), f"a file that can be read ({error.strerror})") from None


def require_labels(path: Path, batch: int) -> None:
    """Raises RooftopError unless the whole batches of a file have positives and negatives: an AUC needs both."""
    count = require_batches(path, batch) * batch
    with path.open("rb") as file:
        positive = count_positives(file, count)
    if positive in (0, count):
        raise RooftopError("data", str(path), f"positives and negatives, and not {positive} positives of {count}")


def auc(labels: NDArray[Any], scores: NDArray[Any]) -> float:
    """Area under the ROC curve: how often a positive scores above a negative, ties half (Hanley and McNeil 1982).

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
#: Lines parsed at a time: what is made of them stays in a core's cache.
_LINES = 1024
#: Bytes of a word, and digits that it holds.
_WORD = 8
_NEWLINE, _RETURN = b"\n\r"
#: Codes of what is no digit, above all digits; what ends a field is above all others. A digit's code is its value.
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
    """Lines of a file, the last one with or without its end."""
    return sum(int(np.count_nonzero(begins)) for begins, _ in _blocks(file))


def count_positives(file: BinaryIO, lines: int) -> int:
    """How many of the first ``lines`` lines begin with a 1."""
    found = 0
    for begins, block in _blocks(file):
        at = np.flatnonzero(begins)[:lines]
        found += int(np.count_nonzero(block[at] == ord("1")))
        lines -= len(at)
    return found


def _blocks(file: BinaryIO) -> Iterator[tuple[NDArray[np.bool_], NDArray[np.uint8]]]:
    """A file block by block: the bytes at which a line begins, and the bytes."""
    last = b"\n"
    while block := file.read(_BLOCK):
        codes = np.frombuffer(last + block, np.uint8)
        yield codes[:-1] == _NEWLINE, codes[1:]
        last = block[-1:]


def whole_batches(file: BinaryIO, batch: int, *, skip: int = 0) -> Iterator[bytes]:
    """The text of ``batch`` lines after another, each with its end, behind the first ``skip`` lines.

    No more than a batch and a block are held. What is left over at the end of the file is not told.
    """
    kept, missing = list[bytes](), batch
    for block in chain([_behind(file, skip)], iter(lambda: file.read(_BLOCK), b"")):
        ends, begin = _newlines(block) + 1, 0
        for end in ends[missing - 1 :: batch].tolist():
            yield b"".join([*kept, block[begin:end]])
            kept, begin = [], end
        kept.append(block[begin:])
        missing = (missing - len(ends) - 1) % batch + 1
    if missing == 1 and (rest := b"".join(kept)) and not rest.endswith(b"\n"):
        yield rest + b"\n"


def _behind(file: BinaryIO, lines: int) -> bytes:
    """What was read along with the first ``lines`` lines of a file, and is behind them."""
    while lines and (block := file.read(_BLOCK)):
        found = int(np.count_nonzero(np.frombuffer(block, np.uint8) == _NEWLINE))
        if found >= lines:
            return block[_newlines(block)[lines - 1] + 1 :]
        lines -= found
    return b""


def _newlines(block: bytes) -> NDArray[np.int64]:
    return np.flatnonzero(np.frombuffer(block, np.uint8) == _NEWLINE)


def parse(
    text: bytes, batch: int, sizes: Mapping[str, int], path: Path, first: int
) -> tuple[NDArray[np.float32], NDArray[np.float32], dict[str, NDArray[np.int64]]]:
    """Labels [B], counts [B, 13], and ids [B] by feature of the B = ``batch`` lines of ``text``, each with its end.

    ``sizes`` are the vocabularies of the features. Raises RooftopError for the first line of another format, counting
    from ``first``.
    """
    # Nothing of a table of one row is looked at: whatever its column holds, the id is 0.
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
    found = dict(zip(large, ids, strict=True))
    return label, counts, {name: found[name] if name in found else np.zeros(batch, np.int64) for name in sizes}


def parse_line(line: bytes, sizes: Mapping[str, int]) -> tuple[float, list[int], list[int]]:
    """Label, counts, and ids of the features of one line. Raises ValueError for another format."""
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
    found = int(text)
    if abs(found) >= 2**63:
        raise ValueError("a count of more than 64 bits")
    return found


def _parse_plain(
    text: bytes,
    sizes: Mapping[str, int],
    label: NDArray[np.float32],
    counts: NDArray[np.float32],
    ids: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Fill ``label``, ``counts`` and ``ids`` from the lines that are as in Criteo's own files; returns the others."""
    batch = len(label)
    # A word that begins at the last byte ends in the padding.
    padded = (text + bytes(_WORD)).translate(_CODES)
    codes = np.frombuffer(padded, np.uint8)
    found = np.flatnonzero(codes >= _FIRST_END)
    # There are as many ends of lines as lines: where they are at every fortieth place, the others are tabs.
    if len(found) != batch * _COLUMNS or not np.all(codes[found[_COLUMNS - 1 :: _COLUMNS]] > _FIRST_END):
        return np.arange(batch)
    ends = found.reshape(batch, _COLUMNS)
    starts = np.zeros_like(ends)
    np.add(found[:-1], 1, out=starts.reshape(-1)[1:])
    ends[:, -1] -= np.frombuffer(text, np.uint8)[ends[:, -1] - 1] == _RETURN
    lengths = ends - starts

    label[:] = codes[starts[:, 0]]
    odd = (label > 1) | (lengths[:, 0] != 1)

    begin, length = starts[:, 1 : 1 + COUNTS], lengths[:, 1 : 1 + COUNTS]
    negative = codes[begin] == _MINUS
    values, faults = _numbers(padded, begin + negative, length - negative, 10)
    odd |= np.any(faults | (negative & (length == 1)), axis=1)
    # Nobody reads a count below 0: how far below does not matter.
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
    """The numbers of fields of no more than eight digits, 0 for an empty one; and which fields are anything else."""
    words = np.ndarray(len(padded) - _WORD + 1, "<u8", padded, strides=(1,))[starts]
    # The first digit is in the lowest byte: what follows the field is shifted out, and zeros come in before it.
    words <<= (8 * (_WORD - lengths)).astype(np.uint64)
    faults = (lengths > _WORD) | ((words + _bytes(0x80 - radix)) & _bytes(0x80) != 0)
    # Neighbours are joined, twice as wide each time: bytes of one digit, two of two, four of four.
    for bits in (8, 16, 32):
        words = words * np.uint64(radix ** (bits // 8)) + (words >> np.uint64(bits))
        words &= np.uint64((2**64 - 1) // (2**bits + 1))
    return words, faults


def _bytes(value: int) -> np.uint64:
    """A word of which every byte is ``value``."""
    return np.uint64(value * 0x0101010101010101)
