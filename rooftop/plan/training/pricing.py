"""The expected time of each row of a training step, with the share of its transfers that computation hides.

Transfers off the critical path overlap the computation of their window, up to the share that the assumptions allow
and to the time that there is to hide in. A window is the layers' part of a pass (forward; backward with what it
recomputes): compilers overlap a layer's transfers with work in the same trip of the loop over layers, and in it there
is no embedding and no loss. Nothing hides in the rest of a pass. Where all transfers are asynchronous, windows are
parts of a layer (``rooftop.plan.parts``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce

import numpy as np
import numpy.typing as npt

from rooftop.arrays.rules import COLUMN_AXES, GATHER_AXES, STAGE_AXES
from rooftop.core.ledger import CollectiveKind, Ledger, Number, Row
from rooftop.core.scopes import Phase
from rooftop.frameworks.habits import Asynchronous
from rooftop.plan.parts import Group, LayerParts, group
from rooftop.plan.pricing import ALWAYS, RingSteps, StagePart, Transfer, Work
from rooftop.plan.training.step import TrainingStep
from rooftop.plan.training.strategies import RING_HOP, Strategies
from rooftop.roofline.rates import Rates
from rooftop.scheduling.pipeline import ModelPart, StageOp

#: The pass whose computation can hide a phase's transfers; gradients are summed while the backward pass still runs.
_PASS = {"forward": "forward", "recompute": "backward", "backward": "backward", "update": "backward"}
#: A pass, and the part of it: the layers, or the rest.
_Window = tuple[str, str]


def _window(item: Work) -> _Window:
    """The computation that can hide the transfers of ``item``."""
    # Stages pass activations on between layers, and gradients are summed while those of layers before are made.
    layers = item.scope.startswith("layers/") or item.scope == "pipeline" or item.phase == "update"
    return _PASS[item.phase], "layers" if layers else "rest"


def _hidden_with(item: Work, transfer: Transfer, asynchronous: Asynchronous) -> Group:
    """The transfers of which computation hides the same share: by window and assumption, or within a layer's part.

    A ring hides behind its own matmul.
    """
    if transfer.ring is not None:
        return (f"{item.part} {item.phase}", f"{item.scope} {transfer.kind}"), "ring"
    return group(item, transfer, asynchronous) or (_window(item), transfer.hides)


def _asynchronous(step: TrainingStep) -> Asynchronous:
    """The collectives of which the compiler's order within a layer decides what is hidden."""
    return step.habits.asynchronous if step.habits.as_scheduled else "none"


