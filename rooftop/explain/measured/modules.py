"""Facts about every op of a trace, from its compiled module: scope, source line, FLOPs, bytes, mesh axes."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from rooftop.compiler.collectives.logical import LogicalCollective, logical_collectives
from rooftop.compiler.hlo.costs import is_matmul, matmul_dtype, work
from rooftop.compiler.hlo.places import first_place, holders, outermost, purpose, users
from rooftop.compiler.hlo.printing import hlo_proto_of, module_text
from rooftop.compiler.hlo.scopes import source_of
from rooftop.compiler.hlo.text import HloComputation, Instruction, Module, parse
from rooftop.core.errors import UNFORESEEN, RooftopError
from rooftop.core.extras import is_installed
from rooftop.core.files import read_bytes
from rooftop.core.timelines.xprof import message
from rooftop.explain.axes import devices_of, infer_mesh
from rooftop.profile.facts import (
    COLLECTIVE,
    CONTROL,
    Facts,
    OpPlace,
    category_of,
    collective_kind,
    facts_of,
)
from rooftop.profile.trace import Op, Trace
from rooftop.profile.xplane import fields

_CALLS = ("async-start", "call-start")
_GEMM = re.compile(r'custom_call_target="__(?:cublas|cublas\$lt|triton_gemm|onednn)\S*')
_STEM = re.compile(r"\.(?:clone|remat\d*)\b|\.\d+$")


@dataclass(frozen=True, kw_only=True)
class TracedProgram:
    """A compiled program of a trace: its ``module``, and its ``mesh`` in the order of device ids.

    ``given`` is true for a mesh of the user or the run, and false for one inferred from replica groups.
    """

    module: Module
    mesh: Mapping[str, int]
    given: bool

    @property
    def ours(self) -> bool:
        """True if the program opens the scopes of ``rooftop.core.scopes``."""
        return self.module.scopes.own

    @cached_property
    def collectives(self) -> tuple[LogicalCollective, ...]:
        """The logical collectives."""
        return logical_collectives(self.module, self.mesh)

    @cached_property
    def files(self) -> frozenset[str]:
        """Names of the files that its source lines are in."""
        sources = {source_of(stack) for stack in self.module.stacks.values()}
        return frozenset(place.rpartition(":")[0].rpartition("/")[2] for place in sources)

    @cached_property
    def facts(self) -> Mapping[str, Facts]:
        """The facts of every instruction that a device may run by itself, by its name."""
        facts: dict[str, Facts] = {}
        moved = self._moved()
        inside = {name for name in self.module.computations if self._is_fused(name)}
        for computation in self.module.computations.values():
            if not self.module.executions[computation.name] or computation.name in inside:
                continue
            used_by = users(computation)
            for instruction in computation:
                facts[instruction.name] = self._facts(computation, instruction, used_by, moved)
        return facts

    @cached_property
    def origins(self) -> Mapping[str, OpOrigin]:
        """Origin of every collective's operand, by its instruction and by the op that contains the instruction."""
        origins: dict[str, OpOrigin] = {}
        for collective in self.collectives:
            for inside, name in collective.instructions:
                computation = self.module.computations[inside]
                origin_ = origin(self.module, computation, computation.instructions[name])
                for known in (name, *self._outermost(inside, name)):
                    origins.setdefault(known, origin_)
        return origins

    def _is_fused(self, name: str) -> bool:
        """True if a computation is part of one instruction: fused, applied, or a comparator."""
        opcodes = [item.opcode for _, item in self.module.callers.get(name, ())]
        return any(category_of(opcode) != CONTROL and opcode not in _CALLS for opcode in opcodes)

    def _moved(self) -> dict[str, list[LogicalCollective]]:
        """The logical collectives by the instruction that a device runs for them."""
        moved: dict[str, list[LogicalCollective]] = {}
        for collective in self.collectives:
            for place in dict.fromkeys(collective.instructions):
                for name in self._outermost(*place):
                    moved.setdefault(name, []).append(collective)
        return moved

    @cached_property
    def _ends(self) -> dict[str, tuple[str, str]]:
        """Role and first fusion of each fusion that begins or ends an asynchronous collective."""
        ends: dict[str, tuple[str, str]] = {}
        for collective in self.collectives:
            names = list(dict.fromkeys(name for place in collective.instructions for name in self._outermost(*place)))
            if not collective.synchronous and not collective.hops and len(names) > 1:
                names.sort(key=lambda name: self._position[name])
                ends |= {names[0]: ("start", ""), names[-1]: ("done", names[0])}
        return ends

    @cached_property
    def _position(self) -> dict[str, int]:
        """Every instruction's place in its computation."""
        return {
            instruction.name: at
            for inside in self.module.computations.values()
            for at, instruction in enumerate(inside)
        }

    def _outermost(self, inside: str, name: str) -> list[str]:
        return [outer for _, outer in outermost(self.module, inside, name)]

    def _facts(
        self,
        computation: HloComputation,
        instruction: Instruction,
        used_by: Mapping[str, list[Instruction]],
        moved: Mapping[str, list[LogicalCollective]],
    ) -> Facts:
        opcode = instruction.opcode
        begun = self._begun(computation, instruction)
        logical = moved.get(instruction.name) or moved.get(begun, [])
        done = work(self.module, computation, instruction)
        kind, role = collective_kind(opcode)
        if logical and opcode == "fusion" and not all(item.synchronous for item in logical):
            # A fusion that only advances an asynchronous collective computes something else.
            role, begun = self._ends.get(instruction.name, ("", ""))
            logical = logical if role and not done.flops else []
        elif logical:
            role = "done" if opcode.endswith("-done") else "start" if opcode.endswith("-start") else "whole"
        if logical or kind:
            return self._communicates(computation, instruction, used_by, logical, kind, role, begun)
        scope, phase = self._place(computation, instruction, used_by)
        called = _called_matmul(computation, instruction)
        largest = called or max(done.matmuls, key=lambda matmul: matmul[0] * matmul[1] * matmul[2], default=None)
        return Facts(
            category=category_of(opcode),
            places=(OpPlace(scope=scope, phase=phase),),
            source=self._source(instruction),
            opcode=opcode,
            flops=2.0 * math.prod(called[:3]) if called else done.flops,
            hbm_bytes=float(done.hbm_bytes),
            dtype=largest[3] if largest else "bf16",
            matmul=largest[:3] if largest else None,
        )

    def _communicates(
        self, computation: HloComputation, instruction: Instruction, used_by: Mapping[str, list[Instruction]],
        logical: Sequence[LogicalCollective], kind: str, role: str, begun: str,
    ) -> Facts:  # fmt: skip
        parts = [(item.scope, item.phase, item.bytes / max(1, item.hops)) for item in logical]
        total = sum(nbytes for _, _, nbytes in parts)
        places = [
            OpPlace(scope=scope, phase=phase, share=nbytes / total if total else 1 / len(parts))
            for scope, phase, nbytes in parts
        ]
        if not self.ours or not places:
            scope, phase = self._place(computation, instruction, used_by)
            places = [OpPlace(scope=scope, phase=phase)]
        first = logical[0] if logical else None
        return Facts(
            category=COLLECTIVE,
            places=tuple(places),
            source=next((item.source for item in logical if item.source), "") or self._source(instruction),
            opcode=instruction.opcode,
            flops=0.0,
            hbm_bytes=0.0,
            kind=first.kind if first else kind,
            axes=first.axes if first else (),
            bytes=total if logical else None,
            wire_bytes=sum(item.wire_bytes / max(1, item.hops) for item in logical) if logical else None,
            role=role,
            started_by=begun,
        )

    def _place(
        self, computation: HloComputation, instruction: Instruction, used_by: Mapping[str, list[Instruction]]
    ) -> tuple[str, str]:
        if self.ours:
            return purpose(self.module, computation, instruction, used_by)
        named = [instruction]
        if instruction.opcode == "fusion":
            inner = self.module.computations[instruction.called[0]]
            named = [*(fused for fused in inner if is_matmul(fused)), instruction, *inner]
        return first_place(self.module, named)

    def _source(self, instruction: Instruction) -> str:
        if (own := self.module.source(instruction)) or instruction.opcode != "fusion":
            return own
        inner = self.module.computations[instruction.called[0]]
        return next((line for instruction in inner if (line := self.module.source(instruction))), "")

    def _begun(self, computation: HloComputation, instruction: Instruction) -> str:
        """The name of the instruction that began the operation that this one ends; '' for other instructions."""
        if not instruction.opcode.endswith("-done") or not instruction.operands:
            return ""
        source = computation.operands(instruction)[0]
        while source.opcode in ("get-tuple-element", "bitcast", "async-update") and source.operands:
            source = computation.operands(source)[0]
        return source.name


