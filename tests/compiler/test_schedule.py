"""The timeline of a schedule and its exposed collectives: hand-made HLO, then XLA:TPU's own."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import P
from jax.sharding import AxisType, NamedSharding

from rooftop.arrays import Mesh
from rooftop.compiler.collectives.logical import logical_collectives
from rooftop.compiler.compiling import Compiled, CompileRequest
from rooftop.compiler.hlo.costs import work
from rooftop.compiler.ledger import TimedLedger, compiled_ledger, read_ledger
from rooftop.compiler.machine.lanes import compiled_lanes
from rooftop.compiler.machine.run import COMPUTE
from rooftop.compiler.machine.schedule import ESTIMATES, ScheduleTimeline, timeline
from rooftop.compiler.worker import compile_here
from rooftop.core.errors import RooftopError
from rooftop.core.timelines import COMPUTE as SPAN_COMPUTE
from rooftop.core.timelines import MORE, WAIT
from rooftop.core.timelines.perfetto import trace
from rooftop.hardware import Slice
from rooftop.roofline.collectives import price
from rooftop.roofline.rates import Rates
from rooftop.roofline.routing import route
from tests.support.hlo_modules import (
    ARRAY,
    CARRIED,
    NBYTES,
    PLUS,
    ROWS,
    call,
    dot,
    fused,
    gather,
    loop,
    module,
    module_text,
    named,
    pairs,
    permute,
)

MESH = Mesh.from_layout(Slice.parse("v5e:4x4"), "X=x,Y=y")
RATES = Rates.of(MESH.slice.chip)
DOT_S = float(RATES.matmul_s(ROWS, 512, 512, "bf16"))
GATHERED = f"bf16[{4 * ROWS},512]"


def groups(axis: str) -> str:
    return f"replica_groups=mesh['X'=4,'Y'=4] {{'{axis}'}}, dimensions={{0}}"


def gather_start(name: str, axis: str, operand: str = "x") -> str:
    return f"{name}-start = ({ARRAY}, {GATHERED}) all-gather-start(%{operand}), {groups(axis)}"


def gather_done(name: str) -> str:
    return f"{name} = {GATHERED} all-gather-done(%{name}-start)"


def gather_s() -> float:
    gather = price("all_gather", MESH.span("Y"))
    return float(gather.expected_s(4 * NBYTES, RATES.network("all_gather")))


def hop_s() -> float:
    """One shift of x along Y, an open line: the last device's message goes all the way back."""
    places = MESH.device_coordinates()
    source, target = places.reshape(-1, 2), places[:, [1, 2, 3, 0]].reshape(-1, 2)
    routed = route(MESH.slice.physical_axes, source, target, NBYTES)
    start_s, share = RATES.network("permute").at(1)
    return float(start_s + routed.latency_s + routed.seconds["ici"] / share["ici"])


def check(line: ScheduleTimeline) -> None:
    """Check the properties of every timeline."""
    assert line.total_s == pytest.approx(line.compute_s + line.exposed_s + line.other_wait_s)
    assert sum(line.spent_s.values()) == pytest.approx(line.compute_s + line.other_wait_s)
    drawn = sorted((event.start_s, event.end_s) for event in line.events if event.track == COMPUTE)
    assert sum(end - start for start, end in drawn) == pytest.approx(line.total_s)
    assert all(end <= start + 1e-12 for (_, end), (start, _) in pairwise(drawn))
    for collective in line.collectives:
        assert collective.start_s <= collective.done_s
        assert 0 <= collective.hidden_s <= collective.price_s
        assert (collective.ledger_entry.expected_s, collective.ledger_entry.exposed_s) == (
            collective.price_s,
            collective.exposed_s,
        )


def run(body: Sequence[str], *computations: str, estimates: str = "rooftop") -> ScheduleTimeline:
    line = timeline(module(body, *computations), MESH, estimates=estimates)
    check(line)
    return line


def test_synchronous_collectives_are_exposed() -> None:
    line = run([f"g = {GATHERED} all-gather(%x), {groups('Y')}", dot("d", "x")])
    (one,) = line.collectives
    assert (one.price_s, one.exposed_s, one.hidden_s) == pytest.approx((gather_s(), gather_s(), 0.0))
    assert line.compute_s == pytest.approx(DOT_S)
    assert one.collective.synchronous


def test_asynchronous_collectives_hide_behind_what_follows_their_start() -> None:
    dots = [dot(f"d{i}", "x") for i in range(2)]
    (hidden,) = run([gather_start("g", "Y"), *dots, gather_done("g")]).collectives
    assert hidden.price_s == pytest.approx(gather_s())
    assert hidden.exposed_s == pytest.approx(max(0.0, gather_s() - 2 * DOT_S))
    assert 0 < hidden.hidden_s < hidden.price_s
    (none,) = run([gather_start("g", "Y"), gather_done("g"), *dots]).collectives
    assert none.exposed_s == pytest.approx(gather_s())
    (all_of_it,) = run([gather_start("g", "Y"), *[dot(f"d{i}", "x") for i in range(12)], gather_done("g")]).collectives
    assert gather_s() < 12 * DOT_S
    assert all_of_it.exposed_s == 0.0


@pytest.mark.parametrize(("axis", "one_after_the_other"), [("Y", True), ("X", False)])
def test_links_are_shared(axis: str, one_after_the_other: bool) -> None:
    """Two collectives over one axis take turns; those over different axes do not meet."""
    starts = [gather_start("g", "Y"), gather_start("h", axis, "w")]
    line = run([*starts, gather_done("g"), gather_done("h")])
    first, second = line.collectives
    assert line.total_s == pytest.approx(gather_s() * (2 if one_after_the_other else 1))
    assert second.start_s == pytest.approx(first.done_s if one_after_the_other else 0.0)


