"""``rooftop train``: a plan, or a model of any config.json, on the devices that are here."""

from __future__ import annotations

import math
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from rooftop.cli.options import (
    COUNT,
    PATH,
    VerbCommand,
    coordinator_option,
    field_options,
    json_option,
    option,
    process_option,
    processes_option,
)
from rooftop.cli.output import emit_json, say
from rooftop.core.errors import Infeasible, RooftopError
from rooftop.core.quantities import parse_count
from rooftop.plan.training.plan import TrainingPlan
from rooftop.requests.training import Train
from rooftop.requests.words import RUN
from rooftop.runs.beats import Beats
from rooftop.runs.environment import join_processes, keep_compilations, prepare_environment
from rooftop.runs.folder import RunFolder
from rooftop.runs.restarts import Supervision, keep_running
from rooftop.runs.supervise import LOST_STATUS, RESTARTED, follow_supervisor, is_worker, keep_stdout, supervise

if TYPE_CHECKING:
    from rooftop.train.request import TrainRequest

_EXAMPLES = (
    "rooftop train plan.json --data corpus/ --tokenizer llama/ --run run1 --steps 1000 --shrink",
    "rooftop train --model llama:2M --data 'src/**/*.py' --vocab 2048 --run run2 --steps 200 \\\n"
    "    --devices 8 --mesh fsdp=2,tensor=2,context=2",
    "rooftop train --resume run2 --steps 400",
)


#: Options of the processes, which are no fields of a request.
_PROCESSES = ("coordinator", "processes", "process", "supervise", "max_restarts")


@click.command(name="train", cls=VerbCommand, examples=_EXAMPLES)
@field_options(Train, required=False)
@option("--resume", group=RUN, type=PATH, metavar="DIR", help="Resume the run in DIR with the options it had.")
@coordinator_option()
@processes_option()
@process_option()
@option("--supervise", group=RUN, is_flag=True, help="Start the processes, and again those that are lost or hang.")
@option("--max-restarts", group=RUN, type=COUNT, default=3, help="Restarts without a new checkpoint between them.")
@json_option
@click.pass_context
def command(ctx: click.Context, /, as_json: bool, **_: object) -> int:
    """Train on the devices that are here: one CPU, emulated ones, GPUs, a TPU slice, or many processes.

    Trains a PLAN.json of 'rooftop plan train', or a --model. The same command again, or --resume DIR, resumes the run
    from its folder. SIGTERM and Ctrl-C save at the next step.
    """
    fields = {
        name: _plain(value)
        for name, value in ctx.params.items()
        if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE
    }
    request = _request(fields)
    _require_mesh(request, ctx.params["processes"])

    def train() -> int:
        return _train(request, as_json)

    coordinator = ctx.params["coordinator"]
    processes, process = ctx.params["processes"], ctx.params["process"]
    if ctx.params["supervise"] and not is_worker():
        return keep_running(_supervision(request, ctx.params, as_json))
    _require_processes(coordinator, processes, process)
    if coordinator is None:
        return train_together(train, request.folder.path) if is_worker() else train()

    prepare_environment(request.devices, extra="train", traced=request.profile is not None)
    return train_together(train, request.folder.path, coordinator=coordinator, processes=processes, process=process)


def _request(options: Mapping[str, object]) -> TrainRequest:
    """Build the request of these options; a run that has begun keeps its own for all others. Raises RooftopError."""
    from rooftop.train.request import TrainRequest

    fields = {name: value for name, value in options.items() if name not in (*_PROCESSES, "resume", "as_json")}
    if "resume" in options:
        return TrainRequest.resumed(Path(str(options["resume"])), fields)
    run = options.get("run")
    if run is not None and RunFolder(path=Path(str(run))).read() is not None:
        return TrainRequest.resumed(Path(str(run)), fields)
    return TrainRequest.of(fields)


def _require_mesh(request: TrainRequest, processes: int | None) -> None:
    """Raise RooftopError unless the mesh covers the emulated devices."""
    if request.devices is None or request.axes is None:
        return
    mesh, emulated = math.prod(request.axes.values()), request.devices * (processes or 1)
    if mesh != emulated:
        axes = ",".join(f"{name}={size}" for name, size in request.axes.items())
        emulates = f"{emulated} devices" if processes is None else f"{processes} x {request.devices} devices"
        raise RooftopError(
            "mesh", f"{axes}: {mesh} devices", f"axes whose sizes multiply to the {emulates} of --devices"
        )


def _require_processes(coordinator: str | None, processes: int | None, process: int | None) -> None:
    """Raise RooftopError unless the options of one of several processes go together."""
    if coordinator is None:
        for name, value in (("processes", processes), ("process", process)):
            if value is not None and not is_worker():
                raise RooftopError(name, value, "this with --coordinator HOST:PORT or --supervise")
    elif coordinator != "auto":
        host, _, port = coordinator.rpartition(":")
        if not host or not port.isdecimal():
            raise RooftopError("coordinator", coordinator, "HOST:PORT of the first process, or 'auto'")


