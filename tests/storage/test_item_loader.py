"""Items are read as they stand, and what is asked for together is one question."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from duly.core.operations import PutItem
from duly.errors import LedgerUnavailable, Malformed, Stopped
from duly.storage.item_loader import ItemLoader
from duly.storage.memory import MemoryLedger
from tests.guard import GUARD


class SlowItems(MemoryLedger):
    """Counts questions; each takes a while, or fails."""

    def __init__(self) -> None:
        super().__init__()
        self.questions: list[int] = []
        self.broken = False

    async def items(self, places: Sequence[tuple[str, str]]) -> list[bytes | None]:
        self.questions.append(len(places))
        if self.broken:
            raise LedgerUnavailable("away")
        found = await super().items(places)
        await asyncio.sleep(0.01)
        return found


async def test_what_is_asked_for_together_is_one_question() -> None:
    ledger = SlowItems()
    await ledger.write(PutItem("s", "a", b"1"))
    loader = ItemLoader(ledger)
    found = await asyncio.gather(*(loader.get(("s", "a"), ("s", str(n % 10))) for n in range(100)))
    assert found == [[b"1", None]] * 100
    assert ledger.questions == [11]


async def test_who_asks_during_a_read_hears_of_what_was_written_before_they_asked() -> None:
    ledger = SlowItems()
    loader = ItemLoader(ledger)
    first = asyncio.create_task(loader.get(("s", "a")))
    while not ledger.questions:
        await asyncio.sleep(0)
    await ledger.write(PutItem("s", "a", b"new"))
    assert await loader.get(("s", "a")) == [b"new"]
    assert await first == [None]
    assert ledger.questions == [1, 1]


async def test_a_ledger_that_fails_fails_those_who_asked_and_no_others() -> None:
    ledger = SlowItems()
    loader = ItemLoader(ledger)
    ledger.broken = True
    ended = await asyncio.gather(*(loader.get(("s", "a")) for _ in range(3)), return_exceptions=True)
    assert [type(end) for end in ended] == [LedgerUnavailable] * 3
    ledger.broken = False
    assert await loader.get(("s", "a")) == [None]


async def test_a_caller_that_gives_up_takes_no_other_along() -> None:
    ledger = SlowItems()
    loader = ItemLoader(ledger)
    impatient, patient = (asyncio.create_task(loader.get(("s", "a"))) for _ in range(2))
    await asyncio.sleep(0)
    impatient.cancel()
    assert await patient == [None]
    with pytest.raises(asyncio.CancelledError):
        await impatient


async def test_a_read_that_finds_the_ledger_away_answers_who_asked_meanwhile() -> None:
    ledger = SlowItems()
    loader = ItemLoader(ledger)
    away = asyncio.Event()

    async def hang(places: Sequence[tuple[str, str]]) -> list[bytes | None]:
        ledger.questions.append(len(places))
        await away.wait()
        raise LedgerUnavailable("away")

    ledger.items = hang  # type: ignore[method-assign]  # a ledger that does not answer
    first = asyncio.create_task(loader.get(("s", "a")))
    while not ledger.questions:
        await asyncio.sleep(0)
    second = asyncio.create_task(loader.get(("s", "b")))
    await asyncio.sleep(0)
    away.set()
    ended = await asyncio.gather(first, second, return_exceptions=True)
    assert [type(end) for end in ended] == [LedgerUnavailable] * 2
    assert ledger.questions == [1], "the second waited for a read of its own"


async def test_an_error_of_any_kind_reaches_every_caller() -> None:
    ledger = SlowItems()
    loader = ItemLoader(ledger)

    async def broken(places: Sequence[tuple[str, str]]) -> list[bytes | None]:
        raise ZeroDivisionError

    ledger.items = broken  # type: ignore[method-assign]  # a ledger with a bug
    async with asyncio.timeout(GUARD):
        ended = await asyncio.gather(*(loader.get(("s", "a")) for _ in range(3)), return_exceptions=True)
    assert [type(end) for end in ended] == [ZeroDivisionError] * 3


async def test_a_request_that_cannot_be_read_fails_its_own_caller_alone() -> None:
    ledger = SlowItems()
    await ledger.write(PutItem("s", "a", b"1"))
    loader = ItemLoader(ledger)
    read = ledger.items

    async def picky(places: Sequence[tuple[str, str]]) -> list[bytes | None]:
        if ("s", "bad\0") in places:
            raise Malformed("a name with NUL")
        return await read(places)

    ledger.items = picky  # type: ignore[method-assign]  # PostgreSQL cannot look for such a name
    names = ("a", "bad\0", "a", "b")
    async with asyncio.timeout(GUARD):
        ended = await asyncio.gather(*(loader.get(("s", name)) for name in names), return_exceptions=True)
    assert ended[0] == ended[2] == [b"1"]
    assert ended[3] == [None]
    assert isinstance(ended[1], Malformed)


async def test_a_reader_that_is_ended_answers_everyone() -> None:
    ledger = SlowItems()
    loader = ItemLoader(ledger)
    first = asyncio.create_task(loader.get(("s", "a")))
    while not ledger.questions:
        await asyncio.sleep(0)
    second = asyncio.create_task(loader.get(("s", "b")))
    await asyncio.sleep(0)
    assert loader._reading is not None
    loader._reading.cancel()
    async with asyncio.timeout(GUARD):
        ended = await asyncio.gather(first, second, return_exceptions=True)
    assert [type(end) for end in ended] == [Stopped] * 2
