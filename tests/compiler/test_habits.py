"""bench/compiler/habits.py reads the schedules of a release of libtpu, and writes its file."""

from __future__ import annotations

import importlib.metadata
import tomllib

import pytest

from bench.compiler import habits
from bench.compiler.habits import MovedBytes, ProgramFacts
from rooftop.core.errors import RooftopError
from rooftop.frameworks.framework import framework_of
from rooftop.frameworks.xla import libtpu_releases
from rooftop.hardware import chip


def moved(kind: str, *, asynchronous: float = 0.0, rings: float = 0.0) -> MovedBytes:
    """A collective of 100 bytes."""
    return MovedBytes(
        axes="fsdp", kind=kind, bytes=100.0, asynchronous=asynchronous, rings=rings, seconds=1.0, exposed_s=1.0
    )


def program(name: str, *collectives: MovedBytes, step_s: float = 1.0) -> ProgramFacts:
    return ProgramFacts(
        chip="v5e", program=name, slice="v5e:4x4", mesh="fsdp=x+y", versions={"jax": "0.10.2", "libtpu": "0.0.99"},
        date="2026-11-29", step_s=step_s, moved=collectives,
    )  # fmt: skip


def programs(*others: ProgramFacts) -> dict[str, ProgramFacts]:
    """A chip whose gathers are asynchronous, and whose sums over the whole slice are not scattered."""
    usual = (
        program("whole", moved("all_gather", asynchronous=97.4), moved("all_reduce")),
        program("tensor", moved("all_gather", asynchronous=95.0), moved("reduce_scatter")),
    )
    return {one.program: one for one in (*usual, *others)}


def test_habits_follow_from_the_collectives() -> None:
    assert habits.read_habits(programs()) == {
        "hides_weight_gathers": 0.97, "hides_gradient_scatters": 0.0, "asynchronous": "gathers",
        "sums_whole_slices": True, "gathers_as_sums": False, "slow_windowed_einsums": False,
    }  # fmt: skip


def test_gathers_that_became_sums_are_read_next_to_tensor_parallelism() -> None:
    read = habits.read_habits(programs(program("whole", moved("all_reduce"))))
    assert (read["gathers_as_sums"], read["hides_weight_gathers"], read["asynchronous"]) == (True, 0.95, "gathers")


@pytest.mark.parametrize(("without_s", "slow"), [(0.9, True), (1.1, False)])
def test_everything_asynchronous_and_rings_of_the_compiler(without_s: float, slow: bool) -> None:
    whole = program(
        "whole", moved("all_gather", asynchronous=100.0, rings=50.0), moved("reduce_scatter", asynchronous=100.0)
    )
    tensor = program("tensor", *whole.moved)
    read = habits.read_habits(programs(whole, tensor, program("plain", *whole.moved, step_s=without_s)))
    assert whole.has_rings and not programs()["whole"].has_rings
    assert (read["asynchronous"], read["slow_windowed_einsums"], read["sums_whole_slices"]) == ("all", slow, False)
    assert read["hides_weight_gathers"] == read["hides_gradient_scatters"] == 1.0


@pytest.mark.parametrize("name", ["whole", "tensor"])
def test_a_program_without_its_collectives_is_one_line(name: str) -> None:
    with pytest.raises(RooftopError, match=r"^program: got 'tensor of v5e'; accepted: one with a "):
        habits.read_habits(programs(program(name), program("tensor")))


def test_what_is_written_is_read_back_and_the_rest_is_carried_over() -> None:
    before = habits.read_rules("0.0.42.1")
    facts = {name: programs() for rule in before["rule"] for name in rule["chips"]}
    after = tomllib.loads(habits.text_of("0.0.99", facts, before))
    assert after["release"] == "0.0.99"
    for old, new in zip(before["rule"], after["rule"], strict=True):
        read = habits.read_habits(programs())
        carried = {name: value for name, value in old["habits"].items() if name not in read}
        assert new["habits"] == read | carried
        assert set(new.get("carried", {})) == set(carried)
        assert set(new.get("carried", {}).values()) <= {"libtpu 0.0.42.1"}
    lines = habits.differences(before, after)
    assert "v5p: asynchronous none -> gathers" in lines and not any(line.startswith("v5e") for line in lines)
    assert habits.differences(after, after) == []


@pytest.mark.parametrize("release", libtpu_releases())
def test_files_are_what_the_saved_facts_say(release: str) -> None:
    rows = [row for row in habits.read_rows() if row["libtpu"] == release]
    facts = habits.facts_of(rows)
    again = habits.text_of(release, facts, habits.read_rules(habits.base_release(release)))
    assert tomllib.loads(again) == habits.read_rules(release)
    written = [row for of_chip in facts.values() for one in of_chip.values() for row in habits.rows_of(one)]
    assert written == rows


def test_a_release_begins_with_the_newest_file_before_it() -> None:
    assert habits.base_release("99") == libtpu_releases()[-1]
    assert habits.base_release("0.0.1") == habits.base_release(libtpu_releases()[0]) == libtpu_releases()[0]


@pytest.mark.slow
def test_the_installed_compiler_has_the_habits_of_its_file() -> None:
    release = importlib.metadata.version("libtpu")
    if release not in libtpu_releases():
        pytest.skip(f"libtpu {release} has no file")
    from bench.compiler import habit_programs

    facts = {name: habit_programs.compiled("v5e", name) for name in ("whole", "tensor")}
    read, planned = habits.read_habits(facts), framework_of("rooftop", chip=chip("v5e"), release=release).habits
    assert read == {name: getattr(planned, name) for name in read}
