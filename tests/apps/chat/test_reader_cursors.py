"""How far readers have come is stored once, the newest of each, in the flush of the lines that came with it;
also after a ledger that failed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from duly.apps.chat import conversations as c
from duly.apps.chat.conversations import Request
from duly.apps.chat.line_store import LineStore, RequestOrigin
from duly.apps.chat.reader_cursors import ReaderCursors
from duly.apps.chat.receipts import AwaitedReceipt
from duly.core.messages import Message
from duly.core.operations import AppendEntry, Group, Results
from duly.core.steps import Arrived, MachineEffect
from duly.errors import LedgerUnavailable
from duly.runtime.engine import Engine, no_effect
from duly.storage.memory import MemoryLedger
from duly.testing.clocks import ManualClock
from duly.wire.outgoing import LineFrame, OutgoingFrame
from duly.wire.session import UncongestedSession

CONV = "ann+bob"


class IdleTimers:
    """Subscriptions without any."""

    def wake(self, now: int) -> None:
        pass

    def next_wake(self) -> int | None:
        return None

    def shift(self, by: int) -> None:
        pass

    def restored(self) -> None:
        pass


class LineSocket(UncongestedSession):
    """The connection of a person who sends a line."""

    def push(self, frame: OutgoingFrame) -> None:
        pass

    def close(self, reason: str) -> None:
        raise AssertionError(reason)


class CountingLedger(MemoryLedger):
    """A ledger in memory that counts its flushes, and fails when told to."""

    flushes = 0
    broken = False

    async def commit(self, groups: Sequence[Group]) -> list[Results]:
        self.flushes += 1
        if self.broken:
            raise LedgerUnavailable("the disk is full")
        return await super().commit(groups)


class Readers:
    """The cursors of a ledger in memory, the engine that stores them, and what was said of them."""

    def __init__(self) -> None:
        self.ledger = CountingLedger(ManualClock(10**15))
        self.moved: list[tuple[str, int]] = []
        self.commits: list[str] = []
        """the conversation of every call"""
        self.cursors = ReaderCursors(self._moved, self._nudged)
        self.engine = Engine(
            LineStore(IdleTimers(), self.cursors),
            self.ledger,
            no_effect,
            performers={MachineEffect: self.cursors.perform},
        )

    def _nudged(self) -> None:
        self.engine.nudge()

    def _moved(self, conv: str, readers: Sequence[tuple[str, int]]) -> None:
        self.commits.append(conv)
        self.moved += readers

    async def say(self, lines: int) -> None:
        for _ in range(lines):
            await self.ledger.apply(AppendEntry(c.stream(CONV), b"{}", 1))

    async def stored(self) -> int:
        """Return Bob's position when everything is stored."""
        while self.cursors.next_wake() is not None or self.engine._flushing is not None:
            await asyncio.sleep(0)
        return await self.ledger.cursor(c.stream(CONV), "bob")


@pytest.fixture
async def readers() -> Readers:
    readers = Readers()
    await readers.say(3)
    await readers.engine.start()
    readers.ledger.flushes = 0
    return readers


async def test_only_the_newest_of_what_gathers_is_stored(readers: Readers) -> None:
    for n in (1, 3, 2):
        readers.cursors.move(CONV, "bob", n)
    assert await readers.stored() == 3
    assert readers.moved == [("bob", 3)]
    assert readers.ledger.flushes == 1
    await readers.engine.stop()


async def test_positions_are_stored_in_the_flush_of_the_lines_that_came_with_them(readers: Readers) -> None:
    line = LineFrame("one_chat", "1000000000000_1", "ann")
    message = Message("ann", "1000000000000_1", "one_chat", "bob", b"")
    readers.cursors.move(CONV, "bob", 3)
    readers.engine.offer(Arrived(message, RequestOrigin(LineSocket(), Request(message, CONV, line))))
    readers.cursors.move(CONV, "r:bob", 2)
    assert await readers.stored() == 3
    assert (await readers.ledger.extent(c.stream(CONV))).last == 4
    assert readers.ledger.flushes == 1
    await readers.engine.stop()


async def test_the_readers_of_a_conversation_are_told_of_together(readers: Readers) -> None:
    readers.cursors.move(CONV, "bob", 2)
    readers.cursors.move(CONV, "r:bob", 1)
    readers.cursors.move("#team", "bob", 0)
    readers.cursors.move(CONV, "ann", 3)
    await readers.stored()
    assert readers.moved == [("bob", 2), ("r:bob", 1), ("ann", 3)]
    assert readers.commits == [CONV]
    await readers.engine.stop()


async def test_a_reader_who_does_not_acknowledge_is_noted_until_they_do(readers: Readers) -> None:
    readers.cursors.note_waiting(CONV, "bob", AwaitedReceipt(0, 1, 2, 5))
    await readers.stored()
    assert list(await readers.ledger.bucket(c.waiting(CONV))) == ["bob"]
    readers.cursors.note_waiting(CONV, "bob", None)
    await readers.stored()
    assert await readers.ledger.bucket(c.waiting(CONV)) == {}
    await readers.engine.stop()


async def test_what_could_not_be_stored_is_stored_when_the_ledger_is_back(readers: Readers) -> None:
    readers.ledger.broken = True
    readers.cursors.move(CONV, "bob", 1)
    readers.cursors.note_waiting(CONV, "bob", AwaitedReceipt(0, 1, 2, 5))
    while readers.engine.down is None:
        await asyncio.sleep(0)
    readers.cursors.move(CONV, "bob", 2)
    readers.cursors.note_waiting(CONV, "bob", None)
    assert readers.moved == []
    readers.ledger.broken = False
    readers.engine.hurry()
    assert await readers.stored() == 2
    assert readers.moved == [("bob", 2)]
    assert await readers.ledger.bucket(c.waiting(CONV)) == {}, "the newer note takes precedence"
    await readers.engine.stop()


async def test_an_engine_that_stops_does_not_try_for_ever_to_store_them(readers: Readers) -> None:
    readers.ledger.broken = True
    readers.cursors.move(CONV, "bob", 1)
    readers.cursors.stop()
    await readers.engine.stop()
    assert readers.ledger.flushes <= 2