def _called_matmul(computation: HloComputation, instruction: Instruction) -> tuple[float, float, float, str] | None:
    """M, K, N and dtype of a matmul that XLA:GPU leaves to a library; None for other instructions."""
    if instruction.opcode != "custom-call" or not _GEMM.search(instruction.attributes):
        return None
    contracted = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', instruction.attributes)
    left, out = computation.operands(instruction)[0].shape[0], instruction.shape[0]
    k = math.prod(left.dims[int(item)] for item in re.findall(r"\d+", contracted[1])) if contracted else 1
    n = out.dims[-1] if out.dims else 1
    return out.elements / n, float(k), float(n), matmul_dtype(computation, instruction)


def programs_of(
    trace: Trace, mesh: Mapping[str, int] | None, texts: Sequence[str] = (), sources: Sequence[str] = ()
) -> tuple[dict[int, TracedProgram], dict[str, str]]:
    """The compiled programs of a trace by number, and the reason for each program without a module.

    ``mesh`` is that of the program with as many devices. ``texts`` are the user's modules, which come first, and
    ``sources`` those next to the trace, which come last.
    """
    by_name, saved = _by_name(texts), _by_name(sources)
    result: dict[int, TracedProgram] = {}
    missing: dict[str, str] = {}
    used = {op.program for op in trace.ops}
    for number, name in trace.programs.items():
        if number not in used:
            continue
        text = by_name.get(name) or (by_name[next(iter(by_name))] if len(by_name) == 1 and len(used) == 1 else "")
        # A run's own text stands in where nothing is installed that reads the module in the trace.
        if not text and number in trace.modules and (is_installed("jaxlib") or name not in saved):
            text = module_text(trace.modules[number])
        text = text or saved.get(name, "")
        if not text:
            missing[name] = "the trace has no HLO of it (a CPU's has none of programs out of a cache); --hlo gives one"
            continue
        try:
            # Any program may be in a trace: if it cannot be read, the facts are those of the trace alone.
            program = program_of(text, mesh)
            result |= {number: program} if program.facts else {}
        except (RooftopError, *UNFORESEEN) as error:
            missing[name] = f"its HLO cannot be read ({type(error).__name__}: {error})"
    return result, missing


