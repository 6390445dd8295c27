"""Build the wheel and the source distribution, install them in bare environments, and use every extra.

``python -m tests.release`` (``make release-check``) takes each Python that is here, of those that rooftop supports, and
each extra: an environment with nothing else, the seconds of its installation, its size, the verbs of the extra, and the
examples of every verb's help, each of which answers or names the extra that it lacks. The wheel that is installed is
built from the source distribution. The status is 1 if anything fails.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tests.support.help_examples import examples, is_refused, place, prepare, words_of
from tests.support.installs import NAMED

ROOT = Path(__file__).resolve().parent.parent
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
#: Seconds that one command may take.
LIMIT_S = 600
#: Seconds after which an example that still trains, searches or serves has run well, and is interrupted.
EXAMPLE_S = 120
_PLAN = ("plan", "train", "llama3-8b", "--on", "v5e:4x4", "--batch-seqs", "16", "--json")
_LIBRARY = "import rooftop; print(rooftop.plan_training('llama3-8b', on='v5e:4x4', batch_seqs=16).summary)"


class Failed(Exception):
    """A command of a check ended with another status than 0, or said something else than it should."""


def run(*command: str | Path, folder: Path, environment: Mapping[str, str] | None = None) -> str:
    """The output of a command. Raises Failed."""
    # A checkout on the path would be imported in place of what is installed.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    done = subprocess.run(
        [*map(str, command)], cwd=folder, env=inherited | dict(environment or {}), capture_output=True, text=True,
        timeout=LIMIT_S, check=False,
    )  # fmt: skip
    if done.returncode:
        raise Failed(f"{' '.join(map(str, command))}: status {done.returncode}: {done.stderr.strip()[-500:]}")
    return done.stdout


def plans(binaries: Path, folder: Path) -> None:
    """Plan as a command and as a function, and show help."""
    step = json.loads(run(binaries / "rooftop", *_PLAN, folder=folder))["step"]
    if not step["expected_s"] > 0:
        raise Failed(f"a plan without a time: {step}")
    run(binaries / "rooftop", "--help", folder=folder)
    run(binaries / "python", "-c", _LIBRARY, folder=folder)
    version = run(binaries / "rooftop", "--version", folder=folder).split()[-1]
    if version != run(binaries / "python", "-c", "import rooftop; print(rooftop.__version__)", folder=folder).strip():
        raise Failed(f"two versions: {version}")


def opens_the_page(binaries: Path, folder: Path) -> None:
    """Ask the page for an answer."""
    command = [binaries / "rooftop", "ui", "--port", "0", "--no-open"]
    with _serving(command, folder) as address:
        answer = json.loads(_read(f"{address}api/roofline"))
        if not answer["figures"]:
            raise Failed("a page without figures")


def serves(binaries: Path, folder: Path) -> None:
    """Serve a small random model, and complete a text."""
    command = [binaries / "rooftop", "serve", "llama:2M", "--port", "0", "--batch-seqs", "2", "--max-model-len", "64"]
    with _serving([*command, "--json"], folder) as address:
        body = json.dumps({"model": json.loads(_read(f"{address}v1/models"))["data"][0]["id"], "prompt": "a slice",
                           "max_tokens": 4}).encode()  # fmt: skip
        request = urllib.request.Request(f"{address}v1/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=LIMIT_S) as response:
            if json.load(response)["usage"]["completion_tokens"] < 1:
                raise Failed("a completion without tokens")


def trains(binaries: Path, folder: Path) -> None:
    """Train two steps on text, and export the weights."""
    (folder / "text.txt").write_text("some text to train on\n" * 400, encoding="utf-8")
    run(
        binaries / "rooftop", "train", "--model", "llama:1M", "--data", "text.txt", "--vocab", "300", "--steps", "2",
        "--seq", "32", "--batch-seqs", "2", "--samples", "0", "--run", "run", "--export", "exported", folder=folder,
    )  # fmt: skip
    if not list((folder / "exported").glob("*.safetensors")):
        raise Failed("no weights were exported")


def compiles(binaries: Path, folder: Path) -> None:
    """Compile a matmul for a slice of TPUs."""
    answer = run(
        binaries / "rooftop", "matmul", "A[I_X, J] * B[J, K]", "--dims", "I=1024,J=1024,K=1024", "--mesh", "X=4",
        "--on", "v5e:2x2", "--compile", "--json", folder=folder,
    )  # fmt: skip
    if json.loads(answer).get("compiled") is None:
        raise Failed("nothing was compiled")


def measures(binaries: Path, folder: Path) -> None:
    """Time a collective on two emulated devices."""
    run(
        binaries / "rooftop", "bench", "collectives", "--mesh", "X=2", "--sizes", "64Ki", "--kinds", "all_gather",
        "--json", folder=folder,
    )  # fmt: skip


def reads_limits(binaries: Path, folder: Path) -> None:
    """Find the limits of embedding tables in data."""
    shutil.copy(ROOT / "docs" / "tables.toml", folder)
    features = tomllib.loads((folder / "tables.toml").read_text(encoding="utf-8"))["features"]
    write = (
        "import sys, pyarrow, pyarrow.parquet as parquet\n"
        "parquet.write_table(pyarrow.table({name: [[1, 2]] * 64 for name in sys.argv[1:]}), 'day.parquet')"
    )
    run(binaries / "python", "-c", write, *features, folder=folder)
    run(
        binaries / "rooftop", "embed", "stats", "tables.toml", "day.parquet", "--on", "v5p:2x2x1", "--batch-samples",
        "64", "--json", folder=folder,
    )  # fmt: skip


def imports(module: str) -> Callable[[Path, Path], None]:
    """Import a module."""
    return lambda binaries, folder: (run(binaries / "python", "-c", f"import {module}", folder=folder), None)[1]


def tries_every_verb(binaries: Path, folder: Path) -> dict[str, list[str]]:
    """Run the examples of every verb's help; what came of them by verb: 'answers', 'runs', 'other input', or an extra.

    Raises Failed for an example that ends with a traceback, or with a line that names no extra.
    """
    outcomes: dict[str, list[str]] = {}
    for verb, lines in examples().items():
        place(folder, verb)
        for line in lines:
            outcomes.setdefault(verb, []).append(_outcome(binaries, folder, line))
    return outcomes


def _outcome(binaries: Path, folder: Path, line: str) -> str:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    inherited["PATH"] = f"{binaries}{os.pathsep}{inherited['PATH']}"
    process = subprocess.Popen(
        [binaries / "rooftop", *words_of(line)], cwd=folder, env=inherited, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        _, errors = process.communicate(timeout=EXAMPLE_S)
        ran = False
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=LIMIT_S)
        ran = True
    if "Traceback" in errors:
        raise Failed(f"{line}: {errors[-500:]}")
    if ran or process.returncode in (0, 1):
        return "runs" if ran else "answers"
    named = NAMED.match(errors)
    if named is not None:
        return named[2]
    if is_refused(line, errors):
        return "other input"
    raise Failed(f"{line}: status {process.returncode}: {errors[-500:]}")


def summary(outcomes: Mapping[str, Sequence[str]]) -> str:
    """The verbs whose examples all answer or run, and the others by the extra that they name."""
    by_extra: dict[str, list[str]] = {}
    for verb, ends in outcomes.items():
        for end in dict.fromkeys("here" if end in ("answers", "runs") else end for end in ends):
            by_extra.setdefault(end, []).append(verb)
    return "; ".join(f"{end}: {', '.join(names)}" for end, names in by_extra.items())


#: Extra -> what is done with it; planning is done with all of them.
EXTRAS: dict[str, Sequence[Callable[[Path, Path], None]]] = {
    "": (),
    "ui": (opens_the_page,),
    "tensorboard": (imports("tensorboardX"),),
    "parquet": (imports("pyarrow.parquet"),),
    "jax": (measures,),
    "serve": (serves,),
    "train": (trains,),
    "embed": (reads_limits,),
    "compile": (compiles,),
    "all": (opens_the_page, measures, serves, trains, reads_limits, compiles),
}


class _serving:
    """A server that has started, by its address: the first one in its output. It ends with the block."""

    def __init__(self, command: Sequence[str | Path], folder: Path) -> None:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed with the block)
        self._process = subprocess.Popen(
            [*map(str, command)], cwd=folder, env=inherited | {"PYTHONUNBUFFERED": "1"}, stdout=subprocess.PIPE,
            stderr=self._log, text=True,
        )  # fmt: skip

    def __enter__(self) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            at = line.find("http")
            if at >= 0:
                return line[at:].split('"')[0].split()[0].rstrip("/.,") + "/"
        self._log.seek(0)
        raise Failed(f"the server ended: {self._log.read()[-500:]}")

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGINT)
        self._process.wait(timeout=60)
        self._log.close()


def _read(address: str) -> bytes:
    with urllib.request.urlopen(address, timeout=LIMIT_S) as response:
        content: bytes = response.read()
        return content


def build(uv: str, output: Path) -> Path:
    """Build both distributions offline, the wheel from the source distribution; the wheel's path."""
    run(
        uv, "build", "--no-build-isolation", "--python", sys.executable, "--out-dir", output, ROOT, folder=ROOT,
    )  # fmt: skip
    (wheel,) = output.glob("*.whl")
    (source,) = output.glob("*.tar.gz")
    print(f"{wheel.name} {wheel.stat().st_size / 1e6:.1f} MB, {source.name} {source.stat().st_size / 1e6:.1f} MB")
    return wheel


