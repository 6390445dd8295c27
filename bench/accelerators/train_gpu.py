"""MFU of training on one GPU: a model of 1B parameters and the largest that fits, and each row beside its roofline.

    python bench/accelerators/train_gpu.py -o bench/results/train_gpu.csv # on a GPU of the catalogue
    python bench/accelerators/train_gpu.py --tiny                         # toy models on whatever is here: does it run?

Everything is planned first, for one device of the local chip (a CPU: of ``--chip``, and then no measured figure
means anything): remat and microbatches are the plan's, and so are the bound of each row, which is its time at the
chip's peak rates, and its expected time. ``compiled_s`` is the time that rooftop reads from the schedule of the very
executable that runs. Matmuls are in bf16; weights and moments in ``state``. The largest model has LLaMA-3 8B's layers,
as many as the plan has memory for, and fewer if the compiled step takes more than the device has.

A step's time is that of steps one after the other, waited for at the end. The times of rows come from a trace of
further steps: what the device does in an HLO instruction belongs to the scope of that instruction. XLA's command
buffers are off, since a trace names no instruction in them. The line of scope 'step' is the whole; in it
``measured_s`` is by the clock, and what its rows lack of that is time in which the device waited.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import math
import os
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.profiler import ProfileData

from rooftop.compiler.compiling import Compiled
from rooftop.compiler.devices import Local, local_devices, mesh_of
from rooftop.compiler.hlo.places import place_of
from rooftop.compiler.hlo.text import parse
from rooftop.compiler.ledger import TimedLedger, compiled_ledger
from rooftop.core.errors import Infeasible
from rooftop.core.quantities import format_bytes
from rooftop.core.scopes import PHASES, SCOPES, UNSCOPED
from rooftop.hardware import Slice
from rooftop.models import ModelConfig, count_params, load_model
from rooftop.models.numerics import Numerics
from rooftop.plan.training.answer import plan_training
from rooftop.plan.training.plan import TrainingPlan
from rooftop.plan.training.problem import Problem
from rooftop.plan.training.workload import Workload
from rooftop.profile.microbench.timing import provenance, usable_bytes
from rooftop.programs.parameters import Batch
from rooftop.programs.training.program import TrainProgram
from rooftop.programs.training.step import abstract_batch, abstract_state, init_state, train_step
from rooftop.train.metrics import TrainRates

TOY = ModelConfig(
    name="toy", family="llama", layers=2, d_model=128, d_ff=384, heads=4, kv_heads=2, d_head=32, vocab=512,
    max_seq_len=128,
)  # fmt: skip
#: Layers that the search for the largest model goes up to.
LAYERS = 128
#: Scope and phase.
Key = tuple[str, str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A model with ``batch`` sequences of ``seq_len`` a step; ``most_layers``: as many as fit, up to that number."""

    name: str
    model: ModelConfig
    batch: int
    seq_len: int
    state: str = "f32"
    most_layers: int | None = None

    def plan(self, chip: str, layers: int) -> TrainingPlan:
        """The best plan with that many layers, which may not fit."""
        problem = Problem(
            model=dataclasses.replace(self.model, layers=layers),
            slice=Slice.parse(f"{chip}:1"),
            workload=Workload(batch_tokens=self.batch * self.seq_len, seq_len=self.seq_len),
            numerics=Numerics(weights=self.state, moments=self.state),
        )
        return plan_training(problem, alternatives=0).plan

    def layers(self, chip: str) -> int:
        """Number of layers to begin with: the most whose plan fits."""
        if self.most_layers is None:
            return self.model.layers
        fits, beyond = 0, self.most_layers + 1
        while beyond - fits > 1:
            middle = (fits + beyond) // 2
            fits, beyond = (middle, beyond) if self.plan(chip, middle).fits else (fits, middle)
        return fits


def compile_step(program: TrainProgram, mesh: jax.sharding.Mesh) -> tuple[jax.stages.Compiled, int]:
    """The compiled step, which donates its state, and the bytes that it takes at its peak."""
    with jax.set_mesh(mesh):
        step = jax.jit(train_step(program, program.specs(mesh)), donate_argnums=0)
        compiled = step.lower(abstract_state(program, mesh), abstract_batch(program, mesh)).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    live_bytes = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return compiled, live_bytes + memory.temp_size_in_bytes


