"""Options of XLA that rooftop sets by itself: options.toml has them, by purpose and release of the compiler.

Plans assume those of a train step, so that every step is compiled with them.
"""

from __future__ import annotations

import importlib.metadata
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, TypeVar

from rooftop.arrays.rules import GATHER_AXES, ways
from rooftop.frameworks.framework import framework_of
from rooftop.frameworks.xla import release_number
from rooftop.hardware import chip as find_chip

Purpose = Literal["whole-slice gathers", "no windowed einsums", "pipelined embeddings", "absent GPUs"]
Options = Mapping[str, bool | int | str]
_T = TypeVar("_T")


def options_for(purpose: Purpose, release: str | None = None) -> dict[str, bool | int | str]:
    """Options for a purpose and a ``release`` of their compiler: the installed one, or the newest if there is none."""
    entries = [entry for entry in _table() if entry["purpose"] == purpose]
    if release is None and find_spec(compiler := entries[0]["compiler"]) is not None:
        release = importlib.metadata.version(compiler)
    known = {release_number(entry.get("since", "0")): entry["set"] for entry in entries}
    return dict(known[max(since for since in known if release is None or since <= release_number(release))])


def train_options(mesh: Mapping[str, int], chip: str, *, slices: int) -> dict[str, bool | int | str]:
    """Options of XLA:TPU for a train step on axes of these sizes, over ``slices`` of the chip."""
    habits, gathered = framework_of("rooftop", chip=find_chip(chip)).habits, ways(mesh, *GATHER_AXES)
    whole = ways(mesh, *mesh)
    if gathered in (whole, whole // slices) and habits.gathers_as_sums:
        return options_for("whole-slice gathers")
    return options_for("no windowed einsums") if gathered > 1 and habits.slow_windowed_einsums else {}


def compile_without_refused(
    compile_with: Callable[[dict[str, Any]], _T], options: Options, own: Iterable[str]
) -> tuple[_T, tuple[str, ...]]:
    """Return what ``compile_with(options)`` returns, and the names of the options that it had to leave out.

    An option may be left out if it is rooftop's ``own`` and the compiler refuses it; the compiler's other errors pass.
    """
    left, without = dict(options), list[str]()
    while True:
        try:
            return compile_with(left), tuple(without)
        except Exception as error:
            refused = _refused(str(error), [name for name in own if name in left])
            if not refused:
                raise
            without += refused
            left = {name: value for name, value in left.items() if name not in refused}


def _refused(error: str, own: Iterable[str]) -> list[str]:
    """Options that XLA's ``error`` refuses: it names them, or the more general option that they belong to."""
    if "No such compile option" not in error and "not supported" not in error:
        return []
    named = re.findall(r"\bxla_\w+", error)
    return [name for name in own if any(name == other or name.startswith(f"{other}_") for other in named)]


@cache
def _table() -> list[dict[str, Any]]:
    text = Path(__file__).with_name("options.toml").read_text(encoding="utf-8")
    return list(tomllib.loads(text)["entry"])
