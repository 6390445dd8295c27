"""A plan as a timeline: the rows of its ledger in the order in which a step runs them, or its pipeline's table.

A plan says how long each row takes and how much of each transfer is exposed, not when the hidden part runs. The hidden
part is drawn next to the wait: before the matmul for gathers, after it for all others. The first microbatch and its
first two layers are drawn, and the rest is one block. Everything lasts as long as the plan expects.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from rooftop.arrays.rules import STAGE_AXES
from rooftop.core.ledger import Collective, Ledger, Row
from rooftop.core.timelines import COMPUTE, MORE, TRANSFER, WAIT, Lane, Lanes, TimeSpan
from rooftop.scheduling.pipeline import StageOp
from rooftop.simulate.pipeline import plan_timeline

if TYPE_CHECKING:
    from rooftop.plan.training.plan import TrainingPlan

#: Layers that are drawn one by one.
DRAWN_LAYERS = 2
#: Layers, those of all microbatches together, that are drawn at most where every one is asked for.
MOST_LAYERS = 20_000
#: Executions of a row of the update that are drawn one by one.
_MOST_UPDATES = 1_000
_NOTE = (
    "the plan knows how much of each transfer is hidden, not when it runs: positions are illustrative; the hidden part "
    "of a transfer is drawn next to its exposed part"
)
_LAYERS, _EXPERTS = "layers/", "layers/moe/"
_TASKS = {StageOp.FORWARD: "F", StageOp.BACKWARD: "B", StageOp.WEIGHTS: "W"}
_PHASES = {StageOp.FORWARD: "forward", StageOp.BACKWARD: "backward", StageOp.WEIGHTS: "backward"}


def planned_lanes(plan: TrainingPlan, *, every_trip: bool = False) -> Lanes:
    """The step of a training plan; of a pipeline every stage with its tasks, and then the update.

    ``every_trip`` draws every layer and microbatch (of more than ``MOST_LAYERS`` the first microbatch only).
    """
    problem = plan.problem
    mesh = " x ".join(f"{name} {size}" for name, size in plan.mesh.shape.items() if size > 1)
    title = f"planned: {problem.model.name} on {problem.slice.name}" + (f", {mesh}" if mesh else "")
    if plan.mesh.size(*STAGE_AXES) > 1:
        return _pipeline(plan, title)
    return step_lanes(plan.ledger, title=title, microbatches=plan.choice.microbatches, every_trip=every_trip)


def step_lanes(ledger: Ledger, *, title: str, microbatches: int = 1, every_trip: bool = False) -> Lanes:
    """The rows of a ledger as one step: of training, or of serving (rows whose phases are prefill or generate)."""
    drawn = _Drawing(most_layers=1 << 30 if every_trip else DRAWN_LAYERS)
    update = [row for row in ledger if row.phase == "update"]
    once = [row for row in ledger if row.phase != "update"]
    begin = drawn.now
    _microbatch(drawn, once, microbatches)
    layers = max((float(row.count) for row in once), default=0.0)
    if every_trip and layers <= MOST_LAYERS:
        for _ in range(microbatches - 1):
            _microbatch(drawn, once, microbatches)
    elif microbatches > 1:
        drawn.more(f"{microbatches - 1} more microbatches", (microbatches - 1) * (drawn.now - begin))
    for row in update:
        times, begin = max(1, round(float(row.count))), drawn.now
        shown = min(times, _MOST_UPDATES)
        for _ in range(shown):
            drawn.row(row)
        if times > shown:
            drawn.more(f"{times - shown} more", (times - shown) * (drawn.now - begin) / shown)
    return drawn.lanes(title)


@dataclass(kw_only=True)
class _Drawing:
    """The clock, and the spans of each lane so far; ``most_layers`` are drawn one by one."""

    now: float = 0.0
    most_layers: int = DRAWN_LAYERS
    compute: list[TimeSpan] = field(default_factory=list)
    links: dict[str, list[TimeSpan]] = field(default_factory=dict)
    flights: int = 0
    numbers: dict[tuple[str, str, int], int] = field(default_factory=dict)

    def row(self, row: Row) -> None:
        """Draw a row once: waits for its gathers, its own work, waits for its other collectives."""
        before = [collective for collective in row.collectives if collective.kind == "all_gather"]
        after = [collective for collective in row.collectives if collective.kind != "all_gather"]
        shown = sum(float(collective.exposed_s) for collective in row.collectives)
        for collective in before:
            self._collective(row, collective, ends=True)
        self._spend(
            row, row.scope, COMPUTE, float(row.expected_s) - shown, flops=_flops(row), moved=float(row.hbm_bytes)
        )
        for collective in after:
            self._collective(row, collective, ends=False)

    def more(self, name: str, seconds: float) -> None:
        """Add one span for layers that are not drawn one by one."""
        if seconds > 0:
            self.compute.append(TimeSpan(name=name, sort=MORE, start_s=self.now, end_s=self.now + seconds, op="while"))
            self.now += seconds

    def lanes(self, title: str) -> Lanes:
        """Everything, compute first."""
        links = (Lane(name=name, spans=tuple(spans)) for name, spans in self.links.items())
        return Lanes(
            title=title, source="planned", total_s=self.now, note=_NOTE,
            lanes=(Lane(name=COMPUTE, spans=tuple(self.compute)), *links),
        )  # fmt: skip

    def _number(self, row: Row, collective: Collective) -> int:
        """The number that a collective of a row has in every layer."""
        return self.numbers.setdefault((*row.key, row.collectives.index(collective)), len(self.numbers) + 1)

    def _spend(
        self, row: Row, name: str, sort: str, seconds: float, *, flops: float | None = None, moved: float | None = None,
        collective: Collective | None = None,
    ) -> None:  # fmt: skip
        if seconds <= 0:
            return
        self.compute.append(
            TimeSpan(
                name=name,
                sort=sort,
                start_s=self.now,
                end_s=self.now + seconds,
                scope=row.scope,
                phase=row.phase,
                op=f"{row.scope}.{row.phase}"
                if collective is None
                else _op(collective, "done", self._number(row, collective)),
                category="planned" if collective is None else "",
                op_name=_op_name(row),
                flops=flops,
                hbm_bytes=moved,
                flight=None if collective is None else self.flights,
                details={} if collective is None else _details(collective),
            )
        )
        self.now += seconds

    def _collective(self, row: Row, collective: Collective, *, ends: bool) -> None:
        """A wait for the exposed part, and the transfer, which ends with it (``ends``) or begins with it."""
        self.flights += 1
        name = f"{collective.kind} over {','.join(collective.axes)}"
        whole, shown = float(collective.expected_s), float(collective.exposed_s)
        start = self.now
        self._spend(row, f"wait for {name}", WAIT, shown, collective=collective)
        lane = self.links.setdefault(f"{'+'.join(collective.time_s) or 'ici'} {','.join(collective.axes)}", [])
        free = lane[-1].end_s if lane else 0.0
        begin = max(free, self.now - whole if ends else start)
        if whole > 0:
            lane.append(
                TimeSpan(
                    name=name,
                    sort=TRANSFER,
                    start_s=begin,
                    end_s=begin + whole,
                    scope=row.scope,
                    phase=row.phase,
                    op=_op(collective, "start", self._number(row, collective)),
                    op_name=_op_name(row),
                    flight=self.flights,
                    details=_details(collective),
                )
            )


def _microbatch(drawn: _Drawing, rows: Sequence[Row], microbatches: int) -> None:
    """One microbatch: forward in order, then backward from the last row, each layer's recomputation before it."""
    inside = [row for row in rows if row.scope.startswith(_LAYERS)]
    outside = [row for row in rows if not row.scope.startswith(_LAYERS)]
    forward = [row for row in outside if row.phase not in ("backward", "recompute")]
    first = [row for row in forward if row.scope == "embed"]
    for row in first:
        drawn.row(row)
    ahead = [row for row in inside if row.phase not in ("backward", "recompute")]
    _layers(drawn, ahead, microbatches)
    for row in forward:
        if row not in first:
            drawn.row(row)
    back = [row for row in outside if row.phase in ("backward", "recompute")]
    for row in reversed(back):
        if row.scope != "embed":
            drawn.row(row)
    again = [row for row in inside if row.phase == "recompute"]
    _layers(drawn, again + [row for row in reversed(inside) if row.phase == "backward"], microbatches)
    for row in back:
        if row.scope == "embed":
            drawn.row(row)


