"""Room for another program: each kernel that is compiled for a CPU takes three of a process's mappings of memory."""

from __future__ import annotations

from pathlib import Path

from rooftop.errors import Infeasible

#: How many Linux lets a process have, and those of this one.
MOST, OWN = Path("/proc/sys/vm/max_map_count"), Path("/proc/self/maps")
#: The part of them beyond which nothing more is compiled: a process that is given none crashes, wherever it stands.
_SHARE = 0.9


def require_mappings() -> None:
    """Raises Infeasible where this process has nearly all the mappings of memory that it may have."""
    try:
        most = int(MOST.read_text())
        with OWN.open("rb") as lines:
            own = sum(1 for _ in lines)
    except (OSError, ValueError):
        return
    if own > _SHARE * most:
        raise Infeasible(
            f"{own:,} mappings of memory for compiled programs",
            f"nearly the {most:,} that Linux lets a process have; ask for fewer copies or shorter contexts, or raise "
            "vm.max_map_count (sysctl)",
        )
