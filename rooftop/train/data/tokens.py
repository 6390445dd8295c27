"""Token ids on disk: texts tokenised once, or existing arrays, read in place."""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rooftop.checkpoints.tokenizer import Ids, Tokenizer
from rooftop.core.errors import RooftopError
from rooftop.core.files import load_array, make_folder, publish, read_text, write_text
from rooftop.train.data.corpus import Corpus, CorpusDocument, Progress, documents, sidecar

#: The dtypes of a .bin of token ids.
DTYPES: tuple[str, ...] = ("uint16", "uint32")
_FORMAT = 1
_CHUNK = 1 << 22  # tokens, or characters, that are handled at a time


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenStore:
    """Documents of token ids, memory-mapped.

    ``parts``: [tokens] each, one after the other; ``offsets`` [documents + 1] int64: where each document begins, and
    the end. No document lies in two parts. ``digest`` tells stores with different tokens apart.
    """

    parts: tuple[npt.NDArray[Any], ...]
    offsets: npt.NDArray[np.int64]
    digest: str

    @property
    def tokens(self) -> int:
        """Tokens of all documents."""
        return int(self.offsets[-1])

    @property
    def documents(self) -> int:
        """The number of documents."""
        return len(self.offsets) - 1

    def read(self, start: int, stop: int) -> Ids:
        """Return tokens ``start`` to ``stop``, counted from the beginning of the store."""
        part = bisect_right(self._starts, start) - 1
        begin = self._starts[part]
        return np.array(self.parts[part][start - begin : stop - begin], np.int32)

    @cached_property
    def _starts(self) -> list[int]:
        return [0, *np.cumsum([len(part) for part in self.parts])[:-1].tolist()]


def tokenise(
    corpus: Corpus,
    tokenizer: Tokenizer,
    folder: Path,
    *,
    vocab: int,
    field: str = "text",
    progress: Progress | None = None,
) -> TokenStore:
    """Tokenise the corpus once into ``folder``; the next call with the same corpus reads it there.

    Each document begins with ``tokenizer.bos`` and ends with ``tokenizer.eos``, where there are such. What is made
    depends on the tokenizer, the content of the files and ``field``; it appears whole or not at all, and processes that
    ask at once wait for one that makes it. ``vocab`` is the model's. Raises RooftopError for a tokenizer with more
    tokens than that, a corpus without text, a folder that cannot be written, or what ``documents`` raises.
    """
    if tokenizer.vocab > vocab:
        raise RooftopError("vocabulary of the tokenizer", tokenizer.vocab, f"at most {vocab}, that of the model")
    parts = [(source.kind, source.digest) for source in corpus.sources]
    key = hashlib.sha256(json.dumps([_FORMAT, tokenizer.digest, field, parts]).encode()).hexdigest()
    place, partial = folder / key, folder / f"{key}.partial"
    try:
        make_folder(folder)
        with _locked(folder / f"{key}.lock"):
            if (store := _opened(place, key)) is not None:
                return store
            # Left by a process that was killed, or damaged: the lock says that nobody is at work on them.
            for stale in (place, partial):
                shutil.rmtree(stale, ignore_errors=True)
            partial.mkdir()
            try:
                _write(partial, corpus, tokenizer, field, progress)
                publish(partial, place)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
            store = _opened(place, key)
    except OSError as error:
        accepted = f"a folder that can be written ({error.strerror}); XDG_CACHE_HOME names the place of another"
        raise RooftopError("token store", str(folder), accepted) from None
    assert store is not None
    return store


def token_arrays(corpus: Corpus, *, vocab: int, progress: Progress | None = None) -> TokenStore:
    """Open arrays of token ids in place: .npy, or .bin of uint16 or uint32 with a JSON file next to it.

    That file, of the same name, says ``{"dtype": "uint16", "eos": 2}``: a document ends after each ``eos``; where there
    is none, an array [tokens] is one document, and each row of an array [documents, tokens] is one. Every id is read
    once, to be checked. Raises RooftopError for what is no such array, for an id of ``vocab``, the model's, or more,
    and for arrays without tokens.
    """
    arrays, offsets, done = [], [np.zeros(1, np.int64)], 0
    total = sum(source.bytes for source in corpus.sources)
    digest = hashlib.sha256()
    for source in corpus.sources:
        if progress is not None:
            progress(done, total, f"checking {source.path.name}")
        done += source.bytes
        array, eos = _array(source.path)
        flat = array.reshape(-1)
        ends = _checked(flat, source.path, vocab, eos)
        if eos is None:
            rows, length = array.shape if array.ndim == 2 else (1, len(flat))
            ends = np.arange(1, rows + 1, dtype=np.int64) * length
        elif len(flat) and (not len(ends) or ends[-1] != len(flat)):
            ends = np.append(ends, len(flat))
        if len(flat):
            offsets.append(offsets[-1][-1:] + ends)
            arrays.append(flat)
        digest.update(json.dumps([source.digest, eos, str(array.dtype), array.shape]).encode())
    store = TokenStore(parts=tuple(arrays), offsets=np.concatenate(offsets), digest=digest.hexdigest())
    if not store.tokens:
        raise RooftopError("data", " ".join(str(s.path) for s in corpus.sources), "arrays with at least one token id")
    return store


