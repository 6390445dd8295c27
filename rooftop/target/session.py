"""A session in which JAX's devices are a described slice: jits are compiled and recorded, never executed.

Everything that JAX executes passes one function, ``pjit._pjit_call_impl_python``: calls of jitted functions and eager
operations alike, with arguments, shardings, donation and static arguments resolved. A session replaces it, and the
functions that put values on devices. The rest of JAX is as it is.
"""

from __future__ import annotations

import functools
import math
import re
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
from jax._src import api_util, array, compiler, config, core, dispatch, dtypes, pjit, traceback_util, xla_bridge
from jax._src.interpreters import mlir, pxla
from jax._src.lax import lax as lax_module
from jax._src.named_sharding import UnspecifiedValue
from jax._src.numpy import indexing
from jax.experimental.layout import Format
from jax.sharding import Mesh, NamedSharding, Sharding

from rooftop.compiler.devices import coordinates_of, described_devices
from rooftop.compiler.hlo.text import aliases
from rooftop.core.errors import RooftopError
from rooftop.core.quantities import format_bytes
from rooftop.hardware import Slice
from rooftop.target import computing as computing_module
from rooftop.target import executables, known, places, standin, written
from rooftop.target.computing import is_computing
from rooftop.target.executables import axes_of_module, compile_module
from rooftop.target.known import KnownPart, known_part
from rooftop.target.places import calling_place, place
from rooftop.target.records import LeftOutReason, NotCompiled, TargetProgram, TargetRecord
from rooftop.target.standin import SMALL, StandIn, array_of, is_known, stand_in, value_of
from rooftop.target.written import WrittenWork, bytes_of, jaxpr_of, replicated, result_shardings, written_work

#: Matrix FLOPs from which a jit is compiled, by default.
_MIN_FLOPS = 1e8
#: Bytes of the arguments of a user's own jit from which it is compiled without matmuls, though nothing is split.
_LARGE_ARGUMENTS = 1 << 20
#: Programs of one function that are compiled without matmuls: more of them differ in little.
_MOST_PROGRAMS = 8
#: Bytes of results whose shardings only XLA knows: from here on it is asked.
_ASK_XLA = 1 << 26
#: The name of HBM among the memories of a device.
_DEVICE_MEMORY = "device"
#: Changed arguments that are named.
_NAMED = 3

_SOURCE = re.compile(r" at (.+):(\d+)$")


class Finished(SystemExit):
    """The script called one program as often as was asked for."""

    def __init__(self) -> None:
        super().__init__(0)


@dataclass(frozen=True, kw_only=True)
class SessionOptions:
    """Compile jits of at least ``min_flops`` matrix FLOPs; stop after ``steps`` calls of one of them (None: never).

    Without ``min_flops`` the user's own jits are compiled too, if their arguments are split or large, or they have a
    ``shard_map``: gathers, sorts, updates of weights.
    """

    steps: int | None = None
    min_flops: float | None = None
    cache: bool = True


@dataclass(frozen=True, kw_only=True)
class _Argument:
    """An argument of a program, as far as it decides whether the program is compiled anew."""

    name: str
    type: str
    sharding: str
    committed: bool


@dataclass(kw_only=True)
class _Entry:
    """A traced program with its shardings: how it was compiled, and how often it was called."""

    jaxpr: Any
    shardings: Sequence[Sharding]
    known: KnownPart | None
    #: Positions of the arguments whose memory a result takes.
    donated: tuple[int, ...] = ()
    #: Index of the program in the session; None if it was not compiled.
    program: int | None = None
    #: True if the results are bound to their devices; None if that follows from the arguments.
    committed: bool | None = None


@dataclass(kw_only=True)
class _Call:
    """The call that is being compiled."""

    name: str
    source: str
    work: WrittenWork | None
    differs: tuple[str, ...]
    start: float
    #: False if XLA is only asked for shardings.
    recorded: bool = True
    program: int | None = None


