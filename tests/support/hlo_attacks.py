"""Modules of HLO that somebody may write to hurt a reader, and a search for more.

``python -m tests.support.hlo_attacks --seconds 600`` searches, and prints what falls over with its seed.

``REFUSED`` and ``LINEAR`` are the attacks that have a name. ``mutated`` changes the lines of a module as a seed draws:
of one that the compiler wrote, of a part of it, or of one that ``grammar`` draws.
"""

from __future__ import annotations

import argparse
import faulthandler
import random
import re
import resource
import signal
import sys
import tarfile
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from rooftop.core.errors import Infeasible, RooftopError
from rooftop.explain import demo
from rooftop.library.programs.checking import check
from rooftop.library.programs.compiling import explain_module

HEAD = "HloModule m, is_scheduled=true, entry_computation_layout={(f32[4]{0})->f32[4]{0}}\n\n"
ENTRY = "ENTRY %main (p: f32[4]) -> f32[4] {\n  %p = f32[4]{0} parameter(0)\n"
_ADD = "f32[4]{0} add"


def _entry(lines: Sequence[str], *computations: str) -> str:
    return (
        HEAD + "".join(f"{one}\n\n" for one in computations) + ENTRY + "".join(f"  {line}\n" for line in lines) + "}\n"
    )


def _root(name: str = "p") -> str:
    return f"ROOT %r = {_ADD}(%{name}, %{name})"


def chain(size: int) -> str:
    """Operations without names, each of which uses the one before."""
    return _entry(
        [f"%a{at} = {_ADD}(%{f'a{at - 1}' if at else 'p'}, %p)" for at in range(size)] + [_root(f"a{size - 1}")]
    )


def moves(size: int) -> str:
    """Copies of copies, of the result of an AllReduce each."""
    groups = "replica_groups={}, to_apply=%sum"
    lines = [f"%a{at} = f32[4]{{0}} bitcast(%{f'a{at - 1}' if at else 'p'})" for at in range(size)]
    lines += [f"%s{at} = f32[4]{{0}} all-reduce(%a{size - 1}), {groups}" for at in range(size)]
    return _entry([*lines, _root(f"s{size - 1}")], _SUM).replace("m, is", "m, num_partitions=4, is")


_SUM = (
    "%sum (x: f32[], y: f32[]) -> f32[] {\n  %x = f32[] parameter(0)\n  %y = f32[] parameter(1)\n"
    "  ROOT %z = f32[] add(%x, %y)\n}"
)


def fused(size: int) -> str:
    """A fusion with many parameters, each passed through diamonds of operations that rename."""
    inner = [f"  %x{at} = f32[4]{{0}} parameter({at})" for at in range(size)]
    for at in range(size):
        left, right = (f"l{at - 1}", f"k{at - 1}") if at else ("x0", "x0")
        inner += [f"  %l{at} = f32[4]{{0}} pad(%{left}, %{right})", f"  %k{at} = f32[4]{{0}} pad(%{right}, %{left})"]
    text = "%fused () -> f32[4] {\n" + "\n".join(inner) + f"\n  ROOT %z = {_ADD}(%l{size - 1}, %k{size - 1})\n}}"
    operands = ", ".join(["%p"] * size)
    return _entry([f"ROOT %r = f32[4]{{0}} fusion({operands}), kind=kLoop, calls=%fused"], text)


def loops(size: int) -> str:
    """Loops one after another, each with a counter that is carried through a long sum."""
    bodies, lines = list[str](), ["%zero = s32[] constant(0)", "%start = (s32[], f32[4]{0}) tuple(%zero, %p)"]
    for at in range(size):
        bodies += [
            f"%body{at} (c: (s32[], f32[4])) -> (s32[], f32[4]) {{\n"
            "  %c = (s32[], f32[4]{0}) parameter(0)\n"
            "  %i = s32[] get-tuple-element(%c), index=0\n  %one = s32[] constant(1)\n"
            "  %n = s32[] add(%i, %one)\n  %v = f32[4]{0} get-tuple-element(%c), index=1\n"
            f"  %w = {_ADD}(%v, %v)\n  ROOT %t = (s32[], f32[4]{{0}}) tuple(%n, %w)\n}}",
            f"%cond{at} (c: (s32[], f32[4])) -> pred[] {{\n  %c = (s32[], f32[4]{{0}}) parameter(0)\n"
            "  %i = s32[] get-tuple-element(%c), index=0\n  %most = s32[] constant(1000000)\n"
            "  ROOT %l = pred[] compare(%i, %most), direction=LT\n}",
        ]
        carry = f"w{at - 1}" if at else "start"
        lines += [f"%w{at} = (s32[], f32[4]{{0}}) while(%{carry}), condition=%cond{at}, body=%body{at}"]
    return _entry([*lines, f"ROOT %r = f32[4]{{0}} get-tuple-element(%w{size - 1}), index=1"], *bodies)


