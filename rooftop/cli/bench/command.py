"""``rooftop bench``: measurements; each kind is a subcommand."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rooftop.cli.bench.serve import command as serve
from rooftop.cli.output import emit_json, json_option, progress_bar, show
from rooftop.cli.usage import VerbGroup

if TYPE_CHECKING:
    from rooftop.algebra.pricing import Prices


@click.group(name="bench", cls=VerbGroup)
def command() -> None:
    """Measure: collectives on the devices that are here, a server under load."""


command.add_command(serve)


@command.command(name="collectives")
@click.option(
    "--mesh", metavar="AXES", help="Mesh axes and their sizes: X=2,Y=4. One axis X of all devices by default."
)
@click.option("--axis", metavar="AXES", help="The axes that collectives run over: X or X,Y. All by default.")
@click.option("--kinds", metavar="KINDS", help="Some of all_gather, reduce_scatter, all_reduce, all_to_all, permute.")
@click.option("--sizes", default="64Ki,1Mi,16Mi", show_default=True, metavar="BYTES", help="Payloads, as a list.")
@click.option("--dtype", default="bf16", show_default=True, metavar="DTYPE", help="Dtype of the elements.")
@click.option("--on", "slice_", metavar="SLICE", help="Also what is planned for this slice: CHIP:SHAPE[@SLICES].")
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="Write the JSON object here.")
@json_option
def collectives(as_json: bool, output: Path | None, **options: Any) -> int:
    """Time collectives over the axes of a mesh, for several sizes.

    A size is the payload of one device: the output of an all_gather, the input of a reduce_scatter, the operand of an
    all_reduce or all_to_all, what a permute sends to its neighbour. Groups along the other axes run at the same time.

    \b
    Examples: rooftop bench collectives
              rooftop bench collectives --mesh X=2,Y=4 --axis Y --kinds all_gather --sizes 1Mi,64Mi --on v5e:2x4
    """
    from rooftop.core.files import write_text

    with progress_bar(shown=not as_json) as on_progress:
        data = _collectives(**options, on_progress=on_progress)
    if output is not None:
        write_text(output, json.dumps(data, indent=1, allow_nan=False) + "\n")
    if as_json:
        emit_json(data)
    else:
        show(data, {"report": output}, kind="bench collectives")
    return 0


def _collectives(
    *,
    mesh: str | None,
    axis: str | None,
    kinds: str | None,
    sizes: str,
    dtype: str,
    slice_: str | None,
    on_progress: Callable[[int, int, str], None] | None,
) -> dict[str, Any]:
    """The answer as JSON values. Raises RooftopError naming the option that is wrong."""
    from rooftop.arrays import parse_axes
    from rooftop.cli.process import prefer_cpus, uninterrupted
    from rooftop.core.errors import unknown
    from rooftop.core.ledger import COLLECTIVES
    from rooftop.core.quantities import dtype_bytes, parse_quantity

    # Everything that can be wrong is found before JAX starts.
    payloads = [parse_quantity(size, "sizes") for size in sizes.split(",")]
    names = _list(kinds) or list(COLLECTIVES)
    for name in names:
        if name not in COLLECTIVES:
            raise unknown("kinds", name, COLLECTIVES)
    dtype_bytes(dtype)
    shape = None if mesh is None else parse_axes(mesh, None)
    if shape is not None:
        _require_axes(_list(axis) or list(shape), shape)
        _prices(slice_, shape)

    prefer_cpus()
    with uninterrupted():
        from rooftop.profile.microbench.collectives import measure
    from rooftop.profile.microbench.timing import device_mesh, devices, empty_call, provenance

    shape = shape or {"X": len(devices())}
    axes = _list(axis) or list(shape)
    _require_axes(axes, shape)
    prices = _prices(slice_, shape)
    used = device_mesh(shape)
    written = {
        "--mesh": ",".join(f"{name}={size}" for name, size in shape.items()),
        "--axis": ",".join(axes),
        "--kinds": ",".join(names),
        "--sizes": sizes,
        "--dtype": dtype,
        **({} if slice_ is None else {"--on": slice_}),
    }
    run = shlex.join(["rooftop", "bench", "collectives", *(word for option in written.items() for word in option)])
    found = list(measure(names, axes, payloads, dtype, used, prices=prices, on_progress=on_progress))
    return {
        "kind": "collectives",
        "mesh": {"axes": shape},
        "axes": axes,
        "dtype": dtype,
        "slice": prices[0].mesh.slice.name if prices else None,
        "measured": {"command": run}
        | provenance(list(used.devices.flat))
        | {"empty_call_s": empty_call(used).median_s, "collectives": [each.to_json() for each in found]},
    }


def _list(text: str | None) -> list[str]:
    return [] if text is None else [word.strip() for word in text.split(",")]


def _require_axes(axes: list[str], shape: dict[str, int]) -> None:
    from rooftop.core.errors import RooftopError, unknown

    for axis in axes:
        if axis not in shape:
            raise unknown("axis", axis, shape)
    if len(set(axes)) < len(axes):
        raise RooftopError("axis", ",".join(axes), "each axis once")
    if all(shape[axis] == 1 for axis in axes):
        given = ",".join(f"{axis}={shape[axis]}" for axis in axes)
        accepted = "two devices or more: one alone sends nothing (JAX_PLATFORMS=cpu emulates eight)"
        raise RooftopError("axis", given, accepted)


def _prices(slice_: str | None, shape: dict[str, int]) -> list[Prices]:
    """The prices that a slice has a plan by; none without a slice."""
    if slice_ is None:
        return []
    from rooftop.algebra.pricing import Prices
    from rooftop.arrays import Mesh
    from rooftop.hardware import Slice

    laid = Mesh.lay(Slice.parse(slice_), shape)
    return [Prices(mesh=laid, dims={}, kind=kind) for kind in ("bound", "expected")]
