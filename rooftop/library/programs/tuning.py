"""A program or a plan made faster: tuned by compiling it, with other options and settings, again and again."""

from __future__ import annotations

import hashlib
import json
import resource
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from rooftop.compiler.compiling import compiler_versions, require_compiler
from rooftop.core.errors import RooftopError, one_of, unknown
from rooftop.core.files import cache_folder, write_json
from rooftop.core.quantities import parse_count, parse_quantity
from rooftop.library.programs.scripts import flops_of, steps_of
from rooftop.library.results import Result, flat, in_answer
from rooftop.library.serving import Progress
from rooftop.requests.function import of_request
from rooftop.requests.inputs import mesh_on, slice_of, training_plan_of
from rooftop.requests.likes import PlanLike
from rooftop.requests.programs import Tune, settings_of
from rooftop.runs.environment import uninterrupted
from rooftop.simulate.expressions import parse_sizes

if TYPE_CHECKING:
    from rooftop.present.document import Document
    from rooftop.tune.report import TuneReport
    from rooftop.tune.search import SearchLimits
    from rooftop.tune.subjects import Subject


#: Longest search.
_MOST_MINUTES = 7 * 24 * 60


@dataclass(frozen=True, kw_only=True, repr=False)
class TuneResult(Result):
    """A search that has ended: baseline and best, every trial in its rank, and the lines to paste."""

    report: TuneReport
    request: Tune | None = None

    def to_json(self) -> dict[str, object]:
        """Baseline, best, difference by scope, lines to paste, and every trial."""
        return self.report.to_json() | in_answer(self.request)

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


@of_request(Tune)
def tune(request: Tune, on_progress: Progress | None = None) -> TuneResult:
    """Search options of XLA, and changes of a plan, that make a step faster: by compiling, with no accelerator.

    By default proxies of a plan, of fewer layers, are used if fewer than eight whole compilations fit into the time,
    and if they compile faster. ``on_progress`` is called with trials that have ended, trials in all, and what is being
    compiled.

    Raises RooftopError for wrong fields and for a baseline that is refused, Infeasible if nothing that was tried fits.
    """
    from rooftop.tune.factors import SEARCHED, USUAL

    request.refuse_unused()
    search = request.search
    names = USUAL if search is None else tuple(search.split(",") if isinstance(search, str) else search)
    for name in names:
        if name not in SEARCHED:
            raise unknown("search", name, SEARCHED)
    estimates = cast('Literal["rooftop", "xla"]', one_of("estimates", request.estimates, ("rooftop", "xla")))
    minutes = request.minutes
    time_s = 60 * (parse_quantity(minutes, "minutes", largest=_MOST_MINUTES) if isinstance(minutes, str) else minutes)
    if not 0 < time_s <= 60 * _MOST_MINUTES:
        raise RooftopError("minutes", minutes, f"more than 0, {_MOST_MINUTES} at most")
    jobs = None if request.jobs is None else parse_count(request.jobs, "jobs")
    layers = request.layers
    few = 0 if layers == "all" else None if layers is None else parse_count(layers, "layers")
    subject = _subject(request)
    if few and subject.fewest_layers() is None:
        raise RooftopError("layers", str(layers), "nothing but with a plan of more layers than its smallest proxy")
    from rooftop.tune.compilations import usual_jobs
    from rooftop.tune.search import SearchLimits

    limits = SearchLimits(seconds=time_s, jobs=usual_jobs() if jobs is None else jobs, layers=few)
    return TuneResult(report=_searched(request, subject, names, limits, estimates, on_progress), request=request)


def _subject(request: Tune) -> Subject:
    """The program of a request, to tune. Raises RooftopError."""
    if request.is_plan:
        plan = training_plan_of(cast("PlanLike", request.program))
        plan.require_ours()
        require_compiler(plan.problem.slice.chip.kind)
        with uninterrupted():
            from rooftop.tune.subjects import TunedPlan
        return TunedPlan(plan=plan)
    settings = settings_of(request.vary or {})
    target = slice_of(request.required_slice())
    require_compiler(target.chip.kind)
    if request.form == "function":
        with uninterrupted():
            from rooftop.tune.subjects import TunedFunction
        dims = request.dims
        return TunedFunction(
            function=str(request.program),
            arrays=tuple(request.args),
            mesh=mesh_on(target, request.mesh, request.layout),
            dims=parse_sizes(dims) if dims is None or isinstance(dims, str) else dims,
            auto=request.auto,
            options=dict(request.compiler_options or {}),
            vary=settings,
        )
    words = tuple(cast("Sequence[str]", request.program))
    for name in settings:
        if "{" + name + "}" not in shlex.join(words):
            raise RooftopError("vary", name, f"a setting that the command has as {{{name}}}")
    with uninterrupted():
        from rooftop.tune.subjects import TunedScript
    return TunedScript(
        words=words, slice=target, steps=steps_of(request.steps), min_flops=flops_of(request.min_flops), vary=settings
    )


def _searched(
    request: Tune,
    subject: Subject,
    names: Sequence[str],
    limits: SearchLimits,
    estimates: Literal["rooftop", "xla"],
    on_progress: Progress | None,
) -> TuneReport:
    from rooftop.tune.report import TuneReport
    from rooftop.tune.search import Search
    from rooftop.tune.trials import TrialFile

    versions = compiler_versions(subject.slice.chip.kind)
    identity = {"program": subject.identity, "versions": versions}
    results = results_path(identity) if request.results is None else Path(request.results)
    file = TrialFile(results, identity, fresh=request.fresh)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    factors = subject.factors(names)
    search = Search(subject, factors, file, limits, estimates=estimates, cache=request.cache, on_progress=on_progress)
    searched = search.run()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return TuneReport(
        subject=subject, searched=searched, file=file, estimates=estimates, versions=versions, cpu_s=cpu_s
    )


def results_path(identity: Mapping[str, Any]) -> Path:
    """The file of trials in the user's cache."""
    key = hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode()).hexdigest()
    return cache_folder("tune") / f"{key[:32]}.jsonl"
