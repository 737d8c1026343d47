"""Who is told what, and when again: the subscriptions on a clock that is moved by hand."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from duly.apps.chat import conversations as c
from duly.apps.chat.connections import FEEDS, Connections
from duly.apps.chat.reader_cursors import ReaderCursors
from duly.apps.chat.receipts import AwaitedReceipt
from duly.apps.chat.subscriptions import AGAIN, WOKEN, Subscriptions
from duly.core.operations import AppendEntry, PutItem
from duly.core.steps import Step
from duly.core.units import MS, SECOND
from duly.identity.accounts import Principal, Role
from duly.runtime.tasks import Supervisor
from duly.storage.ledger import StreamEntry
from duly.storage.memory import MemoryLedger
from duly.testing.clocks import ManualClock
from duly.wire.outgoing import LineFrame, OutgoingFrame, encode
from duly.wire.session import UncongestedSession

CONV = "ann+bob"


class Socket(UncongestedSession):
    """A connection that remembers what was pushed to it."""

    def __init__(self) -> None:
        self.told: list[tuple[int, int]] = []
        """(number, attempt) of every line"""

    def push(self, frame: OutgoingFrame) -> None:
        assert isinstance(frame, LineFrame)
        assert frame.n is not None
        self.told.append((frame.n, frame.attempt or 1))

    def close(self, reason: str) -> None:
        raise AssertionError(reason)


class Room:
    """Bob is here, and listens to Ann."""

    def __init__(self) -> None:
        self.clock = ManualClock(10**15)
        self.ledger = MemoryLedger(self.clock)
        self.tasks = Supervisor()
        self.connections = Connections()
        self.cursors = ReaderCursors(lambda conv, readers: None, lambda: None)
        self.subscriptions = Subscriptions(
            self.ledger,
            self.connections,
            self.cursors,
            self.tasks,
            now=self.clock.now,
            nudge=self._nudged,
        )
        self.nudges: list[int | None] = []
        """when the subscriptions wanted to be woken, each time it said so"""
        self.bob, self._ann = Socket(), Socket()

    def _nudged(self) -> None:
        self.nudges.append(self.subscriptions.next_wake())

    async def begin(self) -> None:
        await self.ledger.write(PutItem(c.convs("bob"), CONV, b""))
        self.subscriber = self.connections.add(self.bob, Principal("bob", Role.USER))
        await self.subscriptions.load_subscriptions(self.subscriber, None)
        self.subscriptions.begin(self.subscriber)

    async def say(self) -> None:
        line = LineFrame("one_chat", "1_1", "ann")
        now = self.clock.now()
        n = await self.ledger.apply(AppendEntry(c.stream(CONV), encode(line), now))
        assert isinstance(n, int)
        self.subscriptions.tell(CONV, n, c.show(CONV, n, line, now), self._ann, now)

    async def wait(self, seconds: float) -> None:
        """Let time pass, and the timers with it."""
        end = self.clock.now() + round(seconds * SECOND)
        while (due := self.subscriptions.next_wake()) is not None and due <= end:
            self.clock.set(max(due, self.clock.now()))
            self.subscriptions.wake(self.clock.now())
            await self.settle()
        self.clock.set(end)

    async def settle(self) -> None:
        """Until everything is done that was begun, and stored what an engine would store."""
        await self.tasks.finish()
        for step in self.cursors.take():
            assert isinstance(step, Step)
            await self.ledger.write(*step.writes)
        assert not self.tasks.failures

    async def noted(self) -> AwaitedReceipt | None:
        """What the ledger says of Bob's silence."""
        note = await self.ledger.item(c.waiting(CONV), "bob")
        return None if note is None else msgspec.json.decode(note, type=AwaitedReceipt)


@pytest.fixture
async def room() -> Room:
    room = Room()
    await room.begin()
    return room


async def test_what_is_not_acknowledged_is_told_again_ever_more_slowly(room: Room) -> None:
    await room.say()
    assert room.bob.told == [(1, 1)]
    first = (AGAIN.delay(1, CONV.encode()) or 0) / SECOND
    await room.wait(first - 0.1)
    assert room.bob.told == [(1, 1)]
    await room.wait(0.2)
    assert room.bob.told == [(1, 1), (1, 2)]
    await room.wait(first)
    assert len(room.bob.told) == 2, "twice as long"
    await room.wait(60)
    assert [attempt for _, attempt in room.bob.told] == list(range(1, len(room.bob.told) + 1))
    room.subscriptions.acknowledge(room.subscriber, CONV, 1)
    told = len(room.bob.told)
    await room.wait(600)
    assert len(room.bob.told) == told