def _by_name(texts: Sequence[str]) -> dict[str, str]:
    named = ((re.match(r"HloModule ([\w.\-]+)", text), text) for text in texts)
    return {match[1] if match else "": text for match, text in named}


def program_of(text: str, mesh: Mapping[str, int] | None) -> TracedProgram:
    """A program from the text of its module. Raises RooftopError for other text."""
    module, devices = parse(text), devices_of(text)
    known_mesh = mesh is not None and devices in (1, math.prod(mesh.values()))
    return TracedProgram(
        module=module,
        mesh=dict(mesh) if known_mesh and mesh is not None else infer_mesh(module, devices),
        given=known_mesh,
    )


def all_facts(ops: Sequence[Op], programs: Mapping[int, TracedProgram]) -> tuple[Facts, ...]:
    """The facts of ops, from their module, else from the trace."""
    return tuple(_merged(op, programs.get(op.program)) for op in ops)


def _merged(op: Op, program: TracedProgram | None) -> Facts:
    own = facts_of(op)
    if program is None:
        return own
    result = program.facts.get(op.name) or program.facts.get(_STEM.sub("", op.name))
    return own if result is None else result


#: Bytes of a module. The text of a step of Llama 3 405B has 30 MB.
_MOST_BYTES = 2**29


def read_module(path: Path) -> str:
    """The text of a module in a file: HLO text, or a serialized HloProto or HloModuleProto.

    Raises RooftopError for other files.
    """
    accepted = "the text of a compiled HLO module (compiled.as_text()), or its *.hlo.pb"
    try:
        data = read_bytes(path, most=_MOST_BYTES)
    except OSError as error:
        raise RooftopError("hlo", str(path), f"{accepted} ({error.strerror})") from None
    if data.lstrip().startswith(b"HloModule"):
        return data.decode("utf-8", "replace")
    try:
        first = next(fields(data, 0, len(data)), None)
        inner = (
            data[first.value : first.end]
            if first and first.number == 1 and data[first.value : first.value + 1] == b"\n"
            else data
        )
        return module_text(inner)
    except (RooftopError, ValueError, RuntimeError):
        raise RooftopError("hlo", str(path), accepted) from None


