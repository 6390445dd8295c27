"""The document of ``rooftop tune``: the best that was found, the lines that set it, what differs, and every trial."""

from __future__ import annotations

from collections.abc import Iterator

from rooftop.core.quantities import format_bytes, format_seconds
from rooftop.present.document import Chart, Document, Item, Items, ShownFigure, ShownVerdict, Table, TableColumn
from rooftop.present.documents.explained import difference
from rooftop.present.documents.parts import prose, sentence
from rooftop.tune.records import TuneRecord


def tuned(answer: TuneRecord, *, top: int = 0) -> Document:
    """A search. ``top`` trials, and rows that differ, are printed (0: all)."""
    versions = ", ".join(f"{name} {version}" for name, version in answer.versions.items())
    return Document(
        title=f"Tuned: {answer.program}",
        verdict=ShownVerdict(
            subject=answer.program, says=sentence(answer.verdict), details=(f"XLA ({versions})", *_proxies(answer))
        ),
        figures=tuple(_figures(answer)),
        charts=(*_lines(answer), *_difference(answer, top), *_trials(answer, top), *_recipes(answer)),
    )


def _proxies(answer: TuneRecord) -> Iterator[str]:
    if answer.layers is None:
        return
    layers = f"{answer.layers} {'layer' if answer.layers == 1 else 'layers'}"
    if answer.whole is None:
        yield f"Trials have {layers}: no time was left to compile the best with all of them, its gain is a proxy's."
    else:
        yield f"Trials have {layers}; baseline and best were then compiled with all of them."


def _figures(answer: TuneRecord) -> Iterator[ShownFigure]:
    before, after = answer.whole or (answer.baseline, answer.best)
    by_xla = answer.estimates == "xla"
    before_s, after_s = (trial.estimated_s if by_xla else trial.expected_s for trial in (before, after))
    by = "XLA's cycles" if by_xla else "the compiled schedule"
    if after_s is not None:
        was = "the baseline does not fit" if before_s is None else f"{format_seconds(before_s)} before"
        waits = f"; {_seconds(after.exposed_s)} waiting for collectives"
        yield ShownFigure("expected_s", "expected time", after_s, "s", "expected", note=f"of {by}, {was}{waits}")
        was = "" if before.peak_bytes is None else f"{format_bytes(before.peak_bytes)} before"
        yield ShownFigure("peak_bytes", "peak memory", after.peak_bytes, "B", "expected", note=was)
    ran = f"compiled in this run: {answer.compiled}, in {answer.seconds / 60:.1f} minutes"
    note = f"distinct schedules: {answer.schedules}; refused: {answer.refused}; {ran}"
    yield ShownFigure("tried", "trials", answer.tried, note=note)


def _seconds(seconds: float | None) -> str:
    """Seconds in words; '' for a trial without a time."""
    return "" if seconds is None else format_seconds(seconds)


def _lines(answer: TuneRecord) -> Iterator[Chart]:
    if answer.lines:
        yield Items(title="To set it", section="To set it", items=tuple(Item(line) for line in answer.lines))


def _difference(answer: TuneRecord, top: int) -> Iterator[Chart]:
    if answer.difference is not None:
        yield from difference(answer.difference, top=top).charts


def _trials(answer: TuneRecord, top: int) -> Iterator[Chart]:
    rows = []
    for entry in answer.trials:
        trial = entry.trial
        gain = entry.gain_s
        rows.append(
            (
                "" if entry.rank is None else str(entry.rank),
                " + ".join(trial.factors) or "baseline",
                _seconds(trial.expected_s),
                _seconds(trial.estimated_s),
                "" if not gain else f"{'-' if gain > 0 else '+'}{format_seconds(abs(gain))}",
                "" if trial.peak_bytes is None else format_bytes(trial.peak_bytes),
                entry.why,
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


def _recipes(answer: TuneRecord) -> Iterator[Chart]:
    """Where the options stand that published recipes for the chip set."""
    items = []
    for entry in answer.trials:
        if entry.recipe:
            rank = "without a rank" if entry.rank is None else f"rank {entry.rank}"
            items.append(Item(f"{entry.trial.factors[0]}: {rank}, {entry.why}", note="; ".join(entry.sources)))
    if items:
        yield Items(title="Options that published recipes set for this chip", section="Recipes", items=tuple(items))
    if answer.out_of_time:
        yield prose("The same command goes on with what is left.")