async def test_in_a_lively_talk_nothing_is_told_again(room: Room) -> None:
    """Something is always on its way; what counts is how long the oldest of it has been."""
    for n in range(1, 301):
        await room.say()
        await room.wait(0.1)
        room.subscriptions.acknowledge(room.subscriber, CONV, n - 1)
    assert room.bob.told == [(n, 1) for n in range(1, 301)]
    await room.wait(7)
    assert room.bob.told[300:] == [(300, 2)]


async def test_a_line_after_an_acknowledged_one_is_waited_for_since_it_was_sent(
    room: Room,
) -> None:
    """Also if it was read from the ledger, and while the timer of the line before is still set."""
    first = (AGAIN.delay(1, CONV.encode()) or 0) / SECOND
    await room.say()
    room.subscriptions.acknowledge(room.subscriber, CONV, 1)
    await room.wait(0.5)
    line = LineFrame("one_chat", "1_2", "ann")
    await room.ledger.apply(AppendEntry(c.stream(CONV), encode(line), room.clock.now()))
    room.subscriptions.raise_head(CONV, 2)
    await room.settle()
    assert room.bob.told == [(1, 1), (2, 1)]
    await room.wait(first - 0.1)
    assert room.bob.told == [(1, 1), (2, 1)]
    await room.wait(0.2)
    assert room.bob.told == [(1, 1), (2, 1), (2, 2)]


async def test_what_is_told_in_passing_waits_for_the_welcome(room: Room) -> None:
    """Who comes is known to others, and told by them, before their own places are read."""
    phone = Socket()
    subscriber = room.connections.add(phone, Principal("bob", Role.USER))
    assert room.connections.of_person("bob") == [room.subscriber, subscriber]
    subscriber.pass_on(LineFrame("receipt", n=7))
    assert phone.told == []
    await room.subscriptions.load_subscriptions(subscriber, None)
    room.subscriptions.begin(subscriber)
    subscriber.pass_on(LineFrame("receipt", n=8))
    assert phone.told == [(7, 1), (8, 1)]


async def test_a_timer_that_is_set_between_two_steps_is_said_to_the_engine(room: Room) -> None:
    """A line that was said at another hub is read from the ledger, while the engine here sleeps."""
    line = b'{"type":"one_chat","seq_id":"1_1","from":"ann"}'
    await room.ledger.write(AppendEntry(c.stream(CONV), line, room.clock.now()))
    assert room.nudges == []
    room.subscriptions.refresh(CONV)
    await room.settle()
    assert room.bob.told == [(1, 1)]
    assert room.nudges[-1] == room.subscriptions.next_wake()
    assert room.nudges[-1] is not None


async def test_who_does_not_acknowledge_for_a_second_is_noted_until_they_do(room: Room) -> None:
    await room.say()
    await room.wait(0.9)
    assert await room.noted() is None
    since = (room.clock.now() - round(0.9 * SECOND)) // MS
    await room.wait(0.2)
    assert await room.noted() == AwaitedReceipt(0, 1, 1, since)
    await room.wait(5)
    assert await room.noted() == AwaitedReceipt(0, 1, 2, since)
    room.subscriptions.acknowledge(room.subscriber, CONV, 1)
    await room.settle()
    assert await room.noted() is None


async def test_in_a_lively_conversation_no_reader_is_noted(room: Room) -> None:
    for n in range(1, 40):
        await room.say()
        await room.wait(0.3)
        room.subscriptions.acknowledge(room.subscriber, CONV, n)
        await room.settle()
        assert await room.noted() is None


async def test_thousands_of_conversations_are_read_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    room = Room()
    convs = [f"ann{i}+bob" for i in range(2_000)]
    for conv in convs:
        line = LineFrame("one_chat", "1_1", "ann")
        await room.ledger.write(
            PutItem(c.convs("bob"), conv, b""), AppendEntry(c.stream(conv), encode(line), room.clock.now())
        )
    reading = most = 0
    entries = room.ledger.entries

    async def slow_entries(stream: str, after: int, limit: int) -> list[StreamEntry]:
        nonlocal reading, most
        reading += 1
        most = max(most, reading)
        await asyncio.sleep(0)
        reading -= 1
        return await entries(stream, after, limit)

    monkeypatch.setattr(room.ledger, "entries", slow_entries)
    await room.begin()
    await room.tasks.finish()
    assert len(room.bob.told) == len(convs)
    assert 1 < most <= FEEDS
    room.clock.advance(10)
    room.subscriptions.wake(room.clock.now())
    await room.settle()
    assert room.bob.told.count((1, 2)) == WOKEN
    await room.wait(0)
    assert room.bob.told.count((1, 2)) == len(convs)
