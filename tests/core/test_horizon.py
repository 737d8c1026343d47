from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duly.core.horizon import DEFAULT, Horizon, judge, remember_until
from duly.core.messages import Message, VerdictKind
from duly.core.units import DAY, FOREVER, HOUR, MINUTE, MS, SECOND
from duly.errors import Malformed

NOW = 1_700_000_000 * SECOND


def made(at: int, expires: int = 0) -> Message:
    return Message("app", f"{at // MS}_0", "k", "r", expires=expires)


def word(message: Message, horizon: Horizon = DEFAULT, now: int = NOW) -> VerdictKind | None:
    verdict = judge(message, horizon, now)
    return None if verdict is None else verdict.kind


def test_a_message_of_now_may_come_in() -> None:
    assert word(made(NOW)) is None


def test_older_than_the_horizon_is_stale() -> None:
    assert word(made(NOW - DAY + SECOND)) is None
    assert word(made(NOW - DAY)) is VerdictKind.STALE


def test_what_comes_first_may_have_to_be_younger_than_what_is_remembered() -> None:
    strict = Horizon(fresh=10 * MINUTE)
    assert word(made(NOW - 10 * MINUTE + SECOND), strict) is None
    assert word(made(NOW - 10 * MINUTE), strict) is VerdictKind.STALE
    assert remember_until(made(NOW), strict) > NOW + DAY


def test_further_ahead_than_the_skew_is_refused() -> None:
    assert word(made(NOW + 5 * MINUTE)) is None
    assert word(made(NOW + 5 * MINUTE + SECOND)) is VerdictKind.REFUSED


def test_an_expiry_governs_alone() -> None:
    """A task that waits for a sleeping node for a week is not stale on its second day."""
    assert word(made(NOW - 3 * DAY, expires=NOW + DAY)) is None
    assert word(made(NOW, expires=NOW)) is VerdictKind.EXPIRED


def test_grace_takes_what_has_just_expired() -> None:
    kind = Horizon(grace=10 * SECOND)
    assert word(made(NOW, expires=NOW - 9 * SECOND), kind) is None
    assert word(made(NOW, expires=NOW - 10 * SECOND), kind) is VerdictKind.EXPIRED


def test_what_says_neither_age_nor_expiry_is_kept_for_ever_or_refused() -> None:
    ageless = Message("app", "order-7", "k", "r")
    assert word(ageless) is None
    assert remember_until(ageless, DEFAULT) == FOREVER
    assert word(ageless, Horizon(ageless=False)) is VerdictKind.REFUSED


times = st.integers(0, 4 * DAY // MS).map(lambda ms: NOW - 2 * DAY + ms * MS)


@given(times, st.none() | times, st.integers(0, 4 * DAY))
def test_what_may_be_forgotten_can_never_come_in_again(at: int, expires: int | None, later: int) -> None:
    """The horizon rule itself: from `remember_until` on, no resend of the message is accepted."""
    message = made(at, expires or 0)
    horizon = Horizon(keep=HOUR, skew=MINUTE, grace=SECOND)
    now = remember_until(message, horizon) + later
    assert word(message, horizon, now) in (VerdictKind.STALE, VerdictKind.EXPIRED)


def test_settings_that_would_forget_too_early_are_refused_with_the_right_number() -> None:
    Horizon(keep=20 * MINUTE, skew=5 * MINUTE).covers(expiry=10 * MINUTE, retry_span=9 * SECOND)
    with pytest.raises(Malformed, match=r"at least 15\.2 min"):
        Horizon(keep=10 * MINUTE, skew=5 * MINUTE).covers(expiry=10 * MINUTE, retry_span=9 * SECOND)


@pytest.mark.parametrize("bad", [{"keep": 0}, {"keep": -1}, {"skew": -1}, {"grace": -1}, {"fresh": 2 * DAY}])
def test_a_nonsensical_horizon_cannot_be_made(bad: dict[str, Any]) -> None:
    with pytest.raises(Malformed):
        Horizon(**bad)


def test_where_an_expiry_governs_the_messages_own_time_decides_nothing() -> None:
    by_expiry = Horizon(lapse=HOUR)
    assert word(made(NOW + DAY, NOW + MINUTE), by_expiry) is None
    assert word(made(1 * SECOND, NOW + MINUTE), by_expiry) is None
    assert word(made(NOW, NOW - SECOND), by_expiry) is VerdictKind.EXPIRED
    assert word(made(NOW - DAY), by_expiry) is VerdictKind.STALE
    assert word(made(NOW + DAY), by_expiry) is VerdictKind.REFUSED


def test_where_an_expiry_governs_the_id_is_kept_a_lapse_longer_and_no_more() -> None:
    by_expiry = Horizon(lapse=HOUR, grace=SECOND)
    assert remember_until(made(NOW + DAY, NOW + MINUTE), by_expiry) == NOW + MINUTE + SECOND + HOUR
    with pytest.raises(Malformed, match="lapse"):
        Horizon(lapse=-1)
