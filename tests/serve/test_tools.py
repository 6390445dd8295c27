"""Calls of tools as models write them: each form, however it is cut, and what is no call."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import jsonschema
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from rooftop.core.errors import RooftopError
from rooftop.serve.api.choices import AnswerChoice, Vocabulary
from rooftop.serve.api.grammars import Grammars, json_grammar
from rooftop.serve.api.schemas import ChatRequest
from rooftop.serve.api.texts import ChatTemplate, for_template
from rooftop.serve.api.tools import Calling, CallReader, calling
from rooftop.serve.engine.requests import Token
from tests.support import serving_echo

F = ("f", '{"a": 1}')
#: DeepSeek's special tokens, with the wide bars and the marks for blanks that its tokenizers have.
BEGIN, CALL, SEP, END_CALL, END = (
    f"<\uff5ctool\u2581{word}\uff5c>"
    for word in ("calls\u2581begin", "call\u2581begin", "sep", "call\u2581end", "calls\u2581end")
)
FENCED = f'{CALL}function{SEP}f\n```json\n{{"a": 1}}\n```{END_CALL}'
BARE = f'{CALL}g{SEP}{{"b": "```"}}{END_CALL}'
#: DeepSeek V3.2's tags.
D = "\uff5cDSML\uff5c"
CALLS, CALLS_END = f"<{D}function_calls>\n", f"</{D}function_calls>"


def tagged(name: str, **arguments: tuple[str, str]) -> str:
    """A call in those tags; of each argument, whether it is a text, and its value."""
    inside = "".join(
        f'<{D}parameter name="{key}" string="{text}">{value}</{D}parameter>\n'
        for key, (text, value) in arguments.items()
    )
    return f'<{D}invoke name="{name}">\n{inside}</{D}invoke>\n'


QUOTED = tagged("g", b=("true", 'say "<hi>" \n'), c=("false", "[{}, 2]"), d=("true", "5"))
#: Of each form: what is written, the content that is left, and the calls.
WRITTEN: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "", [F]),
    ("hermes", 'So.\n\n<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>\n' * 2, "So.\nSo.", [F, F]),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', "", [F]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [F]),
    ("hermes", '<tool_call>{"name": "g", "arguments": {"b": "}\\"{", "c": [{}]}}', "",
     [("g", '{"b": "}\\"{", "c": [{}]}')]),
    ("hermes", "a < b, <tool_cal is none ", "a < b, <tool_cal is none ", []),
    ("hermes", "<tool_call>nonsense</tool_call>", "<tool_call>nonsense</tool_call>", []),
    ("hermes", '<tool_call>{"name": "f", "argum', '<tool_call>{"name": "f", "argum', []),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a"', "", [("f", '{"a"')]),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}, "id": "x"}, {"name": "g"}]', "", [F, ("g", "{}")]),
    ("mistral", 'So [1]. [TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g{}', "So [1].", [F, ("g", "{}")]),
    ("mistral", '[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{"a": 1}', "", [F]),
    ("deepseek", f"So.\n{BEGIN}{FENCED}\n{FENCED}{END}", "So.", [F, F]),
    ("deepseek", f"{BEGIN}{BARE}{BARE}{END} Done.", " Done.", [("g", '{"b": "```"}')] * 2),
    ("deepseek", f"{BEGIN}{CALL}function{SEP}{{}}{END_CALL}{END}", "", [("function", "{}")]),
    ("deepseek", f"{BEGIN}{CALL}function{SEP}f\n```js", f"{BEGIN}{CALL}function{SEP}f\n```js", []),
    ("deepseek", f"{BEGIN}nothing{END} a < b", f"{BEGIN}nothing{END} a < b", []),
    ("deepseek", f"{BEGIN}{CALL}two words{SEP}{{}}", f"{BEGIN}{CALL}two words{SEP}{{}}", []),
    ("dsml", f'So.\n\n{CALLS}{tagged("f", a=("false", "1"))}{tagged("g")}{CALLS_END}', "So.", [F, ("g", "{}")]),
    ("dsml", f"{CALLS}{QUOTED}{CALLS_END}", "", [("g", '{"b": "say \\"<hi>\\" \\n", "c": [{}, 2], "d": "5"}')]),
    # What is said to be JSON and is none is a text.
    ("dsml", f'{CALLS}{tagged("g", b=("false", "north"))}{CALLS_END} Done.', " Done.", [("g", '{"b": "north"}')]),
    ("dsml", f'{CALLS}<{D}invoke name="f">nothing</{D}invoke>{CALLS_END}', "", [("f", "{}")]),
    ("dsml", f"{CALLS}nothing{CALLS_END}", f"{CALLS}nothing{CALLS_END}", []),
    ("dsml", f'{CALLS}<{D}invoke name="f', f'{CALLS}<{D}invoke name="f', []),
    ("dsml", f"a < b, <{D}function", f"a < b, <{D}function", []),
    ("llama", '{"name": "f", "parameters": {"a": 1}}', "", [F]),
    ("llama", '<|python_tag|>{"type": "function", "name": "f", "parameters": {"a": 1}}; {"name": "f"}', "",
     [F, ("f", "{}")]),
    ("llama", '{"name": "unknown", "parameters": {}}', '{"name": "unknown", "parameters": {}}', []),
    ("llama", '{"answer": [1, 2]} {"name": "f"}', '{"answer": [1, 2]} {"name": "f"}', []),
    ("llama", 'It is {"name": "f"}', 'It is {"name": "f"}', []),
    ("json", '[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]', "", [F, ("g", "{}")]),
]  # fmt: skip


def read(form: str, pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    reader = CallReader(Calling(form=form, names=frozenset(("f", "g"))))
    content, calls = "", list[tuple[str, str]]()
    for piece in pieces:
        more, parts = reader.push(piece)
        content += more
        for part in parts:
            if part.name is not None:
                assert part.index == len(calls) and part.id
                calls.append((part.name, ""))
            calls[part.index] = (calls[part.index][0], calls[part.index][1] + part.arguments)
    assert reader.calls == len(calls)
    return content + reader.flush(), calls


@pytest.mark.parametrize(("form", "text", "content", "calls"), WRITTEN)
@given(data=st.data())
def test_calls_do_not_depend_on_where_an_answer_is_cut(
    form: str, text: str, content: str, calls: list[tuple[str, str]], data: st.DataObject
) -> None:
    assert read(form, list(text)) == (content, calls)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=6)) | {0, len(text)})
    assert read(form, [text[first:last] for first, last in pairwise(cuts)]) == (content, calls)


@given(
    text=st.text('<tool_cal>{}"name:rgu[]TOLCAS;f1 \n', max_size=40),
    form=st.sampled_from(["hermes", "mistral", "llama", "deepseek", "dsml"]),
)
def test_text_that_calls_nothing_is_content(text: str, form: str) -> None:
    """Content comes from the text, in order. Without a call it lacks at most blanks and separators."""
    content, calls = read(form, list(text))
    letters = iter(text)
    assert [letter for letter in content if letter not in letters] == []
    if not calls:
        lost = str.maketrans("", "", " \t\r\n,;[]")
        assert content.translate(lost) == text.translate(lost)


def test_special_tokens_make_calls_and_are_not_shown() -> None:
    definition = json.loads(serving_echo.tokenizer().definition)
    marker = {"id": len(definition["model"]["vocab"]) + 9, "content": "[TOOL_CALLS]", "special": True}
    definition["added_tokens"].append(marker | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False))
    vocabulary = Vocabulary(json.dumps(definition))
    text = '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]<|turn|>'
    ids = Tokenizer.from_str(json.dumps(definition)).encode(text, add_special_tokens=False).ids
    assert len(ids) < len(text) - len("TOOL_CALLS")

    def pieces(how: Calling | None) -> tuple[str, str]:
        choice = AnswerChoice(vocabulary, (), logprobs=False, calling=how)
        deltas = [choice.push(Token(id=1, token=token)) for token in ids]
        deltas.append(choice.push(Token(id=1, token=0, finish="stop")))
        said = [piece for piece in deltas if piece is not None]
        parts = "".join((part.name or "") + part.arguments for piece in said for part in piece.calls)
        assert said[-1].finish == ("tool_calls" if parts else "stop")
        return "".join(piece.text for piece in said), parts

    assert pieces(Calling(form="mistral", names=frozenset("f"))) == ("", 'f{"a": 1}')
    assert pieces(None) == (text.removeprefix("[TOOL_CALLS]").removesuffix("<|turn|>"), "")


TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "parameters": {
        "type": "object", "properties": {"p": {"$ref": "#/$defs/P"}}, "required": ["p"], "additionalProperties": False,
        "$defs": {"P": {"enum": [name * 2]}}}}}
    for name in "fg"
]  # fmt: skip


def chat(**fields: Any) -> ChatRequest:
    """A request with these fields."""
    return msgspec.convert({"model": "m", "messages": [{"role": "user"}], **fields}, ChatRequest)


@pytest.mark.parametrize(
    ("fields", "form", "accepted"),
    [
        ({"tool_choice": "none"}, None, []),
        ({"tools": []}, None, []),
        ({}, "hermes", []),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, "json", ["g"]),
        ({"tool_choice": "required"}, "json", ["f", "g"]),
    ],
)
def test_what_is_asked_for_says_the_form_and_the_schema(
    fields: dict[str, Any], form: str | None, accepted: list[str]
) -> None:
    """Definitions of one tool stay its own."""
    how = calling(chat(**{"tools": TOOLS, **fields}), "in <tool_call> tags")
    assert (None if how is None else how.form) == form
    if not accepted:
        return
    assert how is not None and how.schema is not None
    for name in "fg":
        for value in "fg":
            call = {"name": name, "arguments": {"p": value * 2}}
            valid = name == value and name in accepted
            assert jsonschema.Draft202012Validator(how.schema).is_valid(call) == valid


@pytest.mark.parametrize("several", [False, True])
def test_constraints_make_calls(several: bool) -> None:
    tokenizer = serving_echo.tokenizer()
    assert tokenizer.eos is not None
    grammars = Grammars(definition=tokenizer.definition, vocab=tokenizer.vocab, ends=(tokenizer.eos,))
    how = calling(chat(tools=TOOLS, tool_choice="required", parallel_tool_calls=several), None)
    assert how is not None and how.schema is not None
    matcher, ids = grammars.compiled(json_grammar(how.schema, "tools")), list[int]()
    while (mask := matcher.mask()) is not None and len(ids) < 200:
        allowed = [token for token in range(tokenizer.vocab) if mask[token // 32] >> (token % 32) & 1]
        token = tokenizer.eos if tokenizer.eos in allowed else max(allowed)
        if token == tokenizer.eos:
            break
        matcher.accept(token)
        ids.append(token)
    calls = json.loads(Vocabulary(tokenizer.definition).decode(ids))
    jsonschema.validate(calls, how.schema)
    assert isinstance(calls, list) == several
    assert read("json", [json.dumps(calls)])[1]


def test_templates_tell_the_form() -> None:
    for text, form in (
        ("<tool_call></tool_call>", "hermes"),
        ("[TOOL_CALLS]", "mistral"),
        ("<|python_tag|>", "llama"),
        ("{{ '" + BEGIN + "' }}", "deepseek"),
        ("{%- set dsml_token = '" + D + "' -%}", "dsml"),
        ('{"name": function name, "parameters": dictionary of argument name and its value}', "llama"),
        ("x", None),
    ):
        how = calling(chat(tools=TOOLS), text)
        assert (None if how is None else how.form) == form
    with pytest.raises(RooftopError, match="did you mean"):
        calling(chat(tools=TOOLS, tool_choice={"type": "function", "function": {"name": "ff"}}), None)


#: What two generations of DeepSeek write for the calls of a message: the strings of a template, and of its fields.
TEMPLATES = {
    "fenced": CALL + "' + tool['type'] + '" + SEP + "' + tool['function']['name'] + '\\n```json\\n' + "
    "tool['function']['arguments'] + '\\n```" + END_CALL,
    "bare": CALL + "' + tool['function']['name'] + '" + SEP + "' + tool['function']['arguments'] + '" + END_CALL,
}


@pytest.mark.parametrize("form", TEMPLATES)
def test_what_a_template_writes_of_a_call_is_read_as_it(form: str) -> None:
    """The same way there and back: what a client is given, it sends with the next message."""
    text = (
        "{% for message in messages %}{{ message.content or '' }}{% if message.tool_calls %}{{ '" + BEGIN + "' }}"
        "{% for tool in message.tool_calls %}{{ '" + TEMPLATES[form] + "' }}{% endfor %}{{ '" + END + "' }}"
        "{% endif %}{% endfor %}"
    )
    calls = [("f", '{"a": [1, "\u00e9"]}'), ("g", "{}")]
    tool_calls = [
        {"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}} for name, arguments in calls
    ]
    template = ChatTemplate(templates={"default": text}, tokens={})
    shown = for_template({"role": "assistant", "content": None, "tool_calls": tool_calls})
    written = template.render([shown], tools=TOOLS)
    how = calling(chat(tools=TOOLS), template.text(with_tools=True))
    assert how is not None
    assert read(how.form, list(written)) == ("", calls)
