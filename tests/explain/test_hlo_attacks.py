"""Modules of HLO that anybody may have written: an answer, or one line; the work grows with the text and no faster.

A longer search: ``python -m tests.support.hlo_attacks --seconds 600``.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from rooftop.cli.main import main
from rooftop.compiler.hlo import places
from rooftop.compiler.hlo.text import MOST_NESTED, parse
from rooftop.core.errors import RooftopError
from rooftop.core.scopes import open_place
from rooftop.explain.axes import axes_of
from rooftop.explain.compiled.module import explain_module
from rooftop.hardware import chip
from tests.support.hlo_attacks import (
    LINEAR,
    REFUSED,
    answer,
    calls,
    chain,
    grammar,
    mutated,
    real_module,
    small_modules,
)

#: Sizes of attacks, of which the second is twice the first: a few hundred instructions.
SIZES = {"loops": (12, 24), "moves": (30, 60), "scalars": (60, 120)}
#: Mutated modules in the quick tests, and in the slow ones.
QUICK, SLOW = 60, 3000


@pytest.mark.parametrize("name", REFUSED)
def test_a_module_that_is_none_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    assert answer(REFUSED[name], tmp_path, on="v5e") == "refused"


@pytest.mark.parametrize("verb", ["explain", "check"])
def test_verbs_refuse_it_with_status_2(verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "m.hlo").write_text(REFUSED["its own operand"])
    with pytest.raises(SystemExit) as ended:
        main([verb, str(tmp_path / "m.hlo"), "--on", "v5e"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.splitlines() == [
        "rooftop: hlo: got 'r in main, which reads r'; accepted: operands that stand before what reads them, in one "
        "computation"
    ]


def test_calls_are_nested_to_a_limit(tmp_path: Path) -> None:
    assert answer(calls(MOST_NESTED), tmp_path, on="v5e") == ""
    with pytest.raises(RooftopError, match=f"accepted: up to {MOST_NESTED} levels"):
        parse(calls(MOST_NESTED + 2))


def lines_of(run: Callable[[], object]) -> int:
    """Lines of rooftop that Python executes: a measure of work that no other process disturbs."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        if "rooftop" not in frame.f_code.co_filename:
            return None
        count += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("name", [name for name in LINEAR if not name.startswith(("name", "attribute"))])
def test_work_grows_with_the_module(name: str, tmp_path: Path) -> None:
    work = list[int]()
    for size in SIZES.get(name, (150, 300)):
        path = tmp_path / f"{size}.hlo"
        path.write_text(LINEAR[name](size))
        work.append(lines_of(lambda path=path: explain_module(path, on=chip("v5e")).to_json()))  # type: ignore[misc]
    # Twice the module has about twice the work: what is quadratic would have four times as much.
    assert work[1] < 2.5 * work[0], work


@pytest.mark.parametrize("name", [name for name in LINEAR if name.startswith(("name", "attribute"))])
def test_long_texts_are_read_at_once(name: str, tmp_path: Path) -> None:
    """A quadratic reader of one of these takes minutes: regular expressions do not count their steps."""
    assert answer(LINEAR[name](60_000), tmp_path, on="v5e") in ("", "refused")


def test_the_producer_of_each_operation_is_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    module = parse(chain(3000))
    computation, steps = module.computations[module.entry], 0
    before = places.before

    def counted(*arguments: Any) -> Any:
        nonlocal steps
        steps += 1
        return before(*arguments)

    monkeypatch.setattr(places, "before", counted)
    used_by = places.users(computation)
    for instruction in computation:
        places.purpose(module, computation, instruction, used_by)
    assert 0 < steps <= len(computation.instructions)


def test_devices_that_pairs_connect() -> None:
    """A ring, in one order and in another, and two pairs."""
    ring = tuple((at, (at + 1) % 8) for at in range(8))
    assert axes_of([ring[::2] + ring[1::2]], 8) == axes_of([ring], 8)


def test_scopes_of_long_names_are_those_of_short_ones() -> None:
    assert open_place("jit(f)/(a/b/add:a/c/dot_general)") == ("a", "forward")
    assert open_place("f/a/mul;f/b/div") == ("f", "forward")
    assert open_place("jit(f)/transpose(jvp(a))/(b/(c/add:c/mul):b/d/e)")[1] == "backward"


@pytest.mark.parametrize("count", [QUICK, pytest.param(SLOW, marks=pytest.mark.slow)])
def test_damaged_modules_are_answered_or_refused(count: int, tmp_path: Path) -> None:
    seeds, outcomes = list(small_modules(real_module(), most=120)), dict[str, str]()
    for seed in range(count):
        draw = random.Random(seed)
        text = mutated(draw.choice(seeds) if draw.random() < 0.6 else grammar(draw), draw)
        outcomes[f"seed {seed}"] = answer(text, tmp_path, on="v5e", checked=draw.random() < 0.3)
    assert {"", "refused"} <= set(outcomes.values())
    failures = {seed: outcome for seed, outcome in outcomes.items() if outcome not in ("", "refused")}
    assert not failures, "\n".join(f"{seed}: {problem}" for seed, problem in failures.items())
