"""The collectives in which a compiled program can wait for other processes.

Runtimes do not say in which of its collectives a program hangs: XLA:CPU waits in silence for a peer of Gloo, XLA:GPU
and TPUs see only that a program has not ended. It is one of those that the program has over the processes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

import numpy as np
from jax.sharding import Mesh

from rooftop.compiler.collectives.logical import LogicalCollective, logical_collectives
from rooftop.compiler.hlo.text import parse
from rooftop.core.errors import RooftopError


def axes_over_processes(mesh: Mesh) -> tuple[str, ...]:
    """The axes along which the devices of a mesh belong to different processes; of one process all that have a size."""
    owners = np.vectorize(lambda device: device.process_index, otypes=[np.int64])(mesh.devices)
    if np.ptp(owners) == 0:
        return tuple(name for name, size in mesh.shape.items() if size > 1)
    return tuple(name for axis, name in enumerate(mesh.axis_names) if np.any(np.ptp(owners, axis=axis)))


def collectives_over(text: str, mesh: Mapping[str, int], across: Collection[str]) -> tuple[LogicalCollective, ...]:
    """Collectives of the compiled program ``text`` over any of the axes ``across``.

    ``mesh`` has the axes of the program and their sizes, in order. Raises RooftopError if the text cannot be read.
    """
    return tuple(one for one in logical_collectives(parse(text), mesh) if set(one.axes) & set(across))


def waiting_line(text: str, mesh: Mapping[str, int], across: Collection[str]) -> str:
    """The collectives of ``collectives_over`` in a line, by kind, axes and scope: the most frequent scope of each."""
    try:
        collectives = collectives_over(text, mesh, across)
    except RooftopError as error:
        return f"a program whose collectives cannot be read ({error})"
    if not collectives:
        return f"a program that has no collective over {', '.join(across)}"
    scopes = dict[tuple[str, str], Counter[str]]()
    for one in collectives:
        place = one.scope or one.source
        scopes.setdefault((one.kind, ", ".join(one.axes)), Counter())[place] += 1
    parts = list[str]()
    for (kind, axes), places in scopes.items():
        (place, _), count = places.most_common(1)[0], places.total()
        where = f" of {place}" if len(places) == 1 else f", most of {place}"
        parts.append(f"{count} {kind} over {axes}{where if place else ''}")
    if len(collectives) == 1:
        return f"its {parts[0].removeprefix('1 ')}"
    return f"one of its {len(collectives)} collectives over processes: {'; '.join(parts)}"
