"""The way to one recipient, as a specification."""

from __future__ import annotations

import pytest

from duly.core.fanout import recipient_queue
from duly.core.fanout.recipient_queue import MOST_IN_A_BATCH, QueuedDelivery, RecipientPolicy, RecipientQueue
from duly.core.messages import Message
from duly.core.operations import DeliveryRef
from duly.core.units import HOUR, MINUTE, SECOND
from duly.errors import Malformed

NOW = 1_700_000_000 * SECOND


def item(n: int, *, due: int = NOW, episode: str = "", attempt: int = 0) -> QueuedDelivery:
    message = Message("gate", f"event-{n}", "alert_event", "home", b"{}", NOW)
    made = QueuedDelivery(DeliveryRef(message.key, "alert", "mail"), message, due, 0, episode)
    made.attempt = attempt
    return made


def sizes(batches: list[list[QueuedDelivery]]) -> list[int]:
    return [len(batch) for batch in batches]


def test_what_is_due_goes_out_one_by_one_as_long_as_that_is_not_too_much() -> None:
    route = RecipientQueue(RecipientPolicy(most=5))
    for n in range(3):
        route.add(item(n))
    route.add(item(9, due=NOW + SECOND))
    assert route.next_wake() == NOW
    assert sizes(route.collect(NOW)) == [1, 1, 1]
    assert route.next_wake() == NOW + SECOND


def test_of_ten_thousand_all_go_out_and_in_a_few_batches() -> None:
    route = RecipientQueue(RecipientPolicy(most=5))
    for n in range(10_000):
        route.add(item(n))
    sent: list[int] = []
    now = NOW
    while (wake := route.next_wake()) is not None:
        now = max(now, wake)
        for batch in route.collect(now):
            sent.append(len(batch))
            route.arrived()
    assert sum(sent) == 10_000
    assert max(sent) == MOST_IN_A_BATCH
    assert len(sent) == 2
    assert now == NOW


def test_what_is_more_than_the_minute_allows_goes_as_one() -> None:
    route = RecipientQueue(RecipientPolicy(most=3))
    for n in range(10):
        route.add(item(n))
    assert sizes(route.collect(NOW)) == [10]
    for n in (11, 12):
        assert route.admits(item(n), NOW)
    route.add(item(13))
    assert route.collect(NOW + SECOND) == []
    assert route.next_wake() == NOW + MINUTE
    for _ in range(3):
        route.arrived()
    assert sizes(route.collect(NOW + MINUTE)) == [1]


def test_without_a_limit_only_those_under_way_are_waited_for() -> None:
    route = RecipientQueue(RecipientPolicy(most=0, abreast=2))
    for n in range(5):
        route.add(item(n))
    assert sizes(route.collect(NOW)) == [1, 1]
    assert route.next_wake() is None
    route.arrived()
    assert route.next_wake() == NOW
    assert sizes(route.collect(NOW)) == [1]


def test_the_first_of_an_episode_goes_at_once_and_the_others_follow_together() -> None:
    route = RecipientQueue(RecipientPolicy())
    assert route.admits(item(0, episode="walk"), NOW)
    assert not route.admits(item(1, episode="walk"), NOW + SECOND)
    for n in (1, 2, 3):
        route.add(item(n, due=NOW + n * SECOND, episode="walk"))
    route.add(item(4, due=NOW + 4 * SECOND, episode="another"))
    assert sizes(route.collect(NOW + 4 * SECOND)) == [1], "the other episode has its own first"
    assert route.next_wake() == NOW + MINUTE
    assert sizes(route.collect(NOW + MINUTE)) == [3]


def test_two_failures_in_a_row_close_the_way_and_then_one_at_a_time_asks() -> None:
    route = RecipientQueue(RecipientPolicy(most=0))
    for n in range(6):
        route.add(item(n))
    assert len(route.collect(NOW)) == 6
    closed = []
    for _ in range(6):
        route.failed(NOW + 5 * SECOND)
        closed.append(route.closed)
    assert not closed[0], "one failure may be the batch's own fault"
    assert closed[-1]
    for n in range(10, 14):
        route.add(item(n))
    assert not route.admits(item(20), NOW)
    assert route.next_wake() == NOW + 5 * SECOND
    assert sizes(route.collect(NOW + 5 * SECOND)) == [1]
    assert route.next_wake() is None, "nobody else while that one asks"
    assert route.arrived()
    assert sizes(route.collect(NOW + 5 * SECOND)) == [1, 1, 1]


