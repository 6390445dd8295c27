"""Controls of an explorer: what the page builds its form from, and how a query becomes a validated state.

A state is text all through, as it stands in the address: the same query works with curl. The text of a slider is a
quantity ('4096', '4Ki').
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal

from rooftop.core.errors import RooftopError, unknown
from rooftop.core.quantities import parse_count
from rooftop.present.document import Document

Kind = Literal["slider", "select", "text", "area"]
#: The longest text that a control takes.
LONGEST = 20_000


@dataclass(frozen=True, kw_only=True)
class Control:
    """One control.

    A slider goes from ``low`` to ``high``: by ``step`` on a linear scale; on a logarithmic one by powers of two and,
    with ``halves``, the numbers half-way between them. A select has ``options``, a text ``suggestions``. ``fields``
    are the fields of errors that are shown beside it, in addition to its own name.
    """

    name: str
    label: str
    kind: Kind
    default: str
    low: int = 1
    high: int = 1
    scale: Literal["linear", "log"] = "linear"
    step: int = 1
    halves: bool = False
    options: tuple[str, ...] = ()
    suggestions: tuple[str, ...] = ()
    unit: str = ""
    help: str = ""
    fields: tuple[str, ...] = ()

    @property
    def stops(self) -> tuple[int, ...]:
        """The values that a slider stops at."""
        if self.kind != "slider":
            return ()
        if self.scale == "linear":
            return tuple(range(self.low, self.high + 1, self.step))
        powers = [2**power for power in range(self.high.bit_length())]
        between = [3 * power // 2 for power in powers if self.halves and power > 1]
        return tuple(sorted({self.low, self.high, *(n for n in chain(powers, between) if self.low <= n <= self.high)}))

    def check(self, text: str) -> str:
        """The text, if the control takes it. Raises RooftopError naming the control."""
        if len(text) > LONGEST:
            raise RooftopError(self.name, f"{len(text)} characters", f"{LONGEST} at most")
        if self.kind == "slider":
            value = parse_count(text, self.name)
            if not self.low <= value <= self.high:
                raise RooftopError(self.name, text, f"{self.low} to {self.high}")
        if self.kind == "select" and text not in self.options:
            raise unknown(self.name, text, self.options)
        return text

    def to_json(self) -> dict[str, Any]:
        """The declaration, as the page reads it."""
        return {
            "name": self.name,
            "label": self.label,
            "kind": self.kind,
            "default": self.default,
            "stops": list(self.stops),
            "options": list(self.options),
            "suggestions": list(self.suggestions),
            "unit": self.unit,
            "help": self.help,
            "fields": [self.name, *self.fields],
        }


@dataclass(frozen=True)
class State:
    """The values of an explorer's controls, all there and each within its range."""

    values: Mapping[str, str] = field(default_factory=dict)

    def __getitem__(self, name: str) -> str:
        return self.values[name]

    def count(self, name: str) -> int:
        """The whole number that a slider stands at."""
        return parse_count(self.values[name], name)


def read_state(controls: Sequence[Control], query: Iterable[tuple[str, str]]) -> State:
    """The state that a query describes: what it does not name has its default.

    Raises RooftopError for a name that is no control, one that is given twice, and a value that is not accepted.
    """
    known = {control.name: control for control in controls}
    raw: dict[str, str] = {}
    for name, text in query:
        if name not in known:
            raise unknown("control", name, known)
        if name in raw:
            raise RooftopError(name, f"{raw[name]} and {text}", "one value")
        raw[name] = known[name].check(text)
    return State({name: raw.get(name, control.default) for name, control in known.items()})


def slider(
    name: str,
    label: str,
    default: str,
    low: int,
    high: int,
    *,
    linear: bool = False,
    halves: bool = False,
    unit: str = "",
    help: str = "",
    fields: tuple[str, ...] = (),
) -> Control:
    """A slider over whole numbers, logarithmic unless told otherwise."""
    return Control(
        name=name,
        label=label,
        kind="slider",
        default=default,
        low=low,
        high=high,
        scale="linear" if linear else "log",
        halves=halves,
        unit=unit,
        help=help,
        fields=fields,
    )


def select(
    name: str, label: str, options: Iterable[str], default: str, *, help: str = "", fields: tuple[str, ...] = ()
) -> Control:
    """One of a few names."""
    return Control(
        name=name, label=label, kind="select", default=default, options=tuple(options), help=help, fields=fields
    )


def text(
    name: str,
    label: str,
    default: str,
    *,
    suggestions: Iterable[str] = (),
    help: str = "",
    fields: tuple[str, ...] = (),
    area: bool = False,
) -> Control:
    """A line of text (or an ``area`` of several)."""
    return Control(
        name=name,
        label=label,
        kind="area" if area else "text",
        default=default,
        suggestions=tuple(suggestions),
        help=help,
        fields=fields,
    )


@dataclass(frozen=True, kw_only=True)
class Explorer:
    """One page: its controls, and the function from their state to a document. ``chapter`` is the book's."""

    name: str
    title: str
    summary: str
    chapter: str
    controls: tuple[Control, ...]
    answer: Callable[[State], Document]

    def to_json(self) -> dict[str, Any]:
        """The declaration that the page builds its form from."""
        return {
            "name": self.name,
            "title": self.title,
            "summary": self.summary,
            "chapter": self.chapter,
            "controls": [control.to_json() for control in self.controls],
        }
