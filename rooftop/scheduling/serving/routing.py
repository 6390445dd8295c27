"""Which replica gets a request: in turn, the least loaded, or the one that has its prefix in its cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rooftop.core.errors import RooftopError, unknown

ROUTING = ("round_robin", "least_loaded", "affinity")


@dataclass(frozen=True, kw_only=True)
class Routing:
    """Choice of a replica for each request.

    ``affinity`` sends a request where the longest prefix of its prompt is cached, unless that replica has more than
    ``imbalance`` times the average load, and one more: then, and where no one has a prefix of it, to the least loaded.
    """

    kind: str = "least_loaded"
    imbalance: float = 1.5

    def __post_init__(self) -> None:
        if self.kind not in ROUTING:
            raise unknown("routing", self.kind, ROUTING)
        if self.imbalance < 1:
            raise RooftopError("imbalance", self.imbalance, "1 or more: a multiple of the average load")

    def choose(self, number: int, loads: Sequence[int], matches: Sequence[int] = ()) -> int:
        """The replica for request ``number``, counted from 0.

        ``loads`` are the requests outstanding at each replica, ``matches`` the tokens of the prompt that each has
        cached (read with ``affinity`` only). Of equals the first after the last turn wins, so that ties rotate.
        """
        count = len(loads)
        turns = [(number + turn) % count for turn in range(count)]
        if self.kind == "round_robin":
            return turns[0]
        if self.kind == "affinity" and any(matches):
            best = max(turns, key=lambda replica: matches[replica])
            if matches[best] and loads[best] <= self.imbalance * sum(loads) / count + 1:
                return best
        return min(turns, key=lambda replica: loads[replica])
