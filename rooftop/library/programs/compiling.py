"""Plans and JAX functions through XLA:TPU or XLA:GPU, without a TPU or a GPU."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from rooftop.compiler.compiling import require_compiler
from rooftop.compiler.machine.lanes import compiled_lanes
from rooftop.compiler.sparsecore import parse_checks
from rooftop.core.errors import RooftopError
from rooftop.core.files import write_bytes, write_text
from rooftop.core.ledger import Ledger
from rooftop.core.timelines import perfetto, xprof
from rooftop.explain.compiled.report import CompiledReport
from rooftop.explain.embedding.compiled import EmbedRefusal, EmbedReport, compile_embed_plan
from rooftop.explain.embedding.programs import Compilation
from rooftop.explain.measured.modules import hlo_proto
from rooftop.hardware import Slice, is_slice
from rooftop.library.results import Result, flat, in_answer, ledger_rows
from rooftop.plan.embedding.plan import EmbedPlan
from rooftop.present.documents import document
from rooftop.requests.inputs import axes_of, chip_of, mesh_on, plan_of, recalibrated, seconds_of, slice_of
from rooftop.requests.likes import AxesLike, ChipLike, OptionsLike, PlanLike, SliceLike, TimeLike
from rooftop.requests.programs import ONLY_EMBEDDINGS, CheckProgram, Compile, Explain
from rooftop.requests.request import Request
from rooftop.roofline.rates import device_stats
from rooftop.runs.environment import uninterrupted
from rooftop.simulate.expressions import parse_sizes

if TYPE_CHECKING:
    from rooftop.arrays import Mesh
    from rooftop.explain.compiled.rooflines import OperationRoofline
    from rooftop.explain.compiled.training import Refusal
    from rooftop.present.document import Document

#: Callback of a compilation: the phase, and the seconds since it began.
_Progress = Callable[[str, float], None]


@dataclass(frozen=True, kw_only=True, repr=False)
class CompileResult(Result):
    """A program compiled ahead of time, next to its plan if it has one, or the refusal of one that does not fit."""

    report: CompiledReport | Refusal
    request: Request | None = None

    def to_json(self, *, top: int = 20) -> dict[str, object]:
        """Memory, FLOPs, collectives and times, planned and compiled; ``top`` operations and buffers."""
        return self.report.to_json(top=top) | in_answer(self.request)

    @property
    def ledger(self) -> Ledger:
        """The compiled ledger, by scope and phase; empty for a refusal."""
        return getattr(self.report, "ledger", Ledger(()))

    @property
    def rows(self) -> list[dict[str, object]]:
        """The compiled ledger; for a refusal the memory at the peak."""
        if self.refusal is None:
            return ledger_rows(self.ledger)
        return [flat(buffer.to_json()) for buffer in self.report.record().buffers]

    @property
    def summary(self) -> str:
        """The verdict."""
        return self.report.verdict

    @property
    def verdict(self) -> str:
        """One line: does the compiler agree with the plan, or what binds."""
        return self.report.verdict

    @property
    def refusal(self) -> Refusal | None:
        """The refusal of a program that does not fit; None for one that does."""
        return None if isinstance(self.report, CompiledReport) else self.report

    @property
    def cached(self) -> bool:
        """True if the program had been compiled before."""
        return self._program.compiled.cached

    def slowest(self, count: int) -> list[OperationRoofline]:
        """The operations that take the most time: FLOPs, bytes, intensity, bound, seconds, source."""
        return self._program.slowest(count)

    def raise_if_infeasible(self) -> None:
        """Raise Infeasible, with the nearest plan that should fit, if the program does not fit in HBM."""
        if self.refusal is not None:
            raise self.refusal.infeasible

    @property
    def _program(self) -> CompiledReport:
        self.raise_if_infeasible()
        assert isinstance(self.report, CompiledReport)
        return self.report

    @property
    def document(self) -> Document:
        """The compilation next to its plan, with both timelines."""
        from rooftop.present.traced import compiled_document

        return compiled_document(self.report)

    def write_executable(self, path: Path | str) -> None:
        """Write the executable of a compilation with ``save``, with the versions that compiled it."""
        write_bytes(Path(path), self._program.compiled.executable or b"")

    def write_perfetto(self, path: Path | str) -> None:
        """Write the compiled timeline for ui.perfetto.dev."""
        report = self._program
        lanes = compiled_lanes(report.compiled.module, report.timeline, title=report.compiled.module.name)
        write_text(Path(path), json.dumps(perfetto.trace(lanes), allow_nan=False))

    def write_xprof(self, folder: Path | str) -> None:
        """Write the compiled timeline as a profile for XProf and TensorBoard."""
        compiled = self._program.compiled
        lanes = compiled_lanes(compiled.module, self._program.timeline, every_trip=True)
        space = xprof.xspace(
            lanes,
            program=compiled.module.name,
            device=device_stats(compiled.mesh.slice.chip),
            module=hlo_proto(compiled.hlo_text),
        )
        xprof.write(space, Path(folder), run="compiled")


@dataclass(frozen=True, kw_only=True, repr=False)
class EmbedCompileResult(Result):
    """The programs of a plan of embeddings, compiled, or the refusal of a part that does not fit."""

    report: EmbedReport | EmbedRefusal
    request: Compile | None = None

    def to_json(self, *, top: int = 20) -> dict[str, object]:
        """Memory of each stack's programs and of whole steps, planned and compiled; ``top`` arrays of a heap."""
        return self.report.to_json(top=top) | in_answer(self.request)

    @property
    def rows(self) -> list[dict[str, object]]:
        """A stack's lookup or update a row; none for a refusal."""
        stacks = self.report.stacks if isinstance(self.report, EmbedReport) else ()
        return [flat(stack.to_json()) for stack in stacks]

    @property
    def document(self) -> Document:
        """Planned and compiled memory of each stack."""
        return document(self.report.record())

    @property
    def summary(self) -> str:
        """The verdict."""
        return self.report.verdict

    def raise_if_infeasible(self) -> None:
        """Raise Infeasible, with the largest limits that compile, if a part does not fit."""
        if isinstance(self.report, EmbedRefusal):
            raise self.report.infeasible


