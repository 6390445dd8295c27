"""The compiler's result for a program: its text, its memory, and the reports that XLA writes while it compiles.

It needs no JAX: whoever compiles hands over what JAX returns.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from rooftop.compiler.compiling import CompiledProgram
from rooftop.compiler.hlo import text as hlo
from rooftop.compiler.memory import PeakMemory, read_memory
from rooftop.compiler.options import options_for
from rooftop.compiler.partitioner import rematerializations
from rooftop.compiler.targets import XLA_GPU

#: Parts of a program's memory that XLA counts.
MEMORY: tuple[str, ...] = ("argument", "output", "alias", "temp", "generated_code", "host_argument", "host_temp")


class MemoryStats(Protocol):
    """XLA's ``CompiledMemoryStats``; it has ``NAME_size_in_bytes`` for every name of ``MEMORY`` too."""

    peak_memory_in_bytes: int


def reporting_options(folder: Path | str, *, for_gpus: bool) -> dict[str, bool | int | str]:
    """Compiler options under which XLA writes its reports to ``folder``; for GPUs also those of absent devices."""
    absent = options_for("absent GPUs") if for_gpus else {}
    return {"xla_dump_to": str(folder), "xla_dump_hlo_as_text": True, **absent}


def compiled_program(
    text: str,
    memory: MemoryStats,
    folder: Path,
    *,
    lower_s: float,
    compile_s: float,
    for_gpus: bool,
    options: Mapping[str, bool | int | str],
    left_out: tuple[str, ...] = (),
    log: str = "",
) -> CompiledProgram:
    """The compiler's result, from the optimised program, XLA's memory statistics, its reports and its ``log``."""
    compiler = XLA_GPU if for_gpus else "libtpu"
    return CompiledProgram(
        hlo_text=text,
        peak_bytes=memory.peak_memory_in_bytes,
        memory={name: getattr(memory, f"{name}_size_in_bytes") for name in MEMORY},
        lower_s=lower_s,
        compile_s=compile_s,
        versions={name: importlib.metadata.version(name) for name in ("jax", "jaxlib", compiler)},
        options=options,
        left_out=left_out,
        at_peak=read_reports(folder),
        rematerialized=rematerializations(log, folder),
    )


def read_reports(folder: Path) -> PeakMemory | None:
    """Peak memory from the compiler's reports; None without reports (compiler options may redirect them)."""
    endings = ("-buffer-assignment.txt", "-live-range.txt", ".txt")
    names = [next(folder.glob(f"*after_optimizations{ending}"), None) for ending in endings]
    texts = [path.read_text(encoding="utf-8") for path in names if path is not None]
    if len(texts) < len(endings):
        return None
    assignment, live_ranges, module = texts
    return read_memory(assignment, live_ranges, hlo.parse(module))
