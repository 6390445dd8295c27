"""``rooftop compile``: the program of a plan, or any JAX function, compiled by XLA:TPU for a slice that is not here."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rooftop.cli.output import emit_json, json_option, read_plan_file, show
from rooftop.cli.process import uninterrupted

if TYPE_CHECKING:
    from rooftop.explain.compiled.report import CompiledReport
    from rooftop.explain.compiled.training import Refusal
    from rooftop.plan.training.plan import TrainingPlan


_FILE = click.Path(dir_okay=False, path_type=Path)
_FOLDER = click.Path(file_okay=False, path_type=Path)


class _SeveralArrays(click.Command):
    """A command whose ``--args`` takes all the words that follow it, up to the next option."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        spread, taking = list[str](), False
        for word in args:
            if word.startswith("-"):
                taking = word == "--args"
                if not taking:
                    spread.append(word)
            else:
                spread += ["--args", word] if taking else [word]
        return super().parse_args(ctx, spread)


@click.command(cls=_SeveralArrays)
@click.argument("program", metavar="PLAN.json|MODULE:FUNCTION")
@click.option("--args", "arrays", multiple=True, metavar="ARRAY...", help="A function's arrays: bf16[8192_X, D_Y].")
@click.option("--dims", metavar="SIZES", help="Sizes of the dims that arrays name: D=4096,F=16Ki.")
@click.option("--mesh", metavar="AXES", help="Mesh axes and their sizes for a function: X=4,Y=4.")
@click.option("--on", "slice_", metavar="SLICE", help="The slice to compile a function for, such as v5e:4x4.")
@click.option("--layout", metavar="LAYOUT", help="Pin the axes to the torus: X=x,Y=y[1:2]+z.")
@click.option("--auto", is_flag=True, help="Leave a function's axes to the partitioner: not JAX's explicit mode.")
@click.option("--check", metavar="NAMES", help="Build checks into a plan of embeddings: nan, bounds, buffers.")
@click.option("--timeout", metavar="S", help="Give up after so many seconds.")
@click.option("--no-cache", is_flag=True, help="Compile again, even if the answer is known.")
@click.option("--top", default="10", show_default=True, metavar="N", help="Operations and buffers to list.")
@click.option("--save", type=_FILE, help="Write the executable here, with the versions that compiled it.")
@click.option("--perfetto", type=_FILE, help="Write the compiled timeline here, for ui.perfetto.dev.")
@click.option("--xprof", type=_FOLDER, help="Write it as a profile into this folder, for XProf and TensorBoard.")
@click.option("--report", type=_FILE, help="Write a page with tables and plots here (HTML).")
@click.option("-o", "--output", type=_FILE, help="Write the JSON report here.")
@json_option
def command(
    as_json: bool,
    program: str,
    check: str | None,
    timeout: str | None,
    no_cache: bool,
    top: str,
    save: Path | None,
    perfetto: Path | None,
    xprof: Path | None,
    report: Path | None,
    output: Path | None,
    **of_function: Any,
) -> int:
    r"""Compile ahead of time with XLA:TPU, no TPU needed, and read what the compiler made of it.

    Of a PLAN.json written by 'rooftop plan', planned and compiled stand side by side: FLOPs, memory, collectives and
    time by scope and phase, with what was not planned and what is missing. Of a plan of 'rooftop plan embed', the
    memory that SparseCores need for each stack of tables, and what whole steps overlap. Of MODULE:FUNCTION, any
    function of JAX arrays, the compiled ledger and a roofline for every op.

    \b
    Examples: rooftop compile plan.json
              rooftop compile mypkg.mymodule:step --args 'bf16[8192_X, 4096]' 'bf16[4096, F_Y]' \
                  --dims F=16384 --mesh X=4,Y=4 --on v5e:4x4
    """
    from rooftop.core.errors import RooftopError
    from rooftop.core.quantities import parse_count, parse_quantity

    listed = parse_count(top, "top")
    timeout_s = None if timeout is None else parse_quantity(timeout, "timeout")
    with _progress_line(shown=not as_json) as on_progress:
        how: dict[str, Any] = {"timeout_s": timeout_s, "cache": not no_cache, "on_progress": on_progress}
        plan = None
        if Path(program).suffix == ".json":
            _refuse(of_function, "nothing with a plan, which says all that is needed")
            plan = read_plan_file(Path(program))
        if plan is not None and plan.get("kind") == "embed":
            from rooftop.cli.compile import embed as compile_embed

            of_one_program = {"save": save, "perfetto": perfetto, "xprof": xprof, "report": report}
            _refuse(of_one_program, "nothing with a plan of embeddings: it has many programs")
            of_tables = compile_embed.compiled_tables(plan, check, how)
            return compile_embed.give(of_tables, top=listed, as_json=as_json, output=output)
        _refuse({"check": check}, "nothing but with a plan of embeddings: its programs run on SparseCores")
        how["save"] = save is not None
        if plan is not None:
            answer = _compiled_plan(program, plan, how)
        elif ":" in program:
            answer = _compiled_function(program, **of_function, how=how)
        else:
            raise RooftopError("program", program, "a plan.json written by rooftop plan, or module:function")
    files = {"report": output, "page": report, "executable": save, "timeline": perfetto, "profile": xprof}
    return _give(answer, top=listed, as_json=as_json, files=files)


