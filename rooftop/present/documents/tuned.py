"""The document of ``rooftop tune``: the best that was found, the lines that set it, what differs, and every trial."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rooftop.core.quantities import format_bytes, format_seconds
from rooftop.present.document import Chart, Document, Item, Items, ShownFigure, ShownVerdict, Table, TableColumn
from rooftop.present.documents.explained import difference
from rooftop.present.documents.parts import prose, sentence


def tuned(data: Mapping[str, Any], *, top: int = 0) -> Document:
    """A search. ``top`` trials, and rows that differ, are printed (0: all)."""
    versions = ", ".join(f"{name} {version}" for name, version in data["versions"].items())
    return Document(
        title=f"Tuned: {data['program']}",
        verdict=ShownVerdict(
            subject=data["program"], says=sentence(data["verdict"]), details=(f"XLA ({versions})", *_proxies(data))
        ),
        figures=tuple(_figures(data)),
        charts=(*_lines(data), *_difference(data, top), *_trials(data, top), *_recipes(data)),
    )


def _proxies(data: Mapping[str, Any]) -> Iterator[str]:
    if data["layers"] is None:
        return
    layers = f"{data['layers']} {'layer' if data['layers'] == 1 else 'layers'}"
    if data["whole"] is None:
        yield f"Trials have {layers}: no time was left to compile the best with all of them, its gain is a proxy's."
    else:
        yield f"Trials have {layers}; baseline and best were then compiled with all of them."


def _figures(data: Mapping[str, Any]) -> Iterator[ShownFigure]:
    before, after = data["whole"] or (data["baseline"], data["best"])
    name = "estimated_s" if data["estimates"] == "xla" else "expected_s"
    by = "XLA's cycles" if data["estimates"] == "xla" else "the compiled schedule"
    if after[name] is not None:
        was = "the baseline does not fit" if before[name] is None else f"{format_seconds(before[name])} before"
        waits = f"; {format_seconds(after['exposed_s'])} waiting for collectives"
        yield ShownFigure("expected_s", "expected time", after[name], "s", "expected", note=f"of {by}, {was}{waits}")
        was = "" if before["peak_bytes"] is None else f"{format_bytes(before['peak_bytes'])} before"
        yield ShownFigure("peak_bytes", "peak memory", after["peak_bytes"], "B", "expected", note=was)
    ran = f"compiled in this run: {data['compiled']}, in {data['seconds'] / 60:.1f} minutes"
    note = f"distinct schedules: {data['schedules']}; refused: {data['refused']}; {ran}"
    yield ShownFigure("tried", "trials", data["tried"], note=note)


def _lines(data: Mapping[str, Any]) -> Iterator[Chart]:
    if data["lines"]:
        yield Items(title="To set it", section="To set it", items=tuple(Item(line) for line in data["lines"]))


def _difference(data: Mapping[str, Any], top: int) -> Iterator[Chart]:
    if data["difference"] is not None:
        yield from difference(data["difference"], top=top).charts


def _trials(data: Mapping[str, Any], top: int) -> Iterator[Chart]:
    rows = []
    for entry in data["trials"]:
        trial = entry["trial"]
        gain = entry["gain_s"]
        timed = trial["expected_s"] is not None
        rows.append(
            (
                "" if entry["rank"] is None else str(entry["rank"]),
                " + ".join(trial["factors"]) or "baseline",
                format_seconds(trial["expected_s"]) if timed else "",
                format_seconds(trial["estimated_s"]) if timed else "",
                "" if not gain else f"{'-' if gain > 0 else '+'}{format_seconds(abs(gain))}",
                format_bytes(trial["peak_bytes"]) if timed else "",
                entry["why"],
            )
        )
    columns = (
        TableColumn(""),
        TableColumn("change", "text", wrap=True),
        TableColumn("a step"),
        TableColumn("by XLA", drop=1),
        TableColumn("saves"),
        TableColumn("peak"),
        TableColumn("", "text", wrap=True),
    )
    yield Table(
        title="Trials, the fastest first",
        about="A step as rooftop prices the schedule, and as XLA's own cycles do.",
        section="Trials",
        columns=columns,
        rows=tuple(rows),
        top=top,
    )


def _recipes(data: Mapping[str, Any]) -> Iterator[Chart]:
    """Where the options stand that published recipes for the chip set."""
    items = []
    for entry in data["trials"]:
        if entry["recipe"]:
            rank = "without a rank" if entry["rank"] is None else f"rank {entry['rank']}"
            items.append(
                Item(f"{entry['trial']['factors'][0]}: {rank}, {entry['why']}", note="; ".join(entry["sources"]))
            )
    if items:
        yield Items(title="Options that published recipes set for this chip", section="Recipes", items=tuple(items))
    if data["out_of_time"]:
        yield prose("The same command goes on with what is left.")
