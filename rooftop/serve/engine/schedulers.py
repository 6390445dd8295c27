"""The scheduler of a replica, of its groups of devices together where there are several, and their rows in a step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rooftop.scheduling.serving.cache import CachedSequence as Held
from rooftop.scheduling.serving.groups import AnyScheduler, make_scheduler
from rooftop.serve.engine.configuration import Configuration
from rooftop.serve.engine.replica import Replica
from rooftop.serve.engine.running import check_pages

__all__ = ["AnyScheduler", "check_scheduler", "rows_of", "scheduler_of"]


def scheduler_of(configuration: Configuration, replica: Replica, role: str) -> AnyScheduler:
    """One that knows of no request, over a cache that holds nothing."""
    groups = replica.decoder.groups.ways
    # The last page of each group takes what is written for padding. A pool may be there for more than is asked for.
    pages_per_group = (replica.pages + 1) // groups
    pages = (
        pages_per_group - 1
        if configuration.pages is None
        else min(pages_per_group - 1, max(1, configuration.pages // groups))
    )
    return make_scheduler(
        configuration.own_policy,
        role,
        groups=groups,
        page_tokens=configuration.page_tokens,
        pages=pages,
        host_pages=configuration.host_pages // groups,
        prefixes=configuration.prefix_cache,
        padding=pages_per_group - pages,
    )


def check_scheduler(scheduler: AnyScheduler, sequences: Iterable[Held]) -> None:
    """Raises AssertionError if a page is lost: see ``check_pages``. ``sequences`` are all that are here."""
    sending = {} if scheduler.role == "generate" else scheduler.to_send
    # A sequence that is being sent has pages at both servers; its own are those where it goes.
    here = [sequence for sequence in sequences if sequence not in sending]
    for number, group in enumerate(scheduler.groups):
        away = {} if scheduler.role == "generate" else group.to_send
        check_pages(group.cache, [item for item in here if item.group == number], away.values())


def rows_of(groups: Sequence[int], rows: int, ways: int) -> list[int]:
    """In which of the ``rows`` of a program each sequence is, by its group; -1 for those of whom there are too many.

    Of ``ways`` groups each has an equal block of rows, if they divide; else any row will do.
    """
    blocks = ways if rows % ways == 0 else 1
    size, taken = rows // blocks, [0] * blocks
    rows_of = list[int]()
    for group in groups:
        block = group % blocks
        rows_of.append(block * size + taken[block] if taken[block] < size else -1)
        taken[block] += 1
    return rows_of
