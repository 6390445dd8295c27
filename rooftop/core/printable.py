"""Text that is shown as it is: names of files and models may have characters that a terminal obeys."""

from __future__ import annotations

import re

#: Control characters but for tab and line feed: C0 (with the escape that begins commands), delete, and C1.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")
#: Those that JSON does not escape itself.
_RAW_IN_JSON = re.compile("[\x7f-\x9f]")


def printable(text: str) -> str:
    """``text`` with each control character as the escape of its code in hexadecimal; tabs and line feeds stay."""
    return _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


def printable_json(text: str) -> str:
    """``text``, which is JSON, with the control characters escaped that JSON may have as they are."""
    return _RAW_IN_JSON.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
