"""The explorers, in the order of the page's menu: each a module with one ``EXPLORER``, imported when it is asked."""

from __future__ import annotations

import importlib
from functools import cache

from rooftop.core.errors import unknown
from rooftop.ui.controls import Explorer

#: Explorer -> what the menu says.
EXPLORERS: dict[str, str] = {
    "roofline": "Roofline",
    "systolic": "Systolic array",
    "sharding": "Sharding",
    "collectives": "Collectives",
    "training": "Training",
    "pipeline": "Pipelines",
    "serving": "Serving",
    "embedding": "Embeddings",
}


@cache
def explorer(name: str) -> Explorer:
    """The explorer called ``name``. Raises RooftopError on an unknown one."""
    if name not in EXPLORERS:
        raise unknown("explorer", name, EXPLORERS)
    explorer: Explorer = importlib.import_module(f"rooftop.ui.explorers.{name}").EXPLORER
    return explorer