@dataclass(kw_only=True)
class Session:
    """JAX on the described devices of ``slice``, between ``start`` and ``stop``."""

    slice: Slice
    options: SessionOptions = field(default_factory=SessionOptions)
    on_compile: Callable[[str], None] = lambda name: None
    on_program: Callable[[TargetProgram], None] = lambda program: None

    def __post_init__(self) -> None:
        self.devices = _host_by_host(self.slice)
        self.client = self.devices[0].client
        self._programs: list[TargetProgram] = []
        #: Parameters of each program whose memory a result takes, in order.
        self._aliased: list[tuple[int, ...]] = []
        self._reads: Counter[str] = Counter()
        self._not_compiled: Counter[tuple[str, str, LeftOutReason]] = Counter()
        #: Functions of JAX itself that the user has jitted, by JAX's words for their source.
        self._jitted: set[str] = set()
        #: Programs of each function that were compiled without matmuls.
        self._without_matmul: Counter[str] = Counter()
        self._arrays: weakref.WeakValueDictionary[int, StandIn] = weakref.WeakValueDictionary()
        self._notes: dict[str, None] = {}
        self._entries: dict[Any, _Entry] = {}
        #: Arguments of the last compilation of a function, by its source.
        self._last: dict[str, tuple[_Argument, ...]] = {}
        self._by_executable: dict[int, tuple[Any, int]] = {}
        self._thread = threading.local()
        self._undo = ExitStack()
        self._compiler_options: Mapping[str, bool | int | str] = {}

    @property
    def record(self) -> TargetRecord:
        """All that was compiled, and what was not."""
        return TargetRecord(
            programs=tuple(self._programs),
            reads=dict(self._reads),
            not_compiled=tuple(
                NotCompiled(name=name, source=source, reason=reason, count=count)
                for (name, source, reason), count in self._not_compiled.most_common()
            ),
            notes=tuple(self._notes),
        )

    # ---- a Reader

    def read(self, value: StandIn) -> None:
        """Count a read of an unknown value by the user's line."""
        self._reads[calling_place() or "unknown"] += 1

    def made(self, value: StandIn) -> None:
        """Keep account of an array as long as the script has it."""
        self._arrays[id(value)] = value

    # ---- calls of jits

    def call(
        self, *arguments: Any, jaxpr: Any, in_shardings: Any, out_shardings: Any, ctx_mesh: Any, name: str, **rest: Any
    ) -> tuple[list[Any], None, None, list[Any]]:
        """Stand-ins for the results of a jit, compiled at its first call if it is to be."""
        whole = {"jaxpr": jaxpr, "in_shardings": in_shardings, "out_shardings": out_shardings, "ctx_mesh": ctx_mesh}
        stand_ins = tuple(array_of(value) for value in arguments)
        for one in stand_ins:
            if one is not None:
                one.require()
        kinds = tuple(
            (value.sharding, value.committed) if isinstance(value, jax.Array) else None for value in arguments
        )
        knowledge = tuple(is_known(value) for value in arguments)
        key = (id(jaxpr), kinds, in_shardings, out_shardings)
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = self._first_call(arguments, name=name, rest=rest, **whole)
        elif entry.program is not None:
            self._count(entry.program)
        values = self._values(jaxpr, arguments, knowledge, name)
        committed = entry.committed
        if committed is None:
            committed = any(kind is not None and kind[1] for kind in kinds)
        results = [
            stand_in(
                aval,
                sharding,
                committed=committed or sharding.num_devices > 1,
                reader=self,
                known=values.get(at),
            )
            for at, (aval, sharding) in enumerate(zip(_out_avals(jaxpr), entry.shardings, strict=True))
        ]
        self._delete((stand_ins[at] for at in entry.donated), name)
        return results, None, None, []

    def _first_call(
        self,
        arguments: Sequence[Any],
        *,
        jaxpr: Any,
        in_shardings: Any,
        out_shardings: Any,
        ctx_mesh: Any,
        name: str,
        rest: dict[str, Any],
    ) -> _Entry:
        plain, constants = jaxpr_of(jaxpr)
        work = written_work(plain)
        source = _source(plain)
        shardings = result_shardings(plain, arguments, in_shardings, out_shardings, ctx_mesh)
        missing = [
            variable.aval for variable, sharding in zip(plain.outvars, shardings, strict=True) if sharding is None
        ]
        reason = self._left_out(plain, work, source, arguments, in_shardings)
        compiled = reason is None
        program = committed = None
        if compiled or bytes_of(missing) >= _ASK_XLA:
            described = _describe(plain, arguments, in_shardings)
            call = _Call(
                name=name,
                source=place(*_split(source)) if source else "",
                work=work,
                differs=self._difference(source or name, described) if compiled else (),
                start=time.perf_counter(),
                recorded=compiled,
            )
            for constant in constants:
                if isinstance(constant, StandIn) and constant.known is None:
                    self._note(
                        f"{call.source}: {name} closes over an array of {format_bytes(constant.nbytes)}, which "
                        "becomes a constant of ones: pass it as an argument"
                    )
            with self._calling(call):
                computation = pjit._resolve_and_lower(
                    [pjit.convert_to_metaty(value) for value in arguments],
                    jaxpr=jaxpr,
                    in_shardings=in_shardings,
                    out_shardings=out_shardings,
                    ctx_mesh=ctx_mesh,
                    name=name,
                    lowering_platforms=None,
                    lowering_parameters=mlir.LoweringParameters(),
                    pgle_profiler=None,
                    **rest,
                )
                executable = computation.compile()
                shardings = list(executable._out_shardings)
                # Arguments that are not used bind nothing: states of optimizers are made of them.
                committed = executable._unloaded_executable.committed
            program = call.program
            known_executable = self._by_executable.get(id(executable.xla_executable))
            if compiled and program is None and known_executable is not None:
                # The script has compiled it by hand before it calls it.
                program = known_executable[1]
                self._programs[program] = replace(
                    self._programs[program],
                    source=call.source,
                    matmul_flops=work.matmul_flops,
                    kernels=work.kernels,
                    called_from=calling_place(),
                )
                self._count(program)
        elif reason is not None:
            line = "" if not source or places.is_of_jax(source) else place(*_split(source))
            self._not_compiled[name, line, reason] += 1
        fill = replicated(arguments, shardings)
        placed = [sharding or fill for sharding in shardings]
        donated = written.donated(plain, arguments, placed, rest["donated_invars"])
        return _Entry(jaxpr=jaxpr, shardings=placed, known=None, program=program, donated=donated, committed=committed)

    def _left_out(
        self, jaxpr: Any, work: WrittenWork, source: str, arguments: Sequence[Any], in_shardings: Sequence[Any]
    ) -> LeftOutReason | None:
        """The reason why a program is not compiled; None if it is."""
        least = self.options.min_flops
        if work.kernels or work.matmul_flops >= (_MIN_FLOPS if least is None else least):
            return None
        if least is not None:
            return "flops"
        if not self._is_explicit(jaxpr, work, source):
            return "operation"
        placed = [getattr(value, "sharding", None) for value in arguments]
        split = work.devices > 1 or any(_is_split(sharding) for sharding in (*placed, *in_shardings))
        if not split and bytes_of(variable.aval for variable in jaxpr.invars) < _LARGE_ARGUMENTS:
            # Programs that make weights from a key take XLA minutes, and say little.
            return "small"
        self._without_matmul[source] += 1
        return "repeated" if self._without_matmul[source] > _MOST_PROGRAMS else None

    def _is_explicit(self, jaxpr: Any, work: WrittenWork, source: str) -> bool:
        """True for a program that somebody has jitted, and not an operation or a helper of JAX."""
        # The function of a pmap is JAX's own wrapper around the user's. Parts of an eager shard_map have no source.
        stated = bool(source) and (not places.is_of_jax(source) or work.devices > 1)
        return stated or str(jaxpr.debug_info.func_src_info) in self._jitted

    def _delete(self, donated: Iterable[StandIn | None], name: str) -> None:
        """Delete the arrays that a call of ``name`` was given to keep."""
        place_ = ""
        for one in donated:
            if one is not None:
                place_ = place_ or calling_place() or "unknown"
                one.delete(f"donated to {name} at {place_}")

    def _values(self, jaxpr: Any, arguments: Sequence[Any], knowledge: tuple[bool, ...], name: str) -> dict[int, Any]:
        """Small results that follow from known arguments, by position."""
        key = (id(jaxpr), knowledge)
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = _Entry(jaxpr=jaxpr, shardings=(), known=known_part(jaxpr, knowledge))
        if entry.known is None:
            return {}
        try:
            return entry.known.values(arguments)
        except Exception as error:  # an equation that the CPU does not have: its results stay unknown
            entry.known = None
            reason = str(error).splitlines()[0] if str(error) else ""
            self._note(f"small values of {name} are not computed ({type(error).__name__}: {reason})")
            return {}

    def _difference(self, function: str, arguments: tuple[_Argument, ...]) -> tuple[str, ...]:
        """Differences from the last compilation of a function; () for the first."""
        last = self._last.get(function)
        self._last[function] = arguments
        return () if last is None else differences(last, arguments)

    def _count(self, program: int) -> None:
        """Count a call of a compiled program. Raises Finished after the last one that is asked for."""
        calls = self._programs[program].calls + 1
        if self.options.steps is not None and calls > self.options.steps:
            raise Finished
        self._programs[program] = functools.partial(_with_calls, self._programs[program])(calls)

    def _note(self, text: str) -> None:
        self._notes[text] = None

    # ---- compilation

    @contextmanager
    def compiling_with(self, options: Mapping[str, bool | int | str]) -> Iterator[None]:
        """Compile with these options of the compiler, in addition to those of the program."""
        before, self._compiler_options = self._compiler_options, {**self._compiler_options, **options}
        try:
            yield
        finally:
            self._compiler_options = before

    @contextmanager
    def _calling(self, call: _Call) -> Iterator[None]:
        before = getattr(self._thread, "call", None)
        self._thread.call = call
        try:
            yield
        finally:
            self._thread.call = before

    def compile(self, module: Any, options: Any, callbacks: Sequence[Any], devices: Any) -> Any:
        """Compile a lowered module for described devices, and record it. Raises XLA's error for one that is refused."""
        call: _Call | None = getattr(self._thread, "call", None)
        symbol = str(module.operation.attributes["sym_name"]).strip('" ').removeprefix("jit_")
        symbol = "<lambda>" if symbol.strip("_ ") == "lambda" else symbol
        name, start = (symbol, time.perf_counter()) if call is None else (call.name, call.start)
        self.on_compile(name)
        options.env_option_overrides = [*options.env_option_overrides, *self._compiler_options.items()]
        compiled = compile_module(
            module,
            devices,
            slice_=self.slice,
            what=f"{name} on {self.slice.name}",
            options=options,
            callbacks=callbacks,
            lower_s=time.perf_counter() - start,
            cache=self.options.cache,
        )
        if call is None or call.recorded:
            program = TargetProgram(
                name=name,
                source="" if call is None else call.source,
                called_from=calling_place(),
                calls=0 if call is None else 1,
                matmul_flops=None if call is None or call.work is None else call.work.matmul_flops,
                kernels=0 if call is None or call.work is None else call.work.kernels,
                differs=() if call is None else call.differs,
                axes=axes_of_module(module, len(devices)),
                places=tuple(coordinates_of(list(devices), self.slice)),
                result=compiled.result,
                cached=compiled.cached,
            )
            self._programs.append(program)
            self.on_program(program)
            text = "" if program.result.program is None else program.result.program.hlo_text
            self._aliased.append(tuple(sorted(set(aliases(text).values()))))
            at = len(self._programs) - 1
            self._by_executable[id(compiled.executable)] = (compiled.executable, at)
            if call is not None:
                call.program = at
        if compiled.error is not None:
            raise compiled.error
        return compiled.executable

    def program_of(self, stage: Any) -> TargetProgram | None:
        """The program of a ``jax.stages.Compiled``, or of a wrapper around it; None if it was compiled before."""
        stage = getattr(stage, "compiled", stage)
        executable = getattr(getattr(stage, "_executable", None), "xla_executable", None)
        entry = self._by_executable.get(id(executable))
        return None if entry is None else self._programs[entry[1]]

    def call_compiled(self, executable: Any, arguments: Sequence[Any]) -> list[Any]:
        """Stand-ins for the results of a program that was compiled ahead of time."""
        loaded = executable._unloaded_executable
        entry = self._by_executable.get(id(loaded.xla_executable))
        taken = [array_of(arguments[at]) for at in sorted(executable._kept_var_idx)]
        for one in taken:
            if one is not None:
                one.require()
        if entry is not None:
            self._count(entry[1])
            program = self._programs[entry[1]]
            # Constants that a program closes over are its first parameters.
            first = len(loaded.input_avals) - len(taken)
            numbers = (number - first for number in self._aliased[entry[1]] if number >= first)
            self._delete((taken[number] for number in numbers), program.name)
        return [
            stand_in(aval, sharding, committed=loaded.committed, reader=self)
            for aval, sharding in zip(loaded.output_avals, loaded.output_shardings, strict=True)
        ]

    # ---- values on devices

    def put(self, value: Any, device: Any) -> Any:
        """A stand-in for ``value`` on a device, or split by a sharding."""
        target = device.sharding if isinstance(device, Format) else device
        if isinstance(value, StandIn):
            value.require()
        if target is None and isinstance(value, jax.Array):
            return value
        aval = core.shaped_abstractify(value)
        if target is None or isinstance(target, Sharding):
            sharding = target or jax.sharding.SingleDeviceSharding(self._default_device())
        else:
            sharding = jax.sharding.SingleDeviceSharding(target)
        # JAX's own error for a shape that does not divide.
        sharding.shard_shape(aval.shape)
        return stand_in(aval, sharding, committed=target is not None, reader=self, known=_host_value(value, aval))

    def stand_in_for(self, shape: jax.ShapeDtypeStruct) -> Any:
        """A stand-in of a shape, a dtype and a sharding; without one it is on one device, and not placed."""
        sharding = shape.sharding or jax.sharding.SingleDeviceSharding(self._default_device())
        aval = core.ShapedArray(shape.shape, shape.dtype, weak_type=bool(shape.weak_type))
        return stand_in(aval, sharding, committed=shape.sharding is not None, reader=self)

    def put_shards(self, aval: Any, sharding: Any, shards: Sequence[Any], committed: bool) -> Any:
        """A stand-in for an array of ``shards``; its value is known if one of them is all of it."""
        whole = bool(len(shards)) and getattr(shards[0], "shape", None) == aval.shape
        value = _host_value(shards[0], aval) if whole else None
        return stand_in(aval, sharding, committed=committed, reader=self, known=value)

    def from_callback(self, shape: Sequence[int], sharding: Any, callback: Callable[..., Any], dtype: Any) -> Any:
        """A stand-in for an array that a callback fills: of a large one it is asked for the first shard only."""
        sharding = sharding.sharding if isinstance(sharding, Format) else sharding
        shape, part = tuple(shape), tuple(sharding.shard_shape(tuple(shape)))
        small = math.prod(shape) <= SMALL
        value: Any = None
        aval: Any = None
        known = small
        indices = {str(index): index for index in sharding.devices_indices_map(shape).values()}
        for index in indices.values() if small else [next(iter(indices.values()))]:
            data = callback(index)
            first = core.shaped_abstractify(data)
            if first.shape != part:
                asked = f"{part} for the shard {index} of {shape}"
                raise ValueError(f"make_array_from_callback: the callback returned an array of {first.shape}; {asked}")
            aval = aval or core.ShapedArray(shape, dtypes.canonicalize_dtype(dtype or first.dtype))
            known = known and is_known(data) and not dtypes.issubdtype(aval.dtype, dtypes.extended)
            if known:
                value = np.empty(shape, aval.dtype) if value is None else value
                value[index] = np.asarray(value_of(data))
        return stand_in(aval, sharding, committed=True, reader=self, known=value if known else None)

    def from_shards(self, shape: Sequence[int], sharding: Any, shards: Any, dtype: Any) -> Any:
        """A stand-in for an array of shards on devices."""
        shards = list(shards)
        aval = core.ShapedArray(tuple(shape), dtype or shards[0].dtype)
        return self.put_shards(aval, sharding, shards if sharding.is_fully_replicated else (), True)

    # ---- devices

    def memory_stats(self, device: Any) -> dict[str, int]:
        """The memory of a device in a TPU runtime's words: the script's arrays, and programs at their peak."""
        sizes = [
            math.prod(one.sharding.shard_shape(one.shape)) * one.dtype.itemsize
            for one in list(self._arrays.values())
            if not one.is_deleted()
            and device in one.sharding.device_set
            and one.sharding.memory_kind in (None, _DEVICE_MEMORY)
        ]
        compiled = [program.result.program for program in self._programs]
        in_use, limit = sum(sizes), int(self.slice.device_hbm_usable_bytes)
        return {
            "num_allocs": len(sizes),
            "bytes_in_use": in_use,
            "peak_bytes_in_use": int(max([in_use, *(one.peak_bytes for one in compiled if one is not None)])),
            "largest_alloc_size": max(sizes, default=0),
            "bytes_limit": limit,
            "bytes_reserved": 0,
            "peak_bytes_reserved": 0,
            "bytes_reservable_limit": limit,
            "largest_free_block_bytes": max(0, limit - in_use),
        }

    def _default_device(self) -> Any:
        chosen: Any = config.default_device.value
        return chosen if chosen is not None and not isinstance(chosen, str) else self.devices[0]

    # ---- start and stop

    def start(self) -> None:
        """Put the session in the place of JAX's devices. Raises RooftopError if another one is."""
        if _active:
            raise RooftopError("target", self.slice.name, "one target at a time; this process is on another one")
        _active.append(self)
        standin.register()
        # Programs of the other devices, and JAX's fast paths to them, know nothing of this session.
        jax.clear_caches()
        before = dict(xla_bridge._backends), xla_bridge._default_backend
        cpu = jax.devices("cpu")
        with xla_bridge._backend_lock:
            xla_bridge._backends[self.client.platform] = self.client
            xla_bridge._default_backend = self.client
        xla_bridge.get_backend.cache_clear()
        self._undo.callback(_restore_backends, *before)
        for owner, name, function in self._replacements(cpu):
            self._undo.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, function)

    def stop(self) -> None:
        """Give JAX its devices back."""
        if self in _active:
            _active.remove(self)
            self._undo.close()
            jax.clear_caches()

    def __enter__(self) -> Session:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def _replacements(self, cpu: Sequence[Any]) -> Iterator[tuple[Any, str, Any]]:
        """(module or class, name, function in its place)."""

        def instead(original: Any, own: Callable[..., Any], passes: Callable[..., bool]) -> Any:
            @functools.wraps(original)
            def replaced(*arguments: Any, **keywords: Any) -> Any:
                if is_computing() or passes(*arguments, **keywords):
                    return original(*arguments, **keywords)
                return own(*arguments, **keywords)

            return replaced

        def never(*arguments: Any, **keywords: Any) -> bool:
            return False

        jit = pjit._pjit_call_impl_python

        @functools.wraps(jit)
        def call(*arguments: Any, **keywords: Any) -> Any:
            if is_computing():
                return jit(*map(value_of, arguments), **keywords)
            return self.call(*arguments, **keywords)

        put = dispatch._device_put_impl

        @functools.wraps(put)
        def put_one(value: Any, *, device: Any, src: Any, copy: Any, aval: Any) -> Any:
            if is_computing():
                return put(value_of(value), device=device, src=src, copy=copy, aval=aval)
            if isinstance(device, core.MemorySpace):
                return put(value, device=device, src=src, copy=copy, aval=aval)
            return self.put(value, device)

        yield pjit, "_pjit_call_impl_python", call
        yield dispatch, "_device_put_impl", put_one
        yield (
            pxla,
            "batched_device_put",
            instead(
                pxla.batched_device_put,
                lambda aval, sharding, xs, devices, committed=True, **rest: self.put_shards(
                    aval, sharding, xs, committed
                ),
                lambda aval, sharding, *rest, **more: _on_cpu(sharding),
            ),
        )
        yield (
            compiler,
            "compile_or_get_cached",
            instead(
                compiler.compile_or_get_cached,
                lambda backend, computation, devices, compile_options, host_callbacks, executable_devices, *rest: (
                    self.compile(computation, compile_options, host_callbacks, executable_devices)
                ),
                lambda backend, *rest: backend is not self.client,
            ),
        )
        yield (
            pxla.MeshExecutable,
            "call",
            instead(
                pxla.MeshExecutable.call,
                lambda executable, *arguments: self.call_compiled(executable, arguments),
                lambda executable, *rest: not self._owns(executable),
            ),
        )
        yield (
            pxla.MeshExecutable,
            "create_cpp_call",
            instead(
                pxla.MeshExecutable.create_cpp_call,
                lambda executable, params: None,
                lambda executable, params: not self._owns(executable),
            ),
        )
        from_callback = instead(
            array.make_array_from_callback,
            lambda shape, sharding, data_callback, dtype=None: self.from_callback(
                shape, sharding, data_callback, dtype
            ),
            lambda shape, sharding, *rest, **more: _on_cpu(getattr(sharding, "sharding", sharding)),
        )
        from_shards = instead(
            array.make_array_from_single_device_arrays,
            lambda shape, sharding, arrays, *, dtype=None: self.from_shards(shape, sharding, arrays, dtype),
            lambda shape, sharding, *rest, **more: _on_cpu(sharding),
        )
        for module in (array, jax):
            yield module, "make_array_from_callback", from_callback
            yield module, "make_array_from_single_device_arrays", from_shards
        original_devices, original_local = xla_bridge.devices, xla_bridge.local_devices
        original_count = xla_bridge.local_device_count

        # Signatures stay: the next look at JAX's internals passes as the first one.
        @functools.wraps(original_devices)
        def devices(backend: Any = None) -> list[Any]:
            if self._means(backend):
                return list(self.devices)
            listed: list[Any] = original_devices(backend)
            return listed

        @functools.wraps(original_local)
        def local_devices(process_index: Any = None, backend: Any = None, host_id: Any = None) -> list[Any]:
            if self._means(backend):
                return list(self.devices)
            others: list[Any] = original_local(process_index, backend, host_id)
            return others

        @functools.wraps(original_count)
        def local_device_count(backend: Any = None) -> int:
            return len(self.devices) if self._means(backend) else original_count(backend)

        def process_count(backend: Any = None) -> int:
            return 1

        original_arrays: Any = jax.live_arrays

        @functools.wraps(original_arrays)
        def live_arrays(platform: Any = None) -> list[Any]:
            if self._means(platform):
                return [one for one in list(self._arrays.values()) if not one.is_deleted()]
            arrays: list[Any] = original_arrays(platform)
            return arrays

        for module in (xla_bridge, jax):
            yield module, "devices", devices
            yield module, "local_devices", local_devices
            yield module, "local_device_count", local_device_count
            yield module, "process_count", process_count

        def initialize(*arguments: Any, **keywords: Any) -> None:
            self._note("jax.distributed.initialize does nothing here: one process has the whole slice")

        yield jax.distributed, "initialize", initialize
        original_jit: Any = jax.jit

        @functools.wraps(original_jit)
        def jit_(*arguments: Any, **keywords: Any) -> Any:
            if not places.is_own(sys._getframe(1).f_code.co_filename):
                return original_jit(*arguments, **keywords)
            if not arguments:
                # A decorator with options.
                return lambda function: jit_of(original_jit(**keywords), function)
            return jit_of(lambda function: original_jit(function, *arguments[1:], **keywords), arguments[0])

        def jit_of(decorate: Callable[[Any], Any], function: Any) -> Any:
            self._jitted.add(api_util.fun_sourceinfo(function))
            return decorate(function)

        yield jax, "jit", jit_
        yield jax, "live_arrays", live_arrays
        # XLA counts memory of local devices.
        device_class: Any = jax.Device
        original_stats, original_number = device_class.memory_stats, device_class.local_hardware_id
        described = set(self.devices)
        yield (
            device_class,
            "memory_stats",
            lambda device: self.memory_stats(device) if device in described else original_stats(device),
        )
        yield (
            device_class,
            "local_hardware_id",
            property(lambda device: device.id if device in described else original_number.__get__(device)),
        )
        # These modules ask what is an array of JAX, to keep its sharding in zeros_like and in slices.
        for module in (lax_module, indexing):
            yield module, "array", _ArrayModule(module.array)

    def _means(self, backend: Any) -> bool:
        """True if ``backend`` names the described devices."""
        return not is_computing() and (
            backend in (None, self.client, self.client.platform)
            or (backend == "cuda" and self.slice.chip.kind == "gpu")
        )

    def _owns(self, executable: Any) -> bool:
        return getattr(executable._unloaded_executable, "backend", None) is self.client