def scalars(size: int) -> str:
    """A loop whose counter doubles a constant again and again, each time by two uses of the one before."""
    body = [
        f"  %d{at} = s32[] subtract(%{f'd{at - 1}' if at else 'one'}, %{f'd{at - 1}' if at else 'one'})"
        for at in range(size)
    ]
    step = loops(1).replace(
        "  %n = s32[] add(%i, %one)",
        "\n".join(body) + f"\n  %e = s32[] add(%d{size - 1}, %one)\n  %n = s32[] add(%i, %e)",
    )
    return step


def calls(size: int) -> str:
    """Computations that each call the one below once."""
    inner = ["%c0 (x: f32[4]) -> f32[4] {\n  %x = f32[4]{0} parameter(0)\n  ROOT %y = f32[4]{0} add(%x, %x)\n}"]
    inner += [
        f"%c{at} (x: f32[4]) -> f32[4] {{\n  %x = f32[4]{{0}} parameter(0)\n"
        f"  ROOT %y = f32[4]{{0}} call(%x), to_apply=%c{at - 1}\n}}"
        for at in range(1, size)
    ]
    return _entry([f"ROOT %r = f32[4]{{0}} call(%p), to_apply=%c{size - 1}"], *inner)


def doubled(size: int, opcode: str = "call", role: str = "to_apply") -> str:
    """Computations that each call the one below twice."""
    called = f"{'kind=kLoop, ' if opcode == 'fusion' else ''}{role}"
    inner = ["%c0 (x: f32[4]) -> f32[4] {\n  %x = f32[4]{0} parameter(0)\n  ROOT %y = f32[4]{0} add(%x, %x)\n}"]
    inner += [
        f"%c{at} (x: f32[4]) -> f32[4] {{\n  %x = f32[4]{{0}} parameter(0)\n"
        f"  %a = f32[4]{{0}} {opcode}(%x), {called}=%c{at - 1}\n  %b = f32[4]{{0}} {opcode}(%a), {called}=%c{at - 1}\n"
        f"  ROOT %y = f32[4]{{0}} add(%a, %b)\n}}"
        for at in range(1, size)
    ]
    return _entry([f"ROOT %r = f32[4]{{0}} {opcode}(%p), {called}=%c{size - 1}"], *inner)


def nested_loops(size: int) -> str:
    """Loops in loops: the trips of each multiply those of the others."""
    text = loops(size)
    for at in range(size - 1):
        inner = f"  %w = f32[4]{{0}} add(%v, %v)\n  ROOT %t = (s32[], f32[4]{{0}}) tuple(%n, %w)\n}}\n\n%cond{at} "
        outer = (
            "  %none = s32[] constant(0)\n  %first = (s32[], f32[4]{0}) tuple(%none, %v)\n"
            f"  %in = (s32[], f32[4]{{0}}) while(%first), condition=%cond{at + 1}, body=%body{at + 1}\n"
            "  %w = f32[4]{0} get-tuple-element(%in), index=1\n"
            f"  ROOT %t = (s32[], f32[4]{{0}}) tuple(%n, %w)\n}}\n\n%cond{at} "
        )
        text = text.replace(inner, outer)
    lines = text.splitlines(keepends=True)
    return "".join(line for line in lines if not re.match(r"  %w[1-9]\d* = ", line)).replace(
        f"(%w{size - 1}), index=1\n}}\n", "(%w0), index=1\n}\n"
    )


def named(size: int, part: str = "a") -> str:
    """An operation whose name is ``part`` again and again."""
    return _entry([f'{_root()}, metadata={{op_name="{part * size}"}}'])


def attribute(size: int, part: str) -> str:
    """An operation with ``part`` again and again among its attributes."""
    return _entry([f"{_root()}, {part * size}"])