@dataclass(frozen=True)
class _Durations:
    """Expected seconds of pieces of work, without what hides: computation, transfers, and copies to the host."""

    step: TrainingStep
    _lines: dict[tuple[CollectiveKind, tuple[str, ...]], tuple[Number, Number]] = field(default_factory=dict)

    @property
    def strategies(self) -> Strategies:
        """The strategies of the step."""
        return self.step.strategies

    @property
    def rates(self) -> Rates:
        """The rates of a device."""
        return self.step.rates

    @property
    def steps_between_slices(self) -> bool:
        """True if there are several slices, and sums over them are done in steps."""
        return self.step.habits.steps_between_slices and self.step.slice.num_slices > 1

    def compute_s(self, item: Work) -> Number:
        """Seconds of the busiest of a device's resources, and then of passes of their own."""
        rates = self.rates
        seconds = item.matmul_s
        # Of most work some of the figures are plain zeros, which no array has to be compared with.
        if not _is_zero(item.vector_flops):
            seconds = np.maximum(seconds, item.vector_flops / rates.vector_flops_per_s)
        if not _is_zero(item.hbm_bytes):
            seconds = np.maximum(seconds, rates.hbm_s(item.hbm_bytes))
        return seconds if _is_zero(item.elementwise_bytes) else seconds + rates.hbm_s(item.elementwise_bytes)

    def host_s(self, item: Work) -> Number:
        """Seconds of copies to the host's memory or back."""
        return item.host_bytes / self.rates.pcie_bytes_per_s

    def transfer_s(self, transfer: Transfer) -> Number:
        """Seconds of a transfer."""
        fixed_s, seconds_per_byte = self._line(transfer.priced_as, transfer.axes)
        if transfer.shares:
            price = self.strategies.price(transfer.priced_as, transfer.axes).scaled(transfer.shares)
            fixed_s, seconds_per_byte = price.expected_line(self.rates.network(transfer.priced_as))
        if transfer.kind == "permute_ring" and self.steps_between_slices:
            # All of a permute between slices goes between hosts, in every hop of a rotation.
            devices, within = self.strategies.devices(*transfer.axes), self.strategies.within_slice(*transfer.axes)
            hop_s, per_byte = self._line("permute", transfer.axes)
            crosses = (within > 1) & (within < devices) & (self.strategies.groups is None)
            hops = devices - 1
            fixed_s, seconds_per_byte = _where(
                crosses, (hops * hop_s, hops / devices * per_byte), (fixed_s, seconds_per_byte)
            )
        if np.any(transfer.summed):
            fixed, per_byte = self._line("all_reduce", transfer.axes)
            fixed_s = np.where(transfer.summed, fixed, fixed_s)
            seconds_per_byte = np.where(transfer.summed, per_byte, seconds_per_byte)
        seconds = transfer.pieces * fixed_s + transfer.payload * seconds_per_byte
        if (ring := transfer.ring) is not None:
            hops = np.maximum(ring.members - 1, 0)
            seconds = np.where(ring.on, hops * self._hop_s(transfer, ring), seconds)
        return seconds if transfer.when is ALWAYS else transfer.when * seconds

    @property
    def crosses(self) -> npt.NDArray[np.bool_]:
        """True where weights are gathered between slices in steps, [C, 1]; of groups where any layout does."""
        gather = self.strategies.devices(*GATHER_AXES)
        crosses: npt.NDArray[np.bool_] = self.strategies.within_slice(*GATHER_AXES) < gather
        return crosses & self.step.habits.steps_between_slices

    def alone(self, transfer: Transfer) -> Number:
        """1 where a transfer has no computation next to it, as groups of parts of nodes, [C, 1]."""
        if not self.step.habits.exposes_parts_of_nodes:
            return 0.0
        ranks = self.strategies.price(transfer.priced_as, transfer.axes).ranks
        if ranks is None:
            # Of groups of layouts, some may have whole nodes.
            return 0.0
        devices = self.strategies.devices(*transfer.axes)
        return np.where((ranks < devices) & (ranks < self.step.slice.shape[0]), 1.0, 0.0)

    def between_s(self, transfer: Transfer) -> Number:
        """Seconds of that part of a gather which is between slices."""
        if transfer.hides != "weight_gather" or self.strategies.layouts.slice.num_slices == 1:
            return 0.0
        fixed_s, per_byte = self._part(transfer.priced_as, transfer.axes, ("dcn",))
        seconds = transfer.pieces * fixed_s + transfer.payload * per_byte
        return seconds if transfer.when is ALWAYS else transfer.when * seconds

    def ring_exposed_s(self, transfer: Transfer, ring: RingSteps) -> Number:
        """Seconds of a ring that its matmul does not hide; all seconds of what is no ring."""
        closed = self.strategies.closed_ring(transfer.axes)
        return np.where(ring.on, ring.exposed_s(self._hop_s(transfer, ring), closed), self.transfer_s(transfer))

    def _hop_s(self, transfer: Transfer, ring: RingSteps) -> Number:
        price = self.strategies.price(RING_HOP, transfer.axes)
        return price.expected_s(transfer.payload / ring.members, self.rates.network("permute"))

    def _line(self, kind: CollectiveKind, axes: tuple[str, ...]) -> tuple[Number, Number]:
        """Fixed seconds, and seconds per byte, of a collective over axes together, [C, 1]."""
        if (kind, axes) not in self._lines:
            line, slice_ = self._part(kind, axes, ("ici", "dcn")), self.strategies.layouts.slice
            devices, within = self.strategies.devices(*axes), self.strategies.within_slice(*axes)
            # Groups of layouts have least prices, whichever of them cross slices.
            bound = self.strategies.groups is not None
            if kind == "all_reduce" and self.steps_between_slices:
                # XLA scatters sums within each slice, sums the parts between slices, and gathers them.
                steps = [self._part(step, axes, ("ici",)) for step in ("reduce_scatter", "all_gather")]
                in_steps = _sum(*steps, self._part(kind, axes, ("dcn",)))
                line = _where((within < devices) & (bound | (within > 1)), in_steps, line)
            if kind == "reduce_scatter" and self.step.habits.sums_whole_slices:
                # A compiler that cannot scatter over a whole slice sums everything everywhere, and keeps a part. Nor
                # does it scatter within slices and between them.
                whole, crosses = within * slice_.num_slices == slice_.devices, (within > 1) & (within < devices)
                line = _where(whole | (crosses & (not bound)), self._line("all_reduce", axes), line)
            self._lines[kind, axes] = line
        return self._lines[kind, axes]

    def _part(self, kind: CollectiveKind, axes: tuple[str, ...], resources: Collection[str]) -> tuple[Number, Number]:
        """The line of that part of a collective which some network resources do."""
        return self.strategies.price(kind, axes).over(resources).expected_line(self.rates.network(kind))


