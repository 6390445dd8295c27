"""The process around a training run: what JAX reads when it starts, other processes, and one line at the end."""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from rooftop.core.errors import Infeasible, RooftopError
from rooftop.core.files import cache_folder
from rooftop.core.quantities import parse_count

#: What training imports, by the names of modules.
_PACKAGES = ("jax", "jaxtyping", "optax", "orbax", "safetensors", "tokenizers")
_COUNT_FLAG = "--xla_force_host_platform_device_count"
#: What stands in /dev where there are TPUs or GPUs.
_ACCELERATORS = ("accel*", "vfio/[0-9]*", "nvidia*", "kfd", "dxg")
#: Emulated devices wait for each other on a few cores: on a busy machine that takes longer than XLA expects.
_PATIENCE_FLAGS = (
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=600",
    "--xla_cpu_collective_call_terminate_timeout_seconds=3600",
)


def prepare_environment(
    options: Mapping[str, Any], *, packages: tuple[str, ...] = _PACKAGES, extra: str = "train"
) -> None:
    """What JAX and XLA read when they are first imported. Raises RooftopError where a package is not installed."""
    require_packages(packages, extra)
    flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split()]
    if options["devices"] is not None:
        count = parse_count(options["devices"], "devices")
        os.environ["JAX_PLATFORMS"] = "cpu"
        flags = [flag for flag in flags if not flag.startswith(_COUNT_FLAG)] + [f"{_COUNT_FLAG}={count}"]
    else:
        prefer_cpus()
    for flag in _PATIENCE_FLAGS:
        if not any(each.startswith(flag.partition("=")[0]) for each in flags):
            flags.append(flag)
    os.environ["XLA_FLAGS"] = " ".join(flags)


def prefer_cpus() -> None:
    """Have JAX, which has not been imported yet, look for no TPUs or GPUs where there are none, unless told to.

    libtpu, where it is installed to compile with, looks for them on the network and complains.
    """
    if "JAX_PLATFORMS" not in os.environ and not any(any(Path("/dev").glob(each)) for each in _ACCELERATORS):
        os.environ["JAX_PLATFORMS"] = "cpu"


def require_packages(packages: tuple[str, ...], extra: str) -> None:
    """Raises RooftopError where one of them is not installed; ``extra`` brings them."""
    for package in packages:
        if find_spec(package) is None:
            raise RooftopError(package, "not installed", f"a Python that has it: pip install 'rooftop[{extra}]'")


def parse_profile(text: str | None) -> tuple[int, int] | None:
    """The first and the last step that are traced, of steps=A..B. Raises RooftopError for another text."""
    if text is None:
        return None
    match = re.fullmatch(r"steps=(\d+)\.\.(\d+)", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise RooftopError("profile", text, "steps=A..B with A up to B, counted from 1: steps=10..13")
    return int(match[1]), int(match[2])


def keep_compilations() -> None:
    """Keep what XLA compiles in the user's cache: what is started again compiles nothing anew."""
    with uninterrupted():
        import jax

    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        jax.config.update("jax_compilation_cache_dir", str(cache_folder("jax")))


def train_together(options: dict[str, Any], train: Callable[[], int]) -> int:
    """Train as one of several processes. An error ends this one at once: the usual way out waits for the others."""
    from rooftop.runs.supervise import follow_supervisor, is_worker, keep_stdout, supervise

    if not is_worker():
        return supervise(sys.argv[1:], _how_to_resume(options))
    follow_supervisor()
    keep_stdout()
    try:
        join_processes(options)
        return train()
    except (RooftopError, Infeasible) as error:
        line, status = str(error), error.exit_status
    except Exception as error:  # what the runtime raises when a process is lost depends on where it is met
        reason = (str(error).splitlines() or [""])[0][:160]
        line, status = f"the run has lost one of its processes ({reason}); {_how_to_resume(options)}", 1
    click.echo(f"rooftop: {line}", err=True)
    sys.stdout.flush()
    os._exit(status)


def join_processes(options: Mapping[str, Any]) -> None:
    """Join the other processes, as --coordinator, --processes and --process say.

    Raises RooftopError where that does not come about.
    """
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    where = options["coordinator"]
    try:
        if where == "auto":
            jax.distributed.initialize()
            return
        if options["processes"] is None or options["process"] is None:
            raise RooftopError("coordinator", where, "--processes N and --process I with it")
        count, index = parse_count(options["processes"], "processes"), int(options["process"])
        if not 0 <= index < count:
            raise RooftopError("process", index, f"0 to {count - 1}")
        jax.distributed.initialize(where, count, index, heartbeat_timeout_seconds=30)
    except (RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())[:160]
        raise RooftopError(
            "coordinator", where, f"HOST:PORT where the first process can be reached ({reason})"
        ) from None


def _how_to_resume(options: Mapping[str, Any]) -> str:
    return f"to go on: rooftop train --resume {shlex.quote(str(options['resume'] or options['run']))}"


def expect_late_reports() -> None:
    """Keep to the one line that says it: behind a failed write, threads of TensorStore find Orbax's loop closed."""
    before = sys.unraisablehook

    def hook(late: sys.UnraisableHookArgs) -> None:
        if not (isinstance(late.exc_value, RuntimeError) and str(late.exc_value) == "Event loop is closed"):
            before(late)

    # It stays: those threads end after the command does.
    sys.unraisablehook = hook


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C waits until the block is done. For imports of JAX: interrupted, its extension modules abort."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are the main thread's
        return
    caught: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: caught.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if caught:
            signal.raise_signal(signal.SIGINT)
