"""Rules on a compiled program: each has its evidence in the scheduled module, and a price. No evidence, no finding."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from rooftop.arrays.tiles import mxu_padding
from rooftop.check.arguments import EntryArgument, arguments, undonated
from rooftop.check.layouts import LayoutCost, made_whole, relaid
from rooftop.compiler.hlo.costs import is_host_copy, is_matmul, moved_bytes, work
from rooftop.compiler.hlo.places import purpose, users
from rooftop.compiler.hlo.text import HloComputation, Instruction, Module
from rooftop.compiler.machine.run import scheduled
from rooftop.compiler.machine.schedule import Scheduled
from rooftop.core.amounts import Amount
from rooftop.core.quantities import format_bytes, format_seconds
from rooftop.core.records import Record
from rooftop.core.rounding import next_multiple
from rooftop.explain.compiled.report import CompiledReport
from rooftop.explain.measured.modules import origin

#: Smallest share of the time, and of the usable HBM, for which the rules find something.
SMALLEST_SHARE = 0.01
_TIME = _MEMORY = SMALLEST_SHARE
#: A matmul with a smaller useful share is padded.
_USEFUL = 0.80


@dataclass(frozen=True, kw_only=True)
class ProgramFinding(Record):
    """One finding: its ``rule``, ``what`` to do, the ``evidence``, and its price on one device in a step.

    ``seconds`` and ``bytes`` are those that can be saved at most, by the compiled schedule; 0 if a rule has no such
    price. ``source`` is 'file:line' ('' if the compiler dropped it), ``frames`` the whole stack, innermost first.
    """

    rule: str
    what: str
    evidence: str
    scope: str
    phase: str
    source: str
    frames: tuple[str, ...]
    seconds: Amount
    bytes: Amount


def find_all(report: CompiledReport) -> tuple[ProgramFinding, ...]:
    """The findings of all rules, what is worth most first."""
    module = report.compiled.module
    rules = (
        *_replicated(report, module),
        *_not_donated(report, module),
        *_collectives(report, module),
        *_matmuls(report, module),
        *_layouts(report, module),
        *_host(report, module),
    )
    return tuple(sorted(rules, key=lambda finding: (-finding.seconds, -finding.bytes, finding.rule)))


def _finding(
    report: CompiledReport, instruction: Instruction | None, place: tuple[str, str], **fields: object
) -> ProgramFinding:
    module = report.compiled.module
    source = module.source(instruction) if instruction is not None else ""
    frames = module.frames(instruction) if instruction is not None else ()
    defaults: dict[str, object] = {"seconds": 0.0, "bytes": 0.0}
    return ProgramFinding(scope=place[0], phase=place[1], source=source, frames=frames, **(defaults | fields))  # type: ignore[arg-type]


# ---- memory ---------------------------------------------------------------------------------------------------------


def _replicated(report: CompiledReport, module: Module) -> Iterator[ProgramFinding]:
    """Arguments that every device has whole, by the first part of their names."""
    devices, usable = report.compiled.mesh.slice.devices, report.compiled.mesh.slice.device_hbm_usable_bytes
    entry = module.computations[module.entry]
    used_by = users(entry)
    for group, members in _grouped(arguments(module)).items():
        whole = [argument for argument in members if argument.is_replicated]
        nbytes = sum(argument.tensor.nbytes for argument in whole)
        if devices == 1 or nbytes < _MEMORY * usable:
            continue
        largest = max(whole, key=lambda argument: argument.tensor.nbytes)
        user = _first_user(module, largest.instruction, used_by)
        place = purpose(module, entry, user, used_by) if user is not None else ("unscoped", "forward")
        more = f" and {len(whole) - 1} more arrays of {group}" if len(whole) > 1 else ""
        yield _finding(
            report, user, place,
            rule="replicated_argument",
            what=f"split {group} over an axis of the mesh (in_shardings, or the NamedSharding of the arrays)",
            evidence=f"{largest.words} {_text(largest)}{more} are whole on each of {devices} devices: "
            f"{format_bytes(nbytes)} of {format_bytes(usable)}",
            bytes=nbytes * (1 - 1 / devices),
        )  # fmt: skip


def _not_donated(report: CompiledReport, module: Module) -> Iterator[ProgramFinding]:
    """Results that could take the place of an argument, by the first part of the argument's name."""
    usable = report.compiled.mesh.slice.device_hbm_usable_bytes
    pairs = list(undonated(module, report.compiled.hlo_text))
    entry = module.computations[module.entry]
    used_by = users(entry)
    groups = _grouped(argument for argument, _ in pairs)
    for group, members in groups.items():
        nbytes = sum(argument.tensor.nbytes for argument in members)
        if nbytes < _MEMORY * usable:
            continue
        own = [pair for pair in pairs if pair[0] in members]
        largest, result = max(own, key=lambda pair: pair[0].tensor.nbytes)
        more = f" and {len(members) - 1} more" if len(members) > 1 else ""
        yield _finding(
            report, result.made_by, purpose(module, entry, result.made_by, used_by),
            rule="not_donated",
            what=f"donate {group} ({largest.donation}), if the caller does not read it again",
            evidence=f"{largest.words} {_text(largest)}{more} and a result of the same type are in memory together: "
            f"{format_bytes(nbytes)}",
            bytes=nbytes,
        )  # fmt: skip