def test_a_ring_is_priced_hop_by_hop() -> None:
    lines = [line for line in gather(4, 3, 0)]
    spelled = [line.replace(pairs(1, 4), pairs(1, 4, rows=4)) for line in lines]
    line = run(spelled)
    (ring,) = line.collectives
    assert (ring.collective.kind, ring.collective.axes, ring.collective.hops) == ("all_gather", ("Y",), 3)
    assert ring.price_s == pytest.approx(3 * hop_s())
    # Every start is followed by its own done: nothing hides.
    assert ring.exposed_s == pytest.approx(3 * hop_s())
    # Now each hop runs beside the dot of what has arrived before.
    own, *rest = spelled
    order = [rest[0], own, rest[1], rest[3], rest[2], rest[4], rest[6], rest[5], rest[7], rest[8]]
    (overlapped,) = run(order).collectives
    assert overlapped.exposed_s == pytest.approx(3 * max(0.0, hop_s() - DOT_S))


def test_the_two_directions_of_a_ring_are_separate_links() -> None:
    wrapped = Mesh.from_layout(Slice.parse("v5e:16x16"), "X=x,Y=y")
    two = [*permute("u", "x", 1, 16, rows=16), *permute("d", "w", -1, 16, rows=16)]
    starts, dones = two[::2], two[1::2]
    line = timeline(module([*starts, *dones]), wrapped)
    assert [collective.start_s for collective in line.collectives] == [0.0, 0.0]
    same = [line.replace(pairs(-1, 16, 16), pairs(1, 16, 16)) for line in (*starts, *dones)]
    first, second = timeline(module(same), wrapped).collectives
    assert second.start_s == pytest.approx(first.done_s)


def test_a_ring_round_a_square_has_links_of_its_own_in_either_direction() -> None:
    """Both use both axes both ways, but no link; a collective over the axes waits for them."""
    square = Mesh.from_layout(Slice.parse("v5e:4x4"), "X=x[2:2]+y[2:2],Y=x[1:2]+y[1:2]")
    order = (0, 1, 3, 2)

    def around(name: str, way: int) -> list[str]:
        hops = [
            f"{{{4 * group + order[at]},{4 * group + order[(at + way) % 4]}}}" for group in range(4) for at in range(4)
        ]
        start, done = permute(name, "x", 1, 4, rows=4)
        return [start.replace(pairs(1, 4, 4), f"source_target_pairs={{{','.join(hops)}}}"), done]

    (ahead, arrived), (back, returned) = around("u", 1), around("d", -1)
    line = timeline(module([ahead, back, arrived, returned]), square)
    assert [collective.start_s for collective in line.collectives] == [0.0, 0.0]
    again = [text.replace("u", "v", 1) if text.startswith("u") else text for text in (ahead, arrived)]
    first, second = timeline(
        module([ahead, again[0], arrived, again[1].replace("%u-start", "%v-start")]), square
    ).collectives
    assert second.start_s == pytest.approx(first.done_s)
    whole = f"g = {GATHERED} all-gather(%x), {groups('Y')}"
    travelling, gathered = timeline(module([ahead, whole, arrived]), square).collectives
    assert gathered.start_s == pytest.approx(travelling.done_s)


def test_loops_run_trip_by_trip() -> None:
    """Many equal trips cost as many times one, and a collective's figures are those of one execution."""
    body = [f"g = {GATHERED} all-gather(%y), {groups('Y')}", dot("d", "y"), dot("e", "d")]
    line = run(call("scan", "x"), *loop("scan", 1000, body, "e"))
    (one,) = line.collectives
    assert one.collective.executions == 1000
    assert one.exposed_s == pytest.approx(gather_s())
    assert line.total_s == pytest.approx(1000 * (gather_s() + 2 * DOT_S))


def test_a_loop_that_data_ends_lasts_as_many_trips_as_its_program_says() -> None:
    """Two and a half trips in the mean; without a declaration, one."""
    for scope, trips in (("trips[2.5]/", 2.5), ("", 1.0)):
        named = f"d = {ARRAY} dot(%y, %w), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}, "
        named += f'metadata={{op_name="step/while/body/{scope}layers/mlp/up/dot_general"}}, '
        named += 'backend_config={"window_config":{"estimated_cycles":"3000"}}'
        body, condition = loop("scan", 4, [f"g = {GATHERED} all-gather(%y), {groups('Y')}", named], "d")
        # The counter is compared with itself: no constant ends the loop.
        line = run(call("scan", "x"), body, condition.replace("%end = s32[] constant(4)", "%end = s32[] negate(%i)"))
        assert line.total_s == pytest.approx(trips * (gather_s() + DOT_S))
        (one,) = line.collectives
        assert (one.collective.executions, one.exposed_s) == (trips, pytest.approx(gather_s()))


