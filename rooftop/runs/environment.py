"""The process that JAX runs in: its environment, its compilation cache, and the processes that it joins.

JAX and XLA read most of this when they are first imported, so this module imports neither.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rooftop.core.errors import RooftopError
from rooftop.core.extras import require
from rooftop.core.files import cache_folder
from rooftop.core.quantities import parse_count

_COUNT_FLAG = "--xla_force_host_platform_device_count"
#: Device files of TPUs and GPUs in /dev.
_ACCELERATORS = ("accel*", "vfio/[0-9]*", "nvidia*", "kfd", "dxg")
#: Emulated devices wait for each other on a few cores: on a busy machine that takes longer than XLA expects.
_PATIENCE_FLAGS = (
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=600",
    "--xla_cpu_collective_call_terminate_timeout_seconds=3600",
)

#: Share of a GPU's memory that JAX takes, as the catalogue's usable bytes assume; JAX's own default is 0.75.
_MEMORY_FRACTION = "0.95"
#: GPUs run kernels in graphs, and a trace names no instruction in them.
_NO_GRAPHS_FLAG = "--xla_gpu_enable_command_buffer="


def prepare_environment(devices: int | str | None, *, extra: str, traced: bool = False) -> None:
    """Set the variables that JAX and XLA read on import: ``devices`` emulates that many on the CPU.

    With ``traced``, programs on GPUs are compiled so that a trace names their instructions. Raises RooftopError if a
    package that the verbs of ``extra`` need is not installed.
    """
    require(extra)
    flags = os.environ.get("XLA_FLAGS", "").split()
    if devices is not None:
        count = parse_count(devices, "devices")
        os.environ["JAX_PLATFORMS"] = "cpu"
        flags = [flag for flag in flags if not flag.startswith(_COUNT_FLAG)] + [f"{_COUNT_FLAG}={count}"]
    else:
        prefer_cpus()
    for flag in (*_PATIENCE_FLAGS, *((_NO_GRAPHS_FLAG,) if traced else ())):
        if not any(other.startswith(flag.partition("=")[0]) for other in flags):
            flags.append(flag)
    os.environ["XLA_FLAGS"] = " ".join(flags)
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", _MEMORY_FRACTION)


def prefer_cpus() -> None:
    """Keep JAX from looking for TPUs and GPUs on a machine without them, unless JAX_PLATFORMS is set.

    An installed libtpu searches for TPUs on the network and complains.
    """
    if "JAX_PLATFORMS" not in os.environ and not any(any(Path("/dev").glob(name)) for name in _ACCELERATORS):
        os.environ["JAX_PLATFORMS"] = "cpu"


def keep_compilations() -> None:
    """Keep compiled programs in the user's cache, so that a second start compiles nothing."""
    with uninterrupted():
        import jax

    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        jax.config.update("jax_compilation_cache_dir", str(cache_folder("jax")))


def process_of(coordinator: str, processes: int | str | None, process: int | str | None) -> tuple[int, int] | None:
    """The number of processes and the index of this one; None if JAX finds them, with the coordinator 'auto'.

    Raises RooftopError if the options do not go together.
    """
    if coordinator == "auto":
        return None
    if processes is None or process is None:
        raise RooftopError("coordinator", coordinator, "--processes N and --process I with it")
    count, index = parse_count(processes, "processes"), int(process)
    if not 0 <= index < count:
        raise RooftopError("process", index, f"0 to {count - 1}")
    return count, index


def join_processes(
    coordinator: str, processes: int | str | None, process: int | str | None, *, patience_s: int = 300
) -> None:
    """Join the other processes through ``coordinator``: HOST:PORT, or 'auto' on TPU pods and Slurm.

    Raises RooftopError if that fails, or if not all are there after ``patience_s``.
    """
    import jax

    known = process_of(coordinator, processes, process)

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        if known is None:
            jax.distributed.initialize(initialization_timeout=patience_s)
            return
        jax.distributed.initialize(coordinator, *known, heartbeat_timeout_seconds=30, initialization_timeout=patience_s)
    except (RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())[:160]
        raise RooftopError(
            "coordinator", coordinator, f"HOST:PORT where the first process can be reached ({reason})"
        ) from None


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay Ctrl-C until the block is done: an interrupted import of JAX aborts in its extension modules."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Signals are the main thread's.
        return
    caught: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: caught.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if caught:
            signal.raise_signal(signal.SIGINT)
