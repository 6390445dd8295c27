"""Constraints on answers (by llguidance): grammars of JSON Schemas and regular expressions, within limits.

A grammar comes from a client. Its text, the states of its lexer and the work for a token are bounded, so that each mask
takes less than a second and some 100 MB at most; a grammar that needs more is the client's error.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import llguidance
import numpy as np
import numpy.typing as npt

from rooftop.core.errors import RooftopError
from rooftop.core.rounding import ceil_div
from rooftop.serve.engine.requests import Constraint

#: Most characters of a schema or a regular expression: a thousand times a long one.
MOST_CHARACTERS = 256 * 1024
#: Work and states of a grammar. llguidance does about 50,000 units of the first fuel, 14,000 of the second and 20,000
#: items in a millisecond, and a state takes 1 to 2 kB (its documentation of ``LLParserLimits``).
_LIMITS = llguidance.LLParserLimits(
    initial_lexer_fuel=500_000,
    step_lexer_fuel=50_000,
    step_max_items=20_000,
    max_lexer_states=20_000,
    max_grammar_size=100_000,
    verbose_errors=False,
)

#: JSON as Python's json.dumps writes it: with free white space, small models never stop writing blanks.
_COMPACT: Any = {"whitespace_flexible": False}


class Matcher(Constraint):
    """Position of one request's answer in its grammar. One thread calls its methods.

    ``failed``, which other threads may read, is why the answer left the grammar, for example because that grew too
    complex.
    """

    def __init__(self, matcher: llguidance.LLMatcher, words: int, field: str) -> None:
        self.field = field
        self.failed: str | None = None
        self._matcher = matcher
        self._mask = np.zeros(words, np.uint32)

    def mask(self) -> npt.NDArray[np.uint32]:
        """The tokens allowed next, [ceil(V/32)]: token t is bit t % 32 of word t // 32. Valid until the next call."""
        self._matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
        if self.failed is None and self._matcher.is_error():
            self.failed = _line(self._matcher.get_error())
        return self._mask

    def accept(self, token: int) -> None:
        """Advance by ``token``. If that fails (see ``failed``), only the end is allowed from then on."""
        if not self._matcher.is_stopped() and not self._matcher.consume_token(token):
            self.failed = _line(self._matcher.get_error())

    def copy(self) -> Matcher:
        """A matcher at the same position."""
        return Matcher(self._matcher.deep_copy(), len(self._mask), self.field)


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
        """The matcher of a JSON Schema, the value of ``field``. Raises RooftopError if it cannot be enforced."""
        try:
            text = json.dumps(schema)
            _check_length(text, field)
            grammar = llguidance.LLMatcher.grammar_from_json_schema(text, overrides=_COMPACT)
        except (ValueError, RecursionError) as error:
            raise RooftopError(field, "a schema", _line(str(error))) from None
        return self._matcher(grammar, field)

    def regex(self, pattern: str, field: str = "guided_regex") -> Matcher:
        """The matcher of a regular expression for the whole answer. Raises RooftopError if it is invalid."""
        _check_length(pattern, field)
        return self._matcher(llguidance.LLMatcher.grammar_from_regex(pattern), field)

    def _matcher(self, grammar: str, field: str) -> Matcher:
        built = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=_LIMITS)
        if built.is_error():
            raise RooftopError(field, "a constraint that cannot be enforced", _line(built.get_error()))
        matcher = Matcher(built, ceil_div(self.vocab, 32), field)
        # Most grammars that exceed the limits do so at their first token. They are refused before anything is sent.
        probe = matcher.copy()
        allowed = np.flatnonzero(np.unpackbits(probe.mask().view(np.uint8), bitorder="little"))
        if probe.failed is None and len(allowed):
            probe.accept(int(allowed[-1]))
        if probe.failed is not None:
            raise RooftopError(field, "a constraint over the limits of grammars", f"a simpler one ({probe.failed})")
        return matcher


def _check_length(text: str, field: str) -> None:
    if len(text) > MOST_CHARACTERS:
        raise RooftopError(field, f"{len(text):,} characters", f"at most {MOST_CHARACTERS:,}")


def _line(text: str) -> str:
    """The first sentence of llguidance's error in one line."""
    return " ".join(text.partition("<non-verbose/>")[0].split())[:300]