def _supervision(request: TrainRequest, params: Mapping[str, Any], as_json: bool) -> Supervision:
    """The supervision that these options ask for. Raises RooftopError if they do not go together."""
    coordinator, process = params["coordinator"], params["process"]
    processes = parse_count(params["processes"] or 1, "processes")
    host, _, port = (coordinator or "127.0.0.1:0").rpartition(":")
    if coordinator is not None and (not host or not port.isdecimal()):
        raise RooftopError("coordinator", coordinator, "HOST:PORT of process 0 with --supervise")
    if (coordinator is None) != (process is None):
        accepted = "--coordinator HOST:PORT with it; or neither, for all processes on this machine"
        raise RooftopError("process", process, accepted if coordinator is None else "--process I with --coordinator")
    index = None if process is None else int(process)
    if index is not None and not 0 <= index < processes:
        raise RooftopError("process", index, f"0 to {processes - 1}")
    axes = request.axes
    if axes is None and request.planned is not None and (request.as_is or not request.shrink):
        axes = TrainingPlan.from_json(request.planned).spec.axes
    return Supervision(
        arguments=tuple(_without(sys.argv[1:], "supervise", ("max-restarts", "coordinator", "processes", "process"))),
        run=request.folder.path, processes=processes, process=index, host=host, port=int(port), axes=axes,
        max_restarts=params["max_restarts"], quiet=as_json,
    )  # fmt: skip


def _without(words: Sequence[str], flag: str, options: Sequence[str]) -> Iterator[str]:
    """The words of a command without a flag, and without options and their values."""
    remaining = iter(words)
    for word in remaining:
        if word in [f"--{name}" for name in options]:
            next(remaining, None)
        elif word != f"--{flag}" and not word.startswith(tuple(f"--{name}=" for name in options)):
            yield word


def _plain(value: object) -> object:
    """A path as an absolute text, so that a resumed run finds it from any folder."""
    return os.path.abspath(value) if isinstance(value, Path) else value


def _train(request: TrainRequest, as_json: bool) -> int:
    from rooftop.library.training import train

    request.require_inputs()
    prepare_environment(request.devices, extra="train", traced=request.profile is not None)
    keep_compilations()
    import jax

    from rooftop.cli.live import LiveView
    from rooftop.runs.signals import Stopped

    expect_late_reports()
    is_first = jax.process_index() == 0
    try:
        with LiveView(quiet=as_json or not is_first) as view:
            result = train(request, watch=view)
    except Stopped as stopped:
        if is_first and not as_json:
            say(f"{stopped}; the same command begins again")
        return 0
    if as_json and is_first:
        emit_json(result.to_json())
    elif is_first:
        for text in result.samples:
            say(f"--- sample\n{text}")
        if result.samples:
            say("---")
        say(result.summary)
    return 0


def train_together(
    train: Callable[[], int], run: Path, *, coordinator: str | None = None, processes: int | None = None,
    process: int | None = None,
) -> int:  # fmt: skip
    """Train as one of several processes, under a supervisor; without a ``coordinator`` as the only one.

    An error ends the process at once, because Python's usual exit waits for the other processes.
    """
    how_to_resume = f"to resume: rooftop train --resume {shlex.quote(str(run))}"
    if not is_worker():
        return supervise(sys.argv[1:], how_to_resume)
    follow_supervisor()
    Beats.of_process()
    keep_stdout()
    # Under restarts the loss of a process has a status of its own.
    lost = LOST_STATUS if RESTARTED in os.environ else 1
    joined = coordinator is None
    try:
        if coordinator is not None:
            join_processes(coordinator, processes, process)
            joined = True
        return train()
    except (RooftopError, Infeasible) as error:
        line, status = str(error), error.exit_status if joined or lost == 1 else lost
    except Exception as error:  # Any error of the runtime may mean that a process is lost.
        reason = (str(error).splitlines() or [""])[0][:160]
        what = "the run has lost one of its processes" if coordinator is not None else type(error).__name__
        line, status = f"{what} ({reason}); {how_to_resume}", lost
    say(f"rooftop: {line}", err=True)
    sys.stdout.flush()
    os._exit(status)


def expect_late_reports() -> None:
    """Ignore errors of TensorStore's threads that find Orbax's event loop closed, after a write failed."""
    before = sys.unraisablehook

    def hook(report: sys.UnraisableHookArgs) -> None:
        if not (isinstance(report.exc_value, RuntimeError) and str(report.exc_value) == "Event loop is closed"):
            before(report)

    # The hook stays: those threads end after the command does.
    sys.unraisablehook = hook
