"""Transcripts in the documentation are real: this runs them again.

A block that begins with ``$ `` is a command and what it printed. ``python docs/transcripts.py [PAGE...]`` runs the
commands of the named pages with this Python's ``rooftop``, by default those of all pages (``make docs``), and writes
what they print. The tests check that nothing would change.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
#: Of the terminal that commands print to.
TERMINAL = {"COLUMNS": "110", "NO_COLOR": "1"}
_BLOCK = re.compile(r"```\n\$ (?P<command>.+)\n(?P<printed>(?:.*\n)*?)```\n")


def pages() -> list[Path]:
    """The pages that may hold transcripts."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def commands(page: Path) -> list[tuple[str, str]]:
    """(command, what the page says it printed) of every transcript on a page."""
    return [(block["command"], block["printed"]) for block in _BLOCK.finditer(page.read_text(encoding="utf-8"))]


def run(command: str) -> str:
    """Output of a command, stderr included, trailing blanks removed."""
    here = str(Path(sys.executable).parent)
    environment = os.environ | TERMINAL | {"PATH": f"{here}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        check=False,
    )
    return tidy(done.stdout)


def tidy(output: str) -> str:
    """The output without blanks at the ends of lines, and one newline at the end."""
    return re.sub(r"[ \t]+$", "", output, flags=re.MULTILINE).strip("\n") + "\n"


def main() -> None:
    """Rewrite the transcripts of the named pages, by default of all."""
    named = [Path(name).resolve() for name in sys.argv[1:]] or pages()
    if unknown := [str(page) for page in named if page not in pages()]:
        sys.exit(f"not pages of the documentation: {', '.join(unknown)}")
    for page in named:
        text = page.read_text(encoding="utf-8")
        fresh = _BLOCK.sub(lambda block: f"```\n$ {block['command']}\n{run(block['command'])}```\n", text)
        if fresh != text:
            page.write_text(fresh, encoding="utf-8")
            print(f"rewritten: {page.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
