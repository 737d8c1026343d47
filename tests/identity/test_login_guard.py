"""How often may somebody try: counted before it is judged, by account, network and both."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duly.core.rate_limits import Rate
from duly.core.units import MINUTE, SECOND
from duly.errors import TooManyLogins
from duly.identity.login_guard import LoginGuard, Rates


def tries(
    guard: LoginGuard, account: str, network: str, count: int, *, now: int = 0, known: bool = False
) -> int:
    """How many of so many tries may be made."""
    made = 0
    for _ in range(count):
        try:
            guard.begin(account, network, now, known=known)
        except TooManyLogins:
            continue
        made += 1
    return made


def test_a_pair_has_five_tries_and_then_one_a_minute() -> None:
    guard = LoginGuard()
    assert tries(guard, "ann", "a", 64) == 5
    assert tries(guard, "ann", "a", 64, now=MINUTE - 1) == 0
    assert tries(guard, "ann", "a", 64, now=MINUTE) == 1


def test_the_wait_is_told() -> None:
    guard = LoginGuard()
    tries(guard, "ann", "a", 5)
    with pytest.raises(TooManyLogins, match="in 60 s") as refused:
        guard.begin("ann", "a", 0)
    assert refused.value.wait == MINUTE


def test_a_try_that_succeeds_is_given_back_everywhere() -> None:
    guard = LoginGuard()
    for _ in range(100):
        guard.begin("ann", "a", 0)()
    assert tries(guard, "ann", "a", 64) == 5


def test_a_try_that_is_refused_counts_nowhere() -> None:
    guard = LoginGuard()
    tries(guard, "ann", "a", 1_000)
    assert tries(guard, "bob", "a", 5) == 5, "the network has tries left"


def test_all_strangers_together_have_few_tries_at_one_account() -> None:
    guard = LoginGuard()
    assert sum(tries(guard, "ann", f"n{n}", 5) for n in range(1_000)) == 10
    assert sum(tries(guard, "ann", f"n{n}", 5, now=MINUTE) for n in range(1_000)) == 2


def test_one_network_has_few_tries_at_all_accounts() -> None:
    guard = LoginGuard()
    assert sum(tries(guard, f"u{n}", "a", 5) for n in range(1_000)) == 20


def test_who_was_here_before_is_counted_for_themselves() -> None:
    guard = LoginGuard()
    for n in range(1_000):
        tries(guard, "ann", f"n{n}", 5)
        tries(guard, f"u{n}", "home", 5)
    assert tries(guard, "ann", "home", 64) == 0
    assert tries(guard, "ann", "home", 64, known=True) == 5


@pytest.mark.parametrize("flood", [10_100, 60_000])
def test_a_flood_of_addresses_forgets_no_pair_that_waits(flood: int) -> None:
    guard = LoginGuard()
    assert tries(guard, "ann", "a", 64) == 5
    for n in range(flood):
        tries(guard, f"u{n}", f"n{n}", 1)
    assert tries(guard, "ann", "a", 64) == 0
    assert len(guard._pairs) <= 50_001


def test_known_pairs_are_remembered_up_to_a_number() -> None:
    guard = LoginGuard(remembered=2)
    for name in ("ann", "bob", "ann", "cid"):
        guard.learn(name, "home")
    assert [guard.knows(name, "home") for name in ("ann", "bob", "cid")] == [True, False, True]
    assert not guard.knows("ann", "remote")


def test_a_network_with_many_wrong_tokens_waits_and_has_few_lookups() -> None:
    guard = LoginGuard()
    assert all(guard.begin_lookup("a", 0) is not None for _ in range(1_000)), "nothing was wrong yet"
    waits = [guard.wrong_token("a", 0) for _ in range(11)]
    assert waits == [0] * 10 + [3 * SECOND]
    lookups = [guard.begin_lookup("a", 0) for _ in range(100)]
    assert sum(look is not None for look in lookups) == 20
    for look in lookups:
        if look is not None:
            look()
    assert guard.begin_lookup("a", 0) is not None, "a lookup that finds an account is given back"
    assert guard.begin_lookup("b", 0) is not None


@given(st.text(), st.text())
def test_whatever_strangers_call_themselves_is_counted(account: str, network: str) -> None:
    assert tries(LoginGuard(Rates(pair=Rate(1, SECOND))), account, network, 3) == 1