def _layers(drawn: _Drawing, rows: Sequence[Row], microbatches: int) -> None:
    """The layers: the first ones row by row, then the rest, so that all of them last as long as they should."""
    counts = [(row.scope, float(row.count) / microbatches) for row in rows]
    layers = max((count for scope, count in counts if scope.startswith("layers/attn/")), default=0.0)
    layers = layers or max((count for _, count in counts), default=0.0)
    experts = max((count for scope, count in counts if scope.startswith(_EXPERTS) and count <= layers), default=0.0)
    placed = [_in_layers(row, float(row.count) / microbatches, layers, experts) for row in rows]
    total = sum(count * float(row.expected_s) for row, _, count in placed)
    begin, single = drawn.now, min(drawn.most_layers, int(layers))
    for layer in range(single):
        for row, first, count in placed:
            if first <= layer and layer + 1 <= first + count:
                drawn.row(row)
    # What rounding leaves is no layer.
    if layers > single:
        drawn.more(f"{layers - single:.4g} more layers", begin + total - drawn.now)


def _in_layers(row: Row, count: float, layers: float, experts: float) -> tuple[Row, float, float]:
    """A row as one layer has it, the first layer that does, and how many do.

    Where layers differ, the dense ones come first and those with experts after them; what runs once for each expert of
    a device runs in one layer that many times.
    """
    if count > layers:
        inside = experts or layers
        return _repeated(row, count / inside), layers - inside, inside
    late = experts and count == experts and (row.scope.startswith(_EXPERTS) or experts != layers - experts)
    return row, layers - count if late else 0.0, count


