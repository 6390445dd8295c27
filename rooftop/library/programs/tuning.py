"""A program or a plan made faster: tuned by compiling it, with other options and settings, again and again."""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import json
import os
import resource
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rooftop.compiler.compiling import require_compiler
from rooftop.compiler.targets import XLA_GPU
from rooftop.core.errors import RooftopError, one_of, refuse, unknown
from rooftop.core.files import cache_folder, write_json
from rooftop.core.quantities import parse_count, parse_quantity
from rooftop.library.inputs import mesh_on, slice_of, training_plan_of
from rooftop.library.programs.scripts import flops_of
from rooftop.library.results import Result, flat
from rooftop.requests.likes import AxesLike, CountLike, PlanLike, SliceLike
from rooftop.runs.environment import uninterrupted
from rooftop.simulate.expressions import parse_sizes
from rooftop.target.running import STEPS

if TYPE_CHECKING:
    from rooftop.arrays import Mesh
    from rooftop.hardware import Slice
    from rooftop.present.document import Document
    from rooftop.tune.report import TuneReport
    from rooftop.tune.subjects import Subject


#: Values of a setting: a list, or 'a,b,c'; the first is that of the baseline.
VaryLike = Mapping[str, "Sequence[object] | str"]
#: Longest search.
_MOST_MINUTES = 7 * 24 * 60


@dataclass(frozen=True, kw_only=True, repr=False)
class TuneResult(Result):
    """A search that has ended: baseline and best, every trial in its rank, and the lines to paste."""

    report: TuneReport

    def to_json(self) -> dict[str, object]:
        """Baseline, best, difference by scope, lines to paste, and every trial."""
        return self.report.to_json()

    @property
    def rows(self) -> list[dict[str, object]]:
        """A trial a row, the fastest first."""
        return [flat(entry.to_json()) for entry in self.report.trials]

    @property
    def summary(self) -> str:
        """The verdict, and the lines to paste."""
        return "\n".join((self.report.verdict, *self.lines))

    @property
    def lines(self) -> tuple[str, ...]:
        """Lines that set the best: options of rooftop plan train, an environment variable, an argument of jax.jit."""
        return self.report.lines

    @property
    def compiler_options(self) -> dict[str, bool | int | str]:
        """The options of the compiler that the best adds, as ``jax.jit`` takes them."""
        return dict(self.report.searched.best.options)

    @property
    def document(self) -> Document:
        """The best, the lines that set it, what differs, and every trial."""
        from rooftop.present.documents import document

        return document(self.report.record())

    def write_plan(self, path: Path | str) -> None:
        """Write the plan of the best, to compile, train or launch it. Raises RooftopError if a plan was not tuned."""
        from rooftop.tune.subjects import TunedPlan

        subject = self.report.subject
        if not isinstance(subject, TunedPlan):
            raise RooftopError("save", str(path), "nothing but with a plan: other programs have none")
        write_json(Path(path), subject.changed(self.report.searched.setting).to_json())


