"""Borrowed tokens end by themselves."""

from __future__ import annotations

from duly.identity.accounts import Principal, Role
from duly.identity.temporary_tokens import LASTS, MOST, TemporaryTokens

ANN = Principal("ann", Role.APP)


def test_a_token_that_is_used_goes_on_and_one_that_is_not_ends() -> None:
    lent = TemporaryTokens()
    token, idle = lent.lend(ANN, 0), lent.lend(ANN, 0)
    now = 0
    for _ in range(5):
        now += LASTS - 1
        assert lent.owner(token, now) == ANN
    assert lent.owner(idle, now) is None
    assert lent.owner(token, now + LASTS) is None
    assert lent.owner(token, now) is None, "what has ended does not come back"


def test_a_clock_that_is_set_back_makes_no_token_last_longer() -> None:
    lent = TemporaryTokens()
    token = lent.lend(ANN, 10 * LASTS)
    assert lent.owner(token, 0) is None


def test_there_are_only_so_many_and_the_one_not_used_for_longest_goes() -> None:
    lent = TemporaryTokens()
    tokens = [lent.lend(ANN, 0) for _ in range(MOST)]
    assert lent.owner(tokens[0], 1) == ANN
    lent.lend(ANN, 1)
    assert (lent.owner(tokens[0], 1), lent.owner(tokens[1], 1)) == (ANN, None)
