"""``rooftop explain``: a trace measured beside compiled beside planned; an HLO instruction; two of a kind."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rooftop.cli.output import emit_json, json_option, show

if TYPE_CHECKING:
    from rooftop.hardware import Chip

_PATH = click.Path(path_type=Path)


@click.command()
@click.argument("path", metavar="[RUN|TRACE]", type=_PATH, required=False)
@click.option("--plan", type=_PATH, metavar="FILE", help="The plan to set it beside. [default: the run's own]")
@click.option(
    "--hlo", multiple=True, type=_PATH, metavar="FILE", help="A compiled module, for a trace without its own."
)
@click.option("--mesh", metavar="AXES", help="Mesh axes in the order of device ids: X=2,Y=4. [default: the run's own]")
@click.option("--on", "chip", metavar="CHIP", help="The chip whose roofs count. [default: the trace's own]")
@click.option("--figure", "figures", multiple=True, metavar="NAME=VALUE", help="Override a figure of the chip.")
@click.option("--op", "lines", multiple=True, metavar="HLO", help="Explain an HLO instruction, or several.")
@click.option("--diff", type=(_PATH, _PATH), metavar="A B", help="Compare two runs, traces, plans, or reports.")
@click.option(
    "--report",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write a page with tables and plots of a run or trace here (HTML).",
)
@click.option("--top", default="12", show_default=True, metavar="N", help="Rows to list.")
@json_option
def command(
    as_json: bool,
    path: Path | None,
    plan: Path | None,
    hlo: tuple[Path, ...],
    mesh: str | None,
    chip: str | None,
    figures: tuple[str, ...],
    lines: tuple[str, ...],
    diff: tuple[Path, Path] | None,
    report: Path | None,
    top: str,
) -> None:
    r"""Explain where the time of a program goes: of a run with a trace, or of any trace of JAX's profiler.

    By scope and phase it has what was measured, what XLA compiled and what was planned; then a verdict, the largest
    losses with what they wait for, and what to try. With --op it makes an HLO instruction readable, with --diff it
    compares two of a kind.

    \b
    Examples: rooftop explain run1
              rooftop explain /tmp/trace --hlo step.hlo.txt --mesh data=2,tensor=4 --on v5e
              rooftop explain --op '%f = bf16[64]{0} fusion(bf16[64,128]{1,0} %w, bf16[128]{0} %x), kind=kLoop' --on v5p
              rooftop explain --diff run1 run2
    """
    from rooftop.core.errors import RooftopError
    from rooftop.core.quantities import parse_count

    given = {"RUN": path, "op": lines, "diff": diff}
    asked = [name for name, value in given.items() if value]
    if len(asked) != 1:
        raise RooftopError("explain", " and ".join(asked) or None, "one of: a run or a trace, --op HLO, --diff A B")
    of_trace = {"plan": plan, "hlo": hlo, "mesh": mesh, "report": report}
    useless = [name for name, value in of_trace.items() if value and path is None]
    useless += [name for name, value in (("on", chip), ("figure", figures)) if value and diff]
    if useless:
        raise RooftopError(useless[0], given[asked[0]], f"nothing beside --{asked[0]}")
    count, accelerator = parse_count(top, "top"), _chip(chip, figures)
    if lines:
        _operations(lines, accelerator, as_json)
    elif diff is not None:
        _difference(diff, count, as_json)
    elif path is not None:
        _trace(path, plan, hlo, mesh, accelerator, report, count, as_json)


def _chip(name: str | None, figures: tuple[str, ...]) -> Chip | None:
    from rooftop.cli.matmul.command import _figures
    from rooftop.core.errors import RooftopError
    from rooftop.hardware import chip

    if name is None:
        if figures:
            raise RooftopError("figure", figures[0], "a chip to override it of: --on CHIP")
        return None
    # A slice will do as well: what counts is its chip.
    found = chip(name.partition(":")[0])
    return found.replace(**_figures(figures)) if figures else found


def _operations(lines: tuple[str, ...], chip: Chip | None, as_json: bool) -> None:
    from rooftop.explain.operation.inferred import infer
    from rooftop.explain.operation.instruction import operation_json, read_operation

    # No line at all is refused like any other that is no instruction.
    texts = [line for text in lines for line in text.splitlines() if line.strip()] or [""]
    read = [read_operation(each) for each in texts]
    inferred = infer(read)
    data = {
        "kind": "operations",
        "schema": 1,
        "operations": [operation_json(each, chip) for each in read],
        "inferred": [each.to_json() for each in inferred],
    }
    if as_json:
        emit_json(data)
    else:
        show(data)


def _difference(paths: tuple[Path, Path], count: int, as_json: bool) -> None:
    from rooftop.explain.measured.difference import difference, read_side

    found = difference(*(read_side(each) for each in paths))
    if as_json:
        emit_json(found.to_json())
    else:
        show(found.to_json(), top=count)


def _trace(
    path: Path,
    plan: Path | None,
    hlo: tuple[Path, ...],
    mesh: str | None,
    chip: Chip | None,
    report: Path | None,
    count: int,
    as_json: bool,
) -> None:
    from rooftop.arrays import parse_axes
    from rooftop.cli.compile.command import read_plan
    from rooftop.explain.measured.modules import read_module
    from rooftop.explain.measured.report import explain

    axes: Mapping[str, int] | None = None if mesh is None else parse_axes(mesh, None)
    found = explain(
        path,
        plan=None if plan is None else read_plan(plan),
        modules=[read_module(each) for each in hlo],
        mesh=axes,
        chip=chip,
    )
    if report is not None:
        from rooftop.core.files import write_text
        from rooftop.present import html
        from rooftop.present.traced import measured_document

        write_text(report, html.page(measured_document(found)))
    if as_json:
        emit_json(found.to_json(top=count))
    else:
        show(found.to_json(top=count), top=count)
