"""The Pareto front of latency and throughput as a picture: an SVG, written out by hand, for light and dark pages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any
from xml.sax.saxutils import escape

_WIDTH, _HEIGHT = 860, 540
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 200, 56, 64
#: A line's colour on a light page and on a dark one.
_COLOURS = (
    ("#1b6ca8", "#6db3f2"),
    ("#c1440e", "#ff9160"),
    ("#2e7d32", "#7ccf80"),
    ("#7b1fa2", "#cf8fee"),
    ("#8a6500", "#e0b64c"),
    ("#00727d", "#5ccbd6"),
    ("#5d4037", "#bf9f95"),
)
#: Batches that are named beside their point, where there is room.
_NAMED = {2**power for power in range(21)}
#: A named batch keeps this far from every other, in pixels across and down.
_ROOM = 22, 12


def pareto_svg(points: Sequence[dict[str, Any]], title: str) -> str:
    """Tokens/s per chip over milliseconds per step, a line per context (or server), batches beside the points."""
    lines = _lines(points)
    xs = [point["step_s"] * 1e3 for point in points] or [1.0]
    low, high = min(xs) / 1.2, max(*xs, min(xs) * 1.01) * 1.2
    top = _nice(max([point["tokens_per_s_per_chip"] for point in points] or [1.0]))
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM

    def across(value: float) -> float:
        return _LEFT + (right - _LEFT) * math.log(value / low) / math.log(high / low)

    def up(value: float) -> float:
        return bottom - (bottom - _TOP) * value / top

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" '
        f'viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" font-size="12">',
        _style(len(lines)),
        f'<rect class="page" width="{_WIDTH}" height="{_HEIGHT}"/>',
        f'<text x="{_LEFT}" y="30" font-size="16">{escape(title)}</text>',
    ]
    for tick in _ticks(low, high):
        x = across(tick)
        parts.append(f'<line class="grid" x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{bottom}"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{tick:g}</text>')
    for step in range(6):
        y = up(top * step / 5)
        parts.append(f'<line class="grid" x1="{_LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{top * step / 5:g}</text>')
    middle = (_TOP + bottom) / 2
    parts += [
        f'<text x="{(_LEFT + right) / 2}" y="{_HEIGHT - 18}" text-anchor="middle">step, ms (logarithmic)</text>',
        f'<text x="22" y="{middle}" text-anchor="middle" transform="rotate(-90 22 {middle})">tokens/s per chip</text>',
    ]
    drawn = {
        name: [(across(p["step_s"] * 1e3), up(p["tokens_per_s_per_chip"]), p["batch"]) for p in members]
        for name, members in lines.items()
    }
    dots = [(x, y) for places in drawn.values() for x, y, _ in places]
    named: list[tuple[float, float]] = []
    for index, (name, places) in enumerate(drawn.items()):
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in places)
        parts.append(f'<polyline class="line l{index % len(_COLOURS)}" points="{path}"/>')
        for x, y, batch in places:
            parts.append(f'<circle class="dot l{index % len(_COLOURS)}" cx="{x:.1f}" cy="{y:.1f}" r="2.2"/>')
            # Below and to the right of its point no line runs: they all rise.
            at = x + 5, y + 11
            if batch in _NAMED and _has_room(at, len(str(batch)), named, dots):
                named.append(at)
                parts.append(f'<text class="small" x="{at[0]:.1f}" y="{at[1]:.1f}">{batch}</text>')
        y = _TOP + 8 + 20 * index
        parts.append(
            f'<line class="line l{index % len(_COLOURS)}" x1="{right + 14}" y1="{y}" x2="{right + 34}" y2="{y}"/>'
        )
        parts.append(f'<text x="{right + 40}" y="{y + 4}">{escape(name)}</text>')
    note = _TOP + 18 + 20 * len(lines)
    parts.append(f'<text class="small" x="{right + 14}" y="{note}">numbers beside points: batch</text>')
    return "\n".join([*parts, "</svg>", ""])


def _has_room(
    at: tuple[float, float], digits: int, named: Sequence[tuple[float, float]], dots: Sequence[tuple[float, float]]
) -> bool:
    """Whether a number at a place is clear of other numbers and of all points."""
    x, y = at
    apart = all(abs(x - u) > _ROOM[0] or abs(y - v) > _ROOM[1] for u, v in named)
    return apart and not any(x - 3 < u < x + 6 * digits + 3 and y - 10 < v < y + 3 for u, v in dots)


def _lines(points: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Points by what the legend calls them: the context, or the slice and, where they differ, the number formats."""
    formats = {(point.get("weights"), point.get("kv")) for point in points}
    lines: dict[str, list[dict[str, Any]]] = {}
    for point in points:
        name = f"context {point['context']:,.0f}"
        if "slice" in point:
            name = point["slice"] + (f", {point['weights']}, KV {point['kv']}" if len(formats) > 1 else "")
        lines.setdefault(name, []).append(point)
    return lines


def _style(lines: int) -> str:
    """Colours by the page's scheme."""

    def rules(dark: bool) -> str:
        page, ink, grid, quiet = ("#16181c", "#e6e6e6", "#3a3f46", "#a8adb5") if dark else (
            "#ffffff", "#1a1a1a", "#dddddd", "#5a5a5a")  # fmt: skip
        colours = "".join(
            f" .line.l{i} {{ stroke: {pair[dark]} }} .dot.l{i} {{ fill: {pair[dark]} }}"
            for i, pair in enumerate(_COLOURS[:lines])
        )
        return (
            f".page {{ fill: {page} }} text {{ fill: {ink} }} .small {{ fill: {quiet} }} .grid {{ stroke: {grid} }}"
            + colours
        )

    shapes = ".line { fill: none; stroke-width: 1.6 } .small { font-size: 10px }"
    return f"<style>{shapes} {rules(False)} @media (prefers-color-scheme: dark) {{ {rules(True)} }}</style>"


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers between the ends of a logarithmic axis, not much more than ten."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    for digits in ((1, 1.5, 2, 3, 4, 5, 7), (1, 2, 3, 5, 7), (1, 2, 5), (1,)):
        ticks = [digit * 10.0**power for power in range(first, last + 1) for digit in digits]
        found = [tick for tick in ticks if low <= tick <= high]
        if len(found) <= 10:
            break
    return found


def _nice(value: float) -> float:
    """A round number of five parts, not below ``value``."""
    scale = 10.0 ** math.floor(math.log10(value))
    return next(step * scale for step in (1, 1.5, 2, 2.5, 3, 4, 5, 7.5, 10) if step * scale >= value)
