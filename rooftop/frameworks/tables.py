"""Data files of frameworks, engines and compilers."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

DATA = Path(__file__).with_name("data")


def data_table(name: str) -> dict[str, Any]:
    """The contents of ``data/NAME.toml``."""
    return tomllib.loads((DATA / f"{name}.toml").read_text(encoding="utf-8"))
