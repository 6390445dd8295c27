"""Shared by all tests: eight emulated devices, profiles of hypothesis, a way to call the command line."""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from jaxtyping import install_import_hook

from rooftop.cli.main import main
from tests.support import shape_checks
from tests.support.chromium import NO_BROWSER
from tests.support.examples import QUICK
from tests.support.quickly import QUICK_FLAGS

# JAX and libtpu read these when they are first used, which is after this file. The tests run on eight CPU devices
# everywhere; the TPU compiler asks no metadata server which machine this is, and lets several processes load it.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["TPU_SKIP_MDS_QUERY"] = "1"
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
# Output that is piped has the width that it has without a terminal; pytest-xdist sets another.
os.environ.pop("COLUMNS", None)
# Tests make many objects and few cycles: a collection at the end of each module is enough (below).
gc.set_threshold(500_000, 50, 100)
# Tests check the shapes and dtypes that signatures state. numba compiles what is in embed.host.kernel as it stands.
CHECKED = (
    "programs", "embed.criteo", "embed.export", "embed.train", "embed.host.inputs", "embed.host.limits",
    "embed.host.preprocess", "embed.host.statistics",
)  # fmt: skip
#: Small functions that are called often: checking them takes longer than their tests, so that only slow runs do.
CHECKED_SLOWLY = (
    "embed.host.buffers", "embed.host.lookups", "embed.host.minibatching", "embed.host.overflow",
    "embed.host.reference",
)  # fmt: skip
# Tests leave the user's own cache alone. What is compiled for CPUs, and by the compiler of TPUs, is compiled once in a
# session: the workers of pytest-xdist, which start with this environment, and the processes that tests start share a
# cache.
if "PYTEST_XDIST_WORKER" not in os.environ:
    _CACHE = tempfile.TemporaryDirectory(prefix="rooftop-tests-")
    os.environ["XDG_CACHE_HOME"] = _CACHE.name
    os.environ["JAX_COMPILATION_CACHE_DIR"] = f"{_CACHE.name}/jax"
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"


def pytest_configure(config: pytest.Config) -> None:
    """Where slow tests are left out, XLA's compiler for CPUs hurries: most of the time is its."""
    quick = "not slow" in config.getoption("markexpr")
    modules = [f"rooftop.{name}" for name in (CHECKED if quick else CHECKED + CHECKED_SLOWLY)]
    install_import_hook(modules, f"{shape_checks.__name__}.checked")
    if quick:
        os.environ["XLA_FLAGS"] += f" {QUICK_FLAGS}"
        settings.load_profile("quick")
    else:
        settings.load_profile("all")


#: Modules that take longest, in that order: started first, so that no process is left with one at the end.
LONGEST = (
    "train/test_train", "docs/test_docs", "faults/test_training", "train/test_whole_run", "programs/test_moe",
    "cli/test_compile", "target/test_scripts", "plan/test_training", "serve/test_engine", "embed/test_workers",
    "programs/test_attention", "ui/test_browser", "serve/test_engine_choices", "embed/test_train",
    "serve/test_processes", "serve/test_stationary", "serve/test_stages", "programs/test_training", "embed/test_runs",
    "faults/test_serving", "validation/test_training", "programs/test_promise", "validation/test_engines",
    "checkpoints/test_huggingface", "runs/test_checkpoints", "train/test_supervised", "programs/test_decode",
    "ui/test_accessible", "programs/test_packed_training", "programs/test_argument_layouts", "cli/test_serve",
    "programs/test_pipeline", "programs/test_families", "simulate/test_torus", "programs/test_sharded_einsum",
    "compiler/test_memory", "embed/test_host", "library/test_calibrating", "programs/test_collective_matmul",
    "serve/test_engine_faults", "compiler/test_schedule", "programs/test_embedding", "simulate/test_serving",
    "docs/test_words", "programs/test_partial_sums", "compiler/test_compiling", "programs/test_narrow",
    "cli/test_plan", "ui/test_ui", "target/test_session", "compiler/test_releases", "runs/test_power",
    "profile/test_microbench", "cli/test_installs", "serve/test_promise", "embed/test_train_step",
    "serve/test_simulated", "train/test_parts",
)  # fmt: skip


#: Rooms whose tests have threads and processes next to them: a list may be empty because it is not filled yet.
THREADED = ("core", "embed", "faults", "runs", "serve", "train")


def all_of_some(values: Iterable[object]) -> bool:
    """``all``, but not of nothing: a test that passes because a list is still empty checks nothing."""
    values = list(values)
    assert values, "all() of nothing: the test has not reached what it checks"
    return all(values)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the modules that take longest; the order within a module stays."""
    for module in {item.module for item in items if isinstance(item, pytest.Function)}:
        if Path(str(module.__file__)).parent.name in THREADED:
            module.__dict__.setdefault("all", all_of_some)
    places = {f"{name}.py": place for place, name in enumerate(LONGEST)}
    folder = Path(__file__).parent
    items.sort(key=lambda item: places.get(item.path.relative_to(folder).as_posix(), len(places)))


def pytest_collection_finish() -> None:
    """Spare the garbage collector what was imported: code and tests stay."""
    gc.collect()
    gc.freeze()


def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    """Count tests that lack a browser by themselves, so that the closing line tells of them."""
    if report.skipped and NO_BROWSER in str(report.longrepr):
        return "no browser", "s", "NO BROWSER"
    return None


# The same examples on every run and no deadline: a failure is then due to the change, not to a slow machine.
settings.register_profile("quick", derandomize=True, deadline=None, max_examples=QUICK)
settings.register_profile("all", derandomize=True, deadline=None)


@pytest.fixture(scope="module", autouse=True)
def programs_go_with_their_module() -> Iterator[None]:
    """JAX keeps what it has compiled, three mappings of memory for each kernel of a CPU.

    A process that comes to vm.max_map_count of them, 65,530 by default, crashes wherever it asks for memory next.
    """
    yield
    if "jax" in sys.modules:
        sys.modules["jax"].clear_caches()
        gc.collect()
        # A collection walks all objects, most of which are code that stays: half a second for each module.
        gc.freeze()


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The answer of a call of ``rooftop``: exit status, stdout and stderr."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The one JSON object on stdout."""
        return json.loads(self.out)


@pytest.fixture
def rooftop(capsys: pytest.CaptureFixture[str]) -> Callable[..., Answer]:
    """Call the command line in this process: ``rooftop("chips", "--json").json``."""

    def call(*arguments: str) -> Answer:
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit_:
            main(arguments)
        out, err = capsys.readouterr()
        status = exit_.value.code
        assert isinstance(status, int)
        return Answer(status=status, out=out, err=err)

    return call
