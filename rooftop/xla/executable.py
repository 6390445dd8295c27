"""Executables in files: compiled here, loaded where the devices are.

A file begins with one line of JSON (what was compiled, by which versions); a pickle of JAX's follows, so that it should
come from someone who may run programs here anyway.
"""

from __future__ import annotations

import importlib.metadata
import json
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.experimental import serialize_executable

from rooftop import __version__
from rooftop.errors import RooftopError
from rooftop.xla.compiling import Request

_KIND = "rooftop executable"


def pack(compiled: jax.stages.Compiled, request: Request, versions: Mapping[str, str]) -> bytes:
    """The bytes of a file that ``load`` reads."""
    header = {"kind": _KIND, "rooftop_version": __version__, "versions": dict(versions), "request": request.to_json()}
    return json.dumps(header).encode() + b"\n" + pickle.dumps(serialize_executable.serialize(compiled))


def header(data: bytes) -> dict[str, Any]:
    """The first line: ``versions`` of jax, jaxlib and libtpu, the ``request``. Raises RooftopError for other files."""
    try:
        found: dict[str, Any] = json.loads(data.partition(b"\n")[0])
        if found["kind"] == _KIND:
            return found
    except (ValueError, KeyError, TypeError):
        pass
    raise RooftopError("executable", f"{len(data)} bytes", "a file that rooftop compile --save has written")


def load(data: bytes, devices: Sequence[jax.Device] | None = None) -> jax.stages.Compiled:
    """The executable, on as many ``devices`` as it was compiled for (all that JAX has, unless given).

    Raises RooftopError unless the versions here are those that compiled it: XLA promises nothing between them.
    """
    compiled_by = header(data)["versions"]
    here = {name: importlib.metadata.version(name) for name in compiled_by}
    if here != compiled_by:
        needed, found = (", ".join(f"{name} {number}" for name, number in each.items()) for each in (compiled_by, here))
        raise RooftopError("executable", found, f"the versions that compiled it: {needed}")
    serialized, arguments, results = pickle.loads(data.partition(b"\n")[2])
    loaded: jax.stages.Compiled = serialize_executable.deserialize_and_load(
        serialized, arguments, results, execution_devices=devices
    )
    return loaded
