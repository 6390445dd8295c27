"""Text to token ids and back: a Hugging Face ``tokenizer.json``, or a byte-level BPE trained by rooftop."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from rooftop.core.errors import RooftopError
from rooftop.core.files import read_text, write_text

#: Ids of one text, [tokens] int32.
Ids = npt.NDArray[np.int32]

#: Token that begins and ends a document in a tokenizer trained by rooftop.
END_OF_TEXT = "<|endoftext|>"
_FILE, _SETTINGS = "tokenizer.json", "tokenizer_config.json"
#: Chat template of a tokenizer that is trained here: turns as lines, calls of tools as Hermes and Qwen write them.
_CHAT = (
    "{% if tools %}Call a tool as <tool_call>{JSON of its name and arguments}</tool_call>: {{ tools | tojson }}\n"
    "{% endif %}{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
#: Names of special tokens in published models, for a tokenizer.json without settings.
_CONVENTIONAL = {
    "bos_token": ("<|begin_of_text|>", "<s>", "<bos>", END_OF_TEXT),
    "eos_token": ("<|end_of_text|>", "</s>", "<eos>", END_OF_TEXT),
}


@dataclass(frozen=True, kw_only=True)
class Tokenizer:
    """A tokenizer: its ``definition`` is the text of a tokenizer.json, ``settings`` the tokenizer_config.json.

    Special tokens spelled out in a text are encoded as plain text. Padding and truncation of the definition are
    disabled, so that no token of a document is lost. Raises RooftopError for an invalid definition, and for settings
    that name a token that it does not have.
    """

    definition: str
    settings: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for role in _CONVENTIONAL:
            self._special(role)

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        """The tokenizer of a tokenizer.json, or of its folder; with the settings in the same folder."""
        file = path / _FILE if path.is_dir() else path
        settings_file = file.with_name(_SETTINGS)
        try:
            definition = read_text(file)
            settings = json.loads(read_text(settings_file)) if settings_file.exists() else {}
        except (OSError, ValueError, RecursionError) as error:
            reason = error.strerror if isinstance(error, OSError) else f"{error}"
            raise RooftopError("tokenizer", str(path), f"a {_FILE}, or a folder that has one ({reason})") from None
        if not isinstance(settings, dict):
            raise RooftopError("tokenizer", str(settings_file), "a JSON object")
        return cls(definition=definition, settings=settings)

    def save(self, path: Path) -> None:
        """Write tokenizer.json, unchanged, to ``path`` (or into that folder), and its settings next to it.

        Each file is written atomically. Raises RooftopError if they cannot be written.
        """
        file = path / _FILE if path.is_dir() else path
        # Settings first: a definition without them could be read with other special tokens.
        if self.settings:
            write_text(file.with_name(_SETTINGS), json.dumps(self.settings, indent=2, ensure_ascii=False) + "\n")
        write_text(file, self.definition)

    def encode(self, text: str) -> Ids:
        """The ids of ``text``, with nothing before or after them."""
        return self.encode_many([text])[0]

    def encode_many(self, texts: Sequence[str]) -> list[Ids]:
        """The ids of each text, with nothing before or after them; the texts are encoded in parallel."""
        encoded = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(encoding.ids, np.int32) for encoding in encoded]

    def decode(self, ids: Ids | Sequence[int]) -> str:
        """The text of ``ids`` without special tokens. Raises RooftopError for an id outside the vocabulary."""
        flat = np.asarray(ids, np.int64).reshape(-1)
        if (outside := flat[(flat < 0) | (flat >= self.vocab)]).size:
            raise RooftopError("token id", int(outside[0]), f"0 to {self.vocab - 1}, the ids of the tokenizer")
        return str(self._backend.decode(flat.tolist()))

    @cached_property
    def vocab(self) -> int:
        """V: one more than the highest id."""
        return 1 + max(self._backend.get_vocab(with_added_tokens=True).values())

    @cached_property
    def bos(self) -> int | None:
        """The id that begins a document, None if there is none."""
        return self._special("bos_token")

    @cached_property
    def eos(self) -> int | None:
        """The id that ends a document, None if there is none."""
        return self._special("eos_token")

    @cached_property
    def digest(self) -> str:
        """SHA-256 of everything that determines the ids of a document, in hexadecimal."""
        return hashlib.sha256(json.dumps([self.definition, self.bos, self.eos]).encode()).hexdigest()

    @cached_property
    def _backend(self) -> tokenizers.Tokenizer:
        try:
            backend = tokenizers.Tokenizer.from_str(self.definition)
            backend.get_vocab_size()
        except BaseException as error:
            # The package raises nothing narrower than Exception, and a panic of its own code is none.
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            reason = " ".join(str(error).split())[:200]
            raise RooftopError("tokenizer", f"{self.definition[:40]}", f"a {_FILE} ({reason})") from None
        backend.no_padding()
        backend.no_truncation()
        backend.encode_special_tokens = True
        return backend

    def _special(self, role: str) -> int | None:
        named = self.settings.get(role)
        named = named.get("content") if isinstance(named, dict) else named
        if named is not None:
            if not isinstance(named, str) or (id_of_name := self._backend.token_to_id(named)) is None:
                raise RooftopError(f"tokenizer {role}", named, "a token of the tokenizer")
            return int(id_of_name)
        if role in self.settings:
            return None
        special = {token.content: id_ for id_, token in self._backend.get_added_tokens_decoder().items()}
        return next((special[name] for name in _CONVENTIONAL[role] if name in special), None)


def train_bpe(texts: Iterable[str], vocab: int) -> Tokenizer:
    """A byte-level BPE of at most ``vocab`` tokens, including the one that begins and ends a document.

    It has a plain chat template, so that a model trained with it can be served as one that chats.

    Sennrich et al. 2016; on bytes, so that every text can be encoded and is decoded exactly. The same texts give the
    same tokenizer. A corpus with few repeated pairs gives fewer tokens than ``vocab``. Raises RooftopError for a
    vocabulary that is too small for all bytes, or for a corpus without text.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if vocab <= len(alphabet):
        raise RooftopError("vocab", vocab, f"at least {len(alphabet) + 1}: every byte, and what ends a document")
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        min_frequency=2,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    characters = 0

    def counted() -> Iterable[str]:
        nonlocal characters
        for text in texts:
            characters += len(text)
            yield text

    backend.train_from_iterator(counted(), trainer)
    if not characters:
        raise RooftopError("corpus", "no text", "text to train a tokenizer on")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "chat_template": _CHAT,
        # Otherwise decoding removes spaces before punctuation.
        "clean_up_tokenization_spaces": False,
    }
    return Tokenizer(definition=backend.to_str(), settings=settings)
