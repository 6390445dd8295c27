"""Einsums of sharded arrays: our best strategy beside what XLA:TPU chooses, over a sample of all shardings.

Two compilations each, in processes of their own (two seconds or so): the plain einsum, whose collectives are XLA's
choice, and our best strategy without overlap as a shard_map program, to see that the compiler keeps it and what its
schedule takes. Writes bench/results/einsums_against_xla.csv and prints the rate of agreement and every disagreement
with both prices.

    python bench/compiler/einsums_against_xla.py [COUNT]
"""

from __future__ import annotations

import csv
import io
import random
import sys
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import product
from pathlib import Path

from rooftop.algebra.einsums import Einsum, strategies
from rooftop.algebra.pricing import Prices
from rooftop.algebra.resharding import shardings
from rooftop.arrays import Mesh, ShardedArray
from rooftop.compiler.compiling import CompileRequest, compile_ahead_of_time
from rooftop.compiler.machine.schedule import timeline
from rooftop.core.errors import Infeasible, RooftopError
from rooftop.core.files import write_text
from rooftop.explain.compiled.einsum import check, compiled_program, planned_program
from rooftop.hardware import Slice

DIMS = {"E": 16, "I": 4096, "J": 8192, "K": 2048}
MESH = {"X": 2, "Y": 4}
RESULTS = Path(__file__).parents[1] / "results" / "einsums_against_xla.csv"


def every(dims: str, *, most: int) -> list[ShardedArray]:
    """Every sharding over at most ``most`` mesh axes of an array that is not unreduced."""
    plain = ShardedArray(dtype="bf16", dims=tuple(dims), axes=((),) * len(dims))
    splits = (split for split, _ in shardings(len(dims), MESH, unreduced=False))
    return [plain.with_axes(split) for split in splits if sum(map(len, split)) <= most]


def sample(count: int) -> Iterator[tuple[str, Prices, Einsum]]:
    """Random shardings of matmuls with and without a batch dim, half of them with one axis an array; some on v5p."""
    chosen = random.Random(3)
    forms = ("IJ", "JK", "IK"), ("IJ", "JK", "IK"), ("EIJ", "EJK", "EIK")
    choices = {
        (form, most): list(product(*(every(dims, most=most) for dims in form)))
        for form in set(forms)
        for most in (1, 2)
    }
    for place in range(count):
        name, most = "v5p:2x2x2" if place % 5 == 4 else "v5e:2x4", 1 + place % 2
        left, right, output = chosen.choice(choices[forms[place // 2 % 3], most])
        prices = Prices(mesh=Mesh.lay(Slice.parse(name), MESH), dims=DIMS)
        yield "one axis" if most == 1 else "any", prices, Einsum(left=left, right=right, output=output)


def compare(prices: Prices, asked: Einsum) -> dict[str, object]:
    """One row of the table."""
    answer = check(asked, prices)
    layout = prices.mesh.layout
    arguments = {
        "expression": str(asked), "dims": DIMS, "slice": prices.mesh.slice.name, "layout": layout, "rank": 0,
        "overlapped": False,
    }  # fmt: skip
    program = "rooftop.programs.einsum.sharded:lower_strategy"
    written = compile_ahead_of_time(CompileRequest(mesh=prices.mesh, program=program, arguments=arguments))
    schedule = timeline(written.module, written.mesh)
    best = planned_program(strategies(asked, prices, overlapped=False)[0], prices)
    as_written = compiled_program(written, schedule, prices, "bf16").keys == best.keys
    theirs, ours = answer.program, answer.planned
    return {
        "slice": prices.mesh.slice.name,
        "layout": layout,
        "einsum": asked,
        "agrees": answer.agrees,
        "ours": "; ".join(f"{moved.kind}_{''.join(moved.axes)} {moved.bytes:.0f}" for moved in ours.collectives),
        "ours_ms": round(1e3 * ours.time_s, 4),
        "ours_scheduled_ms": round(1e3 * schedule.total_s, 4),
        "ours_kept": as_written,
        "xla": "; ".join(
            f"{moved.kind}_{''.join(moved.axes)} {moved.bytes:.0f} x{moved.count}" for moved in theirs.collectives
        ),
        "xla_ms": round(1e3 * theirs.time_s, 4),
        "xla_scheduled_ms": round(1e3 * answer.scheduled_s, 4),
        "xla_exposed_ms": round(1e3 * answer.exposed_s, 4),
        "verdict": answer.verdict,
        "versions": ", ".join(f"{name} {version}" for name, version in answer.versions.items()),
    }  # fmt: skip


def main(count: int) -> None:
    """Compile, compare, write."""
    rows: list[dict[str, object]] = []
    for number, (kind, prices, asked) in enumerate(sample(count), start=1):
        try:
            row = {"sample": kind, **compare(prices, asked)}
        except (RooftopError, Infeasible) as error:
            print(f"{number:4} {asked}: {error}", flush=True)
            continue
        rows.append(row)
        print(f"{number:4} {row['slice']} {asked}: {row['verdict']}", flush=True)
    versions = rows[0]["versions"]
    text = io.StringIO()
    text.write(f"# python bench/compiler/einsums_against_xla.py {count}\n# {datetime.now(UTC):%Y-%m-%d}, {versions}\n")
    text.write(f"# dims {DIMS}; ours_ms and xla_ms are bounds, one after the other; *_scheduled_ms XLA's schedules\n")
    columns = [name for name in rows[0] if name != "versions"]
    writer = csv.DictWriter(text, columns, lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    writer.writerows(rows)
    write_text(RESULTS, text.getvalue())
    for kind in ("one axis", "any"):
        these = [row for row in rows if row["sample"] == kind]
        print(f"\n{kind}: {sum(bool(row['agrees']) for row in these)} of {len(these)} agree")
        for verdict, times in Counter(str(row["verdict"]).split(":")[0].split(" (")[0] for row in these).most_common():
            print(f"{times:4} {verdict}")
    faster = sum(float(str(row["ours_scheduled_ms"])) <= 1.01 * float(str(row["xla_scheduled_ms"])) for row in rows)
    print(
        f"\nour strategy written out: kept as written in {sum(bool(row['ours_kept']) for row in rows)} of {len(rows)},"
    )
    print(f"scheduled no slower than XLA's own (1 %) in {faster}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 100)
