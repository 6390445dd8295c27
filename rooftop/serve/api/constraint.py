"""Answers that keep to a JSON schema or a regular expression: which tokens may come next, by llguidance."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import llguidance
import numpy as np
import numpy.typing as npt

from rooftop.core.errors import RooftopError

#: JSON as Python's json.dumps writes it; freely set blanks are what a small model never stops to write.
_COMPACT: Any = {"whitespace_flexible": False}


class Matcher:
    """Position of one request's answer in its grammar. One thread calls its methods.

    ``failed``, which others may read, is why the answer is not of the grammar, as when that has grown too complex.
    """

    def __init__(self, matcher: llguidance.LLMatcher, words: int) -> None:
        self.failed: str | None = None
        self._matcher = matcher
        self._mask = np.zeros(words, np.uint32)

    def mask(self) -> npt.NDArray[np.uint32]:
        """The tokens allowed next, [ceil(V/32)]: token t is bit t % 32 of word t // 32. Valid until the next call."""
        self._matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
        return self._mask

    def accept(self, token: int) -> None:
        """``token`` was chosen. Where that fails (see ``failed``) only the end is allowed from then on."""
        if not self._matcher.is_stopped() and not self._matcher.consume_token(token):
            self.failed = _line(self._matcher.get_error())

    def copy(self) -> Matcher:
        """Another one, at the same place."""
        return Matcher(self._matcher.deep_copy(), len(self._mask))


@dataclass(frozen=True, kw_only=True)
class Grammars:
    """Makes matchers for a tokenizer: ``definition`` is a tokenizer.json, ``vocab`` the V of the model's logits.

    ``ends`` are the tokens that end an answer; they are allowed where the grammar may end, and only there.
    """

    definition: str
    vocab: int
    ends: tuple[int, ...]
    _tokenizer: llguidance.LLTokenizer = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.ends:
            raise RooftopError("response_format", "a constraint", "a model that has a token to end its text")
        try:
            tokenizer = llguidance.LLTokenizer(self.definition, n_vocab=self.vocab, eos_token=list(self.ends))
        except Exception as error:  # the package raises nothing narrower
            raise RooftopError(
                "response_format", "a constraint", f"a tokenizer that llguidance reads ({error})"
            ) from None
        object.__setattr__(self, "_tokenizer", tokenizer)

    def json(self, schema: Mapping[str, Any], field: str = "response_format.json_schema.schema") -> Matcher:
        """JSON of a JSON schema. Raises RooftopError for a schema that cannot be kept to, which ``field`` has."""
        try:
            grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=_COMPACT)
        except ValueError as error:
            raise RooftopError(field, "a schema", _line(str(error))) from None
        return self._matcher(grammar, field)

    def regex(self, pattern: str) -> Matcher:
        """A whole answer that matches ``pattern``. Raises RooftopError for what is none."""
        return self._matcher(llguidance.LLMatcher.grammar_from_regex(pattern), "guided_regex")

    def _matcher(self, grammar: str, field: str) -> Matcher:
        matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise RooftopError(field, "one that cannot be kept to", _line(matcher.get_error()))
        return Matcher(matcher, -(-self.vocab // 32))


def _line(text: str) -> str:
    return " ".join(text.split())[:300]