def fitting(case: Case, chip: str, here: Local) -> tuple[TrainingPlan, TrainProgram, jax.stages.Compiled, int]:
    """Plan, program, compiled step and its bytes, with as many layers as fit. Raises Infeasible if it does not fit."""
    layers, room, mesh = case.layers(chip), usable_bytes(here.devices[:1]), mesh_of({}, here)
    while layers:
        plan = case.plan(chip, layers)
        program = TrainProgram.from_plan(plan)
        computation = dataclasses.replace(
            program.computation, attention=here.attention(program.compute_dtype, program.model)
        )
        program = dataclasses.replace(program, computation=computation)
        compiled, taken = compile_step(program, mesh)
        if taken <= room:
            return plan, program, compiled, taken
        short = f"{layers} layers take {format_bytes(taken)}, {format_bytes(taken - room)} more than there is"
        print(f"{case.name}: planned {format_bytes(plan.memory_bytes)}, but {short}", file=sys.stderr)
        layers = 0 if case.most_layers is None else layers - 1
    raise Infeasible(f"{case.name} does not fit {here.name}", f"has {format_bytes(room)} a device")


def measure(case: Case, chip: str, here: Local, steps: int, traced: int) -> list[dict[str, Any]]:
    """A line for the step and one for every row of the plan or the trace."""
    plan, program, compiled, taken = fitting(case, chip, here)
    mesh, model = mesh_of({}, here), program.model
    ids = np.random.default_rng(0).integers(model.vocab, size=(case.batch, case.seq_len + 1), dtype=np.int32)
    halves = Batch(tokens=ids[:, :-1], targets=ids[:, 1:])
    batch = jax.tree.map(lambda half, leaf: jax.device_put(half, leaf.sharding), halves, abstract_batch(program, mesh))
    state = init_state(program, jax.random.key(0), mesh)
    for _ in range(2):
        state, metrics = compiled(state, batch)
    jax.block_until_ready(state)
    start = time.perf_counter()
    for _ in range(steps):
        state, metrics = compiled(state, batch)
    jax.block_until_ready(state)
    step_s = (time.perf_counter() - start) / steps
    if not math.isfinite(loss := float(metrics.loss)):
        raise SystemExit(f"{case.name}: the loss is {loss}")
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(traced):
                state, metrics = compiled(state, batch)
            jax.block_until_ready(state)
        (trace,) = Path(folder).rglob("*.xplane.pb")
        spent = by_row(ProfileData.from_file(str(trace)), places(compiled))
    peak = here.flops_per_s(program.compute_dtype)
    rates, tokens = TrainRates.of(model, case.seq_len, peak), case.batch * case.seq_len
    mfu = rates.mfu(tokens / step_s)
    used = (here.devices[0].memory_stats() or {}).get("peak_bytes_in_use")
    same = {
        "case": case.name,
        "layers": model.layers,
        "parameters": count_params(model).total,
        "batch": case.batch,
        "seq_len": case.seq_len,
        "state": case.state,
        "remat": program.computation.remat,
        "microbatches": program.microbatches,
        "attention": program.computation.attention,
    }
    timed = read(compiled, plan, taken)
    whole = {
        **same,
        "scope": "step",
        "phase": "",
        **times(plan.bound, max(plan.lower_s.values()), plan.expected_s, float(timed.step.expected_s), step_s),
        "tokens_per_s": f"{tokens / step_s:.1f}",
        "mfu": "" if mfu is None else f"{mfu:.4f}",
        "planned_mfu": f"{plan.mfu:.4f}",
        "planned_bytes": round(plan.memory_bytes),
        "compiled_bytes": taken,
        "peak_bytes_in_use": used or "",
        "loss": f"{loss:.4f}",
    }
    return [whole] + [same | row for row in rows(plan, timed, {key: spent[key] / traced for key in spent})]


def read(compiled: jax.stages.Compiled, plan: TrainingPlan, taken: int) -> TimedLedger:
    """The executable as rows with times, as ``rooftop compile`` reads a program that was compiled without a GPU."""
    text = compiled.as_text()
    assert text is not None
    program = Compiled(
        hlo_text=text, peak_bytes=taken, memory={}, lower_s=0.0, compile_s=0.0, versions={}, mesh=plan.mesh
    )
    return compiled_ledger(program)


def rows(plan: TrainingPlan, timed: TimedLedger, spent: Mapping[Key, float]) -> list[dict[str, Any]]:
    """Every row that the plan, the executable or the trace has, in the order of the scopes."""
    planned, compiled = plan.ledger.by_key(), timed.ledger.by_key()
    order = {name: index for index, name in enumerate((*SCOPES, UNSCOPED))}
    keys = planned.keys() | compiled.keys() | spent.keys()
    table = []
    for scope, phase in sorted(keys, key=lambda key: (order.get(key[0], len(order)), PHASES.index(key[1]))):
        rows, busy = planned.get((scope, phase), []), Counter[str]()
        for row in rows:
            for resource, seconds in row.time_s.items():
                busy[resource] += float(row.count * seconds)  # type: ignore[assignment]
        bound = max(busy, key=lambda resource: busy[resource], default="")
        expected_s = sum(float(row.count * row.expected_s) for row in rows)
        compiled_s = sum(float(row.count * row.expected_s) for row in compiled.get((scope, phase), []))
        measured_s = spent.get((scope, phase), 0.0)
        table.append({"scope": scope, "phase": phase} | times(bound, busy[bound], expected_s, compiled_s, measured_s))
    return table