_DIGITS = "9" * 4000
#: Attacks that must be refused, and those of which some answer comes, whatever it is.
REFUSED: Mapping[str, str] = {
    "a computation that calls itself": _entry(
        ["ROOT %r = f32[4]{0} call(%p), to_apply=%c"],
        "%c (x: f32[4]) -> f32[4] {\n  %x = f32[4]{0} parameter(0)\n  ROOT %y = f32[4]{0} call(%x), to_apply=%c\n}",
    ),
    "a fusion that calls itself": _entry(
        ["ROOT %r = f32[4]{0} fusion(%p), kind=kLoop, calls=%c"],
        "%c (x: f32[4]) -> f32[4] {\n  %x = f32[4]{0} parameter(0)\n  ROOT %y = f32[4]{0} fusion(%x), calls=%c\n}",
    ),
    "3,000 nested calls": calls(3000),
    "calls that double, 60 deep": doubled(60),
    "fusions that double, 60 deep": doubled(60, "fusion", "calls"),
    "loops in loops, 60 deep": nested_loops(60),
    "a dim of 4,000 digits": _entry([_root()]).replace("f32[4]{0} add", f"f32[{_DIGITS}]{{0}} add"),
    "a dim of 5,000 digits": _entry([_root()]).replace("f32[4]{0} add", f"f32[{_DIGITS * 2}]{{0}} add"),
    "a parameter of 5,000 digits": _entry([_root()]).replace("parameter(0)", f"parameter({_DIGITS * 2})"),
    "dims that multiply to too much": _entry([_root()]).replace(
        "f32[4]{0} add", f"f32[{'9' * 18},{'9' * 18}]{{1,0}} add"
    ),
    "a while without its condition": loops(1).replace("condition=%cond0", "condition=%none"),
    "a while without a body": loops(1).replace(", body=%body0", ""),
    "its own operand": _entry([f"ROOT %r = {_ADD}(%r, %r)"]),
    "operands in a circle": _entry([f"%a = {_ADD}(%b, %p)", f"%b = {_ADD}(%a, %p)", _root("b")]),
    "the same name twice": _entry([f"%a = {_ADD}(%p, %p)", f"%a = {_ADD}(%a, %p)", _root("a")]),
    "an operand that is not there": _entry([f"ROOT %r = {_ADD}(%p, %none)"]),
    "an index of 5,000 digits": loops(1).replace("index=1", f"index={_DIGITS * 2}"),
    "no opcode": _entry([_root(), "%x = "]),
    "no name": HEAD,
    "more devices than there are": moves(2).replace(
        "replica_groups={}", "replica_groups=[1,999999999999]<=[999999999999]"
    ),
}
#: Attacks by size whose work must grow with it, and no faster.
LINEAR: Mapping[str, Callable[[int], str]] = {
    "chain": chain,
    "moves": moves,
    "fused": fused,
    "loops": loops,
    "scalars": scalars,
    "independent": lambda size: _entry([f"%a{at} = {_ADD}(%p, %p)" for at in range(size)] + [_root()]),
    **{
        f"name {part}": lambda size, part=part: named(size, part)
        for part in ("a", "(", "/a", "(a:", "a;", "jit(", "a(")
    },
    **{
        f"attribute {part}": lambda size, part=part: attribute(size, part)
        for part in ("calls={", "window={", "f32[]{", "mesh[", "a_", "replica_groups={", '"body":"', "/*", "[", "S(1)")
    },
}  # type: ignore[misc]


def grammar(draw: random.Random) -> str:
    """A module of any of the attacks, small."""
    name = draw.choice((*LINEAR, *REFUSED, "calls", "doubled", "nested"))
    size = draw.choice((1, 2, 5, 20))
    if name in LINEAR:
        return LINEAR[name](size)
    others = {
        "calls": lambda: calls(size),
        "doubled": lambda: doubled(size, *draw.choice((("call", "to_apply"), ("fusion", "calls")))),
        "nested": lambda: nested_loops(min(size, 5)),
    }
    return others[name]() if name in others else REFUSED[name]


