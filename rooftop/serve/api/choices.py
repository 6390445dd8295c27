"""From the tokens of a sequence to the pieces of an answer: text, log-probabilities, finish reason.

Text is decoded as its tokens come: never half a character, and in the end the same as decoding all tokens at once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import tokenizers
from msgspec import Struct

from rooftop.core.errors import RooftopError
from rooftop.serve.api.schemas import FinishReason
from rooftop.serve.api.tools import MARKERS, Calling, CallPart, CallReader
from rooftop.serve.engine.requests import Token

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_REPLACEMENT = "\ufffd"


class Vocabulary:
    """The ids of a tokenizer: the special ones, the bytes of each, and the text of a sequence.

    ``definition`` is the text of a tokenizer.json.
    """

    def __init__(self, definition: str) -> None:
        self._backend = tokenizers.Tokenizer.from_str(definition)
        added = self._backend.get_added_tokens_decoder()
        self._added = {id_: token.content for id_, token in added.items()}
        self._special = frozenset(id_ for id_, token in added.items() if token.special)
        self._spellings = dict[int, tuple[str, list[int]]]()
        kinds = _kinds(json.loads(definition).get("decoder"))
        self._byte_level = "ByteLevel" in kinds
        self.byte_fallback = "ByteFallback" in kinds

    def says(self, token: int) -> bool:
        """Return True if decoding uses ``token``; special tokens and ids beyond the vocabulary are skipped."""
        return token not in self._special and self._backend.id_to_token(token) is not None

    def special(self, token: int) -> str | None:
        """Text of a special token; None for any other token."""
        return self._added[token] if token in self._special else None

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of ``tokens``, special ones left out."""
        return str(self._backend.decode(list(tokens)))

    def is_byte(self, token: int) -> bool:
        """Return True if ``token`` is one byte of a character outside the vocabulary."""
        return self.byte_fallback and _BYTE.fullmatch(self._backend.id_to_token(token) or "") is not None

    def bytes_of(self, token: int) -> bytes:
        """The bytes that ``token`` spells, which may be a part of a character; empty beyond the vocabulary."""
        if token in self._added:
            return self._added[token].encode()
        spelled = self._backend.id_to_token(token)
        if spelled is None:
            return b""
        if self._byte_level and all(character in self._byte_of for character in spelled):
            return bytes(self._byte_of[character] for character in spelled)
        byte = _BYTE.fullmatch(spelled) if self.byte_fallback else None
        if byte is not None:
            return bytes([int(byte[1], 16)])
        return spelled.replace("\u2581", " ").encode()

    def spelling(self, token: int) -> tuple[str, list[int]]:
        """The text and the bytes of a token; log-probabilities ask for many."""
        known = self._spellings.get(token)
        if known is None:
            spelled = self.bytes_of(token)
            known = self._spellings[token] = spelled.decode(errors="replace"), list(spelled)
        return known

    @cached_property
    def longest_bytes(self) -> int:
        """Bytes of the longest token."""
        return max(len(self.bytes_of(token)) for token in self._backend.get_vocab(with_added_tokens=True).values())

    @cached_property
    def _byte_of(self) -> dict[str, int]:
        """GPT-2's alphabet: each byte as a character that can be seen."""
        seen = [*range(ord("!"), ord("~") + 1), *range(ord("\xa1"), ord("\xac") + 1), *range(ord("\xae"), 256)]
        hidden = [byte for byte in range(256) if byte not in seen]
        return {chr(byte): byte for byte in seen} | {chr(256 + index): byte for index, byte in enumerate(hidden)}


