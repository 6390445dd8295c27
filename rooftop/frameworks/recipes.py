"""Recipes that frameworks publish for pre-training, by name, from ``data/recipes``."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from functools import cache

from rooftop.core.errors import RooftopError, unknown
from rooftop.frameworks.tables import DATA


@cache
def recipes(framework: str) -> Mapping[str, Mapping[str, str]]:
    """Rows of a framework's recipes by name; none of a framework without a table."""
    path = DATA / "recipes" / f"{framework}.csv"
    if not path.is_file():
        return {}
    with path.open(encoding="utf-8", newline="") as file:
        rows = csv.DictReader(line for line in file if not line.startswith("#"))
        return {row["name"]: row for row in rows}


def recipe(framework: str, name: str) -> Mapping[str, str]:
    """The row of a recipe. Raises RooftopError for one that is not known."""
    known = recipes(framework)
    if name not in known:
        listed = unknown("from", name, known).accepted.partition("one of")[0]
        raise RooftopError("from", name, f"{listed}a file, or one of the {len(known)} recipes of {framework}")
    return known[name]