def _grouped(entries: Iterable[EntryArgument]) -> dict[str, list[EntryArgument]]:
    groups: dict[str, list[EntryArgument]] = {}
    for argument in entries:
        groups.setdefault(argument.group, []).append(argument)
    return groups


def _first_user(
    module: Module, source: Instruction, used_by: Mapping[str, Sequence[Instruction]]
) -> Instruction | None:
    """The first user with a source line, through copies."""
    left, seen = [source], set[str]()
    while left:
        for user in used_by.get(left.pop(0).name, ()):
            if module.source(user):
                return user
            if user.name not in seen:
                seen.add(user.name)
                left.append(user)
    return None


def _text(argument: EntryArgument) -> str:
    return f"{argument.tensor.dtype}[{','.join(map(str, argument.tensor.dims))}]"


# ---- collectives ----------------------------------------------------------------------------------------------------


def _collectives(report: CompiledReport, module: Module) -> Iterator[ProgramFinding]:
    """One finding for each group of equal collectives and rule."""
    drafts: dict[tuple[str, str, str, str], list[tuple[Scheduled, float, float, str]]] = {}
    for scheduled_ in report.timeline.collectives:
        for rule, seconds, nbytes, more in _of_collective(report, module, scheduled_):
            moved = scheduled_.collective
            drafts.setdefault((rule, moved.scope, moved.kind, moved.source), []).append(
                (scheduled_, seconds, nbytes, more)
            )
    total_s = report.timeline.total_s
    for (rule, *_), members in drafts.items():
        seconds = sum(member[1] for member in members)
        if seconds < _TIME * total_s:
            continue
        largest, _, _, more = max(members, key=lambda member: member[1])
        moved = largest.collective
        count = sum(member[0].collective.executions for member in members)
        name = f"{moved.kind} of {format_bytes(moved.bytes)} over {','.join(moved.axes)}"
        others = f" (the longest of {count:g} there)" if count > moved.executions else ""
        times = f" x {moved.executions:g}" if moved.executions > 1 else ""
        yield replace(
            _finding(
                report, _named(module, largest), (moved.scope, moved.phase),
                rule=rule,
                what=WHAT[rule] + (_OPTIONS if rule == "exposed_collective" and moved.kind == "all_gather" else ""),
                evidence=f"{name}{times}{others}: {more}",
                seconds=seconds,
                bytes=sum(member[2] for member in members),
            ),
            source=moved.source,
        )  # fmt: skip


