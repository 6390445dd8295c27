"""Results of the library's functions: their JSON, their rows as flat dicts, and their document."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rooftop.core.ledger import Ledger

if TYPE_CHECKING:
    from rooftop.present.document import Document

#: Rows that a notebook shows.
_SHOWN_ROWS = 40


class Result(ABC):
    """An answer. ``repr`` is its summary, and a notebook shows its document.

    Subclasses are frozen dataclasses, declared with ``repr=False``. Those whose answer has no document of its own show
    a table of the rows.
    """

    @abstractmethod
    def to_json(self) -> dict[str, object]:
        """Return the object that the verb prints with ``--json``."""

    @property
    @abstractmethod
    def rows(self) -> list[dict[str, object]]:
        """The ledger or table of the answer, a flat dict a row: ready for a data frame."""

    @property
    @abstractmethod
    def summary(self) -> str:
        """The answer in one to a few lines."""

    def raise_if_infeasible(self) -> None:
        """Raise Infeasible if the answer is no: the model does not fit, or a target is missed."""
        return None

    def __repr__(self) -> str:
        return self.summary

    @property
    def document(self) -> Document:
        """The answer as the verb prints it: verdict, figures, tables and charts."""
        from rooftop.present.document import Document, ShownVerdict, Table, columns

        rows = self.rows
        names = list(dict.fromkeys(name for row in rows for name in row))
        cells = tuple(tuple(_cell(row.get(name)) for name in names) for row in rows[:_SHOWN_ROWS])
        title = f"{_SHOWN_ROWS} of {len(rows)} rows" if len(rows) > _SHOWN_ROWS else f"{len(rows)} rows"
        charts = (Table(title=title, columns=columns(*names), rows=cells),) if rows else ()
        return Document(verdict=ShownVerdict(says=self.summary), charts=charts)

    def page(self) -> str:
        """The document as one HTML file that needs no network."""
        from rooftop.present import html

        return html.page(self.document)

    def _repr_html_(self) -> str:
        """The document for a cell of a notebook."""
        from rooftop.present import html

        return html.fragment(self.document)


def flat(data: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """``data`` without nesting: keys of mappings joined with dots, lists of plain values with commas.

    Lists of mappings are left out: they are tables of their own.
    """
    row: dict[str, object] = {}
    for name, value in data.items():
        if isinstance(value, Mapping):
            row |= flat(value, f"{prefix}{name}.")
        elif isinstance(value, Sequence) and not isinstance(value, str):
            if not any(isinstance(entry, Mapping) for entry in value):
                row[f"{prefix}{name}"] = ",".join(map(str, value))
        else:
            row[f"{prefix}{name}"] = value
    return row


def ledger_rows(ledger: Ledger) -> list[dict[str, object]]:
    """Rows of a ledger, flat. ``collectives`` names each collective and its axes."""
    rows = []
    for row in ledger:
        collectives = [f"{moved.kind} {'+'.join(moved.axes)}" for moved in row.collectives]
        rows.append(flat(row.to_json() | {"collectives": collectives}))
    return rows


def _cell(value: object) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
