"""Habits of a release of libtpu, read from small programs: a file of rooftop/frameworks/data/xla.

    python bench/compiler/habits.py RELEASE        (make habits LIBTPU=RELEASE)

The release is installed in an environment of its own, unless it is the installed one, and compiles the eleven programs
of bench/compiler/habit_programs.py ahead of time: no TPU is needed, half an hour on two cores. Their facts are kept in
build/habits/RELEASE: what was interrupted goes on, and without that folder all is compiled again. Writes
rooftop/frameworks/data/xla/libtpu-RELEASE.toml, with the rules of each chip, the facts as rows of
bench/results/habit_programs.csv, and prints what differs from the newest file before it, or, if there is none, from the
file that was there. Habits that no program shows are carried over.
"""

from __future__ import annotations

import csv
import importlib.metadata
import io
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from rooftop.core.errors import RooftopError
from rooftop.core.files import read_json_object, read_text, write_text
from rooftop.core.records import Record, read_record
from rooftop.frameworks import xla
from rooftop.frameworks.habits import Habits
from rooftop.frameworks.xla import libtpu_releases, release_number
from rooftop.target.environments import Releases, python_with

ROOT = Path(__file__).parents[2]
DATA = Path(xla.__file__).with_name("data") / "xla"
FOLDER = ROOT / "build" / "habits"
RESULTS = ROOT / "bench" / "results" / "habit_programs.csv"
COLUMNS = (
    "libtpu", "jax", "date", "chip", "program", "slice", "mesh", "step_s", "axes", "kind", "bytes", "asynchronous",
    "rings", "seconds", "exposed_s",
)  # fmt: skip
#: Share of bytes from which on collectives count as asynchronous.
MOST = 0.9


@dataclass(frozen=True, kw_only=True)
class MovedBytes(Record):
    """A kind of collective over axes in a program: bytes, asynchronous ones, those in rings, seconds, and waiting.

    Rings are collective matmuls that XLA makes by itself.
    """

    axes: str
    kind: str
    bytes: float
    asynchronous: float
    rings: float
    seconds: float
    exposed_s: float


@dataclass(frozen=True, kw_only=True)
class ProgramFacts(Record):
    """The facts of a compiled program: the seconds of its step, and the collectives of its layers."""

    chip: str
    program: str
    slice: str
    mesh: str
    versions: dict[str, str]
    date: str
    step_s: float
    moved: tuple[MovedBytes, ...]

    def of(self, kind: str) -> MovedBytes | None:
        """The collectives of a kind over fsdp, or None."""
        return next((moved for moved in self.moved if (moved.axes, moved.kind) == ("fsdp", kind)), None)

    @property
    def has_rings(self) -> bool:
        """True if XLA made collective matmuls of weights that are gathered."""
        return any(moved.rings for moved in self.moved if moved.axes == "fsdp")

    def asynchronous(self, kind: str) -> float:
        """Share of the bytes of a kind of collective over fsdp that is asynchronous. Raises RooftopError for none."""
        moved = self.of(kind)
        if moved is None:
            accepted = f"one with a {kind} over fsdp, as every release before has it"
            raise RooftopError("program", f"{self.program} of {self.chip}", accepted)
        return moved.asynchronous / moved.bytes


#: Facts by chip and program.
Facts = Mapping[str, Mapping[str, ProgramFacts]]


def main(release: str) -> None:
    """Compile the programs, write the file of a release and the rows of its facts, and print what differs."""
    compile_programs(release)
    facts = read_folder(FOLDER / release)
    write_rows(facts)
    before = base_release(release)
    old, text = read_rules(before), text_of(release, facts, read_rules(before))
    print(f"libtpu {release}, next to the file of {before}:")
    print("\n".join(differences(old, tomllib.loads(text))) or "nothing differs")
    write_text(path_of(release), text)


def compile_programs(release: str) -> None:
    """Compile what has no facts yet. Raises RooftopError for a release that is not there, or does not compile."""
    is_installed = importlib.metadata.version("libtpu") == release
    python = sys.executable if is_installed else str(python_with(Releases.parse(f"libtpu=={release}")))
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [python, "-m", "bench.compiler.habit_programs", str(FOLDER / release)]
    if subprocess.run(command, env={**os.environ, "PYTHONPATH": path}).returncode:
        raise RooftopError("libtpu", release, "a release that compiles the programs: see the messages above")


