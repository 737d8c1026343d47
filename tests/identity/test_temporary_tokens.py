"""Temporary tokens end by themselves."""

from __future__ import annotations

from duly.identity.accounts import Principal, Role
from duly.identity.temporary_tokens import LASTS, MOST, TemporaryTokens

ANN = Principal("ann", Role.APP)


def test_a_token_that_is_used_goes_on_and_one_that_is_not_ends() -> None:
    tokens_of_hub = TemporaryTokens()
    token, idle = tokens_of_hub.issue(ANN, 0), tokens_of_hub.issue(ANN, 0)
    now = 0
    for _ in range(5):
        now += LASTS - 1
        assert tokens_of_hub.owner(token, now) == ANN
    assert tokens_of_hub.owner(idle, now) is None
    assert tokens_of_hub.owner(token, now + LASTS) is None
    assert tokens_of_hub.owner(token, now) is None, "what has ended does not come back"


def test_a_clock_that_is_set_back_makes_no_token_last_longer() -> None:
    tokens_of_hub = TemporaryTokens()
    token = tokens_of_hub.issue(ANN, 10 * LASTS)
    assert tokens_of_hub.owner(token, 0) is None


def test_there_are_only_so_many_and_the_one_not_used_for_longest_goes() -> None:
    tokens_of_hub = TemporaryTokens()
    tokens = [tokens_of_hub.issue(ANN, 0) for _ in range(MOST)]
    assert tokens_of_hub.owner(tokens[0], 1) == ANN
    tokens_of_hub.issue(ANN, 1)
    assert (tokens_of_hub.owner(tokens[0], 1), tokens_of_hub.owner(tokens[1], 1)) == (ANN, None)