class _ArrayModule:
    """The module ``jax._src.array`` as another module sees it: a stand-in is an array of JAX."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self.ArrayImpl = (module.ArrayImpl, StandIn)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


#: The session in this process, if there is one.
_active: list[Session] = []


def active() -> Session | None:
    """The session that this process is in."""
    return _active[0] if _active else None


def differences(last: Sequence[_Argument], now: Sequence[_Argument]) -> tuple[str, ...]:
    """Differences between the arguments of two compilations of a function, a line for each kind."""
    if [argument.name for argument in last] != [argument.name for argument in now]:
        return (f"{len(now)} arguments instead of {len(last)}, or others",)
    lines = []
    for title, name in (("type", "type"), ("sharding", "sharding"), ("placement", "committed")):
        changed = [
            (before, after)
            for before, after in zip(last, now, strict=True)
            if getattr(before, name) != getattr(after, name)
        ]
        if not changed:
            continue
        named = []
        for before, after in changed[:_NAMED]:
            old, new = (_placement(value) if name == "committed" else getattr(value, name) for value in (before, after))
            named.append(f"{after.name} {old} -> {new}")
        count = f"{title} of {len(changed)} argument{'s' if len(changed) > 1 else ''}"
        lines.append(f"{count}: {'; '.join(named)}{', ...' if len(changed) > _NAMED else ''}")
    return tuple(lines) or ("a static argument, or a value that the function closes over",)


def _placement(argument: _Argument) -> str:
    return "placed" if argument.committed else "not placed"


def _with_calls(program: TargetProgram, calls: int) -> TargetProgram:
    return TargetProgram(**{**vars(program), "calls": calls})


def _host_by_host(slice_: Slice) -> tuple[Any, ...]:
    """The devices of one process, in the order in which a job on many hosts lists them."""
    if slice_.chip.kind == "gpu":
        return described_devices(slice_)
    by_number = {device.id: device for device in described_devices(slice_, one_process=True)}
    return tuple(by_number[device.id] for device in described_devices(slice_))


def _restore_backends(backends: dict[str, Any], default: Any) -> None:
    with xla_bridge._backend_lock:
        xla_bridge._backends.clear()
        xla_bridge._backends.update(backends)
        xla_bridge._default_backend = default
    xla_bridge.get_backend.cache_clear()


def _is_split(sharding: Any) -> bool:
    """True for a sharding of which each device has a part."""
    return isinstance(sharding, Sharding) and sharding.num_devices > 1 and not sharding.is_fully_replicated


def _on_cpu(sharding: Any) -> bool:
    """True for a sharding over local devices."""
    if isinstance(sharding, NamedSharding) and not isinstance(sharding.mesh, Mesh):
        return False
    return all(device.platform == "cpu" for device in sharding.device_set)


def _host_value(value: Any, aval: Any) -> Any | None:
    """A small value, as the CPU computes with it; None if it is large or not known."""
    if not is_known(value) or aval.size > SMALL:
        return None
    plain = value_of(value)
    if dtypes.issubdtype(aval.dtype, dtypes.extended):
        return plain
    return np.asarray(plain, aval.dtype)


def _out_avals(jaxpr: Any) -> list[Any]:
    return [variable.aval for variable in jaxpr_of(jaxpr)[0].outvars]


def _source(jaxpr: Any) -> str:
    """'path:line' of the function of a jaxpr; '' if JAX does not know it."""
    match = _SOURCE.search(str(jaxpr.debug_info.func_src_info or ""))
    return f"{match[1]}:{match[2]}" if match else ""


def _split(source: str) -> tuple[str, int]:
    path, _, line = source.rpartition(":")
    return path, int(line)


def _describe(jaxpr: Any, arguments: Sequence[Any], in_shardings: Sequence[Any]) -> tuple[_Argument, ...]:
    """The arguments of a program: names, types, shardings."""
    names = jaxpr.debug_info.arg_names or ()
    described = []
    for at, (variable, value, stated) in enumerate(zip(jaxpr.invars, arguments, in_shardings, strict=True)):
        sharding = getattr(value, "sharding", None) if isinstance(stated, UnspecifiedValue) else stated
        spec = getattr(sharding, "spec", None)
        described.append(
            _Argument(
                name=str(names[at]) if at < len(names) and names[at] else f"argument {at}",
                type=variable.aval.str_short(),
                sharding="on one device" if spec is None else str(spec).replace("PartitionSpec", "P"),
                committed=bool(getattr(value, "committed", False)),
            )
        )
    return tuple(described)


for _module in (computing_module, executables, known, standin, written):
    traceback_util.register_exclusion(str(_module.__file__))
traceback_util.register_exclusion(__file__)
