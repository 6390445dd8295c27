"""High-water marks of SparseCores' memory, which no memory analysis of the compiler includes.

libtpu writes them to its log if it is configured before it starts, so a separate worker compiles.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec

import msgspec

from rooftop.arrays import Mesh
from rooftop.compiler.cache import Cache
from rooftop.compiler.compiling import (
    Compiled,
    CompileRequest,
    Progress,
    WorkerResult,
    ask_worker,
    compile_ahead_of_time,
    require_compiler,
)
from rooftop.compiler.hlo.kernels import target
from rooftop.compiler.hlo.text import Instruction, Module
from rooftop.compiler.memory import OutOfMemory, read_exceeded
from rooftop.compiler.options import Options, options_for
from rooftop.core.errors import Infeasible, RooftopError, unknown
from rooftop.hardware import Chip, Slice
from rooftop.models.embedding_tables.limits import StackLimits, full_buffer
from rooftop.models.embedding_tables.tables import EmbeddingTable, Feature, Tables
from rooftop.plan.embedding.problem import per_device

#: Environment with which libtpu logs the marks.
LOGGING: Mapping[str, str] = {
    "LIBTPU_INIT_ARGS": "--xla_sc_enable_logging_memory_high_water_marks=true",
    "TPU_MIN_LOG_LEVEL": "0",
    "TPU_STDERR_LOG_LEVEL": "0",
}
#: ``Infeasible.what`` of limits that are too large.
TILE_MEMORY = "a SparseCore's tile memory"
#: The units of the log: HBM in granules of 8 floats, a tile's memory in words. Determined by varying single limits.
_HBM_UNIT, _TILE_UNIT = 32, 4
_MARK = re.compile(r"\] (HBM|TileSpmem) high water mark: (\d+)")
_NO_ROOM = re.compile(
    r"Can't fit a single row\.[^\n\")]*|Fixed size allocations[^\n\"]*|Gather operand too large[^\n\"]*"
    r"|E3001: [^\n)]*"
)
#: The message that rejects an update, and its code in the message's first line.
_NO_REPLICAS, _CODE = "No viable logical replica count", "E3001: CompileTimeSparseCoreInvalidReplicaCount"
#: The part of that message with the bytes available and needed.
_OF_REPLICAS = re.compile(
    _NO_REPLICAS
    + r"[^\n]*\bfixed_size_allocation_bytes = (\d+), row_dependent_size_allocation_bytes = (\d+), "
    + r"total_spmem_size_bytes = (\d+)"
)


@dataclass(frozen=True, kw_only=True)
class Marks:
    """The largest marks of a program's SparseCore computations, in bytes: HBM of one SparseCore, memory of one tile.

    For each SparseCore, the compiler reserves that HBM in addition to its memory analysis.
    """

    hbm_bytes: int
    tile_bytes: int
    compiled: Compiled


def read_marks(log: str) -> tuple[int, int] | None:
    """HBM of one SparseCore and memory of one tile, in bytes, from libtpu's log; None if it has no marks."""
    largest: dict[str, int] = {}
    for kind, mark in _MARK.findall(log):
        largest[kind] = max(largest.get(kind, 0), int(mark))
    return (largest["HBM"] * _HBM_UNIT, largest["TileSpmem"] * _TILE_UNIT) if len(largest) == 2 else None


def refusal(message: str) -> Infeasible | None:
    """The compiler's rejection as an error, if there was no space in a tile's memory or in HBM; None otherwise."""
    if counted := _OF_REPLICAS.search(message):
        unique, shared, room = map(int, counted.groups())
        by = f"{unique:,} bytes of unique ids and {shared:,} of ids, which replicas share, in a tile of {room:,}"
        return Infeasible(TILE_MEMORY, f"{_NO_REPLICAS}: {by}")
    if refused := _NO_ROOM.search(message):
        return Infeasible(TILE_MEMORY, refused.group().strip())
    if exceeded := read_exceeded(message):
        return OutOfMemory("a program", needed_bytes=exceeded[0], available_bytes=exceeded[1], at_peak=None)
    return None


