"""DeepSeek V3.2's markup of calls, as its published encoding has it: a tag around all, one a call, one an argument.

An argument is a tag with its name and value. The value is a text as it stands (``string="true"``), or JSON.
"""

from __future__ import annotations

import json
import re

#: What all tags begin with, behind their bracket.
TOKEN = "\uff5cDSML\uff5c"
OPENS, CLOSES = f"<{TOKEN}function_calls>", f"</{TOKEN}function_calls>"
#: A call as far as its arguments, and what it begins with.
CALL, BEGINS = re.compile(rf'<{TOKEN}invoke\s+name="([^"]+)"\s*>'), f"<{TOKEN}invoke"
_ARGUMENT = re.compile(
    rf'\s*<{TOKEN}parameter\s+name="([^"]*)"\s+string="(true|false)"\s*>(.*?)</{TOKEN}parameter>', re.DOTALL
)
_END = re.compile(rf".*?</{TOKEN}invoke>", re.DOTALL)


def argument(text: str, *, first: bool) -> tuple[str, int, bool] | None:
    """What comes next of a call's arguments, as JSON of an object; None if it is not all there.

    With it how many characters of ``text`` say so, and whether it is the end. ``first``: none has come before.
    """
    found = _ARGUMENT.match(text)
    if found is not None:
        name, value = json.dumps(found[1], ensure_ascii=False), found[3]
        if found[2] == "true" or not _is_json(value):
            value = json.dumps(value, ensure_ascii=False)
        return f"{'{' if first else ', '}{name}: {value.strip()}", found.end(), False
    end = _END.match(text)
    return None if end is None else ("{}" if first else "}", end.end(), True)


def _is_json(value: str) -> bool:
    try:
        json.loads(value)
    except (ValueError, RecursionError):
        return False
    return True
