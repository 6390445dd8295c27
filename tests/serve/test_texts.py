"""Texts of the server: detokenising piece by piece, stop strings, chat templates, constraints, reading requests."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from rooftop.core.errors import RooftopError
from rooftop.serve.api.choices import AnswerChoice, Detokeniser, StopStrings, Vocabulary
from rooftop.serve.api.compiling import Unkeepable
from rooftop.serve.api.grammars import Grammars, json_grammar, regex_grammar
from rooftop.serve.api.openai import prepare, read_request
from rooftop.serve.api.openapi import document, read_body
from rooftop.serve.api.schemas import ChatRequest, CompletionRequest, JsonSchemaFormat, NamedSchema
from rooftop.serve.api.texts import ChatTemplate, Texts
from rooftop.serve.engine.requests import Token
from tests.support import serving_echo

WORDS = [
    "\u2581the",
    "\u2581",
    "\u2581a",
    "b",
    "\u2581\u2581",
    "Größe",
    "日",
    ".",
    "\u2581.",
    "'s",
    "\ufffd",
    "<0x41",
    "🙂",
]


def _llama() -> str:
    """A SentencePiece tokenizer's definition: words with \u2581 for blanks, and bytes for what it has no word for."""
    vocab = {"<unk>": 0} | {f"<0x{byte:02X}>": 1 + byte for byte in range(256)}
    vocab |= {word: len(vocab) + index for index, word in enumerate(WORDS)}
    backend = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.add_special_tokens(["<s>", "</s>"])
    backend.add_tokens([AddedToken("<think>", special=False)])
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return str(backend.to_str())


def _metaspace() -> str:
    vocab = {word: index for index, word in enumerate(WORDS)}
    backend = Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.add_special_tokens(["<s>"])
    backend.decoder = decoders.Metaspace()
    return str(backend.to_str())


def _word_piece() -> str:
    vocab = {word: index for index, word in enumerate(["[UNK]", "the", "##se", "##.", ".", "do", "n't", "'s", "##日"])}
    backend = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    return str(backend.to_str())


DEFINITIONS = {
    "byte level": serving_echo.tokenizer().definition,
    "llama": _llama(),
    "metaspace": _metaspace(),
    "word piece": _word_piece(),
}


@pytest.mark.parametrize("kind", DEFINITIONS)
@given(data=st.data())
def test_pieces_are_the_whole_and_never_half_a_character(kind: str, data: st.DataObject) -> None:
    vocabulary = Vocabulary(DEFINITIONS[kind])
    size = Tokenizer.from_str(DEFINITIONS[kind]).get_vocab_size()
    ids = data.draw(st.lists(st.integers(0, size + 3), max_size=24))
    words = Detokeniser(vocabulary)
    pieces = [words.push(token) for token in ids]
    last = words.flush()
    assert "".join([*pieces, last]) == vocabulary.decode(ids)
    # What is shown on the way is text to the end: bytes that are no character come out with what follows them.
    assert not any(piece.endswith("\ufffd") for piece in pieces)


@given(text=st.text(max_size=40))
def test_a_text_streams_back_as_it_was(text: str) -> None:
    tokenizer = serving_echo.tokenizer()
    words = Detokeniser(Vocabulary(tokenizer.definition))
    assert "".join(words.push(int(token)) for token in tokenizer.encode(text)) + words.flush() == text


def test_a_character_comes_when_its_last_byte_does() -> None:
    vocabulary = Vocabulary(_llama())
    words = Detokeniser(vocabulary)
    smile = [1 + byte for byte in "🙂".encode()]
    a = 257 + WORDS.index("\u2581a")
    assert [words.push(token) for token in (a, *smile, a)] == ["a", "", "", "", "", "🙂 a"]


def test_bytes_of_tokens() -> None:
    byte_level, llama = Vocabulary(DEFINITIONS["byte level"]), Vocabulary(_llama())
    ids = serving_echo.tokenizer().encode("日本 Größe🙂")
    assert b"".join(byte_level.bytes_of(int(token)) for token in ids) == "日本 Größe🙂".encode()
    assert llama.bytes_of(1 + 0xE2) == b"\xe2"
    assert llama.bytes_of(257) == b" the"
    assert llama.bytes_of(10**6) == b""