def test_a_branch_lasts_as_long_as_its_program_says() -> None:
    """Of four trips one takes the branch, and in two the device waits for others that take it."""
    scope = 'metadata={op_name="step/while/body/taken[1:4:2]/layers/mlp/up/dot_general"}'

    def branch(name: str, *lines: str) -> str:
        body = "\n".join(f"  %{line}" for line in (f"y = {ARRAY} parameter(0)", *lines))
        start, _, root = body.rpartition("  ")
        return f"%{name} (y: {ARRAY}) -> {ARRAY} {{\n{start}  ROOT {root}\n}}"

    taken = [
        f"g = {GATHERED} all-gather(%y), {groups('Y')}",
        dot("d", "y", "y"),
        f"e = {ARRAY} dot(%d, %y), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}, {scope}",
    ]
    body = [
        "p = pred[] constant(true)",
        f"c = {ARRAY} conditional(%p, %y, %y), true_computation=%taken, false_computation=%other",
        dot("f", "c"),
    ]
    branches = branch("taken", *taken), branch("other", f"z = {ARRAY} copy(%y)")
    line = run(call("scan", "x"), *branches, *loop("scan", 4, body, "f"))
    assert line.total_s == pytest.approx(2 * (gather_s() + 2 * DOT_S) + 4 * DOT_S)
    (one,) = line.collectives
    assert one.collective.executions == 1
    assert (one.price_s, one.exposed_s) == pytest.approx((gather_s(), 2 * gather_s()))


def test_an_asynchronous_fusion_counts_once() -> None:
    """Start, step and done carry the same collective; what the step multiplies runs beside it."""
    gather = f'all-gather(%p0), channel_id=3, {groups("Y")}, frontend_attributes={{chain_id="0"}}'
    outside = f"({ARRAY}, {GATHERED})"
    computations = [
        fused("begin", [ARRAY], f"g = {GATHERED} {gather}",
              f'out = {outside} custom-call(%g), custom_call_target="AsyncCollectiveStart"'),
        fused("step", [ARRAY, GATHERED, ARRAY], f"g = {GATHERED} {gather}", dot("d", "p0", "p2"),
              f"out = ({ARRAY}, {ARRAY}, {GATHERED}) tuple(%d, %p0, %g)"),
        fused("end", [ARRAY, GATHERED], f"g = {GATHERED} {gather}",
              f'out = {GATHERED} custom-call(%p0, %p1, %g), custom_call_target="AsyncCollectiveDone"'),
    ]  # fmt: skip
    lines = [
        f"a = {outside} fusion(%x), kind=kCustom, calls=%begin",
        f"a0 = {ARRAY} get-tuple-element(%a), index=0",
        f"a1 = {GATHERED} get-tuple-element(%a), index=1",
        f"b = ({ARRAY}, {ARRAY}, {GATHERED}) fusion(%a0, %a1, %w), kind=kOutput, calls=%step",
        f"b1 = {ARRAY} get-tuple-element(%b), index=1",
        f"b2 = {GATHERED} get-tuple-element(%b), index=2",
        f"c = {GATHERED} fusion(%b1, %b2), kind=kCustom, calls=%end",
    ]
    line = run(lines, *computations)
    (one,) = line.collectives
    assert (one.collective.kind, one.collective.executions, one.collective.synchronous) == ("all_gather", 1, False)
    assert line.compute_s == pytest.approx(DOT_S)
    assert one.price_s == pytest.approx(gather_s())
    assert one.exposed_s == pytest.approx(gather_s() - DOT_S)


def test_prefetches_are_no_communication() -> None:
    copy = f"c-start = ({ARRAY}{{1,0:T(8,128)(2,1)S(1)}}, {ARRAY}, u32[]) copy-start(%x)"
    done = f"c = {ARRAY}{{1,0:T(8,128)(2,1)S(1)}} copy-done(%c-start)"
    line = run([copy, done])
    assert line.collectives == ()
    assert line.other_wait_s == pytest.approx(float(RATES.hbm_s(NBYTES)))
    # One that the program before has begun costs nothing here, and what lies in VMEM is not read from HBM.
    fetched = run([copy + ", cross_program_prefetch_index=0", done])
    assert fetched.other_wait_s == 0.0
    add = f"s = {ARRAY} add(%x, %x)"
    assert run([add]).compute_s == pytest.approx(float(RATES.hbm_s(3 * NBYTES)))
    assert run([copy + ", cross_program_prefetch_index=0", done, f"s = {ARRAY} add(%c, %c)"]).compute_s == (
        pytest.approx(float(RATES.hbm_s(NBYTES)))
    )


def test_a_fusion_reads_what_it_slices() -> None:
    piece = f"bf16[{ROWS // 8},512]"
    cut = fused("cut", [ARRAY, "s32[]"], "z = s32[] constant(0)",
                f"part = {piece} dynamic-slice(%p0, %p1, %z), dynamic_slice_sizes={{{ROWS // 8},512}}",
                f"out = {piece} negate(%part)")  # fmt: skip
    line = run(["i = s32[] constant(0)", f"f = {piece} fusion(%x, %i), kind=kLoop, calls=%cut"], cut)
    assert line.compute_s == pytest.approx(float(RATES.hbm_s(2 * NBYTES / 8)), rel=1e-3)


def test_xlas_own_estimates() -> None:
    """Cycles at the catalogue's clock, where the compiler gives them; ours where it does not."""
    body = [dot("d", "x"), f"s = {ARRAY} add(%d, %d)"]
    ours, theirs = run(body), run(body, estimates="xla")
    assert theirs.compute_s - ours.compute_s == pytest.approx(3000 / MESH.slice.chip.clock_hz - DOT_S)
    assert ESTIMATES == ("rooftop", "xla")
    with pytest.raises(RooftopError, match="estimates"):
        run(body, estimates="mine")


def test_kernels_are_named() -> None:
    kernel = f'k = {ARRAY} custom-call(%x, %w), custom_call_target="tpu_custom_call"'
    line = run([kernel])
    assert line.kernels == ("k",)
    assert line.compute_s == pytest.approx(float(RATES.hbm_s(3 * NBYTES)))


