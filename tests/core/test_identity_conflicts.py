"""Two clients with one identity are told apart from one that comes back."""

from __future__ import annotations

from duly.core.identity_conflicts import CONFLICTS, IdentityConflicts
from duly.core.units import MINUTE, SECOND


def test_a_client_that_comes_back_now_and_then_is_no_conflict() -> None:
    conflicts = IdentityConflicts()
    assert not any(conflicts.note("lock", "two", minute * MINUTE) for minute in range(100))
    assert conflicts.present(99 * MINUTE) == []


def test_clients_that_take_turns_are_a_conflict_until_a_minute_after_the_last() -> None:
    conflicts = IdentityConflicts()
    noted = [conflicts.note("lock", "two", now * SECOND) for now in range(10)]
    assert noted == [False] * 3 + [True] * 7
    assert not conflicts.note("lamp", "two", 10 * SECOND), "each identity is counted for itself"
    assert conflicts.present(68 * SECOND) == ["two"]
    assert conflicts.present(70 * SECOND) == []


def test_a_flood_of_identities_is_bounded() -> None:
    conflicts = IdentityConflicts()
    for number in range(2 * CONFLICTS):
        for _ in range(4):
            conflicts.note(f"lock-{number}", str(number), number)
    shown = conflicts.present(SECOND)
    assert (len(shown), shown[-1]) == (CONFLICTS, str(2 * CONFLICTS - 1))
