"""The rows of integers that a server's device gets: one for each running sequence, and how programs take them.

A running sequence has a slot: a row that the device gets as it stands when it generates, of which a step changes three
columns. Chunks of prompts are copied from it into rows of their own, as wide as a program.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from rooftop.programs.decode import ADJUSTED, COUNT, DRAWN, HEAD, LOGPROBS, SLOT, START, TEMPERATURE
from rooftop.scheduling.serving import Chunk
from rooftop.serve.configuration import covering
from rooftop.serve.counters import Counters
from rooftop.serve.replica import Ints, Replica
from rooftop.serve.running import Running
from rooftop.serve.schedulers import rows_of

#: The columns of a slot's row behind the head: its last token, then its pages.
TOKEN, TABLE = HEAD, HEAD + 1
#: What a program takes: rows [R, HEAD + C + P] and their C.
Part = tuple[Ints, int]


@dataclass(frozen=True, kw_only=True)
class Prefill:
    """Pieces of prompts as a program takes them, ``width`` tokens of each; ``complete`` are the rows that draw."""

    packed: Ints
    width: int
    complete: list[tuple[int, Running]]


@dataclass(frozen=True, kw_only=True)
class _Piece:
    """Tokens ``start`` to ``stop`` of a prompt, as one row; ``draws`` says that they complete it."""

    running: Running
    start: int
    stop: int
    draws: bool


class Slots:
    """``rows`` [slots + 1, HEAD + 1 + P]: one for each slot of ``replica``, and one for padding.

    What stands for no page is the one that takes padding.
    """

    def __init__(self, replica: Replica, counters: Counters) -> None:
        self._replica, self._counters = replica, counters
        self._page_tokens, self._contexts = replica.decoder.page_tokens, replica.shapes.contexts
        self.rows = np.zeros((replica.slots + 1, TABLE + self._contexts[-1] // self._page_tokens), np.int32)
        self.rows[:, TABLE:] = replica.pages
        self.rows[:, SLOT] = np.arange(replica.slots + 1)
        self._free = list(range(replica.slots - 1, -1, -1))

    def place(self, running: Running) -> None:
        """A slot for ``running``, which has pages."""
        running.slot = slot = self._free.pop()
        row = self.rows[slot]
        row[:HEAD] = running.head(running.sequence.length)
        row[SLOT], row[TOKEN] = slot, running.tokens[-1]
        self._write_pages(running)
        if running.adjusted:
            with self._counters.on_device():
                self._replica.adjust(slot, running.adjustments(self._replica.decoder.model.vocab))

    def leave(self, running: Running) -> None:
        """``running`` has no slot any more."""
        if running.slot >= 0:
            self.rows[running.slot, TABLE:] = self._replica.pages
            self._free.append(running.slot)
            running.slot = -1

    def begin(self, running: Running) -> None:
        """The prompt of ``running`` is complete: it generates from here on, with pages that may be others'."""
        row, sequence = self.rows[running.slot], running.sequence
        self._write_pages(running)
        row[START], row[DRAWN], row[TOKEN] = sequence.length, running.generated, running.tokens[-1]

    def constrain(self, running: Running) -> None:
        """What ``running`` may choose next, where it has a constraint."""
        constraint = running.request.sampling.constraint
        if constraint is not None:
            self._replica.set_mask(running.slot, constraint.mask())

    def _write_pages(self, running: Running) -> None:
        pages = running.sequence.pages
        self.rows[running.slot, TABLE : TABLE + len(pages)] = pages

    def prefills(self, chunks: Iterable[tuple[Chunk, Running]]) -> Iterator[Prefill]:
        """Pieces of chunks by their width, as many at a time as a program has rows."""
        shapes = self._replica.shapes
        widest = shapes.widths[-1]
        waves = dict[tuple[int, int], list[_Piece]]()
        for chunk, running in chunks:
            end = chunk.start + chunk.tokens
            # What is wider than any program goes piece by piece, each after the one before it.
            for wave, start in enumerate(range(chunk.start, end, widest)):
                stop = min(start + widest, end)
                piece = _Piece(running=running, start=start, stop=stop, draws=chunk.last and stop == end)
                waves.setdefault((wave, covering(shapes.widths, stop - start)), []).append(piece)
        for (_, width), pieces in sorted(waves.items(), key=lambda wave: wave[0]):
            while pieces:
                rows = shapes.rows(len(pieces), width)
                at = rows_of(
                    [piece.running.sequence.group for piece in pieces], rows, self._replica.decoder.groups.ways
                )
                placed = list(zip(at, pieces, strict=True))
                yield self._packed([each for each in placed if each[0] >= 0], width, rows)
                pieces = [piece for row, piece in placed if row < 0]

    def _packed(self, pieces: list[tuple[int, _Piece]], width: int, rows: int) -> Prefill:
        """Each piece in its row."""
        pages = covering(self._contexts, max(piece.stop for _, piece in pieces)) // self._page_tokens
        packed = np.zeros((rows, HEAD + width + pages), np.int32)
        packed[:, HEAD + width :] = self._replica.pages
        packed[:, SLOT] = self._replica.slots
        complete = list[tuple[int, Running]]()
        for at, piece in pieces:
            row, size = self.rows[piece.running.slot], piece.stop - piece.start
            packed[at, :HEAD] = row[:HEAD]
            packed[at, START], packed[at, COUNT] = piece.start, size
            packed[at, HEAD : HEAD + size] = piece.running.tokens[piece.start : piece.stop]
            packed[at, HEAD + width :] = row[TABLE : TABLE + pages]
            if piece.draws:
                complete.append((at, piece.running))
                self.constrain(piece.running)
            else:
                packed[at, [TEMPERATURE, ADJUSTED, LOGPROBS]] = 0
        return Prefill(packed=packed, width=width, complete=complete)

    def together(self, generating: Ints, prefill: Prefill) -> tuple[Part, Part] | None:
        """The parts of one program, with tables of one size; None if there is no such program."""
        parts = (generating, 1), (prefill.packed, prefill.width)
        most = max(packed.shape[1] - width for packed, width in parts)
        one, other = ((self._longer(packed, most + width), width) for packed, width in parts)
        return (one, other) if self._replica.can_mix(one, other) else None

    def _longer(self, packed: Ints, columns: int) -> Ints:
        """With tables that go on to so many columns."""
        more = columns - packed.shape[1]
        return np.pad(packed, ((0, 0), (0, more)), constant_values=self._replica.pages) if more else packed