def _refuse(options: Mapping[str, Any], accepted: str) -> None:
    """Raise RooftopError if one of the options is given."""
    from rooftop.core.errors import RooftopError

    names = {"slice_": "on", "arrays": "args"}
    for name, value in options.items():
        if value:
            raise RooftopError(names.get(name, name), str(value), accepted)


@contextmanager
def _progress_line(*, shown: bool) -> Iterator[Callable[[str, float], None] | None]:
    """What the compiler calls with what it is about: a line on stderr if that is a terminal."""
    if not (shown and sys.stderr.isatty()):
        yield None
        return

    def write(phase: str, elapsed_s: float) -> None:
        click.echo(f"\r{phase}: {elapsed_s:.0f} s\x1b[K", err=True, nl=False)

    try:
        yield write
    finally:
        click.echo("\r\x1b[K", err=True, nl=False)


def _compiled_plan(file: str, data: Mapping[str, Any], how: Mapping[str, Any]) -> CompiledReport | Refusal:
    plan = _training_plan(file, data)
    with uninterrupted():
        from rooftop.compiler.compiling import require_compiler

    require_compiler()
    from rooftop.explain.compiled.training import compile_plan

    return compile_plan(plan, **how)


def read_plan(file: Path) -> TrainingPlan:
    """The plan in a file. Raises RooftopError, in one line, for a file that is not there or is no plan."""
    return _training_plan(str(file), read_plan_file(file))


def _training_plan(file: str, data: Mapping[str, Any]) -> TrainingPlan:
    from rooftop.core.errors import RooftopError
    from rooftop.core.schemas import schema
    from rooftop.plan.training.plan import TrainingPlan

    kind = data.get("kind")
    if kind != "train":
        given = f"of kind {kind!r}" if "kind" in data else "without a kind"
        raise RooftopError("plan", file, f"a plan.json written by rooftop plan train or embed (this one is {given})")
    absent = [name for name in schema("plan")["required"] if name not in data]
    if absent:
        some = ", ".join(absent[:4]) + (f" and {len(absent) - 4} more" if len(absent) > 4 else "")
        raise RooftopError("plan", file, f"a plan.json written by rooftop plan (without {some})")
    return TrainingPlan.from_json(data)


def _compiled_function(
    name: str,
    *,
    arrays: tuple[str, ...],
    dims: str | None,
    mesh: str | None,
    slice_: str | None,
    layout: str | None,
    auto: bool,
    how: Mapping[str, Any],
) -> CompiledReport:
    from rooftop.arrays import Mesh
    from rooftop.core.errors import RooftopError
    from rooftop.hardware import Slice
    from rooftop.simulate.expressions import parse_sizes

    with uninterrupted():
        from rooftop.compiler.compiling import require_compiler

    require_compiler()
    from rooftop.explain.compiled.function import inspect, laid_mesh

    if slice_ is None:
        raise RooftopError("on", slice_, "a slice, such as v5e:4x4")
    where = Slice.parse(slice_)
    laid = laid_mesh(where, mesh) if layout is None else Mesh.from_layout(where, layout)
    if layout is not None and mesh is not None and laid.shape != laid_mesh(where, mesh).shape:
        raise RooftopError("layout", layout, f"a layout of the mesh {mesh}; this one is of {laid.shape}")
    return inspect(name, *arrays, on=where, mesh=laid, dims=parse_sizes(dims), auto=auto, **how)


def _give(answer: CompiledReport | Refusal, *, top: int, as_json: bool, files: Mapping[str, Path | None]) -> int:
    """Write what is asked for and print the answer. Raises Infeasible where that is no."""
    from rooftop.core.files import write_bytes, write_text
    from rooftop.explain.compiled.training import Refusal

    data = answer.to_json(top=top)
    if (output := files["report"]) is not None:
        write_text(output, json.dumps(data, indent=1, allow_nan=False) + "\n")
    if (page := files["page"]) is not None:
        from rooftop.present import html
        from rooftop.present.traced import compiled_document

        write_text(page, html.page(compiled_document(answer)))
    if not isinstance(answer, Refusal):
        if (save := files["executable"]) is not None:
            write_bytes(save, answer.compiled.executable or b"")
        _write_timeline(answer, files["timeline"], files["profile"])
    if as_json:
        emit_json(data)
    else:
        plan = None if answer.plan is None else answer.plan.to_json()
        if isinstance(answer, Refusal):
            show(data, {name: files[name] for name in ("report", "page")}, plan=plan)
        else:
            show(data, files, plan=plan, cached=answer.compiled.cached)
    if isinstance(answer, Refusal):
        raise answer.infeasible
    return 0


def _write_timeline(answer: CompiledReport, perfetto: Path | None, xprof: Path | None) -> None:
    from rooftop.compiler.machine.lanes import compiled_lanes

    compiled = answer.compiled
    if perfetto is not None:
        from rooftop.core.files import write_text
        from rooftop.core.timelines.perfetto import trace

        drawn = compiled_lanes(compiled.module, answer.timeline, title=compiled.module.name)
        write_text(perfetto, json.dumps(trace(drawn), allow_nan=False))
    if xprof is not None:
        from rooftop.core.timelines.xprof import write, xspace
        from rooftop.explain.measured.modules import hlo_proto
        from rooftop.roofline.rates import device_stats

        drawn = compiled_lanes(compiled.module, answer.timeline, every_trip=True)
        stats = device_stats(compiled.mesh.slice.chip)
        module = hlo_proto(compiled.hlo_text)
        write(xspace(drawn, program=compiled.module.name, device=stats, module=module), xprof, run="compiled")