_NAME = re.compile(r"%[\w.\-]+")
_NUMBER = re.compile(r"\d+")
_OPCODE = re.compile(r"(?<= )[a-z][\w\-]*(?=\()")
_NUMBERS = (
    "0",
    "1",
    "2",
    "7",
    "64",
    "4096",
    "131072",
    "2147483648",
    "9223372036854775807",
    "9" * 30,
    "9" * 5000,
    "-1",
    "",
)
_OPCODES = (
    "add",
    "bitcast",
    "copy",
    "dot",
    "convolution",
    "fusion",
    "while",
    "call",
    "conditional",
    "tuple",
    "parameter",
    "constant",
    "get-tuple-element",
    "all-reduce",
    "all-gather",
    "all-gather-start",
    "all-gather-done",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "collective-permute-start",
    "collective-permute-done",
    "copy-start",
    "copy-done",
    "dynamic-slice",
    "dynamic-update-slice",
    "scatter",
    "gather",
    "pad",
    "broadcast",
    "custom-call",
    "send",
    "recv",
    "recv-done",
    "iota",
    "sort",
)
_ATTRIBUTES = (
    "replica_groups={{0,1},{2,3}}",
    "replica_groups={}",
    "replica_groups=[2,2]<=[4]",
    "replica_groups=[4]<=[2,2]T(1,0)",
    "replica_groups={{0,0,0}}",
    "replica_groups={{9}}",
    "source_target_pairs={{0,1},{1,0}}",
    "source_target_pairs={{0},{}}",
    "source_target_pairs={}",
    "dim_labels=bf_io->bf",
    "dim_labels=b0f_0io->b0f",
    "window={size=9x9 stride=0x0 pad=1_1x1_1}",
    "window={}",
    "lhs_contracting_dims={9}",
    "lhs_contracting_dims={0}",
    "index=0",
    "index=99",
    "calls=%none",
    'metadata={op_name="jit(f)/jvp(layers)/while/body/mlp/up/dot" stack_frame_id=1}',
    'metadata={op_name="(a:b:(c:d))"}',
    'metadata={op_name="taken[0:0]/taken[1:3:9]/trips[0]/kernel_flops[each=nan]"}',
    'custom_call_target="tpu_custom_call"',
    'backend_config={"custom_call_config": {"body":"AAAA","cost_estimate":{"flops":"x"}}}',
    'backend_config={"estimated_cycles":"99999999999999999999"}',
    "direction=LT",
    "direction=NE",
    "channel_id=1",
    'custom_call_target="ConcatBitcast"',
    'custom_call_target="AllocateBuffer"',
    'frontend_attributes={chain_id="1"}',
)


def mutated(text: str, draw: random.Random) -> str:
    """The module with one to six of its lines changed."""
    lines = text.splitlines()
    for _ in range(draw.choice((1, 1, 2, 3, 6))):
        if lines:
            _CHANGES[draw.randrange(len(_CHANGES))](lines, draw.randrange(len(lines)), draw)
    return "\n".join(lines) + "\n"


def _within(pattern: re.Pattern[str], line: str, other: str, draw: random.Random) -> str:
    """The line with one match of the pattern replaced."""
    places = list(pattern.finditer(line))
    if not places:
        return line
    place = draw.choice(places)
    return line[: place.start()] + other + line[place.end() :]


def _drop(lines: list[str], at: int, draw: random.Random) -> None:
    del lines[at : at + draw.choice((1, 1, 3, 20))]


def _repeat(lines: list[str], at: int, draw: random.Random) -> None:
    lines[at:at] = lines[at : at + draw.choice((1, 5, 30))] * draw.choice((1, 3))


def _swap(lines: list[str], at: int, draw: random.Random) -> None:
    other = draw.randrange(len(lines))
    lines[at], lines[other] = lines[other], lines[at]


def _operand(lines: list[str], at: int, draw: random.Random) -> None:
    names = [match.group() for line in draw.choices(lines, k=8) for match in _NAME.finditer(line)]
    lines[at] = _within(_NAME, lines[at], draw.choice(names or ["%none"]), draw)


def _number(lines: list[str], at: int, draw: random.Random) -> None:
    lines[at] = _within(_NUMBER, lines[at], draw.choice(_NUMBERS), draw)


def _opcode(lines: list[str], at: int, draw: random.Random) -> None:
    lines[at] = _within(_OPCODE, lines[at], draw.choice(_OPCODES), draw)


def _attributes(lines: list[str], at: int, draw: random.Random) -> None:
    head, _, rest = lines[at].partition("), ")
    tail = draw.choice((rest, "", rest[: draw.randrange(len(rest) + 1)]))
    lines[at] = f"{head}), {draw.choice(_ATTRIBUTES)}{', ' if tail else ''}{tail}"


def _characters(lines: list[str], at: int, draw: random.Random) -> None:
    line, begin = lines[at], draw.randrange(len(lines[at]) + 1)
    end = min(len(line), begin + draw.choice((0, 1, 5)))
    lines[at] = (
        line[:begin]
        + draw.choice(("", "(", ")", "{", "}", "[", "]", ",", "=", '"', "%", "\x00", "é")) * draw.choice((1, 1, 99))
        + line[end:]
    )


