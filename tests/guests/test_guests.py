"""Programs of other libraries, compiled as they are: ``make test-guests`` (docs/evidence/guests.md)."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from tests.guests.guests import GUESTS, Guest, measure

pytestmark = [
    pytest.mark.slow,
    pytest.mark.oracle,
    pytest.mark.skipif(find_spec("libtpu") is None, reason="the extra 'compile' is not installed"),
]


@pytest.mark.parametrize("guest", GUESTS, ids=lambda guest: guest.name)
def test_a_guest(guest: Guest) -> None:
    """FLOPs are those counted by hand, and nothing is compiled twice."""
    if guest.missing:
        pytest.skip(guest.missing)
    answer = measure(guest)
    if guest.repeated:
        assert guest.flops <= answer["flops"] <= guest.flops + guest.repeated
    else:
        assert answer["flops"] == pytest.approx(guest.flops, rel=1e-9)
    assert not [program for program in answer["programs"] if program["differs"]]
    assert 0 < answer["mfu"] < 1