def unigram_entropy(store: TokenStore) -> float:
    """Return the entropy of the frequencies of token ids in the store, in nats per token.

    The cross-entropy of the best model that sees no context: one whose loss is below it has learned from context.
    """
    counts = np.zeros(0, np.int64)
    for part in store.parts:
        for start in range(0, len(part), _CHUNK):
            result = np.bincount(part[start : start + _CHUNK].astype(np.int64), minlength=len(counts))
            result[: len(counts)] += counts
            counts = result
    shares = counts[counts > 0] / store.tokens
    return float(-np.sum(shares * np.log(shares)))


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of this name; the system releases the lock of a process that is killed."""
    with path.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _opened(place: Path, key: str) -> TokenStore | None:
    """The store at ``place``; None if it is missing or incomplete."""
    try:
        about = json.loads((place / "store.json").read_text(encoding="utf-8"))
        tokens = np.memmap(place / "tokens.bin", dtype=about["dtype"], mode="r")
        offsets = load_array(place / "documents.npy", "token store")
        if about["format"] != _FORMAT or offsets[-1] != len(tokens) or about["documents"] != len(offsets) - 1:
            return None
    except (OSError, ValueError, KeyError, TypeError, IndexError, RecursionError, RooftopError):
        return None
    return TokenStore(parts=(tokens,), offsets=offsets, digest=key)


def _write(place: Path, corpus: Corpus, tokenizer: Tokenizer, field: str, progress: Progress | None) -> None:
    dtype = np.dtype("uint16" if tokenizer.vocab <= 1 << 16 else "uint32")
    ends, total = [0], corpus.bytes
    bos, eos = (np.array([] if id_ is None else [id_], np.int32) for id_ in (tokenizer.bos, tokenizer.eos))
    with (place / "tokens.bin").open("wb") as file:
        for group in _groups(documents(corpus, field=field)):
            for ids in tokenizer.encode_many([document.text for document in group]):
                whole = np.concatenate([bos, ids, eos])
                file.write(whole.astype(dtype).tobytes())
                ends.append(ends[-1] + len(whole))
            if progress is not None:
                progress(group[-1].bytes_read, total, f"tokenising: {ends[-1]:,} tokens")
    if not ends[-1]:
        raise RooftopError("data", ", ".join(str(source.path) for source in corpus.sources), "a corpus with text in it")
    with (place / "documents.npy").open("wb") as file:
        np.save(file, np.array(ends, np.int64))
    about = {"format": _FORMAT, "dtype": dtype.name, "documents": len(ends) - 1, "tokens": ends[-1]}
    write_text(place / "store.json", json.dumps(about) + "\n")


def _groups(documents: Iterator[CorpusDocument]) -> Iterator[list[CorpusDocument]]:
    """Yield documents in groups large enough to encode in parallel."""
    group: list[CorpusDocument] = []
    characters = 0
    for document in documents:
        group.append(document)
        characters += len(document.text)
        if characters >= _CHUNK:
            yield group
            group, characters = [], 0
    if group:
        yield group


def _array(path: Path) -> tuple[npt.NDArray[Any], int | None]:
    """The memory-mapped array, and the id that ends a document, if its JSON file names one."""
    beside = sidecar(path)
    example = '{"dtype": "uint16", "eos": 2}'
    try:
        about = json.loads(read_text(beside)) if beside.exists() else {}
        eos, dtype = about.get("eos"), about.get("dtype")
    except (OSError, ValueError, AttributeError, RecursionError):
        raise RooftopError("data", str(beside), f"a JSON object such as {example}") from None
    if eos is not None and (not isinstance(eos, int) or isinstance(eos, bool)):
        raise RooftopError(f"eos of {beside}", eos, "a token id")
    if path.suffix.lower() == ".npy":
        array = load_array(path, "data")
        if array.ndim not in (1, 2) or array.dtype.kind not in "iu":
            problem = f"{path}: {array.dtype}{list(array.shape)}"
            raise RooftopError("data", problem, "whole numbers, [tokens] or [documents, tokens]")
        return array, eos
    if dtype not in DTYPES:
        accepted = f"one of {', '.join(DTYPES)}, in a file {beside} such as {example}"
        raise RooftopError(f"dtype of {path}", dtype, accepted)
    size, width = path.stat().st_size, np.dtype(dtype).itemsize
    if size % width:
        raise RooftopError("data", f"{path}: {size} bytes", f"a multiple of the {width} bytes of a {dtype}")
    return np.memmap(path, dtype=dtype, mode="r") if size else np.zeros(0, dtype), eos


def _checked(flat: npt.NDArray[Any], path: Path, vocab: int, eos: int | None) -> npt.NDArray[np.int64]:
    """The indices after each ``eos``. Raises RooftopError for an id outside of the vocabulary."""
    ends = [np.zeros(0, np.int64)]
    for start in range(0, len(flat), _CHUNK):
        ids = flat[start : start + _CHUNK]
        if int(ids.max()) >= vocab or int(ids.min()) < 0:
            place = int(np.argmax((ids >= vocab) | (ids < 0)))
            accepted = f"0 to {vocab - 1}, the ids of the model's vocabulary"
            raise RooftopError(f"token {start + place} of {path}", int(ids[place]), accepted)
        if eos is not None:
            ends.append(np.flatnonzero(ids == eos) + start + 1)
    return np.concatenate(ends)
