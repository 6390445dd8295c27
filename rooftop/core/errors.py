"""The two ways rooftop says no: the input is wrong, or the answer is no."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import TypeVar

Name = TypeVar("Name", bound=str)


#: Characters of a part of an error that comes from a file, which may be as long as the file; of a list or an object.
_LONGEST, _LONGEST_VALUE = 1000, 100
#: Names that an error lists where a command lists them too.
_LONG_LIST = 12


def one_line(text: str) -> str:
    """``text`` with control characters, such as those that colour a terminal, written as escapes."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _cut(text: str, longest: int = _LONGEST) -> str:
    return text if len(text) <= longest else f"{text[:longest]}..."


class RooftopError(Exception):
    """The input is wrong. One line names the field, what was given (None: nothing) and what is accepted (status 2)."""

    exit_status = 2

    def __init__(self, field: str, given: object, accepted: str) -> None:
        self.field = field
        self.given = given
        self.accepted = accepted
        longest = _LONGEST_VALUE if isinstance(given, (list, dict)) else _LONGEST
        shown = "nothing" if given is None else _cut(repr(given), longest)
        super().__init__(f"{one_line(_cut(field))}: got {shown}; accepted: {one_line(_cut(accepted))}")

    def __reduce__(self) -> tuple[type[RooftopError], tuple[str, object, str]]:
        # It is raised anew in another process.
        return type(self), (self.field, self.given, self.accepted)


class Infeasible(Exception):
    """The answer is no. One line says what does not hold, by how much, and the nearest that does (exit status 1)."""

    exit_status = 1

    def __init__(self, what: str, by: str, nearest: str | None = None) -> None:
        self.what = what
        self.by = by
        self.nearest = nearest
        super().__init__(f"{what}: {by}" + (f"; nearest that does: {nearest}" if nearest else ""))


def unknown(field: str, given: str, known: Iterable[str], *, listed_by: str | None = None) -> RooftopError:
    """A RooftopError for a name that is not in a list, with the close matches suggested.

    ``listed_by`` is the command that lists the names; it stands for a list of more than a dozen.
    """
    names = sorted(known)
    close = difflib.get_close_matches(str(given).lower(), names, n=3, cutoff=0.55)
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    is_long = listed_by is not None and len(names) > _LONG_LIST
    rest = f"`{listed_by}` lists all {len(names)}" if is_long else f"one of {', '.join(names)}"
    return RooftopError(field, given, hint + rest)


def one_of(field: str, given: str, known: Iterable[Name]) -> Name:
    """The name in a list that was given, in the list's type. Raises RooftopError on any other."""
    names = tuple(known)
    for name in names:
        if name == given:
            return name
    raise unknown(field, given, names)


def refuse(options: Mapping[str, object], accepted: str) -> None:
    """Raise a RooftopError for the first option that is set, by its name and value; None, False and empty are not."""
    for name, value in options.items():
        if value:
            entries = [f"{key}={entry}" for key, entry in value.items()] if isinstance(value, Mapping) else value
            shown = " ".join(map(str, entries)) if isinstance(entries, tuple | list) else str(entries)
            raise RooftopError(name, shown, accepted)


#: Errors of a reader whose file makes no sense in a way that the reader does not foresee.
UNFORESEEN = (
    LookupError, ValueError, ArithmeticError, TypeError, AttributeError, RecursionError, MemoryError,
)  # fmt: skip


def misread(field: str, error: Exception, accepted: str) -> RooftopError:
    """A RooftopError for data from outside that a reader could not make sense of: ``error`` says where it gave up."""
    if isinstance(error, KeyError) and error.args:
        given = f"data without {error.args[0]}"
    elif isinstance(error, (TypeError, AttributeError)):
        # Python's own words say nothing to someone who reads a file.
        given = "a value of another type"
    else:
        given = str(error)
    return RooftopError(field, given, accepted)
