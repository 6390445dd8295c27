"""One server: what its scheduler decides, done by its replica, with the bookkeeping of NumPy arrays in between.

A step is decided, sent to the device, and collected.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np
import numpy.typing as npt

from rooftop.programs.decode import COUNT, DRAWN, HEAD, START, Chosen
from rooftop.scheduling.serving import Step
from rooftop.scheduling.serving_cache import Sequence
from rooftop.serve.configuration import covering
from rooftop.serve.counters import Counters, Shape
from rooftop.serve.replica import Ints, Replica
from rooftop.serve.requests import Token
from rooftop.serve.running import Running
from rooftop.serve.schedulers import AnyScheduler, rows_of
from rooftop.serve.slots import TABLE, TOKEN, Part, Prefill, Slots

_Order = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Sent:
    """A step that the device works on, and what it will yield.

    ``generating``: the requests, their slots and rows, what is chosen, and the guesses that are checked.
    ``prefills``: of each program the requests whose prompt it completes, with their rows.
    """

    step: Step
    begun_s: float
    programs: list[Shape]
    generating: _Generating | None = None
    prefills: list[tuple[list[tuple[int, Running]], Chosen]] = field(default_factory=list)


@dataclass(kw_only=True)
class _Generating:
    """Those who generate: their slots ``order`` and ``rows`` of ``packed``, with room for ``guesses`` if there are."""

    requests: list[Running]
    order: _Order
    rows: list[int]
    packed: Ints
    guesses: list[list[int]] | None
    chosen: Chosen = field(init=False)


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
        self._slots = Slots(replica, counters)
        self._generating = list[Running]()
        self._order: _Order = np.zeros(0, np.int64)
        #: The rows of those who generate, in a step of ``_size``.
        self._at, self._size = list[int](), 0
        self._changed = False
        self._ran = list[Shape]()

    def send(self) -> Sent | None:
        """Decide the next step and begin it; None if there is nothing to do."""
        begun_s = perf_counter()
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

    def collect(self, sent: Sent, *, behind: bool = False) -> list[tuple[Running, Token]]:
        """Wait for a step, ``behind`` that of another server; the tokens that it gave, each appended to its request."""
        over = behind and self._is_over(sent)
        with self.counters.on_device():
            generated = None if sent.generating is None else np.asarray(sent.generating.chosen.tokens)
            drawn = [np.asarray(chosen.tokens) for _, chosen in sent.prefills]
        self.counters.ran(sent.programs, perf_counter() - sent.begun_s, at_most=over)
        self.scheduler.complete(sent.step)
        found = list[tuple[Running, Token]]()
        if sent.generating is not None and generated is not None:
            now, table = sent.generating, self._slots.rows
            before = table[now.order, START] // self._page_tokens
            if now.guesses is None:
                table[now.order, START] += 1
                table[now.order, DRAWN] += 1
                table[now.order, TOKEN] = generated[now.rows]
                rows = list(zip(now.rows, now.requests, strict=True))
                found += self._tokens(rows, generated.tolist(), now.chosen)
            else:
                found += self._checked(now, now.guesses, generated.tolist())
            held = table[now.order, START]
            for at in np.flatnonzero(held // self._page_tokens > before):
                now.requests[at].extend_keys(int(held[at]))
        for (rows, chosen), values in zip(sent.prefills, drawn, strict=True):
            found += self._tokens(rows, values.tolist(), chosen)
        for chunk in sent.step.chunks:
            self.counters.prompt_tokens += chunk.tokens
            if chunk.last:
                self._prefilled(self.running[chunk.sequence.id])
        return found

    @staticmethod
    def _is_over(sent: Sent) -> bool:
        """Whether the device has done all of a step already."""
        chosen = [each for _, each in sent.prefills] + ([] if sent.generating is None else [sent.generating.chosen])
        return all(each.tokens.is_ready() for each in chosen)  # type: ignore[attr-defined]

    def leave(self, running: Running) -> None:
        """``running`` has no place here any more."""
        self._slots.leave(running)
        self._changed = True

    def arrived(self, sequence: Sequence) -> None:
        """The KV of ``sequence`` has come from a prefill server."""
        self.scheduler.arrived(sequence)
        self._changed = True

    def _prefilled(self, running: Running) -> None:
        """The prompt of ``running`` is complete: it generates, here or elsewhere."""
        if self.scheduler.role == "prefill":
            self._slots.leave(running)
        else:
            self._slots.begin(running)
        self._changed = True

    def _checked(
        self, now: _Generating, guesses: list[list[int]], values: list[int]
    ) -> Iterator[tuple[Running, Token]]:
        """The tokens of each request: the guesses that were right, and the one behind them."""
        width = 1 + self.replica.guesses
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

    def _generate(self) -> _Generating:
        """The rows of the sequences that generate."""
        if self._changed:
            generating = [self.running[sequence.id] for sequence in self.scheduler.generating]
            # Rows that are read together are as long as the longest of them.
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
        pages = covering(self.replica.shapes.contexts, int(start.max()) + 1 + self.replica.guesses) // page_tokens
        index = np.full(self._size, self.replica.slots, np.int64)
        index[self._at] = order
        packed = self._slots.rows[index, : TABLE + pages]
        guesses = self._guesses(start, packed)
        if guesses is not None:
            room = np.zeros((len(packed), self.replica.guesses), np.int32)
            for row, guessed in zip(self._at, guesses, strict=True):
                room[row, : len(guessed)] = guessed
                packed[row, COUNT] += len(guessed)
            packed = np.concatenate([packed[:, :TABLE], room, packed[:, TABLE:]], axis=1)
        return _Generating(requests=self._generating, order=order, rows=self._at, packed=packed, guesses=guesses)

    def _run_all(
        self, generating: _Generating | None, prefills: list[Prefill]
    ) -> Iterator[tuple[list[tuple[int, Running]], Chosen]]:
        """Generate, together with the first of ``prefills`` where a program takes both, then the others."""
        mixed = self._slots.together(generating.packed, prefills[0]) if generating is not None and prefills else None
        if generating is not None and mixed is not None:
            generating.chosen, chosen = self._run(*mixed)
            yield prefills[0].complete, chosen
            prefills = prefills[1:]
        elif generating is not None and generating.guesses is not None:
            (generating.chosen,) = self._run((generating.packed, 1 + self.replica.guesses), every=True)
        elif generating is not None:
            (generating.chosen,) = self._run((generating.packed, 1))
        for each in prefills:
            part = each.packed, each.width
            if self._draft is not None:
                with self.counters.on_device():
                    self._draft.step(part)
            (chosen,) = self._run(part)
            yield each.complete, chosen

    def _run(self, *parts: Part, every: bool = False) -> list[Chosen]:
        packed, width = parts[-1]
        rows, columns = packed.shape
        beside = sum(len(each) for each, _ in parts[:-1])
        self._ran.append((rows, 1 if every else width, (columns - HEAD - width) * self._page_tokens, beside))
        with self.counters.on_device():
            return self.replica.step(*parts, every=every)

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
