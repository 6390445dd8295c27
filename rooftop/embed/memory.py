"""Whether this machine has the memory in which the tables of a run begin."""

from __future__ import annotations

import os

from rooftop.errors import Infeasible
from rooftop.models.tables_stacking import Stacking, report
from rooftop.quantities import format_bytes


def require_memory(stacking: Stacking, *, batch: int, on_host: bool) -> None:
    """Raises Infeasible where tables and slots cannot lie in this machine's memory.

    Tables that begin on the host are there twice, by themselves and stacked; ``on_host`` says whether what begins on
    the devices lies in the host's memory too. Without it the system would end the process.
    """
    begun_here = stacking.tables.config.initialized_on_host
    if not (begun_here or on_host):
        return
    copies = 2 if begun_here else 1
    needed = sum(copies * one.table_bytes + one.slot_bytes for one in report(stacking, batch=batch))
    room = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > room:
        what = f"tables and slots take at least {format_bytes(needed)} of this machine's memory"
        raise Infeasible(what, f"it has {format_bytes(room)}")
