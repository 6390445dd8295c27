"""Controls of an explorer: what the page builds its form from, and how a query becomes a validated state.

A state is text, as in the address: the same query works with curl. The text of a slider is a
quantity ('4096', '4Ki').
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rooftop.core.errors import RooftopError, unknown
from rooftop.core.quantities import parse_count
from rooftop.core.records import Record
from rooftop.models.sizing import is_small
from rooftop.present.document import Document
from rooftop.requests.request import Request, Setting

#: Small models that a select of models offers.
_SMALL = ("llama:2M", "llama:100M", "mixtral:5M")
#: The longest text that a control takes.
LONGEST = 20_000


@dataclass(frozen=True, kw_only=True)
class Control(Record):
    """One control. A slider has the ``stops`` that it stops at, a select ``options``, a text ``suggestions``.

    ``fields`` are the fields of errors that are shown next to it, its own name among them. ``only`` (name, value) is
    the value of another control without which this one does nothing. A select of ``models`` also takes small ones of
    any size, such as llama:2M.
    """

    name: str
    label: str
    kind: Literal["slider", "select", "text", "area"]
    default: str
    stops: tuple[int, ...] = ()
    options: tuple[str, ...] = ()
    suggestions: tuple[str, ...] = ()
    unit: str = ""
    help: str = ""
    fields: tuple[str, ...] = ()
    only: tuple[str, str] | None = None
    models: bool = False

    def check(self, text: str) -> str:
        """The text, if the control takes it. Raises RooftopError naming the control."""
        if len(text) > LONGEST:
            raise RooftopError(self.name, f"{len(text)} characters", f"{LONGEST} at most")
        if self.kind == "slider" and not self.stops[0] <= parse_count(text, self.name) <= self.stops[-1]:
            raise RooftopError(self.name, text, f"{self.stops[0]} to {self.stops[-1]}")
        if self.kind == "select" and text not in self.options and not (self.models and is_small(text)):
            if not self.models:
                raise unknown(self.name, text, self.options)
            error = unknown(self.name, text, set(self.options) - set(_SMALL), listed_by="rooftop model")
            raise RooftopError(self.name, text, f"{error.accepted}; or a small one such as {_SMALL[0]}")
        return text


@dataclass(frozen=True)
class State:
    """The values of an explorer's controls, all there and each within its range."""

    values: Mapping[str, str] = field(default_factory=dict)

    def __getitem__(self, name: str) -> str:
        return self.values[name]

    def count(self, name: str) -> int:
        """The whole number of a slider."""
        return parse_count(self.values[name], name)


def read_state(controls: Sequence[Control], query: Iterable[tuple[str, str]]) -> State:
    """The state that a query describes. Controls that it does not name have their defaults.

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
    values = {name: raw.get(name, control.default) for name, control in known.items()}
    for name, text in raw.items():
        only = known[name].only
        if only is not None and values[only[0]] != only[1] and text != known[name].default:
            raise RooftopError(name, text, f"this with {known[only[0]].label.lower()} {only[1]}")
    return State(values)


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
    only: tuple[str, str] | None = None,
) -> Control:
    """A slider over whole numbers: by ones if ``linear``, else by powers of two.

    With ``halves`` it also stops at the numbers half-way between two powers.
    """
    return Control(
        name=name, label=label, kind="slider", default=default, stops=_stops(low, high, linear=linear, halves=halves),
        unit=unit, help=help, fields=(name, *fields), only=only,
    )  # fmt: skip


def _stops(low: int, high: int, *, linear: bool, halves: bool) -> tuple[int, ...]:
    if linear:
        return tuple(range(low, high + 1))
    powers = [2**power for power in range(high.bit_length())]
    between = [3 * power // 2 for power in powers if halves and power > 1]
    return tuple(sorted({low, high, *(stop for stop in (*powers, *between) if low <= stop <= high)}))


def select(
    name: str, label: str, options: Iterable[str], default: str, *, help: str = "", fields: tuple[str, ...] = ()
) -> Control:
    """One of a few names."""
    return Control(
        name=name, label=label, kind="select", default=default, options=tuple(options), help=help,
        fields=(name, *fields),
    )  # fmt: skip


def text(
    name: str, label: str, default: str, *, suggestions: Iterable[str] = (), help: str = "",
    fields: tuple[str, ...] = (),
) -> Control:  # fmt: skip
    """A line of text."""
    return Control(
        name=name, label=label, kind="text", default=default, suggestions=tuple(suggestions), help=help,
        fields=(name, *fields),
    )  # fmt: skip


@dataclass(frozen=True)
class FieldControls:
    """Controls of the fields of a verb's request, each selected by its name.

    Name, label and unit are the field's; so are its choices and its default, unless the page begins elsewhere. Its
    meaning stands below it if ``described``, or ``help`` in its place.
    """

    request: type[Request]

    def slider(
        self,
        name: str,
        low: int,
        high: int,
        default: str | None = None,
        *,
        halves: bool = False,
        described: bool = False,
        help: str = "",
        fields: tuple[str, ...] = (),
        only: tuple[str, str] | None = None,
    ) -> Control:
        """A slider over whole numbers, by powers of two."""
        stops = _stops(low, high, linear=False, halves=halves)
        return self._control(name, "slider", default, help, fields, described=described, stops=stops, only=only)

    def select(
        self,
        name: str,
        default: str | None = None,
        *,
        options: Iterable[str] = (),
        described: bool = False,
        fields: tuple[str, ...] = (),
    ) -> Control:
        """One of the field's names, or of some of them."""
        kind = self._setting(name).kind
        chosen = tuple(options) or tuple(kind.candidates(""))
        for option in chosen:
            kind.read(option, name)
        return self._control(name, "select", default, "", fields, described=described, options=chosen)

    def text(
        self,
        name: str,
        default: str | None = None,
        *,
        suggestions: Iterable[str] = (),
        area: bool = False,
        described: bool = False,
        help: str = "",
        fields: tuple[str, ...] = (),
        only: tuple[str, str] | None = None,
    ) -> Control:
        """A line of text (or an ``area`` of several)."""
        return self._control(
            name, "area" if area else "text", default, help, fields, described=described,
            suggestions=tuple(suggestions), only=only,
        )  # fmt: skip

    def model(self, default: str, options: Iterable[str]) -> Control:
        """One of some models, or a small one of any size."""
        return self._control("model", "select", default, "", (), options=(*options, *_SMALL), models=True)

    def _setting(self, name: str) -> Setting:
        for setting in self.request.settings():
            if setting.name == name:
                return setting
        raise unknown("field", name, [setting.name for setting in self.request.settings()])

    def _control(
        self,
        name: str,
        kind: Literal["slider", "select", "text", "area"],
        default: str | None,
        help: str,
        fields: tuple[str, ...],
        *,
        described: bool = False,
        **attributes: Any,
    ) -> Control:
        setting = self._setting(name)
        if default is None:
            default = str(setting.default)
        errors = dict.fromkeys((name, setting.option, *fields))
        return Control(
            name=name, label=setting.label, kind=kind, default=default, unit=setting.word.unit,
            help=help or (setting.about if described else ""), fields=tuple(errors), **attributes,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ExplorerForm(Record):
    """The form of an explorer, as the page builds it. ``chapter`` is the book's."""

    name: str
    title: str
    summary: str
    chapter: str
    controls: tuple[Control, ...]


@dataclass(frozen=True)
class Explorer:
    """One page: its form, and the function from the state of its controls to a document."""

    form: ExplorerForm
    answer: Callable[[State], Document]