#: Those that rooftop's own programs set where XLA:TPU gathers synchronously (``compiler.options``).
_OPTIONS = (
    "; before libtpu 0.0.49 XLA:TPU gathers asynchronously with all of xla_tpu_prefer_async_allgather_to_allreduce, "
    "xla_enable_async_all_gather and xla_tpu_enable_async_collective_fusion_fuse_all_gather"
)
#: The advice of each rule on collectives.
WHAT = {
    "repeated_all_reduce": "leave one of the two out: the value is already the sum on every device",
    "all_reduce_of_a_shard": "keep the sum split (jax.lax.psum_scatter, or an out_sharding over the axis): a "
    "ReduceScatter sends half of it",
    "gathered_activation": "say how the array that is gathered is split (jax.lax.with_sharding_constraint, or "
    "out_sharding), if the operation that uses it can run on parts",
    "f32_collective": "communicate in bf16, where the sum allows it: half of the bytes",
    "exposed_collective": "let it run next to compute: an earlier start, or more work that does not depend on it",
}


def _of_collective(report: CompiledReport, module: Module, entry: Scheduled) -> Iterator[tuple[str, float, float, str]]:
    """Rule, seconds and bytes of all executions, and the end of the evidence."""
    moved = entry.collective
    whole_s, exposed_s = moved.executions * entry.price_s, moved.executions * entry.exposed_s
    place, instruction = _located(module, entry)
    if moved.kind == "all_reduce" and place is not None:
        before = _already_summed(module, place, instruction)
        if before is not None:
            line = module.source(before).rpartition("/")[2]
            nbytes = moved.executions * moved.bytes
            yield "repeated_all_reduce", exposed_s, nbytes, f"its operand is the result of {before.name} ({line})"
            return
        share = _kept_share(module, place, instruction)
        if share is not None:
            used = f"only {share:.0%} of its result is used on a device"
            yield "all_reduce_of_a_shard", exposed_s / 2, 0.0, used
    if moved.kind in ("all_gather", "all_to_all") and place is not None:
        source = origin(module, place, instruction)
        if not source.argument and not source.asked:
            line = source.source.rpartition("/")[2] or source.op_name or source.made_by
            yield "gathered_activation", exposed_s, moved.executions * moved.bytes, f"it gathers what {line} computes"
    if place is not None and _is_f32(place, instruction) and moved.bytes > 2**20:
        yield "f32_collective", exposed_s / 2, 0.0, f"in float32, {format_seconds(whole_s)}"
    if exposed_s:
        how = "synchronous" if moved.synchronous else f"of {format_seconds(whole_s)}"
        yield "exposed_collective", exposed_s, 0.0, f"the device waits {format_seconds(exposed_s)} for it, {how}"


def _located(module: Module, entry: Scheduled) -> tuple[HloComputation | None, Instruction]:
    computation, name = entry.collective.instructions[0]
    inside = module.computations[computation]
    return inside, inside.instructions[name]


def _named(module: Module, entry: Scheduled) -> Instruction:
    """The instruction of a collective whose line is that of its source."""
    for computation, name in entry.collective.instructions:
        instruction = module.computations[computation].instructions[name]
        if module.source(instruction):
            return instruction
    return _located(module, entry)[1]


def _is_f32(inside: HloComputation, instruction: Instruction) -> bool:
    return any(tensor.dtype == "f32" for operand in inside.operands(instruction) for tensor in operand.shape)


#: Opcodes whose result is the same on all devices if their operands are.
_ELEMENTWISE = frozenset({
    "add", "subtract", "multiply", "divide", "negate", "convert", "copy", "bitcast", "reshape", "transpose", "maximum",
    "minimum", "exponential", "log", "sqrt", "rsqrt", "power", "select", "compare", "abs", "tanh", "get-tuple-element",
    "broadcast", "constant", "copy-start", "copy-done", "optimization-barrier",
})  # fmt: skip
_FAR = 60


def _already_summed(module: Module, inside: HloComputation, collective: Instruction) -> Instruction | None:
    """The AllReduce over the same groups that alone makes the operand, elementwise; None without one."""
    groups = collective.attribute("replica_groups")
    sums: list[Instruction] = []
    left, seen = [*inside.operands(collective)], set[str]()
    while left and len(seen) < _FAR:
        source = left.pop()
        if source.name in seen:
            continue
        seen.add(source.name)
        if source.opcode in ("all-reduce", "all-reduce-done", "all-reduce-start"):
            start = source if source.opcode != "all-reduce-done" else inside.operands(source)[0]
            if start.attribute("replica_groups") != groups:
                return None
            sums.append(start)
        elif source.opcode in _ELEMENTWISE or _is_elementwise(module, source):
            left += inside.operands(source)
        else:
            return None
    return sums[0] if sums and not left else None


