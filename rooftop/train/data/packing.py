"""Packing of documents into sequences of T tokens.

A document of up to T tokens stays whole. A longer one is split every T tokens; what remains is packed like a short one,
and each piece still has the token that follows it as its last target. Every token is an input once. Pieces are placed
by best fit, longest first: each into the sequence that it leaves least room in. All pieces of one length go in one
move, so that the work depends on T and not on how many documents there are (after Krell et al. 2021, section 3).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rooftop.core.errors import RooftopError
from rooftop.programs.parameters import Batch
from rooftop.train.data.tokens import TokenStore

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Packing:
    """Sequences of pieces of documents.

    Of each piece [pieces]: ``starts``, its first token in the store; ``lengths``; ``continues``, whether its document
    goes on behind it. Sequence r has the pieces ``bounds[r]`` to ``bounds[r + 1]``; bounds [rows + 1].
    """

    seq_len: int
    starts: Ints
    lengths: Ints
    continues: npt.NDArray[np.bool_]
    bounds: Ints

    @property
    def rows(self) -> int:
        """The number of sequences."""
        return len(self.bounds) - 1

    @property
    def tokens(self) -> int:
        """Tokens of all documents: inputs in one epoch."""
        return int(self.lengths.sum())

    @property
    def targets(self) -> int:
        """Tokens that are predicted in one epoch: all but the first of each document."""
        return self.tokens - int(np.count_nonzero(~self.continues))

    @property
    def padding(self) -> float:
        """The share of positions that hold no token."""
        return 1 - self.tokens / (self.rows * self.seq_len)


def pack(store: TokenStore, seq_len: int, *, chosen: Ints | None = None) -> Packing:
    """Pack the documents ``chosen``, by their indices [documents]; None: all.

    The same documents give the same packing. Raises RooftopError for a length below 1, or documents without a token.
    """
    if seq_len < 1:
        raise RooftopError("seq_len", seq_len, "a positive whole number")
    which = np.arange(store.documents) if chosen is None else chosen
    begins, ends = store.offsets[which], store.offsets[which + 1]
    starts, lengths, continues = _pieces(begins, ends, seq_len)
    if not len(starts):
        raise RooftopError("documents to pack", len(which), "at least one that has a token")
    # Stable: of pieces of one length, those that come first in the store are placed first.
    by_length = np.argsort(lengths, kind="stable")
    taken = np.concatenate([[0], np.cumsum(np.bincount(lengths, minlength=seq_len + 1))]).tolist()
    order, sizes = [], []
    for cohort in _best_fit(np.diff(taken).tolist(), seq_len):
        columns = []
        for length, times in cohort.pieces:
            first = taken[length]
            taken[length] = first + cohort.rows * times
            columns.append(by_length[first : taken[length]].reshape(cohort.rows, times))
        block = np.concatenate(columns, axis=1)
        order.append(block.reshape(-1))
        sizes.append(np.full(cohort.rows, block.shape[1], np.int64))
    placed = np.concatenate(order)
    return Packing(
        seq_len=seq_len,
        starts=starts[placed],
        lengths=lengths[placed],
        continues=continues[placed],
        bounds=np.concatenate([[0], np.cumsum(np.concatenate(sizes))]),
    )


def fill(store: TokenStore, packing: Packing, rows: Ints) -> Batch[npt.NDArray[np.int32]]:
    """Return the sequences ``rows`` [n] of a packing, all arrays [n, T] int32; a row after the last one is padding.

    ``segments`` count the pieces of a sequence from 1, and ``positions`` the tokens of each piece from 0; both are 0 in
    padding, as tokens are. The target is -1 in padding and behind the last token of a document.
    """
    shape = (len(rows), packing.seq_len)
    tokens, segments, positions = (np.zeros(shape, np.int32) for _ in range(3))
    targets = np.full(shape, -1, np.int32)
    for row, number in enumerate(rows.tolist()):
        begin = 0
        pieces = range(*packing.bounds[number : number + 2].tolist()) if number < packing.rows else ()
        for segment, piece in enumerate(pieces, start=1):
            start, length, more = packing.starts[piece], int(packing.lengths[piece]), int(packing.continues[piece])
            ids = store.read(int(start), int(start) + length + more)
            here = slice(begin, begin + length)
            tokens[row, here] = ids[:length]
            targets[row, begin : begin + len(ids) - 1] = ids[1:]
            segments[row, here] = segment
            positions[row, here] = np.arange(length)
            begin += length
    return Batch(tokens=tokens, targets=targets, segments=segments, positions=positions)


def _pieces(begins: Ints, ends: Ints, seq_len: int) -> tuple[Ints, Ints, npt.NDArray[np.bool_]]:
    """Starts and lengths of all pieces of documents, in order; and True for those with a next piece."""
    counts = -(-(ends - begins) // seq_len)
    document = np.repeat(np.arange(len(begins)), counts)
    place = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = begins[document] + place * seq_len
    left = ends[document] - starts
    return starts, np.minimum(left, seq_len), left > seq_len


@dataclass(frozen=True, kw_only=True)
class _Cohort:
    """``count`` sequences with the same lengths in them: ``pieces`` counts each length."""

    rows: int
    pieces: tuple[tuple[int, int], ...]


def _best_fit(counts: list[int], seq_len: int) -> list[_Cohort]:
    """Best fit, longest first, of ``counts[n]`` pieces of length n into sequences of ``seq_len``."""
    open_: dict[int, list[_Cohort]] = {}  # by room left
    rooms: list[int] = []  # the keys of open_, sorted

    def put(room: int, cohort: _Cohort) -> None:
        if cohort.rows:
            if room not in open_:
                open_[room] = []
                insort(rooms, room)
            open_[room].append(cohort)

    for length in range(seq_len, 0, -1):
        left = counts[length]
        while left:
            place = bisect_left(rooms, length)
            if place < len(rooms):
                room = rooms[place]
                cohort = open_[room].pop(0)
                if not open_[room]:
                    del open_[room], rooms[place]
            else:
                room, cohort = seq_len, _Cohort(rows=left, pieces=())
            # The least room stays least while there is room for one more: one sequence takes all that it can.
            times = room // length
            full = min(cohort.rows, left // times)
            rest = left - full * times if full < cohort.rows else 0
            used = full + (rest > 0)
            put(room - times * length, _Cohort(rows=full, pieces=(*cohort.pieces, (length, times))))
            if rest:
                put(room - rest * length, _Cohort(rows=1, pieces=(*cohort.pieces, (length, rest))))
            if cohort.pieces:
                put(room, _Cohort(rows=cohort.rows - used, pieces=cohort.pieces))
            left -= full * times + rest
    return [cohort for room in rooms for cohort in open_[room]]
