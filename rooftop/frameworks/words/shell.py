"""Arguments that a shell script starts a program with: variables, arrays and defaults are put in; nothing is run."""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Callable, Mapping

from rooftop.core.errors import RooftopError

_ASSIGNMENT = re.compile(r"^\s*(?:export\s+|local\s+|declare\s+(?:-\w+\s+)?)?([A-Za-z_]\w*)(\+?)=(.*)$", re.DOTALL)
_VARIABLE = re.compile(r"\$\(\(([^()]*)\)\)|\$\{(\w+)(?:\[[@*]\])?(?::?[-=]([^{}]*))?\}|\$([A-Za-z_]\w*)", re.DOTALL)
_QUOTED_ARRAY = re.compile(r'"(\$\{[A-Za-z_]\w*\[[@*]\]\})"')
#: Arithmetic of a shell: division is that of whole numbers.
_OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}
#: Names within names: a variable's value may have variables.
_MOST_ROUNDS = 20


def script_arguments(text: str, *programs: str) -> list[str]:
    """Arguments after the first word of a script that ends in one of ``programs``; all words, if none does.

    Variables that the script sets are put in, and the defaults of ``${NAME:-default}``. A variable that it does not
    set stays as it is written. Raises RooftopError on quotes or arrays that do not end.
    """
    lines = _lines(text)
    variables, commands = dict[str, str](), list[str]()
    for line in (part for whole in lines for part in _commands(whole)):
        match = _ASSIGNMENT.match(line)
        if match is None or _is_command(match[3]):
            commands.append(line)
            continue
        name, adds, value = match.groups()
        value = _expanded(_unquoted_array(value.strip()), variables)
        variables[name] = f"{variables.get(name, '')} {value}".strip() if adds else value
    for line in commands:
        words = _split(_expanded(line, variables))
        for index, word in enumerate(words):
            if word.endswith(programs):
                return words[index + 1 :]
    return [word for line in commands for word in _split(_expanded(line, variables))]


def _is_command(value: str) -> bool:
    """True if an assignment stands in front of a command on its line: NAME=value torchrun ..."""
    return not value.strip().startswith(("(", '"', "'")) and bool(re.match(r"\S+\s+\S", value.strip()))


def _lines(text: str) -> list[str]:
    """Lines of commands: continued ones joined, comments gone, arrays and quotes over several lines in one."""
    joined = re.sub(r"\\\r?\n", " ", text)
    lines, part = list[str](), ""
    for line in joined.splitlines():
        part = f"{part}\n{line}" if part else _without_comment(line)
        if part.count("(") > part.count(")") or len(re.findall(r'(?<!\\)"', part)) % 2:
            part = "\n".join(map(_without_comment, part.split("\n")))
            continue
        if part.strip():
            lines.append(part)
        part = ""
    if part.strip():
        raise RooftopError("from", part.strip().split("\n")[0], "a script whose quotes and arrays end")
    return lines


def _commands(line: str) -> list[str]:
    """Commands of a line, which semicolons divide outside of quotes and arrays."""
    return [part for part in re.findall(r"""(?:"[^"]*"|'[^']*'|\([^()]*\)|[^;"'(]|[("'])+""", line) if part.strip()]


def _without_comment(line: str) -> str:
    return re.sub(r"(^|\s)#.*$", "", line)


def _unquoted_array(value: str) -> str:
    """The words of an array, or a value without its quotes."""
    if value.startswith("(") and value.endswith(")"):
        return " ".join(value[1:-1].split("\n"))
    if len(value) > 1 and value[0] == value[-1] and value[0] in "\"'":
        return value[1:-1]
    return value


def _expanded(line: str, variables: Mapping[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        formula, braced, default, plain = match.groups()
        if formula is not None:
            return _evaluated(formula, variables)
        return variables.get(braced or plain, match[0] if default is None else default)

    for _ in range(_MOST_ROUNDS):
        # A quoted array is its words.
        expanded = _VARIABLE.sub(value, _QUOTED_ARRAY.sub(r"\1", line))
        if expanded == line:
            break
        line = expanded
    return line


def _evaluated(formula: str, variables: Mapping[str, str]) -> str:
    """The value of a formula of whole numbers and variables; the text itself if a variable is not known."""
    plain = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", lambda match: variables.get(match[1], match[1]), formula)
    try:
        return str(_whole(ast.parse(plain.strip(), mode="eval").body))
    except (SyntaxError, ValueError, ZeroDivisionError):
        return f"$(({formula}))"


def _whole(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_whole(node.left), _whole(node.right))
    raise ValueError(ast.dump(node))


def _split(line: str) -> list[str]:
    try:
        return shlex.split(line, comments=False)
    except ValueError as error:
        raise RooftopError("from", line.strip()[:60], f"a command that a shell can read ({error})") from None
