"""Transmissions, as a specification: when the timer of a message under way is due."""

from __future__ import annotations

from duly.core.lifecycle import State
from duly.core.messages import Message
from duly.core.outbox import OutboxPolicy
from duly.core.retry import RetryPolicy
from duly.core.transmissions import Transmission, Transmissions
from duly.core.units import FOREVER, SECOND

T = 1_700_000_000 * SECOND
OVER_THE_NETWORK = OutboxPolicy("device", RetryPolicy.fixed(3 * SECOND, tries=3), patience=10 * SECOND)


def message(n: int = 0, expires: int = 0) -> Message:
    return Message("app", f"{T // 1_000}_{n}", "lock_control", "lock", b"{}", expires=expires)


def transmissions(*, once: bool = False, patience: int = 0) -> Transmissions:
    return Transmissions(OVER_THE_NETWORK, lambda _: once, lambda _: patience)


def transmit(under_way: Transmissions, what: Message) -> Transmission:
    one = under_way.begin(what, 1, -1, T)
    one.tries += 1
    under_way.repeat_later(one, T)
    return one


def test_a_message_is_due_when_it_is_sent_again() -> None:
    under_way = transmissions()
    one = transmit(under_way, message())
    assert under_way.next_wake() == T + 3 * SECOND
    assert list(under_way.due(T + 3 * SECOND)) == [one]
    assert not under_way.has_no_more_tries(one)


def test_it_is_due_earlier_if_it_expires_before() -> None:
    under_way = transmissions()
    transmit(under_way, message(expires=T + SECOND))
    assert under_way.next_wake() == T + SECOND


def test_what_says_itself_how_long_it_may_take_is_not_ended_by_its_expiry() -> None:
    under_way = transmissions(patience=60 * SECOND)
    one = transmit(under_way, message(expires=T + SECOND))
    assert (under_way.next_wake(), under_way.deadline(one)) == (T + 60 * SECOND, T + 60 * SECOND)


def test_a_recipient_without_a_memory_is_sent_nothing_twice() -> None:
    under_way = transmissions(once=True)
    one = transmit(under_way, message())
    assert under_way.has_no_more_tries(one)
    assert under_way.next_try(message(), 1, T) == FOREVER, "no other worker takes it up either"


def test_the_last_try_is_the_last() -> None:
    under_way = transmissions()
    one = transmit(under_way, message())
    one.tries = 3
    assert under_way.has_no_more_tries(one)


def test_it_says_what_is_under_way() -> None:
    under_way = transmissions()
    one = transmit(under_way, message())
    assert (under_way.message(message().key), under_way.state(message().key)) == (message(), State.SENT)
    one.received = True
    assert under_way.state(message().key) is State.DELIVERED
    assert (under_way.to("lock"), under_way.to(""), under_way.to("lamp")) == ([one], [one], [])
    under_way.remove(message().key)
    assert (len(under_way), under_way.next_wake()) == (0, None)


def test_timers_go_on_when_the_wall_clock_is_set() -> None:
    under_way = transmissions()
    one = transmit(under_way, message())
    under_way.shift(3600 * SECOND)
    assert under_way.next_wake() == T + 3603 * SECOND
    assert (one.next_try, one.give_up) == (T + 3603 * SECOND, T + 3610 * SECOND)
