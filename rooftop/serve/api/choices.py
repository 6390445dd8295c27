"""From the tokens of a sequence to the pieces of an answer: text, log-probabilities, why it ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rooftop.serve.api.detokenise import Detokeniser, StopStrings, Vocabulary
from rooftop.serve.api.tools import MARKERS, Calling, CallPart, CallReader
from rooftop.serve.engine.requests import Token


@dataclass(frozen=True, kw_only=True, slots=True)
class Logprob:
    """A token: what it spells, its log-probability, where its text begins in the answer, alternatives."""

    text: str
    bytes: bytes
    logprob: float
    offset: int = 0
    top: tuple[Logprob, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerPiece:
    """New part of an answer: ``first`` if nothing came before; ``finish`` ends it. ``logprobs`` None: not wanted.

    ``calls`` are of tools.
    """

    text: str
    calls: tuple[CallPart, ...] = ()
    logprobs: tuple[Logprob, ...] | None = None
    first: bool = False
    finish: str | None = None


class AnswerChoice:
    """One sequence on its way: tokens in, pieces out.

    ``stopped`` says that a stop string ended it, whatever the engine has yet to say; ``failed`` why it broke off.
    ``tokens`` are those that were generated. ``text`` begins the answer (an echo of the prompt). ``calling`` says how
    it calls tools.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        stop: Sequence[str],
        *,
        logprobs: bool,
        text: str = "",
        calling: Calling | None = None,
    ) -> None:
        self._vocabulary = vocabulary
        self._words, self._stops = Detokeniser(vocabulary), StopStrings(stop)
        self._waiting: list[Logprob] | None = [] if logprobs else None
        self._echo = text
        self._calls = None if calling is None else CallReader(calling)
        #: Characters that were decoded, and those that were shown.
        self._decoded = self._shown = 0
        self._first = True
        self.tokens = 0
        self.finish: str | None = None
        self.failed: Token | None = None

    @property
    def stopped(self) -> bool:
        """True if a stop string ended the answer."""
        return self._stops.stopped

    def push(self, token: Token) -> AnswerPiece | None:
        """The piece that ``token`` makes; None if there is nothing to show yet. After ``finish``, nothing comes."""
        if self.finish is not None or self.failed is not None:
            return None
        if token.token is None:
            self.failed = token
            return None
        self.tokens += 1
        text = ""
        # The token that ends a text is no part of it.
        if token.finish != "stop":
            words = self._said(token.token)
            self._remember(token)
            self._decoded += len(words)
            text = self._stops.push(words)
        if token.finish is not None and not self.stopped:
            words = self._words.flush()
            self._decoded += len(words)
            text += self._stops.push(words) + self._stops.flush()
        if token.finish is not None or self.stopped:
            self.finish = "stop" if self.stopped else token.finish
        return self._piece(text)

    def _said(self, token: int) -> str:
        """The text that ``token`` adds: special tokens too, of which calls are made."""
        if self._calls is not None and (marker := self._vocabulary.special(token)) in MARKERS:
            return self._words.flush() + str(marker)
        return self._words.push(token)

    def _piece(self, text: str) -> AnswerPiece | None:
        self._shown += len(text)
        calls: tuple[CallPart, ...] = ()
        if self._calls is not None:
            text, calls = self._calls.push(text)
            if self.finish is not None:
                text += self._calls.flush()
            if self.finish == "stop" and self._calls.calls:
                self.finish = "tool_calls"
        # The first token makes a piece whatever it says: it is what a client measures its waiting by.
        if not text and not calls and not self._first and self.finish is None:
            return None
        piece = AnswerPiece(
            text=self._echo + text, calls=calls, logprobs=self._take(), first=self._first, finish=self.finish
        )
        self._echo, self._first = "", False
        return piece

    def _remember(self, token: Token) -> None:
        if self._waiting is None or token.token is None or token.logprob is None:
            return
        top = tuple(self._logprob(id_, value, 0, ()) for id_, value in token.top)
        self._waiting.append(self._logprob(token.token, token.logprob, self._decoded, top))

    def _logprob(self, token: int, value: float, offset: int, top: tuple[Logprob, ...]) -> Logprob:
        spelled = self._vocabulary.bytes_of(token)
        return Logprob(text=spelled.decode(errors="replace"), bytes=spelled, logprob=value, offset=offset, top=top)

    def _take(self) -> tuple[Logprob, ...] | None:
        """Those of tokens whose text is shown: at the end, but for a stop string, all."""
        if self._waiting is None:
            return None
        everything = self.finish is not None and not self.stopped
        ready = sum(everything or entry.offset < self._shown for entry in self._waiting)
        taken, self._waiting = self._waiting[:ready], self._waiting[ready:]
        return tuple(taken)
