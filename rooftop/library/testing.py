"""Compiled programs in tests: a fixture with a ledger for each test, and assertions.

A pytest plugin: ``pytest_plugins = ["rooftop.library.testing"]`` in conftest.py, or ``-p rooftop.library.testing``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from rooftop.core.quantities import format_bytes, format_seconds
from rooftop.library.programs.checking import CheckResult, check
from rooftop.library.programs.compiling import CompileResult


def assert_fits(compiled: CompileResult, *, share: float = 1.0) -> None:
    """Fail unless the peak is at most this ``share`` of the usable HBM of a device."""
    data = compiled.to_json(top=3)
    peak, capacity = float(str(data["peak_bytes"])), float(str(data["capacity_bytes"]))
    message = f"needs {format_bytes(peak)} of {format_bytes(share * capacity)}: {compiled.verdict}"
    assert data["fits"] and peak <= share * capacity, message


def assert_no_exposed(compiled: CompileResult, *, at_most_s: float = 0.0) -> None:
    """Fail if the device waits longer than ``at_most_s`` seconds a step for collectives; name the longest wait."""
    compiled.raise_if_infeasible()
    waits = [wait for wait in check(compiled).findings if wait.rule == "exposed_collective"]
    longest = f"; the longest: {waits[0].evidence} ({waits[0].source})" if waits else ""
    exposed_s = _exposed_s(compiled)
    assert exposed_s <= at_most_s, f"waits {format_seconds(exposed_s)} a step for collectives{longest}"


def _exposed_s(compiled: CompileResult) -> float:
    return sum(float(row.count) * float(moved.exposed_s) for row in compiled.ledger for moved in row.collectives)


@dataclass(frozen=True, kw_only=True)
class TestLedger:
    """The ledger file of one test."""

    __test__ = False

    path: Path
    save: bool

    def check(
        self, compiled: CompileResult, *, max_time: float | str = 0.02, max_memory: float | str = 0.01
    ) -> CheckResult:
        """Fail if the program needs more time or memory than the ledger allows, and say what changed by scope.

        Writes the ledger if there is none, or with ``--rooftop-save``.
        """
        if self.save or not self.path.exists():
            result = check(compiled)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            result.save(self.path)
            return result
        result = check(compiled, against=self.path, max_time=max_time, max_memory=max_memory)
        assert result.holds, result.summary
        return result


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--rooftop-save``."""
    parser.addoption("--rooftop-save", action="store_true", help="Write the ledgers of rooftop_ledger anew.")


@pytest.fixture
def rooftop_ledger(request: pytest.FixtureRequest) -> TestLedger:
    """The ledger of this test, in the folder ``ledgers`` next to its file."""
    name = re.sub(r"[^\w.\-]+", "_", request.node.name)
    save = bool(request.config.getoption("--rooftop-save", default=False))
    return TestLedger(path=request.path.parent / "ledgers" / f"{name}.json", save=save)
