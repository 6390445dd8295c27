"""The Pareto front of latency and throughput as a picture: an SVG, written out by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any
from xml.sax.saxutils import escape

_WIDTH, _HEIGHT = 820, 520
_LEFT, _RIGHT, _TOP, _BOTTOM = 80, 150, 50, 60
_COLOURS = ("#1b6ca8", "#c1440e", "#2e7d32", "#7b1fa2", "#b8860b", "#00838f", "#5d4037")
#: Batches that are named beside their point.
_NAMED = {2**power for power in range(13)}


def pareto_svg(points: Sequence[dict[str, Any]], title: str) -> str:
    """Tokens/s per chip over milliseconds per step, one line per context (or slice), batches beside the points."""
    lines: dict[str, list[dict[str, Any]]] = {}
    for point in points:
        name = point["slice"] if "slice" in point else f"context {point['context']:,.0f}"
        lines.setdefault(name, []).append(point)
    xs = [point["step_s"] * 1e3 for point in points] or [1.0]
    ys = [point["tokens_per_s_per_chip"] for point in points] or [1.0]
    low, high = _decades(min(xs), max(xs))
    top = _nice(max(ys))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" '
        f'viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="28" font-size="16">{escape(title)}</text>',
    ]

    def across(value: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * math.log(value / low) / math.log(high / low)

    def up(value: float) -> float:
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * value / top

    for tick in _ticks(low, high):
        x = across(tick)
        parts.append(f'<line x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{_HEIGHT - _BOTTOM}" stroke="#ddd"/>')
        parts.append(f'<text x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{tick:g}</text>')
    for step in range(6):
        y = up(top * step / 5)
        parts.append(f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{_WIDTH - _RIGHT}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{top * step / 5:g}</text>')
    parts.append(
        f'<text x="{(_LEFT + _WIDTH - _RIGHT) / 2}" y="{_HEIGHT - 14}" text-anchor="middle">ms per step</text>'
    )
    parts.append(
        f'<text x="20" y="{_HEIGHT / 2}" text-anchor="middle" transform="rotate(-90 20 {_HEIGHT / 2})">'
        "tokens/s per chip</text>"
    )
    for index, (name, members) in enumerate(lines.items()):
        colour = _COLOURS[index % len(_COLOURS)]
        places = [(across(p["step_s"] * 1e3), up(p["tokens_per_s_per_chip"]), p["batch"]) for p in members]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in places)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        for x, y, batch in places:
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2" fill="{colour}"/>')
            if batch in _NAMED:
                parts.append(f'<text x="{x + 4:.1f}" y="{y - 4:.1f}" font-size="9" fill="{colour}">{batch}</text>')
        parts.append(
            f'<text x="{_WIDTH - _RIGHT + 10}" y="{_TOP + 12 + 18 * index}" fill="{colour}">{escape(name)}</text>'
        )
    return "\n".join([*parts, "</svg>", ""])


def _decades(least: float, most: float) -> tuple[float, float]:
    """Ends of a logarithmic axis with some room on either side."""
    return least / 1.2, max(most, least * 1.01) * 1.2


def _ticks(low: float, high: float) -> list[float]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    found = [digit * 10.0**power for power in range(first, last + 1) for digit in (1, 2, 5)]
    return [tick for tick in found if low <= tick <= high]


def _nice(value: float) -> float:
    """A round number of five parts, not below ``value``."""
    scale = 10.0 ** math.floor(math.log10(value))
    return next(step * scale for step in (1, 1.5, 2, 2.5, 3, 4, 5, 7.5, 10) if step * scale >= value)