# ---------------------------------------------------------------- facts


def read_facts(path: Path) -> ProgramFacts:
    """The facts in a file."""
    return read_record(ProgramFacts, read_json_object(path, field="facts", accepted="facts of a program"), path.name)


def read_folder(folder: Path) -> Facts:
    """The facts of all programs in a folder."""
    return by_chip(map(read_facts, sorted(folder.glob("*.json"))))


def by_chip(programs: Iterable[ProgramFacts]) -> Facts:
    """Facts by chip and program."""
    facts: dict[str, dict[str, ProgramFacts]] = {}
    for program in programs:
        facts.setdefault(program.chip, {})[program.program] = program
    return facts


def write_rows(facts: Facts) -> None:
    """Write the facts in place of those of the same release."""
    rows = [row for of_chip in facts.values() for program in of_chip.values() for row in rows_of(program)]
    others = [row for row in read_rows() if row["libtpu"] != rows[0]["libtpu"]]
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(sorted([*others, *rows], key=lambda row: release_number(row["libtpu"])))
    write_text(RESULTS, text.getvalue())


def rows_of(program: ProgramFacts) -> Iterator[dict[str, str]]:
    """A row for each kind of collective of a program."""
    for moved in program.moved:
        yield {
            "libtpu": program.versions["libtpu"], "jax": program.versions["jax"], "date": program.date,
            "chip": program.chip, "program": program.program, "slice": program.slice, "mesh": program.mesh,
            "step_s": f"{program.step_s:.6g}", "axes": moved.axes, "kind": moved.kind,
            **{name: f"{getattr(moved, name):.0f}" for name in ("bytes", "asynchronous", "rings")},
            **{name: f"{getattr(moved, name):.6g}" for name in ("seconds", "exposed_s")},
        }  # fmt: skip


def read_rows() -> list[dict[str, str]]:
    """The rows of all releases."""
    return list(csv.DictReader(io.StringIO(read_text(RESULTS)))) if RESULTS.exists() else []


def facts_of(rows: Iterable[Mapping[str, str]]) -> Facts:
    """The inverse of ``rows_of``."""
    programs: dict[tuple[str, str], list[Mapping[str, str]]] = {}
    for row in rows:
        programs.setdefault((row["chip"], row["program"]), []).append(row)
    numbers = ("bytes", "asynchronous", "rings", "seconds", "exposed_s")
    return by_chip(
        ProgramFacts(
            chip=chip,
            program=program,
            slice=lines[0]["slice"],
            mesh=lines[0]["mesh"],
            versions={name: lines[0][name] for name in ("jax", "libtpu")},
            date=lines[0]["date"],
            step_s=float(lines[0]["step_s"]),
            moved=tuple(
                MovedBytes(axes=row["axes"], kind=row["kind"], **{name: float(row[name]) for name in numbers})
                for row in lines
            ),
        )
        for (chip, program), lines in programs.items()
    )


# ---------------------------------------------------------------- from facts to habits


def read_habits(programs: Mapping[str, ProgramFacts]) -> dict[str, Any]:
    """The habits of a chip that its programs show; those of the whole slice where it has such collectives."""
    whole, tensor = programs["whole"], programs["tensor"]
    gathers_as_sums, sums_whole_slices = (whole.of(kind) is None for kind in ("all_gather", "reduce_scatter"))
    gathers = (tensor if gathers_as_sums else whole).asynchronous("all_gather")
    scatters = (tensor if sums_whole_slices else whole).asynchronous("reduce_scatter")
    moved = [*whole.moved, *tensor.moved]
    share = sum(one.asynchronous for one in moved) / sum(one.bytes for one in moved)
    return {
        "hides_weight_gathers": round(gathers, 2),
        "hides_gradient_scatters": round(scatters, 2),
        "asynchronous": "all" if share > MOST else "gathers" if gathers > MOST else "none",
        "sums_whole_slices": sums_whole_slices,
        "gathers_as_sums": gathers_as_sums,
        "slow_windowed_einsums": "plain" in programs and programs["plain"].step_s < whole.step_s,
    }


