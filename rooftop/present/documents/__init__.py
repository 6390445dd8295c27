"""Builders of documents: one for each kind of answer, from the data that ``--json`` prints.

A builder is imported when its kind is asked for.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rooftop.arrays.rules import STAGE_AXES, ways
from rooftop.core.errors import unknown
from rooftop.core.ledger import Ledger
from rooftop.core.timelines import Lanes
from rooftop.present.document import MOST_LANES, Document, Timeline
from rooftop.simulate.planned import step_lanes

#: Kind of an answer -> its name in words, and its builder.
KINDS: dict[str, tuple[str, str]] = {
    "train": ("a plan of a training run", "training:training_plan"),
    "serve": ("a plan of a server", "serving:serving_plan"),
    "pareto": ("a front of servers", "serving:front"),
    "embed": ("a plan of embedding tables", "embedding:embedding_plan"),
    "compiled_embed": ("a compilation of embedding tables", "embedding:compiled_embedding"),
    "simulation": ("a simulation", "serving:simulation"),
    "compiled": ("a compilation", "compiled:compilation"),
    "script": ("a script on a slice", "scripts:script"),
    "check": ("a checked program", "checked:checked"),
    "tuned": ("a tuned program", "tuned:tuned"),
    "explained": ("an explained run", "explained:explained"),
    "difference": ("a difference of two runs", "explained:difference"),
    "calibration": ("a calibration", "calibration:calibration"),
    "operations": ("operations", "explained:operations"),
}


def _planned(data: Mapping[str, Any]) -> Iterator[Lanes]:
    """The timelines of a plan that follow from its ledgers. The timeline of a pipeline needs the plan itself."""
    if data.get("kind") == "serve":
        for name, title in (("generate", "planned: a step of generation"), ("prefill", "planned: a prefill")):
            yield step_lanes(Ledger.from_json(data[name]["ledger"]), title=title)
    elif data.get("kind") == "train" and ways(data["mesh"]["axes"], *STAGE_AXES) == 1:
        title = f"planned: {data['model']['name']} on {data['slice']['name']}"
        yield step_lanes(Ledger.from_json(data["ledger"]), title=title, microbatches=data["microbatches"])


def timeline_about(lanes: Lanes) -> str:
    """The note of a timeline, and the number of lanes that are not drawn."""
    left = len(lanes.lanes) - MOST_LANES
    parts = (lanes.note, f"{left} more lanes are not drawn" if left > 0 else "")
    return "; ".join(part for part in parts if part) or f"{lanes.source}, one step"


#: Kinds that only their verb prints: their data does not name them.
_NAMELESS: dict[str, tuple[str, str]] = {
    "validation": ("a validation", "validation:validation"),
    "matmul": ("a sharded product", "matmul:matmul"),
    "bench collectives": ("measured collectives", "matmul:collectives"),
    "bench serve": ("a measured server", "serving:server"),
}


def document(
    data: Mapping[str, Any], *, kind: str | None = None, lanes: Sequence[Lanes] = (), **context: Any
) -> Document:
    """The document of an answer, with timelines. ``context`` goes to the builder, such as the ``plan`` next to it.

    ``kind`` is that of data that does not name its own.

    Raises RooftopError for a kind that has no document.
    """
    kind = kind or str(data.get("kind"))
    builders = KINDS | _NAMELESS
    if kind not in builders:
        raise unknown("document", kind, builders)
    module, _, name = builders[kind][1].partition(":")
    builder: Callable[..., Document] = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    built = builder(data, **context)
    drawn = tuple(
        Timeline(title=item.title, about=timeline_about(item), section="Timeline", lanes=item, detail=True)
        for item in lanes or _planned(data)
    )
    at = next((at for at, chart in enumerate(built.charts) if chart.section == "Memory"), len(built.charts))
    return replace(built, charts=(*built.charts[:at], *drawn, *built.charts[at:]))