def plan_result(request: Compile, on_progress: _Progress | None = None) -> CompileResult | EmbedCompileResult:
    """Compile the program of a request's plan. Raises RooftopError for a plan that no program can run."""
    plan = recalibrated(plan_of(cast("PlanLike", request.program)), request.calibration)
    timeout_s = None if request.timeout is None else seconds_of(request.timeout, "timeout")
    if isinstance(plan, EmbedPlan):
        if request.save:
            raise RooftopError("save", True, "nothing with a plan of embeddings: it has many programs")
        require_compiler()
        checks = parse_checks(request.check)
        settings = Compilation(checks=checks, timeout_s=timeout_s, cache=request.cache, on_progress=on_progress)
        return EmbedCompileResult(report=compile_embed_plan(plan, settings), request=request)
    if request.check is not None:
        raise RooftopError("check", request.check, ONLY_EMBEDDINGS)
    plan.require_ours()
    require_compiler(plan.problem.slice.chip.kind)
    with uninterrupted():
        from rooftop.explain.compiled.training import compile_plan

    report = compile_plan(plan, timeout_s=timeout_s, cache=request.cache, save=request.save, on_progress=on_progress)
    return CompileResult(report=report, request=request)


def inspect(
    function: Callable[..., object] | str | object,
    *arguments: object,
    on: SliceLike | None = None,
    mesh: AxesLike | Mesh | None = None,
    layout: str | None = None,
    dims: Mapping[str, int] | str | None = None,
    auto: bool = False,
    compiler_options: OptionsLike | None = None,
    timeout: TimeLike | None = None,
    cache: bool = True,
    save: bool = False,
    on_progress: _Progress | None = None,
    **keywords: object,
) -> CompileResult:
    """Compile any JAX function ahead of time with XLA:TPU or XLA:GPU: its ledger, and a roofline of every operation.

    Args:
        function: A callable, or a Traced or Lowered stage of JAX, compiled in this process; or 'module:function',
            compiled in a process of its own.
        arguments: Arrays, 'bf16[8192_X, D_Y]' or anything with a shape and a dtype, in any pytree, and all else that
            the function takes: Python numbers, static arguments, modules.
        keywords: Arguments of the function by name, unless they are named as the options here.
        on: The slice; inside ``rooftop.target`` it is the target's.
        mesh: Mesh axes, 'X=4,Y=4', or a Mesh; the slice's own axes x, y, z by default. Arguments that are sharded over
            a mesh of ``rooftop.mesh``, or of the target, keep it.
        layout: Axes pinned to the torus, 'X=x,Y=y[1:2]+z'.
        dims: Sizes of the dims that arrays name, 'D=4096,F=16Ki'.
        auto: Leave axes to the partitioner, instead of JAX's explicit mode.
        compiler_options: Options of XLA by name, as ``jax.jit`` takes them.
        timeout: Seconds, or '10m', after which a compilation in its own process is given up.
        cache: Take the answer of an equal compilation from the cache.
        save: Keep the executable.
        on_progress: Callback (phase, seconds).

    Raises OutOfMemory, an Infeasible, for a program that does not fit in HBM, and RooftopError for a wrong argument and
    for a function that raises: the line names the user's own.
    """
    request = Compile(
        cast("str", function), on=_target_slice() if on is None else on, mesh=mesh, layout=layout, dims=dims, auto=auto,
        args=cast("tuple[str, ...]", arguments), compiler_options=compiler_options, timeout=timeout, cache=cache,
        save=save,
    )  # fmt: skip
    return function_result(request, keywords, on_progress)