def test_a_kernel_moves_its_estimate_without_arrays_in_vmem() -> None:
    """Arrays that were copied to VMEM before are read from HBM once, and a kernel may read a part of one."""
    cost = f'{{"flops":"2","bytes_accessed":"{5 * NBYTES}"}}'
    call = f'k = {ARRAY} custom-call(%c, %x), custom_call_target="tpu_custom_call", '
    call += f'backend_config={{"custom_call_config":{{"cost_estimate":{cost}}}}}'
    vmem = ARRAY + "{1,0:T(8,128)(2,1)S(1)}"
    copy = f"c-start = ({vmem}, {ARRAY}, u32[]) copy-start(%x), cross_program_prefetch_index=0"
    done = f"c = {vmem} copy-done(%c-start)"
    assert run([call.replace("%c", "%x")]).compute_s == pytest.approx(float(RATES.hbm_s(5 * NBYTES)))
    assert run([copy, done, call]).compute_s == pytest.approx(float(RATES.hbm_s(4 * NBYTES)))
    inside = [copy, done, call.replace(f"k = {ARRAY}", f"k = {vmem}").replace("%x", "%c")]
    whole = run(inside).compute_s
    assert whole < 0.5 * float(RATES.hbm_s(NBYTES))
    part = [line.replace(str(5 * NBYTES), str(NBYTES // 2)) for line in inside]
    assert run(part).compute_s == pytest.approx(whole / 4)


@pytest.mark.parametrize(("word", "matmuls", "backward"), [("fwd", 2, False), ("dq", 3, True), ("dkv", 4, True)])
def test_kernels_are_priced_by_the_flops_that_they_declare(word: str, matmuls: int, backward: bool) -> None:
    """An attention kernel at the rate that was counted for the chip; both kernels of the backward pass together."""
    heads = "bf16[16,4096,128]"
    scores = 16 * 4096**2 / 2
    flops = int(2 * matmuls * 128 * scores)
    name = f"layers/attn/core/kernel_flops[{word}={flops}]/splash_mha_{word}/pallas_call"
    kernel = f'k = {heads} custom-call(%q, %q, %q), custom_call_target="tpu_custom_call", metadata={{op_name="{name}"}}'
    line = run([f"q = {heads} parameter(2)", kernel])
    whole = float(RATES.attention_s(scores, 128, 128, backward=backward))
    assert line.kernels == ()
    assert line.compute_s == pytest.approx(whole * (matmuls / 7 if backward else 1))
    other = run([f"q = {heads} parameter(2)", kernel.replace(word, "gmm").replace("_gmm", "_any_gmm")])
    large = float(RATES.matmul_s(32768, 32768, 32768, "bf16")) * flops / (2 * 32768.0**3)
    assert other.compute_s == pytest.approx(large)


def test_copies_to_the_host_take_its_link() -> None:
    """They run beside the rest, at the rate of PCIe and not of HBM."""
    out = f"o-start = ({ARRAY}{{1,0:S(5)}}, {ARRAY}, u32[]) copy-start(%x)"
    done = f"o = {ARRAY}{{1,0:S(5)}} copy-done(%o-start)"
    assert run([out, done]).other_wait_s == pytest.approx(NBYTES / RATES.pcie_bytes_per_s)
    assert run([out, *[dot(f"d{i}", "x") for i in range(40)], done]).other_wait_s == 0.0


# ---- the ledger with times ------------------------------------------------------------------------------------------


def timed_ledger(text: str, mesh: Mesh = MESH) -> TimedLedger:
    """The ledger of a text, as if it had been compiled."""
    program = Compiled(mesh=mesh, hlo_text=text, peak_bytes=0, memory={}, lower_s=0.0, compile_s=0.0, versions={})
    ledger = compiled_ledger(program)
    check(ledger.timeline)
    assert float(ledger.ledger.expected_s) == pytest.approx(ledger.timeline.total_s)
    return ledger


def test_rows_add_up_to_the_timeline() -> None:
    """Compute where its matmuls are, waits where the collective is, a copy where what it fetches is used."""
    fetch = [
        f"c-start = ({ARRAY}{{1,0:S(1)}}, {ARRAY}, u32[]) copy-start(%w)",
        f"c = {ARRAY}{{1,0:S(1)}} copy-done(%c-start)",
    ]
    body = [
        named(gather_start("g", "Y", "y"), "layers/attn/qkv"),
        named(dot("d", "y"), "layers/mlp/up"),
        gather_done("g"),
        named(dot("e", "d"), "layers/mlp/down"),
    ]
    lines = [*call("scan", "x"), *fetch, named(f"s = {ARRAY} add(%c, %c)", "layers/mlp/act")]
    timed = timed_ledger(module_text(lines, *loop("scan", 10, body, "e")))
    rows = {(row.scope, float(row.count)): row for row in timed.ledger}
    assert timed.step.expected_s == timed.timeline.total_s
    gathered, up, act = rows["layers/attn/qkv", 10], rows["layers/mlp/up", 10], rows["layers/mlp/act", 1]
    assert gathered.expected_s == pytest.approx(gather_s() - DOT_S)
    assert gathered.serial_s == pytest.approx(gather_s())
    (collective,) = gathered.collectives
    bound = float(price("all_gather", MESH.span("Y")).bound_s(4 * NBYTES)["ici"])
    assert (collective.time_s, gathered.time_s) == ({"ici": pytest.approx(bound)}, {"ici": pytest.approx(bound)})
    assert collective.exposed_s == pytest.approx(gathered.expected_s)
    assert up.expected_s == pytest.approx(DOT_S)
    flops = 2 * ROWS * 512 * 512
    assert up.flops == {"bf16": flops}
    assert up.time_s["mxu"] == pytest.approx(flops / RATES.flops_per_s["bf16"])
    # It reads and writes three arrays in HBM, of which the copy reads one.
    assert act.hbm_bytes == 2 * NBYTES
    assert act.expected_s == pytest.approx(float(RATES.hbm_s(2 * NBYTES)))
    assert act.time_s["hbm"] == pytest.approx(2 * NBYTES / RATES.hbm_bytes_per_s)
    step = timed.step.to_json()
    assert step["mxu_s"] == pytest.approx(20 * flops / RATES.flops_per_s["bf16"])
    assert step["exposed_ici_s"] == pytest.approx(10 * gathered.expected_s)
    assert (step["exposed_dcn_s"], step["serial_s"]) == (0.0, pytest.approx(float(timed.ledger.serial_s)))


def test_what_is_exposed_over_dcn() -> None:
    """A transfer between slices begins with its send and is waited for where it is received."""
    mesh = Mesh.from_layout(Slice.parse("v5e:4x4@2"), "D=dcn,X=x,Y=y")
    attributes = (
        'is_host_transfer=true, frontend_attributes={_xla_host_transfer_rendezvous="psum.7_0",'
        '_xla_megascale_target="{1,2}x{0:15}",_xla_megascale_transfer_type="ALL_REDUCE"}'
    )
    body = [
        "token = token[] after-all()",
        f"s = ({ARRAY}, u32[], token[]) send(%x, %token), channel_id=2, {attributes}",
        named(dot("d", "w"), "layers/mlp/up"),
        "sent = token[] send-done(%s), channel_id=2, is_host_transfer=true",
        f"r = ({ARRAY}, u32[], token[]) recv(%token), channel_id=1, {attributes}",
        f"received = ({ARRAY}, token[]) recv-done(%r), channel_id=1, is_host_transfer=true",
        f"g = {ARRAY} get-tuple-element(%received), index=0",
        named(f"n = {ARRAY} negate(%g)", "optimizer"),
    ]
    timed = timed_ledger(module_text(body), mesh)
    (one,) = timed.timeline.collectives
    collective = one.collective
    assert (collective.kind, collective.axes, collective.bytes, collective.scope) == (
        "all_reduce",
        ("D",),
        NBYTES,
        "gradients",
    )
    assert one.exposed_s == pytest.approx(one.price_s - DOT_S) != one.price_s
    assert (timed.step.exposed_ici_s, timed.step.exposed_dcn_s) == (0.0, pytest.approx(one.exposed_s))


# ---- collectives that have lost their names ----------------------------------------------------------------------


@pytest.mark.parametrize("op_name", ["", "x", "jit(f)/jvp(layers)/while/body/jit"])
def test_a_gather_without_a_name_belongs_to_what_uses_it(op_name: str) -> None:
    metadata = f', metadata={{op_name="{op_name}"}}' if op_name else ""
    body = [
        named(dot("d", "x"), "layers/attn/out"),
        gather_start("g", "Y", "d") + metadata,
        gather_done("g"),
        f"c = {GATHERED} copy(%g)",
        named(f"e = {GATHERED} negate(%c)", "layers/mlp/up"),
    ]
    (one,) = logical_collectives(module(body), {"X": 4, "Y": 4})
    assert (one.scope, one.phase) == ("layers/mlp/up", "forward")


@pytest.mark.parametrize(
    ("kind", "use", "place"),
    [
        ("all-reduce", "layers/mlp/up", ("layers/attn/out", "forward")),
        ("all-reduce", "optimizer", ("gradients", "update")),
        ("reduce-scatter", "optimizer", ("layers/attn/out", "forward")),
    ],
)
def test_a_sum_without_a_name_belongs_to_what_made_it(kind: str, use: str, place: tuple[str, str]) -> None:
    """Unless the optimizer uses it: that is a sum of gradients."""
    body = [
        named(dot("d", "x"), "layers/attn/out"),
        f"r = {ARRAY} {kind}(%d), {groups('Y')}, to_apply=%plus",
        named(f"e = {ARRAY} negate(%r)", use),
    ]
    (one,) = logical_collectives(module(body, PLUS), {"X": 4, "Y": 4})
    assert (one.scope, one.phase) == place


def test_an_all_reduce_of_zeros_and_one_part_gathers() -> None:
    """Each part belongs to what uses it; one layer's weights, used in the backward pass, are gathered again."""
    layers = "bf16[8,128,512]"

    def part(name: str, source: str) -> list[str]:
        return [
            f"{name} = bf16[128,512] reshape(%{source})",
            f"{name}-whole = {ARRAY} dynamic-update-slice(%zeros, %{name}, %i, %i)",
        ]

    body = [
        "zero = bf16[] constant(0)",
        f"zeros = {ARRAY} broadcast(%zero), dimensions={{}}",
        "i = s32[] partition-id()",
        f"stacked = {layers} parameter(2)",
        "layer = bf16[1,128,512] dynamic-slice(%stacked, %i, %i, %i), dynamic_slice_sizes={1,128,512}",
        *part("a", "layer"),
        "held = bf16[128,512] parameter(3)",
        *part("b", "held"),
        f"r = ({ARRAY}, {ARRAY}) all-reduce(%a-whole, %b-whole), {groups('Y')}, to_apply=%plus",
        f"g0 = {ARRAY} get-tuple-element(%r), index=0",
        f"g1 = {ARRAY} get-tuple-element(%r), index=1",
        dot("d", "x", "g0") + ', metadata={op_name="jit(f)/transpose(jvp(layers/mlp/up))/op"}',
        dot("e", "x", "g1") + ', metadata={op_name="jit(f)/transpose(jvp(layers/attn/out))/op"}',
    ]
    first, second = logical_collectives(module(body, PLUS), {"X": 4, "Y": 4})
    assert (first.kind, first.bytes) == (second.kind, second.bytes) == ("all_reduce", NBYTES)
    assert (first.scope, first.phase) == ("layers/mlp/up", "recompute")
    assert (second.scope, second.phase) == ("layers/attn/out", "backward")


@pytest.mark.parametrize(("stacked", "phase"), [(True, "recompute"), (False, "backward")])
def test_one_layers_weight_is_gathered_again_in_the_backward_pass(stacked: bool, phase: str) -> None:
    """Even where XLA names the gather after the matmul that it serves."""
    part = "p = bf16[128,512] " + (
        "dynamic-slice(%x, %i, %i), dynamic_slice_sizes={128,512}" if stacked else "slice(%x)"
    )
    body = [
        "i = s32[] partition-id()",
        part,
        f'g = {ARRAY} all-gather(%p), {groups("Y")}, metadata={{op_name="jit(f)/transpose(jvp(layers/mlp/up))/op"}}',
        dot("d", "w", "g") + ', metadata={op_name="jit(f)/transpose(jvp(layers/mlp/up))/op"}',
    ]
    (one,) = logical_collectives(module(body), {"X": 4, "Y": 4})
    assert (one.scope, one.phase) == ("layers/mlp/up", phase)


def test_what_a_loop_carries_to_its_use_and_from_what_made_it() -> None:
    body = [
        named(dot("d", "y"), "unembed"),
        f"b = {ARRAY} bitcast(%d)",
    ]
    lines = [
        gather_start("g", "Y"),
        gather_done("g"),
        f"part = {ARRAY} slice(%g), slice={{[0:{ROWS}], [0:512]}}",
        *call("scan", "part"),
        named(f"n = {ARRAY} bitcast(%scan)", "loss"),
        f"r = {ARRAY} all-reduce(%n), {groups('Y')}, to_apply=%plus",
    ]
    collectives = logical_collectives(module(lines, PLUS, *loop("scan", 10, body, "b")), {"X": 4, "Y": 4})
    assert {collective.kind: collective.scope for collective in collectives} == {
        "all_gather": "unembed",
        "all_reduce": "unembed",
    }


def test_a_collective_that_is_named_outside_every_scope_stays_there() -> None:
    """A collective that the user wrote is not ascribed to a neighbour."""
    body = [
        named(dot("d", "x"), "layers/attn/out"),
        f'r = {ARRAY} all-reduce(%d), {groups("Y")}, to_apply=%plus, metadata={{op_name="jit(f)/my_sum/psum"}}',
        named(f"e = {ARRAY} negate(%r)", "layers/mlp/up"),
    ]
    (one,) = logical_collectives(module(body, PLUS), {"X": 4, "Y": 4})
    assert one.scope == "unscoped"


# ---- traces ---------------------------------------------------------------------------------------------------------


def check_trace(written: Mapping[str, Any], line: ScheduleTimeline) -> None:
    """The Trace Event Format: what every phase of an event must have, slices that nest, arrows with both ends."""
    assert json.loads(json.dumps(written, allow_nan=False)) == written
    required = {
        "M": {"name", "pid", "args"},
        "X": {"name", "cat", "pid", "tid", "ts", "dur", "args"},
        "s": {"name", "cat", "id", "pid", "tid", "ts"},
        "t": {"name", "cat", "id", "pid", "tid", "ts"},
        "f": {"name", "cat", "id", "pid", "tid", "ts", "bp"},
    }
    for event in written["traceEvents"]:
        assert set(event) - {"ph", "tid"} == required[event["ph"]] - {"tid"}
        assert event.get("ts", 0.0) >= 0 <= event.get("dur", 0.0)
    named = {event["tid"] for event in written["traceEvents"] if event["name"] == "thread_name"}
    slices = [event for event in written["traceEvents"] if event["ph"] == "X"]
    assert {event["tid"] for event in slices} <= named
    for track in named:
        mine = sorted((event["ts"], event["ts"] + event["dur"]) for event in slices if event["tid"] == track)
        assert all(end <= start + 1e-6 for (_, end), (start, _) in pairwise(mine))
    compute = sum(event["dur"] for event in slices if event["tid"] == 1)
    assert compute == pytest.approx(1e6 * line.total_s)
    flows = {phase: [e["id"] for e in written["traceEvents"] if e["ph"] == phase] for phase in "stf"}
    assert len(set(flows["s"])) == len(flows["s"])
    assert set(flows["f"]) <= set(flows["s"]) == set(flows["t"])


def test_a_trace_of_a_loop() -> None:
    """The first trips in detail, the others as one block; one track for each link that is used."""
    body = [gather_start("g", "Y", "y"), named(dot("d", "y"), "layers/mlp/up"), gather_done("g"), dot("e", "d")]
    parsed = module(call("scan", "x"), *loop("scan", 1000, body, "e"))
    line = timeline(parsed, MESH)
    check(line)
    written = trace(compiled_lanes(parsed, line, title="a loop"))
    check_trace(written, line)
    names = [event["name"] for event in written["traceEvents"] if event["ph"] == "X"]
    (rest,) = (name for name in names if "more trips" in name)
    assert names.count("layers/mlp/up") == 1000 - int(rest.split()[0]) <= 3
    assert {"all_gather over Y", "wait for all_gather over Y"} <= set(names)
    tracks = {event["args"]["name"] for event in written["traceEvents"] if event["name"] == "thread_name"}
    assert tracks == {"compute", "link y+", "link y-"}


def test_every_trip_of_loops_within_loops() -> None:
    """A drawing trip by trip has every execution, and takes as long as the timeline."""
    inner = [gather_start("g", "Y", "y"), named(dot("d", "y"), "layers/mlp/up"), gather_done("g"), dot("e", "d")]
    outer = [
        f"inner-in = {CARRIED} tuple(%one, %y, %w)",
        f"inner-loop = {CARRIED} while(%inner-in), condition=%inner_condition, body=%inner_body",
        f"inner = {ARRAY} get-tuple-element(%inner-loop), index=1",
        named(dot("after", "inner"), "layers/mlp/down"),
    ]
    parsed = module(
        [dot("first", "x"), *call("outer", "first")], *loop("inner", 7, inner, "e"), *loop("outer", 11, outer, "after")
    )
    line = timeline(parsed, MESH)
    drawn = compiled_lanes(parsed, line, every_trip=True)
    compute = drawn.lanes[0].spans
    assert [span for span in compute if span.sort == MORE] == []
    assert sum(span.seconds for span in compute) == pytest.approx(line.total_s)
    counts = Counter(span.details["instruction"] for span in compute if span.sort == SPAN_COMPUTE)
    executions = Counter[str]()
    for place, name in line.spent_s:
        executions[name] += parsed.executions[place]
    assert counts == {name: count for name, count in executions.items() if name in counts}
    assert counts["d"] == parsed.executions["inner_body"]
    assert counts["after"] == parsed.executions["outer_body"] == 11
    waited = sum(span.seconds for span in compute if span.sort == WAIT)
    assert waited == pytest.approx(line.exposed_s + line.other_wait_s)
    assert all(one.end_s <= two.start_s + 1e-12 for one, two in pairwise(compute))
    flights = [span.flight for span in drawn.lanes[1].spans]
    assert len(set(flights)) == len(flights) == counts["d"], "every transfer has a number of its own"


def test_a_fusion_moves_its_results_in_their_own_dtype_and_layers_of_a_stack_alone() -> None:
    """A sum in float32 is rounded on its way out, and a stack that only changes its tiles is not read whole."""
    rounded = fused(
        "rounded", [ARRAY, ARRAY], f"a = f32[{ROWS},512] convert(%p0)", f"b = f32[{ROWS},512] convert(%p1)",
        f"s = f32[{ROWS},512] add(%a, %b)", f"r = {ARRAY} convert(%s)",
    )  # fmt: skip
    stack = f"bf16[9,{ROWS},512]"
    tiles = fused("tiles", [stack], f"c = {stack} copy(%p0)")
    layer = fused(
        "layer", [stack, "s32[]"], "z = s32[] constant(0)", f"t = {stack} fusion(%p0), kind=kLoop, calls=%tiles",
        f"l = bf16[1,{ROWS},512] dynamic-slice(%t, %p1, %z, %z), dynamic_slice_sizes={{1,{ROWS},512}}",
        f"r = {ARRAY} bitcast(%l)",
    )  # fmt: skip
    parsed = module(
        [
            f"sum = {ARRAY} fusion(%x, %w), kind=kLoop, calls=%rounded",
            f"all = {stack} broadcast(%x), dimensions={{1,2}}",
            "i = s32[] constant(3)",
            f"one = {ARRAY} fusion(%all, %i), kind=kLoop, calls=%layer",
        ],
        rounded, tiles, layer,
    )  # fmt: skip
    main = parsed.computations[parsed.entry]
    moved = {name: work(parsed, main, main.instructions[name]).hbm_bytes for name in ("sum", "one")}
    assert moved["sum"] == 3 * NBYTES
    assert moved["one"] == pytest.approx(2 * NBYTES, abs=8)


def test_a_scatter_moves_the_rows_that_it_updates_unless_it_makes_the_array() -> None:
    """Rows are read and written in place; updates are read once, and an array of zeros is written whole."""
    table, rows, index = f"bf16[{100 * ROWS},512]", f"bf16[{ROWS},512]", f"s32[{ROWS},1]"
    numbers = "update_window_dims={1}, inserted_window_dims={0}, scatter_dims_to_operand_dims={0}, index_vector_dim=1"
    plus = "%plus (a: bf16[], b: bf16[]) -> bf16[] {\n  %a = bf16[] parameter(0)\n  ROOT %b = bf16[] parameter(1)\n}"
    attributes = f"{numbers}, to_apply=%plus"
    into = fused(
        "into", [table, index, rows], f"b = {table} bitcast(%p0)", f"r = {table} scatter(%b, %p1, %p2), {attributes}"
    )
    new = fused("new", [index, rows], "z = bf16[] constant(0)", f"b = {table} broadcast(%z), dimensions={{}}",
        f"r = {table} scatter(%b, %p0, %p1), {attributes}")  # fmt: skip
    parsed = module(
        [
            f"table = {table} broadcast(%x), dimensions={{0,1}}",
            f"i = {index} iota(), iota_dimension=0",
            f"inside = {table} fusion(%table, %i, %x), kind=kCustom, calls=%into",
            f"alone = {table} scatter(%table, %i, %x), {attributes}",
            f"zeros = {table} fusion(%i, %x), kind=kCustom, calls=%new",
        ],
        plus, into, new,
    )  # fmt: skip
    main = parsed.computations[parsed.entry]
    moved = {name: work(parsed, main, main.instructions[name]).hbm_bytes for name in ("inside", "alone", "zeros")}
    assert moved["inside"] == moved["alone"] == 3 * NBYTES + 4 * ROWS
    assert moved["zeros"] == 101 * NBYTES + 4 * ROWS


# ---- XLA:TPU --------------------------------------------------------------------------------------------------------

B, D, F = 8192, 8192, 32768
NO_WINDOWED_EINSUM = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": 1000000}


def einsum(mesh: jax.sharding.Mesh, arguments: Mapping[str, Any]) -> jax.stages.Lowered:
    """bd,df->bf with the given shardings, as XLA partitions it by itself."""
    automatic = jax.sharding.Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))
    left, right, out = (NamedSharding(automatic, P(*axes)) for axes in arguments["shardings"])
    shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in arguments["shapes"]]
    with jax.set_mesh(automatic):
        return jax.jit(lambda x, w: x @ w, in_shardings=(left, right), out_shardings=out).lower(*shapes)