def refuses_larger(no: Infeasible) -> bool:
    """True if larger limits are rejected too: the compiler's reason counts bytes that rise with them."""
    return no.what != TILE_MEMORY or no.by.startswith((_NO_REPLICAS, _CODE))


def compile_with_marks(
    request: CompileRequest, *, timeout_s: float | None = 600.0, cache: bool = True, on_progress: Progress | None = None
) -> Marks:
    """Compile ``request`` ahead of time and read the SparseCores' marks, unless the ``cache`` has them, or a rejection.

    Raises Infeasible if the compiler finds no space in a tile's memory (OutOfMemory: in HBM), and RooftopError if it
    rejects the program otherwise or the program has no SparseCore computation.
    """
    require_compiler()
    question, store = {**request.to_json(), "marks": True}, Cache.of_user()
    known = store.find(question) if cache else None
    if known is not None:
        return msgspec.convert(known, _MarkedResult).marks(request, cached=True)
    output = ask_worker(request, timeout_s=timeout_s, on_progress=on_progress, environment=LOGGING)
    answer = output.answer
    if answer is None or answer.result is None:
        no = refusal(output.log) or refusal("" if answer is None else str(answer.error))
        if no is None:
            raise output.failure
        marked = _MarkedResult(result=WorkerResult.refused(no))
    else:
        hbm_bytes, tile_bytes = read_marks(output.log) or (None, None)
        marked = _MarkedResult(result=answer.result, hbm_bytes=hbm_bytes, tile_bytes=tile_bytes)
    if cache and answer is not None and not marked.is_incomplete:
        store.keep(question, msgspec.to_builtins(marked), answer.sources)
    return marked.marks(request, cached=False)


@dataclass(frozen=True, kw_only=True)
class _MarkedResult:
    """A result and its marks, which a program without SparseCore computations has not."""

    result: WorkerResult
    hbm_bytes: int | None = None
    tile_bytes: int | None = None

    @property
    def is_incomplete(self) -> bool:
        """True for a program without marks."""
        return self.result.program is not None and self.hbm_bytes is None

    def marks(self, request: CompileRequest, *, cached: bool) -> Marks:
        """The program and its marks. Raises Infeasible if there is no program, RooftopError if it has no marks."""
        compiled = self.result.compiled(request.mesh, cached=cached)
        if self.hbm_bytes is None or self.tile_bytes is None:
            raise RooftopError("program", request.program, "one with a SparseCore computation")
        return Marks(hbm_bytes=self.hbm_bytes, tile_bytes=self.tile_bytes, compiled=compiled)


#: Compiler options with which a pipelined step overlaps.
PIPELINING_OPTIONS: Options = options_for("pipelined embeddings")
#: Opcodes of TensorCore computations; other opcodes move, name or wait.
_COMPUTES = ("fusion", "convolution", "dot", "reduce", "scatter", "gather", "sort", "all-reduce", "select-and-scatter")


@dataclass(frozen=True, kw_only=True)
class SparseCoreOverlap:
    """SparseCore calls of a step, its TensorCore computations, and those that run during a SparseCore call."""

    calls: int
    computations: int
    overlapped: int

    @property
    def share(self) -> float:
        """The share of the TensorCores' computations that overlaps SparseCore work, 0 to 1."""
        return self.overlapped / self.computations if self.computations else 0.0


def sparsecore_overlap(module: Module) -> SparseCoreOverlap:
    """Read the schedule of a compiled step, its outermost computation."""
    running, calls, computations, overlapped = set[str](), 0, 0, 0
    for instruction in module.computations[module.entry]:
        if _is_sparsecore(instruction, "call-start"):
            running.add(instruction.name)
            calls += 1
        elif instruction.opcode == "call-done":
            running -= set(instruction.operands)
        elif instruction.opcode in _COMPUTES:
            computations += 1
            overlapped += bool(running)
    return SparseCoreOverlap(calls=calls, computations=computations, overlapped=overlapped)


