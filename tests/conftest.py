"""What every test shares: eight emulated devices, how hypothesis looks for examples, a way to call the command line."""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import settings
from jaxtyping import install_import_hook

from rooftop.cli.main import main
from tests.support import shape_checks

# JAX and libtpu read these when they are first used, which is after this file. The tests run on eight CPU devices
# everywhere; the TPU compiler asks no metadata server which machine this is, and lets several processes load it.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["TPU_SKIP_MDS_QUERY"] = "1"
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
# Tests check the shapes and dtypes that the programs' signatures state.
install_import_hook("rooftop.programs", f"{shape_checks.__name__}.checked")
# What a test compiles is compiled now, and leaves the user's own cache alone.
_CACHE = tempfile.TemporaryDirectory(prefix="rooftop-tests-")
os.environ["XDG_CACHE_HOME"] = _CACHE.name


def pytest_configure(config: pytest.Config) -> None:
    """Where slow tests are left out, XLA's compiler for CPUs hurries: most of the time is its."""
    if "not slow" in config.getoption("markexpr"):
        os.environ["XLA_FLAGS"] += " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"


# The same examples on every run and no deadline: a failure is then due to the change, not to a slow machine.
settings.register_profile("rooftop", derandomize=True, deadline=None)
settings.load_profile("rooftop")


@pytest.fixture(scope="module", autouse=True)
def programs_go_with_their_module() -> Iterator[None]:
    """JAX keeps what it has compiled, three mappings of memory for each kernel of a CPU.

    A process that comes to vm.max_map_count of them, 65,530 by default, crashes wherever it asks for memory next.
    """
    yield
    if "jax" in sys.modules:
        sys.modules["jax"].clear_caches()
        gc.collect()


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a call of ``rooftop`` said: exit status, stdout and stderr."""

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