def ring(mesh: jax.sharding.Mesh, arguments: Mapping[str, Any]) -> jax.stages.Lowered:
    """In[B_X, D_Y] W[D, F_Y] by hand: shards of In go round Y, each multiplied while the next is on its way."""

    def local(x: jax.Array, w: jax.Array) -> jax.Array:
        size, width = jax.lax.axis_size("Y"), x.shape[1]
        out = jnp.zeros((x.shape[0], w.shape[1]), jnp.float32)
        for step in range(size):
            begin = (jax.lax.axis_index("Y") + step) % size * width
            out += jnp.dot(x, jax.lax.dynamic_slice_in_dim(w, begin, width), preferred_element_type=jnp.float32)
            if step < size - 1:
                x = jax.lax.ppermute(x, "Y", [((i + 1) % size, i) for i in range(size)])
        return out.astype(jnp.bfloat16)

    specs = (P("X", "Y"), P(None, "Y"))
    with jax.set_mesh(mesh):
        program = jax.shard_map(local, in_specs=specs, out_specs=P("X", "Y"))
        shapes = zip(((B, D), (D, F)), specs, strict=True)
        return jax.jit(program).lower(
            *(jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec)) for shape, spec in shapes)
        )


@cache
def compiled(case: str) -> Compiled:
    """Compile one case for v5e:4x4 in this process: its environment is that of the worker (see conftest)."""
    matmul = {"shapes": [[B, D], [D, F]], "shardings": [["X", "Y"], [None, "Y"], ["X", "Y"]]}
    second = {"shapes": [[B, F], [F, D]], "shardings": [["X", "Y"], ["Y", None], ["X", "Y"]]}
    arguments, name = {"gather": (matmul, "einsum"), "scatter": (second, "einsum"), "ring": ({}, "ring")}[
        case.partition(" ")[0]
    ]
    request = CompileRequest(
        mesh=MESH,
        program=f"{__name__}:{name}",
        arguments=arguments,
        options=NO_WINDOWED_EINSUM if case.endswith("plain") else {},
    )
    return Compiled(mesh=MESH, **vars(compile_here(request)))


