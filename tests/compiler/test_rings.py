"""Rings of permutes folded into collectives, in hand-made HLO."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rooftop.compiler.collectives import rings
from rooftop.compiler.collectives.logical import LogicalCollective, logical_collectives
from rooftop.compiler.collectives.rings import find_rings
from rooftop.compiler.hlo import text as hlo
from rooftop.compiler.hlo.dataflow import Flow, is_unrolled
from tests.support.examples import examples
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
    named,
    pairs,
    permute,
    scatter,
)


def brief(collectives: Sequence[LogicalCollective]) -> list[tuple[str, float, int, int]]:
    """Kind, bytes, hops and executions."""
    return [(ring.kind, ring.bytes, ring.hops, ring.executions) for ring in collectives]


def folded(parsed: hlo.Module, n: int) -> list[tuple[str, float, int, int]]:
    return brief(logical_collectives(parsed, {"X": 1, "Y": n}))


# ---- AllGather rings ------------------------------------------------------------------------------------------------


@given(st.integers(3, 8), st.data())
def test_a_ring_that_brings_everything_is_an_all_gather(n: int, data: st.DataObject) -> None:
    """One way or both, in any proportion; a ring that falls short by one hop is none."""
    up = data.draw(st.integers(0, n - 1))
    assert folded(module(gather(n, up, n - 1 - up)), n) == [("all_gather", n * NBYTES, n - 1, 1)]
    short = folded(module(gather(n, max(0, up - 1), n - 2 if up == 0 else n - 1 - up)), n)
    assert short == [("permute", NBYTES, 0, 1)] * (n - 2)


@given(st.integers(3, 6))
def test_halves_that_go_round_both_ways(n: int) -> None:
    """Slices of one array make one AllGather of it; a ring of one slice gathers that slice."""
    half = f"bf16[{ROWS // 2},512]"
    lines = []
    for track, way in (("up", 1), ("down", -1)):
        begin = 0 if way > 0 else ROWS // 2
        lines.append(f"{track} = {half} slice(%x), slice={{[{begin}:{begin + ROWS // 2}], [0:512]}}")
        carried = track
        for hop in range(n - 1):
            lines += [*permute(f"{track}{hop}", carried, way, n, half), dot(f"d{track}{hop}", f"{track}{hop}")]
            carried = f"{track}{hop}"
    assert folded(module(lines), n) == [("all_gather", n * NBYTES, 2 * (n - 1), 1)]
    assert folded(module(lines[: len(lines) // 2]), n) == [("all_gather", n * NBYTES / 2, n - 1, 1)]


def test_an_array_that_is_gathered_twice() -> None:
    again = [line.replace("%up", "%again").replace("up", "again", 1) for line in gather(4, 3, 0)[1:]]
    lines = [*gather(4, 3, 0), *[line.replace("dot-up", "dot-again") for line in again]]
    assert folded(module(lines), 4) == [("all_gather", 4 * NBYTES, 3, 1)] * 2


def test_two_devices() -> None:
    """A permute there is an AllGather if a device keeps what it sends, and else an exchange."""
    assert folded(module([*permute("other", "x", 1, 2), dot("a", "x"), dot("b", "other")]), 2) == [
        ("all_gather", 2 * NBYTES, 1, 1)
    ]
    assert folded(module([*permute("other", "x", 1, 2), dot("b", "other")]), 2) == [("permute", NBYTES, 0, 1)]


def test_permutes_of_part_of_an_axis_stay() -> None:
    """Pairs that swap among four devices reach no further."""
    swap = permute("other", "x", 1, 4)
    swap[0] = swap[0].replace(pairs(1, 4), "source_target_pairs={{0,1},{1,0},{2,3},{3,2}}")
    assert folded(module([*swap, dot("a", "x"), dot("b", "other")]), 4) == [("permute", NBYTES, 0, 1)]


# ---- ReduceScatter rings --------------------------------------------------------------------------------------------


@given(st.integers(2, 8), st.sampled_from([1, -1]))
def test_a_sum_with_a_term_of_every_device_is_a_reduce_scatter(n: int, way: int) -> None:
    assert folded(module(scatter(n, way), PLUS), n) == [("reduce_scatter", n * NBYTES, n - 1, 1)]
    if n > 2:
        short = folded(module(scatter(n - 1, way), PLUS), n)
        assert [kind for kind, *_ in short] == ["permute"] * (n - 2)


def test_zeros_carry_nothing() -> None:
    """XLA lets a ring begin with zeros: a hop more, and no term less."""
    lines = ["c = bf16[] constant(0)", f"zeros = {ARRAY} broadcast(%c), dimensions={{}}", *permute("r0", "zeros", 1, 4)]
    first = [dot("t0", "x"), f"s0 = {ARRAY} fusion(%r0, %t0), kind=kLoop, calls=%plus"]
    parsed = module([*lines, *first, *scatter(4, start="s0")], PLUS)
    assert folded(parsed, 4) == [("reduce_scatter", 4 * NBYTES, 4, 1)]


def test_a_pipeline_of_stages_is_no_ring() -> None:
    """A stage adds terms that depend on what it has received."""
    lines = []
    carried = "x"
    for hop in range(4):
        lines += [
            dot(f"f{hop}", carried),
            f"s{hop} = {ARRAY} add(%{carried}, %f{hop})",
            *permute(f"r{hop}", f"s{hop}", 1, 4),
        ]
        carried = f"r{hop}"
    assert folded(module([*lines, dot("last", carried)]), 4) == [("permute", NBYTES, 0, 1)] * 4


def test_a_reduce_scatter_that_is_gathered_again() -> None:
    """The finished sum is a new array, with a ring of its own: together an AllReduce."""
    lines = [*scatter(4), dot("use", "s3")]
    carried = "s3"
    for hop in range(3):
        lines += [*permute(f"g{hop}", carried, 1, 4), dot(f"use{hop}", f"g{hop}")]
        carried = f"g{hop}"
    assert folded(module(lines, PLUS), 4) == [("reduce_scatter", 4 * NBYTES, 3, 1), ("all_gather", 4 * NBYTES, 3, 1)]


def test_halves_of_a_sum_that_meet_in_a_maximum() -> None:
    """XLA concatenates by a maximum of padded halves, to which a device adds its own term as one."""
    half = f"bf16[{ROWS // 2},512]"
    plus = PLUS.replace(ARRAY, half)
    lines = []
    for track, way in (("a", 1), ("b", -1)):
        # The last term is not added here.
        terms = [line for line in scatter(4, way, shape=half) if not line.startswith(("s3", "t3"))]
        names = ("t", "r", "s")
        for line in terms:
            for name in names:
                for hop in range(4):
                    line = line.replace(f"%{name}{hop}", f"%{track}{name}{hop}")
            lines.append(track + line)
    join = fused(
        "join",
        [half, half, ARRAY],
        "low = bf16[] constant(-inf)",
        f"pad0 = {ARRAY} pad(%p0, %low), padding=0_{ROWS // 2}x0_0",
        f"pad1 = {ARRAY} pad(%p1, %low), padding={ROWS // 2}_0x0_0",
        f"both = {ARRAY} maximum(%pad0, %pad1)",
        f"sum = {ARRAY} add(%both, %p2)",
    )
    lines += [dot("own", "x"), f"out = {ARRAY} fusion(%ar3, %br3, %own), kind=kLoop, calls=%join"]
    assert folded(module(lines, plus, join), 4) == [("reduce_scatter", 4 * NBYTES, 6, 1)]


# ---- loops ----------------------------------------------------------------------------------------------------------


def test_rings_in_loops() -> None:
    gathered = loop("ag", 3, [*permute("p", "y", 1, 4), dot("d", "y")], "p")
    assert folded(module([*call("ag", "x"), dot("last", "ag")], *gathered), 4) == [("all_gather", 4 * NBYTES, 3, 1)]
    term = [*permute("p", "y", 1, 4), dot("d", "w"), f"s = {ARRAY} add(%p, %d)"]
    # The same w and w on every trip, and yet another term: in a real loop it is multiplied with another slice.
    parsed = module([dot("t", "w"), *call("rs", "t")], *loop("rs", 3, term, "s"))
    assert folded(parsed, 4) == [("reduce_scatter", 4 * NBYTES, 3, 1)]


def test_a_ring_in_every_trip_of_a_longer_loop() -> None:
    """A ring inside a scan over layers runs once a layer; what the loop carries on is no part of it."""
    body = [dot("own", "y"), *gather(4, 3, 0)[1:]]
    layers = [line.replace("(%x)", "(%y)") for line in body] + [f"t = {ARRAY} add(%own, %dot-up2)"]
    parsed = module(call("scan", "x"), *loop("scan", 12, layers, "t"))
    assert folded(parsed, 4) == [("all_gather", 4 * NBYTES, 3, 12)]


def test_the_rings_of_attention_stay_permutes() -> None:
    """Keys and values pass by: no device ever has them all."""
    lines = [named(line, "layers/attn/core") if "-permute-" in line else line for line in gather(4, 3, 0)]
    assert folded(module(lines), 4) == [("permute", NBYTES, 0, 1)] * 3


# ---- a plain reading ------------------------------------------------------------------------------------------------

SIZES = {1: f"bf16[{ROWS // 2},512]", 2: ARRAY}


@dataclass(frozen=True)
class Step:
    """An instruction of a random program: ``size`` counts halves of an array, ``pairs`` are (source, target)."""

    opcode: str
    operands: tuple[str, ...] = ()
    size: int = 2
    axis: str = ""
    pairs: tuple[tuple[int, int], ...] = ()


Program = dict[str, Step]


def shift(axis: str, way: int, n: int) -> tuple[tuple[int, int], ...]:
    """Pairs of a shift along an axis of the mesh X=3, Y=n."""
    if axis == "X":
        return tuple((x * n + y, (x + way) % 3 * n + y) for x in range(3) for y in range(n))
    return tuple((x * n + y, x * n + (y + way) % n) for x in range(3) for y in range(n))


def program_of(random: Random, n: int) -> Program:
    """A random program that moves arrays in rings, adds terms to them, cuts and joins them, with some disorder."""
    program: Program = {"x": Step("parameter"), "w": Step("parameter"), "zero": Step("zeros")}
    carried = [random.choice(["x", "x", "w", "zero"]) for _ in range(random.randint(1, 2))]
    way, disorder = random.choice([1, -1]), random.choice([0.0, 0.0, 0.1, 0.3])
    rhythm = random.choice([["hop"], ["hop", "term"], ["term", "hop"], ["hop", "term", "use"]])

    def add(step: Step) -> str:
        name = f"v{len(program)}"
        program[name] = step
        return name

    for index in range(random.randint(3, 5 * n)):
        track = random.randrange(len(carried))
        value = carried[track]
        size = program[value].size
        action = rhythm[index % len(rhythm)] if len(carried) == 1 else random.choice(["hop", "term"])
        if random.random() < disorder:
            action = random.choice(["hop", "back", "other", "broken", "term", "again", "cut", "meet", "join", "fresh"])
        if action in ("hop", "back", "other", "broken"):
            axis = "X" if action == "other" else "Y"
            moved = shift(axis, -way if action == "back" else way, n)
            if action == "broken":
                # A line in every row: its last device sends nothing.
                moved = tuple((source, target) for source, target in moved if source % n != n - 1)
            carried[track] = add(Step("permute", (value,), size, axis, moved))
        elif action in ("term", "use"):
            other = random.choice([name for name in ("x", "w", value if action == "use" else "w")])
            term = add(Step("dot", (other, "w"), size))
            if action == "term":
                carried[track] = add(Step("add", (value, term), size))
        elif action == "again":
            same = [name for name, step in program.items() if step.size == size and step.opcode != "zeros"]
            carried[track] = add(Step("add", (value, random.choice(same)), size)) if same else value
        elif action == "cut" and size == 2:
            carried[track] = add(Step("slice", (value,), 1))
            carried.append(add(Step("slice", (value,), 1)))
        elif action == "meet" and program[carried[0]].size == program[carried[-1]].size:
            carried = [add(Step("add", (carried[0], carried[-1]), program[carried[0]].size))]
        elif action == "join" and size == program[carried[-1]].size == 1:
            carried = [add(Step("concatenate", (value, carried[-1]), 2))]
        elif action == "fresh":
            carried[track] = random.choice(["x", "w"])
    return program


def lines_of(program: Program) -> list[str]:
    """The instructions of a program."""
    lines = ["nought = bf16[] constant(0)", f"zero = {ARRAY} broadcast(%nought), dimensions={{}}"]
    for name, step in program.items():
        shape = SIZES[step.size]
        operands = ", ".join(f"%{operand}" for operand in step.operands)
        if step.opcode == "permute":
            moved = ",".join(f"{{{source},{target}}}" for source, target in step.pairs)
            lines.append(f"{name} = {shape} collective-permute({operands}), source_target_pairs={{{moved}}}")
        elif step.opcode == "dot":
            lines.append(dot(name, *step.operands, shape=shape))
        elif step.opcode not in ("parameter", "zeros"):
            lines.append(f"{name} = {shape} {step.opcode}({operands})")
    return lines


@dataclass(frozen=True)
class PlainReading:
    """The rings of a program by their definition, device by device and term by term."""

    program: Program
    n: int

    def parts(self, name: str) -> set[str]:
        """The arrays that are added or joined into one."""
        step = self.program[name]
        if step.opcode in ("add", "concatenate"):
            return set[str]().union(*map(self.parts, step.operands))
        return set() if step.opcode == "zeros" else {name}

    def terms(self, name: str) -> Iterator[tuple[str, str, dict[int, int]]]:
        """Terms of a sum: the array, the axis along which it has come, and the device it is from, on each device."""
        for part in self.parts(name):
            step = self.program[part]
            if step.opcode != "permute":
                yield part, "", {device: device for device in range(3 * self.n)}
                continue
            (sent,) = step.operands
            everywhere = {device: device for device in range(3 * self.n)}
            for term, axis, origin in [(sent, "", everywhere)] if self.complete(sent) else self.terms(sent):
                if axis in ("", step.axis):
                    yield term, step.axis, {to: origin[at] for at, to in step.pairs if at in origin}

    def group(self, axis: str) -> range:
        """The devices along an axis, with device 0."""
        return range(self.n) if axis == "Y" else range(0, 3 * self.n, self.n)

    def complete(self, name: str) -> bool:
        """True if each device has, in all elements, a term of each device of the group."""
        terms = list(self.terms(name))
        axes = {axis for _, axis, _ in terms if axis}
        if len(axes) != 1:
            return False
        group = self.group(axes.pop())
        halves = Counter[tuple[int, int]]()
        for term, _, origin in terms:
            for device in set(group).intersection(origin):
                halves[device, origin[device]] += self.program[term].size
        return all(halves[device, other] >= self.program[name].size for device in group for other in group)

    def came_by(self, name: str) -> set[str]:
        """The permutes of a sum, since the last complete one."""
        permutes = set[str]()
        for part in self.parts(name):
            if self.program[part].opcode == "permute":
                (sent,) = self.program[part].operands
                permutes |= {part} if self.complete(sent) else {part, *self.came_by(sent)}
        return permutes

    def reads(self, name: str, origins: set[str]) -> bool:
        """True if an array is computed from one of the permutes, not through other permutes."""
        step = self.program[name]
        through = () if step.opcode == "permute" else step.operands
        return name in origins or any(self.reads(operand, origins) for operand in through)

    def rings(self) -> list[tuple[str, str, float, list[str]]]:
        """Kind, axis, payload and permutes of every ring."""
        used = set[str]()
        permutes = [name for name, step in self.program.items() if step.opcode == "permute"]
        least = min((self.program[name].size for name in permutes), default=0)
        scatters: list[tuple[str, str, float, list[str]]] = []
        sums = [name for name, step in self.program.items() if step.opcode == "add" and step.size >= least]
        whole = [(name, self.came_by(name)) for name in sums if self.complete(name)]
        for name, ring in sorted(whole, key=lambda entry: len(entry[1])):
            terms = [term for term, _, _ in self.terms(name)]
            if not used & ring and len(set(terms)) == len(terms) and not any(self.reads(term, ring) for term in terms):
                used |= ring
                scatters.append(
                    self._ring("reduce_scatter", name, [permute for permute in permutes if permute in ring])
                )
        return scatters + self._gathers([permute for permute in permutes if permute not in used])

    def _ring(self, kind: str, name: str, ring: list[str]) -> tuple[str, str, float, list[str]]:
        axis = self.program[ring[0]].axis
        return kind, axis, len(self.group(axis)) * self.program[name].size * NBYTES / 2, ring

    def _gathers(self, permutes: list[str]) -> list[tuple[str, str, float, list[str]]]:
        """AllGathers: groups of permutes of one array along one axis, chain by chain."""
        roots: dict[str, tuple[str, str, str, dict[int, int]]] = {}
        for permuted in permutes:
            step = self.program[permuted]
            part = whole = step.operands[0]
            while self.program[whole].opcode == "slice":
                (whole,) = self.program[whole].operands
            if self.program[whole].opcode == "zeros":
                continue
            if whole in roots and self.program[whole].axis == step.axis:
                root, piece, chain, origin = roots[whole]
            else:
                root, piece, chain, origin = whole, part, permuted, {device: device for device in range(3 * self.n)}
            roots[permuted] = root, piece, chain, {to: origin[at] for at, to in step.pairs if at in origin}
        gathers = []
        for root, axis in dict.fromkeys((roots[name][0], self.program[name].axis) for name in roots):
            group = [name for name in roots if roots[name][0] == root and self.program[name].axis == axis]
            rings = self._complete_gathers(root, group, roots)
            for piece in dict.fromkeys(roots[name][1] for name in group if not rings):
                rings += self._complete_gathers(piece, [name for name in group if roots[name][1] == piece], roots)
            gathers += rings
        return gathers

    def _complete_gathers(self, root: str, group: list[str], roots: Mapping[str, Any]) -> list[Any]:
        complete: list[list[str]] = []
        taken: list[str] = []
        devices = self.group(self.program[group[0]].axis)
        for chain in dict.fromkeys(roots[name][2] for name in group):
            taken += [name for name in group if roots[name][2] == chain]
            halves = Counter({(device, device): self.program[root].size for device in devices})
            for name in taken:
                for device in set(devices).intersection(roots[name][3]):
                    halves[device, roots[name][3][device]] += self.program[name].size
            if all(halves[device, other] >= self.program[root].size for device in devices for other in devices):
                complete.append(taken)
                taken = []
        if complete:
            complete[-1] += taken
        return [self._ring("all_gather", root, ring) for ring in complete]


@settings(max_examples=examples(2000, quick=150))
@given(st.randoms(use_true_random=False), st.integers(3, 5))
def test_rings_of_random_programs_are_those_of_the_definition(random: Random, n: int) -> None:
    program = program_of(random, n)
    ours = [
        (ring.kind, *ring.axes, ring.bytes, [name for _, name in ring.permutes])
        for ring in find_rings(module(lines_of(program)), {"X": 3, "Y": n})
    ]
    assert ours == PlainReading(program, n).rings()


# ---- size -----------------------------------------------------------------------------------------------------------


def gather_loop(n: int) -> hlo.Module:
    """An AllGather of n members in a loop."""
    body = [*permute("p", "y", 1, n), dot("d", "y")]
    return module([*call("ag", "x"), dot("last", "ag")], *loop("ag", n - 1, body, "p"))


def scatter_loop(n: int) -> hlo.Module:
    """A ReduceScatter of n members in a loop that adds two terms in each trip."""
    body = [
        *permute("p", "y", 1, n),
        dot("d", "w"),
        dot("e", "w"),
        f"t = {ARRAY} add(%d, %e)",
        f"s = {ARRAY} add(%p, %t)",
    ]
    return module([dot("t", "w"), *call("rs", "t")], *loop("rs", n - 1, body, "s"))


@pytest.mark.parametrize(
    ("program", "kind"),
    [
        (gather_loop, "all_gather"),
        (scatter_loop, "reduce_scatter"),
        (lambda n: module(gather(n, n // 2, n - 1 - n // 2)), "all_gather"),
        (lambda n: module(scatter(n), PLUS), "reduce_scatter"),
    ],
    ids=["gather in a loop", "scatter in a loop", "gather", "scatter"],
)
def test_steps_grow_with_the_members_not_with_their_square(
    program: Callable[[int], hlo.Module], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looks at instructions, and hops of origins, which are arrays of all members."""
    steps = Counter[int]()
    members = 0

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def count(*arguments: Any) -> Any:
            steps[members] += 1
            return function(*arguments)

        return count

    monkeypatch.setattr(Flow, "instruction", counted(Flow.instruction))
    monkeypatch.setattr(rings, "_arrive", counted(rings._arrive))
    for members in (100, 1000):
        (ring,) = find_rings(program(members), {"X": 1, "Y": members})
        assert (ring.kind, ring.members, ring.hops) == (kind, members, members - 1)
    assert steps[1000] <= 11 * steps[100]


def test_a_scan_over_layers_is_no_ring() -> None:
    """Few layers and many members: a loop is one ring only if it permutes what earlier trips have permuted."""
    ring = module(call("rs", "x"), *loop("rs", 12, [*permute("p", "y", 1, 16), f"s = {ARRAY} add(%p, %w)"], "s"))
    assert is_unrolled(ring, "rs_body")
    layer = [dot("d", "y"), *permute("p", "d", 1, 16), f"s = {ARRAY} add(%p, %w)", dot("e", "s")]
    layers = module(call("scan", "x"), *loop("scan", 12, layer, "e"))
    assert not is_unrolled(layers, "scan_body")
    # The two arrays of the loop change places: one trip permutes what the one before the last has permuted.
    swapped = "ROOT %out = {} tuple(%next, %w, %p)".format
    swap = loop("swap", 12, [*permute("p", "y", 1, 16)], "p")
    swap[0] = swap[0].replace(f"ROOT %out = {CARRIED} tuple(%next, %p, %w)", swapped(CARRIED))
    assert is_unrolled(module(call("swap", "x"), *swap), "swap_body")
