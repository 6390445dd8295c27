"""JSON schemas of what rooftop writes: within a schema number changes only add fields."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

from rooftop.core.errors import unknown


def schema(name: str) -> dict[str, Any]:
    """The JSON schema of 'plan' (plan.json of training), 'serving' (of serving), 'embed' (of embeddings) or another.

    Others are 'simulation' and 'ledger', which describes those within plans. What ``rooftop compile`` and ``rooftop
    explain`` print is described by ``rooftop.core.records.schema`` of the records in ``rooftop.explain``.
    """
    schemas = {
        file.name.split(".")[0]: file for file in files(__name__).iterdir() if file.name.endswith(".schema.json")
    }
    if name not in schemas:
        raise unknown("schema", name, schemas)
    data: dict[str, Any] = json.loads(schemas[name].read_text(encoding="utf-8"))
    if name == "plan":
        data["properties"]["ledger"] = schema("ledger")
    if name == "serving":
        for phase in ("generate", "prefill"):
            data["properties"][phase]["properties"]["ledger"] = schema("ledger")
    return data