def _sum(*lines: tuple[Number, Number]) -> tuple[Number, Number]:
    """The line of collectives one after another."""
    return sum((fixed for fixed, _ in lines), 0.0), sum((per_byte for _, per_byte in lines), 0.0)


def _where(
    condition: npt.NDArray[np.bool_], one: tuple[Number, Number], other: tuple[Number, Number]
) -> tuple[Number, Number]:
    """The one line where ``condition`` is true, and the other elsewhere."""
    return np.where(condition, one[0], other[0]), np.where(condition, one[1], other[1])


def _is_zero(value: Number) -> bool:
    """True for a plain zero; an array is not looked into."""
    return not isinstance(value, np.ndarray) and value == 0


@dataclass(frozen=True, kw_only=True)
class _Times:
    """Expected seconds of each piece of work: computation, each of its transfers, and copies to the host.

    ``exposed`` is the share of a transfer's time that nothing hides, by window and assumption.
    """

    work: Sequence[Work]
    compute: Sequence[Number]
    transfers: Sequence[Sequence[Number]]
    host: Sequence[Number]
    exposed: Mapping[Group, Number]
    factor: float
    asynchronous: Asynchronous

    @classmethod
    def of(cls, work: Sequence[Work], step: TrainingStep) -> _Times:
        durations = _Durations(step)
        return cls(
            work=work,
            compute=[durations.compute_s(item) for item in work],
            transfers=[[durations.transfer_s(transfer) for transfer in item.collectives] for item in work],
            host=[durations.host_s(item) for item in work],
            exposed=_Busy.of(work, durations).exposed(step.assumptions.shares(step.habits)),
            factor=step.assumptions.calibration * step.rates.step,
            asynchronous=_asynchronous(step),
        )

    def __iter__(self) -> Iterator[tuple[Work, Number, list[Number], list[Number]]]:
        """Each piece of work, its expected seconds without collectives, and those of collectives: all, and exposed."""
        for item, compute, transfers, offload in zip(self.work, self.compute, self.transfers, self.host, strict=True):
            paid = [self.factor * duration for duration in transfers]
            exposed = [
                seconds * self.exposed[_hidden_with(item, transfer, self.asynchronous)]
                for transfer, seconds in zip(item.collectives, paid, strict=True)
            ]
            waiting = self.exposed.get((_window(item), "offload"), 0.0) * offload
            yield item, self.factor * (compute + waiting), paid, exposed


#: The parts of a model outside the layers that all stages share.
_ENDS: tuple[StagePart, ...] = ("first", "last")
#: The phase of work, and the part of the model that it belongs to.
_Owner = tuple[Phase, StagePart]