def tune(
    program: PlanLike | Sequence[str],
    *arguments: str,
    on: SliceLike | None = None,
    mesh: AxesLike | Mesh | None = None,
    layout: str | None = None,
    dims: Mapping[str, int] | str | None = None,
    auto: bool = False,
    compiler_options: Mapping[str, bool | int | str] | None = None,
    vary: VaryLike | None = None,
    search: Sequence[str] | str | None = None,
    minutes: float | str = 10.0,
    jobs: CountLike | None = None,
    layers: CountLike | Literal["all"] | None = None,
    estimates: str = "rooftop",
    steps: CountLike | None = STEPS,
    min_flops: float | str | None = None,
    results: Path | str | None = None,
    fresh: bool = False,
    cache: bool = True,
    on_progress: Callable[[int, int, str], None] | None = None,
) -> TuneResult:
    """Search options of XLA, and changes of a plan, that make a step faster: by compiling, with no accelerator.

    Args:
        program: A training plan; 'module:function'; or the words of a command line, ['python', 'train.py'].
        arguments: Arrays of a function, in the notation.
        on: The slice of a function or a script.
        mesh: Mesh axes of a function.
        layout: Axes pinned to the torus, of a function.
        dims: Sizes of the dims that arrays name.
        auto: Leave axes to the partitioner, instead of JAX's explicit mode.
        compiler_options: Options of XLA of the baseline, of a function.
        vary: Values of a function's own keywords, or of ``{NAME}`` in the words of a script: {'block': [512, 1024]};
            the first is that of the baseline.
        search: What to vary of a plan: options, remat, microbatches, layout, mesh, switches, attention. By default all
            but attention.
        minutes: Time of the search.
        jobs: Compilations at a time; by default one for two processors.
        layers: Layers of proxies of a plan; 'all' for none. By default proxies are used if fewer than eight whole
            compilations fit into the time, and if they compile faster.
        estimates: Price computation by rooftop's curves, or by XLA's own cycles ('xla').
        steps: Stop a script after so many calls of one program; None runs it to its end.
        min_flops: Matmul FLOPs, over all devices, from which a jit of a script is compiled (see ``compile_script``).
        results: File of the trials, which the same search goes on from; by default one in the user's cache.
        fresh: Try all again.
        cache: Take the baseline from the cache of compilations.
        on_progress: Callback (trials that have ended, trials in all, what is being compiled).

    Raises RooftopError for wrong arguments and for a baseline that is refused, Infeasible if nothing that was tried
    fits.
    """
    from rooftop.tune.factors import SEARCHED, USUAL

    names = USUAL if search is None else tuple(search.split(",") if isinstance(search, str) else search)
    for name in names:
        if name not in SEARCHED:
            raise unknown("search", name, SEARCHED)
    price: Literal["rooftop", "xla"] = (
        "xla" if one_of("estimates", estimates, ("rooftop", "xla")) == "xla" else "rooftop"
    )
    time_s = 60 * (parse_quantity(minutes, "minutes", largest=_MOST_MINUTES) if isinstance(minutes, str) else minutes)
    if not 0 < time_s <= 60 * _MOST_MINUTES:
        raise RooftopError("minutes", minutes, f"more than 0, {_MOST_MINUTES} at most")
    count = max(1, (os.cpu_count() or 2) // 2) if jobs is None else parse_count(jobs, "jobs")
    few = 0 if layers == "all" else None if layers is None else parse_count(layers, "layers")
    settings = settings_of(vary or {})
    options = {"auto": auto, "compiler-option": compiler_options}
    of_function = {"args": arguments, "dims": dims, "mesh": mesh, "layout": layout, **options}
    subject: Subject
    if isinstance(program, str) and ":" in program and not program.endswith(".json"):
        subject = _function(program, arguments, on, mesh, layout, dims, auto, compiler_options, settings)
    elif isinstance(program, Sequence) and not isinstance(program, str):
        refuse(of_function, "nothing with a script, which has its own")
        subject = _script(program, on, steps, min_flops, settings)
    else:
        refuse({**of_function, "on": on, "vary": vary}, "nothing with a plan, which says all that is needed")
        plan = training_plan_of(program)
        require_compiler(plan.problem.slice.chip.kind)
        with uninterrupted():
            from rooftop.tune.subjects import TunedPlan
        subject = TunedPlan(plan=plan)
    if few and subject.fewest_layers() is None:
        raise RooftopError("layers", layers, "nothing but with a plan of more layers than its smallest proxy")
    return _searched(subject, names, time_s, count, few, price, results, fresh, cache, on_progress)


def _searched(
    subject: Subject,
    names: Sequence[str],
    time_s: float,
    jobs: int,
    layers: int | None,
    estimates: Literal["rooftop", "xla"],
    results: Path | str | None,
    fresh: bool,
    cache: bool,
    on_progress: Callable[[int, int, str], None] | None,
) -> TuneResult:
    from rooftop.tune.report import TuneReport
    from rooftop.tune.search import Search, SearchLimits
    from rooftop.tune.trials import TrialFile

    versions = _versions(subject.slice.chip.kind)
    identity = {"program": subject.identity, "versions": versions}
    file = TrialFile(results_path(identity) if results is None else Path(results), identity, fresh=fresh)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    search = Search(
        subject,
        subject.factors(names),
        file,
        SearchLimits(seconds=time_s, jobs=jobs, layers=layers),
        estimates=estimates,
        cache=cache,
        on_progress=on_progress,
    )
    searched = search.run()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    report = TuneReport(
        subject=subject, searched=searched, file=file, estimates=estimates, versions=versions, cpu_s=cpu_s
    )
    return TuneResult(report=report)


def results_path(identity: Mapping[str, Any]) -> Path:
    """The file of trials in the user's cache."""
    key = hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode()).hexdigest()
    return cache_folder("tune") / f"{key[:32]}.jsonl"


def settings_of(vary: VaryLike) -> dict[str, tuple[Any, ...]]:
    """Values of settings by name: numbers, true, false, or text. Raises RooftopError for fewer than two."""
    settings = {}
    for name, values in vary.items():
        every = tuple(map(_value, values.split(","))) if isinstance(values, str) else tuple(values)
        if not name.isidentifier():
            raise RooftopError("vary", name, "NAME=VALUE,VALUE with the name of a keyword")
        if len(every) < 2 or len(set(map(repr, every))) < len(every):
            raise RooftopError("vary", f"{name}={','.join(map(str, every))}", "two different values or more")
        settings[name] = every
    return settings


def _value(text: str) -> Any:
    text = text.strip()
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
    return value if isinstance(value, (int, float)) else text


def _slice_to_compile_for(on: SliceLike | None) -> Slice:
    if on is None:
        raise RooftopError("on", None, "a slice, such as v5e:4x4")
    where = slice_of(on)
    require_compiler(where.chip.kind)
    return where


def _function(
    name: str,
    arguments: Sequence[str],
    on: SliceLike | None,
    mesh: AxesLike | Mesh | None,
    layout: str | None,
    dims: Mapping[str, int] | str | None,
    auto: bool,
    options: Mapping[str, bool | int | str] | None,
    settings: Mapping[str, tuple[Any, ...]],
) -> Subject:
    where = _slice_to_compile_for(on)
    with uninterrupted():
        from rooftop.tune.subjects import TunedFunction
    return TunedFunction(
        function=name,
        arrays=tuple(arguments),
        mesh=mesh_on(where, mesh, layout),
        dims=parse_sizes(dims) if dims is None or isinstance(dims, str) else dims,
        auto=auto,
        options=dict(options or {}),
        vary=settings,
    )


def _script(
    words: Sequence[str],
    on: SliceLike | None,
    steps: CountLike | None,
    min_flops: float | str | None,
    settings: Mapping[str, tuple[Any, ...]],
) -> Subject:
    where = _slice_to_compile_for(on)
    text = shlex.join(words)
    for name in settings:
        if "{" + name + "}" not in text:
            raise RooftopError("vary", name, f"a setting that the command has as {{{name}}}")
    with uninterrupted():
        from rooftop.tune.subjects import TunedScript
    return TunedScript(
        words=tuple(words),
        slice=where,
        steps=None if steps is None else parse_count(steps, "steps"),
        min_flops=flops_of(min_flops),
        vary=settings,
    )


def _versions(kind: str) -> dict[str, str]:
    names = ("jax", "jaxlib", XLA_GPU if kind == "gpu" else "libtpu")
    return {name: importlib.metadata.version(name) for name in names}