@given(
    text=st.text("abc", max_size=12),
    cuts=st.lists(st.integers(0, 12)),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
)
def test_stop_strings_do_not_depend_on_where_a_text_is_cut(text: str, cuts: list[int], stops: list[str]) -> None:
    def shown(bounds: list[int]) -> tuple[str, bool]:
        stop, out = StopStrings(stops), ""
        for first, last in pairwise(bounds):
            piece = stop.push(text[first:last])
            out += piece
            # Nothing that is shown is taken back: it holds no stop string, nor will it.
            assert not any(stop in out for stop in stops)
            if stop.stopped:
                return out, True
        return out + stop.flush(), False

    whole = shown([0, len(text)])
    assert shown(sorted({0, *(min(cut, len(text)) for cut in cuts), len(text)})) == whole
    ends = sorted((text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text)
    assert whole == ((text[: ends[0][1]], True) if ends else (text, False))


def test_log_probabilities_come_with_their_text_and_not_after_a_stop_string() -> None:
    tokenizer = serving_echo.tokenizer()
    vocabulary = Vocabulary(tokenizer.definition)
    ids = [int(token) for token in tokenizer.encode("the quick brown fox")]
    choice = AnswerChoice(vocabulary, ["ick br"], logprobs=True)
    pieces = [choice.push(Token(id=1, token=token, logprob=-1.0)) for token in ids]
    shown = [piece for piece in pieces if piece is not None]
    assert "".join(piece.text for piece in shown) == "the qu"
    assert choice.finish == "stop" and choice.stopped
    entries = [entry for piece in shown for entry in piece.logprobs or ()]
    assert "".join(entry.text for entry in entries).startswith("the qu")
    assert all(entry.offset < len("the qu") for entry in entries)
    assert entries[-1].offset + len(entries[-1].text) >= len("the qu")


def _template(text: str, **tokens: str) -> ChatTemplate:
    return ChatTemplate(templates={"default": text}, tokens=tokens)


HELLO = [{"role": "user", "content": "<b>hi</b> & bye"}]


def test_templates_have_what_hugging_face_gives_them() -> None:
    text = _template(
        "{{ bos_token }}{% for m in messages %}\n{% if loop.index > 1 %}{% break %}{% endif %}\n"
        "{{ m.content | tojson }}"
        "{% generation %}<{{ m.role }}>{% endgeneration %}{% endfor %}"
        "{{ tools is none }}{{ 'G' if add_generation_prompt }}"
        "{% set ns = namespace(x=1) %}{{ ns.x }}{{ strftime_now('%Y') | length }}{{ more }}",
        bos_token="<s>",
    )
    assert text.render(HELLO * 2, more={"more": 7}) == '<s>"<b>hi</b> & bye"<user>TrueG147'


def test_templates_are_in_a_sandbox() -> None:
    for attack in ("{{ messages.__class__ }}x", "{{ ''.__class__.__mro__[1].__subclasses__() }}"):
        with pytest.raises(RooftopError, match="chat template"):
            assert "class" not in _template(attack + "{{ messages.append(1) }}").render(HELLO)
    with pytest.raises(RooftopError, match="chat template"):
        _template("{% for x in range(10**9) %}{{ x }}{% endfor %}").render(HELLO)


def test_what_a_template_refuses_is_one_line() -> None:
    with pytest.raises(RooftopError, match=r"messages: .*no\s+system") as error:
        _template("{{ raise_exception('no\nsystem') }}").render(HELLO)
    assert "\n" not in str(error.value)
    with pytest.raises(RooftopError, match="chat template default"):
        _template("{% if %}")


def test_templates_lie_where_checkpoints_have_them(tmp_path: Path) -> None:
    assert ChatTemplate.load(tmp_path) is None
    config = {"bos_token": {"content": "<s>"}, "eos_token": None, "chat_template": "config {{ bos_token }}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    template = ChatTemplate.load(tmp_path)
    assert template is not None and template.render(HELLO) == "config <s>"
    several = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": several}))
    template = ChatTemplate.load(tmp_path)
    assert template is not None and template.render(HELLO) == "plain"
    assert template.render(HELLO, tools=[{"type": "function"}]) == "with tools"
    (tmp_path / "chat_template.jinja").write_text("file")
    template = ChatTemplate.load(tmp_path)
    assert template is not None and template.render(HELLO) == "file"
    other = tmp_path / "other.jinja"
    other.write_text("other")
    template = ChatTemplate.load(tmp_path, other)
    assert template is not None and template.render(HELLO) == "other"
    with pytest.raises(RooftopError, match="chat template"):
        ChatTemplate.load(tmp_path, tmp_path / "absent")


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Texts:
    folder = tmp_path_factory.mktemp("texts")
    tokenizer = serving_echo.tokenizer()
    tokenizer.save(folder)
    assert tokenizer.eos is not None
    return Texts.load(folder, vocab=tokenizer.vocab + 10, ends=(tokenizer.eos,))


def _generate(texts: Texts, grammar: Any, random: np.random.Generator, most: int = 200) -> str:
    """A text of random tokens that the grammar allows, the end as soon as it is."""
    ids: list[int] = []
    for _ in range(most):
        mask = grammar.mask()
        allowed = [token for token in range(texts.vocab) if mask[token // 32] >> np.uint32(token % 32) & 1]
        assert allowed
        ends = [token for token in allowed if token in texts.ends]
        token = ends[0] if ends else int(random.choice(allowed))
        grammar.accept(token)
        if ends:
            return texts.vocabulary.decode(ids)
        ids.append(token)
    raise AssertionError("no end")


@pytest.mark.parametrize("seed", range(5))
def test_constrained_texts_are_of_their_schema(texts: Texts, seed: int) -> None:
    schema = {
        "type": "object",
        "properties": {
            "kind": {"enum": ["a", "b"]},
            "size": {"type": "integer", "minimum": 1, "maximum": 99},
            "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
        },
        "required": ["kind", "size", "tags"],
        "additionalProperties": False,
    }
    random = np.random.default_rng(seed)
    grammar = texts.grammar(JsonSchemaFormat(json_schema=NamedSchema(schema=schema)), None)
    assert grammar is not None
    matcher = texts.grammars.compiled(grammar)
    other = matcher.copy()
    jsonschema.validate(json.loads(_generate(texts, matcher, random)), schema)
    jsonschema.validate(json.loads(_generate(texts, other, random)), schema)
    text = _generate(texts, texts.grammars.compiled(regex_grammar("(foo|bar)-[0-9]{3}")), random)
    assert text[:4] in ("foo-", "bar-") and len(text) == 7


def test_constraints_that_cannot_be_kept_are_refused(texts: Texts) -> None:
    for grammar in (json_grammar({"type": "strange"}), regex_grammar("(a")):
        with pytest.raises(Unkeepable):
            texts.grammars.compiled(grammar)
    with pytest.raises(RooftopError, match="end its text"):
        Grammars(definition=texts.tokenizer.definition, vocab=texts.vocab, ends=())
    matcher = texts.grammars.compiled(regex_grammar("ab"))
    matcher.accept(int(texts.tokenizer.encode("z")[0]))
    assert matcher.failed is not None
    assert [token for token in range(texts.vocab) if matcher.mask()[token // 32] >> token % 32 & 1] == list(texts.ends)


def test_special_tokens_in_prompts(texts: Texts) -> None:
    turn, end = texts.vocab - 12, texts.vocab - 11
    assert texts.prompt("a<|turn|>", longest=99)[-1] == turn
    ids = texts.chat(
        [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
        None,
        None,
        longest=99,
    )
    assert texts.tokenizer.decode(ids) == "user\na\nbassistant\n"
    assert ids[0] == texts.tokenizer.bos and ids[1] == turn and end in ids


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
PLAUSIBLE = st.sampled_from(
    [
        0, 1, 2, 0.5, 1.0, 128, 129, -1, -3, True, False, None, 2**31, 21, "x", "", "auto", "none",
        [], ["x"], [1], [1.0], [[1, 2], [3]], [""],
        {}, {"include_usage": True}, {"include_usage": 1}, {"50": 3}, {"a": 1}, {"5": 101},
        {"type": "text"}, {"type": "json_object"}, {"type": "x"}, {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"schema": {}}},
        [{"role": "user", "content": "a"}], [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
        [{"role": "x"}], [{"content": "a"}],
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}],
    ]
)  # fmt: skip


#: Of any model.
PUBLISHED = document()


@pytest.mark.parametrize("kind", [CompletionRequest, ChatRequest])
@given(data=st.data())
def test_what_is_published_is_what_is_accepted(
    kind: type[CompletionRequest] | type[ChatRequest], data: st.DataObject
) -> None:
    """Against a validator that nobody here wrote."""
    published, name = PUBLISHED, kind.__name__
    names = [*published["components"]["schemas"][name]["properties"], "strange"]
    base = (
        {"model": "m", "prompt": "p"} if name == "CompletionRequest" else {"model": "m", "messages": [{"role": "user"}]}
    )
    changes = data.draw(st.dictionaries(st.sampled_from(names), PLAUSIBLE | JSON, max_size=3))
    request = base | changes
    schema = {"$ref": f"#/components/schemas/{name}", "components": published["components"]}
    valid = jsonschema.Draft202012Validator(schema).is_valid(request)
    try:
        body = json.dumps(request).encode()
        read = read_body(body, ChatRequest) if kind is ChatRequest else read_body(body, CompletionRequest)
    except RooftopError as error:
        assert not valid, f"{request}: {error}"
        assert "\n" not in str(error) and len(str(error)) < 1200
    else:
        assert valid, request
        fields = {field for field in read.__struct_fields__ if getattr(read, field) is not None}
        assert fields == {key for key, value in request.items() if value is not None}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "body: .*JSON"),
        (b"\xff", "body: .*UTF-8"),
        (b"[1]", "body: "),
        (b'{"model": NaN}', "NaN"),
        (b"[" * 100_000, "body: "),
        (b'{"model": "m", "prompt": "\\ud800"}', "surrogate"),
        (b'{"model": "m"}', "prompt: got nothing"),
        (b'{"model": "m", "prompt": [1, 2, "x"]}', "prompt"),
        (b'{"model": "m", "prompt": [1, -2]}', r"prompt\[1\]: got -2"),
        (b'{"model": "m", "prompt": "p", "max_tokens": 1e999}', "max_tokens"),
        (b'{"model": "m", "prompt": "p", "max_token": 1}', "did you mean max_tokens"),
    ],
)
def test_malformed_requests_are_one_line(body: bytes, message: str) -> None:
    with pytest.raises(RooftopError, match=message) as error:
        read_body(body, CompletionRequest)
    assert "\n" not in str(error.value) and len(str(error.value)) < 1000


def test_requests_that_do_not_fit_are_refused(texts: Texts) -> None:
    def request(**fields: Any) -> Any:
        body = json.dumps({"model": "m", "prompt": "a"} | fields).encode()
        return prepare(read_request(body, chat=False), body, texts, 64)

    assert request(n=2, seed=5).samplings[1].seed == 6
    assert request(max_tokens=63).samplings[0].max_tokens == 63
    for fields, message in (
        ({"max_tokens": 64}, "max_tokens: got 64; accepted: at most 63"),
        ({"prompt": [1] * 64}, "prompt: got '64 tokens'"),
        ({"prompt": [texts.vocab]}, "token ids below"),
        ({"prompt": ["a", "b"], "n": 65}, "n: got 65"),
        ({"echo": True, "logprobs": 1}, "echo"),
        ({"stream_options": {}}, "stream_options"),
    ):
        with pytest.raises(RooftopError, match=message):
            request(**fields)
    chat = json.dumps({"model": "m", "messages": [{"role": "tool", "content": "x"}]}).encode()
    with pytest.raises(RooftopError, match="no tools"):
        prepare(read_request(chat, chat=True), chat, texts, 64)


CHATS = json.loads((Path(__file__).parents[1] / "oracles" / "chats.json").read_text(encoding="utf-8"))


@pytest.mark.oracle
@pytest.mark.parametrize("chat", CHATS["made"], ids=lambda chat: f"{chat['template']}, {chat['case']}")
def test_chats_are_rendered_and_encoded_as_by_transformers(chat: dict[str, Any]) -> None:
    tokenizer, case = serving_echo.tokenizer(), CHATS["cases"][chat["case"]]
    template = ChatTemplate(
        templates={"default": CHATS["templates"][chat["template"]]},
        tokens={"bos_token": "<|endoftext|>", "eos_token": "<|end|>"},
    )
    assert template.render(case["messages"], tools=case.get("tools")) == chat["text"]
    texts = Texts(tokenizer=tokenizer, template=template, vocab=tokenizer.vocab, ends=())
    # OpenAI's messages carry the arguments of tool calls as text.
    messages = json.loads(json.dumps(case["messages"]))
    for call in [call for message in messages for call in message.get("tool_calls") or ()]:
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    assert list(texts.chat(messages, case.get("tools"), None, longest=9999)) == chat["ids"]
