"""The queue of one lane."""

from __future__ import annotations

from duly.core.lane import Lane, Release
from duly.core.messages import Message


def release(scope: str, n: int) -> Release:
    return Release(Message(scope, f"1700000000000_{n}", "k", "lamp"), f"mark of {scope}", n, n, -1)


def test_what_a_sender_sent_earlier_goes_before_its_later_ones_and_behind_those_of_others() -> None:
    lane = Lane(1)
    for queued in (release("app", 1), release("app", 5), release("tablet", 0), release("app", 3)):
        lane.add(queued)
    order = [(queued.message.scope, queued.n) for queued in (lane.pop() for _ in range(4))]
    assert order == [("app", 1), ("app", 3), ("app", 5), ("tablet", 0)]
    assert lane.empty


def test_what_has_ended_while_it_waited_is_passed_over() -> None:
    lane = Lane(1)
    ended, waits = release("app", 1), release("app", 2)
    for queued in (ended, waits):
        lane.add(queued)
    lane.drop(ended.message.key)
    assert lane.peek(0) is waits
    assert lane.pop() is waits
    assert lane.empty