def _is_elementwise(module: Module, instruction: Instruction) -> bool:
    if instruction.opcode != "fusion":
        return False
    inner = module.computations[instruction.called[0]]
    return all(item.opcode in _ELEMENTWISE or item.opcode == "parameter" for item in inner)


def _kept_share(module: Module, inside: HloComputation, collective: Instruction) -> float | None:
    """The share of a result that is used, if every use is a slice of it that depends on the device; else None."""
    used_by = users(inside)
    left, elements, used_elements = [collective], sum(tensor.elements for tensor in collective.shape), 0.0
    seen = set[str]()
    while left:
        source = left.pop()
        uses = used_by.get(source.name, [])
        if not uses or len(seen) > _FAR:
            return None
        for user in uses:
            if user.name in seen:
                continue
            seen.add(user.name)
            if user.opcode in ("bitcast", "copy", "get-tuple-element", "all-reduce-done", "convert"):
                left.append(user)
            elif user.opcode == "dynamic-slice":
                used_elements += user.shape[0].elements
            elif user.opcode == "fusion" and (part := _sliced(module, user, source)) is not None:
                used_elements += part
            else:
                return None
    share = used_elements / elements if elements else 1.0
    return share if 0 < share <= 0.5 else None


def _sliced(module: Module, fusion: Instruction, source: Instruction) -> float | None:
    """Elements of an operand that a fusion slices; None if it uses it otherwise."""
    inner = module.computations[fusion.called[0]]
    numbers = {str(at) for at, name in enumerate(fusion.operands) if name == source.name}
    left = [item for item in inner if item.opcode == "parameter" and item.literal in numbers]
    total, used_by = 0.0, users(inner)
    while left:
        for user in used_by.get(left.pop().name, []):
            if user.opcode in ("bitcast", "convert", "copy"):
                left.append(user)
            elif user.opcode == "dynamic-slice":
                total += user.shape[0].elements
            else:
                return None
    return total or None


# ---- compute and host -----------------------------------------------------------------------------------------------


def _matmuls(report: CompiledReport, module: Module) -> Iterator[ProgramFinding]:
    """Float32 operands that take longer to read than to multiply, and matmuls that fill the matrix unit badly."""
    chip = report.compiled.mesh.slice.chip
    total_s, spent = report.timeline.total_s, report.timeline.spent_s
    drafts: dict[tuple[str, str, str], list[tuple[Instruction, tuple[str, str], float, str]]] = {}
    for computation in scheduled(module):
        used_by = users(computation)
        for instruction in computation:
            done = work(module, computation, instruction)
            seconds = spent.get((computation.name, instruction.name), 0.0)
            if not done.matmuls or not seconds:
                continue
            place = purpose(module, computation, instruction, used_by)
            source = module.source(instruction)
            bound = done.bound_s(report.rates)
            wide = _f32_bytes(module, computation, instruction)
            saved = min(wide / 2, done.hbm_bytes) / report.rates.hbm_bytes_per_s
            gain = max(0.0, bound["hbm"] - max(bound["mxu"], bound["hbm"] - saved))
            if gain:
                count = module.executions[computation.name]
                note = f"reads and writes {format_bytes(wide)} of float32 next to its matmul"
                drafts.setdefault(("f32_operand", place[0], source), []).append(
                    (instruction, place, gain * count, note)
                )
            _, k, n, *_ = max(done.matmuls, key=lambda item: item[0] * item[1] * item[2])
            useful = float(mxu_padding(8, k, n, chip.mxu_tile).useful) if chip.kind == "tpu" else 1.0
            if useful < _USEFUL:
                full = f"{next_multiple(k, chip.mxu_tile):.0f} x {next_multiple(n, chip.mxu_tile):.0f}"
                note = f"K x N of {k:.0f} x {n:.0f} fill {useful:.0%} of the {full} of the systolic arrays"
                lost = seconds * (1 - useful)
                drafts.setdefault(("padded_matmul", place[0], source), []).append((instruction, place, lost, note))
    what = {
        "f32_operand": "keep these arrays in bf16 in HBM: the matrix unit rounds float32 operands anyway",
        "padded_matmul": f"multiples of {chip.mxu_tile} for these dims, or several packed into one" if drafts else "",
    }
    for (rule, _, _), members in drafts.items():
        seconds = sum(member[2] for member in members)
        if seconds >= _TIME * total_s:
            instruction, place, _, note = max(members, key=lambda member: member[2])
            more = f" (and {len(members) - 1} like it)" if len(members) > 1 else ""
            yield _finding(
                report, instruction, place,
                rule=rule, what=what[rule], evidence=f"{instruction.name} {note}{more}", seconds=seconds,
            )  # fmt: skip


