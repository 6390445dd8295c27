"""Lookups and updates compiled for the SparseCores of three chips, with no TPU; and the readers of what libtpu says."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import pytest

from rooftop.arrays import Mesh
from rooftop.compiler.compiling import CompileRequest, compile_ahead_of_time
from rooftop.compiler.hlo.text import parse
from rooftop.compiler.sparsecore import (
    PIPELINING_OPTIONS,
    compile_with_marks,
    embedding_calls,
    read_marks,
    refusal,
    refuses_larger,
    sparsecore_overlap,
)
from rooftop.core.errors import Infeasible, RooftopError
from rooftop.hardware import Slice
from rooftop.models.embedding_tables.limits import StackLimits, full_buffer
from rooftop.models.embedding_tables.stacking import stack_tables
from rooftop.models.embedding_tables.tables import EmbeddingTable, Feature, TableOptimizer, Tables
from rooftop.plan.embedding.memory import stack_bytes, tile_capacity, tile_room
from rooftop.plan.embedding.problem import per_device
from rooftop.programs.embedding.lookup import EmbeddingProgram
from rooftop.programs.embedding.lowering import lower_part
from tests.support.embedding_programs import HLO

SLICES = ("v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1")


def request(on: str, part: str, kind: str, *, unique: int = 256, ids: int = 512, width: int = 32) -> CompileRequest:
    where = Slice.parse(on)
    cores = per_device(where) * where.devices
    tables = Tables(
        tables=(EmbeddingTable(name="t", vocabulary=4096 * cores, width=width, optimizer=TableOptimizer(kind=kind)),),
        features=(Feature(name="f", table="t"),),
    )
    limits = StackLimits(max_ids=ids, max_unique_ids=unique, buffer=full_buffer(ids, cores))
    return CompileRequest(
        mesh=Mesh.lay(where, {"data": where.devices}),
        program="rooftop.programs.embedding.lowering:lower_part",
        arguments={
            "tables": tables.to_json(),
            "cores_per_device": per_device(where),
            "batch": 128 * cores,
            "limits": {"t": vars(limits)},
            "part": part,
            "kernel": "sparsecore",
            "dense": 4,
        },
    )


@pytest.mark.slow
@pytest.mark.parametrize("on", SLICES)
@pytest.mark.parametrize(("part", "kind"), [("lookup", "sgd"), ("update", "sgd"), ("update", "adagrad")])
def test_the_compiler_marks_what_is_planned(on: str, part: str, kind: str) -> None:
    marks = compile_with_marks(request(on, part, kind))
    where = Slice.parse(on)
    planned = stack_bytes(
        "forward" if part == "lookup" else "backward",
        width=32,
        max_ids=512,
        max_unique_ids=256,
        cores=per_device(where) * where.devices,
        slots=len(TableOptimizer(kind=kind).slots(1)),
        room=tile_room(where.chip),
    )
    assert planned == pytest.approx(marks.hbm_bytes, rel=0.05)
    assert 0 < marks.tile_bytes <= tile_capacity(where.chip)
    assert f"tables/t/{part}" in marks.compiled.hlo_text


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["adam", "ftrl", "adagrad_momentum"])
@pytest.mark.parametrize("passes", [1, 4])
def test_every_elementwise_optimizer_compiles(kind: str, passes: int) -> None:
    asked = request("v5p:2x2x1", "update", kind)
    asked = dataclasses.replace(asked, arguments={**asked.arguments, "sample_passes": passes})
    compiled = compile_ahead_of_time(asked, cache=False)
    assert "sparsecore" in compiled.hlo_text
    # In passes over samples a table of sums lies beside table and slots, and all are changed in place.
    arrays = 1 + len(TableOptimizer(kind=kind).slots(1)) + (passes > 1)
    state_bytes = arrays * 4096 * 4 * 32 * 4
    assert state_bytes <= compiled.memory["alias"] < 1.01 * state_bytes


@pytest.mark.slow
@pytest.mark.parametrize("on", SLICES)
def test_a_pipelined_step_overlaps(on: str) -> None:
    asked = dataclasses.replace(request(on, "pipelined", "adagrad"), options=PIPELINING_OPTIONS)
    compiled = compile_ahead_of_time(asked, cache=False)
    overlap = sparsecore_overlap(compiled.module)
    assert overlap.calls >= 1 and overlap.share > 0.8


@pytest.mark.slow
def test_limits_that_no_tile_holds_are_an_answer() -> None:
    with pytest.raises(Infeasible, match=r"tile memory: No viable .*: 590,848 bytes of unique ids and 196,608 of ids"):
        compile_with_marks(request("v5p:2x2x1", "update", "sgd", unique=16384, ids=16384, width=8))


def test_an_optimizer_with_a_slot_per_row_is_refused_on_sparsecores() -> None:
    mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4])
    arguments: Mapping[str, Any] = request("v5p:2x2x1", "update", "rowwise_adagrad").arguments
    with pytest.raises(RooftopError, match="rowwise_adagrad"):
        lower_part(mesh, arguments)
    with pytest.raises(RooftopError, match="part"):
        lower_part(mesh, {**arguments, "part": "lokup"})


def test_sparsecores_read_buffers_laid_out_for_passes() -> None:
    tables = Tables(tables=(EmbeddingTable(name="t", vocabulary=8, width=8),), features=(Feature(name="f", table="t"),))
    stacking = stack_tables(tables, cores=2, cores_per_device=2, batch=2)
    limits = {"t": StackLimits(max_ids=8, max_unique_ids=8, buffer=16)}
    with pytest.raises(RooftopError, match="minibatching"):
        EmbeddingProgram(stacking=stacking, batch=2, limits=limits, kernel="sparsecore")


def test_marks_are_the_largest_of_the_log_in_bytes() -> None:
    def lines() -> Iterator[str]:
        for kind, mark in (("TileSpmem", 16), ("HBM", 5904), ("TileSpmem", 130955), ("HBM", 100)):
            yield f"I1120 21:25:38.514177   15183 allocation_assignment_pass.cc:299] {kind} high water mark: {mark}"

    assert read_marks("\n".join(lines())) == (5904 * 32, 130955 * 4)
    assert read_marks("nothing") is None


@pytest.mark.parametrize(
    ("said", "by", "larger"),
    [
        (
            "INVALID_ARGUMENT: E3001: CompileTimeSparseCoreInvalidReplicaCount:\nNo viable logical replica count for "
            "the embedding table with metadata: max_nz_per_row = 14440, feature_width = 8 (last tried split factor for "
            "vector splitting = 1, fixed_size_allocation_bytes = 520864, row_dependent_size_allocation_bytes = 173280, "
            "total_spmem_size_bytes = 524288)\nSee https://example.invalid for more details.",
            "No viable logical replica count: 520,864 bytes of unique ids and 173,280 of ids, which replicas share, in "
            "a tile of 524,288",
            True,
        ),
        (
            "RESOURCE_EXHAUSTED: Can't fit a single row. TileSpmem bytes: 524128; Row bytes: 5200000\nmore",
            "Can't fit a single row. TileSpmem bytes: 524128; Row bytes: 5200000",
            False,
        ),
        (
            "E3001: CompileTimeSparseCoreInvalidReplicaCount:\n",
            "E3001: CompileTimeSparseCoreInvalidReplicaCount:",
            True,
        ),
    ],
)
def test_a_refusal_says_whether_larger_limits_are_refused_too(said: str, by: str, larger: bool) -> None:
    no = refusal(said)
    assert no is not None and no.by == by and refuses_larger(no) is larger
    assert refuses_larger(Infeasible("a program", "needs 1.00GiB of HBM"))


def test_what_stands_between_start_and_done_is_beside() -> None:
    overlap = sparsecore_overlap(parse(HLO))
    assert (overlap.calls, overlap.computations, overlap.overlapped) == (1, 3, 1)
    assert overlap.share == pytest.approx(1 / 3)


def test_calls_that_embed_are_counted_where_their_rows_are_gathered() -> None:
    assert embedding_calls(parse(HLO)) == 0
    gathers = '  ROOT %rows = f32[8]{0} custom-call(%a), custom_call_target="SparseGather"'
    text = HLO.replace("  ROOT %a = f32[8]{0} parameter(0)", f"  %a = f32[8]{{0}} parameter(0)\n{gathers}")
    assert embedding_calls(parse(text)) == 1
