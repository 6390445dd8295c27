"""A load of a server, most of it hostile, with faults of its engine, by a seeded schedule; and bounds that it keeps.

``python -m tests.faults.serving --seed 1 --minutes 5`` starts ``rooftop serve llama:2M`` on loopback, and prints what
it measured as JSON. The status is 1 if a bound is broken. A neighbour (``tests.faults.neighbour``) reads streams and
asks for /health meanwhile. With ``--engine echo`` the engine has no model, and starts in a second.

Faults: ``SIGSTOP`` and ``SIGKILL`` of the engine's process, ``slow`` (it is stopped for two seconds, and goes on), and
all the time a clock of the day that jumps (``tests/support/shim.c``).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.faults.attacks import ATTACKS, Attack, Target, half_heads
from tests.support.shim import jumping_clock, preload

#: Seconds before the first attack.
_QUIET_S = 5.0
#: Attacks at a time.
_AT_ONCE = 3
#: What is added to the nice value of the threads that attack.
_NICE = 10
#: Seconds within which a fault is noticed, and within which the engine serves again.
_NOTICED_S, _SERVES_S = 10.0, 300.0
#: Seconds after the load within which the server rests again.
_RESTS_S = 60.0
#: Seconds of the fault ``slow``: fewer than those after which the engine counts as hung.
_SLOW_S = 2.0
#: Faults, in turn.
FAULTS = ("SIGSTOP", "SIGKILL", "slow")


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Bounds of a run: seconds between two tokens of the neighbour's streams (the longest but for one in a thousand,
    and all), seconds until its first token (the same, but for one in a hundred), seconds of an answer of /health, MiB
    by which the memory of the process that answers grows, descriptors.
    """

    gap_p999_s: float = 0.25
    gap_s: float = 1.0
    first_p99_s: float = 5.0
    first_s: float = 15.0
    health_s: float = 1.0
    memory_mib: float = 512.0
    descriptors: int = 16


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Figures of a part of a run, which ends ``minute`` minutes after the first attack.

    ``requests`` (whole ones) and ``faults`` are those since the first attack. Gaps are between two tokens of the
    neighbour, in this part, those next to a fault of the engine left out; ``pages`` are those of the KV cache in use.
    """

    minute: float
    requests: int
    faults: int
    tokens: int
    gap_p50_s: float
    gap_p999_s: float
    gap_s: float
    first_p50_s: float
    first_s: float
    health_s: float
    memory_mib: float
    engine_memory_mib: float
    descriptors: int
    engine_descriptors: int
    pages: int
    running: int
    load: float


@dataclass(kw_only=True)
class Report:
    """Measurements of a run, and the bounds that it broke. The ``quiet`` ones are from before the first attack."""

    seed: int
    minutes: float
    requests: dict[str, int] = field(default_factory=dict)
    faults: list[dict[str, Any]] = field(default_factory=list)
    tokens: int = 0
    gap_p999_s: float = 0.0
    gap_s: float = 0.0
    firsts: int = 0
    first_p50_s: float = 0.0
    first_p99_s: float = 0.0
    first_s: float = 0.0
    health_s: float = 0.0
    quiet_gap_s: float = 0.0
    quiet_first_s: float = 0.0
    quiet_health_s: float = 0.0
    memory_mib: float = 0.0
    memory_grown_mib: float = 0.0
    descriptors_left: int = 0
    requests_left: float = 0.0
    broken: list[str] = field(default_factory=list)


class Watched:
    """The waits of a neighbour, which is a process of its own: it shares no lock with the attacks."""

    def __init__(self, target: Target, tokens: int) -> None:
        command = [sys.executable, "-m", "tests.faults.neighbour", target.host, str(target.port), target.model]
        self._process = subprocess.Popen([*command, str(tokens)], stdout=subprocess.PIPE, text=True)
        #: Kind, time on the clock ``time.monotonic``, and seconds.
        self.waits = list[tuple[str, float, float]]()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self._process.stdout or ():
            kind, ended_s, seconds = line.split()
            self.waits.append((kind, float(ended_s), float(seconds)))

    def end(self) -> None:
        """End the neighbour."""
        self._process.kill()
        self._process.wait()
        self._reader.join()
        if self._process.stdout is not None:
            self._process.stdout.close()


def tree(pid: int) -> list[int]:
    """A process and those that it started."""
    result = [pid]
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        # A thread may end meanwhile.
        with suppress(OSError):
            for child in task.read_text().split():
                result += tree(int(child))
    return result


def memory_mib(pid: int) -> float:
    """Resident memory of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS")), 0.0)


