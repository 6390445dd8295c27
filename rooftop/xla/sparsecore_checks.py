"""Checks that XLA builds into SparseCore programs, and whether the libtpu that is installed knows them.

A flag that libtpu does not know ends its process. So each is tried first on a small program, in a process of its own.
Source: the SparseCore deep dive, section 12.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable, Mapping
from importlib.util import find_spec

from rooftop.arrays import Mesh
from rooftop.errors import Infeasible, RooftopError, unknown
from rooftop.hardware import Chip, Slice
from rooftop.models.tables import Feature, Table, Tables
from rooftop.models.tables_limits import StackLimits, full_buffer
from rooftop.plan.embed_problem import per_device
from rooftop.xla.compiling import Progress, Request, compile_ahead_of_time

Options = Mapping[str, bool | int | str]

#: Check -> compiler options. ``nan``: NaNs in what SparseCores read and write; ``bounds``: accesses outside a buffer
#: (strided ones may be false alarms); ``buffers``: buffers that others have changed, launches that do not belong
#: together. All cost time: they are for looking for a fault.
CHECKS: Mapping[str, Options] = {
    "nan": {"xla_sc_detect_nan": "true"},
    "bounds": {"xla_sc_assert_level": "bounds"},
    "buffers": {
        "xla_tpu_buffer_contents_sanitizer_config": (
            "cores_to_sanitize: [TC, SC_SCS, SC_TILE], sanitizer_mode: LOCAL_ONLY"
        ),
        "xla_tpu_verify_launch_id_across_cores": "true",
    },
}

PROGRAM = "rooftop.programs.embedding_lowering:lower_part"


def parse_checks(text: str | None) -> tuple[str, ...]:
    """Names of CHECKS from 'nan,bounds'. Raises RooftopError for another."""
    names = tuple(dict.fromkeys(name.strip() for name in (text or "").split(",") if name.strip()))
    for name in names:
        if name not in CHECKS:
            raise unknown("check", name, CHECKS)
    return names


def check_options(names: Iterable[str]) -> dict[str, bool | int | str]:
    """The compiler options of all these checks."""
    return {option: value for name in names for option, value in CHECKS[name].items()}


def smallest_slice(chip: Chip) -> Slice:
    """A host's chips of a kind that has SparseCores: what programs are tried for."""
    return Slice.parse(f"{chip.name}:{'2x2' if chip.name == 'v6e' else '2x2x1'}")


def require_checks(
    names: Iterable[str],
    slice_: Slice,
    *,
    timeout_s: float | None = None,
    cache: bool = True,
    on_progress: Progress | None = None,
) -> None:
    """Try each check on a small lookup for ``slice_``. Raises RooftopError where the compiler does not take it."""
    for name in names:
        try:
            compile_ahead_of_time(
                _small(slice_, CHECKS[name]), timeout_s=timeout_s, cache=cache, on_progress=on_progress
            )
        except (RooftopError, Infeasible) as error:
            if isinstance(error, RooftopError) and error.field == "timeout_s":
                raise
            version = importlib.metadata.version("libtpu") if find_spec("libtpu") else "not installed"
            reason = " ".join(str(error).split())[-200:]
            accepted = f"a check that libtpu {version} knows, which does not take {', '.join(CHECKS[name])} ({reason})"
            raise RooftopError("check", name, accepted) from None


def _small(slice_: Slice, options: Options) -> Request:
    own = per_device(slice_)
    cores = own * slice_.devices
    tables = Tables(tables=(Table(name="t", vocabulary=8 * cores, width=8),), features=(Feature(name="f", table="t"),))
    limits = StackLimits(max_ids=8, max_unique_ids=8, buffer=full_buffer(8, cores))
    return Request(
        mesh=Mesh.lay(slice_, {"data": slice_.devices}),
        program=PROGRAM,
        arguments={
            "tables": tables.to_json(),
            "cores_per_device": own,
            "batch": 8 * cores,
            "limits": {"t": vars(limits)},
            "part": "lookup",
            "kernel": "sparsecore",
        },
        options=options,
    )
