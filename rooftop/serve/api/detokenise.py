"""Text as its tokens come: never half a character, and in the end what decoding all tokens at once gives."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cached_property

import tokenizers

from rooftop.core.errors import RooftopError

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_REPLACEMENT = "\ufffd"


class Vocabulary:
    """The ids of a tokenizer: which are special, what they spell, and what a sequence of them says.

    ``definition`` is the text of a tokenizer.json.
    """

    def __init__(self, definition: str) -> None:
        self._backend = tokenizers.Tokenizer.from_str(definition)
        added = self._backend.get_added_tokens_decoder()
        self._added = {id_: token.content for id_, token in added.items()}
        self._special = frozenset(id_ for id_, token in added.items() if token.special)
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

    @cached_property
    def _byte_of(self) -> dict[str, int]:
        """GPT-2's alphabet: each byte as a character that can be seen."""
        seen = [*range(ord("!"), ord("~") + 1), *range(ord("\xa1"), ord("\xac") + 1), *range(ord("\xae"), 256)]
        hidden = [byte for byte in range(256) if byte not in seen]
        return {chr(byte): byte for byte in seen} | {chr(256 + index): byte for index, byte in enumerate(hidden)}


class Detokeniser:
    """The text of one sequence, piece by piece.

    Decoders look at neighbours (the first word has no blank before it, bytes join to characters), so a piece is the
    difference between decoding a short window of tokens with and without the new ones. What may still change is held
    back: an unfinished character, and bytes of byte fallback, which count as one run.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        #: Tokens whose text is out, as context for the others; and those that wait.
        self._out: list[int] = []
        self._out_text = ""
        self._held: list[int] = []

    def push(self, token: int) -> str:
        """The text that ``token`` adds; empty while it is held back. Pieces joined, and ``flush``, are the text."""
        if not self._vocabulary.says(token):
            return ""
        self._held.append(token)
        return "" if self._vocabulary.is_byte(token) else self._take(last=False)

    def flush(self) -> str:
        """Return the withheld text at the end."""
        return self._take(last=True) if self._held else ""

    def _take(self, *, last: bool) -> str:
        text = self._vocabulary.decode([*self._out, *self._held])
        if not last and (text.endswith(_REPLACEMENT) or not text.startswith(self._out_text)):
            return ""
        piece = text[len(self._out_text) :]
        self._out, self._held = self._held, []
        self._out_text = self._vocabulary.decode(self._out)
        return piece


class StopStrings:
    """Cuts a text where the first of ``strings`` is complete in it, holding back what may be the beginning of one."""

    def __init__(self, strings: Sequence[str]) -> None:
        if not all(strings):
            raise RooftopError("stop", "", "strings that are not empty")
        self._strings = tuple(strings)
        self._held = ""
        self.stopped = False

    def push(self, piece: str) -> str:
        """Add ``piece`` and return the text that can be shown; ``stopped`` then says if a stop string ended it."""
        if not self._strings:
            return piece
        text = self._held + piece
        # The first to be complete, as if the text had come character by character; of several, the longest.
        ends = [(at + len(string), at) for string in self._strings if (at := text.find(string)) >= 0]
        if ends:
            self.stopped, self._held = True, ""
            return text[: min(ends)[1]]
        withheld = max(_overlap(text, string) for string in self._strings)
        self._held = text[len(text) - withheld :]
        return text[: len(text) - withheld]

    def flush(self) -> str:
        """Return the withheld text at the end."""
        withheld, self._held = self._held, ""
        return withheld


def _overlap(text: str, string: str) -> int:
    """The longest end of ``text`` that begins ``string``."""
    return next(size for size in range(min(len(string) - 1, len(text)), -1, -1) if text.endswith(string[:size]))


def _kinds(decoder: object) -> set[str]:
    """The types of a decoder and its parts."""
    if not isinstance(decoder, dict):
        return set()
    parts = decoder.get("decoders") or []
    return {str(decoder.get("type"))}.union(*(_kinds(part) for part in parts))