def test_when_a_recipient_is_reached_again_no_delivery_waits_for_its_next_attempt() -> None:
    route = RecipientQueue(RecipientPolicy(most=0))
    tried, planned = item(1, due=NOW + 60 * MINUTE, attempt=3), item(2, due=NOW + 30 * MINUTE)
    route.add(tried)
    route.add(planned)
    route.hurry(NOW)
    assert route.collect(NOW) == [[tried]], "an escalation's time has not come"


def test_a_clock_that_is_set_changes_no_lengths() -> None:
    route = RecipientQueue(RecipientPolicy(most=1))
    assert route.admits(item(0), NOW)
    route.arrived()
    route.add(item(1, due=NOW, attempt=1))
    route.shift(100 * SECOND)
    assert route.next_wake() == NOW + 100 * SECOND + MINUTE


def test_a_policy_that_makes_no_sense_is_refused() -> None:
    for wrong in ({"most": -1}, {"window": 0}, {"together": -1}, {"abreast": 0}):
        with pytest.raises(Malformed):
            RecipientPolicy(**wrong)


def test_nothing_goes_out_at_once_before_what_is_due_already() -> None:
    route = RecipientQueue(RecipientPolicy(most=5))
    route.add(item(0))
    assert not route.admits(item(1), NOW)


def test_what_is_under_way_by_itself_is_not_collected_too() -> None:
    route = RecipientQueue(RecipientPolicy(most=5))
    first = item(0)
    assert route.admits(first, NOW)
    route.add(first)
    assert route.collect(NOW) == []


def test_episodes_that_are_over_are_forgotten_when_there_are_too_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recipient_queue, "EPISODES", 2)
    route = RecipientQueue(RecipientPolicy(most=0, together=MINUTE))
    for n in range(5):
        assert route.admits(item(n, episode=f"walk {n}"), NOW + n * MINUTE)
        route.arrived()
    assert len(route._episodes) <= 2


def test_a_first_urgent_delivery_goes_at_once_although_the_recipient_is_closed() -> None:
    """The last attempts have failed, and the next one is an hour away; the recipient may be back since."""
    route = RecipientQueue(RecipientPolicy().urgent, urgent=True)
    for n in range(2):
        assert route.admits(item(n), NOW)
        route.failed(NOW + HOUR)
        route.add(item(n, due=NOW + HOUR, attempt=5))
    assert route.closed
    assert route.admits(item(2), NOW + MINUTE)
    route.failed(NOW + HOUR)
    route.add(item(3, due=NOW + 2 * MINUTE))
    assert route.next_wake() == NOW + 2 * MINUTE
    (batch,) = route.collect(NOW + 2 * MINUTE)
    assert [one.ref.key for one in batch] == [item(3).ref.key]
    assert route.next_wake() is None, "the others wait for their hour"
    assert route.arrived()
    assert route.next_wake() == NOW + HOUR


def test_as_many_first_urgent_deliveries_are_under_way_as_there_is_room_for() -> None:
    route = RecipientQueue(RecipientPolicy(abreast=2).urgent, urgent=True)
    for n in range(3):
        route.add(item(n))
    assert len(route.collect(NOW)) == 2
    assert (route.next_wake(), route.collect(NOW)) == (None, [])
    route.failed(NOW + HOUR)
    assert route.next_wake() == NOW
    assert len(route.collect(NOW)) == 1


def test_an_urgent_delivery_that_is_under_way_already_does_not_go_out_twice() -> None:
    queue = RecipientQueue(RecipientPolicy(most=5).urgent, urgent=True)
    first, second = item(0), item(1)
    for one in (first, second):
        queue.add(one)
    first.under_way = True
    assert queue.collect(NOW) == [[second]]