def interpreter(uv: str, version: str) -> str | None:
    """A Python of this version that is installed here."""
    located = subprocess.run(
        [uv, "python", "find", "--no-python-downloads", "--no-project", version], capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    if located.returncode == 0:
        return located.stdout.strip()
    installed = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    return str(installed[-1]) if installed else None


def check(uv: str, python: str, wheel: Path, extra: str, folder: Path) -> tuple[float, float, str]:
    """Install the wheel with an extra, and use it. Raises Failed.

    Returns seconds of the installation, MB, and the verbs by the extras that they name.
    """
    run(uv, "venv", "--quiet", "--python", python, folder / "venv", folder=folder)
    binaries = folder / "venv" / "bin"
    begin = time.perf_counter()
    what = f"{wheel}[{extra}]" if extra else str(wheel)
    run(uv, "pip", "install", "--quiet", "--python", binaries / "python", what, folder=folder)
    seconds = time.perf_counter() - begin
    size = sum(file.lstat().st_size for file in (folder / "venv" / "lib").rglob("*") if file.is_file())
    run(uv, "pip", "check", "--quiet", "--python", binaries / "python", folder=folder)
    for use in (plans, *EXTRAS[extra]):
        use(binaries, folder)
    work = folder / "work"
    work.mkdir()
    prepare(work, clicks=8192)
    return seconds, size / 1e6, summary(tries_every_verb(binaries, work))


def main() -> int:
    """Check every Python and extra; print a row for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--python", action="append", choices=PYTHONS, help="this version only; may be repeated")
    parser.add_argument("--extra", action="append", choices=[name or "none" for name in EXTRAS])
    parser.add_argument("--output", type=Path, default=ROOT / "dist", help="folder of the distributions")
    options = parser.parse_args()
    uv = str(Path(sys.executable).with_name("uv"))
    shutil.rmtree(options.output, ignore_errors=True)
    wheel = build(uv, options.output)
    failed = False
    print(f"{'python':7} {'extra':12} {'install s':>9} {'size MB':>8}  verbs, by the extra that they name")
    for version in options.python or PYTHONS:
        python = interpreter(uv, version)
        if python is None:
            print(f"{version:7} SKIPPED: no Python {version} here")
            continue
        for extra in [name for name in EXTRAS if options.extra is None or (name or "none") in options.extra]:
            with tempfile.TemporaryDirectory(prefix="rooftop-release-") as folder:
                try:
                    seconds, size, verbs = check(uv, python, wheel, extra, Path(folder))
                except (Failed, subprocess.TimeoutExpired, OSError) as error:
                    failed = True
                    print(f"{version:7} {extra or 'none':12} FAILED: {error}", flush=True)
                else:
                    print(f"{version:7} {extra or 'none':12} {seconds:9.1f} {size:8.0f}  {verbs}", flush=True)
    with tempfile.TemporaryDirectory(prefix="rooftop-release-") as folder:
        run(uv, "tool", "run", "--quiet", "--from", wheel, "rooftop", *_PLAN, folder=Path(folder))
        print(f"uvx --from {wheel.name} rooftop {' '.join(_PLAN)}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
