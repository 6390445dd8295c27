"""Plans and JAX functions through XLA:TPU or XLA:GPU, without a TPU or a GPU."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

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
from rooftop.hardware import Slice
from rooftop.library.inputs import axes_of, chip_of, mesh_on, plan_of, recalibrated, seconds_of, slice_of
from rooftop.library.results import Result, flat, ledger_rows
from rooftop.plan.embedding.plan import EmbedPlan
from rooftop.present.documents import document
from rooftop.requests.likes import AxesLike, CalibrationLike, ChipLike, PlanLike, SliceLike, TimeLike
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

    def to_json(self, *, top: int = 20) -> dict[str, object]:
        """Memory, FLOPs, collectives and times, planned and compiled; ``top`` operations and buffers."""
        return self.report.to_json(top=top)

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

    def to_json(self, *, top: int = 20) -> dict[str, object]:
        """Memory of each stack's programs and of whole steps, planned and compiled; ``top`` arrays of a heap."""
        return self.report.to_json(top=top)

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


def compile(
    plan: PlanLike,
    *,
    calibration: CalibrationLike | None = None,
    check: str | None = None,
    timeout: TimeLike | None = None,
    cache: bool = True,
    save: bool = False,
    on_progress: _Progress | None = None,
) -> CompileResult | EmbedCompileResult:
    """Compile the program of a plan ahead of time with XLA:TPU or XLA:GPU, and set it next to the plan.

    Args:
        plan: A plan, the result that has it, the content of a plan.json, or its path.
        calibration: A calibration file of `rooftop calibrate`, or its fractions: they replace the catalogue's.
        check: Checks to build into a plan of embeddings: 'nan,bounds,buffers'.
        timeout: Seconds, or '10m', after which a compilation is given up.
        cache: Take the answer of an equal compilation from the cache.
        save: Keep the executable of a training plan.
        on_progress: Callback (phase, seconds).

    A program that does not fit is returned: ``raise_if_infeasible`` raises Infeasible for it. Raises RooftopError for a
    plan that no program can run, and for what the compiler refuses.
    """
    to_compile = recalibrated(plan_of(plan), calibration)
    timeout_s = None if timeout is None else seconds_of(timeout, "timeout")
    if isinstance(to_compile, EmbedPlan):
        if save:
            raise RooftopError("save", True, "nothing with a plan of embeddings: it has many programs")
        return _compile_embeddings(to_compile, check, timeout_s, cache, on_progress)
    if check is not None:
        raise RooftopError("check", check, "nothing but with a plan of embeddings: its programs run on SparseCores")
    require_compiler(to_compile.problem.slice.chip.kind)
    with uninterrupted():
        from rooftop.explain.compiled.training import compile_plan

    report = compile_plan(to_compile, timeout_s=timeout_s, cache=cache, save=save, on_progress=on_progress)
    return CompileResult(report=report)


def inspect(
    function: Callable[..., object] | str | object,
    *arguments: object,
    on: SliceLike | None = None,
    mesh: AxesLike | Mesh | None = None,
    layout: str | None = None,
    dims: Mapping[str, int] | str | None = None,
    auto: bool = False,
    compiler_options: Mapping[str, bool | int | str] | None = None,
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
    where = _target_slice() if on is None else slice_of(on)
    require_compiler(where.chip.kind)
    with uninterrupted():
        from rooftop.explain.compiled import function as functions

    report = functions.inspect(
        function,
        *arguments,
        on=where,
        keywords=keywords,
        mesh=None if mesh is None and layout is None else mesh_on(where, mesh, layout),
        dims=parse_sizes(dims) if dims is None or isinstance(dims, str) else dims,
        auto=auto,
        options=compiler_options,
        timeout_s=None if timeout is None else seconds_of(timeout, "timeout"),
        cache=cache,
        save=save,
        on_progress=on_progress,
    )
    return CompileResult(report=report)


def _target_slice() -> Slice:
    """The slice of the target that this process is on. Raises RooftopError if it is on none."""
    session = sys.modules.get("rooftop.target.session")
    running = None if session is None else session.active()
    if running is None:
        raise RooftopError("on", None, "a slice, such as v5e:4x4")
    where: Slice = running.slice
    return where


def _compile_embeddings(
    plan: EmbedPlan, check: str | None, timeout_s: float | None, cache: bool, on_progress: _Progress | None
) -> EmbedCompileResult:
    require_compiler()
    how = Compilation(checks=parse_checks(check), timeout_s=timeout_s, cache=cache, on_progress=on_progress)
    return EmbedCompileResult(report=compile_embed_plan(plan, how))


def explain_module(path: Path | str, *, on: Slice | ChipLike, mesh: AxesLike | None = None) -> CompileResult:
    """Explain a compiled module alone: the ledger, the timeline and the operations that XLA has scheduled.

    Args:
        path: Text of an optimised module, its proto (*.hlo.pb), or a folder of ``--xla_dump_to``.
        on: The slice it is compiled for, or the kind of chip.
        mesh: Mesh axes in the order of partitions, 'X=2,Y=4'; by default those of its replica groups.

    Raises RooftopError for other files, and for a slice with another number of devices.
    """
    from rooftop.explain.compiled import module

    named = isinstance(on, str) and ":" in on
    where = on if isinstance(on, Slice) else Slice.parse(str(on)) if named else chip_of(on)
    sizes = None if mesh is None else axes_of(mesh)
    return CompileResult(report=module.explain_module(Path(path), on=where, mesh=sizes))
