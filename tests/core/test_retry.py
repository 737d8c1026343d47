"""When to try again is one value, bounded and repeatable."""

from __future__ import annotations

from math import inf, nan
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duly.core.retry import COMMAND, DELIVERY, RetryPolicy
from duly.core.units import FOREVER, HOUR, SECOND
from duly.errors import Malformed, ProgramError


@st.composite
def policies(draw: st.DrawFn) -> RetryPolicy:
    first = draw(st.integers(1, 10**9))
    return RetryPolicy(
        first=first,
        factor=draw(st.one_of(st.just(1.0), st.floats(1.05, 10))),
        cap=first + draw(st.integers(0, 10**12)),
        tries=draw(st.one_of(st.none(), st.integers(1, 60))),
        jitter=draw(st.floats(0, 1)),
    )


def test_a_command_goes_out_four_times_three_seconds_apart() -> None:
    assert [COMMAND.delay(attempt, b"id") for attempt in (1, 2, 3, 4, 5)] == [3 * SECOND] * 3 + [None] * 2
    assert COMMAND.tries == 4
    assert COMMAND.span() == 9 * SECOND


def test_a_delivery_is_tried_ever_more_slowly_up_to_once_an_hour_until_it_expires() -> None:
    delays = [DELIVERY.delay(attempt, b"id") or 0 for attempt in range(1, 40)]
    for attempt, delay in enumerate(delays):
        longest = min(HOUR, 5 * SECOND * 2**attempt)
        assert 0.8 * longest <= delay <= longest
    assert DELIVERY.span() is None


def test_never_is_one_try() -> None:
    assert RetryPolicy.never().delay(1, b"id") is None
    assert RetryPolicy.never().span() == 0


@given(policies(), st.integers(1, 100), st.binary(max_size=20))
def test_a_delay_keeps_its_bounds(policy: RetryPolicy, attempt: int, salt: bytes) -> None:
    delay = policy.delay(attempt, salt)
    if policy.tries is not None and attempt >= policy.tries:
        assert delay is None
    else:
        assert delay is not None
        assert int(policy.first * (1 - policy.jitter)) <= delay <= policy.cap


@given(policies(), st.binary(max_size=20))
def test_the_span_is_the_longest_time_from_first_to_last_try(policy: RetryPolicy, salt: bytes) -> None:
    span = policy.span()
    if policy.tries is None:
        assert span is None
        return
    steady = RetryPolicy(policy.first, policy.factor, policy.cap, policy.tries, jitter=0)
    attempts = range(1, policy.tries)
    assert span == sum(steady.delay(attempt, salt) or 0 for attempt in attempts)
    assert span >= sum(policy.delay(attempt, salt) or 0 for attempt in attempts)


@given(policies(), st.integers(1, 100))
def test_without_jitter_delays_never_shrink(policy: RetryPolicy, attempt: int) -> None:
    steady = RetryPolicy(policy.first, policy.factor, policy.cap, None, jitter=0)
    assert (steady.delay(attempt, b"") or 0) <= (steady.delay(attempt + 1, b"") or 0)


@pytest.mark.parametrize("attempt", [1_000, 10**6, 2**63, 10**400])
def test_any_number_of_attempts_is_just_the_cap(attempt: int) -> None:
    policy = RetryPolicy.exponential(SECOND, HOUR, jitter=0)
    assert policy.delay(attempt, b"id") == HOUR
    assert RetryPolicy.exponential(SECOND, FOREVER, factor=1e300).delay(attempt, b"id") is not None


def test_a_billion_tries_have_a_span_at_once() -> None:
    policy = RetryPolicy.exponential(SECOND, 4 * SECOND, tries=10**9)
    assert policy.span() == 3 * SECOND + (10**9 - 3) * 4 * SECOND
    assert RetryPolicy.fixed(SECOND, tries=10**9).span() == (10**9 - 1) * SECOND


def test_the_same_message_waits_the_same_in_every_run() -> None:
    assert DELIVERY.delay(3, b"id") == DELIVERY.delay(3, b"id")
    # Written down: a change of the hash would change every recorded run.
    assert RetryPolicy.exponential(10**6, 10**9, jitter=1).delay(1, b"salt") == 334556


def test_messages_that_failed_together_spread_out() -> None:
    delays = sorted(DELIVERY.delay(1, b"%d" % n) or 0 for n in range(1000))
    assert len(set(delays)) > 990
    tenth = SECOND // 10
    for low in range(4 * SECOND, 5 * SECOND, tenth):
        assert 60 < sum(low <= delay < low + tenth for delay in delays) < 140


def test_each_attempt_of_a_message_is_drawn_anew() -> None:
    policy = RetryPolicy.exponential(10**9, 10**9, factor=1, jitter=1)
    assert len({policy.delay(attempt, b"id") for attempt in range(1, 100)}) == 99


@pytest.mark.parametrize(
    "wrong",
    [
        {"first": 0},
        {"first": -1},
        {"first": HOUR + 1},
        {"cap": FOREVER + 1},
        {"factor": 0.5},
        {"factor": nan},
        {"factor": inf},
        {"tries": 0},
        {"tries": -1},
        {"jitter": -0.1},
        {"jitter": 1.1},
        {"jitter": nan},
    ],
    ids=str,
)
def test_a_policy_that_makes_no_sense_cannot_be_made(wrong: dict[str, Any]) -> None:
    right: dict[str, Any] = {"first": SECOND, "factor": 2.0, "cap": HOUR, "tries": 3, "jitter": 0.2}
    RetryPolicy(**right)
    with pytest.raises(Malformed):
        RetryPolicy(**{**right, **wrong})


@pytest.mark.parametrize("attempt", [0, -1])
def test_tries_are_counted_from_one(attempt: int) -> None:
    with pytest.raises(ProgramError):
        COMMAND.delay(attempt, b"id")