@dataclass(frozen=True)
class _Busy:
    """Seconds of a step's work, counts applied, before anything hides.

    ``compute`` by phase and part of the model, and of it by window that in which transfers can hide, the ``room``.
    ``transfers`` by window and by the assumption under which they hide, and then by phase and part; where XLA's order
    decides, ``parts`` has the seconds of layers in it. ``rings``: exposed seconds of rings. ``alone``: seconds of
    transfers without computation next to them. ``staged``: the candidates whose tasks wait until all saved activations
    have gone to the host, and have come back.
    """

    compute: dict[_Owner, Number] = field(default_factory=dict)
    room: dict[_Window, Number] = field(default_factory=dict)
    transfers: dict[Group, dict[_Owner, Number]] = field(default_factory=dict)
    parts: LayerParts = field(default_factory=LayerParts)
    rings: dict[Group, Number] = field(default_factory=dict)
    alone: dict[Group, Number] = field(default_factory=dict)
    staged: Number = 0.0

    @classmethod
    def of(cls, work: Sequence[Work], durations: _Durations) -> _Busy:
        habits, asynchronous = durations.step.habits, _asynchronous(durations.step)
        staged = np.where(durations.strategies.devices(*STAGE_AXES) > 1, 1.0, 0.0)
        shared = durations.strategies.share_links(GATHER_AXES, COLUMN_AXES) if asynchronous == "all" else False
        busy = cls(parts=LayerParts(asynchronous, shared=shared), staged=staged)
        # A share that users set is kept to.
        is_scheduled = durations.step.assumptions.shares(habits)["weight_gather"] == habits.hides_weight_gathers
        if asynchronous != "all" and habits.as_scheduled and is_scheduled:
            least = durations.strategies.groups is not None
            crosses, ahead = durations.crosses, durations.strategies.gathers_ahead(habits)
            busy = replace(busy, parts=LayerParts(asynchronous, crosses=crosses, ahead=ahead, least=least))
        counted = asynchronous != "none" or bool(np.any(busy.parts.gathers_hide))
        # A transfer that is done twice, as in a recomputation, is priced once.
        known: dict[int, Number] = {}
        for item in work:
            owner, window = (item.phase, item.part), _window(item)
            compute = item.count * durations.compute_s(item)
            busy.compute[owner] = busy.compute.get(owner, 0.0) + compute
            if item.scope.startswith("layers/"):
                busy.room[window] = busy.room.get(window, 0.0) + compute
            by_kind: dict[Group, Number] = {}
            for transfer in item.collectives:
                if id(transfer) not in known:
                    known[id(transfer)] = durations.transfer_s(transfer)
                key = _hidden_with(item, transfer, asynchronous)
                by_kind[key] = by_kind.get(key, 0.0) + known[id(transfer)]
                if not _is_zero(alone := durations.alone(transfer)):
                    shown = item.count * alone * known[id(transfer)]
                    busy.alone[key] = busy.alone.get(key, 0.0) + shown
                if transfer.ring is not None:
                    exposed = item.count * durations.ring_exposed_s(transfer, transfer.ring)
                    busy.rings[key] = busy.rings.get(key, 0.0) + exposed
            if counted:
                transfers = [
                    (one, item.count * known[id(one)], item.count * durations.between_s(one))
                    for one in item.collectives
                ]
                busy.parts.add(item, compute, transfers)
            if not _is_zero(item.host_bytes):
                by_kind[window, "offload"] = durations.host_s(item)
            for key, seconds in by_kind.items():
                owners = busy.transfers.setdefault(key, {})
                owners[owner] = owners.get(owner, 0.0) + item.count * seconds
        return busy

    def exposed(self, hideable: Mapping[str, float]) -> dict[Group, Number]:
        """For each window and kind of transfer the share of its time that nothing hides."""
        exposed: dict[Group, Number] = {}
        known = self.parts.exposed() | self.rings
        # Outside of the layers a transfer stands next to the work that needs it, or that it ends.
        network = dict(self.room)
        for (window, hides), parts in self.transfers.items():
            total = sum(parts.values(), 0.0)
            if (window, hides) in known:
                share = known[window, hides] / np.where(total > 0, total, 1.0)
                # Users limit what hides of weights, and raise what hides over tensor.
                limit, at_most = hideable.get(hides, 1.0), 1.0 if hides in hideable else 1.0 - hideable["tensor"]
                as_scheduled = self.parts.gathers_hide & (hides == "weight_gather")
                least = np.where(as_scheduled, 0.0, 1.0 - limit)
                exposed[window, hides] = np.clip(share, least, at_most)
                continue
            # The network hides in one window together; copies to the host have a path of their own.
            room = (1.0 - self.staged) * self.room.get(window, 0.0) if hides == "offload" else network.get(window, 0.0)
            hidden = np.minimum(hideable[hides] * (total - self.alone.get((window, hides), 0.0)), room)
            if hides != "offload":
                network[window] = room - hidden
            exposed[window, hides] = 1.0 - hidden / np.where(total > 0, total, 1.0)
        return exposed