def descriptors(pid: int) -> int:
    """Open descriptors of a process."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def ask(target: Target, path: str) -> tuple[int, str]:
    """Status and text of a path."""
    try:
        with urllib.request.urlopen(f"http://{target.host}:{target.port}{path}", timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def metric(target: Target, name: str) -> float:
    """A metric of the server."""
    lines = ask(target, "/metrics")[1].splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))


@contextmanager
def server(engine: str, folder: Path) -> Iterator[tuple[int, Target]]:
    """A server, with a model or an echo as its engine: its process, and how to reach it."""
    if engine == "echo":
        from tests.support import serving_echo

        serving_echo.tokenizer().save(folder)
        options = {"child": True, "limits": {"request_s": 10.0}, "engine": {"step_s": 0.005}}
        command = [sys.executable, str(Path(serving_echo.__file__)), json.dumps(options), str(folder)]
    else:
        command = [sys.executable, "-m", "rooftop", "serve", engine, "--port", "0", "--json", "--batch-seqs", "16"]
    environment = os.environ | preload() | jumping_clock(1)
    with (folder / "server.log").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        said = json.loads(process.stdout.readline() if process.stdout is not None else "")
        host, port = said["url"].removeprefix("http://").split(":")
        card = json.loads(
            urllib.request.urlopen(f"{said['url']}/v1/models", timeout=30).read()  # loopback
        )["data"][0]
        # A token of the tokenizers here has about ten bytes at most.
        yield process.pid, Target(host=host, port=int(port), model=said["model"], longest=8 * card["max_model_len"])
    finally:
        process.kill()
        process.communicate()


def engine_of(pid: int) -> int:
    """The process of the engine."""
    return next(child for child in tree(pid) if child != pid)


def break_engine(target: Target, pid: int, fault: str) -> dict[str, Any]:
    """Stop or kill the engine, and wait until that is noticed and the engine serves again; or slow it down."""
    child, begun_s = engine_of(pid), time.monotonic()
    if fault == "slow":
        os.kill(child, signal.SIGSTOP)
        time.sleep(_SLOW_S)
        os.kill(child, signal.SIGCONT)
        return {"fault": fault, "begun_s": begun_s, "noticed_s": None, "serves_s": time.monotonic() - begun_s}
    before = metric(target, "rooftop_engine_restarts_total")
    os.kill(child, signal.Signals[fault])
    noticed_s = serves_s = None
    while time.monotonic() - begun_s < _SERVES_S:
        # First the count: an answer of /ready from before the fault was noticed says nothing.
        restarted = metric(target, "rooftop_engine_restarts_total") > before
        if restarted and noticed_s is None:
            noticed_s = time.monotonic() - begun_s
        if restarted and ask(target, "/ready")[0] == 200:
            serves_s = time.monotonic() - begun_s
            break
        time.sleep(0.1)
    return {"fault": fault, "begun_s": begun_s, "noticed_s": noticed_s, "serves_s": serves_s}


def run(
    seed: int, minutes: float, *, engine: str = "llama:2M", bounds: Bounds | None = None,
    faults: Sequence[float] = (0.3, 0.6), attacks: Sequence[Attack] = tuple(ATTACKS), every_s: float = 30.0,
    on_sample: Callable[[Sample], None] | None = None,
) -> Report:  # fmt: skip
    """Attack a server for so many minutes. The engine is broken after these shares of them, by each fault in turn."""
    bounds, draw, report = bounds or Bounds(), random.Random(seed), Report(seed=seed, minutes=minutes)
    with (
        tempfile.TemporaryDirectory() as scratch,
        server(engine, Path(scratch)) as (pid, target),
        ExitStack() as ending,
    ):
        watched = Watched(target, 1500 if engine != "echo" else 400)
        ending.callback(watched.end)
        time.sleep(_QUIET_S)
        quiet_s = time.monotonic()
        # What each attack needs once, such as a tokenizer for grammars, is not growth.
        for attack in attacks:
            attack(target, random.Random(seed))
        begun_memory, begun_descriptors, peak = memory_mib(pid), descriptors(pid), 0.0
        begun_s = sampled_s = time.monotonic()
        moments = [begun_s + 60 * minutes * share for share in faults]
        running = list[threading.Thread]()
        pending = list[Attack]()
        while (now_s := time.monotonic()) < begun_s + 60 * minutes or moments:
            if moments and now_s >= moments[0]:
                moments.pop(0)
                for thread in running:
                    thread.join()
                report.faults.append(break_engine(target, pid, FAULTS[len(report.faults) % len(FAULTS)]))
                continue
            running = [thread for thread in running if thread.is_alive()]
            while len(running) < _AT_ONCE:
                if not pending:
                    pending = draw.sample(attacks, len(attacks))
                own = random.Random(draw.random())
                running.append(threading.Thread(target=_from_elsewhere, args=(pending.pop(), target, own), daemon=True))
                running[-1].start()
            peak = max(peak, memory_mib(pid))
            if on_sample is not None and now_s - sampled_s >= every_s:
                on_sample(_sample(report, watched, target, pid, begun_s, sampled_s))
                sampled_s = now_s
            time.sleep(0.05)
        for thread in running:
            thread.join()
        ended_s = time.monotonic()
        # The server has no stream of it left when it rests.
        watched.end()
        while time.monotonic() - ended_s < _RESTS_S and (
            metric(target, "rooftop_running_requests") or descriptors(pid) > begun_descriptors + bounds.descriptors
        ):
            time.sleep(0.2)
        report.requests_left = metric(target, "rooftop_running_requests")
        report.descriptors_left = descriptors(pid) - begun_descriptors
        report.memory_mib, report.memory_grown_mib = round(peak, 1), round(peak - begun_memory, 1)
    quiet = [(kind, seconds) for kind, at_s, seconds in watched.waits if at_s < quiet_s]
    report.quiet_gap_s = max((seconds for kind, seconds in quiet if kind == "token"), default=0.0)
    report.quiet_first_s = max((seconds for kind, seconds in quiet if kind == "first"), default=0.0)
    report.quiet_health_s = max((seconds for kind, seconds in quiet if kind == "health"), default=0.0)
    _judge(report, watched, target, bounds, begun_s, ended_s)
    return report


def _from_elsewhere(attack: Attack, target: Target, draw: random.Random) -> None:
    """Attack with what the server leaves of the processors: real clients have their own."""
    if sys.platform == "linux":
        # There a nice value is that of a thread, and threads that it starts have it too.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + _NICE)
    attack(target, draw)


def _undisturbed(report: Report, watched: Watched, begun_s: float, ended_s: float) -> list[tuple[str, float]]:
    """Kind and seconds of the waits between two moments, but for those for an engine that was broken."""
    faulty = [(item["begun_s"], item["begun_s"] + (item["serves_s"] or _SERVES_S) + 1.0) for item in report.faults]
    return [
        (kind, seconds)
        for kind, at_s, seconds in list(watched.waits)
        if begun_s < at_s < ended_s and (kind == "health" or not any(a < at_s < b + seconds for a, b in faulty))
    ]


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def _sample(report: Report, watched: Watched, target: Target, pid: int, begun_s: float, since_s: float) -> Sample:
    """The figures since a moment."""
    now_s, child = time.monotonic(), engine_of(pid)
    waits = _undisturbed(report, watched, since_s, now_s)
    gaps, firsts = (sorted(seconds for kind, seconds in waits if kind == name) for name in ("token", "first"))
    return Sample(
        minute=round((now_s - begun_s) / 60, 2),
        requests=sum(count for (name, _), count in target.got.items() if name != half_heads.__name__),
        faults=len(report.faults),
        tokens=len(gaps),
        gap_p50_s=_quantile(gaps, 0.5),
        gap_p999_s=_quantile(gaps, 0.999),
        gap_s=gaps[-1] if gaps else 0.0,
        first_p50_s=_quantile(firsts, 0.5),
        first_s=firsts[-1] if firsts else 0.0,
        health_s=max((seconds for kind, seconds in waits if kind == "health"), default=0.0),
        memory_mib=round(memory_mib(pid), 1),
        engine_memory_mib=round(memory_mib(child), 1),
        descriptors=descriptors(pid),
        engine_descriptors=descriptors(child),
        pages=int(metric(target, "rooftop_kv_pages_used")),
        running=int(metric(target, "rooftop_running_requests")),
        load=os.getloadavg()[0],
    )


def _judge(report: Report, watched: Watched, target: Target, bounds: Bounds, begun_s: float, ended_s: float) -> None:
    """Compare what was measured with the bounds."""
    waits = _undisturbed(report, watched, begun_s, ended_s)
    gaps, firsts = (sorted(seconds for kind, seconds in waits if kind == name) for name in ("token", "first"))
    report.tokens, report.firsts = len(gaps), len(firsts)
    report.first_p50_s, report.first_p99_s = _quantile(firsts, 0.5), _quantile(firsts, 0.99)
    report.first_s = firsts[-1] if firsts else 0.0
    report.gap_s = gaps[-1] if gaps else 0.0
    report.gap_p999_s = _quantile(gaps, 0.999)
    report.health_s = max((seconds for kind, seconds in waits if kind == "health"), default=0.0)
    report.requests = {f"{name} {status}": count for (name, status), count in sorted(target.got.items(), key=str)}
    report.faults = [{name: value for name, value in item.items() if name != "begun_s"} for item in report.faults]
    allowed = {attack.__name__: statuses for attack, statuses in ATTACKS.items()}
    broken = [
        (report.gap_p999_s > bounds.gap_p999_s, f"p99.9 of a neighbour's gap: {report.gap_p999_s:.3f} s"),
        (report.gap_s > bounds.gap_s, f"a neighbour's gap of {report.gap_s:.3f} s"),
        (report.first_p99_s > bounds.first_p99_s, f"p99 of a neighbour's first token: {report.first_p99_s:.3f} s"),
        (report.first_s > bounds.first_s, f"a neighbour's first token after {report.first_s:.3f} s"),
        (report.health_s > bounds.health_s, f"/health took {report.health_s:.3f} s"),
        (report.memory_grown_mib > bounds.memory_mib, f"memory grew by {report.memory_grown_mib:.0f} MiB"),
        (report.descriptors_left > bounds.descriptors, f"{report.descriptors_left} descriptors are left open"),
        (report.requests_left > 0, f"{report.requests_left:.0f} requests are left running"),
        (not firsts, "the neighbour had no stream"),
    ]
    broken += [(True, f"a stream ended early after {s:.1f} s") for kind, s in waits if kind == "failed"]
    broken += [(True, f"/health failed after {s:.1f} s") for kind, s in waits if kind == "unwell"]
    broken += [(status not in allowed[name], f"{name} was answered with {status}") for name, status in target.got]
    for fault in report.faults:
        noticed_s = fault["noticed_s"]
        if fault["fault"] == "slow":
            continue
        broken.append((noticed_s is None or noticed_s > _NOTICED_S, f"{fault['fault']} noticed after {noticed_s} s"))
        broken.append((fault["serves_s"] is None, f"{fault['fault']}: the engine does not serve again"))
    report.broken = [text for is_broken, text in broken if is_broken]


def main() -> int:
    """Run by the command line, and print the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--engine", default="llama:2M", help="what to serve, or 'echo'")
    parser.add_argument("--only", default="", help="attacks whose names begin so, and no faults of the engine")
    arguments = parser.parse_args()
    some = [attack for attack in ATTACKS if attack.__name__.startswith(arguments.only)]
    faults = () if arguments.only else (0.3, 0.6)
    report = run(arguments.seed, arguments.minutes, engine=arguments.engine, attacks=some, faults=faults)
    print(json.dumps(asdict(report), indent=2))
    return 1 if report.broken else 0


if __name__ == "__main__":
    sys.exit(main())
