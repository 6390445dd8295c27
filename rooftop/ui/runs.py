"""The folder of a run as it is on disk, without its trace: what it trains, where, how its loss goes. No JAX."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rooftop.ui.answers import Answer, Axis, Chart, Figure, Lines, Series
from rooftop.ui.opened import Opened

#: Records of metrics that are shown, evenly over the run.
_SHOWN = 400
_LINE = 4096


def first_look(path: Path) -> Opened | None:
    """What run.json and metrics.jsonl say; None for what is no folder of a run."""
    try:
        about = json.loads((path / "run.json").read_text(encoding="utf-8"))
        return Opened(name=path.name, what="a run", answer=_answer(about, list(_records(path / "metrics.jsonl"))))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _answer(about: Mapping[str, Any], records: list[Mapping[str, Any]]) -> Answer:
    program = about["job"]["program"]
    mesh = ", ".join(f"{name} {size}" for name, size in about.get("mesh", {}).items() if size > 1) or "one device"
    steps = [each for each in records if "loss" in each]
    where = f"{program['computation']['model']['name']} on {about.get('devices', {}).get('name', 'devices')}, {mesh}"
    if not steps:
        return Answer(verdict=f"{where}; no step is recorded yet.")
    last = steps[-1]
    figures = (
        Figure(name="step", label="Steps done", value=float(last["step"]), level="measured"),
        Figure(name="loss", label="Loss", value=f"{last['loss']:.4f}", level="measured", formula="nats a token"),
        Figure(name="step_s", label="Step", value=last["seconds"], unit="s", level="measured", formula="the last one"),
        Figure(name="tokens_per_s", label="Throughput", value=last["tokens_per_s"], unit="tok/s", level="measured"),
        Figure(name="mfu", label="MFU", value=last["mfu"], unit="%", level="measured",
               formula="of the chip's peak" if last["mfu"] is not None else "no peak is known of these devices"),
    )  # fmt: skip
    return Answer(verdict=f"{where}: step {last['step']}.", figures=figures, charts=_loss(records))


def _loss(records: list[Mapping[str, Any]]) -> tuple[Chart, ...]:
    kinds = (("training", "loss"), ("held out", "eval_loss"))
    series = tuple(
        Series(name=name, points=points, style="line" if len(points) > 1 else "point")
        for name, key in kinds
        if (points := tuple((float(each["step"]), float(each[key])) for each in records if key in each))
    )
    step, loss = Axis(label="step", zero=False), Axis(label="loss, nats a token", zero=False)
    return (Lines(title="Loss", x=step, y=loss, series=series),) if series else ()


def _records(path: Path) -> Iterator[Mapping[str, Any]]:
    """The lines of metrics.jsonl; of a long one some, evenly over it, and the last."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        starts = [0] if size < _SHOWN * _LINE else [size * part // _SHOWN for part in range(_SHOWN)]
        for at, start in enumerate(starts):
            file.seek(start)
            if start:
                file.readline()  # the rest of a line that began before
            if len(starts) == 1 or at == len(starts) - 1:
                # A run that goes on may be writing its last line now.
                yield from (json.loads(line) for line in file if line.endswith(b"\n"))
            else:
                yield json.loads(file.readline())