def price_work(work: Sequence[Work], step: TrainingStep) -> Ledger:
    """The ledger of a step's ``work``, with pipeline idle time as its last rows; figures broadcast to [C, K]."""
    times = _Times.of(work, step)
    rows = list(_rows(times, step.strategies, step.rates))
    for gap, row in _launch_gaps(work, rows, step.launch_s):
        work, rows = [*work, gap], [*rows, row]
    idle = _idle(work, rows, step)
    padding = _padding(work, rows)
    if step.habits.fills_stages and padding:
        # A stage with fewer layers than the longest one does the rest of the model instead of waiting.
        instead = sum(
            (row.count * row.expected_s for item, row in zip(work, rows, strict=True) if item.part in _ENDS), 0.0
        )
        waiting = sum((row.expected_s for row in padding), 0.0)
        left = np.maximum(1.0 - instead / np.where(waiting > 0, waiting, 1.0), 0.0)
        padding = [replace(row, expected_s=left * row.expected_s, serial_s=left * row.serial_s) for row in padding]
    return Ledger((*rows, *padding, idle, *_gap(step.rates)))


def expected_s(work: Sequence[Work], step: TrainingStep) -> Number:
    """Expected seconds of ``price_work``'s ledger, without its rows; broadcasts to [C, K]."""
    rates, assumptions = step.rates, step.assumptions
    busy = _Busy.of(work, _Durations(step))
    seconds = dict(busy.compute)
    for key, share in busy.exposed(assumptions.shares(step.habits)).items():
        for owner, transfers in busy.transfers[key].items():
            seconds[owner] = seconds.get(owner, 0.0) + share * transfers
    factor = assumptions.calibration * rates.step
    for phase, gap_s in _waits_for_host_s(seconds, step.launch_s, factor).items():
        seconds[phase, "layers"] = seconds.get((phase, "layers"), 0.0) + gap_s
    idle = _idle_s(seconds, step)
    return factor * (sum(seconds.values(), 0.0) + idle) + rates.gap_s


def _waits_for_host_s(
    seconds: Mapping[_Owner, Number], launch_s: Mapping[Phase, Number], factor: float = 1.0
) -> dict[Phase, Number]:
    """Seconds in which devices wait for launches, by pass, where all of a pass over the layers takes ``seconds``.

    The host runs ahead of a device as long as its kernels last longer than their launches. ``factor`` comes to all
    seconds of a device later.
    """
    waits: dict[Phase, Number] = {}
    for phase, host_s in launch_s.items():
        phases: tuple[Phase, ...] = ("forward",) if phase == "forward" else ("recompute", "backward")
        busy = sum((seconds.get((one, "layers"), 0.0) for one in phases), 0.0)
        waits[phase] = np.maximum(host_s / factor - busy, 0.0)
    return waits


