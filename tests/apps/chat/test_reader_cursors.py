"""How far readers have come is stored once, the newest of each, also after a ledger that failed."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from duly.apps.chat import conversations as c
from duly.apps.chat.reader_cursors import ReaderCursors
from duly.apps.chat.receipts import AwaitedReceipt
from duly.core.operations import AppendEntry
from duly.errors import LedgerUnavailable
from duly.runtime.tasks import Supervisor
from duly.storage.memory import MemoryLedger
from duly.testing.clocks import ManualClock

CONV = "ann+bob"


class Readers:
    """The cursors of a ledger in memory, and what was said of them."""

    def __init__(self) -> None:
        self.ledger = MemoryLedger(ManualClock(10**15))
        self.tasks = Supervisor()
        self.moved: list[tuple[str, int]] = []
        self.commits: list[str] = []
        """the conversation of every call"""
        self.cursors = ReaderCursors(self.ledger, self.tasks, self._moved)

    def _moved(self, conv: str, readers: Sequence[tuple[str, int]]) -> None:
        self.commits.append(conv)
        self.moved += readers

    async def say(self, lines: int) -> None:
        for _ in range(lines):
            await self.ledger.apply(AppendEntry(c.stream(CONV), b"{}", 1))

    async def stored(self) -> int:
        await self.tasks.finish()
        return await self.ledger.cursor(c.stream(CONV), "bob")


async def test_only_the_newest_of_what_gathers_is_stored() -> None:
    readers = Readers()
    await readers.say(3)
    for n in (1, 3, 2):
        readers.cursors.move(CONV, "bob", n)
    assert await readers.stored() == 3
    assert readers.moved == [("bob", 3)]


async def test_the_readers_of_a_conversation_are_told_of_together() -> None:
    readers = Readers()
    await readers.say(3)
    readers.cursors.move(CONV, "bob", 2)
    readers.cursors.move(CONV, "r:bob", 1)
    readers.cursors.move("#team", "bob", 0)
    readers.cursors.move(CONV, "ann", 3)
    await readers.stored()
    assert readers.moved == [("bob", 2), ("r:bob", 1), ("ann", 3)]
    assert readers.commits == [CONV]


async def test_a_reader_who_does_not_acknowledge_is_noted_until_they_do() -> None:
    readers = Readers()
    readers.cursors.note_waiting(CONV, "bob", AwaitedReceipt(0, 1, 2, 5))
    await readers.tasks.finish()
    assert list(await readers.ledger.bucket(c.waiting(CONV))) == ["bob"]
    readers.cursors.note_waiting(CONV, "bob", None)
    await readers.tasks.finish()
    assert await readers.ledger.bucket(c.waiting(CONV)) == {}


async def test_what_could_not_be_stored_is_stored_when_the_ledger_is_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    readers = Readers()
    await readers.say(2)

    async def unavailable(*_: object) -> None:
        raise LedgerUnavailable("the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(readers.ledger, "write", unavailable)
        readers.cursors.move(CONV, "bob", 2)
        assert await readers.stored() == 0
        assert readers.moved == []
    readers.cursors.save()
    assert await readers.stored() == 2
    assert readers.moved == [("bob", 2)]
