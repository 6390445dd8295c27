"""One server: its replica runs the steps that its scheduler decides, from NumPy arrays with a row for each request.

A step is decided, sent to the device, and collected.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np
import numpy.typing as npt

from rooftop.programs.serving.decode import ADJUSTED, COUNT, DRAWN, HEAD, LOGPROBS, SLOT, START, TEMPERATURE, Chosen
from rooftop.scheduling.serving.cache import CachedSequence
from rooftop.scheduling.serving.groups import AnyScheduler, make_scheduler
from rooftop.scheduling.serving.scheduler import Chunk, EngineStep
from rooftop.serve.engine.configuration import Configuration, covering
from rooftop.serve.engine.counters import Counters, Shape
from rooftop.serve.engine.replica import Ints, Replica
from rooftop.serve.engine.requests import Token, TokenFinish
from rooftop.serve.engine.running import Running, check_pages

_Order = npt.NDArray[np.int64]
#: Seconds that a step waits for masks that another process computes: several round trips.
_MASK_S = 0.002


@dataclass(frozen=True, kw_only=True)
class Sent:
    """A step that the device works on, and what it will yield.

    ``generating``: the requests, their slots and rows, what is chosen, and the guesses that are checked.
    ``prefills``: of each program the requests whose prompt it completes, with their rows.
    """

    step: EngineStep
    begun_s: float
    programs: list[Shape]
    generating: _Generating | None = None
    prefills: list[tuple[list[tuple[int, Running]], Chosen]] = field(default_factory=list)


@dataclass(kw_only=True)
class _Generating:
    """Requests that generate: their slots ``order`` and ``rows`` of ``packed``, with room for ``guesses``."""

    requests: list[Running]
    order: _Order
    rows: list[int]
    packed: Ints
    guesses: list[list[int]] | None
    chosen: Chosen = field(init=False)


class EngineServer:
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
        self._slots = BatchSlots(replica, counters)
        self._generating = list[Running]()
        self._order: _Order = np.zeros(0, np.int64)
        #: Rows of requests that generate, in a step of ``_size``.
        self._at, self._size = list[int](), 0
        self._changed = False
        self._ran = list[Shape]()
        #: Requests that generate under a constraint, and those that wait for their mask.
        self._constrained, self._paused = list[Running](), list[Running]()
        #: The last step that was begun.
        self._step: EngineStep | None = None

    def send(self) -> Sent | None:
        """Decide the next step and begin it; None if there is nothing to do."""
        begun_s = perf_counter()
        self._wait_for_masks()
        step = self.scheduler.next_step()
        if step is None:
            return None
        self._ran = list[Shape]()
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
        self._step = step
        generating = self._generate() if step.batch else None
        chunks = [(chunk, self.running[chunk.sequence.id]) for chunk in step.chunks]
        for chunk, running in chunks:
            if running.slot < 0:
                self._slots.place(running)
                self.counters.prefix_tokens += chunk.sequence.cached
        prefills = list(self._slots.prefills(chunks))
        return Sent(
            step=step, begun_s=begun_s, programs=self._ran, generating=generating,
            prefills=list(self._run_all(generating, prefills)),
        )  # fmt: skip

    @property
    def doing(self) -> str:
        """The last step that was begun, its batch and its programs: for those who ask why it takes so long."""
        step = self._step
        if step is None:
            return ""
        prompts = sum(chunk.tokens for chunk in step.chunks)
        programs = ", ".join(f"{rows} x {width} of {context}" for rows, width, context, _ in list(self._ran))
        return (
            f"generating for {step.generating} sequences and prefilling {prompts} tokens, in programs of sequences x "
            f"tokens of context: {programs or 'none yet'}"
        )

    def _wait_for_masks(self) -> None:
        """Leave sequences out of the next step whose masks another process still computes.

        Each step waits a little for all of them: a sequence that is left out gets half as many tokens.
        """
        waiting = list[Running]()
        for running in self._paused:
            constraint = running.request.sampling.constraint
            if running.sequence in self.scheduler.paused:
                if constraint is None or constraint.ready():
                    self.scheduler.resume(running.sequence)
                    self._changed = True
                else:
                    waiting.append(running)
        self._paused = waiting
        if self._changed:
            generating = (self.running.get(sequence.id) for sequence in self.scheduler.generating)
            self._constrained = [
                running for running in generating if running is not None and running.request.sampling.constraint
            ]
        until_s = perf_counter() + _MASK_S
        for running in self._constrained:
            constraint = running.request.sampling.constraint
            if running.sequence not in self.scheduler.generating or constraint is None:
                continue
            if not constraint.ready(max(0.0, until_s - perf_counter())):
                self.scheduler.pause(running.sequence)
                self._paused.append(running)
                self._changed = True

    def collect(self, sent: Sent, *, behind: bool = False, since_s: float = 0.0) -> list[tuple[Running, Token]]:
        """Wait for a step (``behind``: after that of another server), and append its tokens to their requests.

        The step is counted from ``since_s`` on if it began before: the devices worked on steps of others until then.
        """
        over = behind and self._is_over(sent)
        with self.counters.on_device():
            generated = None if sent.generating is None else np.asarray(sent.generating.chosen.tokens)
            drawn = [np.asarray(chosen.tokens) for _, chosen in sent.prefills]
        self.counters.ran(sent.programs, perf_counter() - max(sent.begun_s, since_s), at_most=over)
        self.scheduler.complete(sent.step)
        collect = list[tuple[Running, Token]]()
        if sent.generating is not None and generated is not None:
            now, table = sent.generating, self._slots.rows
            before = table[now.order, START] // self._page_tokens
            if now.guesses is None:
                table[now.order, START] += 1
                table[now.order, DRAWN] += 1
                table[now.order, TOKEN] = generated[now.rows]
                rows = list(zip(now.rows, now.requests, strict=True))
                collect += self._tokens(rows, generated.tolist(), now.chosen)
            else:
                collect += self._checked(now, now.guesses, generated.tolist())
            starts = table[now.order, START]
            for at in np.flatnonzero(starts // self._page_tokens > before):
                now.requests[at].extend_keys(int(starts[at]))
        for (rows, chosen), values in zip(sent.prefills, drawn, strict=True):
            collect += self._tokens(rows, values.tolist(), chosen)
        for chunk in sent.step.chunks:
            self.counters.prompt_tokens += chunk.tokens
            if chunk.last:
                self._prefilled(self.running[chunk.sequence.id])
        return collect

    @staticmethod
    def _is_over(sent: Sent) -> bool:
        """Return True if the device has finished the step."""
        chosen = [prefill for _, prefill in sent.prefills] + (
            [] if sent.generating is None else [sent.generating.chosen]
        )
        return all(item.tokens.is_ready() for item in chosen)  # type: ignore[attr-defined]

    def leave(self, running: Running) -> None:
        """Remove ``running`` from this server."""
        self._slots.leave(running)
        self._changed = True

    def arrived(self, sequence: CachedSequence) -> None:
        """Note that the KV of ``sequence`` has arrived from a prefill server."""
        self.scheduler.arrived(sequence)
        self._changed = True

    def _prefilled(self, running: Running) -> None:
        """Begin generation of ``running`` after its prompt, here or on another server."""
        if self.scheduler.role == "prefill":
            self._slots.leave(running)
        else:
            self._slots.begin(running)
        self._changed = True

    def _checked(
        self, now: _Generating, guesses: list[list[int]], values: list[int]
    ) -> Iterator[tuple[Running, Token]]:
        """Yield tokens of each request: its right guesses, and the token after them."""
        width = 1 + self.replica.draft_length
        for at, running, guessed in zip(now.rows, now.requests, guesses, strict=True):
            row = self._slots.rows[running.slot]
            right = 0
            while right < len(guessed) and values[at * width + right] == guessed[right]:
                right += 1
            self.counters.guessed += len(guessed)
            self.counters.accepted += right
            more = 0
            while True:
                ((_, token),) = self._tokens([(at * width + more, running)], values, now.chosen)
                yield running, token
                if token.finish is not None or more == right:
                    break
                more += 1
            if more:
                self.scheduler.advance(running.sequence, more)
            row[START] += 1 + more
            row[DRAWN] += 1 + more
            row[TOKEN] = running.tokens[-1]

    def _guesses(self, start: Ints, packed: Ints) -> list[list[int]] | None:
        """Guesses for each generating request, as far as its pages reach; None if there are none at all.

        ``packed`` are the rows of the step, ``start`` [n] the tokens that the requests hold.
        """
        if not self.replica.draft_length:
            return None
        most = [
            running.guessable(
                min(self.replica.draft_length, len(running.sequence.pages) * self._page_tokens - cached_tokens - 1)
            )
            for running, cached_tokens in zip(self._generating, start.tolist(), strict=True)
        ]
        if self._draft is None:
            result = [
                running.lookup.guess(running.tokens, item) for running, item in zip(self._generating, most, strict=True)
            ]
        else:
            asked = packed.copy()
            asked[self._at, COUNT] += np.array(most, np.int32)
            with self.counters.on_device():
                guesses = self._draft.propose(asked).tolist()
            result = [guesses[at][:item] for at, item in zip(self._at, most, strict=True)]
        return result if any(result) else None

    def _generate(self) -> _Generating:
        """The rows of the sequences that generate."""
        if self._changed:
            generating = [self.running[sequence.id] for sequence in self.scheduler.generating]
            # Rows that are read together take as long as the longest.
            self._generating = sorted(generating, key=lambda running: running.sequence.length, reverse=True)
            for running in self._generating:
                if running.slot < 0:
                    self._slots.place(running)
            self._order = np.array([running.slot for running in self._generating], np.int64)
            groups = [running.sequence.group for running in self._generating]
            most = max(groups.count(group) for group in set(groups))
            self._size = covering(self.replica.shapes.batches, most * self._groups)
            self._at = rows_of(groups, self._size, self._groups)
            self._changed = False
        order, page_tokens = self._order, self._page_tokens
        start = self._slots.rows[order, START]
        for at in np.flatnonzero(start % page_tokens == 0):
            self._slots.rows[order[at], TABLE + start[at] // page_tokens] = self._generating[at].sequence.pages[-1]
        for running in self._generating:
            self._slots.constrain(running)
        pages = covering(self.replica.shapes.contexts, int(start.max()) + 1 + self.replica.draft_length) // page_tokens
        index = np.full(self._size, self.replica.slots, np.int64)
        index[self._at] = order
        packed = self._slots.rows[index, : TABLE + pages]
        guesses = self._guesses(start, packed)
        if guesses is not None:
            room = np.zeros((len(packed), self.replica.draft_length), np.int32)
            for row, guessed in zip(self._at, guesses, strict=True):
                room[row, : len(guessed)] = guessed
                packed[row, COUNT] += len(guessed)
            packed = np.concatenate([packed[:, :TABLE], room, packed[:, TABLE:]], axis=1)
        return _Generating(requests=self._generating, order=order, rows=self._at, packed=packed, guesses=guesses)

    def _run_all(
        self, generating: _Generating | None, prefills: list[Prefill]
    ) -> Iterator[tuple[list[tuple[int, Running]], Chosen]]:
        """Generate, together with the first of ``prefills`` if there is a program for both, then run the others."""
        mixed = self._slots.together(generating.packed, prefills[0]) if generating is not None and prefills else None
        if generating is not None and mixed is not None:
            generating.chosen, chosen = self._run(*mixed)
            yield prefills[0].complete, chosen
            prefills = prefills[1:]
        elif generating is not None and generating.guesses is not None:
            (generating.chosen,) = self._run((generating.packed, 1 + self.replica.draft_length), every=True)
        elif generating is not None:
            (generating.chosen,) = self._run((generating.packed, 1))
        for prefill in prefills:
            part = prefill.packed, prefill.width
            if self._draft is not None:
                with self.counters.on_device():
                    self._draft.step(part)
            (chosen,) = self._run(part)
            yield prefill.complete, chosen

    def _run(self, *parts: Part, every: bool = False) -> list[Chosen]:
        packed, width = parts[-1]
        rows, columns = packed.shape
        beside = sum(len(part) for part, _ in parts[:-1])
        self._ran.append((rows, 1 if every else width, (columns - HEAD - width) * self._page_tokens, beside))
        with self.counters.on_device():
            return self.replica.step(*parts, every=every)

    def _tokens(
        self, rows: list[tuple[int, Running]], values: list[int], chosen: Chosen
    ) -> Iterator[tuple[Running, Token]]:
        """The token of each row, appended to its request."""
        asked = any(running.request.sampling.logprobs is not None for _, running in rows)
        likely = [np.asarray(item) for item in (chosen.logprobs, chosen.top, chosen.top_ids)] if asked else []
        for row, running in rows:
            token, sampling, id_ = values[row], running.request.sampling, running.request.id
            running.tokens.append(token)
            finish: TokenFinish | None = None
            if token in running.stops:
                finish = "stop"
            elif running.generated >= sampling.max_tokens:
                finish = "length"
            if sampling.constraint is not None and finish != "stop":
                sampling.constraint.accept(token)
            if sampling.logprobs is None:
                yield running, Token(id=id_, token=token, finish=finish)
                continue
            logprobs, top, ids = likely
            best = zip(ids[row, : sampling.logprobs].tolist(), top[row, : sampling.logprobs].tolist(), strict=True)
            yield running, Token(id=id_, token=token, logprob=float(logprobs[row]), top=tuple(best), finish=finish)


#: Columns of a slot's row after the head: its last token, then its pages.
TOKEN, TABLE = HEAD, HEAD + 1
#: Input of a program: rows [R, HEAD + C + P] and their C.
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


class BatchSlots:
    """``rows`` [slots + 1, HEAD + 1 + P]: one for each slot of ``replica``, and one for padding.

    Entries without a page name the padding page.
    """

    def __init__(self, replica: Replica, counters: Counters) -> None:
        self._replica, self._counters = replica, counters
        self._page_tokens, self._contexts = replica.decoder.page_tokens, replica.shapes.contexts
        self.rows = np.zeros((replica.slots + 1, TABLE + self._contexts[-1] // self._page_tokens), np.int32)
        self.rows[:, TABLE:] = replica.pages
        self.rows[:, SLOT] = np.arange(replica.slots + 1)
        self._free = list(range(replica.slots - 1, -1, -1))

    def place(self, running: Running) -> None:
        """Assign a slot to ``running``, which has pages."""
        running.slot = slot = self._free.pop()
        row = self.rows[slot]
        row[:HEAD] = running.head(running.sequence.length)
        row[SLOT], row[TOKEN] = slot, running.tokens[-1]
        self._write_pages(running)
        if running.adjusted:
            with self._counters.on_device():
                self._replica.adjust(slot, running.adjustments(self._replica.decoder.model.vocab))

    def leave(self, running: Running) -> None:
        """Free the slot of ``running``."""
        if running.slot >= 0:
            self.rows[running.slot, TABLE:] = self._replica.pages
            self._free.append(running.slot)
            running.slot = -1

    def begin(self, running: Running) -> None:
        """Prepare the row of ``running`` for generation; prefix pages may have replaced its own."""
        row, sequence = self.rows[running.slot], running.sequence
        self._write_pages(running)
        row[START], row[DRAWN], row[TOKEN] = sequence.length, running.generated, running.tokens[-1]

    def constrain(self, running: Running) -> None:
        """Set the mask of tokens that a constrained ``running`` may choose next."""
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
            # A chunk wider than any program is run in pieces, one after the other.
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
                yield self._packed([item for item in placed if item[0] >= 0], width, rows)
                pieces = [piece for row, piece in placed if row < 0]

    def _packed(self, pieces: list[tuple[int, _Piece]], width: int, rows: int) -> Prefill:
        """Pack pieces into their rows."""
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
        first, second = ((self._longer(packed, most + width), width) for packed, width in parts)
        return (first, second) if self._replica.can_mix(first, second) else None

    def _longer(self, packed: Ints, columns: int) -> Ints:
        """Rows with tables padded to ``columns``."""
        more = columns - packed.shape[1]
        return np.pad(packed, ((0, 0), (0, more)), constant_values=self._replica.pages) if more else packed


def scheduler_of(configuration: Configuration, replica: Replica, role: str) -> AnyScheduler:
    """A scheduler without requests, over an empty cache."""
    groups = replica.decoder.groups.ways
    # The last page of each group receives writes of padding. A pool may have more pages than are requested.
    pages_per_group = (replica.pages + 1) // groups
    pages = (
        pages_per_group - 1
        if configuration.pages is None
        else min(pages_per_group - 1, max(1, configuration.pages // groups))
    )
    return make_scheduler(
        configuration.own_policy,
        role,
        groups=groups,
        page_tokens=configuration.page_tokens,
        pages=pages,
        host_pages=configuration.host_pages // groups,
        prefixes=configuration.prefix_cache,
        padding=pages_per_group - pages,
    )


def check_scheduler(scheduler: AnyScheduler, sequences: Iterable[CachedSequence]) -> None:
    """Raises AssertionError if a page is lost (see ``check_pages``). ``sequences`` are all of the server."""
    sending = {} if scheduler.role == "generate" else scheduler.to_send
    # A sequence that is being sent has pages on both servers; its own are those on the target.
    here = [sequence for sequence in sequences if sequence not in sending]
    for number, group in enumerate(scheduler.groups):
        away = {} if scheduler.role == "generate" else group.to_send
        check_pages(group.cache, [item for item in here if item.group == number], away.values())


def rows_of(groups: Sequence[int], rows: int, ways: int) -> list[int]:
    """Row of each sequence among the ``rows`` of a program, by its group; -1 if its group has no row left.

    Each of ``ways`` groups has an equal block of rows if they divide; otherwise a sequence takes any row.
    """
    blocks = ways if rows % ways == 0 else 1
    size, taken = rows // blocks, [0] * blocks
    rows_of = list[int]()
    for group in groups:
        block = group % blocks
        rows_of.append(block * size + taken[block] if taken[block] < size else -1)
        taken[block] += 1
    return rows_of