def _launch_gaps(work: Sequence[Work], rows: Sequence[Row], launch_s: Mapping[Phase, Number]) -> list[tuple[Work, Row]]:
    """Time of a pass over the layers in which devices wait for the host, which launches one kernel after another."""
    seconds: dict[_Owner, Number] = {}
    for owner, pairs in _by_owner(work, rows).items():
        seconds[owner] = sum((item.count * row.expected_s for item, row in pairs), 0.0)
    formula = "kernels of the layers x seconds to launch one, less the time of the pass"
    return [
        (
            Work(scope="host_gap", phase=phase, count=1, formula=formula),
            Row(scope="host_gap", phase=phase, count=1, expected_s=gap_s, serial_s=gap_s, formula=formula),
        )
        for phase, gap_s in _waits_for_host_s(seconds, launch_s).items()
    ]


def _rows(times: _Times, strategies: Strategies, rates: Rates) -> Iterator[Row]:
    for (item, seconds, paid, exposed), offload in zip(times, times.host, strict=True):
        collectives = tuple(
            transfer.collective(strategies.price(transfer.priced_as, transfer.axes), expected, shown)
            for transfer, expected, shown in zip(item.collectives, paid, exposed, strict=True)
        )
        apart = item.matmul_s + item.vector_flops / rates.vector_flops_per_s + rates.hbm_s(item.moved_bytes)
        yield item.row(
            rates,
            collectives,
            ("mxu", "vpu", "hbm", "pcie"),
            expected_s=seconds + sum(exposed, 0.0),
            serial_s=times.factor * (apart + offload) + sum(paid, 0.0),
        )


def _padding(work: Sequence[Work], rows: Sequence[Row]) -> list[Row]:
    """Time in which stages with fewer layers than the longest one wait for it, one row for each phase."""
    skipped = [(item.count * item.skipped, row) for item, row in zip(work, rows, strict=True) if np.any(item.skipped)]
    return [
        Row(
            scope="padding",
            phase=phase,
            count=1,
            expected_s=sum((count * row.expected_s for count, row in skipped if row.phase == phase), 0.0),
            serial_s=sum((count * row.serial_s for count, row in skipped if row.phase == phase), 0.0),
            formula="layers that a stage lacks and the longest one has, times microbatches and the time of a layer",
        )
        for phase in dict.fromkeys(row.phase for _, row in skipped)
    ]


def _gap(rates: Rates) -> list[Row]:
    """Time of a step in which devices idle or wait for their host, where a user has measured it."""
    if not rates.gap_s:
        return []
    gap_s = rates.gap_s
    return [
        Row(
            scope="host_gap", phase="update", count=1, time_s={"host": gap_s}, expected_s=gap_s, serial_s=gap_s,
            formula="idle between steps and ops, as measured",
        )
    ]  # fmt: skip


def _idle(work: Sequence[Work], rows: Sequence[Row], step: TrainingStep) -> Row:
    """Time in which a pipeline stage waits."""
    owned = _by_owner(work, rows).items()
    # Counts are of the busiest stage, the rows' own those of a device in the mean.
    expected = {owner: sum((item.count * row.expected_s for item, row in pairs), 0.0) for owner, pairs in owned}
    serial = {owner: sum((item.count * row.serial_s for item, row in pairs), 0.0) for owner, pairs in owned}
    return Row(
        scope="pipeline",
        phase="backward",
        count=1,
        expected_s=_idle_s(expected, step),
        serial_s=_idle_s(serial, step),
        formula="idle: slots of the schedule, each as long as the longest task of any stage in it, less the passes"
        if step.habits.lockstep
        else "idle: (stages - 1) / (microbatches x chunks) of the passes, times what the schedule leaves",
    )


def _by_owner(work: Sequence[Work], rows: Sequence[Row]) -> dict[_Owner, list[tuple[Work, Row]]]:
    """Pieces of work with their rows, by the phase and the part of the model that they belong to."""
    owned: dict[_Owner, list[tuple[Work, Row]]] = {}
    for item, row in zip(work, rows, strict=True):
        owned.setdefault((item.phase, item.part), []).append((item, row))
    return owned


