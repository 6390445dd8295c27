"""Draw ``docs/planned-compiled.svg``, the picture of the README, from the transcript in ``docs/compile.md``.

``python docs/picture.py`` writes it; a test holds that the file is the one that the transcript gives.
"""

from __future__ import annotations

import re
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "planned-compiled.svg"
#: A row of the table of scopes: its scope and phase, then milliseconds planned and compiled at its end.
_ROW = re.compile(
    r"^ (?P<scope>[\w/]+)? +(?P<phase>forward|recompute|backward|update) .* (?P<planned>[\d.]+) +(?P<compiled>[\d.]+)$"
)
#: The last row: work without a matmul, of all scopes.
_OTHER = re.compile(r"^ (?P<scope>elementwise, other) +(?P<planned>[\d.]+) +(?P<compiled>[\d.]+)$")
_WIDTH, _LEFT, _BAR, _GAP, _TOP = 860, 190, 7, 22, 92
_STYLE = (
    ".page { fill: #ffffff } text { fill: #1a1a1a } .small { fill: #5a5a5a; font-size: 11px } "
    ".planned { fill: #1b6ca8 } .compiled { fill: #e08a2e } @media (prefers-color-scheme: dark) { "
    ".page { fill: #16181c } text { fill: #e6e6e6 } .small { fill: #a8adb5 } .planned { fill: #6db3f2 } "
    ".compiled { fill: #ffb066 } }"
)


def rows(page: str) -> list[tuple[str, float, float]]:
    """(scope and phase, planned ms, compiled ms) of the first compiled plan on the page, in its order."""
    table = page.partition("By scope, planned and then as XLA compiled it")[2].partition("\n\n")[0]
    pairs, scope = [], ""
    for line in table.splitlines():
        if row := _ROW.match(line):
            scope = row["scope"] or scope
            pairs.append((f"{scope} {row['phase']}", float(row["planned"]), float(row["compiled"])))
        elif row := _OTHER.match(line):
            pairs.append((row["scope"], float(row["planned"]), float(row["compiled"])))
    return pairs


def subject(page: str) -> str:
    """The command that made the plan."""
    command = re.search(r"^\$ rooftop (plan train .*?) -o plan\.json$", page, re.MULTILINE)
    return command[1] if command else ""


def draw(page: str) -> str:
    """The picture: a pair of bars for each scope that takes 1 % of the step or more."""
    every = rows(page)
    total = sum(planned for _, planned, _ in every)
    shown = [row for row in every if max(row[1:]) > 0.01 * total]
    scale = (_WIDTH - _LEFT - 90) / max(max(row[1:]) for row in shown)
    height = _TOP + _GAP * len(shown) + 12
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" viewBox="0 0 {_WIDTH} {height}" '
        'font-family="sans-serif" font-size="12">',
        f"<style>{_STYLE}</style>",
        f'<rect class="page" width="{_WIDTH}" height="{height}"/>',
        '<text x="16" y="28" font-size="16">One train step, planned and as XLA:TPU compiled it, without a TPU</text>',
        f'<text class="small" x="16" y="48">rooftop {escape(subject(page))}; ms a step on one device</text>',
        '<rect class="planned" x="16" y="62" width="14" height="8"/><text x="36" y="70">planned</text>',
        '<rect class="compiled" x="106" y="62" width="14" height="8"/><text x="126" y="70">compiled</text>',
    ]
    for index, (name, planned, compiled) in enumerate(shown):
        y = _TOP + _GAP * index
        parts.append(f'<text x="{_LEFT - 10}" y="{y + 11}" text-anchor="end">{escape(name)}</text>')
        for kind, value, offset in (("planned", planned, 0), ("compiled", compiled, _BAR + 1)):
            parts.append(
                f'<rect class="{kind}" x="{_LEFT}" y="{y + offset}" width="{value * scale:.1f}" height="{_BAR}"/>'
            )
        end = _LEFT + max(planned, compiled) * scale + 8
        parts.append(f'<text class="small" x="{end:.1f}" y="{y + 11}">{planned:.0f} / {compiled:.0f}</text>')
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    PICTURE.write_text(draw((ROOT / "docs" / "compile.md").read_text(encoding="utf-8")), encoding="utf-8")