def embedding_calls(module: Module) -> int:
    """Calls of SparseCores that read or update rows of tables, and have no time in a schedule of TensorCores."""

    def embeds(name: str) -> bool:
        return module.remember("embeds", name, lambda: any(map(is_embedding, module.computations.get(name, ()))))

    def is_embedding(instruction: Instruction) -> bool:
        return target(instruction).startswith("Sparse") or any(map(embeds, instruction.called))

    every = (instruction for computation in module.computations.values() for instruction in computation)
    starts = (instruction for instruction in every if _is_sparsecore(instruction, "call-start"))
    return sum(any(map(embeds, instruction.called)) for instruction in starts)


def _is_sparsecore(instruction: Instruction, opcode: str) -> bool:
    return instruction.opcode == opcode and "sparse" in instruction.attribute("async_execution_thread")


#: Check -> compiler options. ``nan``: NaNs in data that SparseCores read and write; ``bounds``: accesses outside a
#: buffer (strided ones may be false alarms); ``buffers``: buffers changed by other cores, mismatched launches. All of
#: them cost time: use them to find a fault.
CHECKS: Mapping[str, Options] = {
    "nan": {"xla_sc_detect_nan": "true"},
    "bounds": {"xla_sc_assert_level": "bounds"},
    "buffers": {
        "xla_tpu_buffer_contents_sanitizer_config": (
            "cores_to_sanitize: [TC, SC_SCS, SC_TILE], sanitizer_mode: LOCAL_ONLY"
        ),
        "xla_tpu_verify_launch_id_across_cores": "true",
    },
}

PROGRAM = "rooftop.programs.embedding.lowering:lower_part"


def parse_checks(text: str | None) -> tuple[str, ...]:
    """Names of CHECKS from 'nan,bounds'. Raises RooftopError for an unknown name."""
    names = tuple(dict.fromkeys(name.strip() for name in (text or "").split(",") if name.strip()))
    for name in names:
        if name not in CHECKS:
            raise unknown("check", name, CHECKS)
    return names


def check_options(names: Iterable[str]) -> dict[str, bool | int | str]:
    """The compiler options of all these checks."""
    return {option: value for name in names for option, value in CHECKS[name].items()}


def smallest_slice(chip: Chip) -> Slice:
    """Four chips with SparseCores: the slice for trial compilations."""
    return Slice.parse(f"{chip.name}:{'2x2' if chip.ici_axes == 2 else '2x2x1'}")


def require_checks(
    names: Iterable[str],
    slice_: Slice,
    *,
    timeout_s: float | None = None,
    cache: bool = True,
    on_progress: Progress | None = None,
) -> None:
    """Try each check on a small lookup for ``slice_``. Raises RooftopError if the compiler does not support it."""
    for name in names:
        try:
            compile_ahead_of_time(
                _small(slice_, CHECKS[name]), timeout_s=timeout_s, cache=cache, on_progress=on_progress
            )
        except (RooftopError, Infeasible) as error:
            if isinstance(error, RooftopError) and error.field == "timeout_s":
                raise
            version = importlib.metadata.version("libtpu") if find_spec("libtpu") else "not installed"
            reason = " ".join(str(error).split())[-200:]
            accepted = f"a check that libtpu {version} knows, which does not take {', '.join(CHECKS[name])} ({reason})"
            raise RooftopError("check", name, accepted) from None


def _small(slice_: Slice, options: Options) -> CompileRequest:
    own = per_device(slice_)
    cores = own * slice_.devices
    tables = Tables(
        tables=(EmbeddingTable(name="t", vocabulary=8 * cores, width=8),), features=(Feature(name="f", table="t"),)
    )
    limits = StackLimits(max_ids=8, max_unique_ids=8, buffer=full_buffer(8, cores))
    return CompileRequest(
        mesh=Mesh.lay(slice_, {"data": slice_.devices}),
        program=PROGRAM,
        arguments={
            "tables": tables.to_json(),
            "cores_per_device": own,
            "batch": 8 * cores,
            "limits": {"t": vars(limits)},
            "part": "lookup",
            "kernel": "sparsecore",
        },
        options=options,
    )
