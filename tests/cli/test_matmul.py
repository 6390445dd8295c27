"""``rooftop matmul``: its answers, the worked problems of chapters 2, 3 and 9, what it refuses."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest

from rooftop.core.records import read_record, schema
from rooftop.library import arrays as library
from tests.conftest import Answer

Call = Callable[..., Answer]

SHOWN = "bf16[B_X, D_Y] @ bf16[D_Y, F] -> bf16[B_X, F]"
GIVEN = ("--dims", "B=8192,D=8192,F=32768", "--mesh", "X=4,Y=4", "--on", "v5e:4x4")
SMALL = ("--mesh", "X=4", "--on", "v5e:2x2")
V5E = ("--mesh", "X=4,Y=4", "--on", "v5e:4x4")
V4 = ("--mesh", "X=4,Y=4,Z=4", "--on", "v4:4x4x4")


def best(rooftop: Call, *arguments: str) -> Any:
    answer = rooftop("matmul", *arguments, "--json")
    assert answer.status == 0, answer.err
    return answer.json["strategies"][0]


def test_strategies_come_best_first_with_every_step(rooftop: Call) -> None:
    data = rooftop("matmul", SHOWN, *GIVEN, "--json").json
    times = [strategy["time_s"] for strategy in data["strategies"]]
    assert times == sorted(times) and len(times) == 8 < data["strategies_found"]
    assert data["cases"][0]["number"] == 3
    for strategy in data["strategies"]:
        assert strategy.keys() >= {"steps", "time_s", "bound", "rule", "flops", "memory_bytes", "fits"}
        assert strategy["time_s"] == pytest.approx(sum(step["time_s"] for step in strategy["steps"]))
        for step in strategy["steps"]:
            assert step.keys() >= {"op", "axes", "inputs", "output", "bytes", "flops", "time_s"}
    plain = next(
        strategy for strategy in data["strategies"] if strategy["rule"].startswith("multiply, then all_reduce")
    )
    multiply, total = plain["steps"]
    assert multiply["flops"] == 2 * 8192 * 8192 * 32768 / 16
    assert multiply["time_s"] == pytest.approx(multiply["flops"] / 1.97e14)
    assert (total["axes"], total["bytes"]) == (["Y"], 2048 * 32768 * 2)
    assert total["output"] == "bf16[B_X, F]"
    # A line of four, pipelined: V/w.
    assert total["time_s"] == pytest.approx(total["bytes"] / 4.5e10)


@pytest.mark.parametrize(
    ("expression", "output", "case", "axes"),
    [
        ("A[I_X, J] * B[J, K_Y]", "bf16[I_X, K_Y]", 1, []),
        ("A[I, J_X] * B[J, K]", "bf16[I, K]", 2, ["X"]),
        ("A[I, J_X] * B[J_X, K]", "bf16[I, K]{U_X}", 3, ["X"]),
        ("A[I_X, J] * B[J, K_X] -> C[I_X, K]", "bf16[I_X, K]", 4, ["X"]),
    ],
)
def test_a_product_alone_is_answered_with_its_case(
    rooftop: Call, expression: str, output: str, case: int, axes: list[str]
) -> None:
    """The four cases of chapter 3, as the book writes them: without sizes."""
    data = rooftop("matmul", expression, "--json").json
    jsonschema.validate(data, schema(library.MatmulResult))
    assert data["expression"].endswith(f" -> {output}")
    assert [(one["number"], one["axes"]) for one in data["cases"]] == [(case, axes)]
    shown = rooftop("matmul", expression).out
    assert (
        data["expression"] in shown and f"Case {case}" in shown and data["cases"][0]["rule"] in " ".join(shown.split())
    )


def test_the_table_says_what_binds(rooftop: Call) -> None:
    answer = rooftop("matmul", SHOWN, *GIVEN, "--top", "2", "--backward", "--simulate")
    assert answer.status == 0
    for text in ("Case 3 over Y", "best first", "ici binds", "Backward", "lower bounds"):
        assert text in answer.out


@pytest.mark.parametrize(
    ("expression", "programs"),
    [
        ("bf16[I, J_X] @ bf16[J_X, K] -> bf16[I, K]", ["output", "left", "right"]),
        ("AllGather_X(bf16[I_X, J])", ["input"]),
        ("bf16[I_X, J] -> bf16[I, J_X]", []),
        ("bf16[I_X, J]", []),
    ],
)
def test_json_follows_its_schema(expression: str, programs: list[str]) -> None:
    dims = {dim: 512 for dim in "IJK" if dim in expression}
    result = library.matmul(expression, dims=dims, mesh="X=4", on="v5e:2x2", backward=True, simulate=True)
    data = result.to_json()
    jsonschema.validate(data, schema(library.MatmulResult))
    assert list(data["backward"]) == programs
    assert read_record(library.MatmulResult, data, "answer") == result


def test_prices_are_bound_expected_or_the_books(rooftop: Call) -> None:
    bound, expected, book = (
        best(rooftop, "AllGather_X(bf16[I_X, J])", "--dims", "I=8192,J=8192", *V4, "--level", kind)["time_s"]
        for kind in ("bound", "expected", "book")
    )
    assert bound < expected
    assert bound == pytest.approx(book * 3 / 4)


def test_all_strategies_can_be_listed_and_overlap_left_out(rooftop: Call) -> None:
    data = rooftop("matmul", SHOWN, *GIVEN, "--top", "all", "--no-overlap", "--json").json
    assert len(data["strategies"]) == data["strategies_found"]
    assert not any("while" in strategy["rule"] or "chunks" in strategy["rule"] for strategy in data["strategies"])


def test_a_resharding_and_its_simulation(rooftop: Call) -> None:
    strategy = best(
        rooftop,
        "bf16[I_X, J] -> bf16[I, J_X]",
        "--dims",
        "I=4096,J=4096",
        "--mesh",
        "X=16",
        "--on",
        "v5e:4x4",
        "--simulate",
    )
    (step,) = strategy["steps"]
    assert step["op"] == "all_to_all"
    assert step["simulated_s"] == pytest.approx(step["time_s"], rel=0.05)


def test_a_layout_can_be_pinned(rooftop: Call) -> None:
    ring = ("--dims", "I=4096,J=4096", "--mesh", "X=4,Y=64", "--on", "v5e:16x16")
    whole = best(rooftop, "AllGather_X(bf16[I_X, J])", *ring, "--layout", "X=x[4:4],Y=x[1:4]+y")
    near = best(rooftop, "AllGather_X(bf16[I_X, J])", *ring, "--layout", "X=x[1:4],Y=x[4:4]+y")
    # Right round the ring in hops of four links that four groups share, or four neighbours on a line of their own.
    assert whole["time_s"] == pytest.approx(2 * near["time_s"])


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("bf16[I_X, J_X]", "--mesh", "X=2"), "X is used 2 times"),
        (("bf16[I_X, J]", "--mesh", "X=2"), "dim I"),
        (("bf16[I_X, J]", "--mesh", "X=2", "--dims", "I=3,J=4"), "a multiple of 2"),
        (("bf16[I_X, J]", "--mesh", "X=2", "--dims", "I=3,I=4"), "given twice"),
        (("bf16[I_X, J]", "--mesh", "Y=2", "--dims", "I=2,J=4"), "mesh axis"),
        (("AllGather_X(bf16[I_X])", "--mesh", "X=2", "--dims", "I=4"), "a slice, such as v5e:4x4"),
        (("AllGather_Y(bf16[I_X])", *SMALL, "--dims", "I=4"), "mesh axis"),
        (("AllGather_X(bf16[I_X])", "--mesh", "X=2", "--dims", "I=4", "--on", "v5e:2x2"), "the 4 devices of v5e:2x2"),
        (("AllGather_X(bf16[I_X])", *SMALL, "--dims", "I=4", "--level", "best"), "expected"),
        (("AllGather_X(bf16[I_X])", *SMALL, "--dims", "I=4", "--figure", "ici=3"), "figure"),
        (("AllGather_X(bf16[8_X, 8])", *SMALL), "give equal sizes names"),
        (("bf16[I] @ bf16[I]", *SMALL), "expression"),
        (("bf16[I] -> bf16[J]", *SMALL), "in another sharding"),
        (("f8_e4m3[I, J] @ f8_e4m3[J, K] -> bf16[I, K]", *SMALL, "--dims", "I=8,J=8,K=8"), "f8_e4m3"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(rooftop: Call, arguments: tuple[str, ...], named: str) -> None:
    answer = rooftop("matmul", *arguments)
    assert answer.status == 2
    assert named in answer.err
    assert answer.err.count("\n") == 1 and not answer.out


def test_jax_is_not_imported_for_an_answer() -> None:
    code = (
        "import sys; from rooftop.cli.main import cli\n"
        f"cli.main(args=['matmul', {SHOWN!r}, *{GIVEN!r}, '--json'], standalone_mode=False)\n"
        "assert not {'jax', 'scipy', 'rich'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


# Worked problems. `exact` and `book` as in reference/worked_problems.csv.


def test_s1_bytes_of_an_array(rooftop: Call) -> None:
    (array,) = rooftop("matmul", "int8[I_XY, J]", "--dims", "I=128,J=2048", "--mesh", "X=2,Y=8,Z=2", "--json").json[
        "arrays"
    ]
    assert (array["device_bytes"], array["total_bytes"]) == (16384, 524288)


def test_s2_all_gather_on_v5e(rooftop: Call) -> None:
    gather = "AllGather_Y(bf16[2048_Y, 8192])"
    line = best(rooftop, gather, "--mesh", "X=8,Y=4", "--on", "v5e:4x8")
    assert line["time_s"] == pytest.approx(559.24e-6, rel=1e-4)
    # With a ring, which a v5e has at 16 only; v4 links are as fast and close at 4.
    assert best(rooftop, gather, *V4)["time_s"] == pytest.approx(279.6e-6, rel=1e-3)
    ring = best(rooftop, gather, "--mesh", "X=16,Y=16", "--on", "v5e:16x16", "--level", "book")
    assert ring["time_s"] == pytest.approx(372.83e-6, rel=1e-4)


def test_s3_s8_latency(rooftop: Call) -> None:
    small = best(rooftop, "AllGather_Y(bf16[E_Y, F])", "--dims", "E=256,F=256", "--mesh", "X=8,Y=4", "--on", "v5e:4x8")
    assert small["time_s"] == small["steps"][0]["latency_s"] == pytest.approx(3e-6)
    assert best(rooftop, "AllGather_X(bf16[128_X])", *V4)["time_s"] == pytest.approx(2e-6)


def test_s4_copies(rooftop: Call) -> None:
    (array,) = rooftop("matmul", "bf16[I_X, J, K]", "--dims", "I=64,J=64,K=64", "--mesh", "X=4,Y=8,Z=2", "--json").json[
        "arrays"
    ]
    assert array["total_bytes"] / array["copy_bytes"] == array["replication"] == 16


@pytest.mark.parametrize(
    ("expression", "exact_us", "book_us"),
    [
        ("AllGather_X(bf16[1024_X, 4096_Y])", 17.48, 23.302),
        ("AllGather_XY(bf16[1024_X, 4096_Y])", 43.69, 46.603),
        ("AllReduce_Z(bf16[1024_X, 4096_Y]{U_Z})", 8.74, 11.651),
    ],
    ids=["s5", "s6", "s7"],
)
def test_s5_to_s7_rings_of_v4(rooftop: Call, expression: str, exact_us: float, book_us: float) -> None:
    assert best(rooftop, expression, *V4)["time_s"] == pytest.approx(exact_us * 1e-6, rel=1e-3)
    assert best(rooftop, expression, *V4, "--level", "book")["time_s"] == pytest.approx(book_us * 1e-6, rel=1e-3)


def test_s9_all_to_all_against_all_gather(rooftop: Call) -> None:
    ring = ("--dims", "I=8192,J=8192", "--mesh", "X=16,Y=16", "--on", "v5e:16x16")
    pair = "AllToAll_{X,J}(bf16[I_X, J])", "AllGather_X(bf16[I_X, J])"
    # The book's ratio is for whole shards; without the shard that stays at home a gather takes (N-1)/N as long.
    both_ways = [best(rooftop, expression, *ring, "--level", "book")["time_s"] for expression in pair]
    assert both_ways[0] / both_ways[1] == pytest.approx(0.25)
    one_way = [
        best(rooftop, expression, *ring, "--simulate", "--unidirectional")["steps"][0]["simulated_s"]
        for expression in pair
    ]
    assert one_way[0] / one_way[1] == pytest.approx(0.5, rel=0.02)


def test_s10_gather_first_or_scatter_after(rooftop: Call) -> None:
    for m, k in ((8192, 2048), (2048, 8192)):
        data = rooftop(
            "matmul",
            "bf16[N, M_X] @ bf16[M, K] -> bf16[N, K_X]",
            "--dims",
            f"N=4096,M={m},K={k}",
            "--mesh",
            "X=4",
            "--on",
            "v5e:2x2",
            "--top",
            "all",
            "--json",
        ).json
        times = {
            kind: next(
                step["time_s"]
                for strategy in data["strategies"]
                for step in strategy["steps"]
                if step["op"] == kind and step["bytes"] == 2 * 4096 * size
            )
            for kind, size in (("all_gather", m), ("reduce_scatter", k))
        }
        assert times["all_gather"] / times["reduce_scatter"] == pytest.approx(m / k)


def test_s11_the_smallest_buffer_that_is_not_latency_bound(rooftop: Call) -> None:
    pair = ("--mesh", "X=2,Y=4", "--on", "v5e:2x4")
    for shard, seconds in ((1000, 1e-6), (45000, 1e-6), (90000, 2e-6)):
        gather = best(rooftop, "AllGather_X(int8[I_X])", "--dims", f"I={2 * shard}", *pair)
        assert gather["time_s"] == pytest.approx(seconds)


def test_t7_corner_to_corner(rooftop: Call) -> None:
    path = best(rooftop, "bf16[8, 128, 8192]@(0,0) -> bf16[8, 128, 8192]@(3,3)", "--mesh", "X=4,Y=4", "--on", "v5e:4x4")
    (step,) = path["steps"]
    assert step["latency_s"] == pytest.approx(6e-6)
    assert step["resources"]["ici"] == pytest.approx(186.41e-6, rel=1e-4)
    assert path["time_s"] == pytest.approx(192.4e-6, rel=1e-3)


def test_the_bound_of_a_send_along_a_row_takes_the_second_path(rooftop: Call) -> None:
    words = ("bf16[I, J]@(0,0) -> bf16[I, J]@(0,3)", "--dims", "I=4096,J=4096", "--mesh", "X=4,Y=4", "--on", "v5e:4x4")
    path = best(rooftop, *words)
    assert path["time_s"] == pytest.approx(2 * 4096**2 / (2 * 4.5e10) + 3e-6, rel=1e-3)
    assert best(rooftop, *words, "--level", "expected")["time_s"] > 1.9 * path["time_s"]


def test_t8_everything_on_one_corner(rooftop: Call) -> None:
    path = best(
        rooftop,
        "int8[J_XY, K]@host -> int8[J, K]@(0,0)",
        "--dims",
        "J=128Ki,K=128Ki",
        *V5E,
        "--figure",
        "pcie_bytes_per_s=1.5e10",
    )
    host, gather = path["steps"]
    assert host["time_s"] == pytest.approx(71.6e-3, rel=1e-3)
    assert gather["time_s"] == pytest.approx(179e-3, rel=1e-3)
    alone = best(
        rooftop,
        "bf16[8, J] @ int8[J, K] -> bf16[8, K]",
        "--dims",
        "J=128Ki,K=128Ki",
        "--mesh",
        "X=1",
        "--on",
        "v5e:1x1",
        "--figure",
        "hbm_bytes_per_s=8.1e11",
    )
    assert alone["resources"]["hbm"] == pytest.approx(21.2e-3, rel=2e-3)
    assert alone["resources"]["mxu"] == pytest.approx(1.395e-3, rel=1e-3)
    assert not alone["fits"]


def test_x2_reduce_scatter_of_a_profile(rooftop: Call) -> None:
    scatter = best(
        rooftop,
        "ReduceScatter_{X,B}(bf16[A, B, C_Y]{U_X})",
        "--dims",
        "A=32,B=1024,C=8192",
        "--mesh",
        "X=2,Y=4",
        "--on",
        "v5e:2x4",
        "--figure",
        "ici_bytes_per_s=6e10",
    )
    assert scatter["time_s"] == pytest.approx(1.1185e-3, rel=1e-4)


# Beside the compiler, and on the devices that are here.


def test_check_sets_xlas_collectives_beside_ours(rooftop: Call) -> None:
    result = library.matmul(SHOWN, dims="B=8192,D=8192,F=32768", mesh="X=4,Y=4", on="v5e:4x4", compile=True)
    check = result.compiled
    assert check is not None
    jsonschema.validate(result.to_json(), schema(library.MatmulResult))
    (collective,), (ours,) = check.program.collectives, check.planned.collectives
    assert collective.kind == ours.kind == "all_reduce" and collective.axes == ours.axes == ("Y",)
    assert collective.bytes == ours.bytes == 2048 * 32768 * 2
    assert collective.wire_bytes == ours.wire_bytes == 2 * 3 / 4 * collective.bytes
    assert check.agrees
    assert check.program.flops == check.planned.flops == 2 * 8192 * 8192 * 32768 / 16
    assert check.program.time_s == pytest.approx(check.planned.time_s)
    assert 0 < check.exposed_s <= check.scheduled_s
    assert set(check.versions) == {"jax", "jaxlib", "libtpu"}


def test_check_says_who_found_better(rooftop: Call) -> None:
    """An operand split over the contracted dim alone: XLA gathers it, where multiplying shards moves less."""
    options = ("--dims", "I=512,J=16384,K=512", "--mesh", "X=2,Y=4", "--on", "v5e:2x4")
    data = rooftop("matmul", "bf16[I, J_XY] @ bf16[J, K] -> bf16[I, K]", *options, "--compile", "--json").json
    check = data["compiled"]
    assert {collective["kind"] for collective in check["planned"]["collectives"]} == {"all_reduce"}
    if not check["agrees"]:
        assert check["verdict"].startswith("the plan is better")
        assert check["program"]["time_s"] > check["planned"]["time_s"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("bf16[I_X, J] -> bf16[I, J]", "--mesh", "X=8", "--on", "h100:8"), "a TPU slice"),
        (("bf16[I_X, J]", "--mesh", "X=4", "--on", "v5e:2x2"), "an einsum, a resharding or a collective"),
        (("bf16[I_X, J] -> bf16[I, J]@(0,0)", "--mesh", "X=4", "--on", "v5e:2x2"), "arrays in the HBM"),
    ],
)
def test_what_cannot_be_compiled_is_refused(rooftop: Call, arguments: tuple[str, ...], named: str) -> None:
    answer = rooftop("matmul", *arguments, "--dims", "I=64,J=64", "--compile")
    assert (answer.status, answer.out) == (2, "") and named in answer.err


def test_measured_strategies_say_that_they_are_emulated(rooftop: Call) -> None:
    options = ("--dims", "B=64,D=64,F=64", "--mesh", "X=2,Y=4", "--on", "v5e:2x4")
    data = rooftop("matmul", SHOWN, *options, "--top", "2", "--measure", "--json").json
    assert data["measured"]["emulated"] is True
    assert [strategy["rule"] for strategy in data["measured"]["strategies"]] == [
        strategy["rule"] for strategy in data["strategies"]
    ]
    assert all(strategy["median_s"] > 0 and strategy["checked"] for strategy in data["measured"]["strategies"])
    jsonschema.validate(data, schema(library.MatmulResult))


def test_what_no_device_holds_is_said_first(rooftop: Call) -> None:
    job = ("matmul", "A[I,J_X] * B[J_X,K] -> C[I,K]", "--on", "v5e:4x4", "--mesh", "X=16", "--dims")
    assert rooftop(*job, "I=10M,J=10M,K=10M").out.startswith("Does not fit: every strategy needs more memory")
    assert "Does not fit" not in rooftop(*job, "I=8192,J=8192,K=8192").out
    assert rooftop(*job, "I=1e30,J=1,K=1").status == 2


def test_operands_in_host_memory_are_copied_while_others_are_multiplied(rooftop: Call) -> None:
    """Each device copies its own shard at the catalogue's rate of PCIe; the longest part is the bound."""
    dims = ("--dims", "I=8192,J=8192,K=8192", "--mesh", "X=4,Y=4", "--on", "v5e:4x4")
    near = best(rooftop, "A[I_X, J] * B[J, K_Y] -> C[I_X, K_Y]", *dims)
    far = best(rooftop, "A[I_X, J]@host * B[J, K_Y]@host -> C[I_X, K_Y]@host", *dims)
    chip = rooftop("chips", "v5e", "--json").json
    shards = 2 * (8192 * 8192 // 4) * 2 + 2 * (8192 * 8192 // 16)
    copied_s = shards / chip["figures"]["pcie_bytes_per_s"]["value"]
    assert sum(step["time_s"] for step in far["steps"]) == pytest.approx(near["time_s"] + copied_s, rel=1e-9)
    into_s = 2 * (8192 * 8192 // 4) * 2 / chip["figures"]["pcie_bytes_per_s"]["value"]
    assert far["streamed"] and far["time_s"] == pytest.approx(max(into_s, near["lower_s"]), rel=1e-9)
    expected = best(rooftop, "A[I_X, J]@host * B[J, K_Y]@host -> C[I_X, K_Y]@host", *dims, "--level", "expected")
    assert not expected["streamed"] and expected["time_s"] > far["time_s"]
    assert [step["op"] for step in far["steps"]] == ["host_transfer", "host_transfer", "einsum", "host_transfer"]
    simulated = best(rooftop, "A[I_X, J]@host * B[J, K_Y] -> C[I_X, K_Y]", *dims, "--simulate")
    assert simulated["time_s"] < far["time_s"]


@pytest.mark.parametrize("option", ["--backward", "--compile", "--measure"])
def test_what_no_program_does_with_operands_elsewhere_is_refused(rooftop: Call, option: str) -> None:
    dims = ("--dims", "I=8192,J=8192,K=8192", "--mesh", "X=4", "--on", "v5e:2x2")
    answer = rooftop("matmul", "A[I_X, J]@host * B[J, K]", *dims, option)
    assert (answer.status, answer.out) == (2, "")
    assert answer.err.startswith(f"rooftop: {option[2:]}: got ")
