"""Builders of documents: one for each kind of answer, from the data that ``--json`` prints.

A builder is imported when its kind is asked for.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from rooftop.core.errors import unknown
from rooftop.present.document import Document

#: Kind of an answer -> its name in words, and its builder.
KINDS: Mapping[str, tuple[str, str]] = {
    "train": ("a plan of a training run", "training:training_plan"),
    "serve": ("a plan of a server", "serving:serving_plan"),
    "pareto": ("a front of servers", "serving:front"),
}


def document(data: Mapping[str, Any], **context: Any) -> Document:
    """The document of an answer. ``context`` goes to the builder: the ``plan`` next to it, its timelines.

    Raises RooftopError for a kind that has no document.
    """
    kind = data.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        raise unknown("document", str(kind), KINDS)
    module, _, name = KINDS[kind][1].partition(":")
    builder: Callable[..., Document] = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    return builder(data, **context)
