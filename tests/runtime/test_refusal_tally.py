"""Refusals in floods: all are counted, few are rows."""

from __future__ import annotations

import asyncio

from duly.runtime.activity_log import ActivityLog
from duly.runtime.refusal_tally import KINDS, REASONS, RefusalTally
from duly.storage.memory import MemoryLedger
from duly.testing import ManualClock
from tests.guard import GUARD


async def test_alike_refusals_become_one_row_that_says_how_many() -> None:
    ledger = MemoryLedger()
    tally = RefusalTally(ActivityLog(ledger), period=60)
    tally.note("bad", "nodes/hub/ack", "forged", "no")
    async with asyncio.timeout(GUARD):
        while not await ledger.refusals():
            await asyncio.sleep(0)
    for _ in range(1_000):
        tally.note("bad", "nodes/hub/ack", "forged", "no")
    await tally.stop()
    assert [(r.scope, r.id, r.reason) for r in await ledger.refusals()] == [
        ("bad", "nodes/hub/ack", "no (1,000 times)"),
        ("bad", "nodes/hub/ack", "no"),
    ]
    assert tally.total == 1_001


async def test_what_is_counted_is_recorded_before_it_is_shown_with_its_own_time() -> None:
    clock = ManualClock(1_000)
    ledger = MemoryLedger(clock)
    activity = ActivityLog(ledger)
    tally = RefusalTally(activity, period=60)
    tally.note("bad", "1", "forged", "no")
    await asyncio.sleep(0.01)
    clock.set(1_005)
    tally.note("bad", "2", "forged", "no")
    clock.set(1_010)
    await activity.settle()
    assert [(one.id, one.at) for one in await ledger.refusals()] == [("2", 1_005), ("1", 1_000)]
    await tally.stop()


async def test_a_flood_of_kinds_is_bounded_and_the_rest_counted_together() -> None:
    ledger = MemoryLedger()
    tally = RefusalTally(ActivityLog(ledger), period=60)
    for n in range(10_000):
        tally.note(f"bad-{n}", "x", "forged", "no")
    await tally.stop()
    rows = await ledger.refusals(10_000)
    assert len(rows) == KINDS + 1
    assert [r.reason for r in rows if r.id == "(others)"] == [f"no ({10_000 - KINDS:,} times)"]


async def test_different_reasons_of_one_kind_are_told_apart_and_bounded() -> None:
    ledger = MemoryLedger()
    tally = RefusalTally(ActivityLog(ledger), period=60)
    for act in ("publish", "subscribe", "publish"):
        tally.note("bad", "nodes/lock/pending", "not_allowed", f"may not {act}")
    await tally.stop()
    assert {r.reason for r in await ledger.refusals()} == {"may not publish (2 times)", "may not subscribe"}
    for n in range(1_000):
        tally.note("bad", "nodes/hub/complete", "forged", f"guess {n}")
    await tally.stop()
    guesses = [r.reason for r in await ledger.refusals(10_000) if r.word == "forged"]
    assert sorted(guesses) == [
        "guess 0", "guess 1", "guess 2", "guess 3", f"guess 999 ({1_000 - REASONS + 1} times)"
    ]  # fmt: skip
