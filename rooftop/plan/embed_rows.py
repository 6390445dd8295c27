"""Rows of an embedding plan's ledger: lookup and update of each stack of tables, and the dense part; of one device.

What moves through HBM and over the network follows from the ids expected, not from the limits: see docs/plan-embed.md.
"""

from __future__ import annotations

from rooftop.hardware import Slice
from rooftop.ledger import Collective, Row
from rooftop.models.tables_stacking import Stack
from rooftop.plan.embed_exchange import exchanged_bytes
from rooftop.plan.embed_memory import figure, slot_floats
from rooftop.plan.embed_problem import EmbedProblem, per_device

#: Bytes of a place of a buffer (id, sample, gain), of a float.
_PLACE, _FLOAT = 12, 4


def vector_flops_per_s(slice_: Slice) -> float:
    """Elementwise operations per second of a device's SparseCores: tiles x lanes x clock of the chip."""
    lanes = figure("tiles", "count") * figure("tiles", "lanes")
    return per_device(slice_) * lanes * slice_.chip.clock_hz


def table_rows(problem: EmbedProblem, stack: Stack) -> tuple[Row, Row]:
    """Lookup and update of one stack on one device: one execution is one pass over samples."""
    own, width = per_device(problem.slice), stack.width
    ids = problem.ids(stack) * own / problem.sample_passes
    unique = problem.uniques(stack) * problem.cores * own
    samples = problem.samples / problem.sample_passes
    row, activations = width * _FLOAT, own * samples * stack.rows_per_sample * width * _FLOAT
    payload = exchanged_bytes(
        "rows",
        width=width,
        max_ids=0,
        max_unique_ids=problem.uniques(stack),
        samples=0,
        cores=problem.cores,
        per_device=own,
    )
    held = row + slot_floats(stack.optimizer, width) * _FLOAT
    # What a loop over the passes changes of each row: where there are several, first the sums of the row's gradients.
    loops = (row, held + row) if problem.summed(stack) else (held,)
    # Lookup: holders read rows and write them to be sent; samples' cores write what comes and read a row an id.
    forward = _PLACE * ids + 3 * row * unique + row * ids + activations
    # Update: samples' cores read a gradient an id and write sums by row; holders read what comes, and change rows.
    backward = [_PLACE * ids + row * ids + 3 * row * unique + 2 * changed * unique + activations for changed in loops]
    merged = 2 * ids * width
    return (
        _row(problem, stack, "lookup", "forward", merged, forward, [float(payload["forward"])]),
        _row(
            problem,
            stack,
            "update",
            "update",
            merged * len(loops) + 8 * unique * width,
            sum(backward),
            [float(payload["backward"])] * len(loops),
        ),
    )


def _row(
    problem: EmbedProblem, stack: Stack, verb: str, phase: str, flops: float, hbm: float, payloads: list[float]
) -> Row:
    """One of the two rows; ``payloads`` are exchanged one after the other."""
    rates = problem.rates
    collectives = tuple(_all_to_all(problem, payload) for payload in payloads)
    expected = sum(float(each.expected_s) for each in collectives)
    bound = {name: sum(float(each.time_s[name]) for each in collectives) for name in collectives[0].time_s}
    vector_s = flops / vector_flops_per_s(problem.slice)
    hbm_s = float(rates.hbm_s(hbm))
    return Row(
        scope=f"tables/{stack.name}/{verb}",
        phase=phase,
        count=problem.sample_passes,
        vector_flops=flops,
        hbm_bytes=hbm,
        collectives=collectives if problem.slice.devices > 1 else (),
        time_s={"hbm": hbm / rates.hbm_bytes_per_s, "vpu": vector_s, **bound},
        expected_s=max(hbm_s, vector_s) + expected,
        serial_s=hbm_s + vector_s + expected,
        formula="rows and activations through HBM, different rows of each partition over the network",
    )


def _all_to_all(problem: EmbedProblem, payload: float) -> Collective:
    rates, price = problem.rates, problem.all_to_all
    expected = float(price.expected_s(payload, rates.network_efficiency("all_to_all"), rates.collective_start_s))
    return Collective(
        kind="all_to_all",
        axes=("data",),
        bytes=payload,
        wire_bytes=payload * float(price.wire_per_byte),
        critical=True,
        time_s={name: float(seconds) for name, seconds in price.bound_s(payload).items() if float(seconds) > 0},
        expected_s=expected,
        exposed_s=expected,
    )


def dense_rows(problem: EmbedProblem) -> tuple[Row, ...]:
    """Forward and backward of the dense part; nothing where its FLOPs are not given."""
    if not problem.dense_flops:
        return ()
    return _dense(problem, "forward", 1), _dense(problem, "backward", 2)


def _dense(problem: EmbedProblem, phase: str, times: int) -> Row:
    flops = times * problem.dense_flops * problem.batch / problem.slice.devices
    seconds = flops / problem.rates.flops_per_s["bf16"]
    return Row(
        scope="loss",
        phase=phase,
        flops={"bf16": flops},
        time_s={"mxu": seconds},
        expected_s=seconds,
        serial_s=seconds,
        formula=f"{times} x FLOPs of a sample x samples of a device",
    )
