"""Rates by name: bounded, fair, and not to be flushed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duly.core.rate_limits import Rate, RateLimits
from duly.core.units import SECOND
from duly.errors import Malformed


@pytest.mark.parametrize("wrong", [{"amount": 0}, {"amount": 1, "per": 0}, {"amount": 1, "burst": -1}])
def test_a_rate_that_makes_no_sense_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(Malformed):
        Rate(**wrong)


def test_a_refusal_says_how_long_to_wait_and_counts_nothing() -> None:
    limits = RateLimits(Rate(1, SECOND, burst=3))
    assert [limits.take("ann", 0) for _ in range(5)] == [0, 0, 0, SECOND, SECOND]
    assert limits.take("ann", SECOND - 1) == 1
    assert limits.take("ann", SECOND) == 0


def test_names_are_counted_each_for_itself() -> None:
    limits = RateLimits(Rate(1))
    assert limits.take("ann", 0) == 0
    assert limits.take("bob", 0) == 0
    assert limits.take("ann", 0) > 0


def test_a_flood_of_new_names_does_not_reset_a_limited_one() -> None:
    limits = RateLimits(Rate(1, 3600 * SECOND), remembered=100)
    assert limits.take("mallory", 0) == 0
    refused = sum(limits.take(f"name {n}", 1) > 0 for n in range(10_000))
    assert limits.take("mallory", 2) > 0
    assert refused == 10_000 - 100  # 99 of their own and one that the rest share
    assert len(limits) <= 101


def test_names_at_rest_make_room_for_others() -> None:
    limits = RateLimits(Rate(1), remembered=10)
    for second in range(1_000):
        assert all(limits.take(f"{second} {n}", second * 2 * SECOND) == 0 for n in range(10))
    assert len(limits) <= 11


def test_more_than_a_burst_counts_as_one_burst() -> None:
    limits = RateLimits(Rate(10))
    assert limits.take("ann", 0, 100) == 0
    assert limits.take("ann", 0) == SECOND // 10
    assert limits.take("bob", 0, 5) == 0
    assert limits.take("bob", 0, 100) == SECOND // 2


def test_what_was_done_beyond_the_rate_is_seen_at_every_look() -> None:
    limits = RateLimits(Rate(100))
    assert [limits.spend("flooder", second * SECOND, 300) for second in range(3)] == [
        2 * SECOND,
        4 * SECOND,
        6 * SECOND,
    ]
    assert [limits.spend("ann", second * SECOND, 90) for second in range(100)] == [0] * 100
    assert limits.spend("flooder", 3600 * SECOND, 1) == 0


def test_what_is_spent_is_forgiven_beyond_ten_bursts() -> None:
    limits = RateLimits(Rate(100))
    assert limits.spend("flooder", 0, 10**9) == 9 * SECOND


def test_a_clock_set_back_costs_no_more_than_a_burst() -> None:
    limits = RateLimits(Rate(10))
    for _ in range(10):
        limits.take("ann", 10**15)
    assert limits.take("ann", 0) <= SECOND


@given(st.integers(1, 50), st.integers(1, 50), st.lists(st.integers(0, SECOND), max_size=300))
def test_never_more_than_burst_and_rate(amount: int, burst: int, pauses: list[int]) -> None:
    rate = Rate(amount, SECOND, burst)
    limits, now, taken = RateLimits(rate), 0, 0
    for pause in pauses:
        now += pause
        wait = limits.take("ann", now)
        taken += wait == 0
        assert taken <= burst + now // rate.interval
        assert wait <= rate.span


def test_what_was_done_already_is_counted_also_beyond_the_rate() -> None:
    limits = RateLimits(Rate(1, SECOND, burst=3))
    assert limits.spend("ann", 0, 3) == 0
    assert limits.spend("ann", 0, 2) == 2 * SECOND
    assert limits.spend("ann", 4 * SECOND, 1) == 0


def test_asking_how_long_to_wait_counts_nothing() -> None:
    limits = RateLimits(Rate(1, SECOND, burst=1))
    assert limits.wait("ann", 0) == 0
    assert limits.take("ann", 0) == 0
    assert limits.wait("ann", 0) == limits.wait("ann", 0) == SECOND
    assert limits.wait("ann", SECOND) == 0


def test_a_new_name_shares_what_the_rest_have_when_there_is_no_room() -> None:
    limits = RateLimits(Rate(1, 3600 * SECOND), remembered=1)
    assert limits.take("ann", 0) == 0
    assert limits.spend("bob", 0, 1) == 0
    assert limits.wait("cid", 0) > 0
    limits.give_back("cid")
    assert limits.wait("cid", 0) == 0
    limits.give_back("ann")
    assert limits.take("ann", 0) == 0


def test_what_was_never_counted_cannot_be_given_back() -> None:
    limits = RateLimits(Rate(1, SECOND, burst=1))
    limits.give_back("ann")
    assert [limits.take("ann", 0) for _ in range(2)] == [0, SECOND]