def _repeated(row: Row, times: float) -> Row:
    """A row ``times`` over as one."""
    moved = [
        replace(
            collective,
            expected_s=collective.expected_s * times,
            exposed_s=collective.exposed_s * times,
            bytes=collective.bytes * times,
        )
        for collective in row.collectives
    ]
    flops = {dtype: amount * times for dtype, amount in row.flops.items()}
    return replace(
        row, expected_s=row.expected_s * times, hbm_bytes=row.hbm_bytes * times, flops=flops, collectives=tuple(moved),
        kernel_flops=row.kernel_flops * times,
    )  # fmt: skip


def _pipeline(plan: TrainingPlan, title: str) -> Lanes:
    timeline = plan_timeline(plan)
    update = _Drawing(now=timeline.makespan)
    for row in plan.ledger:
        if row.phase == "update":
            update.row(row)
    lanes = [
        Lane(
            name=f"stage {stage}",
            spans=(
                *(
                    TimeSpan(
                        name=f"{_TASKS[task.op]}{task.microbatch}"
                        + (f".{task.chunk}" if plan.choice.chunks > 1 else ""),
                        sort=COMPUTE,
                        start_s=start_s,
                        end_s=end_s,
                        phase=_PHASES[task.op],
                        details={"microbatch": task.microbatch, "chunk": task.chunk},
                    )
                    for task, start_s, end_s in spans
                ),
                *update.compute,
            ),
        )
        for stage, spans in enumerate(timeline.spans)
    ]
    note = (
        f"{plan.choice.schedule}: every stage at its own pace, by the plan's expectation of a microbatch; "
        "F: forward, B: backward, W: gradients of weights, by microbatch"
    )
    return Lanes(title=title, source="planned", total_s=update.now, lanes=tuple(lanes), note=note)


def _flops(row: Row) -> float:
    return sum(float(flops) for flops in row.flops.values()) + float(row.kernel_flops)


def _op(collective: Collective, role: str, number: int) -> str:
    """Op name in a trace: XLA's names for the start and the end of a collective."""
    kind = {"permute": "collective-permute"}.get(collective.kind, collective.kind.replace("_", "-"))
    return f"{kind}-{role}.{number}"


def _op_name(row: Row) -> str:
    """A name stack that gives scope and phase back, as a program's would."""
    inner = {
        "backward": f"transpose(jvp({row.scope}))",
        "recompute": f"transpose(jvp(checkpoint))/rematted_computation/{row.scope}",
        "forward": f"jvp({row.scope})",
    }.get(row.phase, row.scope)
    return f"jit(step)/{inner}/{row.phase}"


def _details(collective: Collective) -> dict[str, str | float]:
    return {"collective": collective.kind, "axes": ",".join(collective.axes), "bytes": float(collective.bytes)}
