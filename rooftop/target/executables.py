"""Compilation of one lowered module for the target: the mesh that it names, XLA's result, and the cache of results.

A result that is in the cache comes with a ``RememberedExecutable``, which answers what JAX asks an executable of XLA.
"""

from __future__ import annotations

import hashlib
import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import msgspec
from jax._src import compiler
from jax._src.interpreters import mlir
from jaxlib import xla_client

from rooftop.compiler import cache as cache_module
from rooftop.compiler.cache import Cache, digest
from rooftop.compiler.compiling import CompiledProgram, WorkerResult
from rooftop.compiler.executables import MEMORY, compiled_program, read_reports, reporting_options
from rooftop.compiler.hlo.printing import written
from rooftop.compiler.memory import OutOfMemory, read_exceeded
from rooftop.compiler.partitioner import DriverLog
from rooftop.core.scratch import scratch_folder
from rooftop.hardware import Slice

_AXIS = re.compile(r'"([^"]+)"\s*=\s*(\d+)')


def axes_of_module(module: Any, devices: int) -> dict[str, int]:
    """Axes and sizes of the mesh over all ``devices`` that a lowered module names; one axis ``devices`` without any.

    Of several meshes it is the one with the most axes of more than one device.
    """
    meshes = []
    for operation in module.body.operations:
        if operation.operation.name == "sdy.mesh":
            text = str(operation.attributes["mesh"])
            axes = {name: int(size) for name, size in _AXIS.findall(text.partition("device_ids")[0])}
            # Devices in another order than those of the program cannot be counted by its numbers.
            if math.prod(axes.values()) == devices and "device_ids" not in text:
                meshes.append(axes)
    return max(meshes, key=lambda axes: sum(size > 1 for size in axes.values()), default={"devices": devices})


@dataclass(frozen=True, kw_only=True)
class CompiledModule:
    """XLA's result for a module; ``executable`` is None if there is none, and ``error`` then says why."""

    result: WorkerResult
    executable: Any
    cached: bool = False
    error: Exception | None = None


def compile_module(
    module: Any,
    devices: Any,
    *,
    slice_: Slice,
    what: str,
    options: Any,
    callbacks: Sequence[Any],
    lower_s: float,
    cache: bool,
) -> CompiledModule:
    """Compile a lowered ``module`` for described ``devices``; ``options`` are those of XLA's Python client.

    A program that does not fit in HBM is a result. Raises what XLA raises for other reasons.
    """
    for_gpus = slice_.chip.kind == "gpu"
    asked = {name: value for name, value in options.env_option_overrides}
    question = {
        # The module and its options are all that counts: no source file is read.
        "program": "rooftop.target",
        "module": hashlib.sha256(mlir.module_to_bytecode(module)).hexdigest(),
        "options": hashlib.sha256(options.SerializeAsString()).hexdigest(),
        "slice": slice_.name,
    }
    # The address of a callback stands in its module.
    store = Cache.of_user() if cache and not callbacks else None
    if store is not None and (entry := store.find(question)) is not None:
        remembered = RememberedExecutable.from_json(entry)
        if remembered is not None:
            return CompiledModule(result=remembered.result, executable=remembered, cached=True)
    start, log = time.perf_counter(), DriverLog()
    with scratch_folder("rooftop-dump-") as folder:
        options.env_option_overrides = [*asked.items(), *reporting_options(folder, for_gpus=for_gpus).items()]
        try:
            executable = compiler.backend_compile_and_load(devices[0].client, module, devices, options, callbacks)
        except jax.errors.JaxRuntimeError as error:
            exceeded = read_exceeded(str(error))
            if exceeded is None:
                raise
            no = OutOfMemory(what, needed_bytes=exceeded[0], available_bytes=exceeded[1], at_peak=read_reports(folder))
            return CompiledModule(result=WorkerResult.refused(no), executable=None, error=error)
        program = compiled_program(
            "\n\n".join(written(part) for part in executable.hlo_modules()),
            executable.get_compiled_memory_stats(),
            folder,
            lower_s=lower_s,
            compile_s=time.perf_counter() - start,
            for_gpus=for_gpus,
            options=asked,
            log=log.read(),
        )
    if for_gpus and program.peak_bytes > (usable := slice_.device_hbm_usable_bytes):
        # XLA:GPU compiles programs of any size; they end when they run.
        no = OutOfMemory(what, needed_bytes=program.peak_bytes, available_bytes=usable, at_peak=program.at_peak)
        too_large = jax.errors.JaxRuntimeError(f"RESOURCE_EXHAUSTED: {no}")
        return CompiledModule(result=WorkerResult.refused(no), executable=None, error=too_large)
    result = WorkerResult(program=program)
    if store is not None:
        remembered = RememberedExecutable.of(executable, result)
        # What was read from XLA's reports is valid as long as their reader is the same.
        reader = Path(cache_module.__file__).parent.rglob("*.py")
        store.keep(question, remembered.to_json(), {str(path): digest(path) for path in reader})
    return CompiledModule(result=result, executable=executable)


