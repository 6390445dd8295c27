"""Number of examples that hypothesis tries: all of them in `make test-all`, few in `make test`."""

from __future__ import annotations

from hypothesis import settings

#: Examples of a property in `make test`.
QUICK = 10


def examples(most: int, *, quick: int = QUICK) -> int:
    """Return ``most`` in `make test-all`, at most ``quick`` in `make test`."""
    return most if settings.get_current_profile_name() == "all" else min(most, quick)
