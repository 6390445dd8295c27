"""Timing of programs on the local devices, and the provenance of measured numbers."""

from __future__ import annotations

import importlib.metadata
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import Mesh as DeviceMesh

from rooftop import __version__
from rooftop.core.errors import Infeasible, RooftopError
from rooftop.core.measurements import Provenance
from rooftop.core.quantities import format_bytes

#: Callback (done, total, label of the next item).
Progress = Callable[[int, int, str], None]

#: Devices that a CPU emulates by default.
EMULATED = 8
#: Limit on emulated devices: each has its own threads.
EMULATED_AT_MOST = 1024
#: XLA's own option for emulated devices, which takes precedence.
_COUNT_FLAG = "xla_force_host_platform_device_count"
#: Share of a machine's memory that emulated devices may use together; other processes need the rest.
_MEMORY_SHARE = 0.75


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Wall-clock seconds of each run of one program, from its call until its results are ready."""

    seconds: tuple[float, ...]

    @property
    def median_s(self) -> float:
        """The median of the runs."""
        return statistics.median(self.seconds)

    @property
    def fastest_s(self) -> float:
        """The fastest run."""
        return min(self.seconds)

    @property
    def runs(self) -> int:
        """Number of runs."""
        return len(self.seconds)


def time_program(program: Callable[..., Any], *arguments: Any, least_s: float = 0.2, least_runs: int = 5) -> Timing:
    """Time a compiled JAX program: one warm-up run, then at least ``least_runs`` runs and ``least_s`` seconds.

    Each run is waited for, so that its time includes the call from Python and the wait: ``empty_call`` measures those
    alone.
    """
    jax.block_until_ready(program(*arguments))
    seconds: list[float] = []
    total = 0.0
    while len(seconds) < least_runs or total < least_s:
        start = time.perf_counter()
        jax.block_until_ready(program(*arguments))
        seconds.append(time.perf_counter() - start)
        total += seconds[-1]
    return Timing(seconds=tuple(seconds))


def empty_call(mesh: DeviceMesh) -> Timing:
    """Time a program that adds one to one number on every device: the overhead in every other time."""
    everywhere = jax.NamedSharding(mesh, jax.P(mesh.axis_names))
    number = jax.ShapeDtypeStruct((mesh.size,), jnp.float32, sharding=everywhere)
    return time_program(jax.jit(lambda x: x + 1).lower(number).compile(), jnp.zeros(mesh.size, device=everywhere))


def devices(count: int | None = None) -> list[jax.Device]:
    """The first ``count`` local devices, or all of them. A CPU emulates ``count`` devices, at least 8.

    Raises RooftopError if there are fewer: on a CPU because JAX has started with fewer, or above 1024.
    """
    if _COUNT_FLAG not in os.environ.get("XLA_FLAGS", ""):
        # The number cannot change once JAX has started.
        with suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", min(max(EMULATED, count or 0), EMULATED_AT_MOST))
    local = jax.devices()
    if count is None or count <= len(local):
        return local[:count]
    if local[0].platform == "cpu":
        advice = f"a CPU emulates up to {EMULATED_AT_MOST}, but JAX has started with these or XLA_FLAGS says so"
        if len(local) == EMULATED_AT_MOST:
            advice = "a CPU emulates no more"
    else:
        advice = f"JAX_PLATFORMS=cpu emulates up to {EMULATED_AT_MOST}"
    raise RooftopError("devices", count, f"at most the {len(local)} x {local[0].device_kind} here; {advice}")


def device_mesh(axes: Mapping[str, int]) -> DeviceMesh:
    """A JAX mesh of those axes over the first local devices, on a TPU laid out by JAX.

    Raises RooftopError, naming the mesh, if there are too few.
    """
    try:
        used = devices(math.prod(axes.values()))
    except RooftopError as error:
        raise RooftopError("mesh", ",".join(f"{name}={size}" for name, size in axes.items()), error.accepted) from None
    types = (AxisType.Auto,) * len(axes)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=types, devices=used)


def provenance(used: Sequence[jax.Device]) -> Provenance:
    """Return the provenance of a number measured on those devices, now."""
    first = used[0]
    emulated = first.platform == "cpu"
    packages = ("jax", "jaxlib", *(("libtpu",) if first.platform == "tpu" else ()))
    return Provenance(
        devices=f"{len(used)} x {first.device_kind}" + (" (emulated)" if emulated else ""),
        count=len(used),
        emulated=emulated,
        platform=first.platform,
        device_kind=first.device_kind,
        host_cpus=os.cpu_count(),
        versions={"rooftop": __version__} | {name: importlib.metadata.version(name) for name in packages},
        runtime="; ".join(first.client.platform_version.splitlines()),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def usable_bytes(used: Sequence[jax.Device]) -> float:
    """Bytes that one of those devices may use: emulated ones share three quarters of the machine's memory.

    Infinite if the device has no limit.
    """
    if used[0].platform == "cpu":
        return _MEMORY_SHARE * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / len(used)
    return float((used[0].memory_stats() or {}).get("bytes_limit", math.inf))


def compile_program(
    program: Callable[..., Any], *arguments: jax.ShapeDtypeStruct, what: str, advice: str
) -> jax.stages.Compiled:
    """Compile a program for sharded arguments on local devices.

    Raises Infeasible, with ``advice``, if the program (named ``what``) needs more memory than a device has, and
    RooftopError if XLA does not compile it.
    """
    used = list(arguments[0].sharding.device_set)
    try:
        compiled = jax.jit(program).lower(*arguments).compile()
    except jax.errors.JaxRuntimeError as error:
        line = (str(error).splitlines() or [type(error).__name__])[0]
        raise RooftopError("program", what, f"one that XLA compiles for {used[0].device_kind} ({line})") from None
    memory = compiled.memory_analysis()
    needed = 0
    if memory is not None:
        needed = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    room = usable_bytes(used)
    if needed > room:
        by = (
            f"{format_bytes(needed)} a device, {format_bytes(needed - room)} more than each of the {len(used)} has here"
        )
        raise Infeasible(what, f"needs {by}; {advice}")
    return compiled


def normal(array: jax.ShapeDtypeStruct, seed: int) -> jax.Array:
    """Random numbers: the power of a chip, and so its clock, depends on the multiplied values."""

    def draw() -> jax.Array:
        drawn = jax.random.normal(jax.random.key(seed), array.shape, jnp.bfloat16)
        return (drawn if jnp.issubdtype(array.dtype, jnp.inexact) else jnp.round(drawn)).astype(array.dtype)

    values: jax.Array = jax.jit(draw, out_shardings=array.sharding)()
    return values
