"""The queue of an engine: who waits for room, and in which order they are let in."""

from __future__ import annotations

import asyncio

from duly.core.messages import Message
from duly.core.steps import Arrived, Reachable
from duly.runtime.event_queue import LET_IN, SHARE, EventQueue


def sent_by(scope: str, n: int) -> Arrived:
    return Arrived(Message(scope, f"1700000000000_{n}", "lock_control", "lock", b"open"))


async def test_a_sender_that_waits_for_room_is_not_overtaken_by_itself() -> None:
    queue = EventQueue(10_000, fair=True)
    for n in range(SHARE):
        assert queue.offer(sent_by("ann", n), None)
    waiting = asyncio.ensure_future(queue.wait_for_room(sent_by("ann", SHARE)))
    await asyncio.sleep(0)
    queue.take(SHARE // 2, 1 << 30)
    assert not queue.offer(sent_by("ann", SHARE + 1), None), "one of its own waits outside"
    assert queue.offer(sent_by("bob", 0), None)
    queue.make_room()
    await waiting
    assert queue.offer(sent_by("ann", SHARE + 1), None)


async def test_only_a_few_are_let_in_at_once_and_all_of_them_at_the_end() -> None:
    queue = EventQueue(SHARE, fair=False)
    for n in range(SHARE):
        assert queue.offer(sent_by("ann", n), None)
    waiting = [asyncio.ensure_future(queue.wait_for_room(sent_by("ann", n))) for n in range(50)]
    await asyncio.sleep(0)
    queue.take(SHARE, 1 << 30)
    queue.make_room()
    await asyncio.sleep(0)
    assert sum(one.done() for one in waiting) == LET_IN
    queue.make_room(all_=True)
    await asyncio.gather(*waiting)


def test_what_was_taken_and_is_not_committed_keeps_its_room() -> None:
    queue = EventQueue(2, fair=True)
    assert queue.offer(Reachable("lock"), None)
    queue.take(1, 1 << 30)
    queue.reserve(1)
    assert queue.offer(Reachable("lock"), None)
    assert not queue.offer(Reachable("lock"), None)
    queue.reserve(0)
    assert queue.offer(Reachable("lock"), None)


def test_messages_are_removed_and_everything_else_stays() -> None:
    queue = EventQueue(10, fair=True)
    for event in (sent_by("ann", 0), Reachable("lock"), sent_by("bob", 1)):
        queue.append(event, None)
    assert queue.remove_arrivals() == [sent_by("ann", 0), sent_by("bob", 1)]
    assert queue.take(10, 1 << 30) == ([(Reachable("lock"), None)], 0)