def function_result(
    request: Compile | CheckProgram, keywords: Mapping[str, object] | None = None, on_progress: _Progress | None = None
) -> CompileResult:
    """Compile the function of a request, with ``keywords`` of its own."""
    slice_, mesh, dims = slice_of(request.required_slice()), request.mesh, request.dims
    require_compiler(slice_.chip.kind)
    with uninterrupted():
        from rooftop.explain.compiled import function as functions

    report = functions.inspect(
        request.program,
        *request.args,
        on=slice_,
        keywords=keywords or {},
        mesh=None if mesh is None and request.layout is None else mesh_on(slice_, mesh, request.layout),
        dims=parse_sizes(dims) if dims is None or isinstance(dims, str) else dims,
        auto=request.auto,
        options=request.compiler_options,
        timeout_s=None if request.timeout is None else seconds_of(request.timeout, "timeout"),
        cache=request.cache,
        save=isinstance(request, Compile) and request.save,
        on_progress=on_progress,
    )
    is_asked = isinstance(request, Compile) and not keywords
    return CompileResult(report=report, request=request if is_asked else None)


def _target_slice() -> Slice:
    """The slice of the target that this process is on. Raises RooftopError if it is on none."""
    session = sys.modules.get("rooftop.target.session")
    running = None if session is None else session.active()
    if running is None:
        raise RooftopError("on", None, "a slice, such as v5e:4x4")
    target: Slice = running.slice
    return target


def explain_module(path: Path | str, *, on: Slice | ChipLike, mesh: AxesLike | None = None) -> CompileResult:
    """Explain a compiled module alone: the ledger, the timeline and the operations that XLA has scheduled.

    Args:
        path: Text of an optimised module, its proto (*.hlo.pb), or a folder of ``--xla_dump_to``.
        on: The slice it is compiled for, or the kind of chip.
        mesh: Mesh axes in the order of partitions, 'X=2,Y=4'; by default those of its replica groups.

    Raises RooftopError for other files, and for a slice with another number of devices.
    """
    from rooftop.explain.compiled import module

    named = isinstance(on, str) and is_slice(on)
    hardware = on if isinstance(on, Slice) else Slice.parse(str(on)) if named else chip_of(on)
    sizes = None if mesh is None else axes_of(mesh)
    report = module.explain_module(Path(path), on=hardware, mesh=sizes)
    return CompileResult(report=report, request=Explain(path, on=on, mesh=mesh))
