"""The fingerprint of a scheduled module: equal for modules that do the same, however they are named."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable

#: Tables of files, functions and stack frames, which have no part in what is executed.
_TABLES = re.compile(r"^(FileNames|FunctionNames|FileLocations|StackFrames)\n(?:.+\n)*", re.MULTILINE)
_NAME = re.compile(r"%[\w.\-]+")
_CHANNEL = re.compile(r"channel_id=(\d+)")
_METADATA = "metadata={"


def fingerprint(text: str) -> str:
    """SHA-256, in hexadecimal, of a module's text without metadata, with names and channels numbered as they appear.

    Two compilations of one program with equal fingerprints execute the same instructions in the same order.
    """
    plain = re.sub(r"\n+", "\n", _TABLES.sub("", without_metadata(text)))
    header, line, body = plain.partition("\n")
    plain = re.sub(r"^HloModule [^,\s]+", "HloModule", header) + line + body
    named = _NAME.sub(_numbered("%"), plain)
    return hashlib.sha256(_CHANNEL.sub(_numbered("channel_id="), named).encode()).hexdigest()


def without_metadata(text: str) -> str:
    """The text without ``metadata={...}`` of instructions; braces in quoted names count for nothing."""
    parts, end = list[str](), 0
    while (start := text.find(_METADATA, end)) >= 0:
        parts.append(text[end:start].removesuffix(", "))
        end = _closing(text, start + len(_METADATA))
    return "".join((*parts, text[end:]))


def _closing(text: str, at: int) -> int:
    """The index after the brace that closes what is open at ``at``."""
    depth, quoted = 1, False
    while depth and at < len(text):
        character = text[at]
        if quoted and character == "\\":
            at += 1
        elif character == '"':
            quoted = not quoted
        elif not quoted:
            depth += (character == "{") - (character == "}")
        at += 1
    return at


def _numbered(prefix: str) -> Callable[[re.Match[str]], str]:
    """A replacement of names by the order of their first appearance."""
    numbers: dict[str, int] = {}
    return lambda match: f"{prefix}{numbers.setdefault(match[0], len(numbers))}"