def _f32_bytes(module: Module, computation: HloComputation, instruction: Instruction) -> float:
    """Bytes of float32 arrays in HBM that a matmul reads."""
    arrays = [tensor for operand in computation.operands(instruction) for tensor in operand.shape]
    inside = [instruction]
    if instruction.opcode == "fusion":
        inside = [item for item in module.computations[instruction.called[0]] if is_matmul(item)]
    if not inside:
        return 0.0
    largest = max((tensor.elements for tensor in arrays), default=0)
    # Small float32 operands are scales and biases.
    return sum(
        tensor.nbytes
        for tensor in arrays
        if tensor.dtype == "f32" and not tensor.space and tensor.elements * 8 > largest
    )


def _layouts(report: CompiledReport, module: Module) -> Iterator[ProgramFinding]:
    """Arrays that the partitioner makes whole, and copies into the order of dims that a matmul reads."""
    for cost in made_whole(report, module):
        yield _of_layout("involuntary_rematerialization", cost)
    drafts: dict[tuple[str, str], list[LayoutCost]] = {}
    for cost in relaid(report, module):
        drafts.setdefault((cost.place[0], cost.source), []).append(cost)
    for members in drafts.values():
        seconds = sum(member.seconds for member in members)
        if seconds >= _TIME * report.timeline.total_s:
            largest = max(members, key=lambda member: member.seconds)
            more = f" (and {len(members) - 1} like it)" if len(members) > 1 else ""
            yield _of_layout("relaid_operand", replace(largest, seconds=seconds, evidence=largest.evidence + more))


def _of_layout(rule: str, cost: LayoutCost) -> ProgramFinding:
    return ProgramFinding(
        rule=rule,
        what=cost.what,
        evidence=cost.evidence,
        scope=cost.place[0],
        phase=cost.place[1],
        source=cost.source,
        frames=cost.frames,
        seconds=cost.seconds,
        bytes=cost.bytes,
    )


#: Custom calls that run Python on the host.
_CALLBACKS = ("callback", "xla_python", "HostExecute")
_TO_HOST = ("infeed", "outfeed", "send", "recv")


def _host(report: CompiledReport, module: Module) -> Iterator[ProgramFinding]:
    """Transfers to and from the host, and callbacks."""
    for computation in scheduled(module):
        used_by = users(computation)
        for instruction in computation:
            asks = instruction.opcode in ("infeed", "outfeed") or (
                instruction.opcode in _TO_HOST and "is_host_transfer=true" in instruction.attributes
            )
            calls = instruction.opcode == "custom-call" and any(word in instruction.attributes for word in _CALLBACKS)
            copies = is_host_copy(instruction)
            if not (asks or calls or copies):
                continue
            count = module.executions[computation.name]
            nbytes = moved_bytes(module, computation, instruction) or sum(tensor.nbytes for tensor in instruction.shape)
            seconds = count * nbytes / report.rates.pcie_bytes_per_s
            if copies and seconds < _TIME * report.timeline.total_s:
                continue
            yield _finding(
                report, instruction, purpose(module, computation, instruction, used_by),
                rule="host_transfer",
                what="keep the value on the device: no callback, print or offload within the step"
                if not copies
                else "overlap or leave out the copy between HBM and the host",
                evidence=f"{instruction.name} moves {format_bytes(nbytes)} over PCIe, {count:g} times a step",
                seconds=seconds,
                bytes=0.0,
            )  # fmt: skip