class Detokeniser:
    """The text of one sequence, piece by piece.

    Decoders look at neighbours (the first word has no blank before it, bytes join to characters), so a piece is the
    difference between decoding a short window of tokens with and without the new ones. Text that may still change is
    withheld: an unfinished character, and bytes of byte fallback, which count as one run.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        #: Tokens whose text was returned, as context for the others, and tokens that wait.
        self._out: list[int] = []
        self._out_text = ""
        self._withheld: list[int] = []

    def push(self, token: int) -> str:
        """The text that ``token`` adds; empty while it is withheld. All pieces and ``flush`` joined are the text."""
        if not self._vocabulary.says(token):
            return ""
        self._withheld.append(token)
        return "" if self._vocabulary.is_byte(token) else self._take(last=False)

    def flush(self) -> str:
        """Return the withheld text at the end."""
        return self._take(last=True) if self._withheld else ""

    def _take(self, *, last: bool) -> str:
        text = self._vocabulary.decode([*self._out, *self._withheld])
        if not last and (text.endswith(_REPLACEMENT) or not text.startswith(self._out_text)):
            return ""
        piece = text[len(self._out_text) :]
        self._out, self._withheld = self._withheld, []
        self._out_text = self._vocabulary.decode(self._out)
        return piece


class StopStrings:
    """Cuts a text at the first complete one of ``strings``, withholding text that may begin one."""

    def __init__(self, strings: Sequence[str]) -> None:
        if not all(strings):
            raise RooftopError("stop", "", "strings that are not empty")
        self._strings = tuple(strings)
        self._withheld = ""
        self.stopped = False

    def push(self, piece: str) -> str:
        """Add ``piece`` and return the text that can be shown; ``stopped`` then says if a stop string ended it."""
        if not self._strings:
            return piece
        text = self._withheld + piece
        # The first to be complete, as if the text had come character by character; of several, the longest.
        ends = [(at + len(string), at) for string in self._strings if (at := text.find(string)) >= 0]
        if ends:
            self.stopped, self._withheld = True, ""
            return text[: min(ends)[1]]
        withheld = max(_overlap(text, string) for string in self._strings)
        self._withheld = text[len(text) - withheld :]
        return text[: len(text) - withheld]

    def flush(self) -> str:
        """Return the withheld text at the end."""
        withheld, self._withheld = self._withheld, ""
        return withheld


def _overlap(text: str, string: str) -> int:
    """Length of the longest suffix of ``text`` that is a prefix of ``string``."""
    return next(size for size in range(min(len(string) - 1, len(text)), -1, -1) if text.endswith(string[:size]))


def _kinds(decoder: object) -> set[str]:
    """The types of a decoder and its parts."""
    if not isinstance(decoder, dict):
        return set()
    parts = decoder.get("decoders") or []
    return {str(decoder.get("type"))}.union(*(_kinds(part) for part in parts))


class Logprob(Struct):
    """A token: its text and bytes, its log-probability, the ``offset`` of its text in the answer, and alternatives.

    A struct and no dataclass: there may be twenty-one for each token, and these are made in a tenth of the time.
    """

    text: str
    bytes: list[int]
    logprob: float
    offset: int = 0
    top: tuple[Logprob, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerPiece:
    """New part of an answer: its text, calls of tools, and log-probabilities (None: not requested).

    ``first``: nothing came before. ``finish``: why the answer ends with this piece.
    """

    text: str
    calls: tuple[CallPart, ...] = ()
    logprobs: tuple[Logprob, ...] | None = None
    first: bool = False
    finish: FinishReason | None = None


class AnswerChoice:
    """One sequence: tokens in, pieces out.

    ``stopped``: a stop string ended it, even if the engine still sends tokens. ``failed``: the token without an id that
    broke it off. ``tokens`` counts generated tokens. ``text`` begins the answer (an echo of the prompt). ``calling``
    says how it calls tools.
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
        self.finish: FinishReason | None = None
        self.failed: Token | None = None

    @property
    def stopped(self) -> bool:
        """True if a stop string ended the answer."""
        return self._stops.stopped

    def push(self, token: Token) -> AnswerPiece | None:
        """The piece that ``token`` completes; None if there is nothing to show yet, or after ``finish``."""
        if self.finish is not None or self.failed is not None:
            return None
        if token.token is None:
            self.failed = token
            return None
        self.tokens += 1
        text = ""
        # The token that ends a text is not part of it.
        if token.finish != "stop":
            words = self._spelling(token.token)
            self._remember(token)
            self._decoded += len(words)
            text = self._stops.push(words)
        if token.finish is not None and not self.stopped:
            words = self._words.flush()
            self._decoded += len(words)
            text += self._stops.push(words) + self._stops.flush()
        if token.finish is not None or self.stopped:
            self.finish = "stop" if self.stopped or token.finish == "stop" else "length"
        return self._piece(text)

    def _spelling(self, token: int) -> str:
        """The text that ``token`` adds, including special tokens that mark calls."""
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
        # The first token always makes a piece: clients measure the time to first token by it.
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
        spelling = self._vocabulary.spelling
        top = tuple([Logprob(*spelling(id_), value) for id_, value in token.top])
        self._waiting.append(Logprob(*spelling(token.token), token.logprob, self._decoded, top))

    def _take(self) -> tuple[Logprob, ...] | None:
        """Log-probabilities of tokens whose text is shown; at the end all of them, unless a stop string ended it."""
        if self._waiting is None:
            return None
        everything = self.finish is not None and not self.stopped
        ready = sum(everything or entry.offset < self._shown for entry in self._waiting)
        taken, self._waiting = self._waiting[:ready], self._waiting[ready:]
        return tuple(taken)