def _unnamed(lines: list[str], at: int, draw: random.Random) -> None:
    for place in range(at, min(len(lines), at + 200)):
        lines[place] = re.sub(r", metadata=\{[^{}]*\}", "", lines[place])


_CHANGES = (
    _drop,
    _repeat,
    _swap,
    _operand,
    _operand,
    _number,
    _number,
    _opcode,
    _attributes,
    _attributes,
    _characters,
    _unnamed,
)


def answer(text: str, folder: Path, *, on: str, checked: bool = False) -> str:
    """Read a module as the verbs do: '' for an answer, 'refused' for one line, else what is wrong."""
    path = folder / "module.hlo"
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    try:
        if checked:
            check(path, on=on).to_json()
        else:
            explain_module(path, on=on).to_json()
    except (RooftopError, Infeasible) as error:
        return (
            "refused" if "\n" not in str(error) and len(str(error)) < 3200 else f"no short line: {str(error)[:200]!r}"
        )
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__}: {error} at {place.filename}:{place.lineno}"[:300]
    return ""


def real_module() -> str:
    """The module of the run that ``rooftop explain --demo`` shows, as the compiler wrote it."""
    with tarfile.open(demo._ARCHIVE) as archive:
        file = archive.extractfile("demo/profile/step.hlo.txt")
        assert file is not None
        return file.read().decode()


def small_modules(text: str, most: int = 400) -> Iterator[str]:
    """Parts of a module that are modules: each computation with those it calls, as an entry."""
    head, *blocks = re.split(r"\n\n(?=(?:ENTRY )?%)", text)
    first = head.partition("\n")[0]
    by_name = {match.group(1): block for block in blocks if (match := re.match(r"(?:ENTRY )?%([\w.\-]+)", block))}
    for name in by_name:
        needed, left = dict[str, None](), [name]
        while left:
            at = left.pop()
            if at in by_name and at not in needed:
                needed[at] = None
                left += [
                    called.lstrip("%")
                    for called in re.findall(r"(?:calls|to_apply|body|condition)=(%[\w.\-]+)", by_name[at])
                ]
        parts = [by_name[one] for one in by_name if one in needed and one != name]
        entry = by_name[name] if by_name[name].startswith("ENTRY") else f"ENTRY {by_name[name]}"
        module = "\n\n".join((re.sub(r", entry_computation_layout=.*", "", first), *parts, entry)) + "\n"
        if 5 < module.count("\n") < most:
            yield module


def _hung(number: int, frame: FrameType | None) -> None:
    raise TimeoutError("no answer")


def main() -> None:
    """Search for ``--seconds``, and print what fell over."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=30, help="seconds that one module may take")
    parser.add_argument("--keep", type=Path, default=None, help="a folder for what fell over")
    options: Any = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))
    faulthandler.enable()
    signal.signal(signal.SIGALRM, _hung)
    real = real_module()
    seeds = list(small_modules(real))
    counts, failures = Counter[str](), Counter[str]()
    start, number, slowest = time.monotonic(), options.seed, (0.0, 0)
    with tempfile.TemporaryDirectory() as folder:
        while time.monotonic() - start < options.seconds:
            number += 1
            draw = random.Random(number)
            source = real if draw.random() < 0.03 else draw.choice(seeds) if draw.random() < 0.7 else grammar(draw)
            text = mutated(source, draw)
            began = time.process_time()
            signal.setitimer(signal.ITIMER_REAL, options.limit)
            try:
                outcome = answer(text, Path(folder), on="v5e", checked=draw.random() < 0.3)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            slowest = max(slowest, (time.process_time() - began, number))
            counts[outcome if outcome in ("", "refused") else "fell over"] += 1
            if outcome not in ("", "refused"):
                key = re.sub(r"'[^']*'|\d+(?!\d*$)", "_", outcome)
                failures[key] += 1
                if failures[key] == 1:
                    print(f"seed {number}: {outcome}", flush=True)
                    if options.keep:
                        options.keep.mkdir(exist_ok=True)
                        (options.keep / f"{number}.hlo").write_text(text, encoding="utf-8", errors="surrogatepass")
    print(
        f"{sum(counts.values())} modules: {counts['']} answered, {counts['refused']} refused, "
        f"{counts['fell over']} fell over"
    )
    print(
        f"slowest {slowest[0]:.1f} s (seed {slowest[1]}), "
        f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10} MiB at most"
    )
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