@pytest.mark.parametrize(
    ("case", "kind", "hops", "synchronous"),
    [
        pytest.param("gather", "all_gather", 3, False, marks=pytest.mark.slow),
        pytest.param("gather plain", "all_gather", 0, True, marks=pytest.mark.slow),
        # Two hops carry zeros.
        ("scatter", "reduce_scatter", 5, False),
        ("scatter plain", "reduce_scatter", 0, True),
        ("ring", "all_gather", 3, False),
    ],
)
def test_collective_matmuls_of_the_compiler(case: str, kind: str, hops: int, synchronous: bool) -> None:
    """However XLA spells it, it is one collective over Y with the whole array's bytes; the ring hides most of it."""
    program = compiled(case)
    (one,) = logical_collectives(program.module, MESH.shape)
    assert (one.kind, one.axes, one.hops, one.synchronous) == (kind, ("Y",), hops, synchronous)
    # In[B_X, D] and Out[B_X, D] have the same size.
    assert (one.bytes, one.executions) == (B / 4 * D * 2, 1)
    # Newer XLA forgets where a gather comes from that it adds by itself.
    assert one.source.startswith(f"{__file__}:") or (case, program.versions["jax"][:4] > "0.10") == (
        "gather plain",
        True,
    )
    (row,) = (row for row in read_ledger(program.module, MESH.shape) if row.collectives)
    assert (row.collectives[0].kind, row.collectives[0].bytes) == (kind, one.bytes)
    line = timeline(program.module, MESH)
    check(line)
    flops_s = 2 * B * D * F / 16 / MESH.slice.device_flops_per_s("bf16")
    assert flops_s < line.compute_s < 1.2 * flops_s
    (scheduled,) = line.collectives
    assert (scheduled.hidden_s == 0) == synchronous
    timed = compiled_ledger(program)
    assert float(timed.ledger.expected_s) == pytest.approx(line.total_s)
    assert timed.ledger.flops() == read_ledger(program.module, program.mesh.shape, program.mesh).flops()
    check_trace(trace(compiled_lanes(program.module, line)), line)


@pytest.mark.slow
def test_a_windowed_einsum_is_faster_than_a_plain_one() -> None:
    """By our estimate and by XLA's: what the compiler chooses for v5e:4x4."""
    for estimates in ESTIMATES:
        for case in ("gather", "scatter"):
            windowed = timeline(compiled(case).module, MESH, estimates=estimates)
            plain = timeline(compiled(f"{case} plain").module, MESH, estimates=estimates)
            assert windowed.total_s < plain.total_s
        by_hand = timeline(compiled("ring").module, MESH, estimates=estimates)
        assert by_hand.exposed_s == 0.0
        assert by_hand.total_s < timeline(compiled("gather").module, MESH, estimates=estimates).total_s
