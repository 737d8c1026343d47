"""Fair reading: order for each sender, no waiting for others, and nothing ends it."""

from __future__ import annotations

import asyncio

from duly.core.retry import RetryPolicy
from duly.core.units import MS
from duly.errors import LedgerUnavailable
from duly.runtime.fair_reader import FairReader
from tests.guard import GUARD

QUICK = RetryPolicy.fixed(MS, tries=None)


async def test_each_senders_messages_are_handled_in_order_and_no_sender_waits_for_another() -> None:
    handled: list[str] = []
    slow, all_done = asyncio.Event(), asyncio.Event()

    async def handle(item: str) -> None:
        if item == "slow 0":
            await slow.wait()
        handled.append(item)
        if len(handled) == 6:
            all_done.set()

    reader = FairReader(handle, lambda *_: None, QUICK)
    for n in range(3):
        reader.put("slow", f"slow {n}")
        reader.put("quick", f"quick {n}")
    async with asyncio.timeout(GUARD):
        while len(handled) < 3:
            await asyncio.sleep(0)
        assert handled == ["quick 0", "quick 1", "quick 2"]
        slow.set()
        await all_done.wait()
    assert handled[3:] == ["slow 0", "slow 1", "slow 2"]
    await asyncio.sleep(0)
    assert len(reader) == 0


async def test_what_a_handler_raises_is_told_and_the_next_one_follows() -> None:
    failed: list[tuple[str, int, str]] = []
    done = asyncio.Event()

    async def handle(item: int) -> None:
        if item == 1:
            done.set()
            return
        raise AssertionError("a bug")

    reader = FairReader(handle, lambda *what: failed.append((what[0], what[1], str(what[2]))), QUICK)
    reader.put("a", 0)
    reader.put("a", 1)
    async with asyncio.timeout(GUARD):
        await done.wait()
    assert failed == [("a", 0, "a bug")]


async def test_a_ledger_that_is_away_is_waited_for() -> None:
    tries: list[int] = []
    done = asyncio.Event()

    async def handle(item: int) -> None:
        tries.append(item)
        if len(tries) < 3:
            raise LedgerUnavailable("away")
        done.set()

    reader = FairReader(handle, lambda *_: None, QUICK)
    reader.put("a", 7)
    async with asyncio.timeout(GUARD):
        await done.wait()
    assert tries == [7, 7, 7]
    await reader.stop()