@dataclass(frozen=True, kw_only=True)
class RememberedExecutable:
    """An executable of XLA as far as JAX asks it: shardings of arguments and results, texts and statistics."""

    result: WorkerResult
    parameters: tuple[bytes, ...] | None
    results: tuple[bytes, ...] | None
    memory_kinds: tuple[str, ...]
    costs: Mapping[str, float]

    @classmethod
    def of(cls, executable: Any, result: WorkerResult) -> RememberedExecutable:
        """The remembered part of an executable of XLA."""
        return cls(
            result=result,
            parameters=_serialized(executable.get_parameter_shardings()),
            results=_serialized(executable.get_output_shardings()),
            memory_kinds=tuple(executable.get_output_memory_kinds()[0]),
            costs=_costs(executable),
        )

    def to_json(self) -> dict[str, Any]:
        """The executable as plain JSON values."""
        fields: dict[str, Any] = msgspec.to_builtins(self)
        return fields

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RememberedExecutable | None:
        """The inverse of ``to_json``; None for an entry of another version."""
        try:
            return msgspec.convert(data, cls)
        except msgspec.ValidationError:
            return None

    @property
    def _program(self) -> CompiledProgram:
        assert self.result.program is not None
        return self.result.program

    def get_parameter_shardings(self) -> list[Any] | None:
        """XLA's shardings of the arguments."""
        return _parsed(self.parameters)

    def get_output_shardings(self) -> list[Any] | None:
        """XLA's shardings of the results."""
        return _parsed(self.results)

    def get_output_memory_kinds(self) -> list[list[str]]:
        """The memory that each result is in."""
        return [list(self.memory_kinds)]

    def hlo_modules(self) -> list[Any]:
        """The optimised program. Only its text is known."""
        return [SimpleNamespace(to_string=lambda: self._program.hlo_text)]

    def get_compiled_memory_stats(self) -> Any:
        """Bytes by class."""
        sizes = {f"{name}_size_in_bytes": self._program.memory[name] for name in MEMORY}
        return SimpleNamespace(**sizes, peak_memory_in_bytes=self._program.peak_bytes)

    def cost_analysis(self) -> dict[str, float]:
        """XLA's own estimates."""
        return dict(self.costs)


def _costs(executable: Any) -> dict[str, float]:
    """XLA's own estimates; none from a compiler that has none, such as that for GPUs."""
    try:
        return {name: float(value) for name, value in (executable.cost_analysis() or {}).items()}
    except jax.errors.JaxRuntimeError:
        return {}


def _serialized(shardings: Sequence[Any] | None) -> tuple[bytes, ...] | None:
    return None if shardings is None else tuple(item.SerializeToString() for item in shardings)


def _parsed(texts: Sequence[bytes] | None) -> list[Any] | None:
    if texts is None:
        return None
    shardings = []
    for text in texts:
        sharding = xla_client.OpSharding()
        sharding.ParseFromString(text)
        shardings.append(sharding)
    return shardings
