"""Files that rooftop wrote, shown: plans, compilations, explained runs. Each becomes a document like an explorer's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rooftop.core.errors import Infeasible, RooftopError
from rooftop.present.browser import Widths, to_data
from rooftop.present.document import Document
from rooftop.present.documents import KINDS, document

_ACCEPTED = "a plan, a compilation, a simulation or an explained run: what rooftop wrote with -o or --json"
#: Rows of the tables of an explained run.
_TOP = 20


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A file, what it is, and what it says; ``pending`` says what is still being done to know the rest."""

    name: str
    what: str
    answer: Document
    pending: str = ""

    def to_json(self, widths: Widths | None = None) -> dict[str, Any]:
        """Plain JSON values, with charts drawn at some widths."""
        return {"name": self.name, "what": self.what, "pending": self.pending} | to_data(self.answer, widths)


def opened(path: Path) -> Opened:
    """Document of a file; of a folder or trace, the one of ``rooftop explain``. Raises RooftopError."""
    if path.is_dir() or path.name.endswith(".xplane.pb"):
        # Traces are read with JAX's own reader, which takes seconds to start.
        try:
            from rooftop.explain.measured.report import explain
        except ImportError as absent:
            raise RooftopError("file", path.name, f"JAX to read it with (no {absent.name} here)") from None
        return opened_json(path.name, explain(path).to_json(top=_TOP))
    try:
        body = path.read_bytes()
    except OSError as error:
        raise RooftopError("file", path.name, f"a file that can be read ({error.strerror})") from None
    return opened_text(path.name, body)


def opened_text(name: str, body: bytes) -> Opened:
    """Document of a file's content. Raises RooftopError on files that rooftop did not write."""
    try:
        data = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RooftopError("file", name, f"{_ACCEPTED} (not JSON: {str(error)[:120]})") from None
    return opened_json(name, data)


def opened_json(name: str, data: Any) -> Opened:
    """Document of JSON values. Raises RooftopError on values that rooftop did not write."""
    kind = data.get("kind") if isinstance(data, Mapping) else None
    if not isinstance(kind, str) or kind not in KINDS:
        raise RooftopError("file", name, f"{_ACCEPTED}; its kind one of {', '.join(KINDS)}")
    what, _ = KINDS[kind]
    try:
        answer = document(data)
        json.dumps(to_data(answer), allow_nan=False)
    except Infeasible as no:
        raise RooftopError("file", name, str(no)) from None
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError) as error:
        accepted = f"{what} as rooftop writes it ({type(error).__name__}: {str(error)[:120]})"
        raise RooftopError("file", name, accepted) from None
    return Opened(name=name, what=what, answer=answer)
