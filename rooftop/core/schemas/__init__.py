"""JSON schemas of what rooftop writes: within a schema number changes only add fields."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

from rooftop.core.errors import unknown


def schema(name: str) -> dict[str, Any]:
    """The JSON schema of 'simulation', 'compiled', 'compiled_embed', 'explain', 'operations' or 'difference'."""
    schemas = {
        file.name.split(".")[0]: file for file in files(__name__).iterdir() if file.name.endswith(".schema.json")
    }
    if name not in schemas:
        raise unknown("schema", name, schemas)
    data: dict[str, Any] = json.loads(schemas[name].read_text(encoding="utf-8"))
    return data
