"""Two clients with one identity are told apart from one that comes back."""

from __future__ import annotations

from duly.core.takeovers import CONFLICTS, Takeovers
from duly.core.units import MINUTE, SECOND


def test_a_client_that_comes_back_now_and_then_is_no_conflict() -> None:
    takeovers = Takeovers()
    assert not any(takeovers.note("lock", "two", minute * MINUTE) for minute in range(100))
    assert takeovers.conflicts(99 * MINUTE) == []


def test_clients_that_take_turns_are_a_conflict_until_a_minute_after_the_last() -> None:
    takeovers = Takeovers()
    noted = [takeovers.note("lock", "two", now * SECOND) for now in range(10)]
    assert noted == [False] * 3 + [True] * 7
    assert not takeovers.note("lamp", "two", 10 * SECOND), "each identity is counted for itself"
    assert takeovers.conflicts(68 * SECOND) == ["two"]
    assert takeovers.conflicts(70 * SECOND) == []


def test_a_flood_of_identities_is_bounded() -> None:
    takeovers = Takeovers()
    for number in range(2 * CONFLICTS):
        for _ in range(4):
            takeovers.note(f"lock-{number}", str(number), number)
    shown = takeovers.conflicts(SECOND)
    assert (len(shown), shown[-1]) == (CONFLICTS, str(2 * CONFLICTS - 1))
