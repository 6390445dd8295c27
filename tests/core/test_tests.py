"""The tests themselves: they pass on a slow machine, and none holds because it checks nothing."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import all_of_some

TESTS = Path(__file__).parents[1]
#: Folders whose bounds are seconds: a load that is run for them, and programs of other libraries.
TIMED = ("faults", "guests")
CLOCKS = {"monotonic", "perf_counter", "process_time", "time"}


def timed_tests() -> Iterator[tuple[str, ast.FunctionDef]]:
    """Tests of modules that use ``time``, each with the name of its module."""
    for path in sorted(TESTS.rglob("test_*.py")):
        name, text = path.relative_to(TESTS), path.read_text(encoding="utf-8")
        if name.parts[0] not in TIMED and "time." in text:
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                    yield name.as_posix(), node


def reads_clock(node: ast.AST, names: set[str]) -> bool:
    """True if an expression calls a clock, or has one of the names that were given its time."""
    for part in ast.walk(node):
        if isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute) and part.func.attr in CLOCKS:
            return isinstance(part.func.value, ast.Name) and part.func.value.id == "time"
        if isinstance(part, ast.Name) and part.id in names:
            return True
    return False


def upper_bounds(function: ast.AST) -> Iterator[int]:
    """Lines of a function that assert that something took at most some time."""
    names = {
        target.id
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and reads_clock(node.value, set())
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(function):
        if not isinstance(node, ast.Assert):
            continue
        for compared in ast.walk(node.test):
            if isinstance(compared, ast.Compare) and reads_clock(compared.left, names):
                yield from (compared.lineno for how in compared.ops if isinstance(how, ast.Lt | ast.LtE))


def fixed_waits(function: ast.AST) -> Iterator[int]:
    """Lines of a function that sleep for a fixed time, and not between two looks at a condition."""
    looped = {
        part
        for node in ast.walk(function)
        if isinstance(node, ast.While | ast.For)
        for child in node.body
        for part in ast.walk(child)
    }
    for node in ast.walk(function):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "sleep"
            and isinstance(node.func.value, ast.Name)
            and node.func.value.id == "time"
            and node not in looped
        ):
            yield node.lineno


def test_no_test_asserts_that_something_is_quick() -> None:
    """On a busy machine anything may take longer: order is asserted by events, and speed is for ``bench/``."""
    assert [f"{name}:{line}" for name, test in timed_tests() for line in upper_bounds(test)] == []


def test_no_test_waits_for_a_fixed_time() -> None:
    """After a fixed wait on a busy machine an event may only be late."""
    assert [f"{name}:{line}" for name, test in timed_tests() for line in fixed_waits(test)] == []


@pytest.mark.parametrize(
    "source",
    [
        "def test():\n    begun_s = time.monotonic()\n    work()\n    assert time.monotonic() - begun_s < 10",
        "def test():\n    took_s = time.perf_counter() - begun_s\n    assert came and took_s <= 10",
    ],
)
def test_upper_bounds_are_found(source: str) -> None:
    assert list(upper_bounds(ast.parse(source)))
    assert not list(upper_bounds(ast.parse(source.replace("<", ">"))))


def test_all_of_nothing_is_no_success() -> None:
    assert all([1, True]) and not all([1, False])
    with pytest.raises(AssertionError, match="all\\(\\) of nothing"):
        all_of_some([])
    assert all is all_of_some
