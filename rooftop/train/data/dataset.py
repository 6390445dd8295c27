"""From ``--data`` to batches: the tokenizer, the token store, training and held-out documents."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import jax
from jax.experimental import multihost_utils

from rooftop.checkpoints.tokenizer import Tokenizer, train_bpe
from rooftop.core.errors import RooftopError
from rooftop.core.files import cache_folder
from rooftop.runs.folder import RunFolder
from rooftop.train.data.corpus import Corpus, documents, find_corpus
from rooftop.train.data.loading import Loader, hold_out
from rooftop.train.data.packing import pack
from rooftop.train.data.tokens import TokenStore, token_arrays, tokenise, unigram_entropy

#: Called with how much is done, how much there is, and what comes next.
Progress = Callable[[int, int, str], None]


#: Share of the documents that is held out by default.
_HOLD_OUT = 0.01


@dataclass(frozen=True, kw_only=True)
class DataSource:
    """Data and how to read it. ``tokenizer`` None: one of at most ``vocab`` tokens is trained on the data."""

    data: tuple[str, ...]
    field: str
    tokenizer: Path | None
    vocab: int


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """Batches to train on, and to evaluate on if documents are held out; the tokenizer is None for token arrays.

    ``held_share`` of the documents is held out. ``left_out``: files that are no text. ``unigram_entropy``: nats per
    token of the best guess that sees no context.
    """

    train: Loader
    held: Loader | None
    tokenizer: Tokenizer | None
    held_share: float
    left_out: int
    unigram_entropy: float

    @property
    def store(self) -> TokenStore:
        """All tokens."""
        return self.train.store

    @property
    def digest(self) -> str:
        """Digest of the tokens."""
        return self.store.digest


def open_dataset(
    source: DataSource,
    folder: RunFolder,
    *,
    vocab: int,
    batch: int,
    seq_len: int,
    seed: int,
    held_share: float | None,
    progress: Progress | None = None,
) -> Dataset:
    """Tokenise the data into the user's cache; the tokenizer is kept in ``folder`` and read there next time.

    ``vocab`` is the model's. ``held_share`` None holds out a share of 0.01, or nothing of a single document. All
    processes call it. Raises RooftopError for what the parts of it raise.
    """
    corpus = find_corpus(source.data, progress=progress)
    tokenizer = None if corpus.tokenised else _tokenizer(source, corpus, folder, progress)
    if tokenizer is None:
        store = token_arrays(corpus, vocab=vocab, progress=progress)
    else:
        store = tokenise(corpus, tokenizer, cache_folder("tokens"), vocab=vocab, field=source.field, progress=progress)
    if held_share and store.documents < 2:
        raise RooftopError("hold-out", held_share, "0 with one document, of which nothing can be held out")
    share = (_HOLD_OUT if store.documents > 1 else 0.0) if held_share is None else held_share
    training, held_out = hold_out(store.documents, share, seed) if share else (None, None)
    return Dataset(
        train=Loader(store=store, packing=pack(store, seq_len, chosen=training), batch=batch, seed=seed),
        held=None
        if held_out is None
        else Loader(store=store, packing=pack(store, seq_len, chosen=held_out), batch=batch, seed=None),
        tokenizer=tokenizer,
        held_share=share,
        left_out=len(corpus.left_out),
        unigram_entropy=unigram_entropy(store),
    )


def _tokenizer(source: DataSource, corpus: Corpus, folder: RunFolder, progress: Progress | None) -> Tokenizer:
    """Train the tokenizer in the first process; the others read it."""
    if jax.process_index() == 0 and not folder.tokenizer.exists():
        if source.tokenizer is not None:
            Tokenizer.load(source.tokenizer).save(folder.tokenizer)
        else:
            train_bpe(_texts(corpus, source.field, progress), source.vocab).save(folder.tokenizer)
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("rooftop tokenizer")
    tokenizer = Tokenizer.load(folder.tokenizer)
    if source.tokenizer is not None and Tokenizer.load(source.tokenizer).digest != tokenizer.digest:
        raise RooftopError("tokenizer", str(source.tokenizer), f"the one that the run began with, {folder.tokenizer}")
    return tokenizer


def _texts(corpus: Corpus, field: str, progress: Progress | None) -> Iterator[str]:
    for document in documents(corpus, field=field):
        yield document.text
        if progress is not None:
            progress(document.bytes_read, corpus.bytes, "training a tokenizer")