def seen(programs: Mapping[str, ProgramFacts], habits: Mapping[str, Any]) -> str:
    """One line: what the programs of a chip show."""
    parts = [
        f"{habits['hides_weight_gathers']:.0%} of AllGather bytes of weights asynchronous",
        f"{habits['hides_gradient_scatters']:.0%} of ReduceScatter bytes of gradients",
    ]
    if habits["gathers_as_sums"]:
        parts.append("an AllGather over the whole slice is an AllReduce")
    if habits["sums_whole_slices"]:
        parts.append("a ReduceScatter over the whole slice is an AllReduce")
    if "plain" in programs:
        with_rings, without = (1e3 * programs[name].step_s for name in ("whole", "plain"))
        parts.append(f"XLA's collective matmuls make a step of {without:.2f} ms one of {with_rings:.2f}")
    return "; ".join(parts).replace("%", " %")


# ---------------------------------------------------------------- files of releases


def path_of(release: str) -> Path:
    """The file of a release."""
    return DATA / f"libtpu-{release}.toml"


def read_rules(release: str) -> dict[str, Any]:
    """The file of a release as it is."""
    return tomllib.loads(read_text(path_of(release)))


def base_release(release: str) -> str:
    """The newest release before this one that has a file, or else the oldest."""
    known = [name for name in libtpu_releases() if release_number(name) < release_number(release)]
    return known[-1] if known else libtpu_releases()[0]


def text_of(release: str, facts: Facts, before: Mapping[str, Any]) -> str:
    """The file of a release: habits that its programs show, and those of the file ``before`` that no program shows."""
    programs = [program for of_chip in facts.values() for program in of_chip.values()]
    versions = ", ".join(f"{name} {programs[0].versions[name]}" for name in ("jax", "libtpu"))
    date = max(program.date for program in programs)
    lines = [
        f"# Schedules of train steps by libtpu {release}, by chip: habits of each program that it compiles. Rules as",
        f"# in maxtext.toml. `make habits LIBTPU={release}` writes this file. `carried`: habits that no program shows,",
        "# and the release with which they were read.",
        "",
        f"release = {_toml(release)}",
        f"source = {_toml(f'python bench/compiler/habits.py {release}; {versions}; {date}')}",
    ]
    for rule in before["rule"]:
        for chip in rule["chips"]:
            habits = read_habits(facts[chip])
            rest = {name: value for name, value in rule["habits"].items() if name not in habits}
            sources = rule.get("carried", {})
            carried = {name: sources.get(name, f"libtpu {before.get('release', release)}") for name in rest}
            lines += ["", "[[rule]]", f"chips = {_toml([chip])}", f"source = {_toml(seen(facts[chip], habits))}"]
            lines += [f"carried = {_toml(carried)}"] if carried else []
            lines += ["[rule.habits]", *(f"{name} = {_toml(value)}" for name, value in (habits | rest).items())]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    """A value as TOML has it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{name} = {_toml(part)}" for name, part in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return f'"{value}"' if isinstance(value, str) else repr(value)


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """A line for each habit of a chip that differs between two files."""
    old, new = _by_chip(before), _by_chip(after)
    return [
        f"{chip}: {name} {old[chip][name]} -> {value}"
        for chip, habits in new.items()
        for name, value in habits.items()
        if old[chip][name] != value
    ]


def _by_chip(rules: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The habits of each chip in a file, with those that all programs have."""
    book = {field.name: field.default for field in fields(Habits)}
    programs = tomllib.loads(read_text(DATA / "programs.toml"))["rule"]
    of_all = {name: value for rule in programs if "tpu" in rule["chips"] for name, value in rule["habits"].items()}
    return {chip: book | of_all | rule["habits"] for rule in rules["rule"] for chip in rule["chips"]}


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("python bench/compiler/habits.py RELEASE, such as 0.0.52")
    try:
        main(sys.argv[1])
    except RooftopError as error:
        sys.exit(str(error))