def times(bound: str, bound_s: float, expected_s: float, compiled_s: float, measured_s: float) -> dict[str, str]:
    """The binding resource, the four times, and the share of the bound that the measured one reaches."""
    return {
        "bound": bound,
        "bound_s": f"{bound_s:.4g}",
        "expected_s": f"{expected_s:.4g}",
        "compiled_s": f"{compiled_s:.4g}",
        "measured_s": f"{measured_s:.4g}",
        "of_roofline": f"{bound_s / measured_s:.3f}" if measured_s else "",
    }


def places(compiled: jax.stages.Compiled) -> dict[str, Key]:
    """Scope and phase of every instruction of the compiled program, by its name."""
    module = parse(compiled.as_text() or "")
    return {
        instruction.name: place_of(module, computation, instruction)
        for computation in module.computations.values()
        for instruction in computation
    }


def by_row(trace: ProfileData, known: Mapping[str, Key]) -> dict[Key, float]:
    """Seconds that the device was busy for each scope and phase: on a GPU its kernels, on a CPU what XLA runs.

    The time of an event is without that of the events within it.
    """
    seconds = defaultdict[Key, float](float)
    planes = list(trace.planes)
    for plane in [plane for plane in planes if plane.name.startswith("/device:GPU")] or planes:
        on_device = plane.name.startswith("/device:")
        for line in plane.lines:
            if on_device and not line.name.startswith("Stream"):
                continue
            events = [(event, dict(event.stats).get("hlo_op")) for event in line.events]
            open_until = list[tuple[float, Key]]()
            for event, op in sorted(events, key=lambda event: (event[0].start_ns, -event[0].duration_ns)):
                if op is None and not on_device:
                    continue
                while open_until and open_until[-1][0] <= event.start_ns:
                    open_until.pop()
                key = known.get(str(op), (UNSCOPED, "forward"))
                seconds[key] += event.duration_ns * 1e-9
                if open_until:
                    seconds[open_until[-1][1]] -= event.duration_ns * 1e-9
                open_until.append((event.start_ns + event.duration_ns, key))
    return seconds


def cases(tiny: bool) -> list[Case]:
    """The measured cases."""
    if tiny:
        return [
            Case(name="toy", model=TOY, batch=2, seq_len=64),
            Case(name="largest toy", model=TOY, batch=2, seq_len=64, state="bf16", most_layers=4),
        ]
    small, large = load_model("llama3.2-1b"), load_model("llama3-8b")
    large = dataclasses.replace(large, max_seq_len=4096)
    return [
        Case(name="1b", model=small, batch=8, seq_len=4096),
        Case(name="largest", model=large, batch=4, seq_len=4096, most_layers=LAYERS),
        Case(name="largest, bf16 state", model=large, batch=4, seq_len=4096, state="bf16", most_layers=LAYERS),
    ]


def main() -> None:
    """Measure every case and write its lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="toy models")
    parser.add_argument("--chip", default="h200", help="what is planned for where the catalogue has not what is here")
    parser.add_argument("--only", nargs="+", metavar="CASE", help="these cases")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--traced", type=int, default=3, help="steps in the trace")
    parser.add_argument("-o", "--output", type=Path)
    chosen = parser.parse_args()
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_enable_command_buffer="
    here = local_devices()
    chip = chosen.chip if here.chip is None else here.chip.name
    lines = list[dict[str, Any]]()
    for case in cases(chosen.tiny):
        if chosen.only and case.name not in chosen.only:
            continue
        measured = measure(case, chip, here, chosen.steps, chosen.traced)
        print(", ".join(f"{name} {value}" for name, value in measured[0].items()), file=sys.stderr)
        lines += measured
    origin = provenance(here.devices[:1])
    versions = ", ".join(f"{package} {version}" for package, version in origin.versions.items())
    with open(chosen.output, "w") if chosen.output else os.fdopen(os.dup(1), "w") as file:
        print(f"# python bench/accelerators/train_gpu.py {' '.join(sys.argv[1:])}".rstrip(), file=file)
        where = f"{origin.devices}; planned for {chip}:1"
        print(f"# {time.strftime('%Y-%m-%d')}, {versions}, {origin.runtime}; {where}", file=file)
        print(f"# MFU: {TrainRates.of(cases(chosen.tiny)[0].model, 1, None).convention}", file=file)
        names = dict.fromkeys(name for line in lines for name in line)
        out = csv.DictWriter(file, list(names), lineterminator="\n", restval="")
        out.writeheader()
        out.writerows(lines)


if __name__ == "__main__":
    main()
