"""Calls of tools: the form in which a model writes them, and a reader of calls in a streamed answer.

Forms, by what a chat template spells out:

- ``hermes`` (Hermes, Qwen): ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, text around it;
- ``mistral``: ``[TOOL_CALLS]`` and a list of such objects, or ``name[ARGS]{...}``;
- ``deepseek`` (V3, R1, V3.1): special tokens around all calls and around each: ``function``, a separator, the name and
  a fence of Markdown with arguments in it; or the name, the separator and the arguments;
- ``dsml`` (DeepSeek V3.2): see ``rooftop.serve.api.tools``;
- ``llama`` (Llama 3): an answer that is such an object, with ``parameters``, perhaps after ``<|python_tag|>``;
- ``json``: the answer is one such object, or a list: the constraint on an answer that must call a tool.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from rooftop.core.errors import RooftopError, unknown
from rooftop.serve.api.schemas import ChatRequest, NamedTool, ToolFunction

#: Begins all tags, after their bracket.
TOKEN = "\uff5cDSML\uff5c"
OPENS, CLOSES = f"<{TOKEN}function_calls>", f"</{TOKEN}function_calls>"
#: A call up to its arguments, and its beginning.
CALL, BEGINS = re.compile(rf'<{TOKEN}invoke\s+name="([^"]+)"\s*>'), f"<{TOKEN}invoke"
_ARGUMENT = re.compile(
    rf'\s*<{TOKEN}parameter\s+name="([^"]*)"\s+string="(true|false)"\s*>(.*?)</{TOKEN}parameter>', re.DOTALL
)
_END = re.compile(rf".*?</{TOKEN}invoke>", re.DOTALL)


def argument(text: str, *, first: bool) -> tuple[str, int, bool] | None:
    """Return the next part of a call's arguments as JSON of an object; None if it is incomplete.

    The tuple also has the number of characters of ``text`` that were read, and True at the last argument. ``first``: no
    part has come before.
    """
    result = _ARGUMENT.match(text)
    if result is not None:
        name, value = json.dumps(result[1], ensure_ascii=False), result[3]
        if result[2] == "true" or not _is_json(value):
            value = json.dumps(value, ensure_ascii=False)
        return f"{'{' if first else ', '}{name}: {value.strip()}", result.end(), False
    end = _END.match(text)
    return None if end is None else ("{}" if first else "}", end.end(), True)


def _is_json(value: str) -> bool:
    try:
        json.loads(value)
    except (ValueError, RecursionError):
        return False
    return True


#: Markers that begin calls.
_OPENS = {
    "hermes": "<tool_call>",
    "mistral": "[TOOL_CALLS]",
    "dsml": OPENS,
    "deepseek": "<\uff5ctool\u2581calls\u2581begin\uff5c>",
    "llama": "<|python_tag|>",
    "json": "",
}
#: Strings in a template of each form: the same markers, or Llama 3.2's instruction for a call.
_SIGNS: dict[str, tuple[str, ...]] = {form: (opens,) for form, opens in _OPENS.items() if opens}
_SIGNS["llama"] += ('"parameters": dictionary',)
_SIGNS["dsml"] = (TOKEN,)
#: Markers that end calls.
_CLOSES = {"hermes": "</tool_call>", "dsml": CLOSES, "deepseek": "<\uff5ctool\u2581calls\u2581end\uff5c>"}
#: DeepSeek's tokens of one call: before it, between its kind and name or its name and arguments, and after it.
_CALL, _SEP, _ENDS = (f"<\uff5ctool\u2581{word}\uff5c>" for word in ("call\u2581begin", "sep", "call\u2581end"))
#: Markers that may stand between calls, next to blanks.
_BETWEEN = {"deepseek": ("```", _ENDS)}
#: Special tokens of calls: they are parsed, and never shown.
MARKERS: frozenset[str] = frozenset(
    (*filter(None, _OPENS.values()), *_CLOSES.values(), "[ARGS]", "[CALL_ID]", _CALL, _SEP, _ENDS, TOKEN)
)
_HEAD = re.compile(r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_NAMED = re.compile(r"([\w.-]+)(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*(?=\{)")
_BEGINS_NAMED = re.compile(r"[\w.-]+(?:\[[A-Z_]*\]?\w*)*\s*")
#: One of DeepSeek's calls up to its arguments.
_FENCED = re.compile(rf"{_CALL}\s*(?:function\s*{_SEP}\s*([\w.-]+)\s*```(?:json)?|([\w.-]+)\s*{_SEP})\s*(?=\{{)")
_BLANKS = " \t\r\n,;"
_SEPARATORS = _BLANKS + "[]"
_LETTERS = string.ascii_letters + string.digits


@dataclass(frozen=True, kw_only=True)
class Calling:
    """Available tools by name, and the ``form`` in which an answer calls them.

    ``schema`` is one of JSON, if an answer must be a call.
    """

    form: str
    names: frozenset[str]
    schema: Mapping[str, Any] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class CallPart:
    """New part of call ``index``: with ``id`` and ``name`` it begins; ``arguments`` is a piece of JSON."""

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


def calling(request: ChatRequest, template: str | None) -> Calling | None:
    """Return how the answer to a chat request calls tools; None if it may not, or if the model's form is unknown.

    ``template`` is the text of the chat template. Raises RooftopError for a choice that cannot be.
    """
    choice = request.tool_choice or "auto"
    functions = {tool.function.name: tool.function for tool in request.tools or ()}
    if choice not in ("none", "auto") and not functions:
        raise RooftopError("tool_choice", msgspec.to_builtins(choice), "none or auto where there are no tools")
    if choice == "none" or not functions:
        return None
    if choice == "auto":
        form = next((form for form, signs in _SIGNS.items() if any(sign in (template or "") for sign in signs)), None)
        return None if form is None else Calling(form=form, names=frozenset(functions))
    if request.is_constrained:
        accepted = "none or auto next to response_format and other forms of the answer"
        raise RooftopError("tool_choice", msgspec.to_builtins(choice), accepted)
    if isinstance(choice, NamedTool):
        name = choice.function.name
        if name not in functions:
            raise unknown("tool_choice.function.name", name, functions)
        functions = {name: functions[name]}
    schema = _schema(list(functions.values()))
    if choice == "required" and request.parallel_tool_calls:
        several = {name: value for name, value in schema.items() if name != "$defs"}
        schema = {"type": "array", "items": several, "minItems": 1, "$defs": schema["$defs"]}
    return Calling(form="json", names=frozenset(functions), schema=schema)


def _schema(functions: Sequence[ToolFunction]) -> dict[str, Any]:
    """JSON that calls one of ``functions``."""
    calls, definitions = list[dict[str, Any]](), dict[str, Any]()
    for number, function in enumerate(functions):
        place = f"#/$defs/{number}"
        definitions[str(number)] = _moved(function.parameters or {"type": "object"}, place)
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": function.name}, "arguments": {"$ref": place}},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    return {"anyOf": calls, "$defs": definitions}


def _moved(schema: Any, place: str) -> Any:
    """A schema whose references to its root point to ``place``."""
    if isinstance(schema, list):
        return [_moved(item, place) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {name: _moved(value, place) for name, value in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = place + reference[1:]
    return moved


class CallReader:
    """Reads calls out of one answer: pieces of its text in, pieces of content and of calls out.

    ``calls`` counts the calls. Text that only looks like a call is content.
    """

    def __init__(self, calling: Calling) -> None:
        self.calls = 0
        self._calling, self._opens = calling, _OPENS[calling.form]
        self._markers = [self._opens, _CLOSES.get(calling.form, ""), *_BETWEEN.get(calling.form, ())]
        self._text = ""
        self._read = self._answer if calling.form in ("llama", "json") else self._outside
        #: Text that looked like the beginning of a call; it is content if there is no call.
        self._before = ""
        self._scan, self._scanned, self._first = _Scan(), 0, True
        self._content, self._parts = "", list[CallPart]()

    def push(self, text: str) -> tuple[str, tuple[CallPart, ...]]:
        """Add ``text`` and return the content and calls that it completes."""
        self._text += text
        self._content, self._parts = "", []
        while self._text and self._read():
            pass
        return self._content, tuple(self._parts)

    def flush(self) -> str:
        """Return the withheld content at the end of the answer."""
        none = self._read in (self._outside, self._answer, self._object) or bool(self._before)
        withheld, self._text = self._before + self._text if none else "", ""
        return withheld if withheld.strip() or not self.calls else ""

    # Each of these parses the beginning of the text, and returns True to continue parsing.

    def _answer(self) -> bool:
        """Parse the beginning of an answer that may be a call as a whole."""
        text = self._text.lstrip()
        if not text:
            return False
        self._read = (
            self._between if text[0] == "{" or (text[0] == "[" and self._calling.form == "json") else self._outside
        )
        return True

    def _outside(self) -> bool:
        if not self._opens:
            self._content, self._text = self._content + self._text, ""
            return False
        before, opens, after = self._text.partition(self._opens)
        if opens:
            shown = before.rstrip()
            self._content += shown
            self._before, self._text, self._read = before[len(shown) :] + opens, after, self._between
            return True
        # Blanks and the possible beginning of a call wait for the text after them.
        withheld = next(size for size in range(len(self._opens) - 1, -1, -1) if before.endswith(self._opens[:size]))
        shown = before[: len(before) - withheld].rstrip()
        self._content, self._text = self._content + shown, before[len(shown) :]
        return False

    def _between(self) -> bool:
        text = self._text.lstrip(_BLANKS)
        for marker in filter(None, self._markers):
            if text.startswith(marker):
                self._text = text.removeprefix(marker)
                self._read = self._outside if marker == _CLOSES.get(self._calling.form) else self._between
                return True
            if marker.startswith(text):
                return False
        text = text.lstrip(_SEPARATORS)
        if not text:
            return False
        if text[0] == "{":
            self._text, self._read, self._scan, self._scanned = text, self._object, _Scan(), 0
            return True
        if self._calling.form == "deepseek":
            if (named := _FENCED.match(text)) is None:
                # The brace of its arguments may be yet to come.
                begun = text.startswith(_CALL) or _CALL.startswith(text)
                return False if begun and "{" not in text else self._no_call()
            self._begin(named[1] or named[2])
            self._text, self._read, self._scan = text[named.end() :], self._arguments_alone, _Scan()
            return True
        if self._calling.form == "dsml":
            if (named := CALL.match(text)) is None:
                begun = text.startswith(BEGINS) or BEGINS.startswith(text)
                return False if begun and ">" not in text else self._no_call()
            self._begin(named[1])
            self._text, self._read, self._first = text[named.end() :], self._tagged, True
            return True
        if self._calling.form == "mistral" and (named := _NAMED.match(text)):
            self._begin(named[1])
            self._text, self._read, self._scan = text[named.end() :], self._arguments_alone, _Scan()
            return True
        if self._calling.form == "mistral" and _BEGINS_NAMED.fullmatch(text):
            return False
        return self._no_call()

    def _object(self) -> bool:
        head = _HEAD.match(self._text)
        if head is not None:
            name = _string(head[1])
            if name is None or not self._known(name):
                return self._no_call()
            self._begin(name)
            self._text, self._read, self._scan = self._text[head.end() :], self._arguments, _Scan()
            return True
        end = self._scan.end(self._text[self._scanned :])
        if end is None:
            self._scanned = len(self._text)
            return False
        end += self._scanned
        try:
            result = json.loads(self._text[:end])
        except (ValueError, RecursionError):
            return self._no_call()
        name, arguments = result.get("name"), result.get("arguments", result.get("parameters", {}))
        if not isinstance(name, str) or not self._known(name):
            return self._no_call()
        self._begin(name)
        self._argue(arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False))
        self._text, self._read = self._text[end:], self._between
        return True

    def _arguments(self) -> bool:
        """Parse arguments inside an object that continues after them."""
        if self._arguments_alone():
            # The object itself is open yet.
            self._read, self._scan = self._tail, _Scan(depth=1)
            return True
        return False

    def _arguments_alone(self) -> bool:
        end = self._scan.end(self._text)
        self._argue(self._text[:end])
        self._text = "" if end is None else self._text[end:]
        if end is None:
            return False
        self._read = self._between
        return True

    def _tagged(self) -> bool:
        """Parse arguments in tags of their own."""
        result = argument(self._text, first=self._first)
        if result is None:
            return False
        said, size, last = result
        self._argue(said)
        self._text, self._first = self._text[size:], False
        if last:
            self._read = self._between
        return True

    def _tail(self) -> bool:
        end = self._scan.end(self._text)
        self._text = "" if end is None else self._text[end:]
        if end is None:
            return False
        self._read = self._between
        return True

    def _no_call(self) -> bool:
        """Treat the text up to the next marker as content."""
        self._content += self._before
        self._before, self._read = "", self._outside
        if not self._opens or self._calling.form == "llama":
            self._content, self._text = self._content + self._text, ""
            self._opens = ""
        return True

    def _known(self, name: str) -> bool:
        """Return True if this is a call; if only its form says so, it must name an available tool."""
        return self._calling.form != "llama" or name in self._calling.names

    def _begin(self, name: str) -> None:
        length, prefix = (9, "") if self._calling.form == "mistral" else (24, "call_")
        call_id = prefix + "".join(secrets.choice(_LETTERS) for _ in range(length))
        self._parts.append(CallPart(index=self.calls, id=call_id, name=name))
        self.calls += 1
        self._before = ""

    def _argue(self, text: str) -> None:
        if text:
            self._parts.append(CallPart(index=self.calls - 1, arguments=text))


@dataclass
class _Scan:
    """Nesting depth of a text in JSON objects and lists."""

    depth: int = 0
    quoted: bool = False
    escaped: bool = False

    def end(self, text: str) -> int | None:
        """Index in ``text``, which continues the text read before, of the end of the outermost object, or None."""
        for at, character in enumerate(text):
            if self.escaped:
                self.escaped = False
            elif self.quoted:
                self.escaped, self.quoted = character == "\\", character != '"'
            elif character == '"':
                self.quoted = True
            elif character in "{[":
                self.depth += 1
            elif character in "}]":
                self.depth -= 1
                if self.depth <= 0:
                    return at + 1
        return None


def _string(quoted: str) -> str | None:
    try:
        return str(json.loads(quoted))
    except ValueError:
        return None
