"""Hand-made HLO modules: permutes, sums, loops, and the rings that they make."""

from __future__ import annotations

from collections.abc import Sequence

from rooftop.compiler.hlo import text as hlo

ROWS = 512
ARRAY = f"bf16[{ROWS},512]"
NBYTES = ROWS * 512 * 2.0


def module(body: Sequence[str], *computations: str, root: str = "") -> hlo.Module:
    """A scheduled module: instructions of the entry after the parameters x and w, both of ``ARRAY``."""
    return hlo.parse(module_text(body, *computations, root=root))


def module_text(body: Sequence[str], *computations: str, root: str = "") -> str:
    """The text of ``module``."""
    lines = [f"x = {ARRAY} parameter(0)", f"w = {ARRAY} parameter(1)", *body]
    text = "\n".join(f"  {'ROOT ' if line.startswith(f'{root} =') else ''}%{line}" for line in lines)
    entry = f"ENTRY %main (x: {ARRAY}, w: {ARRAY}) -> {ARRAY} {{\n{text}\n}}"
    return "HloModule test, is_scheduled=true\n\n" + "\n\n".join([*computations, entry]) + "\n"


def fused(name: str, parameters: Sequence[str], *lines: str) -> str:
    """A fused computation of parameters p0, p1, ... of the given types; the last line is its root."""
    inputs = [f"p{i} = {shape} parameter({i})" for i, shape in enumerate(parameters)]
    body = [f"  %{line}" for line in (*inputs, *lines[:-1])] + [f"  ROOT %{lines[-1]}"]
    signature = ", ".join(f"p{i}: {shape}" for i, shape in enumerate(parameters))
    return f"%{name} ({signature}) -> {ARRAY} {{\n" + "\n".join(body) + "\n}"


def pairs(shift: int, n: int, rows: int = 1) -> str:
    """source_target_pairs of a shift along the last axis of a mesh [rows, n]."""
    moved = [f"{{{row * n + i},{row * n + (i + shift) % n}}}" for row in range(rows) for i in range(n)]
    return f"source_target_pairs={{{','.join(moved)}}}"


def permute(name: str, operand: str, shift: int, n: int, shape: str = ARRAY, rows: int = 1) -> list[str]:
    """A permute as a start and a done."""
    return [
        f"{name}-start = ({shape}, {shape}, u32[], u32[]) collective-permute-start(%{operand}), channel_id=1, "
        f"{pairs(shift, n, rows)}",
        f"{name} = {shape} collective-permute-done(%{name}-start)",
    ]


def dot(name: str, left: str, right: str = "w", shape: str = ARRAY) -> str:
    """A matmul with XLA's estimate of its cycles."""
    return (
        f"{name} = {shape} dot(%{left}, %{right}), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}, "
        'backend_config={"window_config":{"estimated_cycles":"3000"}}'
    )


def named(line: str, scope: str) -> str:
    """An instruction of the forward pass in a scope."""
    return f'{line}, metadata={{op_name="jit(f)/jvp({scope})/op"}}'


def gather(n: int, up: int, down: int) -> list[str]:
    """x goes ``up`` hops one way and ``down`` the other; everything received is multiplied."""
    lines = [dot("own", "x")]
    for way, hops in ((1, up), (-1, down)):
        carried = "x"
        for hop in range(hops):
            name = f"{'up' if way > 0 else 'down'}{hop}"
            lines += [*permute(name, carried, way, n), dot(f"dot-{name}", name)]
            carried = name
    return lines


def scatter(n: int, way: int = 1, *, start: str = "", shape: str = ARRAY) -> list[str]:
    """A sum goes round and gets a dot on every device; from ``start``, or from the first dot."""
    lines = [dot("t0", "x", shape=shape)] if not start else []
    carried = start or "t0"
    for hop in range(1, n):
        lines += [
            *permute(f"r{hop}", carried, way, n, shape),
            dot(f"t{hop}", "x", shape=shape),
            f"s{hop} = {shape} fusion(%r{hop}, %t{hop}), kind=kLoop, calls=%plus",
        ]
        carried = f"s{hop}"
    return lines


#: The sum of two arrays, as a fused computation.
PLUS = fused("plus", [ARRAY, ARRAY], f"c = {ARRAY} convert(%p0)", f"sum = {ARRAY} add(%c, %p1)")

#: The tuple that a ``loop`` carries: counter, array, w.
CARRIED = f"(s32[], {ARRAY}, {ARRAY})"


def loop(name: str, trips: int, body: Sequence[str], result: str) -> list[str]:
    """Computations of a loop that carries (counter, array, w); ``body`` makes ``result`` of the array ``y``."""
    lines = [
        f"  %state = {CARRIED} parameter(0)",
        "  %i = s32[] get-tuple-element(%state), index=0",
        f"  %y = {ARRAY} get-tuple-element(%state), index=1",
        f"  %w = {ARRAY} get-tuple-element(%state), index=2",
        "  %one = s32[] constant(1)",
        "  %next = s32[] add(%i, %one)",
        *(f"  %{line}" for line in body),
        f"  ROOT %out = {CARRIED} tuple(%next, %{result}, %w)",
    ]
    condition = [
        f"  %state = {CARRIED} parameter(0)",
        "  %i = s32[] get-tuple-element(%state), index=0",
        f"  %end = s32[] constant({trips})",
        "  ROOT %on = pred[] compare(%i, %end), direction=LT",
    ]
    return [
        f"%{name}_body (state: {CARRIED}) -> {CARRIED} {{\n" + "\n".join(lines) + "\n}",
        f"%{name}_condition (state: {CARRIED}) -> pred[] {{\n" + "\n".join(condition) + "\n}",
    ]


def call(name: str, operand: str) -> list[str]:
    """Instructions that run a ``loop`` on ``operand``; its array is ``name``."""
    return [
        f"{name}-zero = s32[] constant(0)",
        f"{name}-in = {CARRIED} tuple(%{name}-zero, %{operand}, %w)",
        f"{name}-loop = {CARRIED} while(%{name}-in), condition=%{name}_condition, body=%{name}_body",
        f"{name} = {ARRAY} get-tuple-element(%{name}-loop), index=1",
    ]
