"""One server: what its scheduler decides, done by its replica, with the bookkeeping of NumPy arrays in between.

A step is decided, sent to the device, and collected. A running sequence has a slot: a row of integers that the device
gets as it stands, of which a step changes three columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np
import numpy.typing as npt

from rooftop.programs.decode import ADJUSTED, COUNT, DRAWN, HEAD, LOGPROBS, SLOT, START, TEMPERATURE, Chosen
from rooftop.scheduling.serving import Chunk, Step
from rooftop.scheduling.serving_cache import Sequence
from rooftop.serve.configuration import covering
from rooftop.serve.counters import Counters
from rooftop.serve.replica import Ints, Replica
from rooftop.serve.requests import Token
from rooftop.serve.running import Running
from rooftop.serve.schedulers import AnyScheduler, rows_of

#: The columns of a slot's row behind the head: its last token, then its pages.
_TOKEN, _TABLE = HEAD, HEAD + 1
_Order = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Sent:
    """A step that the device works on, and what it will yield.

    ``generating``: the requests, their slots, what is chosen, and the guesses that are checked; ``rows`` are theirs.
    ``prefills``: of each program the requests whose prompt it completes, with their rows.
    """

    step: Step
    begun_s: float
    programs: list[tuple[int, int, int]]
    generating: tuple[list[Running], _Order, Chosen, list[list[int]] | None] | None = None
    rows: list[int] = field(default_factory=list)
    prefills: list[tuple[list[tuple[int, Running]], Chosen]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class _Piece:
    """Tokens ``start`` to ``stop`` of a prompt, as one row; ``draws`` says that they complete it."""

    running: Running
    start: int
    stop: int
    draws: bool


class Server:
    """A scheduler and its replica. ``running`` has all requests of the engine, by id.

    A ``draft`` replica guesses what this one checks. Its cache has the same pages for the same tokens: it prefills what
    is prefilled here, and has its pages copied as they are copied here.
    """

    def __init__(
        self,
        scheduler: AnyScheduler,
        replica: Replica,
        running: Mapping[int, Running],
        counters: Counters,
        draft: Replica | None = None,
    ) -> None:
        self.scheduler, self.replica, self.running, self.counters = scheduler, replica, running, counters
        self._draft = draft
        self._page_tokens, self._groups = replica.decoder.page_tokens, replica.decoder.groups.ways
        self._contexts = replica.shapes.contexts
        width = _TABLE + self._contexts[-1] // self._page_tokens
        #: One row for each slot, and one for padding. What stands for no page is the one that takes padding.
        self._rows = np.zeros((replica.slots + 1, width), np.int32)
        self._rows[:, _TABLE:] = replica.pages
        self._rows[:, SLOT] = np.arange(replica.slots + 1)
        self._free = list(range(replica.slots - 1, -1, -1))
        self._generating = list[Running]()
        self._order: _Order = np.zeros(0, np.int64)
        #: The rows of those who generate, in a step of ``_size``.
        self._at, self._size = list[int](), 0
        self._changed = False
        self._ran = list[tuple[int, int, int]]()

    def send(self) -> Sent | None:
        """Decide the next step and begin it; None if there is nothing to do."""
        begun_s = perf_counter()
        step = self.scheduler.next_step()
        if step is None:
            return None
        self._ran = list[tuple[int, int, int]]()
        if step.copies:
            with self.counters.on_device():
                self.replica.copy(step.copies)
                if self._draft is not None:
                    self._draft.copy(step.copies)
        for sequence in step.preempted:
            self.counters.preemptions += 1
            self.leave(self.running[sequence.id])
        if step.resumed:
            self._changed = True
        generating = self._send_generating() if step.batch else None
        prefills = list(self._send_prefills(step.chunks))
        return Sent(
            step=step, begun_s=begun_s, programs=self._ran, generating=generating, rows=self._at, prefills=prefills
        )

    def collect(self, sent: Sent) -> list[tuple[Running, Token]]:
        """Wait for a step; the tokens that it gave, each appended to its request."""
        with self.counters.on_device():
            generated = None if sent.generating is None else np.asarray(sent.generating[2].tokens)
            drawn = [np.asarray(chosen.tokens) for _, chosen in sent.prefills]
        self.counters.steps += 1
        self.counters.ran(sent.programs, perf_counter() - sent.begun_s)
        self.scheduler.complete(sent.step)
        found = list[tuple[Running, Token]]()
        if sent.generating is not None and generated is not None:
            generating, order, chosen, guesses = sent.generating
            before = self._rows[order, START] // self._page_tokens
            if guesses is None:
                self._rows[order, START] += 1
                self._rows[order, DRAWN] += 1
                self._rows[order, _TOKEN] = generated[sent.rows]
                found += self._tokens(list(zip(sent.rows, generating, strict=True)), generated.tolist(), chosen)
            else:
                found += self._checked(sent.rows, generating, guesses, generated.tolist(), chosen)
            held = self._rows[order, START]
            for at in np.flatnonzero(held // self._page_tokens > before):
                generating[at].extend_keys(int(held[at]))
        for (rows, chosen), values in zip(sent.prefills, drawn, strict=True):
            found += self._tokens(rows, values.tolist(), chosen)
        for chunk in sent.step.chunks:
            self.counters.prompt_tokens += chunk.tokens
            if chunk.last:
                self._prefilled(self.running[chunk.sequence.id])
        return found

    def leave(self, running: Running) -> None:
        """``running`` has no place here any more."""
        if running.slot >= 0:
            self._rows[running.slot, _TABLE:] = self.replica.pages
            self._free.append(running.slot)
            running.slot = -1
        self._changed = True

    def arrived(self, sequence: Sequence) -> None:
        """The KV of ``sequence`` has come from a prefill server."""
        self.scheduler.arrived(sequence)
        self._changed = True

    def _prefilled(self, running: Running) -> None:
        """The prompt of ``running`` is complete: it generates from here on, with pages that may be others'."""
        if self.scheduler.role == "prefill":
            self.leave(running)
            return
        row, sequence = self._rows[running.slot], running.sequence
        self._write_pages(running)
        row[START], row[DRAWN], row[_TOKEN] = sequence.length, running.generated, running.tokens[-1]
        self._changed = True

    def _place(self, running: Running) -> None:
        """A slot for ``running``, which has pages."""
        running.slot = slot = self._free.pop()
        row = self._rows[slot]
        row[:HEAD] = running.head(running.sequence.length)
        row[SLOT], row[_TOKEN] = slot, running.tokens[-1]
        self._write_pages(running)
        if running.adjusted:
            with self.counters.on_device():
                self.replica.adjust(slot, running.adjustments(self.replica.decoder.model.vocab))

    def _write_pages(self, running: Running) -> None:
        pages = running.sequence.pages
        self._rows[running.slot, _TABLE : _TABLE + len(pages)] = pages

    def _checked(
        self, rows: list[int], generating: list[Running], guesses: list[list[int]], values: list[int], chosen: Chosen
    ) -> Iterator[tuple[Running, Token]]:
        """The tokens of each request: the guesses that were right, and the one behind them."""
        width = 1 + self.replica.guesses
        for at, running, guessed in zip(rows, generating, guesses, strict=True):
            row = self._rows[running.slot]
            right = 0
            while right < len(guessed) and values[at * width + right] == guessed[right]:
                right += 1
            self.counters.guessed += len(guessed)
            self.counters.accepted += right
            more = 0
            while True:
                ((_, token),) = self._tokens([(at * width + more, running)], values, chosen)
                yield running, token
                if token.finish is not None or more == right:
                    break
                more += 1
            if more:
                self.scheduler.advance(running.sequence, more)
            row[START] += 1 + more
            row[DRAWN] += 1 + more
            row[_TOKEN] = running.tokens[-1]

    def _guesses(self, start: Ints, packed: Ints) -> list[list[int]] | None:
        """Guesses for each generating request, as far as its pages reach; None if there are none at all.

        ``packed`` are the rows of the step, ``start`` [n] the tokens that the requests hold.
        """
        if not self.replica.guesses:
            return None
        most = [
            running.guessable(min(self.replica.guesses, len(running.sequence.pages) * self._page_tokens - held - 1))
            for running, held in zip(self._generating, start.tolist(), strict=True)
        ]
        if self._draft is None:
            found = [
                running.lookup.guess(running.tokens, each) for running, each in zip(self._generating, most, strict=True)
            ]
        else:
            asked = packed.copy()
            asked[self._at, COUNT] += np.array(most, np.int32)
            with self.counters.on_device():
                guesses = self._draft.propose(asked).tolist()
            found = [guesses[at][:each] for at, each in zip(self._at, most, strict=True)]
        return found if any(found) else None

    def _send_generating(self) -> tuple[list[Running], _Order, Chosen, list[list[int]] | None]:
        if self._changed:
            generating = [self.running[sequence.id] for sequence in self.scheduler.generating]
            # Rows that are read together are as long as the longest of them.
            self._generating = sorted(generating, key=lambda running: running.sequence.length, reverse=True)
            for running in self._generating:
                if running.slot < 0:
                    self._place(running)
            self._order = np.array([running.slot for running in self._generating], np.int64)
            groups = [running.sequence.group for running in self._generating]
            most = max(groups.count(group) for group in set(groups))
            self._size = covering(self.replica.shapes.batches, most * self._groups)
            self._at = rows_of(groups, self._size, self._groups)
            self._changed = False
        order, page_tokens = self._order, self._page_tokens
        start = self._rows[order, START]
        for at in np.flatnonzero(start % page_tokens == 0):
            self._rows[order[at], _TABLE + start[at] // page_tokens] = self._generating[at].sequence.pages[-1]
        for running in self._generating:
            self._constrain(running)
        pages = covering(self._contexts, int(start.max()) + 1 + self.replica.guesses) // page_tokens
        index = np.full(self._size, self.replica.slots, np.int64)
        index[self._at] = order
        packed = self._rows[index, : _TABLE + pages]
        guesses = self._guesses(start, packed)
        if guesses is None:
            return self._generating, order, self._run(packed, 1), None
        room = np.zeros((len(packed), self.replica.guesses), np.int32)
        for row, guessed in zip(self._at, guesses, strict=True):
            room[row, : len(guessed)] = guessed
            packed[row, COUNT] += len(guessed)
        packed = np.concatenate([packed[:, :_TABLE], room, packed[:, _TABLE:]], axis=1)
        return self._generating, order, self._run(packed, 1 + self.replica.guesses, every=True), guesses

    def _send_prefills(self, chunks: tuple[Chunk, ...]) -> Iterator[tuple[list[tuple[int, Running]], Chosen]]:
        """Pieces of chunks by their width, as many at a time as a program has rows."""
        shapes = self.replica.shapes
        widest = shapes.widths[-1]
        waves = dict[tuple[int, int], list[_Piece]]()
        for chunk in chunks:
            running = self.running[chunk.sequence.id]
            if running.slot < 0:
                self._place(running)
                self.counters.prefix_tokens += chunk.sequence.cached
            end = chunk.start + chunk.tokens
            # What is wider than any program goes piece by piece, each after the one before it.
            for wave, start in enumerate(range(chunk.start, end, widest)):
                stop = min(start + widest, end)
                piece = _Piece(running=running, start=start, stop=stop, draws=chunk.last and stop == end)
                waves.setdefault((wave, covering(shapes.widths, stop - start)), []).append(piece)
        for (_, width), pieces in sorted(waves.items(), key=lambda wave: wave[0]):
            while pieces:
                rows = shapes.rows(len(pieces), width)
                at = rows_of([piece.running.sequence.group for piece in pieces], rows, self._groups)
                placed = list(zip(at, pieces, strict=True))
                yield self._send_prefill([each for each in placed if each[0] >= 0], width, rows)
                pieces = [piece for row, piece in placed if row < 0]

    def _send_prefill(
        self, pieces: list[tuple[int, _Piece]], width: int, rows: int
    ) -> tuple[list[tuple[int, Running]], Chosen]:
        """A step with each piece in its row."""
        pages = covering(self._contexts, max(piece.stop for _, piece in pieces)) // self._page_tokens
        packed = np.zeros((rows, HEAD + width + pages), np.int32)
        packed[:, HEAD + width :] = self.replica.pages
        packed[:, SLOT] = self.replica.slots
        complete = list[tuple[int, Running]]()
        for at, piece in pieces:
            row, size = self._rows[piece.running.slot], piece.stop - piece.start
            packed[at, :HEAD] = row[:HEAD]
            packed[at, START], packed[at, COUNT] = piece.start, size
            packed[at, HEAD : HEAD + size] = piece.running.tokens[piece.start : piece.stop]
            packed[at, HEAD + width :] = row[_TABLE : _TABLE + pages]
            if piece.draws:
                complete.append((at, piece.running))
                self._constrain(piece.running)
            else:
                packed[at, [TEMPERATURE, ADJUSTED, LOGPROBS]] = 0
        if self._draft is not None:
            with self.counters.on_device():
                self._draft.step(packed, width)
        return complete, self._run(packed, width)

    def _constrain(self, running: Running) -> None:
        constraint = running.request.sampling.constraint
        if constraint is not None:
            self.replica.set_mask(running.slot, constraint.mask())

    def _run(self, packed: Ints, width: int, *, every: bool = False) -> Chosen:
        rows, columns = packed.shape
        self._ran.append((rows, 1 if every else width, (columns - HEAD - width) * self._page_tokens))
        with self.counters.on_device():
            return self.replica.step(packed, width, every=every)

    def _tokens(
        self, rows: list[tuple[int, Running]], values: list[int], chosen: Chosen
    ) -> Iterator[tuple[Running, Token]]:
        """The token of each row, appended to its request."""
        asked = any(running.request.sampling.logprobs is not None for _, running in rows)
        likely = [np.asarray(each) for each in (chosen.logprobs, chosen.top, chosen.top_ids)] if asked else []
        for row, running in rows:
            token, how, id_ = values[row], running.request.sampling, running.request.id
            running.tokens.append(token)
            finish = None
            if token in running.stops:
                finish = "stop"
            elif running.generated >= how.max_tokens:
                finish = "length"
            if how.constraint is not None and finish != "stop":
                how.constraint.accept(token)
            if how.logprobs is None:
                yield running, Token(id=id_, token=token, finish=finish)
                continue
            logprobs, top, ids = likely
            best = zip(ids[row, : how.logprobs].tolist(), top[row, : how.logprobs].tolist(), strict=True)
            yield running, Token(id=id_, token=token, logprob=float(logprobs[row]), top=tuple(best), finish=finish)