def hlo_proto(text: str) -> bytes:
    """The text of a module as a serialized HloProto, the form in which a trace has it. ``module_text`` reads it."""
    return message(1, hlo_proto_of(text))


#: Opcodes that change the memory, layout or type of an array, and compute nothing.
_MOVES = (
    "bitcast", "copy", "copy-start", "copy-done", "reshape", "transpose", "convert", "slice", "dynamic-slice",
    "get-tuple-element", "optimization-barrier", "slice-start", "slice-done", "broadcast", "pad",
)  # fmt: skip
_STEPS = 200
#: Functions of a program that ask for a sharding or a collective.
_ASKED = re.compile(r"reshard|sharding_constraint|all_gather|psum|all_to_all|ppermute|reduce_scatter|\bpmean\b")


@dataclass(frozen=True, kw_only=True)
class OpOrigin:
    """``argument`` is the name of a program's argument ('' if the operand was computed); then what made it, and where.

    ``asked`` is true if the program itself calls for the collective, and false if the partitioner inserts it.
    """

    asked: bool
    argument: str
    made_by: str
    op_name: str
    source: str


def origin(module: Module, computation: HloComputation, instruction: Instruction) -> OpOrigin:
    """Origin of an instruction's first operand, followed through moves and out of loops."""
    at = computation
    result = computation.operands(instruction)[0] if instruction.operands else instruction
    for _ in range(_STEPS):
        step = _behind(module, at, result)
        if step is None:
            break
        at, result = step
    is_argument = result.opcode == "parameter" and at.name == module.entry
    return OpOrigin(
        asked=_ASKED.search(instruction.op_name) is not None,
        argument=(result.op_name or result.name).replace("\\", "") if is_argument else "",
        made_by=result.name,
        op_name=result.op_name,
        source=module.source(result),
    )


def _behind(module: Module, at: HloComputation, result: Instruction) -> tuple[HloComputation, Instruction] | None:
    """One step back: through a move, out of a fusion, or out of a loop that does not change it; None at the end."""
    if result.opcode == "parameter":
        around = holders(module, at.name)
        if around:
            outer, holder = around[0]
            return outer, outer.operands(holder)[int(result.literal)]
        return None
    if result.opcode == "get-tuple-element":
        source = at.operands(result)[0]
        index = int(result.attribute("index") or 0)
        if source.opcode == "parameter":
            return _carried(module, at, index)
        if source.opcode == "tuple":
            return at, at.operands(source)[index]
        if source.opcode == "while":
            # An element that the loop does not change is that of its operand.
            body = module.computations[source.called_as("body")]
            output = body.operands(body.instructions[body.root])[index]
            if _is_carried(body, output, index):
                start = at.operands(source)[0]
                return (at, at.operands(start)[index]) if start.opcode == "tuple" else None
            return body, output
        return at, source
    if result.opcode in _MOVES and result.operands:
        return at, at.operands(result)[0]
    if result.opcode == "fusion":
        inner = module.computations[result.called[0]]
        if all(
            instruction.opcode in (*_MOVES, "parameter", "constant", "tuple", "compare", "select", "add")
            for instruction in inner
        ) and any(
            instruction.opcode in ("dynamic-slice", "convert", "copy", "slice", "transpose", "bitcast")
            for instruction in inner
        ):
            root = inner.instructions[inner.root]
            return inner, root
    return None


def _carried(module: Module, body: HloComputation, index: int) -> tuple[HloComputation, Instruction] | None:
    """Initial value of a loop element that the body does not change; None if the body changes it."""
    for outer, loop in module.callers.get(body.name, ()):
        if loop.opcode != "while":
            continue
        initial = (
            body.operands(body.instructions[body.root])[index]
            if body.instructions[body.root].opcode == "tuple"
            else None
        )
        if initial is None:
            return None
        if not _is_carried(body, initial, index):
            return body, initial
        start = outer.operands(loop)[0]
        return (outer, outer.operands(start)[index]) if start.opcode == "tuple" else None
    return None


def _is_carried(body: HloComputation, output: Instruction, index: int) -> bool:
    """Return True if the loop body passes carry element ``index`` through unchanged."""
    while output.opcode in ("copy", "bitcast") and output.operands:
        output = body.operands(output)[0]
    return (
        output.opcode == "get-tuple-element"
        and int(output.attribute("index") or 0) == index
        and body.operands(output)[0].opcode == "parameter"
    )
