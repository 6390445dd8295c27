"""For every explorer: a slider, the figure that it changes, and where the command that the page shows has it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Shown:
    """``slider`` changes ``figure``; ``find`` takes it from the JSON of the command that the page shows."""

    slider: str
    figure: str
    find: Callable[[Any], float]


def _plain(data: Any) -> Any:
    """The strategy that only multiplies."""
    return next(strategy for strategy in data["strategies"] if strategy["rule"] == "multiply")


FIGURES: dict[str, Shown] = {
    "roofline": Shown("B", "time_s", lambda data: _plain(data)["time_s"]),
    "systolic": Shown("m", "utilisation", lambda data: _plain(data)["steps"][0]["mxu_utilisation"]),
    "sharding": Shown("way", "time_s", lambda data: data["strategies"][0]["time_s"]),
    "collectives": Shown("bytes", "time_s", lambda data: data["strategies"][0]["time_s"]),
    "training": Shown("batch_seqs", "expected_s", lambda data: data["step"]["expected_s"]),
    "pipeline": Shown("microbatches", "bubble", lambda data: data["pipeline"]["bubble"]),
    "serving": Shown("context", "step_s", lambda data: data["generate"]["step_s"]["expected_s"]),
    "embedding": Shown("batch", "pipelined_s", lambda data: data["step"]["pipelined"]["expected_s"]),
}


def figure_of(explorer: str, state: dict[str, str], data: Any) -> float:
    """The figure in the JSON of a command; a state of the sharding explorer says which way it is of."""
    if explorer == "sharding":
        return float(data["strategies"][int(state.get("way", "1")) - 1]["time_s"])
    return FIGURES[explorer].find(data)