def _idle_s(seconds: Mapping[_Owner, Number], step: TrainingStep) -> Number:
    """Seconds in which a pipeline stage waits, given those of its work by phase and part."""
    passes = sum((part for (phase, _), part in seconds.items() if phase != "update"), 0.0)
    if not step.habits.lockstep:
        return idle_fraction(step.strategies) * passes
    stages = step.strategies.devices(*STAGE_AXES)
    if np.all(stages == 1):
        return 0.0
    # A row is of the busiest stage of all for its work: one stage has neither all rows nor all waits.
    waits = np.maximum(lockstep_s(seconds, step.strategies, step.last_chunk) - passes, 0.0)
    return np.where(stages > 1, waits, 0.0)


def waits_s(
    work: Sequence[Work],
    rows: Sequence[Row],
    seconds: Callable[[Ledger], Mapping[str, Number]],
    step: TrainingStep,
) -> dict[str, Number]:
    """Seconds in which a pipeline stage waits for each resource, if its tasks take no longer than that resource.

    ``rows`` are those of ``work``; ``seconds`` gives the time of each resource in some of them. Sends are left out:
    they overlap the tasks of other stages.
    """
    times = {
        (phase, part): seconds(Ledger(tuple(row for _, row in pairs)))
        for (phase, part), pairs in _by_owner(work, rows).items()
        if part != "sends"
    }
    return {
        name: _idle_s({owner: time[name] for owner, time in times.items()}, step) for name in next(iter(times.values()))
    }


def lockstep_s(seconds: Mapping[_Owner, Number], strategies: Strategies, last_chunk: Number) -> Number:
    """Seconds of a step's passes if pipeline stages pass from slot to slot together, as those of one loop do.

    A slot lasts as long as the longest task of any stage in it, and a task as long as the rows of a microbatch.
    ``seconds`` are of all microbatches, by phase and part; ``last_chunk`` is the share of a chunk's layers that the
    model's last part has.
    """
    tasks = _task_seconds(seconds, strategies, last_chunk)
    total = seconds.get(("forward", "sends"), 0.0) + seconds.get(("backward", "sends"), 0.0)
    for mix, count in strategies.slot_mixes.items():
        total = total + count * reduce(np.maximum, (tasks[task] for task in mix))
    return total


def _task_seconds(
    seconds: Mapping[_Owner, Number], strategies: Strategies, last_chunk: Number
) -> dict[tuple[StageOp, ModelPart], Number]:
    """Seconds of one task of each kind."""
    microbatches = strategies.microbatches

    def of(part: StagePart, *phases: Phase) -> Number:
        return sum((seconds.get((phase, part), 0.0) for phase in phases), 0.0) / microbatches

    chunks, split = strategies.chunks, strategies.splits_backward
    forward, repeated = of("layers", "forward") / chunks, of("layers", "recompute") / chunks
    both = of("layers", "backward") / chunks
    # Gradients of inputs and of weights are matmuls of equal FLOPs.
    backward, weights = repeated + np.where(split, both / 2, both), both / 2
    begins, begins_back = of("first", "forward"), of("first", "recompute", "backward")
    ends = of("last", "forward", "recompute", "backward")
    return {
        (StageOp.FORWARD, ModelPart.INNER): forward,
        (StageOp.FORWARD, ModelPart.FIRST): forward + begins,
        (StageOp.FORWARD, ModelPart.LAST): last_chunk * forward + ends,
        (StageOp.BACKWARD, ModelPart.INNER): backward,
        (StageOp.BACKWARD, ModelPart.FIRST): backward + begins_back,
        (StageOp.BACKWARD, ModelPart.LAST): last_chunk * backward,
        (StageOp.WEIGHTS, ModelPart.INNER): weights,
    }


def idle_fraction(strategies: Strategies) -> Number:
    """Idle time of a pipeline at its stages' own pace over its busy time, [C, K].

    (stages - 1) microbatches, less what the schedule fills (chapter 5).
    """
    waiting = strategies.devices(*STAGE_AXES) - 1
    return strategies.idle_share * waiting / (strategies.microbatches * strategies.chunks)
